#include "rpcrdma/verbs/address_text.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>

#include <charconv>
#include <cstring>

namespace stagecoach::rpcrdma::internal {
namespace {

// By its number where the interface has gone.
std::string ZoneText(uint32_t scope_id) {
  char name[IF_NAMESIZE] = {};
  return if_indextoname(scope_id, name) != nullptr ? name : std::to_string(scope_id);
}

}  // namespace

std::string FormatHost(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = {};
  if (address->sa_family == AF_INET) {
    return inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, text, sizeof(text));
  }
  if (address->sa_family == AF_INET6) {
    const auto* in6 = reinterpret_cast<const sockaddr_in6*>(address);
    const std::string host = inet_ntop(AF_INET6, &in6->sin6_addr, text, sizeof(text));
    return in6->sin6_scope_id == 0 ? host : host + "%" + ZoneText(in6->sin6_scope_id);
  }
  return "address of family " + std::to_string(address->sa_family);
}

std::string SourceOf(const sockaddr* remote, const sockaddr* local) {
  constexpr char kThisHost[] = "this host";
  std::string host = FormatHost(remote);
  if (host == FormatHost(local)) return kThisHost;
  if (remote->sa_family == AF_INET) {
    const uint32_t address = ntohl(reinterpret_cast<const sockaddr_in*>(remote)->sin_addr.s_addr);
    return address >> 24 == IN_LOOPBACKNET ? kThisHost : host;
  }
  if (remote->sa_family != AF_INET6) return host;
  const in6_addr& address = reinterpret_cast<const sockaddr_in6*>(remote)->sin6_addr;
  if (IN6_IS_ADDR_LOOPBACK(&address)) return kThisHost;
  if (IN6_IS_ADDR_LINKLOCAL(&address)) return host;
  if (IN6_IS_ADDR_V4MAPPED(&address)) {
    sockaddr_in inside{};
    inside.sin_family = AF_INET;
    std::memcpy(&inside.sin_addr, &address.s6_addr[12], sizeof(inside.sin_addr));
    return SourceOf(reinterpret_cast<const sockaddr*>(&inside), local);
  }
  sockaddr_in6 network{};
  network.sin6_family = AF_INET6;
  constexpr size_t kNetworkBytes = 8;
  std::memcpy(&network.sin6_addr, &address, kNetworkBytes);
  return FormatHost(reinterpret_cast<const sockaddr*>(&network)) + "/64";
}

std::string FormatAddress(const sockaddr* address) {
  switch (address->sa_family) {
    case AF_INET:
      return FormatHostPort(FormatHost(address), ntohs(reinterpret_cast<const sockaddr_in*>(address)->sin_port));
    case AF_INET6:
      return FormatHostPort(FormatHost(address), ntohs(reinterpret_cast<const sockaddr_in6*>(address)->sin6_port));
    default:
      return FormatHost(address);
  }
}

std::string FormatHostPort(std::string_view host, uint16_t port) {
  const bool brackets = host.find(':') != std::string_view::npos;
  return (brackets ? "[" + std::string(host) + "]" : std::string(host)) + ":" + std::to_string(port);
}

std::optional<uint32_t> FindZone(std::string_view zone) {
  if (zone.find('\0') != std::string_view::npos) return std::nullopt;
  if (const unsigned index = if_nametoindex(std::string(zone).c_str()); index != 0) return index;
  uint32_t index = 0;
  const auto [end, error] = std::from_chars(zone.data(), zone.data() + zone.size(), index);
  char name[IF_NAMESIZE];
  if (error != std::errc() || end != zone.data() + zone.size() || if_indextoname(index, name) == nullptr) {
    return std::nullopt;
  }
  return index;
}

}  // namespace stagecoach::rpcrdma::internal
