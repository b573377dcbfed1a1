// Asynchronous events of QPs and CQs, and their acknowledgement.

#include <fcntl.h>

#include <cerrno>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

class AsyncTest : public VerbsTest {
 protected:
  // One more completion than the CQ of `end` holds, by Receives that are flushed.
  void Overrun(Endpoint& end) {
    Buffer inbox(end.pd.get(), 8);
    const int entries = end.receive_cq->cqe;
    for (int i = 0; i <= entries; ++i) ASSERT_EQ(PostReceive(end.qp(), i, {inbox.Sge()}), 0);
    ibv_qp_attr change{};
    change.qp_state = IBV_QPS_ERR;
    ASSERT_EQ(ibv_modify_qp(end.qp(), &change, IBV_QP_STATE), 0);
  }
};

TEST_F(AsyncTest, AnOverrunCqTakesEveryQpOfItDown) {
  EndpointOptions small;
  small.cq_entries = 4;
  auto pair = Pair::Connected(small);
  Endpoint& end = pair->server;
  // Two more QPs complete into the same CQ: one has begun its life, one has not.
  ibv_qp_init_attr attributes{};
  attributes.send_cq = attributes.recv_cq = end.receive_cq.get();
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  auto begun = CreateQp(end.pd.get(), &attributes);
  auto unborn = CreateQp(end.pd.get(), &attributes);
  ASSERT_TRUE(begun && unborn);
  ibv_qp_attr change{};
  change.qp_state = IBV_QPS_INIT;
  change.port_num = 1;
  ASSERT_EQ(ibv_modify_qp(begun->get(), &change, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
            0);
  ASSERT_NO_FATAL_FAILURE(Overrun(end));
  ASSERT_TRUE(ExpectAsyncEvent(end.context(), IBV_EVENT_QP_FATAL, begun->get()));
  ExpectState(begun->get(), IBV_QPS_ERR);
  ExpectState(unborn->get(), IBV_QPS_RESET);  // what has not begun has nothing to lose
}

TEST_F(AsyncTest, AnOverrunCqSaysSoOnce) {
  EndpointOptions small;
  small.cq_entries = 2;
  auto pair = Pair::Connected(small);
  Buffer inbox(pair->server.pd.get(), 8);
  ASSERT_NO_FATAL_FAILURE(Overrun(pair->server));
  ASSERT_TRUE(ExpectAsyncEvent(pair->server.context(), IBV_EVENT_CQ_ERR, pair->server.receive_cq.get()));
  ASSERT_EQ(PostReceive(pair->server.qp(), 1, {inbox.Sge()}), 0);
  EXPECT_EQ(CountAsyncEvents(pair->server.context(), IBV_EVENT_CQ_ERR), 0);
}

TEST_F(AsyncTest, WhoAsksForAnEventWaitsUntilOneComes) {
  EndpointOptions small;
  small.cq_entries = 2;
  auto pair = Pair::Connected(small);
  ibv_context* const context = pair->server.context();
  // Other ends of the same context, and their tests, have left it as it pleased them.
  fcntl(context->async_fd, F_SETFL, fcntl(context->async_fd, F_GETFL) & ~O_NONBLOCK);
  ibv_async_event event{};
  ExpectWaits([&] { EXPECT_EQ(ibv_get_async_event(context, &event), 0); }, [&] { Overrun(pair->server); });
  EXPECT_EQ(event.event_type, IBV_EVENT_CQ_ERR);
  EXPECT_EQ(event.element.cq, pair->server.receive_cq.get());
  ibv_ack_async_event(&event);
  CountAsyncEvents(context, IBV_EVENT_QP_FATAL);  // the QP's own may follow
}

TEST_F(AsyncTest, AnOverrunInTheMiddleOfTrafficEndsTheQp) {
  EndpointOptions small;
  small.cq_entries = 4;
  auto pair = Pair::Connected(small);
  Buffer inbox(pair->server.pd.get(), 64);
  Buffer outbox(pair->client.pd.get(), 64);
  const int entries = pair->server.receive_cq->cqe;
  for (int i = 0; i <= entries; ++i) {
    ASSERT_EQ(PostReceive(pair->server.qp(), i, {inbox.Sge()}), 0);
    ASSERT_EQ(Post(pair->client.qp(), {.wr_id = 9, .flags = 0, .sges = {outbox.Sge()}}), 0);
  }
  ASSERT_TRUE(ExpectAsyncEvent(pair->server.context(), IBV_EVENT_QP_FATAL, pair->server.qp()));
  ExpectState(pair->server.qp(), IBV_QPS_ERR);
}

TEST_F(AsyncTest, TheDrainedEventComesWhenItWasAskedFor) {
  auto pair = Pair::Connected();
  ibv_qp_attr change{};
  change.qp_state = IBV_QPS_SQD;
  change.en_sqd_async_notify = 1;
  const int error = ibv_modify_qp(pair->client.qp(), &change, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY);
  if (error == EOPNOTSUPP) GTEST_SKIP() << "skipped: the device cannot drain";
  ASSERT_EQ(error, 0);
  ASSERT_TRUE(ExpectAsyncEvent(pair->client.context(), IBV_EVENT_SQ_DRAINED, pair->client.qp()));
  ibv_qp_attr now{};
  ibv_qp_init_attr initial{};
  ASSERT_EQ(ibv_query_qp(pair->client.qp(), &now, IBV_QP_STATE, &initial), 0);
  EXPECT_EQ(now.qp_state, IBV_QPS_SQD);
  EXPECT_EQ(now.sq_draining, 0);
}

TEST_F(AsyncTest, DrainingFinishesWhatHasBegunAndKeepsTheRest) {
  auto pair = Pair::Connected();
  ibv_qp* const qp = pair->client.qp();
  ibv_cq* const sent = pair->client.send_cq.get();
  Buffer theirs(pair->server.pd.get(), 1 << 20, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
  Buffer ours(pair->client.pd.get(), 1 << 20, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  theirs.FillPattern(6);
  SendSpec read{.wr_id = 1,
                .opcode = IBV_WR_RDMA_READ,
                .sges = {ours.Sge(0, 64)},
                .remote_address = theirs.address(),
                .rkey = theirs.rkey()};
  ASSERT_EQ(Post(qp, read), 0);
  ExpectCompletion(sent, 1);  // from now on what is posted begins at once
  read.wr_id = 2;
  read.sges = {ours.Sge()};
  ASSERT_EQ(Post(qp, read), 0);
  ibv_qp_attr change{};
  change.qp_state = IBV_QPS_SQD;
  change.en_sqd_async_notify = 1;
  ASSERT_EQ(ibv_modify_qp(qp, &change, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
  ASSERT_EQ(PostReceive(pair->server.qp(), 3, {theirs.Sge(0, 8)}), 0);
  ASSERT_EQ(Post(qp, {.wr_id = 4}), 0);
  ASSERT_TRUE(ExpectAsyncEvent(pair->client.context(), IBV_EVENT_SQ_DRAINED, qp));
  EXPECT_EQ(ExpectCompletion(sent, 2).byte_len, theirs.size());
  EXPECT_EQ(ours.Text(theirs.size()), theirs.Text(theirs.size()));
  EXPECT_TRUE(NoCompletion(sent));
  EXPECT_TRUE(NoCompletion(pair->server.receive_cq.get()));
  change.qp_state = IBV_QPS_RTS;
  ASSERT_EQ(ibv_modify_qp(qp, &change, IBV_QP_STATE), 0);
  ExpectCompletion(pair->server.receive_cq.get(), 3);
  ExpectCompletion(sent, 4);
}

TEST_F(AsyncTest, TheDrainedEventDoesNotComeUnasked) {
  auto pair = Pair::Connected();
  Buffer inbox(pair->server.pd.get(), 8);
  ibv_qp_attr change{};
  change.qp_state = IBV_QPS_SQD;
  change.en_sqd_async_notify = 1;  // without its bit in the mask
  ASSERT_EQ(ibv_modify_qp(pair->client.qp(), &change, IBV_QP_STATE), 0);
  ASSERT_EQ(PostReceive(pair->server.qp(), 1, {inbox.Sge()}), 0);
  ASSERT_EQ(Post(pair->client.qp(), {.wr_id = 2}), 0);
  ExpectState(pair->client.qp(), IBV_QPS_SQD);
  change.qp_state = IBV_QPS_RTS;
  ASSERT_EQ(ibv_modify_qp(pair->client.qp(), &change, IBV_QP_STATE), 0);
  ExpectCompletion(pair->server.receive_cq.get(), 1);
  ExpectCompletion(pair->client.send_cq.get(), 2);
  EXPECT_EQ(CountAsyncEvents(pair->client.context(), IBV_EVENT_SQ_DRAINED), 0);
}

TEST_F(AsyncTest, DestroyingAQpWaitsUntilItsEventsAreAcknowledged) {
  EndpointOptions small;
  small.cq_entries = 2;
  auto pair = Pair::Connected(small);
  ibv_context* context = pair->server.context();
  ibv_qp_init_attr attributes{};
  attributes.send_cq = attributes.recv_cq = pair->server.receive_cq.get();
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  auto qp = CreateQp(pair->server.pd.get(), &attributes);
  ASSERT_TRUE(qp);
  ibv_qp_attr change{};
  change.qp_state = IBV_QPS_INIT;
  change.port_num = 1;
  ASSERT_EQ(ibv_modify_qp(qp->get(), &change, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), 0);
  ASSERT_NO_FATAL_FAILURE(Overrun(pair->server));
  ibv_async_event event{};
  SetNonBlocking(context->async_fd);
  ASSERT_TRUE(world().Until([&] {
    if (ibv_get_async_event(context, &event) != 0) return false;
    if (event.event_type == IBV_EVENT_QP_FATAL && event.element.qp == qp->get()) return true;
    ibv_ack_async_event(&event);
    return false;
  }));
  ExpectWaits([&] { EXPECT_EQ(qp->Destroy(), 0); }, [&] { ibv_ack_async_event(&event); });
}

}  // namespace
}  // namespace stagecoach::verbs
