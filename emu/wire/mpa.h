// MPA frames: the Request and Reply that open a connection, and the layout of FPDUs after them.
//
// Implements RFC 5044 sections 4 and 7.1 and the enhanced frames of RFC 6581 (IRD, ORD and peer-to-peer flags). What
// the two sides conclude from the frames is in emu/engine/mpa_handshake.h; cutting a stream into FPDUs is in emu/llp.
// Plain values and pure functions; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "base/bytes.h"
#include "base/cursor.h"
#include "base/result.h"
#include "emu/wire/fault.h"

namespace stagecoach::emu::wire {

// --- Request and Reply frames ---

inline constexpr size_t kMpaKeySize = 16;
// Key, flags and revision, private data length.
inline constexpr size_t kMpaFrameHeaderSize = 20;
// RFC 5044 section 7.1.1. The enhanced word counts as private data.
inline constexpr size_t kMpaPrivateDataMax = 512;
inline constexpr size_t kMpaEnhancedSize = 4;
inline constexpr size_t kMpaFrameSizeMax = kMpaFrameHeaderSize + kMpaPrivateDataMax;

inline constexpr uint8_t kMpaRevision1 = 1;
inline constexpr uint8_t kMpaRevision2 = 2;

// The byte before the revision. The low four bits are reserved by RFC 6581; they are kept through decoding and
// encoding.
inline constexpr uint8_t kMpaFlagMarkers = 0x80;   // M: my receiver wants markers
inline constexpr uint8_t kMpaFlagCrc = 0x40;       // C: CRC wanted (Request), CRC used (Reply)
inline constexpr uint8_t kMpaFlagReject = 0x20;    // R: connection rejected (Reply)
inline constexpr uint8_t kMpaFlagEnhanced = 0x10;  // S: an IRD/ORD word leads the private data (revision 2)
// A private extension of Linux siw in a bit RFC 6581 reserves: FPDUs beyond one TCP segment are welcome.
inline constexpr uint8_t kMpaFlagSiwSegmentationOffload = 0x08;
// Private extensions of ours in bits that RFC 6581 reserves, which receivers ignore: RFC 7306 leaves it to others how
// two ends learn that both speak it. A Request asks with the first; a Reply agrees with the second, and without the
// first, because Linux siw answers with the flags it was sent.
inline constexpr uint8_t kMpaFlagExtensionsAsked = 0x04;
inline constexpr uint8_t kMpaFlagExtensionsAgreed = 0x02;

// IRD and ORD have 14 bits. All ones means: the ULP looks after it, not MPA (RFC 6581 section 4.3).
inline constexpr uint16_t kMpaDepthMax = 0x3ffe;
inline constexpr uint16_t kMpaDepthUnspecified = 0x3fff;

// The word that leads the private data of an enhanced frame (RFC 6581 section 4.3 and 4.4).
struct MpaEnhanced {
  bool peer_to_peer = false;  // A: the initiator's first FPDU will be an RTR; also "I understood", in the Reply
  bool rtr_send = false;      // B: a zero-length Send may be (is) the RTR
  bool rtr_write = false;     // C: a zero-length RDMA Write
  bool rtr_read = false;      // D: a zero-length RDMA Read
  uint16_t ird = 0;           // Read Requests of the peer that I can hold
  uint16_t ord = 0;           // Read Requests that I want to (Reply: will) have outstanding
  friend bool operator==(const MpaEnhanced&, const MpaEnhanced&) = default;
};

enum class MpaFrameKind : uint8_t { kRequest, kReply };

// The key as it stands in the frame: "MPA ID Req Frame" or "MPA ID Rep Frame".
std::string_view MpaKey(MpaFrameKind kind);

struct MpaFrame {
  MpaFrameKind kind = MpaFrameKind::kRequest;
  uint8_t flags = 0;  // kMpaFlag...
  uint8_t revision = kMpaRevision2;
  // Present exactly when HasEnhancedWord(flags, revision).
  std::optional<MpaEnhanced> enhanced;
  // The ULP's, without the enhanced word. After decoding a view into the input.
  ConstBytes private_data;

