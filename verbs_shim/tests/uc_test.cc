// Unreliable connections made by hand: what arrives, what is lost, and a send queue that stops alone.

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "verbs_shim/tests/hand_connected.h"

namespace stagecoach::verbs {
namespace {

constexpr size_t kLong = 20001;

class UcTest : public HandTest {
 protected:
  void SetUp() override {
    HandTest::SetUp();
    if (IsSkipped()) return;
    HandOptions options;
    options.type = IBV_QPT_UC;
    pair = HandPair::Connected(options, options);
    at_server = std::make_unique<Buffer>(pair->server.pd.get(), kLong,
                                         IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
    at_client = std::make_unique<Buffer>(pair->client.pd.get(), kLong, IBV_ACCESS_LOCAL_WRITE);
    ASSERT_NO_FATAL_FAILURE(pair->ExpectPassage());
  }
  void TearDown() override {
    at_server.reset();
    at_client.reset();
    pair.reset();
    HandTest::TearDown();
  }
  SendSpec OnAll(uint64_t wr_id, ibv_wr_opcode opcode) {
    return {.wr_id = wr_id,
            .opcode = opcode,
            .sges = {at_client->Sge()},
            .remote_address = at_server->address(),
            .rkey = at_server->rkey()};
  }
  // Of a request with the id 1, between a Send that arrives and one that never leaves. Receives go on, and RTS is the
  // way out.
  void ExpectLocalFailure(ibv_send_wr& request) {
    ibv_sge eight = at_client->Sge(0, 8);
    ibv_send_wr before{};
    before.opcode = IBV_WR_SEND;
    before.send_flags = IBV_SEND_SIGNALED;
    before.sg_list = &eight;
    before.num_sge = 1;
    ibv_send_wr behind = before;
    before.next = &request;
    request.next = &behind;
    behind.wr_id = 2;
    ibv_send_wr* bad = nullptr;
    ASSERT_EQ(PostReceive(client_qp(), 7, {at_client->Sge()}), 0);
    for (uint64_t i = 3; i < 5; ++i) ASSERT_EQ(PostReceive(server_qp(), i, {at_server->Sge()}), 0);
    ASSERT_EQ(ibv_post_send(client_qp(), &before, &bad), 0);
    ExpectCompletion(sent(), 0);
    ExpectCompletion(sent(), 1, IBV_WC_MW_BIND_ERR);
    EXPECT_EQ(pair->client.State(), IBV_QPS_SQE);
    ExpectCompletion(sent(), 2, IBV_WC_WR_FLUSH_ERR);
    ExpectCompletion(received(), 3);
    ASSERT_EQ(Post(server_qp(), {.wr_id = 8, .sges = {at_server->Sge(0, 8)}}), 0);
    ExpectCompletion(pair->client.receive_cq.get(), 7);
    ASSERT_EQ(pair->client.To(IBV_QPS_RTS), 0);
    ASSERT_EQ(Post(client_qp(), {.wr_id = 5, .sges = {eight}}), 0);
    ExpectCompletion(sent(), 5);
    EXPECT_EQ(ExpectCompletion(received(), 4).byte_len, 8u);
  }
  bool Arrived() { return std::memcmp(at_server->bytes().data(), at_client->bytes().data(), kLong) == 0; }
  ibv_qp* server_qp() { return pair->server.qp.get(); }
  ibv_qp* client_qp() { return pair->client.qp.get(); }
  ibv_cq* sent() { return pair->client.send_cq.get(); }
  ibv_cq* received() { return pair->server.receive_cq.get(); }

  std::unique_ptr<HandPair> pair;
  std::unique_ptr<Buffer> at_server;
  std::unique_ptr<Buffer> at_client;
};

TEST_F(UcTest, ASendArrives) {
  at_client->FillPattern(1);
  ASSERT_EQ(PostReceive(server_qp(), 1, {at_server->Sge()}), 0);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 2, .sges = {at_client->Sge()}}), 0);
  EXPECT_EQ(ExpectCompletion(received(), 1).byte_len, kLong);
  EXPECT_TRUE(Arrived());
  ExpectCompletion(sent(), 2);
}

