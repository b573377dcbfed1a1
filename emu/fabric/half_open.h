// HalfOpen: the streams at one port whose peers have not said yet what they want, and who of them gives way when there
// are too many.
//
// An honest peer says what it wants as soon as it is connected, so that the oldest is the least likely to be one. And
// nobody has to give way to an address that has more of them: where there are too many, it is the oldest stream of the
// address with the most. So one address cannot keep others out, nor itself; and as many as there may be at all may
// come from one address, while no other wants room.
//
// Not thread-safe: one port's, on the fabric's loop.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>

#include "emu/fabric/address.h"

namespace stagecoach::emu {

class HalfOpen {
 public:
  // At least one.
  explicit HalfOpen(size_t most) : most_(most > 0 ? most : 1) {}

  // Counts a stream that came from `remote`, whose port does not matter. Of two keys the smaller one is the older. What
  // is returned has to end, and is counted no more. It is another one than `key` if that is the largest so far; one
  // that left and comes back is as old as it was, and may be the one.
  std::optional<uint64_t> Enter(uint64_t key, const IpEndpoint& remote);
  // It has said what it wants, or has ended. Nothing if it is not counted.
  void Leave(uint64_t key);
  size_t size() const { return addresses_.size(); }

 private:
  uint64_t OldestOfTheMost() const;

  const size_t most_;
  std::map<uint64_t, IpEndpoint> addresses_;  // by key
  std::map<IpEndpoint, std::set<uint64_t>> keys_;
};

}  // namespace stagecoach::emu
