// Fiber: a stack of its own to run on, switched by hand on one thread. Internal to emu/sim.
//
// Stacks are mapped with a guard page below, so that overflow is a fault and not a corruption, and pooled, since worlds
// come and go by the thousand. AddressSanitizer and ThreadSanitizer are told of every switch; to the latter each fiber
// is a thread of its own, and a switch orders what was before it before what is after it.
//
// Everything of one fiber happens on one thread. Nothing may be thrown out of an entry.
#pragma once

#include <ucontext.h>

#include <cstddef>

namespace stagecoach::emu {

class Fiber {
 public:
  // Bytes; sanitizers need more for the same calls.
  static const size_t kStackSize;

  // Runs on the fiber from the first switch to it; returns the fiber that goes on when this one has ended.
  using Entry = Fiber* (*)(void* argument);

  // The context of whoever switches away from it first: it has a stack already.
  Fiber() = default;
  // A fiber that has not begun.
  Fiber(Entry entry, void* argument);
  // The fiber has ended, never begun, or is a caller's context.
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Suspends `from`, which is running, and goes on with `to`. Returns when somebody switches back.
  static void Switch(Fiber& from, Fiber& to);

 private:
  static void Trampoline(unsigned high, unsigned low);
  void Depart(Fiber& to, bool for_good);
  void Land();

  ucontext_t context_{};
  void* stack_ = nullptr;  // without the guard page; null: a caller's
  size_t stack_size_ = 0;
  Entry entry_ = nullptr;
  void* argument_ = nullptr;
  bool started_ = false;
  bool ended_ = false;
  Fiber* previous_ = nullptr;  // who switched here last
  // The sanitizers'.
  const void* bottom_ = nullptr;
  size_t bottom_size_ = 0;
  void* fake_stack_ = nullptr;
  void* thread_ = nullptr;
};

}  // namespace stagecoach::emu
