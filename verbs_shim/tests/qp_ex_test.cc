// Queue pairs posted to by ibv_wr_*: what can be asked for, batches, and that each operation is its plain one.

#include <cerrno>
#include <optional>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

constexpr uint64_t kOperations = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ |
                                 IBV_QP_EX_WITH_SEND_WITH_INV | IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_BIND_MW;

class QpExTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    context = std::move(OpenDevice().value());
    pd = std::move(AllocatePd(context.get()).value());
    cq = std::move(CreateCq(context.get(), 8).value());
    attributes.send_cq = attributes.recv_cq = cq.get();
    attributes.qp_type = IBV_QPT_RC;
    attributes.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    attributes.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    attributes.pd = pd.get();
    attributes.send_ops_flags = kOperations;
    if (!Create() && errno == EOPNOTSUPP) GTEST_SKIP() << "skipped: the device has no extended QPs";
  }
  void TearDown() override {
    cq = {};
    pd = {};
    context = {};
    VerbsTest::TearDown();
  }
  QueuePair Create() {
    errno = 0;
    return QueuePair(ibv_create_qp_ex(context.get(), &attributes));
  }
  Context context;
  ProtectionDomain pd;
  CompletionQueue cq;
  ibv_qp_init_attr_ex attributes{};
};

TEST_F(QpExTest, IsAQpLikeAnyOther) {
  QueuePair qp = Create();
  ASSERT_TRUE(qp) << errno;
  EXPECT_EQ(qp->state, IBV_QPS_RESET);
  EXPECT_EQ(qp->qp_type, IBV_QPT_RC);
  EXPECT_EQ(qp->pd, pd.get());
  ibv_qp_ex* extended = ibv_qp_to_qp_ex(qp.get());
  ASSERT_NE(extended, nullptr);
  EXPECT_EQ(&extended->qp_base, qp.get());
}

TEST_F(QpExTest, OnlyQpsMadeForItHaveTheExtendedForm) {
  attributes.comp_mask = IBV_QP_INIT_ATTR_PD;
  QueuePair qp = Create();
  ASSERT_TRUE(qp);
  EXPECT_EQ(ibv_qp_to_qp_ex(qp.get()), nullptr);
}

