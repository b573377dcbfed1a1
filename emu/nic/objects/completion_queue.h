// CompletionQueue: a ring of completions that grows up to its capacity, its arming, and the polling that drives the
// connections which complete into it.
//
// What a poll costs does not depend on how many connections there are: some are ACTIVE, and driven by every poll; the
// others are WATCHED, which is to say in an epoll set. Who brings something becomes active, who brought nothing for a
// while is watched again, sooner where there are many.
//
// Threading: every public member from any thread. Locks, in order: drive_mutex_ (held while this CQ's connections are
// pumped by a poller), then a connection's lock, then mutex_ (the ring and the arming; a leaf but for the event queue's
// lock) or woken_mutex_ (a leaf).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/time.h"
#include "emu/nic/device_profile.h"
#include "emu/nic/objects/completion_channel.h"
#include "emu/nic/objects/work_types.h"

namespace stagecoach::emu {

class NicLoop;

// What a CQ needs of a connection that completes into it.
class PolledConnection {
 public:
  virtual ~PolledConnection() = default;
  // Moves whatever is ready, without waiting: returns true if anything moved. Does nothing while another thread is at
  // it.
  virtual bool Drive() = 0;
  // A descriptor that is readable when Drive() would find something. -1: there is none, and arrival_mark() may tell.
  // kNoLlp: there is nothing that Drive() could find. OnDescriptorChange() says when they are others.
  static constexpr int kNoLlp = -2;
  virtual int PollDescriptor() const = 0;
  // Null: nothing tells, and it has to be driven.
  virtual const ArrivalMark* arrival_mark() const = 0;
  // True while it has something to send that waits for the stream or for its turn: readability of the descriptor then
  // tells too little, and it must be driven. When it becomes true and IsWatched(), the CQs are to be told
  // (CompletionQueue::Wake).
  virtual bool Unfinished() const = 0;

  // Of how many CQs it may be watched. Each of the two sides says its own first, the CQ that it watches, the connection
  // that it is unfinished, and looks at the other's then: so one of them notices.
  std::atomic<uint32_t>& watchers() { return watchers_; }
  bool IsWatched() const { return watchers_.load(std::memory_order_seq_cst) != 0; }

 private:
  std::atomic<uint32_t> watchers_{0};
};

// What a CQ does that few ask for (ibv_create_cq_ex(3)).
struct CompletionQueueFlags {
  // A full ring loses its oldest completion and the CQ is none the worse (IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN).
  bool ignore_overrun = false;
  // Completions say when they were put on the CQ (IBV_WC_EX_WITH_COMPLETION_TIMESTAMP); it costs a look at the clock.
  bool timestamps = false;
};

class CompletionQueue {
 public:
  // `channel` may be null; `async_events` hears of an overrun. `loop` is null where no progress thread exists
  // (simulation): then nothing is leased.
  CompletionQueue(Fabric& fabric, NicLoop* loop, const DeviceProfile& profile, uint32_t handle, uint32_t capacity,
                  CompletionChannel* channel, AsyncEventQueue* async_events, void* cookie,
                  CompletionQueueFlags flags = {});
  // Before the first completion. `on_overrun` is called once, when the CQ goes into error: under the lock of the QP
  // that completed, without ours.
  void SetOverrunListener(std::function<void()> on_overrun) { on_overrun_ = std::move(on_overrun); }
  ~CompletionQueue();
  CompletionQueue(const CompletionQueue&) = delete;
  CompletionQueue& operator=(const CompletionQueue&) = delete;

  uint32_t handle() const { return handle_; }
  // What the consumer attached at creation (ibv_cq::cq_context, or the shim's object).
  void* cookie() const { return cookie_; }
  void set_cookie(void* cookie) { cookie_ = cookie; }
  CompletionChannel* channel() const { return channel_; }
  uint32_t capacity() const;

  // --- The consumer's side ---

  // ibv_poll_cq: takes up to out.size() completions, oldest first, and returns how many. Finding none it drives the
  // connections of this CQ and looks again. Never waits.
  size_t Poll(std::span<WorkCompletion> out);
  // ibv_req_notify_cq: the next completion added (or the next solicited or failed one) puts one event on the channel.
  // Asking for any completion overrules an earlier request for solicited ones, never the reverse. No effect without a
  // channel.
  void RequestNotify(bool solicited_only);
  // ibv_ack_cq_events.
  void AckEvents(uint32_t count);
  // Keeps what is in the ring. EINVAL when that does not fit `capacity`; ENOMEM.
  int Resize(uint32_t capacity);

