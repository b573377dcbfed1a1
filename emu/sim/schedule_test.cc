#include "emu/sim/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/prng.h"

namespace stagecoach::emu {
namespace {

constexpr Instant kStart{};

// Whatever is added, cancelled and taken: the same as an ordered map of (time, order of registration).
TEST(Schedule, AgreesWithAnOrderedMapWhateverIsDoneToIt) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    Prng prng(seed);
    Schedule schedule;
    std::map<std::pair<Instant, int>, Schedule::Id> model;
    std::vector<Schedule::Id> ids;
    int next = 0;
    int ran = -1;
    for (int step = 0; step < 3000; ++step) {
      const uint64_t choice = prng.Below(10);
      if (choice < 5) {
        const Instant when = kStart + Duration(static_cast<int64_t>(prng.Below(40))) +
                             (prng.OneIn(3) ? Duration(0) : schedule.now() - kStart);
        const int tag = next++;
        const auto id = schedule.Add(when, 0, [&ran, tag] { ran = tag; });
        ASSERT_NE(id, 0u);
        ids.push_back(id);
        model.emplace(std::pair(std::max(when, schedule.now()), tag), id);
      } else if (choice < 7 && !ids.empty()) {
        const Schedule::Id id = ids[prng.Below(ids.size())];  // may be gone
        const auto found =
            std::find_if(model.begin(), model.end(), [&](const auto& entry) { return entry.second == id; });
        EXPECT_EQ(schedule.Cancel(id) != nullptr, found != model.end());
        if (found != model.end()) model.erase(found);
      } else if (!model.empty()) {
        const auto first = model.begin();
        ASSERT_FALSE(schedule.empty());
        ASSERT_EQ(schedule.NextDue(), first->first.first);
        if (!schedule.HasDue()) schedule.AdvanceTo(schedule.NextDue());
        schedule.TakeDue().callback();
        EXPECT_EQ(ran, first->first.second) << "seed " << seed << " step " << step;
        model.erase(first);
      }
      ASSERT_EQ(schedule.size(), model.size());
    }
  }
}

TEST(Schedule, CountsTheEventsOfAnOwner) {
  Schedule schedule;
  const auto later = schedule.Add(kStart + 5ns, 1, [] {});
  schedule.Add(kStart + 5ns, 1, [] {});
  schedule.Add(kStart, 1, [] {});
  schedule.Add(kStart, 2, [] {});
  EXPECT_EQ(schedule.CountOf(1).due, 1u);
  EXPECT_EQ(schedule.CountOf(1).later, 2u);
  EXPECT_EQ(schedule.CountOf(Schedule::kEveryone).due, 2u);
  EXPECT_EQ(schedule.CountOf(3).due + schedule.CountOf(3).later, 0u);
  schedule.Cancel(later);
  schedule.TakeDue();
  schedule.TakeDue();
  schedule.AdvanceTo(kStart + 5ns);
  EXPECT_EQ(schedule.CountOf(1).due, 1u) << "its time has come";
  EXPECT_EQ(schedule.CountOf(1).later, 0u);
}

TEST(Schedule, AnOwnersEventsLeaveTogetherAndInOrder) {
  Schedule schedule;
  std::string ran;
  const auto add = [&](Duration when, uint32_t owner, char tag) {
    return schedule.Add(kStart + when, owner, [&ran, tag] { ran += tag; });
  };
  add(5ns, 1, 'c');
  add(5ns, 2, 'x');
  const auto cancelled = add(0ns, 1, '!');
  add(0ns, 1, 'a');
  add(0ns, 2, 'y');
  add(3ns, 1, 'b');
  schedule.Cancel(cancelled);
  for (const auto& callback : schedule.TakeAllOf(1)) callback();
  EXPECT_EQ(ran, "abc");
  EXPECT_EQ(schedule.size(), 2u);
  EXPECT_EQ(schedule.Cancel(cancelled), nullptr);
  const auto first = schedule.TakeDue();
  EXPECT_EQ(first.owner, 2u);
  first.callback();
  EXPECT_FALSE(schedule.HasDue());
  EXPECT_EQ(schedule.TakeAllOf(Schedule::kEveryone).size(), 1u);
  EXPECT_TRUE(schedule.empty());
  EXPECT_EQ(ran, "abcy");
}

}  // namespace
}  // namespace stagecoach::emu
