#include "rpcrdma/api/reverse_link.h"

#include <algorithm>
#include <utility>

#include "base/mark.h"
#include "base/mutant.h"
#include "rpcrdma/api/dispatch.h"
#include "rpcrdma/api/reply_storage.h"
#include "rpcrdma/loop/deadline.h"

namespace stagecoach::rpcrdma::internal {
namespace {

// No more calls than the callers' own bounds allow ever wait for a credit.
constexpr uint32_t kQueuedMax = 1u << 16;

Requester::Config RequesterConfig(const ReverseLink::Options& options) {
  Requester::Config config;
  config.credits = options.shares.reverse_receives;
  config.receives = options.shares.reverse_receives;
  config.terms = options.terms;  // [v2:8.3+3] whose sizes are those of version 2, for either direction
  config.inline_only = true;
  config.reverse = true;
  config.queued_max = kQueuedMax;
  config.limits = options.limits;
  // What the client cannot Read has to go inline.
  if (!options.readable) config.limits.read_segments_max = 0;
  config.name = options.name + "/reverse";
  return config;
}

}  // namespace

// --- ReverseHub ---

void ReverseHub::Remove(ClientId client) {
  const auto found = links_.find(client);
  if (found == links_.end()) return;
  ReverseLink* const link = found->second;
  links_.erase(found);
  for (const auto& calls : Everyone()) calls->OnLinkGone(link);
}

ReverseLink* ReverseHub::Find(ClientId client) const {
  const auto found = links_.find(client);
  return found != links_.end() ? found->second : nullptr;
}

uint32_t ReverseHub::NextXid() {
  while (true) {
    const uint32_t xid = xids_.Next();
    const bool known =
        std::any_of(links_.begin(), links_.end(), [&](const auto& link) { return link.second->Knows(xid); });
    if (!known) return xid;
  }
}

void ReverseHub::Add(std::weak_ptr<ReverseCalls> calls) {
  Everyone();  // forgets those that are gone
  calls_.push_back(std::move(calls));
}

void ReverseHub::Stop() {
  stopping_ = true;
  for (const auto& calls : Everyone()) calls->EndWaiting();
}

void ReverseHub::Shutdown() {
  stopping_ = true;
  links_.clear();
  for (const auto& calls : Everyone()) calls->EndAll(/*connections_live=*/false);
}

std::vector<std::shared_ptr<ReverseCalls>> ReverseHub::Everyone() {
  std::vector<std::shared_ptr<ReverseCalls>> everyone;
  for (const auto& each : calls_) {
    if (auto calls = each.lock()) everyone.push_back(std::move(calls));
  }
  calls_.assign(everyone.begin(), everyone.end());
  return everyone;
}

// --- ReverseLink ---

ReverseLink::ReverseLink(EventLoop& loop, const Options& options, Connection& connection, Responder& responder,
                         XidSource& xids, UniqueFunction<void()> changed)
    : loop_(loop),
      terms_(*options.terms),
      connection_(connection),
      peer_(connection.PeerAddress()),
      changed_(std::move(changed)),
      requester_(RequesterConfig(options), options.shares.reverse_send, connection.receive_arena(), connection, xids,
                 options.trace),
      duplex_({.end = Duplex::End::kServer, .terms = options.terms}, requester_, responder, options.shares,
              connection.receive_arena()) {}

Result<uint64_t, SubmitRefusal> ReverseLink::Submit(const Call& call) {
  Requester::CallSpec spec;
  const ConstBytes message = call.message.bytes();
  spec.buffer = requester_.TakeBuffer();
  spec.buffer.assign(message.begin(), message.end());
  spec.message_size = message.size();
  spec.items = call.message.items;
  spec.results = call.message.results;
  spec.reply_base_max = call.message.reply_base_max;
  spec.deadline = call.deadline;
  spec.xid = call.xid;
  spec.cookie = next_cookie_;
  const Result<CallId, SubmitRefusal> id = requester_.Submit(std::move(spec), loop_.Now());
  if (!id) return Err(id.error());
  const uint64_t number = next_cookie_++;
  entries_.emplace(number, Entry{.owner = call.owner, .id = call.id, .in_requester = *id, .memory = call.memory});
  changed_();
  return number;
}

void ReverseLink::Cancel(uint64_t number, std::optional<Ending> ending) {
  Entry& entry = entries_.at(number);
  entry.owner.reset();
  entry.ending = std::move(ending);
  requester_.Cancel(entry.in_requester, loop_.Now());
  changed_();
}

void ReverseLink::EndCancelled() {
  for (auto& [number, entry] : entries_) {
    if (!entry.ending) continue;
    loop_.Post(
        [ending = std::make_shared<Ending>(std::move(*entry.ending))] { ending->handler(std::move(ending->result)); });
    entry.ending.reset();
  }
}

void ReverseLink::SetSendInline(uint32_t send_inline) {
  PlanLimits limits = requester_.limits();
  limits.send_inline = send_inline;
  requester_.SetLimits(limits, 0);
}

void ReverseLink::OnProgress() {
  while (std::optional<CallOutcome> outcome = requester_.TakeOutcome(loop_.Now())) {
    auto entry = entries_.extract(outcome->cookie);
    std::optional<Ending> ending = std::move(entry.mapped().ending);
    if (const std::shared_ptr<ReverseCalls> owner = entry.mapped().owner.lock()) {
      ending = owner->OnOutcome(entry.mapped().id, *outcome, lost_ ? *lost_ : CallError{});
    }
    requester_.Release(outcome->call, loop_.Now());
    if (ending) ending->handler(std::move(ending->result));
  }
}

void ReverseLink::OnClosing(const CloseCause& cause) {
  if (!lost_) lost_ = LostError(peer_, cause, outstanding());
}

// --- ReverseCalls ---

ReverseCalls::~ReverseCalls() {
  loop_.Cancel(timer_);
}

// [5666bis:8.1.2+1] [5666bis:8.3.1+2] [5666bis:8.3.2+2] The client is back, and prepared: so the upper layer says.
bool ReverseCalls::Bind(ClientId connection) {
  ReverseLink* const link = hub_->Find(connection);
  if (link == nullptr || !link->usable()) {
    hub_->TraceEvent("reverse.not_bound", {{"connection", connection}});
    return false;
  }
  link_ = link;
  peer_ = link->peer();
  std::vector<CallId> waiting;
  for (const auto& [id, call] : calls_) {
    if (call.link == nullptr) waiting.push_back(id);
  }
  hub_->TraceEvent("reverse.bound", {{"connection", connection}, {"waiting", waiting.size()}});
  for (const CallId id : waiting) {
    if (const auto call = calls_.find(id); call != calls_.end()) SubmitOrEnd(call);
  }
  ArmTimer();
  return true;
}

void ReverseCalls::OnLinkGone(ReverseLink* link) {
  if (link_ == link) link_ = nullptr;
}

size_t ReverseCalls::waiting() const {
  return static_cast<size_t>(
      std::count_if(calls_.begin(), calls_.end(), [](const auto& call) { return call.second.link == nullptr; }));
}

CallId ReverseCalls::Call(const ProcedureId& procedure, ReverseClient::ArgsWriter args,
                          const ReverseCallOptions& options, ReverseClient::CallHandler handler) {
  Pending call;
  call.procedure = procedure;
  call.handler = std::move(handler);
  const auto refuse = [&](CallError error) {
    RunLater(std::move(call.handler), std::move(error));
    return CallId{0};
  };
  if (calls_.size() >= options_.calls_max) return refuse(RefusedCall(SubmitRefusal::kQueueFull, NameOf(call)));
  if (link_ == nullptr && (!options_.wait_for_return || hub_->stopping())) {
    return refuse(RefusedCall(SubmitRefusal::kNotConnected, NameOf(call)));
  }
  if (auto refused = Encode(args, options, &call)) return refuse(std::move(*refused));
  call.xid = hub_->NextXid();
  call.deadline = DeadlineAfter(loop_.Now(), options.timeout > Duration::zero() ? options.timeout : Duration::max());

  const CallId id = next_id_++;
  const auto entry = calls_.emplace(id, std::move(call)).first;
  if (link_ == nullptr) {
    TraceWaits(entry->second);
    ArmTimer();
    return id;
  }
  return SubmitOrEnd(entry) ? id : 0;
}

// [5666bis:8.4+1] [5666bis:8.4+2]
// The whole call is kept, as it may have to wait and to be sent again.
std::optional<CallError> ReverseCalls::Encode(ReverseClient::ArgsWriter args, const ReverseCallOptions& options,
                                              Pending* call) {
  CallOptions all;
  all.result_buffers = options.result_buffers;
  all.reply_bytes_max = options.reply_bytes_max;
  all.credentials = options.credentials;
  // [5666bis:8.3.4#5] the requester fills in the XID
  auto refused = MakeCallMessage(NameOf(*call), args, all, bindings_, options_.call_bytes_max, &call->message);
  if (refused) return refused;
  uint64_t bytes = call->message.size;
  for (const EligibleItem& item : call->message.items) bytes += item.data.size();
  if (bytes > options_.call_bytes_max) return TooLargeCall(NameOf(*call), options_.call_bytes_max);
  if (!call->message.items.empty()) call->memory = CopyItems(&call->message.items);
  call->result_buffers = options.result_buffers;
  return std::nullopt;
}

// Gives a call to the connection. False: it was refused, and is over, or waits for a better one.
bool ReverseCalls::SubmitOrEnd(Calls::iterator entry) {
  Pending& call = entry->second;
  if (call.sent) {
    STAGECOACH_MARK("reverse.call_sent_again");
    hub_->TraceEvent("reverse.retransmitted", {{"xid", uint64_t{call.xid}}, {"peer", peer_}});
  }
  const Result<uint64_t, SubmitRefusal> id = link_->Submit({.owner = weak_from_this(),
                                                            .id = entry->first,
                                                            .message = call.message,
                                                            .memory = call.memory,
                                                            .xid = call.xid,
                                                            .deadline = call.deadline});
  if (id) {
    call.link = link_;
    call.in_link = *id;
    return true;
  }
  EndLater(entry, RefusedCall(id.error(), NameOf(call)));
  return false;
}

void ReverseCalls::Cancel(CallId id) {
  const auto found = calls_.find(id);
  if (found == calls_.end()) return;
  Pending call = std::move(found->second);
  calls_.erase(found);
  CallError error = Error(CallError::Kind::kCancelled, call, "cancelled");
  LetGo(std::move(call), std::move(error));
}

// Of a call that is not in calls_ any more. Memory of the caller's is that until the handler runs, so this waits for
// its end; what else the client may reach is the connection's as well.
void ReverseCalls::LetGo(Pending&& call, CallError error) {
  if (call.link == nullptr) return RunLater(std::move(call.handler), std::move(error));
  if (!call.result_buffers.empty()) {
    call.link->Cancel(call.in_link, Ending{.handler = std::move(call.handler), .result = Err(std::move(error))});
    return;
  }
  RunLater(std::move(call.handler), std::move(error));
  call.link->Cancel(call.in_link, std::nullopt);
}

std::optional<ReverseCalls::Ending> ReverseCalls::OnOutcome(CallId id, CallOutcome& outcome, const CallError& lost) {
  const auto entry = calls_.find(id);
  if (entry == calls_.end()) return std::nullopt;
  Pending& call = entry->second;
  call.link = nullptr;
  call.in_link = 0;
  if (outcome.failure) {
    call.sent = call.sent || outcome.failure->sent;
    const bool connection_lost = outcome.failure->kind == CallFailure::Kind::kConnectionLost;
    if (connection_lost && options_.wait_for_return && !hub_->stopping()) {
      STAGECOACH_MARK("reverse.call_waits_for_its_client");
      if (STAGECOACH_MUTANT("reverse-timeout-lost", "a reverse call that waits for its client has no time-out")) {
        return std::nullopt;
      }
      if (link_ != nullptr) {
        SubmitOrEnd(entry);
      } else {
        TraceWaits(call);
        ArmTimer();
      }
      return std::nullopt;
    }
  }
  Ending ending{.handler = std::move(call.handler), .result = ResultOf(call, outcome, lost)};
  if (!ending.result) {
    ending.result.error().sent = call.sent;
    ending.result.error().rpcrdma_version = outcome.answered_in;
  }
  calls_.erase(entry);
  return ending;
}

Result<Reply, CallError> ReverseCalls::ResultOf(const Pending& call, CallOutcome& outcome,
                                                const CallError& lost) const {
  if (!outcome.failure) return ReplyMaker::Make(outcome, NameOf(call), call.result_buffers);
  switch (outcome.failure->kind) {
    case CallFailure::Kind::kNoCredit:
      if (!call.sent)
        return Err(Error(CallError::Kind::kNoCredit, call, "timed out before the client granted a credit"));
      [[fallthrough]];
    case CallFailure::Kind::kTimedOut:
      return Err(Error(CallError::Kind::kTimedOut, call, "timed out"));
    default:
      return Err(FailedCall(*outcome.failure, NameOf(call), lost));
  }
}

void ReverseCalls::TraceWaits(const Pending& call) const {
  hub_->TraceEvent("reverse.waits", {{"xid", uint64_t{call.xid}}, {"sent", uint64_t{call.sent ? 1u : 0u}}});
}

void ReverseCalls::EndWaiting() {
  for (auto call = calls_.begin(); call != calls_.end();) {
    const auto next = std::next(call);
    if (call->second.link == nullptr)
      EndLater(call, Error(CallError::Kind::kClosed, call->second, "the server stopped"));
    call = next;
  }
}

void ReverseCalls::EndAll(bool connections_live) {
  link_ = nullptr;
  Calls calls = std::exchange(calls_, {});
  for (auto& [id, call] : calls) {
    CallError error = Error(CallError::Kind::kClosed, call, "closed by this end");
    if (!connections_live) call.link = nullptr;
    LetGo(std::move(call), std::move(error));
  }
}

CallError ReverseCalls::Error(CallError::Kind kind, const Pending& call, std::string_view why) const {
  CallError error;
  error.kind = kind;
  error.sent = call.sent || call.link != nullptr;  // of one that is with its connection, this is not known here
  error.message = peer_ + ": reverse call of program " + std::to_string(call.procedure.program) + " version " +
                  std::to_string(call.procedure.version) + " procedure " + std::to_string(call.procedure.procedure) +
                  ": " + std::string(why);
  return error;
}

void ReverseCalls::EndLater(Calls::iterator call, CallError error) {
  RunLater(std::move(call->second.handler), std::move(error));
  calls_.erase(call);
}

void ReverseCalls::RunLater(ReverseClient::CallHandler handler, CallError error) {
  loop_.Post([handler = std::make_shared<ReverseClient::CallHandler>(std::move(handler)), error = std::move(error)] {
    (*handler)(Err(error));
  });
}

// --- Time: of calls that wait; a connection has the deadlines of its own ---

// [5666bis:8.3.2+3] Nothing else ends the waiting.
void ReverseCalls::ArmTimer() {
  std::optional<Instant> earliest;
  for (const auto& [id, call] : calls_) {
    if (call.link == nullptr && (!earliest || call.deadline < *earliest)) earliest = call.deadline;
  }
  if (earliest == timer_at_) return;
  loop_.Cancel(std::exchange(timer_, 0));
  timer_at_ = earliest;
  if (!earliest) return;
  timer_ = loop_.At(*earliest, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->OnTimer();
  });
}

