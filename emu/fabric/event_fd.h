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
  // Null, with errno set, when no descriptor can be had.
  static std::unique_ptr<EventFd> Create();
  ~EventFd();
  EventFd(const EventFd&) = delete;
  EventFd& operator=(const EventFd&) = delete;

  int fd() const { return fd_; }
  // Adds one. Any thread.
  void Signal();
  // Takes one if there is one, and says so; never blocks. Any thread.
  bool Consume();

 private:
  explicit EventFd(int fd) : fd_(fd) {}

  const int fd_;
  std::mutex consume_mutex_;  // only where the kernel lacks RWF_NOWAIT for eventfds
};

// Blocks until `fd` is readable. 0, or an errno: EINTR when a signal came.
int PollReadable(int fd);

}  // namespace stagecoach::emu
