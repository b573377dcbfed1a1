#include "emu/sim/sim_world.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstdlib>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace stagecoach::emu {
namespace {

using StreamResult = Result<std::unique_ptr<Stream>, FabricError>;

constexpr Instant kStart{};

IpEndpoint Address(const char* text, uint16_t port = 0) {
  return *IpEndpoint::Parse(text, port);
}

class CountingWatcher : public ReadyWatcher {
 public:
  void OnReady() override { ++calls; }
  int calls = 0;
};

IoResult ReadSome(Stream& stream, std::string* into, size_t size = 4096) {
  std::string buffer(size, '\0');
  const MutableBytes parts[] = {AsMutableBytes(buffer.data(), buffer.size())};
  const IoResult result = stream.Read(parts);
  into->append(buffer, 0, result.bytes);
  return result;
}

IoResult WriteSome(Stream& stream, std::string_view text) {
  const ConstBytes parts[] = {AsBytes(text)};
  return stream.Write(parts);
}

// Two hosts, one link.
struct Pair {
  explicit Pair(SimWorld::Options options = {}) : world(options) {
    a = &world.AddHost("a", {Address("10.0.0.1"), Address("2001:db8::1")});
    b = &world.AddHost("b", {Address("10.0.0.2"), Address("2001:db8::2")});
  }
  explicit Pair(const LinkOptions& link, uint64_t seed = 1, TraceSink* trace = nullptr)
      : Pair([&] {
          SimWorld::Options options;
          options.seed = seed;
          options.trace = trace;
          options.link = link;
          return options;
        }()) {}

  void Connect() {
    listener = std::move(*b->Listen(Address("10.0.0.2", 20049), 8,
                                    [this](std::unique_ptr<Stream> stream) { server = std::move(stream); }));
    attempt = a->Connect({}, Address("10.0.0.2", 20049), [this](StreamResult result) {
      ASSERT_TRUE(result.has_value()) << result.error().message;
      client = std::move(*result);
    });
    ASSERT_TRUE(world.RunUntil([this] { return client != nullptr && server != nullptr; }));
  }
  void Reconnect() {
    client.reset();
    server.reset();
    listener.reset();
    Connect();
  }

  SimWorld world;
  SimFabric* a;
  SimFabric* b;
  std::unique_ptr<Listener> listener;
  std::unique_ptr<ConnectAttempt> attempt;
  std::unique_ptr<Stream> client;
  std::unique_ptr<Stream> server;
};

// Moves `size` bytes both ways over a connection and checks that they arrive unchanged.
class Exchange {
 public:
  Exchange(Pair* pair, size_t size) : Exchange(&pair->world, pair->client.get(), pair->server.get(), size) {}
  Exchange(SimWorld* world, Stream* client, Stream* server, size_t size) : world_(world) {
    Prng content(99);
    for (size_t i = 0; i < size; ++i) data_ += static_cast<char>(content.Below(256));
    client_.Start(client, data_);
    server_.Start(server, data_);
  }
  bool Run() {
    return world_->RunUntil([&] { return client_.received == data_ && server_.received == data_; });
  }

 private:
  struct Side : ReadyWatcher {
    void Start(Stream* of, std::string_view data) {
      stream = of;
      unsent = data;
      stream->SetWatcher(this);
      OnReady();
    }
    void OnReady() override {
      while (!unsent.empty()) {
        const IoResult result = WriteSome(*stream, unsent.substr(0, 3000));
        if (result.status != IoStatus::kOk) break;
        unsent.remove_prefix(result.bytes);
      }
      IoResult result;
      while ((result = ReadSome(*stream, &received, 1000)).status == IoStatus::kOk) {
      }
      if (result.status != IoStatus::kWouldBlock) return;  // a dead stream is ready for ever
      stream->Arm(true, !unsent.empty());
    }
    Stream* stream = nullptr;
    std::string_view unsent;
    std::string received;
  };

