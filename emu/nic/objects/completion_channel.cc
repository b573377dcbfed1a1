#include "emu/nic/objects/completion_channel.h"

#include <algorithm>

#include "base/mark.h"
#include "emu/nic/objects/completion_queue.h"

namespace stagecoach::emu {
const char* ToString(AsyncEventType type) {
  switch (type) {
    case AsyncEventType::kCqError:
      return "CQ error";
    case AsyncEventType::kQpFatal:
      return "QP fatal error";
    case AsyncEventType::kQpRequestError:
      return "QP request error";
    case AsyncEventType::kQpAccessError:
      return "QP access error";
    case AsyncEventType::kQpCommunicationEstablished:
      return "communication established";
    case AsyncEventType::kSendQueueDrained:
      return "send queue drained";
    case AsyncEventType::kQpLastWqeReached:
      return "last receive of the QP consumed";
    case AsyncEventType::kSrqLimitReached:
      return "SRQ limit reached";
    case AsyncEventType::kPortActive:
      return "port active";
    case AsyncEventType::kPortError:
      return "port error";
    case AsyncEventType::kGidChange:
      return "GID table changed";
    case AsyncEventType::kDeviceFatal:
      return "device fatal error";
  }
  return "unknown event";
}

CompletionChannel::CompletionChannel(Fabric& fabric, uint32_t handle)
    : fabric_(fabric), handle_(handle), notifier_(fabric.CreateNotifier()) {}

Result<CompletionQueue*, int> CompletionChannel::GetEvent() {
  // Programs destroy it, or close the device, with a thread still here, which on hardware sleeps on in read(2).
  const auto self = weak_from_this().lock();
  for (;;) {
    if (const int error = notifier_->Take(); error != 0) return Err(int{error});
    std::lock_guard lock(mutex_);
    // None only if Settle took it back in between.
    if (waiting_.IsLinked()) {
      auto* const events = static_cast<WaitingEvents*>(waiting_.next());
      events->Unlink();
      if (--events->count > 0) events->InsertBefore(waiting_);
      ++events->cq->event_account_.delivered;
      return events->cq;
    }
    STAGECOACH_MARK("channel.event_taken_back_from_its_waiter");
  }
}

void CompletionChannel::Push(CompletionQueue* cq) {
  {
    std::lock_guard lock(mutex_);
    if (cq->waiting_events_.count++ == 0) cq->waiting_events_.InsertBefore(waiting_);
    unsignalled_.fetch_add(1);
  }
  notifier_->Signal();
  if (unsignalled_.fetch_sub(1) == 1) unsignalled_.notify_all();
}

void CompletionChannel::Ack(CompletionQueue* cq, uint32_t count) {
  std::lock_guard lock(mutex_);
  EventAccount& account = cq->event_account_;
  // Events acknowledged that never were must not answer for later ones.
  account.acknowledged += std::min<uint64_t>(count, account.delivered - account.acknowledged);
  acked_.notify_all();
}

void CompletionChannel::Settle(CompletionQueue* cq, bool wait) {
  std::unique_lock lock(mutex_);
  // Each is one write away. Who makes it wants no lock for that, and no other begins while we have this one.
  for (uint32_t under_way; (under_way = unsignalled_.load()) != 0;) unsignalled_.wait(under_way);
  cq->waiting_events_.Unlink();
  for (; cq->waiting_events_.count > 0; --cq->waiting_events_.count) {
    STAGECOACH_MARK("channel.undelivered_event_goes_with_its_cq");
    // If there is none left, some GetEvent has consumed it, and will find the event gone.
    notifier_->Consume();
  }
  if (!wait) return;
  if (cq->event_account_.acknowledged < cq->event_account_.delivered) {
    STAGECOACH_MARK("channel.cq_waits_for_acknowledgements");
  }
  fabric_.Wait(lock, acked_, [cq] { return cq->event_account_.acknowledged >= cq->event_account_.delivered; });
}

AsyncEventQueue::AsyncEventQueue(Fabric& fabric) : fabric_(fabric), notifier_(fabric.CreateNotifier()) {}

Result<AsyncEvent, int> AsyncEventQueue::GetEvent() {
  const auto self = weak_from_this().lock();  // as above
  for (;;) {
    if (const int error = notifier_->Take(); error != 0) return Err(int{error});
    std::lock_guard lock(mutex_);
    // None only if Settle took it back in between.
    if (!events_.empty()) {
      const AsyncEvent event = events_.front();
      events_.pop_front();
      if (event.account != nullptr) ++event.account->delivered;
      return event;
    }
  }
}

void AsyncEventQueue::Ack(const AsyncEvent& event) {
  if (event.account == nullptr) return;
  std::lock_guard lock(mutex_);
  if (event.account->acknowledged < event.account->delivered) ++event.account->acknowledged;
  acked_.notify_all();
}

void AsyncEventQueue::Push(const AsyncEvent& event) {
  std::lock_guard lock(mutex_);
  const auto is_one = [](const AsyncEvent& other) { return other.type == AsyncEventType::kGidChange; };
  if (is_one(event) && std::any_of(events_.begin(), events_.end(), is_one)) return;
  events_.push_back(event);
  notifier_->Signal();
}

void AsyncEventQueue::Settle(EventAccount* account, bool wait) {
  std::unique_lock lock(mutex_);
  for (auto it = events_.begin(); it != events_.end();) {
    if (it->account != account) {
      ++it;
      continue;
    }
    STAGECOACH_MARK("channel.undelivered_async_event_goes_with_its_object");
    it = events_.erase(it);
    notifier_->Consume();
  }
  if (!wait) return;
  if (account->acknowledged < account->delivered) STAGECOACH_MARK("channel.object_waits_for_acknowledgements");
  fabric_.Wait(lock, acked_, [account] { return account->acknowledged >= account->delivered; });
}

}  // namespace stagecoach::emu
