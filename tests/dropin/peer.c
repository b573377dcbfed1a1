/* An RDMA program as users write them, in C, against the stock headers and linked with the system's libraries: a server
 * that says what happens to its connections, and a client that forks, is killed, or ends without a word.
 *
 *   peer serve PORT N      until N connections are over and all Receives posted for them have completed
 *   peer MODE PORT         connects, and does what MODE says: see the end of this file
 *
 * PEER_USER, PEER_CONTAINER and PEER_FILE_SIZE say where it does so (move_in).
 *
 * What it says on standard output is what tests wait for and compare. Exit code 1: something was not as it should be,
 * and standard error says what. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <locale.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MESSAGE = 64, RECEIVES = 4, CONNECTIONS = 8, DESCRIPTORS = 1024 };

extern char** environ;

__attribute__((noreturn, format(printf, 1, 2))) static void die(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  fprintf(stderr, " (errno %d)\n", errno);
  _exit(1);
}

#define NEED(condition)                                 \
  do {                                                  \
    if (!(condition)) die("%d: " #condition, __LINE__); \
  } while (0)

__attribute__((format(printf, 1, 2))) static void say(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vprintf(format, arguments);
  va_end(arguments);
  putchar('\n');
  fflush(stdout);
}

/* Where a peer may write, as the server's answer to a request has it. */
struct window {
  uint64_t address;
  uint32_t rkey;
};

struct connection {
  struct rdma_cm_id* id;
  struct rdma_event_channel* events;
  struct ibv_pd* pd;
  struct ibv_comp_channel* channel;
  struct ibv_cq* cq;
  struct ibv_mr* mr;
  char* memory; /* Receives, then what is sent or written, then what peers write */
  struct window peer;
  int receives;
  int over;
};

static char* receive_memory(struct connection* c, int i) {
  return c->memory + MESSAGE * i;
}
static char* send_memory(struct connection* c) {
  return c->memory + MESSAGE * RECEIVES;
}
static char* peers_memory(struct connection* c) {
  return c->memory + MESSAGE * (RECEIVES + 1);
}

static struct ibv_sge sge_of(struct connection* c, char* memory) {
  struct ibv_sge sge = {.addr = (uintptr_t)memory, .length = MESSAGE, .lkey = c->mr->lkey};
  return sge;
}

static void post_receive(struct connection* c, int i) {
  struct ibv_sge sge = sge_of(c, receive_memory(c, i));
  struct ibv_recv_wr wr = {.wr_id = (uint64_t)i, .sg_list = &sge, .num_sge = 1};
  struct ibv_recv_wr* bad;
  NEED(ibv_post_recv(c->id->qp, &wr, &bad) == 0);
  c->receives++;
}

