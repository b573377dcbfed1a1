#include "rpcrdma/core/requester.h"

#include <gtest/gtest.h>

#include "base/prng.h"
#include "rpcrdma/core/engine_test_support.h"

namespace stagecoach::rpcrdma {
namespace {

using namespace testing;  // NOLINT: what tests of the engines are made of

constexpr uint32_t kFirstXid = 100;

struct Shape {
  size_t words = 4;
  ConstBytes item;
  std::vector<MutableBytes> results;
  uint64_t reply_base_max = 100;
  bool direct_placement = true;
  std::optional<Instant> deadline;
  uint64_t cookie = 0;
  std::optional<uint32_t> xid;
  std::shared_ptr<LastingMemory> lasting;
};

// Engines only pass it on: any object will do.
std::shared_ptr<LastingMemory> SomeLastingMemory() {
  const auto object = std::make_shared<int>();
  return {object, reinterpret_cast<LastingMemory*>(object.get())};
}

class RequesterTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kSlots = 4;
  static constexpr uint32_t kInline = 1024;

  RequesterTest() { Make({}); }

  void Make(Requester::Config config) {
    config.credits = config.credits == 64 ? kSlots : config.credits;
    requester_.emplace(config, send_.view(), receive_.view(), memory_, xids_, &trace_);
    requester_->Start();
    const Taken taken = TakeAll(*requester_);
    EXPECT_EQ(taken.receives.size(), kSlots);
    posted_ = taken.receives;
  }

  Result<CallId, SubmitRefusal> Submit(const Shape& shape, Instant now = At(0)) {
    Requester::CallSpec spec;
    spec.buffer = requester_->TakeBuffer();
    const auto message = Message(0, kCallWord, shape.words);
    spec.buffer.assign(message.begin(), message.end());
    spec.message_size = message.size();
    if (!shape.item.empty()) spec.items.push_back({message.size(), shape.item});
    for (const MutableBytes result : shape.results) spec.results.push_back(result);
    spec.reply_base_max = shape.reply_base_max;
    spec.direct_placement = shape.direct_placement;
    spec.deadline = shape.deadline;
    spec.cookie = shape.cookie;
    spec.xid = shape.xid;
    spec.lasting = shape.lasting;
    return requester_->Submit(std::move(spec), now);
  }
  CallId MustSubmit(const Shape& shape = {}) {
    auto id = Submit(shape);
    EXPECT_TRUE(id.has_value());
    return id.value_or(0);
  }

  // Takes commands, remembering posted Receives and the latest Send.
  Taken Take() {
    Taken taken = TakeAll(*requester_);
    posted_.insert(posted_.end(), taken.receives.begin(), taken.receives.end());
    return taken;
  }

  uint32_t NextReceive() {
    EXPECT_FALSE(posted_.empty());
    const uint32_t slot = posted_.front();
    posted_.erase(posted_.begin());
    return slot;
  }
  void Receive(const Header& header, ConstBytes message, std::optional<uint32_t> invalidated = std::nullopt) {
    const uint32_t slot = NextReceive();
    requester_->OnReceive(slot, Put(receive_.view(), slot, header, message), invalidated, At(1));
  }
  void ReceiveRaw(ConstBytes bytes) {
    const uint32_t slot = NextReceive();
    requester_->OnReceive(slot, PutRaw(receive_.view(), slot, bytes), std::nullopt, At(1));
  }
  void Reply(uint32_t xid, uint32_t credits = kSlots, ChunkLists chunks = {}) {
    Receive({.xid = xid, .credits = credits, .body = RdmaMsg{std::move(chunks)}}, Message(xid, kReplyWord));
  }

  // Answers Invalidate commands as the driver does.
  void Invalidated(const Taken& taken) {
    for (const Invalidate& invalidate : taken.invalidates) {
      EXPECT_EQ(memory_.live.erase(invalidate.registration), 1u);
      requester_->OnInvalidated(invalidate.tag, At(1));
    }
  }

  // Takes one outcome and releases it.
  std::optional<CallOutcome> Outcome() {
    auto outcome = requester_->TakeOutcome(At(1));
    if (outcome) requester_->Release(outcome->call, At(1));
    return outcome;
  }

  // One call answered, so that the grant is known.
  void OpenWith(uint32_t grant) {
    MustSubmit();
    Take();
    Reply(xid_++, grant);
    ASSERT_TRUE(Outcome().has_value());
    Take();
  }

