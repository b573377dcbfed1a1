#include "emu/nic/objects/memory_registry.h"

#include <cerrno>
#include <limits>
#include <optional>
#include <thread>

#include "base/check.h"
#include "base/mark.h"
#include "base/mutant.h"
#include "base/safe_copy/safe_copy.h"
#include "emu/nic/objects/memory_probe.h"

namespace stagecoach::emu {
namespace {

// The word of a slot: valid | key | pins. Pins stand lowest so that they are counted by plain additions.
constexpr uint64_t kValid = uint64_t{1} << 63;
constexpr int kKeyShift = 32;
constexpr uint64_t kPinMask = 0xffffffffu;
constexpr uint64_t kKeyMask = uint64_t{0xff} << kKeyShift;

constexpr uint32_t kAllAccess = kAccessLocalWrite | kAccessRemoteWrite | kAccessRemoteRead | kAccessRemoteAtomic |
                                kAccessWindowBind | kAccessZeroBased;
// Of a window. Local writing is no right of a window, which nothing is done through locally, and asks for nothing more.
constexpr uint32_t kWindowAccess = kAccessLocalWrite | kAccessRemoteWrite | kAccessRemoteRead | kAccessRemoteAtomic;

constexpr uint32_t kHalfBits = 12;
constexpr uint32_t kHalfMask = (1u << kHalfBits) - 1;

// One round of the permutation: any function of the half and a secret does, since a Feistel network inverts whatever it
// is.
uint32_t Round(uint32_t half, uint32_t key) {
  uint32_t x = (half ^ key) * 0x9e3779b1u;
  x ^= x >> 15;
  x *= 0x85ebca77u;
  x ^= x >> 13;
  return x & kHalfMask;
}

bool IsCurrent(uint64_t word, uint32_t key) {
  return (word & (kValid | kKeyMask)) == (kValid | (uint64_t{key} << kKeyShift));
}

bool Grants(uint32_t access, MemoryAccess wanted) {
  switch (wanted) {
    case MemoryAccess::kLocalRead:
      return true;
    case MemoryAccess::kLocalWrite:
    case MemoryAccess::kReceive:
      return (access & kAccessLocalWrite) != 0;
    case MemoryAccess::kReadSink:
      return (access & kAccessLocalWrite) != 0 && (access & kAccessRemoteWrite) != 0;
    case MemoryAccess::kRemoteRead:
      return (access & kAccessRemoteRead) != 0;
    case MemoryAccess::kRemoteWrite:
      return (access & kAccessRemoteWrite) != 0;
    case MemoryAccess::kRemoteAtomic:
      return (access & kAccessRemoteAtomic) != 0;
  }
  return false;
}

bool IsLocal(MemoryAccess access) {
  return access == MemoryAccess::kLocalRead || access == MemoryAccess::kLocalWrite ||
         access == MemoryAccess::kReceive || access == MemoryAccess::kReadSink;
}

}  // namespace

struct MemoryRegistry::Slot {
  enum class Kind : uint8_t { kFree, kRegion, kWindow };

  std::atomic<uint64_t> word{0};
  // Counted up by who makes the slot valid, before, and by who ends that, after.
  std::atomic<uint64_t> guard{0};
  std::atomic<uint32_t> bound_windows{0};  // of a region

  // Written under the registry's lock while the slot is invalid and unpinned; read by pinners while it is valid, or
  // under the lock.
  Kind kind = Kind::kFree;
  uint32_t pd = 0;
  uint32_t access = 0;
  WindowType type = WindowType::kType2;  // window
  uint32_t qp_number = 0;                // type 2 window: where it is bound
  uint32_t parent = 0;                   // window: slot number of its region
  std::byte* base = nullptr;
  uint64_t length = 0;
  uint64_t iova = 0;
  // In quarantine: who went in before and after.
  uint32_t older = kNoSlot;
  uint32_t newer = kNoSlot;

