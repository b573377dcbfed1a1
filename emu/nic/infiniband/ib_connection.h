// IbConnection: one QP's InfiniBand engine, from RTR to the end of the QP, and the carriers that come and go under it.
//
// A carrier is a record layer between the two ends (roce_port.h). Its loss, whatever the cause, is silence: packets
// that were on their way are lost, the engine's timer notices, the port is asked for another one. Only the engine ends
// the connection, or the program. An UC QP that has packets to send and gets no carrier for a while sends them all the
// same: nobody hears them.
//
// SILENCE. A QP's `timeout` and `retry_cnt` count what the peer does not say, and not what carrying it costs: not the
// time that a stream takes to be opened, nor that bytes are under way, nor that they lie at the peer's host while its
// process stands still. A reliable one loses nothing, so nothing is sent again on it, except to ask a host that has
// taken everything whether it is still there. As long as the peer's host gives signs of life, and nobody there says
// that the QP is gone, this end waits, as it would on iWARP. A host that has given none for kHostSilence may be cut
// off: its carrier is given up, and from then on the QP's own times count. They count from the beginning where the
// device of either end loses packets by itself, as its profile or rules have it, where a rule has stalled the
// connection, and where the peer answers with numbers of another connection.
//
// At the end the engine's last words, a NAK or what acknowledges work done, leave by the carrier there is, which is
// then shut down in order; both within the profile's close_linger. Where an injection rule cuts the connection, the
// same holds for the word of it to the peer: it leaves, behind what the carrier has taken, before the engine ends.
//
// Not thread-safe: runs under the lock of its QP. Of docs/locks_and_leases.md, who wakes it next holds here while
// there is a carrier. Without one there is nothing to hear: a post, a deadline of the engine, or a new carrier
// (QueuePair::TakeCarrier, which asks for a turn) move it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "emu/engine/ib_transport.h"
#include "emu/llp/llp.h"
#include "emu/nic/infiniband/roce_port.h"
#include "emu/nic/nic.h"
#include "emu/nic/objects/memory_registry.h"
#include "emu/nic/queue/next_turn.h"
#include "emu/nic/queue/qp_connection.h"
#include "emu/nic/queue/queue_pair.h"
#include "emu/nic/queue/record_pump.h"
#include "emu/nic/queue/watched_llp.h"
#include "emu/wire/carrier_proof.h"

namespace stagecoach::emu {

class IbConnection final : public QpConnection {
 public:
  // In RTR: `attributes` say with whom and how. Joins the NIC's port.
  IbConnection(QueuePair& qp, const QpAttributes& attributes, const RocePath& path, const wire::CarrierSecret& secret);
  ~IbConnection() override;
  IbConnection(const IbConnection&) = delete;
  IbConnection& operator=(const IbConnection&) = delete;

  bool Serve(uint32_t requests) override;
  void Abort() override;
  void ForgetDeadline() override { next_.ForgetDeadline(); }

  const char* PhaseName() const override;
  bool IsOpen() const override { return phase_ == Phase::kOpen; }
  bool HasEnded() const override {
    return phase_ == Phase::kLingering || phase_ == Phase::kClosed ||
           (phase_ == Phase::kEnding && !transport_.HoldsWork());
  }
  bool IsClosed() const override { return phase_ == Phase::kClosed; }
  bool SendsInProgress() const override { return transport_.SendsInProgress(); }
  Llp::Counters llp_counters() const override;
  int PollDescriptor() const override;
  const ArrivalMark* arrival_mark() const override;

  void OnModified(QpState to, const QpAttributes& attributes) override;
  void OnPath(const RocePath& path) override;
  void OnSecret(const wire::CarrierSecret& secret) override;
  bool TakeCarrier(uint64_t generation, uint64_t serial, std::unique_ptr<Llp>& llp) override;
  std::unique_ptr<WatchedLlp> TakeOldCarriers() override;

 private:
  enum class Phase : uint8_t {
    kOpen,
    kEnding,     // the engine has failed or the program wants the end: its last words are leaving
    kLingering,  // they have left; what the peer still sends is thrown away until it ends too
    kClosed,
  };

