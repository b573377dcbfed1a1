// rdma_cm: ids, their QPs, and the way to a connection.

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include <poll.h>

#include "verbs_shim/emulated/cm_device.h"
#include "verbs_shim/emulated/cm_objects.h"
#include "verbs_shim/emulated/explain.h"

namespace stagecoach::verbs::emulated {
namespace {

using emu::IpEndpoint;
using State = emu::CmId::State;

// Retries have three bits on the wire.
constexpr uint8_t kRetryMax = 7;

std::vector<std::byte> Copy(const void* data, size_t size) {
  const auto* bytes = static_cast<const std::byte*>(data);
  if (bytes == nullptr) return {};
  return std::vector<std::byte>(bytes, bytes + size);
}

// Without parameters a connection gets all the depth there is.
emu::CmParameters Parameters(const ShimId& id, const rdma_conn_param* from) {
  static_assert(RDMA_MAX_RESP_RES == emu::kCmDepthMax && RDMA_MAX_INIT_DEPTH == emu::kCmDepthMax);
  emu::CmParameters parameters{
      .private_data = id.connect_data, .responder_resources = emu::kCmDepthMax, .initiator_depth = emu::kCmDepthMax};
  if (from == nullptr) return parameters;
  const std::vector<std::byte> given = Copy(from->private_data, from->private_data_len);
  parameters.private_data.insert(parameters.private_data.end(), given.begin(), given.end());
  parameters.responder_resources = from->responder_resources;
  parameters.initiator_depth = from->initiator_depth;
  parameters.retry_count = std::min<uint8_t>(from->retry_count, kRetryMax);
  parameters.rnr_retry_count = std::min<uint8_t>(from->rnr_retry_count, kRetryMax);
  parameters.flow_control = from->flow_control != 0;
  parameters.srq = id.qp != nullptr ? id.qp->srq != nullptr : from->srq != 0;
  if (id.qp == nullptr) parameters.qp_number = from->qp_num;
  return parameters;
}

// Neither a QP nor the number of one, or more depth than the device has: the stock library refuses both.
bool IsUsable(const ShimId& id, const rdma_conn_param* parameters) {
  if (id.ps == RDMA_PS_UDP) return true;
  if (parameters == nullptr) return id.qp != nullptr;
  const emu::DeviceProfile& profile = id.host->nic().profile();
  const auto fits = [](uint8_t depth, uint32_t limit) { return depth == emu::kCmDepthMax || depth <= limit; };
  return fits(parameters->responder_resources, profile.max_ird) && fits(parameters->initiator_depth, profile.max_ord);
}

// The id goes to the host that has `address`, if there is one. Only before it is bound; one host is all there is
// outside a simulation.
int MoveToHostOf(ShimId* id, const IpEndpoint& address) {
  emu::Host* host = emu::World::Current().FindHost(address);
  if (host == nullptr || host == id->host || address.IsUnspecified()) return 0;
  if (StateOf(*id) != State::kIdle) return EINVAL;
  const std::shared_ptr<emu::CmId> there =
      host->cm().CreateId(static_cast<ShimEventChannel*>(id->channel)->channel, id->cm->port_space());
  CmOf(*id).Destroy(id->cm);
  if (id->default_pd != nullptr) CmDeviceOf(*id->host).LetPdGo();
  id->default_pd = nullptr;
  id->host = host;
  id->cm = there;
  id->cm->cookie = id;
  return 0;
}

// What is asked of the manager is answered by events, and another thread may fetch them, and destroy QP and id, before
// the asking call has returned. So that call holds what it needs, and of an asynchronous id it touches nothing after.
struct Call {
  explicit Call(const ShimId& id) : manager(CmOf(id)), cm(id.cm), synchronous(id.own_channel != nullptr) {}

