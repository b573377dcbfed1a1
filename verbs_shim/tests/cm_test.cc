// The connection manager: addresses, private data, depths, refusals, ends, events and their acknowledgement.

#include <arpa/inet.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

class CmTest : public VerbsTest {
 protected:
  // As the device has it: the copy in ibv_qp is as old as the last call that named the QP.
  // An iWARP frame says how much private data it carries; a message of InfiniBand's connection manager has a fixed size
  // and ends in zeros.
  static void ExpectPrivateData(const rdma_cm_id* id, const std::string& got, std::string expected) {
    if (!IsIwarp(id)) expected.resize(std::max(expected.size(), got.size()));
    EXPECT_EQ(got, expected);
  }
  // `first` disconnects. Its peer hears of it, and on InfiniBand has to agree before `first` does.
  static void Disconnect(Endpoint* first, Endpoint* peer) {
    ASSERT_EQ(rdma_disconnect(first->id.get()), 0);
    EXPECT_EQ(peer->ExpectEvent(RDMA_CM_EVENT_DISCONNECTED), 0);
    if (!IsIwarp(peer->id.get())) {
      EXPECT_EQ(rdma_disconnect(peer->id.get()), 0);
    }
    EXPECT_EQ(first->ExpectEvent(RDMA_CM_EVENT_DISCONNECTED), 0);
  }
};

TEST_F(CmTest, AnIdStartsEmpty) {
  Pair pair;
  int context = 0;
  auto id = CreateCmId(pair.client.channel.get(), &context);
  ASSERT_TRUE(id) << id.error().ToString();
  EXPECT_EQ((*id)->context, &context);
  EXPECT_EQ((*id)->channel, pair.client.channel.get());
  EXPECT_EQ((*id)->ps, RDMA_PS_TCP);
  EXPECT_EQ((*id)->verbs, nullptr);
  EXPECT_EQ((*id)->qp, nullptr);
}

TEST_F(CmTest, ListeningOnPortZeroFindsAPort) {
  Pair pair;
  pair.Listen();
  EXPECT_NE(rdma_get_src_port(pair.listener.get()), 0);
  EXPECT_EQ(rdma_get_src_port(pair.listener.get()),
            reinterpret_cast<sockaddr_in*>(rdma_get_local_addr(pair.listener.get()))->sin_port);
}

TEST_F(CmTest, ATakenPortIsInUse) {
  Pair pair;
  pair.Listen();
  world().ActAsServer();
  auto second = CreateCmId(pair.server.channel.get());
  ASSERT_TRUE(second);
  sockaddr_storage address = pair.ListenAddress();
  int result = rdma_bind_addr(second->get(), reinterpret_cast<sockaddr*>(&address));
  if (result == 0) result = rdma_listen(second->get(), 1);
  EXPECT_EQ(result, -1);
  EXPECT_EQ(errno, EADDRINUSE);
}

// Requests for connections are TCP streams on iWARP, and find the port as others do. InfiniBand has ports of its own.
TEST_F(CmTest, ATcpServiceOfTheSameNumberIsInTheWayOnIwarpAlone) {
  if (!world().HasThreads()) GTEST_SKIP() << "skipped: this world has no sockets of the system";
  sockaddr_storage storage = world().ServerAddress();
  auto* const address = reinterpret_cast<sockaddr*>(&storage);
  socklen_t size = sizeof(storage);
  const int service = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  ASSERT_EQ(bind(service, address, sizeof(sockaddr_in)), 0) << std::strerror(errno);
  ASSERT_EQ(listen(service, 1), 0);
  ASSERT_EQ(getsockname(service, address, &size), 0);
  Pair pair;
  world().ActAsServer();
  pair.listener = std::move(CreateCmId(pair.server.channel.get()).value());
  int result = rdma_bind_addr(pair.listener.get(), address);
  if (result == 0) result = rdma_listen(pair.listener.get(), 1);
  const int error = errno;
  const Context device = std::move(OpenDevice().value());
  if (device->device->transport_type == IBV_TRANSPORT_IWARP) {
    EXPECT_EQ(result, -1);
    EXPECT_EQ(error, EADDRINUSE);
  } else {
    ASSERT_EQ(result, 0) << std::strerror(error);
    ASSERT_NO_FATAL_FAILURE(pair.Resolve());
    ASSERT_NO_FATAL_FAILURE(pair.Request());
    ASSERT_NO_FATAL_FAILURE(pair.Accept());
  }
  const int client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(connect(client, address, sizeof(sockaddr_in)), 0) << std::strerror(errno);
  int accepted = -1;
  EXPECT_TRUE(world().Until([&] { return (accepted = accept(service, nullptr, nullptr)) >= 0; }));
  for (const int socket : {accepted, client, service}) close(socket);
}

