#include "emu/nic/objects/completion_queue.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <deque>
#include <memory>
#include <thread>

#include "emu/nic/nic_test_support.h"

namespace {
// Of this thread, to epoll.
thread_local uint64_t system_calls = 0;

template <typename Call>
Call Next(const char* name) {
  return reinterpret_cast<Call>(dlsym(RTLD_NEXT, name));
}
}  // namespace

extern "C" int epoll_ctl(int set, int operation, int fd, epoll_event* event) noexcept {
  static const auto next = Next<int (*)(int, int, int, epoll_event*)>("epoll_ctl");
  ++system_calls;
  return next(set, operation, fd, event);
}

extern "C" int epoll_wait(int set, epoll_event* events, int most, int timeout) {
  static const auto next = Next<int (*)(int, epoll_event*, int, int)>("epoll_wait");
  ++system_calls;
  return next(set, events, most, timeout);
}

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

// The ring has as much memory as it needed so far, wherever its beginning stands when it grows or shrinks.
TEST_F(CompletionQueueTest, ALargeRingGrowsAndKeepsTheOrder) {
  ASSERT_EQ(cq_.Resize(4194304), 0);
  EXPECT_EQ(cq_.capacity(), 4194304u);
  uint64_t pushed = 0;
  uint64_t taken = 0;
  WorkCompletion batch[8];
  for (int i = 0; i < 1000; ++i) {
    for (int more = 0; more < 5 + i % 8; ++more) ASSERT_TRUE(cq_.Push(Completion(pushed++)));
    const size_t count = cq_.Poll(batch);
    for (size_t k = 0; k < count; ++k) ASSERT_EQ(batch[k].wr_id, taken++);
  }
  ASSERT_GT(pushed - taken, 16u);
  EXPECT_EQ(cq_.Resize(static_cast<uint32_t>(pushed - taken - 1)), EINVAL);
  ASSERT_EQ(cq_.Resize(static_cast<uint32_t>(pushed - taken)), 0);
  EXPECT_FALSE(cq_.Push(Completion(0))) << "it is full now";
  for (const uint64_t id : Drain()) ASSERT_EQ(id, taken++);
  EXPECT_EQ(taken, pushed);
}

