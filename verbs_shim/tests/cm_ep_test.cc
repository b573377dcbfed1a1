// Endpoints: rdma_create_ep from what rdma_getaddrinfo found, used with the helpers of rdma_verbs.h; and
// rdma_getaddrinfo itself.

#include <arpa/inet.h>
#include <netdb.h>
#include <rdma/rdma_verbs.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

struct FreeInfo {
  void operator()(rdma_addrinfo* info) const { rdma_freeaddrinfo(info); }
};
using Info = std::unique_ptr<rdma_addrinfo, FreeInfo>;

struct DestroyEndpoint {
  void operator()(rdma_cm_id* id) const { rdma_destroy_ep(id); }
};
using Ep = std::unique_ptr<rdma_cm_id, DestroyEndpoint>;

std::string HostOf(const sockaddr_storage& address) {
  char text[NI_MAXHOST];
  EXPECT_EQ(getnameinfo(reinterpret_cast<const sockaddr*>(&address), sizeof(address), text, sizeof(text), nullptr, 0,
                        NI_NUMERICHOST),
            0);
  return text;
}

class CmEpTest : public VerbsTest {
 protected:
  Info Look(const sockaddr_storage& address, int flags) {
    rdma_addrinfo hints{};
    hints.ai_flags = flags | RAI_NUMERICHOST;
    hints.ai_port_space = RDMA_PS_TCP;
    const std::string port = std::to_string(ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port));
    rdma_addrinfo* info = nullptr;
    EXPECT_EQ(rdma_getaddrinfo(HostOf(address).c_str(), port.c_str(), &hints, &info), 0);
    return Info(info);
  }

  static ibv_qp_init_attr Attributes() {
    ibv_qp_init_attr attributes{};
    attributes.qp_type = IBV_QPT_RC;
    attributes.sq_sig_all = 1;
    attributes.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    return attributes;
  }

  Ep Listening(ibv_pd* pd, ibv_qp_init_attr* attributes) {
    const Info info = Look(world().ServerAddress(), RAI_PASSIVE);
    rdma_cm_id* id = nullptr;
    EXPECT_EQ(rdma_create_ep(&id, info.get(), pd, attributes), 0) << std::strerror(errno);
    Ep listener(id);
    if (id != nullptr) {
      EXPECT_EQ(rdma_listen(id, 4), 0) << std::strerror(errno);
    }
    return listener;
  }
};

TEST_F(CmEpTest, TwoEndpointsTalkThroughTheHelpers) {
  world().ActAsServer();
  ibv_qp_init_attr passive = Attributes();
  Ep listener = Listening(nullptr, &passive);
  ASSERT_NE(listener, nullptr);
  EXPECT_EQ(listener->qp, nullptr);
  const sockaddr_storage destination = listener->route.addr.src_storage;
  world().SideBySide(
      [&] {
        rdma_cm_id* accepted = nullptr;
        ASSERT_EQ(rdma_get_request(listener.get(), &accepted), 0) << std::strerror(errno);
        Ep id(accepted);
        ASSERT_NE(id->qp, nullptr);
        ASSERT_NE(id->pd, nullptr);
        EXPECT_NE(id->send_cq, nullptr);
        EXPECT_NE(id->recv_cq_channel, nullptr);
        char message[16] = "";
        ibv_mr* memory = rdma_reg_msgs(id.get(), message, sizeof(message));
        ASSERT_NE(memory, nullptr);
        ASSERT_EQ(rdma_post_recv(id.get(), message, message, sizeof(message), memory), 0);
        ASSERT_EQ(rdma_accept(id.get(), nullptr), 0) << std::strerror(errno);
        ibv_wc completion{};
        ASSERT_EQ(rdma_get_recv_comp(id.get(), &completion), 1);
        EXPECT_EQ(completion.wr_id, reinterpret_cast<uintptr_t>(message));
        EXPECT_STREQ(message, "ping");
        std::strcpy(message, "pong");
        ASSERT_EQ(rdma_post_send(id.get(), nullptr, message, sizeof(message), memory, 0), 0);
        ASSERT_EQ(rdma_get_send_comp(id.get(), &completion), 1);
        EXPECT_EQ(completion.status, IBV_WC_SUCCESS);
        ASSERT_EQ(rdma_disconnect(id.get()), 0) << std::strerror(errno);
        EXPECT_EQ(rdma_dereg_mr(memory), 0);
      },
      [&] {
        const Info info = Look(destination, 0);
        ibv_qp_init_attr attributes = Attributes();
        rdma_cm_id* created = nullptr;
        ASSERT_EQ(rdma_create_ep(&created, info.get(), nullptr, &attributes), 0) << std::strerror(errno);
        Ep id(created);
        ASSERT_NE(id->qp, nullptr);
        EXPECT_GE(attributes.cap.max_send_wr, 4u);
        char message[16] = "ping";
        char answer[16] = "";
        ibv_mr* outgoing = rdma_reg_msgs(id.get(), message, sizeof(message));
        ibv_mr* incoming = rdma_reg_msgs(id.get(), answer, sizeof(answer));
        ASSERT_TRUE(outgoing != nullptr && incoming != nullptr);
        ASSERT_EQ(rdma_post_recv(id.get(), nullptr, answer, sizeof(answer), incoming), 0);
        ASSERT_EQ(rdma_connect(id.get(), nullptr), 0) << std::strerror(errno);
        ASSERT_EQ(rdma_post_send(id.get(), nullptr, message, sizeof(message), outgoing, 0), 0);
        ibv_wc completion{};
        ASSERT_EQ(rdma_get_send_comp(id.get(), &completion), 1);
        EXPECT_EQ(completion.status, IBV_WC_SUCCESS);
        ASSERT_EQ(rdma_get_recv_comp(id.get(), &completion), 1);
        EXPECT_EQ(completion.status, IBV_WC_SUCCESS);
        EXPECT_STREQ(answer, "pong");
        ASSERT_EQ(rdma_disconnect(id.get()), 0) << std::strerror(errno);
        EXPECT_EQ(rdma_dereg_mr(outgoing), 0);
        EXPECT_EQ(rdma_dereg_mr(incoming), 0);
      });
}

