// QueuePair: send and receive queues, the state machine applied to them, and the connection they are bound to.
//
// Posting rules (ibv_post_send(3), ibv_post_recv(3)): a send is refused with EINVAL before RTS, a receive only in
// RESET, or always where the QP takes its Receives from an SRQ; in ERROR both are taken and complete as flushed. A full
// queue is ENOMEM. Completions appear on the CQs in order of posting, per queue; of an SRQ's Receives, in the order
// this QP consumed them.
//
// Threading: every public member from any thread. Locks: docs/locks_and_leases.md.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/prng.h"
#include "emu/engine/qp_transport.h"
#include "emu/inject/plan.h"
#include "emu/llp/llp.h"
#include "emu/nic/loop/nic_loop.h"
#include "emu/nic/objects/completion_queue.h"
#include "emu/nic/objects/memory_registry.h"
#include "emu/nic/objects/shared_receive_queue.h"
#include "emu/nic/queue/combining_lock.h"
#include "emu/nic/queue/qp_attributes.h"
#include "emu/nic/queue/work_queues.h"
#include "emu/wire/carrier_proof.h"

namespace stagecoach::emu {

class IwarpConnection;
class DatagramConnection;
enum class DatagramFate : uint8_t;
class IbConnection;
class Nic;
class QpConnection;
template <typename Transport>
class RecordPump;
struct RocePath;
class NicContext;

// Why a connection ended.
enum class CloseReason : uint8_t {
  kLocalClose,    // Disconnect(), or the QP left RTS by the program's wish
  kPeerClosed,    // orderly end of the peer's stream
  kPeerFault,     // the peer's Terminate: `fault`
  kLocalFault,    // a fault found here, told to the peer in a Terminate: `fault`
  kStreamFailed,  // the stream broke: `error` is an errno, 0 when it ended inside a record
};
const char* ToString(CloseReason reason);

struct CloseNotice {
  CloseReason reason = CloseReason::kLocalClose;
  int error = 0;
  std::optional<TransportFault> fault;
};

// The connection manager's view. Called on the fabric's loop, with no lock of the NIC held; each at most once per
// connection, OnFirstRecord first. A call may be running while, on another thread, the program destroys the QP or lets
// go of what the observer reports to: the caller shares the observer, so the observer must not own either.
class ConnectionObserver {
 public:
  virtual ~ConnectionObserver() = default;
  // The first record of the peer has arrived: at a responder that awaits an RTR (RFC 6581 section 4.2) the connection
  // is open only now.
  virtual void OnFirstRecord() = 0;
  // The QP is in ERROR and its queues are flushed. The stream may still be lingering to deliver a Terminate.
  virtual void OnClosed(const CloseNotice& notice) = 0;
};

struct QpCreate {
  QpType type = QpType::kRc;
  uint32_t pd = 0;
  CompletionQueue* send_cq = nullptr;
  CompletionQueue* receive_cq = nullptr;
  SharedReceiveQueue* srq = nullptr;  // null: Receives of its own
  QpCapabilities capabilities;
  bool signal_all = false;  // ibv_qp_init_attr::sq_sig_all
  void* cookie = nullptr;
};

class QueuePair final : public PolledConnection, public LoopClient {
 public:
  // Use Nic::CreateQp and Nic::DestroyQp.
  QueuePair(Nic& nic, NicContext& context, uint32_t handle, uint32_t qp_number, const QpCreate& create);
  ~QueuePair() override;
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  uint32_t handle() const { return handle_; }
  uint32_t qp_number() const { return qp_number_; }
  QpType type() const { return create_.type; }
  QpKind kind() const { return kind_; }
  uint32_t pd() const { return create_.pd; }
  // Which judges the memory of Receives.
  uint32_t receive_pd() const { return create_.srq != nullptr ? create_.srq->pd() : create_.pd; }
  NicContext& context() const { return context_; }
  void* cookie() const { return create_.cookie; }
  void set_cookie(void* cookie) { create_.cookie = cookie; }
  CompletionQueue* send_cq() const { return create_.send_cq; }
  CompletionQueue* receive_cq() const { return create_.receive_cq; }
  SharedReceiveQueue* srq() const { return create_.srq; }
  // What was granted: at least what was asked for.
  const QpCapabilities& capabilities() const { return create_.capabilities; }
  bool signal_all() const { return create_.signal_all; }

