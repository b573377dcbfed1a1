#include "emu/engine/mpa_framing.h"

#include <algorithm>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/cursor.h"
#include "base/mark.h"
#include "base/safe_copy/safe_copy.h"

namespace stagecoach::emu {
namespace {

// Copies `from` to the scatter list, beginning `skip` bytes into it. False: the list names memory that is not there.
bool Scatter(std::span<const MutableBytes> list, size_t skip, ConstBytes from) {
  for (const MutableBytes& part : list) {
    if (from.empty()) break;
    if (skip >= part.size()) {
      skip -= part.size();
      continue;
    }
    const size_t n = std::min(part.size() - skip, from.size());
    if (!SafeCopy(part.subspan(skip), from.first(n))) return false;
    from = from.subspan(n);
    skip = 0;
  }
  return true;
}

}  // namespace

size_t Mulpdu(size_t emss, bool markers) {
  size_t room = emss;
  if (markers) {
    // FPDUPTR has 16 bits; an FPDU with its markers must not outgrow it.
    room = std::min<size_t>(room, 65532);
    const size_t most_markers = (room + wire::kMpaMarkerInterval - 1) / wire::kMpaMarkerInterval;
    room -= std::min(room, most_markers * wire::kMpaMarkerSize);
  }
  return std::max(wire::LargestUlpdu(room), kMinMulpdu);
}

MpaReceiver::MpaReceiver(bool crc) : crc_(crc), buffer_(crc ? kStageSize : kLookAheadSize) {}

void MpaReceiver::Prime(ConstBytes already_read) {
  STAGECOACH_CHECK(records_ == 0 && end_ == 0 && already_read.size() <= kLookAheadSize);
  end_ = CopyBytes(buffer_, already_read);
}

void MpaReceiver::Consume(size_t bytes) {
  begin_ += bytes;
  if (begin_ == end_) begin_ = end_ = 0;
}

MpaReceiver::Step MpaReceiver::WantBuffered(size_t needed, size_t wanted) {
  // With CRC a partial FPDU can be large, so it is moved only when it must be; otherwise it is a few bytes.
  const size_t room_for = crc_ ? needed : wanted;
  if (begin_ > 0 && buffer_.size() - begin_ < room_for) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, Buffered());
    end_ -= begin_;
    begin_ = 0;
  }
  const size_t limit = std::min(buffer_.size(), begin_ + wanted);
  STAGECOACH_CHECK(limit >= begin_ + needed && limit > end_);
  rx_parts_[0] = MutableBytes(buffer_).subspan(end_, limit - end_);
  rx_part_count_ = 1;
  rx_direct_ = 0;
  return Step::kNeedBytes;
}

bool MpaReceiver::CrcMatches() const {
  const size_t covered = wire::kMpaLengthSize + length_ + wire::FpduPad(length_);
  const ConstBytes fpdu = ConstBytes(buffer_).subspan(begin_);
  return ComputeCrc32c(fpdu.first(covered)) == wire::DecodeFpduCrc(fpdu.subspan(covered).first<wire::kMpaCrcSize>());
}

MpaReceiver::Step MpaReceiver::NextRecord(RecordHead* record) {
  if (state_ == State::kBroken) return Step::kBadCrc;
  STAGECOACH_CHECK(state_ == State::kHead);

  // length_ is still the last record's: what came last is the best guess at what comes next.
  const size_t wanted = crc_ || length_ <= kSmallRecord ? buffer_.size() : kHeadBytes;
  if (Buffered() < wire::kMpaLengthSize) return WantBuffered(wire::kMpaLengthSize, wanted);

  const size_t length = ByteReader(ConstBytes(buffer_).subspan(begin_)).U16();
  const size_t head_size = std::min(length, kMaxRecordHead);
  const size_t needed = crc_ ? wire::FpduSize(length) : wire::kMpaLengthSize + head_size;
  if (Buffered() < needed) return WantBuffered(needed, std::max(needed, wanted));
  length_ = length;

  // [RFC5044 section 4.4] Nothing after a wrong CRC can be trusted, not even where the next FPDU begins.
  if (crc_ && !CrcMatches()) {
    STAGECOACH_MARK("mpa.wrong_crc");
    state_ = State::kBroken;
    return Step::kBadCrc;
  }
  // Copied, because Place may reuse the buffer while the caller still looks at the head.
  CopyBytes(head_, ConstBytes(buffer_).subspan(begin_ + wire::kMpaLengthSize, head_size));
  record->head = ConstBytes(head_).first(head_size);
  record->length = length_;
  state_ = State::kPlacing;
  placing_begun_ = false;
  return Step::kReady;
}

