// Whatever a scenario does to the process that plays it is an outcome like any other: named, reported, shrunk; and
// leaves nothing behind.
#include "scenarios/swarm/isolated_run.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/mark.h"
#include "scenarios/swarm/child_process.h"
#include "scenarios/swarm/shrink.h"

namespace stagecoach::scenario {
namespace {

using std::chrono::milliseconds;

// Two hosts, a service, two clients with calls, and injections: enough to shrink.
Scenario SmallScenario() {
  Scenario scenario;
  scenario.set_name("small");
  scenario.set_seed(7);
  for (const char* name : {"a", "b", "c"}) scenario.add_host()->set_name(name);
  scenario.add_service()->set_host("a");
  for (const char* host : {"b", "c"}) {
    Client* client = scenario.add_client();
    client->set_name(std::string("client-") + host);
    client->set_host(host);
    client->set_server("a");
    for (const uint32_t bytes : {0u, 9000u}) client->add_call()->set_result_bytes(bytes);
  }
  Injection* injection = scenario.add_injection();
  injection->set_kind(Injection::KILL);
  injection->set_a("c");
  return scenario;
}

bool AsksForMuch(const Scenario& scenario) {
  for (const Client& client : scenario.client()) {
    for (const Call& call : client.call()) {
      if (call.result_bytes() >= 5000) return true;
    }
  }
  return false;
}

RunReport Good() {
  RunReport report;
  report.trace_hash = 1;
  return report;
}

volatile bool for_ever = true;

RunReport LoopForEver() {
  while (for_ever) {
  }
  return Good();
}

IsolatedOptions Playing(Player play) {
  IsolatedOptions options;
  options.play = std::move(play);
  return options;
}

Outcome MustPlay(const IsolatedOptions& options) {
  auto outcome = PlayIsolated(SmallScenario(), options);
  EXPECT_TRUE(outcome.has_value()) << outcome.error();
  return outcome ? *outcome : Outcome();
}

// Every test: no child is left, alive or dead, and no file.
class IsolatedRun : public testing::Test {
 protected:
  void SetUp() override {
    directory_ = testing::TempDir() + "/isolated-run-XXXXXX";
    ASSERT_NE(::mkdtemp(directory_.data()), nullptr);
    ::setenv("TMPDIR", directory_.c_str(), 1);
  }
  void TearDown() override {
    EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
    EXPECT_EQ(errno, ECHILD);
    EXPECT_TRUE(std::filesystem::is_empty(directory_));
    std::filesystem::remove_all(directory_);
    ::unsetenv("TMPDIR");
  }

