// The requester against a hostile responder, as a sequence of operations: calls of any shape, cancelled or timed out;
// replies made from what was sent, with anything about them changed, or raw bytes; RDMA Writes to whatever is exposed;
// remote invalidation; completions in any order; the connection's end.
//
// A model beside it knows what is on the wire, and what each call has to end with. The properties: no call beyond the
// grant, none twice; nothing is exposed but what its call says; no outcome while a registration reaches the call's
// memory; what an outcome holds is what the peer wrote and sent; every Receive comes back; nothing grows with what the
// peer sends.
//
// Input: 4 bytes of configuration, then operations of a byte and their arguments.
#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "rpcrdma/core/requester.h"
#include "tests/fuzz/engine_driver.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/messages.h"

namespace stagecoach::rpcrdma {
namespace {

using fuzz::Append;
using fuzz::Block;
using fuzz::EngineWorld;
using fuzz::FuzzArena;
using fuzz::Inside;
using fuzz::Pattern;
using fuzz::ReceiveQueue;
using fuzz::Same;
using fuzz::SendQueue;
using fuzz::Unreduced;
using fuzz::WithItems;
using stagecoach::testing::FuzzInput;
using Kind = CallFailure::Kind;

constexpr size_t kMostCalls = 120;
constexpr uint32_t kReplyWord = 1;
constexpr Duration kFenceTime = 1s;  // beyond its deadline, that a call may wait for its fence
constexpr uint64_t kCookieBase = 0x51000000;

struct Call {
  CallId id = 0;
  uint64_t cookie = 0;
  Block base;  // as submitted
  std::vector<Block> data;
  EligibleItems items;
  std::vector<Block> results;
  const std::byte* buffer = nullptr;  // the engine's until Release
  std::optional<Instant> deadline;

  bool sent = false;
  uint32_t xid = 0;
  ChunkLists offered;
  std::vector<uint32_t> reads;                // registrations behind the Read segments
  std::vector<std::vector<uint32_t>> writes;  // by chunk and segment, the Reply chunk last; 0 for an empty one
  bool on_wire = false;                       // the responder's to answer

  std::optional<Kind> failure;  // what it has to end with, once that is known
  bool answered_well = false;   // its outcome is to be this reply
  Header reply;
  Block reply_inline;
  bool over = false;  // outcome taken
  bool released = false;
};

class World final : public EngineWorld {
 public:
  explicit World(FuzzInput& input)
      : EngineWorld(input),
        config_(Configure(input)),
        send_(1 + (sizes_ & 3), config_.limits.send_inline),
        receive_(1 + ((sizes_ >> 2) & 7), config_.limits.receive_inline + 8),
        sends_(send_.view),
        posted_(receive_.view),
        xids_(0xfffffff8),
        engine_(config_, send_.view, receive_.view, memory_, xids_, nullptr),
        own_max_(std::min(config_.credits, receive_.view.slots)) {
    engine_.Start();
    Drain();
    FUZZ_PROPERTY(posted_.size() == receive_.view.slots);
  }

  void Run() {
    RunOperations();
    FUZZ_PROPERTY(!engine_.DebugString().empty());
    if (!ending_ && !over_ && orderly_) Settle();
    if (!over_) Lose();
    Drain();
    for (const auto& call : calls_) {
      FUZZ_PROPERTY(call->over);
      if (!call->released) engine_.Release(call->id, now_);
      call->released = true;
    }
    FUZZ_PROPERTY(engine_.outstanding() == 0 && engine_.abandoned() == 0 && !engine_.TakeCommand().has_value());
    FUZZ_PROPERTY(!engine_.Deadline().has_value() && !engine_.Waiting() && !engine_.has_outcome());
  }

