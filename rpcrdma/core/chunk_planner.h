// ChunkPlanner: how do this call and its reply travel?
//
// draft-ietf-nfsv4-rfc5666bis-01 sections 4.4 to 4.6 and 5.3. Given the shape of a message and the limits of the
// connection, PlanCall and PlanReply say which bytes go inline, which by Read chunk, Write chunk, Position-Zero Read
// chunk or Reply chunk, or refuse with a reason. A plan names pieces of the message, not memory: the driver exposes
// what the plan lists, in its order, and the header is then encoded from the plan and the resulting steering tags
// (plan, expose, encode).
//
// Pure and total: no state, no I/O, an answer for every input, the same answer every time. The planner does not check
// what a Binding allows: whoever encodes the message marks the eligible items.
//
//   call                                      reply
//   fits inline             RDMA_MSG          may fit inline            nothing offered
//   fits without its        RDMA_MSG +        fits without its          Write chunks
//   largest items           Read chunks       eligible results
//   does not fit            RDMA_NOMSG +      does not fit              Reply chunk (+ Write chunks)
//                           Position-Zero
//                           (+ Read chunks)
//
// Where the profile has Read chunks in replies, a reply that none of these can carry goes as a call does: without its
// longest results, or whole, from the responder's own memory.
//
// A call may rule direct placement out, of its arguments, its results or both: for data that has to stay where it was
// wrapped (RPCSEC_GSS integrity and privacy), and in version 2 for a responder that takes no such chunks. Then nothing
// is eligible, and what does not fit goes into the Position-Zero Read chunk and the Reply chunk as a whole.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "base/small_vector.h"
#include "rpcrdma/wire/header_v1.h"
#include "rpcrdma/wire/profile.h"
#include "rpcrdma/xdr/reduced_stream.h"

namespace stagecoach::rpcrdma {

// What the connection, the peer and the provider allow. Bytes and counts.
struct PlanLimits {
  // Of the version of the connection: what the header takes of a Send.
  HeaderLayout layout = kHeaderLayoutV1;
  // Largest Send the peer can receive and largest Send we can receive, transport header included.
  uint32_t send_inline = 1024;
  uint32_t receive_inline = 1024;
  // Of one header, so that a peer with modest limits follows.
  uint32_t read_segments_max = 64;
  uint32_t write_chunks_max = 16;
  uint32_t segments_per_chunk_max = 64;
  // Segments one call may expose in all, and the longest piece the provider can register or move at once.
  uint32_t exposed_segments_max = 64;
  uint32_t segment_length_max = 1u << 30;
  // What a responder of version 2 has said that it takes: Read chunks of a call, without the Position-Zero Read chunk,
  // and segments of each, that one included. (Of Write chunks, segments_per_chunk_max.)
  uint32_t read_chunks_max = std::numeric_limits<uint32_t>::max();
  uint32_t segments_per_read_chunk_max = std::numeric_limits<uint32_t>::max();
  // A long call of more segments than that is copied into one piece, if it has no more bytes than this. 0: never.
  uint64_t gather_bytes_max = 0;

  friend bool operator==(const PlanLimits&, const PlanLimits&) = default;
  // Counted items that go inline are padded (RDMA_MSGP) so that they begin at a multiple of this, if they are longer
  // than the threshold. 0: none is.
  uint32_t pad_align = 0;
  uint32_t pad_threshold = 256;
  PaddingBase padding_base = PaddingBase::kSend;
};

// A result that may be placed directly.
struct ResultShape {
  uint64_t max_length = 0;     // the longest the result can be
  uint64_t memory_length = 0;  // of the memory provided for it; at least max_length, a little more admits round-up
};

struct CallShape {
  // Bytes of the call without its eligible items and their round-up: RPC header and other arguments.
  uint64_t base_size = 0;
  // In ascending position. Only position and data.size() matter here.
  std::span<const EligibleItem> items;
  // In the order in which the Binding maps them to Write chunks [5666bis:6.2#2] [5666bis:5.2.2#3]; there may be several
  // [5666bis:6.2#1].
  std::span<const ResultShape> results;
  // The longest reply without its eligible results: RPC header, counts and other results.
  uint64_t reply_base_max = 0;
  // Of opaque data in the rest of the call; where it is not known nothing is padded.
  uint64_t longest_inside = UINT64_MAX;
  // False: `items` travel within the call.
  bool direct_arguments = true;
  // False: `results` travel within the reply, and count towards the longest.
  bool direct_results = true;
  // Bytes of a Reply chunk that is offered whatever the limits say. 0: only when the reply may need one.
  uint64_t reply_chunk_min = 0;
};

struct ReplyShape {
  uint64_t base_size = 0;
  std::span<const EligibleItem> items;
};

// Bytes of a message, or memory for a reply.
struct Piece {
  enum class Source : uint8_t {
    kBase,         // the encoded message without its eligible items
    kItem,         // eligible item `index`
    kPad,          // `length` zero bytes of XDR round-up
    kResult,       // memory for result `index`
    kReplyBuffer,  // memory for the whole reply message
    kGathered,     // the encoded message, one copy, with such items as stay in it and their round-up
  };
  Source source = Source::kBase;
  uint32_t index = 0;
  uint64_t offset = 0;  // in the source
  uint64_t length = 0;

