#include "emu/cm/iwarp_cm.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <new>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/insist.h"
#include "base/mark.h"
#include "base/mutant.h"
#include "base/undoing.h"
#include "emu/cm/cm_core.h"
#include "emu/engine/mpa_handshake.h"

namespace stagecoach::emu {
namespace {

using State = CmId::State;

// Connections the host's own stack may hold before we see them, or as many as the program's backlog where that is more.
constexpr uint32_t kStreamBacklog = 256;

uint8_t Narrow(uint32_t depth) {
  return static_cast<uint8_t>(std::min<uint32_t>(depth, 0xff));
}

// A program's wish, within what the device can do.
uint16_t Depth(uint8_t wish, uint32_t device_max) {
  const uint32_t limit = std::min<uint32_t>(device_max, wire::kMpaDepthMax);
  return static_cast<uint16_t>(wish == kCmDepthMax ? limit : std::min<uint32_t>(wish, limit));
}

ConnectionSetup::Rtr ToSetup(MpaRtr rtr) {
  switch (rtr) {
    case MpaRtr::kNone:
      return ConnectionSetup::Rtr::kNone;
    case MpaRtr::kWrite:
      return ConnectionSetup::Rtr::kWrite;
    case MpaRtr::kRead:
      return ConnectionSetup::Rtr::kRead;
  }
  return ConnectionSetup::Rtr::kNone;
}

// Which event and status a failed outgoing attempt becomes. Linux's iWARP glue (cma.c) draws the same lines.
CmCore::Failure FailureOf(int error) {
  switch (error) {
    case ECONNREFUSED:
    case ECONNRESET:
      return {CmEventType::kRejected, -error};
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case ENETUNREACH:
      return {CmEventType::kUnreachable, -error};
    default:
      return {CmEventType::kConnectError, -error};
  }
}

int ErrnoOf(const MpaFault& fault) {
  switch (fault.kind) {
    case MpaFaultKind::kTimeout:
      return ETIMEDOUT;
    case MpaFaultKind::kStreamLost:
      return ECONNRESET;
    default:
      return EPROTO;
  }
}

// Moves bytes between the stream and a handshake engine as far as both allow.
template <typename Engine>
void Exchange(Engine& engine, Stream& stream, const Fabric& fabric) {
  std::array<std::byte, wire::kMpaFrameSizeMax> buffer;
  for (;;) {
    const ConstBytes pending = engine.PendingTx();
    if (!pending.empty()) {
      const IoResult written = stream.Write({&pending, 1});
      if (written.status == IoStatus::kOk) {
        engine.OnTx(written.bytes);
        continue;
      }
      if (written.status != IoStatus::kWouldBlock) engine.OnLost(fabric.Now());
      break;
    }
    const size_t wanted = std::min(engine.NextRx(), buffer.size());
    if (wanted == 0) break;
    const MutableBytes into = MutableBytes(buffer).first(wanted);
    const IoResult read = stream.Read({&into, 1});
    if (read.status == IoStatus::kOk) {
      engine.OnRx(into.first(read.bytes), fabric.Now());
      continue;
    }
    if (read.status != IoStatus::kWouldBlock) engine.OnLost(fabric.Now());
    break;
  }
}

}  // namespace

// --- Handshakes: the loop's own ---

class IwarpCm::Handshake : public ReadyWatcher {
 public:
  Handshake(IwarpCm& cm, uint64_t key) : cm_(cm), core_(cm.core_), key_(key) {}
  ~Handshake() override {
    if (timer_ != 0) core_.fabric().loop().Cancel(timer_);
    if (stream_ != nullptr) stream_->SetWatcher(nullptr);
  }

  void OnReady() override {
    Guarded([this] { Advance(); });
  }

  // Each step of a handshake, also those that follow from what somebody else has done, goes through here: without
  // memory for it the handshake is over.
  template <typename Step>
  void Guarded(Step step) {
    try {
      step();
    } catch (const std::bad_alloc&) {
      STAGECOACH_MARK("cm.handshake_finds_no_memory");
      Insist([this] { GiveUp(); });
    }
  }

  // Moves on, and ends the handshake (destroying this object later) when its outcome is there.
  virtual void Advance() = 0;
  virtual void OnTimer() = 0;
  // There is no memory for the next step: ends the handshake, and says so.
  virtual void GiveUp() = 0;

