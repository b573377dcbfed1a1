// SharedReceiveQueue: Receives that any of several QPs may consume (ibv_srq).
//
// Receives are consumed in the order they were posted, whichever QP asks; they complete on the CQ of the QP that took
// them, in whatever order those QPs finish. So slots come back in any order: they are kept in two intrusive lists, free
// and posted, and a slot taken by a QP is in neither until it is released. A slot keeps its address for life, as
// engines hold pointers to it. Its memory is bounded by the greatest capacity there ever was.
//
// The limit (IBV_SRQ_LIMIT) is armed by Modify. The first consumption that leaves fewer Receives than that raises
// AsyncEventType::kSrqLimitReached, once, and disarms it.
//
// Receives of an SRQ are never flushed: a QP that fails gives back, as flushed, only the one it is filling.
//
// Threading: every member from any thread. The lock stands where a ReceiveQueue's does (docs/locks_and_leases.md): it
// is taken under connections' locks, and under it nothing but the async event queue's.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>

#include "emu/engine/work.h"
#include "emu/nic/objects/completion_channel.h"
#include "emu/nic/objects/work_types.h"

namespace stagecoach::emu {

class AsyncEventQueue;

struct SrqAttributes {
  uint32_t max_wr = 0;   // Receives outstanding: posted, and not yet completed
  uint32_t max_sge = 0;  // of each
  uint32_t limit = 0;    // 0: not armed
};

class SharedReceiveQueue final : public ReceiveSource {
 public:
  // Use Nic::CreateSrq and Nic::DestroySrq. `async_events` hears of the limit.
  SharedReceiveQueue(uint32_t handle, uint32_t pd, const SrqAttributes& attributes, AsyncEventQueue& async_events,
                     void* cookie);
  SharedReceiveQueue(const SharedReceiveQueue&) = delete;
  SharedReceiveQueue& operator=(const SharedReceiveQueue&) = delete;

  uint32_t handle() const { return handle_; }
  uint32_t pd() const { return pd_; }
  void* cookie() const { return cookie_; }

  // ibv_post_srq_recv: 0, EINVAL (too many SGEs) or ENOMEM (full).
  int Post(const ReceiveRequest& request);
  // ibv_modify_srq: all of it or nothing. EINVAL: a capacity of 0 or below what is outstanding, or a limit above the
  // capacity.
  int Modify(std::optional<uint32_t> max_wr, std::optional<uint32_t> limit);
  SrqAttributes Query() const;

  // --- For QPs ---
  const ReceiveWork* TakeReceive() override;
  // Work that TakeReceive gave has completed.
  void Release(const ReceiveWork* work);

  struct Counters {
    uint64_t posted = 0;
    uint64_t taken = 0;
    uint64_t released = 0;
    size_t slots = 0;  // that have memory
  };
  Counters counters() const;
  EventAccount& async_account() { return async_account_; }

 private:
  struct Slot : ReceiveWork {
    std::unique_ptr<ScatterGather[]> list;
    Slot* next = nullptr;
  };

  const uint32_t handle_;
  const uint32_t pd_;
  void* const cookie_;
  const uint32_t max_sge_;
  AsyncEventQueue& async_events_;

  mutable std::mutex mutex_;  // all below
  uint32_t max_wr_;
  uint32_t limit_;
  std::deque<Slot> slots_;  // never shrinks, so that pointers stay
  Slot* free_ = nullptr;
  Slot* oldest_ = nullptr;
  Slot* newest_ = nullptr;
  Counters counters_;

  EventAccount async_account_;  // guarded by the async event queue's lock
};

}  // namespace stagecoach::emu
