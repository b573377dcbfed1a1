#include "rpcrdma/verbs/address_text.h"

#include <arpa/inet.h>
#include <netinet/in.h>

namespace stagecoach::rpcrdma::internal {

std::string FormatHost(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = {};
  if (address->sa_family == AF_INET) {
    return inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, text, sizeof(text));
  }
  if (address->sa_family == AF_INET6) {
    return inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr, text, sizeof(text));
  }
  return "address of family " + std::to_string(address->sa_family);
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

}  // namespace stagecoach::rpcrdma::internal
