// QpTransport: the seam behind which the wire semantics of a QP stand. RdmapStream (iWARP) and IbTransport (InfiniBand)
// implement it.
//
// Sans-IO: no clock, thread, lock or stream. The connection drives it: commands from above (Submit, Close), handlers
// from below (OnRecord, OnPlaced, OnSent, OnLost), outputs taken until empty (FillTx, Take...), one deadline. Outcomes
// are pulled, so nobody else's code ever runs inside a state change. Not thread-safe: serialised by the connection's
// lock.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "base/time.h"
#include "emu/engine/memory_port.h"
#include "emu/engine/record.h"
#include "emu/engine/work.h"

namespace stagecoach::emu {

// What the owner of the QP has to do about a fault, where no Terminate says it.
enum class FaultKind : uint8_t {
  kProtocol,    // the peer's request made no sense: error state, IBV_EVENT_QP_REQ_ERR
  kProtection,  // it named memory it may not use so: error state, IBV_EVENT_QP_ACCESS_ERR
  kWork,        // a work request failed, and its completion says all: error state, no event
  kSendQueue,   // the same of a transport that has no connection to lose (UC): IBV_QPS_SQE, and receiving goes on
};

// A fault that ended a stream, as it travels in an RDMAP Terminate (RFC 5040 section 4.8), or that ended an InfiniBand
// connection, and as people read it.
struct TransportFault {
  uint8_t layer = 0;  // 0 RDMAP, 1 DDP, 2 LLP (MPA)
  uint8_t error_type = 0;
  uint8_t error_code = 0;
  bool from_peer = false;      // the peer's Terminate, else ours
  bool siw_bit_order = false;  // decoded through the quirk of Linux siw
  // InfiniBand alone; there the three codes above are 0.
  FaultKind kind = FaultKind::kProtocol;
  uint8_t syndrome = 0;     // of the NAK that was sent or received; 0 without one
  std::string description;  // "DDP tagged buffer: invalid STag (our Write of 64 bytes to STag 0x1234)"
};

class QpTransport {
 public:
  virtual ~QpTransport() = default;

  // --- Commands ---

  // Takes a work request in send-queue order. Never fails: what is wrong with it becomes its completion. The caller
  // keeps `work` unchanged until the completion is taken and limits how many are outstanding.
  virtual void Submit(const SendWork* work) = 0;
  // Local protection, length or consumer error outside the wire: flush everything (QP moved to the error state). No
  // Terminate.
  virtual void Flush() = 0;

  // --- Handlers ---

  // The owner is about to work with it at this time: what is decided until the next call is traced with it.
  virtual void BeginTurn(Instant now) = 0;
  // A record's head has arrived. Returns where its payload begins, or nullopt if the record is at fault: a Terminate is
  // then queued (when one may be sent) and nothing more must be received.
  virtual std::optional<size_t> OnRecord(const RecordHead& record, Instant now) = 0;
  // Pins the destination of the current record's payload; empty list: discard. nullopt: the memory has gone since
  // OnRecord (a fault, as there).
  virtual std::optional<std::span<const MutableBytes>> PinDestination() = 0;
  virtual void UnpinDestination() = 0;
  // The current record, which OnRecord took, is part of an RDMA Write: nothing says when its bytes must be in place, as
  // long as that is before the effect of the next record that is no Write (RFC 5040 section 5.5).
  virtual bool PlacementMayWait() const = 0;
  // The current record, which OnRecord took, is the last one of an RDMA Write. A program may wait for its last bytes to
  // change, and must then find all others in place.
  virtual bool EndsWrite() const = 0;
  // The current record's payload cannot be placed where PinDestination said. Either nothing more is received now, or
  // the destination is an empty list from here on and OnPlaced follows: then the fault takes effect.
  virtual void OnPlacementFault(MemoryFault fault) = 0;
  // The current record is in place and intact.
  virtual void OnPlaced(Instant now) = 0;
  // The record queued with `cookie` has been handed to the stream.
  virtual void OnSent(uint64_t cookie) = 0;
  // Memory of a queued record could not be read.
  virtual void OnTxMemoryFault(uint64_t cookie, MemoryFault fault) = 0;
  // The record layer below found a fault: `code` is the MPA error code for the Terminate (RFC 5044 section 8): 2 bad
  // CRC, 3 bad marker ...
  virtual void OnLlpFault(uint8_t code) = 0;
  // The stream has ended. `orderly`: end of file between records.
  virtual void OnLost(bool orderly) = 0;

  // --- Outputs ---

  // Queues records while there is work and the sink takes it, at most `budget` records. True if anything was queued.
  virtual bool FillTx(RecordSink& sink, size_t budget) = 0;
  // Send-queue completions in order of submission, unsignaled successes included (`work->signaled` tells); false when
  // none.
  virtual bool TakeSendCompletion(SendCompletion* completion) = 0;
  // Receive completions in order of consumption; false when none. Receives never taken from the source are the owner's
  // to flush.
  virtual bool TakeReceiveCompletion(ReceiveCompletion* completion) = 0;
  // The fault that ended the stream, once, when there is one.
  virtual std::optional<TransportFault> TakeFault() = 0;

  virtual std::optional<Instant> Deadline() const = 0;
  virtual void OnDeadline(Instant now) = 0;

  // --- State ---

  // True once: the first packet of the peer has come, which tells a program that still holds the QP in RTR that the
  // connection is there (IBV_EVENT_COMM_EST). Never for transports whose connection manager tells that.
  virtual bool TakeFirstPacket() { return false; }
  // True while records may be received.
  virtual bool Receiving() const = 0;
  // True once the stream must be closed: after a fault, when the Terminate (if any) has been sent.
  virtual bool Finished() const = 0;
  // True while anything submitted has not completed, or a Read of the peer has not been answered.
  virtual bool HasOutstandingWork() const = 0;
};

}  // namespace stagecoach::emu
