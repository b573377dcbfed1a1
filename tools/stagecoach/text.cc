#include "tools/stagecoach/text.h"

#include <fmt/format.h>

#include <charconv>
#include <chrono>
#include <ctime>

namespace stagecoach::cli {

std::string FormatBytes(uint64_t bytes) {
  if (bytes < 1024) return fmt::format("{} B", bytes);
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  while (value >= 1023.95 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return fmt::format("{:.1f} {}", value, kUnits[unit]);
}

std::string FormatRate(uint64_t bytes, Duration time) {
  if (time <= 0ns) return "-";
  const double seconds = std::chrono::duration<double>(time).count();
  return FormatBytes(static_cast<uint64_t>(static_cast<double>(bytes) / seconds)) + "/s";
}

std::string FormatDuration(Duration time) {
  const auto ns = static_cast<double>(time.count());
  if (ns < 1e3) return fmt::format("{} ns", time.count());
  if (ns < 1e6) return fmt::format("{:.1f} us", ns / 1e3);
  if (ns < 1e9) return fmt::format("{:.2f} ms", ns / 1e6);
  return fmt::format("{:.2f} s", ns / 1e9);
}

std::string FormatClock(Duration time) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(time).count();
  if (seconds < 3600) return fmt::format("{}:{:02}", seconds / 60, seconds % 60);
  return fmt::format("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60);
}

std::string FormatMode(const rpcrdma::file::Attributes& attributes) {
  using rpcrdma::file::Type;
  std::string text;
  switch (attributes.type) {
    case Type::kRegular:
      text = "-";
      break;
    case Type::kDirectory:
      text = "d";
      break;
    case Type::kSymlink:
      text = "l";
      break;
    case Type::kOther:
      text = "?";
      break;
  }
  for (int shift = 6; shift >= 0; shift -= 3) {
    const uint32_t bits = attributes.mode >> shift;
    text += (bits & 4) ? 'r' : '-';
    text += (bits & 2) ? 'w' : '-';
    text += (bits & 1) ? 'x' : '-';
  }
  return text;
}

std::string FormatTime(const rpcrdma::file::Time& time) {
  const time_t seconds = time.seconds;
  tm calendar;
  if (::localtime_r(&seconds, &calendar) == nullptr) return "?";
  char text[64];
  const size_t size = std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M", &calendar);
  return size == 0 ? "?" : std::string(text, size);
}

std::string FormatStats(const rpcrdma::ConnectionStats& stats) {
  std::string text;
  text += fmt::format(
      "  calls            {} ({} inline, {} by Read chunk, {} by Write chunk, {} long; {} long replies)\n", stats.calls,
      stats.calls_inline, stats.calls_by_read_chunk, stats.calls_by_write_chunk, stats.calls_long, stats.replies_long);
  text += fmt::format("  placed directly  {} by RDMA Read, {} by RDMA Write\n", FormatBytes(stats.bytes_placed_by_read),
                      FormatBytes(stats.bytes_placed_by_write));
  text += fmt::format("  credits          {} granted\n", stats.credits_granted);
  text += fmt::format("  memory           {} registrations, {} invalidations here, {} by the peer\n",
                      stats.registrations, stats.invalidations_local, stats.invalidations_remote);
  return text;
}

std::optional<uint64_t> ParseSize(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  const std::string_view unit(end, static_cast<size_t>(text.data() + text.size() - end));
  int shift = 0;
  if (unit == "K" || unit == "k") shift = 10;
  if (unit == "M" || unit == "m") shift = 20;
  if (unit == "G" || unit == "g") shift = 30;
  if (shift == 0 && !unit.empty()) return std::nullopt;
  if (value > (UINT64_MAX >> shift)) return std::nullopt;
  return value << shift;
}

}  // namespace stagecoach::cli
