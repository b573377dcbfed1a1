// What ibv_query_device advertises is there, to the last one, and not one more: of any device, by its own word. Where a
// limit is so high that nobody would make that many, as those of the kernel's software devices, it is not tried.

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "verbs_shim/tests/hand_connected.h"

namespace stagecoach::verbs {
namespace {

constexpr int kMostObjects = 100000;
constexpr uint64_t kMostBytes = 16 << 20;
constexpr int kMostEntries = 100000;

class CapacitiesTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    context = std::move(OpenDevice().value());
    ASSERT_EQ(ibv_query_device(context.get(), &limits), 0);
    ASSERT_EQ(ibv_query_port(context.get(), 1, &port), 0);
  }
  void TearDown() override {
    context = {};
    VerbsTest::TearDown();
  }

  // An object, kept until this goes; null and errno if it was refused.
  using Object = std::shared_ptr<void>;
  template <typename T>
  static Object Keep(T* object, int (*destroy)(T*)) {
    if (object == nullptr) return nullptr;
    return Object(object, [destroy](void* kept) { EXPECT_EQ(destroy(static_cast<T*>(kept)), 0); });
  }
  // `advertised` of them can be made, or less by as many as may be in use already. One more is ENOMEM, and can be made
  // when another one has gone.
  static void ExpectExactly(const char* what, int advertised, const std::function<Object()>& make, int in_use = 0) {
    SCOPED_TRACE(what);
    ASSERT_GE(advertised, 0);
    if (advertised > kMostObjects) return;
    std::vector<Object> made;
    for (int i = 0; i < advertised; ++i) {
      Object object = make();
      if (object == nullptr && i >= advertised - in_use) break;
      ASSERT_NE(object, nullptr) << i << " of " << advertised << ", " << std::strerror(errno);
      made.push_back(std::move(object));
    }
    errno = 0;
    EXPECT_EQ(make(), nullptr) << "more than " << advertised;
    if (advertised == 0) {
      EXPECT_EQ(errno, EOPNOTSUPP) << std::strerror(errno);
      return;
    }
    EXPECT_EQ(errno, ENOMEM) << std::strerror(errno);
    made.pop_back();
    EXPECT_NE(make(), nullptr) << "one has gone";
  }
  // A size: the largest is taken, one more is EINVAL.
  static void ExpectUpTo(const char* what, int64_t largest, const std::function<int(int64_t)>& make) {
    SCOPED_TRACE(what);
    EXPECT_EQ(make(largest), 0);
    EXPECT_EQ(make(largest + 1), EINVAL);
  }

  ibv_qp_init_attr QpAttributes(ibv_cq* cq) const {
    ibv_qp_init_attr attributes{};
    attributes.send_cq = attributes.recv_cq = cq;
    attributes.qp_type = IBV_QPT_RC;
    attributes.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    return attributes;
  }
  static void ToInit(ibv_qp* qp) {
    ibv_qp_attr change{};
    change.qp_state = IBV_QPS_INIT;
    change.port_num = 1;
    ASSERT_EQ(ibv_modify_qp(qp, &change, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), 0);
  }
  static void ToError(ibv_qp* qp) {
    ibv_qp_attr change{};
    change.qp_state = IBV_QPS_ERR;
    ASSERT_EQ(ibv_modify_qp(qp, &change, IBV_QP_STATE), 0);
  }

  Context context;
  ibv_device_attr limits{};
  ibv_port_attr port{};
};

