// The runner judges: a healthy world breaks no rule, a world that cannot go on is a deadlock, what makes no sense is
// refused in words.
#include "scenarios/runner/run.h"

#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/mark.h"
#include "emu/nic/nic.h"
#include "emu/world/simulated_world.h"
#include "scenarios/runner/nic_checker.h"
#include "scenarios/runner/program.h"

namespace stagecoach::scenario {
namespace {

Scenario Parse(const std::string& text) {
  Scenario scenario;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &scenario)) << text;
  return scenario;
}

std::string Rules(const RunReport& report) {
  std::string rules;
  for (const Violation& violation : report.violations) rules += violation.rule + ": " + violation.text + "\n";
  return rules;
}

// Plays a scenario that makes sense and breaks no rule.
RunReport RunWell(const Scenario& scenario) {
  const auto valid = Validate(scenario);
  EXPECT_TRUE(valid.has_value()) << valid.error();
  RunReport report = RunScenario(scenario);
  EXPECT_EQ(Rules(report), "");
  return report;
}

// How often marks are passed from now on.
class Marks {
 public:
  uint64_t Passed(const std::string& name) const { return Counts().at(name) - before_.at(name); }

 private:
  static std::map<std::string, uint64_t> Counts() {
    std::map<std::string, uint64_t> counts;
    for (const Mark* mark : AllMarks()) counts[mark->name()] += mark->passed();
    return counts;
  }
  const std::map<std::string, uint64_t> before_ = Counts();
};

const char kPair[] = "host { name: 'a' } host { name: 'b' } service { host: 'a' } ";

// With devices of either transport.
class Run : public ::testing::TestWithParam<const char*> {
 protected:
  static Scenario Parse(const std::string& text) {
    Scenario scenario = scenario::Parse(text);
    for (Host& host : *scenario.mutable_host()) host.mutable_device()->set_profile(GetParam());
    return scenario;
  }
};
INSTANTIATE_TEST_SUITE_P(, Run, ::testing::Values("iwarp", "roce"),
                         [](const auto& each) { return std::string(each.param); });

TEST_P(Run, EveryCallOfAHealthyWorldIsAnswered) {
  const Scenario scenario = Parse(std::string(kPair) + R"(
      client { name: 'c' host: 'b' server: 'a' concurrency: 4
               call { repeat: 20 argument_bytes: 10000 result_bytes: 20000 }
               call { plain_argument_bytes: 30000 plain_result_bytes: 30000 } })");
  const RunReport report = RunWell(scenario);
  EXPECT_GE(report.tally.answered, 21u);
  EXPECT_EQ(report.tally.answered, report.tally.calls);
  EXPECT_EQ(report.tally.connections, 1u);
}

TEST_P(Run, TheSameScenarioHasTheSameTrace) {
  Scenario scenario = Parse(std::string(kPair) + R"(
      link { a: 'a' b: 'b' jitter_ns: 5000 chop: true }
      client { name: 'c' host: 'b' server: 'a' concurrency: 4 call { repeat: 20 argument_bytes: 10000 } })");
  const RunReport first = RunScenario(scenario);
  EXPECT_EQ(RunScenario(scenario).trace_hash, first.trace_hash);
  scenario.set_seed(2);
  EXPECT_NE(RunScenario(scenario).trace_hash, first.trace_hash);
}

TEST_P(Run, AKilledServerComesBackAndItsClientsGoOn) {
  const Scenario scenario = Parse(std::string(kPair) + R"(
      client { name: 'c' host: 'b' server: 'a' call { repeat: 50 pause_ns: 100000 result_bytes: 5000 } }
      injection { at_ns: 2000000 kind: KILL a: 'a' for_ns: 1000000 })");
  const RunReport report = RunWell(scenario);
  EXPECT_GE(report.tally.connections, 2u);
  EXPECT_GE(report.tally.answered, 49u);
}

TEST_P(Run, ARuleCutsAConnectionAndItsClientGoesOn) {
  for (const std::string host : {"a", "b"}) {
    const std::string other = host == "a" ? "b" : "a";
    const Scenario scenario = Parse("host { name: '" + host +
                                    R"(' device { rule: 'disconnect connection=1 kind=send message=10' } }
      host { name: ')" + other + R"(' } service { host: 'a' }
      client { name: 'c' host: 'b' server: 'a' call { repeat: 50 result_bytes: 500 } })");
    const RunReport report = RunWell(scenario);
    EXPECT_EQ(report.tally.connections, 2u);
    EXPECT_GE(report.tally.disturbed, 1u);
    EXPECT_LE(report.tally.disturbed, 2u);
    EXPECT_EQ(report.tally.answered + report.tally.disturbed, report.tally.calls);
    EXPECT_EQ(RunScenario(scenario).trace_hash, report.trace_hash);
  }
}

TEST_P(Run, ARuleOfADeviceIsOverWithTheWork) {
  const Scenario scenario = Parse(R"(
      host { name: 'a' device { rule: 'delay-completion=1ms probability=20%; place-late=1ms' rule: 'delay=100us' } }
      host { name: 'b' device { rule: 'fail-registration every=3' } } service { host: 'a' }
      client { name: 'c' host: 'b' server: 'a' call { repeat: 30 argument_bytes: 20000 result_bytes: 20000 } })");
  const RunReport report = RunWell(scenario);
  EXPECT_GT(report.tally.answered, 5u);
  EXPECT_LT(report.tally.answered, report.tally.calls);
}

TEST(Rules, LossesByLuckAreOfTheSeedAndLast) {
  Scenario scenario = Parse(R"(
      host { name: 'a' device { profile: 'roce' rule: 'drop kind=any one-in=30; duplicate kind=any one-in=10' } }
      host { name: 'b' device { profile: 'roce' rule: 'overtake one-in=10; not-ready probability=10%' } }
      service { host: 'a' }
      client { name: 'c' host: 'b' server: 'a' concurrency: 4 call { repeat: 60 argument_bytes: 10000 } })");
  const RunReport report = RunWell(scenario);
  EXPECT_EQ(report.tally.answered, report.tally.calls);
  scenario.set_seed(2);
  EXPECT_NE(RunWell(scenario).trace_hash, report.trace_hash);
}

TEST(Rules, AHostThatStartsAgainHasThemAnew) {
  const Scenario scenario = Parse(R"(
      host { name: 'a' } host { name: 'b' device { rule: 'disconnect connection=1 kind=send message=3 direction=sent' } }
      service { host: 'a' }
      client { name: 'c' host: 'b' server: 'a' call { repeat: 30 pause_ns: 1000000 } }
      injection { at_ns: 10000000 kind: KILL a: 'b' for_ns: 1000000 })");
  const RunReport report = RunWell(scenario);
  EXPECT_GE(report.tally.connections, 4u);
}

