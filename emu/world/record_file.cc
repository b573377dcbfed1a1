#include "emu/world/record_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <filesystem>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

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

// The descriptor of this process that a name stands for; nothing for names of files.
std::optional<int> DescriptorNamed(std::string_view path) {
  if (path == "/dev/stdout") return STDOUT_FILENO;
  if (path == "/dev/stderr") return STDERR_FILENO;
  for (const std::string_view folder : {"/dev/fd/", "/proc/self/fd/"}) {
    if (!path.starts_with(folder)) continue;
    const std::string_view digits = path.substr(folder.size());
    int number = -1;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
    if (error == std::errc() && end == digits.data() + digits.size() && number >= 0) return number;
  }
  return std::nullopt;
}

// Empties a file that was there. What is private shall not be another user's to read: the error is in words.
Result<void, std::string> Empty(int fd, mode_t mode, const struct stat& status) {
  constexpr mode_t kOthers = S_IRWXG | S_IRWXO;
  const bool is_private = (mode & kOthers) == 0;
  if (is_private && status.st_uid != ::geteuid())
    return Err("belongs to another user, who could read what is recorded");
  const bool is_open = (status.st_mode & kOthers) != 0;
  if (is_private && is_open && ::fchmod(fd, status.st_mode & ~kOthers & 07777) != 0) return Err(Words(errno));
  if (::ftruncate(fd, 0) != 0) return Err(Words(errno));
  return {};
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
  // What others write there goes between.
  if (const std::optional<int> named = DescriptorNamed(file.path)) {
    file.fd = ::fcntl(*named, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    if (file.fd < 0) return Err(Words(errno));
    KeepFromChildren(file.fd);
    return file;
  }
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
    if (auto emptied = Empty(file.fd, rules.mode, status); !emptied) {
      ::close(file.fd);
      return Err(std::move(emptied.error()));
    }
    KeepFromChildren(file.fd);
    return file;
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
  if (const std::optional<int> named = DescriptorNamed(expanded.path)) {
    if (::fcntl(*named, F_GETFD) >= 0) return {};
    return Err(Words(errno));
  }
  // Does not wait at a pipe: whoever reads it may come later.
  const int fd = ::open(expanded.path.c_str(), O_WRONLY | O_NONBLOCK | kFlags, mode);
  if (fd < 0 && errno == ENXIO) return {};
  if (fd < 0) return Err(Words(errno));
  struct stat status {};
  const bool is_free = ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && !IsSomebodyElses(fd);
  auto emptied = is_free ? Empty(fd, mode, status) : Result<void, std::string>();
  ::close(fd);
  return emptied;
}

}  // namespace stagecoach::emu
