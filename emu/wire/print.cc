#include "emu/wire/print.h"

#include <array>
#include <cstdio>

namespace stagecoach::emu::wire {

namespace {

constexpr size_t kPrivateDataShown = 32;

std::string Hex(uint64_t value) {
  std::array<char, 19> text;
  std::snprintf(text.data(), text.size(), "0x%llx", static_cast<unsigned long long>(value));
  return text.data();
}

std::string Place(uint32_t stag, uint64_t tagged_offset) {
  return "STag " + Hex(stag) + " TO " + Hex(tagged_offset);
}

std::string Depth(uint16_t depth) {
  return depth == kMpaDepthUnspecified ? "unspecified" : std::to_string(depth);
}

std::string Flags(uint8_t flags) {
  std::string text;
  if (flags & kMpaFlagMarkers) text += 'M';
  if (flags & kMpaFlagCrc) text += 'C';
  if (flags & kMpaFlagReject) text += 'R';
  if (flags & kMpaFlagEnhanced) text += 'S';
  if (flags & kMpaFlagSiwSegmentationOffload) text += "+siw-gso";
  if (flags & kMpaFlagExtensionsAsked) text += "+7306-asked";
  if (flags & kMpaFlagExtensionsAgreed) text += "+7306-agreed";
  if (flags & 0x01) text += "+reserved";
  return text.empty() ? "none" : text;
}

std::string Rtr(const MpaEnhanced& enhanced) {
  std::string text;
  if (enhanced.rtr_send) text += " Send";
  if (enhanced.rtr_write) text += " Write";
  if (enhanced.rtr_read) text += " Read";
  return text.empty() ? " none" : text;
}

std::string DescribeTerminate(const TerminateHeader& header) {
  std::string text = ToString(header.code);
  const ConstBytes quoted = header.DdpHeader();
  if (quoted.empty()) return text;
  // The quotation may be of the very header that was at fault, so it need not decode.
  std::array<std::byte, kMaxSegmentHeaderSize> head{};
  size_t size = CopyBytes(head, quoted);
  if (const auto request = header.QuotedReadRequest()) {
    ByteWriter out(MutableBytes(head).subspan(size));
    request->Encode(out);
    size += out.position();
  }
  // A header of RFC 7306 is quoted without what follows it, which it cannot be told apart from by size.
  auto segment = DecodeSegment(ConstBytes(head).first(size), size, RdmapExtensions::kRfc7306);
  if (!segment.has_value()) {
    segment =
        DecodeSegment(ConstBytes(head).first(size), header.SegmentLength().value_or(0), RdmapExtensions::kRfc7306);
  }
  text += ", about ";
  text += segment.has_value() ? Describe(*segment) : "a segment that begins " + ToHex(quoted);
  if (const auto length = header.SegmentLength()) text += " of " + std::to_string(*length) + " bytes";
  return text;
}

}  // namespace

std::string Describe(const MpaFrame& frame) {
  std::string text = frame.kind == MpaFrameKind::kRequest ? "MPA Request" : "MPA Reply";
  text += " rev " + std::to_string(frame.revision) + " flags " + Flags(frame.flags);
  if (frame.enhanced.has_value()) {
    text += ", IRD " + Depth(frame.enhanced->ird) + " ORD " + Depth(frame.enhanced->ord);
    if (frame.enhanced->peer_to_peer) text += ", peer-to-peer RTR" + Rtr(*frame.enhanced);
  }
  if (frame.private_data.empty()) return text;
  text += ", " + std::to_string(frame.private_data.size()) + " bytes of private data ";
  if (frame.private_data.size() <= kPrivateDataShown) return text + ToHex(frame.private_data);
  return text + ToHex(frame.private_data.first(kPrivateDataShown)) + "...";
}

std::string Describe(const SegmentHeader& header) {
  std::string text = ToString(header.opcode());
  if (header.tagged()) return text + " " + Place(header.stag, header.tagged_offset) + (header.last ? " last" : "");
  text += " MSN " + std::to_string(header.sequence_number);
  if (header.opcode() == RdmapOpcode::kReadRequest) {
    const ReadRequest& request = header.read_request;
    return text + ": " + std::to_string(request.length) + " bytes from " +
           Place(request.source_stag, request.source_offset) + " to " + Place(request.sink_stag, request.sink_offset);
  }
  // What these say follows their header.
  if (header.opcode() > RdmapOpcode::kSendSolicitedInvalidate) return text;
  text += " MO " + std::to_string(header.message_offset);
  if (HasInvalidate(header.opcode())) text += " invalidate STag " + Hex(header.invalidate_stag());
  return text + (header.last ? " last" : "");
}

std::string Describe(const TerminateReading& reading) {
  std::string text = DescribeTerminate(reading.header);
  if (reading.order == TerminateBitOrder::kSiw) text += " [siw bit order]";
  if (reading.as_siw.has_value()) text += " [or, if siw sent it: " + DescribeTerminate(*reading.as_siw) + "]";
  return text;
}

}  // namespace stagecoach::emu::wire
