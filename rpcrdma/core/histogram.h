// Histogram: how often values of each magnitude occurred. Plain values in constant memory; cheap enough for every call.
//
// Bucket i counts the values above 2^(i-1) and up to 2^i; the first those up to 1, the last all that are larger. The
// unit is the owner's choice: bytes, or microseconds with RecordTime().
//
// Not thread-safe.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/time.h"

namespace stagecoach::rpcrdma {

class Histogram {
 public:
  // 2^30 is the largest bound: a GiB, or 18 minutes.
  static constexpr size_t kBounds = 31;

  void Record(uint64_t value) {
    const size_t bucket = value <= 1 ? 0 : static_cast<size_t>(std::bit_width(value - 1));
    ++counts_[std::min(bucket, kBounds)];
    sum_ += value;
  }
  // In microseconds, those begun counted whole. What is negative counts as nothing.
  void RecordTime(Duration time) {
    const auto nanoseconds = std::max<Duration::rep>(time.count(), 0);
    Record((static_cast<uint64_t>(nanoseconds) + 999) / 1000);
  }

  static constexpr uint64_t bound(size_t bucket) { return uint64_t{1} << bucket; }
  // Of values in bucket `bucket`; kBounds is the one without a bound.
  uint64_t count(size_t bucket) const { return counts_[bucket]; }
  uint64_t count() const {
    uint64_t total = 0;
    for (const uint64_t one : counts_) total += one;
    return total;
  }
  uint64_t sum() const { return sum_; }

  Histogram& operator+=(const Histogram& other) {
    for (size_t i = 0; i < counts_.size(); ++i) counts_[i] += other.counts_[i];
    sum_ += other.sum_;
    return *this;
  }

 private:
  std::array<uint64_t, kBounds + 1> counts_ = {};
  uint64_t sum_ = 0;
};

}  // namespace stagecoach::rpcrdma
