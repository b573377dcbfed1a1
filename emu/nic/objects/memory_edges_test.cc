// The outer edges of the numbers that name memory: iovas, tagged offsets and lengths of regions and windows, against
// arithmetic that cannot wrap.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/prng.h"
#include "emu/nic/objects/memory_registry.h"

namespace stagecoach::emu {
namespace {

using Wide = unsigned __int128;

constexpr uint32_t kPd = 1;
constexpr uint32_t kQp = 17;
constexpr uint32_t kFull = kAccessLocalWrite | kAccessRemoteWrite | kAccessRemoteRead | kAccessWindowBind;
constexpr uint64_t kSize = 4096;

// Whether [at, at + length) lies in [begin, begin + size), all numbers as large as they are.
bool LiesWithin(uint64_t at, uint64_t length, uint64_t begin, uint64_t size) {
  return Wide{at} >= Wide{begin} && Wide{at} + length <= Wide{begin} + size;
}

struct Range {
  uint64_t at = 0;
  uint64_t length = 0;
};

// At, across and beyond both ends of [begin, begin + size) and of all numbers of 64 bits, those among them of which
// beginning and length add up to a number within when they wrap.
std::vector<Range> RangesAround(uint64_t begin, uint64_t size) {
  std::vector<Range> ranges;
  const std::vector<uint64_t> points = {0,
                                        1,
                                        begin - 1,
                                        begin,
                                        begin + 1,
                                        begin + size - 1,
                                        begin + size,
                                        begin + size + 1,
                                        uint64_t{INT64_MAX},
                                        uint64_t{INT64_MAX} + 1,
                                        UINT64_MAX - 1,
                                        UINT64_MAX};
  const std::vector<uint64_t> lengths = {0,
                                         1,
                                         size - 1,
                                         size,
                                         size + 1,
                                         uint64_t{UINT32_MAX},
                                         uint64_t{UINT32_MAX} + 1,
                                         uint64_t{INT64_MAX},
                                         uint64_t{INT64_MAX} + 1,
                                         UINT64_MAX - 1,
                                         UINT64_MAX};
  for (const uint64_t at : points) {
    for (const uint64_t length : lengths) ranges.push_back({at, length});
    // Those that end at one of the points, where they may have to wrap for it.
    for (const uint64_t end : points) ranges.push_back({at, end - at});
  }
  return ranges;
}

class MemoryEdgesTest : public ::testing::Test {
 protected:
  Result<uint32_t, int> Register(uint64_t iova, uint64_t length = kSize, uint32_t access = kFull) {
    RegionRequest request;
    request.pd = kPd;
    request.address = memory_.data();
    request.length = length;
    request.iova = iova;
    request.access = access;
    return registry_.Register(request);
  }
  // The bytes that the range names, if it may be used. Asks for all kinds of access, which agree.
  std::optional<MutableBytes> Pinned(uint32_t stag, const Range& range, bool local = true) {
    std::optional<MutableBytes> bytes;
    bool first = true;
    for (const MemoryAccess access : {MemoryAccess::kRemoteRead, MemoryAccess::kRemoteWrite, MemoryAccess::kLocalRead,
                                      MemoryAccess::kLocalWrite, MemoryAccess::kReceive, MemoryAccess::kReadSink}) {
      if (!local && access != MemoryAccess::kRemoteRead && access != MemoryAccess::kRemoteWrite) continue;
      const auto pinned = registry_.Pin(kPd, kQp, stag, range.at, range.length, access);
      EXPECT_TRUE(first || pinned.has_value() == bytes.has_value());
      first = false;
      if (!pinned) {
        EXPECT_EQ(pinned.error(), MemoryFault::kOutOfRange);
        continue;
      }
      bytes = pinned->bytes;
      registry_.Unpin(pinned->token);
    }
    return bytes;
  }
  // Asks for ranges all around, and expects those within, and no others, to be there and where they belong.
  void ExpectReaches(uint32_t stag, uint64_t begin, uint64_t size, const std::byte* base, bool local) {
    for (const Range& range : RangesAround(begin, size)) {
      SCOPED_TRACE(testing::Message() << range.at << " + " << range.length << " of " << begin << " + " << size);
      const auto bytes = Pinned(stag, range, local);
      ASSERT_EQ(bytes.has_value(), LiesWithin(range.at, range.length, begin, size));
      if (!bytes) continue;
      EXPECT_EQ(bytes->data(), base + (range.at - begin));
      EXPECT_EQ(bytes->size(), range.length);
    }
  }

