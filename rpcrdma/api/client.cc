#include "rpcrdma/api/client.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/mark.h"
#include "base/mutant.h"
#include "rpcrdma/api/call_message.h"
#include "rpcrdma/api/errors_internal.h"
#include "rpcrdma/api/lookup.h"
#include "rpcrdma/api/options.h"
#include "rpcrdma/api/reply_storage.h"
#include "rpcrdma/api/resolve.h"
#include "rpcrdma/api/reverse_service.h"
#include "rpcrdma/api/version_memory.h"
#include "rpcrdma/ccp/ccp.h"
#include "rpcrdma/ccp/configuration.h"
#include "rpcrdma/core/connection_terms.h"
#include "rpcrdma/core/duplex.h"
#include "rpcrdma/core/negotiation.h"
#include "rpcrdma/core/requester.h"
#include "rpcrdma/core/ring.h"
#include "rpcrdma/loop/deadline.h"
#include "rpcrdma/verbs/address_text.h"
#include "rpcrdma/verbs/cm_channel.h"
#include "rpcrdma/verbs/connection.h"

namespace stagecoach::rpcrdma {
namespace internal {
namespace {

// What one option says of another.
ClientOptions Completed(ClientOptions options) {
  CompleteInlineThresholds(&options);
  if (options.reverse_services.empty()) {
    // Of version 2 everyone answers something: RDMA2_CONNPROP, and what it does not know or serve.
    options.reverse_credits = options.versions.contains(kRpcRdmaVersion2) ? 1 : 0;
    options.reverse_chunks = false;
  }
  options.reverse_chunks = options.reverse_chunks && options.versions.contains(kRpcRdmaVersion2);
  return options;
}

Connection::Options ConnectionOptions(const ClientOptions& options) {
  Connection::Options result;
  // With windows, each exposed segment costs a bind, and perhaps an invalidation.
  result.queues = SizesForCredits(options.credits, options.memory_windows ? 2 * options.credits + 64 : 0);
  if (options.reverse_credits > 0) AddReverse(options.reverse_credits, &result.queues);
  result.send_size = options.inline_send_max;
  result.receive_size = options.inline_receive_max;
  result.incoming_reads = options.incoming_reads;
  if (options.profile.replies_by_read_chunk || options.reverse_chunks) {
    result.outgoing_reads = options.outgoing_reads;
    result.queues.send_queue += options.outgoing_reads;
  }
  result.memory_windows = options.memory_windows;
  result.name = options.name;
  return result;
}

const CloseCause kCancelled{.kind = CloseCause::Kind::kLocal, .text = "cancelled"};
const CloseCause kDestroyed{.kind = CloseCause::Kind::kLocal, .text = "the client was destroyed"};

// How far an attempt came: of several that failed, the one that came farthest says what kind of failure it is.
int Distance(CloseCause::Kind kind) {
  switch (kind) {
    case CloseCause::Kind::kRejected:
      return 3;
    case CloseCause::Kind::kRefused:
      return 2;
    case CloseCause::Kind::kUnreachable:
    case CloseCause::Kind::kTimedOut:
      return 1;
    default:
      return 0;
  }
}

uint32_t FirstXid(uint32_t wanted) {
  return wanted != 0 ? wanted : std::random_device()();
}

// Cookie of the call that a connection begins with; others are indices.
constexpr uint64_t kProbeCookie = uint64_t{1} << 32;

// Nothing came in answer.
bool IsSilence(CallFailure::Kind kind) {
  using Kind = CallFailure::Kind;
  return kind == Kind::kTimedOut || kind == Kind::kConnectionLost || kind == Kind::kClosed ||
         kind == Kind::kCancelled || kind == Kind::kNoCredit || kind == Kind::kMemory || kind == Kind::kTooLarge;
}

// The server refuses the version and has it in its range, or has an empty range: it only says that it does not speak
// what it was offered.
bool Contradicts(const ErrVers& spoken, uint32_t refused) {
  return spoken.low > spoken.high || (spoken.low <= refused && refused <= spoken.high);
}

// The server was there, and has done nothing: the connection goes on.
bool IsRefusal(CallError::Kind kind) {
  return kind == CallError::Kind::kTransport || kind == CallError::Kind::kBadReply || kind == CallError::Kind::kRpc ||
         kind == CallError::Kind::kDenied;
}

}  // namespace

class ClientConnection final : public ConnectionOwner, public std::enable_shared_from_this<ClientConnection> {
 public:
  ClientConnection(EventLoop& loop, ClientOptions options)
      : loop_(loop),
        resolver_(std::exchange(options.resolver, nullptr)),
        options_fault_(FaultOf(options)),
        options_(Completed(std::move(options))),
        xids_(FirstXid(options_.first_xid)) {
    NewConnection();
  }

  // --- Connecting ---

  void Connect(std::string_view host, uint16_t port, Client::ConnectHandler handler) {
    if (!BeginConnect(FormatHostPort(host, port), std::move(handler))) return;
    if (const auto address = ParseAddress(host, port)) {
      addresses_ = {*address};
      return TryNextAddress();
    }
    lookup_.emplace(loop_, resolver_ ? std::exchange(resolver_, nullptr) : HostResolver(&AskSystem), std::string(host),
                    port, [this](const Lookup::Outcome& resolved) { OnResolved(resolved); });
  }

  void Connect(const sockaddr* address, Client::ConnectHandler handler) {
    if (!BeginConnect(FormatAddress(address), std::move(handler))) return;
    addresses_ = {CopyAddress(address)};
    TryNextAddress();
  }

  void CancelConnect() {
    if (!on_connected_ || connect_cancelled_) return;
    connect_cancelled_ = true;
    lookup_.reset();
    if (channel_ && !connection_->closed()) {
      connection_->Close(/*gracefully=*/false, kCancelled);
    } else {
      Later([this] { OnClosed(kCancelled); });
    }
  }

  void Register(const Binding& binding) { bindings_.Add(binding); }

  // --- Calls ---

  CallId Call(const ProcedureId& procedure, Client::ArgsWriter args, const CallOptions& options,
              Client::CallHandler handler) {
    if (!usable()) return FailLater(std::move(handler), NotConnected());
    CallMessage message{.buffer = requester_->TakeBuffer()};
    if (auto refused =
            MakeCallMessage(NameOf(procedure), args, options, bindings_, options_.message_bytes_max, &message)) {
      requester_->ReturnBuffer(std::move(message.buffer));
      return FailLater(std::move(handler), std::move(*refused));
    }
    Requester::CallSpec spec = SpecOf(message, std::move(message.buffer));
    if (options.timeout > Duration::zero()) spec.deadline = DeadlineAfter(loop_.Now(), options.timeout);
    return Submit(procedure, std::move(spec), options, std::move(handler));
  }

