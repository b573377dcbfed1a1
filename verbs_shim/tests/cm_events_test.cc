// Events: which come, in which order, what they hold, and what waits for their acknowledgement.

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

class CmEventsTest : public VerbsTest {};

TEST_F(CmEventsTest, EachStepIsOneEventAboutItsId) {
  Pair pair;
  pair.Listen();
  world().ActAsClient();
  pair.client.id = std::move(CreateCmId(pair.client.channel.get()).value());
  rdma_cm_id* id = pair.client.id.get();
  sockaddr_storage destination = pair.ListenAddress();
  const auto expect = [&](Endpoint* end, rdma_cm_event_type type) {
    CmEvent event = end->NextEvent();
    ASSERT_TRUE(event);
    EXPECT_EQ(event->event, type) << rdma_event_str(event->event);
    EXPECT_EQ(event->status, 0);
    EXPECT_EQ(event->id, end->id.get());
    EXPECT_EQ(event->listen_id, nullptr);
    EXPECT_FALSE(end->EventWaiting());
  };
  ASSERT_EQ(rdma_resolve_addr(id, nullptr, reinterpret_cast<sockaddr*>(&destination), 2000), 0);
  ASSERT_NO_FATAL_FAILURE(expect(&pair.client, RDMA_CM_EVENT_ADDR_RESOLVED));
  ASSERT_EQ(rdma_resolve_route(id, 2000), 0);
  ASSERT_NO_FATAL_FAILURE(expect(&pair.client, RDMA_CM_EVENT_ROUTE_RESOLVED));
  pair.Request();
  EXPECT_FALSE(pair.server.EventWaiting());
  world().ActAsServer();
  pair.server.Prepare(pair.server_options);
  ASSERT_EQ(rdma_accept(pair.server.id.get(), &pair.server_options.connection), 0);
  ASSERT_NO_FATAL_FAILURE(expect(&pair.client, RDMA_CM_EVENT_ESTABLISHED));
  ASSERT_NO_FATAL_FAILURE(expect(&pair.server, RDMA_CM_EVENT_ESTABLISHED));
}

// A stream is over when it has ended. On InfiniBand packets may still be on their way, and QP numbers in use: both ends
// are told when that is over, too.
TEST_F(CmEventsTest, TheEndIsFollowedByTheTimeWaitOfInfinibandAlone) {
  auto pair = Pair::Connected();
  ASSERT_EQ(rdma_disconnect(pair->client.id.get()), 0);
  EXPECT_EQ(pair->server.ExpectEvent(RDMA_CM_EVENT_DISCONNECTED), 0);
  ASSERT_EQ(rdma_disconnect(pair->server.id.get()), 0);
  EXPECT_EQ(pair->client.ExpectEvent(RDMA_CM_EVENT_DISCONNECTED), 0);
  if (!IsIwarp(pair->client.id.get())) {
    EXPECT_EQ(pair->client.ExpectEvent(RDMA_CM_EVENT_TIMEWAIT_EXIT), 0);
    EXPECT_EQ(pair->server.ExpectEvent(RDMA_CM_EVENT_TIMEWAIT_EXIT), 0);
  }
  rdma_destroy_qp(pair->client.id.get());
  rdma_destroy_qp(pair->server.id.get());
  EXPECT_FALSE(pair->client.EventWaiting());
  EXPECT_FALSE(pair->server.EventWaiting());
}

TEST_F(CmEventsTest, NoRouteIsAnAddressError) {
  sockaddr_storage storage{};
  auto* nowhere = reinterpret_cast<sockaddr_in6*>(&storage);
  nowhere->sin6_family = AF_INET6;
  nowhere->sin6_port = htons(9);
  ASSERT_EQ(inet_pton(AF_INET6, "2001:db8::1", &nowhere->sin6_addr), 1);  // RFC 3849, for documentation
  if (world().HasThreads()) {
    // Connecting a datagram socket asks the routing table only.
    const int probe = socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    const bool routed = connect(probe, reinterpret_cast<sockaddr*>(&storage), sizeof(sockaddr_in6)) == 0;
    close(probe);
    if (routed) GTEST_SKIP() << "skipped: this host has a route to everywhere";
  }
  Pair pair;
  world().ActAsClient();
  auto id = CreateCmId(pair.client.channel.get());
  ASSERT_TRUE(id);
  ASSERT_EQ(rdma_resolve_addr(id->get(), nullptr, reinterpret_cast<sockaddr*>(&storage), 1000), 0)
      << std::strerror(errno);
  EXPECT_LT(pair.client.ExpectEvent(RDMA_CM_EVENT_ADDR_ERROR), 0);
  // The id may try another of that family.
  pair.Listen();
  world().ActAsClient();
  sockaddr_storage there = pair.ListenAddress();
  EXPECT_EQ(rdma_resolve_addr(id->get(), nullptr, reinterpret_cast<sockaddr*>(&there), 1000), -1);
  EXPECT_EQ(errno, EINVAL);
  if (const auto six = world().ServerAddress6()) {
    there = *six;
    reinterpret_cast<sockaddr_in6*>(&there)->sin6_port = htons(9);
    EXPECT_EQ(rdma_resolve_addr(id->get(), nullptr, reinterpret_cast<sockaddr*>(&there), 1000), 0);
    EXPECT_EQ(pair.client.ExpectEvent(RDMA_CM_EVENT_ADDR_RESOLVED), 0);
  }
}

