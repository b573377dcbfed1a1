#include "emu/cm/connection_manager.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/mark.h"
#include "emu/engine/mpa_handshake.h"
#include "emu/llp/mpa_llp.h"

namespace stagecoach::emu {
namespace {

using State = CmId::State;

// What rdma_listen's callers may have waiting at most, and what a backlog of 0 means (as Linux's iWARP connection
// manager has it).
constexpr uint32_t kBacklogMax = 256;
// Connections the host's own stack may hold before we see them.
constexpr int kStreamBacklog = 256;
// rdma_conn_param says the length of private data in eight bits.
constexpr size_t kReceivedPrivateDataMax = 255;

bool SameAddress(const IpEndpoint& a, const IpEndpoint& b) {
  return a.WithPort(0) == b.WithPort(0);
}

bool IsLocal(const Fabric& fabric, const IpEndpoint& address) {
  if (address.IsUnspecified() || address.IsLoopback()) return true;
  const std::vector<IpEndpoint> all = fabric.LocalAddresses();
  return std::any_of(all.begin(), all.end(), [&](const IpEndpoint& own) { return SameAddress(own, address); });
}

bool IsLinkLocal(const IpEndpoint& address) {
  return address.family == IpEndpoint::Family::kIpv6 && address.address[0] == 0xfe &&
         (address.address[1] & 0xc0) == 0x80;
}

// A scope means something for link-local addresses only (RFC 4007), and there it is needed.
bool LacksScope(const IpEndpoint& address) {
  return IsLinkLocal(address) && address.scope_id == 0;
}
IpEndpoint WithoutIdleScope(IpEndpoint address) {
  if (!IsLinkLocal(address)) address.scope_id = 0;
  return address;
}

// Whether one stream could be meant for either.
bool Overlap(const IpEndpoint& a, bool a_only, const IpEndpoint& b, bool b_only) {
  if (a.family != b.family) {
    const bool a_is_6 = a.family == IpEndpoint::Family::kIpv6;
    return a_is_6 ? a.IsUnspecified() && !a_only : b.IsUnspecified() && !b_only;
  }
  return a.IsUnspecified() || b.IsUnspecified() || SameAddress(a, b);
}

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
struct Failure {
  CmEventType type = CmEventType::kConnectError;
  int status = 0;
};

Failure FailureOf(int error) {
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

// --- Core ---

class ConnectionManager::Core : public std::enable_shared_from_this<ConnectionManager::Core> {
 public:
  Core(Nic& nic, const CmOptions& options)
      : nic_(nic), fabric_(nic.fabric()), options_(options), name_(nic.name() + "/cm") {}

  std::shared_ptr<CmId> CreateId(std::shared_ptr<CmChannel> channel);
  void Destroy(const std::shared_ptr<CmId>& id);
  void Migrate(const std::shared_ptr<CmId>& id, std::shared_ptr<CmChannel> channel);
  int Bind(const std::shared_ptr<CmId>& id, const IpEndpoint& local);
  int ResolveAddress(const std::shared_ptr<CmId>& id, const IpEndpoint& source, const IpEndpoint& destination);
  int ResolveRoute(const std::shared_ptr<CmId>& id);
  int Listen(const std::shared_ptr<CmId>& id, int backlog);
  int SetReuseAddress(const std::shared_ptr<CmId>& id, bool reuse);
  int SetOwnFamilyOnly(const std::shared_ptr<CmId>& id, bool only);
  int SetServiceClass(const std::shared_ptr<CmId>& id, uint8_t service_class);
  int SetQp(const std::shared_ptr<CmId>& id, uint32_t qp_number);
  void ForgetQp(uint32_t qp_number);
  int Connect(const std::shared_ptr<CmId>& id, const CmParameters& parameters);
  int Accept(const std::shared_ptr<CmId>& id, const CmParameters& parameters);
  int Reject(const std::shared_ptr<CmId>& id, std::vector<std::byte> private_data);
  int Disconnect(const std::shared_ptr<CmId>& id);
  Info Describe(const CmId& id) const;
  Counters counters() const;
  void Close();

 private:
  class Handshake;
  class Outgoing;
  class Incoming;
  class Observer;
  friend class Handshake;
  friend class Outgoing;
  friend class Incoming;

  // Runs `action` on the loop, if the manager still lives then.
  template <typename Action>
  void OnLoop(Action action) {
    fabric_.loop().Post([weak = weak_from_this(), action = std::move(action)]() mutable {
      if (auto core = weak.lock()) action(*core);
    });
  }

  // With mutex_ held: whether an id other than `id` has the port of `local`. Before `id` listens only listeners are in
  // its way: that others had a claim was asked when it was bound.
  bool IsPortTaken(const CmId& id, const IpEndpoint& local, bool to_listen) const;
  // With mutex_ held: binds the id, or answers with an errno.
  int TakePort(CmId* id, const IpEndpoint& local);

  // With mutex_ held, so that a closed manager says nothing more.
  void Emit(CmEvent event);
  void Emit(CmEventType type, const std::shared_ptr<CmId>& id, int status = 0) {
    Emit({type, id, nullptr, status, {}});
  }

  // On the loop.
  Handshake* Find(uint64_t key);
  void Remove(uint64_t key);
  void OnStream(const std::weak_ptr<CmId>& weak_listener, std::unique_ptr<Stream> stream);
  // Puts the stream under the id's QP. The id must be in `expected`; then it is kConnected, or kAccepting while an RTR
  // is awaited.
  void Attach(const std::shared_ptr<CmId>& id, State expected, std::unique_ptr<Stream> stream,
              const MpaOutcome& outcome, bool initiator);
  void AwaitRtr(const std::shared_ptr<CmId>& id);
  void Fail(const std::shared_ptr<CmId>& id, State expected, Failure failure, std::vector<std::byte> private_data = {});

  // From the observer, on the loop.
  void OnFirstRecord(const std::shared_ptr<CmId>& id);
  void OnClosed(const std::shared_ptr<CmId>& id, const CloseNotice& notice);

  Instant Now() const { return fabric_.Now(); }
  void Tell(std::string_view event, std::initializer_list<TraceFact> facts) {
    Trace(nic_.trace(), Now(), name_, event, facts);
  }

  Nic& nic_;
  Fabric& fabric_;
  const CmOptions options_;
  const std::string name_;

  mutable std::mutex mutex_;
  bool closed_ = false;  // guarded by mutex_, as all below
  uint64_t next_serial_ = 1;
  std::map<uint64_t, std::weak_ptr<CmId>> ids_;    // by serial
  std::map<uint32_t, std::weak_ptr<CmId>> users_;  // by QP number
  Counters counters_;

  std::map<uint64_t, std::unique_ptr<Handshake>> handshakes_;  // the loop's own
  std::condition_variable drained_;
  bool is_drained_ = false;  // guarded by mutex_
};

// --- Handshakes: the loop's own ---

class ConnectionManager::Core::Handshake : public StreamWatcher {
 public:
  Handshake(Core& core, uint64_t key) : core_(core), key_(key) {}
  ~Handshake() override {
    if (timer_ != 0) core_.fabric_.loop().Cancel(timer_);
    if (stream_ != nullptr) stream_->SetWatcher(nullptr);
  }

  void OnStreamReady() override { Advance(); }

  // Moves on, and ends the handshake (destroying this object later) when its outcome is there.
  virtual void Advance() = 0;
  virtual void OnTimer() = 0;

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
    EventLoop& loop = core_.fabric_.loop();
    if (timer_ != 0) loop.Cancel(timer_);
    timer_ = 0;
    timer_due_ = when;
    if (!when) return;
    timer_ = loop.At(*when, [weak = core_.weak_from_this(), key = key_] {
      auto core = weak.lock();
      Handshake* handshake = core != nullptr ? core->Find(key) : nullptr;
      if (handshake == nullptr) return;
      handshake->timer_ = 0;
      handshake->timer_due_.reset();
      handshake->OnTimer();
    });
  }

  // Not at once: the stream may be calling us.
  void Finish() {
    finished_ = true;
    if (stream_ != nullptr) stream_->Arm(false, false);
    core_.OnLoop([key = key_](Core& core) { core.Remove(key); });
  }

  Core& core_;
  const uint64_t key_;
  std::unique_ptr<Stream> stream_;
  bool finished_ = false;

 private:
  EventLoop::TimerId timer_ = 0;
  std::optional<Instant> timer_due_;
};

class ConnectionManager::Core::Outgoing final : public Handshake {
 public:
  Outgoing(Core& core, std::shared_ptr<CmId> id, CmParameters parameters)
      : Handshake(core, id->serial()), id_(std::move(id)), parameters_(std::move(parameters)) {}

