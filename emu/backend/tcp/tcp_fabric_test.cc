#include "emu/backend/tcp/tcp_fabric.h"

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <fstream>
#include <future>
#include <thread>

#include "base/epoll_loop/epoll_loop.h"

namespace stagecoach::emu {
namespace {

using StreamResult = Result<std::unique_ptr<Stream>, FabricError>;

// Longer than anything here can take; reached only by a failing test.
constexpr auto kBound = std::chrono::seconds(10);

IpEndpoint Loopback(uint16_t port = 0) {
  return *IpEndpoint::Parse("127.0.0.1", port);
}

// Lets a thread wait for something another one does.
class Event {
 public:
  void Set() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++count_;
    changed_.notify_all();
  }
  bool WaitFor(int count) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, kBound, [&] { return count_ >= count; });
  }
  int count() {
    std::lock_guard<std::mutex> lock(mutex_);
    return count_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
};

class CountingWatcher : public ReadyWatcher {
 public:
  void OnReady() override { ready.Set(); }
  Event ready;
};

IoResult ReadSome(Stream& stream, MutableBytes into) {
  const MutableBytes parts[] = {into};
  return stream.Read(parts);
}

IoResult WriteSome(Stream& stream, std::string_view text) {
  const ConstBytes parts[] = {AsBytes(text)};
  return stream.Write(parts);
}

// Reads until something other than kWouldBlock; waits by arming.
IoResult ReadWhenReady(Stream& stream, CountingWatcher& watcher, MutableBytes into) {
  while (true) {
    const IoResult result = ReadSome(stream, into);
    if (result.status != IoStatus::kWouldBlock) return result;
    const int before = watcher.ready.count();
    stream.Arm(true, false);
    if (!watcher.ready.WaitFor(before + 1)) return {IoStatus::kError, 0, ETIMEDOUT};
  }
}

struct Connected {
  std::unique_ptr<Stream> client;
  std::unique_ptr<Stream> server;
};

class TcpFabricTest : public testing::Test {
 protected:
  StreamResult ConnectTo(const IpEndpoint& remote, const IpEndpoint& local = {}) {
    std::promise<StreamResult> done;
    auto future = done.get_future();
    const auto attempt =
        fabric_.Connect(local, remote, [&](StreamResult result) { done.set_value(std::move(result)); });
    return future.get();
  }

  Connected Pair(const IpEndpoint& address = Loopback()) {
    std::promise<std::unique_ptr<Stream>> accepted;
    auto future = accepted.get_future();
    auto listener =
        fabric_.Listen(address, 8, [&](std::unique_ptr<Stream> stream) { accepted.set_value(std::move(stream)); });
    EXPECT_TRUE(listener.has_value());
    Connected pair;
    StreamResult result = ConnectTo((*listener)->local());
    EXPECT_TRUE(result.has_value());
    pair.client = std::move(*result);
    pair.server = future.get();
    return pair;
  }

  TcpFabric fabric_;
};

TEST_F(TcpFabricTest, BothEndsKnowEachOtherAndExchangeBytes) {
  Connected pair = Pair();
  EXPECT_EQ(pair.client->local(), pair.server->remote());
  EXPECT_EQ(pair.client->remote(), pair.server->local());
  CountingWatcher watcher;
  pair.server->SetWatcher(&watcher);
  EXPECT_EQ(WriteSome(*pair.client, "stagecoach").bytes, 10u);
  char one[4];
  char two[16];
  const MutableBytes parts[] = {AsMutableBytes(one, 4), MutableBytes{}, AsMutableBytes(two, 16)};
  pair.server->Arm(true, false);
  ASSERT_TRUE(watcher.ready.WaitFor(1));
  const IoResult result = pair.server->Read(parts);
  EXPECT_EQ(result.status, IoStatus::kOk);
  EXPECT_EQ(result.bytes, 10u);
  EXPECT_EQ(std::string(one, 4) + std::string(two, 6), "stagecoach");
  EXPECT_EQ(pair.server->Read(parts).status, IoStatus::kWouldBlock);
}