TEST_F(CapacitiesTest, Objects) {
  ibv_context* const device = context.get();
  ExpectExactly("max_pd", limits.max_pd, [&] { return Keep(ibv_alloc_pd(device), ibv_dealloc_pd); });
  ExpectExactly("max_cq", limits.max_cq,
                [&] { return Keep(ibv_create_cq(device, 1, nullptr, nullptr, 0), ibv_destroy_cq); });
  auto pd = AllocatePd(device);
  auto cq = CreateCq(device, 1);
  ASSERT_TRUE(pd && cq);
  std::byte memory[64];
  ExpectExactly("max_mr", limits.max_mr, [&] {
    return Keep(ibv_reg_mr(pd->get(), memory, sizeof(memory), int{IBV_ACCESS_LOCAL_WRITE}), ibv_dereg_mr);
  });
  ExpectExactly("max_mw", limits.max_mw, [&] { return Keep(ibv_alloc_mw(pd->get(), IBV_MW_TYPE_1), ibv_dealloc_mw); });
  ExpectExactly("max_srq", limits.max_srq, [&] {
    ibv_srq_init_attr attributes{};
    attributes.attr = {.max_wr = 1, .max_sge = 1, .srq_limit = 0};
    return Keep(ibv_create_srq(pd->get(), &attributes), ibv_destroy_srq);
  });
  // The two special QPs of the port may count.
  ExpectExactly(
      "max_qp", limits.max_qp,
      [&] {
        ibv_qp_init_attr attributes = QpAttributes(cq->get());
        return Keep(ibv_create_qp(pd->get(), &attributes), ibv_destroy_qp);
      },
      limits.max_qp > 2 ? 2 : 0);
}

TEST_F(CapacitiesTest, Sizes) {
  auto pd = AllocatePd(context.get());
  auto cq = CreateCq(context.get(), 1);
  ASSERT_TRUE(pd && cq);
  ExpectUpTo("max_cqe", limits.max_cqe, [&](int64_t entries) {
    auto large = CreateCq(context.get(), static_cast<int>(entries));
    return large ? 0 : large.error().error;
  });
  ExpectUpTo("max_cqe, later", limits.max_cqe,
             [&](int64_t entries) { return ibv_resize_cq(cq->get(), static_cast<int>(entries)); });
  const auto qp = [&](uint32_t ibv_qp_cap::*capacity) {
    return [&, capacity](int64_t wanted) {
      ibv_qp_init_attr attributes = QpAttributes(cq->get());
      attributes.cap.*capacity = static_cast<uint32_t>(wanted);
      auto large = CreateQp(pd->get(), &attributes);
      if (large) {
        EXPECT_GE(attributes.cap.*capacity, wanted);
      }
      return large ? 0 : large.error().error;
    };
  };
  ExpectUpTo("max_qp_wr, sends", limits.max_qp_wr, qp(&ibv_qp_cap::max_send_wr));
  ExpectUpTo("max_qp_wr, Receives", limits.max_qp_wr, qp(&ibv_qp_cap::max_recv_wr));
  ExpectUpTo("max_sge, sends", limits.max_sge, qp(&ibv_qp_cap::max_send_sge));
  ExpectUpTo("max_sge, Receives", limits.max_sge, qp(&ibv_qp_cap::max_recv_sge));
  if (limits.max_srq > 0) {
    const auto srq = [&](uint32_t wr, uint32_t sge) {
      errno = 0;
      return CreateSrq(pd->get(), wr, sge) != nullptr ? 0 : errno;
    };
    ExpectUpTo("max_srq_wr", limits.max_srq_wr, [&](int64_t wanted) { return srq(static_cast<uint32_t>(wanted), 1); });
    ExpectUpTo("max_srq_sge", limits.max_srq_sge,
               [&](int64_t wanted) { return srq(1, static_cast<uint32_t>(wanted)); });
    const SharedQueue one = CreateSrq(pd->get(), 1, 1);
    ExpectUpTo("max_srq_wr, later", limits.max_srq_wr, [&](int64_t wanted) {
      ibv_srq_attr change{.max_wr = static_cast<uint32_t>(wanted), .max_sge = 0, .srq_limit = 0};
      return ibv_modify_srq(one.get(), &change, IBV_SRQ_MAX_WR);
    });
  }
  if (limits.max_mr_size > kMostBytes) return;
  std::vector<std::byte> memory(limits.max_mr_size + 1);
  ExpectUpTo("max_mr_size", static_cast<int64_t>(limits.max_mr_size), [&](int64_t size) {
    auto region = RegisterMemory(pd->get(), memory.data(), static_cast<size_t>(size), IBV_ACCESS_LOCAL_WRITE);
    return region ? 0 : region.error().error;
  });
}

