// Memory regions over the wire: zero-based and shifted addresses, and regions that change (ibv_rereg_mr).

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

constexpr int kExposed = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;

class MrTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    pair = Pair::Connected();
    ours = std::make_unique<Buffer>(pair->client.pd.get(), 4096, kExposed);
    memory.assign(8192, std::byte{0});
  }
  void TearDown() override {
    region = {};
    ours.reset();
    pair.reset();
    VerbsTest::TearDown();
  }
  // Of the server, over `memory`.
  void Register(int access) {
    region = std::move(RegisterMemory(pair->server.pd.get(), memory.data(), 4096, access).value());
  }
  int Rereg(int flags, ibv_pd* pd, void* address, size_t length, int access) {
    errno = 0;
    return ibv_rereg_mr(region.get(), flags, pd, address, length, access);
  }
  ibv_wc_status WriteTo(uint64_t address, uint32_t rkey, std::string_view text) {
    ours->Fill(text);
    EXPECT_EQ(Post(pair->client.qp(), {.wr_id = 1,
                                       .opcode = IBV_WR_RDMA_WRITE,
                                       .sges = {ours->Sge(0, text.size())},
                                       .remote_address = address,
                                       .rkey = rkey}),
              0);
    return NextCompletion(pair->client.send_cq.get()).status;
  }
  // A Read says for certain whether the peer allowed it.
  ibv_wc_status ReadFrom(uint64_t address, uint32_t rkey, size_t length) {
    EXPECT_EQ(Post(pair->client.qp(), {.wr_id = 2,
                                       .opcode = IBV_WR_RDMA_READ,
                                       .sges = {ours->Sge(2048, length)},
                                       .remote_address = address,
                                       .rkey = rkey}),
              0);
    return NextCompletion(pair->client.send_cq.get()).status;
  }
  std::string Fetched(size_t length) { return std::string(AsText(ConstBytes(ours->bytes()).subspan(2048, length))); }
  static uint64_t PageSize() { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }
  uint64_t At(size_t offset) { return reinterpret_cast<uint64_t>(memory.data()) + offset; }

  std::unique_ptr<Pair> pair;
  std::unique_ptr<Buffer> ours;
  std::vector<std::byte> memory;
  MemoryRegion region;
};

TEST_F(MrTest, AZeroBasedRegionBeginsAtZero) {
  Register(kExposed | IBV_ACCESS_ZERO_BASED);
  EXPECT_EQ(WriteTo(100, region->rkey, "at a hundred"), IBV_WC_SUCCESS);
  EXPECT_EQ(ReadFrom(100, region->rkey, 12), IBV_WC_SUCCESS);
  EXPECT_EQ(Fetched(12), "at a hundred");
  EXPECT_EQ(AsText(ConstBytes(memory).subspan(100, 12)), "at a hundred");
  EXPECT_EQ(ReadFrom(At(100), region->rkey, 12), IBV_WC_REM_ACCESS_ERR) << "its own address means nothing";
}

