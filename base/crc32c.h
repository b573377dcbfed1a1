// CRC32c (Castagnoli polynomial), as MPA uses it (RFC 5044 section 4.4, appendix of RFC 3385).
//
// The SSE 4.2 instruction is used where the processor has it, tables otherwise; both give the same value.
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
uint32_t Crc32cTable(uint32_t state, ConstBytes bytes);
uint32_t Crc32cHardware(uint32_t state, ConstBytes bytes);
bool HasCrc32cInstruction();
}  // namespace internal

}  // namespace stagecoach
