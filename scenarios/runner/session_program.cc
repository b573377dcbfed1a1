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
    : stage_(stage),
      spec_(spec),
      service_(ServiceOf(stage.scenario(), spec)),
      // The first call connects.
      patience_(2 * stage.Patience(spec)),
      next_number_((uint64_t{index} + 1) << 32),
      cold_(&stage.violations()) {
  for (const Call& call : spec.call()) script_.insert(script_.end(), call.repeat(), &call);
}

SessionProgram::~SessionProgram() {
  Kill();
  cold_.CheckAll(stage_.Now());
  for (const uint64_t number : unsent_) {
    if (stage_.executions()[number].times == 0) continue;
    stage_.Violate("call.executed_unsent",
                   fmt::format("{}, call {:#x}: was never sent, and was executed", Who(), number));
  }
}

void SessionProgram::Start() {
  ArmEnds();
  if (started_) return Open();
  started_ = true;
  last_start_ = stage_.Now();
  start_timer_ = stage_.loop(host()).At(stage_.Now() + Duration(spec_.start_ns()), [this] {
    start_timer_ = 0;
    Open();
  });
}

void SessionProgram::Kill() {
  ++incarnation_;
  EventLoop& loop = stage_.loop(host());
  for (EventLoop::TimerId* timer : {&start_timer_, &pause_timer_, &close_timer_, &destroy_timer_}) {
    if (*timer != 0) loop.Cancel(*timer);
    *timer = 0;
  }
  Destroy();
  closing_ = false;
  for (auto& [number, pending] : pending_) {
    if (pending.cancel_timer != 0) loop.Cancel(pending.cancel_timer);
    ++tally_.disturbed;
    pending.Retire(stage_, Who(), &cold_);
  }
  pending_.clear();
  reverse_.reset();
}

bool SessionProgram::Idle() const {
  if (hopeless_) return true;
  if (stopping_) return session_ == nullptr;
  return started_ && next_ == script_.size() && pending_.empty() && start_timer_ == 0 && !probing_ && !closing_ &&
         close_timer_ == 0 && destroy_timer_ == 0;
}

void SessionProgram::Stop() {
  stopping_ = true;
  cold_.CheckAll(stage_.Now());
  if (session_ == nullptr) return;
  session_->Close([this, incarnation = incarnation_] {
    // Not here: the session would be destroyed by its own handler.
    stage_.loop(host()).Post([this, incarnation] {
      if (incarnation == incarnation_) Destroy();
    });
  });
}

std::string SessionProgram::Describe() const {
  std::string text = fmt::format("session {} on {}: {} of {} calls started, {} under way\n", spec_.name(), spec_.host(),
                                 next_, script_.size(), pending_.size());
  for (const auto& [number, pending] : pending_) {
    text += fmt::format("  call {:#x} since {} ns: {} bytes of argument, {} of result{}\n", number,
                        pending.started.time_since_epoch().count(), pending.spec.argument_bytes(),
                        pending.spec.result_bytes(), pending.cancelled ? ", cancelled" : "");
  }
  if (session_ != nullptr) text += session_->DebugString();
  return text;
}

// --- Sessions, and their connections ---

void SessionProgram::Open() {
  if (session_ != nullptr || stopping_ || hopeless_) return;
  name_ = fmt::format("{}/session-{}", spec_.name(), ++sessions_);
  rpcrdma::SessionOptions options;
  options.client.credits = spec_.credits();
  options.client.inline_threshold = spec_.inline_threshold();
  options.client.incoming_reads = static_cast<uint8_t>(spec_.incoming_reads());
  options.client.queued_calls_max = spec_.queued_calls_max();
  options.client.message_bytes_max = spec_.message_bytes_max();
  options.client.memory_windows = spec_.memory_windows();
  options.client.trace = this;
  options.client.name = name_;
  options.client.first_xid = stage_.FirstModelXid(name_);
  options.connections = spec_.connections();
  options.reconnect.delay_first = Duration(spec_.reconnect_ns());
  options.reconnect.delay_max = Duration(spec_.reconnect_max_ns());
  options.keepalive.interval = Duration(spec_.keepalive_ns());
  options.keepalive.timeout = Duration(spec_.keepalive_timeout_ns());
  options.keepalive.program = kModelProgram;
  options.keepalive.version = kModelVersion;
  options.idle_timeout = Duration(spec_.idle_ns());
  options.seed = std::max<uint64_t>(stage_.Luck("session/" + name_).Next(), 1);
  ServeReverse(stage_, spec_, &reverse_, &options.client);
  session_ =
      std::make_unique<rpcrdma::Session>(stage_.loop(host()), stage_.AddressOf(spec_.server()), kServicePort, options);
  session_->Register(kModelBinding);
  Pump();
}

