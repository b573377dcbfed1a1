#include "emu/nic/queue/queue_pair.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <new>
#include <utility>

#include "base/insist.h"
#include "base/mark.h"
#include "base/mutant.h"
#include "base/undoing.h"
#include "emu/nic/datagram/datagram_connection.h"
#include "emu/nic/infiniband/ib_connection.h"
#include "emu/nic/infiniband/roce_port.h"
#include "emu/nic/iwarp/iwarp_connection.h"
#include "emu/nic/nic.h"

namespace stagecoach::emu {
namespace {

CompletionStatus StatusOf(WorkStatus status) {
  switch (status) {
    case WorkStatus::kSuccess:
      return CompletionStatus::kSuccess;
    case WorkStatus::kLocalLengthError:
      return CompletionStatus::kLocalLengthError;
    case WorkStatus::kLocalProtectionError:
      return CompletionStatus::kLocalProtectionError;
    case WorkStatus::kLocalOperationError:
      return CompletionStatus::kLocalQpOperationError;
    case WorkStatus::kFlushed:
      return CompletionStatus::kFlushed;
    case WorkStatus::kRemoteInvalidRequest:
      return CompletionStatus::kRemoteInvalidRequest;
    case WorkStatus::kRemoteAccessError:
      return CompletionStatus::kRemoteAccessError;
    case WorkStatus::kRemoteOperationError:
      return CompletionStatus::kRemoteOperationError;
    case WorkStatus::kBadResponse:
      return CompletionStatus::kBadResponse;
    case WorkStatus::kLocalAccessError:
      return CompletionStatus::kLocalAccessError;
    case WorkStatus::kRetryExceeded:
      return CompletionStatus::kRetryExceeded;
    case WorkStatus::kRnrRetryExceeded:
      return CompletionStatus::kRnrRetryExceeded;
    case WorkStatus::kFatal:
      break;
  }
  return CompletionStatus::kFatal;
}

CompletionOpcode OpcodeOf(PostOpcode opcode) {
  switch (opcode) {
    case PostOpcode::kSend:
    case PostOpcode::kSendInvalidate:
    case PostOpcode::kSendImmediate:
      return CompletionOpcode::kSend;
    case PostOpcode::kWrite:
    case PostOpcode::kWriteImmediate:
      return CompletionOpcode::kWrite;
    case PostOpcode::kRead:
      return CompletionOpcode::kRead;
    case PostOpcode::kCompareSwap:
      return CompletionOpcode::kCompareSwap;
    case PostOpcode::kFetchAdd:
      return CompletionOpcode::kFetchAdd;
    case PostOpcode::kLocalInvalidate:
      return CompletionOpcode::kLocalInvalidate;
    case PostOpcode::kBindWindow:
      break;
  }
  return CompletionOpcode::kBindWindow;
}

bool IsLocalOperation(PostOpcode opcode) {
  return opcode == PostOpcode::kLocalInvalidate || opcode == PostOpcode::kBindWindow;
}

QpKind KindOf(const Nic& nic, QpType type) {
  if (nic.profile().transport == TransportKind::kIwarp) return QpKind::kIwarp;
  switch (type) {
    case QpType::kRc:
      break;
    case QpType::kUc:
      return QpKind::kUc;
    case QpType::kUd:
      return QpKind::kUd;
  }
  return QpKind::kRc;
}

// What attributes may be at most.
constexpr uint8_t kTimerCodeMax = 31;
constexpr uint8_t kRetryMax = 7;

}  // namespace

const char* ToString(CloseReason reason) {
  switch (reason) {
    case CloseReason::kLocalClose:
      return "closed by this end";
    case CloseReason::kPeerClosed:
      return "closed by the peer";
    case CloseReason::kPeerFault:
      return "terminated by the peer";
    case CloseReason::kLocalFault:
      return "terminated by this end";
    case CloseReason::kStreamFailed:
      return "stream failed";
  }
  return "unknown";
}

void QueuePair::Counters::Add(const Counters& other) {
  sends += other.sends;
  writes += other.writes;
  reads += other.reads;
  atomics += other.atomics;
  receives += other.receives;
  flushed += other.flushed;
  failed += other.failed;
  pumps_by_poller += other.pumps_by_poller;
  pumps_by_poster += other.pumps_by_poster;
  pumps_by_loop += other.pumps_by_loop;
  llp.Add(other.llp);
}

QueuePair::QueuePair(Nic& nic, NicContext& context, uint32_t handle, uint32_t qp_number, const QpCreate& create)
    : nic_(nic),
      context_(context),
      handle_(handle),
      qp_number_(qp_number),
      create_(create),
      kind_(KindOf(nic, create.type)),
      trace_name_(nic.name() + "/qp-" + std::to_string(qp_number)),
      completions_(nic.injections(), SetOf(InjectionAction::kDelayCompletion), trace_name_ + "/completions"),
      sends_(create.capabilities, {.kind = kind_,
                                   .max_read_sge = nic.profile().max_sge_rd,
                                   .atomics = nic.profile().atomics,
                                   .signal_all = create.signal_all,
                                   .nic = &nic,
                                   .pd = create.pd}),
      receives_(create.capabilities) {}

QueuePair::~QueuePair() {
  nic_.loop().Remove(this);
}

// --- Posting ---

int QueuePair::EnqueueSend(const SendRequest& request) {
  std::lock_guard lock(sends_.mutex());
  if (RulesOf(state()).post_send == PostRule::kRefuse) return EINVAL;
  const uint64_t number = sends_.posted();
  const int error = sends_.Add(request);
  if (error == 0) TracePosted(number, request);
  return error;
}

int QueuePair::EnqueueSends(std::span<const SendRequest> requests) {
  std::lock_guard lock(sends_.mutex());
  if (RulesOf(state()).post_send == PostRule::kRefuse) return EINVAL;
  for (size_t i = 0; i < requests.size(); ++i) {
    if (const int error = sends_.Check(requests[i], i)) return error;
  }
  for (const SendRequest& request : requests) {
    const uint64_t number = sends_.posted();
    // Room only grows while we have the lock.
    sends_.Add(request);
    TracePosted(number, request);
  }
  return 0;
}

void QueuePair::TracePosted(uint64_t number, const SendRequest& request) {
  if (nic_.trace() == nullptr) return;
  const bool signaled = request.signaled || create_.signal_all;
  Trace(nic_.trace(), nic_.fabric().Now(), trace_name_, "work.posted",
        {{"number", number}, {"signaled", uint64_t{signaled}}});
}

void QueuePair::RingDoorbell() {
  Ask(kTransmit);
}

int QueuePair::PostSend(const SendRequest& request) {
  const int error = EnqueueSend(request);
  if (error == 0) RingDoorbell();
  return error;
}

int QueuePair::PostReceive(const ReceiveRequest& request) {
  if (create_.srq != nullptr) return EINVAL;
  PostRule rule;
  {
    std::lock_guard lock(receives_.mutex());
    rule = RulesOf(state()).post_receive;
    if (rule == PostRule::kRefuse) return EINVAL;
    if (const int error = receives_.Add(request)) return error;
  }
  // A connection takes it when a Send needs it. But if the QP went to ERROR meanwhile, its flush may have missed this
  // one.
  if (rule == PostRule::kFlush || state() == QpState::kErr) {
    STAGECOACH_MARK("qp.receive_posted_in_error");
    Ask(kTransmit);
  }
  return 0;
}

// --- State ---

int QueuePair::CheckAttributes(const QpAttributes& attributes, uint32_t mask) const {
  const DeviceProfile& profile = nic_.profile();
  const auto has = [mask](uint32_t attribute) { return (mask & attribute) != 0; };
  if (has(qp_attr::kPort) && attributes.port != 1) return EINVAL;
  if (has(qp_attr::kPkeyIndex) && attributes.pkey_index != 0) return EINVAL;
  if (has(qp_attr::kMaxQpRdAtomic) && attributes.max_rd_atomic > profile.max_ord) return EINVAL;
  if (has(qp_attr::kMaxDestRdAtomic) && attributes.max_dest_rd_atomic > profile.max_ird) return EINVAL;
  if (kind_ == QpKind::kIwarp) return 0;
  if (has(qp_attr::kAltPath)) return EINVAL;  // there is one port, and nothing migrates
  if (has(qp_attr::kPathMtu) && (attributes.path_mtu < 1 || attributes.path_mtu > profile.max_mtu)) return EINVAL;
  if (has(qp_attr::kTimeout) && attributes.timeout > kTimerCodeMax) return EINVAL;
  if (has(qp_attr::kMinRnrTimer) && attributes.min_rnr_timer > kTimerCodeMax) return EINVAL;
  if (has(qp_attr::kRetryCnt) && attributes.retry_count > kRetryMax) return EINVAL;
  if (has(qp_attr::kRnrRetry) && attributes.rnr_retry > kRetryMax) return EINVAL;
  if (has(qp_attr::kDestQpn) && attributes.destination_qp_number > wire::kIbQpMask) return EINVAL;
  return 0;
}

void QueuePair::KeepAttributes(const QpAttributes& attributes, uint32_t mask) {
  const auto has = [mask](uint32_t attribute) { return (mask & attribute) != 0; };
  // Numbers of packets have 24 bits; more is not looked at.
  const uint32_t psn_bits = kind_ == QpKind::kIwarp ? ~uint32_t{0} : wire::kPsnMask;
  if (has(qp_attr::kAccessFlags)) attributes_.access = attributes.access;
  if (has(qp_attr::kPkeyIndex)) attributes_.pkey_index = attributes.pkey_index;
  if (has(qp_attr::kQkey)) attributes_.qkey = attributes.qkey;
  if (has(qp_attr::kPort)) attributes_.port = attributes.port;
  if (has(qp_attr::kPathMtu)) attributes_.path_mtu = attributes.path_mtu;
  if (has(qp_attr::kAv)) attributes_.path = attributes.path;
  if (has(qp_attr::kDestQpn)) attributes_.destination_qp_number = attributes.destination_qp_number;
  if (has(qp_attr::kRqPsn)) attributes_.receive_psn = attributes.receive_psn & psn_bits;
  if (has(qp_attr::kSqPsn)) attributes_.send_psn = attributes.send_psn & psn_bits;
  if (has(qp_attr::kMaxQpRdAtomic)) attributes_.max_rd_atomic = attributes.max_rd_atomic;
  if (has(qp_attr::kMaxDestRdAtomic)) attributes_.max_dest_rd_atomic = attributes.max_dest_rd_atomic;
  if (has(qp_attr::kMinRnrTimer)) attributes_.min_rnr_timer = attributes.min_rnr_timer;
  if (has(qp_attr::kTimeout)) attributes_.timeout = attributes.timeout;
  if (has(qp_attr::kRetryCnt)) attributes_.retry_count = attributes.retry_count;
  if (has(qp_attr::kRnrRetry)) attributes_.rnr_retry = attributes.rnr_retry;
}

int QueuePair::Modify(const QpAttributes& attributes, uint32_t mask) {
  // The system is asked for the way, and for its MTU, which is not to be done under the lock.
  std::optional<RocePath> path;
  if (kind_ != QpKind::kIwarp && (mask & qp_attr::kAv) != 0) {
    // Nothing is named by local identifiers on Ethernet (annex A16 of the InfiniBand specification).
    if (!attributes.path.is_global) return EINVAL;
    const Result<RocePath, int> found = nic_.roce().PathTo(attributes.path);
    if (!found) return found.error();
    path = *found;
  }
  const bool connects = kind_ != QpKind::kIwarp && (mask & qp_attr::kState) != 0 && attributes.state == QpState::kRtr;
  const uint8_t datagram_mtu = connects && kind_ == QpKind::kUd ? nic_.active_mtu() : 0;
  std::unique_lock control(control_mutex_, std::defer_lock);
  if (connects) control.lock();
  // Before the state says that it is connected, as it may fail. A UD QP has no stream that pollers could move; one that
  // has a connection still is refused.
  const bool attaches = connects && kind_ != QpKind::kUd && connection_ == nullptr;
  Undoing unattached([&] {
    if (attaches) DetachFromCqs();
  });
  if (attaches) AttachToCqs();
  bool reap = false;
  std::optional<Turn> turn(std::in_place, *this);
  const Result<const QpTransition*, QpModifyFault> transition =
      CheckQpModify(kind_, state(), attributes.state, attributes.current_state, mask);
  int error = transition ? CheckAttributes(attributes, mask) : EINVAL;
  if (error == 0 && connects && connection_ != nullptr) error = EINVAL;  // what was there before has not ended yet
  const QpAttributes before = attributes_;
  if (error == 0) KeepAttributes(attributes, mask);
  if (error == 0 && connects) {
    error = MakeConnection(path, datagram_mtu);
    if (error != 0) attributes_ = before;
  }
  if (error == 0) {
    drain_to_tell_ =
        (*transition)->to == QpState::kSqd && (mask & qp_attr::kEnSqdAsyncNotify) != 0 && attributes.notify_drained;
    const QpState from = state();
    const QpState to = (*transition)->to;
    uint32_t requests = kTransmit;
    if (to == QpState::kErr && connection_ != nullptr && connection_->IsOpen()) {
      STAGECOACH_MARK("qp.moved_to_error_while_connected");
      // Served by our own Leave(), so done when this returns.
      requests |= kDisconnect;
    } else {
      if (to == QpState::kReset && connection_ != nullptr) {
        STAGECOACH_MARK("qp.reset_with_a_connection");
        // What it was given is forgotten, not flushed: nothing of it may wake anybody or take room in a CQ.
        discarding_ = true;
        const Undoing no_longer([this] { discarding_ = false; });
        connection_->Abort();
        reap = true;
      }
      if (connects) {
        Trace(nic_.trace(), nic_.fabric().Now(), trace_name_, "connection.attached",
              {{"pd", uint64_t{pd()}}, {"receive_pd", uint64_t{receive_pd()}}});
      }
      // Sends failed, and the program knows: those posted from now on are new.
      if (from == QpState::kSqe && to == QpState::kRts) send_failed_ = false;
      ApplyTransition(**transition);
      if (connection_ != nullptr) connection_->OnModified(to, attributes_);
      if (connection_ != nullptr && path && !connects) connection_->OnPath(*path);
    }
    lock_.Request(requests);
    unattached.Done();
  }
  turn.reset();
  if (error != 0) return error;
  if (connects) control.unlock();
  if (reap) Reap(/*abort=*/true);
  return 0;
}

int QueuePair::MakeConnection(const std::optional<RocePath>& path, uint8_t datagram_mtu) {
  try {
    if (kind_ == QpKind::kUd) {
      connection_ = std::make_unique<DatagramConnection>(*this, datagram_mtu);
    } else {
      connection_ = std::make_unique<IbConnection>(*this, attributes_, *path, SecretOfPeer());
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return ENOMEM;
  }
}

QpAttributes QueuePair::Query() {
  const Turn turn(*this);
  QpAttributes attributes = attributes_;
  attributes.state = attributes.current_state = state();
  return attributes;
}

bool QueuePair::IsDraining() {
  const Turn turn(*this);
  const bool draining = state() == QpState::kSqd && !IsSendQueueDrained();
  // "Drained" says that the completions can be polled.
  if (state() == QpState::kSqd && !draining) ReleaseHeld(Instant::max());
  return draining;
}

bool QueuePair::IsSendQueueDrained() const {
  // What fails here when what is before it is done leaves SQD for an error; that is no drain.
  if (failed_locally_ != nullptr) return false;
  return !sends_.HasUnretired() || (connection_ != nullptr && !connection_->SendsInProgress());
}

void QueuePair::Apply(QpEvent event) {
  if (const QpTransition* transition = FindQpTransition(kind_, state(), event)) ApplyTransition(*transition);
}

void QueuePair::ApplyTransition(const QpTransition& transition) {
  {
    // Posters judge the state under these: after a discard nothing is added that was judged by the old state.
    std::scoped_lock lock(sends_.mutex(), receives_.mutex());
    state_.store(transition.to, std::memory_order_release);
    if ((transition.effects & qp_effect::kDiscardWork) != 0) {
      sends_.Clear();
      sends_.SetExtensions(false);
      receives_.Clear();
      shared_receives_ = 0;
    }
  }
  if ((transition.effects & qp_effect::kDiscardWork) != 0) DiscardCompletions();
  // Flushing, starting and stopping follow from the state (Serve, SubmitPosted), closing from the caller. The last
  // work request is reached when what was taken from the SRQ has completed (FlushQueues).
  if (create_.srq != nullptr && (transition.effects & qp_effect::kRaiseLastWqe) != 0) last_wqe_to_tell_ = true;
  // Last, as it can fail: nobody comes here a second time.
  if ((transition.effects & qp_effect::kRaiseCommEstablished) != 0) Raise(AsyncEventType::kQpCommunicationEstablished);
  if ((transition.effects & qp_effect::kRaiseFatal) != 0) Raise(AsyncEventType::kQpFatal);
  if ((transition.effects & qp_effect::kRaiseRequestError) != 0) Raise(AsyncEventType::kQpRequestError);
  if ((transition.effects & qp_effect::kRaiseAccessError) != 0) Raise(AsyncEventType::kQpAccessError);
}

void QueuePair::DiscardCompletions() {
  doom_ = nullptr;
  is_giving_up_ = false;
  last_wqe_to_tell_ = false;
  failed_locally_ = nullptr;
  send_failed_ = false;
  held_.clear();
  if (retired_.load()) return;
  create_.send_cq->RemoveCompletionsOf(qp_number_);
  if (create_.receive_cq != create_.send_cq) create_.receive_cq->RemoveCompletionsOf(qp_number_);
}

void QueuePair::Raise(AsyncEventType type) {
  events_to_tell_ |= 1u << static_cast<unsigned>(type);
  TellOfEvents();
}

void QueuePair::TellOfEvents() {
  for (; events_to_tell_ != 0; events_to_tell_ &= events_to_tell_ - 1) {
    if (retired_.load()) continue;
    const auto type = static_cast<AsyncEventType>(std::countr_zero(events_to_tell_));
    context_.async_events().Push({.type = type, .cq = nullptr, .qp = this, .account = &async_account_});
  }
}

// --- The connection's lock ---

bool QueuePair::Ask(uint32_t requests) {
  return lock_.Request(requests) && Leave();
}

bool QueuePair::Leave() {
  bool moved = false;
  lock_.Leave([&](uint32_t requests) { moved = Serve(requests) || moved; });
  return moved;
}

bool QueuePair::Serve(uint32_t requests) {
  try {
    if (!is_giving_up_) return ServeNow(requests);
  } catch (const std::bad_alloc&) {
    STAGECOACH_MARK("qp.no_memory");
  }
  GiveUp();
  return true;
}

void QueuePair::GiveUp() {
  is_giving_up_ = true;
  doom_ = "no memory";
  try {
    Insist([this] {
      TellOfEvents();
      Apply(QpEvent::kLocalFault);
      if (connection_ != nullptr) connection_->Abort();
      sends_.FlushSubmitted();
      FlushQueues();
    });
    is_giving_up_ = false;
    nic_.Complain("no memory for what " + trace_name_ + " was at; it is in error");
  } catch (const std::bad_alloc&) {
    if (!is_giving_up_) return;  // nobody hears of it
    // The loop's thread goes on with it, as nobody else need ever ask for a turn.
    STAGECOACH_MARK("qp.no_memory_to_give_up");
    nic_.loop().Continue(this);
  }
}

bool QueuePair::ServeNow(uint32_t requests) {
  bool moved = false;
  if (doom_ == nullptr && (requests & kCqFailed) != 0) doom_ = "completion queue overrun";
  if (doom_ == nullptr && (requests & kDeviceFailed) != 0) {
    STAGECOACH_MARK("qp.device_has_failed");
    doom_ = "the device has failed";
  }
  if (connection_ != nullptr) {
    counters_.pumps_by_poller += (requests & kPoll) != 0;
    counters_.pumps_by_poster += (requests & kTransmit) != 0;
    counters_.pumps_by_loop += (requests & kContinue) != 0;
    if ((requests & kTime) != 0) ReleaseHeld(nic_.fabric().Now());
    moved = connection_->Serve(requests);
  } else if (doom_ != nullptr) {
    Apply(QpEvent::kLocalFault);
  }
  if (state() == QpState::kErr && (connection_ == nullptr || connection_->HasEnded())) FlushQueues();
  if (state() == QpState::kSqe) FlushSends();
  return moved;
}

bool QueuePair::SubmitPosted(QpTransport& transport) {
  bool any = false;
  while (sends_.HasUnsubmitted() && failed_locally_ == nullptr && RulesOf(state()).post_send == PostRule::kProcess) {
    SendSlot& slot = sends_.NextToSubmit();
    if (IsLocalOperation(slot.posted)) {
      RetireSends();
      if (slot.fence && sends_.HasUnretired()) {
        STAGECOACH_MARK("qp.fenced_local_operation_waits");
        break;
      }
      ExecuteLocally(slot);
    } else {
      transport.Submit(&slot);
    }
    sends_.AdvanceSubmitted();
    any = true;
  }
  return any;
}

void QueuePair::ExecuteLocally(SendSlot& slot) {
  // What the window gave access to is reachable by it no more, and what was written through it, by any QP of the PD if
  // it is of type 1, is in place when this is done.
  if (slot.posted == PostOpcode::kBindWindow) {
    const WindowBinding& bind = slot.bind;
    const std::optional<uint64_t> offset = nic_.registry().BindWindow(pd(), qp_number_, bind);
    nic_.SettlePlacements();
    if (offset) {
      if (bind.length == 0) {
        Trace(nic_.trace(), nic_.fabric().Now(), trace_name_, "window.invalidated",
              {{"stag", uint64_t{bind.BoundRkey()}}, {"by", "bind"}});
      } else {
        Trace(nic_.trace(), nic_.fabric().Now(), trace_name_, "window.bound",
              {{"stag", uint64_t{bind.BoundRkey()}},
               {"region", uint64_t{bind.region_lkey}},
               {"offset", *offset},
               {"bytes", bind.length},
               {"access", uint64_t{bind.access}},
               {"type", uint64_t{bind.type == WindowType::kType1 ? 1u : 2u}}});
      }
      slot.done = true;
      return;
    }
    STAGECOACH_MARK("qp.window_bind_refused");
  } else {
    const bool invalidated = nic_.registry().InvalidateLocally(pd(), qp_number_, slot.remote_stag).has_value();
    nic_.SettlePlacements();
    if (invalidated) {
      Trace(nic_.trace(), nic_.fabric().Now(), trace_name_, "window.invalidated",
            {{"stag", uint64_t{slot.remote_stag}}, {"by", "work request"}});
      slot.done = true;
      return;
    }
    STAGECOACH_MARK("qp.local_invalidation_refused");
  }
  // [IBTA 11.6.2] Failed binds and failed invalidations alike are memory management operation errors.
  slot.status = CompletionStatus::kWindowBindError;
  failed_locally_ = &slot;
}

void QueuePair::FinishSend(const SendCompletion& completion) {
  SendSlot& slot = sends_.SlotOf(completion.work);
  slot.done = true;
  slot.status = StatusOf(completion.status);
  slot.byte_length = completion.byte_length;
}

void QueuePair::RetireSends() {
  // The state changes before a completion shows why, as programs that see one ask for the other.
  if (failed_locally_ != nullptr && RulesOf(state()).post_send == PostRule::kFlush) {
    std::exchange(failed_locally_, nullptr)->done = true;
  }
  while (SendSlot* slot = sends_.OldestDone()) {
    // What was carried out behind a failure, a Send behind a Read that never came back, is flushed all the same: from
    // the first error on a program takes nothing of the queue for done (ibv_modify_qp(3), state ERR).
    if (send_failed_ && slot->status == CompletionStatus::kSuccess) {
      STAGECOACH_MARK("qp.work_done_behind_a_failure_is_flushed");
    }
    if (send_failed_) slot->status = CompletionStatus::kFlushed;
    send_failed_ = slot->status != CompletionStatus::kSuccess;
    const WorkCompletion completion{.wr_id = slot->wr_id,
                                    .status = slot->status,
                                    .opcode = OpcodeOf(slot->posted),
                                    .byte_length = slot->byte_length,
                                    .qp_number = qp_number_};
    const bool wanted = slot->signaled || slot->status != CompletionStatus::kSuccess;
    if (slot->status == CompletionStatus::kSuccess) {
      switch (slot->posted) {
        case PostOpcode::kSend:
        case PostOpcode::kSendInvalidate:
        case PostOpcode::kSendImmediate:
          ++counters_.sends;
          break;
        case PostOpcode::kWrite:
        case PostOpcode::kWriteImmediate:
          ++counters_.writes;
          break;
        case PostOpcode::kRead:
          ++counters_.reads;
          break;
        case PostOpcode::kCompareSwap:
        case PostOpcode::kFetchAdd:
          ++counters_.atomics;
          break;
        case PostOpcode::kLocalInvalidate:
        case PostOpcode::kBindWindow:
          break;
      }
    }
    // The slot first: whoever sees the completion may post again at once.
    const uint64_t number = sends_.retired();
    sends_.Retire();
    if (wanted) Push(/*send=*/true, number, completion);
  }
  if (drain_to_tell_ && state() == QpState::kSqd && IsSendQueueDrained()) {
    ReleaseHeld(Instant::max());
    drain_to_tell_ = false;
    Raise(AsyncEventType::kSendQueueDrained);
  }
}

void QueuePair::FinishReceive(const ReceiveCompletion& completion) {
  if (completion.status == WorkStatus::kSuccess) ++counters_.receives;
  const WorkCompletion entry{
      .wr_id = completion.work->wr_id,
      .status = StatusOf(completion.status),
      .opcode = completion.write_immediate ? CompletionOpcode::kReceiveWriteImmediate : CompletionOpcode::kReceive,
      .byte_length = completion.byte_length,
      .qp_number = qp_number_,
      .with_invalidate = completion.invalidated,
      .invalidated_rkey = completion.invalidated_stag,
      .has_immediate = completion.has_immediate,
      .immediate = completion.immediate,
      .has_grh = completion.has_grh,
      .source_qp = completion.source_qp,
      .service_level = completion.route_kind,
      .solicited = completion.solicited};
  uint64_t number = 0;
  if (create_.srq != nullptr) {
    number = shared_receives_++;
    create_.srq->Release(completion.work);
  } else {
    number = receives_.retired();
    receives_.Retire();
  }
  Push(/*send=*/false, number, entry);
}

void QueuePair::Push(bool send, uint64_t number, const WorkCompletion& completion) {
  if (discarding_) return;
  if (completion.status == CompletionStatus::kFlushed) {
    ++counters_.flushed;
  } else if (completion.status != CompletionStatus::kSuccess) {
    ++counters_.failed;
  }
  if (!completions_.IsWatched() && held_.empty()) return PushNow(send, number, completion);
  const bool ended = connection_ == nullptr || connection_->HasEnded();
  const bool delay = !ended && completions_.Judge() != nullptr;
  if (delay) TraceFired(nic_.trace(), nic_.fabric().Now(), trace_name_, completions_.fired());
  if (ended && !held_.empty()) STAGECOACH_MARK("qp.held_completions_let_go_by_the_end");
  if (ended || (held_.empty() && !delay)) {
    ReleaseHeld(Instant::max());
    return PushNow(send, number, completion);
  }
  if (!delay) STAGECOACH_MARK("qp.completion_held_behind_another");
  const Duration wait = delay ? completions_.DrawTime() : Duration();
  Insist([&] { held_.push_back({send, number, completion, nic_.fabric().Now() + wait}); });
}

void QueuePair::PushNow(bool send, uint64_t number, const WorkCompletion& completion) {
  if (retired_.load()) return;
  if (nic_.trace() != nullptr) {
    Trace(nic_.trace(), nic_.fabric().Now(), trace_name_, send ? "send.completed" : "receive.completed",
          {{"number", number}, {"status", ToString(completion.status)}, {"bytes", uint64_t{completion.byte_length}}});
  }
  if (!(send ? create_.send_cq : create_.receive_cq)->Push(completion) && doom_ == nullptr) {
    doom_ = "completion queue overrun";
  }
  if (completion.with_invalidate &&
      STAGECOACH_MUTANT("completion-doubled", "the Receive of a Send with Invalidate completes twice")) {
    create_.receive_cq->Push(completion);
  }
}

std::optional<Instant> QueuePair::HeldUntil() const {
  if (held_.empty()) return std::nullopt;
  return held_.front().until;
}

void QueuePair::ReleaseHeld(Instant now) {
  while (!held_.empty() && held_.front().until <= now) {
    const Held held = held_.front();
    held_.pop_front();
    PushNow(held.send, held.number, held.completion);
  }
}

std::string QueuePair::Describe() {
  const Turn turn(*this);
  return trace_name_ + ": " + ToString(state()) + ", " + std::to_string(sends_.posted() - sends_.retired()) + " of " +
         std::to_string(sends_.posted()) + " sends and " + std::to_string(receives_.posted() - receives_.retired()) +
         " of " + std::to_string(receives_.posted()) + " Receives outstanding, " + std::to_string(held_.size()) +
         " completions held back, " + (connection_ == nullptr ? "no connection" : connection_->PhaseName());
}

void QueuePair::FlushSends() {
  for (; sends_.HasUnsubmitted(); sends_.AdvanceSubmitted()) {
    STAGECOACH_MARK("qp.work_never_begun_is_flushed");
    SendSlot& slot = sends_.NextToSubmit();
    slot.done = true;
    slot.status = CompletionStatus::kFlushed;
  }
  RetireSends();
}

void QueuePair::FlushQueues() {
  ReleaseHeld(Instant::max());
  FlushSends();
  if (std::exchange(last_wqe_to_tell_, false)) Raise(AsyncEventType::kQpLastWqeReached);
  while (const ReceiveWork* work = receives_.Oldest()) {
    if (STAGECOACH_MUTANT("flush-incomplete", "Receives are not flushed when the connection ends")) break;
    const WorkCompletion completion{.wr_id = work->wr_id,
                                    .status = CompletionStatus::kFlushed,
                                    .opcode = CompletionOpcode::kReceive,
                                    .qp_number = qp_number_};
    const uint64_t number = receives_.retired();
    receives_.Retire();
    Push(/*send=*/false, number, completion);
  }
}

// --- Connection ---

void QueuePair::ExpectConnection(bool extensions) {
  const Turn turn(*this);
  if (FindQpTransition(kind_, state(), QpEvent::kAccepted) != nullptr) {
    {
      std::lock_guard lock(sends_.mutex());
      sends_.SetExtensions(extensions);
    }
    Apply(QpEvent::kAccepted);
  }
}

void QueuePair::ForgoConnection() {
  const Turn turn(*this);
  if (connection_ == nullptr) {
    Apply(QpEvent::kStreamLost);
    lock_.Request(kTransmit);
  }
}

int QueuePair::Attach(std::unique_ptr<IwarpConnection> connection, std::shared_ptr<ConnectionObserver> observer) {
  std::lock_guard control(control_mutex_);
  if (connection_ != nullptr) return EISCONN;
  if (retired_.load()) return EINVAL;  // its CQs may be gone
  // As for Modify. A poller that finds no descriptor would have nothing to watch, and hears of none later.
  SetWatched(connection->PollDescriptor(), connection->arrival_mark());
  Undoing unattached([this] {
    DetachFromCqs();
    SetWatched(kNoLlp, nullptr);
  });
  AttachToCqs();
  std::optional<Turn> turn(std::in_place, *this);
  const QpTransition* const transition = FindQpTransition(kind_, state(), QpEvent::kConnected);
  const int error = transition == nullptr ? EINVAL : 0;
  if (error == 0) {
    {
      std::lock_guard lock(sends_.mutex());
      sends_.SetExtensions(connection->extensions());
    }
    connection_ = std::move(connection);
    observer_ = std::move(observer);
    first_record_to_tell_ = false;
    close_to_tell_.reset();
    ApplyTransition(*transition);
    unattached.Done();
  }
  turn.reset();
  if (error != 0) return error;
  Trace(nic_.trace(), nic_.fabric().Now(), trace_name_, "connection.attached",
        {{"pd", uint64_t{pd()}}, {"receive_pd", uint64_t{receive_pd()}}});
  Ask(kContinue);
  return 0;
}

void QueuePair::ShareSecret(uint32_t remote_qp, const wire::Gid& remote, const wire::CarrierSecret& secret) {
  const Turn turn(*this);
  shared_secret_ = {remote_qp, remote, secret};
  const wire::CarrierSecret known = SecretOfPeer();
  if (connection_ != nullptr && known != wire::CarrierSecret{}) connection_->OnSecret(known);
}

wire::CarrierSecret QueuePair::SecretOfPeer() const {
  const bool is_the_peers = shared_secret_ && shared_secret_->remote_qp == attributes_.destination_qp_number &&
                            shared_secret_->remote == attributes_.path.gid;
  return is_the_peers ? shared_secret_->secret : wire::CarrierSecret{};
}

bool QueuePair::TakeCarrier(uint64_t generation, uint64_t serial, std::unique_ptr<Llp> llp) {
  std::lock_guard control(control_mutex_);
  bool taken = false;
  {
    const Turn turn(*this);
    taken = connection_ != nullptr && connection_->TakeCarrier(generation, serial, llp);
    if (taken) lock_.Request(kContinue);
  }
  if (taken) ChangeCarriers();
  return taken;
}

DatagramFate QueuePair::TakeDatagram(const RocePath& from, const wire::IbHeader& header, ConstBytes payload) {
  const Turn turn(*this);
  const DatagramFate fate =
      connection_ != nullptr ? connection_->TakeDatagram(from, header, payload) : DatagramFate::kNotReceiving;
  lock_.Request(kContinue);
  return fate;
}

void QueuePair::ChangeCarriers() {
  std::unique_ptr<WatchedLlp> old;  // goes without the lock
  int descriptor = kNoLlp;
  const ArrivalMark* mark = nullptr;
  {
    const Turn turn(*this);
    if (connection_ != nullptr) {
      old = connection_->TakeOldCarriers();
      descriptor = connection_->PollDescriptor();
      mark = connection_->arrival_mark();
    }
  }
  // A CQ that watches the old one, which is there still, must not find another one in its place.
  if (!SetWatched(descriptor, mark) || retired_.load()) return;
  create_.send_cq->OnDescriptorChange(this);
  if (create_.receive_cq != create_.send_cq) create_.receive_cq->OnDescriptorChange(this);
}

bool QueuePair::SetWatched(int descriptor, const ArrivalMark* mark) {
  const bool is_same_mark = mark == arrival_mark_.exchange(mark, std::memory_order_acq_rel);
  return descriptor != poll_descriptor_.exchange(descriptor, std::memory_order_acq_rel) || !is_same_mark;
}

void QueuePair::AttachToCqs() {
  create_.send_cq->Attach(this);
  if (create_.receive_cq != create_.send_cq) create_.receive_cq->Attach(this);
}

void QueuePair::DetachFromCqs() {
  create_.send_cq->Detach(this);
  if (create_.receive_cq != create_.send_cq) create_.receive_cq->Detach(this);
}

void QueuePair::Disconnect() {
  Ask(kDisconnect);
}

bool QueuePair::IsConnected() {
  const Turn turn(*this);
  return connection_ != nullptr && connection_->IsOpen();
}

QueuePair::Counters QueuePair::counters() {
  const Turn turn(*this);
  Counters counters = counters_;
  if (connection_ != nullptr) counters.llp.Add(connection_->llp_counters());
  return counters;
}

void QueuePair::Reap(bool abort) {
  std::unique_ptr<QpConnection> connection;
  {
    std::lock_guard control(control_mutex_);
    {
      const Turn turn(*this);
      if (connection_ != nullptr && (abort || connection_->IsClosed())) {
        connection_->Abort();
        counters_.llp.Add(connection_->llp_counters());
        connection = std::move(connection_);
      }
    }
    if (connection == nullptr) return;
    if (!retired_.load()) DetachFromCqs();
    SetWatched(kNoLlp, nullptr);
    // Still under the lock: the next connection must not find its own deadline withdrawn.
    nic_.loop().SetDeadline(this, std::nullopt);
  }
  // Deleted here, without locks: that waits until the watcher of its record layer is at rest.
}

bool QueuePair::Retire() {
  std::shared_ptr<ConnectionObserver> observer;  // goes without locks
  // For the trace, as they are when the program hears no more: below, work is flushed without a word.
  uint64_t sends_posted = 0;
  uint64_t sends_outstanding = 0;
  uint64_t sends_held = 0;
  uint64_t receives_posted = 0;
  uint64_t receives_outstanding = 0;
  {
    std::lock_guard control(control_mutex_);
    std::optional<Turn> turn(std::in_place, *this);
    // Held completions are the program's no more: their Receives count as outstanding. Sends are retired without a
    // word where none was asked for, so those that were to be told of are counted by themselves.
    sends_held =
        static_cast<uint64_t>(std::count_if(held_.begin(), held_.end(), [](const Held& each) { return each.send; }));
    sends_posted = sends_.posted();
    sends_outstanding = sends_posted - sends_.retired();
    receives_posted = receives_.posted() + shared_receives_;
    receives_outstanding = receives_.posted() - receives_.retired() + (held_.size() - sends_held);
    retired_.store(true);
    if (!held_.empty()) STAGECOACH_MARK("qp.destroyed_with_completions_held");
    held_.clear();
    observer = std::move(observer_);
    lock_.Request(kDisconnect);
    const bool attached = connection_ != nullptr;
    turn.reset();
    if (attached) DetachFromCqs();
  }
  create_.send_cq->RemoveCompletionsOf(qp_number_);
  create_.receive_cq->RemoveCompletionsOf(qp_number_);
  // Parking ends here, with the last look at the CQs' leases.
  nic_.loop().Remove(this);
  std::optional<Turn> turn(std::in_place, *this);
  // What has not left by now names memory that is the program's again.
  if (connection_ != nullptr && !connection_->HasEnded()) connection_->Abort();
  const bool lingers = connection_ != nullptr && !connection_->IsClosed();
  if (lingers) {
    STAGECOACH_MARK("qp.lingers_when_destroyed");
    connection_->ForgetDeadline();
    lock_.Request(kContinue);
  }
  // Nothing of it is written to memory from here on, or read from it.
  Trace(nic_.trace(), nic_.fabric().Now(), trace_name_, "qp.destroyed",
        {{"sends_posted", sends_posted},
         {"sends_outstanding", sends_outstanding},
         {"sends_held", sends_held},
         {"receives_posted", receives_posted},
         {"receives_outstanding", receives_outstanding}});
  turn.reset();
  if (!lingers) Reap(/*abort=*/false);
  return lingers;
}

void QueuePair::Drop() {
  Reap(/*abort=*/true);
  nic_.loop().Remove(this);
}

// --- What pollers and the loop call ---

bool QueuePair::Drive() {
  return lock_.TryRequest(kPoll) && Leave();
}

void QueuePair::SetUnfinished(bool unfinished) {
  if (unfinished_.load(std::memory_order_relaxed) == unfinished) return;
  unfinished_.store(unfinished, std::memory_order_seq_cst);
  // Until it has been retired the CQs are there.
  if (!unfinished || !IsWatched() || retired_.load()) return;
  create_.send_cq->Wake(this);
  if (create_.receive_cq != create_.send_cq) create_.receive_cq->Wake(this);
}

Instant QueuePair::LeaseEnd() const {
  if (retired_.load()) return Instant{};
  return std::max(create_.send_cq->LeaseEnd(), create_.receive_cq->LeaseEnd());
}

void QueuePair::CountParked(bool parked) {
  const uint32_t change = parked ? 1 : ~uint32_t{0};
  create_.send_cq->parked().fetch_add(change, std::memory_order_seq_cst);
  if (create_.receive_cq != create_.send_cq) {
    create_.receive_cq->parked().fetch_add(change, std::memory_order_seq_cst);
  }
}

void QueuePair::OnContinue() {
  Ask(kContinue);
  // Called again after a pause, in which others may give some memory back.
  if (is_giving_up_.load()) throw std::bad_alloc();
}

void QueuePair::OnDeadline(Instant) {
  Ask(kTime);
}

void QueuePair::OnNotice() {
  bool gone = false;
  for (;;) {
    std::optional<Turn> turn(std::in_place, *this);
    const bool first_record = std::exchange(first_record_to_tell_, false);
    std::optional<CloseNotice> close;
    if (!first_record) close = std::exchange(close_to_tell_, std::nullopt);
    // After its last word it is let go of.
    const std::shared_ptr<ConnectionObserver> observer = close ? std::move(observer_) : observer_;
    gone = connection_ == nullptr || connection_->IsClosed();
    turn.reset();
    if (!first_record && !close) break;
    // What it could not hear for want of memory it is told again in the next turn, unless the QP is the program's no
    // more.
    Undoing unheard([&] {
      const Turn again(*this);
      if (retired_.load()) return;
      if (first_record) first_record_to_tell_ = true;
      if (close) close_to_tell_ = std::move(close);
      if (close_to_tell_) observer_ = observer;
    });
    if (observer != nullptr && first_record) observer->OnFirstRecord();
    if (observer != nullptr && close) observer->OnClosed(*close);
    unheard.Done();
  }
  if (!gone) {
    if (kind_ == QpKind::kIwarp) return;
    std::lock_guard control(control_mutex_);
    ChangeCarriers();
    return;
  }
  Reap(/*abort=*/false);
  if (retired_.load()) nic_.Bury(this);
}

}  // namespace stagecoach::emu
