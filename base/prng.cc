#include "base/prng.h"

#include <bit>

namespace stagecoach {
namespace {

uint64_t Mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

Prng::Prng(uint64_t seed) : seed_(seed) {
  for (uint64_t& word : state_) {
    seed += 0x9e3779b97f4a7c15u;
    word = Mix(seed);
  }
}

uint64_t Prng::Next() {
  const uint64_t result = std::rotl(state_[1] * 5, 7) * 9;
  const uint64_t shifted = state_[1] << 17;
  state_[2] ^= state_[0];
  state_[3] ^= state_[1];
  state_[1] ^= state_[2];
  state_[0] ^= state_[3];
  state_[2] ^= shifted;
  state_[3] = std::rotl(state_[3], 45);
  return result;
}

uint64_t Prng::Below(uint64_t bound) {
  if (bound == 0) return 0;
  // Multiply-shift: the bias is below 2^-64 * bound, far under anything a test could see.
  return static_cast<uint64_t>((static_cast<unsigned __int128>(Next()) * bound) >> 64);
}

uint64_t Prng::Between(uint64_t low, uint64_t high) {
  const uint64_t width = high - low + 1;
  return width == 0 ? Next() : low + Below(width);
}

Prng Prng::Fork(std::string_view name) const {
  return Prng(StableHash(name, seed_));
}

uint64_t StableHash(std::string_view bytes, uint64_t seed) {
  uint64_t hash = 0xcbf29ce484222325u ^ Mix(seed);
  for (unsigned char c : bytes) {
    hash ^= c;
    hash *= 0x100000001b3u;
  }
  return Mix(hash);
}

}  // namespace stagecoach
