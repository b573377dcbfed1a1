#include "rpcrdma/verbs/block_pool.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/mark.h"

namespace stagecoach::rpcrdma::internal {

BlockPool::~BlockPool() {
  StopWaiting();
  // Blocks still in use go with the pool: nobody can give them back any more.
  allowance_->KeepNoLonger(bytes_kept_);
  allowance_->Give(bytes_used_, this);
}

Block* BlockPool::AllocateInTurn(size_t bytes) {
  BlockPool* const first = allowance_->first_waiting();
  Block* const block = first == nullptr || first == this ? Allocate(bytes) : nullptr;
  if (block == nullptr && !waiting_) {
    waiting_ = true;
    allowance_->waiting_.push_back(this);
  }
  return block;
}

void BlockPool::StopWaiting() {
  if (!std::exchange(waiting_, false)) return;
  std::erase(allowance_->waiting_, this);
  // The next one's turn.
  allowance_->Give(0, this);
}

Block* BlockPool::Allocate(size_t bytes) {
  size_t size_class = 0;
  size_t capacity = kSmallest;
  while (capacity < bytes && size_class + 1 < kClasses) {
    capacity *= 2;
    ++size_class;
  }
  if (capacity < bytes) return nullptr;
  const uint64_t charge = (std::max<uint64_t>(bytes, 1) + kSmallest - 1) / kSmallest * kSmallest;
  if (!allowance_->Take(charge)) {
    STAGECOACH_MARK("pool.allowance_used_up");
    return nullptr;
  }

  std::unique_ptr<Block> block;
  if (auto& kept = free_[size_class]; !kept.empty()) {
    block = std::move(kept.back());
    kept.pop_back();
    bytes_kept_ -= block->capacity;
    allowance_->KeepNoLonger(block->capacity);
  } else {
    block = std::make_unique<Block>();
    block->storage.reset(new (std::nothrow) std::byte[capacity]);
    if (block->storage == nullptr) {
      allowance_->Give(charge, this);
      return nullptr;
    }
    block->capacity = capacity;
    block->size_class = size_class;
    block->number = made_++;
  }
  block->charge = charge;
  bytes_used_ += charge;
  Block* const result = block.get();
  in_use_.emplace(result->storage.get(), std::move(block));
  return result;
}

void BlockPool::Free(Block* block) {
  const auto found = in_use_.find(block->storage.get());
  STAGECOACH_CHECK(found != in_use_.end());
  std::unique_ptr<Block> owned = std::move(found->second);
  in_use_.erase(found);
  bytes_used_ -= owned->charge;
  allowance_->Give(owned->charge, this);
  freed_ = true;
  if (!allowance_->Keep(owned->capacity)) {
    STAGECOACH_MARK("pool.block_not_kept");
    return;
  }
  bytes_kept_ += owned->capacity;
  free_[owned->size_class].push_back(std::move(owned));
}

void BlockPool::FreeByService(Block* block) {
  Free(block);
  allowance_->Tell();
}

Block* BlockPool::Find(const void* address) {
  auto after = in_use_.upper_bound(static_cast<const std::byte*>(address));
  if (after == in_use_.begin()) return nullptr;
  Block* const block = std::prev(after)->second.get();
  return static_cast<const std::byte*>(address) < block->storage.get() + block->capacity ? block : nullptr;
}

std::optional<uint32_t> BlockPool::LocalKey(Block* block) {
  if (!block->region) {
    if (domain_ == nullptr) return std::nullopt;
    auto region = verbs::RegisterMemory(domain_, block->storage.get(), block->capacity, IBV_ACCESS_LOCAL_WRITE);
    if (!region) return std::nullopt;
    block->region = std::move(*region);
    ++registrations_;
  }
  return block->region->lkey;
}

BlockPool::Holdings BlockPool::holdings() const {
  Holdings holdings;
  const auto add = [&](const Block& block) {
    ++holdings.blocks;
    holdings.bytes += block.capacity;
    if (!block.region) return;
    ++holdings.registered_blocks;
    holdings.registered_bytes += block.capacity;
  };
  for (const auto& kept : free_) {
    for (const auto& block : kept) add(*block);
  }
  for (const auto& [address, block] : in_use_) add(*block);
  return holdings;
}

void BlockPool::DropRegistrations() {
  domain_ = nullptr;
  // Not in the order of their addresses: that of two runs may differ, and so would the order in which the device gets
  // its keys back.
  std::vector<Block*> registered;
  const auto note = [&](const std::unique_ptr<Block>& block) {
    if (block->region) registered.push_back(block.get());
  };
  for (const auto& kept : free_) std::for_each(kept.begin(), kept.end(), note);
  for (const auto& [address, block] : in_use_) note(block);
  std::sort(registered.begin(), registered.end(), [](const Block* a, const Block* b) { return a->number < b->number; });
  for (Block* block : registered) block->region = {};
  for (auto& kept : free_) kept.clear();
  allowance_->KeepNoLonger(std::exchange(bytes_kept_, 0));
}

}  // namespace stagecoach::rpcrdma::internal