TEST_F(CmEpTest, RemoteMemoryIsReadAndWrittenThroughTheHelpers) {
  struct Offer {
    uint64_t address;
    uint32_t read_key;
    uint32_t write_key;
  };
  world().ActAsServer();
  ibv_qp_init_attr passive = Attributes();
  Ep listener = Listening(nullptr, &passive);
  ASSERT_NE(listener, nullptr);
  const sockaddr_storage destination = listener->route.addr.src_storage;
  char exposed[16] = "served";
  world().SideBySide(
      [&] {
        rdma_cm_id* accepted = nullptr;
        ASSERT_EQ(rdma_get_request(listener.get(), &accepted), 0);
        Ep id(accepted);
        ibv_mr* readable = rdma_reg_read(id.get(), exposed, sizeof(exposed));
        ibv_mr* writable = rdma_reg_write(id.get(), exposed, sizeof(exposed));
        ASSERT_TRUE(readable != nullptr && writable != nullptr);
        char done[4] = "";
        ibv_mr* messages = rdma_reg_msgs(id.get(), done, sizeof(done));
        ASSERT_NE(messages, nullptr);
        ASSERT_EQ(rdma_post_recv(id.get(), nullptr, done, sizeof(done), messages), 0);
        const Offer offer{reinterpret_cast<uintptr_t>(exposed), readable->rkey, writable->rkey};
        rdma_conn_param parameters{};
        parameters.private_data = &offer;
        parameters.private_data_len = sizeof(offer);
        parameters.responder_resources = parameters.initiator_depth = 1;
        parameters.rnr_retry_count = 7;
        ASSERT_EQ(rdma_accept(id.get(), &parameters), 0) << std::strerror(errno);
        ibv_wc completion{};
        ASSERT_EQ(rdma_get_recv_comp(id.get(), &completion), 1);
        EXPECT_EQ(completion.status, IBV_WC_SUCCESS);
        EXPECT_STREQ(exposed, "taken");
        ASSERT_EQ(rdma_disconnect(id.get()), 0);
        EXPECT_EQ(rdma_dereg_mr(messages), 0);
        EXPECT_EQ(rdma_dereg_mr(readable), 0);
        EXPECT_EQ(rdma_dereg_mr(writable), 0);
      },
      [&] {
        const Info info = Look(destination, 0);
        ibv_qp_init_attr attributes = Attributes();
        rdma_cm_id* created = nullptr;
        ASSERT_EQ(rdma_create_ep(&created, info.get(), nullptr, &attributes), 0) << std::strerror(errno);
        Ep id(created);
        rdma_conn_param parameters{};
        parameters.responder_resources = parameters.initiator_depth = 1;
        parameters.retry_count = parameters.rnr_retry_count = 7;
        ASSERT_EQ(rdma_connect(id.get(), &parameters), 0) << std::strerror(errno);
        Offer offer{};
        ASSERT_GE(id->event->param.conn.private_data_len, sizeof(offer));
        std::memcpy(&offer, id->event->param.conn.private_data, sizeof(offer));
        char local[16] = "";
        // The sink of a Read on iWARP is written remotely.
        ibv_mr* memory = rdma_reg_write(id.get(), local, sizeof(local));
        ASSERT_NE(memory, nullptr);
        ASSERT_EQ(rdma_post_read(id.get(), nullptr, local, 7, memory, 0, offer.address, offer.read_key), 0);
        ibv_wc completion{};
        ASSERT_EQ(rdma_get_send_comp(id.get(), &completion), 1);
        ASSERT_EQ(completion.status, IBV_WC_SUCCESS);
        EXPECT_STREQ(local, "served");
        std::strcpy(local, "taken");
        ASSERT_EQ(rdma_post_write(id.get(), nullptr, local, 6, memory, 0, offer.address, offer.write_key), 0);
        ASSERT_EQ(rdma_get_send_comp(id.get(), &completion), 1);
        EXPECT_EQ(completion.status, IBV_WC_SUCCESS);
        ASSERT_EQ(rdma_post_send(id.get(), nullptr, local, 1, memory, 0), 0);
        ASSERT_EQ(rdma_get_send_comp(id.get(), &completion), 1);
        EXPECT_EQ(completion.status, IBV_WC_SUCCESS);
        ASSERT_EQ(rdma_disconnect(id.get()), 0);
        EXPECT_EQ(rdma_dereg_mr(memory), 0);
      });
}

