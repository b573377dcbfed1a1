// BusyPoll: how long who leads (leadership.h) polls the loop before it sleeps.
//
// What has arrived mostly brings an answer soon. To poll for that a while longer spares the sleep, and with it the time
// that waking takes. It costs processor time, though, so it is done only where it pays:
//
//   - A sleep that was longer than the most one may poll says that polling could not have spared it: the time is
//   halved,
//     and soon it is none. A program that waits for what comes a hundred times a second never polls.
//   - A sleep that was shorter, and that the loop has ended, says that polling a little longer would have spared it:
//   the
//     time is doubled.
//   - Where polls are in vain again and again though sleeps are short, it rests for many sleeps. Either something else
//     ends these sleeps, or the polling itself keeps away what is waited for, since the peer runs on this processor, or
//     other work does.
//
// Threading: any. Two leaders that change at once may lose one of their steps, which costs a little time.
#pragma once

#include <atomic>

#include "base/time.h"

namespace stagecoach::emu {

class BusyPoll {
 public:
  // So many polls in vain one after the other that could not be made longer, or did not help; and for how many sleeps
  // it rests then.
  static constexpr int kVainPolls = 4;
  static constexpr int kRest = 256;

  // `most` 0: never.
  explicit BusyPoll(Duration most) : most_(most) {}

  // For how long to poll now, before the next sleep. 0: not at all.
  Duration time() const { return time_.load(std::memory_order_relaxed); }
  // The poll has found something.
  void Found() { vain_.store(0, std::memory_order_relaxed); }
  // After a poll in vain, or none, and a sleep that was so long. `is_found`: the loop has ended it, and nothing else.
  void Slept(Duration sleep, bool is_found);

 private:
  Duration least() const { return most_ / 8; }
  void NoteVain();

  const Duration most_;
  std::atomic<Duration> time_{Duration::zero()};
  std::atomic<int> vain_{0};
  std::atomic<int> rest_{0};  // sleeps
};

}  // namespace stagecoach::emu
