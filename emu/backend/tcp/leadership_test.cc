#include "emu/backend/tcp/leadership.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "emu/backend/tcp/leading_companion.h"
#include "emu/backend/tcp/leading_notifier.h"

namespace stagecoach::emu {
namespace {

// Longer than anything here can take; reached only by a failing test.
constexpr auto kBound = std::chrono::seconds(30);

// What is true soon.
bool Soon(const std::function<bool()>& is_true) {
  const auto limit = std::chrono::steady_clock::now() + kBound;
  while (!is_true()) {
    if (std::chrono::steady_clock::now() > limit) return false;
    std::this_thread::yield();
  }
  return true;
}

// A connection, as the loop sees it: something arrives, and whoever turns the loop says so.
class Arrivals final : public EpollLoop::Source {
 public:
  explicit Arrivals(std::function<void()> on_arrival) : on_arrival_(std::move(on_arrival)) {}
  ~Arrivals() override { close(fd_); }
  int fd() const { return fd_; }
  void Arrive() { EXPECT_EQ(eventfd_write(fd_, 1), 0); }
  void OnEvents(uint32_t) override {
    eventfd_t count = 0;
    EXPECT_EQ(eventfd_read(fd_, &count), 0);
    for (; count > 0; --count) {
      on_arrival_();
      ++seen;
    }
  }
  std::atomic<uint64_t> seen{0};

 private:
  const int fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  const std::function<void()> on_arrival_;
};

class LeadershipTest : public testing::Test {
 protected:
  explicit LeadershipTest(const Leadership::Options& options = {})
      : leadership_(&loop_, options), thread_([this] { leadership_.Run(); }) {}
  ~LeadershipTest() override {
    leadership_.Stop();
    thread_.join();
    for (const int signal : {SIGUSR1, SIGUSR2}) ::signal(signal, SIG_DFL);
  }

  std::unique_ptr<LeadingNotifier> NewNotifier() {
    return std::make_unique<LeadingNotifier>(&leadership_, EventFd::Create());
  }
  std::shared_ptr<Arrivals> NewArrivals(std::function<void()> on_arrival) {
    auto arrivals = std::make_shared<Arrivals>(std::move(on_arrival));
    EXPECT_EQ(loop_.Add(arrivals->fd(), EPOLLIN, arrivals), 0);
    return arrivals;
  }
  // Many waiters, each of whom is woken through whoever leads: nothing is forgotten, whoever comes and goes.
  void CheckThatNoArrivalIsForgotten() {
    constexpr int kWaiters = 4;
    constexpr int kRounds = 2000;
    std::vector<std::unique_ptr<LeadingNotifier>> notifiers;
    std::vector<std::shared_ptr<Arrivals>> arrivals;
    for (int i = 0; i < kWaiters; ++i) {
      notifiers.push_back(NewNotifier());
      arrivals.push_back(NewArrivals([notifier = notifiers.back().get()] { notifier->Signal(); }));
    }
    std::atomic<int> taken{0};
    std::vector<std::thread> waiters;
    for (int i = 0; i < kWaiters; ++i) {
      waiters.emplace_back([&, i] {
        for (int round = 0; round < kRounds; ++round) {
          ASSERT_EQ(notifiers[i]->Take(), 0);
          // Each wakes the next, which may wait, or be on its way to. After the last one nothing may arrive any more.
          if (++taken < kWaiters * kRounds) arrivals[(i + 1) % kWaiters]->Arrive();
        }
      });
    }
    arrivals[0]->Arrive();
    EXPECT_TRUE(Soon([&] { return taken.load() == kWaiters * kRounds; }));
    for (std::thread& waiter : waiters) waiter.join();
  }

  // Since the fabric's thread led last, somebody else has taken the lead.
  bool IsLedByAWaiter() { return !leadership_.IsLedByThread(); }

  static bool IsReadable(int fd) {
    pollfd ready{fd, POLLIN, 0};
    return poll(&ready, 1, 0) > 0;
  }
  static void Handle(int signal, void (*handler)(int), int flags) {
    struct sigaction action {};
    action.sa_handler = handler;
    action.sa_flags = flags;
    ASSERT_EQ(sigaction(signal, &action, nullptr), 0);
  }

