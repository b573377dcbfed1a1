// Properties of the chunk planner, over thousands of seeded messages: whatever is planned is carried out here over
// plain memory, byte by byte, and read back at the other end.
//
// A message is a script of words and eligible opaques, encoded with XdrWriter, so that the far end can read it with
// XdrReader and must find the same script. Sizes lean towards what breaks: 0, odd, and one more or less than the
// thresholds.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/prng.h"
#include "rpcrdma/core/assemble.h"
#include "rpcrdma/core/chunk_planner.h"
#include "rpcrdma/wire/header_v1.h"
#include "rpcrdma/wire/header_v2.h"
#include "rpcrdma/xdr/xdr_reader.h"
#include "rpcrdma/xdr/xdr_writer.h"

namespace stagecoach::rpcrdma {
namespace {

constexpr uint32_t kXid = 0x5347434f;
constexpr uint32_t kSeeds = 2500;

using Buffer = std::vector<std::byte>;

Buffer RandomBytes(Prng& prng, uint64_t size) {
  Buffer bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(prng.Next());
  return bytes;
}

// A length that is likely to be somebody's edge, given the threshold in force.
uint64_t EdgyLength(Prng& prng, uint32_t threshold) {
  switch (prng.Below(5)) {
    case 0:
      return prng.Below(9);
    case 1:
      return threshold - std::min<uint64_t>(threshold, kMinHeaderSize + prng.Below(160));
    case 2:
      return threshold + prng.Between(0, 8) - 4;
    case 3:
      return prng.Below(2 * threshold);
    default:
      return prng.Below(20000);
  }
}

// One message as its encoder sees it.
struct Script {
  struct Step {
    uint32_t words = 0;  // before the opaque
    Buffer opaque;
  };
  std::vector<Step> steps;
  uint32_t words_at_end = 0;

  // The encoded message; items view into the script.
  struct Message {
    Buffer base;
    EligibleItems items;
    uint64_t unreduced = 0;
  };
  Message Encode() const {
    uint64_t words = 2 + words_at_end;
    for (const Step& step : steps) words += step.words + 1;
    Message message;
    message.base.resize(4 * words);
    XdrWriter out(message.base);
    out.U32(kXid);
    for (const Step& step : steps) {
      for (uint32_t i = 0; i < step.words; ++i) out.U32(i);
      out.EligibleOpaque(step.opaque);
    }
    for (uint32_t i = 0; i < words_at_end; ++i) out.U32(~i);
    out.U32(0xfeedface);
    EXPECT_TRUE(out.ok());
    EXPECT_EQ(out.written().size(), message.base.size());
    message.items = out.eligible();
    message.unreduced = out.position();
    return message;
  }

