/* A program that is not linked with the libraries but loads them, as NCCL and others do: dlopen(3) and dlvsym(3).
 *
 *   loader MODE [LIBRARY]
 *
 * Exit code 1: something was not as it should be, and standard error says what. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr

#define NEED(condition)                                                    \
  do {                                                                     \
    if (!(condition)) {                                                    \
      fprintf(stderr, "%d: " #condition " (errno %d)\n", __LINE__, errno); \
      exit(1);                                                             \
    }                                                                      \
  } while (0)

static void* open_library(const char* name) {
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    exit(1);
  }
  return library;
}

static void* find(void* library, const char* name, const char* version) {
  void* symbol = dlvsym(library, name, version);
  if (symbol == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    exit(1);
  }
  return symbol;
}

/* The functions by the names programs look them up by, under the versions they ask for. */
struct verbs {
  struct ibv_device** (*get_device_list)(int*);
  void (*free_device_list)(struct ibv_device**);
  struct ibv_context* (*open_device)(struct ibv_device*);
  int (*close_device)(struct ibv_context*);
  int (*query_port)(struct ibv_context*, uint8_t, struct ibv_port_attr*);
  struct ibv_pd* (*alloc_pd)(struct ibv_context*);
  int (*dealloc_pd)(struct ibv_pd*);
  struct ibv_mr* (*reg_mr)(struct ibv_pd*, void*, size_t, int);
  struct ibv_mr* (*reg_mr_iova2)(struct ibv_pd*, void*, size_t, uint64_t, unsigned int);
  int (*dereg_mr)(struct ibv_mr*);
};

static struct verbs find_verbs(void* library) {
  struct verbs found;
  *(void**)&found.get_device_list = find(library, "ibv_get_device_list", "IBVERBS_1.1");
  *(void**)&found.free_device_list = find(library, "ibv_free_device_list", "IBVERBS_1.1");
  *(void**)&found.open_device = find(library, "ibv_open_device", "IBVERBS_1.1");
  *(void**)&found.close_device = find(library, "ibv_close_device", "IBVERBS_1.1");
  *(void**)&found.query_port = find(library, "ibv_query_port", "IBVERBS_1.1");
  *(void**)&found.alloc_pd = find(library, "ibv_alloc_pd", "IBVERBS_1.1");
  *(void**)&found.dealloc_pd = find(library, "ibv_dealloc_pd", "IBVERBS_1.1");
  *(void**)&found.reg_mr = find(library, "ibv_reg_mr", "IBVERBS_1.1");
  *(void**)&found.reg_mr_iova2 = find(library, "ibv_reg_mr_iova2", "IBVERBS_1.8");
  *(void**)&found.dereg_mr = find(library, "ibv_dereg_mr", "IBVERBS_1.1");
  return found;
}

static void use_verbs(const struct verbs* verbs) {
  static char memory[4096];
  int count = 0;
  struct ibv_device** list = verbs->get_device_list(&count);
  NEED(list != NULL && count == 1 && strcmp(list[0]->name, "stagecoach0") == 0);
  struct ibv_context* context = verbs->open_device(list[0]);
  NEED(context != NULL);
  verbs->free_device_list(list);
  /* Those who look it up ask for the link layer, too. */
  struct ibv_port_attr port;
  memset(&port, 0, sizeof port);
  NEED(verbs->query_port(context, 1, &port) == 0);
  NEED(port.state == IBV_PORT_ACTIVE && port.link_layer == IBV_LINK_LAYER_ETHERNET);
  struct ibv_pd* pd = verbs->alloc_pd(context);
  NEED(pd != NULL);
  struct ibv_mr* mr = verbs->reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
  NEED(mr != NULL && verbs->dereg_mr(mr) == 0);
  mr = verbs->reg_mr_iova2(pd, memory, sizeof memory, (uintptr_t)memory, IBV_ACCESS_RELAXED_ORDERING);
  NEED(mr != NULL && verbs->dereg_mr(mr) == 0);
  NEED(verbs->dealloc_pd(pd) == 0 && verbs->close_device(context) == 0);
}

