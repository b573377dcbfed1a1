#include "rpcrdma/core/requester.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/mark.h"
#include "base/mutant.h"
#include "base/trace.h"
#include "rpcrdma/wire/header_v1.h"

namespace stagecoach::rpcrdma {
namespace {

// Recycled message buffers that are kept, and the largest worth keeping.
constexpr size_t kBuffersKept = 64;
constexpr size_t kBufferKeptMax = 64 * 1024;
// How long beyond its deadline the fence of a call may take before it is had by ending the connection.
constexpr Duration kFenceTime = 1s;

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

const char* Word(SubmitRefusal refusal) {
  switch (refusal) {
    case SubmitRefusal::kNotConnected:
      return "not_connected";
    case SubmitRefusal::kQueueFull:
      return "queue_full";
    case SubmitRefusal::kTooLarge:
      return "too_large";
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
  }
  return "unknown";
}

Requester::Requester(const Config& config, BufferArena send, BufferArena receive, ConnectionMemory& memory,
                     XidSource& xids, TraceSink* trace)
    : config_(config),
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

  SmallVector<ResultShape, 4> results;
  for (const MutableBytes memory : spec.results) results.push_back({memory.size(), memory.size()});
  auto plan = PlanCall({.base_size = spec.message_size,
                        .items = spec.items,
                        .results = results,
                        .reply_base_max = spec.reply_base_max,
                        .longest_inside = spec.longest_inside,
                        .direct_placement = spec.direct_placement},
                       limits_);
  if (!plan) {
    STAGECOACH_MARK("requester.no_plan_fits");
    return refuse(SubmitRefusal::kTooLarge);
  }
  // [5666bis:8.3.4#2] [5666bis:8.3.4#3] RDMA_MSG without chunks, or nothing is sent.
  if (config_.inline_only && (plan->type != MessageType::kMsg || plan->exposed_segments() > 0)) {
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
         {"type", ToString(plan.type)},
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
    Abandon(*call);
    FailWith(index, CallFailure::Kind::kCancelled, now);
  } else if (call->state == State::kPulling && !call->failure) {
    STAGECOACH_MARK("requester.cancel_while_pulling");
    call->failure = CallFailure{.kind = CallFailure::Kind::kCancelled, .sent = true};
    pulls_.Remove(index);
    // Reads in flight still write to its memory.
    if (call->pull->in_flight == 0) EndPull(index);
    PumpPulls(now);
    Pump(now);
  } else if (call->state == State::kFencing) {
    STAGECOACH_MARK("requester.cancel_while_fencing");
  }
}

// [5666bis:5.4.1+4] Fenced like any other.
// The call is over before its reply is in: the credit stays spent, and the XID known, until the reply arrives.
void Requester::Abandon(Call& call) {
  xid_table_.Erase(call.xid);
  if (STAGECOACH_MUTANT("cancel-returns-credit", "the credit of a cancelled call is used before its reply is in")) {
    credits_.OnReply(std::nullopt);
    return;
  }
  xid_table_.Insert(call.xid, kAbandoned);
  abandoned_.push({call.xid, config_.inline_only ? std::nullopt : call.deadline, call.dones_before});
}

void Requester::SetLimits(const PlanLimits& limits, uint32_t reads_max) {
  STAGECOACH_CHECK(queue_.empty() && reads_in_flight_ == 0);
  STAGECOACH_CHECK(limits.send_inline <= send_.slot_size && limits.receive_inline <= receive_.slot_size);
  limits_ = limits;
  reads_max_ = reads_max;
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
  while (!ending_ && !over_ && !queue_.empty() && credits_.available() && !free_send_slots_.empty() &&
         posted_receives_ > credits_.in_flight()) {
    Transmit(queue_.pop(), now);
  }
  if (ending_ || over_ || queue_.empty()) {
    held_for_ = {};
    return;
  }
  if (!credits_.available()) {
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

void Requester::Transmit(uint32_t index, Instant now) {
  Call& call = *calls_[index];
  if (call.wanted_xid) {
    call.xid = *call.wanted_xid;
    STAGECOACH_CHECK(!xid_table_.Find(call.xid));
  } else {
    do call.xid = xids_.Next();
    while (xid_table_.Find(call.xid).has_value());
  }
  // [5666bis:5.1.1#1] [2004:4.1#5] one XID in both headers.
  ByteWriter(MutableBytes(call.buffer).first(4)).U32(call.xid);

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
  Header header = MakeCallHeader(call.plan, call.xid, credits_.Request(queue_.size()), exposures);
  const uint32_t slot = free_send_slots_.back();
  free_send_slots_.pop_back();
  ByteWriter out(send_.slot(slot));
  EncodeHeaderV1(header, out);
  WriteInline({ConstBytes(call.buffer).first(call.message_size), call.items}, call.plan.inline_pieces, out);
  // [5666bis:5.1.4+10]
  STAGECOACH_CHECK(out.ok() && out.position() <= limits_.send_inline);
  call.offered = *header.chunks();

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
  stats_.credit_wait.RecordTime(now - call.submitted);
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
  SmallVector<size_t, 2> empty;
  const auto expose = [&](const Piece& piece, MemoryUse use) {
    const ConstBytes memory = MemoryOf(call, piece);
    if (memory.empty()) {
      empty.push_back(exposures->size());
      exposures->push_back({});
      return true;
    }
    // What the engine itself keeps, the message and room for a long reply, is not the program's memory.
    const bool is_programs = piece.source == Piece::Source::kItem || piece.source == Piece::Source::kResult;
    LastingMemory* const lasting = is_programs ? call.lasting.get() : nullptr;
    const std::optional<Registration> registration = memory_.Register(memory, use, lasting);
    if (!registration) return false;
    ++stats_.registrations;
    if (lasting != nullptr) ++(registration->lasting ? stats_.memory_reused : stats_.memory_not_reused);
    ++call.stags_valid;
    call.exposed.push_back({registration->id, registration->handle, false});
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
  }
  return {};
}

void Requester::CountSent(const Call& call) {
  ++stats_.calls;
  ++stats_.sends;
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
  Result<Header, HeaderFault> header = DecodeHeaderV1(in, config_.list_limits, config_.profile);
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
  std::optional<uint32_t> index;
  if (fault.kind != HeaderFault::Kind::kTooShort && fault.xid) index = xid_table_.Find(*fault.xid);
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
  PostReceiveAgain(slot);
  Pump(now);
}

void Requester::OnMessage(uint32_t slot, Header&& header, ConstBytes body, Instant now) {
  --posted_receives_;
  ++stats_.receives;
  if (over_) return;
  const auto ignore = [&](uint64_t* counter, std::string_view why) {
    ++*counter;
    Trace(trace_, now, config_.name, "reply.ignored",
          {{"xid", uint64_t{header.xid}},
           {"why", why},
           {"credits", uint64_t{header.credits}},
           {"exposes", uint64_t{why != "reverse_call" && OwesDone(header) ? 1u : 0u}}});
    // What a reply exposes is held until somebody says that it may go.
    if (why != "reverse_call" && OwesDone(header)) {
      credits_.OnDoneOwed();
      dones_.push({header.xid, slot});
    } else {
      PostReceiveAgain(slot);
    }
    Pump(now);
  };
  // [5666bis:5.7.2#1] RDMA_DONE is dropped. So is a reverse-direction call, told apart from a reply by its direction
  // word: no program is offered here [5666bis:8.3.1#1] [5666bis:8.3.1+1].
  if (header.type() == MessageType::kDone) {
    STAGECOACH_MARK("requester.done_dropped");
    return ignore(&stats_.ignored, "done");
  }
  if (header.has_inline_message() && body.size() >= 8 && ByteReader(body.subspan(4)).U32() == 0) {
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
  CountReply(*index, xid, header.credits);
  stats_.credits_granted = credits_.granted();
  if (*index == kAbandoned) {
    STAGECOACH_MARK("requester.reply_after_cancel");
    return ignore(&stats_.ignored, "cancelled");
  }
  OnReplyTo(*index, slot, std::move(header), body, now);
  Pump(now);
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
  if (config_.profile.header_xid_prevails && header.has_inline_message() && message.size() >= 4) {
    PutXid(message, header.xid);
  }
  if (config_.profile.written_lengths_count_round_up && header.chunks() != nullptr) {
    CutRoundUp(&header.mutable_chunks()->writes, call.offered.writes);
  }
  const bool owes_done = OwesDone(header);
  if (owes_done) credits_.OnDoneOwed();
  if (trace_ != nullptr) TraceReply(index, header, message, now);
  // A call that timed out has its verdict, and waits for the connection to end.
  // [5666bis:5.5+2] [5666bis:6.3+2] One that is answered with an error, or wrongly, ends with that, for good.
  std::optional<CallFailure> failure = call.failure;
  const auto refuse = [&](ChunkFault fault) {
    STAGECOACH_MARK("requester.chunk_lists_not_ours");
    failure = CallFailure{.kind = CallFailure::Kind::kBadChunks, .sent = true};
    failure->chunk = fault;
    ++stats_.malformed;
    Trace(trace_, now, config_.name, "reply.refused",
          {{"call", IdOf(index)}, {"xid", uint64_t{header.xid}}, {"why", ToString(fault)}});
  };
  if (failure) {
    STAGECOACH_MARK("requester.reply_after_deadline");
    ++stats_.ignored;
  } else if (const auto* versions = std::get_if<ErrVers>(&header.body)) {
    STAGECOACH_MARK("requester.err_vers");
    failure = CallFailure{.kind = CallFailure::Kind::kErrVers, .sent = true, .versions = *versions};
    ++stats_.errors;
  } else if (std::holds_alternative<ErrChunk>(header.body)) {
    STAGECOACH_MARK("requester.err_chunk");
    failure = CallFailure{.kind = CallFailure::Kind::kErrChunk, .sent = true};
    ++stats_.errors;
  } else if (auto reads = ValidateReply(header, message, call.offered, config_.profile,
                                        {.read_bytes_max = config_.read_bytes_max});
             !reads) {
    refuse(reads.error());
  } else if (owes_done && reads_max_ == 0) {
    // [5666:6.2#5] [2004:6.1#6] Nothing may be read of a responder that has said so.
    refuse(ChunkFault::kUnexpectedReadList);
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

// --- Reading what a responder exposes ---

bool Requester::OwesDone(const Header& header) const {
  return config_.profile.replies_by_read_chunk && header.chunks() != nullptr && !header.chunks()->reads.empty();
}

// [5666:3.5#1] [2004:3.6#1] [5666:3.8+4] [2004:3.8+4] One for each reply that exposes memory, ahead of any call.
void Requester::PumpDones(Instant now) {
  while (!ending_ && !over_ && !dones_.empty() && !free_send_slots_.empty()) {
    const OwedDone done = dones_.pop();
    const uint32_t slot = free_send_slots_.back();
    free_send_slots_.pop_back();
    ByteWriter out(send_.slot(slot));
    EncodeHeaderV1({.xid = done.xid, .credits = credits_.requested(), .body = RdmaDone{}}, out);
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
         {"type", ToString(header.type())},
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
        return;
      }
    }
  }
  // Of a call that is over, or none of ours.
  STAGECOACH_MARK("requester.peer_invalidated_unknown_stag");
  Trace(trace_, now, config_.name, "stag.not_ours", {{"stag", uint64_t{handle}}});
}

// --- Ending a call ---

// [5666bis:4.4.4.2+4] [5666:3.5+4] [5666:3.8+6] [2004:3.8+6] [5666bis:5.4.1+2] [5666bis:10.1+5]
// The call's fate is known; before anybody hears of it, its steering tags must be invalid.
void Requester::Fence(uint32_t index, Instant) {
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
  if (call.invalidating == 0 || SkipsFence()) Conclude(index);
}

void Requester::OnInvalidated(uint32_t tag, Instant) {
  Call& call = *calls_[tag];
  if (SkipsFence()) {
    if (call.stags_valid > 0) --call.stags_valid;
    return;
  }
  STAGECOACH_CHECK(call.invalidating > 0 && call.stags_valid > 0);
  --call.stags_valid;
  if (--call.invalidating == 0 && call.state == State::kFencing) Conclude(tag);
}

void Requester::Conclude(uint32_t index) {
  calls_[index]->state = State::kOver;
  --outstanding_;
  outcomes_.push(index);
}

void Requester::FailWith(uint32_t index, CallFailure::Kind kind, Instant now) {
  Call& call = *calls_[index];
  call.failure = CallFailure{.kind = kind, .sent = call.state == State::kSent};
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
  ReleaseReadBytes(call);
  if (call.failure) {
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
  ApplyProfile(config_.profile, PaddingOf(config_.profile, call.reply_header), &outcome.reply);
  if (config_.profile.header_xid_prevails && outcome.reply.base.size() >= 4) PutXid(outcome.reply.base, call.xid);
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
    // A reply that was only waiting for its fence is as good as any: the fence has come.
    if (call.state != State::kFencing && !call.failure) {
      call.failure = CallFailure{.kind = closed_ ? CallFailure::Kind::kClosed : CallFailure::Kind::kConnectionLost,
                                 .sent = call.state != State::kQueued};
    }
    call.invalidating = 0;
    call.stags_valid = 0;
    call.exposed.clear();
    Conclude(index);
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
  for (uint32_t index = 0; index < calls_.size(); ++index) {
    Call& call = *calls_[index];
    // One that was cancelled while its reply was read waits for the Reads first.
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
      FailWith(index, CallFailure::Kind::kNoCredit, now);
    } else if (config_.inline_only) {
      Trace(trace_, now, config_.name, "call.timed_out", {{"call", IdOf(index)}, {"xid", uint64_t{call.xid}}});
      Abandon(call);
      FailWith(index, CallFailure::Kind::kTimedOut, now);
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
    if (deadline && now < *deadline) LowerDeadline(deadline);
  }
  if (end) EndConnection(Disconnect::Why::kCallTimedOut);
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
            number(call.stags_valid) + (call.failure ? std::string(", ") + ToString(call.failure->kind) : "") + "\n";
  }
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
