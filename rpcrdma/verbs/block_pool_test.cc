#include "rpcrdma/verbs/block_pool.h"

#include <gtest/gtest.h>

namespace stagecoach::rpcrdma::internal {
namespace {

TEST(BlockPoolTest, SmallBlocksCountForWhatTheyTake) {
  BlockPool pool(std::make_shared<MemoryAllowance>(4 * 4096));
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
  BlockPool pool(std::make_shared<MemoryAllowance>(3 * 4096));
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
  BlockPool pool(std::make_shared<MemoryAllowance>(1 << 20));
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

// However many connections a client has, and one after the other leaves its memory behind.
TEST(BlockPoolTest, PoolsOfOneAllowanceKeepNoMoreThanOneWould) {
  constexpr uint64_t kBlock = MemoryAllowance::kKeptMax / 4;
  const auto allowance = std::make_shared<MemoryAllowance>(UINT64_MAX);
  BlockPool first(allowance), last(allowance);
  {
    std::vector<std::unique_ptr<BlockPool>> pools;
    for (int i = 0; i < 10; ++i) {
      pools.push_back(std::make_unique<BlockPool>(allowance));
      pools.back()->Free(pools.back()->Allocate(kBlock));
    }
    EXPECT_EQ(allowance->bytes_kept(), MemoryAllowance::kKeptMax);
    EXPECT_EQ(pools[3]->holdings().bytes, kBlock);
    EXPECT_EQ(pools[4]->holdings().bytes, 0u);
    first.Free(first.Allocate(1));
    EXPECT_EQ(first.holdings().bytes, 0u);
    // What is taken out again makes room.
    Block* const again = pools[0]->Allocate(kBlock);
    first.Free(first.Allocate(1));
    EXPECT_EQ(first.holdings().bytes, 4096u);
    pools[0]->Free(again);
  }
  EXPECT_EQ(allowance->bytes_kept(), 4096u) << "a pool that goes keeps nothing";
  last.Free(last.Allocate(kBlock));
  last.DropRegistrations();
  EXPECT_EQ(last.holdings().blocks, 0u);
  EXPECT_EQ(allowance->bytes_kept(), 4096u);
  EXPECT_EQ(allowance->bytes_used(), 0u);
}

// --- All clients together ---

TEST(BlockPoolTest, ClientsTogetherHaveNoMoreThanTheTotal) {
  const auto total = std::make_shared<MemoryTotal>(4 * 4096);
  BlockPool one(std::make_shared<MemoryAllowance>(3 * 4096, total));
  BlockPool two(std::make_shared<MemoryAllowance>(3 * 4096, total));
  Block* const first = one.Allocate(3 * 4096);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(two.Allocate(2 * 4096), nullptr);
  Block* const second = two.Allocate(4096);
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(total->bytes_used(), 4u * 4096);
  EXPECT_EQ(two.Allocate(1), nullptr);
  one.Free(first);
  EXPECT_EQ(total->bytes_used(), 4096u);
  EXPECT_NE(two.Allocate(2 * 4096), nullptr);
}

TEST(BlockPoolTest, ClientsWaitForTheTotalInTurn) {
  const auto total = std::make_shared<MemoryTotal>(4 * 4096);
  const auto of_one = std::make_shared<MemoryAllowance>(UINT64_MAX, total);
  const auto of_two = std::make_shared<MemoryAllowance>(UINT64_MAX, total);
  const auto of_three = std::make_shared<MemoryAllowance>(UINT64_MAX, total);
  int told_two = 0;
  int told_three = 0;
  of_two->OnFreed([&] { ++told_two; });
  of_three->OnFreed([&] { ++told_three; });
  BlockPool one(of_one), two(of_two), three(of_three);
  Block* const held = one.Allocate(2 * 4096);
  // A large call of one client waits, and a small one of another behind it.
  EXPECT_EQ(two.AllocateInTurn(3 * 4096), nullptr);
  EXPECT_EQ(three.AllocateInTurn(1), nullptr);
  one.Free(held);
  EXPECT_EQ(told_two, 1);
  EXPECT_EQ(told_three, 0);
  EXPECT_EQ(three.AllocateInTurn(1), nullptr) << "not its turn";
  Block* const large = two.AllocateInTurn(3 * 4096);
  ASSERT_NE(large, nullptr);
  two.StopWaiting();
  EXPECT_EQ(told_three, 1) << "the next one's turn";
  EXPECT_NE(three.AllocateInTurn(1), nullptr);
  three.StopWaiting();
  two.Free(large);
  EXPECT_NE(one.AllocateInTurn(3 * 4096), nullptr);
}

// What it waits for is not given back by others.
TEST(BlockPoolTest, AClientThatHasAllItMayKeepsNoOtherOneWaiting) {
  const auto total = std::make_shared<MemoryTotal>(8 * 4096);
  BlockPool one(std::make_shared<MemoryAllowance>(2 * 4096, total));
  BlockPool two(std::make_shared<MemoryAllowance>(8 * 4096, total));
  BlockPool three(std::make_shared<MemoryAllowance>(8 * 4096, total));
  Block* const most = two.Allocate(7 * 4096);
  EXPECT_EQ(one.AllocateInTurn(2 * 4096), nullptr) << "for want of the total";
  EXPECT_EQ(three.AllocateInTurn(4096), nullptr) << "behind it";
  ASSERT_NE(one.Allocate(4096), nullptr);  // by a service: now its own allowance has no room, either
  two.Free(most);
  EXPECT_EQ(three.AllocateInTurn(4096), nullptr) << "still behind it";
  EXPECT_EQ(one.AllocateInTurn(2 * 4096), nullptr) << "for want of its own";
  EXPECT_NE(three.AllocateInTurn(4096), nullptr);
}

TEST(BlockPoolTest, WhoWaitsAgainWaitsBehindTheOthers) {
  const auto total = std::make_shared<MemoryTotal>(2 * 4096);
  const auto of_one = std::make_shared<MemoryAllowance>(UINT64_MAX, total);
  const auto of_two = std::make_shared<MemoryAllowance>(UINT64_MAX, total);
  int told_two = 0;
  of_two->OnFreed([&] { ++told_two; });
  BlockPool one(of_one), also_one(of_one), two(of_two);
  Block* const all = two.Allocate(2 * 4096);
  EXPECT_EQ(one.AllocateInTurn(1), nullptr);
  EXPECT_EQ(also_one.AllocateInTurn(1), nullptr);
  EXPECT_EQ(two.AllocateInTurn(1), nullptr);
  two.Free(all);
  ASSERT_NE(one.AllocateInTurn(1), nullptr);
  told_two = 0;
  one.PassTurn();  // it has more calls that wait
  EXPECT_EQ(told_two, 1);
  EXPECT_EQ(of_one->first_waiting(), &also_one);
  EXPECT_EQ(one.AllocateInTurn(1), nullptr);
  EXPECT_EQ(also_one.AllocateInTurn(1), nullptr) << "of the same client";
  EXPECT_NE(two.AllocateInTurn(1), nullptr);
}

TEST(BlockPoolTest, ClientsTogetherKeepNoMoreThanAQuarterOfTheTotal) {
  const auto total = std::make_shared<MemoryTotal>(16 * 4096);
  int told = 0;
  total->OnKept([&] { ++told; });
  std::vector<std::unique_ptr<BlockPool>> pools;
  for (int i = 0; i < 6; ++i) {
    pools.push_back(std::make_unique<BlockPool>(std::make_shared<MemoryAllowance>(UINT64_MAX, total)));
    pools.back()->Free(pools.back()->Allocate(1));
  }
  EXPECT_EQ(total->bytes_kept(), 4u * 4096);
  EXPECT_EQ(told, 1) << "when there was nothing";
  pools.clear();
  EXPECT_EQ(total->bytes_kept(), 0u);
  EXPECT_EQ(total->bytes_used(), 0u);
}

// --- Memory that goes back to the system ---

TEST(BlockPoolTest, WhatWasNotNeededForAWhileIsKeptNoLonger) {
  const auto total = std::make_shared<MemoryTotal>(UINT64_MAX);
  const auto allowance = std::make_shared<MemoryAllowance>(UINT64_MAX, total);
  BlockPool pool(allowance);
  constexpr uint64_t kBlock = 1 << 20;
  std::vector<Block*> peak;
  for (int i = 0; i < 8; ++i) peak.push_back(pool.Allocate(kBlock));
  Block* const used = pool.Allocate(1);
  for (Block* block : peak) pool.Free(block);
  EXPECT_EQ(pool.Shrink(), 0u) << "all were needed a moment ago";
  // Two at a time from then on.
  for (int i = 0; i < 3; ++i) {
    Block* const one = pool.Allocate(kBlock);
    Block* const other = pool.Allocate(kBlock);
    pool.Free(one);
    pool.Free(other);
  }
  EXPECT_EQ(pool.Shrink(), 6 * kBlock);
  EXPECT_EQ(pool.holdings().bytes, 2 * kBlock + 4096);
  EXPECT_EQ(total->bytes_kept(), 2 * kBlock);
  EXPECT_EQ(pool.Shrink(), 2 * kBlock);
  EXPECT_EQ(pool.Shrink(), 0u);
  EXPECT_EQ(pool.holdings().bytes, 4096u) << "what is in use stays";
  EXPECT_EQ(allowance->bytes_kept(), 0u);
  pool.Free(used);
}

TEST(BlockPoolTest, SizesBeyondAnyBlockAreRefused) {
  BlockPool pool(std::make_shared<MemoryAllowance>(UINT64_MAX));
  EXPECT_EQ(pool.Allocate(SIZE_MAX), nullptr);
  EXPECT_EQ(pool.Allocate(SIZE_MAX - 4096), nullptr);
  EXPECT_EQ(pool.bytes_used(), 0u);
}

TEST(BlockPoolTest, PoolsOfOneAllowanceShareItInTurn) {
  const auto allowance = std::make_shared<MemoryAllowance>(4 * 4096);
  int freed = 0;
  allowance->OnFreed([&] { ++freed; });
  BlockPool one(allowance), two(allowance), three(allowance);
  Block* const held = one.Allocate(2 * 4096);
  ASSERT_NE(held, nullptr);
  EXPECT_EQ(allowance->bytes_used(), 2u * 4096);
  // A large call waits, and a small one of another connection behind it.
  EXPECT_EQ(two.AllocateInTurn(3 * 4096), nullptr);
  EXPECT_EQ(three.AllocateInTurn(1), nullptr);
  EXPECT_EQ(allowance->first_waiting(), &two);
  // What is being executed may go on.
  Block* const small = three.Allocate(1);
  ASSERT_NE(small, nullptr);
  three.Free(small);
  EXPECT_EQ(freed, 1);
  one.Free(held);
  EXPECT_EQ(freed, 2);
  EXPECT_EQ(three.AllocateInTurn(1), nullptr) << "not its turn";
  Block* const large = two.AllocateInTurn(3 * 4096);
  ASSERT_NE(large, nullptr);
  two.StopWaiting();
  EXPECT_EQ(freed, 3) << "the next one's turn";
  EXPECT_EQ(allowance->first_waiting(), &three);
  Block* const last = three.AllocateInTurn(1);
  ASSERT_NE(last, nullptr);
  three.StopWaiting();
  EXPECT_EQ(allowance->first_waiting(), nullptr);
  two.Free(large);
  three.Free(last);
  EXPECT_EQ(allowance->bytes_used(), 0u);
}

TEST(BlockPoolTest, APoolThatGoesGivesBackItsPlaceAndItsBytes) {
  const auto allowance = std::make_shared<MemoryAllowance>(4096);
  BlockPool stays(allowance);
  {
    BlockPool goes(allowance);
    ASSERT_NE(goes.Allocate(1), nullptr);
    EXPECT_EQ(goes.AllocateInTurn(1), nullptr);
    EXPECT_EQ(stays.AllocateInTurn(1), nullptr);
    EXPECT_EQ(allowance->first_waiting(), &goes);
  }
  EXPECT_EQ(allowance->first_waiting(), &stays);
  EXPECT_EQ(allowance->bytes_used(), 0u);
  EXPECT_NE(stays.AllocateInTurn(1), nullptr);
}

}  // namespace
}  // namespace stagecoach::rpcrdma::internal
