#include "emu/wire/rdmap.h"

namespace stagecoach::emu::wire {

namespace {

constexpr unsigned kVersionShift = 6;
constexpr unsigned kReservedShift = 4;
constexpr uint8_t kReservedMask = 0x03;
constexpr uint8_t kOpcodeMask = 0x0f;
constexpr unsigned kAtomicReservedShift = 4;

constexpr uint8_t LastOpcode(RdmapExtensions extensions) {
  return static_cast<uint8_t>(extensions == RdmapExtensions::kNone ? RdmapOpcode::kTerminate
                                                                   : RdmapOpcode::kAtomicResponse);
}
constexpr uint32_t LastQueueNumber(RdmapExtensions extensions) {
  return extensions == RdmapExtensions::kNone ? kTerminateQueueNumber : kAtomicResponseQueueNumber;
}

// Offsets of fields in a segment, for faults.
constexpr uint32_t kUlpAt = 1;
constexpr uint32_t kQueueNumberAt = 6;
constexpr uint32_t kMessageOffsetAt = 14;

WireFault Short(size_t size) {
  return {WireFaultKind::kTruncated, static_cast<uint32_t>(size), size, terminate::kMpaMarkerOrLength};
}

// The queues of the NIC itself have buffers of a known size, one message each, and Immediate Data has a size: a message
// that does not fit is too long for the buffer.
std::optional<WireFault> CheckSingleSegment(const DdpUntaggedHeader& ddp, size_t record_length, size_t least,
                                            size_t most) {
  if (ddp.message_offset != 0) {
    return WireFault{WireFaultKind::kBadMessageOffset, kMessageOffsetAt, ddp.message_offset,
                     terminate::kDdpMessageOffset};
  }
  if (!ddp.last) return WireFault{WireFaultKind::kMessageNotWhole, 0, 0, terminate::kDdpTooLong};
  if (record_length < least) return Short(record_length);
  if (record_length > most) {
    return WireFault{WireFaultKind::kTooLong, static_cast<uint32_t>(most), record_length, terminate::kDdpTooLong};
  }
  return std::nullopt;
}

Result<RdmapControl, WireFault> DecodeControl(uint8_t ulp, bool tagged, RdmapExtensions extensions) {
  auto control = RdmapControl::Decode(ulp, extensions);
  if (!control.has_value()) {
    control.error().offset = kUlpAt;
    return control;
  }
  if (IsTagged(control->opcode) != tagged) {
    return Err(WireFault{WireFaultKind::kWrongBufferModel, kUlpAt, ulp, terminate::kRdmapOpcode});
  }
  return control;
}

Result<SegmentHeader, WireFault> DecodeTagged(ConstBytes head, RdmapExtensions extensions) {
  const auto ddp = DdpTaggedHeader::Decode(head);
  if (!ddp.has_value()) return Err(ddp.error());
  const auto control = DecodeControl(ddp->ulp, true, extensions);
  if (!control.has_value()) return Err(control.error());
  SegmentHeader header{.control = *control, .last = ddp->last, .ddp_reserved = ddp->reserved};
  header.stag = ddp->stag;
  header.tagged_offset = ddp->tagged_offset;
  return header;
}

// What a message of a known size has behind its untagged header; none for those that may have any size.
struct SizeRule {
  size_t least = 0;
  size_t most = 0;
};
std::optional<SizeRule> SizeOf(RdmapOpcode opcode) {
  switch (opcode) {
    case RdmapOpcode::kReadRequest:
      return SizeRule{kReadRequestSize, kReadRequestSize};
    case RdmapOpcode::kTerminate:
      return SizeRule{kTerminateControlSize, kMaxTerminateSize};
    case RdmapOpcode::kImmediate:
    case RdmapOpcode::kImmediateSolicited:
      return SizeRule{kImmediateDataSize, kImmediateDataSize};
    case RdmapOpcode::kAtomicRequest:
      return SizeRule{kAtomicRequestSize, kAtomicRequestSize};
    case RdmapOpcode::kAtomicResponse:
      return SizeRule{kAtomicResponseSize, kAtomicResponseSize};
    case RdmapOpcode::kWrite:
    case RdmapOpcode::kReadResponse:
    case RdmapOpcode::kSend:
    case RdmapOpcode::kSendInvalidate:
    case RdmapOpcode::kSendSolicited:
    case RdmapOpcode::kSendSolicitedInvalidate:
      break;
  }
  return std::nullopt;
}

Result<SegmentHeader, WireFault> DecodeUntagged(ConstBytes head, size_t record_length, RdmapExtensions extensions) {
  const auto ddp = DdpUntaggedHeader::Decode(head);
  if (!ddp.has_value()) return Err(ddp.error());
  if (ddp->queue_number > LastQueueNumber(extensions)) {
    return Err(
        WireFault{WireFaultKind::kBadQueueNumber, kQueueNumberAt, ddp->queue_number, terminate::kDdpQueueNumber});
  }
  const auto control = DecodeControl(ddp->ulp, false, extensions);
  if (!control.has_value()) return Err(control.error());
  // The queue exists, so DDP has no complaint; RDMAP did not expect this opcode there.
  if (ddp->queue_number != QueueNumberOf(control->opcode)) {
    return Err(WireFault{WireFaultKind::kWrongQueue, kQueueNumberAt, ddp->queue_number, terminate::kRdmapOpcode});
  }

  SegmentHeader header{.control = *control, .last = ddp->last, .ddp_reserved = ddp->reserved};
  header.ulp_word = ddp->ulp_word;
  header.queue_number = ddp->queue_number;
  header.sequence_number = ddp->sequence_number;
  header.message_offset = ddp->message_offset;

  if (const auto size = SizeOf(control->opcode)) {
    if (auto fault = CheckSingleSegment(*ddp, record_length, kDdpUntaggedHeaderSize + size->least,
                                        kDdpUntaggedHeaderSize + size->most)) {
      return Err(*fault);
    }
  }
  if (control->opcode == RdmapOpcode::kReadRequest) {
    const auto request = ReadRequest::Decode(head.subspan(kDdpUntaggedHeaderSize));
    if (!request.has_value()) return Err(Short(head.size()));
    header.read_request = *request;
  }
  return header;
}

// The control word of a Terminate, by either order.
constexpr uint8_t kRfcFlags = 0xe0;
constexpr uint8_t kSiwFlags = 0x07;

TerminateHeader ReadTerminate(ConstBytes payload, bool as_siw) {
  const auto byte = [&](size_t i) { return std::to_integer<uint8_t>(payload[i]); };
  const uint8_t high = byte(0) >> 4, low = byte(0) & 0x0f;
  TerminateHeader header;
  header.code = {as_siw ? low : high, as_siw ? high : low, byte(1)};
  const uint8_t flags = byte(2);
  header.segment_length_valid = (flags & (as_siw ? 0x01 : 0x80)) != 0;
  header.has_ddp_header = (flags & (as_siw ? 0x02 : 0x40)) != 0;
  header.has_rdmap_header = (flags & (as_siw ? 0x04 : 0x20)) != 0;
  const uint8_t reserved_high = as_siw ? flags >> 3 : flags & 0x1f;
  header.reserved = static_cast<uint16_t>(reserved_high << 8 | byte(3));
  header.rest_size = static_cast<uint8_t>(CopyBytes(header.rest, payload.subspan(kTerminateControlSize)));
  return header;
}

}  // namespace

const char* ToString(RdmapOpcode opcode) {
  switch (opcode) {
    case RdmapOpcode::kWrite:
      return "Write";
    case RdmapOpcode::kReadRequest:
      return "Read Request";
    case RdmapOpcode::kReadResponse:
      return "Read Response";
    case RdmapOpcode::kSend:
      return "Send";
    case RdmapOpcode::kSendInvalidate:
      return "Send with Invalidate";
    case RdmapOpcode::kSendSolicited:
      return "Send with SE";
    case RdmapOpcode::kSendSolicitedInvalidate:
      return "Send with SE and Invalidate";
    case RdmapOpcode::kTerminate:
      return "Terminate";
    case RdmapOpcode::kImmediate:
      return "Immediate Data";
    case RdmapOpcode::kImmediateSolicited:
      return "Immediate Data with SE";
    case RdmapOpcode::kAtomicRequest:
      return "Atomic Request";
    case RdmapOpcode::kAtomicResponse:
      return "Atomic Response";
  }
  return "?";
}

uint8_t RdmapControl::Encode() const {
  return static_cast<uint8_t>(kRdmapVersion << kVersionShift | (reserved & kReservedMask) << kReservedShift |
                              (static_cast<uint8_t>(opcode) & kOpcodeMask));
}

Result<RdmapControl, WireFault> RdmapControl::Decode(uint8_t byte, RdmapExtensions extensions) {
  const uint8_t version = byte >> kVersionShift;
  if (version != kRdmapVersion) {
    return Err(WireFault{WireFaultKind::kBadRdmapVersion, 0, version, terminate::kRdmapVersion});
  }
  const uint8_t opcode = byte & kOpcodeMask;
  if (opcode > LastOpcode(extensions)) {
    return Err(WireFault{WireFaultKind::kBadOpcode, 0, opcode, terminate::kRdmapOpcode});
  }
  return RdmapControl{.opcode = static_cast<RdmapOpcode>(opcode),
                      .reserved = static_cast<uint8_t>((byte >> kReservedShift) & kReservedMask)};
}

void ReadRequest::Encode(ByteWriter& out) const {
  out.U32(sink_stag);
  out.U64(sink_offset);
  out.U32(length);
  out.U32(source_stag);
  out.U64(source_offset);
}

Result<ReadRequest, WireFault> ReadRequest::Decode(ConstBytes bytes) {
  ByteReader in(bytes);
  ReadRequest request;
  request.sink_stag = in.U32();
  request.sink_offset = in.U64();
  request.length = in.U32();
  request.source_stag = in.U32();
  request.source_offset = in.U64();
  if (!in.ok()) return Err(Short(bytes.size()));
  return request;
}

size_t SegmentHeader::EncodedSize() const {
  if (tagged()) return kDdpTaggedHeaderSize;
  return kDdpUntaggedHeaderSize + (opcode() == RdmapOpcode::kReadRequest ? kReadRequestSize : 0);
}

void SegmentHeader::Encode(ByteWriter& out) const {
  if (tagged()) {
    DdpTaggedHeader{
        .last = last, .reserved = ddp_reserved, .ulp = control.Encode(), .stag = stag, .tagged_offset = tagged_offset}
        .Encode(out);
    return;
  }
  DdpUntaggedHeader{.last = last,
                    .reserved = ddp_reserved,
                    .ulp = control.Encode(),
                    .ulp_word = ulp_word,
                    .queue_number = queue_number,
                    .sequence_number = sequence_number,
                    .message_offset = message_offset}
      .Encode(out);
  if (opcode() == RdmapOpcode::kReadRequest) read_request.Encode(out);
}

SegmentHeader SegmentHeader::Write(uint32_t stag, uint64_t tagged_offset, bool last) {
  SegmentHeader header{.control = {.opcode = RdmapOpcode::kWrite}, .last = last};
  header.stag = stag;
  header.tagged_offset = tagged_offset;
  return header;
}

SegmentHeader SegmentHeader::ReadResponse(uint32_t sink_stag, uint64_t tagged_offset, bool last) {
  SegmentHeader header = Write(sink_stag, tagged_offset, last);
  header.control.opcode = RdmapOpcode::kReadResponse;
  return header;
}

SegmentHeader SegmentHeader::Send(RdmapOpcode opcode, uint32_t invalidate_stag, uint32_t msn, uint32_t message_offset,
                                  bool last) {
  SegmentHeader header{.control = {.opcode = opcode}, .last = last};
  header.ulp_word = HasInvalidate(opcode) ? invalidate_stag : 0;
  header.queue_number = kSendQueueNumber;
  header.sequence_number = msn;
  header.message_offset = message_offset;
  return header;
}

SegmentHeader SegmentHeader::Read(uint32_t msn, const ReadRequest& request) {
  SegmentHeader header{.control = {.opcode = RdmapOpcode::kReadRequest}};
  header.queue_number = kReadRequestQueueNumber;
  header.sequence_number = msn;
  header.read_request = request;
  return header;
}

SegmentHeader SegmentHeader::Terminate() {
  SegmentHeader header{.control = {.opcode = RdmapOpcode::kTerminate}};
  header.queue_number = kTerminateQueueNumber;
  header.sequence_number = 1;
  return header;
}

SegmentHeader SegmentHeader::Immediate(bool solicited, uint32_t msn) {
  SegmentHeader header{.control = {.opcode = solicited ? RdmapOpcode::kImmediateSolicited : RdmapOpcode::kImmediate}};
  header.queue_number = kSendQueueNumber;
  header.sequence_number = msn;
  return header;
}

SegmentHeader SegmentHeader::AtomicRequest(uint32_t msn) {
  SegmentHeader header{.control = {.opcode = RdmapOpcode::kAtomicRequest}};
  header.queue_number = kReadRequestQueueNumber;
  header.sequence_number = msn;
  return header;
}

SegmentHeader SegmentHeader::AtomicResponse(uint32_t msn) {
  SegmentHeader header{.control = {.opcode = RdmapOpcode::kAtomicResponse}};
  header.queue_number = kAtomicResponseQueueNumber;
  header.sequence_number = msn;
  return header;
}

Result<SegmentHeader, WireFault> DecodeSegment(ConstBytes head, size_t record_length, RdmapExtensions extensions) {
  if (head.size() > record_length) head = head.first(record_length);
  if (head.empty()) return Err(Short(0));
  const auto control = DdpControl::Decode(std::to_integer<uint8_t>(head[0]));
  if (!control.has_value()) return Err(control.error());
  return control->tagged ? DecodeTagged(head, extensions) : DecodeUntagged(head, record_length, extensions);
}

ImmediateData ImmediateData::Of(uint32_t as_in_memory) {
  ImmediateData data;
  CopyBytes(data.bytes, AsBytes(&as_in_memory, sizeof(as_in_memory)));
  return data;
}

uint32_t ImmediateData::AsInMemory() const {
  uint32_t value = 0;
  CopyBytes(AsMutableBytes(&value, sizeof(value)), bytes);
  return value;
}

void ImmediateData::Encode(ByteWriter& out) const {
  out.Bytes(bytes);
}

Result<ImmediateData, WireFault> ImmediateData::Decode(ConstBytes bytes) {
  if (bytes.size() < kImmediateDataSize) return Err(Short(bytes.size()));
  ImmediateData data;
  CopyBytes(data.bytes, bytes.first(kImmediateDataSize));
  return data;
}

bool AtomicRequest::IsPlain() const {
  if (operation == static_cast<uint8_t>(AtomicOpcode::kFetchAdd)) return add_or_swap_mask == 0;
  return add_or_swap_mask == ~uint64_t{0} && compare_mask == ~uint64_t{0};
}

AtomicRequest AtomicRequest::FetchAdd(uint32_t identifier, uint32_t stag, uint64_t tagged_offset, uint64_t add) {
  return {.operation = static_cast<uint8_t>(AtomicOpcode::kFetchAdd),
          .identifier = identifier,
          .stag = stag,
          .tagged_offset = tagged_offset,
          .add_or_swap = add};
}

AtomicRequest AtomicRequest::CompareSwap(uint32_t identifier, uint32_t stag, uint64_t tagged_offset, uint64_t compare,
                                         uint64_t swap) {
  return {.operation = static_cast<uint8_t>(AtomicOpcode::kCompareSwap),
          .identifier = identifier,
          .stag = stag,
          .tagged_offset = tagged_offset,
          .add_or_swap = swap,
          .add_or_swap_mask = ~uint64_t{0},
          .compare = compare,
          .compare_mask = ~uint64_t{0}};
}

void AtomicRequest::Encode(ByteWriter& out) const {
  out.U32(reserved << kAtomicReservedShift | (operation & kOpcodeMask));
  out.U32(identifier);
  out.U32(stag);
  out.U64(tagged_offset);
  out.U64(add_or_swap);
  out.U64(add_or_swap_mask);
  out.U64(compare);
  out.U64(compare_mask);
}

Result<AtomicRequest, WireFault> AtomicRequest::Decode(ConstBytes bytes) {
  ByteReader in(bytes);
  AtomicRequest request;
  const uint32_t first = in.U32();
  request.reserved = first >> kAtomicReservedShift;
  request.operation = static_cast<uint8_t>(first & kOpcodeMask);
  request.identifier = in.U32();
  request.stag = in.U32();
  request.tagged_offset = in.U64();
  request.add_or_swap = in.U64();
  request.add_or_swap_mask = in.U64();
  request.compare = in.U64();
  request.compare_mask = in.U64();
  if (!in.ok()) return Err(Short(bytes.size()));
  return request;
}

void AtomicResponse::Encode(ByteWriter& out) const {
  out.U32(identifier);
  out.U64(original);
}

Result<AtomicResponse, WireFault> AtomicResponse::Decode(ConstBytes bytes) {
  ByteReader in(bytes);
  AtomicResponse response;
  response.identifier = in.U32();
  response.original = in.U64();
  if (!in.ok()) return Err(Short(bytes.size()));
  return response;
}

std::optional<uint16_t> TerminateHeader::SegmentLength() const {
  if (!segment_length_valid || rest_size < 2) return std::nullopt;
  return ByteReader(ConstBytes(rest).first(rest_size)).U16();
}

ConstBytes TerminateHeader::DdpHeader() const {
  // The length field stands before a quoted header whether it is valid or not.
  const ConstBytes all = ConstBytes(rest).first(rest_size);
  if (!has_ddp_header || all.size() < 3) return {};
  const ConstBytes quoted = all.subspan(2);
  const bool tagged = (quoted[0] & std::byte{0x80}) != std::byte{0};
  const size_t size = tagged ? kDdpTaggedHeaderSize : kDdpUntaggedHeaderSize;
  return quoted.size() < size ? ConstBytes{} : quoted.first(size);
}

std::optional<ReadRequest> TerminateHeader::QuotedReadRequest() const {
  const ConstBytes ddp = DdpHeader();
  if (!has_rdmap_header || ddp.empty()) return std::nullopt;
  const auto request = ReadRequest::Decode(ConstBytes(rest).first(rest_size).subspan(2 + ddp.size()));
  if (!request.has_value()) return std::nullopt;
  return *request;
}

void TerminateHeader::Encode(ByteWriter& out) const {
  out.U8(static_cast<uint8_t>(code.layer << 4 | (code.error_type & 0x0f)));
  out.U8(code.error_code);
  out.U16(static_cast<uint16_t>((segment_length_valid ? 0x8000 : 0) | (has_ddp_header ? 0x4000 : 0) |
                                (has_rdmap_header ? 0x2000 : 0) | (reserved & 0x1fff)));
  out.Bytes(ConstBytes(rest).first(rest_size));
}

void TerminateHeader::EncodeAsSiw(ByteWriter& out) const {
  out.U8(static_cast<uint8_t>(code.error_type << 4 | (code.layer & 0x0f)));
  out.U8(code.error_code);
  out.U8(static_cast<uint8_t>((segment_length_valid ? 1 : 0) | (has_ddp_header ? 2 : 0) | (has_rdmap_header ? 4 : 0) |
                              (reserved >> 8 & 0x1f) << 3));
  out.U8(static_cast<uint8_t>(reserved));
  out.Bytes(ConstBytes(rest).first(rest_size));
}

TerminateHeader TerminateHeader::For(TerminateCode code, ConstBytes head, size_t segment_length) {
  TerminateHeader header;
  header.code = code;
  if (head.empty()) return header;
  const bool tagged = (head[0] & std::byte{0x80}) != std::byte{0};
  const size_t ddp_size = tagged ? kDdpTaggedHeaderSize : kDdpUntaggedHeaderSize;
  ByteWriter out(header.rest);
  out.U16(static_cast<uint16_t>(segment_length));
  header.segment_length_valid = true;
  if (head.size() >= ddp_size) {
    header.has_ddp_header = true;
    out.Bytes(head.first(ddp_size));
    const bool is_read =
        !tagged && (std::to_integer<uint8_t>(head[1]) & kOpcodeMask) == static_cast<uint8_t>(RdmapOpcode::kReadRequest);
    if (is_read && head.size() >= kMaxSegmentHeaderSize) {
      header.has_rdmap_header = true;
      out.Bytes(head.subspan(ddp_size, kReadRequestSize));
    }
  }
  header.rest_size = static_cast<uint8_t>(out.position());
  return header;
}

const char* ToString(TerminateBitOrder order) {
  switch (order) {
    case TerminateBitOrder::kRfc:
      return "RFC 5040";
    case TerminateBitOrder::kSiw:
      return "siw";
    case TerminateBitOrder::kAmbiguous:
      return "ambiguous";
  }
  return "?";
}

Result<TerminateReading, WireFault> DecodeTerminate(ConstBytes payload) {
  if (payload.size() < kTerminateControlSize) return Err(Short(payload.size()));
  if (payload.size() > kMaxTerminateSize) {
    return Err(WireFault{WireFaultKind::kTooLong, kMaxTerminateSize, payload.size(), terminate::kDdpTooLong});
  }
  const TerminateHeader rfc = ReadTerminate(payload, false);
  const TerminateHeader siw = ReadTerminate(payload, true);
  const uint8_t flags = std::to_integer<uint8_t>(payload[2]);
  const bool rfc_flags = (flags & kRfcFlags) != 0;
  const bool siw_flags = (flags & kSiwFlags) != 0;
  if (rfc_flags != siw_flags) {
    return rfc_flags ? TerminateReading{.header = rfc}
                     : TerminateReading{.order = TerminateBitOrder::kSiw, .header = siw};
  }
  if (rfc.code == siw.code) return TerminateReading{.header = rfc};
  const bool rfc_known = IsAssigned(rfc.code);
  const bool siw_known = IsAssigned(siw.code);
  if (rfc_known && !siw_known) return TerminateReading{.header = rfc};
  if (siw_known && !rfc_known) return TerminateReading{.order = TerminateBitOrder::kSiw, .header = siw};
  return TerminateReading{.order = TerminateBitOrder::kAmbiguous, .header = rfc, .as_siw = siw};
}

}  // namespace stagecoach::emu::wire
