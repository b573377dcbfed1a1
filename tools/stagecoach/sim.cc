// stagecoach sim: worlds in virtual time. Replays the failure of one seed, or looks for one in many.
//
// Prints what happened and ends with a line "trace hash: HEX": two runs of one scenario print the same, on any machine.
#include <fmt/format.h>
#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <utility>
#include <vector>

#include "base/mark.h"
#include "base/mutant.h"
#include "base/prng.h"
#include "base/trace.h"
#include "emu/tap/pcapng_writer.h"
#include "scenarios/runner/run.h"
#include "scenarios/swarm/draw.h"
#include "scenarios/swarm/shrink.h"
#include "tools/stagecoach/command.h"
#include "tools/stagecoach/commit.h"

namespace stagecoach::cli {
namespace {

using scenario::RunOptions;
using scenario::RunReport;
using scenario::Scenario;

struct SimOptions {
  std::string file;
  uint64_t seed = 1;
  uint64_t count = 1;
  bool twice = false;
  bool keep_going = false;
  bool trace = false;
  std::string pcap;
  std::string until;
  bool step = false;
  bool print = false;
  bool shrink = false;
  std::string out;
  bool marks = false;
  std::string mutant;
  bool list_mutants = false;
};

// --- Looking at one run ---

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

std::string Seconds(Duration time) {
  return fmt::format("{}.{:09} s", time.count() / 1'000'000'000, time.count() % 1'000'000'000);
}

std::string Text(const Scenario& scenario) {
  std::string text;
  google::protobuf::TextFormat::PrintToString(scenario, &text);
  return text;
}

// How to see it again.
std::string Command(const SimOptions& options, const Scenario& scenario) {
  std::string command = "stagecoach sim";
  command += options.file.empty() ? fmt::format(" --seed {}", scenario.seed()) : " " + options.file;
  if (!options.mutant.empty()) command += " --mutant " + options.mutant;
  return command;
}

void PrintFailure(const SimOptions& options, const Scenario& scenario, const RunReport& report) {
  fmt::print("FAILED: {} at commit {}: {} violation{}\n", scenario.name(), kCommit, report.violations.size(),
             report.violations.size() == 1 ? "" : "s");
  for (const auto& violation : report.violations) {
    fmt::print("  {} {}: {}\n", Seconds(violation.when - Instant()), violation.rule, violation.text);
  }
  fmt::print("world:\n{}", Text(scenario));
  if (!report.state.empty()) fmt::print("state:\n{}", report.state);
  fmt::print("replay: {} --trace\n", Command(options, scenario));
}

void PrintSummary(const Scenario& scenario, const RunReport& report) {
  const auto& tally = report.tally;
  fmt::print("{}: {} hosts, {} services, {} clients, {} faults; {} of virtual time, {} events\n", scenario.name(),
             scenario.host_size(), scenario.service_size(), scenario.client_size(), scenario.fault_size(),
             Seconds(report.virtual_time), report.trace_events);
  fmt::print("{} calls: {} answered, {} refused, {} disturbed; {} connections, {} files copied, {} pings\n",
             tally.calls, tally.answered, tally.refused, tally.disturbed, tally.connections, tally.files_copied,
             tally.pings);
}

// The rules broken, of which the first names the failure.
std::string RuleOf(const RunReport& report) {
  return report.violations.empty() ? std::string() : report.violations.front().rule;
}

// `missed`: something that was asked for could not be had.
RunReport RunOnce(const Scenario& scenario, const SimOptions& options, bool* missed) {
  Watcher watcher(options);
  RunOptions run;
  run.observer = &watcher;
  run.stop = [&] { return watcher.stop(); };
  std::shared_ptr<emu::PcapNgWriter> capture;
  if (!options.pcap.empty()) {
    const auto clock = [&watcher]() -> std::chrono::nanoseconds { return watcher.now() - Instant(); };
    auto created = emu::PcapNgWriter::Create(options.pcap, clock, [](const auto& text) { Complain("sim", text); });
    if (created) {
      capture = std::move(*created);
    } else {
      Complain("sim", created.error().message);
      *missed = true;
    }
  }
  run.capture = capture;
  RunReport report = scenario::RunScenario(scenario, run);
  if (!options.until.empty() && !watcher.found()) {
    Complain("sim", fmt::format("--until: no event contains \"{}\"", options.until));
    *missed = true;
  }
  return report;
}

// --- Shrinking ---

bool WriteScenario(const Scenario& scenario, const std::string& path) {
  std::ofstream file(path, std::ios::trunc);
  file << "# proto-file: scenarios/proto/scenario.proto\n# proto-message: Scenario\n" << Text(scenario);
  file.close();
  if (file) return true;
  Complain("sim", fmt::format("{}: {}", path, std::strerror(errno)));
  return false;
}

void ShrinkAndPrint(const SimOptions& options, const Scenario& scenario, const RunReport& report) {
  const std::string rule = RuleOf(report);
  scenario::Shrunk shrunk = scenario::Shrink(scenario, [&](const Scenario& candidate) {
    const RunReport again = scenario::RunScenario(candidate);
    return RuleOf(again) == rule;
  });
  shrunk.scenario.set_purpose(fmt::format("Breaks {}. Shrunk from seed {}.", rule, scenario.seed()));
  fmt::print("shrunk in {} runs to:\n{}", shrunk.runs, Text(shrunk.scenario));
  if (options.out.empty() || !WriteScenario(shrunk.scenario, options.out)) return;
  fmt::print("written to {}\nreplay: stagecoach sim {}{}\n", options.out, options.out,
             options.mutant.empty() ? "" : " --mutant " + options.mutant);
}

// --- Marks ---

void PrintMarks() {
  std::map<std::string, uint64_t> passed;
  for (const Mark* mark : AllMarks()) passed[mark->name()] += mark->passed();
  size_t reached = 0;
  for (const auto& [name, count] : passed) reached += count > 0 ? 1 : 0;
  fmt::print("marks: {} of {} reached\n", reached, passed.size());
  for (const auto& [name, count] : passed)
    fmt::print("  {:>12}  {}\n", count > 0 ? std::to_string(count) : "never", name);
}

// --- Crashes ---

// A crash must name its seed as any failure does.
std::atomic<uint64_t> running_seed{0};

extern "C" void OnCrash(int signal) {
  // Nothing here but what a signal handler may do.
  char text[64] = "stagecoach: sim: crashed in seed ";
  size_t length = std::strlen(text);
  char digits[20];
  size_t count = 0;
  for (uint64_t seed = running_seed.load(); count == 0 || seed > 0; seed /= 10) {
    digits[count++] = static_cast<char>('0' + seed % 10);
  }
  while (count > 0) text[length++] = digits[--count];
  text[length++] = '\n';
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text, length);
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

void TellSeedOnCrash(uint64_t seed) {
  running_seed = seed;
  // A stack of its own: that of a fiber may be what has overflowed.
  static char stack[64 * 1024];
  stack_t alternative{};
  alternative.ss_sp = stack;
  alternative.ss_size = sizeof(stack);
  ::sigaltstack(&alternative, nullptr);
  struct sigaction action {};
  action.sa_handler = OnCrash;
  action.sa_flags = SA_ONSTACK;
  for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) ::sigaction(signal, &action, nullptr);
}

// --- The command ---

// Collects the positions of what text format objects to.
class Errors final : public google::protobuf::io::ErrorCollector {
 public:
  explicit Errors(std::string file) : file_(std::move(file)) {}
  void AddError(int line, google::protobuf::io::ColumnNumber column, const std::string& message) override {
    Complain("sim", fmt::format("{}:{}:{}: {}", file_, line + 1, column + 1, message));
  }