TEST_F(CmTest, AnAddressOfNobodyHereCannotBeBound) {
  Pair pair;
  auto id = CreateCmId(pair.server.channel.get());
  ASSERT_TRUE(id);
  sockaddr_storage storage{};
  auto* address = reinterpret_cast<sockaddr_in*>(&storage);
  address->sin_family = AF_INET;
  address->sin_addr.s_addr = inet_addr("192.0.2.77");  // TEST-NET-1
  EXPECT_EQ(rdma_bind_addr(id->get(), reinterpret_cast<sockaddr*>(&storage)), -1);
  EXPECT_TRUE(errno == EADDRNOTAVAIL || errno == ENODEV) << errno;
}

TEST_F(CmTest, ResolvingGivesTheIdItsDeviceAndAddresses) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  rdma_cm_id* id = pair.client.id.get();
  EXPECT_NE(id->verbs, nullptr);
  EXPECT_EQ(id->port_num, 1);
  EXPECT_NE(id->route.addr.src_addr.sa_family, 0);
  EXPECT_EQ(rdma_get_dst_port(id), rdma_get_src_port(pair.listener.get()));
}

TEST_F(CmTest, StepsOutOfOrderAreInvalid) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  pair.client.Prepare(pair.client_options);
  rdma_cm_id* id = pair.client.id.get();
  sockaddr_storage destination = pair.ListenAddress();
  EXPECT_EQ(rdma_resolve_addr(id, nullptr, reinterpret_cast<sockaddr*>(&destination), 100), -1);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(rdma_listen(id, 1), -1);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(rdma_reject(id, nullptr, 0), -1);
  EXPECT_EQ(errno, EINVAL);
  rdma_conn_param parameters{};
  EXPECT_EQ(rdma_accept(id, &parameters), -1);
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(CmTest, StepsThatNeedADeviceAreInvalidWithoutOne) {
  Pair pair;
  auto id = CreateCmId(pair.client.channel.get());
  ASSERT_TRUE(id);
  EXPECT_EQ(rdma_resolve_route(id->get(), 100), -1);
  EXPECT_EQ(errno, EINVAL);
  rdma_conn_param parameters{};
  EXPECT_EQ(rdma_connect(id->get(), &parameters), -1);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(rdma_accept(id->get(), &parameters), -1);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(rdma_reject(id->get(), nullptr, 0), -1);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(rdma_disconnect(id->get()), -1);
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(CmTest, ChannelsThatFindNoDescriptorFailWithEmfile) {
  // The device, and what else is opened at first use, must be there before.
  auto pair = Pair::Connected();
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const int lowest_free = dup(pair->client.channel->fd);
  ASSERT_GE(lowest_free, 0);
  close(lowest_free);
  const rlimit none_left{static_cast<rlim_t>(lowest_free), before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none_left), 0);
  errno = 0;
  rdma_event_channel* events = rdma_create_event_channel();
  const int event_error = errno;
  errno = 0;
  ibv_comp_channel* completions = ibv_create_comp_channel(pair->client.id->verbs);
  const int completion_error = errno;
  errno = 0;
  ibv_context* opened = ibv_open_device(pair->client.id->verbs->device);
  const int open_error = errno;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(events, nullptr);
  EXPECT_EQ(event_error, EMFILE);
  EXPECT_EQ(completions, nullptr);
  EXPECT_EQ(completion_error, EMFILE);
  EXPECT_EQ(opened, nullptr);
  EXPECT_EQ(open_error, EMFILE);
}

// Many programs destroy the QP of an id with ibv_destroy_qp; events still come afterwards, and must not touch it.
TEST_F(CmTest, EventsAfterTheQpWasDestroyedLeaveItAlone) {
  auto pair = Pair::Connected();
  const bool iwarp = IsIwarp(pair->client.id.get());
  ASSERT_EQ(ibv_destroy_qp(pair->client.id->qp), 0);
  if (!iwarp) {
    ASSERT_EQ(rdma_disconnect(pair->server.id.get()), 0);
  }
  EXPECT_EQ(pair->client.ExpectEvent(RDMA_CM_EVENT_DISCONNECTED), 0);
  pair->client.id->qp = nullptr;
  if (!iwarp) {
    EXPECT_EQ(rdma_disconnect(pair->client.id.get()), 0);
  }
  EXPECT_EQ(pair->server.ExpectEvent(RDMA_CM_EVENT_DISCONNECTED), 0);
}

