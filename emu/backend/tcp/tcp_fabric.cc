#include "emu/backend/tcp/tcp_fabric.h"

#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <system_error>
#include <thread>

#include "base/check.h"
#include "base/fork/fork.h"
#include "base/insist.h"
#include "base/mark.h"
#include "base/mutant.h"
#include "base/signals/signals_blocked.h"
#include "base/undoing.h"
#include "base/unseen.h"
#include "emu/backend/tcp/abstract_names.h"
#include "emu/backend/tcp/leading_companion.h"
#include "emu/backend/tcp/leading_notifier.h"
#include "emu/backend/tcp/peer_user.h"
#include "emu/backend/tcp/short_slices.h"
#include "emu/fabric/event_fd.h"
#include "emu/fabric/insist_loop.h"
#include "emu/llp/mpa/mpa_llp.h"

namespace stagecoach::emu {
namespace {

// Connections taken per wake-up, so that a flood of them leaves time for others.
constexpr int kAcceptBatch = 16;

FabricError MakeError(int error, const std::string& what) {
  return {error, what + ": " + std::generic_category().message(error)};
}

// `time` in units of `unit`, rounded up, as the system takes it; at most the largest that it does.
int InUnits(Duration time, Duration unit, int most) {
  const auto count = time / unit + (time % unit > Duration::zero() ? 1 : 0);
  return static_cast<int>(std::min<int64_t>(count, most));
}

// What the peer's host has to say from time to time.
void ApplyPatience(const StreamOptions& options, int fd) {
  constexpr int kProbes = 3;
  constexpr int kSecondsMax = 32767;  // tcp(7): TCP_KEEPIDLE, TCP_KEEPINTVL
  constexpr int kUserTimeoutMax = std::numeric_limits<int>::max();
  if (options.keepalive > Duration::zero()) {
    const int on = 1;
    const int idle = InUnits(options.keepalive, 1s, kSecondsMax);
    const int interval = InUnits(options.keepalive / kProbes, 1s, kSecondsMax);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &kProbes, sizeof kProbes);
  }
  if (options.user_timeout > Duration::zero()) {
    const int timeout = InUnits(options.user_timeout, 1ms, kUserTimeoutMax);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout, sizeof timeout);
  }
}

// On a socket of `family` that is not bound yet. Streams accepted from it inherit all but the family.
void Apply(const StreamOptions& options, int fd, int family) {
  const int only = options.own_family_only ? 1 : 0;
  if (family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof only);
  ApplyPatience(options, fd);
  if (!options.service_class) return;
  // A hint to the network: a stack that refuses a value (some need a privilege) leaves us where we were.
  const int service_class = *options.service_class;
  setsockopt(fd, IPPROTO_IP, IP_TOS, &service_class, sizeof service_class);
  if (family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_TCLASS, &service_class, sizeof service_class);
}

// Processes begin at different places, so that they seldom try the same port.
uint16_t FirstPort() {
  constexpr uint32_t kStride = 61;  // some for each, before the next process begins
  constexpr uint32_t kDynamicPorts = 0x10000 - PortSpace::kFirstDynamic;
  return static_cast<uint16_t>(PortSpace::kFirstDynamic + static_cast<uint32_t>(getpid()) * kStride % kDynamicPorts);
}

// A socket bound to `local`, or the negative errno that says why not.
int BoundSocket(const StreamOptions& options, const IpEndpoint& local) {
  sockaddr_storage address;
  const socklen_t length = local.ToSockaddr(&address);
  if (length == 0) return -EAFNOSUPPORT;
  const int fd = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP);
  if (fd < 0) return -errno;
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  Apply(options, fd, address.ss_family);
  KeepFromChildren(fd);
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address), length) == 0) return fd;
  const int error = errno;
  CloseDescriptor(fd);
  return -error;
}

// Lets a callback run until closed; closing waits for one that is running. The argument is that of tcp_stream.h.
class CallbackGate {
 public:
  bool Enter() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return false;
    inside_ = true;
    return true;
  }
  void Leave() {
    std::lock_guard<std::mutex> lock(mutex_);
    inside_ = false;
    left_.notify_all();
  }
  void Close(bool on_loop_thread) {
    std::unique_lock<std::mutex> lock(mutex_);
    closed_ = true;
    if (!on_loop_thread) left_.wait(lock, [this] { return !inside_; });
  }
  bool closed() {
    std::lock_guard<std::mutex> lock(mutex_);
    return closed_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable left_;
  bool closed_ = false;  // guarded by mutex_
  bool inside_ = false;  // guarded by mutex_
};

// A socket that listens.
class AcceptState final : private ReadyWatcher, public std::enable_shared_from_this<AcceptState> {
 public:
  AcceptState(ReadinessSet* readiness, int fd, Fabric::AcceptCallback on_accept)
      : readiness_(readiness), fd_(fd), on_accept_(std::move(on_accept)) {}
  ~AcceptState() override { CloseDescriptor(fd_); }

