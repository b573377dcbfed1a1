// CRC32c (Castagnoli polynomial), as MPA uses it (RFC 5044 section 4.4, appendix of RFC 3385).
//
// On x86-64 processors with SSE 4.2 its instruction is used; on those without, and on every other architecture, tables:
// the CRC instructions of ARMv8 are not used. Both give the same value.
#pragma once

#include <cstdint>

#include "base/bytes.h"

namespace stagecoach {

// Incremental: start with no argument, feed the spans in order, read Value() at any time.
// Value() of the nine bytes "123456789" is 0xe3069283.
class Crc32c {
 public:
  void Update(ConstBytes bytes);
  uint32_t Value() const { return ~state_; }

 private:
  uint32_t state_ = 0xffffffffu;
};

uint32_t ComputeCrc32c(ConstBytes bytes);

// The CRC32c of two pieces of data laid end to end, from theirs alone: `first` of the front piece, `second` of the
// `second_size` bytes that follow it. Constant time; for transfers whose pieces arrive in any order.
uint32_t CombineCrc32c(uint32_t first, uint32_t second, uint64_t second_size);

namespace internal {
// The two implementations, for the test that compares them.
using Crc32cKernel = uint32_t (*)(uint32_t state, ConstBytes bytes);
uint32_t Crc32cTable(uint32_t state, ConstBytes bytes);
uint32_t Crc32cHardware(uint32_t state, ConstBytes bytes);
bool HasCrc32cInstruction();
// The one that Crc32c calls, chosen at first use. A reference, so that a test can put a watcher in its place.
Crc32cKernel& ActiveCrc32cKernel();
}  // namespace internal

}  // namespace stagecoach