TEST_F(CmTest, PrivateDataTravelsBothWays) {
  EndpointOptions server;
  EndpointOptions client;
  client.connection.private_data = "from the client";
  client.connection.private_data_len = 15;
  server.connection.private_data = "answer";
  server.connection.private_data_len = 6;
  auto pair = Pair::Connected(server, client);
  ExpectPrivateData(pair->client.id.get(), pair->request_private_data, "from the client");
  ExpectPrivateData(pair->client.id.get(), pair->reply_private_data, "answer");
}

TEST_F(CmTest, NoPrivateDataIsNone) {
  auto pair = Pair::Connected();
  ExpectPrivateData(pair->client.id.get(), pair->request_private_data, "");
  ExpectPrivateData(pair->client.id.get(), pair->reply_private_data, "");
}

TEST_F(CmTest, DepthsAreToldFromTheHearersView) {
  EndpointOptions server;
  EndpointOptions client;
  client.connection.responder_resources = 4;  // Reads of the server the client answers
  client.connection.initiator_depth = 2;      // Reads the client makes
  server.connection.responder_resources = 2;
  server.connection.initiator_depth = 3;
  auto pair = Pair::Connected(server, client);
  EXPECT_EQ(pair->request.responder_resources, 2);
  EXPECT_EQ(pair->request.initiator_depth, 4);
  EXPECT_EQ(pair->reply.responder_resources, 3);
  EXPECT_EQ(pair->reply.initiator_depth, 2);
}

// On InfiniBand: a request says both, its answer one of them. MPA has room for neither.
TEST_F(CmTest, RetriesAreToldWhereAMessageSaysThem) {
  Pair pair;
  pair.client_options.connection.retry_count = 5;
  pair.client_options.connection.rnr_retry_count = 4;
  pair.server_options.connection.retry_count = 3;
  pair.server_options.connection.rnr_retry_count = 2;
  pair.Listen();
  pair.Resolve();
  pair.Request();
  pair.server.Prepare(pair.server_options);
  ASSERT_EQ(rdma_accept(pair.server.id.get(), &pair.server_options.connection), 0);
  const bool iwarp = IsIwarp(pair.client.id.get());
  EXPECT_EQ(pair.request.retry_count, iwarp ? 0 : 5);
  EXPECT_EQ(pair.request.rnr_retry_count, iwarp ? 0 : 4);
  CmEvent answer = pair.client.NextEvent();
  ASSERT_TRUE(answer);
  ASSERT_EQ(answer->event, RDMA_CM_EVENT_ESTABLISHED) << rdma_event_str(answer->event);
  EXPECT_EQ(answer->param.conn.retry_count, 0);
  EXPECT_EQ(answer->param.conn.rnr_retry_count, iwarp ? 0 : 2);
  CmEvent established = pair.server.NextEvent();
  ASSERT_TRUE(established);
  ASSERT_EQ(established->event, RDMA_CM_EVENT_ESTABLISHED) << rdma_event_str(established->event);
  EXPECT_EQ(established->param.conn.retry_count, 0);
  EXPECT_EQ(established->param.conn.rnr_retry_count, 0);
}

TEST_F(CmTest, TheNewIdInheritsFromTheListener) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  pair.Request();
  rdma_cm_id* id = pair.server.id.get();
  EXPECT_NE(id, pair.listener.get());
  EXPECT_EQ(id->context, pair.listener->context);
  EXPECT_EQ(id->channel, pair.server.channel.get());
  EXPECT_NE(id->verbs, nullptr);
  EXPECT_EQ(id->ps, RDMA_PS_TCP);
  EXPECT_EQ(rdma_get_src_port(id), rdma_get_src_port(pair.listener.get()));
  EXPECT_NE(rdma_get_dst_port(id), 0);
  pair.Accept();
  EXPECT_EQ(rdma_get_dst_port(id), rdma_get_src_port(pair.client.id.get()));
}

