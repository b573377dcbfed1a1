// rdma_cm: ids, connection establishment, events.

#include <cerrno>
#include <cstring>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "verbs_shim/emulated/objects.h"

namespace stagecoach::verbs::emulated {
namespace {

using emu::CmEventType;
using emu::ConnectionManager;
using emu::IpEndpoint;

// The rdma_cm convention: -1 and errno.
int Answer(int error) {
  if (error == 0) return 0;
  errno = error;
  return -1;
}

ShimId* ToShim(rdma_cm_id* id) {
  return static_cast<ShimId*>(id);
}
ConnectionManager& CmOf(const ShimId& id) {
  return id.host->cm();
}

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
  }
  return RDMA_CM_EVENT_CONNECT_ERROR;
}

std::vector<std::byte> Copy(const void* data, size_t size) {
  const auto* bytes = static_cast<const std::byte*>(data);
  if (bytes == nullptr) return {};
  return std::vector<std::byte>(bytes, bytes + size);
}

// Without parameters a connection gets all the depth there is.
emu::CmParameters Parameters(const rdma_conn_param* from) {
  if (from == nullptr)
    return {.private_data = {}, .responder_resources = emu::kCmDepthMax, .initiator_depth = emu::kCmDepthMax};
  static_assert(RDMA_MAX_RESP_RES == emu::kCmDepthMax && RDMA_MAX_INIT_DEPTH == emu::kCmDepthMax);
  return {.private_data = Copy(from->private_data, from->private_data_len),
          .responder_resources = from->responder_resources,
          .initiator_depth = from->initiator_depth};
}

ShimId* NewId(rdma_event_channel* channel, void* context, rdma_port_space port_space) {
  auto* id = new ShimId{};
  id->channel = channel;
  id->context = context;
  id->ps = port_space;
  id->qp_type = IBV_QPT_RC;
  return id;
}

// What programs read in the id, from what the manager knows.
void Refresh(ShimId* id) {
  const ConnectionManager::Info info = CmOf(*id).Describe(*id->cm);
  info.local.ToSockaddr(&id->route.addr.src_storage);
  info.remote.ToSockaddr(&id->route.addr.dst_storage);
  // An id bound to no particular address has no device yet.
  if (id->verbs == nullptr && !info.local.IsUnspecified()) {
    id->verbs = ApiOf(*id->host).CmContext();
    id->port_num = 1;
  }
}

// The id goes to the host that has `address`. Only before it is bound; one host is all there is outside a simulation.
int MoveToHostOf(ShimId* id, const IpEndpoint& address) {
  emu::Host* host = emu::World::Current().FindHost(address);
  if (host == nullptr) return EADDRNOTAVAIL;
  if (host == id->host || address.IsUnspecified()) return 0;
  if (CmOf(*id).Describe(*id->cm).state != emu::CmId::State::kIdle) return EINVAL;
  CmOf(*id).Destroy(id->cm);
  id->host = host;
  id->cm = host->cm().CreateId(static_cast<ShimEventChannel*>(id->channel)->channel);
  id->cm->cookie = id;
  return 0;
}

// Makes the CQs a program left to us (rdma_create_qp(3)).
int SupplyCqs(ShimId* id, ibv_qp_init_attr* attributes) {
  if (attributes->recv_cq == nullptr) {
    id->recv_cq_channel = ibv_create_comp_channel(id->verbs);
    if (id->recv_cq_channel == nullptr) return errno;
    id->recv_cq = ibv_create_cq(id->verbs, std::max(1, static_cast<int>(attributes->cap.max_recv_wr)), id,
                                id->recv_cq_channel, 0);
    if (id->recv_cq == nullptr) return errno;
    attributes->recv_cq = id->recv_cq;
  }
  if (attributes->send_cq == nullptr) {
    id->send_cq_channel = ibv_create_comp_channel(id->verbs);
    if (id->send_cq_channel == nullptr) return errno;
    id->send_cq = ibv_create_cq(id->verbs, std::max(1, static_cast<int>(attributes->cap.max_send_wr)), id,
                                id->send_cq_channel, 0);
    if (id->send_cq == nullptr) return errno;
    attributes->send_cq = id->send_cq;
  }
  return 0;
}

void ReleaseCqs(ShimId* id) {
  if (id->recv_cq != nullptr) ibv_destroy_cq(id->recv_cq);
  if (id->recv_cq_channel != nullptr) ibv_destroy_comp_channel(id->recv_cq_channel);
  if (id->send_cq != nullptr) ibv_destroy_cq(id->send_cq);
  if (id->send_cq_channel != nullptr) ibv_destroy_comp_channel(id->send_cq_channel);
  id->recv_cq = id->send_cq = nullptr;
  id->recv_cq_channel = id->send_cq_channel = nullptr;
}

