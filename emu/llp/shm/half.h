// Halves: what one end of a connection through shared memory says to the other, in memory that it alone can write.
//
// A half is a memfd: a page of words (how far its owner has produced and consumed, whether it sleeps, whether it has
// ended), then the bytes of the ring that its owner fills. The owner maps it, seals it, and passes its descriptor. The
// seals are the kernel's word that nobody can map it for writing, cut it or punch holes into it any more
// (fcntl(2), F_SEAL_FUTURE_WRITE: Linux 5.1). So an owner believes its own half, and the other end touches no page that
// could go away. What the words say is another matter: who reads them judges them (ring.h).
//
// Decision 0071. Threading: the objects any thread, one at a time; the words are atomic, and any thread's and
// process's.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/bytes.h"
#include "base/result.h"
#include "emu/llp/shm/reference.h"

namespace stagecoach::emu {

// Why there is no half.
enum class HalfFault : uint8_t {
  kSystem,         // `error` is an errno
  kNoMemoryFile,   // not what memfd_create makes
  kNotSealed,      // its owner could take it away, or somebody else write it
  kBadSize,        // no half has this size
  kNotAllThere,    // pages are missing: they would be asked for at each first use, and there may be none
  kUnknownLayout,  // not a half, or one of another version
};
const char* ToString(HalfFault fault);

struct HalfError {
  HalfFault fault = HalfFault::kSystem;
  int error = 0;
};

// How an end has ended. Values that are none of these count as kAborted.
enum class Ending : uint32_t {
  kNone,
  kFinished,
  kAborted,
  kUnreadable,  // as kAborted, because what the record in front refers to cannot be read
};

// Each line has one reason to change, so that neither end takes a line of the cache from the other without need.
struct HalfWords {
  uint64_t layout = 0;
  // Where in its own memory the owner has its token, and what that is (reference.h). Said before the half is passed.
  std::atomic<uint64_t> token_at{0};
  std::atomic<uint64_t> token{0};
  // In bytes, since the beginning, of the ring of this half. Whole records.
  alignas(64) std::atomic<uint64_t> produced{0};
  // Likewise of the ring of the other end's half.
  alignas(64) std::atomic<uint64_t> consumed{0};
  // Naps: odd while the owner sleeps until there is something to receive, or room to send. Another number each time.
  alignas(64) std::atomic<uint64_t> nap_for_records{0};
  std::atomic<uint64_t> nap_for_room{0};
  // Room is there when the other end has consumed as much of this half's ring. Said before a nap for room.
  std::atomic<uint64_t> awaited{0};
  std::atomic<uint32_t> ending{0};   // an Ending
  std::atomic<uint32_t> reading{0};  // a Reading: of what the other end refers to
};

// A part of this process's address space, until it goes. Children of a fork do not have it.
class SharedMapping {
 public:
  SharedMapping() = default;
  SharedMapping(SharedMapping&& other) noexcept { swap(other); }
  SharedMapping& operator=(SharedMapping&& other) noexcept {
    SharedMapping(static_cast<SharedMapping&&>(other)).swap(*this);
    return *this;
  }
  ~SharedMapping();
  // An errno where it cannot be had.
  static Result<SharedMapping, int> Map(int fd, size_t size, bool writable);

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void swap(SharedMapping& other) noexcept;

  std::byte* data_ = nullptr;
  size_t size_ = 0;
  uint32_t generation_ = 0;  // base/fork
};

class OwnHalf {
 public:
  // Of the ring, in bytes: a power of two.
  static constexpr size_t kLeastCapacity = size_t{4} * 1024;
  static constexpr size_t kMostCapacity = size_t{16} * 1024 * 1024;
  static constexpr size_t kUsualCapacity = size_t{256} * 1024;
  static constexpr size_t kWordsSize = 4096;

  // All of its memory is there from the beginning, or it is not made. kSystem is its one fault: EMFILE, ENFILE, ENOMEM,
  // ENOSPC, EFBIG for a process that may have no file as large, EINVAL for a kernel that cannot seal it.
  static Result<OwnHalf, HalfError> Create(size_t capacity = kUsualCapacity);
  OwnHalf(OwnHalf&& other) noexcept;
  OwnHalf& operator=(OwnHalf&&) = delete;
  ~OwnHalf();

  // To be passed to the other end; -1 after Passed().
  int fd() const { return fd_; }
  // The descriptor is not needed any more.
  void Passed();

  // Before it is passed to who is at the other end of `socket`: whether that may read this process's memory is decided
  // now, and said.
  void Offer(int socket);
  // kPossible: offered. Else why not.
  Reading offered() const { return offered_; }
  // What was offered is not to be had any more.
  void Withdraw() { token_.Withdraw(); }

  HalfWords& words() const { return *reinterpret_cast<HalfWords*>(mapping_.data()); }
  MutableBytes ring() const { return {mapping_.data() + kWordsSize, mapping_.size() - kWordsSize}; }

 private:
  OwnHalf(int fd, SharedMapping mapping) : fd_(fd), mapping_(static_cast<SharedMapping&&>(mapping)) {}

  int fd_ = -1;
  SharedMapping mapping_;
  OwnToken token_;
  Reading offered_ = Reading::kNotOffered;
};

class PeerHalf {
 public:
  // Looks at what `fd` is before it maps it. The descriptor stays the caller's.
  static Result<PeerHalf, HalfError> Map(int fd);

  const HalfWords& words() const { return *reinterpret_cast<const HalfWords*>(mapping_.data()); }
  ConstBytes ring() const { return {mapping_.data() + OwnHalf::kWordsSize, mapping_.size() - OwnHalf::kWordsSize}; }

 private:
  explicit PeerHalf(SharedMapping mapping) : mapping_(static_cast<SharedMapping&&>(mapping)) {}

  SharedMapping mapping_;
};

}  // namespace stagecoach::emu
