#include "emu/backend/tcp/abstract_names.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/check.h"
#include "base/fork/fork.h"

namespace stagecoach::emu {
namespace {

// How many may ask before those that have are sent away; the kernel allows less.
constexpr int kBacklog = 4096;
// Sent away in one turn of the loop.
constexpr int kBatch = 64;

class Descriptor {
 public:
  // A child would keep the name of a parent that is gone.
  explicit Descriptor(int fd) : fd_(KeepFromChildren(fd)) {}
  ~Descriptor() {
    if (fd_ >= 0) CloseDescriptor(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

class Listening final : public PortSpace::Name, public ReadyWatcher {
 public:
  Listening() = default;
  ~Listening() override {
    if (member_ != nullptr) set_->Remove(member_);
  }

  // False, with errno set.
  bool Open() {
    socket_.emplace(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    return socket_->fd() >= 0;
  }
  int fd() const { return socket_->fd(); }

  bool WatchIn(ReadinessSet* set) {
    set_ = set;
    member_ = set->Add(socket_->fd());
    if (member_ == nullptr) return false;
    member_->SetWatcher(this);
    member_->Arm(true, false);
    return true;
  }

  void OnReady() override {
    for (int i = 0; i < kBatch; ++i) {
      const int asker = accept4(socket_->fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      if (asker < 0 && errno == EAGAIN) break;
      // Without a descriptor to spare they stay, and nothing depends on it yet. To be woken at once would be for ever.
      if (asker < 0) return set_->ArmLater(member_);
      close(asker);
    }
    member_->Arm(true, false);
  }

 private:
  std::optional<Descriptor> socket_;
  ReadinessSet* set_ = nullptr;
  std::shared_ptr<ReadinessSet::Member> member_;
};

// Abstract names begin with a zero and need none at the end. The length goes with them.
socklen_t AddressOf(const std::string& name, sockaddr_un* address) {
  STAGECOACH_CHECK(name.size() < sizeof(address->sun_path));
  *address = {};
  address->sun_family = AF_UNIX;
  std::memcpy(address->sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

}  // namespace

Result<std::unique_ptr<PortSpace::Name>, int> AbstractNames::Take(const std::string& name) {
  auto taken = std::make_unique<Listening>();
  if (!taken->Open()) return Err(int{errno});
  sockaddr_un address;
  const socklen_t length = AddressOf(name, &address);
  if (bind(taken->fd(), reinterpret_cast<const sockaddr*>(&address), length) != 0) return Err(int{errno});
  if (listen(taken->fd(), kBacklog) != 0) return Err(int{errno});
  if (readiness_ != nullptr && !taken->WatchIn(readiness_)) return Err(int{errno});
  return taken;
}

std::optional<PortSpace::System::Owner> AbstractNames::OwnerOf(const std::string& name) const {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return std::nullopt;
  const Descriptor asker(fd);
  sockaddr_un address;
  const socklen_t length = AddressOf(name, &address);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), length) != 0) return std::nullopt;
  // Of who called listen(2), at that time.
  ucred listening{};
  socklen_t size = sizeof listening;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &listening, &size) != 0) return std::nullopt;
  return Owner{listening.uid, listening.pid};
}

}  // namespace stagecoach::emu