TEST_F(CmTest, ARejectionCarriesItsPrivateData) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  pair.Request();
  world().ActAsServer();
  ASSERT_EQ(rdma_reject(pair.server.id.get(), "go away", 7), 0);
  CmEvent event = pair.client.NextEvent();
  ASSERT_TRUE(event);
  EXPECT_EQ(event->event, RDMA_CM_EVENT_REJECTED);
  EXPECT_NE(event->status, 0);
  ExpectPrivateData(pair.client.id.get(), PrivateData(event->param.conn), "go away");
}

TEST_F(CmTest, DestroyingAnUnansweredRequestRejectsIt) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  pair.Request();
  world().ActAsServer();
  pair.server.id = {};
  EXPECT_NE(pair.client.ExpectEvent(RDMA_CM_EVENT_REJECTED), 0);
}

TEST_F(CmTest, DestroyingTheListenerRejectsRequestsNobodyFetched) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  pair.client.Prepare(pair.client_options);
  ASSERT_EQ(rdma_connect(pair.client.id.get(), &pair.client_options.connection), 0);
  ASSERT_TRUE(BecomesReadable(pair.server.channel->fd));
  pair.listener = {};
  EXPECT_NE(pair.client.ExpectEvent(RDMA_CM_EVENT_REJECTED), 0);
}

TEST_F(CmTest, NobodyListeningIsRefused) {
  Pair pair;
  pair.ResolveTo(world().RefusingAddress());
  pair.client.Prepare(pair.client_options);
  ASSERT_EQ(rdma_connect(pair.client.id.get(), &pair.client_options.connection), 0);
  CmEvent event = pair.client.NextEvent();
  ASSERT_TRUE(event);
  EXPECT_EQ(event->event, RDMA_CM_EVENT_REJECTED) << rdma_event_str(event->event);
  // A reason of InfiniBand's (invalid service ID), or of TCP's.
  constexpr int kInvalidServiceId = 8;
  EXPECT_EQ(event->status, IsIwarp(pair.client.id.get()) ? -ECONNREFUSED : kInvalidServiceId);
}

TEST_F(CmTest, TheRequesterMayDisconnect) {
  auto pair = Pair::Connected();
  world().ActAsClient();
  Disconnect(&pair->client, &pair->server);
  ExpectState(pair->client.qp(), IBV_QPS_ERR);
  ExpectState(pair->server.qp(), IBV_QPS_ERR);
}

TEST_F(CmTest, TheAccepterMayDisconnect) {
  auto pair = Pair::Connected();
  world().ActAsServer();
  Disconnect(&pair->server, &pair->client);
}

TEST_F(CmTest, BothMayDisconnectAtOnceAndEachHearsOnce) {
  auto pair = Pair::Connected();
  ASSERT_EQ(rdma_disconnect(pair->server.id.get()), 0);
  ASSERT_EQ(rdma_disconnect(pair->client.id.get()), 0);
  pair->server.ExpectEvent(RDMA_CM_EVENT_DISCONNECTED);
  pair->client.ExpectEvent(RDMA_CM_EVENT_DISCONNECTED);
  EXPECT_EQ(rdma_disconnect(pair->client.id.get()), 0);
  EXPECT_FALSE(pair->client.EventWaiting());
  EXPECT_FALSE(pair->server.EventWaiting());
}

TEST_F(CmTest, WorkSentBeforeDisconnectingArrives) {
  auto pair = Pair::Connected();
  Buffer inbox(pair->server.pd.get(), 1 << 16);
  Buffer outbox(pair->client.pd.get(), 1 << 16);
  outbox.FillPattern(5);
  ASSERT_EQ(PostReceive(pair->server.qp(), 1, {inbox.Sge()}), 0);
  ASSERT_EQ(Post(pair->client.qp(), {.wr_id = 2, .sges = {outbox.Sge()}}), 0);
  ExpectCompletion(pair->client.send_cq.get(), 2);
  ASSERT_EQ(rdma_disconnect(pair->client.id.get()), 0);
  EXPECT_EQ(ExpectCompletion(pair->server.receive_cq.get(), 1).byte_len, 1u << 16);
}

