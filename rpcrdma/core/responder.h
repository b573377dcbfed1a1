// Responder: the answering end of an RPC-over-RDMA connection, of version 1 or 2.
//
// draft-ietf-nfsv4-rfc5666bis-01 (RFC 8166), draft-cel-nfsv4-rpcrdma-version-two-09. A call lives in the receive buffer
// it arrived in: the buffer's number is the call's. Its header is decoded once and judged before anything acts on it;
// its Read chunks are pulled, at most `reads_max` at a time over all calls; then it is handed out. The reply is planned
// when it is completed: Writes into the Write chunks and the Reply chunk, then the Send.
//
//   Receive -> waiting for memory -> pulling -> ready -> executing -> replying -> Send, and the Receive is posted again
//   before it
//      |                                                                ^
//      +--> answered without one (ERR_VERS, ERR_CHUNK, ...) ------------+
//      +--> dropped: the Receive is posted again at once
//
// Credits. Each grant is the number of receive buffers, or less where budgets say so (credit_budget.h). A buffer is
// either posted or holds a call that is not answered, so
//   Receives posted + calls not yet answered >= credits granted
// whenever a reply becomes visible (ARCHITECTURE section 7). It also bounds the calls in progress, whatever the peer
// does. Calls in excess of a grant that was lowered are served like others, as there are Receives for them
// [5666bis:4.3#5] [5666:3.3#5]. With Receives shared by connections the rule holds for the sum over these: what each
// was granted is reserved for it.
//
// What a call may cost: memory for its Read chunks comes from ConnectionMemory, which knows the peer's allowance. A
// call gets all of it at once or none, so those that wait hold nothing that others wait for; and they wait in the order
// of their arrival. Calls without Read chunks need not wait, but services take memory of the same allowance for them:
// when as many of these as there are receive buffers have gone ahead of the call that waits first, those behind it are
// held back until it has its memory. It is never starved.
//
// Read-Read ([2004:5.2#2], [5666:5.2#2]). Where the profile has it, a reply that fits neither inline nor any chunk that
// was offered stays in memory of this end, which its Read list exposes. It is "exposed" until the requester says
// RDMA_DONE for its XID; then it is fenced, and only then let go of. RDMA_DONE takes a Receive, so as many Receives as
// there may be exposed replies are kept out of the grants:
//   Receives posted + calls not yet answered >= credits granted + exposed replies
// and a requester may send one at any time, whatever else it has sent [5666:3.8#4]. A reply that would be one exposed
// too many, or too large beside the others, is withheld until one of them is over [5666:11#7]; grants stay what they
// are. Who leaves one exposed for longer than the window loses the connection [5666:3.8#1] [5666:11#5] [5666:11#8],
// which fences all. An RDMA_DONE for nothing that is exposed is dropped.
//
// Patience (Config::data_time and data_rate_min; patience.h). The peer owes the data of a call from the first of its
// RDMA Reads to the last: memory is held for all of it. It owes that a Send is taken that holds the memory of its
// reply; and, for a reply that waits because all send buffers are in use, that one of these is. What moves with each
// Read and each reply counts as bytes. When patience is at its end, so is the connection, which fences all. Small
// replies that hold nothing but a send buffer may be unreported for as long as they like.
//
// Version 2. What the ends have settled is in the ConnectionTerms, which the connection's engines share; without a
// Requester beside it this engine alone reads what comes, and the first header that it can take settles the version.
//   RDMA2_CONNPROP  is answered by one with the properties of this end, kPropertiesAnswersMax times on a connection.
//                   The peer's hold from the first on. What says that it is an answer is taken likewise, and not
//                   answered. Malformed ones: ConnectionTerms::Decode says whether they are answered or the end.
//   extensions      are answered by Config::answer_extension.
//   errors          say why, each with a code of its own [v2:5.3.3], where version 1 has ERR_CHUNK: see RefusalOf in
//                   responder.cc. They go to requesters alone: what is marked as an answer, or claims to be an error of
//                   a requester's, is dropped.
// All of it holds its Receive until it is answered, as calls do.
//
// Does not know RPC headers, but for the XID, which must be the same in both headers, and the direction: messages that
// are not calls are dropped.
//
// Sans-IO. Time enters as a parameter. After any command or handler the owner takes commands and requests until there
// are none.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "base/trace.h"
#include "rpcrdma/core/assemble.h"
#include "rpcrdma/core/chunk_planner.h"
#include "rpcrdma/core/connection_terms.h"
#include "rpcrdma/core/credit_budget.h"
#include "rpcrdma/core/engine.h"
#include "rpcrdma/core/patience.h"
#include "rpcrdma/core/pieces.h"
#include "rpcrdma/core/ring.h"
#include "rpcrdma/core/stats.h"
#include "rpcrdma/wire/header.h"
#include "rpcrdma/wire/validate.h"
#include "rpcrdma/xdr/reduced_stream.h"

