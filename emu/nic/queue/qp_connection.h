// QpConnection: what a QP needs of whatever moves its records, whichever transport that is.
//
// IwarpConnection (iwarp_connection.h) is iWARP's: one record layer, which is the connection. IbConnection
// (ib_connection.h) is InfiniBand's: record layers come and go under it. DatagramConnection (datagram_connection.h) is
// UD's and has none. Everything here runs under the lock of the QP; what that means, and who wakes whom, is told in
// docs/locks_and_leases.md.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "emu/engine/qp_states.h"
#include "emu/llp/llp.h"
#include "emu/nic/queue/qp_attributes.h"
#include "emu/nic/queue/watched_llp.h"
#include "emu/wire/carrier_proof.h"
#include "emu/wire/ib.h"

namespace stagecoach::emu {

struct RocePath;

// What became of a datagram at a QP.
enum class DatagramFate : uint8_t {
  kTaken,
  kNotReceiving,  // no UD QP in a state that receives
  kBadQkey,
  kNoReceive,
  kTooLong,  // for the Receive
};

class QpConnection {
 public:
  // Off the QP's lock.
  virtual ~QpConnection() = default;

  // One turn: whatever `requests` (of QueuePair) ask for, as far as the budget goes. True if records or bytes moved.
  virtual bool Serve(uint32_t requests) = 0;
  // Ends it at once: submitted work is flushed into the QP's rings.
  virtual void Abort() = 0;
  // NicLoop has forgotten this QP's wishes.
  virtual void ForgetDeadline() = 0;

  virtual const char* PhaseName() const = 0;
  virtual bool IsOpen() const = 0;
  // The engine has given back all work.
  virtual bool HasEnded() const = 0;
  // Nothing is left to do and the connection may be deleted.
  virtual bool IsClosed() const = 0;
  virtual Llp::Counters llp_counters() const = 0;
  // Of the record layer there is now, as PolledConnection has it.
  virtual int PollDescriptor() const = 0;
  virtual const ArrivalMark* arrival_mark() const = 0;

  // What was submitted and must be complete before an SQD is drained is still going on.
  virtual bool SendsInProgress() const { return true; }

  // --- InfiniBand alone ---
  // The program has changed the QP, which is in state `to` now.
  virtual void OnModified(QpState, const QpAttributes&) {}
  // It has changed the way to the peer.
  virtual void OnPath(const RocePath&) {}
  // A connection manager tells what this QP and its peer alone know.
  virtual void OnSecret(const wire::CarrierSecret&) {}
  // A record layer that the peer has agreed to, known to the port as `serial`. False, and nothing taken, unless it is
  // for this life of the QP.
  virtual bool TakeCarrier(uint64_t /*generation*/, uint64_t /*serial*/, std::unique_ptr<Llp>&) { return false; }
  // A datagram has come for this QP, from an address to one of ours. Nothing of it is used afterwards.
  virtual DatagramFate TakeDatagram(const RocePath&, const wire::IbHeader&, ConstBytes) {
    return DatagramFate::kNotReceiving;
  }
  // Carriers that are not used any more, to be destroyed without the QP's lock.
  virtual std::unique_ptr<WatchedLlp> TakeOldCarriers() { return nullptr; }
};

}  // namespace stagecoach::emu
