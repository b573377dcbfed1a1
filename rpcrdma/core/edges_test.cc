// The outer edges of the numbers that peers and programs give the engines: grants, lengths of items and results,
// segments that peers offer. At their largest value, at one less, and where they wrap.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/bytes.h"
#include "rpcrdma/core/chunk_planner.h"
#include "rpcrdma/core/credits.h"
#include "rpcrdma/wire/validate.h"

namespace stagecoach::rpcrdma {
namespace {

constexpr uint32_t kLargest = UINT32_MAX;
constexpr uint64_t kEndOf32 = uint64_t{1} << 32;
// With which a message of 4 GiB is one segment, and its plan no longer than any.
constexpr PlanLimits kWide{.segment_length_max = kLargest};

// The planner looks at sizes only; these bytes are never read.
ConstBytes Sized(uint64_t size) {
  return AsBytes(static_cast<const void*>(nullptr), size);
}

// --- Credits ---

TEST(CreditEdges, AGrantIsWhatThePeerSaysUpToOurOwnMaximum) {
  for (const uint32_t own_max : {1u, 2u, 128u, kLargest - 1, kLargest}) {
    for (const uint32_t grant : {0u, 1u, own_max - 1, own_max, own_max + 1, kLargest - 1, kLargest}) {
      SCOPED_TRACE(testing::Message() << grant << " of " << own_max);
      Credits credits(own_max);
      credits.OnSent();
      credits.OnReply(grant);
      EXPECT_EQ(credits.granted(), std::min(std::max(grant, 1u), own_max));
    }
  }
}

TEST(CreditEdges, ARequestNeverExceedsOurOwnMaximumAndFallsSlowly) {
  for (const uint32_t own_max : {1u, 2u, 7u, 8u, 9u, kLargest - 7, kLargest - 1, kLargest}) {
    SCOPED_TRACE(own_max);
    Credits credits(own_max);
    EXPECT_EQ(credits.requested(), own_max);
    // One call at a time, which needs no more than two credits.
    for (uint32_t call = 1; call < Credits::kRequestWindow; ++call) {
      EXPECT_EQ(credits.Request(0), own_max) << call;
    }
    const uint32_t eighth = own_max / 8 + (own_max % 8 != 0 ? 1 : 0);
    EXPECT_EQ(credits.Request(0), std::max(std::min(own_max, 2u), own_max - eighth));
    // All that could ever wait is no more than all there are.
    EXPECT_EQ(credits.Request(std::numeric_limits<size_t>::max() / 2), own_max);
  }
}

// --- Calls that are planned ---

TEST(PlanEdges, AMessageIsAsLongAsItsLengthCanSay) {
  for (const uint64_t base : {uint64_t{0}, uint64_t{40}, kEndOf32 - 8, kEndOf32 - 4, kEndOf32 - 1, kEndOf32,
                              kEndOf32 + 1, uint64_t{INT64_MAX}, UINT64_MAX - 1, UINT64_MAX}) {
    const auto plan = PlanCall({.base_size = base, .reply_base_max = 24}, kWide);
    EXPECT_EQ(plan.has_value(), base < kEndOf32) << base;
    if (plan) continue;
    EXPECT_EQ(plan.error(), PlanRefusal::kMessageTooLong);
  }
}

TEST(PlanEdges, ItemsAddUpToNoMoreThanAMessage) {
  const auto plan = [](uint64_t first, uint64_t second) {
    const std::vector<EligibleItem> items = {{40, Sized(first)}, {40 + first + XdrPad(first), Sized(second)}};
    return PlanCall({.base_size = 44, .items = items, .reply_base_max = 24}, kWide);
  };
  const uint64_t room = kEndOf32 - 44 - 4;  // a multiple of four, as what an item takes is
  EXPECT_TRUE(plan(room, 0).has_value());
  EXPECT_TRUE(plan(room - 4, 4).has_value());
  EXPECT_TRUE(plan(room - 4, 1).has_value());
  EXPECT_TRUE(plan(room - 5, 4).has_value()) << "with its round-up";
  for (const auto& [first, second] :
       std::vector<std::pair<uint64_t, uint64_t>>{{room + 1, 0},
                                                  {room, 1},
                                                  {room - 3, 4},
                                                  {kLargest, 0},
                                                  {kLargest, kLargest},
                                                  {kEndOf32, 0},
                                                  {0, kEndOf32},
                                                  {uint64_t{INT64_MAX}, uint64_t{INT64_MAX}},
                                                  {UINT64_MAX - 3, 8},
                                                  {UINT64_MAX, 0}}) {
    const auto refused = plan(first, second);
    ASSERT_FALSE(refused.has_value()) << first << " + " << second;
    EXPECT_NE(refused.error(), PlanRefusal::kTooManySegments);
  }
}

TEST(PlanEdges, AnItemHasItsPositionWithinTheMessage) {
  for (const uint64_t position :
       {uint64_t{44}, uint64_t{48}, kEndOf32, kEndOf32 + 40, UINT64_MAX - 3, uint64_t{1} << 63}) {
    const std::vector<EligibleItem> items = {{position, Sized(8)}};
    const auto plan = PlanCall({.base_size = 44, .items = items, .reply_base_max = 24}, kWide);
    EXPECT_EQ(plan.has_value(), position == 44) << position;
    if (plan) continue;
    EXPECT_EQ(plan.error(), PlanRefusal::kMalformedShape);
  }
}

TEST(PlanEdges, ResultsAddUpToNoMoreThanAReply) {
  const auto plan = [](std::vector<ResultShape> results, bool direct = true, uint64_t reply_base_max = 24) {
    return PlanCall({.base_size = 40, .results = results, .reply_base_max = reply_base_max, .direct_results = direct},
                    kWide);
  };
  const uint64_t room = kEndOf32 - 24 - 4;
  for (const bool direct : {true, false}) {
    EXPECT_TRUE(plan({{room, room}}, direct).has_value());
    EXPECT_TRUE(plan({{room - 4, room}, {1, 1}}, direct).has_value());
    for (const uint64_t longest : {room + 1, uint64_t{kLargest} - 1, uint64_t{kLargest}, kEndOf32, kEndOf32 + 8,
                                   uint64_t{INT64_MAX}, UINT64_MAX - 3, UINT64_MAX}) {
      EXPECT_EQ(plan({{longest, UINT64_MAX}}, direct), Err(PlanRefusal::kMessageTooLong)) << longest;
      EXPECT_EQ(plan({{8, 8}, {longest, UINT64_MAX}}, direct), Err(PlanRefusal::kMessageTooLong)) << longest;
    }
    EXPECT_EQ(plan({{room, room}, {1, 1}}, direct), Err(PlanRefusal::kMessageTooLong));
  }
  for (const uint64_t base : {kEndOf32, UINT64_MAX - 1, UINT64_MAX}) {
    EXPECT_EQ(plan({}, true, base), Err(PlanRefusal::kMessageTooLong)) << base;
  }
  // Memory may be as long as it likes.
  const auto generous = plan({{4096, UINT64_MAX}});
  ASSERT_TRUE(generous.has_value());
  ASSERT_EQ(generous->write_segments.size(), 1u);
  EXPECT_EQ(generous->write_segments[0].length, 4096u);
}

// What a server asks for with an error of version 2 is a number of the peer's.
TEST(PlanEdges, AReplyChunkIsAsLongAsASegmentCanSay) {
  for (const uint64_t asked : {uint64_t{1}, kEndOf32 - 8, kEndOf32 - 4, kEndOf32 - 3, kEndOf32 - 1, kEndOf32,
                               UINT64_MAX - 3, UINT64_MAX - 8}) {
    const auto plan = PlanCall({.base_size = 40, .reply_base_max = 24, .reply_chunk_min = asked}, kWide);
    EXPECT_EQ(plan.has_value(), asked <= kEndOf32 - 4) << asked;
    if (!plan) continue;
    ASSERT_EQ(plan->reply_segments.size(), 1u);
    EXPECT_GE(plan->reply_segments[0].length, std::max<uint64_t>(asked, 24));
  }
}

// --- Segments of a peer ---

TEST(SegmentEdges, ASegmentReachesTheLastAddressAndNoFurther) {
  constexpr uint32_t kXid = 1;
  std::vector<std::byte> message(40);
  ByteWriter(message).U32(kXid);
  const ChunkDataLimits limits{.read_bytes_max = kEndOf32, .write_bytes_max = kEndOf32};
  for (const uint32_t length : {1u, 2u, 4096u, 0x7fffffffu, 0x80000000u, kLargest - 1, kLargest}) {
    for (const uint64_t offset : {uint64_t{0}, uint64_t{0} - length - 1, uint64_t{0} - length, uint64_t{0} - length + 1,
                                  UINT64_MAX - 1, UINT64_MAX, uint64_t{INT64_MAX}}) {
      SCOPED_TRACE(testing::Message() << length << " at " << offset);
      const Segment segment{1, length, offset};
      using Wide = unsigned __int128;
      const bool wraps = Wide{offset} + length > Wide{UINT64_MAX} + 1;
      ChunkLists lists;
      lists.reads = {{40, segment}};
      const auto judged = [&] {
        return ValidateCall({.xid = kXid, .credits = 1, .body = RdmaMsg{lists}}, message, limits);
      };
      const auto read = judged();
      ASSERT_EQ(read.has_value(), !wraps);
      if (read) {
        EXPECT_EQ(read->message_length, 40 + uint64_t{length} + XdrPad(length));
      }
      lists.reads = {};
      lists.writes.AppendChunk(SegmentArray{segment});
      EXPECT_EQ(judged().has_value(), !wraps);
      lists.writes = {};
      lists.reply = SegmentArray{segment};
      EXPECT_EQ(judged().has_value(), !wraps);
    }
  }
}

TEST(SegmentEdges, LimitsOfBytesHoldExactlyHoweverManyBytesThereAre) {
  constexpr uint32_t kXid = 1;
  std::vector<std::byte> message(40);
  ByteWriter(message).U32(kXid);
  // Their sums need 33 and more bits.
  for (const uint64_t limit : {uint64_t{kLargest}, 2 * uint64_t{kLargest}, 64 * uint64_t{kLargest}}) {
    for (const uint32_t more : {0u, 1u}) {
      const auto segments = static_cast<uint32_t>(limit / kLargest);
      SegmentArray chunk;
      ChunkLists reads;
      for (uint32_t i = 0; i < segments; ++i) {
        chunk.push_back({1, kLargest, 0});
        reads.reads.push_back({40, {1, kLargest, 0}});
      }
      if (more > 0) {
        chunk.push_back({1, more, 0});
        reads.reads.push_back({40, {1, more, 0}});
      }
      ChunkLists writes;
      writes.writes.AppendChunk(chunk);
      const ChunkDataLimits limits{.read_bytes_max = limit, .write_bytes_max = limit};
      EXPECT_EQ(ValidateCall({.xid = kXid, .credits = 1, .body = RdmaMsg{reads}}, message, limits).has_value(),
                more == 0);
      EXPECT_EQ(ValidateCall({.xid = kXid, .credits = 1, .body = RdmaMsg{writes}}, message, limits).has_value(),
                more == 0);
      writes = {};
      writes.reply = chunk;
      EXPECT_EQ(ValidateCall({.xid = kXid, .credits = 1, .body = RdmaMsg{writes}}, message, limits).has_value(),
                more == 0);
    }
  }
}

}  // namespace
}  // namespace stagecoach::rpcrdma
