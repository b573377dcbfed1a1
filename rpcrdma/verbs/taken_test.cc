#include "rpcrdma/verbs/taken.h"

#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include <cerrno>

namespace stagecoach::rpcrdma::internal {
namespace {

TEST(Taken, IsAllWithoutAnError) {
  const ibv_send_wr list[3] = {};
  EXPECT_EQ(Taken(0, list, 3u, static_cast<const ibv_send_wr*>(nullptr)), 3u);
}

// [traps:requester#6]
TEST(Taken, IsWhatStandsBeforeTheOneThatIsNamed) {
  const ibv_send_wr list[3] = {};
  for (uint32_t i = 0; i < 3; ++i) EXPECT_EQ(Taken(ENOMEM, list, 3u, list + i), i);
}

TEST(Taken, IsAllWhereNoneOfTheListIsNamed) {
  const ibv_recv_wr list[3] = {};
  const ibv_recv_wr other = {};
  EXPECT_EQ(Taken(EINVAL, list, 3u, static_cast<const ibv_recv_wr*>(nullptr)), 3u);
  EXPECT_EQ(Taken(EINVAL, list, 2u, list + 2), 2u);
  EXPECT_EQ(Taken(EINVAL, list, 3u, &other), 3u);
}

}  // namespace
}  // namespace stagecoach::rpcrdma::internal
