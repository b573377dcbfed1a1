// Requests that are refused when they are posted: for each reason its errno, *bad_wr at the culprit, everything before
// it posted, and nothing from it on. The QP is none the worse.

#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

constexpr int kRights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
constexpr uint32_t kInline = 16;
constexpr uint32_t kSges = 2;

class PostErrorsTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    {
      auto probe = OpenDevice();
      ASSERT_TRUE(probe);
      ASSERT_EQ(ibv_query_device(probe->get(), &limits), 0);
    }
    EndpointOptions options;
    options.cap = {
        .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = kSges, .max_recv_sge = kSges, .max_inline_data = kInline};
    pair = Pair::Connected(options, options);
    ours = std::make_unique<Buffer>(pair->client.pd.get(), 4096, kRights);
    theirs = std::make_unique<Buffer>(pair->server.pd.get(), 4096, kRights);
    // What was granted counts.
    ibv_qp_attr now{};
    ibv_qp_init_attr initial{};
    ASSERT_EQ(ibv_query_qp(qp(), &now, IBV_QP_CAP, &initial), 0);
    granted = initial.cap;
    many.assign(64, ours->Sge(0, 1));
  }
  void TearDown() override {
    ours.reset();
    theirs.reset();
    pair.reset();
    VerbsTest::TearDown();
  }
  ibv_qp* qp() { return pair->client.qp(); }
  ibv_cq* sent() { return pair->client.send_cq.get(); }

  ibv_send_wr GoodWrite(uint64_t wr_id) {
    ibv_send_wr request{};
    request.wr_id = wr_id;
    request.sg_list = &good;
    request.num_sge = 1;
    request.opcode = IBV_WR_RDMA_WRITE;
    request.send_flags = IBV_SEND_SIGNALED;
    request.wr.rdma.remote_addr = theirs->address();
    request.wr.rdma.rkey = theirs->rkey();
    return request;
  }
  // A chain of three of which the second one is changed: it is refused, the first one is carried out, the third is not.
  // Returns the errno.
  int PostWithBadSecond(const std::function<void(ibv_send_wr&)>& change) {
    good = ours->Sge(0, 8);
    ibv_send_wr chain[3] = {GoodWrite(1), GoodWrite(2), GoodWrite(3)};
    change(chain[1]);
    chain[0].next = &chain[1];
    chain[1].next = &chain[2];
    ibv_send_wr* bad = nullptr;
    const int error = ErrnoOf(ibv_post_send(qp(), chain, &bad));
    EXPECT_EQ(bad, &chain[1]);
    ExpectCompletion(sent(), 1);
    // One posted now completes next: nothing is between them.
    ibv_send_wr after = GoodWrite(4);
    EXPECT_EQ(ibv_post_send(qp(), &after, &bad), 0);
    ExpectCompletion(sent(), 4);
    return error;
  }
  void ExpectRefused(const char* why, const std::function<void(ibv_send_wr&)>& change) {
    SCOPED_TRACE(why);
    EXPECT_EQ(PostWithBadSecond(change), EINVAL);
  }
  // As above, of Receives of `post`'s queue.
  template <typename Queue, typename PostCall>
  void ExpectReceiveRefused(Queue* queue, PostCall post, int parts) {
    ibv_sge sge = ours->Sge(0, 8);
    ibv_recv_wr chain[3];
    for (int i = 0; i < 3; ++i) {
      chain[i] = {.wr_id = static_cast<uint64_t>(i + 1),
                  .next = i < 2 ? &chain[i + 1] : nullptr,
                  .sg_list = i == 1 ? many.data() : &sge,
                  .num_sge = i == 1 ? parts : 1};
    }
    ibv_recv_wr* bad = nullptr;
    EXPECT_EQ(ErrnoOf(post(queue, chain, &bad)), EINVAL);
    EXPECT_EQ(bad, &chain[1]);
  }

  ibv_device_attr limits{};
  ibv_qp_cap granted{};
  std::unique_ptr<Pair> pair;
  std::unique_ptr<Buffer> ours;
  std::unique_ptr<Buffer> theirs;
  ibv_sge good{};
  std::vector<ibv_sge> many;
};

TEST_F(PostErrorsTest, TooManyParts) {
  ExpectRefused("one more than the QP has", [&](ibv_send_wr& request) {
    request.sg_list = many.data();
    request.num_sge = static_cast<int>(granted.max_send_sge) + 1;
  });
  ExpectRefused("of a Send", [&](ibv_send_wr& request) {
    request.opcode = IBV_WR_SEND;
    request.sg_list = many.data();
    request.num_sge = static_cast<int>(granted.max_send_sge) + 1;
  });
  ExpectRefused("less than none", [&](ibv_send_wr& request) { request.num_sge = -1; });
}

