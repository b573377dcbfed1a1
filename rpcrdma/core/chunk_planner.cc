#include "rpcrdma/core/chunk_planner.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/mark.h"
#include "rpcrdma/wire/v2_numbers.h"
#include "rpcrdma/xdr/xdr_writer.h"

namespace stagecoach::rpcrdma {
namespace {

constexpr uint64_t kMaxMessage = std::numeric_limits<uint32_t>::max();

uint64_t SegmentsFor(uint64_t length, uint32_t segment_length_max) {
  return length / segment_length_max + (length % segment_length_max != 0 ? 1 : 0);
}

// Cuts `whole` into pieces that fit a segment.
template <typename Emit>
void Split(const Piece& whole, uint32_t segment_length_max, Emit emit) {
  for (uint64_t done = 0; done < whole.length;) {
    Piece part = whole;
    part.offset += done;
    part.length = std::min<uint64_t>(segment_length_max, whole.length - done);
    emit(part);
    done += part.length;
  }
}

// [5666bis:6.1+3] Items lie one behind the other, never within one another.
// The length of the message with everything in place, or why the shape is no message.
Result<uint64_t, PlanRefusal> UnreducedLength(uint64_t base_size, std::span<const EligibleItem> items) {
  if (base_size > kMaxMessage) return Err(PlanRefusal::kMessageTooLong);
  uint64_t removed = 0;
  uint64_t end = 0;
  for (const EligibleItem& item : items) {
    // [5666bis:4.4.4.1#4] Positions are multiples of four, and XDR never begins an item elsewhere.
    if (item.position % 4 != 0 || item.position < end) return Err(PlanRefusal::kMalformedShape);
    if (item.position - removed > base_size) return Err(PlanRefusal::kMalformedShape);
    if (item.data.size() > kMaxMessage) return Err(PlanRefusal::kMessageTooLong);
    const uint64_t size = XdrRoundUp(item.data.size());
    removed += size;
    end = item.position + size;
    if (base_size + removed > kMaxMessage) return Err(PlanRefusal::kMessageTooLong);
  }
  return base_size + removed;
}

// Which items leave the message; index by item.
using Removed = SmallVector<uint8_t, 8>;

// [5666bis:4.4.4.1+1] [5666:3.7+1] [5666bis:4.4.5.2+1] Items that stay keep their round-up.
// The pieces of a message from which the items marked in `removed` are taken out, round-up and all
// [5666bis:4.4.4.1#1] [5666bis:4.4.5.2#1].
SmallVector<Piece, 8> ReducedPieces(uint64_t base_size, std::span<const EligibleItem> items, const Removed& removed) {
  SmallVector<Piece, 8> pieces;
  uint64_t base_done = 0;
  uint64_t items_before = 0;  // bytes of items, round-up included
  for (uint32_t i = 0; i < items.size(); ++i) {
    const uint64_t base_here = items[i].position - items_before;
    const uint64_t length = items[i].data.size();
    items_before += XdrRoundUp(length);
    if (removed[i] != 0 || length == 0) continue;
    if (base_here > base_done) pieces.push_back({Piece::Source::kBase, 0, base_done, base_here - base_done});
    base_done = base_here;
    pieces.push_back({Piece::Source::kItem, i, 0, length});
    if (XdrPad(length) > 0) pieces.push_back({Piece::Source::kPad, i, 0, XdrPad(length)});
  }
  if (base_size > base_done) pieces.push_back({Piece::Source::kBase, 0, base_done, base_size - base_done});
  return pieces;
}

// [5666bis:4.4.5+2] [5666:3.4#3] [2004:3.4+3] [5666bis:6.2+1] [5666:3.4#5] [5666bis:6.2+2] A Write chunk for each
// result that might come, with room for the longest. What a call offers for its reply: fills plan.write_*,
// plan.reply_*.
std::optional<PlanRefusal> OfferForReply(const CallShape& shape, const PlanLimits& limits, CallPlan& plan) {
  if (shape.reply_base_max > kMaxMessage) return PlanRefusal::kMessageTooLong;
  const uint64_t empty_header = limits.layout.min_size();
  uint64_t whole_reply = empty_header + shape.reply_base_max;
  uint64_t base_max = shape.reply_base_max;
  bool any_result = false;
  for (const ResultShape& result : shape.results) {
    if (result.max_length > kMaxMessage) return PlanRefusal::kMessageTooLong;
    if (result.memory_length < result.max_length) return PlanRefusal::kMalformedShape;
    if (shape.direct_results) {
      any_result = any_result || result.max_length > 0;
    } else {
      base_max += XdrRoundUp(result.max_length);
    }
    whole_reply += XdrRoundUp(result.max_length);
    if (whole_reply > empty_header + kMaxMessage) return PlanRefusal::kMessageTooLong;
  }
  // Chunks for results that may come inline would only cost registrations [5666bis:5.2.2#2].
  const bool may_come_inline = whole_reply <= limits.receive_inline;
  if (may_come_inline && shape.reply_chunk_min == 0) return std::nullopt;

  uint64_t header = empty_header;
  uint64_t segments = 0;
  if (any_result && !may_come_inline) {
    // [5666bis:6.2#2] Entry i is for result i, so every result gets an entry: one empty segment if it has no room to
    // offer, as a chunk has at least one.
    if (shape.results.size() > limits.write_chunks_max) return PlanRefusal::kTooManySegments;
    for (uint32_t i = 0; i < shape.results.size(); ++i) {
      // [5666bis:4.4.5.2#3] Room for round-up, as far as the memory goes.
      const uint64_t capacity =
          std::min({XdrRoundUp(shape.results[i].max_length), shape.results[i].memory_length, kMaxMessage});
      const uint64_t count = std::max<uint64_t>(SegmentsFor(capacity, limits.segment_length_max), 1);
      segments += count;
      if (count > limits.segments_per_chunk_max || segments > limits.exposed_segments_max) {
        return PlanRefusal::kTooManySegments;
      }
      header += WriteChunkEntrySize(count);
      plan.write_counts.push_back(static_cast<uint32_t>(count));
      const Piece result{Piece::Source::kResult, i, 0, capacity};
      if (capacity == 0) plan.write_segments.push_back(result);
      Split(result, limits.segment_length_max, [&](const Piece& piece) { plan.write_segments.push_back(piece); });
    }
    if (header + base_max <= limits.receive_inline && shape.reply_chunk_min == 0) return std::nullopt;
  }

  // [5666bis:4.6.3+2] [5666:5.2+1] [2004:5.2+2] [5666bis:5.2.3+2] [5666:5.2+5] [5666bis:5.3.4+2] [5666:5.2+4]
  // [2004:5.2+5] [5666bis:5.3.4#1] Sized for the longest reply that can come, Write chunks taken out.
  if (!plan.write_counts.empty()) STAGECOACH_MARK("planner.reply_chunk_beside_write_chunks");
  // Without Write chunks everything is in it. [v2:5.3.3#20] Or as long as the responder has asked for.
  const uint64_t longest = any_result && may_come_inline ? whole_reply - empty_header : base_max;
  plan.reply_capacity = XdrRoundUp(std::max(longest, shape.reply_chunk_min));
  const uint64_t count = SegmentsFor(plan.reply_capacity, limits.segment_length_max);
  if (count > limits.segments_per_chunk_max || segments + count > limits.exposed_segments_max) {
    return PlanRefusal::kTooManySegments;
  }
  if (plan.reply_capacity > kMaxMessage) return PlanRefusal::kMessageTooLong;
  // The reply's header returns all these lists, and has to fit a Send.
  if (header + ReplyChunkExtraSize(count) > limits.receive_inline) return PlanRefusal::kHeaderTooLong;
  Split({Piece::Source::kReplyBuffer, 0, 0, plan.reply_capacity}, limits.segment_length_max,
        [&](const Piece& piece) { plan.reply_segments.push_back(piece); });
  return std::nullopt;
}

size_t OfferedListsSize(const CallPlan& plan) {
  return plan.write_counts.size() * WriteChunkEntrySize(0) + plan.write_segments.size() * kSegmentSize +
         (plan.reply_segments.empty() ? 0 : ReplyChunkExtraSize(plan.reply_segments.size()));
}

// Items by falling length, those of equal length in order.
SmallVector<uint32_t, 8> LongestFirst(std::span<const EligibleItem> items) {
  SmallVector<uint32_t, 8> order;
  for (uint32_t i = 0; i < items.size(); ++i) order.push_back(i);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return items[a].data.size() > items[b].data.size(); });
  return order;
}

