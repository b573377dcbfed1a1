// LeadingCompanion: a program's own loop, which sleeps in a library of its own, as one who leads (leadership.h).
//
// The loop watches a descriptor that is readable when connections have something to say and this loop leads: an epoll
// of which the fabric's is the only member, armed only then.
//
// Threading: of the thread of that loop.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "base/event_loop.h"
#include "base/fork/fork.h"
#include "base/time.h"
#include "emu/backend/tcp/leadership.h"

namespace stagecoach::emu {

class LeadingCompanion final : public EventLoop::Companion {
 public:
  // Null: there was no descriptor for it. `leadership` outlives it.
  static std::unique_ptr<LeadingCompanion> Create(Leadership* leadership);
  ~LeadingCompanion() override;
  LeadingCompanion(const LeadingCompanion&) = delete;
  LeadingCompanion& operator=(const LeadingCompanion&) = delete;

  int fd() const override { return gate_; }
  bool OnIdle(const std::function<bool()>& is_over) override;
  void OnSleep() override;
  void OnWake() override;
  void OnReadable() override;

 private:
  LeadingCompanion(Leadership* leadership, int gate) : leadership_(*leadership), waiter_(this), gate_(gate) {}
  void Arm(bool armed);
  // In a forked child nothing is left of the fabric, and the descriptor's number may be another's.
  bool IsInherited() const { return generation_ != ForkGeneration(); }

  Leadership& leadership_;
  Leadership::Waiter waiter_;
  const int gate_;
  const uint32_t generation_ = ForkGeneration();
  bool is_armed_ = false;
  std::optional<Instant> asleep_;  // since when, until it has found something
};

}  // namespace stagecoach::emu