TEST_F(PostErrorsTest, MorePartsThanAReadMayHave) {
  const int most = limits.max_sge_rd;
  if (most >= static_cast<int>(granted.max_send_sge)) GTEST_SKIP() << "skipped: Reads have no limit of their own";
  ExpectRefused("a Read", [&](ibv_send_wr& request) {
    request.opcode = IBV_WR_RDMA_READ;
    request.sg_list = many.data();
    request.num_sge = most + 1;
  });
}

TEST_F(PostErrorsTest, TooMuchInlineData) {
  const uint32_t most = granted.max_inline_data;
  ASSERT_LT(most, ours->size());
  ExpectRefused("one byte more than the QP has room for", [&](ibv_send_wr& request) {
    request.send_flags |= IBV_SEND_INLINE;
    good.length = most + 1;
  });
  ExpectRefused("in several parts", [&](ibv_send_wr& request) {
    static ibv_sge parts[2];
    parts[0] = ours->Sge(0, most);
    parts[1] = ours->Sge(0, 1);
    request.send_flags |= IBV_SEND_INLINE;
    request.sg_list = parts;
    request.num_sge = 2;
  });
  if (most == 0) return;
  // Exactly as much is taken.
  good = ours->Sge(0, most);
  ibv_send_wr fits = GoodWrite(9);
  fits.send_flags |= IBV_SEND_INLINE;
  ibv_send_wr* bad = nullptr;
  EXPECT_EQ(ibv_post_send(qp(), &fits, &bad), 0);
  ExpectCompletion(sent(), 9);
}

TEST_F(PostErrorsTest, WhatIsFetchedCannotBeInline) {
  ExpectRefused("a Read", [&](ibv_send_wr& request) {
    request.opcode = IBV_WR_RDMA_READ;
    request.send_flags |= IBV_SEND_INLINE;
  });
  if (limits.atomic_cap == IBV_ATOMIC_NONE) return;
  ExpectRefused("an atomic", [&](ibv_send_wr& request) {
    request.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
    request.send_flags |= IBV_SEND_INLINE;
  });
}

TEST_F(PostErrorsTest, OperationsThereAreNot) {
  // Segmentation is for datagrams of raw Ethernet; the other is no operation at all.
  for (const int opcode : {int{IBV_WR_TSO}, 0x70}) {
    SCOPED_TRACE(opcode);
    // As a C program would put it there.
    const int error =
        PostWithBadSecond([&](ibv_send_wr& request) { std::memcpy(&request.opcode, &opcode, sizeof(opcode)); });
    EXPECT_TRUE(error == EINVAL || error == EOPNOTSUPP) << error;
  }
}

TEST_F(PostErrorsTest, AFullSendQueue) {
  // Sends whose Receives are missing stay where they are on InfiniBand. On iWARP, which does not wait for them, they
  // stay while the queue is drained.
  const bool drained = pair->client.IsIwarp();
  ibv_qp_attr change{};
  change.qp_state = IBV_QPS_SQD;
  if (drained) {
    ASSERT_EQ(ibv_modify_qp(qp(), &change, IBV_QP_STATE), 0);
  }
  std::vector<ibv_send_wr> chain(granted.max_send_wr + 2);
  for (size_t i = 0; i < chain.size(); ++i) {
    chain[i] = {};
    chain[i].wr_id = i;
    chain[i].opcode = IBV_WR_SEND;
    chain[i].send_flags = IBV_SEND_SIGNALED;
    if (i > 0) chain[i - 1].next = &chain[i];
  }
  ibv_send_wr* bad = nullptr;
  EXPECT_EQ(ErrnoOf(ibv_post_send(qp(), chain.data(), &bad)), ENOMEM);
  ASSERT_EQ(bad, &chain[granted.max_send_wr]);
  for (uint32_t i = 0; i < granted.max_send_wr; ++i) ASSERT_EQ(PostReceive(pair->server.qp(), i, {}), 0);
  change.qp_state = IBV_QPS_RTS;
  if (drained) {
    ASSERT_EQ(ibv_modify_qp(qp(), &change, IBV_QP_STATE), 0);
  }
  for (uint32_t i = 0; i < granted.max_send_wr; ++i) {
    ExpectCompletion(pair->server.receive_cq.get(), i);
    ExpectCompletion(sent(), i);
  }
  EXPECT_TRUE(NoCompletion(sent()));
}

