// Where rdma_cm here does what the stock library does not: it survives what would crash or hang there, answers with
// EOPNOTSUPP where Linux says ENOSYS, and finds more addresses. Programs must not rely on any of it.

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <infiniband/sa.h>
#include <netdb.h>
#include <rdma/rdma_verbs.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <set>
#include <thread>

namespace {

sockaddr_in Loopback(uint16_t port = 0) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

int Bind(rdma_cm_id* id, sockaddr_in address) {
  return rdma_bind_addr(id, reinterpret_cast<sockaddr*>(&address));
}
int Resolve(rdma_cm_id* id, sockaddr_in address) {
  return rdma_resolve_addr(id, nullptr, reinterpret_cast<sockaddr*>(&address), 100);
}

rdma_cm_id* NewId(rdma_event_channel* channel) {
  rdma_cm_id* id = nullptr;
  EXPECT_EQ(rdma_create_id(channel, &id, nullptr, RDMA_PS_TCP), 0);
  return id;
}

rdma_cm_id* SynchronousListener(const ibv_qp_init_attr* attributes = nullptr) {
  sockaddr_in here = Loopback();
  rdma_addrinfo info{};
  info.ai_flags = RAI_PASSIVE;
  info.ai_family = AF_INET;
  info.ai_qp_type = IBV_QPT_RC;
  info.ai_port_space = RDMA_PS_TCP;
  info.ai_src_addr = reinterpret_cast<sockaddr*>(&here);
  info.ai_src_len = sizeof(here);
  ibv_qp_init_attr copy{};
  if (attributes != nullptr) copy = *attributes;
  rdma_cm_id* id = nullptr;
  EXPECT_EQ(rdma_create_ep(&id, &info, nullptr, attributes != nullptr ? &copy : nullptr), 0);
  EXPECT_EQ(rdma_listen(id, 4), 0);
  return id;
}

ibv_qp_init_attr Attributes() {
  ibv_qp_init_attr attributes{};
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  return attributes;
}

// The stock library would use freed memory.
TEST(CmLenience, AcknowledgingAnEventTwiceDoesNoHarm) {
  rdma_event_channel* channel = rdma_create_event_channel();
  rdma_cm_id* id = NewId(channel);
  ASSERT_EQ(Resolve(id, Loopback(9)), 0);
  rdma_cm_event* event = nullptr;
  ASSERT_EQ(rdma_get_cm_event(channel, &event), 0);
  EXPECT_EQ(rdma_ack_cm_event(event), 0);
  errno = 0;
  EXPECT_EQ(rdma_ack_cm_event(event), -1);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(rdma_ack_cm_event(nullptr), -1);
  EXPECT_EQ(errno, EINVAL);
  // The count of the id is right: it neither hangs nor goes while an event is out.
  EXPECT_EQ(rdma_destroy_id(id), 0);
  rdma_destroy_event_channel(channel);
}

// rping destroys its channel under the thread that waits there.
TEST(CmLenience, AChannelThatIsGoneIsABadDescriptor) {
  rdma_event_channel* channel = rdma_create_event_channel();
  ASSERT_NE(channel, nullptr);
  rdma_destroy_event_channel(channel);
  rdma_cm_event* event = nullptr;
  EXPECT_EQ(rdma_get_cm_event(channel, &event), -1);
  EXPECT_EQ(errno, EBADF);
}

// The stock library would wait for an event that never comes.
TEST(CmLenience, ASynchronousIdThatHasEndedDisconnectsAtOnce) {
  const ibv_qp_init_attr attributes = Attributes();
  rdma_cm_id* listener = SynchronousListener(&attributes);
  const sockaddr_in there = listener->route.addr.src_sin;
  std::thread server([&] {
    rdma_cm_id* id = nullptr;
    ASSERT_EQ(rdma_get_request(listener, &id), 0);
    ASSERT_EQ(rdma_accept(id, nullptr), 0) << std::strerror(errno);
    EXPECT_EQ(rdma_disconnect(id), 0);
    EXPECT_EQ(rdma_disconnect(id), 0);
    rdma_destroy_ep(id);
  });
  rdma_cm_id* id = NewId(nullptr);
  ASSERT_EQ(Resolve(id, there), 0);
  ASSERT_EQ(rdma_resolve_route(id, 100), 0);
  ibv_qp_init_attr own = Attributes();
  ASSERT_EQ(rdma_create_qp(id, nullptr, &own), 0);
  ASSERT_EQ(rdma_connect(id, nullptr), 0) << std::strerror(errno);
  EXPECT_EQ(rdma_disconnect(id), 0);
  EXPECT_EQ(rdma_disconnect(id), 0);
  server.join();
  rdma_destroy_ep(id);
  rdma_destroy_ep(listener);
}

TEST(CmLenience, OnlyListenersHaveRequests) {
  rdma_cm_id* id = NewId(nullptr);
  rdma_cm_id* request = nullptr;
  EXPECT_EQ(rdma_get_request(id, &request), -1);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(rdma_destroy_id(id), 0);
}

// The peer is told, instead of being left waiting.
TEST(CmLenience, ARequestThatGetsNoQpIsRejected) {
  ibv_qp_init_attr impossible = Attributes();
  impossible.cap.max_send_sge = 100000;
  rdma_cm_id* listener = SynchronousListener(&impossible);
  const sockaddr_in there = listener->route.addr.src_sin;
  std::thread server([&] {
    rdma_cm_id* id = nullptr;
    EXPECT_EQ(rdma_get_request(listener, &id), -1);
    EXPECT_EQ(errno, EINVAL);
  });
  rdma_cm_id* id = NewId(nullptr);
  ASSERT_EQ(Resolve(id, there), 0);
  ASSERT_EQ(rdma_resolve_route(id, 100), 0);
  ibv_qp_init_attr own = Attributes();
  ASSERT_EQ(rdma_create_qp(id, nullptr, &own), 0);
  EXPECT_EQ(rdma_connect(id, nullptr), -1);
  EXPECT_EQ(errno, ECONNREFUSED);
  server.join();
  rdma_destroy_ep(id);
  rdma_destroy_ep(listener);
}

TEST(CmLenience, SynchronousIdsThatFindNoDescriptorFailWithEmfile) {
  // What is opened at first use must be there before.
  rdma_event_channel* channel = rdma_create_event_channel();
  rdma_cm_id* asynchronous = NewId(channel);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const int lowest_free = dup(channel->fd);
  ASSERT_GE(lowest_free, 0);
  close(lowest_free);
  const rlimit none_left{static_cast<rlim_t>(lowest_free), before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none_left), 0);
  rdma_cm_id* id = nullptr;
  errno = 0;
  const int created = rdma_create_id(nullptr, &id, nullptr, RDMA_PS_TCP);
  const int create_error = errno;
  errno = 0;
  const int migrated = rdma_migrate_id(asynchronous, nullptr);
  const int migrate_error = errno;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(created, -1);
  EXPECT_EQ(create_error, EMFILE);
  EXPECT_EQ(migrated, -1);
  EXPECT_EQ(migrate_error, EMFILE);
  EXPECT_EQ(asynchronous->channel, channel);
  EXPECT_EQ(rdma_destroy_id(asynchronous), 0);
  rdma_destroy_event_channel(channel);
}

