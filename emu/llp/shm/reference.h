// References: payload that stays where its sender has it until its receiver reads it there (process_vm_readv(2)).
//
// The two ends are processes of one user, which the kernel lets read each other's memory anyway; of other users
// neither is told where anything lies. A process has to allow it besides (LetSameUserRead).
//
// Who refers to memory says where in it a token lies, a word of its own that nobody else has. Each reading takes the
// payload first and the token last, in one call, which the kernel carries out in that order on one address space. So a
// token that is still right proves of the bytes before it that they are those of the process that was met, and not of
// one that has its number now or that it has become (execve(2)), and that it had not taken its offer back by then.
// Taking it back is one store, and waits for nobody.
//
// Likewise each reference may name a guard: a word of the sender's that changes when the memory's registration ends
// (MemoryGuard). So a program that has deregistered memory need not wait for the other end, which may be stopped: what
// is read later is refused.
//
// Decision 0072. Threading: as ShmLlp; LetSameUserRead any thread.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "base/bytes.h"

namespace stagecoach::emu {

// Whether one end reads what the other refers to, and if not, why. Told to the other end by these numbers.
enum class Reading : uint32_t {
  kUntold,             // that end has not joined yet
  kPossible,           //
  kNotOffered,         // the other process does not allow it
  kOtherUser,          //
  kOtherPidNamespace,  // the other process has no number here
  kNotPermitted,       // by the kernel: Yama's scope, a container, an undumpable process
  kNotSupported,       // the kernel has no such call
  kOtherProcess,       // who made the connection is not the one that has it now
};
// "unknown" for numbers that are none of these.
const char* ToString(Reading reading);
// What becomes of large payload then, as a clause: "large payload is copied: another user".
std::string_view PayloadWords(Reading reading);

// From now on this process tells processes of its user that they may read its memory, and where Yama asks for it
// (ptrace_scope 1), has the kernel let them: that lets every process of this user trace this one.
void LetSameUserRead();
bool LetsSameUserRead();

// A part of a payload: an address in the memory of the process that refers to it.
struct Reference {
  uint64_t at = 0;
  uint64_t length = 0;
  uint64_t guard_at = 0;  // 0: there is none
  uint64_t guard = 0;     // what it holds while the bytes may be read
};
// Of one record.
inline constexpr size_t kMostReferences = 32;

// Where a token lies, and what it is. Zeros: nothing may be read.
struct TokenPlace {
  uint64_t at = 0;
  uint64_t value = 0;
};

// Ours. In a child of a fork it is the child's own.
class OwnToken {
 public:
  // Offers the memory of this process to the other end of `socket` (unix(7)): kPossible, or why not.
  Reading Offer(int socket);
  TokenPlace place() const { return place_; }
  // Whatever is read from now on is refused.
  void Withdraw();

 private:
  std::unique_ptr<std::atomic<uint64_t>> word_;
  TokenPlace place_;
};

class PeerMemory {
 public:
  // Tries to read the token of the process that is at the other end of `socket`.
  PeerMemory(int socket, const TokenPlace& token);

  Reading reading() const { return reading_; }

  enum class Pulled : uint8_t {
    kDone,
    kNoDestination,  // some of `to` is not mapped, or not writable
    kUnreadable,     // some of `from` is not mapped, or its guard has changed
    kRefused,        // it is not the process that it was, or does not let us read any more
  };
  // Scatters `from`, kMostReferences at the most, over what follows the first `skip` bytes of `to`, as far as both go.
  // Needs kPossible. What is in `to` means nothing unless it is kDone.
  Pulled Pull(std::span<const Reference> from, size_t skip, std::span<const MutableBytes> to) const;

 private:
  Reading reading_ = Reading::kNotOffered;
  pid_t process_ = 0;
  TokenPlace token_;
};

}  // namespace stagecoach::emu
