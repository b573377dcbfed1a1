#include "rpcrdma/core/negotiation.h"

#include <gtest/gtest.h>

#include <vector>

namespace stagecoach::rpcrdma {
namespace {

std::vector<std::byte> PrivateDataOf(const LocalCapabilities& end) {
  const auto bytes = EncodePrivateData(MakePrivateData(end));
  return {bytes.begin(), bytes.end()};
}

// [5666bis:4.3.1#1]
TEST(NegotiationTest, EachDirectionHasTheSmallerOfWhatIsSentAndWhatIsReceived) {
  const LocalCapabilities client{.send_size = 16384, .receive_size = 2048};
  const LocalCapabilities server{.send_size = 65536, .receive_size = 8192};
  const NegotiatedLimits at_client = Negotiate(client, PrivateDataOf(server));
  EXPECT_EQ(at_client.send_inline, 8192u);
  EXPECT_EQ(at_client.receive_inline, 2048u);
  const NegotiatedLimits at_server = Negotiate(server, PrivateDataOf(client));
  EXPECT_EQ(at_server.send_inline, at_client.receive_inline);
  EXPECT_EQ(at_server.receive_inline, at_client.send_inline);
  const PlanLimits limits = MakePlanLimits(client, at_client);
  EXPECT_EQ(limits.send_inline, 8192u);
  EXPECT_EQ(limits.receive_inline, 2048u);
}

// [5666bis:4.3.1#3] [5666bis:4.3.1#4] [pvtdata:5.1#1]
TEST(NegotiationTest, APeerThatSaysNothingUsableGetsTheDefaultsInBothDirections) {
  const LocalCapabilities own{.send_size = 16384, .receive_size = 2048, .remote_invalidation = true};
  std::vector<std::byte> cut = PrivateDataOf(own);
  cut.pop_back();
  std::vector<std::byte> version_2 = PrivateDataOf(own);
  version_2[4] = std::byte{2};
  for (const auto& silent : {std::vector<std::byte>{}, cut, version_2, std::vector<std::byte>(56)}) {
    const NegotiatedLimits limits = Negotiate(own, silent);
    EXPECT_EQ(limits, NegotiatedLimits{});
    EXPECT_EQ(limits.send_inline, 1024u);
    EXPECT_EQ(limits.receive_inline, 1024u);
  }
}

TEST(NegotiationTest, TheTraceSaysWhatCameOfIt) {
  TraceLog trace;
  TraceNegotiated(&trace, Instant(), "client", {.peer = "10.0.0.1:20049", .reads = 16});
  TraceNegotiated(&trace, Instant(), "server/1",
                  {.peer = "10.0.0.7:50000",
                   .private_data = true,
                   .limits = {.send_inline = 4096, .receive_inline = 8192, .remote_invalidation = true},
                   .reads = 4,
                   .reverse = 8});
  EXPECT_EQ(trace.lines(), (std::vector<std::string>{
                               "0.000000000 client connection.negotiated peer=10.0.0.1:20049 private_data=none "
                               "send_inline=1024 receive_inline=1024 invalidation=0 reads=16 reverse=0",
                               "0.000000000 server/1 connection.negotiated peer=10.0.0.7:50000 private_data=found "
                               "send_inline=4096 receive_inline=8192 invalidation=1 reads=4 reverse=8"}));
}

TEST(NegotiationTest, ThresholdsAreWhatPrivateDataCanSay) {
  EXPECT_EQ(InlineThreshold(0), 1024u);
  EXPECT_EQ(InlineThreshold(1023), 1024u);
  EXPECT_EQ(InlineThreshold(4095), 3072u);
  EXPECT_EQ(InlineThreshold(4096), 4096u);
  EXPECT_EQ(InlineThreshold(UINT32_MAX), 256u * 1024u);
  EXPECT_EQ(MakePrivateData({.send_size = 5000, .receive_size = 1 << 30}),
            (PrivateData{.send_size = 4096, .receive_size = 256 * 1024}));
}

}  // namespace
}  // namespace stagecoach::rpcrdma
