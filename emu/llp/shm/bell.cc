#include "emu/llp/shm/bell.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/fork/fork.h"
#include "base/insist.h"
#include "emu/fabric/insist_loop.h"

namespace stagecoach::emu {
namespace {

// Heard in one event. An honest end never has more outstanding than a few.
constexpr size_t kMostHeard = 64;

bool IsAsleep(uint64_t nap) {
  return nap % 2 == 1;
}

bool IsAborted(uint32_t ending) {
  return ending != static_cast<uint32_t>(Ending::kNone) && ending != static_cast<uint32_t>(Ending::kFinished);
}

// False: for want of memory or of a descriptor it is to be called again. The pause lets others give some back.
bool CallWatcher(ReadyWatcher& watcher) {
  try {
    watcher.OnReady();
    return true;
  } catch (const std::bad_alloc&) {
  } catch (const std::system_error&) {
  }
  std::this_thread::sleep_for(kWantPause);
  return false;
}

}  // namespace

std::shared_ptr<Bell> Bell::Hang(EpollLoop& loop, int socket, const Words& words) {
  KeepFromChildren(socket);
  std::shared_ptr<Bell> bell;
  int error = ENOMEM;
  try {
    bell.reset(new Bell(loop, socket, words));
    bell->is_hung_ = true;
    error = loop.Add(socket, EPOLLIN, bell);
  } catch (const std::bad_alloc&) {
  }
  if (error == 0) return bell;
  if (bell != nullptr) bell->taken_down_ = true;
  CloseDescriptor(socket);
  errno = error;
  return nullptr;
}

Bell::~Bell() {
  STAGECOACH_CHECK(!is_hung_ || taken_down_ || generation_ != ForkGeneration());
}

void Bell::TakeDown() {
  SetWatcher(nullptr);
  std::lock_guard lock(mutex_);
  taken_down_ = true;
  Deafen();
  CloseDescriptor(socket_);
}

// --- Sleeping ---

void Bell::Arm(bool records, bool room, uint64_t awaited) {
  std::lock_guard lock(mutex_);
  words_.own.awaited.store(awaited, std::memory_order_relaxed);
  want_records_ = records && watcher_ != nullptr;
  want_room_ = room && watcher_ != nullptr;
  Settle();
}

void Bell::LookAgain() {
  std::lock_guard lock(mutex_);
  Settle();
}

void Bell::SetWatcher(ReadyWatcher* watcher) {
  std::unique_lock lock(mutex_);
  watcher_ = watcher;
  if (watcher != nullptr) return;
  want_records_ = want_room_ = false;
  Settle();
  if (loop_.OnLoopThread()) return;
  called_.wait(lock, [this] { return !calling_; });
}

bool Bell::IsReady() const {
  if (!want_records_ && !want_room_) return false;
  if (gone_.load(std::memory_order_relaxed) || IsAbused()) return true;
  const uint32_t ended = words_.own.ending.load(std::memory_order_relaxed);
  const uint32_t peer_ended = words_.peer.ending.load(std::memory_order_acquire);
  if (IsAborted(ended) || IsAborted(peer_ended)) return true;
  const bool records =
      peer_ended != static_cast<uint32_t>(Ending::kNone) ||
      words_.peer.produced.load(std::memory_order_acquire) != words_.own.consumed.load(std::memory_order_relaxed);
  const bool room =
      ended != static_cast<uint32_t>(Ending::kNone) ||
      words_.peer.consumed.load(std::memory_order_acquire) >= words_.own.awaited.load(std::memory_order_relaxed);
  return (want_records_ && records) || (want_room_ && room);
}

// Has the watcher called, or else stays up for what is wanted while the loop is awake, or sleeps.
void Bell::Settle() {
  if (IsReady()) return Tell();
  const bool is_wanted = want_records_ || want_room_;
  if (is_wanted && loop_.StayUp(std::shared_ptr<EpollLoop::Wakeful>(shared_from_this(), this))) {
    is_up_ = true;
    return Nap(false, false);
  }
  if (std::exchange(is_up_, false)) loop_.Leave(*this);
  FallAsleep();
}

void Bell::FallAsleep() {
  Nap(want_records_, want_room_);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (IsReady()) Tell();
}

bool Bell::Look() {
  std::unique_lock lock(mutex_);
  if (!is_up_ || !IsReady()) return false;
  is_up_ = false;
  loop_.Leave(*this);
  Call(lock);
  return true;
}

void Bell::LieDown() {
  std::lock_guard lock(mutex_);
  if (std::exchange(is_up_, false)) FallAsleep();
}

// Begins another nap of each kind, or ends it.
void Bell::Nap(bool for_records, bool for_room) {
  for (const auto& [nap, wanted] :
       {std::pair(&words_.own.nap_for_records, for_records), std::pair(&words_.own.nap_for_room, for_room)}) {
    const uint64_t now = nap->load(std::memory_order_relaxed);
    if (!wanted && !IsAsleep(now)) continue;
    // Release: who sees the nap sees as well what is awaited.
    nap->store(now + (wanted && IsAsleep(now) ? 2 : 1), std::memory_order_release);
    if (wanted) ++naps_;
  }
}

void Bell::Tell() {
  if (told_) return;
  InsistPost(loop_, [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (self == nullptr) return;
    std::unique_lock lock(self->mutex_);
    self->told_ = false;
    if (self->taken_down_) return;
    if (self->IsReady()) return self->Call(lock);
    self->Settle();
  });
  told_ = true;
}

void Bell::OnEvents(uint32_t) {
  std::unique_lock lock(mutex_);
  if (taken_down_) return;
  Listen();
  if (IsReady()) return Call(lock);
  // The ring has used the nap up.
  Settle();
}

void Bell::Listen() {
  std::array<std::byte, kMostHeard> rings;
  // Descriptors that come along are dropped by the kernel.
  const ssize_t heard = recv(socket_, rings.data(), rings.size(), MSG_DONTWAIT);
  if (heard > 0) {
    heard_ += static_cast<uint64_t>(heard);
    if (heard_ <= naps_) return;
    abused_.store(true, std::memory_order_relaxed);
  } else {
    if (heard < 0 && (errno == EAGAIN || errno == EINTR)) return;
    gone_.store(true, std::memory_order_release);
  }
  Deafen();
}

void Bell::Deafen() {
  if (!std::exchange(deaf_, true)) loop_.Remove(socket_, *this);
}

void Bell::Call(std::unique_lock<std::mutex>& lock) {
  ReadyWatcher* const watcher = watcher_;
  const bool records = std::exchange(want_records_, false);
  const bool room = std::exchange(want_room_, false);
  Nap(false, false);
  calling_ = true;
  lock.unlock();
  const bool done = CallWatcher(*watcher);
  lock.lock();
  if (!done && watcher_ == watcher) {
    want_records_ = records;
    want_room_ = room;
    Settle();
  }
  calling_ = false;
  // Under the mutex: whoever waits may go on to take the bell down, but does not hold its last reference.
  called_.notify_all();
}

// --- Waking ---

void Bell::RingOnce(const std::atomic<uint64_t>& nap, uint64_t* rung_for) {
  const uint64_t now = nap.load(std::memory_order_acquire);
  if (!IsAsleep(now) || now == *rung_for) return;
  *rung_for = now;
  ++rings_;
  const std::byte ring{1};
  // A failure needs nobody: EAGAIN, and there are rings that were not taken yet; EPIPE, and the other end is gone.
  [[maybe_unused]] const ssize_t sent = send(socket_, &ring, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void Bell::RingForRecords() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  RingOnce(words_.peer.nap_for_records, &rung_for_records_);
}

void Bell::RingForRoom() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  // The nap first: it brings what is awaited.
  if (!IsAsleep(words_.peer.nap_for_room.load(std::memory_order_acquire))) return;
  const uint64_t awaited = words_.peer.awaited.load(std::memory_order_relaxed);
  if (words_.own.consumed.load(std::memory_order_relaxed) >= awaited) {
    RingOnce(words_.peer.nap_for_room, &rung_for_room_);
  }
}

void Bell::RingForEverything() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  RingOnce(words_.peer.nap_for_records, &rung_for_records_);
  RingOnce(words_.peer.nap_for_room, &rung_for_room_);
}

}  // namespace stagecoach::emu