  TraceLog trace_;
  FakeMemory memory_;
  Arena send_{8, 1024};
  Arena receive_{kSlots, 1024};
  SequentialXids xids_{kFirstXid};
  uint32_t xid_ = kFirstXid;  // of the next call
  std::optional<Requester> requester_;
  std::vector<uint32_t> posted_;
};

// [5666bis:4.3.1#2]
TEST_F(RequesterTest, OneCreditUntilTheFirstReply) {
  MustSubmit();
  MustSubmit();
  MustSubmit();
  EXPECT_EQ(Take().sends.size(), 1u);
  Reply(kFirstXid, 3);
  EXPECT_EQ(Take().sends.size(), 2u);
}

// [5666bis:4.3#4]
TEST_F(RequesterTest, CallsBeyondTheGrantWait) {
  OpenWith(2);
  for (int i = 0; i < 4; ++i) MustSubmit();
  EXPECT_EQ(Take().sends.size(), 2u);
  Reply(xid_, 2);
  EXPECT_EQ(Take().sends.size(), 1u);
  // A lower grant than what is in flight: nothing until enough replies came.
  Reply(xid_ + 1, 1);
  EXPECT_EQ(Take().sends.size(), 0u);
  Reply(xid_ + 2, 1);
  EXPECT_EQ(Take().sends.size(), 1u);
}

// [5666bis:4.3#2]
TEST_F(RequesterTest, GrantOfZeroCountsAsOne) {
  OpenWith(0);
  MustSubmit();
  MustSubmit();
  EXPECT_EQ(Take().sends.size(), 1u);
}

TEST_F(RequesterTest, GrantAboveOurReceivesIsCutToThem) {
  OpenWith(1000);
  for (int i = 0; i < 10; ++i) MustSubmit();
  EXPECT_EQ(Take().sends.size(), kSlots);
}

// [5666bis:4.3#1]
TEST_F(RequesterTest, RequestFallsSlowlyToWhatIsNeededAndRisesAtOnce) {
  // One call after the other needs one credit.
  const auto ask = [&] {
    MustSubmit();
    const PostSend send = Take().sends.at(0);
    const uint32_t asked = Decode(send_.view(), send).header.credits;
    requester_->OnSendDone(send.slot, At(1));
    Reply(xid_++, kSlots);
    EXPECT_TRUE(Outcome().has_value());
    Take();
    return asked;
  };
  for (uint32_t i = 1; i < Credits::kRequestWindow; ++i) ASSERT_EQ(ask(), kSlots);
  EXPECT_EQ(ask(), kSlots - 1);
  uint32_t last = kSlots;
  for (uint32_t i = 0; i < kSlots * Credits::kRequestWindow; ++i) {
    const uint32_t asked = ask();
    ASSERT_LE(asked, last);
    last = asked;
  }
  EXPECT_EQ(last, 1u);
  EXPECT_EQ(requester_->credits().requested(), 1u);

  // A grant that is used up is too small, and calls that wait are needs.
  OpenWith(1);
  for (int i = 0; i < 5; ++i) MustSubmit();
  EXPECT_EQ(Decode(send_.view(), Take().sends.at(0)).header.credits, 2u);
  Reply(xid_++, 1);
  const Taken taken = Take();
  ASSERT_EQ(taken.sends.size(), 1u);
  EXPECT_EQ(Decode(send_.view(), taken.sends[0]).header.credits, 4u);
}

TEST(CreditsTest, RequestIsNeverBelowWhatIsInFlightNorAboveTheReceives) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    Prng prng(seed);
    const auto own_max = static_cast<uint32_t>(prng.Between(1, 40));
    Credits credits(own_max);
    for (int i = 0; i < 2000; ++i) {
      if (credits.available() && prng.OneIn(2)) {
        const uint32_t before = credits.requested();
        const uint64_t waiting = prng.OneIn(8) ? prng.Below(100) : 0;
        const uint32_t asked = credits.Request(waiting);
        ASSERT_GE(asked, std::min<uint64_t>(own_max, credits.in_flight() + 1 + waiting));
        ASSERT_LE(asked, own_max);
        ASSERT_GE(asked, before - (before + 7) / 8);
        credits.OnSent();
      } else if (credits.in_flight() > 0) {
        credits.OnReply(prng.OneIn(10) ? std::nullopt : std::optional(static_cast<uint32_t>(prng.Below(60))));
      }
    }
  }
}

TEST_F(RequesterTest, HeaderCarriesXidCreditsAndNoChunksForASmallCall) {
  MustSubmit();
  const Taken taken = Take();
  ASSERT_EQ(taken.sends.size(), 1u);
  const Sent sent = Decode(send_.view(), taken.sends[0]);
  EXPECT_EQ(sent.header.xid, kFirstXid);
  EXPECT_EQ(sent.header.credits, kSlots);
  EXPECT_EQ(sent.header.type(), MessageType::kMsg);
  EXPECT_TRUE(sent.header.chunks()->empty());
  // [5666bis:5.1.1#1]
  EXPECT_EQ(ByteReader(sent.message).U32(), kFirstXid);
  EXPECT_EQ(sent.message.size(), Message(0, kCallWord).size());
  EXPECT_EQ(requester_->stats().calls_inline, 1u);
}

TEST_F(RequesterTest, CallThatHasAnXidKeepsItAndTakesNoneFromTheSource) {
  OpenWith(2);
  MustSubmit({.xid = 7});
  MustSubmit();
  const Taken taken = Take();
  ASSERT_EQ(taken.sends.size(), 2u);
  const Sent first = Decode(send_.view(), taken.sends[0]);
  EXPECT_EQ(first.header.xid, 7u);
  EXPECT_EQ(ByteReader(first.message).U32(), 7u) << "[5666bis:5.1.1#1]";
  EXPECT_EQ(Decode(send_.view(), taken.sends[1]).header.xid, xid_);
  EXPECT_TRUE(requester_->Knows(7));
  Reply(7);
  EXPECT_FALSE(requester_->Knows(7));
  EXPECT_FALSE(Outcome()->failure.has_value());
}

TEST_F(RequesterTest, RoomIsWhatTheGrantLeaves) {
  EXPECT_EQ(requester_->room(), 1u) << "until the first reply";
  MustSubmit();
  EXPECT_EQ(requester_->room(), 0u);
  Take();
  Reply(xid_++, 3);
  ASSERT_TRUE(Outcome().has_value());
  EXPECT_EQ(requester_->room(), 3u);
  const CallId cancelled = MustSubmit();
  for (int i = 0; i < 5; ++i) MustSubmit();
  EXPECT_EQ(requester_->room(), 0u);
  requester_->Cancel(cancelled, At(1));
  EXPECT_EQ(requester_->room(), 0u) << "the credit is spent until the reply";
  EXPECT_TRUE(requester_->Knows(xid_));
  requester_->OnDisconnected(At(2));
  EXPECT_EQ(requester_->room(), 0u);
}

// [5666bis:5.1.3#4]
TEST_F(RequesterTest, EveryCallIsOneSendWithinTheThreshold) {
  OpenWith(kSlots);
  const auto item = Pattern(5001);
  std::vector<std::byte> result(9000);
  for (const Shape& shape :
       {Shape{}, Shape{.item = item, .results = {result}, .reply_base_max = 5000},
        Shape{.words = 1000, .item = item, .results = {result}}, Shape{.words = 249, .item = ConstBytes(item).first(1)},
        Shape{.item = item, .direct_placement = false}}) {
    MustSubmit(shape);
    const Taken taken = Take();
    ASSERT_EQ(taken.sends.size(), 1u);
    EXPECT_LE(taken.sends[0].length, kInline);
    Reply(xid_++);
    Invalidated(Take());
    EXPECT_TRUE(Outcome().has_value());
    Take();
    requester_->OnSendDone(taken.sends[0].slot, At(1));
  }
}

TEST_F(RequesterTest, SmallEligibleItemIsGatheredInlineWithItsRoundUp) {
  const auto item = Pattern(10);
  MustSubmit({.item = item});
  const Sent sent = Decode(send_.view(), Take().sends.at(0));
  EXPECT_TRUE(sent.header.chunks()->empty());
  ASSERT_EQ(sent.message.size(), Message(0, kCallWord).size() + 12);
  EXPECT_EQ(ToHex(sent.message.last(12)), ToHex(item) + "0000");
  EXPECT_TRUE(memory_.live.empty());
}

