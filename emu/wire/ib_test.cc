// Codec of InfiniBand transport packets: golden layouts of every opcode, round trips, every truncation, every opcode
// that does not exist, PSN arithmetic, the two tables of timers, and invariant CRCs of packets of real adapters.
#include "emu/wire/ib.h"

#include <gtest/gtest.h>

#include <array>
#include <set>
#include <vector>

#include "base/prng.h"
#include "tests/support/hex.h"

namespace stagecoach::emu::wire {
namespace {

using Bytes = std::vector<std::byte>;

uint32_t Opaque(std::string_view hex) {
  uint32_t value = 0;
  const Bytes bytes = FromHex(hex);
  CopyBytes(AsMutableBytes(&value, sizeof(value)), bytes);
  return value;
}

Bytes Encoded(const IbHeader& header) {
  Bytes bytes(header.EncodedSize());
  ByteWriter out(bytes);
  header.Encode(out);
  EXPECT_TRUE(out.ok());
  EXPECT_EQ(out.remaining(), 0u);
  return bytes;
}

struct Golden {
  IbHeader header;
  const char* hex;
  const char* text;
};

// The figures of chapter 9: BTH is opcode, SE|M|Pad|TVer, P_Key, FECN|BECN|reserved, DestQP, A|reserved, PSN.
std::vector<Golden> Goldens() {
  using S = IbService;
  using O = IbOp;
  const auto rc = [](O op) {
    return IbHeader{.service = S::kRc, .op = op, .destination_qp = 0x0a0b0c, .psn = 0x010203};
  };
  std::vector<Golden> all;
  const auto add = [&](IbHeader header, const char* hex, const char* text) { all.push_back({header, hex, text}); };

  add(rc(O::kSendFirst), "00 40 ffff 00 0a0b0c 00 010203", "RC Send First QP 0xa0b0c PSN 66051");
  add(rc(O::kSendMiddle), "01 40 ffff 00 0a0b0c 00 010203", "RC Send Middle QP 0xa0b0c PSN 66051");
  IbHeader h = rc(O::kSendLast);
  h.solicited = true;
  h.ack_request = true;
  add(h, "02 c0 ffff 00 0a0b0c 80 010203", "RC Send Last QP 0xa0b0c PSN 66051 A SE");
  h = rc(O::kSendLastImm);
  h.immediate = Opaque("deadbeef");
  add(h, "03 40 ffff 00 0a0b0c 00 010203 deadbeef",
      "RC Send Last with Immediate QP 0xa0b0c PSN 66051 immediate deadbeef");
  add(rc(O::kSendOnly), "04 40 ffff 00 0a0b0c 00 010203", "RC Send Only QP 0xa0b0c PSN 66051");
  h = rc(O::kSendOnlyImm);
  h.immediate = Opaque("00000001");
  add(h, "05 40 ffff 00 0a0b0c 00 010203 00000001",
      "RC Send Only with Immediate QP 0xa0b0c PSN 66051 immediate 00000001");
  h = rc(O::kWriteFirst);
  h.address = 0x1122334455667788;
  h.rkey = 0x99aabbcc;
  h.dma_length = 0x00010000;
  add(h, "06 40 ffff 00 0a0b0c 00 010203 1122334455667788 99aabbcc 00010000",
      "RC Write First QP 0xa0b0c PSN 66051 RKey 0x99aabbcc VA 0x1122334455667788 length 65536");
  add(rc(O::kWriteMiddle), "07 40 ffff 00 0a0b0c 00 010203", "RC Write Middle QP 0xa0b0c PSN 66051");
  add(rc(O::kWriteLast), "08 40 ffff 00 0a0b0c 00 010203", "RC Write Last QP 0xa0b0c PSN 66051");
  h.op = O::kWriteOnly;
  add(h, "0a 40 ffff 00 0a0b0c 00 010203 1122334455667788 99aabbcc 00010000",
      "RC Write Only QP 0xa0b0c PSN 66051 RKey 0x99aabbcc VA 0x1122334455667788 length 65536");
  h.op = O::kWriteOnlyImm;
  h.immediate = Opaque("01020304");
  add(h, "0b 40 ffff 00 0a0b0c 00 010203 1122334455667788 99aabbcc 00010000 01020304",
      "RC Write Only with Immediate QP 0xa0b0c PSN 66051 RKey 0x99aabbcc VA 0x1122334455667788 length 65536 immediate "
      "01020304");
  h = rc(O::kWriteLastImm);
  h.immediate = Opaque("01020304");
  add(h, "09 40 ffff 00 0a0b0c 00 010203 01020304",
      "RC Write Last with Immediate QP 0xa0b0c PSN 66051 immediate 01020304");
  h = rc(O::kReadRequest);
  h.address = 1;
  h.rkey = 2;
  h.dma_length = 0x80000000;
  add(h, "0c 40 ffff 00 0a0b0c 00 010203 0000000000000001 00000002 80000000",
      "RC Read Request QP 0xa0b0c PSN 66051 RKey 0x2 VA 0x1 length 2147483648");
  h = rc(O::kReadFirst);
  h.syndrome = kIbAck;
  h.msn = 7;
  add(h, "0d 40 ffff 00 0a0b0c 00 010203 1f000007", "RC Read Response First QP 0xa0b0c PSN 66051 ACK MSN 7");
  add(rc(O::kReadMiddle), "0e 40 ffff 00 0a0b0c 00 010203", "RC Read Response Middle QP 0xa0b0c PSN 66051");
  h.op = O::kReadLast;
  add(h, "0f 40 ffff 00 0a0b0c 00 010203 1f000007", "RC Read Response Last QP 0xa0b0c PSN 66051 ACK MSN 7");
  h.op = O::kReadOnly;
  add(h, "10 40 ffff 00 0a0b0c 00 010203 1f000007", "RC Read Response Only QP 0xa0b0c PSN 66051 ACK MSN 7");
  h.op = O::kAck;
  h.syndrome = kIbNakRemoteAccess;
  h.msn = 0xfedcba;
  add(h, "11 40 ffff 00 0a0b0c 00 010203 62fedcba",
      "RC Acknowledge QP 0xa0b0c PSN 66051 NAK remote access error MSN 16702650");
  h.op = O::kAtomicAck;
  h.syndrome = kIbAck;
  h.original = 0x0102030405060708;
  add(h, "12 40 ffff 00 0a0b0c 00 010203 1ffedcba 0102030405060708",
      "RC Atomic Acknowledge QP 0xa0b0c PSN 66051 ACK MSN 16702650 original 0x102030405060708");
  h = rc(O::kCompareSwap);
  h.address = 0x1000;
  h.rkey = 0x2200;
  h.swap_or_add = 3;
  h.compare = 4;
  add(h, "13 40 ffff 00 0a0b0c 00 010203 0000000000001000 00002200 0000000000000003 0000000000000004",
      "RC Compare and Swap QP 0xa0b0c PSN 66051 RKey 0x2200 VA 0x1000 swap/add 0x3 compare 0x4");
  h.op = O::kFetchAdd;
  add(h, "14 40 ffff 00 0a0b0c 00 010203 0000000000001000 00002200 0000000000000003 0000000000000004",
      "RC Fetch and Add QP 0xa0b0c PSN 66051 RKey 0x2200 VA 0x1000 swap/add 0x3 compare 0x4");
  h = rc(O::kSendLastInv);
  h.invalidate_rkey = 0x01020304;
  add(h, "16 40 ffff 00 0a0b0c 00 010203 01020304",
      "RC Send Last with Invalidate QP 0xa0b0c PSN 66051 invalidating 0x1020304");
  h.op = O::kSendOnlyInv;
  add(h, "17 40 ffff 00 0a0b0c 00 010203 01020304",
      "RC Send Only with Invalidate QP 0xa0b0c PSN 66051 invalidating 0x1020304");
  h = rc(O::kWriteOnlyImm);
  h.service = S::kUc;
  h.pkey = 0x8001;
  h.migrated = false;
  h.immediate = Opaque("0a0b0c0d");
  add(h, "2b 00 8001 00 0a0b0c 00 010203 0000000000000000 00000000 00000000 0a0b0c0d",
      "UC Write Only with Immediate QP 0xa0b0c PSN 66051 RKey 0x0 VA 0x0 length 0 immediate 0a0b0c0d");
  h = rc(O::kSendOnly);
  h.service = S::kUd;
  h.qkey = 0x80010000;
  h.source_qp = 1;
  add(h, "64 40 ffff 00 0a0b0c 00 010203 80010000 00 000001",
      "UD Send Only QP 0xa0b0c PSN 66051 from QP 0x1 QKey 0x80010000");
  h.op = O::kSendOnlyImm;
  h.immediate = Opaque("ffffffff");
  add(h, "65 40 ffff 00 0a0b0c 00 010203 80010000 00 000001 ffffffff",
      "UD Send Only with Immediate QP 0xa0b0c PSN 66051 from QP 0x1 QKey 0x80010000 immediate ffffffff");
  return all;
}

TEST(IbHeader, LaysOutEveryOpcodeAsTheSpecificationDraws) {
  std::set<IbOp> seen;
  for (const Golden& golden : Goldens()) {
    const Bytes bytes = FromHex(golden.hex);
    seen.insert(golden.header.op);
    EXPECT_EQ(ToHex(Encoded(golden.header)), ToHex(bytes)) << golden.text;
    const auto decoded = DecodeIb(bytes, bytes.size());
    ASSERT_TRUE(decoded.has_value()) << golden.text << ": " << ToString(decoded.error());
    EXPECT_EQ(*decoded, golden.header) << golden.text;
    EXPECT_EQ(Describe(*decoded), golden.text);
    EXPECT_LE(bytes.size(), kMaxIbHeaderSize);
  }
  EXPECT_EQ(seen.size(), 23u);
}

TEST(IbHeader, EveryTruncationIsAFault) {
  for (const Golden& golden : Goldens()) {
    const Bytes whole = FromHex(golden.hex);
    for (size_t size = 0; size < whole.size(); ++size) {
      const auto cut = DecodeIb(ConstBytes(whole).first(size), size);
      ASSERT_FALSE(cut.has_value()) << golden.text << " cut to " << size;
      EXPECT_EQ(cut.error(), (IbFault{IbFaultKind::kTruncated, static_cast<uint32_t>(size), size})) << golden.text;
      // A head that is shorter than the record promises is no better.
      EXPECT_FALSE(DecodeIb(ConstBytes(whole).first(size), whole.size()).has_value());
    }
  }
}

TEST(IbHeader, PayloadIsAllowedWhereTheOpcodeCarriesItAndThePadMustFit) {
  for (const Golden& golden : Goldens()) {
    const IbOp op = golden.header.op;
    const bool carries = IsSend(op) || IsWrite(op) || IsReadResponse(op);
    for (size_t payload = 1; payload <= 8; ++payload) {
      for (uint8_t pad = 0; pad < 4; ++pad) {
        IbHeader header = golden.header;
        header.pad = pad;
        Bytes record = Encoded(header);
        record.resize(record.size() + payload);
        const auto decoded = DecodeIb(record, record.size());
        if (!carries) {
          ASSERT_FALSE(decoded.has_value()) << golden.text;
          EXPECT_EQ(decoded.error().kind, IbFaultKind::kPayload) << golden.text;
        } else if ((payload + pad) % 4 != 0) {
          ASSERT_FALSE(decoded.has_value()) << golden.text;
          EXPECT_EQ(decoded.error(), (IbFault{IbFaultKind::kBadPad, 1, pad})) << golden.text;
        } else {
          ASSERT_TRUE(decoded.has_value()) << golden.text;
          EXPECT_EQ(*decoded, header);
          EXPECT_EQ(pad, IbPad(payload));
        }
      }
    }
  }
}

TEST(IbHeader, OpcodesThatDoNotExistAreFaults) {
  std::set<int> accepted;
  for (int opcode = 0; opcode < 256; ++opcode) {
    Bytes record = FromHex("00 40 ffff 00 000001 00 000000");
    record[0] = static_cast<std::byte>(opcode);
    record.resize(kMaxIbHeaderSize);
    const auto decoded = DecodeIb(record, record.size());
    const bool known = decoded.has_value() || decoded.error().kind != IbFaultKind::kBadOpcode;
    if (known) accepted.insert(opcode);
    if (!known) {
      EXPECT_EQ(decoded.error(), (IbFault{IbFaultKind::kBadOpcode, 0, static_cast<uint64_t>(opcode)}));
    }
  }
  std::set<int> expected = {0x64, 0x65};
  for (int op = 0; op <= 0x17; ++op) {
    if (op != 0x15) expected.insert(op);
    if (op <= 0x0b) expected.insert(0x20 | op);
  }
  EXPECT_EQ(accepted, expected);
}

TEST(IbHeader, TheWordThatAPeerIsOutOfReachIsNoPacketOfTheSpecification) {
  const auto word = EncodeIbUnreachable(0x123456, 0x1789abc);
  EXPECT_EQ(ToHex(word), "c040ffff0012345600789abc");
  EXPECT_EQ(DecodeIb(word, word.size()).error().kind, IbFaultKind::kBadOpcode);
  EXPECT_TRUE(IsIbUnreachable(word, word.size(), 0x123456, 0x789abc));
  EXPECT_FALSE(IsIbUnreachable(word, word.size(), 0x123457, 0x789abc));
  EXPECT_FALSE(IsIbUnreachable(word, word.size(), 0x123456, 0x789abd));
  EXPECT_FALSE(IsIbUnreachable(word, word.size() + 1, 0x123456, 0x789abc));
  EXPECT_FALSE(IsIbUnreachable(ConstBytes(word).first(11), 11, 0x123456, 0x789abc));
}

TEST(IbHeader, OtherVersionsOfTheHeaderAreFaults) {
  for (int version = 1; version < 16; ++version) {
    Bytes record = FromHex("04 40 ffff 00 000001 00 000000");
    record[1] |= static_cast<std::byte>(version);
    EXPECT_EQ(DecodeIb(record, record.size()).error(),
              (IbFault{IbFaultKind::kBadVersion, 1, static_cast<uint64_t>(version)}));
  }
}

TEST(IbHeader, CongestionAndReservedBitsAreNotJudged) {
  const Bytes plain = FromHex("64 40 ffff 00 0a0b0c 00 010203 80010000 00 000001");
  const Bytes marked = FromHex("64 40 ffff ff 0a0b0c 7f 010203 80010000 00 000001");
  EXPECT_EQ(*DecodeIb(plain, plain.size()), *DecodeIb(marked, marked.size()));
}

TEST(IbHeader, WhatADatagramsSenderSaysOfTheIpHeaderTravelsAndIsTakenOut) {
  const Bytes plain = FromHex("64 40 ffff 00 0a0b0c 00 010203 80010000 00 000001");
  const Bytes payload = FromHex("01020304");
  const auto with = [&](const Bytes& behind) {
    Bytes all = plain;
    all.insert(all.end(), behind.begin(), behind.end());
    return all;
  };
  IbHeader header = *DecodeIb(plain, plain.size());
  EXPECT_EQ(header.traffic_class, 0);
  EXPECT_EQ(header.hop_limit, 64);
  EXPECT_EQ(header.flow_label, 0u);
  for (const IbIpFields& fields : {IbIpFields{0x01, 0, 0}, IbIpFields{0x80, 1, 1}, IbIpFields{0xff, 255, 0xfffff},
                                   IbIpFields{0, 254, 0xffffe}, IbIpFields{}}) {
    header.traffic_class = fields.traffic_class;
    header.hop_limit = fields.hop_limit;
    header.flow_label = fields.flow_label;
    Bytes record = Encoded(header);
    Bytes word(kDatagramIpSize);
    ByteWriter out(word);
    EncodeDatagramIp(header, out);
    EXPECT_EQ(ToHex(word).substr(2, 1), "0");
    IbHeader decoded = *DecodeIb(record, record.size());
    EXPECT_TRUE(DecodeDatagramIp(word, &decoded));
    EXPECT_EQ(decoded, header);
    record.insert(record.end(), word.begin(), word.end());
    record.insert(record.end(), payload.begin(), payload.end());
    EXPECT_EQ(TakeIpFields(&record), fields);
    EXPECT_EQ(record, with(payload)) << "as on a wire";
  }
  // Of more than 20 bits the upper ones are cut.
  header.flow_label = 0x112345;
  Bytes word(kDatagramIpSize);
  ByteWriter out(word);
  EncodeDatagramIp(header, out);
  EXPECT_EQ(ToHex(word), "40012345");
  for (const char* wrong : {"", "40", "400123", "40112345", "40812345"}) {
    EXPECT_FALSE(DecodeDatagramIp(FromHex(wrong), &header)) << wrong;
  }
}

TEST(IbHeader, WhatIsNoDatagramOfOursStaysAsItIs) {
  // Other services, other packets, and what is too short or has other bits.
  for (const char* other :
       {"04 40 ffff 00 0a0b0c 00 010203 80010000 ff 000001 0d000001",
        "24 40 ffff 00 0a0b0c 00 010203 80010000 ff000001",
        "66 40 ffff 00 0a0b0c 00 010203 80010000 ff 000001 0d000001",
        "64 40 ffff 00 0a0b0c 00 010203 80010000 ff 000001", "64 40 ffff 00 0a0b0c 00 010203 80010000 ff 000001 0d0000",
        "64 40 ffff 00 0a0b0c 00 010203 80010000", "64", "",
        "65 40 ffff 00 0a0b0c 00 010203 80010000 ff 000001 00000007 0d0000",
        "64 40 ffff 00 0a0b0c 00 010203 80010000 ff 000001 0d100000"}) {
    Bytes record = FromHex(other);
    const Bytes before = record;
    EXPECT_EQ(TakeIpFields(&record), IbIpFields()) << other;
    EXPECT_EQ(record, before) << other;
  }
}

TEST(IbHeader, AnythingThatDecodesEncodesToWhatDecodesTheSame) {
  Prng prng(3);
  int decoded_records = 0;
  for (int i = 0; i < 20000; ++i) {
    Bytes record(prng.Below(64));
    for (std::byte& byte : record) byte = static_cast<std::byte>(prng.Next());
    if (record.size() > 1) {
      if (prng.OneIn(2)) record[0] &= std::byte{0x37};
      record[1] &= std::byte{0xf0};
    }
    const auto header = DecodeIb(record, record.size());
    if (!header.has_value()) {
      EXPECT_LE(header.error().offset, record.size());
      EXPECT_FALSE(ToString(header.error()).empty());
      continue;
    }
    ++decoded_records;
    Bytes again = Encoded(*header);
    again.insert(again.end(), record.begin() + static_cast<ptrdiff_t>(header->EncodedSize()), record.end());
    const auto twice = DecodeIb(again, again.size());
    ASSERT_TRUE(twice.has_value());
    EXPECT_EQ(*twice, *header);
  }
  EXPECT_GT(decoded_records, 500);
}

TEST(IbHeader, NumbersOf24BitsAreCutWhenEncoded) {
  const IbHeader header{.destination_qp = 0xff000001, .psn = 0x01fffffe};
  EXPECT_EQ(ToHex(Encoded(header)),
            "0440ffff"
            "00000001"
            "00fffffe");
}

TEST(IbOp, BeginningsAndEndsAreTold) {
  const std::set<IbOp> inner = {IbOp::kSendMiddle, IbOp::kWriteMiddle, IbOp::kReadMiddle};
  const std::set<IbOp> first = {IbOp::kSendFirst, IbOp::kWriteFirst, IbOp::kReadFirst};
  const std::set<IbOp> last = {IbOp::kSendLast,  IbOp::kSendLastImm,  IbOp::kSendLastInv,
                               IbOp::kWriteLast, IbOp::kWriteLastImm, IbOp::kReadLast};
  for (int i = 0; i <= 0x17; ++i) {
    const auto op = static_cast<IbOp>(i);
    if (i == 0x15) continue;
    EXPECT_EQ(BeginsMessage(op), !inner.count(op) && !last.count(op)) << ToString(op);
    EXPECT_EQ(EndsMessage(op), !inner.count(op) && !first.count(op)) << ToString(op);
  }
}

TEST(IbSyndrome, KindsAndNames) {
  EXPECT_EQ(KindOfSyndrome(0x00), IbSyndromeKind::kAck);  // with credits
  EXPECT_EQ(KindOfSyndrome(kIbAck), IbSyndromeKind::kAck);
  EXPECT_EQ(KindOfSyndrome(kIbRnrNak | 12), IbSyndromeKind::kRnrNak);
  EXPECT_EQ(KindOfSyndrome(0x40), IbSyndromeKind::kReserved);
  EXPECT_EQ(KindOfSyndrome(kIbNakRemoteOperation), IbSyndromeKind::kNak);
  EXPECT_EQ(KindOfSyndrome(0x80), IbSyndromeKind::kReserved);
  EXPECT_EQ(SyndromeToString(0x2c), "RNR NAK (timer 12)");
  EXPECT_EQ(SyndromeToString(0x61), "NAK invalid request");
  EXPECT_EQ(SyndromeToString(0x65), "NAK of unknown code 0x5");
  EXPECT_EQ(SyndromeToString(0x45), "reserved syndrome 0x45");
}

TEST(Psn, WrapsAt24Bits) {
  EXPECT_EQ(PsnAdd(0xffffff, 1), 0u);
  EXPECT_EQ(PsnAdd(0xfffffe, 5), 3u);
  EXPECT_EQ(PsnOffset(2, 0xffffff), 3u);
  EXPECT_EQ(PsnOffset(0xffffff, 2), 0xfffffdu);
  EXPECT_EQ(PsnCompare(5, 5), 0);
  EXPECT_EQ(PsnCompare(0, 0xffffff), 1);
  EXPECT_EQ(PsnCompare(0xffffff, 0), -1);
  EXPECT_EQ(PsnCompare(0x7fffff, 0), 0x7fffff);
  EXPECT_EQ(PsnCompare(0x800000, 0), -0x800000);
  EXPECT_EQ(PsnCompare(0x800001, 1), -0x800000);
}

TEST(IbTimers, RnrTableOfTheSpecification) {
  const std::array<double, 32> milliseconds = {655.36, 0.01,  0.02,  0.03,   0.04,   0.06,   0.08,   0.12,
                                               0.16,   0.24,  0.32,  0.48,   0.64,   0.96,   1.28,   1.92,
                                               2.56,   3.84,  5.12,  7.68,   10.24,  15.36,  20.48,  30.72,
                                               40.96,  61.44, 81.92, 122.88, 163.84, 245.76, 327.68, 491.52};
  for (uint8_t code = 0; code < 32; ++code) {
    EXPECT_NEAR(static_cast<double>(RnrTimer(code).count()), milliseconds[code] * 1e6, 1) << int{code};
    EXPECT_EQ(RnrTimer(code | 0xe0), RnrTimer(code));
  }
}

TEST(IbTimers, AckTimeoutDoublesAndZeroIsNever) {
  EXPECT_EQ(AckTimeout(0), Duration::zero());
  EXPECT_EQ(AckTimeout(1), Duration(8192));
  EXPECT_EQ(AckTimeout(14), Duration(67108864));  // 67 ms
  EXPECT_EQ(AckTimeout(31), Duration(int64_t{4096} << 31));
}

// A congestion notification that a ConnectX-4 Lx sent, its ICRC as it stood on the wire.
TEST(Icrc, AgreesWithAnAdapter) {
  const Bytes ip = FromHex("45c2003c 718c4000 40119161 0a001101 0a001201");
  const Bytes udp = FromHex("000012b7 00280000");
  const Bytes packet = FromHex("8100ffff 40000118 00000000 00000000 00000000 00000000 00000000");
  EXPECT_EQ(IcrcOf(ip, udp, packet), 0x2a00fd82u);  // 82 fd 00 2a on the wire
}

TEST(Icrc, AgreesWithAKnownUcSend) {
  const Bytes ip = FromHex("45010040 04784000 4011b4d5 c0a80007 c0a80007");
  const Bytes udp = FromHex("c00012b7 002caca2");
  const Bytes packet = FromHex("2460ffff 000000d3 00cf1710 4630818b e28935d9 0e9a9550 5401be88 5e500000");
  EXPECT_EQ(IcrcOf(ip, udp, packet), 0xf353f378u);
}

TEST(Icrc, FieldsThatChangeOnTheWayDoNotCount) {
  const Bytes udp = FromHex("c00012b7 00140000");
  const Bytes packet = FromHex("0440ffff 000000d3 00000001");
  Bytes v4 = FromHex("45000028 04784000 40110000 c0a80007 c0a80008");
  Bytes v6 = FromHex("60000000 00141140 20010db8000000000000000000000001 20010db8000000000000000000000002");
  const uint32_t of_v4 = IcrcOf(v4, udp, packet);
  const uint32_t of_v6 = IcrcOf(v6, udp, packet);
  EXPECT_NE(of_v4, of_v6);
  for (size_t i : {1, 8, 10, 11}) v4[i] = std::byte{0x5a};
  EXPECT_EQ(IcrcOf(v4, udp, packet), of_v4);
  v6[0] = std::byte{0x6a};
  for (size_t i : {1, 2, 3, 7}) v6[i] = std::byte{0x5a};
  EXPECT_EQ(IcrcOf(v6, udp, packet), of_v6);
  Bytes checksum = udp;
  checksum[6] = std::byte{1};
  checksum[7] = std::byte{2};
  EXPECT_EQ(IcrcOf(v4, checksum, packet), of_v4);
  Bytes congested = packet;
  congested[4] = std::byte{0xc0};
  EXPECT_EQ(IcrcOf(v4, udp, congested), of_v4);
  for (size_t i : {0, 4, 9, 12, 19}) {
    Bytes other = v4;
    other[i] ^= std::byte{1};
    EXPECT_NE(IcrcOf(other, udp, packet), of_v4) << i;
  }
  Bytes other = packet;
  other[11] = std::byte{2};
  EXPECT_NE(IcrcOf(v4, udp, other), of_v4);
}

}  // namespace
}  // namespace stagecoach::emu::wire