 protected:
  void Take(std::unique_ptr<Stream> stream) {
    stream_ = std::move(stream);
    stream_->SetWatcher(this);
  }
  std::unique_ptr<Stream> ReleaseStream() {
    stream_->SetWatcher(nullptr);
    return std::move(stream_);
  }

  void SetTimer(std::optional<Instant> when) {
    if (when == timer_due_) return;
    Reactor& loop = core_.fabric().loop();
    if (timer_ != 0) loop.Cancel(timer_);
    timer_ = 0;
    timer_due_ = when;
    if (!when) return;
    timer_ = loop.At(*when, [weak = core_.weak_from_this(), cm = &cm_, key = key_] {
      const auto core = weak.lock();
      Handshake* handshake = core != nullptr ? cm->Find(key) : nullptr;
      if (handshake == nullptr) return;
      handshake->timer_ = 0;
      handshake->timer_due_.reset();
      handshake->Guarded([&] { handshake->OnTimer(); });
    });
  }

  // Not at once: the stream may be calling us.
  void Finish() {
    finished_ = true;
    if (stream_ != nullptr) stream_->Arm(false, false);
    cm_.OnLoop([key = key_](IwarpCm& cm) { cm.Remove(key); });
  }

  IwarpCm& cm_;
  CmCore& core_;
  const uint64_t key_;
  std::unique_ptr<Stream> stream_;
  bool finished_ = false;

 private:
  Reactor::TimerId timer_ = 0;
  std::optional<Instant> timer_due_;
};

class IwarpCm::Outgoing final : public Handshake {
 public:
  Outgoing(IwarpCm& cm, std::shared_ptr<CmId> id, CmParameters parameters)
      : Handshake(cm, id->serial()), id_(std::move(id)), parameters_(std::move(parameters)) {}

  void Start(const StreamOptions& options, const IpEndpoint& local, const IpEndpoint& remote) {
    options_ = options;
    cm_.SetPatience(&options_);
    local_ = local;
    remote_ = remote;
    patient_until_ = core_.Now() + core_.options().listener_patience;
    Dial();
  }

  void Advance() override {
    if (finished_ || stream_ == nullptr) return;
    Exchange(engine_, *stream_, core_.fabric());
    if (auto outcome = engine_.TakeOutcome()) return Conclude(std::move(*outcome));
    stream_->Arm(engine_.NextRx() > 0, !engine_.PendingTx().empty());
    SetTimer(engine_.Deadline());
  }

  void OnTimer() override {
    if (finished_) return;
    if (stream_ == nullptr) return Dial();
    engine_.OnDeadline(core_.Now());
    Advance();
  }

  void GiveUp() override {
    core_.Fail(id_, State::kConnecting, {CmEventType::kConnectError, -ENOMEM});
    Finish();
  }

 private:
  void Dial() {
    attempt_ = core_.fabric().ConnectWith(
        options_, local_, remote_,
        [weak = core_.weak_from_this(), cm = &cm_, key = key_](Result<std::unique_ptr<Stream>, FabricError> result) {
          const auto core = weak.lock();
          auto* self = core != nullptr ? static_cast<Outgoing*>(cm->Find(key)) : nullptr;
          if (self != nullptr && !self->finished_) self->Guarded([&] { self->OnConnected(std::move(result)); });
        });
  }

  void OnConnected(Result<std::unique_ptr<Stream>, FabricError> result) {
    if (!result && result.error().error == ECONNREFUSED && core_.Now() + kListenerPause <= patient_until_) {
      return SetTimer(core_.Now() + kListenerPause);
    }
    if (!result) {
      STAGECOACH_MARK("cm.stream_not_connected");
      core_.Fail(id_, State::kConnecting, FailureOf(result.error().error));
      return Finish();
    }
    Take(std::move(*result));
    const DeviceProfile& profile = core_.nic().profile();
    MpaInitiatorOptions options;
    options.crc = profile.want_crc;
    options.ird = Depth(parameters_.responder_resources, profile.max_ird);
    options.ord = Depth(parameters_.initiator_depth, profile.max_ord);
    options.peer_to_peer = core_.options().peer_to_peer;
    options.extensions = profile.extensions;
    options.timeout = core_.options().reply_timeout;
    const auto started = engine_.Start(options, parameters_.private_data, core_.Now());
    STAGECOACH_CHECK(started.has_value());
    Advance();
  }

