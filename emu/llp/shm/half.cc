#include "emu/llp/shm/half.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <bit>
#include <cerrno>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/fork/fork.h"

namespace stagecoach::emu {
namespace {

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "a lock would be of one process");
static_assert(sizeof(HalfWords) <= OwnHalf::kWordsSize);

// "half", and the version of what stands in one.
constexpr uint64_t kLayout = 0x68616c66'00000002;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;

#ifndef MFD_NOEXEC_SEAL
constexpr unsigned MFD_NOEXEC_SEAL = 8;  // Linux 6.3
#endif

// Hosts may forbid files that could be executed (vm.memfd_noexec), and kernels before that do not know the flag.
int MakeMemoryFile() {
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  const int fd = memfd_create("stagecoach", kFlags | MFD_NOEXEC_SEAL);
  return fd >= 0 || errno != EINVAL ? fd : memfd_create("stagecoach", kFlags);
}

// A file in memory is a file, and who makes one larger than it may is sent SIGXFSZ, which ends a process.
bool MayBeAsLarge(size_t size) {
  rlimit limit;
  return getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || size <= limit.rlim_cur;
}

bool IsCapacity(uint64_t size) {
  return size >= OwnHalf::kLeastCapacity && size <= OwnHalf::kMostCapacity && std::has_single_bit(size);
}

HalfError SystemError() {
  return {HalfFault::kSystem, errno};
}

}  // namespace

const char* ToString(HalfFault fault) {
  switch (fault) {
    case HalfFault::kSystem:
      return "the system refuses";
    case HalfFault::kNoMemoryFile:
      return "not a file in memory";
    case HalfFault::kNotSealed:
      return "not sealed";
    case HalfFault::kBadSize:
      return "no half has this size";
    case HalfFault::kNotAllThere:
      return "not all of its memory is there";
    case HalfFault::kUnknownLayout:
      return "unknown layout";
  }
  return "?";
}

Result<SharedMapping, int> SharedMapping::Map(int fd, size_t size, bool writable) {
  void* const data = mmap(nullptr, size, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return Err(int{errno});
  SharedMapping mapping;
  mapping.data_ = static_cast<std::byte*>(data);
  mapping.size_ = size;
  mapping.generation_ = ForkGeneration();
  if (madvise(data, size, MADV_DONTFORK) != 0) return Err(int{errno});
  return mapping;
}

// In a child of a fork something else may lie there by now.
SharedMapping::~SharedMapping() {
  if (data_ != nullptr && generation_ == ForkGeneration()) munmap(data_, size_);
}

void SharedMapping::swap(SharedMapping& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(generation_, other.generation_);
}

Result<OwnHalf, HalfError> OwnHalf::Create(size_t capacity) {
  STAGECOACH_CHECK(IsCapacity(capacity));
  const size_t size = kWordsSize + capacity;
  if (!MayBeAsLarge(size)) return Err(HalfError{HalfFault::kSystem, EFBIG});
  const int fd = KeepFromChildren(MakeMemoryFile());
  if (fd < 0) return Err(SystemError());
  OwnHalf half(fd, {});
  int allocated;
  do {
    allocated = fallocate(fd, 0, 0, static_cast<off_t>(size));
  } while (allocated != 0 && errno == EINTR);
  if (allocated != 0) return Err(SystemError());
  auto mapping = SharedMapping::Map(fd, size, /*writable=*/true);
  if (!mapping) return Err(HalfError{HalfFault::kSystem, mapping.error()});
  half.mapping_ = std::move(*mapping);
  new (half.mapping_.data()) HalfWords{.layout = kLayout};
  if (fcntl(fd, F_ADD_SEALS, kSeals) != 0) return Err(SystemError());
  return half;
}

OwnHalf::OwnHalf(OwnHalf&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      mapping_(std::move(other.mapping_)),
      token_(std::move(other.token_)),
      offered_(other.offered_) {}

OwnHalf::~OwnHalf() {
  Passed();
}

void OwnHalf::Passed() {
  if (const int fd = std::exchange(fd_, -1); fd >= 0) CloseDescriptor(fd);
}

void OwnHalf::Offer(int socket) {
  offered_ = token_.Offer(socket);
  words().token_at.store(token_.place().at, std::memory_order_relaxed);
  words().token.store(token_.place().value, std::memory_order_relaxed);
}

Result<PeerHalf, HalfError> PeerHalf::Map(int fd) {
  // The seals come first: what they hold stays as it is found.
  const int seals = fcntl(fd, F_GET_SEALS);
  struct statfs system;
  if (seals < 0 || fstatfs(fd, &system) != 0) return Err(HalfError{HalfFault::kNoMemoryFile, errno});
  // Huge pages are another file system's, and come when they are asked for.
  if (system.f_type != TMPFS_MAGIC) return Err(HalfError{HalfFault::kNoMemoryFile});
  if ((seals & kSeals) != kSeals) return Err(HalfError{HalfFault::kNotSealed});
  struct stat file;
  if (fstat(fd, &file) != 0) return Err(SystemError());
  if (file.st_size < static_cast<off_t>(OwnHalf::kWordsSize) ||
      !IsCapacity(static_cast<uint64_t>(file.st_size) - OwnHalf::kWordsSize)) {
    return Err(HalfError{HalfFault::kBadSize});
  }
  constexpr off_t kBlock = 512;  // stat(2)
  if (file.st_blocks < file.st_size / kBlock) return Err(HalfError{HalfFault::kNotAllThere});
  auto mapping = SharedMapping::Map(fd, static_cast<size_t>(file.st_size), /*writable=*/false);
  if (!mapping) return Err(HalfError{HalfFault::kSystem, mapping.error()});
  PeerHalf half(std::move(*mapping));
  if (half.words().layout != kLayout) return Err(HalfError{HalfFault::kUnknownLayout});
  return half;
}

}  // namespace stagecoach::emu
