// AsioLoop: the EventLoop of real processes, over an asio::io_context, with the poll phase of base/event_loop.h.
//
// One turn of the loop: run due timers and posted work, poll the pollers; while one of them is busy, poll on for a
// bounded time; then arm all of them, and sleep only if every arm() says that nothing arrived meanwhile. A sleep runs
// the handler that ends it, and ends at once when one is ready: to ask for handlers before it would be one more system
// call for each thing that happens. Timers, posted work and Asio handlers are served within the poll phase too, and now
// and then between turns that do not sleep, so a busy poller cannot starve them, nor they it: each turn runs a bounded
// batch.
//
// The bounded time adapts between an eighth of Options::poll_time and all of it: a sleep shorter than poll_time says
// that polling longer would have been quicker than being woken, a longer one that polling was wasted. 0 disables the
// phase: pollers are still polled once a turn.
//
// Threading: as EventLoop says. Post(), Stop() and Now() may be called from any thread; everything else on the thread
// inside Run() or RunOnce(), or, while no thread is, on whichever thread sets the loop up or takes it down.
//
// A watched descriptor is a member of an epoll set of the loop's own, and Asio waits for that set. Giving the
// descriptor to Asio itself would set O_NONBLOCK on it, and on a completion channel that flag belongs to the program
// that owns the channel.
#pragma once

#include <asio/io_context.hpp>
#include <asio/posix/stream_descriptor.hpp>
#include <asio/steady_timer.hpp>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "base/asio_loop/handler_memory.h"
#include "base/event_loop.h"
#include "base/timer_queue.h"

namespace stagecoach {

// Makes an epoll that ends with exec(3), for `into` to wait for. std::system_error: the system has no descriptor for it
// (EMFILE, ENFILE), or cannot watch it.
void OpenEpoll(asio::posix::stream_descriptor& into);

class AsioLoop final : public EventLoop {
 public:
  struct Options {
    // How long pollers that are busy are polled, from the last thing that happened, before the loop sleeps.
    Duration poll_time = 50us;
  };

  // std::system_error: the system has no descriptor for it (EMFILE, ENFILE).
  AsioLoop();
  explicit AsioLoop(const Options& options);
  // Drops what is posted or set and not yet run; what those callbacks hold must not call the loop as it goes. No thread
  // may be inside Run().
  ~AsioLoop() override;
  AsioLoop(const AsioLoop&) = delete;
  AsioLoop& operator=(const AsioLoop&) = delete;

  // Runs turns until Stop(). A Stop() before Run() makes it return at once; each Stop() ends one Run().
  void Run();
  void Stop();
  // One turn: true if any callback, poller or handler did something. Sleeps at most `max_wait`; without one, until
  // something happens. Not from inside a callback.
  bool RunOnce(std::optional<Duration> max_wait = std::nullopt);

  // For what Asio is good at: accept, connect, resolve. Handlers run on the loop's thread.
  asio::io_context& context() { return context_; }
  bool OnLoopThread() const { return loop_thread_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

  // EventLoop. Times are those of std::chrono::steady_clock, so the loops of one process agree.
  Instant Now() const override;
  TimerId At(Instant when, Callback callback) override;
  void Cancel(TimerId timer) override;
  // Returns 0, with errno set, when the descriptor cannot be watched (a regular file, or the system's limit). Unwatch
  // before closing it.
  WatchId WatchReadable(int fd, Callback callback) override;
  void Unwatch(WatchId watch) override;
  void Post(Callback callback) override;
  PollerId AddPoller(Poller poller) override;
  void RemovePoller(PollerId poller) override;
  std::shared_ptr<Companion> companion() const override { return companion_.lock(); }
  bool TakeCompanion(const std::shared_ptr<Companion>& companion) override;

  struct Counters {
    uint64_t turns = 0;
    uint64_t poll_rounds = 0;
    uint64_t sleeps = 0;
  };
  const Counters& counters() const { return counters_; }
  // The present length of the poll phase.
  Duration poll_budget() const { return poll_budget_; }

 private:
  struct Watch {
    int fd;
    Callback callback;
  };
  struct WatchedFd {
    uint32_t generation;
    std::set<WatchId> watches;
  };
  struct PollerEntry {
    PollerId id;
    Poller poller;
  };
  class ThreadScope;

  bool RunReady();
  bool RunDueTimers();
  bool PollOnce();
  bool PollPhase();
  bool AnyBusy();
  bool IsCompanionAtWork(std::optional<Duration> max_wait);
  bool ArmAll();
  bool Sleep(std::optional<Duration> max_wait);
  void Awake();
  void WakeAt(Instant when);
  void AwaitWatched();
  void DispatchWatched();
  void CheckThread() const;

  const Duration poll_time_;
  Duration poll_budget_;
  asio::io_context context_;
  asio::steady_timer wake_timer_;
  std::optional<Instant> wake_at_;  // when wake_timer_ will fire; empty while it is not set
  bool timed_out_ = false;          // wake_timer_ has fired since the last sleep began
  int turns_since_look_ = 0;        // turns since handlers were last run
  Instant looked_at_{};             // when that was, where there is a companion
  asio::posix::stream_descriptor watched_;
  const std::shared_ptr<HandlerMemory> watched_memory_ = std::make_shared<HandlerMemory>();
  bool awaiting_watched_ = false;

  std::atomic<std::thread::id> loop_thread_{};
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> posted_{0};  // posted and not yet run

  uint64_t next_id_ = 1;
  TimerQueue timers_;
  std::map<WatchId, std::shared_ptr<Watch>> watches_;
  std::map<int, WatchedFd> watched_fds_;
  uint32_t next_generation_ = 1;
  std::vector<std::shared_ptr<PollerEntry>> pollers_;
  std::weak_ptr<Companion> companion_;
  WatchId companion_watch_ = 0;  // of companion_, also when that has gone
  Companion* asleep_ = nullptr;  // that was told so, and not yet that it is awake
  Counters counters_;
};

}  // namespace stagecoach
