#include "emu/sim/sim_world.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <system_error>

#include "base/check.h"
#include "base/mark.h"
#include "emu/fabric/event_fd.h"
#include "emu/llp/mpa/mpa_llp.h"
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
  SimNotifier(SimFabric* fabric, SimLoop* loop, std::unique_ptr<EventFd> event)
      : fabric_(fabric), loop_(loop), event_(std::move(event)) {
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
  int Take() override {
    while (!Consume()) {
      if ((fcntl(fd(), F_GETFL) & O_NONBLOCK) != 0) return EAGAIN;
      if (const int error = fabric_->WaitReadable(fd()); error != 0) return error;
    }
    return 0;
  }

 private:
  SimFabric* const fabric_;
  SimLoop* const loop_;
  const std::unique_ptr<EventFd> event_;
};

void RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);  // what it does not get it may do without
}

[[noreturn]] void EndForWantOfDescriptors() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  std::fprintf(stderr, "the simulation ran out of file descriptors (limit %llu): raise `ulimit -n`\n",
               static_cast<unsigned long long>(limit.rlim_cur));
  std::fflush(nullptr);
  std::_Exit(SimWorld::kNoDescriptors);
}

}  // namespace

// Registers with the world's loop in the name of a host. While that is down, what is registered is as good as gone.
class SimHostLoop final : public EventLoop {
 public:
  explicit SimHostLoop(SimFabric* host) : host_(host) {}

  Instant Now() const override { return loop().Now(); }
  TimerId At(Instant when, Callback callback) override {
    if (host_->IsUp()) return loop().At(when, host_->owner(), std::move(callback));
    loop().DropLater(std::move(callback));
    return 0;
  }
  void Cancel(TimerId timer) override { loop().Cancel(timer); }
  WatchId WatchReadable(int fd, Callback callback) override {
    if (host_->IsUp()) return loop().WatchReadable(fd, host_->owner(), std::move(callback));
    loop().DropLater(std::move(callback));
    errno = ENODEV;
    return 0;
  }
  void Unwatch(WatchId watch) override { loop().Unwatch(watch); }
  void Post(Callback callback) override { At(Now(), std::move(callback)); }
  PollerId AddPoller(Poller poller) override {
    if (host_->IsUp()) return loop().AddPoller(host_->owner(), std::move(poller));
    loop().DropLater([dropped = std::move(poller)] {});
    return 0;
  }
  void RemovePoller(PollerId poller) override { loop().RemovePoller(poller); }

 private:
  SimLoop& loop() const { return host_->world_->loop(); }

  SimFabric* const host_;
};

class SimListener final : public Listener {
 public:
  SimListener(SimFabric* host, const IpEndpoint& local, std::weak_ptr<SimFabric::ListenEntry> entry)
      : host_(host), local_(local), entry_(std::move(entry)) {}
  ~SimListener() override {
    // After a cut the entry is gone, and the place may be another's.
    if (!entry_.expired()) host_->listeners_.erase(local_);
  }
  IpEndpoint local() const override { return local_; }

 private:
  SimFabric* const host_;
  const IpEndpoint local_;
  const std::weak_ptr<SimFabric::ListenEntry> entry_;
};

