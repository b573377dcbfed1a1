#include "emu/nic/infiniband/refusals.h"

#include <gtest/gtest.h>

#include <string>

namespace stagecoach::emu {
namespace {

constexpr Instant kStart{Duration(1000s)};

constexpr Refusals::Asked kAsked{.qp_number = 0x010002, .generation = 7};

IpEndpoint Ipv4(int a, int b, int c) {
  return *IpEndpoint::Parse("10." + std::to_string(a) + "." + std::to_string(b) + "." + std::to_string(c), 0);
}

IpEndpoint Ipv6(const std::string& text) {
  return *IpEndpoint::Parse(text, 0);
}

TEST(Refusals, WhoIsWrongSoOftenIsNotListenedToForAWhile) {
  Refusals refusals;
  const Refusals::Source source(kAsked, Ipv4(0, 0, 1), std::nullopt);
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
  const Refusals::Source stranger(kAsked, Ipv4(0, 0, 1), 65534);
  for (int i = 0; i <= Refusals::kAtOnce; ++i) refusals.Count(stranger, kStart);
  EXPECT_TRUE(refusals.IsTooOften(stranger, kStart));
  EXPECT_FALSE(refusals.IsTooOften({kAsked, Ipv4(0, 0, 1), 1000}, kStart));
  EXPECT_FALSE(refusals.IsTooOften({kAsked, Ipv4(0, 0, 1), std::nullopt}, kStart));
  EXPECT_FALSE(refusals.IsTooOften({kAsked, Ipv4(0, 0, 2), 65534}, kStart));
}

TEST(Refusals, WhoIsWrongAboutOneQpDoesNotHaveTheStreamsOfOthersRefused) {
  Refusals refusals;
  for (int i = 0; i <= Refusals::kAtOnce; ++i) refusals.Count({kAsked, Ipv4(0, 0, 1), std::nullopt}, kStart);
  EXPECT_TRUE(refusals.IsTooOften({kAsked, Ipv4(0, 0, 1), std::nullopt}, kStart));
  EXPECT_FALSE(refusals.IsTooOften({{kAsked.qp_number + 1, kAsked.generation}, Ipv4(0, 0, 1), std::nullopt}, kStart));
  EXPECT_FALSE(refusals.IsTooOften({{kAsked.qp_number, kAsked.generation + 1}, Ipv4(0, 0, 1), std::nullopt}, kStart));
}

TEST(Refusals, AHostHasOneSourceWhicheverAddressOfItsNetworkItTakes) {
  Refusals refusals;
  for (int i = 0; i <= Refusals::kAtOnce; ++i) {
    refusals.Count({kAsked, Ipv6("2001:0:0:7::" + std::to_string(i + 1)), std::nullopt}, kStart);
  }
  EXPECT_EQ(refusals.size(), 1u);
  EXPECT_TRUE(refusals.IsTooOften({kAsked, Ipv6("2001:0:0:7:100::"), std::nullopt}, kStart));
  EXPECT_FALSE(refusals.IsTooOften({kAsked, Ipv6("2001:0:0:8:100::"), std::nullopt}, kStart));
}

TEST(Refusals, TheTableIsBoundedAndTheLatestOffendersStay) {
  Refusals refusals;
  const Refusals::Source worst(kAsked, Ipv4(255, 255, 255), std::nullopt);
  for (int i = 0; i <= Refusals::kAtOnce; ++i) refusals.Count(worst, kStart);
  for (uint32_t i = 0; i < 3 * Refusals::kSourcesMax; ++i) {
    refusals.Count({kAsked, Ipv4(0, i >> 8 & 0xff, i & 0xff), std::nullopt}, kStart);
    ASSERT_LE(refusals.size(), Refusals::kSourcesMax);
  }
  EXPECT_TRUE(refusals.IsTooOften(worst, kStart));
  // What is settled goes first.
  refusals.Count({kAsked, Ipv4(1, 0, 0), std::nullopt}, kStart + 3600s);
  EXPECT_EQ(refusals.size(), 1u);
}

}  // namespace
}  // namespace stagecoach::emu
