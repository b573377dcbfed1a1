#include "rpcrdma/core/chunk_planner.h"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "rpcrdma/core/assemble.h"
#include "rpcrdma/wire/header_v2.h"
#include "rpcrdma/xdr/xdr_reader.h"

namespace stagecoach::rpcrdma {
namespace {

// The planner looks at sizes only; these bytes are never read.
ConstBytes Sized(size_t size) {
  return AsBytes(static_cast<const void*>(nullptr), size);
}

using Items = std::vector<EligibleItem>;

constexpr Piece Base(uint64_t offset, uint64_t length) {
  return {Piece::Source::kBase, 0, offset, length};
}
constexpr Piece Item(uint32_t index, uint64_t offset, uint64_t length) {
  return {Piece::Source::kItem, index, offset, length};
}
constexpr Piece Pad(uint32_t index, uint64_t length) {
  return {Piece::Source::kPad, index, 0, length};
}

template <typename List>
std::vector<typename List::value_type> AsVector(const List& list) {
  return {list.begin(), list.end()};
}

TEST(PlanCall, ASmallCallWithASmallReplyIsOneSend) {
  const auto plan = PlanCall({.base_size = 40, .reply_base_max = 24}, {});
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->type, MessageType::kMsg);
  EXPECT_EQ(AsVector(plan->inline_pieces), std::vector<Piece>{Base(0, 40)});
  EXPECT_EQ(plan->send_size(), 68u);
  EXPECT_EQ(plan->exposed_segments(), 0u);
  EXPECT_EQ(ToString(*plan), "RDMA_MSG header 28 inline base[0+40]");
}

TEST(PlanCall, AnItemThatFitsGoesInlineWithItsRoundUp) {
  // 112 bytes up to the count, 3 bytes of data, 4 bytes behind them.
  const Items items = {{112, Sized(3)}};
  const auto plan = PlanCall({.base_size = 116, .items = items, .reply_base_max = 24}, {});
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(AsVector(plan->inline_pieces), (std::vector<Piece>{Base(0, 112), Item(0, 0, 3), Pad(0, 1), Base(112, 4)}));
  EXPECT_EQ(plan->inline_bytes, 120u);
  EXPECT_TRUE(plan->reads.empty());
}

TEST(PlanCall, TheThresholdIsReachedButNotPassed) {
  for (size_t slack : {0u, 4u}) {
    // header 28 + base 112 + data fills 1024 exactly.
    const Items items = {{112, Sized(1024 - 28 - 112 + slack)}};
    const auto plan = PlanCall({.base_size = 112, .items = items, .reply_base_max = 24}, {});
    ASSERT_TRUE(plan.has_value());
    EXPECT_EQ(plan->reads.size(), slack == 0 ? 0u : 1u);
    EXPECT_EQ(plan->send_size(), slack == 0 ? 1024u : 28u + 24 + 112);
  }
}

TEST(PlanCall, ALargeItemTravelsByReadChunkWithoutRoundUp) {
  const Items items = {{112, Sized(5001)}};
  const auto plan = PlanCall({.base_size = 116, .items = items, .reply_base_max = 24}, {});
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->type, MessageType::kMsg);
  EXPECT_EQ(AsVector(plan->reads), (std::vector<PlannedRead>{{112, Item(0, 0, 5001)}}));
  EXPECT_EQ(AsVector(plan->inline_pieces), std::vector<Piece>{Base(0, 116)});
  EXPECT_EQ(plan->header_size, kMinHeaderSize + kReadEntrySize);
}

TEST(PlanCall, OnlyTheLongestItemsLeave) {
  const Items items = {{40, Sized(100)}, {140, Sized(9000)}, {9140, Sized(200)}};
  const auto plan = PlanCall({.base_size = 60, .items = items, .reply_base_max = 24}, {});
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(AsVector(plan->reads), (std::vector<PlannedRead>{{140, Item(1, 0, 9000)}}));
  EXPECT_EQ(AsVector(plan->inline_pieces),
            (std::vector<Piece>{Base(0, 40), Item(0, 0, 100), Item(2, 0, 200), Base(40, 20)}));
}

