// How the CLI writes quantities and what RDMA did.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/time.h"
#include "rpcrdma/core/stats.h"
#include "rpcrdma/ulb/file/types.h"

namespace stagecoach::cli {

// "0 B", "999 B", "1.5 KiB", "48.0 MiB".
std::string FormatBytes(uint64_t bytes);
// "137.2 MiB/s"; "-" when no time passed.
std::string FormatRate(uint64_t bytes, Duration time);
// "850 ns", "12.3 us", "4.56 ms", "1.23 s".
std::string FormatDuration(Duration time);
// "0:07", "12:34", "1:02:03".
std::string FormatClock(Duration time);
// "drwxr-xr-x".
std::string FormatMode(const rpcrdma::file::Attributes& attributes);
// "2026-11-20 23:45" in the local time zone; "?" for times the calendar has no name for.
std::string FormatTime(const rpcrdma::file::Time& time);

// The block that --stats prints: several lines, each ended.
std::string FormatStats(const rpcrdma::ConnectionStats& stats);

// "4096", "64K", "1M", "2G" (powers of 1024).
std::optional<uint64_t> ParseSize(std::string_view text);

}  // namespace stagecoach::cli