TEST_F(CmEpTest, AnEndpointWithoutQpAttributesHasNoQp) {
  Pair pair;
  pair.Listen();
  world().ActAsClient();
  const Info info = Look(pair.ListenAddress(), 0);
  rdma_cm_id* created = nullptr;
  ASSERT_EQ(rdma_create_ep(&created, info.get(), nullptr, nullptr), 0) << std::strerror(errno);
  const Ep id(created);
  EXPECT_EQ(id->qp, nullptr);
  EXPECT_NE(id->verbs, nullptr);
  EXPECT_EQ(rdma_connect(id.get(), nullptr), -1);
  EXPECT_EQ(errno, EINVAL);
  ibv_qp_init_attr attributes = Attributes();
  EXPECT_EQ(rdma_create_qp(id.get(), nullptr, &attributes), 0) << std::strerror(errno);
}

TEST_F(CmEpTest, RequestsOfAnEndpointGetQpsInItsProtectionDomain) {
  world().ActAsServer();
  ibv_context** devices = rdma_get_devices(nullptr);
  ASSERT_NE(devices, nullptr);
  auto pd = AllocatePd(devices[0]);
  ASSERT_TRUE(pd);
  ibv_qp_init_attr attributes = Attributes();
  {
    Ep listener = Listening(pd->get(), &attributes);
    ASSERT_NE(listener, nullptr);
    Pair pair;
    pair.ResolveTo(listener->route.addr.src_storage);
    pair.client.Prepare(pair.client_options);
    ASSERT_EQ(rdma_connect(pair.client.id.get(), &pair.client_options.connection), 0);
    rdma_cm_id* request = nullptr;
    ASSERT_EQ(rdma_get_request(listener.get(), &request), 0) << std::strerror(errno);
    const Ep id(request);
    ASSERT_NE(id->qp, nullptr);
    EXPECT_EQ(id->pd, pd->get());
    EXPECT_EQ(id->qp->pd, pd->get());
    EXPECT_EQ(id->qp->qp_type, IBV_QPT_RC);
    // On InfiniBand accepting ends when the client has looked at the answer.
    world().SideBySide([&] { EXPECT_EQ(rdma_accept(id.get(), nullptr), 0) << std::strerror(errno); },
                       [&] { EXPECT_EQ(pair.client.ExpectEvent(RDMA_CM_EVENT_ESTABLISHED), 0); });
  }
  EXPECT_EQ(pd->Destroy(), 0);
  rdma_free_devices(devices);
}

