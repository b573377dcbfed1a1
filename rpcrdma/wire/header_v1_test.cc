#include "rpcrdma/wire/header_v1.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/prng.h"
#include "tests/support/hex.h"

namespace stagecoach::rpcrdma {
namespace {

std::vector<std::byte> Encoded(const Header& header) {
  std::vector<std::byte> bytes(EncodedSizeV1(header));
  ByteWriter out(bytes);
  EncodeHeaderV1(header, out);
  EXPECT_TRUE(out.ok());
  EXPECT_EQ(out.position(), bytes.size());
  return bytes;
}

Result<Header, HeaderFault> Decoded(ConstBytes bytes, const ChunkListLimits& limits = {}) {
  ByteReader in(bytes);
  return DecodeHeaderV1(in, limits);
}

ChunkLists SomeLists() {
  ChunkLists lists;
  lists.reads = {{112, {0x9d451400, 255, 0x559403a44bf0}}, {112, {0x9d451500, 1, 7}}, {400, {1, 2, 3}}};
  lists.writes.AppendChunk(SegmentArray{{10, 4096, 0x1000}, {11, 4096, 0x2000}});
  lists.writes.AppendChunk({});
  lists.writes.AppendChunk(SegmentArray{{12, 1, 0}});
  lists.reply = SegmentArray{{20, 124, 1}, {21, 65536, 2}, {22, 4, 3}};
  return lists;
}

// Every message type, with and without chunks.
std::vector<Header> AllHeaders() {
  std::vector<Header::Body> bodies = {RdmaMsg{},
                                      RdmaNomsg{},
                                      RdmaMsgp{8, 64, {}},
                                      RdmaDone{},
                                      ErrVers{1, 2},
                                      ErrChunk{},
                                      RdmaMsg{SomeLists()},
                                      RdmaNomsg{SomeLists()},
                                      RdmaMsgp{1, 2, SomeLists()}};
  RdmaMsg empty_reply_chunk;
  empty_reply_chunk.chunks.reply.emplace();
  bodies.push_back(empty_reply_chunk);
  std::vector<Header> headers;
  for (auto& body : bodies) headers.push_back({.xid = 0x876de715, .credits = 128, .body = body});
  return headers;
}

TEST(HeaderV1, LinuxCallAndReplyHeadersAreByteEqual) {
  // From a capture of an NFSv3 NULL call and its reply over siw.
  const auto call = FromHex("876de715 00000001 00000080 00000000 00000000 00000000 00000000");
  const auto reply = FromHex("876de715 00000001 00000040 00000000 00000000 00000000 00000000");
  const Header expected_call{.xid = 0x876de715, .credits = 128, .body = RdmaMsg{}};
  const Header expected_reply{.xid = 0x876de715, .credits = 64, .body = RdmaMsg{}};
  EXPECT_EQ(*Decoded(call), expected_call);
  EXPECT_EQ(*Decoded(reply), expected_reply);
  EXPECT_EQ(Encoded(expected_call), call);
  EXPECT_EQ(Encoded(expected_reply), reply);
  EXPECT_EQ(call.size(), kMinHeaderSize);
}

TEST(HeaderV1, ListsAreLaidOutAsTheSpecificationDrawsThem) {
  Header header{.xid = 1, .credits = 2, .body = RdmaMsg{}};
  auto& lists = std::get<RdmaMsg>(header.body).chunks;
  lists.reads = {{112, {0xaabbccdd, 255, 0x1122334455667788}}};
  lists.writes.AppendChunk(SegmentArray{{5, 6, 7}});
  lists.reply = SegmentArray{{8, 9, 10}};
  EXPECT_EQ(ToHex(Encoded(header)),
            "00000001"
            "00000001"
            "00000002"
            "00000000"
            "00000001"
            "00000070"
            "aabbccdd"
            "000000ff"
            "1122334455667788"
            "00000000"
            "00000001"
            "00000001"
            "00000005"
            "00000006"
            "0000000000000007"
            "00000000"
            "00000001"
            "00000001"
            "00000008"
            "00000009"
            "000000000000000a");
}

TEST(HeaderV1, NumbersAreThoseOfTheXdr) {
  const auto encoded = [](Header::Body body) {
    return ToHex(Encoded({.xid = 7, .credits = 32, .body = std::move(body)}));
  };
  const std::string fixed = "000000070000000100000020";
  const std::string no_lists = "000000000000000000000000";
  EXPECT_EQ(encoded(RdmaMsg{}), fixed + "00000000" + no_lists);
  EXPECT_EQ(encoded(RdmaNomsg{}), fixed + "00000001" + no_lists);
  EXPECT_EQ(encoded(RdmaMsgp{.align = 8, .thresh = 64}), fixed + "00000002" + "00000008" + "00000040" + no_lists);
  EXPECT_EQ(encoded(RdmaDone{}), fixed + "00000003");
  EXPECT_EQ(encoded(ErrVers{.low = 1, .high = 2}), fixed + "00000004" + "00000001" + "00000001" + "00000002");
  EXPECT_EQ(encoded(ErrChunk{}), fixed + "00000004" + "00000002");
}

// [5666bis:13.1+3] [5666bis:13.1+5] [5666bis:13.1+6]
TEST(HeaderV1, ListsAreThoseOfTheAppendix) {
  const Segment segment{0xa, 0xb, 0xc};
  Header header{.xid = 7, .credits = 32, .body = RdmaMsg{}};
  ChunkLists& lists = std::get<RdmaMsg>(header.body).chunks;
  lists.reads = {{4, segment}, {4, segment}, {8, segment}};
  lists.writes.AppendChunk(SegmentArray{segment, segment, segment});
  lists.writes.AppendChunk(SegmentArray{segment, segment});
  lists.reply = SegmentArray{segment, segment};
  const std::string hloo = "0000000a0000000b000000000000000c";
  const std::string no = "00000000";
  const std::string yes = "00000001";
  const std::string two = "00000002";
  const std::string three = "00000003";
  const auto bytes = FromHex("00000007000000010000002000000000" +                                                //
                             yes + "00000004" + hloo + yes + "00000004" + hloo + yes + "00000008" + hloo + no +  //
                             yes + three + hloo + hloo + hloo + yes + two + hloo + hloo + no +                   //
                             yes + two + hloo + hloo);
  EXPECT_EQ(ToHex(Encoded(header)), ToHex(bytes));
  EXPECT_EQ(*Decoded(bytes), header);
}

TEST(HeaderV1, EveryTypeRoundTripsAndLeavesTheReaderAtTheMessage) {
  for (const Header& header : AllHeaders()) {
    auto bytes = Encoded(header);
    const size_t size = bytes.size();
    bytes.push_back(std::byte{42});
    ByteReader in{ConstBytes(bytes)};
    const auto decoded = DecodeHeaderV1(in);
    ASSERT_TRUE(decoded.has_value()) << ToString(header);
    EXPECT_EQ(*decoded, header) << ToString(header);
    EXPECT_EQ(in.position(), size) << ToString(header);
  }
}

TEST(HeaderV1, TruncationAtEveryByteIsAFaultWithTheRightAction) {
  for (const Header& header : AllHeaders()) {
    const auto bytes = Encoded(header);
    for (size_t size = 0; size < bytes.size(); ++size) {
      const auto decoded = Decoded(ConstBytes(bytes).first(size));
      ASSERT_FALSE(decoded.has_value()) << ToString(header) << " cut to " << size;
      const HeaderFault& fault = decoded.error();
      EXPECT_EQ(fault.xid.has_value(), size >= 4);
      const bool drop = size < kFixedFieldsSize || header.type() == MessageType::kError;
      EXPECT_EQ(fault.action, drop ? FaultAction::kDrop : FaultAction::kAnswerErrChunk)
          << ToString(header) << " cut to " << size;
      if (size < kFixedFieldsSize) {
        EXPECT_EQ(fault.kind, HeaderFault::Kind::kTooShort);
      }
    }
  }
}

TEST(HeaderV1, AnotherVersionIsAnsweredWithErrVersWhateverFollows) {
  for (const char* rest : {"", "00000000 00000000 00000000", "ffffffff"}) {
    const auto bytes = FromHex(std::string("00000007 00000002 00000001 00000000") + rest);
    const auto decoded = Decoded(bytes);
    ASSERT_FALSE(decoded.has_value());
    EXPECT_EQ(decoded.error().kind, HeaderFault::Kind::kVersion);
    EXPECT_EQ(decoded.error().action, FaultAction::kAnswerErrVers);
    EXPECT_EQ(decoded.error().xid, 7u);
    EXPECT_EQ(decoded.error().version, 2u);
  }
  EXPECT_EQ(ToString(Decoded(FromHex("00000007 00000002 00000001 00000000")).error()),
            "RPC-over-RDMA version 2 instead of 1 xid 00000007 at byte 16");
}

// [traps:interop#8]
TEST(HeaderV1, ErrVersThatEchoesTheRefusedVersionIsUnderstood) {
  // What svcrdma sends when asked for version 2.
  const auto bytes = FromHex("00000007 00000002 00000040 00000004 00000001 00000001 00000001");
  const auto decoded = Decoded(bytes);
  ASSERT_TRUE(decoded.has_value());
  EXPECT_EQ(decoded->version, 2u);
  EXPECT_EQ(std::get<ErrVers>(decoded->body), (ErrVers{1, 1}));
  EXPECT_EQ(Encoded(*decoded), bytes);
  EXPECT_EQ(ToString(*decoded), "RDMA_ERROR xid 00000007 version 2 credits 64 ERR_VERS (1 to 1 supported)");
  // Any other error of another version is not ours to understand, nor to answer.
  const auto err_chunk = Decoded(FromHex("00000007 00000002 00000040 00000004 00000002"));
  ASSERT_FALSE(err_chunk.has_value());
  EXPECT_EQ(err_chunk.error().action, FaultAction::kDrop);
}

TEST(HeaderV1, UnknownTypesAreAnsweredUnknownErrorsAreNot) {
  for (uint32_t type : {5u, 9u, 0x80000000u, 0xffffffffu}) {
    std::vector<std::byte> bytes(28);
    ByteWriter out(bytes);
    for (uint32_t word : {1u, 1u, 1u, type}) out.U32(word);
    const auto decoded = Decoded(bytes);
    ASSERT_FALSE(decoded.has_value());
    EXPECT_EQ(decoded.error().kind, HeaderFault::Kind::kUnknownType);
    EXPECT_EQ(decoded.error().action, FaultAction::kAnswerErrChunk);
  }
  for (const char* code : {"00000000", "00000003", "ffffffff"}) {
    const auto decoded = Decoded(FromHex(std::string("00000001 00000001 00000001 00000004") + code));
    ASSERT_FALSE(decoded.has_value());
    EXPECT_EQ(decoded.error().kind, HeaderFault::Kind::kUnknownError);
    EXPECT_EQ(decoded.error().action, FaultAction::kDrop);
  }
}

// rdma_extra of the draft of 2004, section 4.2, and RFC 5666.
TEST(HeaderV1, UnknownErrorsHaveEightWordsByTheOlderDocuments) {
  const std::string header = "00000001 00000001 00000001 00000004";
  std::string words;
  for (int count = 0; count <= 9; ++count) {
    for (const ProtocolProfile& profile : AllProfiles()) {
      const auto bytes = FromHex(header + "00000003" + words);
      ByteReader in(bytes);
      const auto decoded = DecodeHeaderV1(in, {}, profile);
      ASSERT_FALSE(decoded.has_value());
      const bool whole = count >= 8 || !profile.unknown_errors_have_words;
      EXPECT_EQ(decoded.error().kind, whole ? HeaderFault::Kind::kUnknownError : HeaderFault::Kind::kTruncatedError);
      EXPECT_EQ(decoded.error().action, FaultAction::kDrop);
      // The known ones have none.
      const auto known = FromHex(header + "00000002" + words);
      ByteReader chunk(known);
      EXPECT_EQ(DecodeHeaderV1(chunk, {}, profile)->body, Header::Body(ErrChunk{}));
    }
    words += "00000000";
  }
}

TEST(ProtocolProfile, IsFoundByItsName) {
  EXPECT_EQ(AllProfiles().size(), 3u);
  for (const ProtocolProfile& profile : AllProfiles()) EXPECT_EQ(FindProfile(profile.name), &profile);
  EXPECT_EQ(FindProfile("rfc8166"), nullptr);
  EXPECT_EQ(*FindProfile("draft-2004"), kDraft2004);
}

TEST(HeaderV1, ListDiscriminatorsAreBooleans) {
  // The discriminators of an empty Read list, Write list and Reply chunk stand at 16, 20 and 24.
  for (size_t at : {19u, 23u, 27u}) {
    auto bytes = Encoded({.xid = 1, .credits = 1, .body = RdmaMsg{}});
    bytes[at] = std::byte{2};
    const auto decoded = Decoded(bytes);
    ASSERT_FALSE(decoded.has_value());
    EXPECT_EQ(decoded.error().chunk_list, ChunkListError::kBadDiscriminator);
    EXPECT_EQ(decoded.error().action, FaultAction::kAnswerErrChunk);
    EXPECT_EQ(decoded.error().offset, at + 1);
  }
}

TEST(HeaderV1, LimitsHoldExactlyWhereTheySay) {
  const auto bytes = Encoded({.xid = 1, .credits = 1, .body = RdmaMsg{SomeLists()}});
  const ChunkListLimits exact{
      .read_segments_max = 3, .write_chunks_max = 3, .segments_per_chunk_max = 3, .write_segments_max = 3};
  EXPECT_TRUE(Decoded(bytes, exact).has_value());
  auto error = [&](ChunkListLimits limits) { return Decoded(bytes, limits).error().chunk_list; };
  ChunkListLimits fewer = exact;
  fewer.read_segments_max = 2;
  EXPECT_EQ(error(fewer), ChunkListError::kTooManyReadSegments);
  fewer = exact;
  fewer.write_chunks_max = 2;
  EXPECT_EQ(error(fewer), ChunkListError::kTooManyWriteChunks);
  fewer = exact;
  fewer.segments_per_chunk_max = 2;
  EXPECT_EQ(error(fewer), ChunkListError::kTooManySegments);
  fewer = exact;
  fewer.write_segments_max = 2;
  EXPECT_EQ(error(fewer), ChunkListError::kTooManySegments);
}

TEST(HeaderV1, AHostileSegmentCountIsRefusedBeforeAnythingIsStored) {
  const auto bytes = FromHex(
      "00000001 00000001 00000001 00000000 00000000"
      "00000001 ffffffff 00000001 00000001 0000000000000001");
  EXPECT_EQ(Decoded(bytes).error().chunk_list, ChunkListError::kTooManySegments);
  EXPECT_EQ(Decoded(bytes, {.segments_per_chunk_max = 0xffffffff}).error().chunk_list, ChunkListError::kTruncated);
}

TEST(HeaderV1, CommonHeadersNeedNoAllocation) {
  Header header{.xid = 1, .credits = 1, .body = RdmaMsg{}};
  auto& lists = std::get<RdmaMsg>(header.body).chunks;
  for (uint32_t i = 0; i < 4; ++i) lists.reads.push_back({i * 4 + 4, {i, i, i}});
  lists.reply = SegmentArray{{1, 2, 3}, {1, 2, 3}, {1, 2, 3}};
  const auto decoded = Decoded(Encoded(header));
  ASSERT_TRUE(decoded.has_value());
  EXPECT_TRUE(decoded->chunks()->reads.is_inline());
  EXPECT_TRUE(decoded->chunks()->reply->is_inline());
}

TEST(HeaderV1, LongListsGrowPastTheInlineStorage) {
  Header header{.xid = 1, .credits = 1, .body = RdmaNomsg{}};
  auto& lists = std::get<RdmaNomsg>(header.body).chunks;
  for (uint32_t i = 0; i < 256; ++i) lists.reads.push_back({i * 4, {i, i, i}});
  for (uint32_t i = 0; i < 64; ++i) lists.writes.AppendChunk(SegmentArray{{i, 1, 2}, {i, 3, 4}});
  EXPECT_EQ(*Decoded(Encoded(header)), header);
}

TEST(HeaderV1, RandomBytesNeverDecodeIntoSomethingThatEncodesDifferently) {
  Prng prng(7);
  size_t accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    std::vector<std::byte> bytes(16 + 4 * prng.Below(24));
    ByteWriter out(bytes);
    out.U32(static_cast<uint32_t>(prng.Next()));
    out.U32(1);
    out.U32(32);
    out.U32(static_cast<uint32_t>(prng.Below(6)));
    while (out.remaining() > 0) out.U32(static_cast<uint32_t>(prng.Below(prng.OneIn(4) ? 40 : 2)));
    ByteReader in{ConstBytes(bytes)};
    const auto decoded = DecodeHeaderV1(in);
    if (!decoded.has_value()) continue;
    ++accepted;
    const auto again = Encoded(*decoded);
    EXPECT_EQ(ToHex(again), ToHex(ConstBytes(bytes).first(in.position())));
  }
  EXPECT_GT(accepted, 1000u);
}

TEST(HeaderV1, PrintsOnOneLine) {
  EXPECT_EQ(ToString(Header{.xid = 0x876de715, .credits = 128, .body = RdmaMsg{}}),
            "RDMA_MSG xid 876de715 credits 128 no chunks");
  Header header{.xid = 1, .credits = 2, .body = RdmaNomsg{}};
  auto& lists = std::get<RdmaNomsg>(header.body).chunks;
  lists.reads = {{0, {1, 96, 0x10}}, {0, {2, 3904, 0x20}}};
  lists.writes.AppendChunk(SegmentArray{{3, 4, 5}});
  lists.reply.emplace();
  EXPECT_EQ(ToString(header),
            "RDMA_NOMSG xid 00000001 credits 2 reads [0:0x00000001+96@0x10 0:0x00000002+3904@0x20] "
            "writes [0x00000003+4@0x5] reply []");
  EXPECT_EQ(ToString(Header{.body = ErrChunk{}}), "RDMA_ERROR xid 00000000 credits 0 ERR_CHUNK");
  EXPECT_EQ(ToString(Decoded({}).error()), "message of 0 bytes is too short for a transport header");
}

}  // namespace
}  // namespace stagecoach::rpcrdma
