#include "base/insist.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdlib>

namespace stagecoach {
namespace {

// What one step needs, and what the allocator keeps for itself, several times over.
constexpr size_t kPieceSize = 4096;
constexpr size_t kPieces = 16;

// Memory itself is what is wanted, so it is asked for by malloc and free: whatever stands behind operator new in this
// program takes it from there.
std::array<std::atomic<void*>, kPieces> pieces{};
std::atomic<bool> is_short{false};  // some are missing

}  // namespace

void KeepReserve() {
  is_short.store(false, std::memory_order_relaxed);
  for (std::atomic<void*>& piece : pieces) {
    if (piece.load(std::memory_order_acquire) != nullptr) continue;
    void* const memory = std::malloc(kPieceSize);
    void* none = nullptr;
    if (memory == nullptr) return is_short.store(true, std::memory_order_relaxed);
    if (!piece.compare_exchange_strong(none, memory)) std::free(memory);
  }
}

bool SpendReserve() {
  is_short.store(true, std::memory_order_relaxed);
  for (std::atomic<void*>& piece : pieces) {
    void* const memory = piece.exchange(nullptr);
    if (memory == nullptr) continue;
    std::free(memory);
    return true;
  }
  return false;
}

bool IsReserveShort() {
  return is_short.load(std::memory_order_relaxed);
}

}  // namespace stagecoach