// Nothing that it says from now on is about a connection of ours.
void SessionProgram::Destroy() {
  inside_session_ = true;
  session_.reset();
  inside_session_ = false;
  connections_.clear();
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
    stage_.loop(host()).Post([this, incarnation = incarnation_] {
      if (incarnation == incarnation_) GiveUp();
    });
    return;
  }
  if (stage_.MayFailToConnect(spec_.host(), spec_.server(), connection.since, KindOf(why), &connects_)) return;
  stage_.Violate("connection.refused", fmt::format("{}: {}: nothing in the scenario explains it", Who(), why));
}

void SessionProgram::OnLost(uint64_t number, const Connection& connection, std::string_view why) {
  NoteLoss();
  if (MayBeLost(number, connection)) return;
  stage_.Violate("connection.lost", fmt::format("{}, connection {}: {}", Who(), number, why));
}

void SessionProgram::ArmEnds() {
  const auto arm = [this](EventLoop::TimerId* timer, uint64_t when, void (SessionProgram::*end)()) {
    // What would have been while the host was down is not made up for.
    if (when == 0 || Instant(Duration(when)) <= stage_.Now()) return;
    *timer = stage_.loop(host()).At(Instant(Duration(when)), [this, timer, end] {
      *timer = 0;
      if (session_ == nullptr || closing_ || stopping_) return;
      for (auto& [number, pending] : pending_) pending.closed = true;
      (this->*end)();
    });
  };
  arm(&close_timer_, spec_.close_ns(), &SessionProgram::CloseAmidst);
  arm(&destroy_timer_, spec_.destroy_ns(), &SessionProgram::DestroyAmidst);
}

void SessionProgram::CloseAmidst() {
  closing_ = true;
  session_->Close([this, incarnation = incarnation_] {
    if (incarnation != incarnation_) return;
    CheckAllToldOfEnd("closed");
    // Not here: the session would be destroyed by its own handler.
    stage_.loop(host()).Post([this, incarnation] {
      if (incarnation != incarnation_) return;
      Destroy();
      closing_ = false;
      Open();
    });
  });
}

void SessionProgram::DestroyAmidst() {
  Destroy();
  closing_ = true;
  // Behind what the session had to say yet.
  stage_.loop(host()).Post([this, incarnation = incarnation_] {
    if (incarnation != incarnation_) return;
    CheckAllToldOfEnd("destroyed");
    closing_ = false;
    Open();
  });
}

// The server will never be there again.
void SessionProgram::GiveUp() {
  if (hopeless_) return;
  hopeless_ = true;
  for (auto& [number, pending] : pending_) pending.closed = true;
  Destroy();
}

// [session.h] Every call has been told by now.
void SessionProgram::CheckAllToldOfEnd(const char* how) {
  for (auto entry = pending_.begin(); entry != pending_.end();) {
    Pending& pending = entry->second;
    if (!pending.closed) {
      ++entry;
      continue;
    }
    stage_.Violate("call.ended_untold", fmt::format("{}: the session is {}, and the call was told nothing",
                                                    pending.Label(Who(), "call"), how));
    if (pending.cancel_timer != 0) stage_.loop(host()).Cancel(pending.cancel_timer);
    entry = pending_.erase(entry);
  }
}

// --- Probes ---

void SessionProgram::Probe(bool warm) {
  cold_.CheckAll(stage_.Now());
  if (hopeless_) return;
  probing_ = true;
  probe_step_ = 0;
  probes_together_ = warm ? kProbesTogetherAtFirst : kProbesTogether;
  failed_probes_ = 0;
  // Each round is the same work.
  next_number_ += (kKindsOfCalls - next_number_ % kKindsOfCalls) % kKindsOfCalls;
  NextProbe();
}

// A round: calls one after the other, several at a time, and one that is cancelled.
void SessionProgram::NextProbe() {
  probes_open_ = 0;
  probe_step_failed_ = false;
  if (probe_step_ < kProbesInRow) {
    StartProbes(1, ProbeCall(stage_, spec_));
  } else if (probe_step_ == kProbesInRow) {
    StartProbes(std::min(probes_together_, spec_.queued_calls_max()), ProbeCall(stage_, spec_));
  } else if (probe_step_ == kProbesInRow + 1) {
    StartProbes(1, CancelledProbe(stage_, spec_));
  } else {
    probing_ = false;
  }
}

