#include "emu/inject/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <new>
#include <string>
#include <utility>
#include <vector>

namespace stagecoach::emu {
namespace {

using Numbers = std::vector<uint64_t>;

std::shared_ptr<InjectionPlan> Plan(const std::string& text, InjectionPlan::Listener listener = {}) {
  auto rules = ParseInjectionRules(text);
  EXPECT_TRUE(rules.has_value()) << text;
  return InjectionPlan::Make(std::move(*rules), std::move(listener));
}

SegmentFacts Whole(MessageKind kind = MessageKind::kSend) {
  return {.kind = kind};
}
SegmentFacts Part(MessageKind kind, bool ends) {
  return {.kind = kind, .ends = ends};
}
SegmentFacts Packet(uint32_t psn, bool begins = true, bool ends = true, MessageKind kind = MessageKind::kSend,
                    uint32_t count = 1) {
  return {.kind = kind, .ends = ends, .packet = SegmentFacts::Packet{psn & 0xffffff, count, begins}};
}

// Which of `count` whole messages, sent one after the other, have the only rule fire.
Numbers FiresAt(ConnectionInjections& injections, uint64_t count,
                InjectionDirection direction = InjectionDirection::kSent) {
  Numbers fired;
  for (uint64_t i = 1; i <= count; ++i) {
    injections.Judge(direction, Whole());
    if (!injections.fired().empty()) fired.push_back(i);
  }
  return fired;
}
Numbers FiresAt(const std::string& rule, uint64_t count) {
  const auto plan = Plan(rule);
  return FiresAt(*plan->NewConnection(), count);
}

TEST(InjectionPlan, CountsMessagesFromOne) {
  EXPECT_EQ(FiresAt("delay=1ms message=3", 6), (Numbers{3}));
  EXPECT_EQ(FiresAt("delay=1ms message=3..4", 6), (Numbers{3, 4}));
  EXPECT_EQ(FiresAt("delay=1ms message=5..", 6), (Numbers{5, 6}));
  EXPECT_EQ(FiresAt("delay=1ms every=2", 6), (Numbers{2, 4, 6}));
  EXPECT_EQ(FiresAt("delay=1ms message=2.. every=2", 6), (Numbers{3, 5}));
  EXPECT_EQ(FiresAt("delay=1ms times=2", 6), (Numbers{1, 2}));
}

TEST(InjectionPlan, EachConnectionAndDirectionCountsByItself) {
  const auto plan = Plan("drop message=2");
  const auto one = plan->NewConnection();
  const auto two = plan->NewConnection();
  one->Judge(InjectionDirection::kSent, Whole());
  two->Judge(InjectionDirection::kSent, Whole());
  one->Judge(InjectionDirection::kReceived, Whole());
  EXPECT_EQ(plan->counters(0).fired, 0u);
  EXPECT_EQ(one->Judge(InjectionDirection::kReceived, Whole()).action, InjectionAction::kDrop);
  EXPECT_EQ(ToString(one->fired().at(0)), "rule 'drop message=2' fired: connection 1, message 2 received (send)");
  EXPECT_EQ(two->Judge(InjectionDirection::kSent, Whole()).action, InjectionAction::kDrop);
  EXPECT_EQ(ToString(two->fired().at(0)), "rule 'drop message=2' fired: connection 2, message 2 sent (send)");
}

TEST(InjectionPlan, RulesThatNameKindsCountThoseAlone) {
  const auto plan = Plan("delay=1ms message=2 kind=write,read");
  const auto injections = plan->NewConnection();
  const auto fires = [&](MessageKind kind) {
    injections->Judge(InjectionDirection::kSent, Whole(kind));
    return !injections->fired().empty();
  };
  EXPECT_FALSE(fires(MessageKind::kWrite));
  EXPECT_FALSE(fires(MessageKind::kSend));
  EXPECT_FALSE(fires(MessageKind::kSend));
  EXPECT_TRUE(fires(MessageKind::kRead));
  EXPECT_FALSE(fires(MessageKind::kWrite));
  // The protocol's own are counted when they are named.
  EXPECT_EQ(plan->seen().sent, 5u);
  EXPECT_FALSE(fires(MessageKind::kTerminate));
  EXPECT_EQ(plan->seen().sent, 5u);
}

TEST(InjectionPlan, MessagesOfSeveralKindsMayInterleave) {
  const auto plan = Plan("delay=1ms message=2 kind=read-response segment=2");
  const auto injections = plan->NewConnection();
  Numbers fired;
  const std::vector<SegmentFacts> segments = {
      Part(MessageKind::kReadResponse, false), Part(MessageKind::kSend, true),   Part(MessageKind::kReadResponse, true),
      Part(MessageKind::kReadResponse, false), Part(MessageKind::kWrite, false), Part(MessageKind::kReadResponse, true),
      Part(MessageKind::kWrite, true)};
  for (size_t i = 0; i < segments.size(); ++i) {
    injections->Judge(InjectionDirection::kSent, segments[i]);
    if (!injections->fired().empty()) fired.push_back(i);
  }
  EXPECT_EQ(fired, (Numbers{5}));
  EXPECT_EQ(plan->seen().sent, 4u);
}

TEST(InjectionPlan, WritesOfNoBytesAreNoMessages) {
  const auto plan = Plan("delay=1ms message=1");
  const auto injections = plan->NewConnection();
  injections->Judge(InjectionDirection::kSent, SegmentFacts{.kind = MessageKind::kWrite, .empty = true});
  EXPECT_TRUE(injections->fired().empty());
  // Behind others of its message an empty segment is one more of them.
  injections->Judge(InjectionDirection::kSent, Part(MessageKind::kWrite, false));
  EXPECT_FALSE(injections->fired().empty());
  injections->Judge(InjectionDirection::kSent, SegmentFacts{.kind = MessageKind::kWrite, .empty = true});
  EXPECT_FALSE(injections->fired().empty());
  injections->Judge(InjectionDirection::kSent, Whole(MessageKind::kWrite));
  EXPECT_TRUE(injections->fired().empty());
}

// Where packets stand, as "message.segment.attempt".
struct Numbered {
  std::string operator()(const SegmentFacts& facts) {
    const auto at = counter.Next(facts);
    if (!at) return "none";
    return std::to_string(at->NumberAmong(kProgramsMessages)) + "." + std::to_string(at->segment) + "." +
           std::to_string(at->attempt) + (at->is_new ? " new" : "");
  }
  MessageCounter counter;
};
SegmentFacts First(uint32_t psn, MessageKind kind = MessageKind::kSend) {
  return Packet(psn, true, false, kind);
}
SegmentFacts Middle(uint32_t psn, MessageKind kind = MessageKind::kSend) {
  return Packet(psn, false, false, kind);
}
SegmentFacts Last(uint32_t psn, MessageKind kind = MessageKind::kSend) {
  return Packet(psn, false, true, kind);
}

TEST(InjectionPlan, PacketsSentAgainAreAnotherAttempt) {
  Numbered next;
  // Two messages of three packets and of one, over the end of the circle of packet numbers.
  EXPECT_EQ(next(Packet(0xfffffe, true, false)), "1.1.1 new");
  EXPECT_EQ(next(Packet(0xffffff, false, false)), "1.2.1");
  EXPECT_EQ(next(Packet(0, false, true)), "1.3.1");
  EXPECT_EQ(next(Packet(1)), "2.1.1 new");
  // From the second packet on, again and again.
  EXPECT_EQ(next(Packet(0xffffff, false, false)), "1.2.2");
  EXPECT_EQ(next(Packet(0, false, true)), "1.3.2");
  EXPECT_EQ(next(Packet(1)), "2.1.2");
  EXPECT_EQ(next(Packet(0xffffff, false, false)), "1.2.3");
  EXPECT_EQ(next(Packet(2)), "3.1.1 new");
  // A Read request stands for the packets of its answer, and goes on where that broke.
  EXPECT_EQ(next(Packet(3, true, true, MessageKind::kRead, 10)), "4.1.1 new");
  EXPECT_EQ(next(Packet(7, true, true, MessageKind::kRead, 6)), "4.1.2");
  EXPECT_EQ(next(Packet(13)), "5.1.1 new");
  // Answers have the packet numbers of what they answer.
  EXPECT_EQ(next(Packet(3, true, false, MessageKind::kReadResponse)), "6.1.1 new");
  EXPECT_EQ(next(Packet(4, false, false, MessageKind::kReadResponse)), "6.2.1");
  EXPECT_EQ(next(Packet(4, true, true, MessageKind::kReadResponse)), "6.2.2");
}

// What follows behind packets that are sent again may never have been sent.
TEST(InjectionPlan, EachPacketHasItsOwnAttempts) {
  Numbered next;
  EXPECT_EQ(next(First(10)), "1.1.1 new");
  EXPECT_EQ(next(Middle(11)), "1.2.1");
  EXPECT_EQ(next(First(10)), "1.1.2");
  EXPECT_EQ(next(Middle(11)), "1.2.2");
  EXPECT_EQ(next(Middle(12)), "1.3.1");
  EXPECT_EQ(next(Middle(11)), "1.2.3");
  EXPECT_EQ(next(Middle(12)), "1.3.2");
  EXPECT_EQ(next(Last(13)), "1.4.1");
  EXPECT_EQ(next(First(10)), "1.1.3");
  // Of a Read request that is repeated in part, the answer's part that was asked for most often counts.
  EXPECT_EQ(next(Packet(14, true, true, MessageKind::kRead, 4)), "2.1.1 new");
  EXPECT_EQ(next(Packet(16, true, true, MessageKind::kRead, 2)), "2.1.2");
  EXPECT_EQ(next(Packet(14, true, true, MessageKind::kRead, 4)), "2.1.3");
}

TEST(InjectionPlan, AttemptsAreThoseOfEachNumber) {
  PacketAttempts attempts;
  std::vector<uint64_t> expected(200);
  Prng luck(1);
  for (int i = 0; i < 5000; ++i) {
    const uint64_t first = luck.Below(expected.size());
    const uint64_t count = 1 + luck.Below(std::min<uint64_t>(8, expected.size() - first));
    uint64_t most = 0;
    for (uint64_t at = first; at < first + count; ++at) most = std::max(most, ++expected[at]);
    ASSERT_EQ(attempts.Note(first, count), most) << i;
  }
}

TEST(InjectionPlan, WhatComesAgainIsNeverAtItsFirstAttempt) {
  PacketAttempts attempts;
  // More runs than are remembered: of three numbers one comes again.
  EXPECT_EQ(attempts.Note(0, 30'000), 1u);
  for (uint64_t psn = 0; psn < 30'000; psn += 3) ASSERT_EQ(attempts.Note(psn, 1), 2u);
  for (uint64_t psn = 29'700; psn < 30'000; ++psn) ASSERT_EQ(attempts.Note(psn, 1), psn % 3 == 0 ? 3u : 2u) << psn;
  EXPECT_GE(attempts.Note(0, 1), 2u);
  EXPECT_GE(attempts.Note(1, 1), 2u);
  EXPECT_EQ(attempts.Note(30'000, 1), 1u);
}

TEST(InjectionPlan, AMessageWhoseFirstPacketsWereLostIsOne) {
  Numbered next;
  // One, of the first message that there is.
  EXPECT_EQ(next(Middle(11)), "1.2.1 new");
  EXPECT_EQ(next(Last(12)), "1.3.1");
  EXPECT_EQ(next(Packet(13)), "2.1.1 new");
  EXPECT_EQ(next(First(10)), "1.1.1");
  EXPECT_EQ(next(Middle(11)), "1.2.2");
  EXPECT_EQ(next(Last(12)), "1.3.2");
  EXPECT_EQ(next(Packet(13)), "2.1.2");
  // Three; what is not known is guessed.
  EXPECT_EQ(next(Middle(17)), "3.2.1 new");
  EXPECT_EQ(next(Middle(18)), "3.3.1");
  EXPECT_EQ(next(First(14)), "3.1.1");
  EXPECT_EQ(next(Middle(15)), "3.2.1");
  EXPECT_EQ(next(Middle(16)), "3.3.1");
  EXPECT_EQ(next(Middle(17)), "3.4.2");
  EXPECT_EQ(next(Middle(18)), "3.5.2");
  EXPECT_EQ(next(Last(19)), "3.6.1");
  EXPECT_EQ(next(Packet(20)), "4.1.1 new");
  // Two, which come in the wrong order.
  EXPECT_EQ(next(Last(23)), "5.2.1 new");
  EXPECT_EQ(next(Middle(22)), "5.2.1");
  EXPECT_EQ(next(First(21)), "5.1.1");
  EXPECT_EQ(next(Last(23)), "5.3.2");
}

TEST(InjectionPlan, MessagesBetweenWhichPacketsWereLostAreSeveral) {
  Numbered next;
  // The end of one, and the beginning of the next.
  EXPECT_EQ(next(First(10)), "1.1.1 new");
  EXPECT_EQ(next(Middle(13)), "1.4.1");
  EXPECT_EQ(next(Last(14)), "1.5.1");
  EXPECT_EQ(next(Last(11)), "1.2.1");
  EXPECT_EQ(next(First(12)), "2.1.1 new");
  EXPECT_EQ(next(Middle(13)), "2.2.2");
  EXPECT_EQ(next(Last(14)), "2.3.2");
  // The beginning comes before the end.
  EXPECT_EQ(next(First(15)), "3.1.1 new");
  EXPECT_EQ(next(Last(18)), "3.4.1");
  EXPECT_EQ(next(First(17)), "4.1.1 new");
  EXPECT_EQ(next(Last(16)), "3.2.1");
  EXPECT_EQ(next(Last(18)), "4.2.2");
  // A message of one packet between them.
  EXPECT_EQ(next(First(19)), "5.1.1 new");
  EXPECT_EQ(next(Last(23)), "5.5.1");
  EXPECT_EQ(next(Packet(21)), "6.1.1 new");
  EXPECT_EQ(next(Last(20)), "5.2.1");
  EXPECT_EQ(next(First(22)), "7.1.1 new");
  EXPECT_EQ(next(Last(23)), "7.2.2");
  // Kinds tell them apart.
  EXPECT_EQ(next(First(24, MessageKind::kWrite)), "8.1.1 new");
  EXPECT_EQ(next(Middle(27)), "9.2.1 new");
  EXPECT_EQ(next(Last(25, MessageKind::kWrite)), "8.2.1");
  EXPECT_EQ(next(First(26)), "9.1.1");
  // A whole one was lost before one whose beginning was, too.
  EXPECT_EQ(next(Last(28)), "9.3.1");
  EXPECT_EQ(next(Last(31)), "10.2.1 new");
  EXPECT_EQ(next(Packet(29)), "11.1.1 new");
  EXPECT_EQ(next(First(30)), "10.1.1");
}

// A requester asks again for what is missing of an answer, and that begins as an answer of its own.
TEST(InjectionPlan, AnAnswerThatGoesOnAfterALossIsTheSame) {
  constexpr MessageKind kAnswer = MessageKind::kReadResponse;
  {
    Numbered next;
    EXPECT_EQ(next(First(10, kAnswer)), "1.1.1 new");
    EXPECT_EQ(next(Middle(11, kAnswer)), "1.2.1");
    EXPECT_EQ(next(First(12, kAnswer)), "1.3.1");
    EXPECT_EQ(next(Packet(13, true, true, kAnswer)), "1.4.1");
    EXPECT_EQ(next(First(14, kAnswer)), "2.1.1 new");
    // The next answer came before the rest of this one.
    EXPECT_EQ(next(First(16, kAnswer)), "3.1.1 new");
    EXPECT_EQ(next(Packet(15, true, true, kAnswer)), "2.2.1");
    EXPECT_EQ(next(First(16, kAnswer)), "3.1.2");
  }
  {
    Numbered next;
    EXPECT_EQ(next(Last(11, kAnswer)), "1.2.1 new");
    EXPECT_EQ(next(First(10, kAnswer)), "1.1.1");
    EXPECT_EQ(next(Last(11, kAnswer)), "1.2.2");
  }
  const auto plan = Plan("disconnect kind=read-response message=2");
  const auto injections = plan->NewConnection();
  for (const SegmentFacts& facts : {First(10, kAnswer), Middle(11, kAnswer), First(12, kAnswer), Last(13, kAnswer)}) {
    EXPECT_EQ(injections->Judge(InjectionDirection::kReceived, facts).action, std::nullopt);
  }
  EXPECT_EQ(injections->Judge(InjectionDirection::kReceived, First(14, kAnswer)).action, InjectionAction::kDisconnect);
}

TEST(InjectionPlan, NumbersGoOnBeyondTheCircle) {
  MessageCounter counter;
  for (uint32_t i = 0; i < 100; ++i) {
    const uint32_t psn = i * 0x100000;
    ASSERT_EQ(counter.Next(First(psn))->NumberAmong(kProgramsMessages), i + 1);
    ASSERT_FALSE(counter.Next(Last(psn + 0xfffff))->is_new);
    const auto again = counter.Next(First(psn));
    ASSERT_EQ(again->NumberAmong(kProgramsMessages), i + 1);
    ASSERT_EQ(again->attempt, 2u);
  }
}

TEST(InjectionPlan, WhatWasLostBeforeItWasSeenIsCountedWhenItComes) {
  MessageCounter counter;
  const auto number = [&](const SegmentFacts& facts) {
    const auto at = counter.Next(facts);
    return at ? at->NumberAmong(kProgramsMessages) * 100 + at->attempt : 0;
  };
  EXPECT_EQ(number(Packet(5)), 101u);
  EXPECT_EQ(number(Packet(7)), 201u);
  EXPECT_EQ(number(Packet(6)), 301u);
  EXPECT_EQ(number(Packet(7)), 202u);
  EXPECT_EQ(number(Packet(4)), 401u);
  EXPECT_EQ(number(Packet(8)), 501u);
}

TEST(InjectionPlan, WhatIsTooOldToBeKnownIsNotCounted) {
  MessageCounter counter;
  for (uint32_t psn = 0; psn < 2000; ++psn) ASSERT_TRUE(counter.Next(Packet(psn)).has_value());
  EXPECT_FALSE(counter.Next(Packet(3)).has_value());
  EXPECT_EQ(counter.Next(Packet(1990))->attempt, 2u);
  EXPECT_EQ(counter.Next(Packet(2000))->NumberAmong(kProgramsMessages), 2001u);
}

TEST(InjectionPlan, TheFirstThatEndsASegmentIsTheLastThatIsAsked) {
  const auto plan = Plan("delay=1ms; delay=2ms message=2; drop message=2; disconnect message=2; stall message=3");
  const auto injections = plan->NewConnection();
  EXPECT_EQ(injections->Judge(InjectionDirection::kSent, Whole()).delay, 1ms);
  const InjectionVerdict second = injections->Judge(InjectionDirection::kSent, Whole());
  EXPECT_EQ(second.delay, 3ms);
  EXPECT_EQ(second.action, InjectionAction::kDrop);
  EXPECT_EQ(injections->fired().size(), 1u) << "what is lost is not late";
  EXPECT_EQ(plan->counters(3).matched, 0u);
  EXPECT_EQ(injections->end(), std::nullopt);
  EXPECT_EQ(injections->Judge(InjectionDirection::kSent, Whole()).action, InjectionAction::kStall);
  EXPECT_EQ(injections->end(), InjectionAction::kStall);
  injections->Judge(InjectionDirection::kSent, Whole());
  EXPECT_TRUE(injections->fired().empty());
  EXPECT_EQ(plan->counters(0).fired, 1u);
}

// In text it is refused.
TEST(InjectionPlan, NothingThatIsReceivedIsDelayed) {
  const auto plan = InjectionPlan::Make({InjectionRule{.action = InjectionAction::kDelay, .delay = 1ms}});
  const auto injections = plan->NewConnection();
  EXPECT_EQ(injections->Judge(InjectionDirection::kReceived, Whole()).delay, Duration::zero());
  EXPECT_TRUE(injections->fired().empty());
  EXPECT_EQ(plan->counters(0).matched, 0u);
  EXPECT_EQ(injections->Judge(InjectionDirection::kSent, Whole()).delay, 1ms);
}

TEST(InjectionPlan, TimesCountsOnAllConnectionsTogether) {
  const auto plan = Plan("disconnect message=2 times=2");
  Numbers ended;
  for (int i = 0; i < 4; ++i) {
    const auto injections = plan->NewConnection();
    if (!FiresAt(*injections, 3).empty()) ended.push_back(injections->number());
  }
  EXPECT_EQ(ended, (Numbers{1, 2}));
  EXPECT_EQ(plan->counters(0).matched, 4u);
  EXPECT_EQ(plan->counters(0).fired, 2u);
}

TEST(InjectionPlan, WhatIsDrawnFollowsFromSeedAndConnection) {
  const auto draw = [](const std::string& rule, int connection) {
    const auto plan = Plan(rule);
    for (int i = 1; i < connection; ++i) plan->NewConnection();
    return FiresAt(*plan->NewConnection(), 2000);
  };
  const Numbers first = draw("drop probability=5%", 1);
  EXPECT_GT(first.size(), 50u);
  EXPECT_LT(first.size(), 200u);
  EXPECT_EQ(draw("drop probability=5%", 1), first);
  EXPECT_NE(draw("drop probability=5%", 2), first);
  EXPECT_NE(draw("drop probability=5% seed=1", 1), first);
  EXPECT_EQ(draw("drop probability=100%", 1).size(), 2000u);
}

TEST(InjectionPlan, TellsEachFiringOnce) {
  std::vector<std::string> told;
  const auto plan = Plan("delay=1us message=2 kind=write; stall message=4",
                         [&](const InjectionFiring& firing) { told.push_back(ToString(firing)); });
  const auto injections = plan->NewConnection();
  injections->Judge(InjectionDirection::kSent, Whole(MessageKind::kWrite));
  injections->Judge(InjectionDirection::kSent, Part(MessageKind::kWrite, false));
  injections->Judge(InjectionDirection::kSent, Part(MessageKind::kWrite, true));
  injections->Judge(InjectionDirection::kSent, Whole());
  injections->Judge(InjectionDirection::kSent, Whole());
  EXPECT_EQ(told, (std::vector<std::string>{
                      "rule 'delay=1us message=2 kind=write' fired: connection 1, message 2 sent (write)",
                      "rule 'delay=1us message=2 kind=write' fired: connection 1, message 2 sent (write, segment 2)",
                      "rule 'stall message=4' fired: connection 1, message 4 sent (send)"}));
}

TEST(InjectionPlan, ConnectionsThatNoRuleIsAboutAreLeftAlone) {
  const auto plan = Plan("disconnect connection=2");
  EXPECT_EQ(plan->NewConnection(), nullptr);
  EXPECT_NE(plan->NewConnection(), nullptr);
  EXPECT_EQ(plan->NewConnection(), nullptr);
  EXPECT_EQ(plan->seen().connections, 3u);
}

// --- What is done to records besides ---

TEST(InjectionPlan, WhatLeavesTwiceMayBeLateAndIsNotOvertakenThen) {
  const auto plan = Plan("duplicate message=1; delay=1ms message=1; overtake message=1..2");
  const auto connection = plan->NewConnection();
  const InjectionVerdict first = connection->Judge(InjectionDirection::kSent, Whole());
  EXPECT_TRUE(first.twice);
  EXPECT_EQ(first.delay, 1ms);
  EXPECT_EQ(first.action, std::nullopt);
  EXPECT_EQ(connection->Judge(InjectionDirection::kReceived, Whole()).action, std::nullopt);
  EXPECT_EQ(connection->Judge(InjectionDirection::kSent, Whole()).action, InjectionAction::kOvertake);
  EXPECT_EQ(plan->counters(2).matched, 1u);
}

TEST(InjectionPlan, WhatCannotBeDoneIsNotAskedFor) {
  const auto plan = Plan("overtake every=2");
  const auto connection = plan->NewConnection();
  constexpr ActionSet kOthers = kAllActions & ~SetOf(InjectionAction::kOvertake);
  EXPECT_EQ(connection->Judge(InjectionDirection::kSent, Whole()).action, std::nullopt);
  EXPECT_EQ(connection->Judge(InjectionDirection::kSent, Whole(), kOthers).action, std::nullopt);
  EXPECT_EQ(connection->Judge(InjectionDirection::kSent, Whole()).action, InjectionAction::kOvertake);
}

TEST(InjectionPlan, AnyIsAboutWhatIsNoMessageToo) {
  const auto plan = Plan("drop kind=any times=2; drop kind=any message=2");
  const auto connection = plan->NewConnection();
  const SegmentFacts empty{.kind = MessageKind::kWrite, .empty = true};
  EXPECT_EQ(connection->Judge(InjectionDirection::kSent, empty).action, InjectionAction::kDrop);
  EXPECT_EQ(ToString(connection->fired().at(0)),
            "rule 'drop kind=any times=2' fired: connection 1, no message, sent (write)");
  EXPECT_EQ(connection->Judge(InjectionDirection::kReceived, std::nullopt).action, InjectionAction::kDrop);
  EXPECT_EQ(ToString(connection->fired().at(0)), "rule 'drop kind=any times=2' fired: connection 1, a record received");
  EXPECT_EQ(connection->Judge(InjectionDirection::kSent, empty).action, std::nullopt);
  connection->Judge(InjectionDirection::kSent, Whole(MessageKind::kAck));
  EXPECT_EQ(connection->Judge(InjectionDirection::kSent, Whole()).action, InjectionAction::kDrop)
      << "an acknowledgement is one of all";
}

TEST(InjectionPlan, AReceiveIsHiddenFromTheMessageThatCameLast) {
  const auto plan = Plan("not-ready message=2 attempt=1");
  const auto connection = plan->NewConnection();
  const auto comes = [&](uint32_t psn) {
    EXPECT_EQ(connection->Judge(InjectionDirection::kReceived, Packet(psn)).action, std::nullopt);
    return connection->HidesReceive();
  };
  EXPECT_FALSE(comes(10));
  EXPECT_TRUE(comes(11));
  EXPECT_EQ(ToString(connection->fired().at(0)),
            "rule 'not-ready message=2 attempt=1' fired: connection 1, message 2 received (send)");
  EXPECT_FALSE(comes(11)) << "the second attempt";
  EXPECT_FALSE(comes(12));
}

// --- What has acted ---

TEST(InjectionPlan, WhatIsLostIsNeitherLateNorDoubled) {
  for (const char* const last : {"drop", "stall", "disconnect"}) {
    SCOPED_TRACE(last);
    std::vector<std::string> told;
    const auto plan = Plan(std::string("delay=1ms times=1; duplicate; ") + last + " message=1",
                           [&](const InjectionFiring& firing) { told.push_back(ToString(*firing.rule)); });
    const auto connection = plan->NewConnection();
    EXPECT_EQ(ToString(connection->Judge(InjectionDirection::kSent, Whole()).action.value()), std::string(last));
    EXPECT_EQ(told, std::vector<std::string>{std::string(last) + " message=1"});
    EXPECT_EQ(connection->fired().size(), 1u);
    EXPECT_EQ(plan->counters(0).fired, 0u);
    EXPECT_EQ(plan->counters(1).fired, 0u);
  }
  // What was not used up is there for the next one.
  const auto plan = Plan("delay=1ms times=1; drop message=1");
  const auto connection = plan->NewConnection();
  connection->Judge(InjectionDirection::kSent, Whole());
  EXPECT_EQ(connection->Judge(InjectionDirection::kSent, Whole()).delay, 1ms);
  EXPECT_EQ(connection->Judge(InjectionDirection::kSent, Whole()).delay, 0ms);
}

TEST(InjectionPlan, TwiceIsTwiceHoweverManyRulesSaySo) {
  const auto plan = Plan("duplicate; duplicate");
  const auto connection = plan->NewConnection();
  EXPECT_TRUE(connection->Judge(InjectionDirection::kSent, Whole()).twice);
  EXPECT_EQ(plan->counters(0).fired, 1u);
  EXPECT_EQ(plan->counters(1).fired, 0u);
}

TEST(InjectionPlan, WhatIsToBeOvertakenHasFiredWhenItIs) {
  size_t told = 0;
  const auto plan = Plan("overtake times=1", [&](const InjectionFiring&) { ++told; });
  const auto connection = plan->NewConnection();
  const auto judged = [&] { return connection->Judge(InjectionDirection::kSent, Whole()).action; };
  EXPECT_EQ(judged(), InjectionAction::kOvertake);
  EXPECT_TRUE(connection->fired().empty());
  EXPECT_EQ(judged(), std::nullopt) << "the only time is spoken for";
  connection->NotOvertaken();
  EXPECT_EQ(told, 0u);
  EXPECT_EQ(plan->counters(0).fired, 0u);
  EXPECT_EQ(judged(), InjectionAction::kOvertake);
  connection->Overtaken();
  ASSERT_EQ(connection->fired().size(), 1u);
  EXPECT_EQ(ToString(connection->fired()[0]), "rule 'overtake times=1' fired: connection 1, message 3 sent (send)");
  EXPECT_EQ(told, 1u);
  // Whatever comes later changes nothing.
  connection->NotOvertaken();
  EXPECT_EQ(plan->counters(0).fired, 1u);
  EXPECT_EQ(judged(), std::nullopt);
  // A stream that goes takes what waited in it along.
  const auto other = Plan("overtake times=1");
  const auto lost = other->NewConnection();
  lost->Judge(InjectionDirection::kSent, Whole());
  lost->BeginStream("another");
  EXPECT_EQ(other->counters(0).fired, 0u);
}

TEST(InjectionPlan, WhatIsDoneIsDoneWithoutMemoryToTellOfIt) {
  const auto plan = Plan("delay-completion=1ms; drop", [](const InjectionFiring&) { throw std::bad_alloc(); });
  PlaceInjections place(plan, SetOf(InjectionAction::kDelayCompletion), "qp");
  EXPECT_NE(place.Judge(), nullptr);
  EXPECT_EQ(plan->NewConnection()->Judge(InjectionDirection::kSent, Whole()).action, InjectionAction::kDrop);
}

TEST(InjectionPlan, KnowsWhichKindsItsRulesAreAbout) {
  const auto plan = Plan("drop kind=datagram; delay=1ms kind=ack");
  EXPECT_TRUE(plan->Has(kLosingActions));
  EXPECT_TRUE(plan->Has(SetOf(InjectionAction::kDrop), KindBit(MessageKind::kDatagram)));
  EXPECT_FALSE(plan->Has(SetOf(InjectionAction::kDrop), kKindsOfConnections));
  EXPECT_TRUE(plan->Has(kLosingActions, kKindsOfConnections));
  plan->End([](const InjectionRule& rule) { return rule.action == InjectionAction::kDelay; });
  EXPECT_FALSE(plan->Has(kLosingActions, kKindsOfConnections));
}

// --- Places of the device ---

constexpr ActionSet kRegistrations = SetOf(InjectionAction::kFailRegistration);

Numbers FiresAt(PlaceInjections& place, uint64_t count) {
  Numbers fired;
  for (uint64_t i = 1; i <= count; ++i) {
    if (place.Judge() != nullptr) fired.push_back(i);
  }
  return fired;
}

TEST(InjectionPlan, EachPlaceCountsByItselfAndTimesCountTogether) {
  const auto plan = Plan("fail-registration every=2 times=3; delay-completion=1ms");
  PlaceInjections one(plan, kRegistrations, "one");
  PlaceInjections two(plan, kRegistrations, "two");
  EXPECT_EQ(FiresAt(one, 5), (Numbers{2, 4}));
  EXPECT_EQ(FiresAt(two, 5), (Numbers{2}));
  EXPECT_EQ(plan->counters(0).fired, 3u);
  EXPECT_EQ(plan->counters(1).matched, 0u) << "about something else";
  EXPECT_EQ(plan->NewConnection(), nullptr);
}

TEST(InjectionPlan, TheFirstRuleThatFiresEndsIt) {
  const auto plan = Plan("place-late=1ms number=2; place-late=2ms");
  PlaceInjections writes(plan, SetOf(InjectionAction::kPlaceLate), "writes");
  EXPECT_EQ(writes.Judge()->delay, 2ms);
  EXPECT_EQ(writes.Judge()->delay, 1ms);
  ASSERT_EQ(writes.fired().size(), 1u);
  EXPECT_EQ(ToString(writes.fired()[0]), "rule 'place-late=1ms number=2' fired: Write 2");
  for (int i = 0; i < 100; ++i) EXPECT_LE(writes.DrawTime(), 1ms);
}

TEST(InjectionPlan, DatagramsAreOnNoConnection) {
  const auto plan = Plan("drop; drop kind=any connection=1; duplicate kind=datagram every=2; delay=1ms kind=any");
  PlaceInjections port(plan, kDatagramActions, "port");
  EXPECT_EQ(port.Judge(), nullptr);
  const InjectionRule* const rule = port.Judge();
  ASSERT_NE(rule, nullptr);
  EXPECT_EQ(rule->action, InjectionAction::kDuplicate);
  EXPECT_EQ(ToString(port.fired().at(0)), "rule 'duplicate kind=datagram every=2' fired: datagram 2");
  EXPECT_EQ(port.Judge(SetOf(InjectionAction::kDrop)), nullptr);
}

// --- Habits and luck ---

TEST(InjectionPlan, HabitsStandBehindRulesAndNobodyIsTold) {
  std::vector<std::string> told;
  const auto plan =
      Plan("fail-registration number=1", [&](const InjectionFiring& firing) { told.push_back(ToString(firing)); });
  plan->AddHabits(*ParseInjectionRules("fail-registration number=1..2; drop kind=any"), 1);
  plan->Add(*ParseInjectionRules("fail-registration number=3"));
  PlaceInjections place(plan, kRegistrations, "place");
  EXPECT_EQ(FiresAt(place, 4), (Numbers{1, 2, 3}));
  EXPECT_EQ(told.size(), 2u);
  EXPECT_EQ(ToString(plan->rules()), "fail-registration number=1; fail-registration number=3");
  EXPECT_EQ(plan->counters(1).fired, 1u);
  const auto connection = plan->NewConnection();
  EXPECT_EQ(connection->Judge(InjectionDirection::kSent, Whole()).action, InjectionAction::kDrop);
  EXPECT_TRUE(connection->fired().empty());
}

TEST(InjectionPlan, WhatIsOverFiresNoMoreButForHabits) {
  const auto plan = Plan("fail-registration; drop");
  plan->AddHabits(*ParseInjectionRules("place-late=1ms"), 1);
  PlaceInjections registrations(plan, kRegistrations, "registrations");
  PlaceInjections writes(plan, SetOf(InjectionAction::kPlaceLate), "writes");
  EXPECT_TRUE(registrations.IsWatched());
  plan->End(InjectionDepth::kDevice);
  EXPECT_EQ(registrations.Judge(), nullptr);
  EXPECT_FALSE(registrations.IsWatched());
  EXPECT_TRUE(plan->EverHad(kRegistrations));
  EXPECT_NE(writes.Judge(), nullptr);
  const auto connection = plan->NewConnection();
  EXPECT_EQ(connection->Judge(InjectionDirection::kSent, Whole()).action, InjectionAction::kDrop);
  plan->End(InjectionDepth::kRecord);
  EXPECT_EQ(connection->Judge(InjectionDirection::kSent, Whole()).action, std::nullopt);
}

// Which of 100 registrations fail.
Numbers WithLuck(const std::string& rule, uint64_t luck_seed, const std::string& name) {
  const auto plan = Plan(rule);
  plan->AddHabits({}, luck_seed);
  PlaceInjections place(plan, kRegistrations, name);
  return FiresAt(place, 100);
}

TEST(InjectionPlan, LuckIsTheRulesOrTheDevices) {
  const std::string of_the_device = "fail-registration one-in=4 seed=device";
  const Numbers usual = WithLuck(of_the_device, 1, "a");
  EXPECT_GT(usual.size(), 10u);
  EXPECT_LT(usual.size(), 50u);
  EXPECT_EQ(WithLuck(of_the_device, 1, "a"), usual);
  EXPECT_NE(WithLuck(of_the_device, 2, "a"), usual);
  EXPECT_NE(WithLuck(of_the_device, 1, "b"), usual);
  const std::string own = "fail-registration one-in=4 seed=9";
  EXPECT_EQ(WithLuck(own, 1, "a"), WithLuck(own, 2, "a"));
  EXPECT_NE(WithLuck(own, 1, "a"), WithLuck(own, 1, "b"));
}

}  // namespace
}  // namespace stagecoach::emu