void ReverseCalls::OnTimer() {
  timer_ = 0;
  timer_at_.reset();
  const Instant now = loop_.Now();
  for (auto call = calls_.begin(); call != calls_.end();) {
    const auto next = std::next(call);
    const Pending& pending = call->second;
    if (pending.link == nullptr && now >= pending.deadline) {
      STAGECOACH_MARK("reverse.client_did_not_come_back");
      EndLater(call, pending.sent
                         ? Error(CallError::Kind::kTimedOut, pending, "timed out; the client had not come back")
                         : Error(CallError::Kind::kNotConnected, pending, "the client did not come in time"));
    }
    call = next;
  }
  ArmTimer();
}

}  // namespace stagecoach::rpcrdma::internal

namespace stagecoach::rpcrdma {

ReverseClient::ReverseClient(Server& server, ReverseClientOptions options)
    : calls_(std::make_shared<internal::ReverseCalls>(server.reverse_hub(), options)) {
  server.reverse_hub()->Add(calls_);
}

ReverseClient::~ReverseClient() {
  calls_->EndAll(/*connections_live=*/true);
}

bool ReverseClient::Bind(ClientId connection) {
  return calls_->Bind(connection);
}
void ReverseClient::Register(const Binding& binding) {
  calls_->Register(binding);
}
void ReverseClient::Unbind() {
  calls_->Unbind();
}
bool ReverseClient::bound() const {
  return calls_->bound();
}
CallId ReverseClient::Call(const ProcedureId& procedure, ArgsWriter args, const ReverseCallOptions& options,
                           CallHandler handler) {
  return calls_->Call(procedure, args, options, std::move(handler));
}
void ReverseClient::Cancel(CallId call) {
  calls_->Cancel(call);
}
UniqueFunction<void()> ReverseClient::Canceller(CallId call) {
  return [weak = std::weak_ptr(calls_), call] {
    if (const auto calls = weak.lock()) calls->Cancel(call);
  };
}
size_t ReverseClient::outstanding() const {
  return calls_->outstanding();
}
size_t ReverseClient::waiting() const {
  return calls_->waiting();
}

}  // namespace stagecoach::rpcrdma