TEST_F(UcTest, AWriteWithImmediateArrives) {
  at_client->FillPattern(2);
  ASSERT_EQ(PostReceive(server_qp(), 1, {}), 0);
  SendSpec write = OnAll(2, IBV_WR_RDMA_WRITE_WITH_IMM);
  write.immediate = htobe32(9);
  ASSERT_EQ(Post(client_qp(), write), 0);
  const ibv_wc arrived = ExpectCompletion(received(), 1);
  EXPECT_EQ(arrived.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
  EXPECT_EQ(arrived.imm_data, htobe32(9));
  EXPECT_TRUE(Arrived());
  ExpectCompletion(sent(), 2);
}

// Nothing that needs an answer, and nothing that must not be lost (InfiniBand specification, table 39).
TEST_F(UcTest, WhatNeedsAnAnswerFailsWhenItsTurnComes) {
  uint64_t id = 1;
  for (const ibv_wr_opcode opcode :
       {IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_SEND_WITH_INV}) {
    SendSpec spec = OnAll(id, opcode);
    spec.sges = {at_client->Sge(0, 8)};
    ASSERT_EQ(Post(client_qp(), spec), 0) << opcode;
    ASSERT_EQ(Post(client_qp(), OnAll(id + 1, IBV_WR_RDMA_WRITE)), 0);
    ExpectCompletion(sent(), id, IBV_WC_LOC_QP_OP_ERR);
    EXPECT_EQ(pair->client.State(), IBV_QPS_SQE);
    ExpectCompletion(sent(), id + 1, IBV_WC_WR_FLUSH_ERR);
    ASSERT_EQ(pair->client.To(IBV_QPS_RTS), 0);
    id += 2;
  }
  at_client->FillPattern(9);
  ASSERT_EQ(PostReceive(server_qp(), 98, {at_server->Sge(0, 8)}), 0);
  ASSERT_EQ(Post(client_qp(), OnAll(99, IBV_WR_RDMA_WRITE_WITH_IMM)), 0);
  ExpectCompletion(sent(), 99);
  ExpectCompletion(received(), 98);
  EXPECT_TRUE(Arrived());
}

TEST_F(UcTest, ASendThatFindsNoReceiveIsLost) {
  // With another thread at work nothing but looking at memory tells when the Send has been and gone.
  if (world().HasThreads()) GTEST_SKIP() << "skipped: for a world that stands still";
  ASSERT_EQ(Post(client_qp(), {.wr_id = 1, .sges = {at_client->Sge(0, 8)}}), 0);
  ExpectCompletion(sent(), 1);
  at_client->Fill("mark");
  ASSERT_EQ(Post(client_qp(), OnAll(2, IBV_WR_RDMA_WRITE)), 0);
  ASSERT_TRUE(world().Until([&] { return at_server->Text(4) == "mark"; }));
  EXPECT_TRUE(NoCompletion(received()));
  ASSERT_EQ(PostReceive(server_qp(), 3, {at_server->Sge()}), 0);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 4, .sges = {at_client->Sge(0, 9)}}), 0);
  EXPECT_EQ(ExpectCompletion(received(), 3).byte_len, 9u);
}

TEST_F(UcTest, AWriteToMemoryThatIsNotItsIsLostAndNobodyIsTold) {
  SendSpec write = OnAll(1, IBV_WR_RDMA_WRITE);
  write.rkey += 0x100;
  ASSERT_EQ(Post(client_qp(), write), 0);
  ExpectCompletion(sent(), 1);
  at_client->Fill("after it");
  ASSERT_EQ(PostReceive(server_qp(), 2, {at_server->Sge(0, 64)}), 0);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 3, .sges = {at_client->Sge(0, 8)}}), 0);
  ExpectCompletion(received(), 2);
  EXPECT_EQ(at_server->Text(8), "after it");
  EXPECT_EQ(pair->server.State(), IBV_QPS_RTS);
}

TEST_F(UcTest, SendsToAPeerThatIsGoneSucceed) {
  ASSERT_EQ(Post(client_qp(), OnAll(1, IBV_WR_RDMA_WRITE)), 0);
  ExpectCompletion(sent(), 1);
  at_server.reset();
  ASSERT_EQ(pair->server.qp.Destroy(), 0);
  for (uint64_t i = 2; i < 6; ++i) ASSERT_EQ(Post(client_qp(), {.wr_id = i, .sges = {at_client->Sge()}}), 0);
  for (uint64_t i = 2; i < 6; ++i) ExpectCompletion(sent(), i);
  EXPECT_EQ(pair->client.State(), IBV_QPS_RTS);
}

