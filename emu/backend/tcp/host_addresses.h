// HostAddresses: the addresses of this host, and word of it when they, or its links, change.
//
// What the kernel says on a netlink socket (rtnetlink(7): links, and addresses of both families) is taken as a hint
// that something is different, and not read: what there is is then read anew, so that it makes no difference which hint
// was lost when the socket's buffer was full (ENOBUFS). The kernel says it before whoever makes the change hears that
// it is made; so while there is such a socket, and it says nothing, what was read the last time is still true.
//
// Threading: every member from any thread; the watcher is called on the loop.
#pragma once

#include <functional>
#include <mutex>
#include <vector>

#include "base/event_loop.h"
#include "emu/fabric/fabric.h"

namespace stagecoach::emu {

class HostAddresses {
 public:
  explicit HostAddresses(Reactor* loop) : loop_(*loop) {}
  // No thread is in the loop any more.
  ~HostAddresses();
  HostAddresses(const HostAddresses&) = delete;
  HostAddresses& operator=(const HostAddresses&) = delete;

  // As Fabric::LocalAddresses. Those of the last time where the system does not say, for want of a descriptor, say.
  std::vector<LocalAddress> Read();
  // As Fabric::WatchAddresses.
  bool Watch(std::function<void()> on_change);

 private:
  // With mutex_ held. False: the system gives us no socket.
  bool Open();
  // With mutex_ held: takes what the kernel has said; and has the watcher called if that was anything.
  void TakeHints();
  void CallWatcher();

  Reactor& loop_;
  std::mutex mutex_;  // all below
  int fd_ = -1;       // from the first Watch() on
  Reactor::WatchId watch_ = 0;
  bool is_known_ = false;
  std::vector<LocalAddress> known_;  // the last ones read
  bool is_call_due_ = false;
  bool is_call_posted_ = false;

  std::mutex watcher_mutex_;  // held while it is called; no other is taken before it is
  std::function<void()> watcher_;
};

}  // namespace stagecoach::emu
