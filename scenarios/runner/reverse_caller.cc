#include "scenarios/runner/reverse_caller.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace stagecoach::scenario {
namespace {

using rpcrdma::CallError;
using rpcrdma::XdrWriter;

// Bit 63 tells these calls from those of clients; then whom they go to, as in those.
constexpr uint64_t kReverse = uint64_t{1} << 63;
constexpr uint32_t kCallsMax = 64;

}  // namespace

ReverseCaller::ReverseCaller(Stage& stage, const std::string& host, rpcrdma::Server& server, uint32_t* next,
                             Tally* tally)
    : stage_(stage), host_(host), server_(server), next_(next), tally_(tally), cold_(&stage.violations()) {}

ReverseCaller::~ReverseCaller() {
  *alive_ = false;
  for (auto& [number, pending] : pending_) {
    if (pending.cancel_timer != 0) stage_.loop(host_).Cancel(pending.cancel_timer);
    ++tally_->disturbed;
    pending.Retire(stage_, Who(), &cold_);
  }
  cold_.CheckAll(stage_.Now());
}

ReverseCaller::Peer* ReverseCaller::PeerOf(uint64_t call) {
  const auto index = static_cast<uint32_t>((call >> 32) - 1);
  const Client& spec = stage_.scenario().client(static_cast<int>(index));
  if (spec.reverse_call_size() == 0) return nullptr;
  Peer& peer = peers_[index];
  if (peer.spec == nullptr) {
    peer.spec = &spec;
    peer.number = uint64_t{index} + 1;
    rpcrdma::ReverseClientOptions options;
    options.calls_max = kCallsMax;
    options.wait_for_return = spec.wait_for_return();
    peer.calls = std::make_unique<rpcrdma::ReverseClient>(server_, options);
  }
  return &peer;
}

void ReverseCaller::OnCall(uint64_t call, rpcrdma::ClientId connection) {
  Peer* const peer = PeerOf(call);
  if (peer == nullptr || stopping_) return;
  if (peer->connection != connection && peer->calls->Bind(connection)) {
    peer->connection = connection;
    peer->since = stage_.Now();
  }
  for (const Call& spec : peer->spec->reverse_call()) {
    for (uint32_t i = 0; i < spec.repeat(); ++i) Begin(*peer, spec);
  }
}

void ReverseCaller::OnClientGone(rpcrdma::ClientId connection) {
  for (auto& [index, peer] : peers_) {
    if (peer.connection != connection) continue;
    peer.connection = 0;
    peer.last_gone = stage_.Now();
  }
}

void ReverseCaller::Begin(Peer& peer, const Call& spec) {
  const uint64_t number = kReverse | peer.number << 32 | (*next_)++;
  ++tally_->calls;
  Pending& pending = pending_.try_emplace(number, number, spec, /*lends=*/false).first->second;
  pending.peer = &peer;
  pending.started = stage_.Now();
  pending.since = std::min(peer.since, stage_.Now());
  pending.bound = peer.calls->bound();
  pending.crowded = peer.under_way >= kCallsMax;
  ++peer.under_way;
  // All that are under way may be in its way, one after the other, and so may be the client's own calls.
  Client both = *peer.spec;
  both.mutable_call()->MergeFrom(both.reverse_call());
  both.set_concurrency(2 * (peer.under_way + peer.spec->concurrency()));
  pending.patience = stage_.Patience(both);
  stage_.executions()[number].repeatable = peer.spec->wait_for_return();
  rpcrdma::ReverseCallOptions options;
  options.reply_bytes_max = pending.WholeReply();
  options.timeout = Duration(spec.timeout_ns());
  pending.id = peer.calls->Call(
      pending.procedure(), [&](XdrWriter& args) { pending.Write(args); }, options,
      [this, number, alive = alive_](Outcome outcome) {
        if (*alive) OnOutcome(number, std::move(outcome));
      });
  if (spec.cancel_ns() == 0) return;
  pending.cancel_timer = stage_.loop(host_).At(stage_.Now() + Duration(spec.cancel_ns()), [this, number] {
    const auto found = pending_.find(number);
    if (found == pending_.end()) return;
    found->second.cancel_timer = 0;
    found->second.cancelled = true;
    found->second.peer->calls->Cancel(found->second.id);
  });
}

