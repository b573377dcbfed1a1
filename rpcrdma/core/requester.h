// Requester: the calling end of an RPC-over-RDMA connection.
//
// draft-ietf-nfsv4-rfc5666bis-01 (RFC 8166), draft-cel-nfsv4-rpcrdma-version-two-09. A call is planned when submitted,
// waits for a credit, is exposed, encoded and sent, and ends when its reply is in *and* no steering tag of it is valid
// any more (fence before complete). Sends carry copies in the connection's own buffers, so the memory of a call is
// referenced by steering tags alone.
//
//   Submit -> queued -> sent -> fencing -> outcome -> Release
//                |        |        ^
//                |        +--------+  reply, RDMA_ERROR, bad reply, Cancel
//                +-------------------- Cancel, deadline
//
// Which version is in ConnectionTerms. In version 2
//   - an RDMA2_ERROR that says how a call could be served has it sent again: with the same XID, the same message and
//     the same deadline, otherwise planned, once every steering tag of the first attempt is invalid, and for a credit
//     of its own (docs/decisions/0050). So the arrow from fencing goes back to queued, a bounded number of times. What
//     the responder has said of its limits holds for later calls as well.
//   - a call names a steering tag that the responder may invalidate with its reply.
//   - SendProperties exchanges properties, and SubmitExtension sends messages of extensions: what they send takes a
//     credit until it is answered, and exposes nothing.
//   - while the terms are probing, one call is submitted: the probe.
//
// Where the profile has replies with Read chunks ("Read-Read", [2004:3.6#1] [5666:3.5#1]) such a call is pulling
// between sent and fencing: what the responder exposes is read into memory of this end's own, `reads_max` pieces at a
// time. Then the responder is told by RDMA_DONE that its memory may go; also when the call was cancelled or the reply
// is of no use, and for a reply to no call at all. What RDMA_DONE costs is told in credits.h. A deadline that passes
// while Reads are in flight ends the connection, as for a sent call: what they write to must not be anybody else's.
//
// What a hostile or broken responder may send: replies to nobody, twice, too short, malformed, with chunk lists that
// are not ours. Each is counted, its Receive is posted again, and at most the one call it names ends with an error.
//
// In version 1 a call is sent at most once on a connection. When a sent call's deadline passes the connection ends, and
// with it every outstanding call: its reply may still come and must not meet memory that is not the call's any more. A
// call that exposes nothing because nothing may be exposed (inline_only) leaves the connection alone: its credit stays
// spent until its reply arrives. A call that is answered and not fenced a second after its deadline ends it as well.
//
// Does not know RPC headers: a message is bytes, of which the first four are the XID that this class fills in.
//
// Sans-IO. Time enters as a parameter. After any command or handler the owner takes commands and outcomes until there
// are none.
#pragma once

#include <algorithm>
#include <cstdint>
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
#include "rpcrdma/core/credits.h"
#include "rpcrdma/core/engine.h"
#include "rpcrdma/core/pieces.h"
#include "rpcrdma/core/ring.h"
#include "rpcrdma/core/stats.h"
#include "rpcrdma/core/xid.h"
#include "rpcrdma/wire/header.h"
#include "rpcrdma/wire/header_v2.h"
#include "rpcrdma/wire/validate.h"
#include "rpcrdma/xdr/reduced_stream.h"

