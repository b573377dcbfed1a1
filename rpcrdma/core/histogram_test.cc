#include "rpcrdma/core/histogram.h"

#include <gtest/gtest.h>

namespace stagecoach::rpcrdma {
namespace {

TEST(Histogram, ABucketEndsWithItsBound) {
  Histogram histogram;
  histogram.Record(0);
  histogram.Record(1);
  for (size_t bucket = 1; bucket < Histogram::kBounds; ++bucket) {
    histogram.Record(Histogram::bound(bucket - 1) + 1);
    histogram.Record(Histogram::bound(bucket));
  }
  histogram.Record(Histogram::bound(Histogram::kBounds - 1) + 1);
  histogram.Record(uint64_t{1} << 63);
  for (size_t bucket = 1; bucket <= Histogram::kBounds; ++bucket) {
    // 2 is the one value of its bucket, and was counted twice.
    EXPECT_EQ(histogram.count(bucket), 2u) << bucket;
  }
  EXPECT_EQ(histogram.count(0), 2u);
  EXPECT_EQ(histogram.count(), 2 * (Histogram::kBounds + 1));
}

TEST(Histogram, TimesAreMicrosecondsBegun) {
  Histogram histogram;
  histogram.RecordTime(1ns);
  histogram.RecordTime(1us);
  histogram.RecordTime(1001ns);
  histogram.RecordTime(-1s);
  EXPECT_EQ(histogram.count(0), 3u);
  EXPECT_EQ(histogram.count(1), 1u);
  EXPECT_EQ(histogram.sum(), 4u);
}

TEST(Histogram, AddsUp) {
  Histogram one;
  one.Record(3);
  Histogram other;
  other.Record(4);
  other.Record(100);
  one += other;
  EXPECT_EQ(one.count(), 3u);
  EXPECT_EQ(one.count(2), 2u);
  EXPECT_EQ(one.sum(), 107u);
}

}  // namespace
}  // namespace stagecoach::rpcrdma