void SessionProgram::StartProbes(uint32_t count, const Call& call) {
  probes_open_ = count;
  for (uint32_t i = 0; i < count; ++i) Begin(call, true);
}

// The step's calls have ended: on to the next one, or again.
void SessionProgram::EndProbe(bool failed, const std::string& how) {
  probe_step_failed_ = probe_step_failed_ || failed;
  if (probes_open_ > 0 && --probes_open_ > 0) return;
  if (!probe_step_failed_) {
    ++probe_step_;
    return NextProbe();
  }
  if (++failed_probes_ < kFailedProbesMax) return NextProbe();
  probing_ = false;
  stage_.Violate("liveness.probe", fmt::format("{}: {} probes failed, the last with: {}", Who(), failed_probes_, how));
}

// --- Calls ---

void SessionProgram::Pump() {
  while (session_ != nullptr && !closing_ && next_ < script_.size() && pending_.size() < spec_.concurrency()) {
    const Call& call = *script_[next_];
    const Instant due = last_start_ + Duration(call.pause_ns());
    if (due > stage_.Now()) {
      if (pause_timer_ != 0) return;
      pause_timer_ = stage_.loop(host()).At(due, [this] {
        pause_timer_ = 0;
        Pump();
      });
      return;
    }
    ++next_;
    Begin(call, false);
  }
}

Instant SessionProgram::OldestConnection() const {
  Instant oldest = stage_.Now();
  for (const auto& [number, connection] : connections_) oldest = std::min(oldest, connection.since);
  return oldest;
}

void SessionProgram::Begin(const Call& spec, bool probe) {
  const uint64_t number = next_number_++;
  last_start_ = stage_.Now();
  // A probe that is cancelled is no call that anybody wants answered.
  if (!probe || spec.cancel_ns() == 0) ++tally_.calls;
  Pending& pending = pending_.try_emplace(number, number, spec).first->second;
  pending.started = stage_.Now();
  pending.since = OldestConnection();
  pending.losses = losses_;
  pending.probe = probe;
  stage_.executions()[number].repeatable = spec.retransmit();
  pending.id = session_->Call(
      pending.procedure(), [&](XdrWriter& args) { pending.Write(args); }, pending.Options(),
      [this, number, incarnation = incarnation_](Outcome outcome) {
        if (incarnation == incarnation_) OnOutcome(number, std::move(outcome));
      });
  if (spec.cancel_ns() == 0) return;
  pending.cancel_timer = stage_.loop(host()).At(stage_.Now() + Duration(spec.cancel_ns()), [this, number] {
    const auto found = pending_.find(number);
    if (found == pending_.end()) return;
    found->second.cancel_timer = 0;
    if (found->second.closed || session_ == nullptr || found->second.id == 0) return;
    found->second.cancelled = true;
    Cancelled cancelled{.when = stage_.Now(), .due = std::nullopt};
    const Pending& call = found->second;
    if (call.spec.timeout_ns() != 0) cancelled.due = call.started + Duration(call.spec.timeout_ns());
    cancelled_.push_back(cancelled);
    session_->Cancel(found->second.id);
  });
}

void SessionProgram::OnOutcome(uint64_t number, Outcome outcome) {
  if (inside_session_) {
    stage_.Violate("call.ended_inside", fmt::format("call {:#x} ends inside ~Session", number));
  }
  const auto found = pending_.find(number);
  if (found == pending_.end()) {
    return stage_.Violate("call.completed_twice", fmt::format("call {:#x} completes again", number));
  }
  Pending pending = std::move(found->second);
  pending_.erase(found);
  if (pending.cancel_timer != 0) stage_.loop(host()).Cancel(pending.cancel_timer);
  if (outcome) {
    ++tally_.answered;
    pending.CheckReply(stage_, Who(), *outcome);
  } else {
    const CallError& error = outcome.error();
    if (!error.sent) unsent_.push_back(number);
    if (!error.sent && !pending.ResultUntouched()) {
      stage_.Violate("memory.guard", pending.Label(Who(), "result") + ": was written to, and the call was not sent");
    }
    const std::string objection = Judge(pending, error);
    if (!objection.empty()) {
      stage_.Violate(pending.probe ? "liveness.probe" : "call.failed",
                     fmt::format("{}: {}: {}", pending.Label(Who(), "call"), error.ToString(), objection));
    }
  }
  pending.Retire(stage_, Who(), &cold_);
  if (pending.probe) {
    if (pending.closed) {
      probing_ = false;
    } else {
      const bool expected = outcome || (pending.cancelled && outcome.error().kind == Kind::kCancelled);
      EndProbe(!expected, outcome ? "" : outcome.error().ToString());
    }
    if (probing_) return;
  }
  Pump();
}

