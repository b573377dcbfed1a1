// BlockPool: the working memory of one server connection, counted against its client's allowance, which all connections
// of that client share, and against the total that all clients have together.
//
// Blocks come in powers of two and are kept for the next user, together with a registration for local use that is made
// at first need: a result that is written from a block costs no registration of its own. What is kept does not count as
// used, and is bounded for all pools of one client together, and for those of all clients. What nobody needed for a
// while goes back to the system (Shrink). Nothing here is reachable by the peer.
//
// Whoever finds no memory waits for a turn: connections of one client for what that client may have, and clients for
// what there is. Nobody overtakes who waits for longer, so a large call is not starved by small ones; and who has got
// memory for a call, and waits for another, does so behind the others (PassTurn).
//
// The memory outlives the connection for as long as somebody holds a block; the registrations end with the protection
// domain (DropRegistrations). Not thread-safe.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "verbs_shim/cxx/handles.h"

namespace stagecoach::rpcrdma::internal {

class BlockPool;
class MemoryAllowance;

// Bytes that the pools of all clients may have in use together, and which clients wait for them. Not thread-safe.
class MemoryTotal {
 public:
  explicit MemoryTotal(uint64_t bytes_max) : bytes_max_(bytes_max) {}
  MemoryTotal(const MemoryTotal&) = delete;
  MemoryTotal& operator=(const MemoryTotal&) = delete;

  uint64_t bytes_max() const { return bytes_max_; }
  uint64_t bytes_used() const { return bytes_used_; }
  uint64_t bytes_kept() const { return bytes_kept_; }
  // Bytes that all pools together keep for the next user, beside those in use.
  uint64_t kept_max() const { return bytes_max_ / 4; }
  // Called when the pools begin to keep something; anywhere, so it must not run anybody's code.
  void OnKept(std::function<void()> observer) { on_kept_ = std::move(observer); }

 private:
  friend class MemoryAllowance;
  bool HasRoom(uint64_t bytes) const { return bytes <= bytes_max_ - std::min(bytes_used_, bytes_max_); }
  bool Keep(uint64_t bytes);
  bool IsTurnOf(const MemoryAllowance* allowance) const { return waiting_.empty() || waiting_.front() == allowance; }
  void Wait(MemoryAllowance* allowance);
  void StopWaiting(MemoryAllowance* allowance);
  void PassTurn(MemoryAllowance* allowance);
  // Of who waits first, unless that is `giver`, which knows.
  void Tell(const BlockPool* giver);

  const uint64_t bytes_max_;
  uint64_t bytes_used_ = 0;
  uint64_t bytes_kept_ = 0;
  std::deque<MemoryAllowance*> waiting_;
  std::function<void()> on_kept_;
};

// Bytes that the pools of one client may have in use together, and who waits for them. Not thread-safe.
class MemoryAllowance {
 public:
  // Bytes that the pools together keep for the next user, beside those in use.
  static constexpr uint64_t kKeptMax = 64u << 20;

  // Without a `total` it is a client by itself.
  explicit MemoryAllowance(uint64_t bytes_max, std::shared_ptr<MemoryTotal> total = nullptr)
      : bytes_max_(bytes_max), total_(std::move(total)) {}
  MemoryAllowance(const MemoryAllowance&) = delete;
  MemoryAllowance& operator=(const MemoryAllowance&) = delete;

  uint64_t bytes_max() const { return bytes_max_; }
  uint64_t bytes_used() const { return bytes_used_; }
  uint64_t bytes_kept() const { return bytes_kept_; }

  // Null when nobody waits.
  BlockPool* first_waiting() const { return waiting_.empty() ? nullptr : waiting_.front(); }
  // Called when there may be memory for the first who waits; anywhere, so it must not run anybody's code. Not for what
  // that one gives back itself: it knows.
  void OnFreed(std::function<void()> observer) { on_freed_ = std::move(observer); }