  SimWorld* const world_;
  std::string data_;
  Side client_;
  Side server_;
};

// Reads whatever comes at once, and notes when.
struct Receiver : ReadyWatcher {
  Receiver(SimWorld* of, Stream* from) : world(of), stream(from) {
    stream->SetWatcher(this);
    stream->Arm(true, false);
  }
  ~Receiver() override { stream->SetWatcher(nullptr); }
  void OnReady() override {
    last = world->Now();
    IoResult result;
    while ((result = ReadSome(*stream, &text)).status == IoStatus::kOk) {
    }
    finished = result.status == IoStatus::kEof;
    error = result.error;
    if (result.status == IoStatus::kWouldBlock) stream->Arm(true, false);
  }
  SimWorld* const world;
  Stream* const stream;
  std::string text;
  bool finished = false;
  int error = 0;
  Instant last{};
};

struct Outcome {
  int error = -1;  // -1: none yet
  std::string message;
  Instant when{};
};

Outcome ConnectAndReport(SimWorld& world, SimFabric& from, const IpEndpoint& remote, const IpEndpoint& local = {}) {
  Outcome outcome;
  const auto attempt = from.Connect(local, remote, [&](StreamResult result) {
    outcome.error = result ? 0 : result.error().error;
    if (!result) outcome.message = result.error().message;
    outcome.when = world.Now();
  });
  world.RunUntil([&] { return outcome.error >= 0; });
  return outcome;
}

TEST(SimWorld, ConnectingTakesARoundTripAndAcceptingOneAndAHalf) {
  LinkOptions link;
  link.latency = 10us;
  Pair pair(link);
  pair.Connect();
  EXPECT_EQ(pair.world.Now(), kStart + 30us);
  EXPECT_EQ(pair.client->local(), pair.server->remote());
  EXPECT_EQ(pair.client->remote(), pair.server->local());
  EXPECT_EQ(pair.client->remote().ToString(), "10.0.0.2:20049");
  EXPECT_EQ(pair.client->PollDescriptor(), -1);
  EXPECT_EQ(pair.client->MaxSegmentSize(), 1460u);
}

TEST(SimWorld, WorksOverIpv6AndAnUnspecifiedListener) {
  Pair pair;
  std::unique_ptr<Stream> server;
  auto listener =
      pair.b->Listen(Address("::", 7), 8, [&](std::unique_ptr<Stream> stream) { server = std::move(stream); });
  ASSERT_TRUE(listener.has_value());
  EXPECT_EQ(ConnectAndReport(pair.world, *pair.a, Address("2001:db8::2", 7)).error, 0);
  EXPECT_EQ(ConnectAndReport(pair.world, *pair.a, Address("10.0.0.2", 7)).error, 0) << "dual stack";
}

TEST(SimWorld, FailuresToConnectAreTypedAndNamed) {
  Pair pair;
  const Outcome refused = ConnectAndReport(pair.world, *pair.a, Address("10.0.0.2", 9));
  EXPECT_EQ(refused.error, ECONNREFUSED);
  EXPECT_EQ(refused.message, "connect to 10.0.0.2:9: Connection refused");
  EXPECT_EQ(refused.when, kStart + 20us);
  EXPECT_EQ(ConnectAndReport(pair.world, *pair.a, Address("10.0.0.99", 9)).error, EHOSTUNREACH);
  EXPECT_EQ(ConnectAndReport(pair.world, *pair.a, IpEndpoint{}).error, EDESTADDRREQ);
  EXPECT_EQ(ConnectAndReport(pair.world, *pair.a, Address("10.0.0.2", 9), Address("10.0.0.2")).error, EADDRNOTAVAIL);
}

TEST(SimWorld, AConnectIntoSilenceTimesOut) {
  Pair pair;
  auto listener = pair.b->Listen(Address("10.0.0.2", 9), 8, [](std::unique_ptr<Stream>) {});
  pair.world.CutHost(*pair.b, Cut::kSilent);
  const Outcome outcome = ConnectAndReport(pair.world, *pair.a, Address("10.0.0.2", 9));
  EXPECT_EQ(outcome.error, ETIMEDOUT);
  EXPECT_EQ(outcome.when, kStart + 127s);
}

TEST(SimWorld, AConnectIntoAPartitionSucceedsWhenItHeals) {
  Pair pair;
  auto listener = pair.b->Listen(Address("10.0.0.2", 9), 8, [](std::unique_ptr<Stream>) {});
  pair.world.Partition(*pair.a, *pair.b, true);
  pair.world.loop().At(kStart + 2s, [&] { pair.world.Partition(*pair.a, *pair.b, false); });
  const Outcome outcome = ConnectAndReport(pair.world, *pair.a, Address("10.0.0.2", 9));
  EXPECT_EQ(outcome.error, 0);
  EXPECT_EQ(outcome.when, kStart + 3s + 20us) << "with the next SYN";
}

TEST(SimWorld, ListenersShareNoPortAndFreeItWhenTheyGo) {
  Pair pair;
  auto first = pair.b->Listen(Address("10.0.0.2", 9), 8, [](std::unique_ptr<Stream>) {});
  ASSERT_TRUE(first.has_value());
  const auto second = pair.b->Listen(Address("0.0.0.0", 9), 8, [](std::unique_ptr<Stream>) {});
  ASSERT_FALSE(second.has_value());
  EXPECT_EQ(second.error().message, "listen on 0.0.0.0:9: Address already in use");
  first->reset();
  EXPECT_TRUE(pair.b->Listen(Address("0.0.0.0", 9), 8, [](std::unique_ptr<Stream>) {}).has_value());
  EXPECT_EQ(pair.b->Listen(Address("10.0.0.1", 9), 8, [](std::unique_ptr<Stream>) {}).error().error, EADDRNOTAVAIL);
  const auto chosen = pair.b->Listen(Address("10.0.0.2", 0), 8, [](std::unique_ptr<Stream>) {});
  EXPECT_NE((*chosen)->local().port, 0);
}

TEST(SimWorld, ACancelledConnectNeverCallsBackAndResetsWhatItStarted) {
  for (const Duration when : {Duration(0us), Duration(5us), Duration(15us), Duration(19us)}) {
    Pair pair;
    std::unique_ptr<Stream> server;
    auto listener =
        pair.b->Listen(Address("10.0.0.2", 9), 8, [&](std::unique_ptr<Stream> stream) { server = std::move(stream); });
    bool called = false;
    auto attempt = pair.a->Connect({}, Address("10.0.0.2", 9), [&](StreamResult) { called = true; });
    pair.world.RunFor(when);
    attempt.reset();
    EXPECT_TRUE(pair.world.RunUntilIdle());
    EXPECT_FALSE(called);
    EXPECT_EQ(server, nullptr);
  }
}

TEST(SimWorld, AListenerThatGoesDuringTheHandshakeResetsTheClient) {
  Pair pair;
  auto listener = pair.b->Listen(Address("10.0.0.2", 9), 8, [](std::unique_ptr<Stream>) { FAIL(); });
  std::unique_ptr<Stream> client;
  const auto attempt =
      pair.a->Connect({}, Address("10.0.0.2", 9), [&](StreamResult result) { client = std::move(*result); });
  pair.world.RunFor(15us);
  listener->reset();
  EXPECT_TRUE(pair.world.RunUntilIdle());
  ASSERT_NE(client, nullptr);
  std::string text;
  EXPECT_EQ(ReadSome(*client, &text).error, ECONNRESET);
}

TEST(SimWorld, BytesTakeTheLatencyAndTheBandwidthOfTheLink) {
  LinkOptions link;
  link.latency = 10us;
  link.bytes_per_second = 1'000'000;
  Pair pair(link);
  pair.Connect();
  CountingWatcher watcher;
  pair.server->SetWatcher(&watcher);
  pair.server->Arm(true, false);
  const Instant begin = pair.world.Now();
  EXPECT_EQ(WriteSome(*pair.client, std::string(1000, 'x')).bytes, 1000u);
  EXPECT_TRUE(pair.world.RunUntil([&] { return watcher.calls > 0; }));
  EXPECT_EQ(pair.world.Now() - begin, Duration(10us + 1ms));
}

// A millisecond on the wire for a thousand bytes.
LinkOptions SlowLink() {
  LinkOptions link;
  link.latency = 10us;
  link.bytes_per_second = 1'000'000;
  return link;
}

TEST(SimWorld, AHostThatLosesPowerSendsNothingThatHadNotLeft) {
  Pair pair(SlowLink());
  pair.Connect();
  {
    Receiver receiver(&pair.world, pair.server.get());
    for (const char byte : {'a', 'b', 'c'}) WriteSome(*pair.client, std::string(1000, byte));
    pair.client->Shutdown();
    const Instant begin = pair.world.Now();
    pair.world.RunFor(1ms + 5us);
    EXPECT_EQ(receiver.text, "");
    pair.world.CutHost(*pair.a, Cut::kSilent);
    pair.world.RunFor(1s);
    EXPECT_EQ(receiver.text, std::string(1000, 'a')) << "what is on the wire arrives";
    EXPECT_EQ(receiver.last, begin + Duration(1ms + 10us));
    EXPECT_FALSE(receiver.finished);
    EXPECT_EQ(receiver.error, 0) << "not a word";
    pair.world.Restore(*pair.a);
    EXPECT_TRUE(pair.world.RunUntilIdle());
    EXPECT_EQ(receiver.text.size(), 1000u);
  }
  WriteSome(*pair.server, "who is there?");
  EXPECT_TRUE(pair.world.RunUntilIdle());
  std::string text;
  EXPECT_EQ(ReadSome(*pair.server, &text).error, ECONNRESET);
}

TEST(SimWorld, ARestartedHostNeedNotWaitForWhatWasNeverSent) {
  Pair pair(SlowLink());
  pair.Connect();
  WriteSome(*pair.client, std::string(100'000, 'x'));
  pair.world.RunFor(1ms);
  pair.world.CutHost(*pair.a, Cut::kSilent);
  pair.world.Restore(*pair.a);
  pair.Reconnect();
  Receiver receiver(&pair.world, pair.server.get());
  const Instant begin = pair.world.Now();
  WriteSome(*pair.client, std::string(1000, 'y'));
  pair.world.RunFor(1s);
  EXPECT_EQ(receiver.last, begin + Duration(1ms + 10us));
}

TEST(SimWorld, AResetLeavesBehindSomeOrNoneOfWhatHadNotLeft) {
  for (const bool killed : {true, false}) {
    std::vector<int> seen(4);
    for (uint64_t seed = 1; seed <= 40; ++seed) {
      Pair pair(SlowLink(), seed);
      pair.Connect();
      Receiver receiver(&pair.world, pair.server.get());
      const std::string pieces[] = {std::string(1000, 'a'), std::string(1000, 'b'), std::string(1000, 'c'),
                                    std::string(1000, 'd')};
      for (const std::string& piece : pieces) WriteSome(*pair.client, piece);
      const Instant begin = pair.world.Now();
      pair.world.RunFor(1500us);
      if (killed) {
        pair.world.CutHost(*pair.a, Cut::kReset);
      } else {
        pair.client->Abort();
      }
      EXPECT_TRUE(pair.world.RunUntilIdle());
      EXPECT_EQ(receiver.error, ECONNRESET);
      ASSERT_EQ(receiver.text.size() % 1000, 0u);
      const size_t arrived = receiver.text.size() / 1000;
      ASSERT_GE(arrived, 1u) << "what was on the wire arrives";
      EXPECT_EQ(receiver.text, (pieces[0] + pieces[1] + pieces[2] + pieces[3]).substr(0, arrived * 1000));
      // The reset leaves behind the last byte that does, and does not wait for those that never will.
      EXPECT_EQ(receiver.last, begin + std::max<Duration>(1500us, arrived * 1ms) + 10us);
      ++seen[arrived - 1];
    }
    for (const int times : seen) EXPECT_GT(times, 0);
  }
}

TEST(SimWorld, WhatLeavesAfterAMiddleboxHasResetTheConnectionGetsNowhere) {
  Pair pair(SlowLink());
  pair.Connect();
  Receiver receiver(&pair.world, pair.server.get());
  WriteSome(*pair.client, std::string(1000, 'a'));
  const Instant begin = pair.world.Now();
  pair.world.RunFor(500us);
  pair.world.ResetConnections(*pair.a, *pair.b);
  EXPECT_TRUE(pair.world.RunUntilIdle());
  EXPECT_EQ(receiver.text, "");
  EXPECT_EQ(receiver.error, ECONNRESET);
  EXPECT_EQ(receiver.last, begin + Duration(510us));
}

TEST(SimWorld, ReadinessIsOneShotAndNeverInsideACall) {
  Pair pair;
  pair.Connect();
  CountingWatcher watcher;
  pair.server->SetWatcher(&watcher);
  WriteSome(*pair.client, "x");
  pair.world.RunUntilIdle();
  EXPECT_EQ(watcher.calls, 0) << "not armed";
  pair.server->Arm(true, false);
  EXPECT_EQ(watcher.calls, 0);
  pair.world.RunUntilIdle();
  EXPECT_EQ(watcher.calls, 1);
  WriteSome(*pair.client, "y");
  pair.world.RunUntilIdle();
  EXPECT_EQ(watcher.calls, 1);
  pair.server->Arm(true, false);
  pair.server->Arm(false, false);
  pair.world.RunUntilIdle();
  EXPECT_EQ(watcher.calls, 1);
  pair.server->Arm(true, true);
  pair.server->SetWatcher(nullptr);
  pair.world.RunUntilIdle();
  EXPECT_EQ(watcher.calls, 1);
}

TEST(SimWorld, AStreamTakesNoMoreThanItsBufferUntilThePeerReads) {
  LinkOptions link;
  link.buffer = 1000;
  Pair pair(link);
  pair.Connect();
  EXPECT_EQ(WriteSome(*pair.client, std::string(700, 'a')).bytes, 700u);
  EXPECT_EQ(WriteSome(*pair.client, std::string(700, 'b')).bytes, 300u);
  EXPECT_EQ(WriteSome(*pair.client, "c").status, IoStatus::kWouldBlock);
  CountingWatcher watcher;
  pair.client->SetWatcher(&watcher);
  pair.client->Arm(false, true);
  pair.world.RunUntilIdle();
  EXPECT_EQ(watcher.calls, 0);
  std::string text;
  EXPECT_EQ(ReadSome(*pair.server, &text, 249).bytes, 249u);
  pair.world.RunUntilIdle();
  EXPECT_EQ(watcher.calls, 0) << "the window opens by a quarter at a time";
  EXPECT_EQ(ReadSome(*pair.server, &text, 1).bytes, 1u);
  pair.world.RunUntilIdle();
  EXPECT_EQ(watcher.calls, 1);
  EXPECT_EQ(WriteSome(*pair.client, std::string(700, 'd')).bytes, 250u);
}

TEST(SimWorld, AStreamOfTheSmallestBufferStillMoves) {
  LinkOptions link;
  link.buffer = 1;
  Pair pair(link);
  pair.Connect();
  Exchange exchange(&pair, 500);
  EXPECT_TRUE(exchange.Run());
}

TEST(SimWorld, WhatFollowsDataThatWasLostNeverArrives) {
  Pair pair;
  pair.Connect();
  pair.world.Partition(*pair.a, *pair.b, true);
  WriteSome(*pair.client, "held");
  pair.world.RunFor(15us);
  WriteSome(*pair.client, "held as well");
  pair.client->Abort();
  pair.world.Partition(*pair.a, *pair.b, false);
  CountingWatcher watcher;
  pair.server->SetWatcher(&watcher);
  pair.server->Arm(true, false);
  EXPECT_TRUE(pair.world.RunUntil([&] { return watcher.calls > 0; }));
  std::string text;
  EXPECT_EQ(ReadSome(*pair.server, &text).error, ECONNRESET);
  EXPECT_EQ(text, "");
}

// A host that has lost power, or a socket that was aborted, retransmits nothing: what meets a partition is lost, and
// nothing that comes after it has a place.
TEST(SimWorld, NobodyRetransmitsWhatADeadEndHadUnderWay) {
  for (const bool power_lost : {true, false}) {
    Pair pair;
    pair.Connect();
    Receiver receiver(&pair.world, pair.server.get());
    WriteSome(*pair.client, "meets the partition");
    pair.world.RunFor(5us);
    WriteSome(*pair.client, "finds it healed");
    if (power_lost) {
      pair.world.CutHost(*pair.a, Cut::kSilent);
    } else {
      pair.client->Abort();
    }
    pair.world.Partition(*pair.a, *pair.b, true);
    pair.world.RunFor(6us);
    pair.world.Partition(*pair.a, *pair.b, false);
    pair.world.RunFor(1s);
    if (power_lost) pair.world.Restore(*pair.a);
    EXPECT_TRUE(pair.world.RunUntilIdle());
    EXPECT_EQ(receiver.text, "");
    EXPECT_EQ(receiver.error, power_lost ? 0 : ECONNRESET);
  }
}

TEST(SimWorld, HalfCloseEndsOneDirectionAfterItsData) {
  Pair pair;
  pair.Connect();
  WriteSome(*pair.client, "last words");
  pair.client->Shutdown();
  pair.client->Shutdown();
  EXPECT_EQ(WriteSome(*pair.client, "x").error, EPIPE);
  pair.world.RunUntilIdle();
  std::string text;
  EXPECT_EQ(ReadSome(*pair.server, &text).bytes, 10u);
  EXPECT_EQ(ReadSome(*pair.server, &text).status, IoStatus::kEof);
  WriteSome(*pair.server, "answer");
  pair.world.RunUntilIdle();
  text.clear();
  ReadSome(*pair.client, &text);
  EXPECT_EQ(text, "answer");
}

TEST(SimWorld, AbortResetsThePeerAndItsUnreadData) {
  Pair pair;
  pair.Connect();
  CountingWatcher watcher;
  pair.server->SetWatcher(&watcher);
  WriteSome(*pair.client, "unread");
  pair.client->Abort();
  pair.world.RunUntilIdle();
  pair.server->Arm(true, false);
  pair.world.RunUntilIdle();
  EXPECT_EQ(watcher.calls, 1);
  std::string text;
  EXPECT_EQ(ReadSome(*pair.server, &text).error, ECONNRESET);
  EXPECT_EQ(ReadSome(*pair.client, &text).error, ECONNABORTED);
  EXPECT_EQ(text, "");
}

TEST(SimWorld, DestroyingAStreamEndsItInOrderUnlessDataIsLost) {
  Pair orderly;
  orderly.Connect();
  WriteSome(*orderly.client, "all");
  orderly.client.reset();
  orderly.world.RunUntilIdle();
  std::string text;
  EXPECT_EQ(ReadSome(*orderly.server, &text).bytes, 3u);
  EXPECT_EQ(ReadSome(*orderly.server, &text).status, IoStatus::kEof);
  WriteSome(*orderly.server, "to nobody");
  orderly.world.RunUntilIdle();
  EXPECT_EQ(ReadSome(*orderly.server, &text).error, ECONNRESET);

  Pair unread;
  unread.Connect();
  WriteSome(*unread.client, "never read");
  unread.world.RunUntilIdle();
  unread.server.reset();
  unread.world.RunUntilIdle();
  EXPECT_EQ(ReadSome(*unread.client, &text).error, ECONNRESET);
}

TEST(SimWorld, APartitionDelaysDataAndKeepsItsOrder) {
  Pair pair;
  pair.Connect();
  WriteSome(*pair.client, "in flight, ");
  pair.world.Partition(*pair.a, *pair.b, true);
  WriteSome(*pair.client, "written meanwhile, ");
  pair.world.RunFor(100s);
  std::string text;
  EXPECT_EQ(ReadSome(*pair.server, &text).status, IoStatus::kWouldBlock);
  pair.world.Partition(*pair.a, *pair.b, false);
  WriteSome(*pair.client, "and after");
  pair.world.RunUntilIdle();
  while (ReadSome(*pair.server, &text).status == IoStatus::kOk) {
  }
  EXPECT_EQ(text, "in flight, written meanwhile, and after");
}

TEST(SimWorld, ASenderGivesUpOnASilentPeerAndAnIdleEndNeverLearns) {
  Pair pair;
  pair.Connect();
  CountingWatcher watcher;
  pair.client->SetWatcher(&watcher);
  pair.client->Arm(true, false);
  pair.world.CutHost(*pair.b, Cut::kSilent);
  pair.world.RunFor(3600s);
  EXPECT_EQ(watcher.calls, 0);
  WriteSome(*pair.client, "anyone?");
  EXPECT_TRUE(pair.world.RunUntil([&] { return watcher.calls > 0; }));
  std::string text;
  EXPECT_EQ(ReadSome(*pair.client, &text).error, ETIMEDOUT);
}

TEST(SimWorld, AStreamKnowsWhatThePeersHostHasTaken) {
  Pair pair({.latency = 1ms});
  pair.Connect();
  const auto expect = [&](uint64_t taken, bool is_complete, bool host_answers) {
    const Delivery delivery = pair.client->delivery();
    EXPECT_EQ(delivery.taken, taken);
    EXPECT_EQ(delivery.is_complete, is_complete);
    EXPECT_EQ(delivery.host_answers, host_answers);
  };
  expect(0, true, true);
  WriteSome(*pair.client, "four");
  expect(0, false, true);
  pair.world.RunFor(2ms);
  expect(4, true, true);  // which nobody has read
  pair.world.Partition(*pair.a, *pair.b, true);
  WriteSome(*pair.client, "and six");
  pair.world.RunFor(2ms);
  expect(4, false, false);
  pair.world.Partition(*pair.a, *pair.b, false);
  pair.world.RunFor(2ms);
  expect(11, true, true);
}

TEST(SimWorld, AHostWhoseProcessesStandStillTakesBytesAndTellsNobody) {
  Pair pair({.buffer = 10});
  pair.Connect();
  std::string text;
  pair.world.Stop(*pair.b, true);
  {
    Receiver receiver(&pair.world, pair.server.get());
    EXPECT_EQ(WriteSome(*pair.client, "0123456789").bytes, 10u);
    pair.world.RunFor(10s);
    EXPECT_EQ(pair.client->delivery().taken, 10u);
    EXPECT_EQ(WriteSome(*pair.client, "!").status, IoStatus::kWouldBlock);
    EXPECT_EQ(ReadSome(*pair.server, &text).status, IoStatus::kWouldBlock);
    EXPECT_EQ(WriteSome(*pair.server, "?").status, IoStatus::kWouldBlock);
    EXPECT_EQ(receiver.text, "");
    EXPECT_NE(pair.world.Describe().find("standing still: b"), std::string::npos);
    pair.world.Stop(*pair.b, false);
    pair.world.RunFor(1ms);
    EXPECT_EQ(receiver.text, "0123456789");
  }
  EXPECT_EQ(WriteSome(*pair.client, "!").bytes, 1u);
}

TEST(SimWorld, WhoCallsAHostWhoseProcessesStandStillIsConnectedAndNotHeard) {
  Pair pair;
  pair.Connect();
  std::unique_ptr<Stream> client;
  pair.world.Stop(*pair.b, true);
  pair.server.reset();
  const auto attempt =
      pair.a->Connect({}, Address("10.0.0.2", 20049), [&](StreamResult result) { client = std::move(*result); });
  ASSERT_TRUE(pair.world.RunUntil([&] { return client != nullptr; }));
  EXPECT_EQ(WriteSome(*client, "hello").bytes, 5u);
  pair.world.RunFor(10s);
  EXPECT_EQ(client->delivery().taken, 5u);
  EXPECT_EQ(pair.server, nullptr);
  pair.world.Stop(*pair.b, false);
  ASSERT_NE(pair.server, nullptr);
  std::string text;
  EXPECT_EQ(ReadSome(*pair.server, &text).status, IoStatus::kOk);
  EXPECT_EQ(text, "hello");
}

TEST(SimWorld, AHostThatIsKilledWhileItStandsStillIsUpAndRunningWhenItComesBack) {
  Pair pair;
  pair.Connect();
  pair.world.Stop(*pair.b, true);
  pair.world.CutHost(*pair.b, Cut::kReset);
  pair.world.RunUntilIdle();
  std::string text;
  EXPECT_EQ(ReadSome(*pair.client, &text).error, ECONNRESET);
  pair.world.Restore(*pair.b);
  pair.Reconnect();
  EXPECT_TRUE(Exchange(&pair, 1000).Run());
}

// A TCP that has given up retransmitting remembers nothing of the connection: nothing of it arrives later, and its peer
// learns of the end by a reset.
TEST(SimWorld, AStreamThatGaveUpStaysDeadWhenThePartitionHeals) {
  Pair pair;
  pair.Connect();
  ASSERT_EQ(WriteSome(*pair.client, "before").status, IoStatus::kOk);
  pair.world.RunFor(1s);
  pair.world.Partition(*pair.a, *pair.b, true);
  ASSERT_EQ(WriteSome(*pair.client, "lost").status, IoStatus::kOk);
  pair.world.RunFor(1000s);
  pair.world.Partition(*pair.a, *pair.b, false);
  pair.world.RunFor(1s);
  std::string text;
  EXPECT_EQ(ReadSome(*pair.server, &text).status, IoStatus::kOk);
  EXPECT_EQ(text, "before");
  EXPECT_EQ(WriteSome(*pair.server, "anybody there?").status, IoStatus::kOk);
  pair.world.RunFor(1s);
  EXPECT_EQ(ReadSome(*pair.server, &text).error, ECONNRESET);
}

TEST(SimWorld, AnAwaitedEventIsPumpedAndADryWorldIsADeadlock) {
  Pair pair;
  const auto notifier = pair.a->CreateNotifier();
  pair.world.loop().At(kStart + 3us, [&] { notifier->Signal(); });
  EXPECT_EQ(pair.a->WaitReadable(notifier->fd()), 0);
  EXPECT_EQ(pair.world.Now(), kStart + 3us);
  EXPECT_TRUE(notifier->Consume());
  EXPECT_EQ(pair.a->WaitReadable(notifier->fd()), EDEADLK);

  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  pair.world.loop().At(kStart + 9us, [&] {
    std::lock_guard<std::mutex> lock(mutex);
    done = true;
  });
  std::unique_lock<std::mutex> lock(mutex);
  EXPECT_TRUE(pair.a->Wait(lock, changed, [&] { return done; }));
  EXPECT_EQ(pair.world.Now(), kStart + 9us);
  EXPECT_FALSE(pair.a->Wait(lock, changed, [] { return false; }));
  EXPECT_TRUE(lock.owns_lock());
}

TEST(SimWorld, AWaitThatOnlyTimersKeepAliveEndsAtTheStallLimit) {
  Pair pair;
  std::function<void()> tick = [&] { pair.world.loop().At(pair.world.Now() + 1s, tick); };
  tick();
  std::mutex mutex;
  std::condition_variable changed;
  std::unique_lock<std::mutex> lock(mutex);
  EXPECT_FALSE(pair.a->Wait(lock, changed, [] { return false; }));
  EXPECT_EQ(pair.world.Now(), kStart + 3600s);
}

TEST(SimWorld, HostsKnowTheirAddressesAndRoutes) {
  Pair pair;
  EXPECT_EQ(pair.a->RouteTo(Address("10.0.0.2", 5)), Address("10.0.0.1"));
  EXPECT_EQ(pair.a->RouteTo(Address("2001:db8::2", 5)), Address("2001:db8::1"));
  EXPECT_EQ(pair.a->RouteTo(Address("10.0.0.1", 5)), Address("10.0.0.1"));
  EXPECT_EQ(pair.a->RouteTo(Address("10.9.9.9")), std::nullopt);
  EXPECT_EQ(pair.a->LocalAddresses().size(), 2u);
  EXPECT_FALSE(pair.a->HasProgressThread());
  EXPECT_EQ(pair.a->LinkMtu(Address("10.0.0.1")), kEthernetMtu);
  pair.a->SetLinkMtu(9000);
  EXPECT_EQ(pair.a->LinkMtu(Address("10.0.0.1")), 9000u);
  EXPECT_EQ(pair.b->LinkMtu(Address("10.0.0.2")), kEthernetMtu);
  EXPECT_EQ(pair.a->LinkMtu(Address("127.0.0.1")), 65536u);
}

// --- Programs ---

TEST(SimWorld, ProgramsBlockRunAsTheirHostAndFinish) {
  Pair pair;
  SimWorld& world = pair.world;
  const auto ping = pair.a->CreateNotifier();
  const auto pong = pair.b->CreateNotifier();
  std::string history;
  const auto client = world.Spawn(*pair.a, "client", [&] {
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(world.current_host(), pair.a);
      EXPECT_TRUE(world.Sleep(5us));
      history += 'a';
      pong->Signal();
      EXPECT_EQ(pair.a->WaitReadable(ping->fd()), 0);
      EXPECT_TRUE(ping->Consume());
    }
  });
  const auto server = world.Spawn(*pair.b, "server", [&] {
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(pair.b->WaitReadable(pong->fd()), 0);
      EXPECT_TRUE(pong->Consume());
      EXPECT_EQ(world.current_host(), pair.b);
      history += 'b';
      ping->Signal();
    }
  });
  EXPECT_FALSE(client->IsFinished());
  EXPECT_EQ(client->name(), "a/client");
  EXPECT_TRUE(world.RunUntil([&] { return client->IsFinished() && server->IsFinished(); }));
  EXPECT_EQ(history, "ababab");
  EXPECT_EQ(world.Now(), kStart + 15us);
  EXPECT_EQ(world.current_host(), nullptr);
}

TEST(SimWorld, TheProgramLoopOfAHostRunsEverythingAsThatHost) {
  Pair pair;
  const auto notifier = pair.b->CreateNotifier();
  std::vector<SimFabric*> seen;
  const auto look = [&] { seen.push_back(pair.world.current_host()); };
  pair.a->program_loop().At(kStart + 1us, look);
  pair.b->program_loop().Post(look);
  pair.b->program_loop().WatchReadable(notifier->fd(), [&] {
    notifier->Consume();
    look();
  });
  bool polled = false;
  const auto poller = pair.a->program_loop().AddPoller({[&] {
                                                          if (!std::exchange(polled, true)) look();
                                                          return false;
                                                        },
                                                        [] { return false; }, [] { return true; }});
  pair.world.loop().At(kStart + 2us, look);
  notifier->Signal();
  EXPECT_TRUE(pair.world.RunUntilIdle());
  pair.a->program_loop().RemovePoller(poller);
  EXPECT_EQ(seen, (std::vector<SimFabric*>{pair.b, pair.b, pair.a, pair.a, nullptr}));
}

TEST(SimWorld, ADeadlockNamesWhoIsBlockedOnWhat) {
  LinkOptions link;
  link.latency = 1us;
  Pair pair(link);
  pair.Connect();
  const auto notifier = pair.a->CreateNotifier();
  const auto stuck = pair.world.Spawn(*pair.a, "reader", [&] { pair.a->WaitReadable(notifier->fd()); });
  pair.b->program_loop().Post([&] { pair.world.RunUntil([] { return false; }); });
  WriteSome(*pair.client, "unread");
  EXPECT_FALSE(pair.world.RunUntil([&] { return stuck->IsFinished(); }));
  EXPECT_EQ(pair.world.Describe(),
            "at 0.000004000: 0 events to come\n"
            "  blocked: a/reader waits for a channel to become readable since 0.000003000\n"
            "  blocked: b (a callback) waits for a condition since 0.000003000\n"
            "  stream-1: a 10.0.0.1:49152, 6 bytes sent that the peer has not read; b 10.0.0.2:20049, 6 bytes received "
            "and not read\n");
  // The main context can still help.
  notifier->Signal();
  EXPECT_TRUE(pair.world.RunUntil([&] { return stuck->IsFinished(); }));
  EXPECT_TRUE(pair.world.HasBlocked(*pair.b));
  EXPECT_FALSE(pair.world.HasBlocked(*pair.a));
  pair.world.Partition(*pair.a, *pair.b, true);
  pair.world.CutHost(*pair.a, Cut::kReset);
  const std::string text = pair.world.Describe();
  EXPECT_NE(text.find("down: a\n"), std::string::npos) << text;
  EXPECT_NE(text.find("partition: from a to b\n"), std::string::npos) << text;
  EXPECT_NE(text.find("dead: Network is down"), std::string::npos) << text;
}

TEST(SimWorld, ProgramsThatAreStillBlockedAtTheEndGetErrors) {
  std::string history;
  {
    Pair pair;
    const auto notifier = pair.a->CreateNotifier();
    const auto program = pair.world.Spawn(*pair.a, "program", [&] {
      EXPECT_EQ(pair.a->WaitReadable(notifier->fd()), ENODEV);
      EXPECT_FALSE(pair.world.Sleep(1s));
      EXPECT_FALSE(pair.world.RunUntil([] { return false; }));
      history += "unwound";
    });
    pair.world.RunUntilIdle();
    EXPECT_EQ(history, "");
    pair.world.EndPrograms();
    EXPECT_TRUE(program->IsFinished());
    EXPECT_EQ(pair.world.Now(), kStart);
    EXPECT_TRUE(pair.world.Spawn(*pair.a, "next", [&] { history += ", next"; }) != nullptr);
    pair.world.RunUntilIdle();
    pair.world.Spawn(*pair.b, "last", [&] {
      std::mutex mutex;
      std::condition_variable changed;
      std::unique_lock<std::mutex> lock(mutex);
      EXPECT_FALSE(pair.b->Wait(lock, changed, [] { return false; }));
      EXPECT_TRUE(lock.owns_lock());
      history += ", last";
    });
    pair.world.RunUntilIdle();
  }
  EXPECT_EQ(history, "unwound, next, last");
}

// --- Hosts that go and come back ---

// How a read on `stream` ends once the world has nothing more to do.
int ErrorOf(SimWorld& world, Stream& stream) {
  world.RunUntilIdle();
  std::string text;
  return ReadSome(stream, &text).error;
}

TEST(SimWorld, AKilledHostResetsItsPeersAndRefusesWhatComes) {
  Pair pair;
  pair.Connect();
  const Instant cut = pair.world.Now();
  CountingWatcher watcher;
  pair.client->SetWatcher(&watcher);
  pair.client->Arm(true, false);
  pair.world.CutHost(*pair.b, Cut::kReset);
  EXPECT_FALSE(pair.b->IsUp());
  EXPECT_TRUE(pair.world.RunUntil([&] { return watcher.calls > 0; }));
  EXPECT_EQ(pair.world.Now(), cut + 10us) << "the link's latency";
  EXPECT_EQ(ErrorOf(pair.world, *pair.client), ECONNRESET);
  EXPECT_EQ(ErrorOf(pair.world, *pair.server), ENETDOWN);
  EXPECT_EQ(WriteSome(*pair.server, "x").error, ENETDOWN);
  EXPECT_EQ(ConnectAndReport(pair.world, *pair.a, Address("10.0.0.2", 20049)).error, ECONNREFUSED);
  EXPECT_EQ(ConnectAndReport(pair.world, *pair.b, Address("10.0.0.1", 9)).error, ENETDOWN);
  EXPECT_EQ(pair.b->Listen(Address("10.0.0.2", 9), 8, [](std::unique_ptr<Stream>) {}).error().error, ENETDOWN);
}

TEST(SimWorld, AConnectThatIsUnderWayFailsWhenItsHostIsCut) {
  for (const Duration when : {Duration(0us), Duration(5us), Duration(15us)}) {
    Pair pair;
    auto listener = pair.b->Listen(Address("10.0.0.2", 9), 8, [](std::unique_ptr<Stream>) { FAIL(); });
    int error = -1;
    const auto attempt =
        pair.a->Connect({}, Address("10.0.0.2", 9), [&](StreamResult result) { error = result.error().error; });
    pair.world.RunFor(when);
    pair.world.CutHost(*pair.a, Cut::kReset);
    EXPECT_EQ(error, -1) << "not inside the call";
    EXPECT_TRUE(pair.world.RunUntilIdle());
    EXPECT_EQ(error, ENETDOWN);
  }
}

TEST(SimWorld, AHostCutDuringTheHandshakeNeverAcceptsEvenAfterItsRestart) {
  for (const Cut how : {Cut::kReset, Cut::kSilent}) {
    Pair pair;
    auto listener = pair.b->Listen(Address("10.0.0.2", 9), 8, [](std::unique_ptr<Stream>) { FAIL(); });
    std::unique_ptr<Stream> client;
    const auto attempt =
        pair.a->Connect({}, Address("10.0.0.2", 9), [&](StreamResult result) { client = std::move(*result); });
    pair.world.RunFor(15us);  // the SYN has been answered
    pair.world.CutHost(*pair.b, how);
    pair.world.RunFor(100us);
    ASSERT_NE(client, nullptr);
    WriteSome(*client, "to whom?");
    pair.world.Restore(*pair.b);
    auto again = pair.b->Listen(Address("10.0.0.2", 9), 8, [](std::unique_ptr<Stream>) { FAIL(); });
    listener->reset();
    EXPECT_EQ(ErrorOf(pair.world, *client), ECONNRESET);
    EXPECT_EQ(pair.b->Listen(Address("10.0.0.2", 9), 8, [](std::unique_ptr<Stream>) {}).error().error, EADDRINUSE)
        << "a listener of before takes the new one's place with it";
  }
}

TEST(SimWorld, WhatComesOnAStreamOfBeforeARestartIsAnsweredWithAReset) {
  Pair pair;
  pair.Connect();
  CountingWatcher watcher;
  pair.client->SetWatcher(&watcher);
  pair.client->Arm(true, false);
  WriteSome(*pair.server, "under way");
  pair.world.CutHost(*pair.b, Cut::kSilent);
  pair.world.RunFor(100s);
  EXPECT_EQ(watcher.calls, 1) << "what had left arrives";
  std::string text;
  ReadSome(*pair.client, &text);
  EXPECT_EQ(text, "under way");
  pair.client->Arm(true, false);
  WriteSome(*pair.client, "anyone?");
  pair.world.RunFor(100s);
  EXPECT_EQ(watcher.calls, 1);
  pair.world.Restore(*pair.b);
  EXPECT_TRUE(pair.world.RunUntil([&] { return watcher.calls == 2; }));
  EXPECT_EQ(ErrorOf(pair.world, *pair.client), ECONNRESET);
  pair.Reconnect();
  WriteSome(*pair.client, "again");
  pair.world.RunUntilIdle();
  text.clear();
  ReadSome(*pair.server, &text);
  EXPECT_EQ(text, "again");
}

TEST(SimWorld, ProgramsOfACutHostUnwindAndItsCallbacksNeverRunAgain) {
  for (const Cut how : {Cut::kReset, Cut::kSilent}) {
    Pair pair;
    const auto notifier = pair.b->CreateNotifier();
    std::string history;
    const auto blocked = pair.world.Spawn(*pair.b, "blocked", [&] {
      EXPECT_EQ(pair.b->WaitReadable(notifier->fd()), ENODEV);
      EXPECT_EQ(pair.b->WaitReadable(notifier->fd()), ENODEV);
      EXPECT_FALSE(pair.world.Sleep(1us));
      std::mutex mutex;
      std::condition_variable changed;
      std::unique_lock<std::mutex> lock(mutex);
      bool soon = false;
      pair.world.loop().Post([&] { soon = true; });
      EXPECT_TRUE(pair.b->Wait(lock, changed, [&] { return soon; })) << "what ends within the instant ends well";
      EXPECT_FALSE(pair.b->Wait(lock, changed, [] { return false; }));
      history += "unwound";
    });
    const auto sleeper = pair.world.Spawn(*pair.b, "sleeper", [&] { EXPECT_FALSE(pair.world.Sleep(1s)); });
    const auto other = pair.world.Spawn(*pair.a, "other", [&] { EXPECT_TRUE(pair.world.Sleep(1s)); });
    pair.b->program_loop().At(kStart + 1ms, [] { FAIL(); });
    pair.world.RunFor(1us);
    const auto unborn = pair.world.Spawn(*pair.b, "unborn", [] { FAIL(); });
    pair.world.CutHost(*pair.b, how);
    EXPECT_TRUE(pair.world.HasBlocked(*pair.b));
    pair.b->program_loop().Post([] { FAIL(); });
    EXPECT_EQ(pair.b->program_loop().WatchReadable(notifier->fd(), [] { FAIL(); }), 0u);
    EXPECT_EQ(errno, ENODEV);
    notifier->Signal();
    pair.world.RunFor(0us);
    EXPECT_EQ(history, "unwound");
    EXPECT_TRUE(blocked->IsFinished() && sleeper->IsFinished() && unborn->IsFinished());
    EXPECT_FALSE(pair.world.HasBlocked(*pair.b));
    pair.world.Restore(*pair.b);
    pair.b->program_loop().Post([&] { history += ", up again"; });
    EXPECT_TRUE(pair.world.RunUntil([&] { return other->IsFinished(); }));
    EXPECT_EQ(history, "unwound, up again");
  }
}

TEST(SimWorld, AMiddleboxResetsBothEndsAfterWhatIsUnderWay) {
  Pair pair;
  pair.Connect();
  WriteSome(*pair.client, "before");
  pair.world.ResetConnections(*pair.b, *pair.a);
  CountingWatcher watcher;
  pair.server->SetWatcher(&watcher);
  pair.server->Arm(true, false);
  EXPECT_TRUE(pair.world.RunUntil([&] { return watcher.calls > 0; }));
  EXPECT_EQ(ErrorOf(pair.world, *pair.client), ECONNRESET);
  EXPECT_EQ(ErrorOf(pair.world, *pair.server), ECONNRESET);
  pair.Reconnect();
  EXPECT_EQ(ErrorOf(pair.world, *pair.client), 0) << "new connections are not concerned";
}

TEST(SimWorld, AHalfOpenPeerLearnsWithItsNextSegment) {
  Pair pair;
  pair.Connect();
  CountingWatcher watcher;
  pair.client->SetWatcher(&watcher);
  pair.client->Arm(true, false);
  pair.world.ForgetConnections(*pair.b);
  EXPECT_EQ(ErrorOf(pair.world, *pair.server), ECONNRESET);
  pair.world.RunFor(3600s);
  EXPECT_EQ(watcher.calls, 0);
  WriteSome(*pair.client, "hello?");
  EXPECT_EQ(ErrorOf(pair.world, *pair.client), ECONNRESET);
  EXPECT_EQ(watcher.calls, 1);
}

LinkOptions NastyLink() {
  LinkOptions link;
  link.jitter = 50us;
  link.bytes_per_second = 100'000'000;
  link.buffer = 5000;
  link.chop = true;
  return link;
}

TEST(SimWorld, AnyChoppingAndJitterLeavesTheBytesAsTheyWere) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Pair pair(NastyLink(), seed);
    pair.Connect();
    Exchange exchange(&pair, 20000);
    EXPECT_TRUE(exchange.Run()) << "seed " << seed;
  }
}

