// The habits of a device that a program must live with, as rows of its profile: packets and datagrams that are
// overtaken, completions that come late and several at once, Writes that are placed late.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/trace.h"
#include "emu/nic/datagram/address_handles.h"
#include "emu/nic/device_profile.h"
#include "emu/nic/nic_test_support.h"
#include "emu/nic/roce_test_support.h"
#include "emu/wire/ib.h"

namespace stagecoach::emu {
namespace {

DeviceProfile WithOvertaking(uint32_t one_in) {
  DeviceProfile profile = RoceProfile();
  profile.habits = {{.action = InjectionAction::kOvertake, .kinds = kEveryRecord, .one_in = one_in}};
  return profile;
}

DeviceProfile WithLateCompletions(DeviceProfile profile, uint32_t one_in, Duration delay) {
  profile.habits = {{.action = InjectionAction::kDelayCompletion, .delay = delay, .one_in = one_in}};
  return profile;
}

// Two hosts of a simulated world; what both do is traced.
struct Hosts {
  explicit Hosts(const DeviceProfile& profile)
      : a(pair.fabric_a, "a", profile, &trace, 1024, {128, 128, 4, 4, 128}),
        b(pair.fabric_b, "b", profile, &trace, 1024, {128, 128, 4, 4, 128}) {}

  QueuePair* Another(TestHost& host, QpType type) {
    QpCreate create;
    create.type = type;
    create.pd = host.pd;
    create.send_cq = create.receive_cq = host.cq;
    create.capabilities = {128, 128, 4, 4, 128};
    return *host.nic->CreateQp(*host.context, create);
  }
  // From now on the hosts have QPs of this type.
  void Use(QpType type) {
    a.qp = Another(a, type);
    b.qp = Another(b, type);
  }
  void Connect() {
    ReadyFor(*a.qp, *b.qp, at_b);
    ReadyFor(*b.qp, *a.qp, at_a);
  }
  bool Until(const std::function<bool()>& done) { return pair.world.RunUntil(done); }
  size_t Traced(const std::string& text) const {
    return static_cast<size_t>(std::count_if(trace.lines().begin(), trace.lines().end(), [&](const std::string& line) {
      return line.find(text) != std::string::npos;
    }));
  }

