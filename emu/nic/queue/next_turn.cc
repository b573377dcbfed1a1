#include "emu/nic/queue/next_turn.h"

#include <algorithm>

#include "emu/nic/loop/nic_loop.h"
#include "emu/nic/queue/queue_pair.h"

namespace stagecoach::emu {

void NextTurn::Use(Llp* llp) {
  llp_ = llp;
  NoteFired();
}

void NextTurn::Ensure(uint32_t requests, const Wants& wants) {
  qp_.SetUnfinished(llp_ != nullptr && (wants.more || wants.send));
  if (llp_ == nullptr) return;
  const bool continuing = (requests & QueuePair::kContinue) != 0;
  if (wants.more) {
    if (continuing || !loop_.Park(&qp_)) loop_.Continue(&qp_);
    return;
  }
  const bool readable = wants.drain || (wants.receive && !llp_->hold().receiving);
  if (continuing) {
    Arm(readable, wants.send);
  } else if (wants.send && !armed_writable_ && !loop_.Park(&qp_)) {
    Arm(readable, true);
  }
}

void NextTurn::Arm(bool readable, bool writable) {
  if ((!readable || armed_readable_) && (!writable || armed_writable_)) return;
  armed_readable_ = readable;
  armed_writable_ = writable;
  llp_->Arm(readable, writable);
}

void NextTurn::SetDeadline(std::initializer_list<std::optional<Instant>> wishes) {
  std::optional<Instant> next = llp_ != nullptr ? llp_->hold().until : std::nullopt;
  for (const std::optional<Instant>& wish : wishes) {
    if (wish) next = std::min(next.value_or(Instant::max()), *wish);
  }
  if (next == deadline_) return;
  deadline_ = next;
  loop_.SetDeadline(&qp_, next);
}

}  // namespace stagecoach::emu
