// A network that loses and repeats packets, and receivers that are not always ready: programs on reliable connections
// see nothing of it. (Where the network is a good one, that is all the easier.)

#include <cstring>
#include <memory>

#include "verbs_shim/tests/hand_connected.h"

namespace stagecoach::verbs {
namespace {

class LossTest : public HandTest {
 protected:
  void SetUp() override {
    HandTest::SetUp();
    if (IsSkipped()) return;
    HandOptions options;
    options.timeout = 14;  // 67 ms
    options.min_rnr_timer = 1;
    options.rd_atomic = 4;
    pair = HandPair::Connected(options, options);
    constexpr int kAccess =
        IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    at_server = std::make_unique<Buffer>(pair->server.pd.get(), 64 * 1024, kAccess);
    at_client = std::make_unique<Buffer>(pair->client.pd.get(), 64 * 1024, kAccess);
  }
  void TearDown() override {
    at_server.reset();
    at_client.reset();
    pair.reset();
    HandTest::TearDown();
  }
  ibv_qp* server_qp() { return pair->server.qp.get(); }
  ibv_qp* client_qp() { return pair->client.qp.get(); }
  ibv_cq* sent() { return pair->client.send_cq.get(); }

  std::unique_ptr<HandPair> pair;
  std::unique_ptr<Buffer> at_server;
  std::unique_ptr<Buffer> at_client;
};

TEST_F(LossTest, EachMessageArrivesOnceAndInOrder) {
  constexpr uint64_t kMessages = 300;
  constexpr uint64_t kAhead = 8;
  uint64_t posted = 0;
  for (uint64_t i = 0; i < kMessages; ++i) {
    for (; posted < kMessages && posted < i + kAhead; ++posted) {
      ASSERT_EQ(PostReceive(server_qp(), posted, {at_server->Sge((posted % kAhead) * 4096, 4096)}), 0);
    }
    const size_t size = i % 3 == 0 ? 4000 : 10;
    std::memcpy(at_client->bytes().data(), &i, sizeof(i));
    ASSERT_EQ(Post(client_qp(), {.wr_id = i, .sges = {at_client->Sge(0, size)}}), 0);
    EXPECT_EQ(ExpectCompletion(pair->server.receive_cq.get(), i).byte_len, size);
    uint64_t arrived = 0;
    std::memcpy(&arrived, at_server->bytes().data() + (i % kAhead) * 4096, sizeof(arrived));
    EXPECT_EQ(arrived, i);
    ExpectCompletion(sent(), i);
  }
}

TEST_F(LossTest, EachAtomicIsCarriedOutOnce) {
  constexpr uint64_t kTimes = 200;
  for (uint64_t i = 0; i < kTimes; ++i) {
    ASSERT_EQ(Post(client_qp(), {.wr_id = i,
                                 .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
                                 .sges = {at_client->Sge(0, 8)},
                                 .remote_address = at_server->address(),
                                 .rkey = at_server->rkey(),
                                 .compare_add = 1}),
              0);
    ExpectCompletion(sent(), i);
    uint64_t before = 0;
    std::memcpy(&before, at_client->bytes().data(), sizeof(before));
    EXPECT_EQ(before, i);
  }
}

TEST_F(LossTest, LongWritesAndReadsBringEveryByte) {
  Buffer back(pair->client.pd.get(), at_client->size());
  for (uint32_t round = 0; round < 10; ++round) {
    at_client->FillPattern(round);
    const SendSpec write{.wr_id = 1,
                         .opcode = IBV_WR_RDMA_WRITE,
                         .sges = {at_client->Sge()},
                         .remote_address = at_server->address(),
                         .rkey = at_server->rkey()};
    SendSpec read = write;
    read.wr_id = 2;
    read.opcode = IBV_WR_RDMA_READ;
    read.sges = {back.Sge()};
    ASSERT_EQ(Post(client_qp(), write), 0);
    ASSERT_EQ(Post(client_qp(), read), 0);
    ExpectCompletion(sent(), 1);
    ExpectCompletion(sent(), 2);
    EXPECT_EQ(std::memcmp(back.bytes().data(), at_client->bytes().data(), back.size()), 0) << round;
  }
}

}  // namespace
}  // namespace stagecoach::verbs
