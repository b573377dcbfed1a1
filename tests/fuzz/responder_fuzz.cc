// The responder against a hostile requester, as a sequence of operations: calls with chunk lists of any kind, spoilt,
// or raw bytes, more of them than were granted; RDMA Reads that complete in any order, late or never; a service that
// answers with messages and items of any size, refuses, drops, or holds on to the call beyond the connection; memory
// that is short; the connection's end. In some worlds replies may stay in memory that the requester reads, and which it
// says RDMA_DONE for, or for something else, or never. In others version 2 may be spoken, or has to be: its properties,
// handles to invalidate, messages of an extension and of the other direction, limits that calls do not keep to, the
// levels of the reverse direction.
//
// A model beside it knows what each Receive holds and what has to become of it. The properties: no more Reads than the
// peer allows, each of a segment of its call and into the call's own memory; a call is handed out once, whole, when
// nobody else can write to it any more; every call is answered once and nothing else is; a reply is where the offered
// segments say, in their order, with the lengths that were written; nothing is invalidated but a steering tag of the
// call answered; memory lives as long as it is used and no longer, which for a reply that is read is until RDMA_DONE.
// Of version 2: every error says what the call did, and what it says of this end is so; what is marked as an answer has
// none; what a call asks to be invalidated is, and nothing else.
//
// Input: 5 bytes of configuration, 2 more where the fourth says version 2, then operations of a byte and their
// arguments.
#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "rpcrdma/core/responder.h"
#include "tests/fuzz/engine_driver.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/messages.h"

namespace stagecoach::rpcrdma {
namespace {

using fuzz::AnyProperties;
using fuzz::Block;
using fuzz::EngineWorld;
using fuzz::FuzzArena;
using fuzz::Inside;
using fuzz::Pattern;
using fuzz::ReceiveQueue;
using fuzz::Same;
using fuzz::SendQueue;
using fuzz::Spread;
using fuzz::TakeOut;
using fuzz::Unreduced;
using fuzz::WithItems;
using stagecoach::testing::FuzzInput;

constexpr uint32_t kReplyWord = 1;
constexpr uint64_t kReadBytesMax = 2048;
constexpr Duration kExposedTime = 300ms;

// What is in a Receive, and what has to become of it.
struct Entry {
  enum class Fate : uint8_t {
    kIgnore,              // the Receive is posted again at once
    kErrVers,             // RDMA_ERROR
    kErrChunk,            // RDMA_ERROR
    kErrLimits,           // RDMA2_ERROR: this end does not take chunks like these
    kAnswer,              // what is no reply
    kErrChunkWhenPulled,  // the message in the Position-Zero Read chunk is not that of the header
    kIgnoreWhenPulled,    // it is no call
    kServe,
  };
  Fate fate = Fate::kIgnore;
  uint32_t xid = 0;
  uint32_t slot = 0;
  ChunkLists lists;
  CallChunks chunks;
  std::vector<Block> data;  // the peer's memory behind the Read chunks
  Block message;            // the call, whole
  size_t next_read = 0;     // in chunks.segments: those before it were asked for
  uint32_t reads_in_flight = 0;
  std::vector<ConstBytes> sinks;

  std::optional<RequestId> request;
  // The layout of the answer, and its version word.
  bool is_v2 = false;
  uint32_t version = kRpcRdmaVersion1;
  std::optional<Header::Body> answer;  // instead of ERR_CHUNK, or of a reply
  uint32_t flags = 0;
  uint32_t inv_handle = 0;
  uint32_t send_max = 0;  // when it was replied to

  bool dropped = false;  // by the service
  bool refused = false;  // by the service
  bool answered = false;
  Block reply;
  std::vector<Block> reply_data;
  EligibleItems items;               // of reply_data: copies of what the service gave
  std::weak_ptr<const void> memory;  // of the items
};

// A reply that was left for the requester to read.
struct Exposed {
  uint32_t xid = 0;
  std::vector<uint32_t> regions;
  uint64_t bytes = 0;
  Instant sent;
};

class World final : public EngineWorld {
 public:
  explicit World(FuzzInput& input)
      : EngineWorld(input),
        config_(Configure(input)),
        send_(1 + (sizes_ & 3), terms_ ? 1200 : 512),
        receive_(Receives(), 320),
        sends_(send_.view),
        posted_(receive_.view),
        engine_(config_, send_.view, SharedView(), memory_, nullptr) {
    memory_.on_return = [this](uint32_t slot) { Returned(slot); };
    engine_.Start();
    if (config_.shared_receives || config_.receives > 0) {
      for (uint32_t slot = 0; slot < receive_.view.slots; ++slot) posted_.Post(slot);
    }
    Drain();
    FUZZ_PROPERTY(posted_.size() == receive_.view.slots);
  }

  void Run() {
    RunOperations();
    FUZZ_PROPERTY(!engine_.DebugString().empty());
    if (!ending_ && !over_ && orderly_) Settle();
    if (!over_) Lose();
    FUZZ_PROPERTY(engine_.exposed() == 0 && engine_.replies_withheld() == 0 && !engine_.Deadline().has_value());
    // What services hold, they let go now.
    while (!open_.empty()) Serve(0, open_.size() % 3, 0);
    FUZZ_PROPERTY(engine_.unanswered() == 0 && memory_.used == 0 && !engine_.TakeCommand().has_value());
    FUZZ_PROPERTY(!engine_.has_request() && engine_.waiting_for_memory() == 0 && engine_.replies_waiting() == 0);
    for (const auto& memory : service_memory_) FUZZ_PROPERTY(memory.expired());
    if (config_.shared_receives) FUZZ_PROPERTY(posted_.size() == receive_.view.slots);
  }

 private:
  Responder::Config Configure(FuzzInput& input) {
    const uint8_t choices = input.Byte();
    const uint8_t more = input.Byte();
    sizes_ = input.Byte();
    const uint8_t reads = input.Byte();
    memory_.bytes_max = 256u * (1 + input.Byte());
    orderly_ = (choices & 1) != 0;
    at_once_ = (choices & 2) != 0;
    memory_.pooled = (choices & 4) != 0;
    Responder::Config config{.inline_only = (choices & 0x18) == 0x18,
                             .send_inline = 64u << ((choices >> 5) & 3),
                             .may_invalidate = (choices & 0x80) != 0,
                             .reads_max = reads & 3u,
                             .data_limits = {.read_bytes_max = kReadBytesMax, .write_bytes_max = 1 << 16}};
    config.reply_chunk_use = (more & 1) != 0 ? ReplyChunkUse::kWhenNeeded : ReplyChunkUse::kWheneverOffered;
    config.shared_receives = !config.inline_only && (more & 6) == 6;
    if (config.inline_only || config.shared_receives) config.receives = 1 + ((sizes_ >> 2) & 7);
    if ((more & 8) != 0 || config.shared_receives) {
      config.budgets.push_back(std::make_shared<CreditBudget>(1 + (more >> 4), 0));
    }
    receives_ = 1 + ((sizes_ >> 2) & 7);
    config.profile.zero_grants = (reads & 0x80) != 0;
    if ((reads & 0xc0) == 0xc0 && receives_ > 1 && config.receives == 0) {
      config.profile.replies_by_read_chunk = true;
      config.exposed_max = std::min(1u + ((reads >> 2) & 3u), receives_ - 1);
      config.exposed_bytes_max = 512u << ((reads >> 4) & 3);
      config.exposed_time = kExposedTime;
      config.segment_length_max = (reads & 2) != 0 ? 100 : 1 << 20;
    }
    if ((reads & 0xc0) == 0x40) {
      ConfigureVersion2(input, config);
    } else {
      seen_.emplace(ConnectionTerms::Config{.profile = config.profile});
    }
    return config;
  }

