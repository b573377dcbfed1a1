#include "base/epoll_loop/epoll_loop.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <vector>

#include "base/check.h"
#include "base/fork/fork.h"
#include "base/undoing.h"

namespace stagecoach {
namespace {

// Events, timers and posted work of one turn, each.
constexpr int kBatch = 64;

// In epoll's data, besides the ids of sources.
enum : uint64_t { kWakeId = 1, kTimerId = 2, kFirstSourceId = 3 };

int Opened(int fd, const char* call) {
  if (fd < 0) throw std::system_error(errno, std::generic_category(), call);
  return KeepFromChildren(fd);
}

}  // namespace

class EpollLoop::TurnScope {
 public:
  explicit TurnScope(EpollLoop* loop) : loop_(loop) {
    // A callback that turned the loop would wait for itself.
    STAGECOACH_CHECK(!loop->OnLoopThread());
    loop->turn_mutex_.lock();
    loop->turning_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    loop->turns_.fetch_add(1, std::memory_order_relaxed);
  }
  ~TurnScope() {
    loop_->turning_.store(std::thread::id{}, std::memory_order_relaxed);
    loop_->turn_mutex_.unlock();
  }
  TurnScope(const TurnScope&) = delete;
  TurnScope& operator=(const TurnScope&) = delete;

 private:
  EpollLoop* const loop_;
};

// The watches of one descriptor, which can be in an epoll set only once.
class EpollLoop::WatchedFd final : public Source {
 public:
  explicit WatchedFd(EpollLoop* loop) : loop_(*loop) {}
  void OnEvents(uint32_t) override {
    const std::vector<WatchId> ids(watches.begin(), watches.end());
    for (const WatchId id : ids) {
      const auto found = loop_.watches_.find(id);
      // A callback before this one may have ended it.
      if (found == loop_.watches_.end()) continue;
      const std::shared_ptr<Callback> callback = found->second.second;
      (*callback)();
    }
  }

  std::set<WatchId> watches;

 private:
  EpollLoop& loop_;
};

EpollLoop::EpollLoop() : next_source_(kFirstSourceId) {
  Undoing closed([this] {
    for (const int fd : {epoll_, wake_, system_timer_}) {
      if (fd >= 0) CloseDescriptor(fd);
    }
  });
  epoll_ = Opened(epoll_create1(EPOLL_CLOEXEC), "epoll_create1");
  wake_ = Opened(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd");
  system_timer_ = Opened(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK), "timerfd_create");
  for (const auto& [fd, id] : {std::pair(wake_, kWakeId), std::pair(system_timer_, kTimerId)}) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = id;
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) {
      throw std::system_error(errno, std::generic_category(), "epoll_ctl");
    }
  }
  closed.Done();
}

EpollLoop::~EpollLoop() {
  STAGECOACH_CHECK(!IsTurning());
  for (const int fd : {system_timer_, wake_, epoll_}) CloseDescriptor(fd);
}

void EpollLoop::CheckThread() const {
  const std::thread::id owner = turning_.load(std::memory_order_relaxed);
  STAGECOACH_CHECK(owner == std::thread::id{} || owner == std::this_thread::get_id());
}

// --- Sources ---

int EpollLoop::Add(int fd, uint32_t events, const std::shared_ptr<Source>& source) {
  {
    std::lock_guard lock(sources_mutex_);
    source->id_ = next_source_++;
    sources_.emplace(source->id_, source);
  }
  epoll_event event{};
  event.events = events;
  event.data.u64 = source->id_;
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) == 0) return 0;
  const int error = errno;
  std::lock_guard lock(sources_mutex_);
  sources_.erase(source->id_);
  return error;
}

void EpollLoop::Modify(int fd, const Source& source, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = source.id_;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, fd, &event);
}

void EpollLoop::Remove(int fd, const Source& source) {
  epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr);
  std::shared_ptr<Source> dropped;  // after the lock
  std::lock_guard lock(sources_mutex_);
  const auto found = sources_.find(source.id_);
  if (found == sources_.end()) return;
  dropped = std::move(found->second);
  sources_.erase(found);
}