  // --- Posting ---

  // Puts one request on the send queue; nothing moves before RingDoorbell (one doorbell may serve a chain). 0, EINVAL
  // (state, too many SGEs, too much inline data, an opcode that cannot be posted) or ENOMEM (queue full). Inline data
  // is copied before it returns.
  int EnqueueSend(const SendRequest& request);
  // Enqueues all of them, or none and says why (ibv_wr_complete).
  int EnqueueSends(std::span<const SendRequest> requests);
  // Starts transmission of what was enqueued, on this thread if no other is at the connection. Never waits.
  void RingDoorbell();
  int PostSend(const SendRequest& request);
  int PostReceive(const ReceiveRequest& request);

  // --- State ---

  QpState state() const { return state_.load(std::memory_order_acquire); }
  // ibv_modify_qp: `mask` has the bits of ibv_qp_attr_mask. EINVAL for a transition or attributes the table does not
  // allow, or for values the device does not. An InfiniBand QP that comes to RTR is connected with what the attributes
  // name; EOPNOTSUPP if that is itself.
  int Modify(const QpAttributes& attributes, uint32_t mask);
  QpAttributes Query();
  // In SQD, with sends that have begun and not completed (ibv_qp_attr::sq_draining).
  bool IsDraining();

  // --- Connection manager ---

  // Ends the connection in order: records already queued are sent, other work is flushed, then the stream ends; the QP
  // goes to ERROR. Nothing happens without a connection. Idempotent.
  void Disconnect();
  bool IsConnected();
  // What this QP and `remote_qp` of the host of `remote` alone know: carriers between the two prove it from now on, in
  // this life of the QP and in each one after it. Replaces what was shared before.
  void ShareSecret(uint32_t remote_qp, const wire::Gid& remote, const wire::CarrierSecret& secret);
  // One line for people: number, state, work outstanding.
  std::string Describe();

  struct Counters {
    uint64_t sends = 0;  // completed in success, by kind
    uint64_t writes = 0;
    uint64_t reads = 0;
    uint64_t atomics = 0;
    uint64_t receives = 0;
    uint64_t flushed = 0;
    uint64_t failed = 0;
    uint64_t pumps_by_poller = 0;  // who moved the connection
    uint64_t pumps_by_poster = 0;
    uint64_t pumps_by_loop = 0;
    Llp::Counters llp;  // of this and earlier connections

    void Add(const Counters& other);
  };
  Counters counters();

  // --- For the NIC's DatagramPort ---
  DatagramFate TakeDatagram(const RocePath& from, const wire::IbHeader& header, ConstBytes payload);

  // --- PolledConnection, LoopClient; for the NIC ---
  bool Drive() override;
  int PollDescriptor() const override { return poll_descriptor_.load(std::memory_order_acquire); }
  const ArrivalMark* arrival_mark() const override { return arrival_mark_.load(std::memory_order_acquire); }
  bool Unfinished() const override { return unfinished_.load(std::memory_order_seq_cst); }
  // Said by the connection at the end of each turn.
  void SetUnfinished(bool unfinished);
  Instant LeaseEnd() const override;
  void CountParked(bool parked) override;
  void OnContinue() override;
  void OnDeadline(Instant now) override;
  void OnNotice() override;

 private:
  // With lock_ held.
  wire::CarrierSecret SecretOfPeer() const;

  friend class IwarpConnection;
  friend class DatagramConnection;
  friend class IbConnection;
  friend class NextTurn;
  friend class Nic;
  friend class WatchedLlp;
  template <typename Transport>
  friend class RecordPump;