  // A server of both versions, of version 2 alone, one that has been asked in it; or a client, for the reverse
  // direction.
  void ConfigureVersion2(FuzzInput& input, Responder::Config& config) {
    const uint8_t choices = input.Byte();
    const uint8_t lists = input.Byte();
    const bool is_reverse = (choices & 3) == 3;
    ConnectionTerms::Config both{
        .end = is_reverse ? ConnectionTerms::End::kClient : ConnectionTerms::End::kServer,
        .versions = {(choices & 3) == 1 ? kRpcRdmaVersion2 : kRpcRdmaVersion1, kRpcRdmaVersion2},
        .own = {.receive_buffer_size = 5000}};
    config.can_invalidate = (choices & 0x10) != 0;
    if ((choices & 0x20) != 0) {
      both.extensions = fuzz::KnownExtensions();
      both.more.push_back({fuzz::kExtensionProperty, fuzz::Word(choices)});
    }
    if ((choices & 0x40) != 0) config.answer_extension = AnswerExtension;
    if ((choices & 0x80) != 0) {
      both.list_limits = {.read_segments_max = lists & 3u,
                          .write_chunks_max = (lists >> 2) & 3u,
                          .segments_per_chunk_max = 1u + ((lists >> 4) & 1u),
                          .write_segments_max = 1u + (lists >> 5)};
    }
    if (is_reverse) {
      constexpr ReverseSupport kLevels[] = {ReverseSupport::kGeneral, ReverseSupport::kInline, ReverseSupport::kNone};
      config.reverse = kLevels[((choices >> 2) & 3) % 3];
      config.inline_only = true;
      config.shared_receives = false;
      config.receives = receives_;
    }
    for (auto* each : {&terms_, &seen_}) {
      each->emplace(both);
      if ((choices & 3) >= 2) (*each)->SetVersion(kRpcRdmaVersion2);
    }
    config.terms = &*terms_;
  }

  // Rightly or not.
  static Header::Body AnswerExtension(const Extension& asked) {
    switch (asked.body.size() % 9) {
      case 0:
        return ErrOther{fuzz::kExtensionError};
      case 1:
        return ErrChunk{};
      case 2:
        return RdmaMsg{};
      case 3:
        return Extension{.type = fuzz::kExtensionTypeWithMessage, .body = asked.body, .has_message = true};
      case 4:
        return Extension{.type = asked.type, .body = Pattern(2000, 1)};
      case 5:
        return ErrReadChunks{7};
    }
    return asked;
  }
  // Those of the other direction, or the one for the call too many.
  uint32_t Receives() const { return receives_ + (config_.receives > 0 ? 1 : 0); }
  BufferArena SharedView() {
    BufferArena view = receive_.view;
    if (!config_.shared_receives) return view;
    for (uint32_t slot = 0; slot < view.slots; ++slot) places_.push_back(view.slot(slot).data());
    view.memory = {};
    view.places = places_.data();
    return view;
  }

  ConnectionEngine& engine() override { return engine_; }

  void Operate(uint8_t operation) override {
    switch (operation % 16) {
      case 0:
      case 1:
      case 2:
      case 3: {
        Block call = Call();
        fuzz::Spoil(call, input_);
        return PeerSends(call);
      }
      case 4: {
        const ConstBytes bytes = input_.Bytes(input_.Byte());
        return PeerSends(Block(bytes.begin(), bytes.end()));
      }
      case 5:
      case 6:
        return CompleteRead(input_.Byte());
      case 7:
      case 8:
        return CompleteSend(input_.Byte());
      case 9:
        return CompleteInvalidate(input_.Byte());
      case 10:
      case 11:
      case 12: {
        const uint8_t which = input_.Byte();
        const uint8_t how = input_.Byte();
        if (!open_.empty()) Serve(which % open_.size(), how, input_.Byte());
        return;
      }
      case 13:
        memory_.refuse_next = true;
        return;
      case 14:
        memory_.bytes_max = 64u * (1 + input_.Byte());
        engine_.OnMemoryFreed(now_);
        return;
      case 15:
        return Rare(input_.Byte());
    }
  }

  void Rare(uint8_t choice) {
    now_ += std::chrono::milliseconds(choice);
    if (config_.exposed_max > 0) {
      if (choice % 8 == 2) return Later();
      if (choice % 8 > 3) return PeerIsDone(choice);
    }
    if (choice % 8 == 0) return Lose();
    if (choice % 8 == 1) {
      engine_.Close();
      closed_ = true;
    }
  }

  // [5666:3.8#1] Who does not read what is exposed loses the connection.
  void Later() {
    for (const Exposed& exposed : exposed_) {
      if (now_ >= exposed.sent + kExposedTime && !ending_ && !over_ && !closed_) must_end_ = not_read_ = true;
    }
    engine_.OnDeadline(now_);
  }

  // RDMA_DONE: for one of the replies that are exposed, or for whatever XID.
  void PeerIsDone(uint8_t choice) {
    uint32_t xid = input_.Byte();
    if ((choice & 8) != 0 && !exposed_.empty()) xid = exposed_[xid % exposed_.size()].xid;
    PeerSends(fuzz::Encode({.xid = xid, .credits = 1, .body = RdmaDone{}}, {}));
  }

  // --- What the requester does ---

  Segment PeerSegment(uint32_t length) {
    const uint8_t choice = input_.Byte();
    // Steering tags of its own, but for a few that repeat, or name nothing.
    const uint32_t handle = choice < 8 ? choice : next_handle_++;
    const uint64_t offset = choice == 9 ? ~uint64_t{0} - 4 : uint64_t{choice} << 20;
    return {handle, length, offset};
  }

  Block Call() {
    const uint8_t choices = input_.Byte();
    const uint8_t xid = input_.Byte();
    const uint8_t counts = input_.Byte();
    ChunkLists lists;
    uint32_t position = 8;
    const bool long_call = (choices & 1) != 0;
    if (long_call) {
      for (int n = 1 + ((choices >> 1) & 1); n > 0; --n) lists.reads.push_back({0, PeerSegment(8 + input_.Byte())});
    }
    for (int n = counts & 3; n > 0; --n) {
      const uint8_t place = input_.Byte();
      const uint32_t length = input_.Byte() * ((choices & 4) != 0 ? 8u : 1u);
      lists.reads.push_back({position, PeerSegment(length)});
      // The next one a segment of the same chunk, a chunk right behind it, or one with a gap between.
      if ((place & 1) != 0) position += length + XdrPad(length) + (place & 4);
    }
    for (int n = (counts >> 2) & 3; n > 0; --n) {
      lists.writes.BeginChunk();
      for (int m = input_.Byte() & 3; m > 0; --m) lists.writes.AppendSegment(PeerSegment(input_.Byte()));
    }
    if ((counts & 0x10) != 0) {
      SegmentArray& reply = lists.reply.emplace();
      for (int m = counts >> 6; m > 0; --m) reply.push_back(PeerSegment(input_.Byte() * 4u));
    }
    Header header{.xid = xid, .credits = counts};
    Block message;
    const uint8_t form = terms_ ? input_.Byte() : 0;
    if (!long_call) {
      message = Pattern(8 + 4 * ((choices >> 3) & 15), xid);
      ByteWriter head(message);
      head.U32(xid);
      head.U32(form >> 5 == 1 ? form & 3 : 0);
      header.body = RdmaMsg{std::move(lists)};
    } else {
      header.body = RdmaNomsg{std::move(lists)};
    }
    if ((choices & 0x80) != 0 && !long_call && (counts & 0x20) != 0) {
      header.body = RdmaMsgp{.align = 4, .thresh = 4, .chunks = *header.chunks()};
    }
    if (!terms_ || (form & 0x10) != 0) return fuzz::Encode(header, message);
    return AsVersion2(std::move(header), message, form);
  }