namespace stagecoach::rpcrdma {

// How often the properties of this end are sent in answer to the peer's, on one connection. One that follows the draft
// tells them once or twice; it is the bound for a peer that answers each answer (docs/decisions/0048).
inline constexpr uint32_t kPropertiesAnswersMax = 8;

// Never 0, never reused on one connection (in 2^32 calls of one receive buffer).
using RequestId = uint64_t;

class Responder final : public ConnectionEngine {
 public:
  struct Config {
    // Receives for calls: the most that is granted. 0: all of the arena, which Start() posts. Otherwise the arena is
    // shared with the other direction: its owner (duplex.h) posts it and hands over messages.
    uint32_t receives = 0;
    // [5666bis:8.3.4#3] Calls with chunks are refused, and calls beyond the credits granted are dropped: they would
    // take the Receives of the other direction. Version 1.
    bool inline_only = false;
    // Version 2: this is the responder of the reverse direction, and follows calls so far. Calls beyond the credits
    // granted are dropped here, too. kNone holds for version 1 as well, in which such calls are dropped.
    std::optional<ReverseSupport> reverse;
    // Largest Send the requester can receive; at most send.slot_size. Version 1: of version 2 the terms know it.
    uint32_t send_inline = 1024;
    // The requester said that its steering tags may be invalidated, and so did we [pvtdata:4.1#1].
    bool may_invalidate = false;
    // Version 2: the device can Send With Invalidate, so that a requester that asks for it has its steering tag
    // invalidated [v2:3.3+4].
    bool can_invalidate = false;
    // RDMA Reads in flight (ORD). With 0 every call with Read chunks is refused.
    uint32_t reads_max = 16;
    // What the ends have settled; outlives the object. Null: version 1, by `list_limits` and `profile`, which do not
    // count otherwise.
    ConnectionTerms* terms = nullptr;
    ChunkListLimits list_limits;
    ChunkDataLimits data_limits;
    ReplyChunkUse reply_chunk_use = ReplyChunkUse::kWheneverOffered;
    ProtocolProfile profile = kRfc5666bis;
    // Version 2: answers a header type of an extension that no RPC message follows, by one of the extension's or by
    // an error of version 2 (header.h); what is neither, or too long for a Send, becomes RDMA2_ERR_SYSTEM. Called on
    // the loop, and pure as far as the engine goes: it must not call it. Null: RDMA2_ERR_INVAL_HTYPE.
    std::function<Header::Body(const Extension&)> answer_extension;
    // Replies with Read chunks, of profiles that have them. At a time: 0 makes none, and otherwise so many Receives are
    // kept for RDMA_DONE, less than there are in all. With shared_receives it is 0, as memory would be exposed to all
    // that share.
    uint32_t exposed_max = 0;
    bool exposes = true;  // false: the Receives are kept, and no such reply is made until SetLimits says otherwise
    uint64_t exposed_bytes_max = 64u << 20;  // of all of them together
    Duration exposed_time = 30s;             // of each
    uint32_t exposed_segments_max = 64;      // of each
    Duration data_time{};                    // see Patience; 0: for ever
    uint64_t data_rate_min = 0;              // bytes per second; 0: none is asked for
    uint32_t segment_length_max = 1u << 30;  // that the device registers at once
    // What bounds the grants beside the number of receive buffers.
    std::vector<std::shared_ptr<CreditBudget>> budgets;
    // The receive buffers are taken, when messages come, from Receives that other connections draw on as well. They are
    // given back by ConnectionMemory::ReturnReceive instead of being posted, and who sends more calls than it may is
    // disconnected: nothing else would stop it from using what was granted to others. The arena has one buffer more
    // than `receives`, for the call too many.
    bool shared_receives = false;
    // Until the first answer one Receive alone is posted: a client has one credit [5666bis:4.3.1#2]. So when its first
    // call is in, the device holds no buffer, and all of them may be replaced (AdoptBuffers). Not with Receives that
    // are shared, with whomever.
    bool one_receive_first = false;
    std::string name = "responder";
  };