namespace stagecoach::rpcrdma {

// Never 0, never reused on one connection (in 2^32 calls of one slot).
using CallId = uint64_t;

enum class SubmitRefusal : uint8_t {
  kNotConnected,
  kQueueFull,
  kTooLarge,   // PlanRefusal: no plan fits the limits of the connection
  kNotSpoken,  // an extension's message, of a type that is not known, or where version 2 is not spoken
  kNotServed   // of the reverse direction: the client has said that it serves none (ReverseSupport::kNone)
};

struct CallFailure {
  enum class Kind : uint8_t {
    kNoCredit,  // its deadline passed before a credit was free: not sent
    kTimedOut,  // its deadline passed after it was sent: the connection ends, unless calls are inline only
    kConnectionLost,
    kCancelled,
    kClosed,     // Close() was called
    kMemory,     // the device refused to register its memory: not sent; or memory to read its reply into
    kErrVers,    // RDMA_ERROR: `versions` says which the responder speaks
    kErrChunk,   // RDMA_ERROR
    kBadHeader,  // `header` says how the reply's transport header is wrong
    kBadChunks,  // `chunk` says how its chunk lists disagree with what was offered
    // Of version 2, from here on. RDMA2_ERROR, by its code: `error` has what it says. kErrVers and kErrOther as well.
    kErrBadXdr,
    kErrInvalHtype,
    kErrReadChunks,
    kErrWriteChunks,
    kErrSegments,
    kErrWriteResource,
    kErrReplyResource,
    kErrSystem,
    kErrOther,
    kBadDirection,  // `direction` says how what the reply is disagrees with its flag
    kNotServed,     // of the reverse direction: the client has said meanwhile that it serves none
    kTooLarge       // what the peer has said of itself since it was submitted leaves no plan for it
  };
  Kind kind = Kind::kConnectionLost;
  bool sent = false;  // the responder may have executed it
  ErrVers versions;
  HeaderFault header;
  ChunkFault chunk = ChunkFault::kNoMessage;
  Header::Body error;  // one of the errors, if `kind` says so
  DirectionFault direction = DirectionFault::kNoDirection;
};
// "timed_out": a word for traces and dumps.
const char* ToString(CallFailure::Kind kind);

// The end of a call. Views point into the receive buffer, the reply memory and the call's result memory; they are valid
// until Release().
struct CallOutcome {
  CallId call = 0;
  uint64_t cookie = 0;
  std::optional<CallFailure> failure;
  // Without failure: the RPC reply, its header included.
  ReducedStream reply;
  // Backs reply.base when the reply was long; may be kept.
  std::unique_ptr<std::byte[]> reply_memory;
  // Backs reply.reads when the reply has any and was not long by Read chunk, in which case reply_memory does; may be
  // kept.
  std::unique_ptr<std::byte[]> read_memory;
  // What was written into each result memory, by chunk; empty when no Write chunk was offered.
  SmallVector<uint64_t, 2> placed;
  // Of a result that turned out longer than its memory, and was given memory of this end's own: that. By result, null
  // for the others; empty when there is none. May be kept.
  std::vector<std::unique_ptr<std::byte[]>> grown;
  uint32_t resends = 0;
  // Of SubmitExtension, without failure: the answer. `reply` is then empty.
  std::optional<Extension> extension;
  // The version in whose layout the answer came, error or not: what an answer to the probe shows. 0: none came.
  uint32_t answered_in = 0;
};

// How an exchange of properties ended.
enum class ExchangeEnd : uint8_t {
  kAnswered,   // the terms have the peer's properties, marked as an answer
  kAnnounced,  // the terms have the peer's properties, told without being asked; whether ours are answered is open
  kRefused,    // by an RDMA2_ERROR, or an answer that cannot be read: the peer may go by the defaults
  kUnanswered  // in time. Later properties still count
};
const char* ToString(ExchangeEnd end);

namespace internal {
// One registration of a call's memory.
struct ExposedSegment {
  uint32_t registration = 0;
  uint32_t handle = 0;
  bool invalidated_by_peer = false;
  bool window = false;  // Registration::window
};
}  // namespace internal

class Requester final : public ConnectionEngine {
 public:
  struct Config {
    uint32_t credits = 64;  // the most that is ever asked for; at most `receives`
    // Receives for replies. 0: all of the arena, which Start() posts. Otherwise the arena is shared with the other
    // direction: its owner (duplex.h) posts it and hands over messages, and replies to this many calls find room.
    uint32_t receives = 0;
    // No chunks [5666bis:8.3.4#3]: a call that would need one is kTooLarge. Nothing of such a call can be reached by
    // the peer, so its timing out leaves the connection alone.
    bool inline_only = false;
    uint32_t queued_max = 4096;
    PlanLimits limits;  // send_inline at most send.slot_size; in version 2 layout and sizes are those of the terms
    ProtocolProfile profile = kRfc5666bis;
    // What the ends of the connection have settled; outlives the object. Null: version 1, by `profile`.
    ConnectionTerms* terms = nullptr;
    // Version 2. Of the reverse direction: the peer's level says whether calls may have chunks (inline_only says it for
    // version 1), and a call without any that times out leaves the connection alone.
    bool reverse = false;
    // Bytes of memory of this end's own that resends may take for one call, together: longer Write chunks, a longer
    // Reply chunk, one piece out of many segments. 0: none. The Reply chunk that takes the place of Write chunks does
    // not count: it is as long as the memory that the caller has offered for them.
    uint64_t grown_bytes_max = 1u << 20;
    uint32_t resends_max = 4;  // of one call
    // Whether calls that the responder has executed, and could not answer, are sent again: its replay cache has the
    // reply. Otherwise they end.
    bool resend_executed = true;
    // For replies with Read chunks. RDMA Reads in flight (ORD): with 0 they are refused; and bytes that are read, over
    // all calls, until their outcomes are taken: replies that ask for more are refused, and wait for others that they
    // have no room beside.
    uint32_t reads_max = 0;
    uint64_t read_bytes_max = 32u << 20;
    // Whether Write chunks that were returned up to three bytes longer than they were offered are taken as filled. The
    // reply says by how much (ChunkData::beyond), and whoever decodes it may take that or not. Otherwise it is refused.
    bool lengths_may_be_wrong = false;
    ChunkListLimits list_limits;
    std::string name = "requester";
  };

