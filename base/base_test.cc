// Tests of the small types that all layers share.
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <initializer_list>
#include <new>
#include <set>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/crc32c.h"
#include "base/cursor.h"
#include "base/mark.h"
#include "base/mutant.h"
#include "base/prng.h"
#include "base/spare_blocks.h"
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

TEST(Crc32c, TheInstructionIsUsedExactlyWhereTheProcessorHasIt) {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  ASSERT_NE(__get_cpuid(1, &a, &b, &c, &d), 0);
  EXPECT_EQ(internal::HasCrc32cInstruction(), (c & bit_SSE4_2) != 0);
#else
  EXPECT_FALSE(internal::HasCrc32cInstruction());
#endif
  internal::Crc32cKernel& active = internal::ActiveCrc32cKernel();
  const internal::Crc32cKernel chosen = active;
  EXPECT_EQ(chosen, internal::HasCrc32cInstruction() ? internal::Crc32cHardware : internal::Crc32cTable);
  // And it is what computes.
  static int calls;
  calls = 0;
  active = [](uint32_t state, ConstBytes bytes) {
    ++calls;
    return internal::Crc32cTable(state, bytes);
  };
  EXPECT_EQ(ComputeCrc32c(AsBytes("123456789")), 0xe3069283u);
  active = chosen;
  EXPECT_EQ(calls, 1);
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

TEST(Trace, TheHashTellsEventsApartThatDifferInAnything) {
  const auto hash = [](Instant now, std::string_view component, std::string_view event,
                       std::initializer_list<TraceFact> facts) {
    TraceHash trace;
    Trace(&trace, now, component, event, facts);
    return trace.value();
  };
  const Instant now{1s};
  const std::vector<uint64_t> hashes = {
      hash(now, "a", "bc", {}),
      hash(now + 1ns, "a", "bc", {}),
      hash(now, "ab", "c", {}),
      hash(now, "a", "bc", {{"key", uint64_t{0}}}),
      hash(now, "a", "bc", {{"key", uint64_t{1}}}),
      hash(now, "a", "bc", {{"key", uint64_t{1} << 63}}),
      hash(now, "a", "bc", {{"yek", uint64_t{1}}}),
      hash(now, "a", "bc", {{"key", std::string_view("longer than one word")}}),
      hash(now, "a", "bc", {{"key", std::string_view("longer than one ward")}}),
      hash(now, "a", "bc", {{"key", uint64_t{0}}, {"key", uint64_t{0}}}),
  };
  EXPECT_EQ(std::set<uint64_t>(hashes.begin(), hashes.end()).size(), hashes.size());
  EXPECT_EQ(hash(now, "a", "bc", {{"key", uint64_t{1}}}), hashes[4]);
}

const Mark* FindMark(std::string_view name) {
  const auto marks = AllMarks();
  const auto found = std::find_if(marks.begin(), marks.end(), [&](const Mark* mark) { return mark->name() == name; });
  return found != marks.end() ? *found : nullptr;
}

void PassSometimes(bool now) {
  if (now) STAGECOACH_MARK("test.sometimes");
}

TEST(SpareBlocks, AreThereUntilAllAreTakenAndTakenBack) {
  std::set<void*> taken;
  while (void* const block = TakeSpareBlock(kSpareBlockSize)) EXPECT_TRUE(taken.insert(block).second);
  EXPECT_EQ(taken.size(), kSpareBlocks);
  for (void* const block : taken) EXPECT_TRUE(GiveSpareBlock(block));
  void* const again = TakeSpareBlock(1);
  EXPECT_EQ(taken.count(again), 1u);
  EXPECT_TRUE(GiveSpareBlock(again));
  EXPECT_EQ(TakeSpareBlock(kSpareBlockSize + 1), nullptr);
  int other = 0;
  EXPECT_FALSE(GiveSpareBlock(&other));
}

template <typename T>
struct NoAllocator {
  T* allocate(size_t) { throw std::bad_alloc(); }
  void deallocate(T*, size_t) { FAIL() << "it has given nothing"; }
};

TEST(SpareBlocks, StandInForAnAllocatorThatHasNothing) {
  SpareAllocator<int, NoAllocator> allocator;
  int* const memory = allocator.allocate(kSpareBlockSize / sizeof(int));
  allocator.deallocate(memory, kSpareBlockSize / sizeof(int));
  EXPECT_THROW(allocator.allocate(kSpareBlockSize / sizeof(int) + 1), std::bad_alloc);
}

TEST(Mark, IsKnownBeforeItIsPassedAndCountsAfterwards) {
  ASSERT_NE(FindMark("test.sometimes"), nullptr);
  PassSometimes(false);
  EXPECT_EQ(FindMark("test.sometimes")->passed(), 0u);
  PassSometimes(true);
  PassSometimes(true);
  EXPECT_EQ(FindMark("test.sometimes")->passed(), 2u);
}

bool Defective() {
  return STAGECOACH_MUTANT("test-defect", "answers yes");
}
bool DefectiveElsewhere() {
  return STAGECOACH_MUTANT("test-defect", "answers yes");
}

// Ordinary builds have none; --config=mutants has this one.
TEST(Mutant, OnlyTheSelectedOneIsOnAndOnlyWhereCompiledIn) {
  const bool compiled_in = !AllMutants().empty();
  EXPECT_FALSE(Defective());
  EXPECT_EQ(SelectMutant("test-defect"), compiled_in);
  EXPECT_EQ(Defective(), compiled_in);
  EXPECT_EQ(DefectiveElsewhere(), compiled_in);
  EXPECT_EQ(AllMutants().size(), compiled_in ? 1u : 0u);
  EXPECT_FALSE(SelectMutant("no-such-defect"));
  EXPECT_FALSE(Defective());
  EXPECT_TRUE(SelectMutant(""));
  EXPECT_FALSE(Defective());
}

}  // namespace
}  // namespace stagecoach
