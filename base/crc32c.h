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

namespace internal {
// The two implementations, for the test that compares them.
uint32_t Crc32cTable(uint32_t state, ConstBytes bytes);
uint32_t Crc32cHardware(uint32_t state, ConstBytes bytes);
bool HasCrc32cInstruction();
}  // namespace internal

}  // namespace stagecoach
