// Host names and addresses.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace stagecoach::rpcrdma::internal {

struct SocketAddress {
  sockaddr_storage storage = {};
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// `address` is of IPv4 or IPv6.
SocketAddress CopyAddress(const sockaddr* address);

// A numeric IPv4 or IPv6 address, the latter with its zone where it has one: "fe80::1%eth0", "fe80::1%2" (RFC 4007
// section 11). nullopt when `host` is not one, or this host has no such zone. Asks nobody.
std::optional<SocketAddress> ParseAddress(std::string_view host, uint16_t port);

// No more addresses of one name are used.
inline constexpr size_t kAddressesMax = 16;

// All addresses of a host name, each once, by the system's resolver: blocks. IPv4 first: "localhost" names both, and
// servers listen on 127.0.0.1 unless told otherwise. Never empty; the error says what is wrong, as a clause, and names
// a zone that this host does not have.
Result<std::vector<SocketAddress>, std::string> ResolveHost(const std::string& host, uint16_t port);

}  // namespace stagecoach::rpcrdma::internal