  // --- The NIC's side ---

  // False if the ring is full, or cannot grow: the CQ is then in error, for good, and kCqError has been raised once.
  // Sets `at`.
  bool Push(const WorkCompletion& completion);
  // Forgets the completions of a destroyed QP.
  void RemoveCompletionsOf(uint32_t qp_number);
  // Called before destruction, without locks: takes undelivered events back and, when `wait`, waits until delivered
  // ones are acknowledged.
  void Settle(bool wait);

  // Connections that complete into this CQ. Detach returns when no poller is inside the connection or will be.
  void Attach(PolledConnection* connection);
  void Detach(PolledConnection* connection);
  // PollDescriptor() or arrival_mark() answers otherwise from now on; what it answered before is there still. Needs no
  // memory.
  void OnDescriptorChange(PolledConnection* connection);
  // The connection is unfinished and may be watched here. Under its lock.
  void Wake(PolledConnection* connection);

  // The end of the pollers' lease: until then they, and not the loop's thread, move this CQ's connections
  // (docs/locks_and_leases.md).
  Instant LeaseEnd() const { return Instant(Duration(lease_end_.load(std::memory_order_seq_cst))); }
  // Connections of this CQ that the lease keeps disarmed; counted by NicLoop.
  std::atomic<uint32_t>& parked() { return parked_; }

  uint64_t pushed() const;
  // It has lost a completion: no QP can use it any more.
  bool overrun() const;

 private:
  friend class CompletionChannel;

  enum class Armed : uint8_t { kNo, kSolicited, kAny };

  struct Member {
    PolledConnection* connection = nullptr;
    uint32_t idle_polls = 0;  // while it is active
    bool is_active = true;
    int descriptor = -1;                // in the poll set, armed unless the member is active; -1: it is not there
    const ArrivalMark* mark = nullptr;  // while it is in marked_
    size_t mark_at = 0;                 // where in there
  };

  size_t TakeCompletions(std::span<WorkCompletion> out);
  // With mutex_ held: room for one more completion. False: there can be none.
  bool Grow();
  // With mutex_ held: what is there, in a ring of this size.
  void MoveTo(size_t size);
  void RenewLease();
  void EndLease();
  // All with drive_mutex_ held.
  bool IsCrowded() const;
  void DriveActive();
  void DriveWoken();
  void DriveWatched();
  void DriveMarked();
  bool Watch(Member& member);
  // Among those whose marks are looked at.
  void Unmark(Member& member);
  void Activate(Member& member);

  Fabric& fabric_;
  NicLoop* const loop_;
  const Duration lease_;
  const uint32_t handle_;
  void* cookie_;
  CompletionChannel* const channel_;
  AsyncEventQueue* const async_events_;
  const CompletionQueueFlags flags_;
  std::function<void()> on_overrun_;

  mutable std::mutex mutex_;
  uint32_t capacity_;                 // guarded by mutex_, as all of this block
  std::vector<WorkCompletion> ring_;  // as large as it had to be
  size_t first_ = 0;
  size_t used_ = 0;
  Armed armed_ = Armed::kNo;
  bool overrun_ = false;
  uint64_t pushed_ = 0;

  std::atomic<size_t> used_hint_{0};  // used_, readable without the lock: an empty poll takes none

  std::atomic<bool> notify_wanted_{false};  // armed_ is not kNo, and there is a channel; written under mutex_
  std::atomic<int64_t> lease_end_{0};
  std::atomic<uint32_t> parked_{0};

  std::mutex drive_mutex_;
  std::unordered_map<PolledConnection*, Member> members_;  // guarded by drive_mutex_, as all of this block
  std::vector<Member*> active_;
  std::vector<Member*> marked_;
  size_t next_marked_ = 0;  // to be looked at
  int poll_set_ = -1;       // epoll descriptor
  uint32_t polls_until_watch_ = 0;

  std::mutex woken_mutex_;
  std::vector<PolledConnection*> woken_;  // guarded by woken_mutex_; each once
  std::atomic<bool> any_woken_{false};

  EventAccount event_account_;          // guarded by the channel's lock
  WaitingEvents waiting_events_{this};  // guarded by the channel's lock
  EventAccount async_account_;          // guarded by the async event queue's lock
};

}  // namespace stagecoach::emu
