// OldWords: what older scenario files say in other words.
//
// `fault` of a scenario is `injection`. Pure; any thread.
#pragma once

#include "scenarios/proto/scenario.pb.h"

namespace stagecoach::scenario {

// The same scenario in today's words, whichever it has.
Scenario InTodaysWords(Scenario scenario);

}  // namespace stagecoach::scenario
