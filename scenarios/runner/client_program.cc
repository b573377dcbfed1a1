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
    : CallerProgram(stage, spec, "client", index, stage.Patience(spec)) {}

ClientProgram::~ClientProgram() {
  Kill();
}

void ClientProgram::Kill() {
  another_.reset();
  CallerProgram::Kill();
}

// --- Probes ---

void ClientProgram::Probe(bool warm) {
  if (!BeginProbes(warm, LacksRoom() ? 1 : spec_.queued_calls_max())) return;
  attempts_ = 0;
  GoOnProbing(ProbeRound::Then::kNextStep);
}

// In the end, a second connection that ends by a call that times out.
void ClientProgram::NextProbe() {
  if (const auto step = probes_.BeginStep()) return Begin(*step);
  if (probes_.own_steps() == 0 && !LacksRoom()) return ProbeAnotherConnection();
  probes_.End();
  Pump();
  MakeRoom();
}

// On a new connection if need be.
void ClientProgram::GoOnProbing(ProbeRound::Then then) {
  if (then == ProbeRound::Then::kWait) return;
  if (connected_) return NextProbe();
  if (then == ProbeRound::Then::kSameStep) return OpenAfter(kReconnectDelay);
  Open();
}

void ClientProgram::ProbeAnotherConnection() {
  rpcrdma::ClientOptions options;
  options.credits = spec_.credits();
  options.inline_threshold = spec_.inline_threshold();
  options.trace = stage_.trace();
  options.name = fmt::format("{}/another-{}", spec_.name(), ++others_);
  options.first_xid = stage_.FirstModelXid(options.name);
  SetTerms(spec_, &options);
  ServeReverse(stage_, spec_, &reverse_, &options);
  another_ = std::make_unique<rpcrdma::Client>(stage_.loop(host()), options);
  another_->Register(kModelBinding);
  const auto end = [this](bool failed, std::string how) {
    Post([this, failed, how = std::move(how)] {
      another_.reset();
      unsent_probes_ = 0;
      if (failed) stage_.Violate("liveness.probe", fmt::format("{}, another connection: {}", who_, how));
      GoOnProbing(probes_.EndCall(failed, how));
    });
  };
  const auto call = [this](uint64_t service_ns, Duration timeout, std::function<void(Outcome)> then) {
    CallOptions options;
    options.timeout = timeout;
    const uint64_t number = calls_.NewNumber();
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
  const auto again = [this] { Post([this] { ProbeAnotherConnection(); }); };
  const auto later = [this] {
    const Duration delay = kReconnectDelay * std::min<uint32_t>(turned_away_, 100);
    stage_.loop(host()).At(stage_.Now() + delay, InThisLife([this] { ProbeAnotherConnection(); }));
  };
  another_->Connect(
      stage_.AddressOf(spec_.server()), kServicePort,
      [this, life = life(), since = stage_.Now(), end, call, again, later](Result<void, CallError> connected) {
        if (life != this->life()) return;
        if (!connected && connected.error().kind == Kind::kRefused && stage_.MayBeTurnedAway(spec_.server(), since) &&
            ++turned_away_ < kAttemptsMax) {
          return later();
        }
        turned_away_ = 0;
        if (!connected) return end(true, connected.error().ToString());
        call(0, ProbeTimeout(stage_, spec_, Call()), [this, life, end, call, again](Outcome outcome) {
          if (life != this->life()) return;
          if (!outcome) return end(true, outcome.error().ToString());
          // Which is answered when nobody waits for it any more.
          call(200'000'000, 50ms, [this, life, end, again](Outcome outcome) {
            if (life != this->life()) return;
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

std::string ClientProgram::Describe() const {
  const std::string text = DescribeCalls(connected_ ? ", connected" : connecting_ ? ", connecting" : ", not connected");
  return client_ != nullptr ? text + client_->DebugString() : text;
}

// --- Connections ---

void ClientProgram::Open() {
  if (stopping() || connecting_ || connected_ || closing() || hopeless()) return;
  Drop();
  connecting_ = true;
  timed_out_ = false;
  cancelled_.clear();
  calls_on_connection_ = 0;
  connection_since_ = stage_.Now();
  established_.reset();
  ++tally_.connections;
  connection_name_ = fmt::format("{}/{}", spec_.name(), tally_.connections);
  client_ = std::make_unique<rpcrdma::Client>(stage_.loop(host()), MakeOptions(connection_name_));
  client_->Register(kModelBinding);
  client_->Connect(stage_.AddressOf(spec_.server()), kServicePort,
                   [this, life = life(), connection = tally_.connections](auto result) {
                     if (life == this->life() && connection == tally_.connections) OnConnected(std::move(result));
                   });
}

void ClientProgram::OnConnected(Result<void, CallError> result) {
  if (destroying()) stage_.Violate("call.ended_inside", "connecting ends inside ~Client");
  if (client_ == nullptr) return;  // destroyed before it could tell
  connecting_ = false;
  if (result) {
    if (closing()) return;
    connected_ = true;
    established_ = stage_.Now();
    attempts_ = 0;
    client_->OnConnectionLost([this, life = life(), connection = tally_.connections](const CallError& error) {
      if (life != this->life() || connection != tally_.connections) return;
      connected_ = false;
      // Everybody stops at the same moment, and on InfiniBand a client's last words take a round trip: the server's
      // may be here before. No device objects to anything for that.
      const bool stops = stopping() && stage_.IsInfiniband(spec_.server()) &&
                         !stage_.evidence().Of(spec_.host(), connection_name_).IsFault();
      if (!stops && !MayBeLost()) {
        stage_.Violate("connection.lost", fmt::format("{}: {}", who_, error.ToString()));
      }
      // Calls that ended with the connection are told of it first; what is left to do needs a new one.
      Post([this, connection] {
        if (connection == tally_.connections) Pump();
      });
    });
    if (probes_.under_way()) return NextProbe();
    Pump();
    return MakeRoom();
  }
  if (stage_.IsGone(spec_.server())) {
    NoteHopeless();
    return;
  }
  if (closing() && result.error().kind == Kind::kClosed) return;
  if (!MayFailToConnect(connection_since_, result.error().kind)) {
    stage_.Violate("connection.refused",
                   fmt::format("{}: {}: nothing in the scenario explains it", who_, result.error().ToString()));
    NoteHopeless();
    return;
  }
  if (++attempts_ > kAttemptsMax) {
    stage_.Violate("liveness.connect", fmt::format("{} cannot connect: {} attempts, the last failed with: {}", who_,
                                                   attempts_, result.error().ToString()));
    NoteHopeless();
    return;
  }
  OpenAfter(kReconnectDelay * std::min<uint32_t>(attempts_, 100));
}

void ClientProgram::Close(std::function<void()> done) {
  connected_ = false;
  client_->Close(std::move(done));
}

void ClientProgram::Destroy() {
  connected_ = false;
  connecting_ = false;
  client_.reset();
}

void ClientProgram::MakeRoom() {
  if (!calls_.empty() || !AllBegun() || !service_.has_clients_max()) return;
  Post([this] {
    if (calls_.empty() && !probes_.under_way() && !connecting_ && !stopping()) Drop();
  });
}

// --- Calls ---

bool ClientProgram::Ready() {
  const bool used_up = spec_.calls_per_connection() != 0 && calls_on_connection_ >= spec_.calls_per_connection();
  if (connected_ && used_up) {
    if (!calls_.empty()) return false;
    Drop();
  }
  if (!connected_ && calls_.empty()) Open();
  return connected_;
}

rpcrdma::CallId ClientProgram::Send(CallUnderWay& call, rpcrdma::Client::CallHandler handler) {
  ++calls_on_connection_;
  // When the server says that its reply found no room.
  if (MayBeOfVersion2(spec_, service_)) stage_.executions()[call.number].repeatable = true;
  const auto args = [&](XdrWriter& out) { call.Write(out); };
  return client_->Call(call.procedure(), args, call.Options(), std::move(handler));
}

void ClientProgram::Cancel(const CallUnderWay& call) {
  if (client_ == nullptr) return;
  const size_t before = client_->abandoned();
  client_->Cancel(call.id);
  if (client_->abandoned() > before) cancelled_.push_back(call.due());
}

void ClientProgram::OnOver(const CallUnderWay& call, const Outcome& outcome) {
  if (call.probe) {
    // A connection that is being closed is of no use, and its end may take a moment to be told.
    if (!outcome && outcome.error().connection_gone()) connected_ = false;
    GoOnProbing(probes_.EndCall(call, outcome));
    if (probes_.under_way()) return;
  }
  Pump();
  MakeRoom();
}

// --- Which failures may be ---

bool ClientProgram::Severed() const {
  return stage_.Severed(spec_.host(), spec_.server(), connection_since_, established_);
}

bool ClientProgram::AnyCallLate() const {
  return calls_.AnyLate() || std::any_of(cancelled_.begin(), cancelled_.end(),
                                         [&](const auto& due) { return due && *due <= stage_.Now(); });
}

bool ClientProgram::NeverSent(const CallError& error) {
  return error.kind >= Kind::kNotConnected && error.kind <= Kind::kNoCredit && !error.sent;
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
  if (MayBeLostUnread(connection_since_) || MayBeLostByReverseCall(connection_since_)) return true;
  // A server that cannot register what a call needs lets the connection go. Word of it travels no longer than a call,
  // unless it is held up.
  const bool disturbed = stage_.Disturbed(spec_.host(), spec_.server(), connection_since_);
  const Instant heard = disturbed ? connection_since_ : std::max(connection_since_, stage_.Now() - patience_);
  return stage_.FailedRegistration(spec_.server(), heard);
}

std::string ClientProgram::Judge(const CallUnderWay& call, const CallError& error) {
  if (NeverSent(error)) calls_.NoteUnsent(call);
  if (error.kind == Kind::kTransport || error.kind == Kind::kRpc) calls_.CheckResultUntouched(call);
  switch (error.kind) {
    case Kind::kNoCredit:
    case Kind::kTimedOut: {
      if (error.kind == Kind::kTimedOut) timed_out_ = true;
      if (!call.IsLate(stage_.Now())) return Refused(false);
      // One that is made on a connection that is dead already has nobody to hear it.
      if (Severed() || stage_.Disturbed(spec_.host(), spec_.server(), call.started)) return Refused(true);
      if (call.probe) return "a probe must be answered";
      return Refused(Duration(call.spec.timeout_ns()) < patience_);
    }
    case Kind::kConnectionLost:
    case Kind::kNotConnected:
      ++tally_.disturbed;
      return MayBeLost() ? "" : "nothing has disturbed the connection";
    default:
      return JudgeByItself(call, error);
  }
}

}  // namespace stagecoach::scenario
