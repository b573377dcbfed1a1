// Datagrams among threads, over real TCP on the loopback interface: senders that share links, receivers, and QPs that
// come and go under what is sent to them. The races here are what the thread sanitizer is for.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "emu/nic/datagram/address_handles.h"
#include "emu/nic/nic_test_support.h"

namespace stagecoach::emu {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr uint64_t kRounds = 500;
constexpr int kLives = 50;
#else
constexpr uint64_t kRounds = 5000;
constexpr int kLives = 300;
#endif
constexpr uint32_t kQkey = 7;
constexpr uint64_t kWindow = 16;

const IpEndpoint kLoopback = *IpEndpoint::Parse("127.0.0.1", 0);

// Ports of this process's own, so that one that becomes free is there for the next device of it; and time enough for
// a machine that has other things to do.
DeviceProfile Profile() {
  constexpr uint16_t kBlock = 16;
  constexpr int kBlocks = 200;
  DeviceProfile profile = RoceProfile();
  profile.port_base = static_cast<uint16_t>(20000 + getpid() % kBlocks * kBlock);
  profile.port_count = kBlock;
  profile.carrier_patience = 60s;
  return profile;
}

// A UD QP in RTS, with a CQ of its own.
struct End {
  explicit End(TestHost& owner) : host(owner) {
    cq = *host.nic->CreateCq(*host.context, 1024, nullptr, nullptr);
    QpCreate create;
    create.type = QpType::kUd;
    create.pd = host.pd;
    create.send_cq = create.receive_cq = cq;
    create.capabilities = {64, 256, 1, 1, 0};
    qp = *host.nic->CreateQp(*host.context, create);
    DatagramsToRts(*qp, kQkey);
  }
  ~End() {
    EXPECT_EQ(host.nic->DestroyQp(qp->handle()), 0);
    EXPECT_EQ(host.nic->DestroyCq(cq->handle()), 0);
  }
  int Send(const AddressHandle* ah, uint32_t to, const ScatterGather& sge) {
    SendRequest request;
    request.signaled = true;
    request.sges = {&sge, 1};
    request.destination = ah;
    request.remote_qp = to;
    request.remote_qkey = kQkey;
    return qp->PostSend(request);
  }
  size_t Poll() {
    std::array<WorkCompletion, 16> batch;
    const size_t count = cq->Poll(batch);
    for (size_t i = 0; i < count; ++i) EXPECT_EQ(batch[i].status, CompletionStatus::kSuccess);
    return count;
  }

