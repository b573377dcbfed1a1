// rsockets: not offered, and said so; waiting on other descriptors works.

#include <rdma/rsocket.h>
#include <unistd.h>

#include <cerrno>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

class RsocketsTest : public VerbsTest {};

TEST_F(RsocketsTest, AreRefused) {
  const auto refused = [](const char* what, ssize_t result) {
    EXPECT_EQ(result, -1) << what;
    EXPECT_EQ(errno, EOPNOTSUPP) << what;
    errno = 0;
  };
  sockaddr_storage storage{};
  auto* address = reinterpret_cast<sockaddr*>(&storage);
  socklen_t length = sizeof(storage);
  char byte = 0;
  iovec vector{&byte, 1};
  msghdr message{};
  refused("rsocket", rsocket(AF_INET, SOCK_STREAM, 0));
  refused("rbind", rbind(0, address, length));
  refused("rlisten", rlisten(0, 1));
  refused("raccept", raccept(0, address, &length));
  refused("rconnect", rconnect(0, address, length));
  refused("rshutdown", rshutdown(0, SHUT_RDWR));
  refused("rclose", rclose(0));
  refused("rrecv", rrecv(0, &byte, 1, 0));
  refused("rrecvfrom", rrecvfrom(0, &byte, 1, 0, address, &length));
  refused("rrecvmsg", rrecvmsg(0, &message, 0));
  refused("rsend", rsend(0, &byte, 1, 0));
  refused("rsendto", rsendto(0, &byte, 1, 0, address, length));
  refused("rsendmsg", rsendmsg(0, &message, 0));
  refused("rread", rread(0, &byte, 1));
  refused("rreadv", rreadv(0, &vector, 1));
  refused("rwrite", rwrite(0, &byte, 1));
  refused("rwritev", rwritev(0, &vector, 1));
  refused("rgetpeername", rgetpeername(0, address, &length));
  refused("rgetsockname", rgetsockname(0, address, &length));
  refused("rsetsockopt", rsetsockopt(0, SOL_RDMA, RDMA_INLINE, &byte, 1));
  refused("rgetsockopt", rgetsockopt(0, SOL_RDMA, RDMA_INLINE, &byte, &length));
  refused("rfcntl", rfcntl(0, 0));
  refused("riomap", riomap(0, &byte, 1, 0, 0, 0));
  refused("riounmap", riounmap(0, &byte, 1));
  refused("riowrite", static_cast<ssize_t>(riowrite(0, &byte, 1, 0, 0)));
}

TEST_F(RsocketsTest, PlainDescriptorsCanBeWaitedFor) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  pollfd wait[2] = {{ends[0], POLLIN, 0}, {ends[1], POLLOUT, 0}};
  EXPECT_EQ(rpoll(wait, 1, 0), 0);
  EXPECT_EQ(rpoll(wait, 2, 1000), 1);
  EXPECT_EQ(wait[1].revents, POLLOUT);
  fd_set readable;
  FD_ZERO(&readable);
  FD_SET(ends[0], &readable);
  timeval none{};
  EXPECT_EQ(rselect(ends[0] + 1, &readable, nullptr, nullptr, &none), 0);
  ASSERT_EQ(write(ends[1], "x", 1), 1);
  EXPECT_EQ(rpoll(wait, 1, -1), 1);
  EXPECT_EQ(wait[0].revents, POLLIN);
  FD_SET(ends[0], &readable);
  EXPECT_EQ(rselect(ends[0] + 1, &readable, nullptr, nullptr, nullptr), 1);
  EXPECT_TRUE(FD_ISSET(ends[0], &readable));
  close(ends[0]);
  close(ends[1]);
}

// An event channel is a plain descriptor as well.
TEST_F(RsocketsTest, EventChannelsCanBeWaitedFor) {
  Pair pair;
  pair.Listen();
  world().ActAsClient();
  auto id = CreateCmId(pair.client.channel.get());
  ASSERT_TRUE(id);
  pollfd wait{pair.client.channel->fd, POLLIN, 0};
  EXPECT_EQ(rpoll(&wait, 1, 0), 0);
  sockaddr_storage destination = pair.ListenAddress();
  ASSERT_EQ(rdma_resolve_addr(id->get(), nullptr, reinterpret_cast<sockaddr*>(&destination), 2000), 0);
  EXPECT_TRUE(world().Until([&] { return rpoll(&wait, 1, 0) == 1; }));
}

}  // namespace
}  // namespace stagecoach::verbs