TEST(PlanCall, ALongItemIsCutIntoSegmentsOfOnePosition) {
  const Items items = {{112, Sized(2500)}};
  const auto plan = PlanCall({.base_size = 112, .items = items, .reply_base_max = 24}, {.segment_length_max = 1000});
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(AsVector(plan->reads),
            (std::vector<PlannedRead>{{112, Item(0, 0, 1000)}, {112, Item(0, 1000, 1000)}, {112, Item(0, 2000, 500)}}));
}

TEST(PlanCall, ACallWithoutEligibleItemsThatDoesNotFitIsLong) {
  const auto plan = PlanCall({.base_size = 4000, .reply_base_max = 24}, {});
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->type, MessageType::kNomsg);
  EXPECT_TRUE(plan->inline_pieces.empty());
  EXPECT_EQ(AsVector(plan->reads), (std::vector<PlannedRead>{{0, Base(0, 4000)}}));
  EXPECT_EQ(plan->send_size(), kMinHeaderSize + kReadEntrySize);
}

TEST(PlanCall, ALongCallKeepsItsItemsInChunksOfTheirOwn) {
  const Items items = {{2000, Sized(5000)}, {8000, Sized(0)}};
  const auto plan = PlanCall({.base_size = 4000, .items = items, .reply_base_max = 24}, {});
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->type, MessageType::kNomsg);
  EXPECT_EQ(AsVector(plan->reads), (std::vector<PlannedRead>{{0, Base(0, 4000)}, {2000, Item(0, 0, 5000)}}));
}

TEST(PlanCall, ALongCallMayExpectALongReply) {
  const auto plan = PlanCall({.base_size = 4000, .reply_base_max = 4000}, {});
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->type, MessageType::kNomsg);
  EXPECT_EQ(plan->reads.size(), 1u);
  EXPECT_EQ(plan->reply_segments.size(), 1u);
}

TEST(PlanCall, ResultsThatMayBeLongGetWriteChunks) {
  const std::vector<ResultShape> results = {{100001, 100002}, {8, 8}, {0, 0}};
  const auto plan = PlanCall({.base_size = 40, .results = results, .reply_base_max = 100}, {});
  ASSERT_TRUE(plan.has_value());
  // Round-up as far as the memory of the result goes, one entry for each result.
  EXPECT_EQ(AsVector(plan->write_segments), (std::vector<Piece>{{Piece::Source::kResult, 0, 0, 100002},
                                                                {Piece::Source::kResult, 1, 0, 8},
                                                                {Piece::Source::kResult, 2, 0, 0}}));
  EXPECT_EQ(AsVector(plan->write_counts), (std::vector<uint32_t>{1, 1, 1}));
  EXPECT_TRUE(plan->reply_segments.empty());
  EXPECT_EQ(plan->header_size, kMinHeaderSize + 3 * 8 + 3 * kSegmentSize);
}

TEST(PlanCall, ResultsThatFitTheReplyCostNoRegistration) {
  const std::vector<ResultShape> results = {{500, 500}};
  for (uint64_t base : {496u, 500u}) {
    const auto plan = PlanCall({.base_size = 40, .results = results, .reply_base_max = base}, {});
    ASSERT_TRUE(plan.has_value());
    EXPECT_EQ(plan->write_counts.empty(), base == 496);
  }
}

TEST(PlanCall, ALongReplyGetsAReplyChunkBesideWriteChunks) {
  const std::vector<ResultShape> results = {{65536, 65536}};
  const auto plan = PlanCall({.base_size = 40, .results = results, .reply_base_max = 3001}, {});
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->write_counts.size(), 1u);
  EXPECT_EQ(plan->reply_capacity, 3004u);
  EXPECT_EQ(AsVector(plan->reply_segments), (std::vector<Piece>{{Piece::Source::kReplyBuffer, 0, 0, 3004}}));
}