int CreateQp(ShimId* id, ibv_pd* pd, ibv_qp_init_attr* attributes) {
  if (id->qp != nullptr || id->verbs == nullptr) return EINVAL;
  if (pd == nullptr) pd = ApiOf(*id->host).CmPd();
  if (pd == nullptr) return errno;
  if (pd->context->device != id->verbs->device) return EINVAL;
  if (const int error = SupplyCqs(id, attributes); error != 0) return error;
  ibv_qp* qp = ibv_create_qp(pd, attributes);
  if (qp == nullptr) return errno;
  // Ready for Receives; connecting does the rest.
  ibv_qp_attr change{};
  change.qp_state = IBV_QPS_INIT;
  change.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
  change.port_num = id->port_num;
  int error = ibv_modify_qp(qp, &change, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  if (error == 0) error = CmOf(*id).SetQp(id->cm, qp->qp_num);
  if (error != 0) {
    ibv_destroy_qp(qp);
    return error;
  }
  id->qp = qp;
  id->pd = pd;
  return 0;
}

// A QP made with ibv_create_qp may be named by number instead.
int UseQpOf(ShimId* id, const rdma_conn_param* parameters) {
  if (id->qp != nullptr || parameters == nullptr || parameters->qp_num == 0) return 0;
  return CmOf(*id).SetQp(id->cm, parameters->qp_num);
}

}  // namespace
}  // namespace stagecoach::verbs::emulated

using namespace stagecoach;  // NOLINT: the entry points stand in the global namespace
using namespace stagecoach::verbs::emulated;