  // The arenas' memory, `memory` and `xids` outlive the object.
  Requester(const Config& config, BufferArena send, BufferArena receive, ConnectionMemory& memory, XidSource& xids,
            TraceSink* trace);

  // --- Commands ---

  // Posts the Receives, unless they are shared.
  void Start();

  // A message to fill: recycled, of any content and size. Its bytes beyond the message do not matter.
  std::vector<std::byte> TakeBuffer();
  void ReturnBuffer(std::vector<std::byte> buffer);

  struct CallSpec {
    std::vector<std::byte> buffer;  // from TakeBuffer()
    size_t message_size = 0;        // bytes of `buffer` that are the message without its eligible items
    EligibleItems items;            // memory unchanged until the outcome
    // Memory for eligible results, untouched by the caller until the outcome. Whatever the outcome, what of it is not
    // `placed` may have been written to [5666bis:4.4.5.1#2] [5666:3.4#8].
    SmallVector<MutableBytes, 2> results;
    // What all items and results lie in; null: nothing is known of their memory. Held until Release().
    std::shared_ptr<LastingMemory> lasting;
    uint64_t reply_base_max = 0;           // longest reply without its eligible results
    bool direct_placement = true;          // false: no chunks for items and results (CallShape::direct_placement)
    uint64_t longest_inside = UINT64_MAX;  // CallShape::longest_inside
    std::optional<Instant> deadline;
    uint64_t cookie = 0;  // comes back in the outcome
    // Of a call that another connection may have carried already; not in use on this one. Else the next of XidSource.
    std::optional<uint32_t> xid;
    // Version 2: flags that the extensions of the terms define, for the header of this call. Those that the peer has
    // not shown that it takes are left out (ConnectionTerms::flags_taken).
    uint32_t flags = 0;
  };
  // The buffer comes back through the pool in any case.
  Result<CallId, SubmitRefusal> Submit(CallSpec&& spec, Instant now);

  // Version 2, once it is settled.

  // Tells the peer this end's properties (RDMA2_CONNPROP, XID 0), ahead of calls that wait, and waits until `until` for
  // its own, marked as an answer or not; calls wait for the end of that. Once in the life of a connection. A peer that
  // has told its own before is not waited for.
  void SendProperties(Instant until, Instant now);

  // A message of an extension: a header type without an RPC message.
  struct ExtensionSpec {
    uint32_t type = 0;            // one that the extensions of the terms have
    std::vector<std::byte> body;  // what the header has behind the prefix
    uint32_t flags = 0;           // CallSpec::flags
    std::optional<Instant> deadline;
    uint64_t cookie = 0;  // comes back in the outcome
  };
  // Ends, as a call does, by an answer of the same XID that is an extension's header or an RDMA2_ERROR. When its
  // deadline passes, or it is cancelled, the connection goes on, a later answer is one to nobody, and its credit is
  // back with the next answer to what is sent later.
  Result<CallId, SubmitRefusal> SubmitExtension(ExtensionSpec&& spec, Instant now);

