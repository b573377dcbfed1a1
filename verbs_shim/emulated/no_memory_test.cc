// What programs see when memory ends: each allocation of each call fails in turn. The call says ENOMEM and has left
// nothing half made, or it has done what it should without.
//
// Allocations fail where all of them come by, in malloc(3) and its like, which this program has its own of. So they
// fail in the C library and in that of C++ as well.

#include <dlfcn.h>
#include <errno.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <string>
#include <vector>

#include "emu/world/world.h"
#include "verbs_shim/emulated/want.h"

#undef ibv_query_port
#undef ibv_reg_mr

// --- Allocations that fail ---

extern "C" {
// For the providers of libibverbs, and no header's.
const char* ibv_get_sysfs_path(void);
int ibv_read_sysfs_file(const char*, const char*, char*, size_t);

void* __libc_malloc(size_t);          // NOLINT: its name
void* __libc_calloc(size_t, size_t);  // NOLINT: its name
void* __libc_realloc(void*, size_t);  // NOLINT: its name
}

namespace {

using stagecoach::verbs::emulated::FailsNow;

std::atomic<bool> threads_fail{false};
// Of a child, to its parent.
std::atomic<bool>* told_of_failures = nullptr;

bool Fails() {
  if (!FailsNow()) return false;
  if (told_of_failures != nullptr) told_of_failures->store(true);
  errno = ENOMEM;
  return true;
}

}  // namespace

extern "C" {

void* malloc(size_t size) {
  return Fails() ? nullptr : __libc_malloc(size);
}
void* calloc(size_t count, size_t size) {
  return Fails() ? nullptr : __libc_calloc(count, size);
}
void* realloc(void* memory, size_t size) {
  return Fails() ? nullptr : __libc_realloc(memory, size);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
  if (threads_fail.load()) return EAGAIN;
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  return create(thread, attributes, run, argument);
}

}  // extern "C"

namespace stagecoach::verbs::emulated {
namespace {

// A call: 0, or the errno it answered with. `undo` follows where it succeeded, `prepare` comes before each.
struct Call {
  std::string name;
  std::function<int()> call;
  std::function<void()> undo = [] {};
  std::function<void()> prepare = [] {};
};

// With `count` allocations that fail, from each one on.
void FailEachInTurn(const Call& call, long count) {
  call.prepare();
  ASSERT_EQ(call.call(), 0) << call.name;  // what is made once is there
  call.undo();
  for (int number = 0;; ++number) {
    ASSERT_LT(number, kMostFailures) << call.name;
    const Inventory before;
    const std::string what =
        call.name + ", allocation " + std::to_string(number) + (count > 1 ? " and all after it" : "");
    call.prepare();
    const Inventory prepared;
    int error = 0;
    {
      const Failing failing(Who::kCaller, number, count);
      errno = 0;
      error = call.call();
    }
    if (error != 0) {
      EXPECT_TRUE(HasFailed()) << what << ": " << strerror(error);
      EXPECT_EQ(error, ENOMEM) << what;
      ExpectNoMoreThan(prepared, what);
      // It can be had still.
      ASSERT_EQ(call.call(), 0) << what;
    }
    call.undo();
    ExpectNoMoreThan(before, what);
    if (!HasFailed() || testing::Test::HasFailure()) return;
  }
}

void FailEachInTurn(const Call& call) {
  FailEachInTurn(call, 1);
  if (!testing::Test::HasFailure()) FailEachInTurn(call, kAllThatFollow);
  EXPECT_EQ(Scene().Play(), 0) << "after " << call.name;
}

class NoMemoryTest : public testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    ibv_device** const devices = ibv_get_device_list(&count);
    ASSERT_NE(devices, nullptr);
    device_ = devices[0];
    ibv_free_device_list(devices);
    context_ = ibv_open_device(device_);
    ASSERT_NE(context_, nullptr);
    pd_ = ibv_alloc_pd(context_);
    cq_ = ibv_create_cq(context_, 16, nullptr, nullptr, 0);
    mr_ = ibv_reg_mr(pd_, memory_, sizeof memory_, kAccess);
    ASSERT_TRUE(pd_ != nullptr && cq_ != nullptr && mr_ != nullptr);
    ASSERT_EQ(ibv_query_gid(context_, 1, 0, &gid_), 0);
  }
  void TearDown() override {
    EXPECT_EQ(ibv_dereg_mr(mr_), 0);
    EXPECT_EQ(ibv_destroy_cq(cq_), 0);
    EXPECT_EQ(ibv_dealloc_pd(pd_), 0);
    EXPECT_EQ(ibv_close_device(context_), 0);
  }
  static bool IsInfiniband() { return emu::World::Current().current_host().nic().is_infiniband(); }

