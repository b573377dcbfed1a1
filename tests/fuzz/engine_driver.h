// The driver's end of the contract in rpcrdma/core/engine.h, for targets that run an engine: memory, Sends, Receives
// and registrations whose rules are properties, and the order in which an engine is driven.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "rpcrdma/core/engine.h"
#include "tests/fuzz/input.h"
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
    bool window = false;
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
    region.window = windows && by_peer && id % 3 != 0;
    region.handle = HandleOf(id);
    region.offset = uint64_t{id} << 32;
    if (use == MemoryUse::kWrittenByPeer) region.written.assign(memory.begin(), memory.end());
    const Registration registration{.id = id,
                                    .local_key = LocalKeyOf(id),
                                    .handle = region.handle,
                                    .offset = region.offset,
                                    .window = region.window};
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
  bool windows = false;  // for some of what the peer may reach

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

// Takes out one of a number of things, whichever `choice` says.
template <typename T>
T TakeOut(std::vector<T>& from, size_t choice) {
  const auto at = from.begin() + static_cast<ptrdiff_t>(choice % from.size());
  T taken = std::move(*at);
  from.erase(at);
  return taken;
}

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
    const InFlight done = TakeOut(in_flight_, index);
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

// Receives that are posted, the first to be used first. Who posts one is done with what was in it.
class ReceiveQueue {
 public:
  struct Received {
    uint32_t slot = 0;
    ConstBytes bytes;
  };

  explicit ReceiveQueue(const BufferArena& arena) : arena_(arena) {}

  void Post(uint32_t slot) {
    FUZZ_PROPERTY(slot < arena_.slots);
    FUZZ_PROPERTY(std::find(posted_.begin(), posted_.end(), slot) == posted_.end());
    posted_.push_back(slot);
    const MutableBytes memory = arena_.slot(slot);
    std::fill(memory.begin(), memory.end(), std::byte{0xee});  // the device's now
  }
  // A Send of the peer's, as much of it as the next one holds.
  Received Receive(ConstBytes bytes) {
    const uint32_t slot = posted_.front();
    posted_.pop_front();
    const MutableBytes memory = arena_.slot(slot);
    return {slot, memory.first(CopyBytes(memory, bytes))};
  }
  size_t size() const { return posted_.size(); }
  bool empty() const { return posted_.empty(); }
  void Lose() { posted_.clear(); }

 private:
  const BufferArena arena_;
  std::deque<uint32_t> posted_;
};

// An engine between its driver's end and a model of it, which the operations of an input set going. Those that derive
// from it say what the operations are, and what has to come of them.
class EngineWorld {
 protected:
  explicit EngineWorld(stagecoach::testing::FuzzInput& input) : input_(input) {}
  ~EngineWorld() = default;

  virtual ConnectionEngine& engine() = 0;
  virtual void Operate(uint8_t operation) = 0;
  virtual void Take(const Command& command) = 0;
  // Takes what the engine has for its program; false when it has nothing.
  virtual bool TakeForProgram() = 0;
  // The properties between operations.
  virtual void Check() = 0;

  void RunOperations() {
    constexpr size_t kMostOperations = 300;
    for (size_t n = 0; n < kMostOperations && !input_.empty(); ++n) {
      Operate(input_.Byte());
      Drain();
      Check();
    }
  }

  // Takes all that the engine has. After its Disconnect nobody carries out what it wants.
  virtual void Drain() {
    for (bool moved = true; moved;) {
      moved = false;
      while (!ending_) {
        const std::optional<Command> command = engine().TakeCommand();
        if (!command) break;
        moved = true;
        Take(*command);
      }
      while (TakeForProgram()) moved = true;
    }
    FUZZ_PROPERTY(!must_end_ || ending_);
  }

  void TakeInvalidate(const Invalidate& command) {
    if (at_once_ || command.by_peer) return CarryOut(command);
    invalidates_.push_back(command);
  }
  void CompleteInvalidate(size_t choice) {
    if (!invalidates_.empty()) CarryOut(TakeOut(invalidates_, choice));
  }
  virtual void CarryOut(const Invalidate& command) {
    memory_.Undo(command.registration);
    engine().OnInvalidated(command.tag, now_);
  }

  stagecoach::testing::FuzzInput& input_;
  FuzzMemory memory_;
  std::vector<Invalidate> invalidates_;
  Instant now_{};
  bool at_once_ = false;   // invalidation
  bool orderly_ = false;   // everything completes before the connection is lost
  bool must_end_ = false;  // Disconnect is to come
  bool may_end_ = false;   // Disconnect may come
  bool closed_ = false;    // by the program
  bool ending_ = false;    // Disconnect has come
  bool over_ = false;      // the connection is lost
};

}  // namespace stagecoach::rpcrdma::fuzz
