#include "emu/tap/capture_tap.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/safe_copy/safe_copy.h"

namespace stagecoach::emu {

CaptureTap::CaptureTap(std::unique_ptr<Llp> below, std::shared_ptr<CaptureFlow> flow, CaptureStyle style)
    : LlpOver(std::move(below)), flow_(std::move(flow)), style_(style) {}

CaptureTap::~CaptureTap() {
  NoteEnd(CaptureDirection::kSent, CaptureEnd::kFin);
}

void CaptureTap::NoteEnd(CaptureDirection direction, CaptureEnd how) {
  if (style_ == CaptureStyle::kIwarp) flow_->Close(direction, how);
}

void CaptureTap::NoteEnd(const RxResult& result) {
  // A stream that ends inside a record has ended all the same, and has no error.
  const bool is_over = result.status == RxStatus::kEof || result.status == RxStatus::kReset;
  if (is_over && result.error == 0) NoteEnd(CaptureDirection::kReceived, CaptureEnd::kFin);
  if (is_over && result.error == ECONNRESET) NoteEnd(CaptureDirection::kReceived, CaptureEnd::kReset);
}

RxResult CaptureTap::NextRecord(RecordHead* record) {
  const RxResult result = below().NextRecord(record);
  NoteEnd(result);
  if (result.status == RxStatus::kReady) {
    CopyBytes(head_, record->head);
    length_ = record->length;
  }
  return result;
}

RxResult CaptureTap::Place(size_t head_size, std::span<const MutableBytes> destination) {
  const size_t payload_size = length_ - std::min(length_, head_size);
  MutableBytes own;
  if (payload_size > 0 && TotalSize(destination) == 0) {
    if (!discarding_) copy_.assign(payload_size, std::byte{0});
    discarding_ = true;
    own = copy_;
    destination = {&own, 1};
  }
  const RxResult result = below().Place(head_size, destination);
  NoteEnd(result);
  if (result.status != RxStatus::kReady) return result;
  if (!std::exchange(discarding_, false)) {
    copy_.clear();
    for (const MutableBytes& part : destination) AppendCopy(part);
  }
  const ConstBytes parts[] = {ConstBytes(head_).first(std::min(head_size, kMaxRecordHead)), copy_};
  flow_->Record(CaptureDirection::kReceived, parts);
  return result;
}

bool CaptureTap::AppendCopy(ConstBytes bytes) {
  const size_t at = copy_.size();
  copy_.resize(at + bytes.size());
  return SafeCopy(MutableBytes(copy_).subspan(at), bytes);
}

void CaptureTap::QueueRecord(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie) {
  queued_.push_back({{header.begin(), header.end()}, {payload.begin(), payload.end()}});
  below().QueueRecord(header, payload, cookie);
}

TxResult CaptureTap::Flush(MemoryPort& memory) {
  for (const Queued& record : queued_) ShowQueued(memory, record);
  queued_.clear();
  const TxResult result = below().Flush(memory);
  if (result.status == TxStatus::kReset && result.error == ECONNRESET) {
    NoteEnd(CaptureDirection::kReceived, CaptureEnd::kReset);
  }
  return result;
}

Llp::Drained CaptureTap::Drain() {
  const Drained drained = below().Drain();
  if (drained.end) NoteEnd(*drained.end);
  return drained;
}

void CaptureTap::Shutdown() {
  NoteEnd(CaptureDirection::kSent, CaptureEnd::kFin);
  below().Shutdown();
}

void CaptureTap::Abort() {
  NoteEnd(CaptureDirection::kSent, CaptureEnd::kReset);
  below().Abort();
}

void CaptureTap::ShowQueued(MemoryPort& memory, const Queued& record) {
  copy_.clear();
  for (const TxPart& part : record.payload) {
    if (!part.by_key) {
      AppendCopy(part.bytes);
      continue;
    }
    const auto pin = memory.Pin(part.key, part.address, part.length, part.access);
    if (!pin || !AppendCopy(pin->bytes())) return;
  }
  const ConstBytes parts[] = {record.header, copy_};
  flow_->Record(CaptureDirection::kSent, parts);
}

}  // namespace stagecoach::emu
