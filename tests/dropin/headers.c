/* A program compiled against another version of the header than the libraries know: NEWER (operations and fields that
 * are not there yet), OLDER (without some), or the installed one. It asks for everything whose layout has changed or
 * may, with memory around it that nobody may touch. Exit code 1: something was not as it should be. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NEED(condition)                                                    \
  do {                                                                     \
    if (!(condition)) {                                                    \
      fprintf(stderr, "%d: " #condition " (errno %d)\n", __LINE__, errno); \
      exit(1);                                                             \
    }                                                                      \
  } while (0)

enum { GUARD = 64, UNTOUCHED = 0xa5 };

/* What a call fills, between guards. */
#define GUARDED(type)      \
  struct {                 \
    uint8_t before[GUARD]; \
    type value;            \
    uint8_t after[GUARD];  \
  }

static int holds_only(const void* memory, size_t size, uint8_t byte) {
  const uint8_t* bytes = memory;
  for (size_t i = 0; i < size; i++) {
    if (bytes[i] != byte) return 0;
  }
  return 1;
}

#define NEED_GUARDS(guarded)                                               \
  do {                                                                     \
    NEED(holds_only((guarded).before, sizeof(guarded).before, UNTOUCHED)); \
    NEED(holds_only((guarded).after, sizeof(guarded).after, UNTOUCHED));   \
  } while (0)

static void query_port(struct ibv_context* context) {
  GUARDED(struct ibv_port_attr) port;
  memset(&port, UNTOUCHED, sizeof port);
  NEED(ibv_query_port(context, 1, &port.value) == 0);
  NEED(port.value.state == IBV_PORT_ACTIVE && port.value.gid_tbl_len > 0 && port.value.phys_state == 5);
  NEED(port.value.link_layer == IBV_LINK_LAYER_ETHERNET);
  NEED_GUARDS(port);
#ifdef NEWER
  NEED(port.value.newer_speed == 0 && holds_only(port.value.newer, sizeof port.value.newer, 0));
#endif
}

static void query_device(struct ibv_context* context) {
  GUARDED(struct ibv_device_attr_ex) device;
  struct ibv_device_attr plain;
  memset(&device, UNTOUCHED, sizeof device);
  NEED(ibv_query_device(context, &plain) == 0);
  NEED(ibv_query_device_ex(context, NULL, &device.value) == 0);
  NEED(memcmp(&device.value.orig_attr, &plain, sizeof plain) == 0);
  NEED(device.value.completion_timestamp_mask != 0 && device.value.odp_caps.general_caps == 0);
  NEED_GUARDS(device);
#ifdef NEWER
  NEED(holds_only(device.value.newer_caps, sizeof device.value.newer_caps, 0));
#endif
#ifndef OLDER
  NEED(device.value.phys_port_cnt_ex == 1);
#endif
}

static void operations(struct ibv_context* context, struct ibv_pd* pd) {
  /* There, and absent. */
  NEED(verbs_get_ctx_op(context, create_cq_ex) != NULL && verbs_get_ctx_op(context, create_qp_ex) != NULL);
  NEED(verbs_get_ctx_op(context, query_device_ex) != NULL && verbs_get_ctx_op(context, query_rt_values) != NULL);
  struct ibv_alloc_dm_attr memory = {.length = 64};
  errno = 0;
  NEED(ibv_alloc_dm(context, &memory) == NULL && errno == EOPNOTSUPP);
  struct ibv_td_init_attr domain = {.comp_mask = 0};
  errno = 0;
  NEED(ibv_alloc_td(context, &domain) == NULL && errno == EOPNOTSUPP);
#ifndef OLDER
  NEED(verbs_get_ctx_op(context, query_port) != NULL);
  NEED(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, NULL, 0) == EOPNOTSUPP);
#endif
#ifdef NEWER
  NEED(verbs_get_ctx_op(context, newest_op) == NULL && verbs_get_ctx_op(context, newer_op_0) == NULL &&
       verbs_get_ctx_op(context, newer_op_8) == NULL);
#endif
  struct ibv_values_ex values = {.comp_mask = IBV_VALUES_MASK_RAW_CLOCK};
#ifdef NEWER
  values.comp_mask |= IBV_VALUES_MASK_NEWER;
#endif
  NEED(ibv_query_rt_values_ex(context, &values) == 0 && values.comp_mask == IBV_VALUES_MASK_RAW_CLOCK);
  NEED(values.raw_clock.tv_sec > 0 || values.raw_clock.tv_nsec > 0);
}