 private:
  Requester::Config Configure(FuzzInput& input) {
    const uint8_t choices = input.Byte();
    const uint8_t thresholds = input.Byte();
    const uint8_t segments = input.Byte();
    sizes_ = input.Byte();
    orderly_ = (choices & 2) != 0;
    at_once_ = (choices & 4) != 0;
    Requester::Config config{.credits = 1u + (choices >> 4), .inline_only = (choices & 1) != 0};
    config.queued_max = 1 + (sizes_ >> 5);
    config.limits = {.send_inline = 64u << (thresholds & 3),
                     .receive_inline = 64u << ((thresholds >> 2) & 3),
                     .read_segments_max = 1u + (segments & 7),
                     .segments_per_chunk_max = 1u + ((segments >> 3) & 7),
                     .exposed_segments_max = 1u + ((segments >> 6) * 5u),
                     .segment_length_max = (thresholds & 0x10) != 0 ? 1u << 30 : 48};
    return config;
  }

  ConnectionEngine& engine() override { return engine_; }

  void Operate(uint8_t operation) override {
    switch (operation % 16) {
      case 0:
      case 1:
      case 2:
        return Submit();
      case 3:
      case 4:
      case 5:
        return PeerReplies();
      case 6:
        return PeerSends(Raw());
      case 7:
        return CompleteSend();
      case 8:
        return CompleteInvalidate(input_.Byte());
      case 9:
        return PeerWrites();
      case 10:
        return Cancel();
      case 11:
        return Later();
      case 12:
        return ReleaseOne();
      case 13:
        memory_.refuse_next = true;
        return;
      case 14:
        release_at_once_ = !release_at_once_;
        return;
      case 15:
        return End(input_.Byte());
    }
  }

  // --- What a program does ---

  void Submit() {
    const uint8_t choices = input_.Byte();
    const size_t words = input_.Byte();
    if (calls_.size() == kMostCalls) return;
    auto call = std::make_unique<Call>();
    call->cookie = kCookieBase + calls_.size();
    call->base = Pattern((words + 3) * 4, static_cast<uint32_t>(call->cookie));
    ByteWriter head(call->base);
    head.U32(0);
    head.U32(0);
    head.U32(static_cast<uint32_t>(call->cookie));
    uint64_t position = 12;
    for (int n = choices & 3; n > 1; --n) {
      call->data.push_back(Pattern(input_.Byte() * 2, static_cast<uint32_t>(call->cookie + n)));
      call->items.push_back({position, call->data.back()});
      position += call->data.back().size() + XdrPad(call->data.back().size()) + (words > 0 ? 4 : 0);
    }
    for (size_t i = 0; i < call->data.size(); ++i) call->items[i].data = call->data[i];
    Requester::CallSpec spec{.message_size = call->base.size(), .items = call->items};
    for (int n = (choices >> 2) & 3; n > 1; --n) call->results.emplace_back(input_.Byte() * 2);
    for (Block& result : call->results) spec.results.push_back(result);
    spec.reply_base_max = 8 + input_.Byte() * 4u;
    spec.direct_placement = (choices & 0x10) == 0;
    if ((choices & 0x20) != 0) spec.deadline = call->deadline = now_ + std::chrono::milliseconds(1 + input_.Byte());
    // Of XIDs apart from those of the source, as of a call that another connection has carried.
    if ((choices & 0x40) != 0) spec.xid = static_cast<uint32_t>(call->cookie);
    spec.cookie = call->cookie;
    spec.buffer = engine_.TakeBuffer();
    FUZZ_PROPERTY(!memory_.Reachable(spec.buffer));
    if (spec.buffer.size() < call->base.size()) spec.buffer.resize(call->base.size());
    CopyBytes(spec.buffer, call->base);
    call->buffer = spec.buffer.data();

    const size_t queued = Queued();
    const auto id = engine_.Submit(std::move(spec), now_);
    if (!id) {
      FUZZ_PROPERTY((id.error() == SubmitRefusal::kNotConnected) == (ending_ || over_));
      FUZZ_PROPERTY((id.error() == SubmitRefusal::kQueueFull) == (!ending_ && !over_ && queued >= config_.queued_max));
      return;
    }
    FUZZ_PROPERTY(*id != 0 && !ending_ && !over_ && queued < config_.queued_max);
    for (const auto& other : calls_) FUZZ_PROPERTY(other->id != *id);
    call->id = *id;
    calls_.push_back(std::move(call));
    most_records_ = std::max(most_records_, NotReleased());
  }

