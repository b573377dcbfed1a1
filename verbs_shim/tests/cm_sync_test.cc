// Synchronous ids: calls that wait for their own events; and ids that move between channels.

#include <rdma/rdma_verbs.h>

#include <cerrno>
#include <cstring>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

class CmSyncTest : public VerbsTest {
 protected:
  static CmId SynchronousId() {
    auto id = CreateCmId(nullptr);
    EXPECT_TRUE(id) << id.error().ToString();
    return id ? std::move(*id) : CmId();
  }

  // A synchronous listener on the server.
  CmId Listening() {
    world().ActAsServer();
    CmId id = SynchronousId();
    sockaddr_storage address = world().ServerAddress();
    EXPECT_EQ(rdma_bind_addr(id.get(), reinterpret_cast<sockaddr*>(&address)), 0) << std::strerror(errno);
    EXPECT_EQ(rdma_listen(id.get(), 4), 0) << std::strerror(errno);
    return id;
  }

  // With the id's own PD and CQs.
  static void MakeQp(rdma_cm_id* id) {
    ibv_qp_init_attr attributes{};
    attributes.qp_type = IBV_QPT_RC;
    attributes.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    ASSERT_EQ(rdma_create_qp(id, nullptr, &attributes), 0) << std::strerror(errno);
  }

  static rdma_conn_param WithPrivateData(const char* text) {
    rdma_conn_param parameters{};
    parameters.private_data = text;
    parameters.private_data_len = static_cast<uint8_t>(std::strlen(text));
    parameters.responder_resources = parameters.initiator_depth = 1;
    parameters.retry_count = parameters.rnr_retry_count = 7;
    return parameters;
  }

  static std::string PrivateDataOf(const rdma_cm_id* id) {
    return id->event != nullptr ? PrivateData(id->event->param.conn).c_str() : "";
  }

  static void Resolve(rdma_cm_id* id, sockaddr_storage destination) {
    ASSERT_EQ(rdma_resolve_addr(id, nullptr, reinterpret_cast<sockaddr*>(&destination), 2000), 0)
        << std::strerror(errno);
    ASSERT_EQ(rdma_resolve_route(id, 2000), 0) << std::strerror(errno);
  }
};

TEST_F(CmSyncTest, AnIdWithoutAChannelGetsItsOwn) {
  CmId id = SynchronousId();
  ASSERT_NE(id->channel, nullptr);
  EXPECT_GE(id->channel->fd, 0);
  EXPECT_EQ(id->event, nullptr);
  CmId other = SynchronousId();
  EXPECT_NE(id->channel, other->channel);
}

TEST_F(CmSyncTest, ResolvingWaitsAndLeavesItsEventInTheId) {
  CmId listener = Listening();
  world().ActAsClient();
  CmId id = SynchronousId();
  sockaddr_storage destination = listener->route.addr.src_storage;
  ASSERT_EQ(rdma_resolve_addr(id.get(), nullptr, reinterpret_cast<sockaddr*>(&destination), 2000), 0);
  ASSERT_NE(id->event, nullptr);
  EXPECT_EQ(id->event->event, RDMA_CM_EVENT_ADDR_RESOLVED);
  EXPECT_EQ(id->event->id, id.get());
  EXPECT_NE(id->verbs, nullptr);
  ASSERT_EQ(rdma_resolve_route(id.get(), 2000), 0);
  ASSERT_NE(id->event, nullptr);
  EXPECT_EQ(id->event->event, RDMA_CM_EVENT_ROUTE_RESOLVED);
  // A call that fails at once leaves the last event where it is.
  EXPECT_EQ(rdma_resolve_route(id.get(), 2000), -1);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(id->event->event, RDMA_CM_EVENT_ROUTE_RESOLVED);
}

