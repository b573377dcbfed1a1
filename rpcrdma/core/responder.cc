#include "rpcrdma/core/responder.h"

#include <algorithm>
#include <utility>

#include "base/cursor.h"
#include "base/mark.h"
#include "base/mutant.h"
#include "rpcrdma/wire/header_v1.h"
#include "rpcrdma/wire/header_v2.h"

namespace stagecoach::rpcrdma {
namespace {

// [5666bis:3.1.2+1] The direction word of an RPC message (RFC 5531 section 9).
constexpr uint32_t kCall = 0;
constexpr uint32_t kReply = 1;
// Replies larger than this give their buffer back instead of keeping it for the next reply.
constexpr size_t kReplyBufferKeptMax = 64 * 1024;

// The XID and direction of an RPC message; nullopt when it is too short to have them.
struct Prefix {
  uint32_t xid = 0;
  uint32_t direction = 0;
};
std::optional<Prefix> PeekPrefix(ConstBytes message) {
  ByteReader in(message);
  const Prefix prefix{in.U32(), in.U32()};
  return in.ok() ? std::optional(prefix) : std::nullopt;
}

// [pvtdata:3.2+1]
// [pvtdata:4.1#2] A steering tag that came with this call and no other. Not that of an empty segment: it names no
// memory, so it need not name a steering tag either, and invalidating what is none ends the connection.
std::optional<uint32_t> TagToInvalidate(const ChunkLists& lists) {
  for (const ReadSegment& read : lists.reads) {
    if (read.target.length > 0) return read.target.handle;
  }
  for (const Segment& segment : lists.writes.segments()) {
    if (segment.length > 0) return segment.handle;
  }
  if (!lists.reply) return std::nullopt;
  for (const Segment& segment : *lists.reply) {
    if (segment.length > 0) return segment.handle;
  }
  return std::nullopt;
}

// For RDMA_DONE.
uint32_t ReceivesKept(const Responder::Config& config, uint32_t receives) {
  if (STAGECOACH_MUTANT("done-without-receive", "no Receive is kept for RDMA_DONE: all of them are granted")) return 0;
  return std::min(config.exposed_max, receives - 1);
}

// [v2:3.3+5] [v2:3.3+6] In version 2 the requester names it, or none.
std::optional<uint32_t> TagNamed(const Header& header) {
  const ChunkLists& lists = *header.chunks();
  if (STAGECOACH_MUTANT("v2-invalidates-another", "a reply invalidates a steering tag that its call did not name")) {
    if (lists.reply && !lists.reply->empty()) return lists.reply->back().handle;
    if (!lists.writes.segments().empty()) return lists.writes.segments().back().handle;
    if (!lists.reads.empty()) return lists.reads.back().target.handle;
  }
  return header.inv_handle() != 0 ? std::optional(header.inv_handle()) : std::nullopt;
}

// How many chunks a Read list has, by their positions, that of position zero among them.
uint32_t CountReadChunks(const ReadList& reads) {
  SmallVector<uint32_t, 8> positions;
  for (const ReadSegment& entry : reads) positions.push_back(entry.position);
  std::sort(positions.begin(), positions.end());
  return static_cast<uint32_t>(std::unique(positions.begin(), positions.end()) - positions.begin());
}

// "ERR_WRITE_RESOURCE"
std::string ErrorName(const Header& header) {
  const std::string text = ErrorText(header.body);
  return text.substr(0, text.find(' '));
}

}  // namespace

Responder::Responder(const Config& config, BufferArena send, BufferArena receive, ConnectionMemory& memory,
                     TraceSink* trace)
    : config_(config),
      terms_(config.terms != nullptr ? *config.terms
                                     : own_terms_.emplace(ConnectionTerms::Config{.profile = config.profile,
                                                                                  .list_limits = config.list_limits})),
      send_(send),
      receive_(receive),
      memory_(memory),
      trace_(trace),
      receives_(config.receives > 0 ? config.receives : receive.slots),
      send_inline_(config.send_inline),
      reads_max_(config.reads_max),
      exposes_(config.exposes && config.exposed_max > 0),
      calls_(receive.slots),
      in_flight_(size_t{send.first} + send.slots),
      exposed_(config.exposed_max),
      patience_(config.data_time, config.data_rate_min),
      // [5666:11#6] One Receive for each RDMA_DONE that may be owed.
      window_(receives_ - ReceivesKept(config, receives_)) {
  STAGECOACH_CHECK(receive_.slots > 0 && send_.slots > 0 && in_flight_.size() < kSendTag);
  STAGECOACH_CHECK(receive_.slots < kExposedTag && config_.exposed_max < kExposedTag);
  STAGECOACH_CHECK(config_.exposed_max < receives_ && (config_.exposed_max == 0 || !config_.shared_receives));
  STAGECOACH_CHECK(receives_ <= receive_.slots);
  STAGECOACH_CHECK(send_inline_ <= send_.slot_size && kMinHeaderSize <= send_.slot_size);
  STAGECOACH_CHECK(terms_.versions().high < kRpcRdmaVersion2 || send_.slot_size >= kConnPropSizeMax);
  STAGECOACH_CHECK(!config_.one_receive_first || (config_.receives == 0 && !config_.shared_receives));
  for (uint32_t slot = send_.slots; slot > 0; --slot) free_send_slots_.push_back(send_.first + slot - 1);
  for (const auto& budget : config_.budgets) window_.Join(budget);
}

void Responder::Start() {
  if (config_.receives > 0) {
    posted_receives_ = receives_;
    first_not_posted_ = receive_.slots;
    return;
  }
  if (config_.one_receive_first) {
    Repost(first_not_posted_++);
  } else {
    PostRemaining();
  }
}

// The client may use all that is granted when it sees the answer, which is not posted yet.
void Responder::OnAnswer() {
  answered_ = true;
  PostRemaining();
}

void Responder::PostRemaining() {
  while (first_not_posted_ < receive_.slots) Repost(first_not_posted_++);
}

void Responder::Repost(uint32_t slot) {
  calls_[slot].state = State::kPosted;
  if (config_.shared_receives) {
    // Connection lost or not, it is others' too.
    if (!over_) ++posted_receives_;
    memory_.ReturnReceive(slot);
    return;
  }
  if (over_ || ending_) return;
  ++posted_receives_;
  commands_.push(PostReceive{slot});
}

// --- A call arrives ---

void Responder::OnReceive(uint32_t slot, uint32_t length, std::optional<uint32_t>, Instant now) {
  STAGECOACH_CHECK(slot < receive_.slots && length <= receive_.slot_size);
  STAGECOACH_CHECK(posted_receives_ > 0 || config_.shared_receives);
  ByteReader in(receive_.slot(slot).first(length));
  Result<Header, HeaderFault> header = terms_.Decode(in);
  if (!header) return OnMalformed(slot, length, header.error(), now);
  OnMessage(slot, std::move(*header), in.Rest(), now);
}

// Whether it is to be looked at.
bool Responder::TakeMessage(uint32_t slot, Instant now) {
  --posted_receives_;
  ++stats_.receives;
  ++signs_of_life_;
  calls_[slot].arrived = now;
  if (over_ || ending_) {
    STAGECOACH_MARK("responder.message_after_the_end");
    if (config_.shared_receives) Repost(slot);
    return false;
  }
  if (!config_.shared_receives || unanswered_ < window_.reserved()) return true;
  STAGECOACH_MARK("responder.grant_overrun");
  ++stats_.grant_overruns;
  Trace(trace_, now, config_.name, "grant.overrun",
        {{"unanswered", uint64_t{unanswered_}}, {"granted", uint64_t{credits_granted()}}});
  Close(Disconnect::Why::kGrantOverrun);
  Repost(slot);
  return false;
}

void Responder::OnMalformed(uint32_t slot, uint32_t length, const HeaderFault& fault, Instant now) {
  if (!TakeMessage(slot, now)) return;
  ++stats_.malformed;
  // [5666bis:8.3.3#2] too short: dropped. An RDMA_ERROR is never answered, however malformed; nor is what is marked as
  // an answer [v2:5.3.3+1].
  const bool disconnect = fault.action == FaultAction::kDisconnect;
  const bool drop =
      fault.action == FaultAction::kDrop || disconnect || !fault.xid || (fault.flags && IsBeyondCredits());
  if (trace_ != nullptr) {
    Trace(trace_, now, config_.name, "call.malformed",
          {{"length", uint64_t{length}},
           {"xid", uint64_t{fault.xid.value_or(0)}},
           {"dropped", uint64_t{drop ? 1u : 0u}},
           {"why", ToString(fault)}});
  }
  if (disconnect) {
    // [v2:4.1#1] [v2:5.3.3#1] It may not be answered, and without what the peer takes there is nothing to go by.
    STAGECOACH_MARK("responder.malformed_properties");
    Close(Disconnect::Why::kBadProperties);
    return Repost(slot);
  }
  if (drop) {
    STAGECOACH_MARK("responder.malformed_message_dropped");
    Repost(slot);
    return;
  }
  STAGECOACH_MARK("responder.malformed_call_refused");
  // [5666bis:5.5+1] [5666:4.2+1] [2004:5.3+1]
  // [5666bis:5.5#2] [5666:4.2#2] [2004:5.3#2] [5666bis:5.5#3] [5666:4.2#3] [2004:5.3+2] [5666bis:5.5#4] [5666:4.2#4]
  // [2004:5.3#3] [v2:5.2#3] [v2:4.1#1] [v2:5.3.3#3] [v2:5.3.3#4] [v2:5.3.3#5] [v2:7.3#2]
  Header refusal = terms_.MakeRefusal(fault);
  if (auto error = RefusalOfUndecoded(slot, length, fault)) refusal.body = std::move(*error);
  Answer(slot, std::move(refusal));
  PumpReplies(now);
}

// More chunks, or segments of them, than this end looks at are no malformed lists in version 2. Its codec stopped where
// they became too many; what they are like to the last is bounded by the Receive.
std::optional<Header::Body> Responder::RefusalOfUndecoded(uint32_t slot, uint32_t length,
                                                          const HeaderFault& fault) const {
  if (fault.action != FaultAction::kAnswerBadXdr || fault.kind != HeaderFault::Kind::kChunkList) return std::nullopt;
  ByteReader in(receive_.slot(slot).first(length));
  in.Skip(kHeaderLayoutV2.prefix_size + kHeaderLayoutV2.lists_prefix_size);
  constexpr uint32_t kAny = UINT32_MAX;
  ChunkLists lists;
  if (DecodeChunkLists(in, {kAny, kAny, kAny, kAny}, &lists)) return std::nullopt;
  return RefusalOf(lists);
}

// Whether chunk lists of a call of version 2 ask for what this end does not do, and how it says so.
std::optional<Header::Body> Responder::RefusalOf(const ChunkLists& lists) const {
  const ReverseSupport level = config_.reverse.value_or(ReverseSupport::kGeneral);
  // [v2:4.2.2+3] [v2:5.3.3#21] No code says it; the upper layer at the other end was told.
  if (level == ReverseSupport::kNone) return ErrSystem{};
  // [v2:4.2.2+4] Without chunks, but a Reply chunk that is offered may be left alone.
  const bool is_inline = level == ReverseSupport::kInline;
  const ChunkListLimits& limits = terms_.list_limits();
  if (!lists.reads.empty()) {
    // [v2:5.3.3#7] Not those of position zero either.
    if (is_inline || reads_max_ == 0) return ErrReadChunks{0};
    // [v2:5.3.3#6] [v2:5.3.3#13] Only the entries are bounded, so what has too many has too many chunks, or too many
    // segments for so many chunks.
    if (lists.reads.size() > limits.read_segments_max) {
      const uint32_t chunks = CountReadChunks(lists.reads);
      const bool position_zero =
          std::ranges::any_of(lists.reads, [](const ReadSegment& entry) { return entry.position == 0; });
      const uint32_t taken = limits.read_segments_max;
      if (chunks > taken) return ErrReadChunks{taken - std::min<uint32_t>(position_zero ? 1 : 0, taken)};
      return ErrSegments{taken / chunks};
    }
  }
  if (!lists.writes.empty()) {
    // [v2:5.3.3#11]
    if (is_inline || limits.write_chunks_max == 0) return ErrReplyResource{0};
    // [v2:5.3.3#10]
    if (lists.writes.size() > limits.write_chunks_max) return ErrWriteChunks{limits.write_chunks_max};
  }
  // [v2:5.3.3#13]
  const auto too_many = [&](size_t segments) { return segments > limits.segments_per_chunk_max; };
  bool any = lists.reply.has_value() && too_many(lists.reply->size());
  for (size_t i = 0; i < lists.writes.size(); ++i) any = any || too_many(lists.writes[i].size());
  if (any) return ErrSegments{limits.segments_per_chunk_max};
  if (lists.writes.segments().size() > limits.write_segments_max) {
    const auto taken = static_cast<uint32_t>(limits.write_segments_max / lists.writes.size());
    return taken > 0 ? Header::Body(ErrSegments{taken}) : Header::Body(ErrWriteChunks{limits.write_segments_max});
  }
  return std::nullopt;
}

void Responder::OnMessage(uint32_t slot, Header&& header, ConstBytes message, Instant now) {
  if (!TakeMessage(slot, now)) return;
  if (const uint32_t unknown = UnknownFlags(header, terms_.extensions()); unknown != 0) {
    STAGECOACH_MARK("responder.reserved_flags_passed_over");
    ++stats_.unknown_flags;
    Trace(trace_, now, config_.name, "flags.unknown", {{"xid", uint64_t{header.xid}}, {"flags", uint64_t{unknown}}});
  }
  const auto drop = [&](std::string_view why) {
    ++stats_.ignored;
    Trace(trace_, now, config_.name, "call.dropped", {{"xid", uint64_t{header.xid}}, {"why", why}});
    Repost(slot);
  };
  // [v2:10.1#1] At a client that has begun with version 2.
  if (!header.flags && terms_.is_v2()) {
    STAGECOACH_MARK("responder.version_1_while_probing");
    return drop("of another version");
  }
  const bool properties = header.type() == MessageType::kConnProp;
  if (header.is_response()) {
    // [v2:3.2+4] [v2:5.3.4+1] To nothing that this engine has sent.
    if (!properties) return drop("an answer");
    STAGECOACH_MARK("responder.properties_that_are_an_answer");
    TakeProperties(header, now);
    return Repost(slot);
  }
  // [v2:3.2#2] [v2:3.2#5] Of which end the XID is, is what is in doubt: an error might end a call of the peer's.
  const std::optional<DirectionFault> direction =
      CheckDirection(header, header.has_inline_message() ? message : ConstBytes());
  if (direction && direction != DirectionFault::kNoDirection) {
    STAGECOACH_MARK("responder.flag_and_direction_disagree");
    return drop(ToString(*direction));
  }
  if (header.flags && IsBeyondCredits()) {
    STAGECOACH_MARK("responder.call_beyond_credits_dropped");
    // What the peer tells of itself needs no answer to be true.
    if (properties) TakeProperties(header, now);
    return drop("beyond the credits granted");
  }
  if (properties) return OnProperties(slot, header, now);
  if (header.type() == MessageType::kExtension) return OnExtension(slot, header, now);
  if (direction) return RefuseCall(slot, header.xid, ErrBadXdr{}, ToString(*direction), now);
  if (header.type() == MessageType::kDone && config_.exposed_max > 0) return OnDone(slot, header.xid, now);
  // [5666bis:5.7.2#1] [2004:3.8+7] RDMA_DONE is dropped; an RDMA_ERROR answers a call we never made.
  const bool is_message = header.chunks() != nullptr;
  const std::optional<Prefix> prefix = is_message && header.has_inline_message() ? PeekPrefix(message) : std::nullopt;
  if (!is_message || (prefix && prefix->direction != kCall)) {
    STAGECOACH_MARK("responder.message_that_is_no_call_dropped");
    return drop(is_message ? "not a call" : ToString(header.type()));
  }
  if (!header.flags && config_.reverse == ReverseSupport::kNone) {
    STAGECOACH_MARK("responder.reverse_call_to_nobody_dropped");
    return drop("no calls in this direction");
  }
  if (!header.flags && config_.inline_only && unanswered_ >= receives_) {
    STAGECOACH_MARK("responder.call_beyond_credits_dropped");
    return drop("beyond the credits granted");
  }
  OnCall(slot, std::move(header), message, now);
}

// Answered by those of this end, so many times: a peer that answers each answer in the same way would be answered
// without end. [v2:4+1] [v2:5.3.4+1] [v2:3.2+4]
void Responder::OnProperties(uint32_t slot, const Header& header, Instant now) {
  TakeProperties(header, now);
  if (properties_answered_ == kPropertiesAnswersMax) {
    STAGECOACH_MARK("responder.properties_once_too_often");
    ++stats_.ignored;
    Trace(trace_, now, config_.name, "call.dropped",
          {{"xid", uint64_t{header.xid}}, {"why", "properties that were answered before"}});
    return Repost(slot);
  }
  ++properties_answered_;
  Answer(slot, MakeAnswer(header.xid, ConnProp{terms_.own_set()}));
  PumpReplies(now);
}

// [v2:5.3.4+7] [v2:5.3.4+8]
void Responder::TakeProperties(const Header& header, Instant now) {
  const PropertySet& set = std::get<ConnProp>(header.body).properties;
  const bool first = terms_.OnPeerProperties(set);
  if (!first) ++stats_.properties_again;
  if (trace_ == nullptr) return;
  Trace(trace_, now, config_.name, "properties.received",
        {{"xid", uint64_t{header.xid}},
         {"answer", uint64_t{header.is_response() ? 1u : 0u}},
         {"first", uint64_t{first ? 1u : 0u}},
         {"properties", ToString(set, terms_.extensions())}});
}

// [v2:5.2#3] [v2:9#4] By whoever knows it.
void Responder::OnExtension(uint32_t slot, const Header& header, Instant now) {
  const Extension& extension = std::get<Extension>(header.body);
  if (!config_.answer_extension || extension.has_message) {
    STAGECOACH_MARK("responder.extension_without_a_handler");
    return RefuseCall(slot, header.xid, ErrInvalHtype{}, "nobody answers this header type", now);
  }
  Header answer = MakeAnswer(header.xid, config_.answer_extension(extension));
  const bool is_error = answer.type() == MessageType::kError && !std::holds_alternative<ErrChunk>(answer.body);
  const auto* theirs = std::get_if<Extension>(&answer.body);
  const HeaderTypeRow* row = theirs != nullptr ? terms_.extensions().FindHeaderType(theirs->type) : nullptr;
  const bool is_theirs = row != nullptr && !row->has_message && terms_.EncodedSize(answer) <= SendLimit();
  if (!is_error && !is_theirs) {
    STAGECOACH_MARK("responder.extension_answered_wrongly");
    return RefuseCall(slot, header.xid, ErrSystem{}, "its handler's answer cannot be sent", now);
  }
  Trace(trace_, now, config_.name, "extension.received",
        {{"xid", uint64_t{header.xid}}, {"type", uint64_t{extension.type}}, {"bytes", extension.body.size()}});
  Answer(slot, std::move(answer));
  PumpReplies(now);
}

void Responder::RefuseCall(uint32_t slot, uint32_t xid, Header::Body error, std::string_view why, Instant now) {
  ++stats_.malformed;
  Trace(trace_, now, config_.name, "call.refused", {{"xid", uint64_t{xid}}, {"why", why}});
  Answer(slot, MakeAnswer(xid, std::move(error)));
  PumpReplies(now);
}

// [v2:7.2+5]
uint32_t Responder::SendLimit() const {
  return terms_.is_v2() ? std::min(terms_.send_inline(), send_.slot_size) : send_inline_;
}

Header Responder::MakeAnswer(uint32_t xid, Header::Body body) const {
  return terms_.MakeHeader(xid, 0, kFlagResponse, std::move(body));
}

// What version 1 has one error for.
Header::Body Responder::ErrorOr(Header::Body in_version_2) const {
  return terms_.is_v2() ? std::move(in_version_2) : Header::Body(ErrChunk{});
}

void Responder::OnCall(uint32_t slot, Header&& header, ConstBytes message, Instant now) {
  Call& call = calls_[slot];
  call.xid = header.xid;
  call.flags = header.flags.value_or(0);
  const bool v2 = header.flags.has_value();
  if (v2) {
    if (auto error = RefusalOf(*header.chunks())) {
      STAGECOACH_MARK("responder.chunks_beyond_what_is_taken");
      const std::string why = ErrorText(*error);
      return RefuseCall(slot, header.xid, std::move(*error), why, now);
    }
  }
  if (terms_.profile().header_xid_prevails && header.has_inline_message() && message.size() >= 4) {
    PutXid(message, header.xid);
  }
  // [5666bis:4.4.4.2+1] [5666:3.5+1] [2004:3.6+1] The lists first.
  Result<CallChunks, ChunkFault> chunks = ValidateCall(header, message, config_.data_limits, terms_.profile());
  // [5666:6.2#5] [2004:6.1#6]
  const bool reads_refused = chunks && !chunks->chunks.empty() && reads_max_ == 0;
  // [5666bis:8.3.5#2] [5666bis:8.3.5#3] What was offered no chunks is answered without, or with RDMA_ERROR.
  const bool chunks_refused = !v2 && config_.inline_only && !header.chunks()->empty();
  if (!chunks || reads_refused || chunks_refused) {
    STAGECOACH_MARK("responder.chunk_lists_refused");
    // [v2:5.3.3#4] [v2:3.3+3] [v2:5.3.1+2] [v2:5.3.1+3] [v2:5.3.2+3] What contradicts itself; a bound on bytes has no
    // code.
    const bool too_much = !chunks && (chunks.error() == ChunkFault::kTooManyReadBytes ||
                                      chunks.error() == ChunkFault::kTooManyWriteBytes);
    return RefuseCall(slot, header.xid, ErrorOr(too_much ? Header::Body(ErrSystem{}) : Header::Body(ErrBadXdr{})),
                      !chunks          ? ToString(chunks.error())
                      : chunks_refused ? "no chunks in this direction"
                                       : "no RDMA Reads",
                      now);
  }

  const ChunkLists& lists = *header.chunks();
  ++unanswered_;
  call.arrival = ++stats_.calls;
  const bool eligible_reads = chunks->chunks.size() > (chunks->has_position_zero() ? 1u : 0u);
  if (chunks->has_position_zero()) ++stats_.calls_long;
  if (eligible_reads) ++stats_.calls_by_read_chunk;
  if (!lists.writes.empty()) ++stats_.calls_by_write_chunk;
  if (lists.empty()) ++stats_.calls_inline;
  Trace(trace_, now, config_.name, "call.received",
        {{"request", IdOf(slot)},
         {"xid", uint64_t{header.xid}},
         {"bytes", message.size()},
         {"type", ToString(header.type(), header.version)},
         {"position_zero", uint64_t{chunks->has_position_zero() ? 1u : 0u}},
         {"read_chunks", chunks->chunks.size()},
         {"write_chunks", lists.writes.size()},
         {"reply_chunk", lists.reply ? TotalLength(*lists.reply) : 0},
         {"unanswered", uint64_t{unanswered_}},
         {"receives", uint64_t{posted_receives()}}});

  // [v2:8.4+4] [v2:8.4.1+2]
  call.invalidate.reset();
  if (v2 ? config_.can_invalidate : config_.may_invalidate) {
    call.invalidate = v2 ? TagNamed(header) : TagToInvalidate(lists);
  }
  call.offered.writes = lists.writes;
  call.offered.reply = lists.reply;
  if (v2 && config_.reverse == ReverseSupport::kInline && call.offered.reply) {
    // [v2:4.2.2+6] It comes back, and nothing goes there.
    STAGECOACH_MARK("responder.reply_chunk_of_a_reverse_call_left_alone");
    for (Segment& segment : *call.offered.reply) segment.length = 0;
  }
  call.padding = PaddingOf(terms_.profile(), header);
  call.inline_message = message;
  call.chunks = std::move(*chunks);
  call.next_chunk = 0;
  call.next_segment = 0;
  call.chunk_offset = 0;
  call.state = State::kWaitingForMemory;
  if (call.chunks.chunks.empty()) {
    OnPulled(slot, now);
    return;
  }
  waiting_.push(slot);
  ServeWaiting(now);
  if (call.state == State::kWaitingForMemory) {
    Trace(trace_, now, config_.name, "call.waits",
          {{"request", IdOf(slot)}, {"xid", uint64_t{call.xid}}, {"waiting", waiting_.size()}});
  }
}

// RDMA_ERROR, or what else is no reply, as soon as there is a buffer for it. It counts as a call not yet answered: its
// Receive is not posted either.
void Responder::Answer(uint32_t slot, Header&& answer) {
  Call& call = calls_[slot];
  if (call.state == State::kPosted) ++unanswered_;
  call.state = State::kAnswering;
  call.xid = answer.xid;
  call.answer = std::move(answer);
  replies_.push(slot);
}

// --- Pulling Read chunks ---

void Responder::OnMemoryFreed(Instant now) {
  if (!over_ && !waiting_.empty()) ServeWaiting(now);
}

// In order of arrival: a large call is not starved by small ones.
void Responder::ServeWaiting(Instant now) {
  while (!over_ && !waiting_.empty()) {
    const uint32_t slot = waiting_.front();
    Call& call = calls_[slot];
    if (!AllocateSinks(call)) {
      STAGECOACH_MARK("responder.call_waits_for_memory");
      if (waiting_.size() > 1) STAGECOACH_MARK("responder.call_waits_behind_another_for_memory");
      break;
    }
    waiting_.pop();
    ++given_memory_;
    overtaken_by_ = 0;
    call.state = State::kPulling;
    pulling_.push(slot);
  }
  PumpReads(now);
}

// All or nothing. False: not now.
bool Responder::AllocateSinks(Call& call) {
  for (const ReadChunk& chunk : call.chunks.chunks) {
    Sink sink;
    if (chunk.length > 0) {
      const std::optional<MutableBytes> memory = memory_.Allocate(chunk.length);
      if (!memory) {
        for (const Sink& taken : call.sinks) {
          if (!taken.memory.empty()) memory_.Free(taken.memory);
        }
        call.sinks.clear();
        return false;
      }
      sink.memory = *memory;
    }
    call.sinks.push_back(sink);
  }
  return true;
}

// [5666bis:4.1+1] [5666bis:4.3+6] [5666:3.3#7] [5666bis:4.4.4+4] By Reads of this end, no more at a time than the peer
// takes.
void Responder::PumpReads(Instant now) {
  while (!over_ && !ending_ && !pulling_.empty()) {
    const uint32_t slot = pulling_.front();
    Call& call = calls_[slot];
    if (call.next_chunk == call.chunks.chunks.size()) {
      pulling_.pop();
      if (call.reads_in_flight == 0) FenceSinks(slot, now);
      continue;
    }
    const ReadChunk& chunk = call.chunks.chunks[call.next_chunk];
    Sink& sink = call.sinks[call.next_chunk];
    if (call.next_segment == chunk.count) {
      ++call.next_chunk;
      call.next_segment = 0;
      call.chunk_offset = 0;
      continue;
    }
    const bool one_more = STAGECOACH_MUTANT("read-limit-overrun", "one RDMA Read more is issued than the peer allows");
    if (reads_.size() >= reads_max_ + (one_more ? 1 : 0)) {
      STAGECOACH_MARK("responder.reads_wait_for_others");
      return;
    }
    if (!sink.registered && !sink.memory.empty()) {
      const std::optional<Registration> registration = memory_.Register(sink.memory, MemoryUse::kReadSink, nullptr);
      if (!registration) {
        // The device is out of what registering takes. No reply is possible but this one [5666bis:5.5#6]; Reads of
        // earlier chunks may be in flight, so the connection cannot simply forget the sinks: it ends.
        STAGECOACH_MARK("responder.sink_refused");
        if (!reads_.empty()) STAGECOACH_MARK("responder.sink_refused_with_reads_in_flight");
        Trace(trace_, now, config_.name, "sink.refused", {{"xid", uint64_t{call.xid}}});
        Close(Disconnect::Why::kNoResources);
        return;
      }
      sink.registered = true;
      sink.local_key = registration->local_key;
      sink.registration = registration->id;
      if (registration->id != 0) ++stats_.registrations;
    }
    const Segment& source = call.chunks.segments_of(chunk)[call.next_segment++].target;
    if (source.length == 0) {
      STAGECOACH_MARK("responder.empty_read_segment");
      continue;
    }
    if (chunk.count > 1) STAGECOACH_MARK("responder.read_chunk_of_several_segments");
    uint64_t offset = call.chunk_offset;
    if (STAGECOACH_MUTANT("read-chunk-reordered", "the segments of a Read chunk are put together backwards")) {
      offset = chunk.length - call.chunk_offset - source.length;
    }
    commands_.push(PostRead{.sink = sink.memory.subspan(offset, source.length),
                            .local_key = sink.local_key,
                            .source = source,
                            .tag = slot});
    call.chunk_offset += source.length;
    ++call.reads_in_flight;
    reads_.push(source.length);
    if (!call.owed) call.owed = patience_.Owe(now);
    ++stats_.reads;
    Trace(trace_, now, config_.name, "read.issued",
          {{"xid", uint64_t{call.xid}},
           {"bytes", uint64_t{source.length}},
           {"in_flight", reads_.size()},
           {"reads_max", uint64_t{reads_max_}}});
  }
}

void Responder::OnReadDone(uint32_t tag, Instant now) {
  Call& call = calls_[tag];
  STAGECOACH_CHECK(call.reads_in_flight > 0);
  --call.reads_in_flight;
  const uint32_t bytes = reads_.pop();
  ++signs_of_life_;
  if (over_) return;
  patience_.Moved(bytes, now);
  if (ending_) STAGECOACH_MARK("responder.read_done_while_ending");
  if (call.state == State::kPulling && call.reads_in_flight == 0 && call.next_chunk == call.chunks.chunks.size()) {
    FenceSinks(tag, now);
  }
  PumpReads(now);
}

// [5666bis:4.4.4.2+3] [5666:3.5+3] [5666:3.8+3] [2004:3.8+3] All Reads are over when the call is executed, so its reply
// can say it. The data is in. Before anybody looks at it, steering tags that reach it are invalidated: what a service
// has checked must not change under it. (iWARP names the sink of a Read by a steering tag that the peer sees.)
void Responder::FenceSinks(uint32_t slot, Instant now) {
  Call& call = calls_[slot];
  call.state = State::kFencingSinks;
  if (call.owed) patience_.Paid(*std::exchange(call.owed, std::nullopt), now);
  call.fencing = 1;  // our own, so that answers that come at once do not finish early
  for (Sink& sink : call.sinks) {
    if (sink.registration == 0) continue;
    ++call.fencing;
    ++stats_.invalidations_local;
    commands_.push(Invalidate{.registration = sink.registration, .tag = slot});
    sink.registration = 0;
  }
  if (--call.fencing == 0) OnPulled(slot, now);
}

// [5666bis:4.4.4.2+2] [5666:3.5+2] [2004:3.6+2] [5666bis:5.3.3+2] [5666:5.1+3] [2004:5.1+3] Everything is there before
// decoding begins.
void Responder::OnPulled(uint32_t slot, Instant now) {
  Call& call = calls_[slot];
  SmallVector<ConstBytes, 4> data;
  for (const Sink& sink : call.sinks) data.push_back(sink.memory);
  Result<ReducedStream, ChunkFault> stream = AssembleCall(call.chunks, call.inline_message, data);
  std::optional<Prefix> prefix;
  if (stream && terms_.profile().header_xid_prevails && stream->base.size() >= 4) PutXid(stream->base, call.xid);
  if (stream) prefix = PeekPrefix(stream->base);
  // Version 1 passes over what is neither a call nor a reply.
  const bool no_direction = terms_.is_v2() && prefix && prefix->direction > kReply;
  if (!stream || !prefix || prefix->xid != call.xid || no_direction) {
    STAGECOACH_MARK("responder.pulled_call_is_not_of_its_header");
    ++stats_.malformed;
    Trace(trace_, now, config_.name, "call.refused",
          {{"xid", uint64_t{call.xid}},
           {"why", no_direction ? ToString(DirectionFault::kNoDirection)
                                : ToString(!stream  ? stream.error()
                                           : prefix ? ChunkFault::kXidMismatch
                                                    : ChunkFault::kNoMessage)}});
    FreeSinks(call);
    Answer(slot, MakeAnswer(call.xid, ErrorOr(ErrBadXdr{})));
    PumpReplies(now);
    return;
  }
  for (size_t i = call.chunks.has_position_zero() ? 1 : 0; i < call.sinks.size(); ++i) {
    stats_.bytes_placed_by_read += call.sinks[i].memory.size();
  }
  call.stream = std::move(*stream);
  ApplyProfile(terms_.profile(), call.padding, &call.stream);
  if (prefix->direction != kCall) {
    ++stats_.ignored;
    Trace(trace_, now, config_.name, "call.dropped", {{"xid", uint64_t{call.xid}}, {"why", "not a call"}});
    FreeSinks(call);
    CloseRecord(slot);
    return;
  }
  call.state = State::kReady;
  ready_.push(slot);
}

void Responder::FreeSinks(Call& call) {
  for (const Sink& sink : call.sinks) {
    if (!sink.memory.empty()) memory_.Free(sink.memory);
  }
  call.sinks.clear();
}

// --- The service ---

bool Responder::IsBehindWaiting(uint32_t slot) const {
  return !waiting_.empty() && calls_[slot].arrival > calls_[waiting_[0]].arrival;
}

// Where in ready_ the next call to be handed out stands. Those ahead of the one that waits are never held back: it may
// wait for what they have.
std::optional<size_t> Responder::NextReady() const {
  const bool anybody = waiting_.empty() || overtaken_by_ < receives_;
  for (size_t i = 0; i < ready_.size(); ++i) {
    if (anybody || !IsBehindWaiting(ready_[i])) return i;
  }
  return std::nullopt;
}

std::optional<RequestId> Responder::TakeRequest(Instant now) {
  const std::optional<size_t> next = NextReady();
  if (!next) {
    if (!ready_.empty()) STAGECOACH_MARK("responder.call_held_back_for_memory");
    return std::nullopt;
  }
  const uint32_t slot = ready_[*next];
  if (*next == 0) {
    ready_.pop();
  } else {
    ready_.Remove(slot);
  }
  if (IsBehindWaiting(slot)) ++overtaken_by_;
  calls_[slot].state = State::kExecuting;
  if (STAGECOACH_MUTANT("arguments-freed-early", "the memory of a call's Read chunks is free while it is executed")) {
    FreeSinks(calls_[slot]);
  }
  Trace(trace_, now, config_.name, "call.executing",
        {{"request", IdOf(slot)}, {"xid", uint64_t{calls_[slot].xid}}, {"unanswered", uint64_t{unanswered_}}});
  return IdOf(slot);
}

bool Responder::busy() const {
  if (has_request()) return true;
  for (const Call& call : calls_) {
    if (call.state == State::kExecuting || call.state == State::kFencingSinks) return true;
  }
  if (waiting_.empty() || !reads_.empty() || !replies_.empty()) return false;
  // The memory that a call waits for may be that of replies which the peer does not take, or does not read.
  if (exposed_count_ > 0) return false;
  return std::none_of(in_flight_.begin(), in_flight_.end(),
                      [](const InFlight& reply) { return reply.memory != nullptr; });
}

Responder::Call* Responder::Find(RequestId id) {
  const uint64_t number = id & UINT32_MAX;
  if (number == 0 || number > calls_.size()) return nullptr;
  Call& call = calls_[number - 1];
  return call.generation == (id >> 32) && call.state == State::kExecuting ? &call : nullptr;
}

const ReducedStream& Responder::stream(RequestId id) const {
  const Call* call = Find(id);
  STAGECOACH_CHECK(call != nullptr);
  return call->stream;
}

uint32_t Responder::xid(RequestId id) const {
  const Call* call = Find(id);
  STAGECOACH_CHECK(call != nullptr);
  return call->xid;
}

uint32_t Responder::flags(RequestId id) const {
  const Call* call = Find(id);
  STAGECOACH_CHECK(call != nullptr);
  return call->flags;
}

std::optional<uint64_t> Responder::result_room(RequestId id, size_t i) const {
  const Call* call = Find(id);
  if (call == nullptr || i >= call->offered.writes.size()) return std::nullopt;
  return TotalLength(call->offered.writes[i]);
}

std::vector<std::byte>& Responder::reply_buffer(RequestId id) {
  Call* call = Find(id);
  STAGECOACH_CHECK(call != nullptr);
  return call->reply_buffer;
}

Result<void, ReplyVerdict> Responder::Complete(RequestId id, ReplySpec&& reply, Instant now) {
  Call* call = Find(id);
  if (call == nullptr) return {};
  const uint32_t slot = SlotOf(id);
  const ProtocolProfile& profile = terms_.profile();
  // [5666:6.2#5] [2004:6.1#6] Nothing is left for a requester to read that reads nothing.
  const bool may_expose = exposes_ && !terms_.is_v2();
  const ReplyCustoms customs{.layout = terms_.layout(),
                             .lengths_count_round_up = profile.written_lengths_count_round_up,
                             .read_segments_max = may_expose ? config_.exposed_segments_max : 0,
                             .segment_length_max = config_.segment_length_max};
  const ReplyChunkUse use = profile.reply_chunk_when_needed ? ReplyChunkUse::kWhenNeeded : config_.reply_chunk_use;
  // [v2:4.2.1+6] [v2:4.2.2+7] [v2:8.3+1]
  auto plan =
      PlanReply({.base_size = reply.message_size, .items = reply.items}, call->offered, SendLimit(), use, customs);
  if (plan && plan->read_bytes > config_.exposed_bytes_max) plan = Err(ReplyFault{ReplyVerdict::kNoRoomForReply});
  if (!plan && plan.error() == ReplyVerdict::kMalformedShape) return Err(plan.error().verdict);
  FreeSinks(*call);
  ServeWaiting(now);
  if (over_ || ending_) {
    STAGECOACH_MARK("responder.reply_after_the_end");
    CloseRecord(slot);
    return {};
  }
  if (!plan) {
    STAGECOACH_MARK("responder.reply_impossible");
    Trace(trace_, now, config_.name, "reply.impossible",
          {{"xid", uint64_t{call->xid}}, {"why", ToString(plan.error().verdict)}});
    Answer(slot, MakeAnswer(call->xid, ErrorOr(ErrorFor(plan.error()))));
  } else {
    call->reply_size = reply.message_size;
    call->reply_items = std::move(reply.items);
    call->reply_memory = std::move(reply.memory);
    call->reply_lasting = reply.lasting;
    call->plan = std::move(*plan);
    // [5666:11#7] In their order: none is passed over for a smaller one.
    if (!call->plan.reads.empty() && (!withheld_.empty() || !HasRoomToExpose(call->plan))) {
      STAGECOACH_MARK("responder.reply_withheld");
      call->state = State::kWithheld;
      withheld_.push(slot);
      Trace(trace_, now, config_.name, "reply.withheld",
            {{"xid", uint64_t{call->xid}},
             {"bytes", call->plan.read_bytes},
             {"exposed", uint64_t{exposed_count_}},
             {"exposed_bytes", exposed_bytes_}});
    } else {
      call->state = State::kReplying;
      ReserveExposure(call->plan);
      replies_.push(slot);
    }
  }
  PumpReplies(now);
  return {};
}

// [v2:8.5+1] Of version 2: what the requester would have to offer, so that it can.
Header::Body Responder::ErrorFor(const ReplyFault& fault) const {
  const auto length = static_cast<uint32_t>(std::min<uint64_t>(fault.length, UINT32_MAX));
  switch (fault.verdict) {
    case ReplyVerdict::kWriteChunkTooSmall:
      // [v2:5.3.3#14] [v2:5.3.3#15] [v2:5.3.3#16] [v2:5.3.3+9]
      return ErrWriteResource{.chunk_index = fault.chunk + 1, .length_needed = length};
    case ReplyVerdict::kNoRoomForReply:
      // [v2:5.3.3#18] [v2:5.3.3#19] Where no chunk is taken, no length helps.
      return ErrReplyResource{config_.reverse == ReverseSupport::kInline ? 0 : length};
    case ReplyVerdict::kHeaderTooLong:
    case ReplyVerdict::kMalformedShape:
      break;
  }
  // [v2:5.3.3#21]
  return ErrSystem{};
}

void Responder::Refuse(RequestId id, Instant now) {
  Call* call = Find(id);
  if (call == nullptr) return;
  FreeSinks(*call);
  ServeWaiting(now);
  if (over_ || ending_) return CloseRecord(SlotOf(id));
  Trace(trace_, now, config_.name, "reply.impossible",
        {{"xid", uint64_t{call->xid}}, {"why", ToString(ReplyVerdict::kNoRoomForReply)}});
  Answer(SlotOf(id), MakeAnswer(call->xid, ErrorOr(ErrSystem{})));
  PumpReplies(now);
}

bool Responder::may_adopt_buffers(RequestId id) const {
  return config_.one_receive_first && open(id) && !answered_ && !over_ && !ending_ && posted_receives_ == 0 &&
         unanswered_ == 1 && !terms_.is_v2();
}

void Responder::AdoptBuffers(const BufferArena& send, const BufferArena& receive) {
  STAGECOACH_CHECK(config_.one_receive_first && !answered_ && posted_receives_ == 0 && replies_in_flight() == 0);
  STAGECOACH_CHECK(!terms_.is_v2());
  STAGECOACH_CHECK(send.slots == send_.slots && receive.slots == receive_.slots && kMinHeaderSize <= send.slot_size);
  send_ = send;
  receive_ = receive;
  send_inline_ = std::min(send_inline_, send_.slot_size);
}

void Responder::SetLimits(uint32_t send_inline, uint32_t reads_max, bool exposes) {
  STAGECOACH_CHECK(send_inline <= send_.slot_size && waiting_.empty() && pulling_.empty());
  send_inline_ = send_inline;
  reads_max_ = reads_max;
  exposes_ = exposes && config_.exposed_max > 0;
}

void Responder::Drop(RequestId id, std::string_view why, Instant now) {
  Call* call = Find(id);
  if (call == nullptr) return;
  ++stats_.ignored;
  Trace(trace_, now, config_.name, "call.dropped", {{"xid", uint64_t{call->xid}}, {"why", why}});
  FreeSinks(*call);
  CloseRecord(SlotOf(id));
  ServeWaiting(now);
}

// --- Replies ---

// [2004:3.3#3] [5666:3.3#2] [5666:11+3] What goes with the answer to the call in `slot`. The one credit that is left
// when nothing else is, is not promised while a service is at work for another call of the requester's: the answer to
// that brings it. Nor is it held back while replies are exposed, since whoever goes by the letter needs it for
// RDMA_DONE. To a requester both are the same: calls in flight count against the grant.
uint32_t Responder::Grant(uint32_t slot) {
  const uint32_t grant = window_.OnReply();
  if (!terms_.profile().zero_grants || grant > 1 || exposed_count_ > 0) return grant;
  for (uint32_t other = 0; other < calls_.size(); ++other) {
    if (other == slot || calls_[other].state != State::kExecuting) continue;
    STAGECOACH_MARK("responder.nothing_granted");
    return 0;
  }
  return grant;
}

// [v2:7.3#2] What was to be said in version 2 is not said where that is version 1.
void Responder::OnVersionSettled(Instant now) {
  for (size_t left = replies_.size(); left > 0 && !over_; --left) {
    const uint32_t slot = replies_.pop();
    const Call& call = calls_[slot];
    if (call.state == State::kAnswering && call.answer.flags && !terms_.is_v2()) {
      ++stats_.ignored;
      Trace(trace_, now, config_.name, "call.dropped", {{"xid", uint64_t{call.xid}}, {"why", "of another version"}});
      CloseRecord(slot);
    } else {
      replies_.push(slot);
    }
  }
  PumpReplies(now);
}

// [5666:3.3+1] [2004:3.3#1] A reply needs a send buffer and no Receive: all of these may hold calls.
void Responder::PumpReplies(Instant now) {
  // [v2:7#1] Nor anything of a client whose first message is not answered. It asks the server for nothing, so whatever
  // it has to answer then is no reason to send more than that.
  if (terms_.probing()) return;
  while (!over_ && !ending_ && !replies_.empty() && !free_send_slots_.empty()) {
    const uint32_t slot = replies_.pop();
    if (!replies_owed_.empty()) patience_.Paid(replies_owed_.pop(), now);
    const uint32_t send_slot = free_send_slots_.back();
    free_send_slots_.pop_back();
    if (calls_[slot].state == State::kReplying) {
      SendReply(slot, send_slot, now);
    } else {
      SendAnswer(slot, send_slot, now);
    }
  }
  if (over_ || ending_ || replies_.empty()) return;
  STAGECOACH_MARK("responder.reply_waits_for_send_buffer");
  while (replies_owed_.size() < replies_.size()) replies_owed_.push(patience_.Owe(now));
}

// [5666bis:3.2.2+4] [5666:2+6] [2004:2#3] [5666bis:4.3+5] [5666bis:4.4.5+4] [5666:3.4+5] [2004:3.4+4] [2004:3.8#3]
// [5666bis:4.5+2] [5666:3.8+2] [2004:3.8+2] Writes, then the Receive, then the Send: when the reply is seen, its data
// is there, and so is the buffer for the call it allows.
void Responder::SendReply(uint32_t slot, uint32_t send_slot, Instant now) {
  Call& call = calls_[slot];
  InFlight& in_flight = in_flight_[send_slot];
  SmallVector<Exposure, 4> exposures;
  std::optional<uint32_t> exposed;
  if (!call.plan.reads.empty()) {
    exposed = Expose(call, &exposures, now);
    if (!exposed) {
      call.answer = MakeAnswer(call.xid, ErrorOr(ErrSystem{}));
      SendAnswer(slot, send_slot, now);
      return;
    }
  }
  if (!PostWrites(call, in_flight)) {
    STAGECOACH_MARK("responder.write_source_refused");
    if (exposed) {
      // The message stays while it can be read; then nothing of it was to be written.
      if (call.plan.reads[0].position == 0) exposed_[*exposed].message.swap(call.reply_buffer);
      FenceExposed(*exposed, now);
    }
    Trace(trace_, now, config_.name, "source.refused", {{"xid", uint64_t{call.xid}}});
    // What was registered before the refusal stays registered until after the Send.
    if (!in_flight.registrations.empty()) {
      STAGECOACH_MARK("responder.write_source_refused_halfway");
      in_flight.memory = std::move(call.reply_memory);
      in_flight.message.swap(call.reply_buffer);
    }
    call.answer = MakeAnswer(call.xid, ErrorOr(ErrSystem{}));
    SendAnswer(slot, send_slot, now);
    return;
  }

  // [5666bis:3.1.2+2] [5666:2+2] [2004:2+1] [5666bis:4.3+2] [5666bis:5.1.3+2] [5666:3.3+4] [5666:4.1+5] [2004:3.3+2]
  // [2004:4.1+6] [5666bis:8.3.5+1] [5666bis:8.3.5#1] [5666bis:8.3.5#4] Of version 1; the message follows at once.
  // [v2:5.3.1+1] [v2:5.3.2+1] [v2:7.1+1] [v2:7.3#1] Or of version 2, as its call was.
  const Header header = MakeReplyHeader(call.plan, call.xid, Grant(slot), exposures);
  ByteWriter out(send_.slot(send_slot));
  terms_.Encode(header, out);
  WriteInline({ConstBytes(call.reply_buffer).first(call.reply_size), call.reply_items}, call.plan.inline_pieces, out);
  // The limit may have been lowered since it was planned.
  STAGECOACH_CHECK(out.ok() && out.position() <= send_.slot_size);

  if (exposed) {
    ++stats_.replies_by_read_chunk;
    // The message or its items; what is written is not what is read.
    if (call.plan.reads[0].position == 0) exposed_[*exposed].message.swap(call.reply_buffer);
    Trace(trace_, now, config_.name, "reply.exposed",
          {{"xid", uint64_t{call.xid}},
           {"segments", call.plan.reads.size()},
           {"bytes", call.plan.read_bytes},
           {"exposed", uint64_t{exposed_count_}},
           {"exposed_bytes", exposed_bytes_}});
  }
  const bool holds_memory = !call.plan.writes.empty();
  if (holds_memory) {
    const bool early = STAGECOACH_MUTANT("reply-memory-freed-early", "a reply's memory is let go while it is written");
    if (!early) in_flight.memory = std::move(call.reply_memory);
    in_flight.message.swap(call.reply_buffer);
  }
  ++stats_.replies;
  ++stats_.sends;
  stats_.bytes_placed_by_write += call.plan.direct_bytes;
  if (call.plan.type == MessageType::kNomsg) ++stats_.replies_long;
  stats_.credits_granted = header.credits;
  if (call.invalidate) ++stats_.invalidations_remote;
  const PostSend send{.slot = send_slot,
                      .length = static_cast<uint32_t>(out.position()),
                      .invalidate = call.invalidate,
                      .prompt = holds_memory};
  const RequestId id = IdOf(slot);
  stats_.call_time.RecordTime(now - call.arrived);
  stats_.send_bytes.Record(send.length);
  OnAnswer();
  CloseRecord(slot);
  Post(send, now);
  if (exposed && STAGECOACH_MUTANT("exposure-ends-with-send", "a reply is let go of when it is sent, not when read")) {
    FenceExposed(*exposed, now);
  }
  Trace(trace_, now, config_.name, "reply.sent",
        {{"request", id},
         {"xid", uint64_t{call.xid}},
         {"slot", uint64_t{send_slot}},
         {"type", ToString(call.plan.type, header.version)},
         {"bytes", uint64_t{send.length}},
         {"placed", call.plan.direct_bytes},
         {"reply_chunk", call.plan.reply_bytes},
         {"writes", call.plan.writes.size()},
         {"written", call.plan.direct_bytes + call.plan.reply_bytes},
         {"invalidate", uint64_t{send.invalidate ? 1u : 0u}},
         {"granted", uint64_t{header.credits}},
         {"receives", uint64_t{posted_receives()}},
         {"unanswered", uint64_t{unanswered_}},
         {"received", stats_.receives}});
}

// Registers what the plan writes from and emits the Writes. False when the device refuses: then nothing was emitted but
// the return of what had been registered.
bool Responder::PostWrites(Call& call, InFlight& in_flight) {
  if (call.plan.writes.empty()) return true;
  const EncodedMessage message{ConstBytes(call.reply_buffer).first(call.reply_size), call.reply_items};
  const BufferArena& arena = send_;
  std::optional<Registration> base;
  SmallVector<Registration, 4> items;
  SmallVector<uint32_t, 4> item_known;
  const auto enlist = [&](ConstBytes memory, LastingMemory* lasting) -> std::optional<Registration> {
    std::optional<Registration> registration = memory_.Register(memory, MemoryUse::kWriteSource, lasting);
    if (registration && registration->id != 0) {
      in_flight.registrations.push_back(registration->id);
      ++stats_.registrations;
    }
    if (registration && lasting != nullptr) ++(registration->lasting ? stats_.memory_reused : stats_.memory_not_reused);
    return registration;
  };
  for (size_t i = 0; i < call.reply_items.size(); ++i) {
    items.push_back({});
    item_known.push_back(0);
  }
  bool ok = true;
  for (const PlannedWrite& write : call.plan.writes) {
    if (write.source.source == Piece::Source::kBase && !base) {
      base = enlist(message.base, nullptr);
      ok = ok && base.has_value();
    } else if (write.source.source == Piece::Source::kItem && item_known[write.source.index] == 0) {
      const auto registration = enlist(message.items[write.source.index].data, call.reply_lasting);
      ok = ok && registration.has_value();
      if (registration) items[write.source.index] = *registration;
      item_known[write.source.index] = 1;
    }
    if (!ok) return false;
  }
  for (const PlannedWrite& write : call.plan.writes) {
    if (write.target.length == 0) continue;
    PostWrite command{.target = write.target};
    switch (write.source.source) {
      case Piece::Source::kItem:
        command.source = PieceBytes(message, write.source);
        command.local_key = items[write.source.index].local_key;
        break;
      case Piece::Source::kPad:
        command.source = ConstBytes(arena.memory).last(kArenaTail).first(write.source.length);
        command.local_key = arena.local_key;
        break;
      default:
        command.source = PieceBytes(message, write.source);
        command.local_key = base->local_key;
        break;
    }
    in_flight.bytes += write.target.length;
    commands_.push(command);
    ++stats_.writes;
  }
  return true;
}

// --- What the requester reads ---

bool Responder::HasRoomToExpose(const ReplyPlan& plan) const {
  return exposed_count_ < config_.exposed_max && plan.read_bytes <= config_.exposed_bytes_max - exposed_bytes_;
}

void Responder::ReserveExposure(const ReplyPlan& plan) {
  if (plan.reads.empty()) return;
  ++exposed_count_;
  exposed_bytes_ += plan.read_bytes;
}

// [5666:3.4+3] [2004:3.4+2] Makes reachable what the plan says, in its order. Empty when the device refuses: what it
// had done of it is undone.
std::optional<uint32_t> Responder::Expose(Call& call, SmallVector<Exposure, 4>* exposures, Instant now) {
  const auto free = std::find_if(exposed_.begin(), exposed_.end(), [](const Exposed& one) { return !one.in_use; });
  STAGECOACH_CHECK(free != exposed_.end());
  const auto index = static_cast<uint32_t>(free - exposed_.begin());
  Exposed& exposed = *free;
  exposed.in_use = true;
  exposed.done = false;
  exposed.xid = call.xid;
  exposed.order = ++exposed_ever_;
  exposed.until = now + config_.exposed_time;
  exposed.bytes = call.plan.read_bytes;
  exposed.memory = call.reply_memory;
  const EncodedMessage message{ConstBytes(call.reply_buffer).first(call.reply_size), call.reply_items};
  for (const PlannedRead& read : call.plan.reads) {
    LastingMemory* const lasting = read.memory.source == Piece::Source::kItem ? call.reply_lasting : nullptr;
    const auto registration = memory_.Register(PieceBytes(message, read.memory), MemoryUse::kReadByPeer, lasting);
    if (!registration) {
      STAGECOACH_MARK("responder.exposure_refused");
      Trace(trace_, now, config_.name, "source.refused", {{"xid", uint64_t{call.xid}}});
      exposed.message.swap(call.reply_buffer);
      FenceExposed(index, now);
      return std::nullopt;
    }
    ++stats_.registrations;
    if (lasting != nullptr) ++(registration->lasting ? stats_.memory_reused : stats_.memory_not_reused);
    if (registration->id != 0) exposed.registrations.push_back(registration->id);
    exposures->push_back({registration->handle, registration->offset});
  }
  return index;
}

// [5666:3.5#1] [5666:3.8+5] [2004:3.8+5] RDMA_DONE of this XID. Of several such replies it is for the one that was sent
// first.
void Responder::OnDone(uint32_t slot, uint32_t xid, Instant now) {
  Repost(slot);
  Exposed* first = nullptr;
  for (Exposed& exposed : exposed_) {
    if (!exposed.in_use || exposed.done || exposed.xid != xid) continue;
    if (first == nullptr || exposed.order < first->order) first = &exposed;
  }
  Trace(trace_, now, config_.name, "done.received",
        {{"xid", uint64_t{xid}},
         {"matched", uint64_t{first != nullptr ? 1u : 0u}},
         {"exposed", uint64_t{exposed_count_}}});
  if (first == nullptr) {
    STAGECOACH_MARK("responder.done_for_nothing");
    ++stats_.ignored;
    return;
  }
  ++stats_.dones;
  FenceExposed(static_cast<uint32_t>(first - exposed_.data()), now);
}

// [5666:3.8+7] Who reads after that has the device against it.
void Responder::FenceExposed(uint32_t index, Instant now) {
  Exposed& exposed = exposed_[index];
  exposed.done = true;
  exposed.fencing = 1;  // our own, so that answers that come at once do not finish early
  for (const uint32_t registration : exposed.registrations) {
    ++exposed.fencing;
    ++stats_.invalidations_local;
    commands_.push(Invalidate{.registration = registration, .tag = index | kExposedTag});
  }
  exposed.registrations.clear();
  if (--exposed.fencing == 0) ReleaseExposed(index, now);
}

void Responder::ReleaseExposed(uint32_t index, Instant now) {
  Exposed& exposed = exposed_[index];
  --exposed_count_;
  exposed_bytes_ -= exposed.bytes;
  exposed = {};
  ServeWithheld();
  PumpReplies(now);
  ServeWaiting(now);
}

void Responder::ServeWithheld() {
  while (!over_ && !ending_ && !withheld_.empty() && HasRoomToExpose(calls_[withheld_.front()].plan)) {
    const uint32_t slot = withheld_.pop();
    ReserveExposure(calls_[slot].plan);
    calls_[slot].state = State::kReplying;
    replies_.push(slot);
  }
}

std::optional<Instant> Responder::Deadline() const {
  std::optional<Instant> first;
  for (const Exposed& exposed : exposed_) {
    if (exposed.in_use && !exposed.done && (!first || exposed.until < *first)) first = exposed.until;
  }
  const std::optional<Instant> patient = patience_.until();
  if (patient && (!first || *patient < *first)) first = patient;
  return over_ || ending_ ? std::nullopt : first;
}

// After the Writes that belong to it.
void Responder::Post(const PostSend& send, Instant now) {
  InFlight& in_flight = in_flight_[send.slot];
  in_flight.bytes += send.length;
  if (send.prompt) {
    in_flight.owed = patience_.Owe(now);
    ++sends_owed_;
  }
  commands_.push(send);
}

// [5666:3.8#1] [5666:11#5] [5666:11#8] [5666:11+4] [2004:3.8+9] The connection ends, and with it whatever is exposed:
// the requester's Reads would end it as well.
void Responder::OnDeadline(Instant now) {
  const std::optional<Instant> first = Deadline();
  if (!first || now < *first) return;
  if (first == patience_.until()) {
    if (!reads_.empty()) STAGECOACH_MARK("responder.promised_data_never_came");
    if (sends_owed_ > 0) STAGECOACH_MARK("responder.reply_never_taken");
    Trace(trace_, now, config_.name, "peer.overdue",
          {{"reads", reads_.size()}, {"sends", uint64_t{sends_owed_}}, {"replies", replies_.size()}});
    Close(Disconnect::Why::kPeerOverdue);
    return;
  }
  STAGECOACH_MARK("responder.done_never_came");
  Trace(trace_, now, config_.name, "exposure.expired",
        {{"exposed", uint64_t{exposed_count_}}, {"withheld", withheld_.size()}});
  Close(Disconnect::Why::kReplyNotRead);
}

// [v2:3.2#4] [v2:3.2#5] [v2:5.3.3+4] Errors and other answers that are no replies never invalidate and carry no
// chunks. Their Receive is posted before them, too [v2:8.2+2] [v2:8.2+3].
void Responder::SendAnswer(uint32_t slot, uint32_t send_slot, Instant now) {
  Call& call = calls_[slot];
  Header header = std::move(call.answer);
  const bool is_error = header.type() == MessageType::kError;
  // [v2:5.3.3+5] Whatever answers does, but errors of version 2, whose grant nobody looks at (Requester::GrantOf).
  const bool v2 = terms_.is_v2() || header.flags.has_value();
  const bool grants = !v2 || !is_error;
  header.credits = grants ? Grant(slot) : window_.OnAnswerWithoutGrant();
  ByteWriter out(send_.slot(send_slot));
  terms_.Encode(header, out);
  STAGECOACH_CHECK(out.ok());
  if (is_error) ++stats_.errors;
  ++stats_.sends;
  stats_.credits_granted = header.credits;
  const PostSend send{.slot = send_slot,
                      .length = static_cast<uint32_t>(out.position()),
                      .prompt = !in_flight_[send_slot].registrations.empty()};
  const RequestId id = IdOf(slot);
  stats_.call_time.RecordTime(now - call.arrived);
  stats_.send_bytes.Record(send.length);
  OnAnswer();
  CloseRecord(slot);
  Post(send, now);
  if (trace_ == nullptr) return;
  if (is_error) {
    Trace(trace_, now, config_.name, "error.sent",
          {{"request", id},
           {"xid", uint64_t{header.xid}},
           {"error", ErrorName(header)},
           {"slot", uint64_t{send_slot}},
           {"granted", uint64_t{credits_granted()}},
           {"receives", uint64_t{posted_receives()}},
           {"unanswered", uint64_t{unanswered_}},
           {"received", stats_.receives}});
    return;
  }
  Trace(trace_, now, config_.name, "answer.sent",
        {{"request", id},
         {"xid", uint64_t{header.xid}},
         {"type", ToString(header.type(), header.version)},
         {"slot", uint64_t{send_slot}},
         {"granted", uint64_t{header.credits}},
         {"receives", uint64_t{posted_receives()}},
         {"unanswered", uint64_t{unanswered_}},
         {"received", stats_.receives}});
}

// The call is over: its buffer goes back to the queue.
void Responder::CloseRecord(uint32_t slot) {
  Call& call = calls_[slot];
  STAGECOACH_CHECK(unanswered_ > 0);
  --unanswered_;
  ++call.generation;
  call.offered = {};
  call.invalidate.reset();
  call.padding = {};
  call.inline_message = {};
  call.stream = {};
  call.reply_items.clear();
  call.reply_memory.reset();
  call.reply_lasting = nullptr;
  call.answer = {};
  if (call.reply_buffer.size() > kReplyBufferKeptMax) call.reply_buffer = {};
  if (STAGECOACH_MUTANT("refused-receive-lost", "the Receive of a refused call is not posted again") &&
      call.state == State::kAnswering) {
    call.state = State::kPosted;
    return;
  }
  Repost(slot);
}

void Responder::OnSendDone(uint32_t slot, Instant now) {
  ++signs_of_life_;
  InFlight& in_flight = in_flight_[slot];
  patience_.Moved(std::exchange(in_flight.bytes, 0), now);
  if (in_flight.owed) {
    patience_.Paid(*std::exchange(in_flight.owed, std::nullopt), now);
    --sends_owed_;
  }
  in_flight.fencing = 1;
  for (const uint32_t registration : in_flight.registrations) {
    ++in_flight.fencing;
    ++stats_.invalidations_local;
    commands_.push(Invalidate{.registration = registration, .tag = slot | kSendTag});
  }
  in_flight.registrations.clear();
  if (--in_flight.fencing > 0) return;
  ReleaseSendSlot(slot);
  PumpReplies(now);
  ServeWaiting(now);
}

void Responder::ReleaseSendSlot(uint32_t slot) {
  InFlight& in_flight = in_flight_[slot];
  in_flight.memory.reset();
  if (in_flight.message.size() > kReplyBufferKeptMax) in_flight.message = {};
  free_send_slots_.push_back(slot);
}

void Responder::OnInvalidated(uint32_t tag, Instant now) {
  if (over_) return;
  if ((tag & kSendTag) != 0) {
    const uint32_t slot = tag & ~kSendTag;
    STAGECOACH_CHECK(in_flight_[slot].fencing > 0);
    if (--in_flight_[slot].fencing == 0) {
      ReleaseSendSlot(slot);
      PumpReplies(now);
      ServeWaiting(now);
    }
    return;
  }
  if ((tag & kExposedTag) != 0) {
    const uint32_t index = tag & ~kExposedTag;
    STAGECOACH_CHECK(exposed_[index].fencing > 0);
    if (--exposed_[index].fencing == 0) ReleaseExposed(index, now);
    return;
  }
  Call& call = calls_[tag];
  STAGECOACH_CHECK(call.fencing > 0);
  if (--call.fencing == 0) OnPulled(tag, now);
}

// --- The end ---

void Responder::Close(Disconnect::Why why) {
  if (ending_ || over_) return;
  ending_ = true;
  commands_.push(Disconnect{why});
}

void Responder::OnDisconnected(Instant now) {
  over_ = true;
  window_.Leave();
  commands_.clear();
  waiting_.clear();
  pulling_.clear();
  ready_.clear();
  replies_.clear();
  replies_owed_.clear();
  withheld_.clear();
  posted_receives_ = 0;
  for (uint32_t slot = 0; slot < calls_.size(); ++slot) {
    Call& call = calls_[slot];
    switch (call.state) {
      case State::kPosted:
        continue;
      case State::kExecuting:
        // What a service holds stays until it lets go.
        STAGECOACH_MARK("responder.disconnect_while_executing");
        continue;
      case State::kWaitingForMemory:
        STAGECOACH_MARK("responder.disconnect_while_waiting_for_memory");
        break;
      case State::kPulling:
        STAGECOACH_MARK("responder.disconnect_while_pulling");
        break;
      case State::kFencingSinks:
        STAGECOACH_MARK("responder.disconnect_while_fencing");
        break;
      case State::kReady:
        STAGECOACH_MARK("responder.disconnect_before_execution");
        break;
      case State::kWithheld:
        STAGECOACH_MARK("responder.disconnect_while_withheld");
        break;
      case State::kReplying:
      case State::kAnswering:
        STAGECOACH_MARK("responder.disconnect_while_replying");
        break;
    }
    FreeSinks(call);
    CloseRecord(slot);
  }
  if (replies_in_flight() > 0) STAGECOACH_MARK("responder.disconnect_with_replies_in_flight");
  for (InFlight& in_flight : in_flight_) in_flight = {};
  for (Call& call : calls_) call.owed.reset();
  sends_owed_ = 0;
  patience_.Forgive();
  for (Exposed& exposed : exposed_) exposed = {};
  exposed_count_ = 0;
  exposed_bytes_ = 0;
  Trace(trace_, now, config_.name, "disconnected", {{"executing", uint64_t{unanswered_}}});
}

std::string Responder::DebugString() const {
  static constexpr const char* kStates[] = {
      "posted",    "waiting for memory", "pulling",  "fencing what was pulled", "ready",
      "executing", "replying",           "withheld", "answered without a reply"};
  const auto number = [](uint64_t value) { return std::to_string(value); };
  std::string text =
      "    credits granted " + number(credits_granted()) + "; receives wanted " + number(posted_receives()) +
      "; calls unanswered " + number(unanswered_) + "; reads in flight " + number(reads_.size()) + " of " +
      number(reads_max_) + "; replies in flight " + number(replies_in_flight()) + ", waiting for a send buffer " +
      number(replies_.size()) +
      (config_.exposed_max > 0 ? "; exposed " + number(exposed_count_) + " of " + number(config_.exposed_max) +
                                     ", bytes " + number(exposed_bytes_) + ", withheld " + number(withheld_.size())
                               : "") +
      (over_     ? "; over"
       : ending_ ? "; ending"
                 : "") +
      "\n";
  for (const Call& call : calls_) {
    if (call.state == State::kPosted) continue;
    text += "    call xid " + number(call.xid) + " " + kStates[static_cast<size_t>(call.state)];
    if (call.state == State::kPulling) {
      text += ", Read chunks pulled " + number(call.next_chunk) + " of " + number(call.chunks.chunks.size()) +
              ", reads in flight " + number(call.reads_in_flight);
    }
    text += "\n";
  }
  return text;
}

std::optional<Command> Responder::TakeCommand() {
  if (commands_.empty()) return std::nullopt;
  return commands_.pop();
}

}  // namespace stagecoach::rpcrdma
