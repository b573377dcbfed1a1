// Leadership: which thread sleeps until connections have something to say, and moves them then.
//
// One leads at a time. A thread of the program that waits for an event leads for as long as it waits (LeadingNotifier),
// so that an arrival wakes who wants it and nobody else; so does a program's own loop while it sleeps
// (LeadingCompanion). The fabric's thread leads when nobody does, and stands by otherwise.
//
//   - A waiter that begins takes the lead from the fabric's thread. It takes it from another waiter only if what the
//     loop found the last time was for it: whose events arrive should be the one that is woken.
//   - A waiter that has got its event leaves nobody in the lead: it comes back soon, mostly, and to wake a thread for
//     that time would cost more than the event. After a while (kGrace) without a leader the fabric's thread, which a
//     timer has woken, takes the lead; what has arrived meanwhile has waited so long at the most, as it does for
//     pollers that hold a lease.
//   - Nobody is told that he has lost the lead. He sleeps on; the next arrival wakes him as well, once, and he sees it.
//   - Posted work wakes the fabric's thread whoever leads.
//
// Nothing that arrives is forgotten: the loop's descriptor stays readable until somebody has turned it (it is level-
// triggered), and at each moment somebody sleeps on it who leads, or will look at it (kGrace). A leader may not come
// back: it is in a handler of a signal, or in one of a loop's own that takes long. So the fabric's thread looks now and
// then (kWatch) whether the loop has been turned.
//
// Threading: any, but for Run().
#pragma once

#include <atomic>
#include <functional>
#include <mutex>

#include "base/epoll_loop/epoll_loop.h"
#include "base/signals/restarts.h"
#include "base/time.h"
#include "emu/backend/tcp/busy_poll.h"

namespace stagecoach::emu {

class Leadership {
 public:
  // Without a leader for so long, the fabric's thread is.
  static constexpr Duration kGrace = 1ms;
  // How often it looks whether a leader is at work.
  static constexpr Duration kWatch = 200ms;

  // Who may lead: one wait of one thread, or one loop.
  struct Waiter {
    // What it waits for, the same each time that it does.
    explicit Waiter(const void* waits_for) : what(waits_for) {}
    const void* const what;
    // In the turn that it runs, what it waits for has been given to it. Of its own thread.
    bool is_served = false;
  };

  struct Options {
    // How long who leads polls before it sleeps, at most; 0: not at all.
    Duration busy_poll = 0us;
    // Whether the fabric's thread does: not where it would take the processor from the program.
    bool thread_polls = true;
  };

  // `loop` outlives it. std::system_error: the system has no descriptor for it (EMFILE, ENFILE).
  Leadership(EpollLoop* loop, const Options& options);
  ~Leadership();
  Leadership(const Leadership&) = delete;
  Leadership& operator=(const Leadership&) = delete;

  // --- The fabric's thread ---
  // Leads, or stands by, until Stop().
  void Run();
  void Stop();

  // --- Waiters ---
  // `waiter` is about to sleep: whether it leads, and is to wait for the loop's descriptor as well, and turn it.
  bool Begin(const Waiter* waiter);
  bool IsLedByThread() const { return Leads(&thread_); }
  bool Leads(const Waiter* waiter) const { return leader_.load(std::memory_order_relaxed) == waiter; }
  // It does not sleep any more. If it leads, nobody does now.
  void End(const Waiter* waiter);
  // Turns the loop. `waiter` (which may be null) waits for what may come of it (Turner()). No exception leaves it: what
  // there was no memory or descriptor for is done in a later turn. True if anything was done.
  bool Turn(Waiter* waiter);
  // Whoever has led, or has turned the loop, calls this before it sleeps.
  void LieDown() { loop_->LieDown(); }
  // To poll now may find something (Poll()).
  bool Polls() const { return busy_poll_.time() > Duration::zero(); }
  // Turns the loop again and again for the time of busy_poll(), while `waiter` leads (null: the fabric's thread), until
  // something was done: true. Sooner than that it ends when `is_over` says so.
  bool Poll(Waiter* waiter, const std::function<bool()>& is_over);
  // Who leads has slept from `since` to now. `is_found`: and has to turn the loop for that.
  void Slept(Instant since, bool is_found) { busy_poll_.Slept(loop_->Now() - since, is_found); }
  // Who waits in the turn that the calling thread is in. Null: nobody, or there is none.
  static Waiter* Turner() { return turner_; }
  // What was found in this turn is for who waits for that.
  void NoteServed(const void* what) { served_.store(what, std::memory_order_relaxed); }

  // As base/signals/restarts.h, and found out at most so long ago. To find it out takes some sixty system calls.
  Handlers HandlersOfLate(Duration age);

  const EpollLoop& loop() const { return *loop_; }

  struct Counters {
    std::atomic<uint64_t> turns_of_waiters{0};
    std::atomic<uint64_t> turns_of_thread{0};
    std::atomic<uint64_t> sleeps_of_thread{0};
    std::atomic<uint64_t> found_by_polling{0};
    std::atomic<uint64_t> taken_over{0};  // from a leader that did not move
  };
  const Counters& counters() const { return counters_; }

 private:
  // Turn(), by a turn or a glance.
  template <typename Step>
  bool Move(Waiter* waiter, Step step);
  // Whether the fabric's thread leads now.
  bool ThreadLeads();
  // With mutex_ held.
  void NudgeAt(Duration from_now);
  void NudgeTaken();
  void LookAfterLeader(uint64_t turns_before);

  EpollLoop* const loop_;
  BusyPoll busy_poll_;
  const bool thread_polls_;
  int nudge_ = -1;                // a timerfd, for the fabric's thread
  const Waiter thread_{nullptr};  // the fabric's, as one who leads
  std::atomic<bool> stopped_{false};

  std::mutex mutex_;                   // a leaf
  std::atomic<const Waiter*> leader_;  // written under mutex_; null: nobody
  const void* last_ = nullptr;         // what the last waiter that led waited for; guarded by mutex_, as this block
  Instant grace_end_{};                // while nobody leads
  bool is_nudged_ = false;             // the timer is set, or has fired and nobody has seen it
  std::atomic<const void*> served_{nullptr};

  static thread_local Waiter* turner_;

  std::atomic<int64_t> handlers_at_{0};
  std::atomic<Handlers> handlers_{Handlers::kNone};

  Counters counters_;
};

}  // namespace stagecoach::emu
