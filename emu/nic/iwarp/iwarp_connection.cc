#include "emu/nic/iwarp/iwarp_connection.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/mark.h"
#include "base/mutant.h"

namespace stagecoach::emu {
namespace {

constexpr int kNudges = 3;

// MPA error codes for a Terminate (RFC 5044 section 8).
constexpr uint8_t kMpaCrcError = 2;
constexpr uint8_t kMpaMarkerOrLengthError = 3;

// RFC 5040 section 4.8: layers 0 (RDMAP) and 1 (DDP) share type 1 for faults of tagged memory; type 0 is a local
// catastrophe.
QpEvent EventOf(const TransportFault& fault) {
  if (fault.from_peer) return QpEvent::kTerminateReceived;
  if (fault.layer <= 1 && fault.error_type == 1) return QpEvent::kProtectionFault;
  if (fault.layer <= 1 && fault.error_type == 0) return QpEvent::kLocalFault;
  return QpEvent::kProtocolFault;
}

RdmapOptions EngineOptions(const ConnectionSetup& setup, const DeviceProfile& profile) {
  RdmapOptions options;
  // The rest of the time is for the Terminate.
  options.answer_time = profile.close_linger / 2;
  options.ird = static_cast<uint16_t>(std::min<uint32_t>(setup.ird, 0x3fff));
  options.ord = static_cast<uint16_t>(std::min<uint32_t>(setup.ord, 0x3fff));
  options.hold_until_first_record = !setup.initiator;
  if (setup.extensions) options.extensions = wire::RdmapExtensions::kRfc7306;
  return options;
}

}  // namespace

IwarpConnection::IwarpConnection(QueuePair& qp, ConnectionSetup setup)
    : qp_(qp),
      nic_(qp.nic_),
      initiator_(setup.initiator),
      name_(nic_.name() + "/qp-" + std::to_string(qp.qp_number())),
      memory_(nic_.registry(), qp.pd(), qp.receive_pd(), qp.qp_number()),
      llp_(qp, nic_.loop(), std::move(setup.llp)),
      transport_(std::make_unique<RdmapStream>(EngineOptions(setup, nic_.profile()), memory_, qp.receive_source(),
                                               nic_.trace(), name_)),
      pump_(qp, nic_, *transport_, memory_, name_),
      next_(qp, nic_.loop()),
      nudges_left_(initiator_ && nic_.profile().first_answer_nudge > Duration::zero() ? kNudges : 0),
      nudge_wait_(nic_.profile().first_answer_nudge) {
  STAGECOACH_CHECK(llp_->IsReliable());
  pump_.Use(llp_.get());
  next_.Use(llp_.get());
  transport_->BeginTurn(nic_.fabric().Now());
  if (initiator_ && setup.rtr != ConnectionSetup::Rtr::kNone) {
    transport_->SendRtr(setup.rtr == ConnectionSetup::Rtr::kRead ? RtrKind::kRead : RtrKind::kWrite);
  }
}

IwarpConnection::~IwarpConnection() = default;

bool IwarpConnection::Serve(uint32_t requests) {
  // As most polls end.
  const bool polls = requests == QueuePair::kPoll && phase_ == Phase::kOpen && !rx_ended_ && transport_->Receiving();
  if (polls && pump_.FindsNothing()) return false;
  const Instant now = nic_.fabric().Now();
  transport_->BeginTurn(now);
  pump_.BeginTurn();
  if ((requests & QueuePair::kFired) != 0) next_.NoteFired();
  if ((requests & QueuePair::kTime) != 0) OnTime(now);
  if (phase_ == Phase::kOpen && (requests & QueuePair::kDisconnect) != 0) BeginDisconnect(now);
  if (phase_ == Phase::kOpen) {
    if ((requests & (QueuePair::kPoll | QueuePair::kContinue)) != 0) Receive(now);
    Transmit();
    // A stream that cannot be written may still hold the peer's Terminate, which says why. One of ours will not leave.
    if (pump_.tx_failed() && transport_->Receiving()) {
      STAGECOACH_MARK("nic.reads_on_when_nothing_can_be_written");
      Receive(now);
    }
    if (pump_.tx_failed() && !transport_->Finished() && !pump_.more()) {
      // What came before the end is what the QP ends of.
      TakeFault(now);
      Lose(CloseReason::kStreamFailed, stream_error_);
    }
    CheckEnd(now);
  } else if (phase_ == Phase::kFinishing) {
    FlushRecords();
    if (llp_->TxIdle() || pump_.tx_failed()) {
      transport_->Flush();
      Finish(now);
    }
  }
  if (phase_ == Phase::kLingering) Linger();
  PrepareNextTurn(requests);
  return pump_.moved();
}

// --- Receiving ---

void IwarpConnection::Receive(Instant now) {
  if (rx_ended_) return;
  const std::optional<RxResult> end = pump_.Receive(now);
  if (!first_record_ && pump_.received_any()) {
    first_record_ = true;
    nudge_at_.reset();
    if (!initiator_ && qp_.observer_ != nullptr) {
      qp_.first_record_to_tell_ = true;
      nic_.loop().Notify(&qp_);
    }
  }
  if (end) OnReceiveEnd(*end);
}

void IwarpConnection::SettleForTheEnd() {
  if (STAGECOACH_MUTANT("end-without-draining", "a connection ends while Writes are on their way to memory")) return;
  pump_.SettlePlacements();
}

void IwarpConnection::OnReceiveEnd(const RxResult& result) {
  switch (result.status) {
    case RxStatus::kReady:
    case RxStatus::kWouldBlock:
    case RxStatus::kMemoryFault:  // the pump's business
      return;
    case RxStatus::kEof:
      if (transport_->HasOutstandingWork()) STAGECOACH_MARK("nic.peer_closes_with_our_work_outstanding");
      rx_ended_ = true;
      Lose(CloseReason::kPeerClosed, 0);
      return;
    case RxStatus::kReset:
      rx_ended_ = true;
      Lose(CloseReason::kStreamFailed, result.error);
      return;
    case RxStatus::kFault:
      rx_ended_ = true;
      transport_->OnLlpFault(result.fault == LlpFault::kBadCrc ? kMpaCrcError : kMpaMarkerOrLengthError);
      return;
  }
}

// --- Sending ---

void IwarpConnection::Transmit() {
  ForgetMemoryOnceFinished();
  pump_.Transmit();
  NoteSending();
}

void IwarpConnection::ForgetMemoryOnceFinished() {
  if (transport_->Finished()) llp_->ForgetMemory();
}

void IwarpConnection::TakeCompletions() {
  ForgetMemoryOnceFinished();
  pump_.TakeCompletions();
}

void IwarpConnection::FlushRecords() {
  pump_.Flush();
  NoteSending();
}

void IwarpConnection::NoteSending() {
  if (pump_.flushed_any() && !std::exchange(sent_any_, true) && !first_record_ && nudges_left_ > 0) {
    nudge_at_ = nic_.fabric().Now() + nudge_wait_;
  }
  if (pump_.tx_error() != 0) stream_error_ = pump_.tx_error();
}

// --- Endings ---

void IwarpConnection::Lose(CloseReason reason, int error) {
  if (!reason_) reason_ = reason;
  stream_error_ = error;
  qp_.Apply(reason == CloseReason::kPeerClosed ? QpEvent::kPeerClosed : QpEvent::kStreamLost);
  transport_->OnLost(reason == CloseReason::kPeerClosed);
}

void IwarpConnection::FailLocally(const char* why) {
  reason_ = CloseReason::kLocalFault;
  fault_ = TransportFault{.description = why};
  qp_.Apply(QpEvent::kLocalFault);
  transport_->Flush();
  TakeCompletions();
}

void IwarpConnection::TakeFault(Instant now) {
  std::optional<TransportFault> fault = transport_->TakeFault();
  if (!fault) return;
  reason_ = fault->from_peer ? CloseReason::kPeerFault : CloseReason::kLocalFault;
  qp_.Apply(EventOf(*fault));
  fault_ = std::move(fault);
  // A peer that does not read must not keep the Terminate, and with it the QP, for ever.
  linger_until_ = now + nic_.profile().close_linger;
}

void IwarpConnection::CheckEnd(Instant now) {
  // The state changes before a completion shows why, as programs that see one ask for the other.
  TakeFault(now);
  TakeCompletions();
  if (transport_->Receiving()) {
    if (qp_.doom_ != nullptr) {
      FailLocally(qp_.doom_);
    } else if (qp_.LocalFailureIsDue()) {
      FailLocally("a memory window operation failed");
    }
  }
  if (transport_->Finished()) Finish(now);
}

void IwarpConnection::BeginDisconnect(Instant now) {
  if (reason_) {
    STAGECOACH_MARK("nic.disconnected_while_ending");
    return;
  }
  Transmit();
  CheckEnd(now);
  if (reason_ || phase_ != Phase::kOpen) return;
  if (!llp_->TxIdle()) STAGECOACH_MARK("nic.disconnected_with_records_still_to_leave");
  reason_ = CloseReason::kLocalClose;
  qp_.Apply(QpEvent::kLocalClose);
  phase_ = Phase::kFinishing;
  linger_until_ = now + nic_.profile().close_linger;
}

void IwarpConnection::Finish(Instant now) {
  SettleForTheEnd();
  TakeCompletions();
  qp_.FlushQueues();
  const CloseReason reason = reason_.value_or(CloseReason::kLocalClose);
  Trace(nic_.trace(), now, name_, "connection.ended",
        {{"reason", ToString(reason)}, {"error", static_cast<uint64_t>(stream_error_)}});
  qp_.close_to_tell_ = CloseNotice{reason, stream_error_, fault_};
  nic_.loop().Notify(&qp_);
  nudge_at_.reset();
  // Records left over name memory that is no longer ours to read; an unfinished one tells the peer that something was
  // lost.
  if (pump_.tx_failed() || reason == CloseReason::kStreamFailed || !llp_->TxIdle()) {
    if (!llp_->TxIdle()) STAGECOACH_MARK("nic.records_left_over_at_the_end");
    Close(/*abort=*/true);
    return;
  }
  llp_->Shutdown();
  if (rx_ended_ && reason == CloseReason::kPeerClosed) {
    Close(/*abort=*/false);
    return;
  }
  // Closing with unread bytes in the socket would send a reset, which may overtake our Terminate or last records.
  phase_ = Phase::kLingering;
  linger_until_ = now + nic_.profile().close_linger;
}

void IwarpConnection::Linger() {
  const Llp::Drained drained = llp_->Drain();
  if (drained.any) STAGECOACH_MARK("nic.peer_sends_into_a_connection_that_is_over");
  if (drained.end) return Close(/*abort=*/false);
  if (drained.more) pump_.SetMore();
}

void IwarpConnection::Close(bool abort) {
  if (abort) llp_->Abort();
  phase_ = Phase::kClosed;
  next_.Use(nullptr);
  linger_until_.reset();
  nic_.loop().Notify(&qp_);  // which takes us out of the QP
}

void IwarpConnection::Abort() {
  if (phase_ == Phase::kClosed) return;
  SettleForTheEnd();
  if (!HasEnded()) {
    STAGECOACH_MARK("nic.connection_aborted_under_its_qp");
    if (!reason_) reason_ = CloseReason::kLocalClose;
    transport_->OnLost(/*orderly=*/false);
    TakeCompletions();
    qp_.close_to_tell_ = CloseNotice{*reason_, stream_error_, fault_};
  }
  Close(/*abort=*/true);
}

const char* IwarpConnection::PhaseName() const {
  switch (phase_) {
    case Phase::kOpen:
      return "connected";
    case Phase::kFinishing:
      return "finishing";
    case Phase::kLingering:
      return "lingering";
    case Phase::kClosed:
      return "closed";
  }
  return "unknown";
}

// --- Time and waking ---

void IwarpConnection::OnTime(Instant now) {
  if (nudge_at_ && *nudge_at_ <= now) {
    nudge_at_.reset();
    if (phase_ == Phase::kOpen && !first_record_) {
      STAGECOACH_MARK("nic.first_answer_is_late");
      transport_->Nudge();
      nudge_wait_ *= 2;
      if (--nudges_left_ > 0) nudge_at_ = now + nudge_wait_;
    }
  }
  if (const std::optional<Instant> due = transport_->Deadline(); due && *due <= now) transport_->OnDeadline(now);
  pump_.PlaceDue(now);
  if (!linger_until_ || *linger_until_ > now) return;
  if (HasEnded()) {
    STAGECOACH_MARK("nic.peer_does_not_close_in_time");
    Close(/*abort=*/true);
    return;
  }
  // What should have left has not: give up on it.
  STAGECOACH_MARK("nic.last_records_given_up");
  pump_.FailTx(0);
  transport_->OnLost(/*orderly=*/false);
  Finish(now);
}

void IwarpConnection::PrepareNextTurn(uint32_t requests) {
  if (phase_ == Phase::kClosed) {
    next_.SetDeadline({});
  } else {
    next_.SetDeadline({nudge_at_, linger_until_, transport_->Deadline(), pump_.PlacementDue(), qp_.HeldUntil()});
  }
  next_.Ensure(requests, {.more = pump_.more(),
                          .receive = phase_ == Phase::kOpen && transport_->Receiving() && !rx_ended_,
                          .drain = phase_ == Phase::kLingering,
                          .send = pump_.tx_blocked()});
}

}  // namespace stagecoach::emu