TEST_F(TcpFabricTest, WorksOverIpv6) {
  if (!fabric_.RouteTo(*IpEndpoint::Parse("::1", 1))) GTEST_SKIP() << "this host has no IPv6 loopback";
  Connected pair = Pair(*IpEndpoint::Parse("::1", 0));
  EXPECT_EQ(pair.client->local().family, IpEndpoint::Family::kIpv6);
  EXPECT_EQ(pair.client->local(), pair.server->remote());
}

TEST_F(TcpFabricTest, ADualStackListenerNamesIpv4PeersAsIpv4) {
  if (!fabric_.RouteTo(*IpEndpoint::Parse("::1", 1))) GTEST_SKIP() << "this host has no IPv6 loopback";
  std::promise<std::unique_ptr<Stream>> accepted;
  auto listener = fabric_.Listen(*IpEndpoint::Parse("::", 0), 8,
                                 [&](std::unique_ptr<Stream> stream) { accepted.set_value(std::move(stream)); });
  ASSERT_TRUE(listener.has_value());
  StreamResult client = ConnectTo(Loopback((*listener)->local().port));
  if (!client) GTEST_SKIP() << "this host separates IPv6 from IPv4 listeners";
  EXPECT_EQ(accepted.get_future().get()->remote(), (*client)->local());
}

TEST_F(TcpFabricTest, DescriptorsAreCloseOnExecAndNonBlocking) {
  Connected pair = Pair();
  for (const Stream* stream : {pair.client.get(), pair.server.get()}) {
    EXPECT_NE(fcntl(stream->PollDescriptor(), F_GETFD) & FD_CLOEXEC, 0);
    EXPECT_NE(fcntl(stream->PollDescriptor(), F_GETFL) & O_NONBLOCK, 0);
  }
  // And so is everything else the fabric opened: whatever is not standard input, output, error or inherited.
  DIR* const directory = opendir("/proc/self/fd");
  ASSERT_NE(directory, nullptr);
  const std::string interesting[] = {"socket:", "anon_inode:[eventpoll]", "anon_inode:[timerfd]",
                                     "anon_inode:[eventfd]"};
  while (const dirent* entry = readdir(directory)) {
    char target[64] = "";
    const std::string path = std::string("/proc/self/fd/") + entry->d_name;
    if (readlink(path.c_str(), target, sizeof target - 1) < 0 || atoi(entry->d_name) < 3) continue;
    for (const std::string& prefix : interesting) {
      if (std::string(target).rfind(prefix, 0) != 0) continue;
      EXPECT_NE(fcntl(atoi(entry->d_name), F_GETFD) & FD_CLOEXEC, 0) << path << " is " << target;
    }
  }
  closedir(directory);
}

TEST_F(TcpFabricTest, ARefusedConnectionSaysSoInWords) {
  IpEndpoint nobody;
  {
    auto listener = fabric_.Listen(Loopback(), 1, [](std::unique_ptr<Stream>) {});
    ASSERT_TRUE(listener.has_value());
    nobody = (*listener)->local();
  }
  const StreamResult result = ConnectTo(nobody);
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().error, ECONNREFUSED);
  EXPECT_EQ(result.error().message, "connect to " + nobody.ToString() + ": Connection refused");
}

TEST_F(TcpFabricTest, WhoCallsItsOwnPortDoesNotMeetItself) {
  auto held = fabric_.HoldPort({}, Loopback());
  ASSERT_TRUE(held.has_value());
  const IpEndpoint own = (*held)->local();
  const StreamResult result = ConnectTo(own, own);
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().error, ECONNREFUSED);
  EXPECT_TRUE(fabric_.Listen(own, 1, [](std::unique_ptr<Stream>) {}).has_value());
}

TEST_F(TcpFabricTest, ConnectingToNowhereOrFromAForeignAddressFails) {
  const StreamResult nowhere = ConnectTo(IpEndpoint{});
  ASSERT_FALSE(nowhere.has_value());
  EXPECT_EQ(nowhere.error().error, EDESTADDRREQ);
  // TEST-NET-1 (RFC 5737) is nobody's address.
  const StreamResult foreign = ConnectTo(Loopback(1), *IpEndpoint::Parse("192.0.2.1", 0));
  ASSERT_FALSE(foreign.has_value());
  EXPECT_EQ(foreign.error().error, EADDRNOTAVAIL);
}

