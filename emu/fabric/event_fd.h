// EventFd: a semaphore one can poll, the descriptor behind every Notifier.
//
// The descriptor is handed to programs, which may change its O_NONBLOCK flag (a completion channel's is theirs to
// change), so nothing here depends on that flag.
#pragma once

#include <memory>
#include <mutex>

namespace stagecoach::emu {

class EventFd {
 public:
  // Null, with errno set, when no descriptor or no memory can be had. `as_before_linux_5_8`: without what that kernel
  // brought, for tests; kernels that have it not are found out.
  static std::unique_ptr<EventFd> Create(bool as_before_linux_5_8 = false);
  ~EventFd();
  EventFd(const EventFd&) = delete;
  EventFd& operator=(const EventFd&) = delete;

  int fd() const { return fd_; }
  // Adds one. Any thread.
  void Signal();
  // Takes one if there is one, and says so; never blocks. Any thread.
  bool Consume();
  // Takes one, and waits for it unless the descriptor is non-blocking. 0, or an errno, as read(2) has them: EAGAIN;
  // EINTR when a signal handler has run that was installed without SA_RESTART (before Linux 5.8, any handler). A
  // cancellation point (pthreads(7)). Any thread.
  int Take();

 private:
  EventFd(int fd, bool has_nowait) : fd_(fd), has_nowait_(has_nowait) {}

  const int fd_;
  const bool has_nowait_;     // the kernel knows RWF_NOWAIT for eventfds
  std::mutex consume_mutex_;  // only where it does not
};

}  // namespace stagecoach::emu
