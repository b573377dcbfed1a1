/* A program such as users have, to be built with a sanitizer: two QPs of rdma_cm in one process that is connected again
 * and again, with a thread for each end, and events of all kinds. It has nothing to be reported. */
#include <arpa/inet.h>
#include <pthread.h>
#include <rdma/rdma_verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kRounds = 20, kMessages = 50, kSize = 64 };

#define MUST(what)                                                          \
  do {                                                                      \
    if (!(what)) {                                                          \
      fprintf(stderr, "%s:%d: %s failed\n", __FILE__, __LINE__, #what);     \
      exit(2);                                                              \
    }                                                                       \
  } while (0)

static struct ibv_qp_init_attr Attributes(void) {
  struct ibv_qp_init_attr attributes;
  memset(&attributes, 0, sizeof attributes);
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap.max_send_wr = attributes.cap.max_recv_wr = kMessages;
  attributes.cap.max_send_sge = attributes.cap.max_recv_sge = 1;
  attributes.sq_sig_all = 1;
  return attributes;
}

static void Complete(int (*next)(struct rdma_cm_id*, struct ibv_wc*), struct rdma_cm_id* id) {
  struct ibv_wc completion;
  MUST(next(id, &completion) == 1 && completion.status == IBV_WC_SUCCESS);
}

static void* Serve(void* argument) {
  struct rdma_cm_id* listener = argument;
  for (int round = 0; round < kRounds; ++round) {
    struct rdma_cm_id* id;
    MUST(rdma_get_request(listener, &id) == 0);
    char* memory = calloc(kMessages, kSize);
    struct ibv_mr* region = rdma_reg_msgs(id, memory, kMessages * kSize);
    MUST(memory != NULL && region != NULL);
    for (int i = 0; i < kMessages; ++i) MUST(rdma_post_recv(id, NULL, memory + i * kSize, kSize, region) == 0);
    MUST(rdma_accept(id, NULL) == 0);
    for (int i = 0; i < kMessages; ++i) {
      Complete(rdma_get_recv_comp, id);
      MUST(memory[i * kSize] == (char)i);
    }
    MUST(rdma_post_send(id, NULL, memory, kSize, region, 0) == 0);
    Complete(rdma_get_send_comp, id);
    MUST(rdma_disconnect(id) == 0);
    MUST(rdma_dereg_mr(region) == 0);
    rdma_destroy_ep(id);
    free(memory);
  }
  return NULL;
}

static void Call(struct rdma_addrinfo* to) {
  struct rdma_cm_id* id;
  struct ibv_qp_init_attr attributes = Attributes();
  MUST(rdma_create_ep(&id, to, NULL, &attributes) == 0);
  char* memory = calloc(2, kSize);
  struct ibv_mr* region = rdma_reg_msgs(id, memory, 2 * kSize);
  MUST(memory != NULL && region != NULL);
  MUST(rdma_post_recv(id, NULL, memory + kSize, kSize, region) == 0);
  MUST(rdma_connect(id, NULL) == 0);
  for (int i = 0; i < kMessages; ++i) {
    memory[0] = (char)i;
    MUST(rdma_post_send(id, NULL, memory, kSize, region, 0) == 0);
    Complete(rdma_get_send_comp, id);
  }
  Complete(rdma_get_recv_comp, id);
  rdma_disconnect(id);
  MUST(rdma_dereg_mr(region) == 0);
  rdma_destroy_ep(id);
  free(memory);
}

int main(void) {
  struct rdma_addrinfo hints;
  struct rdma_addrinfo* here;
  memset(&hints, 0, sizeof hints);
  hints.ai_port_space = RDMA_PS_TCP;
  hints.ai_flags = RAI_PASSIVE;
  MUST(rdma_getaddrinfo("127.0.0.1", "0", &hints, &here) == 0);
  struct rdma_cm_id* listener;
  struct ibv_qp_init_attr attributes = Attributes();
  MUST(rdma_create_ep(&listener, here, NULL, &attributes) == 0);
  MUST(rdma_listen(listener, 4) == 0);
  char port[8];
  snprintf(port, sizeof port, "%d", ntohs(rdma_get_src_port(listener)));
  struct rdma_addrinfo* there;
  hints.ai_flags = 0;
  MUST(rdma_getaddrinfo("127.0.0.1", port, &hints, &there) == 0);
  pthread_t server;
  MUST(pthread_create(&server, NULL, Serve, listener) == 0);
  for (int round = 0; round < kRounds; ++round) Call(there);
  MUST(pthread_join(server, NULL) == 0);
  rdma_freeaddrinfo(there);
  rdma_destroy_ep(listener);
  rdma_freeaddrinfo(here);
  puts("done");
  return 0;
}
