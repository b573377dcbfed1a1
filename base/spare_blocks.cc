#include "base/spare_blocks.h"

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <functional>

#include "base/mark.h"

namespace stagecoach {
namespace {

constexpr size_t kPerWord = 64;

alignas(std::max_align_t) std::array<std::byte, kSpareBlocks * kSpareBlockSize> blocks;
std::array<std::atomic<uint64_t>, kSpareBlocks / kPerWord> taken{};  // a bit for each

}  // namespace

void* TakeSpareBlock(size_t size) {
  if (size > kSpareBlockSize) return nullptr;
  for (size_t word = 0; word < taken.size(); ++word) {
    uint64_t seen = taken[word].load(std::memory_order_relaxed);
    while (~seen != 0) {
      const auto bit = static_cast<size_t>(std::countr_one(seen));
      if (!taken[word].compare_exchange_weak(seen, seen | uint64_t{1} << bit, std::memory_order_acquire)) continue;
      STAGECOACH_MARK("base.spare_block_taken");
      return blocks.data() + (word * kPerWord + bit) * kSpareBlockSize;
    }
  }
  return nullptr;
}

bool GiveSpareBlock(void* block) {
  auto* const first = static_cast<std::byte*>(block);
  const std::less<> before;
  if (before(first, blocks.data()) || !before(first, blocks.data() + blocks.size())) return false;
  const size_t number = static_cast<size_t>(first - blocks.data()) / kSpareBlockSize;
  taken[number / kPerWord].fetch_and(~(uint64_t{1} << number % kPerWord), std::memory_order_release);
  return true;
}

}  // namespace stagecoach