  EpollLoop loop_;
  Leadership leadership_;
  std::thread thread_;
};

TEST_F(LeadershipTest, WhoWaitsTurnsTheLoopAndTakesWhatItFinds) {
  const auto notifier = NewNotifier();
  const auto arrivals = NewArrivals([&] { notifier->Signal(); });
  std::promise<int> answer;
  std::thread waiter([&] { answer.set_value(notifier->Take()); });
  ASSERT_TRUE(Soon([&] { return IsLedByAWaiter(); }));
  arrivals->Arrive();
  EXPECT_EQ(answer.get_future().get(), 0);
  waiter.join();
  EXPECT_EQ(leadership_.counters().turns_of_waiters.load(), 1u);
  EXPECT_FALSE(IsReadable(notifier->fd()));
  EXPECT_FALSE(notifier->Consume());
}

// A program that polls the descriptor sees each event there, whoever found it.
TEST_F(LeadershipTest, WithoutAWaiterTheFabricsThreadTurnsAndTheDescriptorTells) {
  const auto notifier = NewNotifier();
  const auto arrivals = NewArrivals([&] { notifier->Signal(); });
  for (int i = 0; i < 3; ++i) arrivals->Arrive();
  ASSERT_TRUE(Soon([&] { return arrivals->seen.load() == 3; }));
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(IsReadable(notifier->fd()));
    EXPECT_EQ(notifier->Take(), 0);
  }
  EXPECT_FALSE(IsReadable(notifier->fd()));
  EXPECT_EQ(leadership_.counters().turns_of_waiters.load(), 0u);
}

TEST_F(LeadershipTest, TwoOfATurnAreOneTakenAndOneOnTheDescriptor) {
  const auto notifier = NewNotifier();
  const auto arrivals = NewArrivals([&] {
    notifier->Signal();
    notifier->Signal();
  });
  std::promise<int> answer;
  std::thread waiter([&] { answer.set_value(notifier->Take()); });
  ASSERT_TRUE(Soon([&] { return IsLedByAWaiter(); }));
  arrivals->Arrive();
  EXPECT_EQ(answer.get_future().get(), 0);
  waiter.join();
  EXPECT_TRUE(notifier->Consume());
  EXPECT_FALSE(notifier->Consume());
}

TEST_F(LeadershipTest, ANonBlockingDescriptorDoesNotWait) {
  const auto notifier = NewNotifier();
  ASSERT_EQ(fcntl(notifier->fd(), F_SETFL, O_NONBLOCK), 0);
  EXPECT_EQ(notifier->Take(), EAGAIN);
  notifier->Signal();
  EXPECT_EQ(notifier->Take(), 0);
  EXPECT_EQ(notifier->Take(), EAGAIN);
}

// Once a waiter has gone, the loop goes on without it.
TEST_F(LeadershipTest, AfterAWaiterTheFabricsThreadLeadsAgain) {
  const auto notifier = NewNotifier();
  const auto arrivals = NewArrivals([&] { notifier->Signal(); });
  std::thread waiter([&] { EXPECT_EQ(notifier->Take(), 0); });
  ASSERT_TRUE(Soon([&] { return IsLedByAWaiter(); }));
  arrivals->Arrive();
  waiter.join();
  arrivals->Arrive();
  EXPECT_TRUE(Soon([&] { return arrivals->seen.load() == 2; }));
  EXPECT_EQ(leadership_.counters().turns_of_waiters.load(), 1u);
}

TEST_F(LeadershipTest, PostedWorkIsDoneWhoeverLeads) {
  const auto notifier = NewNotifier();
  std::thread waiter([&] { EXPECT_EQ(notifier->Take(), 0); });
  ASSERT_TRUE(Soon([&] { return IsLedByAWaiter(); }));
  std::promise<void> done;
  loop_.Post([&] { done.set_value(); });
  EXPECT_EQ(done.get_future().wait_for(kBound), std::future_status::ready);
  notifier->Signal();
  waiter.join();
}

// Its end leaves the lead to the next one (pthreads(7): the wait is a cancellation point).
TEST_F(LeadershipTest, ACancelledWaiterLeavesTheLead) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the thread sanitizer does not see what a thread locks that is cancelled in ppoll";
#endif
  const auto notifier = NewNotifier();
  const auto arrivals = NewArrivals([] {});
  std::thread waiter([&] { notifier->Take(); });
  ASSERT_TRUE(Soon([&] { return IsLedByAWaiter(); }));
  ASSERT_EQ(pthread_cancel(waiter.native_handle()), 0);
  waiter.join();
  arrivals->Arrive();
  EXPECT_TRUE(Soon([&] { return arrivals->seen.load() == 1; }));
}

