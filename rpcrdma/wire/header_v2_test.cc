#include "rpcrdma/wire/header_v2.h"

#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/prng.h"
#include "rpcrdma/wire/header_v1.h"
#include "tests/support/hex.h"

namespace stagecoach::rpcrdma {
namespace {

std::vector<std::byte> Encoded(const Header& header, const Extensions& extensions = {}) {
  std::vector<std::byte> bytes(EncodedSizeV2(header));
  ByteWriter out(bytes);
  EncodeHeaderV2(header, out, extensions);
  EXPECT_TRUE(out.ok());
  EXPECT_EQ(out.position(), bytes.size());
  return bytes;
}

Result<Header, HeaderFault> Decoded(ConstBytes bytes, const ChunkListLimits& limits = {},
                                    const Extensions& extensions = {}) {
  ByteReader in(bytes);
  return DecodeHeaderV2(in, limits, extensions);
}

Header V2(Header::Body body, uint32_t flags, uint32_t credits = 32, uint32_t xid = 7) {
  return {.xid = xid, .version = 2, .credits = credits, .flags = flags, .body = std::move(body)};
}

ChunkLists SomeLists() {
  ChunkLists lists;
  lists.reads = {{112, {0x9d451400, 255, 0x559403a44bf0}}, {112, {0x9d451500, 1, 7}}};
  lists.writes.AppendChunk(SegmentArray{{10, 4096, 0x1000}, {11, 4096, 0x2000}});
  lists.writes.AppendChunk({});
  lists.reply = SegmentArray{{20, 124, 1}};
  return lists;
}

// Everything that version 2 has, byte by byte, and in words.
struct Row {
  const char* name;
  const char* bytes;
  Header header;
  const char* text;
};
void PrintTo(const Row& row, std::ostream* out) {
  *out << row.name;
}

std::vector<Row> Rows() {
  ChunkLists read_zero;
  read_zero.reads = {{0, {0xaabbccdd, 0x2000, 0x1122334455667788}}};
  ChunkLists reply_chunk;
  reply_chunk.reply = SegmentArray{{8, 9, 10}};
  return {
      {"call", "876de715 00000002 00000080 00000000 00000000 00000000 00000000 00000000 00000000",
       V2(RdmaMsg{}, 0, 128, 0x876de715), "RDMA2_MSG xid 876de715 credits 128 flags 0 no chunks"},
      {"reply", "876de715 00000002 00000040 00000000 00000001 00000000 00000000 00000000 00000000",
       V2(RdmaMsg{}, kFlagResponse, 64, 0x876de715), "RDMA2_MSG xid 876de715 credits 64 flags RESPONSE no chunks"},
      {"call with chunks",
       "00000007 00000002 00000020 00000000 00000000 0000000b "
       "00000001 00000070 9d451400 000000ff 0000559403a44bf0 "
       "00000001 00000070 9d451500 00000001 0000000000000007 00000000 "
       "00000001 00000002 0000000a 00001000 0000000000001000 0000000b 00001000 0000000000002000 "
       "00000001 00000000 00000000 "
       "00000001 00000001 00000014 0000007c 0000000000000001",
       V2(RdmaMsg{SomeLists(), 11}, 0),
       "RDMA2_MSG xid 00000007 credits 32 flags 0 inv_handle 0x0000000b reads [112:0x9d451400+255@0x559403a44bf0 "
       "112:0x9d451500+1@0x7] writes [0x0000000a+4096@0x1000 0x0000000b+4096@0x2000] [] reply [0x00000014+124@0x1]"},
      {"long call",
       "00000007 00000002 00000020 00000001 00000000 aabbccdd "
       "00000001 00000000 aabbccdd 00002000 1122334455667788 00000000 00000000 00000000",
       V2(RdmaNomsg{read_zero, 0xaabbccdd}, 0),
       "RDMA2_NOMSG xid 00000007 credits 32 flags 0 inv_handle 0xaabbccdd reads "
       "[0:0xaabbccdd+8192@0x1122334455667788]"},
      {"long reply",
       "00000007 00000002 00000020 00000001 00000001 00000000 "
       "00000000 00000000 00000001 00000001 00000008 00000009 000000000000000a",
       V2(RdmaNomsg{reply_chunk}, kFlagResponse),
       "RDMA2_NOMSG xid 00000007 credits 32 flags RESPONSE reply [0x00000008+9@0xa]"},
      {"ERR_VERS", "00000007 00000002 00000020 00000004 00000001 00000001 00000001 00000003",
       V2(ErrVers{1, 3}, kFlagResponse),
       "RDMA2_ERROR xid 00000007 credits 32 flags RESPONSE ERR_VERS (1 to 3 supported)"},
      {"ERR_BAD_XDR", "00000007 00000002 00000020 00000004 00000001 00000002", V2(ErrBadXdr{}, kFlagResponse),
       "RDMA2_ERROR xid 00000007 credits 32 flags RESPONSE ERR_BAD_XDR"},
      {"ERR_INVAL_HTYPE", "00000007 00000002 00000020 00000004 00000001 00000003", V2(ErrInvalHtype{}, kFlagResponse),
       "RDMA2_ERROR xid 00000007 credits 32 flags RESPONSE ERR_INVAL_HTYPE"},
      {"ERR_READ_CHUNKS", "00000007 00000002 00000020 00000004 00000001 00000004 00000010",
       V2(ErrReadChunks{16}, kFlagResponse),
       "RDMA2_ERROR xid 00000007 credits 32 flags RESPONSE ERR_READ_CHUNKS (at most 16)"},
      {"ERR_WRITE_CHUNKS", "00000007 00000002 00000020 00000004 00000001 00000005 00000011",
       V2(ErrWriteChunks{17}, kFlagResponse),
       "RDMA2_ERROR xid 00000007 credits 32 flags RESPONSE ERR_WRITE_CHUNKS (at most 17)"},
      {"ERR_SEGMENTS", "00000007 00000002 00000020 00000004 00000001 00000006 00000012",
       V2(ErrSegments{18}, kFlagResponse),
       "RDMA2_ERROR xid 00000007 credits 32 flags RESPONSE ERR_SEGMENTS (at most 18 in a chunk)"},
      {"ERR_WRITE_RESOURCE", "00000007 00000002 00000020 00000004 00000001 00000007 00000002 00001001",
       V2(ErrWriteResource{2, 4097}, kFlagResponse),
       "RDMA2_ERROR xid 00000007 credits 32 flags RESPONSE ERR_WRITE_RESOURCE (chunk 2 needs 4097 bytes)"},
      {"ERR_WRITE_RESOURCE of no chunk", "00000007 00000002 00000020 00000004 00000001 00000007 00000000 00000005",
       V2(ErrWriteResource{0, 5}, kFlagResponse),
       "RDMA2_ERROR xid 00000007 credits 32 flags RESPONSE ERR_WRITE_RESOURCE (a chunk needs 5 bytes)"},
      {"ERR_REPLY_RESOURCE", "00000007 00000002 00000020 00000004 00000001 00000008 ffffffff",
       V2(ErrReplyResource{0xffffffff}, kFlagResponse),
       "RDMA2_ERROR xid 00000007 credits 32 flags RESPONSE ERR_REPLY_RESOURCE (4294967295 bytes needed)"},
      {"ERR_SYSTEM", "00000007 00000002 00000020 00000004 00000001 00000009", V2(ErrSystem{}, kFlagResponse),
       "RDMA2_ERROR xid 00000007 credits 32 flags RESPONSE ERR_SYSTEM"},
      {"an error of nobody", "00000007 00000002 00000020 00000004 00000001 0000000a", V2(ErrOther{10}, kFlagResponse),
       "RDMA2_ERROR xid 00000007 credits 32 flags RESPONSE error code 10"},
      {"error zero", "00000007 00000002 00000020 00000004 00000001 00000000", V2(ErrOther{0}, kFlagResponse),
       "RDMA2_ERROR xid 00000007 credits 32 flags RESPONSE error code 0"},
      {"CONNPROP of nothing", "00000000 00000002 00000020 00000005 00000000 00000000", V2(ConnProp{}, 0, 32, 0),
       "RDMA2_CONNPROP xid 00000000 credits 32 flags 0 no properties"},
      {"CONNPROP",
       "00000000 00000002 00000020 00000005 00000001 00000002 "
       "00000001 00000004 00004000 00000002 00000004 00000002",
       V2(ConnProp{MakePropertySet({16384, ReverseSupport::kGeneral})}, kFlagResponse, 32, 0),
       "RDMA2_CONNPROP xid 00000000 credits 32 flags RESPONSE receive buffer size 16384, reverse requests general"},
      {"CONNPROP with what we do not know",
       "00000000 00000002 00000020 00000005 00000000 00000002 0000004d 00000005 0102030405000000 00000002 00000000",
       V2(ConnProp{{{77, {std::byte{1}, std::byte{2}, std::byte{3}, std::byte{4}, std::byte{5}}}, {2, {}}}}, 0, 32, 0),
       "RDMA2_CONNPROP xid 00000000 credits 32 flags 0 property 77 [0102030405], reverse requests default"},
  };
}

class HeaderV2Rows : public ::testing::TestWithParam<Row> {};

TEST_P(HeaderV2Rows, IsLaidOutAsTheXdrHasItAndReadBack) {
  const Row& row = GetParam();
  auto bytes = FromHex(row.bytes);
  EXPECT_EQ(ToHex(Encoded(row.header)), ToHex(bytes));
  EXPECT_EQ(ToString(row.header), row.text);
  const size_t size = bytes.size();
  // What carries a message leaves the reader at it; what is an error may have anything behind it.
  if (row.header.type() != MessageType::kConnProp) bytes.push_back(std::byte{42});
  ByteReader in{ConstBytes(bytes)};
  const auto decoded = DecodeHeaderV2(in);
  ASSERT_TRUE(decoded.has_value()) << ToString(decoded.error());
  EXPECT_EQ(*decoded, row.header);
  EXPECT_EQ(in.position(), size);
}

TEST_P(HeaderV2Rows, TruncationAtEveryByteIsAFaultWithTheRightAction) {
  const Row& row = GetParam();
  const auto bytes = FromHex(row.bytes);
  const MessageType type = row.header.type();
  for (size_t size = 0; size < bytes.size(); ++size) {
    SCOPED_TRACE("cut to " + std::to_string(size));
    const std::vector<std::byte> cut(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(size));  // exact, for ASan
    const auto decoded = Decoded(cut);
    ASSERT_FALSE(decoded.has_value());
    const HeaderFault& fault = decoded.error();
    EXPECT_EQ(fault.xid.has_value(), size >= 4);
    EXPECT_EQ(fault.kind == HeaderFault::Kind::kTooShort, size < 20);
    EXPECT_LE(fault.offset, size);
    EXPECT_EQ(fault.expected, 2u);
    FaultAction action = FaultAction::kAnswerBadXdr;
    if (size < 20 || type == MessageType::kError || row.header.is_response()) action = FaultAction::kDrop;
    EXPECT_EQ(fault.action, action);
    EXPECT_FALSE(ToString(fault).empty());
  }
}

INSTANTIATE_TEST_SUITE_P(Every, HeaderV2Rows, ::testing::ValuesIn(Rows()), [](const auto& info) {
  std::string name = info.param.name;
  for (char& c : name) {
    if (c == ' ') c = '_';
  }
  return name;
});

TEST(HeaderV2, ReservedFlagsAreReadAndNeverSent) {
  for (int bit = 1; bit < 32; ++bit) {
    const uint32_t flag = uint32_t{1} << bit;
    const Header header = V2(RdmaMsg{}, flag | kFlagResponse);
    EXPECT_EQ(ToHex(Encoded(header)), "0000000700000002000000200000000000000001" + std::string(32, '0')) << flag;
    auto bytes = Encoded(header);
    ByteWriter(MutableBytes(bytes).subspan(16)).U32(flag);
    const auto decoded = Decoded(bytes);
    ASSERT_TRUE(decoded.has_value()) << flag;
    EXPECT_EQ(UnknownFlags(*decoded), flag);
    EXPECT_FALSE(decoded->is_response());
  }
  EXPECT_EQ(UnknownFlags(V2(RdmaMsg{}, kFlagResponse)), 0u);
  EXPECT_EQ(UnknownFlags({.body = RdmaMsg{}}), 0u);
  EXPECT_EQ(FlagsText(0x80000005), "RESPONSE 0x00000004 0x80000000");
}

TEST(HeaderV2, AnotherVersionIsAnsweredWithErrVersUnlessItIsAnError) {
  for (const char* version : {"00000000", "00000001", "00000003", "ffffffff"}) {
    for (const char* rest : {"", "00000000", "00000001 ffffffff"}) {
      for (const char* type : {"00000000", "00000004", "00000009"}) {
        const auto decoded = Decoded(FromHex(std::string("00000007 ") + version + "00000001" + type + rest));
        ASSERT_FALSE(decoded.has_value());
        EXPECT_EQ(decoded.error().kind, HeaderFault::Kind::kVersion);
        EXPECT_EQ(decoded.error().action,
                  type == std::string("00000004") ? FaultAction::kDrop : FaultAction::kAnswerErrVers);
        EXPECT_EQ(decoded.error().xid, 7u);
      }
    }
  }
  EXPECT_EQ(ToString(Decoded(FromHex("00000007 00000001 00000001 00000000")).error()),
            "RPC-over-RDMA version 1 instead of 2 xid 00000007 at byte 16");
}

TEST(HeaderV2, TypesThatAreNotKnownAreRefusedUnlessTheyAreResponses) {
  // Version 1's RDMA_MSGP and RDMA_DONE among them.
  for (const char* type : {"00000002", "00000003", "00000006", "80000000", "ffffffff"}) {
    for (const char* rest : {"", "00000000 00000000 00000000 00000000", "ffffffff"}) {
      const auto decoded = Decoded(FromHex(std::string("00000007 00000002 00000001") + type + "00000000" + rest));
      ASSERT_FALSE(decoded.has_value());
      EXPECT_EQ(decoded.error().kind, HeaderFault::Kind::kUnknownType);
      EXPECT_EQ(decoded.error().action, FaultAction::kAnswerInvalHtype);
      const auto response = Decoded(FromHex(std::string("00000007 00000002 00000001") + type + "00000001" + rest));
      ASSERT_FALSE(response.has_value());
      EXPECT_EQ(response.error().kind, HeaderFault::Kind::kUnknownType);
      EXPECT_EQ(response.error().action, FaultAction::kDrop) << "a requester sends no errors";
    }
  }
}

TEST(HeaderV2, ListDiscriminatorsAreBooleans) {
  for (const size_t at : {27u, 31u, 35u}) {
    auto bytes = Encoded(V2(RdmaMsg{}, 0));
    bytes[at] = std::byte{2};
    const auto decoded = Decoded(bytes);
    ASSERT_FALSE(decoded.has_value());
    EXPECT_EQ(decoded.error().chunk_list, ChunkListError::kBadDiscriminator);
    EXPECT_EQ(decoded.error().action, FaultAction::kAnswerBadXdr);
    EXPECT_EQ(decoded.error().offset, at + 1);
  }
}

TEST(HeaderV2, LimitsOfListsAreThoseOfVersion1) {
  const auto bytes = Encoded(V2(RdmaNomsg{SomeLists()}, 0));
  const ChunkListLimits exact{
      .read_segments_max = 2, .write_chunks_max = 2, .segments_per_chunk_max = 2, .write_segments_max = 2};
  EXPECT_TRUE(Decoded(bytes, exact).has_value());
  ChunkListLimits fewer = exact;
  fewer.read_segments_max = 1;
  EXPECT_EQ(Decoded(bytes, fewer).error().chunk_list, ChunkListError::kTooManyReadSegments);
  fewer = exact;
  fewer.segments_per_chunk_max = 1;
  EXPECT_EQ(Decoded(bytes, fewer).error().chunk_list, ChunkListError::kTooManySegments);
}

// A CONNPROP whose properties `hex` are: what becomes of it as a request and as a response.
void ExpectMalformedProperties(const std::string& hex, PropertyFault fault, HeaderFault::Kind kind) {
  for (const char* flags : {"00000000", "00000001"}) {
    const auto decoded = Decoded(FromHex(std::string("00000000 00000002 00000020 00000005") + flags + hex));
    ASSERT_FALSE(decoded.has_value()) << hex;
    EXPECT_EQ(decoded.error().kind, kind) << hex;
    EXPECT_EQ(decoded.error().property, fault) << hex << ToString(decoded.error());
    EXPECT_EQ(decoded.error().action,
              flags == std::string("00000000") ? FaultAction::kAnswerBadXdr : FaultAction::kDrop);
  }
}

TEST(HeaderV2, MalformedPropertiesAreBadXdrOrDropped) {
  using Kind = PropertyFault::Kind;
  const auto malformed = HeaderFault::Kind::kProperties;
  ExpectMalformedProperties("", {Kind::kTruncated, 0}, malformed);
  ExpectMalformedProperties("00000001 00000063 00000005 00000000", {Kind::kTruncated, 99}, malformed);
  ExpectMalformedProperties("00000001 00000063 00000008 00000000", {Kind::kTruncated, 99}, malformed);
  ExpectMalformedProperties("00000001 00000001 00000003 00100000", {Kind::kBadValue, 1}, malformed);
  ExpectMalformedProperties("00000001 00000002 00000004 00000003", {Kind::kBadValue, 2}, malformed);
  ExpectMalformedProperties("00000000 00000000", {}, HeaderFault::Kind::kTrailingBytes);
}

TEST(HeaderV2, AHostileCountOfPropertiesIsRefusedBeforeAnythingIsStored) {
  using Kind = PropertyFault::Kind;
  ExpectMalformedProperties("ffffffff 00000001 00000004 00001000", {Kind::kTooMany, 0}, HeaderFault::Kind::kProperties);
  ExpectMalformedProperties("00000100 00000001 00000004 00001000", {Kind::kTruncated, 0},
                            HeaderFault::Kind::kProperties);
  ExpectMalformedProperties("00000001 00000001 ffffffff 00001000", {Kind::kTruncated, 1},
                            HeaderFault::Kind::kProperties);
}

std::vector<std::byte> RpcMessage(uint32_t msg_type) {
  std::vector<std::byte> bytes(8);
  ByteWriter out(bytes);
  out.U32(7);
  out.U32(msg_type);
  return bytes;
}

TEST(HeaderV2, TheResponseFlagIsComparedWithTheMessage) {
  const auto call = RpcMessage(0);
  const auto reply = RpcMessage(1);
  const auto neither = RpcMessage(2);
  for (const Header::Body& body :
       {Header::Body(RdmaMsg{}), Header::Body(RdmaNomsg{}), Header::Body(Extension{.type = 77, .has_message = true})}) {
    const Header as_call = V2(body, 0);
    const Header as_reply = V2(body, kFlagResponse | 0x100);
    EXPECT_EQ(CheckDirection(as_call, call), std::nullopt);
    EXPECT_EQ(CheckDirection(as_reply, reply), std::nullopt);
    EXPECT_EQ(CheckDirection(as_call, reply), DirectionFault::kReplyNotMarked);
    EXPECT_EQ(CheckDirection(as_reply, call), DirectionFault::kCallMarkedResponse);
    EXPECT_EQ(CheckDirection(as_call, neither), DirectionFault::kNoDirection);
    EXPECT_EQ(CheckDirection(as_reply, neither), DirectionFault::kNoDirection);
    // Nothing to compare with yet.
    EXPECT_EQ(CheckDirection(as_call, ConstBytes(reply).first(7)), std::nullopt);
    EXPECT_EQ(CheckDirection(as_reply, {}), std::nullopt);
  }
}

TEST(HeaderV2, AnErrorIsMarkedAsAResponse) {
  EXPECT_EQ(CheckDirection(V2(ErrSystem{}, kFlagResponse), {}), std::nullopt);
  EXPECT_EQ(CheckDirection(V2(ErrSystem{}, 0), {}), DirectionFault::kErrorNotMarked);
  EXPECT_EQ(CheckDirection(V2(ErrSystem{}, 0x10), RpcMessage(1)), DirectionFault::kErrorNotMarked);
  // Which of the two properties go is for the ends to say; version 1 says nothing of any.
  for (const uint32_t flags : {0u, kFlagResponse}) EXPECT_EQ(CheckDirection(V2(ConnProp{}, flags), {}), std::nullopt);
  EXPECT_EQ(CheckDirection({.body = ErrChunk{}}, {}), std::nullopt);
  EXPECT_EQ(CheckDirection({.body = RdmaMsg{}}, RpcMessage(1)), std::nullopt);
}

TEST(HeaderV2, CommonHeadersNeedNoAllocation) {
  ChunkLists lists;
  for (uint32_t i = 0; i < 4; ++i) lists.reads.push_back({i * 4 + 4, {i, i, i}});
  const auto decoded = Decoded(Encoded(V2(RdmaMsg{lists, 2}, 0)));
  ASSERT_TRUE(decoded.has_value());
  EXPECT_TRUE(decoded->chunks()->reads.is_inline());
  EXPECT_EQ(decoded->inv_handle(), 2u);
}

TEST(HeaderV2, RandomBytesNeverDecodeIntoSomethingThatEncodesDifferently) {
  Prng prng(7);
  size_t accepted = 0;
  size_t properties = 0;
  for (int round = 0; round < 40000; ++round) {
    std::vector<std::byte> bytes(20 + 4 * prng.Below(24));
    ByteWriter out(bytes);
    out.U32(static_cast<uint32_t>(prng.Next()));
    out.U32(2);
    out.U32(32);
    const auto type = static_cast<uint32_t>(prng.Below(7));
    out.U32(type);
    out.U32(static_cast<uint32_t>(prng.Below(2)));
    // A set ends with the message, so its count has to fit what is left: an id and a length for each.
    if (type == kRdma2ConnProp && out.remaining() > 0 && prng.OneIn(2)) {
      const size_t count = out.remaining() / 8;
      out.U32(static_cast<uint32_t>(count));
      while (out.remaining() >= 8) {
        out.U32(static_cast<uint32_t>(prng.Below(40)));
        out.U32(0);
      }
    }
    while (out.remaining() > 0) out.U32(static_cast<uint32_t>(prng.Below(prng.OneIn(4) ? 40 : 2)));
    ByteReader in{ConstBytes(bytes)};
    const auto decoded = DecodeHeaderV2(in);
    if (!decoded.has_value()) continue;
    ++accepted;
    const auto again = Encoded(*decoded);
    // The content of round-up is not kept.
    if (const auto* connprop = std::get_if<ConnProp>(&decoded->body)) {
      properties += connprop->properties.size();
      EXPECT_EQ(*Decoded(again), *decoded);
      EXPECT_EQ(again.size(), in.position());
    } else {
      EXPECT_EQ(ToHex(again), ToHex(ConstBytes(bytes).first(in.position())));
    }
  }
  EXPECT_GT(accepted, 1000u);
  EXPECT_GT(properties, 100u);
}

// By which one plans.
TEST(HeaderLayouts, SayWhatTheirCodecsWrite) {
  EXPECT_EQ(kHeaderLayoutV1.min_size(), 28u);
  EXPECT_EQ(kHeaderLayoutV2.min_size(), 36u);
  for (const auto& [layout, encoded_size] :
       {std::pair(kHeaderLayoutV1, &EncodedSizeV1), std::pair(kHeaderLayoutV2, &EncodedSizeV2)}) {
    Header header{.xid = 7, .version = layout.version, .body = RdmaMsg{}};
    if (layout.has_flags) header.flags = 0;
    EXPECT_EQ(encoded_size(header), layout.min_size());
    header.body = RdmaNomsg{SomeLists()};
    EXPECT_EQ(encoded_size(header), layout.SizeWith(EncodedSize(*header.chunks())));
  }
}

}  // namespace
}  // namespace stagecoach::rpcrdma
