#include "tools/stagecoach/sim_run.h"

#include <fmt/format.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/bytes.h"
#include "base/prng.h"
#include "base/trace.h"
#include "emu/tap/pcapng_writer.h"
#include "scenarios/runner/run.h"
#include "scenarios/swarm/draw.h"
#include "scenarios/swarm/isolated_run.h"
#include "scenarios/swarm/shrink.h"
#include "tools/stagecoach/command.h"
#include "tools/stagecoach/sim_report.h"
#include "tools/stagecoach/sim_signals.h"

namespace stagecoach::cli {
namespace {

using scenario::IsolatedOptions;
using scenario::Outcome;
using scenario::RunReport;
using scenario::Scenario;

IsolatedOptions ToIsolatedOptions(const SimOptions& options) {
  IsolatedOptions isolated;
  isolated.twice = options.twice;
  isolated.profile = options.profile;
  isolated.hang_after = std::chrono::seconds(options.hang_after_seconds);
  isolated.interrupted = Interrupted;
  return isolated;
}

void Print(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

// --- Looking on ---

// Prints events, asks what to do after each, and notices the one that was waited for.
class Watcher final : public TraceSink {
 public:
  explicit Watcher(const SimOptions& options) : options_(options), stepping_(options.step && options.until.empty()) {}

  void OnEvent(Instant now, std::string_view component, std::string_view event,
               std::initializer_list<TraceFact> facts) override {
    now_ = now;
    if (stop_ || (!options_.trace && !options_.step && options_.until.empty())) return;
    const std::string line = FormatTraceEvent(now, component, event, facts);
    if (options_.trace || stepping_) fmt::print("{}\n", line);
    if (!options_.until.empty() && !found_ && line.find(options_.until) != std::string::npos) {
      found_ = true;
      if (!options_.trace && !stepping_) fmt::print("{}\n", line);
      if (!options_.step) {
        stop_ = true;
        return;
      }
      stepping_ = true;
    }
    if (stepping_) Ask();
  }

  // Of the latest event.
  Instant now() const { return now_; }
  bool stop() const { return stop_; }
  bool found() const { return found_; }

 private:
  void Ask() {
    fmt::print(stderr, "[Enter: next event, c: continue, q: quit] ");
    std::string answer;
    if (!std::getline(std::cin, answer) || answer == "q") {
      stop_ = true;
    } else if (answer == "c") {
      stepping_ = false;
    }
  }

  const SimOptions& options_;
  Instant now_{};
  bool stepping_;
  bool stop_ = false;
  bool found_ = false;
};

// In this process. Empty: nothing was played, for the capture cannot be written. `missed`: an event that was waited for
// did not come.
std::optional<Outcome> PlayWatched(const SimOptions& options, const Scenario& scenario, bool* missed) {
  // A crash finds every line before it written.
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
  ReportCrashes(FailureHead(options, scenario), FailureTail(options, scenario, "", "--trace"));
  Watcher watcher(options);
  scenario::RunOptions run;
  run.observer = &watcher;
  run.stop = [&] { return watcher.stop(); };
  if (!options.pcap.empty()) {
    const auto clock = [&watcher]() -> std::chrono::nanoseconds { return watcher.now() - Instant(); };
    auto created = emu::PcapNgWriter::Create(options.pcap, clock, [](const auto& text) { Complain("sim", text); });
    if (!created) {
      Complain("sim", created.error().message);
      return std::nullopt;
    }
    run.capture = std::move(*created);
  }
  const auto play = [&, first = true](const Scenario& played) mutable {
    return std::exchange(first, false) ? scenario::RunScenario(played, run) : scenario::RunScenario(played);
  };
  const Outcome outcome = scenario::Play(scenario, play, options.twice);
  if (!options.until.empty() && !watcher.found()) {
    Complain("sim", fmt::format("--until: no event contains \"{}\"", options.until));
    *missed = true;
  }
  return outcome;
}

// --- Shrinking ---

bool WriteScenario(const Scenario& scenario, const std::string& path) {
  std::ofstream file(path, std::ios::trunc);
  file << "# proto-file: scenarios/proto/scenario.proto\n# proto-message: Scenario\n" << ScenarioText(scenario);
  file.close();
  if (file) return true;
  Complain("sim", fmt::format("{}: {}", path, std::strerror(errno)));
  return false;
}

// False when something that was asked for could not be had.
bool ShrinkAndPrint(const SimOptions& options, const Scenario& scenario, const std::string& failure) {
  NoteInterrupts();
  auto shrunk = scenario::ShrinkFailure(scenario, failure, ToIsolatedOptions(options));
  if (!shrunk) {
    if (!Interrupted()) Complain("sim", fmt::format("{} is not shrunk: {}", scenario.name(), shrunk.error()));
    return false;
  }
  Scenario& small = shrunk->scenario;
  const std::string defect = options.mutant.empty() ? "" : fmt::format(" with the defect {}", options.mutant);
  small.set_purpose(fmt::format("Failed{}: {}. Shrunk from {}.", defect, failure, Origin(options, scenario)));
  if (!options.out.empty()) small.set_name(std::filesystem::path(options.out).stem().string());
  Print(fmt::format("shrunk in {} runs to:\n{}", shrunk->runs, ScenarioText(small)));
  if (options.out.empty()) return true;
  if (!WriteScenario(small, options.out)) return false;
  Print(fmt::format("written to {}\nreplay: stagecoach sim {}{}\n", options.out, ShellWord(options.out),
                    MutantOption(options)));
  return true;
}

// What a child said on standard error, where the report does not say it.
void PassOnErrors(const Outcome& outcome) {
  if (outcome.kind() == Outcome::CRASHED || outcome.kind() == Outcome::HUNG) return;
  std::fwrite(outcome.standard_error().data(), 1, outcome.standard_error().size(), stderr);
}

}  // namespace

int SimOne(const SimOptions& options, const Scenario& scenario) {
  bool missed = false;
  Outcome outcome;
  if (options.Watched()) {
    auto played = PlayWatched(options, scenario, &missed);
    if (!played) return kExitFailure;
    outcome = std::move(*played);
  } else {
    NoteInterrupts();
    auto played = scenario::PlayIsolated(scenario, ToIsolatedOptions(options));
    if (Interrupted()) EndInterrupted();
    if (!played) {
      Complain("sim", played.error());
      return kExitFailure;
    }
    outcome = std::move(*played);
    PassOnErrors(outcome);
  }
  const std::string failure = FailureName(outcome);
  const bool ended = outcome.has_trace_hash();
  if (ended) Print(Summary(scenario, outcome));
  if (!failure.empty()) {
    Print(FailureReport(options, scenario, outcome));
    if (options.shrink && !ShrinkAndPrint(options, scenario, failure)) missed = true;
    if (Interrupted()) EndInterrupted();
  } else if (outcome.stopped()) {
    Print("state:\n" + outcome.state());
  }
  if (options.marks) {
    MarkTotals marks;
    marks.Add(outcome);
    Print(marks.Text());
  }
  if (ended) Print(fmt::format("trace hash: {:016x}\n", outcome.trace_hash()));
  return failure.empty() && !missed ? kExitOk : kExitFailure;
}

int SimMany(const SimOptions& options) {
  NoteInterrupts();
  const auto begin = std::chrono::steady_clock::now();
  uint64_t done = 0;
  uint64_t failures = 0;
  uint64_t answered = 0;
  uint64_t hash = 0;
  MarkTotals marks;
  const auto on_seed = [&](uint64_t seed, const Outcome& outcome) {
    ++done;
    answered += outcome.tally().answered() * (outcome.has_second_trace_hash() ? 2 : 1);
    const uint64_t its_hash = outcome.trace_hash();
    hash = StableHash(AsText(AsBytes(&its_hash, sizeof(its_hash))), hash);
    marks.Add(outcome);
    PassOnErrors(outcome);
    const std::string failure = FailureName(outcome);
    if (failure.empty()) return true;
    ++failures;
    const Scenario scenario = scenario::Draw(seed, options.profile);
    Print(FailureReport(options, scenario, outcome));
    if (options.shrink) ShrinkAndPrint(options, scenario, failure);
    return options.keep_going;
  };
  const auto played = scenario::PlaySeeds(options.seed, options.count, ToIsolatedOptions(options), on_seed);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (options.marks) Print(marks.Text());
  Print(fmt::format(
      "{} seeds from {}{}: {} failed; {} calls answered in {:.1f} s: {:.0f} calls and {:.0f} seeds per second\n", done,
      options.seed, options.twice ? ", each twice" : "", failures, answered, seconds,
      static_cast<double>(answered) / seconds, static_cast<double>(done) / seconds));
  Print(fmt::format("trace hash: {:016x}\n", hash));
  if (Interrupted()) EndInterrupted();
  if (!played) Complain("sim", played.error());
  return played && failures == 0 ? kExitOk : kExitFailure;
}

}  // namespace stagecoach::cli
