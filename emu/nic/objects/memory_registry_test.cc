#include "emu/nic/objects/memory_registry.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "base/prng.h"

namespace stagecoach::emu {
namespace {

constexpr uint32_t kPd = 1;
constexpr uint32_t kQp = 17;
constexpr uint32_t kFull = kAccessLocalWrite | kAccessRemoteWrite | kAccessRemoteRead | kAccessWindowBind;

class MemoryRegistryTest : public ::testing::Test {
 protected:
  RegionRequest Request(uint64_t length, uint32_t access = kFull) {
    RegionRequest request;
    request.pd = kPd;
    request.address = memory_.data();
    request.length = length;
    request.iova = 0x10000;
    request.access = access;
    return request;
  }
  MemoryFault PinFault(uint32_t stag, uint64_t offset, uint64_t length, MemoryAccess access, uint32_t pd = kPd,
                       uint32_t qp = kQp) {
    const auto pinned = registry_.Pin(pd, qp, stag, offset, length, access);
    EXPECT_FALSE(pinned.has_value());
    if (pinned) registry_.Unpin(pinned->token);
    return pinned ? MemoryFault::kUnknownStag : pinned.error();
  }
  bool CanPin(uint32_t stag, uint64_t offset, uint64_t length, MemoryAccess access) {
    const auto pinned = registry_.Pin(kPd, kQp, stag, offset, length, access);
    if (pinned) registry_.Unpin(pinned->token);
    return pinned.has_value();
  }
  uint32_t BoundWindow(uint32_t region, uint64_t address, uint64_t length, uint32_t access) {
    const uint32_t window = *registry_.AllocateWindow(kPd);
    const uint32_t rkey = (window & ~0xffu) | ((window + 1) & 0xff);
    EXPECT_EQ(registry_.BindWindow(kPd, kQp, {window, rkey, region, address, length, access}), address - 0x10000);
    return rkey;
  }

