// Reliable connections made by hand: every operation, and every way in which one fails.

#include <cerrno>
#include <cstring>
#include <memory>
#include <set>
#include <vector>

#include "verbs_shim/tests/hand_connected.h"

namespace stagecoach::verbs {
namespace {

constexpr int kAllAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                           IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND;
// More than a few packets of any MTU, and no multiple of one.
constexpr size_t kLong = 20001;

class RcTest : public HandTest {
 protected:
  void Connect(const HandOptions& server = {}, const HandOptions& client = {}) {
    at_server.reset();
    at_client.reset();
    pair = HandPair::Connected(server, client);
    at_server = std::make_unique<Buffer>(pair->server.pd.get(), kLong, kAllAccess);
    at_client = std::make_unique<Buffer>(pair->client.pd.get(), kLong, kAllAccess);
  }
  void TearDown() override {
    at_server.reset();
    at_client.reset();
    pair.reset();
    HandTest::TearDown();
  }

  ibv_qp* server_qp() { return pair->server.qp.get(); }
  ibv_qp* client_qp() { return pair->client.qp.get(); }
  ibv_cq* sent() { return pair->client.send_cq.get(); }
  ibv_cq* received() { return pair->server.receive_cq.get(); }

  // A work request of the client's on all of both buffers.
  SendSpec OnAll(uint64_t wr_id, ibv_wr_opcode opcode) {
    return {.wr_id = wr_id,
            .opcode = opcode,
            .sges = {at_client->Sge()},
            .remote_address = at_server->address(),
            .rkey = at_server->rkey()};
  }
  SendSpec Atomic(uint64_t wr_id, ibv_wr_opcode opcode, uint64_t compare_add, uint64_t swap = 0) {
    SendSpec spec = OnAll(wr_id, opcode);
    spec.sges = {at_client->Sge(0, 8)};
    spec.compare_add = compare_add;
    spec.swap = swap;
    return spec;
  }
  static uint64_t First(Buffer& buffer) {
    uint64_t value = 0;
    std::memcpy(&value, buffer.bytes().data(), sizeof(value));
    return value;
  }
  static void SetFirst(Buffer& buffer, uint64_t value) { std::memcpy(buffer.bytes().data(), &value, sizeof(value)); }
  static bool Equal(Buffer& a, Buffer& b) { return std::memcmp(a.bytes().data(), b.bytes().data(), a.size()) == 0; }

  std::unique_ptr<HandPair> pair;
  std::unique_ptr<Buffer> at_server;
  std::unique_ptr<Buffer> at_client;
};

// Timers small enough to wait for, and large enough for a busy machine.
HandOptions Impatient(uint8_t retry_count = 2) {
  HandOptions options;
  options.timeout = 14;  // 67 ms
  options.retry_count = retry_count;
  return options;
}

// --- Operations ---

TEST_F(RcTest, ASendArrives) {
  Connect();
  at_client->FillPattern(1);
  ASSERT_EQ(PostReceive(server_qp(), 7, {at_server->Sge()}), 0);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 8, .sges = {at_client->Sge()}}), 0);
  const ibv_wc arrived = ExpectCompletion(received(), 7);
  EXPECT_EQ(arrived.opcode, IBV_WC_RECV);
  EXPECT_EQ(arrived.byte_len, kLong);
  EXPECT_EQ(arrived.qp_num, server_qp()->qp_num);
  EXPECT_EQ(arrived.wc_flags & IBV_WC_WITH_IMM, 0u);
  EXPECT_TRUE(Equal(*at_server, *at_client));
  EXPECT_EQ(ExpectCompletion(sent(), 8).opcode, IBV_WC_SEND);
}

TEST_F(RcTest, SendsGoBothWays) {
  Connect();
  Buffer inbox(pair->client.pd.get(), 64);
  for (uint64_t round = 0; round < 50; ++round) {
    at_client->Fill("ping " + std::to_string(round));
    ASSERT_EQ(PostReceive(server_qp(), round, {at_server->Sge(0, 64)}), 0);
    ASSERT_EQ(PostReceive(client_qp(), round, {inbox.Sge()}), 0);
    ASSERT_EQ(Post(client_qp(), {.wr_id = round, .sges = {at_client->Sge(0, 64)}}), 0);
    ExpectCompletion(received(), round);
    ASSERT_EQ(Post(server_qp(), {.wr_id = round, .sges = {at_server->Sge(0, 64)}}), 0);
    ExpectCompletion(pair->client.receive_cq.get(), round);
    ExpectCompletion(sent(), round);
    ExpectCompletion(pair->server.send_cq.get(), round);
  }
  EXPECT_EQ(inbox.Text(7), "ping 49");
}

TEST_F(RcTest, AWriteIsPlacedAndCompletesWhenThePeerHasIt) {
  Connect();
  at_client->FillPattern(2);
  ASSERT_EQ(Post(client_qp(), OnAll(1, IBV_WR_RDMA_WRITE)), 0);
  EXPECT_EQ(ExpectCompletion(sent(), 1).opcode, IBV_WC_RDMA_WRITE);
  // Acknowledged, and so in place: nothing else need come first.
  EXPECT_TRUE(Equal(*at_server, *at_client));
  EXPECT_TRUE(NoCompletion(received()));
}

TEST_F(RcTest, AReadBringsWhatIsThere) {
  Connect();
  at_server->FillPattern(3);
  ASSERT_EQ(Post(client_qp(), OnAll(1, IBV_WR_RDMA_READ)), 0);
  const ibv_wc read = ExpectCompletion(sent(), 1);
  EXPECT_EQ(read.opcode, IBV_WC_RDMA_READ);
  EXPECT_EQ(read.byte_len, kLong);
  EXPECT_TRUE(Equal(*at_server, *at_client));
}

TEST_F(RcTest, ImmediateDataArriveAsTheyWereGiven) {
  Connect();
  at_client->FillPattern(4);
  ASSERT_EQ(PostReceive(server_qp(), 1, {at_server->Sge()}), 0);
  SendSpec send = OnAll(2, IBV_WR_SEND_WITH_IMM);
  send.immediate = htobe32(0x01020304);
  ASSERT_EQ(Post(client_qp(), send), 0);
  const ibv_wc arrived = ExpectCompletion(received(), 1);
  EXPECT_EQ(arrived.opcode, IBV_WC_RECV);
  EXPECT_NE(arrived.wc_flags & IBV_WC_WITH_IMM, 0u);
  EXPECT_EQ(arrived.imm_data, htobe32(0x01020304));
  EXPECT_TRUE(Equal(*at_server, *at_client));
  ExpectCompletion(sent(), 2);
}

