#include "rpcrdma/ulb/file/executor.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <vector>

#include "base/asio_loop/asio_loop.h"

namespace stagecoach::rpcrdma::file {
namespace {

// Runs the loop until `condition` holds; the bound only matters when something is broken.
template <typename Condition>
bool RunUntil(AsioLoop& loop, Condition condition) {
  const Instant bound = loop.Now() + 10s;
  while (!condition() && loop.Now() < bound) loop.RunOnce(100ms);
  return condition();
}

TEST(InlineExecutor, WorkRunsAtOnceAndDoneFromTheLoop) {
  AsioLoop loop;
  InlineExecutor executor(loop);
  std::vector<std::string> order;
  executor.Submit([&] { order.push_back("work"); }, [&] { order.push_back("done"); });
  order.push_back("submitted");
  ASSERT_TRUE(RunUntil(loop, [&] { return order.size() == 3; }));
  EXPECT_EQ(order, (std::vector<std::string>{"work", "submitted", "done"}));
}

TEST(WorkerThread, WorkRunsOnAnotherThreadInOrderAndDoneOnTheLoops) {
  AsioLoop loop;
  WorkerThread executor(loop);
  std::vector<int> worked;
  std::vector<int> done;
  std::thread::id worker;
  for (int i = 0; i < 1000; ++i) {
    executor.Submit(
        [&, i] {
          worker = std::this_thread::get_id();
          worked.push_back(i);
        },
        [&, i] {
          EXPECT_TRUE(loop.OnLoopThread());
          done.push_back(i);
        });
  }
  ASSERT_TRUE(RunUntil(loop, [&] { return done.size() == 1000; }));
  EXPECT_NE(worker, std::this_thread::get_id());
  for (int i = 0; i < 1000; ++i) {
    EXPECT_EQ(worked[i], i);
    EXPECT_EQ(done[i], i);
  }
}

TEST(WorkerThread, WhatWorkHeldIsGoneBeforeTheNextWorkRuns) {
  AsioLoop loop;
  WorkerThread executor(loop);
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = held;
  bool gone = false;
  bool finished = false;
  executor.Submit([held = std::move(held)] {}, [] {});
  executor.Submit([&] { gone = watch.expired(); }, [&] { finished = true; });
  ASSERT_TRUE(RunUntil(loop, [&] { return finished; }));
  EXPECT_TRUE(gone);
}

TEST(WorkerThread, DestructionFinishesTheQueueAndNothingIsDoneAfterwards) {
  AsioLoop loop;
  int worked = 0;
  int done = 0;
  {
    WorkerThread executor(loop);
    for (int i = 0; i < 100; ++i) executor.Submit([&] { ++worked; }, [&] { ++done; });
  }
  EXPECT_EQ(worked, 100);
  for (int i = 0; i < 10; ++i) loop.RunOnce(1ms);
  EXPECT_EQ(done, 0);
}

}  // namespace
}  // namespace stagecoach::rpcrdma::file
