// What a codec says about bytes it cannot accept, and the Terminate that answers them.
//
// Terminate codes: RFC 5040 section 4.8 (RDMAP), RFC 5041 section 6.2 with RFC 5040 (DDP), RFC 5044 section 8 and RFC
// 6581 section 9 (MPA). Plain values; no state, any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace stagecoach::emu::wire {

// The layer that reports a fault (RFC 5040 section 4.8: the Layer field).
enum class TerminateLayer : uint8_t { kRdmap = 0, kDdp = 1, kLlp = 2 };

// Layer, error type and error code as a Terminate carries them. The first two have four bits on the wire.
struct TerminateCode {
  uint8_t layer = 0;
  uint8_t error_type = 0;
  uint8_t error_code = 0;
  friend bool operator==(const TerminateCode&, const TerminateCode&) = default;
};

// Every code the RFCs assign that this implementation sends or understands.
namespace terminate {
inline constexpr TerminateCode kRdmapLocalCatastrophic{0, 0, 0x00};
inline constexpr TerminateCode kRdmapInvalidStag{0, 1, 0x00};
inline constexpr TerminateCode kRdmapBounds{0, 1, 0x01};
inline constexpr TerminateCode kRdmapAccess{0, 1, 0x02};
inline constexpr TerminateCode kRdmapForeignStag{0, 1, 0x03};
inline constexpr TerminateCode kRdmapOffsetWrap{0, 1, 0x04};
inline constexpr TerminateCode kRdmapProtectionCannotInvalidate{0, 1, 0x09};
inline constexpr TerminateCode kRdmapProtectionUnspecified{0, 1, 0xff};
inline constexpr TerminateCode kRdmapVersion{0, 2, 0x05};
inline constexpr TerminateCode kRdmapOpcode{0, 2, 0x06};
inline constexpr TerminateCode kRdmapStreamCatastrophic{0, 2, 0x07};
inline constexpr TerminateCode kRdmapGlobalCatastrophic{0, 2, 0x08};
inline constexpr TerminateCode kRdmapCannotInvalidate{0, 2, 0x09};
inline constexpr TerminateCode kRdmapUnspecified{0, 2, 0xff};
inline constexpr TerminateCode kDdpLocalCatastrophic{1, 0, 0x00};
inline constexpr TerminateCode kDdpInvalidStag{1, 1, 0x00};
inline constexpr TerminateCode kDdpBounds{1, 1, 0x01};
inline constexpr TerminateCode kDdpForeignStag{1, 1, 0x02};
inline constexpr TerminateCode kDdpOffsetWrap{1, 1, 0x03};
inline constexpr TerminateCode kDdpTaggedVersion{1, 1, 0x04};
inline constexpr TerminateCode kDdpQueueNumber{1, 2, 0x01};
inline constexpr TerminateCode kDdpNoBuffer{1, 2, 0x02};
inline constexpr TerminateCode kDdpMsnRange{1, 2, 0x03};
inline constexpr TerminateCode kDdpMessageOffset{1, 2, 0x04};
inline constexpr TerminateCode kDdpTooLong{1, 2, 0x05};
inline constexpr TerminateCode kDdpUntaggedVersion{1, 2, 0x06};
inline constexpr TerminateCode kMpaConnectionLost{2, 0, 0x01};
inline constexpr TerminateCode kMpaCrc{2, 0, 0x02};
inline constexpr TerminateCode kMpaMarkerOrLength{2, 0, 0x03};
inline constexpr TerminateCode kMpaInvalidFrame{2, 0, 0x04};
inline constexpr TerminateCode kMpaLocalCatastrophic{2, 0, 0x05};
inline constexpr TerminateCode kMpaInsufficientIrd{2, 0, 0x06};
inline constexpr TerminateCode kMpaNoMatchingRtr{2, 0, 0x07};
}  // namespace terminate

struct TerminateCodeName {
  TerminateCode code;
  const char* name;  // "DDP tagged buffer: invalid STag"
};
// All of the codes above, in numeric order. A local catastrophic error of RDMAP or DDP has no code of its own; its row
// stands for any.
std::span<const TerminateCodeName> TerminateCodeNames();

// True when an RFC assigns this triple.
bool IsAssigned(TerminateCode code);

// The name of the table, or "RDMAP remote protection: unassigned code 0x42", or "layer 5 type 3 code 0x42".
std::string ToString(TerminateCode code);

enum class WireFaultKind : uint8_t {
  kTruncated,            // fewer bytes than the header needs
  kTooLong,              // more bytes than a message of this kind may have
  kBadKey,               // not "MPA ID Req Frame" or "MPA ID Rep Frame"
  kPrivateDataTooLong,   // PD_Length above 512
  kEnhancedWordMissing,  // the S flag without room for the IRD/ORD word
  kBadDdpVersion,        // DV is not 1
  kBadQueueNumber,       // untagged, to a queue RDMAP does not use
  kBadMessageOffset,     // a message that fits one segment does not begin at 0
  kMessageNotWhole,      // a Read Request or Terminate without the Last flag
  kBadRdmapVersion,      // RV is not 1
  kBadOpcode,            // an opcode RFC 5040 does not define
  kWrongBufferModel,     // tagged opcode in an untagged segment, or the reverse
  kWrongQueue,           // an untagged opcode on another opcode's queue
};
const char* ToString(WireFaultKind kind);

// Where and why decoding stopped. `terminate` is the answer RFC 5040/5041/5044 prescribe once the connection runs; for
// MPA Request and Reply frames it is informational, because no Terminate can be sent before MPA is up.
struct WireFault {
  WireFaultKind kind = WireFaultKind::kTruncated;
  uint32_t offset = 0;  // of the offending field, in bytes from the start of what was decoded
  uint64_t value = 0;   // what stood there; for lengths, the length found
  TerminateCode terminate;
  friend bool operator==(const WireFault&, const WireFault&) = default;
};

// "bad DDP version (2) at byte 0".
std::string ToString(const WireFault& fault);

}  // namespace stagecoach::emu::wire