TEST_F(RcTest, AWriteWithImmediateTakesAReceiveAndLeavesItAlone) {
  Connect();
  at_client->FillPattern(5);
  Buffer untouched(pair->server.pd.get(), 16);
  untouched.Fill("as it was");
  ASSERT_EQ(PostReceive(server_qp(), 1, {untouched.Sge()}), 0);
  SendSpec write = OnAll(2, IBV_WR_RDMA_WRITE_WITH_IMM);
  write.immediate = htobe32(77);
  ASSERT_EQ(Post(client_qp(), write), 0);
  const ibv_wc arrived = ExpectCompletion(received(), 1);
  EXPECT_EQ(arrived.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
  EXPECT_EQ(arrived.imm_data, htobe32(77));
  EXPECT_EQ(arrived.byte_len, kLong);
  EXPECT_TRUE(Equal(*at_server, *at_client));
  EXPECT_EQ(untouched.Text(9), "as it was");
  EXPECT_EQ(ExpectCompletion(sent(), 2).opcode, IBV_WC_RDMA_WRITE);
}

TEST_F(RcTest, AtomicsReturnWhatWasThereBefore) {
  Connect();
  SetFirst(*at_server, 40);
  ASSERT_EQ(Post(client_qp(), Atomic(1, IBV_WR_ATOMIC_FETCH_AND_ADD, 2)), 0);
  const ibv_wc added = ExpectCompletion(sent(), 1);
  EXPECT_EQ(added.opcode, IBV_WC_FETCH_ADD);
  EXPECT_EQ(added.byte_len, 8u);
  EXPECT_EQ(First(*at_client), 40u);
  EXPECT_EQ(First(*at_server), 42u);
  ASSERT_EQ(Post(client_qp(), Atomic(2, IBV_WR_ATOMIC_CMP_AND_SWP, 41, 1)), 0);
  EXPECT_EQ(ExpectCompletion(sent(), 2).opcode, IBV_WC_COMP_SWAP);
  EXPECT_EQ(First(*at_client), 42u);
  EXPECT_EQ(First(*at_server), 42u) << "swapped though it was another value";
  ASSERT_EQ(Post(client_qp(), Atomic(3, IBV_WR_ATOMIC_CMP_AND_SWP, 42, ~uint64_t{0})), 0);
  ExpectCompletion(sent(), 3);
  EXPECT_EQ(First(*at_client), 42u);
  EXPECT_EQ(First(*at_server), ~uint64_t{0});
}

TEST_F(RcTest, ASendWithInvalidateEndsTheWindowItNames) {
  Connect();
  auto window = AllocateMw(pair->server.pd.get(), IBV_MW_TYPE_2);
  if (!window) GTEST_SKIP() << "skipped: no memory windows";
  const uint32_t rkey = ibv_inc_rkey((*window)->rkey);
  const ibv_mw_bind_info info = {
      .mr = at_server->mr(), .addr = at_server->address(), .length = 64, .mw_access_flags = IBV_ACCESS_REMOTE_WRITE};
  ASSERT_EQ(PostBind(server_qp(), 1, window->get(), rkey, info), 0);
  ExpectCompletion(pair->server.send_cq.get(), 1);
  const SendSpec write{.wr_id = 2,
                       .opcode = IBV_WR_RDMA_WRITE,
                       .sges = {at_client->Sge(0, 64)},
                       .remote_address = at_server->address(),
                       .rkey = rkey};
  ASSERT_EQ(Post(client_qp(), write), 0);
  ExpectCompletion(sent(), 2);
  ASSERT_EQ(PostReceive(server_qp(), 3, {at_server->Sge(100, 64)}), 0);
  ASSERT_EQ(
      Post(client_qp(), {.wr_id = 4, .opcode = IBV_WR_SEND_WITH_INV, .sges = {at_client->Sge(0, 8)}, .rkey = rkey}), 0);
  const ibv_wc arrived = ExpectCompletion(received(), 3);
  EXPECT_NE(arrived.wc_flags & IBV_WC_WITH_INV, 0u);
  EXPECT_EQ(arrived.invalidated_rkey, rkey);
  ExpectCompletion(sent(), 4);
  ASSERT_EQ(Post(client_qp(), write), 0);
  ExpectCompletion(sent(), 2, IBV_WC_REM_ACCESS_ERR);
}

TEST_F(RcTest, ManyRequestsCompleteInOrder) {
  Connect();
  for (uint64_t i = 0; i < 30; ++i) {
    SendSpec spec = OnAll(i, i % 3 == 0 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE);
    spec.sges = {at_client->Sge(i * 100, 100)};
    ASSERT_EQ(Post(client_qp(), spec), 0);
  }
  for (uint64_t i = 0; i < 30; ++i) ExpectCompletion(sent(), i);
}

TEST_F(RcTest, UnsignaledRequestsCompleteInSilence) {
  Connect();
  SendSpec silent = OnAll(1, IBV_WR_RDMA_WRITE);
  silent.flags = 0;
  ASSERT_EQ(Post(client_qp(), silent), 0);
  ASSERT_EQ(Post(client_qp(), OnAll(2, IBV_WR_RDMA_WRITE)), 0);
  ExpectCompletion(sent(), 2);
  EXPECT_TRUE(NoCompletion(sent()));
}

TEST_F(RcTest, AProgramThatSleepsIsWokenByASolicitedSend) {
  Connect();
  ASSERT_EQ(ibv_req_notify_cq(received(), 1), 0);
  ASSERT_EQ(PostReceive(server_qp(), 1, {at_server->Sge()}), 0);
  ASSERT_EQ(
      Post(client_qp(), {.wr_id = 2, .flags = IBV_SEND_SIGNALED | IBV_SEND_SOLICITED, .sges = {at_client->Sge(0, 8)}}),
      0);
  ASSERT_TRUE(BecomesReadable(pair->server.receive_channel->fd));
  ibv_cq* cq = nullptr;
  void* context = nullptr;
  ASSERT_EQ(ibv_get_cq_event(pair->server.receive_channel.get(), &cq, &context), 0);
  EXPECT_EQ(cq, received());
  ibv_ack_cq_events(cq, 1);
  ExpectCompletion(received(), 1);
}

TEST_F(RcTest, AProgramThatSleepsIsWokenByASolicitedWriteWithImmediate) {
  Connect();
  ASSERT_EQ(ibv_req_notify_cq(received(), 1), 0);
  ASSERT_EQ(PostReceive(server_qp(), 1, {}), 0);
  ASSERT_EQ(PostReceive(server_qp(), 2, {}), 0);
  SendSpec write = OnAll(3, IBV_WR_RDMA_WRITE_WITH_IMM);
  ASSERT_EQ(Post(client_qp(), write), 0);
  ExpectCompletion(received(), 1);
  EXPECT_FALSE(IsReadable(pair->server.receive_channel->fd)) << "nobody asked for it";
  write.flags |= IBV_SEND_SOLICITED;
  ASSERT_EQ(Post(client_qp(), write), 0);
  ASSERT_TRUE(BecomesReadable(pair->server.receive_channel->fd));
  ibv_cq* cq = nullptr;
  void* context = nullptr;
  ASSERT_EQ(ibv_get_cq_event(pair->server.receive_channel.get(), &cq, &context), 0);
  ibv_ack_cq_events(cq, 1);
  ExpectCompletion(received(), 2);
}

TEST_F(RcTest, AFencedSendWaitsForTheAtomicBeforeIt) {
  Connect();
  SetFirst(*at_server, 77);
  ASSERT_EQ(PostReceive(server_qp(), 1, {at_server->Sge(64, 8)}), 0);
  SendSpec add = Atomic(2, IBV_WR_ATOMIC_FETCH_AND_ADD, 1);
  add.flags = 0;
  ASSERT_EQ(Post(client_qp(), add), 0);
  // Sends back what the atomic is about to bring: without the fence it would send zeros.
  ASSERT_EQ(
      Post(client_qp(), {.wr_id = 3, .flags = IBV_SEND_SIGNALED | IBV_SEND_FENCE, .sges = {at_client->Sge(0, 8)}}), 0);
  ExpectCompletion(received(), 1);
  ExpectCompletion(sent(), 3);
  uint64_t arrived = 0;
  std::memcpy(&arrived, at_server->bytes().data() + 64, sizeof(arrived));
  EXPECT_EQ(arrived, 77u);
}

TEST_F(RcTest, AtomicsOfManyConnectionsAreAllCounted) {
  constexpr int kConnections = 4;
  constexpr uint64_t kEach = 50;
  HandOptions options;
  options.rd_atomic = 4;
  pair = HandPair::Connected(options, options);
  at_server = std::make_unique<Buffer>(pair->server.pd.get(), 64, kAllAccess);
  std::vector<std::unique_ptr<HandPair>> others;
  std::vector<MemoryRegion> same_memory;
  for (int i = 1; i < kConnections; ++i) {
    others.push_back(HandPair::Connected(options, options));
    // The same bytes, registered with each target.
    same_memory.push_back(
        std::move(RegisterMemory(others.back()->server.pd.get(), at_server->bytes().data(), 64, kAllAccess).value()));
  }
  std::vector<std::unique_ptr<Buffer>> results;
  const auto client = [&](int i) -> HandEnd& {
    return i == 0 ? pair->client : others[static_cast<size_t>(i) - 1]->client;
  };
  for (int i = 0; i < kConnections; ++i) results.push_back(std::make_unique<Buffer>(client(i).pd.get(), 8));
  std::set<uint64_t> seen;
  for (uint64_t round = 0; round < kEach; ++round) {
    for (int i = 0; i < kConnections; ++i) {
      ASSERT_EQ(
          Post(client(i).qp.get(), {.wr_id = round,
                                    .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
                                    .sges = {results[static_cast<size_t>(i)]->Sge()},
                                    .remote_address = at_server->address(),
                                    .rkey = i == 0 ? at_server->rkey() : same_memory[static_cast<size_t>(i) - 1]->rkey,
                                    .compare_add = 1}),
          0);
    }
    for (int i = 0; i < kConnections; ++i) {
      ExpectCompletion(client(i).send_cq.get(), round);
      EXPECT_TRUE(seen.insert(First(*results[static_cast<size_t>(i)])).second) << "two have seen the same value";
    }
  }
  EXPECT_EQ(First(*at_server), kConnections * kEach);
  EXPECT_EQ(*seen.rbegin(), kConnections * kEach - 1);
}

// --- Packets ---

TEST_F(RcTest, PacketNumbersHaveTwentyFourBitsAndWrap) {
  HandOptions nearly;
  nearly.psn = 0xff000000 | 0xfffffd;  // what is beyond 24 bits is not looked at
  Connect(nearly, nearly);
  for (uint64_t round = 0; round < 3; ++round) {
    at_client->FillPattern(static_cast<uint32_t>(round));
    ASSERT_EQ(Post(client_qp(), OnAll(1, IBV_WR_RDMA_WRITE)), 0);
    ExpectCompletion(sent(), 1);
    EXPECT_TRUE(Equal(*at_server, *at_client));
    at_server->FillPattern(static_cast<uint32_t>(100 + round));
    ASSERT_EQ(Post(client_qp(), OnAll(2, IBV_WR_RDMA_READ)), 0);
    ExpectCompletion(sent(), 2);
    EXPECT_TRUE(Equal(*at_server, *at_client));
    ASSERT_NO_FATAL_FAILURE(pair->ExpectPassage());
  }
}

TEST_F(RcTest, EachPathMtuCarriesMessagesOfEverySizeAroundIt) {
  ibv_port_attr port{};
  {
    const HandEnd probe(true, {});
    ASSERT_EQ(ibv_query_port(probe.context.get(), 1, &port), 0);
  }
  for (int mtu = IBV_MTU_256; mtu <= port.max_mtu; ++mtu) {
    SCOPED_TRACE(mtu);
    const size_t bytes = size_t{128} << mtu;
    HandOptions options;
    options.mtu = static_cast<ibv_mtu>(mtu);
    at_server.reset();
    at_client.reset();
    Connect(options, options);
    for (const size_t size : {size_t{0}, size_t{1}, bytes - 1, bytes, bytes + 1, 2 * bytes, 3 * bytes + 7}) {
      at_client->FillPattern(static_cast<uint32_t>(size));
      ASSERT_EQ(PostReceive(server_qp(), size, {at_server->Sge(0, size)}), 0);
      ASSERT_EQ(Post(client_qp(), {.wr_id = size, .sges = {at_client->Sge(0, size)}}), 0);
      EXPECT_EQ(ExpectCompletion(received(), size).byte_len, size);
      ExpectCompletion(sent(), size);
      EXPECT_EQ(at_server->Text(size), at_client->Text(size));
      at_server->FillPattern(static_cast<uint32_t>(size + 50));
      SendSpec read = OnAll(size, IBV_WR_RDMA_READ);
      read.sges = {at_client->Sge(0, size)};
      ASSERT_EQ(Post(client_qp(), read), 0);
      EXPECT_EQ(ExpectCompletion(sent(), size).byte_len, size);
      EXPECT_EQ(at_server->Text(size), at_client->Text(size));
    }
  }
}

// --- Receiver not ready ---

TEST_F(RcTest, AnSrqThatIsEmptyIsWaitedFor) {
  HandOptions server;
  server.srq_wr = 8;
  Connect(server, {});
  ibv_srq* const srq = pair->server.srq.get();
  ASSERT_NE(srq, nullptr);
  for (uint64_t i = 0; i < 4; ++i) ASSERT_EQ(Post(client_qp(), {.wr_id = i, .sges = {at_client->Sge(0, 8)}}), 0);
  ASSERT_EQ(PostReceive(srq, 10, {at_server->Sge()}), 0);
  ExpectCompletion(received(), 10);
  ExpectCompletion(sent(), 0);
  EXPECT_TRUE(NoCompletion(sent()));
  // Posted later, and in two goes.
  for (uint64_t i = 11; i < 14; ++i) ASSERT_EQ(PostReceive(srq, i, {at_server->Sge()}), 0);
  for (uint64_t i = 1; i < 4; ++i) {
    ExpectCompletion(received(), 10 + i);
    ExpectCompletion(sent(), i);
  }
  EXPECT_EQ(CountAsyncEvents(pair->server.context.get(), IBV_EVENT_QP_LAST_WQE_REACHED), 0);
}

// A message too long for what the SRQ gave it costs that Receive; the others are left for others.
TEST_F(RcTest, AReceiveOfAnSrqThatIsTooShortFailsAlone) {
  HandOptions server;
  server.srq_wr = 8;
  Connect(server, {});
  ibv_srq* const srq = pair->server.srq.get();
  for (uint64_t i = 1; i < 4; ++i) ASSERT_EQ(PostReceive(srq, i, {at_server->Sge(0, 8)}), 0);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 5, .sges = {at_client->Sge(0, 9)}}), 0);
  ExpectCompletion(sent(), 5, IBV_WC_REM_INV_REQ_ERR);
  ExpectCompletion(received(), 1, IBV_WC_LOC_LEN_ERR);
  EXPECT_TRUE(ExpectAsyncEvent(pair->server.context.get(), IBV_EVENT_QP_LAST_WQE_REACHED, server_qp()));
  EXPECT_TRUE(NoCompletion(received()));
}