TEST_F(RequesterTest, LargeEligibleItemTravelsByReadChunk) {
  const auto item = Pattern(5000);
  MustSubmit({.item = item});
  const Sent sent = Decode(send_.view(), Take().sends.at(0));
  ASSERT_EQ(sent.header.chunks()->reads.size(), 1u);
  const ReadSegment& read = sent.header.chunks()->reads[0];
  EXPECT_EQ(read.position, Message(0, kCallWord).size());
  EXPECT_EQ(read.target.length, 5000u);
  ASSERT_NE(memory_.Find(read.target, MemoryUse::kReadByPeer), nullptr);
  EXPECT_EQ(requester_->stats().calls_by_read_chunk, 1u);
}

TEST_F(RequesterTest, WithoutDirectPlacementTheWholeCallIsInItsPositionZeroChunk) {
  const auto item = Pattern(5001);
  MustSubmit({.item = item, .direct_placement = false});
  const Sent sent = Decode(send_.view(), Take().sends.at(0));
  EXPECT_EQ(sent.header.type(), MessageType::kNomsg);
  std::vector<std::byte> pulled;
  for (const ReadSegment& read : sent.header.chunks()->reads) {
    EXPECT_EQ(read.position, 0u);
    ASSERT_NE(memory_.Find(read.target, MemoryUse::kReadByPeer), nullptr);
    const auto* bytes = reinterpret_cast<const std::byte*>(read.target.offset);
    pulled.insert(pulled.end(), bytes, bytes + read.target.length);
  }
  EXPECT_EQ(ToHex(pulled), ToHex(Message(kFirstXid, kCallWord)) + ToHex(item) + "000000");
  EXPECT_EQ(requester_->stats().calls_long, 1u);
  EXPECT_EQ(requester_->stats().calls_by_read_chunk, 0u);
}

TEST_F(RequesterTest, WithoutDirectPlacementTheResultComesWithTheReply) {
  std::vector<std::byte> result(8000);
  MustSubmit({.results = {result}, .direct_placement = false});
  const Sent sent = Decode(send_.view(), Take().sends.at(0));
  EXPECT_TRUE(sent.header.chunks()->writes.empty());
  ASSERT_TRUE(sent.header.chunks()->reply.has_value());
  EXPECT_GE(TotalLength(*sent.header.chunks()->reply), 8000u);
  // The responder found it short enough to go inline.
  ChunkLists returned;
  returned.reply = sent.header.chunks()->reply;
  for (Segment& segment : *returned.reply) segment.length = 0;
  Reply(kFirstXid, 4, returned);
  Invalidated(Take());
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome && !outcome->failure);
  EXPECT_TRUE(outcome->placed.empty());
  EXPECT_TRUE(outcome->reply.chunks.empty());
}

TEST_F(RequesterTest, LongCallTravelsInAPositionZeroChunkWithItsXid) {
  MustSubmit({.words = 1000});
  const Sent sent = Decode(send_.view(), Take().sends.at(0));
  EXPECT_EQ(sent.header.type(), MessageType::kNomsg);
  EXPECT_TRUE(sent.message.empty());
  const ReadSegment& read = sent.header.chunks()->reads[0];
  EXPECT_EQ(read.position, 0u);
  const FakeMemory::Live* live = memory_.Find(read.target, MemoryUse::kReadByPeer);
  ASSERT_NE(live, nullptr);
  EXPECT_EQ(ByteReader(live->memory).U32(), kFirstXid);
  EXPECT_EQ(requester_->stats().calls_long, 1u);
}

// Fence before complete.
TEST_F(RequesterTest, AnsweredCallIsCompleteOnlyWhenItsTagsAreInvalid) {
  const auto item = Pattern(5000);
  MustSubmit({.item = item, .cookie = 42});
  Take();
  Reply(kFirstXid);
  EXPECT_FALSE(requester_->has_outcome());
  const Taken taken = Take();
  ASSERT_EQ(taken.invalidates.size(), 1u);
  EXPECT_FALSE(taken.invalidates[0].by_peer);
  EXPECT_FALSE(requester_->has_outcome());
  Invalidated(taken);
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome.has_value());
  EXPECT_FALSE(outcome->failure.has_value());
  EXPECT_EQ(outcome->cookie, 42u);
  EXPECT_TRUE(memory_.live.empty());
  EXPECT_EQ(requester_->stats().invalidations_local, 1u);
}

// [pvtdata:4.1#1]
// [traps:interop#3]
TEST_F(RequesterTest, TagInvalidatedByThePeerNeedsNoInvalidationOfOurs) {
  const auto item = Pattern(5000);
  MustSubmit({.item = item});
  const Sent sent = Decode(send_.view(), Take().sends.at(0));
  const uint32_t handle = sent.header.chunks()->reads[0].target.handle;
  Receive({.xid = kFirstXid, .credits = 4, .body = RdmaMsg{}}, Message(kFirstXid, kReplyWord), handle);
  const Taken taken = Take();
  ASSERT_EQ(taken.invalidates.size(), 1u);
  EXPECT_TRUE(taken.invalidates[0].by_peer);
  Invalidated(taken);
  EXPECT_TRUE(Outcome().has_value());
  EXPECT_EQ(requester_->stats().invalidations_remote, 1u);
  EXPECT_EQ(requester_->stats().invalidations_local, 0u);
}

TEST_F(RequesterTest, PeerThatInvalidatesATagOfNoCallChangesNothing) {
  MustSubmit();
  Take();
  Receive({.xid = kFirstXid, .credits = 4, .body = RdmaMsg{}}, Message(kFirstXid, kReplyWord), 0xdead);
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome.has_value());
  EXPECT_FALSE(outcome->failure.has_value());
  EXPECT_EQ(LastTold(trace_, "stag.not_ours"), "stag.not_ours stag=" + std::to_string(0xdead));
}

