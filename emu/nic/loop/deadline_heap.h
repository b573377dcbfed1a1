// DeadlineHeap: who is to be called when, the earliest first. Setting, withdrawing and taking cost the logarithm of how
// many there are, and each entry knows its place.
//
// Not thread-safe. Entries are not owned: one is withdrawn before it goes.
#pragma once

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "base/time.h"

namespace stagecoach::emu {

class DeadlineEntry {
 public:
  // nullopt: it is in no heap.
  std::optional<Instant> when() const { return when_; }

 private:
  friend class DeadlineHeap;
  std::optional<Instant> when_;
  size_t place_ = 0;
};

class DeadlineHeap {
 public:
  bool empty() const { return heap_.empty(); }
  // Null if there is none. Of those with the same time the order is one that follows from the calls.
  DeadlineEntry* Earliest() const { return heap_.empty() ? nullptr : heap_.front(); }

  // Replaces what was set; nullopt withdraws it.
  void Set(DeadlineEntry* entry, std::optional<Instant> when) {
    if (!when) return Withdraw(entry);
    if (!entry->when_) {
      heap_.push_back(entry);
      entry->place_ = heap_.size() - 1;
    }
    entry->when_ = when;
    Settle(entry->place_);
  }

 private:
  void Withdraw(DeadlineEntry* entry) {
    if (!entry->when_) return;
    const size_t place = entry->place_;
    entry->when_.reset();
    DeadlineEntry* const last = heap_.back();
    heap_.pop_back();
    if (last == entry) return;
    Put(last, place);
    Settle(place);
  }

  bool IsEarlier(size_t one, size_t other) const { return *heap_[one]->when_ < *heap_[other]->when_; }
  void Put(DeadlineEntry* entry, size_t place) {
    heap_[place] = entry;
    entry->place_ = place;
  }
  void Swap(size_t one, size_t other) {
    DeadlineEntry* const moved = heap_[one];
    Put(heap_[other], one);
    Put(moved, other);
  }
  // Moves what is at `place` to where it belongs; all others are there.
  void Settle(size_t place) {
    while (place > 0 && IsEarlier(place, (place - 1) / 2)) {
      Swap(place, (place - 1) / 2);
      place = (place - 1) / 2;
    }
    for (;;) {
      size_t earliest = place;
      for (const size_t child : {2 * place + 1, 2 * place + 2}) {
        if (child < heap_.size() && IsEarlier(child, earliest)) earliest = child;
      }
      if (earliest == place) return;
      Swap(place, earliest);
      place = earliest;
    }
  }

  std::vector<DeadlineEntry*> heap_;  // none is earlier than the one at half its place
};

}  // namespace stagecoach::emu
