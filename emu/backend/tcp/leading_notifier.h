// LeadingNotifier: the Notifier of a real process. Who waits for it moves connections meanwhile (leadership.h).
//
// To programs it is an eventfd, readable exactly while there are signals. A signal that the turn of a waiter gives to
// that waiter is taken as it is given, and never seen on the descriptor; where both would happen at once, no other
// order can be told from it.
#pragma once

#include <signal.h>

#include <atomic>
#include <memory>

#include "emu/backend/tcp/leadership.h"
#include "emu/fabric/event_fd.h"
#include "emu/fabric/fabric.h"

namespace stagecoach::emu {

class LeadingNotifier final : public Notifier {
 public:
  // `leadership` outlives it.
  LeadingNotifier(Leadership* leadership, std::unique_ptr<EventFd> event)
      : leadership_(*leadership), event_(std::move(event)) {}

  int fd() const override { return event_->fd(); }
  void Signal() override;
  bool Consume() override;
  // The wait is a cancellation point (pthreads(7)); what is done for connections is none. As read(2), it goes on after
  // a handler with SA_RESTART; where a process has handlers with and without, it leaves the lead to others. Handlers
  // run while it sleeps and never in a turn, which holds locks that they might want.
  int Take() override;

 private:
  // In Take(): waits once, and does what there is to do. Whether the wait is over, with this answer.
  struct Answer {
    bool is_over = false;
    int error = 0;
  };
  // `unblocked`: the signals that the thread blocks itself. `handlers`: those there were before.
  Answer WaitOnce(Leadership::Waiter& waiter, const sigset_t& unblocked, Handlers handlers);

  Leadership& leadership_;
  const std::unique_ptr<EventFd> event_;
  // Signals given and not taken, but for those that programs write: whether to look before sleeping.
  std::atomic<int64_t> given_{0};
};

}  // namespace stagecoach::emu
