#include "emu/nic/infiniband/echo_stream.h"

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/safe_copy/safe_copy.h"

namespace stagecoach::emu {

struct EchoStream::State : std::enable_shared_from_this<State> {
  explicit State(Fabric& its_fabric) : fabric(its_fabric), ring(kCapacity) {}

  // --- Under `mutex` ---
  bool Ready() const {
    const bool over = finished || dead;
    return (want_read && (size > 0 || over)) || (want_write && (size < kCapacity || over));
  }
  void TellIfReady() {
    if (posted || watcher == nullptr || !Ready()) return;
    posted = true;
    fabric.loop().Post([self = shared_from_this()] { self->Tell(); });
  }
  // Moves between the ring, from `at` on, and a part of the caller's, as far as there is `most`. False: not mapped.
  template <typename Part, typename Copy>
  static bool Move(Part part, size_t at, size_t most, size_t* moved, Copy copy) {
    while (!part.empty() && *moved < most) {
      const size_t from = (at + *moved) % kCapacity;
      const size_t count = std::min({part.size(), most - *moved, kCapacity - from});
      if (!copy(from, part.first(count))) return false;
      part = part.subspan(count);
      *moved += count;
    }
    return true;
  }
  template <typename Parts, typename Copy>
  static IoResult MoveAll(Parts parts, size_t at, size_t most, Copy copy) {
    size_t moved = 0;
    for (const auto& part : parts) {
      if (Move(part, at, most, &moved, copy)) continue;
      if (moved == 0) return {.status = IoStatus::kError, .error = EFAULT};
      break;
    }
    return {.status = moved > 0 ? IoStatus::kOk : IoStatus::kWouldBlock, .bytes = moved};
  }

  // --- On the loop ---
  void Tell() {
    std::unique_lock lock(mutex);
    posted = false;
    if (watcher == nullptr || !Ready()) return;
    want_read = want_write = false;
    caller = std::this_thread::get_id();
    ReadyWatcher* const told = watcher;
    lock.unlock();
    told->OnReady();
    lock.lock();
    caller = {};
    idle.notify_all();
  }

  Fabric& fabric;
  std::mutex mutex;  // all below
  std::condition_variable idle;
  std::thread::id caller;  // of the watcher, while it is called
  ReadyWatcher* watcher = nullptr;
  bool want_read = false;
  bool want_write = false;
  bool posted = false;
  bool finished = false;  // nothing more will be written
  bool dead = false;
  std::vector<std::byte> ring;
  size_t begin = 0;
  size_t size = 0;
};

EchoStream::EchoStream(Fabric& fabric, const IpEndpoint& address)
    : address_(address), state_(std::make_shared<State>(fabric)) {}

EchoStream::~EchoStream() {
  SetWatcher(nullptr);
}

IoResult EchoStream::Read(std::span<const MutableBytes> into) {
  State& state = *state_;
  std::lock_guard lock(state.mutex);
  if (state.dead) return {.status = IoStatus::kError, .error = ECONNRESET};
  if (state.size == 0) return {.status = state.finished ? IoStatus::kEof : IoStatus::kWouldBlock};
  const IoResult result = State::MoveAll(into, state.begin, state.size, [&](size_t from, MutableBytes part) {
    return SafeCopy(part, ConstBytes(state.ring).subspan(from, part.size()));
  });
  state.begin = (state.begin + result.bytes) % kCapacity;
  state.size -= result.bytes;
  state.TellIfReady();
  return result;
}

IoResult EchoStream::Write(std::span<const ConstBytes> from) {
  State& state = *state_;
  std::lock_guard lock(state.mutex);
  if (state.dead || state.finished) return {.status = IoStatus::kError, .error = state.dead ? ECONNRESET : EPIPE};
  const size_t end = (state.begin + state.size) % kCapacity;
  const IoResult result = State::MoveAll(from, end, kCapacity - state.size, [&](size_t to, ConstBytes part) {
    return SafeCopy(MutableBytes(state.ring).subspan(to, part.size()), part);
  });
  state.size += result.bytes;
  state.TellIfReady();
  return result;
}

void EchoStream::Arm(bool readable, bool writable) {
  std::lock_guard lock(state_->mutex);
  state_->want_read = readable;
  state_->want_write = writable;
  state_->TellIfReady();
}

void EchoStream::SetWatcher(ReadyWatcher* watcher) {
  std::unique_lock lock(state_->mutex);
  state_->watcher = watcher;
  if (watcher != nullptr) return;
  state_->want_read = state_->want_write = false;
  state_->idle.wait(
      lock, [this] { return state_->caller == std::thread::id() || state_->caller == std::this_thread::get_id(); });
}

void EchoStream::Shutdown() {
  std::lock_guard lock(state_->mutex);
  state_->finished = true;
  state_->TellIfReady();
}

void EchoStream::Abort() {
  std::lock_guard lock(state_->mutex);
  state_->dead = true;
  state_->TellIfReady();
}

}  // namespace stagecoach::emu
