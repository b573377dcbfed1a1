#include "scenarios/runner/device_rules.h"

#include <algorithm>

#include "emu/world/world.h"

namespace stagecoach::scenario {

using emu::InjectionAction;
using emu::InjectionRule;

Result<DeviceRules, std::string> ReadRule(const Device& device, const std::string& text) {
  auto read = emu::ParseInjectionRules(text);
  if (!read) return Err(read.error().Explain(text));
  if (read->empty()) return Err(std::string(emu::kNoRule));
  if (std::string wrong = emu::WhyNoRules(*emu::ProfileByName(device.profile()), *read); !wrong.empty()) {
    return Err(std::move(wrong));
  }
  for (InjectionRule& rule : *read) {
    if (rule.Draws() && !rule.seed) rule.seed = InjectionRule::kOfTheDevice;
  }
  return std::move(*read);
}

Result<DeviceRules, std::string> ReadRules(const Device& device) {
  DeviceRules rules;
  for (int i = 0; i < device.rule_size(); ++i) {
    const auto error = [i](const std::string& what) { return Err("rule[" + std::to_string(i) + "]: " + what); };
    const auto read = ReadRule(device, device.rule(i));
    if (!read) return error(read.error());
    if (rules.size() + read->size() > emu::kMostRules) {
      return error(emu::MoreThanMostRules());
    }
    rules.insert(rules.end(), read->begin(), read->end());
  }
  return rules;
}

size_t CountOfRules(const Device& device) {
  size_t count = 0;
  for (const std::string& text : device.rule()) {
    if (const auto read = emu::ParseInjectionRules(text)) count += read->size();
  }
  return count;
}

DeviceRules GivenRules(const Device& device) {
  return ReadRules(device).value();
}

bool IsNowAndThen(const InjectionRule& rule) {
  constexpr uint32_t kSeldom = 5;
  if (rule.one_in != 0) return rule.one_in >= kSeldom;
  return rule.probability <= InjectionRule::kAlways / kSeldom;
}

bool LoseOrDelay(const DeviceRules& rules, emu::KindSet kinds) {
  return std::any_of(rules.begin(), rules.end(), [kinds](const InjectionRule& rule) {
    return (emu::SetOf(rule.action) & emu::kLosingActions) != 0 && (rule.kinds & kinds) != 0;
  });
}

namespace {

Duration TimesOf(const DeviceRules& rules, emu::ActionSet actions) {
  Duration sum{};
  for (const InjectionRule& rule : rules) {
    if ((emu::SetOf(rule.action) & actions) != 0) sum += rule.delay;
  }
  return sum;
}

}  // namespace

Duration DelaysOf(const DeviceRules& rules) {
  return TimesOf(rules, emu::SetOf(InjectionAction::kDelay));
}

Duration LongestHold(const DeviceRules& rules) {
  return TimesOf(rules, emu::kAllActions);
}

bool MayCut(const InjectionRule& rule, Duration delays, bool is_established) {
  constexpr Duration kAckTimeout = 500ms;  // CmOptions::ack_timeout
  // Datagrams are what makes a connection, and nothing of it afterwards.
  if (is_established && (rule.kinds & emu::kKindsOfConnections) == 0) return false;
  switch (rule.action) {
    case InjectionAction::kDisconnect:
    case InjectionAction::kStall:
      return true;
    case InjectionAction::kDrop:
    case InjectionAction::kNotReady:
      return !IsNowAndThen(rule);
    case InjectionAction::kDelay:
      return delays >= kAckTimeout;
    default:
      return false;
  }
}

}  // namespace stagecoach::scenario