TEST_F(CmEpTest, AnEndpointCanBeMigratedAndUsedAsynchronously) {
  Pair pair;
  pair.Listen();
  world().ActAsClient();
  const Info info = Look(pair.ListenAddress(), 0);
  ibv_qp_init_attr attributes = Attributes();
  rdma_cm_id* created = nullptr;
  ASSERT_EQ(rdma_create_ep(&created, info.get(), nullptr, &attributes), 0) << std::strerror(errno);
  const Ep id(created);
  ASSERT_EQ(rdma_migrate_id(id.get(), pair.client.channel.get()), 0);
  ASSERT_EQ(rdma_connect(id.get(), nullptr), 0);
  CmEvent request = pair.server.NextEvent();
  ASSERT_TRUE(request);
  pair.server.id = CmId(request->id);
  request = {};
  pair.server.id = {};
  EXPECT_NE(pair.client.ExpectEvent(RDMA_CM_EVENT_REJECTED), 0);
}

// rdma_getaddrinfo(3): "ai_connect data must be transferred as private data, with any user supplied private data
// following it".
TEST_F(CmEpTest, ConnectionDataGoesBeforePrivateData) {
  Pair pair;
  pair.Listen();
  world().ActAsClient();
  const Info info = Look(pair.ListenAddress(), 0);
  info->ai_connect = strdup("first ");
  info->ai_connect_len = 6;
  ibv_qp_init_attr attributes = Attributes();
  rdma_cm_id* created = nullptr;
  ASSERT_EQ(rdma_create_ep(&created, info.get(), nullptr, &attributes), 0) << std::strerror(errno);
  const Ep id(created);
  ASSERT_EQ(rdma_migrate_id(id.get(), pair.client.channel.get()), 0);
  rdma_conn_param parameters{};
  parameters.private_data = "second";
  parameters.private_data_len = 6;
  parameters.retry_count = 7;
  ASSERT_EQ(rdma_connect(id.get(), &parameters), 0);
  {
    CmEvent request = pair.server.NextEvent();
    ASSERT_TRUE(request);
    EXPECT_EQ(PrivateData(request->param.conn).substr(0, 12), "first second");
    pair.server.id = CmId(request->id);
  }
  pair.server.id = {};
  EXPECT_NE(pair.client.ExpectEvent(RDMA_CM_EVENT_REJECTED), 0);
}

TEST_F(CmEpTest, AnAddressThatIsNotHereMakesNoEndpoint) {
  world().ActAsServer();
  sockaddr_storage nowhere{};
  auto* address = reinterpret_cast<sockaddr_in*>(&nowhere);
  address->sin_family = AF_INET;
  address->sin_addr.s_addr = inet_addr("192.0.2.77");  // TEST-NET-1
  const Info info = Look(nowhere, RAI_PASSIVE);
  rdma_cm_id* id = nullptr;
  EXPECT_EQ(rdma_create_ep(&id, info.get(), nullptr, nullptr), -1);
  EXPECT_TRUE(errno == EADDRNOTAVAIL || errno == ENODEV) << errno;
}

// --- What is on an id ---

TEST_F(CmEpTest, AnIdWithADeviceHasAProtectionDomain) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  rdma_cm_id* id = pair.client.id.get();
  ASSERT_NE(id->pd, nullptr);
  char bytes[16];
  ibv_mr* memory = rdma_reg_msgs(id, bytes, sizeof(bytes));
  ASSERT_NE(memory, nullptr);
  EXPECT_EQ(memory->pd, id->pd);
  EXPECT_EQ(rdma_dereg_mr(memory), 0);
}

