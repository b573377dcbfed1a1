#include "base/signals/restarts.h"

#include <signal.h>

namespace stagecoach {

Handlers HandlersNow() {
  bool any_restarts = false;
  bool any_interrupts = false;
  for (int signal = 1; signal <= SIGRTMAX; ++signal) {
    // What a thread brings upon itself interrupts no call that waits.
    if (signal == SIGSEGV || signal == SIGBUS || signal == SIGFPE || signal == SIGILL || signal == SIGTRAP) continue;
    struct sigaction action {};
    // The C library keeps some for itself, and says so by an error.
    if (sigaction(signal, nullptr, &action) != 0) continue;
    const bool has_info = (action.sa_flags & SA_SIGINFO) != 0;
    if (!has_info && (action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN)) continue;
    ((action.sa_flags & SA_RESTART) != 0 ? any_restarts : any_interrupts) = true;
  }
  if (any_restarts && any_interrupts) return Handlers::kMixed;
  if (any_restarts) return Handlers::kRestart;
  return any_interrupts ? Handlers::kInterrupt : Handlers::kNone;
}

}  // namespace stagecoach
