#include "base/epoll_loop/epoll_loop.h"

#include <errno.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

namespace stagecoach {
namespace {

// Longer than anything here can take; reached only by a failing test.
constexpr Duration kBound = 10s;

bool IsReadable(int fd, int milliseconds) {
  pollfd ready{fd, POLLIN, 0};
  return poll(&ready, 1, milliseconds) > 0;
}

// Sleeps on the loop's descriptor and turns it, until `done`; false if that takes too long.
template <typename Done>
bool RunUntil(EpollLoop& loop, Done done) {
  const Instant limit = loop.Now() + kBound;
  while (!done()) {
    if (loop.Now() >= limit) return false;
    if (IsReadable(loop.fd(), 1000)) loop.Turn();
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

TEST(EpollLoop, TimersFireInOrderOfTimeAndThenOfSetting) {
  EpollLoop loop;
  std::string order;
  const Instant now = loop.Now();
  loop.At(now + 2ms, [&] { order += 'c'; });
  loop.At(now + 1ms, [&] { order += 'a'; });
  loop.At(now + 1ms, [&] { order += 'b'; });
  EXPECT_TRUE(RunUntil(loop, [&] { return order.size() == 3; }));
  EXPECT_EQ(order, "abc");
  EXPECT_GE(loop.Now(), now + 2ms);
}

TEST(EpollLoop, AnEarlierTimerOvertakesOneThatWasSetBefore) {
  EpollLoop loop;
  bool fired = false;
  loop.At(loop.Now() + kBound * 2, [] {});
  loop.At(loop.Now() + 1ms, [&] { fired = true; });
  EXPECT_TRUE(RunUntil(loop, [&] { return fired; }));
}

TEST(EpollLoop, ACancelledTimerDoesNotFireAndAStrangeIdIsIgnored) {
  EpollLoop loop;
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

TEST(EpollLoop, AWatchIsCalledWhileItsDescriptorIsReadable) {
  EpollLoop loop;
  EventFd event;
  int calls = 0;
  const auto watch = loop.WatchReadable(event.fd(), [&] {
    if (++calls == 2) event.Drain();
  });
  int others = 0;
  const auto other = loop.WatchReadable(event.fd(), [&] { ++others; });
  EXPECT_FALSE(IsReadable(loop.fd(), 0));
  event.Signal();
  EXPECT_TRUE(RunUntil(loop, [&] { return calls == 2; }));
  EXPECT_EQ(others, 2);
  EXPECT_FALSE(IsReadable(loop.fd(), 0));
  loop.Unwatch(watch);
  event.Signal();
  EXPECT_TRUE(RunUntil(loop, [&] { return others == 3; }));
  EXPECT_EQ(calls, 2);
  loop.Unwatch(other);
  EXPECT_FALSE(IsReadable(loop.fd(), 0));
}

TEST(EpollLoop, AWatchOutlivesAnExceptionOfItsCallback) {
  EpollLoop loop;
  EventFd event;
  int calls = 0;
  const auto watch = loop.WatchReadable(event.fd(), [&] {
    if (++calls == 1) throw std::bad_alloc();
    event.Drain();
  });
  event.Signal();
  EXPECT_THROW(loop.Turn(), std::bad_alloc);
  EXPECT_TRUE(RunUntil(loop, [&] { return calls == 2; }));
  loop.Unwatch(watch);
}

TEST(EpollLoop, WhatCannotBeWatchedIsRefused) {
  EpollLoop loop;
  EXPECT_EQ(loop.WatchReadable(-1, [] {}), 0u);
  EXPECT_EQ(errno, EBADF);
}

TEST(EpollLoop, PostedWorkRunsInOrderAndWakesWhoSleeps) {
  EpollLoop loop;
  std::string order;
  std::thread poster([&] {
    loop.Post([&] { order += 'a'; });
    loop.Post([&] {
      order += 'b';
      loop.Post([&] { order += 'd'; });
    });
    loop.Post([&] { order += 'c'; });
  });
  EXPECT_TRUE(RunUntil(loop, [&] { return order.size() == 4; }));
  poster.join();
  // The last may come before "c" where the poster was slow; each comes after what posted it.
  EXPECT_LT(order.find('a'), order.find('b'));
  EXPECT_LT(order.find('b'), order.find('c'));
  EXPECT_LT(order.find('b'), order.find('d'));
}

// Whatever a turn does not come to, by its bound or by an exception, keeps the loop's descriptor readable.
TEST(EpollLoop, NothingPostedIsForgotten) {
  EpollLoop loop;
  constexpr int kPosts = 1000;
  int run = 0;
  for (int i = 0; i < kPosts; ++i) loop.Post([&] { ++run; });
  EXPECT_TRUE(RunUntil(loop, [&] { return run == kPosts; }));
  EXPECT_FALSE(IsReadable(loop.fd(), 0));

  loop.Post([] { throw std::bad_alloc(); });
  loop.Post([&] { ++run; });
  EXPECT_THROW(loop.Turn(), std::bad_alloc);
  EXPECT_EQ(run, kPosts);
  EXPECT_TRUE(IsReadable(loop.fd(), 0));
  EXPECT_TRUE(RunUntil(loop, [&] { return run == kPosts + 1; }));

  // One that posts itself again leaves the turn to others.
  int rounds = 0;
  std::function<void()> again = [&] {
    if (++rounds < 100) loop.Post(again);
  };
  loop.Post(again);
  loop.Turn();
  EXPECT_LT(rounds, 100);
  EXPECT_TRUE(RunUntil(loop, [&] { return rounds == 100; }));
}

class Counting final : public EpollLoop::Source {
 public:
  void OnEvents(uint32_t) override { ++calls; }
  int calls = 0;
};

TEST(EpollLoop, ASourceIsCalledUntilItIsRemoved) {
  EpollLoop loop;
  EventFd event;
  const auto source = std::make_shared<Counting>();
  ASSERT_EQ(loop.Add(event.fd(), EPOLLIN, source), 0);
  EXPECT_EQ(loop.Add(event.fd(), EPOLLIN, std::make_shared<Counting>()), EEXIST);
  event.Signal();
  EXPECT_TRUE(loop.Turn());
  EXPECT_EQ(source->calls, 1);
  loop.Modify(event.fd(), *source, 0);
  EXPECT_FALSE(loop.Turn());
  loop.Modify(event.fd(), *source, EPOLLIN);
  EXPECT_TRUE(loop.Turn());
  loop.Remove(event.fd(), *source);
  EXPECT_FALSE(loop.Turn());
  EXPECT_EQ(source->calls, 2);
  EXPECT_EQ(source.use_count(), 1);
}

// Any number of threads may turn it; each thing is done once, and one at a time.
class FakeWakeful final : public EpollLoop::Wakeful {
 public:
  bool Look() override {
    ++looks;
    return is_there;
  }
  void LieDown() override { ++lies; }
  int looks = 0;
  int lies = 0;
  bool is_there = false;
};

TEST(EpollLoop, WhoStaysUpIsLookedAtUntilTheLoopLiesDown) {
  EpollLoop loop;
  const auto one = std::make_shared<FakeWakeful>();
  const auto stays = [&] {
    bool stays = false;
    loop.Post([&] { stays = loop.StayUp(one); });
    loop.Turn();
    return stays;
  };
  EXPECT_FALSE(stays()) << "nobody would have it lie down";
  loop.AllowWakeful();
  EXPECT_FALSE(loop.StayUp(one)) << "outside of a turn";
  EXPECT_TRUE(stays());
  EXPECT_FALSE(loop.Glance());
  EXPECT_FALSE(loop.Turn());
  one->is_there = true;
  EXPECT_TRUE(loop.Glance());
  EXPECT_TRUE(loop.Turn());
  EXPECT_EQ(one->looks, 4);
  EXPECT_TRUE(stays()) << "again";
  loop.LieDown();
  loop.LieDown();
  EXPECT_EQ(one->lies, 1);
  EXPECT_FALSE(loop.Glance());
  EXPECT_TRUE(stays());
  loop.Leave(*one);
  EXPECT_FALSE(loop.HasWakeful());
  EXPECT_FALSE(loop.Glance());
}

TEST(EpollLoop, NotManyStayUp) {
  EpollLoop loop;
  loop.AllowWakeful();
  std::vector<std::shared_ptr<FakeWakeful>> all(EpollLoop::kMostWakeful + 1);
  for (auto& each : all) each = std::make_shared<FakeWakeful>();
  std::vector<bool> stay;
  loop.Post([&] {
    for (const auto& each : all) stay.push_back(loop.StayUp(each));
  });
  loop.Turn();
  EXPECT_FALSE(stay.back());
  EXPECT_EQ(std::count(stay.begin(), stay.end(), true), static_cast<std::ptrdiff_t>(EpollLoop::kMostWakeful));
}

TEST(EpollLoop, ManyThreadsTurnIt) {
  constexpr int kThreads = 4;
  constexpr int kPosts = 4000;
  EpollLoop loop;
  int run = 0;  // no atomic: turns exclude each other
  std::atomic<int> seen{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      while (seen.load() < kPosts) {
        if (IsReadable(loop.fd(), 10)) loop.Turn();
      }
    });
  }
  for (int i = 0; i < kPosts; ++i) {
    loop.Post([&] {
      EXPECT_TRUE(loop.OnLoopThread());
      seen.store(++run);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(run, kPosts);
  EXPECT_FALSE(loop.OnLoopThread());
}

}  // namespace
}  // namespace stagecoach
