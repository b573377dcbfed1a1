// DeviceWork: what a device in software has to do, done by a program's own loop while it sleeps.
//
// Hardware moves bytes by itself. The emulated device has a thread for it, which an arrival wakes, and which wakes the
// program: two threads for one event. A loop that joins does the device's work itself when it would sleep otherwise.
//
// Threading: of the thread of the loop.
#pragma once

#include <memory>
#include <utility>

#include "base/event_loop.h"

namespace stagecoach::verbs {

class DeviceWork {
 public:
  // One for each loop, shared by who holds it. Null: there is nothing to do (hardware; a simulated world), or the loop
  // cannot do it.
  static std::shared_ptr<DeviceWork> Join(EventLoop& loop);
  ~DeviceWork();
  DeviceWork(const DeviceWork&) = delete;
  DeviceWork& operator=(const DeviceWork&) = delete;

 private:
  DeviceWork(EventLoop& loop, std::unique_ptr<EventLoop::Companion> companion)
      : loop_(loop), companion_(std::move(companion)) {}

  EventLoop& loop_;
  const std::unique_ptr<EventLoop::Companion> companion_;
};

// Defined by the emulated provider alone. Null: there is nothing to do.
[[gnu::weak]] std::unique_ptr<EventLoop::Companion> MakeDeviceCompanion();

}  // namespace stagecoach::verbs