  // The same in version 2, or something else that it has.
  Block AsVersion2(Header header, const Block& message, uint8_t form) {
    header.version = kRpcRdmaVersion2;
    header.flags = ((form & 4) != 0 ? kFlagResponse : 0) | ((form & 8) != 0 ? fuzz::kExtensionFlag : 0);
    ChunkLists lists = *header.chunks();
    switch (form >> 5) {
      case 2:
        header.body = AnyProperties(input_);
        return fuzz::Encode(header, {});
      case 3:
        header.body = ErrSegments{form};
        return fuzz::Encode(header, {});
      case 4:
      case 5: {
        Block body = Pattern(4 + form + input_.Byte(), form);
        ByteWriter(body).U32(static_cast<uint32_t>(body.size()));
        const uint32_t type = form >> 5 == 4 ? fuzz::kExtensionType : fuzz::kExtensionTypeWithMessage;
        header.body = Extension{.type = type, .body = std::move(body), .has_message = form >> 5 == 5};
        return fuzz::Encode(header, header.has_inline_message() ? ConstBytes(message) : ConstBytes());
      }
    }
    // Of the call's handles one, or another.
    const uint8_t named = input_.Byte();
    std::vector<uint32_t> handles;
    for (const ReadSegment& read : lists.reads) handles.push_back(read.target.handle);
    for (const Segment& segment : lists.writes.segments()) handles.push_back(segment.handle);
    if (lists.reply) {
      for (const Segment& segment : *lists.reply) handles.push_back(segment.handle);
    }
    const uint32_t inv_handle = named == 0 || handles.empty() ? named : handles[named % handles.size()];
    if (header.type() == MessageType::kNomsg) {
      header.body = RdmaNomsg{std::move(lists), named == 0xff ? 0x77 : inv_handle};
    } else {
      header.body = RdmaMsg{std::move(lists), named == 0xff ? 0x77 : inv_handle};
    }
    return fuzz::Encode(header, message);
  }

  // A Send of the peer's. Where there is no Receive for it, the transport ends the connection.
  void PeerSends(const Block& bytes) {
    const uint8_t truth = input_.Byte();
    if (over_ || posted_.empty()) return;
    const auto [slot, received] = posted_.Receive(bytes);
    FUZZ_PROPERTY(!entries_.contains(slot));
    auto entry = std::make_unique<Entry>();
    entry->slot = slot;
    const bool overrun = config_.shared_receives && !ending_ && engine_.unanswered() >= allowed_ - answered_;
    if (!ending_ && !closed_ && !overrun) Foresee(received, truth, *entry);
    may_end_ = may_end_ || overrun;
    ByteReader in(received);
    if (const auto header = DecodeHeaderV1(in); header && header->type() == MessageType::kDone) {
      const auto first =
          std::find_if(exposed_.begin(), exposed_.end(), [&](const auto& one) { return one.xid == header->xid; });
      if (first != exposed_.end() && !ending_ && !closed_) exposed_.erase(first);
    }
    entries_.emplace(slot, std::move(entry));
    Deliver(slot, received);
    if (overrun && !closed_) must_end_ = true;
  }

  // With Receives shared between directions their owner has decoded the header.
  void Deliver(uint32_t slot, ConstBytes bytes) {
    const auto length = static_cast<uint32_t>(bytes.size());
    if (!config_.inline_only) return engine_.OnReceive(slot, length, std::nullopt, now_);
    ByteReader in(bytes);
    auto header = terms_ ? terms_->Decode(in) : DecodeHeaderV1(in, config_.list_limits);
    if (!header) return engine_.OnMalformed(slot, length, header.error(), now_);
    engine_.OnMessage(slot, std::move(*header), in.Rest(), now_);
  }

  // What this message means, by the document.
  void Foresee(ConstBytes bytes, uint8_t truth, Entry& entry) {
    using Fate = Entry::Fate;
    ByteReader in(bytes);
    const auto header = seen_->Decode(in);
    if (!header) return ForeseeRefusal(bytes, header.error(), entry);
    entry.xid = header->xid;
    const ConstBytes rest = in.Rest();
    if (header->flags) {
      entry.is_v2 = true;
      entry.version = kRpcRdmaVersion2;
      entry.flags = *header->flags;
      entry.inv_handle = header->inv_handle();
      if (!IsRequest(*header, rest, entry)) return;
    }
    if (header->chunks() == nullptr) return;
    entry.lists = *header->chunks();
    const auto direction = [](ConstBytes message) { return ByteReader(message.subspan(4)).U32(); };
    if (!entry.is_v2) {
      if (header->has_inline_message() && rest.size() >= 8 && direction(rest) != 0) return;
      if (IsBeyondCredits()) return;
    } else if (IsBeyondLimits(entry.lists)) {
      entry.fate = Fate::kErrLimits;
      return;
    }
    const auto call = ValidateCall(*header, rest, config_.data_limits);
    if (!call || (!call->chunks.empty() && config_.reads_max == 0) ||
        (!entry.is_v2 && config_.inline_only && !entry.lists.empty())) {
      entry.fate = Fate::kErrChunk;
      if (!entry.is_v2) return;
      const bool too_much =
          call.error() == ChunkFault::kTooManyReadBytes || call.error() == ChunkFault::kTooManyWriteBytes;
      entry.answer = too_much ? Header::Body(ErrSystem{}) : ErrBadXdr{};
      return;
    }
    if (entry.is_v2 && config_.reverse == ReverseSupport::kInline && entry.lists.reply) Fill(*entry.lists.reply, 0);
    entry.chunks = *call;
    for (const ReadChunk& chunk : call->chunks) {
      Block& data = entry.data.emplace_back(Pattern(chunk.length, header->xid * 31 + chunk.position + truth));
      if (chunk.position != 0 || data.size() < 8) continue;
      ByteWriter head(data);
      head.U32(header->xid + (truth % 8 == 1 ? 1 : 0));
      head.U32(truth % 8 == 2 ? 1 : 0);
    }
    const ConstBytes base = call->has_position_zero() ? ConstBytes(entry.data[0]) : rest;
    std::vector<ChunkData> chunks;
    for (size_t i = 0; i < call->chunks.size(); ++i) {
      if (call->chunks[i].position != 0) chunks.push_back({call->chunks[i].position, entry.data[i]});
    }
    entry.message = Unreduced(base, chunks);
    if (base.size() < 8 || ByteReader(base).U32() != header->xid || (entry.is_v2 && direction(base) > 1)) {
      entry.fate = Fate::kErrChunkWhenPulled;
      if (entry.is_v2) entry.answer = ErrBadXdr{};
    } else {
      entry.fate = direction(base) != 0 ? Fate::kIgnoreWhenPulled : Fate::kServe;
    }
  }

