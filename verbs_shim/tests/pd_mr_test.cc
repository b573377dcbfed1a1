// Protection domains, memory regions and windows: rights, limits and dependencies.

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

class PdMrTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    context = std::move(OpenDevice().value());
    pd = std::move(AllocatePd(context.get()).value());
  }
  void TearDown() override {
    pd = {};
    context = {};
    VerbsTest::TearDown();
  }
  Context context;
  ProtectionDomain pd;
};

// Flags known only at run time take another path through the header (ibv_reg_mr_iova2).
int AtRunTime(int flags) {
  volatile int value = flags;
  return value;
}

TEST_F(PdMrTest, ARegionSaysWhatItCovers) {
  std::vector<std::byte> memory(4096);
  ibv_mr* mr = ibv_reg_mr(pd.get(), memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
  ASSERT_NE(mr, nullptr);
  EXPECT_EQ(mr->context, context.get());
  EXPECT_EQ(mr->pd, pd.get());
  EXPECT_EQ(mr->addr, memory.data());
  EXPECT_EQ(mr->length, memory.size());
  EXPECT_NE(mr->rkey, 0u);
  EXPECT_EQ(ibv_dereg_mr(mr), 0);
}

TEST_F(PdMrTest, FlagsKnownAtRunTimeRegisterTheSame) {
  std::vector<std::byte> memory(100);
  ibv_mr* mr =
      ibv_reg_mr(pd.get(), memory.data(), memory.size(), AtRunTime(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
  ASSERT_NE(mr, nullptr);
  EXPECT_EQ(mr->length, memory.size());
  EXPECT_EQ(ibv_dereg_mr(mr), 0);
}

TEST_F(PdMrTest, OptionalAccessFlagsAreAcceptedAndIgnored) {
  std::vector<std::byte> memory(100);
  ibv_mr* mr = ibv_reg_mr(pd.get(), memory.data(), memory.size(),
                          AtRunTime(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_RELAXED_ORDERING));
  ASSERT_NE(mr, nullptr);
  EXPECT_EQ(ibv_dereg_mr(mr), 0);
}

TEST_F(PdMrTest, RemoteWriteNeedsLocalWrite) {
  std::vector<std::byte> memory(100);
  errno = 0;
  EXPECT_EQ(ibv_reg_mr(pd.get(), memory.data(), memory.size(), int{IBV_ACCESS_REMOTE_WRITE}), nullptr);
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(PdMrTest, MemoryThatIsNotThereCannotBeRegistered) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* memory = mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  munmap(memory, page);
  errno = 0;
  EXPECT_EQ(ibv_reg_mr(pd.get(), memory, page, int{IBV_ACCESS_LOCAL_WRITE}), nullptr);
  EXPECT_EQ(errno, EFAULT);
}

TEST_F(PdMrTest, ReadOnlyMemoryCannotBeRegisteredForWriting) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* memory = mmap(nullptr, page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  errno = 0;
  EXPECT_EQ(ibv_reg_mr(pd.get(), memory, page, int{IBV_ACCESS_LOCAL_WRITE}), nullptr);
  EXPECT_EQ(errno, EFAULT);
  ibv_mr* mr = ibv_reg_mr(pd.get(), memory, page, int{IBV_ACCESS_REMOTE_READ});
  EXPECT_NE(mr, nullptr);
  if (mr != nullptr) {
    EXPECT_EQ(ibv_dereg_mr(mr), 0);
  }
  munmap(memory, page);
}

TEST_F(PdMrTest, ARangeThatWrapsIsRefused) {
  std::byte memory[64];
  errno = 0;
  EXPECT_EQ(ibv_reg_mr(pd.get(), memory, ~size_t{0} - 16, int{IBV_ACCESS_LOCAL_WRITE}), nullptr);
  EXPECT_NE(errno, 0);
}

TEST_F(PdMrTest, KeysOfTwoRegionsDiffer) {
  Buffer one(pd.get(), 64);
  Buffer two(pd.get(), 64);
  EXPECT_NE(one.lkey(), two.lkey());
}

TEST_F(PdMrTest, APdWithARegionIsBusy) {
  Buffer buffer(pd.get(), 64);
  EXPECT_EQ(ibv_dealloc_pd(pd.get()), EBUSY);
  EXPECT_EQ(buffer.Deregister(), 0);
  EXPECT_EQ(pd.Destroy(), 0);
}

TEST_F(PdMrTest, MoreDomainsThanTheLimitAreRefused) {
  ibv_device_attr attributes{};
  ASSERT_EQ(ibv_query_device(context.get(), &attributes), 0);
  std::vector<ibv_pd*> domains;
  for (int i = 0; i <= attributes.max_pd; ++i) {
    ibv_pd* more = ibv_alloc_pd(context.get());
    if (more == nullptr) break;
    domains.push_back(more);
  }
  const int error = errno;
  EXPECT_LE(domains.size(), static_cast<size_t>(attributes.max_pd));
  EXPECT_EQ(error, ENOMEM);
  for (ibv_pd* domain : domains) EXPECT_EQ(ibv_dealloc_pd(domain), 0);
}

class WindowTest : public PdMrTest {
 protected:
  void SetUp() override {
    PdMrTest::SetUp();
    if (IsSkipped()) return;
    ibv_device_attr attributes{};
    ASSERT_EQ(ibv_query_device(context.get(), &attributes), 0);
    if (attributes.max_mw == 0) GTEST_SKIP() << "skipped: the device has no memory windows";
  }
};

TEST_F(WindowTest, AWindowHasAKeyAndKeepsItsDomainBusy) {
  auto window = AllocateMw(pd.get(), IBV_MW_TYPE_2);
  ASSERT_TRUE(window) << window.error().ToString();
  EXPECT_EQ((*window)->pd, pd.get());
  EXPECT_EQ((*window)->context, context.get());
  EXPECT_EQ((*window)->type, IBV_MW_TYPE_2);
  EXPECT_NE((*window)->rkey, 0u);
  EXPECT_EQ(ibv_dealloc_pd(pd.get()), EBUSY);
  EXPECT_EQ(window->Destroy(), 0);
}

}  // namespace
}  // namespace stagecoach::verbs
