// Memory windows: type 1 (ibv_bind_mw), windows that are one QP's alone (type 2), and each rule of binding and
// invalidating whose breach is a memory window bind error.

#include <cerrno>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

constexpr unsigned kBindable =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;

class MwTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    pair = Pair::Connected();
    ASSERT_EQ(ibv_query_device(server()->context, &limits), 0);
    if (limits.max_mw == 0) GTEST_SKIP() << "skipped: the device has no memory windows";
    // The sink of a Read on iWARP is written remotely.
    ours = std::make_unique<Buffer>(pair->client.pd.get(), 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    bindable = std::make_unique<Buffer>(pair->server.pd.get(), 4096, static_cast<int>(kBindable));
  }
  void TearDown() override {
    window = {};
    bindable.reset();
    ours.reset();
    pair.reset();
    VerbsTest::TearDown();
  }
  ibv_qp* server() { return pair->server.qp(); }
  ibv_cq* server_cq() { return pair->server.send_cq.get(); }
  void Allocate(ibv_mw_type type) {
    auto made = AllocateMw(pair->server.pd.get(), type);
    ASSERT_TRUE(made) << made.error().ToString();
    window = std::move(*made);
  }
  ibv_mw_bind_info Part(size_t offset, size_t length, unsigned access = IBV_ACCESS_REMOTE_READ) {
    return {.mr = bindable->mr(), .addr = bindable->address() + offset, .length = length, .mw_access_flags = access};
  }
  // Of a type 1 window; expects that it was taken.
  void Bind1(const ibv_mw_bind_info& info) { EXPECT_EQ(TryBind1(info), 0); }
  int TryBind1(const ibv_mw_bind_info& info, unsigned flags = IBV_SEND_SIGNALED) {
    ibv_mw_bind bind{.wr_id = 50, .send_flags = flags, .bind_info = info};
    return ibv_bind_mw(server(), window.get(), &bind);
  }
  int TryBind2(uint32_t rkey, const ibv_mw_bind_info& info) { return PostBind(server(), 50, window.get(), rkey, info); }
  static int TryInvalidate(ibv_qp* qp, uint32_t rkey) { return PostInvalidate(qp, 6, rkey); }
  // A bind or invalidation that fails when it is carried out has a status of its own, which InfiniBand calls "memory
  // management operation error", and ends the QP.
  void ExpectFailed(ibv_qp* qp, ibv_cq* cq, uint64_t wr_id) {
    ExpectCompletion(cq, wr_id, IBV_WC_MW_BIND_ERR);
    ExpectStateIsReached(qp, IBV_QPS_ERR);
  }
  void ExpectBindError() { ExpectFailed(server(), server_cq(), 50); }
  void ExpectInvalidationFails(uint32_t rkey) {
    ASSERT_EQ(TryInvalidate(server(), rkey), 0);
    ExpectFailed(server(), server_cq(), 6);
  }
  ibv_wc_status Read(Pair& through, Buffer& into, uint32_t rkey, size_t offset, size_t length) {
    EXPECT_EQ(Post(through.client.qp(), {.wr_id = 2,
                                         .opcode = IBV_WR_RDMA_READ,
                                         .sges = {into.Sge(0, length)},
                                         .remote_address = bindable->address() + offset,
                                         .rkey = rkey}),
              0);
    return NextCompletion(through.client.send_cq.get()).status;
  }
  ibv_wc_status Read(uint32_t rkey, size_t offset, size_t length) { return Read(*pair, *ours, rkey, offset, length); }

  std::unique_ptr<Pair> pair;
  std::unique_ptr<Buffer> ours;
  std::unique_ptr<Buffer> bindable;
  MemoryWindow window;
  ibv_device_attr limits{};
};

class MwType1Test : public MwTest {
 protected:
  void SetUp() override {
    MwTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    if ((limits.device_cap_flags & IBV_DEVICE_MEM_WINDOW) == 0) GTEST_SKIP() << "skipped: no type 1 memory windows";
    Allocate(IBV_MW_TYPE_1);
  }
};

