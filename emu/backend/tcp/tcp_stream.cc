#include "emu/backend/tcp/tcp_stream.h"

#include <errno.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <system_error>
#include <thread>

#include "base/fork/fork.h"
#include "base/insist.h"
#include "base/mark.h"

namespace stagecoach::emu {
namespace {

// Parts moved by one system call. More gain nothing: a record has a handful.
constexpr size_t kMaxParts = 64;
constexpr Duration kArmedLater = 50ms;
// RFC 1122 section 4.2.2.6: what every TCP can carry; used when the kernel does not say.
constexpr size_t kDefaultSegmentSize = 536;

template <typename Bytes>
size_t ToIovec(std::span<const Bytes> parts, iovec (&out)[kMaxParts]) {
  size_t count = 0;
  for (const Bytes& part : parts) {
    if (part.empty()) continue;
    if (count == kMaxParts) break;
    out[count++] = {const_cast<std::byte*>(part.data()), part.size()};
  }
  return count;
}

IoResult Failed(int error) {
  if (error == EAGAIN || error == EWOULDBLOCK) return {IoStatus::kWouldBlock, 0, 0};
  return {IoStatus::kError, 0, error};
}

}  // namespace

void ReadinessSet::Member::Arm(bool readable, bool writable) {
  const uint32_t wanted = (readable ? EPOLLIN : 0u) | (writable ? EPOLLOUT : 0u);
  if (wanted == 0 && armed_.load(std::memory_order_relaxed) == 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  const uint32_t interest = watcher_ != nullptr ? wanted : 0;
  armed_.store(interest, std::memory_order_relaxed);
  // While the watcher is called the end of the call settles it.
  if (interest != 0 || !calling_) Tell(interest);
}

void ReadinessSet::Member::Tell(uint32_t interest) {
  if (removed_ || told_ == interest) return;
  told_ = interest;
  // The kernel adds EPOLLHUP and EPOLLERR whatever is asked; EPOLLONESHOT keeps a dead and disarmed socket from being
  // reported for ever.
  set_->loop_->Modify(fd_, *this, interest != 0 ? interest : static_cast<uint32_t>(EPOLLONESHOT));
}

void ReadinessSet::Member::SetWatcher(ReadyWatcher* watcher) {
  if (watcher == nullptr) Arm(false, false);
  std::unique_lock<std::mutex> lock(mutex_);
  if (watcher_ == watcher && watcher != nullptr) return;
  watcher_ = watcher;
  // An Arm that came between the disarming above and here found the old watcher; what it armed must not reach a later
  // one.
  if (watcher == nullptr) {
    armed_.store(0, std::memory_order_relaxed);
    if (!calling_) Tell(0);
  }
  if (set_->loop_->OnLoopThread()) return;
  idle_.wait(lock, [this] { return !calling_; });
}

std::shared_ptr<ReadinessSet::Member> ReadinessSet::Add(int fd) {
  try {
    auto member = std::make_shared<Member>(this, fd);
    if (const int error = loop_->Add(fd, EPOLLONESHOT, member); error != 0) {
      errno = error;
      return nullptr;
    }
    return member;
  } catch (const std::bad_alloc&) {
    errno = ENOMEM;
    return nullptr;
  }
}

void ReadinessSet::Remove(const std::shared_ptr<Member>& member) {
  member->SetWatcher(nullptr);
  std::lock_guard<std::mutex> lock(member->mutex_);
  member->removed_ = true;
  loop_->Remove(member->fd_, *member);
}

void ReadinessSet::ArmLater(const std::shared_ptr<Member>& member) {
  loop_->At(loop_->Now() + kArmedLater, [weak = std::weak_ptr<Member>(member)] {
    if (const auto waiting = weak.lock()) waiting->Arm(true, false);
  });
}

void ReadinessSet::Member::OnEvents(uint32_t) {
  std::unique_lock<std::mutex> lock(mutex_);
  ReadyWatcher* const watcher = watcher_;
  if (watcher == nullptr || armed_.load(std::memory_order_relaxed) == 0) return Tell(0);
  const uint32_t was_armed = armed_.exchange(0, std::memory_order_relaxed);
  calling_ = true;
  lock.unlock();
  const bool done = Call(watcher);
  lock.lock();
  if (!done && watcher_ == watcher) armed_.store(was_armed, std::memory_order_relaxed);
  Tell(armed_.load(std::memory_order_relaxed));
  calling_ = false;
  // Under the mutex: whoever waits may free what follows, but not the member, which the loop holds.
  idle_.notify_all();
}

// False: for want of memory or of a descriptor it is to be called again. The pause lets others give some back.
bool ReadinessSet::Call(ReadyWatcher* watcher) {
  try {
    watcher->OnReady();
    return true;
  } catch (const std::bad_alloc&) {
    STAGECOACH_MARK("tcp.watcher_finds_no_memory");
  } catch (const std::system_error&) {
    STAGECOACH_MARK("tcp.watcher_finds_no_descriptor");
  }
  std::this_thread::sleep_for(kWantPause);
  return false;
}

std::unique_ptr<TcpStream> TcpStream::Adopt(ReadinessSet* set, int fd) {
  const int on = 1;
  // Records are small and latency is the point; a failure here would only make things slower.
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  KeepFromChildren(fd);
  const IpEndpoint local = SocketEndpoint(fd, false);
  const IpEndpoint remote = SocketEndpoint(fd, true);
  std::shared_ptr<ReadinessSet::Member> member;
  int error = ENOTCONN;  // no peer: it was gone before we looked
  if (remote.family != IpEndpoint::Family::kNone) {
    member = set->Add(fd);
    error = errno;
  }
  if (member == nullptr) {
    CloseDescriptor(fd);
    errno = error;
    return nullptr;
  }
  TcpStream* const stream = new (std::nothrow) TcpStream(set, fd, member, local, remote);
  if (stream == nullptr) {
    set->Remove(member);
    CloseDescriptor(fd);
    errno = ENOMEM;
  }
  return std::unique_ptr<TcpStream>(stream);
}

TcpStream::TcpStream(ReadinessSet* set, int fd, std::shared_ptr<ReadinessSet::Member> member, const IpEndpoint& local,
                     const IpEndpoint& remote)
    : set_(set), fd_(fd), member_(std::move(member)), local_(local), remote_(remote) {}

TcpStream::~TcpStream() {
  set_->Remove(member_);
  Shutdown();
  CloseDescriptor(fd_);
}

IoResult TcpStream::Read(std::span<const MutableBytes> into) {
  if (aborted_) return {IoStatus::kError, 0, ECONNABORTED};
  iovec parts[kMaxParts];
  const size_t count = ToIovec(into, parts);
  if (count == 0) return {};
  ssize_t n;
  do {
    // A poller asks again and again, and mostly with one part: recv goes past the file layer that readv goes through.
    n = count == 1 ? recv(fd_, parts[0].iov_base, parts[0].iov_len, 0) : readv(fd_, parts, static_cast<int>(count));
  } while (n < 0 && errno == EINTR);
  if (n > 0) return {IoStatus::kOk, static_cast<size_t>(n), 0};
  if (n == 0) return {IoStatus::kEof, 0, 0};
  return Failed(errno);
}

IoResult TcpStream::Write(std::span<const ConstBytes> from) {
  if (aborted_) return {IoStatus::kError, 0, ECONNABORTED};
  if (shut_down_) return {IoStatus::kError, 0, EPIPE};
  iovec parts[kMaxParts];
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = ToIovec(from, parts);
  if (message.msg_iovlen == 0) return {};
  ssize_t n;
  do {
    n = sendmsg(fd_, &message, MSG_NOSIGNAL);
  } while (n < 0 && errno == EINTR);
  if (n > 0) {
    written_ += static_cast<uint64_t>(n);
    return {IoStatus::kOk, static_cast<size_t>(n), 0};
  }
  if (n == 0) return {};
  return Failed(errno);
}

void TcpStream::Shutdown() {
  if (shut_down_ || aborted_) return;
  shut_down_ = true;
  // Not close: another process may hold a copy of the descriptor since a fork, and the peer would never learn.
  shutdown(fd_, SHUT_WR);
}

void TcpStream::Abort() {
  if (aborted_) return;
  aborted_ = true;
  // Linux resets a connection at once when it is "connected" to AF_UNSPEC, copies of the descriptor in forked children
  // notwithstanding. Should that fail, the linger time of 0 makes close() do it.
  const linger reset{1, 0};
  setsockopt(fd_, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
  sockaddr nobody{};
  nobody.sa_family = AF_UNSPEC;
  member_->ChangeSocket([&] { connect(fd_, &nobody, sizeof nobody); });
}

Delivery TcpStream::delivery() const {
  Delivery delivery{.taken = written_, .is_complete = true, .host_answers = true};
  int under_way = 0;
  // tcp(7): SIOCOUTQ, not sent or not acknowledged.
  if (aborted_ || ioctl(fd_, SIOCOUTQ, &under_way) != 0 || under_way <= 0) return delivery;
  delivery.taken -= std::min(written_, static_cast<uint64_t>(under_way));
  delivery.is_complete = false;
  tcp_info info{};
  socklen_t length = sizeof info;
  if (getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return delivery;
  // Retransmissions, and questions whether its window is still closed, since the last acknowledgement of anything.
  delivery.host_answers = info.tcpi_retransmits == 0 && info.tcpi_probes == 0;
  return delivery;
}

size_t TcpStream::MaxSegmentSize() const {
  int size = 0;
  socklen_t length = sizeof size;
  if (getsockopt(fd_, IPPROTO_TCP, TCP_MAXSEG, &size, &length) != 0 || size <= 0) return kDefaultSegmentSize;
  return static_cast<size_t>(size);
}

IpEndpoint SocketEndpoint(int fd, bool peer) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  auto* const address = reinterpret_cast<sockaddr*>(&storage);
  if ((peer ? getpeername(fd, address, &length) : getsockname(fd, address, &length)) != 0) return {};
  IpEndpoint endpoint = IpEndpoint::FromSockaddr(address).value_or(IpEndpoint{});
  if (endpoint.family == IpEndpoint::Family::kIpv6 &&
      IN6_IS_ADDR_V4MAPPED(&reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr)) {
    IpEndpoint v4;
    v4.family = IpEndpoint::Family::kIpv4;
    v4.port = endpoint.port;
    std::copy(endpoint.address.begin() + 12, endpoint.address.end(), v4.address.begin());
    return v4;
  }
  return endpoint;
}

}  // namespace stagecoach::emu
