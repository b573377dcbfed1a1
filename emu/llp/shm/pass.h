// Descriptors that one process passes to another, over a Unix-domain socket (unix(7), SCM_RIGHTS).
#pragma once

#include <cstddef>
#include <span>

#include "base/bytes.h"
#include "base/result.h"

namespace stagecoach::emu {

inline constexpr size_t kMostPassed = 4;

// Never waits. `message` is at least one byte, for descriptors do not go alone; it and they go together or not at all.
// 0, or an errno: EAGAIN where there is no room.
int PassDescriptors(int socket, ConstBytes message, std::span<const int> fds);

// Never waits. Takes what was passed in one message: just as many descriptors as `fds` has room for, and `message`
// whole. They are closed in children and on exec. EAGAIN: nothing is there. EPIPE: the other end has closed. EPROTO:
// what came was something else, and whatever came with it is closed. EMFILE: there are not as many descriptors left,
// and the message is still there to be taken. Other errnos as recvmsg(2) has them.
Result<void, int> TakeDescriptors(int socket, MutableBytes message, std::span<int> fds);

}  // namespace stagecoach::emu
