// WatchedLlp: a record layer under a QP, and the watcher that moves the QP when the layer is ready.
//
// Destroyed without the QP's lock: that waits until the watcher is at rest. The layer itself is used under the lock.
#pragma once

#include <cstdint>
#include <memory>

#include "emu/llp/llp.h"

namespace stagecoach::emu {

class NicLoop;
class QueuePair;

class WatchedLlp final : private ReadyWatcher {
 public:
  // Both outlive it. Nothing moves before the layer is armed.
  WatchedLlp(QueuePair& qp, NicLoop& loop, std::unique_ptr<Llp> llp);
  ~WatchedLlp() override;
  WatchedLlp(const WatchedLlp&) = delete;
  WatchedLlp& operator=(const WatchedLlp&) = delete;

  Llp& operator*() const { return *llp_; }
  Llp* operator->() const { return llp_.get(); }
  Llp* get() const { return llp_.get(); }

  // Given up before this one. A list of them that needs no memory: nothing may fail once a layer is to go.
  std::unique_ptr<WatchedLlp> older;

 private:
  // On the loop's thread, without locks.
  void OnReady() override;

  QueuePair& qp_;
  NicLoop& loop_;
  const std::unique_ptr<Llp> llp_;
};

}  // namespace stagecoach::emu