TEST_F(UcTest, AMessageLongerThanTheLongestFails) {
  ibv_device_attr device{};
  ibv_port_attr port{};
  ASSERT_EQ(ibv_query_device(pair->client.context.get(), &device), 0);
  ASSERT_EQ(ibv_query_port(pair->client.context.get(), 1, &port), 0);
  HandOptions gathering;
  gathering.type = IBV_QPT_UC;
  gathering.cap.max_send_sge = static_cast<uint32_t>(device.max_sge);
  HandPair other(gathering, gathering);
  ASSERT_NO_FATAL_FAILURE(other.Connect());
  ASSERT_NO_FATAL_FAILURE(other.ExpectPassage());
  // The same memory over and over. It is only read, and so takes none.
  const size_t page = 4096;
  const size_t size = (port.max_msg_sz / static_cast<uint32_t>(device.max_sge) / page + 1) * page;
  void* memory = mmap(nullptr, size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  {
    auto region = RegisterMemory(other.client.pd.get(), memory, size, 0);
    ASSERT_TRUE(region) << region.error().ToString();
    const ibv_sge whole{reinterpret_cast<uint64_t>(memory), static_cast<uint32_t>(size), (*region)->lkey};
    const std::vector<ibv_sge> all(static_cast<size_t>(device.max_sge), whole);
    ASSERT_EQ(Post(other.client.qp.get(), {.wr_id = 1, .sges = all}), 0);
    ExpectCompletion(other.client.send_cq.get(), 1, IBV_WC_LOC_LEN_ERR);
  }
  munmap(memory, size);
}

// Like any other send that fails it stops the send queue alone.
TEST_F(UcTest, ABindBeyondTheRegionStopsTheSendQueueAlone) {
  Buffer bindable(pair->client.pd.get(), 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
  auto window = AllocateMw(pair->client.pd.get(), IBV_MW_TYPE_2);
  if (!window) GTEST_SKIP() << "skipped: no memory windows";
  ibv_send_wr bind{};
  bind.wr_id = 1;
  bind.opcode = IBV_WR_BIND_MW;
  bind.bind_mw.mw = window->get();
  bind.bind_mw.rkey = ibv_inc_rkey((*window)->rkey);
  bind.bind_mw.bind_info = {
      .mr = bindable.mr(), .addr = bindable.address(), .length = 65, .mw_access_flags = IBV_ACCESS_REMOTE_READ};
  ASSERT_NO_FATAL_FAILURE(ExpectLocalFailure(bind));
}

TEST_F(UcTest, AnInvalidationOfAKeyNobodyHasStopsTheSendQueueAlone) {
  ibv_send_wr invalidate{};
  invalidate.wr_id = 1;
  invalidate.opcode = IBV_WR_LOCAL_INV;
  invalidate.invalidate_rkey = at_client->rkey() ^ 0x5a5a5a00;
  ASSERT_NO_FATAL_FAILURE(ExpectLocalFailure(invalidate));
}

TEST_F(UcTest, ReceivesMayComeFromAnSrq) {
  HandOptions options;
  options.type = IBV_QPT_UC;
  HandOptions sharing = options;
  sharing.srq_wr = 8;
  HandPair other(sharing, options);
  ASSERT_NE(other.server.srq, nullptr);
  ASSERT_NO_FATAL_FAILURE(other.Connect());
  ASSERT_NO_FATAL_FAILURE(other.ExpectPassage());
  Buffer to(other.server.pd.get(), 64);
  Buffer from(other.client.pd.get(), 64);
  from.Fill("shared");
  for (uint64_t i = 1; i < 4; ++i) ASSERT_EQ(PostReceive(other.server.srq.get(), i, {to.Sge()}), 0);
  for (uint64_t i = 1; i < 3; ++i) {
    ASSERT_EQ(Post(other.client.qp.get(), {.wr_id = i, .sges = {from.Sge(0, 6)}}), 0);
    ExpectCompletion(other.client.send_cq.get(), i);
    ExpectCompletion(other.server.receive_cq.get(), i);
  }
  EXPECT_EQ(to.Text(6), "shared");
  ASSERT_EQ(other.server.To(IBV_QPS_ERR), 0);
  EXPECT_TRUE(ExpectAsyncEvent(other.server.context.get(), IBV_EVENT_QP_LAST_WQE_REACHED, other.server.qp.get()));
  EXPECT_TRUE(NoCompletion(other.server.receive_cq.get())) << "Receives of an SRQ are not flushed";
}

// [IBTA 9.9.3, class D] The Receive stays for a message that fits.
TEST_F(UcTest, ASendLongerThanItsReceiveIsLost) {
  ASSERT_EQ(PostReceive(server_qp(), 1, {at_server->Sge(0, 8)}), 0);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 2, .sges = {at_client->Sge(0, 9)}}), 0);
  at_client->Fill("it fits!");
  ASSERT_EQ(Post(client_qp(), {.wr_id = 3, .sges = {at_client->Sge(0, 8)}}), 0);
  ExpectCompletion(sent(), 2);
  ExpectCompletion(sent(), 3);
  EXPECT_EQ(ExpectCompletion(received(), 1).byte_len, 8u);
  EXPECT_EQ(at_server->Text(8), "it fits!");
  EXPECT_EQ(pair->server.State(), IBV_QPS_RTS);
}

