#include "emu/world/record_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "base/fork/fork.h"

namespace stagecoach::emu {
namespace {

constexpr int kFlags = O_CREAT | O_CLOEXEC | O_NOCTTY;
// Names of one process that are tried.
constexpr int kMostNames = 1000;

std::string Words(int error) {
  return std::generic_category().message(error);
}

struct Expanded {
  std::string path;
  bool has_id = false;
};

Expanded Expand(const std::string& name) {
  Expanded expanded;
  for (size_t i = 0; i < name.size(); ++i) {
    const char next = name[i] == '%' && i + 1 < name.size() ? name[i + 1] : '\0';
    if (next == 'p') {
      expanded.path += std::to_string(::getpid());
      expanded.has_id = true;
    } else {
      expanded.path += name[i];
    }
    if (next == 'p' || next == '%') ++i;
  }
  return expanded;
}

// The name of another file of this process: "all.pcapng" becomes "all.4711.pcapng", then "all.4711-2.pcapng".
std::string Beside(const std::string& path, int number) {
  std::filesystem::path beside(path);
  std::string id = "." + std::to_string(::getpid());
  if (number > 1) id += "-" + std::to_string(number);
  beside.replace_filename(beside.stem().string() + id + beside.extension().string());
  return beside.string();
}

// A file system without locks has none to wait for.
bool IsSomebodyElses(int fd) {
  return ::flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
}

}  // namespace

std::string RecordFileName(const std::string& name) {
  return Expand(name).path;
}

Result<RecordFile, std::string> OpenRecordFile(const std::string& name, const RecordFileRules& rules) {
  RecordFile file;
  file.path = RecordFileName(name);
  // Readable, too, for is_blank; a pipe for writing alone.
  const int wait = rules.may_block ? 0 : O_NONBLOCK;
  struct stat status {};
  const bool is_file = ::stat(file.path.c_str(), &status) != 0 || S_ISREG(status.st_mode);
  const int access = is_file && rules.is_blank ? O_RDWR : O_WRONLY;
  file.fd = ::open(file.path.c_str(), access | wait | kFlags, rules.mode);
  if (file.fd < 0) return Err(Words(errno));
  if (::fstat(file.fd, &status) != 0 || !S_ISREG(status.st_mode)) {
    KeepFromChildren(file.fd);
    return file;
  }
  if (!IsSomebodyElses(file.fd) && ::fstat(file.fd, &status) == 0 &&
      (status.st_size == 0 || (rules.is_blank && rules.is_blank(file.fd)))) {
    if (::ftruncate(file.fd, 0) == 0) {
      KeepFromChildren(file.fd);
      return file;
    }
    const int error = errno;
    ::close(file.fd);
    return Err(Words(error));
  }
  ::close(file.fd);
  const std::string first_choice = file.path;
  file.is_first_choice = false;
  for (int number = 1; number <= kMostNames; ++number) {
    file.path = Beside(first_choice, number);
    file.fd = ::open(file.path.c_str(), O_WRONLY | O_EXCL | kFlags, rules.mode);
    if (file.fd < 0 && errno == EEXIST) continue;
    if (file.fd < 0) return Err(Words(errno) + ": " + file.path);
    // It is new, and nobody looks for it before it has a name that they were told.
    IsSomebodyElses(file.fd);
    KeepFromChildren(file.fd);
    return file;
  }
  return Err("this process has too many of them");
}

Result<void, std::string> EmptyRecordFile(const std::string& name, mode_t mode) {
  const Expanded expanded = Expand(name);
  if (expanded.has_id) {
    const std::string folder = std::filesystem::path(expanded.path).parent_path().string();
    if (::access(folder.empty() ? "." : folder.c_str(), W_OK | X_OK) == 0) return {};
    return Err(Words(errno));
  }
  // Does not wait at a pipe: whoever reads it may come later.
  const int fd = ::open(expanded.path.c_str(), O_WRONLY | O_NONBLOCK | kFlags, mode);
  if (fd < 0 && errno == ENXIO) return {};
  if (fd < 0) return Err(Words(errno));
  struct stat status {};
  const bool is_file = ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
  const bool emptied = !is_file || IsSomebodyElses(fd) || ::ftruncate(fd, 0) == 0;
  const int error = errno;
  ::close(fd);
  if (emptied) return {};
  return Err(Words(error));
}

}  // namespace stagecoach::emu
