#include "scenarios/runner/evidence.h"

#include <gtest/gtest.h>

namespace stagecoach::scenario {
namespace {

class EvidenceTest : public ::testing::Test {
 protected:
  void Say(std::string_view component, std::string_view event, std::initializer_list<TraceFact> facts = {}) {
    evidence_.OnEvent(Instant() + Duration(++now_), component, event, facts);
  }
  // The connection "c/1" of the host b has queue pair 2.
  void Establish() {
    Say("b-rnic/qp-2", "connection.attached");
    Say("c/1", "established", {{"qp", uint64_t{2}}});
  }

  int now_ = 0;
  Evidence evidence_;
};

TEST_F(EvidenceTest, ATerminateIsAFaultWhoeverSendsIt) {
  Establish();
  EXPECT_FALSE(evidence_.Of("b", "c/1").IsFault());
  Say("b-rnic/qp-3", "terminate.raised");
  Say("a-rnic/qp-2", "terminate.raised");
  EXPECT_FALSE(evidence_.Of("b", "c/1").IsFault()) << "of others";
  Say("b-rnic/qp-2", "terminate.received");
  EXPECT_TRUE(evidence_.Of("b", "c/1").IsFault());
  Say("b-rnic/qp-2", "connection.attached");
  EXPECT_FALSE(evidence_.Of("b", "c/1").IsFault()) << "the NIC of a host that was started again counts from the start";
  Say("b-rnic/qp-2", "terminate.raised");
  EXPECT_TRUE(evidence_.Of("b", "c/1").terminated);
}

TEST_F(EvidenceTest, MemoryThatCannotBeReadIsAFault) {
  Establish();
  Say("b-rnic/qp-2", "tx.memory_fault", {{"fault", "stale STag"}});
  EXPECT_TRUE(evidence_.Of("b", "c/1").terminated);
}

TEST_F(EvidenceTest, ARefusalIsAFaultAndAWishToHavePacketsAgainIsNone) {
  Establish();
  Say("b-rnic/qp-2", "carrier.up");
  for (const uint64_t syndrome : {0x60u, 0x2cu, 0x20u}) Say("b-rnic/qp-2", "nak.raised", {{"syndrome", syndrome}});
  EXPECT_FALSE(evidence_.Of("b", "c/1").IsFault());
  Say("b-rnic/qp-2", "nak.raised", {{"syndrome", uint64_t{0x62}}});
  EXPECT_TRUE(evidence_.Of("b", "c/1").terminated);
}

TEST_F(EvidenceTest, OnInfinibandAReceiveThatFailsFindsFaultWithThePeer) {
  Establish();
  Say("b-rnic/qp-2", "carrier.up");
  Say("b-rnic/qp-2", "receive.completed", {{"status", "flushed"}});
  EXPECT_FALSE(evidence_.Of("b", "c/1").terminated);
  Say("b-rnic/qp-2", "receive.completed", {{"status", "remote invalid request"}});
  EXPECT_TRUE(evidence_.Of("b", "c/1").terminated);
  EXPECT_TRUE(evidence_.Of("b", "c/1").work_failed);
}

TEST_F(EvidenceTest, OnInfinibandMemoryThatCannotBeReadMayHaveBeenSentAlready) {
  Establish();
  Say("b-rnic/qp-2", "carrier.up");
  Say("b-rnic/qp-2", "tx.memory_fault", {{"fault", "stale STag"}});
  EXPECT_FALSE(evidence_.Of("b", "c/1").IsFault());
}

TEST_F(EvidenceTest, SilenceIsNoFault) {
  Establish();
  Say("b-rnic/qp-2", "send.completed", {{"status", "retries exceeded"}});
  EXPECT_FALSE(evidence_.Of("b", "c/1").IsFault());
  Say("b-rnic/qp-2", "send.completed", {{"status", "RNR retries exceeded"}});
  EXPECT_TRUE(evidence_.Of("b", "c/1").work_failed) << "each end posts as many Receives as it grants";
}

TEST_F(EvidenceTest, WorkThatFailsIsAFaultAndWorkThatIsFlushedIsNone) {
  Establish();
  Say("b-rnic/qp-2", "send.completed", {{"status", "success"}});
  Say("b-rnic/qp-2", "receive.completed", {{"status", "flushed"}});
  EXPECT_FALSE(evidence_.Of("b", "c/1").IsFault());
  Say("b-rnic/qp-2", "send.completed", {{"status", "local protection error"}});
  EXPECT_TRUE(evidence_.Of("b", "c/1").work_failed);
}

TEST_F(EvidenceTest, TellsWhatBefellCalls) {
  Establish();
  Say("b-rnic/qp-2", "window.invalidated", {{"by", "work request"}});
  EXPECT_FALSE(evidence_.Of("b", "c/1").window_invalidated);
  Say("b-rnic/qp-2", "window.invalidated", {{"by", "peer"}});
  EXPECT_TRUE(evidence_.Of("b", "c/1").window_invalidated);
  Say("c/1", "reply.ignored", {{"why", "unknown_xid"}});
  Say("c/1", "reply.ignored", {{"why", "cancelled"}});
  EXPECT_EQ(evidence_.Of("b", "c/1").cancelled_replies, 1u);
  EXPECT_FALSE(evidence_.Of("b", "c/1").call_timed_out);
  Say("c/1", "call.timed_out");
  EXPECT_TRUE(evidence_.Of("b", "c/1").call_timed_out);
  EXPECT_FALSE(evidence_.Of("b", "c/2").call_timed_out);
}

TEST_F(EvidenceTest, KnowsWhenADeviceFailedARegistration) {
  EXPECT_FALSE(evidence_.LastFailedRegistration("b").has_value());
  Say("b-rnic", "registration.failed");
  Say("b-rnic", "registration.failed");
  EXPECT_EQ(evidence_.LastFailedRegistration("b"), Instant() + Duration(2));
  EXPECT_FALSE(evidence_.LastFailedRegistration("a").has_value());
}

TEST_F(EvidenceTest, KnowsWhenAServiceHadWaitedLongEnoughForAReplyToBeRead) {
  EXPECT_FALSE(evidence_.LastUnreadReply("a").has_value());
  Say("a/server-1/3", "exposure.expired", {{"exposed", uint64_t{1}}, {"withheld", uint64_t{0}}});
  EXPECT_EQ(evidence_.LastUnreadReply("a"), Instant() + Duration(1));
  EXPECT_FALSE(evidence_.LastUnreadReply("b").has_value());
}

TEST_F(EvidenceTest, KnowsWhenAListenerTurnedSomebodyAwayForWantOfRoom) {
  Say("a-rnic/cm", "request.refused", {{"id", uint64_t{4}}, {"why", "nobody listens any more"}});
  EXPECT_FALSE(evidence_.LastTurnedAway("a").has_value());
  Say("a-rnic/cm", "request.refused", {{"id", uint64_t{5}}, {"why", "the backlog is full"}});
  EXPECT_EQ(evidence_.LastTurnedAway("a"), Instant() + Duration(2));
  EXPECT_FALSE(evidence_.LastTurnedAway("b").has_value());
}

TEST_F(EvidenceTest, ARecordThatWentForRoomIsKnownByItsCacheAndXid) {
  Say("a/server-1/replay", "replay.evicted", {{"xid", uint64_t{7}}, {"why", "all records"}});
  EXPECT_EQ(evidence_.LastEvicted("a/server-1/replay", 7), Instant() + Duration(1));
  EXPECT_EQ(evidence_.LastEvicted("a/server-1/replay", 8), std::nullopt);
  EXPECT_EQ(evidence_.LastEvicted("a/server-2/replay", 7), std::nullopt);
}

}  // namespace
}  // namespace stagecoach::scenario
