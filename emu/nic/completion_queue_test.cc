#include "emu/nic/completion_queue.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <atomic>
#include <cerrno>
#include <memory>
#include <thread>

#include "emu/nic/nic_test_support.h"

namespace stagecoach::emu {
namespace {

class CompletionQueueTest : public ::testing::Test {
 protected:
  CompletionQueueTest() { fcntl(host_.channel->fd(), F_SETFL, O_NONBLOCK); }

  static WorkCompletion Completion(uint64_t wr_id, bool solicited = false,
                                   CompletionStatus status = CompletionStatus::kSuccess, uint32_t qp = 5) {
    WorkCompletion completion;
    completion.wr_id = wr_id;
    completion.solicited = solicited;
    completion.status = status;
    completion.qp_number = qp;
    return completion;
  }
  std::vector<uint64_t> Drain() {
    std::vector<uint64_t> ids;
    WorkCompletion batch[3];
    while (const size_t n = cq_.Poll(batch)) {
      for (size_t i = 0; i < n; ++i) ids.push_back(batch[i].wr_id);
    }
    return ids;
  }
  // Events on the channel now, all acknowledged.
  int Events() {
    int count = 0;
    while (const auto event = host_.channel->GetEvent()) {
      EXPECT_EQ(*event, &cq_);
      (*event)->AckEvents(1);
      ++count;
    }
    return count;
  }

