#include "emu/nic/loop/deadline_heap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "base/prng.h"

namespace stagecoach::emu {
namespace {

Instant At(uint64_t ticks) {
  return Instant(Duration(static_cast<int64_t>(ticks)));
}

// A list that is searched each time.
std::optional<Instant> EarliestOf(const std::array<std::optional<Instant>, 40>& model) {
  std::optional<Instant> earliest;
  for (const std::optional<Instant>& when : model) {
    if (when) earliest = std::min(earliest.value_or(Instant::max()), *when);
  }
  return earliest;
}

TEST(DeadlineHeapTest, AgreesWithAListWhateverIsSetWithdrawnAndTaken) {
  Prng luck(11);
  std::array<DeadlineEntry, 40> entries;
  std::array<std::optional<Instant>, 40> model;
  DeadlineHeap heap;
  for (int i = 0; i < 20000; ++i) {
    const size_t which = luck.Below(entries.size());
    switch (luck.Below(4)) {
      case 0:
        heap.Set(&entries[which], std::nullopt);
        model[which].reset();
        break;
      case 1:
        if (DeadlineEntry* const first = heap.Earliest()) {
          model[static_cast<size_t>(first - entries.data())].reset();
          heap.Set(first, std::nullopt);
        }
        break;
      default:
        // Few different times, so that many are equal, and the ends of what there is.
        model[which] = luck.OneIn(50) ? (luck.OneIn(2) ? Instant::max() : Instant::min()) : At(luck.Below(30));
        heap.Set(&entries[which], model[which]);
        break;
    }
    ASSERT_EQ(entries[which].when(), model[which]);
    const DeadlineEntry* const first = heap.Earliest();
    ASSERT_EQ(first != nullptr ? first->when() : std::nullopt, EarliestOf(model)) << i;
    ASSERT_EQ(heap.empty(), first == nullptr);
  }
}

TEST(DeadlineHeapTest, TheEarlierOfTwoIsWithdrawnAndTheOtherStays) {
  DeadlineEntry early;
  DeadlineEntry late;
  DeadlineHeap heap;
  heap.Set(&early, At(1));
  heap.Set(&late, At(2));
  heap.Set(&early, std::nullopt);
  EXPECT_EQ(heap.Earliest(), &late);
  EXPECT_EQ(early.when(), std::nullopt);
  heap.Set(&late, At(0));
  EXPECT_EQ(heap.Earliest()->when(), At(0));
}

}  // namespace
}  // namespace stagecoach::emu