// What one end takes of Read chunks, and of the segments of each.
struct ChunkCounts {
  uint64_t chunks_max = std::numeric_limits<uint64_t>::max();
  uint64_t segments_max = std::numeric_limits<uint64_t>::max();
};

// [5666bis:4.4.1+1] [5666bis:6.1+2] Only what has to leave does.
// [5666bis:4.6.1#1] Takes the longest items out of the message until the rest fits the Send, or nothing more helps.
// Returns the number of Read segments; `inline_bytes` shrinks with each item.
uint64_t Reduce(std::span<const EligibleItem> items, uint64_t room, uint64_t segments_max, uint32_t segment_length_max,
                Removed& removed, uint64_t& inline_bytes, const ChunkCounts& counts = {}) {
  uint64_t segments = 0;
  uint64_t chunks = 0;
  for (uint32_t i : LongestFirst(items)) {
    const uint64_t length = items[i].data.size();
    if (inline_bytes + segments * kReadEntrySize <= room || length == 0) break;
    if (removed[i] != 0) continue;  // a result that goes by Write chunk
    const uint64_t count = SegmentsFor(length, segment_length_max);
    // An item smaller than its entry in the Read list is no gain.
    if (XdrRoundUp(length) <= count * kReadEntrySize || segments + count > segments_max) {
      STAGECOACH_MARK("planner.item_stays_inline");
      continue;
    }
    if (chunks == counts.chunks_max || count > counts.segments_max) continue;
    ++chunks;
    segments += count;
    removed[i] = 1;
    inline_bytes -= XdrRoundUp(length);
  }
  return segments;
}

