// RecordedMemory: a MemoryPort whose regions are those that a recording names, with their STags and tagged offsets.
//
// Beside what is there it keeps what should be there, so that one comparison finds a byte that is missing, wrong, or
// outside of what was written: every region has bytes around it that nobody may change. Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "emu/engine/memory_port.h"

namespace stagecoach::testing {

class RecordedMemory final : public emu::MemoryPort {
 public:
  enum Rights : uint8_t { kNone = 0, kLocalWrite = 1, kRemoteRead = 2, kRemoteWrite = 4 };

  ~RecordedMemory() override;

  // --- Before Seal ---
  // `stag` names these bytes, and may be used so. Ranges that touch are one. A length of 0 makes the STag known.
  void Declare(uint32_t stag, uint64_t offset, uint64_t length, uint8_t rights);
  void Seal();

  // --- After it ---
  // A region of this end's own, at any address, for Sends and Receives; returns its key, which no STag of the recording
  // is.
  uint32_t AddLocal(size_t size);
  static uint64_t AddressOf(uint32_t local_key) { return uint64_t{local_key} << 20; }

  // What the program stores there, and has every right to find there.
  void Store(uint32_t stag, uint64_t offset, ConstBytes bytes);
  // What should be there from now on.
  void Expect(uint32_t stag, uint64_t offset, ConstBytes bytes);
  // What is there.
  ConstBytes Bytes(uint32_t stag, uint64_t offset, uint64_t length) const;
  bool IsValid(uint32_t stag) const { return regions_.at(stag).valid; }
  // The first byte that is not what it should be, in words.
  std::optional<std::string> Difference() const;
  uint32_t Checksum() const;  // CRC32c over all there is

  Result<emu::MemoryPin, emu::MemoryFault> Pin(uint32_t stag, uint64_t tagged_offset, uint64_t length,
                                               emu::MemoryAccess access) override;
  Result<void, emu::MemoryFault> InvalidateRemotely(uint32_t stag) override;
  Result<emu::AtomicOutcome, emu::MemoryFault> Atomic(uint32_t, uint64_t, emu::AtomicOp, uint64_t, uint64_t) override;

 private:
  static constexpr size_t kGuardSize = 64;

  // Both vectors have the guards around them.
  struct Extent {
    uint64_t offset = 0;
    uint64_t length = 0;
    std::vector<std::byte> actual;
    std::vector<std::byte> expected;
  };
  struct Region {
    uint8_t rights = kNone;
    bool valid = true;
    std::map<uint64_t, uint64_t> ranges;  // begin and end, until Seal
    std::vector<Extent> extents;
  };

  void AddExtent(uint32_t stag, Region& region, uint64_t offset, uint64_t length);
  // The extent that holds these bytes; null when none does. Of a const Region a const one.
  template <typename R>
  static auto Find(R& region, uint64_t offset, uint64_t length) -> decltype(region.extents.data());
  // Where in an extent's vectors the byte at `offset` is.
  static size_t IndexOf(const Extent& extent, uint64_t offset) { return kGuardSize + (offset - extent.offset); }
  Extent& Known(uint32_t stag, uint64_t offset, uint64_t length);
  void Unpin(uint32_t) override { --pins_; }

  std::map<uint32_t, Region> regions_;
  uint32_t next_local_ = 1;
  int pins_ = 0;
};

}  // namespace stagecoach::testing
