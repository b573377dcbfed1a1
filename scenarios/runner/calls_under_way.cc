#include "scenarios/runner/calls_under_way.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace stagecoach::scenario {
namespace {

// The service tells calls apart by what is left of their numbers when they are divided by this.
constexpr uint64_t kKindsOfCalls = 3;

}  // namespace

std::optional<Instant> CallUnderWay::due() const {
  if (spec.timeout_ns() == 0) return std::nullopt;
  return started + Duration(spec.timeout_ns());
}

bool CallUnderWay::IsLate(Instant now) const {
  const std::optional<Instant> at = due();
  return at && *at <= now;
}

CallsUnderWay::CallsUnderWay(Stage& stage, const std::string& host, const std::string& who, uint32_t index)
    : stage_(stage), host_(host), who_(who), next_number_((uint64_t{index} + 1) << 32), cold_(&stage.violations()) {}

CallsUnderWay::~CallsUnderWay() {
  CheckMemory();
  for (const uint64_t number : unsent_) {
    if (stage_.executions()[number].times == 0) continue;
    stage_.Violate("call.executed_unsent", fmt::format("{}, call {:#x}: was not sent, and was executed", who_, number));
  }
}

bool CallsUnderWay::AnyLate() const {
  return std::any_of(calls_.begin(), calls_.end(),
                     [&](const auto& entry) { return entry.second.IsLate(stage_.Now()); });
}

void CallsUnderWay::AlignNumbers() {
  next_number_ += (kKindsOfCalls - next_number_ % kKindsOfCalls) % kKindsOfCalls;
}

CallUnderWay& CallsUnderWay::Begin(const Call& spec, bool probe) {
  const uint64_t number = NewNumber();
  CallUnderWay& call = calls_.try_emplace(number, number, spec).first->second;
  call.started = stage_.Now();
  call.probe = probe;
  return call;
}

void CallsUnderWay::CancelInTime(CallUnderWay& call, std::function<void(const CallUnderWay&)> cancel) {
  if (call.spec.cancel_ns() == 0) return;
  const Instant when = stage_.Now() + Duration(call.spec.cancel_ns());
  call.cancel_timer = stage_.loop(host_).At(when, [this, number = call.number, cancel = std::move(cancel)] {
    const auto found = calls_.find(number);
    if (found == calls_.end()) return;
    CallUnderWay& due = found->second;
    due.cancel_timer = 0;
    if (due.closed) return;
    due.cancelled = true;
    if (due.id != 0) cancel(due);
  });
}

std::optional<CallUnderWay> CallsUnderWay::End(uint64_t number) {
  const auto found = calls_.find(number);
  if (found == calls_.end()) {
    stage_.Violate("call.completed_twice", fmt::format("call {:#x} completes again", number));
    return std::nullopt;
  }
  std::optional<CallUnderWay> call = std::move(found->second);
  calls_.erase(found);
  StopTimer(*call);
  return call;
}

void CallsUnderWay::NoteUnsent(const CallUnderWay& call) {
  unsent_.push_back(call.number);
  CheckResultUntouched(call);
}

void CallsUnderWay::CheckResultUntouched(const CallUnderWay& call) {
  if (call.ResultUntouched()) return;
  stage_.Violate("memory.guard", call.Label(who_, "result") + ": was written to, and the call failed");
}

void CallsUnderWay::Abandon() {
  for (auto& [number, call] : calls_) {
    StopTimer(call);
    Retire(call);
  }
  calls_.clear();
}

void CallsUnderWay::NoteClosed() {
  for (auto& [number, call] : calls_) call.closed = true;
}

void CallsUnderWay::CheckAllTold(const std::string& how) {
  for (auto entry = calls_.begin(); entry != calls_.end();) {
    CallUnderWay& call = entry->second;
    if (!call.closed) {
      ++entry;
      continue;
    }
    stage_.Violate("call.ended_untold",
                   fmt::format("{}: {}, and the call was told nothing", call.Label(who_, "call"), how));
    StopTimer(call);
    entry = calls_.erase(entry);
  }
}

std::string CallsUnderWay::Describe() const {
  std::string text;
  for (const auto& [number, call] : calls_) {
    text += fmt::format("  call {:#x} since {} ns: {} bytes of argument, {} of result{}\n", number,
                        call.started.time_since_epoch().count(), call.spec.argument_bytes(), call.spec.result_bytes(),
                        call.cancelled ? ", cancelled" : "");
  }
  return text;
}

void CallsUnderWay::StopTimer(CallUnderWay& call) {
  if (call.cancel_timer != 0) stage_.loop(host_).Cancel(std::exchange(call.cancel_timer, 0));
}

}  // namespace stagecoach::scenario