// perftest does: it need not hear of the connection first.
TEST_F(CmTest, WorkMayBePostedAsSoonAsAConnectionIsAccepted) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  pair.Request();
  Buffer inbox(pair.client.pd.get(), 64);
  ASSERT_EQ(PostReceive(pair.client.qp(), 1, {inbox.Sge()}), 0);
  world().ActAsServer();
  ASSERT_NO_FATAL_FAILURE(pair.server.Prepare(pair.server_options));
  Buffer outbox(pair.server.pd.get(), 64);
  outbox.FillPattern(7);
  ASSERT_EQ(rdma_accept(pair.server.id.get(), &pair.server_options.connection), 0) << std::strerror(errno);
  EXPECT_EQ(Post(pair.server.qp(), {.wr_id = 2, .sges = {outbox.Sge()}}), 0);
  EXPECT_EQ(pair.client.ExpectEvent(RDMA_CM_EVENT_ESTABLISHED), 0);
  EXPECT_EQ(pair.server.ExpectEvent(RDMA_CM_EVENT_ESTABLISHED), 0);
  ExpectCompletion(pair.server.send_cq.get(), 2);
  EXPECT_EQ(ExpectCompletion(pair.client.receive_cq.get(), 1).byte_len, 64u);
}

// What was posted then does not stay, if nothing comes of the connection.
TEST_F(CmTest, WorkOfAnAcceptedConnectionThatDoesNotComeIsFlushed) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  pair.Request();
  if (!IsIwarp(pair.client.id.get())) GTEST_SKIP() << "an InfiniBand QP sends until its retries are used up";
  if (world().HasThreads()) GTEST_SKIP() << "the connection may come before its peer goes";
  world().ActAsServer();
  ASSERT_NO_FATAL_FAILURE(pair.server.Prepare(pair.server_options));
  Buffer memory(pair.server.pd.get(), 64);
  ASSERT_EQ(PostReceive(pair.server.qp(), 1, {memory.Sge()}), 0);
  ASSERT_EQ(rdma_accept(pair.server.id.get(), &pair.server_options.connection), 0) << std::strerror(errno);
  ASSERT_EQ(Post(pair.server.qp(), {.wr_id = 2, .sges = {memory.Sge()}}), 0);
  world().ActAsClient();
  rdma_destroy_qp(pair.client.id.get());
  pair.client.id = {};
  world().ActAsServer();
  ExpectCompletion(pair.server.send_cq.get(), 2, IBV_WC_WR_FLUSH_ERR);
  ExpectCompletion(pair.server.receive_cq.get(), 1, IBV_WC_WR_FLUSH_ERR);
  ExpectState(pair.server.qp(), IBV_QPS_ERR);
}

TEST_F(CmTest, AConnectionEndsWithItsId) {
  auto pair = Pair::Connected();
  rdma_destroy_qp(pair->client.id.get());
  pair->client.id = {};
  pair->server.ExpectEvent(RDMA_CM_EVENT_DISCONNECTED);
}

TEST_F(CmTest, ManyConnectionsOnOneListener) {
  constexpr int kConnections = 20;
  Pair listening;
  listening.Listen();
  std::vector<std::unique_ptr<Pair>> pairs;
  for (int i = 0; i < kConnections; ++i) {
    auto pair = std::make_unique<Pair>();
    pair->ResolveTo(listening.ListenAddress());
    pair->client.Prepare(pair->client_options);
    ASSERT_EQ(rdma_connect(pair->client.id.get(), &pair->client_options.connection), 0);
    CmEvent request = listening.server.NextEvent();
    ASSERT_TRUE(request);
    ASSERT_EQ(request->event, RDMA_CM_EVENT_CONNECT_REQUEST);
    pair->server.id = CmId(request->id);
    request = {};
    pair->server.Prepare(pair->server_options);
    ASSERT_EQ(rdma_accept(pair->server.id.get(), &pair->server_options.connection), 0);
    pair->client.ExpectEvent(RDMA_CM_EVENT_ESTABLISHED);
    listening.server.ExpectEvent(RDMA_CM_EVENT_ESTABLISHED);
    pairs.push_back(std::move(pair));
  }
  for (auto& pair : pairs) {
    Buffer inbox(pair->server.pd.get(), 64);
    Buffer outbox(pair->client.pd.get(), 64);
    ASSERT_EQ(PostReceive(pair->server.qp(), 1, {inbox.Sge()}), 0);
    ASSERT_EQ(Post(pair->client.qp(), {.wr_id = 2, .sges = {outbox.Sge()}}), 0);
    ExpectCompletion(pair->server.receive_cq.get(), 1);
    ExpectCompletion(pair->client.send_cq.get(), 2);
  }
}