class SimPortHold final : public PortHold {
 public:
  SimPortHold(SimFabric* host, const IpEndpoint& local) : host_(host), local_(local) {
    ++host_->ports_held_[local_.port];
  }
  ~SimPortHold() override {
    const auto held = host_->ports_held_.find(local_.port);
    if (--held->second == 0) host_->ports_held_.erase(held);
  }
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
    if (!host_->IsUp()) return Fail(ENETDOWN);
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
      STAGECOACH_MARK("stream.connect_times_out");
      self->Fail(ETIMEDOUT);
    });
    SendSyn(kFirstSynRetry);
  }

  // The host has gone down.
  void OnCut() {
    world_->loop_.Post([self = shared_from_this()] { self->Fail(ENETDOWN); });
  }

  void Cancel() {
    if (finished_) return;
    Finish();
    if (connection_ != nullptr) {
      STAGECOACH_MARK("stream.connect_cancelled_after_the_syn_arrived");
      connection_->Abandon();
    }
    connection_.reset();
  }

 private:
  Duration LatencyTo(bool target) const {
    const size_t here = host_->index_;
    const size_t there = target_->index_;
    return (target ? world_->LinkBetween(here, there) : world_->LinkBetween(there, here)).options.latency;
  }

  void SendSyn(Duration retry) {
    retry_ = world_->loop_.At(world_->Now() + retry, [self = shared_from_this(), retry] {
      STAGECOACH_MARK("stream.syn_sent_again");
      self->SendSyn(retry * 2);
    });
    world_->loop_.At(world_->Now() + LatencyTo(true), [self = shared_from_this()] { self->SynArrives(); });
  }

  void SynArrives() {
    if (finished_ || !world_->Reachable(host_->index_, target_->index_)) return;
    if (connection_ == nullptr) {
      const auto listener = target_->FindListener(remote_);
      if (listener == nullptr) {
        STAGECOACH_MARK("stream.connect_refused");
        Answer([](SimConnectAttempt& attempt) { attempt.Fail(ECONNREFUSED); });
        return;
      }
      const uint64_t id = world_->next_connection_++;
      // Without its port, which mostly is the next one free.
      std::string name = host_->name_ + "/" + local_.WithPort(0).ToString() + "/" + remote_.ToString();
      name += "/" + std::to_string(++world_->connections_made_[name]);
      connection_ = std::make_shared<SimConnection>(world_, id, name, host_, local_, target_, remote_);
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

SimWorld::SimWorld(const Options& options) : options_(options), prng_(options.seed) {
  RaiseDescriptorLimit();
}

SimWorld::~SimWorld() {
  EndPrograms();
  // What is still scheduled holds connections, whose ends give back ports of hosts: it goes before the hosts do.
  loop_.Clear();
  for (const auto& connection : Connections()) connection->ForgetScheduled();
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
  for (const auto& connection : Connections()) {
    if (connection->Joins(a.index_, b.index_)) connection->ReleaseHeld();
  }
}

void SimWorld::CutHost(SimFabric& host, Cut how) {
  STAGECOACH_CHECK(host.IsUp());
  Trace(trace(), Now(), host.name(), "fabric.cut", {{"how", how == Cut::kReset ? "reset" : "silent"}});
  host.state_ = how == Cut::kReset ? SimFabric::State::kKilled : SimFabric::State::kSilent;
  host.stopped_ = false;
  host.listeners_.clear();
  for (const auto& weak : std::exchange(host.attempts_, {})) {
    if (const auto attempt = weak.lock()) attempt->OnCut();
  }
  for (const auto& connection : Connections()) connection->LoseHost(host, ENETDOWN, how == Cut::kReset);
  loop_.Drop(host.owner());
  loop_.Interrupt(host.owner());
}

void SimWorld::Restore(SimFabric& host) {
  STAGECOACH_CHECK(!host.IsUp() && !HasBlocked(host));
  Trace(trace(), Now(), host.name(), "fabric.restored");
  loop_.BuryDropped();
  host.state_ = SimFabric::State::kUp;
  for (const auto& connection : Connections()) {
    if (connection->IsOf(host)) connection->ReleaseHeld();
  }
}

void SimWorld::Stop(SimFabric& host, bool stopped) {
  STAGECOACH_CHECK(host.IsUp());
  Trace(trace(), Now(), host.name(), stopped ? "fabric.stopped" : "fabric.continued");
  host.stopped_ = stopped;
  if (stopped) return;
  for (const auto& connection : Connections()) connection->Continue(host);
}

void SimWorld::ResetConnections(const SimFabric& a, const SimFabric& b) {
  for (const auto& connection : Connections()) {
    if (connection->Joins(a.index_, b.index_)) connection->ResetBoth();
  }
}

void SimWorld::ForgetConnections(const SimFabric& host) {
  for (const auto& connection : Connections()) connection->LoseHost(host, ECONNRESET, false);
}

std::vector<std::shared_ptr<SimConnection>> SimWorld::Connections() const {
  std::vector<std::shared_ptr<SimConnection>> alive;
  for (const auto& [id, weak] : connections_) {
    if (auto connection = weak.lock()) alive.push_back(std::move(connection));
  }
  return alive;
}

SimWorld::Link& SimWorld::LinkBetween(size_t from, size_t to) {
  return links_.try_emplace({from, to}, Link{options_.link}).first->second;
}

bool SimWorld::Reachable(size_t from, size_t to) {
  return hosts_[to]->state_ != SimFabric::State::kSilent && !LinkBetween(from, to).partitioned;
}

void SimWorld::FreeUnused(Link& link) const {
  link.free_at = Now();
  for (const auto& connection : Connections()) {
    link.free_at = std::max(link.free_at, connection->BookedUntil(link));
  }
}

SimFabric* SimWorld::HostOf(const IpEndpoint& address) {
  for (const auto& host : hosts_) {
    if (host->Owns(address)) return host.get();
  }
  return nullptr;
}

bool SimWorld::RunUntil(const std::function<bool()>& done) {
  if (!loop_.InCallback()) return loop_.RunUntil(done, WaitLimit(false));
  const auto done_or_down = [&] { return CurrentIsDown() || done(); };
  return loop_.RunUntil(done_or_down, WaitLimit(false)) && !CurrentIsDown();
}

void SimWorld::RunFor(Duration time) {
  loop_.RunThrough(Now() + time);
}

bool SimWorld::RunUntilIdle() {
  loop_.RunUntil([] { return false; }, Now() + options_.stall_limit);
  return loop_.IsDry();
}

std::shared_ptr<const SimProgram> SimWorld::Spawn(SimFabric& host, std::string name, std::function<void()> body) {
  // Finished as well when it is dropped before it began.
  struct Run {
    Run(std::shared_ptr<SimProgram> its_program, std::function<void()> its_body)
        : program(std::move(its_program)), body(std::move(its_body)) {}
    ~Run() { program->finished_ = true; }
    std::shared_ptr<SimProgram> program;
    std::function<void()> body;
  };
  const auto program = std::make_shared<SimProgram>(host.name() + "/" + name);
  const auto run = std::make_shared<Run>(program, std::move(body));
  host.program_loop().Post([this, run] {
    loop_.EnterProgram(&run->program->name_);
    std::exchange(run->body, nullptr)();
  });
  return program;
}

bool SimWorld::Sleep(Duration time) {
  const Instant until = Now() + time;
  if (!loop_.InCallback()) {
    RunFor(time);
    return true;
  }
  const EventLoop::TimerId alarm = loop_.At(until, [] {});
  const auto over = [&] { return CurrentIsDown() || Now() >= until; };
  loop_.RunUntil(over, Instant::max(), "time to pass");
  loop_.Cancel(alarm);
  return !CurrentIsDown();
}

void SimWorld::EndPrograms() {
  ending_programs_ = true;
  loop_.Interrupt(SimLoop::kEveryone);
  loop_.RunUntil([this] { return !loop_.HasWaiters(); }, Now());
  ending_programs_ = false;
}

bool SimWorld::HasBlocked(const SimFabric& host) const {
  const auto waiters = loop_.Waiters();
  return std::any_of(waiters.begin(), waiters.end(),
                     [&](const SimLoop::Waiter& waiter) { return waiter.context.owner == host.owner(); });
}

SimFabric* SimWorld::current_host() const {
  const SimLoop::Owner owner = loop_.current().owner;
  return owner == SimLoop::kNobody ? nullptr : hosts_[owner - 1].get();
}

bool SimWorld::CurrentIsDown() const {
  if (!loop_.InCallback()) return false;
  const SimFabric* const host = current_host();
  return ending_programs_ || (host != nullptr && host->IsDown());
}

std::string SimWorld::Describe() const {
  std::string text = "at " + FormatSeconds(Now()) + ": " + std::to_string(loop_.scheduled()) + " events to come";
  if (!loop_.IsDry()) text += ", the next at " + FormatSeconds(loop_.NextDue());
  text += "\n";
  for (const SimLoop::Waiter& waiter : loop_.Waiters()) {
    const SimLoop::Context& context = waiter.context;
    const std::string owner = context.owner == SimLoop::kNobody ? "a callback"
                              : context.program != nullptr      ? *context.program
                                                                : hosts_[context.owner - 1]->name() + " (a callback)";
    text += "  blocked: " + owner + " waits for " + std::string(waiter.what) + " since " + FormatSeconds(waiter.since) +
            "\n";
  }
  for (const auto& host : hosts_) {
    if (!host->IsUp()) text += "  down: " + host->name() + "\n";
    if (host->stopped_) text += "  standing still: " + host->name() + "\n";
  }
  for (const auto& [pair, link] : links_) {
    if (link.partitioned) {
      text += "  partition: from " + hosts_[pair.first]->name() + " to " + hosts_[pair.second]->name() + "\n";
    }
  }
  for (const auto& connection : Connections()) text += connection->Describe();
  return text;
}

SimFabric::SimFabric(SimWorld* world, size_t index, std::string name, std::vector<IpEndpoint> addresses)
    : world_(world),
      index_(index),
      name_(std::move(name)),
      addresses_(std::move(addresses)),
      program_loop_(std::make_unique<SimHostLoop>(this)) {}

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
    if (ports_in_use_.count(address.WithPort(port)) > 0 || ports_held_.count(port) > 0) continue;
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
    const bool takes_both = address.family == IpEndpoint::Family::kIpv6 && !entry->own_family_only;
    if (address.IsUnspecified() && (address.family == local.family || takes_both)) {
      if (any == nullptr || address.family == local.family) any = &entry;
    }
  }
  return any != nullptr ? *any : nullptr;
}

