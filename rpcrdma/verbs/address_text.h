// Addresses as text: for messages, traces, and wherever a peer is told from others by its host.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace stagecoach::rpcrdma::internal {

// "10.0.0.1:20049", "[::1]:20049"; "address of family 27" where it is neither IPv4 nor IPv6.
std::string FormatAddress(const sockaddr* address);
// The same without the port, and without brackets: "10.0.0.1", "::1".
std::string FormatHost(const sockaddr* address);
// "host:port", with brackets where they are needed.
std::string FormatHostPort(std::string_view host, uint16_t port);

}  // namespace stagecoach::rpcrdma::internal