  // The arenas' memory and `memory` outlive the object. `send` has at least one slot; Sends beyond its slots wait.
  Responder(const Config& config, BufferArena send, BufferArena receive, ConnectionMemory& memory, TraceSink* trace);

  // --- Commands ---

  // Posts the Receives, unless they are shared.
  void Start();

  // What TakeRequest() handed out. The stream and everything it refers to is valid until the request is completed, the
  // connection lost or not.
  const ReducedStream& stream(RequestId id) const;
  uint32_t xid(RequestId id) const;
  // Version 2: rdma_flags of its header as received, reserved ones among them; 0 in version 1.
  uint32_t flags(RequestId id) const;
  // Room in the `i`-th Write chunk; nullopt when there is no such chunk.
  std::optional<uint64_t> result_room(RequestId id, size_t i) const;

  // Where the reply's message is to be encoded: recycled, of any content and size; the owner may resize it.
  std::vector<std::byte>& reply_buffer(RequestId id);

  struct ReplySpec {
    size_t message_size = 0;  // bytes of reply_buffer() that are the message without its eligible items
    EligibleItems items;
    std::shared_ptr<const void> memory;  // keeps the items' memory; let go when no operation uses it any more
    LastingMemory* lasting = nullptr;    // what all items lie in, kept by `memory`; null: nothing is known of it
  };
  // Ends the request with a reply, which may have to wait (see Read-Read). On kMalformedShape (items that cannot stand
  // in this message) nothing happened, and the request is still open; any other reason why the reply cannot travel
  // becomes ERR_CHUNK [5666bis:5.5#6], in version 2 WRITE_RESOURCE, REPLY_RESOURCE or SYSTEM.
  Result<void, ReplyVerdict> Complete(RequestId id, ReplySpec&& reply, Instant now);
  // Ends the request with ERR_CHUNK, in version 2 with RDMA2_ERR_SYSTEM.
  void Refuse(RequestId id, Instant now);
  // Ends the request without a reply; `why` is for the trace.
  void Drop(RequestId id, std::string_view why, Instant now);
  // Whether the request is there: handed out and not ended, connection lost or not.
  bool open(RequestId id) const { return Find(id) != nullptr; }

  void Close(Disconnect::Why why = Disconnect::Why::kAsked);

  // Whether `id` is the first call of its connection (Config::one_receive_first), of version 1: nothing was answered,
  // and no buffer is in use but that of the call.
  bool may_adopt_buffers(RequestId id) const;
  // Works with these from now on, as many as those before. What those before hold stays where it is until the call is
  // ended.
  void AdoptBuffers(const BufferArena& send, const BufferArena& receive);
  // Of replies of version 1 that are completed from now on, and RDMA Reads; see Config. `exposes`: whether replies may
  // be left for the requester to read, as far as Config has them at all; the Receives for RDMA_DONE stay kept. No call
  // is unanswered but one that is handed out.
  void SetLimits(uint32_t send_inline, uint32_t reads_max, bool exposes);

  // A client's probe is answered, and the terms have its version. Until then nothing is sent.
  void OnVersionSettled(Instant now);

  // Memory that ConnectionMemory had refused may be there now.
  void OnMemoryFreed(Instant now);

  // --- Outputs ---

  std::optional<RequestId> TakeRequest(Instant now);
  bool has_request() const { return NextReady().has_value(); }
  // Calls that arrived and are not answered.
  uint32_t unanswered() const { return unanswered_; }
  // Whether it is for this end to go on with one of them. Otherwise they wait for the peer: to send what is read, or to
  // take what was sent.
  bool busy() const;
  // Counts what shows that the peer is there: its messages, and completed Reads and Sends of ours.
  uint64_t signs_of_life() const { return signs_of_life_; }
  // Replies whose Send has not been reported done.
  uint32_t replies_in_flight() const { return send_.slots - static_cast<uint32_t>(free_send_slots_.size()); }
  // Of Receives shared with the other direction, of its share.
  uint32_t posted_receives() const { return static_cast<uint32_t>(std::max<int64_t>(posted_receives_, 0)); }
  // What the next reply grants; with budgets, what the latest did. At least one, whatever the profile: see
  // ProtocolProfile::zero_grants.
  uint32_t credits_granted() const { return window_.granted(); }
  // Calls that wait for memory, and those that had to and were given it; replies that wait for a send buffer.
  size_t waiting_for_memory() const { return waiting_.size(); }
  uint64_t given_memory() const { return given_memory_; }
  size_t replies_waiting() const { return replies_.size(); }
  // Replies that the requester has not read, and those that wait for them.
  uint32_t exposed() const { return exposed_count_; }
  size_t replies_withheld() const { return withheld_.size(); }
  const ConnectionStats& stats() const { return stats_; }
  // Credits, and each call that is not answered: see Requester::DebugString.
  std::string DebugString() const;

