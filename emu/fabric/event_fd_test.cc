#include "emu/fabric/event_fd.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <atomic>
#include <cerrno>
#include <thread>
#include <vector>

namespace stagecoach::emu {
namespace {

bool IsReadable(int fd) {
  pollfd wanted{fd, POLLIN, 0};
  return poll(&wanted, 1, 0) == 1;
}

TEST(EventFd, CountsSignalsAndYieldsOneAtATime) {
  const auto event = EventFd::Create();
  ASSERT_NE(event, nullptr);
  event->Signal();
  event->Signal();
  EXPECT_TRUE(event->Consume());
  EXPECT_TRUE(IsReadable(event->fd()));
  EXPECT_TRUE(event->Consume());
  EXPECT_FALSE(IsReadable(event->fd()));
  EXPECT_FALSE(event->Consume());
}

TEST(EventFd, ConsumeNeverBlocksAndLeavesTheFlagsAlone) {
  const auto event = EventFd::Create();
  EXPECT_EQ(fcntl(event->fd(), F_GETFL) & O_NONBLOCK, 0);
  EXPECT_FALSE(event->Consume()) << "would hang if it depended on O_NONBLOCK";
  ASSERT_EQ(fcntl(event->fd(), F_SETFL, O_NONBLOCK), 0);
  EXPECT_FALSE(event->Consume());
  event->Signal();
  EXPECT_TRUE(event->Consume());
  EXPECT_NE(fcntl(event->fd(), F_GETFL) & O_NONBLOCK, 0);
  EXPECT_NE(fcntl(event->fd(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(EventFd, ManyConsumersTakeEachSignalOnce) {
  const auto event = EventFd::Create();
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

TEST(EventFd, PollReadableReturnsWhenSignalledAndRefusesAClosedDescriptor) {
  const auto event = EventFd::Create();
  std::thread signaller([&] { event->Signal(); });
  EXPECT_EQ(PollReadable(event->fd()), 0);
  signaller.join();
  EXPECT_EQ(PollReadable(1 << 20), EBADF);
}

}  // namespace
}  // namespace stagecoach::emu
