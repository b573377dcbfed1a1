#include "base/asio_loop/asio_loop.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <functional>
#include <future>
#include <memory>
#include <thread>

namespace stagecoach {
namespace {

// Longer than anything here can take; reached only by a failing test.
constexpr Duration kBound = 5s;

// Runs turns until `done`; false if that takes too long.
template <typename Done>
bool RunUntil(AsioLoop& loop, Done done) {
  const Instant limit = loop.Now() + kBound;
  while (!done()) {
    if (loop.Now() >= limit) return false;
    loop.RunOnce(10ms);
  }
  return true;
}

class EventFd {
 public:
  EventFd() : fd_(eventfd(0, EFD_CLOEXEC)) {}
  ~EventFd() { close(fd_); }
  int fd() const { return fd_; }
  void Signal() { EXPECT_EQ(eventfd_write(fd_, 1), 0); }
  void Drain() {
    eventfd_t value;
    EXPECT_EQ(eventfd_read(fd_, &value), 0);
  }

 private:
  const int fd_;
};

TEST(AsioLoop, TimersFireInOrderOfTimeAndThenOfSetting) {
  AsioLoop loop;
  std::string order;
  const Instant now = loop.Now();
  loop.At(now + 2ms, [&] { order += 'c'; });
  loop.At(now + 1ms, [&] { order += 'a'; });
  loop.At(now + 1ms, [&] { order += 'b'; });
  EXPECT_TRUE(RunUntil(loop, [&] { return order.size() == 3; }));
  EXPECT_EQ(order, "abc");
  EXPECT_GE(loop.Now(), now + 2ms);
}

TEST(AsioLoop, AWatchOutlivesAnExceptionOfItsCallback) {
  AsioLoop loop;
  EventFd event;
  int calls = 0;
  const auto watch = loop.WatchReadable(event.fd(), [&] {
    if (++calls == 1) throw std::bad_alloc();
    event.Drain();
  });
  event.Signal();
  EXPECT_THROW(RunUntil(loop, [&] { return false; }), std::bad_alloc);
  EXPECT_TRUE(RunUntil(loop, [&] { return calls == 2; }));
  loop.Unwatch(watch);
}

TEST(AsioLoop, ACancelledTimerDoesNotFireAndAStrangeIdIsIgnored) {
  AsioLoop loop;
  bool fired = false;
  bool later = false;
  const auto timer = loop.At(loop.Now(), [&] { fired = true; });
  loop.Cancel(timer);
  loop.Cancel(timer);
  loop.Cancel(987654);
  loop.At(loop.Now() + 1ms, [&] { later = true; });
  EXPECT_TRUE(RunUntil(loop, [&] { return later; }));
  EXPECT_FALSE(fired);
}

TEST(AsioLoop, ATimerThatSetsItselfForNowLetsOthersRun) {
  AsioLoop loop;
  bool stop = false;
  std::function<void()> again = [&] {
    if (!stop) loop.At(loop.Now(), again);
  };
  again();
  bool posted = false;
  loop.Post([&] { posted = true; });
  EXPECT_TRUE(RunUntil(loop, [&] { return posted; }));
  stop = true;
}

TEST(AsioLoop, PostFromAnotherThreadEndsASleep) {
  AsioLoop loop;
  std::thread::id ran_on;
  std::thread poster([&] {
    loop.Post([&] {
      ran_on = std::this_thread::get_id();
      loop.Stop();
    });
  });
  loop.Run();
  poster.join();
  EXPECT_EQ(ran_on, std::this_thread::get_id());
}

TEST(AsioLoop, StopBeforeRunEndsThatRunAndNoLaterOne) {
  AsioLoop loop;
  loop.Stop();
  loop.Run();
  bool ran = false;
  loop.Post([&] {
    ran = true;
    loop.Stop();
  });
  loop.Run();
  EXPECT_TRUE(ran);
}

TEST(AsioLoop, AReadableDescriptorIsReportedUntilDrainedAndNoLongerAfterUnwatch) {
  AsioLoop loop;
  EventFd event;
  int calls = 0;
  const auto watch = loop.WatchReadable(event.fd(), [&] { ++calls; });
  ASSERT_NE(watch, 0u);
  event.Signal();
  EXPECT_TRUE(RunUntil(loop, [&] { return calls >= 3; })) << "level-triggered";
  event.Drain();
  // One turn may already hold an event taken before the drain.
  loop.RunOnce(Duration::zero());
  const int settled = calls;
  loop.RunOnce(Duration::zero());
  EXPECT_EQ(calls, settled);
  event.Signal();
  loop.Unwatch(watch);
  loop.RunOnce(Duration::zero());
  EXPECT_EQ(calls, settled);
}

TEST(AsioLoop, WatchingLeavesTheFlagsOfTheDescriptorAlone) {
  AsioLoop loop;
  EventFd event;
  int calls = 0;
  const auto watch = loop.WatchReadable(event.fd(), [&] { ++calls; });
  event.Signal();
  EXPECT_TRUE(RunUntil(loop, [&] { return calls > 0; }));
  EXPECT_EQ(fcntl(event.fd(), F_GETFL) & O_NONBLOCK, 0);
  loop.Unwatch(watch);
}

TEST(AsioLoop, TwoWatchesOfOneDescriptorAreIndependent) {
  AsioLoop loop;
  EventFd event;
  int first_calls = 0;
  int second_calls = 0;
  const auto first = loop.WatchReadable(event.fd(), [&] { ++first_calls; });
  const auto second = loop.WatchReadable(event.fd(), [&] { ++second_calls; });
  event.Signal();
  EXPECT_TRUE(RunUntil(loop, [&] { return first_calls > 0 && second_calls > 0; }));
  loop.Unwatch(first);
  const int before = first_calls;
  const int target = second_calls + 2;
  EXPECT_TRUE(RunUntil(loop, [&] { return second_calls >= target; }));
  EXPECT_EQ(first_calls, before);
  loop.Unwatch(second);
}

TEST(AsioLoop, ACallbackMayEndItsOwnWatch) {
  AsioLoop loop;
  EventFd event;
  int calls = 0;
  EventLoop::WatchId watch = 0;
  // The string outlives the call only if the loop keeps the callback while it runs.
  watch = loop.WatchReadable(event.fd(), [&, text = std::string(100, 'x')] {
    loop.Unwatch(watch);
    calls += text.back() == 'x' ? 1 : 100;
  });
  event.Signal();
  EXPECT_TRUE(RunUntil(loop, [&] { return calls > 0; }));
  loop.RunOnce(Duration::zero());
  EXPECT_EQ(calls, 1);
}

TEST(AsioLoop, ADescriptorThatCannotBeWatchedIsRefusedWithErrno) {
  AsioLoop loop;
  EXPECT_EQ(loop.WatchReadable(-1, [] {}), 0u);
  EXPECT_EQ(errno, EBADF);
}

struct FakePoller {
  bool is_busy = false;
  int work = 0;       // rounds in which poll() finds something
  int arm_races = 0;  // times arm() finds that work arrived
  int polls = 0;
  int arms = 0;