  // The terms have properties of the peer that did not come to this engine: calls that wait go by them, and an exchange
  // under way is over.
  void OnPeerProperties(Instant now);

  // Of an id that is over: nothing.
  void Cancel(CallId call, Instant now);
  // Of calls from now on, and of RDMA Reads (Config::reads_max); see Config. No call waits, and no Read is in flight.
  void SetLimits(const PlanLimits& limits, uint32_t reads_max);
  // Ends the connection; outstanding calls end with kClosed.
  void Close(Instant now);

  // --- Outputs ---

  // Of calls from now on.
  PlanLimits limits() const;
  bool has_outcome() const { return !outcomes_.empty(); }
  std::optional<CallOutcome> TakeOutcome(Instant now);
  // Ends the views of an outcome and gives its Receive back.
  void Release(CallId call, Instant now);
  // How the exchange that SendProperties began has ended, once.
  std::optional<ExchangeEnd> TakeExchangeEnd();

  // How many more calls have a credit waiting for them.
  uint32_t room() const;
  // Whether a call of this XID was sent and not answered, cancelled or not.
  bool Knows(uint32_t xid) const { return xid_table_.Find(xid).has_value(); }

  // Calls queued, sent, pulling or fencing; messages of extensions among them.
  size_t outstanding() const { return outstanding_; }
  // Cancelled calls whose replies are not in: each keeps its credit.
  size_t abandoned() const { return abandoned_.size(); }
  // Entries of the table of calls, free ones included: as many as were ever outstanding at a time.
  size_t call_records() const { return calls_.size(); }
  const Credits& credits() const { return credits_; }
  // Receives that are posted, or will be once their commands are taken; of shared ones, of its share.
  uint32_t posted_receives() const { return static_cast<uint32_t>(std::max<int64_t>(posted_receives_, 0)); }
  const ConnectionStats& stats() const { return stats_; }
  // Credits, buffers and each call that is not over, in lines of their own, indented: for people, when a world has
  // stopped moving. Names no memory.
  std::string DebugString() const;

  // --- For the owner of shared Receives, instead of OnReceive ---

  // The Receive `slot` holds a message of this engine: `message` follows `header`.
  void OnMessage(uint32_t slot, Header&& header, ConstBytes message, Instant now);
  // It holds `length` bytes that begin with no header.
  void OnMalformed(uint32_t slot, uint32_t length, const HeaderFault& fault, Instant now);
  // The peer invalidated this steering tag of ours, whatever message that came with.
  void OnInvalidatedByPeer(uint32_t handle, Instant now);

  // --- ConnectionEngine ---

  void OnReceive(uint32_t slot, uint32_t length, std::optional<uint32_t> invalidated, Instant now) override;
  void OnSendDone(uint32_t slot, Instant now) override;
  void OnReadDone(uint32_t tag, Instant now) override;
  void OnInvalidated(uint32_t tag, Instant now) override;
  void OnDisconnected(Instant now) override;
  std::optional<Command> TakeCommand() override;
  bool Waiting() const override { return outstanding_ > 0 || exchanging(); }
  std::optional<Instant> Deadline() const override;
  void OnDeadline(Instant now) override;

 private:
  enum class State : uint8_t { kFree, kQueued, kSent, kPulling, kFencing, kOver };

  // What is read for a reply.
  struct Pull {
    CallChunks chunks;
    std::unique_ptr<std::byte[]> memory;  // of all chunks, one behind the other
    uint64_t bytes = 0;
    uint32_t local_key = 0;
    size_t next_segment = 0;
    uint64_t next_byte = 0;
    uint32_t in_flight = 0;
  };

  // What of a CallShape is not in the message: the caller's wish, and what errors of the responder have made of it.
  struct Wish {
    uint64_t reply_base_max = 0;
    uint64_t longest_inside = UINT64_MAX;
    bool direct_arguments = true;
    bool direct_results = true;
    uint64_t reply_chunk_min = 0;
  };

