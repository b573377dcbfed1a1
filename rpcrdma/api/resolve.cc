#include "rpcrdma/api/resolve.h"

#include <arpa/inet.h>
#include <netdb.h>

#include <cstring>

#include "base/bytes.h"

namespace stagecoach::rpcrdma::internal {

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

Result<SocketAddress, std::string> ResolveHost(const std::string& host, uint16_t port) {
  if (const auto numeric = ParseAddress(host, port)) return *numeric;
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list); error != 0) {
    return Err(std::string(gai_strerror(error)));
  }
  // IPv4 first: "localhost" names both, and servers listen on 127.0.0.1 unless told otherwise.
  const addrinfo* chosen = list;
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
    if (entry->ai_family == AF_INET) {
      chosen = entry;
      break;
    }
  }
  SocketAddress result;
  CopyBytes(AsMutableBytes(&result.storage, sizeof(result.storage)), AsBytes(chosen->ai_addr, chosen->ai_addrlen));
  freeaddrinfo(list);
  return result;
}

std::string FormatAddress(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = {};
  if (address->sa_family == AF_INET) {
    const auto* in = reinterpret_cast<const sockaddr_in*>(address);
    inet_ntop(AF_INET, &in->sin_addr, text, sizeof(text));
    return FormatHostPort(text, ntohs(in->sin_port));
  }
  if (address->sa_family == AF_INET6) {
    const auto* in6 = reinterpret_cast<const sockaddr_in6*>(address);
    inet_ntop(AF_INET6, &in6->sin6_addr, text, sizeof(text));
    return FormatHostPort(text, ntohs(in6->sin6_port));
  }
  return "address of family " + std::to_string(address->sa_family);
}

std::string FormatHostPort(std::string_view host, uint16_t port) {
  const bool brackets = host.find(':') != std::string_view::npos;
  return (brackets ? "[" + std::string(host) + "]" : std::string(host)) + ":" + std::to_string(port);
}

}  // namespace stagecoach::rpcrdma::internal
