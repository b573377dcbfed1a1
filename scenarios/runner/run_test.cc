// The runner judges: a healthy world breaks no rule, a world that cannot go on is a deadlock, what makes no sense is
// refused in words.
#include "scenarios/runner/run.h"

#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "emu/world/simulated_world.h"
#include "scenarios/runner/nic_checker.h"

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

const char kPair[] = "host { name: 'a' } host { name: 'b' } service { host: 'a' } ";

TEST(Run, EveryCallOfAHealthyWorldIsAnswered) {
  const Scenario scenario = Parse(std::string(kPair) + R"(
      client { name: 'c' host: 'b' server: 'a' concurrency: 4
               call { repeat: 20 argument_bytes: 10000 result_bytes: 20000 }
               call { plain_argument_bytes: 30000 plain_result_bytes: 30000 } })");
  ASSERT_TRUE(Validate(scenario).has_value());
  const RunReport report = RunScenario(scenario);
  EXPECT_EQ(Rules(report), "");
  EXPECT_GE(report.tally.answered, 21u);
  EXPECT_EQ(report.tally.answered, report.tally.calls);
  EXPECT_EQ(report.tally.connections, 1u);
}

TEST(Run, TheSameScenarioHasTheSameTrace) {
  Scenario scenario = Parse(std::string(kPair) + R"(
      link { a: 'a' b: 'b' jitter_ns: 5000 chop: true }
      client { name: 'c' host: 'b' server: 'a' concurrency: 4 call { repeat: 20 argument_bytes: 10000 } })");
  const RunReport first = RunScenario(scenario);
  EXPECT_EQ(RunScenario(scenario).trace_hash, first.trace_hash);
  scenario.set_seed(2);
  EXPECT_NE(RunScenario(scenario).trace_hash, first.trace_hash);
}

TEST(Run, AKilledServerComesBackAndItsClientsGoOn) {
  const Scenario scenario = Parse(std::string(kPair) + R"(
      client { name: 'c' host: 'b' server: 'a' call { repeat: 50 pause_ns: 100000 result_bytes: 5000 } }
      fault { at_ns: 2000000 kind: KILL a: 'a' for_ns: 1000000 })");
  const RunReport report = RunScenario(scenario);
  EXPECT_EQ(Rules(report), "");
  EXPECT_GE(report.tally.connections, 2u);
  EXPECT_GE(report.tally.answered, 49u);
}

TEST(Run, ClientsOfAServerThatIsGoneForGoodComeToAnEnd) {
  const Scenario scenario = Parse(std::string(kPair) + R"(
      client { name: 'c' host: 'b' server: 'a' call { repeat: 50 pause_ns: 100000 result_bytes: 5000 } }
      fault { at_ns: 2000000 kind: POWER_LOSS a: 'a' })");
  const RunReport report = RunScenario(scenario);
  EXPECT_EQ(Rules(report), "");
  EXPECT_GT(report.tally.disturbed, 0u);
}

TEST(Run, FilesComeBackAsTheyWent) {
  const Scenario scenario = Parse(R"(
      host { name: 'a' } host { name: 'b' } service { host: 'a' files: true }
      file_copy { host: 'b' server: 'a' bytes: 300001 }
      fault { at_ns: 300000 kind: RESET a: 'a' b: 'b' })");
  const RunReport report = RunScenario(scenario);
  EXPECT_EQ(Rules(report), "");
  EXPECT_EQ(report.tally.files_copied, 1u);
}

TEST(Run, BlockingProgramsPlayOnFibers) {
  const Scenario scenario =
      Parse("host { name: 'a' } host { name: 'b' } ping_pong { client: 'a' server: 'b' count: 7 }");
  const RunReport report = RunScenario(scenario);
  EXPECT_EQ(Rules(report), "");
  EXPECT_EQ(report.tally.pings, 7u);
}