  void Conclude(Result<MpaOutcome, MpaFault> outcome) {
    if (!outcome) {
      core_.Tell("handshake.failed", {{"id", key_}, {"why", ToString(outcome.error())}});
      core_.Fail(id_, State::kConnecting, FailureOf(ErrnoOf(outcome.error())));
    } else if (!outcome->accepted) {
      outcome->private_data.resize(std::min(outcome->private_data.size(), kCmReceivedPrivateDataMax));
      core_.Fail(id_, State::kConnecting, {CmEventType::kRejected, -ECONNREFUSED}, std::move(outcome->private_data));
    } else {
      cm_.Attach(id_, State::kConnecting, ReleaseStream(), *outcome, true);
    }
    Finish();
  }

  const std::shared_ptr<CmId> id_;
  const CmParameters parameters_;
  StreamOptions options_;
  IpEndpoint local_;
  IpEndpoint remote_;
  Instant patient_until_{};
  std::unique_ptr<ConnectAttempt> attempt_;
  MpaInitiator engine_;
};

class IwarpCm::Incoming final : public Handshake {
 public:
  // Counted in `strangers`.
  Incoming(IwarpCm& cm, uint64_t key, std::weak_ptr<CmId> listener, std::shared_ptr<HalfOpen> strangers,
           std::unique_ptr<Stream> stream)
      : Handshake(cm, key),
        listener_(std::move(listener)),
        strangers_(std::move(strangers)),
        engine_({.timeout = core_.options().request_timeout}, core_.Now()) {
    Take(std::move(stream));
  }
  ~Incoming() override { LeaveHalfOpen(); }

  // A newer stranger needs its room.
  void GiveWay() {
    LeaveHalfOpen();
    if (finished_) return;
    STAGECOACH_MARK("cm.half_open_limit_reached");
    {
      std::lock_guard lock(core_.mutex());
      ++core_.mutable_counters().refused_streams;
    }
    core_.Tell("stream.refused", {{"remote", stream_->remote().ToString()}, {"why", "too many say nothing"}});
    stream_->Abort();
    Finish();
  }

  void GiveUp() override {
    LeaveHalfOpen();
    if (child_ != nullptr) cm_.FailAccepted(child_, {CmEventType::kConnectError, -ENOMEM});
    if (stream_ != nullptr) stream_->Abort();
    Finish();
  }

  // Whether its request has not been answered or turned into an event yet.
  bool IsStrangerOf(const CmId* listener) const { return half_open_ && listener_.lock().get() == listener; }

  void Accept(const CmParameters& parameters) {
    if (finished_) return;
    const DeviceProfile& profile = core_.nic().profile();
    MpaAcceptOptions options;
    options.crc = profile.want_crc;
    options.ird = Depth(parameters.responder_resources, profile.max_ird);
    options.ord = Depth(parameters.initiator_depth, profile.max_ord);
    options.extensions = profile.extensions;
    const auto accepted = engine_.Accept(options, parameters.private_data, core_.Now());
    STAGECOACH_CHECK(accepted.has_value());
    Advance();
  }

  void Reject(ConstBytes private_data) {
    if (finished_) return;
    const auto rejected = engine_.Reject(private_data, core_.Now());
    STAGECOACH_CHECK(rejected.has_value());
    Advance();
  }

  void Advance() override {
    if (finished_ || stream_ == nullptr) return;
    Exchange(engine_, *stream_, core_.fabric());
    if (auto request = engine_.TakeRequest()) OnRequest(*request);
    if (!outcome_) {
      if (auto outcome = engine_.TakeOutcome()) outcome_ = std::move(*outcome);
    }
    // A fault may be answered by a rejection; that goes out first, for as long as a reply may take.
    if (outcome_ && (engine_.PendingTx().empty() || given_up_)) return Conclude();
    stream_->Arm(!outcome_ && engine_.NextRx() > 0, !engine_.PendingTx().empty());
    if (!outcome_) {
      SetTimer(engine_.Deadline());
    } else if (!last_words_due_) {
      last_words_due_ = core_.Now() + core_.options().request_timeout;
      SetTimer(last_words_due_);
    }
  }

