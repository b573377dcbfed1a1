#include "rpcrdma/api/resolve.h"

#include <arpa/inet.h>
#include <netdb.h>

#include <algorithm>
#include <cstring>

#include "base/bytes.h"
#include "rpcrdma/verbs/address_text.h"

namespace stagecoach::rpcrdma::internal {
namespace {

struct ZonedHost {
  std::string_view address;
  std::optional<std::string_view> zone;  // there is a '%'
};

ZonedHost SplitZone(std::string_view host) {
  const size_t percent = host.find('%');
  if (percent == std::string_view::npos) return {host, std::nullopt};
  return {host.substr(0, percent), host.substr(percent + 1)};
}

bool IsIpv4Mapped(const SocketAddress& address) {
  if (address.storage.ss_family != AF_INET6) return false;
  return IN6_IS_ADDR_V4MAPPED(&reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_addr);
}

}  // namespace

SocketAddress CopyAddress(const sockaddr* address) {
  SocketAddress copy;
  CopyBytes(AsMutableBytes(&copy.storage, sizeof(copy.storage)),
            AsBytes(address, address->sa_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in)));
  return copy;
}

std::optional<SocketAddress> ParseAddress(std::string_view host, uint16_t port) {
  // It would end the text early for inet_pton.
  if (host.find('\0') != std::string_view::npos) return std::nullopt;
  SocketAddress result;
  sockaddr_in in = {};
  if (inet_pton(AF_INET, std::string(host).c_str(), &in.sin_addr) == 1) {
    in.sin_family = AF_INET;
    in.sin_port = htons(port);
    std::memcpy(&result.storage, &in, sizeof(in));
    return result;
  }
  const ZonedHost parts = SplitZone(host);
  sockaddr_in6 in6 = {};
  if (inet_pton(AF_INET6, std::string(parts.address).c_str(), &in6.sin6_addr) != 1) return std::nullopt;
  if (parts.zone) {
    const auto zone = FindZone(*parts.zone);
    if (!zone) return std::nullopt;
    in6.sin6_scope_id = *zone;
  }
  in6.sin6_family = AF_INET6;
  in6.sin6_port = htons(port);
  std::memcpy(&result.storage, &in6, sizeof(in6));
  return result;
}

Result<std::vector<SocketAddress>, std::string> ResolveHost(const std::string& host, uint16_t port) {
  if (const auto numeric = ParseAddress(host, port)) {
    // What rdma_cm says of them is EINVAL.
    if (IsIpv4Mapped(*numeric)) {
      return Err(std::string("an IPv4-mapped address, which RDMA does not take; write the IPv4 address itself"));
    }
    return std::vector<SocketAddress>{*numeric};
  }
  if (const ZonedHost parts = SplitZone(host); parts.zone && ParseAddress(parts.address, port)) {
    if (parts.address.find(':') == std::string_view::npos) return Err(std::string("an IPv4 address has no zone"));
    return Err("this host has no network interface '" + std::string(*parts.zone) + "'");
  }
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list); error != 0) {
    return Err(std::string(gai_strerror(error)));
  }
  std::vector<SocketAddress> addresses;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const addrinfo* entry = list; entry != nullptr && addresses.size() < kAddressesMax; entry = entry->ai_next) {
      if (entry->ai_family != family || entry->ai_addrlen > sizeof(sockaddr_storage)) continue;
      SocketAddress address;
      CopyBytes(AsMutableBytes(&address.storage, sizeof(address.storage)), AsBytes(entry->ai_addr, entry->ai_addrlen));
      const bool known = std::any_of(addresses.begin(), addresses.end(), [&](const SocketAddress& other) {
        return std::memcmp(&other.storage, &address.storage, sizeof(address.storage)) == 0;
      });
      if (!known) addresses.push_back(address);
    }
  }
  freeaddrinfo(list);
  if (addresses.empty()) return Err(std::string("the name has no IP address"));
  return addresses;
}

}  // namespace stagecoach::rpcrdma::internal
