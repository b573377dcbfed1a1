// rdma_getaddrinfo: names to addresses, by the host's own resolver.

#include <netdb.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "verbs_shim/emulated/objects.h"

namespace stagecoach::verbs::emulated {
namespace {

constexpr int kKnownFlags = RAI_PASSIVE | RAI_NUMERICHOST | RAI_NOROUTE | RAI_FAMILY;

int ErrnoOf(int resolver_error) {
  switch (resolver_error) {
    case EAI_SYSTEM:
      return errno;
    case EAI_MEMORY:
      return ENOMEM;
    case EAI_AGAIN:
      return EAGAIN;
    case EAI_FAMILY:
      return EAFNOSUPPORT;
    case EAI_NONAME:
    case EAI_SERVICE:
      return ENODATA;
    default:
      return EINVAL;
  }
}

sockaddr* CopyAddress(const sockaddr* from, socklen_t length) {
  auto* to = static_cast<sockaddr*>(std::malloc(length));
  if (to != nullptr) std::memcpy(to, from, length);
  return to;
}

}  // namespace
}  // namespace stagecoach::verbs::emulated

using namespace stagecoach::verbs::emulated;  // NOLINT: the entry points stand in the global namespace

extern "C" {

int rdma_getaddrinfo(const char* node, const char* service, const struct rdma_addrinfo* hints,
                     struct rdma_addrinfo** res) {
  const auto fail = [](int error) {
    errno = error;
    return -1;
  };
  const int flags = hints != nullptr ? hints->ai_flags : 0;
  if ((node == nullptr && service == nullptr) || (flags & ~kKnownFlags) != 0) return fail(EINVAL);
  const bool passive = (flags & RAI_PASSIVE) != 0;
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  if (passive) wanted.ai_flags |= AI_PASSIVE;
  if ((flags & RAI_NUMERICHOST) != 0) wanted.ai_flags |= AI_NUMERICHOST;
  if ((flags & RAI_FAMILY) != 0) wanted.ai_family = hints->ai_family;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(node, service, &wanted, &found); error != 0) return fail(ErrnoOf(error));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);

  auto* info = static_cast<rdma_addrinfo*>(std::calloc(1, sizeof(rdma_addrinfo)));
  if (info == nullptr) return fail(ENOMEM);
  info->ai_flags = flags;
  info->ai_family = found->ai_family;
  info->ai_qp_type = hints != nullptr && hints->ai_qp_type != 0 ? hints->ai_qp_type : IBV_QPT_RC;
  info->ai_port_space = hints != nullptr && hints->ai_port_space != 0 ? hints->ai_port_space : RDMA_PS_TCP;
  (passive ? info->ai_src_addr : info->ai_dst_addr) = CopyAddress(found->ai_addr, found->ai_addrlen);
  (passive ? info->ai_src_len : info->ai_dst_len) = found->ai_addrlen;
  if (!passive && hints != nullptr && hints->ai_src_addr != nullptr) {
    info->ai_src_addr = CopyAddress(hints->ai_src_addr, hints->ai_src_len);
    info->ai_src_len = hints->ai_src_len;
  }
  if ((passive ? info->ai_src_addr : info->ai_dst_addr) == nullptr ||
      (info->ai_src_len != 0 && info->ai_src_addr == nullptr)) {
    rdma_freeaddrinfo(info);
    return fail(ENOMEM);
  }
  *res = info;
  return 0;
}

void rdma_freeaddrinfo(struct rdma_addrinfo* info) {
  while (info != nullptr) {
    rdma_addrinfo* next = info->ai_next;
    std::free(info->ai_src_addr);
    std::free(info->ai_dst_addr);
    std::free(info);
    info = next;
  }
}

}  // extern "C"
