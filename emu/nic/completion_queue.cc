#include "emu/nic/completion_queue.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "base/fork/fork.h"
#include "base/mark.h"
#include "base/mutant.h"
#include "emu/nic/nic_loop.h"

namespace stagecoach::emu {
namespace {

// So few connections are always asked directly: a read that finds nothing costs no more than asking epoll.
constexpr size_t kAlwaysActive = 2;
// A connection that had nothing for so many polls goes into the poll set ...
constexpr uint32_t kIdlePollsUntilWatched = 256;
// ... which is asked every so many polls.
constexpr uint32_t kPollsPerWatch = 16;

}  // namespace

CompletionQueue::CompletionQueue(Fabric& fabric, NicLoop* loop, const DeviceProfile& profile, uint32_t handle,
                                 uint32_t capacity, CompletionChannel* channel, AsyncEventQueue* async_events,
                                 void* cookie, CompletionQueueFlags flags)
    : fabric_(fabric),
      loop_(loop),
      lease_(profile.poll_lease),
      handle_(handle),
      cookie_(cookie),
      channel_(channel),
      async_events_(async_events),
      flags_(flags),
      ring_(capacity) {}

CompletionQueue::~CompletionQueue() {
  if (poll_set_ >= 0) CloseDescriptor(poll_set_);
}

uint32_t CompletionQueue::capacity() const {
  std::lock_guard lock(mutex_);
  return static_cast<uint32_t>(ring_.size());
}

uint64_t CompletionQueue::pushed() const {
  std::lock_guard lock(mutex_);
  return pushed_;
}

bool CompletionQueue::overrun() const {
  std::lock_guard lock(mutex_);
  return overrun_;
}

size_t CompletionQueue::TakeCompletions(std::span<WorkCompletion> out) {
  if (used_hint_.load(std::memory_order_acquire) == 0) return 0;
  std::lock_guard lock(mutex_);
  const size_t count = std::min(out.size(), used_);
  for (size_t i = 0; i < count; ++i) {
    out[i] = ring_[first_];
    first_ = first_ + 1 == ring_.size() ? 0 : first_ + 1;
  }
  used_ -= count;
  used_hint_.store(used_, std::memory_order_release);
  return count;
}

size_t CompletionQueue::Poll(std::span<WorkCompletion> out) {
  if (out.empty()) return 0;
  if (loop_ == nullptr) return TakeCompletions(out);
  RenewLease();
  if (const size_t count = TakeCompletions(out)) return count;
  // Another thread polling this CQ is moving the same connections already.
  if (std::unique_lock lock(drive_mutex_, std::try_to_lock); lock.owns_lock()) {
    DriveActive();
    DriveWatched();
  }
  return TakeCompletions(out);
}

void CompletionQueue::RenewLease() {
  // A program that has asked for an event looks once more and then sleeps: that look promises nothing.
  if (notify_wanted_.load(std::memory_order_seq_cst)) return;
  lease_end_.store((fabric_.Now() + lease_).time_since_epoch().count(), std::memory_order_seq_cst);
  // Another thread may have asked meanwhile, and its end of the lease must stand.
  if (notify_wanted_.load(std::memory_order_seq_cst)) EndLease();
}

void CompletionQueue::EndLease() {
  lease_end_.store(0, std::memory_order_seq_cst);
  if (parked_.load(std::memory_order_seq_cst) != 0) loop_->Unpark();
}

void CompletionQueue::DriveActive() {
  for (size_t i = 0; i < active_.size();) {
    Active& active = active_[i];
    if (active.connection->Drive()) {
      active.idle_polls = 0;
    } else if (++active.idle_polls >= kIdlePollsUntilWatched && active_.size() > kAlwaysActive &&
               Watch(active.connection)) {
      active_.erase(active_.begin() + static_cast<ptrdiff_t>(i));
      continue;
    }
    ++i;
  }
}

bool CompletionQueue::Watch(PolledConnection* connection) {
  const int fd = connection->PollDescriptor();
  if (fd < 0 || connection->Unfinished()) return false;
  if (poll_set_ < 0) poll_set_ = KeepFromChildren(epoll_create1(EPOLL_CLOEXEC));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = connection;
  if (poll_set_ < 0 || epoll_ctl(poll_set_, EPOLL_CTL_ADD, fd, &event) != 0) return false;
  watched_.push_back(connection);
  return true;
}

void CompletionQueue::DriveWatched() {
  if (watched_.empty() || polls_until_watch_-- > 0) return;
  polls_until_watch_ = kPollsPerWatch;
  // One that was idle has been posted to since, and its stream is full: nothing need ever arrive on it.
  for (size_t i = 0; i < watched_.size();) {
    if (watched_[i]->Unfinished()) {
      Unwatch(watched_[i]);
    } else {
      ++i;
    }
  }
  std::array<epoll_event, 32> events;
  const int count = epoll_wait(poll_set_, events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i) {
    // Detach takes connections out under drive_mutex_, so what is in the set is alive.
    auto* const connection = static_cast<PolledConnection*>(events[static_cast<size_t>(i)].data.ptr);
    Unwatch(connection);
  }
}

void CompletionQueue::Unwatch(PolledConnection* connection) {
  epoll_ctl(poll_set_, EPOLL_CTL_DEL, connection->PollDescriptor(), nullptr);
  std::erase(watched_, connection);
  active_.push_back({connection, 0});
  connection->Drive();
}

void CompletionQueue::RequestNotify(bool solicited_only) {
  {
    std::lock_guard lock(mutex_);
    if (armed_ != Armed::kAny) armed_ = solicited_only ? Armed::kSolicited : Armed::kAny;
    if (channel_ != nullptr) notify_wanted_.store(true, std::memory_order_seq_cst);
  }
  if (loop_ == nullptr || channel_ == nullptr) return;
  // The program is about to sleep: from here on the loop's thread must hear of arrivals. See connection.h for why
  // nothing falls between.
  EndLease();
}

void CompletionQueue::AckEvents(uint32_t count) {
  if (channel_ != nullptr) channel_->Ack(this, count);
}

int CompletionQueue::Resize(uint32_t capacity) {
  std::lock_guard lock(mutex_);
  if (capacity == 0 || capacity < used_) return EINVAL;
  std::vector<WorkCompletion> ring(capacity);
  for (size_t i = 0; i < used_; ++i) ring[i] = ring_[(first_ + i) % ring_.size()];
  ring_ = std::move(ring);
  first_ = 0;
  return 0;
}

bool CompletionQueue::Push(const WorkCompletion& completion) {
  std::unique_lock lock(mutex_);
  if (overrun_) return false;
  if (used_ == ring_.size() && flags_.ignore_overrun) {
    STAGECOACH_MARK("cq.oldest_completion_overwritten");
    first_ = first_ + 1 == ring_.size() ? 0 : first_ + 1;
    --used_;
  }
  if (used_ == ring_.size()) {
    STAGECOACH_MARK("cq.overrun");
    overrun_ = true;
    lock.unlock();
    if (async_events_ != nullptr) {
      async_events_->Push({.type = AsyncEventType::kCqError, .cq = this, .account = &async_account_});
    }
    if (on_overrun_) on_overrun_();
    return false;
  }
  const size_t at = first_ + used_ < ring_.size() ? first_ + used_ : first_ + used_ - ring_.size();
  ring_[at] = completion;
  if (flags_.timestamps) ring_[at].at = fabric_.Now();
  ++used_;
  ++pushed_;
  used_hint_.store(used_, std::memory_order_release);
  // A completion in error counts as solicited (ibv_req_notify_cq(3)).
  const bool urgent = completion.solicited || completion.status != CompletionStatus::kSuccess;
  if (armed_ == Armed::kAny || (armed_ == Armed::kSolicited && urgent)) {
    armed_ = Armed::kNo;
    notify_wanted_.store(false, std::memory_order_seq_cst);
    lock.unlock();
    // We are kept: the QP that completes here holds its CQs until it has been retired, under the lock held by the
    // caller.
    if (STAGECOACH_MUTANT("event-lost", "an armed CQ whose completion is an error gives no event") &&
        completion.status != CompletionStatus::kSuccess) {
      return true;
    }
    if (channel_ != nullptr) channel_->Push(this);
  }
  return true;
}

void CompletionQueue::RemoveCompletionsOf(uint32_t qp_number) {
  std::lock_guard lock(mutex_);
  size_t kept = 0;
  for (size_t i = 0; i < used_; ++i) {
    const WorkCompletion& completion = ring_[(first_ + i) % ring_.size()];
    if (completion.qp_number == qp_number) continue;
    ring_[(first_ + kept) % ring_.size()] = completion;
    ++kept;
  }
  if (kept < used_) STAGECOACH_MARK("cq.completions_go_with_their_qp");
  used_ = kept;
  used_hint_.store(used_, std::memory_order_release);
}

void CompletionQueue::Settle(bool wait) {
  if (channel_ != nullptr) channel_->Settle(this, wait);
  if (async_events_ != nullptr) async_events_->Settle(&async_account_, wait);
}

void CompletionQueue::Attach(PolledConnection* connection) {
  std::lock_guard lock(drive_mutex_);
  active_.push_back({connection, 0});
}

void CompletionQueue::Detach(PolledConnection* connection) {
  std::lock_guard lock(drive_mutex_);
  const auto found = std::find_if(active_.begin(), active_.end(),
                                  [connection](const Active& active) { return active.connection == connection; });
  if (found != active_.end()) {
    active_.erase(found);
    return;
  }
  const int fd = connection->PollDescriptor();
  if (fd >= 0 && poll_set_ >= 0) epoll_ctl(poll_set_, EPOLL_CTL_DEL, fd, nullptr);
  std::erase(watched_, connection);
}

}  // namespace stagecoach::emu
