#include "rpcrdma/api/session.h"

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <unordered_set>
#include <vector>

#include "base/check.h"
#include "base/mark.h"
#include "base/mutant.h"
#include "base/prng.h"
#include "rpcrdma/api/call_message.h"
#include "rpcrdma/api/errors_internal.h"
#include "rpcrdma/api/options.h"
#include "rpcrdma/api/resolve.h"
#include "rpcrdma/api/version_memory.h"
#include "rpcrdma/core/xid.h"
#include "rpcrdma/loop/deadline.h"
#include "rpcrdma/verbs/address_text.h"

namespace stagecoach::rpcrdma {
namespace internal {
namespace {

using Kind = CallError::Kind;

// Recycled message buffers that are kept, and the largest worth keeping.
constexpr size_t kBuffersKept = 64;
constexpr size_t kBufferKeptMax = 64 * 1024;

uint64_t Drawn(uint64_t wanted) {
  return wanted != 0 ? wanted : std::random_device()();
}

// The server has looked at a call: an answer of any kind to it, though not a word about its transport header.
bool IsRpcReply(const Result<Reply, CallError>& result) {
  return result || result.error().kind == Kind::kRpc || result.error().kind == Kind::kDenied;
}

// It ended with its connection, and not for a reason of its own.
bool IsLost(const CallError& error) {
  return error.kind == Kind::kConnectionLost || error.kind == Kind::kNotConnected || error.kind == Kind::kClosed;
}

}  // namespace

class SessionImpl final : public std::enable_shared_from_this<SessionImpl> {
 public:
  SessionImpl(EventLoop& loop, std::string host, uint16_t port, std::optional<SocketAddress> address,
              SessionOptions options)
      : loop_(loop),
        options_fault_(FaultOf(options)),
        options_(std::move(options)),
        host_(std::move(host)),
        port_(port),
        address_(address),
        peer_(address_ ? FormatAddress(address_->get()) : FormatHostPort(host_, port_)),
        prng_(Prng(Drawn(options_.seed)).Fork(options_.client.name)),
        xids_(static_cast<uint32_t>(Drawn(options_.client.first_xid))),
        version_memory_(std::make_shared<VersionMemory>(options_.version_memory)),
        lanes_(options_fault_ ? 1 : options_.connections) {}

  void Register(const Binding& binding) { bindings_.Add(binding); }

  // --- Calls ---

  CallId Call(const ProcedureId& procedure, Client::ArgsWriter args, const CallOptions& options,
              Client::CallHandler handler) {
    const CallName name = NameOf(procedure);
    if (options_fault_) return Refuse(std::move(handler), NamedError(Kind::kOptions, name, *options_fault_));
    if (closing_) {
      return Refuse(std::move(handler), NamedError(Kind::kNotConnected, name, "the session was closed"));
    }
    if (waiting_.size() >= options_.client.queued_calls_max) {
      return Refuse(std::move(handler), RefusedCall(SubmitRefusal::kQueueFull, name));
    }
    CallMessage message{.buffer = TakeBuffer()};
    if (auto refused = MakeCallMessage(name, args, options, bindings_, options_.client.message_bytes_max, &message)) {
      ReturnBuffer(std::move(message.buffer));
      return Refuse(std::move(handler), std::move(*refused));
    }

    const uint32_t index = AllocateCall();
    OneCall& call = *calls_[index];
    call.sequence = ++stats_.calls;
    call.xid = NextXid();
    call.procedure = procedure;
    call.message = std::move(message);
    call.options = options;
    call.options.credentials = nullptr;  // in the message
    call.options.registered_memory = {};
    if (options.timeout > Duration::zero()) call.deadline = DeadlineAfter(loop_.Now(), options.timeout);
    call.handler = std::move(handler);
    const CallId id = IdOf(index);
    if (Lane* const lane = waiting_.empty() ? LaneWithRoom() : nullptr; lane != nullptr) {
      Transmit(*lane, index);
    } else {
      Wait(index);
    }
    Pump();
    return id;
  }

  void Cancel(CallId id) {
    const std::optional<uint32_t> index = Find(id);
    if (!index) return;
    OneCall& call = *calls_[*index];
    call.cancelled = true;
    if (call.state == State::kWaiting) {
      FailWaiting(*index, Kind::kCancelled, "cancelled");
      return;
    }
    Lane& lane = lanes_[call.lane];
    if (lane.connection == call.connection && lane.client) lane.client->Cancel(call.at_client);
  }

