// A seeded pseudo-random generator (xoshiro256**, public-domain algorithm by Blackman and Vigna).
//
// Every component forks its own by name, so that a draw added in one does not change the luck of another. Not for
// secrets: STags of a real device come from the system's generator (emu/nic/objects/stag_source.h).
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace stagecoach {

class Prng {
 public:
  explicit Prng(uint64_t seed);

  uint64_t Next();
  // Uniform in [0, bound); bound 0 yields 0.
  uint64_t Below(uint64_t bound);
  // Uniform in [low, high], both included; low <= high.
  uint64_t Between(uint64_t low, uint64_t high);
  // True once in `n` times on average.
  bool OneIn(uint64_t n) { return Below(n) == 0; }

  // A generator whose sequence depends on this one's seed and the name alone, not on draws made so far.
  Prng Fork(std::string_view name) const;

 private:
  uint64_t seed_;
  std::array<uint64_t, 4> state_;
};

// 64-bit FNV-1a with a final mix; stable across runs and machines, for trace hashes and forks. Not for hostile keys.
uint64_t StableHash(std::string_view bytes, uint64_t seed = 0);

}  // namespace stagecoach
