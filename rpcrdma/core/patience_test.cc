#include "rpcrdma/core/patience.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace stagecoach::rpcrdma {
namespace {

using namespace std::chrono_literals;

constexpr Duration kTime = 30s;
constexpr uint64_t kRate = 1000;  // bytes per second

Instant At(Duration since) {
  return Instant{} + since;
}

TEST(PatienceTest, NobodyWaitsForAPeerThatOwesNothing) {
  Patience patience(kTime, kRate);
  EXPECT_EQ(patience.until(), std::nullopt);
  patience.Moved(5000, At(1s));
  EXPECT_EQ(patience.until(), std::nullopt);
  const auto debt = patience.Owe(At(2s));
  EXPECT_EQ(patience.until(), At(32s));
  patience.Paid(debt, At(3s));
  EXPECT_EQ(patience.until(), std::nullopt);
}

TEST(PatienceTest, ASecondIsWorthASecondsBytes) {
  Patience patience(kTime, kRate);
  static_cast<void>(patience.Owe(At(0s)));
  patience.Moved(0, At(10s));
  EXPECT_EQ(patience.until(), At(30s));
  patience.Moved(1, At(10s));
  EXPECT_EQ(patience.until(), At(30s + 1ms));
  patience.Moved(999, At(10s));
  EXPECT_EQ(patience.until(), At(31s));
}

TEST(PatienceTest, NeverMoreThanTheWholeAllowance) {
  for (const uint64_t bytes : {uint64_t{9999}, uint64_t{10000}, uint64_t{10001}, uint64_t{30000}, uint64_t{1} << 34,
                               uint64_t{1} << 63, std::numeric_limits<uint64_t>::max()}) {
    for (const uint64_t rate : {uint64_t{1}, kRate, std::numeric_limits<uint64_t>::max()}) {
      Patience patience(kTime, rate);
      static_cast<void>(patience.Owe(At(0s)));
      patience.Moved(bytes, At(10s));
      EXPECT_GE(*patience.until(), At(30s)) << bytes << " at " << rate;
      EXPECT_LE(*patience.until(), At(40s)) << bytes << " at " << rate;
      if (rate == kRate) {
        EXPECT_EQ(*patience.until(), bytes == 9999 ? At(40s - 1ms) : At(40s)) << bytes;
      }
    }
  }
}

// As long as it goes on, which is a day here.
TEST(PatienceTest, WhoKeepsToTheRateIsWaitedForForEver) {
  Patience patience(kTime, kRate);
  static_cast<void>(patience.Owe(At(0s)));
  for (Duration now = 20s; now < 24h; now += 20s) {
    ASSERT_LT(At(now), *patience.until());
    patience.Moved(20 * kRate, At(now));
  }
}

TEST(PatienceTest, WhoIsSlowerEndsHoweverOftenBytesMove) {
  for (const Duration step : {Duration(29s), Duration(1s), Duration(10ms)}) {
    Patience patience(kTime, kRate);
    static_cast<void>(patience.Owe(At(0s)));
    Duration now = 0s;
    // Half of what is asked for.
    const auto bytes = static_cast<uint64_t>(step / 1ms) * kRate / 2000;
    while (now < 1h && At(now) < *patience.until()) {
      now += step;
      if (At(now) < *patience.until()) patience.Moved(bytes, At(now));
    }
    EXPECT_LE(now, 2 * kTime + step) << step.count();
  }
}

// Many small ones on a long way: they are owed all the time, and none for long.
TEST(PatienceTest, ARoundIsOverWhenAllOfItHasCome) {
  Patience patience(kTime, kRate);
  std::vector<Patience::Debt> owed{patience.Owe(At(0s)), patience.Owe(At(0s)), patience.Owe(At(0s))};
  EXPECT_EQ(patience.until(), At(30s));
  // The two that came later are not of the round that is open.
  patience.Paid(owed[1], At(10s));
  patience.Paid(owed[2], At(10s));
  EXPECT_EQ(patience.until(), At(30s));
  const auto newer = patience.Owe(At(11s));
  patience.Paid(owed[0], At(12s));
  EXPECT_EQ(patience.until(), At(42s));
  const auto newest = patience.Owe(At(13s));
  patience.Paid(newer, At(14s));
  EXPECT_EQ(patience.until(), At(44s));
  patience.Paid(newest, At(15s));
  EXPECT_EQ(patience.until(), std::nullopt);
}

// Whatever else it pays for meanwhile.
TEST(PatienceTest, WhatIsNeverPaidEndsPatience) {
  Patience patience(kTime, kRate);
  static_cast<void>(patience.Owe(At(0s)));
  for (Duration now = 1s; now < 30s; now += 1s) patience.Paid(patience.Owe(At(now)), At(now));
  EXPECT_EQ(patience.until(), At(30s));
}

TEST(PatienceTest, WithoutARateWhateverMovesIsEnough) {
  Patience patience(kTime, 0);
  static_cast<void>(patience.Owe(At(0s)));
  patience.Moved(1, At(29s));
  EXPECT_EQ(patience.until(), At(59s));
}

TEST(PatienceTest, WithoutATimeItDoesNotEnd) {
  Patience patience(Duration::zero(), kRate);
  const auto debt = patience.Owe(At(0s));
  patience.Moved(1, At(1s));
  EXPECT_EQ(patience.until(), std::nullopt);
  patience.Paid(debt, At(2s));
  EXPECT_EQ(patience.until(), std::nullopt);
}

TEST(PatienceTest, WhatIsForgivenIsOwedNoMore) {
  Patience patience(kTime, kRate);
  static_cast<void>(patience.Owe(At(0s)));
  static_cast<void>(patience.Owe(At(0s)));
  patience.Forgive();
  EXPECT_EQ(patience.until(), std::nullopt);
  static_cast<void>(patience.Owe(At(5s)));
  EXPECT_EQ(patience.until(), At(35s));
}

}  // namespace
}  // namespace stagecoach::rpcrdma
