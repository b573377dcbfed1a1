// Ring: a FIFO in one growing array. After the first few pushes it allocates no more, unlike std::deque, whose blocks
// come and go as the queue moves on.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "base/check.h"

namespace stagecoach::emu {

template <typename T>
class Ring {
 public:
  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }

  // Counted from the front.
  T& operator[](size_t index) {
    STAGECOACH_CHECK(index < size_);
    return slots_[Slot(index)];
  }
  const T& operator[](size_t index) const {
    STAGECOACH_CHECK(index < size_);
    return slots_[Slot(index)];
  }
  T& front() { return (*this)[0]; }
  const T& front() const { return (*this)[0]; }
  T& back() { return (*this)[size_ - 1]; }

  T& push_back(T value) {
    if (size_ == slots_.size()) Grow();
    T& slot = slots_[Slot(size_)];
    slot = std::move(value);
    ++size_;
    return slot;
  }
  void pop_front() {
    STAGECOACH_CHECK(size_ > 0);
    first_ = Slot(1);
    --size_;
  }
  void pop_back() {
    STAGECOACH_CHECK(size_ > 0);
    --size_;
  }
  void clear() {
    first_ = 0;
    size_ = 0;
  }

 private:
  size_t Slot(size_t index) const { return (first_ + index) & (slots_.size() - 1); }
  void Grow() {
    std::vector<T> larger(slots_.empty() ? 16 : slots_.size() * 2);  // a power of two, so that Slot() can mask
    for (size_t i = 0; i < size_; ++i) larger[i] = std::move(slots_[Slot(i)]);
    slots_ = std::move(larger);
    first_ = 0;
  }

  std::vector<T> slots_;
  size_t first_ = 0;
  size_t size_ = 0;
};

}  // namespace stagecoach::emu
