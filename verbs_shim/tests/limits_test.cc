// What the device advertises it does, exactly; one more it refuses.

#include <cerrno>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

class LimitsTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    {
      auto probe = OpenDevice();
      ASSERT_TRUE(probe);
      ASSERT_EQ(ibv_query_device(probe->get(), &limits), 0);
    }
    EndpointOptions options;
    options.cap.max_send_sge = options.cap.max_recv_sge = static_cast<uint32_t>(limits.max_sge);
    pair = Pair::Connected(options, options);
    const int rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    ours = std::make_unique<Buffer>(pair->client.pd.get(), 8192, rights);
    theirs = std::make_unique<Buffer>(pair->server.pd.get(), 8192, rights);
    ours->FillPattern(1);
  }
  void TearDown() override {
    ours.reset();
    theirs.reset();
    pair.reset();
    VerbsTest::TearDown();
  }
  // `count` parts of different sizes with gaps between them, and what they hold together.
  std::vector<ibv_sge> Parts(Buffer& buffer, int count) {
    std::vector<ibv_sge> parts;
    size_t at = 0;
    for (int i = 0; i < count; ++i) {
      const size_t size = 1 + static_cast<size_t>(i) * 3 % 17;
      parts.push_back(buffer.Sge(at, size));
      at += size + 5;
    }
    return parts;
  }
  std::string Gathered(const std::vector<ibv_sge>& parts) {
    std::string all;
    for (const ibv_sge& part : parts) all.append(reinterpret_cast<const char*>(part.addr), part.length);
    return all;
  }
  ibv_device_attr limits{};
  std::unique_ptr<Pair> pair;
  std::unique_ptr<Buffer> ours;
  std::unique_ptr<Buffer> theirs;
};

TEST_F(LimitsTest, ASendGathersAndAReceiveScattersAsManyPartsAsAdvertised) {
  const std::vector<ibv_sge> from = Parts(*ours, limits.max_sge);
  const std::vector<ibv_sge> to = Parts(*theirs, limits.max_sge);
  ASSERT_EQ(PostReceive(pair->server.qp(), 1, to), 0);
  ASSERT_EQ(Post(pair->client.qp(), {.wr_id = 2, .sges = from}), 0);
  ExpectCompletion(pair->client.send_cq.get(), 2);
  ExpectCompletion(pair->server.receive_cq.get(), 1);
  EXPECT_EQ(Gathered(to), Gathered(from));
}

TEST_F(LimitsTest, AWriteGathersAsManyPartsAsAdvertised) {
  const std::vector<ibv_sge> from = Parts(*ours, limits.max_sge);
  ASSERT_EQ(Post(pair->client.qp(), {.wr_id = 1,
                                     .opcode = IBV_WR_RDMA_WRITE,
                                     .sges = from,
                                     .remote_address = theirs->address(),
                                     .rkey = theirs->rkey()}),
            0);
  ASSERT_EQ(PostReceive(pair->server.qp(), 1, {theirs->Sge(0, 1)}), 0);
  ASSERT_EQ(Post(pair->client.qp(), {.wr_id = 2, .sges = {}}), 0);
  ExpectCompletion(pair->server.receive_cq.get(), 1);
  const std::string all = Gathered(from);
  EXPECT_EQ(theirs->Text(all.size()), all);
}

TEST_F(LimitsTest, AReadScattersIntoAsManyPartsAsAdvertised) {
  theirs->FillPattern(9);
  const std::vector<ibv_sge> to = Parts(*ours, limits.max_sge_rd);
  ASSERT_EQ(Post(pair->client.qp(), {.wr_id = 1,
                                     .opcode = IBV_WR_RDMA_READ,
                                     .sges = to,
                                     .remote_address = theirs->address(),
                                     .rkey = theirs->rkey()}),
            0);
  ExpectCompletion(pair->client.send_cq.get(), 1);
  const std::string all = Gathered(to);
  EXPECT_EQ(theirs->Text(all.size()), all);
}

TEST_F(LimitsTest, OnePartMoreIsRefusedWhenPosted) {
  const std::vector<ibv_sge> many = Parts(*ours, limits.max_sge + 1);
  EXPECT_EQ(Post(pair->client.qp(), {.sges = many}), EINVAL);
  EXPECT_EQ(Post(pair->client.qp(), {.opcode = IBV_WR_RDMA_WRITE, .sges = many, .remote_address = 0, .rkey = 1}),
            EINVAL);
  EXPECT_EQ(PostReceive(pair->client.qp(), 1, many), EINVAL);
  if (limits.max_sge_rd < limits.max_sge) {
    EXPECT_EQ(Post(pair->client.qp(), {.opcode = IBV_WR_RDMA_READ,
                                       .sges = Parts(*ours, limits.max_sge_rd + 1),
                                       .remote_address = theirs->address(),
                                       .rkey = theirs->rkey()}),
              EINVAL);
  }
}

TEST_F(LimitsTest, AnSrqScattersIntoAsManyPartsAsAdvertised) {
  if (limits.max_srq == 0) GTEST_SKIP() << "skipped: the device has no SRQs";
  SharedQueue srq = CreateSrq(pair->server.pd.get(), 4, static_cast<uint32_t>(limits.max_srq_sge));
  ASSERT_NE(srq, nullptr);
  EndpointOptions sharing;
  sharing.srq = srq.get();
  sharing.cap.max_recv_sge = 0;
  EndpointOptions plain;
  auto second = Pair::Connected(sharing, plain);
  Buffer from(second->client.pd.get(), 8192);
  from.FillPattern(3);
  const std::vector<ibv_sge> to = Parts(*theirs, limits.max_srq_sge);
  size_t room = 0;
  for (const ibv_sge& part : to) room += part.length;
  EXPECT_EQ(PostReceive(srq.get(), 1, Parts(*theirs, limits.max_srq_sge + 1)), EINVAL);
  ASSERT_EQ(PostReceive(srq.get(), 1, to), 0);
  ASSERT_EQ(Post(second->client.qp(), {.wr_id = 2, .sges = {from.Sge(0, room)}}), 0);
  ExpectCompletion(second->server.receive_cq.get(), 1);
  EXPECT_EQ(Gathered(to), from.Text(room));
}

}  // namespace
}  // namespace stagecoach::verbs
