#include "rpcrdma/wire/validate.h"

#include <algorithm>
#include <limits>

namespace stagecoach::rpcrdma {
namespace {

bool Wraps(const Segment& segment) {
  return segment.length > 0 && segment.offset > std::numeric_limits<uint64_t>::max() - (segment.length - 1);
}

std::optional<ChunkFault> CheckReads(const ReadList& reads, const ChunkDataLimits& limits,
                                     const ProtocolProfile& profile) {
  uint64_t total = 0;
  for (const ReadSegment& entry : reads) {
    // [5666bis:4.4.4.1#4] Of entries that may be the rest of others, Place says it.
    if (entry.position % 4 != 0 && !profile.read_entries_join) return ChunkFault::kUnalignedPosition;
    if (Wraps(entry.target)) return ChunkFault::kAddressWraps;
    total += entry.target.length;
  }
  if (total > limits.read_bytes_max) return ChunkFault::kTooManyReadBytes;
  return std::nullopt;
}

std::optional<ChunkFault> CheckOffered(const ChunkLists& lists, const ChunkDataLimits& limits) {
  uint64_t total = TotalLength(lists.writes.segments());
  if (std::ranges::any_of(lists.writes.segments(), Wraps)) return ChunkFault::kAddressWraps;
  if (lists.reply.has_value()) {
    if (std::ranges::any_of(lists.reply->view(), Wraps)) return ChunkFault::kAddressWraps;
    total += TotalLength(*lists.reply);
  }
  if (total > limits.write_bytes_max) return ChunkFault::kTooManyWriteBytes;
  return std::nullopt;
}

// [5666bis:4.4.4+3] [5666bis:4.4.4.1+2] [5666bis:4.4.4.1+3] The segments of a position are a chunk, as long as all of
// them.
CallChunks Group(const ReadList& reads, const ProtocolProfile& profile) {
  CallChunks call;
  call.segments = reads;
  // [5666bis:5.2#2] Sorted lists are a recommendation to senders. Sorting is stable: segments of one position are
  // concatenated in the order of the list.
  std::stable_sort(call.segments.begin(), call.segments.end(),
                   [](const ReadSegment& a, const ReadSegment& b) { return a.position < b.position; });
  for (uint32_t i = 0; i < call.segments.size(); ++i) {
    ReadSegment& entry = call.segments[i];
    if (profile.read_entries_join && !call.chunks.empty()) {
      // Not of a Position-Zero Read chunk: where that ends in itself says nothing of where it ends in the message.
      const ReadChunk& before = call.chunks.back();
      const bool goes_on = before.position != 0 && entry.position == before.position + before.length;
      if (goes_on) entry.position = before.position;
    }
    if (call.chunks.empty() || call.chunks.back().position != entry.position) {
      call.chunks.push_back({.position = entry.position, .first = i});
    }
    ++call.chunks.back().count;
    call.chunks.back().length += entry.target.length;
  }
  return call;
}

// Whether every chunk has its place in a message whose other bytes are at most `base_length` long; sets message_length.
std::optional<ChunkFault> Place(CallChunks& call, uint64_t base_length) {
  uint64_t removed = 0;  // round-up included, before the chunk looked at
  uint64_t end = 0;      // of the previous chunk
  for (const ReadChunk& chunk : call.chunks) {
    if (chunk.position == 0) continue;  // it is the base
    if (chunk.position % 4 != 0) return ChunkFault::kUnalignedPosition;
    if (chunk.position < end) return ChunkFault::kOverlappingReadChunks;
    // [5666bis:4.4.4#1] Positions count from the start of the RPC message, removed bytes included.
    if (chunk.position - removed > base_length) return ChunkFault::kPositionPastEnd;
    const uint64_t size = chunk.length + XdrPad(chunk.length);
    removed += size;
    end = chunk.position + size;
  }
  call.message_length = base_length + removed;
  return std::nullopt;
}

// [5666bis:5.1.1#1] [5666:4.1#2] [5666:4.1#8]
// [5666bis:5.1.4+7] [5666:4.1#7] [2004:4.1+10] The message begins with its XID.
std::optional<ChunkFault> CheckMessage(uint32_t xid, ConstBytes message) {
  if (message.size() < 4) return ChunkFault::kNoMessage;
  if (ByteReader(message).U32() != xid) return ChunkFault::kXidMismatch;
  return std::nullopt;
}

bool HasHandle(const ChunkLists& lists, uint32_t handle) {
  const auto is_it = [&](const Segment& segment) { return segment.handle == handle; };
  return std::ranges::any_of(lists.reads, [&](const ReadSegment& entry) { return is_it(entry.target); }) ||
         std::ranges::any_of(lists.writes.segments(), is_it) ||
         (lists.reply.has_value() && std::ranges::any_of(lists.reply->view(), is_it));
}

// Whether `returned` is `offered` with no length raised.
std::optional<ChunkFault> CheckReturned(std::span<const Segment> returned, std::span<const Segment> offered,
                                        ChunkFault changed) {
  // [5666bis:4.4.5#2] Their number stays.
  if (returned.size() != offered.size()) return changed;
  for (size_t i = 0; i < returned.size(); ++i) {
    if (returned[i].handle != offered[i].handle || returned[i].offset != offered[i].offset) return changed;
    if (returned[i].length > offered[i].length) return ChunkFault::kReturnedTooMuch;
  }
  return std::nullopt;
}

std::optional<ChunkFault> CheckReturnedLists(const ChunkLists& returned, const ChunkLists& offered) {
  if (!returned.writes.empty()) {
    if (returned.writes.size() != offered.writes.size()) return ChunkFault::kWriteListChanged;
    for (size_t i = 0; i < returned.writes.size(); ++i) {
      if (auto fault = CheckReturned(returned.writes[i], offered.writes[i], ChunkFault::kWriteListChanged)) {
        return fault;
      }
    }
  }
  if (!returned.reply.has_value()) return std::nullopt;
  if (!offered.reply.has_value()) return ChunkFault::kReplyChunkChanged;
  return CheckReturned(*returned.reply, *offered.reply, ChunkFault::kReplyChunkChanged);
}

}  // namespace

const char* ToString(ChunkFault fault) {
  switch (fault) {
    case ChunkFault::kNotAMessage:
      return "neither RDMA_MSG, RDMA_MSGP nor RDMA_NOMSG";
    case ChunkFault::kUnalignedPosition:
      return "a Read chunk position is not a multiple of four";
    case ChunkFault::kOverlappingReadChunks:
      return "Read chunks overlap";
    case ChunkFault::kPositionPastEnd:
      return "a Read chunk lies behind the end of the message";
    case ChunkFault::kPositionZeroInMsg:
      return "a Position-Zero Read chunk beside an inline message";
    case ChunkFault::kNoPositionZero:
      return "RDMA_NOMSG without a Position-Zero Read chunk";
    case ChunkFault::kMessageWithNomsg:
      return "RDMA_NOMSG with an inline message";
    case ChunkFault::kNoMessage:
      return "no RPC message after the header";
    case ChunkFault::kTooManyReadBytes:
      return "more bytes in Read chunks than allowed";
    case ChunkFault::kTooManyWriteBytes:
      return "more bytes in Write chunks than allowed";
    case ChunkFault::kAddressWraps:
      return "a segment passes the end of the address space";
    case ChunkFault::kXidMismatch:
      return "the XIDs of header and RPC message differ";
    case ChunkFault::kUnexpectedReadList:
      return "a reply with a Read list";
    case ChunkFault::kWriteListChanged:
      return "the Write list returned is not the one offered";
    case ChunkFault::kReplyChunkChanged:
      return "the Reply chunk returned is not the one offered";
    case ChunkFault::kReturnedTooMuch:
      return "a returned segment is longer than the one offered";
    case ChunkFault::kNoReplyChunk:
      return "RDMA_NOMSG reply without the Reply chunk";
    case ChunkFault::kTwoReplies:
      return "an inline reply beside a filled Reply chunk";
    case ChunkFault::kInvHandleForeign:
      return "the handle to invalidate is none of the call's";
  }
  return "unknown chunk fault";
}

Result<CallChunks, ChunkFault> ValidateCall(const Header& header, ConstBytes inline_message,
                                            const ChunkDataLimits& limits, const ProtocolProfile& profile) {
  // [v2:1+2] Of both versions.
  const ChunkLists* lists = header.chunks();
  if (lists == nullptr) return Err(ChunkFault::kNotAMessage);
  if (auto fault = CheckReads(lists->reads, limits, profile)) return Err(*fault);
  if (auto fault = CheckOffered(*lists, limits)) return Err(*fault);
  // [v2:3.3+3] Nothing else may be invalidated, so this contradicts itself. Version 1 names no handle.
  if (header.inv_handle() != 0 && !HasHandle(*lists, header.inv_handle())) return Err(ChunkFault::kInvHandleForeign);

  CallChunks call = Group(lists->reads, profile);
  uint64_t base_length = inline_message.size();
  if (header.has_inline_message()) {
    if (call.has_position_zero()) return Err(ChunkFault::kPositionZeroInMsg);
    if (auto fault = CheckMessage(header.xid, inline_message)) return Err(*fault);
  } else {
    // [5666bis:5.1.4+6] [5666:4.3+8] [2004:4.2+8] [5666bis:5.2.1+2] Nothing follows the lists.
    // [5666bis:4.6.3#2] [5666bis:5.3.3#1] A long call is wholly in its Position-Zero Read chunk.
    // [v2:5.2+2] [v2:5.3.2+4]
    if (!inline_message.empty()) return Err(ChunkFault::kMessageWithNomsg);
    if (!call.has_position_zero()) return Err(ChunkFault::kNoPositionZero);
    base_length = call.chunks.front().length;
  }
  if (auto fault = Place(call, base_length)) return Err(*fault);
  return call;
}

Result<CallChunks, ChunkFault> ValidateReply(const Header& header, ConstBytes inline_message, const ChunkLists& offered,
                                             const ProtocolProfile& profile, const ChunkDataLimits& limits) {
  const ChunkLists* lists = header.chunks();
  if (lists == nullptr) return Err(ChunkFault::kNotAMessage);
  // [5666bis:4.1+2] Nobody reads from a responder, but for those of old.
  if (!lists->reads.empty() && !profile.replies_by_read_chunk) return Err(ChunkFault::kUnexpectedReadList);
  if (auto fault = CheckReturnedLists(*lists, offered)) return Err(*fault);
  if (auto fault = CheckReads(lists->reads, limits, profile)) return Err(*fault);

  CallChunks reads;
  if (!lists->reads.empty()) reads = Group(lists->reads, profile);
  const uint64_t in_reply_chunk = lists->reply.has_value() ? TotalLength(*lists->reply) : 0;
  uint64_t base_length = inline_message.size();
  if (header.has_inline_message()) {
    if (reads.has_position_zero()) return Err(ChunkFault::kPositionZeroInMsg);
    if (auto fault = CheckMessage(header.xid, inline_message)) return Err(*fault);
    // [5666bis:4.4.5.1#1] A Reply chunk that was not needed is an unused Write chunk.
    if (in_reply_chunk > 0) return Err(ChunkFault::kTwoReplies);
  } else {
    if (!inline_message.empty()) return Err(ChunkFault::kMessageWithNomsg);
    if (reads.has_position_zero()) {
      if (in_reply_chunk > 0) return Err(ChunkFault::kTwoReplies);
      base_length = reads.chunks.front().length;
    } else {
      if (!lists->reply.has_value()) return Err(ChunkFault::kNoReplyChunk);
      base_length = in_reply_chunk;
    }
  }
  if (reads.chunks.empty()) return reads;
  // Results that were written are in the stream, too; where, only its decoder knows.
  base_length += TotalLength(lists->writes.segments()) + 3 * lists->writes.size();
  if (auto fault = Place(reads, base_length)) return Err(*fault);
  return reads;
}

namespace {

// Cuts chunks to the memory that was offered which go beyond it by at most three bytes, if `may` says so of one.
template <typename May>
CutLengths CutToOffer(WriteList* returned, const WriteList& offered, May may) {
  CutLengths cut;
  if (returned->size() != offered.size()) return cut;
  for (size_t i = 0; i < offered.size(); ++i) {
    const std::span<Segment> chunk = returned->mutable_chunk(i);
    if (chunk.size() != offered[i].size()) continue;
    // Only the last segment that holds data can be longer.
    for (size_t n = chunk.size(); n > 0; --n) {
      if (chunk[n - 1].length == 0) continue;
      const uint32_t room = offered[i][n - 1].length;
      if (room > 0 && chunk[n - 1].length > room && chunk[n - 1].length - room < 4 && may(chunk)) {
        while (cut.size() < i) cut.push_back(0);
        cut.push_back(static_cast<uint8_t>(chunk[n - 1].length - room));
        chunk[n - 1].length = room;
      }
      break;
    }
  }
  while (!cut.empty() && cut.size() < offered.size()) cut.push_back(0);
  return cut;
}

}  // namespace

CutLengths CutRoundUp(WriteList* returned, const WriteList& offered) {
  return CutToOffer(returned, offered, [](std::span<const Segment> chunk) { return TotalLength(chunk) % 4 == 0; });
}

CutLengths CutWrongLengths(WriteList* returned, const WriteList& offered) {
  return CutToOffer(returned, offered, [](std::span<const Segment>) { return true; });
}

}  // namespace stagecoach::rpcrdma
