// Queue pairs: creation, capacities, states, refusals at post.

#include <cerrno>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

class QpTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    context = std::move(OpenDevice().value());
    pd = std::move(AllocatePd(context.get()).value());
    cq = std::move(CreateCq(context.get(), 64).value());
    attributes.send_cq = cq.get();
    attributes.recv_cq = cq.get();
    attributes.qp_type = IBV_QPT_RC;
    attributes.cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 2, .max_recv_sge = 2, .max_inline_data = 0};
  }
  void TearDown() override {
    cq = {};
    pd = {};
    context = {};
    VerbsTest::TearDown();
  }
  Context context;
  ProtectionDomain pd;
  CompletionQueue cq;
  ibv_qp_init_attr attributes{};
};

TEST_F(QpTest, ANewQpIsInResetAndKnowsItsParts) {
  attributes.qp_context = this;
  auto qp = CreateQp(pd.get(), &attributes);
  ASSERT_TRUE(qp) << qp.error().ToString();
  EXPECT_EQ((*qp)->state, IBV_QPS_RESET);
  EXPECT_EQ((*qp)->qp_type, IBV_QPT_RC);
  EXPECT_EQ((*qp)->pd, pd.get());
  EXPECT_EQ((*qp)->send_cq, cq.get());
  EXPECT_EQ((*qp)->recv_cq, cq.get());
  EXPECT_EQ((*qp)->qp_context, this);
  EXPECT_EQ((*qp)->context, context.get());
  EXPECT_GE(attributes.cap.max_send_wr, 16u);
  EXPECT_GE(attributes.cap.max_recv_wr, 16u);
}

TEST_F(QpTest, NumbersAreUnique) {
  auto one = CreateQp(pd.get(), &attributes);
  auto two = CreateQp(pd.get(), &attributes);
  ASSERT_TRUE(one && two);
  EXPECT_NE((*one)->qp_num, (*two)->qp_num);
}

TEST_F(QpTest, CapacitiesBeyondTheLimitsAreInvalid) {
  ibv_device_attr limits{};
  ASSERT_EQ(ibv_query_device(context.get(), &limits), 0);
  const ibv_qp_init_attr good = attributes;
  auto refused = [&](auto change) {
    ibv_qp_init_attr bad = good;
    change(bad.cap);
    auto qp = CreateQp(pd.get(), &bad);
    return !qp && qp.error().error == EINVAL;
  };
  EXPECT_TRUE(refused([&](ibv_qp_cap& cap) { cap.max_send_wr = limits.max_qp_wr + 1; }));
  EXPECT_TRUE(refused([&](ibv_qp_cap& cap) { cap.max_recv_wr = limits.max_qp_wr + 1; }));
  EXPECT_TRUE(refused([&](ibv_qp_cap& cap) { cap.max_send_sge = limits.max_sge + 1; }));
  EXPECT_TRUE(refused([&](ibv_qp_cap& cap) { cap.max_recv_sge = limits.max_sge + 1; }));
  EXPECT_TRUE(refused([&](ibv_qp_cap& cap) { cap.max_inline_data = 1u << 30; }));
}

TEST_F(QpTest, APdAndCqInUseAreBusy) {
  auto qp = CreateQp(pd.get(), &attributes);
  ASSERT_TRUE(qp);
  EXPECT_EQ(ibv_dealloc_pd(pd.get()), EBUSY);
  EXPECT_EQ(ibv_destroy_cq(cq.get()), EBUSY);
  EXPECT_EQ(qp->Destroy(), 0);
}

TEST_F(QpTest, MovesToInitAndErrorAndBackToReset) {
  auto qp = CreateQp(pd.get(), &attributes);
  ASSERT_TRUE(qp);
  ibv_qp_attr change{};
  change.qp_state = IBV_QPS_INIT;
  change.port_num = 1;
  ASSERT_EQ(ibv_modify_qp(qp->get(), &change, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), 0);
  EXPECT_EQ((*qp)->state, IBV_QPS_INIT);
  change.qp_state = IBV_QPS_ERR;
  ASSERT_EQ(ibv_modify_qp(qp->get(), &change, IBV_QP_STATE), 0);
  EXPECT_EQ((*qp)->state, IBV_QPS_ERR);
  ExpectState(qp->get(), IBV_QPS_ERR);
  change.qp_state = IBV_QPS_RESET;
  ASSERT_EQ(ibv_modify_qp(qp->get(), &change, IBV_QP_STATE), 0);
  EXPECT_EQ((*qp)->state, IBV_QPS_RESET);
}

