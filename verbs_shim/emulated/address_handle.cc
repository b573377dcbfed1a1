// Address handles, and multicast: they address datagrams, and the device has no datagram QPs. All of it answers
// EOPNOTSUPP.

#include <cerrno>

#include "verbs_shim/emulated/objects.h"

using namespace stagecoach::verbs::emulated;  // NOLINT: the entry points stand in the global namespace

extern "C" {

struct ibv_ah* ibv_create_ah(struct ibv_pd*, struct ibv_ah_attr*) {
  return FailWith(EOPNOTSUPP);
}

int ibv_init_ah_from_wc(struct ibv_context*, uint8_t, struct ibv_wc*, struct ibv_grh*, struct ibv_ah_attr*) {
  errno = EOPNOTSUPP;
  return -1;
}

struct ibv_ah* ibv_create_ah_from_wc(struct ibv_pd*, struct ibv_wc*, struct ibv_grh*, uint8_t) {
  return FailWith(EOPNOTSUPP);
}

int ibv_destroy_ah(struct ibv_ah*) {
  return EOPNOTSUPP;
}

int ibv_attach_mcast(struct ibv_qp*, const union ibv_gid*, uint16_t) {
  return EOPNOTSUPP;
}

int ibv_detach_mcast(struct ibv_qp*, const union ibv_gid*, uint16_t) {
  return EOPNOTSUPP;
}

int ibv_resolve_eth_l2_from_gid(struct ibv_context*, struct ibv_ah_attr*, uint8_t[ETHERNET_LL_SIZE], uint16_t*) {
  errno = EOPNOTSUPP;
  return -1;
}

}  // extern "C"
