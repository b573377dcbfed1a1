// The QP states and attribute bits of emu/engine/qp_states.h are those of the stock verbs header.
#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include <utility>

#include "emu/engine/qp_states.h"

namespace stagecoach::emu {
namespace {

TEST(QpAbi, StatesHaveTheirVerbsNumbers) {
  for (const auto& [ours, verbs] : {std::pair{QpState::kReset, IBV_QPS_RESET},
                                    {QpState::kInit, IBV_QPS_INIT},
                                    {QpState::kRtr, IBV_QPS_RTR},
                                    {QpState::kRts, IBV_QPS_RTS},
                                    {QpState::kSqd, IBV_QPS_SQD},
                                    {QpState::kSqe, IBV_QPS_SQE},
                                    {QpState::kErr, IBV_QPS_ERR}}) {
    EXPECT_EQ(static_cast<int>(ours), static_cast<int>(verbs)) << ToString(ours);
  }
  EXPECT_EQ(kQpStateCount, static_cast<size_t>(IBV_QPS_UNKNOWN));
}

TEST(QpAbi, AttributeBitsAreThoseOfVerbs) {
  const std::pair<uint32_t, ibv_qp_attr_mask> kBits[] = {
      {qp_attr::kState, IBV_QP_STATE},
      {qp_attr::kCurState, IBV_QP_CUR_STATE},
      {qp_attr::kEnSqdAsyncNotify, IBV_QP_EN_SQD_ASYNC_NOTIFY},
      {qp_attr::kAccessFlags, IBV_QP_ACCESS_FLAGS},
      {qp_attr::kPkeyIndex, IBV_QP_PKEY_INDEX},
      {qp_attr::kPort, IBV_QP_PORT},
      {qp_attr::kQkey, IBV_QP_QKEY},
      {qp_attr::kAv, IBV_QP_AV},
      {qp_attr::kPathMtu, IBV_QP_PATH_MTU},
      {qp_attr::kTimeout, IBV_QP_TIMEOUT},
      {qp_attr::kRetryCnt, IBV_QP_RETRY_CNT},
      {qp_attr::kRnrRetry, IBV_QP_RNR_RETRY},
      {qp_attr::kRqPsn, IBV_QP_RQ_PSN},
      {qp_attr::kMaxQpRdAtomic, IBV_QP_MAX_QP_RD_ATOMIC},
      {qp_attr::kAltPath, IBV_QP_ALT_PATH},
      {qp_attr::kMinRnrTimer, IBV_QP_MIN_RNR_TIMER},
      {qp_attr::kSqPsn, IBV_QP_SQ_PSN},
      {qp_attr::kMaxDestRdAtomic, IBV_QP_MAX_DEST_RD_ATOMIC},
      {qp_attr::kPathMigState, IBV_QP_PATH_MIG_STATE},
      {qp_attr::kCap, IBV_QP_CAP},
      {qp_attr::kDestQpn, IBV_QP_DEST_QPN},
      {qp_attr::kRateLimit, IBV_QP_RATE_LIMIT},
  };
  for (const auto& [ours, verbs] : kBits) EXPECT_EQ(ours, static_cast<uint32_t>(verbs)) << QpAttributesToString(ours);
}

}  // namespace
}  // namespace stagecoach::emu
