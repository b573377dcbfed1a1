// What a transport makes of silence that its owner excuses, in virtual time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "emu/engine/ib_test_support.h"

namespace stagecoach::emu {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using wire::IbOp;

// a's packets are lost until somebody says otherwise.
struct SilentPair : IbPair {
  explicit SilentPair(IbOptions of_a) : IbPair(of_a) {
    from_a.fate = [](size_t, ConstBytes) { return Fate::kDrop; };
  }
  static IbOptions Options(uint8_t timeout, uint8_t retries) {
    IbOptions options = TestOptions();
    options.timeout = timeout;
    options.retry_count = retries;
    return options;
  }
  void Post() { a.Post({.opcode = SendOpcode::kWrite}); }
  // To the next moment at which a would count silence; false if it would not.
  bool GoToSilence() {
    if (!a.transport.Deadline()) return false;
    now = *a.transport.Deadline();
    return a.transport.MayExcuse(now);
  }
  void Excuse(bool again = false) {
    a.transport.BeginTurn(now);
    a.transport.Excuse(again, now);
    Exchange();
  }
};

TEST(IbSilence, AnExcuseUsesUpNoRetryAndSendsNothingAgain) {
  SilentPair pair(SilentPair::Options(10, 0));
  pair.Post();
  pair.Exchange();
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(pair.GoToSilence());
    pair.Excuse();
  }
  EXPECT_EQ(pair.from_a.sent, 1u);
  EXPECT_THAT(pair.a.TakeSends(), IsEmpty());
  // What is not excused counts as ever.
  ASSERT_TRUE(pair.GoToSilence());
  pair.a.transport.OnDeadline(pair.now);
  EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kRetryExceeded));
}

TEST(IbSilence, OnlyWhatWouldCountMayBeExcused) {
  SilentPair pair(SilentPair::Options(10, 1));
  EXPECT_FALSE(pair.a.transport.MayExcuse(pair.now + std::chrono::hours(1))) << "nothing is awaited";
  pair.Post();
  pair.Exchange();
  const Instant due = pair.now + wire::AckTimeout(10);
  EXPECT_FALSE(pair.a.transport.MayExcuse(due - std::chrono::nanoseconds(1)));
  EXPECT_TRUE(pair.a.transport.MayExcuse(due));
  // Until the peer's timer is over, it has said when to come back.
  IbPair not_ready(SilentPair::Options(10, 1));
  not_ready.a.Post({.opcode = SendOpcode::kSend});
  not_ready.Exchange();
  EXPECT_FALSE(not_ready.a.transport.MayExcuse(not_ready.now + std::chrono::hours(1)));
}

TEST(IbSilence, TheNextLookComesTwiceAsLateEachTimeUpToASecondOrTheTimeout) {
  for (const uint8_t timeout : {1, 10, 16, 20, 31}) {
    SCOPED_TRACE(int{timeout});
    SilentPair pair(SilentPair::Options(timeout, 7));
    pair.Post();
    pair.Exchange();
    const Duration first = wire::AckTimeout(timeout);
    const Duration longest = std::max<Duration>(first, std::chrono::seconds(1));
    Duration expected = first;
    for (int i = 0; i < 40; ++i) {
      ASSERT_TRUE(pair.GoToSilence());
      const Instant before = pair.now;
      pair.Excuse();
      ASSERT_EQ(*pair.a.transport.Deadline() - before, expected);
      // The doubling itself ends, so that nothing wraps.
      expected = std::min(i < 16 ? expected * 2 : expected, longest);
    }
  }
}

TEST(IbSilence, WhatIsExcusedMayBeSaidAgain) {
  SilentPair pair(SilentPair::Options(10, 0));
  pair.Post();
  pair.Post();
  pair.Exchange();
  ASSERT_EQ(pair.from_a.sent, 2u);
  ASSERT_TRUE(pair.GoToSilence());
  pair.Excuse(/*again=*/true);
  EXPECT_EQ(pair.from_a.sent, 4u);
  pair.from_a.fate = nullptr;
  ASSERT_TRUE(pair.GoToSilence());
  pair.Excuse(/*again=*/true);
  EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess, WorkStatus::kSuccess));
}

TEST(IbSilence, WithoutACarrierAnExcuseWishesForOneEachTime) {
  SilentPair pair(SilentPair::Options(10, 0));
  pair.Carrier(false);
  pair.Post();
  EXPECT_TRUE(pair.a.transport.TakeRedialWish());
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(pair.GoToSilence());
    pair.Excuse();
    EXPECT_TRUE(pair.a.transport.TakeRedialWish());
  }
}

// What getting it took is not the peer's; but who comes and goes, and says nothing, gains nothing by it.
TEST(IbSilence, ANewCarrierGivesThePeerItsTimeOnce) {
  SilentPair pair(SilentPair::Options(10, 0));
  const Duration timeout = wire::AckTimeout(10);
  pair.Carrier(false);
  pair.Post();
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(pair.GoToSilence());
    pair.Excuse();
  }
  ASSERT_GT(*pair.a.transport.Deadline(), pair.now + timeout);
  pair.now += timeout / 4;
  pair.Carrier(true);
  const Instant due = pair.now + timeout;
  EXPECT_EQ(pair.a.transport.Deadline(), due);
  for (int i = 0; i < 3; ++i) {
    pair.now += timeout / 4;
    pair.Carrier(false);
    pair.Carrier(true);
    EXPECT_EQ(pair.a.transport.Deadline(), due);
  }
}

// A peer with other packet numbers is no peer that stands still, and hardware would tell the program.
TEST(IbSilence, APeerWithOtherNumbersIsNotExcused) {
  const struct {
    const char* what;
    uint32_t psn;
    uint8_t syndrome;
    bool is_elsewhere;
  } kAnswers[] = {{"acknowledges what comes next", 101, 0x1f, true},
                  {"acknowledges what was never sent", 100 + (1u << 22), 0x1f, true},
                  {"the last number that lies ahead", 100 + (1u << 23) - 1, 0x1f, true},
                  {"the first one that lies behind", 100 + (1u << 23), 0x1f, false},
                  {"acknowledges again what was before", 99, 0x1f, false},
                  {"misses what was before", 99, wire::kIbNakSequence, true},
                  {"misses what is far behind", 100 + (1u << 23), wire::kIbNakSequence, true}};
  for (const auto& answer : kAnswers) {
    SCOPED_TRACE(answer.what);
    SilentPair pair(SilentPair::Options(10, 7));
    pair.Post();
    pair.Exchange();
    pair.a.Arrive(
        {.op = IbOp::kAck, .destination_qp = IbPair::kQpA, .psn = answer.psn & 0xffffff, .syndrome = answer.syndrome},
        pair.now);
    EXPECT_EQ(pair.GoToSilence(), !answer.is_elsewhere);
    // One answer that fits, and it is as if the other had not been.
    pair.a.Arrive({.op = IbOp::kAck, .destination_qp = IbPair::kQpA, .psn = 100, .syndrome = 0x1f}, pair.now);
    EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess));
    pair.Post();
    pair.Exchange();
    if (!pair.GoToSilence()) {
      pair.a.transport.OnDeadline(pair.now);
      EXPECT_TRUE(pair.GoToSilence());
    }
  }
}

}  // namespace
}  // namespace stagecoach::emu
