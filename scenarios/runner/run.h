// RunScenario: plays a scenario to its end and judges it.
//
//   injections happen, programs work          safety: every checker watches
//   they are over, programs finish            liveness: within a bound, or the world has a deadlock
//   each client shows that it works again     liveness, and no growth from round to round
//   everything ends in an orderly way         nothing outlives its connection
//
// Deterministic: the same scenario gives the same trace, and the same hash of it, on every machine. Single-threaded;
// one run at a time in a process, since the stock verbs API has one world.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "base/time.h"
#include "base/trace.h"
#include "emu/tap/capture.h"
#include "emu/world/simulated_world.h"
#include "scenarios/proto/scenario.pb.h"
#include "scenarios/runner/program.h"
#include "scenarios/runner/violations.h"

namespace stagecoach::scenario {

// What is wrong with a scenario before anything runs: a host that does not exist, two services on one host. Names the
// field, in the scenario's own words if it has old ones, and what was expected.
Result<void, std::string> Validate(const Scenario& scenario);
// A scenario as somebody has written it: valid, and in today's words (old_words.h).
Result<Scenario, std::string> ReadWritten(Scenario written);

struct RunOptions {
  // Sees every event. May be null.
  TraceSink* observer = nullptr;
  std::shared_ptr<emu::CaptureSink> capture;
  // Asked between events; true ends the run there. May be empty.
  std::function<bool()> stop;
  // Given the world before anything runs: may arrange for things the scenario knows nothing of, which the judges must
  // not excuse. May be empty.
  std::function<void(emu::SimulatedWorld&)> sabotage;
};

struct RunReport {
  uint64_t trace_hash = 0;
  uint64_t trace_events = 0;
  std::vector<Violation> violations;
  Duration virtual_time{};
  Tally tally;
  bool stopped = false;  // by RunOptions::stop
  // What became of the rules of devices while they lasted, a line each, in the order of hosts and rules: "a: rule
  // 'stall' fired 2 times".
  std::vector<std::string> rules;
  // The state of every program, QP and connection when the run was stopped, or hung, or the first violation had been
  // found; empty otherwise.
  std::string state;
};

// `scenario` is valid, and in today's words.
RunReport RunScenario(const Scenario& scenario, const RunOptions& options = {});

}  // namespace stagecoach::scenario