  TestHost& host;
  CompletionQueue* cq = nullptr;
  QueuePair* qp = nullptr;
};

const AddressHandle* ToLoopback(TestHost& host) {
  AddressVector vector;
  vector.is_global = true;
  vector.gid = GidOf(kLoopback);
  const std::vector<wire::Gid> gids = host.nic->roce().Gids();
  while (vector.sgid_index < gids.size() && gids[vector.sgid_index] != vector.gid) ++vector.sgid_index;
  const auto ah = host.nic->CreateAh(*host.context, host.pd, vector);
  EXPECT_TRUE(ah.has_value());
  return ah ? *ah : nullptr;
}

TEST(DatagramThreads, EverySendIsDeliveredOrDroppedForAReasonWhoeverComesAndGoes) {
  TcpFabric fabric_a;
  TcpFabric fabric_b;
  TestHost a(fabric_a, "a", Profile());
  TestHost b(fabric_b, "b", Profile());
  const AddressHandle* const ah = ToLoopback(a);
  ASSERT_NE(ah, nullptr);
  std::atomic<bool> over{false};
  std::atomic<uint32_t> passing{0};
  const auto receive = [&](End& end, const ScatterGather& sge) {
    for (int i = 0; i < 200; ++i) ASSERT_EQ(end.qp->PostReceive({0, {&sge, 1}}), 0);
    while (!over.load()) {
      for (size_t taken = end.Poll(); taken > 0; --taken) ASSERT_EQ(end.qp->PostReceive({0, {&sge, 1}}), 0);
      std::this_thread::yield();
    }
  };
  {
    End far(b);
    End near(a);
    const TestBuffer far_box = b.Register(4096);
    const TestBuffer near_box = a.Register(4096);
    const TestBuffer words = a.Register(512);
    std::vector<std::thread> receivers;
    receivers.emplace_back([&] { receive(far, far_box.All()); });
    receivers.emplace_back([&] { receive(near, near_box.All()); });
    std::thread comes_and_goes([&] {
      for (int i = 0; i < kLives && !over.load(); ++i) {
        End brief(b);
        const ScatterGather sge = far_box.All();
        for (int k = 0; k < 8; ++k) EXPECT_EQ(brief.qp->PostReceive({0, {&sge, 1}}), 0);
        passing.store(brief.qp->qp_number());
        for (int k = 0; k < 20; ++k) {
          brief.Poll();
          std::this_thread::yield();
        }
      }
    });
    std::vector<std::thread> senders;
    for (int s = 0; s < 3; ++s) {
      senders.emplace_back([&] {
        End end(a);
        const ScatterGather sge = words.All();
        uint64_t posted = 0;
        uint64_t done = 0;
        EXPECT_TRUE(Eventually([&] {
          while (posted < kRounds && posted - done < kWindow) {
            const std::array<uint32_t, 3> targets = {far.qp->qp_number(), near.qp->qp_number(),
                                                     std::max(passing.load(), far.qp->qp_number())};
            EXPECT_EQ(end.Send(ah, targets[posted % targets.size()], sge), 0);
            ++posted;
          }
          done += end.Poll();
          return done == kRounds;
        }));
      });
    }
    for (std::thread& sender : senders) sender.join();
    comes_and_goes.join();
    const auto all_accounted = [&] {
      const DatagramPort::Counters at_a = a.nic->datagrams().counters();
      const DatagramPort::Counters at_b = b.nic->datagrams().counters();
      const auto ended = [](const DatagramPort::Counters& at) {
        return at.delivered + at.no_qp + at.no_receive + at.bad_qkey + at.too_long + at.malformed;
      };
      return at_a.sent == 3 * kRounds && ended(at_a) + ended(at_b) == at_a.sent;
    };
    EXPECT_TRUE(Eventually(all_accounted));
    EXPECT_EQ(a.nic->datagrams().counters().lost, 0u);
    EXPECT_GT(b.nic->datagrams().counters().delivered, kRounds / 10);
    over.store(true);
    for (std::thread& receiver : receivers) receiver.join();
  }
}

TEST(DatagramThreads, ADeviceGoesWhileDatagramsAreOnTheirWayToIt) {
  TcpFabric fabric_a;
  TcpFabric fabric_b;
  TestHost a(fabric_a, "a", Profile());
  const AddressHandle* const ah = ToLoopback(a);
  ASSERT_NE(ah, nullptr);
  const TestBuffer words = a.Register(512);
  for (int life = 0; life < 10; ++life) {
    auto b = std::make_unique<TestHost>(fabric_b, "b" + std::to_string(life), Profile());
    auto target = std::make_unique<End>(*b);
    const uint32_t number = target->qp->qp_number();
    std::atomic<bool> over{false};
    std::thread sender([&] {
      End end(a);
      uint64_t posted = 0;
      uint64_t done = 0;
      EXPECT_TRUE(Eventually([&] {
        while (!over.load() && posted - done < kWindow) {
          EXPECT_EQ(end.Send(ah, number, words.All()), 0);
          ++posted;
        }
        done += end.Poll();
        return over.load() && done == posted;
      }));
    });
    EXPECT_TRUE(Eventually([&] { return b->nic->datagrams().counters().no_receive > 10; }));
    target.reset();
    b.reset();
    over.store(true);
    sender.join();
  }
}

TEST(DatagramThreads, TheFirstDatagramToAProcessThatWasRestartedArrives) {
  TcpFabric fabric_a;
  TcpFabric fabric_b;
  TestHost a(fabric_a, "a", Profile());
  auto b = std::make_unique<TestHost>(fabric_b, "b", Profile());
  const auto slot = static_cast<uint8_t>(b->qp->qp_number() >> kSlotShift);
  DatagramPort& from = a.nic->datagrams();
  const DatagramPeer to = from.PeerAt({kLoopback, kLoopback}, slot);
  wire::IbHeader header;
  header.destination_qp = header.source_qp = kGsiQp;
  header.qkey = kGsiQkey;
  ASSERT_EQ(from.Send(to, header, {}), DatagramPort::Sent::kQueued);
  ASSERT_TRUE(Eventually([&] { return b->nic->datagrams().counters().no_qp == 1; }));
  // a's loop hears nothing of what happens to b.
  std::atomic<bool> held{false};
  std::atomic<bool> released{false};
  fabric_a.loop().Post([&] {
    held.store(true);
    while (!released.load()) std::this_thread::yield();
  });
  ASSERT_TRUE(Eventually([&] { return held.load(); }));
  const auto last_use = std::chrono::steady_clock::now();
  b.reset();
  b = std::make_unique<TestHost>(fabric_b, "b", Profile());
  EXPECT_EQ(b->qp->qp_number() >> kSlotShift, uint32_t{slot});
  EXPECT_TRUE(Eventually([&] { return std::chrono::steady_clock::now() - last_use > 2ms; }));
  EXPECT_EQ(from.Send(to, header, {}), DatagramPort::Sent::kQueued);
  released.store(true);
  EXPECT_TRUE(Eventually([&] { return b->nic->datagrams().counters().no_qp == 1; }));
  EXPECT_EQ(from.counters().lost, 0u);
}

}  // namespace
}  // namespace stagecoach::emu
