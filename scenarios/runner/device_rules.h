// The rules of a scenario's devices (docs/injections.md): how they are read, and what the runner must know of them to
// judge fairly. What a rule did, the trace says (evidence.h); here is what it may do.
//
// Pure functions; any thread.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/result.h"
#include "base/time.h"
#include "emu/inject/rule.h"
#include "scenarios/proto/scenario.pb.h"

namespace stagecoach::scenario {

using DeviceRules = std::vector<emu::InjectionRule>;

// The rules of one text, for a device whose profile is known. Those that draw and name no seed have the luck of the
// device. The error says what cannot be understood or carried out, and why.
Result<DeviceRules, std::string> ReadRule(const Device& device, const std::string& text);
// All that the scenario has for the device. The error begins with the place: "rule[2]: ...".
Result<DeviceRules, std::string> ReadRules(const Device& device);
// How many that are, where each can be read.
size_t CountOfRules(const Device& device);
// Those of a valid scenario.
DeviceRules GivenRules(const Device& device);

// It happens by luck, and to one in five at most: connections live with it.
bool IsNowAndThen(const emu::InjectionRule& rule);
// Whether one of them has what is sent or received of these kinds lost, or late.
bool LoseOrDelay(const DeviceRules& rules, emu::KindSet kinds);
// How much later than without rules something leaves at most, when all of them have it late.
Duration DelaysOf(const DeviceRules& rules);
// For how long something may still be held back when the rules are over.
Duration LongestHold(const DeviceRules& rules);
// Whether a rule may end a connection, established or not yet. All rules of its device together have things late by as
// much as `delays`. What is lost by luck now and then ends none.
bool MayCut(const emu::InjectionRule& rule, Duration delays, bool is_established);

}  // namespace stagecoach::scenario
