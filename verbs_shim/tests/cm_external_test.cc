// QPs that rdma_cm has not made for their ids: named by number, and taken through their states with what
// rdma_init_qp_attr says; or put into an id by its program.

#include <cerrno>
#include <cstring>
#include <utility>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

class CmExternalTest : public VerbsTest {
 protected:
  // Gives `end` everything but a QP of its id's.
  static QueuePair MakeQp(Endpoint* end) {
    end->pd = std::move(AllocatePd(end->id->verbs).value());
    end->send_cq = std::move(CreateCq(end->id->verbs, 16).value());
    end->receive_cq = std::move(CreateCq(end->id->verbs, 16).value());
    ibv_qp_init_attr attributes{};
    attributes.send_cq = end->send_cq.get();
    attributes.recv_cq = end->receive_cq.get();
    attributes.qp_type = IBV_QPT_RC;
    attributes.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    auto qp = CreateQp(end->pd.get(), &attributes);
    EXPECT_TRUE(qp) << qp.error().ToString();
    return std::move(*qp);
  }

  static void Modify(rdma_cm_id* id, ibv_qp* qp, ibv_qp_state to) {
    ibv_qp_attr attributes{};
    attributes.qp_state = to;
    int mask = 0;
    ASSERT_EQ(rdma_init_qp_attr(id, &attributes, &mask), 0) << to << ": " << std::strerror(errno);
    EXPECT_EQ(ibv_modify_qp(qp, &attributes, mask), 0) << "to state " << to << " with mask " << mask;
  }

  static rdma_conn_param ParametersOf(const QueuePair& qp) {
    rdma_conn_param parameters{};
    parameters.qp_num = qp->qp_num;
    parameters.responder_resources = parameters.initiator_depth = 1;
    parameters.retry_count = parameters.rnr_retry_count = 7;
    return parameters;
  }
};

TEST_F(CmExternalTest, QpsNamedByNumberAreConnected) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  QueuePair client_qp = MakeQp(&pair.client);
  ASSERT_NO_FATAL_FAILURE(Modify(pair.client.id.get(), client_qp.get(), IBV_QPS_INIT));
  rdma_conn_param parameters = ParametersOf(client_qp);
  ASSERT_EQ(rdma_connect(pair.client.id.get(), &parameters), 0) << std::strerror(errno);

  CmEvent request = pair.server.NextEvent();
  ASSERT_TRUE(request);
  ASSERT_EQ(request->event, RDMA_CM_EVENT_CONNECT_REQUEST);
  pair.server.id = CmId(request->id);
  request = {};
  world().ActAsServer();
  QueuePair server_qp = MakeQp(&pair.server);
  for (const ibv_qp_state state : {IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS})
    ASSERT_NO_FATAL_FAILURE(Modify(pair.server.id.get(), server_qp.get(), state));
  Buffer inbox(pair.server.pd.get(), 64);
  ASSERT_EQ(PostReceive(server_qp.get(), 1, {inbox.Sge()}), 0);
  parameters = ParametersOf(server_qp);
  ASSERT_EQ(rdma_accept(pair.server.id.get(), &parameters), 0) << std::strerror(errno);

  if (IsIwarp(pair.client.id.get())) {
    EXPECT_EQ(pair.client.ExpectEvent(RDMA_CM_EVENT_ESTABLISHED), 0);
  } else {
    EXPECT_EQ(pair.client.ExpectEvent(RDMA_CM_EVENT_CONNECT_RESPONSE), 0);
    for (const ibv_qp_state state : {IBV_QPS_RTR, IBV_QPS_RTS})
      ASSERT_NO_FATAL_FAILURE(Modify(pair.client.id.get(), client_qp.get(), state));
    EXPECT_EQ(rdma_establish(pair.client.id.get()), 0) << std::strerror(errno);
  }
  EXPECT_EQ(pair.server.ExpectEvent(RDMA_CM_EVENT_ESTABLISHED), 0);
  EXPECT_EQ(pair.client.id->qp, nullptr);
  {
    Buffer outbox(pair.client.pd.get(), 64);
    outbox.Fill("by number");
    ASSERT_EQ(Post(client_qp.get(), {.wr_id = 2, .sges = {outbox.Sge()}}), 0);
    ExpectCompletion(pair.client.send_cq.get(), 2);
    ExpectCompletion(pair.server.receive_cq.get(), 1);
    EXPECT_EQ(inbox.Text(9), "by number");
    EXPECT_EQ(inbox.Deregister(), 0);
  }
  ASSERT_EQ(rdma_disconnect(pair.client.id.get()), 0);
  EXPECT_EQ(pair.server.ExpectEvent(RDMA_CM_EVENT_DISCONNECTED), 0);
  if (!IsIwarp(pair.server.id.get())) {
    EXPECT_EQ(rdma_disconnect(pair.server.id.get()), 0);
  }
  EXPECT_EQ(pair.client.ExpectEvent(RDMA_CM_EVENT_DISCONNECTED), 0);
}

