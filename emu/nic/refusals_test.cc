#include "emu/nic/refusals.h"

#include <gtest/gtest.h>

namespace stagecoach::emu {
namespace {

constexpr Instant kStart{Duration(1000s)};

wire::Gid Ipv4(uint8_t a, uint8_t b, uint8_t c) {
  return {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, a, b, c};
}

TEST(Refusals, WhoIsWrongSoOftenIsNotListenedToForAWhile) {
  Refusals refusals;
  const Refusals::Source source(Ipv4(0, 0, 1), std::nullopt);
  for (int i = 0; i < Refusals::kAtOnce; ++i) {
    EXPECT_FALSE(refusals.IsTooOften(source, kStart)) << i;
    refusals.Count(source, kStart);
  }
  EXPECT_TRUE(refusals.IsTooOften(source, kStart));
  EXPECT_TRUE(refusals.IsTooOften(source, kStart + Refusals::kForEach - 1ns));
  // One more may be wrong then, and no second one.
  const Instant later = kStart + Refusals::kForEach;
  EXPECT_FALSE(refusals.IsTooOften(source, later));
  refusals.Count(source, later);
  EXPECT_TRUE(refusals.IsTooOften(source, later));
  EXPECT_FALSE(refusals.IsTooOften(source, later + Refusals::kForEach * Refusals::kAtOnce));
}

TEST(Refusals, OneUserOfAHostDoesNotHaveAnotherRefused) {
  Refusals refusals;
  const Refusals::Source stranger(Ipv4(0, 0, 1), 65534);
  for (int i = 0; i <= Refusals::kAtOnce; ++i) refusals.Count(stranger, kStart);
  EXPECT_TRUE(refusals.IsTooOften(stranger, kStart));
  EXPECT_FALSE(refusals.IsTooOften({Ipv4(0, 0, 1), 1000}, kStart));
  EXPECT_FALSE(refusals.IsTooOften({Ipv4(0, 0, 1), std::nullopt}, kStart));
  EXPECT_FALSE(refusals.IsTooOften({Ipv4(0, 0, 2), 65534}, kStart));
}

TEST(Refusals, AHostHasOneSourceWhicheverAddressOfItsNetworkItTakes) {
  Refusals refusals;
  for (int i = 0; i <= Refusals::kAtOnce; ++i) {
    refusals.Count({{0x20, 1, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, static_cast<uint8_t>(i)}, std::nullopt}, kStart);
  }
  EXPECT_EQ(refusals.size(), 1u);
  EXPECT_TRUE(refusals.IsTooOften({{0x20, 1, 0, 0, 0, 0, 0, 7, 1}, std::nullopt}, kStart));
  EXPECT_FALSE(refusals.IsTooOften({{0x20, 1, 0, 0, 0, 0, 0, 8, 1}, std::nullopt}, kStart));
}

TEST(Refusals, TheTableIsBoundedAndTheLatestOffendersStay) {
  Refusals refusals;
  const Refusals::Source worst(Ipv4(255, 255, 255), std::nullopt);
  for (int i = 0; i <= Refusals::kAtOnce; ++i) refusals.Count(worst, kStart);
  for (uint32_t i = 0; i < 3 * Refusals::kSourcesMax; ++i) {
    refusals.Count({Ipv4(0, static_cast<uint8_t>(i >> 8), static_cast<uint8_t>(i)), std::nullopt}, kStart);
    ASSERT_LE(refusals.size(), Refusals::kSourcesMax);
  }
  EXPECT_TRUE(refusals.IsTooOften(worst, kStart));
  // What is settled goes first.
  refusals.Count({Ipv4(1, 0, 0), std::nullopt}, kStart + 3600s);
  EXPECT_EQ(refusals.size(), 1u);
}

}  // namespace
}  // namespace stagecoach::emu