  ibv_qp* MakeQp(ibv_qp_type type = IBV_QPT_RC) {
    ibv_qp_init_attr attributes{};
    attributes.send_cq = attributes.recv_cq = cq_;
    attributes.qp_type = type;
    attributes.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 2, .max_recv_sge = 2, .max_inline_data = 16};
    return ibv_create_qp(pd_, &attributes);
  }
  // Through INIT and, on InfiniBand, to RTR and RTS, connected to itself.
  static int Change(ibv_qp* qp, ibv_qp_state to) {
    ibv_qp_attr change{};
    change.qp_state = to;
    int mask = IBV_QP_STATE;
    if (to == IBV_QPS_INIT) {
      change.port_num = 1;
      change.qp_access_flags = kAccess;
      mask |= IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    } else if (to == IBV_QPS_RTR) {
      change.path_mtu = IBV_MTU_256;
      change.dest_qp_num = qp->qp_num;
      change.max_dest_rd_atomic = 1;
      change.min_rnr_timer = 12;
      FillWay(&change.ah_attr);
      mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
              IBV_QP_MIN_RNR_TIMER;
    } else if (to == IBV_QPS_RTS) {
      change.timeout = 14;
      change.retry_cnt = change.rnr_retry = 7;
      change.max_rd_atomic = 1;
      mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
    }
    return ibv_modify_qp(qp, &change, mask);
  }
  static void FillWay(ibv_ah_attr* way) {
    way->is_global = 1;
    way->port_num = 1;
    way->grh.hop_limit = 64;
    way->grh.dgid = gid_;
  }

  static constexpr int kAccess =
      IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_MW_BIND;
  alignas(4096) static inline char memory_[8192];
  static inline ibv_gid gid_{};
  ibv_device* device_ = nullptr;
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  ibv_cq* cq_ = nullptr;
  ibv_mr* mr_ = nullptr;
};

TEST_F(NoMemoryTest, Devices) {
  ibv_device** list = nullptr;
  FailEachInTurn({"ibv_get_device_list", [&] { return ErrnoUnless((list = ibv_get_device_list(nullptr)) != nullptr); },
                  [&] { ibv_free_device_list(list); }});
  ibv_context* opened = nullptr;
  FailEachInTurn({"ibv_open_device", [&] { return ErrnoUnless((opened = ibv_open_device(device_)) != nullptr); },
                  [&] { EXPECT_EQ(ibv_close_device(opened), 0); }});
  FailEachInTurn({"ibv_close_device", [&] { return ErrnoUnless(ibv_close_device(opened) == 0); }, [] {},
                  [&] {
                    opened = ibv_open_device(device_);
                    ibv_pd* const pd = ibv_alloc_pd(opened);
                    ASSERT_NE(ibv_reg_mr(pd, memory_, 100, 0), nullptr);
                    ASSERT_NE(ibv_create_cq(opened, 1, nullptr, ibv_create_comp_channel(opened), 0), nullptr);
                  }});
  ibv_device_attr device{};
  FailEachInTurn({"ibv_query_device", [&] { return ibv_query_device(context_, &device); }});
  ibv_device_attr_ex extended{};
  FailEachInTurn({"ibv_query_device_ex", [&] { return ibv_query_device_ex(context_, nullptr, &extended); }});
  ibv_port_attr port{};
  FailEachInTurn(
      {"ibv_query_port", [&] { return verbs_get_ctx(context_)->query_port(context_, 1, &port, sizeof port); }});
  ibv_gid gid{};
  FailEachInTurn({"ibv_query_gid", [&] { return ErrnoUnless(ibv_query_gid(context_, 1, 0, &gid) == 0); }});
  ibv_gid_entry entry{};
  FailEachInTurn({"ibv_query_gid_ex", [&] { return ibv_query_gid_ex(context_, 1, 0, &entry, 0); }});
  FailEachInTurn({"ibv_query_gid_table", [&] {
                    const ssize_t found = ibv_query_gid_table(context_, &entry, 1, 0);
                    return found < 0 ? static_cast<int>(-found) : 0;
                  }});
  char text[100];
  const std::string folder = std::string(ibv_get_sysfs_path()) + "/class/infiniband/" + ibv_get_device_name(device_);
  FailEachInTurn({"ibv_read_sysfs_file", [&] {
                    return ErrnoUnless(ibv_read_sysfs_file(folder.c_str(), "node_type", text, sizeof text) > 0);
                  }});
}

