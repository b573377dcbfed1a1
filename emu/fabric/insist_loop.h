// What has to come to a loop also when the system has no memory left (base/insist.h).
#pragma once

#include "base/event_loop.h"
#include "base/insist.h"

namespace stagecoach::emu {

// EventLoop::Post, from any thread.
template <typename Action>
void InsistPost(EventLoop& loop, const Action& action) {
  Insist([&] { loop.Post(EventLoop::Callback(action)); });
}

// EventLoop::At, on the loop.
template <typename Action>
EventLoop::TimerId InsistAt(EventLoop& loop, Instant when, const Action& action) {
  return Insist([&] { return loop.At(when, EventLoop::Callback(action)); });
}

}  // namespace stagecoach::emu
