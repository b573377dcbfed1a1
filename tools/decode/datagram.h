// What of a captured packet is TCP or UDP over IP: addresses, ports, payload.
//
// Ethernet (with VLAN tags), Linux' cooked captures, BSD's loopback and raw IP; IPv4 and IPv6. Not understood, and no
// error: IP fragments, IPv6 extension headers. Checksums are not looked at: captures of a sending host have none yet.
// Pure functions; any thread.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <optional>
#include <string>

#include "base/bytes.h"

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

// nullopt: something else.
std::optional<Datagram> ParsePacket(uint32_t link_type, ConstBytes packet);

}  // namespace stagecoach::decode