  void ExpectReadBack(XdrReader& in) const {
    EXPECT_EQ(in.U32("xid"), kXid);
    for (const Step& step : steps) {
      for (uint32_t i = 0; i < step.words; ++i) EXPECT_EQ(in.U32("word"), i);
      EXPECT_TRUE(std::ranges::equal(in.EligibleOpaque("opaque", 0xffffffff), step.opaque));
    }
    for (uint32_t i = 0; i < words_at_end; ++i) EXPECT_EQ(in.U32("word"), ~i);
    EXPECT_EQ(in.U32("end"), 0xfeedface);
    const auto finished = in.Finish();
    EXPECT_TRUE(finished.has_value()) << ToString(finished.error());
  }
};

Script RandomScript(Prng& prng, uint32_t threshold, uint64_t items_max) {
  Script script;
  const uint64_t items = prng.Below(items_max + 1);
  for (uint64_t i = 0; i < items; ++i) {
    script.steps.push_back(
        {.words = static_cast<uint32_t>(prng.Below(30)), .opaque = RandomBytes(prng, EdgyLength(prng, threshold))});
  }
  script.words_at_end = static_cast<uint32_t>((prng.OneIn(3) ? EdgyLength(prng, threshold) : prng.Below(100)) / 4);
  return script;
}

PlanLimits RandomLimits(Prng& prng) {
  PlanLimits limits;
  limits.send_inline = static_cast<uint32_t>(prng.OneIn(3) ? prng.Between(256, 5000) : 1024 * prng.Between(1, 4));
  limits.receive_inline = static_cast<uint32_t>(prng.OneIn(3) ? prng.Between(256, 5000) : 1024 * prng.Between(1, 4));
  if (prng.OneIn(2)) limits.segment_length_max = static_cast<uint32_t>(prng.Between(500, 9000));
  if (prng.OneIn(8)) limits.read_segments_max = static_cast<uint32_t>(prng.Below(5));
  if (prng.OneIn(8)) limits.exposed_segments_max = static_cast<uint32_t>(prng.Below(7));
  // What a responder has said that it takes, and what is copied to serve it.
  if (prng.OneIn(6)) limits.read_chunks_max = static_cast<uint32_t>(prng.Below(4));
  if (prng.OneIn(6)) limits.segments_per_read_chunk_max = static_cast<uint32_t>(prng.Below(5));
  if (prng.OneIn(10)) limits.write_chunks_max = static_cast<uint32_t>(prng.Below(4));
  if (prng.OneIn(10)) limits.segments_per_chunk_max = static_cast<uint32_t>(prng.Between(1, 6));
  if (prng.OneIn(2)) limits.gather_bytes_max = prng.OneIn(2) ? prng.Below(8000) : 1u << 20;
  return limits;
}

// The first of the limits that a plan does not keep to; null: it keeps to all.
const char* Exceeded(const CallPlan& plan, const PlanLimits& limits) {
  std::map<uint32_t, uint32_t> read_chunks;  // segments, by position
  for (const PlannedRead& read : plan.reads) {
    ++read_chunks[read.position];
    if (read.memory.length > limits.segment_length_max) return "segment_length_max";
  }
  if (plan.reads.size() > limits.read_segments_max) return "read_segments_max";
  if (read_chunks.size() - read_chunks.count(0) > limits.read_chunks_max) return "read_chunks_max";
  for (const auto& [position, segments] : read_chunks) {
    if (segments > limits.segments_per_read_chunk_max) return "segments_per_read_chunk_max";
  }
  if (plan.write_counts.size() > limits.write_chunks_max) return "write_chunks_max";
  for (const uint32_t count : plan.write_counts) {
    if (count > limits.segments_per_chunk_max) return "segments_per_chunk_max of a Write chunk";
  }
  if (plan.reply_segments.size() > limits.segments_per_chunk_max) return "segments_per_chunk_max of the Reply chunk";
  if (plan.exposed_segments() > limits.exposed_segments_max) return "exposed_segments_max";
  if (plan.gathered_bytes > limits.gather_bytes_max) return "gather_bytes_max";
  if (plan.send_size() > limits.send_inline) return "send_inline";
  return nullptr;
}

// The same without any bound on counts. Nothing is copied then, either.
PlanLimits WithoutCounts(PlanLimits limits) {
  for (uint32_t* count : {&limits.read_segments_max, &limits.write_chunks_max, &limits.segments_per_chunk_max,
                          &limits.exposed_segments_max, &limits.read_chunks_max, &limits.segments_per_read_chunk_max}) {
    *count = UINT32_MAX;
  }
  return limits;
}

ConstBytes BytesOf(const Script::Message& message, const Piece& piece) {
  static constexpr std::byte kZeros[3] = {};
  if (piece.source == Piece::Source::kPad) return ConstBytes(kZeros).first(piece.length);
  const ConstBytes source =
      piece.source == Piece::Source::kItem ? message.items[piece.index].data : ConstBytes(message.base);
  return source.subspan(piece.offset, piece.length);
}

Buffer Gather(const Script::Message& message, std::span<const Piece> pieces) {
  Buffer bytes;
  for (const Piece& piece : pieces) {
    const ConstBytes part = BytesOf(message, piece);
    bytes.insert(bytes.end(), part.begin(), part.end());
  }
  return bytes;
}

// How many segments pieces of memory take.
uint64_t Segments(std::span<const Piece> pieces, const PlanLimits& limits) {
  uint64_t segments = 0;
  for (const Piece& piece : pieces)
    segments += (piece.length + limits.segment_length_max - 1) / limits.segment_length_max;
  return segments;
}

// Counts how often each byte of the message travels.
class Coverage {
 public:
  explicit Coverage(const Script::Message& message) : base_(message.base.size()) {
    for (const EligibleItem& item : message.items) items_.emplace_back(item.data.size());
  }
  void Add(const Piece& piece) {
    if (piece.source == Piece::Source::kPad) return;
    auto& counts = piece.source == Piece::Source::kItem ? items_[piece.index] : base_;
    for (uint64_t i = 0; i < piece.length; ++i) ++counts[piece.offset + i];
  }
  bool EachExactlyOnce() const {
    const auto once = [](const std::vector<int>& counts) {
      return std::ranges::all_of(counts, [](int count) { return count == 1; });
    };
    return once(base_) && std::ranges::all_of(items_, once);
  }

