// SlotRing: the slots of a queue of work requests, numbered in the order of posting, in memory that is taken as it is
// needed.
//
// Slots come in blocks. A block is taken when the first of its slots is, and used for later numbers once all of its
// slots have been retired: a queue has as many blocks as there ever was work outstanding at once, whatever its
// capacity, and gives none back before its end. A slot keeps its address, so that engines may hold pointers to it until
// its work is retired.
//
// Threading: two sides as in work_queues.h. Room() is for posters, under the queue's lock. BlockOf() of a number is for
// both, from when the number was posted until it is retired: the counters of the queue pass what Room() has written to
// the other side.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace stagecoach::emu {

inline constexpr size_t kSlotsOfABlock = 16;

// `Block` has a `Block* next` for the ring's use.
template <typename Block>
class SlotRing {
 public:
  // For at most `capacity` slots that are posted and not retired.
  explicit SlotRing(size_t capacity) : blocks_(capacity / kSlotsOfABlock + 2) {}
  ~SlotRing() {
    for (uint64_t i = oldest_; i < end_; ++i) Spare(i);
    while (spare_ != nullptr) delete std::exchange(spare_, spare_->next);
  }
  SlotRing(const SlotRing&) = delete;
  SlotRing& operator=(const SlotRing&) = delete;

  static size_t IndexOf(uint64_t number) { return number % kSlotsOfABlock; }

  // Makes sure that the slots up to `number` exist, where those below `retired` are not needed any more. `make` gives a
  // new block, or null for want of memory: then this is false.
  template <typename Make>
  bool Room(uint64_t number, uint64_t retired, Make make) {
    while (end_ * kSlotsOfABlock <= number) {
      while (oldest_ < end_ && (oldest_ + 1) * kSlotsOfABlock <= retired) Spare(oldest_++);
      if (spare_ == nullptr && (spare_ = make()) == nullptr) return false;
      blocks_[end_++ % blocks_.size()] = std::exchange(spare_, spare_->next);
    }
    return true;
  }

  Block& BlockOf(uint64_t number) const { return *blocks_[number / kSlotsOfABlock % blocks_.size()]; }

  // Numbers begin at 0 again. Neither side may be in a call, or have a slot.
  void Clear() {
    for (; oldest_ < end_; ++oldest_) Spare(oldest_);
    oldest_ = end_ = 0;
  }

 private:
  void Spare(uint64_t index) {
    Block* const block = blocks_[index % blocks_.size()];
    block->next = spare_;
    spare_ = block;
  }

  std::vector<Block*> blocks_;  // those of the numbers from oldest_ to end_, each at its number modulo the size
  uint64_t oldest_ = 0;
  uint64_t end_ = 0;
  Block* spare_ = nullptr;
};

}  // namespace stagecoach::emu
