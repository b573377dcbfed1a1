#include "tests/support/pcap_reader.h"

#include <gtest/gtest.h>

#include <array>

#include "base/cursor.h"

namespace stagecoach::testing {
namespace {

using Bytes = std::vector<std::byte>;

constexpr uint8_t kFin = 1, kSyn = 2, kReset = 4, kAck = 16;

// Writes pcap files packet by packet, big-endian.
class PcapWriter {
 public:
  explicit PcapWriter(uint32_t link = 1) { Append({0xa1b2c3d4, 0x00020004, 0, 0, 65535, link}); }
  void Packet(bool from_client, uint32_t sequence, uint8_t flags, std::string_view payload,
              uint32_t acknowledgement = 0) {
    Bytes frame(14 + 20 + 20 + payload.size());
    ByteWriter out(frame);
    out.Zeros(12);
    out.U16(0x0800);
    out.U8(0x45);
    out.U8(0);
    out.U16(static_cast<uint16_t>(40 + payload.size()));
    out.U32(0);
    out.U8(64);
    out.U8(6);
    out.U16(0);
    out.U32(from_client ? 0x0a000001 : 0x0a000002);
    out.U32(from_client ? 0x0a000002 : 0x0a000001);
    out.U16(from_client ? 1000 : 2000);
    out.U16(from_client ? 2000 : 1000);
    out.U32(sequence);
    out.U32(acknowledgement);
    out.U8(0x50);
    out.U8(flags);
    out.U16(0);
    out.U32(0);
    out.Bytes(AsBytes(payload));
    Append({0, 0, static_cast<uint32_t>(frame.size()), static_cast<uint32_t>(frame.size())});
    file_.insert(file_.end(), frame.begin(), frame.end());
  }
  const Bytes& file() const { return file_; }

