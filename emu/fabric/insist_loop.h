// What has to come to a loop also when the system has no memory left (base/spare_blocks.h, base/insist.h).
#pragma once

#include <cstddef>
#include <new>
#include <thread>
#include <utility>

#include "base/event_loop.h"
#include "base/insist.h"
#include "base/spare_blocks.h"
#include "base/undoing.h"

namespace stagecoach::emu {

// Reactor::Post, from any thread. With no memory for it, the action waits in a spare block; there it stays if the
// loop goes before it has run. The reserve is for what copying the action takes. std::bad_alloc: there is no block
// left, or nothing for the copy.
template <typename Action>
void InsistPost(Reactor& loop, const Action& action) {
  static_assert(sizeof(Action) <= kSpareBlockSize && alignof(Action) <= alignof(std::max_align_t));
  try {
    return loop.Post(Reactor::Callback(action));
  } catch (const std::bad_alloc&) {
    void* const block = TakeSpareBlock(sizeof(Action));
    if (block == nullptr) throw;
    Undoing unused([&] { GiveSpareBlock(block); });
    auto* const kept = Insist([&] { return new (block) Action(action); });
    unused.Done();
    const auto take = [kept] {
      Action taken(std::move(*kept));
      kept->~Action();
      GiveSpareBlock(kept);
      return taken;
    };
    Undoing dropped([&] {
      kept->~Action();
      GiveSpareBlock(kept);
    });
    // A pointer is all that it holds, so that it needs no memory of its own.
    loop.Post([take] { take()(); });
    dropped.Done();
  }
}

// The same for destructors, which have nobody to tell: waits for memory, however long it takes.
template <typename Action>
void PostAtLast(Reactor& loop, const Action& action) noexcept {
  for (;;) {
    try {
      return InsistPost(loop, action);
    } catch (const std::bad_alloc&) {
      std::this_thread::sleep_for(kWantPause);
    }
  }
}

// Reactor::At, on the loop.
template <typename Action>
Reactor::TimerId InsistAt(Reactor& loop, Instant when, const Action& action) {
  return Insist([&] { return loop.At(when, Reactor::Callback(action)); });
}

}  // namespace stagecoach::emu
