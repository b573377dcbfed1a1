#include "emu/tap/record_faults.h"

#include <optional>
#include <utility>
#include <vector>

#include "emu/engine/ring.h"
#include "emu/llp/llp_over.h"

namespace stagecoach::emu {
namespace {

class FaultyLlp final : public LlpOver {
 public:
  FaultyLlp(std::unique_ptr<Llp> below, const RecordFaults& faults) : LlpOver(std::move(below)), faults_(faults) {}

  bool IsReliable() const override { return false; }
  void QueueRecord(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie) override {
    if (faults_.drop_one_in != 0 && faults_.luck.OneIn(faults_.drop_one_in)) {
      queued_.push_back({.cookie = cookie, .lost = true});
      return;
    }
    if (!overtaken_ && faults_.overtake_one_in != 0 && faults_.luck.OneIn(faults_.overtake_one_in)) {
      overtaken_.emplace(header, payload, cookie);
      gone_ahead_ = false;
      return;
    }
    const bool twice = faults_.duplicate_one_in != 0 && faults_.luck.OneIn(faults_.duplicate_one_in);
    // What is queued first leaves first, so that the payload is kept for both. The layer below may be full then.
    if (!twice || !Pass(header, payload, cookie, /*first_of_two=*/true)) Pass(header, payload, cookie);
    gone_ahead_ = true;
    if (overtaken_ && below().CanQueue()) PassOvertaken();
  }

  TxResult Flush(MemoryPort& memory) override {
    const TxResult result = below().TxIdle() ? TxResult{} : below().Flush(memory);
    if (!overtaken_) return result;
    if (result.status == TxStatus::kIdle) {
      PassOvertaken();
      return below().Flush(memory);
    }
    // By one place, and no more: the room that there is now is its own.
    if (gone_ahead_ && below().CanQueue()) PassOvertaken();
    return result;
  }
  bool TakeSent(uint64_t* cookie) override {
    while (!queued_.empty()) {
      const Queued front = queued_.front();
      *cookie = front.cookie;
      if (!front.lost && !below().TakeSent(cookie)) return false;
      queued_.pop_front();
      if (front.told) return true;
    }
    return false;
  }
  bool TxIdle() const override { return queued_.empty() && !overtaken_ && below().TxIdle(); }

 private:
  // What has been queued and not been reported as sent, in order.
  struct Queued {
    uint64_t cookie = 0;
    bool lost = false;  // never given to the layer below
    bool told = true;   // false: of two, the first
  };

  // A copy of a record that was not given to the layer below yet.
  struct Record {
    Record(ConstBytes head, std::span<const TxPart> parts, uint64_t number)
        : header(head.begin(), head.end()), payload(parts.begin(), parts.end()), cookie(number) {}
    std::vector<std::byte> header;
    std::vector<TxPart> payload;
    uint64_t cookie;
  };

  // True if it is all that is sent of two, since the layer below is full.
  bool Pass(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie, bool first_of_two = false) {
    below().QueueRecord(header, payload, cookie);
    const bool alone = !first_of_two || !below().CanQueue();
    queued_.push_back({.cookie = cookie, .told = alone});
    return alone;
  }
  void PassOvertaken() {
    const Record record = *std::exchange(overtaken_, std::nullopt);
    Pass(record.header, record.payload, record.cookie);
  }

  RecordFaults faults_;
  Ring<Queued> queued_;
  std::optional<Record> overtaken_;
  bool gone_ahead_ = false;  // one has passed overtaken_
};

}  // namespace

std::unique_ptr<Llp> WithRecordFaults(std::unique_ptr<Llp> below, const RecordFaults& faults) {
  return std::make_unique<FaultyLlp>(std::move(below), faults);
}

}  // namespace stagecoach::emu