  CallId SendExtension(uint32_t type, std::vector<std::byte> body, Client::ExtensionHandler handler, Duration timeout) {
    const auto fail = [&](CallError error) {
      PostError(std::move(handler), std::move(error));
      return CallId{0};
    };
    if (!usable()) return fail(NotConnected());
    const uint32_t index = AllocatePending();
    Requester::ExtensionSpec spec{.type = type, .body = std::move(body), .cookie = index};
    if (timeout > Duration::zero()) spec.deadline = DeadlineAfter(loop_.Now(), timeout);
    const Result<CallId, SubmitRefusal> id = requester_->SubmitExtension(std::move(spec), loop_.Now());
    if (!id) {
      free_pending_.push_back(index);
      return fail(RefusedCall(id.error(), NameOfExtension(type)));
    }
    pending_[index].extension = type;
    pending_[index].on_extension = std::move(handler);
    AfterCommand();
    return *id;
  }

  CallId Submit(const EncodedCall& call, Client::CallHandler handler) {
    if (!usable()) return FailLater(std::move(handler), NotConnected());
    std::vector<std::byte> copy = requester_->TakeBuffer();
    if (copy.size() < call.message.size) copy.resize(call.message.size);
    CopyBytes(copy, call.message.bytes());
    Requester::CallSpec spec = SpecOf(call.message, std::move(copy));
    spec.deadline = call.deadline;
    spec.xid = call.xid;
    return Submit(call.procedure, std::move(spec), call.options, std::move(handler));
  }

  uint32_t room() const { return usable() ? requester_->room() : 0; }
  bool KnowsXid(uint32_t xid) const { return requester_ && requester_->Knows(xid); }

  void Cancel(CallId call) {
    if (!requester_) return;
    requester_->Cancel(call, loop_.Now());
    AfterCommand();
  }

  void Drop(const std::string& why) {
    connection_->Close(/*gracefully=*/false, {.kind = CloseCause::Kind::kTimedOut, .error = ETIMEDOUT, .text = why});
  }

  void Close(UniqueFunction<void()> handler) {
    if (handler) on_closed_.push_back(std::move(handler));
    closing_ = true;
    lookup_.reset();
    const CloseCause cause{.kind = CloseCause::Kind::kLocal, .text = "closed by this end"};
    if (channel_ && !connection_->closed()) {
      connection_->Close(/*gracefully=*/true, cause);
    } else {
      Later([this, cause] { OnClosed(cause); });
    }
  }

  // ~Client: when this returns, nothing of the connection is left but handlers that the loop will run.
  void Abandon() {
    abandoned_ = true;
    on_lost_ = nullptr;
    lookup_.reset();
    loop_.Cancel(std::exchange(connect_timer_, 0));
    RememberLoss(kDestroyed);
    if (reverse_) reverse_->OnGone();
    if (channel_) connection_->CloseNow();
    channel_.reset();
    if (STAGECOACH_MUTANT("destroy-tells-inside", "~Client tells calls of their end before it returns"))
      DeliverAfterEnd();
    loop_.Post([self = shared_from_this()] { self->DeliverAfterEnd(); });
  }

  bool connected() const { return connection_->established() && phase_ == Phase::kReady; }
  uint32_t version() const { return phase_ != Phase::kReady ? 0 : terms_ ? terms_->version() : kRpcRdmaVersion1; }
  const PropertySet* peer_properties() const { return terms_ ? terms_->peer_set() : nullptr; }
  void UseVersionMemory(std::shared_ptr<VersionMemory> memory) { version_memory_ = std::move(memory); }
  size_t outstanding() const { return requester_ ? requester_->outstanding() : 0; }
  size_t abandoned() const { return requester_ ? requester_->abandoned() : 0; }
  ClientHoldings holdings() const {
    return {.call_records = pending_.size() + (requester_ ? requester_->call_records() : 0),
            .registration_records = connection_->registration_records(),
            .registered_memories = connection_->lasting_regions()};
  }
  const std::string& peer() const { return peer_; }
  const std::optional<ConnectionConfiguration>& configuration() const { return configuration_; }
  ConnectionStats stats() const {
    ConnectionStats stats = past_stats_;
    if (requester_) stats += requester_->stats();
    stats.memory_registered += connection_->lasting_registrations();
    if (configuration_) ++(configuration_->applied ? stats.configured : stats.not_configured);
    if (wrong_lengths_ != nullptr) stats.lengths_wrong += *wrong_lengths_;
    return stats;
  }
  std::optional<Instant> reverse_active_at() const { return reverse_ ? reverse_->active_at() : std::nullopt; }
  ConnectionStats reverse_stats() const { return reverse_ ? reverse_->stats() : ConnectionStats{}; }
  std::string DebugString() const {
    return options_.name + " to " + (peer_.empty() ? "nobody" : peer_) + ": " + connection_->DebugString() + "\n" +
           (requester_ ? requester_->DebugString() : std::string()) +
           (reverse_ ? reverse_->DebugString() : std::string());
  }
  EventLoop& loop() const { return loop_; }
  void OnConnectionLost(UniqueFunction<void(const CallError&)> handler) { on_lost_ = std::move(handler); }

  void OnEachProgress(UniqueFunction<void()> handler) { on_progress_ = std::move(handler); }

  // --- ConnectionOwner ---

  // [pvtdata:4+1]
  std::vector<std::byte> OnDeviceReady() override {
    if (!options_.profile.private_data) return {};
    const auto bytes = EncodePrivateData(MakePrivateData(Capabilities()));
    return {bytes.begin(), bytes.end()};
  }

  // [pvtdata:1+2]
  void OnEstablished(ConstBytes private_data) override {
    if (!options_.profile.private_data) private_data = {};
    const NegotiatedLimits limits = Negotiate(Capabilities(), private_data);
    const std::optional<PrivateData> theirs = FindPrivateData(private_data);
    if (theirs) server_send_ = theirs->send_size;
    Requester::Config config;
    config.credits = options_.credits;
    config.queued_max = options_.queued_calls_max;
    config.limits = MakePlanLimits(Capabilities(), limits);
    config.profile = options_.profile;
    if (options_.profile.padding) config.limits.pad_align = options_.padding_align;
    config.limits.pad_threshold = options_.padding_threshold;
    config.limits.padding_base = options_.profile.padding_base;
    config.reads_max = options_.profile.replies_by_read_chunk ? connection_->outgoing_reads() : 0;
    config.read_bytes_max = options_.read_bytes_max;
    config.lengths_may_be_wrong = !options_.exact_lengths;
    config.name = options_.name;
    config.grown_bytes_max = options_.grown_bytes_max;
    config.resend_executed = options_.resend_executed;
    std::optional<DuplexShares> shares;
    if (attempt_versions_.contains(kRpcRdmaVersion2) || !options_.reverse_services.empty()) {
      shares = DivideForDuplex(connection_->send_arena(), connection_->receive_arena(), options_.credits,
                               options_.reverse_credits);
    }
    if (shares) config.receives = shares->forward_receives;
    if (attempt_versions_.contains(kRpcRdmaVersion2)) {
      if (!shares) {
        return connection_->Close(/*gracefully=*/false,
                                  {.kind = CloseCause::Kind::kDevice,
                                   .error = ENOMEM,
                                   .text = "the device has no buffers for both directions, as version 2 needs them"});
      }
      terms_.emplace(TermsConfig());
      config.terms = &*terms_;
    }
    TraceNegotiated(options_.trace, loop_.Now(), options_.name,
                    {.peer = peer_,
                     .private_data = theirs.has_value(),
                     .limits = limits,
                     .reads = connection_->incoming_reads(),
                     .reverse = shares ? shares->reverse_receives : 0});
    requester_.emplace(config, shares ? shares->forward_send : connection_->send_arena(), connection_->receive_arena(),
                       *connection_, xids_, options_.trace);
    if (shares) {
      reverse_.emplace(loop_,
                       ReverseService::Options{.shares = *shares,
                                               .terms = terms_ ? &*terms_ : nullptr,
                                               .send_inline = limits.send_inline,
                                               .memory = reverse_memory_,
                                               .pool = pool_,
                                               .call_bytes_max = options_.reverse_call_bytes_max,
                                               .message_bytes_max = options_.message_bytes_max,
                                               .reads_max = ReverseReads(),
                                               .services = options_.reverse_services,
                                               .peer = peer_,
                                               .name = options_.name,
                                               .trace = options_.trace},
                       *requester_, *connection_, weak_from_this());
      reverse_->Start();
      connection_->Attach(reverse_->engine());
    } else {
      requester_->Start();
      connection_->Attach(&*requester_);
    }
    if (options_.versions.contains(kRpcRdmaVersion2)) {
      FindVersion();
    } else {
      BeginVersion1();
    }
  }

