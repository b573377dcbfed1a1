#include "emu/backend/tcp/busy_poll.h"

#include <algorithm>

namespace stagecoach::emu {

void BusyPoll::Slept(Duration sleep, bool is_found) {
  const Duration polled = time();
  if (sleep > most_) {
    const Duration half = polled / 2;
    time_.store(half < least() ? Duration::zero() : half, std::memory_order_relaxed);
    return;
  }
  if (const int rest = rest_.load(std::memory_order_relaxed); rest > 0) {
    return rest_.store(rest - 1, std::memory_order_relaxed);
  }
  if (!is_found) {
    if (polled > Duration::zero()) NoteVain();
    return;
  }
  if (polled >= most_) return NoteVain();
  time_.store(std::clamp(polled * 2, least(), most_), std::memory_order_relaxed);
}

void BusyPoll::NoteVain() {
  const int vain = vain_.load(std::memory_order_relaxed) + 1;
  vain_.store(vain % kVainPolls, std::memory_order_relaxed);
  if (vain < kVainPolls) return;
  time_.store(Duration::zero(), std::memory_order_relaxed);
  rest_.store(kRest, std::memory_order_relaxed);
}

}  // namespace stagecoach::emu