 private:
  const std::string file_;
};

bool ReadScenario(const std::string& path, Scenario* scenario) {
  std::ifstream file(path);
  std::stringstream text;
  if (!file || !(text << file.rdbuf())) {
    Complain("sim", fmt::format("{}: {}", path, errno != 0 ? std::strerror(errno) : "is empty"));
    return false;
  }
  Errors errors(path);
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&errors);
  if (!parser.ParseFromString(text.str(), scenario)) return false;
  if (!scenario->has_name()) scenario->set_name(path);
  if (const auto valid = scenario::Validate(*scenario); !valid) {
    Complain("sim", fmt::format("{}: {}", path, valid.error()));
    return false;
  }
  return true;
}

// Plays the scenario again: whether it leaves the same trace. Complains when not.
bool Repeats(const SimOptions& options, const Scenario& scenario, const RunReport& report) {
  const RunReport again = scenario::RunScenario(scenario);
  if (again.trace_hash == report.trace_hash) return true;
  fmt::print("FAILED: {} at commit {} is not deterministic: trace hash {:016x}, then {:016x}\nreplay: {} --twice\n",
             scenario.name(), kCommit, report.trace_hash, again.trace_hash, Command(options, scenario));
  return false;
}

int RunOne(const SimOptions& options, const Scenario& scenario) {
  if (options.print) {
    fmt::print("{}", Text(scenario));
    return kExitOk;
  }
  TellSeedOnCrash(scenario.seed());
  bool failed = false;
  RunReport report = RunOnce(scenario, options, &failed);
  PrintSummary(scenario, report);
  failed = failed || !report.violations.empty();
  if (options.twice && !report.stopped && !Repeats(options, scenario, report)) failed = true;
  if (!report.violations.empty()) {
    PrintFailure(options, scenario, report);
    if (options.shrink) ShrinkAndPrint(options, scenario, report);
  } else if (report.stopped) {
    fmt::print("state:\n{}", report.state);
  }
  if (options.marks) PrintMarks();
  fmt::print("trace hash: {:016x}\n", report.trace_hash);
  return failed ? kExitFailure : kExitOk;
}

