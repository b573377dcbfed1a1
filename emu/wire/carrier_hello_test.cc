#include "emu/wire/carrier_hello.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "base/prng.h"

namespace stagecoach::emu::wire {
namespace {

CarrierHello SampleHello() {
  CarrierHello hello;
  hello.crc = true;
  hello.source_qp = 0x010203;
  hello.destination_qp = 0xfffffe;
  for (uint8_t i = 0; i < 16; ++i) {
    hello.source[i] = i;
    hello.destination[i] = static_cast<uint8_t>(0xf0 + i);
    hello.nonce[i] = static_cast<std::byte>(0xa0 + i);
  }
  return hello;
}

template <typename Message>
std::vector<std::byte> Encoded(const Message& message, size_t size) {
  std::vector<std::byte> bytes(size);
  ByteWriter out(bytes);
  message.Encode(out);
  EXPECT_TRUE(out.ok());
  EXPECT_EQ(out.position(), size);
  return bytes;
}

TEST(CarrierHello, ComesBackAsItWasWritten) {
  const auto decoded = DecodeCarrierHello(Encoded(SampleHello(), kCarrierHelloSize));
  ASSERT_TRUE(decoded.has_value());
  EXPECT_EQ(*decoded, SampleHello());
}

TEST(CarrierHello, HasTheLayoutTheHeaderSays) {
  const std::string text = ToHex(Encoded(SampleHello(), kCarrierHelloSize));
  EXPECT_EQ(text,
            "5374616765636f616368204942200003"
            "01000000"
            "00010203"
            "00fffffe"
            "00000000"
            "000102030405060708090a0b0c0d0e0f"
            "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"
            "a0a1a2a3a4a5a6a7a8a9aaabacadaeaf");
  const CarrierAnswer answer{.status = CarrierStatus::kNotReady, .crc = true};
  EXPECT_EQ(ToHex(Encoded(answer, kCarrierAnswerSize)),
            "5374616765636f616368206962200003"
            "0201000000000000"
            "00000000000000000000000000000000");
  const CarrierAnswer challenge{.status = CarrierStatus::kProve, .sends = true, .token = SampleHello().nonce};
  EXPECT_EQ(ToHex(Encoded(challenge, kCarrierAnswerSize)),
            "5374616765636f616368206962200003"
            "0502000000000000"
            "a0a1a2a3a4a5a6a7a8a9aaabacadaeaf");
  CarrierHello loses = SampleHello();
  loses.loses = true;
  EXPECT_EQ(Encoded(loses, kCarrierHelloSize)[16], std::byte{5});
  EXPECT_EQ(Encoded(CarrierAnswer{.loses = true}, kCarrierAnswerSize)[17], std::byte{4});
}

TEST(CarrierAnswer, ComesBackAsItWasWritten) {
  for (const CarrierStatus status :
       {CarrierStatus::kAccepted, CarrierStatus::kNoQp, CarrierStatus::kNotReady, CarrierStatus::kMismatch,
        CarrierStatus::kBusy, CarrierStatus::kProve, CarrierStatus::kNotProven, CarrierStatus::kTooOften,
        CarrierStatus::kOtherVersion, CarrierStatus::kWait}) {
    CarrierAnswer answer{.status = status};
    if (status == CarrierStatus::kProve || status == CarrierStatus::kAccepted) answer.token = SampleHello().nonce;
    const auto decoded = DecodeCarrierAnswer(Encoded(answer, kCarrierAnswerSize));
    ASSERT_TRUE(decoded.has_value()) << ToString(status);
    EXPECT_EQ(*decoded, answer);
  }
}

TEST(CarrierHello, BothEndsMaySayThatTheyLosePackets) {
  CarrierHello hello = SampleHello();
  hello.loses = true;
  EXPECT_EQ(*DecodeCarrierHello(Encoded(hello, kCarrierHelloSize)), hello);
  const CarrierAnswer answer{.loses = true, .token = SampleHello().nonce};
  EXPECT_EQ(*DecodeCarrierAnswer(Encoded(answer, kCarrierAnswerSize)), answer);
}

TEST(CarrierHello, WhatIsWrongWithItIsSaid) {
  const struct {
    size_t at;
    uint8_t value;
    CarrierFault fault;
  } kCases[] = {{0, 'M', CarrierFault::kBadKey},        {15, 1, CarrierFault::kBadVersion},
                {16, 8, CarrierFault::kBadFlags},       {17, 1, CarrierFault::kNotZero},
                {19, 1, CarrierFault::kNotZero},        {20, 1, CarrierFault::kBadQpNumber},
                {24, 0xff, CarrierFault::kBadQpNumber}, {28, 1, CarrierFault::kNotZero}};
  for (const auto& each : kCases) {
    std::vector<std::byte> bytes = Encoded(SampleHello(), kCarrierHelloSize);
    bytes[each.at] = std::byte{each.value};
    const auto decoded = DecodeCarrierHello(bytes);
    ASSERT_FALSE(decoded.has_value()) << each.at;
    EXPECT_EQ(decoded.error(), each.fault) << each.at << ": " << ToString(decoded.error());
  }
}

TEST(CarrierHello, OfALinkNamesProcessesAndNotQps) {
  CarrierHello link = SampleHello();
  link.datagrams = true;
  link.source_qp = 0x030000;
  link.destination_qp = 0xff0000;
  const auto decoded = DecodeCarrierHello(Encoded(link, kCarrierHelloSize));
  ASSERT_TRUE(decoded.has_value());
  EXPECT_EQ(*decoded, link);
  for (uint32_t CarrierHello::*const number : {&CarrierHello::source_qp, &CarrierHello::destination_qp}) {
    CarrierHello bad = link;
    bad.*number |= 1;
    EXPECT_EQ(DecodeCarrierHello(Encoded(bad, kCarrierHelloSize)).error(), CarrierFault::kBadQpNumber);
  }
}

// Whatever the other end was about to say: no proof leaves with a refusal.
TEST(CarrierAnswer, ARefusalHasNothingToTell) {
  CarrierAnswer answer{.status = CarrierStatus::kNotProven, .token = SampleHello().nonce};
  const auto decoded = DecodeCarrierAnswer(Encoded(answer, kCarrierAnswerSize));
  ASSERT_TRUE(decoded.has_value());
  EXPECT_EQ(decoded->token, SipTag{});
}

TEST(CarrierHello, OfAnotherVersionIsKnownByItsKeyAlone) {
  std::vector<std::byte> bytes = Encoded(SampleHello(), kCarrierHelloSize);
  const ConstBytes key = ConstBytes(bytes).first(kCarrierKeySize);
  EXPECT_EQ(JudgeCarrierKey(key), std::nullopt);
  for (int version = 0; version < 256; ++version) {
    bytes[15] = static_cast<std::byte>(version);
    if (version == 3) continue;
    EXPECT_EQ(JudgeCarrierKey(key), CarrierFault::kBadVersion) << version;
  }
  bytes[0] = std::byte{'s'};
  EXPECT_EQ(JudgeCarrierKey(key), CarrierFault::kBadKey);
  std::vector<std::byte> answer = Encoded(CarrierAnswer{}, kCarrierAnswerSize);
  answer[15] = std::byte{4};
  EXPECT_EQ(DecodeCarrierAnswer(answer).error(), CarrierFault::kBadVersion);
}

TEST(CarrierAnswer, WhatIsWrongWithItIsSaid) {
  const CarrierAnswer good{.status = CarrierStatus::kNoQp};
  const struct {
    size_t at;
    uint8_t value;
    CarrierFault fault;
  } kCases[] = {{10, '!', CarrierFault::kBadKey},
                {16, 10, CarrierFault::kBadStatus},
                {17, 0x80, CarrierFault::kBadFlags},
                {23, 1, CarrierFault::kNotZero},
                {39, 1, CarrierFault::kNotZero}};
  for (const auto& each : kCases) {
    std::vector<std::byte> bytes = Encoded(good, kCarrierAnswerSize);
    bytes[each.at] = std::byte{each.value};
    const auto decoded = DecodeCarrierAnswer(bytes);
    ASSERT_FALSE(decoded.has_value()) << each.at;
    EXPECT_EQ(decoded.error(), each.fault) << each.at << ": " << ToString(decoded.error());
  }
}

TEST(CarrierHello, EveryOtherLengthIsTruncated) {
  const std::vector<std::byte> bytes = Encoded(SampleHello(), kCarrierHelloSize);
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(DecodeCarrierHello(ConstBytes(bytes).first(size)).error(), CarrierFault::kTruncated);
    EXPECT_FALSE(DecodeCarrierAnswer(ConstBytes(bytes).first(size)).has_value());
  }
}

// What can be decoded is what was meant: nothing is read into bytes that another encoder would not have written.
TEST(CarrierHello, WhateverIsDecodedEncodesToTheSameBytes) {
  Prng luck(11);
  const std::vector<std::byte> hello = Encoded(SampleHello(), kCarrierHelloSize);
  const std::vector<std::byte> answer = Encoded(CarrierAnswer{}, kCarrierAnswerSize);
  size_t decoded_hellos = 0;
  size_t decoded_answers = 0;
  for (int i = 0; i < 20000; ++i) {
    std::vector<std::byte> bytes = i % 2 == 0 ? hello : answer;
    for (uint64_t flips = 1 + luck.Below(3); flips > 0; --flips) {
      bytes[luck.Below(bytes.size())] ^= static_cast<std::byte>(1u << luck.Below(8));
    }
    if (const auto decoded = DecodeCarrierHello(bytes)) {
      ++decoded_hellos;
      EXPECT_EQ(Encoded(*decoded, kCarrierHelloSize), bytes);
    }
    if (const auto decoded = DecodeCarrierAnswer(bytes)) {
      ++decoded_answers;
      EXPECT_EQ(Encoded(*decoded, kCarrierAnswerSize), bytes);
    }
  }
  EXPECT_GT(decoded_hellos, 0u);
  EXPECT_GT(decoded_answers, 0u);
}

}  // namespace
}  // namespace stagecoach::emu::wire
