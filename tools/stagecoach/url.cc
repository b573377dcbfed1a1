#include "tools/stagecoach/url.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>

#include <charconv>
#include <optional>
#include <utility>

#include "rpcrdma/ulb/file/names.h"

namespace stagecoach::cli {
namespace {

using rpcrdma::file::Printable;

constexpr std::string_view kScheme = "stagecoach://";

std::optional<uint8_t> HexByte(std::string_view text) {
  uint8_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (error != std::errc() || end != text.data() + text.size() || text.size() != 2) return std::nullopt;
  return value;
}

std::optional<std::string> Unescape(std::string_view text) {
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      plain += text[i];
      continue;
    }
    const auto byte = HexByte(text.substr(i + 1, 2));
    if (!byte) return std::nullopt;
    plain += static_cast<char>(*byte);
    i += 2;
  }
  return plain;
}

std::string Escape(std::string_view name) {
  std::string escaped;
  for (char c : name) {
    const auto byte = static_cast<uint8_t>(c);
    if (byte <= 0x20 || byte >= 0x7f || c == '%' || c == '?' || c == '#' || c == '\\') {
      escaped += fmt::format("%{:02x}", byte);
    } else {
      escaped += c;
    }
  }
  return escaped;
}

// The error is what is wrong, without the text.
Result<Server, std::string_view> SplitServer(std::string_view text) {
  const auto fail = [](std::string_view what) { return Err(what); };
  Server result;
  std::string_view rest;
  if (text.starts_with('[')) {
    const size_t close = text.find(']');
    if (close == std::string_view::npos) return fail("'[' without ']'");
    result.host = text.substr(1, close - 1);
    in6_addr address;
    if (::inet_pton(AF_INET6, result.host.c_str(), &address) != 1) return fail("no IPv6 address in the brackets");
    rest = text.substr(close + 1);
  } else {
    const size_t colon = text.find(':');
    if (colon != text.rfind(':')) return fail("an IPv6 address goes in brackets: [::1]:20049");
    result.host = text.substr(0, colon);
    rest = colon == std::string_view::npos ? std::string_view() : text.substr(colon);
  }
  if (result.host.empty()) return fail("the host is missing");
  for (char c : result.host) {
    if (static_cast<uint8_t>(c) <= 0x20 || static_cast<uint8_t>(c) >= 0x7f) return fail("not a host name");
  }
  if (rest.empty()) return result;
  if (rest[0] != ':') return fail("after the host comes ':' and a port");
  rest.remove_prefix(1);
  uint16_t port = 0;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), port);
  if (error != std::errc() || end != rest.data() + rest.size()) return fail("the port is not a number from 0 to 65535");
  result.port = port;
  return result;
}

Result<HostPort, std::string_view> SplitHostPort(std::string_view text) {
  return SplitServer(text).map([](const Server& server) {
    return HostPort{server.host, server.port.value_or(kDefaultPort)};
  });
}

}  // namespace

Result<HostPort, std::string> ParseHostPort(std::string_view text) {
  auto result = SplitHostPort(text);
  if (!result) return Err(fmt::format("'{}': {}", Printable(text), result.error()));
  return std::move(*result);
}

Result<Server, std::string> ParseServer(std::string_view text) {
  if (text.find("://") != std::string_view::npos) {
    return ParseUrl(text).map([](const Url& url) { return Server{url.server.host, url.server.port}; });
  }
  in6_addr address;
  if (::inet_pton(AF_INET6, std::string(text).c_str(), &address) == 1 && text.find('\0') == std::string_view::npos) {
    return Server{std::string(text), std::nullopt};
  }
  const auto fail = [&](std::string_view what) { return Err(fmt::format("'{}': {}", Printable(text), what)); };
  // Whoever writes a path means a URL.
  if (text.find('/') != std::string_view::npos) {
    return fail("neither HOST nor HOST:PORT nor a URL of the form stagecoach://HOST:PORT/");
  }
  auto server = SplitServer(text);
  if (!server) return fail(server.error());
  if (server->port == 0) return fail("port 0 is no address");
  return std::move(*server);
}

Result<Url, std::string> ParseUrl(std::string_view text) {
  const auto fail = [&](std::string_view what) { return Err(fmt::format("'{}': {}", Printable(text), what)); };
  if (!text.starts_with(kScheme)) return fail("not a URL of the form stagecoach://HOST:PORT/PATH");
  std::string_view rest = text.substr(kScheme.size());
  const size_t slash = std::min(rest.find('/'), rest.size());
  auto server = SplitHostPort(rest.substr(0, slash));
  if (!server) return fail(server.error());
  if (server->port == 0) return fail("port 0 is no address");
  rest.remove_prefix(slash);

  Url url{std::move(*server), {}, rest.empty() || rest.ends_with('/')};
  for (const std::string& part : rpcrdma::file::SplitPath(rest)) {
    auto name = Unescape(part);
    if (!name) return fail("'%' stands before two hexadecimal digits; the character itself is %25");
    if (!rpcrdma::file::IsValidName(*name)) return fail(fmt::format("'{}' is not allowed in a path", Printable(*name)));
    url.path.push_back(std::move(*name));
  }
  if (!rpcrdma::file::IsValidPath(url.path)) return fail("the path is too deep or too long");
  return url;
}

std::string ToString(const HostPort& server) {
  return server.host.find(':') == std::string::npos ? fmt::format("{}:{}", server.host, server.port)
                                                    : fmt::format("[{}]:{}", server.host, server.port);
}

HostPort ToHostPort(const sockaddr_storage& address) {
  HostPort result;
  const auto universal = rpcrdma::ToUniversalAddress(reinterpret_cast<const sockaddr*>(&address));
  if (universal) result.port = universal->port;
  // With the scope of a link-local address, which a universal address has no place for.
  char host[NI_MAXHOST] = {};
  const socklen_t size = address.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  if (::getnameinfo(reinterpret_cast<const sockaddr*>(&address), size, host, sizeof(host), nullptr, 0,
                    NI_NUMERICHOST) == 0) {
    result.host = host;
  }
  return result;
}

std::string ToString(const HostPort& server, const rpcrdma::file::Path& path) {
  std::string text = std::string(kScheme) + ToString(server);
  for (const std::string& name : path) text += "/" + Escape(name);
  if (path.empty()) text += '/';
  return text;
}

bool IsLoopback(std::string_view host) {
  const std::string name(host);
  if (name == "localhost") return true;
  in_addr v4;
  if (::inet_pton(AF_INET, name.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6;
  return ::inet_pton(AF_INET6, name.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

}  // namespace stagecoach::cli
