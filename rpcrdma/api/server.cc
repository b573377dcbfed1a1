#include "rpcrdma/api/server.h"

#include <fmt/format.h>
#include <malloc.h>

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "base/mark.h"
#include "base/mutant.h"
#include "rpcrdma/api/dispatch.h"
#include "rpcrdma/api/encode_message.h"
#include "rpcrdma/api/errors_internal.h"
#include "rpcrdma/api/options.h"
#include "rpcrdma/api/registered_memory_internal.h"
#include "rpcrdma/api/request_internal.h"
#include "rpcrdma/api/resolve.h"
#include "rpcrdma/api/reverse_link.h"
#include "rpcrdma/ccp/ccp.h"
#include "rpcrdma/ccp/configuration.h"
#include "rpcrdma/core/connection_terms.h"
#include "rpcrdma/core/duplex.h"
#include "rpcrdma/core/negotiation.h"
#include "rpcrdma/core/responder.h"
#include "rpcrdma/loop/deadline.h"
#include "rpcrdma/verbs/address_text.h"
#include "rpcrdma/verbs/block_pool.h"
#include "rpcrdma/verbs/cm_channel.h"
#include "rpcrdma/verbs/connection.h"
#include "rpcrdma/verbs/listener.h"
#include "rpcrdma/verbs/shared_receives.h"
#include "rpcrdma/wire/refusal.h"

namespace stagecoach::rpcrdma {
namespace internal {
namespace {

// Room for a reply header without results: XID, direction, status, an empty verifier, accept_stat, two versions.
constexpr size_t kReplyHeaderMax = 64;
// How long memory is kept that nobody needs.
constexpr Duration kShrinkInterval = 10s;

// What one option says of another.
ServerOptions Completed(ServerOptions options) {
  CompleteInlineThresholds(&options);
  options.ccp.inline_send_max = std::max(options.inline_send_max, InlineThreshold(options.ccp.inline_send_max));
  options.ccp.inline_receive_max =
      std::max(options.inline_receive_max, InlineThreshold(options.ccp.inline_receive_max));
  // One call always fits, into however many chunks it is divided: each is in a block of its own.
  const uint64_t division_max = uint64_t{options.chunk_limits.read_segments_max} * BlockPool::kSmallest;
  const uint64_t call_max = options.call_bytes_max + division_max;
  options.bytes_max = std::max(options.bytes_max, call_max);
  // The other half is for others, of the memory and of the places.
  options.client_bytes_max = std::max(std::min(options.client_bytes_max, options.bytes_max / 2), call_max);
  if (options.address_connections_max == 0) {
    options.address_connections_max = options.clients_max / 2 + options.clients_max % 2;
  }
  return options;
}

Connection::Options ConnectionOptions(const ServerOptions& options, ClientId client,
                                      std::shared_ptr<SharedReceives> shared) {
  Connection::Options result;
  result.shared = std::move(shared);
  // RDMA Reads, and a few RDMA Writes ahead of each Send; more wait for room.
  result.queues = SizesForCredits(options.credits, options.outgoing_reads + 2 * options.credits + 64);
  if (options.profile.replies_by_read_chunk) {
    // A Receive for each RDMA_DONE.
    result.queues.receives += options.exposed_replies_max;
    result.incoming_reads = options.incoming_reads;
  }
  if (options.reverse_credits > 0 && result.shared == nullptr) {
    AddReverse(options.reverse_credits, &result.queues);
    // The version is not known yet. [v2:8.4.1+1] Reverse calls of version 2 have memory that the client reads.
    if (options.versions.contains(kRpcRdmaVersion2)) {
      result.incoming_reads = options.incoming_reads;
      result.memory_windows = options.memory_windows;
      // With windows, each exposed segment costs a bind, and perhaps an invalidation.
      result.queues.send_queue += 2 * options.reverse_credits + 64;
    }
  }
  result.send_size = options.inline_send_max;
  result.receive_size = options.inline_receive_max;
  result.receive_align = options.receive_align;
  result.outgoing_reads = options.outgoing_reads;
  result.always_busy = true;
  result.name = options.name + "/" + std::to_string(client);
  return result;
}

}  // namespace

class ServerConnection;

// The program by which clients configure their connections: each call is for the connection that it came by.
class CcpService final : public Service {
 public:
  explicit CcpService(ServerImpl& server) : server_(server) {}

  uint32_t program() const override { return kCcpProgram; }
  VersionRange versions() const override { return {kCcpVersion, kCcpVersion}; }
  std::span<const AuthFlavor> flavors() const override;
  void Handle(Request request) override;
  // Of another connection it would be another one that is configured.
  bool idempotent(uint32_t, uint32_t) const override { return true; }

 private:
  ServerImpl& server_;
};

// Why connection requests are rejected: how that is said to the client, traced, counted, and said to people.
struct Rejection {
  Refusal::Reason reason;
  std::string_view traced;  // empty: what the device said
  std::string_view option;
  uint64_t ServerStats::Rejected::*count;
  std::string_view why;  // with a limit: what there are at most so many of
};
using Rejected = ServerStats::Rejected;
constexpr Rejection kRejections[] = {
    {Refusal::Reason::kStopping, "the server stops", "", &Rejected::stopping, "the server is about to stop"},
    {Refusal::Reason::kClients, "clients_max", "clients_max", &Rejected::clients_max, "clients at a time"},
    {Refusal::Reason::kAddressConnections, "address_connections_max", "address_connections_max",
     &Rejected::address_connections_max, "connections from one address, or one /64 network of IPv6"},
    {Refusal::Reason::kReceives, "no shared Receive is left", "shared_receives", &Rejected::receives,
     "shared Receives, which are promised to others"},
    {Refusal::Reason::kDevice, "", "", &Rejected::device, "the device has no resources for it"},
};

// What exists, of clients that are gone included: a ServerConnection whose Requests somebody holds still has its
// memory.
struct Alive {
  size_t connections = 0;
  size_t requests = 0;
};

// What the connections of one address (SourceOf) share. Lives as long as any of them.
struct Address {
  Address(const ServerOptions& options, std::shared_ptr<MemoryTotal> total)
      : requests_max(options.address_requests_max),
        memory(std::make_shared<MemoryAllowance>(options.client_bytes_max, std::move(total))),
        credits(std::make_shared<CreditBudget>(options.address_requests_max, 0)) {}

  const size_t requests_max;
  const std::shared_ptr<MemoryAllowance> memory;
  const std::shared_ptr<CreditBudget> credits;
  size_t connections = 0;
  size_t executing = 0;           // requests with services
  std::deque<ClientId> waiting;   // connections with a request to execute, in the order of their turns
  std::function<void()> on_room;  // somebody who waits may have a turn: see ServerImpl::GiveTurns
};

// The part of a server that its connections need; outlives them by shared ownership.
class ServerImpl final : public std::enable_shared_from_this<ServerImpl> {
 public:
  ServerImpl(EventLoop& loop, ServerOptions options)
      : loop_(loop),
        options_fault_(FaultOf(options)),
        options_(Completed(std::move(options))),
        memory_(std::make_shared<MemoryTotal>(options_.bytes_max)),
        replay_cache_(options_.replay, options_.trace, options_.name + "/replay"),
        reverse_(std::make_shared<ReverseHub>(loop, FirstXid(), options_.trace, options_.name)) {
    if (options_.ccp.enabled) services_[kCcpProgram] = &ccp_;
    memory_->OnKept([this] { ArmShrinkTimer(); });
  }
  ~ServerImpl() { memory_->OnKept(nullptr); }

  void Register(Service* service) {
    services_[service->program()] = service;
    for (const Binding& binding : service->bindings()) bindings_.Add(binding);
  }