  SimPair pair_;
  TestHost host_{pair_.fabric_a, "a", IwarpProfile(), nullptr, 4};
  CompletionQueue& cq_ = *host_.cq;
};

using Ids = std::vector<uint64_t>;

TEST_F(CompletionQueueTest, CompletionsComeOutInOrderAndTheRingGoesRound) {
  for (uint64_t round = 0; round < 10; ++round) {
    for (uint64_t i = 0; i < 3; ++i) ASSERT_TRUE(cq_.Push(Completion(round * 3 + i)));
    EXPECT_EQ(Drain(), (Ids{round * 3, round * 3 + 1, round * 3 + 2}));
  }
}

TEST_F(CompletionQueueTest, UnarmedMakesNoEvent) {
  cq_.Push(Completion(1));
  EXPECT_EQ(Events(), 0);
}

TEST_F(CompletionQueueTest, ArmingIsOneShotAndSeesOnlyWhatComesAfterIt) {
  cq_.Push(Completion(1));
  cq_.RequestNotify(false);
  EXPECT_EQ(Events(), 0) << "what was there before does not count";
  cq_.Push(Completion(2));
  cq_.Push(Completion(3));
  EXPECT_EQ(Events(), 1);
  cq_.Push(Completion(4));
  EXPECT_EQ(Events(), 0);
}

TEST_F(CompletionQueueTest, SolicitedArmingWaitsForASolicitedOrFailedCompletion) {
  cq_.RequestNotify(true);
  cq_.Push(Completion(1));
  EXPECT_EQ(Events(), 0);
  cq_.Push(Completion(2, /*solicited=*/true));
  EXPECT_EQ(Events(), 1);
  cq_.RequestNotify(true);
  cq_.Push(Completion(3, false, CompletionStatus::kFlushed));
  EXPECT_EQ(Events(), 1);
}

TEST_F(CompletionQueueTest, AskingForAnyOverrulesSolicitedAndNotTheReverse) {
  cq_.RequestNotify(true);
  cq_.RequestNotify(false);
  cq_.Push(Completion(1));
  EXPECT_EQ(Events(), 1);
  cq_.RequestNotify(false);
  cq_.RequestNotify(true);
  cq_.Push(Completion(2));
  EXPECT_EQ(Events(), 1);
}

TEST_F(CompletionQueueTest, EmptyChannelSaysEagainWhenNonBlocking) {
  EXPECT_EQ(host_.channel->GetEvent(), Err(EAGAIN));
}

TEST_F(CompletionQueueTest, OverrunRaisesOneEventAndLosesWhatDoesNotFit) {
  fcntl(host_.context->async_events().fd(), F_SETFL, O_NONBLOCK);
  for (uint64_t i = 0; i < 4; ++i) ASSERT_TRUE(cq_.Push(Completion(i)));
  EXPECT_FALSE(cq_.Push(Completion(4)));
  EXPECT_FALSE(cq_.Push(Completion(5)));
  const auto event = host_.context->async_events().GetEvent();
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->type, AsyncEventType::kCqError);
  EXPECT_EQ(event->cq, &cq_);
  host_.context->async_events().Ack(*event);
  EXPECT_FALSE(host_.context->async_events().GetEvent().has_value());
  EXPECT_EQ(Drain(), (Ids{0, 1, 2, 3}));
  EXPECT_FALSE(cq_.Push(Completion(6))) << "a CQ in error stays so";
}

TEST_F(CompletionQueueTest, ResizeKeepsTheContents) {
  cq_.Push(Completion(1));
  cq_.Push(Completion(2));
  Drain();
  for (uint64_t i = 3; i < 7; ++i) ASSERT_TRUE(cq_.Push(Completion(i)));
  EXPECT_EQ(cq_.Resize(3), EINVAL);
  EXPECT_EQ(cq_.Resize(0), EINVAL);
  EXPECT_EQ(cq_.Resize(6), 0);
  EXPECT_EQ(cq_.capacity(), 6u);
  ASSERT_TRUE(cq_.Push(Completion(7)));
  EXPECT_EQ(Drain(), (Ids{3, 4, 5, 6, 7}));
}

TEST_F(CompletionQueueTest, CompletionsOfOneQpCanBeForgotten) {
  cq_.Push(Completion(1, false, CompletionStatus::kSuccess, 5));
  cq_.Push(Completion(2, false, CompletionStatus::kSuccess, 6));
  cq_.Push(Completion(3, false, CompletionStatus::kSuccess, 5));
  cq_.RemoveCompletionsOf(5);
  EXPECT_EQ(Drain(), (Ids{2}));
}

TEST_F(CompletionQueueTest, DestroyTakesUndeliveredEventsBack) {
  cq_.RequestNotify(false);
  cq_.Push(Completion(1));
  ASSERT_EQ(host_.nic->DestroyQp(host_.qp->handle()), 0);
  ASSERT_EQ(host_.nic->DestroyCq(cq_.handle()), 0);
  EXPECT_EQ(host_.channel->GetEvent(), Err(EAGAIN));
}

TEST(CompletionQueue, DestroyWaitsForAcknowledgement) {
  TcpFabric fabric;
  TestHost host(fabric, "a");
  host.cq->RequestNotify(false);
  host.cq->Push({});
  CompletionQueue* const cq = *host.channel->GetEvent();
  ASSERT_EQ(host.nic->DestroyQp(host.qp->handle()), 0);
  const uint32_t handle = cq->handle();
  std::atomic<bool> destroyed{false};
  std::thread destroyer([&] {
    EXPECT_EQ(host.nic->DestroyCq(handle), 0);
    destroyed.store(true);
  });
  // The handle goes first, then the wait begins.
  ASSERT_TRUE(Eventually([&] { return host.nic->FindCq(handle) == nullptr; }));
  EXPECT_FALSE(destroyed.load());
  cq->AckEvents(1);
  destroyer.join();
  EXPECT_TRUE(destroyed.load());
}

// Programs poll the descriptor and then take EAGAIN for a failure (as the example of ibv_get_cq_event(3) does), or call
// it blocking.
TEST(CompletionQueue, AReadableChannelHasAnEventAndAnUnreadableOneHasNone) {
  constexpr int kEvents = 20000;
  TcpFabric fabric;
  TestHost host(fabric, "a");
  fcntl(host.channel->fd(), F_SETFL, O_NONBLOCK);
  // A second CQ on the channel, whose pusher does not wait for the consumer.
  CompletionQueue* const other = *host.nic->CreateCq(*host.context, 2 * kEvents, host.channel, nullptr);
  std::atomic<int> taken{0};
  std::thread pusher([&] {
    for (int i = 0; i < kEvents; ++i) {
      while (taken.load() < i) std::this_thread::yield();
      host.cq->RequestNotify(false);
      host.cq->Push({});
    }
  });
  std::thread racer([&] {
    for (int i = 0; i < kEvents; ++i) {
      other->RequestNotify(false);
      other->Push({});
    }
  });
  WorkCompletion batch[8];
  for (int got = 0; got < 2 * kEvents; ++got) {
    pollfd ready{host.channel->fd(), POLLIN, 0};
    ASSERT_EQ(poll(&ready, 1, 10000), 1);
    const auto event = host.channel->GetEvent();
    ASSERT_TRUE(event.has_value()) << "readable for nothing after " << got;
    if (*event == host.cq) {
      while (host.cq->Poll(batch) != 0) {
      }
      taken.fetch_add(1);
    }
    (*event)->AckEvents(1);
  }
  pusher.join();
  racer.join();
  pollfd idle{host.channel->fd(), POLLIN, 0};
  EXPECT_EQ(poll(&idle, 1, 0), 0);
  EXPECT_EQ(host.channel->GetEvent(), Err(EAGAIN));
}

TEST(CompletionQueue, DestroyWhileAnotherThreadTakesEventsLeavesTheChannelInAgreement) {
  TcpFabric fabric;
  TestHost host(fabric, "a");
  fcntl(host.channel->fd(), F_SETFL, O_NONBLOCK);
  for (int round = 0; round < 2000; ++round) {
    CompletionQueue* const going = *host.nic->CreateCq(*host.context, 4, host.channel, nullptr);
    going->RequestNotify(false);
    going->Push({});
    std::thread pusher([&] {
      host.cq->RequestNotify(false);
      host.cq->Push({});
    });
    std::atomic<int> taken{0};
    std::thread taker([&] {
      while (const auto event = host.channel->GetEvent()) {
        (*event)->AckEvents(1);
        taken.fetch_add(1);
      }
    });
    EXPECT_EQ(host.nic->DestroyCq(going->handle()), 0);
    taker.join();
    pusher.join();
    // Whoever was quicker, the other CQ's event is there or was taken, and then nothing is left.
    while (const auto event = host.channel->GetEvent()) {
      EXPECT_EQ(*event, host.cq);
      (*event)->AckEvents(1);
      taken.fetch_add(1);
    }
    EXPECT_GE(taken.load(), 1);
    EXPECT_LE(taken.load(), 2);
    pollfd idle{host.channel->fd(), POLLIN, 0};
    ASSERT_EQ(poll(&idle, 1, 0), 0) << "round " << round;
    WorkCompletion batch[8];
    while (host.cq->Poll(batch) != 0) {
    }
  }
}

TEST(CompletionQueue, GetEventBlocksUntilTheNextCompletion) {
  TcpFabric fabric;
  TestHost host(fabric, "a");
  host.cq->RequestNotify(false);
  std::thread pusher([&] { host.cq->Push({}); });
  const auto event = host.channel->GetEvent();
  pusher.join();
  ASSERT_TRUE(event.has_value());
  (*event)->AckEvents(1);
}

}  // namespace
}  // namespace stagecoach::emu
