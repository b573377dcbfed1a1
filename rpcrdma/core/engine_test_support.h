// For the tests of the engines: memory that remembers what is registered, arenas, and ways to write and read messages.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/cursor.h"
#include "base/trace.h"
#include "rpcrdma/core/engine.h"
#include "rpcrdma/wire/header_v1.h"

namespace stagecoach::rpcrdma::testing {

inline Instant At(int64_t milliseconds) {
  return Instant{} + std::chrono::milliseconds(milliseconds);
}

inline std::vector<std::byte> Pattern(size_t size, uint8_t seed = 1) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(seed + i * 7);
  return bytes;
}

// Its direction, the second word of an RPC message (RFC 5531 section 9).
inline constexpr uint32_t kCallWord = 0;
inline constexpr uint32_t kReplyWord = 1;

// An RPC message as far as the engines look into it: XID, direction, then `words` further words.
inline std::vector<std::byte> Message(uint32_t xid, uint32_t direction, size_t words = 4) {
  std::vector<std::byte> bytes(8 + words * 4);
  ByteWriter out(bytes);
  out.U32(xid);
  out.U32(direction);
  for (size_t i = 0; i < words; ++i) out.U32(static_cast<uint32_t>(i));
  return bytes;
}

// Events of that name, without the time and the emitter: "call.held why=credit queued=1".
inline std::vector<std::string> Told(const TraceLog& trace, std::string_view event) {
  std::vector<std::string> found;
  for (const std::string& line : trace.lines()) {
    const size_t at = line.find(' ', line.find(' ') + 1) + 1;
    const std::string told = line.substr(at);
    if (told == event || told.starts_with(std::string(event) + " ")) found.push_back(told);
  }
  return found;
}
// The latest of them; empty when there is none.
inline std::string LastTold(const TraceLog& trace, std::string_view event) {
  const std::vector<std::string> found = Told(trace, event);
  return found.empty() ? std::string() : found.back();
}

class FakeMemory final : public ConnectionMemory {
 public:
  struct Live {
    ConstBytes memory;
    MemoryUse use = MemoryUse::kReadByPeer;
    uint32_t handle = 0;
    LastingMemory* lasting = nullptr;
  };

  explicit FakeMemory(uint64_t bytes_max = UINT64_MAX) : bytes_max_(bytes_max) {}
  ~FakeMemory() override { EXPECT_EQ(blocks_.size(), 0u) << "blocks never freed"; }

  std::optional<Registration> Register(ConstBytes memory, MemoryUse use, LastingMemory* lasting) override {
    EXPECT_FALSE(memory.empty());
    if (refuse_after.has_value() && (*refuse_after)-- == 0) {
      refuse_after.reset();
      return std::nullopt;
    }
    const bool reused = lasting != nullptr && reuses_lasting;
    // As of a pool: nothing to undo.
    if (reused && use == MemoryUse::kWriteSource) return Registration{.local_key = kLastingKey, .lasting = true};
    const uint32_t id = next_++;
    live[id] = {memory, use, 0x1000 + id, lasting};
    return Registration{id, 7, 0x1000 + id, reinterpret_cast<uintptr_t>(memory.data()), reused, windows};
  }
  std::optional<MutableBytes> Allocate(size_t bytes) override {
    if (used + bytes > bytes_max_) return std::nullopt;
    used += bytes;
    auto block = std::make_unique<std::byte[]>(bytes);
    const MutableBytes memory(block.get(), bytes);
    blocks_[memory.data()] = std::move(block);
    return memory;
  }
  void Free(MutableBytes memory) override {
    used -= memory.size();
    EXPECT_EQ(blocks_.erase(memory.data()), 1u) << "freed twice";
  }

  // The registration that a peer names, if it is valid for this.
  const Live* Find(const Segment& segment, MemoryUse use) const {
    for (const auto& [id, entry] : live) {
      const auto start = reinterpret_cast<uintptr_t>(entry.memory.data());
      if (entry.handle == segment.handle && entry.use == use && segment.offset >= start &&
          segment.offset + segment.length <= start + entry.memory.size()) {
        return &entry;
      }
    }
    return nullptr;
  }
  uint32_t IdOfHandle(uint32_t handle) const { return handle - 0x1000; }

  static constexpr uint32_t kLastingKey = 9;

  std::map<uint32_t, Live> live;
  std::optional<int> refuse_after;
  bool reuses_lasting = true;
  bool windows = true;
  uint64_t used = 0;

 private:
  const uint64_t bytes_max_;
  uint32_t next_ = 1;
  std::map<const std::byte*, std::unique_ptr<std::byte[]>> blocks_;
};

// A block of equal buffers.
class Arena {
 public:
  Arena(uint32_t slots, uint32_t slot_size)
      : memory_(size_t{slots} * slot_size + kArenaTail),
        view_{.memory = memory_, .slot_size = slot_size, .slots = slots, .local_key = 5} {}
  const BufferArena& view() const { return view_; }

 private:
  std::vector<std::byte> memory_;
  BufferArena view_;
};

// Takes commands and keeps them apart by kind, in order.
struct Taken {
  std::vector<uint32_t> receives;
  std::vector<PostSend> sends;
  std::vector<PostRead> reads;
  std::vector<PostWrite> writes;
  std::vector<Invalidate> invalidates;
  std::vector<Disconnect> disconnects;
  std::string order;  // R(eceive) S(end) r(ead) w(rite) I(nvalidate) D(isconnect)
};

inline Taken TakeAll(ConnectionEngine& engine) {
  Taken taken;
  while (std::optional<Command> command = engine.TakeCommand()) {
    if (const auto* receive = std::get_if<PostReceive>(&*command)) {
      taken.receives.push_back(receive->slot);
      taken.order += 'R';
    } else if (const auto* send = std::get_if<PostSend>(&*command)) {
      taken.sends.push_back(*send);
      taken.order += 'S';
    } else if (const auto* read = std::get_if<PostRead>(&*command)) {
      taken.reads.push_back(*read);
      taken.order += 'r';
    } else if (const auto* write = std::get_if<PostWrite>(&*command)) {
      taken.writes.push_back(*write);
      taken.order += 'w';
    } else if (const auto* invalidate = std::get_if<Invalidate>(&*command)) {
      taken.invalidates.push_back(*invalidate);
      taken.order += 'I';
    } else {
      taken.disconnects.push_back(std::get<Disconnect>(*command));
      taken.order += 'D';
    }
  }
  return taken;
}

// Writes header and message into a receive buffer; returns the length.
inline uint32_t Put(const BufferArena& arena, uint32_t slot, const Header& header, ConstBytes message) {
  ByteWriter out(arena.slot(slot));
  EncodeHeaderV1(header, out);
  out.Bytes(message);
  EXPECT_TRUE(out.ok());
  return static_cast<uint32_t>(out.position());
}
inline uint32_t PutRaw(const BufferArena& arena, uint32_t slot, ConstBytes bytes) {
  return static_cast<uint32_t>(CopyBytes(arena.slot(slot), bytes));
}

struct Sent {
  Header header;
  ConstBytes message;
};
inline Sent Decode(const BufferArena& arena, const PostSend& send) {
  ByteReader in(ConstBytes(arena.slot(send.slot)).first(send.length));
  auto header = DecodeHeaderV1(in);
  EXPECT_TRUE(header.has_value());
  return {header ? *header : Header{}, in.Rest()};
}

}  // namespace stagecoach::rpcrdma::testing