  // What may be asked of the holder of lock_.
  enum Request : uint32_t {
    kTransmit = 1u << (CombiningLock::kFirstRequestBit + 0),  // work was posted
    kPoll = 1u << (CombiningLock::kFirstRequestBit + 1),      // a poller wants what has arrived
    kContinue = 1u << (CombiningLock::kFirstRequestBit + 2),  // move everything, then watch the stream
    kFired = 1u << (CombiningLock::kFirstRequestBit + 3),     // the stream's one-shot readiness was used up
    kTime = 1u << (CombiningLock::kFirstRequestBit + 4),      // a deadline may have passed
    kDisconnect = 1u << (CombiningLock::kFirstRequestBit + 5),
    kCqFailed = 1u << (CombiningLock::kFirstRequestBit + 6),  // a CQ has overrun: nothing can complete any more
    kDeviceFailed = 1u << (CombiningLock::kFirstRequestBit + 7),
  };

  // --- For Nic ---
  // A connection will come, with or without what RFC 7306 adds: from here on work may be posted, which waits for it. In
  // another state than INIT, nothing.
  void ExpectConnection(bool extensions);
  // It will not come after all: the QP is in error, and what waited is flushed. With a connection, nothing.
  void ForgoConnection();
  // Puts `connection` under the QP; 0, EINVAL or EISCONN.
  int Attach(std::unique_ptr<IwarpConnection> connection, std::shared_ptr<ConnectionObserver> observer);
  // A stream for the life `generation` of an InfiniBand QP; false, and it goes, if that has ended. On the loop.
  bool TakeCarrier(uint64_t generation, uint64_t serial, std::unique_ptr<Llp> llp);
  // The program's side of the QP ends: no completion or event will be made any more, and the CQs may go. True if the
  // stream lingers.
  bool Retire();
  // Aborts whatever is left.
  void Drop();
  EventAccount& async_account() { return async_account_; }
  bool Uses(const CompletionQueue* cq) const { return create_.send_cq == cq || create_.receive_cq == cq; }
  // Has the QP fail for a reason outside of it: kCqFailed or kDeviceFailed. Waits for nobody.
  void Fail(Request why) { Ask(why); }

  ReceiveSource& receive_source() {
    return create_.srq != nullptr ? static_cast<ReceiveSource&>(*create_.srq) : receives_;
  }