  void Close(UniqueFunction<void()> handler) {
    if (handler) on_closed_.push_back(std::move(handler));
    if (std::exchange(closing_, true)) {
      if (open_lanes_ == 0) TellClosed();
      return;
    }
    CancelTimer(&retry_timer_);
    CancelTimer(&deadline_timer_);
    while (!waiting_.empty()) FailWaiting(waiting_.begin()->second, Kind::kClosed, "the session was closed");
    for (uint32_t number = 0; number < lanes_.size(); ++number) {
      Lane& lane = lanes_[number];
      if (lane.state == LaneState::kConnecting) Retire(lane);
      if (lane.state != LaneState::kConnected) continue;
      CancelTimer(&lane.timer);
      ++open_lanes_;
      lane.client->Close([weak = weak_from_this(), number] {
        if (auto self = weak.lock()) self->OnLaneClosed(self->lanes_[number]);
      });
    }
    if (open_lanes_ == 0) TellClosed();
  }

  // ~Session: when this returns, nothing of any connection is left but handlers that the loop will run.
  void Abandon() {
    closing_ = true;
    abandoned_ = true;
    CancelTimer(&retry_timer_);
    CancelTimer(&deadline_timer_);
    for (Lane& lane : lanes_) Retire(lane);
    for (uint32_t index = 0; index < calls_.size(); ++index) {
      OneCall& call = *calls_[index];
      if (call.state == State::kFree) continue;
      CallError error = NamedError(call.cancelled ? Kind::kCancelled : Kind::kClosed, NameOf(call),
                                   call.cancelled ? "cancelled" : "the session was destroyed");
      // Of one that was with a Client that is gone, this may be and must not be denied.
      error.sent = call.transmissions > 0 || call.state == State::kAtClient;
      Defer(index, std::move(error));
    }
    if (!on_closed_.empty()) TellClosed();
  }

  // --- What is going on ---

  size_t connections() const {
    return static_cast<size_t>(
        std::count_if(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return IsUsable(lane); }));
  }
  size_t outstanding() const { return calls_.size() - free_calls_.size(); }
  size_t waiting() const { return waiting_.size(); }
  const std::string& peer() const { return peer_; }
  EventLoop& loop() const { return loop_; }

  SessionStats stats() const {
    SessionStats stats = stats_;
    for (const Lane& lane : lanes_) {
      if (lane.client) stats.connections += lane.client->stats();
    }
    return stats;
  }

  std::string DebugString() const {
    std::string text = options_.client.name + " to " + peer_ + ": session; calls " + std::to_string(outstanding()) +
                       ", of them waiting " + std::to_string(waiting()) + (closing_ ? "; closing" : "") + "\n";
    for (const auto& [sequence, index] : waiting_) {
      const OneCall& call = *calls_[index];
      text += "  call xid " + std::to_string(call.xid) + " waiting, transmissions " +
              std::to_string(call.transmissions) +
              (call.deadline ? ", deadline " + FormatSeconds(*call.deadline) : ", no deadline") + "\n";
    }
    for (const Lane& lane : lanes_) {
      static constexpr const char* kStates[] = {"down", "connecting", "connected"};
      text += "  lane " + std::to_string(NumberOf(lane)) + ": " + kStates[static_cast<size_t>(lane.state)] +
              ", failures " + std::to_string(lane.failures);
      if (lane.state == LaneState::kDown) text += ", not before " + FormatSeconds(lane.not_before);
      text += "\n" + (lane.client ? lane.client->DebugString() : std::string());
    }
    return text;
  }

 private:
  enum class State : uint8_t { kFree, kWaiting, kAtClient };

  struct OneCall {
    State state = State::kFree;
    uint32_t generation = 0;
    uint64_t sequence = 0;  // calls wait in the order they were made
    uint32_t xid = 0;
    ProcedureId procedure;
    CallMessage message;
    CallOptions options;
    bool cancelled = false;
    std::optional<Instant> deadline;
    Client::CallHandler handler;
    uint32_t transmissions = 0;  // on connections that are over
    // kAtClient:
    uint32_t lane = 0;
    uint64_t connection = 0;
    CallId at_client = 0;
  };

