// What a device that fails for good does to QPs of each kind that were at work, and what their peers see of it. No
// program can bring that about, hence in simulation alone; that nothing more can be made on it is in
// verbs_shim/emulated/device_events_test.cc.

#include <cerrno>
#include <memory>
#include <utility>
#include <vector>

#include "emu/world/world.h"
#include "verbs_shim/tests/hand_connected.h"
#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

// What happened, and to which QP, if it was one.
using Event = std::pair<ibv_event_type, const ibv_qp*>;

std::vector<Event> EventsOf(ibv_context* context) {
  SetNonBlocking(context->async_fd);
  std::vector<Event> events;
  for (ibv_async_event event{}; ibv_get_async_event(context, &event) == 0;) {
    events.emplace_back(event.event_type, event.event_type == IBV_EVENT_DEVICE_FATAL ? nullptr : event.element.qp);
    ibv_ack_async_event(&event);
  }
  return events;
}

// That of the server.
void FailTheDevice() {
  TheSurroundings().ActAsServer();
  emu::World::Current().current_host().nic().Fail();
}

void ExpectFlushed(ibv_cq* cq, uint64_t first, uint64_t last) {
  for (uint64_t wr_id = first; wr_id <= last; ++wr_id) ExpectCompletion(cq, wr_id, IBV_WC_WR_FLUSH_ERR);
  EXPECT_TRUE(NoCompletion(cq));
}

// --- Connected by the manager, on any device ---

class DeviceFailureTest : public VerbsTest {};

TEST_F(DeviceFailureTest, AConnectedQpFailsBehindItsDeviceAndFlushesInOrder) {
  auto pair = Pair::Connected();
  Endpoint& server = pair->server;
  Buffer ours(server.pd.get(), 64, kAccess);
  Buffer theirs(pair->client.pd.get(), 64, kAccess);
  world().ActAsServer();
  const Context idle = std::move(OpenDevice().value());
  EventsOf(server.context());
  for (uint64_t wr_id = 1; wr_id <= 3; ++wr_id) ASSERT_EQ(PostReceive(server.qp(), wr_id, {ours.Sge()}), 0);
  // They wait for an answer, and what is behind them for them.
  for (uint64_t wr_id = 1; wr_id <= 3; ++wr_id) {
    ASSERT_EQ(Post(server.qp(), {.wr_id = wr_id,
                                 .opcode = IBV_WR_RDMA_READ,
                                 .sges = {ours.Sge()},
                                 .remote_address = theirs.address(),
                                 .rkey = theirs.rkey()}),
              0);
  }
  ASSERT_EQ(Post(server.qp(), {.wr_id = 4, .flags = IBV_SEND_SIGNALED | IBV_SEND_FENCE, .sges = {ours.Sge()}}), 0);
  FailTheDevice();
  EXPECT_EQ(EventsOf(server.context()),
            (std::vector<Event>{{IBV_EVENT_DEVICE_FATAL, nullptr}, {IBV_EVENT_QP_FATAL, server.qp()}}));
  EXPECT_EQ(EventsOf(idle.get()), (std::vector<Event>{{IBV_EVENT_DEVICE_FATAL, nullptr}}));
  EXPECT_EQ(StateOf(server.qp()), IBV_QPS_ERR);
  ExpectFlushed(server.receive_cq.get(), 1, 3);
  ExpectFlushed(server.send_cq.get(), 1, 4);
  // As any QP in that state.
  ASSERT_EQ(PostReceive(server.qp(), 5, {ours.Sge()}), 0);
  ASSERT_EQ(Post(server.qp(), {.wr_id = 6, .sges = {ours.Sge()}}), 0);
  ExpectFlushed(server.receive_cq.get(), 5, 5);
  ExpectFlushed(server.send_cq.get(), 6, 6);
}

