// Ring<T>: a first-in first-out queue in one block of memory, which now and then lets one go first. Grows by doubling
// and never shrinks, so a queue whose length is bounded by what the connection allows stops allocating once it has seen
// its longest.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "base/check.h"

namespace stagecoach::rpcrdma {

template <typename T>
class Ring {
 public:
  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }

  void push(T value) {
    if (size_ == slots_.size()) Grow();
    slots_[(head_ + size_) & (slots_.size() - 1)] = std::move(value);
    ++size_;
  }
  // Ahead of all others.
  void push_front(T value) {
    if (size_ == slots_.size()) Grow();
    head_ = (head_ + slots_.size() - 1) & (slots_.size() - 1);
    slots_[head_] = std::move(value);
    ++size_;
  }
  T& front() {
    STAGECOACH_CHECK(size_ > 0);
    return slots_[head_];
  }
  T pop() {
    STAGECOACH_CHECK(size_ > 0);
    T value = std::move(slots_[head_]);
    head_ = (head_ + 1) & (slots_.size() - 1);
    --size_;
    return value;
  }
  // The i-th element from the front.
  const T& operator[](size_t i) const { return slots_[(head_ + i) & (slots_.size() - 1)]; }
  // Removes the first element equal to `value`, keeping the order of the others; linear.
  template <typename U>
  bool Remove(const U& value) {
    for (size_t i = 0; i < size_; ++i) {
      if (!((*this)[i] == value)) continue;
      for (size_t j = i + 1; j < size_; ++j) At(j - 1) = std::move(At(j));
      --size_;
      return true;
    }
    return false;
  }
  void clear() {
    while (!empty()) pop();
  }

 private:
  T& At(size_t i) { return slots_[(head_ + i) & (slots_.size() - 1)]; }
  void Grow() {
    std::vector<T> larger(slots_.empty() ? 16 : slots_.size() * 2);
    for (size_t i = 0; i < size_; ++i) larger[i] = std::move(At(i));
    slots_ = std::move(larger);
    head_ = 0;
  }

  std::vector<T> slots_;  // a power of two
  size_t head_ = 0;
  size_t size_ = 0;
};

}  // namespace stagecoach::rpcrdma