  enum class LaneState : uint8_t { kDown, kConnecting, kConnected };

  // One of the connections at a time, as they follow each other. What a Client tells is heeded while it is the lane's
  // present one, which `connection` says: nothing of an earlier one can touch it.
  struct Lane {
    LaneState state = LaneState::kDown;
    uint64_t connection = 0;
    std::unique_ptr<Client> client;
    uint32_t failures = 0;  // in a row
    Instant not_before{};   // of the next attempt
    // kConnected:
    uint32_t calls = 0;
    bool useful = false;  // a call had a reply
    Instant heard{};      // the latest reply, to whatever
    Instant used{};       // the latest moment it had a call
    EventLoop::TimerId timer = 0;
    std::optional<Instant> asked;  // a keepalive is under way since
  };

  struct Deferred {
    Client::CallHandler handler;
    CallError error;
  };

  // --- Connections ---

  static bool IsUsable(const Lane& lane) { return lane.state == LaneState::kConnected && lane.client->connected(); }
  size_t NumberOf(const Lane& lane) const { return static_cast<size_t>(&lane - lanes_.data()); }

  // Sends what may be sent, and sees to it that there are connections for the rest.
  void Pump() {
    while (!waiting_.empty() && !closing_) {
      Lane* const lane = LaneWithRoom();
      if (lane == nullptr) break;
      Transmit(*lane, waiting_.begin()->second);
    }
    if (!closing_ && WantsConnection()) Connect();
  }

  // The one with the fewest calls, in turns.
  Lane* LaneWithRoom() {
    Lane* best = nullptr;
    for (size_t i = 1; i <= lanes_.size(); ++i) {
      Lane& lane = lanes_[(latest_lane_ + i) % lanes_.size()];
      if (!IsUsable(lane)) continue;
      // One credit is left for a keepalive, which may no more exceed the grant than other calls [5666bis:4.3#4]; unless
      // it is the only one.
      const bool keeps = !STAGECOACH_MUTANT("keepalive-without-credit", "calls take the credit of the keepalive, too");
      const uint32_t spare = keeps && options_.keepalive.interval > Duration::zero() && lane.calls > 0 ? 1 : 0;
      if (lane.client->room() <= spare) continue;
      if (best == nullptr || lane.calls < best->calls) best = &lane;
    }
    if (best != nullptr) latest_lane_ = NumberOf(*best);
    return best;
  }

  // There is a call that has no connection, or none of its own and there may be more.
  bool WantsConnection() const {
    size_t connected = 0;
    for (const Lane& lane : lanes_) {
      if (lane.state == LaneState::kConnecting) return false;  // one after the other
      if (IsUsable(lane)) ++connected;
    }
    return outstanding() > connected && connected < lanes_.size();
  }

  // The first lane that is down: so as long as the server refuses a further connection, or every one, one lane tries.
  void Connect() {
    const auto found =
        std::find_if(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return lane.state == LaneState::kDown; });
    if (found == lanes_.end()) return;  // one is on its way down
    Lane& lane = *found;
    const Instant now = loop_.Now();
    if (lane.not_before <= now) return Attempt(lane);
    if (retry_timer_ != 0 && retry_at_ <= lane.not_before) return;
    CancelTimer(&retry_timer_);
    retry_at_ = lane.not_before;
    const auto wait = std::chrono::duration_cast<std::chrono::milliseconds>(retry_at_ - now).count();
    TraceEvent("session.backing_off", {{"lane", uint64_t{NumberOf(lane)}},
                                       {"ms", static_cast<uint64_t>(wait)},
                                       {"failures", uint64_t{lane.failures}}});
    SetTimer(&retry_timer_, retry_at_, [](SessionImpl& self) { self.Pump(); });
  }

