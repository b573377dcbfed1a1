#include "emu/backend/tcp/leadership.h"

#include <errno.h>
#include <poll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <system_error>
#include <thread>

#include "base/fork/fork.h"
#include "base/insist.h"
#include "base/mark.h"
#include "base/undoing.h"

namespace stagecoach::emu {
thread_local Leadership::Waiter* Leadership::turner_ = nullptr;

Leadership::Leadership(EpollLoop* loop, const Options& options)
    : loop_(loop), busy_poll_(options.busy_poll), thread_polls_(options.thread_polls), leader_(&thread_) {
  // Those who stay up are looked at while somebody polls.
  if (options.busy_poll > Duration::zero()) loop_->AllowWakeful();
  nudge_ = KeepFromChildren(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  if (nudge_ < 0) throw std::system_error(errno, std::generic_category(), "timerfd_create");
}

Leadership::~Leadership() {
  CloseDescriptor(nudge_);
}

void Leadership::NudgeAt(Duration from_now) {
  is_nudged_ = true;
  itimerspec at{};
  at.it_value.tv_nsec = std::chrono::nanoseconds(from_now).count();
  timerfd_settime(nudge_, 0, &at, nullptr);
}

void Leadership::NudgeTaken() {
  uint64_t value = 0;
  std::lock_guard lock(mutex_);
  if (read(nudge_, &value, sizeof value) == sizeof value) is_nudged_ = false;
}

void Leadership::Stop() {
  stopped_.store(true);
  std::lock_guard lock(mutex_);
  NudgeAt(Duration(1));
}

bool Leadership::ThreadLeads() {
  std::lock_guard lock(mutex_);
  if (leader_.load(std::memory_order_relaxed) != nullptr) return Leads(&thread_);
  const Instant now = loop_->Now();
  if (now < grace_end_) {
    if (!is_nudged_) NudgeAt(grace_end_ - now);
    return false;
  }
  leader_.store(&thread_, std::memory_order_relaxed);
  return true;
}

void Leadership::Run() {
  while (!stopped_.load()) {
    const bool leads = ThreadLeads();
    if (leads && thread_polls_ && Poll(nullptr, [this] { return stopped_.load(std::memory_order_relaxed); })) continue;
    const uint64_t turns = loop_->turns();
    pollfd ready[] = {{nudge_, POLLIN, 0}, {leads ? loop_->fd() : loop_->post_fd(), POLLIN, 0}};
    counters_.sleeps_of_thread.fetch_add(1, std::memory_order_relaxed);
    const Instant asleep = loop_->Now();
    LieDown();
    const int count = poll(ready, 2, leads ? -1 : static_cast<int>(kWatch / 1ms));
    if (leads) Slept(asleep, ready[1].revents != 0);
    if (ready[0].revents != 0) NudgeTaken();
    // Of the loop whose lead was lost meanwhile the leader has been woken as well.
    if (count > 0 && ready[1].revents != 0 && leads == Leads(&thread_)) {
      counters_.turns_of_thread.fetch_add(1, std::memory_order_relaxed);
      Turn(nullptr);
    }
    if (count == 0) LookAfterLeader(turns);
  }
}

bool Leadership::Poll(Waiter* waiter, const std::function<bool()>& is_over) {
  const Duration time = busy_poll_.time();
  if (time <= Duration::zero()) return false;
  const Waiter* const leader = waiter != nullptr ? waiter : &thread_;
  const Instant end = loop_->Now() + time;
  // So many glances cost as much as a turn.
  constexpr int kGlances = 8;
  for (int i = 1; Leads(leader) && !is_over(); ++i) {
    const bool glances = i % kGlances != 0 && loop_->HasWakeful();
    if (Move(waiter, [&] { return glances ? loop_->Glance() : loop_->Turn(); })) {
      busy_poll_.Found();
      counters_.found_by_polling.fetch_add(1, std::memory_order_relaxed);
      return true;
    }
    if (loop_->Now() >= end) return false;
  }
  return false;
}

void Leadership::LookAfterLeader(uint64_t turns_before) {
  pollfd ready{loop_->fd(), POLLIN, 0};
  if (loop_->turns() != turns_before || loop_->IsTurning()) return;
  // It looks no more.
  LieDown();
  if (poll(&ready, 1, 0) <= 0) return;
  STAGECOACH_MARK("tcp.lead_taken_from_one_who_does_not_move");
  counters_.taken_over.fetch_add(1, std::memory_order_relaxed);
  std::lock_guard lock(mutex_);
  leader_.store(&thread_, std::memory_order_relaxed);
}

bool Leadership::Begin(const Waiter* waiter) {
  std::lock_guard lock(mutex_);
  const Waiter* const leader = leader_.load(std::memory_order_relaxed);
  const bool is_served = served_.load(std::memory_order_relaxed) == waiter->what;
  const bool is_free = leader == nullptr && (last_ == waiter->what || loop_->Now() >= grace_end_);
  if (leader != waiter && leader != &thread_ && !is_served && !is_free) return false;
  leader_.store(waiter, std::memory_order_relaxed);
  last_ = waiter->what;
  return true;
}

void Leadership::End(const Waiter* waiter) {
  std::lock_guard lock(mutex_);
  if (!Leads(waiter)) return;
  leader_.store(nullptr, std::memory_order_relaxed);
  grace_end_ = loop_->Now() + kGrace;
  if (!is_nudged_) NudgeAt(kGrace);
}

template <typename Step>
bool Leadership::Move(Waiter* waiter, Step step) {
  // Who has lost the lead meanwhile may not be back before the new leader sleeps, who does not know of what stays up
  // since this turn.
  const Undoing checked([this, waiter] {
    if (!Leads(waiter != nullptr ? waiter : &thread_)) LieDown();
  });
  try {
    turner_ = waiter;
    const Undoing nobody([] { turner_ = nullptr; });
    const bool did = step();
    if (did && waiter != nullptr) counters_.turns_of_waiters.fetch_add(1, std::memory_order_relaxed);
    return did;
  } catch (const std::bad_alloc&) {
    STAGECOACH_MARK("tcp.loop_finds_no_memory");
  } catch (const std::system_error&) {
    STAGECOACH_MARK("tcp.loop_finds_no_descriptor");
  }
  std::this_thread::sleep_for(kWantPause);
  return true;
}

bool Leadership::Turn(Waiter* waiter) {
  return Move(waiter, [this] { return loop_->Turn(); });
}

Handlers Leadership::HandlersOfLate(Duration age) {
  const Instant now = loop_->Now();
  const Instant known(Duration(handlers_at_.load(std::memory_order_acquire)));
  if (now - known < age) return handlers_.load(std::memory_order_relaxed);
  handlers_.store(HandlersNow(), std::memory_order_relaxed);
  handlers_at_.store(now.time_since_epoch().count(), std::memory_order_release);
  return handlers_.load(std::memory_order_relaxed);
}

}  // namespace stagecoach::emu
