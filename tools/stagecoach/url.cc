#include "tools/stagecoach/url.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>

#include <algorithm>
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

// Where a host begins to be a zone; the size of the text where there is none.
size_t ZoneOf(std::string_view host) {
  return std::min(host.find('%'), host.size());
}

std::optional<in6_addr> ParseIpv6(std::string_view host) {
  in6_addr address;
  const std::string text(host.substr(0, ZoneOf(host)));
  if (text.find('\0') != std::string::npos || ::inet_pton(AF_INET6, text.c_str(), &address) != 1) return std::nullopt;
  return address;
}

// What is wrong with an IPv6 address and its zone; empty: nothing.
std::string_view FaultOfIpv6(std::string_view host) {
  const auto address = ParseIpv6(host);
  if (!address) return "no IPv6 address in the brackets";
  if (IN6_IS_ADDR_V4MAPPED(&*address)) return "IPv4-mapped addresses are not taken; write the IPv4 address itself";
  // No interface has a name with one in it.
  if (host.find(':', ZoneOf(host)) != std::string_view::npos) {
    return "an address with a port goes in brackets: [fe80::1%eth0]:20049";
  }
  if (ZoneOf(host) + 1 == host.size()) return "an interface is to follow '%': [fe80::1%eth0]:20049";
  if (IN6_IS_ADDR_LINKLOCAL(&*address) && ZoneOf(host) == host.size()) {
    return "a link-local address is nothing without its interface: [fe80::1%eth0]:20049";
  }
  return {};
}

// RFC 6874 section 2.
std::string EscapeZone(std::string_view zone) {
  std::string escaped;
  for (const char c : zone) {
    const bool plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                       std::string_view("-._~").find(c) != std::string_view::npos;
    escaped += plain ? std::string(1, c) : fmt::format("%{:02x}", static_cast<uint8_t>(c));
  }
  return escaped;
}

// Where a text stands: URLs alone escape zones.
enum class Form { kPlain, kUrl };

// The error is what is wrong, without the text.
Result<Server, std::string_view> SplitServer(std::string_view text, Form form = Form::kPlain) {
  const auto fail = [](std::string_view what) { return Err(what); };
  Server result;
  std::string_view rest;
  if (text.starts_with('[')) {
    const size_t close = text.find(']');
    if (close == std::string_view::npos) return fail("'[' without ']'");
    result.host = text.substr(1, close - 1);
    const size_t zone = ZoneOf(result.host);
    // "%25" alone is the interface of number 25.
    if (form == Form::kUrl && result.host.compare(zone, 3, "%25") == 0 && result.host.size() > zone + 3) {
      const auto unescaped = Unescape(std::string_view(result.host).substr(zone + 3));
      if (!unescaped) return fail("in a zone, '%' stands before two hexadecimal digits");
      result.host = result.host.substr(0, zone) + "%" + *unescaped;
    }
    if (const std::string_view fault = FaultOfIpv6(result.host); !fault.empty()) return fail(fault);
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

Result<HostPort, std::string_view> SplitHostPort(std::string_view text, Form form = Form::kPlain) {
  return SplitServer(text, form).map([](const Server& server) {
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
  const auto fail = [&](std::string_view what) { return Err(fmt::format("'{}': {}", Printable(text), what)); };
  if (ParseIpv6(text)) {
    auto server = SplitServer(fmt::format("[{}]", text));
    if (!server) return fail(server.error());
    return std::move(*server);
  }
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
  auto server = SplitHostPort(rest.substr(0, slash), Form::kUrl);
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
  HostPort shown = server;
  if (const size_t zone = ZoneOf(server.host); zone < server.host.size()) {
    shown.host = server.host.substr(0, zone) + "%25" + EscapeZone(std::string_view(server.host).substr(zone + 1));
  }
  std::string text = std::string(kScheme) + ToString(shown);
  for (const std::string& name : path) text += "/" + Escape(name);
  if (path.empty()) text += '/';
  return text;
}

bool IsLoopback(std::string_view host) {
  const std::string name(host);
  if (name == "localhost") return true;
  in_addr v4;
  if (::inet_pton(AF_INET, name.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  const auto v6 = ParseIpv6(host);
  return v6 && IN6_IS_ADDR_LOOPBACK(&*v6);
}

}  // namespace stagecoach::cli
