// What the protocol engines and the driver say to each other: commands as values, handlers, and the memory of a
// connection.
//
// An engine (Requester, Responder) does no I/O. It works on buffers that the driver provides and has registered, asks
// for memory through ConnectionMemory, which answers at once, and leaves commands in a ring; rpcrdma/verbs is their
// only interpreter and reports what became of them through the On...() handlers. Nothing here names verbs.
//
// Order: commands take effect in the order in which they are taken, as work requests of one queue pair do. An engine
// relies on nothing that only one transport promises: a completed Send proves that its memory is free again, not that
// the peer has it.
//
// Not thread-safe: owned by one connection, called on its loop.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>

#include "base/bytes.h"
#include "base/time.h"
#include "rpcrdma/wire/chunk_list.h"

namespace stagecoach::rpcrdma {

// Equal buffers in one registered block: for Sends, or for Receives. Sizes in bytes. The block ends with kArenaTail
// bytes that belong to no buffer and stay zero: XDR round-up to write from. Receive buffers shared by connections do
// not: `places` says where each of those that this one holds begins, and `memory` is empty.
inline constexpr size_t kArenaTail = 4;
struct BufferArena {
  MutableBytes memory;
  uint32_t slot_size = 0;
  uint32_t slots = 0;
  uint32_t local_key = 0;
  // Number of the first of `slots`: an engine that has a part of a block uses the block's numbers.
  uint32_t first = 0;
  std::byte* const* places = nullptr;

  MutableBytes slot(uint32_t index) const {
    if (places != nullptr) return MutableBytes(places[index], slot_size);
    return memory.subspan(size_t{index} * slot_size, slot_size);
  }
};

// What memory outside the arenas is wanted for.
enum class MemoryUse : uint8_t {
  kReadByPeer,     // remote read: Read chunks, Position-Zero Read chunk
  kWrittenByPeer,  // remote write: Write chunks, Reply chunk
  kReadSink,       // the local end of our RDMA Reads
  kWriteSource,    // the local end of our RDMA Writes
};

// Memory of the program that the driver registers once and uses for many calls (rpcrdma/verbs/lasting_memory.h).
// Engines only pass it on.
class LastingMemory;

struct Registration {
  // For Invalidate; 0 when there is nothing to undo (memory that is registered for as long as the connection lives).
  uint32_t id = 0;
  uint32_t local_key = 0;
  // The steering tag and tagged offset by which the peer reaches the first byte; meaningless for the local uses.
  uint32_t handle = 0;
  uint64_t offset = 0;
  // Of memory in a LastingMemory: what that was registered with served, and nothing was registered for this use alone.
  bool lasting = false;
  // `handle` is of a memory window that was bound for this use alone: a peer may invalidate it.
  bool window = false;
};

// Memory of one connection; no other connection can reach it (ARCHITECTURE section 7).
class ConnectionMemory {
 public:
  virtual ~ConnectionMemory() = default;

  // Makes `memory` (not empty) usable for `use`, at once; nullopt when the device refuses. `memory` stays where it is
  // until the registration was undone by Invalidate and OnInvalidated() said so, or the connection ended; with id 0,
  // until no operation uses it. So does `lasting`, which it lies in, unless that is null.
  virtual std::optional<Registration> Register(ConstBytes memory, MemoryUse use, LastingMemory* lasting) = 0;

  // Working memory within the peer's allowance; nullopt when that is used up for now.
  virtual std::optional<MutableBytes> Allocate(size_t bytes) = 0;
  virtual void Free(MutableBytes memory) = 0;

  // The receive buffer `slot`, where these are shared with other connections, is not looked at any more.
  virtual void ReturnReceive(uint32_t /*slot*/) {}
};

// --- Commands ---

// Post the receive buffer `slot`.
struct PostReceive {
  uint32_t slot = 0;
};

// Send `length` bytes from the start of the send buffer `slot`.
struct PostSend {
  uint32_t slot = 0;
  uint32_t length = 0;
  // Send With Invalidate of the peer's steering tag.
  std::optional<uint32_t> invalidate;
  // OnSendDone is wanted soon, because it frees more than the buffer. Otherwise the driver may report many Sends at
  // once, late.
  bool prompt = false;
};

// RDMA Read from the peer's `source` into local memory. OnReadDone(tag) follows.
struct PostRead {
  MutableBytes sink;
  uint32_t local_key = 0;
  Segment source;  // its length is sink.size()
  uint32_t tag = 0;
};

// RDMA Write from local memory to the peer's `target`. Its completion is implied by that of a later Send.
struct PostWrite {
  ConstBytes source;
  uint32_t local_key = 0;
  Segment target;
};

// Undo a registration. OnInvalidated(tag) follows, maybe at once.
struct Invalidate {
  uint32_t registration = 0;
  uint32_t tag = 0;
  bool by_peer = false;  // the peer's Send With Invalidate did it: only resources are left to return
};

// End the connection. OnDisconnected follows, when no memory is reachable any more.
struct Disconnect {
  enum class Why : uint8_t {
    kAsked,
    kCallTimedOut,
    kNoResources,
    kGrantOverrun,
    kReplyNotRead,
    kPeerOverdue,   // what the peer owes did not come in time (Responder::Config::data_time)
    kBadProperties  // version 2: properties of the peer are malformed, and this end sends it no error
  };
  Why why = Why::kAsked;
};

using Command = std::variant<PostReceive, PostSend, PostRead, PostWrite, Invalidate, Disconnect>;

// The handlers, as the driver sees any engine. After each handler the driver takes commands until there are none.
class ConnectionEngine {
 public:
  virtual ~ConnectionEngine() = default;

  // A Receive completed with `length` bytes. `invalidated` is the steering tag of ours that came with it in a Send With
  // Invalidate.
  virtual void OnReceive(uint32_t slot, uint32_t length, std::optional<uint32_t> invalidated, Instant now) = 0;
  virtual void OnSendDone(uint32_t slot, Instant now) = 0;
  virtual void OnReadDone(uint32_t tag, Instant now) = 0;
  virtual void OnInvalidated(uint32_t tag, Instant now) = 0;
  // The connection is gone, no work request is outstanding, and no registration made through it is reachable. Final.
  virtual void OnDisconnected(Instant now) = 0;

  virtual std::optional<Command> TakeCommand() = 0;

  // Whether something is expected soon, so that polling for it can pay.
  virtual bool Waiting() const = 0;

  // When OnDeadline wants to be called; may be earlier than necessary.
  virtual std::optional<Instant> Deadline() const = 0;
  virtual void OnDeadline(Instant now) = 0;
};

}  // namespace stagecoach::rpcrdma
