#include "tools/stagecoach/text.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <ctime>

namespace stagecoach::cli {
namespace {

TEST(Text, Bytes) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1024), "1.0 KiB");
  EXPECT_EQ(FormatBytes(48u << 20), "48.0 MiB");
  EXPECT_EQ(FormatBytes((1u << 20) - 1), "1.0 MiB") << "never 1024.0 KiB";
  EXPECT_EQ(FormatBytes(UINT64_MAX), "16.0 EiB");
}

TEST(Text, RatesAndTimes) {
  EXPECT_EQ(FormatRate(1 << 20, 500ms), "2.0 MiB/s");
  EXPECT_EQ(FormatRate(1, 0s), "-");
  EXPECT_EQ(FormatDuration(999ns), "999 ns");
  EXPECT_EQ(FormatDuration(12345ns), "12.3 us");
  EXPECT_EQ(FormatDuration(4560us), "4.56 ms");
  EXPECT_EQ(FormatDuration(90s), "90.00 s");
  EXPECT_EQ(FormatClock(7s), "0:07");
  EXPECT_EQ(FormatClock(3723s), "1:02:03");
}

TEST(Text, ModesLookLikeThoseOfLs) {
  using rpcrdma::file::Type;
  EXPECT_EQ(FormatMode({Type::kDirectory, 0755, 0, {}}), "drwxr-xr-x");
  EXPECT_EQ(FormatMode({Type::kRegular, 0640, 0, {}}), "-rw-r-----");
  EXPECT_EQ(FormatMode({Type::kSymlink, 0777, 0, {}}), "lrwxrwxrwx");
  EXPECT_EQ(FormatMode({Type::kOther, 0, 0, {}}), "?---------");
}

TEST(Text, TimesBeyondTheCalendarAreNotMadeUp) {
  ::setenv("TZ", "UTC", 1);
  ::tzset();
  EXPECT_EQ(FormatTime({0, 0}), "1970-01-01 00:00");
  EXPECT_EQ(FormatTime({INT64_MAX, 0}), "?");
}

TEST(Text, Sizes) {
  EXPECT_EQ(ParseSize("4096"), 4096u);
  EXPECT_EQ(ParseSize("64K"), 65536u);
  EXPECT_EQ(ParseSize("2g"), uint64_t{2} << 30);
  for (const char* text : {"", "K", "1KB", "-1", "1 M", "99999999999999999999", "99999999999G"}) {
    EXPECT_EQ(ParseSize(text), std::nullopt) << text;
  }
}

}  // namespace
}  // namespace stagecoach::cli
