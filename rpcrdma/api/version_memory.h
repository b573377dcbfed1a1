// VersionMemory: which servers do not speak version 2, by address, for some time: those that have said so, or have not
// answered in it, or whose properties cannot be read. A connection that version 2 was the end of is then not followed
// by another one of the same kind [v2:7.2+3] [v2:7.2+4]; and a server that learns it is found to speak it when that
// time is over.
//
// Bounded: of more addresses than any name has the oldest is forgotten. Not thread-safe.
#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/time.h"
#include "rpcrdma/loop/deadline.h"
#include "rpcrdma/verbs/address_text.h"

namespace stagecoach::rpcrdma::internal {

class VersionMemory {
 public:
  explicit VersionMemory(Duration time) : time_(time) {}

  void Remember(const sockaddr* address, Instant now) {
    Forget(address);
    if (entries_.size() == kEntriesMax) entries_.erase(entries_.begin());
    entries_.push_back({FormatAddress(address), DeadlineAfter(now, time_)});
  }
  void Forget(const sockaddr* address) {
    std::erase_if(entries_, [name = FormatAddress(address)](const Entry& entry) { return entry.address == name; });
  }
  bool Knows(const sockaddr* address, Instant now) const {
    return std::any_of(entries_.begin(), entries_.end(), [now, name = FormatAddress(address)](const Entry& entry) {
      return entry.address == name && now < entry.until;
    });
  }

 private:
  static constexpr size_t kEntriesMax = 64;
  struct Entry {
    std::string address;
    Instant until;
  };

  const Duration time_;
  std::vector<Entry> entries_;  // the oldest first
};

}  // namespace stagecoach::rpcrdma::internal