TEST(PlanCall, WithoutDirectPlacementALargeItemTravelsWithinTheLongCall) {
  const Items items = {{112, Sized(5001)}, {5120, Sized(6)}};
  const CallShape shape{
      .base_size = 120, .items = items, .reply_base_max = 24, .direct_arguments = false, .direct_results = false};
  const auto plan = PlanCall(shape, {});
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->type, MessageType::kNomsg);
  EXPECT_TRUE(plan->inline_pieces.empty());
  EXPECT_EQ(AsVector(plan->reads), (std::vector<PlannedRead>{{0, Base(0, 112)},
                                                             {0, Item(0, 0, 5001)},
                                                             {0, Pad(0, 3)},
                                                             {0, Base(112, 4)},
                                                             {0, Item(1, 0, 6)},
                                                             {0, Pad(1, 2)},
                                                             {0, Base(116, 4)}}));
  // Each segment counts, and each is as short as the provider wants it.
  EXPECT_EQ(PlanCall(shape, {.exposed_segments_max = 6}).error(), PlanRefusal::kTooManySegments);
  EXPECT_EQ(PlanCall(shape, {.segment_length_max = 2000})->reads.size(), 9u);
}

TEST(PlanCall, WithoutDirectPlacementAnItemThatFitsGoesInline) {
  const Items items = {{112, Sized(800)}};
  const auto plan = PlanCall(
      {.base_size = 112, .items = items, .reply_base_max = 24, .direct_arguments = false, .direct_results = false}, {});
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(AsVector(plan->inline_pieces), (std::vector<Piece>{Base(0, 112), Item(0, 0, 800)}));
  EXPECT_EQ(plan->exposed_segments(), 0u);
}

TEST(PlanCall, WithoutDirectPlacementTheReplyChunkHasRoomForTheResults) {
  const std::vector<ResultShape> results = {{9001, 9004}, {6, 6}};
  CallShape shape{
      .base_size = 40, .results = results, .reply_base_max = 100, .direct_arguments = false, .direct_results = false};
  const auto plan = PlanCall(shape, {});
  ASSERT_TRUE(plan.has_value());
  EXPECT_TRUE(plan->write_counts.empty());
  EXPECT_EQ(plan->reply_capacity, 100u + 9004u + 8u);
  EXPECT_EQ(plan->reply_segments.size(), 1u);
  // Results that fit inline cost nothing, one way or the other.
  shape.results = std::span(results).last(1);
  EXPECT_EQ(PlanCall(shape, {})->exposed_segments(), 0u);
  // 32 bits bound the whole reply.
  const std::vector<ResultShape> huge = {{0xffffff00, 0xffffff00}};
  shape.results = huge;
  shape.reply_base_max = 1000;
  EXPECT_EQ(PlanCall(shape, {}).error(), PlanRefusal::kMessageTooLong);
}

// Version 2: what the responder has said that it takes.
TEST(PlanCall, AsManyReadChunksAsAreTakenAndTheRestInTheMessage) {
  const Items items = {{40, Sized(3000)}, {3040, Sized(5000)}, {8040, Sized(4000)}};
  const CallShape shape{.base_size = 80, .items = items, .reply_base_max = 24};
  const auto positions = [&](uint32_t read_chunks_max) {
    std::vector<uint32_t> found;
    const auto plan = PlanCall(shape, {.read_chunks_max = read_chunks_max});
    for (const PlannedRead& read : plan->reads) {
      if (read.position != 0) found.push_back(read.position);
    }
    return found;
  };
  EXPECT_EQ(positions(3), (std::vector<uint32_t>{40, 3040, 8040}));
  EXPECT_EQ(positions(2), (std::vector<uint32_t>{3040, 8040})) << "the longest";
  EXPECT_EQ(positions(1), (std::vector<uint32_t>{3040}));
  EXPECT_EQ(positions(0), (std::vector<uint32_t>{}));
  EXPECT_EQ(PlanCall(shape, {.read_chunks_max = 0})->type, MessageType::kNomsg);
  // Position zero does not count, and where the rest fits inline there is none.
  EXPECT_EQ(PlanCall(shape, {.send_inline = 4096, .read_chunks_max = 2})->type, MessageType::kMsg);
}

