#include "rpcrdma/verbs/address_text.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <net/if.h>
#include <netinet/in.h>

#include <string>
#include <string_view>

namespace stagecoach::rpcrdma::internal {
namespace {

sockaddr_storage Ipv4(const char* host, uint16_t port) {
  sockaddr_storage storage = {};
  auto* in = reinterpret_cast<sockaddr_in*>(&storage);
  in->sin_family = AF_INET;
  in->sin_port = htons(port);
  EXPECT_EQ(inet_pton(AF_INET, host, &in->sin_addr), 1);
  return storage;
}

sockaddr_storage Ipv6(const char* host, uint16_t port) {
  sockaddr_storage storage = {};
  auto* in6 = reinterpret_cast<sockaddr_in6*>(&storage);
  in6->sin6_family = AF_INET6;
  in6->sin6_port = htons(port);
  EXPECT_EQ(inet_pton(AF_INET6, host, &in6->sin6_addr), 1);
  return storage;
}

std::string Address(const sockaddr_storage& storage) {
  return FormatAddress(reinterpret_cast<const sockaddr*>(&storage));
}
std::string Host(const sockaddr_storage& storage) {
  return FormatHost(reinterpret_cast<const sockaddr*>(&storage));
}

TEST(AddressText, HasBracketsWhereAPortFollowsColons) {
  EXPECT_EQ(Address(Ipv4("10.0.0.7", 53422)), "10.0.0.7:53422");
  EXPECT_EQ(Address(Ipv6("fe80::1", 20049)), "[fe80::1]:20049");
  EXPECT_EQ(FormatHostPort("storage.example", 111), "storage.example:111");
  EXPECT_EQ(FormatHostPort("::1", 111), "[::1]:111");
}

TEST(AddressText, AHostIsTheSameWhateverItsPort) {
  EXPECT_EQ(Host(Ipv4("10.0.0.7", 1)), "10.0.0.7");
  EXPECT_EQ(Host(Ipv6("fe80::1", 0)), "fe80::1");
  EXPECT_EQ(Host(Ipv6("2001:db8::255.255.255.255", 65535)), "2001:db8::ffff:ffff");
}

TEST(AddressText, ASourceIsAnAddressOrANetworkOfIpv6OrThisHost) {
  const auto source_of = [](const sockaddr_storage& remote, const sockaddr_storage& local) {
    return SourceOf(reinterpret_cast<const sockaddr*>(&remote), reinterpret_cast<const sockaddr*>(&local));
  };
  const sockaddr_storage here4 = Ipv4("10.0.0.1", 20049);
  const sockaddr_storage here6 = Ipv6("2001:db8::1", 20049);
  EXPECT_EQ(source_of(Ipv4("10.0.0.7", 1), here4), "10.0.0.7");
  EXPECT_EQ(source_of(Ipv4("10.0.0.7", 2), here4), "10.0.0.7");
  EXPECT_EQ(source_of(Ipv6("::ffff:10.0.0.7", 2), Ipv6("::ffff:10.0.0.1", 20049)), "10.0.0.7");
  EXPECT_EQ(source_of(Ipv6("2001:db8:1:2:3:4:5:6", 1), here6), "2001:db8:1:2::/64");
  EXPECT_EQ(source_of(Ipv6("2001:db8:1:2:ffff:ffff:ffff:ffff", 1), here6), "2001:db8:1:2::/64");
  EXPECT_EQ(source_of(Ipv6("2001:db8:1:3::", 1), here6), "2001:db8:1:3::/64");
  // All hosts of a link are in the network of the link-local addresses.
  EXPECT_EQ(source_of(Ipv6("fe80::1", 1), Ipv6("fe80::2", 20049)), "fe80::1");
  EXPECT_EQ(source_of(Ipv6("febf::1", 1), Ipv6("fe80::2", 20049)), "febf::1");
  EXPECT_EQ(source_of(Ipv6("fec0::1", 1), here6), "fec0::/64");
  for (const char* loopback : {"127.0.0.1", "127.0.0.2", "127.255.255.255"}) {
    EXPECT_EQ(source_of(Ipv4(loopback, 1), Ipv4("127.0.0.1", 20049)), "this host") << loopback;
    EXPECT_EQ(source_of(Ipv6((std::string("::ffff:") + loopback).c_str(), 1), here6), "this host") << loopback;
  }
  EXPECT_EQ(source_of(Ipv4("126.255.255.255", 1), here4), "126.255.255.255");
  EXPECT_EQ(source_of(Ipv4("128.0.0.0", 1), here4), "128.0.0.0");
  EXPECT_EQ(source_of(Ipv6("::1", 1), Ipv6("::1", 20049)), "this host");
  // It connects to its own address.
  EXPECT_EQ(source_of(Ipv4("10.0.0.1", 1), here4), "this host");
  EXPECT_EQ(source_of(Ipv6("2001:db8::1", 1), here6), "this host");
  EXPECT_EQ(source_of(Ipv6("2001:db8::2", 1), here6), "2001:db8::/64");
}

TEST(AddressText, AZoneIsNamedAsItIsWritten) {
  sockaddr_storage address = Ipv6("fe80::1", 20049);
  uint32_t& scope = reinterpret_cast<sockaddr_in6*>(&address)->sin6_scope_id;
  scope = if_nametoindex("lo");
  EXPECT_EQ(Address(address), "[fe80::1%lo]:20049");
  EXPECT_EQ(Host(address), "fe80::1%lo");
  // An interface that has gone.
  scope = 0xffffffff;
  EXPECT_EQ(Host(address), "fe80::1%4294967295");
}

TEST(AddressText, ZonesAreFoundByNameAndByNumber) {
  const uint32_t lo = if_nametoindex("lo");
  ASSERT_NE(lo, 0u);
  EXPECT_EQ(FindZone("lo"), lo);
  EXPECT_EQ(FindZone(std::to_string(lo)), lo);
  for (const std::string_view none :
       {"", "0", "4294967295", "4294967296", "nothing0", "lo ", "LO", "-1", "aNameOfMoreThanFifteenCharacters"}) {
    EXPECT_EQ(FindZone(none), std::nullopt) << none;
  }
  EXPECT_EQ(FindZone(std::string_view("lo\0x", 4)), std::nullopt);
}

TEST(AddressText, OtherFamiliesAreNamed) {
  sockaddr_storage other = {};
  other.ss_family = 27;
  EXPECT_EQ(Address(other), "address of family 27");
  EXPECT_EQ(Host(other), "address of family 27");
}

}  // namespace
}  // namespace stagecoach::rpcrdma::internal
