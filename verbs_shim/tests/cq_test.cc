// Completion queues and channels: arming, events, acknowledgement, overflow, dependencies.

#include <cerrno>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

class CqTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    context = std::move(OpenDevice().value());
  }
  void TearDown() override {
    context = {};
    VerbsTest::TearDown();
  }
  Context context;
};

TEST_F(CqTest, HasAtLeastTheEntriesAskedFor) {
  auto cq = CreateCq(context.get(), 10, this);
  ASSERT_TRUE(cq) << cq.error().ToString();
  EXPECT_GE((*cq)->cqe, 10);
  EXPECT_EQ((*cq)->cq_context, this);
  EXPECT_EQ((*cq)->context, context.get());
  EXPECT_EQ((*cq)->channel, nullptr);
  EXPECT_TRUE(NoCompletion(cq->get()));
}

TEST_F(CqTest, ImpossibleSizesAreInvalid) {
  ibv_device_attr attributes{};
  ASSERT_EQ(ibv_query_device(context.get(), &attributes), 0);
  for (int entries : {0, -1, attributes.max_cqe + 1}) {
    auto cq = CreateCq(context.get(), entries);
    ASSERT_FALSE(cq) << entries;
    EXPECT_EQ(cq.error().error, EINVAL) << entries;
  }
}

TEST_F(CqTest, ImpossibleVectorsAreInvalid) {
  for (int vector : {-1, context->num_comp_vectors}) {
    auto cq = CreateCq(context.get(), 8, nullptr, nullptr, vector);
    ASSERT_FALSE(cq) << vector;
    EXPECT_EQ(cq.error().error, EINVAL);
  }
}

TEST_F(CqTest, AChannelWithACqIsBusy) {
  auto channel = CreateCompletionChannel(context.get());
  ASSERT_TRUE(channel);
  auto cq = CreateCq(context.get(), 8, nullptr, channel->get());
  ASSERT_TRUE(cq);
  EXPECT_EQ(ibv_destroy_comp_channel(channel->get()), EBUSY);
  EXPECT_EQ(cq->Destroy(), 0);
  EXPECT_EQ(channel->Destroy(), 0);
}

TEST_F(CqTest, AnEmptyNonBlockingChannelSaysTryAgain) {
  auto channel = CreateCompletionChannel(context.get());
  ASSERT_TRUE(channel);
  SetNonBlocking((*channel)->fd);
  ibv_cq* cq = nullptr;
  void* cookie = nullptr;
  EXPECT_EQ(ibv_get_cq_event(channel->get(), &cq, &cookie), -1);
  EXPECT_EQ(errno, EAGAIN);
}

TEST_F(CqTest, ResizingKeepsItsWord) {
  auto cq = CreateCq(context.get(), 8);
  ASSERT_TRUE(cq);
  const int error = ibv_resize_cq(cq->get(), 64);
  if (error == EOPNOTSUPP) GTEST_SKIP() << "skipped: the device does not resize CQs";
  ASSERT_EQ(error, 0);
  EXPECT_GE((*cq)->cqe, 64);
  EXPECT_EQ(ibv_resize_cq(cq->get(), 0), EINVAL);
}

class CqTrafficTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    pair = Pair::Connected();
    inbox = std::make_unique<Buffer>(pair->server.pd.get(), 4096);
    outbox = std::make_unique<Buffer>(pair->client.pd.get(), 4096);
  }
  void TearDown() override {
    inbox.reset();
    outbox.reset();
    pair.reset();
    VerbsTest::TearDown();
  }
  void SendOne(uint64_t wr_id, unsigned flags = IBV_SEND_SIGNALED) {
    ASSERT_EQ(PostReceive(pair->server.qp(), wr_id, {inbox->Sge(0, 64)}), 0);
    ASSERT_EQ(Post(pair->client.qp(), {.wr_id = wr_id, .flags = flags, .sges = {outbox->Sge(0, 16)}}), 0);
  }
  // Takes and acknowledges one event.
  void TakeEvent(Endpoint& end, ibv_cq* expected) {
    ibv_comp_channel* channel = expected->channel;
    ASSERT_TRUE(BecomesReadable(channel->fd));
    ibv_cq* cq = nullptr;
    void* cookie = nullptr;
    ASSERT_EQ(ibv_get_cq_event(channel, &cq, &cookie), 0);
    EXPECT_EQ(cq, expected);
    EXPECT_EQ(cookie, &end);
    ibv_ack_cq_events(cq, 1);
  }
  std::unique_ptr<Pair> pair;
  std::unique_ptr<Buffer> inbox;
  std::unique_ptr<Buffer> outbox;
};