TEST(PlanCall, ALongCallOfTooManySegmentsIsGatheredIfItMayBe) {
  const Items items = {{112, Sized(5001)}, {5120, Sized(6)}};
  const CallShape shape{.base_size = 120, .items = items, .reply_base_max = 24, .direct_arguments = false};
  const uint64_t whole = 120 + 5004 + 8;
  const auto plan = PlanCall(shape, {.segments_per_read_chunk_max = 6, .gather_bytes_max = whole});
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(AsVector(plan->reads), (std::vector<PlannedRead>{{0, {Piece::Source::kGathered, 0, 0, whole}}}));
  EXPECT_EQ(plan->gathered_bytes, whole);
  EXPECT_EQ(plan->gathered_pieces, (std::vector<Piece>{Base(0, 112), Item(0, 0, 5001), Pad(0, 3), Base(112, 4),
                                                       Item(1, 0, 6), Pad(1, 2), Base(116, 4)}));
  EXPECT_TRUE(PlanCall(shape, {.segments_per_read_chunk_max = 7})->gathered_pieces.empty());
  EXPECT_EQ(PlanCall(shape, {.segments_per_read_chunk_max = 6, .gather_bytes_max = whole - 1}).error(),
            PlanRefusal::kTooManySegments);
  // Not even that is enough where segments are short.
  EXPECT_EQ(PlanCall(shape, {.segment_length_max = 2000, .segments_per_read_chunk_max = 2, .gather_bytes_max = whole})
                .error(),
            PlanRefusal::kTooManySegments);
  EXPECT_EQ(PlanCall(shape, {.segment_length_max = 2000, .segments_per_read_chunk_max = 3, .gather_bytes_max = whole})
                ->reads.size(),
            3u);
  // An item of more segments than a chunk may have is no chunk.
  const Items one = {{112, Sized(5000)}};
  const auto inside = PlanCall({.base_size = 120, .items = one, .reply_base_max = 24},
                               {.segment_length_max = 2000, .segments_per_read_chunk_max = 2});
  EXPECT_FALSE(inside.has_value());
}

TEST(PlanCall, AReplyChunkThatIsAskedForIsOfferedWhateverFits) {
  const std::vector<ResultShape> results = {{200, 200}};
  CallShape shape{.base_size = 40, .results = results, .reply_base_max = 100, .reply_chunk_min = 301};
  auto plan = PlanCall(shape, {});
  ASSERT_TRUE(plan.has_value());
  EXPECT_TRUE(plan->write_counts.empty()) << "the whole reply would fit inline";
  EXPECT_EQ(plan->reply_capacity, 304u);
  shape.reply_chunk_min = 1;
  EXPECT_EQ(PlanCall(shape, {})->reply_capacity, 300u) << "results have room in it";
  const std::vector<ResultShape> large = {{2000, 2000}};
  shape.results = large;
  plan = PlanCall(shape, {});
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->write_counts.size(), 1u);
  EXPECT_EQ(plan->reply_capacity, 100u);
  shape.reply_chunk_min = uint64_t{1} << 32;
  EXPECT_EQ(PlanCall(shape, {}).error(), PlanRefusal::kMessageTooLong);
}

