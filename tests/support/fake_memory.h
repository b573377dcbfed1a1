// FakeMemory: a MemoryPort over plain arrays, for tests of engines and of lower layers.
//
// Each region has a made-up iova, rights, and guard bytes on both sides that nobody may change. Its STag is also its
// lkey. Counts the pins that are held. Not thread-safe.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

#include "base/bytes.h"
#include "base/check.h"
#include "emu/engine/memory_port.h"

namespace stagecoach::emu {

class FakeMemory final : public MemoryPort {
 public:
  enum Rights : uint8_t {
    kNone = 0,
    kLocalWrite = 1,
    kRemoteRead = 2,
    kRemoteWrite = 4,
    kRemoteAtomic = 8,
    kAll = kLocalWrite | kRemoteRead | kRemoteWrite | kRemoteAtomic,
  };

  ~FakeMemory() override { STAGECOACH_CHECK(pins_ == 0); }

  // Returns the STag. The bytes are `fill`.
  uint32_t Add(size_t size, uint8_t rights = kAll, uint8_t fill = 0) {
    Region& region = regions_.emplace_back();
    region.storage.assign(size + 2 * kGuardSize, std::byte{kGuard});
    std::fill_n(region.storage.begin() + kGuardSize, size, std::byte{fill});
    region.rights = rights;
    return static_cast<uint32_t>(regions_.size() << 8) | 0x5a;
  }

  MutableBytes Bytes(uint32_t stag) {
    Region& region = At(stag);
    return MutableBytes(region.storage).subspan(kGuardSize, region.size());
  }
  // Where the region begins, for SGEs and tagged offsets.
  static uint64_t Address(uint32_t stag) { return uint64_t{stag >> 8} << 32; }

  void Invalidate(uint32_t stag) {
    At(stag).valid = false;
    ++At(stag).guard;
  }
  bool IsValid(uint32_t stag) { return At(stag).valid; }
  // As if it belonged to another protection domain.
  void MakeForeign(uint32_t stag) { At(stag).foreign = true; }

  int pins() const { return pins_; }
  // How many there have been.
  int pins_taken() const { return pins_taken_; }
  // Atomics that were carried out.
  int atomics() const { return atomics_; }
  bool GuardsIntact() const {
    const auto is_guard = [](std::byte b) { return b == std::byte{kGuard}; };
    return std::all_of(regions_.begin(), regions_.end(), [&](const Region& region) {
      return std::all_of(region.storage.begin(), region.storage.begin() + kGuardSize, is_guard) &&
             std::all_of(region.storage.end() - kGuardSize, region.storage.end(), is_guard);
    });
  }

  Result<MemoryPin, MemoryFault> Pin(uint32_t stag, uint64_t tagged_offset, uint64_t length,
                                     MemoryAccess access) override {
    const auto region = Find(stag);
    if (!region) return Err(region.error());
    const uint8_t needed = Needed(access);
    if (((*region)->rights & needed) != needed) return Err(MemoryFault::kNoPermission);
    const uint64_t offset = tagged_offset - Address(stag);
    if (offset > (*region)->size() || length > (*region)->size() - offset) return Err(MemoryFault::kOutOfRange);
    ++pins_;
    ++pins_taken_;
    return MemoryPin(this, 0, Bytes(stag).subspan(offset, length), offset, {&(*region)->guard, (*region)->guard});
  }

  Result<void, MemoryFault> InvalidateRemotely(uint32_t stag) override {
    const auto region = Find(stag);
    if (!region) return Err(region.error());
    if (((*region)->rights & (kRemoteRead | kRemoteWrite)) == 0) return Err(MemoryFault::kNoPermission);
    Invalidate(stag);
    return {};
  }

  Result<AtomicOutcome, MemoryFault> Atomic(uint32_t stag, uint64_t tagged_offset, AtomicOp op, uint64_t operand,
                                            uint64_t compare) override {
    uint64_t value = 0;
    if (tagged_offset % sizeof(value) != 0) return Err(MemoryFault::kMisaligned);
    const auto pin = Pin(stag, tagged_offset, sizeof(value), MemoryAccess::kRemoteAtomic);
    if (!pin) return Err(pin.error());
    ++atomics_;
    std::memcpy(&value, pin->bytes().data(), sizeof(value));
    const uint64_t next = op == AtomicOp::kFetchAdd ? value + operand : value == compare ? operand : value;
    std::memcpy(pin->bytes().data(), &next, sizeof(next));
    return AtomicOutcome{.original = value, .offset = pin->offset()};
  }

 private:
  static constexpr size_t kGuardSize = 64;
  static constexpr uint8_t kGuard = 0xa5;

  struct Region {
    std::vector<std::byte> storage;
    uint8_t rights = kNone;
    bool valid = true;
    std::atomic<uint64_t> guard{1};
    bool foreign = false;
    size_t size() const { return storage.size() - 2 * kGuardSize; }
  };

  static uint8_t Needed(MemoryAccess access) {
    switch (access) {
      case MemoryAccess::kLocalRead:
        return kNone;
      case MemoryAccess::kLocalWrite:
      case MemoryAccess::kReceive:
        return kLocalWrite;
      case MemoryAccess::kReadSink:
        return kLocalWrite | kRemoteWrite;
      case MemoryAccess::kRemoteRead:
        return kRemoteRead;
      case MemoryAccess::kRemoteWrite:
        return kRemoteWrite;
      case MemoryAccess::kRemoteAtomic:
        return kRemoteAtomic;
    }
    return kAll;
  }

  Region& At(uint32_t stag) { return regions_.at((stag >> 8) - 1); }
  Result<Region*, MemoryFault> Find(uint32_t stag) {
    const uint32_t index = stag >> 8;
    if (index == 0 || index > regions_.size()) return Err(MemoryFault::kUnknownStag);
    Region& region = At(stag);
    if ((stag & 0xff) != 0x5a || !region.valid) return Err(MemoryFault::kStaleStag);
    if (region.foreign) return Err(MemoryFault::kForeignStag);
    return &region;
  }
  void Unpin(uint32_t) override { --pins_; }

  std::deque<Region> regions_;
  int pins_ = 0;
  int pins_taken_ = 0;
  int atomics_ = 0;
};

}  // namespace stagecoach::emu