  EventLoop::Poller Hooks() {
    return {[this] {
              ++polls;
              if (work == 0) return false;
              --work;
              return true;
            },
            [this] { return is_busy; },
            [this] {
              ++arms;
              if (arm_races == 0) return true;
              --arm_races;
              return false;
            }};
  }
};

TEST(AsioLoop, AnIdlePollerIsArmedAndTheLoopSleeps) {
  AsioLoop loop;
  FakePoller poller;
  const auto id = loop.AddPoller(poller.Hooks());
  loop.RunOnce(Duration::zero());
  EXPECT_EQ(poller.polls, 1);
  EXPECT_EQ(poller.arms, 1);
  EXPECT_EQ(loop.counters().sleeps, 1u);
  loop.RemovePoller(id);
  loop.RunOnce(Duration::zero());
  EXPECT_EQ(poller.polls, 1);
}

TEST(AsioLoop, TheLoopDoesNotSleepWhenWorkArrivesWhileArming) {
  AsioLoop loop;
  FakePoller poller;
  loop.AddPoller(poller.Hooks());
  poller.arm_races = 1;
  loop.RunOnce();  // without a bound: would hang if it slept
  EXPECT_EQ(poller.polls, 2);
  EXPECT_EQ(loop.counters().sleeps, 0u);
}

TEST(AsioLoop, ABusyPollerIsPolledForABoundedTimeAndThenArmed) {
  AsioLoop loop(AsioLoop::Options{.poll_time = 1ms});
  FakePoller poller;
  loop.AddPoller(poller.Hooks());
  poller.is_busy = true;
  const Instant begin = loop.Now();
  loop.RunOnce(Duration::zero());
  EXPECT_GE(loop.Now() - begin, 1ms);
  EXPECT_GT(poller.polls, 2);
  EXPECT_EQ(poller.arms, 1);
}

TEST(AsioLoop, APollTimeOfZeroDisablesThePhase) {
  AsioLoop loop(AsioLoop::Options{.poll_time = Duration::zero()});
  FakePoller poller;
  loop.AddPoller(poller.Hooks());
  poller.is_busy = true;
  loop.RunOnce(Duration::zero());
  EXPECT_EQ(poller.polls, 1);
  EXPECT_EQ(poller.arms, 1);
}

// In the poll phase and, without one, from turn to turn.
void RunBesideAPollerThatNeverRests(Duration poll_time) {
  AsioLoop loop(AsioLoop::Options{.poll_time = poll_time});
  FakePoller poller;
  poller.is_busy = true;
  poller.work = 1 << 30;
  loop.AddPoller(poller.Hooks());
  EventFd event;
  event.Signal();
  bool timer = false;
  bool posted = false;
  bool readable = false;
  const auto done = [&] {
    if (timer && posted && readable) loop.Stop();
  };
  loop.At(loop.Now() + 1ms, [&] { timer = true, done(); });
  loop.WatchReadable(event.fd(), [&] { readable = true, done(); });
  std::thread poster([&] { loop.Post([&] { posted = true, done(); }); });
  loop.At(loop.Now() + kBound, [&] { loop.Stop(); });
  loop.Run();
  poster.join();
  EXPECT_TRUE(timer);
  EXPECT_TRUE(posted);
  EXPECT_TRUE(readable);
}

TEST(AsioLoop, APollerThatNeverRestsStarvesNeitherTimersNorPostedWorkNorDescriptors) {
  RunBesideAPollerThatNeverRests(50us);
  RunBesideAPollerThatNeverRests(Duration::zero());
}

TEST(AsioLoop, LongSleepsShortenThePollPhaseAndNotBelowAnEighth) {
  AsioLoop loop(AsioLoop::Options{.poll_time = 80us});
  FakePoller poller;
  poller.is_busy = true;
  loop.AddPoller(poller.Hooks());
  for (int i = 0; i < 10; ++i) loop.RunOnce(2ms);
  EXPECT_EQ(loop.poll_budget(), 10us);
  // Woken at once: polling a little longer would have done.
  for (int i = 0; i < 200 && loop.poll_budget() < 80us; ++i) loop.RunOnce(Duration::zero());
  EXPECT_EQ(loop.poll_budget(), 80us);
}

TEST(AsioLoop, APollerMayRemoveItselfWhilePolled) {
  AsioLoop loop;
  int polls = 0;
  EventLoop::PollerId id = 0;
  id = loop.AddPoller({[&] {
                         ++polls;
                         loop.RemovePoller(id);
                         return true;
                       },
                       [] { return true; }, [] { return true; }});
  loop.RunOnce(Duration::zero());
  loop.RunOnce(Duration::zero());
  EXPECT_EQ(polls, 1);
}

// Work of another's that is there when `event` is readable.
class Work final : public EventLoop::Companion {
 public:
  explicit Work(std::string* told) : told_(*told) {}
  ~Work() override { told_ += 'x'; }
  int fd() const override { return event.fd(); }
  bool OnIdle(const std::function<bool()>& is_over) override {
    if (on_idle) return on_idle(is_over);
    told_ += 'i';
    return false;
  }
  void OnSleep() override { told_ += 's'; }
  void OnWake() override { told_ += 'w'; }
  void OnReadable() override {
    told_ += 'r';
    event.Drain();
  }
  EventFd event;
  std::function<bool(const std::function<bool()>& is_over)> on_idle;

