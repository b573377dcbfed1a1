// rpcrdma_v2.x against the codec: rpcgen compiles it, and what the codec encodes is decoded by that code, understood in
// the same words, and encoded to the same bytes, which the codec decodes to what they were.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/prng.h"
#include "rpcrdma/wire/header_v2.h"
#include "tests/support/hex.h"

namespace stagecoach::rpcrdma {
namespace {

// What the peer made of one header.
struct Understood {
  std::string hex;
  std::string text;
};

class RpcrdmaV2Xdr : public ::testing::Test {
 protected:
  // Builds the peer, once, in a folder of its own.
  static void SetUpTestSuite() {
    folder_ = new std::string(::testing::TempDir() + "/rpcrdma_v2_xdr");
    for (const char* tool : {"rpcgen", "gcc"}) {
      ASSERT_EQ(Run(std::string("command -v ") + tool + " >/dev/null"), 0)
          << tool << " is missing; ./dev test installs it";
    }
    ASSERT_EQ(Run("rm -rf '" + *folder_ + "' && mkdir -p '" + *folder_ + "'"), 0);
    ASSERT_EQ(Run("cp rpcrdma/wire/rpcrdma_v2.x tests/xdr/rpcrdma_v2_peer.c '" + *folder_ + "'"), 0);
    const std::string there = "cd '" + *folder_ + "' && ";
    ASSERT_EQ(Run(there + "rpcgen -C -h -o rpcrdma_v2.h rpcrdma_v2.x"), 0);
    ASSERT_EQ(Run(there + "rpcgen -C -c -o rpcrdma_v2_xdr.c rpcrdma_v2.x"), 0);
    // rpcgen's code has variables that it does not use.
    ASSERT_EQ(Run(there + "gcc -Wall -Werror -Wno-unused-variable -I/usr/include/tirpc -o peer rpcrdma_v2_peer.c "
                          "rpcrdma_v2_xdr.c -ltirpc"),
              0)
        << "libtirpc-dev may be missing; ./dev test installs it";
  }
  static void TearDownTestSuite() {
    EXPECT_EQ(Run("rm -rf '" + *folder_ + "'"), 0);
    delete folder_;
  }

  static int Run(const std::string& command) { return std::system(command.c_str()); }

  std::vector<Understood> Peer(const std::vector<std::vector<std::byte>>& messages) {
    std::ofstream in(*folder_ + "/in");
    for (const auto& message : messages) in << ToHex(message) << "\n";
    in.close();
    EXPECT_EQ(Run("'" + *folder_ + "/peer' <'" + *folder_ + "/in' >'" + *folder_ + "/out'"), 0);
    std::vector<Understood> all;
    std::ifstream out(*folder_ + "/out");
    for (Understood each; std::getline(out, each.hex) && std::getline(out, each.text);) all.push_back(each);
    EXPECT_EQ(all.size(), messages.size());
    all.resize(messages.size());
    return all;
  }

  // `headers` there and back.
  void ExpectUnderstood(const std::vector<Header>& headers) {
    std::vector<std::vector<std::byte>> messages;
    for (const Header& header : headers) {
      // RDMA2_MSG has the first word of its RPC message in its XDR.
      std::vector<std::byte> bytes(EncodedSizeV2(header) + (header.has_inline_message() ? 4 : 0));
      ByteWriter out(bytes);
      EncodeHeaderV2(header, out);
      if (header.has_inline_message()) out.U32(header.xid);
      EXPECT_TRUE(out.ok() && out.remaining() == 0);
      messages.push_back(std::move(bytes));
    }
    const std::vector<Understood> understood = Peer(messages);
    for (size_t i = 0; i < headers.size(); ++i) {
      EXPECT_EQ(understood[i].text, ToString(headers[i]));
      EXPECT_EQ(understood[i].hex, ToHex(messages[i])) << ToString(headers[i]);
      if (understood[i].hex != ToHex(messages[i])) continue;
      const auto bytes = FromHex(understood[i].hex);
      ByteReader in{ConstBytes(bytes)};
      const auto decoded = DecodeHeaderV2(in);
      ASSERT_TRUE(decoded.has_value()) << ToString(decoded.error());
      EXPECT_EQ(*decoded, headers[i]);
    }
  }