TEST_F(MwType1Test, ABindOpensAPartUnderAKeyOfTheDevicesChoice) {
  const uint32_t before = window->rkey;
  bindable->Fill("0123456789");
  Bind1(Part(2, 5));
  EXPECT_NE(window->rkey, before);
  EXPECT_EQ(ExpectCompletion(server_cq(), 50).opcode, IBV_WC_BIND_MW);
  EXPECT_EQ(Read(window->rkey, 2, 5), IBV_WC_SUCCESS);
  EXPECT_EQ(ours->Text(5), "23456");
  EXPECT_EQ(Read(window->rkey, 2, 6), IBV_WC_REM_ACCESS_ERR) << "one byte more than was bound";
}

TEST_F(MwType1Test, LocalWriteAmongItsRightsIsNoError) {
  Bind1(Part(0, 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ));
  ExpectCompletion(server_cq(), 50);
  EXPECT_EQ(Read(window->rkey, 0, 64), IBV_WC_SUCCESS);
}

TEST_F(MwType1Test, BoundAnewTheOldKeyIsDead) {
  Bind1(Part(0, 100));
  const uint32_t first = window->rkey;
  ExpectCompletion(server_cq(), 50);
  Bind1(Part(100, 100));
  ExpectCompletion(server_cq(), 50);
  EXPECT_NE(window->rkey, first);
  EXPECT_EQ(Read(window->rkey, 150, 50), IBV_WC_SUCCESS);
  EXPECT_EQ(Read(first, 0, 50), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(MwType1Test, AnyQpOfTheDomainMayUseIt) {
  // A second QP of the same domain: one that takes its Receives from an SRQ of it.
  SharedQueue srq = CreateSrq(pair->server.pd.get(), 4);
  ASSERT_NE(srq, nullptr);
  EndpointOptions same_domain;
  same_domain.srq = srq.get();
  auto second = Pair::Connected(same_domain);
  Buffer theirs(second->client.pd.get(), 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  bindable->Fill("for all");
  Bind1(Part(0, 7));
  ExpectCompletion(server_cq(), 50);
  EXPECT_EQ(Read(*second, theirs, window->rkey, 0, 7), IBV_WC_SUCCESS);
  EXPECT_EQ(theirs.Text(7), "for all");
}

TEST_F(MwType1Test, ABindOfNothingEndsTheBinding) {
  Bind1(Part(0, 100));
  ExpectCompletion(server_cq(), 50);
  EXPECT_EQ(ibv_dereg_mr(bindable->mr()), EBUSY);
  Bind1({.mr = nullptr, .addr = 0, .length = 0, .mw_access_flags = 0});
  ExpectCompletion(server_cq(), 50);
  EXPECT_EQ(Read(window->rkey, 0, 1), IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(bindable->Deregister(), 0) << "nothing is bound to it";
}

TEST_F(MwType1Test, ABoundWindowCanBeFreed) {
  Bind1(Part(0, 100));
  ExpectCompletion(server_cq(), 50);
  EXPECT_EQ(window.Destroy(), 0);
  EXPECT_EQ(bindable->Deregister(), 0);
}

TEST_F(MwType1Test, LocalInvalidationIsNotForIt) {
  Bind1(Part(0, 100));
  ExpectCompletion(server_cq(), 50);
  ExpectInvalidationFails(window->rkey);
}

TEST_F(MwType1Test, WhatCannotBeBoundIsRefusedAtTheCall) {
  const uint32_t rkey = window->rkey;
  EXPECT_EQ(TryBind1({.mr = nullptr, .addr = 1, .length = 1, .mw_access_flags = 0}), EINVAL);
  auto foreign = AllocatePd(server()->context);
  ASSERT_TRUE(foreign);
  Buffer elsewhere(foreign->get(), 64, static_cast<int>(kBindable));
  EXPECT_EQ(TryBind1({.mr = elsewhere.mr(), .addr = elsewhere.address(), .length = 8, .mw_access_flags = 0}), EPERM);
  EXPECT_EQ(window->rkey, rkey) << "the key changes with a bind only";
  EXPECT_NE(TryBind2(ibv_inc_rkey(rkey), Part(0, 8)), 0) << "by a work request only windows of type 2 are bound";
}

TEST_F(MwType1Test, ARangeBeyondTheRegionIsABindError) {
  Bind1(Part(4000, 97));
  ExpectBindError();
}

TEST_F(MwType1Test, ZeroBasedIsForType2) {
  Bind1(Part(0, 100, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_ZERO_BASED));
  ExpectBindError();
}

class MwType2Test : public MwTest {
 protected:
  void SetUp() override {
    MwTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    if ((limits.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B) == 0) {
      GTEST_SKIP() << "skipped: no type 2B memory windows";
    }
    Allocate(IBV_MW_TYPE_2);
  }
  // A bind that is taken when it is posted, and fails when it is carried out.
  void ExpectRefused(uint32_t rkey, const ibv_mw_bind_info& info) {
    ASSERT_EQ(TryBind2(rkey, info), 0);
    ExpectBindError();
  }
};

TEST_F(MwType2Test, IsNotBoundByTheCallForType1) {
  EXPECT_EQ(TryBind1(Part(0, 100)), EINVAL);
}

// [IBTA 10.6.7.2.3] The consumer owns the low eight bits of a window's key alone.
TEST_F(MwType2Test, OfTheKeyThatIsAskedForTheLowBitsCount) {
  const uint32_t index = window->rkey & ~0xffu;
  bindable->Fill("0123456789");
  // The first and the last key there are, one that differs in the index, and a number of the program's own.
  for (const uint32_t asked : {0x00u, 0xffu, (index + 0x100) | 0x21, 0x12345678u}) {
    ASSERT_EQ(TryBind2(asked, Part(0, 10)), 0);
    ExpectCompletion(server_cq(), 50);
    const uint32_t bound = index | (asked & 0xff);
    EXPECT_EQ(Read(bound, 0, 10), IBV_WC_SUCCESS) << asked;
    EXPECT_EQ(ours->Text(10), "0123456789");
    ASSERT_EQ(TryInvalidate(server(), bound), 0);
    ExpectCompletion(server_cq(), 6);
  }
}

TEST_F(MwType2Test, TheWindowIsNamedByItsNewKeyOnceThePostIsTaken) {
  const uint32_t before = window->rkey;
  const uint32_t index = before & ~0xffu;
  ASSERT_EQ(TryBind2(0xabcdef01 ^ (before & 0xff), Part(0, 10)), 0);
  const uint32_t bound = index | (0x01 ^ (before & 0xff));
  EXPECT_EQ(window->rkey, bound) << "before the bind has completed";
  ExpectCompletion(server_cq(), 50);
  EXPECT_EQ(Read(window->rkey, 0, 10), IBV_WC_SUCCESS);
  ASSERT_EQ(TryInvalidate(server(), window->rkey), 0);
  ExpectCompletion(server_cq(), 6);
  // A post that is refused leaves it as it was.
  EXPECT_NE(TryBind2(ibv_inc_rkey(bound), {.mr = nullptr, .addr = 0, .length = 8, .mw_access_flags = 0}), 0);
  EXPECT_EQ(window->rkey, bound);
}

// What a program writes to the rkey of its ibv_mw is the program's; the window stays the same.
TEST_F(MwType2Test, TheWindowIsTheOneThatWasAllocated) {
  const uint32_t index = window->rkey & ~0xffu;
  window->rkey = bindable->rkey();
  ASSERT_EQ(TryBind2(0x77, Part(0, 10)), 0);
  EXPECT_EQ(window->rkey, index | 0x77);
  ExpectCompletion(server_cq(), 50);
  EXPECT_EQ(Read(index | 0x77, 0, 10), IBV_WC_SUCCESS);
}

TEST_F(MwType2Test, LocalWriteAmongItsRightsIsNoError) {
  // Of a region that allows it, and of one that does not.
  Buffer readable(pair->server.pd.get(), 64, IBV_ACCESS_MW_BIND | IBV_ACCESS_REMOTE_READ);
  const unsigned rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;
  ASSERT_EQ(TryBind2(ibv_inc_rkey(window->rkey),
                     {.mr = readable.mr(), .addr = readable.address(), .length = 64, .mw_access_flags = rights}),
            0);
  ExpectCompletion(server_cq(), 50);
  ASSERT_EQ(TryInvalidate(server(), window->rkey), 0);
  ExpectCompletion(server_cq(), 6);
  ASSERT_EQ(TryBind2(ibv_inc_rkey(window->rkey), Part(0, 64, rights)), 0);
  ExpectCompletion(server_cq(), 50);
  EXPECT_EQ(Read(window->rkey, 0, 64), IBV_WC_SUCCESS);
  // It opens nothing that the other rights do not.
  ASSERT_EQ(Post(pair->server.qp(), {.wr_id = 3, .sges = {{bindable->address(), 8, window->rkey}}}), 0);
  EXPECT_NE(NextCompletion(server_cq()).status, IBV_WC_SUCCESS) << "a window's key is no lkey";
}

TEST_F(MwType2Test, ZeroBasedItBeginsAtZero) {
  const uint32_t rkey = ibv_inc_rkey(window->rkey);
  ASSERT_EQ(TryBind2(rkey, Part(1000, 100, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_ZERO_BASED)), 0);
  ExpectCompletion(server_cq(), 50);
  CopyBytes(bindable->bytes().subspan(1010), AsBytes("ten"));
  ASSERT_EQ(
      Post(pair->client.qp(),
           {.wr_id = 2, .opcode = IBV_WR_RDMA_READ, .sges = {ours->Sge(0, 3)}, .remote_address = 10, .rkey = rkey}),
      0);
  ExpectCompletion(pair->client.send_cq.get(), 2);
  EXPECT_EQ(ours->Text(3), "ten");
}

TEST_F(MwType2Test, OverARegionThatBeginsAtZeroItIsBoundByOffset) {
  Buffer memory(pair->server.pd.get(), 4096, static_cast<int>(kBindable));
  auto zero_based = RegisterMemory(pair->server.pd.get(), memory.bytes().data(), memory.size(),
                                   static_cast<int>(kBindable) | IBV_ACCESS_ZERO_BASED);
  ASSERT_TRUE(zero_based);
  CopyBytes(memory.bytes().subspan(1010), AsBytes("ten"));
  const uint32_t rkey = ibv_inc_rkey(window->rkey);
  ASSERT_EQ(
      TryBind2(rkey, {.mr = zero_based->get(), .addr = 1000, .length = 100, .mw_access_flags = IBV_ACCESS_REMOTE_READ}),
      0);
  ExpectCompletion(server_cq(), 50);
  ASSERT_EQ(
      Post(pair->client.qp(),
           {.wr_id = 2, .opcode = IBV_WR_RDMA_READ, .sges = {ours->Sge(0, 3)}, .remote_address = 1010, .rkey = rkey}),
      0);
  ExpectCompletion(pair->client.send_cq.get(), 2);
  EXPECT_EQ(ours->Text(3), "ten");
  EXPECT_EQ(window.Destroy(), 0);
}

// Two windows and the region itself over the same bytes, each with rights, range and life of its own.
TEST_F(MwType2Test, OverlappingWindowsAreOfTheirOwnRight) {
  auto second = AllocateMw(pair->server.pd.get(), IBV_MW_TYPE_2);
  ASSERT_TRUE(second);
  const uint32_t readable = ibv_inc_rkey(window->rkey);
  ASSERT_EQ(TryBind2(readable, Part(0, 200)), 0);
  ExpectCompletion(server_cq(), 50);
  std::swap(window, *second);
  const uint32_t writable = ibv_inc_rkey(window->rkey);
  ASSERT_EQ(TryBind2(writable, Part(100, 200, IBV_ACCESS_REMOTE_WRITE)), 0);
  ExpectCompletion(server_cq(), 50);
  const auto write = [&](size_t offset, std::string_view text) {
    ours->Fill(text);
    return Post(pair->client.qp(), {.wr_id = 3,
                                    .opcode = IBV_WR_RDMA_WRITE,
                                    .sges = {ours->Sge(0, text.size())},
                                    .remote_address = bindable->address() + offset,
                                    .rkey = writable});
  };
  ASSERT_EQ(write(150, "shared"), 0);
  ExpectCompletion(pair->client.send_cq.get(), 3);
  EXPECT_EQ(Read(readable, 150, 6), IBV_WC_SUCCESS);
  EXPECT_EQ(ours->Text(6), "shared");
  EXPECT_EQ(ibv_dereg_mr(bindable->mr()), EBUSY);
  // One is invalidated; the other one and the region go on.
  ASSERT_EQ(TryInvalidate(server(), readable), 0);
  ExpectCompletion(server_cq(), 6);
  EXPECT_EQ(ibv_dereg_mr(bindable->mr()), EBUSY) << "the second one is bound";
  ASSERT_EQ(write(150, "behind"), 0);
  ExpectCompletion(pair->client.send_cq.get(), 3);
  EXPECT_EQ(Read(bindable->rkey(), 150, 6), IBV_WC_SUCCESS);
  EXPECT_EQ(ours->Text(6), "behind");
  EXPECT_EQ(Read(readable, 150, 6), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(MwType2Test, AWindowDoesNotWidenWhatItsOwnKeyAllows) {
  const uint32_t rkey = ibv_inc_rkey(window->rkey);
  ASSERT_EQ(TryBind2(rkey, Part(0, 100, IBV_ACCESS_REMOTE_WRITE)), 0);
  ExpectCompletion(server_cq(), 50);
  EXPECT_EQ(Read(bindable->rkey(), 0, 8), IBV_WC_SUCCESS) << "the region's key reads";
  EXPECT_EQ(Read(rkey, 0, 8), IBV_WC_REM_ACCESS_ERR) << "the window's key does not";
}

TEST_F(MwType2Test, BoundAlreadyIsABindError) {
  const uint32_t first = ibv_inc_rkey(window->rkey);
  ASSERT_EQ(TryBind2(first, Part(0, 100)), 0);
  ExpectCompletion(server_cq(), 50);
  ExpectRefused(ibv_inc_rkey(first), Part(0, 100));
}

TEST_F(MwType2Test, AnEmptyRangeIsABindError) {
  ExpectRefused(ibv_inc_rkey(window->rkey), Part(0, 0));
}

TEST_F(MwType2Test, ARangeBeyondTheRegionIsABindError) {
  ExpectRefused(ibv_inc_rkey(window->rkey), Part(4000, 97));
}

TEST_F(MwType2Test, ARangeBeforeTheRegionIsABindError) {
  ibv_mw_bind_info info = Part(0, 10);
  --info.addr;
  ExpectRefused(ibv_inc_rkey(window->rkey), info);
}

TEST_F(MwType2Test, ARegionThatDoesNotAllowBindingIsABindError) {
  Buffer closed(pair->server.pd.get(), 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
  ExpectRefused(ibv_inc_rkey(window->rkey),
                {.mr = closed.mr(), .addr = closed.address(), .length = 8, .mw_access_flags = IBV_ACCESS_REMOTE_READ});
}

TEST_F(MwType2Test, ARegionOfAnotherDomainIsABindError) {
  auto foreign = AllocatePd(server()->context);
  ASSERT_TRUE(foreign);
  Buffer elsewhere(foreign->get(), 64, static_cast<int>(kBindable));
  ExpectRefused(
      ibv_inc_rkey(window->rkey),
      {.mr = elsewhere.mr(), .addr = elsewhere.address(), .length = 8, .mw_access_flags = IBV_ACCESS_REMOTE_READ});
}

TEST_F(MwType2Test, RemoteWriteToARegionWithoutLocalWriteIsABindError) {
  Buffer readable(pair->server.pd.get(), 64, IBV_ACCESS_MW_BIND | IBV_ACCESS_REMOTE_READ);
  ExpectRefused(
      ibv_inc_rkey(window->rkey),
      {.mr = readable.mr(), .addr = readable.address(), .length = 8, .mw_access_flags = IBV_ACCESS_REMOTE_WRITE});
}

// --- Invalidating ---

TEST_F(MwType2Test, InvalidatingAStaleKeyIsABindError) {
  const uint32_t rkey = ibv_inc_rkey(window->rkey);
  ASSERT_EQ(TryBind2(rkey, Part(0, 100)), 0);
  ExpectCompletion(server_cq(), 50);
  ASSERT_EQ(TryInvalidate(server(), rkey), 0);
  EXPECT_EQ(ExpectCompletion(server_cq(), 6).opcode, IBV_WC_LOCAL_INV);
  ExpectInvalidationFails(rkey);
}

TEST_F(MwType2Test, InvalidatingAKeyNobodyHasIsABindError) {
  ExpectInvalidationFails(window->rkey ^ 0x5a5a5a00);
}

TEST_F(MwType2Test, InvalidatingARegionIsABindError) {
  ExpectInvalidationFails(bindable->rkey());
  EXPECT_EQ(bindable->Deregister(), 0) << "it is registered as before";
}

// What was posted before the culprit is done before it fails, and what is behind it is not done at all.
TEST_F(MwType2Test, WorkBeforeAFailedBindIsDoneAndTheCulpritIsNamed) {
  Buffer sink(pair->server.pd.get(), 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  Buffer source(pair->client.pd.get(), 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
  source.FillPattern(4);
  ibv_sge whole = sink.Sge();
  ibv_send_wr chain[3] = {};
  chain[0].wr_id = 1;
  chain[0].next = &chain[1];
  chain[0].sg_list = &whole;
  chain[0].num_sge = 1;
  chain[0].opcode = IBV_WR_RDMA_READ;
  chain[0].send_flags = IBV_SEND_SIGNALED;
  chain[0].wr.rdma.remote_addr = source.address();
  chain[0].wr.rdma.rkey = source.rkey();
  chain[1].wr_id = 50;
  chain[1].next = &chain[2];
  chain[1].opcode = IBV_WR_BIND_MW;
  chain[1].bind_mw.mw = window.get();
  chain[1].bind_mw.rkey = ibv_inc_rkey(window->rkey);
  chain[1].bind_mw.bind_info = Part(4000, 97);
  chain[2].wr_id = 2;
  chain[2].opcode = IBV_WR_SEND;
  ibv_send_wr* bad = nullptr;
  ASSERT_EQ(ibv_post_send(server(), chain, &bad), 0);
  ExpectCompletion(server_cq(), 1);
  EXPECT_TRUE(sink.Text(4096) == source.Text(4096));
  ExpectBindError();
  ExpectCompletion(server_cq(), 2, IBV_WC_WR_FLUSH_ERR);
}

// --- Of one QP ---

class MwOfAQpTest : public MwType2Test {
 protected:
  void SetUp() override {
    MwType2Test::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    srq = CreateSrq(pair->server.pd.get(), 4);
    ASSERT_NE(srq, nullptr);
    rkey = ibv_inc_rkey(window->rkey);
    ASSERT_EQ(TryBind2(rkey, Part(0, 100, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE)), 0);
    ExpectCompletion(server_cq(), 50);
    bindable->Fill("for one");
  }
  void TearDown() override {
    theirs.reset();
    second.reset();
    srq.reset();
    MwType2Test::TearDown();
  }
  // Another pair, whose server's QP is of the same domain as the one that the window is bound to: it takes its Receives
  // from an SRQ of it.
  void ConnectSecond() {
    theirs.reset();
    second.reset();
    EndpointOptions same_domain;
    same_domain.srq = srq.get();
    second = Pair::Connected(same_domain);
    theirs = std::make_unique<Buffer>(second->client.pd.get(), 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  }
  void ExpectItServesItsOwnQp() {
    EXPECT_EQ(Read(rkey, 0, 7), IBV_WC_SUCCESS);
    EXPECT_EQ(ours->Text(7), "for one");
  }

  uint32_t rkey = 0;
  SharedQueue srq;
  std::unique_ptr<Pair> second;
  std::unique_ptr<Buffer> theirs;
};

TEST_F(MwOfAQpTest, AReadThroughAnotherQpIsRefused) {
  ASSERT_NO_FATAL_FAILURE(ConnectSecond());
  EXPECT_EQ(Read(*second, *theirs, rkey, 0, 7), IBV_WC_REM_ACCESS_ERR);
  ExpectStateIsReached(second->server.qp(), IBV_QPS_ERR);
  EXPECT_EQ(theirs->Text(1), std::string(1, '\0'));
  ExpectItServesItsOwnQp();
}

TEST_F(MwOfAQpTest, AWriteThroughAnotherQpIsRefused) {
  ASSERT_NO_FATAL_FAILURE(ConnectSecond());
  theirs->Fill("not for you");
  ASSERT_EQ(Post(second->client.qp(), {.wr_id = 3,
                                       .opcode = IBV_WR_RDMA_WRITE,
                                       .sges = {theirs->Sge(0, 11)},
                                       .remote_address = bindable->address(),
                                       .rkey = rkey}),
            0);
  ExpectCompletion(second->client.send_cq.get(), 3, second->client.IsIwarp() ? IBV_WC_SUCCESS : IBV_WC_REM_ACCESS_ERR);
  ExpectStateIsReached(second->server.qp(), IBV_QPS_ERR);
  ExpectItServesItsOwnQp();
}

TEST_F(MwOfAQpTest, ASendThroughAnotherQpDoesNotInvalidateIt) {
  ASSERT_NO_FATAL_FAILURE(ConnectSecond());
  Buffer inbox(pair->server.pd.get(), 64);
  ASSERT_EQ(PostReceive(srq.get(), 5, {inbox.Sge()}), 0);
  ASSERT_EQ(Post(second->client.qp(),
                 {.wr_id = 3, .opcode = IBV_WR_SEND_WITH_INV, .sges = {theirs->Sge(0, 4)}, .rkey = rkey}),
            0);
  ExpectCompletion(second->server.receive_cq.get(), 5, IBV_WC_REM_INV_REQ_ERR);
  ExpectStateIsReached(second->server.qp(), IBV_QPS_ERR);
  ExpectItServesItsOwnQp();
}

TEST_F(MwOfAQpTest, AnotherQpCannotInvalidateIt) {
  ASSERT_NO_FATAL_FAILURE(ConnectSecond());
  ASSERT_EQ(TryInvalidate(second->server.qp(), rkey), 0);
  ExpectFailed(second->server.qp(), second->server.send_cq.get(), 6);
  ExpectItServesItsOwnQp();
}

TEST_F(MwOfAQpTest, EndsWithItsQp) {
  EXPECT_EQ(ibv_dereg_mr(bindable->mr()), EBUSY);
  pair->server.DestroyQp();
  EXPECT_EQ(bindable->Deregister(), 0) << "nothing is bound to it";
}

}  // namespace
}  // namespace stagecoach::verbs
