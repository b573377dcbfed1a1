// The data path between two connected QPs: Send, Write, Read, invalidation, ordering, sizes.

#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

// Looks at memory that a device writes. Such a look is a race by the letter of C++, as with any DMA, and the point of
// the test.
__attribute__((no_sanitize("thread"), noinline)) std::byte Peek(const std::byte* at) {
  return *static_cast<const volatile std::byte*>(at);
}

constexpr int kRemoteAll = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;

class DataPathTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    Connect({}, {});
  }
  void TearDown() override {
    theirs.reset();
    ours.reset();
    pair.reset();
    VerbsTest::TearDown();
  }
  void Connect(EndpointOptions server_options, EndpointOptions client_options) {
    theirs.reset();
    ours.reset();
    pair.reset();
    pair = Pair::Connected(server_options, client_options);
    theirs = std::make_unique<Buffer>(pair->server.pd.get(), 1 << 20, kRemoteAll);
    ours = std::make_unique<Buffer>(pair->client.pd.get(), 1 << 20, kRemoteAll);
  }
  ibv_qp* client() { return pair->client.qp(); }
  ibv_qp* server() { return pair->server.qp(); }
  ibv_cq* client_cq() { return pair->client.send_cq.get(); }
  ibv_cq* server_cq() { return pair->server.receive_cq.get(); }

  std::unique_ptr<Pair> pair;
  std::unique_ptr<Buffer> theirs;  // the server's memory
  std::unique_ptr<Buffer> ours;    // the client's
};

TEST_F(DataPathTest, ASendArrivesInThePostedReceive) {
  ours->Fill("hello");
  ASSERT_EQ(PostReceive(server(), 42, {theirs->Sge(0, 100)}), 0);
  ASSERT_EQ(Post(client(), {.wr_id = 7, .sges = {ours->Sge(0, 5)}}), 0);
  const ibv_wc received = ExpectCompletion(server_cq(), 42);
  EXPECT_EQ(received.opcode, IBV_WC_RECV);
  EXPECT_EQ(received.byte_len, 5u);
  EXPECT_EQ(received.qp_num, server()->qp_num);
  EXPECT_EQ(received.wc_flags & (IBV_WC_WITH_IMM | IBV_WC_WITH_INV), 0u);
  EXPECT_EQ(theirs->Text(6), std::string("hello\0", 6));
  const ibv_wc sent = ExpectCompletion(client_cq(), 7);
  EXPECT_EQ(sent.opcode, IBV_WC_SEND);
  EXPECT_EQ(sent.qp_num, client()->qp_num);
}

TEST_F(DataPathTest, TheAcceptingEndMaySendFirst) {
  theirs->Fill("from the server");
  ASSERT_EQ(PostReceive(client(), 1, {ours->Sge(0, 100)}), 0);
  ASSERT_EQ(Post(server(), {.wr_id = 2, .sges = {theirs->Sge(0, 15)}}), 0);
  EXPECT_EQ(ExpectCompletion(pair->client.receive_cq.get(), 1).byte_len, 15u);
  EXPECT_EQ(ours->Text(15), "from the server");
  ExpectCompletion(pair->server.send_cq.get(), 2);
}

TEST_F(DataPathTest, ReceivesAreConsumedInOrder) {
  for (uint64_t i = 0; i < 20; ++i) ASSERT_EQ(PostReceive(server(), i, {theirs->Sge(i * 64, 64)}), 0);
  for (uint64_t i = 0; i < 20; ++i) {
    ours->bytes()[i] = static_cast<std::byte>('a' + i);
    ASSERT_EQ(Post(client(), {.wr_id = i, .sges = {ours->Sge(i, 1)}}), 0);
  }
  for (uint64_t i = 0; i < 20; ++i) {
    ExpectCompletion(server_cq(), i);
    ExpectCompletion(client_cq(), i);
    EXPECT_EQ(theirs->bytes()[i * 64], static_cast<std::byte>('a' + i));
  }
}