  emu::ConnectionManager& manager;
  const std::shared_ptr<emu::CmId> cm;
  const bool synchronous;
};

// What the program sees of a QP that something else than ibv_modify_qp may have changed.
void ShowState(ibv_qp* qp) {
  if (const auto state = NicOf(qp->context).StateOf(qp->qp_num)) qp->state = ToIbv(*state);
}

int ChangeTo(rdma_cm_id* id, ibv_qp* qp, ibv_qp_state state) {
  ibv_qp_attr change{};
  change.qp_state = state;
  int mask = 0;
  if (rdma_init_qp_attr(id, &change, &mask) != 0) return errno;
  return ibv_modify_qp(qp, &change, mask);
}

// Which QP is to be connected is what `id->qp` says at this moment: a program may have put another one there, that of
// another id, or none. A QP made with ibv_create_qp may be named by number instead. On InfiniBand its program takes it
// through its states; on iWARP that is the connection's business.
int UseQpOf(ShimId* id, const rdma_conn_param* parameters) {
  if (!IsUsable(*id, parameters)) return EINVAL;
  if (id->qp == nullptr) {
    const bool by_number = !IsInfiniband(*id) && parameters != nullptr;
    return CmOf(*id).SetQp(id->cm, by_number ? parameters->qp_num : 0);
  }
  if (&NicOf(id->qp->context) != &id->host->nic()) return EINVAL;
  if (const int error = CmOf(*id).SetQp(id->cm, id->qp->qp_num); error != 0) return error;
  if (id->ps == RDMA_PS_UDP) return 0;
  // One that rdma_create_qp has not prepared.
  ShowState(id->qp);
  return id->qp->state == IBV_QPS_RESET ? ChangeTo(id, id->qp, IBV_QPS_INIT) : 0;
}

// A CQ of the id's own, on a channel of its own (rdma_create_qp(3)).
int SupplyCq(ShimId* id, uint32_t entries, ibv_comp_channel** channel, ibv_cq** cq) {
  *channel = ibv_create_comp_channel(id->verbs);
  if (*channel == nullptr) return errno;
  *cq = ibv_create_cq(id->verbs, std::max(1, static_cast<int>(entries)), id, *channel, 0);
  return *cq == nullptr ? errno : 0;
}

void ReleaseCqs(ShimId* id) {
  if (id->recv_cq != nullptr) ibv_destroy_cq(id->recv_cq);
  if (id->recv_cq_channel != nullptr) ibv_destroy_comp_channel(id->recv_cq_channel);
  if (id->send_cq != nullptr) ibv_destroy_cq(id->send_cq);
  if (id->send_cq_channel != nullptr) ibv_destroy_comp_channel(id->send_cq_channel);
  id->recv_cq = id->send_cq = nullptr;
  id->recv_cq_channel = id->send_cq_channel = nullptr;
}

int CreateQp(ShimId* id, ibv_qp_init_attr_ex* attributes) {
  if (id->qp != nullptr || attributes->qp_type != id->qp_type) return EINVAL;
  if ((attributes->comp_mask & IBV_QP_INIT_ATTR_PD) == 0) attributes->pd = nullptr;
  if (const int error = ChoosePd(*id, &attributes->pd); error != 0) return error;
  attributes->comp_mask |= IBV_QP_INIT_ATTR_PD;
  if (attributes->srq == nullptr) attributes->srq = id->srq;
  if (id->srq != nullptr && attributes->srq != id->srq) return EINVAL;
  if (attributes->recv_cq == nullptr) {
    if (const int error = SupplyCq(id, attributes->cap.max_recv_wr, &id->recv_cq_channel, &id->recv_cq); error != 0)
      return error;
    attributes->recv_cq = id->recv_cq;
  }
  if (attributes->send_cq == nullptr) {
    if (const int error = SupplyCq(id, attributes->cap.max_send_wr, &id->send_cq_channel, &id->send_cq); error != 0)
      return error;
    attributes->send_cq = id->send_cq;
  }
  std::unique_ptr<ibv_qp, decltype(&ibv_destroy_qp)> made(ibv_create_qp_ex(id->verbs, attributes), ibv_destroy_qp);
  if (made == nullptr) return errno;
  // Ready for Receives; connecting does the rest, but for datagrams, which need no connection.
  int error = ChangeTo(id, made.get(), IBV_QPS_INIT);
  if (id->qp_type == IBV_QPT_UD) {
    if (error == 0) error = ChangeTo(id, made.get(), IBV_QPS_RTR);
    if (error == 0) error = ChangeTo(id, made.get(), IBV_QPS_RTS);
  }
  if (error == 0) error = CmOf(*id).SetQp(id->cm, made->qp_num);
  if (error != 0) return error;
  id->qp = made.release();
  id->pd = attributes->pd;
  return 0;
}

}  // namespace

std::unique_ptr<ShimId> NewId(rdma_event_channel* channel, void* context, rdma_port_space port_space) {
  auto id = std::make_unique<ShimId>();
  id->channel = channel;
  id->context = context;
  id->ps = port_space;
  id->qp_type = port_space == RDMA_PS_UDP ? IBV_QPT_UD : IBV_QPT_RC;
  return id;
}

void Refresh(ShimId* id) {
  const emu::ConnectionManager::Info info = CmOf(*id).Describe(*id->cm);
  info.local.ToSockaddr(&id->route.addr.src_storage);
  info.remote.ToSockaddr(&id->route.addr.dst_storage);
  // An id bound to no particular address has no device yet.
  if (id->verbs == nullptr && !info.local.IsUnspecified()) {
    TakeDevice(id);
    id->verbs = CmDeviceOf(*id->host).Context();
    if (id->pd == nullptr) id->pd = id->default_pd;
    id->port_num = 1;
  }
}

int TakeDevice(ShimId* id) {
  if (id->host->nic().failed()) return 0;
  CmDevice& device = CmDeviceOf(*id->host);
  if (device.Context() == nullptr) return errno;
  if (id->default_pd == nullptr) id->default_pd = device.HoldPd();
  return id->default_pd != nullptr ? 0 : errno;
}

int ChoosePd(const ShimId& id, ibv_pd** pd) {
  if (id.verbs == nullptr) return EINVAL;
  if (*pd == nullptr) *pd = id.pd;
  return *pd != nullptr && (*pd)->context == id.verbs ? 0 : EINVAL;
}

}  // namespace stagecoach::verbs::emulated

