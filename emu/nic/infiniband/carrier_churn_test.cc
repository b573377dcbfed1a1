// Carriers that come and go under pollers, posters and the loop's thread, over TCP on the loopback interface. The races
// here are what the thread sanitizer is for.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/prng.h"
#include "emu/backend/tcp/tcp_fabric.h"
#include "emu/fabric/fabric_over.h"
#include "emu/llp/llp_over.h"
#include "emu/nic/roce_test_support.h"

namespace stagecoach::emu {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr uint64_t kRounds = 100;
constexpr uint64_t kLives = 60;
#else
constexpr uint64_t kRounds = 1000;
constexpr uint64_t kLives = 400;
#endif

// A record layer that is found reset after so many records, in one direction or the other.
class MortalLlp final : public LlpOver {
 public:
  MortalLlp(std::unique_ptr<Llp> below, uint64_t records, bool dies_reading)
      : LlpOver(std::move(below)), left_(records), dies_reading_(dies_reading) {}

  void QueueRecord(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie) override {
    if (!dies_reading_ && left_ > 0) --left_;
    below().QueueRecord(header, payload, cookie);
  }
  RxResult NextRecord(RecordHead* record) override {
    if (dies_reading_ && left_ == 0) return {.status = RxStatus::kReset};
    return below().NextRecord(record);
  }
  RxResult Place(size_t head_size, std::span<const MutableBytes> destination) override {
    const RxResult result = below().Place(head_size, destination);
    if (dies_reading_ && result.status == RxStatus::kReady) --left_;
    return result;
  }
  TxResult Flush(MemoryPort& memory) override {
    if (!dies_reading_ && left_ == 0) return {.status = TxStatus::kReset};
    return below().Flush(memory);
  }

 private:
  uint64_t left_;
  const bool dies_reading_;
};

// Decides how long each carrier lives; on the loop alone.
class MortalFabric final : public FabricOver {
 public:
  MortalFabric(Fabric& beneath, bool mortal, const std::string& name)
      : FabricOver(beneath), mortal_(mortal), luck_(Prng(1).Fork(name)) {}

  std::unique_ptr<Llp> RecordsOver(std::unique_ptr<Stream> stream, const RecordOptions& options) override {
    auto llp = FabricOver::RecordsOver(std::move(stream), options);
    if (!mortal_) return llp;
    const uint64_t records = 1 + luck_.Below(30);
    return std::make_unique<MortalLlp>(std::move(llp), records, luck_.OneIn(2));
  }

 private:
  const bool mortal_;
  Prng luck_;
};

struct ChurnPair {
  explicit ChurnPair(bool mortal)
      : fabric_a(records_a.fabric(), mortal, "a"), fabric_b(records_b.fabric(), mortal, "b") {}

  // Of the GID that an address is.
  static uint8_t IndexOf(Nic& nic, const IpEndpoint& address) {
    const auto gids = nic.roce().Gids();
    const auto found = std::find(gids.begin(), gids.end(), GidOf(address));
    EXPECT_NE(found, gids.end());
    return static_cast<uint8_t>(found - gids.begin());
  }
  // As much patience as a busy machine needs.
  static void Ready(TestHost& host, const TestHost& peer, uint8_t timeout = 16, uint8_t retries = 7) {
    const IpEndpoint loopback = *IpEndpoint::Parse("127.0.0.1", 0);
    for (const QpState state : {QpState::kInit, QpState::kRtr, QpState::kRts}) {
      QpAttributes attributes = HandAttributes(state, *peer.qp, loopback);
      attributes.path.sgid_index = IndexOf(*host.nic, loopback);
      attributes.timeout = timeout;
      attributes.retry_count = retries;
      ASSERT_EQ(Modify(*host.qp, attributes), 0);
    }
  }