 private:
  std::vector<int> base_;
  std::vector<std::vector<int>> items_;
};

// Exposed memory by steering tag, as a peer sees it. Handle i is segment i; offsets are what the exposer chose.
struct World {
  std::vector<MutableBytes> memory;
  std::vector<Exposure> exposures;

  void Expose(Prng& prng, MutableBytes bytes) {
    exposures.push_back({static_cast<uint32_t>(memory.size()), prng.Next() >> 8});
    memory.push_back(bytes);
  }
  ConstBytes Read(const Segment& segment) const {
    EXPECT_EQ(segment.offset, exposures[segment.handle].offset);
    EXPECT_EQ(segment.length, memory[segment.handle].size());
    return memory[segment.handle];
  }
  void Write(const Segment& target, ConstBytes bytes) {
    ASSERT_EQ(target.length, bytes.size());
    const uint64_t at = target.offset - exposures[target.handle].offset;
    ASSERT_LE(at + bytes.size(), memory[target.handle].size());
    CopyBytes(memory[target.handle].subspan(at), bytes);
  }
};

MutableBytes Writable(ConstBytes bytes) {
  return {const_cast<std::byte*>(bytes.data()), bytes.size()};
}

// One call with its reply, of version 1 or 2: planned, exposed, encoded, carried, decoded and read back.
class Exchange {
 public:
  explicit Exchange(uint64_t seed) : prng_(seed), limits_(RandomLimits(prng_)) {
    limits_.layout = seed % 2 == 0 ? kHeaderLayoutV2 : kHeaderLayoutV1;
    call_ = RandomScript(prng_, limits_.send_inline, 4);
    reply_ = RandomScript(prng_, limits_.receive_inline, 3);
    call_message_ = call_.Encode();
    reply_message_ = reply_.Encode();
    for (const auto& step : reply_.steps) {
      // What the requester expects is at least what comes; its memory may or may not have room for round-up.
      const uint64_t max = step.opaque.size() + (prng_.OneIn(2) ? prng_.Below(100) : 0);
      results_.push_back({.max_length = max, .memory_length = max + prng_.Below(6)});
      result_memory_.emplace_back(results_.back().memory_length);
    }
    reply_base_max_ = reply_message_.base.size() + (prng_.OneIn(2) ? prng_.Below(100) : 0);
    shape_ = {.base_size = call_message_.base.size(),
              .items = call_message_.items,
              .results = results_,
              .reply_base_max = reply_base_max_,
              .direct_arguments = !prng_.OneIn(4),
              .direct_results = !prng_.OneIn(4),
              .reply_chunk_min = prng_.OneIn(8) ? prng_.Below(9000) : 0};
    if (prng_.OneIn(2)) reply_chunk_use_ = ReplyChunkUse::kWhenNeeded;
  }

  const CallShape& shape() const { return shape_; }
  const PlanLimits& limits() const { return limits_; }

