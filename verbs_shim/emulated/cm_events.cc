// rdma_cm: event channels, and events with their acknowledgement.

#include <pthread.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <mutex>
#include <new>
#include <set>
#include <thread>
#include <utility>

#include "base/insist.h"
#include "base/once/once.h"
#include "verbs_shim/emulated/cm_objects.h"

namespace stagecoach::verbs::emulated {
namespace {

using emu::CmChannel;
using emu::CmEventType;

rdma_cm_event_type ToRdma(CmEventType type) {
  switch (type) {
    case CmEventType::kAddressResolved:
      return RDMA_CM_EVENT_ADDR_RESOLVED;
    case CmEventType::kAddressError:
      return RDMA_CM_EVENT_ADDR_ERROR;
    case CmEventType::kRouteResolved:
      return RDMA_CM_EVENT_ROUTE_RESOLVED;
    case CmEventType::kConnectRequest:
      return RDMA_CM_EVENT_CONNECT_REQUEST;
    case CmEventType::kConnectError:
      return RDMA_CM_EVENT_CONNECT_ERROR;
    case CmEventType::kUnreachable:
      return RDMA_CM_EVENT_UNREACHABLE;
    case CmEventType::kRejected:
      return RDMA_CM_EVENT_REJECTED;
    case CmEventType::kEstablished:
      return RDMA_CM_EVENT_ESTABLISHED;
    case CmEventType::kDisconnected:
      return RDMA_CM_EVENT_DISCONNECTED;
    case CmEventType::kConnectResponse:
      return RDMA_CM_EVENT_CONNECT_RESPONSE;
    case CmEventType::kTimewaitExit:
      return RDMA_CM_EVENT_TIMEWAIT_EXIT;
  }
  return RDMA_CM_EVENT_CONNECT_ERROR;
}

// The events programs hold, so that a second acknowledgement of one is told from a first. Never destroyed: programs may
// acknowledge in their own static destructors. No thread is in here at the moment of a fork, so that the child finds
// the lock free.
class HeldEvents {
 public:
  static HeldEvents& Get() {
    static Once once;
    static HeldEvents* held = nullptr;
    once.Do([] {
      if (held == nullptr) held = new HeldEvents;
      const int error =
          pthread_atfork([] { held->mutex_.lock(); }, [] { held->mutex_.unlock(); }, [] { held->mutex_.unlock(); });
      if (error != 0) throw std::bad_alloc();  // the only one that there is; it is tried again
    });
    return *held;
  }
  // The entry is made beforehand: what a program has been given can be written down without memory.
  using Entry = std::set<rdma_cm_event*>::node_type;
  static Entry NewEntry(rdma_cm_event* event) {
    std::set<rdma_cm_event*> alone{event};
    return alone.extract(event);
  }
  void Add(Entry entry) {
    std::lock_guard lock(mutex_);
    events_.insert(std::move(entry));
  }
  bool Remove(rdma_cm_event* event) {
    std::lock_guard lock(mutex_);
    return events_.erase(event) > 0;
  }

 private:
  std::mutex mutex_;
  std::set<rdma_cm_event*> events_;
};

// The id of a connect request, which the manager's does not name yet. Null, with errno set, when it is to have a
// channel of its own and there can be none.
std::unique_ptr<ShimId> NewChild(rdma_event_channel* channel, const ShimId& listener, const emu::CmEvent& source) {
  std::unique_ptr<ShimEventChannel> own;
  if (listener.own_channel != nullptr) {
    own = NewEventChannel();
    if (own == nullptr) return nullptr;
  }
  auto child = NewId(own != nullptr ? own.get() : channel, listener.context, listener.ps);
  child->own_channel = std::move(own);
  child->host = listener.host;
  child->cm = source.id;
  if (const int error = TakeDevice(child.get()); error != 0) return FailWith(error);
  return child;
}

// The program's id for the manager's. Null: it is that of a request which the program does not have yet.
ShimId* NamedBy(emu::CmId& id) {
  return static_cast<ShimId*>(std::atomic_ref<void*>(id.cookie).load(std::memory_order_acquire));
}

// The id is the program's from here on, whichever thread it uses it in. One with a channel of its own takes there what
// has come of it meanwhile.
void Surrender(std::unique_ptr<ShimId> child) {
  emu::ConnectionManager& manager = CmOf(*child);
  const std::shared_ptr<emu::CmId> id = child->cm;
  const std::shared_ptr<CmChannel> own = child->own_channel != nullptr ? child->own_channel->channel : nullptr;
  std::atomic_ref<void*>(id->cookie).store(child.release(), std::memory_order_release);
  if (own != nullptr) manager.Migrate(id, own);
}

// They begin alike. The bytes are the event's.
template <typename Shown>
void ShowPrivateData(const std::vector<std::byte>& bytes, Shown* shown) {
  shown->private_data = bytes.empty() ? nullptr : bytes.data();
  shown->private_data_len = static_cast<uint8_t>(bytes.size());
}

void Show(const emu::CmEvent& event, bool infiniband, rdma_conn_param* shown) {
  const emu::CmParameters& parameters = event.parameters;
  ShowPrivateData(parameters.private_data, shown);
  shown->responder_resources = parameters.responder_resources;
  shown->initiator_depth = parameters.initiator_depth;
  // The rest is in a request and in its answer, which name a QP.
  if (!infiniband || parameters.qp_number == 0) return;
  shown->flow_control = parameters.flow_control ? 1 : 0;
  // An answer says nothing of the first: the initiator has chosen it for both.
  if (event.type == CmEventType::kConnectRequest) shown->retry_count = parameters.retry_count;
  shown->rnr_retry_count = parameters.rnr_retry_count;
  shown->srq = parameters.srq ? 1 : 0;
  shown->qp_num = parameters.qp_number;
}

void Show(const emu::CmParameters& parameters, rdma_ud_param* shown) {
  ShowPrivateData(parameters.private_data, shown);
  shown->ah_attr = ShownAs(parameters.path);
  shown->qp_num = parameters.qp_number;
  shown->qkey = parameters.qkey;
}

// Programs destroy a channel whose events another of their threads waits for, and exit (rping does). With hardware that
// thread is in read(2) by then, as its last event took longer to come, and stays there; or it finds a bad descriptor.
// So what is left of the last few channels is kept for such a thread to find, and it is held up for as long as exiting
// takes.
constexpr auto kTimeToExit = std::chrono::milliseconds(200);
void Bury(ShimEventChannel* channel) {
  static std::array<std::atomic<ShimEventChannel*>, 16> graves;
  static std::atomic<size_t> next{0};
  delete graves[next.fetch_add(1) % graves.size()].exchange(channel);
}

}  // namespace

std::unique_ptr<ShimEventChannel> NewEventChannel() {
  std::shared_ptr<CmChannel> created = emu::World::Current().current_host().cm().CreateChannel();
  if (!created->usable()) return nullptr;
  auto channel = std::make_unique<ShimEventChannel>();
  channel->channel = std::move(created);
  channel->fd = channel->channel->fd();
  return channel;
}

}  // namespace stagecoach::verbs::emulated

