// MPA framing: cuts a TCP stream into FPDUs and makes FPDUs of records.
//
// Implements RFC 5044 section 4 (length, pad, CRC, markers towards a peer that asks for them) and the MULPDU rule of
// section 5. The Request and Reply frames before the first FPDU are in mpa_handshake.h; what a record means is in
// rdmap_stream.h; streams, pins and queues are in emu/llp/mpa/mpa_llp.h. Incoming markers are not handled: our Request
// and Reply never ask for them.
//
// Sans-IO. Not thread-safe: serialised by the connection's lock.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "emu/engine/record.h"
#include "emu/wire/mpa.h"

namespace stagecoach::emu {

// The largest ULPDU whose FPDU fits one segment of `emss` bytes (RFC 5044 section 5: MULPDU). Never less than
// kMinMulpdu, whatever the segment size: a header must fit, and FPDUs may span segments (section 5.1). With markers,
// never so large that FPDUPTR overflows.
inline constexpr size_t kMinMulpdu = 128;
size_t Mulpdu(size_t emss, bool markers);

// Receiving. The caller asks for the next record and then for its placement; whenever the answer is kNeedBytes, it
// reads from the stream into NextRx(), says with OnRx() how much came, and asks again.
//
// Without CRC the payload goes from the stream straight to its destination. One read may run on behind the payload into
// a look-ahead buffer, which takes the pad, the CRC field and the next record's head, so that a busy stream of large
// records costs one read and a few dozen copied bytes per record. While records are small the look-ahead is long, and
// many come in one read: there a copy is cheaper than a system call. At most kLookAheadSize bytes of one record are
// ever copied.
//
// With CRC a whole FPDU is staged and verified before any of it is released
// (docs/decisions/0001-crc-before-placement.md).
class MpaReceiver {
 public:
  enum class Step : uint8_t {
    kReady,      // the record's head is there; or the record is in place
    kNeedBytes,  // read into NextRx()
    kBadCrc,     // final
    // The destination is not there any more. What is left of the payload can be had again, elsewhere: Place with an
    // empty destination discards it.
    kMemoryFault,
  };

  // Holds a small record and everything around it: an inline message of 4 KiB with its headers arrives in one read.
  static constexpr size_t kLookAheadSize = 4096 + 256;
  static constexpr size_t kStageSize = 2 * (size_t{64} * 1024 + 64);

  explicit MpaReceiver(bool crc);

  // Bytes that were read along with the last frame of the handshake; at most kLookAheadSize, before anything else.
  void Prime(ConstBytes already_read);

  // `record->head` stays valid until Place says kReady.
  Step NextRecord(RecordHead* record);
  // As Llp::Place.
  Step Place(size_t head_size, std::span<const MutableBytes> destination);

  // Where the next bytes of the stream belong, in order; never empty after kNeedBytes.
  std::span<const MutableBytes> NextRx() const { return {rx_parts_.data(), rx_part_count_}; }
  // How many bytes of NextRx() were filled.
  void OnRx(size_t bytes);

  // True when the stream may end here: not a byte of an unfinished record has come.
  bool BetweenRecords() const { return state_ == State::kHead && begin_ == end_; }

  // After kNeedBytes: which field of the FPDU the bytes that came end inside of. kBetweenFields is the end of a field.
  enum class Inside : uint8_t { kBetweenFields, kLengthField, kRecordHead, kPayload, kTrailer };
  Inside EndsInside() const;

  uint64_t records() const { return records_; }
  uint64_t payload_bytes() const { return payload_bytes_; }
  // Payload bytes that passed through our buffer.
  uint64_t copied_bytes() const { return copied_bytes_; }

 private:
  enum class State : uint8_t { kHead, kPlacing, kBroken };
  static constexpr size_t kMaxRxParts = 17;
  // Records up to this size are likely to be followed by another that is worth a copy rather than a read of its own.
  static constexpr size_t kSmallRecord = 4096 + 128;
  static constexpr size_t kTinyRecord = 512;
  static constexpr size_t kHeadBytes = wire::kMpaLengthSize + kMaxRecordHead;

  size_t Buffered() const { return end_ - begin_; }
  void Consume(size_t bytes);
  // Asks for bytes into the buffer so that it holds at least `needed`, at most `wanted`.
  Step WantBuffered(size_t needed, size_t wanted);
  Step WantPayload(std::span<const MutableBytes> destination);
  size_t LookAheadAfter(size_t trailer) const;
  bool CrcMatches() const;

  const bool crc_;
  State state_ = State::kHead;
  // What has been read and not used yet: buffer_[begin_, end_).
  std::vector<std::byte> buffer_;
  size_t begin_ = 0;
  size_t end_ = 0;

  size_t length_ = 0;  // ULPDU length of the current record, and of the last one while waiting for the next
  bool placing_begun_ = false;
  size_t payload_size_ = 0;
  size_t placed_ = 0;
  std::array<std::byte, kMaxRecordHead> head_{};

  std::array<MutableBytes, kMaxRxParts> rx_parts_{};
  size_t rx_part_count_ = 0;
  size_t rx_direct_ = 0;  // bytes of rx_parts_ that are destination; the rest is buffer

  uint64_t records_ = 0;
  uint64_t payload_bytes_ = 0;
  uint64_t copied_bytes_ = 0;
};

// Transmitting, when bytes must be touched anyway: builds whole FPDUs with CRC or markers (or neither) in the caller's
// memory.
class MpaFramer {
 public:
  MpaFramer(bool crc, bool markers) : crc_(crc), markers_(markers) {}

  // The most bytes Begin/Append/Finish can write for a ULPDU of this length, wherever the markers fall.
  size_t MaxFramedSize(size_t ulpdu_length) const;

  // Begin, then Append exactly `ulpdu_length` bytes in any number of parts, then Finish, which returns the size of the
  // FPDU in `out`, markers included. `out` has at least MaxFramedSize() bytes.
  void Begin(MutableBytes out, size_t ulpdu_length);
  // False: some of the part are not there. The FPDU cannot be finished then; who wants to go on with another one has
  // kept a copy of the framer from before Begin.
  bool Append(ConstBytes part);
  size_t Finish();

 private:
  bool Put(ConstBytes bytes);
  void PutMarkerIfDue();

  bool crc_;
  bool markers_;
  uint64_t stream_position_ = 0;  // bytes framed so far, counted from the first FPDU
  uint64_t fpdu_start_ = 0;       // stream position of the current FPDU's length field
  bool in_fpdu_ = false;
  size_t ulpdu_length_ = 0;
  size_t ulpdu_left_ = 0;
  MutableBytes out_;
  size_t used_ = 0;
};

// The same FPDU without CRC and markers, for gathering from where its parts are: what stands before the ULPDU and after
// it.
inline constexpr size_t kMaxFpduTrailer = 3 + wire::kMpaCrcSize;
constexpr size_t FpduTrailerSize(size_t ulpdu_length) {
  return wire::FpduPad(ulpdu_length) + wire::kMpaCrcSize;
}

}  // namespace stagecoach::emu
