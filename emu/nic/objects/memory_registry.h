// MemoryRegistry: STags and the memory they name: regions (ibv_mr) and memory windows of types 1 and 2B (ibv_mw).
//
// An STag is a 24-bit index and an 8-bit key (RFC 5040 section 2.1 calls the key the consumer's part). Regions get a
// fresh index and key from the registry; a window keeps its index for life and gets another key at each bind, chosen by
// its consumer (type 2) or by who posts the bind for it (type 1).
//
// The index is a keyed permutation of a dense slot number, so STags are hard to guess while the table stays dense.
// Slots come in chunks that are never freed before the registry. Each has one atomic word: valid bit, key, pin count.
//
//   pin:        add one to the count; if the word it replaced was valid and had the key, the slot's fields may be read;
//   else take it back invalidate: clear the valid bit (only one caller succeeds), then wait until the count is 0
//   rewrite:    only while invalid and unpinned, published by setting the valid bit (release)
//
// A pinner that comes too late adds and takes back without reading a field, so transient counts do no harm. Pins are
// held during one call on a stream, so the wait of an invalidation is bounded by one such call. No lock is taken on the
// data path.
//
// Beside it stands the slot's guard (MemoryGuard): odd while the slot is valid, and never the same number again. Who
// had a pin can have the bytes read later, by another process, too, and know afterwards whether it was in time.
//
// A freed slot goes to the tail of a FIFO quarantine and is used again only when at least the profile's number of
// others are behind it: a late use of a dead STag is kStaleStag, not an access to somebody else's memory.
//
// Regions never own the memory they name. Where hardware would keep pages that a program unmaps, the next access here
// is refused: kUnmapped (base/safe_copy, whose handler registering installs). Threading: every member from any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>

#include "base/result.h"
#include "emu/engine/memory_port.h"
#include "emu/nic/device_profile.h"
#include "emu/nic/objects/stag_source.h"
#include "emu/nic/objects/work_types.h"

namespace stagecoach::emu {

constexpr uint32_t StagIndex(uint32_t stag) {
  return stag >> 8;
}
constexpr uint32_t StagKey(uint32_t stag) {
  return stag & 0xff;
}

struct RegionRequest {
  uint32_t pd = 0;
  void* address = nullptr;
  uint64_t length = 0;  // 0 is allowed
  uint64_t iova = 0;    // the tagged offset of the first byte; ignored with kAccessZeroBased
  uint32_t access = 0;  // AccessFlags; reading locally is always allowed
};

// What a region is to become; what is not set stays (ibv_rereg_mr).
struct RegionChange {
  struct Range {
    void* address = nullptr;
    uint64_t length = 0;
  };
  std::optional<uint32_t> pd;
  std::optional<Range> range;  // addressed by its own address from then on, or from 0 with kAccessZeroBased
  std::optional<uint32_t> access;
};

class MemoryRegistry {
 public:
  // `profile` must outlive the registry.
  MemoryRegistry(const DeviceProfile& profile, std::unique_ptr<StagSource> source);
  ~MemoryRegistry();
  MemoryRegistry(const MemoryRegistry&) = delete;
  MemoryRegistry& operator=(const MemoryRegistry&) = delete;

  // Registers memory and returns its STag, which is both lkey and rkey, as on iWARP hardware. EINVAL: rights that
  // exclude each other, unknown rights, or a range that wraps; EFAULT: pages that are not mapped, or not writable
  // though kAccessLocalWrite asks; ENOMEM: the device is full.
  Result<uint32_t, int> Register(const RegionRequest& request);
  // Returns when no access to the region is under way. EINVAL: no such region; EBUSY: a window is bound to it.
  int Deregister(uint32_t stag);

  // Changes a region. With another range it gets another key, and what still uses the old one is refused; without, it
  // keeps its key, as devices have it. Returns when no access that was judged by what it was before is under way.
  // Errors as Register's and EBUSY, while a window is bound to it; the region is then as it was.
  Result<uint32_t, int> Reregister(uint32_t stag, const RegionChange& change);

  // A window of `pd`, unbound. Its STag's index is final; the key changes with each bind.
  Result<uint32_t, int> AllocateWindow(uint32_t pd, WindowType type = WindowType::kType2);
  int DeallocateWindow(uint32_t stag);

  // --- What posted work asks for ---

  // A bind posted on QP (pd, qp_number). Returns where in its region the window begins, in bytes; 0 if it has none
  // after a bind of length 0. Empty, and nothing changed: the window is not of the type named or, of type 2, bound
  // already (it is invalidated first); the region does not allow binding or the rights asked for; the range is beyond
  // the region or, for type 2, empty; type 1 is to be zero-based. A type 1 window that is bound loses that binding
  // first, and has none at all after a bind of length 0.
  std::optional<uint64_t> BindWindow(uint32_t pd, uint32_t qp_number, const WindowBinding& binding);
  // IBV_WR_LOCAL_INV. Only type 2 windows bound to this QP; plain regions end with deregistration, and type 1 windows
  // with another bind.
  Result<void, MemoryFault> InvalidateLocally(uint32_t pd, uint32_t qp_number, uint32_t stag);
  // Send with Invalidate from the peer (RFC 5040 section 5.1). Plain regions refuse: kNoPermission.
  Result<void, MemoryFault> InvalidateRemotely(uint32_t pd, uint32_t qp_number, uint32_t stag);
  // A QP is going: its type 2 windows lose their binding.
  void UnbindWindowsOf(uint32_t qp_number);

