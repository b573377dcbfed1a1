// Reactor and EventLoop: the only door to time, timers, readiness of descriptors and deferred work.
//
// A device needs a Reactor; programs and the RPC stack, which poll completion queues as well, an EventLoop. Over Linux
// the first is base/epoll_loop, the second base/asio_loop. The simulator (emu/sim) is both: there time is virtual, and
// a watched descriptor is looked up as a simulated channel instead of being given to epoll.
//
// A loop is single-threaded: callbacks run one at a time on the thread that runs the loop, never inside the call that
// registered them. Now() is constant within one callback of a simulated loop. All members but Post() must be called on
// the loop's thread; Post() may be called from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "base/time.h"

namespace stagecoach {

class Reactor {
 public:
  using Callback = std::function<void()>;
  // Ids are never 0 and never reused within one loop.
  using TimerId = uint64_t;
  using WatchId = uint64_t;

  virtual ~Reactor() = default;

  virtual Instant Now() const = 0;

  // Calls `callback` once, not before `when`. Timers of equal time fire in the order they were set.
  virtual TimerId At(Instant when, Callback callback) = 0;
  // Cancelling an id that fired or never existed does nothing.
  virtual void Cancel(TimerId timer) = 0;

  // Calls `callback` whenever `fd` is readable (level-triggered), until Unwatch. The loop does not own the descriptor.
  virtual WatchId WatchReadable(int fd, Callback callback) = 0;
  virtual void Unwatch(WatchId watch) = 0;

  // Runs `callback` on the loop's thread, after the current callback.
  virtual void Post(Callback callback) = 0;
};

class EventLoop : public Reactor {
 public:
  using PollerId = uint64_t;

  // The poll phase: while at least one poller says it has work outstanding, the loop calls the pollers repeatedly for a
  // bounded time before it sleeps. `poll` does whatever is ready and returns true if it did anything; `busy` says
  // whether polling can pay (something is outstanding); `arm` asks for notification on the watched descriptors just
  // before the loop sleeps, and returns false if work arrived meanwhile, in which case the loop polls again instead of
  // sleeping.
  struct Poller {
    std::function<bool()> poll;
    std::function<bool()> busy;
    std::function<bool()> arm;
  };
  virtual PollerId AddPoller(Poller poller) = 0;
  virtual void RemovePoller(PollerId poller) = 0;

  // Work that is not this loop's, and that its thread does while it has nothing else to do: it sleeps on fd() as well.
  class Companion {
   public:
    virtual ~Companion() = default;
    // Readable when there is something to do. The same for ever.
    virtual int fd() const = 0;
    // There is nothing else to do, the pollers are armed, and the loop is about to sleep. True if something was done,
    // and the loop does not sleep. It may take some hundred microseconds, in which nothing of the loop's own happens,
    // but that `is_over` becomes true when something was posted.
    virtual bool OnIdle(const std::function<bool()>& is_over) = 0;
    // Around each sleep. In between, OnReadable() follows when fd() is readable; it may follow at other times, too.
    virtual void OnSleep() = 0;
    virtual void OnWake() = 0;
    virtual void OnReadable() = 0;
  };
  // The one this loop has, which others may hold as well. A loop does not keep its companion: it has one until the last
  // holder lets go, which may be after the loop itself has gone.
  virtual std::shared_ptr<Companion> companion() const { return nullptr; }
  // False, and it will not be called: this loop does not sleep (a simulated one), cannot watch it, or has one.
  virtual bool TakeCompanion(const std::shared_ptr<Companion>& companion) { return false; }
};

}  // namespace stagecoach
