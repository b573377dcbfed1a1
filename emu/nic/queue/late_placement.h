// LatePlacement: keeps the payloads of RDMA Writes aside and places them later, in any order, last bytes first.
//
// What hardware may do with Writes among themselves, and what a program that polls memory, or trusts their order, does
// not survive (ARCHITECTURE section 5, adversarial placement). Memory given to Stage() must stay the device's until it
// is placed. So whoever gives memory back to the program, or to another use (deregistration, the end or the change of a
// window's binding), first sees to it that it is pinned no more and can be pinned no more, and then has all connections
// of the device place what they keep, as a device lets its writes drain (LatePlacements::PlaceAll): any of them may
// have written there. Keep() comes before the pins of the record are dropped. Memory that has been unmapped is passed
// over.
//
// Threading: a LatePlacement under the lock of its connection; LatePlacements::PlaceAll from any thread, under any
// lock. A mutex for each device, which is taken last of all but that of the trace.
#pragma once

#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/prng.h"
#include "base/time.h"
#include "base/trace.h"

namespace stagecoach::emu {

class LatePlacement;

// Those of one device.
class LatePlacements {
 public:
  // `trace` may be null.
  explicit LatePlacements(TraceSink* trace) : trace_(trace) {}
  ~LatePlacements();
  LatePlacements(const LatePlacements&) = delete;
  LatePlacements& operator=(const LatePlacements&) = delete;

  void PlaceAll(Instant now);

 private:
  friend class LatePlacement;

  TraceSink* const trace_;
  std::mutex mutex_;
  std::vector<LatePlacement*> all_;  // guarded by mutex_, as what they keep; in the order in which they were made
};

class LatePlacement {
 public:
  // `name` is the component in traces. The device must outlive it.
  LatePlacement(LatePlacements& device, Prng luck, std::string name);
  ~LatePlacement();
  LatePlacement(const LatePlacement&) = delete;
  LatePlacement& operator=(const LatePlacement&) = delete;

  // Where the payload of the current record goes instead of its destination; the same until Keep().
  std::span<const MutableBytes> Stage(std::span<const MutableBytes> destination);
  // The record staged last is intact: it will be placed at some time up to `latest`; or all at once, when there is too
  // much of it.
  void Keep(Instant now, Instant latest);
  // The record staged last will never be whole.
  void Forget();

  // When PlaceDue has something to do.
  std::optional<Instant> Due() const;
  void PlaceDue(Instant now);
  void PlaceAll(Instant now);

 private:
  friend class LatePlacements;

  struct Write {
    std::vector<std::byte> bytes;
    std::vector<MutableBytes> destination;
    Instant due{};
  };
  // With the device's mutex held.
  void PlaceAllLocked(Instant now);
  static void Place(const Write& write);
  void TellPlaced(Instant now, size_t writes) const;

  // Bytes.
  static constexpr size_t kMostWaiting = size_t{1} << 20;

  LatePlacements& device_;
  const std::string name_;
  bool staging_ = false;
  Write current_;
  MutableBytes current_bytes_;
  Prng luck_;  // guarded by the device's mutex, as all that follows
  std::vector<Write> waiting_;
  size_t waiting_bytes_ = 0;
};

}  // namespace stagecoach::emu
