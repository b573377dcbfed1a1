// Shared receive queues by themselves, and under QPs of a simulated pair.

#include "emu/nic/objects/shared_receive_queue.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <set>
#include <thread>
#include <vector>

#include "emu/nic/nic_test_support.h"

namespace stagecoach::emu {
namespace {

class SharedReceiveQueueTest : public ::testing::Test {
 protected:
  SimPair pair_;
  AsyncEventQueue events_{pair_.fabric_a};
  SharedReceiveQueue queue_{1, 2, {.max_wr = 4, .max_sge = 2, .limit = 0}, events_, this};

  int Post(uint64_t wr_id, std::vector<ScatterGather> sges = {}) { return queue_.Post({wr_id, sges}); }
  size_t EventsWaiting() {
    fcntl(events_.fd(), F_SETFL, fcntl(events_.fd(), F_GETFL) | O_NONBLOCK);
    size_t count = 0;
    while (auto event = events_.GetEvent()) {
      EXPECT_EQ(event->type, AsyncEventType::kSrqLimitReached);
      EXPECT_EQ(event->srq, &queue_);
      events_.Ack(*event);
      ++count;
    }
    return count;
  }
};

TEST_F(SharedReceiveQueueTest, GivesReceivesInTheOrderTheyWerePosted) {
  EXPECT_EQ(queue_.TakeReceive(), nullptr);
  for (uint64_t i = 0; i < 4; ++i) ASSERT_EQ(Post(i, {{100 + i, 8, 7}}), 0);
  for (uint64_t i = 0; i < 4; ++i) {
    const ReceiveWork* work = queue_.TakeReceive();
    ASSERT_NE(work, nullptr);
    EXPECT_EQ(work->wr_id, i);
    ASSERT_EQ(work->sges.size(), 1u);
    EXPECT_EQ(work->sges[0].address, 100 + i);
  }
  EXPECT_EQ(queue_.TakeReceive(), nullptr);
}

TEST_F(SharedReceiveQueueTest, WhatIsTakenCountsUntilItIsReleased) {
  for (uint64_t i = 0; i < 4; ++i) ASSERT_EQ(Post(i), 0);
  const ReceiveWork* first = queue_.TakeReceive();
  EXPECT_EQ(Post(4), ENOMEM);
  queue_.Release(first);
  EXPECT_EQ(Post(4), 0);
}

TEST_F(SharedReceiveQueueTest, SlotsComeBackInAnyOrderAndMemoryStaysBounded) {
  std::vector<const ReceiveWork*> taken;
  uint64_t next = 0;
  for (int round = 0; round < 100; ++round) {
    while (Post(next) == 0) ++next;
    while (const ReceiveWork* work = queue_.TakeReceive()) taken.push_back(work);
    ASSERT_EQ(taken.size(), 4u);
    // The youngest first, then the oldest.
    for (size_t i : {3u, 0u}) {
      queue_.Release(taken[i]);
      taken.erase(taken.begin() + static_cast<ptrdiff_t>(i));
    }
  }
  EXPECT_EQ(queue_.counters().slots, 4u);
}

TEST_F(SharedReceiveQueueTest, ASlotKeepsItsAddressWhenTheQueueGrows) {
  ASSERT_EQ(Post(1, {{5, 6, 7}}), 0);
  const ReceiveWork* first = queue_.TakeReceive();
  ASSERT_EQ(queue_.Modify(1000, std::nullopt), 0);
  for (uint64_t i = 0; i < 999; ++i) ASSERT_EQ(Post(i), 0);
  EXPECT_EQ(Post(999), ENOMEM);
  EXPECT_EQ(first->wr_id, 1u);
  EXPECT_EQ(first->sges[0].address, 5u);
}

TEST_F(SharedReceiveQueueTest, ResizingIsAllOrNothing) {
  for (uint64_t i = 0; i < 3; ++i) ASSERT_EQ(Post(i), 0);
  EXPECT_EQ(queue_.Modify(0, std::nullopt), EINVAL);
  EXPECT_EQ(queue_.Modify(2, std::nullopt), EINVAL);
  EXPECT_EQ(queue_.Modify(8, 9), EINVAL);
  EXPECT_EQ(queue_.Query().max_wr, 4u);
  EXPECT_EQ(queue_.Modify(3, 3), 0);
  EXPECT_EQ(queue_.Query().max_wr, 3u);
  EXPECT_EQ(queue_.Query().limit, 3u);
  EXPECT_EQ(queue_.Modify(8, std::nullopt), 0);
  EXPECT_EQ(queue_.Query().limit, 3u) << "the limit was not named";
}

TEST_F(SharedReceiveQueueTest, TheLimitFiresOnceWhenFewerAreLeft) {
  for (uint64_t i = 0; i < 4; ++i) ASSERT_EQ(Post(i), 0);
  ASSERT_EQ(queue_.Modify(std::nullopt, 3), 0);
  queue_.TakeReceive();
  EXPECT_EQ(EventsWaiting(), 0u);
  queue_.TakeReceive();
  EXPECT_EQ(EventsWaiting(), 1u);
  EXPECT_EQ(queue_.Query().limit, 0u);
  queue_.TakeReceive();
  EXPECT_EQ(EventsWaiting(), 0u);
}

TEST_F(SharedReceiveQueueTest, ALimitArmedBelowItFiresAtTheNextConsumption) {
  for (uint64_t i = 0; i < 2; ++i) ASSERT_EQ(Post(i), 0);
  ASSERT_EQ(queue_.Modify(std::nullopt, 4), 0);
  EXPECT_EQ(EventsWaiting(), 0u);
  EXPECT_EQ(queue_.TakeReceive()->wr_id, 0u);
  EXPECT_EQ(EventsWaiting(), 1u);
}

TEST_F(SharedReceiveQueueTest, ThreadsPostTakeAndReleaseAtOnceAndEachReceiveIsTakenOnce) {
  ASSERT_EQ(queue_.Modify(64, std::nullopt), 0);
  constexpr uint64_t kEach = 2000;
  constexpr int kPosters = 3;
  constexpr int kTakers = 3;
  std::atomic<uint64_t> taken{0};
  std::vector<std::vector<uint64_t>> seen(kTakers);
  std::vector<std::thread> threads;
  for (int t = 0; t < kPosters; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < kEach;) {
        if (Post(t * kEach + i) == 0) {
          ++i;
        } else {
          std::this_thread::yield();
        }
      }
    });
  }
  for (int t = 0; t < kTakers; ++t) {
    threads.emplace_back([&, t] {
      const ReceiveWork* held = nullptr;  // given back one late, so that others overtake
      while (taken.load() < kPosters * kEach) {
        const ReceiveWork* work = queue_.TakeReceive();
        if (work != nullptr) {
          seen[static_cast<size_t>(t)].push_back(work->wr_id);
          ++taken;
        } else {
          std::this_thread::yield();
        }
        if (held != nullptr) queue_.Release(held);
        held = work;
      }
      if (held != nullptr) queue_.Release(held);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::set<uint64_t> all;
  for (const auto& part : seen) {
    // Those of one poster in its order.
    std::vector<uint64_t> last(kPosters, 0);
    for (uint64_t id : part) {
      const size_t poster = id / kEach;
      EXPECT_GE(id + 1, last[poster]);
      last[poster] = id + 1;
      EXPECT_TRUE(all.insert(id).second) << id << " was taken twice";
    }
  }
  EXPECT_EQ(all.size(), kPosters * kEach);
  EXPECT_EQ(queue_.counters().released, kPosters * kEach);
}

// --- Under a QP ---

class SharedReceivesOfAQpTest : public ::testing::Test {
 protected:
  void SetUp() override {
    srq_ = *b_.nic->CreateSrq(*b_.context, b_.pd, {.max_wr = 8, .max_sge = 1, .limit = 0}, nullptr);
    ASSERT_EQ(b_.nic->DestroyQp(b_.qp->handle()), 0);
    QpCreate create;
    create.pd = b_.pd;
    create.send_cq = create.receive_cq = b_.cq;
    create.capabilities = {8, 8, 1, 1, 0};
    create.srq = srq_;
    b_.qp = *b_.nic->CreateQp(*b_.context, create);
    pair_.Join(a_, b_);
  }

  SimPair pair_;
  TestHost a_{pair_.fabric_a, "a"};
  TestHost b_{pair_.fabric_b, "b"};
  SharedReceiveQueue* srq_ = nullptr;
};

TEST_F(SharedReceivesOfAQpTest, TheQpHasNoRoomForReceivesOfItsOwn) {
  EXPECT_EQ(b_.qp->capabilities().max_receive_wr, 0u);
  EXPECT_EQ(b_.Receive(1, {}), EINVAL);
}

TEST_F(SharedReceivesOfAQpTest, AReceiveCutOffInTheMiddleIsGivenBack) {
  const TestBuffer from = a_.Register(1 << 20);
  const TestBuffer to = b_.Register(1 << 20);
  for (uint64_t i = 0; i < 2; ++i) {
    const std::vector<ScatterGather> sges = {to.All()};
    ASSERT_EQ(srq_->Post({i, sges}), 0);
  }
  ASSERT_EQ(a_.Send(1, {from.All()}), 0);
  ASSERT_TRUE(pair_.world.RunUntil([&] { return srq_->counters().taken == 1; }));
  ASSERT_EQ(b_.ToState(QpState::kErr), 0);
  ASSERT_TRUE(pair_.world.RunUntil([&] { return b_.Completed(1); }));
  EXPECT_EQ(b_.completions[0].wr_id, 0u);
  EXPECT_EQ(b_.completions[0].status, CompletionStatus::kFlushed);
  EXPECT_EQ(srq_->counters().released, 1u);
  EXPECT_EQ(b_.completions.size(), 1u) << "the other Receive is still the queue's";
}

TEST_F(SharedReceivesOfAQpTest, DestroyingTheQpInTheMiddleOfAMessageLeavesNothingTaken) {
  const TestBuffer from = a_.Register(1 << 20);
  const TestBuffer to = b_.Register(1 << 20);
  const std::vector<ScatterGather> sges = {to.All()};
  ASSERT_EQ(srq_->Post({1, sges}), 0);
  ASSERT_EQ(a_.Send(1, {from.All()}), 0);
  ASSERT_TRUE(pair_.world.RunUntil([&] { return srq_->counters().taken == 1; }));
  EXPECT_EQ(b_.nic->DestroySrq(srq_->handle()), EBUSY);
  ASSERT_EQ(b_.nic->DestroyQp(b_.qp->handle()), 0);
  EXPECT_EQ(srq_->counters().released, 1u);
  EXPECT_EQ(b_.nic->DestroySrq(srq_->handle()), 0);
}

TEST_F(SharedReceivesOfAQpTest, ResettingTheQpForgetsItsCompletionsAndKeepsTheQueue) {
  const TestBuffer from = a_.Register(64);
  const TestBuffer to = b_.Register(64);
  for (uint64_t i = 0; i < 3; ++i) {
    const std::vector<ScatterGather> sges = {to.All()};
    ASSERT_EQ(srq_->Post({i, sges}), 0);
  }
  ASSERT_EQ(a_.Send(1, {from.All()}), 0);
  ASSERT_TRUE(pair_.world.RunUntil([&] { return srq_->counters().released == 1; }));
  ASSERT_EQ(b_.ToState(QpState::kReset), 0);
  EXPECT_FALSE(b_.Completed(1));
  EXPECT_EQ(srq_->TakeReceive()->wr_id, 1u);
}

TEST_F(SharedReceivesOfAQpTest, LimitsOfTheDeviceHold) {
  const DeviceProfile& profile = b_.nic->profile();
  const auto create = [&](SrqAttributes attributes) {
    return b_.nic->CreateSrq(*b_.context, b_.pd, attributes, nullptr);
  };
  EXPECT_EQ(create({.max_wr = 0, .max_sge = 1, .limit = 0}), Err(EINVAL));
  EXPECT_EQ(create({.max_wr = profile.max_srq_wr + 1, .max_sge = 1, .limit = 0}), Err(EINVAL));
  EXPECT_EQ(create({.max_wr = 1, .max_sge = profile.max_srq_sge + 1, .limit = 0}), Err(EINVAL));
  EXPECT_EQ(create({.max_wr = 1, .max_sge = 1, .limit = 2}), Err(EINVAL));
  EXPECT_EQ(b_.nic->CreateSrq(*b_.context, 9999, {.max_wr = 1, .max_sge = 1, .limit = 0}, nullptr), Err(EINVAL));
  EXPECT_EQ(b_.nic->ModifySrq(srq_->handle(), profile.max_srq_wr + 1, std::nullopt), EINVAL);
  EXPECT_EQ(b_.nic->ModifySrq(9999, 1, std::nullopt), ENOENT);
  EXPECT_EQ(b_.nic->DestroySrq(9999), ENOENT);
  EXPECT_EQ(b_.nic->FindSrq(9999), nullptr);
  EXPECT_EQ(b_.nic->DeallocatePd(b_.pd), EBUSY);
}

}  // namespace
}  // namespace stagecoach::emu