  void Attempt(Lane& lane) {
    const auto number = static_cast<uint32_t>(NumberOf(lane));
    const uint64_t connection = ++stats_.attempts;
    TraceEvent("session.connecting",
               {{"connection", connection}, {"lane", uint64_t{number}}, {"attempt", uint64_t{lane.failures} + 1}});
    ClientOptions options = options_.client;
    options.name += "/" + std::to_string(connection);
    options.first_xid = 1;  // of the calls that the connection begins with; others bring their own
    lane.state = LaneState::kConnecting;
    lane.connection = connection;
    lane.client = std::make_unique<Client>(loop_, std::move(options));
    lane.client->UseVersionMemory(version_memory_);
    lane.client->OnConnectionLost([weak = weak_from_this(), number, connection](const CallError& error) {
      const auto self = weak.lock();
      if (self && self->lanes_[number].connection == connection) self->OnLost(self->lanes_[number], error);
    });
    lane.client->OnProgress([weak = weak_from_this(), number, connection] {
      const auto self = weak.lock();
      if (self && self->lanes_[number].connection == connection && !self->waiting_.empty()) self->Pump();
    });
    auto handler = [weak = weak_from_this(), number, connection](Result<void, CallError> connected) {
      const auto self = weak.lock();
      if (self && self->lanes_[number].connection == connection) self->OnAttempted(self->lanes_[number], connected);
    };
    if (address_) {
      lane.client->Connect(address_->get(), std::move(handler));
    } else {
      lane.client->Connect(host_, port_, std::move(handler));
    }
  }

  void OnAttempted(Lane& lane, const Result<void, CallError>& connected) {
    if (!connected) {
      ++stats_.attempts_failed;
      ++lane.failures;
      TraceEvent("session.attempt_failed", {{"connection", lane.connection},
                                            {"attempt", uint64_t{lane.failures}},
                                            {"why", ToString(connected.error().kind)}});
      return GoDown(lane, connected.error());
    }
    ++stats_.connected;
    TraceEvent("session.connected", {{"connection", lane.connection}});
    lane.state = LaneState::kConnected;
    lane.calls = 0;
    lane.useful = false;
    lane.heard = lane.used = loop_.Now();
    Watch(lane);
    Pump();
  }

  void OnLost(Lane& lane, const CallError& error) {
    if (closing_) return;
    ++stats_.lost;
    TraceEvent("session.lost", {{"connection", lane.connection},
                                {"useful", uint64_t{lane.useful ? 1u : 0u}},
                                {"why", std::string_view(error.message)}});
    if (!lane.useful) {
      ++stats_.useless;
      ++lane.failures;
    }
    GoDown(lane, error);
  }

  void GoDown(Lane& lane, CallError error) {
    Retire(lane);
    Duration delay = options_.reconnect.delay_first;
    for (uint32_t i = 1; i < lane.failures && delay < options_.reconnect.delay_max; ++i) delay *= 2;
    delay = std::min(delay, options_.reconnect.delay_max);
    lane.not_before = loop_.Now() + delay / 2 + Duration(prng_.Below(static_cast<uint64_t>((delay / 2).count()) + 1));
    latest_error_ = std::move(error);
    const uint32_t limit = options_.reconnect.attempts_max;
    // [v2:7.2+2] Nor is a server tried again by itself with which there is no version in common.
    const bool useless = latest_error_.kind == Kind::kVersion || (limit > 0 && lane.failures >= limit);
    if (useless && connections() == 0) {
      while (!waiting_.empty()) FailUnconnected(waiting_.begin()->second, lane.failures);
    }
    Pump();
  }

  void FailUnconnected(uint32_t index, uint32_t attempts) {
    const OneCall& call = *calls_[index];
    Kind kind = latest_error_.kind <= Kind::kDevice ? latest_error_.kind : Kind::kNotConnected;
    if (call.transmissions > 0) kind = Kind::kConnectionLost;
    FailWaiting(index, kind,
                (call.transmissions > 0 ? "not sent again after " : "not sent after ") + std::to_string(attempts) +
                    (attempts == 1 ? " failed attempt: " : " failed attempts in a row: ") + latest_error_.message);
  }

  // Ends what is left of the lane's Client. Calls that it still has come back when the loop runs.
  void Retire(Lane& lane) {
    CancelTimer(&lane.timer);
    lane.asked.reset();
    lane.state = LaneState::kDown;
    lane.connection = 0;
    if (!lane.client) return;
    ConnectionStats past = lane.client->stats();
    past.credits_granted = 0;
    stats_.connections += past;
    lane.client.reset();
  }

  void OnLaneClosed(Lane& lane) {
    Retire(lane);
    if (--open_lanes_ == 0) TellClosed();
  }

  void TellClosed() {
    // After the handlers of calls, which were posted before.
    loop_.Post([self = shared_from_this()] {
      for (UniqueFunction<void()>& handler : std::exchange(self->on_closed_, {})) handler();
    });
  }