TEST_F(CmTest, AnEmptyNonBlockingChannelSaysTryAgain) {
  Pair pair;
  SetNonBlocking(pair.client.channel->fd);
  auto event = GetCmEvent(pair.client.channel.get());
  ASSERT_FALSE(event);
  EXPECT_EQ(event.error().error, EAGAIN);
}

TEST_F(CmTest, DestroyingAnIdWaitsUntilItsEventsAreAcknowledged) {
  Pair pair;
  pair.Listen();
  auto id = CreateCmId(pair.client.channel.get());
  ASSERT_TRUE(id);
  sockaddr_storage destination = pair.ListenAddress();
  ASSERT_EQ(rdma_resolve_addr(id->get(), nullptr, reinterpret_cast<sockaddr*>(&destination), 1000), 0);
  CmEvent event = pair.client.NextEvent();
  ASSERT_TRUE(event);
  ExpectWaits([&] { EXPECT_EQ(id->Destroy(), 0); }, [&] { EXPECT_EQ(event.Destroy(), 0); });
}

TEST_F(CmTest, EventsOfADestroyedIdAreNotDelivered) {
  Pair pair;
  pair.Listen();
  auto id = CreateCmId(pair.client.channel.get());
  ASSERT_TRUE(id);
  sockaddr_storage destination = pair.ListenAddress();
  ASSERT_EQ(rdma_resolve_addr(id->get(), nullptr, reinterpret_cast<sockaddr*>(&destination), 1000), 0);
  ASSERT_TRUE(BecomesReadable(pair.client.channel->fd));
  EXPECT_EQ(id->Destroy(), 0);
  EXPECT_FALSE(pair.client.EventWaiting());
}

TEST_F(CmTest, AQpMayBeMadeWithoutNamingPdOrCqs) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  ibv_qp_init_attr attributes{};
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  rdma_cm_id* id = pair.client.id.get();
  ASSERT_EQ(rdma_create_qp(id, nullptr, &attributes), 0) << std::strerror(errno);
  EXPECT_NE(id->qp, nullptr);
  EXPECT_NE(id->pd, nullptr);
  EXPECT_NE(id->send_cq, nullptr);
  EXPECT_NE(id->recv_cq, nullptr);
  EXPECT_NE(id->send_cq_channel, nullptr);
  EXPECT_EQ(id->qp->state, IBV_QPS_INIT);
  rdma_destroy_qp(id);
  EXPECT_EQ(id->qp, nullptr);
  EXPECT_EQ(id->send_cq, nullptr);
}

TEST_F(CmTest, OptionsAreCheckedForSize) {
  Pair pair;
  auto id = CreateCmId(pair.client.channel.get());
  ASSERT_TRUE(id);
  uint8_t service_class = 8;
  int reuse = 1;
  EXPECT_EQ(rdma_set_option(id->get(), RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &service_class, sizeof(service_class)), 0);
  EXPECT_EQ(rdma_set_option(id->get(), RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &reuse, sizeof(reuse)), 0);
  EXPECT_EQ(rdma_set_option(id->get(), RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &service_class, 77), -1);
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(CmTest, AddressInformationIsForEitherSide) {
  rdma_addrinfo hints{};
  hints.ai_flags = RAI_NUMERICHOST;
  hints.ai_port_space = RDMA_PS_TCP;
  rdma_addrinfo* info = nullptr;
  ASSERT_EQ(rdma_getaddrinfo("127.0.0.1", "20049", &hints, &info), 0) << std::strerror(errno);
  ASSERT_NE(info->ai_dst_addr, nullptr);
  EXPECT_EQ(reinterpret_cast<sockaddr_in*>(info->ai_dst_addr)->sin_port, htons(20049));
  EXPECT_EQ(info->ai_port_space, RDMA_PS_TCP);
  EXPECT_EQ(info->ai_qp_type, IBV_QPT_RC);
  rdma_freeaddrinfo(info);
  hints.ai_flags |= RAI_PASSIVE;
  ASSERT_EQ(rdma_getaddrinfo("127.0.0.1", "20049", &hints, &info), 0);
  EXPECT_NE(info->ai_src_addr, nullptr);
  rdma_freeaddrinfo(info);
  EXPECT_NE(rdma_getaddrinfo("no such host", "20049", &hints, &info), 0);
}

}  // namespace
}  // namespace stagecoach::verbs