// [5666bis:4.4.3+1] [5666bis:4.4.3+2] A chunk for each item, of as many segments as it takes.
// The Read list of the removed items, in order of position [5666bis:5.2#2] because the items are. [5666bis:4.4.4.1#2]
// [5666:3.7#2] Their round-up is not sent. [2004:3.3#12] Of a reply likewise.
void AddReads(std::span<const EligibleItem> items, const Removed& removed, uint32_t segment_length_max,
              SmallVector<PlannedRead, 4>& reads) {
  for (uint32_t i = 0; i < items.size(); ++i) {
    if (removed[i] == 0) continue;
    if (XdrPad(items[i].data.size()) > 0) STAGECOACH_MARK("planner.round_up_of_argument_elided");
    const auto position = static_cast<uint32_t>(items[i].position);
    Split({Piece::Source::kItem, i, 0, items[i].data.size()}, segment_length_max, [&](const Piece& piece) {
      reads.push_back({position, piece});
    });
  }
}

// [5666bis:4.6.3+1] [5666:5.1+2] [2004:5.1+2] [5666bis:5.2.1+3]
// [5666bis:4.6.3#1] [5666bis:5#2] [5666:4#1] [2004:4+3] The message itself goes by Read chunk. Its eligible items get
// chunks of their own, if `direct` [5666bis:4.6.3#7]: their memory is exposed either way, and at the other end they are
// placed where they belong. `room` is what the Send has for the Read list. A refusal leaves the plan as it was.
std::optional<PlanRefusal> MakeLong(const CallShape& shape, bool direct, uint64_t segments_max, uint64_t room,
                                    const PlanLimits& limits, CallPlan& plan) {
  Removed removed;
  for (size_t i = 0; i < shape.items.size(); ++i) removed.push_back(0);
  uint64_t segments = 0;
  uint64_t chunks = 0;
  for (const uint32_t i : LongestFirst(shape.items)) {
    const uint64_t count = SegmentsFor(shape.items[i].data.size(), limits.segment_length_max);
    if (!direct || count == 0) continue;
    if (chunks == limits.read_chunks_max || count > limits.segments_per_read_chunk_max) continue;
    removed[i] = 1;
    ++chunks;
    segments += count;
  }
  SmallVector<Piece, 8> message = ReducedPieces(shape.base_size, shape.items, removed);
  uint64_t pieces = 0;
  uint64_t bytes = 0;
  for (const Piece& piece : message) {
    pieces += SegmentsFor(piece.length, limits.segment_length_max);
    bytes += piece.length;
  }
  const bool gathered = pieces > limits.segments_per_read_chunk_max && bytes <= limits.gather_bytes_max;
  if (gathered) pieces = SegmentsFor(bytes, limits.segment_length_max);
  segments += pieces;
  if (pieces > limits.segments_per_read_chunk_max || segments > segments_max) return PlanRefusal::kTooManySegments;
  if (segments * kReadEntrySize > room) return PlanRefusal::kHeaderTooLong;
  STAGECOACH_MARK("planner.long_call");
  if (gathered) {
    STAGECOACH_MARK("planner.long_call_gathered");
    plan.gathered_pieces.assign(message.begin(), message.end());
    plan.gathered_bytes = bytes;
    message.clear();
    message.push_back({Piece::Source::kGathered, 0, 0, bytes});
  }
  plan.type = MessageType::kNomsg;  // [5666bis:5.3.3#1]
  plan.inline_bytes = 0;
  // [5666bis:4.6.3#2] [5666:5.1+1] [2004:5.1+1] Position zero, and first in the list.
  for (const Piece& part : message) {
    Split(part, limits.segment_length_max, [&](const Piece& piece) { plan.reads.push_back({0, piece}); });
  }
  AddReads(shape.items, removed, limits.segment_length_max, plan.reads);
  return std::nullopt;
}

