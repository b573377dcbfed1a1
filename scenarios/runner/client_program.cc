#include "scenarios/runner/client_program.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace stagecoach::scenario {
namespace {

using rpcrdma::CallError;
using rpcrdma::CallOptions;
using rpcrdma::XdrWriter;

constexpr Duration kReconnectDelay = 2ms;
constexpr uint32_t kAttemptsMax = 2000;

}  // namespace

ClientProgram::ClientProgram(Stage& stage, const Client& spec, uint32_t index)
    : stage_(stage),
      spec_(spec),
      patience_(stage.Patience(spec)),
      service_(ServiceOf(stage.scenario(), spec)),
      next_number_((uint64_t{index} + 1) << 32),
      cold_(&stage.violations()) {
  for (const Call& call : spec.call()) script_.insert(script_.end(), call.repeat(), &call);
}

ClientProgram::~ClientProgram() {
  Kill();
  cold_.CheckAll(stage_.Now());
  CheckUnsent();
}

void ClientProgram::Start() {
  ArmEnds();
  if (started_) return Connect();
  started_ = true;
  last_start_ = stage_.Now();
  ConnectAfter(Duration(spec_.start_ns()));
}

void ClientProgram::Kill() {
  ++incarnation_;
  EventLoop& loop = stage_.loop(host());
  for (EventLoop::TimerId* timer : {&start_timer_, &pause_timer_, &close_timer_, &destroy_timer_}) {
    if (*timer != 0) loop.Cancel(*timer);
    *timer = 0;
  }
  Drop();
  another_.reset();
  for (auto& [number, pending] : pending_) {
    if (pending.cancel_timer != 0) loop.Cancel(pending.cancel_timer);
    ++tally_.disturbed;
    pending.Retire(stage_, Who(), &cold_);
  }
  pending_.clear();
  reverse_.reset();
}

bool ClientProgram::Idle() const {
  if (hopeless_) return true;
  if (stopping_) return client_ == nullptr;
  return started_ && next_ == script_.size() && pending_.empty() && !connecting_ && !probing_ && !closing_ &&
         close_timer_ == 0 && destroy_timer_ == 0;
}

void ClientProgram::Probe(bool warm) {
  cold_.CheckAll(stage_.Now());
  if (hopeless_) return;
  probing_ = true;
  probe_step_ = 0;
  probes_together_ = warm ? kProbesTogetherAtFirst : kProbesTogether;
  failed_probes_ = 0;
  attempts_ = 0;
  // Each round is the same work.
  next_number_ += (kKindsOfCalls - next_number_ % kKindsOfCalls) % kKindsOfCalls;
  if (connected_) return NextProbe();
  if (!connecting_) Connect();
}

// A round: calls one after the other, several at a time, one that is cancelled, and a second connection that ends by a
// call that times out.
void ClientProgram::NextProbe() {
  probes_open_ = 0;
  probe_step_failed_ = false;
  if (probe_step_ < kProbesInRow) {
    StartProbes(1, ProbeCall(stage_, spec_));
  } else if (probe_step_ == kProbesInRow) {
    StartProbes(LacksRoom() ? 1 : std::min(probes_together_, spec_.queued_calls_max()), ProbeCall(stage_, spec_));
  } else if (probe_step_ == kProbesInRow + 1) {
    StartProbes(1, CancelledProbe(stage_, spec_));
  } else if (probe_step_ == kProbesInRow + 2 && !LacksRoom()) {
    ProbeAnotherConnection();
  } else {
    probing_ = false;
    Pump();
    MakeRoom();
  }
}

void ClientProgram::StartProbes(uint32_t count, const Call& call) {
  probes_open_ = count;
  for (uint32_t i = 0; i < count; ++i) Begin(call, true);
}