static struct ibv_cq_ex* make_cq(struct ibv_context* context) {
  struct ibv_cq_init_attr_ex attributes;
  memset(&attributes, 0, sizeof attributes);
  attributes.cqe = 16;
  attributes.wc_flags = IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP;
#ifdef NEWER
  attributes.comp_mask = IBV_CQ_INIT_ATTR_MASK_NEWER;
  errno = 0;
  NEED(ibv_create_cq_ex(context, &attributes) == NULL && errno == EOPNOTSUPP);
  attributes.comp_mask = 0;
  attributes.wc_flags |= IBV_WC_EX_WITH_NEWER;
  errno = 0;
  NEED(ibv_create_cq_ex(context, &attributes) == NULL && errno == EOPNOTSUPP);
  attributes.wc_flags &= ~(uint64_t)IBV_WC_EX_WITH_NEWER;
#endif
  struct ibv_cq_ex* cq = ibv_create_cq_ex(context, &attributes);
  NEED(cq != NULL);
  struct ibv_poll_cq_attr poll = {.comp_mask = 0};
  NEED(ibv_start_poll(cq, &poll) == ENOENT);
  return cq;
}

static struct ibv_qp* make_qp(struct ibv_context* context, struct ibv_pd* pd, struct ibv_cq_ex* cq) {
  struct ibv_qp_init_attr_ex attributes;
  memset(&attributes, 0, sizeof attributes);
  attributes.send_cq = attributes.recv_cq = ibv_cq_ex_to_cq(cq);
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap.max_send_wr = attributes.cap.max_recv_wr = 4;
  attributes.cap.max_send_sge = attributes.cap.max_recv_sge = 1;
  attributes.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  attributes.pd = pd;
  attributes.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE;
#ifdef NEWER
  attributes.send_ops_flags |= IBV_QP_EX_WITH_NEWER;
  errno = 0;
  NEED(ibv_create_qp_ex(context, &attributes) == NULL && errno == EOPNOTSUPP);
  attributes.send_ops_flags &= ~(uint64_t)IBV_QP_EX_WITH_NEWER;
  attributes.comp_mask |= IBV_QP_INIT_ATTR_NEWER;
  errno = 0;
  NEED(ibv_create_qp_ex(context, &attributes) == NULL && errno == EOPNOTSUPP);
  attributes.comp_mask &= ~(uint32_t)IBV_QP_INIT_ATTR_NEWER;
#endif
  struct ibv_qp* qp = ibv_create_qp_ex(context, &attributes);
  NEED(qp != NULL && qp->state == IBV_QPS_RESET && ibv_qp_to_qp_ex(qp) != NULL);
  return qp;
}

static void query_qp(struct ibv_qp* qp) {
  GUARDED(struct ibv_qp_attr) attributes;
  GUARDED(struct ibv_qp_init_attr) initial;
  memset(&attributes, UNTOUCHED, sizeof attributes);
  memset(&initial, UNTOUCHED, sizeof initial);
  NEED(ibv_query_qp(qp, &attributes.value, IBV_QP_STATE | IBV_QP_CAP, &initial.value) == 0);
  NEED(attributes.value.qp_state == IBV_QPS_RESET && initial.value.cap.max_send_wr >= 4);
  NEED_GUARDS(attributes);
  NEED_GUARDS(initial);
}

/* The parts of the context that every version has at the same place. */
static void data_path(struct ibv_pd* pd, struct ibv_cq_ex* cq, struct ibv_qp* qp) {
  char memory[64];
  struct ibv_mr* mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
  NEED(mr != NULL && mr->lkey != 0);
  struct ibv_sge sge = {.addr = (uintptr_t)memory, .length = sizeof memory, .lkey = mr->lkey};
  struct ibv_recv_wr receive = {.wr_id = 1, .sg_list = &sge, .num_sge = 1};
  struct ibv_recv_wr* bad_receive = NULL;
  struct ibv_send_wr send = {.wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND};
  struct ibv_send_wr* bad_send = NULL;
  struct ibv_wc completion;
  /* It is in RESET. */
  NEED(ibv_post_recv(qp, &receive, &bad_receive) == EINVAL && bad_receive == &receive);
  NEED(ibv_post_send(qp, &send, &bad_send) == EINVAL && bad_send == &send);
  NEED(ibv_poll_cq(ibv_cq_ex_to_cq(cq), 1, &completion) == 0);
  NEED(ibv_req_notify_cq(ibv_cq_ex_to_cq(cq), 0) == 0);
  NEED(ibv_dereg_mr(mr) == 0);
}

int main(void) {
  int count = 0;
  struct ibv_device** devices = ibv_get_device_list(&count);
  NEED(devices != NULL && count == 1);
  struct ibv_context* context = ibv_open_device(devices[0]);
  ibv_free_device_list(devices);
  NEED(context != NULL);
  struct ibv_pd* pd = ibv_alloc_pd(context);
  NEED(pd != NULL);
  query_port(context);
  query_device(context);
  operations(context, pd);
  struct ibv_cq_ex* cq = make_cq(context);
  struct ibv_qp* qp = make_qp(context, pd, cq);
  query_qp(qp);
  data_path(pd, cq, qp);
  NEED(ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(ibv_cq_ex_to_cq(cq)) == 0);
  NEED(ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0);
  /* Which layout this was: those of the other versions must differ. */
  printf("%zu %zu %zu\n", sizeof(struct verbs_context), sizeof(struct ibv_device_attr_ex),
         sizeof(struct ibv_port_attr));
  return 0;
}