TEST_F(TcpFabricTest, ConnectUsesTheGivenSourceAddress) {
  auto listener = fabric_.Listen(Loopback(), 8, [](std::unique_ptr<Stream>) {});
  const StreamResult result = ConnectTo((*listener)->local(), *IpEndpoint::Parse("127.0.0.9", 0));
  ASSERT_TRUE(result.has_value()) << result.error().message;
  EXPECT_EQ((*result)->local().AddressString(), "127.0.0.9");
}

TEST_F(TcpFabricTest, ListeningTwiceOnOnePortFailsUntilTheFirstListenerIsGone) {
  auto first = fabric_.Listen(Loopback(), 8, [](std::unique_ptr<Stream>) {});
  ASSERT_TRUE(first.has_value());
  const IpEndpoint address = (*first)->local();
  const auto second = fabric_.Listen(address, 8, [](std::unique_ptr<Stream>) {});
  ASSERT_FALSE(second.has_value());
  EXPECT_EQ(second.error().error, EADDRINUSE);
  EXPECT_EQ(second.error().message, "listen on " + address.ToString() + ": Address already in use");
  first->reset();
  EXPECT_TRUE(fabric_.Listen(address, 8, [](std::unique_ptr<Stream>) {}).has_value());
  EXPECT_EQ(fabric_.Listen(IpEndpoint{}, 8, [](std::unique_ptr<Stream>) {}).error().error, EAFNOSUPPORT);
}

TEST_F(TcpFabricTest, AHeldPortCanBeListenedOnAndConnectedFromByItsHolder) {
  auto held = fabric_.HoldPort({}, Loopback());
  ASSERT_TRUE(held.has_value());
  const IpEndpoint local = (*held)->local();
  ASSERT_NE(local.port, 0);
  // Nobody listens yet.
  EXPECT_EQ(ConnectTo(local).error().error, ECONNREFUSED);
  // Somebody who does not reuse addresses cannot have it.
  sockaddr_storage address;
  const socklen_t length = local.ToSockaddr(&address);
  const int other = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(bind(other, reinterpret_cast<const sockaddr*>(&address), length), -1);
  EXPECT_EQ(errno, EADDRINUSE);
  held->reset();
  EXPECT_EQ(bind(other, reinterpret_cast<const sockaddr*>(&address), length), 0);
  close(other);

  held = fabric_.HoldPort({}, Loopback());
  ASSERT_TRUE(held.has_value());
  auto listener = fabric_.Listen((*held)->local(), 1, [](std::unique_ptr<Stream>) {});
  ASSERT_TRUE(listener.has_value());
  EXPECT_EQ(fabric_.HoldPort({}, (*held)->local()).error().error, EADDRINUSE);

  held = fabric_.HoldPort({}, Loopback());
  ASSERT_TRUE(held.has_value());
  const StreamResult stream = ConnectTo((*listener)->local(), (*held)->local());
  ASSERT_TRUE(stream.has_value());
  EXPECT_EQ((*stream)->local(), (*held)->local());
}

TEST_F(TcpFabricTest, StreamsOfBothEndsHaveTheServiceClassAskedFor) {
  for (const char* address : {"127.0.0.1", "::1"}) {
    SCOPED_TRACE(address);
    std::promise<std::unique_ptr<Stream>> accepted;
    auto listener = fabric_.ListenWith({.service_class = 0x48}, *IpEndpoint::Parse(address, 0), 8,
                                       [&](std::unique_ptr<Stream> stream) { accepted.set_value(std::move(stream)); });
    ASSERT_TRUE(listener.has_value());
    std::promise<StreamResult> done;
    const auto attempt = fabric_.ConnectWith({.service_class = 0x28}, {}, (*listener)->local(),
                                             [&](StreamResult result) { done.set_value(std::move(result)); });
    const auto class_of = [&](const Stream& stream) {
      const bool six = stream.local().family == IpEndpoint::Family::kIpv6;
      int value = -1;
      socklen_t length = sizeof value;
      EXPECT_EQ(getsockopt(stream.PollDescriptor(), six ? IPPROTO_IPV6 : IPPROTO_IP, six ? IPV6_TCLASS : IP_TOS, &value,
                           &length),
                0);
      return value;
    };
    const StreamResult connected = done.get_future().get();
    ASSERT_TRUE(connected.has_value());
    EXPECT_EQ(class_of(**connected), 0x28);
    EXPECT_EQ(class_of(*accepted.get_future().get()), 0x48);
  }
}