 private:
  std::string& told_;
};

TEST(AsioLoop, ACompanionIsToldOfEachSleepAndOfItsWorkForAsLongAsItIsThere) {
  std::string told;
  AsioLoop loop;
  EXPECT_EQ(loop.companion(), nullptr);
  auto work = std::make_shared<Work>(&told);
  ASSERT_TRUE(loop.TakeCompanion(work));
  EXPECT_EQ(loop.companion(), work);
  EXPECT_FALSE(loop.TakeCompanion(std::make_shared<Work>(&told)));  // x: one at a time
  work->event.Signal();
  loop.RunOnce(kBound);
  EXPECT_EQ(told, "xisrw");
  loop.RunOnce(1ms);
  EXPECT_EQ(told, "xisrwisw");
  work.reset();
  loop.RunOnce(1ms);
  EXPECT_EQ(told, "xisrwiswx");
  EXPECT_EQ(loop.companion(), nullptr);
}

TEST(AsioLoop, WhatACompanionDoesWhenThereIsNothingElseSparesTheSleep) {
  std::string told;
  AsioLoop loop;
  auto work = std::make_shared<Work>(&told);
  ASSERT_TRUE(loop.TakeCompanion(work));
  bool is_armed = false;
  loop.AddPoller({.poll = [] { return false; }, .busy = [] { return false; }, .arm = [&] { return is_armed = true; }});
  work->on_idle = [&](const std::function<bool()>& is_over) {
    EXPECT_FALSE(is_over());
    loop.Post([] {});
    EXPECT_TRUE(is_over());
    return true;
  };
  EXPECT_TRUE(loop.RunOnce());
  EXPECT_TRUE(is_armed);
  EXPECT_EQ(loop.counters().sleeps, 0u);
  EXPECT_EQ(told, "");
}

TEST(AsioLoop, ACompanionIsNotAskedByWhoDoesNotWaitOrPollsForItself) {
  std::string told;
  AsioLoop loop({.poll_time = 1us});
  auto work = std::make_shared<Work>(&told);
  ASSERT_TRUE(loop.TakeCompanion(work));
  loop.RunOnce(Duration::zero());
  EXPECT_EQ(told, "");
  bool is_busy = true;
  loop.AddPoller({.poll = [] { return false; }, .busy = [&] { return is_busy; }, .arm = [] { return true; }});
  loop.RunOnce(1ms);
  EXPECT_EQ(told, "sw");
  is_busy = false;
  loop.RunOnce(1ms);
  EXPECT_EQ(told, "swisw");
}

TEST(AsioLoop, ACompanionIsAwakeBeforeAnythingElseRuns) {
  std::string told;
  AsioLoop loop;
  auto work = std::make_shared<Work>(&told);
  ASSERT_TRUE(loop.TakeCompanion(work));
  work->on_idle = [&](const std::function<bool()>&) {
    loop.Post([&] { told += 'p'; });
    return false;
  };
  loop.RunOnce(kBound);
  EXPECT_EQ(told, "swp");
  work->on_idle = [](const std::function<bool()>&) { return false; };
  EventFd other;
  loop.WatchReadable(other.fd(), [&] {
    other.Drain();
    told += 'c';
  });
  told.clear();
  other.Signal();
  loop.RunOnce(kBound);
  EXPECT_EQ(told, "swc");
  // Of both the companion has its turn first, while it counts as asleep.
  told.clear();
  other.Signal();
  work->event.Signal();
  loop.RunOnce(kBound);
  EXPECT_EQ(told, "srwc");
}

TEST(AsioLoop, ADescriptorWithTheNumberOfACompanionThatWentIsNotTakenForIt) {
  std::string told;
  AsioLoop loop;
  auto work = std::make_shared<Work>(&told);
  ASSERT_TRUE(loop.TakeCompanion(work));
  const int number = work->fd();
  work.reset();
  EventFd other;
  ASSERT_EQ(other.fd(), number);
  int calls = 0;
  const EventLoop::WatchId watch = loop.WatchReadable(other.fd(), [&] { ++calls; });
  other.Signal();
  EXPECT_TRUE(RunUntil(loop, [&] { return calls > 0; }));
  loop.Unwatch(watch);
  const int before = calls;
  EXPECT_FALSE(loop.RunOnce(1ms));  // readable, and no longer watched
  EXPECT_EQ(calls, before);
  EXPECT_EQ(told, "x");
}

TEST(AsioLoop, WhatIsPostedAndNeverRunMayHoldTheCompanion) {
  std::string told;
  auto loop = std::make_unique<AsioLoop>();
  auto work = std::make_shared<Work>(&told);
  ASSERT_TRUE(loop->TakeCompanion(work));
  loop->Post([held = std::move(work)] {});
  loop.reset();
  EXPECT_EQ(told, "x");
}

TEST(HandlerMemory, HasRoomForOneAtATime) {
  const auto memory = std::make_shared<HandlerMemory>();
  HandlerMemory::Allocator<std::byte> bytes(memory);
  HandlerMemory::Allocator<uint64_t> words(bytes);
  const auto is_within = [&](const void* block) {
    const auto* const at = static_cast<const std::byte*>(block);
    const auto* const begin = reinterpret_cast<const std::byte*>(memory.get());
    return !std::less<>()(at, begin) && std::less<>()(at, begin + sizeof(HandlerMemory));
  };
  uint64_t* const first = words.allocate(8);
  EXPECT_TRUE(is_within(first));
  std::byte* const second = bytes.allocate(8);
  EXPECT_FALSE(is_within(second));
  words.deallocate(first, 8);
  bytes.deallocate(second, 8);
  std::byte* const large = bytes.allocate(sizeof(HandlerMemory));
  EXPECT_FALSE(is_within(large));
  bytes.deallocate(large, sizeof(HandlerMemory));
  std::byte* const again = bytes.allocate(1);
  EXPECT_TRUE(is_within(again));
  bytes.deallocate(again, 1);
}

}  // namespace
}  // namespace stagecoach
