#include "rpcrdma/wire/refusal.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "base/bytes.h"

namespace stagecoach::rpcrdma {
namespace {

using Reason = Refusal::Reason;

TEST(Refusal, IsTwelveBytes) {
  const auto bytes = EncodeRefusal({.reason = Reason::kAddressConnections, .limit = 64});
  EXPECT_EQ(ConstBytes(bytes).size(), kRefusalSize);
  EXPECT_EQ(ToHex(bytes), "534352460103000000000040");
}

TEST(Refusal, EveryReasonAndLimitIsReadAsItWasWritten) {
  for (int reason = 0; reason <= 0xff; ++reason) {
    for (const uint32_t limit : {0u, 1u, UINT32_MAX - 1, UINT32_MAX}) {
      const Refusal refusal{.reason = static_cast<Reason>(reason), .limit = limit};
      EXPECT_EQ(DecodeRefusal(EncodeRefusal(refusal)), refusal);
    }
  }
}

TEST(Refusal, WhatStandsBehindItDoesNotCount) {
  const auto bytes = EncodeRefusal({.reason = Reason::kClients, .limit = 128});
  std::vector<std::byte> padded(bytes.begin(), bytes.end());
  padded.resize(148);
  EXPECT_EQ(DecodeRefusal(padded), (Refusal{.reason = Reason::kClients, .limit = 128}));
}

TEST(Refusal, AnythingElseIsNone) {
  const auto good = EncodeRefusal({.reason = Reason::kClients, .limit = 128});
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_EQ(DecodeRefusal(ConstBytes(good).first(size)), std::nullopt) << size;
  }
  for (size_t i = 0; i < 5; ++i) {  // identifier and version
    auto bad = good;
    bad[i] ^= std::byte{1};
    EXPECT_EQ(DecodeRefusal(bad), std::nullopt) << i;
  }
  EXPECT_EQ(DecodeRefusal(std::vector<std::byte>(148)), std::nullopt);
}

TEST(Refusal, EachReasonHasWordsOfItsOwn) {
  std::set<std::string> words;
  for (uint8_t reason = 1; reason <= 6; ++reason) words.insert(ToString({.reason = static_cast<Reason>(reason)}));
  EXPECT_EQ(words.size(), 6u);
  EXPECT_EQ(ToString({.reason = Reason::kAddressConnections, .limit = 64}),
            "the server takes at most 64 connections from one address, or one /64 network of IPv6");
  EXPECT_EQ(ToString({.reason = static_cast<Reason>(255)}),
            "the server refused the connection for reason 255, which is not known here");
}

}  // namespace
}  // namespace stagecoach::rpcrdma