  void OnTimer() override {
    if (outcome_) {
      STAGECOACH_MARK("cm.last_words_not_taken");
      given_up_ = true;
    } else {
      engine_.OnDeadline(core_.Now());
    }
    Advance();
  }

 private:
  void LeaveHalfOpen() {
    if (!half_open_) return;
    half_open_ = false;
    if (!STAGECOACH_MUTANT("known-keep-strangers-places", "who has made its request keeps the place of a stranger")) {
      strangers_->Leave(key_);
    }
    std::lock_guard lock(core_.mutex());
    --core_.mutable_counters().half_open;
  }

  void OnRequest(const MpaRequest& request) {
    LeaveHalfOpen();
    std::string_view why = "its private data is too long";
    const bool fits = request.private_data.size() <= kCmReceivedPrivateDataMax;
    {
      std::lock_guard lock(core_.mutex());
      auto listener = listener_.lock();
      const bool wanted = listener != nullptr && listener->state_ == State::kListening && !core_.closed();
      if (wanted && fits && CmCore::HasRoom(*listener)) {
        // What needs memory comes before the child that takes room of the backlog.
        CmEvent event{CmEventType::kConnectRequest, nullptr, listener, 0, {}};
        event.parameters.private_data = request.private_data;
        child_ = core_.NewChild(listener, key_, stream_->local(), stream_->remote());
        child_->extensions_ = request.extensions;
        event.id = child_;
        const DeviceProfile& profile = core_.nic().profile();
        // Of a peer that does not tell (revision 1, or "my ULP looks after it") we believe what we can do ourselves.
        const bool told = request.enhanced;
        const auto view = [told](uint16_t of_peer, uint32_t own) {
          return Narrow(told && of_peer != wire::kMpaDepthUnspecified ? std::min<uint32_t>(of_peer, own) : own);
        };
        event.parameters.responder_resources = view(request.ord, profile.max_ird);
        event.parameters.initiator_depth = view(request.ird, profile.max_ord);
        Undoing unheard([&] { core_.DropChild(*child_); });
        core_.Emit(std::move(event));
        return unheard.Done();
      }
      ++core_.mutable_counters().refused_streams;
      if (!wanted) {
        STAGECOACH_MARK("cm.listener_closes_before_the_request");
        why = "nobody listens any more";
      } else if (!fits) {
        STAGECOACH_MARK("cm.request_with_too_much_private_data");
      } else {
        STAGECOACH_MARK("cm.backlog_full");
        why = "the backlog is full";
      }
    }
    core_.Tell("request.refused", {{"id", key_}, {"why", why}});
    const auto rejected = engine_.Reject({}, core_.Now());
    STAGECOACH_CHECK(rejected.has_value());
    Exchange(engine_, *stream_, core_.fabric());
  }

  void Conclude() {
    const Result<MpaOutcome, MpaFault>& outcome = *outcome_;
    if (outcome && outcome->accepted) {
      cm_.Attach(child_, State::kAccepting, ReleaseStream(), *outcome, false);
      return Finish();
    }
    if (!outcome) {
      core_.Tell("handshake.failed", {{"id", key_}, {"why", ToString(outcome.error())}});
      std::lock_guard lock(core_.mutex());
      ++core_.mutable_counters().failed_handshakes;
    }
    if (child_ != nullptr && !outcome) STAGECOACH_MARK("cm.handshake_fails_after_the_request_was_told");
    if (child_ != nullptr) {
      cm_.FailAccepted(child_, {CmEventType::kConnectError, -(outcome ? ECONNABORTED : ErrnoOf(outcome.error()))});
    }
    // The stream is closed with the handshake; what was said still reaches the peer.
    stream_->Shutdown();
    Finish();
  }

