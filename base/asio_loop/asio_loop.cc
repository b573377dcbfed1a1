#include "base/asio_loop/asio_loop.h"

#include <errno.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <asio/bind_allocator.hpp>
#include <asio/executor_work_guard.hpp>
#include <asio/post.hpp>
#include <asio/recycling_allocator.hpp>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "base/spare_blocks.h"
#include "base/undoing.h"

namespace stagecoach {
namespace {

// How many Asio handlers, and how many timers, one turn runs before the pollers have their turn.
constexpr int kReadyBatch = 64;
// How often the poll phase looks into the io_context, which costs a system call.
constexpr Duration kContextInterval = 10us;
// As often turns look there that find something to do elsewhere, and so do not sleep.
constexpr int kTurnsPerLook = 8;
// And so long after the last look at the latest, where the companion is at work.
constexpr Duration kIdleInterval = 100us;

template <typename T>
using AsiosAllocator = asio::recycling_allocator<T>;
// For what may be there several times.
using SparingAllocator = SpareAllocator<std::byte, AsiosAllocator>;

std::chrono::steady_clock::time_point ToSteady(Instant when) {
  return std::chrono::steady_clock::time_point(
      std::chrono::duration_cast<std::chrono::steady_clock::duration>(when.time_since_epoch()));
}

}  // namespace

// Marks the calling thread as the loop's while it is inside Run or RunOnce.
class AsioLoop::ThreadScope {
 public:
  explicit ThreadScope(AsioLoop* loop) : loop_(loop) {
    std::thread::id none{};
    STAGECOACH_CHECK(loop_->loop_thread_.compare_exchange_strong(none, std::this_thread::get_id()));
  }
  ~ThreadScope() { loop_->loop_thread_.store(std::thread::id{}); }

