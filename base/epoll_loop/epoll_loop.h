// EpollLoop: a Reactor over one epoll descriptor, which any thread may turn, one at a time.
//
// A turn does what is due and never sleeps. Who wants to sleep until there is something to do waits for fd(), in
// poll(2), or in a loop of its own of which fd() is a member: that is why nothing here has a thread, and why there is
// one descriptor for everything (sockets, timers, posted work). A loop that sleeps inside a library of its own cannot
// be waited for like that.
//
// Threading: Add, Modify, Remove, Leave, LieDown, Post, Now, IsTurning and OnLoopThread from any thread. The rest on
// the thread that is in a turn, or, while none is, on whichever thread sets the loop up or takes it down. Sources are
// called in turns, with no lock held.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <unordered_map>
#include <utility>

#include "base/event_loop.h"
#include "base/spare_blocks.h"
#include "base/timer_queue.h"

namespace stagecoach {

class EpollLoop final : public Reactor {
 public:
  // What is waited for: one descriptor. Kept by the loop while it is a member, and during a call.
  class Source {
   public:
    virtual ~Source() = default;
    // `events` as epoll_wait(2) has them.
    virtual void OnEvents(uint32_t events) = 0;

   private:
    friend class EpollLoop;
    uint64_t id_ = 0;
  };

  // What is looked at while the loop is awake, so that its other side need not wake us by the system.
  class Wakeful {
   public:
    virtual ~Wakeful() = default;
    // In a turn, while it stays up. True: something was there, and has been seen to.
    virtual bool Look() = 0;
    // Nobody looks any more: from now on a descriptor has to tell. Any thread.
    virtual void LieDown() = 0;
  };
  static constexpr size_t kMostWakeful = 8;

  // std::system_error: the system has no descriptor for it (EMFILE, ENFILE).
  EpollLoop();
  // Drops what is posted or set and not yet run; what those callbacks hold must not call the loop as it goes. No thread
  // is in a turn.
  ~EpollLoop() override;
  EpollLoop(const EpollLoop&) = delete;
  EpollLoop& operator=(const EpollLoop&) = delete;

  // Readable when a turn would find something to do.
  int fd() const { return epoll_; }
  // Readable when something was posted: for who looks after that while somebody else turns the loop.
  int post_fd() const { return wake_; }

  // Does what there is to do, a bounded batch of each kind. True if anything was done. While another thread is in a
  // turn this waits until it is out. An exception of a callback ends the turn; what it has not come to, the next one
  // does.
  bool Turn();
  // A turn that looks at those who stay up alone, and calls the system for nothing.
  bool Glance();
  // How many turns there have been, this one included.
  uint64_t turns() const { return turns_.load(std::memory_order_relaxed); }
  bool IsTurning() const { return turning_.load(std::memory_order_relaxed) != std::thread::id{}; }
  // The calling thread is in a turn.
  bool OnLoopThread() const { return turning_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

  // `events` as epoll_ctl(2) has them; level-triggered. 0, or an errno: then it is no member.
  int Add(int fd, uint32_t events, const std::shared_ptr<Source>& source);
  void Modify(int fd, const Source& source, uint32_t events);
  // Calls to it may go on until the turn that another thread is in has ended.
  void Remove(int fd, const Source& source);

  // From now on some may stay up. Who sleeps until fd() is readable calls LieDown() each time before, and who has been
  // in a turn and will neither sleep nor have another one, too, unless somebody else does so after that turn.
  void AllowWakeful() { allows_wakeful_ = true; }
  // In a turn, else false: `one` is looked at in each turn until Leave() or LieDown(). False as well: there are enough.
  bool StayUp(const std::shared_ptr<Wakeful>& one);
  void Leave(const Wakeful& one);
  bool HasWakeful() const { return wakeful_count_.load(std::memory_order_relaxed) > 0; }
  // Has all of them lie down.
  void LieDown();

  // Reactor. Times are those of std::chrono::steady_clock.
  Instant Now() const override;
  TimerId At(Instant when, Callback callback) override;
  void Cancel(TimerId timer) override;
  // Returns 0, with errno set, when the descriptor cannot be watched (a regular file, or the system's limit). Unwatch
  // before closing it.
  WatchId WatchReadable(int fd, Callback callback) override;
  void Unwatch(WatchId watch) override;
  void Post(Callback callback) override;

 private:
  class TurnScope;
  class WatchedFd;
  using Posts = std::list<Callback, SpareAllocator<Callback, std::allocator>>;

  std::shared_ptr<Source> Find(uint64_t id);
  bool LookAtWakeful();
  bool DispatchEvents();
  void WakeForTheRest();
  bool RunPosted();
  void SetSystemTimer();
  void Wake();
  void CheckThread() const;

  int epoll_ = -1;
  int wake_ = -1;          // an eventfd: something was posted
  int system_timer_ = -1;  // a timerfd

  std::mutex turn_mutex_;  // held in a turn
  std::atomic<std::thread::id> turning_{};
  std::atomic<uint64_t> turns_{0};

  std::mutex sources_mutex_;
  uint64_t next_source_;
  std::unordered_map<uint64_t, std::shared_ptr<Source>> sources_;  // guarded by sources_mutex_

  bool allows_wakeful_ = false;
  std::mutex wakeful_mutex_;                                    // a leaf
  std::array<std::shared_ptr<Wakeful>, kMostWakeful> wakeful_;  // guarded by wakeful_mutex_; gaps are null
  std::atomic<size_t> wakeful_count_{0};                        // written under wakeful_mutex_

  std::mutex posts_mutex_;
  Posts posts_;                     // guarded by posts_mutex_
  std::atomic<bool> woken_{false};  // the eventfd is readable, or about to be

  TimerQueue timers_;
  std::optional<Instant> system_timer_at_;
  WatchId next_watch_ = 1;
  std::map<WatchId, std::pair<int, std::shared_ptr<Callback>>> watches_;
  std::map<int, std::shared_ptr<WatchedFd>> watched_fds_;
};

}  // namespace stagecoach
