// Progress of a transfer on standard error: a bar, when a person is watching and it takes long enough to wonder.
//
//   licenses/GPL-3     40.0 MiB / 160.0 MiB  [====>             ]  25%    20.0 MiB/s  ETA 0:06
#pragma once

#include <cstdint>
#include <string>

#include "base/time.h"

namespace stagecoach::cli {

class Progress {
 public:
  // Shown from half a second on, at most ten times a second, and only when standard error is a terminal and `quiet` is
  // not set.
  Progress(std::string label, uint64_t total_bytes, Instant start, bool quiet);
  // Leaves the line empty.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Update(uint64_t done_bytes, Instant now);

 private:
  std::string label_;
  uint64_t total_;
  Instant start_;
  Instant next_;
  bool enabled_;
  bool shown_ = false;
};

// The line itself, at most `columns` wide; for tests.
std::string FormatProgress(std::string_view label, uint64_t done, uint64_t total, Duration elapsed, size_t columns);

}  // namespace stagecoach::cli
