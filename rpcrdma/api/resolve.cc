#include "rpcrdma/api/resolve.h"

#include <arpa/inet.h>
#include <netdb.h>

#include <algorithm>
#include <cstring>

#include "base/bytes.h"

namespace stagecoach::rpcrdma::internal {

SocketAddress CopyAddress(const sockaddr* address) {
  SocketAddress copy;
  CopyBytes(AsMutableBytes(&copy.storage, sizeof(copy.storage)),
            AsBytes(address, address->sa_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in)));
  return copy;
}

std::optional<SocketAddress> ParseAddress(std::string_view host, uint16_t port) {
  const std::string text(host);
  SocketAddress result;
  sockaddr_in in = {};
  if (inet_pton(AF_INET, text.c_str(), &in.sin_addr) == 1) {
    in.sin_family = AF_INET;
    in.sin_port = htons(port);
    std::memcpy(&result.storage, &in, sizeof(in));
    return result;
  }
  sockaddr_in6 in6 = {};
  if (inet_pton(AF_INET6, text.c_str(), &in6.sin6_addr) == 1) {
    in6.sin6_family = AF_INET6;
    in6.sin6_port = htons(port);
    std::memcpy(&result.storage, &in6, sizeof(in6));
    return result;
  }
  return std::nullopt;
}

Result<std::vector<SocketAddress>, std::string> ResolveHost(const std::string& host, uint16_t port) {
  if (const auto numeric = ParseAddress(host, port)) return std::vector<SocketAddress>{*numeric};
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
