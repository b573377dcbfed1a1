// Each rule of the checkers, kept and broken by a history written by hand.
#include <gtest/gtest.h>

#include <string>

#include "scenarios/runner/connection_checker.h"
#include "scenarios/runner/nic_checker.h"

namespace stagecoach::scenario {
namespace {

class ConnectionCheckerTest : public ::testing::Test {
 protected:
  void Say(std::string_view event, std::initializer_list<TraceFact> facts = {}) {
    checker_.OnEvent(Instant(++now_ * 1us), "client", event, facts);
  }
  void Submit(uint64_t call, uint64_t deadline = 0) { Say("call.submitted", {{"call", call}, {"deadline", deadline}}); }
  void Send(uint64_t call, uint64_t slot, uint64_t in_flight, uint64_t receives) {
    Say("call.sent", {{"call", call},
                      {"slot", slot},
                      {"granted", uint64_t{1}},
                      {"in_flight", in_flight},
                      {"received", uint64_t{0}}});
    Say("send.posted", {{"slot", slot}, {"receives_posted", receives}, {"received", uint64_t{0}}});
  }
  void Reply(uint64_t call, uint64_t credits, uint64_t returned = 0) {
    Say("reply.received", {{"call", call},
                           {"credits", credits},
                           {"writes_offered", uint64_t{100}},
                           {"writes_returned", returned},
                           {"reply_offered", uint64_t{0}},
                           {"reply_returned", uint64_t{0}}});
  }
  void Over(uint64_t call, uint64_t stags = 0, uint64_t placed = 0) {
    Say("call.over", {{"call", call}, {"stags", stags}, {"outcome", "ok"}, {"placed", placed}});
  }
  void Close(uint64_t posted = 5, uint64_t completed = 3) {
    Say("connection.closed", {{"why", "peer closed the connection"},
                              {"receives_posted", posted},
                              {"receives_completed", completed},
                              {"receives_destroyed", uint64_t{2}},
                              {"sends_posted", uint64_t{1}},
                              {"sends_completed", uint64_t{1}},
                              {"sends_destroyed", uint64_t{0}}});
  }
  // The rule broken, when it is just one.
  std::string Broken() {
    checker_.Finish(Instant(++now_ * 1us));
    std::string rules;
    for (const Violation& violation : violations_.list()) rules += (rules.empty() ? "" : " ") + violation.rule;
    return rules;
  }