// The step's calls have ended: on to the next one, or again, on a new connection if need be.
void ClientProgram::EndProbe(bool failed, const std::string& how) {
  probe_step_failed_ = probe_step_failed_ || failed;
  if (probes_open_ > 0 && --probes_open_ > 0) return;
  if (!probe_step_failed_) {
    ++probe_step_;
    return connected_ ? NextProbe() : Connect();
  }
  if (++failed_probes_ < kFailedProbesMax) return connected_ ? NextProbe() : ConnectAfter(kReconnectDelay);
  probing_ = false;
  stage_.Violate("liveness.probe",
                 fmt::format("client {}: {} probes failed, the last with: {}", spec_.name(), failed_probes_, how));
}

void ClientProgram::ProbeAnotherConnection() {
  rpcrdma::ClientOptions options;
  options.credits = spec_.credits();
  options.inline_threshold = spec_.inline_threshold();
  options.trace = stage_.trace();
  options.name = fmt::format("{}/another-{}", spec_.name(), ++others_);
  options.first_xid = stage_.FirstModelXid(options.name);
  ServeReverse(stage_, spec_, &reverse_, &options);
  another_ = std::make_unique<rpcrdma::Client>(stage_.loop(host()), options);
  another_->Register(kModelBinding);
  const auto end = [this](bool failed, std::string how) {
    // Not in a handler of the client that goes.
    stage_.loop(host()).Post([this, incarnation = incarnation_, failed, how = std::move(how)] {
      if (incarnation != incarnation_) return;
      another_.reset();
      unsent_probes_ = 0;
      if (failed) stage_.Violate("liveness.probe", fmt::format("client {}, another connection: {}", spec_.name(), how));
      EndProbe(failed, how);
    });
  };
  const auto call = [this](uint64_t service_ns, Duration timeout, std::function<void(Outcome)> then) {
    CallOptions options;
    options.timeout = timeout;
    const uint64_t number = next_number_++;
    another_->Call(
        {kModelProgram, kModelVersion, kModelTransform},
        [&](XdrWriter& args) {
          args.U64(number);
          args.U64(service_ns);
          args.U32(0);
          args.U32(0);
          args.Opaque({});
          args.EligibleOpaque({});
        },
        options, [then = std::move(then)](Outcome outcome) { then(std::move(outcome)); });
  };
  const auto again = [this] {
    stage_.loop(host()).Post([this, incarnation = incarnation_] {
      if (incarnation == incarnation_) ProbeAnotherConnection();
    });
  };
  another_->Connect(
      stage_.AddressOf(spec_.server()), kServicePort,
      [this, incarnation = incarnation_, end, call, again](Result<void, CallError> connected) {
        if (incarnation != incarnation_) return;
        if (!connected) return end(true, connected.error().ToString());
        call(0, ProbeTimeout(stage_, spec_, Call()), [this, incarnation, end, call, again](Outcome outcome) {
          if (incarnation != incarnation_) return;
          if (!outcome) return end(true, outcome.error().ToString());
          // Which is answered when nobody waits for it any more.
          call(200'000'000, 50ms, [this, incarnation, end, again](Outcome outcome) {
            if (incarnation != incarnation_) return;
            // It is not even sent where the Send of the one before waits to be acknowledged in a queue that has no room
            // for more; not again and again.
            const bool unsent = !outcome && outcome.error().kind == Kind::kNoCredit;
            if (unsent && stage_.LosesPackets(spec_.host(), spec_.server()) && ++unsent_probes_ < kFailedProbesMax) {
              return again();
            }
            const bool timed_out = !outcome && outcome.error().kind == Kind::kTimedOut;
            end(!timed_out, outcome ? "answered before its time" : outcome.error().ToString());
          });
        });
      });
}

// The server counts connections, or a device the registrations: nobody takes more than is needed.
bool ClientProgram::LacksRoom() const {
  if (service_.has_clients_max()) return true;
  const auto& hosts = stage_.scenario().host();
  return std::any_of(hosts.begin(), hosts.end(), [&](const Host& each) {
    return (each.name() == spec_.host() || each.name() == spec_.server()) && HasFewRegistrations(each.device());
  });
}

