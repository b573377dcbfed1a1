#include "rpcrdma/core/credit_budget.h"

#include <gtest/gtest.h>

#include <deque>

#include "base/prng.h"

namespace stagecoach::rpcrdma {
namespace {

TEST(CreditWindow, AloneItGrantsAllThereIs) {
  CreditWindow window(64);
  EXPECT_EQ(window.granted(), 64u);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(window.OnReply(), 64u);
  EXPECT_EQ(window.reserved(), 64u);
}

TEST(CreditWindow, GrantsShrinkToAShareAndComeBackOneByOne) {
  const auto budget = std::make_shared<CreditBudget>(16, 0);
  CreditWindow first(16);
  first.Join(budget);
  EXPECT_EQ(first.OnReply(), 16u);
  EXPECT_EQ(budget->free(), 0u);
  CreditWindow second(16);
  second.Join(budget);
  EXPECT_EQ(budget->reserved(), 17u) << "overdrawn by the one that a connection has in any case";
  // The first has been promised 16, and gives them back as its calls are answered.
  for (uint64_t reserved = 15; reserved >= 8; --reserved) {
    EXPECT_EQ(first.OnReply(), 8u);
    EXPECT_EQ(first.reserved(), reserved);
  }
  EXPECT_EQ(first.OnReply(), 8u);
  EXPECT_EQ(first.reserved(), 8u);
  EXPECT_EQ(second.OnReply(), 8u);
  EXPECT_EQ(budget->free(), 0u);
}

TEST(CreditWindow, SpareCreditsAreForConnectionsToCome) {
  const auto budget = std::make_shared<CreditBudget>(16, 4);
  CreditWindow first(16);
  first.Join(budget);
  EXPECT_EQ(first.OnReply(), 12u);
  EXPECT_EQ(budget->free(), 4u);
  std::deque<CreditWindow> others;
  for (int i = 0; i < 4; ++i) others.emplace_back(16).Join(budget);
  EXPECT_EQ(budget->free(), 0u);
  for (CreditWindow& each : others) EXPECT_EQ(each.OnReply(), 1u);
}

// A requester whose calls end with errors goes by the grant before them, however many there are and whatever the share
// has become: what it may send stays reserved.
TEST(CreditWindow, AnAnswerWithoutGrantLeavesTheGrantInForce) {
  const auto budget = std::make_shared<CreditBudget>(16, 0);
  CreditWindow first(16);
  first.Join(budget);
  EXPECT_EQ(first.OnAnswerWithoutGrant(), 1u);
  EXPECT_EQ(first.reserved(), 1u) << "the one that a connection has before its first grant";
  EXPECT_EQ(first.OnReply(), 16u);
  CreditWindow second(16);
  second.Join(budget);
  for (int i = 0; i < 40; ++i) {
    EXPECT_EQ(first.OnAnswerWithoutGrant(), 16u);
    EXPECT_EQ(first.reserved(), 16u);
    EXPECT_EQ(budget->reserved(), 17u);
  }
  EXPECT_EQ(first.OnReply(), 8u);
  for (int i = 0; i < 40; ++i) first.OnAnswerWithoutGrant();
  EXPECT_EQ(first.reserved(), 8u);
  EXPECT_EQ(budget->reserved(), 9u);
}

TEST(CreditWindow, WhoLeavesGivesBackEverything) {
  const auto budget = std::make_shared<CreditBudget>(16, 0);
  {
    CreditWindow window(16);
    window.Join(budget);
    window.OnReply();
    EXPECT_EQ(budget->members(), 1u);
  }
  EXPECT_EQ(budget->members(), 0u);
  EXPECT_EQ(budget->reserved(), 0u);
}

TEST(CreditWindow, TheTightestOfSeveralBudgetsCounts) {
  const auto wide = std::make_shared<CreditBudget>(100, 0);
  const auto tight = std::make_shared<CreditBudget>(5, 0);
  CreditWindow window(64);
  window.Join(wide);
  window.Join(tight);
  EXPECT_EQ(window.OnReply(), 5u);
  EXPECT_EQ(wide->reserved(), 5u);
}

// Requesters that use every credit of whichever grant they have seen, replies that arrive late: no budget is ever
// overdrawn, nobody's calls exceed what is reserved for it, and nobody is left without a credit.
TEST(CreditWindow, NoRequesterCanHaveMoreCallsThanAreReserved) {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    Prng prng(seed);
    const auto total = static_cast<uint32_t>(8 + prng.Below(60));
    const auto budget = std::make_shared<CreditBudget>(total, total / 4);
    struct Connection {
      explicit Connection(uint32_t most) : window(most) {}
      CreditWindow window;
      uint64_t arrived = 0;  // at the server, not answered
      uint64_t on_the_wire = 0;
      std::deque<uint32_t> replies;  // grants that the requester has not seen
      uint64_t outstanding = 0;      // as it counts
      uint32_t grant = 1;
    };
    std::vector<std::unique_ptr<Connection>> connections;
    for (int step = 0; step < 5000; ++step) {
      const uint64_t what = prng.Below(10);
      if (what == 0 && budget->free() > 0) {
        connections.push_back(std::make_unique<Connection>(static_cast<uint32_t>(1 + prng.Below(total))));
        connections.back()->window.Join(budget);
      }
      if (connections.empty()) continue;
      const size_t index = prng.Below(connections.size());
      Connection& one = *connections[index];
      if (what == 1 && prng.Below(20) == 0) {
        connections.erase(connections.begin() + static_cast<ptrdiff_t>(index));
        continue;
      }
      if (what < 4) {
        for (; one.outstanding < one.grant; ++one.outstanding) ++one.on_the_wire;
      } else if (what < 6 && one.on_the_wire > 0) {
        --one.on_the_wire;
        ++one.arrived;
      } else if (what < 8 && one.arrived > 0) {
        --one.arrived;
        one.replies.push_back(one.window.OnReply());
        ASSERT_GE(one.replies.back(), 1u);
      } else if (!one.replies.empty()) {
        one.grant = one.replies.front();
        one.replies.pop_front();
        --one.outstanding;
      }
      ASSERT_LE(one.arrived + one.on_the_wire, one.window.reserved()) << "seed " << seed;
      ASSERT_LE(budget->reserved(), total) << "seed " << seed;
    }
  }
}

}  // namespace
}  // namespace stagecoach::rpcrdma
