// IwarpConnection: one QP's iWARP engine bound to one record layer, which begins and ends with it.
//
// Not thread-safe: everything here runs under the lock of its QP. Who takes that lock, and why nothing is forgotten, is
// told in docs/locks_and_leases.md for the whole package.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "emu/engine/rdmap_stream.h"
#include "emu/llp/llp.h"
#include "emu/nic/nic.h"
#include "emu/nic/objects/memory_registry.h"
#include "emu/nic/queue/next_turn.h"
#include "emu/nic/queue/qp_connection.h"
#include "emu/nic/queue/queue_pair.h"
#include "emu/nic/queue/record_pump.h"
#include "emu/nic/queue/watched_llp.h"

namespace stagecoach::emu {

class IwarpConnection final : public QpConnection {
 public:
  // Queues the RTR when the setup asks this end for one. Nothing moves before Serve().
  IwarpConnection(QueuePair& qp, ConnectionSetup setup);
  ~IwarpConnection() override;
  IwarpConnection(const IwarpConnection&) = delete;
  IwarpConnection& operator=(const IwarpConnection&) = delete;

  bool Serve(uint32_t requests) override;
  // The peer sees a reset.
  void Abort() override;
  void ForgetDeadline() override { next_.ForgetDeadline(); }

  const char* PhaseName() const override;
  bool IsOpen() const override { return phase_ == Phase::kOpen; }
  bool HasEnded() const override { return phase_ == Phase::kLingering || phase_ == Phase::kClosed; }
  bool IsClosed() const override { return phase_ == Phase::kClosed; }
  Llp::Counters llp_counters() const override { return llp_->counters(); }
  int PollDescriptor() const override { return llp_->PollDescriptor(); }
  const ArrivalMark* arrival_mark() const override { return llp_->arrival_mark(); }
  // Both ends speak RFC 7306.
  bool extensions() const { return transport_->options().extensions == wire::RdmapExtensions::kRfc7306; }

 private:
  enum class Phase : uint8_t {
    kOpen,
    kFinishing,  // the program wants the end: records already queued are leaving
    kLingering,  // our end is shut; what the peer still sends is thrown away until it ends too
    kClosed,
  };

  void Receive(Instant now);
  // Before the program learns of the end, after which the memory is its own again.
  void SettleForTheEnd();
  void OnReceiveEnd(const RxResult& result);
  void Transmit();
  void FlushRecords();
  // What sending means for the nudge and for the end.
  void NoteSending();
  // The record layer is gone: the engine gives up.
  void Lose(CloseReason reason, int error);
  void FailLocally(const char* why);
  void TakeFault(Instant now);  // of the engine, and acts on it
  void CheckEnd(Instant now);
  // Work that is given back takes its memory along.
  void ForgetMemoryOnceFinished();
  void TakeCompletions();
  void OnTime(Instant now);
  void BeginDisconnect(Instant now);
  void Finish(Instant now);
  void Linger();
  void Close(bool abort);
  void PrepareNextTurn(uint32_t requests);

  QueuePair& qp_;
  Nic& nic_;
  const bool initiator_;
  const std::string name_;  // in traces
  RegistryPort memory_;
  const WatchedLlp llp_;
  std::unique_ptr<RdmapStream> transport_;
  RecordPump<RdmapStream> pump_;
  NextTurn next_;

  Phase phase_ = Phase::kOpen;
  bool rx_ended_ = false;  // nothing more can be read
  bool first_record_ = false;
  bool sent_any_ = false;
  uint8_t nudges_left_ = 3;
  Duration nudge_wait_;
  std::optional<Instant> nudge_at_;
  std::optional<Instant> linger_until_;
  std::optional<TransportFault> fault_;
  int stream_error_ = 0;
  std::optional<CloseReason> reason_;
};

}  // namespace stagecoach::emu