TEST(CmLenience, WhatIsNotKnownIsNotSupported) {
  rdma_event_channel* channel = rdma_create_event_channel();
  rdma_cm_id* id = NewId(channel);
  int value = 1;
  EXPECT_EQ(rdma_set_option(id, RDMA_OPTION_ID, 77, &value, sizeof(value)), -1);
  EXPECT_EQ(errno, EOPNOTSUPP);
  EXPECT_EQ(rdma_set_option(id, RDMA_OPTION_IB, 77, &value, sizeof(value)), -1);
  EXPECT_EQ(errno, EOPNOTSUPP);
  EXPECT_EQ(rdma_set_option(id, 77, 0, &value, sizeof(value)), -1);
  EXPECT_EQ(errno, EOPNOTSUPP);
  EXPECT_EQ(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, nullptr, sizeof(value)), -1);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(rdma_destroy_id(id), 0);
  rdma_destroy_event_channel(channel);
}

// As SO_REUSEADDR has it: many may be bound, one listens.
TEST(CmLenience, OfIdsThatShareAPortOneListens) {
  rdma_event_channel* channel = rdma_create_event_channel();
  rdma_cm_id* first = NewId(channel);
  rdma_cm_id* second = NewId(channel);
  int reuse = 1;
  for (rdma_cm_id* id : {first, second})
    ASSERT_EQ(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &reuse, sizeof(reuse)), 0);
  ASSERT_EQ(Bind(first, Loopback()), 0);
  ASSERT_EQ(Bind(second, first->route.addr.src_sin), 0) << std::strerror(errno);
  EXPECT_EQ(rdma_listen(first, 1), 0) << std::strerror(errno);
  EXPECT_EQ(rdma_listen(second, 1), -1);
  EXPECT_EQ(errno, EADDRINUSE);
  ASSERT_EQ(rdma_destroy_id(first), 0);
  EXPECT_EQ(rdma_listen(second, 1), 0) << std::strerror(errno);
  ASSERT_EQ(rdma_destroy_id(second), 0);
  rdma_destroy_event_channel(channel);
}