TEST_F(CqTrafficTest, AnUnarmedCqRaisesNoEvent) {
  SendOne(1);
  ExpectCompletion(pair->server.receive_cq.get(), 1);
  EXPECT_FALSE(IsReadable(pair->server.receive_channel->fd));
}

TEST_F(CqTrafficTest, OneArmingGivesOneEventWithTheContext) {
  ASSERT_EQ(ibv_req_notify_cq(pair->server.receive_cq.get(), 0), 0);
  SendOne(1);
  SendOne(2);
  TakeEvent(pair->server, pair->server.receive_cq.get());
  ExpectCompletion(pair->server.receive_cq.get(), 1);
  ExpectCompletion(pair->server.receive_cq.get(), 2);
  EXPECT_FALSE(IsReadable(pair->server.receive_channel->fd));
}

TEST_F(CqTrafficTest, ArmedForSolicitedOnlyAnOrdinarySendIsQuiet) {
  ASSERT_EQ(ibv_req_notify_cq(pair->server.receive_cq.get(), 1), 0);
  SendOne(1);
  ExpectCompletion(pair->server.receive_cq.get(), 1);
  EXPECT_FALSE(IsReadable(pair->server.receive_channel->fd));
  SendOne(2, IBV_SEND_SIGNALED | IBV_SEND_SOLICITED);
  TakeEvent(pair->server, pair->server.receive_cq.get());
  ExpectCompletion(pair->server.receive_cq.get(), 2);
}

TEST_F(CqTrafficTest, ArmedForSolicitedOnlyAnErrorIsHeard) {
  ASSERT_EQ(PostReceive(pair->server.qp(), 1, {inbox->Sge(0, 64)}), 0);
  ASSERT_EQ(ibv_req_notify_cq(pair->server.receive_cq.get(), 1), 0);
  world().ActAsClient();
  ASSERT_EQ(pair->client.Disconnect(), 0);
  if (!pair->server.IsIwarp()) {
    pair->server.ExpectDisconnected();
    ASSERT_EQ(pair->server.Disconnect(), 0);
  }
  TakeEvent(pair->server, pair->server.receive_cq.get());
  ExpectCompletion(pair->server.receive_cq.get(), 1, IBV_WC_WR_FLUSH_ERR);
}

// The race every event-driven program has to win: a completion between the last empty poll and the arming is found by
// polling once more after arming; one after the arming raises an event. Whichever way each message falls, none is lost.
TEST_F(CqTrafficTest, NoCompletionIsLostBetweenPollingAndArming) {
  constexpr int kMessages = 300;
  ibv_cq* cq = pair->server.receive_cq.get();
  int received = 0;
  int sent = 0;
  ASSERT_EQ(ibv_req_notify_cq(cq, 0), 0);
  while (received < kMessages) {
    while (sent < kMessages && sent - received < 4) {
      // Room in the send queue comes with completions alone.
      if (sent >= 8) ExpectCompletion(pair->client.send_cq.get(), static_cast<uint64_t>(sent - 8));
      SendOne(static_cast<uint64_t>(sent));
      ++sent;
    }
    ASSERT_TRUE(BecomesReadable(pair->server.receive_channel->fd)) << "lost the wakeup after " << received;
    TakeEvent(pair->server, cq);
    ASSERT_EQ(ibv_req_notify_cq(cq, 0), 0);
    ibv_wc completion{};
    while (ibv_poll_cq(cq, 1, &completion) == 1) {
      ASSERT_EQ(completion.status, IBV_WC_SUCCESS);
      ASSERT_EQ(completion.wr_id, static_cast<uint64_t>(received));
      ++received;
    }
  }
}

TEST_F(CqTrafficTest, DestroyingWaitsUntilEventsAreAcknowledged) {
  auto second = std::move(pair->server.receive_cq);
  ASSERT_EQ(ibv_req_notify_cq(second.get(), 0), 0);
  SendOne(1);
  ASSERT_TRUE(BecomesReadable(pair->server.receive_channel->fd));
  ibv_cq* cq = nullptr;
  void* cookie = nullptr;
  ASSERT_EQ(ibv_get_cq_event(pair->server.receive_channel.get(), &cq, &cookie), 0);
  pair->server.DestroyQp();
  ExpectWaits([&] { EXPECT_EQ(second.Destroy(), 0); }, [&] { ibv_ack_cq_events(cq, 1); });
}