 private:
  AsioLoop* const loop_;
};

AsioLoop::AsioLoop() : AsioLoop(Options{}) {}

void OpenEpoll(asio::posix::stream_descriptor& into) {
  const int fd = epoll_create1(EPOLL_CLOEXEC);
  if (fd < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1");
  asio::error_code error;
  into.assign(fd, error);
  if (!error) return;
  close(fd);
  throw std::system_error(error.value(), std::generic_category(), "epoll_ctl");
}

AsioLoop::AsioLoop(const Options& options)
    : poll_time_(options.poll_time),
      poll_budget_(options.poll_time),
      context_(1),
      wake_timer_(context_),
      watched_(context_) {
  OpenEpoll(watched_);
}

AsioLoop::~AsioLoop() {
  STAGECOACH_CHECK(loop_thread_.load() == std::thread::id{});
}

void AsioLoop::CheckThread() const {
  const std::thread::id owner = loop_thread_.load(std::memory_order_relaxed);
  STAGECOACH_CHECK(owner == std::thread::id{} || owner == std::this_thread::get_id());
}

void AsioLoop::Run() {
  while (!stop_.exchange(false)) RunOnce();
}

void AsioLoop::Stop() {
  stop_.store(true);
  Post([] {});  // ends a sleep
}

bool AsioLoop::RunOnce(std::optional<Duration> max_wait) {
  ThreadScope scope(this);
  ++counters_.turns;
  const bool look = posted_.load(std::memory_order_relaxed) > 0 || ++turns_since_look_ >= kTurnsPerLook;
  bool did = look ? RunReady() : RunDueTimers();
  did = PollPhase() || did;
  if (did || stop_.load()) return did;
  if (!ArmAll()) return PollOnce();
  if (IsCompanionAtWork(max_wait)) return true;
  return Sleep(max_wait);
}

Instant AsioLoop::Now() const {
  return Instant(std::chrono::duration_cast<Duration>(std::chrono::steady_clock::now().time_since_epoch()));
}

EventLoop::TimerId AsioLoop::At(Instant when, Callback callback) {
  CheckThread();
  return timers_.At(when, std::move(callback));
}

void AsioLoop::Cancel(TimerId timer) {
  CheckThread();
  timers_.Cancel(timer);
}

EventLoop::WatchId AsioLoop::WatchReadable(int fd, Callback callback) {
  CheckThread();
  const WatchId id = next_id_++;
  watches_.emplace(id, std::make_shared<Watch>(Watch{fd, std::move(callback)}));
  Undoing unwatched([this, id] {
    const int error = errno;
    Unwatch(id);
    errno = error;
  });
  const auto [entry, is_new] = watched_fds_.try_emplace(fd, WatchedFd{next_generation_, {}});
  if (is_new) ++next_generation_;
  entry->second.watches.insert(id);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = (static_cast<uint64_t>(entry->second.generation) << 32) | static_cast<uint32_t>(fd);
  // Also when it is watched already: a descriptor closed meanwhile has left the set by itself.
  if (epoll_ctl(watched_.native_handle(), EPOLL_CTL_ADD, fd, &event) != 0 && errno != EEXIST) return 0;
  AwaitWatched();
  unwatched.Done();
  return id;
}

void AsioLoop::Unwatch(WatchId watch) {
  CheckThread();
  const auto found = watches_.find(watch);
  if (found == watches_.end()) return;
  const std::shared_ptr<Watch> dropped = found->second;
  watches_.erase(found);
  const auto entry = watched_fds_.find(dropped->fd);
  if (entry == watched_fds_.end()) return;  // there was no memory for it
  entry->second.watches.erase(watch);
  if (!entry->second.watches.empty()) return;
  watched_fds_.erase(entry);
  epoll_ctl(watched_.native_handle(), EPOLL_CTL_DEL, dropped->fd, nullptr);
}

void AsioLoop::Post(Callback callback) {
  posted_.fetch_add(1, std::memory_order_relaxed);
  Undoing uncounted([this] { posted_.fetch_sub(1, std::memory_order_relaxed); });
  asio::post(context_, asio::bind_allocator(SparingAllocator(), [this, callback = std::move(callback)] {
               posted_.fetch_sub(1, std::memory_order_relaxed);
               Awake();
               callback();
             }));
  uncounted.Done();
}

EventLoop::PollerId AsioLoop::AddPoller(Poller poller) {
  CheckThread();
  const PollerId id = next_id_++;
  pollers_.push_back(std::make_shared<PollerEntry>(PollerEntry{id, std::move(poller)}));
  return id;
}

void AsioLoop::RemovePoller(PollerId poller) {
  CheckThread();
  const auto found =
      std::find_if(pollers_.begin(), pollers_.end(), [&](const auto& entry) { return entry->id == poller; });
  if (found == pollers_.end()) return;
  const std::shared_ptr<PollerEntry> dropped = *found;
  dropped->id = 0;
  pollers_.erase(found);
}

bool AsioLoop::TakeCompanion(const std::shared_ptr<Companion>& companion) {
  if (!companion_.expired()) return false;
  Unwatch(std::exchange(companion_watch_, 0));
  companion_watch_ = WatchReadable(companion->fd(), [weak = std::weak_ptr(companion)] {
    if (const std::shared_ptr<Companion> present = weak.lock()) present->OnReadable();
  });
  if (companion_watch_ == 0) return false;
  companion_ = companion;
  return true;
}

bool AsioLoop::RunReady() {
  bool did = RunDueTimers();
  turns_since_look_ = 0;
  if (!companion_.expired()) looked_at_ = Now();
  // The io_context counts as out of work, and stopped, whenever nothing is pending in it.
  context_.restart();
  for (int i = 0; i < kReadyBatch && context_.poll_one() > 0; ++i) did = true;
  return did;
}

bool AsioLoop::RunDueTimers() {
  return timers_.First() && timers_.Run(Now(), kReadyBatch);
}

bool AsioLoop::PollOnce() {
  ++counters_.poll_rounds;
  bool did = false;
  // By index, and holding each entry: a poller may add and remove pollers, itself included. One that slips past its
  // turn through a removal has it in the next round.
  for (size_t i = 0; i < pollers_.size(); ++i) {
    const std::shared_ptr<PollerEntry> entry = pollers_[i];
    did = entry->poller.poll() || did;
  }
  return did;
}

bool AsioLoop::AnyBusy() {
  return std::any_of(pollers_.begin(), pollers_.end(), [](const auto& entry) { return entry->poller.busy(); });
}

bool AsioLoop::PollPhase() {
  if (pollers_.empty()) return false;
  bool did = PollOnce();
  if (poll_budget_ <= Duration::zero()) return did;
  Instant last_event = Now();
  Instant last_look = last_event;
  while (!stop_.load(std::memory_order_relaxed) && AnyBusy()) {
    const bool progressed = PollOnce();
    const Instant now = Now();
    const bool due = timers_.IsDue(now);
    bool ran = false;
    if (due || posted_.load(std::memory_order_relaxed) > 0 || now - last_look >= kContextInterval) {
      ran = RunReady();
      last_look = now;
    }
    if (progressed || ran) {
      did = true;
      last_event = now;
    } else if (now - last_event >= poll_budget_) {
      break;
    }
  }
  return did;
}

// Who polls for itself, or does not want to wait at all, is not kept by the companion's polling.
bool AsioLoop::IsCompanionAtWork(std::optional<Duration> max_wait) {
  const std::shared_ptr<Companion> companion = companion_.lock();
  if (companion == nullptr || (max_wait && *max_wait <= Duration::zero())) return false;
  if (poll_time_ > Duration::zero() && AnyBusy()) return false;
  if (!companion->OnIdle([this] { return posted_.load(std::memory_order_relaxed) > 0; })) return false;
  // It has taken its time, and the handlers of Asio wait.
  if (Now() - looked_at_ >= kIdleInterval) turns_since_look_ = kTurnsPerLook;
  return true;
}

bool AsioLoop::ArmAll() {
  bool armed = true;
  for (size_t i = 0; i < pollers_.size(); ++i) {
    const std::shared_ptr<PollerEntry> entry = pollers_[i];
    armed = entry->poller.arm() && armed;
  }
  return armed;
}

bool AsioLoop::Sleep(std::optional<Duration> max_wait) {
  const Instant asleep = Now();
  const bool busy = AnyBusy();
  bool did = false;
  ++counters_.sleeps;
  if (max_wait && *max_wait <= Duration::zero()) {
    did = RunReady();
  } else {
    if (max_wait) WakeAt(asleep + *max_wait);
    if (const std::optional<Instant> first = timers_.First()) WakeAt(*first);
    // Nothing pending at all would make run_one return at once instead of waiting for a Post.
    const auto guard = asio::make_work_guard(context_);
    context_.restart();
    timed_out_ = false;
    {
      const std::shared_ptr<Companion> companion = companion_.lock();
      // Its descriptor is closed; another one may have the number since.
      if (companion == nullptr) Unwatch(std::exchange(companion_watch_, 0));
      asleep_ = companion.get();
      const Undoing awake([this] { Awake(); });
      if (companion != nullptr) companion->OnSleep();
      context_.run_one();
    }
    turns_since_look_ = 0;
    did = RunDueTimers() || !timed_out_;
  }
  if (busy && poll_time_ > Duration::zero()) {
    if (Now() - asleep < poll_time_) {
      poll_budget_ = std::min(poll_time_, poll_budget_ * 2);
    } else {
      poll_budget_ = std::max(poll_time_ / 8, poll_budget_ / 2);
    }
  }
  return did;
}

// Before a callback that may take long runs within a sleep: a companion that counts as asleep has nobody in its place.
void AsioLoop::Awake() {
  if (Companion* const companion = std::exchange(asleep_, nullptr)) companion->OnWake();
}

void AsioLoop::WakeAt(Instant when) {
  // Waking too early is harmless, and cheaper than setting the timer for every change of what comes first.
  if (wake_at_ && *wake_at_ <= when) return;
  // What is set now is cancelled; should there be no memory to wait anew, the next turn has to set it again.
  wake_at_.reset();
  wake_timer_.expires_at(ToSteady(when));
  // One that is cancelled is there still.
  wake_timer_.async_wait(asio::bind_allocator(SparingAllocator(), [this, when](const asio::error_code& error) {
    timed_out_ = true;
    if (!error && wake_at_ == when) wake_at_.reset();
  }));
  wake_at_ = when;
}

void AsioLoop::AwaitWatched() {
  if (std::exchange(awaiting_watched_, true)) return;
  watched_.async_wait(asio::posix::stream_descriptor::wait_read,
                      HandlerMemory::Bind(watched_memory_, [this](const asio::error_code& error) {
                        awaiting_watched_ = false;
                        if (error) return;
                        // Also when a callback ends by an exception.
                        const Undoing again([this] {
                          if (!watches_.empty()) AwaitWatched();
                        });
                        DispatchWatched();
                      }));
}

void AsioLoop::DispatchWatched() {
  epoll_event events[kReadyBatch];
  const int ready = epoll_wait(watched_.native_handle(), events, kReadyBatch, 0);
  // The companion first, while it counts as asleep.
  const auto companions = watches_.find(companion_watch_);
  if (ready > 1 && companions != watches_.end()) {
    std::stable_partition(events, events + ready, [fd = companions->second->fd](const epoll_event& event) {
      return static_cast<int>(event.data.u64 & 0xffffffffu) == fd;
    });
  }
  for (int i = 0; i < ready; ++i) {
    const int fd = static_cast<int>(events[i].data.u64 & 0xffffffffu);
    const auto generation = static_cast<uint32_t>(events[i].data.u64 >> 32);
    const auto entry = watched_fds_.find(fd);
    // A callback before this one may have ended the watch, and the number may already mean another descriptor.
    if (entry == watched_fds_.end() || entry->second.generation != generation) continue;
    const std::vector<WatchId> ids(entry->second.watches.begin(), entry->second.watches.end());
    for (const WatchId id : ids) {
      const auto found = watches_.find(id);
      if (found == watches_.end()) continue;
      const std::shared_ptr<Watch> watch = found->second;
      if (id != companion_watch_) Awake();
      watch->callback();
    }
  }
}

}  // namespace stagecoach
