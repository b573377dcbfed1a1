#include "emu/llp/shm/pass.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/check.h"
#include "base/fork/fork.h"

namespace stagecoach::emu {
namespace {

// Room for one message's descriptors; the kernel closes those that do not fit.
struct Control {
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int) * kMostPassed)> bytes{};
};

}  // namespace

int PassDescriptors(int socket, ConstBytes message, std::span<const int> fds) {
  STAGECOACH_CHECK(!message.empty() && fds.size() <= kMostPassed);
  iovec part{const_cast<std::byte*>(message.data()), message.size()};
  Control control;
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control.bytes.data();
  header.msg_controllen = CMSG_SPACE(fds.size_bytes());
  cmsghdr* const rights = CMSG_FIRSTHDR(&header);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(fds.size_bytes());
  std::memcpy(CMSG_DATA(rights), fds.data(), fds.size_bytes());
  const ssize_t sent = sendmsg(socket, &header, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent < 0) return errno;
  // A stream socket may take a part of a message, but of one so small it does not.
  return static_cast<size_t>(sent) == message.size() ? 0 : EAGAIN;
}

Result<void, int> TakeDescriptors(int socket, MutableBytes message, std::span<int> fds) {
  STAGECOACH_CHECK(!message.empty() && fds.size() <= kMostPassed);
  iovec part{message.data(), message.size()};
  Control control;
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control.bytes.data();
  header.msg_controllen = control.bytes.size();
  // What is only looked at is not lost if there is no room for its descriptors.
  const ssize_t size = recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC | MSG_PEEK);
  if (size < 0) return Err(int{errno});
  std::array<int, kMostPassed> came{};
  size_t count = 0;
  for (cmsghdr* each = CMSG_FIRSTHDR(&header); each != nullptr; each = CMSG_NXTHDR(&header, each)) {
    if (each->cmsg_level != SOL_SOCKET || each->cmsg_type != SCM_RIGHTS) continue;
    const size_t here = std::min((each->cmsg_len - CMSG_LEN(0)) / sizeof(int), kMostPassed - count);
    std::memcpy(&came[count], CMSG_DATA(each), here * sizeof(int));
    count += here;
  }
  const bool is_cut = (header.msg_flags & MSG_CTRUNC) != 0;
  const bool is_short = is_cut && count < fds.size();
  // The descriptors that are still with it go away.
  if (!is_short) recv(socket, message.data(), static_cast<size_t>(size), MSG_DONTWAIT);
  if (static_cast<size_t>(size) == message.size() && count == fds.size() && !is_cut) {
    for (size_t i = 0; i < count; ++i) fds[i] = KeepFromChildren(came[i]);
    return {};
  }
  for (size_t i = 0; i < count; ++i) close(came[i]);
  if (is_short) return Err(EMFILE);
  return Err(size == 0 ? EPIPE : EPROTO);
}

}  // namespace stagecoach::emu
