#include "emu/sim/sim_loop.h"

#include <errno.h>
#include <poll.h>

#include <algorithm>

#include "base/check.h"

namespace stagecoach::emu {
namespace {

// A world whose clock does not move for this many events is a loop of ours that feeds itself (a watch that never drains
// its descriptor).
constexpr uint64_t kMaxEventsPerInstant = 10'000'000;

bool IsReadable(int fd) {
  pollfd wanted{fd, POLLIN, 0};
  return poll(&wanted, 1, 0) == 1 && (wanted.revents & POLLIN) != 0;
}

}  // namespace

bool SimLoop::Step(Instant limit) {
  if (depth_ >= kMaxDepth) return false;
  while (schedule_.empty() || schedule_.begin()->first.first > now_) {
    // The present instant is over unless a poller finds something to do.
    if (PollAll()) continue;
    if (!ArmAll()) continue;
    if (!schedule_.empty() && schedule_.begin()->first.first <= now_) break;  // arming may schedule
    if (schedule_.empty() || schedule_.begin()->first.first > limit) return false;
    AdvanceTo(schedule_.begin()->first.first);
  }
  STAGECOACH_CHECK(++events_this_instant_ < kMaxEventsPerInstant);
  const auto first = schedule_.begin();
  const Callback callback = std::move(first->second);
  times_.erase(first->first.second);
  schedule_.erase(first);
  ++events_run_;
  ++depth_;
  callback();
  --depth_;
  return true;
}

void SimLoop::AdvanceTo(Instant when) {
  if (!schedule_.empty()) when = std::min(when, schedule_.begin()->first.first);
  if (when <= now_) return;
  now_ = when;
  events_this_instant_ = 0;
}

void SimLoop::Clear() {
  // What a callback holds may schedule as it goes.
  while (!schedule_.empty()) {
    times_.clear();
    const auto dropped = std::move(schedule_);
    schedule_.clear();
  }
}

EventLoop::TimerId SimLoop::At(Instant when, Callback callback) {
  const TimerId id = next_id_++;
  const Instant due = std::max(when, now_);
  schedule_.emplace(std::make_pair(due, id), std::move(callback));
  times_.emplace(id, due);
  return id;
}

void SimLoop::Cancel(TimerId timer) {
  const auto found = times_.find(timer);
  if (found == times_.end()) return;
  const auto entry = schedule_.find({found->second, timer});
  times_.erase(found);
  const Callback dropped = std::move(entry->second);  // its destruction may come back to us
  schedule_.erase(entry);
}

void SimLoop::Post(Callback callback) {
  STAGECOACH_CHECK(std::this_thread::get_id() == thread_);
  At(now_, std::move(callback));
}

void SimLoop::AddDescriptor(int fd) {
  STAGECOACH_CHECK(descriptors_.try_emplace(fd).second);
}

void SimLoop::RemoveDescriptor(int fd) {
  const auto found = descriptors_.find(fd);
  if (found == descriptors_.end()) return;
  const auto watches = std::move(found->second);
  descriptors_.erase(found);
  for (const auto& [id, watch] : watches) {
    watch->ended = true;
    watches_.erase(id);
  }
}

void SimLoop::OnSignalled(int fd) {
  const auto found = descriptors_.find(fd);
  if (found == descriptors_.end()) return;
  for (const auto& [id, watch] : found->second) ScheduleWatch(watch);
}

EventLoop::WatchId SimLoop::WatchReadable(int fd, Callback callback) {
  const auto descriptor = descriptors_.find(fd);
  if (descriptor == descriptors_.end()) {
    errno = EBADF;
    return 0;
  }
  const WatchId id = next_id_++;
  auto watch = std::make_shared<Watch>();
  watch->fd = fd;
  watch->callback = std::move(callback);
  descriptor->second.emplace(id, watch);
  watches_.emplace(id, watch);
  if (IsReadable(fd)) ScheduleWatch(watch);
  return id;
}

void SimLoop::Unwatch(WatchId id) {
  const auto found = watches_.find(id);
  if (found == watches_.end()) return;
  const std::shared_ptr<Watch> watch = found->second;
  watches_.erase(found);
  watch->ended = true;
  const auto descriptor = descriptors_.find(watch->fd);
  if (descriptor != descriptors_.end()) descriptor->second.erase(id);
}

void SimLoop::ScheduleWatch(const std::shared_ptr<Watch>& watch) {
  // While it runs it is not scheduled: RunWatch looks again afterwards.
  if (watch->scheduled || watch->running || watch->ended) return;
  watch->scheduled = true;
  At(now_, [this, watch] { RunWatch(watch); });
}

void SimLoop::RunWatch(const std::shared_ptr<Watch>& watch) {
  watch->scheduled = false;
  if (watch->ended || !IsReadable(watch->fd)) return;
  watch->running = true;
  watch->callback();
  watch->running = false;
  if (!watch->ended && IsReadable(watch->fd)) ScheduleWatch(watch);
}

EventLoop::PollerId SimLoop::AddPoller(Poller poller) {
  auto entry = std::make_shared<PollerEntry>();
  entry->id = next_id_++;
  entry->poller = std::move(poller);
  pollers_.push_back(entry);
  return entry->id;
}

void SimLoop::RemovePoller(PollerId poller) {
  const auto found =
      std::find_if(pollers_.begin(), pollers_.end(), [&](const auto& entry) { return entry->id == poller; });
  if (found == pollers_.end()) return;
  const std::shared_ptr<PollerEntry> dropped = *found;
  pollers_.erase(found);
}

bool SimLoop::PollAll() {
  bool did = false;
  ++depth_;
  // By index: a poller may add and remove pollers. A list changed meanwhile is gone over again before time moves on,
  // since `did` or an event made the change.
  for (size_t i = 0; i < pollers_.size(); ++i) {
    const std::shared_ptr<PollerEntry> entry = pollers_[i];
    if (entry->running) continue;
    entry->running = true;
    did = entry->poller.poll() || did;
    entry->running = false;
  }
  --depth_;
  if (did) STAGECOACH_CHECK(++events_this_instant_ < kMaxEventsPerInstant);
  return did;
}

bool SimLoop::ArmAll() {
  bool armed = true;
  for (size_t i = 0; i < pollers_.size(); ++i) {
    const std::shared_ptr<PollerEntry> entry = pollers_[i];
    if (entry->running) continue;
    armed = entry->poller.arm() && armed;
  }
  if (!armed) STAGECOACH_CHECK(++events_this_instant_ < kMaxEventsPerInstant);
  return armed;
}

}  // namespace stagecoach::emu
