#include "emu/sim/schedule.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace stagecoach::emu {
namespace {

constexpr size_t kChildren = 4;
constexpr size_t kCompactFrom = 4096;

}  // namespace

Schedule::Id Schedule::Add(Instant when, uint32_t owner, Callback callback) {
  if (first_free_ == kNowhere) {
    first_free_ = static_cast<uint32_t>(slots_.size());
    slots_.emplace_back();
    slots_.back().next_free = kNowhere;
  }
  const uint32_t index = first_free_;
  Slot& slot = slots_[index];
  first_free_ = slot.next_free;
  slot.callback = std::move(callback);
  slot.owner = owner;
  if (when <= now_) {
    slot.place = kPresent;
    present_.push_back({index, slot.generation});
    ++present_size_;
  } else {
    heap_.emplace_back();
    SiftUp(heap_.size() - 1, {when, next_order_++, index});
  }
  return (uint64_t{slot.generation} << 32) | index;
}

Schedule::Callback Schedule::Cancel(Id id) {
  const auto index = static_cast<uint32_t>(id);
  if (index >= slots_.size()) return nullptr;
  const Slot& slot = slots_[index];
  if (slot.generation != id >> 32 || slot.place == kNowhere) return nullptr;
  if (slot.place == kPresent) {
    --present_size_;
  } else {
    RemoveFromHeap(slot.place);
  }
  return Release(index);
}

Schedule::Event Schedule::TakeDue() {
  STAGECOACH_CHECK(HasDue());
  uint32_t index;
  if (!heap_.empty() && heap_[0].when <= now_) {
    index = heap_[0].slot;
    RemoveFromHeap(0);
  } else {
    DropStalePresent();
    index = present_[present_begin_++].slot;
    if (--present_size_ == 0) {
      present_.clear();
      present_begin_ = 0;
    } else if (present_begin_ >= kCompactFrom && present_begin_ * 2 >= present_.size()) {
      present_.erase(present_.begin(), present_.begin() + static_cast<ptrdiff_t>(present_begin_));
      present_begin_ = 0;
    }
  }
  const uint32_t owner = slots_[index].owner;
  return {Release(index), owner};
}

std::vector<Schedule::Callback> Schedule::TakeAllOf(uint32_t owner) {
  const auto wanted = [&](uint32_t slot) { return owner == kEveryone || slots_[slot].owner == owner; };
  std::vector<Entry> found;
  for (const Entry& entry : heap_) {
    if (wanted(entry.slot)) found.push_back(entry);
  }
  std::sort(found.begin(), found.end());
  std::vector<Callback> callbacks;
  // What is in the heap and due goes before what is present, and what is not goes after it.
  auto take_until = [&, next = found.begin()](Instant limit) mutable {
    for (; next != found.end() && next->when <= limit; ++next) {
      RemoveFromHeap(slots_[next->slot].place);
      callbacks.push_back(Release(next->slot));
    }
  };
  take_until(now_);
  for (size_t i = present_begin_; i < present_.size(); ++i) {
    const auto [slot, generation] = present_[i];
    if (slots_[slot].generation != generation || !wanted(slot)) continue;
    callbacks.push_back(Release(slot));
    --present_size_;
  }
  take_until(Instant::max());
  return callbacks;
}

Schedule::Counts Schedule::CountOf(uint32_t owner) const {
  Counts counts;
  for (const Slot& slot : slots_) {
    if (slot.place == kNowhere || (owner != kEveryone && slot.owner != owner)) continue;
    const bool due = slot.place == kPresent || heap_[slot.place].when <= now_;
    ++(due ? counts.due : counts.later);
  }
  return counts;
}

Schedule::Callback Schedule::Release(uint32_t index) {
  Slot& slot = slots_[index];
  ++slot.generation;
  slot.place = kNowhere;
  slot.next_free = std::exchange(first_free_, index);
  return std::exchange(slot.callback, nullptr);
}

void Schedule::DropStalePresent() {
  while (slots_[present_[present_begin_].slot].generation != present_[present_begin_].generation) ++present_begin_;
}

void Schedule::SiftUp(size_t place, const Entry& entry) {
  while (place > 0) {
    const size_t parent = (place - 1) / kChildren;
    if (!(entry < heap_[parent])) break;
    Put(place, heap_[parent]);
    place = parent;
  }
  Put(place, entry);
}

void Schedule::SiftDown(size_t place, const Entry& entry) {
  for (;;) {
    const size_t first = place * kChildren + 1;
    if (first >= heap_.size()) break;
    const size_t end = std::min(first + kChildren, heap_.size());
    size_t least = first;
    for (size_t child = first + 1; child < end; ++child) {
      if (heap_[child] < heap_[least]) least = child;
    }
    if (!(heap_[least] < entry)) break;
    Put(place, heap_[least]);
    place = least;
  }
  Put(place, entry);
}

void Schedule::RemoveFromHeap(size_t place) {
  const Entry last = heap_.back();
  heap_.pop_back();
  if (place == heap_.size()) return;
  if (place > 0 && last < heap_[(place - 1) / kChildren]) {
    SiftUp(place, last);
  } else {
    SiftDown(place, last);
  }
}

}  // namespace stagecoach::emu