TEST_F(QpTest, AJumpInTheStateMachineIsInvalid) {
  auto qp = CreateQp(pd.get(), &attributes);
  ASSERT_TRUE(qp);
  ibv_qp_attr change{};
  change.qp_state = IBV_QPS_RTS;
  EXPECT_EQ(ibv_modify_qp(qp->get(), &change, IBV_QP_STATE), EINVAL);
  EXPECT_EQ((*qp)->state, IBV_QPS_RESET);
}

TEST_F(QpTest, QueryReturnsTheCreationAttributes) {
  auto qp = CreateQp(pd.get(), &attributes);
  ASSERT_TRUE(qp);
  ibv_qp_attr now{};
  ibv_qp_init_attr initial{};
  ASSERT_EQ(ibv_query_qp(qp->get(), &now, IBV_QP_STATE | IBV_QP_CAP, &initial), 0);
  EXPECT_EQ(initial.send_cq, cq.get());
  EXPECT_EQ(initial.recv_cq, cq.get());
  EXPECT_EQ(initial.qp_type, IBV_QPT_RC);
  EXPECT_GE(initial.cap.max_send_wr, 16u);
  EXPECT_GE(now.cap.max_recv_wr, 16u);
}

TEST_F(QpTest, PostingInTheWrongStateIsInvalid) {
  auto qp = CreateQp(pd.get(), &attributes);
  ASSERT_TRUE(qp);
  Buffer buffer(pd.get(), 64);
  EXPECT_EQ(Post(qp->get(), {.sges = {buffer.Sge()}}), EINVAL);
  EXPECT_EQ(PostReceive(qp->get(), 1, {buffer.Sge()}), EINVAL);
}

TEST_F(QpTest, ReceivesMayBePostedInInitAndFlushInError) {
  auto qp = CreateQp(pd.get(), &attributes);
  ASSERT_TRUE(qp);
  Buffer buffer(pd.get(), 64);
  ibv_qp_attr change{};
  change.qp_state = IBV_QPS_INIT;
  change.port_num = 1;
  ASSERT_EQ(ibv_modify_qp(qp->get(), &change, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), 0);
  ASSERT_EQ(PostReceive(qp->get(), 1, {buffer.Sge()}), 0);
  ASSERT_EQ(PostReceive(qp->get(), 2, {buffer.Sge()}), 0);
  change.qp_state = IBV_QPS_ERR;
  ASSERT_EQ(ibv_modify_qp(qp->get(), &change, IBV_QP_STATE), 0);
  ExpectCompletion(cq.get(), 1, IBV_WC_WR_FLUSH_ERR);
  ExpectCompletion(cq.get(), 2, IBV_WC_WR_FLUSH_ERR);
}

TEST_F(QpTest, UnreliableTypesAreNotOffered) {
  if (context->device->transport_type != IBV_TRANSPORT_IWARP) GTEST_SKIP() << "skipped: InfiniBand has them";
  for (ibv_qp_type type : {IBV_QPT_UC, IBV_QPT_UD}) {
    attributes.qp_type = type;
    auto qp = CreateQp(pd.get(), &attributes);
    ASSERT_FALSE(qp);
    EXPECT_EQ(qp.error().error, EOPNOTSUPP);
  }
}

// --- Refusals at post, on a connected QP ---

class QpPostTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    pair = Pair::Connected();
    buffer = std::make_unique<Buffer>(pair->client.pd.get(), 4096);
  }
  void TearDown() override {
    buffer.reset();
    pair.reset();
    VerbsTest::TearDown();
  }
  std::unique_ptr<Pair> pair;
  std::unique_ptr<Buffer> buffer;
};

TEST_F(QpPostTest, AConnectedQpIsReadyToSend) {
  EXPECT_EQ(pair->client.qp()->state, IBV_QPS_RTS);
  EXPECT_EQ(pair->server.qp()->state, IBV_QPS_RTS);
  ibv_qp_attr now{};
  ibv_qp_init_attr initial{};
  ASSERT_EQ(ibv_query_qp(pair->client.qp(), &now, IBV_QP_STATE, &initial), 0);
  EXPECT_EQ(now.qp_state, IBV_QPS_RTS);
}