TEST_F(TcpFabricTest, AListenerOfItsOwnFamilyOnlyTakesNoIpv4) {
  auto listener =
      fabric_.ListenWith({.own_family_only = true}, *IpEndpoint::Parse("::", 0), 8, [](std::unique_ptr<Stream>) {});
  ASSERT_TRUE(listener.has_value());
  const uint16_t port = (*listener)->local().port;
  EXPECT_EQ(ConnectTo(Loopback(port)).error().error, ECONNREFUSED);
  EXPECT_TRUE(ConnectTo(*IpEndpoint::Parse("::1", port)).has_value());
}

TEST_F(TcpFabricTest, HalfCloseLetsTheOtherDirectionGoOn) {
  Connected pair = Pair();
  CountingWatcher server_watcher;
  CountingWatcher client_watcher;
  pair.server->SetWatcher(&server_watcher);
  pair.client->SetWatcher(&client_watcher);
  WriteSome(*pair.client, "last");
  pair.client->Shutdown();
  pair.client->Shutdown();
  EXPECT_EQ(WriteSome(*pair.client, "x").status, IoStatus::kError);
  char buffer[16];
  EXPECT_EQ(ReadWhenReady(*pair.server, server_watcher, AsMutableBytes(buffer, 16)).bytes, 4u);
  EXPECT_EQ(ReadWhenReady(*pair.server, server_watcher, AsMutableBytes(buffer, 16)).status, IoStatus::kEof);
  WriteSome(*pair.server, "answer");
  EXPECT_EQ(ReadWhenReady(*pair.client, client_watcher, AsMutableBytes(buffer, 16)).bytes, 6u);
}

TEST_F(TcpFabricTest, AbortResetsThePeerAtOnceWhileTheStreamStillExists) {
  Connected pair = Pair();
  CountingWatcher watcher;
  pair.server->SetWatcher(&watcher);
  WriteSome(*pair.client, "lost");
  pair.client->Abort();
  pair.client->Abort();
  char buffer[16];
  IoResult result;
  do {
    result = ReadWhenReady(*pair.server, watcher, AsMutableBytes(buffer, 16));
  } while (result.status == IoStatus::kOk);
  EXPECT_EQ(result.status, IoStatus::kError);
  EXPECT_EQ(result.error, ECONNRESET);
  EXPECT_EQ(ReadSome(*pair.client, AsMutableBytes(buffer, 16)).error, ECONNABORTED);
  EXPECT_EQ(WriteSome(*pair.client, "x").error, ECONNABORTED);
}

TEST_F(TcpFabricTest, WritingToAPeerThatIsGoneIsAnErrorAndNotASignal) {
  Connected pair = Pair();
  pair.server->Abort();
  CountingWatcher watcher;
  pair.client->SetWatcher(&watcher);
  char buffer[4];
  EXPECT_EQ(ReadWhenReady(*pair.client, watcher, AsMutableBytes(buffer, 4)).status, IoStatus::kError);
  EXPECT_EQ(WriteSome(*pair.client, "x").status, IoStatus::kError);  // SIGPIPE would end the test
}