TEST(PlanCall, RefusesWhatCannotBeDone) {
  const Items far = {{44, Sized(4)}};
  const Items odd = {{38, Sized(4)}};
  const Items crossed = {{40, Sized(8)}, {40, Sized(8)}};
  const Items huge = {{40, Sized(0xfffffff0)}, {0xfffffff0 + 40, Sized(16)}};
  const Items large = {{40, Sized(2000)}};
  const std::vector<ResultShape> short_memory = {{8, 7}};
  const std::vector<ResultShape> long_result = {{2000, 2000}};
  auto refusal = [](const CallShape& shape, const PlanLimits& limits = {}) { return PlanCall(shape, limits).error(); };
  EXPECT_EQ(refusal({.base_size = 40, .items = far}), PlanRefusal::kMalformedShape);
  EXPECT_EQ(refusal({.base_size = 40, .items = odd}), PlanRefusal::kMalformedShape);
  EXPECT_EQ(refusal({.base_size = 40, .items = crossed}), PlanRefusal::kMalformedShape);
  EXPECT_EQ(refusal({.base_size = 40, .results = short_memory}), PlanRefusal::kMalformedShape);
  EXPECT_EQ(refusal({.base_size = 40}, {.segment_length_max = 0}), PlanRefusal::kMalformedShape);
  EXPECT_EQ(refusal({.base_size = 40, .items = huge}), PlanRefusal::kMessageTooLong);
  EXPECT_EQ(refusal({.base_size = uint64_t{1} << 32}), PlanRefusal::kMessageTooLong);
  EXPECT_EQ(refusal({.base_size = 40, .reply_base_max = ~uint64_t{0}}), PlanRefusal::kMessageTooLong);
  EXPECT_EQ(refusal({.base_size = 40, .items = large}, {.read_segments_max = 0}), PlanRefusal::kTooManySegments);
  EXPECT_EQ(refusal({.base_size = 40, .items = large}, {.segment_length_max = 1}), PlanRefusal::kTooManySegments);
  EXPECT_EQ(refusal({.base_size = 40, .results = long_result}, {.exposed_segments_max = 0}),
            PlanRefusal::kTooManySegments);
  EXPECT_EQ(refusal({.base_size = 40, .results = long_result}, {.write_chunks_max = 0}), PlanRefusal::kTooManySegments);
  EXPECT_EQ(
      refusal({.base_size = 40, .reply_base_max = 5000}, {.segments_per_chunk_max = 4, .segment_length_max = 1000}),
      PlanRefusal::kTooManySegments);
  EXPECT_EQ(refusal({.base_size = 40}, {.send_inline = 27}), PlanRefusal::kHeaderTooLong);
  EXPECT_EQ(refusal({.base_size = 40}, {.send_inline = 51}), PlanRefusal::kHeaderTooLong);
  EXPECT_EQ(refusal({.base_size = 40, .reply_base_max = 100}, {.receive_inline = 47}), PlanRefusal::kHeaderTooLong);
}

TEST(MakeCallHeader, PutsExposuresWhereThePlanNamesThem) {
  const Items items = {{40, Sized(2000)}};
  const std::vector<ResultShape> results = {{2000, 2000}};
  const auto plan = PlanCall({.base_size = 44, .items = items, .results = results, .reply_base_max = 2000}, {});
  ASSERT_TRUE(plan.has_value());
  ASSERT_EQ(plan->exposed_segments(), 3u);
  const std::vector<Exposure> exposures = {{1, 100}, {2, 200}, {3, 300}};
  const Header header = MakeCallHeader(*plan, 7, 32, exposures);
  EXPECT_EQ(ToString(header),
            "RDMA_MSG xid 00000007 credits 32 reads [40:0x00000001+2000@0x64] writes [0x00000002+2000@0xc8] "
            "reply [0x00000003+2000@0x12c]");
  EXPECT_EQ(EncodedSizeV1(header), plan->header_size);
}

TEST(MakeCallHeader, OfVersion2HasItsFlagsAndNamesAHandle) {
  const PlanLimits limits{.layout = kHeaderLayoutV2};
  const Items items = {{40, Sized(2000)}};
  const auto plan = PlanCall({.base_size = 44, .items = items, .reply_base_max = 24}, limits);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(ToString(*plan), "RDMA2_MSG header 60 inline base[0+44] reads 40:item0[0+2000]");
  const std::vector<Exposure> exposures = {{5, 100}};
  const Header header = MakeCallHeader(*plan, 7, 32, exposures, 5);
  EXPECT_EQ(ToString(header),
            "RDMA2_MSG xid 00000007 credits 32 flags 0 inv_handle 0x00000005 reads [40:0x00000005+2000@0x64]");
  EXPECT_EQ(EncodedSizeV2(header), plan->header_size);
  const auto reply = PlanReply({.base_size = 24}, {}, 1024, {}, {.layout = kHeaderLayoutV2});
  ASSERT_TRUE(reply.has_value());
  EXPECT_EQ(ToString(MakeReplyHeader(*reply, 7, 16)), "RDMA2_MSG xid 00000007 credits 16 flags RESPONSE no chunks");
}

