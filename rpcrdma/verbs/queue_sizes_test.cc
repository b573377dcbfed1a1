#include "rpcrdma/verbs/queue_sizes.h"

#include <gtest/gtest.h>

namespace stagecoach::rpcrdma::internal {
namespace {

constexpr QueueSizes kWanted{.receives = 64, .sends = 96, .send_queue = 290, .signal_interval = 16};

TEST(QueueSizes, AreWhatWasAskedForWhereTheDeviceHasRoom) {
  const auto sizes = FitToDevice(kWanted, 290, 354);
  ASSERT_TRUE(sizes.has_value());
  EXPECT_EQ(sizes->receives, 64u);
  EXPECT_EQ(sizes->sends, 96u);
  EXPECT_EQ(sizes->send_queue, 290u);
  EXPECT_EQ(sizes->signal_interval, 16u);
}

TEST(QueueSizes, GrowWithTheCredits) {
  const QueueSizes one = SizesForCredits(1, 0);
  EXPECT_EQ(one.receives, 1u);
  EXPECT_EQ(one.sends, 3u);
  EXPECT_EQ(one.send_queue, 5u);
  EXPECT_EQ(one.signal_interval, 1u);
  const QueueSizes many = SizesForCredits(1024, 10);
  EXPECT_EQ(many.receives, 1024u);
  EXPECT_EQ(many.sends, 1056u);
  EXPECT_EQ(many.send_queue, 1068u);
  EXPECT_EQ(many.signal_interval, 16u);
}

TEST(QueueSizes, FitEveryDeviceThatCanCarryOneMessageEachWay) {
  for (int requests = 3; requests < 300; ++requests) {
    for (int completions = 4; completions < 360; ++completions) {
      SCOPED_TRACE(std::to_string(requests) + " work requests, " + std::to_string(completions) + " completions");
      const auto sizes = FitToDevice(kWanted, requests, completions);
      ASSERT_TRUE(sizes.has_value());
      ASSERT_LE(sizes->send_queue, static_cast<uint32_t>(requests));
      ASSERT_LE(sizes->receives, static_cast<uint32_t>(requests));
      ASSERT_LE(sizes->completions(), static_cast<uint32_t>(completions));
      ASSERT_GE(sizes->receives, 1u);
      ASSERT_GE(sizes->sends, 1u);
      ASSERT_LE(sizes->sends + kMarkers, sizes->send_queue);
      ASSERT_GE(sizes->signal_interval, 1u);
      // Otherwise all Send buffers could be on the queue without a completion to come.
      ASSERT_LE(sizes->signal_interval, sizes->sends);
    }
  }
}

TEST(QueueSizes, DoNotExistWithoutRoomForOneMessageEachWay) {
  EXPECT_FALSE(FitToDevice(kWanted, 2, 1000).has_value());
  EXPECT_FALSE(FitToDevice(kWanted, 1000, 3).has_value());
  EXPECT_FALSE(FitToDevice(kWanted, -1, -1).has_value());
}

}  // namespace
}  // namespace stagecoach::rpcrdma::internal
