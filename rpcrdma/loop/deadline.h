// Deadlines of time-outs that callers choose.
#pragma once

#include <algorithm>

#include "base/time.h"

namespace stagecoach::rpcrdma {

// The Instant that is `timeout` after `now`; at once where that is negative. Duration::max(), by which a caller means
// for ever, is a century: what the engines add to a deadline must still be an Instant.
inline Instant DeadlineAfter(Instant now, Duration timeout) {
  constexpr Duration kCentury = std::chrono::hours(24) * 36500;
  return now + std::clamp(timeout, Duration::zero(), kCentury);
}

}  // namespace stagecoach::rpcrdma