std::shared_ptr<EpollLoop::Source> EpollLoop::Find(uint64_t id) {
  std::lock_guard lock(sources_mutex_);
  const auto found = sources_.find(id);
  return found != sources_.end() ? found->second : nullptr;
}

// --- Those who stay up ---

bool EpollLoop::StayUp(const std::shared_ptr<Wakeful>& one) {
  if (!allows_wakeful_ || !OnLoopThread()) return false;
  std::lock_guard lock(wakeful_mutex_);
  std::shared_ptr<Wakeful>* place = nullptr;
  for (std::shared_ptr<Wakeful>& each : wakeful_) {
    if (each == one) return true;
    if (each == nullptr) place = &each;
  }
  if (place == nullptr) return false;
  *place = one;
  wakeful_count_.fetch_add(1, std::memory_order_relaxed);
  return true;
}

void EpollLoop::Leave(const Wakeful& one) {
  std::shared_ptr<Wakeful> dropped;  // after the lock
  std::lock_guard lock(wakeful_mutex_);
  for (std::shared_ptr<Wakeful>& each : wakeful_) {
    if (each.get() != &one) continue;
    dropped = std::move(each);
    each.reset();
    wakeful_count_.fetch_sub(1, std::memory_order_relaxed);
  }
}

void EpollLoop::LieDown() {
  if (!HasWakeful()) return;
  std::array<std::shared_ptr<Wakeful>, kMostWakeful> all;
  {
    std::lock_guard lock(wakeful_mutex_);
    all.swap(wakeful_);
    wakeful_count_.store(0, std::memory_order_relaxed);
  }
  for (const std::shared_ptr<Wakeful>& each : all) {
    if (each != nullptr) each->LieDown();
  }
}

bool EpollLoop::LookAtWakeful() {
  if (!HasWakeful()) return false;
  bool did = false;
  for (size_t i = 0; i < kMostWakeful; ++i) {
    std::unique_lock lock(wakeful_mutex_);
    const std::shared_ptr<Wakeful> each = wakeful_[i];
    lock.unlock();
    did = (each != nullptr && each->Look()) || did;
  }
  return did;
}

// --- Turns ---

bool EpollLoop::Turn() {
  TurnScope scope(this);
  const Undoing rest([this] { WakeForTheRest(); });
  bool did = DispatchEvents();
  did = LookAtWakeful() || did;
  did = (timers_.First() && timers_.Run(Now(), kBatch)) || did;
  // What the first batch has posted, too: mostly that is all, and nobody has to be woken for it.
  for (int i = 0; i < 2 && RunPosted(); ++i) did = true;
  return did;
}

bool EpollLoop::Glance() {
  TurnScope scope(this);
  const Undoing rest([this] { WakeForTheRest(); });
  if (!LookAtWakeful()) return false;
  for (int i = 0; i < 2 && RunPosted(); ++i) {
  }
  return true;
}

// At the end of a turn, also of one that an exception of a callback has ended: the loop has to be woken for what is
// left.
void EpollLoop::WakeForTheRest() {
  SetSystemTimer();
  std::unique_lock lock(posts_mutex_);
  const bool any = !posts_.empty();
  lock.unlock();
  if (any) Wake();
}

bool EpollLoop::DispatchEvents() {
  epoll_event events[kBatch];
  const int ready = epoll_wait(epoll_, events, kBatch, 0);
  bool did = false;
  // First, so that what sources post is noticed again.
  for (int i = 0; i < ready; ++i) {
    const uint64_t id = events[i].data.u64;
    uint64_t value = 0;
    if (id == kWakeId) {
      // Before the posts are looked at: who posts after that writes again.
      [[maybe_unused]] const ssize_t taken = read(wake_, &value, sizeof value);
      woken_.store(false, std::memory_order_seq_cst);
    } else if (id == kTimerId) {
      [[maybe_unused]] const ssize_t taken = read(system_timer_, &value, sizeof value);
      system_timer_at_.reset();
    }
  }
  for (int i = 0; i < ready; ++i) {
    const uint64_t id = events[i].data.u64;  // not by reference: the kernel's structure is packed
    if (id < kFirstSourceId) continue;
    const std::shared_ptr<Source> source = Find(id);
    if (source == nullptr) continue;  // removed since
    did = true;
    source->OnEvents(events[i].events);
  }
  return did;
}