  friend bool operator==(const Piece&, const Piece&) = default;
};

enum class PlanRefusal : uint8_t {
  kMalformedShape,   // items out of order, unaligned or past the end; result memory too short; a limit of zero
  kMessageTooLong,   // positions and lengths are 32 bits wide
  kTooManySegments,  // one of the counts in PlanLimits
  kHeaderTooLong,    // not even the header with its chunk lists fits the inline threshold
};
const char* ToString(PlanRefusal refusal);

struct PlannedRead {
  uint32_t position = 0;
  Piece memory;  // its length fits a segment
  friend bool operator==(const PlannedRead&, const PlannedRead&) = default;
};

struct CallPlan {
  // kMsg [5666bis:5.3.1#1] [5666bis:5.3.2#1] or kNomsg; where limits.pad_align says so, kMsgp
  MessageType type = MessageType::kMsg;
  uint32_t pad_align = 0;  // with kMsgp
  uint32_t pad_threshold = 0;
  // What follows the header in the Send, in order; empty for kNomsg.
  SmallVector<Piece, 8> inline_pieces;
  uint64_t inline_bytes = 0;  // sum of inline_pieces
  HeaderLayout layout = kHeaderLayoutV1;
  size_t header_size = 0;
  // The Read list, one entry per segment, in order of position.
  SmallVector<PlannedRead, 4> reads;
  // What the kGathered pieces of `reads` are a copy of, in order; empty when there are none.
  std::vector<Piece> gathered_pieces;
  uint64_t gathered_bytes = 0;  // sum of gathered_pieces
  // The Write list: segments of all chunks in order, and how many belong to each chunk.
  SmallVector<Piece, 4> write_segments;
  SmallVector<uint32_t, 4> write_counts;
  // The Reply chunk; empty when none is offered. It may stand beside a Position-Zero Read chunk [5666bis:4.6.3#5].
  SmallVector<Piece, 4> reply_segments;
  uint64_t reply_capacity = 0;  // of the buffer the Reply chunk needs; 0 when none is offered

  size_t exposed_segments() const { return reads.size() + write_segments.size() + reply_segments.size(); }
  // The size of the Send.
  uint64_t send_size() const { return header_size + inline_bytes; }