size_t MpaReceiver::LookAheadAfter(size_t trailer) const {
  return length_ <= kTinyRecord ? buffer_.size() : trailer + kHeadBytes;
}

MpaReceiver::Step MpaReceiver::WantPayload(std::span<const MutableBytes> destination) {
  // Everything buffered has been placed, so the buffer is free for what follows the payload.
  STAGECOACH_CHECK(begin_ == end_);
  rx_part_count_ = 0;
  rx_direct_ = 0;
  if (destination.empty()) {  // discarded payload passes through the buffer
    rx_parts_[rx_part_count_++] = buffer_;
    return Step::kNeedBytes;
  }
  const size_t missing = payload_size_ - placed_;
  size_t skip = placed_;
  for (const MutableBytes& part : destination) {
    if (skip >= part.size()) {
      skip -= part.size();
      continue;
    }
    if (rx_part_count_ == kMaxRxParts - 1) break;
    rx_parts_[rx_part_count_] = part.subspan(skip);
    rx_direct_ += rx_parts_[rx_part_count_].size();
    ++rx_part_count_;
    skip = 0;
  }
  if (rx_direct_ == missing) {
    const size_t look_ahead = std::min(buffer_.size(), LookAheadAfter(FpduTrailerSize(length_)));
    rx_parts_[rx_part_count_++] = MutableBytes(buffer_).first(look_ahead);
  }
  return Step::kNeedBytes;
}

MpaReceiver::Step MpaReceiver::Place(size_t head_size, std::span<const MutableBytes> destination) {
  STAGECOACH_CHECK(state_ == State::kPlacing);
  if (!placing_begun_) {
    STAGECOACH_CHECK(head_size <= std::min(length_, kMaxRecordHead));
    placing_begun_ = true;
    payload_size_ = length_ - head_size;
    placed_ = 0;
    Consume(wire::kMpaLengthSize + head_size);
  }
  const size_t total = TotalSize(destination);
  STAGECOACH_CHECK(total == 0 || total == payload_size_);
  if (total == 0) destination = {};

  const size_t at_hand = std::min(Buffered(), payload_size_ - placed_);
  if (at_hand > 0) {
    if (!destination.empty()) {
      if (!Scatter(destination, placed_, ConstBytes(buffer_).subspan(begin_, at_hand))) return Step::kMemoryFault;
      copied_bytes_ += at_hand;
    }
    placed_ += at_hand;
    Consume(at_hand);
  }
  if (placed_ < payload_size_) return WantPayload(destination);

  const size_t trailer = FpduTrailerSize(length_);
  if (Buffered() < trailer) return WantBuffered(trailer, std::min(buffer_.size(), LookAheadAfter(trailer)));
  Consume(trailer);
  ++records_;
  payload_bytes_ += payload_size_;
  state_ = State::kHead;
  return Step::kReady;
}

MpaReceiver::Inside MpaReceiver::EndsInside() const {
  if (state_ == State::kPlacing) {
    // What is buffered before the payload is whole has been placed.
    if (placed_ < payload_size_) return placed_ > 0 ? Inside::kPayload : Inside::kBetweenFields;
    return Buffered() > 0 ? Inside::kTrailer : Inside::kBetweenFields;
  }
  if (Buffered() == 0) return Inside::kBetweenFields;
  if (Buffered() < wire::kMpaLengthSize) return Inside::kLengthField;
  const size_t length = ByteReader(ConstBytes(buffer_).subspan(begin_)).U16();
  const size_t of_record = Buffered() - wire::kMpaLengthSize;
  if (of_record == 0 || of_record == length) return Inside::kBetweenFields;
  if (of_record < std::min(length, kMaxRecordHead)) return Inside::kRecordHead;
  return of_record < length ? Inside::kPayload : Inside::kTrailer;
}