  Result<void, CallError> Listen(const sockaddr* address);
  uint16_t port() const { return listener_ ? listener_->port() : 0; }
  std::optional<sockaddr_storage> address() const {
    return listener_ ? std::optional(listener_->address()) : std::nullopt;
  }
  void Stop(Duration grace, UniqueFunction<void()> done);
  void Shutdown();
  ServerStats stats() const;
  ServerHoldings holdings() const;
  std::string DebugString() const;

  // --- For connections ---
  EventLoop& loop() { return loop_; }
  const ServerOptions& options() const { return options_; }
  const std::map<uint32_t, Service*>& services() const { return services_; }
  const BindingRegistry& bindings() const { return bindings_; }
  bool stopping() const { return stopping_; }
  bool over() const { return over_; }
  const std::shared_ptr<Alive>& alive() const { return alive_; }
  ReplayCache& replay_cache() { return replay_cache_; }
  std::string ReplayIdentity(const std::string& host, const CallHeader& header) const {
    return options_.replay_identity ? options_.replay_identity(host, header) : host;
  }
  // Null when it is gone.
  ServerConnection* connection(ClientId client) const {
    const auto found = connections_.find(client);
    return found != connections_.end() ? found->second.get() : nullptr;
  }
  void CountWait() { ++stats_.requests_waited; }
  void CountIdle() { ++stats_.clients_idle; }
  const std::shared_ptr<ReverseHub>& reverse() const { return reverse_; }
  void OnEstablished(ServerConnection& connection);
  void OnClosed(ServerConnection& connection, const CloseCause& cause, bool was_established);

  UniqueFunction<void(const std::string&)> on_client_connected;
  UniqueFunction<void(const std::string&, const std::string&, const ConnectionStats&)> on_client_gone;
  UniqueFunction<void(const RefusedClient&)> on_client_refused;

 private:
  uint32_t FirstXid() const {
    return options_.first_xid != 0 || options_.reverse_credits == 0 ? options_.first_xid : std::random_device()();
  }
  void OnRequest(verbs::CmId id, const CmEvent& request);
  // Without an id its rejection is under way. `limit`: what the option says.
  void Reject(rdma_cm_id* id, const std::string& peer, Refusal::Reason reason, uint32_t limit = 0,
              std::string_view of_device = {});
  void TellOfRefusal(const Rejection& rejection, const std::string& peer, uint32_t limit);
  std::shared_ptr<Address> AddressOf(const std::string& host);
  std::shared_ptr<SharedReceives> SharedReceivesOf(ibv_context* device);
  void GiveTurns(const std::shared_ptr<Address>& address);
  void GiveMemory(const std::shared_ptr<Address>& address);
  void ArmShrinkTimer();
  void Shrink();
  void FinishStopIfIdle();
  void TellStopped();

