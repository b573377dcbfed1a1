#include "emu/sim/sim_world.h"

#include <errno.h>

#include <algorithm>
#include <system_error>

#include "base/check.h"
#include "emu/fabric/event_fd.h"
#include "emu/sim/sim_connection.h"

namespace stagecoach::emu {
namespace {

constexpr Duration kFirstSynRetry = 1s;

FabricError MakeError(int error, const std::string& what) {
  return {error, what + ": " + std::generic_category().message(error)};
}

bool SameAddress(const IpEndpoint& a, const IpEndpoint& b) {
  return a.family == b.family && a.address == b.address;
}

// A real eventfd, so that programs can poll it, that also marks its channel in the loop.
class SimNotifier final : public Notifier {
 public:
  SimNotifier(SimLoop* loop, std::unique_ptr<EventFd> event) : loop_(loop), event_(std::move(event)) {
    loop_->AddDescriptor(event_->fd());
  }
  ~SimNotifier() override { loop_->RemoveDescriptor(event_->fd()); }
  int fd() const override { return event_->fd(); }
  void Signal() override {
    event_->Signal();
    loop_->OnSignalled(event_->fd());
  }
  bool Consume() override {
    if (!event_->Consume()) return false;
    loop_->OnConsumed(event_->fd());
    return true;
  }

 private:
  SimLoop* const loop_;
  const std::unique_ptr<EventFd> event_;
};

}  // namespace

class SimListener final : public Listener {
 public:
  SimListener(SimFabric* host, const IpEndpoint& local) : host_(host), local_(local) {}
  ~SimListener() override { host_->listeners_.erase(local_); }
  IpEndpoint local() const override { return local_; }

 private:
  SimFabric* const host_;
  const IpEndpoint local_;
};

// One outgoing connection up to its establishment. Kept by the events that concern it; the user's handle can only
// cancel.
class SimConnectAttempt : public std::enable_shared_from_this<SimConnectAttempt> {
 public:
  SimConnectAttempt(SimFabric* host, const IpEndpoint& local, const IpEndpoint& remote, Fabric::ConnectCallback on_done)
      : host_(host), world_(host->world_), local_(local), remote_(remote), on_done_(std::move(on_done)) {}

  void Start() {
    if (finished_) return;
    if (remote_.family == IpEndpoint::Family::kNone) return Fail(EDESTADDRREQ);
    if (!local_.IsUnspecified() && !host_->Owns(local_)) return Fail(EADDRNOTAVAIL);
    target_ = world_->HostOf(remote_);
    const std::optional<IpEndpoint> route = host_->RouteTo(remote_);
    if (target_ == nullptr || !route) return Fail(EHOSTUNREACH);
    const uint16_t port = local_.port;
    if (local_.IsUnspecified()) local_ = *route;
    if (local_.family != remote_.family) return Fail(EAFNOSUPPORT);
    local_.port = port != 0 ? port : host_->FreePort(local_);
    if (local_.port == 0) return Fail(EADDRNOTAVAIL);
    if (port != 0 && host_->ports_in_use_.count(local_) > 0) return Fail(EADDRINUSE);
    time_out_ = world_->loop_.At(world_->Now() + world_->options_.connect_timeout, [self = shared_from_this()] {
      self->time_out_ = 0;
      self->Fail(ETIMEDOUT);
    });
    SendSyn(kFirstSynRetry);
  }

  void Cancel() {
    if (finished_) return;
    Finish();
    if (connection_ != nullptr) connection_->Abandon();
    connection_.reset();
  }

 private:
  Duration LatencyTo(bool target) const {
    const size_t here = host_->index_;
    const size_t there = target_->index_;
    return (target ? world_->LinkBetween(here, there) : world_->LinkBetween(there, here)).options.latency;
  }

  void SendSyn(Duration retry) {
    retry_ = world_->loop_.At(world_->Now() + retry, [self = shared_from_this(), retry] { self->SendSyn(retry * 2); });
    if (host_->vanished_) return;
    world_->loop_.At(world_->Now() + LatencyTo(true), [self = shared_from_this()] { self->SynArrives(); });
  }

  void SynArrives() {
    if (finished_ || !world_->Reachable(host_->index_, target_->index_)) return;
    if (connection_ == nullptr) {
      const auto listener = target_->FindListener(remote_);
      if (listener == nullptr) {
        Answer([](SimConnectAttempt& attempt) { attempt.Fail(ECONNREFUSED); });
        return;
      }
      const uint64_t id = world_->next_connection_++;
      connection_ = std::make_shared<SimConnection>(world_, id, host_, local_, target_, remote_);
      world_->connections_.emplace(id, connection_);
      listener_ = std::shared_ptr<Fabric::AcceptCallback>(listener, &listener->on_accept);
    }
    Answer([](SimConnectAttempt& attempt) { attempt.Established(); });
  }

