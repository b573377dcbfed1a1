#include "emu/fabric/event_fd.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstdint>
#include <mutex>
#include <new>

#include "base/check.h"
#include "base/fork/fork.h"

namespace stagecoach::emu {
namespace {

// One signal, if there is one; without waiting. What preadv2(2) answers.
ssize_t ReadNow(int fd) {
  uint64_t value = 0;
  const iovec part{&value, sizeof value};
  ssize_t n;
  do {
    n = preadv2(fd, &part, 1, -1, RWF_NOWAIT);
  } while (n < 0 && errno == EINTR);
  return n;
}

}  // namespace

std::unique_ptr<EventFd> EventFd::Create(bool as_before_linux_5_8) {
  const int fd = KeepFromChildren(eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC));
  if (fd < 0) return nullptr;
  // Asked once, of one that has no signal yet. By pthread_once, which a child that was forked meanwhile begins anew.
  static std::once_flag once;
  static bool has_nowait = false;
  std::call_once(once, [fd] { has_nowait = ReadNow(fd) < 0 && errno == EAGAIN; });
  auto* const event = new (std::nothrow) EventFd(fd, has_nowait && !as_before_linux_5_8);
  if (event == nullptr) {
    CloseDescriptor(fd);
    errno = ENOMEM;
  }
  return std::unique_ptr<EventFd>(event);
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
  if (has_nowait_) return ReadNow(fd_) > 0;
  // One consumer of ours at a time, so what poll() saw is still there for read().
  std::lock_guard<std::mutex> lock(consume_mutex_);
  uint64_t value = 0;
  pollfd ready{fd_, POLLIN, 0};
  if (poll(&ready, 1, 0) != 1) return false;
  return read(fd_, &value, sizeof value) == sizeof value;
}

int EventFd::Take() {
  if (has_nowait_) {
    uint64_t value = 0;
    return read(fd_, &value, sizeof value) >= 0 ? 0 : errno;
  }
  while (!Consume()) {
    if ((fcntl(fd_, F_GETFL) & O_NONBLOCK) != 0) return EAGAIN;
    pollfd ready{fd_, POLLIN, 0};
    if (poll(&ready, 1, -1) < 0) return errno;
  }
  return 0;
}

}  // namespace stagecoach::emu
