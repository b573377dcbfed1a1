#include "tools/stagecoach/progress.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <unistd.h>

#include <cstdio>

namespace stagecoach::cli {
namespace {

TEST(Progress, ShowsShareRateAndTimeLeft) {
  const std::string line = FormatProgress("big.bin", 40u << 20, 160u << 20, 2s, 100);
  EXPECT_NE(line.find("big.bin"), std::string::npos);
  EXPECT_NE(line.find("40.0 MiB / 160.0 MiB"), std::string::npos) << line;
  EXPECT_NE(line.find(" 25%"), std::string::npos) << line;
  EXPECT_NE(line.find("20.0 MiB/s"), std::string::npos) << line;
  EXPECT_NE(line.find("ETA 0:06"), std::string::npos) << line;
}

TEST(Progress, OnAnOrdinaryTerminalTheNameAndTheBarBothFit) {
  const std::string line = FormatProgress("large.bin", 40u << 20, 160u << 20, 2s, 80);
  EXPECT_EQ(line.substr(0, 10), "large.bin ") << line;
  EXPECT_NE(line.find("[=="), std::string::npos) << line;
  const std::string narrow = FormatProgress("a/long/way/to/large.bin", 40u << 20, 160u << 20, 2s, 48);
  EXPECT_NE(narrow.find("large.bin "), std::string::npos) << narrow;
}

TEST(Progress, NeverWiderThanTheTerminal) {
  for (size_t columns = 0; columns < 200; ++columns) {
    EXPECT_LE(FormatProgress(std::string(300, 'n'), 1, 2, 1s, columns).size(), columns) << columns;
  }
}

TEST(Progress, NoTimeLeftIsInventedBeforeTheFirstByte) {
  EXPECT_NE(FormatProgress("x", 0, 100, 1s, 100).find("ETA -:--"), std::string::npos);
  EXPECT_NE(FormatProgress("x", 0, 0, 1s, 100).find("100%"), std::string::npos);
}

// Standard error is a terminal, or a pipe, while this lives; what arrived there is read from the other side.
class StandardError {
 public:
  explicit StandardError(bool terminal) : saved_(::dup(STDERR_FILENO)) {
    int ends[2] = {-1, -1};  // to read from, to write to
    const int made = terminal ? ::openpty(&ends[0], &ends[1], nullptr, nullptr, nullptr) : ::pipe(ends);
    EXPECT_EQ(made, 0);
    ::dup2(ends[1], STDERR_FILENO);
    ::close(ends[1]);
    from_ = ends[0];
    ::fcntl(from_, F_SETFL, O_NONBLOCK);
  }
  ~StandardError() {
    ::dup2(saved_, STDERR_FILENO);
    ::close(saved_);
    ::close(from_);
  }
  std::string Text() {
    std::fflush(stderr);
    char text[4096];
    const ssize_t n = ::read(from_, text, sizeof(text));
    return n > 0 ? std::string(text, static_cast<size_t>(n)) : std::string();
  }

 private:
  const int saved_;
  int from_ = -1;
};

// What a person sees who watches half of a transfer of ten seconds.
std::string Shown(bool terminal, bool quiet, Duration elapsed) {
  StandardError error(terminal);
  Progress progress("file", 1000, Instant(), quiet);
  progress.Update(500, Instant(elapsed));
  return error.Text();
}

TEST(Progress, IsShownOnATerminalOnceATransferTakesLong) {
  const std::string text = Shown(true, false, 5s);
  EXPECT_NE(text.find("50%"), std::string::npos) << text;
  EXPECT_NE(text.find("ETA"), std::string::npos) << text;
  EXPECT_EQ(Shown(true, false, 400ms), "");
}

TEST(Progress, IsNotShownElsewhereOrToWhoWantsQuiet) {
  EXPECT_EQ(Shown(false, false, 5s), "");
  EXPECT_EQ(Shown(true, true, 5s), "");
}

}  // namespace
}  // namespace stagecoach::cli