  // How a call is to be sent again, once its STags are invalid: till then the peer may still use what it was offered.
  struct Attempt {
    Wish wish;
    CallPlan plan;
    PlanLimits planned_by;
    // Longer memory for result `grown_index`, if there is any.
    size_t grown_index = 0;
    uint64_t grown_size = 0;
    std::unique_ptr<std::byte[]> grown;
  };

  struct Call {
    State state = State::kFree;
    uint32_t generation = 0;
    uint32_t xid = 0;
    std::optional<uint32_t> wanted_xid;
    uint64_t cookie = 0;
    Instant submitted;
    std::optional<Instant> deadline;
    std::vector<std::byte> buffer;
    size_t message_size = 0;
    EligibleItems items;
    SmallVector<MutableBytes, 2> results;
    std::shared_ptr<LastingMemory> lasting;
    CallPlan plan;
    ChunkLists offered;
    std::unique_ptr<std::byte[]> reply_memory;
    SmallVector<internal::ExposedSegment, 4> exposed;
    uint32_t invalidating = 0;  // Invalidate commands not answered yet
    uint32_t stags_valid = 0;   // registrations not reported invalid: counted beside `exposed`, which says what to do
    std::optional<CallFailure> failure;
    std::optional<uint32_t> receive_slot;  // holds the reply
    Header reply_header;
    ConstBytes reply_inline;
    CutLengths cut_lengths;  // of its Write list
    std::unique_ptr<Pull> pull;
    uint32_t dones_before = 0;  // Credits::OnSent
    uint32_t answered_in = 0;   // CallOutcome

    // Version 2.
    uint32_t flags = 0;
    Wish wish;
    PlanLimits planned_by;
    uint32_t inv_handle = 0;                 // that the responder may invalidate; 0: none
    std::optional<uint64_t> invalidated_at;  // it has: so many messages had come before
    std::unique_ptr<Attempt> next;           // fencing, and not over
    uint32_t resends = 0;
    bool fewer_segments = false;                      // resent because of ERR_SEGMENTS
    std::vector<std::unique_ptr<std::byte[]>> grown;  // CallOutcome
    std::unique_ptr<std::byte[]> gathered;            // CallPlan
    std::optional<Extension> extension;               // instead of a call: what is sent, and then its answer
  };

  // RDMA2_CONNPROP of this end. kGivenUp: no answer is waited for, and one may still come.
  enum class Exchange : uint8_t { kNone, kWaiting, kSent, kGivenUp, kOver };

  // What the responder has said that it takes (RDMA2_ERROR).
  struct PeerTakes {
    uint32_t read_chunks = UINT32_MAX;
    uint32_t write_chunks = UINT32_MAX;
    uint32_t segments = UINT32_MAX;  // of a chunk
  };

  static constexpr uint32_t kAbandoned = UINT32_MAX;  // in xid_table_: the call is over, its reply is not in yet

  struct Abandoned {
    uint32_t xid = 0;
    std::optional<Instant> deadline;
    uint32_t dones_before = 0;
    friend bool operator==(const Abandoned& a, uint32_t xid) { return a.xid == xid; }
  };

  // RDMA_DONE that may be sent, and waits for a send buffer.
  struct OwedDone {
    uint32_t xid = 0;
    std::optional<uint32_t> receive_slot;  // to be posted again when it is sent: who asks for many gets no further
  };

