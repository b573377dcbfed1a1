#include "rpcrdma/verbs/send_ledger.h"

#include <gtest/gtest.h>

namespace stagecoach::rpcrdma::internal {
namespace {

using Kind = SendEntry::Kind;

class SendLedgerTest : public ::testing::Test {
 protected:
  uint64_t Push(uint32_t tag, bool signaled) { return ledger_.Push({.kind = Kind::kSend, .tag = tag}, signaled); }
  // The tags that the completion of `sequence` reports, its own last.
  std::vector<uint32_t> Complete(uint64_t sequence) {
    std::vector<uint32_t> tags;
    const auto own = ledger_.Complete(sequence, [&](const SendEntry& entry) { tags.push_back(entry.tag); });
    if (own) tags.push_back(own->tag);
    return tags;
  }

  SendLedger ledger_{4};
};

using Tags = std::vector<uint32_t>;

TEST_F(SendLedgerTest, ACompletionReportsThoseBeforeItThatAskedForNone) {
  Push(1, false);
  Push(2, false);
  const uint64_t third = Push(3, true);
  Push(4, false);
  EXPECT_EQ(ledger_.room(), 0u);
  EXPECT_EQ(Complete(third), (Tags{1, 2, 3}));
  EXPECT_EQ(ledger_.size(), 1u);
}

// Were it taken for done, memory that the answer of a Read is still to be written to would be used, and given away.
TEST_F(SendLedgerTest, ARequestThatAskedForACompletionIsReportedByItsOwnAlone) {
  const uint64_t read = Push(1, true);
  Push(2, false);
  const uint64_t send = Push(3, true);
  EXPECT_EQ(Complete(send), (Tags{2, 3}));
  EXPECT_EQ(ledger_.size(), 3u) << "what is behind the oldest keeps its place";
  EXPECT_EQ(ledger_.at(read).tag, 1u);
  EXPECT_EQ(Complete(read), (Tags{1}));
  EXPECT_TRUE(ledger_.empty());
}

// [traps:responder#10]
TEST_F(SendLedgerTest, NothingIsReportedTwice) {
  const uint64_t read = Push(1, true);
  const uint64_t unsignaled = Push(2, false);
  const uint64_t send = Push(3, true);
  EXPECT_EQ(Complete(send), (Tags{2, 3}));
  EXPECT_EQ(Complete(send), Tags{});
  EXPECT_EQ(Complete(unsignaled), Tags{});
  EXPECT_EQ(Complete(read), (Tags{1}));
  EXPECT_EQ(Complete(read), Tags{});
  EXPECT_EQ(Complete(send + 1), Tags{}) << "not posted yet";
}

TEST_F(SendLedgerTest, APlaceIsUsedAnew) {
  for (uint32_t round = 0; round < 10; ++round) {
    Push(1, false);
    Push(2, false);
    const uint64_t last = Push(3, true);
    EXPECT_EQ(Complete(last), (Tags{1, 2, 3}));
    EXPECT_TRUE(ledger_.empty());
  }
}

TEST_F(SendLedgerTest, WhatTheDeviceDidNotTakeIsTakenBack) {
  const uint64_t first = Push(1, true);
  Push(2, false);
  Push(3, true);
  ledger_.Unpost(2);
  EXPECT_EQ(ledger_.size(), 1u);
  EXPECT_EQ(Push(4, true), first + 1);
  EXPECT_EQ(Complete(first + 1), (Tags{4}));
  EXPECT_EQ(Complete(first), (Tags{1}));
}

}  // namespace
}  // namespace stagecoach::rpcrdma::internal