  void ForeseeRefusal(ConstBytes bytes, const HeaderFault& fault, Entry& entry) {
    using Fate = Entry::Fate;
    entry.xid = fault.xid.value_or(0);
    if (fault.action == FaultAction::kDisconnect) bad_properties_ = must_end_ = true;
    if (fault.action == FaultAction::kDrop || fault.action == FaultAction::kDisconnect) return;
    FUZZ_PROPERTY(bytes.size() >= kFixedFieldsSize);
    if (fault.flags && IsBeyondCredits()) return;
    entry.fate = Fate::kErrChunk;
    const TransportVersions& versions = seen_->versions();
    if (fault.action == FaultAction::kAnswerErrVers) {
      entry.fate = Fate::kErrVers;
      entry.answer =
          seen_->settled() ? ErrVers{seen_->version(), seen_->version()} : ErrVers{versions.low, versions.high};
      if (versions.contains(kRpcRdmaVersion2)) entry.version = fault.version;
      entry.is_v2 = entry.version == kRpcRdmaVersion2;
    } else if (fault.action != FaultAction::kAnswerErrChunk) {
      entry.is_v2 = true;
      entry.version = kRpcRdmaVersion2;
      entry.answer = ErrBadXdr{};
      if (fault.action == FaultAction::kAnswerInvalHtype) entry.answer = ErrInvalHtype{};
      // More than this end looks at is well-formed all the same.
      if (fault.kind != HeaderFault::Kind::kChunkList) return;
      ByteReader in(bytes.subspan(kHeaderLayoutV2.prefix_size + kHeaderLayoutV2.lists_prefix_size));
      if (!DecodeChunkLists(in, {UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX}, &entry.lists)) {
        entry.fate = Fate::kErrLimits;
        FUZZ_PROPERTY(IsBeyondLimits(entry.lists));
      }
    }
  }

  // Of version 2: whether it is a call; if not, what becomes of it.
  bool IsRequest(const Header& header, ConstBytes rest, Entry& entry) {
    using Fate = Entry::Fate;
    const auto* properties = std::get_if<ConnProp>(&header.body);
    if (header.is_response()) {
      if (properties != nullptr) seen_->OnPeerProperties(properties->properties);
      return false;
    }
    const auto direction = CheckDirection(header, header.has_inline_message() ? rest : ConstBytes());
    if (direction && direction != DirectionFault::kNoDirection) return false;
    if (properties != nullptr) seen_->OnPeerProperties(properties->properties);
    if (IsBeyondCredits()) return false;
    if (properties != nullptr) {
      if (properties_answered_++ >= kPropertiesAnswersMax) return false;
      entry.fate = Fate::kAnswer;
      entry.answer = ConnProp{seen_->own_set()};
    } else if (const auto* extension = std::get_if<Extension>(&header.body)) {
      entry.fate = Fate::kAnswer;
      entry.answer = ErrInvalHtype{};
      if (!config_.answer_extension || extension->has_message) return false;
      entry.answer = AnswerExtension(*extension);
      const auto* answer = std::get_if<Extension>(&*entry.answer);
      const bool is_theirs = answer != nullptr && answer->type == fuzz::kExtensionType &&
                             kHeaderLayoutV2.prefix_size + answer->body.size() <= SendMax();
      const bool is_error =
          std::holds_alternative<ErrOther>(*entry.answer) || std::holds_alternative<ErrReadChunks>(*entry.answer);
      if (!is_theirs && !is_error) entry.answer = ErrSystem{};
    } else if (direction) {
      entry.fate = Fate::kErrChunk;
      entry.answer = ErrBadXdr{};
    } else {
      return true;
    }
    return false;
  }

  bool IsBeyondCredits() const { return (config_.inline_only || config_.reverse) && engine_.unanswered() >= receives_; }
  ReverseSupport Level() const { return config_.reverse.value_or(ReverseSupport::kGeneral); }
  // Bytes of the longest Send to this peer.
  uint32_t SendMax() const {
    return seen_->is_v2() ? std::min(seen_->send_inline(), send_.view.slot_size) : config_.send_inline;
  }

  // How many segments each Read chunk has, by position.
  static std::map<uint32_t, uint32_t> ReadChunks(const ChunkLists& lists) {
    std::map<uint32_t, uint32_t> chunks;
    for (const ReadSegment& read : lists.reads) ++chunks[read.position];
    return chunks;
  }
  static uint32_t LongestWritten(const ChunkLists& lists) {
    size_t longest = lists.reply ? lists.reply->size() : 0;
    for (size_t i = 0; i < lists.writes.size(); ++i) longest = std::max(longest, lists.writes[i].size());
    return static_cast<uint32_t>(longest);
  }

  // [v2:4.2.2+3] [v2:4.2.2+4] [v2:5.3.3#6] [v2:5.3.3#10] [v2:5.3.3#13] Version 2.
  bool IsBeyondLimits(const ChunkLists& lists) const {
    const ChunkListLimits& limits = seen_->list_limits();
    if (Level() == ReverseSupport::kNone) return true;
    if (Level() == ReverseSupport::kInline && !(lists.reads.empty() && lists.writes.empty())) return true;
    if (!lists.reads.empty() && config_.reads_max == 0) return true;
    return lists.reads.size() > limits.read_segments_max || lists.writes.size() > limits.write_chunks_max ||
           lists.writes.segments().size() > limits.write_segments_max ||
           LongestWritten(lists) > limits.segments_per_chunk_max;
  }

  // What it says of this end is what the call did not keep to, so that one that does is another call.
  void CheckLimitError(const Header::Body& error, const ChunkLists& lists) const {
    const std::map<uint32_t, uint32_t> reads = ReadChunks(lists);
    uint32_t longest = LongestWritten(lists);
    for (const auto& [position, segments] : reads) longest = std::max(longest, segments);
    if (Level() == ReverseSupport::kNone) {
      FUZZ_PROPERTY(error == Header::Body(ErrSystem{}));
    } else if (const auto* read_chunks = std::get_if<ErrReadChunks>(&error)) {
      const bool none = read_chunks->max_chunks == 0 && !reads.empty();
      FUZZ_PROPERTY(none || reads.size() - reads.count(0) > read_chunks->max_chunks);
    } else if (const auto* write_chunks = std::get_if<ErrWriteChunks>(&error)) {
      FUZZ_PROPERTY(write_chunks->max_chunks > 0 && lists.writes.size() > write_chunks->max_chunks);
    } else if (const auto* segments = std::get_if<ErrSegments>(&error)) {
      FUZZ_PROPERTY(segments->max_segments > 0 && longest > segments->max_segments);
    } else {
      FUZZ_PROPERTY(error == Header::Body(ErrReplyResource{0}) && !lists.writes.empty());
      FUZZ_PROPERTY(Level() == ReverseSupport::kInline || seen_->list_limits().write_chunks_max == 0);
    }
  }

  // --- What the device does ---

