// Whether memory is there to be registered.
#pragma once

#include <cstdint>

namespace stagecoach::emu {

// 0 if every page of [address, address + length) can be read, and written when `writable`; EFAULT otherwise. Pages are
// faulted in, as hardware would by pinning them, and no byte changes. The range must not wrap; length 0 is fine
// anywhere.
int ProbeMemory(const void* address, uint64_t length, bool writable);

}  // namespace stagecoach::emu