TEST_F(NoMemoryTest, Memory) {
  ibv_pd* pd = nullptr;
  FailEachInTurn({"ibv_alloc_pd", [&] { return ErrnoUnless((pd = ibv_alloc_pd(context_)) != nullptr); },
                  [&] { EXPECT_EQ(ibv_dealloc_pd(pd), 0); }});
  ibv_mr* mr = nullptr;
  const auto make = [&] { mr = ibv_reg_mr(pd_, memory_, sizeof memory_, kAccess); };
  FailEachInTurn({"ibv_reg_mr",
                  [&] {
                    make();
                    return ErrnoUnless(mr != nullptr);
                  },
                  [&] { EXPECT_EQ(ibv_dereg_mr(mr), 0); }});
  FailEachInTurn({"ibv_dereg_mr", [&] { return ibv_dereg_mr(mr); }, [] {}, make});
  FailEachInTurn({"ibv_rereg_mr",
                  [&] {
                    return ErrnoUnless(
                        ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, nullptr, memory_ + 64, 64, 0) == 0);
                  },
                  [&] { EXPECT_EQ(ibv_dereg_mr(mr), 0); }, make});
  FailEachInTurn({"ibv_rereg_mr, access alone",
                  [&] {
                    return ErrnoUnless(
                        ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, IBV_ACCESS_LOCAL_WRITE) == 0);
                  },
                  [&] { EXPECT_EQ(ibv_dereg_mr(mr), 0); }, make});
  pd = ibv_alloc_pd(context_);
  FailEachInTurn({"ibv_rereg_mr, PD alone",
                  [&] { return ErrnoUnless(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, pd, nullptr, 0, 0) == 0); },
                  [&] { EXPECT_EQ(ibv_dereg_mr(mr), 0); }, make});
  EXPECT_EQ(ibv_dealloc_pd(pd), 0);
  ibv_mw* mw = nullptr;
  const auto allocate = [&] { mw = ibv_alloc_mw(pd_, IBV_MW_TYPE_2); };
  FailEachInTurn({"ibv_alloc_mw",
                  [&] {
                    allocate();
                    return ErrnoUnless(mw != nullptr);
                  },
                  [&] { EXPECT_EQ(ibv_dealloc_mw(mw), 0); }});
  FailEachInTurn({"ibv_dealloc_mw", [&] { return ibv_dealloc_mw(mw); }, [] {}, allocate});
  if (!IsInfiniband()) return;
  ibv_ah* ah = nullptr;
  ibv_ah_attr way{};
  FillWay(&way);
  const auto reach = [&] { ah = ibv_create_ah(pd_, &way); };
  FailEachInTurn({"ibv_create_ah",
                  [&] {
                    reach();
                    return ErrnoUnless(ah != nullptr);
                  },
                  [&] { EXPECT_EQ(ibv_destroy_ah(ah), 0); }});
  FailEachInTurn({"ibv_destroy_ah", [&] { return ibv_destroy_ah(ah); }, [] {}, reach});
}

