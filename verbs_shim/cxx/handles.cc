#include "verbs_shim/cxx/handles.h"

#include <cerrno>
#include <cstring>

namespace stagecoach::verbs {
namespace {

template <typename HandleType, typename T>
VerbsResult<HandleType> Own(T* object, const char* call) {
  if (object == nullptr) return Err(VerbsError{errno, call});
  return HandleType(object);
}

// rdma_* calls return -1 and set errno.
int CmStatus(int result) {
  return result == 0 ? 0 : errno;
}

}  // namespace

std::string VerbsError::ToString() const {
  return std::string(call) + ": " + std::strerror(error);
}

namespace internal {

int ContextTraits::Destroy(ibv_context* object) {
  return ibv_close_device(object);
}
int ProtectionDomainTraits::Destroy(ibv_pd* object) {
  return ibv_dealloc_pd(object);
}
int MemoryRegionTraits::Destroy(ibv_mr* object) {
  return ibv_dereg_mr(object);
}
int MemoryWindowTraits::Destroy(ibv_mw* object) {
  return ibv_dealloc_mw(object);
}
int CompletionChannelTraits::Destroy(ibv_comp_channel* object) {
  return ibv_destroy_comp_channel(object);
}
int CompletionQueueTraits::Destroy(ibv_cq* object) {
  return ibv_destroy_cq(object);
}
int QueuePairTraits::Destroy(ibv_qp* object) {
  return ibv_destroy_qp(object);
}

int EventChannelTraits::Destroy(rdma_event_channel* object) {
  rdma_destroy_event_channel(object);
  return 0;
}

int CmIdTraits::Destroy(rdma_cm_id* object) {
  if (object->qp != nullptr) rdma_destroy_qp(object);
  return CmStatus(rdma_destroy_id(object));
}

int CmEventTraits::Destroy(rdma_cm_event* object) {
  return CmStatus(rdma_ack_cm_event(object));
}

}  // namespace internal

VerbsResult<Context> OpenDevice(std::string_view name) {
  int count = 0;
  ibv_device** devices = ibv_get_device_list(&count);
  if (devices == nullptr) return Err(VerbsError{errno, "ibv_get_device_list"});
  VerbsResult<Context> context = Err(VerbsError{ENODEV, "ibv_get_device_list"});
  for (int i = 0; i < count; ++i) {
    if (!name.empty() && name != ibv_get_device_name(devices[i])) continue;
    context = Own<Context>(ibv_open_device(devices[i]), "ibv_open_device");
    break;
  }
  ibv_free_device_list(devices);
  return context;
}

VerbsResult<ProtectionDomain> AllocatePd(ibv_context* context) {
  return Own<ProtectionDomain>(ibv_alloc_pd(context), "ibv_alloc_pd");
}

VerbsResult<MemoryRegion> RegisterMemory(ibv_pd* pd, void* address, size_t length, int access) {
  return Own<MemoryRegion>(ibv_reg_mr(pd, address, length, access), "ibv_reg_mr");
}

VerbsResult<MemoryWindow> AllocateMw(ibv_pd* pd, ibv_mw_type type) {
  return Own<MemoryWindow>(ibv_alloc_mw(pd, type), "ibv_alloc_mw");
}

VerbsResult<CompletionChannel> CreateCompletionChannel(ibv_context* context) {
  return Own<CompletionChannel>(ibv_create_comp_channel(context), "ibv_create_comp_channel");
}

VerbsResult<CompletionQueue> CreateCq(ibv_context* context, int entries, void* cq_context, ibv_comp_channel* channel,
                                      int vector) {
  return Own<CompletionQueue>(ibv_create_cq(context, entries, cq_context, channel, vector), "ibv_create_cq");
}

VerbsResult<QueuePair> CreateQp(ibv_pd* pd, ibv_qp_init_attr* attributes) {
  return Own<QueuePair>(ibv_create_qp(pd, attributes), "ibv_create_qp");
}

VerbsResult<ibv_qp*> CreateCmQp(rdma_cm_id* id, ibv_pd* pd, ibv_qp_init_attr* attributes) {
  if (rdma_create_qp(id, pd, attributes) != 0) return Err(VerbsError{errno, "rdma_create_qp"});
  return id->qp;
}

VerbsResult<EventChannel> CreateEventChannel() {
  return Own<EventChannel>(rdma_create_event_channel(), "rdma_create_event_channel");
}

VerbsResult<CmId> CreateCmId(rdma_event_channel* channel, void* id_context, rdma_port_space port_space) {
  rdma_cm_id* id = nullptr;
  if (rdma_create_id(channel, &id, id_context, port_space) != 0) return Err(VerbsError{errno, "rdma_create_id"});
  return CmId(id);
}

VerbsResult<CmEvent> GetCmEvent(rdma_event_channel* channel) {
  rdma_cm_event* event = nullptr;
  if (rdma_get_cm_event(channel, &event) != 0) return Err(VerbsError{errno, "rdma_get_cm_event"});
  return CmEvent(event);
}

}  // namespace stagecoach::verbs
