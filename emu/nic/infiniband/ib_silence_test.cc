// What ends a connection and what does not, between two NICs in virtual time: streams that are slow or not there yet,
// peers that stand still, peers and hosts that have gone.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "base/prng.h"
#include "base/trace.h"
#include "emu/nic/roce_test_support.h"

namespace stagecoach::emu {
namespace {

// Two hosts with a QP each, which give their peers 4 ms and `retries` more times.
class Hosts {
 public:
  explicit Hosts(const LinkOptions& link = {}, const DeviceProfile& of_a = RoceProfile(),
                 const DeviceProfile& of_b = RoceProfile())
      : pair(link, 1, &trace), a(pair.fabric_a, "a", of_a, &trace), b(pair.fabric_b, "b", of_b, &trace) {}

  void Ready(TestHost& host, uint8_t retries) {
    const TestHost& peer = &host == &a ? b : a;
    const IpEndpoint at = *IpEndpoint::Parse(&host == &a ? "10.0.0.2" : "10.0.0.1", 0);
    for (const QpState state : {QpState::kInit, QpState::kRtr, QpState::kRts}) {
      QpAttributes attributes = HandAttributes(state, *peer.qp, at);
      attributes.retry_count = retries;
      ASSERT_EQ(Modify(*host.qp, attributes), 0);
    }
  }
  void Ready(uint8_t retries) {
    Ready(a, retries);
    Ready(b, retries);
  }
  // A Send of each, which arrives.
  void Greet() {
    for (TestHost* host : {&a, &b}) ASSERT_EQ(host->Receive(1, {host->Register(64).All()}), 0);
    for (TestHost* host : {&a, &b}) ASSERT_EQ(host->Send(1, {host->Register(64).All()}), 0);
    ASSERT_TRUE(pair.world.RunUntil([&] { return BothCompleted(a, b, 2); }));
    a.completions.clear();
    b.completions.clear();
    pair.world.RunFor(1s);
  }
  // A Send of `from`, for which there is a Receive.
  void Post(TestHost& from, size_t size = 64) {
    TestHost& to = &from == &a ? b : a;
    ASSERT_EQ(to.Receive(1, {to.Register(size).All()}), 0);
    ASSERT_EQ(from.Send(1, {from.Register(size).All()}), 0);
    posted = pair.world.Now();
  }
  // How long after Post() the Send of `from` ended; it has to.
  Duration End(TestHost& from) {
    EXPECT_TRUE(pair.world.RunUntil([&] { return from.Completed(1); })) << a.nic->Describe() << b.nic->Describe();
    return pair.world.Now() - posted;
  }
  CompletionStatus Status(const TestHost& from) const { return from.completions.at(0).status; }
  size_t Events(const std::string& what) const {
    return static_cast<size_t>(std::count_if(trace.lines().begin(), trace.lines().end(), [&](const std::string& line) {
      return line.find(" " + what) != std::string::npos;
    }));
  }

