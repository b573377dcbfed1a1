// SimLoop: the EventLoop of a simulated world, and its schedule. Virtual time, one thread, events ordered by (time,
// order of registration).
//
// Time stands still while events of the present instant run, then while the pollers are polled until none of them does
// anything, and moves on only when every poller's arm() agrees: the order in which a real loop goes to sleep, without
// its races. There is no poll phase to bound, since polling costs no virtual time.
//
// Blocking. The schedule runs on a fiber. A callback or poller that must wait is parked with its fiber and with what it
// waits for, and the schedule goes on on another one. Before each event the parked are looked at in the order in which
// they were parked, and the first that has what it waits for continues. So waits end in any order, and any number of
// them may be open. A watch is not called again, and a poller not polled or armed again, before its own call has
// returned; what a callback holds locked while it waits stays locked, so it waits with no lock held that others take.
// Whoever is not a callback (a test's body; the main context) drives the schedule by RunUntil and its like; callbacks
// that never block cost it one switch of stacks and back.
//
// Hosts. What is registered may belong to a host (SimFabric::program_loop), by number; 0 is none. current() says whose
// code is running, through all its waits.
//
// A watched descriptor is looked up among the world's notifiers and never given to epoll. A program may drain the real
// eventfd by itself, so the kernel is asked whether it is readable; but only if it has been signalled.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/event_loop.h"
#include "emu/sim/schedule.h"

namespace stagecoach::emu {

class Fiber;

class SimLoop final : public EventLoop {
 public:
  using Owner = uint32_t;
  static constexpr Owner kNobody = 0;

  // Whose code is running.
  struct Context {
    Owner owner = kNobody;
    const std::string* program = nullptr;  // its name, if it is a program with one; outlives the program
  };
  // Somebody who is parked.
  struct Waiter {
    Context context;
    std::string_view what;  // what for, in words
    Instant since;
    Instant limit;
  };

  SimLoop();
  // Nobody is parked.
  ~SimLoop() override;
  SimLoop(const SimLoop&) = delete;
  SimLoop& operator=(const SimLoop&) = delete;

  // Lets the world go on until `done`; false if it runs dry before, or nothing is left to do up to `limit`. In a
  // callback: parks. `done` is asked often, does not block, and may be asked on another stack. `what` outlives the
  // wait.
  bool RunUntil(const std::function<bool()>& done, Instant limit, std::string_view what = "a condition");
  // Lets all time up to `when` pass. Not in a callback.
  void RunThrough(Instant when);
  // Runs the next event that is due at or before `limit`, moving the clock to it. False when there is none: the
  // schedule is dry up to `limit`, everything is polled and armed, and the clock has not moved. Not in a callback.
  bool Step(Instant limit = Instant::max());
  // Whether this is a callback, which may be parked.
  bool InCallback() const { return running_ != nullptr; }

  const Context& current() const { return current_; }
  // The callback that is running is this program's from now on.
  void EnterProgram(const std::string* name) { current_.program = name; }

  // In the order of parking.
  std::vector<Waiter> Waiters() const;
  bool HasWaiters() const { return !parked_.empty(); }
  // Whoever of `owner` is parked gives up when the present instant ends.
  void Interrupt(Owner owner);
  // Forgets all that is registered for `owner`. The callbacks are destroyed, without having run, by an event of this
  // instant or by BuryDropped().
  void Drop(Owner owner);
  // Destroys a callback that will not run as Drop() does.
  void DropLater(Callback callback);
  void BuryDropped();
  static constexpr Owner kEveryone = Schedule::kEveryone;

  // What somebody has registered and is still there.
  struct Objects {
    size_t timers = 0;  // whose time has not come
    size_t due = 0;     // what was posted, timers whose time has come, watches whose descriptor is readable
    size_t watches = 0;
    size_t pollers = 0;
  };
  Objects CountOf(Owner owner) const;
  // Descriptors that could be watched: one for each notifier.
  size_t descriptors() const;

  // Drops all that is scheduled.
  void Clear();
  // Nothing is scheduled.
  bool IsDry() const { return schedule_.empty(); }
  size_t scheduled() const { return schedule_.size(); }
  // When the next event is due. Not dry.
  Instant NextDue() const { return schedule_.NextDue(); }
  // Events run so far.
  uint64_t events_run() const { return events_run_; }
  // Counts something that is not an event towards the limit on what may happen in one instant.
  void CountAttempt();

