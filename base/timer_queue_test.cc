#include "base/timer_queue.h"

#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>

namespace stagecoach {
namespace {

constexpr Instant kBegin{};
constexpr size_t kAll = 1000;

class TimerQueueTest : public testing::Test {
 protected:
  TimerQueue::TimerId Add(Instant when, char name) {
    return queue_.At(when, [this, name] { fired_ += name; });
  }

  TimerQueue queue_;
  std::string fired_;
};

TEST_F(TimerQueueTest, FiresInOrderOfTimeAndThenOfSettingAndNotBefore) {
  Add(kBegin + 2ms, 'c');
  Add(kBegin + 1ms, 'a');
  Add(kBegin + 1ms, 'b');
  Add(kBegin + 3ms, 'd');
  EXPECT_EQ(queue_.First(), kBegin + 1ms);
  EXPECT_FALSE(queue_.Run(kBegin, kAll));
  EXPECT_FALSE(queue_.IsDue(kBegin));
  EXPECT_TRUE(queue_.IsDue(kBegin + 1ms));
  EXPECT_TRUE(queue_.Run(kBegin + 2ms, kAll));
  EXPECT_EQ(fired_, "abc");
  EXPECT_EQ(queue_.First(), kBegin + 3ms);
}

TEST_F(TimerQueueTest, FiresNoMoreThanItIsAskedTo) {
  for (const char name : {'a', 'b', 'c'}) Add(kBegin, name);
  EXPECT_TRUE(queue_.Run(kBegin, 2));
  EXPECT_EQ(fired_, "ab");
  EXPECT_TRUE(queue_.Run(kBegin, 2));
  EXPECT_EQ(fired_, "abc");
  EXPECT_FALSE(queue_.Run(kBegin, 2));
  EXPECT_EQ(queue_.First(), std::nullopt);
}

TEST_F(TimerQueueTest, OneThatIsCancelledDoesNotFire) {
  const auto first = Add(kBegin, 'a');
  Add(kBegin, 'b');
  queue_.Cancel(first);
  queue_.Cancel(first);
  queue_.Cancel(0);
  queue_.Run(kBegin, kAll);
  EXPECT_EQ(fired_, "b");
}

TEST_F(TimerQueueTest, OneThatSetsItselfAgainWaitsForTheNextRun) {
  int fired = 0;
  std::function<void()> again = [&] {
    ++fired;
    queue_.At(kBegin, again);
  };
  queue_.At(kBegin, again);
  queue_.Run(kBegin, kAll);
  EXPECT_EQ(fired, 1);
  queue_.Run(kBegin, kAll);
  EXPECT_EQ(fired, 2);
}

TEST_F(TimerQueueTest, WhatACancelledOneHoldsMayComeBack) {
  TimerQueue::TimerId other = Add(kBegin, 'x');
  auto held = std::shared_ptr<int>(new int(0), [&](int* number) {
    delete number;
    queue_.Cancel(other);
    Add(kBegin, 'y');
  });
  const auto timer = queue_.At(kBegin, [held] {});
  held.reset();
  queue_.Cancel(timer);
  queue_.Run(kBegin, kAll);
  EXPECT_EQ(fired_, "y");
}

TEST_F(TimerQueueTest, AfterAnExceptionTheRestFireInTheNextRun) {
  queue_.At(kBegin, [] { throw std::runtime_error("fails"); });
  Add(kBegin, 'b');
  EXPECT_THROW(queue_.Run(kBegin, kAll), std::runtime_error);
  queue_.Run(kBegin, kAll);
  EXPECT_EQ(fired_, "b");
}

}  // namespace
}  // namespace stagecoach
