#include "emu/fabric/address.h"

#include <gtest/gtest.h>

namespace stagecoach::emu {
namespace {

IpEndpoint Must(std::string_view text, uint16_t port) {
  const auto endpoint = IpEndpoint::Parse(text, port);
  EXPECT_TRUE(endpoint.has_value()) << text;
  return endpoint.value_or(IpEndpoint{});
}

TEST(IpEndpoint, PrintsIpv4AndBracketsIpv6) {
  EXPECT_EQ(Must("10.0.0.1", 20049).ToString(), "10.0.0.1:20049");
  EXPECT_EQ(Must("::1", 20049).ToString(), "[::1]:20049");
  EXPECT_EQ(Must("2001:0db8::0001", 1).AddressString(), "2001:db8::1");
  EXPECT_EQ(Must("fe80::1%3", 7).ToString(), "[fe80::1%3]:7");
}

TEST(IpEndpoint, RefusesWhatIsNotANumericAddress) {
  for (const std::string_view text :
       {std::string_view("localhost"), std::string_view(""), std::string_view("10.0.0"), std::string_view("10.0.0.256"),
        std::string_view(":::"), std::string_view("::1%"), std::string_view("::1%eth0"), std::string_view("10.0.0.1%2"),
        std::string_view("10.0.0.1\0x", 10), std::string_view("[::1]")}) {
    EXPECT_FALSE(IpEndpoint::Parse(text, 1).has_value()) << text;
  }
}

TEST(IpEndpoint, SurvivesTheRoundTripThroughSockaddr) {
  for (const char* text : {"127.0.0.1", "0.0.0.0", "::", "2001:db8::7", "fe80::9%4"}) {
    const IpEndpoint endpoint = Must(text, 4791);
    sockaddr_storage storage;
    const socklen_t length = endpoint.ToSockaddr(&storage);
    EXPECT_GT(length, 0u);
    EXPECT_EQ(IpEndpoint::FromSockaddr(reinterpret_cast<const sockaddr*>(&storage)), endpoint) << text;
  }
}

TEST(IpEndpoint, NoAddressHasNoSockaddrAndOtherFamiliesAreRefused) {
  sockaddr_storage storage;
  EXPECT_EQ(IpEndpoint{}.ToSockaddr(&storage), 0u);
  storage.ss_family = AF_UNIX;
  EXPECT_FALSE(IpEndpoint::FromSockaddr(reinterpret_cast<const sockaddr*>(&storage)).has_value());
  EXPECT_FALSE(IpEndpoint::FromSockaddr(nullptr).has_value());
}

TEST(IpEndpoint, KnowsUnspecifiedAndLoopback) {
  EXPECT_TRUE(IpEndpoint{}.IsUnspecified());
  EXPECT_TRUE(Must("0.0.0.0", 5).IsUnspecified());
  EXPECT_TRUE(Must("::", 5).IsUnspecified());
  EXPECT_FALSE(Must("::1", 5).IsUnspecified());
  EXPECT_TRUE(Must("127.3.4.5", 0).IsLoopback());
  EXPECT_TRUE(Must("::1", 0).IsLoopback());
  EXPECT_TRUE(Must("::ffff:127.0.0.1", 0).IsLoopback());
  EXPECT_FALSE(Must("::2", 0).IsLoopback());
  EXPECT_FALSE(Must("10.0.0.1", 0).IsLoopback());
  EXPECT_FALSE(IpEndpoint{}.IsLoopback());
}

TEST(IpEndpoint, WithPortChangesNothingElse) {
  const IpEndpoint endpoint = Must("2001:db8::7", 1);
  EXPECT_EQ(endpoint.WithPort(2).WithPort(1), endpoint);
  EXPECT_EQ(endpoint.WithPort(2).port, 2);
}

TEST(IpEndpoint, ASourceIsAllThatOneHostCanCallFrom) {
  const auto source = [](const char* address) { return Must(address, 7).Source().ToString(); };
  EXPECT_EQ(source("10.0.0.7"), "10.0.0.7:0");
  EXPECT_EQ(source("2001:db8:1:2:ffff::1"), "[2001:db8:1:2::]:0");
  EXPECT_EQ(source("2001:db8:1:3::1"), "[2001:db8:1:3::]:0");
  EXPECT_EQ(source("fe80::1"), "[fe80::1]:0");
  EXPECT_EQ(source("::ffff:10.0.0.7"), Must("::ffff:10.0.0.7", 0).ToString());
  for (const char* loopback : {"127.0.0.1", "127.255.255.255", "::1", "::ffff:127.0.0.2"}) {
    EXPECT_EQ(source(loopback), "127.0.0.1:0") << loopback;
  }
}

}  // namespace
}  // namespace stagecoach::emu