  // 0, or an errno: then nobody will be accepted.
  int Start() {
    member_ = readiness_->Add(fd_);
    if (member_ == nullptr) return errno;
    member_->SetWatcher(this);
    member_->Arm(true, false);
    return 0;
  }

  // Waits for a call that is running, unless in a turn of the loop. After a Start() that failed it does nothing.
  void End(bool in_turn) {
    gate_.Close(in_turn);
    if (member_ != nullptr) readiness_->Remove(member_);
    // Frees the port now: a turn that we are in may keep the descriptor for as long as it lasts.
    shutdown(fd_, SHUT_RDWR);
  }

 private:
  void OnReady() override {
    const auto self = shared_from_this();  // the listener may go in its own callback
    try {
      if (!AcceptSome()) return readiness_->ArmLater(member_);
    } catch (const std::bad_alloc&) {
      // The stream it was for is closed. The next ones wait for better times.
      STAGECOACH_MARK("tcp.listener_finds_no_memory");
      return readiness_->ArmLater(member_);
    }
    member_->Arm(true, false);
  }

  // False: it is to rest for a while.
  bool AcceptSome() {
    for (int i = 0; i < kAcceptBatch && !gate_.closed(); ++i) {
      const int fd = accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      if (fd >= 0) {
        Deliver(fd);
        continue;
      }
      switch (errno) {
        case EAGAIN:
          return true;
        case EMFILE:
        case ENFILE:
        case ENOBUFS:
        case ENOMEM:
          if (STAGECOACH_MUTANT("listener-deaf-after-emfile",
                                "a listener that lacked a descriptor takes nobody more")) {
            readiness_->Remove(member_);
          }
          // The connection stays in the backlog and the socket readable: waiting for it again would spin.
          return false;
        case EINTR:
          break;
        default:
          // Linux reports errors of the new connection here (accept(2)): that one is lost, the listener is well. A
          // listener that is not would report the same for ever, so this too ends the batch, and comes back through the
          // timer.
          if (errno != ECONNABORTED && errno != EPROTO) return false;
      }
    }
    return true;
  }

  void Deliver(int fd) {
    std::unique_ptr<Stream> stream = TcpStream::Adopt(readiness_, fd);
    if (stream == nullptr || !gate_.Enter()) return;
    const Undoing leaving([this] { gate_.Leave(); });
    on_accept_(std::move(stream));
  }

  ReadinessSet* const readiness_;
  const int fd_;
  const Fabric::AcceptCallback on_accept_;
  std::shared_ptr<ReadinessSet::Member> member_;
  CallbackGate gate_;
};

class TcpListener final : public Listener {
 public:
  TcpListener(EpollLoop* loop, int fd, std::shared_ptr<AcceptState> state)
      : loop_(loop), local_(SocketEndpoint(fd, false)), state_(std::move(state)) {}
  ~TcpListener() override { state_->End(loop_->OnLoopThread()); }
  IpEndpoint local() const override { return local_; }

 private:
  EpollLoop* const loop_;
  const IpEndpoint local_;
  const std::shared_ptr<AcceptState> state_;
};

// The socket addresses of all of ours may be reused, so that another may be bound beside this one.
class TcpPortHold final : public PortHold {
 public:
  explicit TcpPortHold(int fd) : fd_(fd), local_(SocketEndpoint(fd, false)) {}
  ~TcpPortHold() override { CloseDescriptor(fd_); }
  IpEndpoint local() const override { return local_; }

 private:
  const int fd_;
  const IpEndpoint local_;
};

class ConnectState final : private ReadyWatcher, public std::enable_shared_from_this<ConnectState> {
 public:
  ConnectState(ReadinessSet* readiness, const StreamOptions& options, const IpEndpoint& local, const IpEndpoint& remote,
               Fabric::ConnectCallback on_done)
      : readiness_(readiness), options_(options), local_(local), remote_(remote), on_done_(std::move(on_done)) {}
  ~ConnectState() override { End(); }

  CallbackGate& gate() { return gate_; }

  void Start() {
    if (gate_.closed()) return;
    try {
      Begin();
    } catch (const std::bad_alloc&) {
      STAGECOACH_MARK("tcp.attempt_finds_no_memory");
      Insist([this] { Fail(ENOMEM); });
    }
  }

  void End() {
    if (member_ != nullptr) readiness_->Remove(std::exchange(member_, nullptr));
    if (fd_ >= 0) CloseDescriptor(std::exchange(fd_, -1));
    self_.reset();
  }