TEST_F(MrTest, AnIovaShiftsARegion) {
  // By whole pages.
  const uint64_t iova = 0x10000 + At(0) % PageSize();
  ibv_mr* mr = ibv_reg_mr_iova(pair->server.pd.get(), memory.data(), 4096, iova, kExposed);
  ASSERT_NE(mr, nullptr);
  region = MemoryRegion(mr);
  EXPECT_EQ(WriteTo(iova + 8, mr->rkey, "shifted"), IBV_WC_SUCCESS);
  EXPECT_EQ(ReadFrom(iova + 8, mr->rkey, 7), IBV_WC_SUCCESS);
  EXPECT_EQ(AsText(ConstBytes(memory).subspan(8, 7)), "shifted");
  EXPECT_EQ(ReadFrom(iova - 1, mr->rkey, 1), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(MrTest, AnIovaLiesInItsPageAsTheMemoryDoes) {
  ibv_pd* const pd = pair->server.pd.get();
  const uint64_t beside = 0x10000 + (At(0) + 8) % PageSize();
  errno = 0;
  EXPECT_EQ(ibv_reg_mr_iova(pd, memory.data(), 4096, beside, kExposed), nullptr);
  EXPECT_EQ(errno, EINVAL);
  errno = 0;
  EXPECT_EQ(ibv_reg_mr_iova2(pd, memory.data(), 4096, beside, kExposed | IBV_ACCESS_RELAXED_ORDERING), nullptr);
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(MrTest, AZeroBasedRegionIsNamedByOffsetsHereToo) {
  Register(kExposed | IBV_ACCESS_ZERO_BASED);
  ASSERT_EQ(PostReceive(pair->server.qp(), 1, {{.addr = 100, .length = 50, .lkey = region->lkey}}), 0);
  ours->Fill("by offset");
  ASSERT_EQ(Post(pair->client.qp(), {.wr_id = 2, .sges = {ours->Sge(0, 9)}}), 0);
  ExpectCompletion(pair->server.receive_cq.get(), 1);
  EXPECT_EQ(AsText(ConstBytes(memory).subspan(100, 9)), "by offset");
  // And out of it again.
  ASSERT_EQ(PostReceive(pair->client.qp(), 3, {ours->Sge(2048, 50)}), 0);
  ASSERT_EQ(Post(pair->server.qp(), {.wr_id = 4, .sges = {{.addr = 103, .length = 6, .lkey = region->lkey}}}), 0);
  ExpectCompletion(pair->client.receive_cq.get(), 3);
  EXPECT_EQ(Fetched(6), "offset");
  // Its end is where its length says.
  ASSERT_EQ(Post(pair->server.qp(), {.wr_id = 5, .sges = {{.addr = 4090, .length = 7, .lkey = region->lkey}}}), 0);
  ExpectCompletion(pair->server.send_cq.get(), 4);
  ExpectCompletion(pair->server.send_cq.get(), 5, IBV_WC_LOC_PROT_ERR);
}

// --- Overlapping regions: the same bytes under several keys, each with rights and a life of its own ---

TEST_F(MrTest, OverlappingRegionsShowTheSameBytes) {
  Register(kExposed);
  auto inner = RegisterMemory(pair->server.pd.get(), memory.data() + 1000, 2000,
                              IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
  ASSERT_TRUE(inner);
  EXPECT_EQ(WriteTo(At(1500), region->rkey, "seen by both"), IBV_WC_SUCCESS);
  EXPECT_EQ(ReadFrom(At(1500), (*inner)->rkey, 12), IBV_WC_SUCCESS);
  EXPECT_EQ(Fetched(12), "seen by both");
  // What one allows is not allowed by the other, nor is its range.
  EXPECT_EQ(ReadFrom(At(500), region->rkey, 12), IBV_WC_SUCCESS);
  EXPECT_EQ(ReadFrom(At(500), (*inner)->rkey, 12), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(MrTest, TheRightsOfOneRegionAreNotThoseOfAnotherOverTheSameBytes) {
  Register(kExposed);
  auto readable = RegisterMemory(pair->server.pd.get(), memory.data(), 4096, IBV_ACCESS_REMOTE_READ);
  auto writable =
      RegisterMemory(pair->server.pd.get(), memory.data(), 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  ASSERT_TRUE(readable && writable);
  EXPECT_EQ(WriteTo(At(0), (*writable)->rkey, "written"), IBV_WC_SUCCESS);
  EXPECT_EQ(ReadFrom(At(0), (*readable)->rkey, 7), IBV_WC_SUCCESS);
  EXPECT_EQ(Fetched(7), "written");
  EXPECT_EQ(ReadFrom(At(0), (*writable)->rkey, 7), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(MrTest, OneOfOverlappingRegionsGoesAndTheOtherStays) {
  Register(kExposed);
  auto other = RegisterMemory(pair->server.pd.get(), memory.data(), 4096, kExposed);
  ASSERT_TRUE(other);
  const uint32_t gone = region->rkey;
  ASSERT_EQ(region.Destroy(), 0);
  EXPECT_EQ(WriteTo(At(8), (*other)->rkey, "stays"), IBV_WC_SUCCESS);
  EXPECT_EQ(ReadFrom(At(8), (*other)->rkey, 5), IBV_WC_SUCCESS);
  EXPECT_EQ(Fetched(5), "stays");
  EXPECT_EQ(ReadFrom(At(8), gone, 5), IBV_WC_REM_ACCESS_ERR);
}

// --- Regions that change ---

class ReregistrationTest : public MrTest {
 protected:
  void SetUp() override {
    MrTest::SetUp();
    if (IsSkipped()) return;
    Register(kExposed);
    if (Rereg(IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, kExposed) != 0 && errno == EOPNOTSUPP) {
      GTEST_SKIP() << "skipped: the device does not re-register regions";
    }
  }
};

TEST_F(ReregistrationTest, RightsCanBeGivenLater) {
  Register(IBV_ACCESS_LOCAL_WRITE);
  const uint32_t lkey = region->lkey;
  const uint32_t rkey = region->rkey;
  ASSERT_EQ(Rereg(IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, kExposed), 0) << errno;
  EXPECT_EQ(region->lkey, lkey) << "only another range changes the keys";
  EXPECT_EQ(region->rkey, rkey);
  EXPECT_EQ(WriteTo(At(0), region->rkey, "allowed now"), IBV_WC_SUCCESS);
  EXPECT_EQ(ReadFrom(At(0), region->rkey, 11), IBV_WC_SUCCESS);
  EXPECT_EQ(Fetched(11), "allowed now");
}

TEST_F(ReregistrationTest, RightsCanBeTakenBack) {
  Register(kExposed);
  ASSERT_EQ(Rereg(IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, IBV_ACCESS_LOCAL_WRITE), 0) << errno;
  EXPECT_EQ(ReadFrom(At(0), region->rkey, 8), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(ReregistrationTest, ARegionCanMove) {
  Register(kExposed);
  ASSERT_EQ(Rereg(IBV_REREG_MR_CHANGE_TRANSLATION, nullptr, memory.data() + 4096, 1000, 0), 0) << errno;
  EXPECT_EQ(region->addr, memory.data() + 4096);
  EXPECT_EQ(region->length, 1000u);
  EXPECT_EQ(WriteTo(At(4096), region->rkey, "moved"), IBV_WC_SUCCESS);
  EXPECT_EQ(ReadFrom(At(4096), region->rkey, 5), IBV_WC_SUCCESS);
  EXPECT_EQ(AsText(ConstBytes(memory).subspan(4096, 5)), "moved");
  EXPECT_EQ(ReadFrom(At(0), region->rkey, 5), IBV_WC_REM_ACCESS_ERR) << "where it was";
}

TEST_F(ReregistrationTest, ARegionCanChangeItsDomain) {
  auto second = AllocatePd(pair->server.context());
  ASSERT_TRUE(second);
  Register(kExposed);
  ASSERT_EQ(Rereg(IBV_REREG_MR_CHANGE_PD, second->get(), nullptr, 0, 0), 0) << errno;
  EXPECT_EQ(region->pd, second->get());
  EXPECT_EQ(ibv_dealloc_pd(second->get()), EBUSY);
  EXPECT_EQ(ReadFrom(At(0), region->rkey, 8), IBV_WC_REM_ACCESS_ERR) << "the QP is of the first domain";
  region = {};
  EXPECT_EQ(second->Destroy(), 0);
}

TEST_F(ReregistrationTest, EverythingCanChangeAtOnce) {
  auto second = AllocatePd(pair->server.context());
  ASSERT_TRUE(second);
  region = std::move(RegisterMemory(second->get(), memory.data(), 100, IBV_ACCESS_LOCAL_WRITE).value());
  ASSERT_EQ(Rereg(IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS,
                  pair->server.pd.get(), memory.data() + 100, 200, kExposed),
            0)
      << errno;
  EXPECT_EQ(second->Destroy(), 0) << "nothing depends on it any more";
  EXPECT_EQ(ReadFrom(At(100), region->rkey, 200), IBV_WC_SUCCESS);
}

TEST_F(ReregistrationTest, AChangeThatMakesNoSenseLeavesTheRegionAsItWas) {
  Register(kExposed);
  const uint32_t rkey = region->rkey;
  EXPECT_EQ(Rereg(0, nullptr, nullptr, 0, 0), IBV_REREG_MR_ERR_INPUT);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(Rereg(1 << 20, nullptr, nullptr, 0, 0), IBV_REREG_MR_ERR_INPUT);
  EXPECT_EQ(Rereg(IBV_REREG_MR_CHANGE_TRANSLATION, nullptr, nullptr, 100, 0), IBV_REREG_MR_ERR_INPUT);
  EXPECT_EQ(Rereg(IBV_REREG_MR_CHANGE_TRANSLATION, nullptr, memory.data(), 0, 0), IBV_REREG_MR_ERR_INPUT);
  EXPECT_EQ(Rereg(IBV_REREG_MR_CHANGE_TRANSLATION, nullptr, memory.data(), 100, kExposed), IBV_REREG_MR_ERR_INPUT);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(region->rkey, rkey);
  EXPECT_EQ(ReadFrom(At(0), rkey, 8), IBV_WC_SUCCESS);
}

TEST_F(ReregistrationTest, RightsThatExcludeEachOtherAreRefusedLater) {
  Register(kExposed);
  EXPECT_EQ(Rereg(IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, IBV_ACCESS_REMOTE_WRITE), IBV_REREG_MR_ERR_CMD);
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(ReregistrationTest, ARegionCannotMoveToMemoryThatIsNotThere) {
  Register(kExposed);
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* gone = mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(gone, MAP_FAILED);
  munmap(gone, page);
  EXPECT_LT(Rereg(IBV_REREG_MR_CHANGE_TRANSLATION, nullptr, gone, page, 0), 0);
  EXPECT_EQ(errno, EFAULT);
}

}  // namespace
}  // namespace stagecoach::verbs