  // A notifier's descriptor, from its creation to its end.
  void AddDescriptor(int fd);
  void RemoveDescriptor(int fd);
  // The notifier's own calls; `fd` is one.
  void OnSignalled(int fd);
  void OnConsumed(int fd);
  bool IsReadable(int fd);

  // As the members of EventLoop, for `owner`.
  TimerId At(Instant when, Owner owner, Callback callback) { return schedule_.Add(when, owner, std::move(callback)); }
  WatchId WatchReadable(int fd, Owner owner, Callback callback);
  PollerId AddPoller(Owner owner, Poller poller);

  // EventLoop.
  Instant Now() const override { return schedule_.now(); }
  TimerId At(Instant when, Callback callback) override { return At(when, kNobody, std::move(callback)); }
  void Cancel(TimerId timer) override;
  // Returns 0, with errno EBADF, for a descriptor that is no notifier of this world.
  WatchId WatchReadable(int fd, Callback callback) override { return WatchReadable(fd, kNobody, std::move(callback)); }
  void Unwatch(WatchId watch) override;
  // On the world's thread only: a simulation has no other.
  void Post(Callback callback) override;
  PollerId AddPoller(Poller poller) override { return AddPoller(kNobody, std::move(poller)); }
  void RemovePoller(PollerId poller) override;

 private:
  struct Watch {
    WatchId id = 0;
    int fd = -1;
    Owner owner = kNobody;
    Callback callback;
    bool scheduled = false;
    bool running = false;
    bool ended = false;
  };
  struct PollerEntry {
    PollerId id = 0;
    Owner owner = kNobody;
    Poller poller;
    bool running = false;
  };
  struct Descriptor {
    // At least what the eventfd holds: signals that a program reads by itself are not noticed.
    uint64_t signals = 0;
    std::vector<std::shared_ptr<Watch>> watches;
  };
  struct Worker;  // a fiber that runs the schedule, or is parked in the middle of it
  struct Parked : Waiter {
    Worker* worker = nullptr;
    const std::function<bool()>* done = nullptr;
    bool satisfied = false;
  };
  // What the main context wants of the schedule.
  struct Request {
    const std::function<bool()>* done = nullptr;  // null: never
    Instant limit{};
    uint64_t events = UINT64_MAX;  // at most
    bool lets_time_pass = false;   // even where nothing happens
    bool outcome = false;
  };

  bool Drive(Request request);
  bool Park(const std::function<bool()>& done, Instant limit, std::string_view what);
  static Fiber* RunWorker(void* worker);
  void Serve();
  void Return(bool outcome);
  void Continue(Parked* parked, bool satisfied);
  void SwitchTo(Worker* worker);
  Worker* TakeIdle();
  bool Ask(const std::function<bool()>& done, const Context& context);
  Parked* FirstSatisfied();
  Parked* FirstOverdue(Instant limit);
  void RunNext();
  void CountEvent();
  void MoveClock(Instant when);

  Descriptor* Find(int fd);
  void ScheduleWatch(const std::shared_ptr<Watch>& watch);
  void RunWatch(const std::shared_ptr<Watch>& watch);
  bool PollAll();
  bool ArmAll();

  const std::thread::id thread_ = std::this_thread::get_id();
  Schedule schedule_;
  uint64_t next_id_ = 1;
  uint64_t events_run_ = 0;
  uint64_t events_this_instant_ = 0;

  std::unique_ptr<Fiber> main_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<Worker*> idle_;
  std::vector<Parked*> parked_;
  Worker* running_ = nullptr;  // null: the main context
  bool asking_ = false;        // inside somebody's `done`
  bool ending_ = false;
  uint64_t resumptions_ = 0;
  Request request_;
  Context current_;

  std::vector<std::unique_ptr<Descriptor>> descriptors_;  // by number
  std::map<WatchId, std::shared_ptr<Watch>> watches_;
  std::vector<std::shared_ptr<PollerEntry>> pollers_;
  std::vector<Callback> dropped_;
};

}  // namespace stagecoach::emu
