#include "emu/nic/connection.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/mark.h"
#include "base/mutant.h"

namespace stagecoach::emu {
namespace {

// How often one turn fills and writes; each time at most transmit_budget_records.
constexpr int kTransmitRounds = 8;
// What a lingering stream may throw away in one turn.
constexpr int kLingerReads = 16;
constexpr size_t kLingerReadSize = 16 * 1024;
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

RdmapOptions EngineOptions(const ConnectionSetup& setup) {
  RdmapOptions options;
  options.ird = static_cast<uint16_t>(std::min<uint32_t>(setup.ird, 0x3fff));
  options.ord = static_cast<uint16_t>(std::min<uint32_t>(setup.ord, 0x3fff));
  options.hold_until_first_record = !setup.initiator;
  return options;
}

}  // namespace

Connection::Connection(QueuePair& qp, ConnectionSetup setup)
    : qp_(qp),
      nic_(qp.nic_),
      initiator_(setup.initiator),
      name_(nic_.name() + "/qp-" + std::to_string(qp.qp_number())),
      memory_(nic_.registry(), qp.pd(), qp.qp_number()),
      llp_(std::move(setup.llp)),
      transport_(
          std::make_unique<RdmapStream>(EngineOptions(setup), memory_, qp.receive_source(), nic_.trace(), name_)),
      nudges_left_(initiator_ && nic_.profile().first_answer_nudge > Duration::zero() ? kNudges : 0),
      nudge_wait_(nic_.profile().first_answer_nudge) {
  transport_->BeginTurn(nic_.fabric().Now());
  if (initiator_ && setup.rtr != ConnectionSetup::Rtr::kNone) {
    transport_->SendRtr(setup.rtr == ConnectionSetup::Rtr::kRead ? RtrKind::kRead : RtrKind::kWrite);
  }
}

Connection::~Connection() {
  llp_->stream().SetWatcher(nullptr);
}

void Connection::OnStreamReady() {
  // Noted before anything else can arm the stream again; see the header.
  qp_.Ask(QueuePair::kFired);
  if (!nic_.loop().Park(&qp_)) qp_.Ask(QueuePair::kContinue);
}

bool Connection::Serve(uint32_t requests) {
  const Instant now = nic_.fabric().Now();
  transport_->BeginTurn(now);
  moved_ = false;
  more_ = false;
  if ((requests & QueuePair::kFired) != 0) armed_readable_ = armed_writable_ = false;
  if ((requests & QueuePair::kTime) != 0) OnTime(now);
  if (phase_ == Phase::kOpen && (requests & QueuePair::kDisconnect) != 0) BeginDisconnect(now);
  if (phase_ == Phase::kOpen) {
    if ((requests & (QueuePair::kPoll | QueuePair::kContinue)) != 0) Receive(now);
    Transmit();
    // A stream that cannot be written may still hold the peer's Terminate, which says why.
    if (tx_failed_ && transport_->Receiving()) {
      STAGECOACH_MARK("nic.reads_on_when_nothing_can_be_written");
      Receive(now);
    }
    if (tx_failed_ && transport_->Receiving() && !more_) Lose(CloseReason::kStreamFailed, stream_error_);
    CheckEnd(now);
  } else if (phase_ == Phase::kFinishing) {
    FlushRecords();
    if (llp_->TxIdle() || tx_failed_) {
      transport_->Flush();
      Finish(now);
    }
  }
  if (phase_ == Phase::kLingering) Linger();
  RefreshDeadline();
  EnsureWake(requests);
  return moved_;
}

// --- Receiving ---

void Connection::Receive(Instant now) {
  size_t bytes = nic_.profile().receive_budget_bytes;
  size_t records = nic_.profile().receive_budget_records;
  while (transport_->Receiving() && !rx_ended_) {
    if (records-- == 0 || bytes == 0) {
      more_ = true;
      return;
    }
    if (!ReceiveRecord(now, &bytes)) return;
  }
}

bool Connection::ReceiveRecord(Instant now, size_t* budget_bytes) {
  if (!have_record_) {
    RecordHead record;
    const RxResult next = llp_->NextRecord(&record);
    if (next.status != RxStatus::kReady) {
      OnReceiveEnd(next);
      return false;
    }
    const std::optional<size_t> head_size = transport_->OnRecord(record, now);
    if (!head_size) return false;
    have_record_ = true;
    head_size_ = *head_size;
    record_length_ = record.length;
  }
  const std::optional<std::span<const MutableBytes>> destination = transport_->PinDestination();
  if (!destination) return false;
  // Decided once for each record.
  if (!place_late_) place_late_ = PlaceLate();
  const RxResult placed = llp_->Place(head_size_, *place_late_ ? late_->Stage(*destination) : *destination);
  transport_->UnpinDestination();
  if (placed.status != RxStatus::kReady) {
    OnReceiveEnd(placed);
    return false;
  }
  have_record_ = false;
  if (*std::exchange(place_late_, std::nullopt)) {
    late_->Keep(now, now + nic_.faults().placement_delay_max);
    Trace(nic_.trace(), now, name_, "placement.kept");
  }
  moved_ = true;
  transport_->OnPlaced(now);
  *budget_bytes -= std::min(*budget_bytes, record_length_);
  if (!first_record_) {
    first_record_ = true;
    nudge_at_.reset();
    if (!initiator_ && qp_.observer_ != nullptr) {
      qp_.first_record_to_tell_ = true;
      nic_.loop().Notify(&qp_);
    }
  }
  return true;
}

bool Connection::PlaceLate() {
  if (!transport_->PlacementMayWait()) {
    const bool overtaken =
        STAGECOACH_MUTANT("send-before-write", "a Send is delivered before Writes ahead of it are placed");
    if (late_ && late_->Due()) STAGECOACH_MARK("placement.ordering_point_settles_late_writes");
    if (!overtaken) SettlePlacements();
    return false;
  }
  if (!nic_.has_faults() || !nic_.faults().adversarial_placement) return false;
  if (!late_) late_.emplace(nic_.faults().luck.Fork(name_));
  return true;
}

void Connection::SettlePlacements() {
  if (late_) TellPlaced(late_->PlaceAll());
}

void Connection::SettleForTheEnd() {
  if (STAGECOACH_MUTANT("end-without-draining", "a connection ends while Writes are on their way to memory")) return;
  SettlePlacements();
}

void Connection::TellPlaced(size_t writes) {
  if (writes > 0) Trace(nic_.trace(), nic_.fabric().Now(), name_, "placement.done", {{"writes", uint64_t{writes}}});
}

void Connection::OnReceiveEnd(const RxResult& result) {
  switch (result.status) {
    case RxStatus::kReady:
    case RxStatus::kWouldBlock:
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

void Connection::Transmit() {
  for (int round = 0; round < kTransmitRounds; ++round) {
    TakeSendCompletions();
    bool any = qp_.SubmitPosted(*transport_);
    if (!tx_failed_ && transport_->FillTx(*llp_, nic_.profile().transmit_budget_records)) any = true;
    FlushRecords();
    // A fenced local operation may have waited for just these.
    if (TakeSendCompletions() && qp_.sends_.HasUnsubmitted()) any = true;
    if (!any || tx_blocked_ || tx_failed_) return;
  }
  STAGECOACH_MARK("nic.transmit_rounds_used_up");
  more_ = true;
}

void Connection::FlushRecords() {
  if (llp_->TxIdle() || tx_failed_) {
    tx_blocked_ = false;
    return;
  }
  const TxResult result = llp_->Flush(memory_);
  tx_blocked_ = result.status == TxStatus::kWouldBlock;
  uint64_t cookie = 0;
  while (llp_->TakeSent(&cookie)) {
    moved_ = true;
    transport_->OnSent(cookie);
  }
  if (!first_record_ && !sent_any_ && nudges_left_ > 0) nudge_at_ = nic_.fabric().Now() + nudge_wait_;
  sent_any_ = true;
  if (result.status == TxStatus::kReset) {
    tx_failed_ = true;
    stream_error_ = result.error;
  } else if (result.status == TxStatus::kMemoryFault) {
    tx_failed_ = true;
    transport_->OnTxMemoryFault(result.cookie, result.memory_fault);
  }
}

// --- Completions and endings ---

bool Connection::TakeSendCompletions() {
  bool any = false;
  for (SendCompletion completion; transport_->TakeSendCompletion(&completion); any = true) qp_.FinishSend(completion);
  return any;
}

void Connection::TakeCompletions() {
  TakeSendCompletions();
  qp_.RetireSends();
  ReceiveCompletion received;
  while (transport_->TakeReceiveCompletion(&received)) qp_.FinishReceive(received);
}

void Connection::Lose(CloseReason reason, int error) {
  if (!reason_) reason_ = reason;
  stream_error_ = error;
  qp_.Apply(reason == CloseReason::kPeerClosed ? QpEvent::kPeerClosed : QpEvent::kStreamLost);
  transport_->OnLost(reason == CloseReason::kPeerClosed);
}

void Connection::FailLocally(const char* why) {
  reason_ = CloseReason::kLocalFault;
  fault_ = TransportFault{.description = why};
  qp_.Apply(QpEvent::kLocalFault);
  transport_->Flush();
  TakeCompletions();
}

void Connection::CheckEnd(Instant now) {
  // The state changes before a completion shows why, as programs that see one ask for the other.
  if (std::optional<TransportFault> fault = transport_->TakeFault()) {
    reason_ = fault->from_peer ? CloseReason::kPeerFault : CloseReason::kLocalFault;
    qp_.Apply(EventOf(*fault));
    fault_ = std::move(fault);
    // A peer that does not read must not keep the Terminate, and with it the QP, for ever.
    linger_until_ = now + nic_.profile().close_linger;
  }
  TakeCompletions();
  if (transport_->Receiving()) {
    if (qp_.doom_ != nullptr) {
      FailLocally(qp_.doom_);
    } else if (qp_.failed_locally_) {
      FailLocally("a memory window operation failed");
    }
  }
  if (transport_->Finished()) Finish(now);
}

void Connection::BeginDisconnect(Instant now) {
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

void Connection::Finish(Instant now) {
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
  if (tx_failed_ || reason == CloseReason::kStreamFailed || !llp_->TxIdle()) {
    if (!llp_->TxIdle()) STAGECOACH_MARK("nic.records_left_over_at_the_end");
    Close(/*abort=*/true);
    return;
  }
  stream().Shutdown();
  if (rx_ended_ && reason == CloseReason::kPeerClosed) {
    Close(/*abort=*/false);
    return;
  }
  // Closing with unread bytes in the socket would send a reset, which may overtake our Terminate or last records.
  phase_ = Phase::kLingering;
  linger_until_ = now + nic_.profile().close_linger;
}

void Connection::Linger() {
  std::array<std::byte, kLingerReadSize> scratch;
  const MutableBytes into(scratch);
  for (int i = 0; i < kLingerReads; ++i) {
    const IoResult result = stream().Read({&into, 1});
    if (result.status == IoStatus::kWouldBlock) return;
    if (result.status != IoStatus::kOk) {
      Close(/*abort=*/false);
      return;
    }
    STAGECOACH_MARK("nic.peer_sends_into_a_connection_that_is_over");
  }
  more_ = true;
}

void Connection::Close(bool abort) {
  if (abort) stream().Abort();
  phase_ = Phase::kClosed;
  linger_until_.reset();
  nic_.loop().Notify(&qp_);  // which takes us out of the QP
}

void Connection::Abort() {
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

const char* Connection::PhaseName() const {
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

void Connection::OnTime(Instant now) {
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
  if (late_) TellPlaced(late_->PlaceDue(now));
  if (!linger_until_ || *linger_until_ > now) return;
  if (HasEnded()) {
    STAGECOACH_MARK("nic.peer_does_not_close_in_time");
    Close(/*abort=*/true);
    return;
  }
  // What should have left has not: give up on it.
  STAGECOACH_MARK("nic.last_records_given_up");
  tx_failed_ = true;
  transport_->OnLost(/*orderly=*/false);
  Finish(now);
}

void Connection::RefreshDeadline() {
  std::optional<Instant> next;
  if (phase_ != Phase::kClosed) {
    const std::optional<Instant> place_at = late_ ? late_->Due() : std::nullopt;
    for (const std::optional<Instant>& wish :
         {nudge_at_, linger_until_, transport_->Deadline(), place_at, qp_.HeldUntil()}) {
      if (wish) next = std::min(next.value_or(Instant::max()), *wish);
    }
  }
  if (next == deadline_) return;
  deadline_ = next;
  nic_.loop().SetDeadline(&qp_, next);
}

void Connection::EnsureWake(uint32_t requests) {
  qp_.SetUnfinished(phase_ != Phase::kClosed && (more_ || tx_blocked_));
  if (phase_ == Phase::kClosed) return;
  const bool continuing = (requests & QueuePair::kContinue) != 0;
  if (more_) {
    if (continuing || !nic_.loop().Park(&qp_)) nic_.loop().Continue(&qp_);
    return;
  }
  const bool readable =
      phase_ == Phase::kLingering || (phase_ == Phase::kOpen && transport_->Receiving() && !rx_ended_);
  if (continuing) {
    Arm(readable, tx_blocked_);
  } else if (tx_blocked_ && !armed_writable_ && !nic_.loop().Park(&qp_)) {
    Arm(readable, true);
  }
}

void Connection::Arm(bool readable, bool writable) {
  if ((!readable || armed_readable_) && (!writable || armed_writable_)) return;
  armed_readable_ = readable;
  armed_writable_ = writable;
  stream().Arm(readable, writable);
}

}  // namespace stagecoach::emu
