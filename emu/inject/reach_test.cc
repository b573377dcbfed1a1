#include "emu/inject/reach.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace stagecoach::emu {
namespace {

constexpr InjectionTransport kTransports[] = {InjectionTransport::kIwarp, InjectionTransport::kInfiniband};

InjectionRule Rule(const std::string& text) {
  const auto rules = ParseInjectionRules(text);
  EXPECT_TRUE(rules.has_value() && rules->size() == 1) << text;
  return rules->at(0);
}

// Empty: it can fire.
std::string WhyNot(InjectionTransport transport, const std::string& text) {
  return WhyNotOn(transport, Rule(text)).value_or("");
}
std::string WhyNotOnIwarp(const std::string& text) {
  return WhyNot(InjectionTransport::kIwarp, text);
}
std::string WhyNotOnInfiniband(const std::string& text) {
  return WhyNot(InjectionTransport::kInfiniband, text);
}

TEST(Reach, WhatCanFireOnBothTransports) {
  for (const char* const text :
       {"disconnect message=3", "stall attempt=1.. kind=send,ack", "stall kind=any", "delay=1ms kind=immediate,write",
        "disconnect kind=read,send segment=2", "fail-registration", "delay-completion=1ms", "place-late=1ms",
        "fail-registration number=3..4 every=2", "stall message=3 every=100",
        "delay=1ms message=1..4 kind=read every=4"}) {
    EXPECT_EQ(WhyNotOnIwarp(text), "") << text;
    EXPECT_EQ(WhyNotOnInfiniband(text), "") << text;
  }
}

TEST(Reach, WhatCanFireOnOne) {
  for (const char* const text : {"delay=1ms kind=immediate,terminate", "disconnect kind=terminate"}) {
    EXPECT_EQ(WhyNotOnIwarp(text), "") << text;
    EXPECT_NE(WhyNotOnInfiniband(text), "") << text;
  }
  for (const char* const text :
       {"drop message=3", "drop kind=ack attempt=1", "duplicate", "overtake message=3", "not-ready attempt=1",
        "not-ready kind=send", "not-ready kind=any", "not-ready kind=write segment=2", "drop kind=datagram every=3",
        "drop kind=datagram,terminate", "drop kind=any", "drop kind=send,datagram message=3", "stall attempt=2..",
        "disconnect kind=ack", "drop kind=read attempt=2", "drop message=3 kind=read attempt=1..2 every=4"}) {
    EXPECT_NE(WhyNotOnIwarp(text), "") << text;
    EXPECT_EQ(WhyNotOnInfiniband(text), "") << text;
  }
}

TEST(Reach, AnActionMeetsItsKindsAlone) {
  EXPECT_EQ(WhyNotOnInfiniband("not-ready kind=read,ack"),
            "not-ready is never done to read, ack; on InfiniBand kind can be send, write");
  EXPECT_EQ(WhyNotOnInfiniband("delay=1ms kind=datagram"),
            "delay is never done to datagram; on InfiniBand kind can be send, write, read, read-response, atomic, "
            "atomic-response, ack");
  for (const char* const text : {"not-ready kind=read", "not-ready kind=read-response", "not-ready kind=atomic",
                                 "not-ready kind=atomic-response", "stall kind=datagram", "disconnect kind=datagram"}) {
    EXPECT_NE(WhyNotOnInfiniband(text).find("is never done to"), std::string::npos) << text;
  }
}

TEST(Reach, ATransportHasItsKindsAlone) {
  EXPECT_EQ(
      WhyNotOnIwarp("disconnect kind=ack,datagram"),
      "iWARP has no acknowledgements of its own, and TCP's are not seen; iWARP has no datagrams; on iWARP kind can be "
      "send, write, read, read-response, atomic, atomic-response, immediate, terminate");
  EXPECT_NE(WhyNotOnInfiniband("stall kind=immediate,terminate").find("InfiniBand has no Terminates"),
            std::string::npos);
  // An action that a transport cannot have is the first thing to say.
  EXPECT_NE(WhyNotOnIwarp("drop kind=datagram,terminate").find("iWARP cannot lose a segment"), std::string::npos);
}

TEST(Reach, DatagramsAreOnNoConnectionAndAreJudgedWhereTheyAreSent) {
  for (const char* const text :
       {"drop kind=datagram message=3", "drop kind=datagram,terminate message=3", "drop kind=datagram connection=2",
        "overtake kind=datagram segment=2", "duplicate kind=datagram attempt=1"}) {
    EXPECT_NE(WhyNotOnInfiniband(text).find("datagrams are on no connection"), std::string::npos) << text;
  }
  for (const char* const text :
       {"drop kind=datagram direction=received", "drop kind=datagram,terminate direction=received"}) {
    EXPECT_NE(WhyNotOnInfiniband(text).find("where they are sent"), std::string::npos) << text;
  }
}

TEST(Reach, OnlySomeMessagesHaveSeveralSegments) {
  EXPECT_EQ(WhyNotOnInfiniband("drop kind=ack,read segment=2"),
            "read, ack: one segment is all that such a message has, and its number is 1; of send, write, read-response "
            "there may be several");
  EXPECT_NE(WhyNotOnIwarp("disconnect kind=terminate segment=2.."), "");
  // A Send takes its Receive with its first segment, a Write with immediate data with its last.
  EXPECT_NE(WhyNotOnInfiniband("not-ready kind=send segment=2").find("with its first segment"), std::string::npos);
  EXPECT_EQ(WhyNotOnInfiniband("not-ready segment=2"), "");
}

TEST(Reach, OnlySomeMessagesComeTwice) {
  EXPECT_NE(WhyNotOnInfiniband("drop kind=ack attempt=2").find("attempt=1 is all"), std::string::npos);
  EXPECT_NE(WhyNotOnIwarp("stall attempt=2..").find("iWARP sends nothing twice"), std::string::npos);
}

TEST(Reach, EachNthOfFewerIsNone) {
  EXPECT_EQ(WhyNotOnInfiniband("fail-registration number=3 every=2"),
            "every=2 is never reached: no more than 1 can match");
  EXPECT_EQ(WhyNotOnIwarp("disconnect message=3 kind=read direction=sent every=2"),
            "every=2 is never reached: no more than 1 can match on a connection");
  EXPECT_EQ(WhyNotOnInfiniband("disconnect message=3 kind=read direction=sent every=2"), "") << "it may come again";
  EXPECT_NE(WhyNotOnIwarp("stall message=2..3 segment=1 every=5"), "");
}

// Whatever a rule says, some kind alone of those that it names makes it legal; and what is legal stays so when more
// kinds are named.
TEST(Reach, ARuleIsRefusedWhenEachOfItsKindsIs) {
  const std::vector<std::string> places = {
      "", " segment=2", " attempt=2", " message=3", " direction=received", " direction=sent segment=2..3 attempt=2"};
  for (const InjectionTransport transport : kTransports) {
    for (const ActionRow& row : AllActions()) {
      if (row.depth != InjectionDepth::kRecord) continue;
      for (const std::string& place : places) {
        for (size_t i = 0; i < kMessageKinds; ++i) {
          for (size_t j = i + 1; j < kMessageKinds; ++j) {
            const std::string action = std::string(row.name) + (row.takes_time ? "=1ms" : "");
            const auto legal = [&](std::string_view kinds) {
              const auto rules = ParseInjectionRules(action + place + " kind=" + std::string(kinds));
              return rules.has_value() && !WhyNotOn(transport, rules->at(0)).has_value();
            };
            const std::string one(AllKinds()[i].name);
            const std::string other(AllKinds()[j].name);
            EXPECT_EQ(legal(one + "," + other), legal(one) || legal(other)) << action << place << one << other;
          }
        }
      }
    }
  }
}

// Of text there is no such rule.
TEST(Reach, DirectionsOfRulesThatProgramsFillIn) {
  InjectionRule late{.action = InjectionAction::kDelay, .delay = 1ms};
  EXPECT_EQ(WhyNotOn(InjectionTransport::kIwarp, late), std::nullopt);
  late.sent = false;
  EXPECT_NE(WhyNotOn(InjectionTransport::kIwarp, late), std::nullopt);
}

}  // namespace
}  // namespace stagecoach::emu