  void OnProgress() override {
    // What the server calls waits until it is certain that this is the connection.
    const bool was_ready = phase_ == Phase::kReady;
    if (reverse_ && was_ready) reverse_->OnProgress();
    // After ~Client, maybe from one of these handlers, the loop delivers the rest.
    while (requester_ && (!abandoned_ || delivering_after_end_)) {
      std::optional<CallOutcome> outcome = requester_->TakeOutcome(loop_.Now());
      if (!outcome) break;
      Deliver(std::move(*outcome));
    }
    // The answer to the probe may have begun an exchange that was over at once.
    if (phase_ == Phase::kExchanging) LookAtExchange();
    if (reverse_ && !was_ready && phase_ == Phase::kReady && !abandoned_) reverse_->OnProgress();
    if (on_progress_ && !abandoned_) on_progress_();
  }

  // Before the outstanding calls end: they tell why.
  void OnClosing(const CloseCause& cause) override {
    RememberLoss(cause);
    if (reverse_) reverse_->OnGone();
  }

  void OnClosed(const CloseCause& cause) override {
    if (!abandoned_ && (GoOnWithOtherVersion(cause) || GoOnToNextAddress(cause))) return;
    RememberLoss(cause);
    TraceWrongLengthsOnce();
    if (on_connected_) EndConnecting(Err(FailedConnect(cause)));
    if (abandoned_) return;
    if (cause.kind != CloseCause::Kind::kLocal && on_lost_ && phase_ == Phase::kReady) {
      std::exchange(on_lost_, nullptr)(*lost_);
    }
    if (!abandoned_) TellClosed();
  }

 private:
  struct Pending {
    ProcedureId procedure;
    SmallVector<MutableBytes, 2> buffers;
    Client::CallHandler handler;
    // Of an extension's message instead: its type.
    uint32_t extension = 0;
    Client::ExtensionHandler on_extension;
  };
  // Of the connection, once it is established.
  enum class Phase : uint8_t {
    kConnecting,   // not established, or never begun
    kProbing,      // the first call is out, whose answer says which version the connection has
    kExchanging,   // version 2: transport properties
    kConfiguring,  // version 1: CcpClientOptions
    kReady         // whoever waited was told
  };
  struct Deferred {
    Client::CallHandler handler;
    CallError error;
  };

  bool usable() const { return requester_ && connected() && !closing_; }

  void TellConnected() {
    phase_ = Phase::kReady;
    if (options_.versions.contains(kRpcRdmaVersion2)) {
      Trace(options_.trace, loop_.Now(), options_.name, "connection.version", {{"version", uint64_t{version()}}});
    }
    EndConnecting({});
  }

  // Tells whoever waits for the connection.
  void EndConnecting(Result<void, CallError> result) {
    loop_.Cancel(std::exchange(connect_timer_, 0));
    if (on_connected_) std::exchange(on_connected_, nullptr)(std::move(result));
  }

  // connect_timeout is over. While the connection is being made it has its share of that time, and the exchange of
  // properties ends by itself, and well.
  void OnConnectTimeout() {
    connect_timer_ = 0;
    if (lookup_) {
      lookup_.reset();
      return FailLookup(CallError::Kind::kUnreachable, "the name was not resolved in time", ETIMEDOUT);
    }
    if (closing_ || connect_cancelled_) return;  // it ends already, for another reason
    if (phase_ == Phase::kProbing || phase_ == Phase::kConfiguring) EndUnanswered();
  }

  // Mostly the connection is over, or ending: OnClosed goes on.
  void EndUnanswered() {
    connection_->Close(/*gracefully=*/false,
                       {.kind = CloseCause::Kind::kTransport, .error = ETIMEDOUT, .text = "no answer came in time"});
  }

  // --- The version of the connection (docs/decisions/0049) ---

  // [v2:4.2.1+1] The buffers are those that the connection has from the start.
  ConnectionTerms::Config TermsConfig() const {
    ConnectionTerms::Config config;
    config.end = ConnectionTerms::End::kClient;
    config.versions = attempt_versions_;
    config.profile = options_.profile;
    config.extensions = options_.extensions;
    config.own.receive_buffer_size = connection_->receive_arena().slot_size;
    config.own.reverse_requests = ReverseService::SupportOf(options_.reverse_services, ReverseReads());
    config.more = options_.properties;
    config.send_max = connection_->send_arena().slot_size;
    return config;
  }

  // [v2:4.2.2+1] Reads for reverse calls, where those may have chunks.
  uint32_t ReverseReads() const { return options_.reverse_chunks ? connection_->outgoing_reads() : 0; }

  // [v2:7+1] [v2:7+3] [v2:7+4] The first message: a short call that needs no chunks, in the highest version that this
  // connection may have. A connection that can only be of version 1 begins with it, too, if the client speaks version 2
  // as well: it is there because of what became of another one, and the server may be of version 2 all the same.
  void FindVersion() {
    if (!probing() && options_.ccp.enabled) return Configure();
    phase_ = Phase::kProbing;
    CallMessage message{.buffer = requester_->TakeBuffer()};
    // Of no Binding: the reply goes inline, whatever the program.
    const auto refused = MakeCallMessage(
        NameOf(options_.probe), [](XdrWriter&) {}, CallOptions(), BindingRegistry(), options_.message_bytes_max,
        &message);
    STAGECOACH_CHECK(!refused);
    Requester::CallSpec spec = SpecOf(message, std::move(message.buffer));
    spec.deadline = ProbeDeadline();
    spec.cookie = kProbeCookie;
    Trace(options_.trace, loop_.Now(), options_.name, "version.probing",
          {{"version", uint64_t{probing() ? kRpcRdmaVersion2 : kRpcRdmaVersion1}}});
    const Result<CallId, SubmitRefusal> id = requester_->Submit(std::move(spec), loop_.Now());
    if (id) return AfterCommand();
    EndUnasked(RefusedCall(id.error(), NameOf(options_.probe)));
  }

