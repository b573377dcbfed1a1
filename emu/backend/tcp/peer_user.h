// Whose processes have the sockets of TCP within this host (this network namespace).
//
// The kernel knows which user made each socket, and says it of any (sock_diag(7)). Threading: any thread.
#pragma once

#include <cstdint>
#include <optional>

#include "emu/fabric/address.h"

namespace stagecoach::emu {

// Of a socket that a process has: that process's user, and the socket's number as fstat(2) of a descriptor has it.
struct SocketOwner {
  uint32_t user = 0;
  uint64_t inode = 0;
};

// Of the socket whose own address is `socket` and whose peer is `peer`. nullopt: there is no such socket here, no
// process has it (any more, or yet), or the kernel does not say.
std::optional<SocketOwner> OwnerOfSocket(const IpEndpoint& socket, const IpEndpoint& peer);

// The user who has the socket whose own address is `socket` and whose peer is `peer`; Stream::kNoUser: it has been
// closed, and the kernel has the rest of it alone. nullopt: there is no such socket here, or the kernel does not say.
std::optional<uint32_t> UserOfSocket(const IpEndpoint& socket, const IpEndpoint& peer);

// The user who has the socket that listens at `local`, by this address or by all. nullopt: nobody, or the kernel does
// not say.
std::optional<uint32_t> UserOfListener(const IpEndpoint& local);

// Whether the address is this host's. True as well where there is no descriptor to find out: who asks has strangers in
// mind, who may have used them up.
bool IsOfThisHost(const IpEndpoint& address);

}  // namespace stagecoach::emu
