// Forked children: what they inherit is dead and closed, what the parent has goes on, and they may have devices of
// their own.

#include <dirent.h>
#include <fcntl.h>
#include <rdma/rdma_verbs.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

// How many descriptors of this process are sockets, epolls or eventfds.
int CountKernelObjects() {
  DIR* const directory = opendir("/proc/self/fd");
  int count = 0;
  while (const dirent* entry = readdir(directory)) {
    char target[64] = "";
    if (readlinkat(dirfd(directory), entry->d_name, target, sizeof target - 1) <= 0) continue;
    const std::string_view text = target;
    count += text.substr(0, 7) == "socket:" || text == "anon_inode:[eventfd]";
  }
  closedir(directory);
  return count;
}

class ForkTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    pair = Pair::Connected();
    ours = std::make_unique<Buffer>(pair->client.pd.get(), 4096);
    theirs = std::make_unique<Buffer>(pair->server.pd.get(), 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  }
  void TearDown() override {
    ours.reset();
    theirs.reset();
    pair.reset();
    VerbsTest::TearDown();
  }
  // Runs `body` in a child; it returns what the child is to exit with, and has a line written for what is wrong.
  template <typename Body>
  static void ExpectChild(Body body) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) _exit(body());
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
    EXPECT_EQ(WEXITSTATUS(status), 0);
  }
  void ExpectTraffic() {
    for (uint64_t i = 0; i < 20; ++i) {
      ours->FillPattern(static_cast<uint32_t>(i));
      ASSERT_EQ(PostReceive(pair->server.qp(), i, {theirs->Sge()}), 0);
      ASSERT_EQ(Post(pair->client.qp(), {.wr_id = i, .sges = {ours->Sge()}}), 0);
      ExpectCompletion(pair->server.receive_cq.get(), i);
      ExpectCompletion(pair->client.send_cq.get(), i);
      ASSERT_TRUE(std::equal(ours->bytes().begin(), ours->bytes().end(), theirs->bytes().begin()));
    }
  }

  std::unique_ptr<Pair> pair;
  std::unique_ptr<Buffer> ours;
  std::unique_ptr<Buffer> theirs;
};

TEST_F(ForkTest, EachCallOnAnInheritedObjectAnswersThatThereIsNoDevice) {
  ExpectTraffic();
  ExpectChild([&] {
    int wrong = 0;
    const auto expect = [&](bool holds, const char* what) {
      if (holds) return;
      std::fprintf(stderr, "in the child: %s\n", what);
      wrong = 1;
    };
    Endpoint& end = pair->client;
    ibv_context* const context = end.context();
    ibv_qp* const qp = end.qp();
    ibv_sge sge = ours->Sge();
    ibv_send_wr send{};
    send.sg_list = &sge;
    send.num_sge = 1;
    send.opcode = IBV_WR_SEND;
    ibv_send_wr* bad_send = nullptr;
    expect(ibv_post_send(qp, &send, &bad_send) == ENODEV && bad_send == &send, "ibv_post_send");
    ibv_recv_wr receive{};
    ibv_recv_wr* bad_receive = nullptr;
    expect(ibv_post_recv(qp, &receive, &bad_receive) == ENODEV && bad_receive == &receive, "ibv_post_recv");
    ibv_wc completion;
    expect(ibv_poll_cq(end.send_cq.get(), 1, &completion) < 0, "ibv_poll_cq");
    expect(ibv_req_notify_cq(end.send_cq.get(), 0) == ENODEV, "ibv_req_notify_cq");
    ibv_device_attr device{};
    expect(ibv_query_device(context, &device) == ENODEV, "ibv_query_device");
    ibv_port_attr port{};
    expect(ibv_query_port(context, 1, &port) == ENODEV, "ibv_query_port");
    errno = 0;
    expect(ibv_alloc_pd(context) == nullptr && errno == ENODEV, "ibv_alloc_pd");
    errno = 0;
    expect(ibv_reg_mr(end.pd.get(), ours->bytes().data(), 16, 0) == nullptr && errno == ENODEV, "ibv_reg_mr");
    expect(ibv_dereg_mr(ours->mr()) == ENODEV, "ibv_dereg_mr");
    errno = 0;
    expect(ibv_create_cq(context, 8, nullptr, nullptr, 0) == nullptr && errno == ENODEV, "ibv_create_cq");
    ibv_ah_attr address{};
    errno = 0;
    expect(ibv_create_ah(end.pd.get(), &address) == nullptr && errno == ENODEV, "ibv_create_ah");
    errno = 0;
    expect(ibv_init_ah_from_wc(context, 1, &completion, nullptr, &address) == -1 && errno == ENODEV,
           "ibv_init_ah_from_wc");
    ibv_qp_attr attributes{};
    ibv_qp_init_attr initial{};
    expect(ibv_query_qp(qp, &attributes, IBV_QP_STATE, &initial) == ENODEV, "ibv_query_qp");
    attributes.qp_state = IBV_QPS_ERR;
    expect(ibv_modify_qp(qp, &attributes, IBV_QP_STATE) == ENODEV, "ibv_modify_qp");
    expect(ibv_destroy_qp(qp) == ENODEV, "ibv_destroy_qp");
    expect(ibv_destroy_cq(end.send_cq.get()) == ENODEV, "ibv_destroy_cq");
    ibv_cq* cq = nullptr;
    void* cq_context = nullptr;
    errno = 0;
    expect(ibv_get_cq_event(end.send_channel.get(), &cq, &cq_context) == -1 && errno == ENODEV, "ibv_get_cq_event");
    ibv_async_event event{};
    errno = 0;
    expect(ibv_get_async_event(context, &event) == -1 && errno == ENODEV, "ibv_get_async_event");
    return wrong;
  });
  ExpectTraffic();
}

