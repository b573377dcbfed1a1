// The walk beside the codecs, and beside the judgement of chunk lists: of messages that are legal, spoilt at random, by
// each document of version 1 and by version 2, each calls the same ones legal.
#include <gtest/gtest.h>

#include <iterator>

#include "base/cursor.h"
#include "base/prng.h"
#include "tools/decode/agreement.h"
#include "tools/decode/message_decoder.h"
#include "tools/decode/test_messages.h"

namespace stagecoach::decode {
namespace {

using namespace testing;

// Other words, some bytes less, or some more.
Bytes Spoilt(Bytes message, Prng& prng) {
  static constexpr uint32_t kValues[] = {0,  1,  2,   3,   4,    5,    6,          7,         8,
                                         16, 40, 255, 256, 1023, 1024, 0x7fffffff, 0xffffffff};
  const auto pick = [&](size_t n) { return static_cast<size_t>(prng.Below(n)); };
  for (size_t n = pick(4); n > 0; --n) {
    const size_t at = pick(message.size() / 4) * 4;
    const MutableBytes word = MutableBytes(message).subspan(at, 4);
    const uint32_t value = ByteReader(word).U32();
    // Near what it was, or something else.
    ByteWriter(word).U32(pick(2) == 0 ? value + static_cast<uint32_t>(pick(9)) - 4 : kValues[pick(std::size(kValues))]);
  }
  switch (pick(8)) {
    case 0:
      message.resize(pick(message.size() + 1));
      break;
    case 1:
      message = message + Bytes(message.end() - static_cast<ptrdiff_t>(pick(message.size() + 1)), message.end());
      break;
    default:
      break;
  }
  return message;
}

// Spoils each message of a pool many times, behind the call, and compares.
void ExpectAgreement(const rpcrdma::ProtocolProfile& profile, const Bytes& call, const std::vector<Bytes>& messages) {
  constexpr int kRounds = 2000;
  Prng prng(1);
  int legal = 0;
  for (int i = 0; i < kRounds; ++i) {
    const Bytes message = Spoilt(messages[static_cast<size_t>(i) % messages.size()], prng);
    ASSERT_EQ(Disagreement(profile, call, message), "") << profile.name << "\n"
                                                        << ToHex(call) << "\n"
                                                        << ToHex(message);
    MessageDecoder decoder(profile);
    decoder.OnMessage(End::kUnknown, call);
    if (!decoder.OnMessage(End::kUnknown, message).illegal()) ++legal;
  }
  EXPECT_GT(legal, kRounds / 20) << profile.name;
  EXPECT_LT(legal, kRounds - kRounds / 20) << profile.name;
}

const Bytes kReads = Read(40, 6) + Read(46, 2) + Read(48, 8) + Words({0});
const Bytes kOffer = Words({0}) + Chunk(100) + Chunk(253, 0x2100) + Words({0}) + Chunk(5000, 0x3000);

TEST(CodecAgreement, OnVersion1) {
  for (const rpcrdma::ProtocolProfile& profile : rpcrdma::AllProfiles()) {
    const Bytes call = Version1(7, 0, kOffer + Call(7));
    ExpectAgreement(profile, call,
                    {
                        call,
                        Version1(7, 0, Read(40, 8) + Read(40, 9) + kOffer + Call(7)),
                        Version1(8, 0, kReads + Words({0, 0}) + Call(8)),
                        Version1(7, 1, Read(0, 100) + Read(60, 9) + kOffer),
                        Version1(7, 2, Words({64, 512}) + kOffer + Call(7)),
                        Version1(7, 0, kNoChunks + Reply(7)),
                        Version1(7, 0, kOffer + Reply(7)),
                        Version1(7, 0, Words({0}) + Chunk(100) + Chunk(256, 0x2100) + Words({0, 0}) + Reply(7)),
                        Version1(7, 1, kOffer),
                        Version1(7, 1, Read(0, 100) + Read(24, 8) + Words({0, 0, 0})),
                        Version1(7, 3, {}),
                        Version1(7, 4, Words({1, 1, 2})),
                        Version1(7, 4, Words({2})),
                        Version1(7, 4, Words({3, 0, 0, 0, 0, 0, 0, 0, 0})),
                        Words({7, 2, 32, 4, 1, 1, 1}),
                    });
  }
}

TEST(CodecAgreement, OnVersion2) {
  for (const rpcrdma::ProtocolProfile& profile : rpcrdma::AllProfiles()) {
    const Bytes call = Version2(7, 0, 0, Words({0x2000}) + kOffer + Call(7));
    ExpectAgreement(profile, call,
                    {
                        call,
                        Version2(7, 0, 0, Words({0x1000}) + Read(40, 8) + kOffer + Call(7)),
                        Version2(7, 1, 0, Words({0}) + Read(0, 100) + kOffer),
                        Version2(7, 0, 1, Words({0}) + kNoChunks + Reply(7)),
                        Version2(7, 1, 1, Words({0}) + kOffer),
                        Version2(7, 4, 1, Words({1, 1, 2})),
                        Version2(7, 4, 1, Words({2})),
                        Version2(7, 4, 1, Words({4, 6})),
                        Version2(7, 4, 1, Words({7, 1, 4096})),
                        Version2(7, 4, 1, Words({99})),
                        Version2(0, 5, 0, Words({3, 1, 4, 8192, 2, 4, 2, 77, 3, 0x61626300})),
                        Version2(0, 5, 1, Words({1, 1, 0})),
                        Version2(0, 5, 1, Words({2, 2, 4, 0, 1, 4, 1024})),
                    });
  }
}

}  // namespace
}  // namespace stagecoach::decode
