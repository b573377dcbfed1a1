// LastingMemory: memory of the program that is registered once with each protection domain it is used in; and
// DomainRegions: the registrations of one domain.
//
// A registration is made at first need, for access by this end's own work requests and, on connections that expose
// memory through windows, for binding these: no peer can reach anything through the registration itself. It ends with
// whichever of the two goes first, the memory or the domain. Neither may go while a window is bound on it or a work
// request uses it; who names LastingMemory in a call or reply therefore holds it until that is over.
//
// How many there are is the program's choice, not a peer's. Not thread-safe: on the loop's thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "verbs_shim/cxx/handles.h"

namespace stagecoach::rpcrdma {

namespace internal {
class DomainRegions;
}  // namespace internal

class LastingMemory {
 public:
  // `owner`, if any, keeps the bytes; it is let go when no device knows them any more. Not `writable`: work requests
  // and peers only read them.
  LastingMemory(ConstBytes bytes, bool writable, std::shared_ptr<const void> owner)
      : owner_(std::move(owner)), bytes_(bytes), writable_(writable) {}
  // Ends the registrations.
  ~LastingMemory();
  LastingMemory(const LastingMemory&) = delete;
  LastingMemory& operator=(const LastingMemory&) = delete;

  ConstBytes bytes() const { return bytes_; }
  bool writable() const { return writable_; }
  // Nothing is in any memory.
  bool Contains(ConstBytes part) const;

 private:
  friend class internal::DomainRegions;

  const std::shared_ptr<const void> owner_;
  const ConstBytes bytes_;
  const bool writable_;
  std::vector<internal::DomainRegions*> domains_;  // that know it, in the order in which they came to
};

namespace internal {

class DomainRegions {
 public:
  DomainRegions() = default;
  ~DomainRegions() { Close(); }
  DomainRegions(const DomainRegions&) = delete;
  DomainRegions& operator=(const DomainRegions&) = delete;

  // `bindable`: windows are to be bound on what is registered.
  void Open(ibv_pd* domain, bool bindable);
  // Before the domain goes, and after its queue pairs and windows have gone.
  void Close();

  struct Found {
    ibv_mr* region = nullptr;  // null: refused
    bool first = false;        // the device was asked now; otherwise it was before
    int error = 0;             // of a refusal, when it was asked now
  };
  // A device that has refused once is not asked again: how much it can take in one piece hardly changes, and asking may
  // have it pin all that it can first.
  Found Find(LastingMemory& memory);

  // Registered now.
  size_t size() const { return registered_; }

 private:
  friend class stagecoach::rpcrdma::LastingMemory;

  struct Entry {
    verbs::MemoryRegion region;
    uint64_t number = 0;
  };
  void Drop(LastingMemory* memory);

  ibv_pd* domain_ = nullptr;
  bool bindable_ = false;
  uint64_t made_ = 0;
  size_t registered_ = 0;
  std::map<LastingMemory*, Entry> entries_;  // by address, for Find only
};

}  // namespace internal
}  // namespace stagecoach::rpcrdma
