// What a real process says of its injection rules on standard error: a line when one fires, and at the end of the
// process one for each that never has, so that nobody takes a test without its injection for one that has passed.
//
//   stagecoach: rule 'disconnect message=10' fired: connection 1, message 10 sent (send)
//   stagecoach: rule 'stall message=500' never fired: 1 connection, 46 messages sent and 45 received
//
// A rule that fires again and again says so for its first ten times, and at the end how often it was. The end is exit()
// or a return from main; a process that is killed, or calls _exit(), says nothing, nor does a forked child of what its
// parent has seen.
//
// Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "emu/inject/plan.h"

namespace stagecoach::emu {

// A plan that does.
std::shared_ptr<InjectionPlan> PlanThatSpeaks(std::vector<InjectionRule> rules);

// What is to be said at the end, a line for each rule that has something to say; without "stagecoach: ".
std::vector<std::string> LastWordsOf(const InjectionPlan& plan);
// Of a rule that has been given: "rule 'stall message=500' fired 3 times", or "... never fired: 1 connection, ...".
std::string WordsOf(const InjectionPlan& plan, size_t rule, uint64_t fired);

}  // namespace stagecoach::emu
