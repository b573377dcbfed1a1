#include "emu/backend/tcp/busy_poll.h"

#include <gtest/gtest.h>

namespace stagecoach::emu {
namespace {

constexpr Duration kMost = 80us;

TEST(BusyPoll, ShortSleepsMakeItLongerUpToTheMost) {
  BusyPoll poll(kMost);
  EXPECT_EQ(poll.time(), 0us);
  for (const Duration expected : {10us, 20us, 40us, 80us, 80us}) {
    poll.Slept(kMost, true);
    EXPECT_EQ(poll.time(), expected);
  }
}

TEST(BusyPoll, LongSleepsEndIt) {
  BusyPoll poll(kMost);
  for (int i = 0; i < 4; ++i) poll.Slept(1us, true);
  for (const Duration expected : {40us, 20us, 10us, 0us, 0us}) {
    poll.Slept(kMost + 1us, true);
    EXPECT_EQ(poll.time(), expected);
  }
}

TEST(BusyPoll, RestsWhereItIsInVainThoughSleepsAreShort) {
  BusyPoll poll(kMost);
  for (int i = 0; i < 4 + BusyPoll::kVainPolls; ++i) {
    EXPECT_EQ(poll.time() == 0us, i == 0);
    poll.Slept(1us, true);
  }
  for (int i = 0; i < BusyPoll::kRest; ++i) {
    EXPECT_EQ(poll.time(), 0us);
    poll.Slept(1us, true);
  }
  EXPECT_EQ(poll.time(), 0us);
  poll.Slept(1us, true);
  EXPECT_EQ(poll.time(), 10us);
}

TEST(BusyPoll, GoesOnForAsLongAsItFindsSomethingNowAndThen) {
  BusyPoll poll(kMost);
  for (int i = 0; i < 4; ++i) poll.Slept(1us, true);
  for (int i = 0; i < 100; ++i) {
    for (int in_vain = 0; in_vain < BusyPoll::kVainPolls - 1; ++in_vain) poll.Slept(1us, true);
    poll.Found();
    EXPECT_EQ(poll.time(), kMost);
  }
}

TEST(BusyPoll, RestsWhereSomethingElseEndsTheSleeps) {
  BusyPoll poll(kMost);
  poll.Slept(1us, true);
  EXPECT_EQ(poll.time(), 10us);
  for (int i = 0; i < BusyPoll::kVainPolls; ++i) {
    EXPECT_EQ(poll.time(), 10us);
    poll.Slept(1us, false);
  }
  EXPECT_EQ(poll.time(), 0us);
}

TEST(BusyPoll, DoesNotBeginWhereSomethingElseEndsTheSleeps) {
  BusyPoll poll(kMost);
  for (int i = 0; i < 100; ++i) poll.Slept(1us, false);
  EXPECT_EQ(poll.time(), 0us);
}

TEST(BusyPoll, LongSleepsEndItWhateverEndsThem) {
  BusyPoll poll(kMost);
  poll.Slept(1us, true);
  poll.Slept(kMost + 1us, false);
  EXPECT_EQ(poll.time(), 0us);
}

TEST(BusyPoll, OfNoTimeIsNone) {
  BusyPoll poll(0us);
  for (int i = 0; i < 1000; ++i) {
    poll.Slept(0us, true);
    poll.Slept(1us, true);
    EXPECT_EQ(poll.time(), 0us);
  }
}

}  // namespace
}  // namespace stagecoach::emu
