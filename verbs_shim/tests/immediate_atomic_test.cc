// Write with Immediate and atomics between two ends that both have them.

#include <cerrno>
#include <cstring>
#include <memory>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

constexpr int kAllAccess =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

class ImmediateAtomicTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    Connect({});
    ibv_device_attr limits{};
    ASSERT_EQ(ibv_query_device(client()->context, &limits), 0);
    if (limits.atomic_cap == IBV_ATOMIC_NONE) GTEST_SKIP() << "skipped: the device has no atomics";
  }
  void TearDown() override {
    theirs.reset();
    ours.reset();
    pair.reset();
    VerbsTest::TearDown();
  }
  void Connect(const EndpointOptions& client_options) {
    theirs.reset();
    ours.reset();
    pair.reset();
    pair = Pair::Connected({}, client_options);
    theirs = std::make_unique<Buffer>(pair->server.pd.get(), 8192, kAllAccess);
    ours = std::make_unique<Buffer>(pair->client.pd.get(), 8192, kAllAccess);
  }
  ibv_qp* client() { return pair->client.qp(); }
  ibv_qp* server() { return pair->server.qp(); }
  ibv_cq* client_cq() { return pair->client.send_cq.get(); }
  ibv_cq* server_cq() { return pair->server.receive_cq.get(); }

  static uint64_t WordOf(Buffer& buffer, size_t offset = 0) {
    uint64_t word = 0;
    std::memcpy(&word, buffer.bytes().data() + offset, sizeof(word));
    return word;
  }
  static void SetWord(Buffer& buffer, uint64_t word) { std::memcpy(buffer.bytes().data(), &word, sizeof(word)); }
  SendSpec Atomic(uint64_t wr_id, ibv_wr_opcode opcode, uint64_t compare_add, uint64_t swap = 0) {
    return {.wr_id = wr_id,
            .opcode = opcode,
            .sges = {ours->Sge(wr_id * 8, 8)},
            .remote_address = theirs->address(),
            .rkey = theirs->rkey(),
            .compare_add = compare_add,
            .swap = swap};
  }
  SendSpec WriteImmediate(uint64_t wr_id, size_t length, uint32_t immediate) {
    return {.wr_id = wr_id,
            .opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
            .sges = {ours->Sge(0, length)},
            .remote_address = theirs->address(),
            .rkey = theirs->rkey(),
            .immediate = immediate};
  }
  void ExpectImmediate(uint64_t wr_id, size_t length, uint32_t immediate) {
    const ibv_wc received = ExpectCompletion(server_cq(), wr_id);
    EXPECT_EQ(received.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
    EXPECT_EQ(received.wc_flags & IBV_WC_WITH_IMM, unsigned{IBV_WC_WITH_IMM});
    EXPECT_EQ(received.imm_data, immediate);
    EXPECT_EQ(received.byte_len, length);
  }
  // The atomic fails at this end.
  void ExpectRefused(const SendSpec& spec, ibv_wc_status on_iwarp, ibv_wc_status elsewhere) {
    ASSERT_EQ(Post(client(), spec), 0);
    ExpectCompletion(client_cq(), spec.wr_id, pair->client.IsIwarp() ? on_iwarp : elsewhere);
  }

  std::unique_ptr<Pair> pair;
  std::unique_ptr<Buffer> theirs;  // the server's memory
  std::unique_ptr<Buffer> ours;    // the client's
};

TEST_F(ImmediateAtomicTest, AWriteWithImmediatePlacesItsDataAndTellsTheTarget) {
  ours->FillPattern(1);
  ASSERT_EQ(PostReceive(server(), 9, {}), 0);
  ASSERT_EQ(Post(client(), WriteImmediate(1, 5000, 0x04030201)), 0);
  ExpectImmediate(9, 5000, 0x04030201);
  EXPECT_EQ(theirs->Text(5000), ours->Text(5000));
  EXPECT_EQ(ExpectCompletion(client_cq(), 1).opcode, IBV_WC_RDMA_WRITE);
}

TEST_F(ImmediateAtomicTest, AnEmptyWriteWithImmediateTellsNoMore) {
  ASSERT_EQ(PostReceive(server(), 9, {theirs->Sge(0, 8)}), 0);
  ASSERT_EQ(Post(client(), WriteImmediate(1, 0, 77)), 0);
  ExpectImmediate(9, 0, 77);
  EXPECT_EQ(WordOf(*theirs), 0u);
  ExpectCompletion(client_cq(), 1);
}

