#include "emu/backend/tcp/peer_user.h"

#include <arpa/inet.h>
#include <errno.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>

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

}  // namespace

std::optional<uint32_t> UserOfSocket(const IpEndpoint& socket_address, const IpEndpoint& peer) {
  const int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);
  if (fd < 0) return std::nullopt;
  const Closer closer(fd);
  Request request;
  request.header.nlmsg_len = sizeof request;
  request.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  request.header.nlmsg_flags = NLM_F_REQUEST;
  request.body.sdiag_family = socket_address.family == IpEndpoint::Family::kIpv4 ? AF_INET : AF_INET6;
  request.body.sdiag_protocol = IPPROTO_TCP;
  request.body.idiag_states = kAllStates;
  inet_diag_sockid& id = request.body.id;
  id.idiag_sport = htons(socket_address.port);
  id.idiag_dport = htons(peer.port);
  PutAddress(socket_address, id.idiag_src);
  PutAddress(peer, id.idiag_dst);
  id.idiag_if = socket_address.scope_id;
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
  // Where there is no such connection, who listens there is found in its place.
  if (found.id.idiag_sport != id.idiag_sport || found.id.idiag_dport != id.idiag_dport ||
      found.idiag_state == TCP_LISTEN) {
    return std::nullopt;
  }
  // A socket that its process has closed counts as root's.
  if (found.idiag_inode == 0) return Stream::kNoUser;
  return found.idiag_uid;
}

}  // namespace stagecoach::emu
