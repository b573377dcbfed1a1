// Neighbour: for tests, a process that is at the other end of a Unix-domain socket.
//
// The two connect as strangers would, so that the kernel tells each of them who the other is (unix(7), SO_PEERCRED); of
// a socketpair it would tell both of the one that has made it.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <utility>

namespace stagecoach {

class Neighbour {
 public:
  // Does `what` there, with its end of the socket, and ends: with 0 if that says so. Before it connects it does
  // `first`, which returns 0.
  explicit Neighbour(const std::function<bool(int socket)>& what, const std::function<int()>& first = nullptr) {
    const int listener = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    socklen_t size = sizeof name.sun_family;
    // The kernel chooses a free one.
    EXPECT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&name), size), 0);
    size = sizeof name;
    EXPECT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&name), &size), 0);
    EXPECT_EQ(listen(listener, 1), 0);
    pid_ = fork();
    if (pid_ == 0) {
      close(listener);
      const int mine = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      if (first && first() != 0) _exit(1);
      if (connect(mine, reinterpret_cast<sockaddr*>(&name), size) != 0) _exit(1);
      _exit(what(mine) ? 0 : 1);
    }
    EXPECT_GT(pid_, 0);
    socket_ = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    EXPECT_GE(socket_, 0);
    close(listener);
  }
  ~Neighbour() {
    if (pid_ > 0) End(SIGKILL);
  }
  Neighbour(const Neighbour&) = delete;
  Neighbour& operator=(const Neighbour&) = delete;

  // Who takes it closes it.
  int socket() const { return socket_; }
  pid_t pid() const { return pid_; }
  // How it has ended, as waitpid(2) has it; by this signal, if it is not 0.
  int End(int signal = 0) {
    if (signal != 0) kill(pid_, signal);
    int status = -1;
    waitpid(std::exchange(pid_, -1), &status, 0);
    return status;
  }

 private:
  pid_t pid_ = -1;
  int socket_ = -1;
};

}  // namespace stagecoach
