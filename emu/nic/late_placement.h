// LatePlacement: keeps the payloads of RDMA Writes aside and places them later, in any order, last bytes first.
//
// What hardware may do with Writes among themselves, and what a program that polls memory, or trusts their order, does
// not survive (ARCHITECTURE section 5, adversarial placement). Memory given to Stage() must stay valid until it is
// placed: who invalidates or deregisters it calls PlaceAll() first, as a device lets its writes drain.
//
// Not thread-safe.
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
  // The record staged last is intact: it will be placed at some time up to `latest`.
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

  Prng luck_;
  bool staging_ = false;
  Write current_;
  MutableBytes current_bytes_;
  std::vector<Write> waiting_;
};

}  // namespace stagecoach::emu
