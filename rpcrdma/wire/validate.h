// Judges the chunk lists of a decoded header: do they make sense for a call, or for the reply to a call we made?
//
// draft-ietf-nfsv4-rfc5666bis-01 sections 4.4, 5.2 and 5.5. Pure functions; every sum is checked. They run before
// anything acts on a list [5666bis:5.5#1] [5666:4.2#1] [2004:5.3#1].
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "base/bytes.h"
#include "base/result.h"
#include "base/small_vector.h"
#include "rpcrdma/wire/header.h"
#include "rpcrdma/wire/profile.h"

namespace stagecoach::rpcrdma {

// Bounds on what the chunks of one call may ask of us. Bytes.
struct ChunkDataLimits {
  uint64_t read_bytes_max = 64u << 20;  // over all Read chunks, the Position-Zero Read chunk included
  uint64_t write_bytes_max = 1u << 30;  // offered, over all Write chunks and the Reply chunk
};

enum class ChunkFault : uint8_t {
  kNotAMessage,            // RDMA_DONE or RDMA_ERROR
  kUnalignedPosition,      // [5666bis:4.4.4.1#4]
  kOverlappingReadChunks,  // a chunk begins inside the previous one's data
  kPositionPastEnd,        // a chunk belongs behind the end of the message
  kPositionZeroInMsg,      // a Position-Zero Read chunk beside an inline message
  kNoPositionZero,         // RDMA_NOMSG call without a Position-Zero Read chunk [5666bis:4.6.3#2]
  kMessageWithNomsg,       // bytes after the header of an RDMA_NOMSG message
  kNoMessage,              // RDMA_MSG without an RPC message
  kTooManyReadBytes,
  kTooManyWriteBytes,
  kAddressWraps,        // offset + length of a segment passes 2^64
  kXidMismatch,         // [5666bis:5.1.1#1]
  kUnexpectedReadList,  // a reply with Read chunks, where none are looked for
  kWriteListChanged,    // a reply whose Write list is not the one offered [5666bis:4.4.5#2]
  kReplyChunkChanged,
  kReturnedTooMuch,  // a returned length above the one offered
  kNoReplyChunk,     // RDMA_NOMSG reply without the Reply chunk, or with one we did not offer
  kTwoReplies,       // of an inline reply, a Reply chunk that is said to hold one and a Position-Zero Read chunk, two
  kInvHandleForeign  // a handle to invalidate that is none of the call's segments' [v2:3.3+3]
};
const char* ToString(ChunkFault fault);

// A Read chunk: the segments of one position.
struct ReadChunk {
  uint32_t position = 0;
  uint32_t first = 0;  // in CallChunks::segments
  uint32_t count = 0;
  uint64_t length = 0;  // sum of the segments, without round-up that is not there

  friend bool operator==(const ReadChunk&, const ReadChunk&) = default;
};

// The Read list of a call, or of a reply where these have one, grouped into chunks of ascending position. Senders
// should sort the list but need not [5666bis:5.2#2]; segments of one position keep their order.
struct CallChunks {
  ReadList segments;
  SmallVector<ReadChunk, 4> chunks;  // a Position-Zero Read chunk, if any, is the first
  uint64_t message_length = 0;       // of the RPC message with every chunk and round-up in place

  bool has_position_zero() const { return !chunks.empty() && chunks.front().position == 0; }
  std::span<const ReadSegment> segments_of(const ReadChunk& chunk) const {
    return segments.view().subspan(chunk.first, chunk.count);
  }
};

// For a call as a responder received it: `inline_message` is what followed the header.
Result<CallChunks, ChunkFault> ValidateCall(const Header& header, ConstBytes inline_message,
                                            const ChunkDataLimits& limits = {},
                                            const ProtocolProfile& profile = kRfc5666bis);

// For the reply to a call whose chunk lists were `offered`: its Read chunks, of which most profiles allow none. A Write
// list or Reply chunk that is absent although offered counts as unused.
Result<CallChunks, ChunkFault> ValidateReply(const Header& header, ConstBytes inline_message, const ChunkLists& offered,
                                             const ProtocolProfile& profile = kRfc5666bis,
                                             const ChunkDataLimits& limits = {});

// By Write chunk: how many bytes were cut off its length. Empty: none of any.
using CutLengths = SmallVector<uint8_t, 2>;

// Of a Write list whose lengths count round-up: cuts off what goes beyond the memory that was offered, at most three
// bytes of each chunk. Whoever decodes judges by that too (ChunkData::beyond).
CutLengths CutRoundUp(WriteList* returned, const WriteList& offered);

// The same of a Write list whose lengths may be wrong (WrongLengths), whatever they count.
CutLengths CutWrongLengths(WriteList* returned, const WriteList& offered);

}  // namespace stagecoach::rpcrdma
