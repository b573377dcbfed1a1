// Where STags get their unpredictability (RFC 5042 section 7.2: they should be hard to guess), and whatever else peers
// must not guess.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "base/prng.h"

namespace stagecoach::emu {

// Serialised by the registry's lock.
class StagSource {
 public:
  virtual ~StagSource() = default;
  virtual uint64_t Next() = 0;
  // Another one, for a purpose that has this name. What is drawn from one does not show in the other.
  virtual std::unique_ptr<StagSource> Fork(std::string_view name) const = 0;
};

// Seeded from getrandom(2).
std::unique_ptr<StagSource> SystemStagSource();

// Same generator, same STags: for simulation.
std::unique_ptr<StagSource> SeededStagSource(const Prng& prng);

}  // namespace stagecoach::emu
