// Shrink: from a scenario that fails to a small one that still fails in the same way.
//
// Greedy delta debugging over the scenario's own structure, by protobuf reflection, so that new fields of the schema
// take part without a line here: drop elements of lists (halves first), clear fields to their defaults, bring numbers
// down. A step is kept when the scenario stays valid and the run breaks the same rule as before.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "scenarios/proto/scenario.pb.h"

namespace stagecoach::scenario {

struct Shrunk {
  Scenario scenario;
  uint32_t runs = 0;   // tried
  uint32_t steps = 0;  // kept
};

// `fails` says whether a (valid) scenario breaks the rule in question; it holds for `scenario`. At most `runs_max`
// runs.
Shrunk Shrink(const Scenario& scenario, const std::function<bool(const Scenario&)>& fails, uint32_t runs_max = 2000);

}  // namespace stagecoach::scenario