  int64_t now_ = 0;
  Violations violations_;
  ConnectionChecker checker_{&violations_};
};

TEST_F(ConnectionCheckerTest, AnOrdinaryCallBreaksNoRule) {
  Say("established");
  Submit(1);
  Say("stag.registered", {{"registration", uint64_t{9}}});
  Say("stag.exposed", {{"call", uint64_t{1}}, {"registration", uint64_t{9}}});
  Send(1, 0, 1, 4);
  Say("send.done", {{"slot", uint64_t{0}}});
  Reply(1, 8, 40);
  Say("stag.invalidated", {{"registration", uint64_t{9}}, {"how", "by the peer"}});
  Over(1, 0, 40);
  Close();
  EXPECT_EQ(Broken(), "");
  EXPECT_EQ(checker_.judged(), 11u);
}

TEST_F(ConnectionCheckerTest, AnEventWithoutAFactThatARuleNeeds) {
  Say("established");
  Say("read.issued", {{"in_flight", uint64_t{1}}, {"reads_max", uint64_t{4}}});
  Say("read.issued", {{"reads_max", uint64_t{4}}});
  Close();
  EXPECT_EQ(Broken(), "trace.facts");
}

TEST_F(ConnectionCheckerTest, TwoCallsOnOneCredit) {
  Say("established");
  Submit(1);
  Submit(2);
  Send(1, 0, 1, 4);
  Send(2, 1, 2, 4);
  Over(1);
  Over(2);
  Close();
  EXPECT_EQ(Broken(), "credit.requester");
}

TEST_F(ConnectionCheckerTest, ACallWithoutAReceiveForItsReply) {
  Say("established");
  Submit(1);
  Send(1, 0, 1, 0);
  Over(1);
  Close();
  EXPECT_EQ(Broken(), "credit.requester");
}

TEST_F(ConnectionCheckerTest, AGrantBeforeItsReceiveIsPosted) {
  Say("established");
  Say("reply.sent", {{"slot", uint64_t{0}},
                     {"granted", uint64_t{4}},
                     {"receives", uint64_t{4}},
                     {"unanswered", uint64_t{0}},
                     {"received", uint64_t{7}}});
  Say("send.posted", {{"slot", uint64_t{0}}, {"receives_posted", uint64_t{3}}, {"received", uint64_t{7}}});
  Close();
  EXPECT_EQ(Broken(), "credit.responder");
}

TEST_F(ConnectionCheckerTest, ACallOverWithAnStagStillValid) {
  Say("established");
  Submit(1);
  Say("stag.registered", {{"registration", uint64_t{9}}});
  Say("stag.exposed", {{"call", uint64_t{1}}, {"registration", uint64_t{9}}});
  Over(1);
  Close();
  EXPECT_EQ(Broken(), "fence");
}

TEST_F(ConnectionCheckerTest, ACallOverTwiceAndOneNever) {
  Say("established");
  Submit(1);
  Submit(2);
  Over(1);
  Over(1);
  Close();
  EXPECT_EQ(Broken(), "call.once call.once connection.outlived");
}

TEST_F(ConnectionCheckerTest, TheCallerIsToldAnotherLength) {
  Say("established");
  Submit(1);
  Send(1, 0, 1, 4);
  Reply(1, 1, 40);
  Over(1, 0, 100);
  Close();
  EXPECT_EQ(Broken(), "reply.lengths");
}

TEST_F(ConnectionCheckerTest, ACallSentAfterItsTimeOut) {
  Say("established");
  Submit(1, 2000);
  Send(1, 0, 1, 4);
  Over(1);
  Close();
  EXPECT_EQ(Broken(), "call.late");
}

TEST_F(ConnectionCheckerTest, OneReadTooMany) {
  Say("established");
  Say("read.issued", {{"in_flight", uint64_t{4}}, {"reads_max", uint64_t{4}}});
  Say("read.issued", {{"in_flight", uint64_t{5}}, {"reads_max", uint64_t{4}}});
  Close();
  EXPECT_EQ(Broken(), "read.limit");
}

TEST_F(ConnectionCheckerTest, ASendBufferFilledTwice) {
  Say("established");
  Submit(1);
  Send(1, 0, 1, 4);
  Reply(1, 8);
  Over(1);
  Submit(2);
  Send(2, 0, 1, 4);
  Over(2);
  Close();
  EXPECT_EQ(Broken(), "buffer.reuse");
}

// Handlers of calls that were open run from the loop, if that goes on.
TEST_F(ConnectionCheckerTest, WhatIsDestroyedMayOrMayNotTellOfItsCalls) {
  Say("established");
  Submit(1);
  Submit(2);
  Say("connection.closed", {{"why", "closed at once"},
                            {"receives_posted", uint64_t{0}},
                            {"receives_completed", uint64_t{0}},
                            {"receives_destroyed", uint64_t{0}},
                            {"sends_posted", uint64_t{0}},
                            {"sends_completed", uint64_t{0}},
                            {"sends_destroyed", uint64_t{0}}});
  Over(1);
  EXPECT_EQ(Broken(), "");
}

TEST_F(ConnectionCheckerTest, AReceiveThatNeverCompleted) {
  Say("established");
  Close(6, 3);
  EXPECT_EQ(Broken(), "conservation");
}

TEST_F(ConnectionCheckerTest, AConnectionNobodyClosed) {
  Say("established");
  EXPECT_EQ(Broken(), "connection.outlived");
}

class NicCheckerTest : public ::testing::Test {
 protected:
  void Say(std::string_view event, std::initializer_list<TraceFact> facts) {
    checker_.OnEvent(Instant(), "a-rnic/qp-7", event, facts);
  }
  void SayNic(std::string_view event, std::initializer_list<TraceFact> facts) {
    checker_.OnEvent(Instant(), "a-rnic", event, facts);
  }
  // Send work requests in order: whether each asks for a completion.
  void Post(std::initializer_list<uint64_t> signaled) {
    for (const uint64_t each : signaled) Say("work.posted", {{"number", posted_++}, {"signaled", each}});
  }
  void Complete(uint64_t number, std::string_view status = "success") {
    Say("send.completed", {{"number", number}, {"status", status}});
  }
  struct Counts {
    uint64_t sends_posted = 0;
    uint64_t sends_outstanding = 0;
    uint64_t sends_held = 0;
    uint64_t receives_posted = 0;
    uint64_t receives_outstanding = 0;
  };
  void Destroy(const Counts& counts) {
    Say("qp.destroyed", {{"sends_posted", counts.sends_posted},
                         {"sends_outstanding", counts.sends_outstanding},
                         {"sends_held", counts.sends_held},
                         {"receives_posted", counts.receives_posted},
                         {"receives_outstanding", counts.receives_outstanding}});
  }
  // A region of 100 bytes; its STag.
  uint64_t Allocate(uint64_t index, uint64_t key) {
    SayNic("stag.allocated", {{"index", index}, {"key", key}, {"bytes", uint64_t{100}}});
    return index << 8 | key;
  }
  void Place(std::string_view opcode, uint64_t stag, uint64_t length = 100) {
    Say("record.placed", {{"opcode", opcode}, {"length", length}, {"stag", stag}});
  }
  std::string Broken() {
    if (violations_.empty()) checker_.Finish(Instant());
    return violations_.empty() ? std::string() : violations_.list().front().rule;
  }
  uint64_t posted_ = 0;
  Violations violations_;
  NicChecker checker_{&violations_};
};

TEST_F(NicCheckerTest, CompletionsInOrderBreakNoRule) {
  Post({0, 0, 0, 1});
  Complete(0);
  Complete(3);
  Say("receive.completed", {{"number", uint64_t{0}}});
  Say("receive.completed", {{"number", uint64_t{1}}});
  Destroy({.sends_posted = 4, .receives_posted = 5, .receives_outstanding = 3});
  EXPECT_EQ(Broken(), "");
}

TEST_F(NicCheckerTest, ASendThatCompletesTwice) {
  Post({0, 0, 0, 1});
  Complete(3);
  Complete(3);
  EXPECT_EQ(Broken(), "completion.order");
}

TEST_F(NicCheckerTest, ASendThatCompletesBeforeItIsPosted) {
  Post({1});
  Complete(0);
  Complete(1);
  EXPECT_EQ(Broken(), "completion.order");
}

TEST_F(NicCheckerTest, ACompletionThatWasAskedForIsPassedOver) {
  Post({1, 0, 1});
  Complete(2);
  EXPECT_EQ(Broken(), "completion.lost");
}

TEST_F(NicCheckerTest, FlushedWorkSaysSoWhetherItWasAskedOrNot) {
  Post({0, 0, 0, 0});
  Complete(1, "remote access error");
  Complete(2, "flushed");
  Complete(3, "flushed");
  Destroy({.sends_posted = 4});
  EXPECT_EQ(Broken(), "");
}

TEST_F(NicCheckerTest, OneFlushedSendIsPassedOver) {
  Post({0, 0, 0});
  Complete(0, "flushed");
  Complete(2, "flushed");
  EXPECT_EQ(Broken(), "completion.lost");
}

TEST_F(NicCheckerTest, TheLastCompletionAskedForNeverComes) {
  Post({0, 1});
  Destroy({.sends_posted = 2});
  EXPECT_EQ(Broken(), "completion.lost");
}

TEST_F(NicCheckerTest, TheLastFlushedSendIsNotToldOf) {
  Post({0, 0});
  Complete(0, "flushed");
  Destroy({.sends_posted = 2});
  EXPECT_EQ(Broken(), "completion.lost");
}

TEST_F(NicCheckerTest, WorkGoesWithItsQueuePairAndHeldCompletionsDoToo) {
  Post({1, 1, 1});
  Complete(0);
  Destroy({.sends_posted = 3, .sends_outstanding = 1, .sends_held = 1});
  EXPECT_EQ(Broken(), "");
}

TEST_F(NicCheckerTest, AReceiveSkipped) {
  Say("receive.completed", {{"number", uint64_t{1}}});
  EXPECT_EQ(Broken(), "completion.order");
}

TEST_F(NicCheckerTest, AnStagUsedAgainAtOnceAndOneUsedAgainInTime) {
  Say("stag.allocated", {{"index", uint64_t{5}}});
  Say("stag.freed", {{"index", uint64_t{5}}});
  for (uint64_t i = 0; i < 65536; ++i) {
    Say("stag.allocated", {{"index", 100 + i}});
    Say("stag.freed", {{"index", 100 + i}});
  }
  Say("stag.allocated", {{"index", uint64_t{5}}});
  EXPECT_EQ(Broken(), "");
  Say("stag.allocated", {{"index", uint64_t{200}}});
  EXPECT_EQ(Broken(), "stag.quarantine");
}

TEST_F(NicCheckerTest, ARestartedHostHasANewNic) {
  const auto say = [&](std::string_view component, std::string_view event) {
    checker_.OnEvent(Instant(), component, event, {{"index", uint64_t{5}}});
  };
  say("a-rnic", "stag.allocated");
  say("a-rnic", "stag.freed");
  say("a", "fabric.restored");
  say("a-rnic", "stag.allocated");
  EXPECT_EQ(Broken(), "");
}

TEST_F(NicCheckerTest, ASendThatOvertakesAWrite) {
  Say("placement.kept", {});
  Say("record.placed", {{"opcode", "Write"}});
  Say("placement.done", {{"writes", uint64_t{1}}});
  Say("record.placed", {{"opcode", "Send"}});
  EXPECT_TRUE(violations_.empty());
  Say("placement.kept", {});
  Say("record.placed", {{"opcode", "Send"}});
  EXPECT_EQ(Broken(), "placement.order");
}

TEST_F(NicCheckerTest, MemoryDeregisteredWhileWritesAreOnTheirWay) {
  Say("placement.kept", {});
  checker_.OnEvent(Instant(), "a-rnic", "stag.freed", {{"index", uint64_t{5}}});
  EXPECT_EQ(Broken(), "placement.order");
}

TEST_F(NicCheckerTest, AWindowInvalidatedWhileWritesAreOnTheirWay) {
  SayNic("window.allocated", {{"index", uint64_t{5}}});
  Say("window.bound", {{"stag", uint64_t{0x501}}, {"bytes", uint64_t{100}}});
  Place("Write", 0x501);
  Say("placement.kept", {});
  Say("window.invalidated", {{"stag", uint64_t{0x501}}});
  EXPECT_EQ(Broken(), "placement.order");
}

TEST_F(NicCheckerTest, PlacementsInValidMemoryBreakNoRule) {
  const uint64_t region = Allocate(5, 1);
  SayNic("window.allocated", {{"index", uint64_t{6}}});
  Say("window.bound", {{"stag", uint64_t{0x602}}, {"bytes", uint64_t{50}}});
  Place("Write", region);
  Place("Send", region, 7);
  Place("Write", 0x602, 50);
  Place("Write", 0x999, 0);
  Say("response.started", {{"length", uint64_t{100}}, {"stag", region}});
  Say("window.invalidated", {{"stag", uint64_t{0x602}}});
  Say("window.bound", {{"stag", uint64_t{0x603}}, {"bytes", uint64_t{60}}});
  Place("Write", 0x603, 60);
  EXPECT_EQ(checker_.placements_judged(), 5u) << "without bytes no STag is looked at";
  Destroy({});
  EXPECT_EQ(Broken(), "");
}

TEST_F(NicCheckerTest, APlacementInMemoryThatWasFreed) {
  const uint64_t region = Allocate(5, 1);
  SayNic("stag.freed", {{"index", uint64_t{5}}});
  Place("Write", region);
  EXPECT_EQ(Broken(), "placement.stag");
}

TEST_F(NicCheckerTest, APlacementUnderAnotherKey) {
  Place("Write", Allocate(5, 1) + 1);
  EXPECT_EQ(Broken(), "placement.stag");
}

TEST_F(NicCheckerTest, APlacementLongerThanItsMemory) {
  Place("ReadResponse", Allocate(5, 1), 101);
  EXPECT_EQ(Broken(), "placement.stag");
}

TEST_F(NicCheckerTest, APlacementInAWindowThatWasInvalidated) {
  SayNic("window.allocated", {{"index", uint64_t{5}}});
  Say("window.bound", {{"stag", uint64_t{0x501}}, {"bytes", uint64_t{100}}});
  Say("window.invalidated", {{"stag", uint64_t{0x501}}});
  Place("Write", 0x501);
  EXPECT_EQ(Broken(), "placement.stag");
}

TEST_F(NicCheckerTest, APlacementInAWindowThatIsNotBound) {
  SayNic("window.allocated", {{"index", uint64_t{5}}});
  Place("Write", 0x500);
  EXPECT_EQ(Broken(), "placement.stag");
}

TEST_F(NicCheckerTest, APlacementInAWindowOfAnotherQueuePair) {
  SayNic("window.allocated", {{"index", uint64_t{5}}});
  checker_.OnEvent(Instant(), "a-rnic/qp-8", "window.bound", {{"stag", uint64_t{0x501}}, {"bytes", uint64_t{100}}});
  Place("Write", 0x501);
  EXPECT_EQ(Broken(), "placement.stag");
}

TEST_F(NicCheckerTest, APlacementInAWindowWhoseQueuePairIsGone) {
  SayNic("window.allocated", {{"index", uint64_t{5}}});
  Say("window.bound", {{"stag", uint64_t{0x501}}, {"bytes", uint64_t{100}}});
  Destroy({});
  Place("Write", 0x501);
  EXPECT_EQ(Broken(), "placement.stag");
}

TEST_F(NicCheckerTest, AReadAnsweredFromMemoryThatWasFreed) {
  const uint64_t region = Allocate(5, 1);
  SayNic("stag.freed", {{"index", uint64_t{5}}});
  Say("response.started", {{"length", uint64_t{1}}, {"stag", region}});
  EXPECT_EQ(Broken(), "placement.stag");
}

TEST_F(NicCheckerTest, AReceiveLost) {
  Say("receive.completed", {{"number", uint64_t{0}}});
  Destroy({.receives_posted = 5, .receives_outstanding = 3});
  EXPECT_EQ(Broken(), "completion.lost");
}

}  // namespace
}  // namespace stagecoach::scenario