TEST_F(CmEventsTest, ARequestIsTheListenersToAcknowledge) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  pair.client.Prepare(pair.client_options);
  ASSERT_EQ(rdma_connect(pair.client.id.get(), &pair.client_options.connection), 0);
  CmEvent request = pair.server.NextEvent();
  ASSERT_TRUE(request);
  // The new id does not wait for it ...
  EXPECT_EQ(rdma_destroy_id(request->id), 0);
  // ... but the listener does.
  ExpectWaits([&] { EXPECT_EQ(pair.listener.Destroy(), 0); }, [&] { EXPECT_EQ(request.Destroy(), 0); });
  EXPECT_NE(pair.client.ExpectEvent(RDMA_CM_EVENT_REJECTED), 0);
}

TEST_F(CmEventsTest, EventsMayBeAcknowledgedInAnyOrder) {
  Pair pair;
  pair.Listen();
  world().ActAsClient();
  pair.client.id = std::move(CreateCmId(pair.client.channel.get()).value());
  rdma_cm_id* id = pair.client.id.get();
  sockaddr_storage destination = pair.ListenAddress();
  ASSERT_EQ(rdma_resolve_addr(id, nullptr, reinterpret_cast<sockaddr*>(&destination), 2000), 0);
  CmEvent first = pair.client.NextEvent();
  ASSERT_EQ(rdma_resolve_route(id, 2000), 0);
  CmEvent second = pair.client.NextEvent();
  ASSERT_TRUE(first && second);
  EXPECT_EQ(second->event, RDMA_CM_EVENT_ROUTE_RESOLVED);
  EXPECT_EQ(first->event, RDMA_CM_EVENT_ADDR_RESOLVED);
  EXPECT_EQ(second.Destroy(), 0);
  EXPECT_EQ(first.Destroy(), 0);
  EXPECT_EQ(pair.client.id.Destroy(), 0);
}

// On InfiniBand they come again, until there is room (cm_storm_test.cc).
TEST_F(CmEventsTest, MoreRequestsThanTheBacklogAreRejectedOnIwarp) {
  Pair listening;
  listening.Listen();  // with a backlog of 8
  std::vector<std::unique_ptr<Pair>> clients;
  int rejected = 0;
  for (int i = 0; i < 9; ++i) {
    auto client = std::make_unique<Pair>();
    ASSERT_NO_FATAL_FAILURE(client->ResolveTo(listening.ListenAddress()));
    if (!IsIwarp(client->client.id.get())) GTEST_SKIP() << "not an iWARP device";
    client->client.Prepare(client->client_options);
    ASSERT_EQ(rdma_connect(client->client.id.get(), &client->client_options.connection), 0);
    clients.push_back(std::move(client));
  }
  ASSERT_TRUE(world().Until([&] {
    for (const auto& client : clients) rejected += client->client.EventWaiting() ? 1 : 0;
    return rejected > 0;
  }));
  EXPECT_EQ(rejected, 1);
  for (const auto& client : clients) {
    if (!client->client.EventWaiting()) continue;
    EXPECT_NE(client->client.ExpectEvent(RDMA_CM_EVENT_REJECTED), 0);
  }
}

TEST_F(CmEventsTest, NotificationsAreForIdsThatConnect) {
  Pair pair;
  pair.Listen();
  world().ActAsClient();
  auto id = CreateCmId(pair.client.channel.get());
  ASSERT_TRUE(id);
  EXPECT_EQ(rdma_notify(id->get(), IBV_EVENT_COMM_EST), -1);
  EXPECT_EQ(errno, EINVAL);
  pair.Resolve();
  pair.Request();
  pair.Accept();
  if (!IsIwarp(pair.client.id.get())) return;
  EXPECT_EQ(rdma_notify(pair.client.id.get(), IBV_EVENT_COMM_EST), 0);
}

TEST_F(CmEventsTest, EveryEventHasAName) {
  for (int type = RDMA_CM_EVENT_ADDR_RESOLVED; type <= RDMA_CM_EVENT_TIMEWAIT_EXIT; ++type) {
    const char* name = rdma_event_str(static_cast<rdma_cm_event_type>(type));
    ASSERT_NE(name, nullptr);
    EXPECT_NE(std::string(name), "");
  }
}

}  // namespace
}  // namespace stagecoach::verbs
