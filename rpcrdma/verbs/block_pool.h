// BlockPool: the working memory of one server connection, counted against its client's allowance, which all connections
// of that client share.
//
// Blocks come in powers of two and are kept for the next user, together with a registration for local use that is made
// at first need: a result that is written from a block costs no registration of its own. What is kept does not count as
// used, and is bounded for all pools of one client together. Nothing here is reachable by the peer.
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

// Bytes that the pools of one client may have in use together, and who waits for them. Not thread-safe.
class MemoryAllowance {
 public:
  // Bytes that the pools together keep for the next user, beside those in use.
  static constexpr uint64_t kKeptMax = 64u << 20;

  explicit MemoryAllowance(uint64_t bytes_max) : bytes_max_(bytes_max) {}
  MemoryAllowance(const MemoryAllowance&) = delete;
  MemoryAllowance& operator=(const MemoryAllowance&) = delete;

  uint64_t bytes_max() const { return bytes_max_; }
  uint64_t bytes_used() const { return bytes_used_; }
  uint64_t bytes_kept() const { return bytes_kept_; }

  // Calls that wait for memory wait in the order in which their connections began to: a large one is not starved by
  // small ones of another connection. Null when nobody waits.
  BlockPool* first_waiting() const { return waiting_.empty() ? nullptr : waiting_.front(); }
  // Called when there may be memory for the first who waits; anywhere, so it must not run anybody's code. Not for what
  // that one gives back itself: it knows.
  void OnFreed(std::function<void()> observer) { on_freed_ = std::move(observer); }

 private:
  friend class BlockPool;
  bool Take(uint64_t bytes) {
    if (bytes > bytes_max_ - std::min(bytes_used_, bytes_max_)) return false;
    bytes_used_ += bytes;
    return true;
  }
  void Give(uint64_t bytes, const BlockPool* giver) {
    bytes_used_ -= bytes;
    if (first_waiting() != giver) Tell();
  }
  bool Keep(uint64_t bytes) {
    if (bytes > kKeptMax - bytes_kept_) return false;
    bytes_kept_ += bytes;
    return true;
  }
  void KeepNoLonger(uint64_t bytes) { bytes_kept_ -= bytes; }
  void Tell() {
    if (!waiting_.empty() && on_freed_) on_freed_();
  }

  const uint64_t bytes_max_;
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
  static constexpr size_t kClasses = 20;  // up to 2 GiB

  const std::shared_ptr<MemoryAllowance> allowance_;
  ibv_pd* domain_ = nullptr;
  uint64_t bytes_used_ = 0;
  uint64_t bytes_kept_ = 0;
  uint64_t registrations_ = 0;
  uint64_t made_ = 0;
  bool freed_ = false;
  bool waiting_ = false;
  std::array<std::vector<std::unique_ptr<Block>>, kClasses> free_;
  std::map<const std::byte*, std::unique_ptr<Block>> in_use_;  // by address, for Find only
};

}  // namespace stagecoach::rpcrdma::internal
