// The Responder in version 2: what it adds to version 1, which responder_test.cc has.

#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "rpcrdma/core/engine_test_support.h"
#include "rpcrdma/core/responder.h"
#include "rpcrdma/wire/header_v2.h"
#include "tests/support/hex.h"

namespace stagecoach::rpcrdma {
namespace {

using namespace testing;  // NOLINT: what tests of the engines are made of

constexpr uint32_t kSlotSize = 16384;

// An extension: a question of one word, which the answer gives back; one that a message follows; an error; a property.
constexpr uint32_t kQuestion = kExperimentalNumbers + 1;
constexpr uint32_t kAnswerType = kExperimentalNumbers + 2;
constexpr uint32_t kCarrier = kExperimentalNumbers + 3;
constexpr uint32_t kRefusal = kExperimentalNumbers + 4;
constexpr uint32_t kMood = kExperimentalNumbers + 5;
std::optional<size_t> OneWord(ConstBytes rest) {
  return rest.size() < 4 ? std::nullopt : std::optional<size_t>(4);
}
std::optional<size_t> All(ConstBytes rest) {
  return rest.size();
}
bool AnyValue(ConstBytes) {
  return true;
}
constexpr HeaderTypeRow kTypes[] = {{.type = kQuestion, .name = "QUESTION", .size = OneWord},
                                    {.type = kAnswerType, .name = "ANSWER", .size = All},
                                    {.type = kCarrier, .name = "CARRIER", .has_message = true, .size = OneWord}};
constexpr PropertyRow kProperties[] = {{.id = kMood, .name = "mood", .valid = AnyValue}};
constexpr ErrorRow kErrors[] = {{.code = kRefusal, .name = "REFUSAL"}};
constexpr Feature kFeature = {.name = "test", .header_types = kTypes, .properties = kProperties, .errors = kErrors};

ChunkLists Reads(std::initializer_list<ReadSegment> reads) {
  ChunkLists lists;
  for (const ReadSegment& read : reads) lists.reads.push_back(read);
  return lists;
}
ChunkLists Writes(std::initializer_list<std::initializer_list<Segment>> chunks) {
  ChunkLists lists;
  for (const auto& chunk : chunks) lists.writes.AppendChunk(std::span<const Segment>(chunk.begin(), chunk.size()));
  return lists;
}
ChunkLists ReplyChunk(std::initializer_list<Segment> segments) {
  ChunkLists lists;
  SegmentArray& reply = lists.reply.emplace();
  for (const Segment& segment : segments) reply.push_back(segment);
  return lists;
}

class ResponderV2 : public ::testing::Test {
 protected:
  static constexpr uint32_t kSlots = 4;

  struct Setup {
    Responder::Config config;
    TransportVersions versions = kVersions1And2;
    ChunkListLimits limits;
    ConnectionTerms::End end = ConnectionTerms::End::kServer;
  };

  ResponderV2() {
    EXPECT_EQ(extensions_->Add(kFeature), std::nullopt);
    Make({});
  }

  void Make(Setup setup) {
    responder_.reset();
    terms_.emplace(ConnectionTerms::Config{.end = setup.end,
                                           .versions = setup.versions,
                                           .list_limits = setup.limits,
                                           .extensions = extensions_,
                                           .own = {.receive_buffer_size = 8192},
                                           .send_max = kSlotSize});
    setup.config.terms = &*terms_;
    // Of version 1; of none in what follows.
    setup.config.send_inline = 1024;
    responder_.emplace(setup.config, send_.view(), receive_.view(), memory_, &trace_);
    responder_->Start();
    posted_ = TakeAll(*responder_).receives;
    // Those of the reverse direction are posted by the owner.
    owned_ = setup.config.receives > 0;
    if (owned_) posted_ = {0, 1, 2, 3};
  }

  Taken Take() {
    Taken taken = TakeAll(*responder_);
    posted_.insert(posted_.end(), taken.receives.begin(), taken.receives.end());
    return taken;
  }
  uint32_t NextReceive() {
    EXPECT_FALSE(posted_.empty());
    const uint32_t slot = posted_.front();
    posted_.erase(posted_.begin());
    return slot;
  }
  void ReceiveRaw(ConstBytes bytes) {
    const uint32_t slot = NextReceive();
    Deliver(slot, PutRaw(receive_.view(), slot, bytes));
  }
  // As Duplex does where it owns the Receives.
  void Deliver(uint32_t slot, uint32_t length) {
    if (!owned_) return responder_->OnReceive(slot, length, std::nullopt, At(1));
    ByteReader in(ConstBytes(receive_.view().slot(slot)).first(length));
    auto header = terms_->Decode(in);
    if (!header) return responder_->OnMalformed(slot, length, header.error(), At(1));
    responder_->OnMessage(slot, std::move(*header), in.Rest(), At(1));
  }
  void Receive(const Header& header, ConstBytes message = {}) {
    const uint32_t slot = NextReceive();
    ByteWriter out(receive_.view().slot(slot));
    // Flags of nobody as well.
    EncodeHeaderV2(header, out, *extensions_);
    if (header.flags) {
      ByteWriter flags(receive_.view().slot(slot).subspan(16));
      flags.U32(*header.flags);
    }
    out.Bytes(message);
    ASSERT_TRUE(out.ok());
    Deliver(slot, static_cast<uint32_t>(out.position()));
  }
  static Header Make2(uint32_t xid, Header::Body body, uint32_t flags = 0) {
    return {.xid = xid, .version = 2, .credits = 10, .flags = flags, .body = std::move(body)};
  }
  void Call(uint32_t xid, ChunkLists chunks = {}, uint32_t inv_handle = 0) {
    Receive(Make2(xid, RdmaMsg{std::move(chunks), inv_handle}), Message(xid, kCallWord));
  }
  void SayProperties(uint32_t xid, const PropertySet& set, uint32_t flags = 0) {
    Receive(Make2(xid, ConnProp{set}, flags));
  }
  RequestId MustTakeRequest() {
    const auto id = responder_->TakeRequest(At(1));
    EXPECT_TRUE(id.has_value());
    return id.value_or(0);
  }
  // With an item behind `words` words behind XID and direction.
  void Complete(RequestId id, size_t words = 2, std::vector<ConstBytes> items = {}) {
    const auto message = Message(responder_->xid(id), kReplyWord, words);
    std::vector<std::byte>& buffer = responder_->reply_buffer(id);
    if (buffer.size() < message.size()) buffer.resize(message.size());
    CopyBytes(buffer, message);
    Responder::ReplySpec reply{.message_size = message.size()};
    uint64_t position = message.size();
    for (const ConstBytes item : items) {
      reply.items.push_back({position, item});
      position += item.size() + XdrPad(item.size());
    }
    EXPECT_TRUE(responder_->Complete(id, std::move(reply), At(2)).has_value());
  }
  static std::string Hex(const char* words) { return ToHex(FromHex(words)); }
  void DoInvalidates(const Taken& taken) {
    for (const Invalidate& invalidate : taken.invalidates) {
      EXPECT_EQ(memory_.live.erase(invalidate.registration), 1u);
      responder_->OnInvalidated(invalidate.tag, At(2));
    }
  }

