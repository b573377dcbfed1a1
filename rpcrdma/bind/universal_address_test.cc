#include "rpcrdma/bind/universal_address.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>

#include <cstring>

namespace stagecoach::rpcrdma {
namespace {

using Fault = UniversalAddressFault;

// The address that inet_pton makes of `host`, and a port.
UniversalAddress Address(Netid netid, const char* host, uint16_t port) {
  UniversalAddress address{.netid = netid, .port = port};
  EXPECT_EQ(inet_pton(netid == Netid::kRdma ? AF_INET : AF_INET6, host, address.host.data()), 1) << host;
  return address;
}

TEST(Netids, HaveTheRegisteredNames) {
  EXPECT_EQ(ToString(Netid::kRdma), "rdma");
  EXPECT_EQ(ToString(Netid::kRdma6), "rdma6");
  EXPECT_EQ(ParseNetid("rdma"), Netid::kRdma);
  EXPECT_EQ(ParseNetid("rdma6"), Netid::kRdma6);
  for (const char* other : {"", "tcp", "RDMA", "rdma ", "rdma66", "rdm"}) EXPECT_FALSE(ParseNetid(other)) << other;
}

TEST(UniversalAddress, ThePortIsTwoDecimalOctetsBehindTheAddress) {
  const struct {
    Netid netid;
    const char* host;
    uint16_t port;
    const char* text;
  } cases[] = {
      {Netid::kRdma, "192.0.2.1", 20049, "192.0.2.1.78.81"},
      {Netid::kRdma, "0.0.0.0", 0, "0.0.0.0.0.0"},
      {Netid::kRdma, "255.255.255.255", 65535, "255.255.255.255.255.255"},
      {Netid::kRdma, "10.0.0.1", 255, "10.0.0.1.0.255"},
      {Netid::kRdma, "10.0.0.1", 256, "10.0.0.1.1.0"},
      {Netid::kRdma6, "::1", 20049, "::1.78.81"},
      {Netid::kRdma6, "::", 111, "::.0.111"},
      {Netid::kRdma6, "2001:db8::1", 65535, "2001:db8::1.255.255"},
      {Netid::kRdma6, "1:2:3:4:5:6:7:8", 1, "1:2:3:4:5:6:7:8.0.1"},
      {Netid::kRdma6, "::ffff:192.0.2.1", 20049, "::ffff:192.0.2.1.78.81"},
  };
  for (const auto& [netid, host, port, text] : cases) {
    const UniversalAddress address = Address(netid, host, port);
    EXPECT_EQ(ToString(address), text);
    const auto parsed = ParseUniversalAddress(netid, text);
    ASSERT_TRUE(parsed) << text << ": " << ToString(parsed.error());
    EXPECT_EQ(*parsed, address) << text;
  }
}

TEST(UniversalAddress, AnyTextFormOfAnIpv6AddressIsUnderstood) {
  const UniversalAddress address = Address(Netid::kRdma6, "2001:db8::c000:201", 20049);
  for (const char* text : {"2001:db8::c000:201.78.81", "2001:0DB8:0:0:0:0:C000:0201.78.81", "2001:db8::192.0.2.1.78.81",
                           "2001:db8:0:0:0:0:192.0.2.1.78.81"}) {
    EXPECT_EQ(ParseUniversalAddress(Netid::kRdma6, text), address) << text;
  }
  EXPECT_EQ(ToString(address), "2001:db8::c000:201.78.81");
}

TEST(UniversalAddress, MalformedTextIsRefusedWithTheReason) {
  const struct {
    Netid netid;
    std::string text;
    Fault fault;
  } cases[] = {
      {Netid::kRdma, "", Fault::kNoPort},
      {Netid::kRdma, ".", Fault::kNoPort},
      {Netid::kRdma, "1", Fault::kNoPort},
      {Netid::kRdma, "78.81", Fault::kNoPort},
      {Netid::kRdma, ".78.81", Fault::kBadHost},
      {Netid::kRdma, "..", Fault::kBadPort},
      {Netid::kRdma, "192.0.2.1", Fault::kBadHost},
      {Netid::kRdma, "192.0.2.1.78", Fault::kBadHost},
      {Netid::kRdma, "192.0.2.1.2.78.81", Fault::kBadHost},
      {Netid::kRdma, "192.0.2.256.78.81", Fault::kBadHost},
      {Netid::kRdma, "192.0.2.01.78.81", Fault::kBadHost},
      {Netid::kRdma, "192.0..1.78.81", Fault::kBadHost},
      {Netid::kRdma, "192.0.2.1.256.0", Fault::kBadPort},
      {Netid::kRdma, "192.0.2.1.0.256", Fault::kBadPort},
      {Netid::kRdma, "192.0.2.1.078.81", Fault::kBadPort},
      {Netid::kRdma, "192.0.2.1.78.00", Fault::kBadPort},
      {Netid::kRdma, "192.0.2.1.78.", Fault::kBadPort},
      {Netid::kRdma, "192.0.2.1..81", Fault::kBadPort},
      {Netid::kRdma, "192.0.2.1.4e.51", Fault::kBadPort},
      {Netid::kRdma, "192.0.2.1.78.99999999999999999999", Fault::kBadPort},
      {Netid::kRdma, "192.0.2.1.+78.81", Fault::kBadCharacter},
      {Netid::kRdma, "192.0.2.1.-78.81", Fault::kBadCharacter},
      {Netid::kRdma, " 192.0.2.1.78.81", Fault::kBadCharacter},
      {Netid::kRdma, "192.0.2.1.78.81\n", Fault::kBadCharacter},
      {Netid::kRdma, std::string("192.0.2.1\0.78.81", 16), Fault::kBadCharacter},
      {Netid::kRdma, "localhost.78.81", Fault::kBadCharacter},
      {Netid::kRdma, "/run/rpcbind.sock", Fault::kBadCharacter},
      {Netid::kRdma, "::1.78.81", Fault::kBadHost},
      {Netid::kRdma, std::string(54, '1'), Fault::kTooLong},
      {Netid::kRdma6, "192.0.2.1.78.81", Fault::kBadHost},
      {Netid::kRdma6, "1::2::3.78.81", Fault::kBadHost},
      {Netid::kRdma6, "1:2:3:4:5:6:7.78.81", Fault::kBadHost},
      {Netid::kRdma6, "1:2:3:4:5:6:7:8:9.78.81", Fault::kBadHost},
      {Netid::kRdma6, "12345::1.78.81", Fault::kBadHost},
      {Netid::kRdma6, "[::1].78.81", Fault::kBadCharacter},
      {Netid::kRdma6, "fe80::1%eth0.78.81", Fault::kBadCharacter},
      {Netid::kRdma6, "::1:20049", Fault::kNoPort},
  };
  for (const auto& [netid, text, fault] : cases) {
    const auto parsed = ParseUniversalAddress(netid, text);
    ASSERT_FALSE(parsed) << text;
    EXPECT_EQ(parsed.error(), fault) << text << ": " << ToString(parsed.error());
  }
}

TEST(UniversalAddress, TheLongestFits) {
  const std::string longest = "ffff:ffff:ffff:ffff:ffff:ffff:255.255.255.255.255.255";
  ASSERT_EQ(longest.size(), kUniversalAddressMax);
  EXPECT_TRUE(ParseUniversalAddress(Netid::kRdma6, longest));
}

TEST(UniversalAddress, GoesToASocketAddressAndBack) {
  for (const UniversalAddress& address :
       {Address(Netid::kRdma, "192.0.2.1", 20049), Address(Netid::kRdma6, "2001:db8::1", 1)}) {
    const sockaddr_storage storage = ToSockaddr(address);
    EXPECT_EQ(ToUniversalAddress(reinterpret_cast<const sockaddr*>(&storage)), address) << ToString(address);
  }
  sockaddr_in in = {};
  in.sin_family = AF_INET;
  in.sin_port = htons(20049);
  in.sin_addr.s_addr = htonl(0xc0000201);
  const sockaddr_storage storage = ToSockaddr(Address(Netid::kRdma, "192.0.2.1", 20049));
  EXPECT_EQ(std::memcmp(&storage, &in, sizeof(in)), 0);
}

TEST(UniversalAddress, AMappedIpv4AddressIsOneOfIpv4) {
  sockaddr_in6 in6 = {};
  in6.sin6_family = AF_INET6;
  in6.sin6_port = htons(7);
  ASSERT_EQ(inet_pton(AF_INET6, "::ffff:192.0.2.1", &in6.sin6_addr), 1);
  EXPECT_EQ(ToUniversalAddress(reinterpret_cast<const sockaddr*>(&in6)), Address(Netid::kRdma, "192.0.2.1", 7));
}

TEST(UniversalAddress, OtherFamiliesHaveNone) {
  sockaddr_storage storage = {};
  storage.ss_family = AF_UNIX;
  EXPECT_FALSE(ToUniversalAddress(reinterpret_cast<const sockaddr*>(&storage)));
}

TEST(UniversalAddress, WildcardsAreAllZeros) {
  EXPECT_TRUE(Address(Netid::kRdma, "0.0.0.0", 5).wildcard());
  EXPECT_TRUE(Address(Netid::kRdma6, "::", 5).wildcard());
  EXPECT_FALSE(Address(Netid::kRdma, "0.0.0.1", 0).wildcard());
  EXPECT_FALSE(Address(Netid::kRdma6, "::1", 0).wildcard());
}

TEST(WellKnownPort, NfsHasOneOverRdma) {
  EXPECT_EQ(WellKnownPort(100003), 20049);
  EXPECT_EQ(WellKnownPort(100005), std::nullopt);
}

TEST(ProgramText, IsDecimalForRegisteredNumbersAndHexadecimalForUsers) {
  EXPECT_EQ(ProgramText(100003), "100003");
  EXPECT_EQ(ProgramText(0x1fffffff), "536870911");
  EXPECT_EQ(ProgramText(0x20000000), "0x20000000");
  EXPECT_EQ(ProgramText(0xffffffff), "0xffffffff");
}

}  // namespace
}  // namespace stagecoach::rpcrdma