  // A call that the connection begins with was not made, or its answer could not be taken; so nobody can be told of the
  // connection. Of one that has ended already OnClosed says why.
  void EndUnasked(const CallError& error) {
    const bool device = error.kind == CallError::Kind::kMemory;
    connection_->Close(/*gracefully=*/false, {.kind = device ? CloseCause::Kind::kDevice : CloseCause::Kind::kTransport,
                                              .error = device ? ENOMEM : 0,
                                              .text = error.message});
  }

  bool probing() const { return terms_ && terms_->probing(); }

  // [v2:7.2+4] Leaves as much time for version 1 as it takes.
  Instant ProbeDeadline() const {
    if (!probing() || !options_.versions.contains(kRpcRdmaVersion1)) return connect_deadline_;
    const Duration left = std::max(connect_deadline_ - loop_.Now(), Duration::zero());
    const Duration share = left / (1 + addresses_.size() - next_address_);
    return loop_.Now() + std::min(options_.probe_wait, share / 2);
  }

  void OnProbed(const CallOutcome& outcome) {
    const std::optional<CallFailure> failure = outcome.failure;
    const uint32_t answered_in = outcome.answered_in;
    requester_->Release(outcome.call, loop_.Now());
    if (phase_ != Phase::kProbing || abandoned_ || closing_ || connect_cancelled_) return;
    if (failure && IsSilence(failure->kind)) return EndUnanswered();
    const bool refused = failure && failure->kind == CallFailure::Kind::kErrVers;
    if (!probing()) {
      if (refused) return OnVersion1Refused(failure->versions);
      return TellConnected();
    }
    if (!failure && answered_in == kRpcRdmaVersion2) return OnVersion2();
    if (refused) return OnVersion2Refused(failure->versions);
    version_2_ruled_out_ = failure.has_value() || answered_in != kRpcRdmaVersion2;
    // [v2:7.2#1] Who says ERR_CHUNK speaks version 1 alone.
    if (failure && failure->kind == CallFailure::Kind::kErrChunk) return OnVersion2Refused(ErrVers{1, 1});
    const std::string why =
        failure ? FailedCall(*failure, NameOf(options_.probe), NotConnected()).message : "it is of version 1";
    connection_->Close(/*gracefully=*/false, {.kind = CloseCause::Kind::kTransport,
                                              .error = EPROTO,
                                              .text = "the answer to version 2 of RPC-over-RDMA is of no use: " + why});
  }

  // Of a connection that may have more than one: it has engines for both directions.
  void SettleVersion(uint32_t version) {
    terms_->SetVersion(version);
    reverse_->OnVersionSettled();
  }

  // [v2:5.3.4+5] [v2:8.1+1] Properties before any call of the program's.
  void OnVersion2() {
    SettleVersion(kRpcRdmaVersion2);
    if (version_memory_) version_memory_->Forget(Address());
    phase_ = Phase::kExchanging;
    requester_->SendProperties(std::min(DeadlineAfter(loop_.Now(), options_.exchange_wait), connect_deadline_),
                               loop_.Now());
    AfterCommand();
  }

  void LookAtExchange() {
    const std::optional<ExchangeEnd> end = requester_->TakeExchangeEnd();
    if (!end || abandoned_ || closing_ || connect_cancelled_) return;
    Trace(options_.trace, loop_.Now(), options_.name, "properties.exchanged",
          {{"outcome", ToString(*end)},
           {"send_inline", uint64_t{terms_->send_inline()}},
           {"receive_inline", uint64_t{terms_->receive_inline()}}});
    TellConnected();
  }

  // [v2:7.2+2] [v2:7.2+5] The highest version of the range that may be spoken: version 1, on this connection, with the
  // limits that private data gave for that, unless it is that of an older document; or none.
  void OnVersion2Refused(const ErrVers& spoken) {
    version_2_ruled_out_ = true;
    TraceRefusal(kRpcRdmaVersion2, spoken);
    const bool has_version_1 =
        Contradicts(spoken, kRpcRdmaVersion2) || (spoken.low <= kRpcRdmaVersion1 && kRpcRdmaVersion1 <= spoken.high);
    if (!has_version_1 || !options_.versions.contains(kRpcRdmaVersion1)) return EndWithoutVersion(spoken);
    if (!options_.profile.reverse_direction) {
      // This connection has engines for both directions, among which replies by an older document would lose their way:
      // GoOnWithOtherVersion makes one that has not.
      STAGECOACH_MARK("client.older_document_on_a_connection_of_its_own");
      return connection_->Close(/*gracefully=*/false, {.kind = CloseCause::Kind::kTransport,
                                                       .error = EPROTONOSUPPORT,
                                                       .text = "the server does not speak version 2 of RPC-over-RDMA"});
    }
    SettleVersion(kRpcRdmaVersion1);
    if (version_memory_) version_memory_->Remember(Address(), loop_.Now());
    FindVersion();
  }

  // By a server that was remembered not to speak version 2: it is asked after all. So is one that says now that it
  // speaks that, and has said nothing when it was asked: the connection was lost, as it may be on any server's restart.
  // Otherwise it was asked just now.
  void OnVersion1Refused(const ErrVers& spoken) {
    TraceRefusal(kRpcRdmaVersion1, spoken);
    if (version_memory_) version_memory_->Forget(Address());
    const bool has_version_2 = spoken.low <= kRpcRdmaVersion2 && kRpcRdmaVersion2 <= spoken.high;
    if (version_2_ruled_out_ || (offered_version_2_ && !has_version_2)) return EndWithoutVersion(spoken);
    version_1_refused_ = true;
    once_more_ = true;
    connection_->Close(/*gracefully=*/false, {.kind = CloseCause::Kind::kTransport,
                                              .error = EPROTONOSUPPORT,
                                              .text = "the server does not speak version 1 of RPC-over-RDMA"});
  }

  void EndWithoutVersion(const ErrVers& spoken) {
    version_error_ = VersionError(what_, spoken, options_.versions);
    connection_->Close(
        /*gracefully=*/false,
        {.kind = CloseCause::Kind::kTransport, .error = EPROTONOSUPPORT, .text = "no version in common"});
  }

  // [v2:7.2+3] [v2:7.2+4] Whether a connection that might have become one of version 2, and ended before the server had
  // shown that it speaks that, is followed by one of version 1: with version 2 it would end the same way again. Never
  // in its place on the same connection: an answer in version 2 might still come [v2:7.3#2].
  bool GoOnWithOtherVersion(const CloseCause& cause) {
    if (!on_connected_ || closing_ || connect_cancelled_ || version_error_ || phase_ == Phase::kConnecting ||
        cause.kind == CloseCause::Kind::kLocal || cause.kind == CloseCause::Kind::kDevice) {
      return false;
    }
    if (!std::exchange(once_more_, false)) {
      // Nor once the server has refused version 1: there is nothing left that it was not asked in.
      if (!terms_ || !options_.versions.contains(kRpcRdmaVersion1) || version_1_refused_) return false;
      // Who has answered in version 2 speaks it: the connection was lost as any other may be, unless it was for
      // properties that cannot be read.
      if (phase_ == Phase::kExchanging && cause.kind != CloseCause::Kind::kBadProperties) return false;
      version_2_ruled_out_ = version_2_ruled_out_ || phase_ == Phase::kExchanging;
      if (version_memory_) version_memory_->Remember(Address(), loop_.Now());
      version_1_next_ = true;
    }
    if (loop_.Now() >= connect_deadline_) return false;
    Trace(options_.trace, loop_.Now(), options_.name, "version.given_up",
          {{"address", FormatAddress(Address())},
           {"version", uint64_t{version_1_next_ ? kRpcRdmaVersion2 : kRpcRdmaVersion1}},
           {"why", std::string_view(cause.text)}});
    // Later: the connection that is over is on the stack.
    Later([this] {
      if (on_connected_ && !closing_ && !connect_cancelled_ && !abandoned_) TryAddress();
    });
    return true;
  }

