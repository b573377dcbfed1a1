#include "rpcrdma/api/encode_message.h"

#include <gtest/gtest.h>

namespace stagecoach::rpcrdma::internal {
namespace {

auto Words(uint32_t count, int* runs = nullptr) {
  return [count, runs](XdrWriter& out) {
    if (runs != nullptr) ++*runs;
    for (uint32_t i = 0; i < count; ++i) out.U32(i);
  };
}

TEST(EncodeMessage, TheBufferGrowsUntilTheMessageFits) {
  std::vector<std::byte> buffer;
  int runs = 0;
  const auto encoded = EncodeMessage(&buffer, 1 << 20, kAnyEligible, Words(5000, &runs));
  ASSERT_TRUE(encoded.has_value());
  EXPECT_EQ(encoded->size, 20000u);
  EXPECT_EQ(buffer.size(), 32768u);
  EXPECT_EQ(runs, 6);
  EXPECT_EQ(buffer[19999], std::byte{4999 & 0xff});

  // It is kept, and good for the next.
  runs = 0;
  EXPECT_EQ(EncodeMessage(&buffer, 1 << 20, kAnyEligible, Words(8192, &runs))->size, 32768u);
  EXPECT_EQ(runs, 1);
}

TEST(EncodeMessage, NoMessageIsLongerThanItsBound) {
  for (const size_t bytes_max : {size_t{0}, size_t{4}, size_t{1020}, size_t{1024}, size_t{5000}}) {
    for (const size_t given : {size_t{0}, size_t{3000}, size_t{100000}}) {
      std::vector<std::byte> buffer(given);
      const auto fits = static_cast<uint32_t>(bytes_max / 4);
      ASSERT_TRUE(EncodeMessage(&buffer, bytes_max, kAnyEligible, Words(fits)).has_value());
      EXPECT_FALSE(EncodeMessage(&buffer, bytes_max, kAnyEligible, Words(fits + 1)).has_value());
      EXPECT_LE(buffer.size(), std::max(given, bytes_max));
    }
  }
}

TEST(EncodeMessage, OnlySoManyEligibleItemsStayOut) {
  const std::vector<std::byte> item(3000);
  const auto write = [&](XdrWriter& out) {
    out.EligibleOpaque(item);
    out.EligibleOpaque(item);
  };
  std::vector<std::byte> buffer;
  const auto both = EncodeMessage(&buffer, 4096, kAnyEligible, write);
  ASSERT_TRUE(both.has_value());
  EXPECT_EQ(both->size, 8u);
  EXPECT_EQ(both->items.size(), 2u);
  const auto one = EncodeMessage(&buffer, 4096, 1, write);
  ASSERT_TRUE(one.has_value());
  EXPECT_EQ(one->size, 3008u);
  ASSERT_EQ(one->items.size(), 1u);
  EXPECT_EQ(one->items[0].data.data(), item.data());
  EXPECT_FALSE(EncodeMessage(&buffer, 4096, 0, write).has_value());
}

}  // namespace
}  // namespace stagecoach::rpcrdma::internal
