#include "emu/engine/qp_states.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

namespace stagecoach::emu {
namespace {

namespace a = qp_attr;

constexpr uint32_t kInitMask = a::kState | a::kPkeyIndex | a::kPort | a::kAccessFlags;
constexpr uint32_t kRtrMask =
    a::kState | a::kAv | a::kPathMtu | a::kDestQpn | a::kRqPsn | a::kMaxDestRdAtomic | a::kMinRnrTimer;
constexpr uint32_t kRtsMask = a::kState | a::kTimeout | a::kRetryCnt | a::kRnrRetry | a::kSqPsn | a::kMaxQpRdAtomic;

constexpr QpKind kKinds[] = {QpKind::kIwarp, QpKind::kRc, QpKind::kUc, QpKind::kUd};

QpState State(size_t i) {
  return static_cast<QpState>(i);
}
QpEvent Event(size_t i) {
  return static_cast<QpEvent>(i);
}

std::string PrintTable(QpKind kind) {
  std::ostringstream out;
  out << "=== " << ToString(kind) << " ===\n";
  for (size_t s = 0; s < kQpStateCount; ++s) {
    const QpStateRules rules = RulesOf(State(s));
    out << ToString(State(s)) << ": post send " << ToString(rules.post_send) << ", post receive "
        << ToString(rules.post_receive) << ", " << (rules.receiving ? "receiving" : "not receiving") << "\n";
    for (size_t v = 0; v < kQpEventCount; ++v) {
      out << "  " << ToString(Event(v)) << " -> ";
      const QpTransition* row = FindQpTransition(kind, State(s), Event(v));
      if (row == nullptr) {
        out << (v < kQpStateCount ? "refused\n" : "ignored\n");
        continue;
      }
      out << ToString(row->to);
      if (row->required != 0) out << "; required " << QpAttributesToString(row->required);
      if (row->optional != 0) out << "; optional " << QpAttributesToString(row->optional);
      if (row->effects != 0) out << "; " << QpEffectsToString(row->effects);
      out << "\n";
    }
  }
  return out.str();
}

// On a mismatch the whole table is printed: check the change, then paste it into the file.
TEST(QpStates, EveryStateAndEventIsAsTheSnapshotSays) {
  std::ifstream file("emu/engine/qp_states.golden.txt");
  ASSERT_TRUE(file.is_open());
  std::stringstream expected;
  expected << file.rdbuf();
  std::string tables;
  for (const QpKind kind : kKinds) tables += PrintTable(kind);
  EXPECT_EQ(tables, expected.str());
}

TEST(QpStates, NoStateHasTwoRowsForOneEvent) {
  for (const QpKind kind : kKinds) {
    for (const QpTransition& row : QpTransitions(kind)) {
      EXPECT_EQ(FindQpTransition(kind, row.from, row.event), &row) << ToString(row.from) << " " << ToString(row.event);
    }
  }
}

TEST(QpStates, ModifyRowsLeadToTheStateThatWasAskedForAndOthersNeedNoAttributes) {
  for (const QpKind kind : kKinds) {
    for (const QpTransition& row : QpTransitions(kind)) {
      if (static_cast<size_t>(row.event) < kQpStateCount) {
        EXPECT_EQ(row.event, ModifyEvent(row.to));
      } else {
        EXPECT_EQ(row.required | row.optional, 0u);
      }
      EXPECT_EQ(row.required & row.optional, 0u);
    }
  }
}

TEST(QpStates, EveryWayIntoTheErrorStateFlushesBothQueues) {
  for (const QpKind kind : kKinds) {
    for (const QpTransition& row : QpTransitions(kind)) {
      if (row.to != QpState::kErr || row.from == QpState::kErr) continue;
      EXPECT_TRUE(row.effects & qp_effect::kFlushSends) << ToString(row.from) << " " << ToString(row.event);
      EXPECT_TRUE(row.effects & qp_effect::kFlushReceives) << ToString(row.from) << " " << ToString(row.event);
    }
  }
}

TEST(QpStates, EveryStateWithAStreamGivesItUpOnLeaving) {
  for (const QpTransition& row : QpTransitions(QpKind::kIwarp)) {
    if (!RulesOf(row.from).receiving || RulesOf(row.to).receiving) continue;
    EXPECT_TRUE(row.effects & (qp_effect::kCloseStream | qp_effect::kSendTerminate))
        << ToString(row.from) << " " << ToString(row.event);
  }
}

TEST(QpStates, TheManualsWayToReadyToSendIsAccepted) {
  const auto init = CheckQpModify(QpKind::kRc, QpState::kReset, QpState::kInit, {}, kInitMask);
  ASSERT_TRUE(init.has_value());
  EXPECT_EQ((*init)->to, QpState::kInit);
  const auto rtr = CheckQpModify(QpKind::kRc, QpState::kInit, QpState::kRtr, {}, kRtrMask);
  ASSERT_TRUE(rtr.has_value());
  const auto rts = CheckQpModify(QpKind::kRc, QpState::kRtr, QpState::kRts, {}, kRtsMask);
  ASSERT_TRUE(rts.has_value());
  EXPECT_EQ((*rts)->to, QpState::kRts);
}

TEST(QpStates, EachRequiredAttributeIsMissedWhenItIsAbsent) {
  const struct {
    QpState from, to;
    uint32_t mask;
  } kSteps[] = {{QpState::kReset, QpState::kInit, kInitMask},
                {QpState::kInit, QpState::kRtr, kRtrMask},
                {QpState::kRtr, QpState::kRts, kRtsMask}};
  for (const auto& step : kSteps) {
    for (uint32_t bit = 1; bit <= a::kRateLimit; bit <<= 1) {
      if (bit == a::kState || (step.mask & bit) == 0) continue;
      const auto result = CheckQpModify(QpKind::kRc, step.from, step.to, {}, step.mask & ~bit);
      ASSERT_FALSE(result.has_value()) << QpAttributesToString(bit);
      EXPECT_EQ(result.error().kind, QpModifyFaultKind::kMissingAttributes);
      EXPECT_EQ(result.error().attributes, bit);
    }
  }
}

TEST(QpStates, AttributesThatMeanNothingInATransitionAreForbidden) {
  const auto qkey = CheckQpModify(QpKind::kRc, QpState::kReset, QpState::kInit, {}, kInitMask | a::kQkey);
  ASSERT_FALSE(qkey.has_value());
  EXPECT_EQ(qkey.error().kind, QpModifyFaultKind::kForbiddenAttributes);
  EXPECT_EQ(qkey.error().attributes, a::kQkey);
  const auto unknown_bit = CheckQpModify(QpKind::kRc, QpState::kRts, QpState::kErr, {}, a::kState | 1u << 30);
  ASSERT_FALSE(unknown_bit.has_value());
  EXPECT_EQ(unknown_bit.error().attributes, 1u << 30);
}

TEST(QpStates, SkippingAStateIsRefused) {
  for (const auto& [from, to] : {std::pair{QpState::kReset, QpState::kRts},
                                 {QpState::kReset, QpState::kRtr},
                                 {QpState::kInit, QpState::kRts},
                                 {QpState::kRts, QpState::kInit},
                                 {QpState::kErr, QpState::kRts},
                                 {QpState::kRts, QpState::kSqe},
                                 {QpState::kReset, QpState::kErr}}) {
    const auto result = CheckQpModify(QpKind::kRc, from, to, {}, a::kState);
    ASSERT_FALSE(result.has_value()) << ToString(from) << " to " << ToString(to);
    EXPECT_EQ(result.error().kind, QpModifyFaultKind::kNoTransition);
  }
}

TEST(QpStates, AWrongIdeaOfTheCurrentStateIsRefused) {
  const auto wrong = CheckQpModify(QpKind::kRc, QpState::kRts, QpState::kRts, QpState::kSqd, a::kState | a::kCurState);
  ASSERT_FALSE(wrong.has_value());
  EXPECT_EQ(wrong.error().kind, QpModifyFaultKind::kWrongCurrentState);
  EXPECT_TRUE(
      CheckQpModify(QpKind::kRc, QpState::kRts, QpState::kRts, QpState::kRts, a::kState | a::kCurState).has_value());
}

TEST(QpStates, WithoutTheStateBitAttributesChangeInPlace) {
  const auto result = CheckQpModify(QpKind::kRc, QpState::kRts, QpState::kReset, {}, a::kMinRnrTimer);
  ASSERT_TRUE(result.has_value());
  EXPECT_EQ((*result)->to, QpState::kRts);
  EXPECT_FALSE(CheckQpModify(QpKind::kRc, QpState::kRtr, QpState::kReset, {}, a::kMinRnrTimer).has_value());
}

TEST(QpStates, AStateNumberThatIsNoneIsRefused) {
  for (int number : {7, 100, 255}) {
    EXPECT_FALSE(CheckQpModify(QpKind::kRc, QpState::kRts, static_cast<QpState>(number), {}, a::kState).has_value());
  }
}

// The columns of ib_core's table for UC, which is what programs are written against.
TEST(QpStates, UnreliableConnectionsNeedLessAndAllowLess) {
  constexpr uint32_t kUcRtrMask = a::kState | a::kAv | a::kPathMtu | a::kDestQpn | a::kRqPsn;
  constexpr uint32_t kUcRtsMask = a::kState | a::kSqPsn;
  const struct {
    QpState from, to;
    uint32_t required;
  } kSteps[] = {{QpState::kReset, QpState::kInit, kInitMask}, {QpState::kInit, QpState::kRtr, kUcRtrMask},
                {QpState::kRtr, QpState::kRts, kUcRtsMask},   {QpState::kRts, QpState::kSqd, a::kState},
                {QpState::kSqd, QpState::kRts, a::kState},    {QpState::kSqe, QpState::kRts, a::kState}};
  for (const auto& step : kSteps) {
    EXPECT_TRUE(CheckQpModify(QpKind::kUc, step.from, step.to, {}, step.required).has_value()) << ToString(step.to);
    for (const uint32_t reliable :
         {a::kTimeout, a::kRetryCnt, a::kRnrRetry, a::kMinRnrTimer, a::kMaxQpRdAtomic, a::kMaxDestRdAtomic, a::kQkey}) {
      const auto refused = CheckQpModify(QpKind::kUc, step.from, step.to, {}, step.required | reliable);
      ASSERT_FALSE(refused.has_value()) << ToString(step.to) << " with " << QpAttributesToString(reliable);
      EXPECT_EQ(refused.error().kind, QpModifyFaultKind::kForbiddenAttributes);
    }
  }
  const auto missing = CheckQpModify(QpKind::kUc, QpState::kInit, QpState::kRtr, {}, kUcRtrMask & ~a::kRqPsn);
  ASSERT_FALSE(missing.has_value());
  EXPECT_EQ(missing.error().attributes, a::kRqPsn);
}

TEST(QpStates, AFailedSendStopsTheSendQueueOfUcAloneAndRtsIsTheWayOut) {
  const QpTransition* const failed = FindQpTransition(QpKind::kUc, QpState::kRts, QpEvent::kSendFault);
  ASSERT_NE(failed, nullptr);
  EXPECT_EQ(failed->to, QpState::kSqe);
  EXPECT_EQ(failed->effects, qp_effect::kFlushSends);
  EXPECT_TRUE(RulesOf(QpState::kSqe).receiving);
  EXPECT_EQ(FindQpTransition(QpKind::kRc, QpState::kRts, QpEvent::kSendFault), nullptr);
  EXPECT_FALSE(CheckQpModify(QpKind::kRc, QpState::kSqe, QpState::kRts, {}, a::kState).has_value());
}

// The columns of ib_core's table for UD.
TEST(QpStates, DatagramsNeedAKeyAndNoPeer) {
  constexpr uint32_t kUdInitMask = a::kState | a::kPkeyIndex | a::kPort | a::kQkey;
  constexpr uint32_t kQkeyAndCurrent = a::kQkey | a::kCurState;
  const struct {
    QpState from, to;
    uint32_t required;
    uint32_t optional;
  } kSteps[] = {{QpState::kReset, QpState::kInit, kUdInitMask, 0},
                {QpState::kInit, QpState::kInit, a::kState, a::kPkeyIndex | a::kPort | a::kQkey},
                {QpState::kInit, QpState::kRtr, a::kState, a::kPkeyIndex | a::kQkey},
                {QpState::kRtr, QpState::kRts, a::kState | a::kSqPsn, kQkeyAndCurrent},
                {QpState::kRts, QpState::kRts, a::kState, kQkeyAndCurrent},
                {QpState::kRts, QpState::kSqd, a::kState, a::kEnSqdAsyncNotify},
                {QpState::kSqd, QpState::kRts, a::kState, kQkeyAndCurrent},
                {QpState::kSqd, QpState::kSqd, a::kState, a::kPkeyIndex | a::kQkey},
                {QpState::kSqe, QpState::kRts, a::kState, kQkeyAndCurrent}};
  for (const auto& step : kSteps) {
    const std::string name = std::string(ToString(step.from)) + " to " + ToString(step.to);
    for (uint32_t bit = 2; bit <= a::kRateLimit; bit <<= 1) {
      const bool required = (step.required & bit) != 0;
      const bool allowed = required || (step.optional & bit) != 0;
      const auto with = CheckQpModify(QpKind::kUd, step.from, step.to, step.from, step.required | bit);
      EXPECT_EQ(with.has_value(), allowed) << name << " with " << QpAttributesToString(bit);
      if (!required) continue;
      const auto without = CheckQpModify(QpKind::kUd, step.from, step.to, step.from, step.required & ~bit);
      EXPECT_FALSE(without.has_value()) << name << " without " << QpAttributesToString(bit);
    }
  }
  EXPECT_EQ(FindQpTransition(QpKind::kUd, QpState::kRtr, QpEvent::kFirstMessage), nullptr);
  EXPECT_EQ(FindQpTransition(QpKind::kUd, QpState::kRts, QpEvent::kProtectionFault), nullptr);
  EXPECT_EQ(FindQpTransition(QpKind::kUd, QpState::kRts, QpEvent::kSendFault)->to, QpState::kSqe);
}

TEST(QpStates, NothingOfAStreamHappensToAnInfinibandQp) {
  for (const QpKind kind : {QpKind::kRc, QpKind::kUc, QpKind::kUd}) {
    for (const QpTransition& row : QpTransitions(kind)) {
      EXPECT_EQ(row.effects & (qp_effect::kCloseStream | qp_effect::kSendTerminate), 0)
          << ToString(row.from) << " " << ToString(row.event);
      EXPECT_TRUE(row.event != QpEvent::kConnected && row.event != QpEvent::kStreamLost &&
                  row.event != QpEvent::kPeerClosed && row.event != QpEvent::kTerminateReceived);
    }
  }
}

}  // namespace
}  // namespace stagecoach::emu