// [5666:3.9#1] [5666:3.9+1] [2004:3.5+1] Makes an inline message a padded one, if there is anything to pad and it still
// fits. [5666:3.9+4] [2004:3.5+3] Zeros up to the next multiple of the alignment. [5666:3.9+3] [2004:3.5#1] The
// receiver goes by the length of each counted item alone, and whether one as long as the threshold is padded is read in
// two ways: so the threshold is above all that cannot be padded, and no item is as long as it.
void Pad(const CallShape& shape, const PlanLimits& limits, CallPlan& plan) {
  if (shape.longest_inside >= kMaxMessage / 2) return;
  uint64_t threshold = std::max<uint64_t>(shape.longest_inside + 1, limits.pad_threshold);
  for (bool again = true; again;) {
    again = std::any_of(shape.items.begin(), shape.items.end(),
                        [&](const EligibleItem& item) { return item.counted && item.data.size() == threshold; });
    if (again) ++threshold;
  }
  const uint64_t header_size = plan.header_size + kPaddingFieldsSize;
  const Padding padding{.align = limits.pad_align,
                        .start = limits.padding_base == PaddingBase::kSend ? header_size : 0};
  SmallVector<Piece, 8> pieces;
  uint64_t bytes = 0;
  bool any = false;
  for (const Piece& piece : plan.inline_pieces) {
    if (piece.source == Piece::Source::kItem && shape.items[piece.index].counted && piece.length > threshold) {
      const uint64_t before = padding.Before(bytes);
      if (before > 0) pieces.push_back({Piece::Source::kPad, piece.index, 0, before});
      bytes += before;
      any = true;
    }
    pieces.push_back(piece);
    bytes += piece.length;
  }
  if (!any || header_size + bytes > limits.send_inline) return;
  plan.type = MessageType::kMsgp;
  plan.pad_align = limits.pad_align;
  plan.pad_threshold = static_cast<uint32_t>(threshold);
  plan.header_size = header_size;
  plan.inline_pieces = pieces;
  plan.inline_bytes = bytes;
}

void ClearLengths(std::span<Segment> segments) {
  for (Segment& segment : segments) segment.length = 0;
}

// Pairs the pieces of a source with the filled part of segments. Both have the same total length.
void PairWrites(std::span<const Piece> pieces, std::span<const Segment> segments, SmallVector<PlannedWrite, 8>& out) {
  size_t s = 0;
  uint32_t segment_done = 0;
  for (const Piece& piece : pieces) {
    for (uint64_t done = 0; done < piece.length;) {
      while (segment_done == segments[s].length) {
        ++s;
        segment_done = 0;
      }
      const auto length =
          static_cast<uint32_t>(std::min<uint64_t>(piece.length - done, segments[s].length - segment_done));
      Piece source = piece;
      source.offset += done;
      source.length = length;
      out.push_back({source, {segments[s].handle, length, segments[s].offset + segment_done}});
      done += length;
      segment_done += length;
    }
  }
}

// [v2:3.2#2] In version 2 `flags` say whether it is a call or a reply; version 1 has none.
Header MakeHeader(const HeaderLayout& layout, MessageType type, uint32_t xid, uint32_t credits, uint32_t flags,
                  ChunkLists lists, uint32_t inv_handle) {
  Header header{.xid = xid, .version = layout.version, .credits = credits};
  if (layout.has_flags) header.flags = flags;
  if (type == MessageType::kNomsg) {
    header.body = RdmaNomsg{std::move(lists), inv_handle};
  } else {
    header.body = RdmaMsg{std::move(lists), inv_handle};
  }
  return header;
}

