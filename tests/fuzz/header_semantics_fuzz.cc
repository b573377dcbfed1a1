// What the chunk lists of a version 1 header mean: judged as a call's and as a reply's, pulled and put together over
// made-up memory of the peer, answered by what they offer; and a call planned here, whose header goes the whole way.
//
// Input: 13 bytes of choices (limits, shapes of a call and of a reply), then a message as it came in a Receive.
#include <algorithm>
#include <numeric>
#include <vector>

#include "base/cursor.h"
#include "rpcrdma/core/assemble.h"
#include "rpcrdma/core/chunk_planner.h"
#include "rpcrdma/core/pieces.h"
#include "rpcrdma/wire/header_v1.h"
#include "rpcrdma/wire/validate.h"
#include "rpcrdma/xdr/xdr_reader.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/messages.h"

namespace stagecoach::rpcrdma {
namespace {

using fuzz::Append;
using fuzz::Block;
using fuzz::Pattern;
using fuzz::Same;
using fuzz::Unreduced;
using fuzz::WithItems;
using stagecoach::testing::FuzzInput;

constexpr uint64_t kReplyMemoryMax = 1 << 14;
constexpr size_t kGuard = 16;

// The byte of the peer's memory that this steering tag and tagged offset name.
std::byte PeerByte(uint32_t handle, uint64_t offset) {
  return static_cast<std::byte>((offset * 0x9e3779b97f4a7c15u + handle * 0x85ebca6bu) >> 29);
}

bool Wraps(const Segment& segment) {
  return segment.length > 0 && segment.offset + (segment.length - 1) < segment.offset;
}

void CheckBounds(const ChunkLists& lists, const ChunkDataLimits& limits) {
  uint64_t reads = 0;
  for (const ReadSegment& read : lists.reads) {
    FUZZ_PROPERTY(read.position % 4 == 0 && !Wraps(read.target));
    reads += read.target.length;
  }
  FUZZ_PROPERTY(reads <= limits.read_bytes_max);
  uint64_t writes = TotalLength(lists.writes.segments());
  for (const Segment& segment : lists.writes.segments()) FUZZ_PROPERTY(!Wraps(segment));
  if (lists.reply) {
    writes += TotalLength(*lists.reply);
    for (const Segment& segment : *lists.reply) FUZZ_PROPERTY(!Wraps(segment));
  }
  FUZZ_PROPERTY(writes <= limits.write_bytes_max);
}

// Each position of the list is one chunk, of its segments in the order of the list.
void CheckGroups(const ReadList& list, const CallChunks& call) {
  FUZZ_PROPERTY(call.segments.size() == list.size());
  size_t segments = 0;
  for (size_t i = 0; i < call.chunks.size(); ++i) {
    const ReadChunk& chunk = call.chunks[i];
    FUZZ_PROPERTY(i == 0 || call.chunks[i - 1].position < chunk.position);
    std::vector<ReadSegment> expected;
    for (const ReadSegment& read : list) {
      if (read.position == chunk.position) expected.push_back(read);
    }
    const auto grouped = call.segments_of(chunk);
    FUZZ_PROPERTY(std::equal(grouped.begin(), grouped.end(), expected.begin(), expected.end()));
    FUZZ_PROPERTY(chunk.length ==
                  std::accumulate(grouped.begin(), grouped.end(), uint64_t{0},
                                  [](uint64_t sum, const ReadSegment& read) { return sum + read.target.length; }));
    segments += chunk.count;
  }
  FUZZ_PROPERTY(segments == list.size());
}

std::vector<Block> Pull(const CallChunks& call) {
  std::vector<Block> data;
  for (const ReadChunk& chunk : call.chunks) {
    Block& bytes = data.emplace_back();
    for (const ReadSegment& read : call.segments_of(chunk)) {
      for (uint32_t i = 0; i < read.target.length; ++i) {
        bytes.push_back(PeerByte(read.target.handle, read.target.offset + i));
      }
    }
  }
  return data;
}

// The message by painting: chunks at their positions, round-up behind them, what is left of the canvas from the base.
Block Paint(const CallChunks& call, ConstBytes base, const std::vector<Block>& data) {
  Block canvas(call.message_length);
  std::vector<bool> painted(call.message_length);
  for (size_t i = 0; i < call.chunks.size(); ++i) {
    const ReadChunk& chunk = call.chunks[i];
    if (chunk.position == 0) continue;
    const uint64_t end = chunk.position + chunk.length + XdrPad(chunk.length);
    FUZZ_PROPERTY(end <= call.message_length);
    for (uint64_t at = chunk.position; at < end; ++at) {
      FUZZ_PROPERTY(!painted[at]);
      painted[at] = true;
      if (at - chunk.position < chunk.length) canvas[at] = data[i][at - chunk.position];
    }
  }
  size_t next = 0;
  for (size_t at = 0; at < canvas.size(); ++at) {
    if (painted[at]) continue;
    FUZZ_PROPERTY(next < base.size());
    canvas[at] = base[next++];
  }
  FUZZ_PROPERTY(next == base.size());
  return canvas;
}

// The same stream as a decoder reads it: words, and each chunk where it stands, not copied.
void ReadThrough(const ReducedStream& stream, ConstBytes message) {
  XdrReader in(stream);
  Block read;
  const auto words_up_to = [&](uint64_t position) {
    while (in.ok() && in.position() < position) {
      std::byte word[4];
      ByteWriter(MutableBytes(word)).U32(in.U32("word"));
      if (in.ok()) Append(read, word);
    }
  };
  for (const ChunkData& chunk : stream.chunks) {
    words_up_to(chunk.position);
    const ConstBytes item = in.EligibleBytes("item", chunk.data.size());
    FUZZ_PROPERTY(in.ok() && item.data() == chunk.data.data() && item.size() == chunk.data.size());
    fuzz::AppendPadded(read, item);
  }
  words_up_to(message.size() & ~size_t{3});
  FUZZ_PROPERTY(in.ok() && read.size() == (message.size() & ~size_t{3}));
  FUZZ_PROPERTY(Same(read, message.first(read.size())));
  FUZZ_PROPERTY(in.Finish().has_value() == (message.size() % 4 == 0));
}

void AsCall(const Header& header, ConstBytes rest, const ChunkDataLimits& limits) {
  const auto call = ValidateCall(header, rest, limits);
  if (!call) {
    FUZZ_PROPERTY(ToString(call.error()) != nullptr);
    return;
  }
  const ChunkLists& lists = *header.chunks();
  CheckBounds(lists, limits);
  CheckGroups(lists.reads, *call);
  FUZZ_PROPERTY(call->has_position_zero() == !header.has_inline_message());
  const std::vector<Block> data = Pull(*call);
  const ConstBytes base = call->has_position_zero() ? ConstBytes(data[0]) : rest;
  const Block message = Paint(*call, base, data);
  const std::vector<ConstBytes> views(data.begin(), data.end());
  const ReducedStream stream = AssembleCall(*call, rest, views);
  FUZZ_PROPERTY(Same(Unreduced(stream.base, stream.chunks), message));
  ReadThrough(stream, message);
}

// Memory for what was offered, filled as one segment each; the guard behind it is nobody's.
struct Offered {
  explicit Offered(std::span<const Segment> segments) : memory(TotalLength(segments) + kGuard, std::byte{0x5a}) {
    size_t at = 0;
    for (uint32_t s = 0; s < segments.size(); ++s) {
      for (uint32_t i = 0; i < segments[s].length; ++i) memory[at++] = PeerByte(s, i);
    }
  }
  MutableBytes view() { return MutableBytes(memory).first(memory.size() - kGuard); }
  void CheckGuard() const {
    for (size_t i = 0; i < kGuard; ++i) FUZZ_PROPERTY(memory[memory.size() - 1 - i] == std::byte{0x5a});
  }
  Block memory;
};

Block Filled(std::span<const Segment> returned) {
  Block bytes;
  for (uint32_t s = 0; s < returned.size(); ++s) {
    for (uint32_t i = 0; i < returned[s].length; ++i) bytes.push_back(PeerByte(s, i));
  }
  return bytes;
}

// The header as the reply to a call that offered its lists, some segments longer.
void AsReply(const Header& header, ConstBytes rest, uint8_t longer) {
  const ChunkLists& returned = *header.chunks();
  ChunkLists offered{.writes = returned.writes, .reply = returned.reply};
  for (size_t i = 0; i < offered.writes.size(); ++i) {
    for (Segment& segment : offered.writes.mutable_chunk(i)) segment.length += longer & 0x0f;
  }
  if (offered.reply) {
    for (Segment& segment : *offered.reply) segment.length += longer >> 4;
  }
  uint64_t total = TotalLength(offered.writes.segments());
  if (offered.reply) total += TotalLength(*offered.reply);
  if (total > kReplyMemoryMax || !ValidateReply(header, rest, offered)) return;

  FUZZ_PROPERTY(returned.reads.empty());
  std::vector<Offered> memory;
  for (size_t i = 0; i < offered.writes.size(); ++i) memory.emplace_back(offered.writes[i]);
  Offered reply_memory(offered.reply ? offered.reply->view() : std::span<const Segment>());
  std::vector<MutableBytes> views;
  for (Offered& each : memory) views.push_back(each.view());
  const ReducedStream stream = AssembleReply(header, rest, offered, views, reply_memory.view());
  FUZZ_PROPERTY(stream.chunks.size() == returned.writes.size());
  for (size_t i = 0; i < stream.chunks.size(); ++i) {
    for (size_t s = 0; s < returned.writes[i].size(); ++s) {
      FUZZ_PROPERTY(returned.writes[i][s].length <= offered.writes[i][s].length);
    }
    FUZZ_PROPERTY(Same(stream.chunks[i].data, Filled(returned.writes[i])));
    FUZZ_PROPERTY(fuzz::Inside(stream.chunks[i].data, views[i]));
    memory[i].CheckGuard();
  }
  FUZZ_PROPERTY(Same(stream.base,
                     header.has_inline_message() ? Block(rest.begin(), rest.end()) : Filled(returned.reply->view())));
  reply_memory.CheckGuard();
}

// An encoded message with its items.
struct Shaped {
  Block base;
  std::vector<Block> data;
  EligibleItems items;
};
Shaped MakeShaped(uint32_t xid, size_t words, std::span<const uint32_t> lengths, uint8_t gaps) {
  Shaped shaped{.base = Pattern((words + 2) * 4, xid)};
  ByteWriter(MutableBytes(shaped.base)).U32(xid);
  uint64_t base_here = 8;
  uint64_t items_before = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    base_here = std::min<uint64_t>(base_here + 4 * ((gaps >> (2 * i)) & 3), shaped.base.size());
    shaped.data.push_back(Pattern(lengths[i], static_cast<uint32_t>(77 + i)));
    shaped.items.push_back({base_here + items_before, {}});
    items_before += lengths[i] + XdrPad(lengths[i]);
  }
  for (size_t i = 0; i < lengths.size(); ++i) shaped.items[i].data = shaped.data[i];
  return shaped;
}

// Carries the Writes of a plan out, into memory made of `offered`. Each must go on where the one before it ended:
// segments in order, every byte once, and none that is not to be filled.
void CarryOut(const ReplyPlan& plan, const EncodedMessage& message, const ChunkLists& offered,
              const std::vector<Block*>& memory) {
  struct Target {
    Segment segment;
    std::byte* place;
  };
  std::vector<Target> targets;
  const auto add = [&](std::span<const Segment> chunk, std::span<const Segment> filled, Block* block) {
    FUZZ_PROPERTY(chunk.size() == filled.size());
    block->assign(TotalLength(chunk), std::byte{0x5a});
    size_t at = 0;
    for (size_t s = 0; s < chunk.size(); ++s) {
      FUZZ_PROPERTY(filled[s].length <= chunk[s].length && filled[s].handle == chunk[s].handle &&
                    filled[s].offset == chunk[s].offset);
      if (filled[s].length > 0) targets.push_back({filled[s], block->data() + at});
      at += chunk[s].length;
    }
  };
  FUZZ_PROPERTY(plan.chunks.writes.size() == offered.writes.size());
  FUZZ_PROPERTY(plan.chunks.reply.has_value() == offered.reply.has_value());
  for (size_t i = 0; i < offered.writes.size(); ++i) add(offered.writes[i], plan.chunks.writes[i], memory[i]);
  if (offered.reply) add(*offered.reply, *plan.chunks.reply, memory.back());
  size_t next = 0;
  uint32_t done = 0;
  for (const PlannedWrite& write : plan.writes) {
    static constexpr std::byte kZeros[4] = {};
    FUZZ_PROPERTY(next < targets.size() && write.source.length == write.target.length && write.target.length > 0);
    const Target& target = targets[next];
    FUZZ_PROPERTY(write.target.handle == target.segment.handle && write.target.offset == target.segment.offset + done);
    FUZZ_PROPERTY(write.target.length <= target.segment.length - done);
    const ConstBytes source = write.source.source == Piece::Source::kPad ? ConstBytes(kZeros).first(write.source.length)
                                                                         : PieceBytes(message, write.source);
    CopyBytes({target.place + done, write.target.length}, source);
    done += write.target.length;
    if (done == target.segment.length) {
      ++next;
      done = 0;
    }
  }
  FUZZ_PROPERTY(next == targets.size() && done == 0);
}

// The reply as the other end sees it, from the Send and the memory that was written.
void ReplyArrives(const ReplyPlan& plan, const Shaped& reply, uint32_t xid, const ChunkLists& offered,
                  uint32_t send_inline) {
  const EncodedMessage message{reply.base, reply.items};
  std::vector<Block> memory(offered.writes.size() + 1);
  std::vector<Block*> places;
  for (Block& block : memory) places.push_back(&block);
  CarryOut(plan, message, offered, places);

  Block rest(plan.inline_bytes);
  ByteWriter out(rest);
  WriteInline(message, plan.inline_pieces, out);
  FUZZ_PROPERTY(out.ok() && out.remaining() == 0);
  const Block sent = fuzz::Encode(MakeReplyHeader(plan, xid, 1), rest);
  FUZZ_PROPERTY(sent.size() == plan.send_size() && sent.size() <= send_inline);
  ByteReader in(sent);
  const auto header = DecodeHeaderV1(in, {.segments_per_chunk_max = 4096, .write_segments_max = 4096});
  FUZZ_PROPERTY(header.has_value() && ValidateReply(*header, in.Rest(), offered).has_value());
  std::vector<MutableBytes> views(memory.begin(), memory.end() - 1);
  const ReducedStream stream = AssembleReply(*header, in.Rest(), offered, views, memory.back());
  FUZZ_PROPERTY(Same(stream.base, WithItems(reply.base, reply.items, offered.writes.size())));
  FUZZ_PROPERTY(stream.chunks.size() == offered.writes.size());
  for (size_t i = 0; i < stream.chunks.size(); ++i) {
    FUZZ_PROPERTY(Same(stream.chunks[i].data, i < reply.data.size() ? reply.data[i] : Block()));
  }
}

// Whether a reply of this shape can travel, in other words than the planner's.
bool CanTravel(const Shaped& reply, const ChunkLists& offered, uint32_t send_inline) {
  for (size_t i = 0; i < std::min(reply.data.size(), offered.writes.size()); ++i) {
    if (reply.data[i].size() > TotalLength(offered.writes[i])) return false;
  }
  const size_t header = kFixedFieldsSize + EncodedSize(ChunkLists{.writes = offered.writes, .reply = offered.reply});
  const size_t message = WithItems(reply.base, reply.items, offered.writes.size()).size();
  if (header + message <= send_inline) return true;
  return header <= send_inline && offered.reply && message <= TotalLength(*offered.reply);
}

void Answer(const Shaped& reply, uint32_t xid, const ChunkLists& offered, uint32_t send_inline) {
  for (const ReplyChunkUse use : {ReplyChunkUse::kWheneverOffered, ReplyChunkUse::kWhenNeeded}) {
    const auto plan = PlanReply({.base_size = reply.base.size(), .items = reply.items}, offered, send_inline, use);
    FUZZ_PROPERTY(plan.has_value() == CanTravel(reply, offered, send_inline));
    if (!plan) continue;
    FUZZ_PROPERTY(!ToString(*plan).empty());
    ReplyArrives(*plan, reply, xid, offered, send_inline);
  }
}

// What the header offers, as a responder uses it for some reply.
void AnswerWithin(const Header& header, uint8_t words, std::span<const uint32_t> lengths, uint32_t send_inline) {
  const ChunkLists& lists = *header.chunks();
  uint64_t total = TotalLength(lists.writes.segments());
  if (lists.reply) total += TotalLength(*lists.reply);
  if (total > kReplyMemoryMax) return;
  Answer(MakeShaped(header.xid, words, lengths, 0x1b), header.xid, {.writes = lists.writes, .reply = lists.reply},
         send_inline);
}

// A call planned here: its header is decoded as it was encoded, its chunks put it together again, and what it offers is
// enough for the longest reply that was spoken of.
void PlanAndReceive(FuzzInput& input) {
  const uint8_t choices = input.Byte();
  const uint8_t segment_choice = input.Byte();
  const uint32_t lengths[] = {input.Byte() * 2u, input.Byte()};
  const size_t words = input.Byte();
  const uint32_t results[] = {input.Byte() * 3u, input.Byte()};
  const uint64_t reply_words = input.Byte();
  const uint32_t inline_threshold = 64u << (choices & 3);
  const PlanLimits limits{.send_inline = inline_threshold,
                          .receive_inline = inline_threshold,
                          .read_segments_max = 1u + (segment_choice & 15),
                          .segments_per_chunk_max = 1u + (segment_choice >> 4),
                          .exposed_segments_max = 24,
                          .segment_length_max = (choices & 4) != 0 ? 1u << 30 : 40};
  const Shaped call = MakeShaped(9, words, std::span(lengths).first((choices >> 3) & 1 ? 2 : 1), segment_choice);
  const ResultShape result_shapes[] = {{results[0], results[0] + 3}, {results[1], results[1]}};
  const CallShape shape{.base_size = call.base.size(),
                        .items = call.items,
                        .results = std::span(result_shapes).first((choices >> 4) & 3 ? 2 : 0),
                        .reply_base_max = 8 + reply_words * 4,
                        .direct_arguments = (choices & 0x40) == 0,
                        .direct_results = (choices & 0x40) == 0};
  const auto plan = PlanCall(shape, limits);
  if (!plan) return;
  FUZZ_PROPERTY(!ToString(*plan).empty() && plan->send_size() <= limits.send_inline);
  FUZZ_PROPERTY(plan->reads.size() <= limits.read_segments_max);
  FUZZ_PROPERTY(plan->exposed_segments() <= limits.exposed_segments_max);

  const EncodedMessage message{call.base, call.items};
  std::vector<Exposure> exposures;
  for (uint32_t i = 0; i < plan->exposed_segments(); ++i) exposures.push_back({i + 1, uint64_t{i} << 20});
  Block rest(plan->inline_bytes);
  ByteWriter out(rest);
  WriteInline(message, plan->inline_pieces, out);
  const Header planned = MakeCallHeader(*plan, 9, 1, exposures);
  const Block sent = fuzz::Encode(planned, rest);
  FUZZ_PROPERTY(sent.size() == plan->send_size());
  ByteReader in(sent);
  const auto header = DecodeHeaderV1(in);
  FUZZ_PROPERTY(header.has_value() && *header == planned);
  const auto received = ValidateCall(*header, in.Rest());
  FUZZ_PROPERTY(received.has_value());
  std::vector<Block> data;
  for (const ReadChunk& chunk : received->chunks) {
    Block& bytes = data.emplace_back();
    for (const ReadSegment& read : received->segments_of(chunk)) {
      FUZZ_PROPERTY(read.target.handle >= 1 && read.target.handle <= plan->reads.size());
      const Piece& piece = plan->reads[read.target.handle - 1].memory;
      FUZZ_PROPERTY(piece.length == read.target.length && piece.length <= limits.segment_length_max);
      if (piece.source == Piece::Source::kPad) {
        bytes.resize(bytes.size() + piece.length);
      } else {
        Append(bytes, PieceBytes(message, piece));
      }
    }
  }
  const std::vector<ConstBytes> views(data.begin(), data.end());
  const ReducedStream stream = AssembleCall(*received, in.Rest(), views);
  FUZZ_PROPERTY(Same(Unreduced(stream.base, stream.chunks), WithItems(call.base, call.items, 0)));

  // [5666bis:5.3.4#1]
  const Shaped longest = MakeShaped(9, reply_words, std::span(results).first(shape.results.size()), 0);
  FUZZ_PROPERTY(CanTravel(longest, *header->chunks(), limits.receive_inline));
  Answer(longest, 9, {.writes = header->chunks()->writes, .reply = header->chunks()->reply}, limits.receive_inline);
}

void Run(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  const uint8_t choices = input.Byte();
  const uint8_t longer = input.Byte();
  const uint8_t words = input.Byte();
  const uint32_t lengths[] = {input.Byte() * 2u, input.Byte()};
  PlanAndReceive(input);

  const ChunkDataLimits limits{.read_bytes_max = 64u << (choices & 7), .write_bytes_max = 64u << ((choices >> 3) & 7)};
  ByteReader in(input.Rest());
  const auto header = DecodeHeaderV1(in);
  if (!header || header->chunks() == nullptr) return;
  const Block again = fuzz::Encode(*header, in.Rest());
  FUZZ_PROPERTY(Same(again, input.Rest()));
  AsCall(*header, in.Rest(), limits);
  AsReply(*header, in.Rest(), longer);
  AnswerWithin(*header, words, std::span(lengths).first(choices >> 6 & 1 ? 2 : 1), (choices & 0x80) != 0 ? 64 : 512);
}

}  // namespace
}  // namespace stagecoach::rpcrdma

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  stagecoach::rpcrdma::Run(data, size);
  return 0;
}