TEST_F(RcTest, WhoDoesNotRetryFailsAtTheFirstMissingReceive) {
  HandOptions client;
  client.rnr_retry = 0;
  HandOptions server;
  server.min_rnr_timer = 0;  // the longest: 655 ms
  Connect(server, client);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 1, .sges = {at_client->Sge(0, 8)}}), 0);
  ExpectCompletion(sent(), 1, IBV_WC_RNR_RETRY_EXC_ERR);
}

TEST_F(RcTest, ASendWaitsForItsReceive) {
  Connect();
  ASSERT_EQ(Post(client_qp(), {.wr_id = 1, .sges = {at_client->Sge(0, 8)}}), 0);
  ASSERT_EQ(Post(client_qp(), OnAll(2, IBV_WR_RDMA_WRITE)), 0);
  EXPECT_TRUE(NoCompletion(sent()));
  ASSERT_EQ(PostReceive(server_qp(), 3, {at_server->Sge()}), 0);
  ExpectCompletion(received(), 3);
  ExpectCompletion(sent(), 1);
  ExpectCompletion(sent(), 2);
}

TEST_F(RcTest, WithoutAReceiveRetriesAreUsedUp) {
  HandOptions client;
  client.rnr_retry = 1;
  Connect({.min_rnr_timer = 1}, client);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 1, .sges = {at_client->Sge(0, 8)}}), 0);
  ASSERT_EQ(Post(client_qp(), OnAll(2, IBV_WR_RDMA_WRITE)), 0);
  ExpectCompletion(sent(), 1, IBV_WC_RNR_RETRY_EXC_ERR);
  ExpectCompletion(sent(), 2, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(pair->client.State(), IBV_QPS_ERR);
  EXPECT_EQ(pair->server.State(), IBV_QPS_RTS) << "the receiver has done nothing wrong";
}

