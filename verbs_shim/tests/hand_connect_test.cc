// How two QPs find each other by number and GID alone, and what ibv_modify_qp makes of bad directions.

#include <cerrno>
#include <cstring>
#include <set>

#include "verbs_shim/tests/hand_connected.h"

namespace stagecoach::verbs {
namespace {

using HandConnectTest = HandTest;

void ExpectTraffic(HandPair& pair) {
  Buffer from(pair.client.pd.get(), 32);
  Buffer to(pair.server.pd.get(), 32);
  from.Fill("hello");
  ASSERT_EQ(PostReceive(pair.server.qp.get(), 1, {to.Sge()}), 0);
  ASSERT_EQ(Post(pair.client.qp.get(), {.wr_id = 2, .sges = {from.Sge()}}), 0);
  ExpectCompletion(pair.server.receive_cq.get(), 1);
  ExpectCompletion(pair.client.send_cq.get(), 2);
  EXPECT_EQ(to.Text(5), "hello");
}

TEST_F(HandConnectTest, EitherEndMayBeReadyFirst) {
  for (const bool server_first : {true, false}) {
    HandPair pair;
    HandEnd& first = server_first ? pair.server : pair.client;
    HandEnd& second = server_first ? pair.client : pair.server;
    ASSERT_NO_FATAL_FAILURE(first.Connect(second.Address()));
    ASSERT_NO_FATAL_FAILURE(second.Connect(first.Address()));
    ExpectTraffic(pair);
  }
}

TEST_F(HandConnectTest, AnEndThatIsReadyMuchLaterIsFoundAllTheSame) {
  for (const bool server_first : {true, false}) {
    HandPair pair;
    HandEnd& first = server_first ? pair.server : pair.client;
    HandEnd& second = server_first ? pair.client : pair.server;
    ASSERT_NO_FATAL_FAILURE(first.Connect(second.Address()));
    // More than all its attempts to reach a QP that is not in RTR.
    if (!world().Elapse(120s)) GTEST_SKIP() << "skipped: much later is not for real time";
    ASSERT_NO_FATAL_FAILURE(second.Connect(first.Address()));
    ExpectTraffic(pair);
  }
}

TEST_F(HandConnectTest, AReceiverInRtrHearsThatTheConnectionIsThere) {
  HandPair pair;
  ASSERT_EQ(pair.server.ToInit(), 0);
  ASSERT_EQ(pair.client.ToInit(), 0);
  ASSERT_EQ(pair.server.ToRtr(pair.client.Address()), 0);
  ASSERT_EQ(pair.client.ToRtr(pair.server.Address()), 0);
  ASSERT_EQ(pair.client.ToRts(), 0);
  ExpectTraffic(pair);
  EXPECT_TRUE(ExpectAsyncEvent(pair.server.context.get(), IBV_EVENT_COMM_EST, pair.server.qp.get()));
  EXPECT_EQ(pair.server.State(), IBV_QPS_RTR);
  ExpectTraffic(pair);
  EXPECT_EQ(CountAsyncEvents(pair.server.context.get(), IBV_EVENT_COMM_EST), 0) << "once is enough";
  ASSERT_EQ(pair.server.ToRts(), 0);
}

// A target need not send: it serves all there is from RTR on, and does nothing for it.
TEST_F(HandConnectTest, AnEndInRtrServesWritesReadsAndAtomics) {
  HandPair pair;
  ASSERT_EQ(pair.server.ToInit(), 0);
  ASSERT_EQ(pair.client.ToInit(), 0);
  ASSERT_EQ(pair.server.ToRtr(pair.client.Address()), 0);
  ASSERT_EQ(pair.client.ToRtr(pair.server.Address()), 0);
  ASSERT_EQ(pair.client.ToRts(), 0);
  Buffer theirs(pair.server.pd.get(), 64,
                IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
  Buffer ours(pair.client.pd.get(), 64);
  const auto post = [&](ibv_wr_opcode opcode, size_t size) {
    ASSERT_EQ(Post(pair.client.qp.get(), {.wr_id = 1,
                                          .opcode = opcode,
                                          .sges = {ours.Sge(0, size)},
                                          .remote_address = theirs.address(),
                                          .rkey = theirs.rkey(),
                                          .compare_add = 1}),
              0);
    ExpectCompletion(pair.client.send_cq.get(), 1);
  };
  ours.Fill("written");
  ASSERT_NO_FATAL_FAILURE(post(IBV_WR_RDMA_WRITE, 8));
  EXPECT_EQ(theirs.Text(7), "written");
  ASSERT_NO_FATAL_FAILURE(post(IBV_WR_ATOMIC_FETCH_AND_ADD, 8));
  EXPECT_EQ(ours.Text(7), "written");
  ASSERT_NO_FATAL_FAILURE(post(IBV_WR_RDMA_READ, 64));
  EXPECT_EQ(ours.Text(7), "xritten") << "one more in its first byte";
  EXPECT_EQ(Post(pair.server.qp.get(), {}), EINVAL) << "to send it is not ready";
}

TEST_F(HandConnectTest, AnEndThatIsReadyToSendKnowsThatTheConnectionIsThere) {
  HandPair pair;
  pair.Connect();
  ExpectTraffic(pair);
  ASSERT_NO_FATAL_FAILURE(pair.ExpectPassage());
  for (const HandEnd* end : {&pair.server, &pair.client}) {
    EXPECT_EQ(CountAsyncEvents(end->context.get(), IBV_EVENT_COMM_EST), 0);
  }
}

TEST_F(HandConnectTest, ManyPairsAreKeptApart) {
  std::vector<std::unique_ptr<HandPair>> pairs;
  for (int i = 0; i < 12; ++i) pairs.push_back(HandPair::Connected());
  for (const auto& pair : pairs) ExpectTraffic(*pair);
  for (const auto& pair : pairs) ExpectTraffic(*pair);
}

// RoCE has no local identifiers to name a peer by, on whatever host it is.
TEST_F(HandConnectTest, WithoutAGlobalRouteThereIsNoWayToAPeer) {
  for (const ibv_qp_type type : {IBV_QPT_RC, IBV_QPT_UC}) {
    HandOptions options;
    options.type = type;
    HandPair pair(options, options);
    ASSERT_EQ(pair.client.ToInit(), 0);
    ibv_qp_attr attributes = pair.client.RtrAttributes(pair.server.Address());
    attributes.ah_attr.is_global = 0;
    attributes.ah_attr.dlid = 1;
    EXPECT_EQ(ibv_modify_qp(pair.client.qp.get(), &attributes, pair.client.RtrMask()), EINVAL);
    EXPECT_EQ(pair.client.State(), IBV_QPS_INIT);
    attributes.ah_attr.is_global = 1;
    EXPECT_EQ(ibv_modify_qp(pair.client.qp.get(), &attributes, pair.client.RtrMask()), 0);
  }
}

TEST_F(HandConnectTest, NumbersOfQpsHaveTwentyFourBitsAndAreNotTheSpecialOnes) {
  std::set<uint32_t> numbers;
  for (int i = 0; i < 20; ++i) {
    const HandPair pair;
    for (const HandEnd* end : {&pair.server, &pair.client}) {
      EXPECT_GT(end->qp->qp_num, 1u);
      EXPECT_LT(end->qp->qp_num, 0xffffffu);
    }
    numbers.insert(pair.server.qp->qp_num);
  }
  EXPECT_EQ(numbers.size(), 20u) << "a number is used again at once";
}

TEST_F(HandConnectTest, ASilentPeerLeavesTheQpAsItIs) {
  HandPair pair;
  ASSERT_NO_FATAL_FAILURE(pair.client.Connect(pair.server.Address()));
  ASSERT_EQ(pair.server.qp.Destroy(), 0);
  if (!world().Elapse(120s)) GTEST_SKIP() << "skipped: that it stays silent takes its time";
  EXPECT_EQ(pair.client.State(), IBV_QPS_RTS);
  EXPECT_TRUE(NoCompletion(pair.client.send_cq.get()));
}

TEST_F(HandConnectTest, AQpWithAnotherPeerIsNotReached) {
  HandPair pair;
  HandPair other;
  HandOptions impatient;
  impatient.timeout = 14;  // 67 ms
  impatient.retry_count = 1;
  HandEnd stranger(false, impatient);
  pair.Connect();
  ASSERT_NO_FATAL_FAILURE(stranger.Connect(pair.server.Address()));
  Buffer buffer(stranger.pd.get(), 8);
  ASSERT_EQ(Post(stranger.qp.get(), {.wr_id = 1, .sges = {buffer.Sge()}}), 0);
  ExpectCompletion(stranger.send_cq.get(), 1, IBV_WC_RETRY_EXC_ERR);
  ExpectTraffic(pair);
}

TEST_F(HandConnectTest, DirectionsThatLeadNowhereAreInvalid) {
  HandPair pair;
  ASSERT_EQ(pair.client.ToInit(), 0);
  const ibv_qp_attr good = pair.client.RtrAttributes(pair.server.Address());
  const auto refused = [&](auto change) {
    ibv_qp_attr bad = good;
    change(bad);
    return ibv_modify_qp(pair.client.qp.get(), &bad, pair.client.RtrMask());
  };
  EXPECT_EQ(refused([](ibv_qp_attr& bad) { bad.ah_attr.port_num = 2; }), EINVAL);
  ibv_port_attr port{};
  ASSERT_EQ(ibv_query_port(pair.client.context.get(), 1, &port), 0);
  EXPECT_EQ(refused([](ibv_qp_attr& bad) { bad.ah_attr.grh.sgid_index = 200; }),
            port.gid_tbl_len <= 200 ? EINVAL : ENODATA)
      << "beyond the table, or an empty place in it";
  EXPECT_EQ(refused([](ibv_qp_attr& bad) { bad.ah_attr.grh.dgid = {}; }), EINVAL);
  EXPECT_EQ(refused([](ibv_qp_attr& bad) { bad.path_mtu = static_cast<ibv_mtu>(6); }), EINVAL);
  EXPECT_EQ(refused([](ibv_qp_attr& bad) { bad.path_mtu = static_cast<ibv_mtu>(0); }), EINVAL);
  EXPECT_EQ(refused([](ibv_qp_attr& bad) { bad.min_rnr_timer = 32; }), EINVAL);
  EXPECT_EQ(refused([](ibv_qp_attr& bad) { bad.max_dest_rd_atomic = 255; }), EINVAL);
  EXPECT_EQ(pair.client.State(), IBV_QPS_INIT);
  EXPECT_EQ(refused([](ibv_qp_attr&) {}), 0);
}

TEST_F(HandConnectTest, TimersAndCountsBeyondTheirBitsAreInvalid) {
  HandPair pair;
  ASSERT_EQ(pair.client.ToInit(), 0);
  ASSERT_EQ(pair.client.ToRtr(pair.server.Address()), 0);
  const HandOptions good = pair.client.options;
  pair.client.options.retry_count = 8;
  EXPECT_EQ(pair.client.ToRts(), EINVAL);
  pair.client.options = good;
  pair.client.options.rnr_retry = 8;
  EXPECT_EQ(pair.client.ToRts(), EINVAL);
  pair.client.options = good;
  pair.client.options.timeout = 32;
  EXPECT_EQ(pair.client.ToRts(), EINVAL);
  pair.client.options = good;
  EXPECT_EQ(pair.client.ToRts(), 0);
}

TEST_F(HandConnectTest, QueryTellsTheWayThatWasGiven) {
  HandPair pair;
  pair.Connect();
  ibv_qp_attr attributes{};
  ibv_qp_init_attr initial{};
  ASSERT_EQ(ibv_query_qp(pair.client.qp.get(), &attributes, IBV_QP_AV | IBV_QP_DEST_QPN, &initial), 0);
  EXPECT_EQ(attributes.dest_qp_num, pair.server.qp->qp_num);
  EXPECT_EQ(attributes.ah_attr.is_global, 1);
  const ibv_gid wanted = pair.server.Address().gid;
  EXPECT_EQ(std::memcmp(&attributes.ah_attr.grh.dgid, &wanted, sizeof(wanted)), 0);
  EXPECT_EQ(attributes.ah_attr.grh.sgid_index, pair.client.gid_index);
  EXPECT_EQ(attributes.path_mtu, IBV_MTU_1024);
  EXPECT_EQ(attributes.timeout, pair.client.options.timeout);
}

}  // namespace
}  // namespace stagecoach::verbs
