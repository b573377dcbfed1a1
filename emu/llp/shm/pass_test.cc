#include "emu/llp/shm/pass.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <iterator>
#include <string>

namespace stagecoach::emu {
namespace {

size_t OpenDescriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

class PassTest : public testing::Test {
 protected:
  PassTest() {
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets_.data()), 0);
    EXPECT_EQ(pipe2(pipe_.data(), O_CLOEXEC), 0);
  }
  ~PassTest() override {
    for (const int fd : {sockets_[0], sockets_[1], pipe_[0], pipe_[1]}) close(fd);
  }
  // The error with which a message of two descriptors is not taken.
  int TakeTwo() {
    std::array<std::byte, 3> message{};
    std::array<int, 2> fds{-1, -1};
    const auto taken = TakeDescriptors(sockets_[1], message, fds);
    EXPECT_FALSE(taken);
    return taken ? 0 : taken.error();
  }

  std::array<int, 2> sockets_{};
  std::array<int, 2> pipe_{};
};

TEST_F(PassTest, WhatIsPassedIsTheSameFile) {
  ASSERT_EQ(PassDescriptors(sockets_[0], AsBytes("abc"), pipe_), 0);
  std::array<std::byte, 3> message{};
  std::array<int, 2> fds{-1, -1};
  ASSERT_TRUE(TakeDescriptors(sockets_[1], message, fds));
  EXPECT_EQ(AsText(message), "abc");
  for (size_t i = 0; i < 2; ++i) {
    struct stat ours;
    struct stat theirs;
    ASSERT_EQ(fstat(pipe_[i], &ours), 0);
    ASSERT_EQ(fstat(fds[i], &theirs), 0);
    EXPECT_NE(fds[i], pipe_[i]);
    EXPECT_EQ(theirs.st_ino, ours.st_ino);
    EXPECT_EQ(fcntl(fds[i], F_GETFD), FD_CLOEXEC);
    close(fds[i]);
  }
}

TEST_F(PassTest, NothingAndTheEndAreTold) {
  EXPECT_EQ(TakeTwo(), EAGAIN);
  close(sockets_[0]);
  EXPECT_EQ(TakeTwo(), EPIPE);
  sockets_[0] = dup(sockets_[1]);
}

TEST_F(PassTest, WhatIsSomethingElseIsClosed) {
  const std::array<int, 4> four = {pipe_[0], pipe_[1], pipe_[0], pipe_[1]};
  const size_t before = OpenDescriptors();
  ASSERT_EQ(PassDescriptors(sockets_[0], AsBytes("abc"), four), 0);
  EXPECT_EQ(TakeTwo(), EPROTO) << "too many";
  ASSERT_EQ(PassDescriptors(sockets_[0], AsBytes("abc"), std::span(four).first(1)), 0);
  EXPECT_EQ(TakeTwo(), EPROTO) << "too few";
  ASSERT_EQ(PassDescriptors(sockets_[0], AsBytes("ab"), std::span(four).first(2)), 0);
  EXPECT_EQ(TakeTwo(), EPROTO) << "too short";
  ASSERT_EQ(send(sockets_[0], "abc", 3, 0), 3);
  EXPECT_EQ(TakeTwo(), EPROTO) << "none";
  EXPECT_EQ(OpenDescriptors(), before);
}

// More than any message of ours: the kernel closes what there is no room for, and we the rest.
TEST_F(PassTest, AHundredDescriptorsLeaveNone) {
  const size_t before = OpenDescriptors();
  constexpr size_t kMany = 100;
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int) * kMany)> control{};
  iovec part{const_cast<char*>("abc"), 3};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  cmsghdr* const rights = CMSG_FIRSTHDR(&header);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(int) * kMany);
  for (size_t i = 0; i < kMany; ++i) reinterpret_cast<int*>(CMSG_DATA(rights))[i] = pipe_[0];
  ASSERT_EQ(sendmsg(sockets_[0], &header, 0), 3);
  EXPECT_EQ(TakeTwo(), EPROTO);
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST_F(PassTest, WhatThereIsNoDescriptorForIsThereStill) {
  ASSERT_EQ(PassDescriptors(sockets_[0], AsBytes("abc"), pipe_), 0);
  rlimit usual;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &usual), 0);
  // The lowest number that is free, and no other.
  const int lowest = dup(pipe_[0]);
  for (const int left : {0, 1}) {
    const rlimit few{.rlim_cur = static_cast<rlim_t>(lowest + left), .rlim_max = usual.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    if (left == 1) close(lowest);
    EXPECT_EQ(TakeTwo(), EMFILE) << left;
  }
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &usual), 0);
  const size_t before = OpenDescriptors();
  std::array<std::byte, 3> message{};
  std::array<int, 2> fds{-1, -1};
  ASSERT_TRUE(TakeDescriptors(sockets_[1], message, fds));
  EXPECT_EQ(OpenDescriptors(), before + 2);
  EXPECT_EQ(TakeTwo(), EAGAIN) << "it is taken";
  for (const int fd : fds) close(fd);
}

TEST_F(PassTest, WhoeverPassesDoesNotWait) {
  int error = 0;
  for (int i = 0; i < 1000000 && error == 0; ++i) error = PassDescriptors(sockets_[0], AsBytes("abc"), pipe_);
  // The kernel bounds the descriptors that are under way as well.
  EXPECT_TRUE(error == EAGAIN || error == ETOOMANYREFS) << error;
}

}  // namespace
}  // namespace stagecoach::emu