  std::string BytesOf(const PostSend& send) const {
    return ToHex(ConstBytes(send_.view().slot(send.slot)).first(send.length));
  }
  Sent DecodeSent(const PostSend& send) const {
    ByteReader in(ConstBytes(send_.view().slot(send.slot)).first(send.length));
    auto header = DecodeHeaderV2(in, {}, *extensions_);
    EXPECT_TRUE(header.has_value()) << BytesOf(send);
    return {header ? *header : Header{}, in.Rest()};
  }
  // The only thing sent: a plain Send, of this XID, RESPONSE and a full grant.
  Header::Body OnlyAnswer(uint32_t xid) {
    const Taken taken = Take();
    EXPECT_EQ(taken.sends.size(), 1u);
    if (taken.sends.size() != 1) return RdmaMsg{};
    EXPECT_TRUE(taken.order.ends_with("RS")) << "its Receive is posted before: " << taken.order;
    EXPECT_EQ(taken.sends[0].invalidate, std::nullopt);
    const Sent sent = DecodeSent(taken.sends[0]);
    EXPECT_EQ(sent.header.xid, xid);
    EXPECT_EQ(sent.header.credits, responder_->credits_granted());
    EXPECT_EQ(sent.header.flags, kFlagResponse);
    EXPECT_TRUE(sent.message.empty());
    responder_->OnSendDone(taken.sends[0].slot, At(2));
    EXPECT_EQ(responder_->unanswered(), 0u);
    return sent.header.body;
  }
  // A call of this XID came through and is answered in version 2.
  void ExpectServes(uint32_t xid) {
    Call(xid);
    Complete(MustTakeRequest());
    const Taken taken = Take();
    ASSERT_EQ(taken.sends.size(), 1u);
    const Sent sent = DecodeSent(taken.sends[0]);
    EXPECT_EQ(sent.header, (Header{.xid = xid,
                                   .version = 2,
                                   .credits = responder_->credits_granted(),
                                   .flags = kFlagResponse,
                                   .body = RdmaMsg{}}));
    EXPECT_EQ(ToHex(sent.message), ToHex(Message(xid, kReplyWord, 2)));
    responder_->OnSendDone(taken.sends[0].slot, At(2));
  }
  void ExpectDropped() {
    const size_t receives = posted_.size();
    const Taken taken = Take();
    EXPECT_EQ(taken.order, "R");
    EXPECT_EQ(posted_.size(), receives + 1);
    EXPECT_FALSE(responder_->has_request());
    EXPECT_EQ(responder_->unanswered(), 0u);
  }

