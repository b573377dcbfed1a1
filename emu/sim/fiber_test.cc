#include "emu/sim/fiber.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace stagecoach::emu {
namespace {

struct Player {
  std::string* history;
  char name;
  int turns;
  Fiber* self = nullptr;
  Fiber* other = nullptr;
};

Fiber* Play(void* argument) {
  auto* const player = static_cast<Player*>(argument);
  for (int i = 0; i < player->turns; ++i) {
    *player->history += player->name;
    Fiber::Switch(*player->self, *player->other);
  }
  return player->other;
}

TEST(Fiber, SwitchesToAndFroAndEndsWhereItIsTold) {
  std::string history;
  Fiber here;
  Player player{&history, 'p', 3};
  Fiber there(Play, &player);
  player.self = &there;
  player.other = &here;
  for (int i = 0; i < 4; ++i) {
    history += 'm';
    Fiber::Switch(here, there);
  }
  EXPECT_EQ(history, "mpmpmpm");
}

TEST(Fiber, OneThatNeverBeganNeedsNoEnd) {
  Player player{};
  Fiber never(Play, &player);
}

// Uses up much of a stack, and leaves it in the middle.
int Deep(Fiber& self, Fiber& other, int depth) {
  std::array<char, 512> room;
  std::memset(room.data(), depth, room.size());
  if (depth == 0) {
    Fiber::Switch(self, other);
    return 0;
  }
  const int below = Deep(self, other, depth - 1);
  for (const char c : room) {
    if (c != static_cast<char>(depth)) return -1;
  }
  return below + 1;
}

struct Diver {
  Fiber* self = nullptr;
  Fiber* other = nullptr;
  int depth = 0;
};

Fiber* Dive(void* argument) {
  auto* const diver = static_cast<Diver*>(argument);
  diver->depth = Deep(*diver->self, *diver->other, 100);
  return diver->other;
}

TEST(Fiber, ManySuspendedAtOnceKeepTheirStacksAndStacksAreUsedAgain) {
  for (int round = 0; round < 3; ++round) {
    Fiber here;
    std::vector<Diver> divers(100);
    std::vector<std::unique_ptr<Fiber>> fibers;
    for (Diver& diver : divers) {
      fibers.push_back(std::make_unique<Fiber>(Dive, &diver));
      diver.self = fibers.back().get();
      diver.other = &here;
      Fiber::Switch(here, *diver.self);
    }
    for (Diver& diver : divers) Fiber::Switch(here, *diver.self);
    for (const Diver& diver : divers) EXPECT_EQ(diver.depth, 100);
  }
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
int Bottomless(int depth) {
  volatile char room[1024];
  room[0] = static_cast<char>(depth);
  return depth < 0 ? room[0] : Bottomless(depth + 1) + room[0];
}

Fiber* Overflow(void* argument) {
  auto* const diver = static_cast<Diver*>(argument);
  diver->depth = Bottomless(0);
  return diver->other;
}

TEST(FiberDeathTest, AnOverflowIsAFault) {
  Fiber here;
  Diver diver{nullptr, &here};
  Fiber fiber(Overflow, &diver);
  EXPECT_EXIT(Fiber::Switch(here, fiber), testing::KilledBySignal(SIGSEGV), "");
}
#endif

}  // namespace
}  // namespace stagecoach::emu
