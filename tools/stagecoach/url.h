// URLs of the CLI: stagecoach://HOST[:PORT]/PATH, and HOST:PORT of --listen.
//
// HOST is a name, an IPv4 address, or an IPv6 address in brackets. In PATH, %HH is the byte of that value (RFC 3986);
// what cannot be a path of the bulk file program ("..", "%2f" in a name) is refused here already.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.h"
#include "rpcrdma/ulb/file/types.h"

namespace stagecoach::cli {

// The port IANA registered for NFS over RDMA.
inline constexpr uint16_t kDefaultPort = 20049;

struct HostPort {
  std::string host;  // without brackets
  uint16_t port = kDefaultPort;
  bool operator==(const HostPort&) const = default;
};

struct Url {
  HostPort server;
  rpcrdma::file::Path path;
  bool ends_with_slash = false;  // "directory", where it makes a difference; also for an empty path
};

// Errors are one line that quotes the text.
Result<Url, std::string> ParseUrl(std::string_view text);
// "HOST", "HOST:PORT", "[IPv6]:PORT". Port 0 is allowed.
Result<HostPort, std::string> ParseHostPort(std::string_view text);

// "127.0.0.1:20049", "[::1]:20049".
std::string ToString(const HostPort& server);
// "stagecoach://127.0.0.1:20049/a/b", escaped so that ParseUrl and a terminal both accept it.
std::string ToString(const HostPort& server, const rpcrdma::file::Path& path);

// 127.0.0.0/8, ::1 and "localhost": addresses that only this host reaches.
bool IsLoopback(std::string_view host);

}  // namespace stagecoach::cli