std::string PieceText(const Piece& piece) {
  static constexpr const char* kNames[] = {"base", "item", "pad", "result", "reply", "message"};
  std::string text = kNames[static_cast<size_t>(piece.source)];
  using Source = Piece::Source;
  if (piece.source == Source::kItem || piece.source == Source::kPad || piece.source == Source::kResult) {
    text += std::to_string(piece.index);
  }
  return text + "[" + std::to_string(piece.offset) + "+" + std::to_string(piece.length) + "]";
}

std::string PlanText(const HeaderLayout& layout, MessageType type, size_t header_size,
                     std::span<const Piece> inline_pieces) {
  std::string text = std::string(ToString(type, layout.version)) + " header " + std::to_string(header_size);
  if (!inline_pieces.empty()) text += " inline";
  for (const Piece& piece : inline_pieces) text += " " + PieceText(piece);
  return text;
}

}  // namespace

const char* ToString(PlanRefusal refusal) {
  switch (refusal) {
    case PlanRefusal::kMalformedShape:
      return "the shape of the call is inconsistent";
    case PlanRefusal::kMessageTooLong:
      return "the message is longer than chunks can describe";
    case PlanRefusal::kTooManySegments:
      return "more segments than the connection allows";
    case PlanRefusal::kHeaderTooLong:
      return "the transport header alone is larger than the inline threshold";
  }
  return "unknown refusal";
}

const char* ToString(ReplyVerdict verdict) {
  switch (verdict) {
    case ReplyVerdict::kMalformedShape:
      return "the shape of the reply is inconsistent";
    case ReplyVerdict::kWriteChunkTooSmall:
      return "a result is longer than its Write chunk";
    case ReplyVerdict::kNoRoomForReply:
      return "the reply fits neither the inline threshold nor a Reply chunk";
    case ReplyVerdict::kHeaderTooLong:
      return "the transport header alone is larger than the inline threshold";
  }
  return "unknown verdict";
}

// [5666bis:4.3.1+1] [5666:3+2] [2004:3#2] [5666bis:4.6.1+1] [5666:3.1+1] [2004:3.1+1] [5666bis:4.6.2+1]
// [5666bis:5.3.4+3] [5666:5.1+6] [pvtdata:3.1+2] Whole in the Send if it fits, else without its items, else by Read
// chunk; whatever its reply takes.
// [v2:3.3+2] [v2:5.3.2+2] As in version 1: Write and Reply chunk for the reply, Read chunks for the arguments, and a
// long call where that is not enough.
Result<CallPlan, PlanRefusal> PlanCall(const CallShape& shape, const PlanLimits& limits) {
  if (limits.segment_length_max == 0) return Err(PlanRefusal::kMalformedShape);
  const auto whole = UnreducedLength(shape.base_size, shape.items);
  if (!whole) return Err(whole.error());
  CallPlan plan{.layout = limits.layout};
  if (const auto refusal = OfferForReply(shape, limits, plan)) return Err(*refusal);

  const uint64_t fixed = limits.layout.min_size() + OfferedListsSize(plan);
  if (fixed > limits.send_inline) return Err(PlanRefusal::kHeaderTooLong);
  const uint64_t room = limits.send_inline - fixed;
  const uint64_t segments_max =
      std::min<uint64_t>(limits.read_segments_max, limits.exposed_segments_max - plan.exposed_segments());

  Removed removed;
  for (size_t i = 0; i < shape.items.size(); ++i) removed.push_back(0);
  plan.inline_bytes = *whole;
  const uint64_t segments =
      shape.direct_arguments ? Reduce(shape.items, room, segments_max, limits.segment_length_max, removed,
                                      plan.inline_bytes, {limits.read_chunks_max, limits.segments_per_read_chunk_max})
                             : 0;
  if (plan.inline_bytes + segments * kReadEntrySize <= room) {
    plan.inline_pieces = ReducedPieces(shape.base_size, shape.items, removed);
    AddReads(shape.items, removed, limits.segment_length_max, plan.reads);
  } else {
    // Where items with chunks of their own make too many segments, one copy of all may not.
    auto refusal = MakeLong(shape, shape.direct_arguments, segments_max, room, limits, plan);
    if (refusal && shape.direct_arguments) refusal = MakeLong(shape, false, segments_max, room, limits, plan);
    if (refusal) return Err(*refusal);
  }
  plan.header_size = fixed + plan.reads.size() * kReadEntrySize;
  if (limits.pad_align > 1 && plan.type == MessageType::kMsg && plan.reads.empty()) Pad(shape, limits, plan);
  return plan;
}