  EventLoop& loop_;
  const std::optional<std::string> options_fault_;
  const ServerOptions options_;
  const std::shared_ptr<MemoryTotal> memory_;  // of all addresses
  ReplayCache replay_cache_;
  const std::shared_ptr<ReverseHub> reverse_;
  CcpService ccp_{*this};
  std::map<uint32_t, Service*> services_;
  BindingRegistry bindings_;
  std::unique_ptr<CmChannel> channel_;
  std::unique_ptr<Listener> listener_;
  std::map<ClientId, std::shared_ptr<ServerConnection>> connections_;
  const std::shared_ptr<Alive> alive_ = std::make_shared<Alive>();
  std::map<std::string, std::weak_ptr<Address>> addresses_;
  // Of each device that a connection came by; null where they are not shared.
  std::vector<std::pair<ibv_context*, std::shared_ptr<SharedReceives>>> shared_receives_;
  ClientId next_client_ = 1;
  ServerStats stats_;  // of connections that are gone, and counters
  struct Untold {
    std::optional<Instant> told;  // when one was, if ever
    uint64_t count = 0;           // since then
  };
  std::map<Refusal::Reason, Untold> untold_;
  bool stopping_ = false;
  bool over_ = false;
  EventLoop::TimerId grace_timer_ = 0;
  EventLoop::TimerId shrink_timer_ = 0;
  bool has_lost_clients_ = false;  // since Shrink
  std::vector<UniqueFunction<void()>> on_stopped_;
};

class ServerConnection final : public ConnectionOwner,
                               public RequestHost,
                               public std::enable_shared_from_this<ServerConnection> {
 public:
  ServerConnection(ServerImpl& server, ClientId id, std::string host, std::shared_ptr<Address> address,
                   std::shared_ptr<SharedReceives> shared)
      : server_(&server),
        alive_(server.alive()),
        loop_(server.loop()),
        id_(id),
        message_bytes_max_(server.options().message_bytes_max),
        host_(std::move(host)),
        address_(std::move(address)),
        pool_(std::make_shared<BlockPool>(address_->memory)),
        shared_(std::move(shared)),
        connection_(loop_, ConnectionOptions(server.options(), id, shared_), *this, pool_.get(),
                    server.options().trace) {
    ++alive_->connections;
    ++address_->connections;
    pool_->on_turn = [this] { OnMemoryTurn(); };
  }
  ~ServerConnection() override {
    CancelIdleTimer();
    // Buffers may outlive us.
    pool_->on_turn = nullptr;
    pool_->StopWaiting();
    --address_->connections;
    --alive_->connections;
  }

  ClientId id() const override { return id_; }
  const std::string& peer() const override { return peer_; }
  bool connected() const override { return server_ != nullptr && connection_.established(); }
  uint32_t rpcrdma_version() const override { return terms_->version(); }

  // Takes the id of a connection request as far as accepting it.
  verbs::VerbsResult<void> Accept(verbs::CmId id, const CmEvent& request) {
    const ServerOptions& options = server_->options();
    // The event's bytes are only there until the id is adopted.
    const std::optional<PrivateData> theirs =
        options.profile.private_data ? FindPrivateData(request.private_data) : std::nullopt;
    if (auto adopted = connection_.Adopt(std::move(id), request); !adopted) return adopted;
    peer_ = connection_.PeerAddress();

    // [pvtdata:3.2+3]
    // A responder of version 1 with private data exposes nothing, so whatever it exposes may be invalidated; and its
    // device can send with invalidate.
    const LocalCapabilities own{.send_size = options.inline_send_max,
                                .receive_size = options.inline_receive_max,
                                .remote_invalidation = true,
                                .segment_length_max = connection_.segment_length_max()};
    const NegotiatedLimits limits = Negotiate(MakePrivateData(own), theirs);
    std::optional<DuplexShares> shares;
    if (options.reverse_credits > 0 && shared_ == nullptr) {
      shares = DivideForDuplex(connection_.send_arena(), connection_.receive_arena(), options.credits,
                               options.reverse_credits);
    }
    // [v2:1+1] [v2:7.1+1] Whichever version the first message has, of those that this port takes. [v2:4.2.2+5] Of a
    // server the level is said of replies to its calls: it takes them as it makes its calls.
    const bool exposes = shares && connection_.incoming_reads() > 0;
    terms_.emplace(ConnectionTerms::Config{
        .end = ConnectionTerms::End::kServer,
        .versions = options.versions,
        .profile = options.profile,
        .list_limits = options.chunk_limits,
        .extensions = options.extensions,
        .own = {.receive_buffer_size = connection_.receive_arena().slot_size,
                .reverse_requests = exposes ? ReverseSupport::kGeneral : ReverseSupport::kInline},
        .more = options.properties,
        .send_max = connection_.send_arena().slot_size});
    Responder::Config config;
    config.terms = &*terms_;
    if (options.versions.contains(kRpcRdmaVersion2)) {
      config.answer_extension = [this](const Extension& message) { return AnswerExtension(message); };
    }
    config.send_inline = limits.send_inline;
    config.may_invalidate = limits.remote_invalidation;
    config.can_invalidate = true;
    config.reads_max = connection_.outgoing_reads();
    config.list_limits = options.chunk_limits;
    config.data_limits = {.read_bytes_max = options.call_bytes_max, .write_bytes_max = options.call_offer_bytes_max};
    config.reply_chunk_use = options.reply_chunk_use;
    config.profile = options.profile;
    // A client that can read nothing is answered as if there were no such replies, and is granted no more for that.
    config.exposes = connection_.incoming_reads() > 0;
    if (options.profile.replies_by_read_chunk) {
      // Where the device has fewer Receives than would be liked, they are for calls first.
      const uint32_t slots = connection_.receive_arena().slots;
      const uint32_t spare = slots > options.credits ? slots - options.credits : std::min(1u, slots - 1);
      config.exposed_max = std::min(options.exposed_replies_max, spare);
    }
    config.exposed_bytes_max = options.exposed_bytes_max;
    config.exposed_time = options.exposed_time;
    config.data_time = options.data_time;
    config.data_rate_min = options.data_rate_min;
    config.segment_length_max = connection_.segment_length_max();
    config.budgets = {address_->credits};
    if (shared_ != nullptr) {
      config.shared_receives = true;
      config.receives = connection_.receive_arena().slots - 1;
      config.budgets.push_back(shared_->budget());
    }
    config.name = TraceName();
    if (shares) config.receives = shares->forward_receives;
    config.one_receive_first = options.ccp.enabled && shared_ == nullptr && !shares;
    TraceNegotiated(options.trace, loop_.Now(), config.name,
                    {.peer = peer_,
                     .private_data = theirs.has_value(),
                     .limits = limits,
                     .reads = connection_.outgoing_reads(),
                     .reverse = shares ? shares->reverse_receives : 0});
    responder_.emplace(config, shares ? shares->forward_send : connection_.send_arena(), connection_.receive_arena(),
                       connection_, options.trace);
    if (shares) {
      reverse_.emplace(loop_,
                       ReverseLink::Options{.shares = *shares,
                                            .terms = &*terms_,
                                            .limits = MakePlanLimits(own, limits),
                                            .readable = exposes,
                                            .name = config.name,
                                            .trace = options.trace},
                       connection_, *responder_, server_->reverse()->xids(), [this] { AfterCommand(); });
      reverse_->Start();
      connection_.Attach(reverse_->engine());
    } else {
      responder_->Start();
      connection_.Attach(&*responder_);
    }
    if (!options.profile.private_data) return connection_.Accept({});
    const auto private_data = EncodePrivateData(MakePrivateData(own));
    return connection_.Accept(private_data);
  }

  // What would be CONF_RDMA if it were not denied.
  bool IsConfRdma(const CallHeader& call) const {
    return server_->options().ccp.enabled && !terms_->is_v2() && call.prog == kCcpProgram && call.vers == kCcpVersion &&
           call.proc == kConfRdma;
  }

  // [5666:6+1] [2004:6+2] A call of CcpService.
  void Configure(Request request) {
    const auto self = shared_from_this();
    // Its sizes are those of version 1: version 2 has properties.
    if (terms_->is_v2()) return request.Fail(AcceptStat::kProgUnavail);
    switch (request.procedure()) {
      case kCcpNull:
        return request.Reply();
      case kConfRdma:
        break;
      default:
        return request.Fail(AcceptStat::kProcUnavail);
    }
    const ServerOptions& options = server_->options();
    const auto asked = DecodeConfigRdmaRequest(request.args());
    if (!asked) {
      CountNotConfigured("the arguments are malformed");
      return request.Fail(AcceptStat::kGarbageArgs);
    }
    // What is in progress was begun under the limits that hold now, and the client would not know which of its calls
    // were the last under them.
    if (configured_ || responder_->unanswered() != 1 || (reverse_ && reverse_->outstanding() > 0)) {
      CountNotConfigured(configured_ ? "the connection was configured before" : "other calls are in progress");
      return request.Fail(AcceptStat::kSystemErr);
    }
    configured_ = true;
    const bool replaced = ReplaceBuffers(request.state_->id, *asked);
    const BufferSizes buffers{.send = connection_.send_arena().slot_size,
                              .receive = connection_.receive_arena().slot_size};
    // [5666:6.2+5] [2004:6.2+6] Not where padding would be taken for data.
    const uint32_t align = options.profile.padding && options.receive_align > 1 ? options.receive_align : 0;
    const ServerTerms terms =
        TermsFor(*asked, buffers, connection_.outgoing_reads(), connection_.incoming_reads(), align);
    responder_->SetLimits(terms.send_inline, terms.reads, terms.exposes && connection_.incoming_reads() > 0);
    if (reverse_) reverse_->SetSendInline(terms.send_inline);
    TraceConfigured(options.trace, loop_.Now(), TraceName(),
                    {.send_inline = terms.send_inline,
                     .receive_inline = buffers.receive,
                     .reads = terms.reads,
                     .align = terms.reply.align,
                     .new_buffers = replaced});
    // All Receives are posted ahead of it.
    request.Reply([&](XdrWriter& results) { rpcrdma::Encode(terms.reply, results); });
    // The call was read from one of those before.
    connection_.DropReplacedBuffers();
  }

  // Finishes what is in progress, then disconnects.
  void Stop(Instant deadline) {
    stopping_ = true;
    stop_deadline_ = deadline;
    DisconnectIfIdle();
  }
  void Disconnect(std::string why) {
    connection_.Close(/*gracefully=*/false, {.kind = CloseCause::Kind::kLocal, .text = std::move(why)});
  }
  void CloseNow() {
    STAGECOACH_CHECK(!answering_);  // ExtensionHandler: it must not destroy the Server
    connection_.CloseNow();
    if (reverse_) reverse_->EndCancelled();
    CancelIdleTimer();
    server_ = nullptr;
  }

  // One request, when it is this connection's turn.
  void TakeTurn() {
    waits_for_turn_ = false;
    if (server_ == nullptr || stopping_ || server_->over()) return;
    TakeRequest();
    if (responder_->has_request()) WaitForTurn();
    AfterCommand();
  }

  ConnectionStats stats() const {
    ConnectionStats stats = responder_ ? responder_->stats() : ConnectionStats{};
    stats.registrations += pool_->registrations();
    stats.memory_registered += connection_.lasting_registrations();
    stats.configured += configured_ ? 1 : 0;
    stats.not_configured += not_configured_;
    return stats;
  }

  ConnectionStats reverse_stats() const { return reverse_ ? reverse_->stats() : ConnectionStats{}; }

  BlockPool::Holdings pool_holdings() const { return pool_->holdings(); }
  uint64_t ShrinkPool() { return pool_->Shrink(); }
  size_t buffer_bytes() const { return connection_.buffer_bytes(); }
  size_t registration_records() const { return connection_.registration_records(); }
  size_t registered_memories() const { return connection_.lasting_regions(); }

  std::string DebugString() const {
    return "  client " + std::to_string(id_) + ": " + connection_.DebugString() + "; requests executing " +
           std::to_string(executing_) + "; memory " + std::to_string(pool_->bytes_used()) + " of " +
           std::to_string(pool_->allowance().bytes_max()) + " bytes\n" +
           (responder_ ? responder_->DebugString() : std::string()) +
           (reverse_ ? reverse_->DebugString() : std::string());
  }

  // --- RequestHost ---

  std::optional<uint64_t> result_room(RequestId id, size_t i) const override { return responder_->result_room(id, i); }

  Block* Allocate(size_t bytes) override { return pool_->Allocate(bytes); }
  const std::shared_ptr<BlockPool>& pool() const override { return pool_; }

  void Finish(RequestState& state, const ReplyHeader& header, Request::ResultsWriter results,
              std::shared_ptr<const void> memory, bool copy_items) override {
    if (!Encode(state, header, results, std::move(memory), copy_items)) {
      // Results that do not fit the limit, that XDR cannot express, or that are not where they were said to be.
      Encode(
          state, ErrorReply(responder_->xid(state.id), AcceptStat::kSystemErr), [](XdrWriter&) {}, nullptr, false);
    }
    OnAnswered();
    AfterCommand();
  }

  // Answers a call of this connection that came again with the reply of the one that was executed, or had been. False
  // when the reply cannot be expressed; nothing happened then.
  bool AnswerAgain(RequestId id, ConstBytes message, Responder::ReplySpec&& reply) {
    if (!responder_->open(id)) return true;
    std::vector<std::byte>& buffer = responder_->reply_buffer(id);
    if (buffer.size() < message.size()) buffer.resize(message.size());
    CopyBytes(buffer, message);
    reply.message_size = message.size();
    return responder_->Complete(id, std::move(reply), loop_.Now()).has_value();
  }
  // The same for one that waited for it.
  bool AnswerJoined(RequestId id, ConstBytes message, Responder::ReplySpec&& reply) {
    if (!AnswerAgain(id, message, std::move(reply))) return false;
    OnJoinedEnded();
    return true;
  }
  // It will not be answered: one like it came later.
  void DropJoined(RequestId id) {
    responder_->Drop(id, "the call came again", loop_.Now());
    OnJoinedEnded();
  }

  uint32_t xid(RequestId id) const override { return responder_->xid(id); }
  uint32_t flags(RequestId id) const override { return responder_->flags(id); }

  // --- ConnectionOwner ---

  std::vector<std::byte> OnDeviceReady() override { return {}; }

  void OnEstablished(ConstBytes) override {
    established_ = true;
    if (server_ == nullptr) return;
    if (reverse_) server_->reverse()->Add(id_, &*reverse_);
    last_heard_ = loop_.Now();
    ArmIdleTimer();
    server_->OnEstablished(*this);
  }

  void OnProgress() override {
    if (!responder_) return;
    TraceVersionOnce();
    if (reverse_) reverse_->OnProgress();
    if (const uint64_t heard = responder_->signs_of_life() + reverse_stats().receives; heard != heard_) {
      heard_ = heard;
      last_heard_ = loop_.Now();
    }
    TryMemory();
    // Calls that arrive while the server stops are left to the disconnect: their client knows that they were not
    // answered.
    dispatching_ = true;
    while (server_ != nullptr && !stopping_ && !server_->over() && !waits_for_turn_ && responder_->has_request()) {
      if (address_->executing >= address_->requests_max || !address_->waiting.empty()) {
        server_->CountWait();
        Trace(server_->options().trace, loop_.Now(), server_->options().name, "client.waits",
              {{"peer", peer_}, {"executing", address_->executing}, {"waiting", address_->waiting.size()}});
        WaitForTurn();
        break;
      }
      TakeRequest();
      if (DropsThisClient()) {
        dispatching_ = false;
        return Disconnect("dropped by a mutant");
      }
    }
    dispatching_ = false;
    DisconnectIfIdle();
  }

  void OnClosing(const CloseCause& cause) override {
    if (!reverse_) return;
    reverse_->OnClosing(cause);
    if (server_ != nullptr) server_->reverse()->Remove(id_);
  }

  void OnClosed(const CloseCause& cause) override {
    CancelIdleTimer();
    pool_->StopWaiting();
    if (server_ != nullptr) std::exchange(server_, nullptr)->OnClosed(*this, cause, established_);
  }

 private:
  std::string TraceName() const { return server_->options().name + "/" + std::to_string(id_); }

  // Once it is settled.
  void TraceVersionOnce() {
    if (version_told_ || server_ == nullptr || !terms_->settled()) return;
    version_told_ = true;
    if (terms_->versions().contains(kRpcRdmaVersion2)) {
      TraceVersion(server_->options().trace, loop_.Now(), TraceName(), *terms_);
    }
  }

  // [v2:9.3+2] Only what this end's extensions have is sent; of headers the responder sees to that.
  Header::Body AnswerExtension(const Extension& message) {
    const auto& handlers = server_->options().answer_extension;
    const auto handler = handlers.find(message.type);
    if (handler == handlers.end()) return ErrInvalHtype{};
    answering_ = true;
    ExtensionAnswer answer = handler->second({.message = message, .client = id_, .properties = terms_->peer_set()});
    answering_ = false;
    if (answer) return std::move(*answer);
    if (terms_->extensions().FindError(answer.error().code) == nullptr) {
      STAGECOACH_MARK("server.extension_error_is_unknown");
      return ErrSystem{};
    }
    return answer.error();
  }

  void CountNotConfigured(std::string_view why) {
    STAGECOACH_MARK("server.not_configured");
    ++not_configured_;
    TraceNotConfigured(server_->options().trace, loop_.Now(), TraceName(), why);
  }

  // Gives the connection the buffers that `asked` takes, as far as it may have others now, and they can be had. Whether
  // it has others.
  bool ReplaceBuffers(RequestId call, const ConfigRdmaRequest& asked) {
    if (!responder_->may_adopt_buffers(call) || !connection_.may_replace_buffers()) return false;
    const CcpServerOptions& most = server_->options().ccp;
    const BufferSizes wanted = BuffersFor(asked, {.send = most.inline_send_max, .receive = most.inline_receive_max});
    const BufferSizes before{.send = connection_.send_arena().slot_size,
                             .receive = connection_.receive_arena().slot_size};
    if (wanted == before) return false;
    if (const auto done = connection_.ReplaceBuffers(wanted.send, wanted.receive); !done) {
      STAGECOACH_MARK("server.buffers_not_replaced");
      Trace(server_->options().trace, loop_.Now(), TraceName(), "buffers.refused",
            {{"send", uint64_t{wanted.send}}, {"receive", uint64_t{wanted.receive}}, {"why", done.error().ToString()}});
      return false;
    }
    responder_->AdoptBuffers(connection_.send_arena(), connection_.receive_arena());
    return true;
  }

  // A simulation numbers the lives of a server in its name: "a/server-2" was started again.
  bool DropsThisClient() const {
    return STAGECOACH_MUTANT("restart-drops-client",
                             "a server that was started again drops its first client at that client's third request") &&
           server_ != nullptr && id_ == 1 && server_->options().name.back() > '1' && responder_->stats().calls >= 3;
  }

  void TakeRequest() {
    const std::optional<RequestId> id = responder_->TakeRequest(loop_.Now());
    if (!id) return;
    ++executing_;
    ++alive_->requests;
    ++address_->executing;
    Dispatch(*id);
  }

  void WaitForTurn() {
    waits_for_turn_ = true;
    address_->waiting.push_back(id_);
  }

  // Calls that wait for memory get what was freed.
  void TryMemory() {
    if (pool_->TakeFreed()) responder_->OnMemoryFreed(loop_.Now());
    const uint64_t before = std::exchange(given_memory_, responder_->given_memory());
    if (!pool_->waiting()) return;
    if (responder_->waiting_for_memory() == 0) {
      pool_->StopWaiting();
    } else if (given_memory_ != before) {
      pool_->PassTurn();
    }
  }

  // Others of this address have freed some.
  void OnMemoryTurn() {
    responder_->OnMemoryFreed(loop_.Now());
    AfterCommand();
  }

  void ArmIdleTimer() {
    if (server_->options().idle_timeout <= Duration(0)) return;
    idle_timer_ = loop_.At(DeadlineAfter(last_heard_, server_->options().idle_timeout), [this] {
      idle_timer_ = 0;
      OnIdleTimer();
    });
  }
  void OnIdleTimer() {
    if (server_ == nullptr || !connection_.established()) return;
    const Instant now = loop_.Now();
    // Somebody who waits for an answer is not idle; somebody who has us wait may be.
    if (responder_->busy() || (reverse_ && reverse_->outstanding() > 0)) last_heard_ = now;
    if (now - last_heard_ < server_->options().idle_timeout) return ArmIdleTimer();
    server_->CountIdle();
    Trace(server_->options().trace, now, server_->options().name, "client.idle", {{"peer", peer_}});
    connection_.Close(/*gracefully=*/true, {.kind = CloseCause::Kind::kLocal, .text = "the client was idle"});
  }
  void CancelIdleTimer() {
    if (idle_timer_ != 0) loop_.Cancel(std::exchange(idle_timer_, 0));
  }

  void Dispatch(RequestId id) {
    auto state = std::make_unique<RequestState>();
    state->connection = shared_from_this();
    state->id = id;
    state->args = XdrReader(responder_->stream(id));
    const Verdict verdict = Judge(server_->services(), responder_->xid(id), *state);
    if (verdict.service != nullptr) {
      if (const auto refused = Bind(server_->bindings(), responder_->stream(id), *state)) {
        TraceNotServed(*state, "a chunk for an item that is not eligible");
        return Finish(
            *state, ErrorReply(xid(id), *refused), [](XdrWriter&) {}, nullptr, false);
      }
      if (server_->replay_cache().enabled() && !verdict.service->idempotent(state->header.vers, state->header.proc) &&
          !BeginRecord(*state)) {
        return;
      }
      return verdict.service->Handle(Request(std::move(state)));
    }
    if (verdict.reply) {
      TraceNotServed(*state, ToString(*verdict.reply));
      if (verdict.denied != AuthStat::kOk && IsConfRdma(state->header)) CountNotConfigured(ToString(verdict.denied));
      return Finish(
          *state, *verdict.reply, [](XdrWriter&) {}, nullptr, false);
    }
    OnAnswered();
    responder_->Drop(id, "not an RPC call", loop_.Now());
  }

  // False: the call is not to be executed, and has been answered or waits for one like it.
  bool BeginRecord(RequestState& state) {
    ReplayCache::Key key{
        .client = server_->ReplayIdentity(host_, state.header),
        .xid = state.header.xid,
        .program = state.header.prog,
        .version = state.header.vers,
        .procedure = state.header.proc,
        .digest = DigestCall(state.header, responder_->stream(state.id), static_cast<size_t>(state.args.position()))};
    const ReplayCache::Verdict verdict = server_->replay_cache().OnCall(key, {id_, state.id}, loop_.Now());
    if (const auto* fresh = std::get_if<ReplayCache::Fresh>(&verdict)) {
      state.server = server_->weak_from_this();
      state.record = fresh->record;
      return true;
    }
    OnAnswered();
    if (const auto* joined = std::get_if<ReplayCache::Joined>(&verdict)) {
      ++joined_;
      if (joined->dropped) {
        if (ServerConnection* other = server_->connection(joined->dropped->connection)) {
          other->DropJoined(joined->dropped->request);
        }
      }
    } else if (const auto* replay = std::get_if<ReplayCache::Replay>(&verdict)) {
      const std::shared_ptr<const ReplyBody>& reply = replay->reply;
      const bool answered = AnswerAgain(state.id, reply->message, {.items = reply->items, .memory = reply});
      STAGECOACH_CHECK(answered);  // it was expressed once
    } else {
      std::array<std::byte, kReplyHeaderMax> buffer;
      XdrWriter out(buffer);
      EncodeReply(ErrorReply(state.header.xid, AcceptStat::kSystemErr), out);
      const bool answered = AnswerAgain(state.id, out.written(), {});
      STAGECOACH_CHECK(out.ok() && answered);
    }
    return false;
  }

  bool Encode(RequestState& state, const ReplyHeader& header, Request::ResultsWriter results,
              std::shared_ptr<const void> memory, bool copy_items) {
    std::vector<std::byte>& buffer = responder_->reply_buffer(state.id);
    const auto encoded = EncodeMessage(&buffer, message_bytes_max_, state.eligible_results, [&](XdrWriter& out) {
      EncodeReply(header, out);
      results(out);
    });
    if (!encoded) return false;
    return Send(state, ConstBytes(buffer).first(encoded->size), encoded->items, std::move(memory), copy_items);
  }

  // Sends what is in the reply buffer, to where it is wanted by now. False when it cannot be expressed; nothing
  // happened then.
  bool Send(RequestState& state, ConstBytes message, const EligibleItems& eligible, std::shared_ptr<const void> memory,
            bool copy_items) {
    // Of the reply that the service gave; not of one that says that it cannot be sent.
    LastingMemory* const lasting = memory != nullptr ? state.lasting.get() : nullptr;
    if (lasting != nullptr && !std::all_of(eligible.begin(), eligible.end(),
                                           [&](const EligibleItem& item) { return lasting->Contains(item.data); })) {
      return false;
    }
    const auto server = state.record != nullptr ? state.server.lock() : nullptr;
    std::shared_ptr<const ReplyBody> body;
    if (server != nullptr && !server->over()) {
      uint64_t bytes = message.size();
      for (const EligibleItem& item : eligible) bytes += item.data.size();
      if (server->replay_cache().Keeps(bytes)) body = std::make_shared<ReplyBody>(message, eligible);
    }
    Responder::ReplySpec reply{
        .message_size = message.size(), .items = eligible, .memory = std::move(memory), .lasting = lasting};
    if (copy_items && !reply.items.empty()) {
      if (body != nullptr) {
        reply.items = body->items;
        reply.memory = body;
      } else {
        reply.memory = CopyItems(&reply.items);
      }
    }
    if (server == nullptr || server->over()) {
      return responder_->Complete(state.id, std::move(reply), loop_.Now()).has_value();
    }
    const ReplayCache::Place place = server->replay_cache().place(state.record);
    if (place == ReplayCache::Place{id_, state.id}) {
      if (!responder_->Complete(state.id, std::move(reply), loop_.Now())) return false;
    } else {
      if (ServerConnection* other = server->connection(place.connection)) {
        STAGECOACH_MARK("server.reply_goes_to_the_call_that_came_again");
        if (!other->AnswerJoined(place.request, message, std::move(reply))) return false;
      } else {
        STAGECOACH_MARK("server.call_that_came_again_is_gone");
      }
      responder_->Drop(state.id, "the call came again", loop_.Now());
    }
    if (place != ReplayCache::Place{id_, state.id} &&
        STAGECOACH_MUTANT("replay-record-held", "a call that is answered elsewhere is in progress for ever")) {
      return true;
    }
    server->replay_cache().OnReply(std::exchange(state.record, nullptr), std::move(body), loop_.Now());
    return true;
  }

  // No service hears of the call; the answer says why.
  void TraceNotServed(const RequestState& state, std::string_view why) {
    if (server_ == nullptr) return;
    Trace(server_->options().trace, loop_.Now(), TraceName(), "call.not_served",
          {{"request", state.id}, {"xid", uint64_t{xid(state.id)}}, {"why", why}});
  }

  void OnAnswered() {
    --executing_;
    --alive_->requests;
    --address_->executing;
    if (!address_->waiting.empty() && address_->on_room) address_->on_room();
  }

  void OnJoinedEnded() {
    STAGECOACH_CHECK(joined_ > 0);
    --joined_;
    AfterCommand();
  }

  // Replies come from handlers, inside OnProgress, or later from the loop. Then nobody else takes the commands. What an
  // ExtensionHandler did waits until the connection has handed over what is coming in.
  void AfterCommand() {
    if (answering_) return ProgressLater();
    TryMemory();
    connection_.Kick();
    if (stopping_) DisconnectIfIdle();
    // The memory of this call may have been all that another one waited for, without anything that is still to come in
    // from the device.
    if (!dispatching_ && !waits_for_turn_ && responder_->has_request()) ProgressLater();
    // A reverse call may be over at once.
    if (reverse_ && reverse_->has_outcome()) ProgressLater();
  }

  void ProgressLater() {
    if (std::exchange(progress_posted_, true)) return;
    loop_.Post([weak = weak_from_this()] {
      const auto self = weak.lock();
      if (!self) return;
      self->progress_posted_ = false;
      self->OnProgress();
      self->connection_.Kick();
    });
  }

  void DisconnectIfIdle() {
    if (answering_) return ProgressLater();
    if (!stopping_ || executing_ + joined_ > 0 || disconnecting_ || (reverse_ && reverse_->outstanding() > 0)) return;
    // Replies that wait for a send buffer get one when Sends have completed, and this is looked at again.
    if (responder_ && responder_->replies_waiting() > 0 && connection_.established()) return;
    disconnecting_ = true;
    connection_.Close(/*gracefully=*/true, {.kind = CloseCause::Kind::kLocal, .text = "the server stopped"},
                      std::max(stop_deadline_ - loop_.Now(), Duration(0)));
  }

  ServerImpl* server_;                  // null once the server has forgotten this connection
  const std::shared_ptr<Alive> alive_;  // shared: a Request may outlive the server
  EventLoop& loop_;
  const ClientId id_;
  const uint32_t message_bytes_max_;
  const std::string host_;  // the peer's, without the port
  const std::shared_ptr<Address> address_;
  std::string peer_;
  bool established_ = false;
  bool stopping_ = false;
  Instant stop_deadline_{};
  bool disconnecting_ = false;
  bool dispatching_ = false;  // calls are being handed out further up the stack
  bool answering_ = false;    // an ExtensionHandler is further up the stack
  bool progress_posted_ = false;
  bool waits_for_turn_ = false;
  uint64_t heard_ = 0;  // signs of life, when last_heard_ was set
  Instant last_heard_{};
  EventLoop::TimerId idle_timer_ = 0;
  size_t executing_ = 0;       // requests handed out
  size_t joined_ = 0;          // calls that wait for the reply to one that is the same
  uint64_t given_memory_ = 0;  // to calls that waited for it, when that was last looked at
  bool configured_ = false;
  uint64_t not_configured_ = 0;  // calls of the Connection Configuration Protocol that were refused
  std::shared_ptr<BlockPool> pool_;
  const std::shared_ptr<SharedReceives> shared_;
  std::optional<ConnectionTerms> terms_;
  bool version_told_ = false;  // in the trace
  std::optional<Responder> responder_;
  std::optional<ReverseLink> reverse_;
  Connection connection_;  // destroyed before its engines
};

// [5666:11#9]
std::span<const AuthFlavor> CcpService::flavors() const {
  return server_.options().ccp.flavors;
}

void CcpService::Handle(Request request) {
  if (ServerConnection* connection = server_.connection(request.client())) connection->Configure(std::move(request));
}

// --- ServerImpl ---

Result<void, CallError> ServerImpl::Listen(const sockaddr* address) {
  const std::string what = "listen on " + FormatAddress(address);
  if (options_fault_) return Err(OptionsError(what, *options_fault_));
  if (options_.ccp.enabled && services_.at(kCcpProgram) != &ccp_) {
    return Err(
        OptionsError(what, fmt::format("ServerOptions::ccp.enabled is true, and must be false where a Service has "
                                       "its program, {}",
                                       kCcpProgram)));
  }
  const auto fail = [&](const verbs::VerbsError& error) {
    return Err(ConnectError(what, {.kind = CloseCause::Kind::kDevice, .error = error.error, .text = error.ToString()}));
  };
  if (channel_ != nullptr) {
    return Err(ConnectError(what, {.kind = CloseCause::Kind::kDevice, .text = "this server was used already"}));
  }
  auto channel = CmChannel::Create(loop_);
  if (!channel) return fail(channel.error());
  auto listener =
      Listener::Listen(**channel, address, options_.backlog,
                       [this](verbs::CmId id, const CmEvent& request) { OnRequest(std::move(id), request); });
  if (!listener) return fail(listener.error());
  channel_ = std::move(*channel);
  listener_ = std::move(*listener);
  return {};
}

void ServerImpl::Reject(rdma_cm_id* id, const std::string& peer, Refusal::Reason reason, uint32_t limit,
                        std::string_view of_device) {
  const Rejection& rejection = *std::find_if(std::begin(kRejections), std::end(kRejections),
                                             [&](const Rejection& each) { return each.reason == reason; });
  ++stats_.clients_rejected;
  ++(stats_.rejected.*rejection.count);
  Trace(options_.trace, loop_.Now(), options_.name, "client.rejected",
        {{"peer", peer}, {"why", rejection.traced.empty() ? of_device : rejection.traced}, {"limit", uint64_t{limit}}});
  if (id != nullptr) {
    const auto words = EncodeRefusal({.reason = reason, .limit = limit});
    rdma_reject(id, words.data(), static_cast<uint8_t>(words.size()));
  }
  TellOfRefusal(rejection, peer, limit);
}

void ServerImpl::TellOfRefusal(const Rejection& rejection, const std::string& peer, uint32_t limit) {
  if (!on_client_refused) return;
  Untold& untold = untold_[rejection.reason];
  if (untold.told && loop_.Now() < DeadlineAfter(*untold.told, options_.refusals_told_every)) {
    ++untold.count;
    return;
  }
  untold.told = loop_.Now();
  RefusedClient refused{
      .peer = peer,
      .why = limit > 0 ? fmt::format("at most {} {}", limit, rejection.why) : std::string(rejection.why),
      .option = rejection.option,
      .untold = std::exchange(untold.count, 0)};
  // Whoever is told may destroy the Server.
  loop_.Post([weak = weak_from_this(), refused = std::move(refused)] {
    const auto self = weak.lock();
    if (self != nullptr && self->on_client_refused) self->on_client_refused(refused);
  });
}

std::shared_ptr<Address> ServerImpl::AddressOf(const std::string& host) {
  std::erase_if(addresses_, [](const auto& each) { return each.second.expired(); });
  std::weak_ptr<Address>& known = addresses_[host];
  if (auto address = known.lock()) return address;
  auto address = std::make_shared<Address>(options_, memory_);
  // Room is made deep inside of handlers; turns are given from the loop.
  const auto later = [weak = weak_from_this(), about = std::weak_ptr<Address>(address)](auto give) {
    return [weak, about, give, posted = std::make_shared<bool>(false)] {
      const auto self = weak.lock();
      if (self == nullptr || self->over_ || std::exchange(*posted, true)) return;
      self->loop_.Post([weak, about, give, posted] {
        *posted = false;
        const auto server = weak.lock();
        const auto address = about.lock();
        if (server != nullptr && address != nullptr && !server->over_) (server.get()->*give)(address);
      });
    };
  };
  address->on_room = later(&ServerImpl::GiveTurns);
  address->memory->OnFreed(later(&ServerImpl::GiveMemory));
  known = address;
  return address;
}

std::shared_ptr<SharedReceives> ServerImpl::SharedReceivesOf(ibv_context* device) {
  if (options_.shared_receives == 0 || device == nullptr) return nullptr;
  for (const auto& [known, shared] : shared_receives_) {
    if (known == device) return shared;
  }
  auto created = SharedReceives::Create(device, options_.shared_receives, options_.inline_receive_max);
  if (created) {
    Trace(options_.trace, loop_.Now(), options_.name, "receives.shared", {{"receives", uint64_t{(*created)->slots()}}});
  } else {
    Trace(options_.trace, loop_.Now(), options_.name, "receives.not_shared", {{"why", created.error().ToString()}});
  }
  return shared_receives_.emplace_back(device, created ? std::move(*created) : nullptr).second;
}

void ServerImpl::GiveTurns(const std::shared_ptr<Address>& address) {
  while (!over_ && address->executing < address->requests_max && !address->waiting.empty()) {
    const ClientId client = address->waiting.front();
    address->waiting.pop_front();
    const auto found = connections_.find(client);
    if (found == connections_.end()) continue;
    const std::shared_ptr<ServerConnection> connection = found->second;
    connection->TakeTurn();
  }
}

void ServerImpl::GiveMemory(const std::shared_ptr<Address>& address) {
  BlockPool* const pool = address->memory->first_waiting();
  if (pool != nullptr && pool->on_turn) pool->on_turn();
}

// While any pool keeps something, and once after a connection has gone.
void ServerImpl::ArmShrinkTimer() {
  if (over_ || shrink_timer_ != 0) return;
  shrink_timer_ = loop_.At(loop_.Now() + kShrinkInterval, [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (self == nullptr) return;
    self->shrink_timer_ = 0;
    self->Shrink();
  });
}

void ServerImpl::Shrink() {
  uint64_t bytes = 0;
  for (const auto& [client, connection] : connections_) bytes += connection->ShrinkPool();
  if (bytes > 0) Trace(options_.trace, loop_.Now(), options_.name, "memory.returned", {{"bytes", bytes}});
#ifdef __GLIBC__
  // What was freed is still the process's. It takes the allocator's locks for a moment, so not for little.
  constexpr uint64_t kWorthwhile = 1u << 20;
  if (std::exchange(has_lost_clients_, false) || bytes >= kWorthwhile) malloc_trim(0);
#endif
  if (memory_->bytes_kept() > 0) ArmShrinkTimer();
}

void ServerImpl::OnRequest(verbs::CmId id, const CmEvent& request) {
  const std::string peer = FormatAddress(rdma_get_peer_addr(id.get()));
  using Reason = Refusal::Reason;
  if (stopping_ || over_) return Reject(id.get(), peer, Reason::kStopping);
  if (alive_->connections >= options_.clients_max) {
    return Reject(id.get(), peer, Reason::kClients, options_.clients_max);
  }
  const std::string host = FormatHost(rdma_get_peer_addr(id.get()));
  const std::shared_ptr<Address> address =
      AddressOf(SourceOf(rdma_get_peer_addr(id.get()), rdma_get_local_addr(id.get())));
  if (address->connections >= options_.address_connections_max) {
    return Reject(id.get(), peer, Reason::kAddressConnections, options_.address_connections_max);
  }
  const std::shared_ptr<SharedReceives> shared = SharedReceivesOf(id->verbs);
  if (shared != nullptr && shared->budget()->free() == 0) {
    return Reject(id.get(), peer, Reason::kReceives, shared->slots());
  }
  const ClientId client = next_client_++;
  auto connection = std::make_shared<ServerConnection>(*this, client, host, address, shared);
  if (auto accepted = connection->Accept(std::move(id), request); !accepted) {
    Reject(nullptr, peer, Reason::kDevice, 0, accepted.error().ToString());
    connection->CloseNow();
    return;
  }
  connections_.emplace(client, std::move(connection));
}

void ServerImpl::OnEstablished(ServerConnection& connection) {
  const auto self = shared_from_this();  // whoever is told may destroy the Server
  ++stats_.clients_total;
  ++stats_.clients;
  for (const auto& [program, service] : services_) {
    service->OnClientConnected(connection.id(), connection.peer());
    if (over_) return;
  }
  if (on_client_connected) on_client_connected(connection.peer());
}

void ServerImpl::OnClosed(ServerConnection& connection, const CloseCause& cause, bool was_established) {
  const auto self = shared_from_this();  // as above
  const auto found = connections_.find(connection.id());
  if (found == connections_.end()) return;
  // Called from inside the connection: the loop destroys it.
  loop_.Post([keep = std::move(found->second)] {});
  has_lost_clients_ = true;
  ArmShrinkTimer();
  connections_.erase(found);
  const ConnectionStats stats = connection.stats();
  stats_.connections += stats;
  stats_.reverse += connection.reverse_stats();
  stats_.reverse.credits_granted = 0;
  stats_.connections.credits_granted = 0;
  if (was_established) {
    --stats_.clients;
    for (const auto& [program, service] : services_) {
      service->OnClientGone(connection.id());
      if (over_) return;
    }
    if (on_client_gone) on_client_gone(connection.peer(), cause.text, stats);
  }
  FinishStopIfIdle();
}

void ServerImpl::Stop(Duration grace, UniqueFunction<void()> done) {
  const auto self = shared_from_this();  // as above
  if (done) on_stopped_.push_back(std::move(done));
  if (!std::exchange(stopping_, true)) {
    // Not from inside the listener's own event: its channel also serves the connections.
    loop_.Post([weak = weak_from_this()] {
      if (auto self = weak.lock()) self->listener_.reset();
    });
  }
  Trace(options_.trace, loop_.Now(), options_.name, "server.stopping",
        {{"clients", connections_.size()}, {"grace_ms", static_cast<uint64_t>(std::max(grace, Duration(0)) / 1ms)}});
  reverse_->Stop();
  const Instant deadline = DeadlineAfter(loop_.Now(), grace);
  auto connections = connections_;
  for (auto& [client, connection] : connections) connection->Stop(deadline);
  if (over_) return;
  if (grace_timer_ != 0) loop_.Cancel(grace_timer_);
  grace_timer_ = loop_.At(deadline, [weak = weak_from_this()] {
    auto self = weak.lock();
    if (!self) return;
    self->grace_timer_ = 0;
    auto connections = self->connections_;
    Trace(self->options_.trace, self->loop_.Now(), self->options_.name, "server.grace_over",
          {{"clients", connections.size()}});
    for (auto& [client, connection] : connections)
      connection->Disconnect("the server stopped before the call was done");
  });
  loop_.Post([weak = weak_from_this()] {
    if (auto self = weak.lock()) self->FinishStopIfIdle();
  });
}

void ServerImpl::FinishStopIfIdle() {
  if (!stopping_ || !connections_.empty()) return;
  if (grace_timer_ != 0) loop_.Cancel(std::exchange(grace_timer_, 0));
  TellStopped();
}

void ServerImpl::TellStopped() {
  if (on_stopped_.empty()) return;
  Trace(options_.trace, loop_.Now(), options_.name, "server.stopped");
  const auto handlers = std::make_shared<std::vector<UniqueFunction<void()>>>(std::exchange(on_stopped_, {}));
  loop_.Post([handlers] {
    for (UniqueFunction<void()>& done : *handlers) done();
  });
}

// ~Server: when this returns, no connection is left; Requests keep theirs as an empty shell.
void ServerImpl::Shutdown() {
  over_ = true;
  if (grace_timer_ != 0) loop_.Cancel(std::exchange(grace_timer_, 0));
  if (shrink_timer_ != 0) loop_.Cancel(std::exchange(shrink_timer_, 0));
  reverse_->Shutdown();
  for (auto& [client, connection] : connections_) {
    connection->CloseNow();
    // One of its handlers may be what destroys the server.
    loop_.Post([keep = connection] {});
  }
  connections_.clear();
  // Requests may hold buffers of them.
  for (const auto& [device, shared] : shared_receives_) {
    if (shared != nullptr) shared->Close();
  }
  listener_.reset();
  channel_.reset();
  TellStopped();
}

ServerStats ServerImpl::stats() const {
  ServerStats stats = stats_;
  for (const auto& [client, connection] : connections_) {
    stats.connections += connection->stats();
    stats.reverse += connection->reverse_stats();
  }
  stats.replay = replay_cache_.stats();
  return stats;
}

ServerHoldings ServerImpl::holdings() const {
  ServerHoldings holdings{.connections = alive_->connections, .requests = alive_->requests};
  for (const auto& [client, connection] : connections_) {
    const BlockPool::Holdings pool = connection->pool_holdings();
    holdings.pool_blocks += pool.blocks;
    holdings.pool_bytes += pool.bytes;
    holdings.registered_bytes += pool.registered_bytes;
    holdings.registered_blocks += pool.registered_blocks;
    holdings.buffer_bytes += connection->buffer_bytes();
    holdings.registration_records += connection->registration_records();
    holdings.registered_memories += connection->registered_memories();
  }
  for (const auto& [device, shared] : shared_receives_) {
    if (shared == nullptr) continue;
    holdings.registered_memories += shared->regions().size();
    holdings.shared_receives += shared->slots();
    holdings.shared_receives_posted += shared->posted();
    holdings.shared_receives_reserved += shared->budget()->reserved();
  }
  return holdings;
}

std::string ServerImpl::DebugString() const {
  std::string text = options_.name + ": " +
                     (stopping_   ? "stopping"
                      : listener_ ? "listening"
                                  : "not listening") +
                     "; clients " + std::to_string(connections_.size());
  if (const ServerHoldings now = holdings(); now.shared_receives > 0) {
    text += "; shared receives posted " + std::to_string(now.shared_receives_posted) + " of " +
            std::to_string(now.shared_receives) + ", promised " + std::to_string(now.shared_receives_reserved);
  }
  text += "\n";
  for (const auto& [client, connection] : connections_) text += connection->DebugString();
  return text;
}

}  // namespace internal

// --- Buffer ---

Buffer::Buffer() = default;
Buffer::Buffer(Buffer&& other) noexcept
    : pool_(std::move(other.pool_)),
      block_(std::exchange(other.block_, nullptr)),
      bytes_(std::exchange(other.bytes_, {})) {}
Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this == &other) return *this;
  if (block_ != nullptr) pool_->FreeByService(block_);
  pool_ = std::move(other.pool_);
  block_ = std::exchange(other.block_, nullptr);
  bytes_ = std::exchange(other.bytes_, {});
  return *this;
}
Buffer::~Buffer() {
  if (block_ != nullptr) pool_->FreeByService(block_);
}

