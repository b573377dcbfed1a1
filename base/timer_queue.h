// TimerQueue: the timers of a loop (event_loop.h), in the order in which they fire.
//
// Threading: of the thread that runs the loop.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <utility>

#include "base/event_loop.h"
#include "base/time.h"

namespace stagecoach {

class TimerQueue {
 public:
  using TimerId = Reactor::TimerId;
  using Callback = Reactor::Callback;

  // As Reactor::At and Reactor::Cancel. std::bad_alloc: nothing was set.
  TimerId At(Instant when, Callback callback);
  void Cancel(TimerId timer);

  // When the first of them fires; empty if there is none.
  std::optional<Instant> First() const;
  bool IsDue(Instant now) const { return First() && *First() <= now; }
  // Calls those that are due at `now`, `most` of them at the most. Those that are set by what it calls wait for the
  // next run, so that one which sets itself again for now does not hold the loop. True if any was called. An exception
  // of a callback leaves the rest for the next run.
  bool Run(Instant now, size_t most);

 private:
  TimerId next_id_ = 1;
  std::map<std::pair<Instant, TimerId>, Callback> timers_;
  std::map<TimerId, Instant> times_;
};

}  // namespace stagecoach
