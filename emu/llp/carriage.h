// Carriage: what carries the records of a connection, and why nothing faster does; for people and traces.
#pragma once

#include <string_view>

namespace stagecoach::emu {

struct Carriage {
  // A word: "tcp", "shm", "memory", or "stream" for one of a fabric without a name of its own.
  std::string_view by = "stream";
  // A clause in words that last; empty: there is nothing to say.
  std::string_view why;

  friend bool operator==(const Carriage&, const Carriage&) = default;
};

}  // namespace stagecoach::emu
