// The kernel's structures and the API's, field by field.

#include <gtest/gtest.h>

#include <infiniband/sa.h>
#include <infiniband/verbs.h>
#include <rdma/ib_user_sa.h>
#include <rdma/ib_user_verbs.h>

#include <cstddef>
#include <cstring>
#include <vector>

// Not in all of Debian's headers.
extern "C" {
void ibv_copy_ah_attr_from_kern(ibv_ah_attr* to, ib_uverbs_ah_attr* from);
void ibv_copy_qp_attr_from_kern(ibv_qp_attr* to, ib_uverbs_qp_attr* from);
void ibv_copy_path_rec_from_kern(ibv_sa_path_rec* to, ib_user_path_rec* from);
void ibv_copy_path_rec_to_kern(ib_user_path_rec* to, ibv_sa_path_rec* from);
}

namespace {

// No byte as its neighbours, and none zero.
template <typename Struct>
Struct Patterned() {
  Struct value;
  auto* bytes = reinterpret_cast<unsigned char*>(&value);
  for (size_t i = 0; i < sizeof(value); ++i) bytes[i] = static_cast<unsigned char>(i % 255 + 1);
  return value;
}

void ExpectSame(const ibv_ah_attr& shown, const ib_uverbs_ah_attr& given) {
  EXPECT_EQ(std::memcmp(shown.grh.dgid.raw, given.grh.dgid, sizeof(given.grh.dgid)), 0);
  EXPECT_EQ(shown.grh.flow_label, given.grh.flow_label);
  EXPECT_EQ(shown.grh.sgid_index, given.grh.sgid_index);
  EXPECT_EQ(shown.grh.hop_limit, given.grh.hop_limit);
  EXPECT_EQ(shown.grh.traffic_class, given.grh.traffic_class);
  EXPECT_EQ(shown.dlid, given.dlid);
  EXPECT_EQ(shown.sl, given.sl);
  EXPECT_EQ(shown.src_path_bits, given.src_path_bits);
  EXPECT_EQ(shown.static_rate, given.static_rate);
  EXPECT_EQ(shown.is_global, given.is_global);
  EXPECT_EQ(shown.port_num, given.port_num);
}

TEST(KernelStructs, AddressesAreCopied) {
  auto given = Patterned<ib_uverbs_ah_attr>();
  ibv_ah_attr shown{};
  ibv_copy_ah_attr_from_kern(&shown, &given);
  ExpectSame(shown, given);
}

// All but what programs of 2016 have no room for.
TEST(KernelStructs, QueuePairsAreCopied) {
  auto given = Patterned<ib_uverbs_qp_attr>();
  // Enumerations there, which no other value fits.
  given.qp_state = IBV_QPS_SQD;
  given.cur_qp_state = IBV_QPS_RTS;
  given.path_mtu = IBV_MTU_2048;
  given.path_mig_state = IBV_MIG_REARM;
  ibv_qp_attr shown{};
  shown.rate_limit = 77;
  ibv_copy_qp_attr_from_kern(&shown, &given);
  EXPECT_EQ(static_cast<uint32_t>(shown.qp_state), given.qp_state);
  EXPECT_EQ(static_cast<uint32_t>(shown.cur_qp_state), given.cur_qp_state);
  EXPECT_EQ(static_cast<uint32_t>(shown.path_mtu), given.path_mtu);
  EXPECT_EQ(static_cast<uint32_t>(shown.path_mig_state), given.path_mig_state);
  EXPECT_EQ(shown.qkey, given.qkey);
  EXPECT_EQ(shown.rq_psn, given.rq_psn);
  EXPECT_EQ(shown.sq_psn, given.sq_psn);
  EXPECT_EQ(shown.dest_qp_num, given.dest_qp_num);
  EXPECT_EQ(shown.qp_access_flags, given.qp_access_flags);
  EXPECT_EQ(shown.cap.max_send_wr, given.max_send_wr);
  EXPECT_EQ(shown.cap.max_recv_wr, given.max_recv_wr);
  EXPECT_EQ(shown.cap.max_send_sge, given.max_send_sge);
  EXPECT_EQ(shown.cap.max_recv_sge, given.max_recv_sge);
  EXPECT_EQ(shown.cap.max_inline_data, given.max_inline_data);
  ExpectSame(shown.ah_attr, given.ah_attr);
  ExpectSame(shown.alt_ah_attr, given.alt_ah_attr);
  EXPECT_EQ(shown.pkey_index, given.pkey_index);
  EXPECT_EQ(shown.alt_pkey_index, given.alt_pkey_index);
  EXPECT_EQ(shown.en_sqd_async_notify, given.en_sqd_async_notify);
  EXPECT_EQ(shown.sq_draining, given.sq_draining);
  EXPECT_EQ(shown.max_rd_atomic, given.max_rd_atomic);
  EXPECT_EQ(shown.max_dest_rd_atomic, given.max_dest_rd_atomic);
  EXPECT_EQ(shown.min_rnr_timer, given.min_rnr_timer);
  EXPECT_EQ(shown.port_num, given.port_num);
  EXPECT_EQ(shown.timeout, given.timeout);
  EXPECT_EQ(shown.retry_cnt, given.retry_cnt);
  EXPECT_EQ(shown.rnr_retry, given.rnr_retry);
  EXPECT_EQ(shown.alt_port_num, given.alt_port_num);
  EXPECT_EQ(shown.alt_timeout, given.alt_timeout);
  EXPECT_EQ(shown.rate_limit, 77u);
}

TEST(KernelStructs, PathsAreCopiedBothWays) {
  ib_user_path_rec given{};
  std::memset(given.dgid, 0x11, sizeof(given.dgid));
  std::memset(given.sgid, 0x22, sizeof(given.sgid));
  given.dlid = 3;
  given.slid = 4;
  given.raw_traffic = 5;
  given.flow_label = 6;
  given.reversible = 7;
  given.mtu = 8;
  given.pkey = 9;
  given.hop_limit = 10;
  given.traffic_class = 11;
  given.numb_path = 12;
  given.sl = 13;
  given.mtu_selector = 14;
  given.rate_selector = 15;
  given.rate = 16;
  given.packet_life_time_selector = 17;
  given.packet_life_time = 18;
  given.preference = 19;
  ibv_sa_path_rec shown{};
  ibv_copy_path_rec_from_kern(&shown, &given);
  EXPECT_EQ(shown.dgid.raw[0], 0x11);
  EXPECT_EQ(shown.sgid.raw[15], 0x22);
  EXPECT_EQ(shown.dlid, given.dlid);
  EXPECT_EQ(shown.slid, given.slid);
  EXPECT_EQ(shown.flow_label, given.flow_label);
  EXPECT_EQ(shown.mtu, given.mtu);
  EXPECT_EQ(shown.rate, given.rate);
  EXPECT_EQ(shown.preference, given.preference);
  ib_user_path_rec back{};
  ibv_copy_path_rec_to_kern(&back, &shown);
  EXPECT_EQ(std::memcmp(&back, &given, sizeof(given)), 0);
}

}  // namespace
