#include "emu/llp/shm/reference.h"

#include <errno.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "base/check.h"
#include "base/safe_copy/safe_copy.h"

namespace stagecoach::emu {
namespace {

std::atomic<bool> lets_same_user_read{false};

// In one call, besides guards and token; far below IOV_MAX.
constexpr size_t kMostPieces = 64;
constexpr size_t kMostWords = kMostReferences + 1;

// kPossible: the process at the other end is of our user and has a number here.
Reading ProcessAcross(int socket, pid_t* process) {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return Reading::kNotSupported;
  if (peer.uid != geteuid()) return Reading::kOtherUser;
  if (peer.pid <= 0) return Reading::kOtherPidNamespace;
  *process = peer.pid;
  return Reading::kPossible;
}

iovec Remote(uint64_t at, size_t size) {
  return {reinterpret_cast<void*>(static_cast<uintptr_t>(at)), size};
}

Reading ReadingAfter(int error) {
  switch (error) {
    case EPERM:
    case EACCES:
      return Reading::kNotPermitted;
    case EFAULT:
    case ESRCH:
      return Reading::kOtherProcess;
    default:
      return Reading::kNotSupported;
  }
}

// Whose memory was missing. Ours is asked, as the other end may change what it has meanwhile.
PeerMemory::Pulled WhoseFault(std::span<const MutableBytes> to) {
  const bool is_there = std::all_of(to.begin(), to.end(), IsWritable);
  return is_there ? PeerMemory::Pulled::kUnreadable : PeerMemory::Pulled::kNoDestination;
}

}  // namespace

const char* ToString(Reading reading) {
  switch (reading) {
    case Reading::kUntold:
      return "the other end has not said";
    case Reading::kPossible:
      return "possible";
    case Reading::kNotOffered:
      return "not offered";
    case Reading::kOtherUser:
      return "another user";
    case Reading::kOtherPidNamespace:
      return "another pid namespace";
    case Reading::kNotPermitted:
      return "not permitted by the kernel";
    case Reading::kNotSupported:
      return "not supported by the kernel";
    case Reading::kOtherProcess:
      return "another process";
  }
  return "unknown";
}

std::string_view PayloadWords(Reading reading) {
  switch (reading) {
    case Reading::kUntold:
      return "large payload is offered to be read where it lies";
    case Reading::kPossible:
      return "large payload is read where it lies";
    case Reading::kNotOffered:
      return "large payload is copied: the other process does not let it be read";
    case Reading::kOtherUser:
      return "large payload is copied: another user";
    case Reading::kOtherPidNamespace:
      return "large payload is copied: another pid namespace";
    case Reading::kNotPermitted:
      return "large payload is copied: not permitted by the kernel";
    case Reading::kNotSupported:
      return "large payload is copied: not supported by the kernel";
    case Reading::kOtherProcess:
      return "large payload is copied: another process";
  }
  return {};
}

void LetSameUserRead() {
  lets_same_user_read.store(true, std::memory_order_relaxed);
  // EINVAL where there is no Yama, which then forbids nothing.
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
}

bool LetsSameUserRead() {
  return lets_same_user_read.load(std::memory_order_relaxed);
}

// --- Ours ---

Reading OwnToken::Offer(int socket) {
  if (!LetsSameUserRead()) return Reading::kNotOffered;
  pid_t process = 0;
  if (const Reading reading = ProcessAcross(socket, &process); reading != Reading::kPossible) return reading;
  uint64_t value = 0;
  if (getrandom(&value, sizeof value, GRND_NONBLOCK) != static_cast<ssize_t>(sizeof value) || value == 0) {
    return Reading::kNotSupported;
  }
  word_ = std::make_unique<std::atomic<uint64_t>>(value);
  place_ = {.at = reinterpret_cast<uintptr_t>(word_.get()), .value = value};
  return Reading::kPossible;
}

void OwnToken::Withdraw() {
  // Before whatever the program does to its memory once it hears that it has it back.
  if (word_ != nullptr) word_->store(0, std::memory_order_seq_cst);
}

// --- The other end's ---

PeerMemory::PeerMemory(int socket, const TokenPlace& token) : token_(token) {
  reading_ = ProcessAcross(socket, &process_);
  if (reading_ != Reading::kPossible) return;
  if (token_.at == 0 || token_.value == 0) {
    reading_ = Reading::kNotOffered;
    return;
  }
  uint64_t found = 0;
  const iovec local{&found, sizeof found};
  const iovec remote = Remote(token_.at, sizeof found);
  const ssize_t got = process_vm_readv(process_, &local, 1, &remote, 1, 0);
  if (got < 0) {
    reading_ = ReadingAfter(errno);
  } else if (got != static_cast<ssize_t>(sizeof found) || found != token_.value) {
    reading_ = Reading::kOtherProcess;
  }
}

PeerMemory::Pulled PeerMemory::Pull(std::span<const Reference> from, size_t skip,
                                    std::span<const MutableBytes> to) const {
  STAGECOACH_CHECK(reading_ == Reading::kPossible && from.size() <= kMostReferences);
  std::array<iovec, kMostPieces + kMostWords> local;
  std::array<iovec, kMostPieces + kMostWords> remote;
  std::array<uint64_t, kMostWords> words;
  size_t reference = 0;
  size_t taken = 0;  // of that reference
  size_t part = 0;
  while (part < to.size() && skip >= to[part].size()) skip -= to[part++].size();
  size_t filled = skip;  // of that part
  do {
    size_t pieces = 0;
    size_t size = 0;
    while (pieces < kMostPieces && reference < from.size() && part < to.size()) {
      const size_t piece = std::min<size_t>(from[reference].length - taken, to[part].size() - filled);
      if (piece > 0) {
        local[pieces] = {to[part].data() + filled, piece};
        remote[pieces++] = Remote(from[reference].at + taken, piece);
        size += piece;
        taken += piece;
        filled += piece;
      }
      if (taken == from[reference].length) {
        ++reference;
        taken = 0;
      } else {
        ++part;
        filled = 0;
      }
    }
    // Behind all of the payload, and the token last.
    size_t count = pieces;
    size_t word = 0;
    const auto read_word = [&](uint64_t at) {
      local[count] = {&words[word++], sizeof(uint64_t)};
      remote[count++] = Remote(at, sizeof(uint64_t));
      size += sizeof(uint64_t);
    };
    for (const Reference& each : from) {
      if (each.guard_at != 0) read_word(each.guard_at);
    }
    read_word(token_.at);
    const ssize_t got = process_vm_readv(process_, local.data(), count, remote.data(), count, 0);
    if (got < 0 && errno != EFAULT) return Pulled::kRefused;
    if (got != static_cast<ssize_t>(size)) return WhoseFault(to);
    if (words[word - 1] != token_.value) return Pulled::kRefused;
    size_t guard = 0;
    for (const Reference& each : from) {
      if (each.guard_at != 0 && words[guard++] != each.guard) return Pulled::kUnreadable;
    }
  } while (reference < from.size() && part < to.size());
  return Pulled::kDone;
}

}  // namespace stagecoach::emu
