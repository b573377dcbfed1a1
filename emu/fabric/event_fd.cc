#include "emu/fabric/event_fd.h"

#include <errno.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstdint>

#include "base/check.h"
#include "base/fork/fork.h"

namespace stagecoach::emu {

std::unique_ptr<EventFd> EventFd::Create() {
  const int fd = KeepFromChildren(eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC));
  if (fd < 0) return nullptr;
  return std::unique_ptr<EventFd>(new EventFd(fd));
}

EventFd::~EventFd() {
  CloseDescriptor(fd_);
}

void EventFd::Signal() {
  // Blocks, or fails with EAGAIN, only at 2^64 - 2 signals; a program that wrote such a number itself has its channel
  // readable anyway.
  while (eventfd_write(fd_, 1) != 0 && errno == EINTR) {
  }
}

bool EventFd::Consume() {
  uint64_t value = 0;
  const iovec part{&value, sizeof value};
  ssize_t n;
  do {
    n = preadv2(fd_, &part, 1, -1, RWF_NOWAIT);
  } while (n < 0 && errno == EINTR);
  if (n == sizeof value) return true;
  if (errno != EOPNOTSUPP && errno != ENOSYS) return false;
  // Kernels before 5.8. One consumer of ours at a time, so what poll() saw is still there for read().
  std::lock_guard<std::mutex> lock(consume_mutex_);
  pollfd ready{fd_, POLLIN, 0};
  if (poll(&ready, 1, 0) != 1) return false;
  return read(fd_, &value, sizeof value) == sizeof value;
}

int PollReadable(int fd) {
  pollfd wanted{fd, POLLIN, 0};
  if (poll(&wanted, 1, -1) < 0) return errno;
  return (wanted.revents & POLLNVAL) != 0 ? EBADF : 0;
}

}  // namespace stagecoach::emu
