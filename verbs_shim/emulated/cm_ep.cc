// rdma_cm: endpoints, which are synchronous ids made in one go from what rdma_getaddrinfo found.

#include <rdma/rdma_verbs.h>

#include <cerrno>
#include <memory>
#include <utility>

#include "verbs_shim/emulated/cm_objects.h"

namespace stagecoach::verbs::emulated {
namespace {

// How long each step of resolving may take, in ms; the stock library's value.
constexpr int kResolveTimeout = 2000;

int PreparePassive(ShimId* id, const rdma_addrinfo& info, ibv_pd* pd, const ibv_qp_init_attr* attributes) {
  if (rdma_bind_addr(id, info.ai_src_addr) != 0) return -1;
  if (pd != nullptr) id->pd = pd;
  if (attributes != nullptr) {
    id->request_qp = *attributes;
    id->request_qp->qp_type = static_cast<ibv_qp_type>(info.ai_qp_type);
  }
  return 0;
}

int PrepareActive(ShimId* id, const rdma_addrinfo& info, ibv_pd* pd, ibv_qp_init_attr* attributes) {
  if (rdma_resolve_addr(id, info.ai_src_addr, info.ai_dst_addr, kResolveTimeout) != 0) return -1;
  const int routed = info.ai_route_len > 0
                         ? rdma_set_option(id, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, info.ai_route, info.ai_route_len)
                         : rdma_resolve_route(id, kResolveTimeout);
  if (routed != 0) return -1;
  if (attributes != nullptr) {
    attributes->qp_type = static_cast<ibv_qp_type>(info.ai_qp_type);
    if (rdma_create_qp(id, pd, attributes) != 0) return -1;
  }
  const auto* data = static_cast<const std::byte*>(info.ai_connect);
  if (data != nullptr) id->connect_data.assign(data, data + info.ai_connect_len);
  return 0;
}

struct DestroyEndpoint {
  void operator()(rdma_cm_id* id) const { rdma_destroy_ep(id); }
};

}  // namespace
}  // namespace stagecoach::verbs::emulated

using namespace stagecoach;  // NOLINT: the entry points stand in the global namespace
using namespace stagecoach::verbs::emulated;

extern "C" {

int rdma_create_ep(struct rdma_cm_id** id, struct rdma_addrinfo* info, struct ibv_pd* pd,
                   struct ibv_qp_init_attr* attributes) {
  return MinusOneEntry([&]() -> int {
    if (id == nullptr || info == nullptr) return Answer(EINVAL);
    rdma_cm_id* created = nullptr;
    if (rdma_create_id(nullptr, &created, nullptr, static_cast<rdma_port_space>(info->ai_port_space)) != 0) return -1;
    std::unique_ptr<rdma_cm_id, DestroyEndpoint> endpoint(created);
    const bool passive = (info->ai_flags & RAI_PASSIVE) != 0;
    const int prepared = passive ? PreparePassive(ToShim(created), *info, pd, attributes)
                                 : PrepareActive(ToShim(created), *info, pd, attributes);
    if (prepared != 0) {
      const int error = errno;
      endpoint.reset();
      return Answer(error);
    }
    *id = endpoint.release();
    return 0;
  });
}

void rdma_destroy_ep(struct rdma_cm_id* id) {
  VoidEntry([&] {
    if (IsInherited(id)) return;
    rdma_destroy_qp(id);
    rdma_destroy_srq(id);
    rdma_destroy_id(id);
  });
}

int rdma_get_request(struct rdma_cm_id* listener, struct rdma_cm_id** id) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(listener)) return Answer(ENODEV);
    ShimId* shim = ToShim(listener);
    // Nothing would ever answer an id that does not listen.
    if (shim->own_channel == nullptr || StateOf(*shim) != emu::CmId::State::kListening) return Answer(EINVAL);
    ReleaseEvent(shim);
    rdma_cm_event* event = nullptr;
    // A request that another thread has just taken may be withdrawn before it has a channel of its own. It finds out
    // when it answers.
    do {
      if (event != nullptr) rdma_ack_cm_event(event);
      if (rdma_get_cm_event(listener->channel, &event) != 0) return -1;
    } while (event->event != RDMA_CM_EVENT_CONNECT_REQUEST);
    rdma_cm_id* child = event->id;
    child->event = event;
    if (shim->request_qp) {
      ibv_qp_init_attr attributes = *shim->request_qp;
      if (rdma_create_qp(child, listener->pd, &attributes) != 0) {
        // The peer is told, and hears no more.
        const int error = errno;
        rdma_destroy_id(child);
        return Answer(error);
      }
    }
    *id = child;
    return 0;
  });
}

}  // extern "C"
