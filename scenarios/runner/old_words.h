// OldWords: what older scenario files say in other words.
//
// `fault` of a scenario is `injection`; `fault` of a device is a rule of it. Such a file is read once (ReadWritten, in
// run.h): what is wrong with it is said in its own words, and what is played knows today's alone. Pure; any thread.
#pragma once

#include <optional>

#include "emu/inject/rule.h"
#include "scenarios/proto/scenario.pb.h"

namespace stagecoach::scenario {

bool HasOldWords(const Scenario& scenario);
// The same scenario in today's words, whichever it has. What older files have stands in front.
Scenario InTodaysWords(Scenario scenario);
// What a fault of a device does; nothing: it does nothing, as one of no kind, or with a delay of no time.
std::optional<emu::InjectionRule> RuleOf(const DeviceFault& fault);

}  // namespace stagecoach::scenario