// --- Request ---

Request::Request(std::unique_ptr<internal::RequestState> state) : state_(std::move(state)) {}
Request::Request(Request&&) noexcept = default;
Request& Request::operator=(Request&& other) noexcept {
  if (this == &other) return *this;
  if (state_) Fail(AcceptStat::kSystemErr);
  state_ = std::move(other.state_);
  return *this;
}
Request::~Request() {
  if (state_) Fail(AcceptStat::kSystemErr);
}

uint32_t Request::program() const {
  return state_->header.prog;
}
uint32_t Request::version() const {
  return state_->header.vers;
}
uint32_t Request::procedure() const {
  return state_->header.proc;
}
const CallHeader& Request::header() const {
  return state_->header;
}
ClientId Request::client() const {
  return state_->connection->id();
}
const std::string& Request::peer() const {
  return state_->connection->peer();
}
bool Request::connected() const {
  return state_->connection->connected();
}
uint32_t Request::rpcrdma_version() const {
  return state_->connection->rpcrdma_version();
}
uint32_t Request::transport_flags() const {
  return state_->connection->flags(state_->id);
}
XdrReader& Request::args() {
  return state_->args;
}

std::optional<uint64_t> Request::result_room(size_t i) const {
  if (i >= state_->eligible_results) return std::nullopt;
  return state_->connection->result_room(state_->id, i);
}

