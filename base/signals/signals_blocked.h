// SignalsBlocked: threads that are made meanwhile take none of the program's signals.
//
// Signals are for the program's own threads: one that a thread of ours took would break off its system calls, and be
// late for the program. What a thread brings upon itself is left to it, even where the program blocks it: memory that
// is not mapped any more is noticed so (base/safe_copy). Threading: of the thread that makes and destroys it.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace stagecoach {

class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t others;
    sigfillset(&others);
    for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) sigdelset(&others, own);
    pthread_sigmask(SIG_SETMASK, &others, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;
  // What was blocked before, and will be again.
  const sigset_t& before() const { return before_; }

 private:
  sigset_t before_;
};

}  // namespace stagecoach