  void TraceRefusal(uint32_t version, const ErrVers& spoken) const {
    Trace(options_.trace, loop_.Now(), options_.name, "version.refused",
          {{"version", uint64_t{version}}, {"low", uint64_t{spoken.low}}, {"high", uint64_t{spoken.high}}});
  }

  void BeginVersion1() {
    if (options_.ccp.enabled) {
      Configure();
    } else {
      TellConnected();
    }
  }

  // --- The Connection Configuration Protocol ---

  // [5666:6#3] [5666:6.1#1] [5666:6.1+1] [2004:6.1#1] [2004:6.1+1] The first call of the connection, small enough for
  // any; the next one is made when its reply is in.
  void Configure() {
    phase_ = Phase::kConfiguring;
    asked_ = RequestFor(buffers(), connection_->incoming_reads());
    constexpr ProcedureId kConfigure{kCcpProgram, kCcpVersion, kConfRdma};
    CallOptions options;
    options.credentials = &options_.ccp.credentials;
    CallMessage message{.buffer = requester_->TakeBuffer()};
    const auto refused = MakeCallMessage(
        NameOf(kConfigure), [this](XdrWriter& args) { Encode(asked_, args); }, options, bindings_,
        options_.message_bytes_max, &message);
    STAGECOACH_CHECK(!refused);
    Requester::CallSpec spec = SpecOf(message, std::move(message.buffer));
    spec.deadline = connect_deadline_;
    Submit(kConfigure, std::move(spec), options,
           [this](const Result<Reply, CallError>& result) { OnConfigured(result); });
  }

  void OnConfigured(const Result<Reply, CallError>& result) {
    if (abandoned_ || closing_ || connect_cancelled_) return;
    if (!result && !IsRefusal(result.error().kind)) return EndUnasked(result.error());
    if (!result && result.error().transport_error == kRdma2ErrVers && options_.versions.contains(kRpcRdmaVersion2)) {
      return OnVersion1Refused({result.error().versions.low, result.error().versions.high});
    }
    configuration_.emplace();
    if (result) {
      XdrReader results = result->results();
      if (const auto reply = DecodeConfigRdmaReply(results)) {
        Apply(*reply);
      } else {
        configuration_->why_not = "the results are malformed: " + ToString(reply.error());
      }
    } else {
      configuration_->why_not = result.error().message;
    }
    configuration_->inline_send = requester_->limits().send_inline;
    configuration_->inline_receive = requester_->limits().receive_inline;
    if (!configuration_->applied) {
      STAGECOACH_MARK("client.not_configured");
      TraceNotConfigured(options_.trace, loop_.Now(), options_.name, configuration_->why_not);
    }
    TellConnected();
  }

  void Apply(const ConfigRdmaReply& reply) {
    const ClientTerms terms = TermsOf(reply, asked_, buffers(), server_send_);
    PlanLimits limits = requester_->limits();
    limits.send_inline = terms.send_inline;
    limits.receive_inline = terms.receive_inline;
    // [5666:6.2+2] [2004:6.2+3] What is longer goes at position zero; without Reads not even that: then a call that
    // does not fit inline cannot be made.
    if (!terms.read_chunks) limits.read_segments_max = 0;
    // [5666:6.2#6] [2004:6.2+6] Unless the program has chosen for itself.
    if (options_.profile.padding && options_.padding_align == 0) limits.pad_align = terms.align;
    // [5666:6.2#4] [5666:6.2#5] [2004:6.1#5] [2004:6.1#6]
    requester_->SetLimits(limits, std::min(connection_->outgoing_reads(), terms.reads));
    if (reverse_) reverse_->SetSendInline(terms.send_inline);
    configuration_->applied = true;
    configuration_->read_chunks = terms.read_chunks;
    configuration_->server_reads = terms.reads;
    configuration_->align = terms.align;
    TraceConfigured(options_.trace, loop_.Now(), options_.name,
                    {.send_inline = terms.send_inline,
                     .receive_inline = terms.receive_inline,
                     .reads = terms.read_chunks ? connection_->incoming_reads() : 0,
                     .align = terms.align});
  }

  BufferSizes buffers() const {
    return {.send = connection_->send_arena().slot_size, .receive = connection_->receive_arena().slot_size};
  }

  static Requester::CallSpec SpecOf(const CallMessage& message, std::vector<std::byte> buffer) {
    Requester::CallSpec spec;
    spec.buffer = std::move(buffer);
    spec.message_size = message.size;
    spec.items = message.items;
    spec.longest_inside = message.longest_inside;
    spec.results = message.results;
    spec.lasting = message.lasting;
    spec.reply_base_max = message.reply_base_max;
    spec.direct_placement = message.direct_placement;
    return spec;
  }

  uint32_t AllocatePending() {
    if (free_pending_.empty()) {
      pending_.emplace_back();
      return static_cast<uint32_t>(pending_.size() - 1);
    }
    const uint32_t index = free_pending_.back();
    free_pending_.pop_back();
    return index;
  }

  CallId Submit(const ProcedureId& procedure, Requester::CallSpec&& spec, const CallOptions& options,
                Client::CallHandler handler) {
    const uint32_t index = AllocatePending();
    spec.cookie = index;
    spec.flags = options.transport_flags;
    const Result<CallId, SubmitRefusal> id = requester_->Submit(std::move(spec), loop_.Now());
    if (!id) {
      free_pending_.push_back(index);
      return FailLater(std::move(handler), RefusedCall(id.error(), NameOf(procedure)));
    }
    Pending& pending = pending_[index];
    pending.procedure = procedure;
    pending.buffers = options.result_buffers;
    pending.handler = std::move(handler);
    AfterCommand();
    return *id;
  }

  // [pvtdata:3.2+4] A window may be invalidated by the peer, a region may not.
  LocalCapabilities Capabilities() const {
    return {.send_size = options_.inline_send_max,
            .receive_size = options_.inline_receive_max,
            .remote_invalidation = connection_->uses_windows(),
            .segment_length_max = connection_->segment_length_max()};
  }

  CallName NameOf(const ProcedureId& procedure) const {
    return {procedure.program, procedure.version, procedure.procedure, &peer_};
  }
  CallName NameOfExtension(uint32_t type) const { return {.peer = &peer_, .extension = type}; }