bool EpollLoop::RunPosted() {
  Posts batch;
  {
    std::lock_guard lock(posts_mutex_);
    if (posts_.empty()) return false;
    auto end = posts_.begin();
    std::advance(end, std::min<size_t>(posts_.size(), kBatch));
    batch.splice(batch.end(), posts_, posts_.begin(), end);
  }
  const Undoing left([&] {
    std::lock_guard lock(posts_mutex_);
    posts_.splice(posts_.begin(), batch);
  });
  while (!batch.empty()) {
    // Taken out first, so that one that fails is not run again; and destroyed without our lock.
    Posts running;
    running.splice(running.end(), batch, batch.begin());
    running.front()();
  }
  return true;
}

void EpollLoop::SetSystemTimer() {
  // Waking too early is harmless, and cheaper than a system call for each change of what comes first.
  const std::optional<Instant> first = timers_.First();
  if (!first) return;
  const Instant when = *first;
  if (system_timer_at_ && *system_timer_at_ <= when) return;
  const auto since = std::max(when.time_since_epoch(), Duration(1));  // 0 would disarm it
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since);
  itimerspec at{};
  at.it_value.tv_sec = seconds.count();
  at.it_value.tv_nsec = std::chrono::nanoseconds(since - seconds).count();
  if (timerfd_settime(system_timer_, TFD_TIMER_ABSTIME, &at, nullptr) == 0) system_timer_at_ = when;
}

void EpollLoop::Wake() {
  if (woken_.exchange(true, std::memory_order_seq_cst)) return;
  while (eventfd_write(wake_, 1) != 0 && errno == EINTR) {
  }
}

// --- Reactor ---

Instant EpollLoop::Now() const {
  return Instant(std::chrono::duration_cast<Duration>(std::chrono::steady_clock::now().time_since_epoch()));
}

Reactor::TimerId EpollLoop::At(Instant when, Callback callback) {
  CheckThread();
  const TimerId id = timers_.At(when, std::move(callback));
  if (!OnLoopThread()) SetSystemTimer();
  return id;
}

void EpollLoop::Cancel(TimerId timer) {
  CheckThread();
  timers_.Cancel(timer);
}

Reactor::WatchId EpollLoop::WatchReadable(int fd, Callback callback) {
  CheckThread();
  const WatchId id = next_watch_++;
  watches_.emplace(id, std::pair(fd, std::make_shared<Callback>(std::move(callback))));
  Undoing unwatched([this, id] {
    const int error = errno;
    Unwatch(id);
    errno = error;
  });
  std::shared_ptr<WatchedFd>& watched = watched_fds_[fd];
  if (watched == nullptr) watched = std::make_shared<WatchedFd>(this);
  watched->watches.insert(id);
  // Also when it is watched already: a descriptor that was closed meanwhile has left the set by itself.
  Remove(fd, *watched);
  if (const int error = Add(fd, EPOLLIN, watched); error != 0) {
    errno = error;
    return 0;
  }
  unwatched.Done();
  return id;
}

void EpollLoop::Unwatch(WatchId watch) {
  CheckThread();
  const auto found = watches_.find(watch);
  if (found == watches_.end()) return;
  const auto [fd, dropped] = std::move(found->second);
  watches_.erase(found);
  const auto entry = watched_fds_.find(fd);
  if (entry == watched_fds_.end()) return;  // there was no memory for it
  if (entry->second != nullptr) {
    entry->second->watches.erase(watch);
    if (!entry->second->watches.empty()) return;
    Remove(fd, *entry->second);
  }
  watched_fds_.erase(entry);
}

void EpollLoop::Post(Callback callback) {
  Posts one;
  one.push_back(std::move(callback));
  {
    std::lock_guard lock(posts_mutex_);
    posts_.splice(posts_.end(), one);
  }
  // The turn that we are in looks whether there are any before it ends.
  if (!OnLoopThread()) Wake();
}

}  // namespace stagecoach
