// Services for datagrams (RDMA_PS_UDP): who asks learns the QP, its key and the way there; nobody is connected.

#include <arpa/inet.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

constexpr size_t kRoute = sizeof(ibv_grh);
constexpr uint32_t kUsualQkey = 0x01234567;

struct AhDeleter {
  void operator()(ibv_ah* ah) const { EXPECT_EQ(ibv_destroy_ah(ah), 0); }
};
struct IdDeleter {
  void operator()(rdma_cm_id* id) const {
    if (id->qp != nullptr) rdma_destroy_qp(id);
    EXPECT_EQ(rdma_destroy_id(id), 0);
  }
};
using Id = std::unique_ptr<rdma_cm_id, IdDeleter>;

class CmUdTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    world().ActAsServer();
    const Context context = std::move(OpenDevice().value());
    if (context->device->transport_type == IBV_TRANSPORT_IWARP) {
      GTEST_SKIP() << "skipped: an iWARP device has no datagrams";
    }
    server.channel = std::move(CreateEventChannel().value());
    world().ActAsClient();
    client.channel = std::move(CreateEventChannel().value());
  }

  void TearDown() override {
    server.channel = {};
    client.channel = {};
    VerbsTest::TearDown();
  }

  Id NewId(Endpoint* end) {
    rdma_cm_id* id = nullptr;
    EXPECT_EQ(rdma_create_id(end->channel.get(), &id, nullptr, RDMA_PS_UDP), 0) << std::strerror(errno);
    return Id(id);
  }
  Id Listening() {
    world().ActAsServer();
    Id id = NewId(&server);
    sockaddr_storage address = world().ServerAddress();
    EXPECT_EQ(rdma_bind_addr(id.get(), reinterpret_cast<sockaddr*>(&address)), 0);
    EXPECT_EQ(rdma_listen(id.get(), 4), 0) << std::strerror(errno);
    return id;
  }
  Id Routed(sockaddr_storage to) {
    world().ActAsClient();
    Id id = NewId(&client);
    EXPECT_EQ(rdma_resolve_addr(id.get(), nullptr, reinterpret_cast<sockaddr*>(&to), 2000), 0);
    EXPECT_EQ(client.ExpectEvent(RDMA_CM_EVENT_ADDR_RESOLVED), 0);
    EXPECT_EQ(rdma_resolve_route(id.get(), 2000), 0);
    EXPECT_EQ(client.ExpectEvent(RDMA_CM_EVENT_ROUTE_RESOLVED), 0);
    return id;
  }
  static void MakeQp(rdma_cm_id* id) {
    ibv_qp_init_attr attributes{};
    attributes.qp_type = IBV_QPT_UD;
    attributes.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    ASSERT_EQ(rdma_create_qp(id, nullptr, &attributes), 0) << std::strerror(errno);
  }
  // The request that comes next, with its private data.
  Id Request(std::string* private_data = nullptr) {
    CmEvent event = server.NextEvent();
    EXPECT_TRUE(event);
    if (!event) return nullptr;
    EXPECT_EQ(event->event, RDMA_CM_EVENT_CONNECT_REQUEST) << rdma_event_str(event->event);
    const rdma_ud_param& told = event->param.ud;
    if (private_data != nullptr)
      private_data->assign(static_cast<const char*>(told.private_data), told.private_data_len);
    return Id(event->id);
  }

  Endpoint server;
  Endpoint client;
};