void ClientProgram::Stop() {
  stopping_ = true;
  cold_.CheckAll(stage_.Now());
  if (client_ == nullptr) return;
  client_->Close([this, incarnation = incarnation_] {
    // Not here: the client would be destroyed by its own handler.
    stage_.loop(host()).Post([this, incarnation] {
      if (incarnation == incarnation_) Drop();
    });
  });
}

std::string ClientProgram::Describe() const {
  std::string text = fmt::format("client {} on {}: {} of {} calls started, {} under way, {}\n", spec_.name(),
                                 spec_.host(), next_, script_.size(), pending_.size(),
                                 connected_    ? "connected"
                                 : connecting_ ? "connecting"
                                               : "not connected");
  for (const auto& [number, pending] : pending_) {
    text += fmt::format("  call {:#x} since {} ns: {} bytes of argument, {} of result{}\n", number,
                        pending.started.time_since_epoch().count(), pending.spec.argument_bytes(),
                        pending.spec.result_bytes(), pending.cancelled ? ", cancelled" : "");
  }
  if (client_ != nullptr) text += client_->DebugString();
  return text;
}

// --- Connections ---

void ClientProgram::Connect() {
  if (stopping_ || connecting_ || connected_ || closing_ || hopeless_) return;
  Drop();
  connecting_ = true;
  timed_out_ = false;
  cancelled_.clear();
  calls_on_connection_ = 0;
  connection_since_ = stage_.Now();
  established_.reset();
  ++tally_.connections;
  rpcrdma::ClientOptions options;
  options.credits = spec_.credits();
  options.inline_threshold = spec_.inline_threshold();
  options.incoming_reads = static_cast<uint8_t>(spec_.incoming_reads());
  options.queued_calls_max = spec_.queued_calls_max();
  options.message_bytes_max = spec_.message_bytes_max();
  options.memory_windows = spec_.memory_windows();
  options.trace = stage_.trace();
  options.name = connection_name_ = fmt::format("{}/{}", spec_.name(), tally_.connections);
  options.first_xid = stage_.FirstModelXid(options.name);
  ServeReverse(stage_, spec_, &reverse_, &options);
  client_ = std::make_unique<rpcrdma::Client>(stage_.loop(host()), options);
  client_->Register(kModelBinding);
  client_->Connect(stage_.AddressOf(spec_.server()), kServicePort,
                   [this, incarnation = incarnation_, connection = tally_.connections](auto result) {
                     if (incarnation == incarnation_ && connection == tally_.connections) {
                       OnConnected(std::move(result));
                     }
                   });
}

void ClientProgram::OnConnected(Result<void, CallError> result) {
  if (inside_client_) stage_.Violate("call.ended_inside", "connecting ends inside ~Client");
  if (client_ == nullptr) return;  // destroyed before it could tell
  connecting_ = false;
  if (result) {
    if (closing_) return;
    connected_ = true;
    established_ = stage_.Now();
    attempts_ = 0;
    client_->OnConnectionLost(
        [this, incarnation = incarnation_, connection = tally_.connections](const CallError& error) {
          if (incarnation != incarnation_ || connection != tally_.connections) return;
          connected_ = false;
          // Everybody stops at the same moment, and on InfiniBand a client's last words take a round trip: the server's
          // may be here before. No device objects to anything for that.
          const bool stops = stopping_ && stage_.IsInfiniband(spec_.server()) &&
                             !stage_.evidence().Of(spec_.host(), connection_name_).IsFault();
          if (!stops && !MayBeLost()) {
            stage_.Violate("connection.lost", fmt::format("client {}: {}", spec_.name(), error.ToString()));
          }
          // Calls that ended with the connection are told of it first; what is left to do needs a new one.
          stage_.loop(host()).Post([this, incarnation, connection] {
            if (incarnation == incarnation_ && connection == tally_.connections) Pump();
          });
        });
    if (probing_) return NextProbe();
    Pump();
    return MakeRoom();
  }
  if (stage_.IsGone(spec_.server())) {
    hopeless_ = true;
    return;
  }
  if (closing_ && result.error().kind == Kind::kClosed) return;
  if (!stage_.MayFailToConnect(spec_.host(), spec_.server(), connection_since_, result.error().kind, &connects_)) {
    stage_.Violate("connection.refused", fmt::format("client {}: {}: nothing in the scenario explains it", spec_.name(),
                                                     result.error().ToString()));
    hopeless_ = true;
    return;
  }
  if (++attempts_ > kAttemptsMax) {
    stage_.Violate("liveness.connect", fmt::format("client {} cannot connect: {} attempts, the last failed with: {}",
                                                   spec_.name(), attempts_, result.error().ToString()));
    hopeless_ = true;
    return;
  }
  ConnectAfter(kReconnectDelay * std::min<uint32_t>(attempts_, 100));
}

