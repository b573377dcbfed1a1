// Queries of ports, tables and QPs, and the calls that a device may lack: those answer EOPNOTSUPP, never ENOSYS.

#include <cerrno>
#include <cstring>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {
namespace {

class QueryTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    context = std::move(OpenDevice().value());
    pd = std::move(AllocatePd(context.get()).value());
  }
  void TearDown() override {
    pd = {};
    context = {};
    VerbsTest::TearDown();
  }
  bool IsIwarpDevice() const { return context->device->transport_type == IBV_TRANSPORT_IWARP; }
  Context context;
  ProtectionDomain pd;
};

TEST_F(QueryTest, TheFirstPartitionKeyIsTheDefaultOne) {
  ibv_port_attr port{};
  ASSERT_EQ(ibv_query_port(context.get(), 1, &port), 0);
  ASSERT_GE(port.pkey_tbl_len, 1);
  __be16 pkey = 0;
  ASSERT_EQ(ibv_query_pkey(context.get(), 1, 0, &pkey), 0);
  EXPECT_EQ(be16toh(pkey), 0xffff);
  EXPECT_EQ(ibv_get_pkey_index(context.get(), 1, pkey), 0);
}

TEST_F(QueryTest, PartitionKeysThatAreNotThereAreRefused) {
  __be16 pkey = 0;
  EXPECT_NE(ibv_query_pkey(context.get(), 1, 1 << 14, &pkey), 0);
  EXPECT_NE(ibv_query_pkey(context.get(), 9, 0, &pkey), 0);
  EXPECT_LT(ibv_get_pkey_index(context.get(), 1, htobe16(0x1234)), 0);
}

TEST_F(QueryTest, TheGidTableIsWhatSingleQueriesSay) {
  ibv_gid_entry entry;
  std::memset(&entry, 0xff, sizeof(entry));
  ASSERT_EQ(ibv_query_gid_ex(context.get(), 1, 0, &entry, 0), 0);
  union ibv_gid gid {};
  ASSERT_EQ(ibv_query_gid(context.get(), 1, 0, &gid), 0);
  EXPECT_EQ(std::memcmp(&gid, &entry.gid, sizeof(gid)), 0);
  EXPECT_EQ(entry.gid_index, 0u);
  EXPECT_EQ(entry.port_num, 1u);
  std::vector<ibv_gid_entry> table(64);
  const ssize_t count = ibv_query_gid_table(context.get(), table.data(), table.size(), 0);
  ASSERT_GE(count, 1);
  EXPECT_EQ(std::memcmp(&gid, &table[0].gid, sizeof(gid)), 0);
}

TEST_F(QueryTest, GidQueriesThatMakeNoSenseAreInvalid) {
  ibv_gid_entry entry{};
  EXPECT_NE(ibv_query_gid_ex(context.get(), 9, 0, &entry, 0), 0);
  EXPECT_NE(ibv_query_gid_ex(context.get(), 1, 1 << 20, &entry, 0), 0);
  EXPECT_NE(ibv_query_gid_ex(context.get(), 1, 0, &entry, 1), 0) << "there are no flags";
  EXPECT_LT(ibv_query_gid_table(context.get(), &entry, 1, 1), 0);
}

TEST_F(QueryTest, WhatTheClockIsNotAskedForItDoesNotSay) {
  ibv_values_ex values{};
  const int error = ibv_query_rt_values_ex(context.get(), &values);
  if (error == EOPNOTSUPP) GTEST_SKIP() << "skipped: the device has no clock";
  EXPECT_EQ(error, 0);
  EXPECT_EQ(values.comp_mask, 0u);
}

