// A record layer without a stream, as those above it find it, in virtual time.
#include "emu/llp/memory/memory_llp.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/bytes.h"
#include "emu/sim/sim_world.h"
#include "tests/support/fake_memory.h"

namespace stagecoach::emu {
namespace {

class MemoryLlpTest : public testing::Test, public ReadyWatcher {
 protected:
  void OnReady() override { ++calls_; }
  ~MemoryLlpTest() override {
    if (b_ != nullptr) b_->SetWatcher(nullptr);
  }

  // True: it has gone over.
  static bool Say(MemoryLlp& llp, std::string_view text) {
    FakeMemory memory;
    if (llp.CanQueue()) llp.QueueRecord(AsBytes(text), {}, 1);
    return llp.Flush(memory).status == TxStatus::kIdle;
  }
  static std::optional<std::string> Hear(MemoryLlp& llp) {
    RecordHead record;
    if (llp.NextRecord(&record).status != RxStatus::kReady) return std::nullopt;
    std::string text(AsText(record.head));
    EXPECT_EQ(llp.Place(record.head.size(), {}).status, RxStatus::kReady);
    return text;
  }
  static RxStatus Next(MemoryLlp& llp) {
    RecordHead record;
    return llp.NextRecord(&record).status;
  }

  SimWorld world_{1};
  const std::shared_ptr<MemoryChannel> channel_ = MemoryLlp::NewChannel();
  std::unique_ptr<MemoryLlp> a_ = std::make_unique<MemoryLlp>(channel_, /*first=*/true, world_.loop(), RecordOptions{});
  std::unique_ptr<MemoryLlp> b_ =
      std::make_unique<MemoryLlp>(channel_, /*first=*/false, world_.loop(), RecordOptions{});
  int calls_ = 0;
};

TEST_F(MemoryLlpTest, RecordsComeInOrderAndThenTheEnd) {
  for (const char* text : {"one", "two", "three"}) ASSERT_TRUE(Say(*a_, text));
  a_->Shutdown();
  for (const char* text : {"one", "two", "three"}) EXPECT_EQ(Hear(*b_), text);
  EXPECT_EQ(Next(*b_), RxStatus::kEof);
  ASSERT_TRUE(Say(*b_, "answer")) << "receiving goes on";
  EXPECT_EQ(Hear(*a_), "answer");
}

TEST_F(MemoryLlpTest, WhoeverAbortsResetsBothEnds) {
  a_->Abort();
  EXPECT_EQ(Next(*a_), RxStatus::kReset);
  EXPECT_EQ(Next(*b_), RxStatus::kReset);
  FakeMemory memory;
  b_->QueueRecord(AsBytes("late"), {}, 1);
  EXPECT_EQ(b_->Flush(memory).status, TxStatus::kReset);
}

TEST_F(MemoryLlpTest, AFullListTakesNoMoreAndTellsWhenThereIsRoom) {
  const std::string large(MemoryLlp::kLargestRecord, 'x');
  size_t taken = 0;
  while (Say(*a_, large)) ASSERT_LE(++taken * large.size(), MemoryLlp::kRoom);
  EXPECT_EQ(taken * large.size(), MemoryLlp::kRoom);
  b_->SetWatcher(this);
  b_->Arm(true, false);
  world_.RunUntilIdle();
  EXPECT_EQ(calls_, 1) << "one-shot";
  ASSERT_EQ(Next(*b_), RxStatus::kReady);
  ASSERT_EQ(b_->Place(0, {}).status, RxStatus::kReady);
  FakeMemory memory;
  EXPECT_EQ(a_->Flush(memory).status, TxStatus::kIdle);
}

// Or a peer that gives more all the time would have a turn that never ends.
TEST_F(MemoryLlpTest, WhatIsThrownAwayInOneTurnIsBounded) {
  constexpr int kRecords = 1000;
  for (int i = 0; i < kRecords; ++i) ASSERT_TRUE(Say(*a_, "unwanted"));
  a_->Shutdown();
  Llp::Drained drained;
  int turns = 0;
  do {
    drained = b_->Drain();
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
