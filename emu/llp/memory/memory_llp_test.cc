// A record layer without a stream, as those above it find it, in virtual time.
#include "emu/llp/memory/memory_llp.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "base/bytes.h"
#include "emu/llp/llp_contract.h"
#include "emu/sim/sim_world.h"
#include "tests/support/fake_memory.h"

namespace stagecoach::emu {
namespace {

class MemoryPair {
 public:
  Llp& a() { return *a_; }
  Llp& b() { return *b_; }
  void DropA() { a_.reset(); }
  void RunLoop() { world_.RunUntilIdle(); }

 private:
  SimWorld world_{1};
  const std::shared_ptr<MemoryChannel> channel_ = MemoryLlp::NewChannel();
  std::unique_ptr<MemoryLlp> a_ = std::make_unique<MemoryLlp>(channel_, /*first=*/true, world_.loop(), RecordOptions{});
  std::unique_ptr<MemoryLlp> b_ =
      std::make_unique<MemoryLlp>(channel_, /*first=*/false, world_.loop(), RecordOptions{});
};

INSTANTIATE_TYPED_TEST_SUITE_P(Memory, LlpContract, MemoryPair);

// The least of them that lists can hold.
TEST(MemoryLlpTest, AFullListHoldsAsMuchAsItSays) {
  MemoryPair pair;
  FakeMemory memory;
  const std::string large(MemoryLlp::kLargestRecord, 'x');
  size_t taken = 0;
  do {
    pair.a().QueueRecord(AsBytes(large), {}, 1);
  } while (pair.a().Flush(memory).status == TxStatus::kIdle && ++taken * large.size() <= MemoryLlp::kRoom);
  EXPECT_EQ(taken * large.size(), MemoryLlp::kRoom);
}

// Or a peer that gives more all the time would have a turn that never ends.
TEST(MemoryLlpTest, WhatIsThrownAwayInOneTurnIsBounded) {
  constexpr int kRecords = 1000;
  MemoryPair pair;
  FakeMemory memory;
  for (int i = 0; i < kRecords; ++i) {
    pair.a().QueueRecord(AsBytes("unwanted"), {}, 1);
    ASSERT_EQ(pair.a().Flush(memory).status, TxStatus::kIdle);
  }
  pair.a().Shutdown();
  Llp::Drained drained;
  int turns = 0;
  do {
    drained = pair.b().Drain();
    EXPECT_TRUE(drained.any);
    ASSERT_LE(++turns, kRecords);
    EXPECT_EQ(drained.end.has_value(), !drained.more);
  } while (drained.more);
  EXPECT_GE(turns, 10);
  ASSERT_TRUE(drained.end);
  EXPECT_EQ(drained.end->status, RxStatus::kEof);
}

}  // namespace
}  // namespace stagecoach::emu
