#include "emu/nic/queue/combining_lock.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

namespace stagecoach::emu {
namespace {

constexpr uint32_t kBit = 1u << CombiningLock::kFirstRequestBit;
const auto kNothing = [](uint32_t) {};

TEST(CombiningLockTest, ARequestIsServedByItsMakerOrByTheHolder) {
  CombiningLock lock;
  uint32_t served = 0;
  const auto serve = [&](uint32_t bits) { served |= bits; };
  ASSERT_TRUE(lock.Request(kBit));
  EXPECT_FALSE(lock.Request(kBit << 1));
  EXPECT_FALSE(lock.TryRequest(kBit << 2)) << "leaves no trace";
  EXPECT_FALSE(lock.TryEnter());
  lock.Leave(serve);
  EXPECT_EQ(served, kBit | kBit << 1);
  ASSERT_TRUE(lock.TryRequest(kBit << 2));
  served = 0;
  lock.Leave(serve);
  EXPECT_EQ(served, kBit << 2);
  EXPECT_TRUE(lock.TryEnter());
  lock.Leave(serve);
}

TEST(CombiningLockTest, ARequestMadeWhileTheHolderServesIsServedBeforeItLeaves) {
  CombiningLock lock;
  std::vector<uint32_t> served;
  ASSERT_TRUE(lock.Request(kBit));
  lock.Leave([&](uint32_t bits) {
    served.push_back(bits);
    if (served.size() == 1) {
      EXPECT_FALSE(lock.Request(kBit << 1));
    }
  });
  EXPECT_EQ(served, (std::vector<uint32_t>{kBit, kBit << 1}));
}

TEST(CombiningLockTest, ThreadsThatWaitAndThreadsThatAskExcludeEachOtherAndNoneIsForgotten) {
  constexpr int kTurns = 20000;
  CombiningLock lock;
  int guarded = 0;  // not atomic: the lock is what keeps it right
  int entered = 0;
  std::atomic<int> asked{0};
  int answered = 0;
  const auto serve = [&](uint32_t) {
    ++guarded;
    answered = asked.load();
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      for (int turn = 0; turn < kTurns; ++turn) {
        lock.Enter();
        ++guarded;
        ++entered;
        lock.Leave(serve);
      }
    });
  }
  threads.emplace_back([&] {
    for (int turn = 0; turn < kTurns; ++turn) {
      asked.fetch_add(1);
      if (lock.Request(kBit)) lock.Leave(serve);
    }
  });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(entered, 3 * kTurns);
  EXPECT_EQ(answered, kTurns) << "the last request was served after it was made";
  EXPECT_GT(guarded, 3 * kTurns);
}

// As with a QP: the last to come waits for whoever is inside, and destroys the lock when it is out itself.
TEST(CombiningLockTest, TheLastToEnterMayDestroyItWhileTheOneBeforeIsOnItsWayOut) {
  for (int round = 0; round < 2000; ++round) {
    auto lock = std::make_unique<CombiningLock>();
    std::atomic<bool> inside{false};
    std::thread before([&, shared = lock.get()] {
      shared->Enter();
      inside.store(true);
      shared->Leave(kNothing);
    });
    while (!inside.load()) std::this_thread::yield();
    lock->Enter();
    lock->Leave(kNothing);
    lock.reset();
    before.join();
  }
}

}  // namespace
}  // namespace stagecoach::emu
