// The runs of `stagecoach sim`: one scenario or many seeds, played, reported and, when they fail, shrunk.
//
// A scenario is played in a child process, so that a crash or an endless loop is a failure like any other; unless
// somebody looks on (SimOptions::Watched).
#pragma once

#include "scenarios/proto/scenario.pb.h"
#include "tools/stagecoach/sim_options.h"

namespace stagecoach::cli {

// `scenario` is valid. These return the exit code.
int SimOne(const SimOptions& options, const scenario::Scenario& scenario);
int SimMany(const SimOptions& options);

}  // namespace stagecoach::cli
