#include "base/safe_copy/safe_copy.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>

#include "base/check.h"

namespace stagecoach {
namespace {

// Of the addresses from here up to the kernel's, none is one: their upper bits do not repeat bit 47. A use of one is no
// page fault, so the kernel cannot say where it was: it sends SIGSEGV (SIGBUS, where the processor takes it for the
// stack) with SI_KERNEL and no address.
constexpr uintptr_t kUserSpaceEnd = uintptr_t{1} << 47;

// What a function of ours touches while it is the guard of its thread. On the stack of that function.
struct Guard {
  struct Range {
    uintptr_t begin = 0;
    size_t size = 0;
    bool Holds(uintptr_t address) const { return address - begin < size; }
    // Whether some of it lies where no program of an x86-64 processor with four levels of page tables has memory.
    bool LeavesUserSpace() const { return begin >= kUserSpaceEnd || size > kUserSpaceEnd - begin; }
  };
  Range first;
  Range second;
  sigjmp_buf go_on;
};

// Read by the handler. Its model spares the handler the allocation that others may need in a shared library.
__attribute__((tls_model("initial-exec"))) thread_local std::atomic<Guard*> guard_of_thread{nullptr};
// The handler of ours that was called last on this thread, and may be at work: where its frame is, and which of the
// handlers found it has called. A handler of the program's may leave by siglongjmp, and ours then never ends.
struct AtWork {
  std::atomic<uintptr_t> frame{0};
  std::atomic<int> index{0};
};
__attribute__((tls_model("initial-exec"))) thread_local AtWork at_work;

// The handlers found in the place of ours, oldest first: there is more than one where a program has replaced ours by
// its own, and ours was put in front again. Written under a lock, read by handlers.
constexpr int kMostHandlers = 8;
struct Signal {
  int number;
  std::array<struct sigaction, kMostHandlers> found{};
  std::atomic<int> count{0};
};
Signal signals[] = {{SIGSEGV}, {SIGBUS}};

void Die(int number) {
  struct sigaction defaults {};
  defaults.sa_handler = SIG_DFL;
  sigemptyset(&defaults.sa_mask);
  sigaction(number, &defaults, nullptr);
}

// What would have happened without us: the handlers that were found, from this one on. -1: there was none.
void Chain(Signal& signal, int index, siginfo_t* info, void* context) {
  const bool sent = info->si_code <= 0;  // by somebody, and not by the processor
  const struct sigaction* const action = index >= 0 ? &signal.found[static_cast<size_t>(index)] : nullptr;
  const bool has_information = action != nullptr && (action->sa_flags & SA_SIGINFO) != 0;
  if (action == nullptr || (!has_information && action->sa_handler == SIG_DFL)) {
    // The instruction faults again when we return, now without anybody to ask.
    Die(signal.number);
    if (sent) raise(signal.number);
  } else if (!has_information && action->sa_handler == SIG_IGN) {
    // What the processor says cannot be ignored.
    if (!sent) Die(signal.number);
  } else {
    sigset_t blocked = action->sa_mask;
    if ((action->sa_flags & SA_NODEFER) == 0) sigaddset(&blocked, signal.number);
    sigset_t before;
    pthread_sigmask(SIG_BLOCK, &blocked, &before);
    if (has_information) {
      action->sa_sigaction(signal.number, info, context);
    } else {
      action->sa_handler(signal.number);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
}

// A handler of the program's that interrupts a copy may have a fault of its own.
bool IsOf(const Guard& guard, const siginfo_t& info) {
  if (info.si_code == SI_KERNEL) return guard.first.LeavesUserSpace() || guard.second.LeavesUserSpace();
  const auto address = reinterpret_cast<uintptr_t>(info.si_addr);
  return info.si_code > 0 && (guard.first.Holds(address) || guard.second.Holds(address));
}

void OnSignal(int number, siginfo_t* info, void* context) {
  Guard* const guard = guard_of_thread.load(std::memory_order_relaxed);
  if (guard != nullptr && IsOf(*guard, *info)) {
    // A handler of the program's may have called us, under a mask of its own.
    pthread_sigmask(SIG_SETMASK, &static_cast<const ucontext_t*>(context)->uc_sigmask, nullptr);
    siglongjmp(guard->go_on, 1);
  }
  Signal& signal = number == signals[0].number ? signals[0] : signals[1];
  int index = signal.count.load(std::memory_order_acquire) - 1;
  // One that we have replaced may call the one it had replaced itself, which is ours again: then it is the turn of the
  // one before it. In that case our earlier frame lies between this one and the context that the kernel put on the
  // stack before either; called by the kernel we stand next to it.
  const auto frame = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  const uintptr_t earlier = at_work.frame.load(std::memory_order_relaxed);
  const int earlier_index = at_work.index.load(std::memory_order_relaxed);
  if (frame < earlier && earlier < reinterpret_cast<uintptr_t>(context)) index = earlier_index - 1;
  at_work.frame.store(frame, std::memory_order_relaxed);
  at_work.index.store(index, std::memory_order_relaxed);
  Chain(signal, index, info, context);
  at_work.frame.store(earlier, std::memory_order_relaxed);
  at_work.index.store(earlier_index, std::memory_order_relaxed);
}

// True if `access` has touched what it wanted. Not inline, as what calls sigsetjmp is compiled with care.
template <typename Access>
[[gnu::noinline]] bool Guarded(Guard::Range first, Guard::Range second, Access access) {
  Guard guard;
  guard.first = first;
  guard.second = second;
  // Without the mask, which would cost a system call; the handler knows it.
  if (sigsetjmp(guard.go_on, 0) != 0) {
    guard_of_thread.store(nullptr, std::memory_order_relaxed);
    return false;
  }
  guard_of_thread.store(&guard, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  access();
  std::atomic_signal_fence(std::memory_order_seq_cst);
  guard_of_thread.store(nullptr, std::memory_order_relaxed);
  return true;
}

// Before an atomic operation: a thread sanitizer would hold a lock of its own when that one faults. It is atomic, too,
// as others may be carrying out theirs there.
void Look(const std::byte* at) {
  static_cast<void>(__atomic_load_n(reinterpret_cast<const volatile unsigned char*>(at), __ATOMIC_RELAXED));
}

Guard::Range RangeOf(ConstBytes bytes) {
  return {reinterpret_cast<uintptr_t>(bytes.data()), bytes.size()};
}

std::mutex handlers_mutex;

// A thread that is not in the child may have held it. Each of that thread's steps left the handlers as they should be,
// so the child goes on from there. To hold it during the fork would not do: it is taken under locks that others hold
// then, too.
void FreeHandlersInChild() {
  std::construct_at(&handlers_mutex);
}

}  // namespace

void CatchMemoryFaults() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, FreeHandlersInChild); });
  std::lock_guard lock(handlers_mutex);
  for (Signal& signal : signals) {
    struct sigaction now {};
    if (sigaction(signal.number, nullptr, &now) != 0) continue;
    if ((now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == OnSignal) continue;
    const int count = signal.count.load(std::memory_order_relaxed);
    // A program that installs its own again and again is as good as one that did it once.
    const bool known = count > 0 && signal.found[static_cast<size_t>(count) - 1].sa_sigaction == now.sa_sigaction;
    if (!known) {
      // Ever new ones: there must be an end to it.
      if (count == kMostHandlers) continue;
      signal.found[static_cast<size_t>(count)] = now;
      signal.count.store(count + 1, std::memory_order_release);
    }
    struct sigaction ours {};
    ours.sa_sigaction = OnSignal;
    // On the alternate stack, if the thread has one: what is passed on may be an overflow of its usual stack.
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    sigaction(signal.number, &ours, nullptr);
  }
}

bool SafeCopy(MutableBytes to, ConstBytes from) {
  STAGECOACH_CHECK(to.size() >= from.size());
  if (from.empty()) return true;
  return Guarded(RangeOf(to.first(from.size())), RangeOf(from),
                 [&] { std::memcpy(to.data(), from.data(), from.size()); });
}

bool IsReadable(ConstBytes bytes) {
  if (bytes.empty()) return true;
  return Guarded(RangeOf(bytes), {}, [&] {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    for (size_t at = 0; at < bytes.size(); at += page) Look(&bytes[at]);
    Look(&bytes.back());
  });
}

bool IsWritable(MutableBytes bytes) {
  if (bytes.empty()) return true;
  return Guarded(RangeOf(bytes), {}, [&] {
    const volatile unsigned char nothing = 0;  // as compilers make a mere load of the addition of a constant 0
    const auto add_nothing = [&nothing](std::byte* at) {
      Look(at);
      __atomic_fetch_add(reinterpret_cast<unsigned char*>(at), nothing, __ATOMIC_RELAXED);
    };
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    for (size_t at = 0; at < bytes.size(); at += page) add_nothing(&bytes[at]);
    add_nothing(&bytes.back());
  });
}

bool SafeStoreRelease(std::byte* to, ConstBytes word) {
  STAGECOACH_CHECK(reinterpret_cast<uintptr_t>(to) % word.size() == 0);
  const auto store = [&](auto value) {
    std::memcpy(&value, word.data(), sizeof value);
    std::atomic_ref(*reinterpret_cast<decltype(value)*>(to)).store(value, std::memory_order_release);
  };
  return Guarded({reinterpret_cast<uintptr_t>(to), word.size()}, {}, [&] {
    Look(to);
    switch (word.size()) {
      case 1:
        return store(uint8_t{});
      case 2:
        return store(uint16_t{});
      case 4:
        return store(uint32_t{});
      default:
        STAGECOACH_CHECK(word.size() == 8);
        return store(uint64_t{});
    }
  });
}

std::optional<uint64_t> SafeFetchAdd(std::byte* at, uint64_t operand) {
  uint64_t before = 0;
  const std::atomic_ref<uint64_t> word(*reinterpret_cast<uint64_t*>(at));
  const auto add = [&] {
    Look(at);
    before = word.fetch_add(operand);
  };
  if (!Guarded({reinterpret_cast<uintptr_t>(at), sizeof before}, {}, add)) return std::nullopt;
  return before;
}

std::optional<uint64_t> SafeCompareExchange(std::byte* at, uint64_t compare, uint64_t replacement) {
  const std::atomic_ref<uint64_t> word(*reinterpret_cast<uint64_t*>(at));
  uint64_t before = compare;
  const auto exchange = [&] {
    Look(at);
    word.compare_exchange_strong(before, replacement);
  };
  if (!Guarded({reinterpret_cast<uintptr_t>(at), sizeof before}, {}, exchange)) return std::nullopt;
  return before;
}

}  // namespace stagecoach