// [traps:interop#11]
TEST_F(RequesterTest, ResultIsWhereTheWriteChunkSaid) {
  std::vector<std::byte> result(8000);
  MustSubmit({.results = {result}});
  const Sent sent = Decode(send_.view(), Take().sends.at(0));
  ASSERT_EQ(sent.header.chunks()->writes.size(), 1u);
  ChunkLists returned;
  returned.writes = sent.header.chunks()->writes;
  ASSERT_EQ(returned.writes[0].size(), 1u);
  ASSERT_NE(memory_.Find(returned.writes[0][0], MemoryUse::kWrittenByPeer), nullptr);
  returned.writes.mutable_chunk(0)[0].length = 6001;
  Reply(kFirstXid, 4, returned);
  Invalidated(Take());
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome && !outcome->failure);
  ASSERT_EQ(outcome->placed.size(), 1u);
  EXPECT_EQ(outcome->placed[0], 6001u);
  ASSERT_EQ(outcome->reply.chunks.size(), 1u);
  EXPECT_EQ(outcome->reply.chunks[0].data.data(), result.data());
  EXPECT_EQ(requester_->stats().bytes_placed_by_write, 6001u);
}

TEST_F(RequesterTest, ResultWithoutRoomHasAChunkOfOneEmptySegmentWithATagOfItsCall) {
  std::vector<std::byte> result(8000);
  MustSubmit({.results = {{}, result}});
  const Sent sent = Decode(send_.view(), Take().sends.at(0));
  const WriteList& writes = sent.header.chunks()->writes;
  ASSERT_EQ(writes.size(), 2u);
  ASSERT_EQ(writes[0].size(), 1u);
  EXPECT_EQ(writes[0][0].length, 0u);
  EXPECT_EQ(writes[0][0].handle, writes[1][0].handle);
  EXPECT_EQ(memory_.live.size(), 1u);
}

TEST_F(RequesterTest, LongReplyIsReadFromTheReplyChunk) {
  MustSubmit({.reply_base_max = 5000});
  const Sent sent = Decode(send_.view(), Take().sends.at(0));
  ASSERT_TRUE(sent.header.chunks()->reply.has_value());
  ChunkLists returned;
  returned.reply = sent.header.chunks()->reply;
  const auto message = Message(kFirstXid, kReplyWord, 500);
  std::memcpy(reinterpret_cast<void*>((*returned.reply)[0].offset), message.data(), message.size());
  (*returned.reply)[0].length = static_cast<uint32_t>(message.size());
  for (size_t i = 1; i < returned.reply->size(); ++i) (*returned.reply)[i].length = 0;
  Receive({.xid = kFirstXid, .credits = 4, .body = RdmaNomsg{returned}}, {});
  Invalidated(Take());
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome && !outcome->failure);
  EXPECT_EQ(ToHex(outcome->reply.base), ToHex(message));
  EXPECT_NE(outcome->reply_memory, nullptr);
}

// --- What a responder may do wrong ---

// [5666bis:5.1.1#1]
TEST_F(RequesterTest, LongReplyThatIsNotOfItsCallFailsTheCall) {
  for (const size_t length : {size_t{40}, size_t{3}, size_t{0}}) {
    SCOPED_TRACE(length);
    Make({});
    const uint64_t malformed = requester_->stats().malformed;
    MustSubmit({.reply_base_max = 5000});
    const Sent sent = Decode(send_.view(), Take().sends.at(0));
    ChunkLists returned;
    returned.reply = sent.header.chunks()->reply;
    const auto message = Message(sent.header.xid + 1, kReplyWord, 8);
    ASSERT_EQ(message.size(), 40u);
    std::memcpy(reinterpret_cast<void*>((*returned.reply)[0].offset), message.data(), length);
    (*returned.reply)[0].length = static_cast<uint32_t>(length);
    for (size_t i = 1; i < returned.reply->size(); ++i) (*returned.reply)[i].length = 0;
    Receive({.xid = sent.header.xid, .credits = 4, .body = RdmaNomsg{returned}}, {});
    Invalidated(Take());
    const auto outcome = Outcome();
    ASSERT_TRUE(outcome && outcome->failure);
    EXPECT_EQ(outcome->failure->kind, CallFailure::Kind::kBadChunks);
    EXPECT_EQ(outcome->failure->chunk, ChunkFault::kXidMismatch);
    EXPECT_TRUE(outcome->failure->sent);
    EXPECT_TRUE(outcome->reply.base.empty());
    EXPECT_EQ(requester_->stats().malformed, malformed + 1);
    Take();
    EXPECT_EQ(requester_->posted_receives(), kSlots);
  }
}

// [traps:requester#3]
TEST_F(RequesterTest, ReplyToNobodyIsCountedAndItsReceivePostedAgain) {
  MustSubmit();
  Take();
  for (uint32_t i = 1; i <= 100; ++i) {
    Reply(999, UINT32_MAX);
    EXPECT_EQ(Take().receives.size(), 1u);
    EXPECT_EQ(requester_->stats().unknown_xids, i);
    EXPECT_EQ(requester_->posted_receives(), kSlots);
  }
  EXPECT_FALSE(requester_->has_outcome());
  EXPECT_EQ(requester_->credits().granted(), 1u) << "it grants nothing";
}

TEST_F(RequesterTest, SecondReplyToACallIsAReplyToNobody) {
  MustSubmit();
  Take();
  Reply(kFirstXid);
  Reply(kFirstXid);
  EXPECT_TRUE(Outcome().has_value());
  EXPECT_FALSE(Outcome().has_value());
  Take();
  EXPECT_EQ(requester_->stats().unknown_xids, 1u);
  EXPECT_EQ(requester_->posted_receives(), kSlots);
}

// [5666bis:8.3.3#1]
TEST_F(RequesterTest, NothingOfAMessageTooShortIsUsed) {
  MustSubmit();
  MustSubmit();
  Take();
  Header header{.xid = kFirstXid, .credits = 4, .body = RdmaMsg{}};
  std::vector<std::byte> bytes(64);
  ByteWriter out(bytes);
  EncodeHeaderV1(header, out);
  for (size_t size = 0; size < kFixedFieldsSize; ++size) ReceiveRaw(ConstBytes(bytes).first(size)), Take();
  EXPECT_FALSE(requester_->has_outcome());
  EXPECT_EQ(requester_->credits().granted(), 1u);
  EXPECT_EQ(requester_->stats().malformed, kFixedFieldsSize);
  EXPECT_EQ(requester_->posted_receives(), kSlots);
}

