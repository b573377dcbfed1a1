#include "rpcrdma/wire/probe_answer.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/bytes.h"
#include "rpcrdma/wire/header_v1.h"
#include "rpcrdma/wire/header_v2.h"
#include "tests/support/hex.h"

namespace stagecoach::rpcrdma {
namespace {

Result<ProbeAnswer, HeaderFault> Answer(const std::string& hex) {
  const auto bytes = FromHex(hex);
  return DecodeProbeAnswer(bytes);
}

std::string Word(uint32_t value) {
  std::vector<std::byte> bytes(4);
  ByteWriter(bytes).U32(value);
  return ToHex(bytes);
}

struct Range {
  uint32_t low;
  uint32_t high;
};
// The last three: no range, none that a server can mean, and one whose words are those of READ_CHUNKS.
constexpr Range kRanges[] = {{1, 1}, {1, 2}, {3, 9}, {0, 0}, {9, 3}, {4, 9}};

// A server of version 1 that answers with the version it speaks.
TEST(ProbeAnswer, AServerThatAnswersOne) {
  for (const Range& range : kRanges) {
    const auto answer = Answer("00000007 00000001 00000040 00000004 00000001" + Word(range.low) + Word(range.high));
    ASSERT_TRUE(answer.has_value()) << range.low << " to " << range.high;
    EXPECT_EQ(answer->header, (Header{.xid = 7, .version = 1, .credits = 64, .body = ErrVers{range.low, range.high}}));
    EXPECT_EQ(answer->header_size, 28u);
  }
}

// One that echoes the version it refuses: Linux's, ntirpc's.
TEST(ProbeAnswer, AServerThatEchoesTwo) {
  for (const Range& range : kRanges) {
    for (const char* version : {"00000002", "00000003"}) {
      const auto answer = Answer(std::string("00000007 ") + version + "00000040 00000004 00000001" + Word(range.low) +
                                 Word(range.high));
      ASSERT_TRUE(answer.has_value()) << range.low << " to " << range.high;
      EXPECT_EQ(std::get<ErrVers>(answer->header.body), (ErrVers{range.low, range.high}));
      EXPECT_EQ(answer->header.flags, std::nullopt) << "version 1's layout";
    }
  }
  EXPECT_EQ(ToString(Answer("00000007 00000002 00000040 00000004 00000001 00000001 00000001")->header),
            "RDMA_ERROR xid 00000007 version 2 credits 64 ERR_VERS (1 to 1 supported)");
}

// Version 2's own ERR_VERS: a flags word more.
TEST(ProbeAnswer, AServerThatKnowsVersion2ButDoesNotSpeakIt) {
  for (const Range& range : kRanges) {
    for (const char* behind : {"", "00000000", "ffffffff 00000001"}) {
      const auto answer =
          Answer("00000007 00000002 00000040 00000004 00000001 00000001" + Word(range.low) + Word(range.high) + behind);
      ASSERT_TRUE(answer.has_value()) << range.low << " to " << range.high;
      EXPECT_EQ(
          answer->header,
          (Header{
              .xid = 7, .version = 2, .credits = 64, .flags = kFlagResponse, .body = ErrVers{range.low, range.high}}));
      EXPECT_EQ(answer->header_size, 32u);
    }
  }
}

// What a server of version 2 has against the probe.
TEST(ProbeAnswer, TheErrorsOfSixWords) {
  const std::string prefix = "00000007 00000002 00000040 00000004 00000001";
  EXPECT_EQ(Answer(prefix + "00000002")->header.body, Header::Body(ErrBadXdr{}));
  EXPECT_EQ(Answer(prefix + "00000003")->header.body, Header::Body(ErrInvalHtype{}));
  EXPECT_EQ(Answer(prefix + "00000009")->header.body, Header::Body(ErrSystem{}));
  EXPECT_EQ(Answer(prefix + "0000004d")->header.body, Header::Body(ErrOther{77}));
  EXPECT_EQ(Answer(prefix + "00000002")->header.flags, kFlagResponse);
  EXPECT_EQ(Answer(prefix + "00000007 00000001 00001000")->header.body, Header::Body(ErrWriteResource{1, 4096}));
}

TEST(ProbeAnswer, VersionsOneErrChunkSaysNothingOfVersionsAndIsVersionOnes) {
  for (const char* version : {"00000001", "00000002"}) {
    for (const char* behind : {"", "00000000", "00000000 00000000"}) {
      const auto answer = Answer(std::string("00000007 ") + version + "00000040 00000004 00000002" + behind);
      ASSERT_TRUE(answer.has_value()) << version << behind;
      EXPECT_EQ(answer->header.body, Header::Body(ErrChunk{}));
      EXPECT_EQ(answer->header.flags, std::nullopt);
      EXPECT_EQ(answer->header_size, 20u);
    }
  }
}

TEST(ProbeAnswer, ARealAnswerIsReadInItsVersion) {
  const auto reply =
      Answer("00000007 00000002 00000040 00000000 00000001 00000000 00000000 00000000 00000000 00000007");
  ASSERT_TRUE(reply.has_value());
  EXPECT_EQ(reply->header, (Header{.xid = 7, .version = 2, .credits = 64, .flags = kFlagResponse, .body = RdmaMsg{}}));
  EXPECT_EQ(reply->header_size, 36u);
  const auto old = Answer("00000007 00000001 00000040 00000000 00000000 00000000 00000000 00000007");
  ASSERT_TRUE(old.has_value());
  EXPECT_EQ(old->header, (Header{.xid = 7, .version = 1, .credits = 64, .body = RdmaMsg{}}));
}

// Both words that could be ERR_VERS, cut anywhere: no length means two things, and none is read past its end.
TEST(ProbeAnswer, EveryLengthHasOneMeaning) {
  for (const char* version : {"00000001", "00000002", "00000003"}) {
    const auto words =
        FromHex(std::string("00000007 ") + version + "00000040 00000004 00000001 00000001 00000001 00000001 00000001");
    for (size_t size = 0; size <= words.size(); ++size) {
      const std::vector<std::byte> cut(words.begin(), words.begin() + static_cast<ptrdiff_t>(size));  // exact, for ASan
      const auto answer = DecodeProbeAnswer(cut);
      const bool v1 = version == std::string("00000001") ? size >= 28 : size >= 28 && size < 32;
      const bool v2 = version == std::string("00000002") && size >= 32;
      ASSERT_EQ(answer.has_value(), v1 || v2) << version << " of " << size;
      if (!answer.has_value()) continue;
      EXPECT_EQ(std::get<ErrVers>(answer->header.body), (ErrVers{1, 1}));
      EXPECT_EQ(answer->header.flags.has_value(), v2);
    }
  }
}

TEST(ProbeAnswer, WhatIsNoAnswerIsAFault) {
  EXPECT_EQ(Answer("").error().kind, HeaderFault::Kind::kTooShort);
  // Neither layout has flags, or a code, of zero or three.
  EXPECT_EQ(Answer("00000007 00000001 00000040 00000004 00000003").error().kind, HeaderFault::Kind::kUnknownError);
  EXPECT_EQ(Answer("00000007 00000002 00000040 00000004").error().kind, HeaderFault::Kind::kTooShort);
  EXPECT_EQ(Answer("00000007 00000003 00000040 00000000 00000001").error().kind, HeaderFault::Kind::kVersion);
  EXPECT_EQ(Answer("00000007 00000002 00000040 00000000 00000001").error().kind, HeaderFault::Kind::kChunkList);
}

}  // namespace
}  // namespace stagecoach::rpcrdma
