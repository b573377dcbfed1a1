#include "tools/decode/datagram.h"

#include <arpa/inet.h>
#include <sys/socket.h>

#include <algorithm>
#include <iterator>

#include "base/cursor.h"
#include "tools/decode/capture_file.h"

namespace stagecoach::decode {
namespace {

using Reason = NotUnderstood::Reason;

constexpr uint16_t kEtherIpv4 = 0x0800;
constexpr uint16_t kEtherIpv6 = 0x86dd;
// Numbers below this are the lengths of IEEE 802.3, whose frames carry no IP.
constexpr uint16_t kEtherTypesBegin = 0x0600;
// IEEE 802.1Q, IEEE 802.1ad, and what was used for the outer tag before that.
constexpr uint16_t kVlanTypes[] = {0x8100, 0x88a8, 0x9100};
// ARP, wake-on-LAN, RARP, EAPOL, LLDP, PTP and loopback tests: what networks are full of, and never RDMA.
constexpr uint16_t kOtherEtherTypes[] = {0x0806, 0x0842, 0x8035, 0x888e, 0x88cc, 0x88f7, 0x9000};

constexpr uint8_t kTcp = 6;
constexpr uint8_t kUdp = 17;
// ICMP, IGMP, ICMPv6, none, OSPF, PIM and VRRP, likewise.
constexpr uint8_t kOtherProtocols[] = {1, 2, 58, 59, 89, 103, 112};
constexpr size_t kTcpHeader = 20;

// Headers between IP's and the one of TCP or UDP.
constexpr uint8_t kFragmentHeader = 44;
constexpr uint8_t kAuthenticationHeader = 51;
// Hop-by-hop options, routing, destination options, mobility, host identity, shim6: alike in how they say their length.
constexpr uint8_t kExtensionHeaders[] = {0, 43, 60, 135, 139, 140};

template <typename T, size_t kSize>
bool IsAmong(T value, const T (&values)[kSize]) {
  return std::ranges::find(values, value) != std::end(values);
}

tl::unexpected<NotUnderstood> Because(Reason reason, uint32_t number = 0) {
  return Err(NotUnderstood{reason, number});
}
// A packet that ends within its headers.
tl::unexpected<NotUnderstood> Ends() {
  return Because(Reason::kCut);
}

// Behind the Ethernet type `type`, and behind the VLAN tags that it begins.
Result<ConstBytes, NotUnderstood> BehindTypes(uint16_t type, ByteReader in) {
  while (IsAmong(type, kVlanTypes)) {
    in.Skip(2);
    type = in.U16();
    if (!in.ok()) return Ends();
  }
  if (type < kEtherTypesBegin || IsAmong(type, kOtherEtherTypes)) return Because(Reason::kSomethingElse);
  if (type != kEtherIpv4 && type != kEtherIpv6) return Because(Reason::kEtherType, type);
  return in.Rest();
}

// The IP packet in a frame.
Result<ConstBytes, NotUnderstood> IpPacket(uint32_t link_type, ConstBytes frame) {
  ByteReader in(frame);
  switch (link_type) {
    case kLinkEthernet:
    case kLinkLinuxSll: {
      in.Skip(link_type == kLinkEthernet ? 12 : 14);
      const uint16_t type = in.U16();
      if (!in.ok()) return Ends();
      return BehindTypes(type, in);
    }
    case kLinkLinuxSll2: {
      const uint16_t type = in.U16();
      in.Skip(18);
      if (!in.ok()) return Ends();
      return BehindTypes(type, in);
    }
    case kLinkNull:
    case kLinkLoop:
      in.Skip(4);
      break;
    case kLinkRaw:
    case kLinkIpv4:
    case kLinkIpv6:
    case 12:  // what some systems write for raw IP
    case 14:
      break;
    default:
      return Because(Reason::kLinkType, link_type);
  }
  if (!in.ok()) return Ends();
  return in.Rest();
}

// Behind the IP headers. `size`: of what is there on the wire.
Result<Datagram, NotUnderstood> ParseTransport(uint8_t protocol, ByteReader in, size_t size, Datagram datagram) {
  if (IsAmong(protocol, kOtherProtocols)) return Because(Reason::kSomethingElse);
  if (protocol != kTcp && protocol != kUdp) return Because(Reason::kProtocol, protocol);
  datagram.source.port = in.U16();
  datagram.destination.port = in.U16();
  size_t header = 8;
  if (protocol == kTcp) {
    datagram.tcp = true;
    datagram.sequence = in.U32();
    in.Skip(4);
    header = static_cast<size_t>(in.U8() >> 4) * 4;
    const uint8_t flags = in.U8();
    datagram.fin = (flags & 0x01) != 0;
    datagram.syn = (flags & 0x02) != 0;
    datagram.reset = (flags & 0x04) != 0;
    datagram.ack = (flags & 0x10) != 0;
    in.Skip(6);
    if (in.ok() && header < kTcpHeader) return Because(Reason::kContradiction);
    if (in.ok()) in.Skip(header - kTcpHeader);
  } else {
    const size_t length = in.U16();
    in.Skip(2);
    if (in.ok() && (length < header || length > size)) return Because(Reason::kContradiction);
    size = length;
  }
  if (!in.ok()) return Ends();
  if (header > size) return Because(Reason::kContradiction);
  // Short frames are padded by Ethernet: the length counts.
  const size_t payload = size - header;
  datagram.payload = in.Rest().first(std::min(payload, in.remaining()));
  datagram.missing = payload - datagram.payload.size();
  return datagram;
}

// Behind the IP header, whose next header is `next`: extension headers first. `size` as above.
Result<Datagram, NotUnderstood> ParseBehindIp(uint8_t next, ByteReader in, size_t size, const Datagram& datagram) {
  for (;;) {
    const bool extension = datagram.source.ipv6 && (next == kFragmentHeader || IsAmong(next, kExtensionHeaders));
    if (!extension && next != kAuthenticationHeader) return ParseTransport(next, in, size, datagram);
    const uint8_t following = in.U8();
    const size_t length = in.U8();
    size_t header = (length + 1) * 8;
    if (next == kAuthenticationHeader) header = (length + 2) * 4;
    if (next == kFragmentHeader) {
      header = 8;
      const uint16_t place = in.U16();
      // One that is the whole packet (RFC 6946) is as good as none.
      if (in.ok() && (place & 0xfff9) != 0) return Because(Reason::kFragment);
      in.Skip(4);
    } else {
      in.Skip(header - 2);
    }
    if (!in.ok()) return Ends();
    if (header > size) return Because(Reason::kContradiction);
    size -= header;
    next = following;
  }
}

// `wire_size`: of the packet, of which `packet` may be the beginning. A host that leaves segmentation to its NIC
// captures packets that are too long for the length in their headers, which is 0 then.
Result<Datagram, NotUnderstood> ParseIpv4(ConstBytes packet, size_t wire_size) {
  ByteReader in(packet);
  const size_t header = static_cast<size_t>(in.U8() & 0x0f) * 4;
  in.Skip(1);
  size_t total = in.U16();
  in.Skip(2);
  const uint16_t fragment = in.U16();
  in.Skip(1);
  const uint8_t protocol = in.U8();
  in.Skip(2);
  Datagram datagram;
  for (size_t i = 0; i < 4; ++i) datagram.source.bytes[i] = in.U8();
  for (size_t i = 0; i < 4; ++i) datagram.destination.bytes[i] = in.U8();
  if (!in.ok()) return Ends();
  if (total == 0) total = wire_size;
  if (header < 20 || total < header) return Because(Reason::kContradiction);
  if ((fragment & 0x3fff) != 0) return Because(Reason::kFragment);
  in.Skip(header - 20);
  if (!in.ok()) return Ends();
  return ParseBehindIp(protocol, ByteReader(in.Rest()), total - header, datagram);
}

Result<Datagram, NotUnderstood> ParseIpv6(ConstBytes packet, size_t wire_size) {
  ByteReader in(packet);
  in.Skip(4);
  size_t size = in.U16();
  const uint8_t next = in.U8();
  in.Skip(1);
  Datagram datagram;
  datagram.source.ipv6 = datagram.destination.ipv6 = true;
  for (size_t i = 0; i < 16; ++i) datagram.source.bytes[i] = in.U8();
  for (size_t i = 0; i < 16; ++i) datagram.destination.bytes[i] = in.U8();
  if (!in.ok()) return Ends();
  // A jumbogram (RFC 2675), or the same without its option.
  if (size == 0) size = wire_size - in.position();
  return ParseBehindIp(next, ByteReader(in.Rest()), size, datagram);
}

}  // namespace

std::string ToString(const Address& address) {
  char text[INET6_ADDRSTRLEN] = "?";
  ::inet_ntop(address.ipv6 ? AF_INET6 : AF_INET, address.bytes.data(), text, sizeof text);
  const std::string host = address.ipv6 ? "[" + std::string(text) + "]" : text;
  return host + ":" + std::to_string(address.port);
}

Result<Datagram, NotUnderstood> ParsePacket(uint32_t link_type, ConstBytes packet, size_t original_size) {
  const auto parse = [&]() -> Result<Datagram, NotUnderstood> {
    const auto ip = IpPacket(link_type, packet);
    if (!ip) return Err(ip.error());
    if (ip->empty()) return Ends();
    const size_t wire_size = ip->size() + (std::max(original_size, packet.size()) - packet.size());
    switch (std::to_integer<uint8_t>(ip->front()) >> 4) {
      case 4:
        return ParseIpv4(*ip, wire_size);
      case 6:
        return ParseIpv6(*ip, wire_size);
      default:
        return Because(Reason::kNotIp);
    }
  };
  auto datagram = parse();
  // What ends early though all of it was captured has lengths that pass its end.
  if (!datagram && datagram.error().reason == Reason::kCut && original_size <= packet.size()) {
    return Because(Reason::kContradiction);
  }
  return datagram;
}

}  // namespace stagecoach::decode