  bool BeginConnect(std::string peer, Client::ConnectHandler handler) {
    if (options_fault_) {
      PostError(std::move(handler), OptionsError("connect to " + peer, *options_fault_));
      return false;
    }
    if (started_) {
      PostError(std::move(handler), ConnectError("connect to " + peer_, {.kind = CloseCause::Kind::kDevice,
                                                                         .text = "this client was used already"}));
      return false;
    }
    started_ = true;
    peer_ = std::move(peer);
    what_ = "connect to " + peer_;
    connect_deadline_ = DeadlineAfter(loop_.Now(), options_.connect_timeout);
    connect_timer_ = loop_.At(connect_deadline_, [weak = weak_from_this()] {
      if (auto self = weak.lock()) self->OnConnectTimeout();
    });
    on_connected_ = std::move(handler);
    return true;
  }

  // Not from inside of what `handler` was given to.
  template <typename Handler>
  void PostError(Handler handler, CallError error) {
    loop_.Post([handler = std::make_shared<Handler>(std::move(handler)), error = std::move(error)] {
      (*handler)(Err(error));
    });
  }

  void OnResolved(const Lookup::Outcome& resolved) {
    lookup_.reset();
    if (resolved) {
      for (const sockaddr_storage& address : *resolved) {
        if (addresses_.size() < kAddressesMax) addresses_.push_back({address});
      }
      if (!addresses_.empty()) return TryNextAddress();
      return FailLookup(CallError::Kind::kResolve, "the name has no address");
    }
    FailLookup(CallError::Kind::kResolve, resolved.error());
  }

  void FailLookup(CallError::Kind kind, const std::string& why, int system_error = 0) {
    CallError error;
    error.kind = kind;
    error.system_error = system_error;
    error.message = what_ + ": " + why;
    EndConnecting(Err(std::move(error)));
  }

  void NewConnection() {
    if (options_.reverse_credits > 0) {
      reverse_memory_ = ReverseService::MakeAllowance(options_.reverse_call_bytes_max);
      pool_ = std::make_shared<BlockPool>(reverse_memory_);
    }
    connection_.emplace(loop_, ConnectionOptions(options_), *this, pool_.get(), options_.trace);
  }

  // What the attempt before had is gone, and nothing of it can be heard any more: its id took its events back, and what
  // the server called was not handed out.
  void ForgetAttempt() {
    if (requester_) past_stats_ += requester_->stats();
    past_stats_.memory_registered += connection_->lasting_registrations();
    past_stats_.credits_granted = 0;
    channel_.reset();
    connection_.reset();
    reverse_.reset();
    requester_.reset();
    terms_.reset();
    NewConnection();
    configuration_.reset();
    server_send_.reset();
    lost_.reset();
    phase_ = Phase::kConnecting;
  }

  const sockaddr* Address() const { return addresses_[next_address_ - 1].get(); }

  void TryNextAddress() {
    ++next_address_;
    offered_version_2_ = false;
    version_2_ruled_out_ = false;
    version_1_refused_ = false;
    TryAddress();
  }

  void TryAddress() {
    if (std::exchange(attempted_, true)) ForgetAttempt();
    const bool version_1_alone =
        std::exchange(version_1_next_, false) || (options_.versions.contains(kRpcRdmaVersion1) && version_memory_ &&
                                                  version_memory_->Knows(Address(), loop_.Now()));
    attempt_versions_ = version_1_alone ? kVersion1Alone : options_.versions;
    offered_version_2_ = offered_version_2_ || !version_1_alone;
    auto channel = CmChannel::Create(loop_);
    if (!channel) {
      const CloseCause cause{
          .kind = CloseCause::Kind::kDevice, .error = channel.error().error, .text = channel.error().ToString()};
      Later([this, cause] { EndConnecting(Err(ConnectError(what_, cause))); });
      return;
    }
    channel_ = std::move(*channel);
    const Duration left = std::max(connect_deadline_ - loop_.Now(), Duration::zero());
    const Duration share = left / (1 + addresses_.size() - next_address_);
    if (options_.trace != nullptr) {
      Trace(options_.trace, loop_.Now(), options_.name, "connect.trying",
            {{"address", FormatAddress(Address())},
             {"left", addresses_.size() - next_address_},
             {"ms", static_cast<uint64_t>(share / 1ms)}});
    }
    connection_->Connect(*channel_, Address(), share);
  }

  // Whether the attempt that ended was not the last one.
  bool GoOnToNextAddress(const CloseCause& cause) {
    if (!on_connected_ || requester_ || cause.kind == CloseCause::Kind::kLocal || next_address_ == 0) return false;
    if (options_.trace != nullptr) {
      Trace(options_.trace, loop_.Now(), options_.name, "connect.failed",
            {{"address", FormatAddress(addresses_[next_address_ - 1].get())}, {"why", cause.text}});
    }
    if (addresses_.size() < 2) return false;
    if (!failed_ || Distance(cause.kind) > Distance(failed_->kind)) failed_ = cause;
    tried_ += (tried_.empty() ? "" : "; ") + FormatAddress(addresses_[next_address_ - 1].get()) + ": " + cause.text;
    if (next_address_ == addresses_.size() || loop_.Now() >= connect_deadline_ || closing_ || connect_cancelled_) {
      failed_->text = tried_;
      return false;
    }
    // Later: the connection that is over is on the stack.
    Later([this] {
      if (on_connected_ && !closing_ && !connect_cancelled_ && !abandoned_) TryNextAddress();
    });
    return true;
  }

  CallError FailedConnect(const CloseCause& cause) const {
    if (version_error_ && !connect_cancelled_) return *version_error_;
    if (!connect_cancelled_ && phase_ != Phase::kConnecting) {
      CloseCause unanswered = cause;
      unanswered.text = fmt::format("the connection ended before the server had answered {}: {}", Asked(), cause.text);
      return ConnectError(what_, unanswered);
    }
    if (!connect_cancelled_) {
      return ConnectError(what_, cause.kind != CloseCause::Kind::kLocal && failed_ ? *failed_ : cause);
    }
    CallError error = ConnectError(what_, kCancelled);
    error.kind = CallError::Kind::kCancelled;
    return error;
  }

  // What nobody was told of the connection for.
  std::string_view Asked() const {
    if (phase_ == Phase::kConfiguring) return "CONF_RDMA";
    if (phase_ == Phase::kExchanging) return "RDMA2_CONNPROP";
    return probing() ? "in version 2 of RPC-over-RDMA" : "its first call";
  }

  CallId FailLater(Client::CallHandler handler, CallError error) {
    deferred_.push({std::move(handler), std::move(error)});
    if (deferred_.size() == 1) Later([this] { DeliverDeferred(); });
    return 0;
  }

  void DeliverDeferred() {
    // Those that fail while these handlers run wait for the next turn.
    for (size_t left = deferred_.size(); left > 0; --left) {
      Deferred deferred = deferred_.pop();
      deferred.handler(Err(std::move(deferred.error)));
    }
    if (!deferred_.empty()) Later([this] { DeliverDeferred(); });
  }

