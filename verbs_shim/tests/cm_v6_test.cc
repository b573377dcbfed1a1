// IPv6, listeners for both families, link-local addresses, and the addresses of real interfaces.

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

sockaddr_in6* As6(sockaddr_storage* address) {
  return reinterpret_cast<sockaddr_in6*>(address);
}

// Family and address, without port.
std::string AddressText(const sockaddr_storage& address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address.ss_family == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(address).sin_addr, text, sizeof(text));
  } else {
    inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6&>(address).sin6_addr, text, sizeof(text));
  }
  return text;
}

// Of interfaces that are up, loopback apart.
std::vector<sockaddr_storage> InterfaceAddresses() {
  std::vector<sockaddr_storage> addresses;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return addresses;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0 || (entry->ifa_flags & IFF_LOOPBACK) != 0) {
      continue;
    }
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    sockaddr_storage address{};
    std::memcpy(&address, entry->ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    addresses.push_back(address);
  }
  freeifaddrs(list);
  return addresses;
}

bool IsLinkLocal(const sockaddr_storage& address) {
  return address.ss_family == AF_INET6 &&
         IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
}

class CmV6Test : public VerbsTest {
 protected:
  // Skips the test where there is no IPv6.
  std::optional<sockaddr_storage> Address6() {
    auto address = world().ServerAddress6();
    if (!address) [] { GTEST_SKIP() << "skipped: no IPv6 address"; }();
    return address;
  }

  void ListenOn(Pair* pair, sockaddr_storage address, bool own_family_only = false) {
    world().ActAsServer();
    pair->listener = std::move(CreateCmId(pair->server.channel.get(), pair).value());
    int only = own_family_only ? 1 : 0;
    ASSERT_EQ(rdma_set_option(pair->listener.get(), RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &only, sizeof(only)), 0);
    ASSERT_EQ(rdma_bind_addr(pair->listener.get(), reinterpret_cast<sockaddr*>(&address)), 0) << std::strerror(errno);
    ASSERT_EQ(rdma_listen(pair->listener.get(), 4), 0) << std::strerror(errno);
  }

  // Connects to `destination`, at the listener's port, and moves a message.
  void ConnectTo(Pair* pair, sockaddr_storage destination) {
    // The port is at the same place in both families' structures.
    As6(&destination)->sin6_port = rdma_get_src_port(pair->listener.get());
    ASSERT_NO_FATAL_FAILURE(pair->ResolveTo(destination));
    ASSERT_NO_FATAL_FAILURE(pair->Request());
    ASSERT_NO_FATAL_FAILURE(pair->Accept());
    for (const rdma_cm_id* id : {pair->client.id.get(), pair->server.id.get()}) {
      EXPECT_EQ(id->route.addr.src_storage.ss_family, destination.ss_family);
      EXPECT_EQ(id->route.addr.dst_storage.ss_family, destination.ss_family);
    }
    EXPECT_EQ(AddressText(pair->client.id->route.addr.dst_storage), AddressText(destination));
    EXPECT_EQ(AddressText(pair->server.id->route.addr.src_storage), AddressText(destination));
    EXPECT_EQ(rdma_get_dst_port(pair->server.id.get()), rdma_get_src_port(pair->client.id.get()));
    Buffer inbox(pair->server.pd.get(), 64);
    Buffer outbox(pair->client.pd.get(), 64);
    outbox.Fill("six");
    ASSERT_EQ(PostReceive(pair->server.qp(), 1, {inbox.Sge()}), 0);
    ASSERT_EQ(Post(pair->client.qp(), {.wr_id = 2, .sges = {outbox.Sge()}}), 0);
    ExpectCompletion(pair->server.receive_cq.get(), 1);
    ExpectCompletion(pair->client.send_cq.get(), 2);
    EXPECT_EQ(inbox.Text(3), "six");
  }

  static sockaddr_storage AnyAddress6() {
    sockaddr_storage any{};
    any.ss_family = AF_INET6;
    return any;
  }
};

TEST_F(CmV6Test, ConnectsOverIpv6) {
  const auto address = Address6();
  if (!address) return;
  Pair pair;
  ASSERT_NO_FATAL_FAILURE(ListenOn(&pair, *address));
  EXPECT_EQ(pair.listener->route.addr.src_storage.ss_family, AF_INET6);
  EXPECT_NE(rdma_get_src_port(pair.listener.get()), 0);
  ConnectTo(&pair, *address);
}

TEST_F(CmV6Test, AListenerOnAnyIpv6AddressTakesBothFamilies) {
  const auto address = Address6();
  if (!address) return;
  Pair sixes;
  ASSERT_NO_FATAL_FAILURE(ListenOn(&sixes, AnyAddress6()));
  EXPECT_EQ(sixes.listener->verbs, nullptr);
  ConnectTo(&sixes, *address);
  Pair fours;
  ASSERT_NO_FATAL_FAILURE(ListenOn(&fours, AnyAddress6()));
  ConnectTo(&fours, world().ServerAddress());
}

