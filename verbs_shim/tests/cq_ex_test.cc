// Extended completion queues: creation, polling field by field, timestamps, and overruns that do not matter.

#include <atomic>
#include <cerrno>
#include <cstring>
#include <numeric>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

class CqExTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    context = std::move(OpenDevice().value());
    ibv_cq_ex* probe = Create({});
    if (probe == nullptr && errno == EOPNOTSUPP) GTEST_SKIP() << "skipped: the device has no extended CQs";
    ASSERT_NE(probe, nullptr);
    EXPECT_EQ(ibv_destroy_cq(ibv_cq_ex_to_cq(probe)), 0);
  }
  void TearDown() override {
    context = {};
    VerbsTest::TearDown();
  }
  ibv_cq_ex* Create(ibv_cq_init_attr_ex attributes) {
    if (attributes.cqe == 0) attributes.cqe = 16;
    errno = 0;
    return ibv_create_cq_ex(context.get(), &attributes);
  }
  Context context;
};

TEST_F(CqExTest, IsACqLikeAnyOther) {
  ibv_cq_init_attr_ex attributes{};
  attributes.cqe = 10;
  attributes.cq_context = this;
  ibv_cq_ex* extended = Create(attributes);
  ASSERT_NE(extended, nullptr);
  ibv_cq* cq = ibv_cq_ex_to_cq(extended);
  EXPECT_EQ(cq->context, context.get());
  EXPECT_EQ(cq->cq_context, this);
  EXPECT_GE(cq->cqe, 10);
  EXPECT_TRUE(NoCompletion(cq));
  EXPECT_EQ(ibv_resize_cq(cq, 20), 0);
  EXPECT_EQ(ibv_destroy_cq(cq), 0);
}

TEST_F(CqExTest, AnEmptyOneHasNothingToPoll) {
  ibv_cq_ex* cq = Create({});
  ASSERT_NE(cq, nullptr);
  ibv_poll_cq_attr attributes{};
  EXPECT_EQ(ibv_start_poll(cq, &attributes), ENOENT);
  EXPECT_EQ(ibv_start_poll(cq, &attributes), ENOENT) << "the first try left nothing locked";
  attributes.comp_mask = 1;
  EXPECT_EQ(ibv_start_poll(cq, &attributes), EINVAL);
  EXPECT_EQ(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)), 0);
}

TEST_F(CqExTest, WhatIsNotKnownIsNotSupported) {
  ibv_cq_init_attr_ex attributes{};
  attributes.wc_flags = uint64_t{1} << 40;
  EXPECT_EQ(Create(attributes), nullptr);
  EXPECT_TRUE(errno == EOPNOTSUPP || errno == EINVAL) << errno;
  attributes = {};
  attributes.comp_mask = 1u << 20;
  EXPECT_EQ(Create(attributes), nullptr);
  EXPECT_TRUE(errno == EOPNOTSUPP || errno == EINVAL) << errno;
  attributes = {};
  attributes.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
  attributes.flags = 1u << 20;
  EXPECT_EQ(Create(attributes), nullptr);
  EXPECT_TRUE(errno == EOPNOTSUPP || errno == EINVAL) << errno;
}

TEST_F(CqExTest, ImpossibleSizesAreInvalid) {
  ibv_device_attr limits{};
  ASSERT_EQ(ibv_query_device(context.get(), &limits), 0);
  ibv_cq_init_attr_ex attributes{};
  attributes.cqe = static_cast<uint32_t>(limits.max_cqe) + 1;
  EXPECT_EQ(Create(attributes), nullptr);
  EXPECT_EQ(errno, EINVAL);
}

// --- With completions ---

class CqExTrafficTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (!IsSkipped() && !Offers(0)) GTEST_SKIP() << "skipped: the device has no extended CQs";
  }
  // Whether there are extended CQs with these flags.
  static bool Offers(uint32_t flags) {
    const Context context = std::move(OpenDevice().value());
    ibv_cq_init_attr_ex attributes{};
    attributes.cqe = 16;
    attributes.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
    attributes.flags = flags;
    ibv_cq_ex* const made = ibv_create_cq_ex(context.get(), &attributes);
    if (made == nullptr && errno == EOPNOTSUPP) return false;
    EXPECT_NE(made, nullptr) << std::strerror(errno);
    if (made == nullptr) return false;
    EXPECT_EQ(ibv_destroy_cq(ibv_cq_ex_to_cq(made)), 0);
    return true;
  }
  void Connect(uint64_t fields, uint32_t flags = 0, int entries = 128) {
    EndpointOptions server;
    server.receive_fields = fields;
    server.receive_cq_flags = flags;
    server.cq_entries = entries;
    pair = Pair::Connected(server);
    ASSERT_TRUE(pair->server.receive_cq);
    inbox = std::make_unique<Buffer>(pair->server.pd.get(), 4096);
    outbox = std::make_unique<Buffer>(pair->client.pd.get(), 4096);
  }
  void TearDown() override {
    inbox.reset();
    outbox.reset();
    pair.reset();
    VerbsTest::TearDown();
  }
  ibv_cq_ex* cq() { return reinterpret_cast<ibv_cq_ex*>(pair->server.receive_cq.get()); }
  void Send(uint64_t receive_id, size_t length) {
    ASSERT_EQ(PostReceive(pair->server.qp(), receive_id, {inbox->Sge(0, 64)}), 0);
    ASSERT_EQ(Post(pair->client.qp(), {.wr_id = 1, .sges = {outbox->Sge(0, length)}}), 0);
    ExpectCompletion(pair->client.send_cq.get(), 1);
  }
  // Until all that the client has sent is delivered: a Read, into `ours` from `theirs`, is answered behind it.
  void AwaitDelivery(const Buffer& ours, const Buffer& theirs) {
    ASSERT_EQ(Post(pair->client.qp(), {.wr_id = 2,
                                       .opcode = IBV_WR_RDMA_READ,
                                       .sges = {ours.Sge(0, 8)},
                                       .remote_address = theirs.address(),
                                       .rkey = theirs.rkey()}),
              0);
    ExpectCompletion(pair->client.send_cq.get(), 2);
  }
  // Begins to poll when there is something.
  bool Start() {
    ibv_poll_cq_attr attributes{};
    return world().Until([&] { return ibv_start_poll(cq(), &attributes) == 0; });
  }
  std::unique_ptr<Pair> pair;
  std::unique_ptr<Buffer> inbox;
  std::unique_ptr<Buffer> outbox;
};

TEST_F(CqExTrafficTest, EachFieldIsThatOfThePlainCompletion) {
  ASSERT_NO_FATAL_FAILURE(Connect(IBV_WC_STANDARD_FLAGS));
  Send(77, 33);
  ASSERT_TRUE(Start());
  EXPECT_EQ(cq()->status, IBV_WC_SUCCESS);
  EXPECT_EQ(cq()->wr_id, 77u);
  EXPECT_EQ(ibv_wc_read_opcode(cq()), IBV_WC_RECV);
  EXPECT_EQ(ibv_wc_read_byte_len(cq()), 33u);
  EXPECT_EQ(ibv_wc_read_qp_num(cq()), pair->server.qp()->qp_num);
  EXPECT_EQ(ibv_wc_read_vendor_err(cq()), 0u);
  if (pair->server.IsIwarp()) {
    EXPECT_EQ(ibv_wc_read_wc_flags(cq()), 0u);
    EXPECT_EQ(ibv_wc_read_src_qp(cq()), 0u);
    EXPECT_EQ(ibv_wc_read_slid(cq()), 0u);
    EXPECT_EQ(ibv_wc_read_sl(cq()), 0);
    EXPECT_EQ(ibv_wc_read_dlid_path_bits(cq()), 0);
  }
  EXPECT_EQ(ibv_next_poll(cq()), ENOENT);
  ibv_end_poll(cq());
  EXPECT_TRUE(NoCompletion(pair->server.receive_cq.get())) << "what was polled one way is gone for the other";
}