  // --- Silence and idleness ---

  // Looks at a connected lane: whether it is idle, or silent, and when to look again.
  void Watch(Lane& lane) {
    CancelTimer(&lane.timer);
    const Instant now = loop_.Now();
    const KeepaliveOptions& keepalive = options_.keepalive;
    std::optional<Instant> next;
    const auto look_at = [&](Instant when) { next = next ? std::min(*next, when) : when; };

    if (options_.idle_timeout > Duration::zero()) {
      if (lane.calls > 0) lane.used = now;
      // The server's calls are use, too.
      if (const auto reverse = lane.client->reverse_active_at()) lane.used = std::max(lane.used, *reverse);
      const Instant idle_at = DeadlineAfter(lane.used, options_.idle_timeout);
      if (now >= idle_at) {
        STAGECOACH_MARK("session.idle_connection_closed");
        ++stats_.idle_closes;
        TraceEvent("session.idle", {{"connection", lane.connection}});
        Retire(lane);
        return Pump();  // calls may wait for credits that cancelled ones had there
      }
      look_at(idle_at);
    }
    if (keepalive.interval > Duration::zero()) {
      const bool deaf = STAGECOACH_MUTANT("keepalive-hears-no-others", "other replies give a keepalive no time");
      if (lane.asked && now >= (deaf ? *lane.asked : std::max(*lane.asked, lane.heard)) + keepalive.timeout) {
        STAGECOACH_MARK("session.keepalive_unanswered");
        ++stats_.keepalives_unanswered;
        TraceEvent("session.keepalive_unanswered", {{"connection", lane.connection}});
        lane.client->Drop("no answer to a keepalive");
        return;
      }
      if (!lane.asked && now >= DeadlineAfter(lane.heard, keepalive.interval) && lane.client->room() > 0) Ask(lane);
      if (lane.asked) {
        look_at(std::max(*lane.asked, lane.heard) + keepalive.timeout);
      } else {
        const Instant due = DeadlineAfter(lane.heard, keepalive.interval);
        look_at(due > now ? due : DeadlineAfter(now, keepalive.interval));
      }
    }
    if (!next) return;
    const auto number = NumberOf(lane);
    SetTimer(&lane.timer, *next, [number](SessionImpl& self) { self.Watch(self.lanes_[number]); });
  }

  void Ask(Lane& lane) {
    const ProcedureId null{options_.keepalive.program, options_.keepalive.version, 0};
    CallMessage message{.buffer = TakeBuffer()};
    const CallOptions plain;
    const auto refused = MakeCallMessage(
        NameOf(null), [](XdrWriter&) {}, plain, bindings_, options_.client.message_bytes_max, &message);
    STAGECOACH_CHECK(!refused);
    const uint32_t xid = NextXid();
    ++stats_.keepalives;
    TraceEvent("session.keepalive", {{"connection", lane.connection}, {"xid", uint64_t{xid}}});
    lane.asked = loop_.Now();
    const auto number = static_cast<uint32_t>(NumberOf(lane));
    lane.client->Submit(
        {.procedure = null, .message = message, .options = plain, .deadline = {}, .xid = xid},
        [weak = weak_from_this(), number, xid, connection = lane.connection](const Result<Reply, CallError>& result) {
          const auto self = weak.lock();
          if (!self) return;
          self->xids_in_use_.erase(xid);
          Lane& lane = self->lanes_[number];
          if (lane.connection != connection) return;
          lane.asked.reset();
          // Whatever it says; but what ended with the connection says nothing.
          if (result || !IsLost(result.error())) lane.heard = self->loop_.Now();
        });
    ReturnBuffer(std::move(message.buffer));
  }

  // --- Calls on their way ---

  void Wait(uint32_t index) {
    OneCall& call = *calls_[index];
    call.state = State::kWaiting;
    waiting_.emplace(call.sequence, index);
    if (call.deadline && (deadline_timer_ == 0 || *call.deadline < deadline_at_)) SetDeadline(*call.deadline);
  }

