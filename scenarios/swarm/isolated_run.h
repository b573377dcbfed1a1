// Playing scenarios in child processes, so that whatever a scenario does to its process is an outcome like any other: a
// broken rule, two traces where there should be one, a crash, an endless loop. Each has a name, by which a failure is
// known while it is shrunk.
//
// For processes of one thread (fork).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "base/result.h"
#include "scenarios/proto/scenario.pb.h"
#include "scenarios/runner/run.h"
#include "scenarios/swarm/outcome.pb.h"

namespace stagecoach::scenario {

using Player = std::function<RunReport(const Scenario&)>;

struct IsolatedOptions {
  // Plays each scenario twice; the trace hashes must agree.
  bool twice = false;
  // Of the devices in worlds that are drawn (Draw).
  std::string profile;
  // Wall time that a scenario has to come to its end, each time it is played.
  std::chrono::milliseconds hang_after = std::chrono::seconds(60);
  // Asked when a signal has come in: whether to give up. May be empty.
  std::function<bool()> interrupted;
  Player play = [](const Scenario& scenario) { return RunScenario(scenario); };
};

// Plays `scenario` in this process, once or twice. The outcome is never CRASHED or HUNG.
Outcome Play(const Scenario& scenario, const Player& play, bool twice);

// Plays it in a process of its own. Fails when there can be no such process, or when interrupted; says which.
Result<Outcome, std::string> PlayIsolated(const Scenario& scenario, const IsolatedOptions& options);

// What a seed came to; false: enough.
using OnSeed = std::function<bool(uint64_t seed, const Outcome& outcome)>;

// Draws and plays `count` seeds from `first` on, and tells of each in order. One process plays them all; a seed that
// brings it down costs that process, and the next seed starts another. Fails as PlayIsolated does.
Result<void, std::string> PlaySeeds(uint64_t first, uint64_t count, const IsolatedOptions& options,
                                    const OnSeed& on_seed);

inline constexpr const char* kHang = "hang";
inline constexpr const char* kNondeterminism = "nondeterminism";

// Two outcomes of one name are taken for the same failure. Empty: no failure. The rule broken first ("call.once");
// kHang; kNondeterminism; or how the process died and, as far as its last words tell, where: "crash: SIGABRT
// rpcrdma/core/requester.cc:120", "crash: exit status 1 AddressSanitizer: heap-use-after-free".
std::string FailureName(const Outcome& outcome);

}  // namespace stagecoach::scenario