  std::shared_ptr<Extensions> extensions_ = std::make_shared<Extensions>();
  TraceLog trace_;
  FakeMemory memory_{100000};
  Arena send_{6, kSlotSize};
  Arena receive_{kSlots, kSlotSize};
  std::optional<ConnectionTerms> terms_;
  std::optional<Responder> responder_;
  std::vector<uint32_t> posted_;
  bool owned_ = false;
};

// --- The version ---

TEST_F(ResponderV2, TheFirstMessageSettlesTheVersionAndItsReplyHasIt) {
  Call(7);
  EXPECT_TRUE(terms_->settled());
  EXPECT_TRUE(terms_->is_v2());
  Complete(MustTakeRequest());
  const Taken taken = Take();
  EXPECT_EQ(taken.order, "RS");
  EXPECT_EQ(BytesOf(taken.sends[0]),
            Hex("00000007 00000002 00000004 00000000 00000001 00000000 00000000 00000000 00000000 00000007 00000001 "
                "00000000 00000001"));  // the reply
  EXPECT_EQ(responder_->stats().replies, 1u);
}

TEST_F(ResponderV2, OfVersion1ItIsAsEver) {
  const auto call = Message(7, kCallWord);
  const uint32_t slot = NextReceive();
  responder_->OnReceive(slot, Put(receive_.view(), slot, {.xid = 7, .credits = 10, .body = RdmaMsg{}}, call),
                        std::nullopt, At(1));
  EXPECT_TRUE(terms_->settled());
  EXPECT_FALSE(terms_->is_v2());
  Complete(MustTakeRequest());
  const Taken taken = Take();
  ASSERT_EQ(taken.sends.size(), 1u);
  EXPECT_EQ(BytesOf(taken.sends[0]),
            Hex("00000007 00000001 00000004 00000000 00000000 00000000 00000000 00000007 00000001 00000000 00000001"));
  responder_->OnSendDone(taken.sends[0].slot, At(2));
  // As long as private data has it, whatever version 2 begins with; and with its one error.
  const uint32_t next = NextReceive();
  responder_->OnReceive(next, Put(receive_.view(), next, {.xid = 7, .credits = 10, .body = RdmaMsg{}}, call),
                        std::nullopt, At(1));
  Complete(MustTakeRequest(), (1024 - 28 - 8) / 4 + 1);
  EXPECT_EQ(BytesOf(Take().sends.at(0)), Hex("00000007 00000001 00000004 00000004 00000002"));
}

// The layout is that of the version refused; the range is what the port takes, and the word is given back.
TEST_F(ResponderV2, RefusesVersionsThatItDoesNotTake) {
  struct Case {
    TransportVersions versions;
    const char* version;
    const char* answer;
  };
  const Case cases[] = {
      {kVersions1And2, "00000000", "00000007 00000000 00000004 00000004 00000001 00000001 00000002"},
      {kVersions1And2, "00000003", "00000007 00000003 00000004 00000004 00000001 00000001 00000002"},
      {kVersions1And2, "ffffffff", "00000007 ffffffff 00000004 00000004 00000001 00000001 00000002"},
      {kVersion2Alone, "00000000", "00000007 00000000 00000004 00000004 00000001 00000002 00000002"},
      {kVersion2Alone, "00000001", "00000007 00000001 00000004 00000004 00000001 00000002 00000002"},
      {kVersion2Alone, "00000003", "00000007 00000003 00000004 00000004 00000001 00000002 00000002"},
      {kVersion1Alone, "00000000", "00000007 00000001 00000004 00000004 00000001 00000001 00000001"},
      {kVersion1Alone, "00000002", "00000007 00000001 00000004 00000004 00000001 00000001 00000001"},
      {kVersion1Alone, "ffffffff", "00000007 00000001 00000004 00000004 00000001 00000001 00000001"},
  };
  for (const Case& each : cases) {
    Make({.versions = each.versions});
    ReceiveRaw(FromHex(std::string("00000007") + each.version + "0000000a 00000000 00000000 00000000 00000000"));
    const Taken taken = Take();
    ASSERT_EQ(taken.sends.size(), 1u) << each.version;
    EXPECT_EQ(BytesOf(taken.sends[0]), ToHex(FromHex(each.answer))) << each.version;
    EXPECT_EQ(terms_->settled(), each.versions == kVersion1Alone) << "nothing that could be taken has come";
  }
}

TEST_F(ResponderV2, OnceSettledTheVersionStays) {
  const std::string call_v1 = "00000008 00000001 0000000a 00000000 00000000 00000000 00000000 00000008 00000000";
  const std::string call_v2 =
      "00000009 00000002 0000000a 00000000 00000000 00000000 00000000 00000000 00000000 00000009 00000000";
  ExpectServes(7);
  ReceiveRaw(FromHex(call_v1));
  Taken taken = Take();
  ASSERT_EQ(taken.sends.size(), 1u);
  EXPECT_EQ(BytesOf(taken.sends[0]), ToHex(FromHex("00000008 00000001 00000004 00000004 00000001 00000002 00000002")));
  EXPECT_FALSE(responder_->has_request());
  ExpectServes(9);

  Make({});
  ReceiveRaw(FromHex(call_v1));
  Complete(MustTakeRequest());
  Take();
  ReceiveRaw(FromHex(call_v2));
  taken = Take();
  ASSERT_EQ(taken.sends.size(), 1u);
  EXPECT_EQ(BytesOf(taken.sends[0]),
            ToHex(FromHex("00000009 00000002 00000004 00000004 00000001 00000001 00000001 00000001")));
  EXPECT_FALSE(responder_->has_request());
  EXPECT_FALSE(terms_->is_v2());
  // Marked as an answer, it is not answered.
  ReceiveRaw(
      FromHex("00000009 00000002 0000000a 00000000 00000001 00000000 00000000 00000000 00000000 00000009 00000001"));
  ExpectDropped();
}

TEST_F(ResponderV2, ErrorsAndAnswersSettleNothingAndAreNotAnswered) {
  for (const uint32_t flags : {0u, kFlagResponse}) {
    Make({});
    Receive(Make2(7, ErrSystem{}, flags));
    ExpectDropped();
    EXPECT_FALSE(terms_->settled());
  }
  Receive(Make2(7, RdmaMsg{}, kFlagResponse), Message(7, kReplyWord));
  ExpectDropped();
  EXPECT_FALSE(terms_->settled());
  // Malformed ones neither, whatever they are of, but for properties, which end the connection.
  for (const char* type : {"00000000", "00000001", "00000004", "00000063"}) {
    ReceiveRaw(FromHex(std::string("00000007 00000002 0000000a") + type + "00000001 ffffffff"));
    ExpectDropped();
  }
  ReceiveRaw(FromHex("00000007 00000002 0000000a 00000004 00000000 00000004"));
  ExpectDropped();
  EXPECT_FALSE(terms_->settled());
  EXPECT_EQ(responder_->stats().errors, 0u);
  EXPECT_EQ(responder_->stats().malformed, 4u) << "a code of nobody is well-formed";
}

// --- Properties ---

TEST_F(ResponderV2, PropertiesAreAnsweredByThoseOfThisEnd) {
  SayProperties(7, MakePropertySet({.receive_buffer_size = 6000, .reverse_requests = ReverseSupport::kNone}));
  EXPECT_TRUE(terms_->is_v2() && terms_->settled()) << "it may be the first message";
  EXPECT_TRUE(terms_->peer_has_spoken());
  EXPECT_EQ(terms_->peer(),
            (TransportProperties{.receive_buffer_size = 6000, .reverse_requests = ReverseSupport::kNone}));
  const Taken taken = Take();
  EXPECT_EQ(taken.order, "RS");
  EXPECT_EQ(BytesOf(taken.sends[0]),
            Hex("00000007 00000002 00000004 00000005 00000001 00000002 00000001 00000004 00002000 00000002 00000004 "
                "00000001"));  // 8192, inline
  EXPECT_EQ(responder_->stats().errors, 0u);
  EXPECT_NE(LastTold(trace_, "answer.sent").find("type=RDMA2_CONNPROP"), std::string::npos);
  ExpectServes(8);
}

TEST_F(ResponderV2, TheFirstPropertiesHoldAndLaterOnesAreAnsweredAlike) {
  SayProperties(1, MakePropertySet({.receive_buffer_size = 6000}));
  const std::string first = BytesOf(Take().sends.at(0));
  SayProperties(1, MakePropertySet({.receive_buffer_size = 16384, .reverse_requests = ReverseSupport::kGeneral}));
  EXPECT_EQ(BytesOf(Take().sends.at(0)), first);
  SayProperties(2, MakePropertySet({.receive_buffer_size = 16384}), kFlagResponse);
  ExpectDropped();
  EXPECT_EQ(terms_->peer(), (TransportProperties{.receive_buffer_size = 6000}));
  EXPECT_EQ(responder_->stats().properties_again, 2u);
}

// Nobody asked, and it is true all the same.
TEST_F(ResponderV2, PropertiesThatAreAnAnswerHoldAndAreNotAnswered) {
  SayProperties(1, MakePropertySet({.receive_buffer_size = 1024}), kFlagResponse);
  ExpectDropped();
  EXPECT_EQ(terms_->peer().receive_buffer_size, 1024u);
  Call(7);
  Complete(MustTakeRequest(), 300);
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrReplyResource{8 + 1200}));
}

