#include "emu/backend/tcp/host_addresses.h"

#include <errno.h>
#include <ifaddrs.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <sys/socket.h>

#include <algorithm>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "base/fork/fork.h"
#include "base/undoing.h"

namespace stagecoach::emu {
namespace {

// Hints taken at once: a host whose addresses change without end leaves time for others.
constexpr int kHintsMax = 1024;

// nullopt, with errno set: the system does not say.
std::optional<std::vector<LocalAddress>> ReadAddresses() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return std::nullopt;
  const Undoing read([&] { freeifaddrs(list); });
  std::vector<LocalAddress> addresses;
  std::string interface;
  uint32_t number = 0;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if ((entry->ifa_flags & IFF_UP) == 0) continue;
    const auto address = IpEndpoint::FromSockaddr(entry->ifa_addr);
    const bool is_known = address && std::any_of(addresses.begin(), addresses.end(),
                                                 [&](const LocalAddress& other) { return other.address == *address; });
    if (!address || is_known) continue;
    if (interface != entry->ifa_name) {
      interface = entry->ifa_name;
      number = if_nametoindex(entry->ifa_name);
    }
    const bool is_linked = (entry->ifa_flags & IFF_RUNNING) != 0 && (entry->ifa_flags & IFF_LOOPBACK) == 0;
    addresses.push_back({*address, number, is_linked});
  }
  std::stable_partition(addresses.begin(), addresses.end(),
                        [](const LocalAddress& each) { return !each.address.IsLoopback(); });
  return addresses;
}

}  // namespace

HostAddresses::~HostAddresses() {
  if (watch_ != 0) loop_.Unwatch(watch_);
  if (fd_ >= 0) CloseDescriptor(fd_);
}

std::vector<LocalAddress> HostAddresses::Read() {
  std::lock_guard lock(mutex_);
  if (fd_ >= 0) TakeHints();
  if (is_known_) return known_;
  // What there was is the best guess while the system does not say. That there is nothing would be believed.
  if (auto read = ReadAddresses()) {
    known_ = std::move(*read);
    is_known_ = fd_ >= 0;
  } else if (known_.empty() && errno == ENOMEM) {
    throw std::bad_alloc();
  }
  return known_;
}

bool HostAddresses::Watch(std::function<void()> on_change) {
  if (on_change) {
    std::lock_guard lock(mutex_);
    if (fd_ < 0 && !Open()) return false;
  }
  std::lock_guard lock(watcher_mutex_);
  watcher_ = std::move(on_change);
  return true;
}

bool HostAddresses::Open() {
  const int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, NETLINK_ROUTE);
  if (fd < 0) return false;
  sockaddr_nl groups{};
  groups.nl_family = AF_NETLINK;
  groups.nl_groups = RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR;
  KeepFromChildren(fd);
  if (bind(fd, reinterpret_cast<const sockaddr*>(&groups), sizeof(groups)) != 0) {
    CloseDescriptor(fd);
    return false;
  }
  fd_ = fd;
  Undoing failed([this] { CloseDescriptor(std::exchange(fd_, -1)); });
  loop_.Post([this] {
    // Without a watch the hints are taken whenever somebody reads.
    watch_ = loop_.WatchReadable(fd_, [this] {
      std::lock_guard lock(mutex_);
      TakeHints();
    });
  });
  failed.Done();
  return true;
}

void HostAddresses::TakeHints() {
  bool any = false;
  for (int i = 0; i < kHintsMax; ++i) {
    char byte = 0;
    const ssize_t length = recv(fd_, &byte, sizeof(byte), MSG_DONTWAIT | MSG_TRUNC);
    if (length < 0 && errno == EINTR) continue;
    if (length < 0 && errno != ENOBUFS) break;
    any = true;
  }
  if (any) {
    is_known_ = false;
    is_call_due_ = true;
  }
  if (!is_call_due_ || is_call_posted_) return;
  // Without memory for it, it is due still.
  loop_.Post([this] { CallWatcher(); });
  is_call_posted_ = true;
}

void HostAddresses::CallWatcher() {
  {
    std::lock_guard lock(mutex_);
    is_call_posted_ = is_call_due_ = false;
  }
  std::lock_guard lock(watcher_mutex_);
  if (watcher_) watcher_();
}

}  // namespace stagecoach::emu