TEST_F(NoMemoryTest, Queues) {
  ibv_comp_channel* channel = nullptr;
  FailEachInTurn({"ibv_create_comp_channel",
                  [&] { return ErrnoUnless((channel = ibv_create_comp_channel(context_)) != nullptr); },
                  [&] { EXPECT_EQ(ibv_destroy_comp_channel(channel), 0); }});
  channel = ibv_create_comp_channel(context_);
  ibv_cq* cq = nullptr;
  const auto make = [&] { cq = ibv_create_cq(context_, 100, nullptr, channel, 0); };
  const auto destroy = [&] { EXPECT_EQ(ibv_destroy_cq(cq), 0); };
  FailEachInTurn({"ibv_create_cq",
                  [&] {
                    make();
                    return ErrnoUnless(cq != nullptr);
                  },
                  destroy});
  FailEachInTurn({"ibv_create_cq_ex",
                  [&] {
                    ibv_cq_init_attr_ex attributes{};
                    attributes.cqe = 100;
                    attributes.channel = channel;
                    ibv_cq_ex* const made = ibv_create_cq_ex(context_, &attributes);
                    if (made != nullptr) cq = ibv_cq_ex_to_cq(made);
                    return ErrnoUnless(made != nullptr);
                  },
                  destroy});
  FailEachInTurn({"ibv_resize_cq", [&] { return ibv_resize_cq(cq, 200); }, destroy, make});
  FailEachInTurn({"ibv_req_notify_cq", [&] { return ibv_req_notify_cq(cq, 0); }, destroy, make});
  FailEachInTurn({"ibv_destroy_cq", [&] { return ibv_destroy_cq(cq); }, [] {}, make});
  EXPECT_EQ(ibv_destroy_comp_channel(channel), 0);

  ibv_srq* srq = nullptr;
  const auto share = [&] {
    ibv_srq_init_attr attributes{};
    attributes.attr = {.max_wr = 4, .max_sge = 1, .srq_limit = 0};
    srq = ibv_create_srq(pd_, &attributes);
  };
  const auto end_sharing = [&] { EXPECT_EQ(ibv_destroy_srq(srq), 0); };
  FailEachInTurn({"ibv_create_srq",
                  [&] {
                    share();
                    return ErrnoUnless(srq != nullptr);
                  },
                  end_sharing});
  FailEachInTurn({"ibv_post_srq_recv",
                  [&] {
                    ibv_sge part{reinterpret_cast<uint64_t>(memory_), 8, mr_->lkey};
                    ibv_recv_wr receive{};
                    receive.sg_list = &part;
                    receive.num_sge = 1;
                    ibv_recv_wr* bad = nullptr;
                    return ibv_post_srq_recv(srq, &receive, &bad);
                  },
                  end_sharing, share});
  FailEachInTurn({"ibv_modify_srq",
                  [&] {
                    ibv_srq_attr attributes{.max_wr = 8, .max_sge = 1, .srq_limit = 1};
                    return ibv_modify_srq(srq, &attributes, IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT);
                  },
                  end_sharing, share});
  FailEachInTurn({"ibv_destroy_srq", [&] { return ibv_destroy_srq(srq); }, [] {}, share});
}

