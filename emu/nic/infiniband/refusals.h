// Refusals: who was refused too often to be listened to for a while.
//
// What a carrier is proven with may be 24 bits (emu/wire/carrier_proof.h). So no source may guess as fast as it likes:
// each may be wrong so often at once, and then once in a while. A source is an address, of IPv6 its network of 64 bits,
// from which one host may call by any; on this host, a user; and the QP that was asked for, which its peer's host alone
// may ask for. So nobody can have the streams of other QPs refused. Whoever is right is not counted.
//
// Not thread-safe: RocePort's, on the loop.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "base/time.h"
#include "emu/fabric/address.h"

namespace stagecoach::emu {

class Refusals {
 public:
  // A QP in one of its lives.
  struct Asked {
    uint32_t qp_number = 0;
    uint64_t generation = 0;
    friend auto operator<=>(const Asked&, const Asked&) = default;
  };
  struct Source {
    // `user` as Stream::PeerUser says.
    Source(const Asked& asked, const IpEndpoint& address, std::optional<uint32_t> user);
    friend auto operator<=>(const Source&, const Source&) = default;

    Asked asked;
    IpEndpoint network;
    std::optional<uint32_t> user;
  };

  // Of wrong proofs. Each is two guesses, since it may be right in two ways.
  static constexpr int kAtOnce = 32;
  static constexpr Duration kForEach = 250ms;
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
