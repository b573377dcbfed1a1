// Shared receive queues.

#include <cerrno>
#include <memory>
#include <optional>

#include "verbs_shim/emulated/objects.h"

using namespace stagecoach;  // NOLINT: the entry points stand in the global namespace
using namespace stagecoach::verbs::emulated;

extern "C" {

struct ibv_srq* ibv_create_srq(struct ibv_pd* pd, struct ibv_srq_init_attr* attributes) {
  return PointerEntry([&]() -> ibv_srq* {
    if (IsInherited(pd->context)) return FailWith(ENODEV);
    ShimContext* context = ToShim(pd->context);
    auto srq = std::make_unique<ShimSrq>();
    // The limit at creation counts for nothing: it is armed by ibv_modify_srq (ibv_create_srq(3)).
    const emu::SrqAttributes wanted{.max_wr = attributes->attr.max_wr, .max_sge = attributes->attr.max_sge, .limit = 0};
    auto created = context->nic->CreateSrq(*context->context, pd->handle, wanted, srq.get());
    if (!created) return FailWith(created.error());
    srq->context = pd->context;
    srq->srq_context = attributes->srq_context;
    srq->pd = pd;
    srq->handle = (*created)->handle();
    pthread_mutex_init(&srq->mutex, nullptr);
    pthread_cond_init(&srq->cond, nullptr);
    srq->queue = *created;
    const emu::SrqAttributes granted = srq->queue->Query();
    attributes->attr.max_wr = granted.max_wr;
    attributes->attr.max_sge = granted.max_sge;
    return srq.release();
  });
}

int ibv_modify_srq(struct ibv_srq* srq, struct ibv_srq_attr* attributes, int mask) {
  return NumberEntry([&]() -> int {
    if (IsInherited(srq->context)) return ENODEV;
    if ((mask & ~(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT)) != 0) return EINVAL;
    std::optional<uint32_t> max_wr;
    std::optional<uint32_t> limit;
    if ((mask & IBV_SRQ_MAX_WR) != 0) max_wr = attributes->max_wr;
    if ((mask & IBV_SRQ_LIMIT) != 0) limit = attributes->srq_limit;
    if (!Has(srq->context, emu::ObjectKind::kSrq, srq->handle)) return ENOENT;
    return NicOf(srq->context).ModifySrq(srq->handle, max_wr, limit);
  });
}

int ibv_query_srq(struct ibv_srq* srq, struct ibv_srq_attr* attributes) {
  return NumberEntry([&]() -> int {
    if (IsInherited(srq->context)) return ENODEV;
    if (!Has(srq->context, emu::ObjectKind::kSrq, srq->handle)) return ENOENT;
    const emu::SharedReceiveQueue* queue = NicOf(srq->context).FindSrq(srq->handle);
    if (queue == nullptr) return ENOENT;
    const emu::SrqAttributes now = queue->Query();
    *attributes = {.max_wr = now.max_wr, .max_sge = now.max_sge, .srq_limit = now.limit};
    return 0;
  });
}

int ibv_destroy_srq(struct ibv_srq* srq) {
  return NumberEntry([&]() -> int {
    if (IsInherited(srq->context)) return ENODEV;
    if (!Has(srq->context, emu::ObjectKind::kSrq, srq->handle)) return ENOENT;
    if (const int error = NicOf(srq->context).DestroySrq(srq->handle); error != 0) return error;
    pthread_cond_destroy(&srq->cond);
    pthread_mutex_destroy(&srq->mutex);
    delete ToShim(srq);
    return 0;
  });
}

}  // extern "C"
