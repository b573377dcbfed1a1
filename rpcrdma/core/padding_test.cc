// RDMA_MSGP from the planner to the decoder: what is padded, by how much, and that it is skipped exactly.
#include <gtest/gtest.h>

#include <vector>

#include "rpcrdma/core/assemble.h"
#include "rpcrdma/core/chunk_planner.h"
#include "rpcrdma/core/engine_test_support.h"
#include "rpcrdma/core/pieces.h"
#include "rpcrdma/xdr/xdr_reader.h"
#include "rpcrdma/xdr/xdr_writer.h"

namespace stagecoach::rpcrdma {
namespace {

using namespace testing;  // NOLINT: what tests of the engines are made of

// A call with `words` words, a counted item, a short string, another counted item and one that is not counted.
struct Call {
  explicit Call(size_t words, size_t first, size_t second)
      : buffer(4096), first_item(Pattern(first, 1)), second_item(Pattern(second, 2)), third_item(Pattern(40, 3)) {
    XdrWriter out(buffer);
    out.U32(7);
    out.U32(0);
    for (uint32_t i = 0; i < words; ++i) out.U32(i);
    out.EligibleOpaque(first_item);
    out.String("short");
    out.EligibleOpaque(second_item);
    out.EligibleBytes(third_item);
    message.assign(out.written().begin(), out.written().end());
    items = out.eligible();
    longest_inside = out.longest_inside();
  }

  CallShape shape() const { return {.base_size = message.size(), .items = items, .longest_inside = longest_inside}; }

