// LatePlacement: keeps the payloads of RDMA Writes aside and places them later, in any order, last bytes first.
//
// What hardware may do with Writes among themselves, and what a program that polls memory, or trusts their order, does
// not survive (ARCHITECTURE section 5, adversarial placement). Memory given to Stage() must stay the device's until it
// is placed: who deregisters it sees to it that nothing more can be staged, and then has everything placed, as a device
// lets its writes drain. Memory that has been unmapped is passed over.
//
// Not thread-safe: under the lock of the connection.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/prng.h"
#include "base/time.h"

namespace stagecoach::emu {

class LatePlacement {
 public:
  explicit LatePlacement(Prng luck) : luck_(luck) {}

  // Where the payload of the current record goes instead of its destination; the same until Keep().
  std::span<const MutableBytes> Stage(std::span<const MutableBytes> destination);
  // The record staged last is intact: it will be placed at some time up to `latest`; or all at once, when there is too
  // much of it.
  void Keep(Instant now, Instant latest);
  // The record staged last will never be whole.
  void Forget();

  // When PlaceDue has something to do.
  std::optional<Instant> Due() const;
  // Both tell how many Writes they placed.
  size_t PlaceDue(Instant now);
  size_t PlaceAll();

 private:
  struct Write {
    std::vector<std::byte> bytes;
    std::vector<MutableBytes> destination;
    Instant due{};
  };
  static void Place(const Write& write);

  // Bytes.
  static constexpr size_t kMostWaiting = size_t{1} << 20;

  Prng luck_;
  bool staging_ = false;
  Write current_;
  MutableBytes current_bytes_;
  std::vector<Write> waiting_;
  size_t waiting_bytes_ = 0;
};

}  // namespace stagecoach::emu