 private:
  void Begin() {
    sockaddr_storage address;
    const socklen_t length = remote_.ToSockaddr(&address);
    if (length == 0) return Fail(EDESTADDRREQ);
    fd_ = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP);
    if (fd_ < 0) return Fail(errno);
    KeepFromChildren(fd_);
    member_ = readiness_->Add(fd_);
    if (member_ == nullptr) return Fail(errno);
    Apply(options_, fd_, address.ss_family);
    if (const int bind_error = Bind(fd_)) return Fail(bind_error);
    if (connect(fd_, reinterpret_cast<const sockaddr*>(&address), length) == 0) return Connected();
    if (errno != EINPROGRESS && errno != EINTR) return Fail(errno);
    self_ = shared_from_this();
    member_->SetWatcher(this);
    member_->Arm(false, true);
  }

  void OnReady() override {
    const auto self = self_;
    if (gate_.closed()) return End();
    Connected();
  }

  int Bind(int fd) {
    sockaddr_storage address;
    const socklen_t length = local_.ToSockaddr(&address);
    if (length == 0 || (local_.IsUnspecified() && local_.port == 0)) return 0;
    const int on = 1;
    // Without a port of its own choosing the socket gets one at connect, when only the pair of endpoints has to be
    // unique.
    if (local_.port == 0) {
      setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof on);
    } else {
      setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    }
    return bind(fd, reinterpret_cast<const sockaddr*>(&address), length) == 0 ? 0 : errno;
  }

  void Connected() {
    int error = 0;
    socklen_t length = sizeof error;
    if (getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
    if (error != 0) return Fail(error);
    // Where nobody listens, a socket that was given the very port it calls, or has it, meets itself (RFC 9293 section
    // 3.5, simultaneous open).
    if (SocketEndpoint(fd_, false) == SocketEndpoint(fd_, true)) {
      const linger reset{1, 0};  // leaves nothing that would keep a listener from the port
      setsockopt(fd_, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
      return Fail(ECONNREFUSED);
    }
    // From here on the socket is the stream's.
    readiness_->Remove(std::exchange(member_, nullptr));
    std::unique_ptr<Stream> stream = TcpStream::Adopt(readiness_, std::exchange(fd_, -1));
    if (stream == nullptr) return Fail(errno);
    End();
    Finish(std::move(stream));
  }

  void Fail(int error) {
    End();
    Finish(Err(MakeError(error, "connect to " + remote_.ToString())));
  }

  void Finish(Result<std::unique_ptr<Stream>, FabricError> result) {
    if (!gate_.Enter()) return;
    const Undoing leaving([this] { gate_.Leave(); });
    on_done_(std::move(result));
  }

  ReadinessSet* const readiness_;
  const StreamOptions options_;
  const IpEndpoint local_;
  const IpEndpoint remote_;
  const Fabric::ConnectCallback on_done_;
  int fd_ = -1;
  std::shared_ptr<ReadinessSet::Member> member_;
  std::shared_ptr<ConnectState> self_;  // while it waits
  CallbackGate gate_;
};

class TcpConnectAttempt final : public ConnectAttempt {
 public:
  TcpConnectAttempt(EpollLoop* loop, std::shared_ptr<ConnectState> state) : loop_(loop), state_(std::move(state)) {}
  ~TcpConnectAttempt() override {
    state_->gate().Close(loop_->OnLoopThread());
    try {
      InsistPost(*loop_, [state = std::move(state_)] { state->End(); });
    } catch (const std::bad_alloc&) {
      // What is left when not even the reserve helps ends by itself when its socket has something to say.
      STAGECOACH_MARK("tcp.nobody_to_end_a_socket");
    }
  }

 private:
  EpollLoop* const loop_;
  std::shared_ptr<ConnectState> state_;
};

}  // namespace

namespace {

// Whether two threads of this process may run at once (taskset(1), cpuset(7)).
bool HasTwoProcessors() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  return sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) > 1;
}

}  // namespace

TcpFabric::TcpFabric(const Options& options)
    : leadership_(&loop_, {.busy_poll = options.busy_poll, .thread_polls = HasTwoProcessors()}),
      readiness_(&loop_),
      ports_(std::make_unique<AbstractNames>(&readiness_), FirstPort()),
      addresses_(&loop_) {
  KeepReserve();
  const SignalsBlocked signals_blocked;
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "stagecoach-nic");
    // Programs wait for it, also those that do nothing but look at memory. Where it cannot have them it does without.
    TakeSlices(kShortestSlice);
    const Unseen unseen;
    leadership_.Run();
  });
}

TcpFabric::~TcpFabric() {
  STAGECOACH_CHECK(!loop_.OnLoopThread());
  leadership_.Stop();
  thread_.join();
  // What those have posted that are gone already, and what that posts.
  constexpr int kTurns = 2;
  for (int i = 0; i < kTurns; ++i) leadership_.Turn(nullptr);
}