// [5666bis:5.5#5]
TEST_F(RequesterTest, UnparsableReplyEndsItsCallAndNoOther) {
  OpenWith(4);
  const CallId first = MustSubmit();
  MustSubmit();
  Take();
  Header header{.xid = xid_, .credits = 4, .body = RdmaMsg{}};
  std::vector<std::byte> bytes(64);
  ByteWriter out(bytes);
  EncodeHeaderV1(header, out);
  ReceiveRaw(ConstBytes(bytes).first(kFixedFieldsSize + 4));
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome.has_value());
  EXPECT_EQ(outcome->call, first);
  EXPECT_EQ(outcome->failure->kind, CallFailure::Kind::kBadHeader);
  EXPECT_FALSE(Outcome().has_value());
  Take();
  EXPECT_EQ(requester_->posted_receives(), kSlots);
  EXPECT_EQ(requester_->outstanding(), 1u);
}

// [5666bis:4.4.5#2]
TEST_F(RequesterTest, ReplyThatChangesTheOfferedChunksEndsItsCall) {
  OpenWith(4);
  const auto lie = [&](auto change) {
    std::vector<std::byte> result(8000);
    MustSubmit({.results = {result}});
    const Sent sent = Decode(send_.view(), Take().sends.at(0));
    ChunkLists returned;
    returned.writes = sent.header.chunks()->writes;
    change(returned);
    Reply(sent.header.xid, 4, returned);
    Invalidated(Take());
    const auto outcome = Outcome();
    Take();
    if (!outcome || !outcome->failure) return std::optional<ChunkFault>();
    EXPECT_TRUE(LastTold(trace_, "reply.refused").ends_with(std::string(" why=") + ToString(outcome->failure->chunk)));
    return std::optional(outcome->failure->chunk);
  };
  EXPECT_EQ(lie([](ChunkLists& lists) { lists.writes.mutable_chunk(0)[0].handle ^= 1; }),
            ChunkFault::kWriteListChanged);
  EXPECT_EQ(lie([](ChunkLists& lists) { lists.writes.mutable_chunk(0)[0].offset += 4; }),
            ChunkFault::kWriteListChanged);
  EXPECT_EQ(lie([](ChunkLists& lists) { lists.writes.mutable_chunk(0)[0].length += 1; }), ChunkFault::kReturnedTooMuch);
  EXPECT_EQ(lie([](ChunkLists& lists) { lists.reads.push_back({}); }), ChunkFault::kUnexpectedReadList);
  EXPECT_TRUE(lie([](ChunkLists& lists) { lists.writes.AppendChunk({}); }).has_value());
  EXPECT_TRUE(memory_.live.empty());
  EXPECT_EQ(requester_->posted_receives(), kSlots);
}

// [5666bis:5.5#6]
// [traps:interop#10]
TEST_F(RequesterTest, RdmaErrorEndsItsCallForGood) {
  OpenWith(4);
  MustSubmit();
  MustSubmit();
  Take();
  Receive({.xid = xid_, .credits = 4, .body = ErrChunk{}}, {});
  Receive({.xid = xid_ + 1, .version = 2, .credits = 4, .body = ErrVers{2, 3}}, {});
  auto outcome = Outcome();
  ASSERT_TRUE(outcome && outcome->failure);
  EXPECT_EQ(outcome->failure->kind, CallFailure::Kind::kErrChunk);
  outcome = Outcome();
  ASSERT_TRUE(outcome && outcome->failure);
  EXPECT_EQ(outcome->failure->kind, CallFailure::Kind::kErrVers);
  EXPECT_EQ(outcome->failure->versions.high, 3u);
  EXPECT_EQ(requester_->stats().errors, 2u);
  Take();
  EXPECT_EQ(requester_->posted_receives(), kSlots);
}

// [5666bis:5.7.2#1] [5666bis:8.3.1#1]
TEST_F(RequesterTest, DoneAndReverseCallsAreDropped) {
  MustSubmit();
  Take();
  Receive({.xid = kFirstXid, .credits = 4, .body = RdmaDone{}}, {});
  Receive({.xid = kFirstXid, .credits = 4, .body = RdmaMsg{}}, Message(kFirstXid, kCallWord));
  EXPECT_FALSE(requester_->has_outcome());
  EXPECT_EQ(requester_->stats().ignored, 2u);
  EXPECT_EQ(Take().receives.size(), 2u);
  Reply(kFirstXid);
  EXPECT_TRUE(Outcome().has_value());
}

// [5666bis:5.7.1#2] Alignment and threshold are hints that may be ignored; the chunk lists behind them are not.
TEST_F(RequesterTest, MsgpIsTreatedAsMsg) {
  MustSubmit();
  Take();
  Receive({.xid = kFirstXid, .credits = 4, .body = RdmaMsgp{.align = 4096, .thresh = 1}},
          Message(kFirstXid, kReplyWord));
  auto outcome = Outcome();
  ASSERT_TRUE(outcome.has_value());
  EXPECT_FALSE(outcome->failure.has_value());

  std::vector<std::byte> result(8000);
  MustSubmit({.results = {result}});
  const Sent sent = Decode(send_.view(), Take().sends.at(0));
  ChunkLists returned;
  returned.writes = sent.header.chunks()->writes;
  returned.writes.mutable_chunk(0)[0].length = 77;
  Receive({.xid = sent.header.xid, .credits = 4, .body = RdmaMsgp{.chunks = returned}},
          Message(sent.header.xid, kReplyWord));
  Invalidated(Take());
  outcome = Outcome();
  ASSERT_TRUE(outcome && !outcome->failure);
  EXPECT_EQ(outcome->placed[0], 77u);
}

// [5666bis:4.4.5.1#2] A responder that has used a Write chunk as scratch memory and returns it as unused.
TEST_F(RequesterTest, UnusedWriteChunkSaysNothingOfItsMemory) {
  std::vector<std::byte> result(8000);
  MustSubmit({.results = {result}});
  const Sent sent = Decode(send_.view(), Take().sends.at(0));
  ChunkLists returned;
  returned.writes = sent.header.chunks()->writes;
  for (Segment& segment : returned.writes.mutable_chunk(0)) {
    std::memset(reinterpret_cast<void*>(segment.offset), 0xee, segment.length);
    segment.length = 0;
  }
  Reply(kFirstXid, 4, returned);
  Invalidated(Take());
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome && !outcome->failure);
  ASSERT_EQ(outcome->placed.size(), 1u);
  EXPECT_EQ(outcome->placed[0], 0u);
  EXPECT_TRUE(outcome->reply.chunks[0].data.empty());
}

