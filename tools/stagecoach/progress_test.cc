#include "tools/stagecoach/progress.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace stagecoach::cli
