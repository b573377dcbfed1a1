#include "emu/sim/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <mutex>
#include <vector>

#include "base/check.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define STAGECOACH_ASAN 1
#endif
#if __has_feature(thread_sanitizer)
#define STAGECOACH_TSAN 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define STAGECOACH_ASAN 1
#endif
#if defined(__SANITIZE_THREAD__)
#define STAGECOACH_TSAN 1
#endif

#ifdef STAGECOACH_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <sanitizer/lsan_interface.h>
#endif
#ifdef STAGECOACH_TSAN
#include <sanitizer/tsan_interface.h>
#endif

namespace stagecoach::emu {
namespace {

#if defined(STAGECOACH_ASAN) || defined(STAGECOACH_TSAN)
constexpr size_t kSize = 1024 * 1024;
#else
constexpr size_t kSize = 256 * 1024;
#endif

// Stacks that wait for their next fiber. More than this many are given back to the system.
constexpr size_t kMaxPooled = 64;

// Between ThreadSanitizer's word of a switch and the switch itself no function may begin or end for it: it would put
// that on the other fiber's account.
#define STAGECOACH_SWITCHES __attribute__((no_sanitize("thread")))

class StackPool {
 public:
  // Never destroyed: a world may be the last static object to go.
  static StackPool& Instance() {
    static StackPool* const pool = new StackPool;
    return *pool;
  }

  void* Take() {
    {
      std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        void* const stack = free_.back();
        free_.pop_back();
        return stack;
      }
    }
    const auto guard = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* const mapped = mmap(nullptr, kSize + guard, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK | MAP_NORESERVE, -1, 0);
    STAGECOACH_CHECK(mapped != MAP_FAILED);
    STAGECOACH_CHECK(mprotect(mapped, guard, PROT_NONE) == 0);
    void* const stack = static_cast<char*>(mapped) + guard;
#ifdef STAGECOACH_ASAN
    // What only a suspended fiber refers to is not lost.
    __lsan_register_root_region(stack, kSize);
#endif
    return stack;
  }

  void GiveBack(void* stack) {
#ifdef STAGECOACH_ASAN
    // The last frame never returned.
    ASAN_UNPOISON_MEMORY_REGION(stack, kSize);
#endif
    {
      std::lock_guard lock(mutex_);
      if (free_.size() < kMaxPooled) {
        free_.push_back(stack);
        return;
      }
    }
#ifdef STAGECOACH_ASAN
    __lsan_unregister_root_region(stack, kSize);
#endif
    const auto guard = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    munmap(static_cast<char*>(stack) - guard, kSize + guard);
  }

 private:
  std::mutex mutex_;
  std::vector<void*> free_;
};

}  // namespace

const size_t Fiber::kStackSize = kSize;

Fiber::Fiber(Entry entry, void* argument)
    : stack_(StackPool::Instance().Take()), stack_size_(kSize), entry_(entry), argument_(argument) {
  bottom_ = stack_;
  bottom_size_ = stack_size_;
  STAGECOACH_CHECK(getcontext(&context_) == 0);
  context_.uc_stack.ss_sp = stack_;
  context_.uc_stack.ss_size = stack_size_;
  context_.uc_link = nullptr;
  const auto self = reinterpret_cast<uintptr_t>(this);
  makecontext(&context_, reinterpret_cast<void (*)()>(&Fiber::Trampoline), 2, static_cast<unsigned>(self >> 32),
              static_cast<unsigned>(self));
#ifdef STAGECOACH_TSAN
  thread_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
  if (stack_ == nullptr) return;
  STAGECOACH_CHECK(!started_ || ended_);
#ifdef STAGECOACH_TSAN
  __tsan_destroy_fiber(thread_);
#endif
  StackPool::Instance().GiveBack(stack_);
}

STAGECOACH_SWITCHES void Fiber::Switch(Fiber& from, Fiber& to) {
  from.Depart(to, false);
  swapcontext(&from.context_, &to.context_);
  from.Land();
}

STAGECOACH_SWITCHES void Fiber::Trampoline(unsigned high, unsigned low) {
  auto* const self = reinterpret_cast<Fiber*>((uintptr_t{high} << 32) | low);
  self->started_ = true;
  self->Land();
  Fiber* const next = self->entry_(self->argument_);
  self->ended_ = true;
  self->Depart(*next, true);
  setcontext(&next->context_);
}

STAGECOACH_SWITCHES void Fiber::Depart(Fiber& to, bool for_good) {
  to.previous_ = this;
#ifdef STAGECOACH_ASAN
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fake_stack_, to.bottom_, to.bottom_size_);
#endif
#ifdef STAGECOACH_TSAN
  if (stack_ == nullptr) thread_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(to.thread_, 0);
#endif
}

void Fiber::Land() {
#ifdef STAGECOACH_ASAN
  const void* bottom = nullptr;
  size_t size = 0;
  __sanitizer_finish_switch_fiber(fake_stack_, &bottom, &size);
  // A caller's stack is known only once it has been left.
  if (previous_->stack_ == nullptr) {
    previous_->bottom_ = bottom;
    previous_->bottom_size_ = size;
  }
#endif
}

}  // namespace stagecoach::emu
