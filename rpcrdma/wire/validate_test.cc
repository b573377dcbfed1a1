#include "rpcrdma/wire/validate.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "base/bytes.h"

namespace stagecoach::rpcrdma {
namespace {

constexpr uint32_t kXid = 0x01020304;

std::vector<std::byte> Message(size_t size) {
  std::vector<std::byte> bytes(size);
  ByteWriter(bytes).U32(kXid);
  return bytes;
}

Header Msg(ChunkLists lists) {
  return {.xid = kXid, .credits = 1, .body = RdmaMsg{std::move(lists)}};
}
Header Nomsg(ChunkLists lists) {
  return {.xid = kXid, .credits = 1, .body = RdmaNomsg{std::move(lists)}};
}

ChunkLists Reads(std::initializer_list<ReadSegment> reads) {
  ChunkLists lists;
  lists.reads = reads;
  return lists;
}

ReadSegment At(uint32_t position, uint32_t length) {
  return {position, {1, length, 0x1000}};
}

TEST(ValidateCall, AcceptsMessagesWithoutChunks) {
  const auto message = Message(40);
  for (const Header& header : {Msg({}), Header{.xid = kXid, .body = RdmaMsgp{}}}) {
    const auto call = ValidateCall(header, message);
    ASSERT_TRUE(call.has_value());
    EXPECT_TRUE(call->chunks.empty());
    EXPECT_EQ(call->message_length, 40u);
  }
}

TEST(ValidateCall, AHandleToInvalidateIsOneOfTheCalls) {
  ChunkLists lists;
  lists.reads = {{32, {11, 4, 0}}, {36, {12, 4, 0}}};
  lists.writes.AppendChunk(SegmentArray{{13, 8, 0}, {14, 8, 0}});
  lists.reply = SegmentArray{{15, 8, 0}};
  Header header{.xid = kXid, .version = 2, .credits = 1, .flags = 0};
  for (uint32_t handle = 11; handle <= 15; ++handle) {
    header.body = RdmaMsg{lists, handle};
    EXPECT_TRUE(ValidateCall(header, Message(40)).has_value()) << handle;
  }
  for (const uint32_t handle : {1u, 10u, 16u, 0xffffffffu}) {
    header.body = RdmaMsg{lists, handle};
    EXPECT_EQ(ValidateCall(header, Message(40)).error(), ChunkFault::kInvHandleForeign) << handle;
    header.body = RdmaNomsg{Reads({At(0, 8)}), handle};
    EXPECT_EQ(ValidateCall(header, {}).has_value(), handle == 1);
  }
  // None, and none to choose from.
  header.body = RdmaMsg{{}, 0};
  EXPECT_TRUE(ValidateCall(header, Message(40)).has_value());
  header.body = RdmaMsg{{}, 1};
  EXPECT_EQ(ValidateCall(header, Message(40)).error(), ChunkFault::kInvHandleForeign);
}

// [traps:responder#7]
TEST(ValidateCall, GroupsSegmentsOfOnePositionAndCountsRoundUp) {
  // 40 bytes inline; a chunk of 5 bytes (in two segments) at 32, one of 8 at 40, that is right behind its round-up.
  const auto call = ValidateCall(Msg(Reads({At(32, 3), At(32, 2), At(40, 8)})), Message(40));
  ASSERT_TRUE(call.has_value());
  ASSERT_EQ(call->chunks.size(), 2u);
  EXPECT_EQ(call->chunks[0], (ReadChunk{.position = 32, .first = 0, .count = 2, .length = 5}));
  EXPECT_EQ(call->chunks[1], (ReadChunk{.position = 40, .first = 2, .count = 1, .length = 8}));
  EXPECT_EQ(call->segments_of(call->chunks[0]).size(), 2u);
  EXPECT_EQ(call->message_length, 40u + 8 + 8);
}

// [traps:interop#13]
TEST(ValidateCall, SortsAnUnsortedListAndKeepsTheOrderWithinAChunk) {
  const auto call = ValidateCall(Msg(Reads({{40, {1, 4, 0}}, {32, {2, 4, 0}}, {40, {3, 4, 0}}})), Message(40));
  ASSERT_TRUE(call.has_value());
  ASSERT_EQ(call->chunks.size(), 2u);
  EXPECT_EQ(call->segments[0].target.handle, 2u);
  EXPECT_EQ(call->segments[1].target.handle, 1u);
  EXPECT_EQ(call->segments[2].target.handle, 3u);
}

// [traps:responder#1]
TEST(ValidateCall, PositionsMustBeAlignedInsideAndApart) {
  const auto message = Message(40);
  auto fault = [&](std::initializer_list<ReadSegment> reads) { return ValidateCall(Msg(Reads(reads)), message); };
  for (uint32_t position : {1u, 2u, 3u, 33u, 34u, 35u}) {
    EXPECT_EQ(fault({At(position, 4)}).error(), ChunkFault::kUnalignedPosition) << position;
  }
  EXPECT_TRUE(fault({At(40, 4)}).has_value());
  EXPECT_EQ(fault({At(44, 4)}).error(), ChunkFault::kPositionPastEnd);
  EXPECT_EQ(fault({At(0xfffffffc, 4)}).error(), ChunkFault::kPositionPastEnd);
  EXPECT_EQ(fault({At(32, 5), At(36, 4)}).error(), ChunkFault::kOverlappingReadChunks);
  EXPECT_TRUE(fault({At(32, 5), At(40, 4)}).has_value());
  EXPECT_TRUE(fault({At(32, 5), At(48, 4)}).has_value());
  EXPECT_EQ(fault({At(32, 5), At(52, 4)}).error(), ChunkFault::kPositionPastEnd);
}

TEST(ValidateCall, LongCallsAreWhollyInPositionZero) {
  EXPECT_EQ(ValidateCall(Nomsg({}), {}).error(), ChunkFault::kNoPositionZero);
  EXPECT_EQ(ValidateCall(Nomsg(Reads({At(4, 4)})), {}).error(), ChunkFault::kNoPositionZero);
  EXPECT_EQ(ValidateCall(Nomsg(Reads({At(0, 40)})), Message(4)).error(), ChunkFault::kMessageWithNomsg);
  EXPECT_EQ(ValidateCall(Msg(Reads({At(0, 40)})), Message(40)).error(), ChunkFault::kPositionZeroInMsg);
  const auto call = ValidateCall(Nomsg(Reads({At(0, 96), At(0, 3904), At(4000, 6)})), {});
  ASSERT_TRUE(call.has_value());
  EXPECT_TRUE(call->has_position_zero());
  EXPECT_EQ(call->chunks[0].length, 4000u);
  EXPECT_EQ(call->message_length, 4008u);
  EXPECT_EQ(ValidateCall(Nomsg(Reads({At(0, 96), At(100, 4)})), {}).error(), ChunkFault::kPositionPastEnd);
}

TEST(ValidateCall, SumsAreCheckedAgainstLimitsWithoutOverflow) {
  const auto message = Message(40);
  const ChunkDataLimits limits{.read_bytes_max = 100, .write_bytes_max = 100};
  EXPECT_TRUE(ValidateCall(Msg(Reads({At(40, 50), At(40, 50)})), message, limits).has_value());
  EXPECT_EQ(ValidateCall(Msg(Reads({At(40, 50), At(40, 51)})), message, limits).error(), ChunkFault::kTooManyReadBytes);
  EXPECT_EQ(ValidateCall(Msg(Reads({At(40, 0xffffffff), At(40, 0xffffffff)})), message, limits).error(),
            ChunkFault::kTooManyReadBytes);
  ChunkLists offered;
  offered.writes.AppendChunk(SegmentArray{{1, 60, 0}});
  offered.reply = SegmentArray{{1, 40, 0}};
  EXPECT_TRUE(ValidateCall(Msg(offered), message, limits).has_value());
  offered.reply = SegmentArray{{1, 41, 0}};
  EXPECT_EQ(ValidateCall(Msg(offered), message, limits).error(), ChunkFault::kTooManyWriteBytes);
}

TEST(ValidateCall, SegmentsMayReachTheLastByteOfTheAddressSpaceButNotWrap) {
  const auto message = Message(40);
  for (uint64_t slack : {0u, 1u}) {
    const Segment segment{1, 16, ~uint64_t{0} - 15 + slack};
    const bool fits = slack == 0;
    EXPECT_EQ(ValidateCall(Msg(Reads({{40, segment}})), message).has_value(), fits);
    ChunkLists writes;
    writes.writes.AppendChunk(SegmentArray{segment});
    EXPECT_EQ(ValidateCall(Msg(writes), message).has_value(), fits);
    ChunkLists reply;
    reply.reply = SegmentArray{segment};
    EXPECT_EQ(ValidateCall(Msg(reply), message).has_value(), fits);
  }
  EXPECT_TRUE(ValidateCall(Msg(Reads({{40, {1, 0, ~uint64_t{0}}}})), message).has_value());
}

TEST(ValidateCall, TheMessageMustBeThereAndCarryTheSameXid) {
  EXPECT_EQ(ValidateCall(Msg({}), {}).error(), ChunkFault::kNoMessage);
  EXPECT_EQ(ValidateCall(Msg({}), Message(4)).has_value(), true);
  std::array<std::byte, 4> other{};
  EXPECT_EQ(ValidateCall(Msg({}), other).error(), ChunkFault::kXidMismatch);
  for (Header::Body body : {Header::Body(RdmaDone{}), Header::Body(ErrChunk{}), Header::Body(ErrVers{})}) {
    EXPECT_EQ(ValidateCall({.xid = kXid, .body = body}, {}).error(), ChunkFault::kNotAMessage);
  }
}

class ValidateReplyTest : public ::testing::Test {
 protected:
  ValidateReplyTest() {
    offered_.writes.AppendChunk(SegmentArray{{1, 4096, 100}, {2, 4096, 200}});
    offered_.writes.AppendChunk(SegmentArray{{3, 10, 300}});
    offered_.reply = SegmentArray{{4, 1000, 400}};
  }
  ChunkLists Returned(uint32_t a, uint32_t b, uint32_t c, uint32_t reply) const {
    ChunkLists lists = offered_;
    lists.writes.mutable_chunk(0)[0].length = a;
    lists.writes.mutable_chunk(0)[1].length = b;
    lists.writes.mutable_chunk(1)[0].length = c;
    (*lists.reply)[0].length = reply;
    return lists;
  }
  ChunkLists offered_;
  std::vector<std::byte> message_ = Message(24);
};

TEST_F(ValidateReplyTest, AcceptsLengthsUpToThoseOffered) {
  for (uint32_t length : {0u, 1u, 10u}) {
    EXPECT_TRUE(ValidateReply(Msg(Returned(4096, length, length, 0)), message_, offered_).has_value());
  }
  EXPECT_TRUE(ValidateReply(Nomsg(Returned(0, 0, 0, 24)), {}, offered_).has_value());
}

TEST_F(ValidateReplyTest, AbsentListsCountAsUnused) {
  EXPECT_TRUE(ValidateReply(Msg({}), message_, offered_).has_value());
}

TEST_F(ValidateReplyTest, LongerSegmentsThanOfferedAreAFault) {
  EXPECT_EQ(ValidateReply(Msg(Returned(4097, 0, 0, 0)), message_, offered_).error(), ChunkFault::kReturnedTooMuch);
  EXPECT_EQ(ValidateReply(Msg(Returned(0, 0, 11, 0)), message_, offered_).error(), ChunkFault::kReturnedTooMuch);
  EXPECT_EQ(ValidateReply(Nomsg(Returned(0, 0, 0, 1001)), {}, offered_).error(), ChunkFault::kReturnedTooMuch);
}

TEST_F(ValidateReplyTest, AnythingButLengthsMustComeBackUnchanged) {
  auto changed = [&](auto change) {
    ChunkLists lists = Returned(0, 0, 0, 0);
    change(lists);
    return ValidateReply(Msg(lists), message_, offered_).error();
  };
  EXPECT_EQ(changed([](ChunkLists& l) { l.writes.mutable_chunk(1)[0].handle ^= 1; }), ChunkFault::kWriteListChanged);
  EXPECT_EQ(changed([](ChunkLists& l) { l.writes.mutable_chunk(0)[1].offset ^= 1; }), ChunkFault::kWriteListChanged);
  EXPECT_EQ(changed([](ChunkLists& l) { l.writes.AppendSegment({}); }), ChunkFault::kWriteListChanged);
  EXPECT_EQ(changed([](ChunkLists& l) { l.writes.AppendChunk({}); }), ChunkFault::kWriteListChanged);
  EXPECT_EQ(changed([](ChunkLists& l) { (*l.reply)[0].handle ^= 1; }), ChunkFault::kReplyChunkChanged);
  EXPECT_EQ(changed([](ChunkLists& l) { l.reply->push_back({}); }), ChunkFault::kReplyChunkChanged);
}

TEST_F(ValidateReplyTest, ChunksNobodyOfferedAreAFault) {
  ChunkLists lists;
  lists.writes.AppendChunk({});
  EXPECT_EQ(ValidateReply(Msg(lists), message_, {}).error(), ChunkFault::kWriteListChanged);
  lists = {};
  lists.reply.emplace();
  EXPECT_EQ(ValidateReply(Msg(lists), message_, {}).error(), ChunkFault::kReplyChunkChanged);
  EXPECT_EQ(ValidateReply(Msg(Reads({At(24, 4)})), message_, offered_).error(), ChunkFault::kUnexpectedReadList);
}

TEST_F(ValidateReplyTest, LongRepliesNeedTheReplyChunkAndNothingElse) {
  EXPECT_EQ(ValidateReply(Nomsg({}), {}, offered_).error(), ChunkFault::kNoReplyChunk);
  EXPECT_EQ(ValidateReply(Nomsg(Returned(0, 0, 0, 24)), message_, offered_).error(), ChunkFault::kMessageWithNomsg);
}

TEST_F(ValidateReplyTest, AReplyIsInOnePlace) {
  EXPECT_EQ(ValidateReply(Msg(Returned(0, 0, 0, 1)), message_, offered_).error(), ChunkFault::kTwoReplies);
  EXPECT_EQ(ValidateReply(Msg(offered_), message_, offered_).error(), ChunkFault::kTwoReplies);
}

TEST_F(ValidateReplyTest, TheMessageMustBeThereAndCarryTheSameXid) {
  EXPECT_EQ(ValidateReply(Msg({}), {}, offered_).error(), ChunkFault::kNoMessage);
  message_[0] ^= std::byte{1};
  EXPECT_EQ(ValidateReply(Msg({}), message_, offered_).error(), ChunkFault::kXidMismatch);
  EXPECT_EQ(ValidateReply({.xid = kXid, .body = ErrChunk{}}, {}, offered_).error(), ChunkFault::kNotAMessage);
}

}  // namespace
}  // namespace stagecoach::rpcrdma
