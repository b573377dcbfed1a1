#include "rpcrdma/onc/rpc_message.h"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "base/bytes.h"

namespace stagecoach::rpcrdma {
namespace {

std::vector<std::byte> Encoded(const CallHeader& header) {
  std::vector<std::byte> bytes(EncodedSize(header));
  XdrWriter out(bytes);
  EncodeCall(header, out);
  EXPECT_TRUE(out.ok());
  EXPECT_EQ(out.written().size(), bytes.size());
  return bytes;
}

std::vector<std::byte> Encoded(const ReplyHeader& header) {
  std::vector<std::byte> bytes(EncodedSize(header));
  XdrWriter out(bytes);
  EncodeReply(header, out);
  EXPECT_TRUE(out.ok());
  EXPECT_EQ(out.written().size(), bytes.size());
  return bytes;
}

AuthSys SomeAuthSys() {
  return {.stamp = 77, .machine_name = "client-1", .uid = 1000, .gid = 100, .gids = {4, 24, 27}};
}

CallHeader SomeCall() {
  return {.xid = 0x876de715, .prog = 100003, .vers = 3, .proc = 7, .cred = *MakeAuthSys(SomeAuthSys())};
}

std::vector<ReplyHeader> AllReplies() {
  std::vector<ReplyHeader> replies = {SuccessReply(1), ProgMismatchReply(2, {2, 4}), RpcMismatchReply(3)};
  for (AcceptStat stat :
       {AcceptStat::kProgUnavail, AcceptStat::kProcUnavail, AcceptStat::kGarbageArgs, AcceptStat::kSystemErr}) {
    replies.push_back(ErrorReply(4, stat));
  }
  for (uint32_t stat = 0; stat < 16; ++stat) replies.push_back(AuthErrorReply(5, static_cast<AuthStat>(stat)));
  ReplyHeader with_verifier = SuccessReply(6);
  auto& verf = std::get<AcceptedReply>(with_verifier.body).verf;
  verf.flavor = 6;
  verf.body.append(AsBytes("opaque!"));
  replies.push_back(with_verifier);
  return replies;
}

TEST(RpcMessage, LinuxNullCallIsEncodedAndDecodedByteForByte) {
  // The NULL call of an NFSv3 client, as captured.
  const char* const hex = "876de7150000000000000002000186a3000000030000000000000000000000000000000000000000";
  const CallHeader header{.xid = 0x876de715, .prog = 100003, .vers = 3};
  const auto bytes = Encoded(header);
  EXPECT_EQ(ToHex(bytes), hex);
  XdrReader in{ConstBytes(bytes)};
  EXPECT_EQ(*DecodeCall(in), header);
  EXPECT_EQ(ToString(header), "call xid 876de715 program 100003 version 3 procedure 0 AUTH_NONE");
  EXPECT_EQ(ToHex(Encoded(SuccessReply(0x876de715))), "876de7150000000100000000000000000000000000000000");
}

TEST(RpcMessage, CallsRoundTripAndLeaveTheReaderAtTheArguments) {
  auto bytes = Encoded(SomeCall());
  bytes.resize(bytes.size() + 4, std::byte{9});
  XdrReader in{ConstBytes(bytes)};
  const auto decoded = DecodeCall(in);
  ASSERT_TRUE(decoded.has_value());
  EXPECT_EQ(*decoded, SomeCall());
  EXPECT_EQ(in.U32("argument"), 0x09090909u);
  EXPECT_EQ(*ParseAuthSys(decoded->cred), SomeAuthSys());
  EXPECT_EQ(ToString(*decoded), "call xid 876de715 program 100003 version 3 procedure 7 AUTH_SYS uid 1000 gid 100");
}

TEST(RpcMessage, EveryReplyRoundTripsAndTruncationAtEveryByteIsAFault) {
  for (const ReplyHeader& reply : AllReplies()) {
    const auto bytes = Encoded(reply);
    XdrReader in{ConstBytes(bytes)};
    const auto decoded = DecodeReply(in);
    ASSERT_TRUE(decoded.has_value()) << ToString(reply);
    EXPECT_EQ(*decoded, reply) << ToString(reply);
    EXPECT_TRUE(in.Finish().has_value());
    for (size_t size = 0; size < bytes.size(); ++size) {
      XdrReader cut(ConstBytes(bytes).first(size));
      const auto fault = DecodeReply(cut);
      ASSERT_FALSE(fault.has_value()) << ToString(reply) << " cut to " << size;
      EXPECT_EQ(fault.error().kind, RpcFault::Kind::kMalformed);
      EXPECT_EQ(fault.error().xid.has_value(), size >= 4);
    }
  }
}

TEST(RpcMessage, TruncationOfACallAtEveryByteIsAFaultWithTheXidWhenThere) {
  const auto bytes = Encoded(SomeCall());
  for (size_t size = 0; size < bytes.size(); ++size) {
    XdrReader cut(ConstBytes(bytes).first(size));
    const auto fault = DecodeCall(cut);
    ASSERT_FALSE(fault.has_value()) << size;
    EXPECT_EQ(fault.error().kind, RpcFault::Kind::kMalformed);
    EXPECT_EQ(fault.error().xid, size >= 4 ? std::optional<uint32_t>(0x876de715) : std::nullopt);
  }
}

TEST(RpcMessage, DirectionsAreNotConfused) {
  const auto call = Encoded(SomeCall());
  const auto reply = Encoded(SuccessReply(9));
  XdrReader call_in{ConstBytes(call)};
  EXPECT_EQ(DecodeReply(call_in).error().kind, RpcFault::Kind::kNotAReply);
  XdrReader reply_in{ConstBytes(reply)};
  EXPECT_EQ(DecodeCall(reply_in).error().kind, RpcFault::Kind::kNotACall);
  EXPECT_EQ(PeekMessage(call)->direction, MessageDirection::kCall);
  EXPECT_EQ(PeekMessage(reply)->direction, MessageDirection::kReply);
  EXPECT_EQ(PeekMessage(reply)->xid, 9u);
  EXPECT_FALSE(PeekMessage(ConstBytes(call).first(7)).has_value());
  auto neither = call;
  neither[7] = std::byte{2};
  EXPECT_FALSE(PeekMessage(neither).has_value());
  XdrReader neither_in{ConstBytes(neither)};
  EXPECT_EQ(DecodeCall(neither_in).error().kind, RpcFault::Kind::kNotACall);
}

TEST(RpcMessage, AnotherRpcVersionIsToldApartFromGarbage) {
  auto bytes = Encoded(SomeCall());
  bytes[11] = std::byte{3};
  XdrReader in{ConstBytes(bytes)};
  const auto fault = DecodeCall(in);
  ASSERT_FALSE(fault.has_value());
  EXPECT_EQ(fault.error().kind, RpcFault::Kind::kRpcMismatch);
  EXPECT_EQ(fault.error().rpc_version, 3u);
  EXPECT_EQ(ToString(fault.error()), "RPC version 3 instead of 2 xid 876de715");
}

// RFC 5531 section 8.2. One that is longer is answered as a bad credential, or verifier; all of it need not be there.
TEST(RpcMessage, AuthBodiesEndAt400Bytes) {
  struct Case {
    OpaqueAuth CallHeader::*auth;
    const char* field;
    AuthStat stat;
  };
  for (const Case& each : {Case{&CallHeader::cred, "credential body", AuthStat::kBadCred},
                           Case{&CallHeader::verf, "verifier body", AuthStat::kBadVerf}}) {
    for (const size_t size : {400u, 401u, 404u, 100000u}) {
      CallHeader header = SomeCall();
      header.*each.auth = {.flavor = 6};
      (header.*each.auth).body.append(std::vector<std::byte>(size));
      const auto bytes = Encoded(header);
      for (const size_t there : {bytes.size(), size_t{450}}) {
        if (there > bytes.size()) continue;
        XdrReader in(ConstBytes(bytes).first(there));
        const auto decoded = DecodeCall(in);
        EXPECT_EQ(decoded.has_value(), size == 400 && there == bytes.size());
        if (decoded.has_value() || size == 400) continue;
        EXPECT_EQ(decoded.error().kind, RpcFault::Kind::kBadAuth) << each.field << " " << size << " " << there;
        EXPECT_EQ(decoded.error().auth_stat, each.stat);
        EXPECT_EQ(decoded.error().xid, 0x876de715u);
        EXPECT_EQ(decoded.error().xdr.kind, XdrFaultKind::kTooLong);
        EXPECT_STREQ(decoded.error().xdr.field, each.field);
      }
    }
  }
}

TEST(AuthSysBody, BoundsHoldInBothDirections) {
  AuthSys sys = SomeAuthSys();
  sys.machine_name.assign(255, 'm');
  sys.gids.clear();
  for (uint32_t i = 0; i < 16; ++i) sys.gids.push_back(i);
  const auto full = MakeAuthSys(sys);
  ASSERT_TRUE(full.has_value());
  EXPECT_EQ(*ParseAuthSys(*full), sys);

  AuthSys long_name = sys;
  long_name.machine_name += 'm';
  EXPECT_STREQ(MakeAuthSys(long_name).error().field, "machine name");
  AuthSys many = sys;
  many.gids.push_back(16);
  EXPECT_STREQ(MakeAuthSys(many).error().field, "gids");

  // The same two, from a peer.
  for (uint32_t name : {255u, 256u}) {
    for (uint32_t gids : {16u, 17u}) {
      std::array<std::byte, 600> body;
      XdrWriter out(body);
      out.U32(0);
      out.String(std::string(name, 'x'));
      out.U32(0);
      out.U32(0);
      out.U32(gids);
      for (uint32_t i = 0; i < gids; ++i) out.U32(i);
      OpaqueAuth auth{.flavor = 1};
      auth.body.append(out.written());
      EXPECT_EQ(ParseAuthSys(auth).has_value(), name == 255 && gids == 16);
    }
  }
}

TEST(AuthSysBody, TruncatedTrailingAndForeignBodiesAreFaults) {
  const OpaqueAuth good = *MakeAuthSys(SomeAuthSys());
  for (size_t size = 0; size < good.body.size(); ++size) {
    OpaqueAuth cut{.flavor = good.flavor};
    cut.body.append(good.body.view().first(size));
    EXPECT_FALSE(ParseAuthSys(cut).has_value()) << size;
  }
  OpaqueAuth longer = good;
  longer.body.append(std::vector<std::byte>(4));
  EXPECT_EQ(ParseAuthSys(longer).error().kind, XdrFaultKind::kTrailingBytes);
  EXPECT_FALSE(ParseAuthSys(AuthNone()).has_value());
}

TEST(RpcMessage, UnknownStatusWordsAreFaults) {
  struct Case {
    ReplyHeader reply;
    size_t word;  // index of the last byte of the status word
  };
  for (const Case& c : {Case{SuccessReply(1), 11}, Case{SuccessReply(1), 23}, Case{RpcMismatchReply(1), 15}}) {
    auto bytes = Encoded(c.reply);
    bytes[c.word] = std::byte{6};
    XdrReader in{ConstBytes(bytes)};
    const auto fault = DecodeReply(in);
    ASSERT_FALSE(fault.has_value()) << c.word;
    EXPECT_EQ(fault.error().xdr.kind, XdrFaultKind::kBadValue);
  }
}

TEST(RpcMessage, RepliesReadAsPeopleWouldSayThem) {
  EXPECT_EQ(ToString(SuccessReply(1)), "reply xid 00000001 SUCCESS");
  EXPECT_EQ(ToString(ProgMismatchReply(1, {2, 4})), "reply xid 00000001 PROG_MISMATCH (2 to 4 supported)");
  EXPECT_EQ(ToString(RpcMismatchReply(1)), "reply xid 00000001 denied RPC_MISMATCH (2 to 2 supported)");
  EXPECT_EQ(ToString(AuthErrorReply(1, AuthStat::kTooWeak)), "reply xid 00000001 denied AUTH_TOOWEAK");
}

}  // namespace
}  // namespace stagecoach::rpcrdma
