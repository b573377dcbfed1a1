#include "rpcrdma/ccp/configuration.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/prng.h"

namespace stagecoach::rpcrdma {
namespace {

constexpr BufferSizes kMost{.send = 16384, .receive = 8192};

// [5666:6.2#2] [2004:6.1#2]
TEST(Configuration, BuffersAreAsLargeAsTheClientAsksWithinWhatTheServerAllows) {
  const struct {
    uint32_t calls, replies, receive, send;
  } kRows[] = {
      {4096, 4096, 4096, 4096},   {1024, 2048, 1024, 2048}, {8192, 16384, 8192, 16384},
      {8193, 16385, 8192, 16384}, {1025, 5000, 2048, 5120},  // in whole KiB, so a little more than was asked for
      {0, 0, 1024, 1024},         {1, 1023, 1024, 1024},    {UINT32_MAX, UINT32_MAX, 8192, 16384},
  };
  for (const auto& row : kRows) {
    SCOPED_TRACE(row.calls);
    const BufferSizes buffers = BuffersFor({row.calls, row.replies, 16}, kMost);
    EXPECT_EQ(buffers.receive, row.receive);
    EXPECT_EQ(buffers.send, row.send);
  }
}

// [5666:6.1#2]
TEST(Configuration, TheServerGrantsWhatItHasAndSendsWhatTheClientTakes) {
  const BufferSizes buffers{.send = 4096, .receive = 2048};
  const ServerTerms terms = TermsFor({65536, 1500, 16}, buffers, 16, 0, 64);
  EXPECT_EQ(terms.reply, (ConfigRdmaReply{.max_call_size = 2048, .align = 64, .max_rdma_read = 1}));
  EXPECT_EQ(terms.send_inline, 1500u) << "not a byte more";
  EXPECT_EQ(TermsFor({65536, 65536, 16}, buffers, 16, 0, 0).send_inline, 4096u) << "no more than there are buffers for";
  EXPECT_EQ(TermsFor({65536, 7, 16}, buffers, 16, 0, 0).send_inline, 1024u)
      << "every connection carries messages of 1 KiB";
}

// [5666:6.2#4] [5666:6.2#5] [2004:6.1#4] [2004:6.1#5] [2004:6.1#6]
TEST(Configuration, TheSmallerNumberOfReadsHoldsAndNoneIsNone) {
  const BufferSizes buffers;
  EXPECT_EQ(TermsFor({0, 0, 4}, buffers, 16, 0, 0).reads, 4u);
  EXPECT_EQ(TermsFor({0, 0, 16}, buffers, 4, 0, 0).reads, 4u);
  EXPECT_EQ(TermsFor({0, 0, UINT32_MAX}, buffers, 4, 0, 0).reads, 4u);
  // One that reads says more than 0 of itself, whether or not anything of it can be read.
  EXPECT_EQ(TermsFor({0, 0, 4}, buffers, 16, 0, 0).reply.max_rdma_read, 1u);
  EXPECT_EQ(TermsFor({0, 0, 4}, buffers, 16, 8, 0).reply.max_rdma_read, 8u);
  // One that does not read says so: of its own will, or because it must not.
  for (const ServerTerms& terms : {TermsFor({0, 0, 0}, buffers, 16, 8, 0), TermsFor({0, 0, 4}, buffers, 0, 8, 0)}) {
    EXPECT_EQ(terms.reads, 0u);
    EXPECT_EQ(terms.reply.max_rdma_read, 0u);
    EXPECT_FALSE(terms.exposes) << "and leaves nothing to be read";
  }
  EXPECT_TRUE(TermsFor({0, 0, 4}, buffers, 16, 8, 0).exposes);
}

constexpr BufferSizes kClient{.send = 8192, .receive = 4096};
constexpr ConfigRdmaRequest kAsked{.max_call_size = 8192, .max_reply_size = 4096, .max_rdma_read = 16};

TEST(Configuration, TheClientSaysWhatItHas) {
  EXPECT_EQ(RequestFor(kClient, 16), kAsked);
}

// [5666:6.2#1] [5666:6.2#3] [2004:6.1#3]
TEST(Configuration, TheClientSendsNoMoreThanTheServerTakes) {
  const auto sends = [](uint32_t max_call_size) {
    return TermsOf({.max_call_size = max_call_size, .max_rdma_read = 1}, kAsked, kClient, std::nullopt).send_inline;
  };
  EXPECT_EQ(sends(2048), 2048u);
  EXPECT_EQ(sends(2047), 2047u);
  EXPECT_EQ(sends(8192), 8192u);
  EXPECT_EQ(sends(UINT32_MAX), 8192u) << "no more than it has buffers for";
  EXPECT_EQ(sends(0), 1024u) << "every connection carries messages of 1 KiB";
}

TEST(Configuration, RepliesAreAsLongAsTheClientTakesUnlessTheServerHasSaidLess) {
  const ConfigRdmaReply reply{.max_call_size = 8192, .max_rdma_read = 1};
  EXPECT_EQ(TermsOf(reply, kAsked, kClient, std::nullopt).receive_inline, 4096u);
  EXPECT_EQ(TermsOf(reply, kAsked, kClient, 65536).receive_inline, 4096u);
  EXPECT_EQ(TermsOf(reply, kAsked, kClient, 2048).receive_inline, 2048u);
}

// [5666:6.2#5] [2004:6.1#6]
TEST(Configuration, WhereEitherEndSaysNoReadsThereAreNone) {
  ConfigRdmaRequest asked = kAsked;
  ConfigRdmaReply reply{.max_call_size = 8192, .max_rdma_read = 3};
  ClientTerms terms = TermsOf(reply, asked, kClient, std::nullopt);
  EXPECT_TRUE(terms.read_chunks);
  EXPECT_EQ(terms.reads, 3u);
  asked.max_rdma_read = 0;
  terms = TermsOf(reply, asked, kClient, std::nullopt);
  EXPECT_FALSE(terms.read_chunks);
  EXPECT_EQ(terms.reads, 0u);
  reply.max_rdma_read = 0;
  terms = TermsOf(reply, kAsked, kClient, std::nullopt);
  EXPECT_FALSE(terms.read_chunks);
  EXPECT_EQ(terms.reads, 0u);
}

// [5666:6.2#6]
TEST(Configuration, AnAlignmentThatNoMessageCanBePaddedToIsNone) {
  const auto align = [](uint32_t said) {
    return TermsOf({.max_call_size = 4096, .align = said, .max_rdma_read = 1}, kAsked, kClient, std::nullopt).align;
  };
  EXPECT_EQ(align(0), 0u);
  EXPECT_EQ(align(4), 4u);
  EXPECT_EQ(align(1536), 1536u);
  EXPECT_EQ(align(4096), 4096u);
  for (const uint32_t absurd : {1u, 6u, 4100u, 8192u, 1u << 31, UINT32_MAX}) EXPECT_EQ(align(absurd), 0u) << absurd;
}

// Whatever two ends bring, and whatever is said: neither may send what the other has no buffer for, but for what every
// connection carries.
TEST(Configuration, NobodySendsMoreThanThePeerHasRoomFor) {
  Prng prng(7);
  const auto size = [&] { return static_cast<uint32_t>((1 + prng.Below(256)) * 1024); };
  const auto any = [&] { return prng.OneIn(2) ? static_cast<uint32_t>(prng.Below(300000)) : UINT32_MAX; };
  for (int i = 0; i < 20000; ++i) {
    const BufferSizes client{.send = size(), .receive = size()};
    const BufferSizes most{.send = size(), .receive = size()};
    ConfigRdmaRequest request = RequestFor(client, static_cast<uint32_t>(prng.Below(3)));
    if (prng.OneIn(3)) request = {any(), any(), any()};
    const BufferSizes server =
        prng.OneIn(2) ? BuffersFor(request, most) : BufferSizes{.send = size(), .receive = size()};
    const ServerTerms terms = TermsFor(request, server, static_cast<uint32_t>(prng.Below(3)), 0, any());
    const ClientTerms other = TermsOf(terms.reply, request, client, std::nullopt);
    ASSERT_LE(terms.send_inline, server.send);
    ASSERT_LE(terms.send_inline, std::max(request.max_reply_size, 1024u));
    ASSERT_LE(other.send_inline, client.send);
    ASSERT_LE(other.send_inline, server.receive);
    ASSERT_GE(terms.send_inline, 1024u);
    ASSERT_GE(other.send_inline, 1024u);
    ASSERT_EQ(other.read_chunks, terms.reads > 0);
    ASSERT_LE(terms.reads, request.max_rdma_read);
  }
}

TEST(Configuration, WhatHasComeOfItIsTold) {
  TraceLog log;
  TraceConfigured(&log, Instant{}, "server/1",
                  {.send_inline = 4096, .receive_inline = 8192, .reads = 4, .align = 64, .new_buffers = true});
  TraceNotConfigured(&log, Instant{}, "client", "RPC: program 100417 not available");
  EXPECT_EQ(log.lines(),
            (std::vector<std::string>{
                "0.000000000 server/1 connection.configured send_inline=4096 receive_inline=8192 reads=4 align=64 "
                "new_buffers=1",
                "0.000000000 client connection.not_configured why=RPC: program 100417 not available"}));
}

}  // namespace
}  // namespace stagecoach::rpcrdma
