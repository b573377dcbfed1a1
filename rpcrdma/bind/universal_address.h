// Where an RPC-over-RDMA service is to be found: netids and universal addresses (RFC 5665), and ports that are known
// without asking.
//
// A universal address is text: "192.0.2.1.78.81" is port 20049 (78 * 256 + 81) of 192.0.2.1, "2001:db8::1.78.81" the
// same port of an IPv6 address. The netid says which of the two forms it has. They come from whoever answers as
// rpcbind, so parsing is strict and says what is wrong.
//
// Left out: scopes of link-local addresses, for which the text has no place. Values; thread-compatible.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"

namespace stagecoach::rpcrdma {

// [5666bis:7#2] [5666:10#2] [5666bis:11#1] [5666:12+3] "rdma" for services reached by IPv4 addresses and "rdma6" by
// IPv6 addresses, over iWARP and over InfiniBand alike.
enum class Netid : uint8_t { kRdma, kRdma6 };
std::string_view ToString(Netid netid);
// nullopt for every other netid: "tcp", "RDMA", "".
std::optional<Netid> ParseNetid(std::string_view text);

// The longest text form: an IPv6 address with an IPv4 address as its last 32 bits, and two octets.
inline constexpr size_t kUniversalAddressMax = 45 + 8;

struct UniversalAddress {
  Netid netid = Netid::kRdma;
  // As on the wire; kRdma has its address in the first four bytes and zeros behind them.
  std::array<std::byte, 16> host = {};
  uint16_t port = 0;  // host byte order

  // 0.0.0.0 or ::, all addresses of the host it is an address of.
  bool wildcard() const;

  friend bool operator==(const UniversalAddress&, const UniversalAddress&) = default;
};

enum class UniversalAddressFault : uint8_t {
  kTooLong,       // more than kUniversalAddressMax characters
  kBadCharacter,  // none of digits, hexadecimal digits, '.' and ':'; a NUL, too
  kNoPort,        // not two parts behind dots at the end
  kBadPort,       // one of them is no number from 0 to 255, or has a leading zero
  kBadHost,       // what is before them is no address of the netid's family
};
// "no address of the netid's family", to follow the quoted text.
const char* ToString(UniversalAddressFault fault);

// IPv4 as four decimal octets, IPv6 in any form of RFC 4291 section 2.2. Port 0 is an address like any other here.
Result<UniversalAddress, UniversalAddressFault> ParseUniversalAddress(Netid netid, std::string_view text);
// The canonical form, which parses to the same value.
std::string ToString(const UniversalAddress& address);

// nullopt for other families. An IPv4-mapped IPv6 address becomes the IPv4 address that it means.
std::optional<UniversalAddress> ToUniversalAddress(const sockaddr* address);
// `port` in host byte order.
sockaddr_storage ToSockaddr(const UniversalAddress& address);

// The port IANA registered for NFS over RDMA ("nfsrdma", 5666bis section 11).
inline constexpr uint16_t kNfsRdmaPort = 20049;
inline constexpr uint32_t kNfsProgram = 100003;

// The port at which a program is found over RDMA when nobody tells: NFS has one. 5666bis section 7, third possibility.
std::optional<uint16_t> WellKnownPort(uint32_t program);

// Numbers of the user-defined range (0x20000000 and above) read better in hexadecimal; the registered ones are known in
// decimal.
std::string ProgramText(uint32_t program);

}  // namespace stagecoach::rpcrdma
