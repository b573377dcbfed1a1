// Shrink: from a scenario that fails to a small one that still fails in the same way.
//
// Greedy delta debugging over the scenario's own structure, by protobuf reflection, so that new fields of the schema
// take part without a line here: drop elements of lists (halves first), clear fields to their defaults, bring numbers
// down. A step is kept when the scenario stays valid and fails as before.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/result.h"
#include "scenarios/proto/scenario.pb.h"
#include "scenarios/swarm/isolated_run.h"

namespace stagecoach::scenario {

struct Shrunk {
  Scenario scenario;
  uint32_t runs = 0;   // tried
  uint32_t steps = 0;  // kept
};

// `fails` says whether a (valid) scenario fails in the way in question; it holds for `scenario`. At most `runs_max`
// runs.
Shrunk Shrink(const Scenario& scenario, const std::function<bool(const Scenario&)>& fails, uint32_t runs_max = 2000);

// Shrinks a scenario whose failure has this name (FailureName), whatever the failure is: each run has a process of its
// own, and is made twice when it is nondeterminism that is looked for. Says why not when `scenario` does not fail so
// when it is played alone.
//
// A candidate that hangs takes all of its time: while shrinking, a twentieth of `options.hang_after` is enough (but a
// second, if there is one). The result is held to all of it.
Result<Shrunk, std::string> ShrinkFailure(const Scenario& scenario, const std::string& failure, IsolatedOptions options,
                                          uint32_t runs_max = 2000);

}  // namespace stagecoach::scenario