TEST_F(CmSyncTest, BothEndsConnectTalkAndPartByBlockingCalls) {
  CmId listener = Listening();
  const sockaddr_storage destination = listener->route.addr.src_storage;
  world().SideBySide(
      [&] {
        rdma_cm_id* accepted = nullptr;
        ASSERT_EQ(rdma_get_request(listener.get(), &accepted), 0) << std::strerror(errno);
        CmId id(accepted);
        EXPECT_NE(id->channel, listener->channel);
        ASSERT_NE(id->event, nullptr);
        EXPECT_EQ(id->event->event, RDMA_CM_EVENT_CONNECT_REQUEST);
        EXPECT_EQ(id->event->listen_id, listener.get());
        EXPECT_EQ(PrivateDataOf(id.get()), "may I");
        MakeQp(id.get());
        std::vector<char> inbox(64);
        ibv_mr* memory = rdma_reg_msgs(id.get(), inbox.data(), inbox.size());
        ASSERT_NE(memory, nullptr);
        ASSERT_EQ(rdma_post_recv(id.get(), nullptr, inbox.data(), inbox.size(), memory), 0);
        rdma_conn_param parameters = WithPrivateData("you may");
        ASSERT_EQ(rdma_accept(id.get(), &parameters), 0) << std::strerror(errno);
        EXPECT_EQ(id->event->event, RDMA_CM_EVENT_ESTABLISHED);
        ibv_wc completion{};
        ASSERT_EQ(rdma_get_recv_comp(id.get(), &completion), 1);
        EXPECT_EQ(completion.status, IBV_WC_SUCCESS);
        EXPECT_STREQ(inbox.data(), "hello");
        ASSERT_EQ(rdma_disconnect(id.get()), 0) << std::strerror(errno);
        EXPECT_EQ(id->event->event, RDMA_CM_EVENT_DISCONNECTED);
        EXPECT_EQ(rdma_dereg_mr(memory), 0);
        rdma_destroy_qp(id.get());
      },
      [&] {
        CmId id = SynchronousId();
        ASSERT_NO_FATAL_FAILURE(Resolve(id.get(), destination));
        MakeQp(id.get());
        rdma_conn_param parameters = WithPrivateData("may I");
        ASSERT_EQ(rdma_connect(id.get(), &parameters), 0) << std::strerror(errno);
        EXPECT_EQ(id->event->event, RDMA_CM_EVENT_ESTABLISHED);
        EXPECT_EQ(PrivateDataOf(id.get()), "you may");
        std::vector<char> outbox(64);
        std::strcpy(outbox.data(), "hello");
        ibv_mr* memory = rdma_reg_msgs(id.get(), outbox.data(), outbox.size());
        ASSERT_NE(memory, nullptr);
        ASSERT_EQ(rdma_post_send(id.get(), nullptr, outbox.data(), outbox.size(), memory, IBV_SEND_SIGNALED), 0);
        ibv_wc completion{};
        ASSERT_EQ(rdma_get_send_comp(id.get(), &completion), 1);
        EXPECT_EQ(completion.status, IBV_WC_SUCCESS);
        ASSERT_EQ(rdma_disconnect(id.get()), 0) << std::strerror(errno);
        EXPECT_EQ(id->event->event, RDMA_CM_EVENT_DISCONNECTED);
        EXPECT_EQ(rdma_dereg_mr(memory), 0);
        rdma_destroy_qp(id.get());
      });
}

TEST_F(CmSyncTest, ARejectionIsARefusalWithItsPrivateData) {
  CmId listener = Listening();
  const sockaddr_storage destination = listener->route.addr.src_storage;
  world().SideBySide(
      [&] {
        rdma_cm_id* asked = nullptr;
        ASSERT_EQ(rdma_get_request(listener.get(), &asked), 0);
        CmId id(asked);
        EXPECT_EQ(rdma_reject(id.get(), "no", 2), 0);
      },
      [&] {
        CmId id = SynchronousId();
        ASSERT_NO_FATAL_FAILURE(Resolve(id.get(), destination));
        MakeQp(id.get());
        rdma_conn_param parameters = WithPrivateData("may I");
        EXPECT_EQ(rdma_connect(id.get(), &parameters), -1);
        EXPECT_EQ(errno, ECONNREFUSED);
        ASSERT_NE(id->event, nullptr);
        EXPECT_EQ(id->event->event, RDMA_CM_EVENT_REJECTED);
        EXPECT_EQ(PrivateDataOf(id.get()), "no");
        rdma_destroy_qp(id.get());
      });
}

