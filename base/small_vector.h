// SmallVector<T, N>: a growable array that keeps its first N elements in itself.
//
// For lists whose usual length is known and whose bound is enforced by the caller before it appends (chunk lists, piece
// lists): in the usual case nothing is allocated. Elements are trivially copyable values. References and spans into it
// are invalidated by anything that changes its size, and by moving it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <initializer_list>
#include <span>
#include <type_traits>
#include <vector>

#include "base/check.h"

namespace stagecoach {

template <typename T, size_t N>
class SmallVector {
  static_assert(std::is_trivially_copyable_v<T> && std::is_default_constructible_v<T>);
  static_assert(N > 0);

 public:
  using value_type = T;
  using iterator = T*;
  using const_iterator = const T*;

  SmallVector() = default;
  SmallVector(std::initializer_list<T> values) { append(std::span<const T>(values.begin(), values.size())); }
  explicit SmallVector(std::span<const T> values) { append(values); }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* data() { return heap_.empty() ? inline_.data() : heap_.data(); }
  const T* data() const { return heap_.empty() ? inline_.data() : heap_.data(); }
  T* begin() { return data(); }
  T* end() { return data() + size_; }
  const T* begin() const { return data(); }
  const T* end() const { return data() + size_; }
  T& operator[](size_t i) { return data()[i]; }
  const T& operator[](size_t i) const { return data()[i]; }
  T& front() { return data()[0]; }
  const T& front() const { return data()[0]; }
  T& back() { return data()[size_ - 1]; }
  const T& back() const { return data()[size_ - 1]; }

  operator std::span<const T>() const { return {data(), size_}; }
  operator std::span<T>() { return {data(), size_}; }
  std::span<const T> view() const { return {data(), size_}; }

  // Whether the elements still live inside the object.
  bool is_inline() const { return heap_.empty(); }

  void push_back(const T& value) {
    const T copy = value;  // `value` may be an element of this very list.
    if (heap_.empty() && size_ < N) {
      inline_[size_++] = copy;
      return;
    }
    if (heap_.empty()) {
      heap_.reserve(2 * N);
      heap_.assign(inline_.begin(), inline_.begin() + size_);
    }
    heap_.push_back(copy);
    ++size_;
  }
  void append(std::span<const T> values) {
    for (const T& value : values) push_back(value);
  }
  void insert_at(size_t index, const T& value) {
    STAGECOACH_CHECK(index <= size_);
    push_back(value);
    std::rotate(begin() + index, end() - 1, end());
  }
  void clear() {
    heap_.clear();
    size_ = 0;
  }

  friend bool operator==(const SmallVector& a, const SmallVector& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  }

 private:
  // Either everything is in inline_ (heap_ empty) or everything is in heap_.
  std::array<T, N> inline_{};
  std::vector<T> heap_;
  size_t size_ = 0;
};

}  // namespace stagecoach
