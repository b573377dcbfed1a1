#include "scenarios/runner/probe_round.h"

#include <fmt/format.h>

#include <algorithm>

namespace stagecoach::scenario {
namespace {

// Of a round: calls one after the other, and how many at a time.
constexpr uint32_t kInRow = 3;
constexpr uint32_t kTogether = 6;
constexpr uint32_t kTogetherAtFirst = 12;
// Those in a row, those that come together, and the one that is cancelled.
constexpr uint32_t kSteps = kInRow + 2;
// More than any injection that is over may still cost: a connect that began in a partition.
constexpr Duration kProbeTimeout = 20s;

// Something that each server answers, whatever its limits.
Call AnsweredProbe(const Stage& stage, const Client& client) {
  const Service& service = ServiceOf(stage.scenario(), client);
  const uint64_t most = std::min({service.call_bytes_max(), service.client_bytes_max(),
                                  uint64_t{service.message_bytes_max()}, uint64_t{client.message_bytes_max()}});
  auto bytes = static_cast<uint32_t>(std::clamp<uint64_t>(most / 4, 64, 6000));
  // A session's may have to be sent again, and answered from what the server has kept.
  if (client.session() && service.replay_entries_max() > 0) {
    bytes = static_cast<uint32_t>(std::min<uint64_t>(bytes, service.replay_reply_bytes_max() / 2));
  }
  Call call;
  call.set_argument_bytes(bytes);
  call.set_result_bytes(bytes + 1);
  call.set_timeout_ns(static_cast<uint64_t>(ProbeTimeout(stage, client, call).count()));
  return call;
}

// A call to be cancelled. It has no chunks: the server may take its time without meeting memory that is not there any
// more.
Call CancelledProbe(const Stage& stage, const Client& client) {
  Call call;
  call.set_service_ns(1'000'000);
  call.set_cancel_ns(1);
  call.set_timeout_ns(static_cast<uint64_t>(ProbeTimeout(stage, client, call).count()));
  return call;
}

}  // namespace

Duration ProbeTimeout(const Stage& stage, const Client& client, const Call& call) {
  Client probing = client;
  probing.clear_call();
  *probing.add_call() = call;
  probing.set_concurrency(kTogetherAtFirst);
  return std::max<Duration>(kProbeTimeout, stage.Patience(probing));
}

void ProbeRound::Begin(bool warm, uint32_t at_a_time_max) {
  under_way_ = true;
  at_a_time_ = std::min(warm ? kTogetherAtFirst : kTogether, at_a_time_max);
  step_ = 0;
  failed_ = 0;
}

std::optional<ProbeRound::Step> ProbeRound::BeginStep() {
  open_ = 0;
  step_failed_ = false;
  if (step_ >= kSteps) return std::nullopt;
  const bool together = step_ == kInRow;
  const bool cancelled = step_ == kInRow + 1;
  open_ = together ? at_a_time_ : 1;
  return Step{cancelled ? CancelledProbe(stage_, spec_) : AnsweredProbe(stage_, spec_), open_};
}

uint32_t ProbeRound::own_steps() const {
  return step_ < kSteps ? 0 : step_ - kSteps;
}

ProbeRound::Then ProbeRound::EndCall(const CallUnderWay& call,
                                     const Result<rpcrdma::Reply, rpcrdma::CallError>& outcome) {
  if (outcome) return EndCall(false, "");
  const bool expected = call.cancelled && outcome.error().kind == rpcrdma::CallError::Kind::kCancelled;
  return EndCall(!expected, outcome.error().ToString());
}

ProbeRound::Then ProbeRound::EndCall(bool failed, const std::string& how) {
  step_failed_ = step_failed_ || failed;
  if (open_ > 0 && --open_ > 0) return Then::kWait;
  if (!step_failed_) {
    ++step_;
    return Then::kNextStep;
  }
  if (++failed_ < kFailedProbesMax) return Then::kSameStep;
  under_way_ = false;
  stage_.Violate("liveness.probe", fmt::format("{}: {} probes failed, the last with: {}", who_, failed_, how));
  return Then::kWait;
}

}  // namespace stagecoach::scenario