TEST_F(CqTrafficTest, ACqInUseByAQpIsBusy) {
  EXPECT_EQ(ibv_destroy_cq(pair->server.receive_cq.get()), EBUSY);
  EXPECT_EQ(ibv_destroy_cq(pair->server.send_cq.get()), EBUSY);
}

TEST_F(CqTrafficTest, PollTakesAsManyAsAskedInOrder) {
  for (uint64_t i = 0; i < 10; ++i) SendOne(i);
  ibv_cq* cq = pair->server.receive_cq.get();
  uint64_t next = 0;
  ibv_wc completions[4];
  ASSERT_TRUE(world().Until([&] {
    const int n = ibv_poll_cq(cq, 4, completions);
    EXPECT_GE(n, 0);
    EXPECT_LE(n, 4);
    for (int i = 0; i < n; ++i) EXPECT_EQ(completions[i].wr_id, next++);
    return next == 10;
  }));
}

TEST_F(CqTrafficTest, ResizingKeepsTheCompletionsThatWaitInIt) {
  constexpr uint64_t kWaiting = 5;
  ibv_cq* const cq = pair->server.receive_cq.get();
  Buffer theirs(pair->server.pd.get(), 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
  Buffer ours(pair->client.pd.get(), 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  for (uint64_t i = 0; i < kWaiting; ++i) SendOne(i);
  // A Read is answered behind them: then they have all been delivered.
  ASSERT_EQ(Post(pair->client.qp(), {.wr_id = 50,
                                     .opcode = IBV_WR_RDMA_READ,
                                     .sges = {ours.Sge(0, 8)},
                                     .remote_address = theirs.address(),
                                     .rkey = theirs.rkey()}),
            0);
  for (uint64_t i = 0; i < kWaiting; ++i) ExpectCompletion(pair->client.send_cq.get(), i);
  ExpectCompletion(pair->client.send_cq.get(), 50);
  const int entries = cq->cqe;
  const int error = ibv_resize_cq(cq, entries + 100);
  if (error == EOPNOTSUPP) GTEST_SKIP() << "skipped: the device does not resize CQs";
  ASSERT_EQ(error, 0);
  EXPECT_GE(cq->cqe, entries + 100);
  EXPECT_EQ(ibv_resize_cq(cq, static_cast<int>(kWaiting) - 2), EINVAL) << "what waits would have no room";
  EXPECT_GE(cq->cqe, entries + 100);
  ASSERT_EQ(ibv_resize_cq(cq, static_cast<int>(kWaiting)), 0);
  for (uint64_t i = 0; i < kWaiting; ++i) {
    ibv_wc completion{};
    ASSERT_EQ(ibv_poll_cq(cq, 1, &completion), 1) << i;
    EXPECT_EQ(completion.wr_id, i);
    EXPECT_EQ(completion.status, IBV_WC_SUCCESS);
    EXPECT_EQ(completion.byte_len, 16u);
  }
  EXPECT_TRUE(NoCompletion(cq));
  SendOne(60);
  ExpectCompletion(cq, 60);
}

// --- Overflow ---

class CqOverflowTest : public VerbsTest {};

TEST_F(CqOverflowTest, AnOverrunCqRaisesAnAsynchronousEvent) {
  EndpointOptions small;
  small.cq_entries = 4;
  auto pair = Pair::Connected(small);
  Buffer inbox(pair->server.pd.get(), 64);
  Buffer outbox(pair->client.pd.get(), 64);
  const int entries = pair->server.receive_cq->cqe;
  ibv_context* context = pair->server.context();
  for (int i = 0; i < entries + 1; ++i) ASSERT_EQ(PostReceive(pair->server.qp(), i, {inbox.Sge()}), 0);
  for (int i = 0; i < entries + 1; ++i)
    ASSERT_EQ(Post(pair->client.qp(), {.wr_id = 9, .flags = 0, .sges = {outbox.Sge()}}), 0);
  ASSERT_TRUE(BecomesReadable(context->async_fd));
  ibv_async_event event{};
  ASSERT_EQ(ibv_get_async_event(context, &event), 0);
  EXPECT_EQ(event.event_type, IBV_EVENT_CQ_ERR);
  EXPECT_EQ(event.element.cq, pair->server.receive_cq.get());
  ibv_ack_async_event(&event);
  // The QP's own event may follow.
  SetNonBlocking(context->async_fd);
  while (ibv_get_async_event(context, &event) == 0) ibv_ack_async_event(&event);
}

}  // namespace
}  // namespace stagecoach::verbs