  uint32_t AllocateCall();
  void FreeCall(uint32_t index);
  Call* Find(CallId id);
  CallId IdOf(uint32_t index) const;
  void Pump(Instant now);
  uint32_t FlagsFor(uint32_t index, Instant now) const;
  void Transmit(uint32_t index, Instant now);
  void DrawXid(Call& call);
  bool IsServed() const;
  bool MayUseChunks() const;
  bool Permits(const CallPlan& plan) const;
  Result<CallPlan, PlanRefusal> Plan(size_t message_size, std::span<const EligibleItem> items,
                                     std::span<const MutableBytes> results, const Wish& wish,
                                     const PlanLimits& limits) const;
  bool PlanAgain(uint32_t index, Instant now);
  void Gather(Call& call);
  bool Expose(uint32_t index, SmallVector<Exposure, 8>* exposures, Instant now);
  ConstBytes MemoryOf(const Call& call, const Piece& piece) const;
  uint32_t InvHandle(const Call& call) const;
  void CountSent(const Call& call);
  void OnReplyTo(uint32_t index, uint32_t slot, Header&& header, ConstBytes message, Instant now);
  std::optional<uint32_t> GrantOf(const Header& header) const;
  void CountHeader(const Header& header, Instant now);
  void CountInvalidation(const Call& call, bool error);
  std::unique_ptr<Attempt> AttemptAfter(Call& call, const Header::Body& error);
  bool Grow(const Call& call, const ErrWriteResource& error, Attempt* attempt) const;
  uint64_t OwnBytes(const Call& call, const Attempt& attempt) const;
  void Resend(uint32_t index, std::unique_ptr<Attempt> attempt, const Header::Body& error, Instant now);
  void Requeue(uint32_t index, Instant now);
  bool MayTimeOut(const Call& call) const;
  void PumpExchange(Instant now);
  void OnProperties(uint32_t slot, const Header& header, Instant now);
  void EndExchange(ExchangeEnd end, Instant now);
  void GiveExchangeUp(ExchangeEnd end, Instant now);
  void EndExchangeIfTold(Instant now);
  bool exchanging() const { return exchange_ == Exchange::kWaiting || exchange_ == Exchange::kSent; }
  void TracePlan(uint32_t index, Instant now);
  void TraceHeld(std::string_view why, Instant now);
  void TraceReply(uint32_t index, const Header& header, ConstBytes message, Instant now);
  void TraceOver(uint32_t index, const CallOutcome& outcome, Instant now);
  void Abandon(Call& call, Instant now);
  void CountReply(uint32_t index, uint32_t xid, std::optional<uint32_t> grant);
  bool OwesDone(const Header& header) const;
  void PumpDones(Instant now);
  bool BeginPull(Call& call);
  void PumpPulls(Instant now);
  void EndPull(uint32_t index);
  void ReleaseReadBytes(Call& call);
  void Fence(uint32_t index, Instant now);
  void Conclude(uint32_t index, Instant now);
  void FailWith(uint32_t index, CallFailure::Kind kind, Instant now);
  void PostReceiveAgain(uint32_t slot);
  void LowerDeadline(const std::optional<Instant>& deadline);
  void EndConnection(Disconnect::Why why);

  const Config config_;
  std::optional<ConnectionTerms> own_terms_;
  ConnectionTerms& terms_;
  const BufferArena send_;
  const BufferArena receive_;
  ConnectionMemory& memory_;
  XidSource& xids_;
  TraceSink* const trace_;
  const uint32_t receives_;  // that replies may use
  PlanLimits limits_;
  uint32_t reads_max_;

  Credits credits_;
  std::vector<std::unique_ptr<Call>> calls_;
  std::vector<uint32_t> free_calls_;
  std::vector<std::vector<std::byte>> buffers_;
  std::vector<uint32_t> free_send_slots_;
  Ring<uint32_t> queue_;
  Ring<uint32_t> outcomes_;
  Ring<Command> commands_;
  Ring<Abandoned> abandoned_;
  Ring<uint32_t> pulls_;  // calls with Reads to post, in order
  Ring<OwedDone> dones_;
  Ring<uint32_t> resending_;  // XIDs of calls that are to be sent again, and not in xid_table_
  PeerTakes peer_takes_;
  Exchange exchange_ = Exchange::kNone;
  Instant exchange_until_;
  std::optional<ExchangeEnd> exchange_end_;  // to be taken
  uint32_t reads_in_flight_ = 0;
  uint64_t read_bytes_ = 0;  // of pulls with memory whose outcomes were not taken
  XidTable xid_table_;
  // Below 0 while a message that no call of ours asked for is in a Receive that is not of its share.
  int64_t posted_receives_ = 0;
  size_t outstanding_ = 0;
  std::optional<Instant> next_deadline_;
  std::string_view held_for_;  // why calls wait, as the trace was told; empty while none does
  bool ending_ = false;        // Disconnect was emitted
  bool closed_ = false;        // by Close()
  bool over_ = false;          // OnDisconnected
  ConnectionStats stats_;
};

}  // namespace stagecoach::rpcrdma