// --- Which failures may be ---

bool SessionProgram::Late(const Pending& pending) const {
  return pending.spec.timeout_ns() != 0 && stage_.Now() - pending.started >= Duration(pending.spec.timeout_ns());
}

// As ClientProgram's: see there.
bool SessionProgram::MayBeLost(uint64_t number, const Connection& connection) const {
  const Evidence::End end = stage_.evidence().Of(spec_.host(), fmt::format("{}/{}", name_, number));
  // Everybody stops at the same moment, and on InfiniBand a client's last words take a round trip.
  if (stopping_ && stage_.IsInfiniband(spec_.server()) && !end.IsFault()) return true;
  if (!end.IsFault() && stage_.Severed(spec_.host(), spec_.server(), connection.since, connection.established)) {
    return true;
  }
  const auto cancelled = static_cast<uint64_t>(std::count_if(
      cancelled_.begin(), cancelled_.end(), [&](const Cancelled& call) { return call.when >= connection.since; }));
  if (end.terminated && cancelled > end.cancelled_replies) return true;
  if (end.work_failed && end.window_invalidated && cancelled > 0) return true;
  const bool disturbed = stage_.Disturbed(spec_.host(), spec_.server(), connection.since);
  if (end.call_timed_out) {
    return (last_timeout_ && *last_timeout_ >= connection.since) ||
           std::any_of(pending_.begin(), pending_.end(), [&](const auto& entry) { return Late(entry.second); }) ||
           std::any_of(cancelled_.begin(), cancelled_.end(), [&](const Cancelled& call) {
             return call.when >= connection.since && call.due && *call.due <= stage_.Now();
           });
  }
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

std::string SessionProgram::Judge(const Pending& pending, const CallError& error) {
  const Call& call = pending.spec;
  const auto refused = [&](bool may) -> std::string {
    ++tally_.refused;
    return may ? "" : "nothing in the scenario explains it";
  };
  switch (error.kind) {
    case Kind::kNotConnected:
    case Kind::kNoCredit:
    case Kind::kTimedOut: {
      if (error.sent) last_timeout_ = stage_.Now();
      if (!Late(pending)) return refused(false);
      // Word of what has ended a connection may be late, and those that follow wait ever longer.
      if (stage_.Disturbed(spec_.host(), spec_.server(), pending.since)) return refused(true);
      if (pending.probe) return "a probe must be answered";
      return refused(Duration(call.timeout_ns()) <
                     (ReconnectsSince(pending.started) ? patience_ + LongestReconnect() : patience_));
    }
    case Kind::kConnectionLost:
      ++tally_.disturbed;
      // The end of a connection is told, and judged, behind that of the calls that were on it.
      if (!call.retransmit()) return "";
      return losses_ + 1 - pending.losses >= rpcrdma::ReconnectOptions().transmissions_max ? ""
                                                                                           : "it may be sent again";
    case Kind::kCancelled:
      if (pending.probe && pending.cancelled) return "";
      return refused(pending.cancelled);
    case Kind::kQueueFull:
      return refused(spec_.concurrency() > spec_.queued_calls_max());
    case Kind::kTooLarge:
      return refused(TooLarge(stage_.scenario(), spec_, call));
    case Kind::kMemory:
      return refused(stage_.FailedRegistration(spec_.host(), pending.started));
    case Kind::kTransport:
      return refused(ReplyCannotTravel(call) || stage_.FailedRegistration(spec_.server(), pending.started) ||
                     ArgumentsExceedServer(service_, call));
    case Kind::kRpc:
      return refused(error.accept_stat == rpcrdma::AcceptStat::kSystemErr &&
                     (ServerMayLackMemory(stage_.scenario(), spec_, call) || ReplyExceedsServer(service_, call) ||
                      (losses_ > pending.losses && ReplyIsNotKept(service_, call))));
    case Kind::kClosed:
      return refused(pending.closed);
    default:
      return refused(false);
  }
}

}  // namespace stagecoach::scenario