  TraceLog trace;
  SimPair pair;
  TestHost a;
  TestHost b;
  Instant posted{};
};

// --- Slow ---

TEST(IbSilence, OverASlowLinkNothingIsSentAgain) {
  Hosts hosts({.latency = 10ms, .bytes_per_second = 500'000});
  hosts.Ready(/*retries=*/0);
  // A second each way, and one on the way to its turn.
  for (TestHost* host : {&hosts.a, &hosts.b}) {
    for (int i = 0; i < 4; ++i) hosts.Post(*host, 500'000);
  }
  ASSERT_TRUE(hosts.pair.world.RunUntil([&] { return BothCompleted(hosts.a, hosts.b, 8); }));
  for (const TestHost* host : {&hosts.a, &hosts.b}) {
    for (const WorkCompletion& completion : host->completions) EXPECT_EQ(completion.status, CompletionStatus::kSuccess);
  }
  EXPECT_GE(hosts.pair.world.Now() - hosts.posted, 4s);
  EXPECT_EQ(hosts.Events("retry "), 0u);
}

TEST(IbSilence, AStreamThatTakesLongToOpenCostsNoRetry) {
  Hosts hosts({.latency = 1500ms});
  hosts.Ready(/*retries=*/0);
  hosts.Post(hosts.a);
  EXPECT_GE(hosts.End(hosts.a), 9s);
  EXPECT_EQ(hosts.Status(hosts.a), CompletionStatus::kSuccess);
}

// --- Peers that stand still ---

TEST(IbSilence, APeerThatStandsStillEndsNobodysConnection) {
  Hosts hosts;
  hosts.Ready(/*retries=*/0);
  hosts.Greet();
  hosts.pair.world.Stop(hosts.pair.fabric_b, true);
  hosts.Post(hosts.a);
  hosts.pair.world.RunFor(999ms);
  EXPECT_EQ(hosts.Events("retry "), 0u);
  hosts.pair.world.RunFor(600s);
  EXPECT_FALSE(hosts.a.Completed(1));
  hosts.pair.world.Stop(hosts.pair.fabric_b, false);
  hosts.End(hosts.a);
  EXPECT_EQ(hosts.Status(hosts.a), CompletionStatus::kSuccess);
  EXPECT_EQ(hosts.Events("carrier.taken "), 2u) << "one at each end";
}

TEST(IbSilence, NorDoesOneWhoseHostHasNoRoomLeft) {
  Hosts hosts;
  hosts.Ready(/*retries=*/0);
  hosts.Greet();
  hosts.pair.world.Stop(hosts.pair.fabric_b, true);
  for (int i = 0; i < 10; ++i) hosts.Post(hosts.a, 100'000);
  hosts.pair.world.RunFor(600s);
  EXPECT_FALSE(hosts.a.Completed(1));
  hosts.pair.world.Stop(hosts.pair.fabric_b, false);
  ASSERT_TRUE(hosts.pair.world.RunUntil([&] { return hosts.a.Completed(10); }));
  for (const WorkCompletion& each : hosts.a.completions) EXPECT_EQ(each.status, CompletionStatus::kSuccess);
}

TEST(IbSilence, OneThatWasStoppedItselfHasItsPeerAsItWas) {
  Hosts hosts;
  hosts.Ready(/*retries=*/0);
  hosts.Greet();
  hosts.Post(hosts.b);
  hosts.pair.world.Stop(hosts.pair.fabric_b, true);
  hosts.pair.world.RunFor(60s);
  hosts.pair.world.Stop(hosts.pair.fabric_b, false);
  hosts.End(hosts.b);
  EXPECT_EQ(hosts.Status(hosts.b), CompletionStatus::kSuccess);
}

TEST(IbSilence, AStreamIsOpenedToAPeerThatStandsStillForHalfAMinute) {
  for (const Duration stopped : {25s, 100s}) {
    SCOPED_TRACE(stopped.count());
    Hosts hosts;
    hosts.Ready(hosts.b, /*retries=*/0);
    hosts.pair.world.Stop(hosts.pair.fabric_b, true);
    hosts.Ready(hosts.a, /*retries=*/0);
    hosts.Post(hosts.a);
    hosts.pair.world.RunFor(stopped);
    hosts.pair.world.Stop(hosts.pair.fabric_b, false);
    hosts.End(hosts.a);
    EXPECT_EQ(hosts.Status(hosts.a), stopped == 25s ? CompletionStatus::kSuccess : CompletionStatus::kRetryExceeded);
  }
}

// --- Peers and hosts that have gone ---

TEST(IbSilence, APeerThatWasKilledIsFoundOutByTheRetriesAlone) {
  for (const bool is_stopped : {false, true}) {
    SCOPED_TRACE(is_stopped);
    Hosts hosts;
    hosts.Ready(/*retries=*/7);
    hosts.Greet();
    if (is_stopped) hosts.pair.world.Stop(hosts.pair.fabric_b, true);
    hosts.Post(hosts.a);
    if (is_stopped) hosts.pair.world.RunFor(60s);
    hosts.posted = hosts.pair.world.Now();
    hosts.pair.world.CutHost(hosts.pair.fabric_b, Cut::kReset);
    // Eight times 4.2 ms; one that was waited for may be looked at a second later.
    EXPECT_LE(hosts.End(hosts.a), is_stopped ? 1100ms : 40ms);
    EXPECT_EQ(hosts.Status(hosts.a), CompletionStatus::kRetryExceeded);
  }
}

TEST(IbSilence, AQpThatHasGoneIsFoundOutByTheRetriesAlone) {
  Hosts hosts;
  hosts.Ready(/*retries=*/7);
  hosts.Greet();
  ASSERT_EQ(hosts.b.nic->DestroyQp(hosts.b.qp->handle()), 0);
  hosts.pair.world.RunFor(10s);
  ASSERT_EQ(hosts.a.Send(1, {hosts.a.Register(64).All()}), 0);
  hosts.posted = hosts.pair.world.Now();
  EXPECT_LE(hosts.End(hosts.a), 40ms);
  EXPECT_EQ(hosts.Status(hosts.a), CompletionStatus::kRetryExceeded);
}

TEST(IbSilence, AHostThatIsCutOffIsFoundOutSevenSecondsLater) {
  for (const bool is_stopped : {false, true}) {
    SCOPED_TRACE(is_stopped);
    Hosts hosts;
    hosts.Ready(/*retries=*/7);
    hosts.Greet();
    if (is_stopped) {
      hosts.pair.world.Stop(hosts.pair.fabric_b, true);
      hosts.Post(hosts.a);
      hosts.pair.world.RunFor(60s);
    }
    hosts.pair.world.Partition(hosts.pair.fabric_a, hosts.pair.fabric_b, true);
    if (!is_stopped) hosts.Post(hosts.a);
    hosts.posted = hosts.pair.world.Now();
    const Duration taken = hosts.End(hosts.a);
    EXPECT_EQ(hosts.Status(hosts.a), CompletionStatus::kRetryExceeded);
    EXPECT_GE(taken, 7s);
    EXPECT_LE(taken, 11s);
    hosts.pair.world.Partition(hosts.pair.fabric_a, hosts.pair.fabric_b, false);
  }
}

TEST(IbSilence, ACutOfSixSecondsCostsNothing) {
  for (const bool has_carrier : {false, true}) {
    SCOPED_TRACE(has_carrier);
    Hosts hosts;
    hosts.Ready(/*retries=*/0);
    if (has_carrier) hosts.Greet();
    hosts.pair.world.Partition(hosts.pair.fabric_a, hosts.pair.fabric_b, true);
    hosts.Post(hosts.a);
    hosts.pair.world.RunFor(6s);
    hosts.pair.world.Partition(hosts.pair.fabric_a, hosts.pair.fabric_b, false);
    hosts.End(hosts.a);
    EXPECT_EQ(hosts.Status(hosts.a), CompletionStatus::kSuccess);
    EXPECT_EQ(hosts.Events("retry "), 0u);
  }
}

// As on a network, where nobody would answer yet.
TEST(IbSilence, AQpThatIsNotInRtrYetIsFoundOutByTheRetriesAlone) {
  for (const QpState state : {QpState::kReset, QpState::kInit}) {
    Hosts hosts;
    if (state == QpState::kInit) hosts.b.ToInit();
    hosts.Ready(hosts.a, /*retries=*/7);
    ASSERT_EQ(hosts.a.Send(1, {hosts.a.Register(64).All()}), 0);
    hosts.posted = hosts.pair.world.Now();
    EXPECT_LE(hosts.End(hosts.a), 40ms);
    EXPECT_EQ(hosts.Status(hosts.a), CompletionStatus::kRetryExceeded);
  }
}

// --- Several at once ---

// Ends that stand still for any time, cuts of less than seven seconds and work of both, in any order: with no retry to
// spend, nobody's work fails.
TEST(IbSilence, StopsAndShortCutsInAnyOrderEndNobodysConnection) {
  constexpr Duration kShort = 5s;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(seed);
    Prng prng(seed);
    Hosts hosts;
    hosts.Ready(/*retries=*/0);
    hosts.Greet();
    bool is_stopped[2] = {};
    size_t posted = 0;
    const auto stop = [&](int which, bool stopped) {
      hosts.pair.world.Stop(which == 0 ? hosts.pair.fabric_a : hosts.pair.fabric_b, stopped);
      is_stopped[which] = stopped;
    };
    for (int step = 0; step < 30; ++step) {
      const auto which = static_cast<int>(prng.Below(2));
      switch (prng.Below(4)) {
        case 0:
          stop(which, !is_stopped[which]);
          break;
        case 1:
          hosts.pair.world.Partition(hosts.pair.fabric_a, hosts.pair.fabric_b, true);
          // Before, in or after its first look at the silence.
          if (prng.OneIn(2)) hosts.pair.world.RunFor(Duration(1ms) * static_cast<int>(prng.Below(1000)));
          if (prng.OneIn(2) && !is_stopped[which]) stop(which, true);
          hosts.pair.world.RunFor(kShort);
          hosts.pair.world.Partition(hosts.pair.fabric_a, hosts.pair.fabric_b, false);
          // Time for a sign of life, and for somebody to see it.
          hosts.pair.world.RunFor(2s);
          break;
        default:
          hosts.Post(which == 0 ? hosts.a : hosts.b);
          ++posted;
          break;
      }
      hosts.pair.world.RunFor(Duration(1ms) * static_cast<int>(prng.Below(prng.OneIn(5) ? 100'000 : 2'000)));
    }
    for (const int which : {0, 1}) stop(which, false);
    // Each has the ends of its own Sends, and of its Receives.
    ASSERT_TRUE(hosts.pair.world.RunUntil([&] { return BothCompleted(hosts.a, hosts.b, posted); }))
        << hosts.a.nic->Describe() << hosts.b.nic->Describe();
    for (const TestHost* host : {&hosts.a, &hosts.b}) {
      for (const WorkCompletion& each : host->completions) ASSERT_EQ(each.status, CompletionStatus::kSuccess);
    }
  }
}

// --- Devices that lose packets ---

// Whichever end does, and whoever has made the stream: both know.
// What is over is the rule, and not what it has done. Both ends know by the next carrier.
TEST(IbSilence, AConnectionThatIsStalledEndsByItsRetriesWhenTheRuleIsOver) {
  for (const bool is_from_stalled : {false, true}) {
    for (const bool is_a_stalled : {false, true}) {
      SCOPED_TRACE(testing::Message() << is_from_stalled << is_a_stalled);
      SimPair pair;
      const auto plan = InjectionPlan::Make(*ParseInjectionRules("stall message=2 direction=sent"));
      TestHost a(pair.fabric_a, "a", RoceProfile(), nullptr, 1024, {64, 64, 4, 4, 128}, is_a_stalled ? plan : nullptr);
      TestHost b(pair.fabric_b, "b", RoceProfile(), nullptr, 1024, {64, 64, 4, 4, 128}, is_a_stalled ? nullptr : plan);
      ReadyFor(*a.qp, *b.qp, *IpEndpoint::Parse("10.0.0.2", 0));
      ReadyFor(*b.qp, *a.qp, *IpEndpoint::Parse("10.0.0.1", 0));
      TestHost& stalled = is_a_stalled ? a : b;
      TestHost& peer = is_a_stalled ? b : a;
      // The carrier goes between the stall and the next word.
      ASSERT_EQ(peer.Receive(1, {peer.Register(64).All()}), 0);
      ASSERT_EQ(stalled.Send(1, {stalled.Register(64).All()}), 0);
      ASSERT_TRUE(pair.world.RunUntil([&] { return BothCompleted(stalled, peer, 1); }));
      ASSERT_EQ(stalled.Send(2, {stalled.Register(64).All()}), 0);
      ASSERT_EQ(stalled.Receive(2, {stalled.Register(64).All()}), 0);
      pair.world.RunFor(1ms);
      ASSERT_EQ(plan->counters(0).fired, 1u);
      plan->End(InjectionDepth::kRecord);
      pair.world.ResetConnections(pair.fabric_a, pair.fabric_b);
      ResetTestRecords();
      pair.world.RunFor(1ms);
      TestHost& from = is_from_stalled ? stalled : peer;
      if (!is_from_stalled) {
        ASSERT_EQ(peer.Send(2, {peer.Register(64).All()}), 0);
      }
      const Instant begin = pair.world.Now();
      pair.world.RunUntil([&] { return from.Completed(2) || pair.world.Now() > begin + 60s; });
      ASSERT_TRUE(from.Completed(2)) << a.nic->Describe() << b.nic->Describe();
      EXPECT_EQ(from.completions[1].status, CompletionStatus::kRetryExceeded);
    }
  }
}

// Two hosts that have talked, one of them with a rule that never fires. Rules that come now are younger than the
// carrier, whose ends have told each other that nothing is lost on it.
class Talked {
 public:
  explicit Talked(bool is_rule_of_a, const LinkOptions& link = {})
      : pair_(link, 1, &trace_),
        a(pair_.fabric_a, "a", RoceProfile(), &trace_, 1024, {64, 64, 4, 4, 128}, is_rule_of_a ? plan : nullptr),
        b(pair_.fabric_b, "b", RoceProfile(), &trace_, 1024, {64, 64, 4, 4, 128}, is_rule_of_a ? nullptr : plan) {
    ReadyFor(*a.qp, *b.qp, *IpEndpoint::Parse("10.0.0.2", 0));
    ReadyFor(*b.qp, *a.qp, *IpEndpoint::Parse("10.0.0.1", 0));
    EXPECT_EQ(EndOf(a, Post(a)), CompletionStatus::kSuccess);
    EXPECT_EQ(EndOf(b, Post(b)), CompletionStatus::kSuccess);
    pair_.world.RunFor(1s);
  }
  // A Send, for which there is a Receive with the same number.
  uint64_t Post(TestHost& from, size_t size = 64) {
    TestHost& to = &from == &a ? b : a;
    const uint64_t number = next_++;
    EXPECT_EQ(to.Receive(number, {to.Register(size).All()}), 0);
    EXPECT_EQ(from.Send(number, {from.Register(size).All()}), 0);
    return number;
  }
  // How it ends at this end; nullopt: not within a minute.
  std::optional<CompletionStatus> EndOf(TestHost& host, uint64_t number) {
    const Instant begin = pair_.world.Now();
    std::optional<CompletionStatus> status;
    pair_.world.RunUntil([&] {
      host.Completed(0);
      for (const WorkCompletion& each : host.completions) {
        if (each.wr_id == number) status = each.status;
      }
      return status.has_value() || pair_.world.Now() > begin + 60s;
    });
    EXPECT_TRUE(status.has_value()) << a.nic->Describe() << b.nic->Describe();
    return status;
  }

  const std::shared_ptr<InjectionPlan> plan =
      InjectionPlan::Make(*ParseInjectionRules("duplicate message=900 direction=sent"));

  // At both ends together.
  size_t CarriersDropped() const {
    return static_cast<size_t>(std::count_if(trace_.lines().begin(), trace_.lines().end(), [](const std::string& line) {
      return line.find(" carrier.dropped ") != std::string::npos;
    }));
  }

 private:
  TraceLog trace_;
  SimPair pair_;
  uint64_t next_ = 1;

 public:
  TestHost a;
  TestHost b;
};

TEST(IbSilence, WhatALaterRuleLosesBothEndsCount) {
  for (const char* const rule : {"stall", "drop kind=any", "drop direction=received kind=any"}) {
    for (const bool is_rule_of_a : {false, true}) {
      for (const bool is_from_a : {false, true}) {
        SCOPED_TRACE(testing::Message() << rule << is_rule_of_a << is_from_a);
        Talked hosts(is_rule_of_a);
        hosts.plan->Add(*ParseInjectionRules(rule));
        TestHost& from = is_from_a ? hosts.a : hosts.b;
        EXPECT_EQ(hosts.EndOf(from, hosts.Post(from)), CompletionStatus::kRetryExceeded);
      }
    }
  }
}

TEST(IbSilence, WhatHasLeftBeforeALaterRuleArrives) {
  for (const bool is_from_a : {false, true}) {
    SCOPED_TRACE(is_from_a);
    Talked hosts(is_from_a, {.latency = 10ms, .bytes_per_second = 500'000});
    TestHost& from = is_from_a ? hosts.a : hosts.b;
    TestHost& to = is_from_a ? hosts.b : hosts.a;
    hosts.plan->Add(*ParseInjectionRules("stall message=4 direction=sent"));
    const uint64_t first = hosts.Post(from, 60'000);
    const uint64_t second = hosts.Post(from, 60'000);
    hosts.Post(from);
    const uint64_t back = hosts.Post(to);
    EXPECT_EQ(hosts.EndOf(to, first), CompletionStatus::kSuccess);
    EXPECT_EQ(hosts.EndOf(to, second), CompletionStatus::kSuccess);
    EXPECT_EQ(hosts.EndOf(to, back), CompletionStatus::kRetryExceeded);
  }
}

// A loss that is survived is made good by another carrier, and one is enough.
TEST(IbSilence, ALaterRuleEndsOneCarrier) {
  Talked hosts(/*is_rule_of_a=*/true);
  hosts.plan->Add(*ParseInjectionRules("drop message=2..9 every=3 attempt=1 direction=sent"));
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(hosts.EndOf(hosts.a, hosts.Post(hosts.a)), CompletionStatus::kSuccess);
    EXPECT_EQ(hosts.EndOf(hosts.b, hosts.Post(hosts.b)), CompletionStatus::kSuccess);
  }
  EXPECT_GT(hosts.plan->counters(1).fired, 1u);
  EXPECT_EQ(hosts.CarriersDropped(), 2u) << "by each end";
}

TEST(IbSilence, WhereADeviceLosesPacketsByItselfTheRetriesCountThem) {
  DeviceProfile mute = RoceProfile();
  mute.habits = *ParseInjectionRules("drop direction=sent kind=any");
  for (const bool is_a_mute : {false, true}) {
    for (const bool is_from_a : {false, true}) {
      SCOPED_TRACE(testing::Message() << is_a_mute << is_from_a);
      Hosts hosts({}, is_a_mute ? mute : RoceProfile(), is_a_mute ? RoceProfile() : mute);
      hosts.Ready(/*retries=*/7);
      TestHost& from = is_from_a ? hosts.a : hosts.b;
      hosts.Post(from);
      EXPECT_LE(hosts.End(from), 40ms);
      EXPECT_EQ(hosts.Status(from), CompletionStatus::kRetryExceeded);
    }
  }
}

TEST(IbSilence, ADeviceThatLosesDatagramsAloneLosesNothingOfAConnection) {
  DeviceProfile mute = RoceProfile();
  mute.habits = *ParseInjectionRules("drop kind=datagram");
  Hosts hosts({}, mute, mute);
  EXPECT_FALSE(hosts.a.nic->LosesPackets());
  hosts.Ready(/*retries=*/0);
  hosts.Greet();
  hosts.pair.world.Stop(hosts.pair.fabric_b, true);
  hosts.Post(hosts.a);
  hosts.pair.world.RunFor(600s);
  EXPECT_FALSE(hosts.a.Completed(1)) << "a peer that stands still ends no connection";
  hosts.pair.world.Stop(hosts.pair.fabric_b, false);
  hosts.End(hosts.a);
  EXPECT_EQ(hosts.Status(hosts.a), CompletionStatus::kSuccess);
}

}  // namespace
}  // namespace stagecoach::emu