TEST_F(PostErrorsTest, ReceivesWithTooManyParts) {
  ExpectReceiveRefused(qp(), ibv_post_recv, static_cast<int>(granted.max_recv_sge) + 1);
  ExpectReceiveRefused(qp(), ibv_post_recv, -1);
  // The first of each chain is there, and nothing else.
  for (const uint64_t wr_id : {1u, 1u}) {
    ASSERT_EQ(Post(pair->server.qp(), {.sges = {theirs->Sge(0, 4)}}), 0);
    EXPECT_EQ(ExpectCompletion(pair->client.receive_cq.get(), wr_id).byte_len, 4u);
    ExpectCompletion(pair->server.send_cq.get(), 1);
  }
  ASSERT_EQ(pair->client.Disconnect(), 0);
  EXPECT_TRUE(NoCompletion(pair->client.receive_cq.get()));
}

TEST_F(PostErrorsTest, AFullReceiveQueue) {
  std::vector<ibv_recv_wr> chain(granted.max_recv_wr + 2);
  for (size_t i = 0; i < chain.size(); ++i) {
    chain[i] = {.wr_id = i, .next = i + 1 < chain.size() ? &chain[i + 1] : nullptr, .sg_list = nullptr, .num_sge = 0};
  }
  ibv_recv_wr* bad = nullptr;
  EXPECT_EQ(ErrnoOf(ibv_post_recv(qp(), chain.data(), &bad)), ENOMEM);
  EXPECT_EQ(bad, &chain[granted.max_recv_wr]);
  ibv_qp_attr change{};
  change.qp_state = IBV_QPS_ERR;
  ASSERT_EQ(ibv_modify_qp(qp(), &change, IBV_QP_STATE), 0);
  for (uint32_t i = 0; i < granted.max_recv_wr; ++i) {
    ExpectCompletion(pair->client.receive_cq.get(), i, IBV_WC_WR_FLUSH_ERR);
  }
  EXPECT_TRUE(NoCompletion(pair->client.receive_cq.get()));
}

TEST_F(PostErrorsTest, SharedReceives) {
  if (limits.max_srq == 0) GTEST_SKIP() << "skipped: the device has no SRQs";
  SharedQueue srq = CreateSrq(pair->client.pd.get(), 4, 1);
  ASSERT_NE(srq, nullptr);
  ibv_srq_attr now{};
  ASSERT_EQ(ibv_query_srq(srq.get(), &now), 0);
  ExpectReceiveRefused(srq.get(), ibv_post_srq_recv, static_cast<int>(now.max_sge) + 1);
  // One is there.
  std::vector<ibv_recv_wr> chain(now.max_wr + 1);
  for (size_t i = 0; i < chain.size(); ++i) {
    chain[i] = {.wr_id = i, .next = i + 1 < chain.size() ? &chain[i + 1] : nullptr, .sg_list = nullptr, .num_sge = 0};
  }
  ibv_recv_wr* bad = nullptr;
  EXPECT_EQ(ErrnoOf(ibv_post_srq_recv(srq.get(), chain.data(), &bad)), ENOMEM);
  EXPECT_EQ(bad, &chain[now.max_wr - 1]);
}

TEST_F(PostErrorsTest, BeforeTheQpIsReady) {
  ibv_qp_init_attr attributes{};
  attributes.send_cq = attributes.recv_cq = sent();
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap = {.max_send_wr = 2, .max_recv_wr = 2, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  auto unready = CreateQp(pair->client.pd.get(), &attributes);
  ASSERT_TRUE(unready);
  EXPECT_EQ(Post(unready->get(), {}), EINVAL) << "a Send in RESET";
  EXPECT_EQ(PostReceive(unready->get(), 1, {}), EINVAL) << "a Receive in RESET";
  ibv_qp_attr change{};
  change.qp_state = IBV_QPS_INIT;
  change.port_num = 1;
  ASSERT_EQ(
      ibv_modify_qp(unready->get(), &change, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), 0);
  EXPECT_EQ(Post(unready->get(), {}), EINVAL) << "a Send in INIT";
  EXPECT_EQ(PostReceive(unready->get(), 1, {}), 0) << "a Receive in INIT";
}

}  // namespace
}  // namespace stagecoach::verbs
