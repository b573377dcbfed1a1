// Address handles: the way to a port, for datagrams. iWARP devices have no datagrams and answer EOPNOTSUPP.
//
// Multicast is not offered by any device, nor are Ethernet addresses of peers, which no program needs here: EOPNOTSUPP.

#include <cerrno>
#include <cstring>
#include <memory>

#include "verbs_shim/emulated/objects.h"

using namespace stagecoach;  // NOLINT: the entry points stand in the global namespace
using namespace stagecoach::verbs::emulated;

namespace {

constexpr uint8_t kPort = 1;

}  // namespace

extern "C" {

struct ibv_ah* ibv_create_ah(struct ibv_pd* pd, struct ibv_ah_attr* attributes) {
  return PointerEntry([&]() -> ibv_ah* {
    if (IsInherited(pd->context)) return FailWith(ENODEV);
    ShimContext* context = ToShim(pd->context);
    auto ah = std::make_unique<ShimAh>();
    const auto created = context->nic->CreateAh(*context->context, pd->handle, FromIbv(*attributes));
    if (!created) return FailWith(created.error());
    ah->context = pd->context;
    ah->pd = pd;
    ah->handle = (*created)->handle;
    ah->address = *created;
    return ah.release();
  });
}

int ibv_init_ah_from_wc(struct ibv_context* context, uint8_t port, struct ibv_wc* completion, struct ibv_grh* grh,
                        struct ibv_ah_attr* attributes) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(context)) return Answer(ENODEV);
    if (!NicOf(context).is_infiniband()) return Answer(EOPNOTSUPP);
    if (port != kPort) return Answer(EINVAL);
    emu::AddressVector vector;
    if ((completion->wc_flags & IBV_WC_GRH) != 0) {
      const auto found = NicOf(context).VectorOf({reinterpret_cast<const std::byte*>(grh), sizeof(*grh)});
      if (!found) return Answer(found.error());
      vector = *found;
    }
    vector.dlid = completion->slid;
    vector.service_level = completion->sl;
    vector.source_path_bits = completion->dlid_path_bits;
    *attributes = ShownAs(vector);
    return 0;
  });
}

struct ibv_ah* ibv_create_ah_from_wc(struct ibv_pd* pd, struct ibv_wc* completion, struct ibv_grh* grh, uint8_t port) {
  return PointerEntry([&]() -> ibv_ah* {
    ibv_ah_attr attributes;
    if (ibv_init_ah_from_wc(pd->context, port, completion, grh, &attributes) != 0) return nullptr;
    return ibv_create_ah(pd, &attributes);
  });
}

int ibv_destroy_ah(struct ibv_ah* ah) {
  return NumberEntry([&]() -> int {
    if (IsInherited(ah->context)) return ENODEV;
    if (!Has(ah->context, emu::ObjectKind::kAh, ah->handle)) return ENOENT;
    if (const int error = NicOf(ah->context).DestroyAh(ah->handle); error != 0) return error;
    delete static_cast<ShimAh*>(ah);
    return 0;
  });
}

int ibv_attach_mcast(struct ibv_qp*, const union ibv_gid*, uint16_t) {
  return Number(EOPNOTSUPP);
}

int ibv_detach_mcast(struct ibv_qp*, const union ibv_gid*, uint16_t) {
  return Number(EOPNOTSUPP);
}

int ibv_resolve_eth_l2_from_gid(struct ibv_context*, struct ibv_ah_attr*, uint8_t[ETHERNET_LL_SIZE], uint16_t*) {
  return Answer(EOPNOTSUPP);
}

}  // extern "C"