std::atomic<int> handled{0};
void Count(int) {
  ++handled;
}

// As read(2) of the descriptor would.
TEST_F(LeadershipTest, AWaitGoesOnAfterAHandlerThatSaysSo) {
  if (HandlersNow() != Handlers::kNone) GTEST_SKIP() << "handlers of others are there";
  Handle(SIGUSR1, Count, SA_RESTART);
  const auto notifier = NewNotifier();
  handled = 0;
  std::promise<int> answer;
  std::thread waiter([&] { answer.set_value(notifier->Take()); });
  ASSERT_TRUE(Soon([&] { return IsLedByAWaiter(); }));
  pthread_kill(waiter.native_handle(), SIGUSR1);
  ASSERT_TRUE(Soon([] { return handled.load() == 1; }));
  notifier->Signal();
  EXPECT_EQ(answer.get_future().get(), 0);
  waiter.join();
}

TEST_F(LeadershipTest, AWaitEndsWithAHandlerThatSaysNothing) {
  if (HandlersNow() != Handlers::kNone) GTEST_SKIP() << "handlers of others are there";
  Handle(SIGUSR1, Count, 0);
  const auto notifier = NewNotifier();
  std::promise<int> answer;
  std::atomic<bool> is_over{false};
  std::thread waiter([&] {
    answer.set_value(notifier->Take());
    is_over = true;
  });
  ASSERT_TRUE(Soon([&] { return IsLedByAWaiter(); }));
  // Again, should the first have come before the thread slept.
  EXPECT_TRUE(Soon([&] {
    if (!is_over) pthread_kill(waiter.native_handle(), SIGUSR1);
    return is_over.load();
  }));
  waiter.join();
  EXPECT_EQ(answer.get_future().get(), EINTR);
}

// A handler that removes itself leaves nothing to ask afterwards.
TEST_F(LeadershipTest, AWaitEndsWithAHandlerThatRemovesItself) {
  if (HandlersNow() != Handlers::kNone) GTEST_SKIP() << "handlers of others are there";
  const auto notifier = NewNotifier();
  std::promise<int> answer;
  std::atomic<bool> is_over{false};
  handled = 0;
  std::thread waiter([&] {
    answer.set_value(notifier->Take());
    is_over = true;
  });
  ASSERT_TRUE(Soon([&] { return IsLedByAWaiter(); }));
  EXPECT_TRUE(Soon([&] {
    Handle(SIGUSR1, Count, SA_RESETHAND);
    if (!is_over) pthread_kill(waiter.native_handle(), SIGUSR1);
    const int before = handled;
    return Soon([&] { return is_over.load() || handled.load() > before; }) && is_over.load();
  }));
  waiter.join();
  EXPECT_EQ(answer.get_future().get(), EINTR);
}

