// NextTurn: sees to it that a connection has a next turn when there is something to do: by its record layer, armed for
// what the connection waits for, by NicLoop, and by its deadline. The argument that nothing is forgotten stands in
// docs/locks_and_leases.md (Who wakes it next); this is the code that keeps it, for connections of all transports.
//
// Not thread-safe: runs under the lock of its QP.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>

#include "base/time.h"
#include "emu/llp/llp.h"

namespace stagecoach::emu {

class NicLoop;
class QueuePair;

class NextTurn {
 public:
  // Both outlive it.
  NextTurn(QueuePair& qp, NicLoop& loop) : qp_(qp), loop_(loop) {}
  NextTurn(const NextTurn&) = delete;
  NextTurn& operator=(const NextTurn&) = delete;

  // From now on by this layer, which is not armed and stays the caller's. Null: there is none, and nothing to hear;
  // posts and deadlines are what is left.
  void Use(Llp* llp);
  // The layer's one-shot readiness was used up (QueuePair::kFired).
  void NoteFired() { armed_readable_ = armed_writable_ = false; }

  struct Wants {
    bool more = false;     // the turn used up its budget
    bool receive = false;  // records, unless a tap keeps them
    bool drain = false;    // whatever comes
    bool send = false;     // the layer has taken no more
  };
  // At the end of each turn, which was asked for by `requests` of QueuePair.
  void Ensure(uint32_t requests, const Wants& wants);

  // The earliest of what is wished for, and of what the layer's tap holds.
  void SetDeadline(std::initializer_list<std::optional<Instant>> wishes);
  // NicLoop has forgotten it.
  void ForgetDeadline() { deadline_.reset(); }

 private:
  void Arm(bool readable, bool writable);

  QueuePair& qp_;
  NicLoop& loop_;
  Llp* llp_ = nullptr;
  bool armed_readable_ = false;
  bool armed_writable_ = false;
  std::optional<Instant> deadline_;  // as NicLoop knows it
};

}  // namespace stagecoach::emu
