#include "emu/wire/mpa.h"

#include "base/mutant.h"

namespace stagecoach::emu::wire {

namespace {

constexpr std::string_view kRequestKey = "MPA ID Req Frame";
constexpr std::string_view kReplyKey = "MPA ID Rep Frame";
static_assert(kRequestKey.size() == kMpaKeySize && kReplyKey.size() == kMpaKeySize);

constexpr uint16_t kHighFlag = 0x8000;
constexpr uint16_t kLowFlag = 0x4000;
constexpr uint16_t kDepthMask = 0x3fff;

constexpr uint32_t kLengthOffset = 18;

WireFault Invalid(WireFaultKind kind, size_t offset, uint64_t value) {
  return {kind, static_cast<uint32_t>(offset), value, terminate::kMpaInvalidFrame};
}

MpaEnhanced DecodeEnhanced(uint16_t first, uint16_t second) {
  return {.peer_to_peer = (first & kHighFlag) != 0,
          .rtr_send = (first & kLowFlag) != 0,
          .rtr_write = (second & kHighFlag) != 0,
          .rtr_read = (second & kLowFlag) != 0,
          .ird = static_cast<uint16_t>(first & kDepthMask),
          .ord = static_cast<uint16_t>(second & kDepthMask)};
}

uint16_t WithFlags(bool high, bool low, uint16_t depth) {
  return static_cast<uint16_t>((high ? kHighFlag : 0) | (low ? kLowFlag : 0) | (depth & kDepthMask));
}

}  // namespace

std::string_view MpaKey(MpaFrameKind kind) {
  return kind == MpaFrameKind::kRequest ? kRequestKey : kReplyKey;
}

size_t MpaFrame::EncodedSize() const {
  return kMpaFrameHeaderSize + (enhanced.has_value() ? kMpaEnhancedSize : 0) + private_data.size();
}

void MpaFrame::Encode(ByteWriter& out) const {
  const size_t length = EncodedSize() - kMpaFrameHeaderSize;
  // A reader without the S flag would take the word for private data, so a mismatch is as unencodable as too long a
  // frame.
  if (length > kMpaPrivateDataMax || enhanced.has_value() != HasEnhancedWord(flags, revision)) {
    out.Bytes({static_cast<const std::byte*>(nullptr), out.remaining() + 1});
    return;
  }
  out.Bytes(AsBytes(MpaKey(kind)));
  out.U8(flags);
  out.U8(revision);
  const bool narrow = STAGECOACH_MUTANT("mpa-length-of-a-byte", "of the length in an MPA frame eight bits are sent");
  out.U16(static_cast<uint16_t>(narrow ? length & 0xff : length));
  if (enhanced.has_value()) {
    out.U16(WithFlags(enhanced->peer_to_peer, enhanced->rtr_send, enhanced->ird));
    out.U16(WithFlags(enhanced->rtr_write, enhanced->rtr_read, enhanced->ord));
  }
  out.Bytes(private_data);
}

bool MpaKeyMatches(MpaFrameKind kind, ConstBytes bytes) {
  const std::string_view key = MpaKey(kind);
  const size_t n = bytes.size() < key.size() ? bytes.size() : key.size();
  return AsText(bytes.first(n)) == key.substr(0, n);
}

Result<size_t, WireFault> MpaFrameSize(MpaFrameKind kind, ConstBytes header) {
  if (!MpaKeyMatches(kind, header)) return Err(Invalid(WireFaultKind::kBadKey, 0, 0));
  if (header.size() < kMpaFrameHeaderSize) {
    return Err(Invalid(WireFaultKind::kTruncated, header.size(), header.size()));
  }
  const size_t length = ByteReader(header.subspan(kLengthOffset)).U16();
  if (length > kMpaPrivateDataMax) return Err(Invalid(WireFaultKind::kPrivateDataTooLong, kLengthOffset, length));
  return kMpaFrameHeaderSize + length;
}

Result<MpaFrame, WireFault> MpaFrame::Decode(MpaFrameKind kind, ConstBytes bytes) {
  const auto size = MpaFrameSize(kind, bytes);
  if (!size.has_value()) return Err(size.error());
  if (bytes.size() < *size) return Err(Invalid(WireFaultKind::kTruncated, bytes.size(), bytes.size()));
  if (bytes.size() > *size) return Err(Invalid(WireFaultKind::kTooLong, *size, bytes.size()));

  ByteReader in(bytes.subspan(kMpaKeySize));
  MpaFrame frame{.kind = kind, .flags = in.U8(), .revision = in.U8()};
  const uint16_t length = in.U16();
  if (HasEnhancedWord(frame.flags, frame.revision)) {
    if (length < kMpaEnhancedSize) return Err(Invalid(WireFaultKind::kEnhancedWordMissing, kLengthOffset, length));
    const uint16_t first = in.U16();
    frame.enhanced = DecodeEnhanced(first, in.U16());
  }
  frame.private_data = in.Rest();
  return frame;
}

std::array<std::byte, kMpaCrcSize> EncodeFpduCrc(uint32_t crc32c) {
  return {static_cast<std::byte>(crc32c), static_cast<std::byte>(crc32c >> 8), static_cast<std::byte>(crc32c >> 16),
          static_cast<std::byte>(crc32c >> 24)};
}

uint32_t DecodeFpduCrc(std::span<const std::byte, kMpaCrcSize> bytes) {
  uint32_t crc = 0;
  for (size_t i = 0; i < kMpaCrcSize; ++i) crc |= std::to_integer<uint32_t>(bytes[i]) << (8 * i);
  return crc;
}

void MpaMarker::Encode(ByteWriter& out) const {
  out.U16(reserved);
  out.U16(fpdu_pointer);
}

MpaMarker MpaMarker::Decode(std::span<const std::byte, kMpaMarkerSize> bytes) {
  ByteReader in(bytes);
  const uint16_t reserved = in.U16();
  return {.reserved = reserved, .fpdu_pointer = in.U16()};
}

}  // namespace stagecoach::emu::wire
