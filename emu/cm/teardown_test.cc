// QPs that are destroyed while the manager reaches for them, on real threads: a program may destroy a QP with
// ibv_destroy_qp whenever it likes, also while a peer goes, an RTR is overdue, or another thread disconnects its id.

#include <fcntl.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "emu/backend/tcp/tcp_fabric.h"
#include "emu/cm/cm_threads_test_support.h"
#include "emu/engine/qp_states.h"

namespace stagecoach::emu {
namespace {

constexpr int kRounds = 150;

class Host final : public LoopbackHost {
 public:
  explicit Host(const CmOptions& options = {}) : LoopbackHost(IwarpProfile(), options) {}

  std::shared_ptr<CmId> Connecting(const IpEndpoint& to, QueuePair* qp) {
    return LoopbackHost::Connecting(to, qp, channel());
  }
  std::optional<CmEvent> Await(CmEventType type) { return LoopbackHost::Await(*channel(), type); }

  // Accepts the next request on `qp`; events about other ids are dropped.
  std::shared_ptr<CmId> Accept(QueuePair* qp) {
    std::optional<CmEvent> request = Await(CmEventType::kConnectRequest);
    if (!request) return nullptr;
    EXPECT_EQ(cm().SetQp(request->id, qp->qp_number()), 0);
    EXPECT_EQ(cm().Accept(request->id, {}), 0);
    return request->id;
  }

  // The same for a request that comes over the peer's `stream`; null when that has ended without one being told.
  std::shared_ptr<CmId> AcceptFrom(Stream& stream, QueuePair* qp) {
    EXPECT_EQ(fcntl(channel()->fd(), F_SETFL, O_NONBLOCK), 0);
    std::byte answer{};
    const MutableBytes room(&answer, 1);
    for (;;) {
      // In this order: what the stream told before its end has been told by then.
      const bool ended = stream.Read({&room, 1}).status != IoStatus::kWouldBlock;
      if (auto id = Accept(qp); id != nullptr || ended) return id;
      std::this_thread::yield();
    }
  }
};

class TeardownTest : public ::testing::Test {
 protected:
  void Connect() {
    client_qp_ = client_.NewQp();
    server_qp_ = server_.NewQp();
    client_id_ = client_.Connecting(server_.cm().Describe(*listener_).local, client_qp_);
    server_id_ = server_.Accept(server_qp_);
    ASSERT_NE(server_id_, nullptr);
    ASSERT_TRUE(client_.Await(CmEventType::kEstablished));
    ASSERT_TRUE(server_.Await(CmEventType::kEstablished));
  }

  Host server_;
  Host client_;
  std::shared_ptr<CmId> listener_ = server_.Listening(8);
  QueuePair* client_qp_ = nullptr;
  QueuePair* server_qp_ = nullptr;
  std::shared_ptr<CmId> client_id_;
  std::shared_ptr<CmId> server_id_;
};

TEST_F(TeardownTest, AQpMayGoWhileItsIdDisconnects) {
  for (int round = 0; round < kRounds; ++round) {
    Connect();
    const uint32_t handle = client_qp_->handle();
    Together([&] { EXPECT_EQ(client_.nic().DestroyQp(handle), 0); },
             [&] {
               // Too late, or in time: both are fine.
               const int error = client_.cm().Disconnect(client_id_);
               EXPECT_TRUE(error == 0 || error == EINVAL) << error;
             });
    ASSERT_TRUE(server_.Await(CmEventType::kDisconnected));
    client_.cm().Destroy(client_id_);
    server_.cm().Destroy(server_id_);
    EXPECT_EQ(server_.nic().DestroyQp(server_qp_->handle()), 0);
  }
}

TEST_F(TeardownTest, AQpMayGoWhileItsIdIsDestroyedAndItsPeerLeaves) {
  for (int round = 0; round < kRounds; ++round) {
    Connect();
    const uint32_t handle = client_qp_->handle();
    // The end of the peer's stream puts the client's observer to work.
    EXPECT_EQ(server_.cm().Disconnect(server_id_), 0);
    Together(
        [&] {
          client_.cm().ForgetQp(client_qp_->qp_number());
          EXPECT_EQ(client_.nic().DestroyQp(handle), 0);
        },
        [&] { client_.cm().Destroy(client_id_); });
    client_id_.reset();
    server_.cm().Destroy(server_id_);
    EXPECT_EQ(server_.nic().DestroyQp(server_qp_->handle()), 0);
  }
}

// The loop's thread gives up the connection at the moment the program does.
TEST(TeardownOfAnOverdueConnectionTest, AQpMayGoWhenItsReadyToReceiveMessageIsOverdue) {
  using Clock = std::chrono::steady_clock;
  CmOptions options;
  options.request_timeout = 20ms;
  Host server(options);
  TcpFabric stranger;
  const std::shared_ptr<CmId> listener = server.Listening(8);
  int attempts = 0;
  for (int round = 0; round < 40;) {
    ASSERT_LT(++attempts, 4000);
    std::mutex mutex;
    std::condition_variable changed;
    std::unique_ptr<Stream> stream;
    auto attempt = stranger.Connect({}, server.cm().Describe(*listener).local,
                                    [&](Result<std::unique_ptr<Stream>, FabricError> result) {
                                      std::lock_guard lock(mutex);
                                      ASSERT_TRUE(result);
                                      stream = std::move(*result);
                                      changed.notify_all();
                                    });
    std::unique_lock lock(mutex);
    ASSERT_TRUE(changed.wait_for(lock, std::chrono::seconds(10), [&] { return stream != nullptr; }));
    lock.unlock();
    // An enhanced request (RFC 6581) for peer-to-peer mode; its RTR never comes.
    const std::string request = "MPA ID Req Frame" + std::string("\x10\x02\x00\x04\x80\x08\xc0\x08", 8);
    const ConstBytes bytes = AsBytes(request);
    ASSERT_EQ(stream->Write({&bytes, 1}).bytes, request.size());
    QueuePair* const qp = server.NewQp();
    const std::shared_ptr<CmId> id = server.AcceptFrom(*stream, qp);
    const auto begin = Clock::now();
    if (id == nullptr) {
      // On a busy machine the request itself may be overdue before it is read.
      EXPECT_EQ(server.nic().DestroyQp(qp->handle()), 0);
      continue;
    }
    // From a little before to a little after the limit.
    const auto moment = begin + options.request_timeout + std::chrono::microseconds(50 * (round - 10));
    while (Clock::now() < moment) std::this_thread::yield();
    EXPECT_EQ(server.nic().DestroyQp(qp->handle()), 0);
    server.cm().Destroy(id);
    ++round;
  }
  server.cm().Destroy(listener);
}

}  // namespace
}  // namespace stagecoach::emu