  void Start(const StreamOptions& options, const IpEndpoint& local, const IpEndpoint& remote) {
    attempt_ = core_.fabric_.ConnectWith(
        options, local, remote,
        [weak = core_.weak_from_this(), key = key_](Result<std::unique_ptr<Stream>, FabricError> result) {
          auto core = weak.lock();
          auto* self = core != nullptr ? static_cast<Outgoing*>(core->Find(key)) : nullptr;
          if (self != nullptr && !self->finished_) self->OnConnected(std::move(result));
        });
  }

  void Advance() override {
    if (finished_ || stream_ == nullptr) return;
    Exchange(engine_, *stream_, core_.fabric_);
    if (auto outcome = engine_.TakeOutcome()) return Conclude(std::move(*outcome));
    stream_->Arm(engine_.NextRx() > 0, !engine_.PendingTx().empty());
    SetTimer(engine_.Deadline());
  }

  void OnTimer() override {
    engine_.OnDeadline(core_.Now());
    Advance();
  }

 private:
  void OnConnected(Result<std::unique_ptr<Stream>, FabricError> result) {
    if (!result) {
      STAGECOACH_MARK("cm.stream_not_connected");
      core_.Fail(id_, State::kConnecting, FailureOf(result.error().error));
      return Finish();
    }
    Take(std::move(*result));
    const DeviceProfile& profile = core_.nic_.profile();
    MpaInitiatorOptions options;
    options.crc = profile.want_crc;
    options.ird = Depth(parameters_.responder_resources, profile.max_ird);
    options.ord = Depth(parameters_.initiator_depth, profile.max_ord);
    options.peer_to_peer = core_.options_.peer_to_peer;
    options.extensions = profile.extensions;
    options.timeout = core_.options_.reply_timeout;
    const auto started = engine_.Start(options, parameters_.private_data, core_.Now());
    STAGECOACH_CHECK(started.has_value());
    Advance();
  }

