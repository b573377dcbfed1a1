// What only the simulated surroundings can tell.
#pragma once

#include "base/trace.h"

namespace stagecoach::verbs {

// Of everything all hosts decided since Begin().
const TraceHash& SimulatedTrace();

}  // namespace stagecoach::verbs