ChunkLists Offered(std::vector<SegmentArray> writes, std::optional<SegmentArray> reply = std::nullopt) {
  ChunkLists lists;
  for (const SegmentArray& chunk : writes) lists.writes.AppendChunk(chunk);
  lists.reply = std::move(reply);
  return lists;
}

// [traps:responder#8]
TEST(PlanReply, WithoutOffersEverythingIsInlineOrNothingGoes) {
  const Items items = {{24, Sized(5)}};
  const auto plan = PlanReply({.base_size = 24, .items = items}, {}, 1024);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(AsVector(plan->inline_pieces), (std::vector<Piece>{Base(0, 24), Item(0, 0, 5), Pad(0, 3)}));
  EXPECT_TRUE(PlanReply({.base_size = 996}, {}, 1024).has_value());
  EXPECT_EQ(PlanReply({.base_size = 1000}, {}, 1024).error(), ReplyVerdict::kNoRoomForReply);
}

TEST(PlanReply, ResultsFillTheirWriteChunksInOrder) {
  const Items items = {{28, Sized(3)}, {36, Sized(150)}};
  const auto offered = Offered({{{1, 100, 1000}}, {{2, 100, 2000}, {3, 100, 3000}, {4, 100, 4000}}, {{5, 9, 5000}}});
  const auto plan = PlanReply({.base_size = 32, .items = items}, offered, 1024);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->type, MessageType::kMsg);
  EXPECT_EQ(AsVector(plan->inline_pieces), std::vector<Piece>{Base(0, 32)});
  EXPECT_EQ(ToString(*plan),
            "RDMA_MSG header 132 inline base[0+32] writes item0[0+3]->0x00000001+3@0x3e8 "
            "item1[0+100]->0x00000002+100@0x7d0 item1[100+50]->0x00000003+50@0xbb8");
  EXPECT_EQ(ToString(plan->chunks),
            "writes [0x00000001+3@0x3e8] [0x00000002+100@0x7d0 0x00000003+50@0xbb8 0x00000004+0@0xfa0] "
            "[0x00000005+0@0x1388]");
  EXPECT_EQ(plan->direct_bytes, 153u);
}

// [5666:3.7+4]
TEST(PlanReply, ReturnedLengthsCountRoundUpWhereTheOfferHasRoomAndTheProfileHasIt) {
  const struct {
    size_t result;
    std::vector<uint32_t> offered;   // segments of one chunk
    std::vector<uint32_t> counted;   // what they come back with, where round-up counts
    std::vector<uint32_t> as_it_is;  // and where it does not
    std::vector<uint32_t> written;   // by RDMA Write, in either case
  } kRows[] = {
      {2001, {2004}, {2004}, {2001}, {2001}},
      {2002, {2004}, {2004}, {2002}, {2002}},
      {2003, {5000}, {2004}, {2003}, {2003}},
      {2004, {5000}, {2004}, {2004}, {2004}},
      {0, {100}, {0}, {0}, {}},
      // No room, or not for all of it.
      {2001, {2001}, {2001}, {2001}, {2001}},
      {2001, {2003}, {2001}, {2001}, {2001}},
      // In a segment of its own, and across the end of one.
      {2001, {2001, 3, 8}, {2001, 3, 0}, {2001, 0, 0}, {2001}},
      {2001, {2000, 2, 2}, {2000, 2, 2}, {2000, 1, 0}, {2000, 1}},
  };
  for (const auto& row : kRows) {
    for (const bool counts : {true, false}) {
      SCOPED_TRACE(std::to_string(row.result) + " into " + std::to_string(row.offered[0]) + (counts ? " counted" : ""));
      SegmentArray segments;
      for (const uint32_t length : row.offered) segments.push_back({1, length, 0});
      const Items items = {{28, Sized(row.result)}};
      const auto plan = PlanReply({.base_size = 28, .items = items}, Offered({segments}), 1024,
                                  ReplyChunkUse::kWheneverOffered, {.lengths_count_round_up = counts});
      ASSERT_TRUE(plan.has_value());
      std::vector<uint32_t> returned, written;
      for (const Segment& segment : plan->chunks.writes[0]) returned.push_back(segment.length);
      for (const PlannedWrite& write : plan->writes) written.push_back(write.target.length);
      EXPECT_EQ(returned, counts ? row.counted : row.as_it_is);
      EXPECT_EQ(written, row.written);
      EXPECT_EQ(plan->direct_bytes, row.result);
    }
  }
}