  // --- For the owner of shared Receives, instead of OnReceive ---

  // The Receive `slot` holds a message of this engine: `message` follows `header`.
  void OnMessage(uint32_t slot, Header&& header, ConstBytes message, Instant now);
  // It holds `length` bytes that begin with no header.
  void OnMalformed(uint32_t slot, uint32_t length, const HeaderFault& fault, Instant now);

  // --- ConnectionEngine ---

  void OnReceive(uint32_t slot, uint32_t length, std::optional<uint32_t> invalidated, Instant now) override;
  void OnSendDone(uint32_t slot, Instant now) override;
  void OnReadDone(uint32_t tag, Instant now) override;
  void OnInvalidated(uint32_t tag, Instant now) override;
  void OnDisconnected(Instant now) override;
  std::optional<Command> TakeCommand() override;
  bool Waiting() const override { return !reads_.empty() || replies_in_flight() > 0 || exposed_count_ > 0; }
  std::optional<Instant> Deadline() const override;
  void OnDeadline(Instant now) override;

 private:
  enum class State : uint8_t {
    kPosted,
    kWaitingForMemory,
    kPulling,  // Reads are in flight or to be posted
    kFencingSinks,
    kReady,
    kExecuting,  // handed out
    kReplying,   // waits for a send buffer
    kWithheld,   // waits until replies are exposed no more
    kAnswering,  // waits for a send buffer, for what is not a reply: an error, properties, an extension's
  };

  struct Sink {
    MutableBytes memory;
    bool registered = false;
    uint32_t registration = 0;
    uint32_t local_key = 0;
  };

  struct Call {
    State state = State::kPosted;
    uint32_t generation = 0;
    uint32_t xid = 0;
    uint32_t flags = 0;
    Instant arrived;
    uint64_t arrival = 0;                // counts the calls of the connection
    ChunkLists offered;                  // Write list and Reply chunk
    std::optional<uint32_t> invalidate;  // a steering tag of this call
    Padding padding;
    ConstBytes inline_message;
    CallChunks chunks;
    std::vector<Sink> sinks;  // one for each of chunks.chunks
    size_t next_chunk = 0;    // where pulling goes on
    size_t next_segment = 0;
    uint64_t chunk_offset = 0;
    uint32_t reads_in_flight = 0;
    std::optional<Patience::Debt> owed;  // from the first Read to the last
    uint32_t fencing = 0;
    ReducedStream stream;
    std::vector<std::byte> reply_buffer;
    size_t reply_size = 0;
    EligibleItems reply_items;
    std::shared_ptr<const void> reply_memory;
    LastingMemory* reply_lasting = nullptr;
    ReplyPlan plan;
    Header answer;  // with kAnswering; without credits
  };

  // A Send and the Writes before it, until they are done.
  struct InFlight {
    std::optional<Patience::Debt> owed;  // it holds more than a send buffer
    uint64_t bytes = 0;                  // of all of them
    std::vector<uint32_t> registrations;
    uint32_t fencing = 0;
    std::vector<std::byte> message;
    std::shared_ptr<const void> memory;
  };

  // A reply in memory that the requester reads.
  struct Exposed {
    bool in_use = false;
    bool done = false;  // being fenced
    uint32_t xid = 0;
    uint64_t order = 0;
    Instant until;
    uint64_t bytes = 0;
    SmallVector<uint32_t, 4> registrations;
    uint32_t fencing = 0;
    std::vector<std::byte> message;
    std::shared_ptr<const void> memory;
  };

  // In tags of Invalidate: a send slot, an exposed reply, otherwise a receive slot.
  static constexpr uint32_t kSendTag = 0x80000000u;
  static constexpr uint32_t kExposedTag = 0x40000000u;