  friend bool operator==(const CallPlan&, const CallPlan&) = default;
};

Result<CallPlan, PlanRefusal> PlanCall(const CallShape& shape, const PlanLimits& limits);

// Where exposed memory can be reached by the peer.
struct Exposure {
  uint32_t handle = 0;
  uint64_t offset = 0;
};
// The header of a planned call. `exposures`: one for each entry of plan.reads, then of plan.write_segments, then of
// plan.reply_segments; their number must be plan.exposed_segments(). `inv_handle`, of version 2: one of theirs that the
// responder may invalidate, or 0.
Header MakeCallHeader(const CallPlan& plan, uint32_t xid, uint32_t credits, std::span<const Exposure> exposures,
                      uint32_t inv_handle = 0);

// One RDMA Write: a contiguous piece of the reply into a contiguous piece of one offered segment.
struct PlannedWrite {
  Piece source;    // source.length == target.length
  Segment target;  // handle, and the exact bytes
};

struct ReplyPlan {
  MessageType type = MessageType::kMsg;  // kMsg, or kNomsg when the message goes by Reply chunk or Read chunk
  ChunkLists chunks;                     // what was offered, lengths rewritten; no Read list
  // The Read list, of the responder's own memory: as in CallPlan.
  SmallVector<PlannedRead, 4> reads;
  uint64_t read_bytes = 0;  // sum of reads
  SmallVector<Piece, 8> inline_pieces;
  uint64_t inline_bytes = 0;
  HeaderLayout layout = kHeaderLayoutV1;
  size_t header_size = 0;
  // To be carried out before the Send.
  SmallVector<PlannedWrite, 8> writes;
  uint64_t direct_bytes = 0;  // by Write chunk
  uint64_t reply_bytes = 0;   // by Reply chunk

  uint64_t send_size() const { return header_size + inline_bytes; }
};

// Why the offered chunks cannot carry this reply. Every one of them means RDMA_ERROR, of version 1 with ERR_CHUNK
// [5666bis:5.5#6], but kMalformedShape, which is the service's mistake (SYSTEM_ERR).
enum class ReplyVerdict : uint8_t {
  kMalformedShape,
  kWriteChunkTooSmall,  // a result is longer than the Write chunk meant for it
  kNoRoomForReply,      // neither the Send nor the Reply chunk (if any) is large enough
  kHeaderTooLong,       // the offered lists, returned, do not fit the inline threshold
};
const char* ToString(ReplyVerdict verdict);

// With what the requester would have to offer instead, which version 2 tells it.
struct ReplyFault {
  ReplyVerdict verdict = ReplyVerdict::kMalformedShape;
  uint32_t chunk = 0;   // kWriteChunkTooSmall: the first such Write chunk, from 0
  uint64_t length = 0;  // bytes: of its result, without round-up; kNoRoomForReply: that would go by Reply chunk

  friend bool operator==(const ReplyFault&, const ReplyFault&) = default;
  friend bool operator==(const ReplyFault& fault, ReplyVerdict verdict) { return fault.verdict == verdict; }
};
inline const char* ToString(const ReplyFault& fault) {
  return ToString(fault.verdict);
}

// What becomes of a Reply chunk that was offered and can hold the reply, when the reply would fit inline, too. Either
// is right for a requester: the document wants the first [5666bis:4.6.3#4], RFC 8166 leaves it to the responder
// (docs/decisions/0024). The second saves the RDMA Write, and a requester its invalidation of several STags.
enum class ReplyChunkUse : uint8_t { kWheneverOffered, kWhenNeeded };

// What the version and the profile of the connection have of replies.
struct ReplyCustoms {
  HeaderLayout layout = kHeaderLayoutV1;
  bool lengths_count_round_up = false;  // ProtocolProfile::written_lengths_count_round_up
  // Segments of the responder's own memory that one reply may expose, and their longest. 0: no Read chunks.
  uint32_t read_segments_max = 0;
  uint32_t segment_length_max = 1u << 30;
};

// `offered` are the (validated) chunk lists of the call; `send_inline` the largest Send the requester can receive.
Result<ReplyPlan, ReplyFault> PlanReply(const ReplyShape& shape, const ChunkLists& offered, uint32_t send_inline,
                                        ReplyChunkUse use = ReplyChunkUse::kWheneverOffered,
                                        const ReplyCustoms& customs = {});
// `exposures`: one for each entry of plan.reads.
Header MakeReplyHeader(const ReplyPlan& plan, uint32_t xid, uint32_t credits, std::span<const Exposure> exposures = {});

// Spreads `length` bytes over `segments` in order: each length is rewritten to what the segment receives, those that
// receive nothing to zero [5666bis:4.4.5.1#1]; their number stays [5666bis:4.4.5#2]. False, and nothing is changed,
// when they are too small together.
[[nodiscard]] bool FillSegments(std::span<Segment> segments, uint64_t length);

std::string ToString(const CallPlan& plan);
std::string ToString(const ReplyPlan& plan);

}  // namespace stagecoach::rpcrdma