  std::vector<std::byte> buffer;
  std::vector<std::byte> message;
  std::vector<std::byte> first_item, second_item, third_item;
  EligibleItems items;
  uint64_t longest_inside = 0;
};

PlanLimits Limits(uint32_t align) {
  return {.send_inline = 4096, .receive_inline = 4096, .pad_align = align, .pad_threshold = 10};
}

std::vector<std::byte> Encode(const Call& call, const CallPlan& plan) {
  std::vector<std::byte> send(4096);
  ByteWriter out(send);
  EncodeHeaderV1(MakeCallHeader(plan, 7, 1, {}), out);
  WriteInline({call.message, call.items}, plan.inline_pieces, out);
  EXPECT_TRUE(out.ok());
  EXPECT_EQ(out.position(), plan.send_size());
  send.resize(out.position());
  return send;
}

// What a receiver by this profile makes of it; false when it is not the call.
bool Decodes(const Call& call, size_t words, ConstBytes send, const ProtocolProfile& profile, uint32_t align) {
  ByteReader in(send);
  const auto header = DecodeHeaderV1(in, {}, profile);
  EXPECT_TRUE(header.has_value());
  if (!header) return false;
  ReducedStream stream{.base = in.Rest()};
  ApplyProfile(profile, PaddingOf(profile, *header), &stream);
  XdrReader reader(stream);
  reader.U64("XID and direction");
  for (uint32_t i = 0; i < words; ++i) reader.U32("word");
  const ConstBytes first = reader.EligibleOpaque("first", 4096);
  const auto text = reader.String("text", 10);
  const ConstBytes second = reader.Opaque("second, not marked by this decoder", 4096);
  const ConstBytes third = reader.EligibleBytes("third", 40);
  if (!reader.Finish()) return false;
  const auto at = [&](ConstBytes data) {
    const size_t start = profile.padding_base == PaddingBase::kSend ? 0 : send.size() - in.Rest().size();
    return static_cast<size_t>(data.data() - send.data()) - start;
  };
  if (header->type() == MessageType::kMsgp && align > 1) {
    if (first.size() > 12) {
      EXPECT_EQ(at(first) % align, 0u);
    }
    if (second.size() > 12) {
      EXPECT_EQ(at(second) % align, 0u);
    }
  }
  return ToHex(first) == ToHex(call.first_item) && text == "short" && ToHex(second) == ToHex(call.second_item) &&
         ToHex(third) == ToHex(call.third_item);
}

// [5666:3.9#1] [5666:3.9#2]
TEST(Padding, EveryItemLandsAlignedAndIsReadWithoutItsPadding) {
  for (const PaddingBase base : {PaddingBase::kSend, PaddingBase::kMessage}) {
    for (const uint32_t align : {2u, 4u, 8u, 64u, 100u, 256u}) {
      for (size_t words = 0; words < 20; ++words) {
        for (const size_t size : {0u, 1u, 9u, 10u, 11u, 12u, 13u, 100u, 255u}) {
          SCOPED_TRACE(std::to_string(align) + " " + std::to_string(words) + " " + std::to_string(size));
          const Call call(words, size, 300 - size);
          PlanLimits limits = Limits(align);
          limits.padding_base = base;
          const auto plan = PlanCall(call.shape(), limits);
          ASSERT_TRUE(plan.has_value());
          ASSERT_EQ(plan->type, MessageType::kMsgp);
          const auto send = Encode(call, *plan);
          ProtocolProfile profile = kRfc5666;
          profile.padding_base = base;
          // However the sentences about the threshold are read.
          for (const bool at_threshold : {true, false}) {
            profile.padding_at_threshold = at_threshold;
            EXPECT_TRUE(Decodes(call, words, send, profile, align));
          }
        }
      }
    }
  }
}

TEST(Padding, ThresholdIsAboveWhatIsNotPaddedAndNoItemIsAsLong) {
  const Call call(2, 10, 11);
  const auto plan = PlanCall(call.shape(), Limits(64));
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->type, MessageType::kMsg) << "of both items neither is longer than the threshold could be";
  const Call longer(2, 10, 13);
  const auto padded = PlanCall(longer.shape(), Limits(64));
  ASSERT_TRUE(padded.has_value());
  EXPECT_EQ(padded->type, MessageType::kMsgp);
  EXPECT_EQ(padded->pad_threshold, 11u);
  // What stands in the message as plain opaque data is not padded, so it must not be as long.
  CallShape shape = longer.shape();
  shape.longest_inside = 12;
  EXPECT_EQ(PlanCall(shape, Limits(64))->type, MessageType::kMsg);
  shape.longest_inside = UINT64_MAX;
  EXPECT_EQ(PlanCall(shape, Limits(64))->type, MessageType::kMsg) << "not known";
}

TEST(Padding, ThereIsNoneWhereItDoesNotFitOrIsNotWanted) {
  const Call call(2, 500, 100);
  EXPECT_EQ(PlanCall(call.shape(), Limits(0))->type, MessageType::kMsg);
  EXPECT_EQ(PlanCall(call.shape(), Limits(1))->type, MessageType::kMsg);
  PlanLimits limits = Limits(512);
  limits.send_inline = 1024;
  EXPECT_EQ(PlanCall(call.shape(), limits)->type, MessageType::kMsg) << "512 + 500 + 12 bytes behind";
  limits.send_inline = 2048;
  EXPECT_EQ(PlanCall(call.shape(), limits)->type, MessageType::kMsgp);
  const Call large(2, 3000, 3000);
  EXPECT_EQ(PlanCall(large.shape(), Limits(64))->type, MessageType::kMsg) << "its data goes by Read chunk";
}

// [5666:3.9+3] [2004:3.5#1] A Send of RDMA_MSGP as it stands on the wire: 36 bytes of header, whose alignment is 16 and
// whose threshold is 12; XID, direction and a word; the count of the item; its data, which begin at byte 52, or at byte
// 64 behind 12 bytes of padding; and a word.
TEST(Padding, AnItemAsLongAsTheThresholdIsPaddedOrNotAsTheProfileHasIt) {
  EXPECT_TRUE(kRfc5666.padding_at_threshold);
  EXPECT_TRUE(kDraft2004.padding_at_threshold);
  const struct {
    size_t length;
    bool padded_at_threshold;  // the switch
    size_t begins_at;          // in the Send
  } kRows[] = {{11, true, 52}, {12, true, 64}, {13, true, 64}, {11, false, 52}, {12, false, 52}, {13, false, 64}};
  for (const auto& row : kRows) {
    const auto item = Pattern(row.length);
    for (const size_t begins_at : {size_t{52}, size_t{64}}) {
      SCOPED_TRACE(std::to_string(row.length) + (row.padded_at_threshold ? " padded" : " not padded") + " at " +
                   std::to_string(begins_at));
      std::vector<std::byte> send(begins_at + XdrRoundUp(row.length) + 4);
      ByteWriter out(send);
      for (const uint32_t word : {7u, 1u, 1u, 2u, 16u, 12u, 0u, 0u, 0u}) out.U32(word);
      for (const uint32_t word : {7u, 0u, 99u}) out.U32(word);
      out.U32(static_cast<uint32_t>(row.length));
      out.Zeros(begins_at - 52);
      out.Bytes(item);
      out.Zeros(XdrPad(row.length));
      out.U32(77);
      ASSERT_TRUE(out.ok() && out.remaining() == 0);

      ProtocolProfile profile = kRfc5666;
      profile.padding_at_threshold = row.padded_at_threshold;
      ByteReader in(send);
      const auto header = DecodeHeaderV1(in, {}, profile);
      ASSERT_TRUE(header.has_value());
      ReducedStream stream{.base = in.Rest()};
      ApplyProfile(profile, PaddingOf(profile, *header), &stream);
      XdrReader reader(stream);
      reader.U64("XID and direction");
      reader.U32("word");
      const ConstBytes data = reader.EligibleOpaque("item", 100);
      const uint32_t behind = reader.U32("word behind it");
      const bool whole = reader.Finish().has_value();
      if (begins_at == row.begins_at) {
        EXPECT_TRUE(whole);
        EXPECT_EQ(behind, 77u);
        EXPECT_EQ(data.data(), send.data() + begins_at);
        EXPECT_EQ(ToHex(data), ToHex(item));
      } else {
        EXPECT_FALSE(whole && behind == 77) << "it is read the other way";
      }
    }
  }
}

// [5666bis:5.7.1#2]
TEST(Padding, TheNewestDocumentTakesItForData) {
  const Call call(2, 500, 100);
  const auto plan = PlanCall(call.shape(), Limits(64));
  ASSERT_TRUE(plan.has_value());
  const auto send = Encode(call, *plan);
  EXPECT_TRUE(Decodes(call, 2, send, kRfc5666, 64));
  EXPECT_FALSE(Decodes(call, 2, send, kRfc5666bis, 64));
  ProtocolProfile otherwise = kRfc5666;
  otherwise.padding_base = PaddingBase::kMessage;
  EXPECT_FALSE(Decodes(call, 2, send, otherwise, 64));
}

TEST(Padding, HostilePaddingIsAFaultOfItsField) {
  std::vector<std::byte> message(16);
  ByteWriter out(message);
  out.U32(8);
  for (const uint32_t align : {13u, 4096u, UINT32_MAX}) {
    ReducedStream stream{.base = message, .padding = {.align = align, .shortest = 0, .start = 36}};
    XdrReader reader(stream);
    reader.Opaque("data", 100);
    EXPECT_FALSE(reader.ok());
  }
  ReducedStream stream{.base = message, .padding = {.align = 44, .shortest = 0, .start = 36}};
  XdrReader reader(stream);
  EXPECT_EQ(reader.Opaque("data", 100).data(), message.data() + 8);
}

}  // namespace
}  // namespace stagecoach::rpcrdma
