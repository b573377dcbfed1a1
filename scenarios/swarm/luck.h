// How the drawers of worlds draw numbers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/prng.h"

namespace stagecoach::scenario {

// From `low` to `high`; each power of two is as likely as any other.
inline uint64_t ScaledBy(Prng& prng, uint64_t low, uint64_t high) {
  uint64_t bits = 0;
  while ((high >> bits) > std::max<uint64_t>(low, 1)) ++bits;
  const uint64_t top = std::max(low, high >> prng.Below(bits + 1));
  return prng.Between(low, top);
}

}  // namespace stagecoach::scenario
