#include "emu/nic/objects/shared_receive_queue.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/mark.h"

namespace stagecoach::emu {

SharedReceiveQueue::SharedReceiveQueue(uint32_t handle, uint32_t pd, const SrqAttributes& attributes,
                                       AsyncEventQueue& async_events, void* cookie)
    : handle_(handle),
      pd_(pd),
      cookie_(cookie),
      max_sge_(attributes.max_sge),
      async_events_(async_events),
      max_wr_(attributes.max_wr),
      limit_(attributes.limit) {}

int SharedReceiveQueue::Post(const ReceiveRequest& request) {
  if (request.sges.size() > max_sge_) return EINVAL;
  std::lock_guard lock(mutex_);
  if (counters_.posted - counters_.released >= max_wr_) {
    STAGECOACH_MARK("srq.full");
    return ENOMEM;
  }
  Slot* slot = free_;
  if (slot != nullptr) {
    free_ = slot->next;
  } else {
    slot = &slots_.emplace_back();
    slot->list = std::make_unique<ScatterGather[]>(max_sge_);
  }
  slot->wr_id = request.wr_id;
  std::copy(request.sges.begin(), request.sges.end(), slot->list.get());
  slot->sges = {slot->list.get(), request.sges.size()};
  slot->next = nullptr;
  (oldest_ == nullptr ? oldest_ : newest_->next) = slot;
  newest_ = slot;
  ++counters_.posted;
  return 0;
}

int SharedReceiveQueue::Modify(std::optional<uint32_t> max_wr, std::optional<uint32_t> limit) {
  std::lock_guard lock(mutex_);
  const uint32_t capacity = max_wr.value_or(max_wr_);
  if (capacity == 0 || counters_.posted - counters_.released > capacity) return EINVAL;
  if (limit.value_or(limit_) > capacity) return EINVAL;
  max_wr_ = capacity;
  if (limit) limit_ = *limit;
  return 0;
}

SrqAttributes SharedReceiveQueue::Query() const {
  std::lock_guard lock(mutex_);
  return {.max_wr = max_wr_, .max_sge = max_sge_, .limit = limit_};
}

const ReceiveWork* SharedReceiveQueue::TakeReceive() {
  std::lock_guard lock(mutex_);
  Slot* const slot = oldest_;
  if (slot == nullptr) {
    STAGECOACH_MARK("srq.empty");
    return nullptr;
  }
  oldest_ = slot->next;
  ++counters_.taken;
  if (counters_.posted - counters_.taken < limit_) {
    STAGECOACH_MARK("srq.limit_reached");
    limit_ = 0;
    async_events_.Push({.type = AsyncEventType::kSrqLimitReached, .srq = this, .account = &async_account_});
  }
  return slot;
}

void SharedReceiveQueue::Release(const ReceiveWork* work) {
  // Ours, and given out as const only to be left alone.
  auto* const slot = const_cast<Slot*>(static_cast<const Slot*>(work));
  std::lock_guard lock(mutex_);
  slot->next = std::exchange(free_, slot);
  ++counters_.released;
}

SharedReceiveQueue::Counters SharedReceiveQueue::counters() const {
  std::lock_guard lock(mutex_);
  Counters counters = counters_;
  counters.slots = slots_.size();
  return counters;
}

}  // namespace stagecoach::emu