TEST_F(NoMemoryTest, QueuePairs) {
  std::vector<ibv_qp_type> types{IBV_QPT_RC};
  if (IsInfiniband()) types.insert(types.end(), {IBV_QPT_UC, IBV_QPT_UD});
  for (const ibv_qp_type type : types) {
    SCOPED_TRACE(type);
    ibv_qp* qp = nullptr;
    const auto destroy = [&] { EXPECT_EQ(ibv_destroy_qp(qp), 0); };
    FailEachInTurn({"ibv_create_qp",
                    [&] {
                      qp = MakeQp(type);
                      return ErrnoUnless(qp != nullptr);
                    },
                    destroy});
    FailEachInTurn({"ibv_create_qp_ex",
                    [&] {
                      ibv_qp_init_attr_ex attributes{};
                      attributes.send_cq = attributes.recv_cq = cq_;
                      attributes.qp_type = type;
                      attributes.cap.max_send_wr = attributes.cap.max_send_sge = 1;
                      attributes.pd = pd_;
                      attributes.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
                      attributes.send_ops_flags = IBV_QP_EX_WITH_SEND;
                      qp = ibv_create_qp_ex(context_, &attributes);
                      return ErrnoUnless(qp != nullptr);
                    },
                    destroy});
    FailEachInTurn({"ibv_destroy_qp", [&] { return ibv_destroy_qp(qp); }, [] {}, [&] { qp = MakeQp(type); }});
  }
  ibv_qp* qp = nullptr;
  const auto destroy = [&] { EXPECT_EQ(ibv_destroy_qp(qp), 0); };
  const auto in = [&](ibv_qp_state state) {
    return [&, state] {
      qp = MakeQp();
      for (const ibv_qp_state next : {IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS}) {
        if (next > state) return;
        ASSERT_EQ(Change(qp, next), 0);
      }
    };
  };
  FailEachInTurn({"to INIT", [&] { return Change(qp, IBV_QPS_INIT); }, destroy, in(IBV_QPS_RESET)});
  FailEachInTurn({"ibv_query_qp",
                  [&] {
                    ibv_qp_attr attributes{};
                    ibv_qp_init_attr initial{};
                    return ibv_query_qp(qp, &attributes, IBV_QP_STATE, &initial);
                  },
                  destroy, in(IBV_QPS_INIT)});
  FailEachInTurn({"ibv_post_recv",
                  [&] {
                    ibv_recv_wr receive{};
                    ibv_recv_wr* bad = nullptr;
                    return ibv_post_recv(qp, &receive, &bad);
                  },
                  destroy, in(IBV_QPS_INIT)});
  FailEachInTurn({"to ERR", [&] { return Change(qp, IBV_QPS_ERR); }, destroy, in(IBV_QPS_INIT)});
  if (!IsInfiniband()) return;
  FailEachInTurn({"to RTR", [&] { return Change(qp, IBV_QPS_RTR); }, destroy, in(IBV_QPS_INIT)});
  FailEachInTurn({"to RTS", [&] { return Change(qp, IBV_QPS_RTS); }, destroy, in(IBV_QPS_RTR)});
  // Of a QP that is connected to itself and has no Receive, so that the Send waits for ever.
  const auto at_work = [&] {
    in(IBV_QPS_RTS)();
    ibv_sge part{reinterpret_cast<uint64_t>(memory_), 8, mr_->lkey};
    ibv_send_wr send{};
    send.sg_list = &part;
    send.num_sge = 1;
    send.opcode = IBV_WR_SEND;
    send.send_flags = IBV_SEND_SIGNALED;
    ibv_send_wr* bad = nullptr;
    ASSERT_EQ(ibv_post_send(qp, &send, &bad), 0);
  };
  FailEachInTurn({"from RTS to ERR", [&] { return Change(qp, IBV_QPS_ERR); },
                  [&] {
                    // The program hears of the end of what it had posted.
                    EXPECT_EQ(AwaitCompletion(cq_), EIO);
                    destroy();
                  },
                  at_work});
  FailEachInTurn({"from RTS to RESET", [&] { return Change(qp, IBV_QPS_RESET); },
                  [&] {
                    ibv_wc completion{};
                    EXPECT_EQ(ibv_poll_cq(cq_, 1, &completion), 0);
                    destroy();
                  },
                  at_work});
}

// --- Two ends that connect, send and end ---

TEST_F(NoMemoryTest, ProgramsThatConnect) {
  PlayWithEachFailing(Who::kCaller, ENOMEM);
}

TEST_F(NoMemoryTest, TheDevicesThread) {
  PlayWithEachFailing(Who::kOthers, ENOMEM);
}

