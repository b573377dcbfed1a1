// IbTransport: the transport engine of one InfiniBand RC or UC connection, as RoCEv2 would carry it.
//
// Implements the InfiniBand Architecture Specification, volume 1, chapter 9: Send (with Immediate, with Invalidate),
// Write (with Immediate), Read, Compare and Swap, Fetch and Add; acknowledgements, NAKs, RNR NAKs, retries. One record
// is one packet, without pad and ICRC. Not in here: UD, the QP's states (qp_states.h), path migration, end-to-end
// credits.
//
// A QP HAS NO CONNECTION. What carries its records may come and go, and lose, repeat or reorder them: the requester's
// timer notices (ib_requester.h), the responder carries everything out once (ib_responder.h). So the loss of a carrier
// is never an error of the QP. It is silence, and a wish for another carrier when something is to be sent.
//
// ERRORS. A NAK that says more than "again", retries used up, memory that does not allow what is asked: the work
// request at fault completes with the reason, everything behind it is flushed, the QP is in error. The responder
// answers what came before the fault, then with its NAK; nothing is received any more. UC has no connection to lose: a
// failed send stops the send queue alone (IBV_QPS_SQE), and StartSending() ends that.
//
// Unlike an RDMAP stream, one whose peer has vanished without a word waits for ever if its timeout is 0, as on
// hardware.
//
// Sans-IO. Not thread-safe: serialised by the connection's lock.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "emu/engine/ib_context.h"
#include "emu/engine/ib_requester.h"
#include "emu/engine/ib_responder.h"
#include "emu/engine/qp_transport.h"

namespace stagecoach::emu {

class IbTransport final : public QpTransport {
 public:
  // Receives at once (RTR). `trace` may be null. `name` is the component in trace events ("host-a/qp-17").
  IbTransport(const IbOptions& options, MemoryPort& memory, ReceiveSource& receives, TraceSink* trace,
              std::string name);
  IbTransport(const IbTransport&) = delete;
  IbTransport& operator=(const IbTransport&) = delete;

  // --- What InfiniBand adds to QpTransport ---

  // ibv_modify_qp: takes those of the options that may change.
  void SetAttributes(const IbOptions& options);
  // RTS: works off what is submitted. For UC also the way out of SQE.
  void StartSending();
  // SQD: finishes what has begun, begins nothing.
  void StopSending();
  // Something that was submitted has begun and is not complete; false once an SQD is drained.
  bool SendsInProgress() const { return requester_.InProgress(); }

  // Something that was submitted has not been given back.
  bool HoldsWork() const { return requester_.HasWork(); }

  // There is a carrier, or none any more. Records that were queued and not reported as sent, and one that was half
  // received, are forgotten; no OnSent may follow for them. A new carrier is given at once what was not acknowledged.
  // Nothing is queued without a carrier: work of UC waits for one, unless the owner offers a sink that forgets.
  void OnCarrier(bool up, Instant now);
  // OnDeadline() would count it as the peer's silence that nothing has been acknowledged, and for all that this engine
  // knows something else than the peer may be why.
  bool MayExcuse(Instant now) const { return requester_.MayExcuse(now); }
  // To be called instead then, if so: no retry is used up, and the peer's time begins anew, twice as long each time in
  // a row, up to a second or the QP's own. `again`: what is not acknowledged is sent again all the same. A carrier is
  // wished for if there is none.
  void Excuse(bool again, Instant now);
  // True once for each occasion: something must be sent and there is no carrier.
  bool TakeRedialWish();

  // The peer is out of reach for good, and this end knows it at once instead of by its timer: the oldest work request
  // fails as if its retries were used up, the others are flushed. The peer says so by a packet of its own
  // (wire::IsIbUnreachable), the owner by this call.
  void OnUnreachable();
  // That packet, for the peer. It names the PSN with which this end has begun to send, which the peer expected; before
  // that is known (RTR), the one that is expected here, with which a peer has begun that has sent anything.
  std::array<std::byte, wire::kIbBthSize> UnreachableWord() const;

  const IbOptions& options() const { return context_.options; }
  // What this end has come to: the packet number of the oldest request that is not acknowledged, and the one that is
  // expected of the peer. Neither changes without a carrier.
  uint32_t oldest_psn() const { return requester_.oldest_psn(); }
  uint32_t expected_psn() const { return responder_.expected_psn(); }

  // --- QpTransport ---
  // Once Finished(), every submitted work request is complete: what of it is still queued in the lower layer must be
  // dropped with the carrier, not flushed.

  void Submit(const SendWork* work) override;
  void Flush() override;

  void BeginTurn(Instant now) override { context_.now = now; }
  // Never a fault: what is not for this QP, or damaged, is to be discarded like any packet that was lost. Nothing
  // happens before OnPlaced, since only then the record is known to be intact.
  std::optional<size_t> OnRecord(const RecordHead& record, Instant now) override;
  std::optional<std::span<const MutableBytes>> PinDestination() override;
  void UnpinDestination() override { destination_.Clear(); }
  bool PlacementMayWait() const override;
  bool EndsWrite() const override { return half_ == Half::kResponder && responder_.EndsWrite(); }
  void OnPlacementFault(MemoryFault fault) override;
  void OnPlaced(Instant now) override;
  void OnSent(uint64_t cookie) override;
  // The record can never leave, so its carrier must be given up: OnCarrier(false) follows. The work request fails; a
  // Read of the peer gets its NAK by the next carrier.
  void OnTxMemoryFault(uint64_t cookie, MemoryFault fault) override;
  // Both are OnCarrier(false): damage of the record layer is loss, too.
  void OnLlpFault(uint8_t code) override;
  void OnLost(bool orderly) override;

  bool FillTx(RecordSink& sink, size_t budget) override;
  bool TakeSendCompletion(SendCompletion* completion) override { return requester_.TakeCompletion(completion); }
  bool TakeReceiveCompletion(ReceiveCompletion* completion) override { return responder_.TakeCompletion(completion); }
  std::optional<TransportFault> TakeFault() override;

  std::optional<Instant> Deadline() const override { return requester_.Deadline(); }
  void OnDeadline(Instant now) override;

  bool TakeFirstPacket() override { return responder_.TakeFirstPacket(); }
  bool Receiving() const override { return state_ == State::kActive; }
  bool Finished() const override { return state_ == State::kEnded; }
  bool HasOutstandingWork() const override { return requester_.HasWork() || responder_.OwesAnswers(); }

 private:
  enum class State : uint8_t {
    kActive,
    kFailing,  // in error; what the responder owes the peer is leaving, nothing is received
    kEnded,
  };
  // Whose the current record is.
  enum class Half : uint8_t { kNone, kRequester, kResponder, kUnreachable };

  bool IsForUs(const wire::IbHeader& header) const;
  bool IsUnreachableWord(const RecordHead& record) const;
  bool QueueNext(RecordSink& sink);
  // Acts upon what the halves have raised.
  void Settle();
  void BeginFailing();
  void EndIfIdle();

  IbContext context_;
  IbRequester requester_;
  IbResponder responder_;
  State state_ = State::kActive;
  Half half_ = Half::kNone;
  std::optional<uint32_t> begun_psn_;  // of the first request, once there may be one
  bool answer_turn_ = true;
  bool nak_redial_ = false;
  IbDestination destination_;
  std::optional<TransportFault> fault_;
};

}  // namespace stagecoach::emu
