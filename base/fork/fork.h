// What a forked child must not keep of its parent: descriptors, and the belief that its objects live.
//
// A child has copies of all descriptors. With those of streams it would keep the parent's connections open when the
// parent dies, and nobody would find out. So the descriptors of the emulator are noted here and closed in each child,
// by close(2) alone: whatever says something to a peer (shutdown) would say it for the parent. Descriptors that were
// handed to programs are among them.
//
// The objects are still in the child's memory, with locks that nobody may ever let go of and without the thread that
// moved them. Who hands objects to programs remembers ForkGeneration() of their birth and refuses those of another.
//
// The handler in the child runs where any lock may be held: it uses atomic variables and system calls. Descriptors from
// kMostDescriptors on are not noted. What lives inside of Asio closes when the child execs or ends. Threading: any.
#pragma once

#include <cstdint>

namespace stagecoach {

inline constexpr int kMostDescriptors = 1 << 16;

// Another number in a child than in its parent.
uint32_t ForkGeneration();

// Children do not get it. Returns the descriptor. A negative one is passed through.
int KeepFromChildren(int fd);
// It is about to be closed by somebody else. Must be said before: the number may mean another file at once.
void ForgetDescriptor(int fd);
// Both in their order.
void CloseDescriptor(int fd);

}  // namespace stagecoach