// --- Silence ---

TEST_F(RcTest, APeerThatIsGoneIsFoundOutByRetries) {
  Connect({}, Impatient());
  ASSERT_EQ(Post(client_qp(), OnAll(1, IBV_WR_RDMA_WRITE)), 0);
  ExpectCompletion(sent(), 1);
  at_server.reset();
  ASSERT_EQ(pair->server.qp.Destroy(), 0);
  EXPECT_EQ(pair->client.State(), IBV_QPS_RTS);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 2, .sges = {at_client->Sge(0, 8)}}), 0);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 3, .flags = 0, .sges = {at_client->Sge(0, 8)}}), 0);
  ASSERT_EQ(PostReceive(client_qp(), 4, {at_client->Sge()}), 0);
  ExpectCompletion(sent(), 2, IBV_WC_RETRY_EXC_ERR);
  ExpectCompletion(sent(), 3, IBV_WC_WR_FLUSH_ERR);
  ExpectCompletion(pair->client.receive_cq.get(), 4, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(pair->client.State(), IBV_QPS_ERR);
  // As on hardware a failed work request says all there is to say.
  EXPECT_EQ(CountAsyncEvents(pair->client.context.get(), IBV_EVENT_QP_FATAL, client_qp()), 0);
}

TEST_F(RcTest, AWrongPacketNumberIsSilenceToo) {
  HandOptions client = Impatient();
  pair = std::make_unique<HandPair>(HandOptions{}, client);
  at_client = std::make_unique<Buffer>(pair->client.pd.get(), kLong, kAllAccess);
  HandAddress of_client = pair->client.Address();
  of_client.psn += 1u << 22;  // the receiver takes what comes for long past
  ASSERT_EQ(pair->server.ToInit(), 0);
  ASSERT_EQ(pair->client.ToInit(), 0);
  ASSERT_EQ(pair->server.ToRtr(of_client), 0);
  ASSERT_EQ(pair->server.ToRts(), 0);
  ASSERT_EQ(pair->client.ToRtr(pair->server.Address()), 0);
  ASSERT_EQ(pair->client.ToRts(), 0);
  // The other way the numbers are right.
  ASSERT_EQ(Post(server_qp(), {.wr_id = 9, .opcode = IBV_WR_RDMA_WRITE}), 0);
  ExpectCompletion(pair->server.send_cq.get(), 9);
  ASSERT_EQ(PostReceive(server_qp(), 1, {}), 0);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 1, .opcode = IBV_WR_RDMA_READ, .sges = {at_client->Sge(0, 8)}}), 0);
  ExpectCompletion(sent(), 1, IBV_WC_RETRY_EXC_ERR);
  EXPECT_TRUE(NoCompletion(received()));
}