using namespace stagecoach;  // NOLINT: the entry points stand in the global namespace
using namespace stagecoach::verbs::emulated;

extern "C" {

int rdma_create_id(struct rdma_event_channel* channel, struct rdma_cm_id** id, void* context, enum rdma_port_space ps) {
  return MinusOneEntry([&]() -> int {
    if (channel != nullptr && IsInherited(channel)) return Answer(ENODEV);
    switch (ps) {
      case RDMA_PS_TCP:
        break;
      case RDMA_PS_UDP:
        if (!emu::World::Current().current_host().nic().is_infiniband()) {
          Explain(Lack::kIwarpDatagrams);
          return Answer(EOPNOTSUPP);
        }
        break;
      // IP over InfiniBand, and InfiniBand's own addresses.
      case RDMA_PS_IPOIB:
      case RDMA_PS_IB:
        return Answer(EOPNOTSUPP);
      default:
        return Answer(EINVAL);
    }
    std::unique_ptr<ShimEventChannel> own;
    if (channel == nullptr) {
      own = NewEventChannel();
      if (own == nullptr) return -1;
      channel = own.get();
    }
    std::unique_ptr<ShimId> created = NewId(channel, context, ps);
    created->own_channel = std::move(own);
    created->host = &emu::World::Current().current_host();
    created->cm =
        CmOf(*created).CreateId(static_cast<ShimEventChannel*>(channel)->channel,
                                ps == RDMA_PS_UDP ? emu::wire::CmPortSpace::kUdp : emu::wire::CmPortSpace::kTcp);
    created->cm->cookie = created.get();
    *id = created.release();
    return 0;
  });
}

int rdma_destroy_id(struct rdma_cm_id* id) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(id)) return Answer(ENODEV);
    const std::unique_ptr<ShimId> shim(ToShim(id));
    // Otherwise we would wait for ourselves.
    ReleaseEvent(shim.get());
    CmOf(*shim).Destroy(shim->cm);
    if (shim->default_pd != nullptr) CmDeviceOf(*shim->host).LetPdGo();
    return 0;
  });
}