TEST_F(DataPathTest, GatherAndScatterKeepTheOrderOfParts) {
  ours->Fill("one-two-three");
  ASSERT_EQ(
      PostReceive(server(), 1, {theirs->Sge(100, 3), theirs->Sge(200, 0), theirs->Sge(50, 4), theirs->Sge(300, 100)}),
      0);
  ASSERT_EQ(Post(client(), {.sges = {ours->Sge(8, 5), ours->Sge(3, 1), ours->Sge(0, 3)}}), 0);
  EXPECT_EQ(ExpectCompletion(server_cq(), 1).byte_len, 9u);
  // "three-one" cut into 3, 4 and the rest.
  EXPECT_EQ(AsText(ConstBytes(theirs->bytes()).subspan(100, 3)), "thr");
  EXPECT_EQ(AsText(ConstBytes(theirs->bytes()).subspan(50, 4)), "ee-o");
  EXPECT_EQ(AsText(ConstBytes(theirs->bytes()).subspan(300, 2)), "ne");
}

TEST_F(DataPathTest, AnEmptySendConsumesAReceive) {
  ASSERT_EQ(PostReceive(server(), 1, {theirs->Sge(0, 10)}), 0);
  ASSERT_EQ(Post(client(), {.wr_id = 2, .sges = {}}), 0);
  EXPECT_EQ(ExpectCompletion(server_cq(), 1).byte_len, 0u);
  ExpectCompletion(client_cq(), 2);
}

TEST_F(DataPathTest, MessagesOfEverySizeAroundASegmentArriveWhole) {
  uint32_t seed = 1;
  for (size_t size :
       {1u, 3u, 17u, 127u, 128u, 129u, 1423u, 1424u, 1425u, 4096u, 65466u, 65480u, 65536u, 300001u, 1u << 20}) {
    ours->FillPattern(++seed);
    ASSERT_EQ(PostReceive(server(), size, {theirs->Sge()}), 0);
    ASSERT_EQ(Post(client(), {.wr_id = size, .sges = {ours->Sge(0, size)}}), 0);
    EXPECT_EQ(ExpectCompletion(server_cq(), size).byte_len, size);
    ExpectCompletion(client_cq(), size);
    ASSERT_EQ(AsText(ConstBytes(theirs->bytes()).first(size)), AsText(ConstBytes(ours->bytes()).first(size))) << size;
  }
}

TEST_F(DataPathTest, InlineDataMayBeReusedAtOnce) {
  EndpointOptions with_inline;
  with_inline.cap.max_inline_data = 64;
  Connect({}, with_inline);
  ASSERT_EQ(PostReceive(server(), 1, {theirs->Sge(0, 64)}), 0);
  std::string text = "inline data, no region";
  const ibv_sge sge{reinterpret_cast<uint64_t>(text.data()), static_cast<uint32_t>(text.size()), 0};
  ASSERT_EQ(Post(client(), {.flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE, .sges = {sge}}), 0);
  std::fill(text.begin(), text.end(), '#');
  ExpectCompletion(server_cq(), 1);
  EXPECT_EQ(theirs->Text(22), "inline data, no region");
}

TEST_F(DataPathTest, AnUnsignaledSendCompletesSilently) {
  ASSERT_EQ(PostReceive(server(), 1, {theirs->Sge(0, 10)}), 0);
  ASSERT_EQ(PostReceive(server(), 2, {theirs->Sge(0, 10)}), 0);
  ASSERT_EQ(Post(client(), {.wr_id = 1, .flags = 0, .sges = {ours->Sge(0, 1)}}), 0);
  ASSERT_EQ(Post(client(), {.wr_id = 2, .sges = {ours->Sge(0, 1)}}), 0);
  ExpectCompletion(client_cq(), 2);
  ExpectCompletion(server_cq(), 1);
  ExpectCompletion(server_cq(), 2);
  EXPECT_TRUE(NoCompletion(client_cq()));
}

TEST_F(DataPathTest, AQpMayReportEverySend) {
  EndpointOptions reporting;
  reporting.all_signaled = true;
  Connect({}, reporting);
  ASSERT_EQ(PostReceive(server(), 1, {theirs->Sge(0, 10)}), 0);
  ASSERT_EQ(Post(client(), {.wr_id = 5, .flags = 0, .sges = {ours->Sge(0, 1)}}), 0);
  ExpectCompletion(client_cq(), 5);
}

