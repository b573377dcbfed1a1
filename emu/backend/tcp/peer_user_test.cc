#include "emu/backend/tcp/peer_user.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <linux/netlink.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <optional>
#include <tuple>

#include "emu/backend/tcp/tcp_stream.h"
#include "emu/fabric/stream.h"

namespace stagecoach::emu {
namespace {

constexpr uid_t kNobody = 65534;

// A listener on loopback, and a child of another user who connects to it.
class PeerUserTest : public ::testing::TestWithParam<std::tuple<const char*, bool>> {
 protected:
  // To the loopback interface, the socket that connects.
  static bool IsBound() { return std::get<1>(GetParam()); }
  void SetUp() override {
    const IpEndpoint any = *IpEndpoint::Parse(std::get<0>(GetParam()), 0);
    sockaddr_storage address;
    socklen_t length = any.ToSockaddr(&address);
    listener_ = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener_ < 0 || bind(listener_, reinterpret_cast<sockaddr*>(&address), length) != 0) {
      GTEST_SKIP() << "no such addresses here";
    }
    ASSERT_EQ(listen(listener_, 8), 0);
    const int asking = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);
    if (asking < 0) GTEST_SKIP() << "this system has nobody to ask";
    close(asking);
    const IpEndpoint to = *IpEndpoint::Parse(any.family == IpEndpoint::Family::kIpv4 ? "127.0.0.1" : "::1",
                                             SocketEndpoint(listener_, false).port);
    length = to.ToSockaddr(&address);
    ASSERT_EQ(pipe(orders_), 0);
    child_ = fork();
    ASSERT_GE(child_, 0);
    if (child_ == 0) {
      if (geteuid() == 0 && (setgid(kNobody) != 0 || setuid(kNobody) != 0)) _exit(1);
      const int mine = socket(address.ss_family, SOCK_STREAM, 0);
      if (IsBound() && setsockopt(mine, SOL_SOCKET, SO_BINDTODEVICE, "lo", 3) != 0) _exit(1);
      if (connect(mine, reinterpret_cast<sockaddr*>(&address), length) != 0) _exit(1);
      char order = 0;
      if (read(orders_[0], &order, 1) != 1) _exit(1);
      close(mine);
      for (;;) pause();
    }
    accepted_ = accept(listener_, nullptr, nullptr);
    ASSERT_GE(accepted_, 0);
  }
  void TearDown() override {
    if (child_ > 0) {
      kill(child_, SIGKILL);
      waitpid(child_, nullptr, 0);
    }
    for (const int fd : {listener_, accepted_, orders_[0], orders_[1]}) {
      if (fd >= 0) close(fd);
    }
  }
  std::optional<uint32_t> UserOfPeer() const {
    return UserOfSocket(SocketEndpoint(accepted_, true), SocketEndpoint(accepted_, false));
  }

  int listener_ = -1;
  int accepted_ = -1;
  int orders_[2] = {-1, -1};
  pid_t child_ = -1;
};

TEST_P(PeerUserTest, TheKernelKnowsWhoConnected) {
  EXPECT_EQ(UserOfPeer(), geteuid() == 0 ? kNobody : geteuid());
  const auto own = UserOfSocket(SocketEndpoint(accepted_, false), SocketEndpoint(accepted_, true));
  EXPECT_EQ(own, geteuid());
}

TEST_P(PeerUserTest, TheKernelKnowsWhoListens) {
  const IpEndpoint here = SocketEndpoint(accepted_, false);
  EXPECT_EQ(UserOfListener(here), geteuid());
  const int bound = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(setsockopt(bound, SOL_SOCKET, SO_BINDTODEVICE, "lo", 3), 0);
  ASSERT_EQ(listen(bound, 1), 0);
  const IpEndpoint at = *IpEndpoint::Parse("127.0.0.1", SocketEndpoint(bound, false).port);
  EXPECT_EQ(UserOfListener(at), geteuid());
  close(bound);
  EXPECT_EQ(UserOfListener(at), std::nullopt);
}

TEST_P(PeerUserTest, AnAddressIsOfThisHostOrOfAnother) {
  EXPECT_TRUE(IsOfThisHost(SocketEndpoint(accepted_, true)));
  EXPECT_FALSE(IsOfThisHost(*IpEndpoint::Parse("203.0.113.9", 7)));
}

// Or root's might seem to be whatever was closed in time.
TEST_P(PeerUserTest, TheNumberOfASocketIsThatOfItsDescriptor) {
  const auto owner = OwnerOfSocket(SocketEndpoint(accepted_, false), SocketEndpoint(accepted_, true));
  struct stat file;
  ASSERT_EQ(fstat(accepted_, &file), 0);
  ASSERT_TRUE(owner);
  EXPECT_EQ(owner->inode, file.st_ino);
  EXPECT_EQ(owner->user, geteuid());
}

TEST_P(PeerUserTest, ASocketThatItsProcessHasClosedIsNobodys) {
  ASSERT_TRUE(UserOfPeer());
  ASSERT_EQ(write(orders_[1], "x", 1), 1);
  char byte = 0;
  ASSERT_EQ(read(accepted_, &byte, 1), 0) << "the end of what it says";
  EXPECT_EQ(UserOfPeer(), Stream::kNoUser);
}

TEST_P(PeerUserTest, WhatIsNoConnectionHereIsUnknown) {
  IpEndpoint elsewhere = SocketEndpoint(accepted_, true);
  elsewhere.port = static_cast<uint16_t>(elsewhere.port == 9 ? 10 : 9);
  EXPECT_EQ(UserOfSocket(elsewhere, SocketEndpoint(accepted_, false)), std::nullopt);
  // A listener there is no peer.
  const IpEndpoint nobody = elsewhere.WithPort(1);
  EXPECT_EQ(UserOfSocket(SocketEndpoint(accepted_, false), nobody), std::nullopt);
}

INSTANTIATE_TEST_SUITE_P(Families, PeerUserTest,
                         ::testing::Combine(::testing::Values("127.0.0.1", "::1", "::"), ::testing::Bool()));

}  // namespace
}  // namespace stagecoach::emu