TEST_F(TcpFabricTest, AFullStreamBlocksAndBecomesWritableAgain) {
  Connected pair = Pair();
  CountingWatcher watcher;
  pair.client->SetWatcher(&watcher);
  const std::string block(1 << 16, 'b');
  size_t written = 0;
  IoResult result;
  while ((result = WriteSome(*pair.client, block)).status == IoStatus::kOk) written += result.bytes;
  ASSERT_EQ(result.status, IoStatus::kWouldBlock);
  pair.client->Arm(false, true);
  std::string sink(1 << 16, '\0');
  size_t read = 0;
  CountingWatcher server_watcher;
  pair.server->SetWatcher(&server_watcher);
  while (read < written) {
    const IoResult part = ReadWhenReady(*pair.server, server_watcher, AsMutableBytes(sink.data(), sink.size()));
    ASSERT_EQ(part.status, IoStatus::kOk);
    read += part.bytes;
  }
  EXPECT_TRUE(watcher.ready.WaitFor(1));
  EXPECT_EQ(WriteSome(*pair.client, block).status, IoStatus::kOk);
}

// That nobody reads there makes no difference, until there is no room.
TEST_F(TcpFabricTest, AStreamKnowsWhatThePeersHostHasTaken) {
  Connected pair = Pair();
  EXPECT_TRUE(pair.client->delivery().is_complete);
  EXPECT_EQ(WriteSome(*pair.client, "ten bytes.").bytes, 10u);
  const auto becomes = [&](const auto& condition) {
    const auto end = std::chrono::steady_clock::now() + kBound;
    while (!condition(pair.client->delivery())) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::yield();
    }
    return true;
  };
  EXPECT_TRUE(becomes([](const Delivery& now) { return now.is_complete && now.taken == 10; }));
  const std::string block(1 << 16, 'b');
  uint64_t written = 10;
  IoResult result;
  // The host makes room now and then, as long as it has any.
  do {
    while ((result = WriteSome(*pair.client, block)).status == IoStatus::kOk) written += result.bytes;
  } while (becomes([&](const Delivery& now) { return now.is_complete || now.taken + (1 << 20) < written; }) &&
           pair.client->delivery().is_complete);
  const Delivery full = pair.client->delivery();
  EXPECT_FALSE(full.is_complete);
  EXPECT_GT(full.taken, 10u);
  EXPECT_LT(full.taken, written);
  EXPECT_TRUE(full.host_answers);
  pair.client->Abort();
  EXPECT_TRUE(pair.client->delivery().is_complete) << "nothing is under way any more";
}

TEST_F(TcpFabricTest, ReadinessIsOneShotAndADisarmedStreamIsNotReported) {
  Connected pair = Pair();
  CountingWatcher watcher;
  CountingWatcher other;
  pair.server->SetWatcher(&watcher);
  pair.client->SetWatcher(&other);
  WriteSome(*pair.client, "1");
  pair.server->Arm(true, false);
  ASSERT_TRUE(watcher.ready.WaitFor(1));
  pair.server->Arm(true, false);
  ASSERT_TRUE(watcher.ready.WaitFor(2)) << "still readable: at once";
  pair.server->Arm(false, false);
  pair.client->Abort();  // even a dead stream
  // The loop has gone round since: whatever it had for the server's stream it would have reported.
  Event passed;
  for (int i = 0; i < 3; ++i) fabric_.loop().Post([&] { passed.Set(); });
  ASSERT_TRUE(passed.WaitFor(3));
  EXPECT_EQ(watcher.ready.count(), 2);
}

TEST_F(TcpFabricTest, SetWatcherNullWaitsForTheCallThatRuns) {
  Connected pair = Pair();
  class SlowWatcher : public ReadyWatcher {
   public:
    void OnReady() override {
      entered.Set();
      // Until the other thread is (most probably) waiting in SetWatcher; correctness does not depend on it.
      for (int i = 0; i < 1000; ++i) std::this_thread::yield();
      finished = true;
    }
    Event entered;
    bool finished = false;  // not atomic: SetWatcher orders it
  };
  auto watcher = std::make_unique<SlowWatcher>();
  pair.server->SetWatcher(watcher.get());
  WriteSome(*pair.client, "x");
  pair.server->Arm(true, false);
  ASSERT_TRUE(watcher->entered.WaitFor(1));
  pair.server->SetWatcher(nullptr);
  EXPECT_TRUE(watcher->finished);
}

