// Files of the kernel's about devices. This device has none of its own; where somebody offers some under its name, they
// are read.

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <string>

#include "verbs_shim/emulated/objects.h"

extern "C" {

// For users of libsysfs, which the variable comes from.
const char* ibv_get_sysfs_path(void) {
  const char* const path = std::getenv("SYSFS_PATH");
  return path != nullptr ? path : "/sys";
}

// The first bytes of DIRECTORY/FILE, without the end of the line: how many, or -1 and errno.
int ibv_read_sysfs_file(const char* directory, const char* file, char* buffer, size_t size) {
  if (size == 0) return stagecoach::verbs::emulated::Answer(EINVAL);
  const int fd = ::open((std::string(directory) + "/" + file).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  ssize_t length = ::read(fd, buffer, size - 1);
  const int error = errno;
  ::close(fd);
  if (length < 0) return stagecoach::verbs::emulated::Answer(error);
  if (length > 0 && buffer[length - 1] == '\n') --length;
  buffer[length] = '\0';
  return static_cast<int>(length);
}

}  // extern "C"