  bool TakeMessage(uint32_t slot, Instant now);
  bool IsBeyondCredits() const { return (config_.inline_only || config_.reverse) && unanswered_ >= receives_; }
  void OnCall(uint32_t slot, Header&& header, ConstBytes message, Instant now);
  void OnProperties(uint32_t slot, const Header& header, Instant now);
  void OnExtension(uint32_t slot, const Header& header, Instant now);
  void TakeProperties(const Header& header, Instant now);
  std::optional<Header::Body> RefusalOf(const ChunkLists& lists) const;
  std::optional<Header::Body> RefusalOfUndecoded(uint32_t slot, uint32_t length, const HeaderFault& fault) const;
  void RefuseCall(uint32_t slot, uint32_t xid, Header::Body error, std::string_view why, Instant now);
  Header::Body ErrorFor(const ReplyFault& fault) const;
  Header::Body ErrorOr(Header::Body in_version_2) const;
  Header MakeAnswer(uint32_t xid, Header::Body body) const;
  uint32_t SendLimit() const;
  void Answer(uint32_t slot, Header&& answer);
  void Repost(uint32_t slot);
  void OnAnswer();
  void PostRemaining();
  bool AllocateSinks(Call& call);
  void ServeWaiting(Instant now);
  bool IsBehindWaiting(uint32_t slot) const;
  std::optional<size_t> NextReady() const;
  void PumpReads(Instant now);
  void FenceSinks(uint32_t slot, Instant now);
  void OnPulled(uint32_t slot, Instant now);
  void FreeSinks(Call& call);
  void PumpReplies(Instant now);
  void SendReply(uint32_t slot, uint32_t send_slot, Instant now);
  bool PostWrites(Call& call, InFlight& in_flight);
  uint32_t Grant(uint32_t slot);
  bool HasRoomToExpose(const ReplyPlan& plan) const;
  void ReserveExposure(const ReplyPlan& plan);
  std::optional<uint32_t> Expose(Call& call, SmallVector<Exposure, 4>* exposures, Instant now);
  void OnDone(uint32_t slot, uint32_t xid, Instant now);
  void FenceExposed(uint32_t index, Instant now);
  void ReleaseExposed(uint32_t index, Instant now);
  void ServeWithheld();
  void Post(const PostSend& send, Instant now);
  void SendAnswer(uint32_t slot, uint32_t send_slot, Instant now);
  void CloseRecord(uint32_t slot);
  void ReleaseSendSlot(uint32_t slot);
  Call* Find(RequestId id);
  const Call* Find(RequestId id) const { return const_cast<Responder*>(this)->Find(id); }
  RequestId IdOf(uint32_t slot) const { return (uint64_t{calls_[slot].generation} << 32) | (uint64_t{slot} + 1); }
  static uint32_t SlotOf(RequestId id) { return static_cast<uint32_t>(id & UINT32_MAX) - 1; }

  const Config config_;
  std::optional<ConnectionTerms> own_terms_;
  ConnectionTerms& terms_;
  BufferArena send_;
  BufferArena receive_;
  ConnectionMemory& memory_;
  TraceSink* const trace_;
  const uint32_t receives_;  // that calls may use
  uint32_t send_inline_;
  uint32_t reads_max_;
  bool exposes_;

  std::vector<Call> calls_;          // by receive slot
  std::vector<InFlight> in_flight_;  // by send slot
  std::vector<uint32_t> free_send_slots_;
  Ring<uint32_t> waiting_;  // for memory
  Ring<uint32_t> pulling_;  // with Reads to post
  Ring<uint32_t> ready_;
  Ring<uint32_t> replies_;             // for a send buffer
  Ring<Patience::Debt> replies_owed_;  // of the first of them
  Ring<uint32_t> withheld_;
  std::vector<Exposed> exposed_;
  // With those that are about to be exposed.
  uint32_t exposed_count_ = 0;
  uint64_t exposed_bytes_ = 0;
  uint64_t exposed_ever_ = 0;
  Ring<Command> commands_;
  Ring<uint32_t> reads_;  // the bytes of those in flight, which complete in their order
  uint32_t sends_owed_ = 0;
  Patience patience_;
  uint32_t first_not_posted_ = 0;  // receive buffers from here on were not posted yet
  bool answered_ = false;          // anything
  // Below 0 while calls beyond the credits granted are in Receives that are not of its share.
  int64_t posted_receives_ = 0;
  uint32_t properties_answered_ = 0;
  uint32_t unanswered_ = 0;
  uint64_t signs_of_life_ = 0;
  uint64_t given_memory_ = 0;
  uint32_t overtaken_by_ = 0;  // calls handed out that arrived behind the one that waits first for memory
  CreditWindow window_;
  bool ending_ = false;
  bool over_ = false;
  ConnectionStats stats_;
};

}  // namespace stagecoach::rpcrdma
