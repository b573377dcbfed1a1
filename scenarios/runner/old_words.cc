#include "scenarios/runner/old_words.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/time.h"
#include "emu/inject/rule.h"

namespace stagecoach::scenario {
namespace {

using emu::InjectionAction;

// Of a kind that is not NONE.
InjectionAction ActionOf(DeviceFault::Kind kind) {
  switch (kind) {
    case DeviceFault::DELAY_COMPLETION:
      return InjectionAction::kDelayCompletion;
    case DeviceFault::ADVERSARIAL_PLACEMENT:
      return InjectionAction::kPlaceLate;
    case DeviceFault::LOSE_PACKET:
      return InjectionAction::kDrop;
    case DeviceFault::REPEAT_PACKET:
      return InjectionAction::kDuplicate;
    case DeviceFault::NOT_READY:
      return InjectionAction::kNotReady;
    case DeviceFault::FAIL_REGISTRATION:
    case DeviceFault::NONE:
      break;
  }
  return InjectionAction::kFailRegistration;
}

void SayAsRules(Device* device) {
  google::protobuf::RepeatedPtrField<std::string> rules;
  for (const DeviceFault& fault : device->fault()) {
    if (const auto rule = RuleOf(fault)) *rules.Add() = emu::ToString(*rule);
  }
  rules.MergeFrom(device->rule());
  device->clear_fault();
  *device->mutable_rule() = std::move(rules);
}

}  // namespace

std::optional<emu::InjectionRule> RuleOf(const DeviceFault& fault) {
  if (fault.kind() == DeviceFault::NONE) return std::nullopt;
  emu::InjectionRule rule;
  rule.action = ActionOf(fault.kind());
  rule.one_in = fault.one_in();
  const emu::ActionRow& action = emu::RowOf(rule.action);
  rule.sent = action.sent;
  rule.received = action.received && rule.action != InjectionAction::kDrop;
  if (action.depth == emu::InjectionDepth::kRecord) rule.kinds = emu::kEveryRecord;
  if (rule.action == InjectionAction::kDelayCompletion) {
    if (fault.delay_ns() == 0) return std::nullopt;
    // Rules have no longer times, and nobody waits for a completion for more than an hour to see the difference.
    rule.delay = std::min<Duration>(Duration(fault.delay_ns()), emu::kLongestRuleTime);
  }
  if (rule.action == InjectionAction::kPlaceLate) {
    rule.delay = 50us;
    rule.one_in = 0;
  }
  return rule;
}

bool HasOldWords(const Scenario& scenario) {
  return !scenario.fault().empty() || std::any_of(scenario.host().begin(), scenario.host().end(),
                                                  [](const Host& host) { return !host.device().fault().empty(); });
}

Scenario InTodaysWords(Scenario scenario) {
  if (!scenario.fault().empty()) {
    auto injections = std::move(*scenario.mutable_fault());
    injections.MergeFrom(scenario.injection());
    scenario.clear_fault();
    *scenario.mutable_injection() = std::move(injections);
  }
  for (Host& host : *scenario.mutable_host()) {
    if (!host.device().fault().empty()) SayAsRules(host.mutable_device());
  }
  return scenario;
}

}  // namespace stagecoach::scenario
