// Bell: how an end of shared memory sleeps without missing anything, and wakes the other end when that sleeps.
//
// Between ends that are awake nobody calls the system. An end that is about to sleep says so in its half: its nap
// becomes odd. An end that has published something (records, room, its ending) looks at the other's nap, and if that is
// odd, and another one than the last that it has rung for, it rings: one byte on the Unix-domain socket that joins the
// two. The loop wakes of it and calls the watcher.
//
// Nothing is missed:
//
//     to sleep:    nap = odd;              fence;  read what the other end has published
//     to publish:  say what there is;      fence;  read the other end's nap
//
// The fences are sequentially consistent, so one of the two reads comes after the other's write: either who goes to
// sleep sees what there is, and does not, or who publishes sees the nap, and rings. Who sleeps for room says as well,
// before it naps, up to where the other end is to have consumed, and both judge by that number. A ring that does not
// bring what is waited for begins another nap, and looks again.
//
// The other end may be hostile. It can ring once for each nap: more ends it (IsAbused). Ringing never waits, and does
// not depend on flags that are the other end's, too, as those of an eventfd would be. A socket that is full of rings
// has woken who did not take them yet, so a ring that finds no room is not needed.
//
// The kernel closes the socket of a process that ends, however it does: then the other end is gone (IsGone).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "base/epoll_loop/epoll_loop.h"
#include "base/fork/fork.h"
#include "emu/llp/readiness.h"
#include "emu/llp/shm/half.h"

namespace stagecoach::emu {

class Bell final : public EpollLoop::Source, private EpollLoop::Wakeful, public std::enable_shared_from_this<Bell> {
 public:
  // What the two ends say. Lives until TakeDown().
  struct Words {
    HalfWords& own;
    const HalfWords& peer;
  };

  // `socket`, one end of a connected pair of the family AF_UNIX and type SOCK_STREAM on which there is nothing to read,
  // belongs to the bell from now on, also where there is none: null, with errno set, when the loop cannot watch it.
  // `loop` outlives it.
  static std::shared_ptr<Bell> Hang(EpollLoop& loop, int socket, const Words& words);
  ~Bell() override;
  Bell(const Bell&) = delete;
  Bell& operator=(const Bell&) = delete;

  // Detaches the watcher, as SetWatcher(nullptr) does, and closes the socket, by which the other end hears of it. Must
  // be called, but in a child of a fork, which has no socket. Nothing else may be afterwards.
  void TakeDown();

  // --- Sleeping; any thread ---

  // As Llp has them. There is room once the other end has consumed `awaited` bytes of our ring, of all there ever were.
  void Arm(bool records, bool room, uint64_t awaited);
  void SetWatcher(ReadyWatcher* watcher);
  // Our own end has ended, which may be what is waited for.
  void LookAgain();
  // The other end's process is gone, or has closed its socket. What it had published before is there for who sees this.
  bool IsGone() const { return gone_.load(std::memory_order_acquire); }
  bool IsAbused() const { return abused_.load(std::memory_order_relaxed); }

  // --- Waking; one thread at a time ---

  // Records, or an ending, have been published.
  void RingForRecords();
  // Records have been consumed.
  void RingForRoom();
  // Both, whatever room there is.
  void RingForEverything();
  uint64_t rings() const { return rings_; }

 private:
  Bell(EpollLoop& loop, int socket, const Words& words) : loop_(loop), socket_(socket), words_(words) {}
  void OnEvents(uint32_t events) override;
  bool Look() override;
  void LieDown() override;

  // With mutex_ held.
  void Listen();
  void Deafen();
  bool IsReady() const;
  void Settle();
  void FallAsleep();
  void Nap(bool for_records, bool for_room);
  void Tell();
  void Call(std::unique_lock<std::mutex>& lock);

  void RingOnce(const std::atomic<uint64_t>& nap, uint64_t* rung_for);

  EpollLoop& loop_;
  const int socket_;
  const Words words_;
  const uint32_t generation_ = ForkGeneration();
  std::atomic<bool> gone_{false};
  std::atomic<bool> abused_{false};

  std::mutex mutex_;  // a leaf, but for those of the loop
  std::condition_variable called_;
  ReadyWatcher* watcher_ = nullptr;  // guarded by mutex_, as this block
  bool want_records_ = false;
  bool want_room_ = false;
  bool is_up_ = false;    // the loop looks at it
  bool told_ = false;     // a call is on its way
  bool calling_ = false;  // and is being made
  bool deaf_ = false;     // the loop does not watch the socket any more
  bool is_hung_ = false;
  bool taken_down_ = false;
  uint64_t naps_ = 0;
  uint64_t heard_ = 0;  // rings

  uint64_t rings_ = 0;
  uint64_t rung_for_records_ = 0;  // the nap
  uint64_t rung_for_room_ = 0;
};

}  // namespace stagecoach::emu
