// Memory that a program unmaps while it is registered. Hardware keeps the pages; here the next use of them fails as a
// use does that the region does not allow, and the program survives it.

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

constexpr int kAll =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
constexpr size_t kPages = 17;

// Registered pages that go.
class Vanishing {
 public:
  Vanishing(ibv_pd* pd, int access) : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    memory_ = Map(nullptr, kPages, PROT_READ | PROT_WRITE);
    region_ = std::move(RegisterMemory(pd, memory_, kPages * page_, access).value());
  }
  ~Vanishing() {
    EXPECT_EQ(region_.Destroy(), 0);
    munmap(memory_, kPages * page_);
  }
  // All pages from this one to another. The addresses stay taken, so that nothing else comes to be there.
  void Vanish(size_t first_page = 0, size_t end_page = kPages) {
    Map(static_cast<std::byte*>(memory_) + first_page * page_, end_page - first_page, PROT_NONE);
  }
  uint64_t address() const { return reinterpret_cast<uintptr_t>(memory_); }
  size_t page() const { return page_; }
  uint32_t rkey() const { return region_->rkey; }
  ibv_sge Sge(size_t length) const { return {address(), static_cast<uint32_t>(length), region_->lkey}; }

 private:
  void* Map(void* where, size_t pages, int rights) const {
    void* const mapped =
        mmap(where, pages * page_, rights, MAP_PRIVATE | MAP_ANONYMOUS | (where != nullptr ? MAP_FIXED : 0), -1, 0);
    EXPECT_NE(mapped, MAP_FAILED);
    return mapped;
  }

  const size_t page_;
  void* memory_ = nullptr;
  MemoryRegion region_;
};

volatile sig_atomic_t faults_of_the_program;
void OnFault(int, siginfo_t*, void*) {
  faults_of_the_program = faults_of_the_program + 1;
  signal(SIGSEGV, SIG_DFL);  // else for ever
}

// How long a transfer is, and which pages are missing. Short ones are copied by the device, long ones by the kernel.
struct Shape {
  const char* name;
  size_t bytes;
  size_t first_missing;
  size_t end_missing = kPages;
};
constexpr Shape kShapes[] = {
    {"short", 16, 0},
    {"of_a_page", 4096, 0},
    {"long", 60000, 0},
    {"long_with_a_good_beginning", 60000, 3},
    {"long_with_a_hole", 60000, 7, 8},
    {"but_for_the_last_word", 4096 + 8, 1},
};

class UnmappedTest : public VerbsTest, public testing::WithParamInterface<Shape> {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    faults_of_the_program = 0;
    struct sigaction own {};
    own.sa_sigaction = OnFault;
    own.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &own, &before_);
    pair = Pair::Connected();
    other = Pair::Connected();
    ours = std::make_unique<Buffer>(pair->client.pd.get(), 64 * 1024, kAll);
    theirs = std::make_unique<Buffer>(pair->server.pd.get(), 64 * 1024, kAll);
  }
  void TearDown() override {
    if (pair != nullptr) {
      ExpectTheOtherWorks();
      EXPECT_EQ(faults_of_the_program, 0) << "they are the device's";
      sigaction(SIGSEGV, &before_, nullptr);
    }
    ours.reset();
    theirs.reset();
    other.reset();
    pair.reset();
    VerbsTest::TearDown();
  }
  ibv_qp* client() { return pair->client.qp(); }
  ibv_cq* client_cq() { return pair->client.send_cq.get(); }
  ibv_cq* server_receive_cq() { return pair->server.receive_cq.get(); }
  static size_t Bytes() { return GetParam().bytes; }

  std::unique_ptr<Vanishing> Gone(Endpoint& end) {
    auto memory = std::make_unique<Vanishing>(end.pd.get(), kAll);
    memory->Vanish(GetParam().first_missing, GetParam().end_missing);
    return memory;
  }
  bool ReachesInError(ibv_qp* qp) {
    return world().Until([qp] {
      ibv_qp_attr now{};
      ibv_qp_init_attr initial{};
      return ibv_query_qp(qp, &now, IBV_QP_STATE, &initial) == 0 && now.qp_state == IBV_QPS_ERR;
    });
  }
  // What is wrong with one connection is its own.
  void ExpectTheOtherWorks() {
    Buffer from(other->client.pd.get(), 64);
    Buffer to(other->server.pd.get(), 64);
    from.Fill("still here");
    ASSERT_EQ(PostReceive(other->server.qp(), 1, {to.Sge()}), 0);
    ASSERT_EQ(Post(other->client.qp(), {.wr_id = 2, .sges = {from.Sge()}}), 0);
    ExpectCompletion(other->server.receive_cq.get(), 1);
    ExpectCompletion(other->client.send_cq.get(), 2);
    EXPECT_EQ(to.Text(10), "still here");
  }

  std::unique_ptr<Pair> pair;
  std::unique_ptr<Pair> other;
  std::unique_ptr<Buffer> ours;
  std::unique_ptr<Buffer> theirs;

 private:
  struct sigaction before_ {};
};