static void prepare(struct connection* c) {
  NEED(c->pd = ibv_alloc_pd(c->id->verbs));
  NEED(c->channel = ibv_create_comp_channel(c->id->verbs));
  NEED(c->cq = ibv_create_cq(c->id->verbs, 64, c, c->channel, 0));
  NEED(ibv_req_notify_cq(c->cq, 0) == 0);
  struct ibv_qp_init_attr attributes = {
      .send_cq = c->cq,
      .recv_cq = c->cq,
      .qp_type = IBV_QPT_RC,
      .cap = {.max_send_wr = 16, .max_recv_wr = RECEIVES, .max_send_sge = 1, .max_recv_sge = 1},
  };
  NEED(rdma_create_qp(c->id, c->pd, &attributes) == 0);
  NEED(c->memory = calloc(RECEIVES + 2, MESSAGE));
  NEED(c->mr =
           ibv_reg_mr(c->pd, c->memory, (RECEIVES + 2) * MESSAGE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
  for (int i = 0; i < RECEIVES; i++) post_receive(c, i);
}

/* Takes what has completed and arms the CQ: an event follows what completes from here on. */
static int drain(struct connection* c) {
  struct ibv_wc wc;
  int flushed = 0;
  NEED(ibv_req_notify_cq(c->cq, 0) == 0);
  while (ibv_poll_cq(c->cq, 1, &wc) > 0) {
    c->receives--;
    if (wc.status == IBV_WC_WR_FLUSH_ERR) {
      flushed++;
    } else {
      NEED(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV);
      say("message %s", receive_memory(c, (int)wc.wr_id));
      post_receive(c, (int)wc.wr_id);
    }
  }
  return flushed;
}

/* The channel that hears of it. */
static struct rdma_event_channel* listen_on(uint16_t port) {
  struct rdma_event_channel* events = rdma_create_event_channel();
  struct rdma_cm_id* listener;
  NEED(events && rdma_create_id(events, &listener, NULL, RDMA_PS_TCP) == 0);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  NEED(rdma_bind_addr(listener, (struct sockaddr*)&address) == 0);
  NEED(rdma_listen(listener, CONNECTIONS) == 0);
  say("listening");
  return events;
}

static void serve(uint16_t port, int expected) {
  struct rdma_event_channel* events = listen_on(port);
  struct connection connections[CONNECTIONS];
  int count = 0;
  int over = 0;
  memset(connections, 0, sizeof connections);
  while (over < expected) {
    struct pollfd wanted[CONNECTIONS + 1] = {{.fd = events->fd, .events = POLLIN}};
    for (int i = 0; i < count; i++) {
      wanted[i + 1].fd = connections[i].channel->fd;
      wanted[i + 1].events = POLLIN;
    }
    NEED(poll(wanted, (nfds_t)count + 1, -1) > 0);
    for (int i = 0; i < count; i++) {
      struct connection* c = &connections[i];
      if ((wanted[i + 1].revents & POLLIN) != 0) {
        struct ibv_cq* cq;
        void* context;
        NEED(ibv_get_cq_event(c->channel, &cq, &context) == 0 && cq == c->cq && context == c);
        ibv_ack_cq_events(cq, 1);
        drain(c);
      }
    }
    if ((wanted[0].revents & POLLIN) != 0) {
      struct rdma_cm_event* event;
      NEED(rdma_get_cm_event(events, &event) == 0);
      struct rdma_cm_id* id = event->id;
      enum rdma_cm_event_type type = event->event;
      NEED(rdma_ack_cm_event(event) == 0);
      if (type == RDMA_CM_EVENT_CONNECT_REQUEST) {
        NEED(count < CONNECTIONS);
        struct connection* c = &connections[count++];
        c->id = id;
        id->context = c;
        prepare(c);
        struct window window = {.address = (uintptr_t)peers_memory(c), .rkey = c->mr->rkey};
        struct rdma_conn_param parameters = {.private_data = &window,
                                             .private_data_len = sizeof window,
                                             .responder_resources = 1,
                                             .initiator_depth = 1,
                                             .rnr_retry_count = 7};
        NEED(rdma_accept(id, &parameters) == 0);
      } else if (type == RDMA_CM_EVENT_ESTABLISHED) {
        say("established");
      } else if (type == RDMA_CM_EVENT_DISCONNECTED) {
        struct connection* c = id->context;
        say("disconnected");
        rdma_disconnect(id); /* its QP takes no more, on InfiniBand, too */
        c->over = 1;
      } else {
        NEED(type == RDMA_CM_EVENT_TIMEWAIT_EXIT);
      }
    }
    over = 0;
    for (int i = 0; i < count; i++) {
      if (connections[i].over && connections[i].receives == 0) over++;
    }
  }
  say("all over");
}

static void expect(struct connection* c, enum rdma_cm_event_type type) {
  struct rdma_cm_event* event;
  NEED(rdma_get_cm_event(c->events, &event) == 0);
  if (event->event != type) die("%s instead of %s", rdma_event_str(event->event), rdma_event_str(type));
  /* Others add what devices need to what the program said: 32 bytes of it on iWARP, 196 on InfiniBand. */
  if (type == RDMA_CM_EVENT_ESTABLISHED) {
    NEED(event->param.conn.private_data_len >= sizeof c->peer);
    memcpy(&c->peer, event->param.conn.private_data, sizeof c->peer);
  }
  NEED(rdma_ack_cm_event(event) == 0);
}

static void resolve(struct connection* c, uint16_t port) {
  memset(c, 0, sizeof *c);
  NEED(c->events = rdma_create_event_channel());
  NEED(rdma_create_id(c->events, &c->id, c, RDMA_PS_TCP) == 0);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  NEED(rdma_resolve_addr(c->id, NULL, (struct sockaddr*)&address, 2000) == 0);
  expect(c, RDMA_CM_EVENT_ADDR_RESOLVED);
  NEED(rdma_resolve_route(c->id, 2000) == 0);
  expect(c, RDMA_CM_EVENT_ROUTE_RESOLVED);
}

static void request(struct connection* c, uint16_t port) {
  resolve(c, port);
  prepare(c);
  struct rdma_conn_param parameters = {
      .responder_resources = 1, .initiator_depth = 1, .retry_count = 7, .rnr_retry_count = 7};
  NEED(rdma_connect(c->id, &parameters) == 0);
}

static void connect_to(struct connection* c, uint16_t port) {
  request(c, port);
  expect(c, RDMA_CM_EVENT_ESTABLISHED);
}

static const char refusal[] = "not now";

/* Ends at once. */
static void refuse(uint16_t port) {
  struct rdma_cm_event* event;
  NEED(rdma_get_cm_event(listen_on(port), &event) == 0 && event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
  NEED(rdma_reject(event->id, refusal, sizeof refusal) == 0);
  exit(0);
}

static void be_refused(struct connection* c, uint16_t port) {
  struct rdma_cm_event* event;
  request(c, port);
  NEED(rdma_get_cm_event(c->events, &event) == 0);
  if (event->event != RDMA_CM_EVENT_REJECTED) die("%s (%d)", rdma_event_str(event->event), event->status);
  NEED(event->param.conn.private_data_len >= sizeof refusal);
  NEED(strcmp(event->param.conn.private_data, refusal) == 0);
  NEED(rdma_ack_cm_event(event) == 0);
}

static enum ibv_wc_status completion_of(struct connection* c, struct ibv_send_wr* wr) {
  struct ibv_send_wr* bad;
  struct ibv_wc wc;
  struct ibv_cq* cq;
  void* context;
  wr->wr_id = 1000;
  wr->send_flags = IBV_SEND_SIGNALED;
  NEED(ibv_post_send(c->id->qp, wr, &bad) == 0);
  for (;;) {
    while (ibv_poll_cq(c->cq, 1, &wc) > 0) {
      if (wc.wr_id == 1000) return wc.status;
      NEED(wc.status == IBV_WC_WR_FLUSH_ERR); /* a Receive */
    }
    NEED(ibv_req_notify_cq(c->cq, 0) == 0);
    if (ibv_poll_cq(c->cq, 1, &wc) > 0) {
      if (wc.wr_id == 1000) return wc.status;
      continue;
    }
    NEED(ibv_get_cq_event(c->channel, &cq, &context) == 0);
    ibv_ack_cq_events(cq, 1);
  }
}

/* Of completions that were found without them. */
static void forget_events(struct connection* c) {
  struct ibv_wc wc;
  struct ibv_cq* cq;
  void* context;
  NEED(ibv_req_notify_cq(c->cq, 0) == 0 && ibv_poll_cq(c->cq, 1, &wc) == 0);
  for (;;) {
    struct pollfd wanted = {.fd = c->channel->fd, .events = POLLIN};
    if (poll(&wanted, 1, 0) == 0) return;
    NEED(ibv_get_cq_event(c->channel, &cq, &context) == 0);
    ibv_ack_cq_events(cq, 1);
    NEED(ibv_req_notify_cq(c->cq, 0) == 0);
  }
}

static void send_text(struct connection* c, const char* text) {
  snprintf(send_memory(c), MESSAGE, "%s", text);
  struct ibv_sge sge = sge_of(c, send_memory(c));
  struct ibv_send_wr wr = {.opcode = IBV_WR_SEND, .sg_list = &sge, .num_sge = 1};
  NEED(completion_of(c, &wr) == IBV_WC_SUCCESS);
}

static enum ibv_wc_status write_once(struct connection* c) {
  struct ibv_sge sge = sge_of(c, send_memory(c));
  struct ibv_send_wr wr = {.opcode = IBV_WR_RDMA_WRITE, .sg_list = &sge, .num_sge = 1};
  wr.wr.rdma.remote_addr = c->peer.address;
  wr.wr.rdma.rkey = c->peer.rkey;
  return completion_of(c, &wr);
}

static void write_some(struct connection* c) {
  for (int i = 0; i < 100; i++) NEED(write_once(c) == IBV_WC_SUCCESS);
}

static void hang_up(struct connection* c) {
  NEED(rdma_disconnect(c->id) == 0);
  expect(c, RDMA_CM_EVENT_DISCONNECTED);
  rdma_destroy_qp(c->id);
  NEED(ibv_dereg_mr(c->mr) == 0 && ibv_destroy_cq(c->cq) == 0 && ibv_destroy_comp_channel(c->channel) == 0);
  NEED(ibv_dealloc_pd(c->pd) == 0 && rdma_destroy_id(c->id) == 0);
  rdma_destroy_event_channel(c->events);
  free(c->memory);
}

static struct connection the_connection;

static void wait_for(pid_t child) {
  int status;
  NEED(waitpid(child, &status, 0) == child);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) die("child: status %x", status);
}

/* --- Ends --- */

static void on_segv(int number) {
  static const char text[] = "handled\n";
  (void)number;
  if (write(STDOUT_FILENO, text, sizeof text - 1) < 0) _exit(1);
  _exit(42);
}

static void fault(void) {
  static volatile int* volatile nowhere = (volatile int*)16; /* the compiler knows better than to follow a constant */
  *nowhere = 1;
}

static pthread_t main_thread;
static atomic_int handled;
static atomic_int handled_elsewhere;

static void on_signal(int number) {
  (void)number;
  atomic_fetch_add(&handled, 1);
  if (!pthread_equal(pthread_self(), main_thread)) atomic_fetch_add(&handled_elsewhere, 1);
}

static void handle(int number, int flags) {
  struct sigaction action = {.sa_handler = on_signal, .sa_flags = flags};
  NEED(sigaction(number, &action, NULL) == 0);
}

static void last_words(void) {
  send_text(&the_connection, "last-words");
  hang_up(&the_connection);
}

static void orphan_last_words(void) {
  send_text(&the_connection, "last-words");
}

/* --- Children --- */

static char own_path[4096];

static char** own_command(const char* mode, uint16_t port) {
  static char digits[8];
  static char* command[4];
  snprintf(digits, sizeof digits, "%u", port);
  command[0] = own_path;
  command[1] = (char*)mode;
  command[2] = digits;
  command[3] = NULL;
  return command;
}

static void child_with_a_device(uint16_t port) {
  struct connection own;
  struct ibv_wc wc;
  NEED(ibv_poll_cq(the_connection.cq, 1, &wc) < 0);
  NEED(ibv_destroy_qp(the_connection.id->qp) == ENODEV);
  connect_to(&own, port);
  send_text(&own, "child");
  hang_up(&own);
  exit(0);
}

static void use_the_manager(uint16_t port) {
  struct connection own;
  resolve(&own, port);
  NEED(rdma_destroy_id(own.id) == 0);
  rdma_destroy_event_channel(own.events);
}

static atomic_int rounds;
static atomic_int enough;

static void* use_the_manager_for_ever(void* port) {
  while (!atomic_load(&enough)) {
    use_the_manager(*(uint16_t*)port);
    atomic_fetch_add(&rounds, 1);
  }
  return NULL;
}

/* Forks while another thread is busy in the libraries: its children find no lock taken that nobody is left to let go
 * of. */
static void fork_while_busy(uint16_t port) {
  pthread_t thread;
  NEED(pthread_create(&thread, NULL, use_the_manager_for_ever, &port) == 0);
  for (int i = 0; i < 30; i++) {
    for (int before = atomic_load(&rounds); atomic_load(&rounds) == before;) continue;
    pid_t child = fork();
    NEED(child >= 0);
    if (child == 0) {
      alarm(30);
      use_the_manager(port);
      exit(0);
    }
    wait_for(child);
  }
  atomic_store(&enough, 1);
  NEED(pthread_join(thread, NULL) == 0);
}

/* --- Signals and blocking calls --- */

static void* wait_then_write(void* connection) {
  while (atomic_load(&handled) < 5) poll(NULL, 0, 1);
  struct connection* c = connection;
  struct ibv_sge sge = sge_of(c, send_memory(c));
  struct ibv_send_wr wr = {.opcode = IBV_WR_RDMA_WRITE, .sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED};
  struct ibv_send_wr* bad;
  wr.wr.rdma.remote_addr = c->peer.address;
  wr.wr.rdma.rkey = c->peer.rkey;
  NEED(ibv_post_send(c->id->qp, &wr, &bad) == 0);
  return NULL;
}

static void* wait_then_resolve(void* connection) {
  while (atomic_load(&handled) < 5) poll(NULL, 0, 1);
  struct connection* c = connection;
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(1)};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  NEED(rdma_resolve_addr(c->id, NULL, (struct sockaddr*)&address, 2000) == 0);
  return NULL;
}

static void every_millisecond(int number_of_timer, int on) {
  struct itimerval time = {.it_interval = {.tv_usec = on ? 1000 : 0}, .it_value = {.tv_usec = on ? 1000 : 0}};
  NEED(setitimer(number_of_timer, &time, NULL) == 0);
}

/* A signal every millisecond, taken by this thread, which waits in each of the calls that wait. */
static void interrupt(struct connection* c, int restart) {
  struct ibv_cq* cq;
  void* context;
  struct ibv_async_event async;
  struct rdma_cm_event* event;
  struct connection other;
  struct ibv_wc wc;
  pthread_t helper;
  sigset_t alarm;
  memset(&other, 0, sizeof other);
  NEED(other.events = rdma_create_event_channel());
  NEED(rdma_create_id(other.events, &other.id, NULL, RDMA_PS_TCP) == 0);
  handle(SIGALRM, restart ? SA_RESTART : 0);
  sigemptyset(&alarm);
  sigaddset(&alarm, SIGALRM);
  forget_events(c);
  if (!restart) {
    every_millisecond(ITIMER_REAL, 1);
    errno = 0;
    NEED(ibv_get_cq_event(c->channel, &cq, &context) == -1 && errno == EINTR);
    errno = 0;
    NEED(ibv_get_async_event(c->id->verbs, &async) == -1 && errno == EINTR);
    errno = 0;
    NEED(rdma_get_cm_event(other.events, &event) == -1 && errno == EINTR);
  } else {
    NEED(pthread_sigmask(SIG_BLOCK, &alarm, NULL) == 0); /* of the helpers */
    NEED(pthread_create(&helper, NULL, wait_then_write, c) == 0);
    NEED(pthread_sigmask(SIG_UNBLOCK, &alarm, NULL) == 0);
    every_millisecond(ITIMER_REAL, 1);
    NEED(ibv_get_cq_event(c->channel, &cq, &context) == 0);
    ibv_ack_cq_events(cq, 1);
    NEED(pthread_join(helper, NULL) == 0 && atomic_load(&handled) >= 5);
    NEED(ibv_poll_cq(c->cq, 1, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
    atomic_store(&handled, 0);
    NEED(pthread_sigmask(SIG_BLOCK, &alarm, NULL) == 0);
    NEED(pthread_create(&helper, NULL, wait_then_resolve, &other) == 0);
    NEED(pthread_sigmask(SIG_UNBLOCK, &alarm, NULL) == 0);
    NEED(rdma_get_cm_event(other.events, &event) == 0 && event->event == RDMA_CM_EVENT_ADDR_RESOLVED);
    NEED(rdma_ack_cm_event(event) == 0);
    NEED(pthread_join(helper, NULL) == 0 && atomic_load(&handled) >= 5);
  }
  every_millisecond(ITIMER_REAL, 0);
  NEED(atomic_load(&handled_elsewhere) == 0);
  NEED(rdma_destroy_id(other.id) == 0);
  rdma_destroy_event_channel(other.events);
}

/* --- Cancellation --- */

static atomic_int writes;

static void* write_for_ever(void* connection) {
  struct connection* c = connection;
  struct ibv_sge sge = sge_of(c, send_memory(c));
  struct ibv_send_wr wr = {.opcode = IBV_WR_RDMA_WRITE, .sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED};
  struct ibv_send_wr* bad;
  struct ibv_wc wc;
  wr.wr.rdma.remote_addr = c->peer.address;
  wr.wr.rdma.rkey = c->peer.rkey;
  for (;;) {
    NEED(ibv_post_send(c->id->qp, &wr, &bad) == 0);
    while (ibv_poll_cq(c->cq, 1, &wc) == 0) continue;
    NEED(wc.status == IBV_WC_SUCCESS);
    atomic_fetch_add(&writes, 1);
    pthread_testcancel();
  }
  return NULL;
}

static void* wait_for_completions(void* connection) {
  struct connection* c = connection;
  struct ibv_cq* cq;
  void* context;
  atomic_fetch_add(&writes, 1);
  ibv_get_cq_event(c->channel, &cq, &context);
  return NULL;
}

static void* wait_for_cm_events(void* connection) {
  struct connection* c = connection;
  struct rdma_cm_event* event;
  atomic_fetch_add(&writes, 1);
  rdma_get_cm_event(c->events, &event);
  return NULL;
}

static void cancel_while(void* (*body)(void*), struct connection* c) {
  pthread_t thread;
  void* result;
  int before = atomic_load(&writes);
  NEED(pthread_create(&thread, NULL, body, c) == 0);
  while (atomic_load(&writes) == before) continue;
  NEED(pthread_cancel(thread) == 0 && pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
}

/* --- Where it is --- */

static void write_to(const char* path, const char* text) {
  int fd = open(path, O_WRONLY | O_CLOEXEC);
  if (fd < 0) return;
  if (write(fd, text, strlen(text)) < 0) fprintf(stderr, "%s\n", path);
  close(fd);
}

enum { CANNOT_BE = 77 };

__attribute__((noreturn)) static void cannot_be(const char* what) {
  fprintf(stderr, "%s: not here (errno %d)\n", what, errno);
  exit(CANNOT_BE);
}

/* In a pid namespace of its own, with its own /proc; and for "user" in a user namespace. */
static void enter_container(const char* kind) {
  const int is_user = strcmp(kind, "user") == 0;
  char map[64];
  snprintf(map, sizeof map, "%u %u 1", geteuid(), geteuid());
  if (unshare(CLONE_NEWPID | CLONE_NEWNS | (is_user ? CLONE_NEWUSER : 0)) != 0) cannot_be(kind);
  if (is_user) write_to("/proc/self/uid_map", map);
  pid_t child = fork();
  NEED(child >= 0);
  if (child > 0) {
    int status;
    NEED(waitpid(child, &status, 0) == child);
    exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
  }
  NEED(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
  if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 || mount("proc", "/proc", "proc", 0, NULL) != 0) {
    cannot_be(kind);
  }
}

/* As the environment says: it is no matter of what a program does. */
static void move_in(void) {
  const char* container = getenv("PEER_CONTAINER");
  const char* user = getenv("PEER_USER");
  const char* file_size = getenv("PEER_FILE_SIZE");
  if (container != NULL) enter_container(container);
  if (user != NULL && setuid((uid_t)atoi(user)) != 0) cannot_be(user);
  if (file_size != NULL) {
    struct rlimit limit = {.rlim_cur = (rlim_t)atoi(file_size), .rlim_max = (rlim_t)atoi(file_size)};
    NEED(setrlimit(RLIMIT_FSIZE, &limit) == 0);
  }
}

/* --- What a library may not touch --- */

struct surroundings {
  char locale[256];
  mode_t mask;
  struct rlimit limits[RLIM_NLIMITS];
  sigset_t blocked;
  struct sigaction actions[65];
  char** environment;
  size_t variables;
  char directory[4096];
  char name[16];
};

static struct surroundings look(void) {
  struct surroundings now;
  memset(&now, 0, sizeof now);
  snprintf(now.locale, sizeof now.locale, "%s", setlocale(LC_ALL, NULL));
  now.mask = umask(0);
  umask(now.mask);
  for (int i = 0; i < RLIM_NLIMITS; i++) getrlimit((unsigned)i, &now.limits[i]);
  pthread_sigmask(SIG_SETMASK, NULL, &now.blocked);
  for (int i = 1; i < 65; i++) sigaction(i, NULL, &now.actions[i]);
  now.environment = environ;
  while (environ[now.variables] != NULL) now.variables++;
  NEED(getcwd(now.directory, sizeof now.directory));
  pthread_getname_np(pthread_self(), now.name, sizeof now.name);
  return now;
}

static int count_of(const char* directory) {
  int count = 0;
  DIR* open = opendir(directory);
  NEED(open);
  while (readdir(open) != NULL) count++;
  closedir(open);
  return count - 2; /* itself and its parent */
}

static void compare(const struct surroundings* before) {
  struct surroundings now = look();
  NEED(strcmp(now.locale, before->locale) == 0);
  NEED(now.mask == before->mask);
  NEED(memcmp(now.limits, before->limits, sizeof now.limits) == 0);
  NEED(now.environment == before->environment && now.variables == before->variables);
  NEED(strcmp(now.directory, before->directory) == 0);
  NEED(strcmp(now.name, before->name) == 0);
  for (int i = 1; i < 65; i++) {
    NEED(sigismember(&now.blocked, i) == sigismember(&before->blocked, i));
    /* Those of memory faults are passed on to what the program had, or gets later. */
    if (i == SIGSEGV || i == SIGBUS) continue;
    NEED(now.actions[i].sa_handler == before->actions[i].sa_handler);
  }
}

/* The threads that are not the program's have names and take none of its signals; the descriptors that are not are
 * closed by exec. */
static void look_at_strangers(const char* known) {
  char path[512];
  char line[256];
  int strangers = 0;
  struct dirent* entry;
  DIR* tasks = opendir("/proc/self/task");
  NEED(tasks);
  while ((entry = readdir(tasks)) != NULL) {
    if (!isdigit((unsigned char)entry->d_name[0]) || atoi(entry->d_name) == getpid()) continue;
    strangers++;
    snprintf(path, sizeof path, "/proc/self/task/%s/status", entry->d_name);
    FILE* status = fopen(path, "r");
    NEED(status);
    while (fgets(line, sizeof line, status) != NULL) {
      unsigned long long blocked;
      if (strncmp(line, "Name:", 5) == 0) NEED(strstr(line, "stagecoach") != NULL);
      if (sscanf(line, "SigBlk: %llx", &blocked) == 1) {
        for (int i = 1; i < 65; i++) {
          int its_own = i == SIGSEGV || i == SIGBUS || i == SIGFPE || i == SIGILL || i == SIGTRAP;
          int cannot_be = i == SIGKILL || i == SIGSTOP || i == 32 || i == 33; /* 32, 33: the C library's */
          if (cannot_be) continue;
          if (((blocked >> (i - 1)) & 1) != (unsigned)!its_own) die("signal %d of %s", i, entry->d_name);
        }
      }
    }
    fclose(status);
  }
  closedir(tasks);
  NEED(strangers == 1);
  DIR* descriptors = opendir("/proc/self/fd");
  NEED(descriptors);
  while ((entry = readdir(descriptors)) != NULL) {
    int fd = atoi(entry->d_name);
    if (!isdigit((unsigned char)entry->d_name[0]) || fd >= DESCRIPTORS || known[fd]) continue;
    if ((fcntl(fd, F_GETFD) & FD_CLOEXEC) == 0) die("descriptor %d", fd);
  }
  closedir(descriptors);
}

int main(int argc, char** argv) {
  struct connection* c = &the_connection;
  if (argc < 3) return 2;
  const char* mode = argv[1];
  const uint16_t port = (uint16_t)atoi(argv[2]);
  move_in();
  main_thread = pthread_self();
  NEED(readlink("/proc/self/exe", own_path, sizeof own_path - 1) > 0);
#define MODE(name) else if (strcmp(mode, name) == 0)
  if (strcmp(mode, "serve") == 0) {
    serve(port, argc > 3 ? atoi(argv[3]) : 1);
    return 0;
  }
  MODE("refuse") refuse(port);
  MODE("be-refused") {
    be_refused(c, port);
    return 0;
  }
  MODE("daemon-first") { /* daemon(3) before anything of RDMA */
    NEED(daemon(1, 1) == 0);
    connect_to(c, port);
    send_text(c, "daemon");
    hang_up(c);
    return 0;
  }
  MODE("hygiene") {
    NEED(setlocale(LC_ALL, "C.UTF-8"));
    struct surroundings before = look();
    NEED(count_of("/proc/self/task") == 1);
    char known[DESCRIPTORS];
    for (int fd = 0; fd < DESCRIPTORS; fd++) known[fd] = fcntl(fd, F_GETFD) >= 0;
    connect_to(c, port);
    write_some(c);
    look_at_strangers(known);
    compare(&before);
    hang_up(c);
    compare(&before);
    return 0;
  }

  connect_to(c, port);
  send_text(c, "hello");
  if (0) {
  }
  /* How it ends. */
  MODE("exit") exit(7);
  MODE("_exit") _exit(7);
  MODE("abort") abort();
  MODE("segv") fault();
  MODE("segv-handler") {
    signal(SIGSEGV, on_segv);
    /* Registering memory is when the emulator looks whether its handler is still in front. */
    static char more[4096];
    NEED(ibv_reg_mr(c->pd, more, sizeof more, 0));
    fault();
  }
  MODE("hang") {
    say("ready");
    for (;;) pause();
  }
  MODE("terminate") { /* by a handler of its own, on its own thread */
    handle(SIGTERM, 0);
    say("ready");
    while (atomic_load(&handled) == 0) poll(NULL, 0, 1000);
    NEED(atomic_load(&handled_elsewhere) == 0);
    return 3;
  }
  MODE("atexit") {
    atexit(last_words);
    exit(0);
  }
  MODE("atexit-only-words") {
    atexit(orphan_last_words);
    exit(0);
  }
  /* With SIGPIPE as it is by default. */
  MODE("pump") {
    say("ready");
    while (write_once(c) == IBV_WC_SUCCESS) continue;
    for (int i = 0; i < 20; i++) NEED(write_once(c) == IBV_WC_WR_FLUSH_ERR);
    expect(c, RDMA_CM_EVENT_DISCONNECTED);
    say("disconnected");
    return 0;
  }
  /* Children. */
  MODE("fork-hang") {
    pid_t child = fork();
    NEED(child >= 0);
    if (child == 0) {
      say("child %d", getpid());
      for (;;) pause();
    }
    for (;;) pause();
  }
  MODE("fork-exit") {
    for (int i = 0; i < 5; i++) {
      pid_t child = fork();
      NEED(child >= 0);
      if (child == 0) exit(0);
      write_some(c);
      wait_for(child);
      write_some(c);
    }
    hang_up(c);
  }
  MODE("fork-device") {
    pid_t child = fork();
    NEED(child >= 0);
    if (child == 0) child_with_a_device(port);
    write_some(c);
    wait_for(child);
    write_some(c);
    hang_up(c);
  }
  MODE("fork-busy") {
    fork_while_busy(port);
    write_some(c);
    hang_up(c);
  }
  MODE("fork-exec") {
    pid_t child = fork();
    NEED(child >= 0);
    if (child == 0) {
      execv(own_path, own_command("orderly", port));
      _exit(1);
    }
    write_some(c);
    wait_for(child);
    hang_up(c);
  }
  MODE("vfork-exec") {
    pid_t child = vfork();
    NEED(child >= 0);
    if (child == 0) {
      execv(own_path, own_command("orderly", port));
      _exit(1);
    }
    write_some(c);
    wait_for(child);
    hang_up(c);
  }
  MODE("spawn") {
    pid_t child;
    NEED(posix_spawn(&child, own_path, NULL, NULL, own_command("orderly", port), environ) == 0);
    write_some(c);
    wait_for(child);
    hang_up(c);
  }
  MODE("exec") { /* it becomes another program, and its connection ends */
    execv(own_path, own_command("orderly", port));
  }
  MODE("system") {
    for (int i = 0; i < 5; i++) {
      write_some(c);
      NEED(system("exit 0") == 0);
      NEED(system("ibv_devinfo > /dev/null") == 0);
    }
    hang_up(c);
  }
  MODE("daemon") { /* daemon(3) when it has a connection: that was the parent's */
    struct ibv_wc wc;
    NEED(daemon(1, 1) == 0);
    struct ibv_send_wr wr = {.opcode = IBV_WR_SEND};
    struct ibv_send_wr* bad;
    NEED(ibv_poll_cq(c->cq, 1, &wc) < 0 && ibv_post_send(c->id->qp, &wr, &bad) == ENODEV);
    struct connection own;
    connect_to(&own, port);
    send_text(&own, "daemon");
    hang_up(&own);
  }
  MODE("orderly") {
    write_some(c);
    hang_up(c);
  }
  /* Signals and threads. */
  MODE("interrupt") {
    interrupt(c, 0);
    hang_up(c);
  }
  MODE("restart") {
    interrupt(c, 1);
    hang_up(c);
  }
  MODE("cancel") {
    for (int i = 0; i < 100; i++) cancel_while(write_for_ever, c);
    forget_events(c);
    cancel_while(wait_for_completions, c);
    cancel_while(wait_for_cm_events, c);
    write_some(c);
    hang_up(c);
  }
  else return 2;
  return 0;
}
