#include "emu/nic/loop/nic_loop.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "base/prng.h"
#include "emu/fabric/fabric_over.h"
#include "emu/nic/nic_test_support.h"

namespace stagecoach::emu {
namespace {

class Client final : public LoopClient {
 public:
  Instant LeaseEnd() const override {
    ++lease_looks;
    return lease_end;
  }
  void CountParked(bool parked) override { parked_count += parked ? 1 : -1; }
  void OnContinue() override {
    ++continues;
    if (on_continue) on_continue();
  }
  void OnDeadline(Instant now) override { deadlines.push_back(now); }
  void OnNotice() override {
    ++notices;
    if (on_notice) on_notice();
  }

  mutable uint64_t lease_looks = 0;
  Instant lease_end{};
  int parked_count = 0;
  int continues = 0;
  int notices = 0;
  std::vector<Instant> deadlines;
  std::function<void()> on_continue;
  std::function<void()> on_notice;
};

// A fabric with a thread, as far as its users know, whose loop counts what has to wake that.
class ThreadedFabric final : public FabricOver {
 public:
  explicit ThreadedFabric(Fabric& beneath) : FabricOver(beneath), loop_(beneath.loop()) {}
  bool HasProgressThread() const override { return true; }
  Reactor& loop() override { return loop_; }
  int posts() const { return loop_.posts; }

 private:
  class CountingLoop final : public Reactor {
   public:
    explicit CountingLoop(Reactor& beneath) : beneath_(beneath) {}
    Instant Now() const override { return beneath_.Now(); }
    TimerId At(Instant when, Callback callback) override { return beneath_.At(when, std::move(callback)); }
    void Cancel(TimerId timer) override { beneath_.Cancel(timer); }
    WatchId WatchReadable(int fd, Callback callback) override {
      return beneath_.WatchReadable(fd, std::move(callback));
    }
    void Unwatch(WatchId watch) override { beneath_.Unwatch(watch); }
    void Post(Callback callback) override {
      ++posts;
      beneath_.Post(std::move(callback));
    }
    int posts = 0;

   private:
    Reactor& beneath_;
  };

  CountingLoop loop_;
};

class NicLoopTest : public ::testing::Test {
 protected:
  ~NicLoopTest() override {
    for (Client& client : clients_) loop_.Remove(&client);
  }
  Client& NewClient() { return clients_.emplace_back(); }
  Instant Now() { return pair_.fabric_a.Now(); }
  void Pass(Duration time) { pair_.world.RunFor(time); }
  // That the devices have with their fabrics' loop.
  size_t Timers() { return pair_.world.loop().CountOf(SimLoop::kNobody).timers; }

  void CheckThatEveryDeadlineIsTold(NicLoop& loop) {
    Prng luck(3);
    for (int i = 0; i < 20; ++i) NewClient();
    struct Expected {
      std::optional<Instant> deadline;
      std::vector<Instant> told;
    };
    std::vector<Expected> model(clients_.size());
    for (int i = 0; i < 3000; ++i) {
      const size_t which = luck.Below(clients_.size());
      const Instant now = Now();
      std::optional<Instant> when;
      if (!luck.OneIn(3)) when = now + Duration(1 + luck.Below(5'000'000));
      loop.SetDeadline(&clients_[which], when);
      model[which].deadline = when;
      const Instant then = now + Duration(luck.Below(1'000'000));
      for (Expected& each : model) {
        if (!each.deadline || *each.deadline > then) continue;
        each.told.push_back(*each.deadline);
        each.deadline.reset();
      }
      Pass(then - now);
    }
    for (size_t i = 0; i < model.size(); ++i) EXPECT_EQ(clients_[i].deadlines, model[i].told) << i;
  }