void ClientProgram::ConnectAfter(Duration delay) {
  if (start_timer_ != 0) stage_.loop(host()).Cancel(start_timer_);
  start_timer_ = stage_.loop(host()).At(stage_.Now() + delay, [this] {
    start_timer_ = 0;
    Connect();
  });
}

void ClientProgram::Drop() {
  connected_ = false;
  connecting_ = false;
  closing_ = false;
  client_.reset();
}

void ClientProgram::ArmEnds() {
  const auto arm = [this](EventLoop::TimerId* timer, uint64_t when, void (ClientProgram::*end)()) {
    // What would have been while the host was down is not made up for.
    if (when == 0 || Instant(Duration(when)) <= stage_.Now()) return;
    *timer = stage_.loop(host()).At(Instant(Duration(when)), [this, timer, end] {
      *timer = 0;
      if (client_ == nullptr || closing_ || stopping_) return Pump();
      connected_ = false;
      for (auto& [number, pending] : pending_) pending.closed = true;
      (this->*end)();
    });
  };
  arm(&close_timer_, spec_.close_ns(), &ClientProgram::CloseAmidst);
  arm(&destroy_timer_, spec_.destroy_ns(), &ClientProgram::DestroyAmidst);
}

void ClientProgram::CloseAmidst() {
  closing_ = true;
  client_->Close([this, incarnation = incarnation_, connection = tally_.connections] {
    if (incarnation != incarnation_ || connection != tally_.connections) return;
    CheckAllToldOfEnd("closed");
    // Not here: the client would be destroyed by its own handler.
    stage_.loop(host()).Post([this, incarnation, connection] {
      if (incarnation != incarnation_ || connection != tally_.connections) return;
      Drop();
      Pump();
    });
  });
}

void ClientProgram::DestroyAmidst() {
  connecting_ = false;
  inside_client_ = true;
  client_.reset();
  inside_client_ = false;
  // Behind what the client had to say yet.
  stage_.loop(host()).Post([this, incarnation = incarnation_] {
    if (incarnation != incarnation_) return;
    CheckAllToldOfEnd("destroyed");
    Pump();
  });
}

// [client.h] Every call has been told by now.
void ClientProgram::CheckAllToldOfEnd(const char* how) {
  for (auto& [number, pending] : pending_) {
    if (!pending.closed) continue;
    stage_.Violate("call.ended_untold", fmt::format("{}: the client is {}, and the call was told nothing",
                                                    pending.Label(Who(), "call"), how));
    if (pending.cancel_timer != 0) stage_.loop(host()).Cancel(std::exchange(pending.cancel_timer, 0));
  }
  for (auto entry = pending_.begin(); entry != pending_.end();) {
    entry = entry->second.closed ? pending_.erase(entry) : std::next(entry);
  }
}

// --- Calls ---

