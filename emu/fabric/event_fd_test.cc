#include "emu/fabric/event_fd.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <cerrno>
#include <functional>
#include <thread>
#include <vector>

namespace stagecoach::emu {
namespace {

bool IsReadable(int fd) {
  pollfd wanted{fd, POLLIN, 0};
  return poll(&wanted, 1, 0) == 1;
}

// Parameter: as before Linux 5.8.
class EventFdTest : public ::testing::TestWithParam<bool> {};

INSTANTIATE_TEST_SUITE_P(Kernel, EventFdTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "Before5_8" : "This"; });

TEST_P(EventFdTest, CountsSignalsAndYieldsOneAtATime) {
  const auto event = EventFd::Create(GetParam());
  ASSERT_NE(event, nullptr);
  event->Signal();
  event->Signal();
  EXPECT_TRUE(event->Consume());
  EXPECT_TRUE(IsReadable(event->fd()));
  EXPECT_TRUE(event->Consume());
  EXPECT_FALSE(IsReadable(event->fd()));
  EXPECT_FALSE(event->Consume());
}

TEST_P(EventFdTest, ConsumeNeverBlocksAndLeavesTheFlagsAlone) {
  const auto event = EventFd::Create(GetParam());
  EXPECT_EQ(fcntl(event->fd(), F_GETFL) & O_NONBLOCK, 0);
  EXPECT_FALSE(event->Consume()) << "would hang if it depended on O_NONBLOCK";
  ASSERT_EQ(fcntl(event->fd(), F_SETFL, O_NONBLOCK), 0);
  EXPECT_FALSE(event->Consume());
  event->Signal();
  EXPECT_TRUE(event->Consume());
  EXPECT_NE(fcntl(event->fd(), F_GETFL) & O_NONBLOCK, 0);
  EXPECT_NE(fcntl(event->fd(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST_P(EventFdTest, ManyConsumersTakeEachSignalOnce) {
  const auto event = EventFd::Create(GetParam());
  constexpr int kSignals = 2000;
  std::atomic<int> taken{0};
  std::vector<std::thread> consumers;
  for (int i = 0; i < 3; ++i) {
    consumers.emplace_back([&] {
      while (taken.load() < kSignals) {
        if (event->Consume()) taken.fetch_add(1);
      }
    });
  }
  for (int i = 0; i < kSignals; ++i) event->Signal();
  for (std::thread& consumer : consumers) consumer.join();
  EXPECT_EQ(taken.load(), kSignals);
  EXPECT_FALSE(event->Consume());
}

TEST_P(EventFdTest, TakeWaitsForASignalUnlessTheDescriptorIsNonBlocking) {
  const auto event = EventFd::Create(GetParam());
  std::thread signaller([&] { event->Signal(); });
  EXPECT_EQ(event->Take(), 0);
  signaller.join();
  EXPECT_FALSE(event->Consume());
  ASSERT_EQ(fcntl(event->fd(), F_SETFL, O_NONBLOCK), 0);
  EXPECT_EQ(event->Take(), EAGAIN);
  event->Signal();
  EXPECT_EQ(event->Take(), 0);
}

std::atomic<int> handled{0};

// Interrupts a thread that is inside Take() by a signal whose handler was installed with `flags`; `released` is called
// once the handler has run. What Take() answered.
int TakeInterrupted(EventFd& event, int flags, const std::function<void()>& released) {
  struct sigaction action {};
  struct sigaction before {};
  action.sa_handler = [](int) { handled.fetch_add(1); };
  action.sa_flags = flags;
  EXPECT_EQ(sigaction(SIGUSR1, &action, &before), 0);
  handled = 0;
  std::atomic<bool> done{false};
  int answer = -1;
  std::thread waiter([&] {
    answer = event.Take();
    done = true;
  });
  // A signal that comes before the thread sleeps interrupts nothing, so they come until one has.
  while (!done && ((flags & SA_RESTART) == 0 || handled < 100)) {
    const int so_far = handled;
    pthread_kill(waiter.native_handle(), SIGUSR1);
    for (int i = 0; i < 1000 && !done && handled == so_far; ++i) std::this_thread::yield();
  }
  released();
  waiter.join();
  EXPECT_EQ(sigaction(SIGUSR1, &before, nullptr), 0);
  return answer;
}

TEST_P(EventFdTest, ASignalEndsTheWaitAsReadHasIt) {
  const auto event = EventFd::Create(GetParam());
  EXPECT_EQ(TakeInterrupted(*event, 0, [] {}), EINTR);
// ThreadSanitizer keeps signals from their handlers until the call is over.
#ifndef __SANITIZE_THREAD__
  if (GetParam()) return;
  EXPECT_EQ(TakeInterrupted(*event, SA_RESTART, [&] { event->Signal(); }), 0);
  EXPECT_FALSE(event->Consume());
#endif
}

}  // namespace
}  // namespace stagecoach::emu