  std::string directory_;
};

TEST_F(IsolatedRun, GivesWhatTheSameRunGivesHere) {
  IsolatedOptions options;
  options.twice = true;
  const Outcome outcome = MustPlay(options);
  EXPECT_EQ(outcome.kind(), Outcome::PASSED);
  EXPECT_EQ(FailureName(outcome), "");
  const RunReport here = RunScenario(SmallScenario());
  EXPECT_EQ(outcome.trace_hash(), here.trace_hash);
  EXPECT_EQ(outcome.second_trace_hash(), here.trace_hash);
  EXPECT_EQ(outcome.trace_events(), here.trace_events);
  EXPECT_EQ(outcome.virtual_ns(), here.virtual_time.count());
  EXPECT_EQ(outcome.tally().calls(), here.tally.calls);
  EXPECT_GT(outcome.tally().calls(), 0u);
  EXPECT_GT(outcome.wall_ns(), 0);
  EXPECT_GT(outcome.mark_size(), 0);
}

TEST_F(IsolatedRun, ABrokenRuleIsNamedByTheFirstOne) {
  const Outcome outcome = MustPlay(Playing([](const Scenario&) {
    RunReport report = Good();
    report.violations.push_back({"call.once", "twice", Instant(3us)});
    report.violations.push_back({"fence", std::string(100'000, 'x'), Instant(4us)});
    report.state = std::string(5'000'000, 'y');
    return report;
  }));
  EXPECT_EQ(outcome.kind(), Outcome::VIOLATED);
  EXPECT_EQ(FailureName(outcome), "call.once");
  ASSERT_EQ(outcome.violation_size(), 2);
  EXPECT_EQ(outcome.violation(0).text(), "twice");
  EXPECT_EQ(outcome.violation(0).when_ns(), 3000);
  // Bounded, whatever is said.
  EXPECT_LT(outcome.violation(1).text().size(), 20'000u);
  EXPECT_LT(outcome.state().size(), 1'000'000u);
}

TEST_F(IsolatedRun, AFailedCheckIsACrashNamedByItsPlace) {
  const Outcome outcome = MustPlay(Playing([](const Scenario& scenario) {
    std::fprintf(stderr, "about to fail\n");
    STAGECOACH_CHECK(scenario.host_size() == 0);
    return Good();
  }));
  EXPECT_EQ(outcome.kind(), Outcome::CRASHED);
  EXPECT_EQ(outcome.signal(), SIGABRT);
  EXPECT_TRUE(FailureName(outcome).starts_with("crash: SIGABRT scenarios/swarm/isolated_run_test.cc:"))
      << FailureName(outcome);
  EXPECT_TRUE(outcome.standard_error().starts_with("about to fail\n"));
  EXPECT_NE(outcome.standard_error().find("check failed: scenario.host_size() == 0"), std::string::npos);
}

TEST_F(IsolatedRun, EveryOtherWayToDieIsACrash) {
  EXPECT_EQ(FailureName(MustPlay(Playing([](const Scenario&) {
              ::raise(SIGKILL);
              return Good();
            }))),
            "crash: SIGKILL");
  EXPECT_EQ(FailureName(MustPlay(Playing([](const Scenario&) -> RunReport { ::_exit(3); }))), "crash: exit status 3");
  // As the sanitizers end.
  EXPECT_EQ(FailureName(MustPlay(Playing([](const Scenario&) -> RunReport {
              std::fprintf(stderr, "====\n==9==ERROR: AddressSanitizer: heap-use-after-free on address 0x1\n");
              ::_exit(1);
            }))),
            "crash: exit status 1 AddressSanitizer: heap-use-after-free");
  EXPECT_EQ(FailureName(MustPlay(Playing([](const Scenario&) -> RunReport {
              std::fprintf(stderr, "base/a.h:3:7: runtime error: signed integer overflow\n");
              ::_exit(1);
            }))),
            "crash: exit status 1 base/a.h:3:7");
}

TEST_F(IsolatedRun, AnEndlessLoopIsAHangAndItsFilesAreRemoved) {
  IsolatedOptions options = Playing([](const Scenario&) {
    std::ofstream(std::filesystem::temp_directory_path() / "left-behind") << "by a child that was killed";
    std::fprintf(stderr, "looping\n");
    return LoopForEver();
  });
  options.hang_after = milliseconds(200);
  const Outcome outcome = MustPlay(options);
  EXPECT_EQ(outcome.kind(), Outcome::HUNG);
  EXPECT_EQ(FailureName(outcome), "hang");
  EXPECT_EQ(outcome.limit_ns(), 200'000'000);
  EXPECT_EQ(outcome.standard_error(), "looping\n");
}

TEST_F(IsolatedRun, EndlessTalkOnStandardErrorIsAHangToo) {
  IsolatedOptions options = Playing([](const Scenario&) -> RunReport {
    std::fprintf(stderr, "first words\n");
    for (;;) std::fprintf(stderr, "and so on\n");
  });
  options.hang_after = milliseconds(200);
  const Outcome outcome = MustPlay(options);
  EXPECT_EQ(outcome.kind(), Outcome::HUNG);
  EXPECT_TRUE(outcome.standard_error().starts_with("first words\n"));
  EXPECT_LT(outcome.standard_error().size(), ChildProcess::kErrorsMax + 100);
}

TEST_F(IsolatedRun, TwoTracesOfOneScenarioAreNondeterminism) {
  IsolatedOptions options = Playing([times = 0](const Scenario&) mutable {
    RunReport report;
    report.trace_hash = static_cast<uint64_t>(++times);
    return report;
  });
  EXPECT_EQ(MustPlay(options).kind(), Outcome::PASSED);
  options.twice = true;
  const Outcome outcome = MustPlay(options);
  EXPECT_EQ(FailureName(outcome), "nondeterminism");
  EXPECT_EQ(outcome.trace_hash(), 1u);
  EXPECT_EQ(outcome.second_trace_hash(), 2u);
}

TEST_F(IsolatedRun, EndsWhenInterrupted) {
  static volatile sig_atomic_t alarms = 0;
  struct sigaction action {};
  action.sa_handler = [](int) { alarms = alarms + 1; };
  struct sigaction before {};
  ::sigaction(SIGALRM, &action, &before);
  IsolatedOptions options = Playing([](const Scenario&) { return LoopForEver(); });
  options.interrupted = [] { return alarms > 0; };
  ::ualarm(100'000, 100'000);
  const auto outcome = PlayIsolated(SmallScenario(), options);
  ::ualarm(0, 0);
  ::sigaction(SIGALRM, &before, nullptr);
  ASSERT_FALSE(outcome.has_value());
  EXPECT_EQ(outcome.error(), "interrupted");
}

TEST_F(IsolatedRun, ADirectoryThatIsNotThereIsNamed) {
  ::setenv("TMPDIR", "/nowhere", 1);
  const auto outcome = PlayIsolated(SmallScenario(), Playing([](const Scenario&) { return Good(); }));
  ::setenv("TMPDIR", directory_.c_str(), 1);
  ASSERT_FALSE(outcome.has_value());
  EXPECT_NE(outcome.error().find("/nowhere"), std::string::npos) << outcome.error();
}

// --- Many seeds ---

// Seed 3 fails a CHECK, seed 5 loops; the others tell the id of their process as their trace hash.
RunReport PlaySeed(const Scenario& scenario) {
  std::fprintf(stderr, "seed %d\n", static_cast<int>(scenario.seed()));
  STAGECOACH_MARK("isolated_run_test.seed_played");
  STAGECOACH_CHECK(scenario.seed() != 3);
  if (scenario.seed() == 5) return LoopForEver();
  RunReport report;
  report.trace_hash = static_cast<uint64_t>(::getpid());
  return report;
}

TEST_F(IsolatedRun, ASeedThatCrashesOrHangsCostsNoOtherOne) {
  IsolatedOptions options = Playing(PlaySeed);
  options.hang_after = milliseconds(500);
  std::vector<Outcome> outcomes;
  uint64_t marks = 0;
  const auto result = PlaySeeds(1, 7, options, [&](uint64_t seed, const Outcome& outcome) {
    EXPECT_EQ(seed, outcomes.size() + 1);
    // Each says what is its own.
    EXPECT_TRUE(outcome.standard_error().starts_with("seed " + std::to_string(seed) + "\n"));
    EXPECT_EQ(outcome.standard_error().find("\nseed "), std::string::npos);
    for (const auto& mark : outcome.mark()) {
      if (mark.name() == "isolated_run_test.seed_played") marks += mark.passed();
    }
    outcomes.push_back(outcome);
    return true;
  });
  EXPECT_TRUE(result.has_value());
  ASSERT_EQ(outcomes.size(), 7u);
  EXPECT_TRUE(FailureName(outcomes[2]).starts_with("crash: SIGABRT scenarios/swarm/isolated_run_test.cc:"));
  EXPECT_EQ(FailureName(outcomes[4]), "hang");
  for (const size_t i : {0, 1, 3, 5, 6}) EXPECT_EQ(FailureName(outcomes[i]), "") << "seed " << i + 1;
  EXPECT_EQ(marks, 5u);
  // A process plays seeds until one brings it down.
  EXPECT_EQ(outcomes[0].trace_hash(), outcomes[1].trace_hash());
  EXPECT_NE(outcomes[1].trace_hash(), outcomes[3].trace_hash());
  EXPECT_NE(outcomes[3].trace_hash(), outcomes[5].trace_hash());
  EXPECT_EQ(outcomes[5].trace_hash(), outcomes[6].trace_hash());
  EXPECT_NE(outcomes[0].trace_hash(), static_cast<uint64_t>(::getpid()));
}

TEST_F(IsolatedRun, SeedsEndWhenTheirReaderHasEnough) {
  uint64_t last = 0;
  const auto result = PlaySeeds(1, 1'000'000, Playing(PlaySeed), [&](uint64_t seed, const Outcome& outcome) {
    last = seed;
    return FailureName(outcome).empty();
  });
  EXPECT_TRUE(result.has_value());
  EXPECT_EQ(last, 3u);
}

// --- Shrinking ---

// Of the small scenario, what a call for much needs.
void ExpectOneCallLeft(const Result<Shrunk, std::string>& shrunk) {
  ASSERT_TRUE(shrunk.has_value()) << shrunk.error();
  const Scenario& small = shrunk->scenario;
  SCOPED_TRACE(small.DebugString());
  EXPECT_TRUE(Validate(small).has_value());
  EXPECT_TRUE(AsksForMuch(small));
  EXPECT_EQ(small.host_size(), 2);
  EXPECT_EQ(small.injection_size(), 0);
  ASSERT_EQ(small.client_size(), 1);
  ASSERT_EQ(small.client(0).call_size(), 1);
  EXPECT_LT(small.client(0).call(0).result_bytes(), 9000u);
}

TEST_F(IsolatedRun, ACrashIsShrunkAsLongAsItCrashesAtTheSamePlace) {
  IsolatedOptions options = Playing([](const Scenario& scenario) {
    // Another crash does not count.
    if (scenario.host_size() < 2) ::raise(SIGKILL);
    STAGECOACH_CHECK(!AsksForMuch(scenario));
    return Good();
  });
  ExpectOneCallLeft(ShrinkFailure(SmallScenario(), FailureName(MustPlay(options)), options));
}

TEST_F(IsolatedRun, AHangIsShrunk) {
  IsolatedOptions options = Playing([](const Scenario& scenario) {
    if (AsksForMuch(scenario)) return LoopForEver();
    return Good();
  });
  options.hang_after = milliseconds(200);
  ExpectOneCallLeft(ShrinkFailure(SmallScenario(), kHang, options));
}

TEST_F(IsolatedRun, NondeterminismIsShrunk) {
  ExpectOneCallLeft(
      ShrinkFailure(SmallScenario(), kNondeterminism, Playing([times = 0](const Scenario& scenario) mutable {
                      RunReport report = Good();
                      if (AsksForMuch(scenario)) report.trace_hash += static_cast<uint64_t>(++times);
                      return report;
                    })));
}

TEST_F(IsolatedRun, WhatDoesNotFailAloneIsNotShrunk) {
  const auto shrunk = ShrinkFailure(SmallScenario(), "call.once", Playing([](const Scenario&) { return Good(); }));
  ASSERT_FALSE(shrunk.has_value());
  EXPECT_EQ(shrunk.error(), "the scenario, played alone, does not fail");
  const auto other =
      ShrinkFailure(SmallScenario(), "call.once", Playing([](const Scenario&) -> RunReport { ::_exit(4); }));
  ASSERT_FALSE(other.has_value());
  EXPECT_EQ(other.error(), "the scenario, played alone, fails with crash: exit status 4");
}

}  // namespace
}  // namespace stagecoach::scenario