// A handler may want what the turn holds, or never come back.
TEST_F(LeadershipTest, HandlersRunInNoTurn) {
  Handle(SIGUSR1, Count, SA_RESTART);
  handled = 0;
  const auto notifier = NewNotifier();
  std::atomic<int> handled_in_turn{-1};
  const auto arrivals = NewArrivals([&] {
    pthread_kill(pthread_self(), SIGUSR1);
    handled_in_turn = handled.load();
    notifier->Signal();
  });
  std::thread waiter([&] {
    EXPECT_EQ(notifier->Take(), 0);
    EXPECT_EQ(handled.load(), 1);
  });
  ASSERT_TRUE(Soon([&] { return IsLedByAWaiter(); }));
  arrivals->Arrive();
  waiter.join();
  EXPECT_EQ(leadership_.counters().turns_of_waiters.load(), 1u);
  EXPECT_EQ(handled_in_turn.load(), 0);
}

std::atomic<bool> is_in_handler{false};
std::atomic<bool> may_leave{false};
void Stay(int) {
  is_in_handler = true;
  while (!may_leave) poll(nullptr, 0, 1);
}

// A leader that does not come back from a handler (which may call exit(3), or jump elsewhere) keeps nobody waiting.
TEST_F(LeadershipTest, TheLeadIsTakenFromWhoStaysInAHandler) {
  Handle(SIGUSR1, Stay, SA_RESTART);
  const auto notifier = NewNotifier();
  const auto arrivals = NewArrivals([] {});
  is_in_handler = may_leave = false;
  std::thread waiter([&] { EXPECT_EQ(notifier->Take(), 0); });
  ASSERT_TRUE(Soon([&] { return IsLedByAWaiter(); }));
  pthread_kill(waiter.native_handle(), SIGUSR1);
  ASSERT_TRUE(Soon([] { return is_in_handler.load(); }));
  arrivals->Arrive();
  EXPECT_TRUE(Soon([&] { return arrivals->seen.load() == 1; }));
  EXPECT_EQ(leadership_.counters().turns_of_waiters.load(), 0u);
  may_leave = true;
  notifier->Signal();
  waiter.join();
}

// A loop of the program's that sleeps on the companion's descriptor.
TEST_F(LeadershipTest, ACompanionTurnsWhileItsLoopSleeps) {
  const auto arrivals = NewArrivals([] {});
  const auto companion = LeadingCompanion::Create(&leadership_);
  ASSERT_NE(companion, nullptr);
  companion->OnSleep();
  arrivals->Arrive();
  pollfd ready{companion->fd(), POLLIN, 0};
  ASSERT_EQ(poll(&ready, 1, 30000), 1);
  companion->OnReadable();
  companion->OnWake();
  EXPECT_TRUE(Soon([&] { return arrivals->seen.load() == 1; }));
  // It is awake, and somebody else's turn.
  arrivals->Arrive();
  EXPECT_TRUE(Soon([&] { return arrivals->seen.load() == 2; }));
}

TEST_F(LeadershipTest, ACompanionThatDoesNotLeadIsNotWoken) {
  const auto notifier = NewNotifier();
  const auto arrivals = NewArrivals([&] { notifier->Signal(); });
  std::thread waiter([&] {
    EXPECT_EQ(notifier->Take(), 0);
    EXPECT_EQ(notifier->Take(), 0);
  });
  ASSERT_TRUE(Soon([&] { return IsLedByAWaiter(); }));
  arrivals->Arrive();
  ASSERT_TRUE(Soon([&] { return leadership_.counters().turns_of_waiters.load() == 1; }));
  ASSERT_TRUE(Soon([&] { return IsLedByAWaiter(); }));
  const auto companion = LeadingCompanion::Create(&leadership_);
  ASSERT_NE(companion, nullptr);
  arrivals->Arrive();
  waiter.join();
  EXPECT_FALSE(IsReadable(companion->fd()));
}

// A callback of the loop's own that takes long, within what counts as a sleep.
TEST_F(LeadershipTest, TheLeadIsTakenFromALoopThatIsBusy) {
  const auto arrivals = NewArrivals([] {});
  const auto companion = LeadingCompanion::Create(&leadership_);
  ASSERT_NE(companion, nullptr);
  companion->OnSleep();
  ASSERT_TRUE(IsLedByAWaiter());
  arrivals->Arrive();
  EXPECT_TRUE(Soon([&] { return arrivals->seen.load() == 1; }));
  companion->OnWake();
}