// The only fault is in the scenario: a call without a time-out over a link that never delivers. The checker of liveness
// must say so, and the report must show who waits for what.
TEST(Run, AWorldThatCannotGoOnIsReportedWithItsState) {
  const Scenario scenario = Parse(std::string(kPair) + R"(
      client { name: 'c' host: 'b' server: 'a' call { service_ns: 9000000000000 timeout_ns: 0 } })");
  const RunReport report = RunScenario(scenario);
  ASSERT_FALSE(report.violations.empty());
  EXPECT_EQ(report.violations[0].rule, "liveness.deadlock");
  EXPECT_NE(report.state.find("client c on b: 1 of 1 calls started, 1 under way"), std::string::npos) << report.state;
  EXPECT_NE(report.state.find("1 calls held by the service"), std::string::npos) << report.state;
  EXPECT_NE(report.state.find("qp-2: RTS"), std::string::npos) << report.state;
}

TEST(Run, StopsWhereItIsTold) {
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

TEST(Run, DevicesHaveTheirHabitsWhileThereIsWork) {
  const Scenario scenario = Parse(R"(
      host { name: 'a' } service { host: 'a' }
      host { name: 'b' device { fault { kind: FAIL_REGISTRATION one_in: 3 } } }
      client { name: 'c' host: 'b' server: 'a' call { repeat: 40 argument_bytes: 20000 } })");
  const RunReport report = RunScenario(scenario);
  EXPECT_EQ(Rules(report), "");
  EXPECT_GT(report.tally.refused, 3u);
  EXPECT_GT(report.tally.answered, 3u);
}

// Its client was killed before it called, long before the end.
TEST(Run, AServerNobodyCameToIsNoFailure) {
  const Scenario scenario = Parse(R"(
      host { name: 'a' } host { name: 'b' } host { name: 'c' } service { host: 'c' }
      ping_pong { client: 'b' server: 'a' start_ns: 5000000 }
      client { name: 'c' host: 'a' server: 'c' call { service_ns: 400000000000 timeout_ns: 0 } }
      fault { at_ns: 1000000 kind: KILL a: 'b' for_ns: 1000000 })");
  EXPECT_EQ(Rules(RunScenario(scenario)), "");
}

TEST(Run, KillsOfOneHostMayOverlap) {
  const Scenario scenario = Parse(std::string(kPair) + R"(
      client { name: 'c' host: 'b' server: 'a' call { repeat: 50 pause_ns: 100000 result_bytes: 5000 } }
      fault { at_ns: 1000000 kind: KILL a: 'a' for_ns: 2000000 }
      fault { at_ns: 2000000 kind: KILL a: 'a' }
      fault { at_ns: 2500000 kind: POWER_LOSS a: 'a' for_ns: 4000000 })");
  const RunReport report = RunScenario(scenario);
  EXPECT_EQ(Rules(report), "");
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
  const RunReport report = RunScenario(scenario);
  EXPECT_EQ(Rules(report), "");
  EXPECT_GE(report.tally.connections, 2u) << "which the device ends with the connection";
}

TEST(Excuses, ACallThatTimedOutBeforeItWasSentIsNone) {
  const Scenario scenario = Parse(R"(
      host { name: 'a' } host { name: 'b' } service { host: 'a' credits: 1 }
      client { name: 'c' host: 'b' server: 'a' concurrency: 2 call { service_ns: 5000000 } call { timeout_ns: 1000000 })" +
                                  std::string(kWork) + "}");
  const RunReport report = RunScenario(scenario);
  EXPECT_EQ(Rules(report), "");
  EXPECT_EQ(report.tally.refused, 1u);
  EXPECT_EQ(FirstRule(RunScenario(scenario, SecretReset(20ms + 500us))), "connection.lost");
}

TEST(Excuses, ALinkThatChangesIsNone) {
  const Scenario scenario = Parse(std::string(kPair) + "client { name: 'c' host: 'b' server: 'a' " + kWork + R"(}
      fault { at_ns: 1000000 kind: LINK a: 'a' b: 'b' link { latency_ns: 20000 } })");
  EXPECT_EQ(Rules(RunScenario(scenario)), "");
  EXPECT_EQ(FirstRule(RunScenario(scenario, SecretReset(10ms + 500us))), "connection.lost");
}

TEST(Excuses, APartitionEndsNoConnectionThatWasThere) {
  const Scenario scenario = Parse(std::string(kPair) + "client { name: 'c' host: 'b' server: 'a' " + kWork + R"(}
      fault { at_ns: 2000000 kind: PARTITION a: 'a' b: 'b' for_ns: 1000000 })");
  EXPECT_EQ(Rules(RunScenario(scenario)), "");
  EXPECT_EQ(FirstRule(RunScenario(scenario, SecretReset(10ms + 500us))), "connection.lost");
}

// It fails one registration in four thousand million.
constexpr char kHabit[] =
    "host { name: 'a' device { fault { kind: FAIL_REGISTRATION one_in: 4000000000 } } } host { name: 'b' } ";

TEST(Excuses, ADeviceThatMightFailIsNoneUntilItHas) {
  const std::string world = std::string(kHabit) + "service { host: 'a' files: true } ";
  EXPECT_EQ(FirstRule(RunScenario(Parse(world + "client { name: 'c' host: 'b' server: 'a' " + kWork + "}"),
                                  SecretReset(10ms + 500us))),
            "connection.lost");
  EXPECT_EQ(
      FirstRule(RunScenario(Parse(world + "file_copy { host: 'b' server: 'a' bytes: 3000001 }"), SecretReset(300us))),
      "file.failed");
  EXPECT_EQ(FirstRule(RunScenario(Parse(std::string(kHabit) + "ping_pong { client: 'a' server: 'b' count: 100 }"),
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

// --- Growth and what is left ---

// Registers something with the loop of b's programs ten times a second, as long as any run of the test may last.
RunOptions Leak(std::function<void(EventLoop&)> leak) {
  RunOptions options;
  options.sabotage = [leak](emu::SimulatedWorld& world) {
    for (int i = 0; i < 200; ++i) {
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

TEST(Growth, OfRdmaCmIdsIsSeen) {
  const Scenario scenario = Parse(std::string(kPair) + "client { name: 'c' host: 'b' server: 'a' call { } }");
  std::vector<std::shared_ptr<emu::CmId>> ids;
  RunOptions options;
  options.sabotage = [&ids](emu::SimulatedWorld& world) {
    for (int i = 0; i < 150; ++i) {
      world.sim().loop().At(Instant() + i * 100ms, [&world, &ids] {
        emu::ConnectionManager& cm = world.host("b").cm();
        ids.push_back(cm.CreateId(ids.empty() ? cm.CreateChannel() : ids.front()->channel()));
      });
    }
    // They do not outlive the world.
    world.sim().loop().At(Instant() + 16s, [&ids] { ids.clear(); });
  };
  const std::string rules = Rules(RunScenario(scenario, options));
  EXPECT_NE(rules.find("growth: b: rdma_cm ids: "), std::string::npos) << rules;
  EXPECT_TRUE(ids.empty());
}

// The rules ask for facts by name: a trace without them would break none.
TEST(Run, ItsTraceHasWhatTheNicCheckerAsksFor) {
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
      {"host { name: 'a' } host { name: 'b' } fault { kind: PARTITION a: 'a' b: 'b' }",
       "fault.for_ns: \"0\", expected how long it lasts"},
      {"host { name: 'a' } link { buffer_bytes: 0 }", "link[0].buffer_bytes: 0, expected 2048 to 67108864"},
      {"host { name: 'a' device { max_ird: 0 } }", "host[0].device.max_ird: 0, expected 1 to 16383"},
      {"host { name: 'a' } service { host: 'a' credits: 5000 }", "service[0].credits: 5000, expected 1 to 1024"},
      {"host { name: 'a' } client { call { } call { repeat: 4000000000 } }",
       "client[0].call[1].repeat: 4000000000, expected 0 to 100000"},
      {"host { name: 'a' } file_copy { bytes: 1152921504606846976 }",
       "file_copy[0].bytes: 1152921504606846976, expected 0 to 268435456"},
      {"host { name: 'a' } fault { at_ns: 18446744073709551615 }",
       "fault[0].at_ns: 18446744073709551615, expected 0 to 86400000000000"},
      {"host { name: 'a' } host { name: 'b' } link { a: 'a' b: 'a' }", "link: \"a\", expected two different hosts"},
  };
  for (const auto& each : kCases) {
    const auto result = Validate(Parse(each.text));
    ASSERT_FALSE(result.has_value()) << each.text;
    EXPECT_EQ(result.error(), each.problem);
  }
}

}  // namespace
}  // namespace stagecoach::scenario
