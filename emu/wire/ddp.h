// DDP segment headers (RFC 5041 section 4): where a segment's payload belongs.
//
// DDP carries some bytes for the layer above without looking at them (RsvdULP); rdmap.h says what RDMAP puts there.
// Whether the STag is good and the MSN expected is for the transport engine. Plain values and pure functions; any
// thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bytes.h"
#include "base/cursor.h"
#include "base/result.h"
#include "emu/wire/fault.h"

namespace stagecoach::emu::wire {

inline constexpr uint8_t kDdpVersion = 1;
inline constexpr size_t kDdpTaggedHeaderSize = 14;
inline constexpr size_t kDdpUntaggedHeaderSize = 18;

// The first byte of every segment: T, L, four reserved bits, DV. Reserved bits are not judged, and are kept.
struct DdpControl {
  bool tagged = false;
  bool last = true;      // the segment ends its message
  uint8_t reserved = 0;  // four bits

  uint8_t Encode() const;
  // Fails when DV is not 1; the fault's Terminate code depends on T.
  static Result<DdpControl, WireFault> Decode(uint8_t byte);
  friend bool operator==(const DdpControl&, const DdpControl&) = default;
};

// For memory that the peer named by STag.
struct DdpTaggedHeader {
  bool last = true;
  uint8_t reserved = 0;  // four bits
  uint8_t ulp = 0;       // RsvdULP, 8 bits
  uint32_t stag = 0;
  uint64_t tagged_offset = 0;

  static constexpr size_t EncodedSize() { return kDdpTaggedHeaderSize; }
  void Encode(ByteWriter& out) const;
  // Reads the first EncodedSize() bytes. The segment must be tagged (kWrongBufferModel otherwise).
  static Result<DdpTaggedHeader, WireFault> Decode(ConstBytes bytes);
  friend bool operator==(const DdpTaggedHeader&, const DdpTaggedHeader&) = default;
};

// For the next buffer of one of the receiver's queues.
struct DdpUntaggedHeader {
  bool last = true;
  uint8_t reserved = 0;   // four bits
  uint8_t ulp = 0;        // RsvdULP, the first 8 of 40 bits
  uint32_t ulp_word = 0;  // and the other 32
  uint32_t queue_number = 0;
  uint32_t sequence_number = 0;  // MSN: 1 for the first message of a queue, wraps at 2^32
  uint32_t message_offset = 0;   // MO, bytes

  static constexpr size_t EncodedSize() { return kDdpUntaggedHeaderSize; }
  void Encode(ByteWriter& out) const;
  // Reads the first EncodedSize() bytes. The segment must be untagged (kWrongBufferModel otherwise).
  static Result<DdpUntaggedHeader, WireFault> Decode(ConstBytes bytes);
  friend bool operator==(const DdpUntaggedHeader&, const DdpUntaggedHeader&) = default;
};

}  // namespace stagecoach::emu::wire