  void Cancel() {
    const size_t at = input_.Byte();
    if (calls_.empty()) return;
    Call& call = *calls_[at % calls_.size()];
    engine_.Cancel(call.id, now_);
    if (call.over || over_) return;
    // One that is being fenced already keeps its verdict.
    if (call.sent ? call.on_wire : !call.failure) call.failure = Kind::kCancelled;
  }

  void Later() {
    now_ += std::chrono::milliseconds(input_.Byte());
    const bool was_ending = ending_;
    engine_.OnDeadline(now_);
    if (over_) return;
    bool end = false;
    for (const auto& call : calls_) {
      if (!call->deadline || now_ < *call->deadline) continue;
      if (!call->over && now_ >= *call->deadline + kFenceTime) {
        end = end || (call->sent && !call->on_wire);
        may_end_ = may_end_ || (!call->sent && FencingUnsent() > 0);
      }
      if (call->sent && call->on_wire) {
        if (!call->failure) {
          call->failure = Kind::kTimedOut;
          end = end || !config_.inline_only;
        } else if (call->failure == Kind::kCancelled && !config_.inline_only) {
          end = true;
        }
      } else if (!call->sent && !call->over && !call->failure) {
        call->failure = Kind::kNoCredit;
      }
    }
    if (end && !was_ending) must_end_ = true;
  }

  void ReleaseOne() {
    const size_t at = input_.Byte();
    std::vector<Call*> held;
    for (const auto& call : calls_) {
      if (call->over && !call->released) held.push_back(call.get());
    }
    if (held.empty()) return;
    Call& call = *held[at % held.size()];
    CheckViews(call);
    engine_.Release(call.id, now_);
    call.released = true;
    engine_.Release(call.id, now_);  // of an id that is over: nothing
  }

  void End(uint8_t how) {
    if (how % 4 == 0) Lose();
    if (how % 4 == 1 && !over_) {
      engine_.Close(now_);
      closed_ = true;
      if (!ending_) must_end_ = true;
    }
  }

  // --- What the device does ---

  void Lose() {
    if (over_) return;
    over_ = true;
    must_end_ = false;
    for (auto& [id, region] : memory_.regions) written_[id] = std::move(region.written);
    memory_.regions.clear();
    invalidates_.clear();
    sends_.Lose();
    posted_.Lose();
    for (const auto& call : calls_) {
      if (call->over || call->failure || call->answered_well) continue;
      call->failure = closed_ ? Kind::kClosed : Kind::kConnectionLost;
    }
    engine_.OnDisconnected(now_);
  }

  void CompleteSend() {
    const size_t at = input_.Byte();
    if (sends_.size() > 0) engine_.OnSendDone(sends_.Complete(at % sends_.size()), now_);
  }

  void CarryOut(const Invalidate& command) override {
    const auto region = memory_.regions.find(command.registration);
    FUZZ_PROPERTY(region != memory_.regions.end());
    FUZZ_PROPERTY(!command.by_peer || region->second.ended_by_peer);
    if (region->second.use == MemoryUse::kWrittenByPeer) {
      FUZZ_PROPERTY(Same(region->second.memory, region->second.written));
      written_[command.registration] = std::move(region->second.written);
    }
    EngineWorld::CarryOut(command);
  }

  // --- What the responder does ---

  // Any call that was sent, answered or not.
  Call* AnySent() {
    const size_t at = input_.Byte();
    std::vector<Call*> sent;
    for (const auto& call : calls_) {
      if (call->sent) sent.push_back(call.get());
    }
    return sent.empty() ? nullptr : sent[sent.size() - 1 - at % sent.size()];
  }

  Block Raw() {
    const ConstBytes bytes = input_.Bytes(input_.Byte());
    return Block(bytes.begin(), bytes.end());
  }

