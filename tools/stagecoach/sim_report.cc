#include "tools/stagecoach/sim_report.h"

#include <fmt/format.h>
#include <google/protobuf/text_format.h>

#include <algorithm>
#include <cctype>

#include "base/mark.h"
#include "rpcrdma/ulb/file/names.h"
#include "scenarios/runner/violations.h"

namespace stagecoach::cli {

using scenario::Outcome;
using scenario::Scenario;

namespace {

std::string Seconds(int64_t nanoseconds) {
  return fmt::format("{}.{:09} s", nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000);
}

// What happened, below the failure's name.
std::string Details(const Outcome& outcome) {
  std::string text;
  if (outcome.kind() == Outcome::DIFFERS) {
    text += fmt::format("  trace hash {:016x}, then {:016x}\n", outcome.trace_hash(), outcome.second_trace_hash());
  }
  if (outcome.kind() == Outcome::HUNG) {
    text += fmt::format("  no end within {:g} s of wall time\n", static_cast<double>(outcome.limit_ns()) / 1e9);
  }
  if (outcome.kind() == Outcome::VIOLATED) text += fmt::format("  trace hash {:016x}\n", outcome.trace_hash());
  for (const auto& violation : outcome.violation()) {
    text += fmt::format("  {} {}: {}\n", Seconds(violation.when_ns()), violation.rule(), violation.text());
  }
  if (outcome.violation_size() == static_cast<int>(scenario::Violations::kKept)) {
    text += fmt::format("  perhaps more: {} are kept\n", scenario::Violations::kKept);
  }
  if (outcome.kind() == Outcome::CRASHED || outcome.kind() == Outcome::HUNG) {
    const std::string& errors = outcome.standard_error();
    if (!errors.empty()) text += "standard error:\n" + errors + (errors.back() == '\n' ? "" : "\n");
  }
  return text;
}

}  // namespace

std::string ScenarioText(const Scenario& scenario) {
  std::string text;
  google::protobuf::TextFormat::PrintToString(scenario, &text);
  return text;
}

std::string Summary(const Scenario& scenario, const Outcome& outcome) {
  const auto& tally = outcome.tally();
  std::string rules;
  // Of a run that was stopped what is to come is not known.
  if (!outcome.stopped()) {
    for (const std::string& words : outcome.rule()) rules += rpcrdma::file::Printable(words) + "\n";
  }
  const double wall = static_cast<double>(outcome.wall_ns()) / 1e9;
  return fmt::format("{}: {} hosts, {} services, {} clients, {} injections; {} of virtual time, {} events\n",
                     scenario.name(), scenario.host_size(), scenario.service_size(), scenario.client_size(),
                     scenario.injection_size(), Seconds(outcome.virtual_ns()), outcome.trace_events()) +
         fmt::format("{} calls: {} answered, {} refused, {} disturbed; {} connections, {} files copied, {} pings\n",
                     tally.calls(), tally.answered(), tally.refused(), tally.disturbed(), tally.connections(),
                     tally.files_copied(), tally.pings()) +
         rules +
         fmt::format("wall time: {:.3f} s, {:.0f} calls answered per second\n", wall,
                     wall > 0 ? static_cast<double>(tally.answered()) / wall : 0);
}

std::string FailureHead(const SimOptions& options, const Scenario& scenario) {
  const std::string file =
      options.file.empty() || options.file == scenario.name() ? "" : fmt::format(" ({})", options.file);
  return fmt::format("FAILED: {}{} at commit {}: ", scenario.name(), file, options.commit);
}

std::string FailureTail(const SimOptions& options, const Scenario& scenario, std::string_view state,
                        std::string_view how) {
  return fmt::format("world:\n{}{}{}replay: stagecoach sim {}{}{} {}\n", ScenarioText(scenario),
                     state.empty() ? "" : "state:\n", state,
                     options.file.empty() ? fmt::format("--seed {}{}", scenario.seed(), ProfileOption(options))
                                          : ShellWord(options.file),
                     RuleOptions(options), MutantOption(options), how);
}

std::string FailureReport(const SimOptions& options, const Scenario& scenario, const Outcome& outcome) {
  // A trace of what never ends would not either.
  const std::string_view how = outcome.kind() == Outcome::DIFFERS ? "--twice"
                               : outcome.kind() == Outcome::HUNG  ? "--hang-after 10"
                                                                  : "--trace";
  return FailureHead(options, scenario) + FailureName(outcome) + "\n" + Details(outcome) +
         FailureTail(options, scenario, outcome.state(), how);
}

std::string ShellWord(const std::string& text) {
  const bool plain = !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || std::string_view("_-./+,:@%").find(static_cast<char>(c)) != std::string_view::npos;
  });
  if (plain) return text;
  std::string word = "'";
  for (const char c : text) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return word + "'";
}

std::string Origin(const SimOptions& options, const Scenario& scenario) {
  return options.file.empty() ? fmt::format("seed {}{}", scenario.seed(), ProfileOption(options)) : options.file;
}

std::string ProfileOption(const SimOptions& options) {
  return options.profile.empty() ? "" : " --profile " + options.profile;
}

std::string RuleOptions(const SimOptions& options) {
  std::string text;
  for (const std::string& rule : options.rules) text += " --rule " + ShellWord(rule);
  return text;
}

std::string MutantOption(const SimOptions& options) {
  return options.mutant.empty() ? "" : " --mutant " + options.mutant;
}

namespace {

std::vector<std::string> NamesOfAllMarks() {
  std::vector<std::string> names;
  for (const Mark* mark : AllMarks()) names.emplace_back(mark->name());
  return names;
}

}  // namespace

MarkTotals::MarkTotals() : MarkTotals(NamesOfAllMarks(), scenario::MarksOutOfReach()) {}

MarkTotals::MarkTotals(const std::vector<std::string>& names, std::span<const scenario::OutOfReach> out_of_reach) {
  for (const std::string& name : names) totals_[name].exists = true;
  for (const scenario::OutOfReach& each : out_of_reach) totals_[std::string(each.mark)].reason = each.reason;
}

void MarkTotals::Add(const Outcome& outcome) {
  for (const auto& mark : outcome.mark()) {
    Total& total = totals_[mark.name()];
    total.exists = true;
    total.passed += mark.passed();
  }
}

std::string MarkTotals::Text() const {
  size_t marks = 0;
  size_t reached = 0;
  size_t out_of_reach = 0;
  std::string lines;
  for (const auto& [name, total] : totals_) {
    marks += total.exists ? 1 : 0;
    reached += total.passed > 0 ? 1 : 0;
    out_of_reach += total.exists && total.passed == 0 && !total.reason.empty() ? 1 : 0;
    lines += fmt::format("  {:>12}  {}", total.passed > 0 ? std::to_string(total.passed) : "never", name);
    if (!total.reason.empty()) {
      lines += fmt::format("  {}: {}",
                           !total.exists      ? "listed, and no mark has this name"
                           : total.passed > 0 ? "reached although listed"
                                              : "listed",
                           total.reason);
    }
    lines += "\n";
  }
  return fmt::format("marks: {} of {} reached, {} listed as out of reach\n", reached, marks, out_of_reach) + lines;
}

}  // namespace stagecoach::cli