int SimFabric::WhyNotListen(const IpEndpoint& local) const {
  if (!IsUp()) return ENETDOWN;
  if (local.family == IpEndpoint::Family::kNone) return EAFNOSUPPORT;
  if (!local.IsUnspecified() && !Owns(local)) return EADDRNOTAVAIL;
  if (local.port == 0) return 0;
  for (const auto& [address, entry] : listeners_) {
    if (address.port != local.port || address.family != local.family) continue;
    if (SameAddress(address, local) || address.IsUnspecified() || local.IsUnspecified()) return EADDRINUSE;
  }
  return 0;
}

Result<std::unique_ptr<Listener>, FabricError> SimFabric::ListenWith(const StreamOptions& options,
                                                                     const IpEndpoint& local, int /*backlog*/,
                                                                     AcceptCallback on_accept) {
  const auto failed = [&](int error) { return Err(MakeError(error, "listen on " + local.ToString())); };
  if (const int error = WhyNotListen(local); error != 0) return failed(error);
  IpEndpoint bound = local;
  if (bound.port == 0) bound.port = FreePort(bound);
  if (bound.port == 0) return failed(EADDRINUSE);
  auto entry = std::make_shared<ListenEntry>(ListenEntry{std::move(on_accept), options.own_family_only});
  listeners_.emplace(bound, entry);
  Trace(world_->trace(), Now(), name_, "fabric.listen", {{"local", bound.ToString()}});
  return std::make_unique<SimListener>(this, bound, entry);
}

