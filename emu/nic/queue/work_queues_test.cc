#include "emu/nic/queue/work_queues.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <deque>
#include <set>
#include <vector>

#include "base/prng.h"
#include "emu/nic/queue/slot_ring.h"

namespace stagecoach::emu {
namespace {

struct Block {
  std::array<uint64_t, kSlotsOfABlock> slots{};
  Block* next = nullptr;
};

class SlotRingTest : public ::testing::Test {
 protected:
  bool Room(SlotRing<Block>& ring, uint64_t number, uint64_t retired) {
    return ring.Room(number, retired, [this]() -> Block* {
      if (no_memory) return nullptr;
      ++made;
      return new Block;
    });
  }
  static uint64_t& At(SlotRing<Block>& ring, uint64_t number) {
    return ring.BlockOf(number).slots[SlotRing<Block>::IndexOf(number)];
  }

  bool no_memory = false;
  size_t made = 0;
};

// A queue of any capacity with any number of requests outstanding keeps each slot, and has no more blocks than it
// needs.
TEST_F(SlotRingTest, KeepsWhatIsOutstandingInAsFewBlocksAsThatNeeds) {
  Prng luck(5);
  for (const size_t capacity :
       {size_t{1}, size_t{2}, kSlotsOfABlock - 1, kSlotsOfABlock, kSlotsOfABlock + 1, size_t{100}, size_t{32768}}) {
    for (const size_t most : {size_t{1}, std::min(capacity, size_t{20}), std::min(capacity, size_t{1000})}) {
      SlotRing<Block> ring(capacity);
      made = 0;
      uint64_t posted = 0;
      uint64_t retired = 0;
      std::deque<uint64_t*> addresses;
      for (int i = 0; i < 5000; ++i) {
        if (posted - retired < most && !luck.OneIn(3)) {
          ASSERT_TRUE(Room(ring, posted, retired));
          At(ring, posted) = posted;
          addresses.push_back(&At(ring, posted));
          ++posted;
        } else if (retired < posted) {
          ASSERT_EQ(&At(ring, retired), addresses.front());
          ASSERT_EQ(At(ring, retired), retired);
          addresses.pop_front();
          ++retired;
        }
      }
      EXPECT_LE(made, most / kSlotsOfABlock + 2) << capacity << " " << most;
    }
  }
}

TEST_F(SlotRingTest, WithoutMemoryThereIsNoRoomUntilThereIsSome) {
  SlotRing<Block> ring(64);
  ASSERT_TRUE(Room(ring, 0, 0));
  no_memory = true;
  EXPECT_TRUE(Room(ring, kSlotsOfABlock - 1, 0)) << "what there is serves";
  EXPECT_FALSE(Room(ring, kSlotsOfABlock, 0));
  EXPECT_TRUE(Room(ring, kSlotsOfABlock, kSlotsOfABlock)) << "as it does when its work is retired";
  no_memory = false;
  EXPECT_TRUE(Room(ring, 2 * kSlotsOfABlock, kSlotsOfABlock));
  ring.Clear();
  no_memory = true;
  EXPECT_TRUE(Room(ring, 0, 0)) << "nothing is given back";
}

constexpr QpCapabilities kLarge = {32768, 32768, 32, 32, 512};

TEST(WorkQueuesTest, ALargeQueueHoldsWhatItSaysAndNoMore) {
  SendQueue sends(kLarge, {.kind = QpKind::kRc});
  ReceiveQueue receives(kLarge);
  const std::vector<ScatterGather> sges(32, {.address = 1, .length = 2, .lkey = 3});
  // Across the end of the numbers that the capacity has, too.
  for (uint64_t i = 0; i < 3 * uint64_t{kLarge.max_send_wr}; ++i) {
    if (i >= kLarge.max_send_wr) {
      ASSERT_EQ(sends.Add({.wr_id = i, .sges = sges}), ENOMEM);
      ASSERT_EQ(receives.Add({.wr_id = i, .sges = sges}), ENOMEM);
      SendSlot* const slot = sends.OldestDone();
      ASSERT_NE(slot, nullptr);
      ASSERT_EQ(slot->wr_id, i - kLarge.max_send_wr);
      ASSERT_TRUE(sends.IsOldest(*slot));
      sends.Retire();
      ASSERT_EQ(receives.Oldest()->wr_id, i - kLarge.max_send_wr);
      receives.Retire();
    }
    ASSERT_EQ(sends.Add({.wr_id = i, .sges = sges}), 0);
    ASSERT_EQ(receives.Add({.wr_id = i, .sges = sges}), 0);
    SendSlot& slot = sends.NextToSubmit();
    ASSERT_EQ(slot.wr_id, i);
    ASSERT_EQ(slot.sges.size(), sges.size());
    ASSERT_EQ(&SendQueue::SlotOf(&slot), &slot);
    slot.done = true;
    sends.AdvanceSubmitted();
    const ReceiveWork* const work = receives.TakeReceive();
    ASSERT_NE(work, nullptr);
    ASSERT_EQ(work->wr_id, i);
    ASSERT_EQ(work->sges.size(), sges.size());
  }
}

// As long as there is room for, one byte longer, and so long that the sum would wrap in 32 bits.
TEST(WorkQueuesTest, InlineDataIsNoLongerThanItsRoomHoweverTheLengthsAddUp) {
  SendQueue sends(kLarge, {.kind = QpKind::kRc});
  const std::vector<std::byte> data(513);
  const auto add = [&](std::vector<uint32_t> lengths) {
    std::vector<ScatterGather> sges;
    for (const uint32_t length : lengths)
      sges.push_back({.address = reinterpret_cast<uint64_t>(data.data()), .length = length});
    return sends.Add({.is_inline = true, .sges = sges});
  };
  EXPECT_EQ(add({512}), 0);
  EXPECT_EQ(add({500, 0, 12}), 0);
  EXPECT_EQ(add({513}), EINVAL);
  EXPECT_EQ(add({500, 13}), EINVAL);
  EXPECT_EQ(add({UINT32_MAX}), EINVAL);
  EXPECT_EQ(add({UINT32_MAX, 1}), EINVAL);
  EXPECT_EQ(add({1u << 31, 1u << 31}), EINVAL);
  EXPECT_EQ(add({UINT32_MAX, 513}), EINVAL);
  EXPECT_EQ(sends.posted(), 2u);
}

TEST(WorkQueuesTest, BeginsAnewWhenCleared) {
  SendQueue sends(kLarge, {.kind = QpKind::kRc});
  for (const uint64_t count : {5u, 100u, 1u}) {
    for (uint64_t i = 0; i < count; ++i) ASSERT_EQ(sends.Add({.wr_id = i}), 0);
    EXPECT_EQ(sends.posted(), count);
    sends.Clear();
    EXPECT_EQ(sends.posted(), 0u);
    EXPECT_FALSE(sends.HasUnsubmitted());
  }
}

}  // namespace
}  // namespace stagecoach::emu
