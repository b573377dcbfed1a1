// Tests of the small types that all layers share.
#include <string>

#include "base/bytes.h"
#include "base/crc32c.h"
#include "base/cursor.h"
#include "base/prng.h"
#include "base/trace.h"
#include "gtest/gtest.h"

namespace stagecoach {
namespace {

TEST(ByteReader, FailureIsStickyAndYieldsZeros) {
  const std::string bytes("\x01\x02\x03", 3);
  ByteReader reader(AsBytes(bytes));
  EXPECT_EQ(reader.U16(), 0x0102);
  EXPECT_EQ(reader.U16(), 0);
  EXPECT_FALSE(reader.ok());
  EXPECT_EQ(reader.U8(), 0) << "a byte is left, but the reader already failed";
}

TEST(ByteReader, HugeSkipDoesNotWrap) {
  const std::string bytes("abcd");
  ByteReader reader(AsBytes(bytes));
  reader.U8();
  reader.Skip(SIZE_MAX);
  EXPECT_FALSE(reader.ok());
  EXPECT_EQ(reader.position(), 1u);
}

TEST(ByteWriter, RoundTripsWithReader) {
  std::array<std::byte, 15> buffer{};
  ByteWriter writer(buffer);
  writer.U8(0xfe);
  writer.U16(0xabcd);
  writer.U32(0x01020304);
  writer.U64(0x1122334455667788);
  EXPECT_TRUE(writer.ok());
  ByteReader reader(buffer);
  EXPECT_EQ(reader.U8(), 0xfe);
  EXPECT_EQ(reader.U16(), 0xabcd);
  EXPECT_EQ(reader.U32(), 0x01020304u);
  EXPECT_EQ(reader.U64(), 0x1122334455667788u);
  writer.U8(1);
  EXPECT_FALSE(writer.ok());
}

TEST(Crc32c, KnownVectors) {
  EXPECT_EQ(ComputeCrc32c(AsBytes("123456789")), 0xe3069283u);
  EXPECT_EQ(ComputeCrc32c({}), 0u);
  // RFC 3720 appendix B.4: 32 bytes of zeros.
  const std::string zeros(32, '\0');
  EXPECT_EQ(ComputeCrc32c(AsBytes(zeros)), 0x8a9136aau);
}

TEST(Crc32c, CombiningTwoPiecesGivesTheCrcOfTheWholeAtEverySplit) {
  std::string text;
  for (int i = 0; i < 300; ++i) text += static_cast<char>(i * 7);
  const ConstBytes all = AsBytes(text);
  for (size_t split = 0; split <= all.size(); ++split) {
    const uint32_t front = ComputeCrc32c(all.first(split));
    const uint32_t back = ComputeCrc32c(all.subspan(split));
    EXPECT_EQ(CombineCrc32c(front, back, all.size() - split), ComputeCrc32c(all)) << split;
  }
}

TEST(Crc32c, CombiningWithALongPieceMatchesCombiningItInHalves) {
  // 2^40 zero bytes cannot be fed; doubling a known CRC of zeros forty times can.
  const std::byte zero{};
  uint32_t zeros = ComputeCrc32c({&zero, 1});
  for (int k = 0; k < 40; ++k) zeros = CombineCrc32c(zeros, zeros, uint64_t{1} << k);
  const uint32_t a = ComputeCrc32c(AsBytes("stagecoach"));
  const uint32_t once = CombineCrc32c(a, zeros, uint64_t{1} << 40);
  uint32_t half = ComputeCrc32c({&zero, 1});
  for (int k = 0; k < 39; ++k) half = CombineCrc32c(half, half, uint64_t{1} << k);
  const uint32_t twice = CombineCrc32c(CombineCrc32c(a, half, uint64_t{1} << 39), half, uint64_t{1} << 39);
  EXPECT_EQ(once, twice);
}

TEST(Crc32c, TablesAndInstructionAgreeAtEveryLengthAndSplit) {
  Prng prng(1);
  std::string bytes(300, '\0');
  for (char& c : bytes) c = static_cast<char>(prng.Next());
  for (size_t length = 0; length <= bytes.size(); ++length) {
    const ConstBytes all = AsBytes(bytes).first(length);
    const uint32_t table = internal::Crc32cTable(0xffffffffu, all);
    if (internal::HasCrc32cInstruction()) {
      EXPECT_EQ(internal::Crc32cHardware(0xffffffffu, all), table);
    }
    const size_t split = prng.Below(length + 1);
    EXPECT_EQ(internal::Crc32cTable(internal::Crc32cTable(0xffffffffu, all.first(split)), all.subspan(split)), table);
  }
}

TEST(Prng, ForkDependsOnNameAndNotOnDraws) {
  Prng a(7);
  const uint64_t before = a.Fork("link").Next();
  a.Next();
  EXPECT_EQ(a.Fork("link").Next(), before);
  EXPECT_NE(a.Fork("disk").Next(), before);
}

TEST(Prng, BetweenCoversBothEnds) {
  Prng prng(3);
  bool low = false;
  bool high = false;
  for (int i = 0; i < 200; ++i) {
    const uint64_t draw = prng.Between(5, 7);
    ASSERT_GE(draw, 5u);
    ASSERT_LE(draw, 7u);
    low |= draw == 5;
    high |= draw == 7;
  }
  EXPECT_TRUE(low && high);
}

TEST(Trace, CanonicalLineAndHashFollowOrder) {
  const Instant now{1s + 2us};
  EXPECT_EQ(FormatTraceEvent(now, "a/qp-1", "placed", {{"length", uint64_t{64}}, {"region", std::string_view("buf")}}),
            "1.000002000 a/qp-1 placed length=64 region=buf");
  TraceHash one;
  TraceHash two;
  Trace(&one, now, "a", "x");
  Trace(&one, now, "a", "y");
  Trace(&two, now, "a", "y");
  Trace(&two, now, "a", "x");
  EXPECT_NE(one.value(), two.value());
  Trace(nullptr, now, "a", "x");
}

}  // namespace
}  // namespace stagecoach