// A watcher is destroyed right after SetWatcher(nullptr), again and again, while data flows, while another thread arms
// the stream and while the loop is in and out of calls: a call that starts or runs too late touches freed memory, which
// the sanitizers see.
TEST_F(TcpFabricTest, NoWatcherIsCalledAfterItWasRemoved) {
  Connected pair = Pair();
  class Connection : public ReadyWatcher {
   public:
    explicit Connection(Stream* stream) : stream_(stream), canary_(std::make_unique<int>(0)) {}
    void OnReady() override {
      std::lock_guard<std::mutex> lock(mutex_);
      char buffer[64];
      while (ReadSome(*stream_, AsMutableBytes(buffer, sizeof buffer)).status == IoStatus::kOk) {
      }
      ++*canary_;
      calls.Set();
      stream_->Arm(true, false);
    }
    void Arm() {
      std::lock_guard<std::mutex> lock(mutex_);
      stream_->Arm(true, false);
    }
    Event calls;

   private:
    std::mutex mutex_;
    Stream* const stream_;
    std::unique_ptr<int> canary_;
  };
  std::atomic<bool> stop{false};
  std::thread sender([&] {
    while (!stop.load()) {
      WriteSome(*pair.client, "data");
      std::this_thread::yield();
    }
  });
  for (int i = 0; i < 300; ++i) {
    auto connection = std::make_unique<Connection>(pair.server.get());
    pair.server->SetWatcher(connection.get());
    connection->Arm();
    if (i % 2 == 0) {
      ASSERT_TRUE(connection->calls.WaitFor(1 + i % 5));
    }
    std::thread armer([&] { connection->Arm(); });
    pair.server->SetWatcher(nullptr);
    armer.join();
  }
  stop.store(true);
  sender.join();
}

TEST_F(TcpFabricTest, StreamsMayBeDestroyedFromTheirOwnWatcher) {
  Connected pair = Pair();
  class Suicidal : public ReadyWatcher {
   public:
    void OnReady() override {
      stream.reset();
      done.Set();
    }
    std::unique_ptr<Stream> stream;
    Event done;
  };
  Suicidal watcher;
  watcher.stream = std::move(pair.server);
  watcher.stream->SetWatcher(&watcher);
  Stream* const stream = watcher.stream.get();
  WriteSome(*pair.client, "x");
  stream->Arm(true, false);
  EXPECT_TRUE(watcher.done.WaitFor(1));
}

TEST_F(TcpFabricTest, ACancelledConnectNeverCallsBack) {
  auto listener = fabric_.Listen(Loopback(), 64, [](std::unique_ptr<Stream>) {});
  for (int i = 0; i < 200; ++i) {
    auto canary = std::make_unique<int>(0);
    auto attempt = fabric_.Connect({}, (*listener)->local(), [&canary](StreamResult) { ++*canary; });
    if (i % 3 == 0) std::this_thread::yield();
    attempt.reset();
    canary.reset();
  }
}

TEST_F(TcpFabricTest, AnAcceptCallbackMayDestroyItsListener) {
  std::unique_ptr<Listener> listener;
  Event done;
  std::mutex mutex;
  {
    std::lock_guard<std::mutex> lock(mutex);
    listener = std::move(*fabric_.Listen(Loopback(), 8, [&](std::unique_ptr<Stream>) {
      std::lock_guard<std::mutex> callback_lock(mutex);
      listener.reset();
      done.Set();
    }));
  }
  IpEndpoint address;
  {
    std::lock_guard<std::mutex> lock(mutex);
    address = listener->local();
  }
  const StreamResult client = ConnectTo(address);
  EXPECT_TRUE(done.WaitFor(1));
  std::lock_guard<std::mutex> lock(mutex);  // the callback is through with what we are about to destroy
  EXPECT_EQ(listener, nullptr);
}