TEST(PlanReply, ResultsBeyondTheWriteListStayInline) {
  const Items items = {{24, Sized(8)}, {32, Sized(7)}};
  const auto plan = PlanReply({.base_size = 24, .items = items}, Offered({{{1, 8, 0}}}), 1024);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(AsVector(plan->inline_pieces), (std::vector<Piece>{Base(0, 24), Item(1, 0, 7), Pad(1, 1)}));
}

TEST(PlanReply, AWriteChunkThatIsTooSmallIsAVerdict) {
  const Items items = {{24, Sized(9)}};
  EXPECT_EQ(PlanReply({.base_size = 24, .items = items}, Offered({{{1, 4, 0}, {2, 4, 0}}}), 1024).error(),
            ReplyVerdict::kWriteChunkTooSmall);
}

TEST(PlanReply, AReplyChunkIsUsedWheneverTheReplyFitsIt) {
  // Segments of 124, 65536 and 4 bytes, as Linux offers them, for a reply of 848 bytes.
  const auto offered = Offered({}, SegmentArray{{1, 124, 0x100}, {2, 65536, 0x200}, {3, 4, 0x300}});
  const auto plan = PlanReply({.base_size = 844}, offered, 4096);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->type, MessageType::kNomsg);
  EXPECT_EQ(plan->inline_bytes, 0u);
  EXPECT_EQ(ToString(plan->chunks), "reply [0x00000001+124@0x100 0x00000002+720@0x200 0x00000003+0@0x300]");
  EXPECT_EQ(plan->send_size(), kMinHeaderSize + ReplyChunkExtraSize(3));
  EXPECT_EQ(MakeReplyHeader(*plan, 1, 2).type(), MessageType::kNomsg);
}

TEST(PlanReply, AReplyChunkIsLeftAloneWhenItIsNotNeededAndTheResponderPrefersThat) {
  const auto offered = Offered({}, SegmentArray{{1, 600, 0x100}, {2, 600, 0x200}});
  const auto fits = PlanReply({.base_size = 900}, offered, 1024, ReplyChunkUse::kWhenNeeded);
  ASSERT_TRUE(fits.has_value());
  EXPECT_EQ(fits->type, MessageType::kMsg);
  EXPECT_TRUE(fits->writes.empty());
  EXPECT_EQ(fits->inline_bytes, 900u);
  // [5666bis:4.4.5.1#1] It comes back as what it is: unused.
  EXPECT_EQ(ToString(fits->chunks), "reply [0x00000001+0@0x100 0x00000002+0@0x200]");
  // The header with the segments takes 64 bytes of the Send.
  const auto edge = PlanReply({.base_size = 960}, offered, 1024, ReplyChunkUse::kWhenNeeded);
  ASSERT_TRUE(edge.has_value());
  EXPECT_EQ(edge->type, MessageType::kMsg);
  const auto over = PlanReply({.base_size = 964}, offered, 1024, ReplyChunkUse::kWhenNeeded);
  ASSERT_TRUE(over.has_value());
  EXPECT_EQ(over->type, MessageType::kNomsg);
  EXPECT_EQ(over->reply_bytes, 964u);
}

