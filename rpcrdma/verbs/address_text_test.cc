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
