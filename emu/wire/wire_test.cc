// Codecs of MPA, DDP and RDMAP: round trips, every truncation, each fault with its Terminate code, and real frames of
// Linux siw.
#include <gtest/gtest.h>

#include <array>
#include <set>
#include <vector>

#include "base/crc32c.h"
#include "base/prng.h"
#include "emu/wire/mpa.h"
#include "emu/wire/print.h"
#include "emu/wire/rdmap.h"
#include "tests/support/hex.h"

namespace stagecoach::emu::wire {
namespace {

using Bytes = std::vector<std::byte>;

Bytes Frame(MpaFrameKind kind, std::string_view hex) {
  const ConstBytes key = AsBytes(MpaKey(kind));
  Bytes bytes(key.begin(), key.end());
  const Bytes rest = FromHex(hex);
  bytes.insert(bytes.end(), rest.begin(), rest.end());
  return bytes;
}

template <typename T>
Bytes Encoded(const T& value) {
  Bytes bytes(value.EncodedSize());
  ByteWriter out(bytes);
  value.Encode(out);
  EXPECT_TRUE(out.ok());
  EXPECT_EQ(out.remaining(), 0u);
  return bytes;
}

SegmentHeader Decoded(const Bytes& record) {
  const auto header = DecodeSegment(record, record.size());
  EXPECT_TRUE(header.has_value()) << ToString(header.error());
  return header.value_or(SegmentHeader{});
}

WireFault FaultOf(const Bytes& record) {
  const auto header = DecodeSegment(record, record.size());
  EXPECT_FALSE(header.has_value()) << Describe(*header);
  return header.has_value() ? WireFault{} : header.error();
}

// --- MPA frames ---

TEST(MpaFrame, SiwsFramesDecodeAndEncodeAgain) {
  const struct {
    MpaFrameKind kind;
    const char* hex;
    const char* text;
  } kFrames[] = {
      {MpaFrameKind::kRequest, "1002 0004 0001 0001", "MPA Request rev 2 flags S, IRD 1 ORD 1"},
      {MpaFrameKind::kRequest, "1002 000c 0080 0000 f6ab0e18 01 01 03 03",
       "MPA Request rev 2 flags S, IRD 128 ORD 0, 8 bytes of private data f6ab0e1801010303"},
      {MpaFrameKind::kReply, "5002 0004 0001 0001", "MPA Reply rev 2 flags CS, IRD 1 ORD 1"},
      {MpaFrameKind::kRequest, "1002 0004 8001 c001",
       "MPA Request rev 2 flags S, IRD 1 ORD 1, peer-to-peer RTR Write Read"},
      {MpaFrameKind::kReply, "1002 0004 8001 8001", "MPA Reply rev 2 flags S, IRD 1 ORD 1, peer-to-peer RTR Write"},
      {MpaFrameKind::kRequest, "1802 0004 0001 0001", "MPA Request rev 2 flags S+siw-gso, IRD 1 ORD 1"},
      {MpaFrameKind::kRequest, "1402 0004 0001 0001", "MPA Request rev 2 flags S+7306-asked, IRD 1 ORD 1"},
      {MpaFrameKind::kReply, "2001 0000", "MPA Reply rev 1 flags R"},
      {MpaFrameKind::kReply, "3002 0004 0000 0000", "MPA Reply rev 2 flags RS, IRD 0 ORD 0"},
      {MpaFrameKind::kRequest, "0001 0004 0001 0001", "MPA Request rev 1 flags none, 4 bytes of private data 00010001"},
      {MpaFrameKind::kRequest, "1001 0002 0001", "MPA Request rev 1 flags S, 2 bytes of private data 0001"},
  };
  for (const auto& f : kFrames) {
    const Bytes bytes = Frame(f.kind, f.hex);
    const auto frame = MpaFrame::Decode(f.kind, bytes);
    ASSERT_TRUE(frame.has_value()) << f.hex;
    EXPECT_EQ(Encoded(*frame), bytes) << f.hex;
    EXPECT_EQ(Describe(*frame), f.text);
  }
}

TEST(MpaFrame, AnythingThatDecodesEncodesToTheSameBytes) {
  Prng prng(2);
  for (int i = 0; i < 5000; ++i) {
    const MpaFrameKind kind = prng.OneIn(2) ? MpaFrameKind::kRequest : MpaFrameKind::kReply;
    const size_t length = prng.Below(kMpaPrivateDataMax + 1);
    Bytes bytes = Frame(kind, "");
    bytes.push_back(static_cast<std::byte>(prng.Next()));
    bytes.push_back(static_cast<std::byte>(prng.Below(4)));
    bytes.push_back(static_cast<std::byte>(length >> 8));
    bytes.push_back(static_cast<std::byte>(length));
    for (size_t k = 0; k < length; ++k) bytes.push_back(static_cast<std::byte>(prng.Next()));
    const auto frame = MpaFrame::Decode(kind, bytes);
    if (!frame.has_value()) {
      EXPECT_EQ(frame.error().kind, WireFaultKind::kEnhancedWordMissing);
      continue;
    }
    EXPECT_EQ(Encoded(*frame), bytes);
  }
}

TEST(MpaFrame, EveryTruncationOfEveryFormIsAFault) {
  for (const MpaFrameKind kind : {MpaFrameKind::kRequest, MpaFrameKind::kReply}) {
    for (const char* hex : {
             "4001 0008 f6ab0e18 01 00 03 03",            // revision 1
             "4001 0000",                                 // the same, without private data
             "4002 0008 f6ab0e18 01 00 03 03",            // revision 2, not enhanced
             "4002 0000",                                 //
             "1002 000c 0000 0080 f6ab0e18 01 00 03 03",  // enhanced
             "1002 0004 8001 c001",                       // enhanced, peer-to-peer, without private data
         }) {
      const Bytes whole = Frame(kind, hex);
      ASSERT_TRUE(MpaFrame::Decode(kind, whole).has_value()) << hex;
      for (size_t size = 0; size < whole.size(); ++size) {
        const auto frame = MpaFrame::Decode(kind, ConstBytes(whole).first(size));
        ASSERT_FALSE(frame.has_value()) << hex << " cut to " << size;
        EXPECT_EQ(frame.error().kind, WireFaultKind::kTruncated) << hex << " cut to " << size;
        EXPECT_EQ(frame.error().offset, size) << hex;
      }
      Bytes longer = whole;
      longer.push_back({});
      EXPECT_EQ(MpaFrame::Decode(kind, longer).error().kind, WireFaultKind::kTooLong) << hex;
    }
  }
}

TEST(MpaFrame, SizeIsKnownFromTheFirstTwentyBytes) {
  const Bytes whole = Frame(MpaFrameKind::kRequest, "1002 000c 0000 0080 f6ab0e18 01 00 03 03");
  EXPECT_EQ(MpaFrameSize(MpaFrameKind::kRequest, ConstBytes(whole).first(20)).value(), whole.size());
  EXPECT_EQ(MpaFrameSize(MpaFrameKind::kRequest, Frame(MpaFrameKind::kRequest, "0001 0200")).value(), 532u);
  const auto hostile = MpaFrameSize(MpaFrameKind::kRequest, Frame(MpaFrameKind::kRequest, "0001 0201"));
  ASSERT_FALSE(hostile.has_value());
  EXPECT_EQ(hostile.error(), (WireFault{WireFaultKind::kPrivateDataTooLong, 18, 513, terminate::kMpaInvalidFrame}));
}

TEST(MpaFrame, TheKeyIsJudgedByteByByte) {
  const Bytes reply = Frame(MpaFrameKind::kReply, "0001 0000");
  for (size_t size = 0; size <= reply.size(); ++size) {
    EXPECT_TRUE(MpaKeyMatches(MpaFrameKind::kReply, ConstBytes(reply).first(size)));
    // "MPA ID Re": the keys differ in the tenth byte.
    EXPECT_EQ(MpaKeyMatches(MpaFrameKind::kRequest, ConstBytes(reply).first(size)), size <= 9);
  }
  EXPECT_EQ(MpaFrame::Decode(MpaFrameKind::kRequest, reply).error().kind, WireFaultKind::kBadKey);
}

TEST(MpaFrame, WhatAFrameCannotCarryFailsTheWriter) {
  std::array<std::byte, 600> room;
  const Bytes data(513);
  for (const MpaFrame& frame :
       {MpaFrame{.revision = 1, .private_data = data}, MpaFrame{.flags = kMpaFlagEnhanced, .private_data = {}},
        MpaFrame{.flags = 0, .enhanced = MpaEnhanced{}}}) {
    ByteWriter out(room);
    frame.Encode(out);
    EXPECT_FALSE(out.ok());
    EXPECT_EQ(out.position(), 0u);
  }
  ByteWriter small(MutableBytes(room).first(19));
  MpaFrame{.revision = 1}.Encode(small);
  EXPECT_FALSE(small.ok());
}

// --- FPDU layout ---

TEST(Fpdu, PadsToWords) {
  for (size_t length = 0; length <= kMpaUlpduMax; ++length) {
    EXPECT_LT(FpduPad(length), 4u);
    EXPECT_EQ((kMpaLengthSize + length + FpduPad(length)) % 4, 0u);
    EXPECT_EQ(FpduSize(length), kMpaLengthSize + length + FpduPad(length) + kMpaCrcSize);
  }
  EXPECT_EQ(FpduSize(1442), 1448u);
  EXPECT_EQ(FpduSize(65474), 65480u);
}

TEST(Fpdu, TheLargestUlpduFitsAndTheNextDoesNot) {
  for (size_t bytes = 0; bytes < 70000; ++bytes) {
    const size_t ulpdu = LargestUlpdu(bytes);
    if (ulpdu > 0) {
      EXPECT_LE(FpduSize(ulpdu), bytes);
    }
    if (ulpdu < kMpaUlpduMax) {
      EXPECT_GT(FpduSize(ulpdu + 1), bytes);
    }
  }
  EXPECT_EQ(LargestUlpdu(1448), 1442u);
}

TEST(Fpdu, CrcHasItsLowByteFirst) {
  const auto field = EncodeFpduCrc(ComputeCrc32c(AsBytes(std::string_view("123456789"))));
  EXPECT_EQ(ToHex(field), "839206e3");
  EXPECT_EQ(DecodeFpduCrc(field), 0xe3069283u);
  const Bytes rtr_write = FromHex("000e c140 00000001 0000000000000000");
  EXPECT_EQ(ToHex(EncodeFpduCrc(ComputeCrc32c(rtr_write))), "ebd34c5f");
}

TEST(Fpdu, MarkersRoundTripAndStandAtMultiplesOf512) {
  const auto bytes = FromHex("0001 01f8");
  const MpaMarker marker = MpaMarker::Decode(std::span<const std::byte, 4>(bytes));
  EXPECT_EQ(marker, (MpaMarker{.reserved = 1, .fpdu_pointer = 504}));
  std::array<std::byte, 4> again;
  ByteWriter out(again);
  marker.Encode(out);
  EXPECT_EQ(ToHex(again), ToHex(bytes));
  EXPECT_EQ(BytesToMarker(0), 0u);
  EXPECT_EQ(BytesToMarker(1), 511u);
  EXPECT_EQ(BytesToMarker(512), 0u);
  EXPECT_EQ(BytesToMarker(1000), 24u);
}

// --- Segments ---

TEST(Segment, SiwsSegmentsDecodeAndEncodeAgain) {
  const struct {
    const char* hex;
    size_t header;
    const char* text;
  } kSegments[] = {
      {"c140 00000001 0000000000000000", 14, "Write STag 0x1 TO 0x0 last"},
      {"4143 00000000 00000000 00000001 00000000 000055962994c7d011b22d00000000ff", 18, "Send MSN 1 MO 0 last"},
      {"4141 00000000 00000001 00000001 00000000 9d451400 0000559403a44bf0 000000ff 11b22d00 000055962994c7d0", 46,
       "Read Request MSN 1: 255 bytes from STag 0x11b22d00 TO 0x55962994c7d0 to STag 0x9d451400 TO 0x559403a44bf0"},
      {"4144 62482601 00000000 00000017 00000000 9d6de715", 18,
       "Send with Invalidate MSN 23 MO 0 invalidate STag 0x62482601 last"},
      {"c140 ca454604 b64d82ed0420e000 01", 14, "Write STag 0xca454604 TO 0xb64d82ed0420e000 last"},
      {"0143 00000000 00000000 00000002 00000590 ff", 18, "Send MSN 2 MO 1424"},
      {"8142 9d451400 0000559403a44bf0 ff", 14, "Read Response STag 0x9d451400 TO 0x559403a44bf0"},
      {"4147 00000000 00000002 00000001 00000000 11000300", 18, "Terminate MSN 1"},
  };
  for (const auto& s : kSegments) {
    const Bytes record = FromHex(s.hex);
    const SegmentHeader header = Decoded(record);
    EXPECT_EQ(header.EncodedSize(), s.header);
    EXPECT_EQ(Describe(header), s.text);
    EXPECT_EQ(ToHex(Encoded(header)), ToHex(ConstBytes(record).first(s.header)));
  }
}

TEST(Segment, WhatTheMakersMakeDecodesToTheSame) {
  const ReadRequest request{1, 2, 3, 4, 5};
  for (const SegmentHeader& header :
       {SegmentHeader::Write(7, 1ull << 63, false), SegmentHeader::ReadResponse(8, ~0ull, true),
        SegmentHeader::Send(RdmapOpcode::kSend, 99, 1, 0, true),
        SegmentHeader::Send(RdmapOpcode::kSendInvalidate, 99, 0xffffffff, 1424, false),
        SegmentHeader::Send(RdmapOpcode::kSendSolicited, 99, 3, 0, true),
        SegmentHeader::Send(RdmapOpcode::kSendSolicitedInvalidate, 99, 4, 0, true), SegmentHeader::Read(5, request)}) {
    EXPECT_EQ(Decoded(Encoded(header)), header) << Describe(header);
  }
  EXPECT_EQ(SegmentHeader::Send(RdmapOpcode::kSend, 99, 1, 0, true).ulp_word, 0u);
  Bytes terminate = Encoded(SegmentHeader::Terminate());
  terminate.resize(terminate.size() + kTerminateControlSize);
  EXPECT_EQ(Decoded(terminate), SegmentHeader::Terminate());
}

TEST(Segment, AnythingThatDecodesEncodesToTheSameBytes) {
  Prng prng(3);
  int decoded = 0;
  for (int i = 0; i < 60000; ++i) {
    Bytes record(prng.Below(80));
    for (std::byte& b : record) b = static_cast<std::byte>(prng.Next());
    // Mostly good control bytes and queues, or nothing would get through.
    if (!record.empty()) record[0] = (record[0] & std::byte{0xfc}) | std::byte{1};
    if (record.size() > 1) record[1] = (record[1] & std::byte{0x37}) | std::byte{0x40};
    if (record.size() > 9) record[6] = record[7] = record[8] = std::byte{0}, record[9] &= std::byte{3};
    if (record.size() > 17 && prng.OneIn(2)) record[14] = record[15] = record[16] = record[17] = std::byte{0};
    if (prng.OneIn(4) && record.size() > kMaxSegmentHeaderSize) record.resize(kMaxSegmentHeaderSize);
    const auto header = DecodeSegment(record, record.size());
    if (!header.has_value()) continue;
    ++decoded;
    const Bytes again = Encoded(*header);
    ASSERT_EQ(ToHex(again), ToHex(ConstBytes(record).first(again.size())));
  }
  EXPECT_GT(decoded, 6000);
}

TEST(Segment, EveryTruncatedHeaderIsALengthFault) {
  for (const char* hex :
       {"c140 00000001 0000000000000000", "4143 00000000 00000000 00000001 00000000",
        "4141 00000000 00000001 00000001 00000000 9d451400 0000559403a44bf0 000000ff 11b22d00 000055962994c7d0",
        "4147 00000000 00000002 00000001 00000000 11000300"}) {
    const Bytes whole = FromHex(hex);
    ASSERT_TRUE(DecodeSegment(whole, whole.size()).has_value());
    for (size_t size = 0; size < whole.size(); ++size) {
      const Bytes cut(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(size));
      const WireFault fault = FaultOf(cut);
      EXPECT_EQ(fault.kind, WireFaultKind::kTruncated) << hex << " " << size;
      EXPECT_EQ(fault.terminate, terminate::kMpaMarkerOrLength);
    }
  }
}

TEST(Segment, AHeadShorterThanTheRecordIsEnoughForTheHeader) {
  const Bytes head = Encoded(SegmentHeader::Write(1, 2, true));
  EXPECT_TRUE(DecodeSegment(head, 65535).has_value());
  EXPECT_FALSE(DecodeSegment(ConstBytes(head).first(13), 65535).has_value());
  EXPECT_FALSE(DecodeSegment(head, 13).has_value()) << "bytes behind the record are not its own";
}

TEST(Segment, EachFaultHasItsTerminateCode) {
  const struct {
    const char* what;
    const char* hex;
    WireFaultKind kind;
    uint32_t offset;
    TerminateCode code;
  } kCases[] = {
      {"DDP version 2, tagged", "c240 00000001 0000000000000000", WireFaultKind::kBadDdpVersion, 0,
       terminate::kDdpTaggedVersion},
      {"DDP version 0, untagged", "4043 00000000 00000000 00000001 00000000", WireFaultKind::kBadDdpVersion, 0,
       terminate::kDdpUntaggedVersion},
      {"DDP version is judged before all else", "42", WireFaultKind::kBadDdpVersion, 0, terminate::kDdpUntaggedVersion},
      {"QN 5", "4143 00000000 00000005 00000001 00000000", WireFaultKind::kBadQueueNumber, 6,
       terminate::kDdpQueueNumber},
      {"QN is DDP's and comes before RV", "4183 00000000 00000005 00000001 00000000", WireFaultKind::kBadQueueNumber, 6,
       terminate::kDdpQueueNumber},
      {"RDMAP version 2", "4183 00000000 00000000 00000001 00000000", WireFaultKind::kBadRdmapVersion, 1,
       terminate::kRdmapVersion},
      {"RDMAP version 0, tagged", "c100 00000001 0000000000000000", WireFaultKind::kBadRdmapVersion, 1,
       terminate::kRdmapVersion},
      {"opcode 12", "414c 00000000 00000000 00000001 00000000", WireFaultKind::kBadOpcode, 1, terminate::kRdmapOpcode},
      {"opcode 8, RFC 7306", "4148 00000000 00000000 00000001 00000000", WireFaultKind::kBadOpcode, 1,
       terminate::kRdmapOpcode},
      {"Write untagged", "4140 00000000 00000000 00000001 00000000", WireFaultKind::kWrongBufferModel, 1,
       terminate::kRdmapOpcode},
      {"Send tagged", "c143 00000001 0000000000000000", WireFaultKind::kWrongBufferModel, 1, terminate::kRdmapOpcode},
      {"Send on QN 1", "4143 00000000 00000001 00000001 00000000", WireFaultKind::kWrongQueue, 6,
       terminate::kRdmapOpcode},
      {"Read Request on QN 0", "4141 00000000 00000000 00000001 00000000", WireFaultKind::kWrongQueue, 6,
       terminate::kRdmapOpcode},
      {"Terminate on QN 0", "4147 00000000 00000000 00000001 00000000 10000000", WireFaultKind::kWrongQueue, 6,
       terminate::kRdmapOpcode},
      {"Read Request not at MO 0", "4141 00000000 00000001 00000001 00000004", WireFaultKind::kBadMessageOffset, 14,
       terminate::kDdpMessageOffset},
      {"Read Request in parts", "0141 00000000 00000001 00000001 00000000", WireFaultKind::kMessageNotWhole, 0,
       terminate::kDdpTooLong},
      {"Read Request with payload",
       "4141 00000000 00000001 00000001 00000000 9d451400 0000559403a44bf0 000000ff 11b22d00 000055962994c7d0 00",
       WireFaultKind::kTooLong, 46, terminate::kDdpTooLong},
      {"Terminate in parts", "0147 00000000 00000002 00000001 00000000 10000000", WireFaultKind::kMessageNotWhole, 0,
       terminate::kDdpTooLong},
  };
  for (const auto& c : kCases) {
    const WireFault fault = FaultOf(FromHex(c.hex));
    EXPECT_EQ(fault.kind, c.kind) << c.what << ": " << ToString(fault);
    EXPECT_EQ(fault.offset, c.offset) << c.what;
    EXPECT_EQ(fault.terminate, c.code) << c.what << ": " << ToString(fault.terminate);
  }
  Bytes endless = Encoded(SegmentHeader::Terminate());
  endless.resize(kDdpUntaggedHeaderSize + kMaxTerminateSize + 1);
  EXPECT_EQ(FaultOf(endless).kind, WireFaultKind::kTooLong);
  EXPECT_EQ(ToString(FaultOf(FromHex("4143 00000000 00000005 00000001 00000000"))),
            "no such untagged queue (5) at byte 6");
}

// --- RFC 7306 ---

constexpr char kImmediateRecord[] = "4148 00000000 00000000 00000005 00000000 0a0b0c0d 00000000";
constexpr char kFetchAddRecord[] =
    "414a 00000000 00000001 00000007 00000000 00000000 00000009 11b22d00 000055962994c7d0 0000000000000005 "
    "0000000000000000 0000000000000000 0000000000000000";
constexpr char kCompareSwapRecord[] =
    "414a 00000000 00000001 00000008 00000000 00000002 0000000a 11b22d00 000055962994c7d8 1111111111111111 "
    "ffffffffffffffff 2222222222222222 ffffffffffffffff";
constexpr char kAtomicResponseRecord[] = "414b 00000000 00000003 00000001 00000000 00000009 00000000000000ff";

Result<SegmentHeader, WireFault> DecodeExtended(ConstBytes record) {
  return DecodeSegment(record, record.size(), RdmapExtensions::kRfc7306);
}

template <typename Message>
Bytes RecordOf(const SegmentHeader& header, const Message& message) {
  Bytes record(header.EncodedSize() + Message::EncodedSize());
  ByteWriter out(record);
  header.Encode(out);
  message.Encode(out);
  EXPECT_TRUE(out.ok());
  return record;
}

TEST(Rfc7306, EachMessageHasItsLayout) {
  const Bytes number = FromHex("0a0b0c0d");
  uint32_t immediate = 0;
  CopyBytes(AsMutableBytes(&immediate, sizeof(immediate)), number);
  EXPECT_EQ(ToHex(RecordOf(SegmentHeader::Immediate(false, 5), ImmediateData::Of(immediate))),
            ToHex(FromHex(kImmediateRecord)));
  EXPECT_EQ(ImmediateData::Of(immediate).AsInMemory(), immediate);
  EXPECT_EQ(ToHex(RecordOf(SegmentHeader::AtomicRequest(7), AtomicRequest::FetchAdd(9, 0x11b22d00, 0x55962994c7d0, 5))),
            ToHex(FromHex(kFetchAddRecord)));
  EXPECT_EQ(ToHex(RecordOf(
                SegmentHeader::AtomicRequest(8),
                AtomicRequest::CompareSwap(10, 0x11b22d00, 0x55962994c7d8, 0x2222222222222222, 0x1111111111111111))),
            ToHex(FromHex(kCompareSwapRecord)));
  EXPECT_EQ(ToHex(RecordOf(SegmentHeader::AtomicResponse(1), AtomicResponse{9, 255})),
            ToHex(FromHex(kAtomicResponseRecord)));
}

TEST(Rfc7306, MessagesDecodeToWhatTheyWereMadeOf) {
  const struct {
    const char* hex;
    SegmentHeader header;
    const char* text;
  } kRecords[] = {
      {kImmediateRecord, SegmentHeader::Immediate(false, 5), "Immediate Data MSN 5"},
      {"4149 00000000 00000000 00000006 00000000 0000000000000000", SegmentHeader::Immediate(true, 6),
       "Immediate Data with SE MSN 6"},
      {kFetchAddRecord, SegmentHeader::AtomicRequest(7), "Atomic Request MSN 7"},
      {kCompareSwapRecord, SegmentHeader::AtomicRequest(8), "Atomic Request MSN 8"},
      {kAtomicResponseRecord, SegmentHeader::AtomicResponse(1), "Atomic Response MSN 1"},
  };
  for (const auto& r : kRecords) {
    const Bytes record = FromHex(r.hex);
    const auto header = DecodeExtended(record);
    ASSERT_TRUE(header.has_value()) << r.text << ": " << ToString(header.error());
    EXPECT_EQ(*header, r.header) << r.text;
    EXPECT_EQ(header->EncodedSize(), kDdpUntaggedHeaderSize) << r.text;
    EXPECT_EQ(Describe(*header), r.text);
  }
  const Bytes add = FromHex(kFetchAddRecord);
  const auto request = AtomicRequest::Decode(ConstBytes(add).subspan(kDdpUntaggedHeaderSize));
  ASSERT_TRUE(request.has_value());
  EXPECT_EQ(*request, AtomicRequest::FetchAdd(9, 0x11b22d00, 0x55962994c7d0, 5));
  EXPECT_TRUE(request->IsPlain());
  const Bytes answer = FromHex(kAtomicResponseRecord);
  EXPECT_EQ(AtomicResponse::Decode(ConstBytes(answer).subspan(kDdpUntaggedHeaderSize)), (AtomicResponse{9, 255}));
}

TEST(Rfc7306, MasksMakeAnAtomicOtherThanPlain) {
  AtomicRequest add = AtomicRequest::FetchAdd(1, 2, 8, 3);
  add.add_or_swap_mask = 1;
  EXPECT_FALSE(add.IsPlain());
  AtomicRequest swap = AtomicRequest::CompareSwap(1, 2, 8, 3, 4);
  EXPECT_TRUE(swap.IsPlain());
  swap.compare_mask = 0xff;
  EXPECT_FALSE(swap.IsPlain());
  swap = AtomicRequest::CompareSwap(1, 2, 8, 3, 4);
  swap.add_or_swap_mask = 0;
  EXPECT_FALSE(swap.IsPlain());
}

TEST(Rfc7306, BodiesOfAnyBytesEncodeToThemAgain) {
  Prng prng(5);
  const auto check = [&](auto message) {
    using Message = decltype(message);
    Bytes bytes(Message::EncodedSize());
    for (std::byte& b : bytes) b = static_cast<std::byte>(prng.Next());
    const auto decoded = Message::Decode(bytes);
    ASSERT_TRUE(decoded.has_value());
    EXPECT_EQ(ToHex(Encoded(*decoded)), ToHex(bytes));
    for (size_t size = 0; size < bytes.size(); ++size) {
      const auto cut = Message::Decode(ConstBytes(bytes).first(size));
      ASSERT_FALSE(cut.has_value()) << size;
      EXPECT_EQ(cut.error().kind, WireFaultKind::kTruncated);
    }
  };
  for (int i = 0; i < 100; ++i) {
    check(ImmediateData{});
    check(AtomicRequest{});
    check(AtomicResponse{});
  }
}

TEST(Rfc7306, EveryTruncatedRecordIsALengthFault) {
  for (const char* hex : {kImmediateRecord, kFetchAddRecord, kAtomicResponseRecord}) {
    const Bytes whole = FromHex(hex);
    for (size_t size = 0; size < whole.size(); ++size) {
      const auto cut = DecodeExtended(ConstBytes(whole).first(size));
      ASSERT_FALSE(cut.has_value()) << hex << " " << size;
      EXPECT_EQ(cut.error().kind, WireFaultKind::kTruncated) << hex << " " << size;
    }
    // The head that a lower layer shows need not hold the whole of it.
    EXPECT_TRUE(DecodeSegment(ConstBytes(whole).first(kDdpUntaggedHeaderSize), whole.size(), RdmapExtensions::kRfc7306)
                    .has_value());
  }
}

TEST(Rfc7306, EachFaultHasItsTerminateCode) {
  const struct {
    const char* what;
    const char* hex;
    WireFaultKind kind;
    TerminateCode code;
  } kCases[] = {
      {"opcode 12", "414c 00000000 00000000 00000001 00000000", WireFaultKind::kBadOpcode, terminate::kRdmapOpcode},
      {"QN 4", "414b 00000000 00000004 00000001 00000000", WireFaultKind::kBadQueueNumber, terminate::kDdpQueueNumber},
      {"Immediate Data on QN 1", "4148 00000000 00000001 00000005 00000000 0a0b0c0d00000000",
       WireFaultKind::kWrongQueue, terminate::kRdmapOpcode},
      {"Atomic Request on QN 3", "414a 00000000 00000003 00000005 00000000", WireFaultKind::kWrongQueue,
       terminate::kRdmapOpcode},
      {"Atomic Response on QN 1", "414b 00000000 00000001 00000005 00000000", WireFaultKind::kWrongQueue,
       terminate::kRdmapOpcode},
      {"Send on QN 3", "4143 00000000 00000003 00000005 00000000", WireFaultKind::kWrongQueue, terminate::kRdmapOpcode},
      {"Immediate Data, tagged", "c148 00000000 0000000000000000", WireFaultKind::kWrongBufferModel,
       terminate::kRdmapOpcode},
      {"Immediate Data of nine bytes", "4148 00000000 00000000 00000005 00000000 0a0b0c0d0000000000",
       WireFaultKind::kTooLong, terminate::kDdpTooLong},
      {"Immediate Data in parts", "0148 00000000 00000000 00000005 00000000 0a0b0c0d00000000",
       WireFaultKind::kMessageNotWhole, terminate::kDdpTooLong},
      {"Immediate Data not at MO 0", "4148 00000000 00000000 00000005 00000004 0a0b0c0d00000000",
       WireFaultKind::kBadMessageOffset, terminate::kDdpMessageOffset},
      {"Atomic Response of 13 bytes", "414b 00000000 00000003 00000001 00000000 00000009 00000000000000ff 00",
       WireFaultKind::kTooLong, terminate::kDdpTooLong},
  };
  for (const auto& c : kCases) {
    const auto header = DecodeExtended(FromHex(c.hex));
    ASSERT_FALSE(header.has_value()) << c.what;
    EXPECT_EQ(header.error().kind, c.kind) << c.what << ": " << ToString(header.error());
    EXPECT_EQ(header.error().terminate, c.code) << c.what;
  }
}

TEST(Rfc7306, WithoutAgreementItsOpcodesAndItsQueueDoNotExist) {
  for (const char* hex : {kImmediateRecord, kFetchAddRecord}) {
    const WireFault fault = FaultOf(FromHex(hex));
    EXPECT_EQ(fault.kind, WireFaultKind::kBadOpcode) << hex;
    EXPECT_EQ(fault.terminate, terminate::kRdmapOpcode) << hex;
  }
  const WireFault fault = FaultOf(FromHex(kAtomicResponseRecord));
  EXPECT_EQ(fault.kind, WireFaultKind::kBadQueueNumber);
  EXPECT_EQ(fault.terminate, terminate::kDdpQueueNumber);
}

TEST(Rfc7306, ATerminateIsReadAboutAnAtomic) {
  const Bytes record = FromHex(kFetchAddRecord);
  const TerminateHeader about =
      TerminateHeader::For(terminate::kRdmapAccess, ConstBytes(record).first(kDdpUntaggedHeaderSize), record.size());
  EXPECT_FALSE(about.has_rdmap_header);
  EXPECT_EQ(Describe(TerminateReading{.header = about}),
            "RDMAP remote protection: access rights violation, about Atomic Request MSN 7 of 70 bytes");
}

TEST(Ddp, HeadersOfTheOtherModelAreNotRead) {
  EXPECT_EQ(DdpTaggedHeader::Decode(FromHex("4143 00000000 00000000 00000001 00000000")).error().kind,
            WireFaultKind::kWrongBufferModel);
  EXPECT_EQ(DdpUntaggedHeader::Decode(FromHex("c140 00000001 0000000000000000 00000000")).error().kind,
            WireFaultKind::kWrongBufferModel);
  EXPECT_EQ(DdpTaggedHeader::Decode({}).error().kind, WireFaultKind::kTruncated);
  EXPECT_EQ(DdpUntaggedHeader::Decode({}).error().kind, WireFaultKind::kTruncated);
}

// --- Terminate ---

TEST(Terminate, TheTableNamesEachCodeOnceAndInOrder) {
  std::set<std::string> names;
  uint32_t before = 0;
  for (const TerminateCodeName& row : TerminateCodeNames()) {
    const uint32_t key = row.code.layer << 16 | row.code.error_type << 8 | row.code.error_code;
    EXPECT_TRUE(names.empty() || key > before) << row.name;
    before = key;
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    EXPECT_TRUE(IsAssigned(row.code));
    EXPECT_EQ(ToString(row.code), row.name);
  }
  EXPECT_EQ(names.size(), 33u);
  EXPECT_FALSE(IsAssigned({0, 2, 0}));
  EXPECT_EQ(ToString(TerminateCode{1, 2, 0x42}), "DDP untagged buffer: unassigned code 0x42");
  EXPECT_EQ(ToString(TerminateCode{5, 3, 0x42}), "layer 5 type 3 code 0x42");
  EXPECT_TRUE(IsAssigned({0, 0, 77})) << "a local catastrophic error may have any code";
}

TEST(Terminate, OursRoundTripWithWhatTheyQuote) {
  const Bytes read = Encoded(SegmentHeader::Read(9, {1, 2, 3, 4, 5}));
  const Bytes write = Encoded(SegmentHeader::Write(7, 8, true));
  for (const TerminateCodeName& row : TerminateCodeNames()) {
    for (const TerminateHeader& header :
         {TerminateHeader::For(row.code, read, read.size()), TerminateHeader::For(row.code, write, 100),
          TerminateHeader::For(row.code, ConstBytes(write).first(5), 5)}) {
      const Bytes bytes = Encoded(header);
      EXPECT_LE(bytes.size(), kMaxTerminateSize);
      const auto reading = DecodeTerminate(bytes);
      ASSERT_TRUE(reading.has_value());
      EXPECT_EQ(reading->order, TerminateBitOrder::kRfc) << row.name;
      EXPECT_EQ(reading->header, header) << row.name;
    }
  }
  const TerminateHeader about_read = TerminateHeader::For(terminate::kRdmapInvalidStag, read, read.size());
  EXPECT_EQ(about_read.SegmentLength(), 46);
  EXPECT_EQ(about_read.DdpHeader().size(), kDdpUntaggedHeaderSize);
  EXPECT_EQ(about_read.QuotedReadRequest(), (ReadRequest{1, 2, 3, 4, 5}));
  EXPECT_EQ(Describe(TerminateReading{.header = about_read}),
            "RDMAP remote protection: invalid STag, about Read Request MSN 9: 3 bytes from STag 0x4 TO 0x5 to STag 0x1 "
            "TO 0x2 of 46 "
            "bytes");
}

TEST(Terminate, SiwsOrderIsRecognised) {
  const struct {
    const char* hex;
    TerminateCode code;
    TerminateBitOrder order;
  } kSeen[] = {
      {"11000300", terminate::kDdpInvalidStag, TerminateBitOrder::kSiw},
      {"10000700", terminate::kRdmapInvalidStag, TerminateBitOrder::kSiw},
      {"21020300", terminate::kDdpNoBuffer, TerminateBitOrder::kSiw},
      {"21030300", terminate::kDdpMsnRange, TerminateBitOrder::kSiw},
      {"21010300", terminate::kDdpQueueNumber, TerminateBitOrder::kSiw},
      {"01000300", terminate::kDdpLocalCatastrophic, TerminateBitOrder::kSiw},
      {"21060000", terminate::kDdpUntaggedVersion, TerminateBitOrder::kSiw},
      {"02020000", terminate::kMpaCrc, TerminateBitOrder::kSiw},
      {"20090300", terminate::kRdmapCannotInvalidate, TerminateBitOrder::kSiw},
      {"20060000", terminate::kRdmapOpcode, TerminateBitOrder::kAmbiguous},
      {"20050000", terminate::kRdmapVersion, TerminateBitOrder::kAmbiguous},
      // A correct peer's.
      {"1100c000", terminate::kDdpInvalidStag, TerminateBitOrder::kRfc},
      {"12020000", terminate::kDdpNoBuffer, TerminateBitOrder::kRfc},
      {"20020000", terminate::kMpaCrc, TerminateBitOrder::kRfc},
      {"0206c000", terminate::kRdmapOpcode, TerminateBitOrder::kRfc},
      {"00000000", terminate::kRdmapLocalCatastrophic, TerminateBitOrder::kRfc},
  };
  for (const auto& s : kSeen) {
    const Bytes bytes = FromHex(s.hex);
    const auto reading = DecodeTerminate(bytes);
    ASSERT_TRUE(reading.has_value());
    EXPECT_EQ(reading->order, s.order) << s.hex;
    const TerminateHeader& meant = reading->as_siw.has_value() ? *reading->as_siw : reading->header;
    EXPECT_EQ(meant.code, s.code) << s.hex << ": " << ToString(meant.code);
    EXPECT_EQ(reading->as_siw.has_value(), s.order == TerminateBitOrder::kAmbiguous);
  }
  EXPECT_EQ(Describe(*DecodeTerminate(FromHex("20060000"))),
            "MPA: insufficient IRD resources [or, if siw sent it: RDMAP remote operation: unexpected opcode]");
}

TEST(Terminate, EitherOrderEncodesToTheBytesItWasReadFrom) {
  Prng prng(4);
  for (int i = 0; i < 20000; ++i) {
    Bytes bytes(kTerminateControlSize + prng.Below(kMaxTerminateSize - kTerminateControlSize + 1));
    for (std::byte& b : bytes) b = static_cast<std::byte>(prng.Next());
    const auto reading = DecodeTerminate(bytes);
    ASSERT_TRUE(reading.has_value());
    if (reading->order == TerminateBitOrder::kSiw) {
      Bytes again(bytes.size());
      ByteWriter out(again);
      reading->header.EncodeAsSiw(out);
      ASSERT_TRUE(out.ok());
      ASSERT_EQ(ToHex(again), ToHex(bytes));
    } else {
      ASSERT_EQ(ToHex(Encoded(reading->header)), ToHex(bytes));
    }
    EXPECT_FALSE(Describe(*reading).empty());
  }
}

TEST(Terminate, ACutQuotationDoesNotSpoilTheCode) {
  const Bytes whole = Encoded(TerminateHeader::For(terminate::kRdmapBounds, Encoded(SegmentHeader::Read(1, {})), 46));
  for (size_t size = kTerminateControlSize; size < whole.size(); ++size) {
    const auto reading = DecodeTerminate(ConstBytes(whole).first(size));
    ASSERT_TRUE(reading.has_value());
    EXPECT_EQ(reading->header.code, terminate::kRdmapBounds);
    EXPECT_FALSE(reading->header.QuotedReadRequest().has_value());
    EXPECT_EQ(reading->header.SegmentLength().has_value(), size >= 6);
    EXPECT_EQ(reading->header.DdpHeader().empty(), size < 6 + kDdpUntaggedHeaderSize);
  }
  for (size_t size = 0; size < kTerminateControlSize; ++size) {
    const auto reading = DecodeTerminate(ConstBytes(whole).first(size));
    ASSERT_FALSE(reading.has_value()) << size;
    EXPECT_EQ(reading.error().kind, WireFaultKind::kTruncated) << size;
    EXPECT_EQ(reading.error().offset, size);
  }
  EXPECT_TRUE(DecodeTerminate(whole)->header.QuotedReadRequest().has_value());
  EXPECT_EQ(DecodeTerminate(Bytes(kMaxTerminateSize + 1)).error().kind, WireFaultKind::kTooLong);
}

}  // namespace
}  // namespace stagecoach::emu::wire
