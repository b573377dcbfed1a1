#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "rpcrdma/xdr/xdr_reader.h"
#include "rpcrdma/xdr/xdr_writer.h"

namespace stagecoach::rpcrdma {
namespace {

TEST(XdrRoundTrip, EveryPrimitiveComesBackAndNothingIsLeft) {
  std::array<std::byte, 256> buffer;
  XdrWriter out(buffer);
  out.U32(0xfffffffe);
  out.I32(-3);
  out.U64(0x0123456789abcdef);
  out.I64(-1);
  out.Bool(true);
  out.Optional(false);
  out.String("a-b-c");
  out.Opaque(AsBytes("four"));
  out.FixedOpaque(AsBytes("xyz"));
  out.Opaque({});
  ASSERT_TRUE(out.ok());
  EXPECT_EQ(out.position(), 4 + 4 + 8 + 8 + 4 + 4 + 12 + 8 + 4 + 4u);

  XdrReader in(out.written());
  EXPECT_EQ(in.U32("u32"), 0xfffffffe);
  EXPECT_EQ(in.I32("i32"), -3);
  EXPECT_EQ(in.U64("u64"), 0x0123456789abcdefu);
  EXPECT_EQ(in.I64("i64"), -1);
  EXPECT_TRUE(in.Bool("bool"));
  EXPECT_FALSE(in.Optional("optional"));
  EXPECT_EQ(in.String("string", 5), "a-b-c");
  EXPECT_EQ(AsText(in.Opaque("opaque", 4)), "four");
  EXPECT_EQ(AsText(in.FixedOpaque("fixed", 3)), "xyz");
  EXPECT_TRUE(in.Opaque("empty", 0).empty());
  EXPECT_TRUE(in.Finish().has_value());
}

TEST(XdrReader, TruncationAtEveryByteIsAFaultThatNamesTheField) {
  std::array<std::byte, 64> buffer;
  XdrWriter out(buffer);
  out.U64(7);
  out.String("hello");
  for (size_t size = 0; size < out.written().size(); ++size) {
    XdrReader in(out.written().first(size));
    in.U64("number");
    in.String("name", 10);
    ASSERT_FALSE(in.ok()) << size;
    EXPECT_EQ(in.fault()->kind, XdrFaultKind::kTruncated);
    EXPECT_STREQ(in.fault()->field, size < 8 ? "number" : "name");
    EXPECT_EQ(in.fault()->position, size < 8 ? 0u : 8u);
  }
}

TEST(XdrReader, TheFirstFaultStaysAndLaterReadsYieldNothing) {
  const std::array<std::byte, 8> two{};
  XdrReader in(two);
  in.Opaque("first", 0);
  in.Fail(XdrFaultKind::kBadValue, "chosen");
  EXPECT_EQ(in.U64("late"), 0u);
  EXPECT_TRUE(in.Opaque("later", 100).empty());
  EXPECT_EQ(in.Finish().error(), (XdrFault{XdrFaultKind::kBadValue, "chosen", 4}));
  EXPECT_EQ(ToString(*in.fault()), "chosen at byte 4: value out of range");
}

TEST(XdrReader, RefusesLengthsAboveTheMaximumBeforeLookingAtTheBytes) {
  std::array<std::byte, 16> buffer;
  XdrWriter out(buffer);
  out.String("abcde");
  XdrReader in(out.written());
  EXPECT_EQ(in.String("name", 4), "");
  EXPECT_EQ(in.fault()->kind, XdrFaultKind::kTooLong);
}

TEST(XdrReader, ACountNeverPromisesMoreElementsThanBytesCanHold) {
  std::array<std::byte, 12> buffer;
  XdrWriter out(buffer);
  out.U32(2);
  out.U64(0);
  {
    XdrReader in(out.written());
    EXPECT_EQ(in.Count("list", 2, 4), 2u);
  }
  {
    XdrReader in(out.written());
    EXPECT_EQ(in.Count("list", 1, 4), 0u);
    EXPECT_EQ(in.fault()->kind, XdrFaultKind::kTooLong);
  }
  {
    XdrReader in(out.written());
    EXPECT_EQ(in.Count("list", 0xffffffff, 0xffffffff), 0u);
    EXPECT_EQ(in.fault()->kind, XdrFaultKind::kTruncated);
  }
}

TEST(XdrReader, BooleansAndEnumsHaveNoOtherValues) {
  std::array<std::byte, 4> buffer;
  XdrWriter(buffer).U32(2);
  XdrReader as_bool{ConstBytes(buffer)};
  EXPECT_FALSE(as_bool.Bool("flag"));
  EXPECT_EQ(as_bool.fault()->kind, XdrFaultKind::kBadValue);
  XdrReader as_enum{ConstBytes(buffer)};
  EXPECT_EQ(as_enum.Enum("choice", 2), 2u);
  EXPECT_TRUE(as_enum.ok());
}

TEST(XdrReader, ContentOfRoundUpIsIgnoredButItsAbsenceIsNot) {
  const std::string padded("\0\0\0\1A\xff\xff\xff", 8);
  XdrReader in(AsBytes(padded));
  EXPECT_EQ(in.String("name", 1), "A");
  EXPECT_TRUE(in.Finish().has_value());
  XdrReader cut(AsBytes(padded).first(7));
  cut.String("name", 1);
  EXPECT_EQ(cut.fault()->kind, XdrFaultKind::kTruncated);
}

TEST(XdrReader, TrailingBytesAreAFault) {
  const std::array<std::byte, 8> two{};
  XdrReader in(two);
  in.U32("one");
  EXPECT_EQ(in.Finish().error().kind, XdrFaultKind::kTrailingBytes);
}

TEST(XdrWriter, AFullBufferFailsAndStaysFailed) {
  std::array<std::byte, 6> buffer;
  XdrWriter out(buffer);
  out.U32(1);
  out.U32(2);
  EXPECT_FALSE(out.ok());
  out.EligibleOpaque(AsBytes("data"));
  EXPECT_TRUE(out.eligible().empty());
}

// A call of two eligible items with words around them, as the writer reduces it:
//   0 word | 4 count 5 | [8 "hello" pad 3] | 16 word | 20 count 4 | [24 "data"] | 28 word
class ReducedCall : public ::testing::Test {
 protected:
  ReducedCall() : out_(buffer_) {
    out_.U32(1);
    out_.EligibleOpaque(AsBytes("hello"));
    out_.U32(2);
    out_.EligibleOpaque(AsBytes("data"));
    out_.U32(3);
  }
  static void ReadAll(XdrReader& in) {
    EXPECT_EQ(in.U32("one"), 1u);
    EXPECT_EQ(AsText(in.EligibleOpaque("first", 100)), "hello");
    EXPECT_EQ(in.position(), 16u);
    EXPECT_EQ(in.U32("two"), 2u);
    EXPECT_EQ(AsText(in.EligibleOpaque("second", 100)), "data");
    EXPECT_EQ(in.U32("three"), 3u);
    EXPECT_TRUE(in.Finish().has_value());
  }
  std::array<std::byte, 64> buffer_{};
  XdrWriter out_;
};

// [traps:interop#12]
TEST_F(ReducedCall, WriterLeavesItemsOutAndRecordsUnreducedPositions) {
  EXPECT_EQ(out_.written().size(), 20u);
  EXPECT_EQ(out_.position(), 32u);
  ASSERT_EQ(out_.eligible().size(), 2u);
  EXPECT_EQ(out_.eligible()[0].position, 8u);
  EXPECT_EQ(out_.eligible()[1].position, 24u);
}

TEST_F(ReducedCall, ReaderPutsChunksBackWithAndWithoutTheirRoundUp) {
  for (const char* first : {"hello", "hello\1\2\3"}) {
    ReducedStream stream{.base = out_.written()};
    stream.chunks.push_back({8, AsBytes(first)});
    stream.chunks.push_back({24, AsBytes("data")});
    XdrReader in(stream);
    ReadAll(in);
  }
}

TEST_F(ReducedCall, ReaderHandsOutTheChunkMemoryItself) {
  const std::string data = "hello";
  ReducedStream stream{.base = out_.written()};
  stream.chunks.push_back({8, AsBytes(data)});
  XdrReader in(stream);
  in.U32("one");
  EXPECT_EQ(in.EligibleOpaque("first", 5).data(), AsBytes(data).data());
}

TEST_F(ReducedCall, ACountThatDisagreesWithItsChunkIsAFault) {
  for (const char* wrong : {"hell", "hello\1", "hello\1\2", "hello\1\2\3\4"}) {
    ReducedStream stream{.base = out_.written()};
    stream.chunks.push_back({8, AsBytes(wrong)});
    XdrReader in(stream);
    in.U32("one");
    in.EligibleOpaque("first", 100);
    ASSERT_FALSE(in.ok());
    EXPECT_EQ(in.fault()->kind, XdrFaultKind::kChunkSizeMismatch);
  }
}

TEST_F(ReducedCall, AChunkForAnItemThatIsNotEligibleIsAFault) {
  for (uint64_t position : {0u, 4u, 8u}) {
    ReducedStream stream{.base = out_.written()};
    stream.chunks.push_back({position, AsBytes("hello")});
    XdrReader in(stream);
    in.U32("one");
    in.Opaque("first", 100);
    ASSERT_FALSE(in.ok());
    EXPECT_EQ(in.fault()->kind, XdrFaultKind::kUnexpectedChunk);
  }
}

TEST_F(ReducedCall, AChunkNobodyReadsIsAFault) {
  const std::array<std::byte, 4> base{};
  ReducedStream stream{.base = base};
  stream.chunks.push_back({4, AsBytes("left")});
  XdrReader in(stream);
  in.U32("only");
  EXPECT_EQ(in.Finish().error().kind, XdrFaultKind::kUnexpectedChunk);
}

TEST_F(ReducedCall, AChunkForAnItemBeyondThoseOfTheBindingIsAFault) {
  for (const size_t listed : {0u, 1u, 2u}) {
    ReducedStream stream{.base = out_.written()};
    stream.chunks.push_back({8, AsBytes("hello")});
    stream.chunks.push_back({24, AsBytes("data")});
    XdrReader in(stream);
    in.LimitEligible(listed);
    in.U32("one");
    in.EligibleOpaque("first", 100);
    EXPECT_EQ(in.ok(), listed > 0);
    in.U32("two");
    in.EligibleOpaque("second", 100);
    in.U32("three");
    ASSERT_EQ(in.Finish().has_value(), listed > 1);
    if (listed < 2) {
      EXPECT_EQ(in.fault()->kind, XdrFaultKind::kUnexpectedChunk);
      EXPECT_STREQ(in.fault()->field, listed == 0 ? "first" : "second");
    }
  }
}

// What goes beyond the memory counts as what does not. [traps:interop#21]
TEST(XdrReader, AWriteChunkUpToThreeBytesTooLongIsTakenWhereThatIsAllowed) {
  const std::array<std::byte, 64> written{};
  const auto count = std::make_shared<std::atomic<uint64_t>>(0);
  for (const bool allowed : {false, true}) {
    for (const bool round_up_goes_beyond : {false, true}) {
      for (uint32_t size = 0; size <= 9; ++size) {
        for (size_t returned = 0; returned <= size + 9; ++returned) {
          for (size_t beyond = 0; beyond <= std::min<size_t>(3, returned); ++beyond) {
            const std::string said = std::to_string(size) + " bytes in a chunk of " + std::to_string(returned) + ", " +
                                     std::to_string(beyond) + " of them beyond the memory";
            const size_t room = returned - beyond;
            // An unused Write chunk: the item stands in the base, where it is not.
            if (room == 0 && size > 0) continue;
            std::array<std::byte, 12> base;
            XdrWriter out(base);
            out.U32(size);
            *count = 0;
            WrongLengths wrong(count);
            ReducedStream stream{.base = out.written(),
                                 .order = ReducedStream::ChunkOrder::kInOrder,
                                 .round_up_goes_beyond = round_up_goes_beyond};
            stream.chunks.push_back({0, ConstBytes(written).first(room), beyond});
            if (allowed) stream.wrong_lengths = &wrong;
            const bool right =
                returned == XdrRoundUp(size) ? beyond == 0 || round_up_goes_beyond : returned == size && beyond == 0;
            const bool taken = room >= size && (right || (allowed && returned > size && returned <= size + 3));
            for (int again = 0; again < 2; ++again) {
              XdrReader in(stream);
              const ConstBytes item = in.EligibleOpaque("data", 100);
              EXPECT_EQ(in.Finish().has_value(), taken) << said;
              EXPECT_EQ(*count, taken && !right ? 1u : 0u) << said;
              if (taken) {
                EXPECT_EQ(item.size(), size);
                EXPECT_EQ(in.position(), 4 + XdrRoundUp(size));
              } else {
                EXPECT_EQ(in.fault()->kind, XdrFaultKind::kChunkSizeMismatch);
              }
            }
          }
        }
      }
    }
  }
}

// Each of a reply once, and those of several replies together.
TEST(XdrReader, WriteChunksWithWrongLengthsAreCountedOnceEach) {
  const std::array<std::byte, 8> written{};
  const auto count = std::make_shared<std::atomic<uint64_t>>(0);
  for (const uint64_t before : {uint64_t{0}, uint64_t{2}}) {
    WrongLengths wrong(count);
    ReducedStream stream{.order = ReducedStream::ChunkOrder::kInOrder, .wrong_lengths = &wrong};
    for (const size_t returned : {7u, 8u, 6u}) stream.chunks.push_back({0, ConstBytes(written).first(returned)});
    for (int again = 0; again < 3; ++again) {
      XdrReader in(stream);
      for (const char* field : {"one", "two", "three"}) EXPECT_EQ(in.EligibleBytes(field, 5).size(), 5u);
      EXPECT_TRUE(in.Finish().has_value());
      EXPECT_EQ(*count, before + 2);
    }
  }
}

// No more than that is taken of a count that reaches beyond all memory.
TEST(XdrReader, AnItemThatIsLongerThanAnythingIsInNoWriteChunk) {
  const std::array<std::byte, 64> written{};
  for (const uint64_t size : {UINT64_MAX, UINT64_MAX - 1, UINT64_MAX - 3, uint64_t{65}}) {
    const auto count = std::make_shared<std::atomic<uint64_t>>(0);
    WrongLengths wrong(count);
    ReducedStream stream{
        .order = ReducedStream::ChunkOrder::kInOrder, .round_up_goes_beyond = true, .wrong_lengths = &wrong};
    stream.chunks.push_back({0, written, 3});
    XdrReader in(stream);
    EXPECT_TRUE(in.EligibleBytes("data", size).empty());
    EXPECT_FALSE(in.ok());
    EXPECT_EQ(*count, 0u);
  }
}

TEST(XdrWriter, ItemsThatMayNotLeaveAreCopiedWithTheirRoundUp) {
  std::array<std::byte, 32> buffer;
  XdrWriter out(buffer, 1);
  out.EligibleOpaque(AsBytes("away"));
  out.EligibleOpaque(AsBytes("stays"));
  out.U32(7);
  ASSERT_TRUE(out.ok());
  EXPECT_EQ(ToHex(out.written()), "0000000400000005737461797300000000000007");
  ASSERT_EQ(out.eligible().size(), 1u);
  EXPECT_EQ(out.eligible()[0].position, 4u);
  EXPECT_EQ(out.position(), 24u);

  std::array<std::byte, 8> small;
  XdrWriter full(small, 0);
  full.EligibleOpaque(AsBytes("stays"));
  EXPECT_FALSE(full.ok()) << "what does not fit is no message";
}

TEST(XdrReader, EligibleOptionalDataLeavesItsPresentWordInTheStream) {
  std::array<std::byte, 16> buffer;
  XdrWriter out(buffer);
  out.Optional(true);
  out.EligibleBytes(AsBytes("body"));
  out.Optional(false);
  EXPECT_EQ(ToHex(out.written()), "0000000100000000");
  ASSERT_EQ(out.eligible().size(), 1u);
  EXPECT_EQ(out.eligible()[0].position, 4u);
  ReducedStream stream{.base = out.written()};
  stream.chunks.push_back({4, AsBytes("body")});
  XdrReader in(stream);
  EXPECT_TRUE(in.Optional("first"));
  EXPECT_EQ(AsText(in.EligibleBytes("data", 4)), "body");
  EXPECT_FALSE(in.Optional("second"));
  EXPECT_TRUE(in.Finish().has_value());
}

TEST(XdrReader, AnEmptyItemDoesNotTakeTheChunkOfTheItemBehindIt) {
  // opaque<> of length 0, then a fixed eligible item at the same position.
  const std::array<std::byte, 4> base{};
  ReducedStream stream{.base = base};
  stream.chunks.push_back({4, AsBytes("body")});
  XdrReader in(stream);
  EXPECT_TRUE(in.EligibleOpaque("empty", 9).empty());
  EXPECT_EQ(AsText(in.EligibleBytes("fixed", 4)), "body");
  EXPECT_TRUE(in.Finish().has_value());
}

TEST(XdrReader, ResultsUseUpWriteChunksInOrder) {
  std::array<std::byte, 64> buffer;
  XdrWriter out(buffer);
  out.U32(3);                 // its three bytes are in the first chunk
  out.Opaque(AsBytes("in"));  // inline although a chunk was offered: the chunk comes back unused
  out.U32(0);                 // empty: uses up the third
  out.U32(2);                 // beyond the list: inline
  out.FixedOpaque(AsBytes("zz"));
  ReducedStream stream{.base = out.written(), .order = ReducedStream::ChunkOrder::kInOrder};
  stream.chunks.push_back({0, AsBytes("abc")});
  stream.chunks.push_back({0, {}});
  stream.chunks.push_back({0, {}});
  XdrReader in(stream);
  EXPECT_EQ(AsText(in.EligibleOpaque("a", 9)), "abc");
  EXPECT_EQ(AsText(in.EligibleOpaque("b", 9)), "in");
  EXPECT_TRUE(in.EligibleOpaque("c", 9).empty());
  EXPECT_EQ(AsText(in.EligibleOpaque("d", 9)), "zz");
  EXPECT_TRUE(in.Finish().has_value());
}

TEST(XdrReader, AnUnusedWriteChunkMayRemainAFilledOneMayNot) {
  for (bool filled : {false, true}) {
    ReducedStream stream{.order = ReducedStream::ChunkOrder::kInOrder};
    stream.chunks.push_back({0, filled ? AsBytes("data") : ConstBytes{}});
    XdrReader in(stream);
    EXPECT_EQ(in.Finish().has_value(), !filled);
  }
}

}  // namespace
}  // namespace stagecoach::rpcrdma