void ReverseCaller::OnOutcome(uint64_t number, Outcome outcome) {
  const auto found = pending_.find(number);
  if (found == pending_.end()) {
    return stage_.Violate("call.completed_twice", fmt::format("reverse call {:#x} completes again", number));
  }
  Pending pending = std::move(found->second);
  pending_.erase(found);
  --pending.peer->under_way;
  if (pending.cancel_timer != 0) stage_.loop(host_).Cancel(pending.cancel_timer);
  if (outcome) {
    ++tally_->answered;
    pending.CheckReply(stage_, Who(), *outcome);
  } else {
    const std::string objection = Judge(pending, outcome.error());
    if (!objection.empty()) {
      stage_.Violate("call.failed", fmt::format("{}: {}: {}", pending.Label(Who(), "reverse call"),
                                                outcome.error().ToString(), objection));
    }
    if (!outcome.error().sent && stage_.executions()[number].times > 0) {
      stage_.Violate("call.executed_unsent", pending.Label(Who(), "reverse call") + ": was not sent, and was executed");
    }
  }
  pending.Retire(stage_, Who(), &cold_);
}

std::string ReverseCaller::Judge(const Pending& pending, const CallError& error) {
  const Client& client = *pending.peer->spec;
  const Call& call = pending.spec;
  const auto refused = [&](bool may) -> std::string {
    ++tally_->refused;
    return may ? "" : "nothing in the scenario explains it";
  };
  const bool late = stage_.Now() - pending.started >= Duration(call.timeout_ns());
  // Its client was away for a time, or is.
  const bool away = !pending.bound || (pending.peer->last_gone && *pending.peer->last_gone >= pending.started) ||
                    pending.peer->connection == 0;
  switch (error.kind) {
    case Kind::kTooLarge:
      return refused(TooLargeForReverse(client, ServiceOf(stage_.scenario(), client), call));
    case Kind::kNotServed:
      return refused(client.reverse_credits() == 0);
    case Kind::kMemory:
      return refused(client.reverse_chunks() && stage_.FailedRegistration(host_, pending.started));
    case Kind::kTransport:
      return refused(client.reverse_chunks() && stage_.FailedRegistration(client.host(), pending.started));
    case Kind::kQueueFull:
      return refused(pending.crowded);
    case Kind::kNotConnected:
      return refused(client.wait_for_return() ? late && away : !pending.bound);
    case Kind::kNoCredit:
    case Kind::kTimedOut:
      return refused(late && (away || Duration(call.timeout_ns()) < pending.patience ||
                              stage_.Disturbed(client.host(), host_, pending.since)));
    case Kind::kConnectionLost:
      ++tally_->disturbed;
      return !client.wait_for_return() || stopping_ ? "" : "it was to wait for its client";
    case Kind::kCancelled:
      return refused(pending.cancelled);
    case Kind::kClosed:
      return refused(stopping_);
    default:
      return refused(false);
  }
}

void ReverseCaller::CheckAllTold() {
  for (const auto& [number, pending] : pending_) {
    stage_.Violate("call.ended_untold",
                   pending.Label(Who(), "reverse call") + ": the server has stopped, and the call was told nothing");
  }
}

std::string ReverseCaller::Describe() const {
  std::string text;
  for (const auto& [number, pending] : pending_) {
    text += fmt::format("  reverse call {:#x} to {} since {} ns{}\n", number, pending.peer->spec->name(),
                        pending.started.time_since_epoch().count(), pending.cancelled ? ", cancelled" : "");
  }
  return text;
}

}  // namespace stagecoach::scenario
