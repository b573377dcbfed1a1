#include "rpcrdma/ccp/ccp.h"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "rpcrdma/onc/rpc_message.h"

namespace stagecoach::rpcrdma {
namespace {

// What RFC 5666 section 6.2 and draft-ietf-nfsv4-rpcrdma-00 section 6.2 both make of 8192, 4096 and 16.
constexpr const char* kRequestBytes = "000020000000100000000010";
constexpr ConfigRdmaRequest kRequest{.max_call_size = 8192, .max_reply_size = 4096, .max_rdma_read = 16};
constexpr const char* kReplyBytes = "000018000000100000000001";
constexpr ConfigRdmaReply kReply{.max_call_size = 6144, .align = 4096, .max_rdma_read = 1};

TEST(Ccp, TheCallIsTheseBytes) {
  std::array<std::byte, 128> buffer{};
  XdrWriter out(buffer);
  EncodeCall({.xid = 0x01020304, .prog = kCcpProgram, .vers = kCcpVersion, .proc = kConfRdma}, out);
  Encode(kRequest, out);
  ASSERT_TRUE(out.ok());
  EXPECT_EQ(ToHex(out.written()),
            "0102030400000000000000020001884100000001000000010000000000000000"
            "0000000000000000" +
                std::string(kRequestBytes));
}

TEST(Ccp, TheReplyIsTheseBytes) {
  std::array<std::byte, 128> buffer{};
  XdrWriter out(buffer);
  EncodeReply(SuccessReply(0x01020304), out);
  Encode(kReply, out);
  ASSERT_TRUE(out.ok());
  EXPECT_EQ(ToHex(out.written()), "010203040000000100000000000000000000000000000000" + std::string(kReplyBytes));
}

std::vector<std::byte> Bytes(std::string_view hex) {
  std::vector<std::byte> bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16)));
  }
  return bytes;
}

TEST(Ccp, ArgumentsAndResultsAreReadFromTheirBytes) {
  const auto request_bytes = Bytes(kRequestBytes);
  XdrReader arguments(request_bytes);
  const auto request = DecodeConfigRdmaRequest(arguments);
  ASSERT_TRUE(request.has_value());
  EXPECT_EQ(*request, kRequest);

  const auto reply_bytes = Bytes(kReplyBytes);
  XdrReader results(reply_bytes);
  const auto reply = DecodeConfigRdmaReply(results);
  ASSERT_TRUE(reply.has_value());
  EXPECT_EQ(*reply, kReply);
}

TEST(Ccp, EveryNumberCanBeSaid) {
  const auto bytes = Bytes("ffffffff00000000ffffffff");
  XdrReader arguments(bytes);
  EXPECT_EQ(DecodeConfigRdmaRequest(arguments), (ConfigRdmaRequest{UINT32_MAX, 0, UINT32_MAX}));
  XdrReader results(bytes);
  EXPECT_EQ(DecodeConfigRdmaReply(results), (ConfigRdmaReply{UINT32_MAX, 0, UINT32_MAX}));
}

TEST(Ccp, NeitherLessNorMoreThanThreeWordsIsTaken) {
  const auto bytes = Bytes(std::string(kRequestBytes) + "00000000");
  for (size_t size = 0; size <= bytes.size(); ++size) {
    if (size == 12) continue;
    SCOPED_TRACE(size);
    XdrReader arguments(ConstBytes(bytes).first(size));
    const auto request = DecodeConfigRdmaRequest(arguments);
    ASSERT_FALSE(request.has_value());
    EXPECT_EQ(request.error().kind, size < 12 ? XdrFaultKind::kTruncated : XdrFaultKind::kTrailingBytes);
    XdrReader results(ConstBytes(bytes).first(size));
    const auto reply = DecodeConfigRdmaReply(results);
    ASSERT_FALSE(reply.has_value());
    EXPECT_EQ(reply.error().kind, size < 12 ? XdrFaultKind::kTruncated : XdrFaultKind::kTrailingBytes);
  }
}

TEST(Ccp, FaultsNameTheFieldsAsTheDocumentDoes) {
  const auto bytes = Bytes("0000200000001000");
  XdrReader arguments(bytes);
  EXPECT_STREQ(DecodeConfigRdmaRequest(arguments).error().field, "maxrdmaread");
  XdrReader results(ConstBytes(bytes).first(4));
  EXPECT_STREQ(DecodeConfigRdmaReply(results).error().field, "align");
}

}  // namespace
}  // namespace stagecoach::rpcrdma
