// SendLedger: which work requests are on the send queue, in order.
//
// Most are posted without asking for a completion. Completions of a queue come in the order of its work requests, so
// one that does come reports all before it as well. wr_id of a send queue work request is its sequence number here.
#pragma once

#include <cstdint>
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
  explicit SendLedger(uint32_t capacity = 0) : entries_(capacity) {}

  size_t size() const { return next_ - oldest_; }
  bool empty() const { return next_ == oldest_; }
  size_t room() const { return entries_.size() - size(); }

  // Returns the sequence number for wr_id.
  uint64_t Push(const SendEntry& entry) {
    STAGECOACH_CHECK(room() > 0);
    entries_[next_ % entries_.size()] = entry;
    return next_++;
  }
  // Takes back the latest `count`, which the device did not accept.
  void Unpost(size_t count) {
    STAGECOACH_CHECK(count <= size());
    next_ -= count;
  }
  // Whether `sequence` is on the queue.
  bool Contains(uint64_t sequence) const { return sequence >= oldest_ && sequence < next_; }
  uint64_t oldest() const { return oldest_; }
  const SendEntry& at(uint64_t sequence) const {
    STAGECOACH_CHECK(Contains(sequence));
    return entries_[sequence % entries_.size()];
  }
  SendEntry Pop() {
    STAGECOACH_CHECK(!empty());
    return entries_[oldest_++ % entries_.size()];
  }
  void Clear() { oldest_ = next_; }

 private:
  std::vector<SendEntry> entries_;
  uint64_t oldest_ = 0;
  uint64_t next_ = 0;
};

}  // namespace stagecoach::rpcrdma::internal
