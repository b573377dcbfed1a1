// URLs of the CLI: stagecoach://HOST[:PORT]/PATH, HOST:PORT of --listen, and HOST of commands that can look a port up.
//
// HOST is a name, an IPv4 address, or an IPv6 address in brackets, which may have a zone: [fe80::1%eth0] (RFC 4007
// section 11), and in URLs also [fe80::1%25eth0] (RFC 6874), the form that is printed there. Whether the zone is there
// is for those to say who resolve the host. In PATH, %HH is the byte of that value (RFC 3986); what cannot be a path of
// the bulk file program ("..", "%2f" in a name) is refused here already.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"
#include "rpcrdma/bind/universal_address.h"
#include "rpcrdma/ulb/file/types.h"

namespace stagecoach::cli {

// That of NFS over RDMA, which nobody else listens on.
inline constexpr uint16_t kDefaultPort = rpcrdma::kNfsRdmaPort;

struct HostPort {
  std::string host;  // without brackets; with its zone: "fe80::1%eth0"
  uint16_t port = kDefaultPort;
  bool operator==(const HostPort&) const = default;
};

struct Url {
  HostPort server;
  rpcrdma::file::Path path;
  bool ends_with_slash = false;  // "directory", where it makes a difference; also for an empty path
};

// A server whose port may be for others to say.
struct Server {
  std::string host;  // without brackets
  std::optional<uint16_t> port;
  bool operator==(const Server&) const = default;
};

// Errors are one line that quotes the text.
Result<Url, std::string> ParseUrl(std::string_view text);
// "HOST", "HOST:PORT", "[IPv6]:PORT". Port 0 is allowed.
Result<HostPort, std::string> ParseHostPort(std::string_view text);
// A URL, or "HOST", "HOST:PORT", "[IPv6]", "[IPv6]:PORT", or an IPv6 address alone. A URL has the default port unless
// it names one.
Result<Server, std::string> ParseServer(std::string_view text);

// "127.0.0.1:20049", "[::1]:20049", "[fe80::1%eth0]:20049".
std::string ToString(const HostPort& server);
// The numeric form of an IPv4 or IPv6 address.
HostPort ToHostPort(const sockaddr_storage& address);
// "stagecoach://127.0.0.1:20049/a/b", escaped so that ParseUrl and a terminal both accept it.
std::string ToString(const HostPort& server, const rpcrdma::file::Path& path);

// 127.0.0.0/8, ::1 in whatever zone, and "localhost": addresses that only this host reaches.
bool IsLoopback(std::string_view host);

}  // namespace stagecoach::cli