  // A lost answer is asked for again by the next SYN.
  void Answer(void (*answer)(SimConnectAttempt&)) {
    world_->loop_.At(world_->Now() + LatencyTo(false), [self = shared_from_this(), answer] {
      if (self->finished_ || !self->world_->Reachable(self->target_->index_, self->host_->index_)) return;
      answer(*self);
    });
  }

  void Established() {
    Finish();
    const std::shared_ptr<SimConnection> connection = std::move(connection_);
    const Fabric::ConnectCallback on_done = std::move(on_done_);
    on_done(connection->Open(listener_));
  }

  void Fail(int error) {
    if (finished_) return;
    Finish();
    connection_.reset();
    const Fabric::ConnectCallback on_done = std::move(on_done_);
    on_done(Err(MakeError(error, "connect to " + remote_.ToString())));
  }

  void Finish() {
    finished_ = true;
    world_->loop_.Cancel(retry_);
    world_->loop_.Cancel(time_out_);
  }

  SimFabric* const host_;
  SimWorld* const world_;
  IpEndpoint local_;
  const IpEndpoint remote_;
  SimFabric* target_ = nullptr;
  Fabric::ConnectCallback on_done_;
  std::shared_ptr<SimConnection> connection_;  // from the arrival of the SYN to the end of the handshake
  std::weak_ptr<Fabric::AcceptCallback> listener_;
  EventLoop::TimerId retry_ = 0;
  EventLoop::TimerId time_out_ = 0;
  bool finished_ = false;
};

namespace {

class SimAttemptHandle final : public ConnectAttempt {
 public:
  explicit SimAttemptHandle(std::shared_ptr<SimConnectAttempt> attempt) : attempt_(std::move(attempt)) {}
  ~SimAttemptHandle() override { attempt_->Cancel(); }