  void PeerReplies() {
    Call* call = AnySent();
    if (call == nullptr) return;
    const uint8_t choices = input_.Byte();
    const uint8_t amount = input_.Byte();
    const uint8_t credits = input_.Byte();
    Block reply = Reply(*call, choices, amount, credits);
    fuzz::Spoil(reply, input_);
    PeerSends(reply);
  }

  // A reply to this call; with choices of 0 a short one that grants much.
  Block Reply(const Call& call, uint8_t choices, uint8_t amount, uint8_t credits) {
    ChunkLists lists{.writes = call.offered.writes, .reply = call.offered.reply};
    const auto shorten = [&](Segment& segment, size_t n) {
      if ((choices & 3) == 0) segment.length = 0;
      if ((choices & 3) == 1) segment.length = std::min<uint32_t>(segment.length, amount);
      if ((choices & 3) == 2) segment.length = std::min<uint32_t>(segment.length, (amount * (n + 1)) & 0x3f);
    };
    for (size_t i = 0; i < lists.writes.size(); ++i) {
      const auto chunk = lists.writes.mutable_chunk(i);
      for (size_t n = 0; n < chunk.size(); ++n) shorten(chunk[n], n);
    }
    Block message = Pattern(8 + (amount & 0x1c), call.xid + amount);
    ByteWriter head(message);
    head.U32(call.xid);
    head.U32(kReplyWord);
    Header header{.xid = call.xid, .credits = credits};
    const bool long_reply = lists.reply.has_value() && (choices & 4) != 0;
    if (lists.reply) {
      for (size_t n = 0; n < lists.reply->size(); ++n) {
        if (long_reply) shorten((*lists.reply)[n], n);
        if (!long_reply) (*lists.reply)[n].length = 0;
      }
    }
    if ((choices & 8) == 0) Place(call, message);
    switch (choices >> 5) {
      case 1:
        header.body = ErrChunk{};
        message.clear();
        break;
      case 2:
        header.body = ErrVers{.low = 1, .high = amount};
        message.clear();
        break;
      case 3:
        header.body = RdmaMsgp{.align = 1, .thresh = 2, .chunks = std::move(lists)};
        break;
      default:
        header.body = long_reply ? Header::Body(RdmaNomsg{std::move(lists)}) : RdmaMsg{std::move(lists)};
        if (long_reply) message.clear();
        break;
    }
    return fuzz::Encode(header, message);
  }

  // RDMA Writes ahead of a reply: something into each result, and `message` into the Reply chunk.
  void Place(const Call& call, ConstBytes message) {
    for (size_t i = 0; i < call.writes.size(); ++i) {
      const bool reply = call.offered.reply.has_value() && i + 1 == call.writes.size();
      for (const uint32_t id : call.writes[i]) {
        if (!Writable(id)) continue;
        const size_t size = memory_.regions.at(id).memory.size();
        memory_.PeerWrites(id, 0, reply ? message.first(std::min(size, message.size())) : Pattern(size, call.xid + id));
        if (reply) message = message.subspan(std::min(size, message.size()));
      }
    }
  }
  bool Writable(uint32_t id) const {
    const auto region = memory_.regions.find(id);
    return region != memory_.regions.end() && region->second.use == MemoryUse::kWrittenByPeer &&
           !region->second.ended_by_peer;
  }
  void PeerWrites() {
    const size_t at = input_.Byte();
    const uint8_t offset = input_.Byte();
    const ConstBytes bytes = input_.Bytes(input_.Byte() & 15);
    std::vector<uint32_t> writable;
    for (const auto& [id, region] : memory_.regions) {
      if (Writable(id)) writable.push_back(id);
    }
    if (!writable.empty()) memory_.PeerWrites(writable[at % writable.size()], offset, bytes);
  }