// --- What the peer may not do ---

TEST_F(RcTest, AWriteToMemoryThatIsNotItsFailsAtItsInitiator) {
  Connect();
  SendSpec write = OnAll(1, IBV_WR_RDMA_WRITE);
  write.remote_address += 1;  // one byte too far
  ASSERT_EQ(PostReceive(server_qp(), 5, {at_server->Sge()}), 0);
  ASSERT_EQ(Post(client_qp(), write), 0);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 2, .sges = {at_client->Sge(0, 8)}}), 0);
  ExpectCompletion(sent(), 1, IBV_WC_REM_ACCESS_ERR);
  ExpectCompletion(sent(), 2, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(pair->client.State(), IBV_QPS_ERR);
  EXPECT_TRUE(ExpectAsyncEvent(pair->server.context.get(), IBV_EVENT_QP_ACCESS_ERR, server_qp()));
  ExpectCompletion(received(), 5, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(pair->server.State(), IBV_QPS_ERR);
}

TEST_F(RcTest, AReadOfMemoryWithoutThatRightFails) {
  Connect();
  Buffer closed(pair->server.pd.get(), 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 1,
                               .opcode = IBV_WR_RDMA_READ,
                               .sges = {at_client->Sge(0, 64)},
                               .remote_address = closed.address(),
                               .rkey = closed.rkey()}),
            0);
  ExpectCompletion(sent(), 1, IBV_WC_REM_ACCESS_ERR);
  EXPECT_TRUE(ExpectAsyncEvent(pair->server.context.get(), IBV_EVENT_QP_ACCESS_ERR, server_qp()));
}

TEST_F(RcTest, WhatTheQpDoesNotAllowIsAnInvalidRequest) {
  HandOptions server;
  server.access = IBV_ACCESS_REMOTE_READ;
  Connect(server);
  ASSERT_EQ(Post(client_qp(), OnAll(1, IBV_WR_RDMA_READ)), 0);
  ExpectCompletion(sent(), 1);
  ASSERT_EQ(Post(client_qp(), OnAll(2, IBV_WR_RDMA_WRITE)), 0);
  ExpectCompletion(sent(), 2, IBV_WC_REM_INV_REQ_ERR);
  EXPECT_TRUE(ExpectAsyncEvent(pair->server.context.get(), IBV_EVENT_QP_REQ_ERR, server_qp()));
}

TEST_F(RcTest, AnAtomicOnAnOddAddressIsAnInvalidRequest) {
  Connect();
  SendSpec add = Atomic(1, IBV_WR_ATOMIC_FETCH_AND_ADD, 1);
  add.remote_address += 4;
  ASSERT_EQ(Post(client_qp(), add), 0);
  ExpectCompletion(sent(), 1, IBV_WC_REM_INV_REQ_ERR);
  EXPECT_TRUE(ExpectAsyncEvent(pair->server.context.get(), IBV_EVENT_QP_REQ_ERR, server_qp()));
}

TEST_F(RcTest, ASendLongerThanItsReceiveFailsAtBothEnds) {
  Connect();
  ASSERT_EQ(PostReceive(server_qp(), 1, {at_server->Sge(0, 100)}), 0);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 2, .sges = {at_client->Sge(0, 101)}}), 0);
  ExpectCompletion(received(), 1, IBV_WC_LOC_LEN_ERR);
  ExpectCompletion(sent(), 2, IBV_WC_REM_INV_REQ_ERR);
  EXPECT_EQ(pair->server.State(), IBV_QPS_ERR);
}

// [IBTA 9.9.3, class J] Neither acknowledged nor refused, so that its sender tries again and again.
TEST_F(RcTest, ASendThatInvalidatesABadKeyStaysWithoutAnAnswer) {
  Connect({}, Impatient());
  for (uint64_t i = 1; i < 4; ++i) ASSERT_EQ(PostReceive(server_qp(), i, {at_server->Sge()}), 0);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 4, .sges = {at_client->Sge(0, 8)}}), 0);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 5,
                               .opcode = IBV_WR_SEND_WITH_INV,
                               .sges = {at_client->Sge()},
                               .rkey = at_server->rkey() ^ 0x5a5a5a00}),
            0);
  ExpectCompletion(received(), 1);
  ExpectCompletion(received(), 2, IBV_WC_REM_INV_REQ_ERR);
  ExpectCompletion(received(), 3, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(pair->server.State(), IBV_QPS_ERR);
  ExpectCompletion(sent(), 4);
  ExpectCompletion(sent(), 5, IBV_WC_RETRY_EXC_ERR);
}

