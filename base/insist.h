// Insist: small things that have to be done also when the system has no memory left.
//
// Some steps nobody could take back or make up for: to have the loop look at what was written down, to queue the event
// that says how something ended. They need some hundred bytes. For these there is a reserve, kept from the time it is
// first asked for (KeepReserve): when memory ends, a piece of it is given back to the system's allocator and the step
// is tried again. After steps that succeed it is filled again.
//
// With all of the reserve gone, the step fails with std::bad_alloc, as if there were no reserve.
//
// Threading: any.
#pragma once

#include <chrono>
#include <new>
#include <type_traits>

namespace stagecoach {

// How long a thread rests before it does again what there was no memory or descriptor for, so that others can give some
// back.
constexpr auto kWantPause = std::chrono::milliseconds(1);

// Makes the reserve, if there is none yet, and fills it.
void KeepReserve();
// Gives a piece of it to the allocator. False: there is none left.
bool SpendReserve();
bool IsReserveShort();

// Does `step`, which leaves no trace when it throws std::bad_alloc.
template <typename Step>
auto Insist(Step step) -> decltype(step()) {
  for (;;) {
    try {
      // The reserve is filled after the step: before it, the piece that was given for it would be taken back.
      if constexpr (std::is_void_v<decltype(step())>) {
        step();
        if (IsReserveShort()) KeepReserve();
        return;
      } else {
        auto result = step();
        if (IsReserveShort()) KeepReserve();
        return result;
      }
    } catch (const std::bad_alloc&) {
      if (!SpendReserve()) throw;
    }
  }
}

}  // namespace stagecoach
