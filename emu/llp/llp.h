// Llp: RFC 5041's lower-layer protocol. Ordered, reliable, and it preserves records; one record is one DDP segment
// (ULPDU).
//
// Receiving is pulled, so that zero copy is real: the Llp yields the head of the next record, the transport engine
// decides where its payload belongs, and Place() moves the bytes there straight from wherever they are (a socket, a
// ring, another process). The order of calls for each record: NextRecord until kReady; Place until kReady (also for an
// empty payload); repeat. Serialised by the connection's lock.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "base/bytes.h"
#include "base/time.h"
#include "emu/engine/memory_port.h"
#include "emu/engine/record.h"
#include "emu/fabric/stream.h"

namespace stagecoach::emu {

enum class LlpFault : uint8_t { kNone, kBadCrc, kBadMarker, kBadLength };

enum class RxStatus : uint8_t {
  kReady,        // NextRecord: a record's head is available. Place: the record is complete and intact.
  kWouldBlock,   // come back when the stream is readable
  kEof,          // orderly end, between records
  kReset,        // the stream failed (`error` is an errno), or ended inside a record (`error` is 0)
  kFault,        // the record layer is broken (see `fault`); nothing more can be received
  kMemoryFault,  // Place: memory of the destination is not mapped any more; the rest of the record can be discarded
};

struct RxResult {
  RxStatus status = RxStatus::kWouldBlock;
  LlpFault fault = LlpFault::kNone;
  int error = 0;
};

enum class TxStatus : uint8_t {
  kIdle,         // everything queued has been handed to the stream
  kWouldBlock,   // come back when the stream is writable
  kReset,        // the stream failed; `error` is an errno
  kMemoryFault,  // memory of a waiting record can no longer be read: the record cannot be finished, the stream must end
};

struct TxResult {
  TxStatus status = TxStatus::kIdle;
  int error = 0;
  MemoryFault memory_fault = MemoryFault::kUnknownStag;
  uint64_t cookie = 0;  // kMemoryFault: the record at fault
};

class Llp : public RecordSink {
 public:
  // `record->head` is valid until Place returns kReady.
  virtual RxResult NextRecord(RecordHead* record) = 0;
  // `destination` scatters the payload, which begins `head_size` bytes into the record. Its total is length -
  // head_size, or 0 to discard the payload. The parts are the same in each call for one record; the caller pins them
  // for the duration of each call. After kMemoryFault, which says nothing of the bytes that are in place, the list is
  // empty. With a CRC negotiated nothing is written to `destination` before the CRC has been verified.
  virtual RxResult Place(size_t head_size, std::span<const MutableBytes> destination) = 0;

  // Writes what is queued, as far as the stream takes it, pinning by-key parts through `memory` for each write.
  virtual TxResult Flush(MemoryPort& memory) = 0;
  // Cookies of records that have wholly left, oldest first; false when there is none.
  virtual bool TakeSent(uint64_t* cookie) = 0;
  virtual bool TxIdle() const = 0;

  virtual Stream& stream() = 0;

  // What a tap keeps from the owner besides (emu/tap/injection_tap.h); of a record layer without one, nothing.
  struct Hold {
    bool receiving = false;        // nothing will be received, whatever the stream's readiness says
    bool more = false;             // NextRecord would not have blocked, and is to be asked again soon
    std::optional<Instant> until;  // when Flush has something to send without the stream's becoming writable
  };
  virtual Hold hold() const { return {}; }

  struct Counters {
    // Payload bytes that passed through an intermediate buffer of ours, beside all payload bytes.
    uint64_t rx_payload_bytes = 0;
    uint64_t rx_copied_bytes = 0;
    uint64_t tx_payload_bytes = 0;
    uint64_t tx_copied_bytes = 0;
    uint64_t rx_records = 0;
    uint64_t tx_records = 0;
    uint64_t stream_reads = 0;
    uint64_t stream_writes = 0;

    void Add(const Counters& other) {
      rx_payload_bytes += other.rx_payload_bytes;
      rx_copied_bytes += other.rx_copied_bytes;
      tx_payload_bytes += other.tx_payload_bytes;
      tx_copied_bytes += other.tx_copied_bytes;
      rx_records += other.rx_records;
      tx_records += other.tx_records;
      stream_reads += other.stream_reads;
      stream_writes += other.stream_writes;
    }
  };
  virtual const Counters& counters() const = 0;
};

}  // namespace stagecoach::emu