TEST_F(CmUdTest, WhoAsksLearnsWhereToSend) {
  const Id listener = Listening();
  const Id asking = Routed(listener->route.addr.src_storage);
  EXPECT_EQ(asking->ps, RDMA_PS_UDP);
  EXPECT_EQ(asking->qp_type, IBV_QPT_UD);
  ASSERT_NO_FATAL_FAILURE(MakeQp(asking.get()));
  EXPECT_EQ(asking->qp->state, IBV_QPS_RTS);
  rdma_conn_param parameters{};
  parameters.private_data = "who";
  parameters.private_data_len = 3;
  ASSERT_EQ(rdma_connect(asking.get(), &parameters), 0) << std::strerror(errno);

  std::string question;
  const Id serving = Request(&question);
  ASSERT_NE(serving, nullptr);
  EXPECT_EQ(question.size(), 180u);
  EXPECT_EQ(question.substr(0, 4), std::string("who\0", 4));
  world().ActAsServer();
  ASSERT_NO_FATAL_FAILURE(MakeQp(serving.get()));
  std::vector<std::byte> room(kRoute + 64);
  auto inbox = RegisterMemory(serving->pd, room.data(), room.size(), IBV_ACCESS_LOCAL_WRITE);
  ASSERT_TRUE(inbox);
  ASSERT_EQ(PostReceive(serving->qp, 7, {{reinterpret_cast<uint64_t>(room.data()), kRoute + 64, (*inbox)->lkey}}), 0);
  parameters = {};
  parameters.private_data = "here";
  parameters.private_data_len = 4;
  parameters.qp_num = serving->qp->qp_num;
  ASSERT_EQ(rdma_accept(serving.get(), &parameters), 0) << std::strerror(errno);

  CmEvent event = client.NextEvent();
  ASSERT_TRUE(event);
  ASSERT_EQ(event->event, RDMA_CM_EVENT_ESTABLISHED) << rdma_event_str(event->event);
  const rdma_ud_param& told = event->param.ud;
  EXPECT_EQ(told.qp_num, serving->qp->qp_num);
  EXPECT_EQ(told.qkey, kUsualQkey);
  EXPECT_EQ(told.private_data_len, 136);
  EXPECT_EQ(std::memcmp(told.private_data, "here", 5), 0);
  // There is nothing to be established at this end.
  EXPECT_FALSE(server.EventWaiting());

  world().ActAsClient();
  ibv_ah_attr way = told.ah_attr;
  const std::unique_ptr<ibv_ah, AhDeleter> ah(ibv_create_ah(asking->pd, &way));
  ASSERT_NE(ah, nullptr) << std::strerror(errno);
  {
    Buffer outbox(asking->pd, 64);
    outbox.Fill("a datagram");
    ASSERT_EQ(Post(asking->qp, {.wr_id = 8,
                                .sges = {outbox.Sge(0, 10)},
                                .ah = ah.get(),
                                .remote_qp = told.qp_num,
                                .remote_qkey = told.qkey}),
              0);
    ExpectCompletion(asking->qp->send_cq, 8);
    EXPECT_EQ(ExpectCompletion(serving->qp->recv_cq, 7).byte_len, kRoute + 10);
    EXPECT_EQ(std::memcmp(room.data() + kRoute, "a datagram", 10), 0);
  }
}

TEST_F(CmUdTest, AQpIsNeededForAnAnswerAlone) {
  const Id listener = Listening();
  const Id asking = Routed(listener->route.addr.src_storage);
  rdma_conn_param parameters{};
  ASSERT_EQ(rdma_connect(asking.get(), &parameters), 0) << std::strerror(errno);
  const Id serving = Request();
  ASSERT_NE(serving, nullptr);
  world().ActAsServer();
  ASSERT_NO_FATAL_FAILURE(MakeQp(serving.get()));
  EXPECT_EQ(rdma_accept(serving.get(), &parameters), 0) << std::strerror(errno);
  CmEvent event = client.NextEvent();
  ASSERT_TRUE(event);
  EXPECT_EQ(event->event, RDMA_CM_EVENT_ESTABLISHED);
  EXPECT_EQ(event->param.ud.qp_num, serving->qp->qp_num);
}

TEST_F(CmUdTest, ARejectedRequestIsUnreachable) {
  const Id listener = Listening();
  const Id asking = Routed(listener->route.addr.src_storage);
  rdma_conn_param parameters{};
  ASSERT_EQ(rdma_connect(asking.get(), &parameters), 0);
  const Id serving = Request();
  ASSERT_NE(serving, nullptr);
  world().ActAsServer();
  ASSERT_EQ(rdma_reject(serving.get(), "no", 2), 0) << std::strerror(errno);
  constexpr int kRejected = 2;  // SIDR_REP's status
  EXPECT_EQ(client.ExpectEvent(RDMA_CM_EVENT_UNREACHABLE), kRejected);
}

TEST_F(CmUdTest, APortWithoutAServiceIsUnreachable) {
  const Id listener = Listening();
  const Id asking = Routed(world().RefusingAddress());
  rdma_conn_param parameters{};
  ASSERT_EQ(rdma_connect(asking.get(), &parameters), 0);
  constexpr int kUnsupported = 1;
  EXPECT_EQ(client.ExpectEvent(RDMA_CM_EVENT_UNREACHABLE), kUnsupported);
}