  TraceLog trace;
  SimPair pair;
  const IpEndpoint at_a = *IpEndpoint::Parse("10.0.0.1", 0);
  const IpEndpoint at_b = *IpEndpoint::Parse("10.0.0.2", 0);
  TestHost a;
  TestHost b;
};

void FillBy(TestBuffer& buffer, uint8_t value) {
  std::fill(buffer.bytes.begin(), buffer.bytes.end(), static_cast<std::byte>(value));
}

// --- Packets ---

TEST(HabitsTest, WhatIsOvertakenOnAReliableConnectionArrivesAllTheSame) {
  Hosts hosts(WithOvertaking(5));
  hosts.Connect();
  TestBuffer source = hosts.a.Register(40 * 4000);
  TestBuffer sink = hosts.b.Register(40 * 4000);
  TestBuffer back = hosts.a.Register(40 * 4000);
  Prng prng(1);
  for (std::byte& byte : source.bytes) byte = static_cast<std::byte>(prng.Next());
  for (uint64_t i = 0; i < 40; ++i) {
    ASSERT_EQ(hosts.b.Receive(i, {sink.Sge(i * 4000, 4000)}), 0);
    ASSERT_EQ(hosts.a.Send(i, {source.Sge(i * 4000, 4000)}), 0);
  }
  ASSERT_TRUE(hosts.Until([&] { return BothCompleted(hosts.a, hosts.b, 40); }));
  EXPECT_EQ(sink.bytes, source.bytes);
  for (uint64_t i = 0; i < 40; ++i) {
    EXPECT_EQ(hosts.a.completions[i].status, CompletionStatus::kSuccess);
    EXPECT_EQ(hosts.b.completions[i].status, CompletionStatus::kSuccess);
    EXPECT_EQ(hosts.b.completions[i].wr_id, i);
  }
  // The first that came too early was reported as a gap; nothing else is lost here.
  EXPECT_GT(hosts.Traced("nak.raised syndrome=" + std::to_string(wire::kIbNakSequence)), 3u);
  // Answers are overtaken, too.
  for (uint64_t i = 0; i < 40; ++i) {
    ASSERT_EQ(hosts.a.Send(100 + i, {back.Sge(i * 4000, 4000)}, PostOpcode::kRead, sink.region.stag,
                           sink.address() + i * 4000),
              0);
  }
  ASSERT_TRUE(hosts.Until([&] { return hosts.a.Completed(80); }));
  EXPECT_EQ(hosts.a.completions[79].status, CompletionStatus::kSuccess);
  EXPECT_EQ(back.bytes, source.bytes);
}

TEST(HabitsTest, WhatIsOvertakenOnAnUnreliableConnectionIsLostWithItsMessage) {
  Hosts hosts(WithOvertaking(20));
  hosts.Use(QpType::kUc);
  hosts.Connect();
  TestBuffer source = hosts.a.Register(4000);
  TestBuffer sink = hosts.b.Register(60 * 4000);
  for (uint64_t i = 0; i < 60; ++i) ASSERT_EQ(hosts.b.Receive(i, {sink.Sge(i * 4000, 4000)}), 0);
  for (uint64_t i = 0; i < 60; ++i) {
    FillBy(source, static_cast<uint8_t>(i));
    ASSERT_EQ(hosts.a.Send(i, {source.All()}), 0);
    ASSERT_TRUE(hosts.Until([&] { return hosts.a.Completed(i + 1); }));
    hosts.pair.world.RunFor(1ms);
    EXPECT_EQ(hosts.a.completions[i].status, CompletionStatus::kSuccess);
  }
  hosts.b.Completed(0);
  EXPECT_GT(hosts.b.completions.size(), 20u);
  EXPECT_LT(hosts.b.completions.size(), 60u);
  // What arrives is whole.
  for (size_t i = 0; i < hosts.b.completions.size(); ++i) {
    const auto begin = sink.bytes.begin() + static_cast<ptrdiff_t>(i * 4000);
    EXPECT_EQ(std::count(begin, begin + 4000, *begin), 4000);
  }
}

// --- Datagrams ---

constexpr uint32_t kQkey = 0x1234;

class DatagramHabitsTest : public ::testing::Test {
 protected:
  void Open(uint32_t one_in) { Open(WithOvertaking(one_in)); }
  void Open(const DeviceProfile& profile) {
    hosts_.emplace(profile);
    hosts_->Use(QpType::kUd);
    for (TestHost* host : {&hosts_->a, &hosts_->b}) DatagramsToRts(*host->qp, kQkey);
    AddressVector vector;
    vector.is_global = true;
    vector.gid = GidOf(hosts_->at_b);
    ah_ = *hosts_->a.nic->CreateAh(*hosts_->a.context, hosts_->a.pd, vector);
  }
  void Send(std::vector<ScatterGather> sges) {
    SendRequest request;
    request.signaled = true;
    request.sges = sges;
    request.destination = ah_;
    request.remote_qp = hosts_->b.qp->qp_number();
    request.remote_qkey = kQkey;
    ASSERT_EQ(hosts_->a.qp->PostSend(request), 0);
  }

