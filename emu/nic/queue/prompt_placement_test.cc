// Writes, seen from the memory they go to, on a link that cuts them anywhere, or by lists of whole records: the last
// word comes last, and whole.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "emu/nic/nic_test_support.h"
#include "emu/nic/roce_test_support.h"

namespace stagecoach::emu {
namespace {

constexpr std::byte kNew{0x5a};

LinkOptions Chopped() {
  LinkOptions link;
  link.chop = true;
  return link;
}

// So that somebody looks after each record, even where all have come at once.
DeviceProfile OneRecordInATurn(DeviceProfile profile) {
  profile.receive_budget_records = 1;
  return profile;
}

// How wide the last word is of memory that ends here.
size_t LastWord(ConstBytes memory) {
  const uintptr_t end = reinterpret_cast<uintptr_t>(memory.data()) + memory.size();
  for (const size_t width : {8, 4, 2}) {
    if (end % width == 0 && memory.size() >= width) return width;
  }
  return 1;
}

size_t CountNew(ConstBytes bytes) {
  return static_cast<size_t>(std::count(bytes.begin(), bytes.end(), kNew));
}

// Writes `size` bytes and looks at the target after each event of the world. How often it was incomplete.
size_t ExpectLastWordLast(SimWorld& world, TestHost& from, TestHost& to, size_t size) {
  SCOPED_TRACE(std::to_string(size) + " bytes");
  const TestBuffer source = from.Register(size, kFullAccess, static_cast<uint8_t>(kNew));
  const TestBuffer target = to.Register(size);
  const ConstBytes memory(target.bytes);
  const size_t width = LastWord(memory);
  size_t seen_incomplete = 0;
  const auto look = [&] {
    const size_t of_word = CountNew(memory.last(width));
    EXPECT_TRUE(of_word == 0 || CountNew(memory) == size) << of_word << " bytes of the last word too early";
    if (of_word == 0 && CountNew(memory) > 0) ++seen_incomplete;
    return of_word == width;
  };
  EXPECT_EQ(from.Send(1, {source.All()}, PostOpcode::kWrite, target.region.stag, target.address()), 0);
  EXPECT_TRUE(world.RunUntil(look));
  return seen_incomplete;
}

constexpr size_t kSizes[] = {1, 2, 3, 4, 7, 8, 9, 12, 16, 31, 40, 64, 500, 3000, 4004, 20000};

class PromptPlacementTest : public testing::TestWithParam<bool> {};

TEST_P(PromptPlacementTest, OfAnIwarpWrite) {
  size_t incomplete = 0;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SimPair pair(Chopped(), seed);
    TestHost a(pair.fabric_a, "a");
    TestHost b(pair.fabric_b, "b", OneRecordInATurn(IwarpProfile()));
    pair.Join(a, b, {.crc = GetParam()});
    for (const size_t size : kSizes) incomplete += ExpectLastWordLast(pair.world, a, b, size);
  }
  EXPECT_GT(incomplete, 0u) << "it was never seen half done";
}

TEST_P(PromptPlacementTest, OfAnInfinibandWrite) {
  size_t incomplete = 0;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SimPair pair(Chopped(), seed);
    DeviceProfile profile = RoceProfile();
    profile.want_crc = GetParam();
    TestHost a(pair.fabric_a, "a", profile);
    TestHost b(pair.fabric_b, "b", OneRecordInATurn(profile));
    ReadyFor(*a.qp, *b.qp, *IpEndpoint::Parse("10.0.0.2", 0));
    ReadyFor(*b.qp, *a.qp, *IpEndpoint::Parse("10.0.0.1", 0));
    for (const size_t size : kSizes) incomplete += ExpectLastWordLast(pair.world, a, b, size);
  }
  EXPECT_GT(incomplete, 0u) << "it was never seen half done";
}

INSTANTIATE_TEST_SUITE_P(Crc, PromptPlacementTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "on" : "off"; });

}  // namespace
}  // namespace stagecoach::emu
