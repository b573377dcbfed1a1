// Many threads at once on the same objects, and on objects of their own.

#include <poll.h>

#include <atomic>
#include <cerrno>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

constexpr int kThreads = 4;

class ConcurrencyTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    if (!world().HasThreads()) GTEST_SKIP() << "skipped: needs threads";
  }
  // Takes what is there; false if nothing was.
  static bool Take(ibv_cq* cq, ibv_wc* completion) {
    const int polled = ibv_poll_cq(cq, 1, completion);
    EXPECT_GE(polled, 0);
    return polled == 1;
  }
  static void InThreads(const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) threads.emplace_back(body, t);
    for (std::thread& thread : threads) thread.join();
  }
};

// Each request completes once, those of one poster in its order, whoever polls.
TEST_F(ConcurrencyTest, ManyThreadsPostToOneQpAndPollItsCq) {
  constexpr uint64_t kEach = 200;
  EndpointOptions options;
  options.cq_entries = 256;
  auto pair = Pair::Connected({}, options);
  Buffer theirs(pair->server.pd.get(), 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
  Buffer ours(pair->client.pd.get(), 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  std::mutex mutex;
  std::vector<uint64_t> order[kThreads];
  std::atomic<uint64_t> completed = 0;
  std::atomic<bool> failed = false;
  InThreads([&](int t) {
    for (uint64_t posted = 0; completed.load() < kThreads * kEach && !failed;) {
      if (posted < kEach) {
        const auto offset = static_cast<size_t>(t) * 64;
        const int error = Post(pair->client.qp(), {.wr_id = static_cast<uint64_t>(t) << 32 | posted,
                                                   .opcode = posted % 3 == 0 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE,
                                                   .sges = {ours.Sge(offset, 64)},
                                                   .remote_address = theirs.address() + offset,
                                                   .rkey = theirs.rkey()});
        EXPECT_TRUE(error == 0 || error == ENOMEM) << error;
        posted += error == 0;
      }
      // Completions are taken and put down under one lock: else two pollers could not tell which came first.
      std::lock_guard lock(mutex);
      for (ibv_wc completion; Take(pair->client.send_cq.get(), &completion);) {
        EXPECT_EQ(completion.status, IBV_WC_SUCCESS);
        if (completion.status != IBV_WC_SUCCESS) failed = true;
        order[completion.wr_id >> 32].push_back(completion.wr_id & 0xffffffff);
        ++completed;
      }
    }
  });
  for (const std::vector<uint64_t>& of_thread : order) {
    ASSERT_EQ(of_thread.size(), kEach);
    for (uint64_t i = 0; i < kEach; ++i) ASSERT_EQ(of_thread[i], i);
  }
}

// Without any lock of the program's: each completion goes to one of the pollers.
TEST_F(ConcurrencyTest, EachCompletionIsTakenByOneOfManyPollers) {
  constexpr uint64_t kMessages = 600;
  EndpointOptions options;
  auto pair = Pair::Connected(options, options);
  Buffer inbox(pair->server.pd.get(), 8);
  std::mutex mutex;
  std::set<uint64_t> seen;
  std::atomic<uint64_t> taken = 0;
  std::atomic<uint64_t> posted = 0;
  InThreads([&](int t) {
    std::vector<uint64_t> mine;
    for (ibv_wc completion; taken.load() < kMessages;) {
      if (t == 0 && posted < kMessages && posted - taken.load() < 16) {
        ASSERT_EQ(PostReceive(pair->server.qp(), posted, {inbox.Sge()}), 0);
        // Now and then room is made by looking.
        while (true) {
          const int error = Post(pair->client.qp(), {.wr_id = posted});
          if (error == 0) break;
          ASSERT_EQ(error, ENOMEM);
          while (Take(pair->client.send_cq.get(), &completion)) {
          }
        }
        ++posted;
        while (Take(pair->client.send_cq.get(), &completion)) {
        }
      }
      if (!Take(pair->server.receive_cq.get(), &completion)) continue;
      EXPECT_EQ(completion.status, IBV_WC_SUCCESS);
      mine.push_back(completion.wr_id);
      ++taken;
    }
    std::lock_guard lock(mutex);
    for (const uint64_t wr_id : mine) EXPECT_TRUE(seen.insert(wr_id).second) << wr_id << " was taken twice";
  });
  EXPECT_EQ(seen.size(), kMessages);
}

// Connections come and go in all threads at once, each with something on its way.
TEST_F(ConcurrencyTest, ConnectionsComeAndGoInManyThreads) {
  constexpr int kRounds = 5;
  InThreads([&](int t) {
    for (int round = 0; round < kRounds; ++round) {
      auto pair = Pair::Connected();
      Buffer from(pair->client.pd.get(), 20000, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
      Buffer to(pair->server.pd.get(), 20000,
                IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
      from.FillPattern(static_cast<uint32_t>(t * kRounds + round));
      ASSERT_EQ(PostReceive(pair->server.qp(), 1, {to.Sge()}), 0);
      ASSERT_EQ(Post(pair->client.qp(), {.wr_id = 2, .sges = {from.Sge()}}), 0);
      EXPECT_EQ(ExpectCompletion(pair->server.receive_cq.get(), 1).byte_len, from.size());
      ExpectCompletion(pair->client.send_cq.get(), 2);
      EXPECT_EQ(to.Text(to.size()), from.Text(from.size()));
      // What is on its way when the QPs go is nobody's.
      for (uint64_t i = 0; i < 4; ++i) {
        ASSERT_EQ(Post(pair->client.qp(), {.wr_id = i,
                                           .opcode = IBV_WR_RDMA_READ,
                                           .sges = {from.Sge()},
                                           .remote_address = to.address(),
                                           .rkey = to.rkey()}),
                  0);
      }
      if (round % 2 == 0) {
        pair->server.DestroyQp();
      } else {
        pair->client.DestroyQp();
      }
    }
  });
}

// A thread that sleeps on a completion channel is woken by what others bring about.
TEST_F(ConcurrencyTest, SleepersAreWokenWhileOthersPoll) {
  constexpr uint64_t kMessages = 300;
  auto pair = Pair::Connected();
  Buffer inbox(pair->server.pd.get(), 8);
  ibv_cq* const cq = pair->server.receive_cq.get();
  ASSERT_EQ(ibv_req_notify_cq(cq, 0), 0);
  std::atomic<uint64_t> received = 0;
  std::thread sleeper([&] {
    while (received < kMessages) {
      pollfd wait{.fd = pair->server.receive_channel->fd, .events = POLLIN, .revents = 0};
      ASSERT_EQ(poll(&wait, 1, /*milliseconds=*/10000), 1) << "not woken after " << received;
      ibv_cq* ready = nullptr;
      void* cookie = nullptr;
      ASSERT_EQ(ibv_get_cq_event(pair->server.receive_channel.get(), &ready, &cookie), 0);
      ibv_ack_cq_events(ready, 1);
      ASSERT_EQ(ibv_req_notify_cq(cq, 0), 0);
      for (ibv_wc completion; Take(cq, &completion);) {
        EXPECT_EQ(completion.wr_id, received);
        EXPECT_EQ(completion.status, IBV_WC_SUCCESS);
        ++received;
      }
    }
  });
  for (uint64_t i = 0; i < kMessages; ++i) {
    EXPECT_EQ(PostReceive(pair->server.qp(), i, {inbox.Sge()}), 0);
    EXPECT_EQ(Post(pair->client.qp(), {.wr_id = i}), 0);
    ExpectCompletion(pair->client.send_cq.get(), i);
    // Not further ahead of the sleeper than its Receive queue is long.
    if (!world().Until([&] { return i < received + 16; })) break;
  }
  sleeper.join();
}

}  // namespace
}  // namespace stagecoach::verbs
