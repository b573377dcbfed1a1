// `stagecoach decode` on captures: the kernel's, our own in all their styles, and streams as networks and capturing
// hosts leave them.
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "base/cursor.h"
#include "base/prng.h"
#include "emu/engine/mpa_framing.h"
#include "emu/tap/pcapng_writer.h"
#include "emu/wire/cm_mad.h"
#include "emu/wire/ib.h"
#include "emu/wire/mpa.h"
#include "emu/wire/rdmap.h"
#include "rpcrdma/wire/private_data.h"
#include "tools/decode/decoder.h"
#include "tools/decode/report.h"
#include "tools/decode/test_messages.h"

namespace stagecoach::decode {
namespace {

using namespace testing;
using emu::CaptureDirection;
using emu::IpEndpoint;
using emu::wire::MpaFrame;
using emu::wire::MpaFrameKind;

struct Seen {
  std::string summary;
  std::string carrier;
  std::string source;
  std::string bytes;  // in hexadecimal
  std::string remarks;
};

struct Outcome {
  std::vector<Seen> messages;
  std::vector<std::string> troubles;
  Totals totals;
  std::string error;

  std::string Summaries() const {
    std::string text;
    for (const Seen& each : messages) text += each.carrier + ": " + each.summary + "\n";
    return text;
  }
  std::string Remarks() const {
    std::string text;
    for (const Seen& each : messages) text += each.remarks;
    return text;
  }
  int Count(const std::string& what) const {
    int count = 0;
    for (const Seen& each : messages) count += each.summary.starts_with(what);
    return count;
  }
};

Outcome Decoded(std::istream& in, const rpcrdma::ProtocolProfile& profile = rpcrdma::kRfc5666bis) {
  Outcome outcome;
  const Sinks sinks = {
      .message =
          [&](const Event& event) {
            outcome.messages.push_back({event.decoded.summary, event.carrier,
                                        event.source ? ToString(*event.source) : "", ToHex(event.bytes),
                                        testing::Remarks(event.decoded.fields)});
            EXPECT_FALSE(FormatText(1, event).empty());
            EXPECT_TRUE(FormatJson(1, event, profile).ends_with("]}\n"));
          },
      .trouble = [&](const Origin&, const std::string& text) { outcome.troubles.push_back(text); },
  };
  const auto totals = DecodeInput(in, profile, sinks);
  if (totals) {
    outcome.totals = *totals;
  } else {
    outcome.error = totals.error();
  }
  return outcome;
}

Outcome DecodedFile(const std::string& path, const rpcrdma::ProtocolProfile& profile = rpcrdma::kRfc5666bis) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in.is_open()) << path;
  return Decoded(in, profile);
}

// --- The kernel's ---

struct Recorded {
  const char* name;
  int msg, nomsg, private_data;
};
// As tests/golden/rpcrdma_golden_test.cc has them.
constexpr Recorded kRecorded[] = {
    {"siw_nfs3", 201, 7, 2},
    {"siw_nfs3_inline1024", 171, 7, 2},
    {"siw_nfs3_mtu1500", 201, 7, 2},
    {"siw_nfs3client_to_host", 18, 0, 6},
    {"siw_nfsclient_to_host", 4, 0, 2},
    {"siw_two_vms", 74, 2, 2},
};

TEST(DecodeCapture, EveryMessageOfTheKernelIsThereAndLegal) {
  for (const Recorded& each : kRecorded) {
    const Outcome outcome = DecodedFile(std::string("tests/golden/captures/") + each.name + ".pcap");
    EXPECT_EQ(outcome.error, "");
    EXPECT_EQ(outcome.Count("RDMA_MSG, "), each.msg) << each.name;
    EXPECT_EQ(outcome.Count("RDMA_NOMSG, "), each.nomsg) << each.name;
    EXPECT_EQ(outcome.Count("CM private data"), each.private_data) << each.name;
    EXPECT_EQ(outcome.totals.illegal, 0u) << each.name << "\n" << outcome.Remarks();
    EXPECT_TRUE(outcome.troubles.empty()) << each.name << ": " << outcome.troubles.front();
  }
}

TEST(DecodeCapture, WhatIsNotRpcOverRdmaIsCountedAndLeftOut) {
  const Outcome outcome = DecodedFile("tests/golden/captures/siw_rping_crc.pcap");
  EXPECT_TRUE(outcome.messages.empty()) << outcome.Summaries();
  EXPECT_GT(outcome.totals.others, 0u);
  EXPECT_TRUE(outcome.troubles.empty()) << outcome.troubles.front();
}

