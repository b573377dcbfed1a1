// For tests: a record layer that nothing happens to, and that nobody is told about. A test overrides what it is about.
#pragma once

#include "emu/llp/llp.h"

namespace stagecoach::emu {

class QuietLlp : public Llp {
 public:
  size_t MaxUlpdu() const override { return 4096; }
  bool CanQueue() const override { return false; }
  void QueueRecord(ConstBytes, std::span<const TxPart>, uint64_t) override {}
  bool IsReliable() const override { return true; }
  Carriage carriage() const override { return {.by = "nothing", .why = {}}; }
  RxResult NextRecord(RecordHead*) override { return {}; }
  RxResult Place(size_t, std::span<const MutableBytes>) override { return {}; }
  Drained Drain() override { return {}; }
  TxResult Flush(MemoryPort&) override { return {}; }
  bool TakeSent(uint64_t*) override { return false; }
  bool TxIdle() const override { return true; }
  Delivery delivery() const override { return {}; }
  void Arm(bool, bool) override {}
  void SetWatcher(ReadyWatcher*) override {}
  int PollDescriptor() const override { return -1; }
  void Shutdown() override {}
  void Abort() override {}
  const Counters& counters() const override { return counters_; }

 protected:
  Counters counters_;
};

}  // namespace stagecoach::emu