  // False when the planner refused.
  bool RunCall() {
    auto plan = PlanCall(shape_, limits_);
    if (!plan) return false;
    plan_ = *plan;
    SCOPED_TRACE(ToString(plan_));
    CheckCallPlan();
    Expose();
    // Version 2 may name a handle.
    const bool names = limits_.layout.has_flags && !world_.exposures.empty();
    header_ = MakeCallHeader(plan_, kXid, 1, world_.exposures, names ? world_.exposures.back().handle : 0);
    EXPECT_EQ(header_.is_response(), false);
    const Buffer send = EncodeSend(header_, Gather(call_message_, plan_.inline_pieces));
    EXPECT_EQ(send.size(), plan_.send_size());
    EXPECT_LE(send.size(), limits_.send_inline);
    ReceiveCall(send);
    return true;
  }

  void RunReply() {
    const auto plan =
        PlanReply({.base_size = reply_message_.base.size(), .items = reply_message_.items}, *header_.chunks(),
                  limits_.receive_inline, reply_chunk_use_, {.layout = limits_.layout});
    // What a plan offered is enough for every reply within its bounds.
    ASSERT_TRUE(plan.has_value()) << ToString(plan.error()) << " " << ToString(plan_);
    SCOPED_TRACE(ToString(*plan));
    Coverage coverage(reply_message_);
    for (const Piece& piece : plan->inline_pieces) coverage.Add(piece);
    for (const PlannedWrite& write : plan->writes) {
      coverage.Add(write.source);
      world_.Write(write.target, BytesOf(reply_message_, write.source));
    }
    EXPECT_TRUE(coverage.EachExactlyOnce());
    const Buffer send = EncodeSend(MakeReplyHeader(*plan, kXid, 1), Gather(reply_message_, plan->inline_pieces));
    EXPECT_EQ(send.size(), plan->send_size());
    EXPECT_LE(send.size(), limits_.receive_inline);
    ReceiveReply(send);
  }

 private:
  Buffer EncodeSend(const Header& header, const Buffer& message) const {
    const bool v2 = limits_.layout.has_flags;
    Buffer send((v2 ? EncodedSizeV2(header) : EncodedSizeV1(header)) + message.size());
    ByteWriter out(send);
    v2 ? EncodeHeaderV2(header, out) : EncodeHeaderV1(header, out);
    out.Bytes(message);
    EXPECT_TRUE(out.ok());
    EXPECT_EQ(out.remaining(), 0u);
    return send;
  }

  void CheckCallPlan() {
    Coverage coverage(call_message_);
    for (const Piece& piece : plan_.inline_pieces) coverage.Add(piece);
    for (const Piece& piece : plan_.gathered_pieces) coverage.Add(piece);
    gathered_ = Gather(call_message_, plan_.gathered_pieces);
    EXPECT_EQ(gathered_.size(), plan_.gathered_bytes);
    EXPECT_EQ(plan_.type, plan_.inline_pieces.empty() ? MessageType::kNomsg : MessageType::kMsg);
    const char* const exceeded = Exceeded(plan_, limits_);
    EXPECT_EQ(exceeded, nullptr) << exceeded;
    uint32_t last_position = 0;
    for (const PlannedRead& read : plan_.reads) {
      if (read.memory.source != Piece::Source::kGathered) coverage.Add(read.memory);
      EXPECT_EQ(read.position % 4, 0u);
      EXPECT_GE(read.position, last_position);
      EXPECT_GT(read.memory.length, 0u);
      // Round-up is elided, but within the message.
      EXPECT_TRUE(read.memory.source != Piece::Source::kPad || read.position == 0);
      last_position = read.position;
    }
    EXPECT_TRUE(coverage.EachExactlyOnce());
    EXPECT_TRUE(shape_.direct_arguments || last_position == 0);
    EXPECT_TRUE(shape_.direct_results || plan_.write_counts.empty());
    // A copy is for what would be too many pieces.
    EXPECT_TRUE(plan_.gathered_bytes == 0 ||
                Segments(plan_.gathered_pieces, limits_) > limits_.segments_per_read_chunk_max);
    // Chunks are used only when needed.
    const uint64_t without_reads = plan_.header_size - plan_.reads.size() * kReadEntrySize + call_message_.unreduced;
    EXPECT_EQ(plan_.reads.empty(), without_reads <= limits_.send_inline);
  }

