#include "emu/nic/infiniband/echo_stream.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <string>
#include <thread>
#include <vector>

#include "emu/backend/tcp/tcp_fabric.h"
#include "emu/sim/sim_world.h"

namespace stagecoach::emu {
namespace {

class Counter final : public ReadyWatcher {
 public:
  void OnReady() override { ++calls; }
  std::atomic<int> calls{0};
};

class EchoStreamTest : public ::testing::Test {
 protected:
  IoResult Write(std::string_view text) {
    const ConstBytes parts[] = {AsBytes(text)};
    return stream_.Write(parts);
  }
  IoResult Read(size_t size, std::string* into) {
    into->assign(size, '\0');
    const MutableBytes parts[] = {AsMutableBytes(into->data(), into->size())};
    const IoResult result = stream_.Read(parts);
    into->resize(result.bytes);
    return result;
  }
  // All that is to happen now has happened.
  void Settle() { world_.RunFor(1ms); }

  SimWorld world_{SimWorld::Options{}};
  SimFabric& host_ = world_.AddHost("host", {*IpEndpoint::Parse("10.0.0.1", 0)});
  EchoStream stream_{host_, *IpEndpoint::Parse("10.0.0.1", 0)};
};

TEST_F(EchoStreamTest, ReadsWhatItHasWritten) {
  std::string got;
  EXPECT_EQ(Read(10, &got).status, IoStatus::kWouldBlock);
  EXPECT_EQ(Write("hello").bytes, 5u);
  EXPECT_EQ(Read(2, &got).bytes, 2u);
  EXPECT_EQ(got, "he");
  EXPECT_EQ(Read(10, &got).bytes, 3u);
  EXPECT_EQ(got, "llo");
  EXPECT_EQ(Read(10, &got).status, IoStatus::kWouldBlock);
}

TEST_F(EchoStreamTest, TakesSoMuchAndGoesRound) {
  const std::string block(100000, 'x');
  std::string written;
  std::string read;
  std::string got;
  for (int round = 0; round < 20; ++round) {
    std::string some = block;
    some[0] = static_cast<char>('a' + round);
    const size_t bytes = Write(some).bytes;
    written.append(some, 0, bytes);
    EXPECT_LE(written.size() - read.size(), EchoStream::kCapacity);
    Read(70000, &got);
    read += got;
  }
  while (Read(70000, &got).status == IoStatus::kOk) read += got;
  EXPECT_EQ(read, written);
  ASSERT_EQ(Write(std::string(EchoStream::kCapacity + 1, 'y')).bytes, EchoStream::kCapacity);
  EXPECT_EQ(Write("z").status, IoStatus::kWouldBlock);
}

TEST_F(EchoStreamTest, ReadinessIsToldOnceForEachArming) {
  Counter counter;
  stream_.SetWatcher(&counter);
  stream_.Arm(true, false);
  Settle();
  EXPECT_EQ(counter.calls, 0);
  Write("a");
  EXPECT_EQ(counter.calls, 0) << "within the call";
  Settle();
  EXPECT_EQ(counter.calls, 1);
  Write("b");
  Settle();
  EXPECT_EQ(counter.calls, 1);
  // It is ready already.
  stream_.Arm(true, false);
  Settle();
  EXPECT_EQ(counter.calls, 2);
  stream_.Arm(false, true);
  Settle();
  EXPECT_EQ(counter.calls, 3);
  Write(std::string(EchoStream::kCapacity, 'x'));
  stream_.Arm(false, true);
  Settle();
  EXPECT_EQ(counter.calls, 3);
  std::string got;
  Read(10, &got);
  Settle();
  EXPECT_EQ(counter.calls, 4);
  stream_.Arm(true, false);
  stream_.SetWatcher(nullptr);
  Settle();
  EXPECT_EQ(counter.calls, 4);
}

TEST_F(EchoStreamTest, AfterAShutdownWhatWasWrittenIsReadAndThenItEnds) {
  Write("last");
  stream_.Shutdown();
  EXPECT_EQ(Write("more").error, EPIPE);
  std::string got;
  EXPECT_EQ(Read(10, &got).bytes, 4u);
  EXPECT_EQ(Read(10, &got).status, IoStatus::kEof);
  stream_.Abort();
  EXPECT_EQ(Read(10, &got).error, ECONNRESET);
  EXPECT_EQ(Write("more").error, ECONNRESET);
}

// On real threads: the watcher is called by the loop's, and is at rest when it has been taken away.
TEST(EchoStreamThreadsTest, AWatcherThatIsGoneIsNotCalled) {
  TcpFabric fabric;
  for (int i = 0; i < 200; ++i) {
    EchoStream stream(fabric, *IpEndpoint::Parse("127.0.0.1", 0));
    auto counter = std::make_unique<Counter>();
    stream.SetWatcher(counter.get());
    stream.Arm(true, true);
    if (i % 2 == 0) {
      while (counter->calls == 0) std::this_thread::yield();
    }
    stream.SetWatcher(nullptr);
    counter.reset();
  }
}

}  // namespace
}  // namespace stagecoach::emu
