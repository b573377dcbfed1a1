// Who moves a connection: pollers, posters and the loop's thread, over real TCP on the loopback interface. The races
// here are what the thread sanitizer is for.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <string>
#include <thread>

#include "emu/nic/nic_test_support.h"

namespace stagecoach::emu {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr uint64_t kRounds = 300;
#else
constexpr uint64_t kRounds = 3000;
#endif

struct TcpPair {
  explicit TcpPair(const DeviceProfile& profile = IwarpProfile(), const JoinOptions& options = {})
      : a(fabric_a, "a", profile), b(fabric_b, "b", profile) {
    auto [client, server] = TcpStreams(fabric_a, fabric_b);
    Attach(b, std::move(server), false, options);
    Attach(a, std::move(client), true, options);
  }

  TcpFabric fabric_a;
  TcpFabric fabric_b;
  TestHost a;
  TestHost b;
};

// Polls until `count` completions have been seen in all.
bool PollFor(TestHost& host, size_t count) {
  return Eventually([&] { return host.Completed(count); });
}

// The way of programs that sleep: arm, look once more, wait for the event.
void WaitFor(TestHost& host, size_t count) {
  while (!host.Completed(count)) {
    host.cq->RequestNotify(false);
    if (host.Completed(count)) break;
    const auto event = host.channel->GetEvent();
    ASSERT_TRUE(event.has_value());
    (*event)->AckEvents(1);
  }
}

// Answers each message with one of the same size.
void Echo(TestHost& host, TestBuffer& buffer, uint64_t rounds, bool polling) {
  for (uint64_t i = 0; i < rounds; ++i) {
    if (polling) {
      ASSERT_TRUE(PollFor(host, 2 * i + 1));
    } else {
      WaitFor(host, 2 * i + 1);
    }
    ASSERT_EQ(host.Receive(i, {buffer.All()}), 0);
    ASSERT_EQ(host.Send(i, {buffer.All()}), 0);
    if (polling) {
      ASSERT_TRUE(PollFor(host, 2 * i + 2));
    } else {
      WaitFor(host, 2 * i + 2);
    }
  }
}

void PingPong(bool client_polls, bool server_polls) {
  TcpPair pair;
  TestBuffer at_a = pair.a.Register(64);
  TestBuffer at_b = pair.b.Register(64);
  ASSERT_EQ(pair.b.Receive(0, {at_b.All()}), 0);
  std::thread server([&] { Echo(pair.b, at_b, kRounds, server_polls); });
  for (uint64_t i = 0; i < kRounds; ++i) {
    ASSERT_EQ(pair.a.Receive(i, {at_a.All()}), 0);
    ASSERT_EQ(pair.a.Send(i, {at_a.All()}), 0);
    if (client_polls) {
      ASSERT_TRUE(PollFor(pair.a, 2 * i + 2));
    } else {
      WaitFor(pair.a, 2 * i + 2);
    }
  }
  server.join();
  for (const WorkCompletion& completion : pair.a.completions) {
    ASSERT_EQ(completion.status, CompletionStatus::kSuccess);
  }
}

TEST(Progress, PingPongBetweenPollers) {
  PingPong(true, true);
}
TEST(Progress, PingPongBetweenSleepers) {
  PingPong(false, false);
}
TEST(Progress, PingPongBetweenAPollerAndASleeper) {
  PingPong(true, false);
}

TEST(Progress, PollersKeepTheLoopsThreadOut) {
  DeviceProfile profile;
  profile.poll_lease = 5s;  // so that a descheduled poller is not taken for a dead one
  TcpPair pair(profile);
  TestBuffer at_a = pair.a.Register(64);
  TestBuffer at_b = pair.b.Register(64);
  // Both leases live before the first message is under way.
  pair.a.Completed(0);
  pair.b.Completed(0);
  ASSERT_TRUE(Eventually([&] { return pair.b.observer.first_records() == 1 || pair.b.Completed(1); }));
  const uint64_t before = pair.a.qp->counters().pumps_by_loop + pair.b.qp->counters().pumps_by_loop;
  for (uint64_t i = 0; i < 200; ++i) {
    ASSERT_EQ(pair.b.Receive(i, {at_b.All()}), 0);
    ASSERT_EQ(pair.a.Send(i, {at_a.All()}), 0);
    ASSERT_TRUE(Eventually([&] {
      pair.a.Completed(0);
      return pair.b.Completed(i + 1);
    }));
  }
  const uint64_t after = pair.a.qp->counters().pumps_by_loop + pair.b.qp->counters().pumps_by_loop;
  EXPECT_LE(after - before, 2u) << "at most the arming that was under way";
}

TEST(Progress, PassiveTargetMakesProgressWithoutAnyCall) {
  TcpPair pair;
  TestBuffer local = pair.a.Register(100000, kFullAccess, 0x5a);
  TestBuffer remote = pair.b.Register(100000);
  TestBuffer back = pair.a.Register(100000);
  ASSERT_EQ(pair.a.Send(1, {local.All()}, PostOpcode::kWrite, remote.region.stag, remote.address()), 0);
  ASSERT_EQ(pair.a.Send(2, {back.All()}, PostOpcode::kRead, remote.region.stag, remote.address()), 0);
  ASSERT_TRUE(PollFor(pair.a, 2));
  EXPECT_EQ(back.bytes, local.bytes);
}

TEST(Progress, TargetThatStoppedPollingIsTakenOverWhenItsLeaseEnds) {
  TcpPair pair;
  TestBuffer remote = pair.b.Register(1000);
  TestBuffer back = pair.a.Register(1000);
  for (uint64_t i = 0; i < 20; ++i) {
    // One poll, and never again in this round: the stream may be left parked by it.
    pair.b.Completed(0);
    ASSERT_EQ(pair.a.Send(i, {back.All()}, PostOpcode::kRead, remote.region.stag, remote.address()), 0);
    ASSERT_TRUE(PollFor(pair.a, i + 1));
  }
}

TEST(Progress, NotifyEndsTheLeaseAtOnce) {
  DeviceProfile profile;
  profile.poll_lease = 3600s;  // were the lease not ended, the event would never come
  TcpPair pair(profile);
  TestBuffer at_a = pair.a.Register(64);
  TestBuffer at_b = pair.b.Register(64);
  for (uint64_t i = 0; i < 200; ++i) {
    ASSERT_EQ(pair.b.Receive(i, {at_b.All()}), 0);
    WorkCompletion none;
    ASSERT_EQ(pair.b.cq->Poll({&none, 1}), 0u);
    // Half of the time the message comes before the request for an event, so that the stream is parked when it ends the
    // lease.
    const bool early = i % 2 == 0;
    if (early) {
      ASSERT_EQ(pair.a.Send(i, {at_a.All()}), 0);
    }
    pair.b.cq->RequestNotify(false);
    if (!early) {
      ASSERT_EQ(pair.a.Send(i, {at_a.All()}), 0);
    }
    const auto event = pair.b.channel->GetEvent();
    ASSERT_TRUE(event.has_value());
    (*event)->AckEvents(1);
    ASSERT_EQ(pair.b.cq->Poll({&none, 1}), 1u);
    pair.a.Completed(0);
  }
}

// The thread of this process that has this number sleeps.
bool Sleeps(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  std::string stat;
  std::getline(file, stat);
  const size_t name_ends = stat.rfind(')');
  return name_ends != std::string::npos && stat.compare(name_ends, 3, ") S") == 0;
}

// As programs do that end: on hardware the thread sleeps on in read(2). Here it may be the one that moves connections.
TEST(Progress, ADeviceIsClosedWhileAThreadWaitsForItsEvents) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the thread sanitizer does not see what a thread locks that is cancelled in ppoll";
#endif
  TcpPair pair;
  NicContext* const context = *pair.a.nic->OpenContext();
  std::atomic<pid_t> thread{0};
  std::thread waiter([&] {
    thread = gettid();
    EXPECT_FALSE(context->async_events().GetEvent().has_value());
  });
  ASSERT_TRUE(Eventually([&] { return thread != 0 && Sleeps(thread); }));
  ASSERT_EQ(pair.a.nic->CloseContext(context), 0);
  TestBuffer at_a = pair.a.Register(64);
  TestBuffer at_b = pair.b.Register(64);
  for (uint64_t i = 0; i < 20; ++i) {
    ASSERT_EQ(pair.a.Receive(i, {at_a.All()}), 0);
    ASSERT_EQ(pair.b.Send(i, {at_b.All()}), 0);
    WaitFor(pair.a, i + 1);
  }
  ASSERT_EQ(pthread_cancel(waiter.native_handle()), 0);
  waiter.join();
}