uint64_t HashOfRun(uint64_t seed) {
  TraceHash hash;
  Pair pair(NastyLink(), seed, &hash);
  pair.Connect();
  Exchange exchange(&pair, 50000);
  EXPECT_TRUE(exchange.Run());
  pair.client->Abort();
  pair.world.RunUntilIdle();
  EXPECT_GT(hash.events(), 100u);
  return hash.value();
}

TEST(SimWorld, TheSameSeedGivesTheSameTraceAndAnotherSeedAnother) {
  EXPECT_EQ(HashOfRun(7), HashOfRun(7));
  EXPECT_NE(HashOfRun(7), HashOfRun(8));
}

// How hosts a and b read and write over a connection of theirs, when, and how much at a time; without the numbers of
// streams.
std::vector<std::string> MovesOfThePair(const std::function<void(Pair*)>& unrelated) {
  TraceLog log;
  {
    Pair pair(NastyLink(), 5, &log);
    unrelated(&pair);
    pair.world.RunUntilIdle();
    pair.world.RunFor(kStart + 1s - pair.world.Now());
    pair.Connect();
    Exchange exchange(&pair, 20000);
    EXPECT_TRUE(exchange.Run());
  }
  std::vector<std::string> moves;
  for (const std::string& line : log.lines()) {
    const size_t host = line.find(' ') + 1;
    const size_t event = line.find(' ', host) + 1;
    const bool move = line.compare(event, 12, "stream.read ") == 0 || line.compare(event, 15, "stream.written ") == 0;
    if (line[0] == '0' || !move) continue;
    moves.push_back(line.substr(0, host + 1) + " " + line.substr(event));
  }
  EXPECT_GT(moves.size(), 50u);
  return moves;
}

