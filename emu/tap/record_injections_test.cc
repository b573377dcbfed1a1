// Records that are lost, sent twice and overtaken: what of them leaves, in which order, and what is told of them.
#include "emu/tap/injection_tap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "emu/engine/no_memory.h"
#include "emu/llp/llp_test_support.h"
#include "emu/sim/sim_world.h"

namespace stagecoach::emu {
namespace {

// Takes `room` records between two flushes, and reports what it was given.
class FakeLlp final : public QuietLlp {
 public:
  explicit FakeLlp(size_t room) : room_(room) {}
  bool CanQueue() const override { return queued_.size() < room_; }
  void QueueRecord(ConstBytes header, std::span<const TxPart>, uint64_t cookie) override {
    EXPECT_TRUE(CanQueue());
    queued_.emplace_back(std::to_integer<int>(header[0]), cookie);
  }
  TxResult Flush(MemoryPort&) override {
    if (blocked) return {.status = TxStatus::kWouldBlock};
    if (memory_gone) return {.status = TxStatus::kMemoryFault, .cookie = queued_.front().second};
    for (size_t i = 0; i < at_a_time && !queued_.empty(); ++i) {
      left.push_back(queued_.front().first);
      sent_.push_back(queued_.front().second);
      queued_.erase(queued_.begin());
    }
    return {.status = queued_.empty() ? TxStatus::kIdle : TxStatus::kWouldBlock};
  }
  bool TakeSent(uint64_t* cookie) override {
    if (sent_.empty()) return false;
    *cookie = sent_.front();
    sent_.erase(sent_.begin());
    return true;
  }
  bool TxIdle() const override { return queued_.empty(); }

  std::vector<int> left;        // first byte of each record that has left
  size_t at_a_time = SIZE_MAX;  // as many as leave in one flush
  bool blocked = false;
  bool memory_gone = false;

