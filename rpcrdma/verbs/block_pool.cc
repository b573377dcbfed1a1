#include "rpcrdma/verbs/block_pool.h"

#include <algorithm>
#include <cstddef>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/mark.h"

namespace stagecoach::rpcrdma::internal {

// --- MemoryTotal ---

bool MemoryTotal::Keep(uint64_t bytes) {
  if (bytes > kept_max() - bytes_kept_) return false;
  const bool first = bytes_kept_ == 0;
  bytes_kept_ += bytes;
  if (first && on_kept_) on_kept_();
  return true;
}

void MemoryTotal::Wait(MemoryAllowance* allowance) {
  if (std::find(waiting_.begin(), waiting_.end(), allowance) == waiting_.end()) waiting_.push_back(allowance);
}

void MemoryTotal::StopWaiting(MemoryAllowance* allowance) {
  if (std::erase(waiting_, allowance) > 0) Tell(nullptr);
}

void MemoryTotal::PassTurn(MemoryAllowance* allowance) {
  if (waiting_.size() < 2 || waiting_.front() != allowance) return;
  waiting_.pop_front();
  waiting_.push_back(allowance);
  Tell(nullptr);
}

void MemoryTotal::Tell(const BlockPool* giver) {
  if (!waiting_.empty() && waiting_.front()->first_waiting() != giver) waiting_.front()->Tell();
}

// --- MemoryAllowance ---

bool MemoryAllowance::Take(uint64_t bytes) {
  if (!HasRoom(bytes)) return false;
  if (total_ != nullptr) {
    if (!total_->HasRoom(bytes)) {
      STAGECOACH_MARK("pool.total_used_up");
      return false;
    }
    total_->bytes_used_ += bytes;
  }
  bytes_used_ += bytes;
  return true;
}

void MemoryAllowance::Give(uint64_t bytes, const BlockPool* giver) {
  bytes_used_ -= bytes;
  if (first_waiting() != giver) Tell();
  if (total_ == nullptr) return;
  total_->bytes_used_ -= bytes;
  total_->Tell(giver);
}

bool MemoryAllowance::Keep(uint64_t bytes) {
  if (bytes > kKeptMax - bytes_kept_ || (total_ != nullptr && !total_->Keep(bytes))) return false;
  bytes_kept_ += bytes;
  return true;
}

void MemoryAllowance::KeepNoLonger(uint64_t bytes) {
  bytes_kept_ -= bytes;
  if (total_ != nullptr) total_->bytes_kept_ -= bytes;
}

bool MemoryAllowance::IsTurnOf(const BlockPool* pool) const {
  return (waiting_.empty() || waiting_.front() == pool) && (total_ == nullptr || total_->IsTurnOf(this));
}

void MemoryAllowance::Wait(BlockPool* pool, uint64_t bytes) {
  if (!std::exchange(pool->waiting_, true)) waiting_.push_back(pool);
  if (total_ == nullptr || first_waiting() != pool) return;
  if (HasRoom(bytes)) {
    total_->Wait(this);
  } else {
    // What it waits for is of this client alone: it is in nobody else's way.
    total_->StopWaiting(this);
  }
}

void MemoryAllowance::StopWaiting(BlockPool* pool) {
  std::erase(waiting_, pool);
  // The next one's turn.
  Tell();
  if (total_ != nullptr && waiting_.empty()) total_->StopWaiting(this);
}

void MemoryAllowance::PassTurn(BlockPool* pool) {
  if (first_waiting() != pool) return;
  if (waiting_.size() > 1) {
    waiting_.pop_front();
    waiting_.push_back(pool);
    Tell();
  }
  if (total_ != nullptr) total_->PassTurn(this);
}

// --- BlockPool ---

BlockPool::~BlockPool() {
  StopWaiting();
  // Blocks still in use go with the pool: nobody can give them back any more.
  allowance_->KeepNoLonger(bytes_kept_);
  allowance_->Give(bytes_used_, this);
}

Block* BlockPool::AllocateInTurn(size_t bytes) {
  Block* const block = allowance_->IsTurnOf(this) ? Allocate(bytes) : nullptr;
  if (block == nullptr) allowance_->Wait(this, ChargeOf(bytes));
  return block;
}

void BlockPool::StopWaiting() {
  if (std::exchange(waiting_, false)) allowance_->StopWaiting(this);
}

Block* BlockPool::Allocate(size_t bytes) {
  size_t size_class = 0;
  size_t capacity = kSmallest;
  while (capacity < bytes && size_class + 1 < kClasses) {
    capacity *= 2;
    ++size_class;
  }
  if (capacity < bytes) return nullptr;
  const uint64_t charge = ChargeOf(bytes);
  if (!allowance_->Take(charge)) {
    STAGECOACH_MARK("pool.allowance_used_up");
    return nullptr;
  }

  std::unique_ptr<Block> block;
  if (auto& kept = free_[size_class]; !kept.empty()) {
    block = std::move(kept.back());
    kept.pop_back();
    unneeded_[size_class] = std::min(unneeded_[size_class], kept.size());
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

uint64_t BlockPool::Shrink() {
  uint64_t bytes = 0;
  for (size_t i = 0; i < kClasses; ++i) {
    auto& kept = free_[i];
    // The last ones are taken first, so that those in front are the ones.
    const auto end = kept.begin() + static_cast<std::ptrdiff_t>(std::min(unneeded_[i], kept.size()));
    for (auto block = kept.begin(); block != end; ++block) bytes += (*block)->capacity;
    kept.erase(kept.begin(), end);
    unneeded_[i] = kept.size();
  }
  bytes_kept_ -= bytes;
  allowance_->KeepNoLonger(bytes);
  return bytes;
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
  unneeded_ = {};
  allowance_->KeepNoLonger(std::exchange(bytes_kept_, 0));
}

}  // namespace stagecoach::rpcrdma::internal