TEST_F(CmSyncTest, NobodyListeningIsARefusal) {
  world().ActAsClient();
  CmId id = SynchronousId();
  ASSERT_NO_FATAL_FAILURE(Resolve(id.get(), world().RefusingAddress()));
  MakeQp(id.get());
  rdma_conn_param parameters = WithPrivateData("anybody");
  EXPECT_EQ(rdma_connect(id.get(), &parameters), -1);
  EXPECT_EQ(errno, ECONNREFUSED);
  rdma_destroy_qp(id.get());
}

TEST_F(CmSyncTest, RequestsAreTakenOfSynchronousListenersOnly) {
  Pair pair;
  pair.Listen();
  rdma_cm_id* request = nullptr;
  EXPECT_EQ(rdma_get_request(pair.listener.get(), &request), -1);
  EXPECT_EQ(errno, EINVAL);
}

// --- Migration ---

TEST_F(CmSyncTest, ASynchronousIdCannotBecomeSynchronous) {
  CmId id = SynchronousId();
  EXPECT_EQ(rdma_migrate_id(id.get(), nullptr), -1);
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(CmSyncTest, AMigratingIdTakesItsQueuedEventsAlong) {
  Pair pair;
  pair.Listen();
  world().ActAsClient();
  auto id = CreateCmId(pair.client.channel.get());
  auto bystander = CreateCmId(pair.client.channel.get());
  auto channel = CreateEventChannel();
  ASSERT_TRUE(id && bystander && channel);
  sockaddr_storage destination = pair.ListenAddress();
  for (rdma_cm_id* each : {id->get(), bystander->get()})
    ASSERT_EQ(rdma_resolve_addr(each, nullptr, reinterpret_cast<sockaddr*>(&destination), 2000), 0);
  ASSERT_TRUE(BecomesReadable(pair.client.channel->fd));
  ASSERT_EQ(rdma_migrate_id(id->get(), channel->get()), 0) << std::strerror(errno);
  EXPECT_EQ((*id)->channel, channel->get());
  ASSERT_TRUE(BecomesReadable((*channel)->fd));
  {
    auto event = GetCmEvent(channel->get());
    ASSERT_TRUE(event);
    EXPECT_EQ((*event)->event, RDMA_CM_EVENT_ADDR_RESOLVED);
    EXPECT_EQ((*event)->id, id->get());
  }
  EXPECT_FALSE(IsReadable((*channel)->fd));
  // What belongs to others stays.
  CmEvent event = pair.client.NextEvent();
  ASSERT_TRUE(event);
  EXPECT_EQ(event->id, bystander->get());
  EXPECT_FALSE(pair.client.EventWaiting());
  // Later events come on the new channel.
  ASSERT_EQ(rdma_resolve_route(id->get(), 2000), 0);
  ASSERT_TRUE(BecomesReadable((*channel)->fd));
  auto later = GetCmEvent(channel->get());
  ASSERT_TRUE(later);
  EXPECT_EQ((*later)->event, RDMA_CM_EVENT_ROUTE_RESOLVED);
  EXPECT_FALSE(pair.client.EventWaiting());
  ASSERT_EQ(later->Destroy(), 0);
  // The id goes before the channel it is on.
  *id = {};
}

TEST_F(CmSyncTest, AnIdCanBecomeSynchronousAndBack) {
  Pair pair;
  pair.Listen();
  world().ActAsClient();
  auto id = CreateCmId(pair.client.channel.get());
  ASSERT_TRUE(id);
  ASSERT_EQ(rdma_migrate_id(id->get(), nullptr), 0) << std::strerror(errno);
  EXPECT_NE((*id)->channel, pair.client.channel.get());
  sockaddr_storage destination = pair.ListenAddress();
  ASSERT_EQ(rdma_resolve_addr(id->get(), nullptr, reinterpret_cast<sockaddr*>(&destination), 2000), 0);
  ASSERT_NE((*id)->event, nullptr);
  // The event the id holds is acknowledged by moving, which would wait for it otherwise.
  ASSERT_EQ(rdma_migrate_id(id->get(), pair.client.channel.get()), 0);
  EXPECT_EQ((*id)->event, nullptr);
  EXPECT_EQ((*id)->channel, pair.client.channel.get());
  ASSERT_EQ(rdma_resolve_route(id->get(), 2000), 0);
  EXPECT_EQ(pair.client.ExpectEvent(RDMA_CM_EVENT_ROUTE_RESOLVED), 0);
}

TEST_F(CmSyncTest, AMigratingListenerTakesItsRequestsAlong) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  pair.client.Prepare(pair.client_options);
  ASSERT_EQ(rdma_connect(pair.client.id.get(), &pair.client_options.connection), 0);
  ASSERT_TRUE(BecomesReadable(pair.server.channel->fd));
  world().ActAsServer();
  auto channel = CreateEventChannel();
  ASSERT_TRUE(channel);
  ASSERT_EQ(rdma_migrate_id(pair.listener.get(), channel->get()), 0);
  EXPECT_FALSE(IsReadable(pair.server.channel->fd));
  ASSERT_TRUE(BecomesReadable((*channel)->fd));
  auto request = GetCmEvent(channel->get());
  ASSERT_TRUE(request);
  EXPECT_EQ((*request)->event, RDMA_CM_EVENT_CONNECT_REQUEST);
  CmId id((*request)->id);
  EXPECT_EQ(id->channel, channel->get());
  ASSERT_EQ(request->Destroy(), 0);
  id = {};
  EXPECT_NE(pair.client.ExpectEvent(RDMA_CM_EVENT_REJECTED), 0);
  pair.listener = {};
}

