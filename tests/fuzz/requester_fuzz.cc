// The requester against a hostile responder, as a sequence of operations: calls of any shape, cancelled or timed out;
// replies made from what was sent, with anything about them changed, or raw bytes; RDMA Writes to whatever is exposed;
// remote invalidation; completions in any order; the connection's end. In some worlds replies may be left in memory of
// the responder's, to be read. In others the ends speak version 2, or find out whether they do: its errors, properties
// of either end at any time, messages of an extension, calls of the reverse direction.
//
// A model beside it knows what is on the wire, and what each call has to end with. The properties: no call beyond the
// grant, none twice; nothing is exposed but what its call says; no outcome while a registration reaches the call's
// memory; what an outcome holds is what the peer wrote, sent, or had read from it; no more Reads than the peer allows,
// each of a segment of its reply and none twice, and no more memory for them than there may be; RDMA_DONE once for each
// reply that has something to read, when nothing of it is read any more; every Receive comes back; nothing grows with
// what the peer sends. Of version 2: a call is sent again for an error that says how it could be served, with its XID
// and its message, so that it can be, so often as may be and when nothing of the last attempt is exposed; no call asks
// for what the responder has said it does not take; no Send is longer than it said that it takes.
//
// Input: 4 bytes of configuration, 2 more where the second says version 2, then operations of a byte and their
// arguments.
#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "rpcrdma/core/requester.h"
#include "rpcrdma/xdr/xdr_reader.h"
#include "tests/fuzz/engine_driver.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/messages.h"

namespace stagecoach::rpcrdma {
namespace {

using fuzz::AnyProperties;
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
constexpr uint32_t kPropertiesXid = 0;

struct KindOfBody {
  Kind operator()(const ErrVers&) const { return Kind::kErrVers; }
  Kind operator()(const ErrBadXdr&) const { return Kind::kErrBadXdr; }
  Kind operator()(const ErrInvalHtype&) const { return Kind::kErrInvalHtype; }
  Kind operator()(const ErrReadChunks&) const { return Kind::kErrReadChunks; }
  Kind operator()(const ErrWriteChunks&) const { return Kind::kErrWriteChunks; }
  Kind operator()(const ErrSegments&) const { return Kind::kErrSegments; }
  Kind operator()(const ErrWriteResource&) const { return Kind::kErrWriteResource; }
  Kind operator()(const ErrReplyResource&) const { return Kind::kErrReplyResource; }
  Kind operator()(const ErrSystem&) const { return Kind::kErrSystem; }
  Kind operator()(const auto&) const { return Kind::kErrOther; }
};
Kind KindOf(const Header::Body& error) {
  return std::visit(KindOfBody{}, error);
}

bool HasPositionZero(const ChunkLists& lists) {
  return std::any_of(lists.reads.begin(), lists.reads.end(),
                     [](const ReadSegment& read) { return read.position == 0; });
}
bool HasEligibleReads(const ChunkLists& lists) {
  return std::any_of(lists.reads.begin(), lists.reads.end(), [](const auto& read) { return read.position != 0; });
}

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
  std::vector<MutableBytes> result_memory;    // by chunk: what was offered for it
  std::vector<uint64_t> beyond;               // by chunk: how much longer than that it was returned, in a reply taken
  bool on_wire = false;                       // the responder's to answer

  std::optional<Kind> failure;  // what it has to end with, once that is known
  bool answered_well = false;   // its outcome is to be this reply
  bool holds_receive = false;   // until it is released
  Header reply;
  Block reply_inline;
  // What is to be read for it.
  bool pulling = false;
  CallChunks chunks;
  std::vector<Block> read_data;  // by chunk
  Block to_read;                 // all of it
  std::optional<uint32_t> tag;   // of its Reads, and the registration that they write to, from the first one on
  uint32_t sink = 0;
  size_t next_segment = 0;
  size_t next_byte = 0;
  uint32_t reads_in_flight = 0;
  // Of version 2.
  uint32_t flags = 0;
  std::optional<Extension> extension;  // instead of a call
  std::optional<Extension> answer;     // to that
  std::optional<Header::Body> error;   // the latest
  uint32_t answered_in = 0;
  uint64_t known = 0;      // of what the peer takes, when it was submitted
  bool resending = false;  // from an error on until it is sent again
  uint32_t resends = 0;
  // What it has to be like by now.
  bool without_read_chunks = false;
  bool without_write_chunks = false;
  std::map<size_t, uint64_t> grown_to;  // by result: bytes that its Write chunk has to have
  uint64_t reply_needed = 0;            // bytes that its Reply chunk has to have
  bool over = false;                    // outcome taken
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
    const bool version_2 = (thresholds & 0x20) == 0 && (thresholds & 0xc0) != 0;
    Requester::Config config{.credits = 1u + (choices >> 4), .inline_only = (choices & 1) != 0};
    config.lengths_may_be_wrong = (choices & 8) != 0;
    config.queued_max = 1 + (sizes_ >> 5);
    config.limits = {.send_inline = 64u << (thresholds & 3),
                     .receive_inline = 64u << ((thresholds >> 2) & 3),
                     .read_segments_max = 1u + (segments & 7),
                     .segments_per_chunk_max = 1u + ((segments >> 3) & 7),
                     .exposed_segments_max = 1u + ((segments >> 6) * 5u),
                     .segment_length_max = (thresholds & 0x10) != 0 ? 1u << 30 : 48};
    if ((thresholds & 0x20) != 0 && !config.inline_only) {
      config.profile.replies_by_read_chunk = true;
      config.reads_max = (thresholds >> 6) & 3u;
      config.read_bytes_max = 300u * (1 + (choices >> 4));
    }
    if (version_2) {
      ConfigureVersion2(input, thresholds >> 6, config);
    } else {
      seen_.emplace(ConnectionTerms::Config{.profile = config.profile});
    }
    return config;
  }

  // 1: spoken from the start. 2: by a client that is to find out. 3: by a server, in the reverse direction.
  void ConfigureVersion2(FuzzInput& input, int kind, Requester::Config& config) {
    static constexpr std::array<uint64_t, 4> kGrown = {1 << 20, 4096, 300, 0};
    const uint8_t choices = input.Byte();
    const uint8_t terms = input.Byte();
    config.grown_bytes_max = kGrown[choices & 3];
    config.resends_max = 3u - ((choices >> 2) & 3u);
    config.resend_executed = (choices & 0x10) == 0;
    memory_.windows = (choices & 0x20) != 0;
    if ((choices & 0x40) != 0) config.limits.send_inline = 2400;
    if ((choices & 0x80) != 0) config.limits.receive_inline = 5000;
    config.reverse = kind == 3;
    ConnectionTerms::Config both{.end = config.reverse ? ConnectionTerms::End::kServer : ConnectionTerms::End::kClient,
                                 .versions = {(terms & 1) != 0 ? kRpcRdmaVersion2 : kRpcRdmaVersion1, kRpcRdmaVersion2},
                                 .own = {.receive_buffer_size = (terms & 2) != 0 ? 8192u : 4096u},
                                 .send_max = (terms & 4) != 0 ? 8192u : 4096u};
    if ((terms & 8) != 0) {
      both.extensions = fuzz::KnownExtensions();
      both.more.push_back({fuzz::kExtensionProperty, fuzz::Word(terms)});
    }
    for (auto* each : {&terms_, &seen_}) {
      each->emplace(both);
      if (kind != 2) (*each)->SetVersion(kRpcRdmaVersion2);
    }
    config.terms = &*terms_;
  }

