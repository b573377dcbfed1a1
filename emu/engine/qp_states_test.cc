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

QpState State(size_t i) {
  return static_cast<QpState>(i);
}
QpEvent Event(size_t i) {
  return static_cast<QpEvent>(i);
}

std::string PrintTable() {
  std::ostringstream out;
  for (size_t s = 0; s < kQpStateCount; ++s) {
    const QpStateRules rules = RulesOf(State(s));
    out << ToString(State(s)) << ": post send " << ToString(rules.post_send) << ", post receive "
        << ToString(rules.post_receive) << ", " << (rules.receiving ? "receiving" : "not receiving") << "\n";
    for (size_t v = 0; v < kQpEventCount; ++v) {
      out << "  " << ToString(Event(v)) << " -> ";
      const QpTransition* row = FindQpTransition(State(s), Event(v));
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
  EXPECT_EQ(PrintTable(), expected.str());
}

TEST(QpStates, NoStateHasTwoRowsForOneEvent) {
  for (const QpTransition& row : QpTransitions()) {
    EXPECT_EQ(FindQpTransition(row.from, row.event), &row) << ToString(row.from) << " " << ToString(row.event);
  }
}

TEST(QpStates, ModifyRowsLeadToTheStateThatWasAskedForAndOthersNeedNoAttributes) {
  for (const QpTransition& row : QpTransitions()) {
    if (static_cast<size_t>(row.event) < kQpStateCount) {
      EXPECT_EQ(row.event, ModifyEvent(row.to));
    } else {
      EXPECT_EQ(row.required | row.optional, 0u);
    }
    EXPECT_EQ(row.required & row.optional, 0u);
  }
}

TEST(QpStates, EveryWayIntoTheErrorStateFlushesBothQueues) {
  for (const QpTransition& row : QpTransitions()) {
    if (row.to != QpState::kErr || row.from == QpState::kErr) continue;
    EXPECT_TRUE(row.effects & qp_effect::kFlushSends) << ToString(row.from) << " " << ToString(row.event);
    EXPECT_TRUE(row.effects & qp_effect::kFlushReceives) << ToString(row.from) << " " << ToString(row.event);
  }
}

TEST(QpStates, EveryStateWithAStreamGivesItUpOnLeaving) {
  for (const QpTransition& row : QpTransitions()) {
    if (!RulesOf(row.from).receiving || RulesOf(row.to).receiving) continue;
    EXPECT_TRUE(row.effects & (qp_effect::kCloseStream | qp_effect::kSendTerminate))
        << ToString(row.from) << " " << ToString(row.event);
  }
}

TEST(QpStates, TheManualsWayToReadyToSendIsAccepted) {
  const auto init = CheckQpModify(QpState::kReset, QpState::kInit, {}, kInitMask);
  ASSERT_TRUE(init.has_value());
  EXPECT_EQ((*init)->to, QpState::kInit);
  const auto rtr = CheckQpModify(QpState::kInit, QpState::kRtr, {}, kRtrMask);
  ASSERT_TRUE(rtr.has_value());
  const auto rts = CheckQpModify(QpState::kRtr, QpState::kRts, {}, kRtsMask);
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
      const auto result = CheckQpModify(step.from, step.to, {}, step.mask & ~bit);
      ASSERT_FALSE(result.has_value()) << QpAttributesToString(bit);
      EXPECT_EQ(result.error().kind, QpModifyFaultKind::kMissingAttributes);
      EXPECT_EQ(result.error().attributes, bit);
    }
  }
}

TEST(QpStates, AttributesThatMeanNothingInATransitionAreForbidden) {
  const auto qkey = CheckQpModify(QpState::kReset, QpState::kInit, {}, kInitMask | a::kQkey);
  ASSERT_FALSE(qkey.has_value());
  EXPECT_EQ(qkey.error().kind, QpModifyFaultKind::kForbiddenAttributes);
  EXPECT_EQ(qkey.error().attributes, a::kQkey);
  const auto unknown_bit = CheckQpModify(QpState::kRts, QpState::kErr, {}, a::kState | 1u << 30);
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
    const auto result = CheckQpModify(from, to, {}, a::kState);
    ASSERT_FALSE(result.has_value()) << ToString(from) << " to " << ToString(to);
    EXPECT_EQ(result.error().kind, QpModifyFaultKind::kNoTransition);
  }
}

TEST(QpStates, AWrongIdeaOfTheCurrentStateIsRefused) {
  const auto wrong = CheckQpModify(QpState::kRts, QpState::kRts, QpState::kSqd, a::kState | a::kCurState);
  ASSERT_FALSE(wrong.has_value());
  EXPECT_EQ(wrong.error().kind, QpModifyFaultKind::kWrongCurrentState);
  EXPECT_TRUE(CheckQpModify(QpState::kRts, QpState::kRts, QpState::kRts, a::kState | a::kCurState).has_value());
}

TEST(QpStates, WithoutTheStateBitAttributesChangeInPlace) {
  const auto result = CheckQpModify(QpState::kRts, QpState::kReset, {}, a::kMinRnrTimer);
  ASSERT_TRUE(result.has_value());
  EXPECT_EQ((*result)->to, QpState::kRts);
  EXPECT_FALSE(CheckQpModify(QpState::kRtr, QpState::kReset, {}, a::kMinRnrTimer).has_value());
}

TEST(QpStates, AStateNumberThatIsNoneIsRefused) {
  for (int number : {7, 100, 255}) {
    EXPECT_FALSE(CheckQpModify(QpState::kRts, static_cast<QpState>(number), {}, a::kState).has_value());
  }
}

}  // namespace
}  // namespace stagecoach::emu