TEST(DecodeCapture, TheKernelsAnswersToBadHeaders) {
  const Outcome outcome = DecodedFile("tests/golden/captures/siw_knfsd_pokes.pcap");
  EXPECT_EQ(outcome.Count("RDMA_ERROR, version 1"), 5);
  EXPECT_EQ(outcome.Count("RDMA_ERROR, version 2"), 1) << "the version that is refused, as it came";
  EXPECT_GT(outcome.totals.illegal, 0u) << "what was poked";
  for (const Seen& each : outcome.messages) {
    if (!each.summary.starts_with("RDMA_ERROR")) continue;
    EXPECT_EQ(each.remarks.find("ILLEGAL"), std::string::npos) << each.remarks;
  }
}

// --- Our own ---

IpEndpoint End1(bool ipv6) {
  return *IpEndpoint::Parse(ipv6 ? "::1" : "10.0.0.1", 50000);
}
IpEndpoint End2(bool ipv6) {
  return *IpEndpoint::Parse(ipv6 ? "::1" : "10.0.0.2", 20049);
}

const Bytes kCall = Version1(7, 0, kNoChunks + Call(7));
const Bytes kReply = Version1(7, 0, kNoChunks + Reply(7));
const Bytes kCall2 = Version2(8, 0, 0, Words({0}) + kNoChunks + Call(8) + Bytes(9000));

constexpr const char* kExchange =
    "RDMA_MSG, version 1: call 0x00000007, NFS 3 NULL\n"
    "RDMA_MSG, version 1: reply 0x00000007, SUCCESS of NFS 3 NULL\n";

class OurCapture {
 public:
  OurCapture() : path_(::testing::TempDir() + "/ours.pcapng") {
    auto writer = emu::PcapNgWriter::Create(
        path_, [this] { return std::chrono::nanoseconds(1'700'000'000'000'000'000 + 1000 * ++ticks_); },
        [](const std::string& message) { ADD_FAILURE() << message; });
    EXPECT_TRUE(writer);
    writer_ = *writer;
  }
  emu::PcapNgWriter& writer() { return *writer_; }
  Outcome Decode() {
    writer_.reset();
    return DecodedFile(path_);
  }

 private:
  std::string path_;
  int64_t ticks_ = 0;
  std::shared_ptr<emu::PcapNgWriter> writer_;
};

Bytes MpaBytes(MpaFrameKind kind, uint8_t flags, ConstBytes private_data) {
  const MpaFrame frame{.kind = kind, .flags = flags, .revision = 1, .private_data = private_data};
  Bytes bytes(frame.EncodedSize());
  ByteWriter out(bytes);
  frame.Encode(out);
  EXPECT_TRUE(out.ok());
  return bytes;
}

// The ULPDUs of a Send, with this much payload in each.
std::vector<Bytes> Ulpdus(const Bytes& message, uint32_t msn, size_t payload_max) {
  std::vector<Bytes> ulpdus;
  for (size_t at = 0; at == 0 || at < message.size(); at += payload_max) {
    const size_t size = std::min(payload_max, message.size() - at);
    const auto header = emu::wire::SegmentHeader::Send(emu::wire::RdmapOpcode::kSend, 0, msn, static_cast<uint32_t>(at),
                                                       at + size == message.size());
    Bytes ulpdu(header.EncodedSize());
    ByteWriter out(ulpdu);
    header.Encode(out);
    ulpdus.push_back(ulpdu + Bytes(message.begin() + static_cast<ptrdiff_t>(at),
                                   message.begin() + static_cast<ptrdiff_t>(at + size)));
  }
  return ulpdus;
}

void Record(emu::CaptureFlow& flow, CaptureDirection direction, const Bytes& record) {
  const ConstBytes part = record;
  flow.Record(direction, std::span(&part, 1));
}

