#include "scenarios/runner/nic_checker.h"

#include <fmt/format.h>

#include <algorithm>

namespace stagecoach::scenario {
namespace {

// UINT64_MAX breaks whatever rule asks for a fact that is not there.
uint64_t NumberOf(std::initializer_list<TraceFact> facts, std::string_view key) {
  const auto* number = FindFact<uint64_t>(facts, key);
  return number != nullptr ? *number : UINT64_MAX;
}

std::string_view WordOf(std::initializer_list<TraceFact> facts, std::string_view key) {
  const auto* word = FindFact<std::string_view>(facts, key);
  return word != nullptr ? *word : std::string_view();
}

}  // namespace

void NicChecker::OnEvent(Instant now, std::string_view component, std::string_view event,
                         std::initializer_list<TraceFact> facts) {
  if (event == "stag.allocated" || event == "stag.freed") {
    return JudgeStag(now, component, event == "stag.allocated", NumberOf(facts, "index"));
  }
  // A host that starts again has a new NIC of the old name.
  if (event == "fabric.restored") {
    stags_.erase(std::string(component) + "-rnic");
    return;
  }
  if (event == "placement.kept" || event == "placement.done" || event == "record.placed") {
    return JudgePlacement(now, component, event, facts);
  }
  const bool send = event == "send.completed";
  if (!send && event != "receive.completed" && event != "qp.destroyed") return;
  auto found = queue_pairs_.find(component);
  if (found == queue_pairs_.end()) found = queue_pairs_.emplace(std::string(component), QueuePair()).first;
  QueuePair& qp = found->second;
  const auto object = [&](std::string_view rule, std::string_view what) {
    violations_->Add(now, rule, fmt::format("{}: {}", what, FormatTraceEvent(now, component, event, facts)));
  };
  if (event == "qp.destroyed") {
    const uint64_t posted = NumberOf(facts, "receives_posted");
    if (posted != qp.next_receive + NumberOf(facts, "receives_outstanding")) object("completion.lost", "Receives");
    queue_pairs_.erase(found);
    return;
  }
  const uint64_t number = NumberOf(facts, "number");
  if (send) {
    // Work that asked for no completion leaves gaps.
    if (number < qp.next_send || number == UINT64_MAX) object("completion.order", "sends");
    qp.next_send = number + 1;
  } else {
    if (number != qp.next_receive) object("completion.order", "Receives");
    qp.next_receive = number + 1;
  }
}

void NicChecker::JudgePlacement(Instant now, std::string_view component, std::string_view event,
                                std::initializer_list<TraceFact> facts) {
  auto found = queue_pairs_.find(component);
  if (event == "placement.kept") {
    if (found == queue_pairs_.end()) found = queue_pairs_.emplace(std::string(component), QueuePair()).first;
    ++found->second.kept;
  } else if (found == queue_pairs_.end()) {
    return;
  } else if (event == "placement.done") {
    found->second.kept -= std::min(found->second.kept, NumberOf(facts, "writes"));
  } else if (found->second.kept > 0 && WordOf(facts, "opcode") != "Write") {
    violations_->Add(now, "placement.order",
                     fmt::format("{} Writes are not in place: {}", found->second.kept,
                                 FormatTraceEvent(now, component, event, facts)));
  }
}

void NicChecker::JudgeStag(Instant now, std::string_view component, bool allocated, uint64_t index) {
  constexpr uint64_t kQuarantine = 65536;
  auto found = stags_.find(component);
  if (found == stags_.end()) found = stags_.emplace(std::string(component), Stags()).first;
  Stags& stags = found->second;
  if (!allocated) {
    for (const auto& [name, qp] : queue_pairs_) {
      if (qp.kept == 0 || !name.starts_with(component)) continue;
      violations_->Add(
          now, "placement.order",
          fmt::format("{}: memory is deregistered, and {} Writes of {} are not in place", component, qp.kept, name));
    }
    stags.freed_as[index] = stags.freed++;
    return;
  }
  const auto before = stags.freed_as.find(index);
  if (before == stags.freed_as.end()) return;
  if (stags.freed - before->second <= kQuarantine) {
    violations_->Add(now, "stag.quarantine",
                     fmt::format("{}: STag index {} is used again too early", component, index));
  }
  stags.freed_as.erase(before);
}

void NicChecker::Finish(Instant now) {
  for (const auto& [component, qp] : queue_pairs_) {
    violations_->Add(now, "completion.lost", fmt::format("{} was never destroyed", component));
  }
}

}  // namespace stagecoach::scenario
