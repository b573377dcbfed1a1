#include "emu/cm/cm_core.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <new>
#include <optional>

#include "base/insist.h"
#include "base/mark.h"
#include "base/mutant.h"
#include "base/undoing.h"

namespace stagecoach::emu {
namespace {

using State = CmId::State;

constexpr uint8_t kAckTimeoutMax = 31;

bool SameAddress(const IpEndpoint& a, const IpEndpoint& b) {
  return a.WithPort(0) == b.WithPort(0);
}

bool IsLocal(Fabric& fabric, const IpEndpoint& address) {
  if (address.IsUnspecified() || address.IsLoopback()) return true;
  const std::vector<LocalAddress> all = fabric.LocalAddresses();
  return std::any_of(all.begin(), all.end(),
                     [&](const LocalAddress& own) { return SameAddress(own.address, address); });
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

}  // namespace

CmCore::CmCore(Nic& nic, const CmOptions& options)
    : nic_(nic), fabric_(nic.fabric()), options_(options), name_(nic.name() + "/cm") {}

std::shared_ptr<CmId> CmCore::CreateId(std::shared_ptr<CmChannel> channel, wire::CmPortSpace port_space) {
  std::lock_guard lock(mutex_);
  auto id = std::make_shared<CmId>(std::move(channel), next_serial_++, port_space);
  ids_[id->serial()] = id;
  return id;
}

void CmCore::Emit(CmEvent event) {
  if (closed_) return;
  Tell("event", {{"id", event.id->serial()},
                 {"type", ToString(event.type)},
                 {"error", static_cast<uint64_t>(std::abs(event.status))}});
  const std::shared_ptr<CmChannel> channel = event.id->channel_;
  channel->Push(std::move(event));
}

ConnectionManager::Info CmCore::Describe(const CmId& id) const {
  std::lock_guard lock(mutex_);
  return {id.state_, id.local_, id.remote_};
}

ConnectionManager::Counters CmCore::counters() const {
  std::lock_guard lock(mutex_);
  ConnectionManager::Counters counters = counters_;
  counters.ids = ids_.size();
  return counters;
}

bool CmCore::IsPortTaken(const CmId& id, const IpEndpoint& local, bool to_listen) const {
  if (local.port == 0) return false;
  for (const auto& [serial, weak] : ids_) {
    const auto other = weak.lock();
    if (other == nullptr || other.get() == &id || other->port_ == nullptr || other->local_.port != local.port ||
        other->port_space_ != id.port_space_) {
      continue;
    }
    if (!Overlap(local, id.stream_options_.own_family_only, other->local_, other->stream_options_.own_family_only))
      continue;
    const bool listens = other->state_ == State::kListening;
    if (listens || !(to_listen || (id.reuse_address_ && other->reuse_address_))) return true;
  }
  return false;
}

// What an id may not do in its state is told before what is wrong with an address, as Linux does. The system is asked
// of addresses without the lock, so that the state is looked at again afterwards.
bool CmCore::IsIn(const CmId& id, std::initializer_list<State> states) const {
  std::lock_guard lock(mutex_);
  return std::find(states.begin(), states.end(), id.state_) != states.end();
}

int CmCore::Bind(const std::shared_ptr<CmId>& id, const IpEndpoint& wanted) {
  if (wanted.family == IpEndpoint::Family::kNone) return EAFNOSUPPORT;
  if (!IsIn(*id, {State::kIdle})) return EINVAL;
  const IpEndpoint local = WithoutIdleScope(wanted);
  if (LacksScope(local)) return EINVAL;
  if (!IsLocal(fabric_, local)) return EADDRNOTAVAIL;
  if (const int error = transport_->WhyNotOwn(local); error != 0) return error;
  std::lock_guard lock(mutex_);
  if (id->state_ != State::kIdle) return EINVAL;
  if (const int error = TakePort(id.get(), local); error != 0) return error;
  id->state_ = State::kBound;
  return 0;
}

int CmCore::TakePort(CmId* id, const IpEndpoint& local) {
  if (IsPortTaken(*id, local, false)) return EADDRINUSE;
  auto held = transport_->HoldPort(*id, local);
  if (!held) return held.error();
  id->port_ = std::move(*held);
  id->local_ = id->port_->local();
  return 0;
}

int CmCore::ResolveAddress(const std::shared_ptr<CmId>& id, const IpEndpoint& from, const IpEndpoint& to) {
  if (to.family == IpEndpoint::Family::kNone) return EAFNOSUPPORT;
  if (!IsIn(*id, {State::kIdle, State::kBound})) return EINVAL;
  const IpEndpoint source = WithoutIdleScope(from);
  const IpEndpoint destination = WithoutIdleScope(to);
  if (LacksScope(source) || LacksScope(destination)) return EINVAL;
  if (!source.IsUnspecified() && !IsLocal(fabric_, source)) return EADDRNOTAVAIL;
  if (const int error = transport_->WhyNotOwn(source); error != 0) return error;
  const std::optional<IpEndpoint> route = fabric_.RouteTo(destination);
  const int no_way_from_there = route ? transport_->WhyNotOwn(*route) : 0;
  // Of other hosts we cannot know it.
  const bool is_own = route && IsLocal(fabric_, destination);
  const int no_way_there = is_own ? transport_->WhyNotOwn(destination) : 0;
  std::lock_guard lock(mutex_);
  if (id->state_ != State::kIdle && id->state_ != State::kBound) return EINVAL;
  const IpEndpoint& local = id->state_ == State::kIdle ? source : id->local_;
  if (local.family != IpEndpoint::Family::kNone && local.family != destination.family) return EINVAL;
  if (id->state_ == State::kIdle) {
    IpEndpoint own = source;
    own.family = destination.family;
    if (source.port == 0 && !transport_->ConnectsFromAPort()) {
      id->local_ = own;
    } else if (const int error = TakePort(id.get(), own); error != 0) {
      return error;
    }
  }
  id->remote_ = destination;
  const bool chooses = id->local_.IsUnspecified();
  const int from_there = chooses ? no_way_from_there : 0;
  const int error = !route || destination.IsUnspecified() ? ENETUNREACH : from_there != 0 ? from_there : no_way_there;
  if (error != 0) {
    Emit(CmEventType::kAddressError, id, -error);
    id->state_ = State::kBound;
    return 0;
  }
  if (chooses) id->local_ = route->WithPort(id->local_.port);
  Emit(CmEventType::kAddressResolved, id);
  id->state_ = State::kAddressResolved;
  return 0;
}

int CmCore::SetReuseAddress(const std::shared_ptr<CmId>& id, bool reuse) {
  std::lock_guard lock(mutex_);
  // Linux lets a bound id still say so, but not take it back.
  const bool possible = id->state_ == State::kIdle || (reuse && id->state_ != State::kListening);
  if (!possible) return EINVAL;
  id->reuse_address_ = reuse;
  return 0;
}

int CmCore::SetOwnFamilyOnly(const std::shared_ptr<CmId>& id, bool only) {
  std::lock_guard lock(mutex_);
  if (id->state_ != State::kIdle && id->state_ != State::kBound) return EINVAL;
  id->stream_options_.own_family_only = only;
  return 0;
}

int CmCore::SetServiceClass(const std::shared_ptr<CmId>& id, uint8_t service_class) {
  std::lock_guard lock(mutex_);
  id->stream_options_.service_class = service_class;
  return 0;
}

int CmCore::ResolveRoute(const std::shared_ptr<CmId>& id) {
  std::lock_guard lock(mutex_);
  if (id->state_ != State::kAddressResolved) return EINVAL;
  Emit(CmEventType::kRouteResolved, id);
  id->state_ = State::kRouteResolved;
  return 0;
}

int CmCore::Listen(const std::shared_ptr<CmId>& id, int backlog) {
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
    id->backlog_ = backlog <= 0 ? options_.backlog_max : std::min(static_cast<uint32_t>(backlog), options_.backlog_max);
  }
  Undoing bound_only([&] {
    std::lock_guard lock(mutex_);
    id->state_ = State::kBound;
  });
  auto listener = transport_->Listen(id, local, options);
  bound_only.Done();
  std::lock_guard lock(mutex_);
  if (!listener) {
    id->state_ = State::kBound;
    return listener.error();
  }
  id->local_ = (*listener)->local();
  id->acceptor_ = std::move(*listener);
  return 0;
}

int CmCore::SetAckTimeout(const std::shared_ptr<CmId>& id, uint8_t timeout) {
  if (timeout > kAckTimeoutMax) return EINVAL;
  std::lock_guard lock(mutex_);
  id->ack_timeout_ = timeout;
  return 0;
}

bool CmCore::KeepsItsQp(const CmId& id) {
  return id.state_ == State::kListening || id.state_ == State::kConnecting || id.state_ == State::kAccepting ||
         id.state_ == State::kConnected || id.state_ == State::kDestroyed;
}

int CmCore::SetQp(const std::shared_ptr<CmId>& id, uint32_t qp_number) {
  std::lock_guard lock(mutex_);
  if (id->qp_number_ == qp_number) return 0;
  if (KeepsItsQp(*id)) return NotRequested(*id);
  if (const auto user = users_.find(qp_number); user != users_.end()) {
    if (const auto other = user->second.lock()) {
      if (KeepsItsQp(*other)) return EINVAL;
      STAGECOACH_MARK("cm.qp_taken_from_another_id");
      other->qp_number_ = 0;
    }
  }
  if (qp_number != 0) users_[qp_number] = id;
  if (id->qp_number_ != 0 && id->qp_number_ != qp_number) users_.erase(id->qp_number_);
  id->qp_number_ = qp_number;
  return 0;
}

void CmCore::ForgetQp(uint32_t qp_number) {
  std::lock_guard lock(mutex_);
  const auto user = users_.find(qp_number);
  if (user == users_.end()) return;
  auto id = user->second.lock();
  users_.erase(user);
  if (id == nullptr) return;
  id->qp_number_ = 0;
  transport_->OnQpGone(id);
}

// The QP is the id's, or, where the program takes it through its states itself, one that it names.
bool CmCore::HasQp(const CmId& id, const CmParameters& parameters) const {
  return id.qp_number_ != 0 || (transport_->HasExternalQps() && parameters.qp_number != 0);
}

int CmCore::Connect(const std::shared_ptr<CmId>& id, const CmParameters& parameters) {
  std::lock_guard lock(mutex_);
  if (parameters.private_data.size() > transport_->PrivateDataMax(*id, CmTransport::Message::kRequest)) return EINVAL;
  if (closed_) return ENODEV;
  // Who looks for a service for datagrams may choose a QP later.
  const bool ready = id->port_space_ == wire::CmPortSpace::kUdp || HasQp(*id, parameters);
  if (id->state_ != State::kRouteResolved || !ready) return EINVAL;
  id->state_ = State::kConnecting;
  Undoing unasked([&] { id->state_ = State::kRouteResolved; });
  transport_->Connect(id, parameters);
  unasked.Done();
  return 0;
}

int CmCore::NotRequested(CmId& id) {
  // Of a request that was withdrawn its program has heard by now.
  CountAnswered(id);
  return EINVAL;
}

int CmCore::Accept(const std::shared_ptr<CmId>& id, const CmParameters& parameters,
                   const std::function<void()>& before_answer) {
  {
    std::lock_guard lock(mutex_);
    if (parameters.private_data.size() > transport_->PrivateDataMax(*id, CmTransport::Message::kReply)) return EINVAL;
    if (closed_) return ENODEV;
    if (id->state_ != State::kRequested) return NotRequested(*id);
    if (!HasQp(*id, parameters)) return EINVAL;
    id->state_ = State::kAccepting;
    CountAnswered(*id);
  }
  int error = 0;
  try {
    error = transport_->PrepareToAccept(id, parameters);
  } catch (const std::bad_alloc&) {
    error = ENOMEM;
  }
  {
    std::lock_guard lock(mutex_);
    if (id->state_ == State::kAccepting) {
      // Another thread may have destroyed the QP meanwhile.
      if (error == 0 && !HasQp(*id, parameters)) error = EINVAL;
      if (error == 0) {
        if (before_answer) before_answer();
        try {
          Insist([&] { transport_->Accept(id, parameters); });
          return 0;
        } catch (const std::bad_alloc&) {
          error = ENOMEM;
        }
      }
      id->state_ = State::kRequested;
      CountUnanswered(*id);
      return error;
    }
  }
  // The peer has withdrawn, or another thread the id.
  STAGECOACH_MARK("cm.accept_comes_too_late");
  if (error == 0) transport_->UndoAccept(id);
  return EINVAL;
}

int CmCore::Reject(const std::shared_ptr<CmId>& id, std::vector<std::byte> private_data) {
  std::lock_guard lock(mutex_);
  if (private_data.size() > transport_->PrivateDataMax(*id, CmTransport::Message::kRejection)) return EINVAL;
  if (id->state_ != State::kRequested) return NotRequested(*id);
  id->state_ = State::kClosed;
  CountAnswered(*id);
  transport_->Reject(id, std::move(private_data));
  return 0;
}

int CmCore::Establish(const std::shared_ptr<CmId>& id) {
  std::lock_guard lock(mutex_);
  return transport_->Establish(id);
}

int CmCore::Notify(const std::shared_ptr<CmId>& id, bool communication_established) {
  std::lock_guard lock(mutex_);
  return transport_->Notify(id, communication_established);
}

int CmCore::Disconnect(const std::shared_ptr<CmId>& id) {
  return transport_->Disconnect(id);
}

Result<CmTransport::QpChange, int> CmCore::ChangeTo(const CmId& id, QpState state) const {
  std::lock_guard lock(mutex_);
  return transport_->ChangeTo(id, state);
}

bool CmCore::HasRoom(const CmId& listener) {
  const uint32_t more =
      STAGECOACH_MUTANT("backlog-and-one", "a listener takes one request more than its backlog") ? 1 : 0;
  return listener.unanswered_ < listener.backlog_ + more;
}

std::shared_ptr<CmId> CmCore::NewChild(const std::shared_ptr<CmId>& listener, uint64_t serial, const IpEndpoint& local,
                                       const IpEndpoint& remote) {
  auto child = std::make_shared<CmId>(listener->channel_, serial, listener->port_space_);
  child->state_ = State::kRequested;
  child->local_ = local;
  child->remote_ = remote;
  child->listener_ = listener;
  ids_[serial] = child;
  CountUnanswered(*child);
  return child;
}

void CmCore::DropChild(CmId& child) {
  child.state_ = State::kDestroyed;
  ids_.erase(child.serial());
  CountAnswered(child);
}

void CmCore::CountUnanswered(CmId& child) {
  const auto listener = child.listener_.lock();
  if (listener != nullptr && !std::exchange(child.awaits_answer_, true)) ++listener->unanswered_;
}

void CmCore::CountAnswered(CmId& child) {
  if (!std::exchange(child.awaits_answer_, false)) return;
  if (const auto listener = child.listener_.lock()) --listener->unanswered_;
}

std::list<CmEvent> CmCore::Withdraw(const std::shared_ptr<CmId>& child) {
  std::list<CmEvent> undelivered = child->channel_->Forget(child.get());
  if (undelivered.empty()) {
    // Too late for its program's answer; and it takes room until the program knows, so that a peer that asks and gives
    // up again and again has no more than its backlog of ids and events here.
    child->state_ = State::kAccepting;
    return undelivered;
  }
  STAGECOACH_MARK("cm.request_withdrawn_before_anybody_fetched_it");
  child->state_ = State::kDestroyed;
  ids_.erase(child->serial());
  CountAnswered(*child);
  return undelivered;
}

void CmCore::Destroy(const std::shared_ptr<CmId>& id) {
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
    CountAnswered(*id);
  }
  // Waits for a call that may want the lock.
  acceptor.reset();
  port.reset();
  if (before == State::kRequested) STAGECOACH_MARK("cm.request_dropped_unanswered");
  if (before == State::kConnecting) STAGECOACH_MARK("cm.id_destroyed_while_connecting");
  if (before == State::kAccepting) STAGECOACH_MARK("cm.id_destroyed_while_accepting");
  transport_->Forget(id, before, attached, qp_number);
  for (const CmEvent& event : channel->Forget(id.get())) {
    if (event.listener != id) continue;
    STAGECOACH_MARK("cm.listener_destroyed_with_requests_undelivered");
    Destroy(event.id);
  }
  id->account().AwaitAcknowledged(fabric_);
}

