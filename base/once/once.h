// Once: what is done once in a process, by whichever thread comes first. Who comes meanwhile waits for it.
//
// What fails, by an exception, is tried again by the next one. So it is with std::call_once, too, but that goes by
// pthread_once(3), and the exception through it: glibc unwinds its own frame with a library that it opens for that, and
// ends the process where there is no memory to do so. Here nothing of C is in between. As with pthread_once, a child
// that was forked while a thread of its parent was at it begins anew.
//
// Threading: any, but not from within what is done.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>

namespace stagecoach {

class Once {
 public:
  constexpr Once() = default;
  Once(const Once&) = delete;
  Once& operator=(const Once&) = delete;

  // When it returns `function` has returned, here or in another call. Passes on what `function` throws.
  template <typename Function>
  void Do(const Function& function) {
    for (pid_t state = state_.load(std::memory_order_acquire); state != kDone;
         state = state_.load(std::memory_order_acquire)) {
      const pid_t here = getpid();
      if (state == here) {
        state_.wait(state, std::memory_order_acquire);
        continue;
      }
      if (!state_.compare_exchange_strong(state, here, std::memory_order_acquire)) continue;
      try {
        function();
      } catch (...) {
        Become(kNotDone);
        throw;
      }
      Become(kDone);
    }
  }

 private:
  static constexpr pid_t kNotDone = 0;
  static constexpr pid_t kDone = -1;

  void Become(pid_t state) {
    state_.store(state, std::memory_order_release);
    state_.notify_all();
  }

  // Or the process in which a thread is at it. A parent's is none: that thread is not in the child.
  std::atomic<pid_t> state_{kNotDone};
};

}  // namespace stagecoach
