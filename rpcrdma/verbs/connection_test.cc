#include "rpcrdma/verbs/connection.h"

#include <gtest/gtest.h>

#include <cerrno>

namespace stagecoach::rpcrdma::internal {
namespace {

TEST(CauseOfConnectErrno, TellsThePeersFaultFromTheDevices) {
  EXPECT_EQ(CauseOfConnectErrno(ECONNREFUSED).kind, CloseCause::Kind::kRefused);
  EXPECT_EQ(CauseOfConnectErrno(ECONNREFUSED).text, "connection refused");
  for (const int error : {EHOSTUNREACH, ENETUNREACH, ETIMEDOUT, ECONNRESET}) {
    EXPECT_EQ(CauseOfConnectErrno(error).kind, CloseCause::Kind::kUnreachable) << error;
    EXPECT_EQ(CauseOfConnectErrno(error).error, error);
  }
  for (const int error : {EINVAL, ENOMEM, ENOSPC}) {
    EXPECT_EQ(CauseOfConnectErrno(error).kind, CloseCause::Kind::kDevice) << error;
    EXPECT_EQ(CauseOfConnectErrno(error).text.find("rdma_connect"), 0u);
  }
}

}  // namespace
}  // namespace stagecoach::rpcrdma::internal