  void Expose() {
    for (const PlannedRead& read : plan_.reads) {
      const bool is_copy = read.memory.source == Piece::Source::kGathered;
      world_.Expose(prng_, is_copy ? MutableBytes(gathered_).subspan(read.memory.offset, read.memory.length)
                                   : Writable(BytesOf(call_message_, read.memory)));
    }
    for (const Piece& piece : plan_.write_segments) {
      world_.Expose(prng_, MutableBytes(result_memory_[piece.index]).subspan(piece.offset, piece.length));
    }
    reply_memory_.resize(plan_.reply_capacity);
    for (const Piece& piece : plan_.reply_segments) {
      world_.Expose(prng_, MutableBytes(reply_memory_).subspan(piece.offset, piece.length));
    }
  }

  Result<Header, HeaderFault> Decode(ByteReader& in) const {
    return limits_.layout.has_flags ? DecodeHeaderV2(in) : DecodeHeaderV1(in);
  }

  void ReceiveCall(const Buffer& send) {
    ByteReader in{ConstBytes(send)};
    const auto header = Decode(in);
    ASSERT_TRUE(header.has_value()) << ToString(header.error());
    EXPECT_EQ(*header, header_);
    const auto chunks = ValidateCall(*header, in.Rest());
    ASSERT_TRUE(chunks.has_value()) << ToString(chunks.error());
    EXPECT_EQ(chunks->message_length, call_message_.unreduced);
    std::vector<Buffer> pulled;
    for (const ReadChunk& chunk : chunks->chunks) {
      Buffer& data = pulled.emplace_back();
      for (const ReadSegment& segment : chunks->segments_of(chunk)) {
        const ConstBytes bytes = world_.Read(segment.target);
        data.insert(data.end(), bytes.begin(), bytes.end());
      }
    }
    const std::vector<ConstBytes> views(pulled.begin(), pulled.end());
    const ReducedStream stream = AssembleCall(*chunks, in.Rest(), views);
    XdrReader reader(stream);
    call_.ExpectReadBack(reader);
  }

  void ReceiveReply(const Buffer& send) {
    ByteReader in{ConstBytes(send)};
    const auto header = Decode(in);
    ASSERT_TRUE(header.has_value()) << ToString(header.error());
    EXPECT_EQ(header->is_response(), limits_.layout.has_flags);
    const auto valid = ValidateReply(*header, in.Rest(), *header_.chunks());
    ASSERT_TRUE(valid.has_value()) << ToString(valid.error());
    std::vector<MutableBytes> offered;
    for (size_t i = 0; i < plan_.write_counts.size(); ++i) offered.emplace_back(result_memory_[i]);
    const ReducedStream stream = AssembleReply(*header, in.Rest(), *header_.chunks(), offered, reply_memory_);
    XdrReader reader(stream);
    reply_.ExpectReadBack(reader);
  }

