// Limits of a scenario's numbers: what a run can mean and bear. Checked before anything runs.
#pragma once

#include <string>

#include "base/result.h"
#include "scenarios/proto/scenario.pb.h"

namespace stagecoach::scenario {

// The first number out of its range: "client[0].call[2].repeat: 4000000000, expected 0 to 100000".
Result<void, std::string> CheckLimits(const Scenario& scenario);

}  // namespace stagecoach::scenario
