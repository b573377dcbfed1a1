#include "emu/nic/queue/watched_llp.h"

#include <utility>

#include "emu/nic/loop/nic_loop.h"
#include "emu/nic/queue/queue_pair.h"

namespace stagecoach::emu {

WatchedLlp::WatchedLlp(QueuePair& qp, NicLoop& loop, std::unique_ptr<Llp> llp)
    : qp_(qp), loop_(loop), llp_(std::move(llp)) {
  llp_->SetWatcher(this);
}

WatchedLlp::~WatchedLlp() {
  llp_->SetWatcher(nullptr);
}

void WatchedLlp::OnReady() {
  // Noted before anything else can arm the layer again; see docs/locks_and_leases.md. Of a layer that has been given up
  // it costs a turn for nothing.
  qp_.Ask(QueuePair::kFired);
  if (!loop_.Park(&qp_)) qp_.Ask(QueuePair::kContinue);
}

}  // namespace stagecoach::emu