TEST(SimWorld, ConnectionsOfOthersDoNotChangeTheLuckOfOne) {
  const std::vector<std::string> alone = MovesOfThePair([](Pair*) {});
  // What happens before: an exchange over a connection between `from` and `to`.
  const auto exchanged = [](Pair* pair, SimFabric& from, SimFabric& to, const char* address, uint16_t port) {
    std::unique_ptr<Stream> client;
    std::unique_ptr<Stream> server;
    const auto listener =
        to.Listen(Address(address, port), 8, [&](std::unique_ptr<Stream> stream) { server = std::move(stream); });
    const auto attempt = from.Connect({}, Address(address, port), [&](StreamResult result) {
      ASSERT_TRUE(result.has_value());
      client = std::move(*result);
    });
    ASSERT_TRUE(pair->world.RunUntil([&] { return client != nullptr && server != nullptr; }));
    Exchange exchange(&pair->world, client.get(), server.get(), 5000);
    EXPECT_TRUE(exchange.Run());
  };
  const auto add = [](Pair* pair) {
    pair->world.AddHost("c", {Address("10.0.0.3")});
    return &pair->world.AddHost("d", {Address("10.0.0.4")});
  };
  EXPECT_EQ(MovesOfThePair([&](Pair* pair) {
              SimFabric* const d = add(pair);
              exchanged(pair, *d, *d, "10.0.0.4", 20049);
            }),
            alone)
      << "other hosts";
  EXPECT_EQ(MovesOfThePair([&](Pair* pair) { exchanged(pair, *add(pair), *pair->b, "10.0.0.2", 20049); }), alone)
      << "another client of the service";
  EXPECT_EQ(MovesOfThePair([&](Pair* pair) { exchanged(pair, *pair->a, *add(pair), "10.0.0.4", 20049); }), alone)
      << "another connection of the client, which changes its port";
  EXPECT_EQ(MovesOfThePair([&](Pair* pair) { exchanged(pair, *pair->a, *pair->b, "10.0.0.2", 9); }), alone)
      << "another service of the same host";
  EXPECT_NE(MovesOfThePair([&](Pair* pair) { exchanged(pair, *pair->a, *pair->b, "10.0.0.2", 20049); }), alone)
      << "a second connection has luck of its own";
}