  // --- Data path ---

  struct Pinned {
    uint32_t token = 0;
    MutableBytes bytes;
    uint64_t offset = 0;  // from the first byte of the region or window
    MemoryGuard guard;
  };
  // On success Unpin(token) must follow.
  Result<Pinned, MemoryFault> Pin(uint32_t pd, uint32_t qp_number, uint32_t stag, uint64_t tagged_offset,
                                  uint64_t length, MemoryAccess access);
  void Unpin(uint32_t token);

  struct Counters {
    uint64_t registrations = 0;
    uint64_t deregistrations = 0;
    uint64_t window_binds = 0;
    uint64_t local_invalidations = 0;
    uint64_t remote_invalidations = 0;
    uint64_t stale_uses = 0;
    uint32_t regions = 0;  // now
    uint32_t windows = 0;  // now
  };
  Counters counters() const;

 private:
  struct Slot;
  struct Chunk;
  static constexpr uint32_t kIndexBits = 24;
  static constexpr uint32_t kChunkBits = 12;
  static constexpr uint32_t kChunkSlots = 1u << kChunkBits;
  static constexpr uint32_t kChunks = 1u << (kIndexBits - kChunkBits);

  uint32_t Permute(uint32_t slot) const;
  uint32_t Unpermute(uint32_t index) const;
  // Null for an index that has never been handed out.
  Slot* Find(uint32_t stag, uint32_t* number) const;
  Result<uint32_t, int> TakeSlot();
  void FreeSlot(uint32_t number);
  // Out of the quarantine.
  void Release(uint32_t number);
  Slot& At(uint32_t number) const;
  uint32_t StagOf(uint32_t number) const;
  // 0, or the errno that the rights and range deserve, pages aside.
  int CheckRegion(uint64_t address, uint64_t length, uint64_t iova, uint32_t access) const;
  void Unbind(Slot& window);
  Result<void, MemoryFault> InvalidateWindow(uint32_t pd, uint32_t qp_number, uint32_t stag);
  // Ends the validity of the slot under `key`; true for the one caller who did it.
  static bool ClearValid(Slot& slot, uint32_t key);
  static void WaitUnpinned(const Slot& slot);

  const DeviceProfile& profile_;
  std::array<uint32_t, 4> round_keys_{};
  std::array<std::atomic<Chunk*>, kChunks> chunks_{};
  std::atomic<uint32_t> slots_used_{0};  // slots ever handed out: [0, slots_used_) exist

  mutable std::mutex mutex_;  // control path: everything below, and slots' fields while they are invalid
  std::unique_ptr<StagSource> source_;
  // Free slots, linked with each other, so that freeing one needs no memory.
  static constexpr uint32_t kNoSlot = ~uint32_t{0};
  struct Quarantine {
    uint32_t oldest = kNoSlot;
    uint32_t newest = kNoSlot;
    uint32_t size = 0;
  };
  Quarantine quarantine_;
  std::set<uint32_t> windows_;  // slot numbers
  Counters counters_;           // those below are counted without the lock
  std::atomic<uint64_t> local_invalidations_{0};
  std::atomic<uint64_t> remote_invalidations_{0};
  mutable std::atomic<uint64_t> stale_uses_{0};
};

// The registry as one connection sees it. Lives as long as the connection; the registry outlives both.
class RegistryPort final : public MemoryPort {
 public:
  // `receive_pd`: that of the SRQ, if the QP has one.
  RegistryPort(MemoryRegistry& registry, uint32_t pd, uint32_t receive_pd, uint32_t qp_number)
      : registry_(registry), pd_(pd), receive_pd_(receive_pd), qp_number_(qp_number) {}

  Result<MemoryPin, MemoryFault> Pin(uint32_t stag, uint64_t tagged_offset, uint64_t length,
                                     MemoryAccess access) override;
  Result<void, MemoryFault> InvalidateRemotely(uint32_t stag) override;
  Result<AtomicOutcome, MemoryFault> Atomic(uint32_t stag, uint64_t tagged_offset, AtomicOp op, uint64_t operand,
                                            uint64_t compare) override;

 protected:
  void Unpin(uint32_t token) override;

 private:
  MemoryRegistry& registry_;
  const uint32_t pd_;
  const uint32_t receive_pd_;
  const uint32_t qp_number_;
};

}  // namespace stagecoach::emu