  ConnectionEngine& engine() override { return engine_; }

  void Operate(uint8_t operation) override {
    switch (operation % 16) {
      case 0:
      case 1:
        return Submit();
      case 2:
        if (terms_) return Version2(input_.Byte());
        return reads_.empty() ? Submit() : CompleteRead(input_.Byte());
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

  void Version2(uint8_t operation) {
    switch (operation % 4) {
      case 0:
        return SubmitExtension();
      case 1:
        return SendProperties();
      case 2: {
        const uint8_t choices = input_.Byte();
        if ((choices & 0x20) != 0) return PeerAnnounces(AnyProperties(input_));
        Block message = fuzz::Encode({.xid = (choices & 8) != 0 ? choices : kPropertiesXid,
                                      .version = kRpcRdmaVersion2,
                                      .credits = choices & 7u,
                                      .flags = (choices & 0x10) != 0 ? 0 : kFlagResponse,
                                      .body = AnyProperties(input_)},
                                     {});
        fuzz::Spoil(message, input_);
        return PeerSends(message);
      }
      case 3: {
        Block message = fuzz::Encode({.xid = kPropertiesXid,
                                      .version = kRpcRdmaVersion2,
                                      .credits = 9,
                                      .flags = kFlagResponse,
                                      .body = AnyError()},
                                     {});
        fuzz::Spoil(message, input_);
        return PeerSends(message);
      }
    }
  }

  // --- What a program does ---

  void Submit() {
    const uint8_t choices = input_.Byte();
    const size_t words = input_.Byte();
    if (calls_.size() == kMostCalls || MustWaitForProbe()) return;
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
    if ((choices & 0x80) != 0) {
      spec.flags = UINT32_MAX;
      call->flags = seen_->extensions().flags();
    }
    call->known = known_;
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
      FUZZ_PROPERTY(id.error() != SubmitRefusal::kNotSpoken);
      FUZZ_PROPERTY(id.error() != SubmitRefusal::kNotServed || NotServed());
      return;
    }
    FUZZ_PROPERTY(!NotServed());
    FUZZ_PROPERTY(*id != 0 && !ending_ && !over_ && queued < config_.queued_max);
    for (const auto& other : calls_) FUZZ_PROPERTY(other->id != *id);
    call->id = *id;
    calls_.push_back(std::move(call));
    most_records_ = std::max(most_records_, NotReleased());
  }

  // Calls of the reverse direction, to a client that has said that it takes none.
  bool NotServed() const {
    return seen_->is_v2() && config_.reverse && seen_->peer().reverse_requests == ReverseSupport::kNone;
  }
  // Of a client that is to find out which version is spoken: one call at a time.
  bool MustWaitForProbe() const {
    return seen_->probing() && std::any_of(calls_.begin(), calls_.end(), [](const auto& call) { return !call->over; });
  }

  void SubmitExtension() {
    const uint8_t choices = input_.Byte();
    const uint8_t size = input_.Byte();
    if (calls_.size() == kMostCalls || MustWaitForProbe()) return;
    auto call = std::make_unique<Call>();
    call->cookie = kCookieBase + calls_.size();
    call->extension = Extension{.type = fuzz::kExtensionType + (choices & 3), .body = ExtensionBody(*call, size)};
    if ((choices & 4) != 0) call->flags = seen_->extensions().flags();
    if ((choices & 8) != 0) call->deadline = now_ + std::chrono::milliseconds(1 + input_.Byte());
    const size_t queued = Queued();
    const auto id = engine_.SubmitExtension({.type = call->extension->type,
                                             .body = call->extension->body,
                                             .flags = (choices & 4) != 0 ? UINT32_MAX : 0,
                                             .deadline = call->deadline,
                                             .cookie = call->cookie},
                                            now_);
    const bool spoken = seen_->is_v2() && !seen_->probing() && (choices & 3) == 0 && seen_->extensions().flags() != 0;
    const bool fits = kHeaderLayoutV2.prefix_size + call->extension->body.size() <= SendMax();
    FUZZ_PROPERTY(id.has_value() == (!ending_ && !over_ && queued < config_.queued_max && spoken && fits));
    if (!id) return;
    call->id = *id;
    call->known = known_;
    calls_.push_back(std::move(call));
    most_records_ = std::max(most_records_, NotReleased());
  }
  // How long it is, whose it is, and whatever.
  static Block ExtensionBody(const Call& call, uint8_t size) {
    Block body = Pattern(8 + 2 * size_t{size}, size);
    ByteWriter head(body);
    head.U32(static_cast<uint32_t>(body.size()));
    head.U32(static_cast<uint32_t>(call.cookie));
    return body;
  }

  void SendProperties() {
    const Instant until = now_ + std::chrono::milliseconds(input_.Byte());
    if (ending_ || over_ || exchange_ != Exchange::kNone || !seen_->is_v2() || !seen_->settled()) return;
    exchange_ = Exchange::kWaiting;
    exchange_until_ = until;
    engine_.SendProperties(until, now_);
  }
  // The owner has given the peer's properties to the responder beside this engine.
  void PeerAnnounces(const ConnProp& said) {
    if (over_ || !ReadProperties(said.properties, seen_->extensions())) return;
    if (seen_->OnPeerProperties(said.properties)) ++known_;
    terms_->OnPeerProperties(said.properties);
    EndExchangeIfTold();
    engine_.OnPeerProperties(now_);
  }
  void EndExchangeIfTold() {
    if (exchange_ != Exchange::kSent || !seen_->peer_has_spoken()) return;
    GiveExchangeUp(ExchangeEnd::kAnnounced);
  }
  // It may be answered all the same.
  void GiveExchangeUp(ExchangeEnd end) {
    const bool sent = exchange_ == Exchange::kSent;
    EndExchange(end);
    if (sent) exchange_ = Exchange::kGivenUp;
  }
  bool exchanging() const { return exchange_ == Exchange::kWaiting || exchange_ == Exchange::kSent; }
  void EndExchange(ExchangeEnd end) {
    exchange_ = Exchange::kOver;
    exchange_end_ = end;
  }

  void Cancel() {
    const size_t at = input_.Byte();
    if (calls_.empty()) return;
    Call& call = *calls_[at % calls_.size()];
    engine_.Cancel(call.id, now_);
    if (call.over || over_) return;
    // One that is being fenced already keeps its verdict.
    if (call.resending && !call.failure) call.failure = Kind::kCancelled;
    if (call.sent ? call.on_wire : !call.failure) call.failure = Kind::kCancelled;
    GiveUp(call);
    if (!call.pulling || call.failure) return;
    call.failure = Kind::kCancelled;
    call.answered_well = false;
    if (call.reads_in_flight == 0) EndPull(call);
  }

  void Later() {
    now_ += std::chrono::milliseconds(input_.Byte());
    const bool was_ending = ending_;
    engine_.OnDeadline(now_);
    if (over_) return;
    if (exchanging() && now_ >= exchange_until_) GiveExchangeUp(ExchangeEnd::kUnanswered);
    bool end = false;
    for (const auto& call : calls_) {
      if (!call->deadline || now_ < *call->deadline) continue;
      if (!call->over && now_ >= *call->deadline + kFenceTime) {
        end = end || (call->sent && !call->on_wire && !IsQueuedAgain(*call));
        may_end_ = may_end_ || ((!call->sent || call->resending) && FencingUnsent() > 0);
      }
      if (call->sent && call->on_wire) {
        if (!call->failure) {
          call->failure = Kind::kTimedOut;
          end = end || !MayTimeOut(*call);
          GiveUp(*call);
        } else if (call->failure == Kind::kCancelled && !MayTimeOut(*call)) {
          end = true;
        }
      } else if (call->resending && !call->over && !call->failure) {
        call->failure = Kind::kTimedOut;
      } else if (!call->sent && !call->over && !call->failure) {
        call->failure = Kind::kNoCredit;
      } else if (call->pulling && !call->failure) {
        call->failure = Kind::kTimedOut;
        call->answered_well = false;
        end = true;
      }
    }
    if (end && !was_ending) must_end_ = true;
  }

  // An extension's message is not waited for: an answer that comes after all is one to nobody.
  static void GiveUp(Call& call) {
    if (call.extension) call.on_wire = false;
  }

  // Whether the connection goes on without an answer to it: nothing of it may be within the peer's reach.
  bool MayTimeOut(const Call& call) const {
    return call.extension.has_value() || ((config_.inline_only || config_.reverse) && IdsOf(call).empty());
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
    reads_.clear();
    owed_dones_.clear();
    exchange_ = Exchange::kOver;
    for (const auto& call : calls_) {
      // What is read is no reply yet; what was only waiting for its fence is one.
      const bool good = call->answered_well && !call->pulling;
      call->pulling = false;
      if (call->over || call->failure || good) continue;
      call->answered_well = false;
      call->failure = closed_ ? Kind::kClosed : Kind::kConnectionLost;
    }
    engine_.OnDisconnected(now_);
  }

  void CompleteSend() {
    const size_t at = input_.Byte();
    if (sends_.size() > 0) engine_.OnSendDone(sends_.Complete(at % sends_.size()), now_);
  }

  void CompleteRead(size_t at) {
    const Read done = fuzz::TakeOut(reads_, at);
    FUZZ_PROPERTY(memory_.Usable(done.read.sink, done.read.local_key, MemoryUse::kReadSink));
    CopyBytes(done.read.sink, done.content);
    Call& call = *done.call;
    --call.reads_in_flight;
    engine_.OnReadDone(done.read.tag, now_);
    if (call.reads_in_flight == 0 && (call.failure || PostedAll(call))) EndPull(call);
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
    if (call.extension && choices == 0) return Extended(call, amount, credits);
    ChunkLists lists{.writes = call.offered.writes, .reply = call.offered.reply};
    const auto shorten = [&](Segment& segment, size_t n) {
      if ((choices & 3) == 0) segment.length = 0;
      if ((choices & 3) == 1) segment.length = std::min<uint32_t>(segment.length, amount);
      if ((choices & 3) == 2) segment.length = std::min<uint32_t>(segment.length, (amount * (n + 1)) & 0x3f);
      if ((choices & 3) == 3 && config_.lengths_may_be_wrong) segment.length += amount & 7;
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
    if (seen_->is_v2() && choices >> 5 < 5) {
      header.version = kRpcRdmaVersion2;
      header.flags = choices >> 5 == 3 ? 0 : kFlagResponse;
    }
    const bool long_reply = lists.reply.has_value() && (choices & 4) != 0;
    const bool whole_read = (choices & 0x10) != 0 && LeaveToRead(&lists);
    if (lists.reply) {
      for (size_t n = 0; n < lists.reply->size(); ++n) {
        if (long_reply && !whole_read) shorten((*lists.reply)[n], n);
        if (!long_reply || whole_read) (*lists.reply)[n].length = 0;
      }
    }
    if ((choices & 8) == 0) Place(call, message);
    if (seen_->is_v2()) {
      if (choices >> 5 == 1) return fuzz::Encode(WithBody(header, AnyError()), {});
      if (choices >> 5 == 2) return fuzz::Encode(WithBody(header, AnyProperties(input_)), {});
      if (choices >> 5 == 4) return Extended(call, amount, credits);
      // In the layout of version 1, and maybe with another word for the version.
      if (choices >> 5 == 5) {
        header.version = 1 + (amount >> 7);
        return fuzz::Encode(WithBody(header, ErrVers{.low = 1, .high = amount & 3u}), {});
      }
      if (choices >> 5 == 6) return fuzz::Encode(WithBody(header, ErrChunk{}), {});
    }
    switch (seen_->is_v2() ? 0 : choices >> 5) {
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
        header.body = long_reply || whole_read ? Header::Body(RdmaNomsg{std::move(lists)}) : RdmaMsg{std::move(lists)};
        if (long_reply || whole_read) message.clear();
        break;
    }
    return fuzz::Encode(header, message);
  }

  static Header WithBody(Header header, Header::Body body) {
    header.body = std::move(body);
    return header;
  }
  Block Extended(const Call& call, uint8_t amount, uint8_t credits) {
    return fuzz::Encode({.xid = call.xid,
                         .version = kRpcRdmaVersion2,
                         .credits = credits,
                         .flags = kFlagResponse,
                         .body = Extension{.type = fuzz::kExtensionType, .body = ExtensionBody(call, amount & 0x3f)}},
                        {});
  }
  Header::Body AnyError() {
    static constexpr std::array<uint32_t, 8> kLengths = {0, 1, 4, 40, 300, 1000, 3000, UINT32_MAX};
    const uint8_t code = input_.Byte();
    const uint8_t number = input_.Byte();
    const uint32_t length = number < 0xf8 ? (number >> 2) * 20u : kLengths[number & 7];
    switch (code % 11) {
      case kRdma2ErrVers:
        return ErrVers{number & 3u, uint32_t{number} >> 6};
      case kRdma2ErrBadXdr:
        return ErrBadXdr{};
      case kRdma2ErrInvalHtype:
        return ErrInvalHtype{};
      case kRdma2ErrReadChunks:
        return ErrReadChunks{number & 3u};
      case kRdma2ErrWriteChunks:
        return ErrWriteChunks{number & 3u};
      case kRdma2ErrSegments:
        return ErrSegments{number & 7u};
      case kRdma2ErrWriteResource:
        return ErrWriteResource{number & 3u, length};
      case kRdma2ErrReplyResource:
        return ErrReplyResource{length};
      case kRdma2ErrSystem:
        return ErrSystem{};
    }
    return ErrOther{code % 11 == 10 ? fuzz::kExtensionError : number};
  }

  // A Read list for a reply; whether it has the whole of it.
  bool LeaveToRead(ChunkLists* lists) {
    const uint8_t counts = input_.Byte();
    const bool whole = (counts & 4) != 0;
    uint32_t position = whole ? 0 : 8;
    for (uint32_t n = 0; n <= (counts & 3); ++n) {
      const uint32_t length = input_.Byte() * ((counts & 8) != 0 ? 4u : 1u);
      lists->reads.push_back({position, {0x9000 + n, length, uint64_t{n} << 20}});
      // The next one a segment of the same chunk, or another chunk.
      if ((counts & (0x10 << n)) != 0) position += length + XdrPad(length) + (whole ? 8 : 0);
    }
    return whole;
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
    Call* const refused = Foresee(received.bytes, (with_invalidate & 0xe0) != 0xe0);
    const uint64_t resends = engine_.stats().resends;
    engine_.OnReceive(received.slot, static_cast<uint32_t>(received.bytes.size()), invalidated, now_);
    if (engine_.stats().resends == resends) return;
    FUZZ_PROPERTY(refused != nullptr && engine_.stats().resends == resends + 1);
    WillBeSentAgain(*refused);
  }

  // In spite of its error, which has to have said how; or it goes with the connection, where that is ending.
  void WillBeSentAgain(Call& call) {
    FUZZ_PROPERTY(!call.extension && call.resends < config_.resends_max);
    const Header::Body& error = *call.error;
    if (std::holds_alternative<ErrReadChunks>(error)) {
      FUZZ_PROPERTY(HasEligibleReads(call.offered) && !HasPositionZero(call.offered));
      call.without_read_chunks = true;
    } else if (std::holds_alternative<ErrWriteChunks>(error)) {
      FUZZ_PROPERTY(!call.offered.writes.empty());
      call.without_write_chunks = true;
    } else if (const auto* segments = std::get_if<ErrSegments>(&error)) {
      FUZZ_PROPERTY(segments->max_segments > 0 && !call.offered.empty());
    } else if (const auto* result = std::get_if<ErrWriteResource>(&error)) {
      FUZZ_PROPERTY(config_.resend_executed);
      FUZZ_PROPERTY(result->chunk_index > 0 && result->chunk_index <= call.offered.writes.size());
      FUZZ_PROPERTY(result->length_needed > TotalLength(call.offered.writes[result->chunk_index - 1]));
      call.grown_to[result->chunk_index - 1] = result->length_needed;
    } else {
      const auto* reply = std::get_if<ErrReplyResource>(&error);
      FUZZ_PROPERTY(reply != nullptr);
      FUZZ_PROPERTY(config_.resend_executed);
      if (reply->length_needed > 0) {
        FUZZ_PROPERTY(!call.offered.reply || reply->length_needed > TotalLength(*call.offered.reply));
        call.reply_needed = reply->length_needed;
      } else {
        FUZZ_PROPERTY(!call.offered.writes.empty());
        call.without_write_chunks = true;
      }
    }
    call.failure.reset();
    call.resending = true;
    ++call.resends;
  }

  // What the responder takes, as its errors say: of those that this call can have caused.
  void Learn(const Call& call, const Header::Body& error) {
    if (call.extension) return;
    const ChunkLists& offered = call.offered;
    ++known_;
    if (const auto* reads = std::get_if<ErrReadChunks>(&error); reads != nullptr && !offered.reads.empty()) {
      read_chunks_taken_ = std::min(read_chunks_taken_, reads->max_chunks);
    }
    if (const auto* writes = std::get_if<ErrWriteChunks>(&error); writes != nullptr && !offered.writes.empty()) {
      write_chunks_taken_ = std::min(write_chunks_taken_, writes->max_chunks);
    }
    if (const auto* segments = std::get_if<ErrSegments>(&error);
        segments != nullptr && segments->max_segments > 0 && !offered.empty()) {
      segments_taken_ = std::min(segments_taken_, segments->max_segments);
    }
    if (error == Header::Body(ErrReplyResource{0}) && !offered.writes.empty()) write_chunks_taken_ = 0;
  }

  void TakeProperties(const Header& header) {
    if (seen_->OnPeerProperties(std::get<ConnProp>(header.body).properties)) ++known_;
    if (exchange_ != Exchange::kSent && exchange_ != Exchange::kGivenUp) return;
    granted_ = std::clamp(header.credits, 1u, own_max_);
    if (exchange_ == Exchange::kSent) EndExchange(ExchangeEnd::kAnswered);
    exchange_ = Exchange::kOver;
  }

  // Where lengths may be wrong, a Write chunk may be returned up to three bytes longer than the memory that its last
  // bytes went to, and is full then. In all other respects the reply is what came.
  Header WithinOffer(Call& call, Header header) const {
    call.beyond.assign(call.offered.writes.size(), 0);
    if (!config_.lengths_may_be_wrong || header.chunks() == nullptr) return header;
    WriteList& writes = header.mutable_chunks()->writes;
    if (writes.size() != call.offered.writes.size()) return header;
    for (size_t i = 0; i < writes.size(); ++i) {
      const auto chunk = writes.mutable_chunk(i);
      const auto offered = call.offered.writes[i];
      if (chunk.size() != offered.size()) continue;
      size_t filled = chunk.size();
      while (filled > 0 && chunk[filled - 1].length == 0) --filled;
      if (filled == 0) continue;
      uint32_t& length = chunk[filled - 1].length;
      const uint32_t room = offered[filled - 1].length;
      if (room == 0 || length <= room || length - room > WrongLengths::kExcessMax) continue;
      call.beyond[i] = length - room;
      length = room;
    }
    return header;
  }

  // What this message means, by the document: which call it answers, and how that ends. `honest`: of a reply that is
  // read, whether it is that of its call. Returns the call that an error of version 2 is for.
  Call* Foresee(ConstBytes bytes, bool honest) {
    ByteReader in(bytes);
    const bool version_2 = seen_->settled() && seen_->is_v2();
    const bool probing = seen_->probing();
    const auto header = seen_->Decode(in);
    std::optional<uint32_t> xid;
    bool owes_done = false;
    if (header && header->flags) {
      if (!header->is_response()) return nullptr;
      if (header->type() == MessageType::kConnProp) {
        TakeProperties(*header);
        return nullptr;
      }
      const bool may_be_refused = exchange_ == Exchange::kSent || exchange_ == Exchange::kGivenUp;
      if (may_be_refused && header->type() == MessageType::kError && header->xid == kPropertiesXid) {
        if (exchange_ == Exchange::kSent) EndExchange(ExchangeEnd::kRefused);
        exchange_ = Exchange::kOver;
        return nullptr;
      }
      xid = header->xid;
    } else if (header) {
      const bool is_call =
          header->has_inline_message() && in.Rest().size() >= 8 && ByteReader(in.Rest().subspan(4)).U32() == 0;
      if (header->type() != MessageType::kDone && !is_call) xid = header->xid;
      owes_done = xid.has_value() && config_.profile.replies_by_read_chunk && header->chunks() != nullptr &&
                  !header->chunks()->reads.empty();
    } else if (const HeaderFault& fault = header.error(); fault.kind != HeaderFault::Kind::kTooShort) {
      const bool is_response = fault.flags ? (*fault.flags & kFlagResponse) != 0 : !version_2;
      if (fault.action == FaultAction::kDisconnect) bad_properties_ = must_end_ = !ending_;
      if (!is_response || (fault.flags && fault.kind == HeaderFault::Kind::kUnknownType)) return nullptr;
      xid = fault.xid;
      if (fault.action != FaultAction::kDisconnect && exchange_ == Exchange::kSent && xid == kPropertiesXid) {
        EndExchange(ExchangeEnd::kRefused);
      }
    }
    if (!xid) return nullptr;
    for (const auto& call : calls_) {
      if (!call->on_wire || call->xid != *xid) continue;
      call->on_wire = false;
      // Errors of version 2 grant nothing, nor does one that ends a probe.
      const bool grants = header && (header->type() != MessageType::kError || !(header->flags || probing));
      if (grants) granted_ = std::clamp(header->credits, 1u, own_max_);
      if (call->failure) {
        // Its Receive waits for RDMA_DONE.
        if (owes_done) owed_dones_.push_back({*xid, true});
        return nullptr;
      }
      if (header) call->answered_in = header->flags ? kRpcRdmaVersion2 : kRpcRdmaVersion1;
      if (!header) {
        call->failure = Kind::kBadHeader;
      } else if (header->flags && header->type() == MessageType::kError) {
        call->failure = KindOf(header->body);
        call->error = header->body;
        Learn(*call, header->body);
        return call.get();
      } else if (std::holds_alternative<ErrVers>(header->body)) {
        call->failure = Kind::kErrVers;
      } else if (std::holds_alternative<ErrChunk>(header->body)) {
        call->failure = Kind::kErrChunk;
      } else if (call->extension) {
        const auto* answer = std::get_if<Extension>(&header->body);
        if (answer == nullptr || answer->has_message) {
          call->failure = Kind::kBadHeader;
        } else {
          call->answered_well = true;
          call->answer = *answer;
        }
      } else if (CheckDirection(*header, in.Rest()).has_value()) {
        call->failure = Kind::kBadDirection;
      } else if (const auto reads = ValidateReply(WithinOffer(*call, *header), in.Rest(), call->offered,
                                                  config_.profile, {.read_bytes_max = config_.read_bytes_max});
                 !reads || (owes_done && config_.reads_max == 0)) {
        call->failure = Kind::kBadChunks;
        if (owes_done) owed_dones_.push_back({*xid, false});
      } else {
        call->answered_well = call->holds_receive = true;
        call->reply = WithinOffer(*call, *header);
        call->reply_inline.assign(in.Rest().begin(), in.Rest().end());
        if (owes_done) BeginPull(*call, *reads, honest);
      }
      return nullptr;
    }
    if (owes_done) owed_dones_.push_back({*xid, true});
    return nullptr;
  }

  void BeginPull(Call& call, const CallChunks& chunks, bool honest) {
    call.pulling = true;
    call.chunks = chunks;
    for (const ReadChunk& chunk : chunks.chunks) {
      Block& data = call.read_data.emplace_back(Pattern(chunk.length, call.xid * 31 + chunk.position));
      if (chunk.position == 0 && data.size() >= 8) {
        ByteWriter head(data);
        head.U32(call.xid + (honest ? 0 : 1));
        head.U32(kReplyWord);
      }
      Append(call.to_read, data);
    }
    pulls_.push_back(&call);
    if (call.to_read.empty()) EndPull(call);
  }

  // Nothing of it is read any more, and the responder may be told.
  void EndPull(Call& call) {
    call.pulling = false;
    std::erase(pulls_, &call);
    if (!ending_) owed_dones_.push_back({call.xid, false});
  }

  static bool PostedAll(const Call& call) {
    for (size_t i = call.next_segment; i < call.chunks.segments.size(); ++i) {
      if (call.chunks.segments[i].target.length > 0) return false;
    }
    return true;
  }

  // Memory to read into that the device has refused, which is that of the reply whose turn it was.
  void SeeRefusedSinks() {
    const auto refused = memory_.refused.find(MemoryUse::kReadSink);
    if (refused == memory_.refused.end() || refused->second == sinks_refused_) return;
    FUZZ_PROPERTY(refused->second == ++sinks_refused_);
    const auto first = std::find_if(pulls_.begin(), pulls_.end(),
                                    [](const Call* call) { return !call->tag.has_value() && !call->failure; });
    FUZZ_PROPERTY(first != pulls_.end());
    Call& call = **first;
    call.failure = Kind::kMemory;
    call.answered_well = false;
    EndPull(call);
  }

  // One Read more: the next segment of its reply that has any bytes, into memory that is there for that.
  void TakeRead(const PostRead& read) {
    FUZZ_PROPERTY(reads_.size() < config_.reads_max);
    const auto found = std::find_if(pulls_.begin(), pulls_.end(), [&](const Call* call) {
      return call->tag.has_value() ? call->tag == read.tag : !call->failure;
    });
    FUZZ_PROPERTY(found != pulls_.end());
    Call& call = **found;
    FUZZ_PROPERTY(!call.failure);
    if (!call.tag) {
      call.tag = read.tag;
      call.sink = read.local_key - memory_.LocalKeyOf(0);
    }
    FUZZ_PROPERTY(read.local_key == memory_.LocalKeyOf(call.sink));
    FUZZ_PROPERTY(memory_.Usable(read.sink, read.local_key, MemoryUse::kReadSink));
    while (call.next_segment < call.chunks.segments.size() &&
           call.chunks.segments[call.next_segment].target.length == 0) {
      ++call.next_segment;
    }
    FUZZ_PROPERTY(call.next_segment < call.chunks.segments.size());
    const Segment& source = call.chunks.segments[call.next_segment++].target;
    FUZZ_PROPERTY(read.source == source && read.sink.size() == source.length);
    const ConstBytes content = ConstBytes(call.to_read).subspan(call.next_byte, source.length);
    call.next_byte += source.length;
    ++call.reads_in_flight;
    reads_.push_back({read, &call, Block(content.begin(), content.end())});
  }

  // --- What the engine wants ---

  bool TakeForProgram() override {
    // The message of an exchange that was over at once may not have been taken yet: Check() compares.
    if (const auto end = engine_.TakeExchangeEnd()) {
      FUZZ_PROPERTY(!told_exchange_end_);
      told_exchange_end_ = end;
    }
    const auto outcome = engine_.TakeOutcome(now_);
    if (outcome) CheckOutcome(*outcome);
    return outcome.has_value();
  }

  void Take(const Command& command) override {
    FUZZ_PROPERTY(!over_);
    SeeRefusedSinks();
    if (const auto* receive = std::get_if<PostReceive>(&command)) {
      posted_.Post(receive->slot);
    } else if (const auto* send = std::get_if<PostSend>(&command)) {
      FUZZ_PROPERTY(!send->invalidate.has_value() && send->length <= SendMax());
      CheckSent(sends_.Post(*send));
    } else if (const auto* invalidate = std::get_if<Invalidate>(&command)) {
      TakeInvalidate(*invalidate);
    } else if (const auto* disconnect = std::get_if<Disconnect>(&command)) {
      FUZZ_PROPERTY(must_end_ || may_end_);
      FUZZ_PROPERTY(disconnect->why == (closed_           ? Disconnect::Why::kAsked
                                        : bad_properties_ ? Disconnect::Why::kBadProperties
                                                          : Disconnect::Why::kCallTimedOut));
      must_end_ = false;
      ending_ = true;
    } else if (const auto* read = std::get_if<PostRead>(&command)) {
      TakeRead(*read);
    } else {
      FUZZ_PROPERTY(false);  // a requester writes nothing
    }
  }

  // Bytes of the longest Send to this peer.
  uint32_t SendMax() const {
    return std::min(config_.limits.send_inline, seen_->is_v2() ? seen_->send_inline() : UINT32_MAX);
  }
  // Of calls, by what is known of the peer.
  bool MayUseChunks() const {
    if (seen_->probing()) return false;
    return seen_->is_v2() && config_.reverse ? seen_->peer().reverse_requests == ReverseSupport::kGeneral
                                             : !config_.inline_only;
  }

  void CheckSent(ConstBytes bytes) {
    ByteReader in(bytes);
    const auto header = seen_->is_v2() ? DecodeHeaderV2(in, {}, seen_->extensions()) : DecodeHeaderV1(in);
    FUZZ_PROPERTY(header.has_value() && header->version == seen_->version() && !header->is_response());
    if (header->type() == MessageType::kDone) {
      const auto owed = std::find_if(owed_dones_.begin(), owed_dones_.end(),
                                     [&](const OwedDone& done) { return done.xid == header->xid; });
      FUZZ_PROPERTY(owed != owed_dones_.end() && in.Rest().empty() && header->credits >= 1);
      owed_dones_.erase(owed);
      return;
    }
    FUZZ_PROPERTY(header->credits >= 1 && header->credits <= own_max_);
    if (header->type() == MessageType::kConnProp) {
      FUZZ_PROPERTY(exchange_ == Exchange::kWaiting && header->xid == kPropertiesXid && header->flags == 0u);
      FUZZ_PROPERTY(header->body == Header::Body(ConnProp{seen_->own_set()}));
      exchange_ = Exchange::kSent;
    } else {
      FUZZ_PROPERTY(!exchanging());
      Call& call = header->type() == MessageType::kExtension ? CheckExtension(*header) : CheckCall(*header, in.Rest());
      FUZZ_PROPERTY(call.flags == header->flags.value_or(call.flags));
      for (const auto& other : calls_) {
        FUZZ_PROPERTY(other.get() == &call || !(other->on_wire || other->resending) || other->xid != header->xid);
      }
      FUZZ_PROPERTY(header->xid != kPropertiesXid || !terms_);
      FUZZ_PROPERTY(!call.resending || call.xid == header->xid);
      call.sent = call.on_wire = true;
      call.resending = false;
      call.xid = header->xid;
    }
    // [5666bis:4.3#4] [5666bis:5.1.3#1] and a Receive for every reply that is to come.
    FUZZ_PROPERTY(InFlight() <= granted_ && InFlight() <= posted_.size());
    EndExchangeIfTold();
  }

  // Whose it is stands in its third word.
  Call& NextToBeSent(uint32_t cookie) {
    const uint32_t number = cookie - static_cast<uint32_t>(kCookieBase);
    FUZZ_PROPERTY(number < calls_.size());
    Call& call = *calls_[number];
    FUZZ_PROPERTY((!call.sent || call.resending) && !call.over && !call.failure && !IsExposed(call));
    return call;
  }

  Call& CheckExtension(const Header& header) {
    const Extension& extension = std::get<Extension>(header.body);
    Call& call = NextToBeSent(ByteReader(ConstBytes(extension.body).subspan(4)).U32());
    FUZZ_PROPERTY(!call.sent && call.extension == extension);
    return call;
  }

  Call& CheckCall(const Header& header_sent, ConstBytes rest) {
    const Header* const header = &header_sent;
    FUZZ_PROPERTY(header->type() == MessageType::kMsg || header->type() == MessageType::kNomsg);
    const ChunkLists& lists = *header->chunks();
    FUZZ_PROPERTY(lists.empty() || MayUseChunks());
    FUZZ_PROPERTY(std::is_sorted(lists.reads.begin(), lists.reads.end(),
                                 [](const auto& a, const auto& b) { return a.position < b.position; }));
    const Block message = AsReceived(*header, rest);
    ByteReader words(message);
    const uint32_t xid = words.U32();
    words.U32();
    Call& call = NextToBeSent(words.U32());
    FUZZ_PROPERTY(xid == header->xid && !call.extension);
    Block expected = WithItems(call.base, call.items, 0);
    ByteWriter(MutableBytes(expected)).U32(xid);
    FUZZ_PROPERTY(Same(message, expected));

    call.offered = lists;
    call.reads.clear();
    call.writes.clear();
    call.result_memory.clear();
    for (const ReadSegment& read : lists.reads) {
      if (read.target.length > 0) call.reads.push_back(memory_.Find(read.target, MemoryUse::kReadByPeer));
    }
    for (size_t i = 0; i < lists.writes.size(); ++i) {
      FUZZ_PROPERTY(i < call.results.size());
      ClaimWritten(call, lists.writes[i], i);
    }
    if (lists.reply) ClaimWritten(call, *lists.reply, std::nullopt);
    if (seen_->is_v2()) CheckAsked(call, *header);
    return call;
  }

  // What the responder has said that it takes is not asked for again, nor what it could not do for this call.
  void CheckAsked(const Call& call, const Header& header) {
    const ChunkLists& lists = call.offered;
    std::map<uint32_t, uint32_t> read_chunks;  // segments, by position
    for (const ReadSegment& read : lists.reads) ++read_chunks[read.position];
    for (const auto& [position, segments] : read_chunks) FUZZ_PROPERTY(segments <= segments_taken_);
    FUZZ_PROPERTY(read_chunks.size() - read_chunks.count(0) <= read_chunks_taken_);
    FUZZ_PROPERTY(lists.writes.size() <= write_chunks_taken_);
    for (size_t i = 0; i < lists.writes.size(); ++i) FUZZ_PROPERTY(lists.writes[i].size() <= segments_taken_);
    FUZZ_PROPERTY(!lists.reply || lists.reply->size() <= segments_taken_);
    FUZZ_PROPERTY(!call.without_read_chunks || !HasEligibleReads(lists));
    FUZZ_PROPERTY(!call.without_write_chunks || lists.writes.empty());
    FUZZ_PROPERTY(call.reply_needed == 0 || (lists.reply && TotalLength(*lists.reply) >= call.reply_needed));
    uint64_t own = call.reply_needed;
    for (const auto& [result, length] : call.grown_to) {
      if (result < call.result_memory.size()) own += call.result_memory[result].size();
    }
    FUZZ_PROPERTY(own <= config_.grown_bytes_max);
    // The responder is asked to invalidate the first window of the call, if it has any.
    uint32_t handle = 0;
    for (const uint32_t id : IdsOf(call)) {
      if (handle == 0 && memory_.regions.at(id).window) handle = memory_.HandleOf(id);
    }
    FUZZ_PROPERTY(header.inv_handle() == handle);
  }

  // The registrations of its latest attempt, in their order.
  static std::vector<uint32_t> IdsOf(const Call& call) {
    std::vector<uint32_t> ids = call.reads;
    for (const auto& chunk : call.writes) ids.insert(ids.end(), chunk.begin(), chunk.end());
    std::erase(ids, 0u);
    return ids;
  }
  bool IsExposed(const Call& call) const {
    const std::vector<uint32_t> ids = IdsOf(call);
    return std::any_of(ids.begin(), ids.end(), [&](uint32_t id) { return memory_.regions.contains(id); });
  }
  bool IsQueuedAgain(const Call& call) const { return call.resending && !call.over && !IsExposed(call); }

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

  // What is offered for writing belongs to this call: result memory from its start on, the caller's or, when that was
  // too short, other memory; or memory for the reply.
  void ClaimWritten(Call& call, std::span<const Segment> segments, std::optional<size_t> result) {
    std::vector<uint32_t>& ids = call.writes.emplace_back();
    MutableBytes memory;
    if (result) memory = call.results[*result];
    if (result && call.grown_to.contains(*result)) {
      const uint32_t first = memory_.Find(segments[0], MemoryUse::kWrittenByPeer);
      FUZZ_PROPERTY(first != 0 && TotalLength(segments) >= call.grown_to.at(*result));
      memory = {memory_.regions.at(first).memory.data(), TotalLength(segments)};
      for (const Block& callers : call.results) FUZZ_PROPERTY(!fuzz::Overlap(memory, callers));
    }
    if (result) call.result_memory.push_back(memory);
    size_t done = 0;
    for (const Segment& segment : segments) {
      if (segment.length == 0) {
        ids.push_back(0);
        continue;
      }
      const uint32_t id = memory_.Find(segment, MemoryUse::kWrittenByPeer);
      FUZZ_PROPERTY(id != 0 && segment.length == memory_.regions.at(id).memory.size());
      if (result) {
        FUZZ_PROPERTY(segment.length <= memory.size() - done);
        FUZZ_PROPERTY(memory_.regions.at(id).memory.data() == memory.data() + done);
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
    FUZZ_PROPERTY(call.sink == 0 || !memory_.regions.contains(call.sink));
    for (const auto& chunk : call.writes) {
      for (const uint32_t id : chunk) FUZZ_PROPERTY(!memory_.regions.contains(id));
    }
  }

  void CheckOutcome(const CallOutcome& outcome) {
    SeeRefusedSinks();
    const auto number = static_cast<size_t>(outcome.cookie - kCookieBase);
    FUZZ_PROPERTY(number < calls_.size());
    Call& call = *calls_[number];
    FUZZ_PROPERTY(outcome.call == call.id && !call.over);  // each once
    FUZZ_PROPERTY(over_ || (!call.pulling && call.reads_in_flight == 0));
    call.over = true;
    CheckFenced(call);
    FUZZ_PROPERTY(outcome.resends == call.resends);
    FUZZ_PROPERTY(outcome.answered_in == call.answered_in || call.failure == Kind::kTimedOut);
    if (!outcome.failure && call.extension) {
      FUZZ_PROPERTY(call.answered_well && outcome.extension == call.answer && outcome.reply.base.empty());
    } else if (!outcome.failure) {
      CheckReply(call, outcome);
    } else if (call.answered_well) {
      // A Reply chunk that holds something else is seen when it is looked at.
      FUZZ_PROPERTY((outcome.failure->kind == Kind::kBadChunks && outcome.failure->chunk == ChunkFault::kXidMismatch) ||
                    (outcome.failure->kind == Kind::kBadDirection && seen_->is_v2()));
      FUZZ_PROPERTY(call.reply.type() == MessageType::kNomsg && outcome.failure->sent);
      call.answered_well = false;
    } else if (outcome.failure->kind == Kind::kMemory && (!call.sent || call.resending)) {
      FUZZ_PROPERTY(refusals_seen_ < Refusals());
      ++refusals_seen_;
    } else if (outcome.failure->kind == Kind::kNotServed) {
      FUZZ_PROPERTY(NotServed() && !call.failure && (!call.sent || call.resending));
      FUZZ_PROPERTY(outcome.failure->sent == call.sent);
    } else if (outcome.failure->kind == Kind::kTooLarge) {
      // What the peer has said meanwhile leaves no way for it.
      FUZZ_PROPERTY(!call.failure && (!call.sent || call.resending) && known_ > call.known);
      FUZZ_PROPERTY(outcome.failure->sent == call.sent);
    } else {
      FUZZ_PROPERTY(call.failure.has_value() && outcome.failure->kind == *call.failure);
      FUZZ_PROPERTY(outcome.failure->sent == call.sent);
      if (call.error && *call.failure == KindOf(*call.error)) FUZZ_PROPERTY(outcome.failure->error == *call.error);
    }
    if (outcome.failure) {
      FUZZ_PROPERTY(ToString(outcome.failure->kind) != nullptr && outcome.placed.empty());
      call.failure = outcome.failure->kind;
    }
    if (release_at_once_) {
      engine_.Release(call.id, now_);
      call.released = true;
    }
    if (seen_->probing()) OnProbed(outcome);
  }

  // As an owner does that was told to find out.
  void OnProbed(const CallOutcome& outcome) {
    if (ending_ || over_ || outcome.answered_in == 0) return;
    const bool refused =
        outcome.failure && (outcome.failure->kind == Kind::kErrVers || outcome.failure->kind == Kind::kErrChunk);
    uint32_t version = 0;
    if (!outcome.failure && outcome.answered_in == kRpcRdmaVersion2) version = kRpcRdmaVersion2;
    if (refused && seen_->versions().contains(kRpcRdmaVersion1)) version = kRpcRdmaVersion1;
    if (version == 0) return End(1);
    seen_->SetVersion(version);
    terms_->SetVersion(version);
  }
  uint32_t Refusals() const {
    uint32_t sum = 0;
    for (const auto& [use, count] : memory_.refused) sum += use == MemoryUse::kReadSink ? 0 : count;
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
      FUZZ_PROPERTY(Inside(data, call.result_memory[i]));
      const bool grown = i < outcome.grown.size() && outcome.grown[i] != nullptr;
      FUZZ_PROPERTY(grown == call.grown_to.contains(i));
      FUZZ_PROPERTY(!grown || outcome.grown[i].get() == call.result_memory[i].data());
      FUZZ_PROPERTY(Same(data, written(i, returned.writes[i])));
      FUZZ_PROPERTY(outcome.reply.chunks[i].beyond == call.beyond[i]);
      CheckLength(outcome.reply.chunks[i]);
    }
    std::vector<ConstBytes> read(call.read_data.begin(), call.read_data.end());
    if (call.chunks.has_position_zero()) {
      FUZZ_PROPERTY(outcome.reply_memory != nullptr && Same(outcome.reply.base, read[0]));
      read.erase(read.begin());
    } else if (!read.empty()) {
      FUZZ_PROPERTY(outcome.read_memory != nullptr || call.to_read.empty());
    }
    FUZZ_PROPERTY(outcome.reply.reads.size() == read.size());
    for (size_t i = 0; i < read.size(); ++i) FUZZ_PROPERTY(Same(outcome.reply.reads[i].data, read[i]));
    if (call.chunks.has_position_zero()) {
      FUZZ_PROPERTY(!memory_.Reachable(outcome.reply.base));
    } else if (call.reply.type() == MessageType::kNomsg) {
      FUZZ_PROPERTY(outcome.reply_memory != nullptr);
      FUZZ_PROPERTY(Same(outcome.reply.base, written(call.writes.size() - 1, *returned.reply)));
      FUZZ_PROPERTY(!memory_.Reachable(outcome.reply.base));
    } else {
      views_[call.id] = outcome.reply.base;
    }
    FUZZ_PROPERTY(outcome.reply.base.size() >= 4 && ByteReader(outcome.reply.base).U32() == call.xid);
    CheckViews(call);
  }

  // No item is taken from a chunk that is more than three bytes longer, however little memory was offered for it.
  static void CheckLength(const ChunkData& chunk) {
    const uint64_t returned = chunk.data.size() + chunk.beyond;
    const auto count = std::make_shared<std::atomic<uint64_t>>(0);
    for (uint64_t excess = 0; excess <= 8 && excess < returned; ++excess) {
      WrongLengths wrong(count);
      ReducedStream stream{.order = ReducedStream::ChunkOrder::kInOrder, .wrong_lengths = &wrong};
      stream.chunks.push_back(chunk);
      *count = 0;
      for (int again = 0; again < 2; ++again) {
        XdrReader in(stream);
        in.EligibleBytes("result", returned - excess);
        FUZZ_PROPERTY(in.ok() == (excess <= WrongLengths::kExcessMax && chunk.beyond <= excess));
        FUZZ_PROPERTY(*count <= 1 && (in.ok() || *count == 0) && (chunk.beyond == 0 || !in.ok() || *count == 1));
      }
    }
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
  // With the properties of this end.
  size_t InFlight() const { return OnWire() + (exchange_ == Exchange::kSent ? 1 : 0); }
  size_t Queued() const {
    return static_cast<size_t>(
               std::count_if(calls_.begin(), calls_.end(),
                             [&](const auto& call) { return (!call->sent && !call->over) || IsQueuedAgain(*call); })) -
           FencingUnsent();
  }
  // Calls whose memory was refused, until they are fenced.
  size_t FencingUnsent() const { return Refusals() - refusals_seen_; }
  size_t NotReleased() const {
    return static_cast<size_t>(
        std::count_if(calls_.begin(), calls_.end(), [](const auto& call) { return !call->released; }));
  }

  void Check() override {
    FUZZ_PROPERTY(std::exchange(told_exchange_end_, std::nullopt) == std::exchange(exchange_end_, std::nullopt));
    memory_.CheckExposed();
    SeeRefusedSinks();
    size_t held = 0;
    size_t open = 0;
    size_t pulling = 0;
    for (const auto& call : calls_) {
      if (call->holds_receive && !call->released) ++held;
      if (!call->over) ++open;
      if (call->pulling) ++pulling;
      CheckViews(*call);
    }
    for (const OwedDone& done : owed_dones_) held += done.holds_receive ? 1 : 0;
    FUZZ_PROPERTY(engine_.outstanding() == open);
    FUZZ_PROPERTY(engine_.call_records() <= most_records_);
    if (terms_) {
      FUZZ_PROPERTY(terms_->version() == seen_->version() && terms_->settled() == seen_->settled());
      FUZZ_PROPERTY(terms_->peer() == seen_->peer() && terms_->peer_has_spoken() == seen_->peer_has_spoken());
    }
    if (over_) return;
    FUZZ_PROPERTY(engine_.credits().in_flight() == InFlight() && engine_.credits().granted() == granted_);
    FUZZ_PROPERTY(engine_.abandoned() <= OnWire());
    for (const auto& call : calls_) {
      if (call->on_wire) FUZZ_PROPERTY(engine_.Knows(call->xid));
    }
    if (ending_) return;
    // Every Receive is posted or holds a reply that somebody reads.
    FUZZ_PROPERTY(engine_.posted_receives() == posted_.size());
    FUZZ_PROPERTY(posted_.size() + held == receive_.view.slots);
    // [5666:3.8#5] RDMA_DONE counts from the reply on that asks for it.
    const uint32_t dones = engine_.credits().dones();
    FUZZ_PROPERTY(dones >= owed_dones_.size() + pulling);
    // Nobody waits for what is there.
    const bool has_buffer = sends_.size() < send_.view.slots;
    FUZZ_PROPERTY(!has_buffer || owed_dones_.empty());
    const bool may_send =
        (InFlight() == 0 || InFlight() + dones < granted_) && InFlight() < posted_.size() && has_buffer;
    FUZZ_PROPERTY(!may_send || (exchanging() ? exchange_ == Exchange::kSent : Queued() == 0));
    FUZZ_PROPERTY(!exchanging() || (engine_.Deadline().has_value() && *engine_.Deadline() <= exchange_until_));
    CheckPulls();
    for (const auto& call : calls_) {
      const bool answer_comes = call->on_wire || call->pulling || (call->resending && !call->over);
      const bool waits = call->sent ? answer_comes && !call->failure : !call->over && !call->failure;
      if (waits && call->deadline && FencingUnsent() == 0) {
        FUZZ_PROPERTY(engine_.Deadline().has_value() && *engine_.Deadline() <= *call->deadline);
      }
    }
  }

  // No more memory than there may be; and what can be read is being read.
  void CheckPulls() {
    uint64_t bytes = 0;
    for (const auto& [id, region] : memory_.regions) {
      if (region.use == MemoryUse::kReadSink) bytes += region.memory.size();
    }
    FUZZ_PROPERTY(bytes <= config_.read_bytes_max && reads_.size() <= config_.reads_max);
    const auto next = std::find_if(pulls_.begin(), pulls_.end(),
                                   [](const Call* call) { return !call->failure && !PostedAll(*call); });
    // What was waited for may have come with an outcome that is not released.
    const bool any_held =
        std::any_of(calls_.begin(), calls_.end(), [](const auto& call) { return call->over && !call->released; });
    if (next == pulls_.end() || any_held || reads_.size() == config_.reads_max) return;
    FUZZ_PROPERTY(!(*next)->tag && bytes > 0 && (*next)->to_read.size() > config_.read_bytes_max - bytes);
  }

  // Everything completes, everything is answered: nothing stays behind.
  void Settle() {
    memory_.refuse_next = false;
    release_at_once_ = true;
    for (size_t rounds = 0; rounds < 4 * kMostCalls; ++rounds) {
      while (sends_.size() > 0) engine_.OnSendDone(sends_.Complete(0), now_);
      while (!reads_.empty()) CompleteRead(0);
      while (!invalidates_.empty()) CompleteInvalidate(invalidates_.size() - 1);
      for (const auto& call : calls_) {
        if (call->over && !call->released) engine_.Release(call->id, now_);
        call->released = call->released || call->over;
      }
      Drain();
      const auto waiting = std::find_if(calls_.begin(), calls_.end(), [](const auto& call) { return call->on_wire; });
      if (waiting != calls_.end()) PeerSends(Reply(**waiting, 0, 0, 4));
      Drain();
      if (exchange_ == Exchange::kSent) {
        PeerSends(
            fuzz::Encode({.version = kRpcRdmaVersion2, .credits = 4, .flags = kFlagResponse, .body = ConnProp{}}, {}));
        Drain();
      }
      Check();
      if (engine_.outstanding() == 0 && InFlight() == 0 && owed_dones_.empty() && !exchanging()) break;
    }
    FUZZ_PROPERTY(pulls_.empty() && owed_dones_.empty() && !exchanging());
    FUZZ_PROPERTY(engine_.outstanding() == 0 && engine_.abandoned() == 0 && OnWire() == 0);
    FUZZ_PROPERTY(posted_.size() == receive_.view.slots && memory_.regions.empty());
    const uint32_t dones = engine_.credits().dones();
    FUZZ_PROPERTY(engine_.room() == (dones < granted_ ? granted_ - dones : 1));
  }

  struct Read {
    PostRead read;
    Call* call = nullptr;
    Block content;
  };
  // RDMA_DONE that is to be sent; in some cases a Receive is posted again with it and no sooner.
  struct OwedDone {
    uint32_t xid = 0;
    bool holds_receive = false;
  };

  // RDMA2_CONNPROP of this end.
  enum class Exchange : uint8_t { kNone, kWaiting, kSent, kGivenUp, kOver };

  bool release_at_once_ = true;
  uint8_t sizes_ = 0;
  std::optional<ConnectionTerms> terms_;  // the engine's, where version 2 may be spoken
  std::optional<ConnectionTerms> seen_;   // what they have to be
  const Requester::Config config_;
  FuzzArena send_;
  FuzzArena receive_;
  SendQueue sends_;
  ReceiveQueue posted_;
  SequentialXids xids_;

  std::vector<std::unique_ptr<Call>> calls_;  // by cookie
  std::map<uint32_t, Block> written_;         // by registrations undone, what the peer left there
  std::map<CallId, ConstBytes> views_;        // of inline replies
  std::vector<Call*> pulls_;                  // in the order of their replies
  std::vector<Read> reads_;
  std::vector<OwedDone> owed_dones_;
  uint32_t sinks_refused_ = 0;
  uint32_t granted_ = 1;
  uint32_t refusals_seen_ = 0;
  size_t most_records_ = 0;
  Exchange exchange_ = Exchange::kNone;
  Instant exchange_until_;
  std::optional<ExchangeEnd> exchange_end_;       // since the last Check()
  std::optional<ExchangeEnd> told_exchange_end_;  // what the owner was told of it
  bool bad_properties_ = false;
  // What the peer has said that it takes; how often it has said anything of that.
  uint32_t read_chunks_taken_ = UINT32_MAX;
  uint32_t write_chunks_taken_ = UINT32_MAX;
  uint32_t segments_taken_ = UINT32_MAX;
  uint64_t known_ = 0;

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
