#include "tools/stagecoach/url.h"

#include <gtest/gtest.h>

namespace stagecoach::cli {
namespace {

TEST(Url, HostPortAndPath) {
  const auto url = ParseUrl("stagecoach://127.0.0.1:1234/a/b%20c");
  ASSERT_TRUE(url) << url.error();
  EXPECT_EQ(url->server, (HostPort{"127.0.0.1", 1234}));
  EXPECT_EQ(url->path, (rpcrdma::file::Path{"a", "b c"}));
  EXPECT_FALSE(url->ends_with_slash);
}

TEST(Url, PortAndPathMayBeLeftOut) {
  const auto url = ParseUrl("stagecoach://storage");
  ASSERT_TRUE(url) << url.error();
  EXPECT_EQ(url->server, (HostPort{"storage", kDefaultPort}));
  EXPECT_TRUE(url->path.empty());
  EXPECT_TRUE(url->ends_with_slash);
  EXPECT_TRUE(ParseUrl("stagecoach://storage/dir/")->ends_with_slash);
}

TEST(Url, Ipv6GoesInBrackets) {
  const auto url = ParseUrl("stagecoach://[::1]:99/x");
  ASSERT_TRUE(url) << url.error();
  EXPECT_EQ(url->server, (HostPort{"::1", 99}));
  EXPECT_EQ(ToString(url->server, url->path), "stagecoach://[::1]:99/x");
  EXPECT_FALSE(ParseUrl("stagecoach://::1/x"));
  EXPECT_FALSE(ParseUrl("stagecoach://[::1/x"));
  EXPECT_FALSE(ParseUrl("stagecoach://[127.0.0.1]/x"));
}

TEST(Url, AZoneIsWrittenPlainlyOrEscaped) {
  for (const char* text : {"stagecoach://[fe80::1%25eth0]:99/x", "stagecoach://[fe80::1%eth0]:99/x"}) {
    const auto url = ParseUrl(text);
    ASSERT_TRUE(url) << url.error();
    EXPECT_EQ(url->server, (HostPort{"fe80::1%eth0", 99}));
    EXPECT_EQ(ToString(url->server), "[fe80::1%eth0]:99");
    EXPECT_EQ(ToString(url->server, url->path), "stagecoach://[fe80::1%25eth0]:99/x");
  }
  // By number, 25 among them, and with characters that URLs escape.
  EXPECT_EQ(ParseUrl("stagecoach://[fe80::1%252]/")->server.host, "fe80::1%2");
  EXPECT_EQ(ParseUrl("stagecoach://[fe80::1%2]/")->server.host, "fe80::1%2");
  EXPECT_EQ(ParseUrl("stagecoach://[fe80::1%25]/")->server.host, "fe80::1%25");
  EXPECT_EQ(ParseUrl("stagecoach://[fe80::1%25a%2b%40%25]/")->server.host, "fe80::1%a+@%");
  for (const char* zone : {"eth0", "25", "2", "a+@%", "br-0.100", "25eth0"}) {
    const HostPort server{std::string("fe80::1%") + zone, 1};
    EXPECT_EQ(ParseUrl(ToString(server, {}))->server, server) << zone;
    EXPECT_EQ(*ParseHostPort(ToString(server)), server) << zone;
  }
  EXPECT_EQ(ParseUrl("stagecoach://[::1%lo]/")->server.host, "::1%lo");
}

TEST(Url, AZoneThatCannotBeIsRefusedWithTheReason) {
  const struct {
    const char* host;
    const char* why;
  } cases[] = {
      {"[fe80::1%]", "an interface is to follow '%': [fe80::1%eth0]:20049"},
      {"[fe80::1]", "a link-local address is nothing without its interface: [fe80::1%eth0]:20049"},
      {"[febf::1]:7", "a link-local address is nothing without its interface: [fe80::1%eth0]:20049"},
      {"[10.0.0.1%eth0]", "no IPv6 address in the brackets"},
      {"[%eth0]", "no IPv6 address in the brackets"},
      {"[fe80::1%eth 0]", "not a host name"},
      {"[fe80::1%eth0:7700]", "an address with a port goes in brackets: [fe80::1%eth0]:20049"},
  };
  for (const auto& [host, why] : cases) {
    for (const std::string& text : {std::string(host), std::string("stagecoach://") + host + "/"}) {
      const auto parsed = ParseServer(text);
      ASSERT_FALSE(parsed) << text;
      EXPECT_EQ(parsed.error(), "'" + text + "': " + why);
    }
    EXPECT_FALSE(ParseHostPort(host)) << host;
  }
  EXPECT_EQ(ParseUrl("stagecoach://[fe80::1%25a%zz]/").error(),
            "'stagecoach://[fe80::1%25a%zz]/': in a zone, '%' stands before two hexadecimal digits");
}

TEST(Url, PathsThatCannotBeAreRefusedWithTheReason) {
  for (const char* text :
       {"stagecoach://h/../etc/passwd", "stagecoach://h/a/%2e%2e/b", "stagecoach://h/a%2fb", "stagecoach://h/%00",
        "stagecoach://h/.", "stagecoach://h/.stagecoach.0123456789abcdef.part"}) {
    const auto url = ParseUrl(text);
    ASSERT_FALSE(url) << text;
    EXPECT_NE(url.error().find("not allowed"), std::string::npos) << url.error();
  }
  EXPECT_FALSE(ParseUrl("stagecoach://h/100%"));
  EXPECT_FALSE(ParseUrl("stagecoach://h/%zz"));
  EXPECT_TRUE(ParseUrl("stagecoach://h/100%25"));
}

TEST(Url, WhatIsNoUrlIsRefused) {
  for (const char* text :
       {"", "stagecoach:/h/x", "http://h/x", "stagecoach:///x", "stagecoach://h:0/x", "stagecoach://h:65536/x",
        "stagecoach://h:12a/x", "stagecoach://h:/x", "stagecoach://a b/x", "stagecoach://h:-1/x"}) {
    EXPECT_FALSE(ParseUrl(text)) << text;
  }
}

TEST(Url, ErrorsDoNotLetControlCharactersThrough) {
  const auto url = ParseUrl("http://\x1b[31m");
  ASSERT_FALSE(url);
  EXPECT_EQ(url.error().find('\x1b'), std::string::npos);
}

TEST(Url, TextFormParsesToTheSameUrl) {
  const rpcrdma::file::Path path = {"a b", "100%", "\xff", "x\\y", "#?"};
  const auto url = ParseUrl(ToString(HostPort{"h", 1}, path));
  ASSERT_TRUE(url) << url.error();
  EXPECT_EQ(url->path, path);
}

TEST(Server, APortThatIsNotGivenIsForOthersToSay) {
  const struct {
    const char* text;
    Server server;
  } cases[] = {
      {"storage", {"storage", std::nullopt}},
      {"storage:7", {"storage", 7}},
      {"192.0.2.1", {"192.0.2.1", std::nullopt}},
      {"192.0.2.1:7", {"192.0.2.1", 7}},
      {"::1", {"::1", std::nullopt}},
      {"2001:db8::7", {"2001:db8::7", std::nullopt}},
      {"[::1]", {"::1", std::nullopt}},
      {"[::1]:7", {"::1", 7}},
      {"fe80::1%eth0", {"fe80::1%eth0", std::nullopt}},
      {"::1%lo", {"::1%lo", std::nullopt}},
      {"[fe80::1%eth0]", {"fe80::1%eth0", std::nullopt}},
      {"[fe80::1%eth0]:7", {"fe80::1%eth0", 7}},
      {"stagecoach://[fe80::1%25eth0]:7/", {"fe80::1%eth0", 7}},
      {"stagecoach://storage/x", {"storage", kDefaultPort}},
      {"stagecoach://[::1]:7/", {"::1", 7}},
  };
  for (const auto& [text, server] : cases) {
    const auto parsed = ParseServer(text);
    ASSERT_TRUE(parsed) << parsed.error();
    EXPECT_EQ(*parsed, server) << text;
  }
}

TEST(Server, WhatIsNoneIsRefusedWithTheReason) {
  const struct {
    std::string text;
    const char* why;
  } cases[] = {
      {"", "the host is missing"},
      {":7", "the host is missing"},
      {"[::1", "'[' without ']'"},
      {"[127.0.0.1]", "no IPv6 address in the brackets"},
      {"fe80::1", "a link-local address is nothing without its interface: [fe80::1%eth0]:20049"},
      {"fe80::1%eth0:7700", "an address with a port goes in brackets: [fe80::1%eth0]:20049"},
      {"2001:db8::1%:", "an address with a port goes in brackets: [fe80::1%eth0]:20049"},
      {"[::ffff:10.77.0.1]:7700", "IPv4-mapped addresses are not taken; write the IPv4 address itself"},
      {"::ffff:10.77.0.1", "IPv4-mapped addresses are not taken; write the IPv4 address itself"},
      {"stagecoach://[::ffff:a4d:1]/", "IPv4-mapped addresses are not taken; write the IPv4 address itself"},
      {"fe80::1%", "an interface is to follow '%': [fe80::1%eth0]:20049"},
      {"1:2:3", "an IPv6 address goes in brackets: [::1]:20049"},
      {"storage:0", "port 0 is no address"},
      {"storage:65536", "the port is not a number from 0 to 65535"},
      {"storage:nfs", "the port is not a number from 0 to 65535"},
      {"storage/x", "neither HOST nor HOST:PORT nor a URL of the form stagecoach://HOST:PORT/"},
      {"http://storage/", "not a URL of the form stagecoach://HOST:PORT/PATH"},
      {"stagecoach://storage:0/", "port 0 is no address"},
  };
  for (const auto& [text, why] : cases) {
    const auto parsed = ParseServer(text);
    ASSERT_FALSE(parsed) << text;
    EXPECT_EQ(parsed.error(), "'" + text + "': " + why);
  }
  EXPECT_FALSE(ParseServer(std::string_view("::1\0x", 5)));
}

TEST(Url, LoopbackIsOnlyWhatThisHostReaches) {
  for (const char* host : {"127.0.0.1", "127.9.9.9", "::1", "::1%lo", "localhost"})
    EXPECT_TRUE(IsLoopback(host)) << host;
  for (const char* host :
       {"0.0.0.0", "::", "10.0.0.1", "localhost.example", "128.0.0.1", "::ffff:127.0.0.1", "fe80::1%lo"}) {
    EXPECT_FALSE(IsLoopback(host)) << host;
  }
}

}  // namespace
}  // namespace stagecoach::cli
