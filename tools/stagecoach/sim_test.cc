// What `stagecoach sim` says of a failure is enough to see it again.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <set>
#include <string>
#include <string_view>

#include "base/mark.h"
#include "scenarios/swarm/child_process.h"
#include "scenarios/swarm/out_of_reach.h"
#include "tools/stagecoach/sim_report.h"
#include "tools/stagecoach/sim_signals.h"

namespace stagecoach::cli {
namespace {

using scenario::ChildProcess;
using scenario::Outcome;
using scenario::Scenario;

Scenario SmallScenario() {
  Scenario scenario;
  scenario.set_name("seed-17");
  scenario.set_seed(17);
  scenario.add_host()->set_name("a");
  return scenario;
}

SimOptions AtCommit() {
  SimOptions options;
  options.seed = 17;
  options.commit = "c0ffee";
  return options;
}

TEST(SimReport, ABrokenRuleComesWithCommitWorldStateAndCommand) {
  Outcome outcome;
  outcome.set_kind(Outcome::VIOLATED);
  outcome.set_trace_hash(0xabc);
  auto* violation = outcome.add_violation();
  violation->set_rule("call.once");
  violation->set_text("twice");
  violation->set_when_ns(1'000'000'002);
  outcome.set_state("a: idle\n");
  EXPECT_EQ(FailureReport(AtCommit(), SmallScenario(), outcome),
            "FAILED: seed-17 at commit c0ffee: call.once\n"
            "  trace hash 0000000000000abc\n"
            "  1.000000002 s call.once: twice\n"
            "world:\nname: \"seed-17\"\nseed: 17\nhost {\n  name: \"a\"\n}\n"
            "state:\na: idle\n"
            "replay: stagecoach sim --seed 17 --trace\n");
}

TEST(SimReport, ACrashComesWithItsLastWords) {
  Outcome outcome;
  outcome.set_kind(Outcome::CRASHED);
  outcome.set_signal(SIGABRT);
  outcome.set_standard_error("base/time.h:3: check failed: x > 0");
  EXPECT_EQ(FailureReport(AtCommit(), SmallScenario(), outcome),
            "FAILED: seed-17 at commit c0ffee: crash: SIGABRT base/time.h:3\n"
            "standard error:\nbase/time.h:3: check failed: x > 0\n"
            "world:\nname: \"seed-17\"\nseed: 17\nhost {\n  name: \"a\"\n}\n"
            "replay: stagecoach sim --seed 17 --trace\n");
}

TEST(SimReport, AHangSaysHowLongItWasGiven) {
  Outcome outcome;
  outcome.set_kind(Outcome::HUNG);
  outcome.set_limit_ns(1'500'000'000);
  const std::string report = FailureReport(AtCommit(), SmallScenario(), outcome);
  EXPECT_EQ(report.find("FAILED: seed-17 at commit c0ffee: hang\n  no end within 1.5 s of wall time\nworld:\n"), 0u)
      << report;
}

TEST(SimReport, TwoTracesAreReplayedTwice) {
  Outcome outcome;
  outcome.set_kind(Outcome::DIFFERS);
  outcome.set_trace_hash(1);
  outcome.set_second_trace_hash(0xabc);
  const std::string report = FailureReport(AtCommit(), SmallScenario(), outcome);
  EXPECT_EQ(report.find("FAILED: seed-17 at commit c0ffee: nondeterminism\n"
                        "  trace hash 0000000000000001, then 0000000000000abc\n"),
            0u)
      << report;
  EXPECT_TRUE(report.ends_with("replay: stagecoach sim --seed 17 --twice\n")) << report;
}

TEST(SimReport, AFileAndADefectAreNamedInTheCommand) {
  SimOptions options = AtCommit();
  options.file = "my worlds/it's bad.textproto";
  options.mutant = "skip-fence";
  Outcome outcome;
  outcome.set_kind(Outcome::HUNG);
  const std::string report = FailureReport(options, SmallScenario(), outcome);
  EXPECT_EQ(report.find("FAILED: seed-17 (my worlds/it's bad.textproto) at commit c0ffee: hang\n"), 0u) << report;
  // As a shell reads it, and not with the trace of something that never ends.
  EXPECT_TRUE(
      report.ends_with("replay: stagecoach sim 'my worlds/it'\\''s bad.textproto' --mutant skip-fence "
                       "--hang-after 10\n"))
      << report;
}

TEST(SimReport, TheProfileThatWasAskedForIsNamedInTheCommand) {
  SimOptions options = AtCommit();
  options.profile = "roce";
  Outcome outcome;
  outcome.set_kind(Outcome::HUNG);
  const std::string report = FailureReport(options, SmallScenario(), outcome);
  EXPECT_TRUE(report.ends_with("replay: stagecoach sim --seed 17 --profile roce --hang-after 10\n")) << report;
  EXPECT_EQ(Origin(options, SmallScenario()), "seed 17 --profile roce");
}

TEST(SimReport, OnlyTheLastLineOfASummaryKnowsWallTime) {
  Outcome outcome;
  outcome.mutable_tally()->set_calls(400);
  outcome.mutable_tally()->set_answered(300);
  outcome.set_wall_ns(500'000'000);
  const std::string fast = Summary(SmallScenario(), outcome);
  EXPECT_TRUE(fast.ends_with("\nwall time: 0.500 s, 600 calls answered per second\n")) << fast;
  outcome.set_wall_ns(1'000'000'000);
  const std::string slow = Summary(SmallScenario(), outcome);
  EXPECT_EQ(fast.substr(0, fast.find("wall time")), slow.substr(0, slow.find("wall time")));
  // Nothing has run: no division by zero.
  EXPECT_TRUE(Summary(SmallScenario(), Outcome()).ends_with("wall time: 0.000 s, 0 calls answered per second\n"));
}

TEST(SimReport, ASummarySaysWhatBecameOfRules) {
  Outcome outcome;
  outcome.add_rule("a: rule 'stall' fired 2 times");
  outcome.add_rule("b\x1b: rule 'disconnect message=40' never fired: 1 connection");
  const std::string whole = Summary(SmallScenario(), outcome);
  EXPECT_NE(whole.find("pings\na: rule 'stall' fired 2 times\n"
                       "b\\x1b: rule 'disconnect message=40' never fired: 1 connection\nwall time"),
            std::string::npos)
      << whole;
  // They may have fired later.
  outcome.set_stopped(true);
  EXPECT_EQ(Summary(SmallScenario(), outcome).find("rule"), std::string::npos);
}

// --- Marks ---

constexpr scenario::OutOfReach kListed[] = {
    {"b.listed", "nothing draws it"}, {"c.wrong", "nothing draws that"}, {"d.gone", "its branch was"}};

void Pass(Outcome* outcome, const char* name, uint64_t times) {
  auto* mark = outcome->add_mark();
  mark->set_name(name);
  mark->set_passed(times);
}

TEST(Marks, WhatIsNeverReachedIsToldApartFromWhatCannotBe) {
  MarkTotals totals({"a.reached", "a.unlucky", "b.listed", "c.wrong"}, kListed);
  Outcome outcome;
  Pass(&outcome, "a.reached", 3);
  totals.Add(outcome);
  Pass(&outcome, "c.wrong", 1);
  totals.Add(outcome);
  EXPECT_EQ(totals.Text(),
            "marks: 2 of 4 reached, 1 listed as out of reach\n"
            "             6  a.reached\n"
            "         never  a.unlucky\n"
            "         never  b.listed  listed: nothing draws it\n"
            "             1  c.wrong  reached although listed: nothing draws that\n"
            "         never  d.gone  listed, and no mark has this name: its branch was\n");
}

// One name may stand at several places.
TEST(Marks, PlacesOfOneNameAreOneMark) {
  const MarkTotals totals({"a.twice", "a.twice"}, {});
  EXPECT_EQ(totals.Text(), "marks: 0 of 1 reached, 0 listed as out of reach\n         never  a.twice\n");
}

TEST(Marks, TheListHasNamesOfMarksInOrderAndAReasonForEach) {
  std::set<std::string_view> names;
  for (const Mark* mark : AllMarks()) names.insert(mark->name());
  std::string_view last;
  for (const scenario::OutOfReach& each : scenario::MarksOutOfReach()) {
    EXPECT_EQ(names.count(each.mark), 1u) << each.mark << " is no mark of this program";
    EXPECT_FALSE(each.reason.empty()) << each.mark;
    EXPECT_LT(last, each.mark);
    last = each.mark;
  }
}

// What a process that does `work` writes, to standard output or error, before it dies; and of what.
std::string LastWords(const std::function<void()>& work, int* status) {
  auto child = ChildProcess::Start([&](const ChildProcess::Tell&) {
    ::dup2(STDERR_FILENO, STDOUT_FILENO);
    work();
  });
  EXPECT_TRUE(child.has_value()) << child.error();
  const auto event = (*child)->Await(std::chrono::steady_clock::now() + std::chrono::seconds(60));
  EXPECT_EQ(event.kind, ChildProcess::Event::Kind::kEnded);
  *status = event.status;
  return (*child)->TakeErrors();
}

TEST(SimSignals, AProcessThatCrashesReportsFirst) {
  int status = 0;
  const std::string words = LastWords(
      [] {
        ReportCrashes("FAILED: old: ", "");
        ReportCrashes("FAILED: seed-17: ", "replay: this\n");
        std::abort();
      },
      &status);
  EXPECT_EQ(words, "FAILED: seed-17: crash: SIGABRT\nreplay: this\n");
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGABRT);
}

TEST(SimSignals, AnInterruptIsNotedAndDiedOfLater) {
  int status = 0;
  const std::string words = LastWords(
      [] {
        ::signal(SIGTERM, SIG_DFL);  // child processes leave it to their parents
        NoteInterrupts();
        if (Interrupted()) return;
        ::raise(SIGTERM);
        if (Interrupted()) EndInterrupted();
      },
      &status);
  EXPECT_EQ(words, "");
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGTERM);
}

}  // namespace
}  // namespace stagecoach::cli