TEST_F(DataPathTest, UnsignaledWorkDoesNotFillTheQueueForEver) {
  // Signal one in eight, as real programs do, for many times the queue's depth.
  int completed = 0;
  for (int i = 0; i < 400; ++i) {
    const bool signal = i % 8 == 7;
    ASSERT_EQ(PostReceive(server(), i, {theirs->Sge(0, 10)}), 0);
    ASSERT_EQ(Post(client(), {.wr_id = static_cast<uint64_t>(i),
                              .flags = signal ? unsigned{IBV_SEND_SIGNALED} : 0u,
                              .sges = {ours->Sge(0, 8)}}),
              0)
        << i;
    ExpectCompletion(server_cq(), i);
    if (signal) {
      ExpectCompletion(client_cq(), i);
      ++completed;
    }
  }
  EXPECT_EQ(completed, 50);
}

// --- Write ---

TEST_F(DataPathTest, AWriteIsVisibleWhenTheNextSendArrives) {
  for (int round = 0; round < 20; ++round) {
    ours->FillPattern(round);
    ASSERT_EQ(PostReceive(server(), round, {theirs->Sge(1 << 19, 16)}), 0);
    ASSERT_EQ(Post(client(), {.wr_id = 1,
                              .opcode = IBV_WR_RDMA_WRITE,
                              .flags = 0,
                              .sges = {ours->Sge(0, 200000)},
                              .remote_address = theirs->address() + 16,
                              .rkey = theirs->rkey()}),
              0);
    ASSERT_EQ(Post(client(), {.wr_id = 2, .sges = {ours->Sge(0, 1)}}), 0);
    ExpectCompletion(server_cq(), round);
    ASSERT_EQ(AsText(ConstBytes(theirs->bytes()).subspan(16, 200000)), AsText(ConstBytes(ours->bytes()).first(200000)));
    ExpectCompletion(client_cq(), 2);
  }
}

TEST_F(DataPathTest, AWriteConsumesNoReceiveAndLeavesNoTraceButTheBytes) {
  ours->Fill("direct");
  ASSERT_EQ(Post(client(), {.wr_id = 3,
                            .opcode = IBV_WR_RDMA_WRITE,
                            .sges = {ours->Sge(0, 6)},
                            .remote_address = theirs->address() + 1000,
                            .rkey = theirs->rkey()}),
            0);
  EXPECT_EQ(ExpectCompletion(client_cq(), 3).opcode, IBV_WC_RDMA_WRITE);
  // The target program makes no verbs call; it looks at its memory.
  ASSERT_TRUE(world().Until([&] { return Peek(&theirs->bytes()[1005]) == std::byte{'t'}; }));
  EXPECT_TRUE(NoCompletion(server_cq()));
  // The rest is looked at in order with a message.
  ASSERT_EQ(PostReceive(server(), 4, {theirs->Sge(0, 8)}), 0);
  ASSERT_EQ(Post(client(), {.wr_id = 4, .sges = {}}), 0);
  ExpectCompletion(server_cq(), 4);
  EXPECT_EQ(AsText(ConstBytes(theirs->bytes()).subspan(1000, 6)), "direct");
  EXPECT_EQ(theirs->bytes()[999], std::byte{0});
  EXPECT_EQ(theirs->bytes()[1006], std::byte{0});
}

TEST_F(DataPathTest, AWriteGathersFromSeveralRegions) {
  Buffer other(pair->client.pd.get(), 16);
  other.Fill("second");
  ours->Fill("first ");
  ASSERT_EQ(PostReceive(server(), 9, {theirs->Sge(4096, 16)}), 0);
  ASSERT_EQ(Post(client(), {.wr_id = 1,
                            .opcode = IBV_WR_RDMA_WRITE,
                            .sges = {ours->Sge(0, 6), other.Sge(0, 6)},
                            .remote_address = theirs->address(),
                            .rkey = theirs->rkey()}),
            0);
  ASSERT_EQ(Post(client(), {.wr_id = 2, .sges = {}}), 0);
  ExpectCompletion(server_cq(), 9);
  EXPECT_EQ(theirs->Text(12), "first second");
  ExpectCompletion(client_cq(), 1);
  ExpectCompletion(client_cq(), 2);
}

