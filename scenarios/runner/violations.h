// Violations: what a run found wrong. A run goes on after the first one, for what follows explains it; only the number
// kept is bounded.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/time.h"

namespace stagecoach::scenario {

struct Violation {
  std::string rule;  // which one, in a word that stays the same: "memory.guard", "call.lost"; the shrinker compares it
  std::string text;  // what happened, for people
  Instant when{};
};

class Violations {
 public:
  static constexpr size_t kKept = 20;

  void Add(Instant when, std::string_view rule, std::string text) {
    if (list_.size() < kKept) list_.push_back({std::string(rule), std::move(text), when});
  }
  bool empty() const { return list_.empty(); }
  const std::vector<Violation>& list() const { return list_; }

 private:
  std::vector<Violation> list_;
};

}  // namespace stagecoach::scenario