TEST_F(ResponderV2, MalformedPropertiesAreBadXdrAndSetNothing) {
  const auto good = FromHex(
      "00000001 00000002 0000000a 00000005 00000000"
      "00000002 00000001 00000004 00001800 00000002 00000004 00000000");
  for (size_t size = 20; size < good.size(); ++size) {
    ReceiveRaw(ConstBytes(good).first(size));
    EXPECT_EQ(OnlyAnswer(1), Header::Body(ErrBadXdr{})) << size;
    EXPECT_FALSE(terms_->peer_has_spoken());
    EXPECT_EQ(terms_->peer(), TransportProperties());
  }
  for (size_t size = 0; size < 20; ++size) {
    ReceiveRaw(ConstBytes(good).first(size));
    ExpectDropped();
  }
  EXPECT_FALSE(terms_->settled()) << "nothing of them has been taken";
  // Each word in turn of a value that it cannot have: counts, lengths, sizes, levels.
  for (const size_t word : {5u, 7u, 8u, 10u, 11u}) {
    auto bad = good;
    ByteWriter(MutableBytes(bad).subspan(word * 4)).U32(word == 8 ? 1023 : 77);
    ReceiveRaw(bad);
    EXPECT_EQ(OnlyAnswer(1), Header::Body(ErrBadXdr{})) << word;
    EXPECT_FALSE(terms_->peer_has_spoken());
  }
  // They were not the first.
  ReceiveRaw(good);
  EXPECT_TRUE(std::holds_alternative<ConnProp>(OnlyAnswer(1)));
  EXPECT_EQ(terms_->peer().receive_buffer_size, 6144u);
  EXPECT_EQ(responder_->stats().properties_again, 0u);
}

// A server that is told them as an answer may not answer, and does not know what its client takes.
// [v2:4.1#1] [v2:5.3.3#1] [v2:5.3.3+1]
TEST_F(ResponderV2, MalformedPropertiesThatAreAnAnswerEndTheConnection) {
  for (const bool settled : {false, true}) {
    Make({});
    if (settled) ExpectServes(6);
    ReceiveRaw(FromHex("00000001 00000002 0000000a 00000005 00000001 00000002 00000001 00000004"));
    const Taken taken = Take();
    EXPECT_TRUE(taken.sends.empty());
    ASSERT_EQ(taken.disconnects.size(), 1u);
    EXPECT_EQ(taken.disconnects[0].why, Disconnect::Why::kBadProperties);
    EXPECT_FALSE(terms_->peer_has_spoken());
  }
}

// One that answers each answer by properties that ask again would be answered without end.
TEST_F(ResponderV2, PropertiesAreAnsweredEightTimes) {
  for (uint32_t xid = 1; xid <= 8; ++xid) {
    SayProperties(xid, {});
    EXPECT_TRUE(std::holds_alternative<ConnProp>(OnlyAnswer(xid))) << xid;
  }
  for (uint32_t xid = 9; xid <= 20; ++xid) {
    SayProperties(xid, {});
    ExpectDropped();
  }
  EXPECT_EQ(LastTold(trace_, "call.dropped"), "call.dropped xid=20 why=properties that were answered before");
  EXPECT_EQ(responder_->stats().properties_again, 19u);
  EXPECT_EQ(responder_->stats().ignored, 12u);
  ExpectServes(21);
  // What is malformed is an error each time.
  ReceiveRaw(FromHex("00000016 00000002 0000000a 00000005 00000000 00000002"));
  EXPECT_EQ(OnlyAnswer(22), Header::Body(ErrBadXdr{}));
}

// Each keeps its Receive until its answer can be sent.
TEST_F(ResponderV2, AFloodOfWhatIsRefusedIsBoundedByTheReceives) {
  std::vector<uint32_t> slots;
  size_t said = 0;
  for (; !posted_.empty(); ++said) {
    ASSERT_LT(said, 100u);
    ReceiveRaw(FromHex("00000007 00000002 0000000a 00000063 00000000"));  // of no known type
    for (const PostSend& send : Take().sends) slots.push_back(send.slot);
  }
  EXPECT_EQ(said, send_.view().slots + kSlots);
  EXPECT_EQ(responder_->unanswered(), kSlots);
  for (size_t i = 0; i < slots.size(); ++i) {
    responder_->OnSendDone(slots[i], At(2));
    for (const PostSend& send : Take().sends) slots.push_back(send.slot);
  }
  EXPECT_EQ(slots.size(), said);
  EXPECT_EQ(posted_.size(), kSlots);
}

// --- What the flag says ---

// The flag against the direction of the message, inline and by Read chunk.
TEST_F(ResponderV2, WhatDisagreesWithItsFlagIsNeitherExecutedNorAnswered) {
  for (const bool flag : {false, true}) {
    for (const uint32_t word : {kCallWord, kReplyWord, 2u}) {
      const std::string what = std::to_string(word) + (flag ? " marked" : "");
      Make({});
      Receive(Make2(7, RdmaMsg{}, flag ? kFlagResponse : 0), Message(7, word));
      if (flag || word == kReplyWord) {
        ExpectDropped();
        EXPECT_EQ(responder_->stats().ignored, 1u) << what;
      } else if (word == kCallWord) {
        EXPECT_TRUE(responder_->has_request());
      } else {
        EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrBadXdr{})) << what;
      }

      Make({});
      const auto message = Message(7, word);
      const auto size = static_cast<uint32_t>(message.size());
      Receive(Make2(7, RdmaNomsg{Reads({{0, {5, size, 0}}})}, flag ? kFlagResponse : 0));
      const Taken reads = Take();
      EXPECT_EQ(reads.reads.size(), flag ? 0u : 1u) << what;
      if (flag) continue;
      CopyBytes(reads.reads[0].sink, message);
      responder_->OnReadDone(reads.reads[0].tag, At(2));
      DoInvalidates(Take());
      if (word == kCallWord) {
        EXPECT_TRUE(responder_->has_request());
        responder_->Drop(MustTakeRequest(), "enough", At(2));
      } else if (word == kReplyWord) {
        ExpectDropped();
      } else {
        EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrBadXdr{})) << what;
      }
    }
  }
}

