// Queue pairs: creation, attributes, states.

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>

#include "verbs_shim/emulated/explain.h"
#include "verbs_shim/emulated/objects.h"

namespace stagecoach::verbs::emulated {
namespace {

emu::QpState FromIbv(ibv_qp_state state) {
  return static_cast<emu::QpState>(state);
}

static_assert(static_cast<int>(emu::QpState::kReset) == IBV_QPS_RESET &&
              static_cast<int>(emu::QpState::kInit) == IBV_QPS_INIT &&
              static_cast<int>(emu::QpState::kRtr) == IBV_QPS_RTR &&
              static_cast<int>(emu::QpState::kRts) == IBV_QPS_RTS &&
              static_cast<int>(emu::QpState::kSqd) == IBV_QPS_SQD &&
              static_cast<int>(emu::QpState::kSqe) == IBV_QPS_SQE &&
              static_cast<int>(emu::QpState::kErr) == IBV_QPS_ERR);

ibv_qp_cap CapacityOf(const emu::QpCapabilities& capabilities) {
  return {.max_send_wr = capabilities.max_send_wr,
          .max_recv_wr = capabilities.max_receive_wr,
          .max_send_sge = capabilities.max_send_sge,
          .max_recv_sge = capabilities.max_receive_sge,
          .max_inline_data = capabilities.max_inline};
}

std::optional<emu::QpType> FromIbv(ibv_qp_type type) {
  switch (type) {
    case IBV_QPT_RC:
      return emu::QpType::kRc;
    case IBV_QPT_UC:
      return emu::QpType::kUc;
    case IBV_QPT_UD:
      return emu::QpType::kUd;
    default:
      return std::nullopt;
  }
}

// Attributes of the plain and the extended call begin alike.
template <typename Attributes>
ibv_qp* MakeQp(ibv_pd* pd, Attributes* attributes, std::optional<uint64_t> operations) {
  const std::optional<emu::QpType> type = FromIbv(attributes->qp_type);
  if (!type) return FailWith(EOPNOTSUPP);
  if (attributes->send_cq == nullptr || attributes->recv_cq == nullptr) return FailWith(EINVAL);
  ShimContext* context = ToShim(pd->context);
  auto qp = std::make_unique<ShimQp>();
  if (operations && !OfferWork(qp.get(), *operations, context->nic->profile(), attributes->qp_type)) {
    return FailWith(EOPNOTSUPP);
  }
  emu::QpCreate create;
  create.type = *type;
  create.pd = pd->handle;
  // Another device may have the same handles.
  for (const ibv_context* of : {attributes->send_cq->context, attributes->recv_cq->context}) {
    if (of != pd->context) return FailWith(EINVAL);
  }
  if (attributes->srq != nullptr && attributes->srq->context != pd->context) return FailWith(EINVAL);
  create.send_cq = context->nic->FindCq(attributes->send_cq->handle);
  create.receive_cq = context->nic->FindCq(attributes->recv_cq->handle);
  if (create.send_cq == nullptr || create.receive_cq == nullptr) return FailWith(ENOENT);
  if (attributes->srq != nullptr) {
    create.srq = context->nic->FindSrq(attributes->srq->handle);
    if (create.srq == nullptr) return FailWith(ENOENT);
  }
  create.capabilities = {.max_send_wr = attributes->cap.max_send_wr,
                         .max_receive_wr = attributes->cap.max_recv_wr,
                         .max_send_sge = attributes->cap.max_send_sge,
                         .max_receive_sge = attributes->cap.max_recv_sge,
                         .max_inline = attributes->cap.max_inline_data};
  create.signal_all = attributes->sq_sig_all != 0;
  create.cookie = qp.get();
  auto created = context->nic->CreateQp(*context->context, create);
  if (!created) return FailWith(created.error());
  ibv_qp* shown = PublicOf(qp.get());
  shown->context = pd->context;
  shown->qp_context = attributes->qp_context;
  shown->pd = pd;
  shown->send_cq = attributes->send_cq;
  shown->recv_cq = attributes->recv_cq;
  shown->srq = attributes->srq;
  shown->handle = (*created)->handle();
  shown->qp_num = (*created)->qp_number();
  shown->state = ToIbv((*created)->state());
  shown->qp_type = attributes->qp_type;
  pthread_mutex_init(&shown->mutex, nullptr);
  pthread_cond_init(&shown->cond, nullptr);
  qp->pair = *created;
  attributes->cap = CapacityOf((*created)->capabilities());
  return PublicOf(qp.release());
}

// The QP that the handle names; null: none of this context.
emu::QueuePair* PairOf(ibv_qp* qp) {
  return Has(qp->context, emu::ObjectKind::kQp, qp->handle) ? NicOf(qp->context).FindQp(qp->handle) : nullptr;
}

}  // namespace

ibv_qp* CreateExtendedQp(ibv_context* context, ibv_qp_init_attr_ex* attributes) {
  return PointerEntry([&]() -> ibv_qp* {
    if (IsInherited(context)) return FailWith(ENODEV);
    constexpr uint32_t kKnown = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    const uint32_t mask = attributes->comp_mask;
    if ((mask & ~kKnown) != 0) return FailWith(EOPNOTSUPP);
    if ((mask & IBV_QP_INIT_ATTR_CREATE_FLAGS) != 0 && attributes->create_flags != 0) return FailWith(EOPNOTSUPP);
    if ((mask & IBV_QP_INIT_ATTR_PD) == 0 || attributes->pd == nullptr || attributes->pd->context != context) {
      return FailWith(EINVAL);
    }
    std::optional<uint64_t> operations;
    if ((mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) != 0) operations = attributes->send_ops_flags;
    return MakeQp(attributes->pd, attributes, operations);
  });
}

}  // namespace stagecoach::verbs::emulated

