#include "emu/tap/record_faults.h"

#include <utility>

#include "emu/engine/ring.h"

namespace stagecoach::emu {
namespace {

// Of the first of two: nobody is told of it.
constexpr uint64_t kCopyCookie = ~uint64_t{0};

class FaultyLlp final : public Llp {
 public:
  FaultyLlp(std::unique_ptr<Llp> below, const RecordFaults& faults) : below_(std::move(below)), faults_(faults) {}

  size_t MaxUlpdu() const override { return below_->MaxUlpdu(); }
  bool CanQueue() const override { return below_->CanQueue(); }
  void QueueRecord(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie) override {
    if (faults_.drop_one_in != 0 && faults_.luck.OneIn(faults_.drop_one_in)) {
      lost_.push_back(cookie);
      return;
    }
    if (faults_.duplicate_one_in != 0 && faults_.luck.OneIn(faults_.duplicate_one_in)) {
      below_->QueueRecord(header, payload, kCopyCookie);
      // What is queued first leaves first, so that the payload is kept for both. The layer below may be full now.
      if (!below_->CanQueue()) {
        lost_.push_back(cookie);
        return;
      }
    }
    below_->QueueRecord(header, payload, cookie);
  }

  RxResult NextRecord(RecordHead* record) override { return below_->NextRecord(record); }
  RxResult Place(size_t head_size, std::span<const MutableBytes> destination) override {
    return below_->Place(head_size, destination);
  }

  TxResult Flush(MemoryPort& memory) override { return below_->TxIdle() ? TxResult{} : below_->Flush(memory); }
  bool TakeSent(uint64_t* cookie) override {
    if (!lost_.empty()) {
      *cookie = lost_.front();
      lost_.pop_front();
      return true;
    }
    while (below_->TakeSent(cookie)) {
      if (*cookie != kCopyCookie) return true;
    }
    return false;
  }
  bool TxIdle() const override { return lost_.empty() && below_->TxIdle(); }

  Stream& stream() override { return below_->stream(); }
  const Counters& counters() const override { return below_->counters(); }

 private:
  const std::unique_ptr<Llp> below_;
  RecordFaults faults_;
  Ring<uint64_t> lost_;
};

}  // namespace

std::unique_ptr<Llp> WithRecordFaults(std::unique_ptr<Llp> below, const RecordFaults& faults) {
  return std::make_unique<FaultyLlp>(std::move(below), faults);
}

}  // namespace stagecoach::emu
