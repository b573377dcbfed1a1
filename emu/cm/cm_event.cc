#include "emu/cm/cm_event.h"

#include "base/check.h"
#include "base/insist.h"
#include "base/mark.h"
#include "emu/cm/connection_manager.h"

namespace stagecoach::emu {
namespace {

// Whose program must acknowledge it.
CmId* AccountHolder(const CmEvent& event) {
  return event.listener != nullptr ? event.listener.get() : event.id.get();
}

}  // namespace

const char* ToString(CmEventType type) {
  switch (type) {
    case CmEventType::kAddressResolved:
      return "address-resolved";
    case CmEventType::kAddressError:
      return "address-error";
    case CmEventType::kRouteResolved:
      return "route-resolved";
    case CmEventType::kConnectRequest:
      return "connect-request";
    case CmEventType::kConnectError:
      return "connect-error";
    case CmEventType::kUnreachable:
      return "unreachable";
    case CmEventType::kRejected:
      return "rejected";
    case CmEventType::kEstablished:
      return "established";
    case CmEventType::kDisconnected:
      return "disconnected";
    case CmEventType::kConnectResponse:
      return "connect-response";
    case CmEventType::kTimewaitExit:
      return "timewait-exit";
  }
  return "?";
}

void CmEventAccount::Deliver() {
  std::lock_guard lock(mutex_);
  ++deliveries_;
}

void CmEventAccount::Acknowledge() {
  std::lock_guard lock(mutex_);
  if (acknowledgements_ == deliveries_) return;
  ++acknowledgements_;
  acknowledged_.notify_all();
}

void CmEventAccount::AwaitAcknowledged(Fabric& fabric) {
  std::unique_lock lock(mutex_);
  if (acknowledgements_ < deliveries_) STAGECOACH_MARK("cm.id_waits_for_acknowledgements");
  fabric.Wait(lock, acknowledged_, [this, until = deliveries_] { return acknowledgements_ >= until; });
}

CmChannel::CmChannel(Fabric& fabric) : notifier_(fabric.CreateNotifier()) {}

Result<CmEvent, int> CmChannel::GetEvent() {
  for (;;) {
    if (const int error = notifier_->Take(); error != 0) return Err(int{error});
    std::lock_guard lock(mutex_);
    // None only if Forget took it back in between.
    if (!events_.empty()) {
      CmEvent event = std::move(events_.front());
      events_.pop_front();
      AccountHolder(event)->account().Deliver();
      return event;
    }
  }
}

void CmChannel::Acknowledge(const CmEvent& event) {
  AccountHolder(event)->account().Acknowledge();
}

void CmChannel::Push(CmEvent event) {
  std::lock_guard lock(mutex_);
  // An event that could not be put there has not been moved from.
  Insist([&] { events_.push_back(std::move(event)); });
  notifier_->Signal();
}

std::list<CmEvent> CmChannel::Forget(const CmId* id) {
  std::lock_guard lock(mutex_);
  std::list<CmEvent> undelivered;
  for (auto it = events_.begin(); it != events_.end();) {
    const auto event = it++;
    if (AccountHolder(*event) != id && event->id.get() != id) continue;
    STAGECOACH_MARK("cm.undelivered_event_goes_with_its_id");
    undelivered.splice(undelivered.end(), events_, event);
    notifier_->Consume();
  }
  return undelivered;
}

}  // namespace stagecoach::emu
