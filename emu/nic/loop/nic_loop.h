// NicLoop: what a NIC does on its fabric's loop: the end of poll leases, deadlines of connections, and notices to
// observers.
//
// The loop's timers may be touched on its own thread only, while connections live and die on any. So clients register
// wishes here, under one small lock, and the loop's thread carries them out. Remove() returns when no call to the
// client is running or will start.
//
// A wish costs what it costs however many clients there are. Of those that are parked all are looked at, but only once
// in the time of a lease.
//
// A wish needs no memory, but for the first deadline of a client: should there be none to have the loop called, it is
// carried out with the next wish.
//
// Threading: every member from any thread. The lock is taken under connections' locks and never held during a call to a
// client.
#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include "base/time.h"
#include "emu/fabric/fabric.h"
#include "emu/nic/loop/deadline_heap.h"
#include "emu/nic/loop/list_link.h"

namespace stagecoach::emu {

// Called without locks: OnContinue on the loop's thread or in a call of NicLoop::Unpark, the others on the loop's
// thread alone.
class LoopClient {
 public:
  virtual ~LoopClient() = default;
  // Until when pollers vouch for this client; in the past: nobody does.
  virtual Instant LeaseEnd() const = 0;
  // Tells whoever ends leases (CompletionQueue::RequestNotify) that the client depends on one. Called under NicLoop's
  // lock.
  virtual void CountParked(bool parked) = 0;

  // Of these three, one that ends by std::bad_alloc or std::system_error is called again after a pause.

  // The lease ran out, or Continue() was called: move the connection and watch its stream again.
  virtual void OnContinue() = 0;
  virtual void OnDeadline(Instant now) = 0;
  // After Notify(). The client may delete itself.
  virtual void OnNotice() = 0;

 private:
  friend class NicLoop;
  struct Link : ListLink {
    explicit Link(LoopClient* of) : client(of) {}
    LoopClient* const client;
  };
  struct Deadline : DeadlineEntry {
    explicit Deadline(LoopClient* of) : client(of) {}
    LoopClient* const client;
  };
  // Wishes; guarded by NicLoop's lock.
  Link parked_{this};     // among those that are, or whose leases have just ended
  bool counted_ = false;  // as parked
  Link called_{this};     // among those that are to be called, for what follows
  bool continue_ = false;
  bool due_ = false;  // its deadline has passed
  bool notice_ = false;
  Deadline deadline_{this};
};

class NicLoop {
 public:
  explicit NicLoop(Fabric& fabric);
  // Clients have been removed. Waits for a running callback unless it is this thread's own.
  ~NicLoop();
  NicLoop(const NicLoop&) = delete;
  NicLoop& operator=(const NicLoop&) = delete;

  // Leaves the client to its pollers; OnContinue follows when its lease has ended. False, and nothing done, if it has
  // none.
  bool Park(LoopClient* client);
  // A lease was ended early: calls OnContinue of the parked clients that have none left.
  void Unpark();
  // OnContinue as soon as the loop comes to it.
  void Continue(LoopClient* client);
  // OnDeadline at `when`; replaces an earlier wish, nullopt withdraws it.
  void SetDeadline(LoopClient* client, std::optional<Instant> when);
  // OnNotice as soon as the loop comes to it.
  void Notify(LoopClient* client);
  // Forgets all wishes of the client, and waits while a call to it runs on another thread.
  void Remove(LoopClient* client);

  // Whether the fabric's loop has a timer of ours while no client wishes for one. Not once what was posted has run,
  // where the fabric has no thread; elsewhere a timer that nobody needs any more is left to fire.
  bool HoldsTimerForNobody() const;

 private:
  // Shared with callbacks of the loop, which may outlive the NIC.
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace stagecoach::emu