TEST_F(CmEpTest, QpsOfAnIdTakeFromItsSharedReceiveQueue) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  pair.Request();
  world().ActAsServer();
  rdma_cm_id* id = pair.server.id.get();
  ibv_srq_init_attr attributes{};
  attributes.attr.max_wr = 4;
  attributes.attr.max_sge = 1;
  ASSERT_EQ(rdma_create_srq(id, nullptr, &attributes), 0) << std::strerror(errno);
  ASSERT_NE(id->srq, nullptr);
  EXPECT_GE(attributes.attr.max_wr, 4u);
  EXPECT_EQ(id->srq->pd, id->pd);
  // One is all an id can have.
  EXPECT_EQ(rdma_create_srq(id, nullptr, &attributes), -1);
  EXPECT_EQ(errno, EINVAL);
  ibv_qp_init_attr of_qp = Attributes();
  ASSERT_EQ(rdma_create_qp(id, nullptr, &of_qp), 0) << std::strerror(errno);
  EXPECT_EQ(id->qp->srq, id->srq);
  char message[16] = "";
  ibv_mr* memory = rdma_reg_msgs(id, message, sizeof(message));
  ASSERT_NE(memory, nullptr);
  ASSERT_EQ(rdma_post_recv(id, message, message, sizeof(message), memory), 0);
  ASSERT_EQ(rdma_accept(id, &pair.server_options.connection), 0) << std::strerror(errno);
  EXPECT_EQ(pair.client.ExpectEvent(RDMA_CM_EVENT_ESTABLISHED), 0);
  EXPECT_EQ(pair.server.ExpectEvent(RDMA_CM_EVENT_ESTABLISHED), 0);
  {
    Buffer outbox(pair.client.pd.get(), sizeof(message));
    outbox.Fill("shared");
    ASSERT_EQ(Post(pair.client.qp(), {.wr_id = 2, .sges = {outbox.Sge()}}), 0);
    EXPECT_EQ(ExpectCompletion(id->recv_cq, reinterpret_cast<uintptr_t>(message)).byte_len, sizeof(message));
    ExpectCompletion(pair.client.send_cq.get(), 2);
  }
  EXPECT_STREQ(message, "shared");
  EXPECT_EQ(rdma_dereg_mr(memory), 0);
  // Destroys QP, shared receive queue and id, in this order.
  rdma_destroy_ep(pair.server.id.release());
}

TEST_F(CmEpTest, SharedReceiveQueuesNeedADevice) {
  auto channel = CreateEventChannel();
  ASSERT_TRUE(channel);
  auto id = CreateCmId(channel->get());
  ASSERT_TRUE(id);
  ibv_srq_init_attr attributes{};
  attributes.attr.max_wr = 4;
  attributes.attr.max_sge = 1;
  EXPECT_EQ(rdma_create_srq(id->get(), nullptr, &attributes), -1);
  EXPECT_EQ(errno, EINVAL);
  rdma_destroy_srq(id->get());
}

TEST_F(CmEpTest, AnotherSharedReceiveQueueThanTheIdsIsInvalid) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  rdma_cm_id* id = pair.client.id.get();
  ibv_srq_init_attr_ex attributes{};
  attributes.attr.max_wr = 4;
  attributes.attr.max_sge = 1;
  attributes.comp_mask = IBV_SRQ_INIT_ATTR_TYPE;
  attributes.srq_type = IBV_SRQT_BASIC;
  ASSERT_EQ(rdma_create_srq_ex(id, &attributes), 0) << std::strerror(errno);
  ibv_srq_init_attr plain{};
  plain.attr.max_wr = 4;
  plain.attr.max_sge = 1;
  ibv_srq* other = ibv_create_srq(id->pd, &plain);
  ASSERT_NE(other, nullptr);
  ibv_qp_init_attr of_qp = Attributes();
  of_qp.srq = other;
  EXPECT_EQ(rdma_create_qp(id, nullptr, &of_qp), -1);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(ibv_destroy_srq(other), 0);
  rdma_destroy_srq(id);
  EXPECT_EQ(id->srq, nullptr);
}

// --- rdma_create_qp_ex ---

TEST_F(CmEpTest, ExtendedAttributesMakeAQpToo) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  rdma_cm_id* id = pair.client.id.get();
  auto pd = AllocatePd(id->verbs);
  ASSERT_TRUE(pd);
  ibv_qp_init_attr_ex attributes{};
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  attributes.comp_mask = IBV_QP_INIT_ATTR_PD;
  attributes.pd = pd->get();
  ASSERT_EQ(rdma_create_qp_ex(id, &attributes), 0) << std::strerror(errno);
  EXPECT_EQ(id->qp->pd, pd->get());
  EXPECT_EQ(attributes.send_cq, id->send_cq);
  // One is all an id can have.
  EXPECT_EQ(rdma_create_qp_ex(id, &attributes), -1);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_NE(id->send_cq, nullptr);
  rdma_destroy_qp(id);
}

