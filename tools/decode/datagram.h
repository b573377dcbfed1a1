// What of a captured packet is TCP or UDP over IP: addresses, ports, payload.
//
// Ethernet, Linux' cooked captures (both with VLAN tags, however many), BSD's loopback and raw IP; IPv4, and IPv6 with
// its extension headers (RFC 8200 section 4). IP fragments are not put together. Checksums are not looked at: captures
// of a sending host have none yet. Pure functions; any thread.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <string>

#include "base/bytes.h"
#include "base/result.h"
#include "tools/decode/not_understood.h"

namespace stagecoach::decode {

struct Address {
  bool ipv6 = false;
  std::array<uint8_t, 16> bytes{};  // IPv4 in the first four
  uint16_t port = 0;

  friend auto operator<=>(const Address&, const Address&) = default;
};
// "10.0.0.1:20049", "[::1]:20049".
std::string ToString(const Address& address);

struct Datagram {
  bool tcp = false;  // or UDP
  Address source;
  Address destination;
  // TCP.
  uint32_t sequence = 0;
  bool syn = false;
  bool ack = false;
  bool fin = false;
  bool reset = false;
  ConstBytes payload;  // a view into the packet
  size_t missing = 0;  // bytes of the payload that were not captured
};

// `original_size`: of the packet on the wire, of which `packet` may be the beginning. The error says why it is neither
// TCP nor UDP, or is not known to be.
Result<Datagram, NotUnderstood> ParsePacket(uint32_t link_type, ConstBytes packet, size_t original_size);

}  // namespace stagecoach::decode
