// Files of the kernel's about devices. Those of this device are answered here, whether there are such files or not; of
// others the files themselves are read.

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <system_error>

#include "verbs_shim/emulated/objects.h"
#include "verbs_shim/emulated/sysfs_tree.h"

namespace stagecoach::verbs::emulated {
namespace {

// The bytes of a file of this device's; nothing: it has none of that name.
std::optional<std::string> OwnFile(const std::string& path) {
  const std::string name = std::filesystem::path(path).lexically_normal().string();
  // What is elsewhere is no reason to start a device.
  if (!name.starts_with(SysfsPath() + "/class/infiniband")) return std::nullopt;
  emu::Host& host = emu::World::Current().current_host();
  if (host.nic().failed()) return std::nullopt;
  const std::unique_ptr<ibv_context, decltype(&ibv_close_device)> context(ibv_open_device(&ApiOf(host).device),
                                                                          ibv_close_device);
  const auto fail = [] { throw std::system_error(errno, std::generic_category()); };
  if (context == nullptr) fail();
  errno = 0;
  std::optional<std::string> text;
  for (SysfsFile& file : SysfsFiles(context.get())) {
    if (name == SysfsPath() + "/" + file.path) text = std::move(file.text);
  }
  // It is there, and could not be made.
  if (!text && errno == ENOMEM) fail();
  return text;
}

// -1 and errno, as read(2).
ssize_t ReadFile(const std::string& path, char* buffer, size_t size) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  const ssize_t length = ::read(fd, buffer, size);
  const int error = errno;
  ::close(fd);
  errno = error;
  return length;
}

}  // namespace
}  // namespace stagecoach::verbs::emulated

using namespace stagecoach::verbs::emulated;  // NOLINT: the entry points stand in the global namespace

extern "C" {

const char* ibv_get_sysfs_path(void) {
  return PointerEntry([&]() -> const char* { return SysfsPath().c_str(); });
}

// The first bytes of DIRECTORY/FILE, without the end of the line: how many, or -1 and errno.
int ibv_read_sysfs_file(const char* directory, const char* file, char* buffer, size_t size) {
  return MinusOneEntry([&]() -> int {
    if (size == 0) return Answer(EINVAL);
    const std::string path = std::string(directory) + "/" + file;
    const std::optional<std::string> own = OwnFile(path);
    ssize_t length = own ? static_cast<ssize_t>(own->copy(buffer, size - 1)) : ReadFile(path, buffer, size - 1);
    if (length < 0) return -1;
    if (length > 0 && buffer[length - 1] == '\n') --length;
    buffer[length] = '\0';
    return static_cast<int>(length);
  });
}

}  // extern "C"
