// FileStore: one directory tree, and no way out of it.
//
// Used by the server for the directory it serves and by the client for the directory it fills: both take names from a
// hostile peer. Containment is the kernel's: every path is opened with openat2(2) relative to one directory descriptor.
//
//   RESOLVE_BENEATH        no "..", absolute name or link leads out, races included
//   RESOLVE_NO_MAGICLINKS  /proc/PID/fd and its like do not resolve
//   RESOLVE_NO_XDEV        no mount point is crossed: what is mounted below the directory is not part of the tree, so a
//                          served "/" does not publish /proc, /sys and /dev
//   RESOLVE_NO_SYMLINKS    with Options::follow_links off: no link is followed at all
//
// Only regular files and directories are opened; an object is looked at through an O_PATH descriptor before it is
// opened, so that no device sees an open. A file being written lives under a hidden name (names.h) in its final
// directory and gets its final name by rename(2) once whole and synced; dropping it removes it. A process that is
// killed outright leaves the hidden file behind, never a final one, and what it left is removed by who looks for it
// (parts.h).
//
// Blocking system calls: the owner decides which thread that happens on (executor.h). A store may be used by several
// threads at once; files are thread-compatible, and do not need the store that opened them.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "base/bytes.h"
#include "base/result.h"
#include "rpcrdma/ulb/file/parts.h"
#include "rpcrdma/ulb/file/types.h"

namespace stagecoach::rpcrdma::file {

// Owns a descriptor. Closing cannot fail usefully: whoever needs to know has synced before.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.Release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor();

  bool valid() const { return fd_ >= 0; }
  int get() const { return fd_; }
  int Release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }

 private:
  int fd_ = -1;
};

// A regular file open for reading.
class ReadableFile {
 public:
  explicit ReadableFile(Descriptor fd) : fd_(std::move(fd)) {}

  // Fills `into` from `offset`; returns fewer bytes only at the end of the file.
  Result<size_t, Status> ReadAt(uint64_t offset, MutableBytes into) const;
  Result<Attributes, Status> GetAttributes() const;

 private:
  Descriptor fd_;
};

// A file in the making. Destroying it before Commit removes it.
class PartialFile {
 public:
  PartialFile(const PartialFile&) = delete;
  PartialFile& operator=(const PartialFile&) = delete;
  ~PartialFile();

  // Any order; kInvalid for a byte written twice or beyond 2^63, kBadChecksum when `crc32c` is not that of `data`,
  // kLimit when the pieces lie scattered in more than kPiecesMax places. After a failed write of the disk the file
  // stays failed.
  Result<void, Status> WriteAt(uint64_t offset, ConstBytes data, uint32_t crc32c);

  // Checks that exactly the bytes 0 to `size` were written (kIncomplete) and have this CRC32c (kBadChecksum), sets the
  // time, syncs the file, sets the mode, renames it over the final name, and syncs the directory, and the mode where it
  // is one without the owner's rights. May be called once; on failure the hidden file is gone when this object is.
  // Under the final name is then what was there before; or, when only the last step failed, the new file, which a loss
  // of power may undo.
  Result<Attributes, Status> Commit(uint64_t size, uint32_t crc32c, Time modified);

  static constexpr size_t kPiecesMax = 1024;

 private:
  friend class FileStore;
  struct Piece {
    uint64_t size = 0;
    uint32_t crc32c = 0;
  };
  PartialFile(Descriptor directory, std::string hidden_name, std::string final_name, Descriptor fd, uint32_t mode);

  Descriptor directory_;
  std::string hidden_name_;  // empty once renamed
  std::string final_name_;
  Descriptor fd_;                     // holds the lock of the hidden file
  const uint32_t mode_;               // of the finished file, before the umask
  std::map<uint64_t, Piece> pieces_;  // by offset; neighbours that touch are merged
  Status failed_ = Status::kOk;
};

class FileStore {
 public:
  struct Options {
    bool read_only = false;
    // Links that stay within the tree are followed. Off for a tree that is being filled: nothing in it may redirect us.
    bool follow_links = true;
  };

  // Why a directory cannot be had, for people; `text` names the directory and the cause.
  struct OpenError {
    int system_error = 0;  // errno
    std::string text;
  };
  // `directory` is the operator's word and is followed wherever it leads. Refuses on a kernel without openat2
  // (before 5.6): containment is not emulated.
  static Result<std::unique_ptr<FileStore>, OpenError> Open(const std::string& directory, Options options);

  FileStore(const FileStore&) = delete;
  FileStore& operator=(const FileStore&) = delete;

  bool read_only() const { return options_.read_only; }

  // All refuse with kBadName what IsValidPath refuses.
  Result<Attributes, Status> GetAttributes(const Path& path) const;

  // A page of at most `bytes_max` encoded bytes of entries. `cookie` is 0 or that of the page before. Names that
  // IsValidName refuses are left out.
  Result<Page, Status> List(const Path& path, uint64_t cookie, size_t bytes_max) const;

  Result<ReadableFile, Status> OpenFile(const Path& path) const;

  // Permission bits of `mode`, cut by the process's umask.
  Result<std::unique_ptr<PartialFile>, Status> Create(const Path& path, uint32_t mode) const;

  // The owner's bits are always set.
  Result<void, Status> MakeDirectory(const Path& path, uint32_t mode) const;

  // Removes what killed processes have left in this directory: hidden files that nobody writes any more. How many.
  Result<uint64_t, Status> RemoveAbandoned(const Path& path) const;
  // The same for the whole tree, as the sweep is told to go on. Does not need the store.
  PartSweep SweepAbandoned() const;

 private:
  FileStore(Descriptor root, Options options) : root_(std::move(root)), options_(options) {}

  Result<Descriptor, Status> OpenBeneath(const std::string& joined, int flags) const;
  // The directory that holds the last name of `path`.
  Result<Descriptor, Status> OpenParent(const Path& path) const;

  Descriptor root_;
  Options options_;
};

// What an errno of a file operation is in the program's words.
Status StatusFromErrno(int error);

}  // namespace stagecoach::rpcrdma::file