  // Where the packets of UC go that nobody carries.
  class Void final : public RecordSink {
   public:
    size_t MaxUlpdu() const override;
    bool CanQueue() const override { return true; }
    void QueueRecord(ConstBytes, std::span<const TxPart>, uint64_t cookie) override { sent_.push_back(cookie); }
    std::vector<uint64_t> TakeSent() { return std::exchange(sent_, {}); }

   private:
    std::vector<uint64_t> sent_;
  };

  // A Receive queue that has none for messages for which rules have it so (InjectionAction::kNotReady).
  class ReluctantReceives final : public ReceiveSource {
   public:
    // `connection` has the rules, if there are any.
    ReluctantReceives(ReceiveSource& source, IbConnection& connection) : source_(source), connection_(connection) {}
    const ReceiveWork* TakeReceive() override { return connection_.HidesReceive() ? nullptr : source_.TakeReceive(); }

   private:
    ReceiveSource& source_;
    IbConnection& connection_;
  };

  // Why there is no answer.
  enum class Silence : uint8_t {
    kOfThePeer,
    kHeldUp,     // something is under way, or being opened
    kAtItsHost,  // which has it all; the peer does not run
  };

  Instant Now() const { return nic_.fabric().Now(); }
  // Whether the message that has come last is to find no Receive.
  bool HidesReceive();
  Silence JudgeSilence(Instant now);
  Silence JudgeOnCarrier(Instant now);
  Silence JudgeWithoutCarrier(Instant now);
  // The peer's host has given no sign of life, now that one is missed, and for so long.
  bool IsHostSilent(Instant now);
  void OnTime(Instant now);
  void Receive(Instant now);
  void Transmit(Instant now);
  void SendIntoTheVoid(Instant now);
  // An injection rule has had something lost.
  void OnLoss(Instant now);
  // An injection rule has cut the way to the peer: fails the QP, once the peer has been told.
  void Sever(Instant now);
  // The peer is being told.
  bool IsSevering() const { return sever_until_.has_value() && carrier_ != nullptr; }
  void DropCarrier(Instant now, const char* why);
  // Nobody uses the carrier any more; what is left of it goes without the lock.
  void Discard(bool abort);
  void CheckEnd(Instant now);
  void Fail(QpEvent event, Instant now);
  void BeginEnding(Instant now);
  void Finish(Instant now);
  void Linger();
  void Close();
  std::optional<Instant> EngineDeadline() const;
  void PrepareNextTurn(uint32_t requests);

  QueuePair& qp_;
  Nic& nic_;
  const std::string name_;  // in traces
  const uint64_t generation_;
  const uint32_t remote_qp_;
  PeerKnowledge knowledge_;
  RegistryPort memory_;
  ReluctantReceives receives_;
  IbTransport transport_;
  RecordPump<IbTransport> pump_;
  NextTurn next_;

  Phase phase_ = Phase::kOpen;
  std::unique_ptr<WatchedLlp> carrier_;
  uint64_t carrier_serial_ = 0;  // as the port knows it
  std::unique_ptr<WatchedLlp> old_carriers_;
  Llp::Counters past_;                                      // of carriers that are gone
  const std::shared_ptr<ConnectionInjections> injections_;  // of all carriers; null: none
  const std::shared_ptr<CarrierOutlook> outlook_ = std::make_shared<CarrierOutlook>();
  bool carrier_loses_ = false;             // by itself, at either end
  bool peer_is_unaware_ = false;           // of that, as it has come about since the carrier was made
  uint64_t taken_seen_ = 0;                // of the carrier, by the peer's host
  uint64_t records_seen_ = 0;              // of the carrier, from the peer
  uint32_t streams_seen_ = 0;              // of the outlook
  std::optional<Instant> alone_since_;     // an answer was missed first, without a carrier that had brought anything
  std::optional<Instant> silent_since_;    // a sign of life of the peer's host was missed first
  std::optional<Instant> asked_at_;        // or the wait began, for a peer whose host has it all
  std::optional<Instant> patience_until_;  // UC: when what waits for a carrier is lost
  std::optional<Instant> sever_until_;     // An injection rule has cut the way to the peer, which is told until then
  std::optional<Instant> linger_until_;
};

}  // namespace stagecoach::emu