TEST(DecodeCapture, OursOverIwarpWithMarkersAndCrcOrWithout) {
  const auto claims =
      rpcrdma::EncodePrivateData({.remote_invalidation = true, .send_size = 16384, .receive_size = 16384});
  for (const bool ipv6 : {false, true}) {
    for (const uint8_t flags : {0x00, 0x40, 0x80, 0xc0}) {
      OurCapture capture;
      auto flow = capture.writer().OpenFlow(emu::CaptureStyle::kIwarp, End1(ipv6), End2(ipv6), true);
      flow->Handshake(CaptureDirection::kSent, MpaBytes(MpaFrameKind::kRequest, flags, claims));
      flow->Handshake(CaptureDirection::kReceived, MpaBytes(MpaFrameKind::kReply, flags, claims));
      uint32_t msn = 0;
      for (const Bytes& message : {kCall, kCall2}) {
        for (const Bytes& each : Ulpdus(message, ++msn, 1000)) Record(*flow, CaptureDirection::kSent, each);
      }
      for (const Bytes& each : Ulpdus(kReply, 1, 20)) Record(*flow, CaptureDirection::kReceived, each);
      flow.reset();
      const Outcome outcome = capture.Decode();
      EXPECT_EQ(outcome.Summaries(),
                "MPA Request: CM private data: send 16384 receive 16384 remote invalidation\n"
                "MPA Reply: CM private data: send 16384 receive 16384 remote invalidation\n"
                "iWARP Send: RDMA_MSG, version 1: call 0x00000007, NFS 3 NULL\n"
                "iWARP Send: RDMA2_MSG, version 2: call 0x00000008, NFS 3 NULL\n"
                "iWARP Send: RDMA_MSG, version 1: reply 0x00000007, SUCCESS of NFS 3 NULL\n")
          << int{flags};
      EXPECT_TRUE(outcome.troubles.empty()) << outcome.troubles.front();
      ASSERT_EQ(outcome.messages.size(), 5u);
      EXPECT_EQ(outcome.messages[3].bytes, ToHex(kCall2));
      EXPECT_EQ(outcome.messages[4].source, ipv6 ? "[::1]:20049" : "10.0.0.2:20049");
    }
  }
}

// Packets of a Send, with this much payload in each, from this PSN on.
std::vector<Bytes> IbPackets(const Bytes& message, uint32_t qp, uint32_t psn, size_t mtu) {
  using emu::wire::IbOp;
  std::vector<Bytes> packets;
  for (size_t at = 0; at == 0 || at < message.size(); at += mtu) {
    const size_t size = std::min(mtu, message.size() - at);
    const bool first = at == 0, last = at + size == message.size();
    const emu::wire::IbHeader header{.op = first  ? last ? IbOp::kSendOnly : IbOp::kSendFirst
                                           : last ? IbOp::kSendLast
                                                  : IbOp::kSendMiddle,
                                     .pad = emu::wire::IbPad(size),
                                     .destination_qp = qp,
                                     .psn = psn++};
    Bytes packet(header.EncodedSize());
    ByteWriter out(packet);
    header.Encode(out);
    packets.push_back(packet + Bytes(message.begin() + static_cast<ptrdiff_t>(at),
                                     message.begin() + static_cast<ptrdiff_t>(at + size)));
  }
  return packets;
}

Bytes MadPacket(const emu::wire::CmMessage& message) {
  const emu::wire::IbHeader header{.service = emu::wire::IbService::kUd, .destination_qp = 1, .source_qp = 1};
  Bytes packet(header.EncodedSize() + emu::wire::kDatagramIpSize);
  ByteWriter out(packet);
  header.Encode(out);
  emu::wire::EncodeDatagramIp(header, out);
  const auto mad = emu::wire::EncodeCmMad({.transaction_id = 1, .message = message});
  return packet + Bytes(mad.begin(), mad.end());
}

