#include "tools/decode/datagram.h"

#include <arpa/inet.h>
#include <sys/socket.h>

#include <algorithm>

#include "base/cursor.h"
#include "tools/decode/capture_file.h"

namespace stagecoach::decode {
namespace {

constexpr uint16_t kEtherIpv4 = 0x0800;
constexpr uint16_t kEtherIpv6 = 0x86dd;
constexpr uint16_t kEtherVlan = 0x8100;
constexpr uint16_t kEtherServiceVlan = 0x88a8;
constexpr uint8_t kTcp = 6;
constexpr uint8_t kUdp = 17;
constexpr size_t kTcpHeader = 20;

// The IP packet in a frame; empty when there is none.
ConstBytes IpPacket(uint32_t link_type, ConstBytes frame) {
  ByteReader in(frame);
  switch (link_type) {
    case kLinkEthernet: {
      in.Skip(12);
      uint16_t type = in.U16();
      while (type == kEtherVlan || type == kEtherServiceVlan) {
        in.Skip(2);
        type = in.U16();
      }
      if (type != kEtherIpv4 && type != kEtherIpv6) return {};
      break;
    }
    case kLinkLinuxSll:
      in.Skip(16);
      break;
    case kLinkLinuxSll2:
      in.Skip(20);
      break;
    case kLinkNull:
      in.Skip(4);
      break;
    case kLinkRaw:
    case kLinkIpv4:
    case kLinkIpv6:
    case 12:  // what some systems write for raw IP
    case 14:
      break;
    default:
      return {};
  }
  return in.ok() ? in.Rest() : ConstBytes{};
}

// Behind the IP header. `size`: of the IP payload on the wire.
std::optional<Datagram> ParseTransport(uint8_t protocol, ByteReader in, size_t size, Datagram datagram) {
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
    if (header < kTcpHeader) return std::nullopt;
    in.Skip(header - kTcpHeader);
  } else if (protocol == kUdp) {
    const size_t length = in.U16();
    in.Skip(2);
    if (length < header || length > size) return std::nullopt;
    size = length;
  } else {
    return std::nullopt;
  }
  if (!in.ok() || header > size) return std::nullopt;
  // Short frames are padded by Ethernet: the length counts.
  const size_t payload = size - header;
  datagram.payload = in.Rest().first(std::min(payload, in.remaining()));
  datagram.missing = payload - datagram.payload.size();
  return datagram;
}

std::optional<Datagram> ParseIpv4(ConstBytes packet) {
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
  // A host that leaves segmentation to its NIC captures packets too long for the field.
  if (total == 0) total = packet.size();
  if (!in.ok() || header < 20 || total < header || (fragment & 0x3fff) != 0) return std::nullopt;
  in.Skip(header - 20);
  if (!in.ok()) return std::nullopt;
  return ParseTransport(protocol, ByteReader(in.Rest()), total - header, datagram);
}

std::optional<Datagram> ParseIpv6(ConstBytes packet) {
  ByteReader in(packet);
  in.Skip(4);
  size_t size = in.U16();
  const uint8_t next = in.U8();
  in.Skip(1);
  Datagram datagram;
  datagram.source.ipv6 = datagram.destination.ipv6 = true;
  for (size_t i = 0; i < 16; ++i) datagram.source.bytes[i] = in.U8();
  for (size_t i = 0; i < 16; ++i) datagram.destination.bytes[i] = in.U8();
  if (!in.ok()) return std::nullopt;
  if (size == 0) size = in.remaining();
  return ParseTransport(next, ByteReader(in.Rest()), size, datagram);
}

}  // namespace

std::string ToString(const Address& address) {
  char text[INET6_ADDRSTRLEN] = "?";
  ::inet_ntop(address.ipv6 ? AF_INET6 : AF_INET, address.bytes.data(), text, sizeof text);
  const std::string host = address.ipv6 ? "[" + std::string(text) + "]" : text;
  return host + ":" + std::to_string(address.port);
}

std::optional<Datagram> ParsePacket(uint32_t link_type, ConstBytes packet) {
  const ConstBytes ip = IpPacket(link_type, packet);
  if (ip.empty()) return std::nullopt;
  switch (std::to_integer<uint8_t>(ip[0]) >> 4) {
    case 4:
      return ParseIpv4(ip);
    case 6:
      return ParseIpv6(ip);
    default:
      return std::nullopt;
  }
}

}  // namespace stagecoach::decode
