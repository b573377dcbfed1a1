// Llp: RFC 5041's lower-layer protocol. It preserves records; one record is one DDP segment (ULPDU), or one InfiniBand
// packet. What carries them (a byte stream, a ring in shared memory, datagrams) is its own affair: nothing above knows.
// Who makes one is the fabric (Fabric::RecordsOver).
//
// Receiving is pulled, so that zero copy is real: the Llp yields the head of the next record, the transport engine
// decides where its payload belongs, and Place() moves the bytes there straight from wherever they are (a socket, a
// ring, another process). The order of calls for each record: NextRecord until kReady; Place until kReady (also for an
// empty payload); repeat.
//
// Calls are serialised by the connection's lock, except SetWatcher, see below.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/bytes.h"
#include "base/time.h"
#include "emu/engine/memory_port.h"
#include "emu/engine/record.h"
#include "emu/llp/arrival_mark.h"
#include "emu/llp/carriage.h"
#include "emu/llp/readiness.h"

namespace stagecoach::emu {

// What both ends have agreed of their records.
struct RecordOptions {
  bool crc = true;  // a damaged record ends the layer, and none of its payload is placed
  bool insert_markers =
      false;  // the peer's M flag (RFC 5044 section 4.3); means nothing to layers that have no markers
  // Largest record to send, in bytes; 0: what fits one segment of what carries them (RFC 5044 section 5).
  size_t max_record = 0;
};

enum class LlpFault : uint8_t { kNone, kBadCrc, kBadMarker, kBadLength };

enum class RxStatus : uint8_t {
  kReady,        // NextRecord: a record's head is available. Place: the record is complete and intact.
  kWouldBlock,   // come back when the layer is readable
  kEof,          // orderly end, between records
  kReset,        // the layer failed (`error` is an errno), or ended inside a record (`error` is 0)
  kFault,        // a record is broken (see `fault`); nothing more can be received
  kMemoryFault,  // Place: memory of the destination is not mapped any more; the rest of the record can be discarded
};

struct RxResult {
  RxStatus status = RxStatus::kWouldBlock;
  LlpFault fault = LlpFault::kNone;
  int error = 0;
};

enum class TxStatus : uint8_t {
  kIdle,         // everything queued has left
  kWouldBlock,   // come back when the layer is writable
  kReset,        // the layer failed; `error` is an errno
  kMemoryFault,  // memory of a waiting record can no longer be read: the record cannot be finished, the layer must end
};

struct TxResult {
  TxStatus status = TxStatus::kIdle;
  int error = 0;
  MemoryFault memory_fault = MemoryFault::kUnknownStag;
  uint64_t cookie = 0;  // kMemoryFault: the record at fault
};

class Llp : public RecordSink {
 public:
  // Whether every record arrives, once and in order, or else the layer ends. An RDMAP stream needs it (RFC 5041 section
  // 5.1 item 1); an InfiniBand transport does not.
  virtual bool IsReliable() const = 0;
  virtual Carriage carriage() const = 0;

  // --- Receiving ---

  // `record->head` is valid until Place returns kReady.
  virtual RxResult NextRecord(RecordHead* record) = 0;
  // `destination` scatters the payload, which begins `head_size` bytes into the record. Its total is length -
  // head_size, or 0 to discard the payload. The parts are the same in each call for one record; the caller pins them
  // for the duration of each call. After kMemoryFault, which says nothing of the bytes that are in place, the list is
  // empty. With a CRC agreed nothing is written to `destination` before the CRC has been verified.
  virtual RxResult Place(size_t head_size, std::span<const MutableBytes> destination) = 0;

  struct Drained {
    bool any = false;   // something was there
    bool more = false;  // there may be more now
    // kEof, or kReset: nothing more will come.
    std::optional<RxResult> end;
  };
  // Throws away what has arrived, as much as is good for one turn. For ends that take no records any more, or never
  // did: NextRecord is not called afterwards.
  virtual Drained Drain() = 0;

  // --- Sending ---

  // Sends what is queued, as far as it goes, pinning by-key parts through `memory` while it does.
  virtual TxResult Flush(MemoryPort& memory) = 0;
  // Cookies of records that have wholly left, oldest first; false when there is none.
  virtual bool TakeSent(uint64_t* cookie) = 0;
  virtual bool TxIdle() const = 0;
  // Memory of records that have not left is its program's again. What a peer reads of it from now on is refused, and
  // those records with it. A layer whose peers read no memory of ours has nothing to do.
  virtual void ForgetMemory() {}
  // How far what was sent has got, at this moment; may ask the system.
  virtual Delivery delivery() const = 0;

  // --- Waiting ---

  // Readiness is one-shot: after Arm, the watcher is called once when there is something to receive (or room to send),
  // or the layer has ended or failed; at once if it already is so. Arm replaces the interest of an earlier Arm;
  // Arm(false, false) disarms. A watcher must tolerate one late or spurious call after disarming.
  virtual void Arm(bool readable, bool writable) = 0;
  // Must be set before the first Arm. SetWatcher(nullptr) disarms and returns only when no call to the old watcher is
  // running or will start; so it must be called without any lock that the watcher takes. On the loop thread itself it
  // does not wait.
  virtual void SetWatcher(ReadyWatcher* watcher) = 0;
  // A descriptor that is readable when there may be something to receive, for a zero-timeout epoll over many layers, or
  // -1 where there is none.
  virtual int PollDescriptor() const = 0;
  // What tells the same where there is no descriptor; null: nothing does.
  virtual const ArrivalMark* arrival_mark() const { return nullptr; }

  // --- Ending ---

  // Ends sending: the peer receives what has left, then kEof. Receiving goes on. Idempotent.
  virtual void Shutdown() = 0;
  // Ends both directions at once; the peer sees kReset. Idempotent.
  virtual void Abort() = 0;

  // What a tap keeps from the owner besides (emu/tap/injection_tap.h); of a record layer without one, nothing.
  struct Hold {
    bool receiving = false;        // nothing will be received, whatever readiness says
    bool more = false;             // NextRecord would not have blocked, and is to be asked again soon
    std::optional<Instant> until;  // when Flush has something to send without the layer's becoming writable
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
    uint64_t reads = 0;  // calls that moved, or tried to move, bytes in or out
    uint64_t writes = 0;

    void Add(const Counters& other) {
      rx_payload_bytes += other.rx_payload_bytes;
      rx_copied_bytes += other.rx_copied_bytes;
      tx_payload_bytes += other.tx_payload_bytes;
      tx_copied_bytes += other.tx_copied_bytes;
      rx_records += other.rx_records;
      tx_records += other.tx_records;
      reads += other.reads;
      writes += other.writes;
    }
  };
  virtual const Counters& counters() const = 0;
};

}  // namespace stagecoach::emu