  void Transmit(Lane& lane, uint32_t index) {
    OneCall& call = *calls_[index];
    if (call.deadline && loop_.Now() >= *call.deadline) return Expire(index);
    waiting_.erase(call.sequence);
    call.state = State::kAtClient;
    call.lane = static_cast<uint32_t>(NumberOf(lane));
    call.connection = lane.connection;
    ++lane.calls;
    if (call.transmissions > 0) {
      STAGECOACH_MARK("session.call_sent_again");
      ++stats_.retransmissions;
      TraceEvent("session.retransmitted", {{"xid", uint64_t{call.xid}},
                                           {"connection", call.connection},
                                           {"transmission", uint64_t{call.transmissions} + 1}});
    }
    const bool anew = call.transmissions > 0 &&
                      STAGECOACH_MUTANT("session-draws-xid-anew", "a session sends a call again with another XID");
    call.at_client = lane.client->Submit(
        {.procedure = call.procedure,
         .message = call.message,
         .options = call.options,
         .deadline = call.deadline,
         .xid = anew ? NextXid() : call.xid},
        [weak = weak_from_this(), id = IdOf(index), connection = call.connection](Result<Reply, CallError> result) {
          if (auto self = weak.lock()) self->OnOutcome(id, connection, std::move(result));
        });
  }

  void OnOutcome(CallId id, uint64_t connection, Result<Reply, CallError> result) {
    const std::optional<uint32_t> index = Find(id);
    // ~Session has taken it away; or it is the end of an earlier connection, which cannot be: a call leaves a Client by
    // its outcome alone.
    if (!index || calls_[*index]->state != State::kAtClient || calls_[*index]->connection != connection) return;
    OneCall& call = *calls_[*index];
    Lane& lane = lanes_[call.lane];
    if (lane.connection == connection) {
      --lane.calls;
      lane.used = loop_.Now();
      Hear(lane, result);
    }
    if (!result && result.error().sent) ++call.transmissions;
    if (result || !IsLost(result.error())) {
      if (!result) Amend(call, &result.error());
      return Finish(*index, std::move(result));
    }
    if (MayGoOn(call, result.error())) {
      if (STAGECOACH_MUTANT("session-forgets-call", "a session forgets a call whose connection is lost")) return;
      Wait(*index);
      return Pump();
    }
    CallError error = std::move(result.error());
    if (call.cancelled) {
      error = NamedError(Kind::kCancelled, NameOf(call), "cancelled");
    } else if (closing_) {
      error.kind = Kind::kClosed;
    } else {
      STAGECOACH_MARK("session.call_not_to_be_sent_again");
      error.kind = Kind::kConnectionLost;
    }
    error.sent = call.transmissions > 0;
    TraceEvent("session.given_up",
               {{"xid", uint64_t{call.xid}}, {"sent", uint64_t{error.sent ? 1u : 0u}}, {"why", ToString(error.kind)}});
    Finish(*index, Err(std::move(error)));
  }

  // A message came, even if not a good one.
  void Hear(Lane& lane, const Result<Reply, CallError>& result) {
    if (IsRpcReply(result)) {
      lane.useful = true;
      lane.failures = 0;
    } else if (result.error().kind != Kind::kTransport && result.error().kind != Kind::kBadReply) {
      return;
    }
    lane.heard = loop_.Now();
  }

  // [5666bis:5.5+4] [5666:8+2] [5666:11+2] [2004:8+2] [5666bis:8.3.2+1]
  // Of a call that its connection has left behind.
  bool MayGoOn(const OneCall& call, const CallError& lost) const {
    if (call.cancelled || closing_) return false;
    if (!lost.sent) return true;
    return call.options.retransmit && call.transmissions < options_.reconnect.transmissions_max;
  }

  // What the Client says of a call that has been on other connections before.
  void Amend(const OneCall& call, CallError* error) const {
    if (call.transmissions == 0) return;
    error->sent = true;
    if (error->kind == Kind::kNoCredit) {
      *error = NamedError(Kind::kTimedOut, NameOf(call), "timed out before it could be sent again");
      error->sent = true;
    }
  }

  // Its deadline is over while it waits.
  void Expire(uint32_t index) {
    const OneCall& call = *calls_[index];
    if (call.transmissions > 0) {
      STAGECOACH_MARK("session.timed_out_before_it_was_sent_again");
      return FailWaiting(index, Kind::kTimedOut, "timed out before it could be sent again");
    }
    if (connections() > 0) {
      return FailWaiting(index, Kind::kNoCredit, "timed out before the server granted a credit; it was not sent");
    }
    FailWaiting(index, Kind::kNotConnected,
                latest_error_.message.empty() ? "timed out before there was a connection"
                                              : "timed out before there was a connection: " + latest_error_.message);
  }