TEST(PlanReply, ResultsWithoutAWriteChunkGoIntoTheReplyChunkWithTheRest) {
  const Items items = {{28, Sized(6)}};
  const auto plan =
      PlanReply({.base_size = 32, .items = items}, Offered({}, SegmentArray{{1, 30, 0}, {2, 100, 0}}), 1024);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(ToString(*plan),
            "RDMA_NOMSG header 64 writes base[0+28]->0x00000001+28@0x0 item0[0+2]->0x00000001+2@0x1c "
            "item0[2+4]->0x00000002+4@0x0 pad0[0+2]->0x00000002+2@0x4 base[28+4]->0x00000002+4@0x6");
}

TEST(PlanReply, AReplyChunkThatIsTooSmallComesBackUnusedWhenTheReplyFitsInline) {
  const auto offered = Offered({}, SegmentArray{{1, 100, 0}});
  const auto plan = PlanReply({.base_size = 104}, offered, 1024);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->type, MessageType::kMsg);
  EXPECT_EQ(TotalLength(*plan->chunks.reply), 0u);
  EXPECT_EQ(PlanReply({.base_size = 1000}, offered, 1024).error(), ReplyVerdict::kNoRoomForReply);
}

TEST(PlanReply, ListsThatCannotComeBackAreAVerdict) {
  ChunkLists offered;
  for (uint32_t i = 0; i < 64; ++i) offered.writes.AppendChunk(SegmentArray{{i, 4, 0}});
  EXPECT_EQ(PlanReply({.base_size = 24}, offered, 1024).error(), ReplyVerdict::kHeaderTooLong);
}

TEST(FillSegments, FillsInOrderZeroesTheRestAndChangesNothingWhenTooSmall) {
  SegmentArray segments = {{1, 10, 0}, {2, 0, 0}, {3, 10, 0}, {4, 10, 0}};
  const SegmentArray before = segments;
  EXPECT_FALSE(FillSegments(segments, 31));
  EXPECT_EQ(segments, before);
  EXPECT_TRUE(FillSegments(segments, 15));
  EXPECT_EQ(ToString(ChunkLists{.reply = segments}),
            "reply [0x00000001+10@0x0 0x00000002+0@0x0 0x00000003+5@0x0 0x00000004+0@0x0]");
}

TEST(CompactChunk, ClosesTheGapsOfPartlyFilledSegments) {
  std::string memory = "abcdefghijkl";
  const SegmentArray offered = {{1, 4, 0}, {2, 4, 0}, {3, 4, 0}};
  const SegmentArray returned = {{1, 2, 0}, {2, 0, 0}, {3, 3, 0}};
  const ConstBytes data = CompactChunk(AsMutableBytes(memory.data(), memory.size()), offered, returned);
  EXPECT_EQ(AsText(data), "abijk");
}

TEST(AssembleCall, ReadsALongCallWithAnItemInAChunkOfItsOwn) {
  // Position zero holds word, count and word; the item of five bytes belongs behind the count.
  const std::string base("\0\0\0\7\0\0\0\5\0\0\0\x9", 12);
  const std::string item = "hello";
  Header header{.xid = 7, .credits = 1, .body = RdmaNomsg{}};
  std::get<RdmaNomsg>(header.body).chunks.reads = {{0, {1, 12, 0}}, {8, {2, 5, 0}}};
  const auto call = ValidateCall(header, {});
  ASSERT_TRUE(call.has_value());
  const std::array<ConstBytes, 2> data = {AsBytes(base), AsBytes(item)};
  const ReducedStream stream = AssembleCall(*call, {}, data);
  XdrReader in(stream);
  EXPECT_EQ(in.U32("word"), 7u);
  const ConstBytes read = in.EligibleOpaque("item", 10);
  EXPECT_EQ(read.data(), AsBytes(item).data());
  EXPECT_EQ(in.U32("last"), 9u);
  EXPECT_TRUE(in.Finish().has_value());
}

}  // namespace
}  // namespace stagecoach::rpcrdma