int rdma_bind_addr(struct rdma_cm_id* id, struct sockaddr* address) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(id)) return Answer(ENODEV);
    const auto local = IpEndpoint::FromSockaddr(address);
    if (!local) return Answer(EAFNOSUPPORT);
    ShimId* shim = ToShim(id);
    if (const int error = MoveToHostOf(shim, *local); error != 0) return Answer(error);
    if (!local->IsUnspecified()) {
      if (const int error = TakeDevice(shim); error != 0) return Answer(error);
    }
    if (const int error = CmOf(*shim).Bind(shim->cm, *local); error != 0) return Answer(error);
    Refresh(shim);
    return 0;
  });
}

// Routes are known at once, so that there is nothing for the time-outs of resolving to cut short.
int rdma_resolve_addr(struct rdma_cm_id* id, struct sockaddr* source, struct sockaddr* destination, int) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(id)) return Answer(ENODEV);
    const auto remote = IpEndpoint::FromSockaddr(destination);
    if (!remote) return Answer(EAFNOSUPPORT);
    ShimId* shim = ToShim(id);
    IpEndpoint local;
    if (source != nullptr) {
      const auto given = IpEndpoint::FromSockaddr(source);
      if (!given) return Answer(EAFNOSUPPORT);
      local = *given;
      if (const int error = MoveToHostOf(shim, local); error != 0) return Answer(error);
    }
    if (const int error = TakeDevice(shim); error != 0) return Answer(error);
    if (const int error = CmOf(*shim).ResolveAddress(shim->cm, local, *remote); error != 0) return Answer(error);
    return Complete(shim);
  });
}

int rdma_resolve_route(struct rdma_cm_id* id, int) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(id)) return Answer(ENODEV);
    ShimId* shim = ToShim(id);
    if (const int error = CmOf(*shim).ResolveRoute(shim->cm); error != 0) return Answer(error);
    return Complete(shim);
  });
}

int rdma_create_qp_ex(struct rdma_cm_id* id, struct ibv_qp_init_attr_ex* attributes) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(id)) return Answer(ENODEV);
    ShimId* shim = ToShim(id);
    const ibv_qp_init_attr_ex given = *attributes;
    const int error = Entry([](int thrown) { return thrown; }, [&] { return CreateQp(shim, attributes); });
    if (error != 0 && shim->qp == nullptr) {
      ReleaseCqs(shim);
      *attributes = given;
    }
    return Answer(error);
  });
}

int rdma_create_qp(struct rdma_cm_id* id, struct ibv_pd* pd, struct ibv_qp_init_attr* attributes) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(id)) return Answer(ENODEV);
    // The extended structure begins with the plain one, whose padding is where its mask is.
    constexpr size_t kShared = offsetof(ibv_qp_init_attr_ex, comp_mask);
    static_assert(kShared == offsetof(ibv_qp_init_attr, sq_sig_all) + sizeof(attributes->sq_sig_all));
    ibv_qp_init_attr_ex extended{};
    std::memcpy(&extended, attributes, kShared);
    if (pd != nullptr) {
      extended.pd = pd;
      extended.comp_mask = IBV_QP_INIT_ATTR_PD;
    }
    const int result = rdma_create_qp_ex(id, &extended);
    std::memcpy(attributes, &extended, kShared);
    return result;
  });
}

void rdma_destroy_qp(struct rdma_cm_id* id) {
  VoidEntry([&] {
    if (IsInherited(id)) return;
    // The id lets go of it first: another thread may be taking an event of this id.
    ibv_qp* qp = std::exchange(id->qp, nullptr);
    if (qp == nullptr) return;
    ibv_destroy_qp(qp);
    ReleaseCqs(ToShim(id));
  });
}