TEST_F(CmV6Test, AListenerForItsOwnFamilyOnlyTakesNoIpv4) {
  const auto address = Address6();
  if (!address) return;
  Pair pair;
  ASSERT_NO_FATAL_FAILURE(ListenOn(&pair, AnyAddress6(), true));
  sockaddr_storage destination = world().ServerAddress();
  As6(&destination)->sin6_port = rdma_get_src_port(pair.listener.get());
  {
    Pair refused;
    ASSERT_NO_FATAL_FAILURE(refused.ResolveTo(destination));
    refused.client.Prepare(refused.client_options);
    ASSERT_EQ(rdma_connect(refused.client.id.get(), &refused.client_options.connection), 0);
    EXPECT_NE(refused.client.ExpectEvent(RDMA_CM_EVENT_REJECTED), 0);
  }
  // So the port is free for an IPv4 listener.
  world().ActAsServer();
  auto four = CreateCmId(pair.server.channel.get());
  ASSERT_TRUE(four);
  EXPECT_EQ(rdma_bind_addr(four->get(), reinterpret_cast<sockaddr*>(&destination)), 0) << std::strerror(errno);
  EXPECT_EQ(rdma_listen(four->get(), 1), 0) << std::strerror(errno);
  ConnectTo(&pair, *address);
}

TEST_F(CmV6Test, AListenerForBothFamiliesHasThePortInBoth) {
  const auto address = Address6();
  if (!address) return;
  Pair pair;
  ASSERT_NO_FATAL_FAILURE(ListenOn(&pair, AnyAddress6()));
  sockaddr_storage four = world().ServerAddress();
  As6(&four)->sin6_port = rdma_get_src_port(pair.listener.get());
  auto id = CreateCmId(pair.server.channel.get());
  ASSERT_TRUE(id);
  EXPECT_EQ(rdma_bind_addr(id->get(), reinterpret_cast<sockaddr*>(&four)), -1);
  // Linux says of a conflict with "any" that the address is not available.
  EXPECT_TRUE(errno == EADDRINUSE || errno == EADDRNOTAVAIL) << errno;
}

TEST_F(CmV6Test, FamiliesAreNotMixed) {
  const auto address = Address6();
  if (!address) return;
  Pair pair;
  ASSERT_NO_FATAL_FAILURE(ListenOn(&pair, *address));
  auto id = CreateCmId(pair.server.channel.get());
  ASSERT_TRUE(id);
  sockaddr_storage here = world().ServerAddress();
  sockaddr_storage there = pair.ListenAddress();
  ASSERT_EQ(rdma_bind_addr(id->get(), reinterpret_cast<sockaddr*>(&here)), 0);
  EXPECT_EQ(rdma_resolve_addr(id->get(), nullptr, reinterpret_cast<sockaddr*>(&there), 1000), -1);
  EXPECT_EQ(errno, EINVAL);
  sockaddr unknown{};
  unknown.sa_family = AF_UNIX;
  EXPECT_EQ(rdma_resolve_addr(id->get(), nullptr, &unknown, 1000), -1);
}

TEST_F(CmV6Test, ALinkLocalAddressNeedsItsScope) {
  Pair pair;
  world().ActAsServer();
  auto id = CreateCmId(pair.server.channel.get());
  ASSERT_TRUE(id);
  sockaddr_storage address = AnyAddress6();
  ASSERT_EQ(inet_pton(AF_INET6, "fe80::1", &As6(&address)->sin6_addr), 1);
  EXPECT_EQ(rdma_bind_addr(id->get(), reinterpret_cast<sockaddr*>(&address)), -1);
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(CmV6Test, ConnectsOverLinkLocalAddresses) {
  if (!world().HasThreads()) GTEST_SKIP() << "skipped: simulated hosts have no interfaces";
  for (const sockaddr_storage& address : InterfaceAddresses()) {
    if (!IsLinkLocal(address)) continue;
    Pair pair;
    ASSERT_NO_FATAL_FAILURE(ListenOn(&pair, address));
    ConnectTo(&pair, address);
    EXPECT_EQ(pair.client.id->route.addr.dst_sin6.sin6_scope_id,
              reinterpret_cast<const sockaddr_in6&>(address).sin6_scope_id);
    EXPECT_NE(pair.client.id->route.addr.src_sin6.sin6_scope_id, 0u);
    return;
  }
  GTEST_SKIP() << "skipped: no interface has a link-local address";
}

TEST_F(CmV6Test, EveryAddressOfThisHostCanBeListenedOn) {
  if (!world().HasThreads()) GTEST_SKIP() << "skipped: simulated hosts have no interfaces";
  int tried = 0;
  for (const sockaddr_storage& address : InterfaceAddresses()) {
    SCOPED_TRACE(AddressText(address));
    Pair pair;
    ASSERT_NO_FATAL_FAILURE(ListenOn(&pair, address));
    ConnectTo(&pair, address);
    ++tried;
  }
  if (tried == 0) GTEST_SKIP() << "skipped: no interface but loopback";
}

}  // namespace
}  // namespace stagecoach::verbs