using namespace stagecoach;  // NOLINT: the entry points stand in the global namespace
using namespace stagecoach::verbs::emulated;

extern "C" {

struct ibv_qp* ibv_create_qp(struct ibv_pd* pd, struct ibv_qp_init_attr* attributes) {
  return PointerEntry([&]() -> ibv_qp* {
    if (IsInherited(pd->context)) return FailWith(ENODEV);
    return MakeQp(pd, attributes, std::nullopt);
  });
}

// Only a QP made with send_ops_flags can be posted to that way.
struct ibv_qp_ex* ibv_qp_to_qp_ex(struct ibv_qp* qp) {
  return ToShim(qp)->builder != nullptr ? ToShim(qp) : nullptr;
}

int ibv_modify_qp(struct ibv_qp* qp, struct ibv_qp_attr* attributes, int mask) {
  return NumberEntry([&]() -> int {
    if (IsInherited(qp->context)) return ENODEV;
    emu::QueuePair* const pair = PairOf(qp);
    if (pair == nullptr) return ENOENT;
    emu::QpAttributes wanted;
    wanted.state = FromIbv(attributes->qp_state);
    wanted.current_state = FromIbv(attributes->cur_qp_state);
    wanted.notify_drained = attributes->en_sqd_async_notify != 0;
    wanted.access = attributes->qp_access_flags;
    wanted.pkey_index = attributes->pkey_index;
    wanted.qkey = attributes->qkey;
    wanted.port = attributes->port_num;
    wanted.path_mtu = static_cast<uint8_t>(attributes->path_mtu);
    wanted.path = FromIbv(attributes->ah_attr);
    wanted.destination_qp_number = attributes->dest_qp_num;
    wanted.receive_psn = attributes->rq_psn;
    wanted.send_psn = attributes->sq_psn;
    wanted.max_rd_atomic = attributes->max_rd_atomic;
    wanted.max_dest_rd_atomic = attributes->max_dest_rd_atomic;
    wanted.min_rnr_timer = attributes->min_rnr_timer;
    wanted.timeout = attributes->timeout;
    wanted.retry_count = attributes->retry_cnt;
    wanted.rnr_retry = attributes->rnr_retry;
    const int error = pair->Modify(wanted, static_cast<uint32_t>(mask));
    const bool connects = (mask & IBV_QP_STATE) != 0 && attributes->qp_state == IBV_QPS_RTR;
    if (error == EINVAL && connects && !NicOf(qp->context).is_infiniband()) Explain(Lack::kConnectionsByHand);
    qp->state = ToIbv(pair->state());
    return error;
  });
}

int ibv_query_qp(struct ibv_qp* qp, struct ibv_qp_attr* attributes, int mask, struct ibv_qp_init_attr* initial) {
  return NumberEntry([&]() -> int {
    if (IsInherited(qp->context)) return ENODEV;
    // As libibverbs answers for attributes that the kernel's query does not carry.
    if ((mask & ~(IBV_QP_RATE_LIMIT - 1)) != 0) return EOPNOTSUPP;
    emu::QueuePair* const pair = PairOf(qp);
    if (pair == nullptr) return ENOENT;
    const emu::QpAttributes now = pair->Query();
    // The structure has grown since: what programs that do not know rate_limit have there is theirs.
    std::memset(static_cast<void*>(attributes), 0, offsetof(ibv_qp_attr, rate_limit));
    attributes->qp_state = ToIbv(now.state);
    attributes->cur_qp_state = attributes->qp_state;
    attributes->en_sqd_async_notify = now.notify_drained ? 1 : 0;
    attributes->path_mtu = static_cast<ibv_mtu>(now.path_mtu);
    attributes->qp_access_flags = now.access;
    attributes->pkey_index = now.pkey_index;
    attributes->qkey = now.qkey;
    attributes->port_num = now.port;
    attributes->dest_qp_num = now.destination_qp_number;
    attributes->rq_psn = now.receive_psn;
    attributes->sq_psn = now.send_psn;
    attributes->max_rd_atomic = now.max_rd_atomic;
    attributes->max_dest_rd_atomic = now.max_dest_rd_atomic;
    attributes->min_rnr_timer = now.min_rnr_timer;
    attributes->timeout = now.timeout;
    attributes->retry_cnt = now.retry_count;
    attributes->rnr_retry = now.rnr_retry;
    attributes->sq_draining = pair->IsDraining() ? 1 : 0;
    attributes->ah_attr = ShownAs(now.path);
    attributes->cap = CapacityOf(pair->capabilities());
    *initial = {};
    initial->qp_context = qp->qp_context;
    initial->send_cq = qp->send_cq;
    initial->recv_cq = qp->recv_cq;
    initial->srq = qp->srq;
    initial->qp_type = qp->qp_type;
    initial->cap = attributes->cap;
    initial->sq_sig_all = pair->signal_all() ? 1 : 0;
    qp->state = attributes->qp_state;
    return 0;
  });
}

int ibv_destroy_qp(struct ibv_qp* qp) {
  return NumberEntry([&]() -> int {
    if (IsInherited(qp->context)) return ENODEV;
    ShimContext* context = ToShim(qp->context);
    if (PairOf(qp) == nullptr) return ENOENT;
    context->api->host.cm().ForgetQp(qp->qp_num);
    if (const int error = context->nic->DestroyQp(qp->handle); error != 0) return error;
    pthread_cond_destroy(&qp->cond);
    pthread_mutex_destroy(&qp->mutex);
    delete ToShim(qp);
    return 0;
  });
}

}  // extern "C"
