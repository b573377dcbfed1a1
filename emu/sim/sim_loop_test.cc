#include "emu/sim/sim_loop.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <memory>
#include <string>
#include <vector>

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
  loop.RunThrough(kStart + 9us);
  EXPECT_EQ(loop.Now(), kStart + 9us);
  EXPECT_FALSE(ran);
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

TEST(SimLoop, ACallbackMayBlockAndIsNotEnteredAgainMeanwhile) {
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

TEST(SimLoop, APollerThatBlocksIsNotPolledOrArmedAgainMeanwhile) {
  SimLoop loop;
  int inside = 0;
  int polls = 0;
  bool event = false;
  loop.AddPoller({[&] {
                    EXPECT_EQ(++inside, 1);
                    if (++polls == 1) {
                      loop.At(kStart + 1us, [&] { event = true; });
                      EXPECT_TRUE(loop.RunUntil([&] { return event; }, Instant::max()));
                    }
                    --inside;
                    return false;
                  },
                  [] { return false; },
                  [&] {
                    EXPECT_EQ(inside, 0);
                    return true;
                  }});
  Drain(loop);
  EXPECT_TRUE(event);
  EXPECT_GT(polls, 1);
}

TEST(SimLoop, WaitsEndInAnyOrderHoweverMany) {
  constexpr int kMany = 200;
  SimLoop loop;
  std::vector<int> ended;
  int allowed = kMany;
  for (int i = 0; i < kMany; ++i) {
    loop.Post([&, i] {
      EXPECT_TRUE(loop.RunUntil([&, i] { return allowed <= i; }, Instant::max()));
      ended.push_back(i);
    });
  }
  Drain(loop);
  EXPECT_EQ(ended.size(), 0u);
  EXPECT_EQ(loop.Waiters().size(), static_cast<size_t>(kMany));
  while (allowed > 0) {
    --allowed;  // the last to be parked goes first
    EXPECT_TRUE(loop.Step());
  }
  ASSERT_EQ(ended.size(), static_cast<size_t>(kMany));
  for (int i = 0; i < kMany; ++i) EXPECT_EQ(ended[static_cast<size_t>(i)], kMany - 1 - i);
  EXPECT_TRUE(loop.Waiters().empty());
}

TEST(SimLoop, OfThoseWhoseWaitIsOverTheFirstParkedGoesOnFirstAndBeforeOtherEvents) {
  SimLoop loop;
  std::string order;
  bool open = false;
  for (const char name : {'a', 'b'}) {
    loop.Post([&, name] {
      EXPECT_TRUE(loop.RunUntil([&] { return open; }, Instant::max()));
      order += name;
    });
  }
  loop.At(kStart + 1us, [&] { open = true; });
  loop.At(kStart + 1us, [&] { order += 'e'; });
  Drain(loop);
  EXPECT_EQ(order, "abe");
}

TEST(SimLoop, ACallbackMayBlockAgainAndAgain) {
  SimLoop loop;
  int rounds = 0;
  loop.Post([&] {
    for (; rounds < 1000; ++rounds) {
      const Instant until = loop.Now() + 1us;
      loop.At(until, [] {});
      EXPECT_TRUE(loop.RunUntil([&] { return loop.Now() >= until; }, Instant::max()));
    }
  });
  Drain(loop);
  EXPECT_EQ(rounds, 1000);
  EXPECT_EQ(loop.Now(), kStart + 1ms);
}

TEST(SimLoop, AWaitEndsAtItsLimitButADryWorldHasNoTime) {
  SimLoop loop;
  int outcome = -1;
  loop.Post([&] { outcome = loop.RunUntil([] { return false; }, kStart + 5us) ? 1 : 0; });
  Drain(loop);
  EXPECT_EQ(outcome, -1) << "nothing happens, so no time passes";
  ASSERT_EQ(loop.Waiters().size(), 1u);
  EXPECT_EQ(loop.Waiters()[0].limit, kStart + 5us);
  loop.At(kStart + 9us, [&] { EXPECT_EQ(outcome, 0); });
  Drain(loop);
  EXPECT_EQ(outcome, 0);

  outcome = -1;
  loop.Post([&] { outcome = loop.RunUntil([] { return false; }, kStart + 15us) ? 1 : 0; });
  loop.RunThrough(kStart + 20us);
  EXPECT_EQ(outcome, 0);
  EXPECT_EQ(loop.Now(), kStart + 20us);
}

TEST(SimLoop, AnInterruptedWaitGivesUpWhenTheInstantEnds) {
  SimLoop loop;
  std::string outcomes;
  bool open = false;
  loop.At(kStart, 1, [&] { outcomes += loop.RunUntil([&] { return open; }, Instant::max()) ? 'T' : 'F'; });
  loop.At(kStart, 1, [&] { outcomes += loop.RunUntil([] { return false; }, Instant::max()) ? 't' : 'f'; });
  loop.At(kStart, 2, [&] { outcomes += loop.RunUntil([] { return false; }, Instant::max()) ? '+' : '-'; });
  Drain(loop);
  EXPECT_EQ(outcomes, "");
  loop.Interrupt(1);
  loop.Post([&] { open = true; });
  Drain(loop);
  EXPECT_EQ(outcomes, "Tf");
  loop.Interrupt(SimLoop::kEveryone);
  Drain(loop);
  EXPECT_EQ(outcomes, "Tf-");
}

TEST(SimLoop, WhoseCodeRunsIsKnownThroughItsWaits) {
  SimLoop loop;
  const auto blocks = [&](SimLoop::Owner owner) {
    EXPECT_EQ(loop.current().owner, owner);
    const Instant until = loop.Now() + 1us;
    EXPECT_TRUE(loop.RunUntil(
        [&] {
          EXPECT_EQ(loop.current().owner, owner);
          return loop.Now() >= until;
        },
        Instant::max()));
    EXPECT_EQ(loop.current().owner, owner);
  };
  for (const SimLoop::Owner owner : {1u, 2u, 3u}) loop.At(kStart, owner, [&, owner] { blocks(owner); });
  loop.Post([&] { EXPECT_EQ(loop.current().owner, SimLoop::kNobody); });
  loop.At(kStart + 1us, [] {});
  loop.At(kStart + 2us, [] {});
  int polls = 0;
  loop.AddPoller(4, {[&] {
                       EXPECT_EQ(loop.current().owner, 4u);
                       ++polls;
                       return false;
                     },
                     [] { return false; }, [] { return true; }});
  EXPECT_TRUE(loop.RunUntil(
      [&] {
        EXPECT_EQ(loop.current().owner, SimLoop::kNobody);
        return loop.Now() == kStart + 2us;
      },
      Instant::max()));
  EXPECT_TRUE(loop.Waiters().empty());
  EXPECT_GT(polls, 0);
}

TEST(SimLoop, CountsWhatSomebodyHasRegistered) {
  SimWorld world(1);
  SimLoop& loop = world.loop();
  const size_t before = loop.descriptors();
  const auto notifier = world.AddHost("a", {Address("10.0.0.1")}).CreateNotifier();
  EXPECT_EQ(loop.descriptors(), before + 1);
  const auto timer = loop.At(kStart + 1us, 1, [] {});
  loop.At(kStart, 1, [] {});
  loop.At(kStart, 2, [] {});
  const auto watch = loop.WatchReadable(notifier->fd(), 1, [] {});
  const auto poller = loop.AddPoller(1, {[] { return false; }, [] { return false; }, [] { return true; }});
  SimLoop::Objects objects = loop.CountOf(1);
  EXPECT_EQ(objects.timers, 1u);
  EXPECT_EQ(objects.due, 1u);
  EXPECT_EQ(objects.watches, 1u);
  EXPECT_EQ(objects.pollers, 1u);
  EXPECT_EQ(loop.CountOf(SimLoop::kEveryone).due, 2u);
  loop.Cancel(timer);
  loop.Unwatch(watch);
  loop.RemovePoller(poller);
  EXPECT_TRUE(world.RunUntilIdle());
  objects = loop.CountOf(1);
  EXPECT_EQ(objects.timers + objects.due + objects.watches + objects.pollers, 0u);
}

TEST(SimLoop, WhatIsDroppedNeverRunsAndIsDestroyedByAnEvent) {
  SimWorld world(1);
  SimLoop& loop = world.loop();
  const auto notifier = world.AddHost("a", {Address("10.0.0.1")}).CreateNotifier();
  const auto held = std::make_shared<int>();
  loop.At(kStart + 1us, 1, [held] { FAIL(); });
  loop.WatchReadable(notifier->fd(), 1, [held] { FAIL(); });
  loop.AddPoller(1, {[held] {
                       ADD_FAILURE();
                       return false;
                     },
                     [] { return false; }, [] { return true; }});
  bool other = false;
  loop.At(kStart + 1us, 2, [&] { other = true; });
  notifier->Signal();
  loop.Drop(1);
  EXPECT_EQ(held.use_count(), 4);
  EXPECT_TRUE(world.RunUntilIdle());
  EXPECT_EQ(held.use_count(), 1);
  EXPECT_TRUE(other);
}

}  // namespace
}  // namespace stagecoach::emu