TEST_F(CqExTrafficTest, TheKeyThatASendInvalidatedIsAField) {
  ASSERT_NO_FATAL_FAILURE(Connect(IBV_WC_STANDARD_FLAGS));
  auto window = AllocateMw(pair->server.pd.get(), IBV_MW_TYPE_2);
  if (!window) GTEST_SKIP() << "skipped: no type 2B memory windows";
  Buffer exposed(pair->server.pd.get(), 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
  const uint32_t rkey = ibv_inc_rkey((*window)->rkey);
  const ibv_mw_bind_info info = {
      .mr = exposed.mr(), .addr = exposed.address(), .length = 64, .mw_access_flags = IBV_ACCESS_REMOTE_READ};
  ASSERT_EQ(PostBind(pair->server.qp(), 1, window->get(), rkey, info), 0);
  ExpectCompletion(pair->server.send_cq.get(), 1);
  ASSERT_EQ(PostReceive(pair->server.qp(), 2, {inbox->Sge()}), 0);
  ASSERT_EQ(
      Post(pair->client.qp(), {.wr_id = 3, .opcode = IBV_WR_SEND_WITH_INV, .sges = {outbox->Sge(0, 4)}, .rkey = rkey}),
      0);
  ASSERT_TRUE(Start());
  EXPECT_EQ(cq()->status, IBV_WC_SUCCESS);
  EXPECT_EQ(cq()->wr_id, 2u);
  EXPECT_EQ(ibv_wc_read_wc_flags(cq()) & (IBV_WC_WITH_INV | IBV_WC_WITH_IMM), unsigned{IBV_WC_WITH_INV});
  EXPECT_EQ(ibv_wc_read_invalidated_rkey(cq()), rkey);
  ibv_end_poll(cq());
}

TEST_F(CqExTrafficTest, ImmediateDataIsAField) {
  ASSERT_NO_FATAL_FAILURE(Connect(IBV_WC_STANDARD_FLAGS));
  Buffer target(pair->server.pd.get(), 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  std::vector<ibv_wr_opcode> opcodes = {IBV_WR_RDMA_WRITE_WITH_IMM};
  if (!pair->server.IsIwarp()) opcodes.push_back(IBV_WR_SEND_WITH_IMM);
  for (const ibv_wr_opcode opcode : opcodes) {
    ASSERT_EQ(PostReceive(pair->server.qp(), 2, {inbox->Sge()}), 0);
    ASSERT_EQ(Post(pair->client.qp(), {.wr_id = 3,
                                       .opcode = opcode,
                                       .sges = {outbox->Sge(0, 4)},
                                       .remote_address = target.address(),
                                       .rkey = target.rkey(),
                                       .immediate = htobe32(0x01020300 + opcode)}),
              0);
    ASSERT_TRUE(Start());
    EXPECT_EQ(cq()->status, IBV_WC_SUCCESS);
    EXPECT_EQ(ibv_wc_read_opcode(cq()), opcode == IBV_WR_SEND_WITH_IMM ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM);
    EXPECT_EQ(ibv_wc_read_wc_flags(cq()) & (IBV_WC_WITH_INV | IBV_WC_WITH_IMM), unsigned{IBV_WC_WITH_IMM});
    EXPECT_EQ(ibv_wc_read_imm_data(cq()), htobe32(0x01020300 + opcode));
    ibv_end_poll(cq());
    ExpectCompletion(pair->client.send_cq.get(), 3);
  }
}

TEST_F(CqExTrafficTest, NextGoesThroughTheCompletionsInOrder) {
  for (uint32_t flags : {0u, uint32_t{IBV_CREATE_CQ_ATTR_SINGLE_THREADED}}) {
    ASSERT_NO_FATAL_FAILURE(Connect(IBV_WC_EX_WITH_BYTE_LEN, flags));
    for (uint64_t i = 0; i < 5; ++i) Send(i, 10 + i);
    uint64_t next = 0;
    while (next < 5) {
      ASSERT_TRUE(Start());
      do {
        EXPECT_EQ(cq()->wr_id, next);
        EXPECT_EQ(ibv_wc_read_byte_len(cq()), 10 + next);
        ++next;
      } while (ibv_next_poll(cq()) == 0);
      ibv_end_poll(cq());
    }
    EXPECT_EQ(next, 5u);
    inbox.reset();
    outbox.reset();
    pair.reset();
  }
}

// Larger, and as small as what waits in it, while a completion is taken and not yet given back.
TEST_F(CqExTrafficTest, ResizingAmidstAPollChangesNeitherWhatIsTakenNorWhatWaits) {
  ASSERT_NO_FATAL_FAILURE(Connect(IBV_WC_EX_WITH_BYTE_LEN, 0, 8));
  ibv_cq* const plain = ibv_cq_ex_to_cq(cq());
  {
    const int error = ibv_resize_cq(plain, 8);
    if (error == EOPNOTSUPP) GTEST_SKIP() << "skipped: the device does not resize CQs";
    ASSERT_EQ(error, 0);
  }
  Buffer theirs(pair->server.pd.get(), 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
  Buffer ours(pair->client.pd.get(), 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  uint64_t sent = 0;
  uint64_t next = 0;
  for (int round = 0; round < 20; ++round) {
    while (sent < next + 6) {
      Send(sent, 10 + sent);
      ++sent;
    }
    ASSERT_NO_FATAL_FAILURE(AwaitDelivery(ours, theirs));
    ASSERT_TRUE(Start());
    EXPECT_EQ(cq()->wr_id, next);
    const int entries = round % 2 == 0 ? 5 : 8 + round;  // five wait
    ASSERT_EQ(ibv_resize_cq(plain, entries), 0) << entries;
    EXPECT_EQ(cq()->wr_id, next);
    EXPECT_EQ(ibv_wc_read_byte_len(cq()), 10 + next);
    ++next;
    for (int taken = 0; taken < round % 3; ++taken, ++next) {
      ASSERT_EQ(ibv_next_poll(cq()), 0);
      EXPECT_EQ(cq()->wr_id, next);
      EXPECT_EQ(ibv_wc_read_byte_len(cq()), 10 + next);
    }
    ibv_end_poll(cq());
    ASSERT_EQ(ibv_resize_cq(plain, 8), 0);
  }
}

TEST_F(CqExTrafficTest, OneThreadPollsAtATime) {
  ASSERT_NO_FATAL_FAILURE(Connect(IBV_WC_STANDARD_FLAGS));
  Send(1, 8);
  std::atomic<bool> begun = false;
  std::atomic<bool> waits = false;
  std::atomic<bool> ended = false;
  world().SideBySide(
      [&] {
        EXPECT_TRUE(Start());
        begun = true;
        EXPECT_TRUE(world().Until([&] { return waits.load(); }));
        EXPECT_EQ(cq()->wr_id, 1u);
        ended = true;
        ibv_end_poll(cq());
      },
      [&] {
        EXPECT_TRUE(world().Until([&] { return begun.load(); }));
        waits = true;
        ibv_poll_cq_attr attributes{};
        EXPECT_EQ(ibv_start_poll(cq(), &attributes), ENOENT);
        EXPECT_TRUE(ended);
      });
}

TEST_F(CqExTrafficTest, AFlushedReceiveSaysSo) {
  ASSERT_NO_FATAL_FAILURE(Connect(IBV_WC_STANDARD_FLAGS));
  ASSERT_EQ(PostReceive(pair->server.qp(), 9, {inbox->Sge()}), 0);
  ibv_qp_attr change{};
  change.qp_state = IBV_QPS_ERR;
  ASSERT_EQ(ibv_modify_qp(pair->server.qp(), &change, IBV_QP_STATE), 0);
  ASSERT_TRUE(Start());
  EXPECT_EQ(cq()->status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(cq()->wr_id, 9u);
  ibv_end_poll(cq());
}

TEST_F(CqExTrafficTest, TimestampsAreOfTheDevicesClockAndNeverGoBack) {
  ibv_context* context = nullptr;
  {
    auto probe = OpenDevice();
    ASSERT_TRUE(probe);
    ibv_device_attr_ex attributes{};
    ASSERT_EQ(ibv_query_device_ex(probe->get(), nullptr, &attributes), 0);
    if (attributes.completion_timestamp_mask == 0) GTEST_SKIP() << "skipped: no completion timestamps";
    EXPECT_GT(attributes.hca_core_clock, 0u);
  }
  ASSERT_NO_FATAL_FAILURE(Connect(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP));
  context = pair->server.context();
  const auto clock = [&] {
    ibv_values_ex values{};
    values.comp_mask = IBV_VALUES_MASK_RAW_CLOCK;
    EXPECT_EQ(ibv_query_rt_values_ex(context, &values), 0);
    EXPECT_EQ(values.comp_mask, uint32_t{IBV_VALUES_MASK_RAW_CLOCK});
    return static_cast<uint64_t>(values.raw_clock.tv_sec) * 1'000'000'000u +
           static_cast<uint64_t>(values.raw_clock.tv_nsec);
  };
  uint64_t last = clock();
  for (uint64_t i = 0; i < 5; ++i) {
    Send(i, 8);
    ASSERT_TRUE(Start());
    const uint64_t stamp = ibv_wc_read_completion_ts(cq());
    ibv_end_poll(cq());
    EXPECT_GE(stamp, last);
    last = stamp;
  }
  EXPECT_GE(clock(), last);
}

TEST_F(CqExTrafficTest, WhereOverrunsAreIgnoredTheNewestCompletionsStay) {
  if (!Offers(IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN)) GTEST_SKIP() << "skipped: the device does not ignore overruns";
  ASSERT_NO_FATAL_FAILURE(Connect(0, IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN, 4));
  const int entries = pair->server.receive_cq->cqe;
  Buffer theirs(pair->server.pd.get(), 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
  Buffer ours(pair->client.pd.get(), 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  for (int i = 0; i < entries + 3; ++i) Send(static_cast<uint64_t>(i), 8);
  ASSERT_NO_FATAL_FAILURE(AwaitDelivery(ours, theirs));
  std::vector<uint64_t> seen;
  ibv_wc completion{};
  while (ibv_poll_cq(pair->server.receive_cq.get(), 1, &completion) == 1) seen.push_back(completion.wr_id);
  std::vector<uint64_t> newest(static_cast<size_t>(entries));
  std::iota(newest.begin(), newest.end(), uint64_t{3});
  EXPECT_EQ(seen, newest);
  EXPECT_EQ(CountAsyncEvents(pair->server.context(), IBV_EVENT_CQ_ERR), 0);
  ibv_qp_attr now{};
  ibv_qp_init_attr initial{};
  ASSERT_EQ(ibv_query_qp(pair->server.qp(), &now, IBV_QP_STATE, &initial), 0);
  EXPECT_EQ(now.qp_state, IBV_QPS_RTS);
}

}  // namespace
}  // namespace stagecoach::verbs
