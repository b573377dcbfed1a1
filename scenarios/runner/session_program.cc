#include "scenarios/runner/session_program.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace stagecoach::scenario {
namespace {

using rpcrdma::CallError;
using rpcrdma::XdrWriter;

// Connections that are made anew for a call, each after a time that doubles.
constexpr int64_t kReconnects = 8;

CallError::Kind KindOf(std::string_view word) {
  for (int kind = 0; kind <= static_cast<int>(CallError::Kind::kDenied); ++kind) {
    if (ToString(static_cast<CallError::Kind>(kind)) == word) return static_cast<CallError::Kind>(kind);
  }
  return CallError::Kind::kDenied;
}

}  // namespace

SessionProgram::SessionProgram(Stage& stage, const Client& spec, uint32_t index)
    // The first call connects.
    : CallerProgram(stage, spec, "session", index, 2 * stage.Patience(spec) + stage.WaitForRoom(spec.server())) {}

SessionProgram::~SessionProgram() {
  Kill();
}

std::string SessionProgram::Describe() const {
  const std::string text = DescribeCalls("");
  return session_ != nullptr ? text + session_->DebugString() : text;
}

// --- Sessions, and their connections ---

void SessionProgram::Open() {
  if (session_ != nullptr || stopping() || hopeless()) return;
  name_ = fmt::format("{}/session-{}", spec_.name(), ++sessions_);
  rpcrdma::SessionOptions options;
  options.client = MakeOptions(name_);
  options.client.trace = this;
  options.connections = spec_.connections();
  options.reconnect.delay_first = Duration(spec_.reconnect_ns());
  options.reconnect.delay_max = Duration(spec_.reconnect_max_ns());
  options.keepalive.interval = Duration(spec_.keepalive_ns());
  options.keepalive.timeout = Duration(spec_.keepalive_timeout_ns());
  options.keepalive.program = kModelProgram;
  options.keepalive.version = kModelVersion;
  options.idle_timeout = Duration(spec_.idle_ns());
  options.seed = std::max<uint64_t>(stage_.Luck("session/" + name_).Next(), 1);
  session_ =
      std::make_unique<rpcrdma::Session>(stage_.loop(host()), stage_.AddressOf(spec_.server()), kServicePort, options);
  session_->Register(kModelBinding);
  Pump();
}

void SessionProgram::Close(std::function<void()> done) {
  session_->Close(std::move(done));
}

// Nothing that it says from now on is about a connection of ours.
void SessionProgram::Destroy() {
  session_.reset();
  connections_.clear();
}

// The server will never be there again.
void SessionProgram::GiveUp() {
  if (hopeless()) return;
  NoteHopeless();
  calls_.NoteClosed();
  DestroyAmidst();
}

void SessionProgram::OnEvent(Instant now, std::string_view component, std::string_view event,
                             std::initializer_list<TraceFact> facts) {
  Trace(stage_.trace(), now, component, event, facts);
  if (component != name_) return;
  const auto* number = FindFact<uint64_t>(facts, "connection");
  const auto* why = FindFact<std::string_view>(facts, "why");
  if (number == nullptr) return;
  if (event == "session.connecting") {
    ++tally_.connections;
    connections_[*number].since = now;
    return;
  }
  const auto found = connections_.find(*number);
  if (found == connections_.end()) return;
  if (event == "session.connected") {
    found->second.established = now;
  } else if (event == "session.keepalive_unanswered") {
    found->second.keepalive_unanswered = true;
  } else if (event == "session.idle") {
    connections_.erase(found);
  } else if (event == "session.attempt_failed" && why != nullptr) {
    const Connection connection = connections_.extract(found).mapped();
    OnAttemptFailed(connection, *why);
  } else if (event == "session.lost" && why != nullptr) {
    const Connection connection = connections_.extract(found).mapped();
    OnLost(*number, connection, *why);
  }
}

void SessionProgram::OnAttemptFailed(const Connection& connection, std::string_view why) {
  NoteLoss();
  if (stage_.IsGone(spec_.server())) {
    // Not amidst what the session does.
    Post([this] { GiveUp(); });
    return;
  }
  if (MayFailToConnect(connection.since, KindOf(why))) return;
  stage_.Violate("connection.refused", fmt::format("{}: {}: nothing in the scenario explains it", who_, why));
}

void SessionProgram::OnLost(uint64_t number, const Connection& connection, std::string_view why) {
  NoteLoss();
  if (MayBeLost(number, connection)) return;
  stage_.Violate("connection.lost", fmt::format("{}, connection {}: {}", who_, number, why));
}

// --- Probes ---

void SessionProgram::Probe(bool warm) {
  if (BeginProbes(warm, spec_.queued_calls_max())) NextProbe();
}

void SessionProgram::NextProbe() {
  if (const auto step = probes_.BeginStep()) return Begin(*step);
  probes_.End();
}

// --- Calls ---

Instant SessionProgram::OldestConnection() const {
  Instant oldest = stage_.Now();
  for (const auto& [number, connection] : connections_) oldest = std::min(oldest, connection.since);
  return oldest;
}

