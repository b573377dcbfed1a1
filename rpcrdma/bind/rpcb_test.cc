#include "rpcrdma/bind/rpcb.h"

#include <gtest/gtest.h>

#include <functional>

namespace stagecoach::rpcrdma {
namespace {

constexpr uint32_t kXid = 0x01020304;
constexpr uint32_t kProgram = 0x20000099;

std::vector<std::byte> Encoded(const ReplyHeader& header, const std::function<void(XdrWriter&)>& results) {
  std::vector<std::byte> buffer(1 << 16);
  XdrWriter out(buffer);
  EncodeReply(header, out);
  results(out);
  EXPECT_TRUE(out.ok());
  buffer.resize(out.written().size());
  return buffer;
}

void Put(XdrWriter& out, const RpcbMapping& mapping) {
  out.Optional(true);
  out.U32(mapping.program);
  out.U32(mapping.version);
  out.String(mapping.netid);
  out.String(mapping.address);
  out.String(mapping.owner);
}

std::vector<std::byte> DumpOf(const std::vector<RpcbMapping>& mappings) {
  return Encoded(SuccessReply(kXid), [&](XdrWriter& out) {
    for (const RpcbMapping& mapping : mappings) Put(out, mapping);
    out.Optional(false);
  });
}

// Every byte as RFC 1833 and RFC 5531 have it.
TEST(RpcbCall, IsARecordWithTheMapping) {
  const RpcbMapping mapping{kProgram, 1, "rdma", "10.0.0.1.78.81", ""};
  EXPECT_EQ(ToHex(EncodeRpcbCall(kXid, 4, RpcbProcedure::kSet, mapping)),
            "80000050"  // last fragment, 80 bytes
            "01020304"
            "00000000"
            "00000002"  // xid, CALL, RPC version 2
            "000186a0"
            "00000004"
            "00000001"  // program 100000, version 4, SET
            "0000000000000000"
            "0000000000000000"  // AUTH_NONE twice
            "20000099"
            "00000001"
            "00000004"
            "72646d61"
            "0000000e"
            "31302e302e302e312e37382e3831"
            "0000"
            "00000000");
  EXPECT_EQ(ToHex(EncodeRpcbCall(kXid, 3, RpcbProcedure::kDump, mapping)),
            "80000028"
            "01020304"
            "00000000"
            "00000002"
            "000186a0"
            "00000003"
            "00000004"
            "0000000000000000"
            "0000000000000000");
}

TEST(RpcbDone, IsOneBoolean) {
  for (const bool done : {true, false}) {
    const auto reply = Encoded(SuccessReply(kXid), [&](XdrWriter& out) { out.Bool(done); });
    const auto decoded = DecodeRpcbDone(reply, kXid);
    ASSERT_TRUE(decoded) << decoded.error().text;
    EXPECT_EQ(*decoded, done);
  }
}

TEST(RpcbDump, HasTheMappingsOfTheProgramInTheirOrder) {
  const RpcbMapping ours{kProgram, 1, "rdma", "0.0.0.0.78.81", "superuser"};
  const RpcbMapping newer{kProgram, 2, "rdma6", "::.78.81", "1000"};
  const RpcbMapping other{100000, 4, "local", "/run/rpcbind.sock", "superuser"};
  const auto decoded = DecodeRpcbDump(DumpOf({other, ours, other, newer}), kXid, kProgram);
  ASSERT_TRUE(decoded) << decoded.error().text;
  EXPECT_EQ(*decoded, (std::vector<RpcbMapping>{ours, newer}));
  EXPECT_EQ(DecodeRpcbDump(DumpOf({}), kXid, kProgram)->size(), 0u);
}

TEST(RpcbDump, CutAtAnyByteOrGoingOnBehindTheEndIsMalformed) {
  const auto whole = DumpOf({{kProgram, 1, "rdma", "0.0.0.0.78.81", "superuser"}});
  for (size_t size = 0; size < whole.size(); ++size) {
    const auto decoded = DecodeRpcbDump(ConstBytes(whole).first(size), kXid, kProgram);
    ASSERT_FALSE(decoded) << size;
    EXPECT_EQ(decoded.error().kind, RpcbFault::Kind::kMalformed) << size;
  }
  auto longer = whole;
  longer.resize(whole.size() + 4);
  EXPECT_EQ(DecodeRpcbDump(longer, kXid, kProgram).error().kind, RpcbFault::Kind::kMalformed);
}

TEST(RpcbDump, StringsAreBoundedInMappingsOfOtherProgramsToo) {
  for (const uint32_t program : {kProgram, 7u}) {
    const RpcbMapping longest{program, 1, std::string(kRpcbStringMax, 'n'), "a", "o"};
    EXPECT_TRUE(DecodeRpcbDump(DumpOf({longest}), kXid, kProgram)) << program;
    const RpcbMapping longer{program, 1, std::string(kRpcbStringMax + 1, 'n'), "a", "o"};
    EXPECT_FALSE(DecodeRpcbDump(DumpOf({longer}), kXid, kProgram)) << program;
  }
}

TEST(RpcbAnswers, OtherThanSuccessSayWhatTheyAre) {
  using Kind = RpcbFault::Kind;
  const struct {
    ReplyHeader header;
    Kind kind;
    const char* text;
  } cases[] = {
      {SuccessReply(kXid + 1), Kind::kForeign, "it answers another call"},
      {ProgMismatchReply(kXid, {2, 2}), Kind::kVersions,
       "it speaks versions 2 to 2 of the rpcbind protocol, and 3 or 4 is needed"},
      {ErrorReply(kXid, AcceptStat::kProgUnavail), Kind::kUnavailable, "it did not do the call: "},
      {ErrorReply(kXid, AcceptStat::kProcUnavail), Kind::kUnavailable, "it did not do the call: "},
      {RpcMismatchReply(kXid), Kind::kDenied, "it speaks RPC versions 2 to 2 only"},
      {AuthErrorReply(kXid, AuthStat::kTooWeak), Kind::kDenied, "it denied the call: "},
  };
  for (const auto& [header, kind, text] : cases) {
    const auto reply = Encoded(header, [accepted = header.success()](XdrWriter& out) {
      if (accepted) out.Bool(true);
    });
    const auto decoded = DecodeRpcbDone(reply, kXid);
    ASSERT_FALSE(decoded) << text;
    EXPECT_EQ(decoded.error().kind, kind) << text;
    EXPECT_TRUE(decoded.error().text.starts_with(text)) << decoded.error().text;
  }
  EXPECT_EQ(DecodeRpcbDone(Encoded(ProgMismatchReply(kXid, {2, 7}), [](XdrWriter&) {}), kXid).error().versions,
            (VersionRange{2, 7}));
}

// --- Records ---

std::vector<std::byte> Fragment(bool last, std::string_view text) {
  std::vector<std::byte> bytes(4 + text.size());
  ByteWriter out(bytes);
  out.U32((last ? 0x80000000u : 0u) | static_cast<uint32_t>(text.size()));
  out.Bytes(AsBytes(text));
  return bytes;
}

std::vector<std::byte> Joined(const std::vector<std::vector<std::byte>>& parts) {
  std::vector<std::byte> bytes;
  for (const auto& part : parts) bytes.insert(bytes.end(), part.begin(), part.end());
  return bytes;
}

TEST(RecordAssembler, AnyDivisionOfTheStreamGivesTheSameRecord) {
  const auto stream = Joined({Fragment(false, "ab"), Fragment(false, "cde"), Fragment(true, "f")});
  for (size_t step = 1; step <= stream.size(); ++step) {
    RecordAssembler assembler(6);
    for (size_t at = 0; at < stream.size(); at += step) {
      const size_t size = std::min(step, stream.size() - at);
      const auto whole = assembler.Take(ConstBytes(stream).subspan(at, size));
      ASSERT_TRUE(whole) << ToString(whole.error());
      EXPECT_EQ(*whole, at + size == stream.size()) << step;
    }
    EXPECT_EQ(AsText(assembler.record()), "abcdef");
  }
}

TEST(RecordAssembler, AnEmptyLastFragmentEndsTheRecord) {
  RecordAssembler assembler(6);
  EXPECT_EQ(assembler.Take(Fragment(false, "ab")), false);
  EXPECT_EQ(assembler.Take(Fragment(true, "")), true);
  EXPECT_EQ(AsText(assembler.record()), "ab");
}

TEST(RecordAssembler, WhatBreaksTheBoundsIsAFault) {
  using Fault = RecordAssembler::Fault;
  const struct {
    std::vector<std::byte> stream;
    Fault fault;
  } cases[] = {
      {Fragment(true, "abcdefg"), Fault::kTooLong},
      {Joined({Fragment(false, "abcd"), Fragment(true, "efg")}), Fault::kTooLong},
      {Joined({Fragment(false, "abcdef"), Fragment(false, "g")}), Fault::kTooLong},
      {Joined({Fragment(false, "a"), Fragment(false, "")}), Fault::kEmptyFragment},
      {Joined({Fragment(true, "ab"), {std::byte{0}}}), Fault::kTrailing},
  };
  for (const auto& [stream, fault] : cases) {
    RecordAssembler assembler(6);
    const auto whole = assembler.Take(stream);
    ASSERT_FALSE(whole);
    EXPECT_EQ(whole.error(), fault) << ToString(whole.error());
  }
}

// A mark alone, of the largest fragment there can be, costs nothing.
TEST(RecordAssembler, APromisedLengthIsRefusedBeforeItIsBelieved) {
  RecordAssembler assembler(kRpcbAnswerMax);
  const std::byte mark[] = {std::byte{0xff}, std::byte{0xff}, std::byte{0xff}, std::byte{0xff}};
  EXPECT_EQ(assembler.Take(mark), Err(RecordAssembler::Fault::kTooLong));
}

TEST(Quoted, HoldsNothingThatATerminalActsOn) {
  EXPECT_EQ(Quoted("tcp"), "'tcp'");
  EXPECT_EQ(Quoted("\x1b[31m\\"), "'\\x1b[31m\\x5c'");
  EXPECT_EQ(Quoted(std::string_view("a\0\xff", 3)), "'a\\x00\\xff'");
  EXPECT_EQ(Quoted(std::string(64, 'x')), "'" + std::string(64, 'x') + "'");
  EXPECT_EQ(Quoted(std::string(65, 'x')), "'" + std::string(64, 'x') + "...'");
}

}  // namespace
}  // namespace stagecoach::rpcrdma
