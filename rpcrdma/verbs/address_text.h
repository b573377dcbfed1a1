// Addresses as text: for messages, traces, and wherever a peer is told from others by its host.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace stagecoach::rpcrdma::internal {

// "10.0.0.1:20049", "[::1]:20049", "[fe80::1%eth0]:20049"; "address of family 27" where it is neither IPv4 nor IPv6.
std::string FormatAddress(const sockaddr* address);
// The same without the port, and without brackets: "10.0.0.1", "::1", "fe80::1%eth0".
std::string FormatHost(const sockaddr* address);
// "host:port", with brackets where they are needed.
std::string FormatHostPort(std::string_view host, uint16_t port);

// Whom limits by address count a peer at `remote` as, which has connected to `local`: "10.0.0.7"; "2001:db8:1:2::/64",
// as one host there may connect from any address of the network; or "this host", for loopback and for whoever connects
// from the address that it connects to. Link-local addresses of IPv6 count each by itself.
std::string SourceOf(const sockaddr* remote, const sockaddr* local);

// Zones (RFC 4007 section 11.2) are interfaces, by their names or by their numbers. nullopt: this host has none like
// it.
std::optional<uint32_t> FindZone(std::string_view zone);

}  // namespace stagecoach::rpcrdma::internal