  std::optional<Hosts> hosts_;
  const AddressHandle* ah_ = nullptr;
};

TEST_F(DatagramHabitsTest, SomeAreOvertakenAndNoneIsLost) {
  Open(5);
  TestBuffer source = hosts_->a.Register(100);
  TestBuffer sink = hosts_->b.Register(100 * 41);
  for (size_t i = 0; i < 100; ++i) {
    source.bytes[i] = static_cast<std::byte>(i);
    ASSERT_EQ(hosts_->b.Receive(i, {sink.Sge(i * 41, 41)}), 0);
  }
  for (size_t i = 0; i < 100; ++i) Send({source.Sge(i, 1)});
  ASSERT_TRUE(hosts_->Until([&] { return BothCompleted(hosts_->a, hosts_->b, 100); }));
  std::vector<int> order;
  for (size_t i = 0; i < 100; ++i) order.push_back(std::to_integer<int>(sink.bytes[i * 41 + 40]));
  EXPECT_EQ(std::set<int>(order.begin(), order.end()).size(), 100u);
  size_t early = 0;
  for (int i = 0; i < 100; ++i) {
    EXPECT_LE(std::abs(order[static_cast<size_t>(i)] - i), 1);
    early += order[static_cast<size_t>(i)] > i;
  }
  EXPECT_GT(early, 5u);
  EXPECT_LT(early, 40u);
}

// The first one waits for the link to be opened, and is tried again: that makes no second datagram of it.
TEST_F(DatagramHabitsTest, EachIsJudgedOnceHoweverOftenItIsTried) {
  DeviceProfile profile = RoceProfile();
  profile.habits = *ParseInjectionRules("overtake kind=any every=2");
  Open(profile);
  TestBuffer source = hosts_->a.Register(4);
  TestBuffer sink = hosts_->b.Register(4 * 41);
  for (size_t i = 0; i < 4; ++i) {
    source.bytes[i] = static_cast<std::byte>(i);
    ASSERT_EQ(hosts_->b.Receive(i, {sink.Sge(i * 41, 41)}), 0);
  }
  for (size_t i = 0; i < 4; ++i) Send({source.Sge(i, 1)});
  ASSERT_TRUE(hosts_->Until([&] { return BothCompleted(hosts_->a, hosts_->b, 4); }));
  std::vector<int> order;
  for (size_t i = 0; i < 4; ++i) order.push_back(std::to_integer<int>(sink.bytes[i * 41 + 40]));
  EXPECT_EQ(order, (std::vector<int>{0, 2, 1, 3}));
}

TEST_F(DatagramHabitsTest, OneThatNothingFollowsArrivesAfterAWhile) {
  Open(1);
  TestBuffer source = hosts_->a.Register(1);
  TestBuffer sink = hosts_->b.Register(41);
  ASSERT_EQ(hosts_->b.Receive(1, {sink.All()}), 0);
  const Instant begin = hosts_->pair.world.Now();
  Send({source.All()});
  EXPECT_TRUE(hosts_->a.Completed(1)) << "nobody waits for it";
  ASSERT_TRUE(hosts_->Until([&] { return hosts_->b.Completed(1); }));
  EXPECT_GE(hosts_->pair.world.Now() - begin, RoceProfile().overtaking_time);
}

TEST_F(DatagramHabitsTest, OneThatIsOvertakenGoesWithItsQp) {
  Open(1);
  TestBuffer source = hosts_->a.Register(1);
  TestBuffer sink = hosts_->b.Register(41);
  ASSERT_EQ(hosts_->b.Receive(1, {sink.All()}), 0);
  Send({source.All()});
  ASSERT_EQ(hosts_->a.ToState(QpState::kReset), 0);
  hosts_->pair.world.RunFor(1s);
  EXPECT_FALSE(hosts_->b.Completed(1));
}

// --- Completions ---

// Has no memory for anything.
class NoMemoryForTraces final : public TraceSink {
 public:
  void OnEvent(Instant, std::string_view, std::string_view, std::initializer_list<TraceFact>) override {
    throw std::bad_alloc();
  }
};

TEST(HabitsTest, ACompletionThatIsLateComesWithoutMemoryToTellOfIt) {
  NoMemoryForTraces trace;
  SimPair pair;
  const auto plan = InjectionPlan::Make(*ParseInjectionRules("delay-completion=1ms"),
                                        [](const InjectionFiring&) { throw std::bad_alloc(); });
  TestHost a(pair.fabric_a, "a", IwarpProfile(), &trace, 1024, {64, 64, 4, 4, 128}, plan);
  TestHost b(pair.fabric_b, "b", IwarpProfile(), &trace);
  pair.Join(a, b);
  TestBuffer source = a.Register(16);
  TestBuffer sink = b.Register(16);
  for (uint64_t i = 0; i < 10; ++i) {
    ASSERT_EQ(b.Receive(i, {sink.All()}), 0);
    ASSERT_EQ(a.Send(i, {source.All()}), 0);
  }
  ASSERT_TRUE(pair.world.RunUntil([&] { return BothCompleted(a, b, 10); }));
  for (uint64_t i = 0; i < 10; ++i) EXPECT_EQ(a.completions[i].wr_id, i);
  EXPECT_EQ(plan->counters(0).fired, 10u);
}

TEST(HabitsTest, CompletionsComeInOrderLateAndSeveralAtOnce) {
  Hosts hosts(WithLateCompletions(IwarpProfile(), 4, 5ms));
  hosts.pair.Join(hosts.a, hosts.b);
  TestBuffer source = hosts.a.Register(16);
  TestBuffer sink = hosts.b.Register(16);
  for (uint64_t i = 0; i < 60; ++i) ASSERT_EQ(hosts.b.Receive(i, {sink.All()}), 0);
  std::vector<size_t> batches;
  const auto poll = [&] {
    WorkCompletion found[64];
    const size_t count = hosts.b.cq->Poll(found);
    if (count == 0) return;
    batches.push_back(count);
    hosts.b.completions.insert(hosts.b.completions.end(), found, found + count);
  };
  for (uint64_t i = 0; i < 60; ++i) {
    ASSERT_EQ(hosts.a.Send(i, {source.All()}), 0);
    const Instant next = hosts.pair.world.Now() + 500us;  // one at a time, if nothing is held back
    hosts.Until([&] {
      poll();
      return hosts.pair.world.Now() >= next;
    });
    hosts.pair.world.RunFor(std::max(Duration(), next - hosts.pair.world.Now()));
    poll();
  }
  const Instant end = hosts.pair.world.Now();
  hosts.Until([&] {
    poll();
    return hosts.b.completions.size() == 60;
  });
  EXPECT_LE(hosts.pair.world.Now() - end, 6ms);
  ASSERT_EQ(hosts.b.completions.size(), 60u);
  for (uint64_t i = 0; i < 60; ++i) EXPECT_EQ(hosts.b.completions[i].wr_id, i);
  EXPECT_GT(*std::max_element(batches.begin(), batches.end()), 2u);
  EXPECT_GT(batches.size(), 10u);
}

TEST(HabitsTest, WhenASendQueueIsDrainedItsCompletionsAreThere) {
  for (const bool by_event : {false, true}) {
    Hosts hosts(WithLateCompletions(RoceProfile(), 1, 3600s));
    hosts.Connect();
    TestBuffer source = hosts.a.Register(16);
    TestBuffer sink = hosts.b.Register(16);
    ASSERT_EQ(hosts.a.Send(1, {source.All()}, PostOpcode::kWrite, sink.region.stag, sink.address()), 0);
    hosts.pair.world.RunFor(10ms);
    ASSERT_EQ(hosts.a.Send(2, {source.All()}, PostOpcode::kWrite, sink.region.stag, sink.address()), 0);
    EXPECT_FALSE(hosts.a.Completed(1)) << "it is done, and held back";
    fcntl(hosts.a.context->async_events().fd(), F_SETFL, O_NONBLOCK);
    QpAttributes attributes;
    attributes.state = QpState::kSqd;
    attributes.notify_drained = by_event;
    ASSERT_EQ(hosts.a.qp->Modify(attributes, qp_attr::kState | (by_event ? qp_attr::kEnSqdAsyncNotify : 0)), 0);
    if (by_event) {
      std::optional<AsyncEvent> event;
      ASSERT_TRUE(hosts.Until([&] {
        const auto next = hosts.a.context->async_events().GetEvent();
        if (next) event = *next;
        return event.has_value();
      }));
      EXPECT_EQ(event->type, AsyncEventType::kSendQueueDrained);
      hosts.a.context->async_events().Ack(*event);
    } else {
      ASSERT_TRUE(hosts.Until([&] { return !hosts.a.qp->IsDraining(); }));
    }
    EXPECT_TRUE(hosts.a.Completed(2));
  }
}

// --- Over TCP, with threads ---

// How many events of one name there were.
class EventCount final : public TraceSink {
 public:
  explicit EventCount(std::string_view event) : event_(event) {}
  void OnEvent(Instant, std::string_view, std::string_view event, std::initializer_list<TraceFact>) override {
    if (event == event_) ++count_;
  }
  int count() const { return count_; }

