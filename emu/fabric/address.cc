// IpEndpoint: text and sockaddr forms. No name resolution, no scope names: link-local scopes are numeric ("fe80::1%2").
#include "emu/fabric/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <charconv>
#include <cstring>

namespace stagecoach::emu {
namespace {

bool IsZero(const std::array<uint8_t, 16>& address) {
  return std::all_of(address.begin(), address.end(), [](uint8_t byte) { return byte == 0; });
}

// ::ffff:a.b.c.d, as a dual-stack socket names an IPv4 peer.
constexpr std::array<uint8_t, 12> kV4MappedPrefix = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

bool IsV4Mapped(const std::array<uint8_t, 16>& address) {
  return std::equal(kV4MappedPrefix.begin(), kV4MappedPrefix.end(), address.begin());
}

}  // namespace

bool IpEndpoint::IsUnspecified() const {
  return family == Family::kNone || IsZero(address);
}

IpEndpoint IpEndpoint::Source() const {
  constexpr size_t kNetworkSize = 8;
  if (IsLoopback()) return {.family = Family::kIpv4, .address = {127, 0, 0, 1}};
  IpEndpoint source = WithPort(0);
  const bool is_mapped = family == Family::kIpv6 && IsV4Mapped(address);
  const bool is_link_local = address[0] == 0xfe && (address[1] & 0xc0) == 0x80;
  if (family == Family::kIpv6 && !is_mapped && !is_link_local) {
    std::fill(source.address.begin() + kNetworkSize, source.address.end(), uint8_t{0});
  }
  return source;
}

bool IpEndpoint::IsLoopback() const {
  switch (family) {
    case Family::kIpv4:
      return address[0] == 127;
    case Family::kIpv6:
      if (IsV4Mapped(address)) return address[12] == 127;
      return address[15] == 1 &&
             std::all_of(address.begin(), address.end() - 1, [](uint8_t byte) { return byte == 0; });
    case Family::kNone:
      return false;
  }
  return false;
}

IpEndpoint IpEndpoint::WithPort(uint16_t new_port) const {
  IpEndpoint result = *this;
  result.port = new_port;
  return result;
}

std::string IpEndpoint::AddressString() const {
  char text[INET6_ADDRSTRLEN] = "";
  switch (family) {
    case Family::kIpv4:
      inet_ntop(AF_INET, address.data(), text, sizeof text);
      return text;
    case Family::kIpv6: {
      inet_ntop(AF_INET6, address.data(), text, sizeof text);
      std::string result = text;
      if (scope_id != 0) result += "%" + std::to_string(scope_id);
      return result;
    }
    case Family::kNone:
      return "unspecified";
  }
  return "unspecified";
}

std::string IpEndpoint::ToString() const {
  if (family == Family::kIpv6) return "[" + AddressString() + "]:" + std::to_string(port);
  return AddressString() + ":" + std::to_string(port);
}

std::optional<IpEndpoint> IpEndpoint::Parse(std::string_view text, uint16_t port) {
  IpEndpoint result;
  result.port = port;
  std::string_view host = text;
  const size_t percent = text.find('%');
  if (percent != std::string_view::npos) {
    host = text.substr(0, percent);
    const std::string_view scope = text.substr(percent + 1);
    const auto [end, error] = std::from_chars(scope.data(), scope.data() + scope.size(), result.scope_id);
    if (error != std::errc() || end != scope.data() + scope.size()) return std::nullopt;
  }
  // inet_pton reads a C string: an embedded NUL would hide what follows it.
  if (host.find('\0') != std::string_view::npos) return std::nullopt;
  const std::string terminated(host);
  if (inet_pton(AF_INET, terminated.c_str(), result.address.data()) == 1) {
    if (percent != std::string_view::npos) return std::nullopt;
    result.family = Family::kIpv4;
    return result;
  }
  result.address = {};
  if (inet_pton(AF_INET6, terminated.c_str(), result.address.data()) != 1) return std::nullopt;
  result.family = Family::kIpv6;
  return result;
}

std::optional<IpEndpoint> IpEndpoint::FromSockaddr(const sockaddr* address) {
  if (address == nullptr) return std::nullopt;
  IpEndpoint result;
  if (address->sa_family == AF_INET) {
    sockaddr_in in;
    std::memcpy(&in, address, sizeof in);
    result.family = Family::kIpv4;
    result.port = ntohs(in.sin_port);
    std::memcpy(result.address.data(), &in.sin_addr, 4);
    return result;
  }
  if (address->sa_family == AF_INET6) {
    sockaddr_in6 in6;
    std::memcpy(&in6, address, sizeof in6);
    result.family = Family::kIpv6;
    result.port = ntohs(in6.sin6_port);
    result.scope_id = in6.sin6_scope_id;
    std::memcpy(result.address.data(), &in6.sin6_addr, 16);
    return result;
  }
  return std::nullopt;
}

socklen_t IpEndpoint::ToSockaddr(sockaddr_storage* out) const {
  std::memset(out, 0, sizeof *out);
  switch (family) {
    case Family::kIpv4: {
      sockaddr_in in{};
      in.sin_family = AF_INET;
      in.sin_port = htons(port);
      std::memcpy(&in.sin_addr, address.data(), 4);
      std::memcpy(out, &in, sizeof in);
      return sizeof in;
    }
    case Family::kIpv6: {
      sockaddr_in6 in6{};
      in6.sin6_family = AF_INET6;
      in6.sin6_port = htons(port);
      in6.sin6_scope_id = scope_id;
      std::memcpy(&in6.sin6_addr, address.data(), 16);
      std::memcpy(out, &in6, sizeof in6);
      return sizeof in6;
    }
    case Family::kNone:
      return 0;
  }
  return 0;
}

}  // namespace stagecoach::emu