 private:
  const size_t room_;
  std::vector<std::pair<int, uint64_t>> queued_;
  std::vector<uint64_t> sent_;
};

std::unique_ptr<Llp> WithRules(std::unique_ptr<Llp> below, const std::string& rules) {
  static SimWorld world({});
  static SimFabric& fabric = world.AddHost("a", {});
  const auto plan = InjectionPlan::Make(*ParseInjectionRules(rules));
  return WithInjections(std::move(below), plan->NewConnection(),
                        {.fabric = fabric, .transport = InjectionTransport::kInfiniband, .mtu = 1024});
}

struct Outcome {
  std::vector<int> left;
  std::vector<uint64_t> sent;
};

// Queues `count` records, each with its number as cookie and, cut to a byte, as contents.
Outcome PassOn(const std::string& rules, uint64_t count, size_t room = 3, size_t at_a_time = SIZE_MAX) {
  auto below = std::make_unique<FakeLlp>(room);
  FakeLlp& fake = *below;
  fake.at_a_time = at_a_time;
  const std::unique_ptr<Llp> llp = WithRules(std::move(below), rules);
  NoMemory memory;
  Outcome outcome;
  const auto flush = [&] {
    llp->Flush(memory);
    for (uint64_t cookie = 0; llp->TakeSent(&cookie);) outcome.sent.push_back(cookie);
  };
  for (uint64_t i = 0; i < count; ++i) {
    while (!llp->CanQueue()) flush();
    const std::byte header{static_cast<unsigned char>(i)};
    llp->QueueRecord({&header, 1}, {}, i);
    if (!llp->CanQueue()) flush();
  }
  while (!llp->TxIdle()) flush();
  outcome.left = fake.left;
  return outcome;
}

std::vector<int> UpTo(int count) {
  std::vector<int> numbers;
  for (int i = 0; i < count; ++i) numbers.push_back(i);
  return numbers;
}

TEST(RecordInjections, WithoutAnyRecordsPassAsTheyAre) {
  const Outcome outcome = PassOn("stall message=1", 100);
  EXPECT_EQ(outcome.left, UpTo(100));
  EXPECT_EQ(outcome.sent.size(), 100u);
}

TEST(RecordInjections, EveryRecordIsReportedOnceWhateverBecomesOfIt) {
  for (const size_t room : {1u, 2u, 5u}) {
    const Outcome outcome = PassOn("drop kind=any one-in=3 seed=" + std::to_string(room) +
                                       "; overtake kind=any one-in=3 seed=1; duplicate kind=any one-in=3 seed=2",
                                   200, room);
    std::vector<uint64_t> sent = outcome.sent;
    std::sort(sent.begin(), sent.end());
    ASSERT_EQ(sent.size(), 200u);
    for (uint64_t i = 0; i < sent.size(); ++i) EXPECT_EQ(sent[i], i);
  }
}

TEST(RecordInjections, SomeAreLostSomeLeaveTwiceAndAllInOrder) {
  const Outcome lost = PassOn("drop kind=any one-in=4 seed=1", 200);
  EXPECT_LT(lost.left.size(), 180u);
  EXPECT_GT(lost.left.size(), 100u);
  const Outcome twice = PassOn("duplicate kind=any one-in=4 seed=1", 200);
  EXPECT_GT(twice.left.size(), 220u);
  for (const Outcome& outcome : {lost, twice}) EXPECT_TRUE(std::is_sorted(outcome.left.begin(), outcome.left.end()));
}

// Also where there is room for one more at a time.
TEST(RecordInjections, SomeAreOvertakenByTheNextOne) {
  for (const size_t at_a_time : {SIZE_MAX, size_t{1}}) {
    SCOPED_TRACE(at_a_time);
    const Outcome outcome = PassOn("overtake kind=any one-in=4 seed=1", 200, 10, at_a_time);
    ASSERT_EQ(outcome.left.size(), 200u);
    int overtaken = 0;
    for (int i = 0; i < 200; ++i) {
      const int record = outcome.left[static_cast<size_t>(i)];
      EXPECT_LE(std::abs(record - i), 1);
      overtaken += record < i;
    }
    EXPECT_GT(overtaken, 15);
    EXPECT_LT(overtaken, 70);
    EXPECT_TRUE(std::equal(outcome.left.begin(), outcome.left.end(), outcome.sent.begin(),
                           [](int record, uint64_t cookie) { return static_cast<uint64_t>(record) == cookie; }));
  }
}

TEST(RecordInjections, OneThatNothingFollowsLeavesAllTheSame) {
  auto below = std::make_unique<FakeLlp>(10);
  FakeLlp& fake = *below;
  const auto llp = WithRules(std::move(below), "overtake kind=any");
  NoMemory memory;
  const std::byte header{0};
  fake.blocked = true;
  llp->QueueRecord({&header, 1}, {}, 7);
  EXPECT_FALSE(llp->TxIdle());
  EXPECT_EQ(llp->Flush(memory).status, TxStatus::kWouldBlock);
  EXPECT_FALSE(llp->TxIdle());
  fake.blocked = false;
  EXPECT_EQ(llp->Flush(memory).status, TxStatus::kIdle);
  EXPECT_EQ(fake.left.size(), 1u);
  uint64_t cookie = 0;
  EXPECT_TRUE(llp->TakeSent(&cookie));
  EXPECT_EQ(cookie, 7u);
  EXPECT_TRUE(llp->TxIdle());
}

// A rule has fired when it has acted: what was to be overtaken, and was not, is not told.
TEST(RecordInjections, OvertakenIsWhatAnotherHasPassed) {
  auto below = std::make_unique<FakeLlp>(10);
  FakeLlp& fake = *below;
  SimWorld world({});
  TraceLog trace;
  const auto plan = InjectionPlan::Make(*ParseInjectionRules("overtake kind=any"));
  const auto llp = WithInjections(
      std::move(below), plan->NewConnection(),
      {.fabric = world.AddHost("a", {}), .trace = &trace, .transport = InjectionTransport::kInfiniband, .mtu = 1024});
  NoMemory memory;
  const std::byte header[] = {std::byte{0}, std::byte{1}, std::byte{2}};
  llp->QueueRecord({&header[0], 1}, {}, 0);
  llp->Flush(memory);
  EXPECT_EQ(plan->counters(0).fired, 0u) << "nothing came behind it";
  EXPECT_TRUE(trace.lines().empty());
  llp->QueueRecord({&header[1], 1}, {}, 1);
  EXPECT_TRUE(trace.lines().empty()) << "nobody knows yet";
  llp->QueueRecord({&header[2], 1}, {}, 2);
  EXPECT_EQ(plan->counters(0).fired, 1u);
  EXPECT_EQ(trace.lines().size(), 1u);
  llp->Flush(memory);
  EXPECT_EQ(fake.left, (std::vector<int>{0, 2, 1}));
  EXPECT_EQ(plan->counters(0).fired, 1u);
}

// Also where the layer below has room for one at a time: the second waits for it, and keeps its place.
TEST(RecordInjections, WhatIsDoubledLeavesTwiceWhateverRoomThereIs) {
  for (const size_t room : {1u, 2u, 3u, 50u}) {
    for (const size_t at_a_time : {SIZE_MAX, size_t{1}}) {
      SCOPED_TRACE(testing::Message() << room << ' ' << at_a_time);
      const Outcome outcome = PassOn("duplicate kind=any", 20, room, at_a_time);
      std::vector<int> twice;
      for (int i = 0; i < 20; ++i) twice.insert(twice.end(), 2, i);
      EXPECT_EQ(outcome.left, twice);
      EXPECT_EQ(outcome.sent.size(), 20u);
    }
  }
}

TEST(RecordInjections, NothingIsReportedBeforeWhatWasQueuedAheadOfIt) {
  auto below = std::make_unique<FakeLlp>(100);
  FakeLlp& fake = *below;
  const auto llp = WithRules(std::move(below), "drop kind=any one-in=3 seed=4; duplicate kind=any one-in=3 seed=5");
  NoMemory memory;
  const std::byte header{0};
  std::vector<uint64_t> sent;
  fake.blocked = true;
  for (uint64_t i = 0; i < 40; ++i) {
    llp->QueueRecord({&header, 1}, {}, i);
    llp->Flush(memory);
    for (uint64_t cookie = 0; llp->TakeSent(&cookie);) sent.push_back(cookie);
  }
  ASSERT_FALSE(llp->TxIdle());
  EXPECT_LT(sent.size(), 5u) << "of those that were lost, the very first alone";
  fake.blocked = false;
  llp->Flush(memory);
  for (uint64_t cookie = 0; llp->TakeSent(&cookie);) sent.push_back(cookie);
  ASSERT_EQ(sent.size(), 40u);
  for (uint64_t i = 0; i < sent.size(); ++i) EXPECT_EQ(sent[i], i);
  EXPECT_TRUE(llp->TxIdle());
}

TEST(RecordInjections, OfARecordThatIsSentTwiceTheFirstMayFindItsMemoryGone) {
  auto below = std::make_unique<FakeLlp>(10);
  FakeLlp& fake = *below;
  const auto llp = WithRules(std::move(below), "duplicate kind=any");
  NoMemory memory;
  const std::byte header{0};
  llp->QueueRecord({&header, 1}, {}, 7);
  fake.memory_gone = true;
  const TxResult result = llp->Flush(memory);
  EXPECT_EQ(result.status, TxStatus::kMemoryFault);
  EXPECT_EQ(result.cookie, 7u) << "whose work it was must be known";
}

TEST(RecordInjections, EverythingCanBeLost) {
  const Outcome outcome = PassOn("drop kind=any", 50);
  EXPECT_TRUE(outcome.left.empty());
  EXPECT_EQ(outcome.sent.size(), 50u);
}

TEST(RecordInjections, TheSameLuckLosesTheSame) {
  const std::string rules = "drop kind=any one-in=5 seed=9; duplicate kind=any one-in=5 seed=9";
  EXPECT_EQ(PassOn(rules, 100).left, PassOn(rules, 100).left);
}

}  // namespace
}  // namespace stagecoach::emu