TEST_F(RcTest, AReceiveThatCannotBeWrittenFailsAtBothEnds) {
  Connect();
  ibv_sge unknown = at_server->Sge(0, 64);
  unknown.lkey += 0x100;
  ASSERT_EQ(PostReceive(server_qp(), 1, {unknown}), 0);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 2, .sges = {at_client->Sge(0, 8)}}), 0);
  ExpectCompletion(received(), 1, IBV_WC_LOC_PROT_ERR);
  ExpectCompletion(sent(), 2, IBV_WC_REM_OP_ERR);
}

TEST_F(RcTest, AWriteWithImmediateToMemoryThatIsNotItsFailsAtBothEnds) {
  Connect();
  ASSERT_EQ(PostReceive(server_qp(), 1, {}), 0);
  ASSERT_EQ(PostReceive(server_qp(), 2, {}), 0);
  SendSpec write = OnAll(3, IBV_WR_RDMA_WRITE_WITH_IMM);
  write.sges = {at_client->Sge(0, 100)};
  write.remote_address += kLong - 99;
  ASSERT_EQ(Post(client_qp(), write), 0);
  ExpectCompletion(received(), 1, IBV_WC_LOC_ACCESS_ERR);
  ExpectCompletion(received(), 2, IBV_WC_WR_FLUSH_ERR);
  ExpectCompletion(sent(), 3, IBV_WC_REM_ACCESS_ERR);
  EXPECT_TRUE(ExpectAsyncEvent(pair->server.context.get(), IBV_EVENT_QP_ACCESS_ERR, server_qp()));
}

TEST_F(RcTest, AnAtomicOnMemoryWithoutThatRightFails) {
  Connect();
  Buffer closed(pair->server.pd.get(), 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
  SendSpec add = Atomic(1, IBV_WR_ATOMIC_FETCH_AND_ADD, 1);
  add.remote_address = closed.address();
  add.rkey = closed.rkey();
  ASSERT_EQ(Post(client_qp(), add), 0);
  ExpectCompletion(sent(), 1, IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(First(closed), 0u);
  EXPECT_TRUE(ExpectAsyncEvent(pair->server.context.get(), IBV_EVENT_QP_ACCESS_ERR, server_qp()));
}

TEST_F(RcTest, AReadOfAPeerThatTakesNoneIsAnInvalidRequest) {
  HandOptions server;
  server.rd_atomic = 0;
  Connect(server, {});
  ASSERT_EQ(Post(client_qp(), OnAll(1, IBV_WR_RDMA_READ)), 0);
  ExpectCompletion(sent(), 1, IBV_WC_REM_INV_REQ_ERR);
  EXPECT_TRUE(ExpectAsyncEvent(pair->server.context.get(), IBV_EVENT_QP_REQ_ERR, server_qp()));
}

// --- Ends that were told different path MTUs ---

TEST_F(RcTest, APacketLongerThanThePathMtuIsAnInvalidRequest) {
  HandOptions server;
  server.mtu = IBV_MTU_256;
  Connect(server, {});
  ASSERT_EQ(Post(client_qp(), OnAll(1, IBV_WR_RDMA_WRITE)), 0);
  ExpectCompletion(sent(), 1, IBV_WC_REM_INV_REQ_ERR);
  EXPECT_TRUE(ExpectAsyncEvent(pair->server.context.get(), IBV_EVENT_QP_REQ_ERR, server_qp()));
}

TEST_F(RcTest, AnAnswerInOtherPacketsThanWereAskedForIsABadResponse) {
  HandOptions server;
  server.mtu = IBV_MTU_256;
  Connect(server, {});
  ASSERT_EQ(Post(client_qp(), OnAll(1, IBV_WR_RDMA_READ)), 0);
  ASSERT_EQ(Post(client_qp(), OnAll(2, IBV_WR_RDMA_READ)), 0);
  ExpectCompletion(sent(), 1, IBV_WC_BAD_RESP_ERR);
  ExpectCompletion(sent(), 2, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(pair->client.State(), IBV_QPS_ERR);
  EXPECT_EQ(pair->server.State(), IBV_QPS_RTS) << "it did what it was told";
}

// --- What this end may not do ---

TEST_F(RcTest, ASendFromMemoryThatIsNotItsFailsHere) {
  Connect();
  ibv_sge unknown = at_client->Sge(0, 64);
  unknown.lkey += 0x100;
  ASSERT_EQ(Post(client_qp(), OnAll(1, IBV_WR_RDMA_WRITE)), 0);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 2, .sges = {unknown}}), 0);
  ASSERT_EQ(Post(client_qp(), OnAll(3, IBV_WR_RDMA_WRITE)), 0);
  ExpectCompletion(sent(), 1);
  ExpectCompletion(sent(), 2, IBV_WC_LOC_PROT_ERR);
  ExpectCompletion(sent(), 3, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(pair->server.State(), IBV_QPS_RTS);
}

// --- Of Reads and atomics the keys here are judged when the answer is there ---

TEST_F(RcTest, AnAtomicWhoseAnswerHasNoMemoryHasHappened) {
  Connect();
  SetFirst(*at_server, 5);
  SetFirst(*at_client, 77);
  SendSpec swap = Atomic(1, IBV_WR_ATOMIC_CMP_AND_SWP, 5, 6);
  swap.sges[0].lkey += 0x100;
  ASSERT_EQ(Post(client_qp(), swap), 0);
  ExpectCompletion(sent(), 1, IBV_WC_LOC_PROT_ERR);
  EXPECT_EQ(First(*at_server), 6u);
  EXPECT_EQ(First(*at_client), 77u);
  EXPECT_EQ(pair->client.State(), IBV_QPS_ERR);
  EXPECT_EQ(pair->server.State(), IBV_QPS_RTS);
}

TEST_F(RcTest, AReadIntoMemoryThatIsNotItsFailsHere) {
  Connect();
  SendSpec read = OnAll(1, IBV_WR_RDMA_READ);
  read.sges[0].lkey += 0x100;
  ASSERT_EQ(Post(client_qp(), read), 0);
  ExpectCompletion(sent(), 1, IBV_WC_LOC_PROT_ERR);
  EXPECT_EQ(pair->client.State(), IBV_QPS_ERR);
  EXPECT_EQ(pair->server.State(), IBV_QPS_RTS);
}

TEST_F(RcTest, ARemoteAccessErrorComesBeforeABadKeyHere) {
  for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_CMP_AND_SWP}) {
    Connect();
    SendSpec both = Atomic(1, opcode, 1);
    both.sges[0].lkey += 0x100;
    both.rkey += 0x100;
    ASSERT_EQ(Post(client_qp(), both), 0);
    ExpectCompletion(sent(), 1, IBV_WC_REM_ACCESS_ERR);
    EXPECT_EQ(First(*at_server), 0u) << opcode;
  }
}