  void CompleteRead(size_t at) {
    if (reads_.empty()) return;
    const auto [read, content] = TakeOut(reads_, at);
    FUZZ_PROPERTY(memory_.InBlock(read.sink));
    CopyBytes(read.sink, content);
    --entries_.at(read.tag)->reads_in_flight;
    engine_.OnReadDone(read.tag, now_);
  }

  void CompleteSend(size_t at) {
    if (sends_.size() == 0) return;
    at %= sends_.size();
    const auto memory = sent_memory_.begin() + static_cast<ptrdiff_t>(at);
    // The items of a reply are there until its Writes have ended.
    FUZZ_PROPERTY(!memory->second || !memory->first.expired());
    sent_memory_.erase(memory);
    engine_.OnSendDone(sends_.Complete(at), now_);
  }

  void Lose() {
    if (over_) return;
    over_ = true;
    must_end_ = false;
    memory_.regions.clear();
    invalidates_.clear();
    reads_.clear();
    sends_.Lose();
    sent_memory_.clear();
    exposed_.clear();
    if (!config_.shared_receives) posted_.Lose();
    engine_.OnDisconnected(now_);
    closing_.clear();
    if (config_.shared_receives) return;
    for (auto entry = entries_.begin(); entry != entries_.end();) {
      entry = entry->second->request && IsOpen(*entry->second->request) ? std::next(entry) : entries_.erase(entry);
    }
  }
  bool IsOpen(RequestId id) const { return std::find(open_.begin(), open_.end(), id) != open_.end(); }

  // --- What the service does ---

  void Serve(size_t which, uint8_t how, uint8_t size) {
    const RequestId id = open_[which];
    FUZZ_PROPERTY(engine_.open(id));
    Entry& entry = *serving_.at(id);
    CheckRequest(id, entry);
    if (how % 8 == 1 || how % 8 == 2) {
      entry.refused = how % 8 == 1;
      entry.dropped = how % 8 == 2;
      Forget(which);
      if (entry.refused) engine_.Refuse(id, now_);
      if (entry.dropped) engine_.Drop(id, "fuzz", now_);
      FUZZ_PROPERTY(!engine_.open(id));
      return;
    }
    struct Kept {
      std::vector<Block> items;
    };
    auto kept = std::make_shared<Kept>();
    Block base = Pattern(8 + 4 * (size & 0x7f) * ((how & 0x80) != 0 ? 4 : 1), entry.xid + size);
    ByteWriter head(base);
    head.U32(entry.xid);
    head.U32(kReplyWord);
    EligibleItems items;
    uint64_t position = 8;
    for (int n = (how >> 3) & 3; n > 0; --n) {
      const uint8_t length = input_.Byte();
      kept->items.push_back(Pattern(length * ((how & 0x20) != 0 ? 2u : 1u), entry.xid * 3 + length));
      items.push_back({position, {}});
      position += kept->items.back().size() + XdrPad(kept->items.back().size()) + ((how & 0x40) != 0 ? 4 : 0);
    }
    for (size_t i = 0; i < items.size(); ++i) items[i].data = kept->items[i];
    const bool misplaced = how % 8 == 3 && !items.empty();
    if (misplaced) items[0].position = size % 2 == 0 ? 10 : base.size() + 4;
    uint64_t items_before = 0;
    bool well_formed = !misplaced;
    for (const EligibleItem& item : items) {
      if (item.position - items_before > base.size()) well_formed = false;
      items_before += item.data.size() + XdrPad(item.data.size());
    }

    std::vector<std::byte>& buffer = engine_.reply_buffer(id);
    FUZZ_PROPERTY(!memory_.Reachable(buffer));
    if (buffer.size() < base.size()) buffer.resize(base.size());
    CopyBytes(buffer, base);
    const size_t message_size = base.size();
    service_memory_.push_back(kept);
    if (well_formed) {
      entry.answered = true;
      entry.send_max = SendMax();
      entry.reply = std::move(base);
      entry.items = items;
      entry.memory = kept;
      entry.reply_data = kept->items;
      for (size_t i = 0; i < items.size(); ++i) entry.items[i].data = entry.reply_data[i];
    }
    Responder::ReplySpec reply{.message_size = message_size, .items = items, .memory = std::move(kept)};
    if (well_formed) Forget(which);
    const auto completed = engine_.Complete(id, std::move(reply), now_);
    FUZZ_PROPERTY(completed.has_value() == well_formed && engine_.open(id) == !well_formed);
  }

  // The service is done with it; after the connection's end nothing else is.
  void Forget(size_t which) {
    const RequestId id = open_[which];
    open_.erase(open_.begin() + static_cast<ptrdiff_t>(which));
    serving_.erase(id);
  }

  // --- What the engine wants ---

  bool TakeForProgram() override {
    const auto id = engine_.TakeRequest(now_);
    if (id) HandedOut(*id);
    return id.has_value();
  }

  void Drain() override {
    EngineWorld::Drain();
    FUZZ_PROPERTY(!sends_.has_writes());  // a Send follows them
    if (over_ || ending_) return;
    // Whatever gave its Receive back without an answer must not be answered.
    for (const auto& entry : closing_) FUZZ_PROPERTY(!MustAnswer(*entry));
    closing_.clear();
  }

  void Take(const Command& command) override {
    FUZZ_PROPERTY(!over_);
    if (const auto* receive = std::get_if<PostReceive>(&command)) {
      FUZZ_PROPERTY(!config_.shared_receives);
      Closed(receive->slot);
    } else if (const auto* read = std::get_if<PostRead>(&command)) {
      CheckRead(*read);
    } else if (const auto* write = std::get_if<PostWrite>(&command)) {
      const bool pad = write->local_key == fuzz::kArenaKey;
      if (pad) {
        FUZZ_PROPERTY(write->source.size() < 4 && Inside(write->source, send_.view.memory.last(kArenaTail)));
      } else {
        FUZZ_PROPERTY(memory_.Usable(write->source, write->local_key, MemoryUse::kWriteSource));
      }
      sends_.Write(*write);
      writes_.push_back(*write);
    } else if (const auto* send = std::get_if<PostSend>(&command)) {
      FUZZ_PROPERTY(send->length <= send_.view.slot_size && (terms_ || send->length <= config_.send_inline));
      CheckSent(*send, sends_.Post(*send));
      writes_.clear();
    } else if (const auto* invalidate = std::get_if<Invalidate>(&command)) {
      FUZZ_PROPERTY(!invalidate->by_peer && memory_.regions.contains(invalidate->registration));
      TakeInvalidate(*invalidate);
    } else {
      using Why = Disconnect::Why;
      const Why why = std::get<Disconnect>(command).why;
      FUZZ_PROPERTY(why != Why::kCallTimedOut && (why != Why::kAsked || closed_));
      FUZZ_PROPERTY(why != Why::kNoResources || memory_.refused[MemoryUse::kReadSink] > 0);
      FUZZ_PROPERTY(why != Why::kGrantOverrun || may_end_);
      FUZZ_PROPERTY(why != Why::kReplyNotRead || not_read_);
      FUZZ_PROPERTY((why == Why::kBadProperties) == bad_properties_ || why == Why::kAsked);
      must_end_ = false;
      ending_ = true;
    }
  }

  void Returned(uint32_t slot) {
    FUZZ_PROPERTY(config_.shared_receives);
    Closed(slot);
  }

