// Whether the handlers of this process have system calls go on that they interrupt (SA_RESTART, sigaction(2)).
//
// Some calls go on by themselves after such a handler, as read(2); others never do, as poll(2) (signal(7)). Who stands
// in for one of the first with one of the second has to know. Only the dispositions can be asked, not which signal
// came.
//
// Threading: any.
#pragma once

#include <cstdint>

namespace stagecoach {

enum class Handlers : uint8_t {
  kNone,       // there are none: whatever interrupted a call ran none
  kRestart,    // all have calls go on
  kInterrupt,  // none has
  kMixed,
};

// As they are now: a system call for each signal, some microseconds.
Handlers HandlersNow();

}  // namespace stagecoach
