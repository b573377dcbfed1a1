#include "emu/engine/ib_datagram.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <vector>

#include "base/cursor.h"
#include "base/prng.h"

namespace stagecoach::emu {
namespace {

constexpr size_t kMtu = 1024;

wire::IbHeader Sample() {
  wire::IbHeader header;
  header.service = wire::IbService::kUd;
  header.op = wire::IbOp::kSendOnlyImm;
  header.destination_qp = 0x10002;
  header.source_qp = 0x20003;
  header.qkey = 0x11223344;
  header.traffic_class = 0xb8;
  header.hop_limit = 13;
  header.flow_label = 0x54321;
  header.immediate = 7;
  return header;
}

// A record with this header and so many bytes behind it.
std::vector<std::byte> Record(wire::IbHeader header, size_t payload) {
  header.pad = wire::IbPad(payload);
  std::vector<std::byte> bytes(header.EncodedSize() + wire::kDatagramIpSize + payload, std::byte{0x5a});
  ByteWriter out(bytes);
  header.Encode(out);
  wire::EncodeDatagramIp(header, out);
  return bytes;
}

Result<DatagramHead, DatagramFault> Judge(const std::vector<std::byte>& record, size_t mtu = kMtu) {
  const ConstBytes head = ConstBytes(record).first(std::min(record.size(), kMaxRecordHead));
  return JudgeDatagram({head, record.size()}, mtu);
}

TEST(Datagram, IsTakenAsItWasSent) {
  for (const size_t payload : {size_t{0}, size_t{1}, size_t{3}, size_t{100}, kMtu}) {
    const auto judged = Judge(Record(Sample(), payload));
    ASSERT_TRUE(judged.has_value()) << payload;
    EXPECT_EQ(judged->payload, payload);
    EXPECT_EQ(judged->head_size, 24u + wire::kDatagramIpSize);
    EXPECT_EQ(judged->header.qkey, Sample().qkey);
    EXPECT_EQ(judged->header.source_qp, Sample().source_qp);
    EXPECT_EQ(judged->header.destination_qp, Sample().destination_qp);
    EXPECT_EQ(judged->header.immediate, 7u);
    EXPECT_EQ(judged->header.traffic_class, 0xb8);
    EXPECT_EQ(judged->header.hop_limit, 13);
    EXPECT_EQ(judged->header.flow_label, 0x54321u);
  }
}

TEST(Datagram, WithoutTheWordBehindItsHeadersItIsRefused) {
  const std::vector<std::byte> whole = Record(Sample(), 0);
  const size_t packet = Sample().EncodedSize();
  for (size_t size = packet; size < whole.size(); ++size) {
    std::vector<std::byte> cut(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(size));
    cut[1] |= static_cast<std::byte>(wire::IbPad(size - packet) << 4);
    EXPECT_EQ(Judge(cut).error(), DatagramFault::kMalformed) << size;
  }
  // Bits that mean nothing.
  for (int bit = 20; bit < 24; ++bit) {
    std::vector<std::byte> other = whole;
    other[packet + 1] |= static_cast<std::byte>(1u << (bit - 16));
    EXPECT_EQ(Judge(other).error(), DatagramFault::kMalformed) << bit;
  }
}

TEST(Datagram, WhatIsNoneIsRefused) {
  EXPECT_EQ(Judge(Record(Sample(), kMtu + 1)).error(), DatagramFault::kTooLong);
  EXPECT_EQ(Judge({}).error(), DatagramFault::kMalformed);
  std::vector<std::byte> cut = Record(Sample(), 0);
  cut.pop_back();
  EXPECT_EQ(Judge(cut).error(), DatagramFault::kMalformed);
  wire::IbHeader reliable = Sample();
  reliable.service = wire::IbService::kRc;
  EXPECT_EQ(Judge(Record(reliable, 8)).error(), DatagramFault::kNotDatagram);
  reliable.service = wire::IbService::kUc;
  EXPECT_EQ(Judge(Record(reliable, 8)).error(), DatagramFault::kNotDatagram);
  wire::IbHeader foreign = Sample();
  foreign.pkey = 0x8001;
  EXPECT_EQ(Judge(Record(foreign, 8)).error(), DatagramFault::kPartition);
  foreign.pkey = 0x7fff;  // a limited member of our partition
  EXPECT_TRUE(Judge(Record(foreign, 8)).has_value());
}

TEST(Datagram, HostileBytesAreJudgedWithinTheirBounds) {
  Prng luck(17);
  size_t taken = 0;
  for (int i = 0; i < 50000; ++i) {
    std::vector<std::byte> bytes;
    if (i % 2 == 0) {
      bytes.resize(luck.Below(80));
      for (std::byte& byte : bytes) byte = static_cast<std::byte>(luck.Below(256));
    } else {
      bytes = Record(Sample(), luck.Below(60));
      for (uint64_t flips = luck.Below(3); flips > 0; --flips) {
        bytes[luck.Below(bytes.size())] ^= static_cast<std::byte>(1u << luck.Below(8));
      }
    }
    const auto judged = Judge(bytes, 32);
    if (!judged) continue;
    ++taken;
    EXPECT_EQ(judged->head_size + judged->payload, bytes.size());
    EXPECT_LE(judged->payload, 32u);
    EXPECT_EQ(judged->header.service, wire::IbService::kUd);
  }
  EXPECT_GT(taken, 1000u);
}

TEST(Datagram, APrivilegedKeyMeansTheQpsOwn) {
  EXPECT_EQ(QkeyToSend(0x7fffffff, 5), 0x7fffffffu);
  EXPECT_EQ(QkeyToSend(0x80000000, 5), 5u);
  EXPECT_EQ(QkeyToSend(0xffffffff, 0x80010000), 0x80010000u);
}

// --- The route header ---

wire::Gid Mapped(uint8_t last) {
  return {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 1, 2, last};
}
constexpr wire::Gid kIpv6 = {0xfd, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14};

using Grh = std::array<std::byte, kGrhSize>;

TEST(Grh, OfIpv4AddressesIsAnIpv4HeaderBehindZeros) {
  const Route route{.source = Mapped(3), .destination = Mapped(4), .traffic_class = 0x20, .hop_limit = 64};
  Grh grh;
  grh.fill(std::byte{0xee});
  WriteGrh(route, 28, grh);
  EXPECT_EQ(ToHex(grh),
            "0000000000000000000000000000000000000000"
            "45200038000040004011228d0a0102030a010204");
  EXPECT_EQ(ReadGrh(grh), route);
  EXPECT_EQ(HeaderOf(route), RouteHeader::kIpv4);
}

TEST(Grh, OfIpv6AddressesIsAnIpv6Header) {
  const Route route{
      .source = kIpv6, .destination = Mapped(4), .traffic_class = 0x20, .hop_limit = 9, .flow_label = 0x12345};
  Grh grh;
  WriteGrh(route, 28, grh);
  EXPECT_EQ(ToHex(grh),
            "6201234500241109"
            "fd000102030405060708090a0b0c0d0e"
            "00000000000000000000ffff0a010204");
  EXPECT_EQ(ReadGrh(grh), route);
  EXPECT_EQ(HeaderOf(route), RouteHeader::kIpv6);
}

TEST(Grh, WhatStandsInFrontOfAnIpv4HeaderDoesNotMatter) {
  const Route route{.source = Mapped(3), .destination = Mapped(4), .hop_limit = 1};
  Grh grh;
  WriteGrh(route, 400, grh);
  std::fill_n(grh.begin(), 20, std::byte{0x60});
  EXPECT_EQ(ReadGrh(grh), route);
}

TEST(Grh, WhatIsNeitherIsNoRoute) {
  Grh grh{};
  EXPECT_FALSE(ReadGrh(grh).has_value());
  EXPECT_FALSE(ReadGrh(ConstBytes(grh).first(kGrhSize - 1)).has_value());
  WriteGrh({.source = Mapped(3), .destination = Mapped(4), .hop_limit = 1}, 400, grh);
  grh[39] ^= std::byte{1};  // the checksum does not fit any more
  EXPECT_FALSE(ReadGrh(grh).has_value());
}

}  // namespace
}  // namespace stagecoach::emu
