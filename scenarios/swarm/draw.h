// Draw: a world, its devices, its work and what is done to it, all from one seed.
//
// Swarm testing: each seed draws not only the luck of a run but its configuration, with many features left out, so that
// rare combinations come up and few worlds are alike. Sizes are biased to where the code decides something: thresholds
// and one byte beside them, odd, zero, many segments; limits to one credit, one Read, short queues.
//
// The same seed draws the same scenario on every machine, as long as this code does not change: a scenario that is to
// be kept is kept as text (scenarios/regressions).
#pragma once

#include <cstdint>
#include <string>

#include "scenarios/proto/scenario.pb.h"

namespace stagecoach::scenario {

// With devices of this profile, or, empty, of one that the seed draws, too: half of all worlds speak iWARP, the others
// InfiniBand. `profile` is one that every world can do with: "iwarp" or "roce".
Scenario Draw(uint64_t seed, const std::string& profile = {});

}  // namespace stagecoach::scenario
