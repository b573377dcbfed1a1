// Host names and addresses.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"

namespace stagecoach::rpcrdma::internal {

struct SocketAddress {
  sockaddr_storage storage = {};
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// A numeric IPv4 or IPv6 address; nullopt when `host` is not one. Asks nobody.
std::optional<SocketAddress> ParseAddress(std::string_view host, uint16_t port);

// Any host name, by the system's resolver: blocks. The error says what is wrong, as a clause.
Result<SocketAddress, std::string> ResolveHost(const std::string& host, uint16_t port);

// "10.0.0.1:20049", "[::1]:20049".
std::string FormatAddress(const sockaddr* address);
// "host:port", with brackets where they are needed.
std::string FormatHostPort(std::string_view host, uint16_t port);

}  // namespace stagecoach::rpcrdma::internal