// Longer than a run is waited for when nothing is late.
TEST_P(Run, WhatARuleHoldsBackForAnHourIsWaitedFor) {
  const RunReport report = RunWell(Parse(R"(
      host { name: 'a' } host { name: 'b' device { rule: 'delay=3600s kind=send message=5 direction=sent' } }
      service { host: 'a' } client { name: 'c' host: 'b' server: 'a' call { repeat: 10 timeout_ns: 0 } })"));
  EXPECT_GT(report.tally.answered, 5u);
}

// None of them would cut a connection, and all of them do.
TEST(Rules, DelaysCutTogether) {
  std::string delays;
  for (int i = 0; i < 12; ++i) delays += "delay=490ms kind=ack message=20..; ";
  const RunReport report = RunWell(Parse("host { name: 'a' device { profile: 'roce' rule: '" + delays + R"(' } }
      host { name: 'b' device { profile: 'roce' } } service { host: 'a' }
      client { name: 'c' host: 'b' server: 'a' call { repeat: 40 timeout_ns: 0 } })"));
  EXPECT_GT(report.tally.disturbed, 0u);
}

TEST(Rules, WhatBecameOfThemIsSaid) {
  const RunReport report = RunWell(Parse(R"(
      host { name: 'a' device { rule: 'stall message=9000; fail-registration number=8000' } }
      host { name: 'b' device { rule: 'delay=1us kind=send message=3..6; disconnect message=7' } }
      service { host: 'a' } client { name: 'c' host: 'b' server: 'a' call { repeat: 5 } })"));
  ASSERT_EQ(report.rules.size(), 4u);
  // What there was until they were over; there is more of it afterwards.
  EXPECT_EQ(report.rules[0], "a: rule 'stall message=9000' never fired: 1 connection, 5 messages sent and 5 received");
  EXPECT_TRUE(report.rules[1].starts_with("a: rule 'fail-registration number=8000' never fired: ")) << report.rules[1];
  EXPECT_EQ(report.rules[2], "b: rule 'delay=1us message=3..6 kind=send' fired 3 times");
  EXPECT_EQ(report.rules[3],
            "b: rule 'disconnect message=7' never fired: 1 connection, 5 messages sent and 5 received");
}

// Losses by luck last, and so does the count of them.
TEST(Rules, WhatLastsIsCountedToTheEnd) {
  const RunReport report = RunWell(Parse(R"(
      host { name: 'a' device { profile: 'roce' rule: 'duplicate one-in=5 kind=send message=9..' } }
      host { name: 'b' device { profile: 'roce' } }
      service { host: 'a' } client { name: 'c' host: 'b' server: 'a' call { repeat: 5 } })"));
  ASSERT_EQ(report.rules.size(), 1u);
  EXPECT_NE(report.rules[0].find("' fired "), std::string::npos) << report.rules[0];
}

// Counted on each device that the host has had.
TEST(Rules, OfAHostThatStartsAgainAreCountedTogether) {
  const RunReport report = RunWell(Parse(R"(
      host { name: 'a' device { rule: 'delay=1us kind=send message=2 times=1' } } host { name: 'b' }
      service { host: 'a' }
      client { name: 'c' host: 'b' server: 'a' session: true call { repeat: 60 service_ns: 2000000 } }
      injection { at_ns: 9000000 kind: KILL a: 'a' for_ns: 1000000 })"));
  EXPECT_EQ(report.rules, std::vector<std::string>{"a: rule 'delay=1us message=2 kind=send times=1' fired 2 times"});
}

// As of any other client, whose attempts are judged one by one.
TEST_P(Run, ACallOfASessionWaitsForRegistrationsInVain) {
  for (const char* const host : {"a", "b"}) {
    Scenario scenario = Parse(std::string(kPair) + R"(
        client { name: 'c' host: 'b' server: 'a' session: true call { repeat: 2 timeout_ns: 20000000000 } })");
    scenario.mutable_host(*host - 'a')->mutable_device()->add_rule("fail-registration");
    const RunReport report = RunWell(scenario);
    EXPECT_EQ(report.tally.refused, 2u) << host;
  }
}

// As a file is read.
Scenario Read(const std::string& text) {
  const auto read = ReadWritten(Parse(text));
  EXPECT_TRUE(read.has_value()) << read.error();
  return read.value_or(Scenario());
}

TEST(OldWords, FaultsOfDevicesAreRules) {
  const auto trace_of = [](const std::string& device) {
    return RunScenario(Read("host { name: 'a' device { profile: 'roce' " + device + R"( } }
        host { name: 'b' device { profile: 'roce' } } service { host: 'a' }
        client { name: 'c' host: 'b' server: 'a' call { repeat: 40 argument_bytes: 9000 result_bytes: 9000 } })"))
        .trace_hash;
  };
  EXPECT_EQ(trace_of(R"(fault { kind: FAIL_REGISTRATION one_in: 9 } fault { kind: DELAY_COMPLETION one_in: 3 }
                        fault { kind: ADVERSARIAL_PLACEMENT } fault { kind: LOSE_PACKET one_in: 50 }
                        fault { kind: REPEAT_PACKET one_in: 20 } fault { kind: NOT_READY one_in: 10 })"),
            trace_of(R"(rule: 'fail-registration one-in=9; delay-completion=20us one-in=3; place-late=50us'
                        rule: 'drop direction=sent kind=any one-in=50; duplicate kind=any one-in=20; not-ready kind=any one-in=10')"));
}

TEST(OldWords, FaultIsInjection) {
  const std::string work = "client { name: 'c' host: 'b' server: 'a' call { repeat: 50 result_bytes: 5000 } } ";
  const std::string kill = " { at_ns: 500000 kind: KILL a: 'a' for_ns: 1000000 } ";
  const std::string reset = " { at_ns: 500000 kind: RESET a: 'a' b: 'b' } ";
  const uint64_t today = RunScenario(Read(kPair + work + "injection" + kill + "injection" + reset)).trace_hash;
  EXPECT_EQ(RunScenario(Read(kPair + work + "fault" + kill + "fault" + reset)).trace_hash, today);
  EXPECT_EQ(RunScenario(Read(kPair + work + "injection" + reset + "fault" + kill)).trace_hash, today);
  EXPECT_NE(RunScenario(Read(kPair + work)).trace_hash, today);
}

TEST(OldWords, WhateverAnOldFileMaySayIsRead) {
  const auto rules = [](const std::string& fault) {
    const Scenario read = Read("host { name: 'a' device { fault { " + fault + " } } }");
    EXPECT_TRUE(read.host(0).device().fault().empty());
    return read.host(0).device().rule_size() == 0 ? "" : read.host(0).device().rule(0);
  };
  EXPECT_EQ(rules("kind: DELAY_COMPLETION delay_ns: 0"), "");
  EXPECT_EQ(rules("kind: DELAY_COMPLETION delay_ns: 86400000000000 one_in: 3"), "delay-completion=3600s one-in=3");
  EXPECT_EQ(rules("kind: DELAY_COMPLETION"), "delay-completion=20us one-in=1");
  EXPECT_EQ(rules("kind: NONE"), "");
  const Scenario both = Read("host { name: 'a' } fault { kind: KILL a: 'a' } injection { kind: FORGET a: 'a' }");
  ASSERT_EQ(both.injection_size(), 2);
  EXPECT_EQ(both.injection(0).kind(), Injection::KILL);
  EXPECT_TRUE(both.fault().empty());
}

// Each is a rule of the device.
TEST(OldWords, AreBoundedInNumberTogetherWithRules) {
  const auto problem = [](size_t faults, const std::string& more) {
    std::string device = "host { name: 'a' device { " + more;
    for (size_t i = 0; i < faults; ++i) device += " fault { kind: FAIL_REGISTRATION one_in: 9 }";
    const auto read = ReadWritten(Parse(device + " } }"));
    return read ? "" : read.error();
  };
  const std::string too_many =
      "host.device.fault: with those of rule more than 256 rules of one device\n(of host \"a\")";
  EXPECT_EQ(problem(256, ""), "");
  EXPECT_EQ(problem(257, ""), too_many);
  EXPECT_EQ(problem(254, "rule: 'stall' rule: 'stall'"), "");
  EXPECT_EQ(problem(254, "rule: 'stall; stall' rule: 'stall'"), too_many);
  // What says that there is nothing is none.
  EXPECT_EQ(problem(256, "fault { kind: NONE } fault { kind: DELAY_COMPLETION delay_ns: 0 }"), "");
  std::string rules;
  for (size_t i = 0; i < 129; ++i) rules += "stall;";
  EXPECT_EQ(problem(1, "rule: '" + rules + "' rule: '" + rules + "'"),
            "host.device.rule[1]: more than 256 rules of one device\n(of host \"a\")");
}

TEST_P(Run, CallsOfASessionOutliveItsConnections) {
  const Scenario scenario = Parse(std::string(kPair) + R"(
      client { name: 'c' host: 'b' server: 'a' session: true concurrency: 4 reconnect_ns: 1000000
               call { repeat: 60 result_bytes: 5000 service_ns: 2000000 } }
      injection { at_ns: 3000000 kind: KILL a: 'a' for_ns: 1000000 }
      injection { at_ns: 9000000 kind: RESTART_SERVICE a: 'a' for_ns: 1 })");
  const RunReport report = RunWell(scenario);
  EXPECT_GE(report.tally.connections, 2u);
  EXPECT_GE(report.tally.calls, 60u);
  EXPECT_EQ(report.tally.answered, report.tally.calls);
}

TEST_P(Run, CallsOfASessionThatIsClosedOrDestroyedEndWithThat) {
  const Scenario scenario = Parse(std::string(kPair) + R"(
      client { name: 'c' host: 'b' server: 'a' session: true connections: 2 concurrency: 4 credits: 1
               close_ns: 5000000 destroy_ns: 9000000 call { repeat: 16 service_ns: 2000000 } })");
  const RunReport report = RunWell(scenario);
  EXPECT_EQ(report.tally.refused, 8u);
}

TEST_P(Run, AServiceCallsItsClientsBackOnTheSameXids) {
  const Scenario scenario = Parse(R"(
      host { name: 'a' } host { name: 'b' } service { host: 'a' reverse_credits: 4 } xids: 1
      client { name: 'c' host: 'b' server: 'a' concurrency: 4 reverse_credits: 2
               call { repeat: 20 argument_bytes: 10000 service_ns: 100000 }
               reverse_call { repeat: 2 argument_bytes: 700 result_bytes: 600 } })");
  const RunReport report = RunWell(scenario);
  EXPECT_GE(report.tally.answered, 60u);
  EXPECT_EQ(report.tally.connections, 1u);
}

TEST_P(Run, ClientsOfASharedPoolOfReceivesAreAllAnswered) {
  const Scenario scenario = Parse(R"(
      host { name: 'a' } host { name: 'b' } service { host: 'a' shared_receives: 32 }
      client { name: 'c' host: 'b' server: 'a' concurrency: 16 call { repeat: 40 argument_bytes: 5000 } }
      client { name: 'd' host: 'b' server: 'a' concurrency: 16 call { repeat: 40 result_bytes: 5000 } })");
  const RunReport report = RunWell(scenario);
  EXPECT_EQ(report.tally.answered, report.tally.calls);
}

// Whatever has no room of its own is read from memory of the server, in worlds of one credit, too.
TEST_P(Run, RepliesThatFitNowhereAreReadByTheOlderDocuments) {
  for (const std::string server : {"draft-2004", "rfc5666"}) {
    for (const std::string client : {"draft-2004", "rfc5666"}) {
      for (const std::string credits : {"1", "8"}) {
        SCOPED_TRACE(client + " to " + server + ", credits " + credits);
        const Scenario scenario =
            Parse("host { name: 'a' } host { name: 'b' } service { host: 'a' credits: " + credits +
                  " rpcrdma_profile: '" + server + R"(' exposed_replies_max: 2 receive_align: 64 }
            client { name: 'c' host: 'b' server: 'a' concurrency: 8 padding_align: 64 padding_threshold: 100
                     rpcrdma_profile: ')" +
                  client + R"('
                     call { repeat: 10 argument_bytes: 600 result_bytes: 20000 result_room_bytes: 10000 }
                     call { repeat: 10 plain_result_bytes: 5000 plain_result_room_bytes: 10 }
                     call { repeat: 5 argument_bytes: 30000 result_bytes: 3001 } })");
        const RunReport report = RunWell(scenario);
        EXPECT_EQ(report.tally.answered, report.tally.calls);
        EXPECT_EQ(report.tally.connections, 1u);
      }
    }
  }
}

TEST_P(Run, RepliesThatFitNowhereAreRefusedWhereOneEndKnowsNoBetter) {
  const Scenario scenario = Parse(std::string(kPair) + R"(
      client { name: 'c' host: 'b' server: 'a' rpcrdma_profile: 'rfc5666'
               call { repeat: 3 result_bytes: 20000 result_room_bytes: 10000 } call { result_bytes: 20000 } })");
  const RunReport report = RunWell(scenario);
  EXPECT_EQ(report.tally.refused, 3u);
}

// As soon as more than its window has passed, for a reason that the scenario has.
TEST_P(Run, AServerThatWaitsTooShortAWhileForRepliesToBeReadLosesItsClient) {
  const Scenario scenario = Parse(R"(
      host { name: 'a' } host { name: 'b' } link { a: 'a' b: 'b' latency_ns: 2000000 }
      service { host: 'a' rpcrdma_profile: 'rfc5666' exposed_ns: 1000000 }
      client { name: 'c' host: 'b' server: 'a' rpcrdma_profile: 'rfc5666'
               call { repeat: 3 result_bytes: 20000 result_room_bytes: 0 } })");
  const RunReport report = RunWell(scenario);
  EXPECT_EQ(report.tally.disturbed, 3u);
  EXPECT_GE(report.tally.connections, 3u);
}

TEST_P(Run, ClientsConfigureTheirConnectionsWhereTheServerLetsThem) {
  for (const std::string service : {"ccp: true ccp_inline_max: 16384", ""}) {
    const Scenario scenario = Parse("host { name: 'a' } host { name: 'b' } service { host: 'a' " + service + R"( }
        client { name: 'c' host: 'b' server: 'a' ccp: true inline_threshold: 16384 concurrency: 4
                 call { repeat: 20 argument_bytes: 10000 result_bytes: 10000 } })");
    const RunReport report = RunWell(scenario);
    EXPECT_EQ(report.tally.answered, report.tally.calls);
  }
}

// Whichever document their version 1 is by.
TEST_P(Run, EndsFindTheVersionThatTheyHaveInCommon) {
  std::vector<std::string> ends;
  for (const std::string document : {"draft-2004", "rfc5666", "rfc5666bis"}) {
    for (const std::string versions :
         {"version_low: 1 version_high: 1", "version_low: 1 version_high: 2", "version_low: 2 version_high: 2"}) {
      ends.push_back("rpcrdma_profile: '" + document + "' " + versions + " ");
    }
  }
  int met = 0;
  for (const std::string& service : ends) {
    for (const std::string& client : ends) {
      for (const std::string session : {"session: true", ""}) {
        const Scenario scenario =
            Parse("host { name: 'a' } host { name: 'b' } service { host: 'a' " + service + "} " +
                  "client { name: 'c' host: 'b' server: 'a' concurrency: 4 " + client + session +
                  " call { repeat: 10 argument_bytes: 10000 result_bytes: 20000 } call { plain_result_bytes: 9000 } }");
        if (!Validate(scenario)) continue;
        ++met;
        SCOPED_TRACE(client + " to " + service + " " + session);
        const RunReport report = RunWell(scenario);
        EXPECT_EQ(report.tally.answered, report.tally.calls);
        EXPECT_EQ(report.tally.connections, 1u);
      }
    }
  }
  EXPECT_EQ(met, 2 * (81 - 2 * 9)) << "all but version 1 alone with version 2 alone";
}

// One server has clients of each kind. What found no room is read in version 1 by the older documents, and in version 2
// the service says how much it needs; a client with both has it either way.
TEST_P(Run, ClientsOfBothVersionsAndOfOlderDocumentsMeetOnOneServer) {
  const std::string calls = R"(
      call { repeat: 10 argument_bytes: 9000 result_bytes: 20000 result_room_bytes: 10000 }
      call { repeat: 10 argument_bytes: 600 plain_result_bytes: 5000 plain_result_room_bytes: 10 } } )";
  const auto client = [&](const std::string& name, const std::string& terms) {
    return "client { name: '" + name + "' host: 'b' server: 'a' concurrency: 8 " + terms + calls;
  };
  const struct {
    std::string server;
    bool speaks_2;
  } kRows[] = {{"version_low: 1 version_high: 2", true}, {"version_low: 1 version_high: 1", false}};
  for (const auto& row : kRows) {
    SCOPED_TRACE(row.server);
    const Scenario scenario =
        Parse("host { name: 'a' } host { name: 'b' } service { host: 'a' rpcrdma_profile: 'rfc5666' " + row.server +
              "} " + client("older", "rpcrdma_profile: 'rfc5666'") +
              client("both", "rpcrdma_profile: 'draft-2004' version_high: 2 padding_align: 64"));
    const Marks marks;
    const RunReport report = RunWell(scenario);
    EXPECT_EQ(report.tally.answered, report.tally.calls);
    EXPECT_EQ(marks.Passed("service.called_in_both_versions"), row.speaks_2 ? 1u : 0u);
    EXPECT_EQ(marks.Passed("service.version_2_beside_an_older_document") > 0, row.speaks_2);
    EXPECT_EQ(marks.Passed("caller.version_2_beside_an_older_document") > 0, row.speaks_2);
    EXPECT_EQ(marks.Passed("caller.older_document_in_place_of_version_2") > 0, !row.speaks_2);
    EXPECT_EQ(marks.Passed("client.older_document_on_a_connection_of_its_own") > 0, !row.speaks_2);
  }
}

// Too many chunks, or segments, or too little room for a reply: in version 2 the client is told, and makes do; but
// calls by Position-Zero Read chunk that have another one beside it end, until it is known that none is taken.
TEST_P(Run, InVersion2CallsAreAnsweredByServersThatTakeLittle) {
  for (const std::string limits :
       {"read_segments_max: 1", "read_segments_max: 2", "write_chunks_max: 0", "write_segments_max: 0",
        "segments_per_chunk_max: 1", "read_segments_max: 1 write_chunks_max: 0 segments_per_chunk_max: 1"}) {
    SCOPED_TRACE(limits);
    const Scenario scenario = Parse(
        "host { name: 'a' } host { name: 'b' } service { host: 'a' version_low: 2 version_high: 2 " + limits + R"(}
        client { name: 'c' host: 'b' server: 'a' version_low: 2 version_high: 2 concurrency: 4
                 call { repeat: 5 plain_argument_bytes: 9001 argument_bytes: 10001 result_bytes: 20000 }
                 call { repeat: 5 argument_bytes: 9001 result_bytes: 20000 result_room_bytes: 10000 }
                 call { repeat: 5 plain_result_bytes: 20000 plain_result_room_bytes: 10 }
                 call { repeat: 5 plain_argument_bytes: 9001 argument_bytes: 10001
                        result_bytes: 20000 result_room_bytes: 0 } })");
    const RunReport report = RunWell(scenario);
    EXPECT_EQ(report.tally.answered + report.tally.refused, report.tally.calls);
    EXPECT_EQ(report.tally.refused > 0, limits.starts_with("read_segments_max: 1"));
    EXPECT_LE(report.tally.refused, 4u) << "as many as are under way when the first is refused";
    EXPECT_EQ(report.tally.connections, 1u);
  }
}

// As far as the client follows: not at all, without chunks, with them.
TEST_P(Run, InVersion2AServiceCallsItsClientsAsFarAsTheyFollow) {
  struct Row {
    std::string client;
    uint64_t refused;
  };
  for (const Row& row :
       {Row{"", 60}, Row{"reverse_credits: 2", 20}, Row{"reverse_credits: 2 reverse_chunks: true", 0}}) {
    SCOPED_TRACE(row.client);
    const Scenario scenario = Parse(R"(host { name: 'a' } host { name: 'b' }
        service { host: 'a' reverse_credits: 4 version_low: 2 version_high: 2 } xids: 1
        client { name: 'c' host: 'b' server: 'a' concurrency: 4 version_low: 2 version_high: 2 )" +
                                    row.client + R"( call { repeat: 20 argument_bytes: 10000 service_ns: 100000 }
                 reverse_call { repeat: 2 argument_bytes: 700 result_bytes: 600 }
                 reverse_call { argument_bytes: 9000 result_bytes: 8000 } })");
    const RunReport report = RunWell(scenario);
    EXPECT_EQ(report.tally.answered + report.tally.refused, report.tally.calls);
    // Probes are answered by calls, too.
    EXPECT_EQ(report.tally.refused > 0, row.refused > 0);
    EXPECT_GE(report.tally.refused, row.refused);
  }
}

TEST_P(Run, ClientsOfAServerThatIsGoneForGoodComeToAnEnd) {
  const Scenario scenario = Parse(std::string(kPair) + R"(
      client { name: 'c' host: 'b' server: 'a' call { repeat: 50 pause_ns: 100000 result_bytes: 5000 } }
      injection { at_ns: 2000000 kind: POWER_LOSS a: 'a' })");
  const RunReport report = RunWell(scenario);
  EXPECT_GT(report.tally.disturbed, 0u);
}

// Whether it is the client's processes that stand still or the server's; and what they do when they run again is done.
TEST_P(Run, ProcessesThatStandStillEndNothing) {
  for (const char* host : {"a", "b"}) {
    const Scenario scenario = Parse(std::string(kPair) + R"(
        client { name: 'c' host: 'b' server: 'a' call { repeat: 50 pause_ns: 100000 result_bytes: 50000 } }
        injection { at_ns: 2000000 kind: STOP a: ')" +
                                    host + R"(' for_ns: 20000000000 }
        injection { at_ns: 3000000 kind: STOP a: ')" +
                                    host + R"(' for_ns: 1000000 })");
    const RunReport report = RunWell(scenario);
    EXPECT_EQ(report.tally.disturbed, 0u) << host;
  }
}

// The one that begins anew runs.
TEST_P(Run, ProcessesThatAreKilledWhileTheyStandStillBeginAnew) {
  RunWell(Parse(std::string(kPair) + R"(
      client { name: 'c' host: 'b' server: 'a' call { repeat: 50 pause_ns: 1000000 timeout_ns: 10000000 } }
      injection { at_ns: 2000000 kind: STOP a: 'a' for_ns: 20000000000 }
      injection { at_ns: 5000000 kind: KILL a: 'a' for_ns: 5000000 })"));
}

TEST_P(Run, FilesComeBackAsTheyWent) {
  const Scenario scenario = Parse(R"(
      host { name: 'a' } host { name: 'b' } service { host: 'a' files: true }
      file_copy { host: 'b' server: 'a' bytes: 300001 }
      injection { at_ns: 300000 kind: RESET a: 'a' b: 'b' })");
  const RunReport report = RunWell(scenario);
  EXPECT_EQ(report.tally.files_copied, 1u);
}

TEST_P(Run, BlockingProgramsPlayOnFibers) {
  const Scenario scenario =
      Parse("host { name: 'a' } host { name: 'b' } ping_pong { client: 'a' server: 'b' count: 7 }");
  const RunReport report = RunWell(scenario);
  EXPECT_EQ(report.tally.pings, 7u);
}

// At `when` the host a loses power, of which the scenario says nothing. Whoever waits for it without a time-out waits
// for ever.
RunOptions SecretSilence(Duration when) {
  RunOptions options;
  options.sabotage = [when](emu::SimulatedWorld& world) {
    world.sim().loop().At(Instant() + when, [&world] { world.sim().CutHost(world.fabric("a"), emu::Cut::kSilent); });
  };
  return options;
}

constexpr char kWaitsForEver[] =
    "client { name: 'c' host: 'b' server: 'a' call { } call { service_ns: 5000000 timeout_ns: 0 } }";

// The report must show who waits for what.
TEST_P(Run, AWorldThatRunsDryIsADeadlockAndReportedWithItsState) {
  const RunReport report = RunScenario(Parse(std::string(kPair) + kWaitsForEver), SecretSilence(1ms));
  ASSERT_FALSE(report.violations.empty());
  EXPECT_EQ(report.violations[0].rule, "liveness.deadlock");
  EXPECT_NE(report.state.find("client c on b: 2 of 2 calls started, 1 under way"), std::string::npos) << report.state;
  EXPECT_NE(report.state.find("qp-2: RTS"), std::string::npos) << report.state;
  EXPECT_NE(report.state.find("credits granted 64, in flight 1;"), std::string::npos) << report.state;
}

TEST_P(Run, AWorldWhereSomethingStillGoesOnIsSlowAndNotDeadlocked) {
  RunOptions options = SecretSilence(1ms);
  options.sabotage = [silence = options.sabotage](emu::SimulatedWorld& world) {
    silence(world);
    for (int i = 0; i < 1000; ++i) world.sim().loop().At(Instant() + i * 100s, [] {});
  };
  const RunReport report = RunScenario(Parse(std::string(kPair) + kWaitsForEver), options);
  ASSERT_FALSE(report.violations.empty());
  EXPECT_EQ(report.violations[0].rule, "liveness.slow");
}

TEST_P(Run, WhatTheScenarioItselfWaitsForIsNeitherSlowNorDead) {
  const Scenario scenario = Parse(std::string(kPair) + R"(
      client { name: 'c' host: 'b' server: 'a' start_ns: 10000000000000
               call { repeat: 2 service_ns: 9000000000000 timeout_ns: 0 pause_ns: 20000000000000 } })");
  const RunReport report = RunWell(scenario);
  EXPECT_EQ(report.tally.answered, report.tally.calls);
}

// --- Clients that end amidst their work ---

constexpr char kAmidst[] = "concurrency: 4 call { repeat: 8 service_ns: 1000000 argument_bytes: 10000 } }";

// The client ends so ("close_ns") when one call is with the service, one is sent and two wait for a credit.
std::string EndsAmidst(const std::string& end) {
  return "host { name: 'a' } host { name: 'b' } service { host: 'a' credits: 1 } "
         "client { name: 'c' host: 'b' server: 'a' " +
         end + ": 2500000 " + kAmidst;
}

TEST_P(Run, CallsThatAreUnderWayWhenTheirClientIsClosedEndWithThat) {
  const Scenario scenario = Parse(EndsAmidst("close_ns"));
  const RunReport report = RunWell(scenario);
  EXPECT_GE(report.tally.refused, 3u);
  EXPECT_LE(report.tally.refused, 4u);
  EXPECT_EQ(report.tally.connections, 2u) << "and the client goes on with a new connection";
}

TEST_P(Run, CallsThatAreUnderWayWhenTheirClientIsDestroyedEndWithThat) {
  const Scenario scenario = Parse(EndsAmidst("destroy_ns"));
  const RunReport report = RunWell(scenario);
  EXPECT_EQ(report.tally.refused, 4u);
  EXPECT_EQ(report.tally.connections, 2u);
}

TEST_P(Run, AClientMayBeClosedOrDestroyedWhileItConnects) {
  for (const char* end : {"close_ns", "destroy_ns"}) {
    const Scenario scenario = Parse(
        "host { name: 'a' } host { name: 'b' } service { host: 'a' } "
        "link { a: 'a' b: 'b' latency_ns: 1000000 } "
        "client { name: 'c' host: 'b' server: 'a' " +
        std::string(end) + ": 500000 " + std::string(kAmidst));
    const RunReport report = RunScenario(scenario);
    EXPECT_EQ(Rules(report), "") << end;
    EXPECT_EQ(report.tally.answered, report.tally.calls) << end;
    EXPECT_EQ(report.tally.connections, 2u) << end;
  }
}

// More than its listener holds at a time.
TEST_P(Run, ManyClientsMayComeToOneServerAtOnce) {
  std::string text = "host { name: 'a' } host { name: 'b' } service { host: 'a' clients_max: 1000 } ";
  for (int i = 0; i < 100; ++i) {
    text += "client { name: 'c" + std::to_string(i) + "' host: 'b' server: 'a' credits: 2 call { } } ";
  }
  const RunReport report = RunWell(Parse(text));
  EXPECT_EQ(report.tally.answered, report.tally.calls);
}

// More than a backlog has room for: iWARP turns them away, InfiniBand takes them when they ask again. Beside the first
// connection of each there is another in every round of probes.
TEST_P(Run, WhoFindsNoRoomInTheBacklogComesAgain) {
  const bool infiniband = std::string(GetParam()) == "roce";
  for (const bool session : {false, true}) {
    std::string text = "host { name: 'a' } host { name: 'b' } service { host: 'a' backlog: 4 } ";
    for (int i = 0; i < 20; ++i) {
      text += "client { name: 'c" + std::to_string(i) + "' host: 'b' server: 'a' queued_calls_max: 1 call { } ";
      if (session) text += "session: true reconnect_ns: 1000000 reconnect_max_ns: 8000000 ";
      text += "} ";
    }
    Marks marks;
    const RunReport report = RunWell(Parse(text));
    EXPECT_EQ(report.tally.answered, report.tally.calls);
    EXPECT_GE(marks.Passed(infiniband ? "gsi.backlog_full" : "cm.backlog_full"), session ? 16u : 100u);
    EXPECT_EQ(report.tally.connections > 20, !infiniband) << report.tally.connections;
  }
}

// More than a listener holds of those, before and while others come, also again: all who talk are served, and all who
// do not are shut out, by a newer one or for want of time.
TEST_P(Run, PeersThatSayNothingKeepNobodyOutAndAreShutOut) {
  const bool infiniband = std::string(GetParam()) == "roce";
  Marks marks;
  const RunReport report = RunWell(Parse(std::string(kPair) + R"(
      host { name: 'x' } host { name: 'y' }
      silent_peer { host: 'x' server: 'a' streams: 200 times: 2 again_ns: 300000000 }
      silent_peer { host: 'y' server: 'a' streams: 20 said_bytes: 7 start_ns: 1000000 times: 2 }
      client { name: 'c' host: 'b' server: 'a' call { repeat: 70 pause_ns: 100000000 result_bytes: 20000 } }
      client { name: 'd' host: 'b' server: 'a' calls_per_connection: 1 call { repeat: 70 pause_ns: 100000000 } })"));
  EXPECT_EQ(report.tally.answered, report.tally.calls);
  EXPECT_GE(report.tally.connections, 71u);
  EXPECT_EQ(report.tally.silent_streams, 2u * (200 + 20));
  EXPECT_EQ(report.tally.shut_out, report.tally.silent_streams);
  const uint64_t gave_way =
      marks.Passed(infiniband ? "port.too_many_visitors_say_nothing" : "cm.half_open_limit_reached");
  EXPECT_GE(gave_way, 200u + 20 - 128);
  EXPECT_EQ(marks.Passed(infiniband ? "port.no_hello_in_time" : "mpa.no_request_in_time") + gave_way,
            report.tally.silent_streams);
}

// In their own time: a listener that nobody else comes to.
TEST_P(Run, APeerThatSaysNothingIsShutOutOfAQuietServer) {
  const RunReport report = RunWell(Parse(std::string(kPair) + "silent_peer { host: 'b' server: 'a' said_bytes: 19 }"));
  EXPECT_EQ(report.tally.silent_streams, 8u);
}

TEST_P(Run, StopsWhereItIsTold) {
  const Scenario scenario =
      Parse(std::string(kPair) + "client { name: 'c' host: 'b' server: 'a' call { repeat: 50 result_bytes: 5000 } }");
  const uint64_t all = RunScenario(scenario).trace_events;
  int asked = 0;
  RunOptions options;
  options.stop = [&asked] { return ++asked > 100; };
  const RunReport report = RunScenario(scenario, options);
  EXPECT_TRUE(report.stopped);
  EXPECT_LT(report.trace_events, all);
  EXPECT_FALSE(report.state.empty());
  EXPECT_EQ(Rules(report), "") << "what is broken off is not judged";
}

TEST_P(Run, RulesOfDevicesLastWhileThereIsWork) {
  const Scenario scenario = Parse(R"(
      host { name: 'a' } service { host: 'a' }
      host { name: 'b' device { rule: 'fail-registration one-in=3' } }
      client { name: 'c' host: 'b' server: 'a' call { repeat: 40 argument_bytes: 20000 } })");
  const RunReport report = RunWell(scenario);
  EXPECT_GT(report.tally.refused, 3u);
  EXPECT_GT(report.tally.answered, 3u);
}

// A client that serves its server, and has no memory for what it is sent, ends the connection.
TEST_P(Run, RulesOfDevicesLastForReverseCallsToo) {
  const Scenario scenario = Parse(R"(
      host { name: 'a' } service { host: 'a' reverse_credits: 4 version_low: 2 version_high: 2 }
      host { name: 'b' device { rule: 'fail-registration one-in=3' } }
      client { name: 'c' host: 'b' server: 'a' version_low: 2 version_high: 2 reverse_credits: 4 reverse_chunks: true
               call { repeat: 40 } reverse_call { argument_bytes: 20000 } })");
  const RunReport report = RunWell(scenario);
  EXPECT_GT(report.tally.connections, 1u);
  EXPECT_GT(report.tally.answered, 3u);
}

// Its client was killed before it called, long before the end.
TEST_P(Run, AServerNobodyCameToIsNoFailure) {
  const Scenario scenario = Parse(R"(
      host { name: 'a' } host { name: 'b' } host { name: 'c' } service { host: 'c' }
      ping_pong { client: 'b' server: 'a' start_ns: 5000000 }
      client { name: 'c' host: 'a' server: 'c' call { service_ns: 400000000000 timeout_ns: 0 } }
      injection { at_ns: 1000000 kind: KILL a: 'b' for_ns: 1000000 })");
  EXPECT_EQ(Rules(RunScenario(scenario)), "");
}

TEST_P(Run, KillsOfOneHostMayOverlap) {
  const Scenario scenario = Parse(std::string(kPair) + R"(
      client { name: 'c' host: 'b' server: 'a' call { repeat: 50 pause_ns: 100000 result_bytes: 5000 } }
      injection { at_ns: 1000000 kind: KILL a: 'a' for_ns: 2000000 }
      injection { at_ns: 2000000 kind: KILL a: 'a' }
      injection { at_ns: 2500000 kind: POWER_LOSS a: 'a' for_ns: 4000000 })");
  const RunReport report = RunWell(scenario);
  EXPECT_GE(report.tally.answered, 48u) << "the second and third kill of a host that is down do nothing";
}

// --- What has no cause in the scenario is no excuse ---

// At `when`, all connections between a and b are reset, of which the scenario says nothing.
RunOptions SecretReset(Duration when) {
  RunOptions options;
  options.sabotage = [when](emu::SimulatedWorld& world) {
    world.sim().loop().At(Instant() + when,
                          [&world] { world.sim().ResetConnections(world.fabric("a"), world.fabric("b")); });
  };
  return options;
}

std::string FirstRule(const RunReport& report) {
  return report.violations.empty() ? std::string() : report.violations[0].rule;
}

constexpr char kWork[] = "call { repeat: 50 pause_ns: 1000000 result_bytes: 5000 }";

TEST(Excuses, AConnectionIsNotLostForNothing) {
  const Scenario scenario = Parse(std::string(kPair) + "client { name: 'c' host: 'b' server: 'a' " + kWork + "}");
  EXPECT_EQ(FirstRule(RunScenario(scenario, SecretReset(10ms + 500us))), "connection.lost");
}

TEST(Excuses, AConnectionOfASessionIsNotLostForNothing) {
  const Scenario scenario =
      Parse(std::string(kPair) + "client { name: 'c' host: 'b' server: 'a' session: true " + kWork + "}");
  EXPECT_EQ(FirstRule(RunScenario(scenario, SecretReset(10ms + 500us))), "connection.lost");
}

TEST(Excuses, ACancelledCallIsNoneOnceItsReplyHasCome) {
  const Scenario scenario = Parse(std::string(kPair) + R"(
      client { name: 'c' host: 'b' server: 'a'
               call { result_bytes: 100 service_ns: 100000 cancel_ns: 50000 } )" +
                                  kWork + "}");
  EXPECT_EQ(Rules(RunScenario(scenario)), "");
  EXPECT_EQ(FirstRule(RunScenario(scenario, SecretReset(10ms + 500us))), "connection.lost");
}

// The server writes its result into memory that is not valid any more.
TEST(Excuses, ACancelledCallIsOneWhileTheServerIsAtWorkForIt) {
  const Scenario scenario = Parse(std::string(kPair) + R"(
      client { name: 'c' host: 'b' server: 'a' concurrency: 2
               call { result_bytes: 5000 service_ns: 2000000 cancel_ns: 50000 }
               call { repeat: 50 pause_ns: 100000 result_bytes: 5000 } })");
  const RunReport report = RunWell(scenario);
  EXPECT_GE(report.tally.connections, 2u) << "which the device ends with the connection";
}

TEST(Excuses, ACallThatTimedOutBeforeItWasSentIsNone) {
  const Scenario scenario = Parse(R"(
      host { name: 'a' } host { name: 'b' } service { host: 'a' credits: 1 }
      client { name: 'c' host: 'b' server: 'a' concurrency: 2 call { service_ns: 5000000 } call { timeout_ns: 1000000 })" +
                                  std::string(kWork) + "}");
  const RunReport report = RunWell(scenario);
  EXPECT_EQ(report.tally.refused, 1u);
  EXPECT_EQ(FirstRule(RunScenario(scenario, SecretReset(20ms + 500us))), "connection.lost");
}

TEST(Excuses, ALinkThatChangesIsNone) {
  const Scenario scenario = Parse(std::string(kPair) + "client { name: 'c' host: 'b' server: 'a' " + kWork + R"(}
      injection { at_ns: 1000000 kind: LINK a: 'a' b: 'b' link { latency_ns: 20000 } })");
  EXPECT_EQ(Rules(RunScenario(scenario)), "");
  EXPECT_EQ(FirstRule(RunScenario(scenario, SecretReset(10ms + 500us))), "connection.lost");
}

TEST(Excuses, APartitionEndsNoConnectionThatWasThere) {
  const Scenario scenario = Parse(std::string(kPair) + "client { name: 'c' host: 'b' server: 'a' " + kWork + R"(}
      injection { at_ns: 2000000 kind: PARTITION a: 'a' b: 'b' for_ns: 1000000 })");
  EXPECT_EQ(Rules(RunScenario(scenario)), "");
  EXPECT_EQ(FirstRule(RunScenario(scenario, SecretReset(10ms + 500us))), "connection.lost");
}

TEST(Excuses, NorDoProcessesThatStandStill) {
  const Scenario scenario = Parse(std::string(kPair) + "client { name: 'c' host: 'b' server: 'a' " + kWork + R"(}
      injection { at_ns: 2000000 kind: STOP a: 'a' for_ns: 1000000 })");
  EXPECT_EQ(Rules(RunScenario(scenario)), "");
  EXPECT_EQ(FirstRule(RunScenario(scenario, SecretReset(10ms + 500us))), "connection.lost");
}

// What is done to datagrams keeps clients from connecting, and is no reason for an end of what is connected.
TEST(Excuses, LosingDatagramsIsNoneForWhatIsConnected) {
  const Scenario scenario = Parse(
      "host { name: 'a' device { profile: 'roce' rule: 'duplicate kind=datagram; drop kind=datagram one-in=2' } } "
      "host { name: 'b' device { profile: 'roce' } } service { host: 'a' } "
      "client { name: 'c' host: 'b' server: 'a' call { repeat: 2000 pause_ns: 1000000 } }");
  RunOptions cut;
  cut.sabotage = [](emu::SimulatedWorld& world) {
    const auto partition = [&world](bool cut_off) {
      world.sim().Partition(world.fabric("a"), world.fabric("b"), cut_off);
    };
    world.sim().loop().At(Instant() + 1s, [partition] { partition(true); });
    world.sim().loop().At(Instant() + 60s, [partition] { partition(false); });
  };
  EXPECT_EQ(FirstRule(RunScenario(scenario, cut)), "call.failed");
}

// A connection that was made when an injection was over has no part in it.
TEST(Excuses, AnInjectionIsNoneForWhatBeganAfterIt) {
  for (const char* injection : {"RESET a: 'a' b: 'b'", "FORGET a: 'a'", "FORGET a: 'b'", "KILL a: 'a' for_ns: 1000000",
                                "POWER_LOSS a: 'a' for_ns: 1000000", "RESTART_SERVICE a: 'a' for_ns: 1000000",
                                "KILL a: 'b' for_ns: 1000000", "PARTITION a: 'a' b: 'b' for_ns: 1000000"}) {
    const Scenario scenario = Parse(std::string(kPair) + "client { name: 'c' host: 'b' server: 'a' " + kWork +
                                    "} injection { at_ns: 2000000 kind: " + injection + " }");
    EXPECT_EQ(Rules(RunScenario(scenario)), "") << injection;
    EXPECT_EQ(FirstRule(RunScenario(scenario, SecretReset(30ms + 500us))), "connection.lost") << injection;
  }
}

TEST(Excuses, ARestartedServiceIsNoneForOtherProgramsOfItsHost) {
  const Scenario scenario = Parse(std::string(kPair) + R"(
      ping_pong { client: 'b' server: 'a' count: 1000 }
      injection { at_ns: 1000000 kind: RESTART_SERVICE a: 'a' for_ns: 1000000000 })");
  EXPECT_EQ(Rules(RunScenario(scenario)), "");
  EXPECT_EQ(FirstRule(RunScenario(scenario, SecretReset(1ms + 500us))), "ping_pong.failed");
}

TEST(Excuses, AnInjectionBeforeABlockingProgramConnectsIsNone) {
  const Scenario scenario = Parse(
      "host { name: 'a' } host { name: 'b' } ping_pong { client: 'a' server: 'b' count: 100 start_ns: 5000000 } "
      "injection { at_ns: 1000000 kind: RESET a: 'a' b: 'b' }");
  EXPECT_EQ(Rules(RunScenario(scenario)), "");
  EXPECT_EQ(FirstRule(RunScenario(scenario, SecretReset(5ms + 500us))), "ping_pong.failed");
}

TEST(Excuses, AnInjectionBeforeAnotherAttemptToCopyIsNone) {
  const Scenario scenario = Parse(R"(
      host { name: 'a' } host { name: 'b' } service { host: 'a' files: true }
      file_copy { host: 'b' server: 'a' bytes: 3000001 }
      injection { at_ns: 100000 kind: RESET a: 'a' b: 'b' })");
  EXPECT_EQ(Rules(RunScenario(scenario)), "");
  EXPECT_EQ(FirstRule(RunScenario(scenario, SecretReset(5ms + 400us))), "file.failed");
}

// A server that admits few clients may refuse one; not when there are fewer.
TEST(Excuses, ALimitThatIsFarOffExplainsNoRefusal) {
  RunOptions gone;
  gone.sabotage = [](emu::SimulatedWorld& world) {
    world.sim().loop().At(Instant() + 1ms, [&world] { world.sim().CutHost(world.fabric("a"), emu::Cut::kReset); });
  };
  const std::string service =
      "host { name: 'a' } host { name: 'b' } service { host: 'a' clients_max: 100 files: true } ";
  EXPECT_EQ(FirstRule(RunScenario(
                Parse(service + "client { name: 'c' host: 'b' server: 'a' start_ns: 5000000 call { } }"), gone)),
            "connection.refused");
  // Nor does a backlog with room for one, when nobody was turned away for want of it.
  EXPECT_EQ(FirstRule(RunScenario(Parse("host { name: 'a' } host { name: 'b' } service { host: 'a' backlog: 1 } "
                                        "client { name: 'c' host: 'b' server: 'a' start_ns: 5000000 call { } }"),
                                  gone)),
            "connection.refused");
  EXPECT_EQ(
      FirstRule(RunScenario(Parse(service + "file_copy { host: 'b' server: 'a' start_ns: 5000000 bytes: 100 }"), gone)),
      "file.failed");
}

// It fails one registration in four thousand million.
constexpr char kHardlyEver[] =
    "host { name: 'a' device { rule: 'fail-registration one-in=4000000000' } } host { name: 'b' } ";

TEST(Excuses, ADeviceThatMightFailIsNoneUntilItHas) {
  const std::string world = std::string(kHardlyEver) + "service { host: 'a' files: true } ";
  EXPECT_EQ(FirstRule(RunScenario(Parse(world + "client { name: 'c' host: 'b' server: 'a' " + kWork + "}"),
                                  SecretReset(10ms + 500us))),
            "connection.lost");
  EXPECT_EQ(
      FirstRule(RunScenario(Parse(world + "file_copy { host: 'b' server: 'a' bytes: 3000001 }"), SecretReset(300us))),
      "file.failed");
  EXPECT_EQ(FirstRule(RunScenario(Parse(std::string(kHardlyEver) + "ping_pong { client: 'a' server: 'b' count: 100 }"),
                                  SecretReset(500us))),
            "ping_pong.failed");
}

// What is slow in the scenario may make a call late, and nothing else.
TEST(Excuses, ATimeOutNeedsAReasonOfItsSize) {
  const std::string work =
      "client { name: 'c' host: 'b' server: 'a' call { repeat: 50 pause_ns: 1000000 result_bytes: 5000 "
      "timeout_ns: 500000000 } }";
  RunOptions secret_partition;
  secret_partition.sabotage = [](emu::SimulatedWorld& world) {
    const auto set = [&world](bool on) { world.sim().Partition(world.fabric("a"), world.fabric("b"), on); };
    world.sim().loop().At(Instant() + 10ms, [set] { set(true); });
    world.sim().loop().At(Instant() + 2s, [set] { set(false); });
  };
  EXPECT_EQ(FirstRule(RunScenario(Parse(kPair + work), secret_partition)), "call.failed");

  const std::string slow = "link { a: 'a' b: 'b' bytes_per_second: 5000 } ";
  const RunReport report = RunScenario(Parse(kPair + slow + work));
  EXPECT_EQ(Rules(report), "") << "5,000 bytes take a second";
  EXPECT_GT(report.tally.refused, 0u);
}

// On InfiniBand it has connections wait, and is no excuse for one that gives up.
TEST(Excuses, AStreamThatIsTakenFromAnInfinibandConnectionIsNone) {
  RunOptions secret_partition;
  secret_partition.sabotage = [](emu::SimulatedWorld& world) {
    const auto set = [&world](bool on) { world.sim().Partition(world.fabric("a"), world.fabric("b"), on); };
    world.sim().loop().At(Instant() + 10ms + 500us, [set] { set(true); });
    world.sim().loop().At(Instant() + 20s, [set] { set(false); });
  };
  for (const char* injection : {"RESET a: 'a' b: 'b'", "FORGET a: 'a'", "FORGET a: 'b'"}) {
    Scenario scenario = Parse(std::string(kPair) + "client { name: 'c' host: 'b' server: 'a' " + kWork +
                              "} injection { at_ns: 10000000 kind: " + injection + " }");
    for (Host& host : *scenario.mutable_host()) host.mutable_device()->set_profile("roce");
    const RunReport report = RunScenario(scenario);
    EXPECT_EQ(Rules(report), "") << injection;
    EXPECT_EQ(report.tally.connections, 1u) << injection;
    EXPECT_EQ(report.tally.answered, report.tally.calls) << injection;
    const std::string rules = Rules(RunScenario(scenario, secret_partition));
    EXPECT_NE(rules.find("connection.lost: "), std::string::npos) << injection << ": " << rules;
  }
}

// Nobody answers it, of which the scenario says nothing.
TEST(Excuses, APacketNowAndThenIsNoneForAServerThatIsNeverReached) {
  const std::string lossy = " device { profile: 'roce' rule: 'drop kind=any one-in=1000000' } ";
  const Scenario scenario = Parse("host { name: 'a'" + lossy + "} host { name: 'b'" + lossy +
                                  "} service { host: 'a' } client { name: 'c' host: 'b' server: 'a' call { } }");
  EXPECT_EQ(Rules(RunScenario(scenario)), "");
  RunOptions options;
  options.sabotage = [](emu::SimulatedWorld& world) {
    world.sim().Partition(world.fabric("a"), world.fabric("b"), true);
  };
  EXPECT_EQ(FirstRule(RunScenario(scenario, options)), "connection.refused");
}

// --- Growth and what is left ---

// As long as any run of these tests may last.
constexpr Duration kAllTheTime = 150s;

// Registers something with the loop of b's programs ten times a second.
RunOptions Leak(std::function<void(EventLoop&)> leak, Duration how_long = kAllTheTime) {
  RunOptions options;
  options.sabotage = [leak, how_long](emu::SimulatedWorld& world) {
    for (int i = 0; i < how_long / 100ms; ++i) {
      world.sim().loop().At(Instant() + i * 100ms, [&world, leak] {
        if (world.fabric("b").IsUp()) leak(world.fabric("b").program_loop());
      });
    }
  };
  return options;
}

TEST(Growth, OfTimersAndPollersIsSeenAndSoIsWhatIsLeftOfThem) {
  const Scenario scenario = Parse(std::string(kPair) + "client { name: 'c' host: 'b' server: 'a' call { } }");
  EXPECT_EQ(Rules(RunScenario(scenario)), "");
  const std::string timers =
      Rules(RunScenario(scenario, Leak([](EventLoop& loop) { loop.At(loop.Now() + 600s, [] {}); })));
  EXPECT_NE(timers.find("growth: b: timers: "), std::string::npos) << timers;
  EXPECT_NE(timers.find("teardown.loop: b: "), std::string::npos) << timers;
  const std::string pollers =
      Rules(RunScenario(scenario, Leak([](EventLoop& loop) {
                          loop.AddPoller({[] { return false; }, [] { return false; }, [] { return true; }});
                        })));
  EXPECT_NE(pollers.find("growth: b: pollers: "), std::string::npos) << pollers;
  EXPECT_NE(pollers.find("teardown.loop: b: "), std::string::npos) << pollers;
}

// As a device does that forgets to take its timers back.
void LeakTimersOfADevice(emu::SimulatedWorld& world) {
  if (world.sim().Now() > Instant() + kAllTheTime) return;
  world.sim().loop().At(world.sim().Now() + 600s, [] {});
  world.sim().loop().At(world.sim().Now() + 100ms, [&world] { LeakTimersOfADevice(world); });
}

TEST(Growth, OfTheTimersOfDevicesIsSeen) {
  const Scenario scenario = Parse(std::string(kPair) + "client { name: 'c' host: 'b' server: 'a' call { } }");
  RunOptions options;
  options.sabotage = LeakTimersOfADevice;
  const std::string rules = Rules(RunScenario(scenario, options));
  EXPECT_NE(rules.find("growth: timers of NICs: "), std::string::npos) << rules;
}

TEST(Growth, IsNoneWhenItEnds) {
  const Scenario scenario = Parse(std::string(kPair) + "client { name: 'c' host: 'b' server: 'a' call { } }");
  const auto add = [](EventLoop& loop) { loop.At(loop.Now() + 600s, [] {}); };
  // Longer than it takes to begin to doubt.
  const std::string rules = Rules(RunScenario(scenario, Leak(add, 36s)));
  EXPECT_EQ(rules.find("growth"), std::string::npos) << rules;
  EXPECT_NE(rules.find("teardown.loop: b: 360 timers"), std::string::npos) << rules;
}

TEST(Growth, OfRdmaCmIdsIsSeen) {
  const Scenario scenario = Parse(std::string(kPair) + "client { name: 'c' host: 'b' server: 'a' call { } }");
  std::vector<std::shared_ptr<emu::CmId>> ids;
  RunOptions options;
  options.sabotage = [&ids](emu::SimulatedWorld& world) {
    for (int i = 0; i < kAllTheTime / 100ms; ++i) {
      world.sim().loop().At(Instant() + i * 100ms, [&world, &ids] {
        emu::ConnectionManager& cm = world.host("b").cm();
        ids.push_back(cm.CreateId(ids.empty() ? cm.CreateChannel() : ids.front()->channel()));
      });
    }
    // They do not outlive the world.
    world.sim().loop().At(Instant() + kAllTheTime + 1s, [&ids] { ids.clear(); });
  };
  const std::string rules = Rules(RunScenario(scenario, options));
  EXPECT_NE(rules.find("growth: b: rdma_cm ids: "), std::string::npos) << rules;
  EXPECT_TRUE(ids.empty());
}

TEST(Teardown, ObjectsThatAreLeftAreSeen) {
  const Scenario scenario = Parse(std::string(kPair) + "client { name: 'c' host: 'b' server: 'a' call { } }");
  RunOptions options;
  options.sabotage = [](emu::SimulatedWorld& world) {
    emu::Nic& nic = world.host("b").nic();
    const auto context = nic.OpenContext();
    ASSERT_TRUE(context.has_value());
    ASSERT_TRUE(nic.AllocatePd(**context).has_value());
  };
  const std::string rules = Rules(RunScenario(scenario, options));
  EXPECT_NE(rules.find("teardown.objects: b: left over: "), std::string::npos) << rules;
}

// For ever, or until the world ends.
void Tick(emu::SimulatedWorld& world) {
  world.sim().loop().At(world.sim().Now() + 100ms, [&world] { Tick(world); });
}

TEST(Teardown, AWorldThatGoesOnWhenEverythingHasEndedIsSeen) {
  const Scenario scenario = Parse(std::string(kPair) + "client { name: 'c' host: 'b' server: 'a' call { } }");
  RunOptions options;
  options.sabotage = Tick;
  const std::string rules = Rules(RunScenario(scenario, options));
  EXPECT_NE(rules.find("teardown.busy: "), std::string::npos) << rules;
}

// --- Programs that cannot do what they are for ---

// A client that never leaves has the only place there is, so each refusal has a reason, but not all of them together.
TEST(Liveness, AClientThatIsNeverAdmittedIsSeen) {
  const Scenario scenario = Parse(R"(
      host { name: 'a' } host { name: 'b' } service { host: 'a' clients_max: 1 }
      client { name: 'c' host: 'b' server: 'a' call { service_ns: 3600000000000 timeout_ns: 0 } }
      client { name: 'd' host: 'b' server: 'a' start_ns: 1000000 call { } })");
  ASSERT_TRUE(Validate(scenario).has_value());
  const std::string rules = Rules(RunScenario(scenario));
  EXPECT_NE(rules.find("liveness.connect: client d "), std::string::npos) << rules;
}

// The scenario's device fails one registration in two, for as long as rules last. This one fails each, for ever.
TEST(Liveness, AFileThatIsNeverCopiedIsSeen) {
  const Scenario scenario = Parse(R"(
      host { name: 'a' } service { host: 'a' files: true }
      host { name: 'b' device { rule: 'fail-registration one-in=2' } }
      file_copy { host: 'b' server: 'a' bytes: 100000 })");
  RunOptions options;
  options.sabotage = [](emu::SimulatedWorld& world) {
    for (int i = 0; i < 20'000; ++i) {
      world.sim().loop().At(Instant() + i * 100ms, [&world] {
        world.host("b").nic().injections()->Add(*emu::ParseInjectionRules("fail-registration"));
      });
    }
  };
  const std::string rules = Rules(RunScenario(scenario, options));
  EXPECT_NE(rules.find("liveness.file: "), std::string::npos) << rules;
}

// Word that it was shut out never comes, and the scenario gives no reason for that.
TEST(Silence, APeerThatIsNeverShutOutIsSeen) {
  RunOptions options;
  options.sabotage = [](emu::SimulatedWorld& world) {
    world.sim().loop().At(Instant(1s), [&world] { world.sim().Partition(world.fabric("x"), world.fabric("a"), true); });
  };
  for (const char* const profile : {"iwarp", "roce"}) {
    Scenario scenario = Parse(std::string(kPair) + R"(
        host { name: 'x' } silent_peer { host: 'x' server: 'a' streams: 1 }
        client { name: 'c' host: 'b' server: 'a' call { } })");
    for (Host& host : *scenario.mutable_host()) host.mutable_device()->set_profile(profile);
    EXPECT_EQ(FirstRule(RunScenario(scenario)), "");
    EXPECT_EQ(FirstRule(RunScenario(scenario, options)), "silence.held") << profile;
    // What the scenario does there is a reason.
    Injection& partition = *scenario.add_injection();
    partition.set_kind(Injection::PARTITION);
    partition.set_at_ns(1'000'000'000);
    partition.set_for_ns(60'000'000'000);
    partition.set_a("x");
    partition.set_b("a");
    EXPECT_EQ(FirstRule(RunScenario(scenario)), "");
  }
}

TEST(Service, OneThatCannotListenIsSeen) {
  const Scenario scenario = Parse(std::string(kPair) + "client { name: 'c' host: 'b' server: 'a' call { } }");
  std::unique_ptr<emu::Listener> rival;
  RunOptions options;
  options.sabotage = [&rival](emu::SimulatedWorld& world) {
    auto listener = world.fabric("a").Listen(*emu::IpEndpoint::Parse("10.0.0.1", kServicePort), 1, [](auto) {});
    ASSERT_TRUE(listener.has_value());
    rival = std::move(*listener);
    // It does not outlive the world.
    world.sim().loop().At(Instant() + 1ms, [&rival] { rival.reset(); });
  };
  EXPECT_EQ(FirstRule(RunScenario(scenario, options)), "service.listen");
}

TEST(Service, OneThatHasNoDirectoryToServeFromIsSeen) {
  const Scenario scenario = Parse(
      "host { name: 'a' } host { name: 'b' } service { host: 'a' files: true } "
      "client { name: 'c' host: 'b' server: 'a' call { } }");
  const char* const set = ::getenv("TMPDIR");
  const std::optional<std::string> before = set != nullptr ? std::optional<std::string>(set) : std::nullopt;
  ::setenv("TMPDIR", "/proc", 1);  // a directory where nobody makes another
  const RunReport report = RunScenario(scenario);
  before ? ::setenv("TMPDIR", before->c_str(), 1) : ::unsetenv("TMPDIR");
  EXPECT_EQ(FirstRule(report), "service.directory");
}

// What was within these limits worked, so the least that is allowed does.
TEST(Validate, TheLeastThatIsAllowedIsEnough) {
  const Scenario scenario = Parse(R"(
      host { name: 'a' device { max_mr: 5 } } service { host: 'a' }
      host { name: 'b' device { max_mr: 5 max_mw: 3 max_mr_size: 16384 } }
      client { name: 'c' host: 'b' server: 'a' credits: 8 inline_threshold: 1024
               call { repeat: 5 argument_bytes: 10000 result_bytes: 10000 } })");
  const RunReport report = RunWell(scenario);
  EXPECT_GE(report.tally.answered, 40u);
}

// The rules ask for facts by name: a trace without them would break none.
TEST_P(Run, ItsTraceHasWhatTheNicCheckerAsksFor) {
  Violations violations;
  NicChecker checker(&violations);
  RunOptions options;
  options.observer = &checker;
  const Scenario scenario = Parse(std::string(kPair) + R"(
      client { name: 'c' host: 'b' server: 'a' call { repeat: 20 argument_bytes: 20000 result_bytes: 20000 } })");
  EXPECT_EQ(Rules(RunScenario(scenario, options)), "");
  EXPECT_TRUE(violations.empty());
  // A call, a Read and its answer, a Write and a reply.
  EXPECT_GE(checker.placements_judged(), 20u * 5);
}

TEST(Validate, NamesTheFieldAndWhatWasExpected) {
  const struct {
    const char* text;
    const char* problem;
  } kCases[] = {
      {"", "host: a scenario needs at least one"},
      {"host { name: 'a' } host { name: 'a' }", "host.name: \"a\" is there twice"},
      {"host { name: 'a' } service { host: 'x' }", "service.host: \"x\", expected the name of a host"},
      {"host { name: 'a' } client { name: 'c' host: 'a' server: 'a' }",
       "client.server: \"a\", expected a host with a service"},
      {"host { name: 'a' } fault { kind: KILL a: 'b' }", "fault.a: \"b\", expected the name of a host"},
      {"host { name: 'a' } fault { a: 'a' }", "fault.kind: \"NONE\", expected a kind of fault"},
      {"host { name: 'a' } host { name: 'b' } fault { kind: STOP a: 'a' }",
       "fault.for_ns: \"0\", expected how long it lasts"},
      {"host { name: 'a' } host { name: 'b' } fault { kind: PARTITION a: 'a' b: 'b' }",
       "fault.for_ns: \"0\", expected how long it lasts"},
      {"host { name: 'a' } link { buffer_bytes: 0 }", "link[0].buffer_bytes: 0, expected 2048 to 67108864"},
      {"host { name: 'a' device { max_ird: 0 } }", "host[0].device.max_ird: 0, expected 1 to 16383"},
      {"host { name: 'a' } service { host: 'a' credits: 5000 }", "service[0].credits: 5000, expected 1 to 1024"},
      {"host { name: 'a' } client { call { } call { repeat: 4000000000 } }",
       "client[0].call[1].repeat: 4000000000, expected 0 to 100000"},
      {"host { name: 'a' } file_copy { bytes: 1152921504606846976 }",
       "file_copy[0].bytes: 1152921504606846976, expected 0 to 268435456"},
      {"host { name: 'a' } injection { at_ns: 18446744073709551615 }",
       "injection[0].at_ns: 18446744073709551615, expected 0 to 86400000000000"},
      {"host { name: 'a' } service { host: 'a' } "
       "client { name: 'c' host: 'a' server: 'a' session: true calls_per_connection: 1 }",
       "client.calls_per_connection: \"1\", expected none of a session"},
      {"host { name: 'a' } service { host: 'a' clients_max: 9 } "
       "client { name: 'c' host: 'a' server: 'a' session: true }",
       "service.clients_max: \"9\", expected no limit for a server of sessions"},
      {"host { name: 'a' } service { host: 'a' } "
       "client { name: 'c' host: 'a' server: 'a' reverse_credits: 1 reverse_call { } }",
       "client.reverse_call: \"c\", expected reverse_credits of both ends"},
      {"host { name: 'a' } service { host: 'a' version_low: 2 }",
       "service.version_low: \"2\", expected no more than version_high"},
      {"host { name: 'a' } service { host: 'a' version_high: 2 inline_threshold: 2048 }",
       "service.inline_threshold: \"2048\", expected at least 4096 with version 2"},
      {"host { name: 'a' } service { host: 'a' version_high: 2 rpcrdma_profile: 'rfc5666' reverse_credits: 1 }",
       "service.reverse_credits: \"1\", expected none with an older document"},
      {"host { name: 'a' } service { host: 'a' } "
       "client { name: 'c' host: 'a' server: 'a' version_low: 2 version_high: 2 }",
       "client.version_high: \"c\", expected a version that the service speaks"},
      {"host { name: 'a' } service { host: 'a' reverse_credits: 1 shared_receives: 8 }",
       "service.shared_receives: \"8\", expected none with reverse_credits"},
      {"host { name: 'a' } service { host: 'a' rpcrdma_profile: 'rfc8166' }",
       "service.rpcrdma_profile: \"rfc8166\", expected draft-2004, rfc5666 or rfc5666bis"},
      {"host { name: 'a' } service { host: 'a' rpcrdma_profile: 'rfc5666' shared_receives: 8 }",
       "service.shared_receives: \"8\", expected none with an older document"},
      {"host { name: 'a' } service { host: 'a' rpcrdma_profile: 'draft-2004' reverse_credits: 1 }",
       "service.reverse_credits: \"1\", expected none with an older document"},
      {"host { name: 'a' } service { host: 'a' } "
       "client { name: 'c' host: 'a' server: 'a' rpcrdma_profile: 'rfc5666' reverse_credits: 1 }",
       "client.reverse_credits: \"1\", expected none with an older document"},
      {"host { name: 'a' } service { host: 'a' } "
       "client { name: 'c' host: 'a' server: 'a' rpcrdma_profile: 'rfc5666' padding_align: 8 }",
       "client.padding_align: \"8\", expected none for a server by rfc5666bis"},
      {"host { name: 'a' } service { host: 'a' rpcrdma_profile: 'rfc5666' } "
       "client { name: 'c' host: 'a' server: 'a' rpcrdma_profile: 'rfc5666' padding_align: 6 }",
       "client.padding_align: \"6\", expected 0, 1 or a multiple of 4"},
      {"host { name: 'a' } service { host: 'a' rpcrdma_profile: 'rfc5666' ccp: true } "
       "client { name: 'c' host: 'a' server: 'a' ccp: true inline_threshold: 8192 }",
       "client.ccp: \"c\", expected no inline_threshold above the service's"},
      {"host { name: 'a' } service { host: 'a' receive_align: 3 }",
       "service.receive_align: \"3\", expected a power of two"},
      {"host { name: 'a' } service { host: 'a' ccp_inline_max: 1000 }",
       "service.ccp_inline_max: \"1000\", expected 0, or 1024 and more"},
      {"host { name: 'a/b' }", "host.name: \"a/b\", expected letters, digits, '-', '_' and '.'"},
      {"host { name: 'a' } host { name: 'b' } service { host: 'a' } ping_pong { client: 'b' server: 'a' port: 20049 }",
       "ping_pong.port: \"20049\", expected another port than that of the host's service"},
      {"host { name: 'a' device { max_mr_size: 4096 } } host { name: 'b' } "
       "ping_pong { client: 'b' server: 'a' bytes: 4096 }",
       "host.device.max_mr_size: \"4096\", expected at least 8192, for what runs on a"},
      {"host { name: 'a' device { max_cqe: 7 } } host { name: 'b' } ping_pong { client: 'b' server: 'a' }",
       "host.device.max_cqe: \"7\", expected at least 8, for what runs on a"},
      {"host { name: 'a' device { max_mr: 4 } } service { host: 'a' } host { name: 'b' } "
       "client { name: 'c' host: 'b' server: 'a' }",
       "host.device.max_mr: \"4\", expected at least 5, for what runs on a"},
      {"host { name: 'a' } service { host: 'a' } host { name: 'b' device { max_mw: 1 } } "
       "client { name: 'c' host: 'b' server: 'a' }",
       "host.device.max_mw: \"1\", expected at least 3, for what runs on b"},
      {"host { name: 'a' } service { host: 'a' } host { name: 'b' device { max_mr_size: 8192 } } "
       "client { name: 'c' host: 'b' server: 'a' credits: 8 inline_threshold: 1024 }",
       "host.device.max_mr_size: \"8192\", expected at least 16384, for what runs on b"},
      {"host { name: 'a' } silent_peer { host: 'a' server: 'b' }",
       "silent_peer.server: \"b\", expected the name of a host"},
      {"host { name: 'a' } silent_peer { host: 'b' server: 'a' }",
       "silent_peer.host: \"b\", expected the name of a host"},
      {"host { name: 'a' } silent_peer { host: 'a' server: 'a' said_bytes: 20 }",
       "silent_peer[0].said_bytes: 20, expected 0 to 19"},
      {"host { name: 'a' } host { name: 'b' } link { a: 'a' b: 'a' }", "link: \"a\", expected two different hosts"},
      {"host { name: 'a' device { rule: 'stall' fault { one_in: 2 } fault { kind: NOT_READY one_in: 5 } } }",
       "host.device.fault[1].kind: NOT_READY: iWARP has no word for a Receive that is missing: the stream would end, "
       "as "
       "disconnect does it\n(of host \"a\")"},
      {"host { name: 'a' device { fault { kind: FAIL_REGISTRATION } rule: 'stall kind=ack' } }",
       "host.device.rule[0]: 'stall kind=ack': iWARP has no acknowledgements of its own, and TCP's are not seen; on "
       "iWARP kind can be send, write, read, read-response, atomic, atomic-response, immediate, terminate\n(of host "
       "\"a\")"},
      {"host { name: 'a' } fault { kind: KILL a: 'a' } injection { kind: KILL a: 'b' }",
       "injection.a: \"b\", expected the name of a host"},
      {"host { name: 'a' } host { name: 'b' device { rule: 'disconnect' rule: 'disconnect mesage=10' } }",
       "host.device.rule[1]: 'mesage' is no condition; did you mean message?\n"
       "  disconnect mesage=10\n"
       "             ^~~~~~\n"
       "(of host \"b\")"},
      {"host { name: 'a' device { rule: 'drop message=3' } }",
       "host.device.rule[0]: 'drop message=3': iWARP cannot lose a segment: TCP carries it or the connection ends, and "
       "one that was missing would be a fault of the peer; the profile roce has loss, and disconnect ends a "
       "connection\n"
       "(of host \"a\")"},
      {"host { name: 'a' device { rule: ' ' } }",
       "host.device.rule[0]: there is no rule in it; one is 'disconnect message=10'\n(of host \"a\")"},
      {"host { name: 'a' device { profile: 'ib' } }",
       "host.device.profile: \"ib\", expected iwarp, roce, minimal or hostile"},
      {"host { name: 'a' } service { host: 'a' } host { name: 'b' device { profile: 'roce' } } "
       "client { name: 'c' host: 'b' server: 'a' }",
       "client.server: \"a\", expected a host with a device of the same transport as that of b"},
      {"host { name: 'a' } host { name: 'b' device { profile: 'roce' } } ping_pong { client: 'b' server: 'a' }",
       "ping_pong.server: \"a\", expected a host with a device of the same transport as that of b"},
      {"host { name: 'a' device { profile: 'roce' } } service { host: 'a' } "
       "host { name: 'b' device { profile: 'minimal' } } client { name: 'c' host: 'b' server: 'a' }",
       "host.device.max_mw: \"0\", expected at least 3, for what runs on b"},
  };
  for (const auto& each : kCases) {
    const auto result = Validate(Parse(each.text));
    ASSERT_FALSE(result.has_value()) << each.text;
    EXPECT_EQ(result.error(), each.problem);
  }
}

}  // namespace
}  // namespace stagecoach::scenario