TEST_F(RcTest, AnOddAddressComesBeforeABadKeyHereOrThere) {
  for (const bool at_target : {false, true}) {
    Connect();
    SendSpec both = Atomic(1, IBV_WR_ATOMIC_FETCH_AND_ADD, 1);
    ++both.remote_address;
    (at_target ? both.rkey : both.sges[0].lkey) += 0x100;
    ASSERT_EQ(Post(client_qp(), both), 0);
    ExpectCompletion(sent(), 1, IBV_WC_REM_INV_REQ_ERR);
    EXPECT_EQ(First(*at_server), 0u);
  }
}

TEST_F(RcTest, AReadWithoutRoomForReadsFailsHere) {
  HandOptions client;
  client.rd_atomic = 0;
  Connect({}, client);
  ASSERT_EQ(Post(client_qp(), OnAll(1, IBV_WR_RDMA_READ)), 0);
  ExpectCompletion(sent(), 1, IBV_WC_LOC_QP_OP_ERR);
  EXPECT_EQ(pair->client.State(), IBV_QPS_ERR);
}

TEST_F(RcTest, AnAtomicBringsBackEightBytes) {
  Connect();
  SendSpec add = Atomic(1, IBV_WR_ATOMIC_FETCH_AND_ADD, 1);
  add.sges = {at_client->Sge(0, 4)};
  ASSERT_EQ(Post(client_qp(), add), 0);
  ExpectCompletion(sent(), 1, IBV_WC_LOC_LEN_ERR);
}

// --- The end ---

TEST_F(RcTest, TheErrorStateFlushesBothQueuesInOrder) {
  Connect();
  for (uint64_t i = 0; i < 3; ++i) ASSERT_EQ(PostReceive(client_qp(), i, {at_client->Sge()}), 0);
  // Nobody there takes them.
  for (uint64_t i = 0; i < 3; ++i) ASSERT_EQ(Post(client_qp(), {.wr_id = i, .sges = {at_client->Sge(0, 8)}}), 0);
  ASSERT_EQ(pair->client.To(IBV_QPS_ERR), 0);
  for (uint64_t i = 0; i < 3; ++i) {
    ExpectCompletion(sent(), i, IBV_WC_WR_FLUSH_ERR);
    ExpectCompletion(pair->client.receive_cq.get(), i, IBV_WC_WR_FLUSH_ERR);
  }
  ASSERT_EQ(Post(client_qp(), {.wr_id = 9, .sges = {at_client->Sge(0, 8)}}), 0);
  ExpectCompletion(sent(), 9, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(pair->server.State(), IBV_QPS_RTS) << "the peer hears nothing of it";
}

TEST_F(RcTest, ResetForgetsWhatWasPostedAndWhatIsComplete) {
  Connect();
  ASSERT_EQ(Post(client_qp(), OnAll(1, IBV_WR_RDMA_WRITE)), 0);
  ASSERT_EQ(PostReceive(server_qp(), 2, {}), 0);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 3}), 0);
  // Both lie in the client's CQ unseen when the Receive has been seen at the server, or they never will.
  ExpectCompletion(received(), 2);
  ASSERT_EQ(PostReceive(client_qp(), 4, {}), 0);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 5}), 0);  // nobody takes it
  ASSERT_EQ(pair->client.To(IBV_QPS_RESET), 0);
  EXPECT_TRUE(NoCompletion(sent()));
  EXPECT_TRUE(NoCompletion(pair->client.receive_cq.get()));
  EXPECT_EQ(Post(client_qp(), {.wr_id = 6}), EINVAL);
}

// Work that is discarded completes nowhere, not even for a moment: nobody is woken for it, and no CQ is too small for
// it.
TEST_F(RcTest, ResetMakesNoCompletionThatACqWouldHaveToHold) {
  HandOptions client;
  client.cq_entries = 4;
  Connect({}, client);
  ibv_cq* const inbox = pair->client.receive_cq.get();
  ASSERT_LT(inbox->cqe, 32);
  ASSERT_EQ(ibv_req_notify_cq(inbox, 0), 0);
  for (uint64_t i = 0; i < 32; ++i) {
    ASSERT_EQ(PostReceive(client_qp(), i, {}), 0);
    // Nobody takes them.
    ASSERT_EQ(Post(client_qp(), {.wr_id = i, .flags = 0}), 0);
  }
  ASSERT_EQ(pair->client.To(IBV_QPS_RESET), 0);
  EXPECT_TRUE(NoCompletion(inbox));
  EXPECT_TRUE(NoCompletion(sent()));
  EXPECT_FALSE(IsReadable(pair->client.receive_channel->fd));
  EXPECT_EQ(CountAsyncEvents(pair->client.context.get(), IBV_EVENT_CQ_ERR), 0);
  EXPECT_EQ(CountAsyncEvents(pair->client.context.get(), IBV_EVENT_QP_FATAL), 0);
}

// --- Draining ---

TEST_F(RcTest, SqdLastsUntilWhatHasBegunIsAcknowledged) {
  Connect();
  ASSERT_NO_FATAL_FAILURE(pair->ExpectPassage());  // what is posted now begins at once
  ASSERT_EQ(Post(client_qp(), {.wr_id = 1}), 0);   // its Receive is missing yet
  ASSERT_EQ(pair->client.To(IBV_QPS_SQD, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 2}), 0);
  EXPECT_TRUE(pair->client.IsDraining());
  EXPECT_EQ(CountAsyncEvents(pair->client.context.get(), IBV_EVENT_SQ_DRAINED, client_qp()), 0);
  ASSERT_EQ(PostReceive(server_qp(), 3, {}), 0);
  ASSERT_EQ(PostReceive(server_qp(), 4, {}), 0);
  ExpectCompletion(sent(), 1);
  EXPECT_TRUE(ExpectAsyncEvent(pair->client.context.get(), IBV_EVENT_SQ_DRAINED, client_qp()));
  EXPECT_FALSE(pair->client.IsDraining());
  ExpectCompletion(received(), 3);
  EXPECT_TRUE(NoCompletion(received())) << "what was posted in SQD has left";
  ASSERT_EQ(pair->client.To(IBV_QPS_RTS), 0);
  ExpectCompletion(received(), 4);
  ExpectCompletion(sent(), 2);
}