// A message from client to server.
void ExpectTraffic(Pair* pair) {
  Buffer inbox(pair->server.pd.get(), 64);
  Buffer outbox(pair->client.pd.get(), 64);
  outbox.Fill("arrives");
  ASSERT_EQ(PostReceive(pair->server.qp(), 1, {inbox.Sge()}), 0);
  ASSERT_EQ(Post(pair->client.qp(), {.wr_id = 2, .sges = {outbox.Sge()}}), 0);
  ExpectCompletion(pair->client.send_cq.get(), 2);
  ExpectCompletion(pair->server.receive_cq.get(), 1);
  EXPECT_EQ(inbox.Text(7), "arrives");
}

// uDAPL's consumers choose a QP before they know which request it will answer.
TEST_F(CmExternalTest, TheQpOfAnotherIdIsConnectedWhereAnIdNamesIt) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  // Makes everything of `end` on `other`, and gives its QP to the id of `end`.
  const auto prepare_on = [](Endpoint* end, CmId* other, const EndpointOptions& options) {
    end->id.swap(*other);
    end->Prepare(options);
    end->id.swap(*other);
    ASSERT_NE((*other)->qp, nullptr);
    end->id->qp = std::exchange((*other)->qp, nullptr);
  };
  world().ActAsClient();
  CmId other_client = std::move(CreateCmId(pair.client.channel.get()).value());
  sockaddr_storage there = pair.ListenAddress();
  ASSERT_EQ(rdma_resolve_addr(other_client.get(), nullptr, reinterpret_cast<sockaddr*>(&there), 2000), 0);
  EXPECT_EQ(pair.client.ExpectEvent(RDMA_CM_EVENT_ADDR_RESOLVED), 0);
  ASSERT_NO_FATAL_FAILURE(prepare_on(&pair.client, &other_client, pair.client_options));
  ASSERT_EQ(rdma_connect(pair.client.id.get(), &pair.client_options.connection), 0) << std::strerror(errno);
  CmEvent request = pair.server.NextEvent();
  ASSERT_TRUE(request);
  ASSERT_EQ(request->event, RDMA_CM_EVENT_CONNECT_REQUEST);
  pair.server.id = CmId(request->id);
  request = {};

  world().ActAsServer();
  CmId other_server = std::move(CreateCmId(pair.server.channel.get()).value());
  sockaddr_storage here = world().ServerAddress();
  ASSERT_EQ(rdma_bind_addr(other_server.get(), reinterpret_cast<sockaddr*>(&here)), 0);
  ASSERT_NO_FATAL_FAILURE(prepare_on(&pair.server, &other_server, pair.server_options));
  ASSERT_EQ(rdma_accept(pair.server.id.get(), &pair.server_options.connection), 0) << std::strerror(errno);
  EXPECT_EQ(pair.client.ExpectEvent(RDMA_CM_EVENT_ESTABLISHED), 0);
  EXPECT_EQ(pair.server.ExpectEvent(RDMA_CM_EVENT_ESTABLISHED), 0);
  // The ids that it was made for are no part of the connection.
  EXPECT_EQ(other_client.Destroy(), 0);
  EXPECT_EQ(other_server.Destroy(), 0);
  ExpectTraffic(&pair);
}

TEST_F(CmExternalTest, TheQpOfAConnectionIsNotForAnotherOne) {
  Pair pair;
  pair.Connect();
  Pair second;
  ASSERT_NO_FATAL_FAILURE(second.ResolveTo(pair.ListenAddress()));
  second.client.id->qp = pair.client.id->qp;
  EXPECT_EQ(rdma_connect(second.client.id.get(), &pair.client_options.connection), -1);
  EXPECT_EQ(errno, EINVAL);
  second.client.id->qp = nullptr;
  ExpectTraffic(&pair);
}

