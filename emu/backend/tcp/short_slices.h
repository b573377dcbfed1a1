// Short slices: how a thread that sleeps most of the time is run soon after it is woken, on a machine where others want
// all processors.
//
// The kernel's scheduler (EEVDF) runs whoever has the earliest deadline, which is a slice away: a thread that asks for
// shorter ones has no more of the processor, and has it sooner. Linux takes the wish from 6.12 on, of any thread and
// without a privilege (sched_setattr(2), sched_runtime of SCHED_OTHER; 0.1 to 100 ms); before that it has no effect.
//
// Threading: of the calling thread alone.
#pragma once

#include "base/time.h"

namespace stagecoach::emu {

// The shortest that Linux takes.
inline constexpr Duration kShortestSlice = 100us;

// Asks for slices of this length. Policy, nice value and all else stay; a thread that has a real-time policy keeps what
// it has. 0, or an errno of the system, which may forbid it (a seccomp filter): the thread runs as it did.
int TakeSlices(Duration length);

}  // namespace stagecoach::emu