TEST_F(RcTest, SqdEndsInSilenceUnlessToldOtherwise) {
  Connect();
  ASSERT_NO_FATAL_FAILURE(pair->ExpectPassage());  // what is posted now begins at once
  ASSERT_EQ(Post(client_qp(), {.wr_id = 1}), 0);   // its Receive is missing yet
  ASSERT_EQ(pair->client.To(IBV_QPS_SQD), 0);
  ASSERT_EQ(PostReceive(server_qp(), 3, {}), 0);
  ASSERT_EQ(pair->client.To(IBV_QPS_SQD), 0) << "it may be asked for again";
  EXPECT_TRUE(world().Until([&] { return !pair->client.IsDraining(); }));
  ASSERT_EQ(pair->client.To(IBV_QPS_RTS), 0);
  ASSERT_EQ(PostReceive(server_qp(), 4, {}), 0);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 2}), 0);
  ExpectCompletion(sent(), 1);
  ExpectCompletion(sent(), 2);
  EXPECT_EQ(CountAsyncEvents(pair->client.context.get(), IBV_EVENT_SQ_DRAINED), 0);
}

TEST_F(RcTest, AnErrorWhileDrainingFlushesAndIsNoDrain) {
  Connect();
  ASSERT_NO_FATAL_FAILURE(pair->ExpectPassage());  // what is posted now begins at once
  ASSERT_EQ(Post(client_qp(), {.wr_id = 1}), 0);
  ASSERT_EQ(pair->client.To(IBV_QPS_SQD, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 2}), 0);
  ASSERT_EQ(pair->client.To(IBV_QPS_ERR), 0);
  ExpectCompletion(sent(), 1, IBV_WC_WR_FLUSH_ERR);
  ExpectCompletion(sent(), 2, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(CountAsyncEvents(pair->client.context.get(), IBV_EVENT_SQ_DRAINED), 0);
}

TEST_F(RcTest, SqdFinishesWhatHasBegunAndKeepsTheRest) {
  Connect();
  ASSERT_EQ(Post(client_qp(), OnAll(1, IBV_WR_RDMA_WRITE)), 0);
  ExpectCompletion(sent(), 1);
  ASSERT_EQ(pair->client.To(IBV_QPS_SQD, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
  EXPECT_TRUE(ExpectAsyncEvent(pair->client.context.get(), IBV_EVENT_SQ_DRAINED, client_qp()));
  ASSERT_EQ(Post(client_qp(), OnAll(2, IBV_WR_RDMA_WRITE)), 0);
  // What the peer sends arrives all the same.
  ASSERT_EQ(PostReceive(client_qp(), 3, {at_client->Sge()}), 0);
  ASSERT_EQ(Post(server_qp(), {.wr_id = 4, .sges = {at_server->Sge(0, 8)}}), 0);
  ExpectCompletion(pair->client.receive_cq.get(), 3);
  EXPECT_TRUE(NoCompletion(sent()));
  ASSERT_EQ(pair->client.To(IBV_QPS_RTS), 0);
  ExpectCompletion(sent(), 2);
}

TEST_F(RcTest, AQpThatWasResetCanBeConnectedAnew) {
  Connect();
  for (int life = 0; life < 3; ++life) {
    ASSERT_EQ(PostReceive(server_qp(), 1, {at_server->Sge()}), 0);
    ASSERT_EQ(Post(client_qp(), {.wr_id = 2, .sges = {at_client->Sge(0, 8)}}), 0);
    ExpectCompletion(received(), 1);
    ExpectCompletion(sent(), 2);
    ASSERT_EQ(pair->server.To(IBV_QPS_RESET), 0);
    ASSERT_EQ(pair->client.To(IBV_QPS_RESET), 0);
    pair->Connect();
  }
}

// Programs that recover on their own: one end is connected anew while the other one is still of the life before, and
// waits for it.
TEST_F(RcTest, EitherEndMayBeConnectedAnewBeforeTheOther) {
  Connect();
  for (const bool server_first : {true, false, true}) {
    HandEnd& first = server_first ? pair->server : pair->client;
    HandEnd& second = server_first ? pair->client : pair->server;
    ASSERT_NO_FATAL_FAILURE(pair->ExpectPassage());
    for (HandEnd* end : {&first, &second}) {
      const HandAddress peer = (end == &first ? second : first).Address();
      ASSERT_EQ(end->To(IBV_QPS_RESET), 0);
      ASSERT_EQ(end->ToInit(), 0);
      ASSERT_EQ(end->ToRtr(peer), 0);
      ASSERT_EQ(end->ToRts(), 0);
      // Time for the other one to notice, and to try again what it can.
      world().Elapse(1s);
    }
  }
  ASSERT_NO_FATAL_FAILURE(pair->ExpectPassage());
}

// The peer names a QP by its number, and packets by theirs: an end that begins where the one before it ended is taken
// for it.
TEST_F(RcTest, AnEndThatIsConnectedAnewAloneGoesOnWhereTheNumbersFit) {
  Connect();
  for (uint32_t packets = 1; packets < 4; ++packets) {
    ASSERT_NO_FATAL_FAILURE(pair->ExpectPassage());  // one packet each way
    HandEnd& end = pair->client;
    HandAddress peer = pair->server.Address();
    peer.psn += packets;
    ASSERT_EQ(end.To(IBV_QPS_RESET), 0);
    ASSERT_EQ(end.ToInit(), 0);
    ASSERT_EQ(end.ToRtr(peer), 0);
    end.options.psn = HandOptions{}.psn + packets;
    ASSERT_EQ(end.ToRts(), 0);
  }
  ASSERT_EQ(PostReceive(server_qp(), 1, {at_server->Sge()}), 0);
  ASSERT_EQ(Post(client_qp(), {.wr_id = 2, .sges = {at_client->Sge()}}), 0);
  ExpectCompletion(received(), 1);
  ExpectCompletion(sent(), 2);
}

}  // namespace
}  // namespace stagecoach::verbs
