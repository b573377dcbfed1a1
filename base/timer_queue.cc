#include "base/timer_queue.h"

#include "base/undoing.h"

namespace stagecoach {

TimerQueue::TimerId TimerQueue::At(Instant when, Callback callback) {
  const TimerId id = next_id_++;
  times_.emplace(id, when);
  Undoing timeless([&] { times_.erase(id); });
  timers_.emplace(std::make_pair(when, id), std::move(callback));
  timeless.Done();
  return id;
}

void TimerQueue::Cancel(TimerId timer) {
  const auto found = times_.find(timer);
  if (found == times_.end()) return;
  const auto entry = timers_.find({found->second, timer});
  times_.erase(found);
  // What the callback holds may come back to this queue as it is destroyed: take it out first.
  const Callback dropped = std::move(entry->second);
  timers_.erase(entry);
}

std::optional<Instant> TimerQueue::First() const {
  if (timers_.empty()) return std::nullopt;
  return timers_.begin()->first.first;
}

bool TimerQueue::Run(Instant now, size_t most) {
  const TimerId limit = next_id_;
  size_t run = 0;
  while (run < most && !timers_.empty()) {
    const auto first = timers_.begin();
    if (first->first.first > now || first->first.second >= limit) break;
    const Callback callback = std::move(first->second);
    times_.erase(first->first.second);
    timers_.erase(first);
    ++run;
    callback();
  }
  return run > 0;
}

}  // namespace stagecoach
