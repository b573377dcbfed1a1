// LlpOver: a record layer over another one, which it owns, and does as that does but for what it overrides. Taps are
// such.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "emu/llp/llp.h"

namespace stagecoach::emu {

class LlpOver : public Llp {
 public:
  size_t MaxUlpdu() const override { return below_->MaxUlpdu(); }
  bool CanQueue() const override { return below_->CanQueue(); }
  void QueueRecord(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie) override {
    below_->QueueRecord(header, payload, cookie);
  }

  bool IsReliable() const override { return below_->IsReliable(); }
  Carriage carriage() const override { return below_->carriage(); }
  RxResult NextRecord(RecordHead* record) override { return below_->NextRecord(record); }
  RxResult Place(size_t head_size, std::span<const MutableBytes> destination) override {
    return below_->Place(head_size, destination);
  }
  Drained Drain() override { return below_->Drain(); }
  TxResult Flush(MemoryPort& memory) override { return below_->Flush(memory); }
  bool TakeSent(uint64_t* cookie) override { return below_->TakeSent(cookie); }
  bool TxIdle() const override { return below_->TxIdle(); }
  void ForgetMemory() override { below_->ForgetMemory(); }
  Delivery delivery() const override { return below_->delivery(); }
  void Arm(bool readable, bool writable) override { below_->Arm(readable, writable); }
  void SetWatcher(ReadyWatcher* watcher) override { below_->SetWatcher(watcher); }
  int PollDescriptor() const override { return below_->PollDescriptor(); }
  const ArrivalMark* arrival_mark() const override { return below_->arrival_mark(); }
  void Shutdown() override { below_->Shutdown(); }
  void Abort() override { below_->Abort(); }
  Hold hold() const override { return below_->hold(); }
  const Counters& counters() const override { return below_->counters(); }

 protected:
  explicit LlpOver(std::unique_ptr<Llp> below) : below_(std::move(below)) {}
  LlpOver(const LlpOver&) = delete;
  LlpOver& operator=(const LlpOver&) = delete;

  Llp& below() const { return *below_; }

 private:
  const std::unique_ptr<Llp> below_;
};

}  // namespace stagecoach::emu