  const DeviceProfile profile_{};
  MemoryRegistry registry_{profile_, SeededStagSource(Prng(1))};
  std::vector<std::byte> memory_{kSize};
};

constexpr uint64_t kIovas[] = {0,
                               1,
                               0x10000,
                               uint64_t{UINT32_MAX},
                               uint64_t{INT64_MAX} - kSize / 2,
                               uint64_t{INT64_MAX} + 1,
                               UINT64_MAX - kSize - 1,
                               UINT64_MAX - kSize};

TEST_F(MemoryEdgesTest, ARegionReachesFromItsFirstByteToItsLast) {
  for (const uint64_t iova : kIovas) {
    const auto stag = Register(iova);
    ASSERT_TRUE(stag.has_value()) << iova;
    ExpectReaches(*stag, iova, kSize, memory_.data(), /*local=*/true);
    EXPECT_EQ(registry_.Deregister(*stag), 0);
  }
}

TEST_F(MemoryEdgesTest, ARegionWhoseOffsetsWrapIsNone) {
  for (uint64_t beyond = 1; beyond <= kSize; beyond += 1365) {
    EXPECT_EQ(Register(UINT64_MAX - kSize + beyond), Err(EINVAL)) << beyond;
  }
  EXPECT_EQ(Register(UINT64_MAX), Err(EINVAL));
}

TEST_F(MemoryEdgesTest, ARegionIsAsLongAsTheDeviceAllows) {
  DeviceProfile small;
  small.max_mr_size = kSize - 1;
  MemoryRegistry registry(small, SeededStagSource(Prng(1)));
  for (const uint64_t length : {kSize - 2, kSize - 1, kSize, uint64_t{INT64_MAX}, UINT64_MAX - 1, UINT64_MAX}) {
    RegionRequest request;
    request.address = memory_.data();
    request.length = length;
    request.access = kFull | kAccessZeroBased;
    EXPECT_EQ(registry.Register(request).has_value(), length < kSize) << length;
  }
}

TEST_F(MemoryEdgesTest, MemoryThatWrapsIsNone) {
  for (const uint64_t address : {UINT64_MAX, UINT64_MAX - 1, uint64_t{0} - kSize, uint64_t{0} - kSize + 1}) {
    RegionRequest request;
    request.address = reinterpret_cast<void*>(address);
    request.length = kSize;
    request.access = kFull | kAccessZeroBased;
    const auto refused = registry_.Register(request);
    ASSERT_FALSE(refused.has_value());
    // What does not wrap is merely not there; nothing has its last byte at the end of all.
    EXPECT_EQ(refused.error(), Wide{address} + kSize <= UINT64_MAX ? EFAULT : EINVAL) << address;
  }
}

TEST_F(MemoryEdgesTest, AZeroBasedRegionReachesFromZero) {
  const uint32_t stag = *Register(UINT64_MAX, kSize, kFull | kAccessZeroBased);
  ExpectReaches(stag, 0, kSize, memory_.data(), /*local=*/true);
}

class WindowEdgesTest : public MemoryEdgesTest, public ::testing::WithParamInterface<WindowType> {
 protected:
  // Binds another window of the region; empty if that is refused.
  std::optional<uint32_t> Bind(uint32_t region, const Range& range, uint32_t access) {
    const uint32_t window = *registry_.AllocateWindow(kPd, GetParam());
    const WindowBinding binding{window, window ^ 1, region, range.at, range.length, access, GetParam()};
    if (registry_.BindWindow(kPd, kQp, binding)) return binding.BoundRkey();
    EXPECT_EQ(registry_.DeallocateWindow(window), 0);
    return std::nullopt;
  }
};

TEST_P(WindowEdgesTest, AWindowLiesWithinItsRegionAndReachesNoFurther) {
  const bool type2 = GetParam() == WindowType::kType2;
  for (const uint64_t iova : kIovas) {
    const uint32_t region = *Register(iova);
    for (const Range& range : RangesAround(iova, kSize)) {
      if (range.length == 0) continue;  // no window, or the end of one
      SCOPED_TRACE(testing::Message() << range.at << " + " << range.length << " of " << iova);
      const auto rkey = Bind(region, range, kAccessRemoteRead | kAccessRemoteWrite);
      ASSERT_EQ(rkey.has_value(), LiesWithin(range.at, range.length, iova, kSize));
      if (!rkey) continue;
      ExpectReaches(*rkey, range.at, range.length, memory_.data() + (range.at - iova), /*local=*/false);
      EXPECT_EQ(registry_.DeallocateWindow(*rkey), 0);
      if (!type2) continue;
      const auto from_zero = Bind(region, range, kAccessRemoteRead | kAccessRemoteWrite | kAccessZeroBased);
      ASSERT_TRUE(from_zero.has_value());
      ExpectReaches(*from_zero, 0, range.length, memory_.data() + (range.at - iova), /*local=*/false);
      EXPECT_EQ(registry_.DeallocateWindow(*from_zero), 0);
    }
    EXPECT_EQ(registry_.Deregister(region), 0) << "a window that was refused holds nothing";
  }
}

INSTANTIATE_TEST_SUITE_P(Types, WindowEdgesTest, ::testing::Values(WindowType::kType1, WindowType::kType2),
                         [](const auto& info) { return info.param == WindowType::kType1 ? "type1" : "type2"; });

TEST_F(MemoryEdgesTest, NoAtomicReachesBesideItsRegion) {
  constexpr uint64_t kWords = 16;
  RegistryPort port(registry_, kPd, kPd, kQp);
  for (const uint64_t iova : {uint64_t{0}, uint64_t{0x10000}, UINT64_MAX - 7 - kWords, UINT64_MAX - 15 - kWords}) {
    const uint32_t stag = *Register(iova, kWords, kAccessLocalWrite | kAccessRemoteAtomic);
    for (const Range& range : RangesAround(iova, kWords)) {
      SCOPED_TRACE(testing::Message() << range.at << " of " << iova);
      const auto outcome = port.Atomic(stag, range.at, AtomicOp::kFetchAdd, 1, 0);
      ASSERT_EQ(outcome.has_value(), range.at % 8 == 0 && LiesWithin(range.at, 8, iova, kWords));
      if (!outcome) continue;
      EXPECT_EQ(outcome->offset, range.at - iova);
    }
    EXPECT_EQ(registry_.Deregister(stag), 0);
  }
}

// Keys have 8 bits: each of them but the current one is stale.
TEST_F(MemoryEdgesTest, OneKeyOfAllIsTheCurrentOne) {
  const uint32_t stag = *Register(0);
  for (uint32_t key = 0; key <= 0xff; ++key) {
    const uint32_t asked = (stag & ~0xffu) | key;
    const auto pinned = registry_.Pin(kPd, kQp, asked, 0, 1, MemoryAccess::kRemoteRead);
    ASSERT_EQ(pinned.has_value(), asked == stag);
    if (pinned) registry_.Unpin(pinned->token);
  }
}

// What a peer may name: each index but that of the region is unknown, the outermost among them.
TEST_F(MemoryEdgesTest, OneIndexOfAllIsTheRegions) {
  const uint32_t stag = *Register(0);
  for (const uint32_t index : {0u, 1u, StagIndex(stag) - 1, StagIndex(stag) + 1, 0x7fffffu, 0x800000u, 0xfffffeu,
                               0xffffffu, StagIndex(stag) ^ 0x800000u}) {
    if (index == StagIndex(stag)) continue;
    const auto pinned = registry_.Pin(kPd, kQp, index << 8 | StagKey(stag), 0, 1, MemoryAccess::kRemoteRead);
    ASSERT_FALSE(pinned.has_value());
    EXPECT_EQ(pinned.error(), MemoryFault::kUnknownStag);
  }
}

}  // namespace
}  // namespace stagecoach::emu
