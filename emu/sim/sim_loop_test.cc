#include "emu/sim/sim_loop.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>

#include <cerrno>

#include "emu/sim/sim_world.h"

namespace stagecoach::emu {
namespace {

constexpr Instant kStart{};

IpEndpoint Address(const char* text) {
  return *IpEndpoint::Parse(text, 0);
}

void Drain(SimLoop& loop) {
  while (loop.Step()) {
  }
}

TEST(SimLoop, EventsRunInOrderOfTimeAndThenOfRegistration) {
  SimLoop loop;
  std::string order;
  loop.At(kStart + 2us, [&] { order += 'd'; });
  loop.At(kStart + 1us, [&] { order += 'b'; });
  loop.Post([&] { order += 'a'; });
  loop.At(kStart + 1us, [&] {
    order += 'c';
    loop.Post([&] { order += "c'"; });
  });
  Drain(loop);
  EXPECT_EQ(order, "abcc'd");
  EXPECT_EQ(loop.Now(), kStart + 2us);
}

TEST(SimLoop, TheClockStandsStillDuringACallbackAndThePastIsNow) {
  SimLoop loop;
  Instant seen{};
  loop.At(kStart + 5us, [&] { loop.At(kStart, [&] { seen = loop.Now(); }); });
  Drain(loop);
  EXPECT_EQ(seen, kStart + 5us);
}

TEST(SimLoop, ACancelledTimerDoesNotRun) {
  SimLoop loop;
  bool ran = false;
  const auto timer = loop.At(kStart + 1us, [&] { ran = true; });
  loop.At(kStart, [&] { loop.Cancel(timer); });
  loop.Cancel(12345);
  Drain(loop);
  EXPECT_FALSE(ran);
}

TEST(SimLoop, StepStopsAtItsLimitWithoutMovingTheClock) {
  SimLoop loop;
  bool ran = false;
  loop.At(kStart + 10us, [&] { ran = true; });
  EXPECT_FALSE(loop.Step(kStart + 9us));
  EXPECT_EQ(loop.Now(), kStart);
  loop.AdvanceTo(kStart + 1s);
  EXPECT_EQ(loop.Now(), kStart + 10us) << "not beyond what is due";
  EXPECT_TRUE(loop.Step(kStart + 10us));
  EXPECT_TRUE(ran);
}

TEST(SimLoop, AWatchedNotifierIsReportedOncePerTurnUntilDrained) {
  SimWorld world(1);
  SimFabric& host = world.AddHost("a", {Address("10.0.0.1")});
  const auto notifier = host.CreateNotifier();
  int calls = 0;
  const auto watch = world.loop().WatchReadable(notifier->fd(), [&] {
    ++calls;
    EXPECT_TRUE(notifier->Consume());
  });
  ASSERT_NE(watch, 0u);
  notifier->Signal();
  notifier->Signal();
  EXPECT_EQ(calls, 0) << "not inside the call that signals";
  EXPECT_TRUE(world.RunUntilIdle());
  EXPECT_EQ(calls, 2);
  world.loop().Unwatch(watch);
  notifier->Signal();
  EXPECT_TRUE(world.RunUntilIdle());
  EXPECT_EQ(calls, 2);
}

TEST(SimLoop, ADescriptorThatTheProgramDrainedItselfIsNotReported) {
  SimWorld world(1);
  SimFabric& host = world.AddHost("a", {Address("10.0.0.1")});
  const auto notifier = host.CreateNotifier();
  int calls = 0;
  world.loop().WatchReadable(notifier->fd(), [&] { ++calls; });
  notifier->Signal();
  eventfd_t value;
  ASSERT_EQ(eventfd_read(notifier->fd(), &value), 0);
  EXPECT_TRUE(world.RunUntilIdle());
  EXPECT_EQ(calls, 0);
}

TEST(SimLoop, AWatchSetOnAReadableNotifierFiresAndOneOnAStrangerIsRefused) {
  SimWorld world(1);
  SimFabric& host = world.AddHost("a", {Address("10.0.0.1")});
  auto notifier = host.CreateNotifier();
  notifier->Signal();
  int calls = 0;
  world.loop().WatchReadable(notifier->fd(), [&] {
    ++calls;
    notifier.reset();  // and the callback outlives what it watches
    ++calls;
  });
  EXPECT_TRUE(world.RunUntilIdle());
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(world.loop().WatchReadable(0, [] {}), 0u);
  EXPECT_EQ(errno, EBADF);
}

TEST(SimLoop, PollersArePolledUntilQuietAndArmedBeforeTimeMovesOn) {
  SimLoop loop;
  std::string history;
  int work = 2;
  int races = 1;
  loop.At(kStart, [&] { history += 'e'; });
  loop.At(kStart + 1us, [&] { history += 'E'; });
  const auto id = loop.AddPoller({[&] {
                                    history += 'p';
                                    return work-- > 0;
                                  },
                                  [] { return false; },
                                  [&] {
                                    history += 'a';
                                    return races-- <= 0;
                                  }});
  EXPECT_TRUE(loop.Step());
  EXPECT_TRUE(loop.Step());
  // The event of the instant; two rounds with work and one without; an arm that found a race, a round, an arm; the next
  // instant.
  EXPECT_EQ(history, "epppapaE");
  loop.RemovePoller(id);
  EXPECT_FALSE(loop.Step());
  EXPECT_EQ(history, "epppapaE");
}

TEST(SimLoop, ACallbackMayPumpTheScheduleAndIsNotEnteredAgainMeanwhile) {
  SimWorld world(1);
  SimFabric& host = world.AddHost("a", {Address("10.0.0.1")});
  const auto notifier = host.CreateNotifier();
  int inside = 0;
  int calls = 0;
  bool later = false;
  world.loop().WatchReadable(notifier->fd(), [&] {
    EXPECT_EQ(++inside, 1);
    ++calls;
    notifier->Consume();
    if (calls == 1) {
      notifier->Signal();
      world.loop().At(world.Now() + 1us, [&] { later = true; });
      EXPECT_TRUE(world.RunUntil([&] { return later; }));
    }
    --inside;
  });
  notifier->Signal();
  EXPECT_TRUE(world.RunUntilIdle());
  EXPECT_EQ(calls, 2) << "the signal that came meanwhile is not lost";
}

TEST(SimLoop, APollerThatPumpsIsNotPolledAgainMeanwhile) {
  SimLoop loop;
  int inside = 0;
  int polls = 0;
  bool event = false;
  loop.AddPoller({[&] {
                    EXPECT_EQ(++inside, 1);
                    if (++polls == 1) {
                      loop.At(kStart + 1us, [&] { event = true; });
                      while (!event && loop.Step()) {
                      }
                    }
                    --inside;
                    return false;
                  },
                  [] { return false; }, [] { return true; }});
  Drain(loop);
  EXPECT_TRUE(event);
}

TEST(SimLoop, NestingIsBounded) {
  SimLoop loop;
  int deepest = 0;
  int depth = 0;
  std::function<void()> dig = [&] {
    deepest = std::max(deepest, ++depth);
    loop.Post(dig);
    loop.Step();
    --depth;
  };
  loop.Post(dig);
  for (int i = 0; i < 3; ++i) loop.Step();
  EXPECT_EQ(deepest, SimLoop::kMaxDepth);
  loop.Clear();
}

}  // namespace
}  // namespace stagecoach::emu