// --- Descriptors ---

void LimitDescriptorsTo(rlim_t soft) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = soft;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

TEST(SimWorldDescriptors, AWorldRaisesTheLimitAsFarAsItMay) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  LimitDescriptorsTo(32);
  SimWorld world(1);
  rlimit after{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &after), 0);
  EXPECT_EQ(after.rlim_cur, before.rlim_max);
  EXPECT_EQ(after.rlim_max, before.rlim_max);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

[[noreturn]] void UseUpDescriptors(bool needed) {
  SimWorld::Options options;
  options.needs_descriptors = needed;
  SimWorld world(options);
  SimFabric& host = world.AddHost("a", {Address("10.0.0.1")});
  LimitDescriptorsTo(24);
  for (int i = 0; i < 100; ++i) {
    if (host.CreateNotifier() == nullptr) std::_Exit(4);  // each is given back at once
  }
  std::vector<std::unique_ptr<Notifier>> notifiers;
  while (notifiers.empty() || notifiers.back() != nullptr) notifiers.push_back(host.CreateNotifier());
  std::_Exit(3);
}

TEST(SimWorldDescriptors, AProgramThatFindsNoDescriptorIsToldSo) {
  EXPECT_EXIT(UseUpDescriptors(false), testing::ExitedWithCode(3), "");
}