  // The Receive is free: its message is over, or its answer is the next Send.
  void Closed(uint32_t slot) {
    posted_.Post(slot);
    const auto entry = entries_.find(slot);
    if (entry == entries_.end()) return;  // posted at the start
    FUZZ_PROPERTY(entry->second->reads_in_flight == 0 || over_);
    FUZZ_PROPERTY(!entry->second->request || !IsOpen(*entry->second->request));
    closing_.push_back(std::move(entry->second));
    entries_.erase(entry);
  }

  static bool MustAnswer(const Entry& entry) {
    using Fate = Entry::Fate;
    if (entry.fate == Fate::kIgnore || entry.fate == Fate::kIgnoreWhenPulled) return false;
    return !entry.dropped;
  }

  void CheckRead(const PostRead& read) {
    FUZZ_PROPERTY(entries_.contains(read.tag));
    Entry& entry = *entries_.at(read.tag);
    const ReadList& segments = entry.chunks.segments;
    while (entry.next_read < segments.size() && segments[entry.next_read].target.length == 0) ++entry.next_read;
    FUZZ_PROPERTY(entry.next_read < segments.size() && segments[entry.next_read].target == read.source);
    FUZZ_PROPERTY(read.sink.size() == read.source.length && memory_.InBlock(read.sink));
    FUZZ_PROPERTY(memory_.Usable(read.sink, read.local_key, MemoryUse::kReadSink));
    for (const ConstBytes other : entry.sinks) FUZZ_PROPERTY(!fuzz::Overlap(other, read.sink));
    entry.sinks.push_back(read.sink);
    // What the peer has there: the segments of a chunk are cut from it in order.
    size_t segment = 0;
    for (size_t i = 0; i < entry.chunks.chunks.size(); ++i) {
      size_t at = 0;
      for (const ReadSegment& each : entry.chunks.segments_of(entry.chunks.chunks[i])) {
        if (segment++ == entry.next_read) {
          const ConstBytes content = ConstBytes(entry.data[i]).subspan(at, each.target.length);
          reads_.push_back({read, Block(content.begin(), content.end())});
        }
        at += each.target.length;
      }
    }
    ++entry.next_read;
    ++entry.reads_in_flight;
    FUZZ_PROPERTY(reads_.size() <= config_.reads_max);
  }

  void HandedOut(RequestId id) {
    const ReducedStream& stream = engine_.stream(id);
    // A call is where its message is.
    Entry* found = nullptr;
    for (const auto& [slot, entry] : entries_) {
      const bool here =
          Inside(stream.base, receive_.view.slot(slot)) ||
          (!entry->sinks.empty() && entry->chunks.has_position_zero() && entry->sinks[0].data() == stream.base.data());
      if (here) found = entry.get();
    }
    FUZZ_PROPERTY(found != nullptr && found->fate == Entry::Fate::kServe && !found->request);
    FUZZ_PROPERTY(found->reads_in_flight == 0);
    for (size_t i = found->next_read; i < found->chunks.segments.size(); ++i) {
      FUZZ_PROPERTY(found->chunks.segments[i].target.length == 0);
    }
    for (const ConstBytes sink : found->sinks) FUZZ_PROPERTY(!memory_.Reachable(sink));
    for (const RequestId other : open_) FUZZ_PROPERTY(other != id);
    found->request = id;
    open_.push_back(id);
    serving_[id] = found;
    CheckRequest(id, *found);
  }

  void CheckRequest(RequestId id, const Entry& entry) {
    const ReducedStream& stream = engine_.stream(id);
    FUZZ_PROPERTY(engine_.xid(id) == entry.xid && engine_.flags(id) == entry.flags);
    FUZZ_PROPERTY(Same(Unreduced(stream.base, stream.chunks), entry.message));
    for (size_t i = 0; i < entry.lists.writes.size(); ++i) {
      FUZZ_PROPERTY(engine_.result_room(id, i) == TotalLength(entry.lists.writes[i]));
    }
    FUZZ_PROPERTY(!engine_.result_room(id, entry.lists.writes.size()).has_value());
  }

  void CheckSent(const PostSend& send, ConstBytes bytes) {
    FUZZ_PROPERTY(!ending_);
    // Answers leave in the order in which their Receives come back.
    while (!closing_.empty() && !MustAnswer(*closing_.front())) closing_.pop_front();
    FUZZ_PROPERTY(!closing_.empty());
    const std::unique_ptr<Entry> entry = std::move(closing_.front());
    closing_.pop_front();
    ByteReader in(bytes);
    const auto header = entry->is_v2 ? DecodeHeaderV2(in, {}, seen_->extensions()) : DecodeHeaderV1(in);
    FUZZ_PROPERTY(header.has_value() && header->version == entry->version && header->xid == entry->xid);
    FUZZ_PROPERTY(!entry->is_v2 || header->flags == kFlagResponse);
    CheckGrant(*header);
    CheckInvalidate(send, *header, *entry);
    if (entry->fate == Entry::Fate::kErrVers || entry->fate == Entry::Fate::kAnswer) {
      FUZZ_PROPERTY(header->body == *entry->answer && in.Rest().empty() && writes_.empty());
    } else if (entry->fate == Entry::Fate::kErrLimits) {
      FUZZ_PROPERTY(in.Rest().empty() && writes_.empty());
      CheckLimitError(header->body, entry->lists);
    } else if (header->type() == MessageType::kError) {
      FUZZ_PROPERTY(in.Rest().empty() && writes_.empty());
      FUZZ_PROPERTY(header->body == ErrorFor(*entry));
      FUZZ_PROPERTY(entry->fate != Entry::Fate::kServe || entry->refused || entry->answered);
      if (entry->fate == Entry::Fate::kServe && entry->answered && Travels(*entry) != nullptr) {
        // There was no way to write from its memory.
        FUZZ_PROPERTY(refusals_seen_ < memory_.refused[MemoryUse::kWriteSource]);
        ++refusals_seen_;
      }
      if (entry->fate == Entry::Fate::kServe && entry->answered && MustBeExposed(*entry)) {
        FUZZ_PROPERTY(memory_.refused[MemoryUse::kReadByPeer] + memory_.refused[MemoryUse::kWriteSource] > 0);
      }
    } else {
      FUZZ_PROPERTY(entry->fate == Entry::Fate::kServe && entry->answered && !entry->refused);
      FUZZ_PROPERTY(send.length <= entry->send_max && header->inv_handle() == 0);
      if (header->chunks()->reads.empty()) {
        CheckReply(*header, in.Rest(), *entry);
      } else {
        CheckExposed(*header, in.Rest(), *entry);
      }
      FUZZ_PROPERTY(send.prompt || writes_.empty());
    }
    sent_memory_.push_back({entry->memory, !writes_.empty()});
  }

  // [5666bis:4.3#2] and never more than there are Receives for.
  void CheckGrant(const Header& header) {
    FUZZ_PROPERTY(header.credits <= receives_);
    // [v2:5.3.3#2] [v2:10.1+3] After an error of version 2 the latest grant goes on.
    const bool grants = !(header.flags || seen_->is_v2()) || header.type() != MessageType::kError;
    if (!grants) {
      ++answered_;
      allowed_ = std::max<uint64_t>(allowed_, answered_ + granted_);
      return;
    }
    granted_ = std::max(header.credits, 1u);
    // [2004:3.3#3] [5666:11+3] Nothing only while the answer to another call is to come, and no RDMA_DONE.
    FUZZ_PROPERTY(header.credits >= 1 || (config_.profile.zero_grants && !open_.empty() && exposed_.empty()));
    ++answered_;
    allowed_ = std::max<uint64_t>(allowed_, answered_ + granted_);
  }