TEST(DecodeCapture, OursOverRoceInOrderWithWhatIsRepeated) {
  const auto claims = rpcrdma::EncodePrivateData({});
  OurCapture capture;
  auto flow = capture.writer().OpenFlow(emu::CaptureStyle::kRoce, End1(false), End2(false), true);
  emu::wire::CmReq req{.local_id = 5, .qp_number = 17, .starting_psn = 0xfffffe};
  std::copy(claims.begin(), claims.end(), req.private_data.begin() + emu::wire::kCmIpHeaderSize);
  emu::wire::CmRep rep{.local_id = 6, .remote_id = 5, .qp_number = 18, .starting_psn = 500};
  std::copy(claims.begin(), claims.end(), rep.private_data.begin());
  Record(*flow, CaptureDirection::kSent, MadPacket(req));
  Record(*flow, CaptureDirection::kSent, MadPacket(req));
  Record(*flow, CaptureDirection::kReceived, MadPacket(rep));
  const auto call = IbPackets(kCall + Bytes(3), 18, 0xfffffe, 32);
  for (const Bytes& each : {call[0], call[1], call[0], call[1], call[2]}) Record(*flow, CaptureDirection::kSent, each);
  const auto reply = IbPackets(kReply, 17, 500, 1024);
  Record(*flow, CaptureDirection::kReceived, reply[0]);
  Record(*flow, CaptureDirection::kReceived, reply[0]);
  // A message of which a packet was lost, and one that is whole.
  const auto lost = IbPackets(kCall2, 18, 5, 4096);
  Record(*flow, CaptureDirection::kSent, lost[0]);
  Record(*flow, CaptureDirection::kSent, lost[2]);
  for (const Bytes& each : IbPackets(kCall2, 18, 10, 4096)) Record(*flow, CaptureDirection::kSent, each);
  flow.reset();
  const Outcome outcome = capture.Decode();
  EXPECT_EQ(outcome.Summaries(),
            "CM ConnectRequest: CM private data: send 1024 receive 1024 no remote invalidation\n"
            "CM ConnectReply: CM private data: send 1024 receive 1024 no remote invalidation\n"
            "RoCE Send: RDMA_MSG, version 1: call 0x00000007, NFS 3 NULL\n"
            "RoCE Send: RDMA_MSG, version 1: reply 0x00000007, SUCCESS of NFS 3 NULL\n"
            "RoCE Send: RDMA2_MSG, version 2: call 0x00000008, NFS 3 NULL\n");
  EXPECT_EQ(outcome.messages.back().bytes, ToHex(kCall2));
}

TEST(DecodeCapture, OverRoceWithoutTheConnectionsBeginning) {
  OurCapture capture;
  auto flow = capture.writer().OpenFlow(emu::CaptureStyle::kRoce, End1(false), End2(false), true);
  Record(*flow, CaptureDirection::kSent, IbPackets(kCall, 18, 77, 1024)[0]);
  Record(*flow, CaptureDirection::kReceived, IbPackets(kReply, 17, 500, 1024)[0]);
  flow.reset();
  EXPECT_EQ(capture.Decode().Summaries(),
            "RoCE Send: RDMA_MSG, version 1: call 0x00000007, NFS 3 NULL\n"
            "RoCE Send: RDMA_MSG, version 1: reply 0x00000007, SUCCESS of NFS 3 NULL\n");
}

// --- TCP as it is ---

// A pcap file of raw IP packets of one connection.
class Stream {
 public:
  explicit Stream(bool crc = false) : crc_(crc) {
    file_ = std::string("\xd4\xc3\xb2\xa1\x02\0\x04\0\0\0\0\0\0\0\0\0\0\0\x04\0\x65\0\0\0", 24);
    const uint8_t flags = crc ? 0x40 : 0;
    bytes_[0] = MpaBytes(MpaFrameKind::kRequest, flags, {});
    bytes_[1] = MpaBytes(MpaFrameKind::kReply, flags, {});
    for (int i = 0; i < 2; ++i) framers_[i].emplace(crc, false);
  }
  // Adds a message to what an end sends, and returns where it begins.
  size_t Send(int end, const Bytes& message, size_t payload_max = 1000) {
    const size_t start = bytes_[end].size();
    for (const Bytes& ulpdu : Ulpdus(message, ++msn_[end], payload_max)) {
      Bytes fpdu(framers_[end]->MaxFramedSize(ulpdu.size()));
      framers_[end]->Begin(fpdu, ulpdu.size());
      framers_[end]->Append(ulpdu);
      fpdu.resize(framers_[end]->Finish());
      bytes_[end] = bytes_[end] + fpdu;
    }
    return start;
  }
  size_t size(int end) const { return bytes_[end].size(); }
  Bytes& bytes(int end) { return bytes_[end]; }

  void Syn() {  // both ends
    Packet(0, -1, {}, 0x02, 0);
    Packet(1, -1, {}, 0x12, 0);
  }
  // Bytes [from, to) of what an end sends, the last `missing` of them not captured.
  void Segment(int end, size_t from, size_t to, size_t missing = 0) {
    Packet(end, static_cast<int64_t>(from), ConstBytes(bytes_[end]).subspan(from, to - from - missing), 0x18, missing);
  }
  void Rest(int end) { Segment(end, 0, size(end)); }
  Outcome Decode() const {
    std::istringstream in(file_);
    return Decoded(in);
  }

