// MemoryPort: how an engine turns (STag, tagged offset, length, access) into bytes. Memory, and not I/O.
//
// A port is bound to one QP and its protection domain, and to that of its Receives, which an SRQ may have brought
// along. So an engine never says on whose behalf it asks. A pin holds the region valid while bytes are being moved; it
// is taken just before a read or write of the stream and dropped right after, never held while waiting, so that
// deregistration and invalidation wait for at most one such call. It does not keep a program from unmapping the memory:
// whoever touches the bytes of a pin does it with base/safe_copy.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "base/bytes.h"
#include "base/result.h"

namespace stagecoach::emu {

// What a use of memory needs. Local access is by lkey (an SGE); remote access by the STag a peer names.
enum class MemoryAccess : uint8_t {
  kLocalRead,
  kLocalWrite,
  kReceive,  // a Receive's buffer: as kLocalWrite, in the domain that the Receives are of
  // The sink of an iWARP Read, by lkey. The peer's response names it by STag as a Write would (RFC 5040 section 4.5),
  // so the region must admit the peer's writing, too.
  kReadSink,
  kRemoteRead,
  kRemoteWrite,
  kRemoteAtomic,
};

enum class AtomicOp : uint8_t { kFetchAdd, kCompareSwap };

// Each is a fault of its own in the trace, with its own Terminate code (RFC 5040 section 4.8, RFC 5041 section 6.2).
enum class MemoryFault : uint8_t {
  kUnknownStag,   // no region has this index
  kStaleStag,     // the index is known (or in quarantine) but the key is not the current one, or the region was
                  // invalidated
  kForeignStag,   // a region of another protection domain, or a window bound to another QP
  kOutOfRange,    // offset or length beyond the region, or their sum wraps
  kNoPermission,  // the region does not grant this access
  kMisaligned,    // of an atomic: not on a boundary of eight bytes
  kUnmapped,      // registered, and no longer there: hardware would have kept the pages
};
const char* ToString(MemoryFault fault);

// What an atomic found, and where.
struct AtomicOutcome {
  uint64_t original = 0;  // in host byte order
  uint64_t offset = 0;    // of the eight bytes, as MemoryPin::offset()
};

class MemoryPort;

// A word that tells whether memory may still be used that was pinned once: it has this value for as long as it may, and
// another one for good before whoever ends that (by deregistration, invalidation) returns. Whoever has read bytes of
// the memory, and then finds the word as it was, has read them in time. It stays readable for as long as the port.
struct MemoryGuard {
  const std::atomic<uint64_t>* word = nullptr;  // null: the port has none
  uint64_t value = 0;
};

// Bytes of a region, usable until the pin is dropped. Movable, not copyable.
class MemoryPin {
 public:
  MemoryPin() = default;
  MemoryPin(MemoryPort* port, uint32_t token, MutableBytes bytes, uint64_t offset, const MemoryGuard& guard = {})
      : port_(port), token_(token), bytes_(bytes), offset_(offset), guard_(guard) {}
  MemoryPin(MemoryPin&& other) noexcept { swap(other); }
  MemoryPin& operator=(MemoryPin&& other) noexcept {
    MemoryPin(std::move(other)).swap(*this);
    return *this;
  }
  ~MemoryPin();

  MutableBytes bytes() const { return bytes_; }
  // Where the first of them lies, in bytes from the first one of the region or window that the STag names. With the
  // STag it says what memory this is in words that no address is part of, as a trace must.
  uint64_t offset() const { return offset_; }
  // For whoever has the bytes read after the pin is dropped.
  const MemoryGuard& guard() const { return guard_; }

 private:
  void swap(MemoryPin& other) noexcept {
    std::swap(port_, other.port_);
    std::swap(token_, other.token_);
    std::swap(bytes_, other.bytes_);
    std::swap(offset_, other.offset_);
    std::swap(guard_, other.guard_);
  }
  MemoryPort* port_ = nullptr;
  uint32_t token_ = 0;
  MutableBytes bytes_;
  uint64_t offset_ = 0;
  MemoryGuard guard_;
};

class MemoryPort {
 public:
  virtual ~MemoryPort() = default;

  // A length of 0 is checked for STag and permission like any other by local access; remote zero-length operations do
  // not reach the port (RFC 5040 section 5.1: no STag check).
  virtual Result<MemoryPin, MemoryFault> Pin(uint32_t stag, uint64_t tagged_offset, uint64_t length,
                                             MemoryAccess access) = 0;
  // Remote invalidation by Send with Invalidate (RFC 5040 section 5.1). The region must allow remote access and belong
  // to this port's PD (and QP). Returns when no pin of it is left.
  virtual Result<void, MemoryFault> InvalidateRemotely(uint32_t stag) = 0;
  // An atomic of the peer on eight bytes, in host byte order; returns what was there before, and where that is.
  // Sequentially consistent with every other one of the device and with the program's own atomics on that memory
  // (IBV_ATOMIC_GLOB), because both are the processor's. kFetchAdd adds `operand`; kCompareSwap stores it where
  // `compare` stands.
  virtual Result<AtomicOutcome, MemoryFault> Atomic(uint32_t stag, uint64_t tagged_offset, AtomicOp op,
                                                    uint64_t operand, uint64_t compare) = 0;

 protected:
  friend class MemoryPin;
  virtual void Unpin(uint32_t token) = 0;
};

inline MemoryPin::~MemoryPin() {
  if (port_ != nullptr) port_->Unpin(token_);
}

}  // namespace stagecoach::emu