TEST_F(CmEpTest, AProtectionDomainOfAnotherContextIsInvalid) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  auto device = OpenDevice();
  ASSERT_TRUE(device);
  auto pd = AllocatePd(device->get());
  ASSERT_TRUE(pd);
  ibv_qp_init_attr attributes = Attributes();
  EXPECT_EQ(rdma_create_qp(pair.client.id.get(), pd->get(), &attributes), -1);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(pair.client.id->qp, nullptr);
  EXPECT_EQ(pair.client.id->send_cq, nullptr);
}

TEST_F(CmEpTest, ACqOfAnotherContextIsRefused) {
  Pair pair;
  pair.Listen();
  pair.Resolve();
  auto device = OpenDevice();
  ASSERT_TRUE(device);
  // Where handles count in each context alone these are of nothing the id's has.
  std::vector<CompletionQueue> cqs;
  for (int i = 0; i < 16; ++i) cqs.push_back(std::move(CreateCq(device->get(), 4).value()));
  ibv_qp_init_attr attributes = Attributes();
  attributes.send_cq = attributes.recv_cq = cqs.back().get();
  EXPECT_EQ(rdma_create_qp(pair.client.id.get(), nullptr, &attributes), -1);
  EXPECT_TRUE(errno == EINVAL || errno == ENOENT) << errno;
  EXPECT_EQ(pair.client.id->qp, nullptr);
}

// --- rdma_getaddrinfo ---

class AddressInfoTest : public VerbsTest {
 protected:
  static Info Look(const char* node, const char* service, const rdma_addrinfo* hints) {
    rdma_addrinfo* info = nullptr;
    const int result = rdma_getaddrinfo(node, service, hints, &info);
    EXPECT_EQ(result, 0) << gai_strerror(result) << ", " << std::strerror(errno);
    return Info(result == 0 ? info : nullptr);
  }
};

TEST_F(AddressInfoTest, WithoutHintsItIsForConnecting) {
  const Info info = Look("127.0.0.1", "20049", nullptr);
  ASSERT_NE(info, nullptr);
  EXPECT_EQ(info->ai_family, AF_INET);
  EXPECT_EQ(info->ai_port_space, RDMA_PS_TCP);
  EXPECT_EQ(info->ai_qp_type, IBV_QPT_RC);
  ASSERT_NE(info->ai_dst_addr, nullptr);
  EXPECT_EQ(info->ai_dst_len, sizeof(sockaddr_in));
  EXPECT_EQ(reinterpret_cast<sockaddr_in*>(info->ai_dst_addr)->sin_port, htons(20049));
}

TEST_F(AddressInfoTest, APassiveAddressIsTheSource) {
  rdma_addrinfo hints{};
  hints.ai_flags = RAI_PASSIVE;
  hints.ai_port_space = RDMA_PS_TCP;
  const Info info = Look(nullptr, "20049", &hints);
  for (const rdma_addrinfo* each = info.get(); each != nullptr; each = each->ai_next) {
    EXPECT_NE(each->ai_flags & RAI_PASSIVE, 0);
    ASSERT_NE(each->ai_src_addr, nullptr);
    EXPECT_EQ(each->ai_src_addr->sa_family, each->ai_family);
    EXPECT_EQ(each->ai_dst_len, 0u);
    EXPECT_EQ(each->ai_dst_addr, nullptr);
  }
}

TEST_F(AddressInfoTest, BothFamiliesAreUnderstood) {
  rdma_addrinfo hints{};
  hints.ai_flags = RAI_NUMERICHOST | RAI_NOROUTE;
  hints.ai_port_space = RDMA_PS_TCP;
  const Info info = Look("::1", "7", &hints);
  ASSERT_NE(info, nullptr);
  EXPECT_EQ(info->ai_family, AF_INET6);
  ASSERT_EQ(info->ai_dst_len, sizeof(sockaddr_in6));
  EXPECT_TRUE(IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<sockaddr_in6*>(info->ai_dst_addr)->sin6_addr));
}

TEST_F(AddressInfoTest, TheFamilyCanBePrescribed) {
  rdma_addrinfo hints{};
  hints.ai_flags = RAI_PASSIVE | RAI_FAMILY;
  hints.ai_port_space = RDMA_PS_TCP;
  for (const int family : {AF_INET, AF_INET6}) {
    hints.ai_family = family;
    const Info info = Look(nullptr, "20049", &hints);
    ASSERT_NE(info, nullptr);
    EXPECT_EQ(info->ai_family, family);
    EXPECT_EQ(info->ai_next, nullptr);
  }
  hints.ai_flags = RAI_FAMILY | RAI_NUMERICHOST;
  hints.ai_family = AF_INET6;
  rdma_addrinfo* none = nullptr;
  EXPECT_NE(rdma_getaddrinfo("127.0.0.1", "7", &hints, &none), 0);
}

