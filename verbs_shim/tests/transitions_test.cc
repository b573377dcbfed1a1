// The state machine of QPs as a program meets it: from each state to each other one, with each attribute in turn left
// out or added (InfiniBand specification 10.3 and 11.2.5.2, as Linux has it). What is refused changes nothing.

#include <cerrno>
#include <optional>
#include <string>
#include <vector>

#include "verbs_shim/tests/hand_connected.h"

namespace stagecoach::verbs {
namespace {

constexpr ibv_qp_state kStates[] = {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS,
                                    IBV_QPS_SQD,   IBV_QPS_SQE,  IBV_QPS_ERR};

// Alternate paths are InfiniBand's alone, and not of interest where nothing migrates.
constexpr int kNotTried = IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE;

struct Row {
  ibv_qp_state from;
  ibv_qp_state to;
  int required;
  int optional;
};

// Of UD, which has a key and no peer.
std::vector<Row> TableOfUd() {
  const int begin = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
  const int later = IBV_QP_CUR_STATE | IBV_QP_QKEY;
  return {
      {IBV_QPS_RESET, IBV_QPS_INIT, begin, 0},
      {IBV_QPS_INIT, IBV_QPS_INIT, 0, begin},
      {IBV_QPS_INIT, IBV_QPS_RTR, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
      {IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_SQ_PSN, later},
      {IBV_QPS_RTS, IBV_QPS_RTS, 0, later},
      {IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
      {IBV_QPS_SQD, IBV_QPS_RTS, 0, later},
      {IBV_QPS_SQD, IBV_QPS_SQD, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
  };
}

std::vector<Row> TableOfConnected(ibv_qp_type type) {
  const bool rc = type == IBV_QPT_RC;
  const int begin = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
  const int later = IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | (rc ? IBV_QP_MIN_RNR_TIMER : 0);
  return {
      {IBV_QPS_RESET, IBV_QPS_INIT, begin, 0},
      {IBV_QPS_INIT, IBV_QPS_INIT, 0, begin},
      {IBV_QPS_INIT, IBV_QPS_RTR,
       IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
           (rc ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0),
       IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX},
      {IBV_QPS_RTR, IBV_QPS_RTS,
       IBV_QP_SQ_PSN | (rc ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC : 0),
       later},
      {IBV_QPS_RTS, IBV_QPS_RTS, 0, later},
      {IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
      {IBV_QPS_SQD, IBV_QPS_RTS, 0, later},
      {IBV_QPS_SQD, IBV_QPS_SQD, 0,
       IBV_QP_AV | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX |
           (rc ? IBV_QP_PORT | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC |
                     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER
               : 0)},
  };
}

// Without those out of SQE.
std::vector<Row> TableOf(ibv_qp_type type) {
  std::vector<Row> table = type == IBV_QPT_UD ? TableOfUd() : TableOfConnected(type);
  table.push_back({IBV_QPS_RESET, IBV_QPS_RESET, 0, 0});
  for (const ibv_qp_state from : {IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD, IBV_QPS_ERR}) {
    table.push_back({from, IBV_QPS_RESET, 0, 0});
    table.push_back({from, IBV_QPS_ERR, 0, 0});
  }
  return table;
}

// Of QPs that fail a send, and not the connection that they do not have.
std::vector<Row> TableOutOfSqe(ibv_qp_type type) {
  return {
      {IBV_QPS_SQE, IBV_QPS_RTS, 0, IBV_QP_CUR_STATE | (type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)},
      {IBV_QPS_SQE, IBV_QPS_RESET, 0, 0},
      {IBV_QPS_SQE, IBV_QPS_ERR, 0, 0},
  };
}

std::string Text(ibv_qp_state from, ibv_qp_state to, int bit = 0) {
  return std::to_string(from) + " to " + std::to_string(to) + ", attribute " + std::to_string(bit);
}

class TransitionsTest : public HandTest, public ::testing::WithParamInterface<ibv_qp_type> {
 protected:
  void SetUp() override {
    HandTest::SetUp();
    if (IsSkipped()) return;
    HandOptions options;
    options.type = GetParam();
    pair = std::make_unique<HandPair>(options, options);
    end().Act();
    peer = pair->server.Address();
    table = TableOf(GetParam());
  }
  void TearDown() override {
    pair.reset();
    HandTest::TearDown();
  }
  HandEnd& end() { return pair->client; }

  // By the shortest way, from RESET.
  void BringTo(ibv_qp_state state) {
    ASSERT_EQ(end().To(IBV_QPS_RESET), 0);
    if (state == IBV_QPS_RESET) return;
    ASSERT_EQ(end().ToInit(), 0);
    if (state == IBV_QPS_INIT) return;
    if (state == IBV_QPS_ERR) {
      ASSERT_EQ(end().To(IBV_QPS_ERR), 0);
      return;
    }
    ASSERT_EQ(end().ToRtr(peer), 0);
    if (state == IBV_QPS_RTR) return;
    ASSERT_EQ(end().ToRts(), 0);
    if (state == IBV_QPS_RTS) return;
    if (state == IBV_QPS_SQE) return FailASend();
    ASSERT_EQ(end().To(IBV_QPS_SQD), 0);
    ASSERT_TRUE(world().Until([this] { return !end().IsDraining(); }));
  }
  // From memory that is nobody's. To a UD QP of its own, as good as any other.
  void FailASend() {
    const AddressHandle self = GetParam() == IBV_QPT_UD ? end().CreateAh(end().Address()) : nullptr;
    Buffer memory(end().pd.get(), 64);
    ibv_sge unknown = memory.Sge();
    unknown.lkey ^= 0x5a5a5a00;
    ASSERT_EQ(Post(end().qp.get(), {.wr_id = 1,
                                    .sges = {unknown},
                                    .ah = self.get(),
                                    .remote_qp = end().qp->qp_num,
                                    .remote_qkey = end().options.qkey}),
              0);
    ExpectCompletion(end().send_cq.get(), 1, IBV_WC_LOC_PROT_ERR);
    ASSERT_EQ(end().State(), IBV_QPS_SQE);
  }
  // With good values for everything, whatever the mask says.
  int Modify(ibv_qp_state from, ibv_qp_state to, int mask) {
    ibv_qp_attr attributes = end().RtrAttributes(peer);
    attributes.qp_state = to;
    attributes.cur_qp_state = from;
    attributes.port_num = 1;
    attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    attributes.timeout = kPatientTimeout;
    attributes.retry_cnt = kPatientCount;
    attributes.rnr_retry = 7;
    attributes.max_rd_atomic = 1;
    attributes.sq_psn = 5;
    attributes.qkey = 0x22222222;
    attributes.cap = end().options.cap;
    return ibv_modify_qp(end().qp.get(), &attributes, IBV_QP_STATE | mask);
  }
  const Row* Find(ibv_qp_state from, ibv_qp_state to) const {
    for (const Row& row : table) {
      if (row.from == from && row.to == to) return &row;
    }
    return nullptr;
  }
  void ExpectThoseOfTheTableAndNoOthers(ibv_qp_state from) {
    for (const ibv_qp_state to : kStates) {
      SCOPED_TRACE(Text(from, to));
      ASSERT_NO_FATAL_FAILURE(BringTo(from));
      const Row* const row = Find(from, to);
      EXPECT_EQ(Modify(from, to, row != nullptr ? row->required : 0), row != nullptr ? 0 : EINVAL);
      EXPECT_EQ(end().State(), row != nullptr ? to : from);
      EXPECT_EQ(end().qp->state, row != nullptr ? to : from) << "as the program's struct says";
    }
  }
  void ExpectEachAttributeIsJudged() {
    for (const Row& row : table) {
      ASSERT_NO_FATAL_FAILURE(BringTo(row.from));
      for (int bit = IBV_QP_CUR_STATE; bit <= IBV_QP_DEST_QPN; bit <<= 1) {
        if ((bit & kNotTried) != 0) continue;
        SCOPED_TRACE(Text(row.from, row.to, bit));
        if ((row.required & bit) != 0) {
          EXPECT_EQ(Modify(row.from, row.to, row.required & ~bit), EINVAL) << "required";
          EXPECT_EQ(end().State(), row.from);
        } else if ((row.optional & bit) != 0) {
          EXPECT_EQ(Modify(row.from, row.to, row.required | bit), 0) << "allowed";
          EXPECT_EQ(end().State(), row.to);
          ASSERT_NO_FATAL_FAILURE(BringTo(row.from));
        } else {
          EXPECT_EQ(Modify(row.from, row.to, row.required | bit), EINVAL) << "neither";
          EXPECT_EQ(end().State(), row.from);
        }
      }
    }
  }

  std::unique_ptr<HandPair> pair;
  HandAddress peer;
  std::vector<Row> table;
};

TEST_P(TransitionsTest, ThereAreThoseOfTheTableAndNoOthers) {
  for (const ibv_qp_state from : kStates) {
    if (from == IBV_QPS_SQE) continue;  // nobody goes there by wish
    ExpectThoseOfTheTableAndNoOthers(from);
  }
}

TEST_P(TransitionsTest, EachAttributeIsRequiredOrAllowedOrInvalid) {
  ExpectEachAttributeIsJudged();
}

const auto kNameOfType = [](const auto& info) {
  return info.param == IBV_QPT_RC ? "Rc" : info.param == IBV_QPT_UC ? "Uc" : "Ud";
};

INSTANTIATE_TEST_SUITE_P(OfType, TransitionsTest, ::testing::Values(IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD), kNameOfType);

// --- With a peer ---

using ConnectedTransitionsTest = TransitionsTest;

TEST_P(ConnectedTransitionsTest, WhatIsRefusedLeavesTheConnectionAlone) {
  // Both ends, this time.
  ASSERT_NO_FATAL_FAILURE(pair->Connect());
  ASSERT_NO_FATAL_FAILURE(pair->ExpectPassage());
  EXPECT_EQ(Modify(IBV_QPS_RTS, IBV_QPS_RTR, IBV_QP_AV), EINVAL);
  EXPECT_EQ(Modify(IBV_QPS_RTS, IBV_QPS_RTS, IBV_QP_AV | IBV_QP_ACCESS_FLAGS), EINVAL);
  EXPECT_EQ(Modify(IBV_QPS_RTS, IBV_QPS_SQE, 0), EINVAL);
  for (HandEnd* from : {&pair->server, &pair->client}) {
    HandEnd& to = from == &pair->server ? pair->client : pair->server;
    ASSERT_EQ(PostReceive(to.qp.get(), 1, {}), 0);
    ASSERT_EQ(Post(from->qp.get(), {.wr_id = 2}), 0);
    ExpectCompletion(to.receive_cq.get(), 1);
    ExpectCompletion(from->send_cq.get(), 2);
  }
}

INSTANTIATE_TEST_SUITE_P(OfType, ConnectedTransitionsTest, ::testing::Values(IBV_QPT_RC, IBV_QPT_UC), kNameOfType);

// --- Out of the send queue's own error state ---

class SendQueueErrorTest : public TransitionsTest {
 protected:
  void SetUp() override {
    TransitionsTest::SetUp();
    if (IsSkipped()) return;
    table = TableOutOfSqe(GetParam());
    // Sends of UC begin when there is somebody.
    ASSERT_NO_FATAL_FAILURE(pair->server.Connect(end().Address()));
    end().Act();
  }
};

TEST_P(SendQueueErrorTest, ThereAreThreeWaysOut) {
  ExpectThoseOfTheTableAndNoOthers(IBV_QPS_SQE);
}

TEST_P(SendQueueErrorTest, EachAttributeIsAllowedOrInvalid) {
  ExpectEachAttributeIsJudged();
}

INSTANTIATE_TEST_SUITE_P(OfType, SendQueueErrorTest, ::testing::Values(IBV_QPT_UC, IBV_QPT_UD), kNameOfType);

// --- Without a peer, on any device ---

class UnconnectedTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    context = std::move(OpenDevice().value());
    pd = std::move(AllocatePd(context.get()).value());
    cq = std::move(CreateCq(context.get(), 16).value());
    ibv_qp_init_attr attributes{};
    attributes.send_cq = attributes.recv_cq = cq.get();
    attributes.qp_type = IBV_QPT_RC;
    attributes.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    qp = std::move(CreateQp(pd.get(), &attributes).value());
  }
  void TearDown() override {
    qp = {};
    cq = {};
    pd = {};
    context = {};
    VerbsTest::TearDown();
  }
  int Modify(ibv_qp_state to, int mask) {
    ibv_qp_attr attributes{};
    attributes.qp_state = to;
    attributes.port_num = 1;
    attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    return ibv_modify_qp(qp.get(), &attributes, IBV_QP_STATE | mask);
  }
  void BringTo(ibv_qp_state state) {
    ASSERT_EQ(Modify(IBV_QPS_RESET, 0), 0);
    if (state == IBV_QPS_RESET) return;
    ASSERT_EQ(Modify(IBV_QPS_INIT, kToInit), 0);
    if (state == IBV_QPS_ERR) {
      ASSERT_EQ(Modify(IBV_QPS_ERR, 0), 0);
    }
  }

  static constexpr int kToInit = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
  Context context;
  ProtectionDomain pd;
  CompletionQueue cq;
  QueuePair qp;
};

TEST_F(UnconnectedTest, ResetInitAndErrorLeadToOneAnotherAndNowhereElse) {
  for (const ibv_qp_state from : {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_ERR}) {
    for (const ibv_qp_state to : kStates) {
      SCOPED_TRACE(Text(from, to));
      ASSERT_NO_FATAL_FAILURE(BringTo(from));
      const bool begins = from == IBV_QPS_RESET && to == IBV_QPS_INIT;
      const bool leads = to == IBV_QPS_RESET || begins || (from == IBV_QPS_INIT && to == IBV_QPS_INIT) ||
                         (from != IBV_QPS_RESET && to == IBV_QPS_ERR);
      EXPECT_EQ(Modify(to, begins ? kToInit : 0), leads ? 0 : EINVAL);
      ExpectState(qp.get(), leads ? to : from);
    }
  }
}

TEST_F(UnconnectedTest, EachAttributeOfTheBeginningIsRequiredAndNoOtherAllowed) {
  for (int bit = IBV_QP_CUR_STATE; bit <= IBV_QP_DEST_QPN; bit <<= 1) {
    if ((bit & kNotTried) != 0) continue;
    SCOPED_TRACE(Text(IBV_QPS_RESET, IBV_QPS_INIT, bit));
    EXPECT_EQ(Modify(IBV_QPS_INIT, kToInit ^ bit), EINVAL);
    ExpectState(qp.get(), IBV_QPS_RESET);
  }
}

}  // namespace
}  // namespace stagecoach::verbs
