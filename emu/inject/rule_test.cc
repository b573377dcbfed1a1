#include "emu/inject/rule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/prng.h"

namespace stagecoach::emu {
namespace {

// What the only rule of `text` is.
InjectionRule Rule(const std::string& text) {
  const auto rules = ParseInjectionRules(text);
  if (!rules || rules->size() != 1) {
    ADD_FAILURE() << text << ": " << (rules ? "not one rule" : rules.error().message);
    return {};
  }
  return rules->front();
}

TEST(InjectionRules, SayWhatAndWhere) {
  EXPECT_EQ(Rule("disconnect"), InjectionRule());

  InjectionRule expected;
  expected.message = {10, 10};
  EXPECT_EQ(Rule("disconnect message=10"), expected);
  expected.received = false;
  expected.connection = {2, 2};
  EXPECT_EQ(Rule("disconnect message=10 direction=sent connection=2"), expected);

  expected = {};
  expected.action = InjectionAction::kDelay;
  expected.delay = 5ms;
  expected.received = false;
  expected.message = {3, NumberRange::kNoEnd};
  EXPECT_EQ(Rule("delay=5ms message=3.."), expected);
  EXPECT_EQ(Rule("delay=5000us message=3.. direction=sent"), expected);

  expected = {};
  expected.action = InjectionAction::kDrop;
  expected.sent = false;
  expected.kinds = KindBit(MessageKind::kAck) | KindBit(MessageKind::kReadResponse);
  expected.segment = {2, 4};
  expected.attempt = {1, 1};
  expected.every = 3;
  expected.times = 5;
  expected.probability = 12'500;
  expected.seed = 7;
  EXPECT_EQ(Rule("drop direction=received kind=read-response,ack segment=2..4 attempt=1 every=3 times=5 "
                 "probability=1.25% seed=7"),
            expected);
}

TEST(InjectionRules, AreSeparatedBySemicolonsAndLines) {
  const auto rules = ParseInjectionRules(" stall message=3 ;\n\n;disconnect\tconnection=1\r\n");
  ASSERT_TRUE(rules.has_value());
  EXPECT_EQ(ToString(*rules), "stall message=3; disconnect connection=1");
  EXPECT_TRUE(ParseInjectionRules("")->empty());
  EXPECT_TRUE(ParseInjectionRules(" ;\n").value().empty());
}

TEST(InjectionRules, AreWrittenInOneWay) {
  const struct {
    const char* text;
    const char* canonical;
  } kCases[] = {
      {"disconnect", "disconnect"},
      {"stall message=1..", "stall"},
      {"stall message=4..4 times=1", "stall message=4 times=1"},
      {"drop attempt=1 kind=write,send", "drop attempt=1 kind=send,write"},
      {"drop kind=send,write,read,read-response,atomic,atomic-response,immediate", "drop"},
      {"drop kind=terminate", "drop kind=terminate"},
      {"delay=1000ms", "delay=1s"},
      {"delay=1500ms direction=sent", "delay=1500ms"},
      {"delay=1us every=1", "delay=1us"},
      {"drop probability=0.01", "drop probability=1%"},
      {"drop probability=0.000001", "drop probability=0.0001%"},
      {"drop probability=12.50%", "drop probability=12.5%"},
      {"drop probability=100% seed=3", "drop"},
      {"drop probability=1", "drop"},
      {"delay=1500ns", "delay=1500ns"},
      {"drop one-in=1", "drop one-in=1"},
      {"drop kind=any seed=device one-in=50", "drop kind=any one-in=50 seed=device"},
      {"drop kind=datagram,ack", "drop kind=ack,datagram"},
      {"duplicate direction=sent message=2..", "duplicate message=2.."},
      {"overtake kind=write probability=2%", "overtake kind=write probability=2%"},
      {"not-ready direction=received message=3 attempt=1", "not-ready message=3 attempt=1"},
      {"fail-registration number=2.. every=3", "fail-registration number=2.. every=3"},
      {"fail-registration one-in=5 seed=device", "fail-registration one-in=5 seed=device"},
      {"delay-completion=1000us times=4 number=7", "delay-completion=1ms number=7 times=4"},
      {"place-late=50us one-in=2 seed=3", "place-late=50us one-in=2 seed=3"},
  };
  for (const auto& each : kCases) {
    EXPECT_EQ(ToString(Rule(each.text)), each.canonical) << each.text;
    EXPECT_EQ(Rule(each.canonical), Rule(each.text)) << each.text;
  }
}

TEST(InjectionRules, ErrorsSayWhatIsWrongWhereAndWhatIsExpected) {
  const struct {
    const char* text;
    const char* explained;
  } kCases[] = {
      {"disconnect mesage=10",
       "'mesage' is no condition; did you mean message?\n"
       "  disconnect mesage=10\n"
       "             ^~~~~~"},
      {"stall; disconect",
       "'disconect' is no action; did you mean disconnect?\n"
       "  disconect\n"
       "  ^~~~~~~~~"},
      {"stall\ndrop kind=send,acks every=2; delay=1s",
       "'acks' is no kind of message; did you mean ack?\n"
       "  drop kind=send,acks every=2\n"
       "                 ^~~~"},
      {"corrupt",
       "'corrupt' is no action; there are disconnect, stall, drop, delay, duplicate, overtake, not-ready, "
       "fail-registration, delay-completion, place-late\n"
       "  corrupt\n"
       "  ^~~~~~~"},
      {"message=3",
       "'message' is a condition, and a rule begins with an action: disconnect, stall, drop, delay, duplicate, "
       "overtake, "
       "not-ready, fail-registration, delay-completion, place-late\n"
       "  message=3\n"
       "  ^~~~~~~"},
      {"stall drop",
       "a rule has one action; the next rule stands behind ';'\n"
       "  stall drop\n"
       "        ^~~~"},
      {"stall=3s",
       "stall takes no value\n"
       "  stall=3s\n"
       "  ^~~~~~~~"},
      {"delay message=1",
       "delay needs a time, such as delay=5ms\n"
       "  delay message=1\n"
       "  ^~~~~"},
      {"delay=5",
       "'5' is no time: an integer from 1 with ns, us, ms or s, such as 5ms, at most 3600s\n"
       "  delay=5\n"
       "        ^"},
      {"delay=5ms direction=received",
       "delay is of what is sent; give the rule to the process that sends it, with direction=sent\n"
       "  delay=5ms direction=received\n"
       "                      ^~~~~~~~"},
      {"disconnect message",
       "message needs a value, such as message=2\n"
       "  disconnect message\n"
       "             ^~~~~~~"},
      {"disconnect message=0",
       "'0' is neither of these: a number from 1, a range such as 3..5, or 3.. for all from the third on\n"
       "  disconnect message=0\n"
       "                     ^"},
      {"disconnect message=5..3",
       "'5..3' ends before it begins\n"
       "  disconnect message=5..3\n"
       "                     ^~~~"},
      {"disconnect message=1 message=2",
       "message stands twice in this rule\n"
       "  disconnect message=1 message=2\n"
       "                       ^~~~~~~"},
      {"drop every=0",
       "'0' is no number from 1 on\n"
       "  drop every=0\n"
       "             ^"},
      {"drop probability=0.00001%",
       "'0.00001%' is no probability: a part such as 0.01 or 1%, more than 0, at most 1, in steps of 0.0001%\n"
       "  drop probability=0.00001%\n"
       "                   ^~~~~~~~"},
      {"drop seed=4",
       "seed is of what is drawn, and without probability or one-in nothing is\n"
       "  drop seed=4\n"
       "       ^~~~~~"},
      {"drop one-in=4 probability=1%",
       "one-in and probability say the same; a rule has one of them\n"
       "  drop one-in=4 probability=1%\n"
       "       ^~~~~~~~"},
      {"not-ready direction=sent",
       "not-ready is of what is received; give the rule to the process that receives it, with direction=received\n"
       "  not-ready direction=sent\n"
       "                      ^~~~"},
      {"fail-registration message=3",
       "message is of messages, and fail-registration is about what the device does; number=2 is its second "
       "registration\n"
       "  fail-registration message=3\n"
       "                    ^~~~~~~"},
      {"drop number=3",
       "number is of what the device does, and drop is about messages; message=2 is the second one\n"
       "  drop number=3\n"
       "       ^~~~~~"},
      {"place-late=5ms seed=3",
       "the order in which Writes are placed is the device's luck; seed is of probability and one-in\n"
       "  place-late=5ms seed=3\n"
       "                 ^~~~~~"},
      {"place-late",
       "place-late needs a time, such as place-late=5ms\n"
       "  place-late\n"
       "  ^~~~~~~~~~"},
      {"drop kind=any,send",
       "any is every record, and stands alone\n"
       "  drop kind=any,send\n"
       "            ^~~"},
      {"drop kind=send,send",
       "send stands twice in this list\n"
       "  drop kind=send,send\n"
       "                 ^~~~"},
      {"DISCONNECT",
       "'DISCONNECT' is no action; did you mean disconnect?\n"
       "  DISCONNECT\n"
       "  ^~~~~~~~~~"},
      // What has few letters is soon like another word, and is not meant for it.
      {"disconnect kind=all",
       "'all' is no kind of message; there are send, write, read, read-response, atomic, atomic-response, immediate, "
       "terminate, ack, datagram, any\n"
       "  disconnect kind=all\n"
       "                  ^~~"},
      {"disconnect kind=recv",
       "'recv' is no kind of message; there are send, write, read, read-response, atomic, atomic-response, immediate, "
       "terminate, ack, datagram, any\n"
       "  disconnect kind=recv\n"
       "                  ^~~~"},
      {"disconnect kind=Any",
       "'Any' is no kind of message; did you mean any?\n"
       "  disconnect kind=Any\n"
       "                  ^~~"},
      {"disconnect direction=sent,received",
       "a rule that names no direction is about both\n"
       "  disconnect direction=sent,received\n"
       "                       ^~~~~~~~~~~~~"},
      {"disconnect direction=send",
       "'send' is no direction; did you mean sent?\n"
       "  disconnect direction=send\n"
       "                       ^~~~"},
      {"disconnect message:10",
       "'message:10' is no condition; message=2 is one\n"
       "  disconnect message:10\n"
       "             ^~~~~~~~~~"},
      {"disconnect every>3",
       "'every>3' is no condition; every=2 is one\n"
       "  disconnect every>3\n"
       "             ^~~~~~~"},
      {"stall message=18446744073709551615",
       "'18446744073709551615' is too large: it is at most 18446744073709551614\n"
       "  stall message=18446744073709551615\n"
       "                ^~~~~~~~~~~~~~~~~~~~"},
      {"stall message=3..99999999999999999999",
       "'99999999999999999999' is too large: it is at most 18446744073709551614\n"
       "  stall message=3..99999999999999999999\n"
       "                   ^~~~~~~~~~~~~~~~~~~~"},
      {"drop every=99999999999999999999",
       "'99999999999999999999' is too large: it is at most 18446744073709551614\n"
       "  drop every=99999999999999999999\n"
       "             ^~~~~~~~~~~~~~~~~~~~"},
      {"drop one-in=4294967296",
       "'4294967296' is too large: it is at most 4294967295\n"
       "  drop one-in=4294967296\n"
       "              ^~~~~~~~~~"},
      {"drop one-in=4 seed=99999999999999999999",
       "'99999999999999999999' is too large: it is at most 18446744073709551614\n"
       "  drop one-in=4 seed=99999999999999999999\n"
       "                     ^~~~~~~~~~~~~~~~~~~~"},
      {"drop one-in=4 seed=-1",
       "'-1' is no seed: a number from 0 on, or device\n"
       "  drop one-in=4 seed=-1\n"
       "                     ^~"},
      {"delay=0s",
       "'0s' is no time: an integer from 1 with ns, us, ms or s, such as 5ms, at most 3600s\n"
       "  delay=0s\n"
       "        ^~"},
      // A blank is a blank, whichever it is.
      {"drop\tmesage=3",
       "'mesage' is no condition; did you mean message?\n"
       "  drop mesage=3\n"
       "       ^~~~~~"},
      {"stall \x1b[1mnow",
       "'?[1mnow' is no condition; there are connection, direction, kind, message, segment, attempt, number, every, "
       "times, probability, one-in, seed\n"
       "  stall ?[1mnow\n"
       "        ^~~~~~~"},
  };
  for (const auto& each : kCases) {
    const auto rules = ParseInjectionRules(each.text);
    ASSERT_FALSE(rules.has_value()) << each.text;
    EXPECT_EQ(rules.error().Explain(each.text), each.explained);
  }
}

TEST(InjectionRules, AreBoundedInNumber) {
  std::string text;
  for (size_t i = 0; i < kMostRules; ++i) text += "stall;";
  EXPECT_EQ(ParseInjectionRules(text + ";\n;").value().size(), kMostRules);
  const auto error = ParseInjectionRules(text + "drop").error();
  EXPECT_EQ(error.message, "more than 256 rules of one device");
  EXPECT_EQ(error.offset, text.size());
  EXPECT_EQ(error.length, 4u);
  const std::string indented = text + "  drop message=3";
  EXPECT_EQ(ParseInjectionRules(indented).error().Explain(indented),
            "more than 256 rules of one device\n"
            "  drop message=3\n"
            "  ^~~~~~~~~~~~~~");
}

TEST(InjectionRules, NumbersOutOfBoundsAreErrors) {
  for (const char* const text : {"stall message=18446744073709551615",
                                 "stall message=18446744073709551616",
                                 "stall message=-1",
                                 "stall message=+1",
                                 "stall message=0x10",
                                 "stall message=1...2",
                                 "stall message=..4",
                                 "stall message=1..x",
                                 "stall message= 3",
                                 "delay=0ms",
                                 "delay=3601s",
                                 "delay=9223372036854775807s",
                                 "delay=1.5ms",
                                 "delay=-1s",
                                 "delay=5m",
                                 "drop probability=0",
                                 "drop probability=0%",
                                 "drop probability=1.000001",
                                 "drop probability=101%",
                                 "drop probability=.5",
                                 "drop probability=1.",
                                 "drop probability=%",
                                 "drop probability=99999999999999999999",
                                 "drop kind=",
                                 "drop kind=send,",
                                 "drop kind=,send",
                                 "drop direction=both"}) {
    EXPECT_FALSE(ParseInjectionRules(text).has_value()) << text;
  }
}

// Whatever is understood is written so that it means the same, and whatever is not is explained within the text.
TEST(InjectionRules, AnyTextIsUnderstoodOrExplained) {
  const std::vector<std::string> kParts = {"disconnect",
                                           "stall",
                                           "drop",
                                           "delay=",
                                           "duplicate",
                                           "overtake",
                                           "not-ready",
                                           "fail-registration",
                                           "delay-completion=",
                                           "place-late=",
                                           "number=",
                                           "one-in=",
                                           "seed=device",
                                           "kind=any",
                                           "7ns",
                                           "delay",
                                           "5ms",
                                           "1s",
                                           " ",
                                           " ",
                                           " ",
                                           ";",
                                           "\n",
                                           "\t",
                                           "=",
                                           "..",
                                           ",",
                                           "message=",
                                           "segment=",
                                           "attempt=",
                                           "connection=",
                                           "direction=",
                                           "kind=",
                                           "every=",
                                           "times=",
                                           "probability=",
                                           "seed=",
                                           "1",
                                           "2",
                                           "10",
                                           "0",
                                           "99",
                                           "1%",
                                           "0.5",
                                           "sent",
                                           "received",
                                           "send",
                                           "write",
                                           "ack",
                                           "read-response",
                                           "18446744073709551614",
                                           "x",
                                           "\xff",
                                           "#"};
  Prng luck(1);
  uint64_t understood = 0;
  for (int i = 0; i < 200'000; ++i) {
    std::string text;
    for (uint64_t parts = luck.Between(1, 12); parts > 0; --parts) text += kParts[luck.Below(kParts.size())];
    const auto rules = ParseInjectionRules(text);
    if (rules) {
      const auto again = ParseInjectionRules(ToString(*rules));
      ASSERT_TRUE(again.has_value()) << text << "\n" << ToString(*rules) << "\n" << again.error().message;
      ASSERT_EQ(*again, *rules) << text;
      understood += rules->empty() ? 0 : 1;
      continue;
    }
    ASSERT_LE(rules.error().offset + rules.error().length, text.size()) << text;
    ASSERT_FALSE(rules.error().message.empty()) << text;
    const std::string explained = rules.error().Explain(text);
    ASSERT_EQ(std::count(explained.begin(), explained.end(), '\n'), 2) << explained;
  }
  EXPECT_GT(understood, 100u);
}

// 0 is a seed as any other, and not the same as none.
TEST(InjectionRules, ASeedOfZeroIsASeed) {
  EXPECT_EQ(Rule("drop one-in=3").seed, std::nullopt);
  EXPECT_EQ(Rule("drop one-in=3 seed=0").seed, 0u);
  EXPECT_EQ(ToString(Rule("drop one-in=3 seed=0")), "drop one-in=3 seed=0");
}

}  // namespace
}  // namespace stagecoach::emu