TEST_F(ForkTest, SoDoesEachCallOfTheConnectionManager) {
  ExpectChild([&] {
    rdma_cm_id* const id = pair->client.id.get();
    rdma_event_channel* const channel = pair->client.channel.get();
    rdma_event_channel* const own_channel = rdma_create_event_channel();
    rdma_cm_id* own_id = nullptr;
    if (own_channel == nullptr || rdma_create_id(own_channel, &own_id, nullptr, RDMA_PS_TCP) != 0) return 2;
    sockaddr_storage storage = world().ServerAddress();
    auto* const address = reinterpret_cast<sockaddr*>(&storage);
    rdma_conn_param parameters{};
    ibv_qp_attr change{};
    change.qp_state = IBV_QPS_INIT;
    int mask = 0;
    ibv_qp_init_attr qp{};
    ibv_qp_init_attr_ex extended_qp{};
    ibv_srq_init_attr srq{};
    ibv_srq_init_attr_ex extended_srq{};
    uint8_t service_class = 0;
    ibv_ece ece{};
    rdma_cm_join_mc_attr_ex group{};
    rdma_cm_id* made = nullptr;
    rdma_cm_event* event = nullptr;
    const struct {
      const char* name;
      std::function<int()> call;
    } calls[] = {
        {"rdma_create_id", [&] { return rdma_create_id(channel, &made, nullptr, RDMA_PS_TCP); }},
        {"rdma_bind_addr", [&] { return rdma_bind_addr(id, address); }},
        {"rdma_resolve_addr", [&] { return rdma_resolve_addr(id, nullptr, address, 1); }},
        {"rdma_resolve_route", [&] { return rdma_resolve_route(id, 1); }},
        {"rdma_create_qp", [&] { return rdma_create_qp(id, nullptr, &qp); }},
        {"rdma_create_qp_ex", [&] { return rdma_create_qp_ex(id, &extended_qp); }},
        {"rdma_create_srq", [&] { return rdma_create_srq(id, nullptr, &srq); }},
        {"rdma_create_srq_ex", [&] { return rdma_create_srq_ex(id, &extended_srq); }},
        {"rdma_connect", [&] { return rdma_connect(id, &parameters); }},
        {"rdma_listen", [&] { return rdma_listen(id, 1); }},
        {"rdma_get_request", [&] { return rdma_get_request(id, &made); }},
        {"rdma_accept", [&] { return rdma_accept(id, &parameters); }},
        {"rdma_reject", [&] { return rdma_reject(id, nullptr, 0); }},
        {"rdma_reject_ece", [&] { return rdma_reject_ece(id, nullptr, 0); }},
        {"rdma_establish", [&] { return rdma_establish(id); }},
        {"rdma_notify", [&] { return rdma_notify(id, IBV_EVENT_COMM_EST); }},
        {"rdma_disconnect", [&] { return rdma_disconnect(id); }},
        {"rdma_init_qp_attr", [&] { return rdma_init_qp_attr(id, &change, &mask); }},
        {"rdma_set_option", [&] { return rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &service_class, 1); }},
        {"rdma_set_local_ece", [&] { return rdma_set_local_ece(id, &ece); }},
        {"rdma_get_remote_ece", [&] { return rdma_get_remote_ece(id, &ece); }},
        {"rdma_join_multicast", [&] { return rdma_join_multicast(id, address, nullptr); }},
        {"rdma_join_multicast_ex", [&] { return rdma_join_multicast_ex(id, &group, nullptr); }},
        {"rdma_leave_multicast", [&] { return rdma_leave_multicast(id, address); }},
        {"rdma_migrate_id", [&] { return rdma_migrate_id(id, own_channel); }},
        {"rdma_migrate_id to a parent's channel", [&] { return rdma_migrate_id(own_id, channel); }},
        {"rdma_get_cm_event", [&] { return rdma_get_cm_event(channel, &event); }},
        {"rdma_destroy_id", [&] { return rdma_destroy_id(id); }},
    };
    int wrong = 0;
    for (const auto& [name, call] : calls) {
      errno = 0;
      const int result = call();
      if (result == -1 && errno == ENODEV) continue;
      std::fprintf(stderr, "in the child: %s: %d, errno %d\n", name, result, errno);
      wrong = 1;
    }
    // These have no answer, and leave what is the parent's as it is.
    ibv_qp* const its_qp = id->qp;
    rdma_destroy_qp(id);
    rdma_destroy_srq(id);
    rdma_destroy_ep(id);
    rdma_destroy_event_channel(channel);
    if (id->qp != its_qp) wrong = 1;
    if (rdma_destroy_id(own_id) != 0) wrong = 1;
    rdma_destroy_event_channel(own_channel);
    return wrong;
  });
  ExpectTraffic();
}