  // One Send of the peer's; without a Receive for it, or too long for it, the transport would end the connection.
  void PeerSends(const Block& bytes) {
    const uint8_t with_invalidate = input_.Byte();
    if (over_ || posted_.empty()) return;
    std::optional<uint32_t> invalidated;
    if ((with_invalidate & 1) != 0 && !memory_.regions.empty()) {
      auto region = memory_.regions.begin();
      std::advance(region, (with_invalidate >> 1) % memory_.regions.size());
      if (!region->second.ended_by_peer) {
        region->second.ended_by_peer = true;
        invalidated = region->second.handle;
      }
    }
    const ReceiveQueue::Received received = posted_.Receive(bytes);
    Foresee(received.bytes);
    engine_.OnReceive(received.slot, static_cast<uint32_t>(received.bytes.size()), invalidated, now_);
  }

  // What this message means, by the document: which call it answers, and how that ends.
  void Foresee(ConstBytes bytes) {
    ByteReader in(bytes);
    const auto header = DecodeHeaderV1(in);
    std::optional<uint32_t> xid;
    if (header) {
      const bool is_call =
          header->has_inline_message() && in.Rest().size() >= 8 && ByteReader(in.Rest().subspan(4)).U32() == 0;
      if (header->type() != MessageType::kDone && !is_call) xid = header->xid;
    } else if (header.error().kind != HeaderFault::Kind::kTooShort) {
      xid = header.error().xid;
    }
    if (!xid) return;
    for (const auto& call : calls_) {
      if (!call->on_wire || call->xid != *xid) continue;
      call->on_wire = false;
      if (header) granted_ = std::clamp(header->credits, 1u, own_max_);
      if (call->failure) return;
      if (!header) {
        call->failure = Kind::kBadHeader;
      } else if (std::holds_alternative<ErrVers>(header->body)) {
        call->failure = Kind::kErrVers;
      } else if (std::holds_alternative<ErrChunk>(header->body)) {
        call->failure = Kind::kErrChunk;
      } else if (!ValidateReply(*header, in.Rest(), call->offered)) {
        call->failure = Kind::kBadChunks;
      } else {
        call->answered_well = true;
        call->reply = *header;
        call->reply_inline.assign(in.Rest().begin(), in.Rest().end());
      }
      return;
    }
  }

  // --- What the engine wants ---

  bool TakeForProgram() override {
    const auto outcome = engine_.TakeOutcome(now_);
    if (outcome) CheckOutcome(*outcome);
    return outcome.has_value();
  }

  void Take(const Command& command) override {
    FUZZ_PROPERTY(!over_);
    if (const auto* receive = std::get_if<PostReceive>(&command)) {
      posted_.Post(receive->slot);
    } else if (const auto* send = std::get_if<PostSend>(&command)) {
      FUZZ_PROPERTY(!send->invalidate.has_value() && send->length <= config_.limits.send_inline);
      CheckSent(sends_.Post(*send));
    } else if (const auto* invalidate = std::get_if<Invalidate>(&command)) {
      TakeInvalidate(*invalidate);
    } else if (const auto* disconnect = std::get_if<Disconnect>(&command)) {
      FUZZ_PROPERTY(must_end_ || may_end_);
      FUZZ_PROPERTY(disconnect->why == (closed_ ? Disconnect::Why::kAsked : Disconnect::Why::kCallTimedOut));
      must_end_ = false;
      ending_ = true;
    } else {
      FUZZ_PROPERTY(false);  // a requester reads and writes nothing
    }
  }

