#include "emu/backend/tcp/tcp_fabric.h"

#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <asio/posix/stream_descriptor.hpp>
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
#include "emu/backend/tcp/peer_user.h"
#include "emu/backend/tcp/short_slices.h"
#include "emu/fabric/event_fd.h"
#include "emu/fabric/insist_loop.h"
#include "emu/llp/mpa/mpa_llp.h"

namespace stagecoach::emu {
namespace {

// How long a listener rests after an accept that failed for want of descriptors or memory.
constexpr Duration kAcceptBackoff = 50ms;
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

// A socket that Asio waits for. Lives on the loop's thread, kept by the handlers that wait.
class AcceptState : public std::enable_shared_from_this<AcceptState> {
 public:
  AcceptState(AsioLoop* loop, ReadinessSet* readiness, int fd, Fabric::AcceptCallback on_accept)
      : loop_(loop), readiness_(readiness), socket_(loop->context(), fd), on_accept_(std::move(on_accept)) {}
  ~AcceptState() { ForgetDescriptor(socket_.native_handle()); }

  CallbackGate& gate() { return gate_; }

  void Wait() {
    if (gate_.closed()) return;
    socket_.async_wait(asio::posix::stream_descriptor::wait_read,
                       HandlerMemory::Bind(wait_memory_, [self = shared_from_this()](const asio::error_code& error) {
                         if (!error) self->AcceptReady();
                       }));
  }

  void End() {
    asio::error_code ignored;
    ForgetDescriptor(socket_.native_handle());
    socket_.close(ignored);
    if (backoff_ != 0) loop_->Cancel(backoff_);
  }

 private:
  void AcceptReady() {
    try {
      AcceptSome();
    } catch (const std::bad_alloc&) {
      // The stream it was for is closed. The next ones wait for better times.
      STAGECOACH_MARK("tcp.listener_finds_no_memory");
      Backoff();
    }
  }

  void AcceptSome() {
    for (int i = 0; i < kAcceptBatch && !gate_.closed(); ++i) {
      const int fd = accept4(socket_.native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      if (fd >= 0) {
        Deliver(fd);
        continue;
      }
      switch (errno) {
        case EAGAIN:
          Wait();
          return;
        case EMFILE:
        case ENFILE:
        case ENOBUFS:
        case ENOMEM:
          if (STAGECOACH_MUTANT("listener-deaf-after-emfile",
                                "a listener that lacked a descriptor takes nobody more")) {
            return;
          }
          // The connection stays in the backlog and the socket readable: waiting for it again would spin.
          Backoff();
          return;
        case EINTR:
          break;
        default:
          // Linux reports errors of the new connection here (accept(2)): that one is lost, the listener is well. A
          // listener that is not would report the same for ever, so this too ends the batch, and comes back through the
          // timer.
          if (errno != ECONNABORTED && errno != EPROTO) {
            Backoff();
            return;
          }
      }
    }
    Wait();
  }

  void Deliver(int fd) {
    std::unique_ptr<Stream> stream = TcpStream::Adopt(readiness_, fd);
    if (stream == nullptr || !gate_.Enter()) return;
    const Undoing leaving([this] { gate_.Leave(); });
    on_accept_(std::move(stream));
  }

  void Backoff() {
    try {
      backoff_ = InsistAt(*loop_, loop_->Now() + kAcceptBackoff, [self = shared_from_this()] {
        self->backoff_ = 0;
        self->Wait();
      });
    } catch (const std::bad_alloc&) {
      STAGECOACH_MARK("tcp.listener_finds_no_memory_for_a_timer");
      std::this_thread::sleep_for(kWantPause);
      Wait();
    }
  }

  AsioLoop* const loop_;
  ReadinessSet* const readiness_;
  asio::posix::stream_descriptor socket_;
  const std::shared_ptr<HandlerMemory> wait_memory_ = std::make_shared<HandlerMemory>();
  const Fabric::AcceptCallback on_accept_;
  EventLoop::TimerId backoff_ = 0;
  CallbackGate gate_;
};

// What is left when not even the reserve helps ends by itself when its socket has something to say: its gate is closed.
template <typename State>
void EndSoon(AsioLoop& loop, std::shared_ptr<State> state) {
  try {
    InsistPost(loop, [state = std::move(state)] { state->End(); });
  } catch (const std::bad_alloc&) {
    STAGECOACH_MARK("tcp.nobody_to_end_a_socket");
  }
}

class TcpListener final : public Listener {
 public:
  TcpListener(AsioLoop* loop, int fd, std::shared_ptr<AcceptState> state)
      : loop_(loop), fd_(fd), local_(SocketEndpoint(fd, false)), state_(std::move(state)) {}
  ~TcpListener() override {
    state_->gate().Close(loop_->OnLoopThread());
    // Frees the port now; the loop closes the descriptor when it comes to it.
    shutdown(fd_, SHUT_RDWR);
    EndSoon(*loop_, std::move(state_));
  }
  IpEndpoint local() const override { return local_; }

 private:
  AsioLoop* const loop_;
  const int fd_;
  const IpEndpoint local_;
  std::shared_ptr<AcceptState> state_;
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

class ConnectState : public std::enable_shared_from_this<ConnectState> {
 public:
  ConnectState(AsioLoop* loop, ReadinessSet* readiness, const StreamOptions& options, const IpEndpoint& local,
               const IpEndpoint& remote, Fabric::ConnectCallback on_done)
      : readiness_(readiness),
        options_(options),
        local_(local),
        remote_(remote),
        socket_(loop->context()),
        on_done_(std::move(on_done)) {}
  ~ConnectState() { ForgetDescriptor(socket_.native_handle()); }

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
    asio::error_code ignored;
    ForgetDescriptor(socket_.native_handle());
    socket_.close(ignored);
  }