  // [pvtdata:4.1#2] [v2:3.3+5] [v2:3.3+6]
  void CheckInvalidate(const PostSend& send, const Header& header, const Entry& entry) {
    if (entry.is_v2) {
      const bool asked = config_.can_invalidate && header.chunks() != nullptr && entry.inv_handle != 0;
      FUZZ_PROPERTY(send.invalidate == (asked ? std::optional(entry.inv_handle) : std::nullopt));
      return;
    }
    if (!send.invalidate) return;
    FUZZ_PROPERTY(config_.may_invalidate && header.type() != MessageType::kError);
    const auto is_it = [&](const Segment& segment) { return segment.handle == *send.invalidate && segment.length > 0; };
    const auto writes = entry.lists.writes.segments();
    FUZZ_PROPERTY(std::any_of(entry.lists.reads.begin(), entry.lists.reads.end(),
                              [&](const ReadSegment& read) { return is_it(read.target); }) ||
                  std::any_of(writes.begin(), writes.end(), is_it) ||
                  (entry.lists.reply && std::any_of(entry.lists.reply->begin(), entry.lists.reply->end(), is_it)));
  }

  // What refuses a call, or its reply.
  Header::Body ErrorFor(const Entry& entry) {
    if (entry.answer) return *entry.answer;
    if (!entry.is_v2) return ErrChunk{};
    Header::Body error = ErrSystem{};
    if (entry.fate == Entry::Fate::kServe && entry.answered) Travels(entry, &error);
    return error;
  }

  // How a reply to this call has to travel; null when it cannot, and why, as version 2 says it.
  struct Way {
    ChunkLists lists;
    Block rest;     // inline
    Block reduced;  // the message without what goes by Write chunk
    bool by_reply_chunk = false;
  };
  std::unique_ptr<Way> Travels(const Entry& entry, Header::Body* error = nullptr) {
    auto way = std::make_unique<Way>();
    way->lists = {.writes = entry.lists.writes, .reply = entry.lists.reply};
    const auto cannot = [&](Header::Body why) {
      if (error != nullptr) *error = std::move(why);
      return nullptr;
    };
    for (uint32_t i = 0; i < way->lists.writes.size(); ++i) {
      const size_t length = i < entry.items.size() ? entry.items[i].data.size() : 0;
      if (!Fill(way->lists.writes.mutable_chunk(i), length)) {
        return cannot(ErrWriteResource{i + 1, static_cast<uint32_t>(length)});
      }
    }
    const size_t header_size = (entry.is_v2 ? kHeaderLayoutV2 : kHeaderLayoutV1).SizeWith(EncodedSize(way->lists));
    if (header_size > entry.send_max) return cannot(ErrSystem{});
    way->reduced = WithItems(entry.reply, entry.items, entry.lists.writes.size());
    const bool fits = header_size + way->reduced.size() <= entry.send_max;
    const bool wanted = !fits || config_.reply_chunk_use == ReplyChunkUse::kWheneverOffered;
    if (way->lists.reply && wanted && Fill(*way->lists.reply, way->reduced.size())) {
      way->by_reply_chunk = true;
      return way;
    }
    if (!fits) {
      const bool helps = Level() == ReverseSupport::kGeneral;
      return cannot(ErrReplyResource{helps ? static_cast<uint32_t>(way->reduced.size()) : 0});
    }
    if (way->lists.reply) Fill(*way->lists.reply, 0);
    way->rest = way->reduced;
    return way;
  }
  static bool Fill(std::span<Segment> segments, uint64_t length) {
    if (length > TotalLength(segments)) return false;
    const std::vector<uint32_t> lengths = Spread(segments, length);
    for (size_t i = 0; i < segments.size(); ++i) segments[i].length = lengths[i];
    return true;
  }

  void CheckReply(const Header& header, ConstBytes rest, const Entry& entry) {
    const std::unique_ptr<Way> way = Travels(entry);
    FUZZ_PROPERTY(way != nullptr);
    FUZZ_PROPERTY(header.type() == (way->by_reply_chunk ? MessageType::kNomsg : MessageType::kMsg));
    FUZZ_PROPERTY(*header.chunks() == way->lists && Same(rest, way->rest));
    // The Writes: each goes on where the one before it ended.
    size_t next = 0;
    size_t done = 0;  // of the current segment
    const auto written = [&](std::span<const Segment> segments, ConstBytes data) {
      for (const Segment& segment : segments) {
        while (done < segment.length) {
          FUZZ_PROPERTY(next < writes_.size());
          const PostWrite& write = writes_[next++];
          FUZZ_PROPERTY(write.target.handle == segment.handle && write.target.offset == segment.offset + done);
          FUZZ_PROPERTY(write.target.length > 0 && write.target.length <= segment.length - done);
          FUZZ_PROPERTY(Same(write.source, data.first(write.target.length)));
          data = data.subspan(write.target.length);
          done += write.target.length;
        }
        done = 0;
      }
      FUZZ_PROPERTY(data.empty());
    };
    for (size_t i = 0; i < way->lists.writes.size(); ++i) {
      written(way->lists.writes[i], i < entry.items.size() ? entry.items[i].data : ConstBytes());
    }
    if (way->by_reply_chunk) written(*way->lists.reply, way->reduced);
    FUZZ_PROPERTY(next == writes_.size());
  }

  // Whether a reply that no chunk can carry has to be exposed. Of those that might be, a few need so many segments that
  // this leaves them to the engine.
  bool MustBeExposed(const Entry& entry) {
    if (config_.exposed_max == 0 || Travels(entry) != nullptr) return false;
    uint64_t bytes = entry.reply.size();
    for (const Block& data : entry.reply_data) bytes += data.size();
    const size_t lists = EncodedSize(ChunkLists{.writes = entry.lists.writes, .reply = entry.lists.reply});
    const size_t segments = (bytes / config_.segment_length_max + 2) * (2 * entry.items.size() + 2);
    return bytes <= config_.exposed_bytes_max && segments <= config_.exposed_segments_max &&
           kFixedFieldsSize + lists + segments * kReadEntrySize <= config_.send_inline;
  }

  // What the Writes from `next` on put into these segments, one going on where the one before it ended.
  Block Written(std::span<const Segment> segments, size_t& next) {
    Block bytes;
    for (const Segment& segment : segments) {
      for (uint32_t done = 0; done < segment.length;) {
        FUZZ_PROPERTY(next < writes_.size());
        const PostWrite& write = writes_[next++];
        FUZZ_PROPERTY(write.target.handle == segment.handle && write.target.offset == segment.offset + done);
        FUZZ_PROPERTY(write.target.length > 0 && write.target.length <= segment.length - done);
        fuzz::Append(bytes, write.source);
        done += write.target.length;
      }
    }
    return bytes;
  }