  void CheckSent(ConstBytes bytes) {
    ByteReader in(bytes);
    const auto header = DecodeHeaderV1(in);
    FUZZ_PROPERTY(header.has_value() && header->version == kRpcRdmaVersion1);
    FUZZ_PROPERTY(header->type() == MessageType::kMsg || header->type() == MessageType::kNomsg);
    FUZZ_PROPERTY(header->credits >= 1 && header->credits <= own_max_);
    const ChunkLists& lists = *header->chunks();
    FUZZ_PROPERTY(lists.empty() || !config_.inline_only);
    FUZZ_PROPERTY(std::is_sorted(lists.reads.begin(), lists.reads.end(),
                                 [](const auto& a, const auto& b) { return a.position < b.position; }));
    const Block message = AsReceived(*header, in.Rest());
    ByteReader words(message);
    const uint32_t xid = words.U32();
    words.U32();
    const uint32_t number = words.U32() - static_cast<uint32_t>(kCookieBase);
    FUZZ_PROPERTY(xid == header->xid && number < calls_.size());
    Call& call = *calls_[number];
    FUZZ_PROPERTY(!call.sent && !call.over && !call.failure);
    for (const auto& other : calls_) FUZZ_PROPERTY(!other->on_wire || other->xid != xid);
    Block expected = WithItems(call.base, call.items, 0);
    ByteWriter(MutableBytes(expected)).U32(xid);
    FUZZ_PROPERTY(Same(message, expected));

    call.sent = call.on_wire = true;
    call.xid = xid;
    call.offered = lists;
    for (const ReadSegment& read : lists.reads) {
      if (read.target.length > 0) call.reads.push_back(memory_.Find(read.target, MemoryUse::kReadByPeer));
    }
    for (size_t i = 0; i < lists.writes.size(); ++i) {
      FUZZ_PROPERTY(i < call.results.size());
      ClaimWritten(call, lists.writes[i], &call.results[i]);
    }
    if (lists.reply) ClaimWritten(call, *lists.reply, nullptr);
    // [5666bis:4.3#4] [5666bis:5.1.3#1] and a Receive for every reply that is to come.
    FUZZ_PROPERTY(OnWire() <= granted_ && OnWire() <= posted_.size());
  }

  // The message as the responder puts it together, from registered memory alone.
  Block AsReceived(const Header& header, ConstBytes rest) {
    const auto received = ValidateCall(header, rest);
    FUZZ_PROPERTY(received.has_value());
    std::vector<Block> data;
    for (const ReadChunk& chunk : received->chunks) {
      Block& bytes = data.emplace_back();
      for (const ReadSegment& read : received->segments_of(chunk)) {
        const uint32_t id = memory_.Find(read.target, MemoryUse::kReadByPeer);
        FUZZ_PROPERTY(id != 0 && read.target.length == memory_.regions.at(id).memory.size());
        FUZZ_PROPERTY(read.target.length <= config_.limits.segment_length_max);
        Append(bytes, memory_.regions.at(id).memory);
      }
    }
    const std::vector<ConstBytes> views(data.begin(), data.end());
    const ReducedStream stream = AssembleCall(*received, rest, views);
    return Unreduced(stream.base, stream.chunks);
  }

  // What is offered for writing belongs to this call: result memory from its start on, or memory for the reply.
  void ClaimWritten(Call& call, std::span<const Segment> segments, Block* result) {
    std::vector<uint32_t>& ids = call.writes.emplace_back();
    size_t done = 0;
    for (const Segment& segment : segments) {
      if (segment.length == 0) {
        ids.push_back(0);
        continue;
      }
      const uint32_t id = memory_.Find(segment, MemoryUse::kWrittenByPeer);
      FUZZ_PROPERTY(id != 0 && segment.length == memory_.regions.at(id).memory.size());
      if (result != nullptr) {
        FUZZ_PROPERTY(segment.length <= result->size() - done);
        FUZZ_PROPERTY(memory_.regions.at(id).memory.data() == result->data() + done);
        done += segment.length;
      }
      ids.push_back(id);
    }
  }

  // Fenced: nothing that the call exposed is registered any more.
  void CheckFenced(const Call& call) {
    FUZZ_PROPERTY(!memory_.Reachable({call.buffer, call.base.size()}));
    for (const Block& data : call.data) FUZZ_PROPERTY(!memory_.Reachable(data));
    for (const Block& result : call.results) FUZZ_PROPERTY(!memory_.Reachable(result));
    for (const uint32_t id : call.reads) FUZZ_PROPERTY(!memory_.regions.contains(id));
    for (const auto& chunk : call.writes) {
      for (const uint32_t id : chunk) FUZZ_PROPERTY(!memory_.regions.contains(id));
    }
  }

