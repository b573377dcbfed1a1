#include "emu/backend/tcp/leading_notifier.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>

#include <utility>

#include "base/mark.h"
#include "base/undoing.h"

namespace stagecoach::emu {
namespace {

// How long what was found out about handlers of signals is believed by who begins to wait.
constexpr Duration kHandlersKept = 20ms;

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
  const bool waits_here = (fcntl(fd(), F_GETFL) & O_NONBLOCK) == 0 && !leadership_.loop().OnLoopThread() &&
                          leadership_.HandlersOfLate(kHandlersKept) != Handlers::kMixed;
  if (!waits_here) {
    const int error = event_->Take();
    if (error == 0) given_.fetch_sub(1, std::memory_order_relaxed);
    return error;
  }
  Leadership::Waiter waiter(this);
  leadership_.Begin(&waiter);
  const Undoing ended([&] { leadership_.End(&waiter); });  // also when the thread is cancelled
  for (;;) {
    if (const Answer answer = WaitOnce(waiter); answer.is_over) return answer.error;
  }
}

LeadingNotifier::Answer LeadingNotifier::WaitOnce(Leadership::Waiter& waiter) {
  NotCancelled not_cancelled;
  if (leadership_.Poll(&waiter, [this] { return given_.load(std::memory_order_relaxed) > 0; })) {
    return {waiter.is_served, 0};
  }
  const Instant asleep = leadership_.loop().Now();
  pollfd ready[] = {{fd(), POLLIN, 0}, {leadership_.loop().fd(), POLLIN, 0}};
  const nfds_t count = leadership_.Leads(&waiter) ? 2 : 1;
  if (not_cancelled.Except([&] { return poll(ready, count, -1); }) < 0) {
    if (errno != EINTR) return {true, errno};
    // poll(2) does not go on by itself after a handler, and is not interrupted otherwise.
    if (HandlersNow() == Handlers::kInterrupt) return {true, EINTR};
    STAGECOACH_MARK("tcp.wait_goes_on_after_a_signal");
    return {};
  }
  if ((ready[0].revents & POLLIN) != 0) {
    if (Consume()) return {true, 0};
  } else if (ready[0].revents != 0) {
    return {true, event_->Take()};  // the program has closed it: what read(2) says of that
  }
  if (count == 1 || ready[1].revents == 0 || !leadership_.Leads(&waiter)) return {};
  leadership_.Slept(asleep);
  leadership_.Turn(&waiter);
  return {waiter.is_served, 0};
}

}  // namespace stagecoach::emu