TEST(Progress, ManyPostersAndPollersShareOneConnection) {
  TcpPair pair;
  constexpr uint64_t kThreads = 3;
  const uint64_t per_thread = kRounds / 15;
  TestBuffer at_a = pair.a.Register(4096);
  TestBuffer at_b = pair.b.Register(4096);
  std::atomic<uint64_t> received{0};
  std::atomic<uint64_t> sent{0};
  for (uint64_t i = 0; i < 64; ++i) ASSERT_EQ(pair.b.Receive(i, {at_b.Sge(0, 256)}), 0);
  std::atomic<uint64_t> credits{64};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (uint64_t i = 0; i < per_thread;) {
        uint64_t have = credits.load();
        if (have == 0 || !credits.compare_exchange_weak(have, have - 1)) {
          std::this_thread::yield();
          continue;
        }
        while (pair.a.Send(i, {at_a.Sge(0, 200)}) == ENOMEM) std::this_thread::yield();
        ++i;
      }
    });
  }
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      WorkCompletion batch[8];
      while (sent.load() < kThreads * per_thread) {
        const size_t n = pair.a.cq->Poll(batch);
        for (size_t i = 0; i < n; ++i) ASSERT_EQ(batch[i].status, CompletionStatus::kSuccess);
        sent.fetch_add(n);
      }
    });
    threads.emplace_back([&] {
      WorkCompletion batch[8];
      while (received.load() < kThreads * per_thread) {
        const size_t n = pair.b.cq->Poll(batch);
        for (size_t i = 0; i < n; ++i) {
          ASSERT_EQ(batch[i].status, CompletionStatus::kSuccess);
          ASSERT_EQ(pair.b.Receive(0, {at_b.Sge(0, 256)}), 0);
          credits.fetch_add(1);
        }
        received.fetch_add(n);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(received.load(), kThreads * per_thread);
}

TEST(Progress, BulkInBothDirectionsAtOnceDoesNotDeadlock) {
  TcpPair pair;
  constexpr size_t kSize = 1 << 20;
  TestBuffer at_a = pair.a.Register(kSize, kFullAccess, 1);
  TestBuffer at_b = pair.b.Register(kSize, kFullAccess, 2);
  std::thread other([&] {
    for (uint64_t i = 0; i < 16; ++i) {
      ASSERT_EQ(pair.b.Send(i, {at_b.Sge(0, kSize / 2)}, PostOpcode::kWrite, at_a.region.stag, at_a.address()), 0);
    }
    ASSERT_TRUE(PollFor(pair.b, 16));
  });
  for (uint64_t i = 0; i < 16; ++i) {
    ASSERT_EQ(pair.a.Send(i, {at_a.Sge(kSize / 2, kSize / 2)}, PostOpcode::kWrite, at_b.region.stag,
                          at_b.address() + kSize / 2),
              0);
  }
  ASSERT_TRUE(PollFor(pair.a, 16));
  other.join();
}

TEST(Progress, ConnectionsComeAndGoWhileTheirCqIsPolled) {
  TcpFabric fabric;
  TestHost server(fabric, "server");
  std::atomic<bool> stop{false};
  std::thread poller([&] {
    WorkCompletion batch[8];
    while (!stop.load()) server.cq->Poll(batch);
  });
  for (int round = 0; round < 20; ++round) {
    TestHost client(fabric, "client");
    QpCreate create;
    create.pd = server.pd;
    create.send_cq = create.receive_cq = server.cq;
    create.capabilities = {8, 8, 1, 1, 0};
    QueuePair* const qp = *server.nic->CreateQp(*server.context, create);
    QpAttributes attributes;
    attributes.state = QpState::kInit;
    ASSERT_EQ(qp->Modify(attributes, qp_attr::kState | qp_attr::kAccessFlags | qp_attr::kPkeyIndex | qp_attr::kPort),
              0);
    auto [near, far] = TcpStreams(fabric, fabric);
    ASSERT_EQ(server.nic->AttachConnection(qp->qp_number(),
                                           SetupOf(server.nic->fabric(), std::move(far), false, {}, nullptr)),
              0);
    Attach(client, std::move(near), true);
    TestBuffer buffer = client.Register(64);
    TestBuffer sink = server.Register(64);
    ASSERT_EQ(client.Send(1, {buffer.All()}, PostOpcode::kWrite, sink.region.stag, sink.address()), 0);
    ASSERT_EQ(client.Send(2, {buffer.All()}, PostOpcode::kRead, sink.region.stag, sink.address()), 0);
    ASSERT_TRUE(PollFor(client, 2));
    ASSERT_EQ(server.nic->DestroyQp(qp->handle()), 0);
    ASSERT_EQ(server.nic->DeregisterRegion(sink.region.handle), 0);
  }
  stop.store(true);
  poller.join();
}

// One host with a QP for each of many clients, all completing into one CQ.
struct TcpStar {
  explicit TcpStar(size_t count, const DeviceProfile& profile = IwarpProfile())
      : server(fabric, "server", profile), sink(server.Register(64)) {
    for (size_t i = 0; i < count; ++i) AddClient();
  }

  void AddClient() {
    clients.push_back(std::make_unique<TestHost>(fabric, "client"));
    QpCreate create;
    create.pd = server.pd;
    create.send_cq = create.receive_cq = server.cq;
    create.capabilities = {8, 8, 1, 1, 0};
    QueuePair* const qp = *server.nic->CreateQp(*server.context, create);
    qps.push_back(qp);
    QpAttributes attributes;
    attributes.state = QpState::kInit;
    ASSERT_EQ(qp->Modify(attributes, qp_attr::kState | qp_attr::kAccessFlags | qp_attr::kPkeyIndex | qp_attr::kPort),
              0);
    const ScatterGather sge = sink.All();
    for (uint64_t n = 0; n < 8; ++n) ASSERT_EQ(qp->PostReceive({n, {&sge, 1}}), 0);
    auto [near, far] = TcpStreams(fabric, fabric);
    ASSERT_EQ(server.nic->AttachConnection(qp->qp_number(),
                                           SetupOf(server.nic->fabric(), std::move(far), false, {}, nullptr)),
              0);
    Attach(*clients.back(), std::move(near), true);
  }

  // Polls so often that all connections are put aside.
  void LetAllGoIdle() {
    for (int i = 0; i < 1000; ++i) server.Completed(0);
  }

  TcpFabric fabric;
  TestHost server;
  TestBuffer sink;
  std::vector<std::unique_ptr<TestHost>> clients;
  std::vector<QueuePair*> qps;  // the server's, of each client
};

TEST(Progress, ManyIdleConnectionsStillWakeUnderOnePoller) {
  constexpr size_t kClients = 12;
  TcpStar star(kClients);
  for (size_t round = 0; round < 3; ++round) {
    star.LetAllGoIdle();
    for (size_t i = 0; i < kClients; ++i) {
      TestBuffer mine = star.clients[i]->Register(64);
      ASSERT_EQ(star.clients[i]->Send(1, {mine.All()}), 0);
      ASSERT_TRUE(PollFor(star.server, round * kClients + i + 1));
      ASSERT_TRUE(PollFor(*star.clients[i], round + 1));
    }
  }
}

// While the poller lives the loop's thread stays away, however long the poller is descheduled.
DeviceProfile WithoutEndOfLease() {
  DeviceProfile profile = IwarpProfile();
  profile.poll_lease = 3600s;
  return profile;
}

TEST(Progress, IdleConnectionSendsMoreThanOneTurnCanWhileItsCqIsPolled) {
  // The peer only receives, so its end never makes the stream readable: nothing but the poller can go on sending.
  constexpr size_t kSize = 16 << 20;
  TcpStar star(4, WithoutEndOfLease());
  TestBuffer local = star.server.Register(kSize, kFullAccess, 0x5a);
  TestBuffer remote = star.clients[1]->Register(kSize);
  const ScatterGather sge = local.All();
  SendRequest request;
  request.opcode = PostOpcode::kWrite;
  request.signaled = true;
  request.sges = {&sge, 1};
  request.remote_stag = remote.region.stag;
  request.remote_offset = remote.address();
  for (size_t round = 0; round < 3; ++round) {
    star.LetAllGoIdle();
    ASSERT_EQ(star.qps[1]->PostSend(request), 0);
    ASSERT_TRUE(PollFor(star.server, round + 1));
    ASSERT_EQ(star.server.completions.back().status, CompletionStatus::kSuccess);
  }
}

}  // namespace
}  // namespace stagecoach::emu