// Two ids that have made all that they need for a connection, and have not asked for it yet.
class Meeting {
 public:
  // 0, or the errno of what went wrong.
  int Prepare() {
    if ((listening_ = rdma_create_event_channel()) == nullptr) return errno;
    if ((calling_ = rdma_create_event_channel()) == nullptr) return errno;
    if (rdma_create_id(listening_, &listener_, nullptr, RDMA_PS_TCP) != 0) return errno;
    if (rdma_create_id(calling_, &client_, nullptr, RDMA_PS_TCP) != 0) return errno;
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* const to = reinterpret_cast<sockaddr*>(&address);
    if (rdma_bind_addr(listener_, to) != 0 || rdma_listen(listener_, 4) != 0) return errno;
    address.sin_port = rdma_get_src_port(listener_);
    if (rdma_resolve_addr(client_, nullptr, to, kWantPatience) != 0) return errno;
    if (const int error = TakeEvent()) return error;
    if (rdma_resolve_route(client_, kWantPatience) != 0) return errno;
    if (const int error = TakeEvent()) return error;
    ibv_qp_init_attr attributes{};
    attributes.qp_type = IBV_QPT_RC;
    attributes.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    return ErrnoUnless(rdma_create_qp(client_, nullptr, &attributes) == 0);
  }
  int Connect() {
    rdma_conn_param parameters{};
    return ErrnoUnless(rdma_connect(client_, &parameters) == 0);
  }
  // Whether either end has heard something, after waiting for `patience` ms.
  bool HasAnEvent(int patience) {
    pollfd events[] = {{listening_->fd, POLLIN, 0}, {calling_->fd, POLLIN, 0}};
    return poll(events, 2, patience) > 0;
  }
  ~Meeting() {
    if (client_ != nullptr && client_->qp != nullptr) rdma_destroy_qp(client_);
    for (rdma_cm_id* const id : {client_, listener_}) {
      if (id != nullptr) {
        EXPECT_EQ(rdma_destroy_id(id), 0);
      }
    }
    for (rdma_event_channel* const channel : {calling_, listening_}) {
      if (channel != nullptr) rdma_destroy_event_channel(channel);
    }
  }

 private:
  int TakeEvent() {
    rdma_cm_event* event = nullptr;
    if (rdma_get_cm_event(calling_, &event) != 0) return errno;
    const int status = event->status;
    return rdma_ack_cm_event(event) != 0 ? errno : status;
  }

  rdma_event_channel* listening_ = nullptr;
  rdma_event_channel* calling_ = nullptr;
  rdma_cm_id* listener_ = nullptr;
  rdma_cm_id* client_ = nullptr;
};

// No memory for the device's thread, from each request on until so many have failed: what was to be done meanwhile may
// have been lost, but nothing after it is.
void HaveNoneUntil(long failures) {
  for (int number = 0;; ++number) {
    ASSERT_LT(number, kMostFailures);
    const std::string what =
        "allocation " + std::to_string(number) + " and those after it, " + std::to_string(failures) + " in all";
    {
      Meeting meeting;
      ASSERT_EQ(meeting.Prepare(), 0) << what;
      const Failing failing(Who::kOthers, number, kAllThatFollow);
      ASSERT_EQ(meeting.Connect(), 0) << what;
      // A step that is lost asks for no more; then there is nothing to wait for.
      const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(kWantPatience);
      int waits_after_failure = 0;
      while (!meeting.HasAnEvent(1) && Failures() < failures && waits_after_failure < 20) {
        if (HasFailed()) ++waits_after_failure;
        ASSERT_LT(std::chrono::steady_clock::now(), until) << what;
      }
    }
    const bool was_last = !HasFailed();
    ASSERT_EQ(Scene().Play(), 0) << "after " << what;
    if (was_last) {
      EXPECT_GT(number, 0) << "nothing has failed";
      return;
    }
  }
}

TEST_F(NoMemoryTest, TheDevicesThreadWithoutAny) {
  for (const long failures : {1, 3, 20}) HaveNoneUntil(failures);
}

// --- The first use of all, in processes of their own ---

void InChild(const std::string& what, const std::function<int()>& run) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(kWantPatience / 1000);
    _exit(run());
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) < 2) << what << ": status " << status;
}

// What a program does first: 0, or the errno it failed with.
using First = std::function<int()>;

int AskForDevices() {
  ibv_device** const list = ibv_get_device_list(nullptr);
  const int error = ErrnoUnless(list != nullptr);
  if (list != nullptr) ibv_free_device_list(list);
  return error;
}

