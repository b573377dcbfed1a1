#include "emu/wire/fault.h"

#include <array>

namespace stagecoach::emu::wire {

namespace {

using namespace terminate;

constexpr std::array kNames = std::to_array<TerminateCodeName>({
    {kRdmapLocalCatastrophic, "RDMAP local catastrophic error"},
    {kRdmapInvalidStag, "RDMAP remote protection: invalid STag"},
    {kRdmapBounds, "RDMAP remote protection: base or bounds violation"},
    {kRdmapAccess, "RDMAP remote protection: access rights violation"},
    {kRdmapForeignStag, "RDMAP remote protection: STag not associated with the stream"},
    {kRdmapOffsetWrap, "RDMAP remote protection: TO wrap"},
    {kRdmapProtectionCannotInvalidate, "RDMAP remote protection: STag cannot be invalidated"},
    {kRdmapProtectionUnspecified, "RDMAP remote protection: unspecified error"},
    {kRdmapVersion, "RDMAP remote operation: invalid RDMAP version"},
    {kRdmapOpcode, "RDMAP remote operation: unexpected opcode"},
    {kRdmapStreamCatastrophic, "RDMAP remote operation: catastrophic error of the stream"},
    {kRdmapGlobalCatastrophic, "RDMAP remote operation: global catastrophic error"},
    {kRdmapCannotInvalidate, "RDMAP remote operation: STag cannot be invalidated"},
    {kRdmapUnspecified, "RDMAP remote operation: unspecified error"},
    {kDdpLocalCatastrophic, "DDP local catastrophic error"},
    {kDdpInvalidStag, "DDP tagged buffer: invalid STag"},
    {kDdpBounds, "DDP tagged buffer: base or bounds violation"},
    {kDdpForeignStag, "DDP tagged buffer: STag not associated with the stream"},
    {kDdpOffsetWrap, "DDP tagged buffer: TO wrap"},
    {kDdpTaggedVersion, "DDP tagged buffer: invalid DDP version"},
    {kDdpQueueNumber, "DDP untagged buffer: invalid QN"},
    {kDdpNoBuffer, "DDP untagged buffer: invalid MSN, no buffer available"},
    {kDdpMsnRange, "DDP untagged buffer: invalid MSN, out of range"},
    {kDdpMessageOffset, "DDP untagged buffer: invalid MO"},
    {kDdpTooLong, "DDP untagged buffer: message too long for the buffer"},
    {kDdpUntaggedVersion, "DDP untagged buffer: invalid DDP version"},
    {kMpaConnectionLost, "MPA: TCP connection closed, terminated or lost"},
    {kMpaCrc, "MPA: CRC error"},
    {kMpaMarkerOrLength, "MPA: marker and ULPDU length do not agree"},
    {kMpaInvalidFrame, "MPA: invalid Request or Reply frame"},
    {kMpaLocalCatastrophic, "MPA: local catastrophic error"},
    {kMpaInsufficientIrd, "MPA: insufficient IRD resources"},
    {kMpaNoMatchingRtr, "MPA: no matching RTR option"},
});

const TerminateCodeName* Find(TerminateCode code) {
  // RFC 5040: a local catastrophic error has no code, any value is acceptable.
  if (code.error_type == 0 && code.layer <= static_cast<uint8_t>(TerminateLayer::kDdp)) code.error_code = 0;
  for (const TerminateCodeName& row : kNames) {
    if (row.code == code) return &row;
  }
  return nullptr;
}

const char* TypeName(TerminateCode code) {
  if (code.layer == 0 && code.error_type == 1) return "RDMAP remote protection";
  if (code.layer == 0 && code.error_type == 2) return "RDMAP remote operation";
  if (code.layer == 1 && code.error_type == 1) return "DDP tagged buffer";
  if (code.layer == 1 && code.error_type == 2) return "DDP untagged buffer";
  if (code.layer == 2 && code.error_type == 0) return "MPA";
  return nullptr;
}

std::string HexByte(uint8_t value) {
  constexpr char kDigits[] = "0123456789abcdef";
  return {'0', 'x', kDigits[value >> 4], kDigits[value & 15]};
}

}  // namespace

std::span<const TerminateCodeName> TerminateCodeNames() {
  return kNames;
}

bool IsAssigned(TerminateCode code) {
  return Find(code) != nullptr;
}

std::string ToString(TerminateCode code) {
  if (const TerminateCodeName* row = Find(code)) return row->name;
  if (const char* type = TypeName(code)) return std::string(type) + ": unassigned code " + HexByte(code.error_code);
  return "layer " + std::to_string(code.layer) + " type " + std::to_string(code.error_type) + " code " +
         HexByte(code.error_code);
}

const char* ToString(WireFaultKind kind) {
  switch (kind) {
    case WireFaultKind::kTruncated:
      return "too few bytes for the header";
    case WireFaultKind::kTooLong:
      return "too many bytes";
    case WireFaultKind::kBadKey:
      return "not the key of an MPA frame";
    case WireFaultKind::kPrivateDataTooLong:
      return "private data longer than 512 bytes";
    case WireFaultKind::kEnhancedWordMissing:
      return "enhanced frame without room for IRD and ORD";
    case WireFaultKind::kBadDdpVersion:
      return "bad DDP version";
    case WireFaultKind::kBadQueueNumber:
      return "no such untagged queue";
    case WireFaultKind::kBadMessageOffset:
      return "message offset is not zero";
    case WireFaultKind::kMessageNotWhole:
      return "message of one segment lacks the Last flag";
    case WireFaultKind::kBadRdmapVersion:
      return "bad RDMAP version";
    case WireFaultKind::kBadOpcode:
      return "unknown RDMAP opcode";
    case WireFaultKind::kWrongBufferModel:
      return "opcode and tagged flag do not agree";
    case WireFaultKind::kWrongQueue:
      return "opcode on the wrong untagged queue";
  }
  return "?";
}

std::string ToString(const WireFault& fault) {
  return std::string(ToString(fault.kind)) + " (" + std::to_string(fault.value) + ") at byte " +
         std::to_string(fault.offset);
}

}  // namespace stagecoach::emu::wire
