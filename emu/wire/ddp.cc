#include "emu/wire/ddp.h"

namespace stagecoach::emu::wire {

namespace {

constexpr uint8_t kTagged = 0x80;
constexpr uint8_t kLast = 0x40;
constexpr uint8_t kReservedMask = 0x0f;
constexpr unsigned kReservedShift = 2;
constexpr uint8_t kVersionMask = 0x03;

// No code says "shorter than its header"; the length field of the FPDU is what must be wrong, and that has one (siw
// agrees).
WireFault Short(size_t size) {
  return {WireFaultKind::kTruncated, static_cast<uint32_t>(size), size, terminate::kMpaMarkerOrLength};
}

WireFault WrongModel(uint8_t control) {
  return {WireFaultKind::kWrongBufferModel, 0, control, terminate::kRdmapOpcode};
}

}  // namespace

uint8_t DdpControl::Encode() const {
  return static_cast<uint8_t>((tagged ? kTagged : 0) | (last ? kLast : 0) |
                              ((reserved & kReservedMask) << kReservedShift) | kDdpVersion);
}

Result<DdpControl, WireFault> DdpControl::Decode(uint8_t byte) {
  const bool tagged = (byte & kTagged) != 0;
  const uint8_t version = byte & kVersionMask;
  if (version != kDdpVersion) {
    return Err(WireFault{WireFaultKind::kBadDdpVersion, 0, version,
                         tagged ? terminate::kDdpTaggedVersion : terminate::kDdpUntaggedVersion});
  }
  return DdpControl{.tagged = tagged,
                    .last = (byte & kLast) != 0,
                    .reserved = static_cast<uint8_t>((byte >> kReservedShift) & kReservedMask)};
}

void DdpTaggedHeader::Encode(ByteWriter& out) const {
  out.U8(DdpControl{.tagged = true, .last = last, .reserved = reserved}.Encode());
  out.U8(ulp);
  out.U32(stag);
  out.U64(tagged_offset);
}

Result<DdpTaggedHeader, WireFault> DdpTaggedHeader::Decode(ConstBytes bytes) {
  ByteReader in(bytes);
  const uint8_t byte = in.U8();
  if (!in.ok()) return Err(Short(bytes.size()));
  const auto control = DdpControl::Decode(byte);
  if (!control.has_value()) return Err(control.error());
  if (!control->tagged) return Err(WrongModel(byte));
  DdpTaggedHeader header{.last = control->last, .reserved = control->reserved};
  header.ulp = in.U8();
  header.stag = in.U32();
  header.tagged_offset = in.U64();
  if (!in.ok()) return Err(Short(bytes.size()));
  return header;
}

void DdpUntaggedHeader::Encode(ByteWriter& out) const {
  out.U8(DdpControl{.tagged = false, .last = last, .reserved = reserved}.Encode());
  out.U8(ulp);
  out.U32(ulp_word);
  out.U32(queue_number);
  out.U32(sequence_number);
  out.U32(message_offset);
}

Result<DdpUntaggedHeader, WireFault> DdpUntaggedHeader::Decode(ConstBytes bytes) {
  ByteReader in(bytes);
  const uint8_t byte = in.U8();
  if (!in.ok()) return Err(Short(bytes.size()));
  const auto control = DdpControl::Decode(byte);
  if (!control.has_value()) return Err(control.error());
  if (control->tagged) return Err(WrongModel(byte));
  DdpUntaggedHeader header{.last = control->last, .reserved = control->reserved};
  header.ulp = in.U8();
  header.ulp_word = in.U32();
  header.queue_number = in.U32();
  header.sequence_number = in.U32();
  header.message_offset = in.U32();
  if (!in.ok()) return Err(Short(bytes.size()));
  return header;
}

}  // namespace stagecoach::emu::wire
