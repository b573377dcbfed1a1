// One seed, one story: the same calls of the stock API in the same simulated world are the same decisions, though heap
// addresses, which travel on the wire as RDMA addresses, differ from run to run.

#include <memory>

#include "verbs_shim/tests/harness.h"
#include "verbs_shim/tests/simulated_surroundings.h"

namespace stagecoach::verbs {
namespace {

constexpr int kRemoteAll = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;

void LiveThrough() {
  auto pair = Pair::Connected();
  Buffer theirs(pair->server.pd.get(), 100000, kRemoteAll);
  Buffer ours(pair->client.pd.get(), 100000, kRemoteAll);
  for (uint64_t i = 0; i < 5; ++i) {
    ASSERT_EQ(PostReceive(pair->server.qp(), i, {theirs.Sge(0, 1000)}), 0);
    ASSERT_EQ(Post(pair->client.qp(), {.wr_id = 1,
                                       .opcode = IBV_WR_RDMA_WRITE,
                                       .flags = 0,
                                       .sges = {ours.Sge()},
                                       .remote_address = theirs.address(),
                                       .rkey = theirs.rkey()}),
              0);
    ASSERT_EQ(Post(pair->client.qp(), {.wr_id = 2,
                                       .opcode = IBV_WR_RDMA_READ,
                                       .sges = {ours.Sge(0, 30000)},
                                       .remote_address = theirs.address(),
                                       .rkey = theirs.rkey()}),
              0);
    ASSERT_EQ(Post(pair->client.qp(), {.wr_id = 3, .sges = {ours.Sge(0, 700)}}), 0);
    ExpectCompletion(pair->server.receive_cq.get(), i);
    ExpectCompletion(pair->client.send_cq.get(), 2);
    ExpectCompletion(pair->client.send_cq.get(), 3);
  }
  // A fault is part of the story, too.
  ASSERT_EQ(Post(pair->client.qp(),
                 {.wr_id = 4, .opcode = IBV_WR_RDMA_READ, .sges = {ours.Sge(0, 8)}, .remote_address = 0, .rkey = 1}),
            0);
  ExpectCompletion(pair->client.send_cq.get(), 4, IBV_WC_REM_ACCESS_ERR);
  pair->server.ExpectEvent(RDMA_CM_EVENT_DISCONNECTED);
  pair->client.ExpectEvent(RDMA_CM_EVENT_DISCONNECTED);
}

TEST(Determinism, TheSameSeedIsTheSameStory) {
  uint64_t hashes[2] = {};
  std::unique_ptr<std::byte[]> disturbance[2];
  for (int run = 0; run < 2; ++run) {
    // Moves the heap on, so that no address repeats.
    disturbance[run] = std::make_unique<std::byte[]>(100000);
    TheSurroundings().Begin();
    LiveThrough();
    hashes[run] = SimulatedTrace().value();
    EXPECT_GT(SimulatedTrace().events(), 50u);
    TheSurroundings().End();
  }
  EXPECT_EQ(hashes[0], hashes[1]);
}

}  // namespace
}  // namespace stagecoach::verbs