int ResolveAnAddress() {
  rdma_event_channel* const channel = rdma_create_event_channel();
  if (channel == nullptr) return errno;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  rdma_cm_id* id = nullptr;
  rdma_cm_event* event = nullptr;
  int error = ErrnoUnless(rdma_create_id(channel, &id, nullptr, RDMA_PS_TCP) == 0);
  if (error == 0) {
    error = ErrnoUnless(rdma_resolve_addr(id, nullptr, reinterpret_cast<sockaddr*>(&address), kWantPatience) == 0);
  }
  if (error == 0) error = ErrnoUnless(rdma_get_cm_event(channel, &event) == 0);
  if (event != nullptr) {
    error = event->event == RDMA_CM_EVENT_ADDR_RESOLVED ? 0 : -event->status;
    rdma_ack_cm_event(event);
  }
  if (id != nullptr) rdma_destroy_id(id);
  rdma_destroy_event_channel(channel);
  return error;
}

// Exit codes: 0, all well; 1, nothing more to fail; else what went wrong.
int StartWith(const First& first, long number, long count) {
  int error = 0;
  {
    const Failing failing(Who::kCaller, number, count);
    error = first();
  }
  const bool has_failed = HasFailed();
  // EAGAIN: a thread could not be made, of which pthread_create(3) says nothing else.
  if (error != 0 && error != ENOMEM && error != EAGAIN) return 2;
  if (error != 0 && !has_failed) return 3;
  // It can be started still.
  if (first() != 0) return 4;
  ibv_device** const list = ibv_get_device_list(nullptr);
  if (list == nullptr) return 5;
  ibv_context* const context = ibv_open_device(list[0]);
  if (context == nullptr || ibv_close_device(context) != 0) return 6;
  return has_failed ? 0 : 1;
}

void StartWithEachFailing(const First& first, long count) {
  for (int number = 0; number < kMostFailures; ++number) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(kWantPatience / 1000);
      _exit(StartWith(first, number, count));
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) < 2) << "allocation " << number << ": status " << status;
    if (WEXITSTATUS(status) == 1) return;
  }
  FAIL() << "there is no end to it";
}

// Named so that they run first: once this process has had a device, much of what children begin with is there.
TEST(NoMemoryStartDeathTest, TheDeviceIsStartedWhenThereIsMemory) {
  StartWithEachFailing(AskForDevices, 1);
  StartWithEachFailing(ResolveAnAddress, 1);
}

// More than the reserve, and fewer than a destructor waits for.
TEST(NoMemoryStartDeathTest, TheDeviceIsStartedWhenThereIsMemoryAgain) {
  StartWithEachFailing(AskForDevices, 1000);
  StartWithEachFailing(ResolveAnAddress, 1000);
}

TEST(NoMemoryStartDeathTest, TheDeviceIsStartedWhenThereIsAThread) {
  InChild("threads", [] {
    threads_fail = true;
    if (ibv_get_device_list(nullptr) != nullptr || errno != EAGAIN) return 2;
    rdma_event_channel* const channel = rdma_create_event_channel();
    if (channel != nullptr || errno != EAGAIN) return 3;
    threads_fail = false;
    ibv_device** const list = ibv_get_device_list(nullptr);
    if (list == nullptr) return 4;
    ibv_free_device_list(list);
    return 0;
  });
}

// What the process does last is no call of the program's, and no exception may leave it either.
TEST(NoMemoryEndTest, AProcessEndsAsItMeantTo) {
  constexpr int kMeant = 7;
  void* const page =
      mmap(nullptr, sizeof(std::atomic<bool>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(page, MAP_FAILED);
  told_of_failures = new (page) std::atomic<bool>(false);
  int number = 0;
  for (bool has_failed = true; has_failed; ++number) {
    ASSERT_LT(number, kMostFailures);
    told_of_failures->store(false);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(kWantPatience / 1000);
      ibv_device** const list = ibv_get_device_list(nullptr);
      if (list == nullptr) _exit(1);
      ibv_free_device_list(list);
      const Failing failing(Who::kCaller, number, kMostFailures);
      exit(kMeant);  // NOLINT: its handlers are what is tried, and the child has one thread of its own
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kMeant)
        << "from allocation " << number << ": status " << status;
    has_failed = told_of_failures->load();
  }
  EXPECT_GT(number, 1) << "nothing has failed";
  told_of_failures = nullptr;
  munmap(page, sizeof(std::atomic<bool>));
}

}  // namespace
}  // namespace stagecoach::verbs::emulated
