// HalfOpen: the streams at one port whose peers have not said yet what they want, and who of them gives way when there
// are too many.
//
// An honest peer says what it wants as soon as it is connected, so that the oldest is the least likely to be one. And
// nobody has to give way to a source (IpEndpoint::Source) that has more of them: where there are too many, it is the
// oldest stream of the source with the most. So one source cannot keep others out, nor itself; and as many as there may
// be at all may come from one source, while no other wants room.
//
// Not thread-safe: one port's, on the fabric's loop.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "emu/fabric/address.h"

namespace stagecoach::emu {

class HalfOpen {
 public:
  // At least one.
  explicit HalfOpen(size_t most) : most_(most > 0 ? most : 1) {}

  // Counts a stream that came from `remote`, whose port does not matter, and is the newest now; also one that was here,
  // left, and comes back. What is returned has to end, and is counted no more; it is another one than `key`.
  std::optional<uint64_t> Enter(uint64_t key, const IpEndpoint& remote);
  // It has said what it wants, or has ended. Nothing if it is not counted.
  void Leave(uint64_t key);
  size_t size() const { return streams_.size(); }

 private:
  uint64_t OldestOfTheMost() const;

  struct Place {
    IpEndpoint source;
    uint64_t age = 0;  // the smaller, the older
  };

  const size_t most_;
  uint64_t next_age_ = 1;
  std::map<uint64_t, Place> streams_;                              // by key
  std::map<IpEndpoint, std::map<uint64_t, uint64_t>> of_sources_;  // their keys by age
};

}  // namespace stagecoach::emu
