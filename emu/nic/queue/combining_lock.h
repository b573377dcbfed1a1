// CombiningLock: a lock whose holder also does what others ask for while it is held.
//
// One atomic word holds a locked bit and request bits. Request(bits) sets its bits and the locked bit in one step: if
// the lock was free the caller has it and serves the bits, otherwise the holder will. A holder leaves only by replacing
// exactly "locked, no requests" with 0; if a request slipped in the exchange fails and the holder serves it first. So a
// request is served exactly when it is made or by a holder that has not left yet: no wakeup is lost, and no requester
// waits.
//
// Whoever gets the lock may, once out of it, destroy it, if by its own reasons nobody will come any more; the one who
// held it before may still be on its way out of Leave(). So the step that unlocks is the last that touches the lock,
// and those who wait for it sleep on words that live for ever: a small table, shared by all locks, of counters that a
// leaver raises when someone was waiting.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace stagecoach::emu {

class CombiningLock {
 public:
  // Bits 0 and 1 are the lock's own.
  static constexpr uint32_t kFirstRequestBit = 2;

  CombiningLock() = default;
  CombiningLock(const CombiningLock&) = delete;
  CombiningLock& operator=(const CombiningLock&) = delete;

  // True: the caller holds the lock and must serve with Leave(). False: the holder will.
  bool Request(uint32_t bits) { return (word_.fetch_or(bits | kLocked, std::memory_order_seq_cst) & kLocked) == 0; }

  // As Request when the lock is free; otherwise leaves no trace. For who comes back anyway: a poller that set its bit
  // again and again would keep the holder serving for ever.
  bool TryRequest(uint32_t bits) {
    uint32_t seen = word_.load(std::memory_order_relaxed);
    while ((seen & kLocked) == 0) {
      if (word_.compare_exchange_weak(seen, seen | bits | kLocked, std::memory_order_seq_cst)) return true;
    }
    return false;
  }

  // Takes the lock if it is free.
  bool TryEnter() { return Request(0); }

  // Waits for the lock.
  void Enter() {
    std::atomic<uint32_t>& departures = Departures();
    for (;;) {
      // Read before the waiting bit is set: the leaver that sees the bit raises the counter after this, so the wait
      // below ends, also if that has happened already.
      const uint32_t before = departures.load(std::memory_order_seq_cst);
      if ((word_.fetch_or(kLocked | kWaiting, std::memory_order_seq_cst) & kLocked) == 0) return;
      departures.wait(before, std::memory_order_seq_cst);
    }
  }

  // Serves requests with `serve(bits)` until none is left, then unlocks.
  template <typename Serve>
  void Leave(Serve&& serve) {
    std::atomic<uint32_t>& departures = Departures();
    bool wake = false;
    for (;;) {
      const uint32_t bits = word_.exchange(kLocked, std::memory_order_seq_cst);
      wake = wake || (bits & kWaiting) != 0;
      if (const uint32_t requests = bits & ~(kLocked | kWaiting); requests != 0) serve(requests);
      uint32_t expected = kLocked;
      if (word_.compare_exchange_strong(expected, 0, std::memory_order_seq_cst)) break;
    }
    // The lock may be gone by now.
    if (!wake) return;
    departures.fetch_add(1, std::memory_order_seq_cst);
    departures.notify_all();
  }

 private:
  static constexpr uint32_t kLocked = 1u << 0;
  static constexpr uint32_t kWaiting = 1u << 1;

  // Locks that share a counter wake each other's waiters for nothing now and then, which is harmless. Waiting is rare
  // (control operations only), so few counters do.
  static constexpr size_t kCounters = 64;
  // Zero before any constructor runs, and never destroyed: threads may be at it until the process has ended.
  static inline std::array<std::atomic<uint32_t>, kCounters> departures_{};

  std::atomic<uint32_t>& Departures() const {
    return departures_[std::hash<const void*>{}(this) / alignof(std::max_align_t) % kCounters];
  }

  std::atomic<uint32_t> word_{0};
};

}  // namespace stagecoach::emu