TEST_F(QueryTest, AConnectedQpSaysAllAboutItself) {
  EndpointOptions options;
  options.all_signaled = true;
  options.cap.max_inline_data = 64;
  auto pair = Pair::Connected({}, options);
  ibv_qp_attr now;
  ibv_qp_init_attr initial;
  std::memset(&now, 0xff, sizeof(now));
  std::memset(&initial, 0xff, sizeof(initial));
  ibv_qp* qp = pair->client.qp();
  // What a modern kernel has learned since has no place in the answer.
  EXPECT_EQ(ibv_query_qp(qp, &now, IBV_QP_STATE | IBV_QP_RATE_LIMIT, &initial), EOPNOTSUPP);
  ASSERT_EQ(ibv_query_qp(qp, &now, IBV_QP_RATE_LIMIT - 1, &initial), 0);
  EXPECT_EQ(now.qp_state, IBV_QPS_RTS);
  EXPECT_EQ(now.cur_qp_state, IBV_QPS_RTS);
  EXPECT_EQ(now.sq_draining, 0);
  EXPECT_EQ(now.port_num, 1);
  EXPECT_EQ(now.pkey_index, 0);
  EXPECT_GE(now.cap.max_send_wr, 32u);
  EXPECT_GE(now.cap.max_inline_data, 64u);
  EXPECT_EQ(initial.send_cq, pair->client.send_cq.get());
  EXPECT_EQ(initial.recv_cq, pair->client.receive_cq.get());
  EXPECT_EQ(initial.srq, nullptr);
  EXPECT_EQ(initial.qp_type, IBV_QPT_RC);
  EXPECT_EQ(initial.sq_sig_all, 1);
}

TEST_F(QueryTest, NothingSaysThatWritesArriveInOrderWithinThemselves) {
  auto pair = Pair::Connected();
  for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_SEND}) {
    EXPECT_EQ(ibv_query_qp_data_in_order(pair->client.qp(), opcode, 0), 0) << opcode;
  }
}

TEST_F(QueryTest, RatesConvertBothWays) {
  EXPECT_EQ(ibv_rate_to_mult(IBV_RATE_10_GBPS), 4);
  EXPECT_EQ(ibv_rate_to_mult(IBV_RATE_MAX), -1);
  EXPECT_EQ(mult_to_ibv_rate(4), IBV_RATE_10_GBPS);
  EXPECT_EQ(mult_to_ibv_rate(-1), IBV_RATE_MAX);
  EXPECT_EQ(mult_to_ibv_rate(7), IBV_RATE_MAX);
  EXPECT_EQ(ibv_rate_to_mbps(IBV_RATE_2_5_GBPS), 2500);
  EXPECT_EQ(ibv_rate_to_mbps(IBV_RATE_100_GBPS), 103125);
  EXPECT_EQ(ibv_rate_to_mbps(static_cast<ibv_rate>(31)), -1);  // the largest that the type can have
  EXPECT_EQ(mbps_to_ibv_rate(103125), IBV_RATE_100_GBPS);
  EXPECT_EQ(mbps_to_ibv_rate(1), IBV_RATE_MAX);
  for (int rate = IBV_RATE_2_5_GBPS; rate <= IBV_RATE_1200_GBPS; ++rate) {
    EXPECT_EQ(mbps_to_ibv_rate(ibv_rate_to_mbps(static_cast<ibv_rate>(rate))), rate);
  }
}

TEST_F(QueryTest, DatagramAddressingIsNotSupportedOnIwarp) {
  if (!IsIwarpDevice()) GTEST_SKIP() << "skipped: the device addresses datagrams";
  ibv_ah_attr address{};
  errno = 0;
  EXPECT_EQ(ibv_create_ah(pd.get(), &address), nullptr);
  EXPECT_EQ(errno, EOPNOTSUPP);
  ibv_wc completion{};
  ibv_grh header{};
  errno = 0;
  EXPECT_EQ(ibv_init_ah_from_wc(context.get(), 1, &completion, &header, &address), -1);
  EXPECT_EQ(errno, EOPNOTSUPP);
  errno = 0;
  EXPECT_EQ(ibv_create_ah_from_wc(pd.get(), &completion, &header, 1), nullptr);
  EXPECT_EQ(errno, EOPNOTSUPP);
}

