#include "emu/backend/tcp/leading_companion.h"

#include <sys/epoll.h>

#include "base/undoing.h"

namespace stagecoach::emu {

std::unique_ptr<LeadingCompanion> LeadingCompanion::Create(Leadership* leadership) {
  const int gate = KeepFromChildren(epoll_create1(EPOLL_CLOEXEC));
  if (gate < 0) return nullptr;
  Undoing closed([gate] { CloseDescriptor(gate); });
  epoll_event nothing{};
  if (epoll_ctl(gate, EPOLL_CTL_ADD, leadership->loop().fd(), &nothing) != 0) return nullptr;
  std::unique_ptr<LeadingCompanion> companion(new LeadingCompanion(leadership, gate));
  closed.Done();
  return companion;
}

LeadingCompanion::~LeadingCompanion() {
  if (IsInherited()) return;
  leadership_.End(&waiter_);
  CloseDescriptor(gate_);
}

void LeadingCompanion::Arm(bool armed) {
  if (armed == is_armed_) return;
  is_armed_ = armed;
  epoll_event event{};
  event.events = armed ? static_cast<uint32_t>(EPOLLIN) : 0u;
  epoll_ctl(gate_, EPOLL_CTL_MOD, leadership_.loop().fd(), &event);
}

bool LeadingCompanion::OnIdle(const std::function<bool()>& is_over) {
  if (IsInherited() || !leadership_.Polls() || !leadership_.Begin(&waiter_)) return false;
  const Undoing ended([this] { leadership_.End(&waiter_); });
  return leadership_.Poll(&waiter_, is_over);
}

// It stays armed between two sleeps, in which nobody looks.
void LeadingCompanion::OnSleep() {
  if (IsInherited()) return;
  Arm(leadership_.Begin(&waiter_));
  leadership_.LieDown();
  asleep_ = leadership_.loop().Now();
}

void LeadingCompanion::OnWake() {
  if (IsInherited()) return;
  if (asleep_ && leadership_.Leads(&waiter_)) leadership_.Slept(*asleep_, /*is_found=*/false);
  asleep_.reset();
  leadership_.End(&waiter_);
}

void LeadingCompanion::OnReadable() {
  if (IsInherited()) return;
  if (!leadership_.Leads(&waiter_)) return Arm(false);
  if (asleep_) leadership_.Slept(*asleep_, /*is_found=*/true);
  asleep_.reset();
  leadership_.Turn(&waiter_);
}

}  // namespace stagecoach::emu