TEST_F(DeviceFailureTest, TheSharedQueueIsLeftAloneAndItsLastReceiveIsTold) {
  EndpointOptions options;
  options.srq_wr = 8;
  auto pair = Pair::Connected(options);
  Endpoint& server = pair->server;
  Buffer ours(server.pd.get(), 64, kAccess);
  EventsOf(server.context());
  ASSERT_EQ(PostReceive(server.srq.get(), 1, {ours.Sge()}), 0);
  FailTheDevice();
  EXPECT_EQ(EventsOf(server.context()), (std::vector<Event>{{IBV_EVENT_DEVICE_FATAL, nullptr},
                                                            {IBV_EVENT_QP_FATAL, server.qp()},
                                                            {IBV_EVENT_QP_LAST_WQE_REACHED, server.qp()}}));
  EXPECT_TRUE(NoCompletion(server.receive_cq.get()));
}

TEST_F(DeviceFailureTest, ThePeerOfAStreamIsDisconnected) {
  auto pair = Pair::Connected();
  if (!pair->server.IsIwarp()) GTEST_SKIP() << "skipped: a QP that failed says nothing to its peer";
  Buffer theirs(pair->client.pd.get(), 64, kAccess);
  ASSERT_EQ(PostReceive(pair->client.qp(), 1, {theirs.Sge()}), 0);
  FailTheDevice();
  EXPECT_EQ(pair->client.ExpectEvent(RDMA_CM_EVENT_DISCONNECTED), 0);
  ExpectFlushed(pair->client.receive_cq.get(), 1, 1);
  ExpectState(pair->client.qp(), IBV_QPS_ERR);
  EXPECT_EQ(pair->server.ExpectEvent(RDMA_CM_EVENT_DISCONNECTED), -ECONNRESET);
}

// What goes does, as the program of a failed device must tidy up, too.
TEST_F(DeviceFailureTest, ConnectionsAreEndedAndDestroyedAsEver) {
  auto pair = Pair::Connected();
  FailTheDevice();
  ASSERT_EQ(pair->server.Disconnect(), 0);
  pair->client.ExpectEvent(RDMA_CM_EVENT_DISCONNECTED);
  ASSERT_EQ(pair->client.Disconnect(), 0);
  pair->server.ExpectEvent(RDMA_CM_EVENT_DISCONNECTED);
  rdma_destroy_qp(pair->server.id.get());
  EXPECT_EQ(pair->server.id.Destroy(), 0);
  EXPECT_EQ(pair->listener.Destroy(), 0);
}

// --- Connected by hand, on InfiniBand ---

class HandDeviceFailureTest : public HandTest {
 protected:
  static HandOptions Of(ibv_qp_type type) {
    HandOptions options;
    options.type = type;
    if (type == IBV_QPT_UC) options.access = IBV_ACCESS_REMOTE_WRITE;
    return options;
  }
  // Fails the device, and expects that the QP of `end` hears of it behind the device, and flushes these Receives.
  static void ExpectFailure(HandEnd& end, uint64_t receives) {
    EventsOf(end.context.get());
    FailTheDevice();
    EXPECT_EQ(EventsOf(end.context.get()),
              (std::vector<Event>{{IBV_EVENT_DEVICE_FATAL, nullptr}, {IBV_EVENT_QP_FATAL, end.qp.get()}}));
    EXPECT_EQ(end.State(), IBV_QPS_ERR);
    if (receives > 0) ExpectFlushed(end.receive_cq.get(), 1, receives);
  }
};