// [5666bis:5.7.2+1] Of two types, here and in replies.
Header MakeCallHeader(const CallPlan& plan, uint32_t xid, uint32_t credits, std::span<const Exposure> exposures,
                      uint32_t inv_handle) {
  STAGECOACH_CHECK(exposures.size() == plan.exposed_segments());
  size_t next = 0;
  const auto segment = [&](const Piece& piece) {
    const Exposure& exposure = exposures[next++];
    return Segment{exposure.handle, static_cast<uint32_t>(piece.length), exposure.offset};
  };
  ChunkLists lists;
  for (const PlannedRead& read : plan.reads) lists.reads.push_back({read.position, segment(read.memory)});
  size_t write_segment = 0;
  for (uint32_t count : plan.write_counts) {
    lists.writes.BeginChunk();
    for (uint32_t i = 0; i < count; ++i) lists.writes.AppendSegment(segment(plan.write_segments[write_segment++]));
  }
  if (!plan.reply_segments.empty()) {
    SegmentArray& reply = lists.reply.emplace();
    for (const Piece& piece : plan.reply_segments) reply.push_back(segment(piece));
  }
  Header header = MakeHeader(plan.layout, plan.type, xid, credits, 0, std::move(lists), inv_handle);
  if (plan.type == MessageType::kMsgp) {
    header.body = RdmaMsgp{plan.pad_align, plan.pad_threshold, std::move(std::get<RdmaMsg>(header.body).chunks)};
  }
  return header;
}

// [5666bis:4.4.5+3] [5666:3.7+5] [5666bis:4.4.5.2+2] [5666bis:5.2.2+3] [5666:3.6+1] [2004:3.7+1]
bool FillSegments(std::span<Segment> segments, uint64_t length) {
  if (TotalLength(segments) < length) return false;
  for (Segment& segment : segments) {
    segment.length = static_cast<uint32_t>(std::min<uint64_t>(segment.length, length));
    length -= segment.length;
  }
  return true;
}

namespace {

// [5666:3.4#4] [5666:3.8#3] [2004:3.3#9] [5666:5.2#2] [2004:5.2#2] The reply fits neither inline nor into the Reply
// chunk: its longest results leave it by Read chunk until one of them can take the rest; if that is not enough the rest
// goes likewise, from position zero on. `by_read` are the results that have to go by Read chunk, `by_write` those that
// are placed.
std::optional<ReplyVerdict> ExposeReply(const ReplyShape& shape, const Removed& by_write, Removed by_read,
                                        uint32_t send_inline, const ReplyCustoms& customs, ReplyPlan& plan) {
  uint64_t segments = 0;
  for (size_t i = 0; i < shape.items.size(); ++i) {
    if (by_read[i] != 0) segments += SegmentsFor(shape.items[i].data.size(), customs.segment_length_max);
  }
  Removed removed;
  for (size_t i = 0; i < shape.items.size(); ++i) removed.push_back(by_write[i] != 0 || by_read[i] != 0 ? 1 : 0);
  const Removed gone = removed;
  const auto refuse = [&](bool possible) {
    return possible ? std::nullopt : std::optional(ReplyVerdict::kNoRoomForReply);
  };
  const uint64_t segments_max = customs.read_segments_max;
  if (auto verdict = refuse(segments <= segments_max)) return verdict;
  const auto add_reads = [&] {
    for (size_t i = 0; i < removed.size(); ++i) by_read[i] = removed[i] != 0 && by_write[i] == 0 ? 1 : 0;
    AddReads(shape.items, by_read, customs.segment_length_max, plan.reads);
    for (const PlannedRead& read : plan.reads) plan.read_bytes += read.memory.length;
    plan.header_size += plan.reads.size() * kReadEntrySize;
    return plan.header_size > send_inline ? std::optional(ReplyVerdict::kHeaderTooLong) : std::nullopt;
  };
  const auto by_reply_chunk = [&] {
    if (!plan.chunks.reply.has_value() || !FillSegments(*plan.chunks.reply, plan.inline_bytes)) return false;
    plan.type = MessageType::kNomsg;
    PairWrites(ReducedPieces(shape.base_size, shape.items, removed).view(), *plan.chunks.reply, plan.writes);
    plan.reply_bytes = plan.inline_bytes;
    plan.inline_bytes = 0;
    return true;
  };

  const uint64_t used = plan.header_size + segments * kReadEntrySize;
  const uint64_t room = send_inline - std::min<uint64_t>(send_inline, used);
  if (plan.inline_bytes > room && by_reply_chunk()) return add_reads();
  const uint64_t more =
      Reduce(shape.items, room, segments_max - segments, customs.segment_length_max, removed, plan.inline_bytes);
  if (used + more * kReadEntrySize + plan.inline_bytes <= send_inline) {
    if (plan.chunks.reply.has_value()) ClearLengths(*plan.chunks.reply);
    plan.inline_pieces = ReducedPieces(shape.base_size, shape.items, removed);
    return add_reads();
  }
  if (by_reply_chunk()) return add_reads();

  STAGECOACH_MARK("planner.long_reply_by_read_chunk");
  if (plan.chunks.reply.has_value()) ClearLengths(*plan.chunks.reply);
  removed = gone;
  for (size_t i = 0; i < shape.items.size(); ++i) {
    if (!shape.items[i].data.empty()) removed[i] = 1;
  }
  plan.type = MessageType::kNomsg;
  plan.inline_bytes = 0;
  for (const Piece& part : ReducedPieces(shape.base_size, shape.items, removed)) {
    Split(part, customs.segment_length_max, [&](const Piece& piece) { plan.reads.push_back({0, piece}); });
  }
  const auto verdict = add_reads();
  return verdict ? verdict : refuse(plan.reads.size() <= segments_max);
}

}  // namespace