  // The requester puts it together from what it got and what it can read: every item is in one place, whole, and the
  // rest is the message.
  void CheckExposed(const Header& header, ConstBytes rest, const Entry& entry) {
    FUZZ_PROPERTY(config_.exposed_max > 0 && Travels(entry) == nullptr);
    const auto reads = ValidateReply(header, rest, {.writes = entry.lists.writes, .reply = entry.lists.reply},
                                     config_.profile, {.read_bytes_max = config_.exposed_bytes_max});
    FUZZ_PROPERTY(reads.has_value());
    Exposed exposed{.xid = entry.xid, .sent = now_};
    std::map<uint64_t, Block> data;
    for (const ReadSegment& read : reads->segments) {
      const uint32_t id = memory_.Find(read.target, MemoryUse::kReadByPeer);
      FUZZ_PROPERTY(id != 0 && read.target.length == memory_.regions.at(id).memory.size());
      FUZZ_PROPERTY(read.target.length > 0 && read.target.length <= config_.segment_length_max);
      fuzz::Append(data[read.position], memory_.regions.at(id).memory);
      exposed.regions.push_back(id);
      exposed.bytes += read.target.length;
    }
    const ChunkLists& lists = *header.chunks();
    Block base(rest.begin(), rest.end());
    if (data.contains(0)) base = data.extract(0).mapped();
    const bool by_reply_chunk = base.empty();
    size_t next = 0;
    Block expected;
    uint64_t base_done = 0;
    uint64_t items_before = 0;
    for (size_t i = 0; i < entry.items.size(); ++i) {
      const EligibleItem& item = entry.items[i];
      const uint64_t here = item.position - items_before;
      fuzz::Append(expected, ConstBytes(entry.reply).subspan(base_done, here - base_done));
      base_done = here;
      items_before += item.data.size() + XdrPad(item.data.size());
      if (i < lists.writes.size() && TotalLength(lists.writes[i]) > 0) {
        FUZZ_PROPERTY(Same(Written(lists.writes[i], next), item.data));
      } else if (!item.data.empty() && data.contains(item.position)) {
        FUZZ_PROPERTY(Same(data.extract(item.position).mapped(), item.data));
      } else {
        fuzz::AppendPadded(expected, item.data);
      }
    }
    fuzz::Append(expected, ConstBytes(entry.reply).subspan(base_done));
    if (by_reply_chunk) base = Written(*lists.reply, next);
    FUZZ_PROPERTY(data.empty() && next == writes_.size() && Same(base, expected));
    exposed_.push_back(std::move(exposed));
  }

  // --- Properties between operations ---

  void Check() override {
    FUZZ_PROPERTY(engine_.unanswered() <= receive_.view.slots);
    FUZZ_PROPERTY(memory_.used <= receive_.view.slots * kReadBytesMax);
    // [5666:11#5] Bounded, and there for as long as nobody said RDMA_DONE.
    uint64_t bytes = 0;
    for (const Exposed& exposed : exposed_) {
      for (const uint32_t id : exposed.regions) FUZZ_PROPERTY(memory_.regions.contains(id));
      bytes += exposed.bytes;
    }
    FUZZ_PROPERTY(exposed_.size() <= config_.exposed_max && bytes <= config_.exposed_bytes_max);
    if (over_ || ending_) return;
    if (terms_ && !closed_) {
      FUZZ_PROPERTY(terms_->version() == seen_->version() && terms_->settled() == seen_->settled());
      FUZZ_PROPERTY(terms_->peer() == seen_->peer() && terms_->peer_has_spoken() == seen_->peer_has_spoken());
    }
    FUZZ_PROPERTY(exposed_.size() <= engine_.exposed() && engine_.exposed() <= config_.exposed_max);
    // Every Receive is posted or holds a message that is not over.
    FUZZ_PROPERTY(posted_.size() + entries_.size() == receive_.view.slots);
    FUZZ_PROPERTY(engine_.unanswered() == entries_.size());
    FUZZ_PROPERTY(engine_.replies_in_flight() >= sends_.size());
    FUZZ_PROPERTY(engine_.credits_granted() >= 1 && engine_.credits_granted() <= receives_);
  }

  // Everything completes and is served: every call is answered, and nothing stays behind.
  void Settle() {
    memory_.refuse_next = false;
    memory_.bytes_max = UINT64_MAX;
    engine_.OnMemoryFreed(now_);
    Drain();
    for (size_t rounds = 0; rounds < 2000 && !ending_; ++rounds) {
      const bool idle = reads_.empty() && sends_.size() == 0 && invalidates_.empty() && open_.empty();
      if (idle && exposed_.empty()) break;
      if (!exposed_.empty() && !posted_.empty()) {
        PeerSends(fuzz::Encode({.xid = exposed_[0].xid, .credits = 1, .body = RdmaDone{}}, {}));
        Drain();
      }
      // Who calls beyond its grants may leave no Receive for its RDMA_DONE.
      if (idle && posted_.empty()) {
        now_ += kExposedTime;
        Later();
        Drain();
      }
      CompleteRead(0);
      Drain();
      CompleteInvalidate(0);
      Drain();
      CompleteSend(0);
      Drain();
      if (!open_.empty()) Serve(0, 0, 0);
      Drain();
      Check();
    }
    if (ending_) return;
    FUZZ_PROPERTY(entries_.empty() && engine_.unanswered() == 0 && engine_.replies_in_flight() == 0);
    FUZZ_PROPERTY(posted_.size() == receive_.view.slots && !engine_.Waiting());
    FUZZ_PROPERTY(memory_.regions.empty() && memory_.used == 0);
    for (const auto& memory : service_memory_) FUZZ_PROPERTY(memory.expired());
  }

  uint8_t sizes_ = 0;
  uint32_t receives_ = 0;
  std::optional<ConnectionTerms> terms_;  // the engine's, where version 2 may be spoken
  std::optional<ConnectionTerms> seen_;   // what they have to be
  const Responder::Config config_;
  FuzzArena send_;
  FuzzArena receive_;
  std::vector<std::byte*> places_;
  SendQueue sends_;
  ReceiveQueue posted_;

  std::map<uint32_t, std::unique_ptr<Entry>> entries_;  // by Receive
  std::deque<std::unique_ptr<Entry>> closing_;          // their Receives came back, their answers are the next Sends
  std::vector<RequestId> open_;
  std::map<RequestId, Entry*> serving_;
  std::vector<std::pair<PostRead, Block>> reads_;
  std::vector<PostWrite> writes_;                                        // ahead of the next Send
  std::vector<std::pair<std::weak_ptr<const void>, bool>> sent_memory_;  // by Send; whether Writes need it
  std::vector<std::weak_ptr<const void>> service_memory_;
  uint32_t next_handle_ = 0x2000;
  std::vector<Exposed> exposed_;      // in the order of their Sends
  bool bad_properties_ = false;       // malformed ones, which end the connection
  uint32_t properties_answered_ = 0;  // RDMA2_CONNPROP that asked for an answer
  bool not_read_ = false;
  uint32_t refusals_seen_ = 0;
  uint64_t allowed_ = 1;  // calls, from the grants that were seen
  uint64_t answered_ = 0;
  uint32_t granted_ = 1;  // that the requester goes by

  Responder engine_;
};

}  // namespace
}  // namespace stagecoach::rpcrdma

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  stagecoach::testing::FuzzInput input(data, size);
  stagecoach::rpcrdma::World(input).Run();
  return 0;
}
