#include "base/siphash.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace stagecoach {
namespace {

SipKey SampleKey() {
  SipKey key;
  for (size_t i = 0; i < key.size(); ++i) key[i] = static_cast<std::byte>(i);
  return key;
}

std::vector<std::byte> SampleMessage(size_t size) {
  std::vector<std::byte> message(size);
  for (size_t i = 0; i < size; ++i) message[i] = static_cast<std::byte>(i);
  return message;
}

// Of the authors' vectors for 128 bits: the key 00, 01 ... 0f, messages 00, 01 ... of so many bytes.
TEST(SipHash, GivesTheAuthorsResults) {
  const struct {
    size_t size;
    const char* tag;
  } kVectors[] = {{0, "a3817f04ba25a8e66df67214c7550293"},  {1, "da87c1d86b99af44347659119b22fc45"},
                  {2, "8177228da4a45dc7fca38bdef60affe4"},  {7, "a1f1ebbed8dbc153c0b84aa61ff08239"},
                  {8, "3b62a9ba6258f5610f83e264f31497b4"},  {15, "5493e99933b0a8117e08ec0f97cfc3d9"},
                  {16, "6ee2a4ca67b054bbfd3315bf85230577"}, {63, "5150d1772f50834a503e069a973fbd7c"}};
  for (const auto& vector : kVectors) {
    EXPECT_EQ(ToHex(SipHash128(SampleKey(), SampleMessage(vector.size))), vector.tag) << vector.size;
  }
}

TEST(SipHash, EveryBitOfTheKeyAndOfTheMessageCounts) {
  const std::vector<std::byte> message = SampleMessage(21);
  const SipTag tag = SipHash128(SampleKey(), message);
  for (size_t bit = 0; bit < 8 * message.size(); ++bit) {
    std::vector<std::byte> other = message;
    other[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
    EXPECT_NE(SipHash128(SampleKey(), other), tag) << bit;
  }
  for (size_t bit = 0; bit < 128; ++bit) {
    SipKey other = SampleKey();
    other[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
    EXPECT_NE(SipHash128(other, message), tag) << bit;
  }
}

TEST(SipTag, IsEqualToItselfAloneWhereverAnotherDiffers) {
  const SipTag tag = SipHash128(SampleKey(), {});
  EXPECT_TRUE(EqualInConstantTime(tag, SipTag(tag)));
  for (size_t bit = 0; bit < 128; ++bit) {
    SipTag other = tag;
    other[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
    EXPECT_FALSE(EqualInConstantTime(tag, other)) << bit;
  }
}

}  // namespace
}  // namespace stagecoach