// [5666bis:4.5+1] [5666:3+3] [5666:3.8+1] [2004:3#1] [2004:3.8#1] [2004:3.8+1] Any mixture of what was offered.
Result<ReplyPlan, ReplyFault> PlanReply(const ReplyShape& shape, const ChunkLists& offered, uint32_t send_inline,
                                        ReplyChunkUse use, const ReplyCustoms& customs) {
  const auto whole = UnreducedLength(shape.base_size, shape.items);
  if (!whole) return Err(ReplyFault{ReplyVerdict::kMalformedShape});
  ReplyPlan plan;
  plan.layout = customs.layout;
  plan.chunks.writes = offered.writes;
  plan.chunks.reply = offered.reply;
  plan.inline_bytes = *whole;

  // [5666bis:5.2.2+2] In order, until there are no more results or no more chunks.
  // [5666bis:5.2.2#1] [5666:3.6#1] [2004:3.6#2] Where the requester offered a Write chunk for a result, the result goes
  // there, however small.
  Removed removed;
  Removed by_read;
  bool any_by_read = false;
  for (uint32_t i = 0; i < shape.items.size(); ++i) {
    const bool by_chunk = i < offered.writes.size();
    removed.push_back(by_chunk ? 1 : 0);
    by_read.push_back(0);
    if (!by_chunk) continue;
    const uint64_t length = shape.items[i].data.size();
    plan.inline_bytes -= XdrRoundUp(length);
    const std::span<Segment> chunk = plan.chunks.writes.mutable_chunk(i);
    // [5666:3.7+4] The lengths count it as far as there is room, and it is not written.
    const bool fits =
        (customs.lengths_count_round_up && FillSegments(chunk, XdrRoundUp(length))) || FillSegments(chunk, length);
    if (!fits) {
      STAGECOACH_MARK("planner.write_chunk_too_small");
      if (customs.read_segments_max == 0) return Err(ReplyFault{ReplyVerdict::kWriteChunkTooSmall, i, length});
      // [5666:3.8+8] [2004:3.8+10] It comes back unused, and is used up all the same: the next result has the next one.
      ClearLengths(chunk);
      removed[i] = 0;
      by_read[i] = 1;
      any_by_read = true;
      continue;
    }
    if (length == 0) STAGECOACH_MARK("planner.empty_result_for_write_chunk");
    if (XdrPad(length) > 0) STAGECOACH_MARK("planner.round_up_of_result_elided");
    // [5666bis:4.4.5.2#2] Without round-up: it might not fit the memory, and says nothing.
    const Piece item{Piece::Source::kItem, i, 0, length};
    PairWrites({&item, 1}, chunk, plan.writes);
    plan.direct_bytes += length;
  }
  // [5666bis:4.4.5.1#1] [5666:3.4#7] Chunks for results that are not in this reply.
  for (size_t i = shape.items.size(); i < offered.writes.size(); ++i) {
    STAGECOACH_MARK("planner.write_chunk_unused");
    ClearLengths(plan.chunks.writes.mutable_chunk(i));
  }

  plan.header_size = customs.layout.SizeWith(EncodedSize(plan.chunks));
  if (plan.header_size > send_inline) return Err(ReplyFault{ReplyVerdict::kHeaderTooLong});
  const bool fits_inline = plan.send_size() <= send_inline;
  const bool declined = fits_inline && use == ReplyChunkUse::kWhenNeeded;
  const auto expose = [&]() -> Result<ReplyPlan, ReplyFault> {
    if (auto verdict = ExposeReply(shape, removed, by_read, send_inline, customs, plan)) {
      return Err(ReplyFault{*verdict});
    }
    return plan;
  };
  if (any_by_read) return expose();
  plan.inline_pieces = ReducedPieces(shape.base_size, shape.items, removed);
  // [5666bis:5.3.4+1] [5666:5.2+2] [2004:5.2+3]
  // [5666bis:4.6.3#4] [5666bis:5.2.2#4] A Reply chunk, once offered, is used whenever the reply fits it. Eligible
  // results that have no Write chunk go with it [5666bis:4.6.3#6].
  if (plan.chunks.reply.has_value() && !declined && FillSegments(*plan.chunks.reply, plan.inline_bytes)) {
    STAGECOACH_MARK("planner.long_reply");
    plan.type = MessageType::kNomsg;  // [5666bis:5.3.4#2]
    PairWrites(plan.inline_pieces, *plan.chunks.reply, plan.writes);
    plan.reply_bytes = plan.inline_bytes;
    plan.inline_bytes = 0;
    plan.inline_pieces.clear();
    return plan;
  }
  if (!fits_inline) {
    if (customs.read_segments_max == 0) return Err(ReplyFault{ReplyVerdict::kNoRoomForReply, 0, plan.inline_bytes});
    plan.inline_pieces.clear();
    return expose();
  }
  if (plan.chunks.reply.has_value()) {
    if (!declined) STAGECOACH_MARK("planner.reply_overflows_reply_chunk_and_fits_inline");
    ClearLengths(*plan.chunks.reply);
  }
  return plan;
}