  void CheckOutcome(const CallOutcome& outcome) {
    const auto number = static_cast<size_t>(outcome.cookie - kCookieBase);
    FUZZ_PROPERTY(number < calls_.size());
    Call& call = *calls_[number];
    FUZZ_PROPERTY(outcome.call == call.id && !call.over);  // each once
    call.over = true;
    CheckFenced(call);
    if (!outcome.failure) {
      CheckReply(call, outcome);
    } else if (call.answered_well) {
      // A Reply chunk that holds something else is seen when it is looked at.
      FUZZ_PROPERTY(outcome.failure->kind == Kind::kBadChunks && outcome.failure->chunk == ChunkFault::kXidMismatch);
      FUZZ_PROPERTY(call.reply.type() == MessageType::kNomsg && outcome.failure->sent);
      call.answered_well = false;
    } else if (outcome.failure->kind == Kind::kMemory) {
      FUZZ_PROPERTY(!call.sent && refusals_seen_ < Refusals());
      ++refusals_seen_;
    } else {
      FUZZ_PROPERTY(call.failure.has_value() && outcome.failure->kind == *call.failure);
      FUZZ_PROPERTY(outcome.failure->sent == call.sent);
    }
    if (outcome.failure) {
      FUZZ_PROPERTY(ToString(outcome.failure->kind) != nullptr && outcome.placed.empty());
      call.failure = outcome.failure->kind;
    }
    if (release_at_once_) {
      engine_.Release(call.id, now_);
      call.released = true;
    }
  }
  uint32_t Refusals() const {
    uint32_t sum = 0;
    for (const auto& [use, count] : memory_.refused) sum += count;
    return sum;
  }

  void CheckReply(Call& call, const CallOutcome& outcome) {
    FUZZ_PROPERTY(call.answered_well && call.sent);
    const ChunkLists& returned = *call.reply.chunks();
    const auto written = [&](size_t chunk, std::span<const Segment> segments) {
      Block bytes;
      for (size_t s = 0; s < segments.size(); ++s) {
        if (segments[s].length == 0) continue;
        Append(bytes, ConstBytes(written_.at(call.writes[chunk][s])).first(segments[s].length));
      }
      return bytes;
    };
    FUZZ_PROPERTY(outcome.placed.size() == returned.writes.size());
    FUZZ_PROPERTY(outcome.reply.chunks.size() == returned.writes.size());
    for (size_t i = 0; i < returned.writes.size(); ++i) {
      const ConstBytes data = outcome.reply.chunks[i].data;
      FUZZ_PROPERTY(outcome.placed[i] == TotalLength(returned.writes[i]) && data.size() == outcome.placed[i]);
      FUZZ_PROPERTY(Inside(data, call.results[i]));
      FUZZ_PROPERTY(Same(data, written(i, returned.writes[i])));
    }
    if (call.reply.type() == MessageType::kNomsg) {
      FUZZ_PROPERTY(outcome.reply_memory != nullptr);
      FUZZ_PROPERTY(Same(outcome.reply.base, written(call.writes.size() - 1, *returned.reply)));
      FUZZ_PROPERTY(!memory_.Reachable(outcome.reply.base));
    } else {
      views_[call.id] = outcome.reply.base;
    }
    FUZZ_PROPERTY(outcome.reply.base.size() >= 4 && ByteReader(outcome.reply.base).U32() == call.xid);
    CheckViews(call);
  }

  // The inline reply stays what it was until Release.
  void CheckViews(const Call& call) {
    const auto view = views_.find(call.id);
    if (view != views_.end() && !call.released) FUZZ_PROPERTY(Same(view->second, call.reply_inline));
  }

  // --- Properties between operations ---

  size_t OnWire() const {
    return static_cast<size_t>(
        std::count_if(calls_.begin(), calls_.end(), [](const auto& call) { return call->on_wire; }));
  }
  size_t Queued() const {
    return static_cast<size_t>(std::count_if(calls_.begin(), calls_.end(),
                                             [](const auto& call) { return !call->sent && !call->over; })) -
           FencingUnsent();
  }
  // Calls whose memory was refused, until they are fenced.
  size_t FencingUnsent() const { return Refusals() - refusals_seen_; }
  size_t NotReleased() const {
    return static_cast<size_t>(
        std::count_if(calls_.begin(), calls_.end(), [](const auto& call) { return !call->released; }));
  }