  std::weak_ptr<CmId> listener_;
  const std::shared_ptr<HalfOpen> strangers_;  // of the listener
  std::shared_ptr<CmId> child_;                // once its request is an event
  bool half_open_ = true;                      // counted as such
  MpaResponder engine_;
  std::optional<Result<MpaOutcome, MpaFault>> outcome_;
  std::optional<Instant> last_words_due_;
  bool given_up_ = false;
};

// Owns neither side, and may be called when either has gone: an id that no longer waits for it is in another state.
class IwarpCm::Observer final : public ConnectionObserver {
 public:
  Observer(std::weak_ptr<CmCore> core, IwarpCm* cm, std::weak_ptr<CmId> id)
      : core_(std::move(core)), cm_(cm), id_(std::move(id)) {}
  void OnFirstRecord() override {
    auto core = core_.lock();
    auto id = id_.lock();
    if (core != nullptr && id != nullptr) cm_->OnFirstRecord(id);
  }
  void OnClosed(const CloseNotice& notice) override {
    auto core = core_.lock();
    auto id = id_.lock();
    if (core != nullptr && id != nullptr) cm_->OnClosed(id, notice);
  }

 private:
  const std::weak_ptr<CmCore> core_;
  IwarpCm* const cm_;  // lives while core_ does
  const std::weak_ptr<CmId> id_;
};

// --- CmTransport ---

IwarpCm::IwarpCm(CmCore& core) : core_(core) {}

IwarpCm::~IwarpCm() = default;

Result<std::unique_ptr<PortHold>, int> IwarpCm::HoldPort(const CmId& id, const IpEndpoint& local) {
  auto held = core_.fabric().HoldPort(id.stream_options_, local);
  if (!held) return Err(int{held.error().error});
  return std::move(*held);
}

Result<std::unique_ptr<Listener>, int> IwarpCm::Listen(const std::shared_ptr<CmId>& id, const IpEndpoint& local,
                                                       const StreamOptions& options) {
  uint32_t backlog = 0;
  {
    std::lock_guard lock(core_.mutex());
    backlog = id->backlog_;
  }
  StreamOptions patient = options;
  SetPatience(&patient);
  const CmOptions& limits = core_.options();
  const auto half_open =
      std::make_shared<HalfOpen>(std::max(limits.half_open_limit, std::min(backlog, limits.half_open_max)));
  auto listener = core_.fabric().ListenWith(patient, local, static_cast<int>(std::max(kStreamBacklog, backlog)),
                                            [this, weak = core_.weak_from_this(), weak_id = std::weak_ptr<CmId>(id),
                                             half_open](std::unique_ptr<Stream> stream) {
                                              if (const auto core = weak.lock())
                                                OnStream(weak_id, half_open, std::move(stream));
                                            });
  if (!listener) return Err(int{listener.error().error});
  return std::move(*listener);
}

void IwarpCm::SetPatience(StreamOptions* options) const {
  options->keepalive = core_.options().keepalive;
  options->user_timeout = core_.options().user_timeout;
}

void IwarpCm::Connect(const std::shared_ptr<CmId>& id, const CmParameters& parameters) {
  OnLoop([id, parameters, options = id->stream_options_, local = id->local_, remote = id->remote_](IwarpCm& cm) {
    try {
      auto outgoing = std::make_unique<Outgoing>(cm, id, parameters);
      Outgoing* started = outgoing.get();
      cm.handshakes_[id->serial()] = std::move(outgoing);
      started->Start(options, local, remote);
    } catch (const std::bad_alloc&) {
      STAGECOACH_MARK("cm.attempt_finds_no_memory");
      cm.Remove(id->serial());
      cm.core_.Fail(id, State::kConnecting, {CmEventType::kConnectError, -ENOMEM});
    }
  });
}

int IwarpCm::PrepareToAccept(const std::shared_ptr<CmId>& id, const CmParameters&) {
  uint32_t qp_number = 0;
  bool extensions = false;
  {
    std::lock_guard lock(core_.mutex());
    qp_number = id->qp_number_;
    extensions = id->extensions_ && core_.nic().profile().extensions;
  }
  core_.nic().ExpectConnection(qp_number, extensions);
  return 0;
}

void IwarpCm::UndoAccept(const std::shared_ptr<CmId>& id) {
  uint32_t qp_number = 0;
  {
    std::lock_guard lock(core_.mutex());
    qp_number = id->qp_number_;
  }
  core_.nic().ForgoConnection(qp_number);
}

void IwarpCm::FailAccepted(const std::shared_ptr<CmId>& id, CmCore::Failure failure) {
  uint32_t qp_number = 0;
  {
    std::lock_guard lock(core_.mutex());
    if (id->state_ == State::kAccepting) qp_number = id->qp_number_;
  }
  if (qp_number != 0) core_.nic().ForgoConnection(qp_number);
  core_.Fail(id, State::kAccepting, std::move(failure));
}

void IwarpCm::Accept(const std::shared_ptr<CmId>& id, const CmParameters& parameters) {
  OnLoop([key = id->serial(), parameters](IwarpCm& cm) {
    if (auto* incoming = static_cast<Incoming*>(cm.Find(key))) {
      incoming->Guarded([&] { incoming->Accept(parameters); });
    }
  });
}

void IwarpCm::Reject(const std::shared_ptr<CmId>& id, std::vector<std::byte> private_data) {
  OnLoop([key = id->serial(), private_data = std::move(private_data)](IwarpCm& cm) {
    if (auto* incoming = static_cast<Incoming*>(cm.Find(key))) {
      incoming->Guarded([&] { incoming->Reject(private_data); });
    }
  });
}

void IwarpCm::OnQpGone(const std::shared_ptr<CmId>& id) {
  id->attached_ = false;
  if (id->state_ == State::kConnected) {
    STAGECOACH_MARK("cm.qp_destroyed_while_connected");
    core_.Emit(CmEventType::kDisconnected, id);
    id->state_ = State::kClosed;
  } else if (id->state_ == State::kConnecting || id->state_ == State::kAccepting) {
    STAGECOACH_MARK("cm.qp_destroyed_amidst_its_handshake");
    core_.Emit(CmEventType::kConnectError, id, -ECONNABORTED);
    id->state_ = State::kClosed;
    OnLoop([key = id->serial()](IwarpCm& cm) { cm.Remove(key); });
  }
}

int IwarpCm::Notify(const std::shared_ptr<CmId>& id, bool) {
  const State state = id->state_;
  const bool connects = state != State::kIdle && state != State::kBound && state != State::kAddressResolved &&
                        state != State::kRouteResolved;
  return connects ? 0 : EINVAL;
}

// Connecting takes the QP to RTS: RTR and RTS need nothing of the program, so that the mask has no state.
Result<CmTransport::QpChange, int> IwarpCm::ChangeTo(const CmId&, QpState state) const {
  QpChange change;
  change.attributes.state = state;
  change.attributes.access = kAccessRemoteWrite | kAccessRemoteRead;
  switch (state) {
    case QpState::kInit:
      change.mask = qp_attr::kState | qp_attr::kPkeyIndex | qp_attr::kPort | qp_attr::kAccessFlags;
      return change;
    case QpState::kRtr:
      change.mask = qp_attr::kPort | qp_attr::kAccessFlags;
      return change;
    case QpState::kRts:
      change.mask = qp_attr::kPort;
      return change;
    default:
      return Err(EINVAL);
  }
}

int IwarpCm::Disconnect(const std::shared_ptr<CmId>& id) {
  uint32_t qp_number = 0;
  {
    std::lock_guard lock(core_.mutex());
    if (id->state_ == State::kClosed) {
      STAGECOACH_MARK("cm.both_ends_disconnect");
      return 0;
    }
    // Accepting counts once the stream is the QP's: its RTR may never come.
    if (id->state_ != State::kConnected && !(id->state_ == State::kAccepting && id->attached_)) return EINVAL;
    qp_number = id->qp_number_;
  }
  return core_.nic().Disconnect(qp_number) == 0 ? 0 : EINVAL;
}

void IwarpCm::Forget(const std::shared_ptr<CmId>& id, State before, bool attached, uint32_t qp_number) {
  if (attached) core_.nic().Disconnect(qp_number);
  if (before == State::kListening) {
    OnLoop([listener = id.get(), keep = id](IwarpCm& cm) {
      for (auto& [key, handshake] : cm.handshakes_) {
        auto* incoming = dynamic_cast<Incoming*>(handshake.get());
        if (incoming == nullptr || !incoming->IsStrangerOf(listener)) continue;
        STAGECOACH_MARK("cm.listener_destroyed_amidst_handshakes");
        cm.OnLoop([key = key](IwarpCm& later) { later.Remove(key); });
      }
    });
  } else if (before == State::kRequested) {
    OnLoop([key = id->serial()](IwarpCm& cm) {
      if (auto* incoming = static_cast<Incoming*>(cm.Find(key))) incoming->Guarded([&] { incoming->Reject({}); });
    });
  } else if (before == State::kConnecting || before == State::kAccepting) {
    if (before == State::kAccepting && !attached) core_.nic().ForgoConnection(qp_number);
    OnLoop([key = id->serial()](IwarpCm& cm) {
      cm.Remove(key);
      cm.StopAwaitingRtr(key);
    });
  }
}

void IwarpCm::Close() {
  handshakes_.clear();
  for (const auto& [serial, timer] : rtr_timers_) core_.fabric().loop().Cancel(timer);
  rtr_timers_.clear();
}

// --- On the loop ---

IwarpCm::Handshake* IwarpCm::Find(uint64_t key) {
  const auto found = handshakes_.find(key);
  return found == handshakes_.end() ? nullptr : found->second.get();
}

void IwarpCm::Remove(uint64_t key) {
  handshakes_.erase(key);
}

void IwarpCm::OnStream(const std::weak_ptr<CmId>& weak_listener, const std::shared_ptr<HalfOpen>& half_open,
                       std::unique_ptr<Stream> stream) {
  uint64_t key = 0;
  {
    std::lock_guard lock(core_.mutex());
    auto listener = weak_listener.lock();
    if (core_.closed() || listener == nullptr || listener->state_ != State::kListening) {
      STAGECOACH_MARK("cm.listener_closes_before_the_stream");
      ++core_.mutable_counters().refused_streams;
    } else {
      ++core_.mutable_counters().accepted_streams;
      ++core_.mutable_counters().half_open;
      key = core_.NextSerial();
    }
  }
  if (key == 0) {
    core_.Tell("stream.refused", {{"remote", stream->remote().ToString()}, {"why", "nobody listens any more"}});
    stream->Abort();
    return;
  }
  Undoing forgotten([&] {
    half_open->Leave(key);
    std::lock_guard lock(core_.mutex());
    --core_.mutable_counters().half_open;
  });
  if (const auto oldest = half_open->Enter(key, stream->remote())) {
    static_cast<Incoming*>(handshakes_.at(*oldest).get())->GiveWay();
  }
  auto incoming = std::make_unique<Incoming>(*this, key, weak_listener, half_open, std::move(stream));
  forgotten.Done();
  Incoming* started = incoming.get();
  handshakes_[key] = std::move(incoming);
  started->Guarded([&] { started->Advance(); });
}

void IwarpCm::Attach(const std::shared_ptr<CmId>& id, State expected, std::unique_ptr<Stream> stream,
                     const MpaOutcome& outcome, bool initiator) {
  uint32_t qp_number = 0;
  {
    std::lock_guard lock(core_.mutex());
    if (id->state_ != expected) {
      STAGECOACH_MARK("cm.id_gone_before_its_connection");
      return stream->Abort();
    }
    qp_number = id->qp_number_;
    id->attached_ = true;
    id->local_ = stream->local();
    id->remote_ = stream->remote();
  }
  Undoing detached([&] {
    std::lock_guard lock(core_.mutex());
    id->attached_ = false;
  });
  ConnectionSetup setup;
  setup.llp =
      core_.fabric().RecordsOver(std::move(stream), {.crc = outcome.crc, .insert_markers = outcome.send_markers});
  const Carriage carriage = setup.llp->carriage();
  setup.initiator = initiator;
  setup.ird = outcome.ird;
  setup.ord = outcome.ord;
  setup.extensions = outcome.extensions;
  setup.rtr = ToSetup(outcome.rtr);
  setup.observer = std::make_shared<Observer>(core_.weak_from_this(), this, id);
  // From here on nothing is missing: what needs memory has it.
  CmEvent established{CmEventType::kEstablished, id, nullptr, 0, {}};
  established.parameters.private_data = outcome.private_data;
  established.parameters.private_data.resize(std::min(outcome.private_data.size(), kCmReceivedPrivateDataMax));
  established.parameters.responder_resources = Narrow(outcome.ird);
  established.parameters.initiator_depth = Narrow(outcome.ord);
  // The observer is called on this thread only, so not before we are done here.
  const int error = core_.nic().AttachConnection(qp_number, std::move(setup));
  detached.Done();
  {
    std::lock_guard lock(core_.mutex());
    if (id->state_ == expected) {
      if (error != 0) {
        STAGECOACH_MARK("cm.qp_does_not_take_the_connection");
        core_.Emit(CmEventType::kConnectError, id, -error);
        id->attached_ = false;
        id->state_ = State::kClosed;
        return;
      }
      core_.Tell("connected", {{"id", id->serial()},
                               {"qp", uint64_t{qp_number}},
                               {"ird", uint64_t{outcome.ird}},
                               {"ord", uint64_t{outcome.ord}},
                               {"crc", uint64_t{outcome.crc}},
                               {"rtr", ToString(outcome.rtr)},
                               {"by", carriage.by},
                               {"why", carriage.why}});
      if (initiator || outcome.rtr == MpaRtr::kNone) {
        core_.Emit(std::move(established));
        id->state_ = State::kConnected;
      } else {
        AwaitRtr(id);
      }
      return;
    }
  }
  STAGECOACH_MARK("cm.id_gone_while_its_connection_is_attached");
  // The id went away meanwhile, without knowing of the connection.
  if (error == 0) core_.nic().Disconnect(qp_number);
}

// An initiator that agreed to send an RTR and does not is given up like one that never made its request.
void IwarpCm::AwaitRtr(const std::shared_ptr<CmId>& id) {
  const auto timer = Insist([&] { return rtr_timers_.emplace(id->serial(), 0).first; });
  timer->second =
      InsistAt(core_.fabric().loop(), core_.Now() + core_.options().request_timeout,
               [this, weak = core_.weak_from_this(), serial = id->serial(), weak_id = std::weak_ptr<CmId>(id)] {
                 auto core = weak.lock();
                 if (core == nullptr) return;
                 rtr_timers_.erase(serial);
                 auto late = weak_id.lock();
                 if (late == nullptr) return;
                 {
                   std::lock_guard lock(core->mutex());
                   if (core->closed() || late->state_ != State::kAccepting) return;
                 }
                 STAGECOACH_MARK("cm.rtr_does_not_come_in_time");
                 Disconnect(late);
               });
}

void IwarpCm::StopAwaitingRtr(uint64_t serial) {
  const auto found = rtr_timers_.find(serial);
  if (found == rtr_timers_.end()) return;
  if (STAGECOACH_MUTANT("rtr-timer-outlives-its-wait", "the timer of an RTR stays when the RTR has come")) return;
  core_.fabric().loop().Cancel(found->second);
  rtr_timers_.erase(found);
}

void IwarpCm::OnFirstRecord(const std::shared_ptr<CmId>& id) {
  StopAwaitingRtr(id->serial());
  std::lock_guard lock(core_.mutex());
  if (id->state_ != State::kAccepting) return;
  core_.Emit(CmEventType::kEstablished, id);
  id->state_ = State::kConnected;
}

void IwarpCm::OnClosed(const std::shared_ptr<CmId>& id, const CloseNotice& notice) {
  StopAwaitingRtr(id->serial());
  std::lock_guard lock(core_.mutex());
  id->attached_ = false;
  int status = 0;
  if (notice.reason == CloseReason::kStreamFailed) status = -(notice.error != 0 ? notice.error : ECONNRESET);
  if (notice.reason == CloseReason::kPeerFault || notice.reason == CloseReason::kLocalFault) status = -ECONNRESET;
  // A Terminate of ours that is not about ourselves (RFC 5040 section 4.8: layer 0, type 0) is about what the peer
  // sent.
  const bool local = !notice.fault || (notice.fault->layer == 0 && notice.fault->error_type == 0);
  if (notice.reason == CloseReason::kLocalFault && !local) status = -EPROTO;
  if (id->state_ == State::kConnected) {
    core_.Emit(CmEventType::kDisconnected, id, status);
    id->state_ = State::kClosed;
  } else if (id->state_ == State::kAccepting) {
    STAGECOACH_MARK("cm.closed_before_the_rtr");
    core_.Emit(CmEventType::kConnectError, id, status != 0 ? status : -ECONNRESET);
    id->state_ = State::kClosed;
  }
}

}  // namespace stagecoach::emu