rpcrdma::CallId SessionProgram::Send(CallUnderWay& call, rpcrdma::Client::CallHandler handler) {
  call.since = OldestConnection();
  call.losses = losses_;
  stage_.executions()[call.number].repeatable = call.spec.retransmit() || MayBeOfVersion2(spec_, service_);
  const auto args = [&](XdrWriter& out) { call.Write(out); };
  return session_->Call(call.procedure(), args, call.Options(), std::move(handler));
}

void SessionProgram::Cancel(const CallUnderWay& call) {
  if (session_ == nullptr) return;
  cancelled_.push_back({.when = stage_.Now(), .due = call.due()});
  session_->Cancel(call.id);
}

void SessionProgram::OnOver(const CallUnderWay& call, const Outcome& outcome) {
  if (call.probe) {
    if (call.closed) {
      probes_.End();
    } else if (probes_.EndCall(call, outcome) != ProbeRound::Then::kWait) {
      NextProbe();
    }
    if (probes_.under_way()) return;
  }
  Pump();
}

// --- Which failures may be ---

// As ClientProgram's: see there.
bool SessionProgram::MayBeLost(uint64_t number, const Connection& connection) const {
  const Evidence::End end = stage_.evidence().Of(spec_.host(), fmt::format("{}/{}", name_, number));
  // Everybody stops at the same moment, and on InfiniBand a client's last words take a round trip.
  if (stopping() && stage_.IsInfiniband(spec_.server()) && !end.IsFault()) return true;
  if (!end.IsFault() && stage_.Severed(spec_.host(), spec_.server(), connection.since, connection.established)) {
    return true;
  }
  const auto cancelled = static_cast<uint64_t>(std::count_if(
      cancelled_.begin(), cancelled_.end(), [&](const Cancelled& call) { return call.when >= connection.since; }));
  if (end.terminated && cancelled > end.cancelled_replies) return true;
  if (end.work_failed && end.window_invalidated && cancelled > 0) return true;
  const bool disturbed = stage_.Disturbed(spec_.host(), spec_.server(), connection.since);
  if (end.call_timed_out) {
    return (last_timeout_ && *last_timeout_ >= connection.since) || calls_.AnyLate() ||
           std::any_of(cancelled_.begin(), cancelled_.end(), [&](const Cancelled& call) {
             return call.when >= connection.since && call.due && *call.due <= stage_.Now();
           });
  }
  if (MayBeLostUnread(connection.since) || MayBeLostByReverseCall(connection.since)) return true;
  if (connection.keepalive_unanswered) return disturbed || Duration(spec_.keepalive_timeout_ns()) < patience_;
  const Instant heard = disturbed ? connection.since : std::max(connection.since, stage_.Now() - patience_);
  return stage_.FailedRegistration(spec_.server(), heard);
}

Duration SessionProgram::LongestReconnect() const {
  return kReconnects * Duration(spec_.reconnect_max_ns());
}

bool SessionProgram::ReconnectsSince(Instant started) const {
  return last_loss_ && *last_loss_ + LongestReconnect() + patience_ >= started;
}

// There is no connection while no memory for one can be registered.
bool SessionProgram::IsKeptFromConnecting() const {
  const Instant lately = stage_.Now() - LongestReconnect() - patience_;
  return stage_.FailedRegistration(spec_.host(), lately) || stage_.FailedRegistration(spec_.server(), lately);
}

std::string SessionProgram::Judge(const CallUnderWay& call, const CallError& error) {
  if (!error.sent) calls_.NoteUnsent(call);
  switch (error.kind) {
    case Kind::kNotConnected:
    case Kind::kNoCredit:
    case Kind::kTimedOut: {
      if (error.sent) last_timeout_ = stage_.Now();
      if (!call.IsLate(stage_.Now())) return Refused(false);
      // Word of what has ended a connection may be late, and those that follow wait ever longer.
      if (stage_.Disturbed(spec_.host(), spec_.server(), call.since)) return Refused(true);
      if (!error.sent && IsKeptFromConnecting()) return Refused(true);
      if (call.probe) return "a probe must be answered";
      return Refused(Duration(call.spec.timeout_ns()) <
                     (ReconnectsSince(call.started) ? patience_ + LongestReconnect() : patience_));
    }
    case Kind::kConnectionLost:
      ++tally_.disturbed;
      // The end of a connection is told, and judged, behind that of the calls that were on it.
      if (!call.spec.retransmit()) return "";
      return losses_ + 1 - call.losses >= rpcrdma::ReconnectOptions().transmissions_max ? "" : "it may be sent again";
    case Kind::kRpc:
      // The server may have executed it for a connection that is gone, and says that it has not kept the reply.
      if (error.accept_stat == rpcrdma::AcceptStat::kSystemErr && losses_ > call.losses &&
          ReplyIsNotKept(service_, call.spec)) {
        return Refused(true);
      }
      return JudgeByItself(call, error);
    default:
      return JudgeByItself(call, error);
  }
}

}  // namespace stagecoach::scenario