TEST_F(TcpFabricTest, RunningOutOfDescriptorsNeitherSpinsNorKillsTheListener) {
  TcpFabric fabric({.busy_poll = 0us});  // whose turns are those that something has woken it for
  Event accepted;
  std::vector<std::unique_ptr<Stream>> streams;  // touched by the loop's thread, then after the last Set by ours
  auto listener = fabric.Listen(Loopback(), 8, [&](std::unique_ptr<Stream> stream) {
    streams.push_back(std::move(stream));
    accepted.Set();
  });
  ASSERT_TRUE(listener.has_value());
  // One connection that works, also because UBSan needs a descriptor at its first look at each type.
  const StreamResult first = ConnectTo((*listener)->local());
  ASSERT_TRUE(accepted.WaitFor(1));
  auto& loop = static_cast<EpollLoop&>(fabric.loop());
  const int client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_GE(client, 0);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = 3;  // fewer than are open: nothing new fits
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  sockaddr_storage address;
  const socklen_t length = (*listener)->local().ToSockaddr(&address);
  ASSERT_EQ(connect(client, reinterpret_cast<const sockaddr*>(&address), length), 0);
  Event rested;
  uint64_t turns_before = 0;
  uint64_t turns_after = 0;
  loop.Post([&] {
    turns_before = loop.turns();
    loop.At(loop.Now() + 120ms, [&] {
      turns_after = loop.turns();
      rested.Set();
    });
  });
  EXPECT_TRUE(rested.WaitFor(1));
  EXPECT_LT(turns_after - turns_before, 50u) << "spins";
  EXPECT_EQ(accepted.count(), 1);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_TRUE(accepted.WaitFor(2)) << "the waiting connection is taken up once there is room";
  close(client);
}

TEST_F(TcpFabricTest, KnowsItsAddressesAndRoutes) {
  const auto addresses = fabric_.LocalAddresses();
  ASSERT_FALSE(addresses.empty());
  bool loopback_seen = false;
  for (const LocalAddress& each : addresses) {
    EXPECT_TRUE(each.address.IsLoopback() || !loopback_seen) << "loopback is last";
    loopback_seen = loopback_seen || each.address.IsLoopback();
    EXPECT_EQ(each.address.port, 0);
    EXPECT_NE(each.interface, 0u) << each.address.ToString();
    EXPECT_FALSE(each.is_linked && each.address.IsLoopback());
  }
  EXPECT_TRUE(std::any_of(addresses.begin(), addresses.end(),
                          [](const LocalAddress& each) { return each.address == Loopback(); }));
  EXPECT_EQ(fabric_.RouteTo(Loopback(20049)), Loopback());
  EXPECT_EQ(fabric_.RouteTo(IpEndpoint{}), std::nullopt);
}

TEST_F(TcpFabricTest, KnowsTheMtuOfTheLinkOfAnAddress) {
  uint32_t mtu = 0;
  ASSERT_TRUE(std::ifstream("/sys/class/net/lo/mtu") >> mtu);
  EXPECT_EQ(fabric_.LinkMtu(Loopback()), mtu);
  EXPECT_EQ(fabric_.LinkMtu(Loopback(20049)), mtu) << "whatever the port";
  EXPECT_EQ(fabric_.LinkMtu(*IpEndpoint::Parse("203.0.113.9", 0)), kEthernetMtu) << "an address of nobody here";
  EXPECT_EQ(fabric_.LinkMtu(IpEndpoint{}), kEthernetMtu);
}

TEST_F(TcpFabricTest, TheSegmentSizeIsTheKernels) {
  Connected pair = Pair();
  EXPECT_GE(pair.client->MaxSegmentSize(), 536u);
  EXPECT_LE(pair.client->MaxSegmentSize(), 65536u);
}

TEST_F(TcpFabricTest, NotifiersWakeAWaiterAndWaitEndsWithItsCondition) {
  const auto notifier = fabric_.CreateNotifier();
  ASSERT_NE(notifier, nullptr);
  fabric_.loop().Post([&] { notifier->Signal(); });
  EXPECT_EQ(notifier->Take(), 0);
  EXPECT_FALSE(notifier->Consume());

  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  fabric_.loop().Post([&] {
    std::lock_guard<std::mutex> lock(mutex);
    done = true;
    changed.notify_all();
  });
  std::unique_lock<std::mutex> lock(mutex);
  EXPECT_TRUE(fabric_.Wait(lock, changed, [&] { return done; }));
}