// The path itself is InfiniBand's, and is not looked at.
TEST(CmLenience, APathResolvesTheRoute) {
  ibv_path_data path{};
  path.flags = IBV_PATH_FLAG_GMP | IBV_PATH_FLAG_PRIMARY | IBV_PATH_FLAG_BIDIRECTIONAL;
  rdma_event_channel* channel = rdma_create_event_channel();
  rdma_cm_id* id = NewId(channel);
  ASSERT_EQ(Resolve(id, Loopback(9)), 0);
  ASSERT_EQ(rdma_set_option(id, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, &path, sizeof(path)), 0);
  for (const rdma_cm_event_type expected : {RDMA_CM_EVENT_ADDR_RESOLVED, RDMA_CM_EVENT_ROUTE_RESOLVED}) {
    rdma_cm_event* event = nullptr;
    ASSERT_EQ(rdma_get_cm_event(channel, &event), 0);
    EXPECT_EQ(event->event, expected);
    EXPECT_EQ(rdma_ack_cm_event(event), 0);
  }
  EXPECT_EQ(rdma_set_option(id, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, &path, sizeof(path)), -1);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(rdma_destroy_id(id), 0);
  rdma_destroy_event_channel(channel);

  sockaddr_in there = Loopback(9);
  rdma_addrinfo info{};
  info.ai_family = AF_INET;
  info.ai_qp_type = IBV_QPT_RC;
  info.ai_port_space = RDMA_PS_TCP;
  info.ai_dst_addr = reinterpret_cast<sockaddr*>(&there);
  info.ai_dst_len = sizeof(there);
  info.ai_route = &path;
  info.ai_route_len = sizeof(path);
  rdma_cm_id* endpoint = nullptr;
  ASSERT_EQ(rdma_create_ep(&endpoint, &info, nullptr, nullptr), 0) << std::strerror(errno);
  ASSERT_NE(endpoint->event, nullptr);
  EXPECT_EQ(endpoint->event->event, RDMA_CM_EVENT_ROUTE_RESOLVED);
  rdma_destroy_ep(endpoint);
}

TEST(CmLenience, EndpointsOfDatagramsAreNotOffered) {
  sockaddr_in there = Loopback(9);
  rdma_addrinfo info{};
  info.ai_family = AF_INET;
  info.ai_qp_type = IBV_QPT_UD;
  info.ai_port_space = RDMA_PS_UDP;
  info.ai_dst_addr = reinterpret_cast<sockaddr*>(&there);
  info.ai_dst_len = sizeof(there);
  rdma_cm_id* id = nullptr;
  EXPECT_EQ(rdma_create_ep(&id, &info, nullptr, nullptr), -1);
  EXPECT_EQ(errno, EOPNOTSUPP);
}

