// rdma_cm: options of ids, attributes of QPs that rdma_cm does not manage, and what this device has no use for.

#include <infiniband/sa.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "verbs_shim/emulated/cm_objects.h"
#include "verbs_shim/emulated/explain.h"

namespace stagecoach::verbs::emulated {
namespace {

template <typename T>
std::optional<T> ValueOf(const void* value, size_t length) {
  if (value == nullptr || length != sizeof(T)) return std::nullopt;
  T result;
  std::memcpy(&result, value, sizeof(result));
  return result;
}

int SetIdOption(ShimId* id, int name, const void* value, size_t length) {
  switch (name) {
    case RDMA_OPTION_ID_TOS: {
      const auto service_class = ValueOf<uint8_t>(value, length);
      return service_class ? CmOf(*id).SetServiceClass(id->cm, *service_class) : EINVAL;
    }
    case RDMA_OPTION_ID_REUSEADDR: {
      const auto reuse = ValueOf<int>(value, length);
      return reuse ? CmOf(*id).SetReuseAddress(id->cm, *reuse != 0) : EINVAL;
    }
    case RDMA_OPTION_ID_AFONLY: {
      const auto only = ValueOf<int>(value, length);
      return only ? CmOf(*id).SetOwnFamilyOnly(id->cm, *only != 0) : EINVAL;
    }
    // Without effect on iWARP, where TCP measures its own.
    case RDMA_OPTION_ID_ACK_TIMEOUT: {
      const auto timeout = ValueOf<uint8_t>(value, length);
      return timeout ? CmOf(*id).SetAckTimeout(id->cm, *timeout) : EINVAL;
    }
    default:
      return EOPNOTSUPP;
  }
}

// A path for an id that has its addresses is a resolved route. What the path says is a subnet's business: here the host
// routes, on InfiniBand devices as well.
int SetPath(ShimId* id, const void* value, size_t length) {
  constexpr uint32_t kUsable = IBV_PATH_FLAG_GMP | IBV_PATH_FLAG_PRIMARY | IBV_PATH_FLAG_BIDIRECTIONAL;
  if (value == nullptr || length % sizeof(ibv_path_data) != 0) return EINVAL;
  const auto* bytes = static_cast<const char*>(value);
  for (size_t offset = 0; offset < length; offset += sizeof(ibv_path_data)) {
    ibv_path_data path;
    std::memcpy(&path, bytes + offset, sizeof(path));
    if (path.flags == kUsable) return CmOf(*id).ResolveRoute(id->cm);
  }
  return EINVAL;
}

}  // namespace
}  // namespace stagecoach::verbs::emulated

using namespace stagecoach;  // NOLINT: the entry points stand in the global namespace
using namespace stagecoach::verbs::emulated;

extern "C" {

int rdma_set_option(struct rdma_cm_id* id, int level, int optname, void* optval, size_t optlen) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(id)) return Answer(ENODEV);
    ShimId* shim = ToShim(id);
    if (level == RDMA_OPTION_ID) return Answer(SetIdOption(shim, optname, optval, optlen));
    if (level != RDMA_OPTION_IB || optname != RDMA_OPTION_IB_PATH) return Answer(EOPNOTSUPP);
    if (const int error = SetPath(shim, optval, optlen); error != 0) return Answer(error);
    return Complete(shim);
  });
}

// On InfiniBand: all that a program needs to take a QP that it keeps to itself to INIT, and, when the peer has said its
// part, to RTR and RTS. On iWARP connecting takes the QP to RTS: those two need nothing of the program, so that the
// mask has no state.
int rdma_init_qp_attr(struct rdma_cm_id* id, struct ibv_qp_attr* attributes, int* mask) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(id)) return Answer(ENODEV);
    if (attributes == nullptr || mask == nullptr || id->verbs == nullptr) return Answer(EINVAL);
    const ShimId* shim = ToShim(id);
    const auto change = CmOf(*shim).ChangeTo(*shim->cm, static_cast<emu::QpState>(attributes->qp_state));
    if (!change) return Answer(change.error());
    const emu::QpAttributes& to = change->attributes;
    attributes->port_num = id->port_num;
    attributes->pkey_index = to.pkey_index;
    attributes->qp_access_flags = to.access;
    attributes->path_mtu = static_cast<ibv_mtu>(to.path_mtu);
    attributes->ah_attr = ShownAs(to.path);
    attributes->dest_qp_num = to.destination_qp_number;
    attributes->qkey = to.qkey;
    attributes->rq_psn = to.receive_psn;
    attributes->sq_psn = to.send_psn;
    attributes->max_rd_atomic = to.max_rd_atomic;
    attributes->max_dest_rd_atomic = to.max_dest_rd_atomic;
    attributes->min_rnr_timer = to.min_rnr_timer;
    attributes->timeout = to.timeout;
    attributes->retry_cnt = to.retry_count;
    attributes->rnr_retry = to.rnr_retry;
    *mask = static_cast<int>(change->mask);
    return 0;
  });
}

// Answers RDMA_CM_EVENT_CONNECT_RESPONSE, of a QP that the program keeps to itself. iWARP does not have that: its
// initiators are connected with the reply.
int rdma_establish(struct rdma_cm_id* id) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(id)) return Answer(ENODEV);
    ShimId* shim = ToShim(id);
    return Answer(id->qp == nullptr ? CmOf(*shim).Establish(shim->cm) : EINVAL);
  });
}

// Tells InfiniBand's connection manager of what it did not see; iWARP's sees all.
int rdma_notify(struct rdma_cm_id* id, enum ibv_event_type event) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(id)) return Answer(ENODEV);
    ShimId* shim = ToShim(id);
    if (id->verbs == nullptr) return Answer(EINVAL);
    return Answer(CmOf(*shim).Notify(shim->cm, event == IBV_EVENT_COMM_EST));
  });
}

// Enhanced connection establishment has no place in an MPA frame, and is left out of InfiniBand's messages: what is set
// goes nowhere, and no peer has any.
int rdma_set_local_ece(struct rdma_cm_id* id, struct ibv_ece* ece) {
  if (IsInherited(id)) return Answer(ENODEV);
  return Answer(id->qp == nullptr && ece != nullptr ? 0 : EINVAL);
}

int rdma_get_remote_ece(struct rdma_cm_id* id, struct ibv_ece* ece) {
  if (IsInherited(id)) return Answer(ENODEV);
  if (id->qp != nullptr || ece == nullptr) return Answer(EINVAL);
  *ece = {};
  return 0;
}

int rdma_reject_ece(struct rdma_cm_id* id, const void* private_data, uint8_t private_data_len) {
  if (IsInherited(id)) return Answer(ENODEV);
  return rdma_reject(id, private_data, private_data_len);
}

// iWARP has no datagrams, and those of InfiniBand go to one port here.
int rdma_join_multicast(struct rdma_cm_id* id, struct sockaddr*, void*) {
  if (IsInherited(id)) return Answer(ENODEV);
  Explain(Lack::kMulticast);
  return Answer(EOPNOTSUPP);
}

int rdma_join_multicast_ex(struct rdma_cm_id* id, struct rdma_cm_join_mc_attr_ex*, void*) {
  return rdma_join_multicast(id, nullptr, nullptr);
}

int rdma_leave_multicast(struct rdma_cm_id* id, struct sockaddr*) {
  return Answer(IsInherited(id) ? ENODEV : EOPNOTSUPP);
}

}  // extern "C"
