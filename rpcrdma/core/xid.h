// Transaction ids: where they come from, and the table that finds the call of a reply.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/check.h"

namespace stagecoach::rpcrdma {

// Injected, because good XIDs start at a random value and simulations must repeat.
class XidSource {
 public:
  virtual ~XidSource() = default;
  // Not 0, in any version: where a call goes is not known when its XID is drawn, and on a connection of version 2 that
  // is the XID of RDMA2_CONNPROP [v2:3.2+4] [v2:10.1+2].
  virtual uint32_t Next() = 0;
};

class SequentialXids final : public XidSource {
 public:
  explicit SequentialXids(uint32_t first) : next_(first) {}
  uint32_t Next() override {
    if (next_ == 0) ++next_;
    return next_++;
  }

 private:
  uint32_t next_;
};

// XID -> index, for at most `capacity` entries: open addressing in one block, no allocation afterwards. The XIDs in it
// are our own choice, so nobody can make it slow.
class XidTable {
 public:
  explicit XidTable(uint32_t capacity) : slots_(std::bit_ceil(size_t{capacity} * 2 + 2)) {}

  std::optional<uint32_t> Find(uint32_t xid) const {
    for (size_t i = Home(xid); slots_[i].used; i = Next(i)) {
      if (slots_[i].xid == xid) return slots_[i].index;
    }
    return std::nullopt;
  }

  // `xid` must not be in the table.
  void Insert(uint32_t xid, uint32_t index) {
    STAGECOACH_CHECK(2 * (size_ + 1) <= slots_.size());
    size_t i = Home(xid);
    while (slots_[i].used) i = Next(i);
    slots_[i] = {xid, index, true};
    ++size_;
  }

  void Erase(uint32_t xid) {
    size_t hole = Home(xid);
    while (slots_[hole].used && slots_[hole].xid != xid) hole = Next(hole);
    if (!slots_[hole].used) return;
    --size_;
    // Close the gap: move back each follower that a search would no longer reach.
    for (size_t i = Next(hole); slots_[i].used; i = Next(i)) {
      const size_t home = Home(slots_[i].xid);
      const size_t mask = slots_.size() - 1;
      if (((i - home) & mask) >= ((i - hole) & mask)) {
        slots_[hole] = slots_[i];
        hole = i;
      }
    }
    slots_[hole].used = false;
  }

  size_t size() const { return size_; }

 private:
  struct Slot {
    uint32_t xid = 0;
    uint32_t index = 0;
    bool used = false;
  };
  size_t Home(uint32_t xid) const { return (xid * 0x9e3779b1u) & (slots_.size() - 1); }
  size_t Next(size_t i) const { return (i + 1) & (slots_.size() - 1); }

  std::vector<Slot> slots_;
  size_t size_ = 0;
};

}  // namespace stagecoach::rpcrdma