TEST_F(CmExternalTest, AQpThatIsPutIntoAnIdIsTakenThroughItsStates) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  QueuePair client_qp = MakeQp(&pair.client);
  pair.client.id->qp = client_qp.get();
  ASSERT_EQ(rdma_connect(pair.client.id.get(), &pair.client_options.connection), 0) << std::strerror(errno);
  CmEvent request = pair.server.NextEvent();
  ASSERT_TRUE(request);
  ASSERT_EQ(request->event, RDMA_CM_EVENT_CONNECT_REQUEST);
  pair.server.id = CmId(request->id);
  request = {};
  world().ActAsServer();
  QueuePair server_qp = MakeQp(&pair.server);
  pair.server.id->qp = server_qp.get();
  ASSERT_EQ(rdma_accept(pair.server.id.get(), &pair.server_options.connection), 0) << std::strerror(errno);
  EXPECT_EQ(pair.client.ExpectEvent(RDMA_CM_EVENT_ESTABLISHED), 0);
  EXPECT_EQ(pair.server.ExpectEvent(RDMA_CM_EVENT_ESTABLISHED), 0);
  ExpectTraffic(&pair);
  pair.client.id->qp = pair.server.id->qp = nullptr;  // they are not the ids' to destroy
}

TEST_F(CmExternalTest, AttributesForInitNameThePortAndTheRights) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  int mask = 0;
  ASSERT_EQ(rdma_init_qp_attr(pair.client.id.get(), &attributes, &mask), 0);
  EXPECT_EQ(mask & (IBV_QP_STATE | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
            IBV_QP_STATE | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  EXPECT_EQ(attributes.qp_state, IBV_QPS_INIT);
  EXPECT_EQ(attributes.port_num, pair.client.id->port_num);
  EXPECT_EQ(attributes.pkey_index, 0);
}

TEST_F(CmExternalTest, AttributesNeedADeviceAndAStateThatConnectingReaches) {
  Pair pair;
  pair.Listen();
  world().ActAsClient();
  auto idle = CreateCmId(pair.client.channel.get());
  ASSERT_TRUE(idle);
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  int mask = 0;
  EXPECT_EQ(rdma_init_qp_attr(idle->get(), &attributes, &mask), -1);
  EXPECT_EQ(errno, EINVAL);
  // Before that nobody looks at the state.
  ASSERT_NO_FATAL_FAILURE(pair.Resolve());
  ASSERT_NO_FATAL_FAILURE(pair.Request());
  ASSERT_NO_FATAL_FAILURE(pair.Accept());
  attributes.qp_state = IBV_QPS_SQD;
  EXPECT_EQ(rdma_init_qp_attr(pair.client.id.get(), &attributes, &mask), -1);
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(CmExternalTest, EstablishingIsNotForManagedQps) {
  auto pair = Pair::Connected();
  EXPECT_EQ(rdma_establish(pair->client.id.get()), -1);
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(CmExternalTest, EnhancedConnectionEstablishmentIsForExternalQps) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  rdma_cm_id* id = pair.client.id.get();
  ibv_ece ece{.vendor_id = 7, .options = 7, .comp_mask = 0};
  EXPECT_EQ(rdma_set_local_ece(id, &ece), 0);
  ibv_ece remote{.vendor_id = 9, .options = 9, .comp_mask = 9};
  EXPECT_EQ(rdma_get_remote_ece(id, &remote), 0);
  EXPECT_EQ(remote.vendor_id, 0u);
  EXPECT_EQ(remote.options, 0u);
  EXPECT_EQ(remote.comp_mask, 0u);
  EXPECT_EQ(rdma_set_local_ece(id, nullptr), -1);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(rdma_get_remote_ece(id, nullptr), -1);
  EXPECT_EQ(errno, EINVAL);
  pair.client.Prepare(pair.client_options);
  EXPECT_EQ(rdma_set_local_ece(id, &ece), -1);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(rdma_get_remote_ece(id, &remote), -1);
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(CmExternalTest, ARejectionForEceIsARejection) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  pair.Request();
  world().ActAsServer();
  ASSERT_EQ(rdma_reject_ece(pair.server.id.get(), "other", 5), 0) << std::strerror(errno);
  CmEvent event = pair.client.NextEvent();
  ASSERT_TRUE(event);
  EXPECT_EQ(event->event, RDMA_CM_EVENT_REJECTED);
  EXPECT_EQ(PrivateData(event->param.conn).substr(0, 5), "other");
}

}  // namespace
}  // namespace stagecoach::verbs
