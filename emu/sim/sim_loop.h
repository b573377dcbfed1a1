// SimLoop: the EventLoop of a simulated world, and its schedule. Virtual time, one thread, events ordered by (time,
// sequence number).
//
// Time stands still while events of the present instant run, then while the pollers are polled until none of them does
// anything, and moves on only when every poller's arm() agrees: the order in which a real loop goes to sleep, without
// its races. There is no poll phase to bound, since polling costs no virtual time.
//
// A watched descriptor is looked up among the world's notifiers and never given to epoll. Whether it is readable is
// asked of the real eventfd, which the program may have drained by itself.
//
// Re-entry. A callback may pump the schedule (a blocking call inside a simulated program does): Step() nests. While a
// callback is suspended so, other events, timers, watches and pollers run; but a watch is not called again, and a
// poller not polled or armed again, before its own call has returned. What a callback holds locked while it pumps stays
// locked: pump with no lock held that other callbacks take. Nesting is bounded (kMaxDepth); beyond it Step() reports a
// dry schedule.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/event_loop.h"

namespace stagecoach::emu {

class SimLoop final : public EventLoop {
 public:
  static constexpr int kMaxDepth = 16;

  SimLoop() = default;
  SimLoop(const SimLoop&) = delete;
  SimLoop& operator=(const SimLoop&) = delete;

  // Runs the next event that is due at or before `limit`, moving the clock to it. False when there is none: the
  // schedule is dry up to `limit`, everything is polled and armed, and the clock has not moved.
  bool Step(Instant limit = Instant::max());
  // Moves the clock forward to `when`, but not beyond the next event.
  void AdvanceTo(Instant when);
  // Drops all that is scheduled.
  void Clear();
  // Nothing is scheduled.
  bool IsDry() const { return schedule_.empty(); }
  // Events run so far.
  uint64_t events_run() const { return events_run_; }

  // A notifier's descriptor, from its creation to its end.
  void AddDescriptor(int fd);
  void RemoveDescriptor(int fd);
  void OnSignalled(int fd);

  // EventLoop.
  Instant Now() const override { return now_; }
  TimerId At(Instant when, Callback callback) override;
  void Cancel(TimerId timer) override;
  // Returns 0, with errno EBADF, for a descriptor that is no notifier of this world.
  WatchId WatchReadable(int fd, Callback callback) override;
  void Unwatch(WatchId watch) override;
  // On the world's thread only: a simulation has no other.
  void Post(Callback callback) override;
  PollerId AddPoller(Poller poller) override;
  void RemovePoller(PollerId poller) override;

 private:
  struct Watch {
    int fd = -1;
    Callback callback;
    bool scheduled = false;
    bool running = false;
    bool ended = false;
  };
  struct PollerEntry {
    PollerId id = 0;
    Poller poller;
    bool running = false;
  };

  void ScheduleWatch(const std::shared_ptr<Watch>& watch);
  void RunWatch(const std::shared_ptr<Watch>& watch);
  bool PollAll();
  bool ArmAll();

  const std::thread::id thread_ = std::this_thread::get_id();
  Instant now_{};
  int depth_ = 0;
  uint64_t next_id_ = 1;
  uint64_t events_run_ = 0;
  uint64_t events_this_instant_ = 0;
  std::map<std::pair<Instant, TimerId>, Callback> schedule_;
  std::map<TimerId, Instant> times_;
  std::map<int, std::map<WatchId, std::shared_ptr<Watch>>> descriptors_;
  std::map<WatchId, std::shared_ptr<Watch>> watches_;
  std::vector<std::shared_ptr<PollerEntry>> pollers_;
};

}  // namespace stagecoach::emu
