// Numeric addresses with their zones, and hosts that are none.
#include "rpcrdma/api/resolve.h"

#include <gtest/gtest.h>
#include <net/if.h>

#include "rpcrdma/verbs/address_text.h"

namespace stagecoach::rpcrdma::internal {
namespace {

std::string Parsed(std::string_view host) {
  const auto address = ParseAddress(host, 7);
  return address ? FormatAddress(address->get()) : "none";
}

std::string Fault(const std::string& host) {
  const auto addresses = ResolveHost(host, 7);
  return addresses ? FormatAddress(addresses->front().get()) : addresses.error();
}

TEST(Resolve, NumericAddressesWithAndWithoutZones) {
  const std::string lo = std::to_string(if_nametoindex("lo"));
  EXPECT_EQ(Parsed("10.0.0.1"), "10.0.0.1:7");
  EXPECT_EQ(Parsed("2001:db8::1"), "[2001:db8::1]:7");
  for (const std::string& zone : {std::string("lo"), lo}) {
    EXPECT_EQ(Parsed("fe80::1%" + zone), "[fe80::1%lo]:7");
    EXPECT_EQ(Parsed("::1%" + zone), "[::1%lo]:7");
    EXPECT_EQ(Fault("fe80::1%" + zone), "[fe80::1%lo]:7");
  }
  for (const char* none : {"", "%", "%lo", "10.0.0.1%lo", "fe80::1%", "fe80::1%nothing0", "name", "name%lo"}) {
    EXPECT_EQ(Parsed(none), "none") << none;
  }
  EXPECT_EQ(Parsed(std::string_view("::1\0x", 5)), "none");
}

TEST(Resolve, AZoneThatThisHostDoesNotHaveIsNamed) {
  EXPECT_EQ(Fault("fe80::1%nothing0"), "this host has no network interface 'nothing0'");
  EXPECT_EQ(Fault("::1%4294967295"), "this host has no network interface '4294967295'");
  EXPECT_EQ(Fault("fe80::1%"), "this host has no network interface ''");
  EXPECT_EQ(Fault("10.0.0.1%lo"), "an IPv4 address has no zone");
}

TEST(Resolve, AnIpv4MappedAddressIsRefusedAndTheReasonSaid) {
  for (const char* mapped : {"::ffff:10.77.0.1", "::FFFF:7f00:1", "::ffff:0:0"}) {
    EXPECT_EQ(Fault(mapped), "an IPv4-mapped address, which RDMA does not take; write the IPv4 address itself")
        << mapped;
  }
  EXPECT_TRUE(ResolveHost("::fffe:10.77.0.1", 7));
}

}  // namespace
}  // namespace stagecoach::rpcrdma::internal