  DeviceProfile profile_ = [] {
    DeviceProfile profile;
    profile.stag_quarantine = 64;
    return profile;
  }();
  MemoryRegistry registry_{profile_, SeededStagSource(Prng(1))};
  std::vector<std::byte> memory_{8192};
};

TEST_F(MemoryRegistryTest, PinYieldsTheBytesTheTaggedOffsetNames) {
  const uint32_t stag = *registry_.Register(Request(4096));
  const auto pinned = registry_.Pin(kPd, kQp, stag, 0x10000 + 100, 50, MemoryAccess::kRemoteWrite);
  ASSERT_TRUE(pinned.has_value());
  EXPECT_EQ(pinned->bytes.data(), memory_.data() + 100);
  EXPECT_EQ(pinned->bytes.size(), 50u);
  EXPECT_EQ(pinned->offset, 100u);
  registry_.Unpin(pinned->token);
}

TEST_F(MemoryRegistryTest, APortLooksForReceivesInTheirOwnDomain) {
  const uint32_t of_the_qp = *registry_.Register(Request(64));
  RegionRequest request = Request(64);
  request.pd = kPd + 1;
  const uint32_t of_the_queue = *registry_.Register(request);
  RegistryPort port(registry_, kPd, kPd + 1, kQp);
  EXPECT_TRUE(port.Pin(of_the_queue, 0x10000, 64, MemoryAccess::kReceive).has_value());
  EXPECT_EQ(port.Pin(of_the_qp, 0x10000, 64, MemoryAccess::kReceive).error(), MemoryFault::kForeignStag);
  for (const MemoryAccess access : {MemoryAccess::kLocalRead, MemoryAccess::kLocalWrite, MemoryAccess::kReadSink,
                                    MemoryAccess::kRemoteRead, MemoryAccess::kRemoteWrite}) {
    EXPECT_TRUE(port.Pin(of_the_qp, 0x10000, 64, access).has_value());
    EXPECT_EQ(port.Pin(of_the_queue, 0x10000, 64, access).error(), MemoryFault::kForeignStag);
  }
}

TEST_F(MemoryRegistryTest, PinOfAWindowCountsItsOffsetFromTheWindow) {
  const uint32_t region = *registry_.Register(Request(4096));
  const uint32_t rkey = BoundWindow(region, 0x10000 + 1000, 100, kAccessRemoteRead);
  RegistryPort port(registry_, kPd, kPd, kQp);
  const auto pin = port.Pin(rkey, 0x10000 + 1030, 70, MemoryAccess::kRemoteRead);
  ASSERT_TRUE(pin.has_value());
  EXPECT_EQ(pin->bytes().data(), memory_.data() + 1030);
  EXPECT_EQ(pin->offset(), 30u);
}

TEST_F(MemoryRegistryTest, RangeIsCheckedAtBothEndsAndAgainstWrapping) {
  const uint32_t stag = *registry_.Register(Request(4096));
  const auto access = MemoryAccess::kRemoteRead;
  EXPECT_TRUE(CanPin(stag, 0x10000, 4096, access));
  EXPECT_TRUE(CanPin(stag, 0x10000 + 4096, 0, access));
  EXPECT_EQ(PinFault(stag, 0x10000 - 1, 1, access), MemoryFault::kOutOfRange);
  EXPECT_EQ(PinFault(stag, 0x10000, 4097, access), MemoryFault::kOutOfRange);
  EXPECT_EQ(PinFault(stag, 0x10000 + 4096, 1, access), MemoryFault::kOutOfRange);
  EXPECT_EQ(PinFault(stag, 0x10000 + 1, UINT64_MAX, access), MemoryFault::kOutOfRange);
  EXPECT_EQ(PinFault(stag, UINT64_MAX, 2, access), MemoryFault::kOutOfRange);
}

TEST_F(MemoryRegistryTest, RangeMayEndAtTheTopOfTheOffsetSpace) {
  RegionRequest request = Request(16);
  request.iova = UINT64_MAX - 16;
  const uint32_t stag = *registry_.Register(request);
  EXPECT_TRUE(CanPin(stag, UINT64_MAX - 16, 16, MemoryAccess::kRemoteRead));
  EXPECT_EQ(PinFault(stag, UINT64_MAX - 1, 2, MemoryAccess::kRemoteRead), MemoryFault::kOutOfRange);
  request.iova = UINT64_MAX - 15;
  EXPECT_EQ(registry_.Register(request), Err(EINVAL));
}

TEST_F(MemoryRegistryTest, EachAccessNeedsItsRight) {
  const uint32_t bare = *registry_.Register(Request(64, 0));
  EXPECT_TRUE(CanPin(bare, 0x10000, 64, MemoryAccess::kLocalRead));
  EXPECT_EQ(PinFault(bare, 0x10000, 64, MemoryAccess::kLocalWrite), MemoryFault::kNoPermission);
  EXPECT_EQ(PinFault(bare, 0x10000, 64, MemoryAccess::kRemoteRead), MemoryFault::kNoPermission);
  EXPECT_EQ(PinFault(bare, 0x10000, 64, MemoryAccess::kRemoteWrite), MemoryFault::kNoPermission);
}

TEST_F(MemoryRegistryTest, TheSinkOfAReadIsWrittenByThisEndAndByThePeer) {
  const uint32_t local = *registry_.Register(Request(64, kAccessLocalWrite));
  const uint32_t both = *registry_.Register(Request(64, kAccessLocalWrite | kAccessRemoteWrite));
  EXPECT_EQ(PinFault(local, 0x10000, 64, MemoryAccess::kReadSink), MemoryFault::kNoPermission);
  EXPECT_TRUE(CanPin(both, 0x10000, 64, MemoryAccess::kReadSink));
}

TEST_F(MemoryRegistryTest, AnotherProtectionDomainIsForeign) {
  const uint32_t stag = *registry_.Register(Request(64));
  EXPECT_EQ(PinFault(stag, 0x10000, 64, MemoryAccess::kRemoteRead, kPd + 1), MemoryFault::kForeignStag);
}

TEST_F(MemoryRegistryTest, NeverIssuedIsUnknownAndNoLongerValidIsStale) {
  const uint32_t stag = *registry_.Register(Request(64));
  EXPECT_EQ(PinFault(stag ^ 0x55, 0x10000, 1, MemoryAccess::kRemoteRead), MemoryFault::kStaleStag);
  EXPECT_EQ(PinFault(0, 0x10000, 1, MemoryAccess::kRemoteRead), MemoryFault::kUnknownStag);
  EXPECT_EQ(PinFault(stag ^ 0x8000'0000, 0x10000, 1, MemoryAccess::kRemoteRead), MemoryFault::kUnknownStag);
  EXPECT_EQ(registry_.Deregister(stag), 0);
  EXPECT_EQ(PinFault(stag, 0x10000, 1, MemoryAccess::kRemoteRead), MemoryFault::kStaleStag);
  EXPECT_EQ(registry_.Deregister(stag), EINVAL);
  EXPECT_EQ(registry_.counters().stale_uses, 2u);
}

TEST_F(MemoryRegistryTest, FreedIndexIsNotUsedAgainBeforeItsQuarantineIsOver) {
  std::vector<uint32_t> freed;
  std::set<uint32_t> recent;
  bool reused = false;
  for (int i = 0; i < 1000; ++i) {
    const uint32_t stag = *registry_.Register(Request(64));
    EXPECT_EQ(recent.count(StagIndex(stag)), 0u) << "round " << i;
    for (uint32_t old : freed) {
      if (StagIndex(old) != StagIndex(stag)) continue;
      reused = true;
    }
    ASSERT_EQ(registry_.Deregister(stag), 0);
    freed.push_back(stag);
    recent.insert(StagIndex(stag));
    if (freed.size() > profile_.stag_quarantine)
      recent.erase(StagIndex(freed[freed.size() - 1 - profile_.stag_quarantine]));
  }
  EXPECT_TRUE(reused) << "the table must not grow for ever";
}

TEST_F(MemoryRegistryTest, StagsOfOneSourceRepeatAndOfAnotherDiffer) {
  MemoryRegistry same(profile_, SeededStagSource(Prng(1)));
  MemoryRegistry other(profile_, SeededStagSource(Prng(2)));
  const uint32_t stag = *registry_.Register(Request(64));
  EXPECT_EQ(*same.Register(Request(64)), stag);
  EXPECT_NE(*other.Register(Request(64)), stag);
}

TEST_F(MemoryRegistryTest, SystemSourceScattersIndices) {
  MemoryRegistry registry(profile_, SystemStagSource());
  std::set<uint32_t> stags;
  uint32_t adjacent = 0;
  uint32_t previous = 0;
  for (int i = 0; i < 500; ++i) {
    const uint32_t stag = *registry.Register(Request(64));
    adjacent += StagIndex(stag) - StagIndex(previous) == 1;
    previous = stag;
    stags.insert(stag);
  }
  EXPECT_EQ(stags.size(), 500u);
  EXPECT_LT(adjacent, 5u);
}

TEST_F(MemoryRegistryTest, ZeroLengthRegionIsAllowedAndHoldsNothing) {
  RegionRequest request = Request(0);
  request.address = nullptr;
  const uint32_t stag = *registry_.Register(request);
  EXPECT_TRUE(CanPin(stag, 0x10000, 0, MemoryAccess::kRemoteWrite));
  EXPECT_EQ(PinFault(stag, 0x10000, 1, MemoryAccess::kRemoteWrite), MemoryFault::kOutOfRange);
}

TEST_F(MemoryRegistryTest, RightsThatExcludeEachOtherAreRefused) {
  EXPECT_EQ(registry_.Register(Request(64, kAccessRemoteWrite)), Err(EINVAL));
  EXPECT_EQ(registry_.Register(Request(64, 1u << 30)), Err(EINVAL));
}

TEST_F(MemoryRegistryTest, PagesMustBeThereAndWritableWhenLocalWriteAsksForIt) {
  const size_t page = 4096;
  auto* const base =
      static_cast<std::byte*>(mmap(nullptr, 3 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(base, MAP_FAILED);
  ASSERT_EQ(munmap(base + page, page), 0);
  ASSERT_EQ(mprotect(base + 2 * page, page, PROT_READ), 0);
  RegionRequest request = Request(page);
  request.address = base;
  EXPECT_TRUE(registry_.Register(request).has_value());
  request.length = page + 1;
  EXPECT_EQ(registry_.Register(request), Err(EFAULT));
  request.address = base + 2 * page;
  request.length = page;
  EXPECT_EQ(registry_.Register(request), Err(EFAULT));
  request.access = kAccessRemoteRead;
  EXPECT_TRUE(registry_.Register(request).has_value());
  ASSERT_EQ(mprotect(base, page, PROT_NONE), 0);
  request.address = base;
  request.access = 0;
  EXPECT_EQ(registry_.Register(request), Err(EFAULT));
  request.address = reinterpret_cast<void*>(uintptr_t{1} << 62);
  EXPECT_EQ(registry_.Register(request), Err(EFAULT));
  munmap(base, page);
  munmap(base + 2 * page, page);
}

TEST_F(MemoryRegistryTest, ProbingChangesNoByte) {
  for (size_t i = 0; i < memory_.size(); ++i) memory_[i] = static_cast<std::byte>(i * 7);
  const std::vector<std::byte> before = memory_;
  ASSERT_TRUE(registry_.Register(Request(memory_.size())).has_value());
  EXPECT_EQ(memory_, before);
}

TEST_F(MemoryRegistryTest, LimitOfRegionsIsEnforced) {
  DeviceProfile small = profile_;
  small.max_mr = 3;
  MemoryRegistry registry(small, SeededStagSource(Prng(1)));
  const uint32_t first = *registry.Register(Request(64));
  ASSERT_TRUE(registry.Register(Request(64)).has_value());
  ASSERT_TRUE(registry.Register(Request(64)).has_value());
  EXPECT_EQ(registry.Register(Request(64)), Err(ENOMEM));
  ASSERT_EQ(registry.Deregister(first), 0);
  EXPECT_TRUE(registry.Register(Request(64)).has_value());
}

TEST_F(MemoryRegistryTest, PlainRegionRefusesRemoteInvalidation) {
  const uint32_t stag = *registry_.Register(Request(64));
  EXPECT_EQ(registry_.InvalidateRemotely(kPd, kQp, stag).error(), MemoryFault::kNoPermission);
  EXPECT_EQ(registry_.InvalidateLocally(kPd, kQp, stag).error(), MemoryFault::kNoPermission);
  EXPECT_TRUE(CanPin(stag, 0x10000, 64, MemoryAccess::kRemoteRead));
}

TEST_F(MemoryRegistryTest, WindowOpensItsPartOfTheRegionToItsQpAlone) {
  const uint32_t region = *registry_.Register(Request(4096));
  const uint32_t rkey = BoundWindow(region, 0x10000 + 1000, 100, kAccessRemoteRead);
  EXPECT_TRUE(CanPin(rkey, 0x10000 + 1000, 100, MemoryAccess::kRemoteRead));
  EXPECT_EQ(PinFault(rkey, 0x10000 + 999, 1, MemoryAccess::kRemoteRead), MemoryFault::kOutOfRange);
  EXPECT_EQ(PinFault(rkey, 0x10000 + 1000, 101, MemoryAccess::kRemoteRead), MemoryFault::kOutOfRange);
  EXPECT_EQ(PinFault(rkey, 0x10000 + 1000, 1, MemoryAccess::kRemoteWrite), MemoryFault::kNoPermission);
  EXPECT_EQ(PinFault(rkey, 0x10000 + 1000, 1, MemoryAccess::kLocalRead), MemoryFault::kNoPermission);
  EXPECT_EQ(PinFault(rkey, 0x10000 + 1000, 1, MemoryAccess::kRemoteRead, kPd, kQp + 1), MemoryFault::kForeignStag);
}

TEST_F(MemoryRegistryTest, InvalidatedWindowIsStaleAndMayBeBoundAgainUnderAnotherKey) {
  const uint32_t region = *registry_.Register(Request(4096));
  const uint32_t rkey = BoundWindow(region, 0x10000, 100, kAccessRemoteRead);
  EXPECT_EQ(registry_.InvalidateRemotely(kPd, kQp + 1, rkey).error(), MemoryFault::kForeignStag);
  EXPECT_EQ(registry_.InvalidateRemotely(kPd + 1, kQp, rkey).error(), MemoryFault::kForeignStag);
  ASSERT_TRUE(registry_.InvalidateRemotely(kPd, kQp, rkey).has_value());
  EXPECT_EQ(PinFault(rkey, 0x10000, 1, MemoryAccess::kRemoteRead), MemoryFault::kStaleStag);
  EXPECT_EQ(registry_.InvalidateRemotely(kPd, kQp, rkey).error(), MemoryFault::kStaleStag);
  const uint32_t next = (rkey & ~0xffu) | ((rkey + 1) & 0xff);
  ASSERT_TRUE(registry_.BindWindow(kPd, kQp, {rkey, next, region, 0x10000, 50, kAccessRemoteWrite}));
  EXPECT_TRUE(CanPin(next, 0x10000, 50, MemoryAccess::kRemoteWrite));
  EXPECT_EQ(PinFault(rkey, 0x10000, 1, MemoryAccess::kRemoteWrite), MemoryFault::kStaleStag);
}

TEST_F(MemoryRegistryTest, BindingIsRefusedWhereItWouldGrantTooMuch) {
  const uint32_t region = *registry_.Register(Request(4096));
  const uint32_t unbindable = *registry_.Register(Request(4096, kAccessLocalWrite | kAccessRemoteRead));
  const uint32_t read_only = *registry_.Register(Request(4096, kAccessWindowBind));
  const uint32_t window = *registry_.AllocateWindow(kPd);
  EXPECT_FALSE(registry_.BindWindow(kPd, kQp, {window, window, unbindable, 0x10000, 10, kAccessRemoteRead}));
  EXPECT_FALSE(registry_.BindWindow(kPd, kQp, {window, window, read_only, 0x10000, 10, kAccessRemoteWrite}));
  EXPECT_FALSE(registry_.BindWindow(kPd, kQp, {window, window, region, 0x10000, 4097, kAccessRemoteRead}));
  EXPECT_FALSE(registry_.BindWindow(kPd, kQp, {window, window, region, 0x10000 - 1, 10, kAccessRemoteRead}));
  EXPECT_FALSE(registry_.BindWindow(kPd, kQp, {window, window, region, 0x10000, 0, kAccessRemoteRead}));
  EXPECT_FALSE(registry_.BindWindow(kPd + 1, kQp, {window, window, region, 0x10000, 10, kAccessRemoteRead}));
  EXPECT_FALSE(registry_.BindWindow(kPd, kQp, {window, window, region ^ 1, 0x10000, 10, kAccessRemoteRead}));
  EXPECT_FALSE(registry_.BindWindow(kPd, kQp, {region, region, region, 0x10000, 10, kAccessRemoteRead}));
  EXPECT_TRUE(registry_.BindWindow(kPd, kQp, {window, window, region, 0x10000, 10, kAccessRemoteRead}));
  EXPECT_FALSE(registry_.BindWindow(kPd, kQp, {window, window, region, 0x10000, 10, kAccessRemoteRead})) << "bound";
}

TEST_F(MemoryRegistryTest, ABindChangesTheKeyOfAWindowAndNeverItsIndex) {
  const uint32_t region = *registry_.Register(Request(4096, kFull));
  const uint32_t window = *registry_.AllocateWindow(kPd);
  const uint32_t index = window & ~0xffu;
  for (const uint32_t asked : {0x00u, 0xffu, region, ~index}) {
    const WindowBinding binding{window, asked, region, 0x10000, 10, kAccessRemoteRead};
    EXPECT_EQ(binding.BoundRkey(), index | (asked & 0xff));
    ASSERT_TRUE(registry_.BindWindow(kPd, kQp, binding));
    EXPECT_TRUE(CanPin(binding.BoundRkey(), 0x10000, 10, MemoryAccess::kRemoteRead)) << asked;
    ASSERT_TRUE(registry_.InvalidateLocally(kPd, kQp, binding.BoundRkey()));
  }
}

TEST_F(MemoryRegistryTest, LocalWriteAmongTheRightsOfAWindowIsNoRight) {
  const uint32_t read_only = *registry_.Register(Request(4096, kAccessWindowBind));
  const uint32_t rkey = BoundWindow(read_only, 0x10000, 10, kAccessRemoteRead | kAccessLocalWrite);
  EXPECT_TRUE(CanPin(rkey, 0x10000, 10, MemoryAccess::kRemoteRead));
  EXPECT_EQ(PinFault(rkey, 0x10000, 10, MemoryAccess::kLocalWrite), MemoryFault::kNoPermission);
  EXPECT_EQ(PinFault(rkey, 0x10000, 10, MemoryAccess::kRemoteWrite), MemoryFault::kNoPermission);
}

TEST_F(MemoryRegistryTest, RegionStaysWhileAWindowIsBoundToIt) {
  const uint32_t region = *registry_.Register(Request(4096));
  const uint32_t first = BoundWindow(region, 0x10000, 10, kAccessRemoteRead);
  const uint32_t second = BoundWindow(region, 0x10000, 10, kAccessRemoteRead);
  const uint32_t third = BoundWindow(region, 0x10000, 10, kAccessRemoteRead);
  EXPECT_EQ(registry_.Deregister(region), EBUSY);
  ASSERT_TRUE(registry_.InvalidateLocally(kPd, kQp, first).has_value());
  EXPECT_EQ(registry_.Deregister(region), EBUSY);
  ASSERT_EQ(registry_.DeallocateWindow(second), 0);
  EXPECT_EQ(registry_.Deregister(region), EBUSY);
  registry_.UnbindWindowsOf(kQp);
  EXPECT_EQ(PinFault(third, 0x10000, 1, MemoryAccess::kRemoteRead), MemoryFault::kStaleStag);
  EXPECT_EQ(registry_.Deregister(region), 0);
}

// Any sequence of operations agrees with a map that remembers every STag ever made.
TEST_F(MemoryRegistryTest, RandomOperationsAgreeWithAModel) {
  struct Known {
    bool live = true;
    uint64_t length = 0;
    uint32_t access = 0;
    uint32_t pd = 0;
  };
  std::map<uint32_t, Known> model;  // latest meaning of each STag
  std::vector<uint32_t> live;
  Prng prng(99);
  for (int step = 0; step < 20000; ++step) {
    const uint64_t dice = prng.Below(10);
    if (dice < 2 || live.empty()) {
      RegionRequest request = Request(prng.Below(memory_.size() + 1), kAccessLocalWrite);
      if (prng.OneIn(2)) request.access |= kAccessRemoteRead;
      if (prng.OneIn(2)) request.access |= kAccessRemoteWrite;
      request.pd = static_cast<uint32_t>(prng.Between(1, 2));
      const uint32_t stag = *registry_.Register(request);
      ASSERT_FALSE(model.count(stag) != 0 && model[stag].live);
      model[stag] = {true, request.length, request.access, request.pd};
      live.push_back(stag);
    } else if (dice < 4) {
      const size_t at = prng.Below(live.size());
      ASSERT_EQ(registry_.Deregister(live[at]), 0);
      model[live[at]].live = false;
      live.erase(live.begin() + static_cast<ptrdiff_t>(at));
    } else {
      auto it = model.begin();
      std::advance(it, prng.Below(model.size()));
      const auto& [stag, known] = *it;
      const uint64_t offset = 0x10000 + prng.Below(memory_.size() + 2) - prng.Below(2);
      const uint64_t length = prng.Below(memory_.size() + 2);
      const auto access = static_cast<MemoryAccess>(prng.Below(6));
      const bool granted = access == MemoryAccess::kLocalRead || access == MemoryAccess::kLocalWrite ||
                           access == MemoryAccess::kReceive ||
                           (access == MemoryAccess::kReadSink && (known.access & kAccessRemoteWrite) != 0) ||
                           (access == MemoryAccess::kRemoteRead && (known.access & kAccessRemoteRead) != 0) ||
                           (access == MemoryAccess::kRemoteWrite && (known.access & kAccessRemoteWrite) != 0);
      const bool inside = offset >= 0x10000 && offset - 0x10000 + length <= known.length;
      const auto pinned = registry_.Pin(kPd, kQp, stag, offset, length, access);
      if (!known.live) {
        ASSERT_EQ(pinned.error(), MemoryFault::kStaleStag);
      } else if (known.pd != kPd) {
        ASSERT_EQ(pinned.error(), MemoryFault::kForeignStag);
      } else if (!granted) {
        ASSERT_EQ(pinned.error(), MemoryFault::kNoPermission);
      } else if (!inside) {
        ASSERT_EQ(pinned.error(), MemoryFault::kOutOfRange);
      } else {
        ASSERT_TRUE(pinned.has_value());
        ASSERT_EQ(pinned->bytes.data(), memory_.data() + (offset - 0x10000));
        registry_.Unpin(pinned->token);
      }
    }
  }
}

// A pin excludes the end of its region: bytes written under a pin are never written after Deregister has returned.
TEST_F(MemoryRegistryTest, AtomicsReturnWhatStoodThereAndNeedTheirOwnRight) {
  const uint32_t stag = *registry_.Register(Request(64, kAccessLocalWrite | kAccessRemoteAtomic));
  const uint32_t plain = *registry_.Register(Request(64));
  RegistryPort port(registry_, kPd, kPd, kQp);
  RegistryPort elsewhere(registry_, kPd + 1, kPd + 1, kQp);
  auto* words = reinterpret_cast<uint64_t*>(memory_.data());
  words[1] = 40;
  EXPECT_EQ(port.Atomic(stag, 0x10008, AtomicOp::kFetchAdd, 2, 0)->original, 40u);
  EXPECT_EQ(words[1], 42u);
  EXPECT_EQ(port.Atomic(stag, 0x10008, AtomicOp::kCompareSwap, 7, 41)->original, 42u);
  EXPECT_EQ(words[1], 42u);
  EXPECT_EQ(port.Atomic(stag, 0x10008, AtomicOp::kCompareSwap, 7, 42)->original, 42u);
  EXPECT_EQ(words[1], 7u);
  EXPECT_EQ(port.Atomic(stag, 0x10008, AtomicOp::kFetchAdd, UINT64_MAX, 0)->original, 7u);  // wraps: minus one
  EXPECT_EQ(words[1], 6u);
  EXPECT_EQ(port.Atomic(stag, 0x10010, AtomicOp::kFetchAdd, 0, 0)->offset, 16u);
  const auto fault = [](const Result<AtomicOutcome, MemoryFault>& result) {
    EXPECT_FALSE(result.has_value());
    return result.has_value() ? MemoryFault::kUnknownStag : result.error();
  };
  EXPECT_EQ(fault(port.Atomic(plain, 0x10008, AtomicOp::kFetchAdd, 1, 0)), MemoryFault::kNoPermission);
  EXPECT_EQ(fault(port.Atomic(stag, 0x10040, AtomicOp::kFetchAdd, 1, 0)), MemoryFault::kOutOfRange);
  EXPECT_EQ(fault(port.Atomic(stag ^ 1, 0x10008, AtomicOp::kFetchAdd, 1, 0)), MemoryFault::kStaleStag);
  EXPECT_EQ(fault(elsewhere.Atomic(stag, 0x10008, AtomicOp::kFetchAdd, 1, 0)), MemoryFault::kForeignStag);
  EXPECT_EQ(words[1], 6u);
  EXPECT_EQ(registry_.Deregister(stag), 0);  // no pin was left
}

TEST_F(MemoryRegistryTest, AtomicsNeedBothTheirOffsetAndTheirMemoryAligned) {
  RegistryPort port(registry_, kPd, kPd, kQp);
  RegionRequest request = Request(64, kAccessLocalWrite | kAccessRemoteAtomic);
  const uint32_t stag = *registry_.Register(request);
  for (uint64_t offset = 1; offset < 8; ++offset) {
    EXPECT_EQ(port.Atomic(stag, 0x10000 + offset, AtomicOp::kFetchAdd, 1, 0).error(), MemoryFault::kMisaligned);
  }
  // An iova that is aligned although the memory is not.
  request.address = memory_.data() + 4;
  const uint32_t shifted = *registry_.Register(request);
  EXPECT_EQ(port.Atomic(shifted, 0x10000, AtomicOp::kFetchAdd, 1, 0).error(), MemoryFault::kMisaligned);
}

TEST_F(MemoryRegistryTest, AtomicsOfSeveralThreadsLoseNothing) {
  const uint32_t stag = *registry_.Register(Request(8, kAccessLocalWrite | kAccessRemoteAtomic));
  constexpr int kEach = 10000;
  const auto add = [&] {
    RegistryPort port(registry_, kPd, kPd, kQp);
    for (int i = 0; i < kEach; ++i) ASSERT_TRUE(port.Atomic(stag, 0x10000, AtomicOp::kFetchAdd, 1, 0).has_value());
  };
  std::thread first(add), second(add);
  // The program's own atomics take part.
  std::atomic_ref<uint64_t> word(*reinterpret_cast<uint64_t*>(memory_.data()));
  for (int i = 0; i < kEach; ++i) word.fetch_add(1);
  first.join();
  second.join();
  EXPECT_EQ(word.load(), uint64_t{3} * kEach);
}

TEST_F(MemoryRegistryTest, AGuardIsAnotherOnceMemoryThatWasPinnedMayNotBeUsed) {
  RegistryPort port(registry_, kPd, kPd, kQp);
  const auto guard_of = [&](uint32_t stag) { return port.Pin(stag, 0x10000, 10, MemoryAccess::kRemoteRead)->guard(); };
  const auto is_unchanged = [](const MemoryGuard& guard) { return *guard.word == guard.value; };
  const uint32_t region = *registry_.Register(Request(4096));
  const uint32_t window = BoundWindow(region, 0x10000, 10, kAccessRemoteRead);
  const MemoryGuard of_region = guard_of(region);
  const MemoryGuard of_window = guard_of(window);
  EXPECT_TRUE(is_unchanged(of_region) && is_unchanged(of_window));
  EXPECT_EQ(guard_of(region).value, of_region.value) << "as long as it may";
  ASSERT_TRUE(port.InvalidateRemotely(window));
  EXPECT_FALSE(is_unchanged(of_window));
  EXPECT_TRUE(is_unchanged(of_region));
  ASSERT_EQ(registry_.Reregister(region, {.pd = {}, .range = {}, .access = kFull & ~kAccessRemoteWrite}), region);
  EXPECT_FALSE(is_unchanged(of_region)) << "though the key is the same";
  const MemoryGuard after = guard_of(region);
  EXPECT_TRUE(is_unchanged(after));
  ASSERT_EQ(registry_.Deregister(region), 0);
  EXPECT_FALSE(is_unchanged(after));
}

// Also that of who pins while it is under way.
TEST_F(MemoryRegistryTest, AGuardIsAnotherBeforeADeregistrationReturns) {
  struct Taken {
    std::atomic<const std::atomic<uint64_t>*> word{nullptr};
    std::atomic<uint64_t> value{0};
  } taken;
  std::atomic<uint32_t> stag{*registry_.Register(Request(64))};
  std::atomic<bool> over{false};
  std::thread pinning([&] {
    RegistryPort port(registry_, kPd, kPd, kQp);
    while (!over) {
      const auto pin = port.Pin(stag, 0x10000, 10, MemoryAccess::kRemoteRead);
      if (!pin || pin->guard().word == nullptr) continue;
      // Pinned, so that nobody has returned yet.
      taken.word = nullptr;
      taken.value = pin->guard().value;
      taken.word = pin->guard().word;
    }
  });
  while (taken.word == nullptr) std::this_thread::yield();
  for (int round = 0; round < 2000; ++round) {
    ASSERT_EQ(registry_.Deregister(stag), 0);
    const std::atomic<uint64_t>* const word = taken.word;
    EXPECT_NE(*word, taken.value);
    stag = *registry_.Register(Request(64));
  }
  over = true;
  pinning.join();
}

TEST_F(MemoryRegistryTest, DeregistrationWaitsForPinsOnOtherThreads) {
  std::atomic<uint32_t> stag{*registry_.Register(Request(64))};
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> written{0};
  std::vector<std::thread> writers;
  for (int t = 0; t < 2; ++t) {
    writers.emplace_back([&, t] {
      while (!stop.load()) {
        const auto pinned =
            registry_.Pin(kPd, kQp, stag.load(), 0x10000 + static_cast<uint64_t>(t) * 8, 8, MemoryAccess::kRemoteWrite);
        if (!pinned) {
          std::this_thread::yield();
          continue;
        }
        for (std::byte& byte : pinned->bytes) byte = std::byte{0xaa};
        registry_.Unpin(pinned->token);
        written.fetch_add(1);
      }
    });
  }
  for (int round = 0; round < 2000; ++round) {
    ASSERT_EQ(registry_.Deregister(stag.load()), 0);
    // Unsynchronised on purpose: the sanitizer reports a writer that is still at it.
    std::fill_n(memory_.begin(), 64, std::byte{0});
    stag.store(*registry_.Register(Request(64)));
  }
  while (written.load() == 0) std::this_thread::yield();
  stop.store(true);
  for (std::thread& writer : writers) writer.join();
}

// --- Windows of type 1 ---

class Type1WindowTest : public MemoryRegistryTest {
 protected:
  // Binds under the next key and returns it.
  std::optional<uint32_t> Bind(uint64_t address, uint64_t length, uint32_t access = kAccessRemoteRead) {
    const uint32_t rkey = (rkey_ & ~0xffu) | ((rkey_ + 1) & 0xff);
    WindowBinding binding{rkey_, rkey, region_, address, length, access, WindowType::kType1};
    if (!registry_.BindWindow(kPd, kQp, binding)) return std::nullopt;
    return rkey_ = rkey;
  }
  uint32_t region_ = *registry_.Register(Request(4096));
  uint32_t rkey_ = *registry_.AllocateWindow(kPd, WindowType::kType1);
};

TEST_F(Type1WindowTest, AnyQpOfTheDomainUsesItAndNoOther) {
  const uint32_t rkey = *Bind(0x10000, 100);
  const auto pinned = registry_.Pin(kPd, kQp + 1, rkey, 0x10000, 100, MemoryAccess::kRemoteRead);
  ASSERT_TRUE(pinned.has_value());
  registry_.Unpin(pinned->token);
  EXPECT_EQ(PinFault(rkey, 0x10000, 1, MemoryAccess::kRemoteRead, kPd + 1), MemoryFault::kForeignStag);
}

TEST_F(Type1WindowTest, IsBoundAgainWithoutInvalidation) {
  const uint32_t first = *Bind(0x10000, 100);
  const uint32_t second = *Bind(0x10000 + 100, 100);
  EXPECT_EQ(PinFault(first, 0x10000, 1, MemoryAccess::kRemoteRead), MemoryFault::kStaleStag);
  EXPECT_TRUE(CanPin(second, 0x10000 + 100, 100, MemoryAccess::kRemoteRead));
  EXPECT_EQ(registry_.Deregister(region_), EBUSY);
}

TEST_F(Type1WindowTest, LengthZeroEndsTheBinding) {
  *Bind(0x10000, 100);
  const uint32_t rkey = *Bind(0, 0);
  EXPECT_EQ(PinFault(rkey, 0x10000, 0, MemoryAccess::kRemoteRead), MemoryFault::kStaleStag);
  EXPECT_EQ(registry_.Deregister(region_), 0);
}

TEST_F(Type1WindowTest, AFailedBindLeavesTheOldBinding) {
  const uint32_t rkey = *Bind(0x10000, 100);
  EXPECT_FALSE(Bind(0x10000, 4097));
  EXPECT_FALSE(Bind(0x10000, 100, kAccessRemoteRead | kAccessZeroBased));
  EXPECT_TRUE(CanPin(rkey, 0x10000, 100, MemoryAccess::kRemoteRead));
}

TEST_F(Type1WindowTest, IsNeitherInvalidatedNorTakenForType2) {
  const uint32_t rkey = *Bind(0x10000, 100);
  EXPECT_EQ(registry_.InvalidateLocally(kPd, kQp, rkey), Err(MemoryFault::kNoPermission));
  EXPECT_EQ(registry_.InvalidateRemotely(kPd, kQp, rkey), Err(MemoryFault::kNoPermission));
  EXPECT_FALSE(registry_.BindWindow(kPd, kQp, {rkey, rkey ^ 1, region_, 0x10000, 10, kAccessRemoteRead}));
  registry_.UnbindWindowsOf(kQp);
  EXPECT_TRUE(CanPin(rkey, 0x10000, 100, MemoryAccess::kRemoteRead)) << "it does not belong to the QP that bound it";
}

TEST_F(Type1WindowTest, FreedWhileBoundItLetsTheRegionGo) {
  *Bind(0x10000, 100);
  EXPECT_EQ(registry_.DeallocateWindow(rkey_), 0);
  EXPECT_EQ(registry_.Deregister(region_), 0);
}

// --- Regions that change ---

TEST_F(MemoryRegistryTest, ARegionWithOtherRightsOrOfAnotherDomainKeepsItsKey) {
  const uint32_t stag = *registry_.Register(Request(4096, kAccessLocalWrite));
  EXPECT_EQ(registry_.Reregister(stag, {.pd = {}, .range = {}, .access = kFull}), stag);
  EXPECT_TRUE(CanPin(stag, 0x10000, 4096, MemoryAccess::kRemoteWrite)) << "its iova is what it was";
  EXPECT_EQ(registry_.Reregister(stag, {.pd = kPd, .range = {}, .access = {}}), stag);
  EXPECT_TRUE(CanPin(stag, 0x10000, 4096, MemoryAccess::kRemoteWrite));
  EXPECT_EQ(registry_.Deregister(stag), 0);
}

TEST_F(MemoryRegistryTest, ARegionThatMovesHasAnotherKeyAndTheOldOneIsStale) {
  const uint32_t before = *registry_.Register(Request(4096, kAccessLocalWrite));
  const RegionChange::Range range{Request(4096).address, 4096};
  const uint32_t after = *registry_.Reregister(before, {.pd = {}, .range = range, .access = {}});
  EXPECT_EQ(StagIndex(after), StagIndex(before));
  EXPECT_NE(after, before);
  EXPECT_EQ(PinFault(before, 0x10000, 1, MemoryAccess::kLocalRead), MemoryFault::kStaleStag);
  EXPECT_EQ(registry_.Reregister(before, {}), Err(EINVAL));
  EXPECT_EQ(registry_.counters().regions, 1u);
  EXPECT_EQ(registry_.Deregister(after), 0);
}

TEST_F(MemoryRegistryTest, AMovedRegionIsAddressedByWhereItIs) {
  const uint32_t before = *registry_.Register(Request(4096));
  const uint32_t after = *registry_.Reregister(
      before, {.pd = kPd + 1, .range = RegionChange::Range{memory_.data() + 4096, 100}, .access = {}});
  const uint64_t address = reinterpret_cast<uintptr_t>(memory_.data()) + 4096;
  const auto pinned = registry_.Pin(kPd + 1, kQp, after, address, 100, MemoryAccess::kRemoteWrite);
  ASSERT_TRUE(pinned.has_value());
  EXPECT_EQ(pinned->bytes.data(), memory_.data() + 4096);
  registry_.Unpin(pinned->token);
  EXPECT_EQ(PinFault(after, address, 1, MemoryAccess::kRemoteWrite), MemoryFault::kForeignStag);
}

TEST_F(MemoryRegistryTest, ZeroBasedIsARightLikeAnyOtherToChange) {
  uint32_t stag = *registry_.Register(Request(4096));
  stag = *registry_.Reregister(stag, {.pd = {}, .range = {}, .access = kFull | kAccessZeroBased});
  EXPECT_TRUE(CanPin(stag, 0, 4096, MemoryAccess::kRemoteRead));
  stag = *registry_.Reregister(stag, {.pd = {}, .range = {}, .access = kFull});
  EXPECT_TRUE(CanPin(stag, reinterpret_cast<uintptr_t>(memory_.data()), 4096, MemoryAccess::kRemoteRead));
}

TEST_F(MemoryRegistryTest, ARefusedChangeLeavesTheRegionAsItWas) {
  const uint32_t stag = *registry_.Register(Request(4096));
  EXPECT_EQ(registry_.Reregister(stag, {.pd = {}, .range = {}, .access = kAccessRemoteWrite}), Err(EINVAL));
  EXPECT_EQ(registry_.Reregister(stag, {.pd = {}, .range = {}, .access = 1u << 30}), Err(EINVAL));
  const RegionChange::Range nowhere{reinterpret_cast<void*>(uintptr_t{4096}), 4096};
  EXPECT_EQ(registry_.Reregister(stag, {.pd = {}, .range = nowhere, .access = {}}), Err(EFAULT));
  const uint32_t window = BoundWindow(stag, 0x10000, 10, kAccessRemoteRead);
  EXPECT_EQ(registry_.Reregister(stag, {.pd = {}, .range = {}, .access = kFull}), Err(EBUSY));
  EXPECT_TRUE(CanPin(stag, 0x10000, 4096, MemoryAccess::kRemoteWrite));
  EXPECT_TRUE(CanPin(window, 0x10000, 10, MemoryAccess::kRemoteRead));
}

// Whoever has a pin sees one state of the region or the other, never a mixture: base and length belong together.
TEST_F(MemoryRegistryTest, AccessesRacingWithAChangeSeeTheRegionBeforeOrAfterIt) {
  std::atomic<uint32_t> stag{*registry_.Register(Request(4096))};
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      while (!stop.load()) {
        const uint32_t now = stag.load();
        for (const uint64_t half : {0, 4096}) {
          const uint64_t address = reinterpret_cast<uintptr_t>(memory_.data()) + half;
          const auto pinned = registry_.Pin(kPd, kQp, now, address, 4096, MemoryAccess::kRemoteWrite);
          if (!pinned) continue;
          EXPECT_EQ(pinned->bytes.data(), memory_.data() + half);
          registry_.Unpin(pinned->token);
        }
      }
    });
  }
  for (int i = 0; i < 2000; ++i) {
    const RegionChange::Range half{memory_.data() + (i % 2) * 4096, 4096};
    const auto changed = registry_.Reregister(stag.load(), {.pd = {}, .range = half, .access = {}});
    ASSERT_TRUE(changed.has_value());
    stag.store(*changed);
  }
  stop.store(true);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace stagecoach::emu