 private:
  const std::shared_ptr<SimConnectAttempt> attempt_;
};

SimWorld::Options WithSeed(uint64_t seed) {
  SimWorld::Options options;
  options.seed = seed;
  return options;
}

}  // namespace

SimWorld::SimWorld(uint64_t seed) : SimWorld(WithSeed(seed)) {}

SimWorld::SimWorld(const Options& options) : options_(options), prng_(options.seed) {}

SimWorld::~SimWorld() {
  // What is still scheduled holds connections, whose ends give back ports of hosts: it goes before the hosts do.
  loop_.Clear();
}

SimFabric& SimWorld::AddHost(const std::string& name, std::vector<IpEndpoint> addresses) {
  for (IpEndpoint& address : addresses) {
    address.port = 0;
    STAGECOACH_CHECK(!address.IsUnspecified() && HostOf(address) == nullptr);
  }
  hosts_.push_back(std::make_unique<SimFabric>(this, hosts_.size(), name, std::move(addresses)));
  return *hosts_.back();
}

void SimWorld::SetLink(const SimFabric& a, const SimFabric& b, const LinkOptions& options) {
  LinkBetween(a.index_, b.index_).options = options;
  LinkBetween(b.index_, a.index_).options = options;
}

void SimWorld::Partition(const SimFabric& a, const SimFabric& b, bool partitioned) {
  LinkBetween(a.index_, b.index_).partitioned = partitioned;
  LinkBetween(b.index_, a.index_).partitioned = partitioned;
  if (partitioned) return;
  std::vector<std::shared_ptr<SimConnection>> freed;
  for (const auto& [id, weak] : connections_) {
    const std::shared_ptr<SimConnection> connection = weak.lock();
    if (connection != nullptr && connection->Joins(a.index_, b.index_)) freed.push_back(connection);
  }
  for (const auto& connection : freed) connection->ReleaseHeld();
}

void SimWorld::Vanish(const SimFabric& host) {
  hosts_[host.index_]->vanished_ = true;
}

SimWorld::Link& SimWorld::LinkBetween(size_t from, size_t to) {
  return links_.try_emplace({from, to}, Link{options_.link}).first->second;
}

bool SimWorld::Reachable(size_t from, size_t to) {
  return !hosts_[to]->vanished_ && !LinkBetween(from, to).partitioned;
}

SimFabric* SimWorld::HostOf(const IpEndpoint& address) {
  for (const auto& host : hosts_) {
    if (host->Owns(address)) return host.get();
  }
  return nullptr;
}

bool SimWorld::RunUntil(const std::function<bool()>& done) {
  return loop_.RunUntil(done, Now() + options_.stall_limit);
}

void SimWorld::RunFor(Duration time) {
  loop_.RunThrough(Now() + time);
}

bool SimWorld::RunUntilIdle() {
  loop_.RunUntil([] { return false; }, Now() + options_.stall_limit);
  return loop_.IsDry();
}

SimFabric::SimFabric(SimWorld* world, size_t index, std::string name, std::vector<IpEndpoint> addresses)
    : world_(world), index_(index), name_(std::move(name)), addresses_(std::move(addresses)) {}

SimFabric::~SimFabric() = default;

bool SimFabric::Owns(const IpEndpoint& address) const {
  return std::any_of(addresses_.begin(), addresses_.end(),
                     [&](const IpEndpoint& own) { return SameAddress(own, address); });
}

uint16_t SimFabric::FreePort(const IpEndpoint& address) {
  constexpr int kDynamicPorts = 65536 - 49152;
  for (int i = 0; i < kDynamicPorts; ++i) {
    const uint16_t port = next_port_;
    next_port_ = next_port_ == 65535 ? 49152 : static_cast<uint16_t>(next_port_ + 1);
    const auto listens = [&](const auto& entry) { return entry.first.port == port; };
    if (ports_in_use_.count(address.WithPort(port)) > 0) continue;
    if (std::none_of(listeners_.begin(), listeners_.end(), listens)) return port;
  }
  return 0;
}

std::shared_ptr<SimFabric::ListenEntry> SimFabric::FindListener(const IpEndpoint& local) const {
  const std::shared_ptr<ListenEntry>* any = nullptr;
  for (const auto& [address, entry] : listeners_) {
    if (address.port != local.port) continue;
    if (SameAddress(address, local)) return entry;
    // "::" takes IPv4 connections too, as on Linux.
    if (address.IsUnspecified() && (address.family == local.family || address.family == IpEndpoint::Family::kIpv6)) {
      if (any == nullptr || address.family == local.family) any = &entry;
    }
  }
  return any != nullptr ? *any : nullptr;
}

Result<std::unique_ptr<Listener>, FabricError> SimFabric::Listen(const IpEndpoint& local, int /*backlog*/,
                                                                 AcceptCallback on_accept) {
  const auto failed = [&](int error) { return Err(MakeError(error, "listen on " + local.ToString())); };
  if (local.family == IpEndpoint::Family::kNone) return failed(EAFNOSUPPORT);
  if (!local.IsUnspecified() && !Owns(local)) return failed(EADDRNOTAVAIL);
  IpEndpoint bound = local;
  if (bound.port == 0) bound.port = FreePort(bound);
  if (bound.port == 0) return failed(EADDRINUSE);
  for (const auto& [address, entry] : listeners_) {
    if (address.port != bound.port || address.family != bound.family) continue;
    if (SameAddress(address, bound) || address.IsUnspecified() || bound.IsUnspecified()) return failed(EADDRINUSE);
  }
  listeners_.emplace(bound, std::make_shared<ListenEntry>(ListenEntry{std::move(on_accept)}));
  Trace(world_->trace(), Now(), name_, "fabric.listen", {{"local", bound.ToString()}});
  return std::make_unique<SimListener>(this, bound);
}

std::unique_ptr<ConnectAttempt> SimFabric::Connect(const IpEndpoint& local, const IpEndpoint& remote,
                                                   ConnectCallback on_done) {
  Trace(world_->trace(), Now(), name_, "fabric.connect", {{"remote", remote.ToString()}});
  auto attempt = std::make_shared<SimConnectAttempt>(this, local, remote, std::move(on_done));
  world_->loop_.At(Now(), [attempt] { attempt->Start(); });
  return std::make_unique<SimAttemptHandle>(std::move(attempt));
}

std::optional<IpEndpoint> SimFabric::RouteTo(const IpEndpoint& remote) const {
  if (world_->HostOf(remote) == nullptr) return std::nullopt;
  if (Owns(remote)) return remote.WithPort(0);
  for (const IpEndpoint& own : addresses_) {
    if (own.family == remote.family && !own.IsLoopback()) return own;
  }
  return std::nullopt;
}

std::vector<IpEndpoint> SimFabric::LocalAddresses() const {
  std::vector<IpEndpoint> addresses = addresses_;
  std::stable_partition(addresses.begin(), addresses.end(),
                        [](const IpEndpoint& address) { return !address.IsLoopback(); });
  return addresses;
}

std::unique_ptr<Notifier> SimFabric::CreateNotifier() {
  std::unique_ptr<EventFd> event = EventFd::Create();
  if (event == nullptr) return nullptr;
  return std::make_unique<SimNotifier>(&world_->loop_, std::move(event));
}

bool SimFabric::Wait(std::unique_lock<std::mutex>& lock, std::condition_variable& /*changed*/,
                     const std::function<bool()>& done) {
  if (done()) return true;
  lock.unlock();
  const auto done_under_lock = [&] {
    const std::lock_guard<std::mutex> held(*lock.mutex());
    return done();
  };
  const bool satisfied =
      world_->loop_.RunUntil(done_under_lock, Now() + world_->options_.stall_limit, "a verbs call to be done");
  lock.lock();
  return satisfied;
}

int SimFabric::WaitReadable(int fd) {
  SimLoop& loop = world_->loop_;
  const bool readable = loop.RunUntil([&loop, fd] { return loop.IsReadable(fd); }, Now() + world_->options_.stall_limit,
                                      "a channel to become readable");
  return readable ? 0 : EDEADLK;
}

}  // namespace stagecoach::emu