  Prng prng_;
  PlanLimits limits_;
  Script call_;
  Script reply_;
  Script::Message call_message_;
  Script::Message reply_message_;
  std::vector<ResultShape> results_;
  std::vector<Buffer> result_memory_;
  uint64_t reply_base_max_ = 0;
  CallShape shape_;
  ReplyChunkUse reply_chunk_use_ = ReplyChunkUse::kWheneverOffered;
  CallPlan plan_;
  Buffer gathered_;
  Header header_;
  World world_;
  Buffer reply_memory_;
};

TEST(ChunkPlannerProperty, EveryByteTravelsOnceWithinTheThresholdAndIsReadBackInPlace) {
  uint32_t planned = 0;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Exchange exchange(seed);
    if (!exchange.RunCall()) continue;
    ++planned;
    exchange.RunReply();
    ASSERT_FALSE(HasFailure());
  }
  // Tight limits make some refusals; most shapes must go.
  EXPECT_GT(planned, kSeeds * 3 / 4);
}

// What the reply is offered decides what is left for the call; with an empty call nothing else is planned.
std::optional<CallPlan> PlanOfReply(CallShape shape, const PlanLimits& limits) {
  shape.base_size = 0;
  shape.items = {};
  const auto plan = PlanCall(shape, limits);
  return plan ? std::optional(*plan) : std::nullopt;
}

// Whether all of the call can travel from position zero on, its items in it: as it lies in memory, or, when that would
// be too many pieces, in one copy.
bool CanTravelWhole(const CallShape& shape, const PlanLimits& limits, const CallPlan& reply) {
  uint64_t bytes = shape.base_size;
  uint64_t at = 0;  // of the base
  uint64_t before = 0;
  uint64_t segments = 0;
  const auto add = [&](uint64_t length) {
    segments += (length + limits.segment_length_max - 1) / limits.segment_length_max;
  };
  for (const EligibleItem& item : shape.items) {
    const uint64_t length = item.data.size();
    if (length > 0) {
      add(item.position - before - at);
      at = item.position - before;
      add(length);
      add(XdrPad(length));
    }
    before += XdrRoundUp(length);
    bytes += XdrRoundUp(length);
  }
  add(shape.base_size - at);
  if (segments > limits.segments_per_read_chunk_max && bytes <= limits.gather_bytes_max) {
    segments = 0;
    add(bytes);
  }
  return segments <= limits.segments_per_read_chunk_max && segments <= limits.read_segments_max &&
         reply.exposed_segments() + segments <= limits.exposed_segments_max &&
         reply.header_size + segments * kReadEntrySize <= limits.send_inline;
}

TEST(ChunkPlannerProperty, ACallIsRefusedForItsCountsOnlyWhenItWouldHaveTooMany) {
  uint32_t refused = 0;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Exchange exchange(seed);
    const CallShape& shape = exchange.shape();
    const PlanLimits& limits = exchange.limits();
    const auto plan = PlanCall(shape, limits);
    if (plan.has_value()) continue;
    ++refused;
    // Of its own plans no legal one is refused.
    const auto unbounded = PlanCall(shape, WithoutCounts(limits));
    if (unbounded.has_value()) {
      ASSERT_NE(Exceeded(*unbounded, limits), nullptr) << ToString(*unbounded);
    }
    // Nor is what would go as one message.
    if (const auto reply = PlanOfReply(shape, limits)) {
      ASSERT_FALSE(CanTravelWhole(shape, limits, *reply)) << ToString(plan.error()) << " " << ToString(*reply);
    }
  }
  EXPECT_GT(refused, kSeeds / 10);
}

TEST(ChunkPlannerProperty, GenerousLimitsRefuseNothing) {
  for (uint64_t seed = 1; seed <= kSeeds / 4; ++seed) {
    const auto threshold = static_cast<uint32_t>(1024 + seed % 9);
    const PlanLimits generous{.send_inline = threshold, .receive_inline = threshold};
    const Exchange exchange(seed);
    const auto plan = PlanCall(exchange.shape(), generous);
    ASSERT_TRUE(plan.has_value()) << "seed " << seed << ": " << ToString(plan.error());
  }
}

