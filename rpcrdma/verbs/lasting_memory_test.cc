// Memory that is registered once with a protection domain: how often, with which rights, and until when.
#include "rpcrdma/verbs/lasting_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cerrno>
#include <optional>

#include "verbs_shim/cxx/handles.h"

namespace stagecoach::rpcrdma::internal {
namespace {

TEST(LastingMemoryTest, ContainsWhatLiesInItToTheLastByte) {
  std::vector<std::byte> bytes(100);
  const ConstBytes all(bytes);
  const LastingMemory memory(all.subspan(10, 80), true, nullptr);
  EXPECT_TRUE(memory.Contains(all.subspan(10, 80)));
  EXPECT_TRUE(memory.Contains(all.subspan(10, 1)));
  EXPECT_TRUE(memory.Contains(all.subspan(89, 1)));
  EXPECT_FALSE(memory.Contains(all.subspan(9, 1)));
  EXPECT_FALSE(memory.Contains(all.subspan(9, 2)));
  EXPECT_FALSE(memory.Contains(all.subspan(89, 2)));
  EXPECT_FALSE(memory.Contains(all.subspan(90, 1)));
  EXPECT_FALSE(memory.Contains(all));
  // Nowhere, and beyond the end of all memory.
  EXPECT_TRUE(memory.Contains(ConstBytes()));
  EXPECT_TRUE(memory.Contains(all.subspan(100, 0)));
  EXPECT_FALSE(memory.Contains(ConstBytes(bytes.data() + 20, SIZE_MAX)));
  const LastingMemory none(ConstBytes(), true, nullptr);
  EXPECT_FALSE(none.Contains(all.first(1)));
}

class DomainRegionsTest : public ::testing::Test {
 protected:
  struct Domain {
    verbs::ProtectionDomain domain;
    DomainRegions regions;
  };

  void SetUp() override {
    auto context = verbs::OpenDevice();
    ASSERT_TRUE(context.has_value()) << context.error().ToString();
    context_ = std::move(*context);
    Open(one_, /*bindable=*/true);
    Open(two_, /*bindable=*/false);
  }
  void Open(Domain& domain, bool bindable) {
    auto allocated = verbs::AllocatePd(context_.get());
    ASSERT_TRUE(allocated.has_value()) << allocated.error().ToString();
    domain.domain = std::move(*allocated);
    domain.regions.Open(domain.domain.get(), bindable);
  }

  verbs::Context context_;
  Domain one_, two_;
  std::vector<std::byte> bytes_ = std::vector<std::byte>(10000);
};

TEST_F(DomainRegionsTest, MemoryIsRegisteredOnceInEachDomain) {
  LastingMemory memory(bytes_, true, nullptr);
  const DomainRegions::Found found = one_.regions.Find(memory);
  ASSERT_NE(found.region, nullptr);
  EXPECT_TRUE(found.first);
  EXPECT_EQ(found.region->addr, bytes_.data());
  EXPECT_EQ(found.region->length, bytes_.size());
  EXPECT_EQ(found.region->pd, one_.domain.get());
  const DomainRegions::Found again = one_.regions.Find(memory);
  EXPECT_EQ(again.region, found.region);
  EXPECT_FALSE(again.first);
  const DomainRegions::Found elsewhere = two_.regions.Find(memory);
  ASSERT_NE(elsewhere.region, nullptr);
  EXPECT_TRUE(elsewhere.first);
  EXPECT_EQ(elsewhere.region->pd, two_.domain.get());
  LastingMemory other(ConstBytes(bytes_).first(100), true, nullptr);
  EXPECT_NE(one_.regions.Find(other).region, found.region);
  EXPECT_EQ(one_.regions.size(), 2u);
  EXPECT_EQ(two_.regions.size(), 1u);
}

TEST_F(DomainRegionsTest, MemoryThatGoesIsDeregisteredBeforeItsOwnerIsLetGo) {
  int errors = -1;
  // A domain refuses to go while something is registered in it.
  std::shared_ptr<const void> owner(&errors, [&](const void*) { errors = one_.domain.Destroy(); });
  std::optional<LastingMemory> memory(std::in_place, bytes_, true, std::move(owner));
  ASSERT_NE(one_.regions.Find(*memory).region, nullptr);
  ASSERT_NE(two_.regions.Find(*memory).region, nullptr);
  EXPECT_EQ(one_.domain.Destroy(), EBUSY);
  memory.reset();
  EXPECT_EQ(errors, 0);
  EXPECT_EQ(one_.regions.size(), 0u);
  EXPECT_EQ(two_.domain.Destroy(), 0);
}

TEST_F(DomainRegionsTest, DomainThatClosesLeavesTheMemoryToOthers) {
  std::optional<LastingMemory> memory(std::in_place, bytes_, true, nullptr);
  LastingMemory longer(ConstBytes(bytes_).first(5000), false, nullptr);
  ASSERT_NE(one_.regions.Find(*memory).region, nullptr);
  ASSERT_NE(one_.regions.Find(longer).region, nullptr);
  ASSERT_NE(two_.regions.Find(*memory).region, nullptr);
  one_.regions.Close();
  EXPECT_EQ(one_.regions.size(), 0u);
  EXPECT_EQ(one_.domain.Destroy(), 0);
  EXPECT_EQ(one_.regions.Find(longer).region, nullptr) << "a domain that is gone";
  EXPECT_FALSE(two_.regions.Find(*memory).first);
  memory.reset();
  EXPECT_EQ(two_.domain.Destroy(), 0);
}

TEST_F(DomainRegionsTest, DeviceThatRefusedIsNotAskedAgain) {
  void* const page = mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(page, MAP_FAILED);
  const ConstBytes bytes(static_cast<const std::byte*>(page), 4096);
  {
    // Windows that admit writes need a region that does; these pages do not.
    LastingMemory writable(bytes, true, nullptr);
    const DomainRegions::Found refused = one_.regions.Find(writable);
    EXPECT_EQ(refused.region, nullptr);
    EXPECT_TRUE(refused.first);
    EXPECT_EQ(refused.error, EFAULT);
    const DomainRegions::Found again = one_.regions.Find(writable);
    EXPECT_EQ(again.region, nullptr);
    EXPECT_FALSE(again.first);
    EXPECT_EQ(one_.regions.size(), 0u);
    // To be read they are good enough, and a domain without windows needs no more.
    LastingMemory read_only(bytes, false, nullptr);
    EXPECT_NE(one_.regions.Find(read_only).region, nullptr);
    EXPECT_NE(two_.regions.Find(writable).region, nullptr);
  }
  EXPECT_EQ(one_.domain.Destroy(), 0);
  EXPECT_EQ(two_.domain.Destroy(), 0);
  munmap(page, 4096);
}

}  // namespace
}  // namespace stagecoach::rpcrdma::internal