TEST_F(QueryTest, WhatOnlyHardwareHasIsNotSupported) {
  // Of a call that makes something.
  const auto unsupported = [](auto call) {
    errno = 0;
    return call() == nullptr && errno == EOPNOTSUPP;
  };
  ibv_alloc_dm_attr memory{};
  EXPECT_TRUE(unsupported([&] { return ibv_alloc_dm(context.get(), &memory); }));
  EXPECT_TRUE(unsupported([&] { return ibv_alloc_null_mr(pd.get()); }));
  EXPECT_TRUE(unsupported([&] { return ibv_reg_dmabuf_mr(pd.get(), 0, 4096, 0, 0, 0); }));
  ibv_xrcd_init_attr xrcd{};
  EXPECT_TRUE(unsupported([&] { return ibv_open_xrcd(context.get(), &xrcd); }));
  ibv_wq_init_attr queue{};
  EXPECT_TRUE(unsupported([&] { return ibv_create_wq(context.get(), &queue); }));
  ibv_parent_domain_init_attr domain{};
  EXPECT_TRUE(unsupported([&] { return ibv_alloc_parent_domain(context.get(), &domain); }));
  EXPECT_TRUE(unsupported([&] { return ibv_import_device(0); }));
  EXPECT_TRUE(unsupported([&] { return ibv_import_pd(context.get(), 1); }));
  EXPECT_TRUE(unsupported([&] { return ibv_import_mr(pd.get(), 1); }));
  EXPECT_TRUE(unsupported([&] { return ibv_import_dm(context.get(), 1); }));
  ibv_counters_init_attr counters{};
  EXPECT_TRUE(unsupported([&] { return ibv_create_counters(context.get(), &counters); }));
  ibv_qp_open_attr shared_qp{};
  EXPECT_TRUE(unsupported([&] { return ibv_open_qp(context.get(), &shared_qp); }));
  std::vector<std::byte> bytes(64);
  const int on_demand = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND;
  EXPECT_TRUE(unsupported([&] { return ibv_reg_mr(pd.get(), bytes.data(), bytes.size(), on_demand); }));
  EXPECT_EQ(ibv_advise_mr(pd.get(), IBV_ADVISE_MR_ADVICE_PREFETCH, 0, nullptr, 0), EOPNOTSUPP);
  const SharedQueue srq = CreateSrq(pd.get(), 1);
  ASSERT_TRUE(srq);
  uint32_t srq_number = 0;
  EXPECT_EQ(ibv_get_srq_num(srq.get(), &srq_number), EOPNOTSUPP);
  auto pair = Pair::Connected();
  ibv_modify_cq_attr moderation{.attr_mask = IBV_CQ_ATTR_MODERATE, .moderate = {.cq_count = 1, .cq_period = 1}};
  EXPECT_EQ(ibv_modify_cq(pair->client.send_cq.get(), &moderation), EOPNOTSUPP);
  ibv_qp_rate_limit_attr rate{};
  EXPECT_EQ(ibv_modify_qp_rate_limit(pair->client.qp(), &rate), EOPNOTSUPP);
  ibv_flow_attr flow{};
  EXPECT_TRUE(unsupported([&] { return ibv_create_flow(pair->client.qp(), &flow); }));
  ibv_ece ece{.vendor_id = 1, .options = 1, .comp_mask = 0};
  EXPECT_EQ(ibv_set_ece(pair->client.qp(), &ece), EOPNOTSUPP);
  EXPECT_EQ(ibv_query_ece(pair->client.qp(), &ece), EOPNOTSUPP);
  EXPECT_EQ(ece.vendor_id, 0u);
  union ibv_gid gid {};
  EXPECT_EQ(ibv_attach_mcast(pair->client.qp(), &gid, 0), EOPNOTSUPP);
}

}  // namespace
}  // namespace stagecoach::verbs