int rdma_connect(struct rdma_cm_id* id, struct rdma_conn_param* parameters) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(id)) return Answer(ENODEV);
    ShimId* shim = ToShim(id);
    if (const int error = UseQpOf(shim, parameters); error != 0) return Answer(error);
    const Call call(*shim);
    if (const int error = call.manager.Connect(call.cm, Parameters(*shim, parameters)); error != 0)
      return Answer(error);
    return call.synchronous ? Complete(shim) : 0;
  });
}

int rdma_listen(struct rdma_cm_id* id, int backlog) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(id)) return Answer(ENODEV);
    ShimId* shim = ToShim(id);
    if (const int error = CmOf(*shim).Listen(shim->cm, backlog); error != 0) return Answer(error);
    Refresh(shim);
    return 0;
  });
}

int rdma_accept(struct rdma_cm_id* id, struct rdma_conn_param* parameters) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(id)) return Answer(ENODEV);
    ShimId* shim = ToShim(id);
    if (const int error = UseQpOf(shim, parameters); error != 0) return Answer(error);
    const Call call(*shim);
    ibv_qp* const qp = IsInfiniband(*shim) && id->ps != RDMA_PS_UDP ? id->qp : nullptr;
    const bool is_answer = id->ps == RDMA_PS_UDP;
    // It may post when this returns. Neither id nor QP may be there any more by then, also where the call fails because
    // the peer has withdrawn.
    const auto before_answer = [qp] {
      if (qp != nullptr) qp->state = IBV_QPS_RTS;
    };
    if (const int error = call.manager.Accept(call.cm, Parameters(*shim, parameters), before_answer); error != 0)
      return Answer(error);
    if (!call.synchronous) return 0;
    if (!is_answer) return Complete(shim);
    // Nobody is connected, so there is nothing to wait for.
    ReleaseEvent(shim);
    return 0;
  });
}

int rdma_reject(struct rdma_cm_id* id, const void* private_data, uint8_t private_data_len) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(id)) return Answer(ENODEV);
    ShimId* shim = ToShim(id);
    if (const int error = CmOf(*shim).Reject(shim->cm, Copy(private_data, private_data_len)); error != 0)
      return Answer(error);
    ReleaseEvent(shim);
    return 0;
  });
}

int rdma_disconnect(struct rdma_cm_id* id) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(id)) return Answer(ENODEV);
    ShimId* shim = ToShim(id);
    const bool had_ended = StateOf(*shim) == State::kClosed;
    const Call call(*shim);
    ibv_qp* const qp = IsInfiniband(*shim) && id->ps != RDMA_PS_UDP ? id->qp : nullptr;
    if (qp != nullptr) qp->state = IBV_QPS_ERR;
    if (const int error = call.manager.Disconnect(call.cm); error != 0) {
      if (qp != nullptr) ShowState(qp);
      return Answer(error);
    }
    if (!call.synchronous) return 0;
    // A synchronous id whose end has been told already hears nothing more, so there is nothing to wait for.
    pollfd waiting{shim->channel->fd, POLLIN, 0};
    if (had_ended && poll(&waiting, 1, 0) == 0) return 0;
    return Complete(shim);
  });
}

__be16 rdma_get_src_port(struct rdma_cm_id* id) {
  const auto local = IpEndpoint::FromSockaddr(&id->route.addr.src_addr);
  return htons(local ? local->port : 0);
}

__be16 rdma_get_dst_port(struct rdma_cm_id* id) {
  const auto remote = IpEndpoint::FromSockaddr(&id->route.addr.dst_addr);
  return htons(remote ? remote->port : 0);
}

struct ibv_context** rdma_get_devices(int* num_devices) {
  return PointerEntry([&]() -> ibv_context** {
    ibv_context* context = CmDeviceOf(emu::World::Current().current_host()).Context();
    if (context == nullptr) return nullptr;
    auto** list = new (std::nothrow) ibv_context*[2];
    if (list == nullptr) return FailWith(ENOMEM);
    list[0] = context;
    list[1] = nullptr;
    if (num_devices != nullptr) *num_devices = 1;
    return list;
  });
}

void rdma_free_devices(struct ibv_context** list) {
  VoidEntry([&] { delete[] list; });
}

}  // extern "C"