TEST(ChunkPlannerProperty, EveryThresholdIsExact) {
  for (const HeaderLayout& layout : {kHeaderLayoutV1, kHeaderLayoutV2}) {
    const uint64_t header = layout.version == 1 ? 28 : 36;
    for (uint32_t threshold = 1024; threshold <= 1031; ++threshold) {
      const PlanLimits limits{.layout = layout, .send_inline = threshold, .receive_inline = threshold};
      for (uint64_t length = threshold - 160; length <= threshold; ++length) {
        SCOPED_TRACE(std::to_string(length) + " of " + std::to_string(threshold));
        const std::vector<EligibleItem> items = {{112, AsBytes(static_cast<const void*>(nullptr), length)}};
        const uint64_t whole = header + 112 + length + XdrPad(length);
        const auto call = PlanCall({.base_size = 112, .items = items, .reply_base_max = 24}, limits);
        ASSERT_TRUE(call.has_value());
        EXPECT_EQ(call->reads.empty(), whole <= threshold);
        const auto reply = PlanReply({.base_size = 112, .items = items}, {}, threshold, {}, {.layout = layout});
        EXPECT_EQ(reply.has_value(), whole <= threshold);
        const auto plain = PlanCall({.base_size = length, .reply_base_max = 24}, limits);
        ASSERT_TRUE(plain.has_value());
        EXPECT_EQ(plain->type == MessageType::kMsg, header + length <= threshold);
        const auto offering = PlanCall({.base_size = 40, .reply_base_max = length}, limits);
        ASSERT_TRUE(offering.has_value());
        EXPECT_EQ(offering->reply_segments.empty(), header + length <= threshold);
      }
    }
  }
}

TEST(ChunkPlannerProperty, TheSameShapeGivesTheSamePlan) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    const Exchange a(seed);
    const Exchange b(seed);
    const auto plan_a = PlanCall(a.shape(), a.limits());
    const auto plan_b = PlanCall(b.shape(), b.limits());
    ASSERT_EQ(plan_a.has_value(), plan_b.has_value());
    if (plan_a.has_value()) {
      EXPECT_EQ(ToString(*plan_a), ToString(*plan_b));
    }
  }
}

uint64_t AnyNumber(Prng& prng) {
  return prng.OneIn(2) ? prng.Below(4096) : prng.Next() >> prng.Below(64);
}

TEST(ChunkPlannerProperty, ShapesThatMakeNoSenseGetAnAnswerToo) {
  uint32_t refused = 0;
  for (uint64_t seed = 1; seed <= 20000; ++seed) {
    Prng prng(seed);
    std::vector<EligibleItem> items(prng.Below(4));
    // Only sizes are looked at: these views lead nowhere.
    for (auto& item : items) item = {AnyNumber(prng), AsBytes(static_cast<const void*>(nullptr), AnyNumber(prng))};
    std::vector<ResultShape> results(prng.Below(3));
    for (auto& result : results) result = {AnyNumber(prng), AnyNumber(prng)};
    PlanLimits limits;
    for (uint32_t* limit : {&limits.send_inline, &limits.receive_inline, &limits.read_segments_max,
                            &limits.write_chunks_max, &limits.segments_per_chunk_max, &limits.exposed_segments_max,
                            &limits.segment_length_max, &limits.read_chunks_max, &limits.segments_per_read_chunk_max}) {
      // Counts stay small: a limit of four billion segments may be used up.
      *limit = static_cast<uint32_t>(prng.OneIn(4) ? prng.Below(4) : prng.Below(4096));
    }
    if (prng.OneIn(2)) limits.gather_bytes_max = AnyNumber(prng);
    const auto plan = PlanCall({.base_size = AnyNumber(prng),
                                .items = items,
                                .results = results,
                                .reply_base_max = AnyNumber(prng),
                                .direct_arguments = prng.OneIn(2),
                                .direct_results = prng.OneIn(2),
                                .reply_chunk_min = prng.OneIn(4) ? AnyNumber(prng) : 0},
                               limits);
    if (!plan.has_value()) {
      ++refused;
      continue;
    }
    EXPECT_EQ(Exceeded(*plan, limits), nullptr);
  }
  EXPECT_GT(refused, 0u);
  EXPECT_LT(refused, 20000u);
}

// What some peer offered for a reply, with the memory behind it.
struct Offer {
  ChunkLists lists;
  std::vector<Buffer> write_memory;
  Buffer reply_memory;
  World world;