TEST_F(TcpFabricTest, TheProgramsSignalsStayWithItsThreads) {
  std::promise<bool> blocked;
  fabric_.loop().Post([&] {
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    blocked.set_value(sigismember(&mask, SIGINT) == 1 && sigismember(&mask, SIGUSR1) == 1 &&
                      sigismember(&mask, SIGSEGV) == 0 && sigismember(&mask, SIGBUS) == 0);
  });
  EXPECT_TRUE(blocked.get_future().get());
}

// --- Peers that are gone without a word ---

int OptionOf(const Stream& stream, int level, int name) {
  int value = -1;
  socklen_t length = sizeof value;
  EXPECT_EQ(getsockopt(stream.PollDescriptor(), level, name, &value, &length), 0);
  return value;
}

TEST_F(TcpFabricTest, BothEndsAskForSignsOfLife) {
  const StreamOptions options{.keepalive = 20s, .user_timeout = 1500us};
  std::promise<std::unique_ptr<Stream>> accepted;
  auto listener = fabric_.ListenWith(options, Loopback(), 8,
                                     [&](std::unique_ptr<Stream> stream) { accepted.set_value(std::move(stream)); });
  ASSERT_TRUE(listener.has_value());
  std::promise<StreamResult> connected;
  const auto attempt = fabric_.ConnectWith(options, {}, (*listener)->local(),
                                           [&](StreamResult result) { connected.set_value(std::move(result)); });
  const StreamResult client = connected.get_future().get();
  ASSERT_TRUE(client.has_value());
  const std::unique_ptr<Stream> server = accepted.get_future().get();
  for (const Stream* stream : {client->get(), server.get()}) {
    EXPECT_EQ(OptionOf(*stream, SOL_SOCKET, SO_KEEPALIVE), 1);
    EXPECT_EQ(OptionOf(*stream, IPPROTO_TCP, TCP_KEEPIDLE), 20);
    EXPECT_EQ(OptionOf(*stream, IPPROTO_TCP, TCP_KEEPINTVL), 7) << "rounded up";
    EXPECT_EQ(OptionOf(*stream, IPPROTO_TCP, TCP_KEEPCNT), 3);
    EXPECT_EQ(OptionOf(*stream, IPPROTO_TCP, TCP_USER_TIMEOUT), 2) << "milliseconds, rounded up";
  }
}

TEST_F(TcpFabricTest, NoneAreAskedForUnlessThatIsWanted) {
  const Connected pair = Pair();
  for (const Stream* stream : {pair.client.get(), pair.server.get()}) {
    EXPECT_EQ(OptionOf(*stream, SOL_SOCKET, SO_KEEPALIVE), 0);
    EXPECT_EQ(OptionOf(*stream, IPPROTO_TCP, TCP_USER_TIMEOUT), 0);
  }
}

// What the system's integers cannot say is as long as they can.
TEST_F(TcpFabricTest, TimesBeyondTheSystemsAreItsLongest) {
  std::promise<std::unique_ptr<Stream>> accepted;
  const StreamOptions options{.keepalive = Duration::max(), .user_timeout = Duration::max()};
  auto listener = fabric_.ListenWith(options, Loopback(), 8,
                                     [&](std::unique_ptr<Stream> stream) { accepted.set_value(std::move(stream)); });
  ASSERT_TRUE(listener.has_value());
  const StreamResult client = ConnectTo((*listener)->local());
  ASSERT_TRUE(client.has_value());
  const std::unique_ptr<Stream> server = accepted.get_future().get();
  EXPECT_EQ(OptionOf(*server, IPPROTO_TCP, TCP_KEEPIDLE), 32767);
  EXPECT_EQ(OptionOf(*server, IPPROTO_TCP, TCP_USER_TIMEOUT), INT_MAX);
}

}  // namespace
}  // namespace stagecoach::emu
