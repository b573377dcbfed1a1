// Stream: an ordered, reliable pipe of bytes, non-blocking. What iWARP calls the lower-layer transport (TCP, or a
// simulated link). Implemented by emu/backend/tcp and emu/sim; filters (byte faults) wrap it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/bytes.h"
#include "emu/fabric/address.h"
#include "emu/llp/readiness.h"

namespace stagecoach::emu {

enum class IoStatus : uint8_t {
  kOk,          // bytes > 0 were moved
  kWouldBlock,  // nothing moved; try again when ready
  kEof,         // the peer has finished sending (Read only)
  kError,       // the stream is dead; `error` is the errno that says why. But for EFAULT: memory that was named is not
                // mapped, nothing was moved and the stream is as it was
};

struct IoResult {
  IoStatus status = IoStatus::kWouldBlock;
  size_t bytes = 0;
  int error = 0;
};

// Calls on one stream are serialised by its owner (the connection's lock), except SetWatcher, see below.
class Stream {
 public:
  virtual ~Stream() = default;

  // Scatter read and gather write of at most IOV_MAX parts. May move fewer bytes than asked.
  virtual IoResult Read(std::span<const MutableBytes> into) = 0;
  virtual IoResult Write(std::span<const ConstBytes> from) = 0;

  // Readiness is one-shot: after Arm, the watcher is called once when the stream can be read (or written), has ended or
  // has failed; at once if it already is. Arm replaces the interest of an earlier Arm; Arm(false, false) disarms, and
  // costs nothing when nothing was armed. A watcher must tolerate one late or spurious call after disarming.
  virtual void Arm(bool readable, bool writable) = 0;

  // Must be set before the first Arm. SetWatcher(nullptr) disarms and returns only when no call to the old watcher is
  // running or will start; so it must be called without any lock that the watcher takes. On the loop thread itself it
  // does not wait.
  virtual void SetWatcher(ReadyWatcher* watcher) = 0;

  // Ends sending: the peer reads what was written, then end of file. Reading goes on. Idempotent.
  virtual void Shutdown() = 0;
  // Ends both directions at once; the peer sees a reset. Idempotent.
  virtual void Abort() = 0;

  // A descriptor for a zero-timeout epoll over many streams, or -1 where there is none (simulation).
  virtual int PollDescriptor() const = 0;

  virtual IpEndpoint local() const = 0;
  virtual IpEndpoint remote() const = 0;

  // The user (as getuid has it) whose process has the other end, if that is on this host. kNoUser: nobody has it any
  // more, or the system does not say who. nullopt: the other end is elsewhere. Asks the system each time.
  static constexpr uint32_t kNoUser = 0xffffffff;
  virtual std::optional<uint32_t> PeerUser() const { return std::nullopt; }

  // How far what was written has got, at this moment; asks the system. A stream that leads to no other host, or is
  // dead, has delivered everything.
  virtual Delivery delivery() const { return {}; }

  // Effective maximum segment size in bytes: what one segment of the transport carries. Sizes the FPDUs (RFC 5044
  // section 5).
  virtual size_t MaxSegmentSize() const = 0;
};

}  // namespace stagecoach::emu
