// rdma_cm: shared receive queues of ids.

#include <rdma/rdma_verbs.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "verbs_shim/emulated/cm_objects.h"

using namespace stagecoach::verbs::emulated;  // NOLINT: the entry points stand in the global namespace

extern "C" {

int rdma_create_srq_ex(struct rdma_cm_id* id, struct ibv_srq_init_attr_ex* attributes) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(id)) return Answer(ENODEV);
    if (id->srq != nullptr) return Answer(EINVAL);
    if ((attributes->comp_mask & IBV_SRQ_INIT_ATTR_PD) == 0) attributes->pd = nullptr;
    if (const int error = ChoosePd(*ToShim(id), &attributes->pd); error != 0) return Answer(error);
    attributes->comp_mask |= IBV_SRQ_INIT_ATTR_PD;
    ibv_srq* srq = ibv_create_srq_ex(id->verbs, attributes);
    if (srq == nullptr) return -1;
    id->srq = srq;
    // The default of the QPs that take from it.
    id->pd = attributes->pd;
    return 0;
  });
}

int rdma_create_srq(struct rdma_cm_id* id, struct ibv_pd* pd, struct ibv_srq_init_attr* attributes) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(id)) return Answer(ENODEV);
    // The extended structure begins with the plain one, whose padding is where its mask is.
    constexpr size_t kShared = offsetof(ibv_srq_init_attr_ex, comp_mask);
    static_assert(kShared == offsetof(ibv_srq_init_attr, attr) + sizeof(attributes->attr));
    ibv_srq_init_attr_ex extended{};
    std::memcpy(&extended, attributes, kShared);
    extended.comp_mask = pd != nullptr ? IBV_SRQ_INIT_ATTR_PD : 0;
    extended.pd = pd;
    const int result = rdma_create_srq_ex(id, &extended);
    if (result == 0) std::memcpy(attributes, &extended, kShared);
    return result;
  });
}

void rdma_destroy_srq(struct rdma_cm_id* id) {
  VoidEntry([&] {
    if (IsInherited(id)) return;
    if (id->srq != nullptr) ibv_destroy_srq(std::exchange(id->srq, nullptr));
  });
}

}  // extern "C"
