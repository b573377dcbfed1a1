#include "emu/backend/tcp/abstract_names.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/check.h"
#include "base/fork/fork.h"

namespace stagecoach::emu {
namespace {

class Descriptor final : public PortSpace::Name {
 public:
  // A child would keep the name of a parent that is gone.
  explicit Descriptor(int fd) : fd_(KeepFromChildren(fd)) {}
  ~Descriptor() override { CloseDescriptor(fd_); }

 private:
  const int fd_;
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
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return Err(int{errno});
  auto taken = std::make_unique<Descriptor>(fd);
  sockaddr_un address;
  const socklen_t length = AddressOf(name, &address);
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address), length) != 0) return Err(int{errno});
  return taken;
}

bool AbstractNames::IsTaken(const std::string& name) const {
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  const Descriptor closer(fd);
  sockaddr_un address;
  const socklen_t length = AddressOf(name, &address);
  return connect(fd, reinterpret_cast<const sockaddr*>(&address), length) == 0;
}

}  // namespace stagecoach::emu
