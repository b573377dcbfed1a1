// Capture files of each kind, packet by packet, and files that are spoilt.
#include "tools/decode/capture_file.h"

#include <gtest/gtest.h>

#include <sstream>

namespace stagecoach::decode {
namespace {

// Numbers in either byte order.
class File {
 public:
  explicit File(bool big_endian) : big_endian_(big_endian) {}
  File& U16(uint16_t value) { return Number(value, 2); }
  File& U32(uint32_t value) { return Number(value, 4); }
  File& Bytes(std::string_view bytes) {
    text_ += bytes;
    return *this;
  }
  File& Block(uint32_t type, const File& body) {
    const auto size = static_cast<uint32_t>(body.text_.size() + 12);
    return U32(type).U32(size).Bytes(body.text_).U32(size);
  }
  File Empty() const { return File(big_endian_); }
  const std::string& text() const { return text_; }

 private:
  File& Number(uint32_t value, int size) {
    for (int i = 0; i < size; ++i) text_ += static_cast<char>(value >> 8 * (big_endian_ ? size - 1 - i : i));
    return *this;
  }
  bool big_endian_;
  std::string text_;
};

File PcapHeader(bool big_endian, uint32_t magic, uint32_t link_type) {
  File file(big_endian);
  file.U32(magic).U16(2).U16(4).U32(0).U32(0).U32(262144).U32(link_type);
  return file;
}

File PcapNgHeader(bool big_endian) {
  File file(big_endian);
  return file.Block(0x0a0d0d0a, file.Empty().U32(0x1a2b3c4d).U16(1).U16(0).U32(0xffffffff).U32(0xffffffff));
}

// "3@1700000000000000001/101:abc of 3": number, time, link type, bytes.
std::string Packets(const std::string& text) {
  std::istringstream in(text.substr(std::min<size_t>(4, text.size())));
  EXPECT_TRUE(CaptureFile::Begins(AsBytes(text)));
  NotUnderstoodCounts skipped;
  CaptureFile file(AsBytes(text).first(4), &in, &skipped);
  std::string all;
  for (;;) {
    const auto packet = file.Next();
    if (!packet) return all + "error: " + packet.error();
    if (!*packet) {
      for (const std::string& each : skipped.Sentences()) all += each + "\n";
      return all;
    }
    const Packet& p = **packet;
    all += std::to_string(p.number) + "@" + (p.time ? std::to_string(*p.time) : "?") + "/" +
           std::to_string(p.link_type) + ":" + std::string(AsText(p.bytes)) + " of " + std::to_string(p.original_size) +
           "\n";
  }
}

TEST(CaptureFile, PcapOfBothByteOrdersAndResolutions) {
  for (const bool big_endian : {false, true}) {
    File micro = PcapHeader(big_endian, 0xa1b2c3d4, 1);
    micro.U32(1700000000).U32(5).U32(3).U32(9).Bytes("abc").U32(1700000001).U32(0).U32(0).U32(0);
    EXPECT_EQ(Packets(micro.text()), "1@1700000000000005000/1:abc of 9\n2@1700000001000000000/1: of 0\n");
    File nano = PcapHeader(big_endian, 0xa1b23c4d, 101);
    nano.U32(1700000000).U32(5).U32(1).U32(1).Bytes("x");
    EXPECT_EQ(Packets(nano.text()), "1@1700000000000000005/101:x of 1\n");
  }
}

TEST(CaptureFile, PcapNgWithInterfacesOfTheirOwnAndBlocksOfOtherKinds) {
  for (const bool big_endian : {false, true}) {
    File file = PcapNgHeader(big_endian);
    const File empty = file.Empty();
    file.Block(1, File(empty).U16(1).U16(0).U32(0));
    // Another link type, and a clock of 2^10 ticks a second.
    file.Block(1, File(empty).U16(101).U16(0).U32(0).U16(9).U16(1).Bytes(std::string("\x8a\0\0\0", 4)).U16(0).U16(0));
    file.Block(5, File(empty).U32(0).U32(0).U32(0));
    file.Block(6, File(empty).U32(0).U32(0).U32(1000000).U32(3).U32(9).Bytes(std::string("abc\0", 4)));
    file.Block(6, File(empty).U32(1).U32(0).U32(512).U32(1).U32(1).Bytes(std::string("x\0\0\0", 4)));
    file.Block(3, File(empty).U32(2).Bytes(std::string("yz\0\0", 4)));
    file.Block(6, File(empty).U32(7).U32(0).U32(0).U32(1).U32(1).Bytes("none"));  // of no interface
    file.Block(0x0a0d0d0a, File(empty).U32(0x1a2b3c4d).U16(1).U16(0).U32(0xffffffff).U32(0xffffffff));
    file.Block(6, File(empty).U32(0).U32(0).U32(0).U32(1).U32(1).Bytes("none"));  // that was another section's
    EXPECT_EQ(Packets(file.text()),
              "1@1000000000/1:abc of 9\n2@500000000/101:x of 1\n3@?/1:yz of 2\n"
              "2 packets were captured on an interface that the file does not describe\n");
  }
}

TEST(CaptureFile, PacketBlocksOfOlderTools) {
  for (const bool big_endian : {false, true}) {
    File file = PcapNgHeader(big_endian);
    const File empty = file.Empty();
    file.Block(1, File(empty).U16(1).U16(0).U32(0));
    file.Block(1, File(empty).U16(101).U16(0).U32(0));
    // Interface, packets lost, time, sizes.
    file.Block(2, File(empty).U16(1).U16(0xffff).U32(0).U32(1000000).U32(3).U32(9).Bytes(std::string("abc\0", 4)));
    file.Block(2, File(empty).U16(2).U16(0).U32(0).U32(0).U32(0).U32(0));
    file.Block(2, File(empty).U16(0).U16(0).U32(0).U32(0).U32(5).U32(5).Bytes("four"));
    EXPECT_EQ(Packets(file.text()),
              "1@1000000000/101:abc of 9\n"
              "1 packet was captured on an interface that the file does not describe\n"
              "1 packet block has lengths that contradict each other\n");
  }
}

TEST(CaptureFile, SimplePacketBlocksEndAtTheSnapLength) {
  for (const auto& [snap_length, bytes] :
       {std::pair{0u, "abcdefgh"}, std::pair{5u, "abcde"}, std::pair{8u, "abcdefgh"}, std::pair{9u, "abcdefgh"}}) {
    File file = PcapNgHeader(false);
    file.Block(1, file.Empty().U16(1).U16(0).U32(snap_length));
    file.Block(3, file.Empty().U32(2000).Bytes("abcdefgh"));
    EXPECT_EQ(Packets(file.text()), std::string("1@?/1:") + bytes + " of 2000\n") << snap_length;
  }
  File none = PcapNgHeader(false);
  none.Block(3, none.Empty().U32(1).Bytes("abcd")).Block(3, none.Empty());
  EXPECT_EQ(Packets(none.text()),
            "1 packet was captured on an interface that the file does not describe\n"
            "1 packet block has lengths that contradict each other\n");
}

TEST(CaptureFile, BlocksThatAreLeftOutAreCounted) {
  File file = PcapNgHeader(false);
  const File empty = file.Empty();
  // Too short to describe an interface, and all the same the first one.
  file.Block(1, File(empty).U32(1)).Block(1, File(empty).U16(101).U16(0).U32(0));
  file.Block(6, File(empty).U32(0).U32(0).U32(0).U32(1).U32(1).Bytes("none"));
  file.Block(6, File(empty).U32(1).U32(0).U32(0).U32(4).U32(4).Bytes("here"));
  file.Block(6, File(empty).Bytes(std::string(CaptureFile::kPacketMax + 128 * 1024, 'x')));
  for (const uint32_t known : {4u, 5u, 9u, 10u, 0xbadu, 0x40000badu}) file.Block(known, File(empty).U32(0));
  for (int i = 0; i < 2; ++i) file.Block(0x80000001, File(empty).U32(0));
  EXPECT_EQ(Packets(file.text()),
            "2@0/101:here of 4\n"
            "1 packet was captured on an interface that the file does not describe\n"
            "1 packet block is too long to be read\n"
            "2 blocks of type 0x80000001 were not read\n");
}

TEST(CaptureFile, WhatCameBeforeTheEndOfAnInterruptedFileIsThere) {
  File pcap = PcapHeader(false, 0xa1b2c3d4, 1);
  pcap.U32(1).U32(0).U32(3).U32(3).Bytes("abc").U32(2).U32(0).U32(3).U32(3).Bytes("a");
  EXPECT_EQ(Packets(pcap.text()), "1@1000000000/1:abc of 3\nerror: the file is cut at byte 60");
  File ng = PcapNgHeader(false);
  ng.Block(1, ng.Empty().U16(1).U16(0).U32(0)).U32(6).U32(32).U32(0);
  EXPECT_EQ(Packets(ng.text()), "error: the file is cut at byte 60");
  EXPECT_EQ(Packets(std::string("\xd4\xc3\xb2\xa1", 4)), "error: the file is cut at byte 4");
}

TEST(CaptureFile, LengthsThatCannotBeAreRefused) {
  File pcap = PcapHeader(false, 0xa1b2c3d4, 1);
  pcap.U32(1).U32(0).U32(0xffffffff).U32(0xffffffff);
  EXPECT_EQ(Packets(pcap.text()), "error: a packet of 4294967295 bytes at byte 24");
  EXPECT_EQ(Packets(PcapNgHeader(false).U32(6).U32(8).text()), "error: a block of 8 bytes at byte 28");
  EXPECT_EQ(Packets(PcapNgHeader(false).U32(6).U32(33).text()), "error: a block of 33 bytes at byte 28");
  // Skipped, as far as there is something to skip.
  EXPECT_EQ(Packets(PcapNgHeader(false).U32(6).U32(0xfffffff0).Bytes("xx").text()),
            "error: the file is cut at byte 38");
  EXPECT_FALSE(CaptureFile::Begins(AsBytes("text")));
  EXPECT_FALSE(CaptureFile::Begins(AsBytes("\n\r")));
}

TEST(CaptureFile, AsManyInterfacesAsItLikes) {
  File file = PcapNgHeader(false);
  for (size_t i = 0; i < CaptureFile::kInterfacesMax + 5; ++i) {
    file.Block(1, file.Empty().U16(101).U16(0).U32(0));
  }
  file.Block(6, file.Empty().U32(CaptureFile::kInterfacesMax + 1).U32(0).U32(0).U32(1).U32(1).Bytes("none"));
  file.Block(6, file.Empty().U32(CaptureFile::kInterfacesMax - 1).U32(0).U32(0).U32(4).U32(4).Bytes("last"));
  EXPECT_EQ(Packets(file.text()),
            "2@0/101:last of 4\n1 packet was captured on an interface that the file does not describe\n");
}

}  // namespace
}  // namespace stagecoach::decode