  void OnDeadline() {
    const Instant now = loop_.Now();
    std::optional<Instant> next;
    for (auto entry = waiting_.begin(); entry != waiting_.end();) {
      const uint32_t index = (entry++)->second;
      const std::optional<Instant>& deadline = calls_[index]->deadline;
      if (!deadline) continue;
      if (now >= *deadline) {
        Expire(index);
      } else {
        next = next ? std::min(*next, *deadline) : *deadline;
      }
    }
    const bool forgets = STAGECOACH_MUTANT("session-later-deadline-forgotten",
                                           "a session looks no more at the deadlines behind the first that is over");
    if (next && !forgets) SetDeadline(*next);
  }

  void SetDeadline(Instant when) {
    CancelTimer(&deadline_timer_);
    deadline_at_ = when;
    SetTimer(&deadline_timer_, when, [](SessionImpl& self) { self.OnDeadline(); });
  }

  // Ends a call that is waiting. Its handler runs from the loop.
  void FailWaiting(uint32_t index, Kind kind, std::string_view why) {
    OneCall& call = *calls_[index];
    waiting_.erase(call.sequence);
    CallError error = NamedError(kind, NameOf(call), why);
    error.sent = call.transmissions > 0;
    error.system_error = kind <= Kind::kNotConnected ? latest_error_.system_error : 0;
    TraceEvent("session.given_up",
               {{"xid", uint64_t{call.xid}}, {"sent", uint64_t{error.sent ? 1u : 0u}}, {"why", ToString(error.kind)}});
    ++stats_.calls_failed;
    Defer(index, std::move(error));
  }

  // Last thing to be done: the handler may destroy the Session.
  void Finish(uint32_t index, Result<Reply, CallError> result) {
    if (!IsRpcReply(result)) ++stats_.calls_failed;
    Client::CallHandler handler = std::move(calls_[index]->handler);
    FreeCall(index);
    const auto self = shared_from_this();
    handler(std::move(result));
    Pump();
  }

  // --- Handlers that run later ---

  void Defer(uint32_t index, CallError error) {
    Client::CallHandler handler = std::move(calls_[index]->handler);
    FreeCall(index);
    Refuse(std::move(handler), std::move(error));
  }

  CallId Refuse(Client::CallHandler handler, CallError error) {
    deferred_.push_back({std::move(handler), std::move(error)});
    if (deferred_.size() == 1) {
      loop_.Post([self = shared_from_this()] {
        for (Deferred& each : std::exchange(self->deferred_, {})) each.handler(Err(std::move(each.error)));
      });
    }
    return 0;
  }

  // --- Small things ---

  // Not in use by a call here, nor by a cancelled one that its connection still knows.
  uint32_t NextXid() {
    while (true) {
      const uint32_t xid = xids_.Next();
      const bool known = std::any_of(lanes_.begin(), lanes_.end(),
                                     [&](const Lane& lane) { return lane.client && lane.client->KnowsXid(xid); });
      if (!known && xids_in_use_.insert(xid).second) return xid;
    }
  }

  uint32_t AllocateCall() {
    if (free_calls_.empty()) {
      calls_.push_back(std::make_unique<OneCall>());
      return static_cast<uint32_t>(calls_.size() - 1);
    }
    const uint32_t index = free_calls_.back();
    free_calls_.pop_back();
    return index;
  }

  void FreeCall(uint32_t index) {
    OneCall& call = *calls_[index];
    xids_in_use_.erase(call.xid);
    ReturnBuffer(std::move(call.message.buffer));
    const uint32_t generation = call.generation + 1;
    call = OneCall{};
    call.generation = generation;
    free_calls_.push_back(index);
  }

  CallId IdOf(uint32_t index) const { return (uint64_t{calls_[index]->generation} << 32) | (uint64_t{index} + 1); }
  std::optional<uint32_t> Find(CallId id) const {
    const uint64_t number = id & UINT32_MAX;
    if (number == 0 || number > calls_.size()) return std::nullopt;
    const OneCall& call = *calls_[number - 1];
    if (call.generation != id >> 32 || call.state == State::kFree) return std::nullopt;
    return static_cast<uint32_t>(number - 1);
  }