 private:
  const std::string_view event_;
  std::atomic<int> count_ = 0;
};

TEST(HabitsTest, WritesThatComeOverTcpArePlacedLate) {
  EventCount kept("placement.kept");
  DeviceProfile profile = IwarpProfile();
  profile.habits = {
      {.action = InjectionAction::kPlaceLate, .delay = 86400s}};  // what is drawn for each depends on the seed alone
  TcpFabric fabric_a;
  TcpFabric fabric_b;
  TestHost a(fabric_a, "a");
  TestHost b(fabric_b, "b", profile, &kept);
  auto [client, server] = TcpStreams(fabric_a, fabric_b);
  Attach(b, std::move(server), false);
  Attach(a, std::move(client), true);
  TestBuffer source = a.Register(4000, kFullAccess, 7);
  TestBuffer sink = b.Register(4000);
  TestBuffer message = b.Register(16);
  for (uint64_t i = 0; i < 4; ++i) {
    ASSERT_EQ(a.Send(i, {source.Sge(i * 1000, 1000)}, PostOpcode::kWrite, sink.region.stag, sink.address() + i * 1000),
              0);
  }
  // One for the ready-to-receive message, which is a Write of no bytes.
  ASSERT_TRUE(Eventually([&] { return kept.count() >= 5; }));
  EXPECT_EQ(std::count(sink.bytes.begin(), sink.bytes.end(), std::byte{0}), 4000)
      << "all have arrived, none is in place";
  ASSERT_EQ(b.Receive(1, {message.All()}), 0);
  ASSERT_EQ(a.Send(9, {source.Sge(0, 16)}), 0);
  ASSERT_TRUE(Eventually([&] { return b.Completed(1); }));
  EXPECT_EQ(std::count(sink.bytes.begin(), sink.bytes.end(), std::byte{7}), 4000);
}

TEST(HabitsTest, LateCompletionsComeByThemselvesOverTcp) {
  TcpFabric fabric_a;
  TcpFabric fabric_b;
  const DeviceProfile profile = WithLateCompletions(IwarpProfile(), 2, 200us);
  TestHost a(fabric_a, "a", profile);
  TestHost b(fabric_b, "b", profile);
  auto [client, server] = TcpStreams(fabric_a, fabric_b);
  Attach(b, std::move(server), false);
  Attach(a, std::move(client), true);
  TestBuffer source = a.Register(16);
  TestBuffer sink = b.Register(16);
  constexpr uint64_t kRounds = 200;
  for (uint64_t i = 0; i < kRounds; ++i) {
    ASSERT_EQ(b.Receive(i, {sink.All()}), 0);
    ASSERT_EQ(a.Send(i, {source.All()}), 0);
    ASSERT_TRUE(Eventually([&] { return b.Completed(i + 1); }));
    ASSERT_TRUE(Eventually([&] { return a.Completed(i + 1); }));
    EXPECT_EQ(b.completions[i].wr_id, i);
  }
}

}  // namespace
}  // namespace stagecoach::emu