TEST_F(ImmediateAtomicTest, WritesBeforeAreInPlaceWhenTheImmediateIs) {
  for (uint64_t i = 0; i < 20; ++i) {
    ASSERT_EQ(PostReceive(server(), i, {}), 0);
    ours->FillPattern(static_cast<uint32_t>(i));
    ASSERT_EQ(Post(client(), {.wr_id = 100,
                              .opcode = IBV_WR_RDMA_WRITE,
                              .sges = {ours->Sge(0, 4096)},
                              .remote_address = theirs->address() + 4096,
                              .rkey = theirs->rkey()}),
              0);
    ASSERT_EQ(Post(client(), WriteImmediate(101, 10, static_cast<uint32_t>(i))), 0);
    ExpectImmediate(i, 10, static_cast<uint32_t>(i));
    ASSERT_EQ(std::memcmp(theirs->bytes().data() + 4096, ours->bytes().data(), 4096), 0);
    ExpectCompletion(client_cq(), 100);
    ExpectCompletion(client_cq(), 101);
  }
}

TEST_F(ImmediateAtomicTest, AnImmediateIsSolicitedWhereItSaysSo) {
  ASSERT_EQ(ibv_req_notify_cq(server_cq(), 1), 0);
  ASSERT_EQ(PostReceive(server(), 1, {}), 0);
  ASSERT_EQ(PostReceive(server(), 2, {}), 0);
  ASSERT_EQ(Post(client(), WriteImmediate(1, 8, 1)), 0);
  ExpectCompletion(client_cq(), 1);
  ExpectImmediate(1, 8, 1);
  EXPECT_FALSE(IsReadable(pair->server.receive_channel->fd));
  SendSpec solicited = WriteImmediate(2, 8, 2);
  solicited.flags |= IBV_SEND_SOLICITED;
  ASSERT_EQ(Post(client(), solicited), 0);
  EXPECT_TRUE(BecomesReadable(pair->server.receive_channel->fd));
  ibv_cq* cq = nullptr;
  void* context = nullptr;
  ASSERT_EQ(ibv_get_cq_event(pair->server.receive_channel.get(), &cq, &context), 0);
  ibv_ack_cq_events(cq, 1);
  ExpectImmediate(2, 8, 2);
  ExpectCompletion(client_cq(), 2);
}

