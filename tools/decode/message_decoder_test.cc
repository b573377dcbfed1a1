// Each rule of each text, on a message that breaks it; and what of other messages it takes to see that.
#include "tools/decode/message_decoder.h"

#include <gtest/gtest.h>

#include "tools/decode/test_messages.h"

namespace stagecoach::decode {
namespace {

using namespace testing;

constexpr uint32_t kMsg = 0, kNomsg = 1, kMsgp = 2, kDone = 3, kError = 4;

// Of one message of which nothing else is known.
std::string Alone(const rpcrdma::ProtocolProfile& profile, const Bytes& message) {
  MessageDecoder decoder(profile);
  return Remarks(decoder.OnMessage(End::kUnknown, message).fields);
}

// Of the last of some messages of one connection that was seen from its beginning: client and server in turn.
std::string AfterOthers(const rpcrdma::ProtocolProfile& profile, const std::vector<Bytes>& messages) {
  MessageDecoder decoder(profile);
  decoder.OnBeginning();
  std::string remarks;
  End sender = End::kClient;
  for (const Bytes& message : messages) {
    remarks = Remarks(decoder.OnMessage(sender, message).fields);
    sender = sender == End::kClient ? End::kServer : End::kClient;
  }
  return remarks;
}

// What a message is called by each of the three texts.
void ExpectByProfile(const Bytes& message, const std::string& draft, const std::string& rfc5666,
                     const std::string& bis) {
  EXPECT_EQ(Alone(rpcrdma::kDraft2004, message), draft);
  EXPECT_EQ(Alone(rpcrdma::kRfc5666, message), rfc5666);
  EXPECT_EQ(Alone(rpcrdma::kRfc5666bis, message), bis);
}
void ExpectAlike(const Bytes& message, const std::string& remark) {
  for (const rpcrdma::ProtocolProfile& profile : rpcrdma::AllProfiles()) {
    const std::string remarks = Alone(profile, message);
    EXPECT_NE(remarks.find("ILLEGAL " + remark), std::string::npos) << profile.name << ": " << remarks;
  }
}

TEST(MessageDecoder, AMessageWithNothingWrongHasEachFieldWithItsSection) {
  const Bytes message =
      Version1(7, kMsg, Read(40, 8) + Words({0}) + Chunk(100) + Words({0}) + Chunk(50, 0x3000) + Call(7));
  MessageDecoder decoder(rpcrdma::kRfc5666bis);
  const DecodedMessage decoded = decoder.OnMessage(End::kClient, message);
  EXPECT_EQ(Remarks(decoded.fields), "");
  EXPECT_TRUE(decoded.well_formed);
  EXPECT_FALSE(decoded.illegal());
  EXPECT_EQ(decoded.summary, "RDMA_MSG, version 1: call 0x00000007, NFS 3 NULL");
  EXPECT_EQ(decoded.header_size, message.size() - 40);
  // The fields are the message, all of it, in order.
  size_t end = 0;
  for (const Field& field : decoded.fields) {
    EXPECT_EQ(field.offset, end) << field.name;
    end += field.size;
  }
  EXPECT_EQ(end, message.size());
  EXPECT_EQ(ToString(decoded.fields[0].section), "5666bis 5.1.1");
  EXPECT_EQ(ValueOf(decoded.fields, "rdma_position"), 40);
  EXPECT_EQ(ValueOf(decoded.fields, "rdma_handle"), 0x1000);
  EXPECT_EQ(MeaningOf(decoded.fields, "rdma_credit"), "requested");
  EXPECT_EQ(MeaningOf(decoded.fields, "prog"), "NFS");
}

TEST(MessageDecoder, FieldsHaveTheNamesAndSectionsOfTheTextThatJudges) {
  const Bytes message = Version1(7, kMsg, Read(40, 8) + Words({0, 0, 0}) + Call(7));
  for (const auto& [profile, name, section] :
       {std::tuple{rpcrdma::kDraft2004, "handle", "2004 3.4"}, std::tuple{rpcrdma::kRfc5666, "handle", "5666 3.4"},
        std::tuple{rpcrdma::kRfc5666bis, "rdma_handle", "5666bis 4.4.2"}}) {
    MessageDecoder decoder(profile);
    const DecodedMessage decoded = decoder.OnMessage(End::kUnknown, message);
    EXPECT_EQ(ValueOf(decoded.fields, name), 0x1000);
    for (const Field& field : decoded.fields) {
      if (std::string_view(field.name) != name) continue;
      EXPECT_EQ(ToString(field.section), section);
    }
  }
}

TEST(MessageDecoder, WhatAllTextsForbidIsIllegalByEach) {
  ExpectAlike(Version1(7, kNomsg, Read(0, 100) + Words({0, 0, 0}) + Call(7)), "nothing is to follow the header");
  ExpectAlike(Version1(7, kMsg, kNoChunks), "the RPC message that is to follow is not there");
  ExpectAlike(Version1(7, kMsg, Read(0, 100) + Words({0, 0, 0}) + Call(7)), "position 0 is for a whole message");
  ExpectAlike(Version1(7, kMsg, Read(42, 4) + Words({0, 0, 0}) + Call(7)), "not a multiple of four");
  ExpectAlike(Version1(7, kMsg, Read(40, 100) + Read(60, 4) + Words({0, 0, 0}) + Call(7)),
              "begins inside of the chunk before it");
  ExpectAlike(Version1(7, kMsg, Read(44, 4) + Words({0, 0, 0}) + Call(7)), "behind the end of the message");
  ExpectAlike(Version1(7, kNomsg, kNoChunks), "neither a Position-Zero Read chunk nor a Reply chunk");
  ExpectAlike(Version1(7, 5, {}), "no message type of version 1");
  ExpectAlike(Version1(7, kMsg, Words({2, 0, 0}) + Call(7)), "neither 0 nor 1");
  ExpectAlike(Version1(7, kMsg, Words({0, 1, 1000000})), "there is room for 0 of them");
  ExpectAlike(Version1(7, kError, Words({1, 1})), "the message ends here, 0 bytes into an item of 4");
  ExpectAlike(Words({7, 1, 2}), "the message ends here");
  ExpectAlike(Words({7, 9, 1, 0, 0, 0, 0}), "no version that is known");
  ExpectAlike(Version1(7, kMsg, Words({1, 40, 1, 2, 0xffffffff, 0xffffffff, 0, 0, 0}) + Call(7)),
              "the segment passes the end of the address space");
  ExpectAlike(Version1(7, kDone, Words({0})), "nothing is to follow the header");
  ExpectAlike(Version1(7, kMsg, kNoChunks + Words({7, 2})), "neither CALL nor REPLY");
  ExpectAlike(Version1(7, kMsg, kNoChunks + Words({7, 0, 3, 0, 0, 0})), "RPC has version 2");
  ExpectAlike(Version1(7, kMsg, kNoChunks + Words({7, 0, 2, 1, 1, 1, 0, 401})), "more than 400 bytes");
}

TEST(MessageDecoder, WhatFollowsAHeaderThatIsAllOfAMessageCitesThatHeader) {
  const std::string end = "(rest): ILLEGAL nothing is to follow the header ";
  for (const uint32_t code : {1, 2}) {
    const Bytes error = Version1(7, kError, (code == 1 ? Words({1, 1, 1}) : Words({2})) + Words({0}));
    ExpectByProfile(error, end + "(2004 5.3)\n", end + "(5666 4.2)\n", end + "(5666bis 5.5)\n");
  }
  ExpectByProfile(Version1(7, kNomsg, Read(0, 40) + Words({0, 0, 0, 0})), end + "(2004 4.1)\n", end + "(5666 4.1)\n",
                  end + "(5666bis 5.1.4)\n");
  ExpectAlike(Version1(7, kDone, Words({0})), "nothing is to follow the header");
}

TEST(MessageDecoder, ARangeOfVersionsHasOneInIt) {
  const std::string empty = "rdma_vers_high: ILLEGAL the range has no version in it ";
  ExpectByProfile(Version1(7, kError, Words({1, 2, 1})), empty + "(2004 5.3)\n", empty + "(5666 4.2)\n",
                  empty + "(5666bis 5.5)\n");
  ExpectByProfile(Version1(7, kError, Words({1, 0xffffffff, 0})), empty + "(2004 5.3)\n", empty + "(5666 4.2)\n",
                  empty + "(5666bis 5.5)\n");
  ExpectByProfile(Version1(7, kError, Words({1, 1, 1})), "", "", "");
}

TEST(MessageDecoder, OneTextForbidsWhatAnotherAllows) {
  ExpectByProfile(Version1(7, kMsgp, Words({4096, 1024}) + kNoChunks + Call(7)), "", "",
                  "rdma_proc: deprecated: should not be sent (5666bis 5.7.1)\n");
  ExpectByProfile(Version1(7, kDone, {}), "", "",
                  "rdma_proc: deprecated: there is never a need to send it (5666bis 5.7.2)\n");
  ExpectByProfile(Version1(7, kMsg, kNoChunks + Call(8)),
                  "xid: the transport header has another XID, 0x00000007 (2004 4.1)\n",
                  "xid: ILLEGAL the transport header has another XID, 0x00000007 (5666 4.1)\n",
                  "xid: ILLEGAL the transport header has another XID, 0x00000007 (5666bis 5.1.1)\n");
  // A chunk of the two bytes that round another one up.
  ExpectByProfile(Version1(7, kMsg, Read(40, 6) + Read(46, 2) + Words({0, 0, 0}) + Call(7)),
                  "position: a chunk of round-up alone, which had better be left out (2004 3.4)\n",
                  "position: a chunk of round-up alone, which had better be left out (5666 3.7)\n",
                  "rdma_position: ILLEGAL not a multiple of four: no XDR item begins here (5666bis 4.4.4.1)\n");
  ExpectByProfile(Version1(7, kMsg, Read(24, 4) + Words({0, 0, 0}) + Reply(7)), "",
                  "rdma_reads: nothing is read from a responder (5666 3.8)\n",
                  "rdma_reads: ILLEGAL nothing is read from a responder (5666bis 4.1)\n");
  ExpectByProfile(Version1(7, kMsg, Read(40, 4) + Read(32, 4) + Words({0, 0, 0}) + Call(7)), "", "",
                  "rdma_position: the list is not in the order of positions (5666bis 5.2.1)\n");
  // Eight words of their own behind an error code that is not known; and less than that.
  ExpectByProfile(Version1(7, kError, Words({3, 0, 0, 0, 0, 0, 0, 0, 0})), "", "",
                  "err: ILLEGAL no error code of version 1 (5666bis 5.5)\n"
                  "(rest): ILLEGAL nothing is to follow the header (5666bis 5.5)\n");
  ExpectByProfile(Version1(7, kError, Words({3})),
                  "rdma_extra: ILLEGAL the message ends here, 0 bytes into an item of 4 (2004 5.3)\n",
                  "rdma_extra: ILLEGAL the message ends here, 0 bytes into an item of 4 (5666 4.2)\n",
                  "err: ILLEGAL no error code of version 1 (5666bis 5.5)\n");
}

TEST(MessageDecoder, AZeroGrantIsJudgedByWhatIsInProgress) {
  const Bytes granted = Version1(7, kMsg, kNoChunks + Reply(7), 0);
  ExpectByProfile(granted, "rdma_credit: a grant may be zero only while other calls are in progress (2004 3.3)\n",
                  "rdma_credit: a grant may be zero only while other calls are in progress (5666 3.3)\n",
                  "rdma_credit: ILLEGAL a grant is never zero (5666bis 4.3)\n");

  const Bytes call = Version1(7, kMsg, kNoChunks + Call(7));
  EXPECT_EQ(
      AfterOthers(rpcrdma::kDraft2004, {call, granted}),
      "rdma_credit: ILLEGAL a grant may be zero only while other calls are in progress, and none is (2004 3.3)\n");
  MessageDecoder decoder(rpcrdma::kDraft2004);
  decoder.OnBeginning();
  decoder.OnMessage(End::kClient, call);
  decoder.OnMessage(End::kClient, Version1(8, kMsg, kNoChunks + Call(8)));
  EXPECT_EQ(Remarks(decoder.OnMessage(End::kServer, granted).fields),
            "rdma_credit: 1 other calls are in progress (2004 4.1)\n");
}

TEST(MessageDecoder, ListsThatAreReturnedAreThoseThatWereOffered) {
  const Bytes call = Version1(7, kMsg, Words({0}) + Chunk(255) + Words({0}) + Chunk(1000, 0x3000) + Call(7));
  const auto returned = [&](const Bytes& lists, uint32_t type = kMsg) {
    return AfterOthers(rpcrdma::kRfc5666bis, {call, Version1(7, type, lists + (type == kMsg ? Reply(7) : Bytes{}))});
  };
  EXPECT_EQ(returned(Words({0}) + Chunk(255) + Words({0, 0})), "");
  EXPECT_EQ(returned(Words({0}) + Chunk(0) + Words({0, 0})), "");
  EXPECT_EQ(returned(kNoChunks), "");
  EXPECT_EQ(returned(Words({0}) + Chunk(0) + Words({0}) + Chunk(900, 0x3000), kNomsg), "");
  EXPECT_EQ(returned(Words({0}) + Chunk(256) + Words({0, 0})),
            "rdma_length: ILLEGAL the call offers 255 bytes here (5666bis 4.4.5)\n");
  EXPECT_EQ(returned(Words({0}) + Chunk(255, 0x2001) + Words({0, 0})),
            "rdma_handle: ILLEGAL not what the call offers here: 0x00002000+255@0x40 (5666bis 4.4.5)\n");
  EXPECT_EQ(
      returned(Words({0, 1, 0, 0, 0})),
      "rdma_target: ILLEGAL the call offers another number of segments here: 0x00002000+255@0x40 (5666bis 4.4.5)\n");
  EXPECT_EQ(returned(Words({0}) + Chunk(1) + Chunk(1) + Words({0, 0})),
            "rdma_writes: ILLEGAL the call offers 1 Write chunks (5666bis 4.4.5)\n");
  EXPECT_EQ(returned(Words({0, 0}) + Chunk(900, 0x3001), kNomsg),
            "rdma_handle: ILLEGAL not what the call offers here: 0x00003000+1000@0x40 (5666bis 4.4.5)\n");
  EXPECT_EQ(returned(Words({0, 0}) + Chunk(1, 0x3000)),
            "rdma_target: ILLEGAL an inline reply beside a filled Reply chunk (5666bis 4.4.5.1)\n");
  EXPECT_EQ(AfterOthers(rpcrdma::kRfc5666bis,
                        {Version1(7, kMsg, kNoChunks + Call(7)), Version1(7, kNomsg, Words({0, 0}) + Chunk(1))}),
            "rdma_reply: ILLEGAL the call offers no Reply chunk (5666bis 5.2.3)\n");
  // RFC 5666 has returned lengths count round-up.
  EXPECT_EQ(
      AfterOthers(rpcrdma::kRfc5666, {call, Version1(7, kMsg, Words({0}) + Chunk(256) + Words({0, 0}) + Reply(7))}),
      "");
}

TEST(MessageDecoder, LongRepliesOfTheOlderTextsMayBeReadChunks) {
  const Bytes call = Version1(7, kMsg, kNoChunks + Call(7));
  const Bytes reply = Version1(7, kNomsg, Read(0, 5000) + Words({0, 0, 0}));
  MessageDecoder decoder(rpcrdma::kDraft2004);
  decoder.OnMessage(End::kClient, call);
  const DecodedMessage decoded = decoder.OnMessage(End::kServer, reply);
  EXPECT_EQ(Remarks(decoded.fields), "");
  EXPECT_EQ(decoded.summary, "RDMA_NOMSG, version 1: reply 0x00000007 of NFS 3 NULL");
  // Of two replies one is too many.
  EXPECT_EQ(AfterOthers(rpcrdma::kDraft2004, {Version1(7, kMsg, Words({0, 0}) + Chunk(9000) + Call(7)),
                                              Version1(7, kNomsg, Read(0, 5000) + Words({0, 0}) + Chunk(10))}),
            "rdma_target: ILLEGAL a Position-Zero Read chunk beside a filled Reply chunk (2004 5.2)\n");
  // By the last one the server calls, and it may not so.
  EXPECT_EQ(AfterOthers(rpcrdma::kRfc5666bis, {call, reply}),
            "rdma_proc: ILLEGAL backward calls are RDMA_MSG without chunks (5666bis 8.3.4)\n");
}

TEST(MessageDecoder, ARepliesCallMayBeNamedBesideIt) {
  MessageDecoder decoder(rpcrdma::kRfc5666);
  decoder.OnMessage(End::kClient, Version1(7, kMsg, kNoChunks + Call(7, 100417, 1, 1) + Words({1024, 2048, 16})));
  const DecodedMessage reply =
      decoder.OnMessage(End::kServer, Version1(7, kMsg, kNoChunks + Reply(7) + Words({4096, 512, 0})));
  EXPECT_EQ(reply.summary, "RDMA_MSG, version 1: reply 0x00000007, SUCCESS of CONFIG_RDMA 1 CONF_RDMA");
  EXPECT_EQ(ValueOf(reply.fields, "align"), 512);
  EXPECT_EQ(ValueOf(reply.fields, "maxrdmaread"), 0);
  EXPECT_EQ(MeaningOf(reply.fields, "maxrdmaread"), "the peer must not send what takes an RDMA Read");
  EXPECT_EQ(
      Alone(rpcrdma::kDraft2004, Version1(7, kMsg, kNoChunks + Call(7, 100417, 1, 1) + Words({1024, 2048, 16, 0}))),
      "(rest): ILLEGAL the arguments end before this (2004 6.2)\n");
}

TEST(MessageDecoder, ThresholdsAreThoseOfCmPrivateData) {
  MessageDecoder decoder(rpcrdma::kRfc5666bis);
  const Bytes kilobyte = Words({0xf6ab0e18, 0x01000000});
  const Bytes four = Words({0xf6ab0e18, 0x01000303});
  ASSERT_TRUE(decoder.OnPrivateData(End::kClient, four));
  ASSERT_TRUE(decoder.OnPrivateData(End::kServer, Bytes(3) + kilobyte + Bytes(10)));
  const Bytes fits = Version1(7, kMsg, kNoChunks + Call(7) + Bytes(1024 - 28 - 40));
  EXPECT_EQ(Remarks(decoder.OnMessage(End::kClient, fits).fields), "");
  const Bytes message = Version1(8, kMsg, kNoChunks + Call(8) + Bytes(1025 - 28 - 40));
  EXPECT_EQ(Remarks(decoder.OnMessage(End::kClient, message).fields),
            "rdma_xid: ILLEGAL the message has 1025 bytes, the inline threshold is 1024 (pvtdata 4.2)\n");
}

TEST(MessageDecoder, WithoutPrivateDataOfBothEndsALongMessageMayHaveBeenAgreedOn) {
  MessageDecoder decoder(rpcrdma::kRfc5666bis);
  decoder.OnPrivateData(End::kClient, Words({0xf6ab0e18, 0x01000303}));
  decoder.OnPrivateData(End::kServer, {});
  const Bytes message = Version1(8, kMsg, kNoChunks + Call(8) + Bytes(1025 - 28 - 40));
  EXPECT_EQ(Remarks(decoder.OnMessage(End::kClient, message).fields),
            "rdma_xid: the message has 1025 bytes, the inline threshold is 1024 unless both ends were told otherwise "
            "(pvtdata 5.1)\n");
  // The older documents know nothing of it.
  MessageDecoder older(rpcrdma::kRfc5666);
  older.OnPrivateData(End::kClient, Words({0xf6ab0e18, 0x01000000}));
  older.OnPrivateData(End::kServer, Words({0xf6ab0e18, 0x01000000}));
  EXPECT_EQ(Remarks(older.OnMessage(End::kClient, message).fields), "");
}

TEST(MessageDecoder, CmPrivateDataIsFoundAndJudged) {
  MessageDecoder decoder(rpcrdma::kRfc5666bis);
  EXPECT_FALSE(decoder.OnPrivateData(End::kClient, Words({0xf6ab0e17, 0x01000000})));
  EXPECT_FALSE(decoder.OnPrivateData(End::kClient, {}));
  const auto reserved = decoder.OnPrivateData(End::kClient, Bytes(1) + Words({0xf6ab0e18, 0x01830003}));
  ASSERT_TRUE(reserved);
  EXPECT_EQ(Remarks(reserved->fields), "Flags: ILLEGAL reserved bits are set (pvtdata 4)\n");
  EXPECT_EQ(MeaningOf(reserved->fields, "Receive Size"), "receives at most 4096 bytes");
  const auto later = decoder.OnPrivateData(End::kClient, Words({0xf6ab0e18, 0x02000000}));
  ASSERT_TRUE(later);
  EXPECT_FALSE(later->well_formed);
  EXPECT_FALSE(later->illegal());
  // Behind what only looks like it, as an end finds it.
  const auto second = decoder.OnPrivateData(End::kClient, Words({0xf6ab0e18, 0x02000000, 0xf6ab0e18, 0x01000303}));
  ASSERT_TRUE(second);
  EXPECT_TRUE(second->well_formed);
  EXPECT_EQ(second->summary, "CM private data: send 4096 receive 4096 no remote invalidation");
  const auto cut = decoder.OnPrivateData(End::kClient, Words({0xf6ab0e18}));
  ASSERT_TRUE(cut);
  EXPECT_TRUE(cut->illegal());
}

// --- Version 2 ---

TEST(MessageDecoder, Version2IsDecodedWhateverTheProfile) {
  const Bytes lists = Read(40, 8, 0x1234) + Words({0}) + Chunk(100) + Words({0, 0});
  for (const rpcrdma::ProtocolProfile& profile : rpcrdma::AllProfiles()) {
    MessageDecoder decoder(profile);
    const DecodedMessage call = decoder.OnMessage(End::kClient, Version2(7, 0, 0, Words({0x1234}) + lists + Call(7)));
    EXPECT_EQ(Remarks(call.fields), "");
    EXPECT_TRUE(call.well_formed);
    EXPECT_EQ(call.summary, "RDMA2_MSG, version 2: call 0x00000007, NFS 3 NULL");
    EXPECT_EQ(ValueOf(call.fields, "rdma_inv_handle"), 0x1234);
    const DecodedMessage reply = decoder.OnMessage(End::kServer, Version2(7, 0, 1, Words({0}) + kNoChunks + Reply(7)));
    EXPECT_EQ(Remarks(reply.fields), "");
    EXPECT_EQ(MeaningOf(reply.fields, "rdma_flags"), "RPCRDMA2_F_RESPONSE");
  }
}

TEST(MessageDecoder, RulesOfVersion2) {
  const auto expect = [](const Bytes& message, const std::string& remarks) {
    EXPECT_EQ(Alone(rpcrdma::kRfc5666bis, message), remarks);
  };
  const Bytes no_lists = Words({0}) + kNoChunks;
  expect(Version2(7, 0, 0x80000000, no_lists + Call(7)), "rdma_flags: ILLEGAL reserved flags are set (v2 3.2)\n");
  expect(Version2(7, 0, 1, no_lists + Call(7)),
         "rdma_flags: ILLEGAL RPCRDMA2_F_RESPONSE is set with a call (v2 3.2)\n");
  expect(Version2(7, 0, 0, no_lists + Reply(7)),
         "rdma_flags: ILLEGAL RPCRDMA2_F_RESPONSE is clear with a reply (v2 3.2)\n");
  expect(Version2(7, 4, 0, Words({2})), "rdma_flags: ILLEGAL an error is a response: the flag is to be set (v2 3.2)\n");
  expect(Version2(7, 0, 0, Words({9}) + kNoChunks + Call(7)),
         "rdma_inv_handle: ILLEGAL none of the handles in this header (v2 3.3)\n");
  expect(Version2(7, 3, 0, {}),
         "rdma_htype: ILLEGAL no header type of this document; an extension may have it (v2 5.2)\n");
  expect(Version2(7, 1, 0, no_lists),
         "rdma_htype: ILLEGAL a long call is in a Position-Zero Read chunk, and there is none (v2 5.3.2)\n");
  expect(Version2(7, 1, 1, no_lists),
         "rdma_htype: ILLEGAL a long reply is in the Reply chunk, and there is none (v2 3.3)\n");
  expect(Version2(7, 0, 0, no_lists + Call(8)),
         "xid: ILLEGAL the transport header has another XID, 0x00000007 (v2 10.1)\n");
  expect(Version2(7, 0, 1, Words({0}) + Read(24, 4) + Words({0, 0, 0}) + Reply(7)),
         "rdma_reads: ILLEGAL nothing is read from a responder (v2 3.3)\n");
  expect(Version2(7, 4, 1, Words({99})), "rdma_err: an extension may have it (v2 9.3)\n");
  expect(Version2(7, 4, 1, Words({8, 5000, 0})), "(rest): ILLEGAL nothing is to follow the header (v2 5.3.3)\n");
  expect(Version2(7, 4, 1, Words({1, 2, 1})), "rdma_vers_high: ILLEGAL the range has no version in it (v2 5.3.3)\n");
  expect(Version2(7, 4, 1, Words({1, 2, 2})), "");
  expect(Version2(7, 0, 0, no_lists),
         "rdma_htype: ILLEGAL the RPC message that is to follow is not there (v2 5.3.1)\n");
  expect(Version2(7, 1, 0, Words({0}) + Read(0, 40) + Words({0, 0, 0}) + Call(7)),
         "(rest): ILLEGAL nothing is to follow the header (v2 5.3.2)\n");
}

TEST(MessageDecoder, PropertiesOfVersion2) {
  const auto expect = [](const Bytes& properties, const std::string& remarks) {
    EXPECT_EQ(Alone(rpcrdma::kRfc5666bis, Version2(0, 5, 0, properties)), remarks);
  };
  expect(Words({0}), "");
  expect(Words({2, 1, 4, 8192, 2, 4, 2}), "");
  expect(Words({1, 1, 0}), "");
  expect(Words({1, 77, 3, 0x61626300}), "rdma_which: receivers ignore it (v2 5.3.4)\n");
  expect(Words({1, 1, 8, 1, 2}), "rdma_data: ILLEGAL the property's type has 4 bytes (v2 4.1)\n");
  expect(Words({1, 1, 4, 1024}), "");
  expect(Words({1, 1, 4, 1023}), "rpcrdma2_prop_rbsiz: ILLEGAL less than the 1024 bytes that every end takes (v2 7)\n");
  expect(Words({1, 1, 4, 8192, 0}), "(rest): ILLEGAL nothing is to follow the properties (v2 5.3.4)\n");
  expect(Words({1, 2, 4, 3}), "rpcrdma2_prop_brs: ILLEGAL no level of support (v2 4.2.2)\n");
  expect(Words({2, 1, 0, 1, 0}), "rdma_which: ILLEGAL stands here a second time (v2 4.1)\n");
  const std::string cut = Alone(rpcrdma::kRfc5666bis, Version2(0, 5, 0, Words({1, 77, 100, 0})));
  EXPECT_NE(cut.find("ILLEGAL there are 4 bytes left in the message"), std::string::npos) << cut;
  const std::string many = Alone(rpcrdma::kRfc5666bis, Version2(0, 5, 0, Words({0xffffffff, 1, 0})));
  EXPECT_NE(many.find("ILLEGAL there is room for 1 of them"), std::string::npos) << many;
}

TEST(MessageDecoder, MessagesOfVersion2FitTheReceivesOfTheOtherEnd) {
  const Bytes header = Version2(8, 0, 0, Words({0}) + kNoChunks);
  const auto message = [&](size_t size) { return header + Call(8) + Bytes(size - header.size() - 40); };
  const auto connprop = [](uint32_t size) { return Version2(0, 5, 0, Words({1, 1, 4, size})); };
  const auto remarks = [&](MessageDecoder& decoder, size_t size) {
    return Remarks(decoder.OnMessage(End::kClient, message(size)).fields);
  };
  const std::string too_long =
      "rdma_xid: ILLEGAL the message has 4100 bytes, the inline threshold is 4096 (v2 4.2.1)\n";
  MessageDecoder decoder(rpcrdma::kRfc5666bis);
  EXPECT_EQ(remarks(decoder, 4100), "") << "what was said before is not known";
  decoder.OnBeginning();
  EXPECT_EQ(remarks(decoder, 1024), "");
  EXPECT_EQ(
      remarks(decoder, 1028),
      "rdma_xid: ILLEGAL the message has 1028 bytes, the inline threshold is 1024 until the server has shown that "
      "it speaks version 2 (v2 7)\n");
  decoder.OnMessage(End::kServer, Version2(8, 0, 1, Words({0}) + kNoChunks) + Reply(8));
  EXPECT_EQ(remarks(decoder, 4096), "");
  EXPECT_EQ(remarks(decoder, 4100), too_long);
  // The server's size counts, from the first properties that can be read.
  decoder.OnMessage(End::kClient, connprop(1 << 20));
  decoder.OnMessage(End::kServer, connprop(1));
  EXPECT_EQ(remarks(decoder, 4100), too_long);
  decoder.OnMessage(End::kServer, connprop(4100));
  decoder.OnMessage(End::kServer, connprop(8192));
  EXPECT_EQ(remarks(decoder, 4100), "");
  EXPECT_NE(remarks(decoder, 4104), "");
  decoder.OnGap();
  EXPECT_EQ(remarks(decoder, 4104), "");
}

TEST(MessageDecoder, ErrVersInTheLayoutOfAServerThatEchoesTheVersion) {
  MessageDecoder decoder(rpcrdma::kRfc5666bis);
  const DecodedMessage echoed = decoder.OnMessage(End::kServer, Words({7, 2, 32, 4, 1, 1, 1}));
  EXPECT_FALSE(echoed.illegal()) << Remarks(echoed.fields);
  EXPECT_EQ(ValueOf(echoed.fields, "rdma_vers_high"), 1);
  EXPECT_EQ(ValueOf(echoed.fields, "rdma_flags"), -1);
  // Of as many words in the layout of version 2.
  const DecodedMessage chunks = decoder.OnMessage(End::kServer, Words({7, 2, 32, 4, 1, 4, 6}));
  EXPECT_FALSE(chunks.illegal()) << Remarks(chunks.fields);
  EXPECT_EQ(ValueOf(chunks.fields, "rdma_max_chunks"), 6);
  const DecodedMessage versions = decoder.OnMessage(End::kServer, Words({7, 2, 32, 4, 1, 1, 1, 2}));
  EXPECT_FALSE(versions.illegal()) << Remarks(versions.fields);
  EXPECT_EQ(ValueOf(versions.fields, "rdma_vers_high"), 2);
}

TEST(MessageDecoder, AConnectionKeepsItsVersion) {
  const Bytes call1 = Version1(7, kMsg, kNoChunks + Call(7));
  const Bytes reply1 = Version1(7, kMsg, kNoChunks + Reply(7));
  const Bytes call2 = Version2(8, 0, 0, Words({0}) + kNoChunks + Call(8));
  EXPECT_EQ(AfterOthers(rpcrdma::kRfc5666bis, {call1, reply1, call2}),
            "rdma_vers: ILLEGAL the connection has version 1 (v2 7.3)\n");
  // Version 2 is tried and refused.
  EXPECT_EQ(AfterOthers(rpcrdma::kRfc5666bis, {call2, Words({8, 2, 32, 4, 1, 1, 1}), call1, reply1}), "");
}

TEST(MessageDecoder, WhatIsRememberedIsBounded) {
  MessageDecoder decoder(rpcrdma::kRfc5666bis);
  decoder.OnBeginning();
  for (uint32_t xid = 0; xid <= MessageDecoder::kCallsMax; ++xid) {
    decoder.OnMessage(End::kClient, Version1(xid, kMsg, kNoChunks + Call(xid)));
  }
  EXPECT_EQ(Remarks(decoder.OnMessage(End::kServer, Version1(0, kMsg, kNoChunks + Reply(0))).fields),
            "rdma_xid: no call of this XID is waiting (5666bis 5.1.1)\n")
      << "the oldest one is forgotten";
  EXPECT_EQ(Remarks(decoder.OnMessage(End::kServer, Version1(1, kMsg, kNoChunks + Reply(1))).fields), "");

  Bytes lists = Words({0});
  for (size_t i = 0; i < MessageDecoder::kOfferedMax; ++i) lists = lists + Chunk(10);
  decoder.OnMessage(End::kClient, Version1(9999, kMsg, lists + Words({0, 0}) + Call(9999)));
  EXPECT_EQ(
      Remarks(
          decoder.OnMessage(End::kServer, Version1(9999, kMsg, Words({0}) + Chunk(11) + Words({0, 0}) + Reply(9999)))
              .fields),
      "")
      << "more than is remembered, so nothing is said of it";
}

}  // namespace
}  // namespace stagecoach::decode