  // Transient counts of late pinners come and go at any time and must survive.
  void Publish(uint32_t key) {
    guard.fetch_add(1, std::memory_order_relaxed);
    uint64_t seen = word.load(std::memory_order_relaxed);
    while (!word.compare_exchange_weak(seen, (seen & kPinMask) | kValid | (uint64_t{key} << kKeyShift),
                                       std::memory_order_release, std::memory_order_relaxed)) {
    }
  }
  uint32_t Key() const { return static_cast<uint32_t>((word.load(std::memory_order_relaxed) & kKeyMask) >> kKeyShift); }
  bool Valid() const { return (word.load(std::memory_order_relaxed) & kValid) != 0; }
  void SetKeyWhileInvalid(uint32_t key) {
    uint64_t seen = word.load(std::memory_order_relaxed);
    while (!word.compare_exchange_weak(seen, (seen & kPinMask) | (uint64_t{key} << kKeyShift),
                                       std::memory_order_release, std::memory_order_relaxed)) {
    }
  }
};

struct MemoryRegistry::Chunk {
  std::array<Slot, kChunkSlots> slots;
};

MemoryRegistry::MemoryRegistry(const DeviceProfile& profile, std::unique_ptr<StagSource> source)
    : profile_(profile), source_(std::move(source)) {
  // All limits together must leave fresh indices when the quarantine is full.
  STAGECOACH_CHECK(uint64_t{profile_.max_mr} + profile_.max_mw + profile_.stag_quarantine + 2 < (1u << kIndexBits));
  for (uint32_t& key : round_keys_) key = static_cast<uint32_t>(source_->Next());
  CatchMemoryFaults();  // inline data needs no region
}

MemoryRegistry::~MemoryRegistry() {
  for (std::atomic<Chunk*>& chunk : chunks_) delete chunk.load(std::memory_order_relaxed);
}

uint32_t MemoryRegistry::Permute(uint32_t slot) const {
  uint32_t left = slot >> kHalfBits;
  uint32_t right = slot & kHalfMask;
  for (uint32_t key : round_keys_) {
    const uint32_t next = left ^ Round(right, key);
    left = right;
    right = next;
  }
  return (left << kHalfBits) | right;
}

uint32_t MemoryRegistry::Unpermute(uint32_t index) const {
  uint32_t left = index >> kHalfBits;
  uint32_t right = index & kHalfMask;
  for (size_t i = round_keys_.size(); i-- > 0;) {
    const uint32_t previous = right ^ Round(left, round_keys_[i]);
    right = left;
    left = previous;
  }
  return (left << kHalfBits) | right;
}

MemoryRegistry::Slot& MemoryRegistry::At(uint32_t number) const {
  return chunks_[number >> kChunkBits].load(std::memory_order_acquire)->slots[number & (kChunkSlots - 1)];
}

uint32_t MemoryRegistry::StagOf(uint32_t number) const {
  return (Permute(number) << 8) | At(number).Key();
}

MemoryRegistry::Slot* MemoryRegistry::Find(uint32_t stag, uint32_t* number) const {
  const uint32_t index = StagIndex(stag);
  const uint32_t slot = Unpermute(index);
  // Index 0 is never used: programs and devices take STag 0 for "none".
  if (index == 0 || slot >= slots_used_.load(std::memory_order_acquire)) return nullptr;
  *number = slot;
  return &At(slot);
}

Result<uint32_t, int> MemoryRegistry::TakeSlot() {
  if (quarantine_.size > 0 && STAGECOACH_MUTANT("stag-reused-early", "a freed STag index is used again at once")) {
    const uint32_t number = quarantine_.newest;
    Release(number);
    return number;
  }
  if (quarantine_.size > profile_.stag_quarantine) {
    STAGECOACH_MARK("memory.stag_index_out_of_quarantine");
    const uint32_t number = quarantine_.oldest;
    Release(number);
    return number;
  }
  uint32_t number = slots_used_.load(std::memory_order_relaxed);
  if (number < (1u << kIndexBits) && Permute(number) == 0) ++number;
  if (number >= (1u << kIndexBits)) return Err(ENOMEM);
  std::atomic<Chunk*>& chunk = chunks_[number >> kChunkBits];
  if (chunk.load(std::memory_order_relaxed) == nullptr) chunk.store(new Chunk, std::memory_order_release);
  slots_used_.store(number + 1, std::memory_order_release);
  return number;
}

void MemoryRegistry::FreeSlot(uint32_t number) {
  Slot& slot = At(number);
  slot.kind = Slot::Kind::kFree;
  slot.older = quarantine_.newest;
  slot.newer = kNoSlot;
  (quarantine_.newest != kNoSlot ? At(quarantine_.newest).newer : quarantine_.oldest) = number;
  quarantine_.newest = number;
  ++quarantine_.size;
}

void MemoryRegistry::Release(uint32_t number) {
  const Slot& slot = At(number);
  (slot.older != kNoSlot ? At(slot.older).newer : quarantine_.oldest) = slot.newer;
  (slot.newer != kNoSlot ? At(slot.newer).older : quarantine_.newest) = slot.older;
  --quarantine_.size;
}

bool MemoryRegistry::ClearValid(Slot& slot, uint32_t key) {
  uint64_t seen = slot.word.load(std::memory_order_relaxed);
  do {
    if (!IsCurrent(seen, key)) return false;
  } while (
      !slot.word.compare_exchange_weak(seen, seen & ~kValid, std::memory_order_acq_rel, std::memory_order_relaxed));
  slot.guard.fetch_add(1, std::memory_order_seq_cst);
  return true;
}

void MemoryRegistry::WaitUnpinned(const Slot& slot) {
  // A pin lasts for one call on a stream, so this is short; yielding lets its holder finish on a single processor.
  const auto is_pinned = [&slot] { return (slot.word.load(std::memory_order_acquire) & kPinMask) != 0; };
  if (!is_pinned()) return;
  STAGECOACH_MARK("memory.invalidation_waits_for_a_pin");
  while (is_pinned()) std::this_thread::yield();
}

int MemoryRegistry::CheckRegion(uint64_t address, uint64_t length, uint64_t iova, uint32_t access) const {
  if ((access & ~kAllAccess) != 0) return EINVAL;
  // A peer that may write memory its owner may not makes no sense, and verbs forbid it (ibv_reg_mr(3)).
  if ((access & (kAccessRemoteWrite | kAccessRemoteAtomic)) != 0 && (access & kAccessLocalWrite) == 0) return EINVAL;
  if (length > profile_.max_mr_size) return EINVAL;
  if (length > std::numeric_limits<uint64_t>::max() - address) return EINVAL;
  if (length > std::numeric_limits<uint64_t>::max() - iova) return EINVAL;
  return 0;
}

Result<uint32_t, int> MemoryRegistry::Register(const RegionRequest& request) {
  const uint64_t iova = (request.access & kAccessZeroBased) != 0 ? 0 : request.iova;
  const uint64_t address = reinterpret_cast<uintptr_t>(request.address);
  if (const int error = CheckRegion(address, request.length, iova, request.access)) return Err(error);
  // A handler that the program has installed meanwhile would see what is ours.
  CatchMemoryFaults();
  if (const int error = ProbeMemory(request.address, request.length, (request.access & kAccessLocalWrite) != 0)) {
    return Err(error);
  }

  std::lock_guard lock(mutex_);
  if (counters_.regions >= profile_.max_mr) {
    STAGECOACH_MARK("memory.regions_used_up");
    return Err(ENOMEM);
  }
  const Result<uint32_t, int> number = TakeSlot();
  if (!number) return number;
  Slot& slot = At(*number);
  WaitUnpinned(slot);
  uint32_t key = static_cast<uint32_t>(source_->Next()) & 0xff;
  if (key == slot.Key()) key = (key + 1) & 0xff;
  slot.kind = Slot::Kind::kRegion;
  slot.pd = request.pd;
  slot.access = request.access;
  slot.base = static_cast<std::byte*>(request.address);
  slot.length = request.length;
  slot.iova = iova;
  slot.bound_windows.store(0, std::memory_order_relaxed);
  slot.Publish(key);
  ++counters_.registrations;
  ++counters_.regions;
  return StagOf(*number);
}

Result<uint32_t, int> MemoryRegistry::Reregister(uint32_t stag, const RegionChange& change) {
  uint32_t number = 0;
  RegionRequest now;
  {
    std::lock_guard lock(mutex_);
    const Slot* slot = Find(stag, &number);
    if (slot == nullptr || slot->kind != Slot::Kind::kRegion || !IsCurrent(slot->word.load(), StagKey(stag))) {
      return Err(EINVAL);
    }
    now = {.pd = slot->pd, .address = slot->base, .length = slot->length, .iova = slot->iova, .access = slot->access};
  }
  const bool was_zero_based = (now.access & kAccessZeroBased) != 0;
  now.pd = change.pd.value_or(now.pd);
  now.access = change.access.value_or(now.access);
  if (change.range) {
    now.address = change.range->address;
    now.length = change.range->length;
  }
  const uint64_t address = reinterpret_cast<uintptr_t>(now.address);
  if ((now.access & kAccessZeroBased) != 0) {
    now.iova = 0;
  } else if (change.range || was_zero_based) {
    now.iova = address;
  }
  if (const int error = CheckRegion(address, now.length, now.iova, now.access)) return Err(error);
  if (const int error = ProbeMemory(now.address, now.length, (now.access & kAccessLocalWrite) != 0)) return Err(error);

  // Windows are bound under the lock, so none is while we have it.
  std::lock_guard lock(mutex_);
  Slot& slot = At(number);
  if (slot.bound_windows.load(std::memory_order_acquire) != 0) return Err(EBUSY);
  if (slot.kind != Slot::Kind::kRegion || !ClearValid(slot, StagKey(stag))) return Err(EINVAL);
  WaitUnpinned(slot);
  slot.pd = now.pd;
  slot.access = now.access;
  slot.base = static_cast<std::byte*>(now.address);
  slot.length = now.length;
  slot.iova = now.iova;
  uint32_t key = slot.Key();
  if (change.range) {
    key = static_cast<uint32_t>(source_->Next()) & 0xff;
    if (key == slot.Key()) key = (key + 1) & 0xff;
  }
  slot.Publish(key);
  return StagOf(number);
}

int MemoryRegistry::Deregister(uint32_t stag) {
  uint32_t number = 0;
  Slot* slot = nullptr;
  {
    std::lock_guard lock(mutex_);
    slot = Find(stag, &number);
    if (slot == nullptr || slot->kind != Slot::Kind::kRegion) return EINVAL;
    if (slot->bound_windows.load(std::memory_order_acquire) != 0) {
      STAGECOACH_MARK("memory.region_kept_by_its_windows");
      return EBUSY;
    }
    if (!ClearValid(*slot, StagKey(stag))) return EINVAL;
  }
  // Without the lock, so that others register meanwhile. The slot is invalid and still ours: nobody else can free or
  // reuse it.
  WaitUnpinned(*slot);
  std::lock_guard lock(mutex_);
  FreeSlot(number);
  ++counters_.deregistrations;
  --counters_.regions;
  return 0;
}

Result<uint32_t, int> MemoryRegistry::AllocateWindow(uint32_t pd, WindowType type) {
  std::lock_guard lock(mutex_);
  if (counters_.windows >= profile_.max_mw) {
    STAGECOACH_MARK("memory.windows_used_up");
    return Err(ENOMEM);
  }
  // First what needs memory.
  std::set<uint32_t> entry{kNoSlot};
  const Result<uint32_t, int> number = TakeSlot();
  if (!number) return number;
  Slot& slot = At(*number);
  WaitUnpinned(slot);
  slot.kind = Slot::Kind::kWindow;
  slot.pd = pd;
  slot.type = type;
  slot.qp_number = 0;
  slot.SetKeyWhileInvalid(static_cast<uint32_t>(source_->Next()) & 0xff);
  auto node = entry.extract(entry.begin());
  node.value() = *number;
  windows_.insert(std::move(node));
  ++counters_.windows;
  return StagOf(*number);
}

int MemoryRegistry::DeallocateWindow(uint32_t stag) {
  std::lock_guard lock(mutex_);
  uint32_t number = 0;
  Slot* slot = Find(stag, &number);
  if (slot == nullptr || slot->kind != Slot::Kind::kWindow) return EINVAL;
  if (slot->Valid()) STAGECOACH_MARK("memory.window_freed_while_bound");
  // Losing to a concurrent invalidation is fine: the one who clears the valid bit settles with the region.
  Unbind(*slot);
  windows_.erase(number);
  FreeSlot(number);
  --counters_.windows;
  return 0;
}

std::optional<uint64_t> MemoryRegistry::BindWindow(uint32_t pd, uint32_t qp_number, const WindowBinding& binding) {
  std::lock_guard lock(mutex_);
  uint32_t number = 0;
  uint32_t region_number = 0;
  Slot* window = Find(binding.window_rkey, &number);
  Slot* region = Find(binding.region_lkey, &region_number);
  if (window == nullptr || window->kind != Slot::Kind::kWindow || window->pd != pd || window->type != binding.type) {
    return std::nullopt;
  }
  const bool is_type1 = window->type == WindowType::kType1;
  if (!is_type1 && (window->Valid() || binding.length == 0)) return std::nullopt;
  if (binding.length == 0) {
    Unbind(*window);
    window->SetKeyWhileInvalid(StagKey(binding.new_rkey));
    return 0;
  }
  if (region == nullptr || region->kind != Slot::Kind::kRegion || region->pd != pd || !region->Valid() ||
      region->Key() != StagKey(binding.region_lkey)) {
    return std::nullopt;
  }
  if ((region->access & kAccessWindowBind) == 0) return std::nullopt;
  if ((binding.access & ~(kWindowAccess | (is_type1 ? 0u : kAccessZeroBased))) != 0) return std::nullopt;
  if ((binding.access & (kAccessRemoteWrite | kAccessRemoteAtomic)) != 0 && (region->access & kAccessLocalWrite) == 0) {
    return std::nullopt;
  }
  if (binding.address < region->iova) return std::nullopt;
  const uint64_t offset = binding.address - region->iova;
  const bool wraps = STAGECOACH_MUTANT("window-range-wraps", "offset and length of a window are added and may wrap");
  if (wraps ? offset + binding.length > region->length
            : offset > region->length || binding.length > region->length - offset) {
    return std::nullopt;
  }

  Unbind(*window);
  window->access = binding.access;
  window->qp_number = is_type1 ? 0 : qp_number;
  window->parent = region_number;
  window->base = region->base + offset;
  window->length = binding.length;
  window->iova = (binding.access & kAccessZeroBased) != 0 ? 0 : binding.address;
  region->bound_windows.fetch_add(1, std::memory_order_relaxed);
  window->Publish(StagKey(binding.new_rkey));
  ++counters_.window_binds;
  return offset;
}

void MemoryRegistry::Unbind(Slot& window) {
  const bool cleared = ClearValid(window, window.Key());
  WaitUnpinned(window);
  if (cleared) At(window.parent).bound_windows.fetch_sub(1, std::memory_order_release);
}

Result<void, MemoryFault> MemoryRegistry::InvalidateWindow(uint32_t pd, uint32_t qp_number, uint32_t stag) {
  uint32_t number = 0;
  Slot* slot = Find(stag, &number);
  if (slot == nullptr) return Err(MemoryFault::kUnknownStag);
  // Our own pin keeps the fields from being rewritten while they are judged.
  if (!IsCurrent(slot->word.fetch_add(1, std::memory_order_acquire), StagKey(stag))) {
    STAGECOACH_MARK("memory.stale_stag_invalidated_again");
    Unpin(number);
    stale_uses_.fetch_add(1, std::memory_order_relaxed);
    return Err(MemoryFault::kStaleStag);
  }
  std::optional<MemoryFault> fault;
  if (slot->pd != pd) {
    fault = MemoryFault::kForeignStag;
  } else if (slot->kind != Slot::Kind::kWindow || slot->type == WindowType::kType1) {
    fault = MemoryFault::kNoPermission;
  } else if (slot->qp_number != qp_number) {
    fault = MemoryFault::kForeignStag;
  } else if (!ClearValid(*slot, StagKey(stag))) {
    fault = MemoryFault::kStaleStag;
  }
  const uint32_t parent = slot->parent;
  Unpin(number);
  if (fault) {
    STAGECOACH_MARK("memory.invalidation_refused");
    return Err(*fault);
  }
  WaitUnpinned(*slot);
  At(parent).bound_windows.fetch_sub(1, std::memory_order_release);
  return {};
}

Result<void, MemoryFault> MemoryRegistry::InvalidateLocally(uint32_t pd, uint32_t qp_number, uint32_t stag) {
  Result<void, MemoryFault> done = InvalidateWindow(pd, qp_number, stag);
  if (done) local_invalidations_.fetch_add(1, std::memory_order_relaxed);
  return done;
}

Result<void, MemoryFault> MemoryRegistry::InvalidateRemotely(uint32_t pd, uint32_t qp_number, uint32_t stag) {
  Result<void, MemoryFault> done = InvalidateWindow(pd, qp_number, stag);
  if (done) remote_invalidations_.fetch_add(1, std::memory_order_relaxed);
  return done;
}

void MemoryRegistry::UnbindWindowsOf(uint32_t qp_number) {
  std::lock_guard lock(mutex_);
  for (uint32_t number : windows_) {
    Slot& slot = At(number);
    if (slot.Valid() && slot.type == WindowType::kType2 && slot.qp_number == qp_number) {
      STAGECOACH_MARK("memory.window_unbound_with_its_qp");
      Unbind(slot);
    }
  }
}

Result<MemoryRegistry::Pinned, MemoryFault> MemoryRegistry::Pin(uint32_t pd, uint32_t qp_number, uint32_t stag,
                                                                uint64_t tagged_offset, uint64_t length,
                                                                MemoryAccess access) {
  uint32_t number = 0;
  Slot* slot = Find(stag, &number);
  if (slot == nullptr) return Err(MemoryFault::kUnknownStag);
  if (!IsCurrent(slot->word.fetch_add(1, std::memory_order_acquire), StagKey(stag))) {
    STAGECOACH_MARK("memory.stale_stag_used");
    Unpin(number);
    stale_uses_.fetch_add(1, std::memory_order_relaxed);
    return Err(MemoryFault::kStaleStag);
  }
  const bool is_window = slot->kind == Slot::Kind::kWindow;
  std::optional<MemoryFault> fault;
  const uint64_t offset = tagged_offset - slot->iova;  // wraps when below; then it is beyond any length
  if (slot->pd != pd || (is_window && slot->type == WindowType::kType2 && slot->qp_number != qp_number)) {
    fault = MemoryFault::kForeignStag;
  } else if ((is_window && IsLocal(access)) || !Grants(slot->access, access)) {
    fault = MemoryFault::kNoPermission;
  } else if (STAGECOACH_MUTANT("access-range-wraps", "offset and length of an access are added and may wrap")
                 ? offset + length > slot->length
                 : tagged_offset < slot->iova || offset > slot->length || length > slot->length - offset) {
    fault = MemoryFault::kOutOfRange;
  }
  if (fault) {
    STAGECOACH_MARK("memory.access_refused");
    Unpin(number);
    return Err(*fault);
  }
  MemoryGuard guard{&slot->guard, slot->guard.load(std::memory_order_acquire)};
  // Invalidated since it was pinned.
  if (guard.value % 2 == 0) guard = {};
  return Pinned{number, MutableBytes(slot->base + offset, static_cast<size_t>(length)), offset, guard};
}

void MemoryRegistry::Unpin(uint32_t token) {
  At(token).word.fetch_sub(1, std::memory_order_release);
}

MemoryRegistry::Counters MemoryRegistry::counters() const {
  std::lock_guard lock(mutex_);
  Counters counters = counters_;
  counters.local_invalidations = local_invalidations_.load(std::memory_order_relaxed);
  counters.remote_invalidations = remote_invalidations_.load(std::memory_order_relaxed);
  counters.stale_uses = stale_uses_.load(std::memory_order_relaxed);
  return counters;
}

Result<MemoryPin, MemoryFault> RegistryPort::Pin(uint32_t stag, uint64_t tagged_offset, uint64_t length,
                                                 MemoryAccess access) {
  const Result<MemoryRegistry::Pinned, MemoryFault> pinned = registry_.Pin(
      access == MemoryAccess::kReceive ? receive_pd_ : pd_, qp_number_, stag, tagged_offset, length, access);
  if (!pinned) return Err(pinned.error());
  return MemoryPin(this, pinned->token, pinned->bytes, pinned->offset, pinned->guard);
}

Result<void, MemoryFault> RegistryPort::InvalidateRemotely(uint32_t stag) {
  return registry_.InvalidateRemotely(pd_, qp_number_, stag);
}

Result<AtomicOutcome, MemoryFault> RegistryPort::Atomic(uint32_t stag, uint64_t tagged_offset, AtomicOp op,
                                                        uint64_t operand, uint64_t compare) {
  constexpr size_t kSize = sizeof(uint64_t);
  if (tagged_offset % kSize != 0) return Err(MemoryFault::kMisaligned);
  const Result<MemoryPin, MemoryFault> pin = Pin(stag, tagged_offset, kSize, MemoryAccess::kRemoteAtomic);
  if (!pin) return Err(pin.error());
  std::byte* const at = pin->bytes().data();
  // The region's iova says nothing about where it lies in this process.
  if (reinterpret_cast<uintptr_t>(at) % std::atomic_ref<uint64_t>::required_alignment != 0) {
    return Err(MemoryFault::kMisaligned);
  }
  const std::optional<uint64_t> before =
      op == AtomicOp::kFetchAdd ? SafeFetchAdd(at, operand) : SafeCompareExchange(at, compare, operand);
  if (!before) return Err(MemoryFault::kUnmapped);
  return AtomicOutcome{.original = *before, .offset = pin->offset()};
}

void RegistryPort::Unpin(uint32_t token) {
  registry_.Unpin(token);
}

}  // namespace stagecoach::emu