std::optional<Buffer> Request::Allocate(size_t bytes) {
  internal::Block* block = state_->connection->Allocate(bytes);
  if (block == nullptr) return std::nullopt;
  Buffer buffer;
  buffer.pool_ = state_->connection->pool();
  buffer.block_ = block;
  buffer.bytes_ = MutableBytes(block->storage.get(), bytes);
  return buffer;
}

void Request::Reply() {
  Reply([](XdrWriter&) {}, std::shared_ptr<const void>());
}

void Request::Reply(ResultsWriter results) {
  STAGECOACH_CHECK(state_ != nullptr);
  const auto state = std::move(state_);
  state->connection->Finish(*state, SuccessReply(state->connection->xid(state->id)), results, nullptr, true);
}

void Request::Reply(ResultsWriter results, Buffer memory) {
  Reply(results, std::shared_ptr<const void>(std::make_shared<Buffer>(std::move(memory))));
}

void Request::Reply(ResultsWriter results, std::shared_ptr<const void> memory) {
  STAGECOACH_CHECK(state_ != nullptr);
  const auto state = std::move(state_);
  state->connection->Finish(*state, SuccessReply(state->connection->xid(state->id)), results, std::move(memory), false);
}

void Request::Reply(ResultsWriter results, const RegisteredMemory& memory) {
  STAGECOACH_CHECK(state_ != nullptr);
  if (!memory) return Reply(results);
  state_->lasting = internal::RegisteredMemoryAccess::Of(memory);
  Reply(results, std::shared_ptr<const void>(state_->lasting));
}