 private:
  void Packet(int end, int64_t position, ConstBytes payload, uint8_t flags, size_t missing) {
    Bytes packet(40);
    ByteWriter out(packet);
    out.U16(0x4500);
    out.U16(static_cast<uint16_t>(40 + payload.size() + missing));
    out.U32(0);
    out.U16(0x4006);
    out.U16(0);
    out.U32(end == 0 ? 0x0a000001 : 0x0a000002);
    out.U32(end == 0 ? 0x0a000002 : 0x0a000001);
    out.U16(end == 0 ? 50000 : 20049);
    out.U16(end == 0 ? 20049 : 50000);
    // Numbers that pass zero on the way.
    out.U32(static_cast<uint32_t>(0xffffff80 + 1 + position));
    out.U32(0);
    out.U8(0x50);
    out.U8(flags);
    packet.insert(packet.end(), payload.begin(), payload.end());
    const auto captured = static_cast<uint32_t>(packet.size());
    for (const uint32_t value : {uint32_t{1}, uint32_t{0}, captured, static_cast<uint32_t>(captured + missing)}) {
      for (int i = 0; i < 4; ++i) file_ += static_cast<char>(value >> 8 * i);
    }
    file_ += AsText(packet);
  }

  const bool crc_;
  std::string file_;
  std::array<Bytes, 2> bytes_;
  std::array<std::optional<emu::MpaFramer>, 2> framers_;
  std::array<uint32_t, 2> msn_{};
};

std::string WithoutCarriers(const Outcome& outcome) {
  std::string text;
  for (const Seen& each : outcome.messages) text += each.summary + "\n";
  return text;
}

TEST(DecodeStream, SegmentsInAnyOrderAndTwiceAndOverlapping) {
  Prng prng(1);
  for (int round = 0; round < 50; ++round) {
    Stream stream(round % 2 == 0);
    stream.Send(0, kCall, 16);
    stream.Send(1, kReply, 16);
    stream.Syn();
    // The frames first, as a handshake has it.
    const size_t frame = 20;
    stream.Segment(0, 0, frame);
    stream.Segment(1, 0, frame);
    for (const int end : {0, 1}) {
      std::vector<std::pair<size_t, size_t>> parts;
      for (size_t at = frame; at < stream.size(end);) {
        const size_t size = std::min<size_t>(1 + prng.Below(40), stream.size(end) - at);
        parts.emplace_back(at, at + size);
        at += size;
      }
      for (int again = 0; again < 5; ++again) {
        const size_t from = frame + prng.Below(stream.size(end) - frame);
        parts.emplace_back(from, std::min<size_t>(stream.size(end), from + 1 + prng.Below(60)));
      }
      for (size_t i = parts.size(); i > 1; --i) std::swap(parts[i - 1], parts[prng.Below(i)]);
      for (const auto& [from, to] : parts) stream.Segment(end, from, to);
    }
    const Outcome outcome = stream.Decode();
    ASSERT_EQ(WithoutCarriers(outcome), kExchange) << round;
    EXPECT_TRUE(outcome.troubles.empty()) << outcome.troubles.front();
    EXPECT_EQ(outcome.messages[0].bytes, ToHex(kCall));
  }
}

TEST(DecodeStream, GoesOnBehindBytesThatAreMissing) {
  Stream stream;
  const size_t lost = stream.Send(0, kCall2);
  const size_t next = stream.Send(0, kCall);
  stream.Send(1, kReply);
  stream.Syn();
  stream.Segment(0, 0, lost + 100);
  stream.Segment(0, next, stream.size(0));
  stream.Rest(1);
  const Outcome outcome = stream.Decode();
  // What waited for the missing bytes comes when the file ends.
  EXPECT_EQ(outcome.Count("RDMA_MSG, version 1: call"), 1) << outcome.Summaries();
  EXPECT_EQ(outcome.Count("RDMA_MSG, version 1: reply"), 1);
  ASSERT_EQ(outcome.troubles.size(), 1u);
  EXPECT_NE(
      outcome.troubles[0].find("bytes of the stream from 10.0.0.1:50000 to 10.0.0.2:20049 are not in the capture"),
      std::string::npos);
}

TEST(DecodeStream, GoesOnBehindSegmentsThatWereNotCapturedToTheirEnds) {
  Stream stream;
  const size_t cut = stream.Send(0, kCall2);
  const size_t next = stream.Send(0, kCall);
  stream.Syn();
  stream.Rest(1);
  stream.Segment(0, 0, cut);
  stream.Segment(0, cut, next, 5000);
  stream.Segment(0, next, stream.size(0));
  const Outcome outcome = stream.Decode();
  EXPECT_EQ(WithoutCarriers(outcome), "RDMA_MSG, version 1: call 0x00000007, NFS 3 NULL\n");
  EXPECT_EQ(outcome.troubles.size(), 1u);
}