TEST_F(CompletionQueueTest, ARingThatForgetsTheOldestHasGrownToItsCapacityBefore) {
  CompletionQueue forgetful(pair_.fabric_a, nullptr, host_.nic->profile(), 9, 40, nullptr, nullptr, nullptr,
                            {.ignore_overrun = true, .timestamps = false});
  for (uint64_t i = 0; i < 100; ++i) ASSERT_TRUE(forgetful.Push(Completion(i)));
  WorkCompletion all[64];
  ASSERT_EQ(forgetful.Poll(all), 40u);
  EXPECT_EQ(all[0].wr_id, 60u);
  EXPECT_EQ(all[39].wr_id, 99u);
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

// Events are no things of their own; they are counted by their CQs, which have their turns.
TEST_F(CompletionQueueTest, SeveralCqsOfAChannelHaveTheirEventsInTurn) {
  CompletionQueue* const other = host_.nic->CreateCq(*host_.context, 4, host_.channel, nullptr).value();
  for (CompletionQueue* const cq : {&cq_, other, &cq_}) {
    cq->RequestNotify(false);
    cq->Push(Completion(1));
  }
  for (CompletionQueue* const cq : {&cq_, other}) EXPECT_EQ(host_.channel->GetEvent(), cq);
  cq_.AckEvents(1);
  other->AckEvents(1);
  other->RequestNotify(false);
  other->Push(Completion(2));
  // One that goes takes its own along and leaves the rest.
  EXPECT_EQ(host_.nic->DestroyCq(other->handle()), 0);
  EXPECT_EQ(Events(), 1);
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

// --- Many connections ---

// Something that may be driven, and moves when its descriptor says so.
class FakeConnection final : public PolledConnection, private ArrivalMark {
 public:
  // What tells that something has arrived.
  enum class Teller { kDescriptor, kMark, kNothingCanArrive };
  explicit FakeConnection(Teller teller = Teller::kDescriptor)
      : teller_(teller), fd_(teller == Teller::kNothingCanArrive ? -1 : eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}
  ~FakeConnection() override {
    if (fd_ >= 0) close(fd_);
  }
  bool Drive() override {
    ++drives;
    uint64_t value = 0;
    const bool moved = fd_ >= 0 && read(fd_, &value, sizeof value) == sizeof value;
    arrivals += moved;
    has_arrived_ = false;
    return moved;
  }
  int PollDescriptor() const override {
    if (fd_ < 0) return kNoLlp;
    return teller_ == Teller::kDescriptor ? fd_ : -1;
  }
  const ArrivalMark* arrival_mark() const override { return teller_ == Teller::kMark ? this : nullptr; }
  bool Unfinished() const override {
    ++questions;
    return unfinished;
  }
  void Arrive() {
    const uint64_t one = 1;
    ASSERT_EQ(write(fd_, &one, sizeof one), static_cast<ssize_t>(sizeof one));
    has_arrived_ = true;
  }

  uint64_t drives = 0;
  mutable uint64_t questions = 0;
  uint64_t arrivals = 0;
  bool unfinished = false;

 private:
  bool HasArrived() const override { return has_arrived_; }

  const Teller teller_;
  const int fd_;
  bool has_arrived_ = false;
};

class ManyConnectionsTest : public ::testing::Test {
 protected:
  ~ManyConnectionsTest() override {
    for (FakeConnection& each : connections_) host_.cq->Detach(&each);
  }
  void Have(size_t count, FakeConnection::Teller teller = FakeConnection::Teller::kDescriptor) {
    while (connections_.size() < count) host_.cq->Attach(&connections_.emplace_back(teller));
    Poll(1000);  // until it is known who has nothing
  }
  void Poll(int times) {
    WorkCompletion batch[1];
    for (int i = 0; i < times; ++i) EXPECT_EQ(host_.cq->Poll(batch), 0u);
  }
  uint64_t Asked() const {
    uint64_t sum = 0;
    for (const FakeConnection& each : connections_) sum += each.drives + each.questions;
    return sum;
  }
  struct Cost {
    uint64_t asked = 0;
    uint64_t system_calls = 0;
  };
  // Of so many operations, one after the other and in turns on the first `users` of the connections; when they are as
  // they stay.
  Cost CostOfOperations(size_t users, size_t operations) {
    const auto operate = [&](size_t i) {
      FakeConnection& one = connections_[i % users];
      const uint64_t arrivals = one.arrivals;
      one.Arrive();
      for (int polls = 0; one.arrivals == arrivals; ++polls) {
        ASSERT_LT(polls, 10);
        Poll(1);
      }
    };
    for (size_t i = 0; i < users; ++i) operate(i);
    const uint64_t asked = Asked();
    const uint64_t calls = system_calls;
    for (size_t i = 0; i < operations; ++i) operate(i);
    return {Asked() - asked, system_calls - calls};
  }
  // Of `polls` while nothing happens.
  uint64_t CostOf(int polls) {
    const uint64_t before = Asked();
    Poll(polls);
    return Asked() - before;
  }

  TcpFabric fabric_;
  TestHost host_{fabric_, "a"};
  std::deque<FakeConnection> connections_;
};

TEST_F(ManyConnectionsTest, APollAsksAsManyOfHundredsAsOfTen) {
  Have(10);
  const uint64_t of_ten = CostOf(1000);
  Have(300);
  EXPECT_EQ(CostOf(1000), of_ten);
}

// On one of them, on a few, and on each in its turn; counted, for time says little on a busy machine.
TEST_F(ManyConnectionsTest, AnOperationAmongAThousandCostsWhatItCostsAmongTen) {
  constexpr size_t kOperations = 2000;
  Have(10);
  const Cost one_of_ten = CostOfOperations(1, kOperations);
  const Cost few_of_ten = CostOfOperations(3, kOperations);
  const Cost ten_in_turns = CostOfOperations(10, kOperations);
  Have(1000);
  const Cost one = CostOfOperations(1, kOperations);
  EXPECT_LE(one.asked, one_of_ten.asked);
  EXPECT_LE(one.system_calls, one_of_ten.system_calls);
  const Cost few = CostOfOperations(3, kOperations);
  EXPECT_LE(few.asked, few_of_ten.asked);
  EXPECT_LE(few.system_calls, few_of_ten.system_calls);
  const Cost in_turns = CostOfOperations(1000, kOperations);
  EXPECT_LE(in_turns.asked, ten_in_turns.asked);
  EXPECT_LE(in_turns.system_calls, ten_in_turns.system_calls);
}

TEST_F(ManyConnectionsTest, OnesWithoutAStreamCostNothing) {
  Have(300, FakeConnection::Teller::kNothingCanArrive);
  EXPECT_LE(CostOf(1000), 4000u) << "a few";
}

TEST_F(ManyConnectionsTest, WhateverArrivesIsFoundWithinAFewPolls) {
  Have(300);
  const uint64_t before = Asked();
  for (int round = 0; round < 3; ++round) {
    for (FakeConnection& each : connections_) {
      each.Arrive();
      Poll(4);
      ASSERT_EQ(each.arrivals, static_cast<uint64_t>(round + 1));
    }
  }
  EXPECT_LE(Asked() - before, 3u * 300 * 4 * 10) << "of those that brought something, only a few stay active";
  // All at once.
  for (FakeConnection& each : connections_) each.Arrive();
  Poll(100);
  for (const FakeConnection& each : connections_) EXPECT_EQ(each.arrivals, 4u);
}

// As those of shared memory: they cost no system calls, and no locks while they are quiet.
TEST_F(ManyConnectionsTest, OnesWithAMarkAreDrivenWhenItSaysSo) {
  constexpr size_t kOperations = 2000;
  Have(10, FakeConnection::Teller::kMark);
  const uint64_t of_ten = CostOf(1000);
  Have(1000, FakeConnection::Teller::kMark);
  EXPECT_EQ(CostOf(1000), of_ten);
  const uint64_t calls = system_calls;
  for (size_t i = 0; i < kOperations; ++i) {
    FakeConnection& one = connections_[i % connections_.size()];
    const uint64_t arrivals = one.arrivals;
    one.Arrive();
    Poll(20);  // all have been looked at by then
    ASSERT_EQ(one.arrivals, arrivals + 1);
  }
  EXPECT_EQ(system_calls, calls);
  // All at once; and who goes meanwhile is not asked.
  for (FakeConnection& each : connections_) each.Arrive();
  for (size_t i = 0; i < connections_.size(); i += 2) host_.cq->Detach(&connections_[i]);
  const uint64_t drives = connections_[0].drives;
  Poll(100);
  for (size_t i = 1; i < connections_.size(); i += 2) EXPECT_EQ(connections_[i].arrivals, 3u);
  EXPECT_EQ(connections_[0].drives, drives);
  for (size_t i = 0; i < connections_.size(); i += 2) host_.cq->Attach(&connections_[i]);
}

// One whose stream is full need not hear anything: it says that it must be driven.
TEST_F(ManyConnectionsTest, AWatchedOneThatIsUnfinishedIsDriven) {
  Have(300);
  for (const size_t which : {size_t{0}, size_t{150}, size_t{299}}) {
    FakeConnection& one = connections_[which];
    ASSERT_TRUE(one.IsWatched() || which == 299);
    one.unfinished = true;
    host_.cq->Wake(&one);
    const uint64_t before = one.drives;
    Poll(100);
    EXPECT_GE(one.drives - before, 100u) << "by each poll";
    EXPECT_FALSE(one.IsWatched());
    one.unfinished = false;
    Poll(1000);
  }
  EXPECT_LE(CostOf(100), 100u * 10);
}

TEST_F(ManyConnectionsTest, OneThatGoesIsNotAskedAndCanComeBack) {
  Have(20);
  FakeConnection& one = connections_[3];
  host_.cq->Wake(&one);
  host_.cq->Detach(&one);
  EXPECT_FALSE(one.IsWatched());
  const uint64_t before = one.drives;
  one.Arrive();
  Poll(1000);
  EXPECT_EQ(one.drives, before);
  host_.cq->Attach(&one);
  Poll(10);
  EXPECT_EQ(one.arrivals, 1u);
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
