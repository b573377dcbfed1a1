#include "rpcrdma/ulb/file/parts.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "base/bytes.h"
#include "rpcrdma/ulb/file/file_store.h"
#include "rpcrdma/ulb/file/names.h"
#include "rpcrdma/ulb/file/system_calls.h"

namespace stagecoach::rpcrdma::file {
namespace {

// errno, or 0 when the lock is held now.
int Lock(int fd) {
  return Retry([&] { return ::flock(fd, LOCK_EX | LOCK_NB); }) == 0 ? 0 : errno;
}

bool IsTheFileOf(int directory, const char* name, const struct stat& st) {
  struct stat named;
  return ::fstatat(directory, name, &named, AT_SYMLINK_NOFOLLOW) == 0 && named.st_dev == st.st_dev &&
         named.st_ino == st.st_ino;
}

}  // namespace

std::string RandomPartName() {
  // Only has to be new in its directory, which O_EXCL sees to; GRND_NONBLOCK so that an early boot does not hang us.
  uint64_t random = 0;
  if (::getrandom(&random, sizeof(random), GRND_NONBLOCK) != sizeof(random)) random = static_cast<uint64_t>(::getpid());
  return ".stagecoach." + ToHex(AsBytes(&random, sizeof(random))) + ".part";
}

Result<bool, Status> ClaimPart(int part) {
  switch (const int error = Lock(part)) {
    case 0:
      break;
    case EWOULDBLOCK:
      return false;
    case EOPNOTSUPP:  // a file system that has no locks; ENOLCK is one that has none left, or not at the moment
    case ENOSYS:
    case EINVAL:
      return true;
    default:
      return Err(StatusFromErrno(error));
  }
  struct stat st;
  if (::fstat(part, &st) != 0) return Err(StatusFromErrno(errno));
  return st.st_nlink > 0;
}

bool RemoveIfAbandoned(int directory, const char* name) {
  struct stat st;
  if (::fstatat(directory, name, &st, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(st.st_mode)) return false;
  // A network file system wants a descriptor for writing before it locks; what may only be read is locked so.
  constexpr int kFlags = O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
  Descriptor part(::openat(directory, name, O_RDWR | kFlags));
  if (!part.valid() && errno == EACCES) part = Descriptor(::openat(directory, name, O_RDONLY | kFlags));
  if (!part.valid() || Lock(part.get()) != 0) return false;
  if (::fstat(part.get(), &st) != 0 || !S_ISREG(st.st_mode) || !IsTheFileOf(directory, name, st)) return false;
  return ::unlinkat(directory, name, 0) == 0;
}

PartSweep::PartSweep(int root, size_t depth_max) : depth_max_(depth_max) {
  Enter(::openat(root, ".", O_RDONLY | O_DIRECTORY | O_NONBLOCK | O_CLOEXEC));
}

void PartSweep::Enter(int directory) {
  if (directory < 0) return;
  DIR* const level = ::fdopendir(directory);
  if (level == nullptr) {
    ::close(directory);
    return;
  }
  levels_.emplace_back(level);
}

bool PartSweep::Step(size_t entries) {
  for (; entries > 0 && !levels_.empty(); --entries) {
    const int directory = ::dirfd(levels_.back().get());
    const dirent* const entry = ::readdir(levels_.back().get());
    if (entry == nullptr) {
      levels_.pop_back();
      continue;
    }
    const std::string_view name = entry->d_name;
    if (name == "." || name == "..") continue;
    if (IsHiddenName(name)) {
      if (RemoveIfAbandoned(directory, entry->d_name)) ++removed_;
    } else if ((entry->d_type == DT_DIR || entry->d_type == DT_UNKNOWN) && levels_.size() <= depth_max_) {
      Enter(Retry([&] {
        return OpenAt2(directory, entry->d_name, O_RDONLY | O_DIRECTORY | O_NONBLOCK,
                       RESOLVE_BENEATH | RESOLVE_NO_XDEV | RESOLVE_NO_SYMLINKS);
      }));
    }
  }
  return !levels_.empty();
}

}  // namespace stagecoach::rpcrdma::file
