#include "scenarios/runner/guarded_memory.h"

#include <gtest/gtest.h>

#include "scenarios/runner/model.h"

namespace stagecoach::scenario {
namespace {

TEST(GuardedBuffer, GuardsNoticeAByteOnEitherSide) {
  for (const bool before : {true, false}) {
    GuardedBuffer buffer(10);
    MutableBytes bytes = buffer.bytes();
    ASSERT_EQ(bytes.size(), 10u);
    bytes[0] = bytes[9] = std::byte{1};
    EXPECT_TRUE(buffer.GuardsIntact());
    *(before ? bytes.data() - 1 : bytes.data() + 10) = std::byte{1};
    EXPECT_FALSE(buffer.GuardsIntact());
  }
}

TEST(ColdStorage, NoticesAWriteToMemoryThatIsOver) {
  Violations violations;
  ColdStorage cold(&violations);
  GuardedBuffer buffer(100);
  std::byte* inside = buffer.bytes().data() + 50;
  cold.Keep(std::move(buffer), "call 7's result", Instant(5us));
  cold.CheckAll(Instant(6us));
  EXPECT_TRUE(violations.empty());
  *inside = std::byte{1};
  cold.CheckAll(Instant(7us));
  ASSERT_EQ(violations.list().size(), 1u);
  EXPECT_EQ(violations.list()[0].rule, "memory.cold");
  EXPECT_NE(violations.list()[0].text.find("call 7's result"), std::string::npos);
}

TEST(ColdStorage, LooksAtWhatItLetsGo) {
  Violations violations;
  ColdStorage cold(&violations);
  GuardedBuffer first(1 << 20);
  std::byte* inside = first.bytes().data();
  cold.Keep(std::move(first), "the first", Instant());
  *inside = std::byte{1};
  for (int i = 0; i < 8; ++i) cold.Keep(GuardedBuffer(1 << 20), "another", Instant());
  EXPECT_EQ(violations.list().size(), 1u);
}

TEST(Pattern, BelongsToOneCallOneDatumAndOnePlace) {
  std::vector<std::byte> bytes(1001);
  FillPattern(5, Datum::kArgument, bytes);
  EXPECT_EQ(MatchPattern(5, Datum::kArgument, bytes), bytes.size());
  EXPECT_LT(MatchPattern(6, Datum::kArgument, bytes), 2u);
  EXPECT_LT(MatchPattern(5, Datum::kResult, bytes), 2u);
  EXPECT_LT(MatchPattern(5, Datum::kArgument, ConstBytes(bytes).subspan(8)), 2u);
  bytes[777] ^= std::byte{1};
  EXPECT_EQ(MatchPattern(5, Datum::kArgument, bytes), 777u);
}

TEST(GuardedBuffer, KnowsFromWhereOnItWasNotTouched) {
  GuardedBuffer buffer(100);
  EXPECT_TRUE(buffer.Untouched());
  buffer.bytes()[9] = std::byte{1};
  EXPECT_FALSE(buffer.Untouched());
  EXPECT_FALSE(buffer.Untouched(9));
  EXPECT_TRUE(buffer.Untouched(10));
  EXPECT_TRUE(buffer.Untouched(100));
  buffer.bytes()[99] = std::byte{1};
  EXPECT_FALSE(buffer.Untouched(99));
  EXPECT_TRUE(GuardedBuffer().Untouched());
}

}  // namespace
}  // namespace stagecoach::scenario
