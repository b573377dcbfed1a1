#include "emu/backend/tcp/peer_user.h"

#include <arpa/inet.h>
#include <errno.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <memory>

#include "base/fork/fork.h"
#include "emu/fabric/stream.h"

namespace stagecoach::emu {
namespace {

constexpr uint32_t kAllStates = 0xffffffff;

struct Request {
  nlmsghdr header{};
  inet_diag_req_v2 body{};
};

void PutAddress(const IpEndpoint& address, __be32 (&to)[4]) {
  std::memcpy(to, address.address.data(), address.family == IpEndpoint::Family::kIpv4 ? 4 : 16);
}

class Closer {
 public:
  explicit Closer(int fd) : fd_(KeepFromChildren(fd)) {}
  ~Closer() { CloseDescriptor(fd_); }
  Closer(const Closer&) = delete;
  Closer& operator=(const Closer&) = delete;

 private:
  const int fd_;
};

// What the kernel tells of the TCP socket of `own` and `peer` that a packet from `interface` would reach (0: from one
// that no socket is bound to).
std::optional<inet_diag_msg> Ask(int fd, const IpEndpoint& own, const IpEndpoint& peer, uint32_t interface) {
  Request request;
  request.header.nlmsg_len = sizeof request;
  request.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  request.header.nlmsg_flags = NLM_F_REQUEST;
  request.body.sdiag_family = own.family == IpEndpoint::Family::kIpv4 ? AF_INET : AF_INET6;
  request.body.sdiag_protocol = IPPROTO_TCP;
  request.body.idiag_states = kAllStates;
  inet_diag_sockid& id = request.body.id;
  id.idiag_sport = htons(own.port);
  id.idiag_dport = htons(peer.port);
  PutAddress(own, id.idiag_src);
  PutAddress(peer, id.idiag_dst);
  id.idiag_if = interface;
  std::fill(std::begin(id.idiag_cookie), std::end(id.idiag_cookie), static_cast<__u32>(INET_DIAG_NOCOOKIE));
  const sockaddr_nl kernel{.nl_family = AF_NETLINK, .nl_pad = 0, .nl_pid = 0, .nl_groups = 0};
  if (sendto(fd, &request, sizeof request, 0, reinterpret_cast<const sockaddr*>(&kernel), sizeof kernel) < 0) {
    return std::nullopt;
  }
  // It is answered before sendto returns.
  alignas(nlmsghdr) std::array<std::byte, 1024> answer;
  const ssize_t size = recv(fd, answer.data(), answer.size(), MSG_DONTWAIT);
  if (size < static_cast<ssize_t>(NLMSG_LENGTH(sizeof(inet_diag_msg)))) return std::nullopt;
  nlmsghdr header;
  std::memcpy(&header, answer.data(), sizeof header);
  if (header.nlmsg_type != SOCK_DIAG_BY_FAMILY) return std::nullopt;
  inet_diag_msg found;
  std::memcpy(&found, answer.data() + NLMSG_HDRLEN, sizeof found);
  if (found.id.idiag_sport != id.idiag_sport) return std::nullopt;
  return found;
}

// A socket may be bound to an interface (SO_BINDTODEVICE, which takes no privilege), and is then found by that alone.
std::optional<inet_diag_msg> AskForAnyInterface(const IpEndpoint& own, const IpEndpoint& peer,
                                                const std::function<bool(const inet_diag_msg&)>& is_wanted) {
  const int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);
  if (fd < 0) return std::nullopt;
  const Closer closer(fd);
  if (const auto found = Ask(fd, own, peer, own.scope_id); found && is_wanted(*found)) return found;
  const std::unique_ptr<struct if_nameindex, void (*)(struct if_nameindex*)> interfaces(if_nameindex(),
                                                                                        if_freenameindex);
  if (interfaces == nullptr) return std::nullopt;
  for (const struct if_nameindex* each = interfaces.get(); each->if_index != 0; ++each) {
    if (const auto found = Ask(fd, own, peer, each->if_index); found && is_wanted(*found)) return found;
  }
  return std::nullopt;
}

std::optional<inet_diag_msg> AskForConnection(const IpEndpoint& socket_address, const IpEndpoint& peer) {
  // Where there is no such connection, who listens there is found in its place.
  return AskForAnyInterface(socket_address, peer, [&](const inet_diag_msg& each) {
    return each.id.idiag_dport == htons(peer.port) && each.idiag_state != TCP_LISTEN;
  });
}

}  // namespace

std::optional<SocketOwner> OwnerOfSocket(const IpEndpoint& socket_address, const IpEndpoint& peer) {
  const auto found = AskForConnection(socket_address, peer);
  if (!found || found->idiag_inode == 0) return std::nullopt;
  return SocketOwner{found->idiag_uid, found->idiag_inode};
}

std::optional<uint32_t> UserOfSocket(const IpEndpoint& socket_address, const IpEndpoint& peer) {
  const auto found = AskForConnection(socket_address, peer);
  if (!found) return std::nullopt;
  // A socket that its process has closed counts as root's.
  if (found->idiag_inode == 0) return Stream::kNoUser;
  return found->idiag_uid;
}

std::optional<uint32_t> UserOfListener(const IpEndpoint& local) {
  // Nobody calls from port 1 of an address of the same host without being root.
  const auto found = AskForAnyInterface(local, local.WithPort(1),
                                        [](const inet_diag_msg& each) { return each.idiag_state == TCP_LISTEN; });
  if (!found || found->idiag_inode == 0) return std::nullopt;
  return found->idiag_uid;
}

bool IsOfThisHost(const IpEndpoint& address) {
  if (address.IsLoopback()) return true;
  sockaddr_storage to;
  const socklen_t length = address.WithPort(1).ToSockaddr(&to);
  if (length == 0) return false;
  // The source of what goes to an address of the host's own is that address. Nothing is sent.
  const int fd = socket(to.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return true;
  const Closer closer(fd);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&to), length) != 0) return false;
  sockaddr_storage from;
  socklen_t size = sizeof from;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&from), &size) != 0) return true;
  const auto source = IpEndpoint::FromSockaddr(reinterpret_cast<const sockaddr*>(&from));
  return source && source->WithPort(0) == address.WithPort(0);
}

}  // namespace stagecoach::emu
