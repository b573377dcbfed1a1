// Each rule of the checkers, kept and broken by a history written by hand.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "scenarios/runner/connection_checker.h"
#include "scenarios/runner/nic_checker.h"

namespace stagecoach::scenario {
namespace {

// The history of a connection that is established.
class ConnectionCheckerTest : public ::testing::Test {
 protected:
  void SetUp() override { Say("established"); }
  void Say(std::string_view event, std::initializer_list<TraceFact> facts = {}) {
    checker_.OnEvent(Instant(++now_ * 1us), reverse_ ? "client/reverse" : "client", event, facts);
  }
  void Submit(uint64_t call, uint64_t deadline = 0) { Say("call.submitted", {{"call", call}, {"deadline", deadline}}); }
  void Send(uint64_t call, uint64_t slot, uint64_t in_flight, uint64_t receives) {
    Say("call.sent", {{"call", call},
                      {"xid", call},
                      {"slot", slot},
                      {"granted", uint64_t{1}},
                      {"in_flight", in_flight},
                      {"received", uint64_t{0}}});
    Say("send.posted", {{"slot", slot}, {"receives_posted", receives}, {"received", uint64_t{0}}});
  }
  void Reply(uint64_t call, uint64_t credits, uint64_t returned = 0, uint64_t exposes = 0) {
    Say("reply.received", {{"call", call},
                           {"xid", call},
                           {"credits", credits},
                           {"type", "RDMA_MSG"},
                           {"exposes", exposes},
                           {"writes_offered", uint64_t{100}},
                           {"writes_returned", returned},
                           {"reply_offered", uint64_t{0}},
                           {"reply_returned", uint64_t{0}}});
  }
  // An error of version 2, with `credits` in its header, and the call goes again.
  void RefuseAndResend(uint64_t call, uint64_t credits = 1) {
    Say("reply.received", {{"call", call},
                           {"xid", call},
                           {"credits", credits},
                           {"type", "RDMA2_ERROR"},
                           {"exposes", uint64_t{0}},
                           {"writes_offered", uint64_t{100}},
                           {"writes_returned", uint64_t{0}},
                           {"reply_offered", uint64_t{0}},
                           {"reply_returned", uint64_t{0}}});
    Say("call.resent", {{"call", call}, {"xid", call}});
  }
  void Invalidate(uint64_t registration) { Say("stag.invalidated", {{"registration", registration}}); }
  void SayVersion(uint64_t version) { Say("connection.version", {{"version", version}}); }
  void SendProperties(uint64_t slot) {
    Say("properties.sent",
        {{"slot", slot}, {"granted", uint64_t{1}}, {"in_flight", uint64_t{1}}, {"received", uint64_t{0}}});
    Say("send.posted", {{"slot", slot}, {"receives_posted", uint64_t{4}}, {"received", uint64_t{0}}});
    Say("send.done", {{"slot", slot}});
  }
  void Over(uint64_t call, uint64_t stags = 0, uint64_t placed = 0) {
    Say("call.over", {{"call", call}, {"stags", stags}, {"outcome", "ok"}, {"placed", placed}});
  }
  void Expose(uint64_t call, uint64_t registration) {
    Say("stag.registered", {{"registration", registration}});
    Say("stag.exposed", {{"call", call}, {"registration", registration}});
  }
  void MakeTwoCallsOnOneCredit() {
    Submit(1);
    Submit(2);
    Send(1, 0, 1, 4);
    Send(2, 1, 2, 4);
    Over(1);
    Over(2);
  }
  // On a buffer that nothing else uses.
  void SendDone(uint64_t xid) {
    Say("done.sent", {{"xid", xid}, {"slot", uint64_t{99}}});
    Say("send.posted", {{"slot", uint64_t{99}}, {"receives_posted", uint64_t{4}}, {"received", uint64_t{0}}});
    Say("send.done", {{"slot", uint64_t{99}}});
  }
  // Two credits; one is held by the RDMA_DONE that ends the first call.
  void CallTwiceBehindAnExposedReply(bool done = false) {
    Submit(1);
    Send(1, 0, 1, 4);
    Reply(1, 2, 0, 1);
    Over(1);
    if (done) SendDone(1);
    Submit(2);
    Submit(3);
    Send(2, 2, 1, 4);
    Send(3, 3, 2, 4);
    Over(2);
    Over(3);
  }
  void ReceiveDone(bool matched) { Say("done.received", {{"matched", uint64_t{matched ? 1u : 0u}}}); }
  void AnswerByExposing(uint64_t slot, uint64_t granted) {
    Say("reply.exposed");
    Say("reply.sent", {{"slot", slot},
                       {"granted", granted},
                       {"receives", uint64_t{4}},
                       {"unanswered", uint64_t{0}},
                       {"received", uint64_t{7}}});
    Say("send.posted", {{"slot", slot}, {"receives_posted", uint64_t{4}}, {"received", uint64_t{7}}});
  }
  // So many Receives were posted, and two are destroyed. One Send was posted, and has completed.
  void Close(uint64_t posted = 5, uint64_t completed = 3) {
    SayClosed("peer closed the connection", {.posted = posted, .completed = completed, .destroyed = 2}, 1);
  }
  struct Receives {
    uint64_t posted = 0;
    uint64_t completed = 0;
    uint64_t destroyed = 0;
  };
  void SayClosed(std::string_view why, const Receives& receives, uint64_t sends) {
    Say("connection.closed", {{"why", why},
                              {"receives_posted", receives.posted},
                              {"receives_completed", receives.completed},
                              {"receives_destroyed", receives.destroyed},
                              {"sends_posted", sends},
                              {"sends_completed", sends},
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
  bool reverse_ = false;  // events are of the reverse direction
  Violations violations_;
  ConnectionChecker checker_{&violations_};
};

TEST_F(ConnectionCheckerTest, AnOrdinaryCallBreaksNoRule) {
  Submit(1);
  Expose(1, 9);
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
  Say("read.issued", {{"in_flight", uint64_t{1}}, {"reads_max", uint64_t{4}}});
  Say("read.issued", {{"reads_max", uint64_t{4}}});
  Close();
  EXPECT_EQ(Broken(), "trace.facts");
}

TEST_F(ConnectionCheckerTest, TwoCallsOnOneCredit) {
  MakeTwoCallsOnOneCredit();
  Close();
  EXPECT_EQ(Broken(), "credit.requester");
}

TEST_F(ConnectionCheckerTest, EachDirectionHasItsOwnCallsAndCredits) {
  Submit(1);
  Send(1, 0, 1, 4);
  reverse_ = true;
  Submit(1);
  Send(1, 1, 1, 4);
  Reply(1, 1);
  Over(1);
  reverse_ = false;
  Reply(1, 1);
  Over(1);
  Close();
  EXPECT_EQ(Broken(), "");
}

TEST_F(ConnectionCheckerTest, TwoReverseCallsOnOneCredit) {
  reverse_ = true;
  MakeTwoCallsOnOneCredit();
  reverse_ = false;
  Close();
  EXPECT_EQ(Broken(), "credit.requester");
}

TEST_F(ConnectionCheckerTest, AReverseCallThatIsNeverOver) {
  reverse_ = true;
  Submit(1);
  reverse_ = false;
  Close();
  EXPECT_EQ(Broken(), "call.once connection.outlived");
}

TEST_F(ConnectionCheckerTest, DirectionsShareTheirSendBuffers) {
  Submit(1);
  Send(1, 0, 1, 4);
  reverse_ = true;
  Submit(1);
  Send(1, 0, 1, 4);
  Over(1);
  reverse_ = false;
  Over(1);
  Close();
  EXPECT_EQ(Broken(), "buffer.reuse");
}

TEST_F(ConnectionCheckerTest, ACallWithoutAReceiveForItsReply) {
  Submit(1);
  Send(1, 0, 1, 0);
  Over(1);
  Close();
  EXPECT_EQ(Broken(), "credit.requester");
}

TEST_F(ConnectionCheckerTest, AGrantBeforeItsReceiveIsPosted) {
  Say("reply.sent", {{"slot", uint64_t{0}},
                     {"granted", uint64_t{4}},
                     {"receives", uint64_t{4}},
                     {"unanswered", uint64_t{0}},
                     {"received", uint64_t{7}}});
  Say("send.posted", {{"slot", uint64_t{0}}, {"receives_posted", uint64_t{3}}, {"received", uint64_t{7}}});
  Close();
  EXPECT_EQ(Broken(), "credit.responder");
}

TEST_F(ConnectionCheckerTest, AnRdmaDoneHoldsTheCreditOfItsCallUntilALaterOneIsAnswered) {
  Submit(1);
  Send(1, 0, 1, 4);
  Reply(1, 2, 0, 1);
  Over(1);
  SendDone(1);
  // Nothing else in flight, and after that one credit is left of two.
  Submit(2);
  Send(2, 2, 1, 4);
  Reply(2, 2);
  Over(2);
  Submit(3);
  Submit(4);
  Send(3, 3, 1, 4);
  Send(4, 4, 2, 4);
  Over(3);
  Over(4);
  Close();
  EXPECT_EQ(Broken(), "");
}

TEST_F(ConnectionCheckerTest, ACallOnTheCreditOfAnRdmaDoneThatIsOwed) {
  CallTwiceBehindAnExposedReply();
  Close();
  EXPECT_EQ(Broken(), "credit.requester");
}

TEST_F(ConnectionCheckerTest, ACallOnTheCreditOfAnRdmaDoneThatWasSent) {
  CallTwiceBehindAnExposedReply(/*done=*/true);
  Close();
  EXPECT_EQ(Broken(), "credit.requester");
}

TEST_F(ConnectionCheckerTest, AnRdmaDoneForNothing) {
  Submit(1);
  Send(1, 0, 1, 4);
  Reply(1, 2);
  Over(1);
  SendDone(1);
  Close();
  EXPECT_EQ(Broken(), "credit.requester");
}

// Of four Receives one is for RDMA_DONE.
TEST_F(ConnectionCheckerTest, AGrantThatLeavesAReceiveForAnRdmaDone) {
  AnswerByExposing(0, 3);
  ReceiveDone(true);
  checker_.CheckNothingExposed(Instant(++now_ * 1us));
  Close();
  EXPECT_EQ(Broken(), "");
}

TEST_F(ConnectionCheckerTest, AGrantThatLeavesNoReceiveForAnRdmaDone) {
  AnswerByExposing(0, 4);
  Close();
  EXPECT_EQ(Broken(), "credit.responder credit.responder") << "as it is decided, and as it is posted";
}

TEST_F(ConnectionCheckerTest, AReplyThatIsStillExposedWhenNobodyIsAtWork) {
  AnswerByExposing(0, 2);
  AnswerByExposing(1, 2);
  ReceiveDone(false);
  ReceiveDone(true);
  checker_.CheckNothingExposed(Instant(++now_ * 1us));
  Close();
  EXPECT_EQ(Broken(), "exposure.held");
}

TEST_F(ConnectionCheckerTest, AReplyThatIsReadTwice) {
  AnswerByExposing(0, 3);
  ReceiveDone(true);
  ReceiveDone(true);
  Close();
  EXPECT_EQ(Broken(), "exposure.held");
}

TEST_F(ConnectionCheckerTest, ACallOverWithAnStagStillValid) {
  Submit(1);
  Expose(1, 9);
  Over(1);
  Close();
  EXPECT_EQ(Broken(), "fence");
}

// As that of a call, or of memory that this end reads a call of the other direction into.
TEST_F(ConnectionCheckerTest, ANumberThatIsValidAgainIsThatOfAnotherStag) {
  Submit(1);
  Expose(1, 9);
  Send(1, 0, 1, 4);
  Reply(1, 2);
  Invalidate(9);
  Say("stag.registered", {{"registration", uint64_t{9}}});
  Over(1);
  Close();
  EXPECT_EQ(Broken(), "");
}

TEST_F(ConnectionCheckerTest, ACallOverTwiceAndOneNever) {
  Submit(1);
  Submit(2);
  Over(1);
  Over(1);
  Close();
  EXPECT_EQ(Broken(), "call.once call.once connection.outlived");
}

TEST_F(ConnectionCheckerTest, TheCallerIsToldAnotherLength) {
  Submit(1);
  Send(1, 0, 1, 4);
  Reply(1, 1, 40);
  Over(1, 0, 100);
  Close();
  EXPECT_EQ(Broken(), "reply.lengths");
}

TEST_F(ConnectionCheckerTest, ACallSentAfterItsTimeOut) {
  Submit(1, 2000);
  Send(1, 0, 1, 4);
  Over(1);
  Close();
  EXPECT_EQ(Broken(), "call.late");
}

// What was told to a peer that announces itself may still hold its Receive when calls come.
TEST_F(ConnectionCheckerTest, PropertiesOfAPeerThatAnnouncesItselfHoldACredit) {
  SayVersion(2);
  Say("properties.received", {{"credits", uint64_t{2}}, {"awaited", uint64_t{1}}});
  SendProperties(7);
  Say("properties.over", {{"how", "announced"}});
  MakeTwoCallsOnOneCredit();
  Close();
  EXPECT_EQ(Broken(), "credit.requester");
}

TEST_F(ConnectionCheckerTest, PropertiesThatAreAnsweredHoldNoCredit) {
  SayVersion(2);
  SendProperties(7);
  Say("properties.received", {{"credits", uint64_t{2}}, {"awaited", uint64_t{1}}});
  Say("properties.over", {{"how", "answered"}});
  MakeTwoCallsOnOneCredit();
  Close();
  EXPECT_EQ(Broken(), "");
}

// Version 2: properties first, then a call that is sent again behind its fence.
TEST_F(ConnectionCheckerTest, ACallThatIsSentAgainBreaksNoRule) {
  SayVersion(2);
  SendProperties(7);
  Say("properties.received", {{"credits", uint64_t{2}}, {"awaited", uint64_t{1}}});
  Say("properties.over", {{"how", "answered"}});
  Submit(1);
  Expose(1, 9);
  Send(1, 0, 1, 4);
  Say("send.done", {{"slot", uint64_t{0}}});
  RefuseAndResend(1);
  Invalidate(9);
  Expose(1, 10);
  Send(1, 0, 1, 4);
  Say("send.done", {{"slot", uint64_t{0}}});
  Reply(1, 2);
  Invalidate(10);
  Over(1);
  SayVersion(2);
  Close();
  EXPECT_EQ(Broken(), "");
}

TEST_F(ConnectionCheckerTest, ACallThatIsSentAgainWhileAnStagOfItIsValid) {
  Submit(1);
  Expose(1, 9);
  Send(1, 0, 1, 4);
  RefuseAndResend(1);
  Expose(1, 10);
  Send(1, 1, 1, 4);
  Reply(1, 2);
  Invalidate(9);
  Invalidate(10);
  Over(1);
  Close();
  EXPECT_EQ(Broken(), "fence");
}

TEST_F(ConnectionCheckerTest, ACallThatIsSentAgainWithAnotherXid) {
  Submit(1);
  Send(1, 0, 1, 4);
  RefuseAndResend(1);
  Say("call.sent", {{"call", uint64_t{1}},
                    {"xid", uint64_t{5}},
                    {"slot", uint64_t{1}},
                    {"granted", uint64_t{1}},
                    {"in_flight", uint64_t{1}},
                    {"received", uint64_t{0}}});
  Reply(1, 2);
  Over(1);
  Close();
  EXPECT_EQ(Broken(), "call.once");
}

TEST_F(ConnectionCheckerTest, ACallThatIsSentAgainBeforeItIsAnswered) {
  Submit(1);
  Send(1, 0, 1, 4);
  Say("call.resent", {{"call", uint64_t{1}}, {"xid", uint64_t{1}}});
  Over(1);
  Close();
  EXPECT_EQ(Broken(), "call.once");
}

TEST_F(ConnectionCheckerTest, AnErrorOfVersion2GrantsNothing) {
  Submit(1);
  Send(1, 0, 1, 4);
  RefuseAndResend(1, 8);
  Submit(2);
  Send(1, 1, 1, 4);
  Send(2, 2, 2, 4);
  Over(1);
  Over(2);
  Close();
  EXPECT_EQ(Broken(), "credit.requester");
}

TEST_F(ConnectionCheckerTest, PropertiesTakeACreditUntilTheyAreAnswered) {
  SendProperties(7);
  Submit(1);
  Send(1, 0, 2, 4);
  Over(1);
  Close();
  EXPECT_EQ(Broken(), "credit.requester");
}

TEST_F(ConnectionCheckerTest, AConnectionThatChangesItsVersion) {
  SayVersion(2);
  SayVersion(1);
  Close();
  EXPECT_EQ(Broken(), "version.fixed");
}

// A client that begins anew has the same name in the trace.
TEST_F(ConnectionCheckerTest, TheNextConnectionHasAVersionOfItsOwn) {
  SayVersion(2);
  Close();
  Say("established");
  SayVersion(1);
  Close();
  EXPECT_EQ(Broken(), "");
}

TEST_F(ConnectionCheckerTest, OneReadTooMany) {
  Say("read.issued", {{"in_flight", uint64_t{4}}, {"reads_max", uint64_t{4}}});
  Say("read.issued", {{"in_flight", uint64_t{5}}, {"reads_max", uint64_t{4}}});
  Close();
  EXPECT_EQ(Broken(), "read.limit");
}

TEST_F(ConnectionCheckerTest, ASendBufferFilledTwice) {
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
  Submit(1);
  Submit(2);
  SayClosed("closed at once", {}, 0);
  Over(1);
  EXPECT_EQ(Broken(), "");
}

TEST_F(ConnectionCheckerTest, AReceiveThatNeverCompleted) {
  Close(6, 3);
  EXPECT_EQ(Broken(), "conservation");
}

TEST_F(ConnectionCheckerTest, AConnectionNobodyClosed) {
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
  static constexpr uint64_t kPd = 3;
  // Of ibv_access_flags.
  static constexpr uint64_t kLocalWrite = 1;
  static constexpr uint64_t kRemoteWrite = 2;
  static constexpr uint64_t kRemoteRead = 4;
  static constexpr uint64_t kRemoteAtomic = 8;
  static constexpr uint64_t kWindowBind = 16;
  static constexpr uint64_t kAllRights = kLocalWrite | kRemoteWrite | kRemoteRead | kWindowBind;

  void Attach(uint64_t receive_pd = kPd) { Say("connection.attached", {{"pd", kPd}, {"receive_pd", receive_pd}}); }
  struct Region {
    uint64_t index = 0;
    uint64_t key = 0;
    uint64_t access = kAllRights;
    uint64_t pd = kPd;
  };
  // Of 100 bytes.
  void SayRegion(std::string_view nic, std::string_view event, const Region& region) {
    checker_.OnEvent(Instant(), nic, event,
                     {{"index", region.index},
                      {"key", region.key},
                      {"bytes", uint64_t{100}},
                      {"pd", region.pd},
                      {"access", region.access}});
  }
  // A region; its STag.
  uint64_t Allocate(uint64_t index, uint64_t key, uint64_t access = kAllRights, uint64_t pd = kPd) {
    SayRegion("a-rnic", "stag.allocated", {index, key, access, pd});
    return index << 8 | key;
  }
  void Free(uint64_t index) { SayNic("stag.freed", {{"index", index}}); }
  void AllocateWindow(uint64_t index, uint64_t pd = kPd) { SayNic("window.allocated", {{"index", index}, {"pd", pd}}); }
  struct Binding {
    uint64_t offset = 0;
    uint64_t bytes = 100;
    uint64_t access = kRemoteWrite;
  };
  void Bind(uint64_t stag, uint64_t region, const Binding& binding) {
    Say("window.bound", {{"stag", stag},
                         {"region", region},
                         {"offset", binding.offset},
                         {"bytes", binding.bytes},
                         {"access", binding.access},
                         {"type", uint64_t{2}}});
  }
  void Bind(uint64_t stag, uint64_t region) { Bind(stag, region, Binding{}); }
  void Invalidate(uint64_t stag) { Say("window.invalidated", {{"stag", stag}}); }
  // A window for the whole of a region, whose index is 4.
  static constexpr uint64_t kWindow = 0x501;
  void BindWindow() {
    AllocateWindow(5);
    Bind(kWindow, Allocate(4, 1));
  }
  void Place(std::string_view opcode, uint64_t stag, uint64_t length = 100, uint64_t offset = 0) {
    PlaceScattered(opcode, stag, length, offset, length);
  }
  // The first `run` bytes of it; PlacePart tells of the rest.
  void PlaceScattered(std::string_view opcode, uint64_t stag, uint64_t length, uint64_t offset, uint64_t run) {
    Say("record.placed", {{"opcode", opcode}, {"length", length}, {"stag", stag}, {"offset", offset}, {"run", run}});
  }
  // Writes that are not placed at once, and such that are by now.
  void Keep() { Say("placement.kept", {}); }
  void Settle(uint64_t writes = 1) { Say("placement.done", {{"writes", writes}}); }
  void PlacePart(uint64_t stag, uint64_t length, uint64_t offset = 0) {
    Say("part.placed", {{"length", length}, {"stag", stag}, {"offset", offset}});
  }
  void Respond(uint64_t stag, uint64_t length, uint64_t offset = 0) {
    Say("response.started", {{"length", length}, {"stag", stag}, {"offset", offset}});
  }
  std::string Broken() {
    if (violations_.empty()) checker_.Finish(Instant());
    return violations_.empty() ? std::string() : violations_.list().front().rule;
  }
  // The first rule that was broken, and how.
  std::string WhatIsWrong() const {
    if (violations_.empty()) return "";
    const Violation& first = violations_.list().front();
    return first.rule + ": " + first.text.substr(0, first.text.find(": "));
  }
  uint64_t posted_ = 0;
  Violations violations_;
  NicChecker checker_{&violations_};
};

// Its queue pair has a connection, and with that a protection domain.
class AttachedNicCheckerTest : public NicCheckerTest {
 protected:
  void SetUp() override { Attach(); }
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
  Allocate(5, 1);
  Free(5);
  for (uint64_t i = 0; i < 65536; ++i) {
    Allocate(100 + i, 1);
    Free(100 + i);
  }
  Allocate(5, 1);
  EXPECT_EQ(Broken(), "");
  Allocate(200, 1);
  EXPECT_EQ(Broken(), "stag.quarantine");
}

TEST_F(NicCheckerTest, ARestartedHostHasANewNic) {
  Allocate(5, 1);
  Free(5);
  checker_.OnEvent(Instant(), "a", "fabric.restored", {});
  Allocate(5, 1);
  EXPECT_EQ(Broken(), "");
}

TEST_F(NicCheckerTest, ASendThatOvertakesAWrite) {
  Keep();
  Place("Write", 0, 0);
  Settle();
  Place("Send", 0, 0);
  EXPECT_TRUE(violations_.empty());
  Keep();
  Place("Send", 0, 0);
  EXPECT_EQ(Broken(), "placement.order");
}

TEST_F(AttachedNicCheckerTest, WritesOfInfiniBandMayOvertakeOneAnother) {
  const uint64_t region = Allocate(5, 1, kRemoteWrite);
  Keep();
  for (const auto* opcode : {"Write First", "Write Middle", "Write Last", "Write Only"}) Place(opcode, region);
  Settle();
  Place("Write Last with Immediate", region);
  Place("Write Only with Immediate", region);
  Destroy({});
  EXPECT_EQ(Broken(), "");
}

TEST_F(AttachedNicCheckerTest, AWriteThatCompletesAReceiveOvertakesAWrite) {
  Keep();
  Place("Write Only with Immediate", Allocate(5, 1));
  EXPECT_EQ(WhatIsWrong(), "placement.order: 1 Writes are not in place");
}

TEST_F(NicCheckerTest, MoreWritesArePlacedThanWereKept) {
  Keep();
  Settle(2);
  EXPECT_EQ(WhatIsWrong(), "placement.order: 1 Writes were to be placed");
}

TEST_F(NicCheckerTest, MemoryDeregisteredWhileWritesAreOnTheirWay) {
  Keep();
  Free(5);
  EXPECT_EQ(Broken(), "placement.order");
}

TEST_F(NicCheckerTest, AQueuePairDestroyedWhileWritesAreOnTheirWay) {
  Keep();
  Keep();
  Settle();
  Destroy({});
  EXPECT_EQ(WhatIsWrong(), "placement.order: 1 Writes are not in place");
}

TEST_F(NicCheckerTest, AWriteThatIsPlacedWhenItsQueuePairIsGone) {
  Destroy({});
  Settle();
  EXPECT_EQ(WhatIsWrong(), "placement.order: 0 Writes were to be placed");
}

TEST_F(AttachedNicCheckerTest, AWindowInvalidatedWhileWritesAreOnTheirWay) {
  BindWindow();
  Place("Write", kWindow);
  Keep();
  Invalidate(kWindow);
  EXPECT_EQ(Broken(), "placement.order");
}

TEST_F(AttachedNicCheckerTest, PlacementsInValidMemoryBreakNoRule) {
  const uint64_t region = Allocate(5, 1);
  const uint64_t source = Allocate(7, 1, kRemoteRead);
  const uint64_t sink = Allocate(8, 1, kLocalWrite | kRemoteWrite);
  const uint64_t counter = Allocate(9, 1, kLocalWrite | kRemoteAtomic);
  AllocateWindow(6);
  Bind(0x602, region, {.offset = 50, .bytes = 50});
  Place("Write", region);
  Place("Write", region, 1, 99);
  Place("Send", sink, 7, 93);
  Place("Read Response", sink, 100);
  Place("Write", 0x602, 50);
  Place("Write", 0x999, 0);
  Place("Terminate", 0, 20);
  PlaceScattered("Immediate Data", 0, 0, 0, 0);
  PlaceScattered("Atomic Request", counter, 0, 92, 8);
  PlaceScattered("Send with Invalidate", sink, 100, 90, 10);
  PlacePart(region, 80);
  PlacePart(sink, 10, 40);
  Respond(source, 100);
  Respond(source, 1, 99);
  Respond(0, 0);
  Invalidate(0x602);
  Bind(0x603, region, {.offset = 40, .bytes = 60});
  Place("Write", 0x603, 10, 50);
  EXPECT_EQ(checker_.placements_judged(), 12u) << "without bytes no STag is looked at";
  Destroy({});
  EXPECT_EQ(Broken(), "");
}

TEST_F(AttachedNicCheckerTest, APlacementInMemoryThatWasFreed) {
  const uint64_t region = Allocate(5, 1);
  Free(5);
  Place("Write", region);
  EXPECT_EQ(WhatIsWrong(), "placement.stag: the STag is not valid");
}

TEST_F(AttachedNicCheckerTest, APlacementUnderAnotherKey) {
  Place("Write", Allocate(5, 1) + 1);
  EXPECT_EQ(WhatIsWrong(), "placement.stag: the STag is not valid");
}

TEST_F(AttachedNicCheckerTest, APlacementInMemoryOfAnotherNic) {
  SayRegion("b-rnic", "stag.allocated", {.index = 5, .key = 1});
  Place("Write", 0x501);
  EXPECT_EQ(WhatIsWrong(), "placement.stag: the STag is not valid");
}

TEST_F(AttachedNicCheckerTest, APlacementInMemoryOfAnotherDomain) {
  Place("Write", Allocate(5, 1, kAllRights, kPd + 1));
  EXPECT_EQ(WhatIsWrong(), "placement.stag: the STag is of PD 4");
}

TEST_F(AttachedNicCheckerTest, ReceivesAreOfTheDomainOfTheirQueue) {
  Attach(kPd + 1);
  Place("Send Only", Allocate(5, 1, kAllRights, kPd + 1));
  Place("Write", Allocate(6, 1));
  EXPECT_EQ(WhatIsWrong(), "");
  Place("Send Only", 0x601);
  EXPECT_EQ(WhatIsWrong(), "placement.stag: the STag is of PD 3");
}

TEST_F(AttachedNicCheckerTest, APlacementInMemoryThatMovedToAnotherDomain) {
  Allocate(5, 1);
  SayRegion("a-rnic", "stag.reregistered", {.index = 5, .key = 2, .pd = kPd + 1});
  Place("Write", 0x502);
  EXPECT_EQ(WhatIsWrong(), "placement.stag: the STag is of PD 4");
}

TEST_F(AttachedNicCheckerTest, APlacementLongerThanItsMemory) {
  Place("Read Response", Allocate(5, 1), 101);
  EXPECT_EQ(WhatIsWrong(), "placement.stag: the STag names 100 bytes");
}

TEST_F(AttachedNicCheckerTest, APlacementThatBeginsInItsMemoryAndEndsBeyond) {
  Place("Write", Allocate(5, 1), 10, 91);
  EXPECT_EQ(WhatIsWrong(), "placement.stag: the STag names 100 bytes");
}

TEST_F(AttachedNicCheckerTest, APlacementWhoseOffsetAndLengthWrapAround) {
  Place("Write", Allocate(5, 1), 10, UINT64_MAX - 4);
  EXPECT_EQ(WhatIsWrong(), "placement.stag: the STag names 100 bytes");
}

TEST_F(AttachedNicCheckerTest, APlacementInAWindowThatEndsBeyondItAndWithinItsRegion) {
  AllocateWindow(6);
  Bind(0x602, Allocate(5, 1), {.offset = 10, .bytes = 50});
  Place("Write", 0x602, 10, 41);
  EXPECT_EQ(WhatIsWrong(), "placement.stag: the STag names 50 bytes");
}

TEST_F(AttachedNicCheckerTest, APartPlacedBeyondItsMemory) {
  const uint64_t region = Allocate(5, 1);
  PlaceScattered("Send", region, 30, 0, 10);
  PlacePart(region, 20, 81);
  EXPECT_EQ(WhatIsWrong(), "placement.stag: the STag names 100 bytes");
}

TEST_F(AttachedNicCheckerTest, BytesOfARecordThatArePlacedNowhere) {
  const uint64_t region = Allocate(5, 1);
  PlaceScattered("Send", region, 30, 0, 10);
  PlacePart(region, 19);
  Place("Send", region, 1);
  EXPECT_EQ(WhatIsWrong(), "placement.stag: 1 bytes of the record before it are nowhere");
}

TEST_F(AttachedNicCheckerTest, BytesOfTheLastRecordThatArePlacedNowhere) {
  PlaceScattered("Send", Allocate(5, 1), 30, 0, 10);
  Destroy({});
  EXPECT_EQ(WhatIsWrong(), "placement.stag: 20 bytes of the record before it are nowhere");
}

TEST_F(AttachedNicCheckerTest, BytesThatArePlacedNowhereWhenTheRunEnds) {
  PlaceScattered("Send", Allocate(5, 1), 30, 0, 10);
  checker_.Finish(Instant());
  ASSERT_EQ(violations_.list().size(), 2u);
  EXPECT_EQ(violations_.list().back().text, "20 bytes of the last record of a-rnic/qp-7 are nowhere");
}

TEST_F(AttachedNicCheckerTest, ARunOfMoreBytesThanARecordHas) {
  PlaceScattered("Write", Allocate(5, 1), 30, 0, 31);
  EXPECT_EQ(WhatIsWrong(), "placement.stag: more than the record has");
}

TEST_F(AttachedNicCheckerTest, MoreBytesThanARecordHas) {
  const uint64_t region = Allocate(5, 1);
  PlaceScattered("Send", region, 30, 0, 10);
  PlacePart(region, 21);
  EXPECT_EQ(WhatIsWrong(), "placement.stag: more than the record has");
}

TEST_F(AttachedNicCheckerTest, AWriteToMemoryThatMayNotBeWrittenRemotely) {
  Place("Write", Allocate(5, 1, kLocalWrite | kRemoteRead));
  EXPECT_EQ(WhatIsWrong(), "placement.stag: the STag gives the rights 0x5, and this takes 0x2");
}

TEST_F(AttachedNicCheckerTest, AWriteOfInfiniBandToMemoryThatMayNotBeWrittenRemotely) {
  Place("Write Middle", Allocate(5, 1, kLocalWrite | kRemoteRead));
  EXPECT_EQ(WhatIsWrong(), "placement.stag: the STag gives the rights 0x5, and this takes 0x2");
}

TEST_F(AttachedNicCheckerTest, AnAtomicChangesEightBytesThatAreNoPayload) {
  const uint64_t region = Allocate(5, 1, kLocalWrite | kRemoteAtomic);
  PlaceScattered("Fetch and Add", region, 0, 92, 8);
  PlaceScattered("Compare and Swap", region, 0, 0, 8);
  PlaceScattered("Atomic Request", region, 0, 8, 8);
  Destroy({});
  EXPECT_EQ(Broken(), "");
}

TEST_F(AttachedNicCheckerTest, AnAtomicInMemoryThatAllowsNone) {
  PlaceScattered("Compare and Swap", Allocate(5, 1), 0, 0, 8);
  EXPECT_EQ(WhatIsWrong(), "placement.stag: the STag gives the rights 0x17, and this takes 0x8");
}

TEST_F(AttachedNicCheckerTest, AnAtomicWhoseBytesAreNotTold) {
  PlaceScattered("Fetch and Add", 0, 0, 0, 0);
  EXPECT_EQ(WhatIsWrong(), "placement.stag: an atomic changes 8 bytes");
}

TEST_F(AttachedNicCheckerTest, AReadIntoMemoryThatMayNotBeWrittenRemotely) {
  Place("Read Response", Allocate(5, 1, kLocalWrite));
  EXPECT_EQ(WhatIsWrong(), "placement.stag: the STag gives the rights 0x1, and this takes 0x3");
}

// An InfiniBand requester knows where its answers go, and tells nobody.
TEST_F(AttachedNicCheckerTest, AnswersOfInfiniBandGoToMemoryThatThisEndMayWrite) {
  const uint64_t sink = Allocate(5, 1, kLocalWrite);
  for (const auto* opcode : {"Read Response First", "Read Response Middle", "Read Response Last", "Read Response Only"})
    Place(opcode, sink);
  Place("Atomic Acknowledge", sink, 8);
  EXPECT_EQ(checker_.placements_judged(), 5u);
  EXPECT_EQ(WhatIsWrong(), "");
  Place("Read Response Only", Allocate(6, 1, kRemoteRead | kRemoteWrite));
  EXPECT_EQ(WhatIsWrong(), "placement.stag: the STag gives the rights 0x6, and this takes 0x1");
}

TEST_F(AttachedNicCheckerTest, ASendToMemoryThatMayNotBeWrittenLocally) {
  Place("Send", Allocate(5, 1, kRemoteRead));
  EXPECT_EQ(WhatIsWrong(), "placement.stag: the STag gives the rights 0x4, and this takes 0x1");
}

TEST_F(AttachedNicCheckerTest, AReadAnsweredFromMemoryThatMayNotBeReadRemotely) {
  Respond(Allocate(5, 1, kLocalWrite | kRemoteWrite), 1);
  EXPECT_EQ(WhatIsWrong(), "placement.stag: the STag gives the rights 0x3, and this takes 0x4");
}

TEST_F(AttachedNicCheckerTest, AWindowUsedAsTheBufferOfAReceive) {
  AllocateWindow(6);
  Bind(0x602, Allocate(5, 1), {.access = kAllRights});
  Place("Send", 0x602);
  EXPECT_EQ(WhatIsWrong(), "placement.stag: the STag gives the rights 0x17, and this takes 0x1");
}

TEST_F(AttachedNicCheckerTest, APlacementInAWindowThatWasInvalidated) {
  BindWindow();
  Invalidate(kWindow);
  Place("Write", kWindow);
  EXPECT_EQ(WhatIsWrong(), "placement.stag: the STag is not valid");
}

TEST_F(AttachedNicCheckerTest, APlacementInAWindowThatIsNotBound) {
  AllocateWindow(5);
  Place("Write", 0x500);
  EXPECT_EQ(WhatIsWrong(), "placement.stag: the STag is not valid");
}

TEST_F(AttachedNicCheckerTest, APlacementInAWindowOfAnotherQueuePair) {
  BindWindow();
  checker_.OnEvent(Instant(), "a-rnic/qp-8", "connection.attached", {{"pd", kPd}, {"receive_pd", kPd}});
  checker_.OnEvent(
      Instant(), "a-rnic/qp-8", "record.placed",
      {{"opcode", "Write"}, {"length", uint64_t{1}}, {"stag", kWindow}, {"offset", uint64_t{0}}, {"run", uint64_t{1}}});
  EXPECT_EQ(WhatIsWrong(), "placement.stag: the window belongs to a-rnic/qp-7");
}

TEST_F(AttachedNicCheckerTest, APlacementInAWindowWhoseQueuePairIsGone) {
  BindWindow();
  Destroy({});
  Attach();
  Place("Write", kWindow);
  EXPECT_EQ(WhatIsWrong(), "placement.stag: the STag is not valid");
}

TEST_F(AttachedNicCheckerTest, APlacementInAWindowWhoseRegionIsGone) {
  BindWindow();
  Free(4);
  Place("Write", kWindow);
  EXPECT_EQ(WhatIsWrong(), "placement.stag: the region of the window is not valid");
}

TEST_F(AttachedNicCheckerTest, AReadAnsweredFromMemoryThatWasFreed) {
  const uint64_t region = Allocate(5, 1);
  Free(5);
  Respond(region, 1);
  EXPECT_EQ(WhatIsWrong(), "placement.stag: the STag is not valid");
}

TEST_F(AttachedNicCheckerTest, AWindowBoundBeyondItsRegion) {
  AllocateWindow(6);
  Bind(0x602, Allocate(5, 1), {.offset = 51, .bytes = 50});
  EXPECT_EQ(WhatIsWrong(), "window.bound: the region has 100 bytes");
}

TEST_F(AttachedNicCheckerTest, AWindowWhoseOffsetAndLengthWrapAround) {
  AllocateWindow(6);
  Bind(0x602, Allocate(5, 1), {.offset = UINT64_MAX - 9, .bytes = 50});
  EXPECT_EQ(WhatIsWrong(), "window.bound: the region has 100 bytes");
}

TEST_F(AttachedNicCheckerTest, AWindowBoundToARegionThatIsGone) {
  AllocateWindow(6);
  const uint64_t region = Allocate(5, 1);
  Free(5);
  Bind(0x602, region);
  EXPECT_EQ(WhatIsWrong(), "window.bound: not a region of the PD");
}

TEST_F(AttachedNicCheckerTest, AWindowBoundToARegionUnderAnotherKey) {
  AllocateWindow(6);
  Bind(0x602, Allocate(5, 1) + 1);
  EXPECT_EQ(WhatIsWrong(), "window.bound: not a region of the PD");
}

TEST_F(AttachedNicCheckerTest, AWindowBoundToARegionOfAnotherDomain) {
  AllocateWindow(6);
  Bind(0x602, Allocate(5, 1, kAllRights, kPd + 1));
  EXPECT_EQ(WhatIsWrong(), "window.bound: not a region of the PD");
}

TEST_F(AttachedNicCheckerTest, AWindowBoundToARegionOfAnotherNic) {
  AllocateWindow(6);
  SayRegion("b-rnic", "stag.allocated", {.index = 5, .key = 1});
  Bind(0x602, 0x501);
  EXPECT_EQ(WhatIsWrong(), "window.bound: not a region of the PD");
}

TEST_F(AttachedNicCheckerTest, AWindowBoundToAWindow) {
  AllocateWindow(6);
  AllocateWindow(7);
  Bind(0x602, Allocate(5, 1));
  Bind(0x702, 0x602);
  EXPECT_EQ(WhatIsWrong(), "window.bound: not a region of the PD");
}

TEST_F(AttachedNicCheckerTest, AWindowOfAnotherDomainBound) {
  AllocateWindow(6, kPd + 1);
  Bind(0x602, Allocate(5, 1));
  EXPECT_EQ(WhatIsWrong(), "window.bound: not a window of the PD");
}

TEST_F(AttachedNicCheckerTest, ARegionBoundAsAWindow) {
  Bind(Allocate(6, 2), Allocate(5, 1));
  EXPECT_EQ(WhatIsWrong(), "window.bound: not a window of the PD");
}

TEST_F(AttachedNicCheckerTest, AWindowBoundToARegionThatAllowsNone) {
  AllocateWindow(6);
  Bind(0x602, Allocate(5, 1, kLocalWrite | kRemoteWrite));
  EXPECT_EQ(WhatIsWrong(), "window.bound: the region gives the rights 0x3");
}

TEST_F(AttachedNicCheckerTest, AWindowThatMayBeWrittenBoundToARegionThatMayNot) {
  AllocateWindow(6);
  Bind(0x602, Allocate(5, 1, kRemoteRead | kWindowBind));
  EXPECT_EQ(WhatIsWrong(), "window.bound: the region gives the rights 0x14");
}

struct Told {
  std::string_view component;
  std::string_view event;
  std::vector<TraceFact> facts;  // those that a rule asks for
};

constexpr size_t kMostFacts = 6;

template <size_t... kEach>
void SayAll(NicChecker& checker, const Told& told, const std::array<TraceFact, kMostFacts>& facts,
            std::index_sequence<kEach...>) {
  checker.OnEvent(Instant(), told.component, told.event, {facts[kEach]...});
}

// The violations of a history in which the event at `at` does not tell `dropped`.
std::vector<Violation> JudgeWithout(const std::vector<Told>& history, size_t at, std::string_view dropped) {
  Violations violations;
  NicChecker checker(&violations);
  for (size_t i = 0; i < history.size(); ++i) {
    std::array<TraceFact, kMostFacts> facts;
    facts.fill({"of no interest", uint64_t{0}});
    std::copy(history[i].facts.begin(), history[i].facts.end(), facts.begin());
    for (TraceFact& fact : facts) {
      if (i == at && fact.key == dropped) fact.key = "something else";
    }
    SayAll(checker, history[i], facts, std::make_index_sequence<kMostFacts>());
  }
  checker.Finish(Instant());
  return violations.list();
}

TEST(NicCheckerFacts, EachThatARuleAsksForIsMissed) {
  constexpr std::string_view kNic = "a-rnic";
  constexpr std::string_view kQp = "a-rnic/qp-7";
  constexpr uint64_t kPd = 3;
  constexpr uint64_t kRights = 0x17;
  const auto number = [](uint64_t value) { return value; };
  const std::vector<Told> history = {
      {kQp, "connection.attached", {{"pd", kPd}, {"receive_pd", kPd}}},
      {kNic,
       "stag.allocated",
       {{"index", number(5)}, {"key", number(1)}, {"bytes", number(100)}, {"pd", kPd}, {"access", kRights}}},
      {kNic, "window.allocated", {{"index", number(6)}, {"pd", kPd}}},
      {kQp, "work.posted", {{"number", number(0)}, {"signaled", number(1)}}},
      {kQp, "send.completed", {{"number", number(0)}, {"status", "success"}}},
      {kQp, "receive.completed", {{"number", number(0)}}},
      {kQp,
       "window.bound",
       {{"stag", number(0x602)},
        {"region", number(0x501)},
        {"offset", number(0)},
        {"bytes", number(100)},
        {"access", number(2)},
        {"type", number(2)}}},
      {kQp, "placement.kept", {}},
      {kQp, "placement.done", {{"writes", number(1)}}},
      {kQp,
       "record.placed",
       {{"opcode", "Send"},
        {"length", number(30)},
        {"stag", number(0x501)},
        {"offset", number(0)},
        {"run", number(10)}}},
      {kQp, "part.placed", {{"length", number(20)}, {"stag", number(0x501)}, {"offset", number(10)}}},
      {kQp, "response.started", {{"length", number(1)}, {"stag", number(0x501)}, {"offset", number(0)}}},
      {kQp, "window.invalidated", {{"stag", number(0x602)}}},
      {kNic,
       "stag.reregistered",
       {{"index", number(5)}, {"key", number(2)}, {"bytes", number(100)}, {"pd", kPd}, {"access", kRights}}},
      {kQp,
       "qp.destroyed",
       {{"sends_posted", number(1)},
        {"sends_outstanding", number(0)},
        {"sends_held", number(0)},
        {"receives_posted", number(1)},
        {"receives_outstanding", number(0)}}},
      {kNic, "stag.freed", {{"index", number(5)}}},
  };
  EXPECT_TRUE(JudgeWithout(history, 0, "").empty()) << "of itself it breaks no rule";
  size_t dropped = 0;
  for (size_t i = 0; i < history.size(); ++i) {
    const Told& told = history[i];
    for (const TraceFact& fact : told.facts) {
      ++dropped;
      const std::string expected = std::string(told.component) + " " + std::string(told.event) + " does not tell \"" +
                                   std::string(fact.key) + "\"";
      const std::vector<Violation> violations = JudgeWithout(history, i, fact.key);
      const bool missed = std::any_of(violations.begin(), violations.end(), [&](const Violation& violation) {
        return violation.rule == "trace.facts" && violation.text == expected;
      });
      EXPECT_TRUE(missed) << expected;
    }
  }
  EXPECT_EQ(dropped, 44u);
}

TEST_F(NicCheckerTest, ANumberThatIsToldAsAWord) {
  SayNic("stag.freed", {{"index", "5"}});
  EXPECT_EQ(WhatIsWrong(), "trace.facts: a-rnic stag.freed does not tell \"index\"");
}

TEST_F(NicCheckerTest, AReceiveLost) {
  Say("receive.completed", {{"number", uint64_t{0}}});
  Destroy({.receives_posted = 5, .receives_outstanding = 3});
  EXPECT_EQ(Broken(), "completion.lost");
}

}  // namespace
}  // namespace stagecoach::scenario
