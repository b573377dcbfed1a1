// DeviceWork: what a device in software has to do, done by a program's own loop while it sleeps.
//
// Hardware moves bytes by itself. The emulated device has a thread for it, which an arrival wakes, and which wakes the
// program: two threads for one event. A loop that joins does the device's work itself when it would sleep otherwise.
//
// Threading: of the thread of the loop.
#pragma once

#include <memory>

#include "base/event_loop.h"

namespace stagecoach::verbs {

// The loop does the device's work for as long as someone holds it.
using DeviceWork = EventLoop::Companion;

// One for each loop, shared by who holds it. Null: there is nothing to do (hardware; a simulated world), or the loop
// cannot do it.
std::shared_ptr<DeviceWork> JoinDeviceWork(EventLoop& loop);

// Defined by the emulated provider alone. Null: there is nothing to do.
[[gnu::weak]] std::unique_ptr<DeviceWork> MakeDeviceCompanion();

}  // namespace stagecoach::verbs