  static inline std::string* folder_ = nullptr;
};

Header V2(Header::Body body, uint32_t flags) {
  return {.xid = 0x876de715, .version = 2, .credits = 128, .flags = flags, .body = std::move(body)};
}

TEST_F(RpcrdmaV2Xdr, EveryHeaderTypeAndErrorMeansTheSameToTheCodeOfRpcgen) {
  ChunkLists lists;
  lists.reads = {{112, {0x9d451400, 255, 0x559403a44bf0}}, {400, {1, 2, 3}}};
  lists.writes.AppendChunk(SegmentArray{{10, 4096, 0x1000}, {11, 4096, 0xffffffffffffffff}});
  lists.writes.AppendChunk({});
  lists.reply = SegmentArray{{20, 124, 1}, {21, 65536, 2}};
  ChunkLists empty_reply_chunk;
  empty_reply_chunk.reply.emplace();
  ExpectUnderstood({
      V2(RdmaMsg{}, 0),
      V2(RdmaMsg{}, kFlagResponse),
      V2(RdmaMsg{lists, 11}, 0),
      V2(RdmaMsg{empty_reply_chunk}, kFlagResponse),
      V2(RdmaNomsg{}, 0),
      V2(RdmaNomsg{lists, 0xffffffff}, kFlagResponse),
      V2(ErrVers{1, 2}, kFlagResponse),
      V2(ErrBadXdr{}, kFlagResponse),
      V2(ErrInvalHtype{}, kFlagResponse),
      V2(ErrReadChunks{4}, kFlagResponse),
      V2(ErrWriteChunks{5}, kFlagResponse),
      V2(ErrSegments{6}, kFlagResponse),
      V2(ErrWriteResource{7, 8}, kFlagResponse),
      V2(ErrWriteResource{0, 0}, kFlagResponse),
      V2(ErrReplyResource{9}, kFlagResponse),
      V2(ErrSystem{}, kFlagResponse),
      V2(ErrOther{77}, kFlagResponse),
      V2(ConnProp{}, 0),
      V2(ConnProp{MakePropertySet({65536, ReverseSupport::kNone})}, 0),
      V2(ConnProp{MakePropertySet({0xffffffff, ReverseSupport::kGeneral})}, kFlagResponse),
      V2(ConnProp{{{1, {}}, {77, {std::byte{1}, std::byte{2}, std::byte{3}}}, {2, {}}, {78, {}}}}, 0),
  });
}

TEST_F(RpcrdmaV2Xdr, RandomHeadersMeanTheSameToTheCodeOfRpcgen) {
  Prng prng(20);
  const auto word = [&] { return static_cast<uint32_t>(prng.Next()); };
  const auto segment = [&] { return Segment{word(), word(), prng.Next()}; };
  std::vector<Header> headers;
  for (int round = 0; round < 500; ++round) {
    ChunkLists lists;
    for (uint64_t i = prng.Below(8); i > 0; --i) lists.reads.push_back({word(), segment()});
    for (uint64_t i = prng.Below(5); i > 0; --i) {
      lists.writes.BeginChunk();
      for (uint64_t n = prng.Below(5); n > 0; --n) lists.writes.AppendSegment(segment());
    }
    if (prng.OneIn(2)) {
      lists.reply.emplace();
      for (uint64_t n = prng.Below(5); n > 0; --n) lists.reply->push_back(segment());
    }
    PropertySet properties;
    for (uint64_t i = prng.Below(6); i > 0; --i) {
      Property& property = properties.emplace_back(Property{.id = word() | 4});
      for (uint64_t n = prng.Below(10); n > 0; --n) property.data.push_back(static_cast<std::byte>(prng.Next()));
    }
    Header::Body body = ErrOther{word() | 16};
    if (prng.OneIn(2)) body = RdmaMsg{lists, word()};
    if (prng.OneIn(3)) body = RdmaNomsg{lists, word()};
    if (prng.OneIn(4)) body = ConnProp{properties};
    headers.push_back({.xid = word(),
                       .version = 2,
                       .credits = word(),
                       .flags = static_cast<uint32_t>(prng.Below(2)),
                       .body = std::move(body)});
  }
  ExpectUnderstood(headers);
}

TEST_F(RpcrdmaV2Xdr, TheFileHasTheLicenceOfTheDocumentsCode) {
  std::ifstream file("rpcrdma/wire/rpcrdma_v2.x");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  for (const char* words :
       {"Copyright (c) 2010-2018 IETF Trust", "must retain the above", "in binary form must reproduce",
        "Neither the name of Internet Society", "THIS SOFTWARE IS PROVIDED", "POSSIBILITY OF SUCH"}) {
    EXPECT_NE(text.find(words), std::string::npos) << words;
  }
}

TEST_F(RpcrdmaV2Xdr, TheCodeOfRpcgenRefusesWhatIsCutShort) {
  // Else its word on the others would be worth little.
  const Header header = V2(ConnProp{MakePropertySet({})}, 0);
  std::vector<std::byte> bytes(EncodedSizeV2(header));
  ByteWriter out(bytes);
  EncodeHeaderV2(header, out);
  std::vector<std::vector<std::byte>> messages;
  for (size_t size = 4; size < bytes.size(); size += 4) {
    messages.emplace_back(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(size));
  }
  for (const Understood& each : Peer(messages)) EXPECT_EQ(each.text, "refused") << each.hex;
}

}  // namespace
}  // namespace stagecoach::rpcrdma
