#include "rpcrdma/bind/universal_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <charconv>
#include <cstring>

#include "base/bytes.h"

namespace stagecoach::rpcrdma {
namespace {

constexpr uint32_t kFirstUserProgram = 0x20000000;  // RFC 5531 section 8.3
constexpr size_t kIpv4Size = 4;

// One octet of the port in decimal digits, nothing else.
std::optional<uint8_t> ParseOctet(std::string_view text) {
  if (text.empty() || (text.size() > 1 && text[0] == '0')) return std::nullopt;
  uint8_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

bool IsAddressCharacter(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F') || c == '.' || c == ':';
}

int FamilyOf(Netid netid) {
  return netid == Netid::kRdma ? AF_INET : AF_INET6;
}

}  // namespace

// [5666bis:11+1] [5666:12+1] [2004:12+1]
std::string_view ToString(Netid netid) {
  return netid == Netid::kRdma ? "rdma" : "rdma6";
}

std::optional<Netid> ParseNetid(std::string_view text) {
  for (const Netid netid : {Netid::kRdma, Netid::kRdma6}) {
    if (text == ToString(netid)) return netid;
  }
  return std::nullopt;
}

bool UniversalAddress::wildcard() const {
  return std::all_of(host.begin(), host.end(), [](std::byte byte) { return byte == std::byte{0}; });
}

const char* ToString(UniversalAddressFault fault) {
  switch (fault) {
    case UniversalAddressFault::kTooLong:
      return "longer than any address";
    case UniversalAddressFault::kBadCharacter:
      return "has a character that no address has";
    case UniversalAddressFault::kNoPort:
      return "does not end in the two octets of a port";
    case UniversalAddressFault::kBadPort:
      return "an octet of the port is no number from 0 to 255";
    case UniversalAddressFault::kBadHost:
      return "no address of the netid's family";
  }
  return "unknown fault";
}

Result<UniversalAddress, UniversalAddressFault> ParseUniversalAddress(Netid netid, std::string_view text) {
  if (text.size() > kUniversalAddressMax) return Err(UniversalAddressFault::kTooLong);
  // [5666bis:7+6] [5666:10+5]
  // A NUL would end the text early for inet_pton.
  if (!std::all_of(text.begin(), text.end(), IsAddressCharacter)) return Err(UniversalAddressFault::kBadCharacter);
  const size_t low = text.rfind('.');
  if (low == std::string_view::npos || low == 0) return Err(UniversalAddressFault::kNoPort);
  const size_t high = text.rfind('.', low - 1);
  if (high == std::string_view::npos) return Err(UniversalAddressFault::kNoPort);
  const auto high_octet = ParseOctet(text.substr(high + 1, low - high - 1));
  const auto low_octet = ParseOctet(text.substr(low + 1));
  if (!high_octet || !low_octet) return Err(UniversalAddressFault::kBadPort);

  UniversalAddress address;
  address.netid = netid;
  address.port = static_cast<uint16_t>(*high_octet << 8 | *low_octet);
  if (inet_pton(FamilyOf(netid), std::string(text.substr(0, high)).c_str(), address.host.data()) != 1) {
    return Err(UniversalAddressFault::kBadHost);
  }
  return address;
}

std::string ToString(const UniversalAddress& address) {
  char host[INET6_ADDRSTRLEN] = {};
  inet_ntop(FamilyOf(address.netid), address.host.data(), host, sizeof(host));
  return std::string(host) + "." + std::to_string(address.port >> 8) + "." + std::to_string(address.port & 0xff);
}

// [5666bis:11+2] [5666:12+2] The family of the address says which.
std::optional<UniversalAddress> ToUniversalAddress(const sockaddr* address) {
  UniversalAddress result;
  if (address->sa_family == AF_INET) {
    sockaddr_in in;
    std::memcpy(&in, address, sizeof(in));
    CopyBytes(result.host, AsBytes(&in.sin_addr, sizeof(in.sin_addr)));
    result.port = ntohs(in.sin_port);
    return result;
  }
  if (address->sa_family != AF_INET6) return std::nullopt;
  sockaddr_in6 in6;
  std::memcpy(&in6, address, sizeof(in6));
  const ConstBytes host = AsBytes(&in6.sin6_addr, sizeof(in6.sin6_addr));
  result.port = ntohs(in6.sin6_port);
  if (IN6_IS_ADDR_V4MAPPED(&in6.sin6_addr)) {
    CopyBytes(result.host, host.last(kIpv4Size));
  } else {
    result.netid = Netid::kRdma6;
    CopyBytes(result.host, host);
  }
  return result;
}

sockaddr_storage ToSockaddr(const UniversalAddress& address) {
  sockaddr_storage storage = {};
  if (address.netid == Netid::kRdma) {
    sockaddr_in in = {};
    in.sin_family = AF_INET;
    in.sin_port = htons(address.port);
    std::memcpy(&in.sin_addr, address.host.data(), sizeof(in.sin_addr));
    std::memcpy(&storage, &in, sizeof(in));
  } else {
    sockaddr_in6 in6 = {};
    in6.sin6_family = AF_INET6;
    in6.sin6_port = htons(address.port);
    std::memcpy(&in6.sin6_addr, address.host.data(), sizeof(in6.sin6_addr));
    std::memcpy(&storage, &in6, sizeof(in6));
  }
  return storage;
}

// [5666bis:6+4] [5666bis:7+3] [5666:10+2] [5666bis:7+4] [5666:10+3] [5666bis:11+3] [5666:12+5]
std::optional<uint16_t> WellKnownPort(uint32_t program) {
  if (program == kNfsProgram) return kNfsRdmaPort;
  return std::nullopt;
}

std::string ProgramText(uint32_t program) {
  if (program < kFirstUserProgram) return std::to_string(program);
  char digits[8];
  const auto [end, error] = std::to_chars(std::begin(digits), std::end(digits), program, 16);
  return "0x" + std::string(digits, end);
}

}  // namespace stagecoach::rpcrdma
