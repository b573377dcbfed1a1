// Refusals: who was refused too often to be listened to for a while.
//
// What a carrier is proven with may be 24 bits (emu/wire/carrier_proof.h). So no source may guess as fast as it likes:
// each may be wrong so often at once, and then once in a while. A source is an address, of IPv6 its network of 64 bits,
// from which one host may call by any; and, on this host, a user. So a user cannot have others refused. Whoever is
// right is not counted.
//
// Not thread-safe: RocePort's, on the loop.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "base/time.h"
#include "emu/wire/carrier_hello.h"

namespace stagecoach::emu {

class Refusals {
 public:
  struct Source {
    // `user` as Stream::PeerUser says.
    Source(const wire::Gid& address, std::optional<uint32_t> user);
    friend auto operator<=>(const Source&, const Source&) = default;

    wire::Gid network{};
    std::optional<uint32_t> user;
  };

  static constexpr int kAtOnce = 64;
  static constexpr Duration kForEach = 125ms;
  // What is remembered: beyond that, who was refused the longest ago is forgotten.
  static constexpr size_t kSourcesMax = 1024;

  // `source` is not to be listened to now.
  bool IsTooOften(const Source& source, Instant now) const;
  void Count(const Source& source, Instant now);

  size_t size() const { return settled_at_.size(); }

 private:
  // When all refusals of the source are forgotten: each adds kForEach.
  std::map<Source, Instant> settled_at_;
};

}  // namespace stagecoach::emu