extern "C" {

struct rdma_event_channel* rdma_create_event_channel(void) {
  std::shared_ptr<emu::CmChannel> created = emu::World::Current().current_host().cm().CreateChannel();
  if (!created->usable()) {
    errno = EMFILE;
    return nullptr;
  }
  auto* channel = new ShimEventChannel{};
  channel->channel = std::move(created);
  channel->fd = channel->channel->fd();
  return channel;
}

void rdma_destroy_event_channel(struct rdma_event_channel* channel) {
  delete static_cast<ShimEventChannel*>(channel);
}

int rdma_create_id(struct rdma_event_channel* channel, struct rdma_cm_id** id, void* context, enum rdma_port_space ps) {
  // Synchronous ids, which have no channel, and datagrams are not offered.
  if (channel == nullptr || ps != RDMA_PS_TCP) return Answer(EOPNOTSUPP);
  ShimId* created = NewId(channel, context, ps);
  created->host = &emu::World::Current().current_host();
  created->cm = CmOf(*created).CreateId(static_cast<ShimEventChannel*>(channel)->channel);
  created->cm->cookie = created;
  *id = created;
  return 0;
}

int rdma_destroy_id(struct rdma_cm_id* id) {
  ShimId* shim = ToShim(id);
  CmOf(*shim).Destroy(shim->cm);
  delete shim;
  return 0;
}

int rdma_bind_addr(struct rdma_cm_id* id, struct sockaddr* address) {
  const auto local = IpEndpoint::FromSockaddr(address);
  if (!local) return Answer(EAFNOSUPPORT);
  ShimId* shim = ToShim(id);
  if (const int error = MoveToHostOf(shim, *local); error != 0) return Answer(error);
  if (const int error = CmOf(*shim).Bind(shim->cm, *local); error != 0) return Answer(error);
  Refresh(shim);
  return 0;
}

int rdma_resolve_addr(struct rdma_cm_id* id, struct sockaddr* source, struct sockaddr* destination, int) {
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
  return Answer(CmOf(*shim).ResolveAddress(shim->cm, local, *remote));
}

int rdma_resolve_route(struct rdma_cm_id* id, int) {
  ShimId* shim = ToShim(id);
  return Answer(CmOf(*shim).ResolveRoute(shim->cm));
}

int rdma_create_qp(struct rdma_cm_id* id, struct ibv_pd* pd, struct ibv_qp_init_attr* attributes) {
  ShimId* shim = ToShim(id);
  const int error = CreateQp(shim, pd, attributes);
  if (error != 0 && shim->qp == nullptr) ReleaseCqs(shim);
  return Answer(error);
}

void rdma_destroy_qp(struct rdma_cm_id* id) {
  // The id lets go of it first: another thread may be taking an event of this id.
  ibv_qp* qp = std::exchange(id->qp, nullptr);
  if (qp == nullptr) return;
  ibv_destroy_qp(qp);
  ReleaseCqs(ToShim(id));
}

int rdma_connect(struct rdma_cm_id* id, struct rdma_conn_param* parameters) {
  ShimId* shim = ToShim(id);
  if (const int error = UseQpOf(shim, parameters); error != 0) return Answer(error);
  return Answer(CmOf(*shim).Connect(shim->cm, Parameters(parameters)));
}

int rdma_listen(struct rdma_cm_id* id, int backlog) {
  ShimId* shim = ToShim(id);
  if (const int error = CmOf(*shim).Listen(shim->cm, backlog); error != 0) return Answer(error);
  Refresh(shim);
  return 0;
}

int rdma_accept(struct rdma_cm_id* id, struct rdma_conn_param* parameters) {
  ShimId* shim = ToShim(id);
  if (const int error = UseQpOf(shim, parameters); error != 0) return Answer(error);
  return Answer(CmOf(*shim).Accept(shim->cm, Parameters(parameters)));
}

int rdma_reject(struct rdma_cm_id* id, const void* private_data, uint8_t private_data_len) {
  ShimId* shim = ToShim(id);
  return Answer(CmOf(*shim).Reject(shim->cm, Copy(private_data, private_data_len)));
}

// Tells InfiniBand's connection manager of events it did not see; iWARP's sees all.
int rdma_notify(struct rdma_cm_id*, enum ibv_event_type) {
  return 0;
}

int rdma_disconnect(struct rdma_cm_id* id) {
  ShimId* shim = ToShim(id);
  const int error = CmOf(*shim).Disconnect(shim->cm);
  Refresh(shim);
  return Answer(error);
}

int rdma_get_cm_event(struct rdma_event_channel* channel, struct rdma_cm_event** event) {
  auto got = static_cast<ShimEventChannel*>(channel)->channel->GetEvent();
  if (!got) return Answer(got.error());
  auto* shim = new ShimCmEvent{};
  shim->source = std::move(*got);
  const emu::CmEvent& source = shim->source;
  shim->event = ToRdma(source.type);
  shim->status = source.status;
  if (source.type == CmEventType::kConnectRequest) {
    auto* listener = static_cast<ShimId*>(source.listener->cookie);
    ShimId* child = NewId(channel, listener->context, listener->ps);
    child->host = listener->host;
    child->cm = source.id;
    child->cm->cookie = child;
    shim->listen_id = listener;
  }
  auto* id = static_cast<ShimId*>(source.id->cookie);
  shim->id = id;
  Refresh(id);
  // As far as the program is concerned the QP is connected from here on; it may not have destroyed it before. Later
  // events leave the QP alone: its owner may be destroying it.
  if (source.type == CmEventType::kEstablished && id->qp != nullptr) id->qp->state = IBV_QPS_RTS;
  rdma_conn_param& parameters = shim->param.conn;
  const std::vector<std::byte>& private_data = source.parameters.private_data;
  parameters.private_data = private_data.empty() ? nullptr : private_data.data();
  parameters.private_data_len = static_cast<uint8_t>(private_data.size());
  parameters.responder_resources = source.parameters.responder_resources;
  parameters.initiator_depth = source.parameters.initiator_depth;
  *event = shim;
  return 0;
}

int rdma_ack_cm_event(struct rdma_cm_event* event) {
  if (event == nullptr) return Answer(EINVAL);
  auto* shim = static_cast<ShimCmEvent*>(event);
  // The id may be gone once it is acknowledged.
  const std::shared_ptr<emu::CmChannel> channel = shim->source.id->channel();
  const emu::CmEvent source = std::move(shim->source);
  delete shim;
  channel->Acknowledge(source);
  return 0;
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
  ibv_context* context = ApiOf(emu::World::Current().current_host()).CmContext();
  if (context == nullptr) return nullptr;
  auto** list = new (std::nothrow) ibv_context*[2];
  if (list == nullptr) return FailWith(ENOMEM);
  list[0] = context;
  list[1] = nullptr;
  if (num_devices != nullptr) *num_devices = 1;
  return list;
}

void rdma_free_devices(struct ibv_context** list) {
  delete[] list;
}

// Hints without effect here are taken when they are well formed: streams always reuse addresses, and the host's stack
// chooses its own service class and timeouts.
int rdma_set_option(struct rdma_cm_id* id, int level, int optname, void* optval, size_t optlen) {
  if (level != RDMA_OPTION_ID) return Answer(EOPNOTSUPP);
  switch (optname) {
    case RDMA_OPTION_ID_TOS:
    case RDMA_OPTION_ID_ACK_TIMEOUT:
      return Answer(optval != nullptr && optlen == sizeof(uint8_t) ? 0 : EINVAL);
    case RDMA_OPTION_ID_REUSEADDR:
      return Answer(optval != nullptr && optlen == sizeof(int) ? 0 : EINVAL);
    default:
      return Answer(EOPNOTSUPP);
  }
}

}  // extern "C"
