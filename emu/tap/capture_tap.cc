#include "emu/tap/capture_tap.h"

#include <algorithm>

namespace stagecoach::emu {

CaptureTap::CaptureTap(std::unique_ptr<Llp> inner, std::shared_ptr<CaptureFlow> flow)
    : inner_(std::move(inner)), flow_(std::move(flow)) {}

RxResult CaptureTap::NextRecord(RecordHead* record) {
  const RxResult result = inner_->NextRecord(record);
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
    discarded_.resize(payload_size);
    own = discarded_;
    destination = {&own, 1};
  }
  const RxResult result = inner_->Place(head_size, destination);
  if (result.status != RxStatus::kReady) return result;
  rx_parts_.assign(1, ConstBytes(head_).first(std::min(head_size, kMaxRecordHead)));
  rx_parts_.insert(rx_parts_.end(), destination.begin(), destination.end());
  flow_->Record(CaptureDirection::kReceived, rx_parts_);
  return result;
}

void CaptureTap::QueueRecord(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie) {
  queued_.push_back({{header.begin(), header.end()}, {payload.begin(), payload.end()}});
  inner_->QueueRecord(header, payload, cookie);
}

TxResult CaptureTap::Flush(MemoryPort& memory) {
  for (const Queued& record : queued_) ShowQueued(memory, record);
  queued_.clear();
  return inner_->Flush(memory);
}

void CaptureTap::ShowQueued(MemoryPort& memory, const Queued& record) {
  std::vector<MemoryPin> pins;
  std::vector<ConstBytes> parts = {record.header};
  for (const TxPart& part : record.payload) {
    if (!part.by_key) {
      parts.push_back(part.bytes);
      continue;
    }
    auto pin = memory.Pin(part.key, part.address, part.length, part.access);
    if (!pin) return;
    parts.push_back(pin->bytes());
    pins.push_back(std::move(*pin));
  }
  flow_->Record(CaptureDirection::kSent, parts);
}

}  // namespace stagecoach::emu
