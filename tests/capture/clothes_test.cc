// `stagecoach decode` on one recording in all the forms in which the same packets may have been captured, and the dumps
// of them that tools print.
#include <gtest/gtest.h>

#include <array>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "base/cursor.h"
#include "rpcrdma/wire/profile.h"
#include "tools/decode/capture_file.h"
#include "tools/decode/decoder.h"
#include "tools/decode/test_messages.h"

namespace stagecoach::decode {
namespace {

using namespace testing;

constexpr const char* kRecording = "tests/golden/captures/siw_nfsclient_to_host.pcap";

struct Outcome {
  std::string summaries;
  std::vector<std::string> sentences;
  std::vector<std::string> troubles;
  uint64_t not_understood = 0;
};

Outcome Decoded(const std::string& file) {
  Outcome outcome;
  const Sinks sinks = {
      .message = [&](const Event& event) { outcome.summaries += event.decoded.summary + "\n"; },
      .trouble = [&](const Origin&, const std::string& text) { outcome.troubles.push_back(text); },
  };
  std::istringstream in(file);
  const auto totals = DecodeInput(in, rpcrdma::kRfc5666bis, sinks);
  EXPECT_TRUE(totals) << totals.error();
  if (!totals) return outcome;
  outcome.sentences = totals->sentences;
  outcome.not_understood = totals->not_understood;
  return outcome;
}

std::string Recording() {
  std::ifstream in(kRecording, std::ios::binary);
  EXPECT_TRUE(in.is_open());
  std::ostringstream all;
  all << in.rdbuf();
  return all.str();
}

// The IPv4 packets of the recording, without the frames around them.
std::vector<Bytes> IpPackets() {
  const std::string recording = Recording();
  std::istringstream in(recording.substr(4));
  NotUnderstoodCounts skipped;
  CaptureFile file(AsBytes(recording).first(4), &in, &skipped);
  std::vector<Bytes> packets;
  for (;;) {
    const auto packet = file.Next();
    EXPECT_TRUE(packet);
    if (!packet || !*packet) return packets;
    const ConstBytes bytes = (*packet)->bytes;
    const size_t size = ByteReader(bytes.subspan(16)).U16();
    const ConstBytes ip = bytes.subspan(14, size);
    if (std::to_integer<int>(ip[0]) == 0x45) packets.emplace_back(ip.begin(), ip.end());
  }
}

Bytes Raw(std::initializer_list<int> values) {
  Bytes bytes;
  for (const int value : values) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

// The same as an IPv6 packet with this between it and TCP, whose type is `first`.
Bytes AsIpv6(const Bytes& ipv4, uint8_t first, const Bytes& headers) {
  const auto address = [&](ptrdiff_t at) {
    return Words({0xfd000000, 0, 0}) + Bytes(ipv4.begin() + at, ipv4.begin() + at + 4);
  };
  const Bytes payload = headers + Bytes(ipv4.begin() + 20, ipv4.end());
  return Words({0x60000000, static_cast<uint32_t>(payload.size()) << 16 | static_cast<uint32_t>(first) << 8 | 64}) +
         address(12) + address(16) + payload;
}

using Dress = std::function<Bytes(const Bytes& ipv4)>;

std::string Number(uint32_t value, int size) {
  std::string text;
  for (int i = 0; i < size; ++i) text += static_cast<char>(value >> 8 * i);
  return text;
}

std::string Pcap(uint32_t link_type, const Dress& dress, size_t snap_length = 65536) {
  std::string file =
      Number(0xa1b2c3d4, 4) + Number(2, 2) + Number(4, 2) + Number(0, 8) + Number(65536, 4) + Number(link_type, 4);
  for (const Bytes& ip : IpPackets()) {
    const Bytes packet = dress(ip);
    const size_t captured = std::min(packet.size(), snap_length);
    file += Number(1, 4) + Number(0, 4) + Number(static_cast<uint32_t>(captured), 4) +
            Number(static_cast<uint32_t>(packet.size()), 4) + std::string(AsText(ConstBytes(packet).first(captured)));
  }
  return file;
}

std::string Block(uint32_t type, std::string body) {
  body.resize(body.size() + XdrPad(body.size()));
  const auto size = static_cast<uint32_t>(body.size() + 12);
  return Number(type, 4) + Number(size, 4) + body + Number(size, 4);
}

// pcapng of raw IP, each packet in what `block` makes of it.
std::string PcapNg(const std::function<std::string(const std::string& packet)>& block) {
  std::string file = Block(0x0a0d0d0a, Number(0x1a2b3c4d, 4) + Number(1, 4) + std::string(8, '\xff'));
  file += Block(1, Number(kLinkRaw, 4) + Number(0, 4));
  for (const Bytes& ip : IpPackets()) file += block(std::string(AsText(ip)));
  return file;
}

const Bytes kMacs(12);
const Bytes kIpv4Type = Raw({8, 0});
const Bytes kIpv6Type = Raw({0x86, 0xdd});

TEST(Clothes, EachFormOfTheSamePacketsHasTheSameMessages) {
  const std::string expected = Decoded(Recording()).summaries;
  ASSERT_NE(expected.find("RDMA_MSG, version 1: call"), std::string::npos);
  const auto as_ipv6 = [](uint8_t first, const Bytes& headers) {
    return [=](const Bytes& ip) { return kMacs + kIpv6Type + AsIpv6(ip, first, headers); };
  };
  struct Form {
    const char* name;
    uint32_t link_type;
    Dress dress;
  };
  const std::array<Form, 12> forms = {{
      {"raw", kLinkRaw, [](const Bytes& ip) { return ip; }},
      {"loopback of BSD", kLinkLoop, [](const Bytes& ip) { return Bytes(4) + ip; }},
      {"VLAN", kLinkEthernet,
       [](const Bytes& ip) {
         return kMacs + Raw({0x81, 0, 0, 100}) + kIpv4Type + ip;
       }},
      {"QinQ", kLinkEthernet,
       [](const Bytes& ip) {
         return kMacs + Raw({0x88, 0xa8, 0, 7, 0x81, 0, 0, 100}) + kIpv4Type + ip;
       }},
      {"cooked", kLinkLinuxSll, [](const Bytes& ip) { return Bytes(14) + kIpv4Type + ip; }},
      {"cooked VLAN", kLinkLinuxSll,
       [](const Bytes& ip) {
         return Bytes(14) + Raw({0x81, 0, 0, 100}) + kIpv4Type + ip;
       }},
      {"cooked, second form, VLAN", kLinkLinuxSll2,
       [](const Bytes& ip) {
         return Raw({0x81, 0}) + Bytes(18) + Raw({0, 100}) + kIpv4Type + ip;
       }},
      {"IPv6", kLinkEthernet, as_ipv6(6, {})},
      {"hop-by-hop options", kLinkEthernet, as_ipv6(0, Raw({6, 0, 1, 4, 0, 0, 0, 0}))},
      {"destination options", kLinkEthernet, as_ipv6(60, Raw({6, 0, 1, 4, 0, 0, 0, 0}))},
      {"routing and a whole fragment", kLinkEthernet,
       as_ipv6(43, Raw({44, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 9}))},
      {"raw IPv6", kLinkRaw, [](const Bytes& ip) { return AsIpv6(ip, 6, {}); }},
  }};
  for (const Form& form : forms) {
    const Outcome outcome = Decoded(Pcap(form.link_type, form.dress));
    EXPECT_EQ(outcome.summaries, expected) << form.name;
    EXPECT_TRUE(outcome.sentences.empty()) << form.name << ": " << outcome.sentences.front();
  }
  const auto size = [](const std::string& packet) { return Number(static_cast<uint32_t>(packet.size()), 4); };
  // Interface and losses, time, sizes.
  const auto packet_block = [&](const std::string& packet) {
    return Block(2, Number(0, 4) + Number(0, 8) + size(packet) + size(packet) + packet);
  };
  const auto simple_block = [&](const std::string& packet) { return Block(3, size(packet) + packet); };
  EXPECT_EQ(Decoded(PcapNg(packet_block)).summaries, expected);
  EXPECT_EQ(Decoded(PcapNg(simple_block)).summaries, expected);
}

TEST(Clothes, WhatIsNotUnderstoodIsCountedToThePacket) {
  const uint64_t packets = IpPackets().size();
  const auto expect = [&](const std::string& file, const std::string& sentence) {
    const Outcome outcome = Decoded(file);
    EXPECT_EQ(outcome.summaries, "");
    EXPECT_EQ(outcome.not_understood, packets);
    EXPECT_EQ(outcome.sentences, std::vector<std::string>{sentence});
  };
  const std::string count = std::to_string(packets);
  expect(Pcap(147, [](const Bytes& ip) { return ip; }), count + " packets of link type 147 were not understood");
  expect(Pcap(kLinkEthernet,
              [](const Bytes& ip) {
                return kMacs + Raw({0x88, 0x47}) + Bytes(4) + ip;
              }),
         count + " packets of Ethernet type 0x8847 (MPLS) were not understood");
  expect(Pcap(kLinkEthernet,
              [](const Bytes& ip) {
                return kMacs + kIpv6Type + AsIpv6(ip, 44, Raw({6, 0, 0, 1, 0, 0, 0, 9}));
              }),
         count + " IP fragments were not put together");
  // Cut in the headers of TCP.
  expect(Pcap(
             kLinkRaw, [](const Bytes& ip) { return ip; }, 30),
         count + " packets were cut by the snap length");
}

TEST(Clothes, ASnapLengthThatCutsMessagesIsSaidBesideThoseThatAreWhole) {
  const Outcome outcome = Decoded(Pcap(
      kLinkRaw, [](const Bytes& ip) { return ip; }, 200));
  EXPECT_NE(outcome.summaries, "");
  ASSERT_EQ(outcome.sentences.size(), 1u);
  EXPECT_TRUE(outcome.sentences[0].ends_with(" cut by the snap length")) << outcome.sentences[0];
  EXPECT_GT(outcome.not_understood, 0u);
  EXPECT_LT(outcome.not_understood, IpPackets().size());
}

// What prints the packets: lines of 16 bytes, as tcpdump -x has them.
std::string Dump(const Bytes& bytes) {
  std::string text = "12:00:00.000000 IP 10.0.2.15.54212 > 10.0.2.2.20049: Flags [P.]\n";
  for (size_t at = 0; at < bytes.size(); ++at) {
    char part[32];
    if (at % 16 == 0) {
      std::snprintf(part, sizeof part, "%s\t0x%04zx: ", at == 0 ? "" : "\n", at);
      text += part;
    }
    if (at % 2 == 0) text += ' ';
    std::snprintf(part, sizeof part, "%02x", std::to_integer<unsigned>(bytes[at]));
    text += part;
  }
  return text + "\n";
}

TEST(Clothes, PacketsAsTcpdumpPrintsThem) {
  const std::string expected = Decoded(Recording()).summaries;
  std::string raw, framed, cooked;
  for (const Bytes& ip : IpPackets()) {
    raw += Dump(ip);
    framed += Dump(kMacs + kIpv4Type + ip);
    cooked += Dump(kIpv4Type + Bytes(18) + ip);
  }
  EXPECT_EQ(Decoded(raw).summaries, expected) << "-x";
  EXPECT_EQ(Decoded(framed).summaries, expected) << "-xx";
  EXPECT_EQ(Decoded(cooked).summaries, expected) << "-xx of -i any";
}

}  // namespace
}  // namespace stagecoach::decode
