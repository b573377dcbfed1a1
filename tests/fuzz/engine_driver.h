// The driver's end of the contract in rpcrdma/core/engine.h, for targets that run an engine: memory, Sends and
// registrations whose rules are properties.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "rpcrdma/core/engine.h"
#include "tests/fuzz/messages.h"

namespace stagecoach::rpcrdma::fuzz {

inline constexpr uint32_t kArenaKey = 5;   // local key of the arenas
inline constexpr uint32_t kPooledKey = 7;  // of memory that needs no registration of its own

class FuzzMemory final : public ConnectionMemory {
 public:
  struct Region {
    MutableBytes memory;
    MemoryUse use = MemoryUse::kReadByPeer;
    uint32_t handle = 0;
    uint64_t offset = 0;
    bool ended_by_peer = false;
    Block written;  // what the peer wrote, where it may write
  };

  ~FuzzMemory() override { FUZZ_PROPERTY(blocks_.empty() && used == 0); }

  std::optional<Registration> Register(ConstBytes memory, MemoryUse use, LastingMemory* /*lasting*/) override {
    FUZZ_PROPERTY(!memory.empty());
    if (refuse_next) {
      refuse_next = false;
      ++refused[use];
      return std::nullopt;
    }
    const bool by_peer = use == MemoryUse::kReadByPeer || use == MemoryUse::kWrittenByPeer;
    if (pooled && !by_peer) return Registration{.id = 0, .local_key = kPooledKey};
    Region region{.memory = {const_cast<std::byte*>(memory.data()), memory.size()}, .use = use};
    if (use == MemoryUse::kWrittenByPeer || use == MemoryUse::kReadSink) {
      FUZZ_PROPERTY(!Reachable(memory));  // nobody else writes there, or reads what is written
    }
    const uint32_t id = next_++;
    region.handle = HandleOf(id);
    region.offset = uint64_t{id} << 32;
    if (use == MemoryUse::kWrittenByPeer) region.written.assign(memory.begin(), memory.end());
    const Registration registration{id, LocalKeyOf(id), region.handle, region.offset};
    regions.emplace(id, std::move(region));
    return registration;
  }
  std::optional<MutableBytes> Allocate(size_t bytes) override {
    FUZZ_PROPERTY(bytes > 0);
    if (bytes > bytes_max - std::min(bytes_max, used)) return std::nullopt;
    used += bytes;
    auto block = std::make_unique<std::byte[]>(bytes);
    const MutableBytes memory(block.get(), bytes);
    blocks_[memory.data()] = {std::move(block), bytes};
    return memory;
  }
  void Free(MutableBytes memory) override {
    const auto found = blocks_.find(memory.data());
    FUZZ_PROPERTY(found != blocks_.end() && found->second.second == memory.size());
    FUZZ_PROPERTY(!Reachable(memory));
    used -= memory.size();
    blocks_.erase(found);
  }
  void ReturnReceive(uint32_t slot) override { on_return(slot); }

  static uint32_t HandleOf(uint32_t id) { return 0x1000 + id; }
  static uint32_t LocalKeyOf(uint32_t id) { return 0x100000 + id; }