TEST_F(HandDeviceFailureTest, ThePeerOfAReliableQpUsesUpItsRetries) {
  HandOptions impatient = Of(IBV_QPT_RC);
  impatient.timeout = 10;  // 4 ms
  impatient.retry_count = 3;
  auto pair = HandPair::Connected(Of(IBV_QPT_RC), impatient);
  Buffer ours(pair->server.pd.get(), 64, kAccess);
  Buffer theirs(pair->client.pd.get(), 64, kAccess);
  ASSERT_EQ(PostReceive(pair->server.qp.get(), 1, {ours.Sge()}), 0);
  // Both have something under way.
  ASSERT_EQ(Post(pair->client.qp.get(), {.wr_id = 2, .sges = {theirs.Sge()}}), 0);
  ASSERT_EQ(Post(pair->client.qp.get(), {.wr_id = 3, .sges = {theirs.Sge()}}), 0);
  ASSERT_EQ(Post(pair->server.qp.get(), {.wr_id = 4, .sges = {ours.Sge()}}), 0);
  ExpectFailure(pair->server, 1);
  ExpectFlushed(pair->server.send_cq.get(), 4, 4);
  ExpectCompletion(pair->client.send_cq.get(), 2, IBV_WC_RETRY_EXC_ERR);
  ExpectFlushed(pair->client.send_cq.get(), 3, 3);
  EXPECT_EQ(pair->client.State(), IBV_QPS_ERR);
}

TEST_F(HandDeviceFailureTest, ThePeerOfAnUnreliableQpLosesItsMessagesInSilence) {
  auto pair = HandPair::Connected(Of(IBV_QPT_UC), Of(IBV_QPT_UC));
  Buffer ours(pair->server.pd.get(), 64, kAccess);
  Buffer theirs(pair->client.pd.get(), 64, kAccess);
  for (uint64_t wr_id = 1; wr_id <= 2; ++wr_id) {
    ASSERT_EQ(PostReceive(pair->server.qp.get(), wr_id, {ours.Sge()}), 0);
  }
  ExpectFailure(pair->server, 2);
  EXPECT_TRUE(NoCompletion(pair->server.send_cq.get()));
  ASSERT_EQ(Post(pair->client.qp.get(), {.wr_id = 3, .sges = {theirs.Sge()}}), 0);
  ExpectCompletion(pair->client.send_cq.get(), 3);
  EXPECT_EQ(pair->client.State(), IBV_QPS_RTS);
}

TEST_F(HandDeviceFailureTest, DatagramsThatWaitForAWayAreFlushed) {
  HandEnd client(false, Of(IBV_QPT_UD));
  client.Ready();
  HandEnd server(true, Of(IBV_QPT_UD));
  server.Ready();
  Buffer ours(server.pd.get(), 128, kAccess);
  const AddressHandle ah = server.CreateAh(client.Address());
  ASSERT_TRUE(ah);
  for (uint64_t wr_id = 1; wr_id <= 2; ++wr_id) {
    ASSERT_EQ(PostReceive(server.qp.get(), wr_id, {ours.Sge()}), 0);
    ASSERT_EQ(Post(server.qp.get(), {.wr_id = wr_id,
                                     .sges = {ours.Sge()},
                                     .ah = ah.get(),
                                     .remote_qp = client.qp->qp_num,
                                     .remote_qkey = client.options.qkey}),
              0);
  }
  ExpectFailure(server, 2);
  ExpectFlushed(server.send_cq.get(), 1, 2);
}

TEST_F(HandDeviceFailureTest, AQpWhoseSendQueueHasFailedBeforeFailsWithIt) {
  auto pair = HandPair::Connected(Of(IBV_QPT_UC), Of(IBV_QPT_UC));
  Buffer ours(pair->server.pd.get(), 64, kAccess);
  ASSERT_EQ(PostReceive(pair->server.qp.get(), 1, {ours.Sge()}), 0);
  ASSERT_EQ(Post(pair->server.qp.get(), {.wr_id = 2, .sges = {{ours.address(), 64, ours.lkey() + 0x100}}}), 0);
  ExpectCompletion(pair->server.send_cq.get(), 2, IBV_WC_LOC_PROT_ERR);
  ASSERT_EQ(pair->server.State(), IBV_QPS_SQE);
  ExpectFailure(pair->server, 1);
  EXPECT_TRUE(NoCompletion(pair->server.send_cq.get()));
}

}  // namespace
}  // namespace stagecoach::verbs