TEST_P(UnmappedTest, ASendFromThereFails) {
  const auto gone = Gone(pair->client);
  ASSERT_EQ(PostReceive(pair->server.qp(), 50, {theirs->Sge()}), 0);
  ASSERT_EQ(Post(client(), {.wr_id = 1, .sges = {gone->Sge(Bytes())}}), 0);
  ExpectCompletion(client_cq(), 1, IBV_WC_LOC_PROT_ERR);
  EXPECT_TRUE(ReachesInError(client()));
}

TEST_P(UnmappedTest, WhatWasSentBeforeItArrives) {
  const auto gone = Gone(pair->client);
  ours->Fill("good bytes");
  ASSERT_EQ(PostReceive(pair->server.qp(), 50, {theirs->Sge()}), 0);
  ASSERT_EQ(PostReceive(pair->server.qp(), 51, {theirs->Sge(1024)}), 0);
  ASSERT_EQ(Post(client(), {.wr_id = 1, .sges = {ours->Sge(0, 10)}}), 0);
  ASSERT_EQ(Post(client(), {.wr_id = 2, .sges = {gone->Sge(Bytes())}}), 0);
  ExpectCompletion(client_cq(), 1);
  ExpectCompletion(client_cq(), 2, IBV_WC_LOC_PROT_ERR);
  ExpectCompletion(server_receive_cq(), 50);
  EXPECT_EQ(theirs->Text(10), "good bytes");
}

TEST_P(UnmappedTest, AWriteFromThereFails) {
  const auto gone = Gone(pair->client);
  ASSERT_EQ(Post(client(), {.wr_id = 1,
                            .opcode = IBV_WR_RDMA_WRITE,
                            .sges = {gone->Sge(Bytes())},
                            .remote_address = theirs->address(),
                            .rkey = theirs->rkey()}),
            0);
  ExpectCompletion(client_cq(), 1, IBV_WC_LOC_PROT_ERR);
  EXPECT_TRUE(ReachesInError(client()));
}

TEST_P(UnmappedTest, AReceiveThereFails) {
  const auto gone = Gone(pair->server);
  ASSERT_EQ(PostReceive(pair->server.qp(), 50, {gone->Sge(Bytes())}), 0);
  ASSERT_EQ(Post(client(), {.wr_id = 1, .sges = {ours->Sge(0, Bytes())}}), 0);
  ExpectCompletion(server_receive_cq(), 50, IBV_WC_LOC_PROT_ERR);
  const bool sent_is_done = pair->client.IsIwarp();
  if (!sent_is_done) {
    ExpectCompletion(client_cq(), 1, IBV_WC_REM_OP_ERR);
  }
  EXPECT_TRUE(ReachesInError(client()));
  EXPECT_TRUE(ReachesInError(pair->server.qp()));
}

