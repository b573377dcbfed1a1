// What a byte stream (emu/fabric/stream.h) and a record layer (llp.h) tell in the same words: that they are ready, and
// how far what they were given has got.
#pragma once

#include <cstdint>

namespace stagecoach::emu {

// Told that a stream or a record layer may be ready. Called from the fabric's loop thread, never from inside a call on
// what is watched.
class ReadyWatcher {
 public:
  virtual ~ReadyWatcher() = default;
  virtual void OnReady() = 0;
};

// How far what was written has got. `taken` bytes, of all there ever were, have been acknowledged by the peer's host,
// whether its process has read them or not.
struct Delivery {
  uint64_t taken = 0;
  bool is_complete = true;  // that is all that was written
  // False: the host was asked again for a sign of life, and has given none since. It may be gone, or the way bad.
  bool host_answers = true;
};

}  // namespace stagecoach::emu
