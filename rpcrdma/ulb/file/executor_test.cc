#include "rpcrdma/ulb/file/executor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
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

using Kind = Executor::Kind;

// A door that work waits at.
class Door {
 public:
  void Open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void Pass() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.wait(lock, [this] { return open_; });
    --waiting_;
  }
  int waiting() {
    const std::lock_guard lock(mutex_);
    return waiting_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  int waiting_ = 0;
};

TEST(InlineExecutor, WorkRunsAtOnceAndDoneFromTheLoop) {
  AsioLoop loop;
  InlineExecutor executor(loop);
  std::vector<std::string> order;
  executor.Submit(
      1, Kind::kBrief, [&] { order.push_back("work"); }, [&] { order.push_back("done"); });
  order.push_back("submitted");
  ASSERT_TRUE(RunUntil(loop, [&] { return order.size() == 3; }));
  EXPECT_EQ(order, (std::vector<std::string>{"work", "submitted", "done"}));
}

TEST(WorkerPool, WorkOfALaneRunsInOrderOnOtherThreadsAndDoneOnTheLoops) {
  AsioLoop loop;
  const auto executor = std::move(*WorkerPool::Make(loop));
  constexpr int kLanes = 20;
  constexpr int kEach = 200;
  std::vector<std::vector<int>> worked(kLanes);  // each of one lane alone
  std::vector<std::vector<int>> done(kLanes);
  std::atomic<bool> on_loops_thread = false;
  const std::thread::id loops = std::this_thread::get_id();
  int total = 0;
  for (int i = 0; i < kEach; ++i) {
    for (int lane = 0; lane < kLanes; ++lane) {
      executor->Submit(
          static_cast<Executor::Lane>(lane), i % 3 == 0 ? Kind::kLong : Kind::kBrief,
          [&, lane, i] {
            if (std::this_thread::get_id() == loops) on_loops_thread = true;
            worked[static_cast<size_t>(lane)].push_back(i);
          },
          [&, lane, i] {
            EXPECT_TRUE(loop.OnLoopThread());
            done[static_cast<size_t>(lane)].push_back(i);
            ++total;
          });
    }
  }
  ASSERT_TRUE(RunUntil(loop, [&] { return total == kLanes * kEach; }));
  EXPECT_FALSE(on_loops_thread);
  std::vector<int> expected(kEach);
  for (int i = 0; i < kEach; ++i) expected[static_cast<size_t>(i)] = i;
  for (int lane = 0; lane < kLanes; ++lane) {
    EXPECT_EQ(worked[static_cast<size_t>(lane)], expected) << lane;
    EXPECT_EQ(done[static_cast<size_t>(lane)], expected) << lane;
  }
}

TEST(WorkerPool, ALaneThatTakesItsTimeHoldsUpNoOther) {
  AsioLoop loop;
  Door door;
  const auto executor = std::move(*WorkerPool::Make(loop));
  bool late = false;
  bool brief = false;
  bool other = false;
  executor->Submit(
      1, Kind::kLong, [&] { door.Pass(); }, [] {});
  executor->Submit(
      1, Kind::kBrief, [] {}, [&] { late = true; });
  executor->Submit(
      2, Kind::kBrief, [] {}, [&] { brief = true; });
  executor->Submit(
      3, Kind::kLong, [] {}, [&] { other = true; });
  EXPECT_TRUE(RunUntil(loop, [&] { return brief && other; }));
  EXPECT_FALSE(late) << "it is behind the first of its lane";
  door.Open();
  EXPECT_TRUE(RunUntil(loop, [&] { return late; }));
}

TEST(WorkerPool, HoweverMuchLongWorkThereIsBriefWorkIsDone) {
  AsioLoop loop;
  Door door;
  const auto executor = std::move(*WorkerPool::Make(loop, 5));
  int ended = 0;
  for (Executor::Lane lane = 0; lane < 100; ++lane) {
    executor->Submit(
        lane, Kind::kLong, [&] { door.Pass(); }, [&] { ++ended; });
  }
  int brief = 0;
  for (Executor::Lane lane = 100; lane < 200; ++lane) {
    executor->Submit(
        lane, Kind::kBrief, [] {}, [&] { ++brief; });
  }
  EXPECT_TRUE(RunUntil(loop, [&] { return brief == 100 && door.waiting() == 3; }));
  EXPECT_EQ(door.waiting(), 3) << "two of five are kept";
  EXPECT_EQ(ended, 0);
  door.Open();
  EXPECT_TRUE(RunUntil(loop, [&] { return ended == 100; }));
}

// A process may have no more threads.
TEST(WorkerPool, AFewThreadsLessDoTheSameAndTooFewAreAnError) {
  AsioLoop loop;
  for (size_t available = 0; available <= 6; ++available) {
    SCOPED_TRACE(available);
    size_t started = 0;
    auto made = WorkerPool::Make(loop, 5, [&](std::function<void()> run) {
      if (started == available) throw std::system_error(EAGAIN, std::generic_category());
      ++started;
      return std::thread(std::move(run));
    });
    ASSERT_EQ(made.has_value(), available > WorkerPool::kBriefOnly);
    if (!made) {
      EXPECT_EQ(made.error(), std::errc::resource_unavailable_try_again);
      continue;
    }
    const auto executor = std::move(*made);
    EXPECT_EQ(executor->workers(), std::min<size_t>(available, 5));
    Door door;
    int ended = 0;
    for (Executor::Lane lane = 0; lane < 10; ++lane) {
      executor->Submit(
          lane, Kind::kLong, [&] { door.Pass(); }, [&] { ++ended; });
    }
    bool brief = false;
    executor->Submit(
        10, Kind::kBrief, [] {}, [&] { brief = true; });
    const auto waiting = static_cast<int>(executor->workers() - WorkerPool::kBriefOnly);
    EXPECT_TRUE(RunUntil(loop, [&] { return brief && door.waiting() == waiting; }));
    door.Open();
    EXPECT_TRUE(RunUntil(loop, [&] { return ended == 10; }));
  }
}

TEST(WorkerPool, WhatWorkHeldIsGoneBeforeTheNextWorkOfItsLaneRuns) {
  AsioLoop loop;
  const auto executor = std::move(*WorkerPool::Make(loop));
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = held;
  bool gone = false;
  bool finished = false;
  executor->Submit(
      1, Kind::kLong, [held = std::move(held)] {}, [] {});
  executor->Submit(
      1, Kind::kBrief, [&] { gone = watch.expired(); }, [&] { finished = true; });
  ASSERT_TRUE(RunUntil(loop, [&] { return finished; }));
  EXPECT_TRUE(gone);
}

TEST(WorkerPool, DestructionFinishesAllWorkAndNothingIsDoneAfterwards) {
  AsioLoop loop;
  std::atomic<int> worked = 0;
  int done = 0;
  {
    const auto executor = std::move(*WorkerPool::Make(loop));
    for (Executor::Lane i = 0; i < 300; ++i) {
      executor->Submit(
          i % 7, i % 2 == 0 ? Kind::kLong : Kind::kBrief, [&] { ++worked; }, [&] { ++done; });
    }
  }
  EXPECT_EQ(worked, 300);
  for (int i = 0; i < 10; ++i) loop.RunOnce(1ms);
  EXPECT_EQ(done, 0);
}

}  // namespace
}  // namespace stagecoach::rpcrdma::file
