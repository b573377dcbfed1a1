#include "emu/llp/mpa/mpa_llp.h"

#include <algorithm>
#include <array>
#include <cerrno>

#include "base/check.h"
#include "base/cursor.h"
#include "base/mark.h"
#include "base/safe_copy/safe_copy.h"

namespace stagecoach::emu {
namespace {

// Room in the staging buffer for a few of the largest FPDUs, so that one write can carry them.
constexpr size_t kStageTarget = size_t{256} * 1024;
// What one turn may throw away.
constexpr int kDrainReads = 16;
constexpr size_t kDrainReadSize = 16 * 1024;

bool IsFirst(MpaReceiver::Inside place, uint8_t* seen) {
  const auto bit = static_cast<uint8_t>(1u << static_cast<uint8_t>(place));
  if ((*seen & bit) != 0) return false;
  *seen |= bit;
  return true;
}

}  // namespace

MpaLlp::MpaLlp(std::unique_ptr<Stream> stream, const RecordOptions& options, const Carriage& carriage)
    : MpaLlp(*stream, options, carriage) {
  owned_ = std::move(stream);
}

MpaLlp::MpaLlp(Stream& stream, const RecordOptions& options, const Carriage& carriage)
    : stream_(stream),
      options_(options),
      carriage_(carriage),
      receiver_(options.crc),
      staged_(options.crc || options.insert_markers),
      framer_(options.crc, options.insert_markers) {
  if (staged_) stage_.resize(kStageTarget);
}

// --- Receiving ---

RxResult MpaLlp::EndReceiving(const RxResult& result) {
  rx_ended_ = true;
  rx_end_ = result;
  return result;
}

// Where the wire cut the records, as far as they have come.
void MpaLlp::MarkShortRead() {
  const MpaReceiver::Inside inside = receiver_.EndsInside();
  if (!IsFirst(inside, &rx_cuts_marked_)) return;
  switch (inside) {
    case MpaReceiver::Inside::kLengthField:
      STAGECOACH_MARK("llp.read_ends_inside_a_length_field");
      break;
    case MpaReceiver::Inside::kRecordHead:
      STAGECOACH_MARK("llp.read_ends_inside_a_record_head");
      break;
    case MpaReceiver::Inside::kTrailer:
      STAGECOACH_MARK("llp.read_ends_inside_an_fpdu_trailer");
      break;
    case MpaReceiver::Inside::kBetweenFields:
    case MpaReceiver::Inside::kPayload:
      break;
  }
}

std::optional<RxResult> MpaLlp::ReadMore() {
  // All that came has been looked at, so this is where it ends.
  if (read_was_short_) {
    read_was_short_ = false;
    MarkShortRead();
    return RxResult{.status = RxStatus::kWouldBlock};
  }
  const std::span<const MutableBytes> into = receiver_.NextRx();
  const size_t asked = TotalSize(into);
  ++counters_.reads;
  const IoResult io = stream_.Read(into);
  switch (io.status) {
    case IoStatus::kOk:
      STAGECOACH_CHECK(io.bytes > 0 && io.bytes <= asked);
      receiver_.OnRx(io.bytes);
      read_was_short_ = io.bytes < asked;
      return std::nullopt;
    case IoStatus::kWouldBlock:
      return RxResult{.status = RxStatus::kWouldBlock};
    case IoStatus::kEof:
      if (!receiver_.BetweenRecords()) STAGECOACH_MARK("llp.stream_ends_inside_a_record");
      // A stream that ends inside a record was cut, whatever TCP says.
      return EndReceiving({.status = receiver_.BetweenRecords() ? RxStatus::kEof : RxStatus::kReset});
    case IoStatus::kError:
      break;
  }
  if (io.error == EFAULT) return RxResult{.status = RxStatus::kMemoryFault};
  return EndReceiving({.status = RxStatus::kReset, .error = io.error});
}

RxResult MpaLlp::NextRecord(RecordHead* record) {
  if (rx_ended_) return rx_end_;
  while (true) {
    switch (receiver_.NextRecord(record)) {
      case MpaReceiver::Step::kReady:
        return {.status = RxStatus::kReady};
      case MpaReceiver::Step::kBadCrc:
        return EndReceiving({.status = RxStatus::kFault, .fault = LlpFault::kBadCrc});
      case MpaReceiver::Step::kMemoryFault:  // of Place alone
      case MpaReceiver::Step::kNeedBytes:
        break;
    }
    if (const auto end = ReadMore()) return *end;
  }
}

RxResult MpaLlp::Place(size_t head_size, std::span<const MutableBytes> destination) {
  if (rx_ended_) return rx_end_;
  for (;;) {
    const MpaReceiver::Step step = receiver_.Place(head_size, destination);
    if (step == MpaReceiver::Step::kMemoryFault) return {.status = RxStatus::kMemoryFault};
    if (step == MpaReceiver::Step::kReady) return {.status = RxStatus::kReady};
    if (const auto end = ReadMore()) return *end;
  }
}

Llp::Drained MpaLlp::Drain() {
  std::array<std::byte, kDrainReadSize> scratch;
  const MutableBytes into(scratch);
  Drained drained;
  for (int i = 0; i < kDrainReads; ++i) {
    const IoResult result = stream_.Read({&into, 1});
    if (result.status == IoStatus::kWouldBlock) return drained;
    if (result.status != IoStatus::kOk) {
      const bool orderly = result.status == IoStatus::kEof;
      drained.end = RxResult{.status = orderly ? RxStatus::kEof : RxStatus::kReset, .error = result.error};
      return drained;
    }
    drained.any = true;
  }
  drained.more = true;
  return drained;
}

// --- Queueing ---

size_t MpaLlp::MaxUlpdu() const {
  // The segment size follows the path, but asking may be a system call: ask now and then.
  if (asks_until_refresh_ == 0) {
    asks_until_refresh_ = kSegmentSizeAskInterval;
    const size_t most = Mulpdu(SIZE_MAX, options_.insert_markers);
    max_ulpdu_ = options_.max_record != 0 ? std::clamp(options_.max_record, kMinMulpdu, most)
                                          : Mulpdu(stream_.MaxSegmentSize(), options_.insert_markers);
  }
  --asks_until_refresh_;
  return max_ulpdu_;
}

bool MpaLlp::CanQueue() const {
  return queued_bytes_ < kMaxQueuedBytes && records_.size() < kMaxQueuedRecords;
}

void MpaLlp::QueueRecord(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie) {
  size_t payload_length = 0;
  for (const TxPart& part : payload) payload_length += part.size();
  const size_t ulpdu_length = header.size() + payload_length;
  STAGECOACH_CHECK(CanQueue() && header.size() <= kMaxTxHeader && ulpdu_length <= wire::kMpaUlpduMax);

  TxRecord& record = records_.push_back({});
  ByteWriter writer(record.head);
  writer.U16(static_cast<uint16_t>(ulpdu_length));
  writer.Bytes(header);
  record.head_size = static_cast<uint8_t>(writer.position());
  record.trailer_size = static_cast<uint8_t>(FpduTrailerSize(ulpdu_length));
  record.ulpdu_length = static_cast<uint32_t>(ulpdu_length);
  record.payload_length = static_cast<uint32_t>(payload_length);
  record.cookie = cookie;
  for (const TxPart& part : payload) {
    if (part.size() == 0) continue;
    parts_.push_back(part);
    ++record.part_count;
  }
  queued_bytes_ += record.size();
}

bool MpaLlp::TakeSent(uint64_t* cookie) {
  if (sent_.empty()) return false;
  *cookie = sent_.front();
  sent_.pop_front();
  return true;
}

void MpaLlp::OnFrontLeft() {
  const TxRecord& record = records_.front();
  ++counters_.tx_records;
  counters_.tx_payload_bytes += record.payload_length;
  queued_bytes_ -= record.size();
  sent_.push_back(record.cookie);
  for (uint32_t i = 0; i < record.part_count; ++i) parts_.pop_front();
  records_.pop_front();
}

// --- Transmitting ---

Result<MutableBytes, MemoryFault> MpaLlp::PinPart(MemoryPort& memory, const TxPart& part, size_t skip) {
  auto pin = memory.Pin(part.key, part.address + skip, part.length - skip, part.access);
  if (!pin) return Err(pin.error());
  if (unreadable_ > 0 && !IsReadable(pin->bytes())) return Err(MemoryFault::kUnmapped);
  pins_.push_back(std::move(*pin));
  return pins_.back().bytes();
}

TxResult MpaLlp::EndSending(const TxResult& result) {
  pins_.clear();
  tx_ended_ = true;
  tx_end_ = result;
  return result;
}

TxResult MpaLlp::Flush(MemoryPort& memory) {
  if (tx_ended_) return tx_end_;
  while (!records_.empty()) {
    write_part_count_ = 0;
    write_size_ = 0;
    const std::optional<TxResult> fault = staged_ ? Stage(memory) : Gather(memory);
    if (fault) return EndSending(*fault);

    ++counters_.writes;
    const IoResult io = stream_.Write({write_parts_.data(), write_part_count_});
    pins_.clear();
    if (io.status == IoStatus::kWouldBlock) return {.status = TxStatus::kWouldBlock};
    // Some of what was to leave is not mapped; what it is shows when each part is looked at. None may be there only a
    // moment at a time.
    if (io.status == IoStatus::kError && io.error == EFAULT) {
      if (++unreadable_ <= kMostUnreadable) continue;
      return EndSending({.status = TxStatus::kMemoryFault,
                         .memory_fault = MemoryFault::kUnmapped,
                         .cookie = records_.front().cookie});
    }
    unreadable_ = 0;
    if (io.status != IoStatus::kOk) {
      if (front_sent_ > 0) STAGECOACH_MARK("llp.stream_fails_inside_a_record_of_ours");
      return EndSending({.status = TxStatus::kReset, .error = io.error});
    }
    STAGECOACH_CHECK(io.bytes > 0 && io.bytes <= write_size_);
    if (staged_) {
      OnStagedBytesLeft(io.bytes);
    } else {
      OnGatheredBytesLeft(io.bytes);
    }
    if (io.bytes < write_size_) {
      MarkShortWrite();
      return {.status = TxStatus::kWouldBlock};
    }
  }
  return {.status = TxStatus::kIdle};
}

// Where the write that goes on will have to begin.
void MpaLlp::MarkShortWrite() {
  using Inside = MpaReceiver::Inside;
  const TxRecord& record = records_.front();
  if (front_sent_ == 0) {
    if (IsFirst(Inside::kBetweenFields, &tx_cuts_marked_)) STAGECOACH_MARK("llp.write_ends_between_records");
  } else if (front_sent_ < record.head_size) {
    if (IsFirst(Inside::kRecordHead, &tx_cuts_marked_)) STAGECOACH_MARK("llp.write_ends_inside_an_fpdu_header");
  } else if (!staged_ && front_sent_ > size_t{record.head_size} + record.payload_length) {
    if (IsFirst(Inside::kTrailer, &tx_cuts_marked_)) STAGECOACH_MARK("llp.write_ends_inside_an_fpdu_trailer");
  }
}

bool MpaLlp::AddPart(ConstBytes bytes) {
  if (write_part_count_ == kMaxWriteParts) return false;
  write_parts_[write_part_count_++] = bytes;
  write_size_ += bytes.size();
  return true;
}

// Lays out the front of the queue for one write. Returns a fault only when nothing in front of the unreadable memory is
// left to write: what precedes it goes out first.
std::optional<TxResult> MpaLlp::Gather(MemoryPort& memory) {
  size_t skip = front_sent_;
  size_t part_index = 0;
  // The bytes of `part` behind `skip`; empty when they have left already.
  const auto rest = [&skip](ConstBytes part) {
    const size_t gone = std::min(skip, part.size());
    skip -= gone;
    return part.subspan(gone);
  };
  for (size_t i = 0; i < records_.size(); ++i) {
    const TxRecord& record = records_[i];
    const ConstBytes head = rest(ConstBytes(record.head).first(record.head_size));
    if (!head.empty() && !AddPart(head)) return std::nullopt;
    for (uint32_t p = 0; p < record.part_count; ++p, ++part_index) {
      const TxPart& part = parts_[part_index];
      if (skip >= part.size()) {
        skip -= part.size();
        continue;
      }
      if (write_part_count_ == kMaxWriteParts) return std::nullopt;
      if (!part.by_key) {
        AddPart(rest(part.bytes));
        continue;
      }
      const auto bytes = PinPart(memory, part, skip);
      skip = 0;
      if (!bytes) {
        if (write_size_ > 0) {
          STAGECOACH_MARK("llp.what_precedes_unreadable_memory_leaves_first");
          return std::nullopt;
        }
        if (front_sent_ > 0) STAGECOACH_MARK("llp.memory_gone_inside_a_record");
        return TxResult{.status = TxStatus::kMemoryFault, .memory_fault = bytes.error(), .cookie = record.cookie};
      }
      AddPart(*bytes);
    }
    const ConstBytes trailer = rest(ConstBytes(record.trailer).first(record.trailer_size));
    if (!trailer.empty() && !AddPart(trailer)) return std::nullopt;
  }
  return std::nullopt;
}

void MpaLlp::OnGatheredBytesLeft(size_t bytes) {
  front_sent_ += bytes;
  while (!records_.empty() && front_sent_ >= records_.front().size()) {
    front_sent_ -= records_.front().size();
    OnFrontLeft();
  }
}

// When the staging buffer is empty, builds the FPDUs of as many records as fit. The pins are gone before the write.
std::optional<TxResult> MpaLlp::Stage(MemoryPort& memory) {
  if (stage_begin_ == stage_end_) {
    stage_begin_ = stage_end_ = 0;
    size_t part_index = 0;
    for (size_t i = 0; i < records_.size(); ++i) {
      const TxRecord& record = records_[i];
      if (framer_.MaxFramedSize(record.ulpdu_length) > stage_.size() - stage_end_) {
        STAGECOACH_MARK("llp.staging_buffer_full");
        break;
      }
      if (const auto fault = StageRecord(memory, record, part_index)) {
        if (stage_end_ == 0) return fault;
        break;
      }
      part_index += record.part_count;
    }
  }
  AddPart(ConstBytes(stage_).subspan(stage_begin_, stage_end_ - stage_begin_));
  return std::nullopt;
}

std::optional<TxResult> MpaLlp::StageRecord(MemoryPort& memory, const TxRecord& record, size_t first_part) {
  // All of the record must be readable before its first byte is framed.
  pins_.clear();
  for (uint32_t p = 0; p < record.part_count; ++p) {
    const TxPart& part = parts_[first_part + p];
    if (!part.by_key) continue;
    if (const auto bytes = PinPart(memory, part, 0); !bytes) {
      return TxResult{.status = TxStatus::kMemoryFault, .memory_fault = bytes.error(), .cookie = record.cookie};
    }
  }
  const MpaFramer before = framer_;
  framer_.Begin(MutableBytes(stage_).subspan(stage_end_), record.ulpdu_length);
  framer_.Append(ConstBytes(record.head).first(record.head_size).subspan(wire::kMpaLengthSize));
  size_t next_pin = 0;
  for (uint32_t p = 0; p < record.part_count; ++p) {
    const TxPart& part = parts_[first_part + p];
    if (framer_.Append(part.by_key ? ConstBytes(pins_[next_pin++].bytes()) : part.bytes)) continue;
    framer_ = before;
    pins_.clear();
    return TxResult{.status = TxStatus::kMemoryFault, .memory_fault = MemoryFault::kUnmapped, .cookie = record.cookie};
  }
  const size_t size = framer_.Finish();
  stage_end_ += size;
  staged_sizes_.push_back(size);
  counters_.tx_copied_bytes += record.payload_length;
  pins_.clear();
  return std::nullopt;
}

void MpaLlp::OnStagedBytesLeft(size_t bytes) {
  stage_begin_ += bytes;
  front_sent_ += bytes;
  while (!staged_sizes_.empty() && front_sent_ >= staged_sizes_.front()) {
    front_sent_ -= staged_sizes_.front();
    staged_sizes_.pop_front();
    OnFrontLeft();
  }
}

const Llp::Counters& MpaLlp::counters() const {
  counters_.rx_records = receiver_.records();
  counters_.rx_payload_bytes = receiver_.payload_bytes();
  counters_.rx_copied_bytes = receiver_.copied_bytes();
  return counters_;
}

}  // namespace stagecoach::emu
