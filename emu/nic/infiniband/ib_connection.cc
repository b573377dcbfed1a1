#include "emu/nic/infiniband/ib_connection.h"

#include <algorithm>
#include <utility>

#include "base/mark.h"
#include "base/mutant.h"
#include "emu/tap/injection_tap.h"

namespace stagecoach::emu {
namespace {

constexpr uint32_t kSmallestMtu = 128;  // shifted by the code of ibv_mtu: 1 is 256

// A host that gives no sign of life for so long is taken for gone: about five retransmissions of TCP, each after twice
// the time.
constexpr Duration kHostSilence = 7s;
// How long it may take until there is a carrier, whatever the peer's host makes of those who come.
constexpr Duration kOpeningMax = 30s;
// How often the host of a peer that stands still is asked whether it is there.
constexpr Duration kAskEvery = 1s;

uint32_t MtuOf(uint8_t code) {
  return kSmallestMtu << code;
}

IbOptions EngineOptions(const QueuePair& qp, const QpAttributes& attributes, const DeviceProfile& profile) {
  IbOptions options;
  options.service = qp.kind() == QpKind::kUc ? wire::IbService::kUc : wire::IbService::kRc;
  options.qp_number = qp.qp_number();
  options.destination_qp = attributes.destination_qp_number;
  options.receive_psn = attributes.receive_psn;
  options.mtu = MtuOf(attributes.path_mtu);
  options.send_psn = attributes.send_psn;
  options.access = attributes.access;
  options.max_rd_atomic = attributes.max_rd_atomic;
  options.max_dest_rd_atomic = attributes.max_dest_rd_atomic;
  options.min_rnr_timer = attributes.min_rnr_timer;
  options.timeout = attributes.timeout;
  options.retry_count = attributes.retry_count;
  options.rnr_retry = attributes.rnr_retry;
  options.window_packets = profile.window_packets;
  options.max_message_bytes = profile.max_message;
  return options;
}

QpEvent EventOf(const TransportFault& fault) {
  switch (fault.kind) {
    case FaultKind::kProtocol:
      return QpEvent::kProtocolFault;
    case FaultKind::kProtection:
      return QpEvent::kProtectionFault;
    case FaultKind::kWork:
      return QpEvent::kWorkFault;
    case FaultKind::kSendQueue:
      return QpEvent::kSendFault;
  }
  return QpEvent::kProtocolFault;
}

}  // namespace

// --- Carriers ---

size_t IbConnection::Void::MaxUlpdu() const {
  return MtuOf(5) + wire::kMaxIbHeaderSize;
}

IbConnection::IbConnection(QueuePair& qp, const QpAttributes& attributes, const RocePath& path,
                           const wire::CarrierSecret& secret)
    : qp_(qp),
      nic_(qp.nic_),
      name_(nic_.name() + "/qp-" + std::to_string(qp.qp_number())),
      generation_(nic_.roce().NextGeneration()),
      remote_qp_(attributes.destination_qp_number),
      knowledge_{.begun = {.send = std::nullopt, .receive = attributes.receive_psn}, .secret = secret},
      memory_(nic_.registry(), qp.pd(), qp.receive_pd(), qp.qp_number()),
      receives_(qp.receive_source(), *this),
      transport_(EngineOptions(qp, attributes, nic_.profile()), memory_, receives_, nic_.trace(), name_),
      pump_(qp, nic_, transport_, memory_, name_),
      next_(qp, nic_.loop()),
      injections_(nic_.injections()->NewConnection(name_)) {
  transport_.BeginTurn(Now());
  nic_.roce().Join(qp_.qp_number(), generation_, path, remote_qp_, knowledge_, outlook_);
}

IbConnection::~IbConnection() = default;

bool IbConnection::HidesReceive() {
  if (injections_ == nullptr) return false;
  const bool hides = injections_->HidesReceive();
  TraceFired(nic_.trace(), Now(), name_, injections_->fired());
  return hides;
}

Llp::Counters IbConnection::llp_counters() const {
  Llp::Counters all = past_;
  if (carrier_ != nullptr) all.Add((*carrier_)->counters());
  return all;
}

int IbConnection::PollDescriptor() const {
  return carrier_ != nullptr ? (*carrier_)->PollDescriptor() : PolledConnection::kNoLlp;
}

const ArrivalMark* IbConnection::arrival_mark() const {
  return carrier_ != nullptr ? (*carrier_)->arrival_mark() : nullptr;
}

void IbConnection::OnModified(QpState to, const QpAttributes& attributes) {
  if (phase_ != Phase::kOpen) return;
  transport_.BeginTurn(Now());
  transport_.SetAttributes(EngineOptions(qp_, attributes, nic_.profile()));
  if (to == QpState::kRts) transport_.StartSending();
  if (to == QpState::kRts && !knowledge_.begun.send) {
    knowledge_.begun.send = attributes.send_psn;
    nic_.roce().Learn(qp_.qp_number(), generation_, knowledge_);
  }
  if (to == QpState::kSqd) transport_.StopSending();
}

void IbConnection::OnPath(const RocePath& path) {
  if (phase_ != Phase::kOpen) return;
  DropCarrier(Now(), "another path");
  nic_.roce().Join(qp_.qp_number(), generation_, path, remote_qp_, knowledge_, outlook_);
}

void IbConnection::OnSecret(const wire::CarrierSecret& secret) {
  if (phase_ != Phase::kOpen) return;
  knowledge_.secret = secret;
  nic_.roce().Learn(qp_.qp_number(), generation_, knowledge_);
}

bool IbConnection::TakeCarrier(uint64_t generation, uint64_t serial, std::unique_ptr<Llp>& llp) {
  // One that ends may have a last word.
  if (generation != generation_ || (phase_ != Phase::kOpen && phase_ != Phase::kEnding)) return false;
  const Instant now = Now();
  transport_.BeginTurn(now);
  if (carrier_ != nullptr) {
    STAGECOACH_MARK("ib.carrier_replaced_before_its_loss_was_known");
    transport_.OnCarrier(false, now);
    pump_.Use(nullptr);
    Discard(/*abort=*/true);
  }
  if (injections_ != nullptr) {
    injections_->BeginStream(name_ + "/carrier-" + std::to_string(serial));
    llp = WithInjections(std::move(llp), injections_,
                         {.fabric = nic_.fabric(),
                          .trace = nic_.trace(),
                          .name = name_,
                          .transport = InjectionTransport::kInfiniband,
                          .mtu = transport_.options().mtu,
                          .farewell = [this] {
                            const auto word = transport_.UnreachableWord();
                            return std::vector<std::byte>(word.begin(), word.end());
                          }});
  }
  carrier_ = std::make_unique<WatchedLlp>(qp_, nic_.loop(), std::move(llp));
  carrier_serial_ = serial;
  pump_.Use(carrier_->get());
  next_.Use(carrier_->get());
  transport_.OnCarrier(true, now);
  patience_until_.reset();
  carrier_loses_ = nic_.LosesPackets() || outlook_->peer_loses || outlook_->loses_all;
  peer_is_unaware_ = false;
  taken_seen_ = records_seen_ = 0;
  streams_seen_ = outlook_->streams;
  silent_since_.reset();
  asked_at_.reset();
  return true;
}

std::unique_ptr<WatchedLlp> IbConnection::TakeOldCarriers() {
  return std::move(old_carriers_);
}

void IbConnection::DropCarrier(Instant now, const char* why) {
  if (carrier_ == nullptr) return;
  if (transport_.HasOutstandingWork()) STAGECOACH_MARK("ib.carrier_lost_with_work_outstanding");
  Trace(nic_.trace(), now, name_, "carrier.dropped", {{"why", why}});
  const bool was_useful = (*carrier_)->counters().rx_records > 0;
  if (was_useful) alone_since_.reset();
  transport_.OnCarrier(false, now);
  pump_.Use(nullptr);
  Discard(/*abort=*/true);
  const bool sends = knowledge_.begun.send.has_value();
  nic_.roce().CarrierLost(
      qp_.qp_number(), generation_, carrier_serial_, was_useful,
      {.send = sends ? std::optional(transport_.oldest_psn()) : std::nullopt, .receive = transport_.expected_psn()});
}

void IbConnection::Discard(bool abort) {
  past_.Add((*carrier_)->counters());
  if (abort) (*carrier_)->Abort();
  next_.Use(nullptr);
  carrier_->older = std::move(old_carriers_);
  old_carriers_ = std::move(carrier_);
  nic_.loop().Notify(&qp_);
}

// --- Turns ---

bool IbConnection::Serve(uint32_t requests) {
  // As most polls end.
  const bool polls = requests == QueuePair::kPoll && phase_ == Phase::kOpen && carrier_ != nullptr &&
                     injections_ == nullptr && transport_.Receiving();
  if (polls && pump_.FindsNothing()) return false;
  const Instant now = Now();
  transport_.BeginTurn(now);
  pump_.BeginTurn();
  if ((requests & QueuePair::kFired) != 0) next_.NoteFired();
  if ((requests & QueuePair::kTime) != 0) {
    next_.ForgetDeadline();  // NicLoop has told of it
    OnTime(now);
  }
  if (phase_ == Phase::kOpen || phase_ == Phase::kEnding) {
    if ((requests & (QueuePair::kPoll | QueuePair::kContinue)) != 0) Receive(now);
    // What is posted counts as sent before the end.
    Transmit(now);
    CheckEnd(now);
    if (phase_ == Phase::kOpen && (requests & QueuePair::kDisconnect) != 0) {
      Fail(QpEvent::kLocalClose, now);
      Transmit(now);
      CheckEnd(now);
    }
    if (phase_ == Phase::kOpen && injections_ != nullptr && injections_->end() == InjectionAction::kDisconnect)
      Sever(now);
  }
  if (injections_ != nullptr && injections_->has_lost()) OnLoss(now);
  if (phase_ == Phase::kLingering) Linger();
  if (transport_.TakeRedialWish()) nic_.roce().WantCarrier(qp_.qp_number(), generation_);
  PrepareNextTurn(requests);
  return pump_.moved();
}

void IbConnection::Receive(Instant now) {
  if (carrier_ == nullptr || !transport_.Receiving()) return;
  const std::optional<RxResult> end = pump_.Receive(now);
  if (transport_.TakeFirstPacket()) qp_.Apply(QpEvent::kFirstMessage);
  if (!end) return;
  switch (end->status) {
    case RxStatus::kEof:
      return DropCarrier(now, "ended");
    case RxStatus::kFault:
      return DropCarrier(now, "damaged");
    default:
      return DropCarrier(now, "lost");
  }
}

void IbConnection::Transmit(Instant now) {
  pump_.Transmit();
  if (pump_.tx_failed()) {
    // What cannot be written may still hold what the peer said last: acknowledgements, a NAK.
    Receive(now);
    if (carrier_ != nullptr && pump_.more()) STAGECOACH_MARK("ib.reads_on_when_nothing_can_be_written");
    if (!pump_.more()) DropCarrier(now, "cannot be written");
  }
  if (carrier_ == nullptr && qp_.kind() == QpKind::kUc && transport_.HoldsWork()) {
    if (!patience_until_) patience_until_ = now + nic_.profile().carrier_patience;
    if (*patience_until_ <= now) SendIntoTheVoid(now);
  }
}

// As much as one turn may send. While something is left patience_until_ stays over, and the next turn comes with it.
void IbConnection::SendIntoTheVoid(Instant now) {
  STAGECOACH_MARK("ib.sent_to_nobody");
  Void nowhere;
  transport_.OnCarrier(true, now);
  transport_.FillTx(nowhere, nic_.profile().transmit_budget_records);
  for (const uint64_t cookie : nowhere.TakeSent()) transport_.OnSent(cookie);
  pump_.TakeSendCompletions();
  qp_.SubmitPosted(transport_);
  transport_.OnCarrier(false, now);
}

// A rule that is younger than the carrier was not in its hello: both ends wait there for answers that never come, as if
// nothing were ever lost. The next carrier says it to the peer, so this one goes, when all that has left has arrived.
void IbConnection::OnLoss(Instant now) {
  if (injections_->end() == InjectionAction::kStall) outlook_->loses_all = true;
  if (!std::exchange(carrier_loses_, true)) peer_is_unaware_ = true;
  if (!peer_is_unaware_ || phase_ != Phase::kOpen || carrier_ == nullptr) return;
  // UC waits for no answers.
  if (qp_.kind() == QpKind::kUc || !(*carrier_)->TxIdle() || !(*carrier_)->delivery().is_complete) return;
  STAGECOACH_MARK("ib.carrier_given_up_to_a_later_rule");
  DropCarrier(now, "a later rule loses packets");
}

void IbConnection::Sever(Instant now) {
  if (!sever_until_) sever_until_ = now + nic_.profile().close_linger;
  // The end of the engine takes away what the carrier has not sent. One that was lost may have a successor.
  const bool is_told = carrier_ != nullptr && (*carrier_)->TxIdle();
  if (!is_told && now < *sever_until_) return;
  transport_.OnUnreachable();
  nic_.roce().PeerUnreachable(qp_.qp_number(), generation_);
  CheckEnd(now);
  // The engine's last words go nowhere, which it has to be told.
  Transmit(now);
  CheckEnd(now);
}

void IbConnection::OnTime(Instant now) {
  if (phase_ == Phase::kOpen) {
    if (const std::optional<Instant> due = EngineDeadline(); due && *due <= now) {
      // What has come and was not looked at yet is no silence: this thread may have been late, not the peer.
      Receive(now);
      const Silence silence = transport_.MayExcuse(now) ? JudgeSilence(now) : Silence::kOfThePeer;
      if (silence == Silence::kOfThePeer) {
        transport_.OnDeadline(now);
      } else {
        transport_.Excuse(/*again=*/silence == Silence::kAtItsHost, now);
      }
    }
  }
  pump_.PlaceDue(now);
  if (!linger_until_ || *linger_until_ > now) return;
  // What should have left has not: give up on it.
  if (phase_ == Phase::kEnding) {
    STAGECOACH_MARK("ib.last_words_given_up");
    DropCarrier(now, "the last words do not leave");
    Finish(now);
  }
  if (phase_ == Phase::kLingering) {
    STAGECOACH_MARK("ib.peer_does_not_close_in_time");
    Discard(/*abort=*/true);
    Close();
  }
}

// --- Silence ---

IbConnection::Silence IbConnection::JudgeSilence(Instant now) {
  if (carrier_ != nullptr) {
    const Silence silence = JudgeOnCarrier(now);
    if (silence != Silence::kOfThePeer || carrier_loses_) return silence;
    STAGECOACH_MARK("ib.carrier_given_up_to_a_silent_host");
    DropCarrier(now, "the peer's host is silent");
  }
  return JudgeWithoutCarrier(now);
}

IbConnection::Silence IbConnection::JudgeOnCarrier(Instant now) {
  if (carrier_loses_) return Silence::kOfThePeer;
  const Delivery delivery = (*carrier_)->delivery();
  const bool has_moved = std::exchange(taken_seen_, delivery.taken) != delivery.taken;
  const uint64_t records = (*carrier_)->counters().rx_records;
  const bool has_heard = std::exchange(records_seen_, records) != records;
  const bool has_sign = delivery.host_answers || has_moved || has_heard;
  const bool forgotten = STAGECOACH_MUTANT("sign-of-life-forgotten", "a host that was silent once stays so");
  if (has_sign && !forgotten) silent_since_.reset();
  if (!delivery.is_complete || !(*carrier_)->TxIdle()) {
    STAGECOACH_MARK("ib.answer_awaited_while_bytes_are_under_way");
    asked_at_.reset();
    return has_sign || !IsHostSilent(now) ? Silence::kHeldUp : Silence::kOfThePeer;
  }
  // The answer may be behind other things that the peer says.
  if (has_heard || !asked_at_) asked_at_ = now;
  if (now - *asked_at_ < kAskEvery) return Silence::kHeldUp;
  STAGECOACH_MARK("ib.host_of_a_peer_that_stands_still_is_asked");
  asked_at_ = now;
  return Silence::kAtItsHost;
}

IbConnection::Silence IbConnection::JudgeWithoutCarrier(Instant now) {
  if (outlook_->is_refused) return Silence::kOfThePeer;
  if (!alone_since_) alone_since_ = now;
  const uint32_t streams = outlook_->streams;
  const bool has_sign = std::exchange(streams_seen_, streams) != streams || outlook_->is_asking;
  if (has_sign) silent_since_.reset();
  if (now - *alone_since_ >= kOpeningMax || (!has_sign && IsHostSilent(now))) {
    STAGECOACH_MARK("ib.no_carrier_in_time");
    return Silence::kOfThePeer;
  }
  STAGECOACH_MARK("ib.answer_awaited_while_a_stream_is_opened");
  return Silence::kHeldUp;
}

bool IbConnection::IsHostSilent(Instant now) {
  if (!silent_since_) silent_since_ = now;
  return now - *silent_since_ >= kHostSilence;
}

// --- Endings ---

void IbConnection::CheckEnd(Instant now) {
  // The state changes before a completion shows why, as programs that see one ask for the other.
  if (const std::optional<TransportFault> fault = transport_.TakeFault()) {
    qp_.Apply(EventOf(*fault));
    if (fault->kind != FaultKind::kSendQueue) BeginEnding(now);
  }
  pump_.TakeCompletions();
  if (phase_ == Phase::kOpen && qp_.doom_ != nullptr) Fail(QpEvent::kLocalFault, now);
  if (phase_ == Phase::kOpen && qp_.LocalFailureIsDue()) {
    if (qp_.kind() == QpKind::kUc) {
      // As of a send that fails: the engine has nothing of it, and goes on.
      STAGECOACH_MARK("ib.local_failure_stops_the_send_queue_of_uc");
      qp_.Apply(QpEvent::kSendFault);
      pump_.TakeCompletions();
    } else {
      Fail(QpEvent::kWorkFault, now);
    }
  }
  if (phase_ == Phase::kEnding && transport_.Finished()) Finish(now);
}

void IbConnection::Fail(QpEvent event, Instant now) {
  qp_.Apply(event);
  transport_.Flush();
  BeginEnding(now);
  pump_.TakeCompletions();
}

void IbConnection::BeginEnding(Instant now) {
  if (phase_ != Phase::kOpen) return;
  phase_ = Phase::kEnding;
  linger_until_ = now + nic_.profile().close_linger;
}

void IbConnection::Finish(Instant now) {
  pump_.SettlePlacements();
  pump_.TakeCompletions();
  qp_.FlushQueues();
  Trace(nic_.trace(), now, name_, "connection.ended", {});
  nic_.roce().Leave(qp_.qp_number(), generation_);
  if (carrier_ == nullptr) return Close();
  // The engine is done, so what is still queued is a packet too many.
  if (!(*carrier_)->TxIdle()) {
    STAGECOACH_MARK("ib.packets_left_over_at_the_end");
    Discard(/*abort=*/true);
    pump_.Use(nullptr);
    return Close();
  }
  (*carrier_)->Shutdown();
  // Closing with unread bytes in the socket would send a reset, which may overtake our last words.
  phase_ = Phase::kLingering;
  linger_until_ = now + nic_.profile().close_linger;
}

void IbConnection::Linger() {
  const Llp::Drained drained = (*carrier_)->Drain();
  if (drained.any) STAGECOACH_MARK("ib.peer_sends_to_a_qp_that_is_over");
  if (drained.end) {
    Discard(/*abort=*/false);
    return Close();
  }
  if (drained.more) pump_.SetMore();
}

void IbConnection::Close() {
  phase_ = Phase::kClosed;
  linger_until_.reset();
  nic_.loop().Notify(&qp_);  // which takes us out of the QP
}

void IbConnection::Abort() {
  if (phase_ == Phase::kClosed) return;
  const Instant now = Now();
  transport_.BeginTurn(now);
  pump_.SettlePlacements();
  if (phase_ == Phase::kOpen || phase_ == Phase::kEnding) {
    STAGECOACH_MARK("ib.aborted_under_its_qp");
    transport_.Flush();
    if (carrier_ != nullptr) transport_.OnCarrier(false, now);
    pump_.TakeCompletions();
    nic_.roce().Leave(qp_.qp_number(), generation_);
  }
  pump_.Use(nullptr);
  if (carrier_ != nullptr) Discard(/*abort=*/true);
  Close();
}

const char* IbConnection::PhaseName() const {
  switch (phase_) {
    case Phase::kOpen:
      return carrier_ != nullptr ? "carried" : "without a carrier";
    case Phase::kEnding:
      return "ending";
    case Phase::kLingering:
      return "lingering";
    case Phase::kClosed:
      return "closed";
  }
  return "unknown";
}

// --- Time and waking ---

// While the peer is being told of the end, retries that nobody hears must not be used up.
std::optional<Instant> IbConnection::EngineDeadline() const {
  return IsSevering() ? std::nullopt : transport_.Deadline();
}

void IbConnection::PrepareNextTurn(uint32_t requests) {
  const bool open = phase_ == Phase::kOpen;
  if (phase_ == Phase::kClosed) {
    next_.SetDeadline({});
  } else {
    next_.SetDeadline({open ? EngineDeadline() : std::nullopt,
                       open && transport_.HoldsWork() ? patience_until_ : std::nullopt,
                       open ? sever_until_ : std::nullopt, linger_until_, pump_.PlacementDue(), qp_.HeldUntil()});
  }
  next_.Ensure(requests, {.more = pump_.more(),
                          .receive = transport_.Receiving(),
                          .drain = phase_ == Phase::kLingering,
                          .send = pump_.tx_blocked()});
}

}  // namespace stagecoach::emu
