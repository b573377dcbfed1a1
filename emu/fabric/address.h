// An IP address and port as a plain value.
#pragma once

#include <sys/socket.h>

#include <array>
#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace stagecoach::emu {

struct IpEndpoint {
  enum class Family : uint8_t { kNone, kIpv4, kIpv6 };

  Family family = Family::kNone;
  std::array<uint8_t, 16> address{};  // IPv4 uses the first four bytes
  uint32_t scope_id = 0;              // IPv6 link-local only
  uint16_t port = 0;                  // host byte order

  friend auto operator<=>(const IpEndpoint&, const IpEndpoint&) = default;

  bool IsUnspecified() const;  // no address, 0.0.0.0 or ::
  bool IsLoopback() const;
  IpEndpoint WithPort(uint16_t new_port) const;
  // What one host can call from by any address of, as the first of them, without a port: for limits by address. Of IPv6
  // its network of 64 bits, but for addresses that are good on their link alone, where all hosts have the same; of
  // loopback the whole block.
  IpEndpoint Source() const;

  // "10.0.0.1:20049", "[::1]:20049".
  std::string ToString() const;
  // The address alone, without port or brackets.
  std::string AddressString() const;

  // Accepts a numeric IPv4 or IPv6 address (no name resolution); nullopt when it is neither.
  static std::optional<IpEndpoint> Parse(std::string_view address, uint16_t port);
  static std::optional<IpEndpoint> FromSockaddr(const sockaddr* address);
  // Returns the length used of `out`; 0 for kNone.
  socklen_t ToSockaddr(sockaddr_storage* out) const;
};

}  // namespace stagecoach::emu