TEST_F(QpPostTest, WhatARefusedPostAnswersIsAnErrno) {
  std::vector<ibv_sge> many(64, buffer->Sge(0, 1));
  ibv_send_wr send{.sg_list = many.data(), .num_sge = 64, .opcode = IBV_WR_SEND};
  ibv_send_wr* bad_send = nullptr;
  EXPECT_EQ(ibv_post_send(pair->client.qp(), &send, &bad_send), EINVAL);
  ibv_recv_wr receive{.sg_list = many.data(), .num_sge = 64};
  ibv_recv_wr* bad_receive = nullptr;
  EXPECT_EQ(ibv_post_recv(pair->client.qp(), &receive, &bad_receive), EINVAL);
}

TEST_F(QpPostTest, TooManyScatterGatherEntriesAreRefused) {
  std::vector<ibv_sge> many(64, buffer->Sge(0, 1));
  EXPECT_EQ(Post(pair->client.qp(), {.sges = many}), EINVAL);
  EXPECT_EQ(PostReceive(pair->client.qp(), 1, many), EINVAL);
}

TEST_F(QpPostTest, AFullReceiveQueueRefusesOneMore) {
  for (int i = 0; i < 32; ++i) ASSERT_EQ(PostReceive(pair->client.qp(), i, {buffer->Sge(0, 1)}), 0);
  int accepted = 32;
  int error = 0;
  while ((error = PostReceive(pair->client.qp(), accepted, {buffer->Sge(0, 1)})) == 0 && accepted < 10000) ++accepted;
  EXPECT_EQ(error, ENOMEM);
}

TEST_F(QpPostTest, OperationsTheTransportLacksAreRefusedAtPost) {
  std::vector<ibv_wr_opcode> lacking = {IBV_WR_TSO};
  if (pair->client.IsIwarp()) {
    lacking.push_back(IBV_WR_SEND_WITH_IMM);
  }
  for (ibv_wr_opcode opcode : lacking) {
    const int error =
        Post(pair->client.qp(), {.opcode = opcode, .sges = {buffer->Sge(0, 8)}, .remote_address = 0, .rkey = 1});
    EXPECT_TRUE(error == EINVAL || error == EOPNOTSUPP) << opcode << ": " << error;
  }
  // And the connection is none the worse.
  Buffer inbox(pair->server.pd.get(), 64);
  ASSERT_EQ(PostReceive(pair->server.qp(), 7, {inbox.Sge()}), 0);
  ASSERT_EQ(Post(pair->client.qp(), {.wr_id = 8, .sges = {buffer->Sge(0, 8)}}), 0);
  ExpectCompletion(pair->server.receive_cq.get(), 7);
  ExpectCompletion(pair->client.send_cq.get(), 8);
}

TEST_F(QpPostTest, InlineDataBeyondTheCapacityIsRefused) {
  const int error =
      Post(pair->client.qp(), {.flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE, .sges = {buffer->Sge(0, 4096)}});
  EXPECT_TRUE(error == EINVAL || error == ENOMEM) << error;
}

TEST_F(QpPostTest, AListIsPostedUpToTheFirstBadRequest) {
  Buffer inbox(pair->server.pd.get(), 64);
  ASSERT_EQ(PostReceive(pair->server.qp(), 1, {inbox.Sge()}), 0);
  ibv_sge sge = buffer->Sge(0, 8);
  ibv_send_wr third{.wr_id = 3, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
  std::vector<ibv_sge> too_many(64, sge);
  ibv_send_wr second{.wr_id = 2, .next = &third, .sg_list = too_many.data(), .num_sge = 64, .opcode = IBV_WR_SEND};
  ibv_send_wr first{.wr_id = 1,
                    .next = &second,
                    .sg_list = &sge,
                    .num_sge = 1,
                    .opcode = IBV_WR_SEND,
                    .send_flags = IBV_SEND_SIGNALED};
  ibv_send_wr* bad = nullptr;
  EXPECT_NE(ibv_post_send(pair->client.qp(), &first, &bad), 0);
  EXPECT_EQ(bad, &second);
  ExpectCompletion(pair->client.send_cq.get(), 1);
  ExpectCompletion(pair->server.receive_cq.get(), 1);
  EXPECT_TRUE(NoCompletion(pair->client.send_cq.get()));
}

}  // namespace
}  // namespace stagecoach::verbs
