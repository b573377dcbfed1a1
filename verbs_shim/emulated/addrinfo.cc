// rdma_getaddrinfo: names to addresses, by the host's own resolver.
//
// As its manual page says, failures of the resolver are returned as they are, for gai_strerror; errno is set as well.
// One answer per address, in the resolver's order.

#include <netdb.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>

#include "verbs_shim/emulated/cm_objects.h"

namespace stagecoach::verbs::emulated {
namespace {

constexpr int kKnownFlags = RAI_PASSIVE | RAI_NUMERICHOST | RAI_NOROUTE | RAI_FAMILY;

int ErrnoOfResolver(int resolver_error) {
  switch (resolver_error) {
    case EAI_SYSTEM:
      return errno;
    case EAI_MEMORY:
      return ENOMEM;
    case EAI_AGAIN:
      return EAGAIN;
    case EAI_FAMILY:
    case EAI_ADDRFAMILY:
      return EAFNOSUPPORT;
    case EAI_NONAME:
    case EAI_NODATA:
    case EAI_SERVICE:
      return ENODATA;
    default:
      return EINVAL;
  }
}

struct Kind {
  int qp_type = IBV_QPT_RC;
  int port_space = RDMA_PS_TCP;
};

// Each of the two says what the other is; together they may be nonsense.
std::optional<Kind> KindOf(const rdma_addrinfo& hints) {
  Kind kind{hints.ai_qp_type, hints.ai_port_space};
  const bool datagrams = kind.qp_type == IBV_QPT_UD;
  switch (kind.qp_type) {
    case 0:
    case IBV_QPT_RC:
    case IBV_QPT_UC:
    case IBV_QPT_UD:
    case IBV_QPT_XRC_SEND:
    case IBV_QPT_XRC_RECV:
      break;
    default:
      return std::nullopt;
  }
  switch (kind.port_space) {
    case 0:
      kind.port_space = datagrams ? RDMA_PS_UDP : RDMA_PS_TCP;
      break;
    case RDMA_PS_TCP:
      if (datagrams) return std::nullopt;
      break;
    case RDMA_PS_UDP:
    case RDMA_PS_IPOIB:
      if (kind.qp_type == 0) kind.qp_type = IBV_QPT_UD;
      if (kind.qp_type != IBV_QPT_UD) return std::nullopt;
      break;
    case RDMA_PS_IB:
      break;
    default:
      return std::nullopt;
  }
  if (kind.qp_type == 0) kind.qp_type = IBV_QPT_RC;
  return kind;
}

// False: no memory.
bool CopyAddress(const sockaddr* from, socklen_t length, sockaddr** to, socklen_t* to_length) {
  if (from == nullptr || length == 0) return true;
  *to = static_cast<sockaddr*>(std::malloc(length));
  if (*to == nullptr) return false;
  std::memcpy(*to, from, length);
  *to_length = length;
  return true;
}

bool CopyName(const char* from, char** to) {
  if (from == nullptr) return true;
  *to = strdup(from);
  return *to != nullptr;
}

struct Free {
  void operator()(rdma_addrinfo* info) const { rdma_freeaddrinfo(info); }
};
using Owned = std::unique_ptr<rdma_addrinfo, Free>;

Owned NewInfo(const rdma_addrinfo& hints, const Kind& kind, int family) {
  Owned info(static_cast<rdma_addrinfo*>(std::calloc(1, sizeof(rdma_addrinfo))));
  if (info == nullptr) return info;
  info->ai_flags = hints.ai_flags;
  info->ai_family = family;
  info->ai_qp_type = kind.qp_type;
  info->ai_port_space = kind.port_space;
  return info;
}

// One answer of the resolver; null: no memory.
Owned FromResolver(const rdma_addrinfo& hints, const Kind& kind, const addrinfo& found) {
  Owned info = NewInfo(hints, kind, found.ai_family);
  if (info == nullptr) return info;
  bool copied = false;
  if ((hints.ai_flags & RAI_PASSIVE) != 0) {
    copied = CopyAddress(found.ai_addr, found.ai_addrlen, &info->ai_src_addr, &info->ai_src_len) &&
             CopyName(found.ai_canonname, &info->ai_src_canonname);
  } else {
    copied = CopyAddress(found.ai_addr, found.ai_addrlen, &info->ai_dst_addr, &info->ai_dst_len) &&
             CopyName(found.ai_canonname, &info->ai_dst_canonname) &&
             CopyAddress(hints.ai_src_addr, hints.ai_src_len, &info->ai_src_addr, &info->ai_src_len);
  }
  if (!copied) info.reset();
  return info;
}

// Without a name: what the hints say. 0, or an EAI_ code.
int FromHints(const rdma_addrinfo& hints, const Kind& kind, Owned* result) {
  const bool has_source = hints.ai_src_addr != nullptr && hints.ai_src_len > 0;
  const bool has_destination = hints.ai_dst_addr != nullptr && hints.ai_dst_len > 0;
  if (!has_source && !has_destination) return EAI_NONAME;
  const int family = has_destination ? hints.ai_dst_addr->sa_family : hints.ai_src_addr->sa_family;
  *result = NewInfo(hints, kind, family);
  const bool copied =
      *result != nullptr &&
      CopyAddress(hints.ai_src_addr, hints.ai_src_len, &(*result)->ai_src_addr, &(*result)->ai_src_len) &&
      CopyAddress(hints.ai_dst_addr, hints.ai_dst_len, &(*result)->ai_dst_addr, &(*result)->ai_dst_len);
  return copied ? 0 : EAI_MEMORY;
}

int Resolve(const char* node, const char* service, const rdma_addrinfo& hints, Owned* result) {
  if ((hints.ai_flags & ~kKnownFlags) != 0) return EAI_BADFLAGS;
  const std::optional<Kind> kind = KindOf(hints);
  if (!kind) return EAI_SOCKTYPE;
  if (node == nullptr && service == nullptr) return FromHints(hints, *kind, result);
  const bool passive = (hints.ai_flags & RAI_PASSIVE) != 0;
  addrinfo wanted{};
  wanted.ai_socktype = kind->qp_type == IBV_QPT_UD ? SOCK_DGRAM : SOCK_STREAM;
  if (passive) wanted.ai_flags |= AI_PASSIVE;
  if ((hints.ai_flags & RAI_NUMERICHOST) != 0) wanted.ai_flags |= AI_NUMERICHOST;
  if (node != nullptr) wanted.ai_flags |= AI_CANONNAME;
  if ((hints.ai_flags & RAI_FAMILY) != 0) wanted.ai_family = hints.ai_family;
  // A source of the other family could not reach the destination.
  const bool has_source = !passive && hints.ai_src_addr != nullptr && hints.ai_src_len > 0;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(node, service, &wanted, &found); error != 0) return error;
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  rdma_addrinfo* last = nullptr;
  for (; found != nullptr; found = found->ai_next) {
    if (has_source && hints.ai_src_addr->sa_family != found->ai_family) continue;
    Owned info = FromResolver(hints, *kind, *found);
    if (info == nullptr) return EAI_MEMORY;
    if (last == nullptr) {
      *result = std::move(info);
      last = result->get();
    } else {
      last->ai_next = info.release();
      last = last->ai_next;
    }
  }
  return last != nullptr ? 0 : EAI_ADDRFAMILY;
}

}  // namespace
}  // namespace stagecoach::verbs::emulated

using namespace stagecoach::verbs::emulated;  // NOLINT: the entry points stand in the global namespace

extern "C" {

int rdma_getaddrinfo(const char* node, const char* service, const struct rdma_addrinfo* hints,
                     struct rdma_addrinfo** res) {
  const auto failed = [](int error) {
    errno = error;
    return error == ENOMEM ? EAI_MEMORY : EAI_SYSTEM;
  };
  return Entry(failed, [&] {
    if (node == nullptr && service == nullptr && hints == nullptr) return Answer(EINVAL);
    const rdma_addrinfo none{};
    Owned result;
    if (const int error = Resolve(node, service, hints != nullptr ? *hints : none, &result); error != 0) {
      errno = ErrnoOfResolver(error);
      return error;
    }
    *res = result.release();
    return 0;
  });
}

void rdma_freeaddrinfo(struct rdma_addrinfo* info) {
  while (info != nullptr) {
    rdma_addrinfo* next = info->ai_next;
    std::free(info->ai_src_addr);
    std::free(info->ai_dst_addr);
    std::free(info->ai_src_canonname);
    std::free(info->ai_dst_canonname);
    std::free(info->ai_route);
    std::free(info->ai_connect);
    std::free(info);
    info = next;
  }
}

}  // extern "C"
