// How fuzz targets read their input, and what they do when a property does not hold.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/bytes.h"
#include "base/check.h"

namespace stagecoach::testing {

// In a fuzz target a broken property is a finding whatever its cause, so it ends the program as a CHECK does.
#define FUZZ_PROPERTY(condition) STAGECOACH_CHECK(condition)

// Takes choices from the front of the input; zeros when it is used up.
class FuzzInput {
 public:
  FuzzInput(const uint8_t* data, size_t size) : rest_(AsBytes(data, size)) {}
  uint8_t Byte() {
    if (rest_.empty()) return 0;
    const auto value = std::to_integer<uint8_t>(rest_[0]);
    rest_ = rest_.subspan(1);
    return value;
  }
  // At most `size` bytes, as many as are left.
  ConstBytes Bytes(size_t size) {
    const ConstBytes taken = rest_.first(std::min(size, rest_.size()));
    rest_ = rest_.subspan(taken.size());
    return taken;
  }
  bool empty() const { return rest_.empty(); }
  ConstBytes Rest() const { return rest_; }

 private:
  ConstBytes rest_;
};

}  // namespace stagecoach::testing