int RunSwarm(const SimOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  uint64_t failures = 0;
  uint64_t calls = 0;
  uint64_t hash = 0;
  uint64_t done = 0;
  for (; done < options.count && (failures == 0 || options.keep_going); ++done) {
    const Scenario scenario = scenario::Draw(options.seed + done);
    TellSeedOnCrash(scenario.seed());
    const RunReport report = scenario::RunScenario(scenario);
    calls += report.tally.calls;
    hash = StableHash(AsText(AsBytes(&report.trace_hash, sizeof(report.trace_hash))), hash);
    bool failed = !report.violations.empty();
    if (failed) {
      PrintFailure(options, scenario, report);
      if (options.shrink) ShrinkAndPrint(options, scenario, report);
    }
    if (options.twice) {
      calls += report.tally.calls;
      if (!Repeats(options, scenario, report)) failed = true;
    }
    failures += failed ? 1 : 0;
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (options.marks) PrintMarks();
  fmt::print("{} seeds from {}{}: {} failed; {} calls in {:.1f} s, {:.0f} calls per second\n", done, options.seed,
             options.twice ? ", each twice" : "", failures, calls, seconds, static_cast<double>(calls) / seconds);
  fmt::print("trace hash: {:016x}\n", hash);
  return failures == 0 ? kExitOk : kExitFailure;
}

// CLI11 turns "-1" into a large number.
CLI::Validator WholeNumber(uint64_t least) {
  return CLI::Validator(
      [least](const std::string& text) -> std::string {
        uint64_t value = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
        if (error == std::errc() && end == text.data() + text.size() && value >= least) return {};
        return fmt::format("{}: expected a whole number from {} to {}", text, least, UINT64_MAX);
      },
      "");
}

int Sim(const SimOptions& options) {
  if (options.list_mutants) {
    for (const Mutant* mutant : AllMutants()) fmt::print("{:<28} {}\n", mutant->name, mutant->defect);
    return kExitOk;
  }
  if (!SelectMutant(options.mutant)) {
    Complain("sim", fmt::format("--mutant {}: {}", options.mutant,
                                AllMutants().empty() ? "this build has none; build with --config=mutants"
                                                     : "there is none of this name; --list-mutants names them"));
    return kExitUsage;
  }
  const auto misused = [](std::string_view text) {
    Complain("sim", text);
    return kExitUsage;
  };
  if (!options.out.empty() && !options.shrink) return misused("--out goes with --shrink");
  if (options.keep_going && options.count == 1) return misused("--keep-going goes with --count");
  if (options.count - 1 > UINT64_MAX - options.seed) return misused("--seed and --count: there are no such seeds");
  if (options.count > 1) {
    const bool of_one = !options.file.empty() || options.trace || options.step || options.print ||
                        !options.until.empty() || !options.pcap.empty();
    if (of_one) return misused("--count goes with --seed, --twice, --keep-going, --shrink, --out and --marks only");
    return RunSwarm(options);
  }
  Scenario scenario;
  if (options.file.empty()) {
    scenario = scenario::Draw(options.seed);
  } else if (!ReadScenario(options.file, &scenario)) {
    return kExitUsage;
  }
  return RunOne(options, scenario);
}

}  // namespace

void AddSim(CLI::App& app, int& exit_code) {
  auto* command = app.add_subcommand("sim", "Run worlds in virtual time: replay a seed, or try many");
  auto options = std::make_shared<SimOptions>();
  auto* file =
      command->add_option("FILE", options->file, "A scenario in text format, instead of one drawn from the seed");
  auto* seed = command->add_option("--seed", options->seed, "Draws the world, its work and its faults")
                   ->capture_default_str()
                   ->check(WholeNumber(0));
  file->excludes(seed);
  command->add_option("--count", options->count, "So many seeds, from --seed on")
      ->capture_default_str()
      ->check(WholeNumber(1));
  command->add_flag("--twice", options->twice, "Run each twice; the trace hashes must agree");
  command->add_flag("--keep-going", options->keep_going, "With --count: go on after a failure");
  command->add_flag("--trace", options->trace, "Print every event");
  command->add_option("--pcap", options->pcap, "Write a capture that Wireshark opens");
  command->add_option("--until", options->until,
                      "Stop at the first event whose line contains this, and show the state");
  command->add_flag("--step", options->step, "Ask after each event; with --until, from that event on");
  command->add_flag("--print", options->print, "Print the scenario instead of running it");
  command->add_flag("--shrink", options->shrink, "Reduce what fails to a small scenario that still fails");
  command->add_option("--out", options->out, "With --shrink: write that scenario here");
  command->add_flag("--marks", options->marks, "List the marks of rare branches, and how often each was passed");
  command->add_option("--mutant", options->mutant, "Switch a deliberate defect on (builds with --config=mutants)");
  command->add_flag("--list-mutants", options->list_mutants, "List them");
  command->footer(
      "\n  stagecoach sim --seed 17 --trace\n"
      "  stagecoach sim --seed 17 --until 'call.over' --pcap seed-17.pcapng\n"
      "  stagecoach sim --count 1000 --twice --marks\n"
      "  stagecoach sim --seed 17 --shrink --out scenarios/regressions/seed-17.textproto");
  command->callback([options, &exit_code] { exit_code = Sim(*options); });
}

}  // namespace stagecoach::cli