struct cm {
  struct rdma_event_channel* (*create_event_channel)(void);
  int (*create_id)(struct rdma_event_channel*, struct rdma_cm_id**, void*, enum rdma_port_space);
  int (*bind_addr)(struct rdma_cm_id*, struct sockaddr*);
  int (*listen)(struct rdma_cm_id*, int);
};

static struct cm find_cm(void* library) {
  struct cm found;
  *(void**)&found.create_event_channel = find(library, "rdma_create_event_channel", "RDMACM_1.0");
  *(void**)&found.create_id = find(library, "rdma_create_id", "RDMACM_1.0");
  *(void**)&found.bind_addr = find(library, "rdma_bind_addr", "RDMACM_1.0");
  *(void**)&found.listen = find(library, "rdma_listen", "RDMACM_1.0");
  return found;
}

static void use_cm(const struct cm* cm) {
  struct rdma_cm_id* id;
  struct sockaddr_in address = {.sin_family = AF_INET};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  struct rdma_event_channel* channel = cm->create_event_channel();
  NEED(channel != NULL && cm->create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
  NEED(cm->bind_addr(id, (struct sockaddr*)&address) == 0 && cm->listen(id, 1) == 0);
  NEED(id->verbs != NULL);
}

static int count_of(const char* directory) {
  int count = 0;
  DIR* open = opendir(directory);
  NEED(open != NULL);
  while (readdir(open) != NULL) count++;
  closedir(open);
  return count;
}

/* A TCP port that this process listens on: the device's. 0: none. */
static uint16_t own_listener(void) {
  static const char* const tables[] = {"/proc/self/net/tcp", "/proc/self/net/tcp6"};
  for (int fd = 3; fd < 256; fd++) {
    char path[64];
    char target[64] = "";
    char line[512];
    unsigned long inode;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (readlink(path, target, sizeof target - 1) <= 0 || sscanf(target, "socket:[%lu]", &inode) != 1) continue;
    for (int i = 0; i < 2; i++) {
      FILE* table = fopen(tables[i], "r");
      if (table == NULL) continue;
      while (fgets(line, sizeof line, table) != NULL) {
        unsigned port;
        unsigned state;
        unsigned long its;
        if (sscanf(line, " %*d: %*[0-9A-F]:%x %*[0-9A-F]:%*x %x %*s %*s %*s %*u %*u %lu", &port, &state, &its) == 3 &&
            state == 0x0a && its == inode) {
          fclose(table);
          return (uint16_t)port;
        }
      }
      fclose(table);
    }
  }
  return 0;
}

/* Says what nobody understands to the device's listener, which takes that in and hangs up: its thread runs. */
static void stir_the_thread(uint16_t port) {
  char garbage[256];
  memset(garbage, '?', sizeof garbage);
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  NEED(connect(fd, (struct sockaddr*)&address, sizeof address) == 0);
  NEED(send(fd, garbage, sizeof garbage, MSG_NOSIGNAL) == sizeof garbage);
  while (recv(fd, garbage, sizeof garbage, 0) > 0) continue;
  close(fd);
}

static void close_and_reopen(void) {
  void* verbs_library = open_library("libibverbs.so.1");
  void* cm_library = open_library("librdmacm.so.1");
  struct cm cm = find_cm(cm_library);
  use_cm(&cm);
  uint16_t port = own_listener();
  NEED(port != 0);
  NEED(dlclose(cm_library) == 0 && dlclose(verbs_library) == 0);
  for (int i = 0; i < 20; i++) stir_the_thread(port);
  verbs_library = open_library("libibverbs.so.1");
  cm_library = open_library("librdmacm.so.1");
  /* What it left is still there. */
  NEED(find(cm_library, "rdma_listen", "RDMACM_1.0") == (void*)cm.listen);
  struct verbs verbs = find_verbs(verbs_library);
  use_verbs(&verbs);
  NEED(dlclose(cm_library) == 0 && dlclose(verbs_library) == 0);
}

/* Which file a symbol was found in. */
static void say_where(void* symbol) {
  Dl_info info;
  NEED(dladdr(symbol, &info) != 0);
  printf("%s\n", info.dli_fname);
}

static const struct {
  const char* name;
  const char* version;
} kVersions[] = {
    {"ibv_get_device_list", "IBVERBS_1.1"},       {"ibv_qp_to_qp_ex", "IBVERBS_1.6"},
    {"ibv_reg_mr_iova2", "IBVERBS_1.8"},          {"ibv_query_ece", "IBVERBS_1.10"},
    {"_ibv_query_gid_ex", "IBVERBS_1.11"},        {"_ibv_query_gid_table", "IBVERBS_1.11"},
    {"ibv_reg_dmabuf_mr", "IBVERBS_1.12"},        {"ibv_is_fork_initialized", "IBVERBS_1.13"},
    {"ibv_query_gid_type", "IBVERBS_PRIVATE_34"},
};

int main(int argc, char** argv) {
  const char* mode = argc > 1 ? argv[1] : "";
  if (strcmp(mode, "verbs-first") == 0 || strcmp(mode, "cm-first") == 0) {
    int verbs_first = mode[0] == 'v';
    void* first = open_library(verbs_first ? "libibverbs.so.1" : "librdmacm.so.1");
    void* second = open_library(verbs_first ? "librdmacm.so.1" : "libibverbs.so.1");
    struct verbs verbs = find_verbs(verbs_first ? first : second);
    struct cm cm = find_cm(verbs_first ? second : first);
    use_verbs(&verbs);
    use_cm(&cm);
    use_verbs(&verbs);
  } else if (strcmp(mode, "cm-alone") == 0) {
    struct cm cm = find_cm(open_library("librdmacm.so.1"));
    use_cm(&cm);
  } else if (strcmp(mode, "versions") == 0) {
    void* library = open_library("libibverbs.so");
    for (size_t i = 0; i < sizeof kVersions / sizeof kVersions[0]; i++) {
      say_where(find(library, kVersions[i].name, kVersions[i].version));
      NEED(dlvsym(library, kVersions[i].name, "IBVERBS_1.99") == NULL);
    }
    void* cm_library = open_library("librdmacm.so");
    say_where(find(cm_library, "rdma_create_event_channel", "RDMACM_1.0"));
    say_where(find(cm_library, "rdma_establish", "RDMACM_1.2"));
    /* By either name it is the same library. */
    NEED(library == open_library("libibverbs.so.1") && cm_library == open_library("librdmacm.so.1"));
  } else if (strcmp(mode, "close") == 0) {
    close_and_reopen();
  } else if (strcmp(mode, "nothing-begins") == 0) {
    struct sigaction before[65];
    struct sigaction after;
    int threads = count_of("/proc/self/task");
    int descriptors = count_of("/proc/self/fd");
    for (int i = 1; i < 65; i++) sigaction(i, NULL, &before[i]);
    void* library = open_library("libibverbs.so.1");
    open_library("librdmacm.so.1");
    /* Nor when something is asked that needs no device. */
    const char* (*node_type)(enum ibv_node_type);
    *(void**)&node_type = find(library, "ibv_node_type_str", "IBVERBS_1.1");
    NEED(strlen(node_type(IBV_NODE_RNIC)) > 0);
    NEED(threads == count_of("/proc/self/task") && descriptors == count_of("/proc/self/fd"));
    for (int i = 1; i < 65; i++) {
      sigaction(i, NULL, &after);
      NEED(after.sa_handler == before[i].sa_handler);
    }
  } else if (strcmp(mode, "through") == 0 && argc == 3) {
    /* A plugin that is linked with libibverbs, which this program knows nothing of. */
    void* plugin = open_library(argv[2]);
    int (*devices)(void);
    *(void**)&devices = dlsym(plugin, "plugin_devices");
    NEED(devices != NULL && devices() == 1);
  } else {
    return 2;
  }
  return 0;
}