void Request::Fail(AcceptStat stat) {
  STAGECOACH_CHECK(state_ != nullptr);
  const auto state = std::move(state_);
  state->connection->Finish(
      *state, ErrorReply(state->connection->xid(state->id), stat), [](XdrWriter&) {}, nullptr, false);
}

void Request::Deny(AuthStat stat) {
  STAGECOACH_CHECK(state_ != nullptr);
  const auto state = std::move(state_);
  state->connection->Finish(
      *state, AuthErrorReply(state->connection->xid(state->id), stat), [](XdrWriter&) {}, nullptr, false);
}

// --- Server ---

Server::Server(EventLoop& loop, ServerOptions options)
    : impl_(std::make_shared<internal::ServerImpl>(loop, std::move(options))) {}

Server::~Server() {
  impl_->Shutdown();
}

void Server::Register(Service* service) {
  impl_->Register(service);
}

Result<void, CallError> Server::Listen(std::string_view host, uint16_t port) {
  auto addresses = internal::ResolveHost(std::string(host), port);
  if (!addresses) {
    CallError error;
    error.kind = CallError::Kind::kResolve;
    error.message = "listen on " + internal::FormatHostPort(host, port) + ": " + addresses.error();
    return Err(std::move(error));
  }
  return impl_->Listen(addresses->front().get());
}
Result<void, CallError> Server::Listen(const sockaddr* address) {
  return impl_->Listen(address);
}
uint16_t Server::port() const {
  return impl_->port();
}
std::optional<sockaddr_storage> Server::address() const {
  return impl_->address();
}
void Server::Stop(Duration grace, UniqueFunction<void()> done) {
  impl_->Stop(grace, std::move(done));
}
ServerStats Server::stats() const {
  return impl_->stats();
}
ServerHoldings Server::holdings() const {
  return impl_->holdings();
}
const std::shared_ptr<internal::ReverseHub>& Server::reverse_hub() const {
  return impl_->reverse();
}
std::string Server::DebugString() const {
  return impl_->DebugString();
}
void Server::OnClientConnected(UniqueFunction<void(const std::string&)> observer) {
  impl_->on_client_connected = std::move(observer);
}
void Server::OnClientRefused(UniqueFunction<void(const RefusedClient&)> observer) {
  impl_->on_client_refused = std::move(observer);
}
void Server::OnClientGone(
    UniqueFunction<void(const std::string&, const std::string&, const ConnectionStats&)> observer) {
  impl_->on_client_gone = std::move(observer);
}

}  // namespace stagecoach::rpcrdma
