// Credits: how many calls a requester may have on the wire [5666bis:4.3].
//
// Starts at one until the first reply brings a grant [5666bis:4.3.1#2]. A grant of zero, which the other end must not
// send [5666bis:4.3#2], counts as one: it would be a deadlock. Grants above our own maximum are of no use, since every
// outstanding call needs a Receive of ours.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "base/check.h"
#include "base/mark.h"
#include "base/mutant.h"

namespace stagecoach::rpcrdma {

class Credits {
 public:
  explicit Credits(uint32_t own_max) : own_max_(std::max(own_max, 1u)) {
    if (STAGECOACH_MUTANT("initial-credit-ignored",
                          "more than one call is sent before the first reply brings a grant")) {
      granted_ = own_max_;
    }
  }

  bool available() const {
    if (STAGECOACH_MUTANT("credit-overrun", "one call more than granted is sent")) return in_flight_ <= granted_;
    return in_flight_ < granted_;
  }
  uint32_t granted() const { return granted_; }
  uint32_t in_flight() const { return in_flight_; }

  void OnSent() { ++in_flight_; }
  // A reply came for a call in flight. `grant` is what its header says; nullopt when that could not be read.
  void OnReply(std::optional<uint32_t> grant) {
    STAGECOACH_CHECK(in_flight_ > 0);
    --in_flight_;
    if (!grant.has_value()) return;
    if (*grant == 0) STAGECOACH_MARK("credits.grant_of_zero");
    // Once, as a generous peer says it with every reply.
    if (*grant > own_max_ && granted_ < own_max_) STAGECOACH_MARK("credits.grant_above_own_maximum");
    granted_ = std::clamp(*grant, 1u, own_max_);
    if (granted_ < in_flight_) STAGECOACH_MARK("credits.grant_below_calls_in_flight");
  }

 private:
  uint32_t own_max_;
  uint32_t granted_ = 1;
  uint32_t in_flight_ = 0;
};

}  // namespace stagecoach::rpcrdma