 private:
  void Begin() {
    sockaddr_storage address;
    const socklen_t length = remote_.ToSockaddr(&address);
    if (length == 0) return Fail(EDESTADDRREQ);
    const int fd = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP);
    if (fd < 0) return Fail(errno);
    KeepFromChildren(fd);
    asio::error_code error;
    socket_.assign(fd, error);
    if (error) {
      CloseDescriptor(fd);
      return Fail(error.value());
    }
    Apply(options_, fd, address.ss_family);
    if (const int bind_error = Bind(fd)) return Fail(bind_error);
    if (connect(fd, reinterpret_cast<const sockaddr*>(&address), length) == 0) return Connected();
    if (errno != EINPROGRESS && errno != EINTR) return Fail(errno);
    socket_.async_wait(asio::posix::stream_descriptor::wait_write,
                       [self = shared_from_this()](const asio::error_code& wait_error) {
                         if (!wait_error) self->Connected();
                       });
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
    const int fd = socket_.native_handle();
    int error = 0;
    socklen_t length = sizeof error;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
    if (error != 0) return Fail(error);
    // Where nobody listens, a socket that was given the very port it calls, or has it, meets itself (RFC 9293 section
    // 3.5, simultaneous open).
    if (SocketEndpoint(fd, false) == SocketEndpoint(fd, true)) {
      const linger reset{1, 0};  // leaves nothing that would keep a listener from the port
      setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
      return Fail(ECONNREFUSED);
    }
    // Out of Asio's reactor: from here on only the readiness set knows the socket.
    std::unique_ptr<Stream> stream = TcpStream::Adopt(readiness_, socket_.release());
    if (stream == nullptr) return Fail(errno);
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
  asio::posix::stream_descriptor socket_;
  const Fabric::ConnectCallback on_done_;
  CallbackGate gate_;
};

class TcpConnectAttempt final : public ConnectAttempt {
 public:
  TcpConnectAttempt(AsioLoop* loop, std::shared_ptr<ConnectState> state) : loop_(loop), state_(std::move(state)) {}
  ~TcpConnectAttempt() override {
    state_->gate().Close(loop_->OnLoopThread());
    EndSoon(*loop_, std::move(state_));
  }

 private:
  AsioLoop* const loop_;
  std::shared_ptr<ConnectState> state_;
};

class EventFdNotifier final : public Notifier {
 public:
  explicit EventFdNotifier(std::unique_ptr<EventFd> event) : event_(std::move(event)) {}
  int fd() const override { return event_->fd(); }
  void Signal() override { event_->Signal(); }
  bool Consume() override { return event_->Consume(); }
  int Take() override { return event_->Take(); }

 private:
  const std::unique_ptr<EventFd> event_;
};

}  // namespace

TcpFabric::TcpFabric()
    : readiness_(&loop_), ports_(std::make_unique<AbstractNames>(&readiness_), FirstPort()), addresses_(&loop_) {
  KeepReserve();
  const SignalsBlocked signals_blocked;
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "stagecoach-nic");
    // Programs wait for it, also those that do nothing but look at memory. Where it cannot have them it does without.
    TakeSlices(kShortestSlice);
    const Unseen unseen;
    RunLoop();
  });
}

// Whoever is called from the loop ends what it was at when there is no memory or descriptor for it, and says so. What
// does not, goes without the one step; the loop goes on.
void TcpFabric::RunLoop() {
  readiness_.Start();
  for (;;) {
    try {
      return loop_.Run();
    } catch (const std::bad_alloc&) {
      STAGECOACH_MARK("tcp.loop_finds_no_memory");
    } catch (const std::system_error&) {
      STAGECOACH_MARK("tcp.loop_finds_no_descriptor");
    }
    std::this_thread::sleep_for(kWantPause);
  }
}

TcpFabric::~TcpFabric() {
  STAGECOACH_CHECK(!loop_.OnLoopThread());
  loop_.Stop();
  thread_.join();
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
  auto state = std::make_shared<AcceptState>(&loop_, &readiness_, fd, std::move(on_accept));
  closed.Done();
  auto listener = std::make_unique<TcpListener>(&loop_, fd, state);
  loop_.Post([state = std::move(state)] { state->Wait(); });
  return listener;
}

std::unique_ptr<ConnectAttempt> TcpFabric::ConnectWith(const StreamOptions& options, const IpEndpoint& local,
                                                       const IpEndpoint& remote, ConnectCallback on_done) {
  auto state = std::make_shared<ConnectState>(&loop_, &readiness_, options, local, remote, std::move(on_done));
  auto attempt = std::make_unique<TcpConnectAttempt>(&loop_, state);
  loop_.Post([state = std::move(state)] { state->Start(); });
  return attempt;
}

std::unique_ptr<Llp> TcpFabric::RecordsOver(std::unique_ptr<Stream> stream, const RecordOptions& options) {
  return std::make_unique<MpaLlp>(std::move(stream), options);
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
  return std::make_unique<EventFdNotifier>(std::move(event));
}

bool TcpFabric::Wait(std::unique_lock<std::mutex>& lock, std::condition_variable& changed,
                     const std::function<bool()>& done) {
  changed.wait(lock, done);
  return true;
}

}  // namespace stagecoach::emu