TEST_F(ResponderV2, ReservedFlagsArePassedOverAndCounted) {
  for (uint32_t bit = 1; bit < 32; ++bit) {
    Receive(Make2(bit, RdmaMsg{}, 1u << bit), Message(bit, kCallWord));
    Complete(MustTakeRequest());
    const Taken taken = Take();
    ASSERT_EQ(taken.sends.size(), 1u);
    EXPECT_EQ(DecodeSent(taken.sends[0]).header.flags, kFlagResponse) << "none is sent";
    responder_->OnSendDone(taken.sends[0].slot, At(2));
  }
  EXPECT_EQ(responder_->stats().unknown_flags, 31u);
}

TEST_F(ResponderV2, UnknownTypesAreAnsweredAndThoseOfVersion1AreUnknown) {
  for (const char* type : {"00000002", "00000003", "00000006", "00000063", "ffffffff"}) {
    ReceiveRaw(FromHex(std::string("00000007 00000002 0000000a") + type + "00000000 00000000"));
    EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrInvalHtype{})) << type;
  }
  EXPECT_EQ(responder_->stats().errors, 5u);
  ReceiveRaw(FromHex("00000007 00000002 0000000a 00000063 00000001 00000000"));
  ExpectDropped();
}

// --- What cannot be read ---

TEST_F(ResponderV2, WhatContradictsItselfIsBadXdrAndNothingIsDoneOfIt) {
  const auto call = Message(7, kCallWord);
  const ChunkLists zero = Reads({{0, {5, 100, 0}}});
  const std::tuple<const char*, Header::Body, ConstBytes> cases[] = {
      {"a Position-Zero Read chunk beside a message", RdmaMsg{zero}, call},
      {"none", RdmaNomsg{Reads({{4, {5, 100, 0}}})}, {}},
      {"a message behind NOMSG", RdmaNomsg{zero}, call},
      {"an unaligned position", RdmaMsg{Reads({{9, {5, 100, 0}}})}, call},
      {"one behind the end", RdmaMsg{Reads({{4000, {5, 100, 0}}})}, call},
      {"overlapping chunks", RdmaMsg{Reads({{8, {5, 100, 0}}, {12, {5, 100, 0}}})}, call},
      {"an address that wraps", RdmaMsg{Reads({{8, {5, 100, UINT64_MAX - 9}}})}, call},
      {"no message", RdmaMsg{}, {}},
      {"a handle of nobody's", RdmaMsg{Reads({{8, {5, 100, 0}}}), 6}, call},
  };
  for (const auto& [what, body, message] : cases) {
    Receive(Make2(7, body), message);
    EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrBadXdr{})) << what;
  }
  Receive(Make2(7, RdmaMsg{}), Message(8, kCallWord));
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrBadXdr{})) << "two XIDs";
  EXPECT_EQ(responder_->stats().calls, 0u);
  EXPECT_TRUE(memory_.live.empty());

  // A whole header, cut anywhere.
  std::vector<std::byte> bytes(200);
  ByteWriter out(bytes);
  EncodeHeaderV2(Make2(7, RdmaMsg{Writes({{{5, 100, 0}}})}), out);
  for (size_t size = 20; size < out.position(); ++size) {
    ReceiveRaw(ConstBytes(bytes).first(size));
    EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrBadXdr{})) << size;
  }
}

// --- More than is taken ---

TEST_F(ResponderV2, WithoutReadsNoReadListIsTaken) {
  Make({.config = {.reads_max = 0}});
  Call(7, Reads({{8, {5, 100, 0}}}));
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrReadChunks{0}));
  Receive(Make2(7, RdmaNomsg{Reads({{0, {5, 100, 0}}})}));
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrReadChunks{0})) << "not that of position zero either";
  ExpectServes(8);
}

TEST_F(ResponderV2, SaysHowMuchOfEachListItTakes) {
  Make({.limits = {
            .read_segments_max = 4, .write_chunks_max = 3, .segments_per_chunk_max = 2, .write_segments_max = 4}});
  const Segment any{5, 4, 0};
  const ReadSegment entries[] = {{8, any}, {12, any}, {16, any}, {20, any}, {24, any}};
  ChunkLists lists;
  for (const ReadSegment& entry : entries) lists.reads.push_back(entry);
  Call(7, lists);
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrReadChunks{4}));
  // That of position zero needs an entry, too.
  lists.reads[0].position = 0;
  Receive(Make2(7, RdmaNomsg{lists}));
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrReadChunks{3}));
  // Two chunks of five entries: the number that would do.
  for (ReadSegment& entry : lists.reads) entry.position = entry.position > 12 ? 16 : 8;
  Call(7, lists);
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrSegments{2}));
  for (ReadSegment& entry : lists.reads) entry.position = 0;
  Receive(Make2(7, RdmaNomsg{lists}));
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrSegments{4}));

  Call(7, Writes({{any}, {any}, {any}, {any}}));
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrWriteChunks{3}));
  Call(7, Writes({{any}, {any, any, any}}));
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrSegments{2}));
  Call(7, ReplyChunk({any, any, any}));
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrSegments{2}));
  Call(7, Writes({{any, any}, {any, any}, {any}}));
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrSegments{1})) << "of all together";

  // Too many, and cut off behind that: what cannot be read to its end is malformed.
  std::vector<std::byte> bytes(400);
  ByteWriter out(bytes);
  EncodeHeaderV2(Make2(7, RdmaMsg{Writes({{any}, {any}, {any}, {any}})}), out);
  ReceiveRaw(ConstBytes(bytes).first(out.position() - 5));
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrBadXdr{}));
  EXPECT_EQ(responder_->stats().calls, 0u);

  Make({.limits = {.write_chunks_max = 0}});
  Call(7, Writes({{any}}));
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrReplyResource{0})) << "none is taken at all";
  ExpectServes(8);
}

