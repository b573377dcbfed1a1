#include "emu/llp/shm/shm_llp.h"

#include <algorithm>
#include <cerrno>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/fork/fork.h"

namespace stagecoach::emu {

std::unique_ptr<ShmLlp> ShmLlp::Create(EpollLoop& loop, OwnHalf own, PeerHalf peer, int socket,
                                       const RecordOptions& options) {
  own.Passed();
  const std::shared_ptr<Bell> bell = Bell::Hang(loop, socket,
                                                {.own = own.words(),
                                                 .peer = peer.words(),
                                                 .own_capacity = own.ring().size(),
                                                 .peer_capacity = peer.ring().size()});
  if (bell == nullptr) return nullptr;
  auto* const llp = new (std::nothrow) ShmLlp(std::move(own), std::move(peer), bell, options);
  if (llp == nullptr) {
    bell->TakeDown();
    errno = ENOMEM;
  }
  return std::unique_ptr<ShmLlp>(llp);
}

ShmLlp::ShmLlp(OwnHalf own, PeerHalf peer, std::shared_ptr<Bell> bell, const RecordOptions& options)
    : own_(std::move(own)),
      peer_(std::move(peer)),
      bell_(std::move(bell)),
      max_record_(std::min(options.max_record != 0 ? options.max_record : SIZE_MAX, LargestRecord(own_.ring().size()))),
      generation_(ForkGeneration()),
      writer_(own_.words(), own_.ring(), peer_.words()),
      reader_(own_.words(), peer_.words(), peer_.ring()) {}

ShmLlp::~ShmLlp() {
  // A child has neither the memory nor the socket, and its parent goes on.
  if (generation_ != ForkGeneration()) return;
  if (ending() == Ending::kNone) End(Ending::kFinished);
  bell_->TakeDown();
}

// --- Receiving ---

std::optional<RxResult> ShmLlp::RxEnd() const {
  if (ending() == Ending::kAborted) return RxResult{.status = RxStatus::kReset, .error = ECONNABORTED};
  if (bell_->IsAbused()) return RxResult{.status = RxStatus::kReset, .error = EPROTO};
  const bool is_gone = bell_->IsGone();
  switch (static_cast<Ending>(peer_.words().ending.load(std::memory_order_acquire))) {
    case Ending::kNone:
      if (!is_gone) return std::nullopt;
      [[fallthrough]];
    case Ending::kFinished:
      return RxResult{.status = RxStatus::kEof};
    case Ending::kAborted:
      break;
  }
  return RxResult{.status = RxStatus::kReset, .error = ECONNRESET};
}

RxResult ShmLlp::EndReceiving(const RxResult& result) {
  rx_end_ = result;
  return result;
}

RxResult ShmLlp::NextRecord(RecordHead* record) {
  if (rx_end_) return *rx_end_;
  if (ending() == Ending::kAborted) return EndReceiving(*RxEnd());
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

std::optional<TxResult> ShmLlp::TxEnd() const {
  const auto reset = [](int error) { return TxResult{.status = TxStatus::kReset, .error = error}; };
  switch (ending()) {
    case Ending::kNone:
      break;
    case Ending::kFinished:
      return reset(EPIPE);
    case Ending::kAborted:
      return reset(ECONNABORTED);
  }
  if (bell_->IsAbused()) return reset(EPROTO);
  const auto peer = static_cast<Ending>(peer_.words().ending.load(std::memory_order_relaxed));
  if (bell_->IsGone() || (peer != Ending::kNone && peer != Ending::kFinished)) return reset(ECONNRESET);
  return std::nullopt;
}

TxResult ShmLlp::EndSending(const TxResult& result) {
  tx_end_ = result;
  return result;
}

std::optional<MemoryFault> ShmLlp::WriteFront(MemoryPort& memory) {
  const TxRecord& record = records_.front();
  STAGECOACH_CHECK(writer_.Append(ConstBytes(record.header).first(record.header_size)));
  for (uint32_t i = 0; i < record.part_count; ++i) {
    const TxPart& part = parts_[i];
    if (!part.by_key) {
      if (!writer_.Append(part.bytes)) return MemoryFault::kUnmapped;
      continue;
    }
    const auto pin = memory.Pin(part.key, part.address, part.length, part.access);
    if (!pin) return pin.error();
    if (!writer_.Append(pin->bytes())) return MemoryFault::kUnmapped;
  }
  return std::nullopt;
}

TxResult ShmLlp::Flush(MemoryPort& memory) {
  if (tx_end_) return *tx_end_;
  TxResult result;
  bool any = false;
  while (!records_.empty()) {
    if (const auto end = TxEnd()) {
      result = EndSending(*end);
      break;
    }
    const TxRecord& record = records_.front();
    const RingWriter::Room room = writer_.Begin(record.size());
    if (room == RingWriter::Room::kTooLittle) {
      result.status = TxStatus::kWouldBlock;
      break;
    }
    if (room == RingWriter::Room::kFault) {
      result = EndSending({.status = TxStatus::kReset, .error = EPROTO});
      break;
    }
    if (const auto fault = WriteFront(memory)) {
      result = EndSending({.status = TxStatus::kMemoryFault, .memory_fault = *fault, .cookie = record.cookie});
      break;
    }
    writer_.Publish();
    any = true;
    ++counters_.tx_records;
    counters_.tx_payload_bytes += record.payload_size;
    queued_bytes_ -= record.size();
    sent_.push_back(uint64_t{record.cookie});
    for (uint32_t i = 0; i < record.part_count; ++i) parts_.pop_front();
    records_.pop_front();
  }
  // Once for all of them: a peer that is awake has seen each as it came.
  if (any) bell_->RingForRecords();
  counters_.writes = bell_->rings();
  return result;
}

bool ShmLlp::TakeSent(uint64_t* cookie) {
  if (sent_.empty()) return false;
  *cookie = sent_.front();
  sent_.pop_front();
  return true;
}

// --- Ending ---

Ending ShmLlp::ending() const {
  return static_cast<Ending>(own_.words().ending.load(std::memory_order_relaxed));
}

void ShmLlp::End(Ending ending) {
  own_.words().ending.store(static_cast<uint32_t>(ending), std::memory_order_release);
  bell_->RingForEverything();
  bell_->LookAgain();
}

void ShmLlp::Shutdown() {
  if (ending() == Ending::kNone) End(Ending::kFinished);
}

void ShmLlp::Abort() {
  if (ending() != Ending::kAborted) End(Ending::kAborted);
}

}  // namespace stagecoach::emu