  bool markers() const { return (flags & kMpaFlagMarkers) != 0; }
  bool crc() const { return (flags & kMpaFlagCrc) != 0; }
  bool rejected() const { return (flags & kMpaFlagReject) != 0; }
  // Of a Request, and of its Reply.
  bool asks_for_extensions() const { return (flags & kMpaFlagExtensionsAsked) != 0; }
  bool agrees_to_extensions() const { return (flags & kMpaFlagExtensionsAgreed) != 0 && !asks_for_extensions(); }

  size_t EncodedSize() const;
  // Fails the writer when it lacks room or the private data is longer than a frame can carry.
  void Encode(ByteWriter& out) const;
  // `bytes` must be one whole frame of `kind`: MpaFrameSize() says how long it is.
  static Result<MpaFrame, WireFault> Decode(MpaFrameKind kind, ConstBytes bytes);
};

// In revision 1 the S bit is reserved and means nothing.
constexpr bool HasEnhancedWord(uint8_t flags, uint8_t revision) {
  return revision >= kMpaRevision2 && (flags & kMpaFlagEnhanced) != 0;
}

// How many bytes the whole frame has, from its first kMpaFrameHeaderSize bytes. Judges the key and the private data
// length, so that nobody waits for a frame that cannot be one. Never more than kMpaFrameSizeMax.
Result<size_t, WireFault> MpaFrameSize(MpaFrameKind kind, ConstBytes header);

// True when `bytes` (any number of them) can be the beginning of a frame of `kind`: tells a stranger before 20 bytes
// are there.
bool MpaKeyMatches(MpaFrameKind kind, ConstBytes bytes);

// --- FPDUs (RFC 5044 section 4) ---

inline constexpr size_t kMpaLengthSize = 2;
inline constexpr size_t kMpaCrcSize = 4;
inline constexpr size_t kMpaUlpduMax = 65535;
inline constexpr size_t kMpaMarkerSize = 4;
// Markers stand at every multiple of this many bytes of TCP stream, counted from the first byte after the Request or
// Reply.
inline constexpr uint64_t kMpaMarkerInterval = 512;

// Zero bytes between ULPDU and CRC: length field, ULPDU and pad together are a multiple of four.
constexpr size_t FpduPad(size_t ulpdu_length) {
  return (4 - ((kMpaLengthSize + ulpdu_length) & 3)) & 3;
}

// Length field, ULPDU, pad and CRC; without markers.
constexpr size_t FpduSize(size_t ulpdu_length) {
  return kMpaLengthSize + ulpdu_length + FpduPad(ulpdu_length) + kMpaCrcSize;
}

// The largest ULPDU whose FPDU, without markers, has at most `bytes` bytes; 0 when not even an empty one fits. At most
// kMpaUlpduMax.
constexpr size_t LargestUlpdu(size_t bytes) {
  const size_t whole_words = bytes & ~size_t{3};
  const size_t overhead = kMpaLengthSize + kMpaCrcSize;
  if (whole_words <= overhead) return 0;
  return whole_words - overhead < kMpaUlpduMax ? whole_words - overhead : kMpaUlpduMax;
}

// The CRC field holds the CRC32c with its low byte first, unlike every other number of iWARP (RFC 5044 section 4.4).
std::array<std::byte, kMpaCrcSize> EncodeFpduCrc(uint32_t crc32c);
uint32_t DecodeFpduCrc(std::span<const std::byte, kMpaCrcSize> bytes);

// A marker: 16 reserved bits and FPDUPTR, the distance in the stream from the first byte of the FPDU to the marker (RFC
// 5044 section 4.3). 0 says that the FPDU's length field follows. Always a multiple of four.
struct MpaMarker {
  uint16_t reserved = 0;
  uint16_t fpdu_pointer = 0;

  void Encode(ByteWriter& out) const;
  static MpaMarker Decode(std::span<const std::byte, kMpaMarkerSize> bytes);
  friend bool operator==(const MpaMarker&, const MpaMarker&) = default;
};

// Bytes from `stream_position` to the next marker: 0 when one stands right here.
constexpr uint64_t BytesToMarker(uint64_t stream_position) {
  return (kMpaMarkerInterval - stream_position % kMpaMarkerInterval) % kMpaMarkerInterval;
}

}  // namespace stagecoach::emu::wire