Header MakeReplyHeader(const ReplyPlan& plan, uint32_t xid, uint32_t credits, std::span<const Exposure> exposures) {
  STAGECOACH_CHECK(exposures.size() == plan.reads.size());
  ChunkLists lists = plan.chunks;
  for (size_t i = 0; i < exposures.size(); ++i) {
    const PlannedRead& read = plan.reads[i];
    lists.reads.push_back(
        {read.position, {exposures[i].handle, static_cast<uint32_t>(read.memory.length), exposures[i].offset}});
  }
  return MakeHeader(plan.layout, plan.type, xid, credits, kFlagResponse, std::move(lists), 0);
}

std::string ToString(const CallPlan& plan) {
  std::string text = PlanText(plan.layout, plan.type, plan.header_size, plan.inline_pieces);
  if (!plan.reads.empty()) text += " reads";
  for (const PlannedRead& read : plan.reads) text += " " + std::to_string(read.position) + ":" + PieceText(read.memory);
  if (!plan.write_counts.empty()) text += " writes";
  size_t segment = 0;
  for (uint32_t count : plan.write_counts) {
    text += " (";
    for (uint32_t i = 0; i < count; ++i) text += (i > 0 ? " " : "") + PieceText(plan.write_segments[segment++]);
    text += ")";
  }
  if (!plan.reply_segments.empty()) text += " reply chunk";
  for (const Piece& piece : plan.reply_segments) text += " " + PieceText(piece);
  return text;
}

std::string ToString(const ReplyPlan& plan) {
  std::string text = PlanText(plan.layout, plan.type, plan.header_size, plan.inline_pieces);
  if (!plan.writes.empty()) text += " writes";
  for (const PlannedWrite& write : plan.writes) text += " " + PieceText(write.source) + "->" + ToString(write.target);
  if (!plan.reads.empty()) text += " reads";
  for (const PlannedRead& read : plan.reads) text += " " + std::to_string(read.position) + ":" + PieceText(read.memory);
  return text;
}

}  // namespace stagecoach::rpcrdma