using namespace stagecoach;  // NOLINT: the entry points stand in the global namespace
using namespace stagecoach::verbs::emulated;

extern "C" {

struct rdma_event_channel* rdma_create_event_channel(void) {
  return PointerEntry([&]() -> rdma_event_channel* { return NewEventChannel().release(); });
}

void rdma_destroy_event_channel(struct rdma_event_channel* channel) {
  VoidEntry([&] {
    if (channel == nullptr || IsInherited(channel)) return;
    auto* const shim = static_cast<ShimEventChannel*>(channel);
    std::shared_ptr<emu::CmChannel> gone;  // after the lock, unless somebody waits there
    {
      std::lock_guard lock(shim->mutex);
      gone = std::move(shim->channel);
      shim->fd = -1;
    }
    if (gone != nullptr) Bury(shim);
  });
}

int rdma_get_cm_event(struct rdma_event_channel* channel, struct rdma_cm_event** event) {
  return MinusOneEntry([&]() -> int {
    if (channel == nullptr || event == nullptr) return Answer(EINVAL);
    if (IsInherited(channel)) return Answer(ENODEV);
    std::shared_ptr<CmChannel> waited_on;
    {
      auto* const shim = static_cast<ShimEventChannel*>(channel);
      std::lock_guard lock(shim->mutex);
      waited_on = shim->channel;
    }
    if (waited_on == nullptr) {
      std::this_thread::sleep_for(kTimeToExit);
      return Answer(EBADF);
    }
    // First what needs memory: an event that has been fetched cannot be put back.
    HeldEvents& held = HeldEvents::Get();
    for (;;) {
      auto shim = std::make_unique<ShimCmEvent>();
      HeldEvents::Entry entry = HeldEvents::NewEntry(shim.get());
      auto got = waited_on->GetEvent();
      if (!got) return Answer(got.error());
      shim->source = std::move(*got);
      const emu::CmEvent& source = shim->source;
      shim->event = ToRdma(source.type);
      shim->status = source.status;
      std::unique_ptr<ShimId> child;
      if (source.type == CmEventType::kConnectRequest) {
        auto* listener = static_cast<ShimId*>(source.listener->cookie);
        try {
          child = Insist([&] { return NewChild(channel, *listener, source); });
        } catch (const std::exception&) {
          child = nullptr;
        }
        if (child == nullptr) {
          // Nobody will hear of this request: it is rejected.
          listener->host->cm().Destroy(source.id);
          CmChannel::Acknowledge(source);
          continue;
        }
        shim->listen_id = listener;
      }
      ShimId* const id = child != nullptr ? child.get() : NamedBy(*source.id);
      if (id == nullptr) {
        // Another thread is about to get the request. That it has been withdrawn its program finds out when it answers,
        // as on Linux, where nothing is heard of a request before that.
        CmChannel::Acknowledge(source);
        continue;
      }
      shim->id = id;
      Refresh(id);
      // As far as the program is concerned the QP is connected from here on; it may not have destroyed it before. Later
      // events leave the QP alone: its owner may be destroying it.
      if (source.type == CmEventType::kEstablished && id->qp != nullptr) id->qp->state = IBV_QPS_RTS;
      if (id->ps == RDMA_PS_UDP) {
        Show(source.parameters, &shim->param.ud);
      } else {
        Show(source, IsInfiniband(*id), &shim->param.conn);
      }
      if (child != nullptr) Surrender(std::move(child));
      held.Add(std::move(entry));
      *event = shim.release();
      return 0;
    }
  });
}

// An event that has been acknowledged is not there any more: EINVAL, and nothing else happens.
int rdma_ack_cm_event(struct rdma_cm_event* event) {
  return MinusOneEntry([&]() -> int {
    if (!HeldEvents::Get().Remove(event)) return Answer(EINVAL);
    // It stays where it is: what it holds cannot be let go of.
    if (IsInherited(event)) return Answer(ENODEV);
    // The id may be gone once it is acknowledged.
    const std::unique_ptr<ShimCmEvent> shim(static_cast<ShimCmEvent*>(event));
    CmChannel::Acknowledge(shim->source);
    return 0;
  });
}

}  // extern "C"
