// rdma_cm: synchronous ids, and ids that move between channels.

#include <cerrno>
#include <utility>

#include "verbs_shim/emulated/cm_objects.h"

namespace stagecoach::verbs::emulated {

void ReleaseEvent(ShimId* id) {
  if (id->event != nullptr) rdma_ack_cm_event(std::exchange(id->event, nullptr));
}

int Complete(ShimId* id) {
  if (id->own_channel == nullptr) return 0;
  ReleaseEvent(id);
  rdma_cm_event* event = nullptr;
  if (rdma_get_cm_event(id->channel, &event) != 0) return -1;
  id->event = event;
  if (event->status == 0) return 0;
  if (event->event == RDMA_CM_EVENT_REJECTED) return Answer(ECONNREFUSED);
  return Answer(event->status < 0 ? -event->status : event->status);
}

}  // namespace stagecoach::verbs::emulated

using namespace stagecoach::verbs::emulated;  // NOLINT: the entry points stand in the global namespace

extern "C" {

int rdma_migrate_id(struct rdma_cm_id* id, struct rdma_event_channel* channel) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(id) || (channel != nullptr && IsInherited(channel))) return Answer(ENODEV);
    ShimId* shim = ToShim(id);
    std::unique_ptr<ShimEventChannel> own;
    if (channel == nullptr) {
      if (shim->own_channel != nullptr) return Answer(EINVAL);
      own = NewEventChannel();
      if (own == nullptr) return -1;
      channel = own.get();
    }
    // The one event of a synchronous id is for us to acknowledge.
    ReleaseEvent(shim);
    CmOf(*shim).Migrate(shim->cm, static_cast<ShimEventChannel*>(channel)->channel);
    shim->own_channel = std::move(own);
    shim->channel = channel;
    return 0;
  });
}

}  // extern "C"