// Its descriptors are closed there, and their numbers another's.
TEST_F(LeadershipTest, InAChildACompanionTouchesNothing) {
  auto companion = LeadingCompanion::Create(&leadership_);
  ASSERT_NE(companion, nullptr);
  const int number = companion->fd();
  const pid_t child = fork();
  if (child == 0) {
    if (fcntl(number, F_GETFD) >= 0) _exit(2);  // it was to be closed
    if (dup2(STDERR_FILENO, number) != number) _exit(3);
    companion->OnSleep();
    companion->OnReadable();
    companion->OnWake();
    companion.reset();
    _exit(fcntl(number, F_GETFD) >= 0 ? 0 : 4);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST_F(LeadershipTest, NoArrivalIsForgotten) {
  CheckThatNoArrivalIsForgotten();
}

// Who waits goes on polling for longer than any test takes, once an arrival has come soon.
class PollingLeadershipTest : public LeadershipTest {
 protected:
  static constexpr Duration kLong = std::chrono::hours(8);
  PollingLeadershipTest() : LeadershipTest({.busy_poll = kLong}) {}

  // Of `notifier`, for which `arrivals` arrive: its next waiter polls.
  void HavePolled(LeadingNotifier* notifier, Arrivals* arrivals) {
    std::thread waiter([&] { EXPECT_EQ(notifier->Take(), 0); });
    EXPECT_TRUE(Soon([&] { return IsLedByAWaiter(); }));
    arrivals->Arrive();
    waiter.join();
    EXPECT_TRUE(leadership_.Polls());
  }
};

TEST_F(PollingLeadershipTest, WhoPollsFindsWhatArrives) {
  const auto notifier = NewNotifier();
  const auto arrivals = NewArrivals([&] { notifier->Signal(); });
  HavePolled(notifier.get(), arrivals.get());
  std::atomic<int> taken{0};
  std::thread waiter([&] {
    for (; taken.load() < 10; ++taken) EXPECT_EQ(notifier->Take(), 0);
  });
  for (int i = 0; i < 10; ++i) {
    EXPECT_TRUE(Soon([&] { return taken.load() == i; }));
    arrivals->Arrive();
  }
  waiter.join();
  EXPECT_GE(leadership_.counters().found_by_polling.load(), 10u);
}

TEST_F(PollingLeadershipTest, WhatAnotherThreadGivesEndsThePoll) {
  const auto notifier = NewNotifier();
  const auto arrivals = NewArrivals([&] { notifier->Signal(); });
  HavePolled(notifier.get(), arrivals.get());
  std::thread waiter([&] { EXPECT_EQ(notifier->Take(), 0); });
  EXPECT_TRUE(Soon([&] { return IsLedByAWaiter(); }));
  notifier->Signal();
  waiter.join();
}

TEST_F(PollingLeadershipTest, ACompanionPollsWhileItsLoopIsIdle) {
  const auto notifier = NewNotifier();
  const auto arrivals = NewArrivals([&] { notifier->Signal(); });
  HavePolled(notifier.get(), arrivals.get());
  const auto companion = LeadingCompanion::Create(&leadership_);
  ASSERT_NE(companion, nullptr);
  arrivals->Arrive();
  // The last waiter has kept the lead for a while.
  const auto is_seen = [&] { return arrivals->seen.load() == 2; };
  EXPECT_TRUE(Soon([&] { return companion->OnIdle(is_seen) || is_seen(); }));
  int asked = 0;
  EXPECT_TRUE(Soon([&] {
    companion->OnIdle([&] { return ++asked == 3; });
    return asked == 3;
  }));
}

class ShortlyPollingLeadershipTest : public LeadershipTest {
 protected:
  ShortlyPollingLeadershipTest() : LeadershipTest({.busy_poll = 50us}) {}
};

TEST_F(ShortlyPollingLeadershipTest, NoArrivalIsForgotten) {
  CheckThatNoArrivalIsForgotten();
}

}  // namespace
}  // namespace stagecoach::emu
