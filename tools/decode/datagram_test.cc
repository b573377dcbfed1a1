// TCP and UDP in what packets may be clothed in, and what is said of packets that are something else.
#include "tools/decode/datagram.h"

#include <gtest/gtest.h>

#include "tools/decode/capture_file.h"
#include "tools/decode/test_messages.h"

namespace stagecoach::decode {
namespace {

using namespace testing;
using Reason = NotUnderstood::Reason;

Bytes Raw(std::initializer_list<int> values) {
  Bytes bytes;
  for (const int value : values) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

// A segment of 4 bytes from port 1000 to port 20049.
const Bytes kSegment = Words({0x03e84e51, 5, 0, 0x50100000, 0}) + Words({0xabadcafe});
const Bytes kUdp = Words({0x03e812b7, 0x000c0000}) + Words({0xabadcafe});

Bytes Ipv4(uint8_t protocol, const Bytes& payload, uint16_t fragment = 0) {
  const auto size = static_cast<uint32_t>(20 + payload.size());
  return Words({0x45000000 | size, fragment, 0x40000000u | static_cast<uint32_t>(protocol) << 16, 0x0a000001,
                0x0a000002}) +
         payload;
}
Bytes Ipv6(uint8_t next, const Bytes& payload) {
  return Words({0x60000000, static_cast<uint32_t>(payload.size()) << 16 | static_cast<uint32_t>(next) << 8 | 64}) +
         Words({0xfd000000, 0, 0, 1}) + Words({0xfd000000, 0, 0, 2}) + payload;
}
const Bytes kMacs(12);

// "tcp abadcafe", or why not: the sentence that is said of one such packet.
std::string Parsed(uint32_t link_type, const Bytes& packet, size_t cut = 0) {
  const auto datagram = ParsePacket(link_type, packet, packet.size() + cut);
  if (datagram) {
    return (datagram->tcp ? "tcp " : "udp ") + ToHex(datagram->payload) +
           (datagram->missing > 0 ? " and " + std::to_string(datagram->missing) : "");
  }
  NotUnderstoodCounts counts;
  counts.Add(datagram.error());
  return counts.Sentences().empty() ? "something else" : counts.Sentences().front();
}

TEST(Datagram, BehindVlanTagsOfAnyNumberAndKind) {
  const Bytes tcp = Raw({8, 0}) + Ipv4(6, kSegment);
  const Bytes vlan = Raw({0x81, 0, 0, 100});
  const Bytes service_vlan = Raw({0x88, 0xa8, 0, 100});
  const Bytes old_vlan = Raw({0x91, 0, 0, 100});
  for (const Bytes& tags : {Bytes(), vlan, service_vlan + vlan, old_vlan + vlan, vlan + vlan + vlan}) {
    EXPECT_EQ(Parsed(kLinkEthernet, kMacs + tags + tcp), "tcp abadcafe");
    EXPECT_EQ(Parsed(kLinkLinuxSll, Bytes(14) + tags + tcp), "tcp abadcafe");
    // The type stands at the beginning of the cooked header, what follows a tag behind it.
    const Bytes all = tags + tcp;
    const Bytes type(all.begin(), all.begin() + 2), behind(all.begin() + 2, all.end());
    EXPECT_EQ(Parsed(kLinkLinuxSll2, type + Bytes(18) + behind), "tcp abadcafe");
    for (size_t size = 0; size < 14 + tags.size(); ++size) {
      const Bytes whole = kMacs + tags + tcp;
      EXPECT_EQ(Parsed(kLinkEthernet, Bytes(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(size)), 100),
                "1 packet was cut by the snap length");
    }
  }
}

TEST(Datagram, BehindExtensionHeaders) {
  const auto options = [](uint8_t next, uint8_t length) { return Raw({next, length}) + Bytes(6 + size_t{length} * 8); };
  for (const uint8_t header : {0, 43, 60, 135, 139, 140}) {
    EXPECT_EQ(Parsed(kLinkRaw, Ipv6(header, options(6, 0) + kSegment)), "tcp abadcafe") << int{header};
    EXPECT_EQ(Parsed(kLinkRaw, Ipv6(header, options(17, 3) + kUdp)), "udp abadcafe") << int{header};
    // They are none in IPv4.
    EXPECT_NE(Parsed(kLinkRaw, Ipv4(header, options(6, 0) + kSegment)), "tcp abadcafe") << int{header};
  }
  EXPECT_EQ(Parsed(kLinkRaw, Ipv6(0, options(43, 0) + options(60, 1) + options(6, 0) + kSegment)), "tcp abadcafe");
  // An authentication header counts words, in both versions.
  const Bytes authentication = Raw({6, 4}) + Bytes(22);
  EXPECT_EQ(Parsed(kLinkRaw, Ipv6(51, authentication + kSegment)), "tcp abadcafe");
  EXPECT_EQ(Parsed(kLinkRaw, Ipv4(51, authentication + kSegment)), "tcp abadcafe");
  // A fragment that is the whole packet.
  EXPECT_EQ(Parsed(kLinkRaw, Ipv6(44, Raw({6, 0, 0, 0, 1, 2, 3, 4}) + kSegment)), "tcp abadcafe");

  const Bytes long_options = Ipv6(0, options(6, 255) + kSegment);
  for (size_t size = 40; size < 40 + 2048; ++size) {
    const Bytes cut(long_options.begin(), long_options.begin() + static_cast<ptrdiff_t>(size));
    ASSERT_EQ(Parsed(kLinkRaw, cut, 1), "1 packet was cut by the snap length") << size;
    ASSERT_EQ(Parsed(kLinkRaw, cut), "1 packet has lengths that contradict each other") << size;
  }
  // Longer than the payload that they are in.
  Bytes contradiction = Ipv6(0, options(6, 1) + kSegment);
  contradiction[5] = std::byte{8};
  EXPECT_EQ(Parsed(kLinkRaw, contradiction), "1 packet has lengths that contradict each other");
}

TEST(Datagram, FragmentsAreSaid) {
  for (const uint16_t place : {0x0001, 0x1fff, 0x2000, 0x2005}) {
    EXPECT_EQ(Parsed(kLinkRaw, Ipv4(17, kUdp, place)), "1 IP fragment was not put together") << place;
  }
  EXPECT_EQ(Parsed(kLinkRaw, Ipv4(17, kUdp, 0x4000)), "udp abadcafe") << "may not be fragmented";
  for (const int place : {0x0001, 0x0008, 0xfff8, 0xfff9}) {
    EXPECT_EQ(Parsed(kLinkRaw, Ipv6(44, Raw({17, 0, place >> 8, place & 255, 0, 0, 0, 1}) + kUdp)),
              "1 IP fragment was not put together")
        << place;
  }
}

TEST(Datagram, WhatIsNotUnderstoodIsNamedAndWhatIsSomethingElseIsNot) {
  EXPECT_EQ(Parsed(147, Bytes(60)), "1 packet of link type 147 was not understood");
  EXPECT_EQ(Parsed(kLinkEthernet, kMacs + Raw({0x89, 0x15}) + Bytes(60)),
            "1 packet of Ethernet type 0x8915 (RoCE version 1) was not understood");
  EXPECT_EQ(Parsed(kLinkEthernet, kMacs + Raw({0x81, 0, 0, 1, 0x12, 0x34}) + Bytes(60)),
            "1 packet of Ethernet type 0x1234 was not understood");
  EXPECT_EQ(Parsed(kLinkRaw, Ipv4(47, Bytes(20))), "1 packet of IP protocol 47 (GRE) was not understood");
  EXPECT_EQ(Parsed(kLinkRaw, Ipv6(200, Bytes(20))), "1 packet of IP protocol 200 was not understood");
  EXPECT_EQ(Parsed(kLinkRaw, Bytes(20)), "1 packet has neither IPv4 nor IPv6 where IP is to be");
  EXPECT_EQ(Parsed(kLinkRaw, {}), "1 packet has lengths that contradict each other");
  // ARP, spanning trees and ICMP.
  EXPECT_EQ(Parsed(kLinkEthernet, kMacs + Raw({8, 6}) + Bytes(28)), "something else");
  EXPECT_EQ(Parsed(kLinkEthernet, kMacs + Raw({0, 38}) + Bytes(38)), "something else");
  EXPECT_EQ(Parsed(kLinkRaw, Ipv4(1, Bytes(8))), "something else");
  EXPECT_EQ(Parsed(kLinkRaw, Ipv6(58, Bytes(8))), "something else");
}

TEST(Datagram, WhatWasNotCapturedIsMissing) {
  const Bytes whole = kMacs + Raw({8, 0}) + Ipv4(6, kSegment);
  EXPECT_EQ(Parsed(kLinkEthernet, Bytes(whole.begin(), whole.end() - 3), 3), "tcp ab and 3");
  // A length of 0 leaves it to the packet's size on the wire.
  Bytes long_one = whole;
  long_one[16] = long_one[17] = std::byte{0};
  EXPECT_EQ(Parsed(kLinkEthernet, long_one), "tcp abadcafe");
  EXPECT_EQ(Parsed(kLinkEthernet, long_one, 70000), "tcp abadcafe and 70000");
  Bytes jumbogram = Ipv6(0, Raw({6, 0, 0xc2, 4, 0, 0, 0, 0}) + kSegment);
  jumbogram[4] = jumbogram[5] = std::byte{0};
  EXPECT_EQ(Parsed(kLinkRaw, jumbogram, 70000), "tcp abadcafe and 70000");
  // A file that says less than there is.
  const auto datagram = ParsePacket(kLinkEthernet, whole, 1);
  ASSERT_TRUE(datagram);
  EXPECT_EQ(datagram->missing, 0u);
}

TEST(NotUnderstood, KindsAreBounded) {
  NotUnderstoodCounts counts;
  for (uint32_t i = 0; i < 1000; ++i) counts.Add({Reason::kEtherType, i});
  counts.Add({Reason::kSomethingElse});
  counts.Add({Reason::kBlockType, 7});
  const auto sentences = counts.Sentences();
  ASSERT_EQ(sentences.size(), NotUnderstoodCounts::kKindsMax + 2);
  EXPECT_EQ(sentences[NotUnderstoodCounts::kKindsMax], "968 packets of further kinds were not understood");
  EXPECT_EQ(sentences.back(), "1 block of further types was not read");
  EXPECT_EQ(counts.packets(), 1000u);
}

}  // namespace
}  // namespace stagecoach::decode