  void Deliver(CallOutcome outcome) {
    if (outcome.cookie == kProbeCookie) return OnProbed(outcome);
    TraceWrongLengthsOnce();
    const auto index = static_cast<uint32_t>(outcome.cookie);
    if (pending_[index].on_extension) return DeliverExtension(std::move(outcome), index);
    const ProcedureId procedure = pending_[index].procedure;
    Client::CallHandler handler = std::move(pending_[index].handler);
    Result<Reply, CallError> result = ResultOf(outcome, NameOf(procedure), pending_[index].buffers);
    requester_->Release(outcome.call, loop_.Now());
    free_pending_.push_back(index);
    if (STAGECOACH_MUTANT("close-forgets-queued", "closing tells a call that waits for a credit nothing") && closing_ &&
        outcome.failure && !outcome.failure->sent) {
      return;
    }
    const bool twice =
        STAGECOACH_MUTANT("complete-twice", "a reply that waits for its fence as the connection ends is failed, too") &&
        lost_ && result;
    handler(std::move(result));
    if (twice) handler(Err(NotConnected()));
    TraceWrongLengthsOnce();
  }

  // Handlers read results, or keep them for others who do: then it is said with the next reply, or at the end.
  void TraceWrongLengthsOnce() {
    if (wrong_lengths_told_ || wrong_lengths_ == nullptr || *wrong_lengths_ == 0) return;
    wrong_lengths_told_ = true;
    Trace(options_.trace, loop_.Now(), options_.name, "connection.lengths_wrong");
  }

  void DeliverExtension(CallOutcome outcome, uint32_t index) {
    const CallName name = NameOfExtension(pending_[index].extension);
    Client::ExtensionHandler handler = std::move(pending_[index].on_extension);
    Result<Extension, CallError> result = Err(CallError());
    if (outcome.failure) {
      CallError error = FailedCall(*outcome.failure, name, lost_ ? *lost_ : NotConnected(), ExtensionsOf(options_));
      error.sent = outcome.failure->sent;
      error.rpcrdma_version = outcome.answered_in;
      result = Err(std::move(error));
    } else {
      STAGECOACH_CHECK(outcome.extension.has_value());
      result = std::move(*outcome.extension);
    }
    requester_->Release(outcome.call, loop_.Now());
    free_pending_.push_back(index);
    handler(std::move(result));
  }

  static const Extensions& ExtensionsOf(const ClientOptions& options) {
    static const Extensions none;
    return options.extensions != nullptr ? *options.extensions : none;
  }

  Result<Reply, CallError> ResultOf(CallOutcome& outcome, const CallName& name,
                                    const SmallVector<MutableBytes, 2>& buffers) {
    if (STAGECOACH_MUTANT("sending-denied", "a call that is lost with its connection is said not to have been sent") &&
        outcome.failure && outcome.failure->kind == CallFailure::Kind::kConnectionLost) {
      return Err(NotConnected());
    }
    const auto failed = [&](CallError error, bool sent) {
      error.sent = sent;
      error.rpcrdma_version = outcome.answered_in;
      return Err(std::move(error));
    };
    if (outcome.failure) {
      return failed(FailedCall(*outcome.failure, name, lost_ ? *lost_ : NotConnected(), ExtensionsOf(options_)),
                    outcome.failure->sent);
    }
    Result<Reply, CallError> reply = ReplyMaker::Make(outcome, name, buffers, wrong_lengths_);
    if (!reply) return failed(std::move(reply.error()), true);
    return reply;
  }

  void AfterCommand() {
    connection_->Kick();
    // A call that failed at once has its outcome already; its handler must not run in here.
    if (requester_->has_outcome() && !progress_posted_) {
      progress_posted_ = true;
      Later([this] {
        progress_posted_ = false;
        if (abandoned_) return;
        OnProgress();
        connection_->Kick();
      });
    }
  }

  template <typename F>
  void Later(F function) {
    loop_.Post([weak = weak_from_this(), function = std::move(function)]() mutable {
      if (auto self = weak.lock()) function();
    });
  }

  CallError NotConnected() const {
    // While the connection is being closed nobody has been told yet, but why is known.
    const CloseCause* cause = connection_->cause();
    if (!lost_ && (cause == nullptr || closing_)) return RefusedCall(SubmitRefusal::kNotConnected, NameOf({}));
    CallError error = lost_ ? *lost_ : LostError(peer_, *cause, outstanding());
    error.kind = CallError::Kind::kNotConnected;
    return error;
  }

  void RememberLoss(const CloseCause& cause) {
    if (!lost_) lost_ = LostError(peer_, cause, outstanding());
  }

  void DeliverAfterEnd() {
    delivering_after_end_ = true;
    OnProgress();
    while (!deferred_.empty()) DeliverDeferred();
    EndConnecting(Err(ConnectError(what_, kDestroyed)));
    TellClosed();
  }

  void TellClosed() {
    for (UniqueFunction<void()>& handler : std::exchange(on_closed_, {})) handler();
  }

  EventLoop& loop_;
  HostResolver resolver_;  // until its thread has it
  const std::optional<std::string> options_fault_;
  const ClientOptions options_;
  SequentialXids xids_;
  BindingRegistry bindings_;
  std::string peer_;
  std::string what_;
  bool started_ = false;
  bool closing_ = false;
  bool abandoned_ = false;
  bool delivering_after_end_ = false;
  bool progress_posted_ = false;

  Instant connect_deadline_;
  bool connect_cancelled_ = false;
  std::optional<uint32_t> server_send_;  // bytes: the longest Send that the server's private data speaks of
  Phase phase_ = Phase::kConnecting;
  ConfigRdmaRequest asked_;
  std::optional<ConnectionConfiguration> configuration_;
  std::vector<SocketAddress> addresses_;
  size_t next_address_ = 0;           // the one after that which is being tried
  std::optional<CloseCause> failed_;  // of several addresses: what came of those tried
  std::string tried_;                 // of each, in words
  std::optional<Lookup> lookup_;
  EventLoop::TimerId connect_timer_ = 0;           // until whoever waits was told
  std::shared_ptr<VersionMemory> version_memory_;  // a Session's; null: its own attempts are all that counts
  TransportVersions attempt_versions_;             // what this connection may be of
  bool attempted_ = false;
  // At the address being tried: the next attempt is of version 1 alone; one was made that was not; what the server made
  // of that was no silence; it refused version 1 and may speak version 2 nevertheless, in which it is to be asked next.
  bool version_1_next_ = false;
  bool offered_version_2_ = false;
  bool version_2_ruled_out_ = false;
  bool version_1_refused_ = false;
  bool once_more_ = false;
  std::optional<CallError> version_error_;
  ConnectionStats past_stats_;  // of attempts before
  // Counted by Replies, which may outlive this. Null where lengths are to be exact.
  const std::shared_ptr<std::atomic<uint64_t>> wrong_lengths_ =
      options_.exact_lengths ? nullptr : std::make_shared<std::atomic<uint64_t>>(0);
  bool wrong_lengths_told_ = false;  // in the trace
  std::unique_ptr<CmChannel> channel_;
  std::shared_ptr<MemoryAllowance> reverse_memory_;
  std::shared_ptr<BlockPool> pool_;       // of reverse calls; the connection's
  std::optional<ConnectionTerms> terms_;  // there is version 2 in attempt_versions_
  std::optional<Requester> requester_;
  std::optional<ReverseService> reverse_;
  std::optional<Connection> connection_;  // always there; before its engines and the channel in destruction

