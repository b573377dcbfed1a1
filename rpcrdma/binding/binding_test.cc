#include "rpcrdma/binding/binding.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>

#include "rpcrdma/xdr/xdr_writer.h"

namespace stagecoach::rpcrdma {
namespace {

constexpr const char* kFirstAndSecond[] = {"first", "second"};

// The words behind the two eligible items of the arguments.
uint64_t LastWord(XdrReader& args) {
  args.EligibleOpaque("first", 100);
  args.EligibleOpaque("second", 100);
  return args.U32("room");
}
uint64_t Endless(XdrReader&) {
  return std::numeric_limits<uint64_t>::max();
}

constexpr ProcedureBinding kProcedures[] = {
    {.number = 7, .name = "SEVEN", .reply_fixed = 4},
    {.number = 2,
     .name = "TWO",
     .arguments = kFirstAndSecond,
     .results = kFirstAndSecond,
     .reply_fixed = 8,
     .reply_grows = LastWord},
    {.number = 3, .name = "THREE", .reply_fixed = 8, .reply_grows = Endless},
};
constexpr Binding kOld{.program = 100, .version = 1, .name = "old", .procedures = kProcedures};
constexpr Binding kNew{.program = 100, .version = 2, .name = "new", .procedures = kProcedures};
constexpr Binding kOther{.program = 101, .version = 1, .name = "other"};
constexpr Binding kNewer{.program = 100, .version = 2, .name = "newer"};

TEST(BindingRegistry, FindsABindingByProgramAndVersion) {
  BindingRegistry registry;
  EXPECT_EQ(registry.Find(100, 1), nullptr);
  for (const Binding* binding : {&kOld, &kNew, &kOther}) registry.Add(*binding);
  EXPECT_EQ(registry.Find(100, 1), &kOld);
  EXPECT_EQ(registry.Find(100, 2), &kNew);
  EXPECT_EQ(registry.Find(101, 1), &kOther);
  EXPECT_EQ(registry.Find(101, 2), nullptr);
  EXPECT_EQ(registry.Find(1, 100), nullptr);
}

TEST(BindingRegistry, ALaterBindingTakesThePlaceOfAnEarlierOne) {
  BindingRegistry registry;
  for (const Binding* binding : {&kOld, &kNew, &kNew, &kNewer}) registry.Add(*binding);
  EXPECT_EQ(registry.Find(100, 2), &kNewer);
  EXPECT_EQ(registry.Find(100, 1), &kOld);
  EXPECT_EQ(registry.all().size(), 2u);
}

TEST(Binding, ProceduresAreFoundByNumberNotByPlace) {
  EXPECT_STREQ(kOld.Find(7)->name, "SEVEN");
  EXPECT_STREQ(kOld.Find(2)->name, "TWO");
  EXPECT_EQ(kOld.Find(0), nullptr);
  EXPECT_EQ(kOther.Find(7), nullptr);
}

class ReplyBytes : public ::testing::Test {
 protected:
  // The arguments of TWO: items of 5 and 8 bytes, of which the first `leaving` leave the message, then a word.
  uint64_t OfTwo(size_t leaving, uint32_t room) {
    XdrWriter out(buffer_, leaving);
    CallHeader header{.xid = 1, .prog = 100, .vers = 1, .proc = 2};
    header.cred = *MakeAuthSys({.machine_name = "client"});
    EncodeCall(header, out);
    out.EligibleOpaque(AsBytes("12345"));
    out.EligibleOpaque(AsBytes("12345678"));
    out.U32(room);
    EXPECT_EQ(out.eligible().size(), std::min<size_t>(leaving, 2));
    return ReplyBytesMax(kProcedures[1], out.written(), out.eligible());
  }
  std::array<std::byte, 512> buffer_;
};

TEST_F(ReplyBytes, CountTheLongestReplyHeader) {
  // xid, direction, reply_stat, verifier of 8 + 400, accept_stat.
  EXPECT_EQ(kRpcReplyHeaderMax, 4u + 4 + 4 + 8 + 400 + 4);
  EXPECT_EQ(ReplyBytesMax(kProcedures[0], {}, {}), kRpcReplyHeaderMax + 4);
}

TEST_F(ReplyBytes, GrowWithTheArgumentsWhereverTheirItemsAre) {
  for (const size_t leaving : {0u, 1u, 2u, 9u}) {
    EXPECT_EQ(OfTwo(leaving, 0), kRpcReplyHeaderMax + 8);
    EXPECT_EQ(OfTwo(leaving, 32768), kRpcReplyHeaderMax + 8 + 32768);
  }
}

TEST_F(ReplyBytes, OfArgumentsThatAreNotTheProceduresAreThoseOfAnError) {
  XdrWriter out(buffer_);
  EncodeCall({.prog = 100, .vers = 1, .proc = 2}, out);
  out.U32(1000);  // as long as no item of it is
  EXPECT_EQ(ReplyBytesMax(kProcedures[1], out.written(), out.eligible()), kRpcReplyHeaderMax + 8);
  EXPECT_EQ(ReplyBytesMax(kProcedures[1], {}, {}), kRpcReplyHeaderMax + 8);
}

TEST_F(ReplyBytes, NeverWrapAround) {
  XdrWriter out(buffer_);
  EncodeCall({.prog = 100, .vers = 1, .proc = 3}, out);
  EXPECT_EQ(ReplyBytesMax(kProcedures[2], out.written(), out.eligible()), kEndlessReply);
}

}  // namespace
}  // namespace stagecoach::rpcrdma