TEST_F(RequesterTest, ACallThatWasSentElsewhereKeepsItsXid) {
  OpenWith(4);
  MustSubmit({.xid = 7});
  MustSubmit();
  const Taken taken = Take();
  ASSERT_EQ(taken.sends.size(), 2u);
  const Sent again = Decode(send_.view(), taken.sends[0]);
  EXPECT_EQ(again.header.xid, 7u);
  EXPECT_EQ(ByteReader(again.message).U32(), 7u);
  EXPECT_EQ(Decode(send_.view(), taken.sends[1]).header.xid, xid_);
  Reply(7);
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome.has_value());
  EXPECT_FALSE(outcome->failure.has_value());
}

// [5666bis:8.3.4#2] [5666bis:8.3.4#3]
TEST_F(RequesterTest, InlineOnlyRefusesWhatNeedsAChunk) {
  Make({.inline_only = true});
  const auto item = Pattern(2000);
  const auto small_item = Pattern(100);
  std::vector<std::byte> result(2000);
  const auto refused = [&](const Shape& shape) {
    const auto id = Submit(shape);
    return !id.has_value() && id.error() == SubmitRefusal::kTooLarge;
  };
  EXPECT_TRUE(refused({.item = item}));
  EXPECT_TRUE(refused({.words = 300}));
  EXPECT_TRUE(refused({.results = {result}}));
  EXPECT_TRUE(refused({.reply_base_max = 1000}));
  EXPECT_EQ(Told(trace_, "call.declined").size(), 4u);
  EXPECT_EQ(LastTold(trace_, "call.declined"), "call.declined cookie=0 bytes=24 why=too_large");
  EXPECT_EQ(requester_->outstanding(), 0u);
  EXPECT_EQ(Take().order, "");
  // What fits travels, the eligible item inside the message.
  MustSubmit({.item = small_item});
  const Taken taken = Take();
  ASSERT_EQ(taken.sends.size(), 1u);
  const Sent sent = Decode(send_.view(), taken.sends[0]);
  EXPECT_EQ(sent.header.type(), MessageType::kMsg);
  EXPECT_TRUE(sent.header.chunks()->empty());
  EXPECT_EQ(sent.message.size(), 24u + 100u);
}

TEST_F(RequesterTest, InlineOnlyCallsThatTimeOutLeaveTheConnectionAlone) {
  Make({.inline_only = true});
  MustSubmit({.deadline = At(50)});
  MustSubmit();
  EXPECT_EQ(Take().sends.size(), 1u);
  requester_->OnDeadline(At(50));
  Taken taken = Take();
  EXPECT_EQ(taken.order, "") << "neither the end of the connection nor the second call: the credit is spent";
  auto outcome = Outcome();
  ASSERT_TRUE(outcome && outcome->failure);
  EXPECT_EQ(outcome->failure->kind, CallFailure::Kind::kTimedOut);
  EXPECT_TRUE(outcome->failure->sent);
  EXPECT_EQ(requester_->abandoned(), 1u);
  EXPECT_FALSE(requester_->Deadline().has_value());
  // Late, but an answer: it returns the credit.
  Reply(kFirstXid);
  EXPECT_EQ(Take().order, "RS");
  EXPECT_EQ(requester_->abandoned(), 0u);
  EXPECT_FALSE(Outcome().has_value());
}

// [traps:requester#2]
TEST_F(RequesterTest, RandomBytesNeverLoseAReceiveOrEndAWrongCall) {
  Prng prng(7);
  OpenWith(4);
  MustSubmit();
  const Taken first = Take();
  std::vector<std::byte> bytes(200);
  for (int round = 0; round < 20000; ++round) {
    // Often a correct beginning, so that the deeper parts are reached.
    Header header{.xid = static_cast<uint32_t>(prng.Below(50)), .credits = 4, .body = RdmaMsg{}};
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(prng.Next());
    ByteWriter out(bytes);
    EncodeHeaderV1(header, out);
    for (uint64_t flips = prng.Below(4); flips > 0; --flips) {
      bytes[prng.Below(40)] = static_cast<std::byte>(prng.Next());
    }
    // The XID of the outstanding call stays out of it.
    bytes[0] = std::byte{0xff};
    ReceiveRaw(ConstBytes(bytes).first(prng.Below(bytes.size())));
    Take();
    ASSERT_EQ(posted_.size(), kSlots);
  }
  EXPECT_EQ(requester_->outstanding(), 1u);
  Reply(Decode(send_.view(), first.sends.at(0)).header.xid);
  EXPECT_TRUE(Outcome().has_value());
}

// --- Endings ---

TEST_F(RequesterTest, TimeoutOfASentCallEndsTheConnectionAndThenAllCalls) {
  OpenWith(2);
  const CallId slow = MustSubmit({.deadline = At(100)});
  const CallId other = MustSubmit({.deadline = At(500)});
  const CallId queued = MustSubmit();
  Take();
  ASSERT_TRUE(requester_->Deadline().has_value());
  EXPECT_LE(*requester_->Deadline(), At(100));
  requester_->OnDeadline(At(99));
  EXPECT_TRUE(Take().disconnects.empty());
  requester_->OnDeadline(At(100));
  const Taken taken = Take();
  ASSERT_EQ(taken.disconnects.size(), 1u);
  EXPECT_EQ(taken.disconnects[0].why, Disconnect::Why::kCallTimedOut);
  EXPECT_FALSE(requester_->has_outcome()) << "memory is not safe yet";
  EXPECT_EQ(Submit({}).error(), SubmitRefusal::kNotConnected);

  requester_->OnDisconnected(At(101));
  std::map<CallId, CallFailure> failures;
  while (auto outcome = Outcome()) failures[outcome->call] = *outcome->failure;
  ASSERT_EQ(failures.size(), 3u);
  EXPECT_EQ(failures[slow].kind, CallFailure::Kind::kTimedOut);
  EXPECT_EQ(failures[other].kind, CallFailure::Kind::kConnectionLost);
  EXPECT_TRUE(failures[other].sent);
  EXPECT_EQ(failures[queued].kind, CallFailure::Kind::kConnectionLost);
  EXPECT_FALSE(failures[queued].sent);
  EXPECT_EQ(requester_->outstanding(), 0u);
}

TEST_F(RequesterTest, CallThatTimesOutInTheQueueDoesNotEndTheConnection) {
  MustSubmit();
  const CallId queued = MustSubmit({.deadline = At(100)});
  Take();
  requester_->OnDeadline(At(100));
  EXPECT_TRUE(Take().disconnects.empty());
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome && outcome->failure);
  EXPECT_EQ(outcome->call, queued);
  EXPECT_EQ(outcome->failure->kind, CallFailure::Kind::kNoCredit);
  Reply(kFirstXid);
  EXPECT_TRUE(Outcome().has_value());
}

