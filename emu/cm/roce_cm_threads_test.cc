// InfiniBand's connection manager among threads, over real TCP on the loopback interface: calls of programs against
// what peers say at the same moment. The races here are what the thread sanitizer is for.

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "emu/cm/cm_threads_test_support.h"
#include "emu/engine/qp_states.h"

namespace stagecoach::emu {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kRounds = 40;
#else
constexpr int kRounds = 200;
#endif

// Slots of this process's own, whatever else runs on the machine.
DeviceProfile Profile() {
  constexpr uint16_t kBlock = 16;
  constexpr int kBlocks = 200;
  DeviceProfile profile = RoceProfile();
  profile.port_base = static_cast<uint16_t>(16000 + getpid() % kBlocks * kBlock);
  profile.port_count = kBlock;
  return profile;
}

class Process final : public LoopbackHost {
 public:
  Process() : LoopbackHost(Profile(), {.time_wait = 1ms}) {}
  void Drop(QueuePair* qp) {
    cm().ForgetQp(qp->qp_number());
    EXPECT_EQ(nic().DestroyQp(qp->handle()), 0);
  }
};

// A request that its listener's program has, and a QP at either end.
struct Asked {
  Asked(Process& initiator_process, Process& responder_process, const std::shared_ptr<CmId>& listener,
        const std::shared_ptr<CmChannel>& channel)
      : client(initiator_process),
        server(responder_process),
        ours(client.NewQp()),
        theirs(server.NewQp()),
        initiator(client.Connecting(server.cm().Describe(*listener).local, ours, channel)) {
    const auto request = Process::Await(*server.channel(), CmEventType::kConnectRequest);
    if (!request) return;
    responder = request->id;
    EXPECT_EQ(server.cm().SetQp(responder, theirs->qp_number()), 0);
  }
  ~Asked() {
    if (responder != nullptr) server.cm().Destroy(responder);
    client.Drop(ours);
    server.Drop(theirs);
  }
  Asked(const Asked&) = delete;
  Asked& operator=(const Asked&) = delete;