TEST_P(UnmappedTest, AWriteToThereIsRefused) {
  const auto gone = Gone(pair->server);
  ASSERT_EQ(PostReceive(pair->server.qp(), 50, {theirs->Sge()}), 0);
  ASSERT_EQ(Post(client(), {.wr_id = 1,
                            .opcode = IBV_WR_RDMA_WRITE,
                            .sges = {ours->Sge(0, Bytes())},
                            .remote_address = gone->address(),
                            .rkey = gone->rkey()}),
            0);
  const bool may_have_left = pair->client.IsIwarp();  // then it is done; what is still on its way hears why
  const ibv_wc_status status = NextCompletion(client_cq()).status;
  if (!may_have_left || status != IBV_WC_SUCCESS) {
    EXPECT_EQ(status, IBV_WC_REM_ACCESS_ERR);
  }
  std::vector<AwaitedEvent> awaited = {{pair->server.context(), IBV_EVENT_QP_ACCESS_ERR, pair->server.qp()}};
  if (pair->client.IsIwarp()) awaited.push_back({pair->client.context(), IBV_EVENT_QP_FATAL, client()});
  EXPECT_TRUE(ExpectAsyncEvents(awaited));
  ExpectCompletion(server_receive_cq(), 50, IBV_WC_WR_FLUSH_ERR);
  EXPECT_TRUE(ReachesInError(client()));
}

TEST_P(UnmappedTest, AReadFromThereIsRefused) {
  const auto gone = Gone(pair->server);
  ASSERT_EQ(Post(client(), {.wr_id = 1,
                            .opcode = IBV_WR_RDMA_READ,
                            .sges = {ours->Sge(0, Bytes())},
                            .remote_address = gone->address(),
                            .rkey = gone->rkey()}),
            0);
  ExpectCompletion(client_cq(), 1, IBV_WC_REM_ACCESS_ERR);
  EXPECT_TRUE(ReachesInError(client()));
  EXPECT_TRUE(ReachesInError(pair->server.qp()));
}

// On iWARP, too, where nothing keeps a device from ending the stream ahead of the answer (decision 0017).
TEST_P(UnmappedTest, AReadBeforeARefusedOneCompletes) {
  const auto gone = Gone(pair->server);
  std::memset(theirs->bytes().data(), 7, 60000);
  const auto read = [&](uint64_t wr_id, ibv_sge sink, uint64_t address, uint32_t rkey) {
    return SendSpec{
        .wr_id = wr_id, .opcode = IBV_WR_RDMA_READ, .sges = {sink}, .remote_address = address, .rkey = rkey};
  };
  ASSERT_EQ(Post(client(), read(1, ours->Sge(0, 60000), theirs->address(), theirs->rkey())), 0);
  ASSERT_EQ(Post(client(), read(2, ours->Sge(0, Bytes()), gone->address(), gone->rkey())), 0);
  ExpectCompletion(client_cq(), 1);
  ExpectCompletion(client_cq(), 2, IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(ours->bytes()[59999], std::byte{7});
}

TEST_P(UnmappedTest, AReadToThereFails) {
  const auto gone = Gone(pair->client);
  ASSERT_EQ(Post(client(), {.wr_id = 1,
                            .opcode = IBV_WR_RDMA_READ,
                            .sges = {gone->Sge(Bytes())},
                            .remote_address = theirs->address(),
                            .rkey = theirs->rkey()}),
            0);
  ExpectCompletion(client_cq(), 1, IBV_WC_LOC_PROT_ERR);
  EXPECT_TRUE(ReachesInError(client()));
}

INSTANTIATE_TEST_SUITE_P(Shapes, UnmappedTest, testing::ValuesIn(kShapes),
                         [](const auto& info) { return info.param.name; });

// Transfers of eight bytes alone.
using UnmappedWordTest = UnmappedTest;

TEST_P(UnmappedWordTest, AnAtomicThereIsRefused) {
  if (pair->client.IsIwarp()) GTEST_SKIP() << "skipped: no atomics";
  for (const ibv_wr_opcode opcode : {IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_CMP_AND_SWP}) {
    auto fresh = Pair::Connected();
    Buffer result(fresh->client.pd.get(), 8);
    Vanishing gone(fresh->server.pd.get(), kAll);
    gone.Vanish();
    ASSERT_EQ(Post(fresh->client.qp(), {.wr_id = 1,
                                        .opcode = opcode,
                                        .sges = {result.Sge()},
                                        .remote_address = gone.address(),
                                        .rkey = gone.rkey(),
                                        .compare_add = 1}),
              0);
    ExpectCompletion(fresh->client.send_cq.get(), 1, IBV_WC_REM_ACCESS_ERR);
  }
}

TEST_P(UnmappedWordTest, AnAtomicsResultThereFails) {
  if (pair->client.IsIwarp()) GTEST_SKIP() << "skipped: no atomics";
  const auto gone = Gone(pair->client);
  ASSERT_EQ(Post(client(), {.wr_id = 1,
                            .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
                            .sges = {gone->Sge(8)},
                            .remote_address = theirs->address(),
                            .rkey = theirs->rkey(),
                            .compare_add = 1}),
            0);
  ExpectCompletion(client_cq(), 1, IBV_WC_LOC_PROT_ERR);
}

INSTANTIATE_TEST_SUITE_P(Words, UnmappedWordTest, testing::Values(Shape{"word", 8, 0}),
                         [](const auto& info) { return info.param.name; });

// --- Inline ---

class UnmappedInlineTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    EndpointOptions options;
    options.cap.max_inline_data = 64;
    pair = Pair::Connected({}, options);
  }
  void TearDown() override {
    pair.reset();
    VerbsTest::TearDown();
  }
  std::unique_ptr<Pair> pair;
};

