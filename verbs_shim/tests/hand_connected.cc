#include "verbs_shim/tests/hand_connected.h"

#include <cerrno>

namespace stagecoach::verbs {
HandEnd::HandEnd(bool server, const HandOptions& wanted) : is_server(server), options(wanted) {
  Act();
  context = std::move(OpenDevice().value());
  pd = std::move(AllocatePd(context.get()).value());
  receive_channel = std::move(CreateCompletionChannel(context.get()).value());
  send_cq = std::move(CreateCq(context.get(), options.cq_entries).value());
  receive_cq = std::move(CreateCq(context.get(), options.cq_entries, this, receive_channel.get()).value());
  ibv_qp_init_attr attributes{};
  attributes.send_cq = send_cq.get();
  attributes.recv_cq = receive_cq.get();
  attributes.cap = options.cap;
  attributes.qp_type = options.type;
  if (options.srq_wr > 0) srq = CreateSrq(pd.get(), options.srq_wr);
  attributes.srq = srq.get();
  qp = std::move(CreateQp(pd.get(), &attributes).value());
  gid_index = ChooseGid(context.get());
}

void HandEnd::Act() const {
  is_server ? TheSurroundings().ActAsServer() : TheSurroundings().ActAsClient();
}

int HandEnd::ToInit() {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = 1;
  attributes.qp_access_flags = options.access;
  attributes.qkey = options.qkey;
  return ibv_modify_qp(qp.get(), &attributes,
                       IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
                           (options.type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS));
}

ibv_qp_attr HandEnd::RtrAttributes(const HandAddress& peer) const {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = options.mtu;
  attributes.dest_qp_num = peer.qp_number;
  attributes.rq_psn = peer.psn;
  attributes.max_dest_rd_atomic = options.rd_atomic;
  attributes.min_rnr_timer = options.min_rnr_timer;
  attributes.ah_attr = AddressOf(peer);
  return attributes;
}

ibv_ah_attr HandEnd::AddressOf(const HandAddress& peer) const {
  ibv_ah_attr address{};
  address.port_num = 1;
  address.is_global = 1;
  address.grh.dgid = peer.gid;
  address.grh.sgid_index = gid_index;
  address.grh.hop_limit = 1;
  return address;
}

AddressHandle HandEnd::CreateAh(const HandAddress& peer) const {
  ibv_ah_attr address = AddressOf(peer);
  errno = 0;
  return AddressHandle(ibv_create_ah(pd.get(), &address));
}

int HandEnd::RtrMask() const {
  if (options.type == IBV_QPT_UD) return IBV_QP_STATE;
  int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
  if (options.type == IBV_QPT_RC) mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  return mask;
}

int HandEnd::ToRtr(const HandAddress& peer) {
  ibv_qp_attr attributes = RtrAttributes(peer);
  return ibv_modify_qp(qp.get(), &attributes, RtrMask());
}

int HandEnd::ToRts() {
  return ToRts(options.timeout, options.retry_count);
}

int HandEnd::ToRts(uint8_t timeout, uint8_t retry_count) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.sq_psn = options.psn;
  attributes.timeout = timeout;
  attributes.retry_cnt = retry_count;
  attributes.rnr_retry = options.rnr_retry;
  attributes.max_rd_atomic = options.rd_atomic;
  int mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
  if (options.type == IBV_QPT_RC) {
    mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
  }
  return ibv_modify_qp(qp.get(), &attributes, mask);
}

void HandEnd::Connect(const HandAddress& peer) {
  ASSERT_EQ(ToInit(), 0);
  ASSERT_EQ(ToRtr(peer), 0);
  ASSERT_EQ(ToRts(), 0);
}

void HandEnd::SetPatience(uint8_t timeout, uint8_t retry_count) {
  ASSERT_EQ(To(IBV_QPS_SQD), 0);
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_SQD;
  attributes.timeout = timeout;
  attributes.retry_cnt = retry_count;
  ASSERT_EQ(ibv_modify_qp(qp.get(), &attributes, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT), 0);
  ASSERT_EQ(To(IBV_QPS_RTS), 0);
}

void HandEnd::Ready(const HandAddress& peer) {
  ASSERT_EQ(ToInit(), 0);
  ASSERT_EQ(ToRtr(peer), 0);
  ASSERT_EQ(ToRts(), 0);
}

int HandEnd::To(ibv_qp_state state, int mask) {
  ibv_qp_attr attributes{};
  attributes.qp_state = state;
  attributes.en_sqd_async_notify = 1;
  return ibv_modify_qp(qp.get(), &attributes, mask);
}