TEST_F(ForkTest, NothingOfTheParentsIsOpenInAChild) {
  EXPECT_GT(CountKernelObjects(), 0);
  // Asio's own are not among them: they name nobody.
  constexpr int kOfAsio = 1;
  const int channel = pair->client.send_channel->fd;
  const int async = pair->client.context()->async_fd;
  ExpectChild([&] {
    if (fcntl(channel, F_GETFD) >= 0 || fcntl(async, F_GETFD) >= 0) return 2;
    return CountKernelObjects() <= kOfAsio ? 0 : 3;
  });
  EXPECT_GE(fcntl(channel, F_GETFD), 0);
  ExpectTraffic();
}

// With all that runs at exit.
TEST_F(ForkTest, AChildThatExitsLeavesTheParentsConnectionsWhole) {
  for (int i = 0; i < 3; ++i) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) std::exit(0);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status));
    ExpectTraffic();
  }
}

TEST_F(ForkTest, AProgramThatIsStartedInheritsNothing) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    execl("/bin/sh", "sh", "-c", "! ls -l /proc/self/fd | grep -q 'socket:\\|eventfd\\|eventpoll'", nullptr);
    _exit(9);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  ExpectTraffic();
}

TEST_F(ForkTest, AChildHasADeviceOfItsOwn) {
  ExpectChild([] {
    auto own = Pair::Connected();
    Buffer from(own->client.pd.get(), 64);
    Buffer to(own->server.pd.get(), 64);
    from.Fill("from the child");
    if (PostReceive(own->server.qp(), 1, {to.Sge()}) != 0) return 2;
    if (Post(own->client.qp(), {.wr_id = 2, .sges = {from.Sge()}}) != 0) return 3;
    ExpectCompletion(own->server.receive_cq.get(), 1);
    return to.Text(14) == "from the child" && !testing::Test::HasFailure() ? 0 : 4;
  });
  ExpectTraffic();
}

}  // namespace
}  // namespace stagecoach::verbs
