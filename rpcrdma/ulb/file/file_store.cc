#include "rpcrdma/ulb/file/file_store.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include "base/crc32c.h"
#include "base/mutant.h"
#include "rpcrdma/ulb/file/codec.h"
#include "rpcrdma/ulb/file/names.h"
#include "rpcrdma/ulb/file/system_calls.h"

namespace stagecoach::rpcrdma::file {
namespace {

constexpr uint64_t kOffsetMax = static_cast<uint64_t>(std::numeric_limits<off_t>::max());

// Of every hidden file, so that whoever looks for abandoned ones can open it; the finished file has what was asked for.
constexpr uint32_t kPartMode = S_IRUSR | S_IWUSR;

Status LastError() {
  return StatusFromErrno(errno);
}

Attributes ToAttributes(const struct stat& st) {
  Attributes attributes;
  if (S_ISREG(st.st_mode)) {
    attributes.type = Type::kRegular;
    attributes.size = static_cast<uint64_t>(st.st_size);
  } else if (S_ISDIR(st.st_mode)) {
    attributes.type = Type::kDirectory;
  } else if (S_ISLNK(st.st_mode)) {
    attributes.type = Type::kSymlink;
  }
  attributes.mode = st.st_mode & kModeMask;
  attributes.modified = {st.st_mtim.tv_sec, static_cast<uint32_t>(st.st_mtim.tv_nsec)};
  return attributes;
}

// The directory `directory` leads to, to be synced. Not valid: it may be written but not read, and so cannot be synced.
Result<Descriptor, Status> OpenToSync(const Descriptor& directory) {
  Descriptor fd(Retry([&] { return ::openat(directory.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
  if (!fd.valid() && errno != EACCES) return Err(LastError());
  return fd;
}

// Names in it are durable after that.
Result<void, Status> SyncDirectory(const Descriptor& directory) {
  // EINVAL: a file system that has nothing to sync.
  if (directory.valid() && Retry([&] { return ::fsync(directory.get()); }) != 0 && errno != EINVAL) {
    return Err(LastError());
  }
  return {};
}

// Whether an open directory was removed. It has no links then, and reads as empty. There are file systems that count no
// links, so the kernel is asked as well, whose word the C library takes for the end of the directory.
bool WasRemoved(int directory, const struct stat& st) {
  if (st.st_nlink > 0) return false;
  const Descriptor again(::openat(directory, ".", O_RDONLY | O_DIRECTORY | O_NONBLOCK | O_CLOEXEC));
  std::array<std::byte, 64> entries;
  return ::syscall(SYS_getdents64, again.get(), entries.data(), entries.size()) < 0 && errno == ENOENT;
}

}  // namespace

Status StatusFromErrno(int error) {
  switch (error) {
    case ENOENT:
      return Status::kNoEntry;
    case EACCES:
    case EPERM:
      return Status::kPermission;
    case EEXIST:
      return Status::kExists;
    case ENOTDIR:
      return Status::kNotDirectory;
    case EISDIR:
      return Status::kIsDirectory;
    case ENXIO:  // a socket, or a pipe nobody reads
    case ENODEV:
      return Status::kNotRegular;
    case ENAMETOOLONG:
      return Status::kBadName;
    case EXDEV:  // RESOLVE_BENEATH and RESOLVE_NO_XDEV
      return Status::kOutside;
    case ELOOP:
      return Status::kLink;
    case EROFS:
      return Status::kReadOnly;
    case ENOSPC:
    case EDQUOT:
      return Status::kNoSpace;
    case EFBIG:
    case EOVERFLOW:
      return Status::kTooBig;
    case EINVAL:
      return Status::kInvalid;
    case EAGAIN:  // openat2: a rename raced with the resolution of ".." in a link, again and again
    case EMFILE:
    case ENFILE:
    case ENOMEM:
    case ENOLCK:
    case EBUSY:
    case ETXTBSY:
      return Status::kBusy;
    default:
      return Status::kIo;
  }
}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

Result<size_t, Status> ReadableFile::ReadAt(uint64_t offset, MutableBytes into) const {
  if (offset > kOffsetMax || into.size() > kOffsetMax - offset) return Err(Status::kInvalid);
  size_t done = 0;
  while (done < into.size()) {
    const ssize_t n = Retry(
        [&] { return ::pread(fd_.get(), into.data() + done, into.size() - done, static_cast<off_t>(offset + done)); });
    if (n < 0) return Err(LastError());
    if (n == 0) break;
    done += static_cast<size_t>(n);
  }
  return done;
}

Result<Attributes, Status> ReadableFile::GetAttributes() const {
  struct stat st;
  if (::fstat(fd_.get(), &st) != 0) return Err(LastError());
  return ToAttributes(st);
}

PartialFile::PartialFile(Descriptor directory, std::string hidden_name, std::string final_name, Descriptor fd,
                         uint32_t mode)
    : directory_(std::move(directory)),
      hidden_name_(std::move(hidden_name)),
      final_name_(std::move(final_name)),
      fd_(std::move(fd)),
      mode_(mode) {}

PartialFile::~PartialFile() {
  if (!hidden_name_.empty()) ::unlinkat(directory_.get(), hidden_name_.c_str(), 0);
}

Result<void, Status> PartialFile::WriteAt(uint64_t offset, ConstBytes data, uint32_t crc32c) {
  if (failed_ != Status::kOk) return Err(failed_);
  if (offset > kOffsetMax || data.size() > kOffsetMax - offset) return Err(Status::kInvalid);
  if (ComputeCrc32c(data) != crc32c) return Err(Status::kBadChecksum);
  if (data.empty()) return {};

  const uint64_t end = offset + data.size();
  auto after = pieces_.lower_bound(offset);
  if (after != pieces_.end() && after->first < end) return Err(Status::kInvalid);
  auto before = after == pieces_.begin() ? pieces_.end() : std::prev(after);
  if (before != pieces_.end() && before->first + before->second.size > offset) return Err(Status::kInvalid);
  if (pieces_.size() >= kPiecesMax) return Err(Status::kLimit);

  size_t done = 0;
  while (done < data.size()) {
    const ssize_t n = Retry(
        [&] { return ::pwrite(fd_.get(), data.data() + done, data.size() - done, static_cast<off_t>(offset + done)); });
    if (n < 0) {
      failed_ = LastError();
      return Err(failed_);
    }
    done += static_cast<size_t>(n);
  }

  // The piece joins the neighbours it touches; a sequential writer keeps one piece.
  Piece piece{data.size(), crc32c};
  uint64_t start = offset;
  if (before != pieces_.end() && before->first + before->second.size == offset) {
    start = before->first;
    piece = {before->second.size + piece.size, CombineCrc32c(before->second.crc32c, piece.crc32c, piece.size)};
    pieces_.erase(before);
  }
  if (after != pieces_.end() && after->first == end) {
    piece = {piece.size + after->second.size, CombineCrc32c(piece.crc32c, after->second.crc32c, after->second.size)};
    pieces_.erase(after);
  }
  pieces_.emplace(start, piece);
  return {};
}

Result<Attributes, Status> PartialFile::Commit(uint64_t size, uint32_t crc32c, Time modified) {
  if (failed_ != Status::kOk) return Err(failed_);
  if (hidden_name_.empty()) return Err(Status::kStale);
  Piece whole;  // of an empty file
  if (!pieces_.empty()) {
    if (pieces_.size() > 1 || pieces_.begin()->first != 0) return Err(Status::kIncomplete);
    whole = pieces_.begin()->second;
  }
  if (whole.size < size) return Err(Status::kIncomplete);
  if (whole.size > size) return Err(Status::kInvalid);
  if (whole.crc32c != crc32c) return Err(Status::kBadChecksum);

  const timespec times[2] = {{0, UTIME_OMIT}, {modified.seconds, static_cast<long>(modified.nanoseconds)}};
  if (::futimens(fd_.get(), times) != 0) return Err(LastError());
  if (!STAGECOACH_MUTANT("name-before-data", "a file gets its name before its data is on the disk") &&
      Retry([&] { return ::fsync(fd_.get()); }) != 0) {
    return Err(LastError());
  }
  struct stat st;
  if (::fstat(fd_.get(), &st) != 0) return Err(LastError());
  // Before the name is changed: whatever may fail is to fail while nothing has happened.
  const auto directory = OpenToSync(directory_);
  if (!directory) return Err(directory.error());
  // At the last moment: a part that its owner may not read cannot be removed by whoever finds it abandoned, and syncing
  // takes its time.
  const bool closes = (mode_ & kPartMode) != kPartMode;
  if (closes) {
    st.st_mode &= S_IFMT | mode_;
    if (::fchmod(fd_.get(), st.st_mode & kModeMask) != 0) return Err(LastError());
  }
  if (::renameat(directory_.get(), hidden_name_.c_str(), directory_.get(), final_name_.c_str()) != 0) {
    return Err(LastError());
  }
  hidden_name_.clear();
  if (closes && Retry([&] { return ::fsync(fd_.get()); }) != 0) return Err(LastError());
  if (STAGECOACH_MUTANT("name-not-synced", "the folder of a new name is not synced")) return ToAttributes(st);
  if (const auto synced = SyncDirectory(*directory); !synced) return Err(synced.error());
  return ToAttributes(st);
}

Result<std::unique_ptr<FileStore>, FileStore::OpenError> FileStore::Open(const std::string& directory,
                                                                         Options options) {
  const auto fail = [&](int error, std::string_view what) {
    return Err(OpenError{error, "'" + Printable(directory) + "': " + std::string(what)});
  };
  Descriptor root(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!root.valid()) return fail(errno, std::strerror(errno));
  // Containment stands or falls with openat2; a sandbox may also forbid it, with EPERM.
  const Descriptor probe(OpenAt2(root.get(), ".", O_PATH | O_DIRECTORY, RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS));
  if (!probe.valid()) {
    return fail(errno,
                "this kernel does not offer openat2 (Linux 5.6 or later), which keeps paths below the directory");
  }
  return std::unique_ptr<FileStore>(new FileStore(std::move(root), options));
}

Result<Descriptor, Status> FileStore::OpenBeneath(const std::string& joined, int flags) const {
  uint64_t resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV;
  if (!options_.follow_links) resolve |= RESOLVE_NO_SYMLINKS;
  // EAGAIN: the kernel could not be sure that a ".." inside a link stayed beneath while someone renamed. Rare; retried
  // a bounded number of times.
  constexpr int kAttempts = 16;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    Descriptor fd(Retry([&] { return OpenAt2(root_.get(), joined.c_str(), flags, resolve); }));
    if (fd.valid()) return fd;
    if (errno != EAGAIN) break;
  }
  return Err(LastError());
}

Result<Descriptor, Status> FileStore::OpenParent(const Path& path) const {
  return OpenBeneath(Join(Path(path.begin(), path.end() - 1)), O_PATH | O_DIRECTORY);
}

Result<Attributes, Status> FileStore::GetAttributes(const Path& path) const {
  if (!IsValidPath(path)) return Err(Status::kBadName);
  const auto fd = OpenBeneath(Join(path), O_PATH);
  if (!fd) return Err(fd.error());
  struct stat st;
  if (::fstat(fd->get(), &st) != 0) return Err(LastError());
  if (S_ISDIR(st.st_mode) && WasRemoved(fd->get(), st)) return Err(Status::kNoEntry);
  return ToAttributes(st);
}

Result<Page, Status> FileStore::List(const Path& path, uint64_t cookie, size_t bytes_max) const {
  if (!IsValidPath(path)) return Err(Status::kBadName);
  // Cookies are the file system's own directory offsets, as NFS servers use them: no state is kept between pages. A
  // cookie made up by the client yields a page of this directory or an error, nothing else.
  if (cookie > static_cast<uint64_t>(std::numeric_limits<long>::max())) return Err(Status::kInvalid);
  auto fd = OpenBeneath(Join(path), O_RDONLY | O_DIRECTORY | O_NONBLOCK);
  if (!fd) return Err(fd.error());
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::fdopendir(fd->get()), ::closedir);
  if (directory == nullptr) return Err(LastError());
  fd->Release();
  if (cookie != 0) ::seekdir(directory.get(), static_cast<long>(cookie));

  Page page{cookie, false, {}};
  size_t bytes = 0;
  while (page.entries.size() < kEntriesMax) {
    errno = 0;
    const dirent* found = ::readdir(directory.get());
    if (found == nullptr) {
      if (errno != 0) return Err(LastError());
      struct stat read;
      if (::fstat(::dirfd(directory.get()), &read) != 0) return Err(LastError());
      if (WasRemoved(::dirfd(directory.get()), read)) return Err(Status::kNoEntry);
      page.end = true;
      return page;
    }
    Entry entry{found->d_name, {}};
    const auto next_cookie = static_cast<uint64_t>(found->d_off);
    struct stat st;
    if (!IsValidName(entry.name) || ::fstatat(::dirfd(directory.get()), found->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0) {
      page.cookie = next_cookie;  // ours, or gone since
      continue;
    }
    entry.attributes = ToAttributes(st);
    if (entry.attributes.type == Type::kSymlink) {
      // A link to a file of the tree is that file; any other link is shown as one, and is a dead end for who walks the
      // tree.
      Path target = path;
      target.push_back(entry.name);
      const auto led = GetAttributes(target);
      if (led && led->type == Type::kRegular) entry.attributes = *led;
    }
    bytes += EncodedSize(entry);
    if (bytes > bytes_max) {
      if (page.entries.empty()) return Err(Status::kInvalid);
      return page;
    }
    page.entries.push_back(std::move(entry));
    page.cookie = next_cookie;
  }
  return page;
}

Result<ReadableFile, Status> FileStore::OpenFile(const Path& path) const {
  if (!IsValidPath(path)) return Err(Status::kBadName);
  const std::string joined = Join(path);
  const auto check = [](const Descriptor& fd) -> Result<void, Status> {
    struct stat st;
    if (::fstat(fd.get(), &st) != 0) return Err(LastError());
    if (S_ISDIR(st.st_mode)) return Err(Status::kIsDirectory);
    if (!S_ISREG(st.st_mode)) return Err(Status::kNotRegular);
    return {};
  };
  // First a look that has no effect on what is there, then the opening, then a second look in case it was swapped
  // between: O_NONBLOCK and O_NOCTTY keep such a swap harmless.
  const auto look = OpenBeneath(joined, O_PATH);
  if (!look) return Err(look.error());
  if (const auto regular = check(*look); !regular) return Err(regular.error());
  auto fd = OpenBeneath(joined, O_RDONLY | O_NONBLOCK | O_NOCTTY);
  if (!fd) return Err(fd.error());
  if (const auto regular = check(*fd); !regular) return Err(regular.error());
  return ReadableFile(std::move(*fd));
}

Result<std::unique_ptr<PartialFile>, Status> FileStore::Create(const Path& path, uint32_t mode) const {
  if (!IsValidPath(path)) return Err(Status::kBadName);
  if (path.empty()) return Err(Status::kIsDirectory);
  if (options_.read_only) return Err(Status::kReadOnly);
  auto directory = OpenParent(path);
  if (!directory) return Err(directory.error());
  // What is there may be replaced if it is a file or a link (the link itself, not what it leads to).
  struct stat st;
  if (::fstatat(directory->get(), path.back().c_str(), &st, AT_SYMLINK_NOFOLLOW) == 0) {
    if (S_ISDIR(st.st_mode)) return Err(Status::kIsDirectory);
    if (!S_ISREG(st.st_mode) && !S_ISLNK(st.st_mode)) return Err(Status::kNotRegular);
  } else if (errno != ENOENT) {
    return Err(LastError());
  }
  constexpr int kAttempts = 16;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    std::string hidden = RandomPartName();
    Descriptor fd(Retry([&] {
      return ::openat(directory->get(), hidden.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                      static_cast<mode_t>((mode & kModeMask) | kPartMode));
    }));
    if (!fd.valid()) {
      if (errno != EEXIST) return Err(LastError());
      continue;
    }
    const auto claimed = ClaimPart(fd.get());
    if (claimed && *claimed) {
      return std::unique_ptr<PartialFile>(
          new PartialFile(std::move(*directory), std::move(hidden), path.back(), std::move(fd), mode & kModeMask));
    }
    ::unlinkat(directory->get(), hidden.c_str(), 0);
    if (!claimed) return Err(claimed.error());
  }
  return Err(Status::kBusy);
}

Result<void, Status> FileStore::MakeDirectory(const Path& path, uint32_t mode) const {
  if (!IsValidPath(path)) return Err(Status::kBadName);
  if (path.empty()) return Err(Status::kExists);
  if (options_.read_only) return Err(Status::kReadOnly);
  const auto directory = OpenParent(path);
  if (!directory) return Err(directory.error());
  const auto to_sync = OpenToSync(*directory);
  if (!to_sync) return Err(to_sync.error());
  if (::mkdirat(directory->get(), path.back().c_str(), static_cast<mode_t>((mode & kModeMask) | S_IRWXU)) != 0) {
    return Err(LastError());
  }
  return SyncDirectory(*to_sync);
}

Result<uint64_t, Status> FileStore::RemoveAbandoned(const Path& path) const {
  if (!IsValidPath(path)) return Err(Status::kBadName);
  if (options_.read_only) return Err(Status::kReadOnly);
  const auto directory = OpenBeneath(Join(path), O_RDONLY | O_DIRECTORY | O_NONBLOCK);
  if (!directory) return Err(directory.error());
  PartSweep sweep(directory->get(), 0);
  while (sweep.Step(std::numeric_limits<size_t>::max())) {
  }
  return sweep.removed();
}

PartSweep FileStore::SweepAbandoned() const {
  return PartSweep(root_.get(), kDepthMax);
}

}  // namespace stagecoach::rpcrdma::file