TEST_F(ResponderV2, BoundsOnBytesAreTheSystems) {
  Make({.config = {.data_limits = {.read_bytes_max = 1000, .write_bytes_max = 2000}}});
  Call(7, Reads({{8, {5, 1001, 0}}}));
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrSystem{}));
  Call(7, Writes({{{5, 2001, 0}}}));
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrSystem{}));
  ExpectServes(8);
}

// --- Replies that do not fit ---

TEST_F(ResponderV2, SaysWhichWriteChunkIsTooShortAndHowLongTheResultIs) {
  const auto small = Pattern(10);
  const auto large = Pattern(1001);
  Call(7, Writes({{{5, 100, 0}}, {{6, 500, 0}, {7, 500, 0}}, {{8, 1, 0}}}));
  Complete(MustTakeRequest(), 2, {small, large, large});
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrWriteResource{.chunk_index = 2, .length_needed = 1001}))
      << "the first of two, without round-up";
  // A Reply chunk however large is no help.
  ChunkLists lists = Writes({{{5, 9, 0}}});
  lists.reply = ReplyChunk({{9, 100000, 0}}).reply;
  Call(7, lists);
  Complete(MustTakeRequest(), 2, {small});
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrWriteResource{.chunk_index = 1, .length_needed = 10}));
  EXPECT_NE(LastTold(trace_, "error.sent").find("error=ERR_WRITE_RESOURCE "), std::string::npos);
}

// Version 2 has no RDMA_DONE, so nothing would end it.
TEST_F(ResponderV2, LeavesNothingInItsMemoryToBeRead) {
  Make({.config = {.exposed_max = 2}});
  const auto item = Pattern(5000);
  Call(7);
  Complete(MustTakeRequest(), 2, {item});
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrReplyResource{16 + 5000}));
  Call(7, Writes({{{5, 4999, 0}}}));
  Complete(MustTakeRequest(), 2, {item});
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrWriteResource{.chunk_index = 1, .length_needed = 5000}));
  EXPECT_TRUE(memory_.live.empty());
}

TEST_F(ResponderV2, SaysHowLongAReplyChunkWouldHaveToBe) {
  const auto item = Pattern(500);
  // 36 bytes of header, 8 + 4052: one byte fewer would be no message.
  Call(7);
  Complete(MustTakeRequest(), (4096 - 36 - 8) / 4);
  const Taken taken = Take();
  ASSERT_EQ(taken.sends.size(), 1u);
  EXPECT_EQ(taken.sends[0].length, 4096u) << "the default, not version 1's";
  responder_->OnSendDone(taken.sends[0].slot, At(2));
  Call(7);
  Complete(MustTakeRequest(), (4096 - 36 - 8) / 4 + 1);
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrReplyResource{4064})) << "no Reply chunk at all";
  Call(7, ReplyChunk({{5, 4000, 0}, {6, 63, 0}}));
  Complete(MustTakeRequest(), (4096 - 36 - 8) / 4 + 1);
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrReplyResource{4064})) << "a byte too short";
  // What goes by Write chunk is not counted, and the rest is, with its round-up.
  ChunkLists lists = Writes({{{5, 500, 0}}});
  lists.reply = ReplyChunk({{6, 100, 0}}).reply;
  Call(7, lists);
  Complete(MustTakeRequest(), 1020, {item, ConstBytes(item).first(401)});
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrReplyResource{8 + 4080 + 404}));
  EXPECT_TRUE(memory_.live.empty());
}

TEST_F(ResponderV2, AReplyIsAsLongAsTheRequestersReceives) {
  SayProperties(0, MakePropertySet({.receive_buffer_size = 6000}));
  OnlyAnswer(0);
  Call(7);
  Complete(MustTakeRequest(), (6000 - 36 - 8) / 4);
  const Taken taken = Take();
  ASSERT_EQ(taken.sends.size(), 1u);
  EXPECT_EQ(taken.sends[0].length, 6000u);
  Call(7);
  Complete(MustTakeRequest(), (6000 - 36 - 8) / 4 + 1);
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrReplyResource{5968}));
}

// What was planned stays as it was planned.
TEST_F(ResponderV2, AReplyThatWaitsForABufferIsNotMeasuredAgain) {
  ExpectServes(1);
  std::vector<uint32_t> slots;
  for (uint32_t i = 0; i < send_.view().slots; ++i) {
    Call(2 + i);
    Complete(MustTakeRequest());
    slots.push_back(Take().sends.at(0).slot);
  }
  Call(10);
  Complete(MustTakeRequest(), (4096 - 36 - 8) / 4);
  SayProperties(11, MakePropertySet({.receive_buffer_size = 1024}));
  EXPECT_TRUE(Take().sends.empty());
  responder_->OnSendDone(slots[0], At(2));
  EXPECT_EQ(Take().sends.at(0).length, 4096u);
}

TEST_F(ResponderV2, WhatNoCodeSaysIsTheSystems) {
  // The header that gives the lists back is too long for the Send.
  SayProperties(0, MakePropertySet({.receive_buffer_size = 1024}));
  OnlyAnswer(0);
  ChunkLists lists;
  SegmentArray& reply = lists.reply.emplace();
  for (uint32_t i = 0; i < 64; ++i) reply.push_back({5, 100, 0});
  Call(7, lists);
  Complete(MustTakeRequest());
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrSystem{}));
  // The service has no reply.
  Call(7);
  responder_->Refuse(MustTakeRequest(), At(2));
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrSystem{}));
  // The device cannot write from the memory.
  const auto item = Pattern(100);
  Call(7, Writes({{{5, 100, 0}}}));
  memory_.refuse_after = 0;
  Complete(MustTakeRequest(), 2, {item});
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrSystem{}));
  ExpectServes(8);
}

// --- Remote invalidation ---