  // --- Under lock_ ---
  // Has the requests served by whoever holds lock_: true if it was this thread and something moved.
  bool Ask(uint32_t requests);
  void Enter() { lock_.Enter(); }
  bool Leave();
  // Between its making and its end, also by an exception, the calling thread holds the lock.
  class Turn {
   public:
    explicit Turn(QueuePair& qp) : qp_(qp) { qp_.Enter(); }
    ~Turn() { qp_.Leave(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    QueuePair& qp_;
  };
  // No exception for want of memory leaves it.
  bool Serve(uint32_t requests);
  bool ServeNow(uint32_t requests);
  // There is no memory for what the connection is at, which may be half done: it ends as by a fault of this end. If
  // there is none for that either, the loop's thread goes on with it.
  void GiveUp();
  // Takes the transition the table has for the event, if any.
  void Apply(QpEvent event);
  void ApplyTransition(const QpTransition& transition);
  void Raise(AsyncEventType type);
  // Tells of all events that have been raised and not told of: for want of memory, that is left to a later turn.
  void TellOfEvents();
  // Hands posted work to the engine, or carries it out if it is local. True if any was.
  bool SubmitPosted(QpTransport& transport);
  void ExecuteLocally(SendSlot& slot);
  // A local operation has failed, and what was posted before it has completed.
  bool LocalFailureIsDue() const { return failed_locally_ != nullptr && sends_.IsOldest(*failed_locally_); }
  void FinishSend(const SendCompletion& completion);
  void FinishReceive(const ReceiveCompletion& completion);
  // Completes what is done, in order.
  void RetireSends();
  // Completions of a queue, numbered as its work was posted.
  void Push(bool send, uint64_t number, const WorkCompletion& completion);
  void PushNow(bool send, uint64_t number, const WorkCompletion& completion);
  // Completions that are held back by injections: until when, and the end of that.
  std::optional<Instant> HeldUntil() const;
  void ReleaseHeld(Instant now);
  // A send as it stands in the queue now.
  void TracePosted(uint64_t number, const SendRequest& request);
  // 0 or EINVAL, for values and not for the mask.
  int CheckAttributes(const QpAttributes& attributes, uint32_t mask) const;
  void KeepAttributes(const QpAttributes& attributes, uint32_t mask);
  // Of an InfiniBand QP on its way to RTR, whose attributes are kept already: what moves its packets. 0, or ENOMEM.
  int MakeConnection(const std::optional<RocePath>& path, uint8_t datagram_mtu);
  // Completes everything posted as flushed, except an SRQ's Receives; the engine has nothing any more.
  void FlushQueues();
  void FlushSends();
  // What was to be complete before SQD is.
  bool IsSendQueueDrained() const;
  // Forgets completions the program has not seen yet (RESET).
  void DiscardCompletions();
  // Takes the connection out of the QP and deletes it, if its stream is done or `abort`. Without locks.
  void Reap(bool abort);
  // Done in part when it throws: DetachFromCqs() takes back what was.
  void AttachToCqs();
  void DetachFromCqs();
  // control_mutex_ held, lock_ not: destroys carriers that are not used any more, and has the CQs watch the one that
  // is.
  void ChangeCarriers();
  // What CQs that ask are told from now on. False: it is what they were told before.
  bool SetWatched(int descriptor, const ArrivalMark* mark);

  Nic& nic_;
  NicContext& context_;
  const uint32_t handle_;
  const uint32_t qp_number_;
  QpCreate create_;
  const QpKind kind_;
  const std::string trace_name_;
  PlaceInjections completions_;  // guarded by lock_
  std::atomic<QpState> state_{QpState::kReset};
  std::atomic<bool> retired_{false};
  std::atomic<int> poll_descriptor_{kNoLlp};
  std::atomic<const ArrivalMark*> arrival_mark_{nullptr};
  std::atomic<bool> unfinished_{false};

  SendQueue sends_;
  ReceiveQueue receives_;

  // Orders the coming and going of connections and carriers, with what the CQs and NicLoop know of them. Its place
  // among the locks: docs/locks_and_leases.md.
  std::mutex control_mutex_;
  CombiningLock lock_;
  QpAttributes attributes_;  // guarded by lock_, as all of this block
  struct SharedSecret {
    uint32_t remote_qp = 0;
    wire::Gid remote{};  // first QPs of first processes have one number on all hosts
    wire::CarrierSecret secret{};
  };
  std::optional<SharedSecret> shared_secret_;
  std::unique_ptr<QpConnection> connection_;
  std::shared_ptr<ConnectionObserver> observer_;
  bool first_record_to_tell_ = false;
  std::optional<CloseNotice> close_to_tell_;
  bool drain_to_tell_ = false;  // SQD was asked for with a notice
  const char* doom_ = nullptr;  // why the QP must fail, once something outside of it has
  // For want of memory, and is not done with it. Written with the lock.
  std::atomic<bool> is_giving_up_{false};
  uint32_t events_to_tell_ = 0;  // a bit for each AsyncEventType
  bool last_wqe_to_tell_ = false;
  // A local operation has failed: nothing behind it is carried out, what is before it is, and then the state says so
  // and it completes.
  SendSlot* failed_locally_ = nullptr;
  bool send_failed_ = false;      // a send has completed in error: all after it are flushed
  bool discarding_ = false;       // RESET is under way: work ends without a completion
  uint64_t shared_receives_ = 0;  // of an SRQ, completed here since the QP was made or reset
  Counters counters_;
  struct Held {
    bool send = false;
    uint64_t number = 0;
    WorkCompletion completion;
    Instant until{};
  };
  std::deque<Held> held_;

  EventAccount async_account_;  // guarded by the async event queue's lock
};

}  // namespace stagecoach::emu