void MpaReceiver::OnRx(size_t bytes) {
  const size_t direct = std::min(bytes, rx_direct_);
  placed_ += direct;
  end_ += bytes - direct;
  STAGECOACH_CHECK(end_ <= buffer_.size());
  rx_part_count_ = 0;
  rx_direct_ = 0;
}

size_t MpaFramer::MaxFramedSize(size_t ulpdu_length) const {
  const size_t size = wire::FpduSize(ulpdu_length);
  if (!markers_) return size;
  // Between two markers there is room for this many bytes of FPDU; one more marker may stand in front.
  constexpr size_t kBetween = wire::kMpaMarkerInterval - wire::kMpaMarkerSize;
  return size + (size / kBetween + 1) * wire::kMpaMarkerSize;
}

void MpaFramer::PutMarkerIfDue() {
  if (!markers_ || wire::BytesToMarker(stream_position_) != 0) return;
  // [RFC5044 section 4.3] A marker in front of the length field belongs to the FPDU that follows and points at 0.
  const uint64_t pointer = in_fpdu_ ? stream_position_ - fpdu_start_ : 0;
  ByteWriter writer(out_.subspan(used_));
  wire::MpaMarker{.fpdu_pointer = static_cast<uint16_t>(pointer)}.Encode(writer);
  used_ += wire::kMpaMarkerSize;
  stream_position_ += wire::kMpaMarkerSize;
}

bool MpaFramer::Put(ConstBytes bytes) {
  while (!bytes.empty()) {
    PutMarkerIfDue();
    if (!in_fpdu_) {
      in_fpdu_ = true;
      fpdu_start_ = stream_position_;
    }
    size_t n = bytes.size();
    if (markers_) n = std::min<uint64_t>(n, wire::BytesToMarker(stream_position_));
    STAGECOACH_CHECK(n <= out_.size() - used_);
    if (!SafeCopy(out_.subspan(used_), bytes.first(n))) return false;
    used_ += n;
    stream_position_ += n;
    bytes = bytes.subspan(n);
  }
  return true;
}

void MpaFramer::Begin(MutableBytes out, size_t ulpdu_length) {
  STAGECOACH_CHECK(!in_fpdu_ && ulpdu_length <= wire::kMpaUlpduMax && out.size() >= MaxFramedSize(ulpdu_length));
  out_ = out;
  used_ = 0;
  ulpdu_length_ = ulpdu_left_ = ulpdu_length;
  std::array<std::byte, wire::kMpaLengthSize> length;
  ByteWriter(length).U16(static_cast<uint16_t>(ulpdu_length));
  Put(length);
}

bool MpaFramer::Append(ConstBytes part) {
  STAGECOACH_CHECK(in_fpdu_ && part.size() <= ulpdu_left_);
  ulpdu_left_ -= part.size();
  return Put(part);
}

size_t MpaFramer::Finish() {
  STAGECOACH_CHECK(in_fpdu_ && ulpdu_left_ == 0);
  constexpr std::array<std::byte, 3> kPad{};
  Put(ConstBytes(kPad).first(wire::FpduPad(ulpdu_length_)));
  // A marker between pad and CRC is covered by the CRC, so it must stand before the CRC is computed.
  PutMarkerIfDue();
  std::array<std::byte, wire::kMpaCrcSize> crc{};
  if (crc_) crc = wire::EncodeFpduCrc(ComputeCrc32c(out_.first(used_)));
  Put(crc);
  in_fpdu_ = false;
  return used_;
}

}  // namespace stagecoach::emu
