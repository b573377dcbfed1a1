// QPs that are connected with themselves: what one sends arrives in its own Receives, and its own memory is what it
// writes and reads. Drivers and programs test themselves that way.

#include <cerrno>
#include <cstring>
#include <memory>
#include <vector>

#include "verbs_shim/tests/hand_connected.h"

namespace stagecoach::verbs {
namespace {

constexpr int kAccess =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

class SelfConnectTest : public HandTest {
 protected:
  void SetUp() override {
    HandTest::SetUp();
    if (IsSkipped()) return;
    Start({});
  }
  void TearDown() override {
    from.reset();
    to.reset();
    end.reset();
    HandTest::TearDown();
  }

  void Start(const HandOptions& options) {
    from.reset();
    to.reset();
    end = std::make_unique<HandEnd>(true, options);
    from = std::make_unique<Buffer>(end->pd.get(), 4096);
    to = std::make_unique<Buffer>(end->pd.get(), 4096, kAccess);
    ASSERT_NO_FATAL_FAILURE(end->Connect(end->Address()));
  }
  void ExpectSend(uint64_t number) {
    from->FillPattern(static_cast<uint32_t>(number));
    ASSERT_EQ(PostReceive(end->qp.get(), number, {to->Sge()}), 0);
    ASSERT_EQ(Post(end->qp.get(), {.wr_id = number, .sges = {from->Sge()}}), 0);
    EXPECT_EQ(ExpectCompletion(end->receive_cq.get(), number).byte_len, from->size());
    ExpectCompletion(end->send_cq.get(), number);
    EXPECT_TRUE(std::equal(from->bytes().begin(), from->bytes().end(), to->bytes().begin()));
  }
  SendSpec OnItself(uint64_t wr_id, ibv_wr_opcode opcode, size_t size) {
    return {.wr_id = wr_id,
            .opcode = opcode,
            .sges = {from->Sge(0, size)},
            .remote_address = to->address(),
            .rkey = to->rkey()};
  }