  SimPair pair_;
  NicLoop loop_{pair_.fabric_a};
  std::deque<Client> clients_;
};

TEST_F(NicLoopTest, CallsAtTheDeadlineAndNotBefore) {
  Client& client = NewClient();
  const Instant when = Now() + 5ms;
  loop_.SetDeadline(&client, when);
  Pass(4ms);
  EXPECT_TRUE(client.deadlines.empty());
  Pass(1ms);
  EXPECT_EQ(client.deadlines, std::vector<Instant>{when});
  Pass(1s);
  EXPECT_EQ(client.deadlines.size(), 1u);
}

// Two deadlines of two clients; the earlier one is withdrawn, made later, made earlier.
TEST_F(NicLoopTest, OneDeadlineIsChangedAndTheOtherStays) {
  Client& one = NewClient();
  Client& other = NewClient();
  const Instant begin = Now();
  loop_.SetDeadline(&one, begin + 1ms);
  loop_.SetDeadline(&other, begin + 2ms);
  loop_.SetDeadline(&one, std::nullopt);
  Pass(3ms);
  EXPECT_TRUE(one.deadlines.empty());
  EXPECT_EQ(other.deadlines, std::vector<Instant>{begin + 2ms});
  loop_.SetDeadline(&one, begin + 5ms);
  loop_.SetDeadline(&other, begin + 6ms);
  loop_.SetDeadline(&one, begin + 7ms);
  loop_.SetDeadline(&other, begin + 4ms);
  Pass(7ms);
  EXPECT_EQ(one.deadlines, std::vector<Instant>{begin + 7ms});
  EXPECT_EQ(other.deadlines, (std::vector<Instant>{begin + 2ms, begin + 4ms}));
}

TEST_F(NicLoopTest, WhateverIsSetAndWithdrawnEveryDeadlineIsTold) {
  CheckThatEveryDeadlineIsTold(loop_);
}

TEST_F(NicLoopTest, SoItIsWhereTheLoopIsCalledAsLittleAsCanBe) {
  ThreadedFabric threaded(pair_.fabric_a);
  NicLoop loop(threaded);
  CheckThatEveryDeadlineIsTold(loop);
  for (Client& client : clients_) loop.Remove(&client);
}

// As with a time-out that is set for each message and withdrawn with the answer.
TEST_F(NicLoopTest, DeadlinesThatAreMadeLaterOrWithdrawnWakeNoThread) {
  ThreadedFabric threaded(pair_.fabric_a);
  NicLoop loop(threaded);
  Client& client = NewClient();
  loop.SetDeadline(&client, Now() + 10ms);
  Pass(1us);
  EXPECT_EQ(threaded.posts(), 1);
  for (int i = 0; i < 100; ++i) {
    loop.SetDeadline(&client, std::nullopt);
    loop.SetDeadline(&client, Now() + 10ms);
    Pass(1us);
  }
  EXPECT_EQ(threaded.posts(), 1);
  loop.SetDeadline(&client, Now() + 1ms);
  EXPECT_EQ(threaded.posts(), 2);
  const Instant due = Now() + 1ms;
  Pass(20ms);
  EXPECT_EQ(client.deadlines, std::vector<Instant>{due});
  loop.Remove(&client);
}

// Whoever goes takes its timer along, and leaves that of others.
TEST_F(NicLoopTest, TheTimerOfWhoIsRemovedGoesToo) {
  Client& first = NewClient();
  Client& second = NewClient();
  const Instant begin = Now();
  loop_.SetDeadline(&first, begin + 1ms);
  loop_.SetDeadline(&second, begin + 2ms);
  Pass(0ms);
  EXPECT_EQ(Timers(), 1u);
  loop_.Remove(&first);
  EXPECT_FALSE(loop_.HoldsTimerForNobody());
  Pass(1ms);
  EXPECT_EQ(Timers(), 1u) << "of the other";
  loop_.Remove(&second);
  EXPECT_TRUE(loop_.HoldsTimerForNobody()) << "until what was posted has run";
  Pass(0ms);
  EXPECT_FALSE(loop_.HoldsTimerForNobody());
  EXPECT_EQ(Timers(), 0u);
  second.lease_end = Now() + 1s;
  ASSERT_TRUE(loop_.Park(&second));
  Pass(0ms);
  EXPECT_EQ(Timers(), 1u) << "at the end of its lease";
  loop_.Remove(&second);
  Pass(0ms);
  EXPECT_EQ(Timers(), 0u);
  EXPECT_EQ(second.parked_count, 0);
  EXPECT_TRUE(first.deadlines.empty());
  EXPECT_TRUE(second.deadlines.empty());
}

TEST_F(NicLoopTest, ParkedOnesGoOnWhenTheirLeaseHasEnded) {
  Client& one = NewClient();
  Client& renewed = NewClient();
  EXPECT_FALSE(loop_.Park(&one)) << "it has no lease";
  one.lease_end = renewed.lease_end = Now() + 1ms;
  EXPECT_TRUE(loop_.Park(&one));
  EXPECT_TRUE(loop_.Park(&one));
  EXPECT_TRUE(loop_.Park(&renewed));
  EXPECT_EQ(one.parked_count, 1);
  renewed.lease_end += 1ms;
  Pass(1ms);
  EXPECT_EQ(one.continues, 1);
  EXPECT_EQ(one.parked_count, 0);
  EXPECT_EQ(renewed.continues, 0);
  Pass(1ms);
  EXPECT_EQ(renewed.continues, 1);
  EXPECT_EQ(renewed.parked_count, 0);
}

TEST_F(NicLoopTest, ALeaseThatIsEndedEarlyUnparksAtOnceAndThoseAlone) {
  Client& ended = NewClient();
  Client& other = NewClient();
  ended.lease_end = other.lease_end = Now() + 1s;
  ASSERT_TRUE(loop_.Park(&ended));
  ASSERT_TRUE(loop_.Park(&other));
  ended.lease_end = Instant{};
  loop_.Unpark();
  EXPECT_EQ(ended.continues, 1);
  EXPECT_EQ(other.continues, 0);
  EXPECT_EQ(other.parked_count, 1);
}

// Whoever is called first removes the other, which was to be called in the same turn.
TEST_F(NicLoopTest, WhoIsRemovedIsNotCalledAnyMore) {
  Client& first = NewClient();
  Client& second = NewClient();
  first.on_notice = [&] { loop_.Remove(&second); };
  loop_.Notify(&first);
  loop_.Notify(&second);
  loop_.SetDeadline(&second, Now());
  loop_.Continue(&second);
  Pass(1ms);
  EXPECT_EQ(first.notices, 1);
  EXPECT_EQ(second.notices + second.continues, 0);
  EXPECT_TRUE(second.deadlines.empty());
}

// What it was called for and what it had not come to are both there still.
TEST_F(NicLoopTest, WhoFindsNoMemoryIsCalledAgain) {
  Client& client = NewClient();
  client.on_continue = [&] {
    if (client.continues == 1) throw std::bad_alloc();
  };
  const Instant now = Now();
  loop_.SetDeadline(&client, now);
  loop_.Notify(&client);
  loop_.Continue(&client);
  Pass(1ms);
  EXPECT_EQ(client.continues, 2);
  EXPECT_EQ(client.notices, 1);
  EXPECT_EQ(client.deadlines.size(), 1u);
}

TEST_F(NicLoopTest, WhoFindsNoMemoryWhenItsLeaseEndsEarlyIsCalledAgain) {
  Client& client = NewClient();
  client.on_continue = [&] {
    if (client.continues == 1) throw std::bad_alloc();
  };
  client.lease_end = Now() + 1s;
  ASSERT_TRUE(loop_.Park(&client));
  client.lease_end = Instant{};
  loop_.Unpark();
  EXPECT_EQ(client.continues, 1);
  Pass(1ms);
  EXPECT_EQ(client.continues, 2);
  EXPECT_EQ(client.parked_count, 0);
}

TEST_F(NicLoopTest, WhoFindsNoMemoryAndIsRemovedMeanwhileIsNotCalledAgain) {
  Client& client = NewClient();
  client.on_notice = [&] {
    loop_.Remove(&client);
    throw std::bad_alloc();
  };
  loop_.Notify(&client);
  loop_.Continue(&client);
  Pass(1ms);
  EXPECT_EQ(client.continues, 1);
  EXPECT_EQ(client.notices, 1);
}

TEST_F(NicLoopTest, WhoAsksAgainAndAgainHoldsNobodyUp) {
  Client& eager = NewClient();
  Client& other = NewClient();
  eager.on_notice = [&] {
    if (eager.notices < 100) loop_.Notify(&eager);
    loop_.Continue(&other);
  };
  loop_.Notify(&eager);
  Pass(1ms);
  EXPECT_EQ(eager.notices, 100);
  EXPECT_GE(other.continues, 50) << "once in a turn, however often it is asked for";
}

// What one client wishes costs nobody else a look: neither those that are parked nor those with deadlines.
TEST_F(NicLoopTest, AWishOfOneLooksAtNoOther) {
  Client& busy = NewClient();
  for (int i = 0; i < 1000; ++i) {
    Client& quiet = NewClient();
    quiet.lease_end = Now() + 1000s;
    ASSERT_TRUE(loop_.Park(&quiet));
    loop_.SetDeadline(&quiet, Now() + 2000s);
  }
  Pass(1ms);
  const auto looks = [&] {
    uint64_t sum = 0;
    for (const Client& client : clients_) sum += client.lease_looks;
    return sum;
  };
  const uint64_t before = looks();
  for (int i = 0; i < 100; ++i) {
    loop_.SetDeadline(&busy, Now() + 10ms);
    loop_.Continue(&busy);
    Pass(1ms);
    loop_.SetDeadline(&busy, std::nullopt);
    loop_.Notify(&busy);
    Pass(1ms);
  }
  EXPECT_EQ(busy.continues, 100);
  EXPECT_EQ(busy.notices, 100);
  EXPECT_EQ(looks(), before);
}

}  // namespace
}  // namespace stagecoach::emu