  TcpFabric tcp_a;
  TcpFabric tcp_b;
  const TestRecords records_a{tcp_a};
  const TestRecords records_b{tcp_b};
  MortalFabric fabric_a;
  MortalFabric fabric_b;
  TestHost a{TestRecords::Above(fabric_a), "a", RoceProfile()};
  TestHost b{TestRecords::Above(fabric_b), "b", RoceProfile()};
};

// Until `count` have completed, by polling or by sleeping.
void Await(TestHost& host, size_t count, bool polling) {
  if (polling) {
    ASSERT_TRUE(Eventually([&] { return host.Completed(count); })) << host.nic->Describe();
    return;
  }
  while (!host.Completed(count)) {
    host.cq->RequestNotify(false);
    if (host.Completed(count)) break;
    const auto event = host.channel->GetEvent();
    ASSERT_TRUE(event.has_value());
    (*event)->AckEvents(1);
  }
}

void ExpectSuccess(const TestHost& host) {
  for (const WorkCompletion& completion : host.completions) ASSERT_EQ(completion.status, CompletionStatus::kSuccess);
}

// The server is at its CQ before there is a connection, and so before the first carrier comes.
void PingPong(bool client_polls, bool server_polls) {
  ChurnPair pair(/*mortal=*/true);
  const TestBuffer at_a = pair.a.Register(64);
  const TestBuffer at_b = pair.b.Register(64);
  pair.b.ToInit();
  ASSERT_EQ(pair.b.Receive(0, {at_b.All()}), 0);
  std::thread server([&] {
    for (uint64_t i = 0; i < kRounds; ++i) {
      Await(pair.b, 2 * i + 1, server_polls);
      ASSERT_EQ(pair.b.Receive(i, {at_b.All()}), 0);
      ASSERT_EQ(pair.b.Send(i, {at_b.All()}), 0);
      Await(pair.b, 2 * i + 2, server_polls);
    }
  });
  ChurnPair::Ready(pair.b, pair.a);
  ChurnPair::Ready(pair.a, pair.b);
  for (uint64_t i = 0; i < kRounds && !::testing::Test::HasFailure(); ++i) {
    ASSERT_EQ(pair.a.Receive(i, {at_a.All()}), 0);
    ASSERT_EQ(pair.a.Send(i, {at_a.All()}), 0);
    Await(pair.a, 2 * i + 2, client_polls);
  }
  server.join();
  ExpectSuccess(pair.a);
  ExpectSuccess(pair.b);
  EXPECT_GT(pair.a.nic->counters().connections, kRounds / 30) << "the carriers did not die";
}

TEST(CarrierChurn, PingPongBetweenPollers) {
  PingPong(true, true);
}
TEST(CarrierChurn, PingPongBetweenSleepers) {
  PingPong(false, false);
}
TEST(CarrierChurn, PingPongBetweenAPollerAndASleeper) {
  PingPong(true, false);
}

TEST(CarrierChurn, APassiveTargetIsServedWithoutAnyCall) {
  ChurnPair pair(/*mortal=*/true);
  ChurnPair::Ready(pair.a, pair.b);
  ChurnPair::Ready(pair.b, pair.a);
  const TestBuffer local = pair.a.Register(5000, kFullAccess, 0x5a);
  const TestBuffer remote = pair.b.Register(5000);
  const TestBuffer back = pair.a.Register(5000);
  for (uint64_t i = 0; i < kRounds / 4; ++i) {
    ASSERT_EQ(pair.a.Send(1, {local.All()}, PostOpcode::kWrite, remote.region.stag, remote.address()), 0);
    ASSERT_EQ(pair.a.Send(2, {back.All()}, PostOpcode::kRead, remote.region.stag, remote.address()), 0);
    ASSERT_TRUE(Eventually([&] { return pair.a.Completed(2 * i + 2); })) << pair.a.nic->Describe();
  }
  ExpectSuccess(pair.a);
  EXPECT_EQ(back.bytes, local.bytes);
}

// Work fails by itself in each life, though the loop's thread may still be at the end of the life before.
TEST(CarrierChurn, EachLifeOfAQpHasItsTimer) {
  ChurnPair pair(/*mortal=*/false);
  const TestBuffer buffer = pair.a.Register(64);
  for (uint64_t i = 0; i < kLives; ++i) {
    // b's QP is in RESET: silence.
    ChurnPair::Ready(pair.a, pair.b, /*timeout=*/8, /*retries=*/0);
    ASSERT_EQ(pair.a.Send(i, {buffer.All()}), 0);
    if (i % 2 == 1) {
      ASSERT_TRUE(Eventually([&] { return pair.a.Completed(1); })) << pair.a.nic->Describe();
      ASSERT_EQ(pair.a.completions[0].status, CompletionStatus::kRetryExceeded);
    }
    ASSERT_EQ(pair.a.ToState(QpState::kReset), 0);
    pair.a.completions.clear();
  }
}

// Both ends begin anew, whichever is quicker; when both are there, what is sent arrives.
TEST(CarrierChurn, QpsAreConnectedAnewWhicheverEndIsQuicker) {
  ChurnPair pair(/*mortal=*/true);
  const TestBuffer at_a = pair.a.Register(3000);
  const TestBuffer at_b = pair.b.Register(3000);
  std::atomic<uint64_t> arrivals{0};
  // Waits until both ends have come so far.
  const auto meet = [&](uint64_t times) {
    arrivals.fetch_add(1);
    return Eventually([&] { return arrivals.load() >= 2 * times; });
  };
  const auto live = [&](TestHost& host, const TestHost& peer, const TestBuffer& buffer) {
    for (uint64_t i = 0; i < kLives / 4; ++i) {
      ASSERT_EQ(host.ToState(QpState::kReset), 0);
      host.completions.clear();
      ChurnPair::Ready(host, peer);
      ASSERT_EQ(host.Receive(1, {buffer.All()}), 0);
      ASSERT_TRUE(meet(2 * i + 1));
      ASSERT_EQ(host.Send(2, {buffer.All()}), 0);
      ASSERT_TRUE(Eventually([&] { return host.Completed(2); })) << host.nic->Describe();
      ExpectSuccess(host);
      ASSERT_TRUE(meet(2 * i + 2));
    }
  };
  std::thread other([&] { live(pair.b, pair.a, at_b); });
  live(pair.a, pair.b, at_a);
  other.join();
}

}  // namespace
}  // namespace stagecoach::emu
