#include "base/fork/fork.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <mutex>

namespace stagecoach {
namespace {

constexpr int kBits = 64;

std::atomic<uint32_t> generation{0};
// A bit for each descriptor.
std::array<std::atomic<uint64_t>, kMostDescriptors / kBits> kept{};

bool IsNoted(int fd) {
  return fd >= 0 && fd < kMostDescriptors;
}

void InChild() {
  generation.fetch_add(1, std::memory_order_relaxed);
  for (size_t i = 0; i < kept.size(); ++i) {
    for (uint64_t bits = kept[i].exchange(0, std::memory_order_relaxed); bits != 0; bits &= bits - 1) {
      close(static_cast<int>(i) * kBits + std::countr_zero(bits));
    }
  }
}

}  // namespace

uint32_t ForkGeneration() {
  return generation.load(std::memory_order_relaxed);
}

int KeepFromChildren(int fd) {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, InChild); });
  if (IsNoted(fd)) kept[static_cast<size_t>(fd / kBits)].fetch_or(uint64_t{1} << (fd % kBits));
  return fd;
}

void ForgetDescriptor(int fd) {
  if (IsNoted(fd)) kept[static_cast<size_t>(fd / kBits)].fetch_and(~(uint64_t{1} << (fd % kBits)));
}

void CloseDescriptor(int fd) {
  ForgetDescriptor(fd);
  close(fd);
}

}  // namespace stagecoach