TEST_F(CmUdTest, ConnectionsAndDatagramsHavePortsOfTheirOwn) {
  const Id listener = Listening();
  world().ActAsServer();
  sockaddr_storage address = listener->route.addr.src_storage;
  auto connected = CreateCmId(server.channel.get());
  ASSERT_TRUE(connected);
  EXPECT_EQ(rdma_bind_addr(connected->get(), reinterpret_cast<sockaddr*>(&address)), 0) << std::strerror(errno);
  const Id second = NewId(&server);
  EXPECT_EQ(rdma_bind_addr(second.get(), reinterpret_cast<sockaddr*>(&address)), -1);
  EXPECT_EQ(errno, EADDRINUSE);
  // Nobody takes connections on it yet.
  Pair pair;
  pair.ResolveTo(address);
  pair.client.Prepare(pair.client_options);
  ASSERT_EQ(rdma_connect(pair.client.id.get(), &pair.client_options.connection), 0);
  EXPECT_NE(pair.client.ExpectEvent(RDMA_CM_EVENT_REJECTED), 0);
}

// Who answers is told nothing more.
TEST_F(CmUdTest, SynchronousIdsWaitForAnAnswerAndNotAfterGivingOne) {
  const auto synchronous = [] {
    rdma_cm_id* id = nullptr;
    EXPECT_EQ(rdma_create_id(nullptr, &id, nullptr, RDMA_PS_UDP), 0) << std::strerror(errno);
    return Id(id);
  };
  world().ActAsServer();
  const Id listener = synchronous();
  sockaddr_storage address = world().ServerAddress();
  ASSERT_EQ(rdma_bind_addr(listener.get(), reinterpret_cast<sockaddr*>(&address)), 0);
  ASSERT_EQ(rdma_listen(listener.get(), 4), 0) << std::strerror(errno);
  uint32_t serving_qp = 0;
  Id serving;
  world().SideBySide(
      [&] {
        rdma_cm_id* request = nullptr;
        ASSERT_EQ(rdma_get_request(listener.get(), &request), 0) << std::strerror(errno);
        serving.reset(request);
        ASSERT_NO_FATAL_FAILURE(MakeQp(request));
        serving_qp = request->qp->qp_num;
        rdma_conn_param parameters{};
        ASSERT_EQ(rdma_accept(request, &parameters), 0) << std::strerror(errno);
        // The request may still stand there, and nothing else.
        EXPECT_TRUE(request->event == nullptr || request->event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
      },
      [&] {
        const Id asking = synchronous();
        sockaddr_storage there = listener->route.addr.src_storage;
        ASSERT_EQ(rdma_resolve_addr(asking.get(), nullptr, reinterpret_cast<sockaddr*>(&there), 2000), 0);
        ASSERT_EQ(rdma_resolve_route(asking.get(), 2000), 0);
        rdma_conn_param parameters{};
        ASSERT_EQ(rdma_connect(asking.get(), &parameters), 0) << std::strerror(errno);
        ASSERT_NE(asking->event, nullptr);
        EXPECT_EQ(asking->event->event, RDMA_CM_EVENT_ESTABLISHED);
        EXPECT_EQ(asking->event->param.ud.qp_num, serving_qp);
      });
}

TEST_F(CmUdTest, ThereIsNoConnectionToEnd) {
  const Id listener = Listening();
  const Id asking = Routed(listener->route.addr.src_storage);
  rdma_conn_param parameters{};
  ASSERT_EQ(rdma_connect(asking.get(), &parameters), 0);
  const Id serving = Request();
  ASSERT_NE(serving, nullptr);
  world().ActAsServer();
  ASSERT_NO_FATAL_FAILURE(MakeQp(serving.get()));
  ASSERT_EQ(rdma_accept(serving.get(), &parameters), 0);
  EXPECT_EQ(client.ExpectEvent(RDMA_CM_EVENT_ESTABLISHED), 0);
  EXPECT_EQ(rdma_disconnect(asking.get()), -1);
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(CmUdTest, OtherQpsThanThoseOfDatagramsAreRefused) {
  const Id listener = Listening();
  const Id asking = Routed(listener->route.addr.src_storage);
  ibv_qp_init_attr attributes{};
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  EXPECT_EQ(rdma_create_qp(asking.get(), nullptr, &attributes), -1);
  EXPECT_EQ(errno, EINVAL);
}

}  // namespace
}  // namespace stagecoach::verbs