  std::vector<Pending> pending_;
  std::vector<uint32_t> free_pending_;
  Ring<Deferred> deferred_;
  Client::ConnectHandler on_connected_;
  std::vector<UniqueFunction<void()>> on_closed_;
  UniqueFunction<void(const CallError&)> on_lost_;
  UniqueFunction<void()> on_progress_;
  std::optional<CallError> lost_;
};

namespace {

// Makes the stream of a message that of what follows its RPC header, which `reader` has read. False: it ends inside of
// a Read chunk.
bool SkipHeader(const XdrReader& reader, ReducedStream* stream) {
  stream->padding.start += stream->base.size() - reader.base_remaining();
  std::vector<ChunkData>& reads = stream->reads;
  reads.erase(reads.begin(), reads.begin() + static_cast<ptrdiff_t>(std::min(reader.reads_used(), reads.size())));
  for (ChunkData& read : reads) {
    if (read.position < reader.position()) return false;
    read.position -= reader.position();
  }
  return true;
}

}  // namespace

Result<Reply, CallError> ReplyMaker::Make(CallOutcome& outcome, const CallName& name,
                                          const SmallVector<MutableBytes, 2>& buffers,
                                          std::shared_ptr<std::atomic<uint64_t>> wrong_lengths) {
  XdrReader reader(outcome.reply);
  const Result<ReplyHeader, RpcFault> header = DecodeReply(reader);
  if (!header) return Err(BadReply(ToString(header.error()), name));
  if (!header->success()) return Err(RpcError(*header, name));

  Reply reply;
  reply.storage_ = std::make_unique<ReplyStorage>();
  const ConstBytes results = outcome.reply.base.last(reader.base_remaining());
  reply.stream_ = outcome.reply;
  // What stands in the stream by its position has another one in that of the results alone.
  if (!SkipHeader(reader, &reply.stream_)) return Err(BadReply("a chunk lies across its header and its results", name));
  reply.storage_->reply_chunk = std::move(outcome.reply_memory);
  reply.storage_->read_chunks = std::move(outcome.read_memory);
  reply.storage_->grown = std::move(outcome.grown);
  reply.stream_.base = reply.storage_->reply_chunk ? results : reply.storage_->Keep(results);
  reply.storage_->placed = outcome.placed;
  if (wrong_lengths != nullptr) {
    reply.stream_.wrong_lengths = &reply.storage_->wrong_lengths.emplace(std::move(wrong_lengths));
  }
  reply.buffers_ = buffers;
  reply.rpcrdma_version_ = outcome.answered_in;
  return reply;
}

}  // namespace internal

// --- Reply ---

Reply::Reply() = default;
Reply::Reply(Reply&&) noexcept = default;
Reply& Reply::operator=(Reply&&) noexcept = default;
Reply::~Reply() = default;

size_t Reply::placed_bytes(size_t i) const {
  return storage_ && i < storage_->placed.size() ? storage_->placed[i] : 0;
}

ConstBytes Reply::Settle(ConstBytes data, size_t i) const {
  if (i >= buffers_.size() || data.size() > buffers_[i].size()) return data;
  const MutableBytes buffer = buffers_[i];
  if (data.data() != buffer.data()) CopyBytes(buffer, data);
  if (STAGECOACH_MUTANT("result-overrun", "the byte behind a result is written") && data.size() < buffer.size()) {
    buffer[data.size()] = std::byte{1};
  }
  return buffer.first(data.size());
}

// --- Client ---

Client::Client(EventLoop& loop, ClientOptions options)
    : connection_(std::make_shared<internal::ClientConnection>(loop, std::move(options))) {}

Client::~Client() {
  connection_->Abandon();
}

void Client::Connect(std::string_view host, uint16_t port, ConnectHandler handler) {
  connection_->Connect(host, port, std::move(handler));
}
void Client::Connect(const sockaddr* address, ConnectHandler handler) {
  connection_->Connect(address, std::move(handler));
}
void Client::Register(const Binding& binding) {
  connection_->Register(binding);
}
CallId Client::Call(const ProcedureId& procedure, ArgsWriter args, const CallOptions& options, CallHandler handler) {
  return connection_->Call(procedure, args, options, std::move(handler));
}
CallId Client::SendExtension(uint32_t type, std::vector<std::byte> body, ExtensionHandler handler, Duration timeout) {
  return connection_->SendExtension(type, std::move(body), std::move(handler), timeout);
}
void Client::CancelConnect() {
  connection_->CancelConnect();
}
void Client::Cancel(CallId call) {
  connection_->Cancel(call);
}
void Client::Close(UniqueFunction<void()> handler) {
  connection_->Close(std::move(handler));
}
bool Client::connected() const {
  return connection_->connected();
}
size_t Client::outstanding() const {
  return connection_->outstanding();
}
size_t Client::abandoned() const {
  return connection_->abandoned();
}
ClientHoldings Client::holdings() const {
  return connection_->holdings();
}
const std::string& Client::peer() const {
  return connection_->peer();
}
const std::optional<ConnectionConfiguration>& Client::configuration() const {
  return connection_->configuration();
}
uint32_t Client::version() const {
  return connection_->version();
}
const PropertySet* Client::peer_properties() const {
  return connection_->peer_properties();
}
ConnectionStats Client::stats() const {
  return connection_->stats();
}
std::optional<Instant> Client::reverse_active_at() const {
  return connection_->reverse_active_at();
}
ConnectionStats Client::reverse_stats() const {
  return connection_->reverse_stats();
}
std::string Client::DebugString() const {
  return connection_->DebugString();
}
EventLoop& Client::loop() const {
  return connection_->loop();
}
UniqueFunction<void()> Client::ConnectCanceller() {
  return [weak = std::weak_ptr(connection_)] {
    if (const auto connection = weak.lock()) connection->CancelConnect();
  };
}
UniqueFunction<void()> Client::Canceller(CallId call) {
  return [weak = std::weak_ptr(connection_), call] {
    if (const auto connection = weak.lock()) connection->Cancel(call);
  };
}
CallId Client::Submit(const internal::EncodedCall& call, CallHandler handler) {
  return connection_->Submit(call, std::move(handler));
}
uint32_t Client::room() const {
  return connection_->room();
}
bool Client::KnowsXid(uint32_t xid) const {
  return connection_->KnowsXid(xid);
}
void Client::OnProgress(UniqueFunction<void()> handler) {
  connection_->OnEachProgress(std::move(handler));
}
void Client::Drop(const std::string& why) {
  connection_->Drop(why);
}
void Client::UseVersionMemory(std::shared_ptr<internal::VersionMemory> memory) {
  connection_->UseVersionMemory(std::move(memory));
}
void Client::OnConnectionLost(UniqueFunction<void(const CallError&)> handler) {
  connection_->OnConnectionLost(std::move(handler));
}

}  // namespace stagecoach::rpcrdma
