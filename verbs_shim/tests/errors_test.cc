// Faults: exact completion statuses on both sides, flush order, and that a fault of one connection is its own.
//
// iWARP has no acknowledgements: a Send or Write is complete when it has left, so its initiator learns of a remote
// fault by the Terminate that ends the stream, while a Read that was waiting for its answer gets the blame by name.

#include <sys/mman.h>

#include <cerrno>
#include <memory>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

constexpr int kRemoteAll = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;

// Whose QP has a reason to fail.
enum class Fails { kBoth, kServer, kClient };

class ErrorsTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    Connect({});
  }
  void Connect(const EndpointOptions& client_options) {
    theirs.reset();
    ours.reset();
    pair = Pair::Connected({}, client_options);
    theirs = std::make_unique<Buffer>(pair->server.pd.get(), 4096, kRemoteAll);
    ours = std::make_unique<Buffer>(pair->client.pd.get(), 4096, kRemoteAll);
  }
  void TearDown() override {
    theirs.reset();
    ours.reset();
    pair.reset();
    VerbsTest::TearDown();
  }
  ibv_qp* client() { return pair->client.qp(); }
  ibv_qp* server() { return pair->server.qp(); }
  ibv_cq* client_cq() { return pair->client.send_cq.get(); }

  // A QP that has failed is in ERR before anybody moves it there; one that has not works on.
  void ExpectFailed(ibv_qp* qp, bool failed) {
    if (failed) {
      ExpectStateIsReached(qp, IBV_QPS_ERR);
    } else {
      ExpectState(qp, IBV_QPS_RTS);
    }
  }
  // The connection is over on both sides, and both were told. On InfiniBand only the QPs named have failed, and the
  // programs end the connection.
  void ExpectEnded(Fails fails) {
    if (!pair->client.IsIwarp()) {
      ExpectFailed(client(), fails != Fails::kServer);
      ExpectFailed(server(), fails != Fails::kClient);
      EXPECT_EQ(pair->client.Disconnect(), 0);
      EXPECT_EQ(pair->server.Disconnect(), 0);
    }
    pair->server.ExpectDisconnected();
    pair->client.ExpectDisconnected();
    ExpectState(client(), IBV_QPS_ERR);
    ExpectState(server(), IBV_QPS_ERR);
  }
  // Programs hear of what they did not post themselves by events of their QPs: the target of the fault, and on iWARP
  // who is told of it by a Terminate. Holds of any device where deviations.tsv has it that there are no such events
  // (ErrorsTest.WhoRefusesAndWhoIsRefusedHearOfIt).
  void ExpectEvents(ibv_event_type at_server) {
    static const bool tells = !IsKnownToDeviate("ErrorsTest.WhoRefusesAndWhoIsRefusedHearOfIt");
    if (tells) ExpectEventsIndeed(at_server);
  }
  void ExpectEventsIndeed(ibv_event_type at_server) {
    std::vector<AwaitedEvent> awaited = {{pair->server.context(), at_server, server()}};
    if (pair->client.IsIwarp()) awaited.push_back({pair->client.context(), IBV_EVENT_QP_FATAL, client()});
    EXPECT_TRUE(ExpectAsyncEvents(awaited));
  }
  // A Read that must be refused by the server.
  void ExpectReadRefused(uint64_t remote_address, uint32_t rkey, size_t length = 16) {
    ASSERT_EQ(PostReceive(server(), 50, {theirs->Sge(0, 16)}), 0);
    ASSERT_EQ(PostReceive(client(), 60, {ours->Sge(1024, 16)}), 0);
    ASSERT_EQ(Post(client(), {.wr_id = 1,
                              .opcode = IBV_WR_RDMA_READ,
                              .sges = {ours->Sge(0, length)},
                              .remote_address = remote_address,
                              .rkey = rkey}),
              0);
    ExpectCompletion(client_cq(), 1, IBV_WC_REM_ACCESS_ERR);
    ExpectCompletion(pair->client.receive_cq.get(), 60, IBV_WC_WR_FLUSH_ERR);
    ExpectEvents(IBV_EVENT_QP_ACCESS_ERR);
    ExpectEnd();
  }
  // The server has refused: the Receive that waited there is flushed.
  void ExpectEnd() {
    ExpectEnded(Fails::kBoth);
    ExpectCompletion(pair->server.receive_cq.get(), 50, IBV_WC_WR_FLUSH_ERR);
  }
  // A Write that must be refused: it completes when it has left, what is behind it is flushed, and nothing is stored.
  void ExpectWriteRefused(uint64_t remote_address, uint32_t rkey) {
    ours->Fill("do not let me in");
    ASSERT_EQ(PostReceive(server(), 50, {theirs->Sge(2048, 16)}), 0);
    ASSERT_EQ(Post(client(), {.wr_id = 1,
                              .opcode = IBV_WR_RDMA_WRITE,
                              .sges = {ours->Sge(0, 16)},
                              .remote_address = remote_address,
                              .rkey = rkey}),
              0);
    ExpectCompletion(client_cq(), 1, pair->client.IsIwarp() ? IBV_WC_SUCCESS : IBV_WC_REM_ACCESS_ERR);
    ExpectEvents(IBV_EVENT_QP_ACCESS_ERR);
    ExpectEnd();
    for (std::byte byte : theirs->bytes()) ASSERT_EQ(byte, std::byte{0});
  }

  std::unique_ptr<Pair> pair;
  std::unique_ptr<Buffer> theirs;
  std::unique_ptr<Buffer> ours;
};

