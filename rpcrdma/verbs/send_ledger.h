// SendLedger: which work requests are on the send queue, in order.
//
// Most are posted without asking for a completion. One that comes reports those before it that asked for none as well,
// because a queue carries its work requests out in order. Those that asked are reported by their own: a device may
// report a Send before a Read that was posted earlier, whose answer is still on its way, though it should not (Linux's
// siw does). wr_id of a send queue work request is its sequence number here.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/check.h"

namespace stagecoach::rpcrdma::internal {

struct SendEntry {
  enum class Kind : uint8_t { kSend, kRead, kWrite, kBind, kLocalInvalidate, kMarker };
  Kind kind = Kind::kMarker;
  uint32_t tag = 0;           // send slot, Read tag, or tag of the Invalidate
  uint32_t registration = 0;  // with kLocalInvalidate
};

class SendLedger {
 public:
  explicit SendLedger(uint32_t capacity = 0) : slots_(capacity) {}

  size_t size() const { return next_ - oldest_; }
  bool empty() const { return next_ == oldest_; }
  size_t room() const { return slots_.size() - size(); }

  // `signaled`: it asks for a completion. Returns the sequence number for wr_id.
  uint64_t Push(const SendEntry& entry, bool signaled) {
    STAGECOACH_CHECK(room() > 0);
    slot(next_) = {.entry = entry, .signaled = signaled};
    return next_++;
  }
  // Takes back the latest `count`, which the device did not accept.
  void Unpost(size_t count) {
    STAGECOACH_CHECK(count <= size());
    next_ -= count;
  }
  const SendEntry& at(uint64_t sequence) const {
    STAGECOACH_CHECK(sequence >= oldest_ && sequence < next_);
    return slots_[sequence % slots_.size()].entry;
  }
  // The completion of `sequence`. Calls `succeeded` with each request before it that has asked for none, in order, and
  // returns its own; nothing when it is not on the queue, or was reported before.
  template <typename Succeeded>
  std::optional<SendEntry> Complete(uint64_t sequence, Succeeded succeeded) {
    if (sequence < oldest_ || sequence >= next_ || slot(sequence).reported) return std::nullopt;
    for (uint64_t before = oldest_; before < sequence; ++before) {
      if (slot(before).signaled || slot(before).reported) continue;
      slot(before).reported = true;
      succeeded(slot(before).entry);
    }
    slot(sequence).reported = true;
    const SendEntry entry = slot(sequence).entry;
    while (!empty() && slot(oldest_).reported) ++oldest_;
    return entry;
  }
  void Clear() { oldest_ = next_; }

 private:
  struct Slot {
    SendEntry entry;
    bool signaled = false;
    bool reported = false;
  };

  Slot& slot(uint64_t sequence) { return slots_[sequence % slots_.size()]; }

  std::vector<Slot> slots_;
  uint64_t oldest_ = 0;
  uint64_t next_ = 0;
};

}  // namespace stagecoach::rpcrdma::internal