TEST_F(DataPathTest, AnEmptyWriteNeedsNoMemory) {
  ASSERT_EQ(Post(client(), {.wr_id = 1, .opcode = IBV_WR_RDMA_WRITE, .sges = {}, .remote_address = 0, .rkey = 0}), 0);
  ExpectCompletion(client_cq(), 1);
  ASSERT_EQ(PostReceive(server(), 2, {theirs->Sge(0, 16)}), 0);
  ASSERT_EQ(Post(client(), {.wr_id = 2, .sges = {ours->Sge(0, 1)}}), 0);
  ExpectCompletion(server_cq(), 2);
  ExpectCompletion(client_cq(), 2);
}

// --- Read ---

TEST_F(DataPathTest, AReadFetchesFromATargetThatDoesNothing) {
  theirs->FillPattern(77);
  for (size_t size : {1u, 100u, 1424u, 65536u, 500000u}) {
    std::fill(ours->bytes().begin(), ours->bytes().end(), std::byte{0});
    ASSERT_EQ(Post(client(), {.wr_id = size,
                              .opcode = IBV_WR_RDMA_READ,
                              .sges = {ours->Sge(8, size)},
                              .remote_address = theirs->address() + 5,
                              .rkey = theirs->rkey()}),
              0);
    const ibv_wc read = ExpectCompletion(client_cq(), size);
    EXPECT_EQ(read.opcode, IBV_WC_RDMA_READ);
    EXPECT_EQ(read.byte_len, size);
    ASSERT_EQ(AsText(ConstBytes(ours->bytes()).subspan(8, size)), AsText(ConstBytes(theirs->bytes()).subspan(5, size)));
    EXPECT_EQ(ours->bytes()[8 + size], std::byte{0});
  }
  EXPECT_TRUE(NoCompletion(server_cq()));
}

TEST_F(DataPathTest, MoreReadsThanTheDepthWaitTheirTurn) {
  EndpointOptions shallow;
  shallow.connection.initiator_depth = 2;
  shallow.connection.responder_resources = 2;
  Connect(shallow, shallow);
  theirs->FillPattern(3);
  for (uint64_t i = 0; i < 30; ++i) {
    ASSERT_EQ(Post(client(), {.wr_id = i,
                              .opcode = IBV_WR_RDMA_READ,
                              .sges = {ours->Sge(i * 3000, 3000)},
                              .remote_address = theirs->address() + i * 3000,
                              .rkey = theirs->rkey()}),
              0);
  }
  for (uint64_t i = 0; i < 30; ++i) ExpectCompletion(client_cq(), i);
  EXPECT_EQ(AsText(ConstBytes(ours->bytes()).first(90000)), AsText(ConstBytes(theirs->bytes()).first(90000)));
}

TEST_F(DataPathTest, WorkIsCompletedInTheOrderItWasPosted) {
  // The Read needs an answer, the Sends behind it do not: completions come in order all the same.
  for (uint64_t i = 0; i < 4; ++i) ASSERT_EQ(PostReceive(server(), i, {theirs->Sge(0, 16)}), 0);
  uint64_t next = 0;
  for (int i = 0; i < 4; ++i) {
    ASSERT_EQ(Post(client(), {.wr_id = next++,
                              .opcode = IBV_WR_RDMA_READ,
                              .sges = {ours->Sge(0, 100000)},
                              .remote_address = theirs->address(),
                              .rkey = theirs->rkey()}),
              0);
    ASSERT_EQ(Post(client(), {.wr_id = next++, .sges = {ours->Sge(0, 4)}}), 0);
  }
  for (uint64_t i = 0; i < next; ++i) ExpectCompletion(client_cq(), i);
}

