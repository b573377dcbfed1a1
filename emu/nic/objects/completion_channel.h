// Completion channels and asynchronous events: queues of small events behind a descriptor that programs can poll.
//
// Threading: every member from any thread. The lock of a channel is a leaf: nothing is taken under it.
//
// Whoever sleeps on a completion channel's descriptor runs at once when it becomes readable, often on the processor of
// the thread that made it so. So the channel is signalled with none of the locks held that the woken program wants
// next: its own, and that of the CQ. What keeps descriptor and events in agreement instead is that an event is queued
// before its signal is given, and taken only by who has consumed a signal: there are never more signals than events,
// the descriptor is readable exactly when GetEvent would return, and who has consumed a signal finds an event.
// Settle, which takes events back with their signals, first lets signals under way arrive.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>

#include "base/result.h"
#include "base/spare_blocks.h"
#include "emu/fabric/fabric.h"
#include "emu/nic/loop/list_link.h"

namespace stagecoach::emu {

class CompletionQueue;
class QueuePair;
class SharedReceiveQueue;

// Counts the events a program has got about one object and acknowledged; destroying the object waits until they agree.
// Part of the object, guarded by the lock of the queue the events come from.
struct EventAccount {
  uint64_t delivered = 0;
  uint64_t acknowledged = 0;
};

// A CQ among those with events that nobody has fetched. Part of the CQ, so that an event needs no memory; guarded by
// the channel's lock.
struct WaitingEvents : ListLink {
  explicit WaitingEvents(CompletionQueue* of) : cq(of) {}
  CompletionQueue* const cq;
  uint64_t count = 0;  // linked while it is not 0
};

// ibv_comp_channel. Made by Nic::CreateChannel; lives until Nic::DestroyChannel, which refuses (EBUSY) while a CQ uses
// it.
class CompletionChannel : public std::enable_shared_from_this<CompletionChannel> {
 public:
  CompletionChannel(Fabric& fabric, uint32_t handle);
  CompletionChannel(const CompletionChannel&) = delete;
  CompletionChannel& operator=(const CompletionChannel&) = delete;

  uint32_t handle() const { return handle_; }
  // False when there was no descriptor left for it: then nothing else may be called.
  bool usable() const { return notifier_ != nullptr; }
  int fd() const { return notifier_->fd(); }

  // ibv_get_cq_event: an event, those of several CQs in turn. With none, it waits, or fails, as Notifier::Take says.
  // Each event got must be acknowledged on its CQ (CompletionQueue::AckEvents) before the CQ can be destroyed.
  Result<CompletionQueue*, int> GetEvent();

 private:
  friend class CompletionQueue;
  // Without the CQ's lock.
  void Push(CompletionQueue* cq);
  void Ack(CompletionQueue* cq, uint32_t count);
  // Takes the CQ's undelivered events back and, when `wait`, waits until the delivered ones are acknowledged.
  void Settle(CompletionQueue* cq, bool wait);

  Fabric& fabric_;
  const uint32_t handle_;
  std::unique_ptr<Notifier> notifier_;
  std::mutex mutex_;  // also of the CQs' event accounts
  std::condition_variable acked_;
  ListLink waiting_;                      // CQs with events, by WaitingEvents; guarded by mutex_
  std::atomic<uint32_t> unsignalled_{0};  // events whose signal is under way; raised under mutex_
};

// ibv_event_type, as far as this device raises them.
enum class AsyncEventType : uint8_t {
  kCqError,
  kQpFatal,
  kQpRequestError,
  kQpAccessError,
  kQpCommunicationEstablished,
  kSendQueueDrained,
  kQpLastWqeReached,  // of a QP with an SRQ: it is in error and will take no more Receives
  kSrqLimitReached,
  kPortActive,
  kPortError,
  kGidChange,
  kDeviceFatal,
};
const char* ToString(AsyncEventType type);

struct AsyncEvent {
  AsyncEventType type = AsyncEventType::kDeviceFatal;
  CompletionQueue* cq = nullptr;      // kCqError
  QueuePair* qp = nullptr;            // kQp*, kSendQueueDrained
  SharedReceiveQueue* srq = nullptr;  // kSrq*
  EventAccount* account = nullptr;    // of that object; null for the device and its port
};

// The asynchronous events of one open device (ibv_context).
class AsyncEventQueue : public std::enable_shared_from_this<AsyncEventQueue> {
 public:
  explicit AsyncEventQueue(Fabric& fabric);
  AsyncEventQueue(const AsyncEventQueue&) = delete;
  AsyncEventQueue& operator=(const AsyncEventQueue&) = delete;

  // False when there was no descriptor left for it: then nothing else may be called.
  bool usable() const { return notifier_ != nullptr; }
  int fd() const { return notifier_->fd(); }

  // ibv_get_async_event: as CompletionChannel::GetEvent.
  Result<AsyncEvent, int> GetEvent();
  // ibv_ack_async_event.
  void Ack(const AsyncEvent& event);

  // Of kGidChange one at a time is there: whoever takes it looks at the whole table. std::bad_alloc: nothing is queued;
  // only when the spare blocks are used up as well.
  void Push(const AsyncEvent& event);
  // Called before the object of `account` goes: takes undelivered events about it back and, when `wait`, waits until
  // delivered ones are acknowledged.
  void Settle(EventAccount* account, bool wait);

 private:
  Fabric& fabric_;
  std::unique_ptr<Notifier> notifier_;
  std::mutex mutex_;
  std::condition_variable acked_;
  // Guarded by mutex_; a signal for each, but for those that GetEvent is about to take.
  std::list<AsyncEvent, SpareAllocator<AsyncEvent, std::allocator>> events_;
};

}  // namespace stagecoach::emu