TEST_F(AddressInfoTest, NumericHostsAreNotLookedUp) {
  rdma_addrinfo hints{};
  hints.ai_flags = RAI_NUMERICHOST;
  hints.ai_port_space = RDMA_PS_TCP;
  rdma_addrinfo* none = nullptr;
  EXPECT_EQ(rdma_getaddrinfo("localhost", "7", &hints, &none), EAI_NONAME);
}

TEST_F(AddressInfoTest, TheSourceOfTheHintsComesAlong) {
  sockaddr_in source{};
  source.sin_family = AF_INET;
  source.sin_addr.s_addr = inet_addr("127.0.0.5");
  rdma_addrinfo hints{};
  hints.ai_flags = RAI_NUMERICHOST;
  hints.ai_port_space = RDMA_PS_TCP;
  hints.ai_src_addr = reinterpret_cast<sockaddr*>(&source);
  hints.ai_src_len = sizeof(source);
  const Info info = Look("127.0.0.1", "7", &hints);
  ASSERT_NE(info, nullptr);
  ASSERT_EQ(info->ai_src_len, sizeof(source));
  EXPECT_NE(info->ai_src_addr, hints.ai_src_addr);
  EXPECT_EQ(std::memcmp(info->ai_src_addr, &source, sizeof(source)), 0);
}

TEST_F(AddressInfoTest, WithoutANameTheHintsAreTheAnswer) {
  sockaddr_in destination{};
  destination.sin_family = AF_INET;
  destination.sin_port = htons(20049);
  destination.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  rdma_addrinfo hints{};
  hints.ai_family = AF_INET;
  hints.ai_qp_type = IBV_QPT_RC;
  hints.ai_port_space = RDMA_PS_TCP;
  hints.ai_dst_addr = reinterpret_cast<sockaddr*>(&destination);
  hints.ai_dst_len = sizeof(destination);
  const Info info = Look(nullptr, nullptr, &hints);
  ASSERT_NE(info, nullptr);
  EXPECT_EQ(info->ai_family, AF_INET);
  EXPECT_EQ(info->ai_port_space, RDMA_PS_TCP);
  ASSERT_EQ(info->ai_dst_len, sizeof(destination));
  EXPECT_EQ(std::memcmp(info->ai_dst_addr, &destination, sizeof(destination)), 0);
}

TEST_F(AddressInfoTest, QpTypeAndPortSpaceFollowEachOther) {
  rdma_addrinfo hints{};
  hints.ai_flags = RAI_NUMERICHOST;
  hints.ai_qp_type = IBV_QPT_UD;
  Info info = Look("127.0.0.1", "7", &hints);
  ASSERT_NE(info, nullptr);
  EXPECT_EQ(info->ai_port_space, RDMA_PS_UDP);
  hints.ai_qp_type = 0;
  hints.ai_port_space = RDMA_PS_UDP;
  info = Look("127.0.0.1", "7", &hints);
  ASSERT_NE(info, nullptr);
  EXPECT_EQ(info->ai_qp_type, IBV_QPT_UD);
  hints.ai_qp_type = IBV_QPT_RC;
  hints.ai_port_space = 0;
  info = Look("127.0.0.1", "7", &hints);
  ASSERT_NE(info, nullptr);
  EXPECT_EQ(info->ai_port_space, RDMA_PS_TCP);
  hints.ai_qp_type = IBV_QPT_UD;
  hints.ai_port_space = RDMA_PS_TCP;
  rdma_addrinfo* none = nullptr;
  EXPECT_NE(rdma_getaddrinfo("127.0.0.1", "7", &hints, &none), 0);
}

TEST_F(AddressInfoTest, NothingAtAllIsInvalid) {
  rdma_addrinfo* none = nullptr;
  EXPECT_EQ(rdma_getaddrinfo(nullptr, nullptr, nullptr, &none), -1);
  EXPECT_EQ(errno, EINVAL);
}

}  // namespace
}  // namespace stagecoach::verbs
