// Calls about things that only a kernel driver has: objects of another process, DMA buffers, providers to choose from,
// enhanced connection establishment of one vendor's devices. They answer EOPNOTSUPP.

#include <cerrno>
#include <cstring>

#include "verbs_shim/emulated/objects.h"

using namespace stagecoach::verbs::emulated;  // NOLINT: the entry points stand in the global namespace

extern "C" {

struct ibv_context* ibv_import_device(int) {
  return FailWith(EOPNOTSUPP);
}

struct ibv_pd* ibv_import_pd(struct ibv_context*, uint32_t) {
  return FailWith(EOPNOTSUPP);
}

struct ibv_mr* ibv_import_mr(struct ibv_pd*, uint32_t) {
  return FailWith(EOPNOTSUPP);
}

struct ibv_dm* ibv_import_dm(struct ibv_context*, uint32_t) {
  return FailWith(EOPNOTSUPP);
}

// Nothing has been imported.
void ibv_unimport_pd(struct ibv_pd*) {}
void ibv_unimport_mr(struct ibv_mr*) {}
void ibv_unimport_dm(struct ibv_dm*) {}

struct ibv_mr* ibv_reg_dmabuf_mr(struct ibv_pd*, uint64_t, size_t, uint64_t, int, int) {
  return FailWith(EOPNOTSUPP);
}

int ibv_set_ece(struct ibv_qp*, struct ibv_ece*) {
  return Number(EOPNOTSUPP);
}

int ibv_query_ece(struct ibv_qp*, struct ibv_ece* ece) {
  *ece = {};
  return Number(EOPNOTSUPP);
}

// Called when a program was built with RDMA_STATIC_PROVIDERS: it names providers, of which there are none here.
void ibv_static_providers(void*, ...) {}

}  // extern "C"