// The largest queues hold what they say; of a CQ one that takes what several of them flush.
TEST_F(CapacitiesTest, Queues) {
  auto pd = AllocatePd(context.get());
  auto cq = CreateCq(context.get(), std::min(limits.max_cqe, kMostEntries));
  ASSERT_TRUE(pd && cq);
  // Receives of nothing, of as many QPs as it takes to fill the CQ when they are flushed.
  uint64_t posted = 0;
  const auto capacity = static_cast<uint64_t>((*cq)->cqe);
  std::vector<QueuePair> qps;
  while (posted < capacity) {
    ibv_qp_init_attr attributes = QpAttributes(cq->get());
    attributes.cap.max_recv_wr = static_cast<uint32_t>(limits.max_qp_wr);
    auto qp = CreateQp(pd->get(), &attributes);
    ASSERT_TRUE(qp) << qp.error().ToString();
    ASSERT_NO_FATAL_FAILURE(ToInit(qp->get()));
    for (uint32_t i = 0; i < attributes.cap.max_recv_wr && posted < capacity; ++i) {
      ASSERT_EQ(PostReceive(qp->get(), posted++, {}), 0);
    }
    if (posted < capacity) {
      EXPECT_EQ(PostReceive(qp->get(), 0, {}), ENOMEM) << "one more than its Receive queue has";
    }
    qps.push_back(std::move(*qp));
  }
  for (const QueuePair& qp : qps) ASSERT_NO_FATAL_FAILURE(ToError(qp.get()));
  for (uint64_t i = 0; i < capacity; ++i) ASSERT_EQ(ExpectCompletion(cq->get(), i, IBV_WC_WR_FLUSH_ERR).wr_id, i);
  EXPECT_TRUE(NoCompletion(cq->get()));
  EXPECT_EQ(CountAsyncEvents(context.get(), IBV_EVENT_CQ_ERR), 0);
  qps.clear();

  if (limits.max_srq == 0) return;
  const SharedQueue srq = CreateSrq(pd->get(), static_cast<uint32_t>(limits.max_srq_wr), 1);
  ASSERT_NE(srq, nullptr);
  ibv_srq_attr now{};
  ASSERT_EQ(ibv_query_srq(srq.get(), &now), 0);
  for (uint32_t i = 0; i < now.max_wr; ++i) ASSERT_EQ(PostReceive(srq.get(), i, {}), 0);
  EXPECT_EQ(PostReceive(srq.get(), 0, {}), ENOMEM);
}

// --- With traffic ---