  void Conclude(Result<MpaOutcome, MpaFault> outcome) {
    if (!outcome) {
      core_.Tell("handshake.failed", {{"id", key_}, {"why", ToString(outcome.error())}});
      core_.Fail(id_, State::kConnecting, FailureOf(ErrnoOf(outcome.error())));
    } else if (!outcome->accepted) {
      outcome->private_data.resize(std::min(outcome->private_data.size(), kReceivedPrivateDataMax));
      core_.Fail(id_, State::kConnecting, {CmEventType::kRejected, -ECONNREFUSED}, std::move(outcome->private_data));
    } else {
      core_.Attach(id_, State::kConnecting, ReleaseStream(), *outcome, true);
    }
    Finish();
  }

  const std::shared_ptr<CmId> id_;
  const CmParameters parameters_;
  std::unique_ptr<ConnectAttempt> attempt_;
  MpaInitiator engine_;
};

class ConnectionManager::Core::Incoming final : public Handshake {
 public:
  Incoming(Core& core, uint64_t key, std::weak_ptr<CmId> listener, std::unique_ptr<Stream> stream)
      : Handshake(core, key),
        listener_(std::move(listener)),
        engine_({.timeout = core.options_.request_timeout}, core.Now()) {
    Take(std::move(stream));
  }
  ~Incoming() override { LeaveHalfOpen(); }

  // Whether its request has not been answered or turned into an event yet.
  bool IsStrangerOf(const CmId* listener) const { return half_open_ && listener_.lock().get() == listener; }

  void Accept(const CmParameters& parameters) {
    if (finished_) return;
    const DeviceProfile& profile = core_.nic_.profile();
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
    Exchange(engine_, *stream_, core_.fabric_);
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
      last_words_due_ = core_.Now() + core_.options_.request_timeout;
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
    std::lock_guard lock(core_.mutex_);
    --core_.counters_.half_open;
    if (auto listener = listener_.lock()) --listener->half_open_;
  }

  void OnRequest(const MpaRequest& request) {
    LeaveHalfOpen();
    const bool fits = request.private_data.size() <= kReceivedPrivateDataMax;
    {
      std::lock_guard lock(core_.mutex_);
      auto listener = listener_.lock();
      const bool wanted = listener != nullptr && listener->state_ == State::kListening && !core_.closed_;
      if (wanted && fits && listener->unanswered_ < listener->backlog_) {
        child_ = std::make_shared<CmId>(listener->channel_, key_);
        child_->state_ = State::kRequested;
        child_->local_ = stream_->local();
        child_->remote_ = stream_->remote();
        child_->listener_ = listener;
        core_.ids_[key_] = child_;
        ++listener->unanswered_;
        const DeviceProfile& profile = core_.nic_.profile();
        // Of a peer that does not tell (revision 1, or "my ULP looks after it") we believe what we can do ourselves.
        const bool told = request.enhanced;
        const auto view = [told](uint16_t of_peer, uint32_t own) {
          return Narrow(told && of_peer != wire::kMpaDepthUnspecified ? std::min<uint32_t>(of_peer, own) : own);
        };
        CmEvent event{CmEventType::kConnectRequest, child_, listener, 0, {}};
        event.parameters.private_data = request.private_data;
        event.parameters.responder_resources = view(request.ord, profile.max_ird);
        event.parameters.initiator_depth = view(request.ird, profile.max_ord);
        core_.Emit(std::move(event));
        return;
      }
      ++core_.counters_.refused_streams;
      if (!wanted) {
        STAGECOACH_MARK("cm.listener_closes_before_the_request");
      } else if (!fits) {
        STAGECOACH_MARK("cm.request_with_too_much_private_data");
      } else {
        STAGECOACH_MARK("cm.backlog_full");
      }
    }
    core_.Tell("request.refused", {{"id", key_}});
    const auto rejected = engine_.Reject({}, core_.Now());
    STAGECOACH_CHECK(rejected.has_value());
    Exchange(engine_, *stream_, core_.fabric_);
  }

  void Conclude() {
    const Result<MpaOutcome, MpaFault>& outcome = *outcome_;
    if (outcome && outcome->accepted) {
      core_.Attach(child_, State::kAccepting, ReleaseStream(), *outcome, false);
      return Finish();
    }
    if (!outcome) {
      core_.Tell("handshake.failed", {{"id", key_}, {"why", ToString(outcome.error())}});
      std::lock_guard lock(core_.mutex_);
      ++core_.counters_.failed_handshakes;
    }
    if (child_ != nullptr && !outcome) STAGECOACH_MARK("cm.handshake_fails_after_the_request_was_told");
    if (child_ != nullptr)
      core_.Fail(child_, State::kAccepting,
                 {CmEventType::kConnectError, -(outcome ? ECONNABORTED : ErrnoOf(outcome.error()))});
    // The stream is closed with the handshake; what was said still reaches the peer.
    stream_->Shutdown();
    Finish();
  }