 private:
  friend class BlockPool;
  friend class MemoryTotal;
  bool HasRoom(uint64_t bytes) const { return bytes <= bytes_max_ - std::min(bytes_used_, bytes_max_); }
  bool Take(uint64_t bytes);
  void Give(uint64_t bytes, const BlockPool* giver);
  bool Keep(uint64_t bytes);
  void KeepNoLonger(uint64_t bytes);
  bool IsTurnOf(const BlockPool* pool) const;
  // `bytes` were not to be had.
  void Wait(BlockPool* pool, uint64_t bytes);
  void StopWaiting(BlockPool* pool);
  void PassTurn(BlockPool* pool);
  void Tell() {
    if (!waiting_.empty() && on_freed_) on_freed_();
  }

  const uint64_t bytes_max_;
  const std::shared_ptr<MemoryTotal> total_;  // may be null
  uint64_t bytes_used_ = 0;
  uint64_t bytes_kept_ = 0;
  std::deque<BlockPool*> waiting_;
  std::function<void()> on_freed_;
};

struct Block {
  std::unique_ptr<std::byte[]> storage;
  size_t capacity = 0;
  uint64_t charge = 0;  // what counts against the allowance: the bytes asked for, in whole units of kSmallest
  size_t size_class = 0;
  uint64_t number = 0;  // in the order in which the pool made them
  verbs::MemoryRegion region;
};

class BlockPool {
 public:
  static constexpr size_t kSmallest = 4096;  // bytes; a block takes no less, so none counts for less

  explicit BlockPool(std::shared_ptr<MemoryAllowance> allowance) : allowance_(std::move(allowance)) {}
  ~BlockPool();
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  // Null when the allowance is used up or the system has no memory. `bytes` may be 0.
  Block* Allocate(size_t bytes);
  // The same for a call that waits when there is none: null also when another pool has been waiting for longer.
  Block* AllocateInTurn(size_t bytes);
  // A call that waited has its memory, and others wait: behind those of the other pools, and of the other clients.
  void PassTurn() { allowance_->PassTurn(this); }
  // No call waits any more.
  void StopWaiting();
  // What to do when it is this pool's turn; for the owner of the allowance to call.
  std::function<void()> on_turn;

  void Free(Block* block);
  // The same for a service, which may let go at any time: a call of this pool's own connection that waits is told, too.
  void FreeByService(Block* block);
  // The block that `address` lies in, if any is in use.
  Block* Find(const void* address);

  // The local key of a block, registering it if need be; nullopt when the device refuses, or after DropRegistrations.
  std::optional<uint32_t> LocalKey(Block* block);
  void SetDomain(ibv_pd* domain) { domain_ = domain; }
  // Before the protection domain goes. Keeps no block for a next user.
  void DropRegistrations();
  // Gives back to the system what has been kept, and was not needed, since the last time. How many bytes that were.
  uint64_t Shrink();

  uint64_t bytes_used() const { return bytes_used_; }
  // Of blocks that are in use or kept for the next user.
  struct Holdings {
    uint64_t blocks = 0;
    uint64_t bytes = 0;
    uint64_t registered_bytes = 0;
    uint64_t registered_blocks = 0;
  };
  Holdings holdings() const;
  const MemoryAllowance& allowance() const { return *allowance_; }
  uint64_t registrations() const { return registrations_; }
  // Whether Free() was called since the last time this was asked.
  bool TakeFreed() { return std::exchange(freed_, false); }
  bool waiting() const { return waiting_; }

 private:
  friend class MemoryAllowance;

  static constexpr size_t kClasses = 20;  // up to 2 GiB

  // Bytes of the allowance that a block of `bytes` takes.
  static uint64_t ChargeOf(uint64_t bytes) {
    return (std::max<uint64_t>(bytes, 1) - 1) / kSmallest * kSmallest + kSmallest;
  }

  const std::shared_ptr<MemoryAllowance> allowance_;
  ibv_pd* domain_ = nullptr;
  uint64_t bytes_used_ = 0;
  uint64_t bytes_kept_ = 0;
  uint64_t registrations_ = 0;
  uint64_t made_ = 0;
  bool freed_ = false;
  bool waiting_ = false;
  std::array<std::vector<std::unique_ptr<Block>>, kClasses> free_;
  std::array<size_t, kClasses> unneeded_{};                    // the fewest that were free since the last Shrink
  std::map<const std::byte*, std::unique_ptr<Block>> in_use_;  // by address, for Find only
};

}  // namespace stagecoach::rpcrdma::internal
