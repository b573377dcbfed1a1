#include "tools/stagecoach/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "rpcrdma/ulb/file/names.h"
#include "tools/stagecoach/text.h"

namespace stagecoach::cli {
namespace {

constexpr Duration kPatience = 500ms;
constexpr Duration kInterval = 100ms;

size_t TerminalColumns() {
  winsize size{};
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

}  // namespace

std::string FormatProgress(std::string_view label, uint64_t done, uint64_t total, Duration elapsed, size_t columns) {
  done = std::min(done, total);
  const double share = total == 0 ? 1.0 : static_cast<double>(done) / static_cast<double>(total);
  std::string eta = "-:--";
  if (done > 0) {
    const double left = std::chrono::duration<double>(elapsed).count() * (1 - share) / share;
    if (left < 360000) eta = FormatClock(std::chrono::duration_cast<Duration>(std::chrono::duration<double>(left)));
  }
  const std::string counts = fmt::format("{:>10} / {:<10}", FormatBytes(done), FormatBytes(total));
  const std::string tail = fmt::format("{:3.0f}%  {:>12}  ETA {}", share * 100, FormatRate(done, elapsed), eta);
  // The label gets what it needs up to a third of the line, the bar what is left up to a handsome width; on a narrow
  // terminal the bar goes first, then the counts.
  constexpr size_t kBarMin = 6;
  constexpr size_t kBarMax = 24;
  const size_t label_wish = std::min(label.size(), columns / 3);
  std::string right = fmt::format(" {} {}", counts, tail);
  if (const size_t used = label_wish + right.size() + 3; used + kBarMin <= columns) {
    const size_t width = std::min(columns - used, kBarMax);
    std::string bar(width, ' ');
    const auto filled = static_cast<size_t>(share * static_cast<double>(width));
    std::fill_n(bar.begin(), filled, '=');
    if (filled < width) bar[filled] = '>';
    right = fmt::format(" {} [{}] {}", counts, bar, tail);
  }
  if (right.size() + label_wish > columns) right = fmt::format(" {}", tail);
  if (right.size() > columns) return {};
  // Labels are printable already. The end of a long one says more than its start; cutting must not cut a UTF-8
  // sequence.
  const size_t room = columns - right.size();
  if (label.size() > room) label.remove_prefix(label.size() - room);
  while (!label.empty() && (static_cast<uint8_t>(label[0]) & 0xc0) == 0x80) label.remove_prefix(1);
  return fmt::format("{}{:{}}{}", label, "", room - label.size(), right);
}

Progress::Progress(std::string label, uint64_t total_bytes, Instant start, bool quiet)
    : label_(rpcrdma::file::Printable(label)),
      total_(total_bytes),
      start_(start),
      next_(start + kPatience),
      enabled_(!quiet && ::isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (shown_) std::fputs("\r\x1b[K", stderr);
}

void Progress::Update(uint64_t done_bytes, Instant now) {
  if (!enabled_ || now < next_) return;
  next_ = now + kInterval;
  shown_ = true;
  const std::string line = FormatProgress(label_, done_bytes, total_, now - start_, TerminalColumns());
  fmt::print(stderr, "\r{}\x1b[K", line);
  std::fflush(stderr);
}

}  // namespace stagecoach::cli