  // The registration undone, or gone with the connection.
  void Undo(uint32_t id) { FUZZ_PROPERTY(regions.erase(id) == 1); }
  // What a segment of ours names, if all of it may be used so. 0: nothing.
  uint32_t Find(const Segment& segment, MemoryUse use) const {
    const auto found = regions.find(segment.handle - HandleOf(0));
    if (found == regions.end() || found->second.use != use || found->second.ended_by_peer) return 0;
    const Region& region = found->second;
    const bool inside = segment.offset >= region.offset && segment.offset - region.offset <= region.memory.size() &&
                        segment.length <= region.memory.size() - (segment.offset - region.offset);
    return inside ? found->first : 0;
  }
  // Whether a work request may use `memory` with this key.
  bool Usable(ConstBytes memory, uint32_t local_key, MemoryUse use) const {
    if (pooled && local_key == kPooledKey) return true;
    const auto found = regions.find(local_key - LocalKeyOf(0));
    return found != regions.end() && found->second.use == use && Inside(memory, found->second.memory);
  }
  // Whether a registration, ended by the peer or not, has any of `memory`.
  bool Reachable(ConstBytes memory) const {
    return std::any_of(regions.begin(), regions.end(),
                       [&](const auto& entry) { return Overlap(entry.second.memory, memory); });
  }
  bool InBlock(ConstBytes memory) const {
    return std::any_of(blocks_.begin(), blocks_.end(), [&](const auto& entry) {
      return Inside(memory, {entry.second.first.get(), entry.second.second});
    });
  }
  // The peer writes `bytes` from `at` on, as far as the region goes.
  void PeerWrites(uint32_t id, size_t at, ConstBytes bytes) {
    Region& region = regions.at(id);
    FUZZ_PROPERTY(region.use == MemoryUse::kWrittenByPeer && !region.ended_by_peer);
    if (at > region.memory.size()) return;
    CopyBytes(region.memory.subspan(at), bytes);
    CopyBytes(MutableBytes(region.written).subspan(at), bytes);
  }
  // Whoever exposes memory keeps it where it is and leaves alone what is there: what the peer wrote is still there.
  void CheckExposed() const {
    for (const auto& [id, region] : regions) {
      if (region.use == MemoryUse::kWrittenByPeer) FUZZ_PROPERTY(Same(region.memory, region.written));
    }
  }

  std::map<uint32_t, Region> regions;
  std::map<MemoryUse, uint32_t> refused;
  std::function<void(uint32_t)> on_return;
  uint64_t used = 0;
  uint64_t bytes_max = UINT64_MAX;
  bool refuse_next = false;
  bool pooled = false;

 private:
  uint32_t next_ = 1;
  std::map<const std::byte*, std::pair<std::unique_ptr<std::byte[]>, size_t>> blocks_;
};

// A block of equal buffers.
class FuzzArena {
 public:
  FuzzArena(uint32_t slots, uint32_t slot_size)
      : memory_(size_t{slots} * slot_size + kArenaTail),
        view{.memory = memory_, .slot_size = slot_size, .slots = slots, .local_key = kArenaKey} {}

 private:
  Block memory_;

 public:
  const BufferArena view;
};

// Sends that have not completed, and the Writes before each: what they use stays as it was.
class SendQueue {
 public:
  explicit SendQueue(const BufferArena& arena) : arena_(arena) {}

  void Write(const PostWrite& write) {
    FUZZ_PROPERTY(!write.source.empty() && write.source.size() == write.target.length);
    writes_.push_back({write.source, Block(write.source.begin(), write.source.end())});
  }
  // The bytes that leave.
  ConstBytes Post(const PostSend& send) {
    FUZZ_PROPERTY(send.slot >= arena_.first && send.slot - arena_.first < arena_.slots);
    FUZZ_PROPERTY(send.length > 0 && send.length <= arena_.slot_size);
    for (const InFlight& other : in_flight_) FUZZ_PROPERTY(other.slot != send.slot);
    const ConstBytes bytes = ConstBytes(arena_.slot(send.slot)).first(send.length);
    writes_.push_back({bytes, Block(bytes.begin(), bytes.end())});
    in_flight_.push_back({send.slot, std::exchange(writes_, {})});
    return bytes;
  }
  // Completes the `index`-th; its buffer's number.
  uint32_t Complete(size_t index) {
    const InFlight done = std::move(in_flight_[index]);
    in_flight_.erase(in_flight_.begin() + static_cast<ptrdiff_t>(index));
    for (const Used& used : done.used) FUZZ_PROPERTY(Same(used.memory, used.content));
    return done.slot;
  }
  size_t size() const { return in_flight_.size(); }
  bool has_writes() const { return !writes_.empty(); }
  void Lose() {
    in_flight_.clear();
    writes_.clear();
  }

 private:
  struct Used {
    ConstBytes memory;
    Block content;
  };
  struct InFlight {
    uint32_t slot = 0;
    std::vector<Used> used;
  };
  const BufferArena arena_;
  std::vector<Used> writes_;
  std::vector<InFlight> in_flight_;
};

}  // namespace stagecoach::rpcrdma::fuzz