TEST_F(UnmappedInlineTest, DataThatCannotBeReadIsRefusedAtPost) {
  Vanishing gone(pair->client.pd.get(), kAll);
  gone.Vanish();
  EXPECT_EQ(Post(pair->client.qp(), {.wr_id = 1, .flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE, .sges = {gone.Sge(16)}}),
            EFAULT);
  EXPECT_TRUE(NoCompletion(pair->client.send_cq.get()));
}

// Of most numbers of 64 bits none is an address at all, which the processor reports otherwise than a page that is not
// there.
TEST_F(UnmappedInlineTest, DataFromWhatIsNoAddressIsRefusedAtPost) {
  for (const uint64_t address :
       {uint64_t{1}, uint64_t{1} << 56, (uint64_t{1} << 63) - 16, uint64_t{1} << 63, UINT64_MAX - 16, UINT64_MAX}) {
    for (const uint32_t length : {1, 8, 16, 64}) {
      EXPECT_EQ(Post(pair->client.qp(), {.wr_id = 1,
                                         .flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE,
                                         .sges = {{.addr = address, .length = length, .lkey = 0}}}),
                EFAULT)
          << address << ' ' << length;
    }
  }
  EXPECT_TRUE(NoCompletion(pair->client.send_cq.get()));
}

TEST_F(UnmappedInlineTest, DataIsTheCallersAgainAfterThePost) {
  Vanishing gone(pair->client.pd.get(), kAll);
  std::memcpy(reinterpret_cast<void*>(gone.address()), "taken with it", 13);
  Buffer to(pair->server.pd.get(), 64);
  ASSERT_EQ(PostReceive(pair->server.qp(), 1, {to.Sge()}), 0);
  ASSERT_EQ(Post(pair->client.qp(), {.wr_id = 2, .flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE, .sges = {gone.Sge(13)}}),
            0);
  gone.Vanish();
  ExpectCompletion(pair->server.receive_cq.get(), 1);
  ExpectCompletion(pair->client.send_cq.get(), 2);
  EXPECT_EQ(to.Text(13), "taken with it");
}

}  // namespace
}  // namespace stagecoach::verbs
