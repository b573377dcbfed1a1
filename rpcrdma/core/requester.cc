#include "rpcrdma/core/requester.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/mark.h"
#include "base/mutant.h"
#include "base/trace.h"
#include "rpcrdma/wire/v2_numbers.h"
#include "rpcrdma/xdr/xdr_writer.h"

namespace stagecoach::rpcrdma {
namespace {

// Recycled message buffers that are kept, and the largest worth keeping.
constexpr size_t kBuffersKept = 64;
constexpr size_t kBufferKeptMax = 64 * 1024;
// How long beyond its deadline the fence of a call may take before it is had by ending the connection.
constexpr Duration kFenceTime = 1s;
// Of RDMA2_CONNPROP, which has no call to take one from (docs/decisions/0048).
constexpr uint32_t kConnPropXid = 0;

bool HasPositionZero(const CallPlan& plan) {
  return std::any_of(plan.reads.begin(), plan.reads.end(), [](const PlannedRead& read) { return read.position == 0; });
}
bool HasEligibleReads(const CallPlan& plan) {
  return std::any_of(plan.reads.begin(), plan.reads.end(), [](const PlannedRead& read) { return read.position != 0; });
}

bool SkipsFence() {
  return STAGECOACH_MUTANT("skip-fence", "a call is over before its STags are invalid");
}
bool ReusesSendBuffers() {
  return STAGECOACH_MUTANT("release-before-send-done", "a Send buffer is filled again before its Send has completed");
}
bool SaysDoneAtOnce() {
  return STAGECOACH_MUTANT("done-before-reads", "RDMA_DONE is sent as soon as the Reads of what it ends are posted");
}

// [v2:6.4+8] [v2:9.3+2] By its code.
CallFailure::Kind KindOf(const Header::Body& error) {
  using Kind = CallFailure::Kind;
  if (std::holds_alternative<ErrVers>(error)) return Kind::kErrVers;
  if (std::holds_alternative<ErrBadXdr>(error)) return Kind::kErrBadXdr;
  if (std::holds_alternative<ErrInvalHtype>(error)) return Kind::kErrInvalHtype;
  if (std::holds_alternative<ErrReadChunks>(error)) return Kind::kErrReadChunks;
  if (std::holds_alternative<ErrWriteChunks>(error)) return Kind::kErrWriteChunks;
  if (std::holds_alternative<ErrSegments>(error)) return Kind::kErrSegments;
  if (std::holds_alternative<ErrWriteResource>(error)) return Kind::kErrWriteResource;
  if (std::holds_alternative<ErrReplyResource>(error)) return Kind::kErrReplyResource;
  if (std::holds_alternative<ErrSystem>(error)) return Kind::kErrSystem;
  return Kind::kErrOther;
}

// Each by itself: a swarm has to meet them all.
void MarkError(const Header::Body& error) {
  if (std::holds_alternative<ErrVers>(error)) STAGECOACH_MARK("requester.err_vers");
  if (std::holds_alternative<ErrBadXdr>(error)) STAGECOACH_MARK("requester.err_bad_xdr");
  if (std::holds_alternative<ErrInvalHtype>(error)) STAGECOACH_MARK("requester.err_inval_htype");
  if (std::holds_alternative<ErrReadChunks>(error)) STAGECOACH_MARK("requester.err_read_chunks");
  if (std::holds_alternative<ErrWriteChunks>(error)) STAGECOACH_MARK("requester.err_write_chunks");
  if (std::holds_alternative<ErrSegments>(error)) STAGECOACH_MARK("requester.err_segments");
  if (std::holds_alternative<ErrWriteResource>(error)) STAGECOACH_MARK("requester.err_write_resource");
  if (std::holds_alternative<ErrReplyResource>(error)) STAGECOACH_MARK("requester.err_reply_resource");
  if (std::holds_alternative<ErrSystem>(error)) STAGECOACH_MARK("requester.err_system");
  if (std::holds_alternative<ErrOther>(error)) STAGECOACH_MARK("requester.err_other");
}

// Of version 2.
CallFailure FailureOf(const Header::Body& error) {
  CallFailure failure{.kind = KindOf(error), .sent = true};
  if (const auto* versions = std::get_if<ErrVers>(&error)) failure.versions = *versions;
  failure.error = error;
  return failure;
}

const char* Word(SubmitRefusal refusal) {
  switch (refusal) {
    case SubmitRefusal::kNotConnected:
      return "not_connected";
    case SubmitRefusal::kQueueFull:
      return "queue_full";
    case SubmitRefusal::kTooLarge:
      return "too_large";
    case SubmitRefusal::kNotSpoken:
      return "not_spoken";
    case SubmitRefusal::kNotServed:
      return "not_served";
  }
  return "unknown";
}

// For traces: nanoseconds since the loop's epoch, 0 for none.
uint64_t Nanoseconds(const std::optional<Instant>& instant) {
  return instant ? static_cast<uint64_t>(instant->time_since_epoch().count()) : 0;
}

}  // namespace

const char* ToString(CallFailure::Kind kind) {
  switch (kind) {
    case CallFailure::Kind::kNoCredit:
      return "no_credit";
    case CallFailure::Kind::kTimedOut:
      return "timed_out";
    case CallFailure::Kind::kConnectionLost:
      return "connection_lost";
    case CallFailure::Kind::kCancelled:
      return "cancelled";
    case CallFailure::Kind::kClosed:
      return "closed";
    case CallFailure::Kind::kMemory:
      return "memory";
    case CallFailure::Kind::kErrVers:
      return "err_vers";
    case CallFailure::Kind::kErrChunk:
      return "err_chunk";
    case CallFailure::Kind::kBadHeader:
      return "bad_header";
    case CallFailure::Kind::kBadChunks:
      return "bad_chunks";
    case CallFailure::Kind::kErrBadXdr:
      return "err_bad_xdr";
    case CallFailure::Kind::kErrInvalHtype:
      return "err_inval_htype";
    case CallFailure::Kind::kErrReadChunks:
      return "err_read_chunks";
    case CallFailure::Kind::kErrWriteChunks:
      return "err_write_chunks";
    case CallFailure::Kind::kErrSegments:
      return "err_segments";
    case CallFailure::Kind::kErrWriteResource:
      return "err_write_resource";
    case CallFailure::Kind::kErrReplyResource:
      return "err_reply_resource";
    case CallFailure::Kind::kErrSystem:
      return "err_system";
    case CallFailure::Kind::kErrOther:
      return "err_other";
    case CallFailure::Kind::kBadDirection:
      return "bad_direction";
    case CallFailure::Kind::kNotServed:
      return "not_served";
    case CallFailure::Kind::kTooLarge:
      return "too_large";
  }
  return "unknown";
}

const char* ToString(ExchangeEnd end) {
  switch (end) {
    case ExchangeEnd::kAnswered:
      return "answered";
    case ExchangeEnd::kAnnounced:
      return "announced";
    case ExchangeEnd::kRefused:
      return "refused";
    case ExchangeEnd::kUnanswered:
      return "unanswered";
  }
  return "unknown";
}

Requester::Requester(const Config& config, BufferArena send, BufferArena receive, ConnectionMemory& memory,
                     XidSource& xids, TraceSink* trace)
    : config_(config),
      terms_(config.terms != nullptr ? *config.terms
                                     : own_terms_.emplace(ConnectionTerms::Config{.profile = config.profile,
                                                                                  .list_limits = config.list_limits})),
      send_(send),
      receive_(receive),
      memory_(memory),
      xids_(xids),
      trace_(trace),
      receives_(config.receives > 0 ? config.receives : receive.slots),
      limits_(config.limits),
      reads_max_(config.reads_max),
      // [5666bis:4.3+1] As many replies as there are Receives for.
      credits_(std::min(config.credits, receives_)),
      xid_table_(receives_) {
  STAGECOACH_CHECK(receives_ <= receive_.slots);
  STAGECOACH_CHECK(receive_.slots > 0 && send_.slots > 0);
  STAGECOACH_CHECK(limits_.send_inline <= send_.slot_size && limits_.receive_inline <= receive_.slot_size);
  for (uint32_t slot = send_.slots; slot > 0; --slot) free_send_slots_.push_back(send_.first + slot - 1);
}

void Requester::Start() {
  if (config_.receives > 0) {
    posted_receives_ = receives_;
    return;
  }
  for (uint32_t slot = 0; slot < receive_.slots; ++slot) PostReceiveAgain(slot);
}

std::vector<std::byte> Requester::TakeBuffer() {
  if (buffers_.empty()) return {};
  std::vector<std::byte> buffer = std::move(buffers_.back());
  buffers_.pop_back();
  return buffer;
}

void Requester::ReturnBuffer(std::vector<std::byte> buffer) {
  if (buffers_.size() < kBuffersKept && buffer.size() <= kBufferKeptMax) buffers_.push_back(std::move(buffer));
}

Result<CallId, SubmitRefusal> Requester::Submit(CallSpec&& spec, Instant now) {
  const auto refuse = [&](SubmitRefusal refusal) {
    Trace(trace_, now, config_.name, "call.declined",
          {{"cookie", spec.cookie}, {"bytes", spec.message_size}, {"why", Word(refusal)}});
    ReturnBuffer(std::move(spec.buffer));
    return Err(refusal);
  };
  if (ending_ || over_) return refuse(SubmitRefusal::kNotConnected);
  if (queue_.size() >= config_.queued_max) {
    STAGECOACH_MARK("requester.queue_full");
    return refuse(SubmitRefusal::kQueueFull);
  }

  STAGECOACH_CHECK(!terms_.probing() || outstanding_ == 0);
  // [v2:7.3#2] A server does not know it before its client has spoken.
  if (!terms_.settled() && !terms_.probing()) return refuse(SubmitRefusal::kNotConnected);
  // [v2:4.2.2+3]
  if (!IsServed()) {
    STAGECOACH_MARK("requester.reverse_calls_not_served");
    return refuse(SubmitRefusal::kNotServed);
  }

  const Wish wish{.reply_base_max = spec.reply_base_max,
                  .longest_inside = spec.longest_inside,
                  .direct_arguments = spec.direct_placement,
                  .direct_results = spec.direct_placement};
  const PlanLimits planned_by = limits();
  auto plan = Plan(spec.message_size, spec.items, spec.results, wish, planned_by);
  if (!plan) {
    STAGECOACH_MARK("requester.no_plan_fits");
    return refuse(SubmitRefusal::kTooLarge);
  }
  if (!Permits(*plan)) {
    STAGECOACH_MARK("requester.call_does_not_fit_inline");
    return refuse(SubmitRefusal::kTooLarge);
  }

  const uint32_t index = AllocateCall();
  Call& call = *calls_[index];
  call.state = State::kQueued;
  call.wanted_xid = spec.xid;
  call.cookie = spec.cookie;
  call.submitted = now;
  call.deadline = spec.deadline;
  call.buffer = std::move(spec.buffer);
  call.message_size = spec.message_size;
  call.items = std::move(spec.items);
  call.results = std::move(spec.results);
  call.lasting = std::move(spec.lasting);
  call.plan = std::move(*plan);
  call.wish = wish;
  call.planned_by = planned_by;
  call.flags = spec.flags & terms_.extensions().flags();
  ++outstanding_;
  LowerDeadline(call.deadline);
  queue_.push(index);
  const CallId id = IdOf(index);
  Trace(trace_, now, config_.name, "call.submitted",
        {{"call", id},
         {"cookie", call.cookie},
         {"bytes", call.message_size},
         {"items", call.items.size()},
         {"results", call.results.size()},
         {"segments", call.plan.exposed_segments()},
         {"deadline", Nanoseconds(call.deadline)}});
  if (trace_ != nullptr) TracePlan(index, now);
  Pump(now);
  return id;
}

// [v2:9.1+2] Of those that the program knows. Nothing before the probe is answered [v2:7#1].
Result<CallId, SubmitRefusal> Requester::SubmitExtension(ExtensionSpec&& spec, Instant now) {
  const auto refuse = [&](SubmitRefusal refusal) {
    Trace(trace_, now, config_.name, "call.declined",
          {{"cookie", spec.cookie}, {"bytes", spec.body.size()}, {"why", Word(refusal)}});
    return Err(refusal);
  };
  if (ending_ || over_) return refuse(SubmitRefusal::kNotConnected);
  if (queue_.size() >= config_.queued_max) return refuse(SubmitRefusal::kQueueFull);
  const HeaderTypeRow* const row = terms_.extensions().FindHeaderType(spec.type);
  if (!terms_.is_v2() || terms_.probing() || row == nullptr || row->has_message) {
    STAGECOACH_MARK("requester.extension_not_spoken");
    return refuse(SubmitRefusal::kNotSpoken);
  }
  if (terms_.layout().prefix_size + spec.body.size() > limits().send_inline) return refuse(SubmitRefusal::kTooLarge);

  const uint32_t index = AllocateCall();
  Call& call = *calls_[index];
  call.state = State::kQueued;
  call.cookie = spec.cookie;
  call.submitted = now;
  call.deadline = spec.deadline;
  call.message_size = 0;
  call.plan = {};
  call.offered = {};
  call.flags = spec.flags & terms_.extensions().flags();
  call.extension = Extension{.type = spec.type, .body = std::move(spec.body)};
  ++outstanding_;
  LowerDeadline(call.deadline);
  queue_.push(index);
  const CallId id = IdOf(index);
  Trace(trace_, now, config_.name, "extension.submitted",
        {{"call", id},
         {"cookie", call.cookie},
         {"type", uint64_t{spec.type}},
         {"bytes", call.extension->body.size()},
         {"deadline", Nanoseconds(call.deadline)}});
  Pump(now);
  return id;
}

Result<CallPlan, PlanRefusal> Requester::Plan(size_t message_size, std::span<const EligibleItem> items,
                                              std::span<const MutableBytes> memory, const Wish& wish,
                                              const PlanLimits& limits) const {
  SmallVector<ResultShape, 4> results;
  for (const MutableBytes each : memory) results.push_back({each.size(), each.size()});
  return PlanCall({.base_size = message_size,
                   .items = items,
                   .results = results,
                   .reply_base_max = wish.reply_base_max,
                   .longest_inside = wish.longest_inside,
                   .direct_arguments = wish.direct_arguments,
                   .direct_results = wish.direct_results && memory.size() <= peer_takes_.write_chunks,
                   .reply_chunk_min = wish.reply_chunk_min},
                  limits);
}

// Whether the peer may be called: a client has its say in that.
bool Requester::IsServed() const {
  return !terms_.is_v2() || !config_.reverse || terms_.peer().reverse_requests != ReverseSupport::kNone;
}

bool Requester::MayUseChunks() const {
  if (!terms_.is_v2()) return !config_.inline_only;
  // [v2:7+3] Not of the probe. [v2:4.2.2+4] [v2:4.2.2+5] Of reverse calls, by what the client has said.
  if (terms_.probing()) return false;
  return config_.reverse ? terms_.peer().reverse_requests == ReverseSupport::kGeneral : !config_.inline_only;
}

// [5666bis:8.3.4#2] [5666bis:8.3.4#3] RDMA_MSG without chunks, or nothing is sent.
bool Requester::Permits(const CallPlan& plan) const {
  return MayUseChunks() || (plan.type == MessageType::kMsg && plan.exposed_segments() == 0);
}

void Requester::TracePlan(uint32_t index, Instant now) {
  const CallPlan& plan = calls_[index]->plan;
  uint64_t position_zero = 0, read_chunks = 0, read_bytes = 0, write_bytes = 0;
  uint32_t last_position = 0;
  for (const PlannedRead& read : plan.reads) {
    if (read.position == 0) {
      position_zero += read.memory.length;
      continue;
    }
    if (read.position != last_position) ++read_chunks;
    last_position = read.position;
    read_bytes += read.memory.length;
  }
  for (const Piece& piece : plan.write_segments) write_bytes += piece.length;
  Trace(trace_, now, config_.name, "call.planned",
        {{"call", IdOf(index)},
         {"type", ToString(plan.type, plan.layout.version)},
         {"send", plan.send_size()},
         {"position_zero", position_zero},
         {"read_chunks", read_chunks},
         {"read_bytes", read_bytes},
         {"write_chunks", plan.write_counts.size()},
         {"write_bytes", write_bytes},
         {"reply_chunk", plan.reply_capacity}});
}

void Requester::Cancel(CallId id, Instant now) {
  Call* call = Find(id);
  if (call == nullptr) return;
  const auto index = static_cast<uint32_t>(id & UINT32_MAX) - 1;
  Trace(trace_, now, config_.name, "call.cancelled", {{"call", id}, {"xid", uint64_t{call->xid}}});
  if (call->state == State::kQueued) {
    STAGECOACH_MARK("requester.cancel_while_queued");
    queue_.Remove(index);
    FailWith(index, CallFailure::Kind::kCancelled, now);
  } else if (call->state == State::kSent) {
    STAGECOACH_MARK("requester.cancel_while_sent");
    Abandon(*call, now);
    FailWith(index, CallFailure::Kind::kCancelled, now);
    Pump(now);
  } else if (call->state == State::kPulling && !call->failure) {
    STAGECOACH_MARK("requester.cancel_while_pulling");
    call->failure = CallFailure{.kind = CallFailure::Kind::kCancelled, .sent = true};
    pulls_.Remove(index);
    // Reads in flight still write to its memory.
    if (call->pull->in_flight == 0) EndPull(index);
    PumpPulls(now);
    Pump(now);
  } else if (call->state == State::kFencing && call->next != nullptr) {
    STAGECOACH_MARK("requester.cancel_before_resend");
    call->next.reset();
    call->failure = CallFailure{.kind = CallFailure::Kind::kCancelled, .sent = true};
  } else if (call->state == State::kFencing) {
    STAGECOACH_MARK("requester.cancel_while_fencing");
  }
}

// [5666bis:5.4.1+4] Fenced like any other.
// The call is over before its reply is in: the credit stays spent, and the XID known, until the reply arrives. Not
// those of an extension's message: who does not know its type may say nothing, ever, so that a few of them would leave
// no credit (docs/decisions/0052).
void Requester::Abandon(Call& call, Instant now) {
  xid_table_.Erase(call.xid);
  if (call.extension) {
    STAGECOACH_MARK("requester.extension_given_up");
    credits_.OnGivenUp();
    Trace(trace_, now, config_.name, "extension.given_up", {{"xid", uint64_t{call.xid}}});
    return;
  }
  if (STAGECOACH_MUTANT("cancel-returns-credit", "the credit of a cancelled call is used before its reply is in")) {
    credits_.OnReply(std::nullopt);
    return;
  }
  xid_table_.Insert(call.xid, kAbandoned);
  abandoned_.push({call.xid, MayTimeOut(call) ? std::nullopt : call.deadline, call.dones_before});
}

// Whether the connection goes on when it is not answered: where that is so at all, nothing of it may be within the
// peer's reach.
bool Requester::MayTimeOut(const Call& call) const {
  return call.extension.has_value() || ((config_.inline_only || config_.reverse) && call.stags_valid == 0);
}

void Requester::SetLimits(const PlanLimits& limits, uint32_t reads_max) {
  STAGECOACH_CHECK(queue_.empty() && reads_in_flight_ == 0);
  STAGECOACH_CHECK(limits.send_inline <= send_.slot_size && limits.receive_inline <= receive_.slot_size);
  limits_ = limits;
  reads_max_ = reads_max;
}

// [v2:4.2.1+2] [v2:4.2.1+3] [v2:4.2.1+4] [v2:4.2.1+5] [v2:8.3+1] [v2:8.3+2] In version 2 by what both ends have said of
// themselves, and by what the responder has refused before.
PlanLimits Requester::limits() const {
  if (!terms_.is_v2()) return limits_;
  PlanLimits limits = limits_;
  limits.layout = terms_.layout();
  limits.send_inline = std::min(terms_.send_inline(), send_.slot_size);
  limits.receive_inline = std::min(terms_.receive_inline(), receive_.slot_size);
  limits.pad_align = 0;
  limits.read_chunks_max = std::min(limits.read_chunks_max, peer_takes_.read_chunks);
  limits.segments_per_read_chunk_max = std::min(limits.segments_per_read_chunk_max, peer_takes_.segments);
  limits.segments_per_chunk_max = std::min(limits.segments_per_chunk_max, peer_takes_.segments);
  limits.gather_bytes_max = config_.grown_bytes_max;
  return limits;
}

// [v2:5.3.4+5] [v2:5.3.4+3] [v2:4+1] Ahead of the calls.
void Requester::SendProperties(Instant until, Instant now) {
  STAGECOACH_CHECK(terms_.is_v2() && terms_.settled() && exchange_ == Exchange::kNone);
  if (ending_ || over_) return;
  exchange_ = Exchange::kWaiting;
  exchange_until_ = until;
  LowerDeadline(until);
  Pump(now);
}

std::optional<ExchangeEnd> Requester::TakeExchangeEnd() {
  return std::exchange(exchange_end_, std::nullopt);
}

void Requester::Close(Instant) {
  closed_ = true;
  EndConnection(Disconnect::Why::kAsked);
}

// --- Sending ---

// [5666bis:3.2.2+2] [5666:3.3+2] [2004:3.3+1] [5666bis:4.3+3] [5666bis:4.3+4] [5666:3.3+5] [2004:3.3#5] [2004:3.3+3]
// [5666bis:4.3.1+4] Sends what may be sent. [5666bis:4.3#4] [5666:3.3#4] [2004:4.1#3] [5666bis:5.1.3#1] [5666:4.1#5] a
// credit for each call; and a Receive of ours for each reply, which a peer's unsolicited messages may have used up for
// the moment.
void Requester::Pump(Instant now) {
  PumpDones(now);
  PumpExchange(now);
  // [v2:4.2.2+3] Submitted before the client had said it.
  while (!ending_ && !over_ && !queue_.empty() && !IsServed()) {
    FailWith(queue_.pop(), CallFailure::Kind::kNotServed, now);
  }
  while (!ending_ && !over_ && !queue_.empty() && !exchanging() && credits_.available() && !free_send_slots_.empty() &&
         posted_receives_ > credits_.in_flight()) {
    Transmit(queue_.pop(), now);
  }
  if (ending_ || over_ || queue_.empty()) {
    held_for_ = {};
    return;
  }
  if (exchanging()) {
    TraceHeld("properties", now);
  } else if (!credits_.available()) {
    TraceHeld("credit", now);
  } else if (free_send_slots_.empty()) {
    STAGECOACH_MARK("requester.call_waits_for_send_buffer");
    TraceHeld("send_buffer", now);
  } else {
    STAGECOACH_MARK("requester.call_waits_for_receive");
    TraceHeld("receive", now);
  }
}

// Once for each reason, for as long as calls wait: not for each call.
void Requester::TraceHeld(std::string_view why, Instant now) {
  if (why == held_for_) return;
  held_for_ = why;
  Trace(trace_, now, config_.name, "call.held",
        {{"why", why},
         {"queued", queue_.size()},
         {"granted", uint64_t{credits_.granted()}},
         {"in_flight", uint64_t{credits_.in_flight()}}});
}

uint32_t Requester::room() const {
  if (ending_ || over_) return 0;
  const uint64_t spoken_for = uint64_t{credits_.in_flight()} + credits_.dones() + queue_.size();
  if (spoken_for < credits_.granted()) return static_cast<uint32_t>(credits_.granted() - spoken_for);
  return credits_.in_flight() == 0 && queue_.empty() ? 1 : 0;
}

// [v2:3.2+4] [v2:10.1+2] Not 0, which is RDMA2_CONNPROP's: XidSource has none, nor has whoever brings an XID along.
void Requester::DrawXid(Call& call) {
  if (call.resends > 0) resending_.Remove(call.xid);
  if (call.wanted_xid) {
    call.xid = *call.wanted_xid;
    STAGECOACH_CHECK(call.xid != kConnPropXid && !xid_table_.Find(call.xid));
    return;
  }
  const auto taken = [&](uint32_t xid) {
    for (size_t i = 0; i < resending_.size(); ++i) {
      if (resending_[i] == xid) return true;
    }
    return xid_table_.Find(xid).has_value();
  };
  do call.xid = xids_.Next();
  while (taken(call.xid));
}

// By what is known now, if that is not what was known when it was planned. False: there is no way for it any more.
bool Requester::PlanAgain(uint32_t index, Instant now) {
  if (!terms_.is_v2()) return true;
  Call& call = *calls_[index];
  const PlanLimits limits = this->limits();
  if (call.extension) return terms_.layout().prefix_size + call.extension->body.size() <= limits.send_inline;
  const bool too_many_writes = call.plan.write_counts.size() > peer_takes_.write_chunks;
  if (!(limits == call.planned_by) || too_many_writes) {
    auto plan = Plan(call.message_size, call.items, call.results, call.wish, limits);
    if (!plan) return false;
    call.plan = std::move(*plan);
    call.planned_by = limits;
    if (trace_ != nullptr) TracePlan(index, now);
  }
  return Permits(call.plan);
}

// [v2:3.2#1] [v2:9.4+3] Of those that were asked for, the ones that the peer takes, by what it has said by now.
uint32_t Requester::FlagsFor(uint32_t index, Instant now) const {
  const Call& call = *calls_[index];
  const uint32_t withheld = call.flags & ~terms_.flags_taken();
  if (withheld != 0) {
    STAGECOACH_MARK("requester.flags_withheld");
    Trace(trace_, now, config_.name, "flags.withheld",
          {{"call", IdOf(index)}, {"xid", uint64_t{call.xid}}, {"flags", uint64_t{withheld}}});
  }
  return call.flags & ~withheld;
}

void Requester::Transmit(uint32_t index, Instant now) {
  Call& call = *calls_[index];
  if (!PlanAgain(index, now)) {
    STAGECOACH_MARK("requester.no_plan_fits_any_more");
    FailWith(index, CallFailure::Kind::kTooLarge, now);
    return;
  }
  DrawXid(call);
  // [5666bis:5.1.1#1] [2004:4.1#5] one XID in both headers.
  if (!call.extension) ByteWriter(MutableBytes(call.buffer).first(4)).U32(call.xid);

  SmallVector<Exposure, 8> exposures;
  if (!Expose(index, &exposures, now)) {
    STAGECOACH_MARK("requester.registration_refused");
    if (!call.exposed.empty()) STAGECOACH_MARK("requester.registration_refused_halfway");
    FailWith(index, CallFailure::Kind::kMemory, now);
    return;
  }

  // [5666bis:4.2+1] [5666:3+1] [2004:3+1] [5666bis:5.1.3+1] [5666:4.1+4] [2004:4.1+5] [5666bis:5.3.1+1]
  // [5666bis:5.3.2+1] [5666:3.4+11] [2004:3.4+11] [2004:3.8#2] [5666bis:8.3.4+1] Header, then what is left of the
  // message. [5666bis:8.3.4#1] [5666bis:8.3.4#4] Of version 1; the message follows at once.
  const uint32_t requested = credits_.Request(queue_.size());
  Header header;
  if (call.extension) {
    header = terms_.MakeHeader(call.xid, requested, FlagsFor(index, now), *call.extension);
  } else {
    STAGECOACH_CHECK(call.plan.layout == terms_.layout());
    call.inv_handle = InvHandle(call);
    call.invalidated_at.reset();
    header = MakeCallHeader(call.plan, call.xid, requested, exposures, call.inv_handle);
    if (header.flags) *header.flags |= FlagsFor(index, now);
    call.offered = *header.chunks();
  }
  const uint32_t slot = free_send_slots_.back();
  free_send_slots_.pop_back();
  ByteWriter out(send_.slot(slot));
  terms_.Encode(header, out);
  WriteInline({ConstBytes(call.buffer).first(call.message_size), call.items}, call.plan.inline_pieces, out);
  // [5666bis:5.1.4+10]
  STAGECOACH_CHECK(out.ok() && out.position() <= limits().send_inline);

  call.state = State::kSent;
  xid_table_.Insert(call.xid, index);
  call.dones_before = credits_.OnSent();
  // [5666bis:5.1.3#4] Header, lists and message in one.
  commands_.push(PostSend{.slot = slot, .length = static_cast<uint32_t>(out.position())});
  if (ReusesSendBuffers()) free_send_slots_.push_back(slot);
  if (STAGECOACH_MUTANT("call-sent-twice", "a call without chunks is sent twice on its connection") &&
      call.stags_valid == 0 && !free_send_slots_.empty()) {
    const uint32_t copy = free_send_slots_.back();
    free_send_slots_.pop_back();
    CopyBytes(send_.slot(copy), out.written());
    commands_.push(PostSend{.slot = copy, .length = static_cast<uint32_t>(out.position())});
  }
  CountSent(call);
  if (call.resends == 0) stats_.credit_wait.RecordTime(now - call.submitted);
  stats_.send_bytes.Record(out.position());
  Trace(trace_, now, config_.name, "call.sent",
        {{"call", IdOf(index)},
         {"xid", uint64_t{call.xid}},
         {"slot", uint64_t{slot}},
         {"bytes", out.position()},
         {"stags", uint64_t{call.stags_valid}},
         {"requested", uint64_t{header.credits}},
         {"granted", uint64_t{credits_.granted()}},
         {"in_flight", uint64_t{credits_.in_flight()}},
         {"receives", uint64_t{posted_receives()}},
         {"received", stats_.receives}});
}

// [5666bis:4.4.2+2] [5666:3.4+2] [2004:3.3#8] [2004:3.4+1] [5666bis:4.4.4+2] [5666:3.4+4] [2004:3.3#6]
// [5666bis:5.3.3+1] [5666bis:5.4.1+1] [5666:7+3] [2004:7+2] [5666bis:10.1+4] Makes each planned segment reachable, in
// the order the header names them. The memory is whoever's it was before and will be afterwards [5666bis:5.4.1#1]
// [5666:7#1] [2004:7#2]; what this call owns is the registration. On failure what was exposed stays in call.exposed, to
// be fenced.
bool Requester::Expose(uint32_t index, SmallVector<Exposure, 8>* exposures, Instant now) {
  Call& call = *calls_[index];
  if (call.plan.reply_capacity > 0) call.reply_memory.reset(new std::byte[call.plan.reply_capacity]);
  if (call.plan.gathered_bytes > 0) Gather(call);
  SmallVector<size_t, 2> empty;
  const auto expose = [&](const Piece& piece, MemoryUse use) {
    const ConstBytes memory = MemoryOf(call, piece);
    if (memory.empty()) {
      empty.push_back(exposures->size());
      exposures->push_back({});
      return true;
    }
    // What the engine itself keeps, the message and room for a long reply, is not the program's memory.
    const bool is_programs =
        piece.source == Piece::Source::kItem ||
        (piece.source == Piece::Source::kResult && (call.grown.empty() || call.grown[piece.index] == nullptr));
    LastingMemory* const lasting = is_programs ? call.lasting.get() : nullptr;
    const std::optional<Registration> registration = memory_.Register(memory, use, lasting);
    if (!registration) return false;
    ++stats_.registrations;
    if (lasting != nullptr) ++(registration->lasting ? stats_.memory_reused : stats_.memory_not_reused);
    ++call.stags_valid;
    call.exposed.push_back({registration->id, registration->handle, false, registration->window});
    exposures->push_back({registration->handle, registration->offset});
    Trace(trace_, now, config_.name, "stag.exposed",
          {{"call", IdOf(index)},
           {"registration", uint64_t{registration->id}},
           {"use", use == MemoryUse::kReadByPeer ? "read" : "write"},
           {"bytes", memory.size()},
           {"lasting", uint64_t{registration->lasting ? 1u : 0u}}});
    return true;
  };
  for (const PlannedRead& read : call.plan.reads) {
    if (!expose(read.memory, MemoryUse::kReadByPeer)) return false;
  }
  for (const Piece& piece : call.plan.write_segments) {
    if (!expose(piece, MemoryUse::kWrittenByPeer)) return false;
  }
  for (const Piece& piece : call.plan.reply_segments) {
    if (!expose(piece, MemoryUse::kWrittenByPeer)) return false;
  }
  // Empty segments name a steering tag of this call, too: a responder that invalidates the first it finds must not come
  // across one that is none.
  for (const size_t i : empty) {
    if (!call.exposed.empty()) (*exposures)[i].handle = call.exposed[0].handle;
  }
  return true;
}

// [v2:3.3+3] [v2:3.3+4] [v2:8.4+1] [v2:8.4+2] [v2:8.4+3] [v2:8.4+5] [v2:8.4.1+3] [v2:8.4.1+4] The first window: it was
// bound for this call, and its end does nobody else any harm. 0: nothing here is one.
uint32_t Requester::InvHandle(const Call& call) const {
  if (!terms_.is_v2()) return 0;
  for (const internal::ExposedSegment& exposed : call.exposed) {
    if (exposed.window) return exposed.handle;
  }
  return 0;
}

void Requester::Gather(Call& call) {
  call.gathered.reset(new std::byte[call.plan.gathered_bytes]);
  ByteWriter out(MutableBytes(call.gathered.get(), call.plan.gathered_bytes));
  WriteInline({ConstBytes(call.buffer).first(call.message_size), call.items}, call.plan.gathered_pieces, out);
  STAGECOACH_CHECK(out.ok());
}

ConstBytes Requester::MemoryOf(const Call& call, const Piece& piece) const {
  switch (piece.source) {
    case Piece::Source::kBase:
    case Piece::Source::kItem:
      return PieceBytes({ConstBytes(call.buffer).first(call.message_size), call.items}, piece);
    case Piece::Source::kPad:
      return ConstBytes(send_.memory).last(kArenaTail).first(piece.length);
    case Piece::Source::kResult:
      return call.results[piece.index].subspan(piece.offset, piece.length);
    case Piece::Source::kReplyBuffer:
      return ConstBytes(call.reply_memory.get(), call.plan.reply_capacity).subspan(piece.offset, piece.length);
    case Piece::Source::kGathered:
      return ConstBytes(call.gathered.get(), call.plan.gathered_bytes).subspan(piece.offset, piece.length);
  }
  return {};
}

void Requester::CountSent(const Call& call) {
  ++stats_.sends;
  if (call.resends > 0 || call.extension) return;
  ++stats_.calls;
  if (call.plan.type == MessageType::kNomsg) ++stats_.calls_long;
  if (HasEligibleReads(call.plan)) ++stats_.calls_by_read_chunk;
  if (!call.plan.write_counts.empty()) ++stats_.calls_by_write_chunk;
  if (call.plan.exposed_segments() == 0) ++stats_.calls_inline;
}

// --- Receiving ---

void Requester::OnReceive(uint32_t slot, uint32_t length, std::optional<uint32_t> invalidated, Instant now) {
  STAGECOACH_CHECK(slot < receive_.slots && length <= receive_.slot_size && posted_receives_ > 0);
  if (invalidated) OnInvalidatedByPeer(*invalidated, now);
  ByteReader in(receive_.slot(slot).first(length));
  Result<Header, HeaderFault> header = terms_.Decode(in);
  if (!header) return OnMalformed(slot, length, header.error(), now);
  OnMessage(slot, std::move(*header), in.Rest(), now);
}

void Requester::OnMalformed(uint32_t slot, uint32_t length, const HeaderFault& fault, Instant now) {
  --posted_receives_;
  ++stats_.receives;
  if (over_) return;
  ++stats_.malformed;
  // [5666bis:8.3.3#1] Nothing of a message too short for the fixed fields may be used. Otherwise the XID names the call
  // that can never complete now [5666bis:5.5#5].
  // [v2:3.2+3] [v2:7.3#2] In version 2 it has to say that it is an answer, which another version's does not; and
  // [v2:5.2#3] what is of no type that we know may answer anything.
  const bool says_nothing = fault.kind == HeaderFault::Kind::kTooShort || !fault.xid ||
                            (fault.flags && fault.kind == HeaderFault::Kind::kUnknownType);
  const bool is_response = fault.flags ? (*fault.flags & kFlagResponse) != 0 : !(terms_.settled() && terms_.is_v2());
  const bool answers = is_response && !says_nothing;
  std::optional<uint32_t> index;
  if (answers) index = xid_table_.Find(*fault.xid);
  if (trace_ != nullptr) {
    Trace(trace_, now, config_.name, "reply.malformed",
          {{"length", uint64_t{length}},
           {"xid", uint64_t{fault.xid.value_or(0)}},
           {"matched", uint64_t{index ? 1u : 0u}},
           {"why", ToString(fault)}});
  }
  if (index) {
    STAGECOACH_MARK("requester.malformed_reply_ends_its_call");
    xid_table_.Erase(*fault.xid);
    CountReply(*index, *fault.xid, std::nullopt);
    if (*index != kAbandoned) {
      CallFailure failure{.kind = CallFailure::Kind::kBadHeader, .sent = true};
      failure.header = fault;
      if (!calls_[*index]->failure) calls_[*index]->failure = failure;
      Fence(*index, now);
    }
  }
  if (fault.action == FaultAction::kDisconnect) {
    // Without an answer, as a requester sends none; and without what the peer takes there is nothing to go by.
    // [v2:4.1#1] [v2:5.3.3#1]
    STAGECOACH_MARK("requester.malformed_properties");
    EndConnection(Disconnect::Why::kBadProperties);
  } else if (answers && exchange_ == Exchange::kSent && fault.xid == kConnPropXid) {
    STAGECOACH_MARK("requester.answer_to_properties_cannot_be_read");
    credits_.OnReply(std::nullopt);
    EndExchange(ExchangeEnd::kRefused, now);
  }
  PostReceiveAgain(slot);
  Pump(now);
}

void Requester::OnMessage(uint32_t slot, Header&& header, ConstBytes body, Instant now) {
  --posted_receives_;
  ++stats_.receives;
  if (over_) return;
  const auto ignore = [&](uint64_t* counter, std::string_view why) {
    ++*counter;
    const bool exposes = why != "reverse_call" && OwesDone(header);
    Trace(trace_, now, config_.name, "reply.ignored",
          {{"xid", uint64_t{header.xid}},
           {"why", why},
           {"type", ToString(header.type(), header.flags ? kRpcRdmaVersion2 : kRpcRdmaVersion1)},
           {"credits", uint64_t{header.credits}},
           {"exposes", uint64_t{exposes ? 1u : 0u}}});
    // What a reply exposes is held until somebody says that it may go.
    if (exposes) {
      credits_.OnDoneOwed();
      dones_.push({header.xid, slot});
    } else {
      PostReceiveAgain(slot);
    }
    Pump(now);
  };
  CountHeader(header, now);
  // [v2:3.2#2] [v2:3.2#5] [v2:3.2+3] [v2:8.2+4] Nothing that is not marked as an answer is one, whatever its XID.
  if (header.flags && !header.is_response()) {
    STAGECOACH_MARK("requester.not_marked_as_response");
    return ignore(&stats_.ignored, header.type() == MessageType::kError ? "not_marked" : "reverse_call");
  }
  // [v2:10.1+2] Answers to the one are found by their type.
  if (header.type() == MessageType::kConnProp) return OnProperties(slot, header, now);
  const bool may_be_refused = exchange_ == Exchange::kSent || exchange_ == Exchange::kGivenUp;
  if (may_be_refused && header.type() == MessageType::kError && header.xid == kConnPropXid) {
    // [v2:4.2+3] [v2:5.3.4#1] By the defaults, then.
    STAGECOACH_MARK("requester.properties_refused");
    ++stats_.errors;
    Trace(trace_, now, config_.name, "properties.refused", {{"why", ErrorText(header.body, terms_.extensions())}});
    if (exchange_ == Exchange::kSent) {
      credits_.OnReply(GrantOf(header));
      EndExchange(ExchangeEnd::kRefused, now);
    }
    exchange_ = Exchange::kOver;
    PostReceiveAgain(slot);
    return Pump(now);
  }
  // [5666bis:5.7.2#1] RDMA_DONE is dropped. So is a reverse-direction call, told apart from a reply by its direction
  // word: no program is offered here [5666bis:8.3.1#1] [5666bis:8.3.1+1].
  if (header.type() == MessageType::kDone) {
    STAGECOACH_MARK("requester.done_dropped");
    return ignore(&stats_.ignored, "done");
  }
  if (!header.flags && header.has_inline_message() && body.size() >= 8 && ByteReader(body.subspan(4)).U32() == 0) {
    STAGECOACH_MARK("requester.reverse_call_dropped");
    return ignore(&stats_.ignored, "reverse_call");
  }

  uint32_t xid = header.xid;
  if (STAGECOACH_MUTANT("reply-matched-by-order", "a reply is given to the oldest call, whatever its XID")) {
    for (const auto& call : calls_) {
      if (call->state == State::kSent && static_cast<int32_t>(call->xid - xid) < 0) xid = call->xid;
    }
  }
  const std::optional<uint32_t> index = xid_table_.Find(xid);
  if (!index) {
    STAGECOACH_MARK("requester.reply_to_nobody");
    return ignore(&stats_.unknown_xids, "unknown_xid");
  }
  xid_table_.Erase(xid);
  CountReply(*index, xid, GrantOf(header));
  stats_.credits_granted = credits_.granted();
  if (*index == kAbandoned) {
    STAGECOACH_MARK("requester.reply_after_cancel");
    return ignore(&stats_.ignored, "cancelled");
  }
  OnReplyTo(*index, slot, std::move(header), body, now);
  Pump(now);
}

// [v2:10.1+3] What it grants, if it answers what this end has sent; else nothing. So Responder::SendAnswer reckons.
// [v2:5.3.3#2] [v2:7#1] An error of version 2 nothing; nor does the one that ends a probe.
std::optional<uint32_t> Requester::GrantOf(const Header& header) const {
  if (header.type() == MessageType::kError && (header.flags || terms_.probing())) return std::nullopt;
  return header.credits;
}

// [v2:3.2#1] Flags that nobody has defined are of no meaning.
void Requester::CountHeader(const Header& header, Instant now) {
  const uint32_t unknown = UnknownFlags(header, terms_.extensions());
  if (unknown == 0) return;
  STAGECOACH_MARK("requester.unknown_flags");
  ++stats_.unknown_flags;
  Trace(trace_, now, config_.name, "flags.unknown", {{"xid", uint64_t{header.xid}}, {"flags", uint64_t{unknown}}});
}

// Of a call that was over before, or not.
void Requester::CountReply(uint32_t index, uint32_t xid, std::optional<uint32_t> grant) {
  if (index != kAbandoned) return credits_.OnReply(grant, calls_[index]->dones_before);
  uint32_t dones_before = 0;
  for (size_t i = 0; i < abandoned_.size(); ++i) {
    if (abandoned_[i] == xid) dones_before = abandoned_[i].dones_before;
  }
  abandoned_.Remove(xid);
  credits_.OnReply(grant, dones_before);
}

void Requester::OnReplyTo(uint32_t index, uint32_t slot, Header&& header, ConstBytes message, Instant now) {
  Call& call = *calls_[index];
  call.answered_in = header.flags ? kRpcRdmaVersion2 : kRpcRdmaVersion1;
  const ProtocolProfile& profile = terms_.profile();
  if (profile.header_xid_prevails && header.has_inline_message() && message.size() >= 4) PutXid(message, header.xid);
  call.cut_lengths.clear();
  if (header.chunks() != nullptr) {
    WriteList* const writes = &header.mutable_chunks()->writes;
    if (config_.lengths_may_be_wrong) {
      call.cut_lengths = CutWrongLengths(writes, call.offered.writes);
    } else if (profile.written_lengths_count_round_up) {
      call.cut_lengths = CutRoundUp(writes, call.offered.writes);
    }
  }
  const bool owes_done = OwesDone(header);
  if (owes_done) credits_.OnDoneOwed();
  if (trace_ != nullptr) TraceReply(index, header, message, now);
  // A call that timed out has its verdict, and waits for the connection to end.
  // [5666bis:5.5+2] [5666bis:6.3+2] One that is answered with an error, or wrongly, ends with that, for good.
  std::optional<CallFailure> failure = call.failure;
  const auto refuse = [&](CallFailure::Kind kind, const char* why) -> CallFailure& {
    ++stats_.malformed;
    Trace(trace_, now, config_.name, "reply.refused",
          {{"call", IdOf(index)}, {"xid", uint64_t{header.xid}}, {"why", why}});
    return failure.emplace(CallFailure{.kind = kind, .sent = true});
  };
  const auto refuse_chunks = [&](ChunkFault fault) {
    STAGECOACH_MARK("requester.chunk_lists_not_ours");
    refuse(CallFailure::Kind::kBadChunks, ToString(fault)).chunk = fault;
  };
  if (failure) {
    STAGECOACH_MARK("requester.reply_after_deadline");
    ++stats_.ignored;
  } else if (header.flags && header.type() == MessageType::kError) {
    ++stats_.errors;
    MarkError(header.body);
    CountInvalidation(call, /*error=*/true);
    if (auto attempt = AttemptAfter(call, header.body)) {
      PostReceiveAgain(slot);
      return Resend(index, std::move(attempt), header.body, now);
    }
    STAGECOACH_MARK("requester.error_ends_its_call");
    failure = FailureOf(header.body);
  } else if (const auto* versions = std::get_if<ErrVers>(&header.body)) {
    STAGECOACH_MARK("requester.err_vers");
    failure = CallFailure{.kind = CallFailure::Kind::kErrVers, .sent = true, .versions = *versions};
    ++stats_.errors;
  } else if (std::holds_alternative<ErrChunk>(header.body)) {
    STAGECOACH_MARK("requester.err_chunk");
    failure = CallFailure{.kind = CallFailure::Kind::kErrChunk, .sent = true};
    ++stats_.errors;
  } else if (call.extension) {
    auto* const answer = std::get_if<Extension>(&header.body);
    if (answer != nullptr && !answer->has_message) {
      ++stats_.replies;
      call.extension = std::move(*answer);
      PostReceiveAgain(slot);
      return Fence(index, now);
    }
    STAGECOACH_MARK("requester.extension_answered_otherwise");
    ++stats_.malformed;
    failure = CallFailure{.kind = CallFailure::Kind::kBadHeader, .sent = true};
    failure->header = {.kind = HeaderFault::Kind::kExtension,
                       .xid = header.xid,
                       .version = header.version,
                       .expected = kRpcRdmaVersion2,
                       .flags = header.flags};
  } else if (const auto direction = CheckDirection(header, message)) {
    // [v2:3.2#2]
    STAGECOACH_MARK("requester.reply_is_marked_wrongly");
    refuse(CallFailure::Kind::kBadDirection, ToString(*direction)).direction = *direction;
  } else if (auto reads =
                 ValidateReply(header, message, call.offered, profile, {.read_bytes_max = config_.read_bytes_max});
             !reads) {
    refuse_chunks(reads.error());
  } else if (owes_done && reads_max_ == 0) {
    // [5666:6.2#5] [2004:6.1#6] Nothing may be read of a responder that has said so.
    refuse_chunks(ChunkFault::kUnexpectedReadList);
  } else if (owes_done) {
    call.pull = std::make_unique<Pull>();
    call.pull->chunks = std::move(*reads);
    for (const ReadChunk& chunk : call.pull->chunks.chunks) call.pull->bytes += chunk.length;
  }
  if (failure) {
    call.failure = failure;
    PostReceiveAgain(slot);
  } else {
    ++stats_.replies;
    call.receive_slot = slot;
    call.reply_header = std::move(header);
    call.reply_inline = message;
    CountInvalidation(call, /*error=*/false);
    if (call.pull) {
      ++stats_.replies_by_read_chunk;
      call.state = State::kPulling;
      if (SaysDoneAtOnce()) dones_.push({call.xid, std::nullopt});
      if (call.pull->bytes == 0) return EndPull(index);
      pulls_.push(index);
      return PumpPulls(now);
    }
  }
  Fence(index, now);
  if (owes_done) dones_.push({call.xid, std::nullopt});
}

// --- Version 2: errors, and what is made of them ---

// [v2:5.3.3#8] [v2:5.3.3#9] [v2:5.3.3#12] [v2:5.3.3#13] [v2:5.3.3#17] [v2:5.3.3#20] [v2:5.3.3#22] [v2:5.3.3+10]
// [v2:8.5+1] How the call is to be sent again, where the error says how it could be served (docs/decisions/0050). Null:
// it ends with the error, as it does when the same call would be refused again. What the responder takes is remembered
// in either case, but for errors that this call cannot have caused.
std::unique_ptr<Requester::Attempt> Requester::AttemptAfter(Call& call, const Header::Body& error) {
  if (call.extension) return nullptr;
  const CallPlan& last = call.plan;
  auto attempt = std::make_unique<Attempt>();
  attempt->wish = call.wish;
  Wish& wish = attempt->wish;
  bool helps = false;
  if (const auto* reads = std::get_if<ErrReadChunks>(&error)) {
    if (last.reads.empty()) return nullptr;
    peer_takes_.read_chunks = std::min(peer_takes_.read_chunks, reads->max_chunks);
    // All of the message at position zero, unless it has a chunk there: such a call ends, whatever else could be left
    // out.
    helps = !HasPositionZero(last);
    wish.direct_arguments = false;
  } else if (const auto* writes = std::get_if<ErrWriteChunks>(&error)) {
    if (last.write_counts.empty()) return nullptr;
    peer_takes_.write_chunks = std::min(peer_takes_.write_chunks, writes->max_chunks);
    helps = true;
    wish.direct_results = false;
  } else if (const auto* segments = std::get_if<ErrSegments>(&error)) {
    if (last.exposed_segments() == 0 || segments->max_segments == 0) return nullptr;
    peer_takes_.segments = std::min(peer_takes_.segments, segments->max_segments);
    helps = !call.fewer_segments;
    call.fewer_segments = true;
  } else if (const auto* result = std::get_if<ErrWriteResource>(&error)) {
    helps = config_.resend_executed && Grow(call, *result, attempt.get());
  } else if (const auto* reply = std::get_if<ErrReplyResource>(&error)) {
    const uint64_t offered = call.offered.reply ? TotalLength(*call.offered.reply) : 0;
    // Whatever length it says: it is found when a reply is made, and nothing in it says that there was none.
    if (reply->length_needed > 0) {
      helps = config_.resend_executed && reply->length_needed > offered;
      wish.reply_chunk_min = reply->length_needed;
    } else if (!last.write_counts.empty()) {
      // No Write chunk at all can be taken.
      peer_takes_.write_chunks = 0;
      helps = config_.resend_executed;
      wish.direct_results = false;
    }
  }
  if (!helps) return nullptr;
  if (call.resends == config_.resends_max) {
    STAGECOACH_MARK("requester.resent_often_enough");
    return nullptr;
  }

  SmallVector<MutableBytes, 2> results = call.results;
  if (attempt->grown) results[attempt->grown_index] = {attempt->grown.get(), attempt->grown_size};
  attempt->planned_by = limits();
  auto plan = Plan(call.message_size, call.items, results, wish, attempt->planned_by);
  if (!plan || *plan == last || !Permits(*plan)) return nullptr;
  attempt->plan = std::move(*plan);
  if (OwnBytes(call, *attempt) > config_.grown_bytes_max) {
    STAGECOACH_MARK("requester.resend_would_take_too_much_memory");
    return nullptr;
  }
  return attempt;
}

// [v2:5.3.3+9] A longer Write chunk: counted from one, and in memory of this end's own.
bool Requester::Grow(const Call& call, const ErrWriteResource& error, Attempt* attempt) const {
  const WriteList& offered = call.offered.writes;
  if (error.chunk_index == 0 || error.chunk_index > offered.size()) return false;
  attempt->grown_index = error.chunk_index - 1;
  if (error.length_needed <= TotalLength(offered[attempt->grown_index])) return false;
  attempt->grown_size = XdrRoundUp(error.length_needed);
  if (attempt->grown_size > config_.grown_bytes_max) return false;
  attempt->grown.reset(new (std::nothrow) std::byte[attempt->grown_size]);
  return attempt->grown != nullptr;
}

// What this end adds of its own to serve the call.
uint64_t Requester::OwnBytes(const Call& call, const Attempt& attempt) const {
  uint64_t bytes = attempt.grown_size + attempt.wish.reply_chunk_min + attempt.plan.gathered_bytes;
  for (size_t i = 0; i < call.grown.size(); ++i) {
    const bool replaced = attempt.grown && attempt.grown_index == i;
    if (call.grown[i] && !replaced) bytes += call.results[i].size();
  }
  return bytes;
}

// [v2:5.3.3+11] Under its XID, by which a replay cache knows it. The credit of the first attempt has come back with the
// error; the next takes one of its own.
void Requester::Resend(uint32_t index, std::unique_ptr<Attempt> attempt, const Header::Body& error, Instant now) {
  Call& call = *calls_[index];
  STAGECOACH_MARK("requester.resend");
  if (attempt->wish.direct_arguments != call.wish.direct_arguments) STAGECOACH_MARK("requester.resend_as_long_call");
  if (attempt->wish.direct_results != call.wish.direct_results) STAGECOACH_MARK("requester.resend_without_writes");
  if (attempt->plan.gathered_bytes > 0) STAGECOACH_MARK("requester.resend_gathered");
  if (attempt->grown) STAGECOACH_MARK("requester.resend_with_longer_write_chunk");
  if (attempt->wish.reply_chunk_min > 0) STAGECOACH_MARK("requester.resend_with_longer_reply_chunk");
  ++call.resends;
  ++stats_.resends;
  Trace(trace_, now, config_.name, "call.resent",
        {{"call", IdOf(index)},
         {"xid", uint64_t{call.xid}},
         {"resends", uint64_t{call.resends}},
         {"why", ErrorText(error, terms_.extensions())}});
  call.wanted_xid = call.xid;
  resending_.push(call.xid);
  call.next = std::move(attempt);
  if (STAGECOACH_MUTANT("v2-resend-before-fence", "a call is sent again while STags of its first attempt are valid")) {
    return Requeue(index, now);
  }
  Fence(index, now);
}

// What was offered before is out of the peer's reach now. It has waited once: it is the next.
void Requester::Requeue(uint32_t index, Instant now) {
  Call& call = *calls_[index];
  const std::unique_ptr<Attempt> next = std::move(call.next);
  call.wish = next->wish;
  call.plan = std::move(next->plan);
  call.planned_by = next->planned_by;
  if (next->grown) {
    call.grown.resize(call.results.size());
    call.results[next->grown_index] = {next->grown.get(), next->grown_size};
    call.grown[next->grown_index] = std::move(next->grown);
  }
  if (STAGECOACH_MUTANT("v2-resend-new-xid", "a call that is sent again has another XID")) call.wanted_xid.reset();
  call.state = State::kQueued;
  queue_.push_front(index);
  if (trace_ != nullptr) TracePlan(index, now);
}

// --- Version 2: properties ---

// [v2:8.2+1] [v2:3.2#4] One message that awaits an answer, as a call is.
void Requester::PumpExchange(Instant now) {
  if (exchange_ != Exchange::kWaiting || ending_ || over_ || !credits_.available() || free_send_slots_.empty() ||
      posted_receives_ <= credits_.in_flight()) {
    return;
  }
  const Header header = terms_.MakeHeader(kConnPropXid, credits_.Request(queue_.size()), 0, ConnProp{terms_.own_set()});
  const uint32_t slot = free_send_slots_.back();
  free_send_slots_.pop_back();
  ByteWriter out(send_.slot(slot));
  terms_.Encode(header, out);
  STAGECOACH_CHECK(out.ok());
  commands_.push(PostSend{.slot = slot, .length = static_cast<uint32_t>(out.position())});
  credits_.OnSent();
  exchange_ = Exchange::kSent;
  ++stats_.sends;
  stats_.send_bytes.Record(out.position());
  Trace(trace_, now, config_.name, "properties.sent",
        {{"slot", uint64_t{slot}},
         {"bytes", out.position()},
         {"requested", uint64_t{header.credits}},
         {"granted", uint64_t{credits_.granted()}},
         {"in_flight", uint64_t{credits_.in_flight()}},
         {"receives", uint64_t{posted_receives()}},
         {"received", stats_.receives}});
  EndExchangeIfTold(now);
}

void Requester::OnPeerProperties(Instant now) {
  EndExchangeIfTold(now);
  Pump(now);
}

// The draft does not say that properties are answered, nor how an end marks those that it tells of itself: a peer that
// has told its own may never answer ours (docs/decisions/0048). [v2:5.3.4+1] [v2:5.3.4+5]
void Requester::EndExchangeIfTold(Instant now) {
  if (exchange_ != Exchange::kSent || !terms_.peer_has_spoken()) return;
  STAGECOACH_MARK("requester.peer_announced_its_properties");
  GiveExchangeUp(ExchangeEnd::kAnnounced, now);
}

// The peer may not have read it yet, so that its credit is not back.
void Requester::GiveExchangeUp(ExchangeEnd end, Instant now) {
  credits_.OnGivenUp();
  EndExchange(end, now);
  exchange_ = Exchange::kGivenUp;
}

// [v2:5.3.4+4] [v2:5.3.4+7] [v2:5.3.4+8] What answers ours, or comes by itself: taken all the same, for once. Only an
// answer to ours has a grant; one that is waited for returns the credit as well.
void Requester::OnProperties(uint32_t slot, const Header& header, Instant now) {
  const bool first = terms_.OnPeerProperties(std::get<ConnProp>(header.body).properties);
  if (!first) ++stats_.properties_again;
  const bool awaited = exchange_ == Exchange::kSent || exchange_ == Exchange::kGivenUp;
  if (!awaited) STAGECOACH_MARK("requester.properties_nobody_asked_for");
  Trace(trace_, now, config_.name, "properties.received",
        {{"xid", uint64_t{header.xid}},
         {"credits", uint64_t{header.credits}},
         {"receive_buffer", uint64_t{terms_.peer().receive_buffer_size}},
         {"reverse", ToString(terms_.peer().reverse_requests)},
         {"first", uint64_t{first ? 1u : 0u}},
         {"awaited", uint64_t{awaited ? 1u : 0u}}});
  if (exchange_ == Exchange::kSent) {
    credits_.OnReply(header.credits);
    EndExchange(ExchangeEnd::kAnswered, now);
  } else if (exchange_ == Exchange::kGivenUp) {
    STAGECOACH_MARK("requester.properties_answered_late");
    credits_.OnLateAnswer(header.credits);
    exchange_ = Exchange::kOver;
  }
  stats_.credits_granted = credits_.granted();
  PostReceiveAgain(slot);
  Pump(now);
}

void Requester::EndExchange(ExchangeEnd end, Instant now) {
  exchange_ = Exchange::kOver;
  exchange_end_ = end;
  Trace(trace_, now, config_.name, "properties.over", {{"how", ToString(end)}});
}

// --- Reading what a responder exposes ---

bool Requester::OwesDone(const Header& header) const {
  return terms_.profile().replies_by_read_chunk && header.chunks() != nullptr && !header.chunks()->reads.empty();
}

// [5666:3.5#1] [2004:3.6#1] [5666:3.8+4] [2004:3.8+4] One for each reply that exposes memory, ahead of any call.
void Requester::PumpDones(Instant now) {
  while (!ending_ && !over_ && !dones_.empty() && !free_send_slots_.empty()) {
    const OwedDone done = dones_.pop();
    const uint32_t slot = free_send_slots_.back();
    free_send_slots_.pop_back();
    ByteWriter out(send_.slot(slot));
    terms_.Encode(terms_.MakeHeader(done.xid, credits_.requested(), 0, RdmaDone{}), out);
    STAGECOACH_CHECK(out.ok());
    commands_.push(PostSend{.slot = slot, .length = static_cast<uint32_t>(out.position())});
    credits_.OnDoneSent();
    ++stats_.sends;
    ++stats_.dones;
    Trace(trace_, now, config_.name, "done.sent",
          {{"xid", uint64_t{done.xid}},
           {"slot", uint64_t{slot}},
           {"in_flight", uint64_t{credits_.in_flight()}},
           {"dones", uint64_t{credits_.dones()}}});
    if (done.receive_slot) PostReceiveAgain(*done.receive_slot);
  }
  if (!ending_ && !over_ && !dones_.empty()) STAGECOACH_MARK("requester.done_waits_for_send_buffer");
}

// [5666:5.1+5] [2004:5.1+4] Memory for all that is to be read. False: there is none.
bool Requester::BeginPull(Call& call) {
  Pull& pull = *call.pull;
  pull.memory.reset(new (std::nothrow) std::byte[pull.bytes]);
  if (pull.memory == nullptr) return false;
  read_bytes_ += pull.bytes;
  const auto sink = memory_.Register(ConstBytes(pull.memory.get(), pull.bytes), MemoryUse::kReadSink, nullptr);
  if (!sink) return false;
  pull.local_key = sink->local_key;
  if (sink->id != 0) {
    ++stats_.registrations;
    ++call.stags_valid;
    call.exposed.push_back({sink->id, sink->handle, false});
  }
  return true;
}

// [5666:3.5+5] [2004:3.6+3] No more at a time than the responder takes, a reply's all before the next one's.
void Requester::PumpPulls(Instant now) {
  while (!ending_ && !over_ && !pulls_.empty()) {
    const uint32_t index = pulls_.front();
    Call& call = *calls_[index];
    Pull& pull = *call.pull;
    if (pull.memory == nullptr) {
      if (read_bytes_ > 0 && pull.bytes > config_.read_bytes_max - read_bytes_) {
        STAGECOACH_MARK("requester.reply_waits_for_memory");
        return;
      }
      const size_t exposed = call.exposed.size();
      if (!BeginPull(call)) {
        STAGECOACH_MARK("requester.sink_refused");
        pulls_.pop();
        call.failure = CallFailure{.kind = CallFailure::Kind::kMemory, .sent = true};
        EndPull(index);
        continue;
      }
      if (call.exposed.size() > exposed) {
        Trace(trace_, now, config_.name, "stag.exposed",
              {{"call", IdOf(index)},
               {"registration", uint64_t{call.exposed.back().registration}},
               {"use", "sink"},
               {"bytes", pull.bytes},
               {"lasting", uint64_t{0}}});
      }
    }
    const ReadList& segments = pull.chunks.segments;
    if (pull.next_segment == segments.size()) {
      pulls_.pop();
      if (pull.in_flight == 0) EndPull(index);
      continue;
    }
    const Segment& source = segments[pull.next_segment].target;
    if (source.length == 0) {
      ++pull.next_segment;
      continue;
    }
    if (reads_in_flight_ >= reads_max_) {
      STAGECOACH_MARK("requester.reads_wait_for_others");
      return;
    }
    ++pull.next_segment;
    commands_.push(PostRead{.sink = MutableBytes(pull.memory.get() + pull.next_byte, source.length),
                            .local_key = pull.local_key,
                            .source = source,
                            .tag = index});
    pull.next_byte += source.length;
    ++pull.in_flight;
    ++reads_in_flight_;
    ++stats_.reads;
    Trace(trace_, now, config_.name, "read.issued",
          {{"xid", uint64_t{call.xid}},
           {"bytes", uint64_t{source.length}},
           {"in_flight", uint64_t{reads_in_flight_}},
           {"reads_max", uint64_t{reads_max_}}});
  }
}

void Requester::OnReadDone(uint32_t tag, Instant now) {
  Call& call = *calls_[tag];
  STAGECOACH_CHECK(call.pull != nullptr && call.pull->in_flight > 0 && reads_in_flight_ > 0);
  --call.pull->in_flight;
  --reads_in_flight_;
  if (over_) return;
  const bool all = call.failure.has_value() || call.pull->next_segment == call.pull->chunks.segments.size();
  if (call.pull->in_flight == 0 && all) EndPull(tag);
  PumpPulls(now);
  Pump(now);
}

// Everything is in, or nobody wants it any more, and no Read is in flight. The responder is told without waiting for
// the fence, which is about memory of this end.
void Requester::EndPull(uint32_t index) {
  Fence(index, {});
  if (!SaysDoneAtOnce()) dones_.push({calls_[index]->xid, std::nullopt});
}

void Requester::ReleaseReadBytes(Call& call) {
  if (call.pull != nullptr && call.pull->memory != nullptr) read_bytes_ -= call.pull->bytes;
}

void Requester::TraceReply(uint32_t index, const Header& header, ConstBytes message, Instant now) {
  const ChunkLists& offered = calls_[index]->offered;
  const ChunkLists none;
  const ChunkLists& returned = header.chunks() != nullptr ? *header.chunks() : none;
  Trace(trace_, now, config_.name, "reply.received",
        {{"call", IdOf(index)},
         {"xid", uint64_t{header.xid}},
         {"type", ToString(header.type(), header.flags ? kRpcRdmaVersion2 : kRpcRdmaVersion1)},
         {"bytes", message.size()},
         {"credits", uint64_t{header.credits}},
         {"writes_offered", TotalLength(offered.writes.segments())},
         {"writes_returned", TotalLength(returned.writes.segments())},
         {"reply_offered", offered.reply ? TotalLength(*offered.reply) : 0},
         {"reply_returned", returned.reply ? TotalLength(*returned.reply) : 0},
         {"exposes", uint64_t{OwesDone(header) ? 1u : 0u}}});
}

// [pvtdata:3.2+2]
// Finds the exposure of ours that a Send With Invalidate ended. It should be one of the call that is being answered
// [pvtdata:4.1#2]; a peer that names another's breaks that call only, and this one is fenced all the same.
void Requester::OnInvalidatedByPeer(uint32_t handle, Instant now) {
  if (over_) return;
  for (const auto& call : calls_) {
    if (call->state != State::kSent && call->state != State::kPulling && call->state != State::kFencing) continue;
    for (internal::ExposedSegment& exposed : call->exposed) {
      if (exposed.handle == handle && !exposed.invalidated_by_peer) {
        exposed.invalidated_by_peer = true;
        if (!terms_.is_v2()) return;
        if (handle == call->inv_handle) {
          call->invalidated_at = stats_.receives;
        } else {
          STAGECOACH_MARK("requester.peer_invalidated_unasked");
          ++stats_.invalidations_unasked;
        }
        return;
      }
    }
  }
  if (terms_.is_v2()) ++stats_.invalidations_unasked;
  // Of a call that is over, or none of ours.
  STAGECOACH_MARK("requester.peer_invalidated_unknown_stag");
  Trace(trace_, now, config_.name, "stag.not_ours", {{"stag", uint64_t{handle}}});
}

// A call asks for an invalidation with its reply: with no error, and with no other message.
void Requester::CountInvalidation(const Call& call, bool error) {
  if (!call.invalidated_at || (!error && *call.invalidated_at + 1 == stats_.receives)) return;
  STAGECOACH_MARK("requester.peer_invalidated_unasked");
  ++stats_.invalidations_unasked;
}

// --- Ending a call ---

// [5666bis:4.4.4.2+4] [5666:3.5+4] [5666:3.8+6] [2004:3.8+6] [5666bis:5.4.1+2] [5666bis:10.1+5] [v2:11+1]
// The call's fate is known; before anybody hears of it, its steering tags must be invalid.
void Requester::Fence(uint32_t index, Instant now) {
  Call& call = *calls_[index];
  call.state = State::kFencing;
  for (const internal::ExposedSegment& exposed : call.exposed) {
    if (exposed.registration == 0) continue;
    if (STAGECOACH_MUTANT("forget-invalidation", "of a call's several STags the last stays valid") &&
        call.exposed.size() > 1 && &exposed == call.exposed.end() - 1) {
      continue;
    }
    if (exposed.invalidated_by_peer) {
      if (call.exposed.size() > 1) STAGECOACH_MARK("requester.peer_invalidated_one_stag_of_several");
      ++stats_.invalidations_remote;
    } else {
      ++stats_.invalidations_local;
    }
    ++call.invalidating;
    commands_.push(
        Invalidate{.registration = exposed.registration, .tag = index, .by_peer = exposed.invalidated_by_peer});
  }
  call.exposed.clear();
  if (call.invalidating == 0 || SkipsFence()) Conclude(index, now);
}

void Requester::OnInvalidated(uint32_t tag, Instant now) {
  Call& call = *calls_[tag];
  if (SkipsFence()) {
    if (call.stags_valid > 0) --call.stags_valid;
    return;
  }
  STAGECOACH_CHECK(call.invalidating > 0 && call.stags_valid > 0);
  --call.stags_valid;
  if (--call.invalidating > 0 || call.state != State::kFencing) return;
  Conclude(tag, now);
  if (call.state == State::kQueued) Pump(now);
}

void Requester::Conclude(uint32_t index, Instant now) {
  Call& call = *calls_[index];
  if (call.next != nullptr) return Requeue(index, now);
  if (call.resends > 0) resending_.Remove(call.xid);
  call.state = State::kOver;
  --outstanding_;
  outcomes_.push(index);
}

void Requester::FailWith(uint32_t index, CallFailure::Kind kind, Instant now) {
  Call& call = *calls_[index];
  call.failure = CallFailure{.kind = kind, .sent = call.state == State::kSent || call.resends > 0};
  Fence(index, now);
}

std::optional<CallOutcome> Requester::TakeOutcome(Instant now) {
  if (outcomes_.empty()) return std::nullopt;
  const uint32_t index = outcomes_.pop();
  Call& call = *calls_[index];
  CallOutcome outcome;
  outcome.call = IdOf(index);
  outcome.cookie = call.cookie;
  outcome.failure = call.failure;
  outcome.resends = call.resends;
  outcome.answered_in = call.answered_in;
  ReleaseReadBytes(call);
  if (call.failure) {
    TraceOver(index, outcome, now);
    return outcome;
  }
  if (call.extension) {
    outcome.extension = std::move(call.extension);
    stats_.call_time.RecordTime(now - call.submitted);
    TraceOver(index, outcome, now);
    return outcome;
  }

  const MutableBytes reply_memory(call.reply_memory.get(), call.reply_memory ? call.plan.reply_capacity : 0);
  SmallVector<ConstBytes, 4> read_data;
  if (call.pull != nullptr) {
    ConstBytes left(call.pull->memory.get(), call.pull->bytes);
    for (const ReadChunk& chunk : call.pull->chunks.chunks) {
      read_data.push_back(left.first(chunk.length));
      left = left.subspan(chunk.length);
      if (chunk.position != 0) stats_.bytes_placed_by_read += chunk.length;
    }
  }
  static const CallChunks none;
  outcome.reply = AssembleReply(call.reply_header, call.reply_inline, call.offered,
                                std::span<const MutableBytes>(call.results).first(call.offered.writes.size()),
                                reply_memory, call.pull != nullptr ? call.pull->chunks : none, read_data);
  const ProtocolProfile& profile = terms_.profile();
  ApplyProfile(profile, PaddingOf(profile, call.reply_header), &outcome.reply);
  for (size_t i = 0; i < call.cut_lengths.size(); ++i) outcome.reply.chunks[i].beyond = call.cut_lengths[i];
  if (profile.header_xid_prevails && outcome.reply.base.size() >= 4) PutXid(outcome.reply.base, call.xid);
  // A reply in the Reply chunk can be looked at only now that the chunk is fenced [5666bis:5.1.1#1].
  if (outcome.reply.base.size() < 4 || ByteReader(outcome.reply.base).U32() != call.xid) {
    ++stats_.malformed;
    outcome.reply = {};
    outcome.failure = CallFailure{.kind = CallFailure::Kind::kBadChunks, .sent = true};
    outcome.failure->chunk = ChunkFault::kXidMismatch;
    STAGECOACH_MARK("requester.reply_chunk_is_not_of_its_call");
    Trace(trace_, now, config_.name, "reply.refused",
          {{"call", outcome.call}, {"xid", uint64_t{call.xid}}, {"why", ToString(ChunkFault::kXidMismatch)}});
    TraceOver(index, outcome, now);
    return outcome;
  }
  // [v2:3.2#2] Nor could its direction be seen before.
  if (const auto direction = CheckDirection(call.reply_header, outcome.reply.base)) {
    STAGECOACH_MARK("requester.reply_chunk_holds_no_reply");
    ++stats_.malformed;
    outcome.reply = {};
    outcome.failure = CallFailure{.kind = CallFailure::Kind::kBadDirection, .sent = true};
    outcome.failure->direction = *direction;
    Trace(trace_, now, config_.name, "reply.refused",
          {{"call", outcome.call}, {"xid", uint64_t{call.xid}}, {"why", ToString(*direction)}});
    TraceOver(index, outcome, now);
    return outcome;
  }
  outcome.grown = std::move(call.grown);
  for (const ChunkData& chunk : outcome.reply.chunks) {
    if (chunk.data.empty()) STAGECOACH_MARK("requester.write_chunk_came_back_unused");
    outcome.placed.push_back(chunk.data.size());
    stats_.bytes_placed_by_write += chunk.data.size();
  }
  for (const ReadSegment& read : call.offered.reads) {
    if (read.position != 0) stats_.bytes_placed_by_read += read.target.length;
  }
  if (call.reply_header.type() == MessageType::kNomsg) {
    ++stats_.replies_long;
    outcome.reply_memory = std::move(call.reply_memory);
  } else if (call.reply_memory) {
    STAGECOACH_MARK("requester.reply_chunk_came_back_unused");
  }
  if (call.pull != nullptr) {
    const bool whole = call.pull->chunks.has_position_zero();
    (whole ? outcome.reply_memory : outcome.read_memory) = std::move(call.pull->memory);
  }
  stats_.call_time.RecordTime(now - call.submitted);
  TraceOver(index, outcome, now);
  return outcome;
}

void Requester::TraceOver(uint32_t index, const CallOutcome& outcome, Instant now) {
  if (trace_ == nullptr) return;
  const Call& call = *calls_[index];
  uint64_t placed = 0;
  for (const uint64_t bytes : outcome.placed) placed += bytes;
  Trace(trace_, now, config_.name, "call.over",
        {{"call", outcome.call},
         {"cookie", outcome.cookie},
         {"xid", uint64_t{call.xid}},
         {"outcome", outcome.failure ? ToString(outcome.failure->kind) : "ok"},
         {"sent", uint64_t{!outcome.failure || outcome.failure->sent ? 1u : 0u}},
         {"stags", uint64_t{call.stags_valid}},
         {"reply", outcome.reply.base.size()},
         {"placed", placed}});
}

void Requester::Release(CallId id, Instant now) {
  Call* call = Find(id);
  if (call == nullptr || call->state != State::kOver) return;
  if (call->receive_slot && !over_) PostReceiveAgain(*call->receive_slot);
  FreeCall(static_cast<uint32_t>(id & UINT32_MAX) - 1);
  if (STAGECOACH_MUTANT("lost-wakeup", "a call that waits for a Receive is not told of it")) return;
  PumpPulls(now);  // one may have waited for this one's memory
  Pump(now);       // a call may have waited for this Receive
}

void Requester::OnSendDone(uint32_t slot, Instant now) {
  if (!ReusesSendBuffers()) free_send_slots_.push_back(slot);
  Pump(now);
}

void Requester::OnDisconnected(Instant now) {
  over_ = true;
  commands_.clear();
  queue_.clear();
  abandoned_.clear();
  pulls_.clear();
  dones_.clear();
  resending_.clear();
  exchange_ = Exchange::kOver;
  reads_in_flight_ = 0;
  posted_receives_ = 0;
  next_deadline_.reset();
  for (uint32_t index = 0; index < calls_.size(); ++index) {
    Call& call = *calls_[index];
    if (call.state == State::kFree || call.state == State::kOver) continue;
    if (call.state == State::kQueued) STAGECOACH_MARK("requester.disconnect_while_queued");
    if (call.state == State::kSent) STAGECOACH_MARK("requester.disconnect_while_sent");
    if (call.state == State::kPulling) STAGECOACH_MARK("requester.disconnect_while_pulling");
    if (call.state == State::kFencing) STAGECOACH_MARK("requester.disconnect_while_fencing");
    // A reply that was only waiting for its fence is as good as any: the fence has come. An error that would have the
    // call sent again is none.
    if ((call.state != State::kFencing || call.next != nullptr) && !call.failure) {
      call.failure = CallFailure{.kind = closed_ ? CallFailure::Kind::kClosed : CallFailure::Kind::kConnectionLost,
                                 .sent = call.state != State::kQueued || call.resends > 0};
    }
    call.next.reset();
    call.invalidating = 0;
    call.stags_valid = 0;
    call.exposed.clear();
    Conclude(index, now);
  }
  Trace(trace_, now, config_.name, "disconnected", {{"calls_ended", outcomes_.size()}});
}

// --- Time ---

void Requester::LowerDeadline(const std::optional<Instant>& deadline) {
  if (deadline && (!next_deadline_ || *deadline < *next_deadline_)) next_deadline_ = deadline;
}

std::optional<Instant> Requester::Deadline() const {
  return next_deadline_;
}

// Looks at every call, but only about once per timeout: a deadline set is never later than the earliest at the last
// look.
void Requester::OnDeadline(Instant now) {
  if (over_ || !next_deadline_ || now < *next_deadline_) return;
  next_deadline_.reset();
  bool end = false;
  bool exchange_over = false;
  bool given_up = false;
  if (exchanging() && now < exchange_until_) LowerDeadline(exchange_until_);
  if (exchanging() && now >= exchange_until_) {
    // By the defaults. [v2:5.3.4#1]
    STAGECOACH_MARK("requester.properties_unanswered");
    if (exchange_ == Exchange::kSent) {
      GiveExchangeUp(ExchangeEnd::kUnanswered, now);
    } else {
      EndExchange(ExchangeEnd::kUnanswered, now);
    }
    exchange_over = true;
  }
  for (uint32_t index = 0; index < calls_.size(); ++index) {
    Call& call = *calls_[index];
    // One that was cancelled while its reply was read waits for the Reads first.
    if (call.next != nullptr && call.deadline && now < *call.deadline) LowerDeadline(call.deadline);
    if (call.next != nullptr && call.deadline && now >= *call.deadline) {
      STAGECOACH_MARK("requester.deadline_before_resend");
      call.next.reset();
      call.failure = CallFailure{.kind = CallFailure::Kind::kTimedOut, .sent = true};
    }
    const bool ends_soon = call.state == State::kFencing || (call.state == State::kPulling && call.failure);
    if (ends_soon && call.deadline) {
      if (now >= *call.deadline) STAGECOACH_MARK("requester.deadline_while_fencing");
      // A peer that has answered and takes nothing more keeps local invalidations from their turn on the send queue.
      const Instant limit = *call.deadline + kFenceTime;
      if (now < limit) {
        LowerDeadline(limit);
      } else {
        Trace(trace_, now, config_.name, "call.timed_out", {{"call", IdOf(index)}, {"xid", uint64_t{call.xid}}});
        end = true;
      }
    }
    if (call.state == State::kFree || call.state == State::kFencing || call.state == State::kOver) continue;
    if (!call.deadline || call.failure) continue;
    if (STAGECOACH_MUTANT("lost-timeout", "the deadline of a queued call is forgotten") &&
        call.state == State::kQueued) {
      continue;
    }
    if (now < *call.deadline) {
      LowerDeadline(call.deadline);
    } else if (call.state == State::kQueued) {
      STAGECOACH_MARK("requester.deadline_while_queued");
      queue_.Remove(index);
      FailWith(index, call.resends > 0 ? CallFailure::Kind::kTimedOut : CallFailure::Kind::kNoCredit, now);
    } else if (MayTimeOut(call)) {
      Trace(trace_, now, config_.name, "call.timed_out", {{"call", IdOf(index)}, {"xid", uint64_t{call.xid}}});
      Abandon(call, now);
      FailWith(index, CallFailure::Kind::kTimedOut, now);
      given_up = given_up || call.extension.has_value();
    } else {
      STAGECOACH_MARK("requester.deadline_while_sent");
      call.failure = CallFailure{.kind = CallFailure::Kind::kTimedOut, .sent = true};
      Trace(trace_, now, config_.name, "call.timed_out", {{"call", IdOf(index)}, {"xid", uint64_t{call.xid}}});
      end = true;
    }
  }
  for (size_t i = 0; i < abandoned_.size(); ++i) {
    const auto& deadline = abandoned_[i].deadline;
    if (deadline && now >= *deadline) {
      STAGECOACH_MARK("requester.deadline_after_cancel");
      Trace(trace_, now, config_.name, "call.timed_out", {{"xid", uint64_t{abandoned_[i].xid}}});
      end = true;
    }
    if (STAGECOACH_MUTANT("later-deadline-forgotten", "of several cancelled calls only the first deadline is kept"))
      break;
    if (deadline && now < *deadline) LowerDeadline(deadline);
  }
  if (end) EndConnection(Disconnect::Why::kCallTimedOut);
  if (exchange_over || given_up) Pump(now);
}

void Requester::EndConnection(Disconnect::Why why) {
  if (ending_ || over_) return;
  ending_ = true;
  commands_.push(Disconnect{why});
}

std::string Requester::DebugString() const {
  static constexpr const char* kStates[] = {"free", "queued", "sent", "pulling", "fencing", "over"};
  const auto number = [](uint64_t value) { return std::to_string(value); };
  std::string text = "  credits granted " + number(credits_.granted()) + ", in flight " + number(credits_.in_flight()) +
                     "; asked for " + number(credits_.requested()) + "; receives wanted " + number(posted_receives()) +
                     " of " + number(receives_) + "; send buffers free " + number(free_send_slots_.size()) + " of " +
                     number(send_.slots) + "; calls outstanding " + number(outstanding_) + ", of them queued " +
                     number(queue_.size()) +
                     (over_     ? "; over"
                      : ending_ ? "; ending"
                                : "") +
                     "\n";
  for (uint32_t index = 0; index < calls_.size(); ++index) {
    const Call& call = *calls_[index];
    if (call.state == State::kFree) continue;
    text += "  call " + number(IdOf(index)) + " xid " + number(call.xid) + " " +
            kStates[static_cast<size_t>(call.state)] + ", submitted " + FormatSeconds(call.submitted) +
            (call.deadline ? ", deadline " + FormatSeconds(*call.deadline) : ", no deadline") + ", STags valid " +
            number(call.stags_valid) + (call.failure ? std::string(", ") + ToString(call.failure->kind) : "") +
            (call.resends > 0 ? ", resent " + number(call.resends) : "") + "\n";
  }
  if (exchanging()) text += "  properties of the peer are waited for until " + FormatSeconds(exchange_until_) + "\n";
  for (size_t i = 0; i < abandoned_.size(); ++i) {
    text += "  cancelled call xid " + number(abandoned_[i].xid) + " holds its credit until its reply" +
            (abandoned_[i].deadline ? ", deadline " + FormatSeconds(*abandoned_[i].deadline) : "") + "\n";
  }
  return text;
}

// --- Small things ---

std::optional<Command> Requester::TakeCommand() {
  if (commands_.empty()) return std::nullopt;
  return commands_.pop();
}

void Requester::PostReceiveAgain(uint32_t slot) {
  ++posted_receives_;
  commands_.push(PostReceive{slot});
}

uint32_t Requester::AllocateCall() {
  if (free_calls_.empty()) {
    calls_.push_back(std::make_unique<Call>());
    return static_cast<uint32_t>(calls_.size() - 1);
  }
  const uint32_t index = free_calls_.back();
  free_calls_.pop_back();
  return index;
}

void Requester::FreeCall(uint32_t index) {
  Call& call = *calls_[index];
  ReturnBuffer(std::move(call.buffer));
  call.buffer = {};
  call.state = State::kFree;
  ++call.generation;
  call.xid = 0;
  call.wanted_xid.reset();
  call.items.clear();
  call.results.clear();
  call.lasting.reset();
  call.reply_memory.reset();
  call.exposed.clear();
  call.invalidating = 0;
  call.stags_valid = 0;
  call.failure.reset();
  call.receive_slot.reset();
  call.reply_inline = {};
  call.pull.reset();
  call.answered_in = 0;
  call.flags = 0;
  call.inv_handle = 0;
  call.invalidated_at.reset();
  call.next.reset();
  call.resends = 0;
  call.fewer_segments = false;
  call.grown.clear();
  call.gathered.reset();
  call.extension.reset();
  if (STAGECOACH_MUTANT("call-records-leak", "the requester never reuses call records")) return;
  free_calls_.push_back(index);
}

CallId Requester::IdOf(uint32_t index) const {
  return (uint64_t{calls_[index]->generation} << 32) | (uint64_t{index} + 1);
}

Requester::Call* Requester::Find(CallId id) {
  const uint64_t number = id & UINT32_MAX;
  if (number == 0 || number > calls_.size()) return nullptr;
  Call& call = *calls_[number - 1];
  return call.generation == (id >> 32) && call.state != State::kFree ? &call : nullptr;
}

}  // namespace stagecoach::rpcrdma
