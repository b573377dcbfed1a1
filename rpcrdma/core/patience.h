// Patience: until when a peer may keep what it owes.
//
// The time that a peer has is an allowance. It is whole when the peer begins to owe something, and runs from then on.
// It grows again in two ways, and never beyond the whole:
//   bytes   For each second's worth of bytes that move, at the least rate that is asked for, the peer has a second
//           more. One that is slower than that owes a bit more time with each operation, however often one completes.
//   rounds  It is whole again when everything has come that was owed when it last was: small things on a long way move
//           few bytes, and yet nobody is kept waiting. What begins to be owed meanwhile belongs to the next round.
// So a peer that lets a byte go now and then gains nothing by it. What it owes comes within two allowances, or at the
// least rate.
//
// Sans-IO: time enters as a parameter, and does not go back.
#pragma once

#include <cstdint>
#include <optional>

#include "base/time.h"

namespace stagecoach::rpcrdma {

class Patience {
 public:
  // One thing that is owed: its round.
  using Debt = uint64_t;

  // `time` is the whole allowance; 0 or less: there is no end to patience. `rate_min` is in bytes per second; 0: none
  // is asked for, so that whatever moves makes the allowance whole.
  Patience(Duration time, uint64_t rate_min) : time_(time), rate_min_(rate_min) {}

  // Something more is owed, from now on until Paid().
  [[nodiscard]] Debt Owe(Instant now);
  void Paid(Debt debt, Instant now);
  // So many bytes, 0 or more, have moved to or from the peer in what it owed.
  void Moved(uint64_t bytes, Instant now);
  // Nothing is owed any more; no debt of before is to be paid.
  void Forgive() { *this = Patience(time_, rate_min_); }

  // When patience ends; nullopt: nothing is owed, or it does not end.
  std::optional<Instant> until() const { return until_; }

 private:
  void Renew(Instant now);
  Duration Worth(uint64_t bytes) const;

  Duration time_;
  uint64_t rate_min_;
  Debt round_ = 0;
  uint64_t of_this_round_ = 0;
  uint64_t of_the_next_ = 0;
  std::optional<Instant> until_;
};

}  // namespace stagecoach::rpcrdma
