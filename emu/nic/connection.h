// Connection: one QP's iWARP engine bound to one record layer, which begins and ends with it.
//
// Not thread-safe: everything here runs under the lock of its QP. Who takes that lock, and why nothing is forgotten, is
// told here once for the whole package.
//
// LOCKS, in order; each may be taken while those before it are held, never the reverse:
//   Nic::mutex_ (control operations)  >  QueuePair::control_mutex_  >  CompletionQueue::drive_mutex_ (a poller at work)
//   >  QueuePair::lock_ (this)  >  SendQueue / ReceiveQueue mutex, MemoryRegistry::mutex_  >  CompletionQueue::mutex_
//   >  AsyncEventQueue mutex
//   and, under QueuePair::lock_, the mutexes of CompletionChannel and NicLoop, which take nothing but atomics, and that
//   of LatePlacements, which is held while a trace is told.
//   Deliveries of datagrams to QPs hold DatagramPort's members_mutex_, which stands between Nic::mutex_ and
//   QueuePair::lock_. Before all of these comes handler_mutex_, of DatagramPort and of RocePort: the loop holds it
//   while the connection manager hears of datagrams, links and carriers. The manager then takes its own lock, sends
//   datagrams, and, having released that, has QPs changed. DatagramPort's other mutexes are leaves but for NicLoop's
//   (datagram_port.h).
// The loop's thread waits for any of them, so none may be held by who waits for the loop: watchers, whose
// removal does, are removed without locks, or on the loop itself. Observers and LoopClients are called with none of
// them held. Nothing NIC-wide is taken to post, to poll or to place, but by devices that place late.
//
// WHO MOVES A CONNECTION. Three kinds of threads ask, none waits for another: a poster (work in the send queue), a
// poller of either CQ (what has arrived), the fabric's loop (the layer became ready, a deadline passed, a lease
// ended). Each sets a request bit and tries the lock in one atomic step (combining_lock.h). Whoever holds the lock
// serves all bits and can leave only when none is set: a request is either served by its maker or seen by the holder.
// The post itself happens before the bit (release), so the holder that sees the bit sees the work. Receiving never
// waits for sending: both are attempted in each turn, and a full layer only sets tx_blocked_.
// A poller alone leaves no bit when the lock is taken: it comes back, and if it does not, what it would have found is
// covered below, since the holder's turn ends with (a), (b) or (c) whoever asked for it. Its bits, set at every poll,
// could otherwise keep a poster serving for ever.
// A CQ watches connections that were idle for a while by readability alone. One with something left to send says so
// (Unfinished) and is driven again, for a peer that only receives never makes it readable.
//
// WHO WAKES IT NEXT (next_turn.h). After each turn, while the record layer is open, at least one of these holds, or
// what arrives would lie unread:
//   (a) the layer is armed for what the connection waits for: the loop's thread will call WatchedLlp::OnReady;
//   (b) the QP is parked with NicLoop under a lease: pollers move it, and NicLoop continues it when the lease ends;
//   (c) NicLoop::Continue is under way (a turn used up its budget).
// Readiness is one-shot, so OnReady first has the holder note that it was used up (kFired), and only then either
// parks the QP or continues it, which arms again. A continue that overtakes the note would otherwise believe the layer
// still armed.
//
// LEASE. Poll() of a CQ sets lease_end to now + 1 ms before it looks for completions. While the lease of either CQ
// lives, OnReady parks instead of pumping, so that one stretch of polling costs the loop's thread one wake-up,
// not one for each arrival. Ending a lease early (RequestNotify) and parking race like this:
//     parking:  parked += 1 (seq_cst);      then read lease_end; if it is over: parked -= 1 and pump
//     ending:   lease_end = 0 (seq_cst);    then read parked; if not 0: continue whoever has no lease left
// One of the two reads comes after the other's write: either the one who parks sees the lease over, or the one who ends
// it sees the count. Both act under NicLoop's mutex, so the parked client is found. If the pollers just stop, NicLoop's
// timer at the lease's end finds it: a one-sided operation of the peer waits at most one lease.
// An armed CQ grants no lease: programs arm, look once more and then sleep, and that last look must not keep the loop's
// thread away. RequestNotify stores the request before it ends the lease, and Poll() reads it again after it has set
// the lease, so of a poll and a request that race the request wins.
// Without a progress thread (simulation) CQs grant no lease: layers are always armed and the loop moves everything.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "emu/engine/rdmap_stream.h"
#include "emu/llp/llp.h"
#include "emu/nic/memory_registry.h"
#include "emu/nic/next_turn.h"
#include "emu/nic/nic.h"
#include "emu/nic/qp_connection.h"
#include "emu/nic/queue_pair.h"
#include "emu/nic/record_pump.h"
#include "emu/nic/watched_llp.h"

namespace stagecoach::emu {

class Connection final : public QpConnection {
 public:
  // Queues the RTR when the setup asks this end for one. Nothing moves before Serve().
  Connection(QueuePair& qp, ConnectionSetup setup);
  ~Connection() override;
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

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
