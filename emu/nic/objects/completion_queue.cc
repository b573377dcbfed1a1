#include "emu/nic/objects/completion_queue.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <new>

#include "base/fork/fork.h"
#include "base/insist.h"
#include "base/mark.h"
#include "base/mutant.h"
#include "emu/nic/loop/nic_loop.h"

namespace stagecoach::emu {
namespace {

// So few connections are always asked directly: a read that finds nothing costs no more than asking epoll.
constexpr size_t kAlwaysActive = 2;
// A connection that had nothing for so many polls goes into the poll set ...
constexpr uint32_t kIdlePollsUntilWatched = 256;
// ... which is asked every so many polls.
constexpr uint32_t kPollsPerWatch = 16;
// With more connections than these ...
constexpr size_t kCrowd = 8;
// ... only so many stay active that bring nothing, so that a poll asks no more than it would of a few, ...
constexpr size_t kActiveOfACrowd = 4;
// ... and the poll set is asked about as often as they are.
constexpr uint32_t kPollsPerWatchOfACrowd = 2;
// Of connections without a descriptor so many marks are looked at instead, in turns. A look costs a few nanoseconds.
constexpr size_t kMarksPerWatch = 128;
constexpr size_t kSmallestRing = 16;

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
      capacity_(capacity) {}

CompletionQueue::~CompletionQueue() {
  if (poll_set_ >= 0) CloseDescriptor(poll_set_);
}

uint32_t CompletionQueue::capacity() const {
  std::lock_guard lock(mutex_);
  return capacity_;
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
    DriveWoken();
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

bool CompletionQueue::IsCrowded() const {
  return members_.size() > kCrowd;
}

void CompletionQueue::DriveActive() {
  for (size_t i = 0; i < active_.size();) {
    Member& member = *active_[i];
    if (member.connection->Drive()) {
      member.idle_polls = 0;
    } else {
      ++member.idle_polls;
      const bool is_idle = member.idle_polls >= kIdlePollsUntilWatched && active_.size() > kAlwaysActive;
      const bool is_one_too_many = IsCrowded() && active_.size() > kActiveOfACrowd;
      if ((is_idle || is_one_too_many) && Watch(member)) {
        active_.erase(active_.begin() + static_cast<ptrdiff_t>(i));
        continue;
      }
    }
    ++i;
  }
}

bool CompletionQueue::Watch(Member& member) {
  const int fd = member.connection->PollDescriptor();
  const ArrivalMark* const mark = fd == -1 ? member.connection->arrival_mark() : nullptr;
  if (fd == -1 && mark == nullptr) return false;
  if (fd >= 0 && poll_set_ < 0) poll_set_ = KeepFromChildren(epoll_create1(EPOLL_CLOEXEC));
  if (fd >= 0 && poll_set_ < 0) return false;
  // Before it is asked whether it is unfinished: see watchers().
  member.connection->watchers().fetch_add(1, std::memory_order_seq_cst);
  epoll_event event{};
  event.events = EPOLLIN | EPOLLONESHOT;
  event.data.ptr = &member;
  const int operation = member.descriptor < 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
  if (member.connection->Unfinished() || (fd >= 0 && epoll_ctl(poll_set_, operation, fd, &event) != 0)) {
    member.connection->watchers().fetch_sub(1, std::memory_order_seq_cst);
    return false;
  }
  if (fd >= 0) member.descriptor = fd;
  member.mark = mark;
  if (mark != nullptr) {
    member.mark_at = marked_.size();
    marked_.push_back(&member);
  }
  member.is_active = false;
  return true;
}

void CompletionQueue::Unmark(Member& member) {
  if (std::exchange(member.mark, nullptr) == nullptr) return;
  // The last one takes its place: their order is of no matter.
  Member*& place = marked_[member.mark_at];
  place = marked_.back();
  place->mark_at = member.mark_at;
  marked_.pop_back();
}

void CompletionQueue::Activate(Member& member) {
  if (member.is_active) return;
  Unmark(member);
  member.is_active = true;
  member.idle_polls = 0;
  member.connection->watchers().fetch_sub(1, std::memory_order_seq_cst);
  active_.push_back(&member);
  if (member.connection->Drive()) return;
  ++member.idle_polls;
}

void CompletionQueue::Wake(PolledConnection* connection) {
  std::lock_guard lock(woken_mutex_);
  if (std::find(woken_.begin(), woken_.end(), connection) != woken_.end()) return;
  woken_.push_back(connection);  // Attach has made room
  any_woken_.store(true, std::memory_order_release);
}

void CompletionQueue::DriveWoken() {
  if (!any_woken_.load(std::memory_order_acquire)) return;
  for (;;) {
    PolledConnection* connection = nullptr;
    {
      std::lock_guard lock(woken_mutex_);
      if (woken_.empty()) {
        any_woken_.store(false, std::memory_order_release);
        return;
      }
      connection = woken_.back();
      woken_.pop_back();
    }
    // One that was idle has been posted to since, and its stream is full: nothing need ever arrive on it.
    if (const auto found = members_.find(connection); found != members_.end()) Activate(found->second);
  }
}

void CompletionQueue::DriveWatched() {
  if (active_.size() == members_.size() || polls_until_watch_-- > 0) return;
  polls_until_watch_ = (IsCrowded() ? kPollsPerWatchOfACrowd : kPollsPerWatch) - 1;
  std::array<epoll_event, 32> events;
  DriveMarked();
  if (poll_set_ < 0) return;
  const int count = epoll_wait(poll_set_, events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i) {
    // Detach takes connections out under drive_mutex_, so what is in the set is alive.
    Activate(*static_cast<Member*>(events[static_cast<size_t>(i)].data.ptr));
  }
}

void CompletionQueue::DriveMarked() {
  for (size_t looks = std::min(marked_.size(), kMarksPerWatch); looks > 0; --looks) {
    if (next_marked_ >= marked_.size()) next_marked_ = 0;
    Member& member = *marked_[next_marked_];
    if (!member.mark->HasArrived()) {
      ++next_marked_;
    } else {
      // Another one takes its place.
      Activate(member);
      if (marked_.empty()) return;
    }
  }
}

void CompletionQueue::RequestNotify(bool solicited_only) {
  {
    std::lock_guard lock(mutex_);
    if (armed_ != Armed::kAny) armed_ = solicited_only ? Armed::kSolicited : Armed::kAny;
    if (channel_ != nullptr) notify_wanted_.store(true, std::memory_order_seq_cst);
  }
  if (loop_ == nullptr || channel_ == nullptr) return;
  // The program is about to sleep: from here on the loop's thread must hear of arrivals. See docs/locks_and_leases.md
  // for why nothing falls between.
  EndLease();
}

void CompletionQueue::AckEvents(uint32_t count) {
  if (channel_ != nullptr) channel_->Ack(this, count);
}

int CompletionQueue::Resize(uint32_t capacity) {
  std::lock_guard lock(mutex_);
  if (capacity == 0 || capacity < used_) return EINVAL;
  if (capacity < ring_.size()) {
    try {
      MoveTo(capacity);
    } catch (const std::bad_alloc&) {
      return ENOMEM;
    }
  }
  capacity_ = capacity;
  return 0;
}

void CompletionQueue::MoveTo(size_t size) {
  std::vector<WorkCompletion> ring(size);
  const bool from_start = STAGECOACH_MUTANT("resize-forgets-taken",
                                            "a resize takes a CQ of which something was taken for an untouched one");
  for (size_t i = 0; i < used_; ++i) ring[i] = ring_[((from_start ? 0 : first_) + i) % ring_.size()];
  ring_ = std::move(ring);
  first_ = 0;
}

bool CompletionQueue::Grow() {
  if (ring_.size() == capacity_) return false;
  try {
    Insist([&] { MoveTo(std::min<size_t>(capacity_, std::max(kSmallestRing, 2 * ring_.size()))); });
  } catch (const std::bad_alloc&) {
    STAGECOACH_MARK("cq.no_memory_to_grow");
    return false;
  }
  return true;
}

bool CompletionQueue::Push(const WorkCompletion& completion) {
  std::unique_lock lock(mutex_);
  if (overrun_) return false;
  bool is_full = used_ == ring_.size() && !Grow();
  if (is_full && flags_.ignore_overrun && used_ > 0) {
    STAGECOACH_MARK("cq.oldest_completion_overwritten");
    first_ = first_ + 1 == ring_.size() ? 0 : first_ + 1;
    --used_;
    is_full = false;
  }
  if (is_full) {
    STAGECOACH_MARK("cq.overrun");
    // First, as it can fail: the next completion tries again then.
    if (async_events_ != nullptr) {
      async_events_->Push({.type = AsyncEventType::kCqError, .cq = this, .account = &async_account_});
    }
    overrun_ = true;
    lock.unlock();
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
  // Before anything changes, and for all that is added to these later.
  Insist([&] {
    const size_t count = members_.size() + 1;
    if (active_.capacity() < count) active_.reserve(2 * count);
    if (marked_.capacity() < count) marked_.reserve(2 * count);
    std::lock_guard woken(woken_mutex_);
    if (woken_.capacity() < count) woken_.reserve(2 * count);
  });
  Member& member = *Insist([&] { return &members_[connection]; });
  member.connection = connection;
  active_.push_back(&member);
}

void CompletionQueue::OnDescriptorChange(PolledConnection* connection) {
  std::lock_guard lock(drive_mutex_);
  const auto found = members_.find(connection);
  if (found == members_.end()) return;
  Member& member = found->second;
  if (member.descriptor >= 0) epoll_ctl(poll_set_, EPOLL_CTL_DEL, member.descriptor, nullptr);
  member.descriptor = -1;
  Unmark(member);
  member.idle_polls = 0;
  if (std::exchange(member.is_active, true)) return;
  connection->watchers().fetch_sub(1, std::memory_order_seq_cst);
  active_.push_back(&member);
}

void CompletionQueue::Detach(PolledConnection* connection) {
  std::lock_guard lock(drive_mutex_);
  const auto found = members_.find(connection);
  if (found == members_.end()) return;
  Member& member = found->second;
  if (member.descriptor >= 0) epoll_ctl(poll_set_, EPOLL_CTL_DEL, member.descriptor, nullptr);
  Unmark(member);
  if (member.is_active) {
    std::erase(active_, &member);
  } else {
    connection->watchers().fetch_sub(1, std::memory_order_seq_cst);
  }
  members_.erase(found);
  std::lock_guard woken(woken_mutex_);
  std::erase(woken_, connection);
}

}  // namespace stagecoach::emu