class CapacitiesPathTest : public HandTest {
 protected:
  void SetUp() override {
    HandTest::SetUp();
    if (IsSkipped()) return;
    const Context probe = std::move(OpenDevice().value());
    ASSERT_EQ(ibv_query_device(probe.get(), &limits), 0);
    ASSERT_EQ(ibv_query_port(probe.get(), 1, &port), 0);
    wr = static_cast<uint32_t>(std::min(limits.max_qp_wr, limits.max_cqe));
    options.cap = {.max_send_wr = wr, .max_recv_wr = wr, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    options.cq_entries = static_cast<int>(wr);
    options.mtu = port.active_mtu;
  }
  ibv_device_attr limits{};
  ibv_port_attr port{};
  uint32_t wr = 0;
  HandOptions options;
};

TEST_F(CapacitiesPathTest, DepthsAndMtu) {
  HandPair pair(options, options);
  const HandAddress peer = pair.server.Address();
  HandEnd& end = pair.client;
  ASSERT_EQ(end.ToInit(), 0);
  // Whatever the link can do: the two ends know where they are.
  for (const int mtu : {0, port.max_mtu + 1}) {
    end.options.mtu = static_cast<ibv_mtu>(mtu);
    EXPECT_EQ(end.ToRtr(peer), EINVAL);
  }
  end.options.mtu = port.max_mtu;
  if (limits.max_qp_rd_atom < 255) {
    end.options.rd_atomic = static_cast<uint8_t>(limits.max_qp_rd_atom + 1);
    EXPECT_EQ(end.ToRtr(peer), EINVAL);
  }
  end.options.rd_atomic = static_cast<uint8_t>(std::min(limits.max_qp_rd_atom, 255));
  EXPECT_EQ(end.ToRtr(peer), 0);
  if (limits.max_qp_init_rd_atom < 255) {
    end.options.rd_atomic = static_cast<uint8_t>(limits.max_qp_init_rd_atom + 1);
    EXPECT_EQ(end.ToRts(), EINVAL);
  }
  end.options.rd_atomic = static_cast<uint8_t>(std::min(limits.max_qp_init_rd_atom, 255));
  EXPECT_EQ(end.ToRts(), 0);
}

// Full queues of the largest size, at both ends, with all the Reads there may be at a time.
TEST_F(CapacitiesPathTest, FullQueuesMove) {
  options.rd_atomic = static_cast<uint8_t>(std::min({limits.max_qp_rd_atom, limits.max_qp_init_rd_atom, 255}));
  auto pair = HandPair::Connected(options, options);
  Buffer theirs(pair->server.pd.get(), 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
  Buffer ours(pair->client.pd.get(), 4096);
  theirs.FillPattern(5);
  for (uint32_t i = 0; i < wr; ++i) ASSERT_EQ(PostReceive(pair->server.qp.get(), i, {}), 0);
  // Behind a Send in SQD nothing moves while the queue is filled.
  ASSERT_EQ(pair->client.To(IBV_QPS_SQD), 0);
  for (uint32_t i = 0; i < wr; ++i) {
    SendSpec spec{.wr_id = i};
    if (i % 2 == 0) {
      spec = {.wr_id = i,
              .opcode = IBV_WR_RDMA_READ,
              .sges = {ours.Sge(0, 1000)},
              .remote_address = theirs.address(),
              .rkey = theirs.rkey()};
    }
    ASSERT_EQ(Post(pair->client.qp.get(), spec), 0) << i;
  }
  EXPECT_EQ(Post(pair->client.qp.get(), {.wr_id = wr}), ENOMEM);
  ASSERT_EQ(pair->client.To(IBV_QPS_RTS), 0);
  for (uint32_t i = 0; i < wr; ++i) ASSERT_EQ(ExpectCompletion(pair->client.send_cq.get(), i).status, IBV_WC_SUCCESS);
  for (uint32_t i = 0; i < wr / 2; ++i) {
    ASSERT_EQ(ExpectCompletion(pair->server.receive_cq.get(), i).status, IBV_WC_SUCCESS);
  }
  EXPECT_EQ(ours.Text(1000), theirs.Text(1000));
}

TEST_F(CapacitiesPathTest, TheLongestMessageArrives) {
  const uint64_t size = std::min<uint64_t>({port.max_msg_sz, limits.max_mr_size, kMostBytes});
  auto pair = HandPair::Connected(options, options);
  Buffer theirs(pair->server.pd.get(), size, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE);
  Buffer ours(pair->client.pd.get(), size);
  ours.FillPattern(3);
  ASSERT_EQ(PostReceive(pair->server.qp.get(), 1, {theirs.Sge()}), 0);
  ASSERT_EQ(Post(pair->client.qp.get(), {.wr_id = 2, .sges = {ours.Sge()}}), 0);
  EXPECT_EQ(ExpectCompletion(pair->server.receive_cq.get(), 1).byte_len, size);
  ExpectCompletion(pair->client.send_cq.get(), 2);
  EXPECT_TRUE(std::equal(ours.bytes().begin(), ours.bytes().end(), theirs.bytes().begin()));
  theirs.FillPattern(4);
  ASSERT_EQ(Post(pair->client.qp.get(), {.wr_id = 3,
                                         .opcode = IBV_WR_RDMA_READ,
                                         .sges = {ours.Sge()},
                                         .remote_address = theirs.address(),
                                         .rkey = theirs.rkey()}),
            0);
  EXPECT_EQ(ExpectCompletion(pair->client.send_cq.get(), 3).byte_len, size);
  EXPECT_TRUE(std::equal(ours.bytes().begin(), ours.bytes().end(), theirs.bytes().begin()));
}

}  // namespace
}  // namespace stagecoach::verbs
