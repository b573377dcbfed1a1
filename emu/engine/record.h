// Records as engines see them: what a lower-layer protocol delivers (a head, then a payload that is placed) and what it
// is given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/bytes.h"
#include "emu/engine/memory_port.h"

namespace stagecoach::emu {

// Room for the largest DDP/RDMAP header we understand: an untagged Read Request, 18 + 28 bytes (RFC 5040 section 4.4).
inline constexpr size_t kMaxRecordHead = 48;

// Room for the longest header given to QueueRecord: a Terminate that quotes a Read Request, or an Atomic Request with
// all it says; 18 + 52 bytes each.
inline constexpr size_t kMaxTxHeader = 72;

// The beginning of a record. `head` holds min(length, kMaxRecordHead) bytes.
struct RecordHead {
  ConstBytes head;
  size_t length = 0;  // of the whole record (ULPDU), head included
};

// A part of an outgoing record: bytes that stay put until the record has left, or memory named by key, which is pinned
// afresh for each write of the stream so that it may be invalidated while the record waits.
struct TxPart {
  ConstBytes bytes;  // used when !by_key
  bool by_key = false;
  uint32_t key = 0;  // lkey of a local buffer, or the STag a peer reads from
  uint64_t address = 0;
  uint32_t length = 0;
  MemoryAccess access = MemoryAccess::kLocalRead;

  size_t size() const { return by_key ? length : bytes.size(); }
};

// Where a transport engine puts its records.
class RecordSink {
 public:
  virtual ~RecordSink() = default;
  // The largest record that may be queued now, in bytes (RFC 5044 section 5: MULPDU; follows the path).
  virtual size_t MaxUlpdu() const = 0;
  // False while enough is waiting for the stream.
  virtual bool CanQueue() const = 0;
  // `header` (at most kMaxTxHeader bytes) is copied; what `payload` refers to must stay until the sink reports `cookie`
  // as sent. Needs CanQueue().
  virtual void QueueRecord(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie) = 0;
};

}  // namespace stagecoach::emu
