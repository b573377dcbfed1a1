// RPC-over-RDMA as xprtrdma and svcrdma speak it, against our codecs: the header of every Send of the NFS captures, and
// the CM private data, decode and encode to the same bytes. Counts by message type were checked against Wireshark's
// dissector.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/cursor.h"
#include "emu/wire/mpa.h"
#include "emu/wire/rdmap.h"
#include "rpcrdma/wire/header_v1.h"
#include "rpcrdma/wire/private_data.h"
#include "tests/golden/iwarp_streams.h"

namespace stagecoach::testing {
namespace {

using rpcrdma::Header;
using Bytes = std::vector<std::byte>;

constexpr uint16_t kNfsRdmaPort = 20049;
constexpr size_t kMessageTypes = 5;

struct Expected {
  const char* name;
  std::array<int, kMessageTypes> messages;  // by type
};

void PrintTo(const Expected& e, std::ostream* out) {
  *out << e.name;
}

const Expected kCaptures[] = {
    {"siw_nfs3", {201, 7}},
    {"siw_nfs3_inline1024", {171, 7}},
    {"siw_nfs3_mtu1500", {201, 7}},
    {"siw_nfs3client_to_host", {18, 0}},
    {"siw_nfsclient_to_host", {4, 0}},
    {"siw_two_vms", {74, 2}},
};

// The messages that travelled by Send in one direction, put together from their segments.
std::vector<Bytes> SentMessages(const std::vector<RecordedFpdu>& fpdus) {
  std::vector<Bytes> messages;
  Bytes message;
  for (const RecordedFpdu& fpdu : fpdus) {
    const auto header = emu::wire::DecodeSegment(fpdu.ulpdu, fpdu.ulpdu.size());
    if (!header.has_value() || !emu::wire::IsSend(header->opcode())) continue;
    EXPECT_EQ(header->message_offset, message.size());
    const ConstBytes payload = fpdu.ulpdu.subspan(header->EncodedSize());
    message.insert(message.end(), payload.begin(), payload.end());
    if (header->last) messages.push_back(std::exchange(message, {}));
  }
  EXPECT_TRUE(message.empty());
  return messages;
}

// Decodes the header of one message and checks that encoding it gives the same bytes.
std::optional<Header> RoundTrip(const Bytes& message) {
  ByteReader in(message);
  const auto header = rpcrdma::DecodeHeaderV1(in);
  if (!header.has_value()) return std::nullopt;
  Bytes again(rpcrdma::EncodedSizeV1(*header));
  ByteWriter out(again);
  rpcrdma::EncodeHeaderV1(*header, out);
  EXPECT_TRUE(out.ok());
  EXPECT_EQ(again.size(), in.position());
  EXPECT_EQ(ToHex(again), ToHex(ConstBytes(message).first(in.position()))) << rpcrdma::ToString(*header);
  return *header;
}

TcpCapture Load(const std::string& name) {
  auto capture = ReadTcpCaptureFile("tests/golden/captures/" + name + ".pcap");
  if (!capture.has_value()) {
    ADD_FAILURE() << capture.error();
    return {};
  }
  return std::move(*capture);
}

class RpcRdmaGolden : public ::testing::TestWithParam<Expected> {};

std::string Name(const ::testing::TestParamInfo<Expected>& info) {
  return info.param.name;
}
INSTANTIATE_TEST_SUITE_P(Captures, RpcRdmaGolden, ::testing::ValuesIn(kCaptures), Name);

TEST_P(RpcRdmaGolden, EveryHeaderDecodesAndEncodesToTheSameBytes) {
  std::array<int, kMessageTypes> seen{};
  for (const TcpConnection& connection : Load(GetParam().name).connections) {
    const auto iwarp = CutIwarp(connection);
    if (!iwarp.has_value() || connection.server_port != kNfsRdmaPort) continue;
    for (const auto* direction : {&iwarp->from_client, &iwarp->from_server}) {
      for (const Bytes& message : SentMessages(*direction)) {
        const auto header = RoundTrip(message);
        ASSERT_TRUE(header.has_value()) << ToHex(message);
        ++seen[static_cast<size_t>(header->type())];
        EXPECT_EQ(header->has_inline_message(), header->type() == rpcrdma::MessageType::kMsg);
      }
    }
  }
  EXPECT_EQ(seen, GetParam().messages);
}

TEST_P(RpcRdmaGolden, CmPrivateDataDecodesAndEncodesToTheSameBytes) {
  int seen = 0;
  for (const TcpConnection& connection : Load(GetParam().name).connections) {
    const auto iwarp = CutIwarp(connection);
    if (!iwarp.has_value() || connection.server_port != kNfsRdmaPort) continue;
    for (const auto& [kind, bytes] : {std::pair{emu::wire::MpaFrameKind::kRequest, iwarp->request},
                                      {emu::wire::MpaFrameKind::kReply, iwarp->reply}}) {
      const auto frame = emu::wire::MpaFrame::Decode(kind, bytes);
      ASSERT_TRUE(frame.has_value());
      const auto data = rpcrdma::FindPrivateData(frame->private_data);
      ASSERT_TRUE(data.has_value()) << ToHex(frame->private_data);
      EXPECT_EQ(ToHex(rpcrdma::EncodePrivateData(*data)), ToHex(frame->private_data));
      // The client lets its STags be invalidated, the Linux server exposes none and says nothing.
      EXPECT_EQ(data->remote_invalidation, kind == emu::wire::MpaFrameKind::kRequest);
      ++seen;
    }
  }
  EXPECT_GT(seen, 0);
}

// One connection per bad header; svcrdma's answers are all well-formed, its ERR_VERS with the echoed version 2
// included.
TEST(SvcRdmaAnswers, ToBadHeadersDecodeAndEncodeToTheSameBytes) {
  int errors = 0, echoed_versions = 0;
  for (const TcpConnection& connection : Load("siw_knfsd_pokes").connections) {
    const auto iwarp = CutIwarp(connection);
    ASSERT_TRUE(iwarp.has_value());
    for (const Bytes& message : SentMessages(iwarp->from_server)) {
      const auto header = RoundTrip(message);
      ASSERT_TRUE(header.has_value()) << ToHex(message);
      if (header->type() != rpcrdma::MessageType::kError) continue;
      ++errors;
      echoed_versions += header->version == 2;
    }
  }
  EXPECT_EQ(errors, 6);
  EXPECT_EQ(echoed_versions, 1);
}

}  // namespace
}  // namespace stagecoach::testing
