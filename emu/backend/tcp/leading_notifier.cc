#include "emu/backend/tcp/leading_notifier.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>

#include <utility>

#include "base/mark.h"
#include "base/signals/signals_blocked.h"
#include "base/undoing.h"

namespace stagecoach::emu {
namespace {

// How long what was found out about handlers of signals is believed by who begins to wait.
constexpr Duration kHandlersKept = 200ms;

// A thread that is cancelled amidst the work for connections would leave it half done.
class NotCancelled {
 public:
  NotCancelled() { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before_); }
  ~NotCancelled() { pthread_setcancelstate(before_, nullptr); }
  NotCancelled(const NotCancelled&) = delete;
  NotCancelled& operator=(const NotCancelled&) = delete;

  // `wait` may be cancelled, as far as the thread's own wish goes.
  template <typename Wait>
  int Except(Wait wait) {
    pthread_setcancelstate(before_, nullptr);
    const int result = wait();
    const int error = errno;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before_);
    errno = error;
    return result;
  }

 private:
  int before_ = PTHREAD_CANCEL_ENABLE;
};

// Whether read(2) would have gone on after the handler that has interrupted ppoll(2), which does not go on by itself,
// and is interrupted by nothing else. `before`: the handlers there were. That there are none now says that it has
// removed itself (SA_RESETHAND).
bool GoesOnAfter(Handlers before) {
  const Handlers now = HandlersNow();
  return now == Handlers::kNone ? before == Handlers::kRestart
                                : now == Handlers::kRestart && before != Handlers::kInterrupt;
}

}  // namespace

void LeadingNotifier::Signal() {
  if (leadership_.loop().OnLoopThread()) {
    leadership_.NoteServed(this);
    Leadership::Waiter* const turner = Leadership::Turner();
    if (turner != nullptr && turner->what == this && !turner->is_served) {
      turner->is_served = true;
      return;
    }
  }
  given_.fetch_add(1, std::memory_order_relaxed);
  event_->Signal();
}

bool LeadingNotifier::Consume() {
  if (!event_->Consume()) return false;
  given_.fetch_sub(1, std::memory_order_relaxed);
  return true;
}

int LeadingNotifier::Take() {
  if (given_.load(std::memory_order_relaxed) > 0 && Consume()) return 0;
  // Once there is something to wait for, nobody may be kept from it: in a turn nobody waits.
  const Handlers handlers = leadership_.HandlersOfLate(kHandlersKept);
  const bool waits_here =
      (fcntl(fd(), F_GETFL) & O_NONBLOCK) == 0 && !leadership_.loop().OnLoopThread() && handlers != Handlers::kMixed;
  if (!waits_here) {
    const int error = event_->Take();
    if (error == 0) given_.fetch_sub(1, std::memory_order_relaxed);
    return error;
  }
  Leadership::Waiter waiter(this);
  const SignalsBlocked signals_blocked;
  leadership_.Begin(&waiter);
  const Undoing ended([&] { leadership_.End(&waiter); });  // also when the thread is cancelled
  for (;;) {
    if (const Answer answer = WaitOnce(waiter, signals_blocked.before(), handlers); answer.is_over) return answer.error;
  }
}

LeadingNotifier::Answer LeadingNotifier::WaitOnce(Leadership::Waiter& waiter, const sigset_t& unblocked,
                                                  Handlers handlers) {
  NotCancelled not_cancelled;
  if (leadership_.Poll(&waiter, [this] { return given_.load(std::memory_order_relaxed) > 0; })) {
    return {waiter.is_served, 0};
  }
  const Instant asleep = leadership_.loop().Now();
  pollfd ready[] = {{fd(), POLLIN, 0}, {leadership_.loop().fd(), POLLIN, 0}};
  leadership_.LieDown();
  const nfds_t count = leadership_.Leads(&waiter) ? 2 : 1;
  if (not_cancelled.Except([&] { return ppoll(ready, count, nullptr, &unblocked); }) < 0) {
    const int error = errno;
    if (error != EINTR || !GoesOnAfter(handlers)) return {true, error};
    STAGECOACH_MARK("tcp.wait_goes_on_after_a_signal");
    return {};
  }
  if (count == 2) leadership_.Slept(asleep, ready[1].revents != 0);
  if ((ready[0].revents & POLLIN) != 0) {
    if (Consume()) return {true, 0};
  } else if (ready[0].revents != 0) {
    return {true, event_->Take()};  // the program has closed it: what read(2) says of that
  }
  if (count == 1 || ready[1].revents == 0 || !leadership_.Leads(&waiter)) return {};
  leadership_.Turn(&waiter);
  return {waiter.is_served, 0};
}

}  // namespace stagecoach::emu
