#include "emu/tap/record_faults.h"

#include <utility>

#include "emu/engine/ring.h"

namespace stagecoach::emu {
namespace {

class FaultyLlp final : public Llp {
 public:
  FaultyLlp(std::unique_ptr<Llp> below, const RecordFaults& faults) : below_(std::move(below)), faults_(faults) {}

  size_t MaxUlpdu() const override { return below_->MaxUlpdu(); }
  bool CanQueue() const override { return below_->CanQueue(); }
  void QueueRecord(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie) override {
    if (faults_.drop_one_in != 0 && faults_.luck.OneIn(faults_.drop_one_in)) {
      queued_.push_back({.cookie = cookie, .lost = true});
      return;
    }
    if (faults_.duplicate_one_in != 0 && faults_.luck.OneIn(faults_.duplicate_one_in)) {
      below_->QueueRecord(header, payload, cookie);
      // What is queued first leaves first, so that the payload is kept for both. The layer below may be full now.
      const bool room = below_->CanQueue();
      queued_.push_back({.cookie = cookie, .told = !room});
      if (!room) return;
    }
    below_->QueueRecord(header, payload, cookie);
    queued_.push_back({.cookie = cookie});
  }

  RxResult NextRecord(RecordHead* record) override { return below_->NextRecord(record); }
  RxResult Place(size_t head_size, std::span<const MutableBytes> destination) override {
    return below_->Place(head_size, destination);
  }

  TxResult Flush(MemoryPort& memory) override { return below_->TxIdle() ? TxResult{} : below_->Flush(memory); }
  bool TakeSent(uint64_t* cookie) override {
    while (!queued_.empty()) {
      const Queued front = queued_.front();
      *cookie = front.cookie;
      if (!front.lost && !below_->TakeSent(cookie)) return false;
      queued_.pop_front();
      if (front.told) return true;
    }
    return false;
  }
  bool TxIdle() const override { return queued_.empty() && below_->TxIdle(); }

  Stream& stream() override { return below_->stream(); }
  const Counters& counters() const override { return below_->counters(); }

 private:
  // What has been queued and not been reported as sent, in order.
  struct Queued {
    uint64_t cookie = 0;
    bool lost = false;  // never given to the layer below
    bool told = true;   // false: of two, the first
  };

  const std::unique_ptr<Llp> below_;
  RecordFaults faults_;
  Ring<Queued> queued_;
};

}  // namespace

std::unique_ptr<Llp> WithRecordFaults(std::unique_ptr<Llp> below, const RecordFaults& faults) {
  return std::make_unique<FaultyLlp>(std::move(below), faults);
}

}  // namespace stagecoach::emu
