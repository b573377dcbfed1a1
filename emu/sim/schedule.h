// Schedule: what a simulated world has yet to do, in order of (time, order of registration).
//
// Most events are due at once: they queue behind those that time itself made due, and only what lies in the future
// takes its turn in a heap. Cancelling is O(log n) and leaves nothing behind, since connections set and cancel far more
// timers than ever fire.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/time.h"

namespace stagecoach::emu {

class Schedule {
 public:
  using Callback = std::function<void()>;
  // Never 0, never used twice.
  using Id = uint64_t;
  struct Event {
    Callback callback;
    uint32_t owner = 0;
  };

  Instant now() const { return now_; }
  bool empty() const { return heap_.empty() && present_size_ == 0; }
  size_t size() const { return heap_.size() + present_size_; }
  // Something is due now.
  bool HasDue() const { return present_size_ > 0 || (!heap_.empty() && heap_[0].when <= now_); }
  // When the next event is due. Not empty.
  Instant NextDue() const { return HasDue() ? now_ : heap_[0].when; }

  // What lies in the past is due now. `owner` is the caller's to choose.
  Id Add(Instant when, uint32_t owner, Callback callback);
  // The callback, which the caller destroys when it likes; an empty one if there is no such event any more.
  Callback Cancel(Id id);
  // How many events `owner` has, by whether their time has come.
  struct Counts {
    size_t due = 0;
    size_t later = 0;
  };
  Counts CountOf(uint32_t owner) const;
  // The first event. HasDue().
  Event TakeDue();
  // Nothing is due, and nothing will be before `when`, which is not in the past.
  void AdvanceTo(Instant when) { now_ = when; }
  // All events of `owner`, in their order; kEveryone: all.
  static constexpr uint32_t kEveryone = UINT32_MAX;
  std::vector<Callback> TakeAllOf(uint32_t owner);

 private:
  static constexpr uint32_t kNowhere = UINT32_MAX;      // the slot is free
  static constexpr uint32_t kPresent = UINT32_MAX - 1;  // the event is in present_
  struct Slot {
    Callback callback;
    uint32_t owner = 0;
    uint32_t generation = 1;
    uint32_t place = kNowhere;  // in heap_
    uint32_t next_free = 0;
  };
  struct Entry {
    Instant when;
    uint64_t order;
    uint32_t slot;
    bool operator<(const Entry& other) const { return when != other.when ? when < other.when : order < other.order; }
  };
  struct Present {
    uint32_t slot;
    uint32_t generation;
  };

  Callback Release(uint32_t slot);
  void Put(size_t place, const Entry& entry) {
    heap_[place] = entry;
    slots_[entry.slot].place = static_cast<uint32_t>(place);
  }
  void SiftUp(size_t place, const Entry& entry);
  void SiftDown(size_t place, const Entry& entry);
  void RemoveFromHeap(size_t place);
  void DropStalePresent();

  Instant now_{};
  uint64_t next_order_ = 0;
  std::vector<Slot> slots_;
  uint32_t first_free_ = kNowhere;
  // Four children to a node: half the depth of a binary heap, and a node's children share a cache line or two.
  std::vector<Entry> heap_;
  // Events due at now_ from their registration on; those in heap_ were registered before now_ came, and go first.
  // Cancelled ones stay until their turn.
  std::vector<Present> present_;
  size_t present_begin_ = 0;
  size_t present_size_ = 0;  // without cancelled ones
};

}  // namespace stagecoach::emu