TEST(DecodeStream, BeginsInTheMiddleOfAConnection) {
  Stream stream;
  const size_t call = stream.Send(0, kCall);
  const size_t reply = stream.Send(1, kReply);
  stream.Segment(0, call, stream.size(0));
  stream.Segment(1, reply, stream.size(1));
  EXPECT_EQ(WithoutCarriers(stream.Decode()), kExchange);
}

TEST(DecodeStream, AnFpduWithABadCrcIsLeftOut) {
  Stream stream(true);
  const size_t call = stream.Send(0, kCall);
  stream.Send(0, Version1(9, 0, kNoChunks + Call(9)));
  stream.bytes(0)[call + 30] ^= std::byte{1};
  stream.Syn();
  stream.Rest(1);
  stream.Segment(0, 0, 20);
  stream.Segment(0, 20, stream.size(0));
  const Outcome outcome = stream.Decode();
  EXPECT_EQ(WithoutCarriers(outcome), "RDMA_MSG, version 1: call 0x00000009, NFS 3 NULL\n");
  EXPECT_EQ(outcome.troubles, std::vector<std::string>{"an FPDU from 10.0.0.1:50000 has a bad CRC"});
}

TEST(DecodeStream, AStreamThatNeverGetsWhatItWaitsForIsBounded) {
  Stream stream;
  const size_t start = stream.size(0);
  for (int i = 0; i < 900; ++i) stream.Send(0, Version1(9, 0, kNoChunks + Call(9) + Bytes(900)));
  stream.Syn();
  stream.Segment(0, 0, start);
  stream.Rest(1);
  for (size_t at = start + 100; at + 1000 < stream.size(0); at += 1000) stream.Segment(0, at, at + 1000);
  const Outcome outcome = stream.Decode();
  EXPECT_EQ(outcome.troubles.size(), 1u) << "the gap is given up once, before the file ends";
}

// --- Hex dumps, and what is neither ---

Outcome DecodedText(const std::string& text) {
  std::istringstream in(text);
  return Decoded(in);
}

TEST(DecodeHex, AMessageOrPrivateDataOrAFrame) {
  EXPECT_EQ(WithoutCarriers(DecodedText(ToHex(kCall) + "\n\n" + ToHex(kReply) + "\n")), kExchange);
  EXPECT_EQ(DecodedText(ToHex(rpcrdma::EncodePrivateData({}))).Count("CM private data: send 1024"), 1);
  const Bytes frame = MpaBytes(MpaFrameKind::kReply, 0, rpcrdma::EncodePrivateData({}));
  EXPECT_EQ(DecodedText(ToHex(frame)).Summaries(),
            "MPA Reply: CM private data: send 1024 receive 1024 no remote invalidation\n");
  EXPECT_EQ(DecodedText(ToHex(MpaBytes(MpaFrameKind::kReply, 0, {}))).totals.messages, 0u);
}

TEST(DecodeHex, PacketsAsTsharkShowsThem) {
  // The call and the reply of siw_nfsclient_to_host.pcap's first exchange, as Ethernet frames.
  std::ifstream in("tests/golden/captures/siw_nfsclient_to_host.pcap", std::ios::binary);
  char header[24];
  in.read(header, sizeof header);
  std::string text;
  for (;;) {
    char packet[16];
    if (!in.read(packet, sizeof packet)) break;
    uint32_t size = 0;
    for (int i = 3; i >= 0; --i) size = size << 8 | static_cast<uint8_t>(packet[8 + i]);
    std::string bytes(size, '\0');
    in.read(bytes.data(), size);
    text += ToHex(AsBytes(bytes)) + "\n\n";
  }
  EXPECT_EQ(DecodedText(text).Summaries(), DecodedFile("tests/golden/captures/siw_nfsclient_to_host.pcap").Summaries());
}

TEST(DecodeInput, WhatIsNeitherIsSaid) {
  EXPECT_EQ(DecodedText("what?").error, "line 1: neither a dump nor hexadecimal digits");
  EXPECT_EQ(DecodedText(std::string("\x7f"
                                    "ELF\0",
                                    5))
                .error,
            "neither a pcap or pcapng file nor a hex dump");
  EXPECT_EQ(DecodedText("").totals.messages, 0u);
  EXPECT_EQ(DecodedText("\n\r\r\n").totals.messages, 0u);
  EXPECT_NE(DecodedText(std::string("\xd4\xc3\xb2\xa1", 4)).error, "");
}

}  // namespace
}  // namespace stagecoach::decode