std::unique_ptr<Llp> SimFabric::RecordsOver(std::unique_ptr<Stream> stream, const RecordOptions& options) {
  return std::make_unique<MpaLlp>(std::move(stream), options);
}

Result<std::unique_ptr<PortHold>, FabricError> SimFabric::HoldPort(const StreamOptions& /*options*/,
                                                                   const IpEndpoint& local) {
  const auto failed = [&](int error) { return Err(MakeError(error, "bind to " + local.ToString())); };
  if (const int error = WhyNotListen(local); error != 0) return failed(error);
  IpEndpoint bound = local;
  if (bound.port == 0) bound.port = FreePort(bound);
  if (bound.port == 0) return failed(EADDRINUSE);
  return std::make_unique<SimPortHold>(this, bound);
}

std::unique_ptr<ConnectAttempt> SimFabric::ConnectWith(const StreamOptions& /*options*/, const IpEndpoint& local,
                                                       const IpEndpoint& remote, ConnectCallback on_done) {
  Trace(world_->trace(), Now(), name_, "fabric.connect", {{"remote", remote.ToString()}});
  auto attempt = std::make_shared<SimConnectAttempt>(this, local, remote, std::move(on_done));
  std::erase_if(attempts_, [](const auto& weak) { return weak.expired(); });
  attempts_.push_back(attempt);
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

std::vector<LocalAddress> SimFabric::LocalAddresses() {
  std::vector<LocalAddress> addresses;
  for (const IpEndpoint& address : addresses_) addresses.push_back({address});
  std::stable_partition(addresses.begin(), addresses.end(),
                        [](const LocalAddress& each) { return !each.address.IsLoopback(); });
  return addresses;
}

uint32_t SimFabric::LinkMtu(const IpEndpoint& local) const {
  return local.IsLoopback() ? kLoopbackMtu : link_mtu_;
}

std::unique_ptr<Notifier> SimFabric::CreateNotifier() {
  std::unique_ptr<EventFd> event = EventFd::Create();
  if (event == nullptr) {
    if (world_->options_.needs_descriptors && (errno == EMFILE || errno == ENFILE)) EndForWantOfDescriptors();
    return nullptr;
  }
  return std::make_unique<SimNotifier>(this, &world_->loop_, std::move(event));
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
      world_->loop_.RunUntil(done_under_lock, world_->WaitLimit(IsDown()), "a verbs call to be done");
  lock.lock();
  return satisfied;
}

int SimFabric::WaitReadable(int fd) {
  SimLoop& loop = world_->loop_;
  const auto readable_or_down = [&] { return IsDown() || loop.IsReadable(fd); };
  const bool waited = loop.RunUntil(readable_or_down, world_->WaitLimit(false), "a channel to become readable");
  if (IsDown()) {
    loop.CountAttempt();  // a program that takes no error for an answer would go on for ever
    return ENODEV;
  }
  return waited ? 0 : EDEADLK;
}

}  // namespace stagecoach::emu