TEST_F(ResponderV2, InvalidatesWhatTheCallNamesAndNothingElse) {
  const auto lists = [] {
    ChunkLists both = Writes({{{5, 100, 0}}, {{6, 100, 0}}});
    both.reply = ReplyChunk({{7, 4000, 0}}).reply;
    return both;
  };
  const auto invalidated = [&](bool able, uint32_t inv_handle) {
    // What private data says has no part in it.
    Make({.config = {.may_invalidate = !able, .can_invalidate = able}});
    Call(7, lists(), inv_handle);
    Complete(MustTakeRequest());
    const Taken taken = Take();
    EXPECT_EQ(taken.sends.size(), 1u);
    EXPECT_EQ(DecodeSent(taken.sends[0]).header.inv_handle(), 0u) << "of no meaning in a reply";
    EXPECT_EQ(responder_->stats().invalidations_remote, taken.sends[0].invalidate ? 1u : 0u);
    responder_->OnSendDone(taken.sends[0].slot, At(2));
    DoInvalidates(TakeAll(*responder_));
    return taken.sends[0].invalidate;
  };
  EXPECT_EQ(invalidated(true, 0), std::nullopt);
  for (const uint32_t handle : {5u, 6u, 7u}) {
    EXPECT_EQ(invalidated(true, handle), handle);
    EXPECT_EQ(invalidated(false, handle), std::nullopt) << "the device cannot";
  }
}

TEST_F(ResponderV2, AnErrorInvalidatesNothing) {
  Make({.config = {.can_invalidate = true}});
  const auto item = Pattern(101);
  Call(7, Writes({{{5, 100, 0}}}), 5);
  Complete(MustTakeRequest(), 2, {item});
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrWriteResource{1, 101}));  // sees to it
}

// --- Extensions ---

TEST_F(ResponderV2, AnExtensionIsAnsweredByWhoeverKnowsIt) {
  const auto word = Pattern(4);
  Header::Body answer;
  Make({.config = {.answer_extension = [&](const Extension& question) {
          EXPECT_EQ(question, (Extension{.type = kQuestion, .body = word}));
          return answer;
        }}});
  const auto ask = [&] {
    Receive(Make2(7, Extension{.type = kQuestion, .body = word}));
    return OnlyAnswer(7);
  };
  const Header::Body fine[] = {Extension{.type = kAnswerType, .body = Pattern(40)}, ErrOther{kRefusal}, ErrSystem{},
                               ErrInvalHtype{}};
  for (const Header::Body& body : fine) {
    answer = body;
    EXPECT_EQ(ask(), body);
  }
  // What it cannot have meant.
  const Header::Body wrong[] = {RdmaMsg{},
                                ConnProp{},
                                ErrChunk{},
                                Extension{.type = 99},
                                Extension{.type = kCarrier, .body = word, .has_message = true},
                                Extension{.type = kAnswerType, .body = Pattern(4096 - 19)}};
  for (const Header::Body& body : wrong) {
    answer = body;
    EXPECT_EQ(ask(), Header::Body(ErrSystem{}));
  }
  answer = Extension{.type = kAnswerType, .body = Pattern(4096 - 20)};
  EXPECT_EQ(ask(), answer) << "as long as the peer takes";
}

// As a requester takes it (Requester::GrantOf): with what is shared, the answer to what comes first has the first
// grant.
TEST_F(ResponderV2, AllAnswersGrantButErrors) {
  const auto budget = std::make_shared<CreditBudget>(kSlots, 0);
  const Extension question{.type = kQuestion, .body = Pattern(4)};
  struct Row {
    Header::Body sent;
    uint32_t grant;
  };
  for (const Row& row : {Row{question, kSlots}, Row{ConnProp{}, kSlots}, Row{RdmaNomsg{}, 1}}) {
    Make({.config = {
              .answer_extension = [](const Extension&) { return Extension{.type = kAnswerType, .body = Pattern(4)}; },
              .budgets = {budget}}});
    Receive(Make2(7, row.sent));
    const Taken taken = Take();
    ASSERT_EQ(taken.sends.size(), 1u);
    EXPECT_EQ(ByteReader(ConstBytes(send_.view().slot(taken.sends[0].slot)).subspan(8)).U32(), row.grant);
    responder_->OnDisconnected(At(2));
  }
}

TEST_F(ResponderV2, AnExtensionThatNobodyAnswersIsAnUnknownType) {
  Receive(Make2(7, Extension{.type = kQuestion, .body = Pattern(4)}));
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrInvalHtype{}));
  Make({.config = {.answer_extension = [](const Extension&) { return ErrSystem{}; }}});
  Receive(Make2(7, Extension{.type = kCarrier, .body = Pattern(4), .has_message = true}), Message(7, kCallWord));
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrInvalHtype{})) << "its message would be lost";
  Receive(Make2(7, Extension{.type = kQuestion, .body = Pattern(4)}, kFlagResponse));
  ExpectDropped();
  ReceiveRaw(FromHex("00000007 00000002 0000000a 80000001 00000000"));
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrBadXdr{}));
}

// --- The reverse direction ---

class ReverseV2 : public ResponderV2 {
 protected:
  void MakeReverse(ReverseSupport level, uint32_t receives = kSlots, bool can_invalidate = false) {
    Make({.config = {.receives = receives, .inline_only = true, .reverse = level, .can_invalidate = can_invalidate},
          .versions = kVersion2Alone,
          .end = ConnectionTerms::End::kClient});
    terms_->SetVersion(kRpcRdmaVersion2);
  }
};

TEST_F(ReverseV2, AtLevelNoneCallsAreRefusedAndAllElseIsAnswered) {
  MakeReverse(ReverseSupport::kNone);
  Call(7);
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrSystem{}));
  Receive(Make2(7, RdmaNomsg{Reads({{0, {5, 100, 0}}})}));
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrSystem{}));
  Receive(Make2(7, RdmaMsg{}), Message(7, kReplyWord));
  ExpectDropped();
  SayProperties(7, {});
  EXPECT_TRUE(std::holds_alternative<ConnProp>(OnlyAnswer(7)));
  ReceiveRaw(FromHex("00000007 00000002 0000000a 00000063 00000000 00000000"));
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrInvalHtype{}));
}

