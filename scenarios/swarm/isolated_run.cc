#include "scenarios/swarm/isolated_run.h"

#include <fmt/format.h>
#include <string.h>
#include <sys/wait.h>

#include <map>
#include <memory>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/mark.h"
#include "scenarios/swarm/child_process.h"
#include "scenarios/swarm/draw.h"

namespace stagecoach::scenario {
namespace {

using Clock = std::chrono::steady_clock;
using Event = ChildProcess::Event;

// An outcome fits into a message, whatever the scenario.
constexpr size_t kStateMax = 512 << 10;
constexpr size_t kTextMax = 16 << 10;
static_assert(kStateMax + Violations::kKept * kTextMax < ChildProcess::kMessageMax / 2);

std::string Bounded(const std::string& text, size_t max) {
  if (text.size() <= max) return text;
  return text.substr(0, max) + fmt::format("\n... ({} bytes more)\n", text.size() - max);
}

std::map<std::string, uint64_t> MarksPassed() {
  std::map<std::string, uint64_t> passed;
  for (const Mark* mark : AllMarks()) passed[mark->name()] += mark->passed();
  return passed;
}

Outcome ToOutcome(const RunReport& report) {
  Outcome outcome;
  outcome.set_kind(report.violations.empty() ? Outcome::PASSED : Outcome::VIOLATED);
  for (const Violation& violation : report.violations) {
    auto* added = outcome.add_violation();
    added->set_rule(violation.rule);
    added->set_text(Bounded(violation.text, kTextMax));
    added->set_when_ns((violation.when - Instant()).count());
  }
  outcome.set_trace_hash(report.trace_hash);
  outcome.set_trace_events(report.trace_events);
  outcome.set_virtual_ns(report.virtual_time.count());
  outcome.set_stopped(report.stopped);
  outcome.set_state(Bounded(report.state, kStateMax));
  auto* tally = outcome.mutable_tally();
  tally->set_calls(report.tally.calls);
  tally->set_answered(report.tally.answered);
  tally->set_refused(report.tally.refused);
  tally->set_disturbed(report.tally.disturbed);
  tally->set_connections(report.tally.connections);
  tally->set_files_copied(report.tally.files_copied);
  tally->set_pings(report.tally.pings);
  for (const std::string& words : report.rules) outcome.add_rule(words);
  return outcome;
}

Outcome Hung(std::chrono::milliseconds limit, std::string errors) {
  Outcome outcome;
  outcome.set_kind(Outcome::HUNG);
  outcome.set_limit_ns(std::chrono::nanoseconds(limit).count());
  outcome.set_standard_error(std::move(errors));
  return outcome;
}

Outcome Crashed(int status, std::string errors) {
  Outcome outcome;
  outcome.set_kind(Outcome::CRASHED);
  if (WIFSIGNALED(status)) {
    outcome.set_signal(WTERMSIG(status));
  } else {
    outcome.set_exit_status(WEXITSTATUS(status));
  }
  outcome.set_standard_error(std::move(errors));
  return outcome;
}

// Of the outcomes that a child tells one by one, the next; the child is no more when it is CRASHED or HUNG.
Result<Outcome, std::string> NextOutcome(ChildProcess& child, const IsolatedOptions& options) {
  const auto limit = options.hang_after * (options.twice ? 2 : 1);
  const auto deadline = Clock::now() + limit;
  for (;;) {
    Event event = child.Await(deadline);
    switch (event.kind) {
      case Event::Kind::kMessage: {
        Outcome outcome;
        // Nobody else writes to that pipe, but a process about to crash may write anything.
        if (!outcome.ParseFromString(event.message)) return Crashed(0, child.TakeErrors());
        outcome.set_standard_error(child.TakeErrors());
        return outcome;
      }
      case Event::Kind::kEnded:
        return Crashed(event.status, child.TakeErrors());
      case Event::Kind::kLate:
        return Hung(limit, child.TakeErrors());
      case Event::Kind::kInterrupted:
        if (options.interrupted && options.interrupted()) return Err(std::string("interrupted"));
        break;
    }
  }
}

// "base/time.h:3" of "base/time.h:3: check failed: x > 0".
std::string_view PlaceOf(std::string_view errors) {
  for (size_t begin = 0; begin < errors.size();) {
    const std::string_view line = errors.substr(begin, errors.find('\n', begin) - begin);
    begin += line.size() + 1;
    // A CHECK; UBSan.
    for (const std::string_view what : {": check failed: ", ": runtime error: "}) {
      if (const size_t at = line.find(what); at != line.npos) return line.substr(0, at);
    }
    // "==7==ERROR: AddressSanitizer: heap-use-after-free on address ..."
    for (const std::string_view who : {"AddressSanitizer: ", "ThreadSanitizer: "}) {
      const size_t at = line.find(who);
      if (at == line.npos) continue;
      return line.substr(at, line.find(' ', at + who.size()) - at);
    }
  }
  return {};
}

std::string NameOfSignal(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name != nullptr ? fmt::format("SIG{}", name) : fmt::format("signal {}", signal);
}

}  // namespace

Outcome Play(const Scenario& scenario, const Player& play, bool twice) {
  const auto before = MarksPassed();
  const auto begin = Clock::now();
  const RunReport report = play(scenario);
  const auto end = Clock::now();
  Outcome outcome = ToOutcome(report);
  outcome.set_wall_ns(std::chrono::nanoseconds(end - begin).count());
  if (twice && !report.stopped) {
    outcome.set_second_trace_hash(play(scenario).trace_hash);
    if (outcome.second_trace_hash() != outcome.trace_hash()) outcome.set_kind(Outcome::DIFFERS);
  }
  for (const auto& [name, passed] : MarksPassed()) {
    if (passed == before.at(name)) continue;
    auto* mark = outcome.add_mark();
    mark->set_name(name);
    mark->set_passed(passed - before.at(name));
  }
  return outcome;
}

Result<Outcome, std::string> PlayIsolated(const Scenario& scenario, const IsolatedOptions& options) {
  if (options.interrupted && options.interrupted()) return Err(std::string("interrupted"));
  auto child = ChildProcess::Start(
      [&](const ChildProcess::Tell& tell) { tell(Play(scenario, options.play, options.twice).SerializeAsString()); });
  if (!child) return Err(std::move(child.error()));
  return NextOutcome(**child, options);
}

Result<void, std::string> PlaySeeds(uint64_t first, uint64_t count, const IsolatedOptions& options,
                                    const OnSeed& on_seed) {
  std::unique_ptr<ChildProcess> child;
  for (uint64_t done = 0; done < count; ++done) {
    if (options.interrupted && options.interrupted()) return Err(std::string("interrupted"));
    if (child == nullptr) {
      auto started = ChildProcess::Start([&](const ChildProcess::Tell& tell) {
        for (uint64_t next = done; next < count; ++next) {
          tell(Play(Draw(first + next, options.profile), options.play, options.twice).SerializeAsString());
        }
      });
      if (!started) return Err(std::move(started.error()));
      child = std::move(*started);
    }
    const auto outcome = NextOutcome(*child, options);
    if (!outcome) return Err(outcome.error());
    if (outcome->kind() == Outcome::CRASHED || outcome->kind() == Outcome::HUNG) child.reset();
    if (!on_seed(first + done, *outcome)) break;
  }
  return {};
}

std::string FailureName(const Outcome& outcome) {
  switch (outcome.kind()) {
    case Outcome::PASSED:
      return {};
    case Outcome::VIOLATED:
      return outcome.violation(0).rule();
    case Outcome::DIFFERS:
      return kNondeterminism;
    case Outcome::HUNG:
      return kHang;
    case Outcome::CRASHED:
      break;
  }
  std::string name = "crash: " + (outcome.has_signal() ? NameOfSignal(outcome.signal())
                                                       : fmt::format("exit status {}", outcome.exit_status()));
  const std::string_view place = PlaceOf(outcome.standard_error());
  if (!place.empty()) name += fmt::format(" {}", place);
  return name;
}

}  // namespace stagecoach::scenario