// --- Remote access ---

TEST_F(ErrorsTest, ReadThroughAKeyNobodyHas) {
  ExpectReadRefused(theirs->address(), theirs->rkey() ^ 0x5a5a5a00);
}

TEST_F(ErrorsTest, ReadThroughAStaleKey) {
  ExpectReadRefused(theirs->address(), theirs->rkey() ^ 1);
}

TEST_F(ErrorsTest, ReadBeyondTheEnd) {
  ExpectReadRefused(theirs->address() + 4090, theirs->rkey());
}

TEST_F(ErrorsTest, ReadBeforeTheBeginning) {
  ExpectReadRefused(theirs->address() - 1, theirs->rkey());
}

TEST_F(ErrorsTest, ReadWithAnOffsetThatWraps) {
  ExpectReadRefused(~uint64_t{0} - 4, theirs->rkey());
}

TEST_F(ErrorsTest, ReadWithoutPermission) {
  Buffer closed(pair->server.pd.get(), 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  ExpectReadRefused(closed.address(), closed.rkey());
}

TEST_F(ErrorsTest, ReadOfAnotherProtectionDomain) {
  auto other = AllocatePd(pair->server.context());
  ASSERT_TRUE(other);
  Buffer foreign(other->get(), 64, kRemoteAll);
  ExpectReadRefused(foreign.address(), foreign.rkey());
}

TEST_F(ErrorsTest, ReadOfMemoryOfAnotherContext) {
  world().ActAsServer();
  Context context = std::move(OpenDevice().value());
  ProtectionDomain pd = std::move(AllocatePd(context.get()).value());
  Buffer foreign(pd.get(), 64, kRemoteAll);
  ExpectReadRefused(foreign.address(), foreign.rkey());
}

TEST_F(ErrorsTest, ASendFromMemoryOfAnotherContextFails) {
  world().ActAsClient();
  Context context = std::move(OpenDevice().value());
  ProtectionDomain pd = std::move(AllocatePd(context.get()).value());
  Buffer foreign(pd.get(), 64);
  ASSERT_EQ(Post(client(), {.wr_id = 1, .sges = {foreign.Sge()}}), 0);
  ExpectCompletion(client_cq(), 1, IBV_WC_LOC_PROT_ERR);
  ExpectEnded(Fails::kClient);
}

TEST_F(ErrorsTest, ReadOfADeregisteredRegion) {
  auto gone = std::make_unique<Buffer>(pair->server.pd.get(), 64, kRemoteAll);
  const uint64_t address = gone->address();
  const uint32_t rkey = gone->rkey();
  ASSERT_EQ(gone->Deregister(), 0);
  ExpectReadRefused(address, rkey);
}

TEST_F(ErrorsTest, WhoRefusesAndWhoIsRefusedHearOfIt) {
  ASSERT_EQ(Post(client(), {.wr_id = 1,
                            .opcode = IBV_WR_RDMA_READ,
                            .sges = {ours->Sge(0, 16)},
                            .remote_address = theirs->address(),
                            .rkey = theirs->rkey() ^ 0x5a5a5a00}),
            0);
  ExpectCompletion(client_cq(), 1, IBV_WC_REM_ACCESS_ERR);
  ExpectEventsIndeed(IBV_EVENT_QP_ACCESS_ERR);
}

TEST_F(ErrorsTest, WriteThroughAKeyNobodyHas) {
  ExpectWriteRefused(theirs->address(), theirs->rkey() ^ 0x5a5a5a00);
}

TEST_F(ErrorsTest, WriteBeyondTheEnd) {
  ExpectWriteRefused(theirs->address() + 4090, theirs->rkey());
}

TEST_F(ErrorsTest, WriteWithoutPermission) {
  Buffer closed(pair->server.pd.get(), 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
  ExpectWriteRefused(closed.address(), closed.rkey());
  for (std::byte byte : closed.bytes()) ASSERT_EQ(byte, std::byte{0});
}

// --- Receives ---

TEST_F(ErrorsTest, ASendWithoutAReceiveEndsTheStream) {
  if (!pair->client.IsIwarp()) GTEST_SKIP() << "skipped: the sender waits until there is one";
  ASSERT_EQ(Post(client(), {.wr_id = 1, .sges = {ours->Sge(0, 16)}}), 0);
  ExpectCompletion(client_cq(), 1);  // it left
  ExpectEvents(IBV_EVENT_QP_REQ_ERR);
  ExpectEnded(Fails::kBoth);
}

TEST_F(ErrorsTest, ASendLargerThanTheReceiveEndsTheStream) {
  ASSERT_EQ(PostReceive(server(), 5, {theirs->Sge(0, 8)}), 0);
  ASSERT_EQ(Post(client(), {.wr_id = 1, .sges = {ours->Sge(0, 16)}}), 0);
  ExpectCompletion(pair->server.receive_cq.get(), 5, IBV_WC_LOC_LEN_ERR);
  ExpectCompletion(client_cq(), 1, pair->client.IsIwarp() ? IBV_WC_SUCCESS : IBV_WC_REM_INV_REQ_ERR);
  if (pair->client.IsIwarp()) ExpectEvents(IBV_EVENT_QP_REQ_ERR);
  ExpectEnded(Fails::kBoth);
}

TEST_F(ErrorsTest, AReceiveIntoMemoryThatIsNotRegisteredFails) {
  ibv_sge sge = theirs->Sge(0, 64);
  sge.lkey ^= 0x01010100;
  ASSERT_EQ(PostReceive(server(), 5, {sge}), 0);
  ASSERT_EQ(Post(client(), {.wr_id = 1, .sges = {ours->Sge(0, 16)}}), 0);
  ExpectCompletion(pair->server.receive_cq.get(), 5, IBV_WC_LOC_PROT_ERR);
  ExpectCompletion(client_cq(), 1, pair->client.IsIwarp() ? IBV_WC_SUCCESS : IBV_WC_REM_OP_ERR);
  ExpectEnded(Fails::kBoth);
}

TEST_F(ErrorsTest, AReceiveWithoutLocalWriteFails) {
  Buffer read_only(pair->server.pd.get(), 64, IBV_ACCESS_REMOTE_READ);
  ASSERT_EQ(PostReceive(server(), 5, {read_only.Sge()}), 0);
  ASSERT_EQ(Post(client(), {.wr_id = 1, .sges = {ours->Sge(0, 16)}}), 0);
  ExpectCompletion(pair->server.receive_cq.get(), 5, IBV_WC_LOC_PROT_ERR);
  ExpectCompletion(client_cq(), 1, pair->client.IsIwarp() ? IBV_WC_SUCCESS : IBV_WC_REM_OP_ERR);
  ExpectEnded(Fails::kBoth);
}

// --- Local faults ---

TEST_F(ErrorsTest, ASendFromMemoryThatIsNotRegisteredFails) {
  ibv_sge sge = ours->Sge(0, 16);
  sge.lkey ^= 0x01010100;
  ASSERT_EQ(Post(client(), {.wr_id = 1, .sges = {sge}}), 0);
  ExpectCompletion(client_cq(), 1, IBV_WC_LOC_PROT_ERR);
  ExpectEnded(Fails::kClient);
}

TEST_F(ErrorsTest, AReadIntoMemoryThatThePeerMayNotWriteFailsOnIwarp) {
  if (!pair->client.IsIwarp()) GTEST_SKIP() << "skipped: the sink of a Read is named to the peer on iWARP alone";
  Buffer sink(pair->client.pd.get(), 64, IBV_ACCESS_LOCAL_WRITE);
  ASSERT_EQ(Post(client(), {.wr_id = 1,
                            .opcode = IBV_WR_RDMA_READ,
                            .sges = {sink.Sge()},
                            .remote_address = theirs->address(),
                            .rkey = theirs->rkey()}),
            0);
  ExpectCompletion(client_cq(), 1, IBV_WC_LOC_PROT_ERR);
  ExpectEnded(Fails::kClient);
}

TEST_F(ErrorsTest, ASendBeyondItsRegionFails) {
  ibv_sge sge = ours->Sge(4000, 96);
  sge.length = 97;
  ASSERT_EQ(Post(client(), {.wr_id = 1, .sges = {sge}}), 0);
  ExpectCompletion(client_cq(), 1, IBV_WC_LOC_PROT_ERR);
  ExpectEnded(Fails::kClient);
}

TEST_F(ErrorsTest, AnUnsignaledRequestThatFailsIsReportedAllTheSame) {
  const ibv_sge sge = ours->Sge(4000, 97);
  ASSERT_EQ(Post(client(), {.wr_id = 1, .flags = 0, .sges = {sge}}), 0);
  ExpectCompletion(client_cq(), 1, IBV_WC_LOC_PROT_ERR);
}

TEST_F(ErrorsTest, InvalidatingAKeyNobodyHasEndsTheStream) {
  ASSERT_EQ(PostReceive(server(), 5, {theirs->Sge(0, 64)}), 0);
  ASSERT_EQ(
      Post(
          client(),
          {.wr_id = 1, .opcode = IBV_WR_SEND_WITH_INV, .sges = {ours->Sge(0, 4)}, .rkey = theirs->rkey() ^ 0x5a5a5a00}),
      0);
  const ibv_wc received = NextCompletion(pair->server.receive_cq.get());
  EXPECT_EQ(received.wr_id, 5u);
  EXPECT_EQ(received.status, IBV_WC_REM_INV_REQ_ERR) << ibv_wc_status_str(received.status);
  if (pair->client.IsIwarp()) {
    ExpectCompletion(client_cq(), 1);  // it has left
    return ExpectEnded(Fails::kServer);
  }
  // Neither acknowledged nor refused: its sender retries until it gives up or, here, is told to.
  EXPECT_TRUE(NoCompletion(client_cq()));
  ExpectEnded(Fails::kServer);
  ExpectCompletion(client_cq(), 1, IBV_WC_WR_FLUSH_ERR);
}

TEST_F(ErrorsTest, AReadWhereNoneMayBeOutstandingFails) {
  EndpointOptions none;
  none.connection.initiator_depth = 0;
  Connect(none);
  ASSERT_EQ(Post(client(), {.wr_id = 1,
                            .opcode = IBV_WR_RDMA_READ,
                            .sges = {ours->Sge()},
                            .remote_address = theirs->address(),
                            .rkey = theirs->rkey()}),
            0);
  ExpectCompletion(client_cq(), 1, IBV_WC_LOC_QP_OP_ERR);
  ExpectEnded(Fails::kClient);
}

TEST_F(ErrorsTest, AMessageLongerThanTheLongestFails) {
  ibv_device_attr device{};
  ibv_port_attr port{};
  ASSERT_EQ(ibv_query_device(pair->client.context(), &device), 0);
  ASSERT_EQ(ibv_query_port(pair->client.context(), 1, &port), 0);
  EndpointOptions gathering;
  gathering.cap.max_send_sge = static_cast<uint32_t>(device.max_sge);
  Connect(gathering);
  // The same memory over and over. It is only read, and so takes none.
  const size_t page = 4096;
  const size_t size = (port.max_msg_sz / static_cast<uint32_t>(device.max_sge) / page + 1) * page;
  void* memory = mmap(nullptr, size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  {
    auto region = RegisterMemory(pair->client.pd.get(), memory, size, 0);
    ASSERT_TRUE(region) << region.error().ToString();
    const ibv_sge whole{reinterpret_cast<uint64_t>(memory), static_cast<uint32_t>(size), (*region)->lkey};
    ASSERT_EQ(Post(client(), {.wr_id = 1, .sges = std::vector<ibv_sge>(static_cast<size_t>(device.max_sge), whole)}),
              0);
    ExpectCompletion(client_cq(), 1, IBV_WC_LOC_LEN_ERR);
    ExpectEnded(Fails::kClient);
  }
  munmap(memory, size);
}

// --- Long messages ---
//
// The peer refuses them while they are still on their way, so that on iWARP, too, their initiator learns why.

class LongMessageTest : public ErrorsTest {
 protected:
  void SetUp() override {
    ErrorsTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    long_one = std::make_unique<Buffer>(pair->client.pd.get(), size_t{64} << 20);
  }
  void TearDown() override {
    long_one.reset();
    ErrorsTest::TearDown();
  }
  std::unique_ptr<Buffer> long_one;
};

TEST_F(LongMessageTest, ASendLargerThanTheReceiveIsAnInvalidRequest) {
  ASSERT_EQ(PostReceive(server(), 5, {theirs->Sge(0, 8)}), 0);
  ASSERT_EQ(Post(client(), {.wr_id = 1, .sges = {long_one->Sge()}}), 0);
  ExpectCompletion(client_cq(), 1, IBV_WC_REM_INV_REQ_ERR);
  ExpectCompletion(pair->server.receive_cq.get(), 5, IBV_WC_LOC_LEN_ERR);
  ExpectEnded(Fails::kBoth);
}

TEST_F(LongMessageTest, ASendWithoutAReceiveIsARemoteOperationError) {
  if (!pair->client.IsIwarp()) GTEST_SKIP() << "skipped: the sender waits until there is one";
  ASSERT_EQ(Post(client(), {.wr_id = 1, .sges = {long_one->Sge()}}), 0);
  ExpectCompletion(client_cq(), 1, IBV_WC_REM_OP_ERR);
  ExpectEnded(Fails::kBoth);
}

TEST_F(LongMessageTest, AWriteBeyondTheRegionIsARemoteAccessError) {
  ASSERT_EQ(Post(client(), {.wr_id = 1,
                            .opcode = IBV_WR_RDMA_WRITE,
                            .sges = {long_one->Sge()},
                            .remote_address = theirs->address(),
                            .rkey = theirs->rkey()}),
            0);
  ExpectCompletion(client_cq(), 1, IBV_WC_REM_ACCESS_ERR);
  ExpectEnded(Fails::kBoth);
}

// --- Flushing ---

// What stands before the failure has been done, what stands behind it has not, whatever became of it meanwhile; and
// each request says so, in its turn, if it was to be silent, too.
TEST_F(ErrorsTest, ARefusalInTheMiddleFlushesWhatIsBehindItInOrder) {
  for (uint64_t i = 10; i < 14; ++i) ASSERT_EQ(PostReceive(server(), i, {theirs->Sge(0, 16)}), 0);
  for (uint64_t i = 20; i < 24; ++i) ASSERT_EQ(PostReceive(client(), i, {ours->Sge(0, 16)}), 0);
  const auto read = [&](uint64_t wr_id, uint32_t rkey, unsigned flags) {
    return SendSpec{.wr_id = wr_id,
                    .opcode = IBV_WR_RDMA_READ,
                    .flags = flags,
                    .sges = {ours->Sge(0, 16)},
                    .remote_address = theirs->address(),
                    .rkey = rkey};
  };
  ASSERT_EQ(Post(client(), {.wr_id = 0, .sges = {ours->Sge(0, 16)}}), 0);
  ASSERT_EQ(Post(client(), read(1, theirs->rkey(), 0)), 0);
  ASSERT_EQ(Post(client(), read(2, theirs->rkey(), IBV_SEND_SIGNALED)), 0);
  // Their answers are here; a fault may overtake an answer on iWARP.
  ExpectCompletion(client_cq(), 0);
  ExpectCompletion(client_cq(), 2);
  ASSERT_EQ(Post(client(), read(3, theirs->rkey() ^ 0x5a5a5a00, 0)), 0);
  ASSERT_EQ(Post(client(), {.wr_id = 4, .sges = {ours->Sge(0, 16)}}), 0);
  ASSERT_EQ(Post(client(), {.wr_id = 5, .flags = 0, .sges = {ours->Sge(0, 16)}}), 0);
  ASSERT_EQ(Post(client(), read(6, theirs->rkey(), IBV_SEND_SIGNALED)), 0);
  ExpectCompletion(client_cq(), 3, IBV_WC_REM_ACCESS_ERR);
  for (uint64_t i = 4; i < 7; ++i) ExpectCompletion(client_cq(), i, IBV_WC_WR_FLUSH_ERR);
  for (uint64_t i = 20; i < 24; ++i) ExpectCompletion(pair->client.receive_cq.get(), i, IBV_WC_WR_FLUSH_ERR);
  // The target, too, has taken what stands before it and nothing else.
  ExpectCompletion(pair->server.receive_cq.get(), 10);
  for (uint64_t i = 11; i < 14; ++i) ExpectCompletion(pair->server.receive_cq.get(), i, IBV_WC_WR_FLUSH_ERR);
  EXPECT_TRUE(NoCompletion(client_cq()));
  EXPECT_TRUE(NoCompletion(pair->server.receive_cq.get()));
}

TEST_F(ErrorsTest, EverythingPostedIsFlushedInOrder) {
  for (uint64_t i = 10; i < 20; ++i) ASSERT_EQ(PostReceive(client(), i, {ours->Sge(0, 16)}), 0);
  // The first fails here; those behind it never leave.
  ibv_sge bad = ours->Sge(4000, 97);
  ibv_sge good = ours->Sge(0, 16);
  ibv_send_wr chain[5];
  for (int i = 0; i < 5; ++i) {
    chain[i] = ibv_send_wr{.wr_id = static_cast<uint64_t>(i),
                           .next = i < 4 ? &chain[i + 1] : nullptr,
                           .sg_list = i == 0 ? &bad : &good,
                           .num_sge = 1,
                           .opcode = IBV_WR_SEND,
                           .send_flags = i % 2 == 0 ? unsigned{IBV_SEND_SIGNALED} : 0u};
  }
  ibv_send_wr* first_bad = nullptr;
  ASSERT_EQ(ibv_post_send(client(), chain, &first_bad), 0);
  ExpectCompletion(client_cq(), 0, IBV_WC_LOC_PROT_ERR);
  for (uint64_t i = 1; i < 5; ++i) ExpectCompletion(client_cq(), i, IBV_WC_WR_FLUSH_ERR);
  for (uint64_t i = 10; i < 20; ++i) ExpectCompletion(pair->client.receive_cq.get(), i, IBV_WC_WR_FLUSH_ERR);
}

TEST_F(ErrorsTest, WorkPostedAfterTheEndIsFlushedToo) {
  ASSERT_EQ(pair->client.Disconnect(), 0);
  ExpectEnded(Fails::kClient);
  ASSERT_EQ(Post(client(), {.wr_id = 3, .sges = {ours->Sge(0, 16)}}), 0);
  ASSERT_EQ(PostReceive(client(), 4, {ours->Sge(0, 16)}), 0);
  ExpectCompletion(client_cq(), 3, IBV_WC_WR_FLUSH_ERR);
  ExpectCompletion(pair->client.receive_cq.get(), 4, IBV_WC_WR_FLUSH_ERR);
}

TEST_F(ErrorsTest, MovingToErrorFlushesBothQueuesAndEndsTheConnection) {
  ASSERT_EQ(PostReceive(client(), 1, {ours->Sge(0, 16)}), 0);
  ASSERT_EQ(PostReceive(server(), 2, {theirs->Sge(0, 16)}), 0);
  ibv_qp_attr change{};
  change.qp_state = IBV_QPS_ERR;
  ASSERT_EQ(ibv_modify_qp(client(), &change, IBV_QP_STATE), 0);
  EXPECT_EQ(client()->state, IBV_QPS_ERR);
  ExpectCompletion(pair->client.receive_cq.get(), 1, IBV_WC_WR_FLUSH_ERR);
  ExpectEnded(Fails::kClient);
  ExpectCompletion(pair->server.receive_cq.get(), 2, IBV_WC_WR_FLUSH_ERR);
}

TEST_F(ErrorsTest, AFaultOnOneConnectionLeavesOthersAlone) {
  auto other = Pair::Connected();
  ASSERT_EQ(Post(client(),
                 {.wr_id = 1, .opcode = IBV_WR_RDMA_READ, .sges = {ours->Sge(0, 16)}, .remote_address = 0, .rkey = 1}),
            0);
  ExpectCompletion(client_cq(), 1, IBV_WC_REM_ACCESS_ERR);
  ExpectEnded(Fails::kBoth);
  Buffer inbox(other->server.pd.get(), 64);
  Buffer outbox(other->client.pd.get(), 64);
  ASSERT_EQ(PostReceive(other->server.qp(), 1, {inbox.Sge()}), 0);
  ASSERT_EQ(Post(other->client.qp(), {.wr_id = 2, .sges = {outbox.Sge()}}), 0);
  ExpectCompletion(other->server.receive_cq.get(), 1);
  ExpectCompletion(other->client.send_cq.get(), 2);
}

TEST_F(ErrorsTest, DestroyedQpLeavesNoCompletionsBehind) {
  ASSERT_EQ(PostReceive(client(), 1, {ours->Sge(0, 16)}), 0);
  ASSERT_EQ(PostReceive(server(), 2, {theirs->Sge(0, 16)}), 0);
  pair->client.DestroyQp();
  if (!pair->server.IsIwarp()) {
    ASSERT_EQ(pair->server.Disconnect(), 0);
  }
  ExpectCompletion(pair->server.receive_cq.get(), 2, IBV_WC_WR_FLUSH_ERR);
  EXPECT_TRUE(NoCompletion(pair->client.receive_cq.get()));
}

}  // namespace
}  // namespace stagecoach::verbs
