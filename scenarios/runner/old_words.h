// OldWords: what older scenario files say in other words.
//
// `fault` of a scenario is `injection`; `fault` of a device is a rule of it. Pure; any thread.
#pragma once

#include "scenarios/proto/scenario.pb.h"

namespace stagecoach::scenario {

// The same scenario in today's words, whichever it has. What older files have stands in front.
Scenario InTodaysWords(Scenario scenario);

}  // namespace stagecoach::scenario
