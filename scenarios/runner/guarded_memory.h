// Memory a call lends to the NIC, watched from outside.
//
// GuardedBuffer has guard bytes on both sides of what it lends: a transfer that is longer than it may be, or lands
// elsewhere, damages them. ColdStorage keeps buffers whose calls are over and looks at them again later: nothing may
// change in memory that no STag reaches any more.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "scenarios/runner/violations.h"

namespace stagecoach::scenario {

class GuardedBuffer {
 public:
  static constexpr size_t kGuard = 64;  // bytes on each side

  GuardedBuffer() = default;
  explicit GuardedBuffer(size_t size);

  MutableBytes bytes() { return size_ == 0 ? MutableBytes() : MutableBytes(storage_).subspan(kGuard, size_); }
  size_t size() const { return size_; }
  bool GuardsIntact() const;
  // Nothing has been written from byte `from` on since the buffer was made.
  bool Untouched(size_t from = 0) const;
  // Of everything, guards included.
  uint64_t Fingerprint() const;

 private:
  size_t size_ = 0;
  std::vector<std::byte> storage_;
};

class ColdStorage {
 public:
  // Both outlive this object.
  explicit ColdStorage(Violations* violations) : violations_(violations) {}

  // From now on nothing may change in it. `label` says whose it was.
  void Keep(GuardedBuffer buffer, std::string label, Instant now);
  void CheckAll(Instant now);

 private:
  static constexpr size_t kBytesMax = 8u << 20;

  struct Kept {
    GuardedBuffer buffer;
    uint64_t fingerprint = 0;
    std::string label;
    Instant since{};
  };
  void Check(const Kept& kept, Instant now);

  Violations* const violations_;
  std::deque<Kept> kept_;
  size_t bytes_ = 0;
};

}  // namespace stagecoach::scenario