ibv_qp_state HandEnd::State() const {
  ibv_qp_attr attributes{};
  ibv_qp_init_attr initial{};
  EXPECT_EQ(ibv_query_qp(qp.get(), &attributes, IBV_QP_STATE, &initial), 0);
  return attributes.qp_state;
}

bool HandEnd::IsDraining() const {
  ibv_qp_attr attributes{};
  ibv_qp_init_attr initial{};
  EXPECT_EQ(ibv_query_qp(qp.get(), &attributes, IBV_QP_STATE, &initial), 0);
  return attributes.sq_draining != 0;
}

HandAddress HandEnd::Address() const {
  HandAddress address{.qp_number = qp->qp_num, .psn = options.psn};
  EXPECT_EQ(ibv_query_gid(context.get(), 1, gid_index, &address.gid), 0);
  return address;
}

void HandPair::Connect() {
  const HandAddress of_server = server.Address();
  const HandAddress of_client = client.Address();
  ASSERT_EQ(server.ToInit(), 0);
  ASSERT_EQ(client.ToInit(), 0);
  ASSERT_EQ(server.ToRtr(of_client), 0);
  ASSERT_EQ(server.ToRts(kPatientTimeout, kPatientCount), 0);
  ASSERT_EQ(client.ToRtr(of_server), 0);
  ASSERT_EQ(client.ToRts(kPatientTimeout, kPatientCount), 0);
  for (HandEnd* end : {&server, &client}) {
    const HandOptions& wanted = end->options;
    if (wanted.timeout == kPatientTimeout && wanted.retry_count == kPatientCount) continue;
    ASSERT_NO_FATAL_FAILURE(ExpectPassage());
    ASSERT_NO_FATAL_FAILURE(end->SetPatience(wanted.timeout, wanted.retry_count));
  }
}

void HandPair::ExpectPassage() {
  if (client.options.type == IBV_QPT_UC) return ExpectUnreliablePassage();
  for (HandEnd* end : {&server, &client}) {
    ASSERT_EQ(Post(end->qp.get(), {.wr_id = 0, .opcode = IBV_WR_RDMA_WRITE}), 0);
    ASSERT_EQ(ExpectCompletion(end->send_cq.get(), 0).status, IBV_WC_SUCCESS);
  }
}

// What leaves before there is a way is lost, as on any network: numbered messages, until the latest one has arrived.
void HandPair::ExpectUnreliablePassage() {
  constexpr int kPollsBeforeAnother = 1000;
  const auto post_receive = [&] {
    return server.srq ? PostReceive(server.srq.get(), 0, {}) : PostReceive(server.qp.get(), 0, {});
  };
  ASSERT_EQ(post_receive(), 0);
  uint32_t latest = 0;
  uint32_t arrived = 0;
  int polls = kPollsBeforeAnother;
  bool gone = true;
  ASSERT_TRUE(TheSurroundings().Until([&] {
    ibv_wc completion{};
    gone = gone || ibv_poll_cq(client.send_cq.get(), 1, &completion) == 1;
    if (ibv_poll_cq(server.receive_cq.get(), 1, &completion) == 1) {
      arrived = be32toh(completion.imm_data);
      if (arrived == latest) return true;
      EXPECT_EQ(post_receive(), 0);
    }
    if (gone && ++polls > kPollsBeforeAnother) {
      EXPECT_EQ(Post(client.qp.get(), {.opcode = IBV_WR_SEND_WITH_IMM, .immediate = htobe32(++latest)}), 0);
      gone = false;
      polls = 0;
    }
    return false;
  })) << "none of "
      << latest << " messages arrived";
  // With the arrival of the last one it has left, too.
  if (!gone) ExpectCompletion(client.send_cq.get(), 1);
}

std::unique_ptr<HandPair> HandPair::Connected(const HandOptions& server_options, const HandOptions& client_options) {
  auto pair = std::make_unique<HandPair>(server_options, client_options);
  pair->Connect();
  return pair;
}

void HandTest::SetUp() {
  VerbsTest::SetUp();
  if (IsSkipped()) return;
  TheSurroundings().ActAsServer();
  const Context context = std::move(OpenDevice().value());
  if (context->device->transport_type == IBV_TRANSPORT_IWARP) {
    GTEST_SKIP() << "skipped: an iWARP device needs its connection manager";
  }
}

}  // namespace stagecoach::verbs