void ClientProgram::Pump() {
  while (next_ < script_.size() && pending_.size() < spec_.concurrency()) {
    if (!connected_) {
      if (pending_.empty()) Connect();
      return;
    }
    if (spec_.calls_per_connection() != 0 && calls_on_connection_ >= spec_.calls_per_connection()) {
      if (!pending_.empty()) return;
      Drop();
      continue;
    }
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

void ClientProgram::Begin(const Call& spec, bool probe) {
  const uint64_t number = next_number_++;
  last_start_ = stage_.Now();
  ++calls_on_connection_;
  // A probe that is cancelled is no call that anybody wants answered.
  if (!probe || spec.cancel_ns() == 0) ++tally_.calls;
  Pending& pending = pending_.try_emplace(number, number, spec).first->second;
  pending.started = stage_.Now();
  pending.probe = probe;
  pending.id = client_->Call(
      pending.procedure(), [&](XdrWriter& args) { pending.Write(args); }, pending.Options(),
      [this, number, incarnation = incarnation_](Outcome outcome) {
        if (incarnation == incarnation_) OnOutcome(number, std::move(outcome));
      });
  if (spec.cancel_ns() == 0) return;
  pending.cancel_timer = stage_.loop(host()).At(stage_.Now() + Duration(spec.cancel_ns()), [this, number] {
    const auto found = pending_.find(number);
    if (found == pending_.end()) return;
    found->second.cancel_timer = 0;
    if (found->second.closed) return;
    found->second.cancelled = true;
    if (client_ == nullptr || found->second.id == 0) return;
    const size_t before = client_->abandoned();
    client_->Cancel(found->second.id);
    if (client_->abandoned() > before) cancelled_.emplace_back(found->second.spec, found->second.started);
  });
}

void ClientProgram::OnOutcome(uint64_t number, Outcome outcome) {
  if (inside_client_) {
    stage_.Violate("call.ended_inside", fmt::format("call {:#x} ends inside ~Client", number));
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
    const Kind kind = outcome.error().kind;
    if (NeverSent(kind)) unsent_.push_back(number);
    if (LeavesResultAlone(kind) && !pending.result.Untouched()) {
      stage_.Violate("memory.guard", pending.Label(Who(), "result") + ": was written to, and the call failed");
    }
    const std::string objection = Judge(pending, outcome.error());
    if (!objection.empty()) {
      stage_.Violate(pending.probe ? "liveness.probe" : "call.failed",
                     fmt::format("{}: {}: {}", pending.Label(Who(), "call"), outcome.error().ToString(), objection));
    }
  }
  pending.Retire(stage_, Who(), &cold_);
  if (pending.probe) {
    // A connection that is being closed is of no use, and its end may take a moment to be told.
    if (!outcome && outcome.error().connection_gone()) connected_ = false;
    const bool expected = outcome || (pending.cancelled && outcome.error().kind == Kind::kCancelled);
    EndProbe(!expected, outcome ? "" : outcome.error().ToString());
    if (probing_) return;
  }
  Pump();
  MakeRoom();
}

void ClientProgram::MakeRoom() {
  if (!pending_.empty() || next_ < script_.size() || !service_.has_clients_max()) return;
  // Not in a handler of the client that goes.
  stage_.loop(host()).Post([this, incarnation = incarnation_] {
    if (incarnation == incarnation_ && pending_.empty() && !probing_ && !connecting_ && !stopping_) Drop();
  });
}

// --- Which failures may be ---

bool ClientProgram::Severed() const {
  return stage_.Severed(spec_.host(), spec_.server(), connection_since_, established_);
}

bool ClientProgram::Late(const Call& call, Instant started) const {
  return call.timeout_ns() != 0 && stage_.Now() - started >= Duration(call.timeout_ns());
}

bool ClientProgram::AnyCallLate() const {
  return std::any_of(pending_.begin(), pending_.end(),
                     [&](const auto& entry) { return Late(entry.second.spec, entry.second.started); }) ||
         std::any_of(cancelled_.begin(), cancelled_.end(),
                     [&](const auto& entry) { return Late(entry.first, entry.second); });
}

bool ClientProgram::NeverSent(Kind kind) {
  return kind >= Kind::kNotConnected && kind <= Kind::kNoCredit;
}

bool ClientProgram::LeavesResultAlone(Kind kind) {
  return NeverSent(kind) || kind == Kind::kTransport || kind == Kind::kRpc;
}

void ClientProgram::CheckUnsent() {
  for (const uint64_t number : unsent_) {
    if (stage_.executions()[number].times == 0) continue;
    stage_.Violate(
        "call.executed_unsent",
        fmt::format("client {}, call {:#x}: failed before it was sent, and was executed", spec_.name(), number));
  }
}

bool ClientProgram::MayBeLost() const {
  const Evidence::End end = stage_.evidence().Of(spec_.host(), connection_name_);
  // No fault of the network makes a NIC object to what it is sent or asked to do.
  if (!end.IsFault() && Severed()) return true;
  // A server that is still at work for a cancelled call meets memory that is not valid any more, for which one device
  // or the other ends the connection. Each cancelled call whose reply has come was ignored.
  if (end.terminated && cancelled_.size() > end.cancelled_replies) return true;
  // One whose reply comes at the same moment has a window that is invalidated by the peer and once more by this end,
  // which the device refuses.
  if (end.work_failed && end.window_invalidated && !cancelled_.empty()) return true;
  if (end.call_timed_out) return timed_out_ || AnyCallLate();
  // A server that cannot register what a call needs lets the connection go. Word of it travels no longer than a call,
  // unless it is held up.
  const bool disturbed = stage_.Disturbed(spec_.host(), spec_.server(), connection_since_);
  const Instant heard = disturbed ? connection_since_ : std::max(connection_since_, stage_.Now() - patience_);
  return stage_.FailedRegistration(spec_.server(), heard);
}

std::string ClientProgram::Judge(const Pending& pending, const CallError& error) {
  const Call& call = pending.spec;
  const auto refused = [&](bool may) -> std::string {
    ++tally_.refused;
    return may ? "" : "nothing in the scenario explains it";
  };
  switch (error.kind) {
    case Kind::kNoCredit:
    case Kind::kTimedOut: {
      if (error.kind == Kind::kTimedOut) timed_out_ = true;
      if (!Late(call, pending.started)) return refused(false);
      // One that is made on a connection that is dead already has nobody to hear it.
      if (Severed() || stage_.Disturbed(spec_.host(), spec_.server(), pending.started)) return refused(true);
      if (pending.probe) return "a probe must be answered";
      return refused(Duration(call.timeout_ns()) < patience_);
    }
    case Kind::kCancelled:
      if (pending.probe && pending.cancelled) return "";
      return refused(pending.cancelled);
    case Kind::kQueueFull:
      return refused(spec_.concurrency() > spec_.queued_calls_max());
    case Kind::kTooLarge:
      return refused(TooLarge(stage_.scenario(), spec_, call));
    case Kind::kMemory:
      return refused(stage_.FailedRegistration(spec_.host(), pending.started));
    case Kind::kConnectionLost:
    case Kind::kNotConnected:
      ++tally_.disturbed;
      return MayBeLost() ? "" : "nothing has disturbed the connection";
    case Kind::kTransport:
      return refused(ReplyCannotTravel(call) || stage_.FailedRegistration(spec_.server(), pending.started) ||
                     ArgumentsExceedServer(service_, call));
    case Kind::kRpc:
      return refused(error.accept_stat == rpcrdma::AcceptStat::kSystemErr &&
                     (ServerMayLackMemory(stage_.scenario(), spec_, call) || ReplyExceedsServer(service_, call)));
    case Kind::kClosed:
      return refused(pending.closed);
    case Kind::kDenied:
    case Kind::kBadReply:
    default:
      return refused(false);
  }
}

}  // namespace stagecoach::scenario