TEST(SimWorldDescriptors, AWorldThatNeedsThemEndsTheProcessAndNamesTheLimit) {
  EXPECT_EXIT(UseUpDescriptors(true), testing::ExitedWithCode(SimWorld::kNoDescriptors),
              "the simulation ran out of file descriptors \\(limit 24\\): raise `ulimit -n`");
}

TEST(SimWorld, TheTraceTellsTheStoryOfAConnection) {
  TraceLog log;
  {
    Pair pair(LinkOptions{}, 1, &log);
    pair.Connect();
    WriteSome(*pair.client, "hello");
    pair.world.RunUntilIdle();
    std::string text;
    ReadSome(*pair.server, &text);
    pair.client->Shutdown();
    pair.world.RunUntilIdle();
  }
  const std::vector<std::string> expected = {
      "0.000000000 b fabric.listen local=10.0.0.2:20049",
      "0.000000000 a fabric.connect remote=10.0.0.2:20049",
      "0.000020000 a/stream-1 stream.connected remote=10.0.0.2:20049",
      "0.000030000 b/stream-1 stream.accepted remote=10.0.0.1:49152",
      "0.000030000 a/stream-1 stream.written bytes=5",
      "0.000040000 b/stream-1 stream.read bytes=5",
      "0.000040000 a/stream-1 stream.shutdown",
      "0.000050000 b/stream-1 stream.finished",
  };
  ASSERT_GE(log.lines().size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(log.lines()[i], expected[i]);
}

}  // namespace
}  // namespace stagecoach::emu