  explicit Offer(Prng& prng) {
    for (uint64_t chunks = prng.Below(4); chunks > 0; --chunks) {
      write_memory.emplace_back();
      lists.writes.AppendChunk(Segments(prng, write_memory.back()));
    }
    if (prng.OneIn(2)) lists.reply = Segments(prng, reply_memory);
  }
  // Up to four segments of any length over memory of their own.
  SegmentArray Segments(Prng& prng, Buffer& memory) {
    std::vector<uint64_t> lengths(prng.Below(5));
    uint64_t total = 0;
    for (uint64_t& length : lengths) total += length = EdgyLength(prng, 1024);
    memory.resize(total);
    SegmentArray segments;
    uint64_t at = 0;
    for (uint64_t length : lengths) {
      world.Expose(prng, MutableBytes(memory).subspan(at, length));
      at += length;
      const auto handle = static_cast<uint32_t>(world.memory.size() - 1);
      segments.push_back({handle, static_cast<uint32_t>(length), world.exposures[handle].offset});
    }
    return segments;
  }
};

TEST(ChunkPlannerProperty, WhateverAPeerOffersTheReplyArrivesWholeOrIsRefused) {
  uint32_t planned = 0;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Prng prng(seed);
    const Script script = RandomScript(prng, 1024, 3);
    const Script::Message message = script.Encode();
    Offer offer(prng);
    const auto threshold = static_cast<uint32_t>(1024 + seed % 9);
    const auto use = prng.OneIn(2) ? ReplyChunkUse::kWhenNeeded : ReplyChunkUse::kWheneverOffered;
    const auto plan =
        PlanReply({.base_size = message.base.size(), .items = message.items}, offer.lists, threshold, use);
    if (!plan.has_value()) continue;
    SCOPED_TRACE(ToString(*plan));
    ++planned;
    EXPECT_LE(plan->send_size(), threshold);
    uint64_t written = 0;
    for (const PlannedWrite& write : plan->writes) {
      offer.world.Write(write.target, BytesOf(message, write.source));
      written += write.target.length;
    }
    EXPECT_EQ(written, plan->direct_bytes + plan->reply_bytes);
    const Buffer inline_message = Gather(message, plan->inline_pieces);
    EXPECT_EQ(inline_message.size(), plan->inline_bytes);
    const Header header = MakeReplyHeader(*plan, kXid, 1);
    ASSERT_TRUE(ValidateReply(header, inline_message, offer.lists).has_value());
    const std::vector<MutableBytes> memory(offer.write_memory.begin(), offer.write_memory.end());
    const ReducedStream stream = AssembleReply(header, inline_message, offer.lists, memory, offer.reply_memory);
    XdrReader reader(stream);
    script.ExpectReadBack(reader);
    ASSERT_FALSE(HasFailure());
  }
  EXPECT_GT(planned, kSeeds / 10);
}

TEST(ChunkPlannerProperty, FilledSegmentsSumUpAndKeepTheirPlaces) {
  for (uint64_t seed = 1; seed <= 5000; ++seed) {
    Prng prng(seed);
    SegmentArray segments;
    for (uint64_t i = prng.Below(8); i > 0; --i) {
      segments.push_back({static_cast<uint32_t>(prng.Next()), static_cast<uint32_t>(AnyNumber(prng)), prng.Next()});
    }
    const SegmentArray before = segments;
    const uint64_t capacity = TotalLength(before);
    const uint64_t length = prng.OneIn(3) ? capacity + prng.Below(3) : prng.Below(capacity + 2);
    ASSERT_EQ(FillSegments(segments, length), length <= capacity);
    ASSERT_EQ(segments.size(), before.size());
    if (length > capacity) {
      EXPECT_EQ(segments, before);
      continue;
    }
    EXPECT_EQ(TotalLength(segments), length);
    bool ended = false;
    for (size_t i = 0; i < segments.size(); ++i) {
      EXPECT_EQ(segments[i].handle, before[i].handle);
      EXPECT_EQ(segments[i].offset, before[i].offset);
      EXPECT_TRUE(!ended || segments[i].length == 0);
      ended = ended || segments[i].length < before[i].length;
    }
  }
}

}  // namespace
}  // namespace stagecoach::rpcrdma
