// IBVERBS_PRIVATE_34: what the stock library offers the providers of devices, and no program. Programs that are linked
// with a provider (perftest with libmlx5 and libefa) do not start unless all of it is there. Providers register when
// they are loaded, to be asked for their devices; nobody asks, so the rest is never called, and says EOPNOTSUPP if it
// is after all.
//
// The header with their types is the stock library's own. Those below have the types as far as anything is done with
// them; a function that takes nothing may be called with arguments, on all that Debian runs on.

#include <cerrno>
#include <cstdarg>
#include <cstdint>

#include "verbs_shim/emulated/objects.h"

using stagecoach::verbs::emulated::FailWith;

extern "C" {

// Of ibv_devinfo: what the file of the GID's type in sysfs says (enum ibv_gid_type_sysfs).
int ibv_query_gid_type(struct ibv_context* context, uint8_t port, unsigned index, int* type) {
  constexpr int kOther = 0;  // "IB/RoCE v1"
  constexpr int kRoceV2 = 1;
  ibv_gid_entry entry{};
  if (_ibv_query_gid_ex(context, port, index, &entry, 0, sizeof(entry)) != 0) return -1;
  *type = entry.gid_type == IBV_GID_TYPE_ROCE_V2 ? kRoceV2 : kOther;
  return 0;
}

int ibv_read_ibdev_sysfs_file(char*, size_t, void*, const char*, ...) {
  errno = ENOENT;
  return -1;
}

// Whether objects may be destroyed when their device is gone, for providers.
bool verbs_allow_disassociate_destroy = false;

void verbs_register_driver_34(const void*) {}
void __verbs_log(void*, uint32_t, const char*, ...) {}  // NOLINT: its name
void verbs_set_ops(void*, const void*) {}
void verbs_uninit_context(void*) {}
unsigned int __ioctl_final_num_attrs(unsigned int attributes, void*) {  // NOLINT: its name
  return attributes;
}
void* verbs_open_device(void*, void*) {
  return FailWith(EOPNOTSUPP);
}
void* _verbs_init_and_alloc_context(void*, int, size_t, void*, uint32_t) {  // NOLINT: its name
  return FailWith(EOPNOTSUPP);
}

#define PROVIDERS_CALL(name) \
  int name() {               \
    return EOPNOTSUPP;       \
  }

PROVIDERS_CALL(execute_ioctl)
PROVIDERS_CALL(ibv_cmd_advise_mr)
PROVIDERS_CALL(ibv_cmd_alloc_dm)
PROVIDERS_CALL(ibv_cmd_alloc_mw)
PROVIDERS_CALL(ibv_cmd_alloc_pd)
PROVIDERS_CALL(ibv_cmd_attach_mcast)
PROVIDERS_CALL(ibv_cmd_close_xrcd)
PROVIDERS_CALL(ibv_cmd_create_ah)
PROVIDERS_CALL(ibv_cmd_create_counters)
PROVIDERS_CALL(ibv_cmd_create_cq)
PROVIDERS_CALL(ibv_cmd_create_cq_ex)
PROVIDERS_CALL(ibv_cmd_create_cq_ex2)  // of rdma-core 56, Debian 13's
PROVIDERS_CALL(ibv_cmd_create_flow)
PROVIDERS_CALL(ibv_cmd_create_flow_action_esp)
PROVIDERS_CALL(ibv_cmd_create_qp)
PROVIDERS_CALL(ibv_cmd_create_qp_ex)
PROVIDERS_CALL(ibv_cmd_create_qp_ex2)
PROVIDERS_CALL(ibv_cmd_create_rwq_ind_table)
PROVIDERS_CALL(ibv_cmd_create_srq)
PROVIDERS_CALL(ibv_cmd_create_srq_ex)
PROVIDERS_CALL(ibv_cmd_create_wq)
PROVIDERS_CALL(ibv_cmd_dealloc_mw)
PROVIDERS_CALL(ibv_cmd_dealloc_pd)
PROVIDERS_CALL(ibv_cmd_dereg_mr)
PROVIDERS_CALL(ibv_cmd_destroy_ah)
PROVIDERS_CALL(ibv_cmd_destroy_counters)
PROVIDERS_CALL(ibv_cmd_destroy_cq)
PROVIDERS_CALL(ibv_cmd_destroy_flow)
PROVIDERS_CALL(ibv_cmd_destroy_flow_action)
PROVIDERS_CALL(ibv_cmd_destroy_qp)
PROVIDERS_CALL(ibv_cmd_destroy_rwq_ind_table)
PROVIDERS_CALL(ibv_cmd_destroy_srq)
PROVIDERS_CALL(ibv_cmd_destroy_wq)
PROVIDERS_CALL(ibv_cmd_detach_mcast)
PROVIDERS_CALL(ibv_cmd_free_dm)
PROVIDERS_CALL(ibv_cmd_get_context)
PROVIDERS_CALL(ibv_cmd_modify_cq)
PROVIDERS_CALL(ibv_cmd_modify_flow_action_esp)
PROVIDERS_CALL(ibv_cmd_modify_qp)
PROVIDERS_CALL(ibv_cmd_modify_qp_ex)
PROVIDERS_CALL(ibv_cmd_modify_srq)
PROVIDERS_CALL(ibv_cmd_modify_wq)
PROVIDERS_CALL(ibv_cmd_open_qp)
PROVIDERS_CALL(ibv_cmd_open_xrcd)
PROVIDERS_CALL(ibv_cmd_poll_cq)
PROVIDERS_CALL(ibv_cmd_post_recv)
PROVIDERS_CALL(ibv_cmd_post_send)
PROVIDERS_CALL(ibv_cmd_post_srq_recv)
PROVIDERS_CALL(ibv_cmd_query_context)
PROVIDERS_CALL(ibv_cmd_query_device_any)
PROVIDERS_CALL(ibv_cmd_query_mr)
PROVIDERS_CALL(ibv_cmd_query_port)
PROVIDERS_CALL(ibv_cmd_query_qp)
PROVIDERS_CALL(ibv_cmd_query_srq)
PROVIDERS_CALL(ibv_cmd_read_counters)
PROVIDERS_CALL(ibv_cmd_reg_dm_mr)
PROVIDERS_CALL(ibv_cmd_reg_dmabuf_mr)
PROVIDERS_CALL(ibv_cmd_reg_mr)
PROVIDERS_CALL(ibv_cmd_req_notify_cq)
PROVIDERS_CALL(ibv_cmd_rereg_mr)
PROVIDERS_CALL(ibv_cmd_resize_cq)
PROVIDERS_CALL(verbs_init_cq)

#undef PROVIDERS_CALL

}  // extern "C"