  void Check() override {
    memory_.CheckExposed();
    size_t held = 0;
    size_t open = 0;
    for (const auto& call : calls_) {
      if (call->answered_well && !call->released) ++held;
      if (call->over && !call->released && call->failure == Kind::kBadChunks &&
          call->reply.type() == MessageType::kNomsg) {
        ++held;
      }
      if (!call->over) ++open;
      CheckViews(*call);
    }
    FUZZ_PROPERTY(engine_.outstanding() == open);
    FUZZ_PROPERTY(engine_.call_records() <= most_records_);
    if (over_) return;
    FUZZ_PROPERTY(engine_.credits().in_flight() == OnWire() && engine_.credits().granted() == granted_);
    FUZZ_PROPERTY(engine_.abandoned() <= OnWire());
    for (const auto& call : calls_) {
      if (call->on_wire) FUZZ_PROPERTY(engine_.Knows(call->xid));
    }
    if (ending_) return;
    // Every Receive is posted or holds a reply that somebody reads.
    FUZZ_PROPERTY(engine_.posted_receives() == posted_.size());
    FUZZ_PROPERTY(posted_.size() + held == receive_.view.slots);
    // Nobody waits for what is there.
    const bool may_send = OnWire() < granted_ && OnWire() < posted_.size() && sends_.size() < send_.view.slots;
    FUZZ_PROPERTY(!may_send || Queued() == 0);
    for (const auto& call : calls_) {
      const bool waits = call->sent ? call->on_wire && !call->failure : !call->over && !call->failure;
      if (waits && call->deadline && FencingUnsent() == 0) {
        FUZZ_PROPERTY(engine_.Deadline().has_value() && *engine_.Deadline() <= *call->deadline);
      }
    }
  }

  // Everything completes, everything is answered: nothing stays behind.
  void Settle() {
    memory_.refuse_next = false;
    release_at_once_ = true;
    for (size_t rounds = 0; rounds < 4 * kMostCalls; ++rounds) {
      while (sends_.size() > 0) engine_.OnSendDone(sends_.Complete(0), now_);
      while (!invalidates_.empty()) CompleteInvalidate(invalidates_.size() - 1);
      for (const auto& call : calls_) {
        if (call->over && !call->released) engine_.Release(call->id, now_);
        call->released = call->released || call->over;
      }
      Drain();
      const auto waiting = std::find_if(calls_.begin(), calls_.end(), [](const auto& call) { return call->on_wire; });
      if (waiting != calls_.end()) PeerSends(Reply(**waiting, 0, 0, 4));
      Drain();
      Check();
      if (engine_.outstanding() == 0 && OnWire() == 0) break;
    }
    FUZZ_PROPERTY(engine_.outstanding() == 0 && engine_.abandoned() == 0 && OnWire() == 0);
    FUZZ_PROPERTY(posted_.size() == receive_.view.slots && memory_.regions.empty());
    FUZZ_PROPERTY(engine_.room() == granted_);
  }

  bool release_at_once_ = true;
  uint8_t sizes_ = 0;
  const Requester::Config config_;
  FuzzArena send_;
  FuzzArena receive_;
  SendQueue sends_;
  ReceiveQueue posted_;
  SequentialXids xids_;

  std::vector<std::unique_ptr<Call>> calls_;  // by cookie
  std::map<uint32_t, Block> written_;         // by registrations undone, what the peer left there
  std::map<CallId, ConstBytes> views_;        // of inline replies
  uint32_t granted_ = 1;
  uint32_t refusals_seen_ = 0;
  size_t most_records_ = 0;

  Requester engine_;
  const uint32_t own_max_;
};

}  // namespace
}  // namespace stagecoach::rpcrdma

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  stagecoach::testing::FuzzInput input(data, size);
  stagecoach::rpcrdma::World(input).Run();
  return 0;
}