TEST_F(CmSyncTest, AListenerThatBecameSynchronousHandsOutItsRequests) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  pair.client.Prepare(pair.client_options);
  ASSERT_EQ(rdma_connect(pair.client.id.get(), &pair.client_options.connection), 0);
  ASSERT_TRUE(BecomesReadable(pair.server.channel->fd));
  world().ActAsServer();
  ASSERT_EQ(rdma_migrate_id(pair.listener.get(), nullptr), 0);
  rdma_cm_id* request = nullptr;
  ASSERT_EQ(rdma_get_request(pair.listener.get(), &request), 0) << std::strerror(errno);
  pair.server.id = CmId(request);
  pair.server.Prepare(pair.server_options);
  // The other end is asynchronous, and its device needs no call to complete the connection.
  ASSERT_EQ(rdma_accept(pair.server.id.get(), &pair.server_options.connection), 0) << std::strerror(errno);
  EXPECT_EQ(pair.client.ExpectEvent(RDMA_CM_EVENT_ESTABLISHED), 0);
}

TEST_F(CmSyncTest, MigratingWaitsUntilFetchedEventsAreAcknowledged) {
  Pair pair;
  pair.Listen();
  auto id = CreateCmId(pair.client.channel.get());
  auto channel = CreateEventChannel();
  ASSERT_TRUE(id && channel);
  sockaddr_storage destination = pair.ListenAddress();
  ASSERT_EQ(rdma_resolve_addr(id->get(), nullptr, reinterpret_cast<sockaddr*>(&destination), 1000), 0);
  CmEvent event = pair.client.NextEvent();
  ASSERT_TRUE(event);
  ExpectWaits([&] { EXPECT_EQ(rdma_migrate_id(id->get(), channel->get()), 0); },
              [&] { EXPECT_EQ(event.Destroy(), 0); });
  *id = {};
}

}  // namespace
}  // namespace stagecoach::verbs