// On iWARP the immediate comes in a message of its own, which a Write that is refused keeps from being looked at.
TEST_F(ImmediateAtomicTest, AWriteWithImmediateThatIsRefusedTellsTheTargetByAnErrorAlone) {
  Buffer closed(pair->server.pd.get(), 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
  for (uint64_t i = 8; i < 10; ++i) ASSERT_EQ(PostReceive(server(), i, {}), 0);
  ours->FillPattern(3);
  SendSpec write = WriteImmediate(1, 16, 77);
  write.remote_address = closed.address();
  write.rkey = closed.rkey();
  ASSERT_EQ(Post(client(), write), 0);
  ExpectCompletion(server_cq(), 8, pair->client.IsIwarp() ? IBV_WC_WR_FLUSH_ERR : IBV_WC_LOC_ACCESS_ERR);
  ExpectCompletion(server_cq(), 9, IBV_WC_WR_FLUSH_ERR);
  ExpectCompletion(client_cq(), 1, pair->client.IsIwarp() ? IBV_WC_SUCCESS : IBV_WC_REM_ACCESS_ERR);
  EXPECT_TRUE(ExpectAsyncEvent(pair->server.context(), IBV_EVENT_QP_ACCESS_ERR, server()));
  EXPECT_EQ(WordOf(closed), 0u);
}

TEST_F(ImmediateAtomicTest, AtomicsBringBackWhatWasThere) {
  SetWord(*theirs, 40);
  ASSERT_EQ(Post(client(), Atomic(1, IBV_WR_ATOMIC_FETCH_AND_ADD, 2)), 0);
  ASSERT_EQ(Post(client(), Atomic(2, IBV_WR_ATOMIC_CMP_AND_SWP, 42, 7)), 0);
  ASSERT_EQ(Post(client(), Atomic(3, IBV_WR_ATOMIC_CMP_AND_SWP, 42, 9)), 0);
  const ibv_wc added = ExpectCompletion(client_cq(), 1);
  EXPECT_EQ(added.opcode, IBV_WC_FETCH_ADD);
  EXPECT_EQ(added.byte_len, 8u);
  EXPECT_EQ(ExpectCompletion(client_cq(), 2).opcode, IBV_WC_COMP_SWAP);
  ExpectCompletion(client_cq(), 3);
  EXPECT_EQ(WordOf(*ours, 8), 40u);
  EXPECT_EQ(WordOf(*ours, 16), 42u);
  EXPECT_EQ(WordOf(*ours, 24), 7u);
  EXPECT_EQ(WordOf(*theirs), 7u);
  EXPECT_TRUE(NoCompletion(server_cq()));
}

TEST_F(ImmediateAtomicTest, MoreAtomicsThanTheDepthWaitTheirTurn) {
  EndpointOptions shallow;
  shallow.connection.initiator_depth = 2;
  Connect(shallow);
  for (uint64_t i = 0; i < 30; ++i) ASSERT_EQ(Post(client(), Atomic(i, IBV_WR_ATOMIC_FETCH_AND_ADD, 1)), 0);
  for (uint64_t i = 0; i < 30; ++i) {
    ExpectCompletion(client_cq(), i);
    EXPECT_EQ(WordOf(*ours, i * 8), i);
  }
  EXPECT_EQ(WordOf(*theirs), 30u);
}

TEST_F(ImmediateAtomicTest, AFencedSendWaitsForTheAtomicBeforeIt) {
  SetWord(*theirs, 1234);
  ASSERT_EQ(PostReceive(server(), 1, {theirs->Sge(1000, 8)}), 0);
  ASSERT_EQ(Post(client(), Atomic(0, IBV_WR_ATOMIC_FETCH_AND_ADD, 1)), 0);
  ASSERT_EQ(Post(client(), {.wr_id = 2, .flags = IBV_SEND_SIGNALED | IBV_SEND_FENCE, .sges = {ours->Sge(0, 8)}}), 0);
  ExpectCompletion(server_cq(), 1);
  EXPECT_EQ(WordOf(*theirs, 1000), 1234u);
  ExpectCompletion(client_cq(), 0);
  ExpectCompletion(client_cq(), 2);
}

TEST_F(ImmediateAtomicTest, AnAtomicWithoutTheRightIsARemoteAccessError) {
  Buffer closed(pair->server.pd.get(), 64, kAllAccess & ~IBV_ACCESS_REMOTE_ATOMIC);
  SendSpec spec = Atomic(1, IBV_WR_ATOMIC_FETCH_AND_ADD, 1);
  spec.remote_address = closed.address();
  spec.rkey = closed.rkey();
  ExpectRefused(spec, IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(WordOf(closed), 0u);
}

TEST_F(ImmediateAtomicTest, AnAtomicOnAnAddressThatIsNotAlignedIsRefusedByTheTarget) {
  SendSpec spec = Atomic(1, IBV_WR_ATOMIC_FETCH_AND_ADD, 1);
  spec.remote_address += 4;
  ExpectRefused(spec, IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR);
  EXPECT_EQ(WordOf(*theirs), 0u);
}

TEST_F(ImmediateAtomicTest, AnAtomicNeedsRoomForItsAnswer) {
  SendSpec inlined = Atomic(1, IBV_WR_ATOMIC_FETCH_AND_ADD, 1);
  inlined.flags |= IBV_SEND_INLINE;
  EXPECT_EQ(Post(client(), inlined), EINVAL);
  Buffer read_only(pair->client.pd.get(), 64, IBV_ACCESS_REMOTE_READ);
  SendSpec spec = Atomic(2, IBV_WR_ATOMIC_FETCH_AND_ADD, 1);
  spec.sges = {read_only.Sge(0, 8)};
  ExpectRefused(spec, IBV_WC_LOC_PROT_ERR, IBV_WC_LOC_PROT_ERR);
}

TEST_F(ImmediateAtomicTest, TheCallsOfExtendedQpsDoTheSame) {
  EndpointOptions extended;
  extended.send_ops =
      IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
  Connect(extended);
  ibv_qp_ex* qp = ibv_qp_to_qp_ex(client());
  ASSERT_NE(qp, nullptr);
  ASSERT_EQ(PostReceive(server(), 9, {}), 0);
  ibv_wr_start(qp);
  qp->wr_flags = IBV_SEND_SIGNALED;
  qp->wr_id = 1;
  ibv_wr_atomic_fetch_add(qp, theirs->rkey(), theirs->address(), 5);
  ibv_wr_set_sge(qp, ours->lkey(), ours->address(), 8);
  qp->wr_id = 2;
  ibv_wr_atomic_cmp_swp(qp, theirs->rkey(), theirs->address(), 5, 6);
  ibv_wr_set_sge(qp, ours->lkey(), ours->address() + 8, 8);
  qp->wr_id = 3;
  ibv_wr_rdma_write_imm(qp, theirs->rkey(), theirs->address() + 64, 99);
  ibv_wr_set_sge(qp, ours->lkey(), ours->address(), 16);
  ASSERT_EQ(ibv_wr_complete(qp), 0);
  for (uint64_t i = 1; i <= 3; ++i) ExpectCompletion(client_cq(), i);
  ExpectImmediate(9, 16, 99);
  EXPECT_EQ(WordOf(*ours, 8), 5u);
  EXPECT_EQ(WordOf(*theirs), 6u);
}

}  // namespace
}  // namespace stagecoach::verbs
