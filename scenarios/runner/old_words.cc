#include "scenarios/runner/old_words.h"

#include <utility>

namespace stagecoach::scenario {

Scenario InTodaysWords(Scenario scenario) {
  if (scenario.fault().empty()) return scenario;
  auto injections = std::move(*scenario.mutable_fault());
  injections.MergeFrom(scenario.injection());
  scenario.clear_fault();
  *scenario.mutable_injection() = std::move(injections);
  return scenario;
}

}  // namespace stagecoach::scenario
