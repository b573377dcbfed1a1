// What has to come to a loop also when the system has no memory left (base/insist.h).
#pragma once

#include <chrono>
#include <new>
#include <thread>

#include "base/event_loop.h"
#include "base/insist.h"

namespace stagecoach::emu {

// EventLoop::Post, from any thread.
template <typename Action>
void InsistPost(EventLoop& loop, const Action& action) {
  Insist([&] { loop.Post(EventLoop::Callback(action)); });
}

// The same for destructors, which have nobody to tell: waits for memory, however long it takes.
template <typename Action>
void PostAtLast(EventLoop& loop, const Action& action) noexcept {
  constexpr auto kPause = std::chrono::microseconds(10);
  for (;;) {
    try {
      return InsistPost(loop, action);
    } catch (const std::bad_alloc&) {
      std::this_thread::sleep_for(kPause);
    }
  }
}

// EventLoop::At, on the loop.
template <typename Action>
EventLoop::TimerId InsistAt(EventLoop& loop, Instant when, const Action& action) {
  return Insist([&] { return loop.At(when, EventLoop::Callback(action)); });
}

}  // namespace stagecoach::emu
