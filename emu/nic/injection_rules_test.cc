// Injection rules on a device of either transport: what programs see of each action, at both ends, in virtual time.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include "emu/nic/roce_test_support.h"

namespace stagecoach::emu {
namespace {

// Far less than any timer of a device or its retries.
constexpr Duration kAtOnce = 1ms;

// Two hosts with connected QPs, of which the first has rules. Five Receives are posted at both.
struct Pair {
  Pair(TransportKind transport, const std::string& rules, QpKind kind = QpKind::kRc, const LinkOptions& link = {})
      : sim(link) {
    const bool iwarp = transport == TransportKind::kIwarp;
    const DeviceProfile profile = iwarp ? IwarpProfile() : RoceProfile();
    plan = InjectionPlan::Make(ParseInjectionRules(rules).value());
    a = std::make_unique<TestHost>(sim.fabric_a, "a", profile, &trace, 1024, QpCapabilities{64, 64, 4, 4, 128}, plan);
    b = std::make_unique<TestHost>(sim.fabric_b, "b", profile);
    if (kind == QpKind::kUc) {
      for (TestHost* const host : {a.get(), b.get()}) {
        QpCreate create;
        create.type = QpType::kUc;
        create.pd = host->pd;
        create.send_cq = create.receive_cq = host->cq;
        create.capabilities = {64, 64, 4, 4, 128};
        host->qp = *host->nic->CreateQp(*host->context, create);
      }
    }
    if (iwarp) {
      sim.Join(*a, *b);
    } else {
      ReadyFor(*a->qp, *b->qp, *IpEndpoint::Parse("10.0.0.2", 0));
      ReadyFor(*b->qp, *a->qp, *IpEndpoint::Parse("10.0.0.1", 0));
    }
    for (TestHost* const host : {a.get(), b.get()}) {
      for (uint64_t i = 0; i < kReceives; ++i) EXPECT_EQ(host->Receive(100 + i, {host->Register(20'000).All()}), 0);
    }
    // Carriers, and the ready-to-receive of iWARP, are no concern of the tests.
    sim.world.RunFor(10ms);
  }

  // One message of `size` bytes of `from`, which need not arrive.
  void Send(TestHost& from, uint64_t wr_id, size_t size = 100) {
    ASSERT_EQ(from.Send(wr_id, {from.Register(size).All()}), 0);
  }
  // Several, each of which arrives before the next one is sent.
  void Exchange(TestHost& from, TestHost& to, uint64_t count) {
    for (uint64_t i = 1; i <= count; ++i) {
      const size_t arrived = Of(to, CompletionOpcode::kReceive).size();
      Send(from, i);
      ASSERT_TRUE(sim.world.RunUntil([&] { return Of(to, CompletionOpcode::kReceive).size() > arrived; }));
    }
    sim.world.RunFor(1ms);
  }
  // The statuses of what has completed at a host, in order.
  static std::vector<CompletionStatus> Of(TestHost& host, CompletionOpcode opcode) {
    host.Completed(0);
    std::vector<CompletionStatus> statuses;
    for (const WorkCompletion& each : host.completions) {
      if (each.opcode == opcode) statuses.push_back(each.status);
    }
    return statuses;
  }
  bool BothAreInError() const { return a->qp->state() == QpState::kErr && b->qp->state() == QpState::kErr; }
  // All Receives are flushed that had no message.
  static void ExpectFlushed(TestHost& host, size_t arrived) {
    const auto receives = Of(host, CompletionOpcode::kReceive);
    ASSERT_EQ(receives.size(), kReceives) << host.nic->name();
    for (size_t i = 0; i < receives.size(); ++i) {
      EXPECT_EQ(receives[i], i < arrived ? CompletionStatus::kSuccess : CompletionStatus::kFlushed) << host.nic->name();
    }
  }
  std::vector<std::string> Firings() const {
    std::vector<std::string> lines;
    for (const std::string& line : trace.lines()) {
      if (const size_t at = line.find("injection.fired"); at != std::string::npos) lines.push_back(line.substr(at));
    }
    return lines;
  }

  static constexpr size_t kReceives = 5;
  TraceLog trace;
  SimPair sim;
  std::shared_ptr<InjectionPlan> plan;
  std::unique_ptr<TestHost> a;
  std::unique_ptr<TestHost> b;
};

class InjectionRules : public ::testing::TestWithParam<TransportKind> {
 protected:
  static bool IsIwarp() { return GetParam() == TransportKind::kIwarp; }
  // What becomes of the send that is under way when its connection is cut.
  static CompletionStatus CutSend() {
    return IsIwarp() ? CompletionStatus::kFlushed : CompletionStatus::kRetryExceeded;
  }
};

TEST_P(InjectionRules, DisconnectEndsBothEndsAtOnce) {
  Pair pair(GetParam(), "disconnect message=3 direction=sent");
  pair.Exchange(*pair.a, *pair.b, 2);
  const Instant before = pair.sim.world.Now();
  pair.Send(*pair.a, 3);
  pair.Send(*pair.a, 4);
  ASSERT_TRUE(pair.sim.world.RunUntil([&] { return pair.BothAreInError(); }));
  EXPECT_LT(pair.sim.world.Now() - before, kAtOnce);
  pair.sim.world.RunFor(kAtOnce);
  Pair::ExpectFlushed(*pair.a, 0);
  Pair::ExpectFlushed(*pair.b, 2);
  EXPECT_EQ(Pair::Of(*pair.a, CompletionOpcode::kSend),
            (std::vector<CompletionStatus>{CompletionStatus::kSuccess, CompletionStatus::kSuccess, CutSend(),
                                           CompletionStatus::kFlushed}));
  EXPECT_EQ(pair.Firings(), (std::vector<std::string>{"injection.fired rule=1 action=disconnect connection=1 "
                                                      "direction=sent kind=send message=3 segment=1 attempt=1"}));
  if (!IsIwarp()) return;
  for (TestHost* const host : {pair.a.get(), pair.b.get()}) {
    ASSERT_TRUE(pair.sim.world.RunUntil([&] { return !host->observer.closed().empty(); }));
    EXPECT_EQ(host->observer.closed()[0].reason, CloseReason::kStreamFailed);
    EXPECT_EQ(host->observer.closed()[0].error, ECONNRESET);
  }
}

TEST_P(InjectionRules, DisconnectAtWhatIsReceived) {
  Pair pair(GetParam(), "disconnect message=2 direction=received");
  pair.Exchange(*pair.b, *pair.a, 1);
  const Instant before = pair.sim.world.Now();
  pair.Send(*pair.a, 1);
  pair.Send(*pair.b, 2);
  ASSERT_TRUE(pair.sim.world.RunUntil([&] { return pair.BothAreInError(); }));
  EXPECT_LT(pair.sim.world.Now() - before, kAtOnce);
  pair.sim.world.RunFor(kAtOnce);
  Pair::ExpectFlushed(*pair.a, 1);
  // On iWARP a Send is done when it has left.
  EXPECT_EQ(Pair::Of(*pair.b, CompletionOpcode::kSend).back(), IsIwarp() ? CompletionStatus::kSuccess : CutSend());
}

TEST_P(InjectionRules, DisconnectWithinAMessage) {
  Pair pair(GetParam(), "disconnect kind=send message=2 segment=3");
  pair.Exchange(*pair.a, *pair.b, 1);
  pair.Send(*pair.a, 2, 10'000);
  ASSERT_TRUE(pair.sim.world.RunUntil([&] { return pair.BothAreInError(); }));
  pair.sim.world.RunFor(kAtOnce);
  Pair::ExpectFlushed(*pair.b, 1);
  ASSERT_EQ(pair.Firings().size(), 1u);
  EXPECT_NE(pair.Firings()[0].find("message=2 segment=3"), std::string::npos) << pair.Firings()[0];
}

TEST_P(InjectionRules, DisconnectOfAnAnswerFailsTheRead) {
  Pair pair(GetParam(), "disconnect kind=read-response");
  const TestBuffer source = pair.b->Register(5000);
  const TestBuffer sink = pair.a->Register(5000);
  ASSERT_EQ(pair.a->Send(1, {sink.All()}, PostOpcode::kRead, source.region.stag, source.address()), 0);
  ASSERT_TRUE(pair.sim.world.RunUntil([&] { return pair.BothAreInError(); }));
  pair.sim.world.RunFor(kAtOnce);
  EXPECT_EQ(Pair::Of(*pair.a, CompletionOpcode::kRead), (std::vector<CompletionStatus>{CutSend()}));
}

TEST_P(InjectionRules, DelayIsLatencyAndKeepsTheOrder) {
  Pair pair(GetParam(), "delay=10ms message=2 attempt=1");
  const Instant before = pair.sim.world.Now();
  for (uint64_t i = 1; i <= 3; ++i) pair.Send(*pair.a, i);
  const auto arrived = [&] { return Pair::Of(*pair.b, CompletionOpcode::kReceive).size(); };
  ASSERT_TRUE(pair.sim.world.RunUntil([&] { return arrived() == 1; }));
  EXPECT_LT(pair.sim.world.Now() - before, kAtOnce);
  ASSERT_TRUE(pair.sim.world.RunUntil([&] { return arrived() == 3; }));
  EXPECT_GE(pair.sim.world.Now() - before, 10ms);
  EXPECT_LT(pair.sim.world.Now() - before, 10ms + kAtOnce);
  pair.sim.world.RunFor(kAtOnce);
  EXPECT_EQ(Pair::Of(*pair.a, CompletionOpcode::kSend), std::vector<CompletionStatus>(3, CompletionStatus::kSuccess));
  EXPECT_EQ(pair.Firings().size(), 1u);
}

// A disconnection in order waits for what is delayed, as for everything that was sent before it.
TEST_P(InjectionRules, WhatIsDelayedLeavesBeforeTheEnd) {
  Pair pair(GetParam(), "delay=10ms message=1");
  pair.Send(*pair.a, 1);
  pair.a->nic->Disconnect(pair.a->qp->qp_number());
  pair.sim.world.RunFor(20ms);
  EXPECT_EQ(pair.a->qp->state(), QpState::kErr);
  if (IsIwarp()) Pair::ExpectFlushed(*pair.b, 1);
}

TEST_P(InjectionRules, RulesOfAnotherConnectionChangeNothing) {
  Pair pair(GetParam(), "disconnect connection=2; stall message=400");
  pair.Exchange(*pair.a, *pair.b, 5);
  EXPECT_EQ(pair.a->qp->state(), QpState::kRts);
  EXPECT_TRUE(pair.Firings().empty());
  EXPECT_EQ(pair.plan->seen().sent, 5u);
}

TEST_P(InjectionRules, CompletionsAreLateWhenTheDeviceIsToldSo) {
  Pair pair(GetParam(), "delay-completion=50ms number=2");
  for (uint64_t i = 1; i <= 3; ++i) pair.Send(*pair.a, i);
  ASSERT_TRUE(pair.sim.world.RunUntil([&] { return pair.b->Completed(3); }));
  pair.sim.world.RunFor(500us);
  EXPECT_EQ(Pair::Of(*pair.a, CompletionOpcode::kSend).size(), 1u) << "the third stays behind the second";
  ASSERT_TRUE(pair.sim.world.RunUntil([&] { return pair.a->Completed(3); }));
  for (uint64_t i = 0; i < 3; ++i) EXPECT_EQ(pair.a->completions[i].wr_id, i + 1);
  EXPECT_EQ(pair.plan->counters(0).fired, 1u);
}

TEST_P(InjectionRules, WritesAreLateWhereTheDeviceIsToldSo) {
  Pair pair(GetParam(), "place-late=1s number=2..3");
  const TestBuffer source = pair.b->Register(600, kFullAccess, 7);
  const TestBuffer sink = pair.a->Register(600);
  for (uint64_t i = 0; i < 3; ++i) {
    ASSERT_EQ(
        pair.b->Send(i, {source.Sge(i * 200, 200)}, PostOpcode::kWrite, sink.region.stag, sink.address() + i * 200), 0);
  }
  const auto placed = [&] { return std::count(sink.bytes.begin(), sink.bytes.end(), std::byte{7}); };
  pair.sim.world.RunFor(1ms);
  // The ready-to-receive of iWARP is one, too.
  const ptrdiff_t prompt = IsIwarp() ? 400 : 200;
  EXPECT_LE(placed(), prompt);
  EXPECT_GE(placed(), 200);
  pair.Send(*pair.b, 9);
  ASSERT_TRUE(pair.sim.world.RunUntil([&] { return !Pair::Of(*pair.a, CompletionOpcode::kReceive).empty(); }));
  EXPECT_EQ(placed(), 600) << "the Send came first";
  EXPECT_EQ(pair.plan->counters(0).fired, 2u);
}

TEST_P(InjectionRules, AWriteOfManySegmentsIsOne) {
  Pair pair(GetParam(), "place-late=1s number=2..");
  const TestBuffer source = pair.b->Register(40'000, kFullAccess, 7);
  const TestBuffer sink = pair.a->Register(40'000);
  const auto placed = [&] { return std::count(sink.bytes.begin(), sink.bytes.end(), std::byte{7}); };
  ASSERT_EQ(pair.b->Send(1, {source.Sge(0, 20'000)}, PostOpcode::kWrite, sink.region.stag, sink.address()), 0);
  ASSERT_TRUE(pair.sim.world.RunUntil([&] { return placed() == 20'000; })) << "all of it is number 1";
  ASSERT_EQ(
      pair.b->Send(2, {source.Sge(20'000, 20'000)}, PostOpcode::kWrite, sink.region.stag, sink.address() + 20'000), 0);
  pair.Send(*pair.b, 9);
  ASSERT_TRUE(pair.sim.world.RunUntil([&] { return !Pair::Of(*pair.a, CompletionOpcode::kReceive).empty(); }));
  EXPECT_EQ(pair.plan->counters(0).fired, 1u) << "and so is the second";
  EXPECT_EQ(std::count(sink.bytes.begin() + 20'000, sink.bytes.end(), std::byte{7}), 20'000);
}

INSTANTIATE_TEST_SUITE_P(Transports, InjectionRules, testing::Values(TransportKind::kIwarp, TransportKind::kInfiniband),
                         [](const auto& info) {
                           return std::string(info.param == TransportKind::kIwarp ? "Iwarp" : "Infiniband");
                         });

// --- iWARP alone ---

TEST(InjectionsOfIwarp, StallIsSilenceUntilTheProgramGivesUp) {
  Pair pair(TransportKind::kIwarp, "stall message=2");
  pair.Exchange(*pair.a, *pair.b, 1);
  pair.Send(*pair.a, 2);
  pair.Send(*pair.b, 1);
  pair.sim.world.RunFor(60s);
  EXPECT_EQ(pair.a->qp->state(), QpState::kRts);
  EXPECT_EQ(pair.b->qp->state(), QpState::kRts);
  EXPECT_TRUE(Pair::Of(*pair.a, CompletionOpcode::kReceive).empty());
  EXPECT_EQ(Pair::Of(*pair.b, CompletionOpcode::kReceive).size(), 1u);
  pair.a->nic->Disconnect(pair.a->qp->qp_number());
  pair.sim.world.RunFor(10s);
  EXPECT_TRUE(pair.BothAreInError());
  Pair::ExpectFlushed(*pair.a, 0);
  Pair::ExpectFlushed(*pair.b, 1);
}

// --- InfiniBand alone ---

TEST(InjectionsOfInfiniband, StallIsFoundOutByRetries) {
  Pair pair(TransportKind::kInfiniband, "stall message=2");
  pair.Exchange(*pair.a, *pair.b, 1);
  pair.Send(*pair.a, 2);
  pair.Send(*pair.b, 1);
  const Instant before = pair.sim.world.Now();
  ASSERT_TRUE(pair.sim.world.RunUntil([&] { return pair.BothAreInError(); }));
  // Eight times 4 ms, as the attributes have it.
  EXPECT_GE(pair.sim.world.Now() - before, 30ms);
  pair.sim.world.RunFor(10s);
  EXPECT_EQ(Pair::Of(*pair.a, CompletionOpcode::kSend).back(), CompletionStatus::kRetryExceeded);
  EXPECT_EQ(Pair::Of(*pair.b, CompletionOpcode::kSend).back(), CompletionStatus::kRetryExceeded);
}

TEST(InjectionsOfInfiniband, APacketThatIsLostOnceIsSentAgain) {
  Pair pair(TransportKind::kInfiniband, "drop message=2 segment=2 attempt=1 direction=sent");
  for (uint64_t i = 1; i <= 3; ++i) pair.Send(*pair.a, i, 5000);
  ASSERT_TRUE(pair.sim.world.RunUntil([&] { return BothCompleted(*pair.a, *pair.b, 3); }));
  EXPECT_EQ(Pair::Of(*pair.a, CompletionOpcode::kSend), std::vector<CompletionStatus>(3, CompletionStatus::kSuccess));
  EXPECT_EQ(pair.Firings().size(), 1u);
  EXPECT_EQ(pair.plan->seen().sent, 3u);
}

TEST(InjectionsOfInfiniband, AMessageThatIsAlwaysLostUsesUpTheRetries) {
  Pair pair(TransportKind::kInfiniband, "drop message=2 direction=sent");
  pair.Exchange(*pair.a, *pair.b, 1);
  pair.Send(*pair.a, 2);
  ASSERT_TRUE(pair.sim.world.RunUntil([&] { return pair.a->qp->state() == QpState::kErr; }));
  pair.sim.world.RunFor(10s);
  EXPECT_EQ(Pair::Of(*pair.a, CompletionOpcode::kSend).back(), CompletionStatus::kRetryExceeded);
  ASSERT_EQ(pair.Firings().size(), 8u);
  EXPECT_NE(pair.Firings()[7].find("message=2 segment=1 attempt=8"), std::string::npos) << pair.Firings()[7];
}

// The request came; that its acknowledgement did not, the requester finds out, and its repetition is not carried out.
TEST(InjectionsOfInfiniband, AcknowledgementsThatAreLostCostTime) {
  Pair pair(TransportKind::kInfiniband, "drop kind=ack direction=received message=1..2");
  pair.Send(*pair.a, 1);
  ASSERT_TRUE(pair.sim.world.RunUntil([&] { return pair.a->Completed(1); }));
  EXPECT_EQ(Pair::Of(*pair.a, CompletionOpcode::kSend), (std::vector<CompletionStatus>{CompletionStatus::kSuccess}));
  EXPECT_EQ(Pair::Of(*pair.b, CompletionOpcode::kReceive).size(), 1u);
  EXPECT_EQ(pair.plan->counters(0).fired, 2u);
}

TEST(InjectionsOfInfiniband, APacketThatLeavesTwiceArrivesOnce) {
  Pair pair(TransportKind::kInfiniband, "duplicate message=2");
  pair.Exchange(*pair.a, *pair.b, 3);
  EXPECT_EQ(pair.plan->counters(0).fired, 1u);
  EXPECT_EQ(Pair::Of(*pair.b, CompletionOpcode::kReceive),
            std::vector<CompletionStatus>(3, CompletionStatus::kSuccess));
  EXPECT_EQ(pair.b->qp->state(), QpState::kRts);
}

TEST(InjectionsOfInfiniband, APacketThatIsOvertakenIsSentAgain) {
  Pair pair(TransportKind::kInfiniband, "overtake message=1 segment=2 attempt=1");
  pair.Send(*pair.a, 1, 5000);
  ASSERT_TRUE(pair.sim.world.RunUntil([&] { return BothCompleted(*pair.a, *pair.b, 1); }));
  EXPECT_EQ(pair.Firings(), (std::vector<std::string>{"injection.fired rule=1 action=overtake connection=1 "
                                                      "direction=sent kind=send message=1 segment=2 attempt=1"}));
  EXPECT_EQ(Pair::Of(*pair.b, CompletionOpcode::kReceive),
            std::vector<CompletionStatus>(1, CompletionStatus::kSuccess));
}

TEST(InjectionsOfInfiniband, AMessageFindsNoReceiveAndComesAgain) {
  Pair pair(TransportKind::kInfiniband, "not-ready message=2 attempt=1..3");
  pair.Exchange(*pair.b, *pair.a, 3);
  EXPECT_EQ(pair.plan->counters(0).fired, 3u);
  EXPECT_EQ(Pair::Of(*pair.a, CompletionOpcode::kReceive),
            std::vector<CompletionStatus>(3, CompletionStatus::kSuccess));
}

// What the stream cannot take at once leaves before the word of the end, and that before the stream is given up.
class CutOfAFullStream : public ::testing::TestWithParam<QpKind> {
 protected:
  static constexpr size_t kPacketsBefore = 39;  // in one turn
  static constexpr size_t kMtu = 1024;

  CutOfAFullStream() {
    EXPECT_EQ(pair_.a->Send(1, {source_.All()}, PostOpcode::kWrite, sink_.region.stag, sink_.address()), 0);
  }
  void ExpectCut() {
    pair_.sim.world.RunFor(kAtOnce);
    Pair::ExpectFlushed(*pair_.a, 0);
    Pair::ExpectFlushed(*pair_.b, 0);
    // What is lost of UC is done.
    const auto status = GetParam() == QpKind::kRc ? CompletionStatus::kRetryExceeded : CompletionStatus::kSuccess;
    EXPECT_EQ(Pair::Of(*pair_.a, CompletionOpcode::kWrite), (std::vector<CompletionStatus>{status}));
    const auto end = std::find(sink_.bytes.begin(), sink_.bytes.end(), std::byte{0});
    EXPECT_EQ(end - sink_.bytes.begin(), static_cast<ptrdiff_t>(kPacketsBefore * kMtu));
  }

  Pair pair_{TransportKind::kInfiniband, "disconnect kind=write segment=40 direction=sent", GetParam(),
             LinkOptions{.buffer = 16 * 1024}};
  const TestBuffer source_ = pair_.a->Register(100'000, kFullAccess, 7);
  const TestBuffer sink_ = pair_.b->Register(100'000);
};

TEST_P(CutOfAFullStream, TellsBothEnds) {
  const Instant before = pair_.sim.world.Now();
  ASSERT_TRUE(pair_.sim.world.RunUntil([&] { return pair_.BothAreInError(); }));
  EXPECT_LT(pair_.sim.world.Now() - before, kAtOnce);
  ExpectCut();
}

// For longer than retries would take.
TEST_P(CutOfAFullStream, TellsBothEndsWhenTheNetworkMovesAgain) {
  pair_.sim.world.Partition(pair_.sim.fabric_a, pair_.sim.fabric_b, true);
  pair_.sim.world.RunFor(1s);
  EXPECT_EQ(pair_.a->qp->state(), QpState::kRts);
  pair_.sim.world.Partition(pair_.sim.fabric_a, pair_.sim.fabric_b, false);
  ASSERT_TRUE(pair_.sim.world.RunUntil([&] { return pair_.BothAreInError(); }));
  ExpectCut();
}

// A peer that cannot be told does not keep the QP for ever.
TEST_P(CutOfAFullStream, EndsWithoutTellingWhenThatTakesTooLong) {
  const Instant before = pair_.sim.world.Now();
  pair_.sim.world.Partition(pair_.sim.fabric_a, pair_.sim.fabric_b, true);
  ASSERT_TRUE(pair_.sim.world.RunUntil([&] { return pair_.a->qp->state() == QpState::kErr; }));
  EXPECT_GE(pair_.sim.world.Now() - before, RoceProfile().close_linger);
  EXPECT_LT(pair_.sim.world.Now() - before, RoceProfile().close_linger + kAtOnce);
  Pair::ExpectFlushed(*pair_.a, 0);
}

INSTANTIATE_TEST_SUITE_P(Kinds, CutOfAFullStream, testing::Values(QpKind::kRc, QpKind::kUc),
                         [](const auto& info) { return std::string(info.param == QpKind::kRc ? "Rc" : "Uc"); });

TEST(InjectionsOfInfiniband, UnreliableConnectionsLoseAndEndAlike) {
  Pair pair(TransportKind::kInfiniband, "drop message=1; disconnect message=3", QpKind::kUc);
  for (uint64_t i = 1; i <= 2; ++i) pair.Send(*pair.a, i);
  ASSERT_TRUE(pair.sim.world.RunUntil([&] { return Pair::Of(*pair.b, CompletionOpcode::kReceive).size() == 1; }));
  pair.Send(*pair.a, 3);
  ASSERT_TRUE(pair.sim.world.RunUntil([&] { return pair.BothAreInError(); }));
  pair.sim.world.RunFor(kAtOnce);
  Pair::ExpectFlushed(*pair.a, 0);
  Pair::ExpectFlushed(*pair.b, 1);
}

}  // namespace
}  // namespace stagecoach::emu