  std::vector<std::byte> TakeBuffer() {
    if (buffers_.empty()) return {};
    std::vector<std::byte> buffer = std::move(buffers_.back());
    buffers_.pop_back();
    return buffer;
  }
  void ReturnBuffer(std::vector<std::byte> buffer) {
    if (buffers_.size() < kBuffersKept && buffer.size() <= kBufferKeptMax) buffers_.push_back(std::move(buffer));
  }

  CallName NameOf(const ProcedureId& procedure) const {
    return {procedure.program, procedure.version, procedure.procedure, &peer_};
  }
  CallName NameOf(const OneCall& call) const { return NameOf(call.procedure); }

  template <typename F>
  void SetTimer(EventLoop::TimerId* timer, Instant when, F function) {
    *timer = loop_.At(when, [weak = weak_from_this(), timer, function] {
      // The timer is a member, or a member of a lane, of which there are always the same.
      if (auto self = weak.lock()) {
        *timer = 0;
        function(*self);
      }
    });
  }
  void CancelTimer(EventLoop::TimerId* timer) { loop_.Cancel(std::exchange(*timer, 0)); }

  void TraceEvent(std::string_view event, std::initializer_list<TraceFact> facts) const {
    Trace(options_.client.trace, loop_.Now(), options_.client.name, event, facts);
  }

  EventLoop& loop_;
  const std::optional<std::string> options_fault_;
  const SessionOptions options_;
  const std::string host_;
  const uint16_t port_;
  const std::optional<SocketAddress> address_;
  const std::string peer_;
  Prng prng_;
  SequentialXids xids_;
  std::unordered_set<uint32_t> xids_in_use_;
  const std::shared_ptr<VersionMemory> version_memory_;

  BindingRegistry bindings_;
  std::vector<std::unique_ptr<OneCall>> calls_;
  std::vector<uint32_t> free_calls_;
  std::map<uint64_t, uint32_t> waiting_;  // by sequence
  std::vector<Deferred> deferred_;
  std::vector<std::vector<std::byte>> buffers_;

  std::vector<Lane> lanes_;
  size_t latest_lane_ = 0;
  CallError latest_error_;  // of connecting, or of a connection; its message is empty before there was any
  EventLoop::TimerId retry_timer_ = 0;
  Instant retry_at_{};
  EventLoop::TimerId deadline_timer_ = 0;
  Instant deadline_at_{};

  bool closing_ = false;
  bool abandoned_ = false;
  size_t open_lanes_ = 0;  // being closed
  std::vector<UniqueFunction<void()>> on_closed_;
  SessionStats stats_;
};

}  // namespace internal

Session::Session(EventLoop& loop, std::string_view host, uint16_t port, SessionOptions options)
    : impl_(std::make_shared<internal::SessionImpl>(loop, std::string(host), port, std::nullopt, std::move(options))) {}

Session::Session(EventLoop& loop, const sockaddr* address, SessionOptions options)
    : impl_(std::make_shared<internal::SessionImpl>(loop, std::string(), uint16_t{0}, internal::CopyAddress(address),
                                                    std::move(options))) {}

Session::~Session() {
  impl_->Abandon();
}

void Session::Register(const Binding& binding) {
  impl_->Register(binding);
}
CallId Session::Call(const ProcedureId& procedure, ArgsWriter args, const CallOptions& options, CallHandler handler) {
  return impl_->Call(procedure, args, options, std::move(handler));
}
void Session::Cancel(CallId call) {
  impl_->Cancel(call);
}
void Session::Close(UniqueFunction<void()> handler) {
  impl_->Close(std::move(handler));
}
size_t Session::connections() const {
  return impl_->connections();
}
size_t Session::outstanding() const {
  return impl_->outstanding();
}
size_t Session::waiting() const {
  return impl_->waiting();
}
const std::string& Session::peer() const {
  return impl_->peer();
}
SessionStats Session::stats() const {
  return impl_->stats();
}
std::string Session::DebugString() const {
  return impl_->DebugString();
}
EventLoop& Session::loop() const {
  return impl_->loop();
}
UniqueFunction<void()> Session::Canceller(CallId call) {
  return [weak = std::weak_ptr(impl_), call] {
    if (const auto impl = weak.lock()) impl->Cancel(call);
  };
}

}  // namespace stagecoach::rpcrdma