  std::weak_ptr<CmId> listener_;
  std::shared_ptr<CmId> child_;  // once its request is an event
  bool half_open_ = true;        // counted as such
  MpaResponder engine_;
  std::optional<Result<MpaOutcome, MpaFault>> outcome_;
  std::optional<Instant> last_words_due_;
  bool given_up_ = false;
};

// Owns neither side, and may be called when either has gone: an id that no longer waits for it is in another state.
class ConnectionManager::Core::Observer final : public ConnectionObserver {
 public:
  Observer(std::weak_ptr<Core> core, std::weak_ptr<CmId> id) : core_(std::move(core)), id_(std::move(id)) {}
  void OnFirstRecord() override {
    auto core = core_.lock();
    auto id = id_.lock();
    if (core != nullptr && id != nullptr) core->OnFirstRecord(id);
  }
  void OnClosed(const CloseNotice& notice) override {
    auto core = core_.lock();
    auto id = id_.lock();
    if (core != nullptr && id != nullptr) core->OnClosed(id, notice);
  }

 private:
  const std::weak_ptr<Core> core_;
  const std::weak_ptr<CmId> id_;
};

// --- Ids ---

std::shared_ptr<CmId> ConnectionManager::Core::CreateId(std::shared_ptr<CmChannel> channel) {
  std::lock_guard lock(mutex_);
  auto id = std::make_shared<CmId>(std::move(channel), next_serial_++);
  ids_[id->serial()] = id;
  return id;
}

void ConnectionManager::Core::Emit(CmEvent event) {
  if (closed_) return;
  Tell("event",
       {{"id", event.id->serial()}, {"type", ToString(event.type)}, {"error", static_cast<uint64_t>(-event.status)}});
  const std::shared_ptr<CmChannel> channel = event.id->channel_;
  channel->Push(std::move(event));
}

ConnectionManager::Info ConnectionManager::Core::Describe(const CmId& id) const {
  std::lock_guard lock(mutex_);
  return {id.state_, id.local_, id.remote_};
}

ConnectionManager::Counters ConnectionManager::Core::counters() const {
  std::lock_guard lock(mutex_);
  Counters counters = counters_;
  counters.ids = ids_.size();
  return counters;
}

bool ConnectionManager::Core::IsPortTaken(const CmId& id, const IpEndpoint& local, bool to_listen) const {
  if (local.port == 0) return false;
  for (const auto& [serial, weak] : ids_) {
    const auto other = weak.lock();
    if (other == nullptr || other.get() == &id || other->port_ == nullptr || other->local_.port != local.port) continue;
    if (!Overlap(local, id.stream_options_.own_family_only, other->local_, other->stream_options_.own_family_only))
      continue;
    const bool listens = other->state_ == State::kListening;
    if (listens || !(to_listen || (id.reuse_address_ && other->reuse_address_))) return true;
  }
  return false;
}

int ConnectionManager::Core::Bind(const std::shared_ptr<CmId>& id, const IpEndpoint& wanted) {
  if (wanted.family == IpEndpoint::Family::kNone) return EAFNOSUPPORT;
  const IpEndpoint local = WithoutIdleScope(wanted);
  if (LacksScope(local)) return EINVAL;
  if (!IsLocal(fabric_, local)) return EADDRNOTAVAIL;
  std::lock_guard lock(mutex_);
  if (id->state_ != State::kIdle) return EINVAL;
  if (const int error = TakePort(id.get(), local); error != 0) return error;
  id->state_ = State::kBound;
  return 0;
}

int ConnectionManager::Core::TakePort(CmId* id, const IpEndpoint& local) {
  if (IsPortTaken(*id, local, false)) return EADDRINUSE;
  auto held = fabric_.HoldPort(id->stream_options_, local);
  if (!held) return held.error().error;
  id->port_ = std::move(*held);
  id->local_ = id->port_->local();
  return 0;
}

int ConnectionManager::Core::ResolveAddress(const std::shared_ptr<CmId>& id, const IpEndpoint& from,
                                            const IpEndpoint& to) {
  if (to.family == IpEndpoint::Family::kNone) return EAFNOSUPPORT;
  const IpEndpoint source = WithoutIdleScope(from);
  const IpEndpoint destination = WithoutIdleScope(to);
  if (LacksScope(source) || LacksScope(destination)) return EINVAL;
  if (!source.IsUnspecified() && !IsLocal(fabric_, source)) return EADDRNOTAVAIL;
  const std::optional<IpEndpoint> route = fabric_.RouteTo(destination);
  std::lock_guard lock(mutex_);
  if (id->state_ != State::kIdle && id->state_ != State::kBound) return EINVAL;
  const IpEndpoint& local = id->state_ == State::kIdle ? source : id->local_;
  if (local.family != IpEndpoint::Family::kNone && local.family != destination.family) return EINVAL;
  if (id->state_ == State::kIdle) {
    // A stream finds a port by itself when it connects; many may then have the same one, towards different peers.
    if (source.port == 0) {
      id->local_ = source;
      id->local_.family = destination.family;
    } else if (const int error = TakePort(id.get(), source); error != 0) {
      return error;
    }
  }
  id->remote_ = destination;
  if (!route || destination.IsUnspecified()) {
    id->state_ = State::kBound;
    Emit(CmEventType::kAddressError, id, -ENETUNREACH);
    return 0;
  }
  if (id->local_.IsUnspecified()) id->local_ = route->WithPort(id->local_.port);
  id->state_ = State::kAddressResolved;
  Emit(CmEventType::kAddressResolved, id);
  return 0;
}

int ConnectionManager::Core::SetReuseAddress(const std::shared_ptr<CmId>& id, bool reuse) {
  std::lock_guard lock(mutex_);
  // Linux lets a bound id still say so, but not take it back.
  const bool possible = id->state_ == State::kIdle || (reuse && id->state_ != State::kListening);
  if (!possible) return EINVAL;
  id->reuse_address_ = reuse;
  return 0;
}

int ConnectionManager::Core::SetOwnFamilyOnly(const std::shared_ptr<CmId>& id, bool only) {
  std::lock_guard lock(mutex_);
  if (id->state_ != State::kIdle && id->state_ != State::kBound) return EINVAL;
  id->stream_options_.own_family_only = only;
  return 0;
}

int ConnectionManager::Core::SetServiceClass(const std::shared_ptr<CmId>& id, uint8_t service_class) {
  std::lock_guard lock(mutex_);
  id->stream_options_.service_class = service_class;
  return 0;
}

int ConnectionManager::Core::ResolveRoute(const std::shared_ptr<CmId>& id) {
  std::lock_guard lock(mutex_);
  if (id->state_ != State::kAddressResolved) return EINVAL;
  id->state_ = State::kRouteResolved;
  Emit(CmEventType::kRouteResolved, id);
  return 0;
}

int ConnectionManager::Core::Listen(const std::shared_ptr<CmId>& id, int backlog) {
  IpEndpoint local;
  StreamOptions options;
  {
    std::lock_guard lock(mutex_);
    if (id->state_ == State::kIdle) {
      // As Linux does: any address, any port.
      if (const int error = TakePort(id.get(), *IpEndpoint::Parse("0.0.0.0", 0)); error != 0) return error;
    } else if (id->state_ != State::kBound) {
      return EINVAL;
    }
    if (IsPortTaken(*id, id->local_, true)) return EADDRINUSE;
    local = id->local_;
    options = id->stream_options_;
    // Before the fabric hands over the first stream.
    id->state_ = State::kListening;
    id->backlog_ = backlog <= 0 ? kBacklogMax : std::min(static_cast<uint32_t>(backlog), kBacklogMax);
  }
  auto listener =
      fabric_.ListenWith(options, local, kStreamBacklog,
                         [weak = weak_from_this(), weak_id = std::weak_ptr<CmId>(id)](std::unique_ptr<Stream> stream) {
                           if (auto core = weak.lock()) core->OnStream(weak_id, std::move(stream));
                         });
  std::lock_guard lock(mutex_);
  if (!listener) {
    id->state_ = State::kBound;
    return listener.error().error;
  }
  id->local_ = (*listener)->local();
  id->acceptor_ = std::move(*listener);
  return 0;
}

int ConnectionManager::Core::SetQp(const std::shared_ptr<CmId>& id, uint32_t qp_number) {
  std::lock_guard lock(mutex_);
  if (id->state_ == State::kListening || id->state_ == State::kConnecting || id->state_ == State::kAccepting ||
      id->state_ == State::kConnected || id->state_ == State::kDestroyed) {
    return EINVAL;
  }
  if (id->qp_number_ != 0) users_.erase(id->qp_number_);
  id->qp_number_ = qp_number;
  if (qp_number != 0) users_[qp_number] = id;
  return 0;
}

void ConnectionManager::Core::ForgetQp(uint32_t qp_number) {
  std::lock_guard lock(mutex_);
  const auto user = users_.find(qp_number);
  if (user == users_.end()) return;
  auto id = user->second.lock();
  users_.erase(user);
  if (id == nullptr) return;
  id->qp_number_ = 0;
  id->attached_ = false;
  if (id->state_ == State::kConnected) {
    STAGECOACH_MARK("cm.qp_destroyed_while_connected");
    id->state_ = State::kClosed;
    Emit(CmEventType::kDisconnected, id);
  } else if (id->state_ == State::kConnecting || id->state_ == State::kAccepting) {
    STAGECOACH_MARK("cm.qp_destroyed_amidst_its_handshake");
    id->state_ = State::kClosed;
    Emit(CmEventType::kConnectError, id, -ECONNABORTED);
    OnLoop([key = id->serial()](Core& core) { core.Remove(key); });
  }
}

int ConnectionManager::Core::Connect(const std::shared_ptr<CmId>& id, const CmParameters& parameters) {
  if (parameters.private_data.size() > kCmPrivateDataMax) return EINVAL;
  std::lock_guard lock(mutex_);
  if (closed_) return ENODEV;
  if (id->state_ != State::kRouteResolved || id->qp_number_ == 0) return EINVAL;
  id->state_ = State::kConnecting;
  OnLoop([id, parameters, options = id->stream_options_, local = id->local_, remote = id->remote_](Core& core) {
    auto outgoing = std::make_unique<Outgoing>(core, id, parameters);
    Outgoing* started = outgoing.get();
    core.handshakes_[id->serial()] = std::move(outgoing);
    started->Start(options, local, remote);
  });
  return 0;
}

int ConnectionManager::Core::Accept(const std::shared_ptr<CmId>& id, const CmParameters& parameters) {
  if (parameters.private_data.size() > kCmPrivateDataMax) return EINVAL;
  std::lock_guard lock(mutex_);
  if (closed_) return ENODEV;
  if (id->state_ != State::kRequested || id->qp_number_ == 0) return EINVAL;
  id->state_ = State::kAccepting;
  if (auto listener = id->listener_.lock()) --listener->unanswered_;
  OnLoop([key = id->serial(), parameters](Core& core) {
    if (auto* incoming = static_cast<Incoming*>(core.Find(key))) incoming->Accept(parameters);
  });
  return 0;
}

int ConnectionManager::Core::Reject(const std::shared_ptr<CmId>& id, std::vector<std::byte> private_data) {
  if (private_data.size() > kCmPrivateDataMax) return EINVAL;
  std::lock_guard lock(mutex_);
  if (id->state_ != State::kRequested) return EINVAL;
  id->state_ = State::kClosed;
  if (auto listener = id->listener_.lock()) --listener->unanswered_;
  OnLoop([key = id->serial(), private_data = std::move(private_data)](Core& core) {
    if (auto* incoming = static_cast<Incoming*>(core.Find(key))) incoming->Reject(private_data);
  });
  return 0;
}

int ConnectionManager::Core::Disconnect(const std::shared_ptr<CmId>& id) {
  uint32_t qp_number = 0;
  {
    std::lock_guard lock(mutex_);
    if (id->state_ == State::kClosed) {
      STAGECOACH_MARK("cm.both_ends_disconnect");
      return 0;
    }
    // Accepting counts once the stream is the QP's: its RTR may never come.
    if (id->state_ != State::kConnected && !(id->state_ == State::kAccepting && id->attached_)) return EINVAL;
    qp_number = id->qp_number_;
  }
  return nic_.Disconnect(qp_number) == 0 ? 0 : EINVAL;
}

void ConnectionManager::Core::Destroy(const std::shared_ptr<CmId>& id) {
  std::unique_ptr<Listener> acceptor;
  bool attached = false;
  uint32_t qp_number = 0;
  State before = State::kIdle;
  std::shared_ptr<CmChannel> channel;
  std::unique_ptr<PortHold> port;
  {
    std::lock_guard lock(mutex_);
    before = std::exchange(id->state_, State::kDestroyed);
    channel = id->channel_;
    port = std::move(id->port_);
    acceptor = std::move(id->acceptor_);
    attached = std::exchange(id->attached_, false);
    qp_number = std::exchange(id->qp_number_, 0);
    if (qp_number != 0) users_.erase(qp_number);
    ids_.erase(id->serial());
    if (before == State::kRequested) {
      if (auto listener = id->listener_.lock()) --listener->unanswered_;
    }
  }
  // Waits for a call that may want the lock.
  acceptor.reset();
  port.reset();
  if (attached) nic_.Disconnect(qp_number);
  if (before == State::kRequested) STAGECOACH_MARK("cm.request_dropped_unanswered");
  if (before == State::kConnecting) STAGECOACH_MARK("cm.id_destroyed_while_connecting");
  if (before == State::kAccepting) STAGECOACH_MARK("cm.id_destroyed_while_accepting");
  if (before == State::kListening) {
    OnLoop([listener = id.get(), keep = id](Core& core) {
      for (auto& [key, handshake] : core.handshakes_) {
        auto* incoming = dynamic_cast<Incoming*>(handshake.get());
        if (incoming == nullptr || !incoming->IsStrangerOf(listener)) continue;
        STAGECOACH_MARK("cm.listener_destroyed_amidst_handshakes");
        core.OnLoop([key = key](Core& later) { later.Remove(key); });
      }
    });
  } else if (before == State::kRequested) {
    OnLoop([key = id->serial()](Core& core) {
      if (auto* incoming = static_cast<Incoming*>(core.Find(key))) incoming->Reject({});
    });
  } else if (before == State::kConnecting || before == State::kAccepting) {
    OnLoop([key = id->serial()](Core& core) { core.Remove(key); });
  }
  for (const CmEvent& event : channel->Forget(id.get())) {
    if (event.listener != id) continue;
    STAGECOACH_MARK("cm.listener_destroyed_with_requests_undelivered");
    Destroy(event.id);
  }
  id->account().AwaitAcknowledged(fabric_);
}

void ConnectionManager::Core::Migrate(const std::shared_ptr<CmId>& id, std::shared_ptr<CmChannel> channel) {
  {
    // Nothing is emitted meanwhile, so that the order of events stays.
    std::lock_guard lock(mutex_);
    const std::shared_ptr<CmChannel> before = std::exchange(id->channel_, channel);
    if (before != channel) {
      for (CmEvent& event : before->Forget(id.get())) {
        event.id->channel_ = channel;
        channel->Push(std::move(event));
      }
    }
  }
  id->account().AwaitAcknowledged(fabric_);
}

void ConnectionManager::Core::Close() {
  std::vector<std::shared_ptr<CmId>> left;
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    for (auto& [serial, weak] : ids_) {
      if (auto id = weak.lock()) left.push_back(std::move(id));
    }
  }
  for (const auto& id : left) {
    std::unique_ptr<Listener> acceptor;
    std::unique_ptr<PortHold> port;
    std::shared_ptr<CmChannel> channel;
    {
      std::lock_guard lock(mutex_);
      acceptor = std::move(id->acceptor_);
      port = std::move(id->port_);
      channel = id->channel_;
    }
    // An event keeps its id and the id its channel: nobody will come for them.
    channel->Forget(id.get());
  }
  fabric_.loop().Post([self = shared_from_this()] {
    self->handshakes_.clear();
    std::lock_guard lock(self->mutex_);
    self->is_drained_ = true;
    self->drained_.notify_all();
  });
  std::unique_lock lock(mutex_);
  fabric_.Wait(lock, drained_, [this] { return is_drained_; });
}

// --- On the loop ---

ConnectionManager::Core::Handshake* ConnectionManager::Core::Find(uint64_t key) {
  const auto found = handshakes_.find(key);
  return found == handshakes_.end() ? nullptr : found->second.get();
}

void ConnectionManager::Core::Remove(uint64_t key) {
  handshakes_.erase(key);
}

void ConnectionManager::Core::OnStream(const std::weak_ptr<CmId>& weak_listener, std::unique_ptr<Stream> stream) {
  uint64_t key = 0;
  {
    std::lock_guard lock(mutex_);
    auto listener = weak_listener.lock();
    if (closed_ || listener == nullptr || listener->state_ != State::kListening) {
      STAGECOACH_MARK("cm.listener_closes_before_the_stream");
      ++counters_.refused_streams;
    } else if (listener->half_open_ >= options_.half_open_limit) {
      STAGECOACH_MARK("cm.half_open_limit_reached");
      ++counters_.refused_streams;
    } else {
      ++counters_.accepted_streams;
      ++counters_.half_open;
      ++listener->half_open_;
      key = next_serial_++;
    }
  }
  if (key == 0) {
    Tell("stream.refused", {});
    stream->Abort();
    return;
  }
  auto incoming = std::make_unique<Incoming>(*this, key, weak_listener, std::move(stream));
  Incoming* started = incoming.get();
  handshakes_[key] = std::move(incoming);
  started->Advance();
}

void ConnectionManager::Core::Fail(const std::shared_ptr<CmId>& id, State expected, Failure failure,
                                   std::vector<std::byte> private_data) {
  std::lock_guard lock(mutex_);
  if (id->state_ != expected) return;
  id->state_ = State::kClosed;
  CmEvent event{failure.type, id, nullptr, failure.status, {}};
  event.parameters.private_data = std::move(private_data);
  Emit(std::move(event));
}

void ConnectionManager::Core::Attach(const std::shared_ptr<CmId>& id, State expected, std::unique_ptr<Stream> stream,
                                     const MpaOutcome& outcome, bool initiator) {
  uint32_t qp_number = 0;
  {
    std::lock_guard lock(mutex_);
    if (id->state_ != expected) {
      STAGECOACH_MARK("cm.id_gone_before_its_connection");
      return stream->Abort();
    }
    qp_number = id->qp_number_;
    id->attached_ = true;
    id->local_ = stream->local();
    id->remote_ = stream->remote();
  }
  ConnectionSetup setup;
  MpaLlpOptions llp;
  llp.crc = outcome.crc;
  llp.insert_markers = outcome.send_markers;
  setup.llp = std::make_unique<MpaLlp>(std::move(stream), llp);
  setup.initiator = initiator;
  setup.ird = outcome.ird;
  setup.ord = outcome.ord;
  setup.extensions = outcome.extensions;
  setup.rtr = ToSetup(outcome.rtr);
  setup.observer = std::make_shared<Observer>(weak_from_this(), id);
  // The observer is called on this thread only, so not before we are done here.
  const int error = nic_.AttachConnection(qp_number, std::move(setup));
  {
    std::lock_guard lock(mutex_);
    if (id->state_ == expected) {
      if (error != 0) {
        STAGECOACH_MARK("cm.qp_does_not_take_the_connection");
        id->attached_ = false;
        id->state_ = State::kClosed;
        Emit(CmEventType::kConnectError, id, -error);
        return;
      }
      Tell("connected", {{"id", id->serial()},
                         {"qp", uint64_t{qp_number}},
                         {"ird", uint64_t{outcome.ird}},
                         {"ord", uint64_t{outcome.ord}},
                         {"crc", uint64_t{outcome.crc}},
                         {"rtr", ToString(outcome.rtr)}});
      if (initiator || outcome.rtr == MpaRtr::kNone) {
        id->state_ = State::kConnected;
        CmEvent event{CmEventType::kEstablished, id, nullptr, 0, {}};
        event.parameters.private_data = outcome.private_data;
        event.parameters.private_data.resize(std::min(outcome.private_data.size(), kReceivedPrivateDataMax));
        event.parameters.responder_resources = Narrow(outcome.ird);
        event.parameters.initiator_depth = Narrow(outcome.ord);
        Emit(std::move(event));
      } else {
        AwaitRtr(id);
      }
      return;
    }
  }
  STAGECOACH_MARK("cm.id_gone_while_its_connection_is_attached");
  // The id went away meanwhile, without knowing of the connection.
  if (error == 0) nic_.Disconnect(qp_number);
}

// An initiator that agreed to send an RTR and does not is given up like one that never made its request.
void ConnectionManager::Core::AwaitRtr(const std::shared_ptr<CmId>& id) {
  fabric_.loop().At(Now() + options_.request_timeout, [weak = weak_from_this(), weak_id = std::weak_ptr<CmId>(id)] {
    auto core = weak.lock();
    auto late = weak_id.lock();
    if (core == nullptr || late == nullptr) return;
    {
      std::lock_guard lock(core->mutex_);
      if (core->closed_ || late->state_ != State::kAccepting) return;
    }
    STAGECOACH_MARK("cm.rtr_does_not_come_in_time");
    core->Disconnect(late);
  });
}

void ConnectionManager::Core::OnFirstRecord(const std::shared_ptr<CmId>& id) {
  std::lock_guard lock(mutex_);
  if (id->state_ != State::kAccepting) return;
  id->state_ = State::kConnected;
  Emit(CmEventType::kEstablished, id);
}

void ConnectionManager::Core::OnClosed(const std::shared_ptr<CmId>& id, const CloseNotice& notice) {
  std::lock_guard lock(mutex_);
  id->attached_ = false;
  int status = 0;
  if (notice.reason == CloseReason::kStreamFailed) status = -(notice.error != 0 ? notice.error : ECONNRESET);
  if (notice.reason == CloseReason::kPeerFault || notice.reason == CloseReason::kLocalFault) status = -ECONNRESET;
  // A Terminate of ours that is not about ourselves (RFC 5040 section 4.8: layer 0, type 0) is about what the peer
  // sent.
  const bool local = !notice.fault || (notice.fault->layer == 0 && notice.fault->error_type == 0);
  if (notice.reason == CloseReason::kLocalFault && !local) status = -EPROTO;
  if (id->state_ == State::kConnected) {
    id->state_ = State::kClosed;
    Emit(CmEventType::kDisconnected, id, status);
  } else if (id->state_ == State::kAccepting) {
    STAGECOACH_MARK("cm.closed_before_the_rtr");
    id->state_ = State::kClosed;
    Emit(CmEventType::kConnectError, id, status != 0 ? status : -ECONNRESET);
  }
}

// --- ConnectionManager ---

ConnectionManager::ConnectionManager(Nic& nic, CmOptions options)
    : nic_(nic), core_(std::make_shared<Core>(nic, options)) {}

ConnectionManager::~ConnectionManager() {
  core_->Close();
}

std::shared_ptr<CmChannel> ConnectionManager::CreateChannel() {
  return std::make_shared<CmChannel>(nic_.fabric());
}

std::shared_ptr<CmId> ConnectionManager::CreateId(std::shared_ptr<CmChannel> channel) {
  return core_->CreateId(std::move(channel));
}

void ConnectionManager::Destroy(const std::shared_ptr<CmId>& id) {
  core_->Destroy(id);
}

void ConnectionManager::Migrate(const std::shared_ptr<CmId>& id, std::shared_ptr<CmChannel> channel) {
  core_->Migrate(id, std::move(channel));
}

int ConnectionManager::Bind(const std::shared_ptr<CmId>& id, const IpEndpoint& local) {
  return core_->Bind(id, local);
}

int ConnectionManager::ResolveAddress(const std::shared_ptr<CmId>& id, const IpEndpoint& source,
                                      const IpEndpoint& destination) {
  return core_->ResolveAddress(id, source, destination);
}

int ConnectionManager::ResolveRoute(const std::shared_ptr<CmId>& id) {
  return core_->ResolveRoute(id);
}

int ConnectionManager::Listen(const std::shared_ptr<CmId>& id, int backlog) {
  return core_->Listen(id, backlog);
}

int ConnectionManager::SetReuseAddress(const std::shared_ptr<CmId>& id, bool reuse) {
  return core_->SetReuseAddress(id, reuse);
}

int ConnectionManager::SetOwnFamilyOnly(const std::shared_ptr<CmId>& id, bool only) {
  return core_->SetOwnFamilyOnly(id, only);
}

int ConnectionManager::SetServiceClass(const std::shared_ptr<CmId>& id, uint8_t service_class) {
  return core_->SetServiceClass(id, service_class);
}

int ConnectionManager::SetQp(const std::shared_ptr<CmId>& id, uint32_t qp_number) {
  return core_->SetQp(id, qp_number);
}

void ConnectionManager::ForgetQp(uint32_t qp_number) {
  core_->ForgetQp(qp_number);
}

int ConnectionManager::Connect(const std::shared_ptr<CmId>& id, const CmParameters& parameters) {
  return core_->Connect(id, parameters);
}

int ConnectionManager::Accept(const std::shared_ptr<CmId>& id, const CmParameters& parameters) {
  return core_->Accept(id, parameters);
}

int ConnectionManager::Reject(const std::shared_ptr<CmId>& id, std::vector<std::byte> private_data) {
  return core_->Reject(id, std::move(private_data));
}

int ConnectionManager::Disconnect(const std::shared_ptr<CmId>& id) {
  return core_->Disconnect(id);
}

ConnectionManager::Info ConnectionManager::Describe(const CmId& id) const {
  return core_->Describe(id);
}

ConnectionManager::Counters ConnectionManager::counters() const {
  return core_->counters();
}

}  // namespace stagecoach::emu
