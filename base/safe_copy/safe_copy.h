// Access to memory that may not be there any more: copies and single words that fail where others would crash.
//
// Programs register memory and unmap it while a peer still writes to it. Hardware keeps the pages; software finds out
// by a fault (SIGSEGV, or SIGBUS where a mapped file was cut). The functions below answer with false then.
//
// HOW. CatchMemoryFaults() installs a handler for the two signals. Each function notes, in a variable of its thread,
// which memory it is about to touch and where to go on; a fault of that thread inside of just that memory goes on
// there. EVERY OTHER FAULT IS NONE OF OURS: it is passed on to the handler that was there before, with its mask and its
// flags, and where there was none the program dies of it as it would have. Copies by the kernel need none of this:
// system calls answer EFAULT.
//
// A program may install its own handler later. The next CatchMemoryFaults() puts ours in front of that one; until then
// it is up to the program's handler to call what it found, as handlers do.
//
// A thread that blocks the two signals dies of a fault, as the kernel has it.
//
// Only what lies between user and device may use this: the bytes of registered memory. A fault anywhere else is a bug
// and must be seen as one. Threading: any thread; not from signal handlers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/bytes.h"

namespace stagecoach {

// Idempotent and cheap. Without it the functions below are as good as ordinary copies.
void CatchMemoryFaults();

// Copies from.size() bytes to the beginning of `to`, which has as many. False: some of either are not there, or not
// writable; how many have been copied is unknown.
[[nodiscard]] bool SafeCopy(MutableBytes to, ConstBytes from);

// Whether all of them can be read now.
[[nodiscard]] bool IsReadable(ConstBytes bytes);

// Whether all of them can be written now. Changes nothing.
[[nodiscard]] bool IsWritable(MutableBytes bytes);

// The bytes of `word`, 1, 2, 4 or 8 of them, to an address that is a multiple of their number: as one store, with
// release semantics.
[[nodiscard]] bool SafeStoreRelease(std::byte* to, ConstBytes word);

// On eight aligned bytes, sequentially consistent; what was there before.
[[nodiscard]] std::optional<uint64_t> SafeFetchAdd(std::byte* at, uint64_t operand);
[[nodiscard]] std::optional<uint64_t> SafeCompareExchange(std::byte* at, uint64_t compare, uint64_t replacement);

}  // namespace stagecoach