// [traps:interop#20]
TEST_F(RequesterTest, CancelledCallKeepsItsCreditUntilItsReply) {
  OpenWith(1);
  const auto item = Pattern(5000);
  const CallId call = MustSubmit({.item = item});
  MustSubmit();
  Take();
  requester_->Cancel(call, At(1));
  EXPECT_FALSE(requester_->has_outcome()) << "its tag is still valid";
  Taken taken = Take();
  EXPECT_TRUE(taken.sends.empty());
  Invalidated(taken);
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome && outcome->failure);
  EXPECT_EQ(outcome->failure->kind, CallFailure::Kind::kCancelled);
  EXPECT_TRUE(outcome->failure->sent);
  EXPECT_TRUE(Take().sends.empty());
  Reply(xid_, 1);
  EXPECT_EQ(Take().sends.size(), 1u);
  requester_->Cancel(call, At(2));  // over: nothing
}

TEST_F(RequesterTest, AbandonedCallThatIsNeverAnsweredEndsTheConnectionAtItsDeadline) {
  const CallId call = MustSubmit({.deadline = At(100)});
  Take();
  requester_->Cancel(call, At(1));
  EXPECT_TRUE(Outcome().has_value());
  requester_->OnDeadline(At(100));
  EXPECT_EQ(Take().disconnects.size(), 1u);
}

// Its answer is in, but the device does not get to invalidating its memory: as when the peer takes nothing more.
TEST_F(RequesterTest, CallThatIsNotFencedInTimeEndsTheConnectionAndHasItsReply) {
  const auto item = Pattern(5000);
  MustSubmit({.item = item, .deadline = At(100)});
  Take();
  Reply(kFirstXid);
  EXPECT_EQ(Take().invalidates.size(), 1u);
  requester_->OnDeadline(At(100));
  EXPECT_TRUE(Take().disconnects.empty()) << "it may come any moment";
  ASSERT_TRUE(requester_->Deadline().has_value());
  const Instant limit = *requester_->Deadline();
  EXPECT_GT(limit, At(100));
  requester_->OnDeadline(limit);
  EXPECT_EQ(Take().disconnects.size(), 1u);
  EXPECT_FALSE(requester_->has_outcome());
  requester_->OnDisconnected(limit);
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome.has_value());
  EXPECT_FALSE(outcome->failure.has_value());
}

TEST_F(RequesterTest, QueuedCallIsCancelledAtOnce) {
  MustSubmit();
  const CallId queued = MustSubmit();
  Take();
  requester_->Cancel(queued, At(1));
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome && outcome->failure);
  EXPECT_FALSE(outcome->failure->sent);
  Reply(kFirstXid, 4);
  EXPECT_TRUE(Take().sends.empty());
}

TEST_F(RequesterTest, ReplyThatWaitsForItsFenceSurvivesTheEndOfTheConnection) {
  const auto item = Pattern(5000);
  MustSubmit({.item = item});
  Take();
  Reply(kFirstXid);
  requester_->OnDisconnected(At(2));
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome.has_value());
  EXPECT_FALSE(outcome->failure.has_value());
  EXPECT_FALSE(requester_->TakeCommand().has_value());
}

// [traps:requester#10]
TEST_F(RequesterTest, RefusedRegistrationFailsTheCallAndReturnsWhatWasRegistered) {
  const auto item = Pattern(5000);
  std::vector<std::byte> result(8000);
  // More often than there are send buffers.
  for (int i = 0; i < 20; ++i) {
    memory_.refuse_after = 1;
    MustSubmit({.item = item, .results = {result}});
    const Taken taken = Take();
    EXPECT_TRUE(taken.sends.empty());
    ASSERT_EQ(taken.invalidates.size(), 1u);
    Invalidated(taken);
    const auto outcome = Outcome();
    ASSERT_TRUE(outcome && outcome->failure);
    EXPECT_EQ(outcome->failure->kind, CallFailure::Kind::kMemory);
    EXPECT_FALSE(outcome->failure->sent);
    EXPECT_TRUE(memory_.live.empty());
  }
  // The credit was not spent.
  MustSubmit();
  EXPECT_EQ(Take().sends.size(), 1u);
}

// What the program says of its memory is not true of the engine's own: the message, and room for a long reply.
TEST_F(RequesterTest, LastingMemoryIsThatOfItemsAndResultsAlone) {
  const auto item = Pattern(5000);
  std::vector<std::byte> result(8000);
  auto lasting = SomeLastingMemory();
  MustSubmit(
      {.words = 500, .item = item, .results = {MutableBytes(result)}, .reply_base_max = 3000, .lasting = lasting});
  Taken taken = Take();
  const Sent sent = Decode(send_.view(), taken.sends.at(0));
  EXPECT_EQ(sent.header.type(), MessageType::kNomsg);
  const ChunkLists& lists = *sent.header.chunks();
  ASSERT_EQ(lists.reads.size(), 2u);
  ASSERT_TRUE(lists.reply.has_value());
  const auto lasting_of = [&](const Segment& segment, MemoryUse use) {
    const FakeMemory::Live* const live = memory_.Find(segment, use);
    EXPECT_NE(live, nullptr);
    return live != nullptr ? live->lasting : nullptr;
  };
  EXPECT_EQ(lasting_of(lists.reads[0].target, MemoryUse::kReadByPeer), nullptr) << "the message";
  EXPECT_EQ(lasting_of(lists.reads[1].target, MemoryUse::kReadByPeer), lasting.get());
  EXPECT_EQ(lasting_of(lists.writes[0][0], MemoryUse::kWrittenByPeer), lasting.get());
  EXPECT_EQ(lasting_of((*lists.reply)[0], MemoryUse::kWrittenByPeer), nullptr) << "room for the reply";
  EXPECT_EQ(requester_->stats().registrations, 4u);
  EXPECT_EQ(requester_->stats().memory_reused, 2u);
  EXPECT_EQ(requester_->stats().memory_not_reused, 0u);

  // It is the call's until nothing is valid any more, and nobody's when the handler runs.
  const std::weak_ptr<LastingMemory> watch = lasting;
  lasting.reset();
  ChunkLists returned = lists;
  returned.reads = {};
  returned.writes.mutable_chunk(0)[0].length = 0;
  (*returned.reply)[0].length = 0;
  Reply(kFirstXid, kSlots, returned);
  taken = Take();
  EXPECT_EQ(taken.invalidates.size(), 4u);
  EXPECT_FALSE(watch.expired());
  Invalidated(taken);
  auto outcome = requester_->TakeOutcome(At(1));
  ASSERT_TRUE(outcome.has_value());
  EXPECT_FALSE(outcome->failure.has_value());
  EXPECT_FALSE(watch.expired());
  requester_->Release(outcome->call, At(1));
  EXPECT_TRUE(watch.expired());
}