TEST_F(DataPathTest, AFencedSendWaitsForTheReadBeforeIt) {
  theirs->Fill("fetched");
  ASSERT_EQ(PostReceive(server(), 1, {theirs->Sge(1000, 16)}), 0);
  ASSERT_EQ(Post(client(), {.wr_id = 1,
                            .opcode = IBV_WR_RDMA_READ,
                            .flags = 0,
                            .sges = {ours->Sge(0, 7)},
                            .remote_address = theirs->address(),
                            .rkey = theirs->rkey()}),
            0);
  // Sends back what the Read is about to fetch: without the fence it would send zeros.
  ASSERT_EQ(Post(client(), {.wr_id = 2, .flags = IBV_SEND_SIGNALED | IBV_SEND_FENCE, .sges = {ours->Sge(0, 7)}}), 0);
  ExpectCompletion(server_cq(), 1);
  EXPECT_EQ(AsText(ConstBytes(theirs->bytes()).subspan(1000, 7)), "fetched");
}

TEST_F(DataPathTest, BothDirectionsAtOnce) {
  constexpr int kRounds = 100;
  int server_received = 0;
  int client_received = 0;
  for (int i = 0; i < 16; ++i) {
    ASSERT_EQ(PostReceive(server(), i, {theirs->Sge(0, 4096)}), 0);
    ASSERT_EQ(PostReceive(client(), i, {ours->Sge(0, 4096)}), 0);
  }
  for (int i = 0; i < kRounds; ++i) {
    ASSERT_EQ(Post(client(), {.wr_id = 1, .sges = {ours->Sge(8192, 4096)}}), 0);
    ASSERT_EQ(Post(server(), {.wr_id = 1, .sges = {theirs->Sge(8192, 4096)}}), 0);
    ExpectCompletion(server_cq(), server_received % 16);
    ExpectCompletion(pair->client.receive_cq.get(), client_received % 16);
    ASSERT_EQ(PostReceive(server(), server_received++ % 16, {theirs->Sge(0, 4096)}), 0);
    ASSERT_EQ(PostReceive(client(), client_received++ % 16, {ours->Sge(0, 4096)}), 0);
    ExpectCompletion(client_cq(), 1);
    ExpectCompletion(pair->server.send_cq.get(), 1);
  }
}

// --- Windows and invalidation ---