 private:
  void Append(std::initializer_list<uint32_t> words) {
    for (uint32_t word : words) {
      std::array<std::byte, 4> bytes;
      ByteWriter(bytes).U32(word);
      file_.insert(file_.end(), bytes.begin(), bytes.end());
    }
  }
  Bytes file_;
};

TEST(PcapReader, StreamsArePutTogetherInOrderWithoutRepeats) {
  PcapWriter pcap;
  pcap.Packet(true, 0xfffffffe, kSyn, "");  // the stream wraps the sequence space
  pcap.Packet(false, 500, kSyn | kAck, "");
  pcap.Packet(true, 2, kAck, "defg");  // early
  pcap.Packet(true, 0xffffffff, kAck, "abc");
  pcap.Packet(true, 1, kAck, "cde");  // again, and overlapping
  pcap.Packet(false, 501, kAck | kFin, "xyz");
  const auto capture = ReadTcpCapture(pcap.file());
  ASSERT_TRUE(capture.has_value()) << capture.error();
  ASSERT_EQ(capture->connections.size(), 1u);
  const TcpConnection& c = capture->connections[0];
  EXPECT_EQ(c.Name(), "10.0.0.1:1000 -> 10.0.0.2:2000");
  EXPECT_EQ(AsText(c.from_client.bytes), "abcdefg");
  EXPECT_FALSE(c.from_client.gap);
  EXPECT_FALSE(c.from_client.fin);
  EXPECT_EQ(AsText(c.from_server.bytes), "xyz");
  EXPECT_TRUE(c.from_server.fin);
  EXPECT_EQ(capture->packets, 6u);
  EXPECT_EQ(capture->skipped_packets, 0u);
}

TEST(PcapReader, AStreamEndsBeforeAGap) {
  PcapWriter pcap;
  pcap.Packet(true, 10, kSyn, "");
  pcap.Packet(true, 11, kAck, "ab");
  pcap.Packet(true, 14, kAck, "def");
  const auto capture = ReadTcpCapture(pcap.file());
  ASSERT_TRUE(capture.has_value());
  EXPECT_EQ(AsText(capture->connections[0].from_client.bytes), "ab");
  EXPECT_TRUE(capture->connections[0].from_client.gap);
}

TEST(PcapReader, EachPacketSaysHowFarItsSenderHadCome) {
  PcapWriter pcap;
  pcap.Packet(true, 0xffffffff, kSyn, "");
  pcap.Packet(false, 500, kSyn | kAck, "", 0);
  pcap.Packet(true, 0, kAck, "abc", 501);
  pcap.Packet(false, 501, kAck | kFin, "xyz", 0);  // sent before "abc" came
  pcap.Packet(true, 5, kAck, "f", 501);            // early
  pcap.Packet(true, 3, kAck, "de", 503);
  pcap.Packet(true, 6, kAck, "", 505);
  pcap.Packet(false, 505, kReset, "", 1000);  // without ACK the number means nothing
  const auto capture = ReadTcpCapture(pcap.file());
  ASSERT_TRUE(capture.has_value());
  const TcpConnection& c = capture->connections.at(0);
  EXPECT_FALSE(c.from_client.reset);
  EXPECT_TRUE(c.from_server.reset);
  const std::vector<TcpPacket>& p = c.packets;
  ASSERT_EQ(p.size(), 8u);
  const auto is = [](const TcpPacket& packet, bool from_client, uint64_t sent, uint64_t acknowledged) {
    return packet.from_client == from_client && packet.sent == sent && packet.acknowledged == acknowledged;
  };
  EXPECT_TRUE(is(p[0], true, 0, 0));
  EXPECT_TRUE(is(p[1], false, 0, 0));
  EXPECT_TRUE(is(p[2], true, 3, 0));
  EXPECT_TRUE(is(p[3], false, 3, 0));
  EXPECT_TRUE(p[3].fin);
  EXPECT_TRUE(is(p[4], true, 3, 0));
  EXPECT_TRUE(is(p[5], true, 6, 2));
  EXPECT_FALSE(p[5].fin_acknowledged);
  EXPECT_TRUE(is(p[6], true, 6, 3));
  EXPECT_TRUE(p[6].fin_acknowledged);
  EXPECT_TRUE(is(p[7], false, 3, 0));
  EXPECT_TRUE(p[7].reset);
}

TEST(PcapReader, PortsUsedAgainAreAnotherConnection) {
  PcapWriter pcap;
  pcap.Packet(true, 10, kSyn, "");
  pcap.Packet(true, 10, kSyn, "");
  pcap.Packet(true, 11, kAck, "a");
  pcap.Packet(true, 5000, kSyn, "");
  pcap.Packet(true, 5001, kAck, "b");
  const auto capture = ReadTcpCapture(pcap.file());
  ASSERT_TRUE(capture.has_value());
  ASSERT_EQ(capture->connections.size(), 2u);
  EXPECT_EQ(AsText(capture->connections[0].from_client.bytes), "a");
  EXPECT_EQ(AsText(capture->connections[1].from_client.bytes), "b");
}

TEST(PcapReader, WhatItCannotReadIsAnErrorOrCounted) {
  EXPECT_FALSE(ReadTcpCapture({}).has_value());
  EXPECT_FALSE(ReadTcpCapture(Bytes(24)).has_value());
  EXPECT_EQ(ReadTcpCapture(PcapWriter(101).file()).error(), "link type 101 is not Ethernet");
  PcapWriter pcap;
  pcap.Packet(true, 11, kAck, "no SYN seen");
  EXPECT_EQ(ReadTcpCapture(pcap.file())->skipped_packets, 1u);
  for (size_t size = 25; size < pcap.file().size(); ++size) {
    EXPECT_FALSE(ReadTcpCapture(ConstBytes(pcap.file()).first(size)).has_value()) << size;
  }
  EXPECT_FALSE(ReadTcpCaptureFile("no such file").has_value());
}

}  // namespace
}  // namespace stagecoach::testing