TEST_F(RequesterTest, LastingMemoryThatHadToBeRegisteredOnceMoreIsCounted) {
  const auto item = Pattern(5000);
  memory_.reuses_lasting = false;
  MustSubmit({.item = item, .lasting = SomeLastingMemory()});
  EXPECT_EQ(requester_->stats().memory_reused, 0u);
  EXPECT_EQ(requester_->stats().memory_not_reused, 1u);
}

TEST_F(RequesterTest, LastingMemoryIsLetGoWithACallThatIsRefusedOrCancelled) {
  auto lasting = SomeLastingMemory();
  const std::weak_ptr<LastingMemory> watch = lasting;
  MustSubmit();
  Take();
  // Waits for a credit.
  const auto item = Pattern(5000);
  const CallId waiting = MustSubmit({.item = item, .lasting = lasting});
  // Fits no plan.
  std::vector<std::byte> much(1000);
  EXPECT_FALSE(Submit({.results = std::vector<MutableBytes>(100, MutableBytes(much)), .lasting = lasting}).has_value());
  lasting.reset();
  EXPECT_EQ(watch.use_count(), 1);
  requester_->Cancel(waiting, At(1));
  ASSERT_TRUE(Outcome().has_value());
  EXPECT_TRUE(watch.expired());
}

TEST_F(RequesterTest, QueueIsBounded) {
  Make({.queued_max = 3});
  for (int i = 0; i < 4; ++i) MustSubmit();  // one is sent, three wait
  EXPECT_EQ(Submit({}).error(), SubmitRefusal::kQueueFull);
  EXPECT_EQ(LastTold(trace_, "call.declined"), "call.declined cookie=0 bytes=24 why=queue_full");
}

TEST_F(RequesterTest, TheTraceSaysHowEachPartTravels) {
  MustSubmit();
  EXPECT_EQ(LastTold(trace_, "call.planned"),
            "call.planned call=1 type=RDMA_MSG send=52 position_zero=0 read_chunks=0 read_bytes=0 write_chunks=0 "
            "write_bytes=0 reply_chunk=0");
  const auto item = Pattern(2001);
  std::vector<std::byte> result(3000);
  MustSubmit({.item = item, .results = {result}, .reply_base_max = 2000});
  const std::string direct = LastTold(trace_, "call.planned");
  EXPECT_NE(direct.find(" type=RDMA_MSG "), std::string::npos) << direct;
  EXPECT_NE(direct.find(" position_zero=0 read_chunks=1 read_bytes=2001 write_chunks=1 write_bytes=3000 reply_chunk=2"),
            std::string::npos)
      << direct;
  MustSubmit({.item = item, .direct_placement = false});
  const std::string whole = LastTold(trace_, "call.planned");
  EXPECT_NE(whole.find(" type=RDMA_NOMSG "), std::string::npos) << whole;
  EXPECT_NE(whole.find(" position_zero=2028 read_chunks=0 read_bytes=0 write_chunks=0 "), std::string::npos) << whole;
}

TEST_F(RequesterTest, TheTraceSaysOnceWhyCallsAreHeld) {
  for (int i = 0; i < 3; ++i) MustSubmit();
  EXPECT_EQ(Told(trace_, "call.held"),
            (std::vector<std::string>{"call.held why=credit queued=1 granted=1 in_flight=1"}));
  Reply(kFirstXid, 4);
  ASSERT_TRUE(Outcome().has_value());
  // Nobody waits any more; the next who does is told of anew.
  for (int i = 0; i < 3; ++i) MustSubmit();
  EXPECT_EQ(Told(trace_, "call.held").size(), 2u);
  EXPECT_EQ(LastTold(trace_, "call.held"), "call.held why=credit queued=1 granted=4 in_flight=4");
}

TEST_F(RequesterTest, ReceiveOfAReplyIsPostedAgainWhenItIsReleased) {
  MustSubmit();
  Take();
  Reply(kFirstXid);
  const auto outcome = requester_->TakeOutcome(At(1));
  ASSERT_TRUE(outcome.has_value());
  EXPECT_TRUE(Take().receives.empty());
  requester_->Release(outcome->call, At(1));
  EXPECT_EQ(Take().receives.size(), 1u);
  requester_->Release(outcome->call, At(1));  // twice: nothing
  EXPECT_TRUE(Take().receives.empty());
}

// [traps:requester#7]
TEST_F(RequesterTest, CallThatWaitsForAReceiveIsSentWhenOneIsPosted) {
  OpenWith(kSlots);
  for (uint32_t i = 0; i < kSlots + 1; ++i) MustSubmit();
  EXPECT_EQ(Take().sends.size(), kSlots);
  // A credit is free, but the reply still occupies its Receive.
  Reply(xid_);
  EXPECT_TRUE(Take().sends.empty());
  EXPECT_EQ(LastTold(trace_, "call.held"), "call.held why=receive queued=1 granted=4 in_flight=3");
  EXPECT_TRUE(Outcome().has_value());
  EXPECT_EQ(Take().order, "RS");
}

// [traps:requester#1]
TEST_F(RequesterTest, WaitsForASendBufferWhenNoneIsFree) {
  OpenWith(4);
  // The Sends are never reported done: 8 buffers, one used by OpenWith.
  for (int i = 0; i < 7; ++i) {
    MustSubmit();
    ASSERT_EQ(Take().sends.size(), 1u);
    Reply(xid_++);
    ASSERT_TRUE(Outcome().has_value());
    Take();
  }
  MustSubmit();
  EXPECT_TRUE(Take().sends.empty());
  EXPECT_EQ(LastTold(trace_, "call.held"), "call.held why=send_buffer queued=1 granted=4 in_flight=0");
  requester_->OnSendDone(0, At(2));
  EXPECT_EQ(Take().sends.size(), 1u);
}

}  // namespace
}  // namespace stagecoach::rpcrdma