TEST(CmLenience, EveryAddressIsListed) {
  rdma_addrinfo hints{};
  hints.ai_flags = RAI_PASSIVE;
  hints.ai_port_space = RDMA_PS_TCP;
  rdma_addrinfo* info = nullptr;
  ASSERT_EQ(rdma_getaddrinfo(nullptr, "20049", &hints, &info), 0);
  std::set<int> families;
  for (const rdma_addrinfo* each = info; each != nullptr; each = each->ai_next) {
    EXPECT_TRUE(families.insert(each->ai_family).second) << "twice";
    EXPECT_EQ(each->ai_port_space, RDMA_PS_TCP);
    EXPECT_EQ(each->ai_qp_type, IBV_QPT_RC);
  }
  EXPECT_EQ(families, (std::set<int>{AF_INET, AF_INET6}));
  rdma_freeaddrinfo(info);
}

TEST(CmLenience, NamesComeWithTheirCanonicalForm) {
  rdma_addrinfo hints{};
  hints.ai_flags = RAI_NUMERICHOST;
  rdma_addrinfo* info = nullptr;
  ASSERT_EQ(rdma_getaddrinfo("127.0.0.1", nullptr, &hints, &info), 0);
  ASSERT_NE(info->ai_dst_canonname, nullptr);
  EXPECT_STREQ(info->ai_dst_canonname, "127.0.0.1");
  EXPECT_EQ(info->ai_src_canonname, nullptr);
  rdma_freeaddrinfo(info);
  hints.ai_flags |= RAI_PASSIVE;
  ASSERT_EQ(rdma_getaddrinfo("127.0.0.1", nullptr, &hints, &info), 0);
  EXPECT_STREQ(info->ai_src_canonname, "127.0.0.1");
  EXPECT_EQ(info->ai_dst_canonname, nullptr);
  rdma_freeaddrinfo(info);
}

TEST(CmLenience, OnlyDestinationsTheSourceCouldReachAreListed) {
  sockaddr_in6 source{};
  source.sin6_family = AF_INET6;
  source.sin6_addr = in6addr_loopback;
  rdma_addrinfo hints{};
  hints.ai_flags = RAI_NUMERICHOST;
  hints.ai_src_addr = reinterpret_cast<sockaddr*>(&source);
  hints.ai_src_len = sizeof(source);
  rdma_addrinfo* info = nullptr;
  EXPECT_EQ(rdma_getaddrinfo("127.0.0.1", "7", &hints, &info), EAI_ADDRFAMILY);
  EXPECT_EQ(errno, EAFNOSUPPORT);
}

TEST(CmLenience, HintsThatMakeNoSenseAreNamed) {
  rdma_addrinfo* info = nullptr;
  rdma_addrinfo hints{};
  hints.ai_flags = 0x4000;
  EXPECT_EQ(rdma_getaddrinfo("127.0.0.1", "7", &hints, &info), EAI_BADFLAGS);
  hints = {};
  hints.ai_qp_type = IBV_QPT_UD;
  hints.ai_port_space = RDMA_PS_TCP;
  EXPECT_EQ(rdma_getaddrinfo("127.0.0.1", "7", &hints, &info), EAI_SOCKTYPE);
  hints = {};
  hints.ai_qp_type = 77;
  EXPECT_EQ(rdma_getaddrinfo("127.0.0.1", "7", &hints, &info), EAI_SOCKTYPE);
  hints = {};
  hints.ai_port_space = 77;
  EXPECT_EQ(rdma_getaddrinfo("127.0.0.1", "7", &hints, &info), EAI_SOCKTYPE);
  hints = {};
  EXPECT_EQ(rdma_getaddrinfo(nullptr, nullptr, &hints, &info), EAI_NONAME);
  EXPECT_EQ(errno, ENODATA);
}

}  // namespace
