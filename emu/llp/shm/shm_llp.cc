#include "emu/llp/shm/shm_llp.h"

#include <algorithm>
#include <cerrno>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/fork/fork.h"
#include "base/safe_copy/safe_copy.h"

namespace stagecoach::emu {

std::unique_ptr<ShmLlp> ShmLlp::Create(EpollLoop& loop, OwnHalf own, PeerHalf peer, int socket,
                                       const RecordOptions& options) {
  return Create(loop, std::move(own), std::move(peer), socket, options, kLeastReferred);
}

std::unique_ptr<ShmLlp> ShmLlp::Create(EpollLoop& loop, OwnHalf own, PeerHalf peer, int socket,
                                       const RecordOptions& options, size_t least_referred) {
  own.Passed();
  const PeerMemory peer_memory(socket, {.at = peer.words().token_at, .value = peer.words().token});
  own.words().reading.store(static_cast<uint32_t>(peer_memory.reading()), std::memory_order_relaxed);
  const std::shared_ptr<Bell> bell = Bell::Hang(loop, socket, {.own = own.words(), .peer = peer.words()});
  if (bell == nullptr) return nullptr;
  auto* const llp =
      new (std::nothrow) ShmLlp(std::move(own), std::move(peer), bell, peer_memory, options, least_referred);
  if (llp == nullptr) {
    bell->TakeDown();
    errno = ENOMEM;
  }
  return std::unique_ptr<ShmLlp>(llp);
}

ShmLlp::ShmLlp(OwnHalf own, PeerHalf peer, std::shared_ptr<Bell> bell, const PeerMemory& peer_memory,
               const RecordOptions& options, size_t least_referred)
    : own_(std::move(own)),
      peer_(std::move(peer)),
      bell_(std::move(bell)),
      peer_memory_(peer_memory),
      max_record_(std::min(options.max_record != 0 ? options.max_record : SIZE_MAX, LargestRecord(own_.ring().size()))),
      least_referred_(least_referred),
      generation_(ForkGeneration()),
      writer_(own_.words(), own_.ring(), peer_.words()),
      reader_(own_.words(), peer_.words(), peer_.ring()) {
  if (peer_memory_.reading() == Reading::kPossible) reader_.TakeReferences();
}

ShmLlp::~ShmLlp() {
  // A child has neither the memory nor the socket, and its parent goes on.
  if (generation_ != ForkGeneration()) return;
  own_.Withdraw();
  if (ending() == Ending::kNone) End(Ending::kFinished);
  bell_->TakeDown();
}

// --- Receiving ---

std::optional<RxResult> ShmLlp::RxEnd() const {
  if (HasAborted()) return RxResult{.status = RxStatus::kReset, .error = ECONNABORTED};
  if (bell_->IsAbused()) return RxResult{.status = RxStatus::kReset, .error = EPROTO};
  const bool is_gone = bell_->IsGone();
  switch (static_cast<Ending>(peer_.words().ending.load(std::memory_order_acquire))) {
    case Ending::kNone:
      if (!is_gone) return std::nullopt;
      [[fallthrough]];
    case Ending::kFinished:
      return RxResult{.status = RxStatus::kEof};
    case Ending::kUnreadable:
      // Who sends says first why.
      if (published_ > 0 && !tx_end_) return std::nullopt;
      [[fallthrough]];
    case Ending::kAborted:
      break;
  }
  return RxResult{.status = RxStatus::kReset, .error = ECONNRESET};
}

bool ShmLlp::HasArrived() const {
  if (end_is_told_.load(std::memory_order_relaxed)) return false;
  const uint64_t consumed = own_.words().consumed.load(std::memory_order_relaxed);
  return peer_.words().produced.load(std::memory_order_relaxed) != consumed || RxEnd().has_value();
}

RxResult ShmLlp::EndReceiving(const RxResult& result) {
  rx_end_ = result;
  end_is_told_.store(true, std::memory_order_relaxed);
  return result;
}

RxResult ShmLlp::NextRecord(RecordHead* record) {
  if (rx_end_) return *rx_end_;
  if (HasAborted()) return EndReceiving(*RxEnd());
  for (std::optional<RxResult> end;; end = RxEnd()) {
    switch (reader_.Next(record)) {
      case RingReader::Step::kReady:
        return {.status = RxStatus::kReady};
      case RingReader::Step::kFault:
        return EndReceiving({.status = RxStatus::kFault, .fault = LlpFault::kBadLength});
      case RingReader::Step::kEmpty:
        break;
    }
    // What was sent before the end is there when the end is seen, but may not have been when we looked: so once more.
    if (end) return EndReceiving(*end);
    if (!RxEnd()) return {.status = RxStatus::kWouldBlock};
  }
}

RxResult ShmLlp::Place(size_t head_size, std::span<const MutableBytes> destination) {
  if (rx_end_) return *rx_end_;
  RecordHead record;
  STAGECOACH_CHECK(reader_.Next(&record) == RingReader::Step::kReady);
  if (!reader_.Place(head_size, destination)) return {.status = RxStatus::kMemoryFault};
  if (!reader_.references().empty() && TotalSize(destination) > 0) {
    ++counters_.reads;
    const size_t placed = reader_.inline_size() - head_size;
    switch (peer_memory_.Pull(reader_.references(), placed, destination)) {
      case PeerMemory::Pulled::kDone:
        break;
      case PeerMemory::Pulled::kNoDestination:
        return {.status = RxStatus::kMemoryFault};
      case PeerMemory::Pulled::kUnreadable:
        End(Ending::kUnreadable);
        return EndReceiving({.status = RxStatus::kReset, .error = ECONNRESET});
      case PeerMemory::Pulled::kRefused:
        End(Ending::kAborted);
        return EndReceiving({.status = RxStatus::kReset, .error = ECONNRESET});
    }
  }
  ++counters_.rx_records;
  counters_.rx_payload_bytes += record.length - head_size;
  reader_.Release();
  bell_->RingForRoom();
  counters_.writes = bell_->rings();
  return {.status = RxStatus::kReady};
}

Llp::Drained ShmLlp::Drain() {
  // The end before what precedes it, as in NextRecord.
  Drained drained{.end = RxEnd()};
  switch (reader_.Discard()) {
    case RingReader::Step::kReady:
      drained.any = true;
      bell_->RingForRoom();
      counters_.writes = bell_->rings();
      break;
    case RingReader::Step::kEmpty:
      break;
    case RingReader::Step::kFault:
      drained.end = RxResult{.status = RxStatus::kReset, .error = EPROTO};
      break;
  }
  return drained;
}

// --- Sending ---

void ShmLlp::QueueRecord(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie) {
  size_t payload_size = 0;
  for (const TxPart& part : payload) payload_size += part.size();
  STAGECOACH_CHECK(CanQueue() && header.size() <= kMaxTxHeader &&
                   header.size() + payload_size <= LargestRecord(own_.ring().size()));
  TxRecord& record = records_.push_back({});
  CopyBytes(record.header, header);
  record.header_size = static_cast<uint8_t>(header.size());
  record.payload_size = static_cast<uint32_t>(payload_size);
  record.part_count = static_cast<uint32_t>(payload.size());
  record.cookie = cookie;
  for (const TxPart& part : payload) parts_.push_back(part);
  queued_bytes_ += record.size();
}

std::optional<TxResult> ShmLlp::TxEnd(bool sends) const {
  const auto reset = [](int error) { return TxResult{.status = TxStatus::kReset, .error = error}; };
  switch (ending()) {
    case Ending::kNone:
      break;
    case Ending::kFinished:
      if (sends) return reset(EPIPE);
      break;
    case Ending::kAborted:
    case Ending::kUnreadable:
      return reset(ECONNABORTED);
  }
  if (bell_->IsAbused()) return reset(EPROTO);
  const auto peer = static_cast<Ending>(peer_.words().ending.load(std::memory_order_relaxed));
  if (bell_->IsGone() || (peer != Ending::kNone && peer != Ending::kFinished)) return reset(ECONNRESET);
  return std::nullopt;
}

TxResult ShmLlp::EndSending(const TxResult& result) {
  tx_end_ = result;
  // What waits is given back to its owner.
  own_.Withdraw();
  return result;
}

bool ShmLlp::MayRefer(const TxRecord& record) const {
  return record.payload_size >= least_referred_ && record.part_count <= kMostReferences &&
         reference() == Reading::kPossible;
}

std::optional<ShmLlp::Written> ShmLlp::WriteReferring(const TxRecord& record, size_t first_part, MemoryPort& memory) {
  std::array<Reference, kMostReferences> references;
  size_t count = 0;
  // An engine's head is always there; of our headers most are shorter.
  std::array<std::byte, kMaxTxHeader> head = record.header;
  size_t head_size = record.header_size;
  for (size_t i = first_part; i < first_part + record.part_count; ++i) {
    const TxPart& part = parts_[i];
    ConstBytes bytes = part.bytes;
    MemoryPin pin;
    Reference& reference = references[count];
    reference = {};
    if (part.by_key) {
      auto pinned = memory.Pin(part.key, part.address, part.length, part.access);
      if (!pinned) return Written{.fault = pinned.error()};
      pin = std::move(*pinned);
      if (pin.guard().word == nullptr) return std::nullopt;
      bytes = pin.bytes();
      reference.guard_at = reinterpret_cast<uintptr_t>(pin.guard().word);
      reference.guard = pin.guard().value;
    }
    if (head_size < kMaxRecordHead) {
      const ConstBytes first = bytes.first(std::min(bytes.size(), kMaxRecordHead - head_size));
      if (!SafeCopy(MutableBytes(head).subspan(head_size), first)) return Written{.fault = MemoryFault::kUnmapped};
      head_size += first.size();
      bytes = bytes.subspan(first.size());
    }
    reference.at = reinterpret_cast<uintptr_t>(bytes.data());
    reference.length = bytes.size();
    if (!bytes.empty()) ++count;
  }
  if (count == 0) return std::nullopt;
  const RingWriter::Room room = writer_.BeginReferring(head_size, std::span(references).first(count));
  if (room == RingWriter::Room::kEnough) STAGECOACH_CHECK(writer_.Append(ConstBytes(head).first(head_size)));
  return Written{.room = room};
}

ShmLlp::Written ShmLlp::Write(TxRecord& record, size_t first_part, MemoryPort& memory) {
  if (MayRefer(record)) {
    if (const auto written = WriteReferring(record, first_part, memory)) {
      record.is_referred = true;
      return *written;
    }
  }
  record.is_referred = false;
  const RingWriter::Room room = writer_.Begin(record.size());
  if (room != RingWriter::Room::kEnough) return {.room = room};
  STAGECOACH_CHECK(writer_.Append(ConstBytes(record.header).first(record.header_size)));
  for (size_t i = first_part; i < first_part + record.part_count; ++i) {
    const TxPart& part = parts_[i];
    if (!part.by_key) {
      if (!writer_.Append(part.bytes)) return {.fault = MemoryFault::kUnmapped};
      continue;
    }
    const auto pin = memory.Pin(part.key, part.address, part.length, part.access);
    if (!pin) return {.fault = pin.error()};
    if (!writer_.Append(pin->bytes())) return {.fault = MemoryFault::kUnmapped};
  }
  return {};
}

MemoryFault ShmLlp::FaultOfFront(MemoryPort& memory) const {
  for (size_t i = 0; i < records_.front().part_count; ++i) {
    const TxPart& part = parts_[i];
    if (!part.by_key) continue;
    const auto pin = memory.Pin(part.key, part.address, part.length, part.access);
    if (!pin) return pin.error();
  }
  return MemoryFault::kUnmapped;
}

bool ShmLlp::TakeReleases() {
  std::optional<uint64_t> consumed;
  for (; published_ > 0; --published_) {
    const TxRecord& record = records_.front();
    if (record.is_referred) {
      if (!consumed && !(consumed = writer_.Consumed())) return false;
      if (*consumed < record.end) break;
    }
    sent_.push_back(uint64_t{record.cookie});
    queued_bytes_ -= record.size();
    published_parts_ -= record.part_count;
    for (uint32_t i = 0; i < record.part_count; ++i) parts_.pop_front();
    records_.pop_front();
  }
  return true;
}

TxResult ShmLlp::EndSendingAsPeer(const TxResult& end, MemoryPort& memory) {
  // The ending before what the other end had fetched by then, which has left.
  const auto peer = static_cast<Ending>(peer_.words().ending.load(std::memory_order_acquire));
  if (!TakeReleases()) return EndSending({.status = TxStatus::kReset, .error = EPROTO});
  if (records_.empty()) return {};
  if (published_ == 0 || peer != Ending::kUnreadable || HasAborted()) return EndSending(end);
  return EndSending(
      {.status = TxStatus::kMemoryFault, .memory_fault = FaultOfFront(memory), .cookie = records_.front().cookie});
}

TxResult ShmLlp::Flush(MemoryPort& memory) {
  if (tx_end_) return *tx_end_;
  const TxResult impossible{.status = TxStatus::kReset, .error = EPROTO};
  if (!TakeReleases()) return EndSending(impossible);
  TxResult result;
  bool any = false;
  while (published_ < records_.size()) {
    if (const auto end = TxEnd(/*sends=*/true)) return EndSendingAsPeer(*end, memory);
    TxRecord& record = records_[published_];
    const Written written = Write(record, published_parts_, memory);
    if (written.room == RingWriter::Room::kTooLittle) {
      result.status = TxStatus::kWouldBlock;
      break;
    }
    if (written.room == RingWriter::Room::kFault) {
      result = EndSending(impossible);
      break;
    }
    if (written.fault) {
      // What precedes it leaves first.
      if (!TakeReleases()) return EndSending(impossible);
      if (published_ > 0) break;
      result = EndSending({.status = TxStatus::kMemoryFault, .memory_fault = *written.fault, .cookie = record.cookie});
      break;
    }
    writer_.Publish();
    record.end = writer_.produced();
    any = true;
    ++counters_.tx_records;
    counters_.tx_payload_bytes += record.payload_size;
    ++published_;
    published_parts_ += record.part_count;
    if (!records_.front().is_referred) TakeReleases();
  }
  // Once for all of them: a peer that is awake has seen each as it came.
  if (any) bell_->RingForRecords();
  counters_.writes = bell_->rings();
  if (published_ == 0 || tx_end_) return result;
  if (const auto end = TxEnd(/*sends=*/false)) return EndSendingAsPeer(*end, memory);
  return {.status = TxStatus::kWouldBlock};
}

Reading ShmLlp::reference() const {
  if (own_.offered() != Reading::kPossible) return own_.offered();
  return static_cast<Reading>(peer_.words().reading.load(std::memory_order_relaxed));
}

Carriage ShmLlp::carriage() const {
  return {.by = "shm", .why = LetsSameUserRead() ? PayloadWords(reference()) : std::string_view()};
}

void ShmLlp::ForgetMemory() {
  if (tx_end_ || !TakeReleases() || published_ == 0) return;
  EndSending({.status = TxStatus::kReset});
}

bool ShmLlp::TakeSent(uint64_t* cookie) {
  if (sent_.empty()) return false;
  *cookie = sent_.front();
  sent_.pop_front();
  return true;
}

void ShmLlp::Arm(bool readable, bool writable) {
  // Half of the ring, or half of what waits to be fetched, so that nobody is woken for each record that has left.
  const uint64_t produced = writer_.produced();
  uint64_t awaited = produced - std::min<uint64_t>(produced, own_.ring().size() / 2);
  if (published_ > 0) awaited = std::max(awaited, records_[published_ / 2].end);
  bell_->Arm(readable, writable, awaited);
}

// --- Ending ---

Ending ShmLlp::ending() const {
  return static_cast<Ending>(own_.words().ending.load(std::memory_order_relaxed));
}

bool ShmLlp::HasAborted() const {
  return ending() != Ending::kNone && ending() != Ending::kFinished;
}

void ShmLlp::End(Ending ending) {
  if (ending != Ending::kFinished) own_.Withdraw();
  own_.words().ending.store(static_cast<uint32_t>(ending), std::memory_order_release);
  bell_->RingForEverything();
  bell_->LookAgain();
}

void ShmLlp::Shutdown() {
  if (ending() == Ending::kNone) End(Ending::kFinished);
}

void ShmLlp::Abort() {
  if (!HasAborted()) End(Ending::kAborted);
}

}  // namespace stagecoach::emu
