// Time as the engines see it: handed in by whoever drives them, never read from a clock.
#pragma once

#include <chrono>

namespace stagecoach {

using Duration = std::chrono::nanoseconds;

// The clock an Instant belongs to is the EventLoop's: steady time in a real process, virtual time in a simulation.
// It has no now() on purpose.
struct LoopClock {
  using duration = Duration;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<LoopClock, duration>;
  static constexpr bool is_steady = true;
};

using Instant = LoopClock::time_point;

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""ns;
using std::chrono_literals::operator""s;
using std::chrono_literals::operator""us;

}  // namespace stagecoach
