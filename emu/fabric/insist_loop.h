// What has to come to a loop also when the system has no memory left (base/insist.h).
#pragma once

#include <new>
#include <thread>
#include <utility>

#include "base/event_loop.h"
#include "base/insist.h"
#include "base/spare_blocks.h"
#include "base/undoing.h"

namespace stagecoach::emu {

// EventLoop::Post, from any thread. With no memory at all, the action waits in a spare block.
template <typename Action>
void InsistPost(EventLoop& loop, const Action& action) {
  try {
    return Insist([&] { loop.Post(EventLoop::Callback(action)); });
  } catch (const std::bad_alloc&) {
    void* const block = TakeSpareBlock(sizeof(Action));
    if (block == nullptr) throw;
    Undoing unused([&] { GiveSpareBlock(block); });
    auto* const kept = new (block) Action(action);
    const auto take = [kept] {
      Action taken(std::move(*kept));
      kept->~Action();
      GiveSpareBlock(kept);
      return taken;
    };
    unused.Done();
    try {
      // A pointer is all that it holds, so that it needs no memory of its own.
      loop.Post([take] { take()(); });
    } catch (const std::bad_alloc&) {
      take();
      throw;
    }
  }
}

// The same for destructors, which have nobody to tell: waits for memory, however long it takes.
template <typename Action>
void PostAtLast(EventLoop& loop, const Action& action) noexcept {
  for (;;) {
    try {
      return InsistPost(loop, action);
    } catch (const std::bad_alloc&) {
      std::this_thread::sleep_for(kWantPause);
    }
  }
}

// EventLoop::At, on the loop.
template <typename Action>
EventLoop::TimerId InsistAt(EventLoop& loop, Instant when, const Action& action) {
  return Insist([&] { return loop.At(when, EventLoop::Callback(action)); });
}

}  // namespace stagecoach::emu