class WindowPathTest : public DataPathTest {
 protected:
  void SetUp() override {
    DataPathTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    ibv_device_attr attributes{};
    ASSERT_EQ(ibv_query_device(pair->server.context(), &attributes), 0);
    if ((attributes.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B) == 0)
      GTEST_SKIP() << "skipped: no type 2B memory windows";
    bindable = std::make_unique<Buffer>(pair->server.pd.get(), 8192, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
    window = std::move(AllocateMw(pair->server.pd.get(), IBV_MW_TYPE_2).value());
  }
  void TearDown() override {
    window = {};
    bindable.reset();
    DataPathTest::TearDown();
  }
  // Binds [offset, offset + length) of the server's buffer and returns the key it is reached by.
  uint32_t Bind(size_t offset, size_t length, unsigned access) {
    const uint32_t rkey = ibv_inc_rkey(window->rkey);
    const ibv_mw_bind_info info = {
        .mr = bindable->mr(), .addr = bindable->address() + offset, .length = length, .mw_access_flags = access};
    EXPECT_EQ(PostBind(server(), 100, window.get(), rkey, info), 0);
    EXPECT_EQ(ExpectCompletion(pair->server.send_cq.get(), 100).opcode, IBV_WC_BIND_MW);
    window->rkey = rkey;
    return rkey;
  }
  std::unique_ptr<Buffer> bindable;
  MemoryWindow window;
};

TEST_F(WindowPathTest, AWindowOpensPartOfARegion) {
  const uint32_t rkey = Bind(100, 50, IBV_ACCESS_REMOTE_WRITE);
  ours->Fill("through the window");
  ASSERT_EQ(PostReceive(server(), 1, {theirs->Sge(0, 16)}), 0);
  ASSERT_EQ(Post(client(), {.wr_id = 1,
                            .opcode = IBV_WR_RDMA_WRITE,
                            .sges = {ours->Sge(0, 18)},
                            .remote_address = bindable->address() + 132,
                            .rkey = rkey}),
            0);
  ASSERT_EQ(Post(client(), {.wr_id = 2, .sges = {}}), 0);
  ExpectCompletion(server_cq(), 1);
  EXPECT_EQ(AsText(ConstBytes(bindable->bytes()).subspan(132, 18)), "through the window");
}

TEST_F(WindowPathTest, SendWithInvalidateEndsTheBindingAndSaysSo) {
  const uint32_t rkey = Bind(0, 4096, IBV_ACCESS_REMOTE_READ);
  ASSERT_EQ(PostReceive(server(), 1, {theirs->Sge(0, 16)}), 0);
  ASSERT_EQ(Post(client(), {.wr_id = 1, .opcode = IBV_WR_SEND_WITH_INV, .sges = {ours->Sge(0, 3)}, .rkey = rkey}), 0);
  const ibv_wc received = ExpectCompletion(server_cq(), 1);
  EXPECT_EQ(received.wc_flags & IBV_WC_WITH_INV, static_cast<unsigned>(IBV_WC_WITH_INV));
  EXPECT_EQ(received.invalidated_rkey, rkey);
  EXPECT_EQ(received.byte_len, 3u);
  ExpectCompletion(client_cq(), 1);
  // The key is dead now: a Read through it ends the connection.
  ASSERT_EQ(Post(client(), {.wr_id = 2,
                            .opcode = IBV_WR_RDMA_READ,
                            .sges = {ours->Sge(0, 16)},
                            .remote_address = bindable->address(),
                            .rkey = rkey}),
            0);
  const ibv_wc refused = NextCompletion(client_cq());
  EXPECT_EQ(refused.wr_id, 2u);
  EXPECT_EQ(refused.status, IBV_WC_REM_ACCESS_ERR) << ibv_wc_status_str(refused.status);
}

TEST_F(WindowPathTest, LocalInvalidateEndsTheBindingAndItCanBeBoundAnew) {
  const uint32_t first = Bind(0, 64, IBV_ACCESS_REMOTE_READ);
  ASSERT_EQ(PostInvalidate(server(), 5, first), 0);
  EXPECT_EQ(ExpectCompletion(pair->server.send_cq.get(), 5).opcode, IBV_WC_LOCAL_INV);
  const uint32_t second = Bind(0, 64, IBV_ACCESS_REMOTE_READ);
  EXPECT_NE(first, second);
  bindable->Fill("again");
  ASSERT_EQ(Post(client(), {.wr_id = 2,
                            .opcode = IBV_WR_RDMA_READ,
                            .sges = {ours->Sge(0, 5)},
                            .remote_address = bindable->address(),
                            .rkey = second}),
            0);
  ExpectCompletion(client_cq(), 2);
  EXPECT_EQ(ours->Text(5), "again");
}

TEST_F(WindowPathTest, AChainBindsAndSendsWithOneDoorbell) {
  const uint32_t rkey = ibv_inc_rkey(window->rkey);
  ASSERT_EQ(PostReceive(client(), 1, {ours->Sge(0, 16)}), 0);
  ibv_sge sge = theirs->Sge(0, 4);
  ibv_send_wr send{.wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
  ibv_send_wr bind{.wr_id = 1, .next = &send, .opcode = IBV_WR_BIND_MW};
  bind.bind_mw.mw = window.get();
  bind.bind_mw.rkey = rkey;
  bind.bind_mw.bind_info = {
      .mr = bindable->mr(), .addr = bindable->address(), .length = 8192, .mw_access_flags = IBV_ACCESS_REMOTE_READ};
  ibv_send_wr* bad = nullptr;
  ASSERT_EQ(ibv_post_send(server(), &bind, &bad), 0);
  ExpectCompletion(pair->client.receive_cq.get(), 1);
  // By the time the Send has arrived the window is open.
  ASSERT_EQ(Post(client(), {.wr_id = 3,
                            .opcode = IBV_WR_RDMA_READ,
                            .sges = {ours->Sge(0, 100)},
                            .remote_address = bindable->address(),
                            .rkey = rkey}),
            0);
  ExpectCompletion(client_cq(), 3);
}

}  // namespace
}  // namespace stagecoach::verbs