  std::unique_ptr<HandEnd> end;
  std::unique_ptr<Buffer> from;
  std::unique_ptr<Buffer> to;
};

TEST_F(SelfConnectTest, SendsArriveInItsOwnReceives) {
  for (const ibv_qp_type type : {IBV_QPT_RC, IBV_QPT_UC}) {
    ASSERT_NO_FATAL_FAILURE(Start({.type = type}));
    for (uint64_t i = 0; i < 50; ++i) ASSERT_NO_FATAL_FAILURE(ExpectSend(i)) << type;
  }
}

TEST_F(SelfConnectTest, ManySendsArriveInOrder) {
  for (uint64_t i = 0; i < 32; ++i) ASSERT_EQ(PostReceive(end->qp.get(), i, {to->Sge()}), 0);
  for (uint64_t i = 0; i < 32; ++i) ASSERT_EQ(Post(end->qp.get(), {.wr_id = i, .sges = {from->Sge(0, i)}}), 0);
  for (uint64_t i = 0; i < 32; ++i) {
    EXPECT_EQ(ExpectCompletion(end->receive_cq.get(), i).byte_len, i);
    ExpectCompletion(end->send_cq.get(), i);
  }
}

// More than there is room for on the way.
TEST_F(SelfConnectTest, LongMessagesBothWaysGetThrough) {
  constexpr size_t kSize = size_t{4} << 20;
  Buffer source(end->pd.get(), kSize);
  Buffer sink(end->pd.get(), kSize, kAccess);
  Buffer back(end->pd.get(), kSize);
  source.FillPattern(3);
  SendSpec write{.wr_id = 1,
                 .opcode = IBV_WR_RDMA_WRITE,
                 .sges = {source.Sge()},
                 .remote_address = sink.address(),
                 .rkey = sink.rkey()};
  ASSERT_EQ(Post(end->qp.get(), write), 0);
  SendSpec read = write;
  read.wr_id = 2;
  read.opcode = IBV_WR_RDMA_READ;
  read.sges = {back.Sge()};
  ASSERT_EQ(Post(end->qp.get(), read), 0);
  write.wr_id = 3;
  ASSERT_EQ(Post(end->qp.get(), write), 0);
  for (uint64_t i = 1; i <= 3; ++i) ExpectCompletion(end->send_cq.get(), i);
  EXPECT_EQ(std::memcmp(source.bytes().data(), sink.bytes().data(), kSize), 0);
  EXPECT_EQ(std::memcmp(source.bytes().data(), back.bytes().data(), kSize), 0);
}

TEST_F(SelfConnectTest, ItsOwnMemoryIsWrittenReadAndAddedTo) {
  from->Fill("written");
  ASSERT_EQ(Post(end->qp.get(), OnItself(1, IBV_WR_RDMA_WRITE, 8)), 0);
  ExpectCompletion(end->send_cq.get(), 1);
  EXPECT_EQ(to->Text(7), "written");
  SendSpec add = OnItself(2, IBV_WR_ATOMIC_FETCH_AND_ADD, 8);
  add.compare_add = 1;
  ASSERT_EQ(Post(end->qp.get(), add), 0);
  ExpectCompletion(end->send_cq.get(), 2);
  EXPECT_EQ(from->Text(7), "written");
  EXPECT_EQ(to->Text(7), "xritten");
  SendSpec swap = OnItself(3, IBV_WR_ATOMIC_CMP_AND_SWP, 8);
  std::memcpy(&swap.compare_add, to->bytes().data(), 8);
  std::memcpy(&swap.swap, "swapped", 8);
  ASSERT_EQ(Post(end->qp.get(), swap), 0);
  ExpectCompletion(end->send_cq.get(), 3);
  EXPECT_EQ(from->Text(7), "xritten");
  ASSERT_EQ(Post(end->qp.get(), OnItself(4, IBV_WR_RDMA_READ, 4096)), 0);
  ExpectCompletion(end->send_cq.get(), 4);
  EXPECT_EQ(from->Text(7), "swapped");
}

TEST_F(SelfConnectTest, ImmediateDataArrives) {
  ASSERT_EQ(PostReceive(end->qp.get(), 1, {to->Sge()}), 0);
  SendSpec write = OnItself(2, IBV_WR_RDMA_WRITE_WITH_IMM, 8);
  write.immediate = htobe32(77);
  ASSERT_EQ(Post(end->qp.get(), write), 0);
  const ibv_wc completion = ExpectCompletion(end->receive_cq.get(), 1);
  EXPECT_EQ(completion.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
  EXPECT_EQ(completion.imm_data, htobe32(77));
  ExpectCompletion(end->send_cq.get(), 2);
}

TEST_F(SelfConnectTest, ASendWaitsForItsOwnReceive) {
  from->Fill("late");
  ASSERT_EQ(Post(end->qp.get(), {.wr_id = 1, .sges = {from->Sge(0, 4)}}), 0);
  EXPECT_TRUE(NoCompletion(end->send_cq.get()));
  ASSERT_EQ(PostReceive(end->qp.get(), 2, {to->Sge()}), 0);
  ExpectCompletion(end->receive_cq.get(), 2);
  ExpectCompletion(end->send_cq.get(), 1);
  EXPECT_EQ(to->Text(4), "late");
}

TEST_F(SelfConnectTest, WithoutAReceiveRetriesAreUsedUp) {
  ASSERT_NO_FATAL_FAILURE(Start({.rnr_retry = 1}));
  ASSERT_EQ(Post(end->qp.get(), {.wr_id = 1, .sges = {from->Sge(0, 4)}}), 0);
  ExpectCompletion(end->send_cq.get(), 1, IBV_WC_RNR_RETRY_EXC_ERR);
  EXPECT_EQ(end->State(), IBV_QPS_ERR);
}

// Which of its two halves finds out first is the device's business.
TEST_F(SelfConnectTest, ARefusalEndsBothHalves) {
  ASSERT_EQ(PostReceive(end->qp.get(), 7, {to->Sge()}), 0);
  SendSpec bad = OnItself(1, IBV_WR_RDMA_WRITE, 8);
  bad.rkey ^= 0x5a5a5a00;
  ASSERT_EQ(Post(end->qp.get(), bad), 0);
  const ibv_wc completion = NextCompletion(end->send_cq.get());
  EXPECT_EQ(completion.wr_id, 1u);
  EXPECT_TRUE(completion.status == IBV_WC_REM_ACCESS_ERR || completion.status == IBV_WC_WR_FLUSH_ERR)
      << ibv_wc_status_str(completion.status);
  ExpectCompletion(end->receive_cq.get(), 7, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(end->State(), IBV_QPS_ERR);
}

TEST_F(SelfConnectTest, TheErrorStateFlushesBothQueues) {
  ASSERT_EQ(Post(end->qp.get(), {.wr_id = 1, .sges = {from->Sge(0, 4)}}), 0);
  ASSERT_EQ(Post(end->qp.get(), {.wr_id = 2, .sges = {from->Sge(0, 4)}}), 0);
  ASSERT_EQ(end->To(IBV_QPS_ERR), 0);
  ASSERT_EQ(PostReceive(end->qp.get(), 3, {to->Sge()}), 0);
  ExpectCompletion(end->send_cq.get(), 1, IBV_WC_WR_FLUSH_ERR);
  ExpectCompletion(end->send_cq.get(), 2, IBV_WC_WR_FLUSH_ERR);
  ExpectCompletion(end->receive_cq.get(), 3, IBV_WC_WR_FLUSH_ERR);
}

TEST_F(SelfConnectTest, ItLivesAgainAfterAReset) {
  for (uint64_t life = 0; life < 3; ++life) {
    ASSERT_NO_FATAL_FAILURE(ExpectSend(life));
    // With something under way.
    ASSERT_EQ(Post(end->qp.get(), {.wr_id = 9, .sges = {from->Sge()}}), 0);
    ASSERT_EQ(end->To(IBV_QPS_RESET), 0);
    ASSERT_NO_FATAL_FAILURE(end->Connect(end->Address()));
  }
  ASSERT_NO_FATAL_FAILURE(ExpectSend(5));
}

TEST_F(SelfConnectTest, WhoSleepsIsWoken) {
  SetNonBlocking(end->receive_channel->fd);
  for (uint64_t i = 0; i < 5; ++i) {
    ASSERT_EQ(PostReceive(end->qp.get(), i, {to->Sge()}), 0);
    ASSERT_EQ(ibv_req_notify_cq(end->receive_cq.get(), 0), 0);
    ASSERT_EQ(Post(end->qp.get(), {.wr_id = i, .sges = {from->Sge()}}), 0);
    ASSERT_TRUE(BecomesReadable(end->receive_channel->fd));
    ibv_cq* cq = nullptr;
    void* context = nullptr;
    ASSERT_EQ(ibv_get_cq_event(end->receive_channel.get(), &cq, &context), 0);
    ibv_ack_cq_events(cq, 1);
    ExpectCompletion(end->receive_cq.get(), i);
    ExpectCompletion(end->send_cq.get(), i);
  }
}

TEST_F(SelfConnectTest, OthersAreNotDisturbed) {
  auto pair = HandPair::Connected();
  Buffer source(pair->client.pd.get(), 64);
  Buffer sink(pair->server.pd.get(), 64);
  for (uint64_t i = 0; i < 10; ++i) {
    ASSERT_NO_FATAL_FAILURE(ExpectSend(i));
    ASSERT_EQ(PostReceive(pair->server.qp.get(), i, {sink.Sge()}), 0);
    ASSERT_EQ(Post(pair->client.qp.get(), {.wr_id = i, .sges = {source.Sge()}}), 0);
    ExpectCompletion(pair->server.receive_cq.get(), i);
    ExpectCompletion(pair->client.send_cq.get(), i);
  }
}

}  // namespace
}  // namespace stagecoach::verbs