TEST_F(QpExTest, WithoutADomainItIsInvalid) {
  attributes.comp_mask = IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  EXPECT_FALSE(Create());
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(QpExTest, OperationsTheDeviceLacksAreNotSupported) {
  attributes.send_ops_flags = IBV_QP_EX_WITH_TSO;
  EXPECT_FALSE(Create());
  EXPECT_TRUE(errno == EOPNOTSUPP || errno == EINVAL) << errno;
  attributes.send_ops_flags = uint64_t{1} << 50;
  EXPECT_FALSE(Create());
  EXPECT_TRUE(errno == EOPNOTSUPP || errno == EINVAL) << errno;
}

TEST_F(QpExTest, SendWithImmediateIsOfferedWhereTheTransportHasIt) {
  attributes.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
  const bool has_it = context->device->transport_type != IBV_TRANSPORT_IWARP;
  EXPECT_EQ(Create().get() != nullptr, has_it);
  if (!has_it) {
    EXPECT_EQ(errno, EOPNOTSUPP);
  }
}

TEST_F(QpExTest, ABatchInTheWrongStateIsInvalid) {
  QueuePair qp = Create();
  ASSERT_TRUE(qp);
  ibv_qp_ex* extended = ibv_qp_to_qp_ex(qp.get());
  ibv_wr_start(extended);
  extended->wr_id = 1;
  extended->wr_flags = IBV_SEND_SIGNALED;
  ibv_wr_send(extended);
  ibv_wr_set_sge(extended, 0, 0, 0);
  EXPECT_EQ(ibv_wr_complete(extended), EINVAL);
}

// --- Connected ---

class QpExTrafficTest : public QpExTest {
 protected:
  void SetUp() override {
    QpExTest::SetUp();
    if (IsSkipped()) return;
    EndpointOptions client;
    client.send_ops = kOperations;
    client.cap.max_send_wr = 8;
    client.cap.max_inline_data = 128;
    pair = Pair::Connected({}, client);
    ASSERT_NE(pair->client.qp(), nullptr);
    qp = ibv_qp_to_qp_ex(pair->client.qp());
    ASSERT_NE(qp, nullptr);
    ours = std::make_unique<Buffer>(pair->client.pd.get(), 4096,
                                    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_MW_BIND);
    theirs = std::make_unique<Buffer>(pair->server.pd.get(), 4096,
                                      IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
  }
  void TearDown() override {
    ours.reset();
    theirs.reset();
    pair.reset();
    QpExTest::TearDown();
  }
  ibv_cq* cq() { return pair->client.send_cq.get(); }
  ibv_cq* server_cq() { return pair->server.receive_cq.get(); }
  void Begin(uint64_t wr_id, unsigned flags = IBV_SEND_SIGNALED) {
    qp->wr_id = wr_id;
    qp->wr_flags = flags;
  }
  void SetSge(size_t offset, size_t length) {
    ibv_wr_set_sge(qp, ours->lkey(), ours->address() + offset, static_cast<uint32_t>(length));
  }
  std::unique_ptr<Pair> pair;
  ibv_qp_ex* qp = nullptr;
  std::unique_ptr<Buffer> ours;
  std::unique_ptr<Buffer> theirs;
};

TEST_F(QpExTrafficTest, ABatchOfEachKindIsCarriedOutInOrder) {
  ours->Fill("written sent");
  ASSERT_EQ(PostReceive(pair->server.qp(), 1, {theirs->Sge(1000, 64)}), 0);
  ibv_wr_start(qp);
  Begin(1);
  ibv_wr_rdma_write(qp, theirs->rkey(), theirs->address());
  SetSge(0, 7);
  Begin(2);
  ibv_wr_rdma_read(qp, theirs->rkey(), theirs->address());
  SetSge(100, 7);
  Begin(3, IBV_SEND_SIGNALED | IBV_SEND_FENCE);
  ibv_wr_send(qp);
  const ibv_sge parts[] = {ours->Sge(100, 7), ours->Sge(7, 5)};
  ibv_wr_set_sge_list(qp, 2, parts);
  ASSERT_EQ(ibv_wr_complete(qp), 0);
  EXPECT_EQ(ExpectCompletion(cq(), 1).opcode, IBV_WC_RDMA_WRITE);
  EXPECT_EQ(ExpectCompletion(cq(), 2).opcode, IBV_WC_RDMA_READ);
  EXPECT_EQ(ExpectCompletion(cq(), 3).opcode, IBV_WC_SEND);
  EXPECT_EQ(ExpectCompletion(server_cq(), 1).byte_len, 12u);
  EXPECT_EQ(AsText(ConstBytes(theirs->bytes()).subspan(1000, 12)), "written sent");
}

TEST_F(QpExTrafficTest, NothingMovesBeforeTheBatchIsComplete) {
  ASSERT_EQ(PostReceive(pair->server.qp(), 1, {theirs->Sge(0, 64)}), 0);
  ibv_wr_start(qp);
  Begin(1);
  ibv_wr_send(qp);
  SetSge(0, 8);
  ibv_wr_abort(qp);
  // Had it been sent, this would be the second.
  ibv_wr_start(qp);
  Begin(2);
  ibv_wr_send(qp);
  SetSge(0, 9);
  ASSERT_EQ(ibv_wr_complete(qp), 0);
  EXPECT_EQ(ExpectCompletion(server_cq(), 1).byte_len, 9u);
  ExpectCompletion(cq(), 2);
}

TEST_F(QpExTrafficTest, InlineDataIsTheCallersAgainAtOnce) {
  ASSERT_EQ(PostReceive(pair->server.qp(), 1, {theirs->Sge(0, 64)}), 0);
  ASSERT_EQ(PostReceive(pair->server.qp(), 2, {theirs->Sge(64, 64)}), 0);
  char text[] = "inline and gone";
  char head[] = "in ";
  char tail[] = "parts";
  ibv_wr_start(qp);
  Begin(1);
  ibv_wr_send(qp);
  ibv_wr_set_inline_data(qp, text, 15);
  std::fill(std::begin(text), std::end(text), 'x');
  Begin(2);
  ibv_wr_send(qp);
  const ibv_data_buf parts[] = {{.addr = head, .length = 3}, {.addr = tail, .length = 5}};
  ibv_wr_set_inline_data_list(qp, 2, parts);
  std::fill(std::begin(head), std::end(head), 'x');
  ASSERT_EQ(ibv_wr_complete(qp), 0);
  ExpectCompletion(server_cq(), 1);
  ExpectCompletion(server_cq(), 2);
  EXPECT_EQ(theirs->Text(15), "inline and gone");
  EXPECT_EQ(AsText(ConstBytes(theirs->bytes()).subspan(64, 8)), "in parts");
}

TEST_F(QpExTrafficTest, ABadRequestKeepsTheWholeBatchBack) {
  ASSERT_EQ(PostReceive(pair->server.qp(), 1, {theirs->Sge(0, 64)}), 0);
  std::vector<ibv_sge> too_many(64, ours->Sge(0, 1));
  ibv_wr_start(qp);
  Begin(1);
  ibv_wr_send(qp);
  SetSge(0, 8);
  Begin(2);
  ibv_wr_send(qp);
  ibv_wr_set_sge_list(qp, too_many.size(), too_many.data());
  EXPECT_NE(ibv_wr_complete(qp), 0);
  ibv_wr_start(qp);
  Begin(3);
  ibv_wr_send(qp);
  SetSge(0, 9);
  ASSERT_EQ(ibv_wr_complete(qp), 0) << "the error was the batch's";
  EXPECT_EQ(ExpectCompletion(server_cq(), 1).byte_len, 9u);
  ExpectCompletion(cq(), 3);
  EXPECT_TRUE(NoCompletion(cq()));
}

TEST_F(QpExTrafficTest, TooMuchInlineDataKeepsTheBatchBack) {
  std::vector<char> large(1u << 20);
  ibv_wr_start(qp);
  Begin(1);
  ibv_wr_send(qp);
  ibv_wr_set_inline_data(qp, large.data(), large.size());
  EXPECT_NE(ibv_wr_complete(qp), 0);
}

TEST_F(QpExTrafficTest, ABatchBeyondTheQueueIsRefusedWhole) {
  ASSERT_EQ(PostReceive(pair->server.qp(), 1, {theirs->Sge(0, 64)}), 0);
  ibv_wr_start(qp);
  for (uint64_t i = 0; i < 4096; ++i) {
    Begin(i);
    ibv_wr_send(qp);
    SetSge(0, 8);
  }
  EXPECT_EQ(ibv_wr_complete(qp), ENOMEM);
  EXPECT_TRUE(NoCompletion(cq()));
  ibv_wr_start(qp);
  Begin(9);
  ibv_wr_send(qp);
  SetSge(0, 8);
  EXPECT_EQ(ibv_wr_complete(qp), 0);
  ExpectCompletion(cq(), 9);
}

TEST_F(QpExTrafficTest, ThePlainCallsWorkOnTheSameQp) {
  ASSERT_EQ(PostReceive(pair->server.qp(), 1, {theirs->Sge(0, 64)}), 0);
  ASSERT_EQ(Post(pair->client.qp(), {.wr_id = 4, .sges = {ours->Sge(0, 8)}}), 0);
  ExpectCompletion(cq(), 4);
  ExpectCompletion(server_cq(), 1);
}

TEST_F(QpExTrafficTest, ASendWithInvalidateEndsTheWindowItNames) {
  auto window = AllocateMw(pair->server.pd.get(), IBV_MW_TYPE_2);
  if (!window) GTEST_SKIP() << "skipped: no type 2B windows";
  Buffer exposed(pair->server.pd.get(), 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND | IBV_ACCESS_REMOTE_READ);
  const uint32_t rkey = ibv_inc_rkey((*window)->rkey);
  const ibv_mw_bind_info info = {
      .mr = exposed.mr(), .addr = exposed.address(), .length = 64, .mw_access_flags = IBV_ACCESS_REMOTE_READ};
  ASSERT_EQ(PostBind(pair->server.qp(), 1, window->get(), rkey, info), 0);
  ExpectCompletion(pair->server.send_cq.get(), 1);
  ours->Fill("take it back");
  ASSERT_EQ(PostReceive(pair->server.qp(), 2, {theirs->Sge(0, 64)}), 0);
  ASSERT_EQ(PostReceive(pair->server.qp(), 3, {theirs->Sge(64, 64)}), 0);
  ibv_wr_start(qp);
  Begin(4);
  ibv_wr_send_inv(qp, rkey);
  SetSge(0, 12);
  Begin(5);
  ibv_wr_send(qp);
  SetSge(0, 4);
  ASSERT_EQ(ibv_wr_complete(qp), 0);
  const ibv_wc received = ExpectCompletion(server_cq(), 2);
  EXPECT_EQ(theirs->Text(12), "take it back");
  EXPECT_EQ(ExpectCompletion(cq(), 4).opcode, IBV_WC_SEND);
  // The other one in the batch invalidates nothing.
  EXPECT_EQ(ExpectCompletion(server_cq(), 3).wc_flags & IBV_WC_WITH_INV, 0u);
  ExpectCompletion(cq(), 5);
  EXPECT_EQ(exposed.Deregister(), 0) << "nothing is bound to it";
  EXPECT_EQ(received.wc_flags & IBV_WC_WITH_INV, unsigned{IBV_WC_WITH_INV});
  EXPECT_EQ(received.invalidated_rkey, rkey);
}

// Of each kind that tells the peer something: in one batch, inline and not.
TEST_F(QpExTrafficTest, ImmediatesArriveWithTheirMessages) {
  if (pair->client.IsIwarp()) GTEST_SKIP() << "skipped: iWARP has no Send with Immediate";
  EndpointOptions client;
  client.send_ops = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
  client.cap.max_inline_data = 64;
  auto told = Pair::Connected({}, client);
  ibv_qp_ex* const teller = ibv_qp_to_qp_ex(told->client.qp());
  ASSERT_NE(teller, nullptr);
  Buffer from(told->client.pd.get(), 64);
  Buffer to(told->server.pd.get(), 256, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  from.Fill("by key");
  for (uint64_t i = 0; i < 4; ++i) ASSERT_EQ(PostReceive(told->server.qp(), i, {to.Sge(i * 32, 32)}), 0);
  const auto begin = [teller](uint64_t wr_id) {
    teller->wr_id = wr_id;
    teller->wr_flags = IBV_SEND_SIGNALED;
  };
  char text[] = "inline";
  ibv_wr_start(teller);
  begin(10);
  ibv_wr_send_imm(teller, htobe32(0x01020304));
  ibv_wr_set_sge(teller, from.lkey(), from.address(), 6);
  begin(11);
  ibv_wr_send(teller);
  ibv_wr_set_sge(teller, from.lkey(), from.address(), 2);
  begin(12);
  ibv_wr_rdma_write_imm(teller, to.rkey(), to.address() + 200, htobe32(7));
  ibv_wr_set_sge(teller, from.lkey(), from.address(), 6);
  begin(13);
  ibv_wr_send_imm(teller, htobe32(8));
  ibv_wr_set_inline_data(teller, text, 6);
  ASSERT_EQ(ibv_wr_complete(teller), 0);
  for (uint64_t i = 10; i < 14; ++i) ExpectCompletion(told->client.send_cq.get(), i);
  ibv_cq* const received = told->server.receive_cq.get();
  const auto expect = [received](uint64_t wr_id, ibv_wc_opcode opcode, std::optional<uint32_t> immediate) {
    const ibv_wc completion = ExpectCompletion(received, wr_id);
    EXPECT_EQ(completion.opcode, opcode);
    EXPECT_EQ((completion.wc_flags & IBV_WC_WITH_IMM) != 0, immediate.has_value());
    if (immediate) {
      EXPECT_EQ(completion.imm_data, htobe32(*immediate));
    }
  };
  expect(0, IBV_WC_RECV, 0x01020304);
  expect(1, IBV_WC_RECV, std::nullopt);
  expect(2, IBV_WC_RECV_RDMA_WITH_IMM, 7);
  expect(3, IBV_WC_RECV, 8);
  EXPECT_EQ(to.Text(6), "by key");
  EXPECT_EQ(AsText(ConstBytes(to.bytes()).subspan(200, 6)), "by key");
  EXPECT_EQ(AsText(ConstBytes(to.bytes()).subspan(96, 6)), "inline");
}

TEST_F(QpExTrafficTest, WindowsAreBoundInvalidatedAndInvalidatedFromAfar) {
  ibv_device_attr limits{};
  ASSERT_EQ(ibv_query_device(qp->qp_base.context, &limits), 0);
  if ((limits.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B) == 0) GTEST_SKIP() << "skipped: no type 2B windows";
  auto window = AllocateMw(pair->client.pd.get(), IBV_MW_TYPE_2);
  ASSERT_TRUE(window);
  const ibv_mw_bind_info info{
      .mr = ours->mr(), .addr = ours->address(), .length = 100, .mw_access_flags = IBV_ACCESS_REMOTE_WRITE};
  const uint32_t first = ibv_inc_rkey((*window)->rkey);
  ibv_wr_start(qp);
  Begin(1);
  ibv_wr_bind_mw(qp, window->get(), first, &info);
  Begin(2);
  ibv_wr_local_inv(qp, first);
  Begin(3);
  const uint32_t second = ibv_inc_rkey(first);
  ibv_wr_bind_mw(qp, window->get(), second, &info);
  ASSERT_EQ(ibv_wr_complete(qp), 0);
  EXPECT_EQ(ExpectCompletion(cq(), 1).opcode, IBV_WC_BIND_MW);
  EXPECT_EQ(ExpectCompletion(cq(), 2).opcode, IBV_WC_LOCAL_INV);
  ExpectCompletion(cq(), 3);
  ASSERT_EQ(PostReceive(pair->client.qp(), 8, {ours->Sge(200, 8)}), 0);
  ASSERT_EQ(Post(pair->server.qp(),
                 {.wr_id = 5, .opcode = IBV_WR_SEND_WITH_INV, .sges = {theirs->Sge(0, 8)}, .rkey = second}),
            0);
  EXPECT_EQ(ExpectCompletion(pair->client.receive_cq.get(), 8).invalidated_rkey, second);
}

TEST_F(QpExTrafficTest, AWindowIsNamedByItsNewKeyOnceTheBatchIsTaken) {
  auto window = AllocateMw(pair->client.pd.get(), IBV_MW_TYPE_2);
  if (!window) GTEST_SKIP() << "skipped: no type 2B windows";
  const ibv_mw_bind_info info{
      .mr = ours->mr(), .addr = ours->address(), .length = 100, .mw_access_flags = IBV_ACCESS_REMOTE_WRITE};
  const uint32_t before = (*window)->rkey;
  const uint32_t bound = ibv_inc_rkey(before);
  ibv_wr_start(qp);
  Begin(1);
  ibv_wr_bind_mw(qp, window->get(), bound, &info);
  ibv_wr_abort(qp);
  EXPECT_EQ((*window)->rkey, before) << "nothing was posted";
  ibv_wr_start(qp);
  Begin(1);
  // Another index than the window's: its own stays.
  ibv_wr_bind_mw(qp, window->get(), bound ^ 0x5a5a5a00, &info);
  EXPECT_EQ(ibv_wr_complete(qp), 0);
  EXPECT_EQ((*window)->rkey, bound);
  ExpectCompletion(cq(), 1);
  ours->Fill("by window");
  theirs->Fill("by window");
  ASSERT_EQ(Post(pair->server.qp(), {.wr_id = 5,
                                     .opcode = IBV_WR_RDMA_WRITE,
                                     .sges = {theirs->Sge(0, 9)},
                                     .remote_address = ours->address() + 50,
                                     .rkey = bound}),
            0);
  ExpectCompletion(pair->server.send_cq.get(), 5);
}

}  // namespace
}  // namespace stagecoach::verbs