TEST_F(ReverseV2, AtLevelInlineChunksAreRefusedButAReplyChunkIsLeftAlone) {
  MakeReverse(ReverseSupport::kInline);
  ExpectServes(6);
  Call(7, Reads({{8, {5, 100, 0}}}));
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrReadChunks{0}));
  Receive(Make2(7, RdmaNomsg{Reads({{0, {5, 100, 0}}})}));
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrReadChunks{0}));
  Call(7, Writes({{{5, 100, 0}}}));
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrReplyResource{0}));
  // Nothing goes there, and it comes back.
  Call(7, ReplyChunk({{5, 100000, 64}}));
  Complete(MustTakeRequest());
  const Taken taken = Take();
  EXPECT_EQ(taken.order, "RS");
  EXPECT_EQ(DecodeSent(taken.sends[0]).header.body, Header::Body(RdmaMsg{ReplyChunk({{5, 0, 64}})}));
  responder_->OnSendDone(taken.sends[0].slot, At(2));
  Call(7, ReplyChunk({{5, 100000, 64}}));
  Complete(MustTakeRequest(), 1200);
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrReplyResource{0})) << "no length would help";
  Call(7);
  Complete(MustTakeRequest(), 1200);
  EXPECT_EQ(OnlyAnswer(7), Header::Body(ErrReplyResource{0}));
}

TEST_F(ReverseV2, AtLevelGeneralChunksAreUsedAsEver) {
  MakeReverse(ReverseSupport::kGeneral, kSlots, true);
  const auto message = Message(7, kCallWord, 100);
  ChunkLists lists = Reads({{0, {5, static_cast<uint32_t>(message.size()), 0}}});
  lists.reply = ReplyChunk({{6, 8000, 0}}).reply;
  Receive(Make2(7, RdmaNomsg{lists, 6}));
  const Taken reads = Take();
  ASSERT_EQ(reads.reads.size(), 1u);
  CopyBytes(reads.reads[0].sink, message);
  responder_->OnReadDone(reads.reads[0].tag, At(2));
  DoInvalidates(Take());
  Complete(MustTakeRequest(), 1200);
  const Taken taken = Take();
  ASSERT_EQ(taken.sends.size(), 1u);
  EXPECT_EQ(taken.order, "wRS");
  const Sent sent = DecodeSent(taken.sends[0]);
  EXPECT_EQ(sent.header.body, Header::Body(RdmaNomsg{ReplyChunk({{6, 4808, 0}})}));
  EXPECT_TRUE(sent.message.empty());
  EXPECT_EQ(taken.sends[0].invalidate, 6u);
  responder_->OnSendDone(taken.sends[0].slot, At(2));
  DoInvalidates(Take());
  EXPECT_TRUE(memory_.live.empty());
}

// They would take the Receives of the other direction.
TEST_F(ReverseV2, WhatIsBeyondTheCreditsGrantedIsDropped) {
  MakeReverse(ReverseSupport::kInline, 1);
  Call(7);
  const RequestId id = MustTakeRequest();
  Call(8);
  EXPECT_EQ(Take().order, "R");
  // Without an answer properties are true as well.
  SayProperties(9, MakePropertySet({.receive_buffer_size = 1024}));
  EXPECT_EQ(Take().order, "R");
  EXPECT_EQ(terms_->peer().receive_buffer_size, 1024u);
  ReceiveRaw(FromHex("00000007 00000002 0000000a 00000063 00000000 00000000"));
  EXPECT_EQ(Take().order, "R");
  Complete(id);
  EXPECT_EQ(Take().order, "RS");
  EXPECT_EQ(responder_->unanswered(), 0u);
}

TEST_F(ReverseV2, BeforeTheProbeIsAnsweredOnlyVersion2IsTaken) {
  Make({.config = {.receives = kSlots, .inline_only = true, .reverse = ReverseSupport::kInline},
        .end = ConnectionTerms::End::kClient});
  responder_->OnMessage(NextReceive(), {.xid = 7, .body = RdmaMsg{}}, Message(7, kCallWord), At(1));
  ExpectDropped();
  SayProperties(8, {});
  EXPECT_TRUE(terms_->probing()) << "the probe decides";
  terms_->SetVersion(kRpcRdmaVersion2);
  responder_->OnVersionSettled(At(2));
  EXPECT_TRUE(std::holds_alternative<ConnProp>(OnlyAnswer(8)));
}

// A client sends no error for them, whatever they are marked as: it is the requester of its connection. Before the
// probe is answered and later; with credits of the reverse direction and without. [v2:4.1#1] [v2:5.3.3#1]
TEST_F(ReverseV2, MalformedPropertiesEndAClientsConnection) {
  for (const bool settled : {false, true}) {
    for (const bool has_credits : {false, true}) {
      Make({.config = {.receives = 1, .inline_only = true, .reverse = ReverseSupport::kInline},
            .end = ConnectionTerms::End::kClient});
      if (settled) {
        terms_->SetVersion(kRpcRdmaVersion2);
        responder_->OnVersionSettled(At(1));
      }
      if (!has_credits) Call(7);
      ReceiveRaw(FromHex("00000001 00000002 0000000a 00000005 00000000 00000002"));
      const Taken taken = Take();
      EXPECT_TRUE(taken.sends.empty());
      ASSERT_EQ(taken.disconnects.size(), 1u);
      EXPECT_EQ(taken.disconnects[0].why, Disconnect::Why::kBadProperties);
    }
  }
}

// [v2:7#1] Whatever the server asks meanwhile.
TEST_F(ReverseV2, NothingIsSentBeforeTheProbeIsAnswered) {
  for (const uint32_t version : {kRpcRdmaVersion1, kRpcRdmaVersion2}) {
    Make({.config = {.receives = kSlots, .inline_only = true, .reverse = ReverseSupport::kNone},
          .end = ConnectionTerms::End::kClient});
    SayProperties(7, {});
    Call(8);
    EXPECT_EQ(Take().order, "");
    terms_->SetVersion(version);
    responder_->OnVersionSettled(At(2));
    // In the order in which they came; or not at all, in a version that has no such answers.
    EXPECT_EQ(Take().order, version == kRpcRdmaVersion2 ? "RSRS" : "RR");
    EXPECT_EQ(responder_->unanswered(), 0u);
  }
}

TEST_F(ReverseV2, AtLevelNoneCallsOfVersion1AreDropped) {
  Make({.config = {.receives = kSlots, .inline_only = true, .reverse = ReverseSupport::kNone},
        .end = ConnectionTerms::End::kClient});
  terms_->SetVersion(kRpcRdmaVersion1);
  responder_->OnMessage(NextReceive(), {.xid = 7, .body = RdmaMsg{}}, Message(7, kCallWord), At(1));
  ExpectDropped();
}

}  // namespace
}  // namespace stagecoach::rpcrdma