void CmCore::Migrate(const std::shared_ptr<CmId>& id, std::shared_ptr<CmChannel> channel) {
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

void CmCore::Close() {
  // One after the other, and without memory for a list of them.
  const auto next = [this](uint64_t after) -> std::shared_ptr<CmId> {
    std::lock_guard lock(mutex_);
    closed_ = true;
    for (auto entry = ids_.upper_bound(after); entry != ids_.end(); ++entry) {
      if (auto id = entry->second.lock()) return id;
    }
    return nullptr;
  };
  for (std::shared_ptr<CmId> id = next(0); id != nullptr; id = next(id->serial())) {
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
  transport_->Stop();
  PostAtLast(fabric_.loop(), [self = shared_from_this()] {
    self->transport_->Close();
    std::lock_guard lock(self->mutex_);
    self->is_drained_ = true;
    self->drained_.notify_all();
  });
  std::unique_lock lock(mutex_);
  fabric_.Wait(lock, drained_, [this] { return is_drained_; });
}

void CmCore::Fail(const std::shared_ptr<CmId>& id, State expected, Failure failure,
                  std::vector<std::byte> private_data) {
  std::lock_guard lock(mutex_);
  if (id->state_ != expected) return;
  CmEvent event{failure.type, id, nullptr, failure.status, {}};
  event.parameters.private_data = std::move(private_data);
  Emit(std::move(event));
  id->state_ = State::kClosed;
}

}  // namespace stagecoach::emu
