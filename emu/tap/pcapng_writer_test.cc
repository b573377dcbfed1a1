#include "emu/tap/pcapng_writer.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <thread>
#include <vector>

#include "base/crc32c.h"
#include "base/cursor.h"
#include "emu/wire/ib.h"
#include "emu/wire/mpa.h"

namespace stagecoach::emu {
namespace {

using std::chrono::nanoseconds;
using testing::HasSubstr;
using testing::Not;

constexpr auto kSent = CaptureDirection::kSent;
constexpr auto kReceived = CaptureDirection::kReceived;

IpEndpoint Local(const char* address = "10.0.0.1") {
  return *IpEndpoint::Parse(address, 50000);
}
IpEndpoint Remote(const char* address = "10.0.0.2") {
  return *IpEndpoint::Parse(address, 20049);
}

std::string TempPath(const std::string& name) {
  const char* directory = std::getenv("TEST_TMPDIR");
  return std::string(directory != nullptr ? directory : "/tmp") + "/" + name;
}

std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream content;
  content << in.rdbuf();
  return content.str();
}

// Ticks a microsecond at each look.
PcapNgWriter::Clock Ticking(nanoseconds start = std::chrono::seconds(1'700'000'000)) {
  return [now = start]() mutable { return now += std::chrono::microseconds(1); };
}

std::shared_ptr<PcapNgWriter> MustCreate(const std::string& path, PcapNgWriter::Clock clock = Ticking()) {
  auto writer =
      PcapNgWriter::Create(path, std::move(clock), [](const std::string& message) { ADD_FAILURE() << message; });
  EXPECT_TRUE(writer.has_value()) << writer.error().message;
  return *writer;
}

// --- An independent reader, only of what the writer is to produce ---

struct Packet {
  uint64_t time = 0;
  uint32_t flags = 0;  // pcapng direction
  std::string source, destination;
  uint32_t sequence = 0, acknowledgement = 0;
  uint8_t tcp_flags = 0;
  std::string payload;
};

uint32_t HostU32(std::string_view file, size_t at) {
  uint32_t value = 0;
  EXPECT_LE(at + 4, file.size());
  if (at + 4 <= file.size()) std::memcpy(&value, file.data() + at, 4);
  return value;
}

// RFC 1071: over data that contains its own checksum the sum is all ones.
bool ChecksumHolds(std::string_view data) {
  uint32_t sum = 0;
  for (size_t i = 0; i < data.size(); ++i) sum += static_cast<uint8_t>(data[i]) << (i % 2 == 0 ? 8 : 0);
  while (sum >> 16 != 0) sum = (sum & 0xffff) + (sum >> 16);
  return sum == 0xffff;
}

std::string BigEndian(uint32_t value) {
  std::string text(4, '\0');
  ByteWriter(AsMutableBytes(text.data(), 4)).U32(value);
  return text;
}

void ParsePacket(std::string_view ip, Packet* packet) {
  ByteReader reader(AsBytes(ip));
  const bool v6 = static_cast<uint8_t>(ip[0]) >> 4 == 6;
  const size_t ip_size = v6 ? 40 : 20;
  std::string_view addresses;
  if (v6) {
    reader.Skip(4);
    EXPECT_EQ(reader.U16(), ip.size() - 40);
    EXPECT_EQ(reader.U8(), 6);
    addresses = ip.substr(8, 32);
  } else {
    EXPECT_EQ(reader.U16(), 0x4500);
    EXPECT_EQ(reader.U16(), ip.size());
    EXPECT_TRUE(ChecksumHolds(ip.substr(0, 20)));
    addresses = ip.substr(12, 8);
  }
  const std::string_view tcp = ip.substr(ip_size);
  EXPECT_TRUE(ChecksumHolds(std::string(addresses) + BigEndian(static_cast<uint32_t>(tcp.size())) + BigEndian(6) +
                            std::string(tcp)));
  ByteReader fields(AsBytes(tcp));
  const auto endpoint = [&](size_t at, uint16_t port) {
    IpEndpoint end;
    end.family = v6 ? IpEndpoint::Family::kIpv6 : IpEndpoint::Family::kIpv4;
    CopyBytes(AsMutableBytes(end.address.data(), 16), AsBytes(addresses.substr(at, v6 ? 16 : 4)));
    end.port = port;
    return end.ToString();
  };
  packet->source = endpoint(0, fields.U16());
  packet->destination = endpoint(v6 ? 16 : 4, fields.U16());
  packet->sequence = fields.U32();
  packet->acknowledgement = fields.U32();
  const size_t tcp_header = static_cast<size_t>(fields.U8() >> 4) * 4;
  packet->tcp_flags = fields.U8();
  packet->payload = std::string(tcp.substr(tcp_header));
}

struct RawPacket {
  uint64_t time = 0;
  uint32_t flags = 0;
  std::string ip;
};

std::vector<RawPacket> RawPackets(const std::string& path) {
  const std::string file = ReadFile(path);
  std::vector<RawPacket> packets;
  size_t blocks = 0;
  for (size_t at = 0; at < file.size(); ++blocks) {
    const uint32_t type = HostU32(file, at);
    const uint32_t length = HostU32(file, at + 4);
    if (length < 12 || length % 4 != 0 || length > file.size() - at) {
      ADD_FAILURE() << "bad block length " << length << " at " << at;
      return packets;
    }
    EXPECT_EQ(HostU32(file, at + length - 4), length);
    if (blocks < 2) {
      EXPECT_EQ(type, blocks == 0 ? 0x0a0d0d0au : 1u);
    } else {
      EXPECT_EQ(type, 6u);
      RawPacket packet;
      packet.time = uint64_t{HostU32(file, at + 12)} << 32 | HostU32(file, at + 16);
      const uint32_t size = HostU32(file, at + 20);
      EXPECT_EQ(HostU32(file, at + 24), size);
      packet.flags = HostU32(file, at + length - 12);
      packet.ip = file.substr(at + 28, size);
      packets.push_back(std::move(packet));
    }
    at += length;
  }
  return packets;
}

std::vector<Packet> ParseFile(const std::string& path) {
  std::vector<Packet> packets;
  for (const RawPacket& raw : RawPackets(path)) {
    Packet& packet = packets.emplace_back();
    packet.time = raw.time;
    packet.flags = raw.flags;
    ParsePacket(raw.ip, &packet);
  }
  return packets;
}

// The bytes one end sent, put together by sequence number; fails on gaps and overlaps.
std::string StreamOf(const std::vector<Packet>& packets, const IpEndpoint& sender) {
  std::string stream;
  std::optional<uint32_t> next;
  for (const Packet& packet : packets) {
    if (packet.source != sender.ToString()) continue;
    if (!next) {
      EXPECT_NE(packet.tcp_flags & 0x02, 0) << "begins with SYN";
      next = packet.sequence;
    }
    EXPECT_EQ(packet.sequence, *next);
    stream += packet.payload;
    *next += static_cast<uint32_t>(packet.payload.size()) + ((packet.tcp_flags & 0x03) != 0 ? 1 : 0);
  }
  return stream;
}

// --- What passes ---

std::string Frame(wire::MpaFrameKind kind, uint8_t flags, std::string_view private_data = "") {
  wire::MpaFrame frame;
  frame.kind = kind;
  frame.flags = flags;
  frame.revision = wire::kMpaRevision2;
  if ((flags & wire::kMpaFlagEnhanced) != 0) frame.enhanced = wire::MpaEnhanced{.ird = 16, .ord = 16};
  frame.private_data = AsBytes(private_data);
  std::string text(frame.EncodedSize(), '\0');
  ByteWriter out(AsMutableBytes(text.data(), text.size()));
  frame.Encode(out);
  EXPECT_TRUE(out.ok());
  return text;
}

std::string Request(uint8_t flags) {
  return Frame(wire::MpaFrameKind::kRequest, flags | wire::kMpaFlagEnhanced, "hello");
}
std::string Reply(uint8_t flags) {
  return Frame(wire::MpaFrameKind::kReply, flags | wire::kMpaFlagEnhanced, "welcome");
}

void Record(CaptureFlow& flow, CaptureDirection direction, std::string_view head, std::string_view payload) {
  const ConstBytes parts[] = {AsBytes(head), AsBytes(payload)};
  flow.Record(direction, parts);
}

std::string Fpdu(std::string_view ulpdu, bool crc) {
  std::string fpdu(2, '\0');
  ByteWriter(AsMutableBytes(fpdu.data(), 2)).U16(static_cast<uint16_t>(ulpdu.size()));
  fpdu += ulpdu;
  while (fpdu.size() % 4 != 0) fpdu += '\0';
  if (!crc) return fpdu + std::string(4, '\0');
  const uint32_t sum = ComputeCrc32c(AsBytes(fpdu));
  for (int i = 0; i < 4; ++i) fpdu += static_cast<char>(sum >> (8 * i));
  return fpdu;
}

TEST(PcapNgWriter, AConversationHasHandshakeContinuousStreamsAndAnEnd) {
  const std::string path = TempPath("conversation.pcapng");
  const auto writer = MustCreate(path);
  const auto flow = writer->OpenFlow(CaptureStyle::kIwarp, Local(), Remote(), true);
  flow->Handshake(kSent, AsBytes(Request(wire::kMpaFlagCrc)));
  flow->Handshake(kReceived, AsBytes(Reply(wire::kMpaFlagCrc)));
  Record(*flow, kSent, "abc", "defgh");
  Record(*flow, kReceived, "", "0123456789");
  flow->Close(kSent, CaptureEnd::kFin);
  flow->Close(kSent, CaptureEnd::kFin);
  Record(*flow, kSent, "too", "late");
  Record(*flow, kReceived, "last", "");
  flow->Close(kReceived, CaptureEnd::kFin);

  const std::vector<Packet> packets = ParseFile(path);
  ASSERT_EQ(packets.size(), writer->packets());
  EXPECT_EQ(StreamOf(packets, Local()), Request(wire::kMpaFlagCrc) + Fpdu("abcdefgh", true));
  EXPECT_EQ(StreamOf(packets, Remote()), Reply(wire::kMpaFlagCrc) + Fpdu("0123456789", true) + Fpdu("last", true));
  const std::vector<uint8_t> expected_flags = {0x02, 0x12, 0x10, 0x18, 0x18, 0x18, 0x18, 0x11, 0x18, 0x11, 0x10};
  ASSERT_EQ(packets.size(), expected_flags.size());
  std::map<std::string, uint32_t> next;
  for (size_t i = 0; i < packets.size(); ++i) {
    EXPECT_EQ(packets[i].tcp_flags, expected_flags[i]) << i;
    EXPECT_EQ(packets[i].flags, packets[i].source == Local().ToString() ? 2u : 1u) << "direction of packet " << i;
    EXPECT_EQ(packets[i].time, 1'700'000'000'000'000'000u + 1000 * (i + 1));
    if (i > 0) {
      EXPECT_EQ(packets[i].acknowledgement, next[packets[i].destination]) << i;
    }
    next[packets[i].source] = packets[i].sequence + static_cast<uint32_t>(packets[i].payload.size()) +
                              ((packets[i].tcp_flags & 3) != 0 ? 1 : 0);
  }
}

TEST(PcapNgWriter, TheReplyDecidesWhetherThereIsACrc) {
  const std::string path = TempPath("nocrc.pcapng");
  const auto writer = MustCreate(path);
  const auto flow = writer->OpenFlow(CaptureStyle::kIwarp, Local(), Remote(), false);
  flow->Handshake(kReceived, AsBytes(Request(wire::kMpaFlagCrc)));
  flow->Handshake(kSent, AsBytes(Reply(0)));
  Record(*flow, kReceived, "abc", "");
  const std::vector<Packet> packets = ParseFile(path);
  EXPECT_EQ(packets[0].source, Remote().ToString()) << "the initiator is the remote end";
  EXPECT_EQ(StreamOf(packets, Remote()), Request(wire::kMpaFlagCrc) + Fpdu("abc", false));
}

TEST(PcapNgWriter, MarkersGoToTheEndThatAskedForThem) {
  const std::string path = TempPath("markers.pcapng");
  const auto writer = MustCreate(path);
  const auto flow = writer->OpenFlow(CaptureStyle::kIwarp, Local(), Remote(), true);
  const std::string request = Request(0);
  const std::string reply = Reply(wire::kMpaFlagMarkers);
  flow->Handshake(kSent, AsBytes(request));
  flow->Handshake(kReceived, AsBytes(reply));
  const std::string payload(600, 'x');
  Record(*flow, kSent, payload, "");
  Record(*flow, kReceived, payload, "");
  const std::vector<Packet> packets = ParseFile(path);
  EXPECT_EQ(StreamOf(packets, Remote()), reply + Fpdu(payload, false)) << "we asked for none";
  const std::string sent = StreamOf(packets, Local()).substr(request.size());
  EXPECT_EQ(sent.size(), Fpdu(payload, false).size() + 8) << "one in front, one after 512 bytes";
  EXPECT_EQ(sent.substr(0, 4), std::string(4, '\0'));
  EXPECT_EQ(sent.substr(512, 4), std::string("\0\0\x01\xfc", 4));
}

TEST(PcapNgWriter, AnFpduBeyondAnIpPacketTakesTwoSegments) {
  for (const char* local : {"10.0.0.1", "2001:db8::1"}) {
    const std::string remote = local[0] == '1' ? "10.0.0.2" : "2001:db8::2";
    const std::string path = TempPath("large.pcapng");
    const auto writer = MustCreate(path);
    const auto flow = writer->OpenFlow(CaptureStyle::kIwarp, Local(local), Remote(remote.c_str()), true);
    const std::string ulpdu(65535, 'u');
    Record(*flow, kSent, ulpdu, "and what no record can hold");
    const std::vector<Packet> packets = ParseFile(path);
    EXPECT_EQ(packets.size(), 5u);
    EXPECT_EQ(StreamOf(packets, Local(local)), Fpdu(ulpdu, false));
  }
}

TEST(PcapNgWriter, AResetEndsBothDirections) {
  const std::string path = TempPath("reset.pcapng");
  const auto writer = MustCreate(path);
  const auto flow = writer->OpenFlow(CaptureStyle::kIwarp, Local(), Remote(), true);
  flow->Close(kReceived, CaptureEnd::kReset);
  flow->Close(kReceived, CaptureEnd::kReset);
  flow->Close(kSent, CaptureEnd::kFin);
  Record(*flow, kSent, "late", "");
  const std::vector<Packet> packets = ParseFile(path);
  ASSERT_EQ(packets.size(), 4u);
  EXPECT_EQ(packets[3].tcp_flags, 0x14);
  EXPECT_EQ(packets[3].source, Remote().ToString());
}

TEST(PcapNgWriter, AConnectionWithBothEndsHereIsCapturedOnce) {
  const std::string path = TempPath("both.pcapng");
  const auto writer = MustCreate(path);
  auto client = writer->OpenFlow(CaptureStyle::kIwarp, Local(), Remote(), true);
  auto server = writer->OpenFlow(CaptureStyle::kIwarp, Remote(), Local(), false);
  Record(*client, kSent, "once", "");
  Record(*server, kReceived, "once", "");
  EXPECT_EQ(ParseFile(path).size(), 4u);
  server.reset();
  client.reset();
  client = writer->OpenFlow(CaptureStyle::kIwarp, Local(), Remote(), true);
  EXPECT_EQ(ParseFile(path).size(), 7u) << "the same ports again, after their time";
}

TEST(PcapNgWriter, TimeNeverRunsBackwards) {
  const std::string path = TempPath("clock.pcapng");
  std::vector<int64_t> times = {50, 40, -5, 60};
  size_t next = 0;
  const auto writer = MustCreate(path, [&] { return nanoseconds(times[std::min(next++, times.size() - 1)]); });
  const auto flow = writer->OpenFlow(CaptureStyle::kIwarp, Local(), Remote(), true);
  flow->Close(kSent, CaptureEnd::kReset);
  std::vector<uint64_t> seen;
  for (const Packet& packet : ParseFile(path)) seen.push_back(packet.time);
  EXPECT_THAT(seen, testing::ElementsAre(50, 50, 50, 60));
}

TEST(PcapNgWriter, FlowsOfManyThreadsDoNotMix) {
  const std::string path = TempPath("threads.pcapng");
  const auto writer = MustCreate(path);
  std::vector<std::thread> threads;
  for (uint16_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const auto flow = writer->OpenFlow(CaptureStyle::kIwarp, Local().WithPort(1000 + i), Remote(), true);
      for (int n = 0; n < 100; ++n) Record(*flow, n % 2 == 0 ? kSent : kReceived, std::string(100 + n, 'a' + i), "");
      flow->Close(kSent, CaptureEnd::kFin);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::vector<Packet> packets = ParseFile(path);
  EXPECT_EQ(packets.size(), 4u * (3 + 100 + 1));
  for (uint16_t i = 0; i < 4; ++i) {
    std::string expected;
    for (int n = 0; n < 100; n += 2) expected += Fpdu(std::string(100 + n, 'a' + i), false);
    EXPECT_EQ(StreamOf(packets, Local().WithPort(1000 + i)), expected);
  }
}

TEST(PcapNgWriter, AFileThatCannotBeWrittenIsRefusedInWords) {
  const auto missing = PcapNgWriter::Create("/nowhere/at/all", Ticking(), nullptr);
  ASSERT_FALSE(missing.has_value());
  EXPECT_EQ(missing.error().message, "capture file /nowhere/at/all: No such file or directory");
  const auto full = PcapNgWriter::Create("/dev/full", Ticking(), nullptr);
  ASSERT_FALSE(full.has_value());
  EXPECT_EQ(full.error().error, ENOSPC);
  EXPECT_EQ(full.error().message, "capture file /dev/full: No space left on device");
  const std::string pipe = TempPath("pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_FALSE(PcapNgWriter::Create(pipe, Ticking(), nullptr).has_value());
}

TEST(PcapNgWriter, AFullDiskEndsTheCaptureAtItsLastWholePacketAndNothingElse) {
  const std::string path = TempPath("full.pcapng");
  std::vector<std::string> reports;
  auto created = PcapNgWriter::Create(path, Ticking(), [&](const std::string& message) { reports.push_back(message); });
  ASSERT_TRUE(created.has_value());
  const auto writer = *created;
  const auto flow = writer->OpenFlow(CaptureStyle::kIwarp, Local(), Remote(), true);
  // A limit on the size of files stands in for the end of the disk.
  ASSERT_NE(signal(SIGXFSZ, SIG_IGN), SIG_ERR);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 2000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  for (int i = 0; i < 10; ++i) Record(*flow, kSent, std::string(500, 'x'), "");
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  Record(*flow, kSent, "not any more", "");
  ASSERT_EQ(reports.size(), 1u);
  EXPECT_EQ(reports[0], "capture file " + path + ": File too large; the capture ends after " +
                            std::to_string(writer->packets()) + " packets");
  EXPECT_EQ(writer->error(), reports[0]);
  EXPECT_EQ(ParseFile(path).size(), writer->packets()) << "and no half of one";
}

// --- RoCE ---

std::string HexBytes(std::string_view hex) {
  std::string bytes;
  for (size_t i = 0; i < hex.size();) {
    if (hex[i] == ' ') {
      ++i;
      continue;
    }
    bytes += static_cast<char>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16));
    i += 2;
  }
  return bytes;
}

std::string Hex(std::string_view bytes) {
  std::string hex;
  for (const char byte : bytes) hex += fmt::format("{:02x}", static_cast<uint8_t>(byte));
  return hex;
}

// An InfiniBand packet without pad and ICRC.
std::string IbPacket(wire::IbOp op, uint32_t destination_qp, uint32_t psn, std::string_view payload = "",
                     uint8_t syndrome = 0) {
  wire::IbHeader header;
  header.op = op;
  header.destination_qp = destination_qp;
  header.psn = psn;
  header.pad = wire::IbPad(payload.size());
  header.ack_request = !wire::IsResponse(op);
  header.address = 0x7f0000001000;
  header.rkey = 0x1234;
  header.dma_length = static_cast<uint32_t>(payload.size());
  header.syndrome = syndrome;
  header.msn = 1;
  std::string text(header.EncodedSize(), '\0');
  ByteWriter out(AsMutableBytes(text.data(), text.size()));
  header.Encode(out);
  EXPECT_TRUE(out.ok());
  return text + std::string(payload);
}

uint16_t PortAt(std::string_view ip, size_t at) {
  return static_cast<uint16_t>(static_cast<uint8_t>(ip[at]) << 8 | static_cast<uint8_t>(ip[at + 1]));
}

// Checksums and ICRC by another implementation (Python's zlib.crc32 and a sum written for the purpose).
TEST(PcapNgWriter, ARocePacketIsWhatAnAdapterWouldSend) {
  const std::string path = TempPath("roce.pcapng");
  const auto writer = MustCreate(path);
  const auto v4 = writer->OpenFlow(CaptureStyle::kRoce, Local(), Remote(), true);
  const std::string send = IbPacket(wire::IbOp::kSendOnly, 0x30002, 100, "hello");
  Record(*v4, kSent, send.substr(0, wire::kIbBthSize), send.substr(wire::kIbBthSize));
  const auto v6 = writer->OpenFlow(CaptureStyle::kRoce, Local("2001:db8::1"), Remote("2001:db8::2"), false);
  Record(*v6, kReceived, IbPacket(wire::IbOp::kWriteOnly, 0x20001, 0xffffff, "12345678"), "");
  const std::vector<RawPacket> packets = RawPackets(path);
  ASSERT_EQ(packets.size(), 2u);
  EXPECT_EQ(packets[0].flags, 2u);
  EXPECT_EQ(packets[0].ip, HexBytes("4500003400004000401126b7 0a000001 0a000002 dd9f12b700200000 "
                                    "0470ffff0003000280000064 68656c6c6f000000 8882a6e3"))
      << Hex(packets[0].ip);
  EXPECT_EQ(packets[1].flags, 1u);
  EXPECT_EQ(packets[1].ip,
            HexBytes("6000000000301140 20010db8000000000000000000000002 20010db8000000000000000000000001 "
                     "cc0912b7003013fd 0a40ffff0002000180ffffff 00007f0000001000 00001234 00000008 "
                     "3132333435363738 f052c3b4"))
      << Hex(packets[1].ip);
}

TEST(PcapNgWriter, WhatADatagramsSenderSaysOfItsIpHeaderStandsThere) {
  const std::string path = TempPath("roce_class.pcapng");
  const auto writer = MustCreate(path);
  wire::IbHeader header;
  header.service = wire::IbService::kUd;
  header.source_qp = 0x10002;
  header.traffic_class = 0xb8;
  header.hop_limit = 13;
  header.flow_label = 0x54321;
  std::string record(header.EncodedSize() + wire::kDatagramIpSize, '\0');
  ByteWriter out(AsMutableBytes(record.data(), record.size()));
  header.Encode(out);
  wire::EncodeDatagramIp(header, out);
  const auto v4 = writer->OpenFlow(CaptureStyle::kRoce, Local(), Remote(), true);
  Record(*v4, kSent, record, "");
  const auto v6 = writer->OpenFlow(CaptureStyle::kRoce, Local("2001:db8::1"), Remote("2001:db8::2"), false);
  Record(*v6, kReceived, record, "");
  const std::vector<RawPacket> packets = RawPackets(path);
  ASSERT_EQ(packets.size(), 2u);
  EXPECT_EQ(Hex(packets[0].ip.substr(0, 4)), "45b80034");
  EXPECT_EQ(Hex(packets[0].ip.substr(8, 1)), "0d");
  EXPECT_EQ(Hex(packets[1].ip.substr(0, 4)), "6b854321");
  EXPECT_EQ(Hex(packets[1].ip.substr(7, 1)), "0d");
  // The same length as on a wire, ICRC included.
  EXPECT_EQ(packets[1].ip.size(), size_t{40 + 8 + 20 + 4});
  // Behind IP, UDP, BTH and Q_Key, where the record had it.
  EXPECT_EQ(Hex(packets[0].ip.substr(20 + 8 + 12 + 4, 4)), "00010002");
  EXPECT_EQ(Hex(packets[1].ip.substr(40 + 8 + 12 + 4, 4)), "00010002");
}

TEST(PcapNgWriter, OfAStreamThatCarriesRocePacketsNothingIsShown) {
  const std::string path = TempPath("roce_stream.pcapng");
  const auto writer = MustCreate(path);
  const auto flow = writer->OpenFlow(CaptureStyle::kRoce, Local(), Remote(), true);
  flow->Handshake(kSent, AsBytes(Request(0)));
  flow->Close(kSent, CaptureEnd::kFin);
  flow->Close(kReceived, CaptureEnd::kReset);
  EXPECT_TRUE(RawPackets(path).empty());
  Record(*flow, kSent, IbPacket(wire::IbOp::kAck, 1, 2), "");
  EXPECT_EQ(RawPackets(path).size(), 1u);
}

TEST(PcapNgWriter, RocePacketsOfOneFlowHaveOneSourcePort) {
  const std::string path = TempPath("roce_ports.pcapng");
  const auto writer = MustCreate(path);
  const std::string to_first = IbPacket(wire::IbOp::kAck, 1, 2);
  const std::string to_second = IbPacket(wire::IbOp::kAck, 2, 2);
  auto flow = writer->OpenFlow(CaptureStyle::kRoce, Local(), Remote(), true);
  Record(*flow, kSent, to_first, "");
  Record(*flow, kSent, to_second, "");
  Record(*flow, kReceived, to_first, "");
  // Another stream, seen from the other end.
  flow = writer->OpenFlow(CaptureStyle::kRoce, Remote().WithPort(24791), Local().WithPort(50001), false);
  Record(*flow, kReceived, to_first, "");
  std::vector<uint16_t> ports;
  for (const RawPacket& packet : RawPackets(path)) {
    ports.push_back(PortAt(packet.ip, 20));
    EXPECT_GE(ports.back(), 0xc000);
    EXPECT_EQ(PortAt(packet.ip, 22), 4791);
  }
  ASSERT_EQ(ports.size(), 4u);
  EXPECT_EQ(ports[3], ports[0]);
  EXPECT_NE(ports[1], ports[0]) << "another QP";
  EXPECT_NE(ports[2], ports[0]) << "the other way";
}

TEST(PcapNgWriter, WhateverAPeerSendsAsARocePacketFitsAnIpPacket) {
  const std::string path = TempPath("roce_odd.pcapng");
  const auto writer = MustCreate(path);
  const auto flow = writer->OpenFlow(CaptureStyle::kRoce, Local(), Remote(), true);
  const std::vector<size_t> sizes = {0, 1, 5, 6, 11, 65500, 65501, 65535, 70000};
  for (const size_t size : sizes) Record(*flow, kReceived, std::string(size, 'x'), "");
  const std::vector<RawPacket> packets = RawPackets(path);
  ASSERT_EQ(packets.size(), sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    const size_t padded = std::min<size_t>((sizes[i] + 3) / 4 * 4, 65500);
    EXPECT_EQ(packets[i].ip.size(), 20 + 8 + padded + 4) << sizes[i];
    EXPECT_EQ(PortAt(packets[i].ip, 2), packets[i].ip.size());
    EXPECT_EQ(PortAt(packets[i].ip, 24), packets[i].ip.size() - 20);
  }
}

// --- What Wireshark makes of it ---

std::string Tshark(const std::string& arguments) {
  const std::string command = "HOME=" + TempPath("") + " /usr/bin/tshark " + arguments + " 2>&1";
  FILE* const pipe = popen(command.c_str(), "r");
  std::string output;
  char buffer[4096];
  size_t n;
  while ((n = fread(buffer, 1, sizeof buffer, pipe)) > 0) output.append(buffer, n);
  EXPECT_EQ(pclose(pipe), 0) << output;
  return output;
}

TEST(PcapNgWriter, WiresharkDissectsMpaDdpRdmapAndRpcOverRdma) {
  ASSERT_EQ(access("/usr/bin/tshark", X_OK), 0)
      << "this test needs tshark (Debian package tshark; ./dev test installs it)";
  for (const bool crc : {true, false}) {
    const char* const local = crc ? "10.0.0.1" : "2001:db8::1";
    const std::string remote = local[0] == '1' ? "10.0.0.2" : "2001:db8::2";
    const std::string path = TempPath("dissect.pcapng");
    {
      const auto writer = MustCreate(path);
      const auto flow = writer->OpenFlow(CaptureStyle::kIwarp, Local(local), Remote(remote.c_str()), true);
      const uint8_t flags = crc ? wire::kMpaFlagCrc : 0;
      flow->Handshake(kSent, AsBytes(Request(flags)));
      flow->Handshake(kReceived, AsBytes(Reply(flags)));
      // RDMA Write, zero length: the RTR.
      Record(*flow, kSent,
             HexBytes("c140"
                      "00000000"
                      "0000000000000000"),
             "");
      // Send, queue 0, MSN 1: RPC-over-RDMA version 1, RDMA_MSG without chunks, a NULL call of NFSv3.
      const std::string send_head = HexBytes(
          "4143"
          "00000000"
          "00000000"
          "00000001"
          "00000000");
      const std::string rpcrdma = HexBytes(
          "12345678"
          "00000001"
          "00000020"
          "00000000"
          "00000000"
          "00000000"
          "00000000");
      const std::string call = HexBytes(
          "12345678"
          "00000000"
          "00000002"
          "000186a3"
          "00000003"
          "00000000"
          "00000000"
          "00000000"
          "00000000"
          "00000000");
      Record(*flow, kSent, send_head, rpcrdma + call);
      // RDMA Write of 3000 bytes, its last segment; then the Send of the reply.
      Record(*flow, kReceived,
             HexBytes("c140"
                      "0000aa01"
                      "0000000000001000"),
             std::string(3000, 'w'));
      const std::string reply = HexBytes(
          "12345678"
          "00000001"
          "00000000"
          "00000000"
          "00000000"
          "00000000");
      Record(*flow, kReceived, send_head, rpcrdma + reply);
      // Read Request on queue 1, and its response, as large as a record can be: two segments.
      Record(*flow, kReceived,
             HexBytes("4141"
                      "00000000"
                      "00000001"
                      "00000001"
                      "00000000"
                      "0000bb01"
                      "0000000000002000"
                      "0000ffe1"
                      "0000cc01"
                      "0000000000003000"),
             "");
      Record(*flow, kSent,
             HexBytes("c142"
                      "0000bb01"
                      "0000000000002000"),
             std::string(65535 - 14, 'r'));
      // A Send behind it shows that the dissector is still in step.
      Record(*flow, kSent,
             HexBytes("4143"
                      "00000000"
                      "00000000"
                      "00000002"
                      "00000000"),
             rpcrdma + call);
      // Terminate: DDP, tagged buffer error, invalid STag.
      Record(*flow, kReceived,
             HexBytes("4147"
                      "00000000"
                      "00000002"
                      "00000001"
                      "00000000"
                      "11000000"),
             "");
      flow->Close(kReceived, CaptureEnd::kFin);
      flow->Close(kSent, CaptureEnd::kFin);
    }
    const std::string text = Tshark("-r " + path + " -V -o tcp.check_checksum:TRUE -o ip.check_checksum:TRUE");
    SCOPED_TRACE(text.substr(0, 200000));
    EXPECT_THAT(text, HasSubstr("Request frame header"));
    EXPECT_THAT(text, HasSubstr("Reply frame header"));
    EXPECT_THAT(text, HasSubstr("iWARP Marker Protocol data unit Aligned framing"));
    EXPECT_THAT(text, HasSubstr("iWARP Direct Data Placement and Remote Direct Memory Access Protocol"));
    EXPECT_THAT(text, HasSubstr("RPC over RDMA"));
    EXPECT_THAT(text, HasSubstr("Remote Procedure Call"));
    EXPECT_THAT(text, Not(HasSubstr("Malformed")));
    EXPECT_THAT(text, Not(HasSubstr("[Expert Info (Error")));
    EXPECT_THAT(text, Not(HasSubstr("[Expert Info (Warning")));
    EXPECT_THAT(text, Not(HasSubstr("Checksum Status: Bad")));
    EXPECT_THAT(text, HasSubstr("[Checksum Status: Good]"));
    EXPECT_THAT(text, Not(HasSubstr("Bad CRC32")));
    if (crc) {
      EXPECT_THAT(text, HasSubstr("(Good CRC32)"));
    }

    // Each record once and in order.
    std::string order;
    for (size_t at = 0; (at = text.find("= OpCode: ", at)) != std::string::npos; ++at) {
      const size_t begin = at + strlen("= OpCode: ");
      order += text.substr(begin, text.find(" (", begin) - begin) + "; ";
    }
    EXPECT_EQ(order, "Write; Send; Write; Send; Read Request; Read Response; Send; Terminate; ");
  }
}

TEST(PcapNgWriter, WiresharkDissectsRoceAndRpcOverRdma) {
  ASSERT_EQ(access("/usr/bin/tshark", X_OK), 0)
      << "this test needs tshark (Debian package tshark; ./dev test installs it)";
  for (const bool v6 : {false, true}) {
    SCOPED_TRACE(v6 ? "IPv6" : "IPv4");
    const std::string path = TempPath("dissect_roce.pcapng");
    {
      const auto writer = MustCreate(path);
      const auto flow = writer->OpenFlow(CaptureStyle::kRoce, Local(v6 ? "2001:db8::1" : "10.0.0.1"),
                                         Remote(v6 ? "2001:db8::2" : "10.0.0.2"), true);
      const std::string rpcrdma = HexBytes("12345678 00000001 00000020 00000000 00000000 00000000 00000000");
      const std::string call =
          HexBytes("12345678 00000000 00000002 000186a3 00000003 00000000 00000000 00000000 00000000 00000000");
      const std::string reply = HexBytes("12345678 00000001 00000000 00000000 00000000 00000000");
      using wire::IbOp;
      Record(*flow, kSent, IbPacket(IbOp::kSendOnly, 0x30002, 100, rpcrdma + call), "");
      Record(*flow, kReceived, IbPacket(IbOp::kAck, 0x20001, 100, "", wire::kIbAck), "");
      Record(*flow, kReceived, IbPacket(IbOp::kSendOnlyInv, 0x20001, 7, rpcrdma + reply), "");
      Record(*flow, kSent, IbPacket(IbOp::kAck, 0x30002, 7, "", wire::kIbRnrNak | 12), "");
      Record(*flow, kSent, IbPacket(IbOp::kWriteOnly, 0x30002, 101, "12345"), "");
      Record(*flow, kReceived, IbPacket(IbOp::kAck, 0x20001, 101, "", wire::kIbNakRemoteAccess), "");
      Record(*flow, kSent, IbPacket(IbOp::kReadRequest, 0x30002, 102), "");
      Record(*flow, kReceived, IbPacket(IbOp::kReadOnly, 0x20001, 102, "123456789", wire::kIbAck), "");
      Record(*flow, kSent, IbPacket(IbOp::kCompareSwap, 0x30002, 103), "");
      Record(*flow, kReceived, IbPacket(IbOp::kAtomicAck, 0x20001, 103, "", wire::kIbAck), "");
    }
    const std::string columns = Tshark("-r " + path);
    // Which call a reply belongs to is told by a connection manager's messages, of which there are none here.
    for (const char* const name : {"V3 NULL Call", "proc-0 Reply", "RC Acknowledge QP=0x020001",
                                   "RC RDMA Write Only QP=0x030002", "RC Acknowledge QP=0x020001 [Remote Access Error",
                                   "RC RDMA Read Request QP=0x030002", "RC RDMA Read Response Only QP=0x020001",
                                   "RC Compare Swap QP=0x030002", "RC Atomic Acknowledge QP=0x020001"}) {
      EXPECT_THAT(columns, HasSubstr(name));
    }
    const std::string text = Tshark("-r " + path + " -V -o udp.check_checksum:TRUE -o ip.check_checksum:TRUE");
    SCOPED_TRACE(text.substr(0, 200000));
    EXPECT_THAT(text, Not(HasSubstr("Malformed")));
    EXPECT_THAT(text, Not(HasSubstr("[Expert Info (Error")));
    EXPECT_THAT(text, Not(HasSubstr("Checksum Status: Bad")));
    EXPECT_THAT(text, HasSubstr("RNR Nak"));
    EXPECT_THAT(text, HasSubstr("Message Type: Reply"));
    if (v6) {
      EXPECT_THAT(text, HasSubstr("[Checksum Status: Good]"));
    }
  }
}

}  // namespace
}  // namespace stagecoach::emu
