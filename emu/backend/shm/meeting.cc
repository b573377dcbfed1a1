#include "emu/backend/shm/meeting.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/vfs.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <string>
#include <thread>
#include <utility>

#include "base/bytes.h"
#include "base/fork/fork.h"
#include "base/insist.h"
#include "base/undoing.h"
#include "emu/backend/tcp/peer_user.h"
#include "emu/backend/tcp/tcp_stream.h"
#include "emu/fabric/stream.h"
#include "emu/llp/shm/pass.h"
#include "emu/llp/shm/shm_llp.h"

namespace stagecoach::emu {
namespace {

// Whole, as hellos and as answers; the last byte is the version.
constexpr char kHello[] = "schello\1";
constexpr char kAnswer[] = "scmeet!\1";
constexpr size_t kMessageSize = 8;
// Who calls while this many, or what the system allows of them (somaxconn), have not been looked at goes without.
constexpr int kBacklog = 4096;
// Of these, for one stream: strangers keep a listener busy no longer than that.
constexpr int kMostAccepted = 256;
// Until there are descriptors again.
constexpr int kMostPauses = 100;

void Close(int fd) {
  if (fd >= 0) CloseDescriptor(fd);
}

socklen_t NameOf(const IpEndpoint& listener, sockaddr_un* address) {
  const std::string name = "stagecoach-shm/" + listener.ToString();
  *address = {};
  address->sun_family = AF_UNIX;
  std::memcpy(address->sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

int NewSocket() {
  return KeepFromChildren(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

// What says which socket this is, and gives no access to it; -1 where there is no /proc.
int ProofOf(int socket) {
  const std::string path = "/proc/self/fd/" + std::to_string(socket);
  return KeepFromChildren(open(path.c_str(), O_PATH | O_CLOEXEC));
}

// The user who is at the other end of a Unix-domain socket: who connected, or who listens.
std::optional<uint32_t> UserAcross(int socket) {
  ucred user{};
  socklen_t size = sizeof user;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &user, &size) != 0) return std::nullopt;
  return user.uid;
}

std::optional<SocketOwner> OwnerOfOtherEnd(int stream) {
  return OwnerOfSocket(SocketEndpoint(stream, true), SocketEndpoint(stream, false));
}

// Whether `proof` is of the socket that has this owner, and was passed by its user over `socket`.
bool IsProven(int proof, int socket, const std::optional<SocketOwner>& owner) {
  struct stat file;
  struct statfs system;
  if (fstat(proof, &file) != 0 || fstatfs(proof, &system) != 0) return false;
  if (!S_ISSOCK(file.st_mode) || system.f_type != SOCKFS_MAGIC) return false;
  return owner && owner->inode == file.st_ino && UserAcross(socket) == owner->user;
}

// 0, or an errno.
int Say(int socket, const char* what, int half, int stream) {
  const std::array<int, 2> passed = {half, ProofOf(stream)};
  if (passed[1] < 0) return errno;
  const int error = PassDescriptors(socket, AsBytes(what, kMessageSize), passed);
  CloseDescriptor(passed[1]);
  return error;
}

// 0, or an errno; EPROTO as well for who says something else. What was passed is the caller's.
int Take(int socket, const char* what, int* half, int* proof) {
  std::array<std::byte, kMessageSize> message{};
  std::array<int, 2> passed{};
  if (const auto taken = TakeDescriptors(socket, message, passed); !taken) return taken.error();
  if (std::memcmp(message.data(), what, kMessageSize) == 0) {
    *half = passed[0];
    *proof = passed[1];
    return 0;
  }
  for (const int fd : passed) CloseDescriptor(fd);
  return EPROTO;
}

bool IsWelcome(uint32_t user, ShmUsers users) {
  return users == ShmUsers::kAny || user == geteuid();
}

// Why nothing was found out, or nobody: it may be that there was no descriptor to ask with.
ShmObstacle OrNoDescriptor(ShmObstacle obstacle) {
  const int fd = NewSocket();
  if (fd < 0) return ObstacleOf(errno);
  CloseDescriptor(fd);
  return obstacle;
}

// To who listens for `called`, by one of the names that it may have: its address, or all. Its user has to be the one
// who listens at the address itself: the other end of a stream may not have been accepted yet, and then is nobody's.
Result<int, ShmObstacle> Connect(const IpEndpoint& called, ShmUsers users) {
  const auto user = UserOfListener(called);
  if (!user) return Err(OrNoDescriptor(ShmObstacle::kNotOffered));
  if (!IsWelcome(*user, users)) return Err(ShmObstacle::kOtherUser);
  for (const IpEndpoint& each :
       {called, *IpEndpoint::Parse("0.0.0.0", called.port), *IpEndpoint::Parse("::", called.port)}) {
    const int fd = NewSocket();
    if (fd < 0) return Err(ObstacleOf(errno));
    sockaddr_un address;
    const socklen_t length = NameOf(each, &address);
    if (connect(fd, reinterpret_cast<const sockaddr*>(&address), length) == 0 && UserAcross(fd) == user) return fd;
    CloseDescriptor(fd);
  }
  return Err(ShmObstacle::kNotOffered);
}

}  // namespace

std::optional<ShmObstacle> WhyNotShm() {
  const auto half = OwnHalf::Create();
  if (!half) return ObstacleOf(half.error().error);
  const int socket = NewSocket();
  const int proof = socket < 0 ? -1 : ProofOf(socket);
  const int error = errno;
  Close(proof);
  Close(socket);
  if (proof < 0) return ObstacleOf(error);
  return std::nullopt;
}

// --- The caller ---

Result<std::unique_ptr<Meeting>, ShmObstacle> Meeting::Call(int stream_socket, const MeetingOptions& options) {
  const IpEndpoint called = SocketEndpoint(stream_socket, true);
  if (called.family == IpEndpoint::Family::kNone || !IsOfThisHost(called)) return Err(ShmObstacle::kOtherHost);
  const auto socket = Connect(called, options.users);
  if (!socket) return Err(socket.error());
  Undoing closed([fd = *socket] { CloseDescriptor(fd); });
  auto own = OwnHalf::Create(options.capacity);
  if (!own) return Err(ObstacleOf(own.error().error));
  own->Offer(*socket);
  auto meeting = std::unique_ptr<Meeting>(new Meeting(std::move(*own), -1));
  meeting->spare_ = KeepFromChildren(fcntl(meeting->own_.fd(), F_DUPFD_CLOEXEC, 0));
  if (meeting->spare_ < 0) return Err(ObstacleOf(errno));
  const int error = Say(*socket, kHello, meeting->own_.fd(), stream_socket);
  if (error != 0) return Err(ObstacleOf(error));
  closed.Done();
  meeting->socket_ = *socket;
  return meeting;
}

Meeting::~Meeting() {
  Close(spare_);
  Close(socket_);
}

Meeting::Answer Meeting::Hear(int stream_socket) {
  own_.Passed();
  Close(std::exchange(spare_, -1));
  // First, as nothing can be taken back once the answer is taken.
  const auto owner = Insist([&] { return OwnerOfOtherEnd(stream_socket); });
  int half = -1;
  int proof = -1;
  int error = Take(socket_, kAnswer, &half, &proof);
  // Another thread has been quicker with what was spared.
  for (int i = 0; error == EMFILE && i < kMostPauses; ++i) {
    std::this_thread::sleep_for(kWantPause);
    error = Take(socket_, kAnswer, &half, &proof);
  }
  if (error != 0) {
    // A listener that does not take us leaves the hello unread when it closes.
    return error == EAGAIN || error == EPIPE || error == ECONNRESET ? Answer::kNone : Answer::kBroken;
  }
  const bool is_proven = IsProven(proof, socket_, owner);
  auto peer = PeerHalf::Map(half);
  CloseDescriptor(half);
  CloseDescriptor(proof);
  if (!is_proven || !peer) {
    // Whoever has answered, written what there was to say and closed the stream does not wait for us.
    const auto user =
        Insist([&] { return UserOfSocket(SocketEndpoint(stream_socket, true), SocketEndpoint(stream_socket, false)); });
    return user == Stream::kNoUser ? Answer::kNone : Answer::kBroken;
  }
  peer_.emplace(std::move(*peer));
  return Answer::kMet;
}

std::unique_ptr<Llp> Meeting::Join(EpollLoop& loop, const RecordOptions& options) {
  return ShmLlp::Create(loop, std::move(own_), std::move(*peer_), std::exchange(socket_, -1), options);
}

// --- The listener ---

void MeetingPoint::Open(const IpEndpoint& local) {
  sockaddr_un address;
  const socklen_t length = NameOf(local, &address);
  int fd = NewSocket();
  const bool is_open =
      fd >= 0 && bind(fd, reinterpret_cast<const sockaddr*>(&address), length) == 0 && listen(fd, kBacklog) == 0;
  const int error = errno;
  std::lock_guard lock(mutex_);
  if (!is_open) {
    obstacle_ = error == EADDRINUSE ? ShmObstacle::kNameTaken : ObstacleOf(error);
    Close(std::exchange(fd, -1));
  }
  socket_ = fd;
}

MeetingPoint::~MeetingPoint() {
  for (const Caller& each : callers_) Dismiss(each);
  Close(socket_);
}

void MeetingPoint::Dismiss(const Caller& caller) {
  for (const int fd : {caller.half, caller.proof, caller.socket}) Close(fd);
}

// False: it is of no use, or not any more.
bool MeetingPoint::HasCome(Caller& caller) {
  if (caller.proof < 0) {
    const int error = emu::Take(caller.socket, kHello, &caller.half, &caller.proof);
    return error == 0 || error == EAGAIN;
  }
  // Callers say no more, but they may have gone.
  std::byte more;
  return recv(caller.socket, &more, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN;
}

// One more caller. False: there is none.
bool MeetingPoint::Accept() {
  callers_.emplace_back();
  callers_.back().socket = KeepFromChildren(accept4(socket_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (callers_.back().socket < 0) {
    callers_.pop_back();
    return false;
  }
  if (callers_.size() > kMostWaiting) {
    Dismiss(callers_.front());
    callers_.pop_front();
  }
  return true;
}

// Takes the one who has this socket from among those who wait: first those that are here, then, one by one, those that
// the system has.
std::optional<MeetingPoint::Caller> MeetingPoint::Find(const std::optional<SocketOwner>& owner) {
  auto next = callers_.begin();
  for (int accepted = 0;;) {
    while (next != callers_.end()) {
      const auto each = next++;
      const bool has_come = HasCome(*each);
      if (has_come && each->proof >= 0 && IsProven(each->proof, each->socket, owner)) {
        const Caller found = *each;
        callers_.erase(each);
        return found;
      }
      if (has_come) continue;
      Dismiss(*each);
      callers_.erase(each);
    }
    if (accepted++ == kMostAccepted || !Accept()) return std::nullopt;
    next = std::prev(callers_.end());
  }
}

bool MeetingPoint::Tidy() {
  std::lock_guard lock(mutex_);
  callers_.remove_if([](Caller& each) {
    const bool is_gone = !HasCome(each);
    if (is_gone) Dismiss(each);
    return is_gone;
  });
  is_looked_after_ = !callers_.empty();
  return is_looked_after_;
}

bool MeetingPoint::IsUntidy() {
  std::lock_guard lock(mutex_);
  return !callers_.empty() && !std::exchange(is_looked_after_, true);
}

Result<std::unique_ptr<Meeting>, ShmObstacle> MeetingPoint::Take(int stream_socket, const MeetingOptions& options) {
  std::lock_guard lock(mutex_);
  if (socket_ < 0) return Err(obstacle_);
  const auto owner = OwnerOfOtherEnd(stream_socket);
  if (owner && !IsWelcome(owner->user, options.users)) return Err(ShmObstacle::kOtherUser);
  const std::optional<Caller> caller = Find(owner);
  if (!caller) {
    const IpEndpoint remote = SocketEndpoint(stream_socket, true);
    // Whoever has gone already has no address.
    const bool is_elsewhere = remote.family != IpEndpoint::Family::kNone && !IsOfThisHost(remote);
    return Err(is_elsewhere ? ShmObstacle::kOtherHost : OrNoDescriptor(ShmObstacle::kNotAsked));
  }
  Undoing dismissed([&caller] { Dismiss(*caller); });
  auto meeting = Answer(*caller, stream_socket, options.capacity);
  if (meeting) dismissed.Done();
  return meeting;
}

Result<std::unique_ptr<Meeting>, ShmObstacle> MeetingPoint::Answer(const Caller& caller, int stream_socket,
                                                                   size_t capacity) {
  auto peer = PeerHalf::Map(caller.half);
  if (!peer) {
    return Err(peer.error().fault == HalfFault::kSystem ? ObstacleOf(peer.error().error) : ShmObstacle::kUnfitOffer);
  }
  auto own = OwnHalf::Create(capacity);
  if (!own) return Err(ObstacleOf(own.error().error));
  own->Offer(caller.socket);
  // Once it is said that we have met, nothing may be missing.
  auto meeting = std::unique_ptr<Meeting>(new Meeting(std::move(*own), -1));
  if (const int error = Say(caller.socket, kAnswer, meeting->own_.fd(), stream_socket); error != 0) {
    return Err(error == EPIPE || error == ECONNRESET ? ShmObstacle::kNotAsked : ObstacleOf(error));
  }
  meeting->socket_ = caller.socket;
  meeting->peer_.emplace(std::move(*peer));
  meeting->own_.Passed();
  Close(caller.half);
  Close(caller.proof);
  return meeting;
}

}  // namespace stagecoach::emu