Result<std::unique_ptr<Listener>, FabricError> TcpFabric::ListenWith(const StreamOptions& options,
                                                                     const IpEndpoint& local, int backlog,
                                                                     AcceptCallback on_accept) {
  const auto failed = [&](int error) { return Err(MakeError(error, "listen on " + local.ToString())); };
  const int fd = BoundSocket(options, local);
  if (fd < 0) return failed(-fd);
  if (listen(fd, backlog) != 0) {
    const int error = errno;
    CloseDescriptor(fd);
    return failed(error);
  }
  Undoing closed([fd] { CloseDescriptor(fd); });
  auto state = std::make_shared<AcceptState>(&readiness_, fd, std::move(on_accept));
  closed.Done();
  auto listener = std::make_unique<TcpListener>(&loop_, fd, state);
  if (const int error = state->Start(); error != 0) return failed(error);
  return listener;
}

std::unique_ptr<ConnectAttempt> TcpFabric::ConnectWith(const StreamOptions& options, const IpEndpoint& local,
                                                       const IpEndpoint& remote, ConnectCallback on_done) {
  auto state = std::make_shared<ConnectState>(&readiness_, options, local, remote, std::move(on_done));
  auto attempt = std::make_unique<TcpConnectAttempt>(&loop_, state);
  loop_.Post([state = std::move(state)] { state->Start(); });
  return attempt;
}

std::unique_ptr<Llp> TcpFabric::RecordsOver(std::unique_ptr<Stream> stream, const RecordOptions& options,
                                            const Carriage& carriage) {
  return std::make_unique<MpaLlp>(std::move(stream), options, carriage);
}

Result<std::unique_ptr<PortHold>, FabricError> TcpFabric::HoldPort(const StreamOptions& options,
                                                                   const IpEndpoint& local) {
  const int fd = BoundSocket(options, local);
  if (fd < 0) return Err(MakeError(-fd, "bind to " + local.ToString()));
  Undoing closed([fd] { CloseDescriptor(fd); });
  auto hold = std::make_unique<TcpPortHold>(fd);
  closed.Done();
  return hold;
}

std::optional<IpEndpoint> TcpFabric::RouteTo(const IpEndpoint& remote) const {
  sockaddr_storage address;
  // A port of 0 is refused by some kernels; which one it is makes no difference to the route.
  const socklen_t length = remote.WithPort(remote.port != 0 ? remote.port : 1).ToSockaddr(&address);
  if (length == 0) return std::nullopt;
  // Connecting a datagram socket looks the route up and sends nothing.
  const int fd = socket(address.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  // That says nothing about the route. A family that the system has not has none.
  if (fd < 0 && errno != EAFNOSUPPORT) throw std::system_error(errno, std::generic_category(), "socket");
  if (fd < 0) return std::nullopt;
  std::optional<IpEndpoint> source;
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), length) == 0)
    source = SocketEndpoint(fd, false).WithPort(0);
  close(fd);
  if (source && source->IsUnspecified()) return std::nullopt;
  return source;
}

uint32_t TcpFabric::LinkMtu(const IpEndpoint& local) const {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return kEthernetMtu;
  ifreq link{};
  for (const ifaddrs* entry = list; entry != nullptr && link.ifr_name[0] == 0; entry = entry->ifa_next) {
    const auto address = IpEndpoint::FromSockaddr(entry->ifa_addr);
    if (address && *address == local.WithPort(0)) std::strncpy(link.ifr_name, entry->ifa_name, IFNAMSIZ - 1);
  }
  freeifaddrs(list);
  const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return kEthernetMtu;
  const bool is_known = link.ifr_name[0] != 0 && ioctl(fd, SIOCGIFMTU, &link) == 0 && link.ifr_mtu > 0;
  close(fd);
  return is_known ? static_cast<uint32_t>(link.ifr_mtu) : kEthernetMtu;
}

std::optional<uint32_t> TcpFabric::UserListeningAt(const IpEndpoint& local) const {
  return IsOfThisHost(local) ? UserOfListener(local) : std::nullopt;
}

std::unique_ptr<Notifier> TcpFabric::CreateNotifier() {
  std::unique_ptr<EventFd> event = EventFd::Create();
  if (event == nullptr) return nullptr;
  return std::make_unique<LeadingNotifier>(&leadership_, std::move(event));
}

std::unique_ptr<EventLoop::Companion> TcpFabric::CreateCompanion() {
  return LeadingCompanion::Create(&leadership_);
}

bool TcpFabric::Wait(std::unique_lock<std::mutex>& lock, std::condition_variable& changed,
                     const std::function<bool()>& done) {
  changed.wait(lock, done);
  return true;
}

}  // namespace stagecoach::emu
