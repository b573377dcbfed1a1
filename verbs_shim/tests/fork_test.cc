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
#include <type_traits>

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
  Endpoint& end = pair->client;
  ibv_context* const context = end.context();
  ibv_qp* const qp = end.qp();
  ibv_pd* const pd = end.pd.get();
  ibv_cq* const cq = end.send_cq.get();
  // What the connection does not have, in the making or not made yet when the process forks.
  const SharedQueue srq = CreateSrq(pd, 4);
  auto window = AllocateMw(pd, IBV_MW_TYPE_1);
  ibv_cq_init_attr_ex wanted{};
  wanted.cqe = 8;
  ibv_cq_ex* const extended_cq = ibv_create_cq_ex(context, &wanted);
  ibv_qp_init_attr_ex to_make{};
  to_make.send_cq = to_make.recv_cq = cq;
  to_make.qp_type = IBV_QPT_RC;
  to_make.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 16};
  to_make.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  to_make.pd = pd;
  to_make.send_ops_flags = IBV_QP_EX_WITH_SEND;
  QueuePair made(ibv_create_qp_ex(context, &to_make));
  ASSERT_TRUE(srq && window && extended_cq != nullptr && made);
  // A handle to nowhere in particular, where the device has any.
  ibv_ah_attr address{};
  address.port_num = 1;
  address.is_global = 1;
  ASSERT_EQ(ibv_query_gid(context, 1, 0, &address.grh.dgid), 0);
  ibv_ah* const ah = ibv_create_ah(pd, &address);
  ASSERT_EQ(ah == nullptr, end.IsIwarp());

  ExpectChild([&] {
    ibv_sge sge = ours->Sge();
    ibv_send_wr send{};
    send.sg_list = &sge;
    send.num_sge = 1;
    send.opcode = IBV_WR_SEND;
    ibv_send_wr* bad_send = nullptr;
    ibv_recv_wr receive{};
    ibv_recv_wr* bad_receive = nullptr;
    ibv_wc completion{};
    ibv_device_attr device{};
    ibv_device_attr_ex extended_device{};
    ibv_port_attr port{};
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_ERR;
    ibv_qp_init_attr initial{};
    initial.send_cq = initial.recv_cq = cq;
    initial.qp_type = IBV_QPT_RC;
    ibv_srq_init_attr srq_initial{};
    srq_initial.attr.max_wr = 1;
    ibv_srq_attr srq_attributes{};
    ibv_mw_bind bind{};
    bind.bind_info = {.mr = ours->mr(), .addr = ours->address(), .length = 8, .mw_access_flags = 0};
    ibv_gid gid{};
    ibv_gid_entry entry{};
    __be16 pkey = 0;
    ibv_values_ex values{};
    ibv_poll_cq_attr poll{};
    ibv_cq* with_event = nullptr;
    void* cq_context = nullptr;
    ibv_async_event event{};
    void* const memory = ours->bytes().data();
    ibv_qp_ex* const builder = ibv_qp_to_qp_ex(made.get());

    // What a call says is wrong: an errno returned, or null or a negative number and errno.
    const auto error = [](auto call) {
      errno = 0;
      const auto answer = call();
      if constexpr (std::is_pointer_v<decltype(answer)>) {
        return answer == nullptr ? errno : 0;
      } else {
        return answer == -1 ? errno : static_cast<int>(answer < 0 ? -answer : answer);
      }
    };
    int wrong = 0;
    const auto expect = [&](const char* what, auto call) {
      const int said = error(call);
      if (said == ENODEV) return;
      std::fprintf(stderr, "in the child: %s: %d\n", what, said);
      wrong = 1;
    };
    expect("ibv_post_send", [&] { return ibv_post_send(qp, &send, &bad_send); });
    expect("ibv_post_recv", [&] { return ibv_post_recv(qp, &receive, &bad_receive); });
    if (bad_send != &send || bad_receive != &receive) wrong = 1;
    expect("ibv_post_srq_recv", [&] { return ibv_post_srq_recv(srq.get(), &receive, &bad_receive); });
    expect("ibv_poll_cq", [&] { return ibv_poll_cq(cq, 1, &completion); });
    expect("ibv_req_notify_cq", [&] { return ibv_req_notify_cq(cq, 0); });
    expect("ibv_start_poll", [&] { return ibv_start_poll(extended_cq, &poll); });
    expect("ibv_next_poll", [&] { return ibv_next_poll(extended_cq); });
    ibv_end_poll(extended_cq);
    ibv_wr_start(builder);
    builder->wr_flags = 0;
    ibv_wr_send(builder);
    ibv_wr_set_inline_data(builder, memory, 8);
    expect("ibv_wr_complete", [&] { return ibv_wr_complete(builder); });
    ibv_wr_start(builder);
    ibv_wr_abort(builder);
    expect("ibv_query_device", [&] { return ibv_query_device(context, &device); });
    expect("ibv_query_device_ex", [&] { return ibv_query_device_ex(context, nullptr, &extended_device); });
    expect("ibv_query_port", [&] { return ibv_query_port(context, 1, &port); });
    expect("ibv_query_gid", [&] { return ibv_query_gid(context, 1, 0, &gid); });
    expect("ibv_query_gid_ex", [&] { return ibv_query_gid_ex(context, 1, 0, &entry, 0); });
    expect("ibv_query_gid_table", [&] { return ibv_query_gid_table(context, &entry, 1, 0); });
    expect("ibv_query_pkey", [&] { return ibv_query_pkey(context, 1, 0, &pkey); });
    expect("ibv_get_pkey_index", [&] { return ibv_get_pkey_index(context, 1, 0xffff); });
    expect("ibv_query_rt_values_ex", [&] { return ibv_query_rt_values_ex(context, &values); });
    expect("ibv_alloc_pd", [&] { return ibv_alloc_pd(context); });
    expect("ibv_dealloc_pd", [&] { return ibv_dealloc_pd(pd); });
    expect("ibv_reg_mr", [&] { return ibv_reg_mr(pd, memory, 16, 0); });
    expect("ibv_reg_mr_iova", [&] { return ibv_reg_mr_iova(pd, memory, 16, ours->address(), 0); });
    expect("ibv_rereg_mr", [&] {
      return ibv_rereg_mr(ours->mr(), IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, 0) == 0 ? 0 : errno;
    });
    expect("ibv_dereg_mr", [&] { return ibv_dereg_mr(ours->mr()); });
    expect("ibv_alloc_mw", [&] { return ibv_alloc_mw(pd, IBV_MW_TYPE_1); });
    expect("ibv_bind_mw", [&] { return ibv_bind_mw(qp, window->get(), &bind); });
    expect("ibv_dealloc_mw", [&] { return ibv_dealloc_mw(window->get()); });
    expect("ibv_create_comp_channel", [&] { return ibv_create_comp_channel(context); });
    expect("ibv_destroy_comp_channel", [&] { return ibv_destroy_comp_channel(end.send_channel.get()); });
    expect("ibv_get_cq_event", [&] { return ibv_get_cq_event(end.send_channel.get(), &with_event, &cq_context); });
    expect("ibv_create_cq", [&] { return ibv_create_cq(context, 8, nullptr, nullptr, 0); });
    expect("ibv_create_cq_ex", [&] { return ibv_create_cq_ex(context, &wanted); });
    expect("ibv_resize_cq", [&] { return ibv_resize_cq(cq, 8); });
    expect("ibv_destroy_cq", [&] { return ibv_destroy_cq(cq); });
    ibv_ack_cq_events(cq, 1);
    expect("ibv_create_srq", [&] { return ibv_create_srq(pd, &srq_initial); });
    expect("ibv_modify_srq", [&] { return ibv_modify_srq(srq.get(), &srq_attributes, IBV_SRQ_LIMIT); });
    expect("ibv_query_srq", [&] { return ibv_query_srq(srq.get(), &srq_attributes); });
    expect("ibv_destroy_srq", [&] { return ibv_destroy_srq(srq.get()); });
    expect("ibv_create_qp", [&] { return ibv_create_qp(pd, &initial); });
    expect("ibv_create_qp_ex", [&] { return ibv_create_qp_ex(context, &to_make); });
    expect("ibv_query_qp", [&] { return ibv_query_qp(qp, &attributes, IBV_QP_STATE, &initial); });
    attributes.qp_state = IBV_QPS_ERR;
    expect("ibv_modify_qp", [&] { return ibv_modify_qp(qp, &attributes, IBV_QP_STATE); });
    expect("ibv_destroy_qp", [&] { return ibv_destroy_qp(qp); });
    expect("ibv_create_ah", [&] { return ibv_create_ah(pd, &address); });
    expect("ibv_init_ah_from_wc", [&] { return ibv_init_ah_from_wc(context, 1, &completion, nullptr, &address); });
    expect("ibv_create_ah_from_wc", [&] { return ibv_create_ah_from_wc(pd, &completion, nullptr, 1); });
    if (ah != nullptr) expect("ibv_destroy_ah", [&] { return ibv_destroy_ah(ah); });
    expect("ibv_get_async_event", [&] { return ibv_get_async_event(context, &event); });
    expect("ibv_close_device", [&] { return ibv_close_device(context); });
    return wrong;
  });
  if (ah != nullptr) {
    EXPECT_EQ(ibv_destroy_ah(ah), 0);
  }
  EXPECT_EQ(ibv_destroy_cq(ibv_cq_ex_to_cq(extended_cq)), 0);
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
