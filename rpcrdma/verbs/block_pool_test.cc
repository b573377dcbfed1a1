#include "rpcrdma/verbs/block_pool.h"

#include <gtest/gtest.h>

namespace stagecoach::rpcrdma::internal {
namespace {

TEST(BlockPoolTest, SmallBlocksCountForWhatTheyTake) {
  BlockPool pool(4 * 4096);
  std::vector<Block*> blocks;
  while (Block* block = pool.Allocate(blocks.size() % 2)) {
    blocks.push_back(block);
    ASSERT_LE(blocks.size(), 4u);
  }
  EXPECT_EQ(blocks.size(), 4u);
  EXPECT_EQ(pool.bytes_used(), 4u * 4096);
  for (Block* block : blocks) pool.Free(block);
  EXPECT_EQ(pool.bytes_used(), 0u);
}

TEST(BlockPoolTest, AllowanceIsForPagesAndIsGivenBack) {
  BlockPool pool(3 * 4096);
  EXPECT_EQ(pool.Allocate(3 * 4096 + 1), nullptr);
  Block* const large = pool.Allocate(4097);
  ASSERT_NE(large, nullptr);
  EXPECT_EQ(pool.bytes_used(), 2u * 4096);
  EXPECT_EQ(pool.Allocate(4097), nullptr);
  pool.Free(large);
  Block* const all = pool.Allocate(3 * 4096);
  ASSERT_NE(all, nullptr);
  EXPECT_EQ(pool.Allocate(0), nullptr);
  pool.Free(all);
}

TEST(BlockPoolTest, TellsWhatItHoldsInUseOrKept) {
  BlockPool pool(1 << 20);
  Block* const small = pool.Allocate(1);
  Block* const large = pool.Allocate(5000);
  EXPECT_EQ(pool.holdings().blocks, 2u);
  EXPECT_EQ(pool.holdings().bytes, 3u * 4096);
  EXPECT_EQ(pool.holdings().registered_bytes, 0u);
  pool.Free(large);
  pool.Free(small);
  EXPECT_EQ(pool.holdings().blocks, 2u) << "kept for the next user";
  pool.Free(pool.Allocate(8192));
  EXPECT_EQ(pool.holdings().blocks, 2u) << "who has got one of them";
  EXPECT_EQ(pool.holdings().bytes, 3u * 4096);
}

TEST(BlockPoolTest, SizesBeyondAnyBlockAreRefused) {
  BlockPool pool(UINT64_MAX);
  EXPECT_EQ(pool.Allocate(SIZE_MAX), nullptr);
  EXPECT_EQ(pool.Allocate(SIZE_MAX - 4096), nullptr);
  EXPECT_EQ(pool.bytes_used(), 0u);
}

}  // namespace
}  // namespace stagecoach::rpcrdma::internal