  Process& client;
  Process& server;
  QueuePair* const ours;
  QueuePair* const theirs;
  const std::shared_ptr<CmId> initiator;
  std::shared_ptr<CmId> responder;
};

TEST(RoceCmThreads, AnAcceptThatFailsLeavesNoQpReadyToSend) {
  Process server;
  Process client;
  const auto listener = server.Listening();
  const auto channel = client.cm().CreateChannel();
  for (int round = 0; round < kRounds; ++round) {
    Asked asked(client, server, listener, channel);
    ASSERT_NE(asked.responder, nullptr);
    int error = 0;
    Together([&] { error = server.cm().Accept(asked.responder, {}); }, [&] { client.cm().Destroy(asked.initiator); });
    if (error == 0) {
      // Rejected while the answer was on its way, or by then a connection.
      std::optional<CmEvent> last;
      do {
        last = Process::Next(*server.channel());
        ASSERT_TRUE(last);
      } while (last->type == CmEventType::kEstablished);
      if (last->type == CmEventType::kRejected) {
        EXPECT_EQ(asked.theirs->state(), QpState::kErr);
      } else {
        EXPECT_EQ(last->type, CmEventType::kDisconnected) << ToString(last->type);
      }
    } else {
      // Withdrawn before the call, or while it prepared the QP.
      EXPECT_EQ(error, EINVAL);
      const QpState state = asked.theirs->state();
      EXPECT_TRUE(state == QpState::kInit || state == QpState::kErr) << static_cast<int>(state);
    }
  }
  server.cm().Destroy(listener);
}

TEST(RoceCmThreads, AQpThatGoesWhileItIsAcceptedIsNamedOrTheCallFails) {
  constexpr int kSpins = 10000 / kRounds;  // more than the call takes, in the last round
  Process server;
  Process client;
  const auto listener = server.Listening();
  const auto channel = client.cm().CreateChannel();
  for (int round = 0; round < kRounds; ++round) {
    Asked asked(client, server, listener, channel);
    ASSERT_NE(asked.responder, nullptr);
    int error = 0;
    Together([&] { error = server.cm().Accept(asked.responder, {}); },
             [&] {
               // A little later each time, so that some rounds hit the middle of the call.
               std::atomic<int> spent{0};
               while (spent.fetch_add(1) < round * kSpins) {
               }
               server.cm().ForgetQp(asked.theirs->qp_number());
             });
    if (error != 0) {
      EXPECT_EQ(server.cm().Reject(asked.responder, {}), 0);
    }
    const auto heard = Process::Next(*channel);
    ASSERT_TRUE(heard);
    EXPECT_EQ(heard->type, error == 0 ? CmEventType::kEstablished : CmEventType::kRejected) << ToString(heard->type);
    if (error == 0) {
      EXPECT_EQ(heard->parameters.qp_number, asked.theirs->qp_number());
    }
    client.cm().Destroy(asked.initiator);
  }
  server.cm().Destroy(listener);
}

TEST(RoceCmThreads, ConnectionsOfManyThreadsComeAndGo) {
  constexpr int kThreads = 3;
  Process server;
  Process client;
  const auto listener = server.Listening();
  const IpEndpoint to = server.cm().Describe(*listener).local;
  std::atomic<int> established{0};
  std::thread serving([&] {
    // Each connection ends here as well, by its own DISCONNECTED.
    std::vector<std::pair<std::shared_ptr<CmId>, QueuePair*>> open;
    for (int over = 0; over < kThreads * kRounds / 4;) {
      auto event = Process::Next(*server.channel());
      ASSERT_TRUE(event);
      if (event->type == CmEventType::kConnectRequest) {
        QueuePair* const qp = server.NewQp();
        EXPECT_EQ(server.cm().SetQp(event->id, qp->qp_number()), 0);
        EXPECT_EQ(server.cm().Accept(event->id, {}), 0);
        open.emplace_back(event->id, qp);
        continue;
      }
      if (event->type != CmEventType::kDisconnected) continue;
      EXPECT_EQ(server.cm().Disconnect(event->id), 0);
      for (auto it = open.begin(); it != open.end(); ++it) {
        if (it->first != event->id) continue;
        QueuePair* const qp = it->second;
        open.erase(it);
        std::thread destroyer([&] { server.cm().Destroy(event->id); });
        server.Drop(qp);
        destroyer.join();
        break;
      }
      ++over;
    }
  });
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      const auto channel = client.cm().CreateChannel();
      for (int round = 0; round < kRounds / 4; ++round) {
        QueuePair* const qp = client.NewQp();
        const auto id = client.Connecting(to, qp, channel);
        auto event = Process::Next(*channel);
        ASSERT_TRUE(event);
        ASSERT_EQ(event->type, CmEventType::kEstablished) << event->status;
        ++established;
        if (round % 2 == 0) {
          EXPECT_EQ(client.cm().Disconnect(id), 0);
          EXPECT_TRUE(Process::Await(*channel, CmEventType::kDisconnected));
        }
        client.cm().Destroy(id);
        client.Drop(qp);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  serving.join();
  EXPECT_EQ(established.load(), kThreads * (kRounds / 4));
  server.cm().Destroy(listener);
}

// By the system's names, and not by anything that the two share.
TEST(RoceCmThreads, APortIsOneProcessOfTheHostAndFoundThere) {
  Process first;
  Process second;
  Process client;
  const auto of_first = first.Listening();
  const auto of_second = second.Listening();
  const IpEndpoint to_first = first.cm().Describe(*of_first).local;
  const IpEndpoint to_second = second.cm().Describe(*of_second).local;
  EXPECT_NE(to_first.port, to_second.port);
  EXPECT_EQ(second.cm().Bind(second.cm().CreateId(second.channel()), to_first), EADDRINUSE);
  const auto channel = client.cm().CreateChannel();
  for (const auto& [to, process] : {std::pair(to_second, &second), std::pair(to_first, &first)}) {
    QueuePair* const ours = client.NewQp();
    const auto id = client.Connecting(to, ours, channel);
    auto request = Process::Await(*process->channel(), CmEventType::kConnectRequest);
    ASSERT_TRUE(request);
    EXPECT_EQ(process->cm().Reject(request->id, {}), 0);
    EXPECT_TRUE(Process::Await(*channel, CmEventType::kRejected));
    process->cm().Destroy(request->id);
    client.cm().Destroy(id);
    client.Drop(ours);
  }
  // Where somebody has it and nobody listens.
  const auto bound = first.cm().CreateId(first.channel());
  ASSERT_EQ(first.cm().Bind(bound, *IpEndpoint::Parse("127.0.0.1", 0)), 0);
  const auto id = client.Connecting(first.cm().Describe(*bound).local, client.NewQp(), channel);
  EXPECT_TRUE(Process::Await(*channel, CmEventType::kRejected));
  client.cm().Destroy(id);
  first.cm().Destroy(bound);
}

TEST(RoceCmThreads, AListenerMayGoWhileRequestsCome) {
  Process server;
  Process client;
  const auto channel = client.cm().CreateChannel();
  for (int round = 0; round < kRounds / 4; ++round) {
    const auto listener = server.Listening();
    const IpEndpoint to = server.cm().Describe(*listener).local;
    QueuePair* const qp = client.NewQp();
    std::shared_ptr<CmId> id;
    Together([&] { id = client.Connecting(to, qp, channel); }, [&] { server.cm().Destroy(listener); });
    auto event = Process::Next(*channel);
    ASSERT_TRUE(event);
    EXPECT_EQ(event->type, CmEventType::kRejected) << ToString(event->type);
    client.cm().Destroy(id);
    client.Drop(qp);
  }
}

}  // namespace
}  // namespace stagecoach::emu
