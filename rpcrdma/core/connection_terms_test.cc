#include "rpcrdma/core/connection_terms.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "rpcrdma/wire/header_v1.h"
#include "rpcrdma/wire/header_v2.h"
#include "tests/support/hex.h"

namespace stagecoach::rpcrdma {
namespace {

using End = ConnectionTerms::End;

constexpr uint32_t kMood = kExperimentalNumbers + 5;
bool OneWord(ConstBytes data) {
  return data.size() == 4;
}
bool AnyValue(ConstBytes) {
  return true;
}
constexpr PropertyRow kProperties[] = {{.id = kMood, .name = "mood", .valid = OneWord},
                                       {.id = kMood + 1, .name = "novel", .valid = AnyValue}};
constexpr Feature kFeature = {.name = "test", .properties = kProperties};

Extensions Known() {
  Extensions extensions;
  EXPECT_EQ(extensions.Add(kFeature), std::nullopt);
  return extensions;
}

ConnectionTerms Terms(End end, TransportVersions versions) {
  return ConnectionTerms({.end = end, .versions = versions});
}

std::vector<std::byte> Encoded(const Header& header) {
  std::vector<std::byte> bytes(400);
  ByteWriter out(bytes);
  if (header.flags) {
    EncodeHeaderV2(header, out);
  } else {
    EncodeHeaderV1(header, out);
  }
  bytes.resize(out.position());
  return bytes;
}
const Header kCall1 = {.xid = 7, .version = 1, .credits = 4, .body = RdmaMsg{}};
const Header kCall2 = {.xid = 7, .version = 2, .credits = 4, .flags = 0, .body = RdmaMsg{}};

Result<Header, HeaderFault> Decode(ConnectionTerms& terms, const std::vector<std::byte>& bytes) {
  ByteReader in(bytes);
  return terms.Decode(in);
}

// --- The version ---

TEST(ConnectionTerms, WhoSpeaksVersion1AloneHasNothingToFindOut) {
  for (const End end : {End::kClient, End::kServer}) {
    ConnectionTerms terms = Terms(end, kVersion1Alone);
    EXPECT_TRUE(terms.settled());
    EXPECT_FALSE(terms.probing());
    EXPECT_EQ(terms.layout(), kHeaderLayoutV1);
    EXPECT_EQ(Decode(terms, Encoded(kCall1)).value(), kCall1);
    EXPECT_EQ(Decode(terms, Encoded(kCall2)).error().kind, HeaderFault::Kind::kVersion);
  }
}

TEST(ConnectionTerms, AServerGoesByTheFirstMessageThatItCanTake) {
  for (const Header& first : {kCall1, kCall2}) {
    ConnectionTerms terms = Terms(End::kServer, kVersions1And2);
    EXPECT_FALSE(terms.settled() || terms.probing());
    EXPECT_EQ(Decode(terms, Encoded(first)).value(), first);
    EXPECT_TRUE(terms.settled());
    EXPECT_EQ(terms.version(), first.version);
    EXPECT_EQ(terms.layout().version, first.version);
    const auto other = Decode(terms, Encoded(first.version == 1 ? kCall2 : kCall1));
    ASSERT_FALSE(other.has_value());
    EXPECT_EQ(other.error().action, FaultAction::kAnswerErrVers);
    EXPECT_EQ(terms.version(), first.version);
  }
}

TEST(ConnectionTerms, WhatSettlesNothing) {
  const Header errors[] = {
      {.xid = 7, .version = 1, .body = ErrChunk{}},
      {.xid = 7, .version = 2, .flags = kFlagResponse, .body = ErrSystem{}},
      {.xid = 7, .version = 2, .flags = 0, .body = ErrSystem{}},
      {.xid = 7, .version = 2, .flags = kFlagResponse, .body = RdmaMsg{}},
      {.xid = 7, .version = 2, .flags = kFlagResponse, .body = ConnProp{}},
  };
  ConnectionTerms terms = Terms(End::kServer, kVersions1And2);
  for (const Header& header : errors) {
    EXPECT_EQ(Decode(terms, Encoded(header)).value(), header);
    EXPECT_FALSE(terms.settled());
  }
  for (const char* malformed : {"00000007 00000002 00000004 00000000 00000000", "00000007 00000003 00000004 00000000",
                                "00000007 00000001 00000004 00000000", "00000007"}) {
    EXPECT_FALSE(Decode(terms, FromHex(malformed)).has_value());
    EXPECT_FALSE(terms.settled());
  }
}

TEST(ConnectionTerms, AClientThatProbesReadsBothVersionsAndWaitsToBeTold) {
  ConnectionTerms terms = Terms(End::kClient, kVersions1And2);
  EXPECT_TRUE(terms.probing());
  EXPECT_EQ(terms.version(), 2u);
  EXPECT_EQ(terms.layout(), kHeaderLayoutV2);
  EXPECT_EQ(terms.send_inline(), kProbeSizeMax);
  // Version 1's layout under either word; see wire/probe_answer.h.
  const auto echoed = Decode(terms, FromHex("00000007 00000002 00000004 00000004 00000001 00000001 00000001"));
  EXPECT_EQ(echoed->flags, std::nullopt);
  EXPECT_EQ(echoed->body, Header::Body(ErrVers{1, 1}));
  const Header reply = {.xid = 7, .version = 2, .credits = 4, .flags = kFlagResponse, .body = RdmaMsg{}};
  auto bytes = Encoded(reply);
  bytes.resize(bytes.size() + 12);
  ByteReader in(bytes);
  EXPECT_EQ(terms.Decode(in).value(), reply);
  EXPECT_EQ(in.remaining(), 12u) << "the RPC message";
  EXPECT_TRUE(terms.probing());

  terms.SetVersion(2);
  EXPECT_FALSE(terms.probing());
  EXPECT_EQ(terms.send_inline(), 4096u);
  EXPECT_FALSE(Decode(terms, Encoded({.xid = 7, .version = 1, .body = RdmaMsg{}})).has_value());
}

// What is marked as an answer of version 2 is not answered, even where that version does not hold.
TEST(ConnectionTerms, AnAnswerOfAnotherVersionIsDropped) {
  ConnectionTerms terms = Terms(End::kServer, kVersions1And2);
  terms.SetVersion(1);
  Header reply = kCall2;
  EXPECT_EQ(Decode(terms, Encoded(reply)).error().action, FaultAction::kAnswerErrVers);
  reply.flags = kFlagResponse;
  EXPECT_EQ(Decode(terms, Encoded(reply)).error().action, FaultAction::kDrop);
  // Too short for flags, and of a version whose layout we do not know.
  EXPECT_EQ(Decode(terms, FromHex("00000007 00000002 00000004 00000000")).error().action, FaultAction::kAnswerErrVers);
  EXPECT_EQ(Decode(terms, FromHex("00000007 00000003 00000004 00000000 00000001")).error().action,
            FaultAction::kAnswerErrVers);
  ConnectionTerms old = Terms(End::kServer, kVersion1Alone);
  EXPECT_EQ(Decode(old, Encoded(reply)).error().action, FaultAction::kAnswerErrVers);
}

TEST(ConnectionTerms, HeadersHaveTheLayoutOfTheirVersion) {
  ConnectionTerms terms = Terms(End::kServer, kVersions1And2);
  EXPECT_EQ(terms.MakeHeader(7, 3, kFlagResponse, ErrChunk{}),
            (Header{.xid = 7, .version = 1, .credits = 3, .body = ErrChunk{}}));
  terms.SetVersion(2);
  const Header error = terms.MakeHeader(7, 3, kFlagResponse, ErrSystem{});
  EXPECT_EQ(error, (Header{.xid = 7, .version = 2, .credits = 3, .flags = kFlagResponse, .body = ErrSystem{}}));
  std::vector<std::byte> bytes(terms.EncodedSize(error));
  ByteWriter out(bytes);
  terms.Encode(error, out);
  EXPECT_EQ(ToHex(bytes), ToHex(FromHex("00000007 00000002 00000003 00000004 00000001 00000009")));
}

// Of version 2, what version 1's documents disagree in is as the last of them has it.
TEST(ConnectionTerms, TheDocumentOfVersion1IsOfVersion1Alone) {
  ConnectionTerms terms({.end = End::kServer, .versions = kVersions1And2, .profile = kDraft2004});
  EXPECT_EQ(terms.profile(), kDraft2004);
  terms.SetVersion(2);
  EXPECT_EQ(terms.profile(), kRfc5666bis);
}

// --- Properties ---

TEST(ConnectionTerms, SizesBeforeAndAfterThePropertiesOfThePeer) {
  ConnectionTerms terms(
      {.end = End::kServer, .versions = kVersion2Alone, .own = {.receive_buffer_size = 16384}, .send_max = 8192});
  EXPECT_EQ(terms.send_inline(), 4096u);
  EXPECT_EQ(terms.receive_inline(), 4096u) << "the peer may not know";
  ConnectionTerms small = terms;
  ConnectionTerms silent = terms;

  EXPECT_TRUE(terms.OnPeerProperties(MakePropertySet({.receive_buffer_size = 32768})));
  EXPECT_EQ(terms.send_inline(), 8192u) << "no more than this end can send";
  EXPECT_EQ(terms.receive_inline(), 16384u);
  // Later ones change nothing.
  EXPECT_FALSE(terms.OnPeerProperties(MakePropertySet({.receive_buffer_size = 1024})));
  EXPECT_EQ(terms.send_inline(), 8192u);
  EXPECT_EQ(terms.peer().receive_buffer_size, 32768u);
  ASSERT_NE(terms.peer_set(), nullptr);
  EXPECT_EQ(*terms.peer_set(), MakePropertySet({.receive_buffer_size = 32768}));

  small.OnPeerProperties(MakePropertySet({.receive_buffer_size = 1025}));
  EXPECT_EQ(small.send_inline(), 1025u);
  EXPECT_EQ(small.receive_inline(), 4096u) << "every end sends what every end takes";

  // One that does not name its size has the default, and has shown nothing.
  silent.OnPeerProperties({});
  EXPECT_TRUE(silent.peer_has_spoken());
  EXPECT_EQ(silent.send_inline(), 4096u);
  EXPECT_EQ(silent.receive_inline(), 4096u);
}

TEST(ConnectionTerms, WhatAnEndMaySayOfItself) {
  using Kind = OwnPropertiesFault::Kind;
  const Extensions extensions = Known();
  const TransportProperties own;
  const auto word = std::vector<std::byte>(4);
  const auto fault = [&](const PropertySet& more) { return CheckOwnProperties(own, more, extensions); };
  EXPECT_EQ(fault({}), std::nullopt);
  EXPECT_EQ(fault({{kMood, word}}), std::nullopt);
  EXPECT_EQ(fault({{99, word}}), (OwnPropertiesFault{.kind = Kind::kUnknown, .id = 99}));
  EXPECT_EQ(fault({{kRdma2PropidRbsiz, word}}), (OwnPropertiesFault{.kind = Kind::kUnknown, .id = kRdma2PropidRbsiz}));
  EXPECT_EQ(fault({{kMood, std::vector<std::byte>(3)}})->kind, Kind::kMalformed);
  EXPECT_EQ(fault({{kMood, word}, {kMood, word}})->property,
            (PropertyFault{.kind = PropertyFault::Kind::kTwice, .id = kMood}));
  EXPECT_EQ(CheckOwnProperties({.receive_buffer_size = 1000}, {})->kind, Kind::kMalformed);
  // The prefix, a count and the two of the base protocol take 48 bytes, and a property 8 beside its data.
  EXPECT_EQ(fault({{kMood + 1, std::vector<std::byte>(1024 - 48 - 8)}}), std::nullopt);
  const auto long_one = fault({{kMood + 1, std::vector<std::byte>(1024 - 48 - 7)}});
  EXPECT_EQ(long_one, (OwnPropertiesFault{.kind = Kind::kTooLong, .size = 1028}));
  EXPECT_EQ(ToString(*long_one), "RDMA2_CONNPROP would take 1028 bytes of 1024");
  EXPECT_EQ(ToString(*fault({{99, word}})), "property 99 is none of an extension's");
}

TEST(ConnectionTerms, AnEndSaysTheBasePropertiesAndThoseOfItsExtensions) {
  const PropertySet more = {{kMood, std::vector<std::byte>(4)}};
  ConnectionTerms terms({.end = End::kServer,
                         .versions = kVersion2Alone,
                         .extensions = std::make_shared<Extensions>(Known()),
                         .own = {.reverse_requests = ReverseSupport::kGeneral},
                         .more = more});
  PropertySet all = MakePropertySet({.reverse_requests = ReverseSupport::kGeneral});
  all.push_back(more[0]);
  EXPECT_EQ(terms.own_set(), all);
}

}  // namespace
}  // namespace stagecoach::rpcrdma