TEST_F(UcTest, AReceiveThatCannotBeWrittenEndsItsQp) {
  ibv_sge unknown = at_server->Sge(0, 64);
  unknown.lkey += 0x100;
  ASSERT_EQ(PostReceive(server_qp(), 1, {unknown}), 0);
  ASSERT_EQ(PostReceive(server_qp(), 2, {}), 0);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 3, .sges = {at_client->Sge(0, 8)}}), 0);
  ExpectCompletion(sent(), 3);
  ExpectCompletion(received(), 1, IBV_WC_LOC_PROT_ERR);
  ExpectCompletion(received(), 2, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(pair->server.State(), IBV_QPS_ERR);
  EXPECT_EQ(pair->client.State(), IBV_QPS_RTS);
}

TEST_F(UcTest, TheErrorStateFlushesBothQueuesInOrder) {
  for (uint64_t i = 0; i < 3; ++i) ASSERT_EQ(PostReceive(client_qp(), i, {at_client->Sge()}), 0);
  ASSERT_EQ(pair->client.To(IBV_QPS_ERR), 0);
  for (uint64_t i = 10; i < 13; ++i) ASSERT_EQ(Post(client_qp(), {.wr_id = i, .flags = 0}), 0);
  for (uint64_t i = 0; i < 3; ++i) {
    ExpectCompletion(pair->client.receive_cq.get(), i, IBV_WC_WR_FLUSH_ERR);
    ExpectCompletion(sent(), 10 + i, IBV_WC_WR_FLUSH_ERR);
  }
}

TEST_F(UcTest, WhatIsBehindAFailedSendIsFlushedInOrder) {
  ibv_sge unknown = at_client->Sge(0, 64);
  unknown.lkey += 0x100;
  ibv_sge good = at_client->Sge(0, 8);
  ibv_send_wr chain[4];
  for (int i = 0; i < 4; ++i) {
    chain[i] = {};
    chain[i].wr_id = static_cast<uint64_t>(i);
    chain[i].next = i < 3 ? &chain[i + 1] : nullptr;
    chain[i].sg_list = i == 1 ? &unknown : &good;
    chain[i].num_sge = 1;
    chain[i].opcode = IBV_WR_SEND;
    chain[i].send_flags = i == 0 ? unsigned{IBV_SEND_SIGNALED} : 0u;
  }
  ASSERT_EQ(PostReceive(server_qp(), 1, {at_server->Sge()}), 0);
  ASSERT_EQ(PostReceive(server_qp(), 2, {at_server->Sge()}), 0);
  ibv_send_wr* bad = nullptr;
  ASSERT_EQ(ibv_post_send(client_qp(), chain, &bad), 0);
  ExpectCompletion(sent(), 0);
  ExpectCompletion(sent(), 1, IBV_WC_LOC_PROT_ERR);
  ExpectCompletion(sent(), 2, IBV_WC_WR_FLUSH_ERR);
  ExpectCompletion(sent(), 3, IBV_WC_WR_FLUSH_ERR);
  ExpectCompletion(received(), 1);
  EXPECT_TRUE(NoCompletion(received()));
}

TEST_F(UcTest, AFailedSendStopsTheSendQueueAlone) {
  ibv_sge unknown = at_client->Sge(0, 64);
  unknown.lkey += 0x100;
  ASSERT_EQ(PostReceive(client_qp(), 7, {at_client->Sge()}), 0);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 1, .sges = {unknown}}), 0);
  ExpectCompletion(sent(), 1, IBV_WC_LOC_PROT_ERR);
  EXPECT_EQ(pair->client.State(), IBV_QPS_SQE);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 2, .sges = {at_client->Sge(0, 8)}}), 0);
  ExpectCompletion(sent(), 2, IBV_WC_WR_FLUSH_ERR);
  // Receiving goes on.
  ASSERT_EQ(Post(server_qp(), {.wr_id = 3, .sges = {at_server->Sge(0, 8)}}), 0);
  ExpectCompletion(pair->client.receive_cq.get(), 7);
  // And so does sending, once the program says so.
  ASSERT_EQ(pair->client.To(IBV_QPS_RTS), 0);
  ASSERT_EQ(PostReceive(server_qp(), 4, {at_server->Sge()}), 0);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 5, .sges = {at_client->Sge(0, 8)}}), 0);
  ExpectCompletion(sent(), 5);
  ExpectCompletion(received(), 4);
}

TEST_F(UcTest, AttributesOfReliabilityAreNotForIt) {
  ASSERT_EQ(pair->client.To(IBV_QPS_RESET), 0);
  ASSERT_EQ(pair->client.ToInit(), 0);
  ibv_qp_attr attributes = pair->client.RtrAttributes(pair->server.Address());
  EXPECT_EQ(ibv_modify_qp(client_qp(), &attributes, pair->client.RtrMask() | IBV_QP_MIN_RNR_TIMER), EINVAL);
  EXPECT_EQ(ibv_modify_qp(client_qp(), &attributes, pair->client.RtrMask()), 0);
}

}  // namespace
}  // namespace stagecoach::verbs
