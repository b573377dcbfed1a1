// The requester on connections of version 2: what it sends, what it makes of the nine errors, properties, extensions.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "base/prng.h"
#include "rpcrdma/core/engine_test_support.h"
#include "rpcrdma/core/requester.h"
#include "rpcrdma/wire/header_v2.h"

namespace stagecoach::rpcrdma {
namespace {

using namespace testing;  // NOLINT: what tests of the engines are made of
using Kind = CallFailure::Kind;

constexpr uint32_t kFirstXid = 100;
constexpr uint32_t kSlots = 4;
constexpr uint32_t kSlotSize = 16384;
constexpr uint32_t kResponse = kFlagResponse;

// An extension: two words; and a type that a message follows.
constexpr uint32_t kPing = 0x80000001;
constexpr uint32_t kPiece = 0x80000002;
constexpr uint32_t kTired = 0x80000005;
constexpr uint32_t kUrgent = 0x80000000;
std::optional<size_t> TwoWords(ConstBytes rest) {
  return rest.size() >= 8 ? std::optional<size_t>(8) : std::nullopt;
}
constexpr HeaderTypeRow kHeaderTypes[] = {{.type = kPing, .name = "PING", .size = TwoWords},
                                          {.type = kPiece, .name = "PIECE", .has_message = true, .size = TwoWords}};
constexpr ErrorRow kErrors[] = {{kTired, "TIRED"}};
constexpr FlagRow kFlags[] = {{kUrgent, "URGENT", [](uint32_t) { return FlagUse::kMay; }}};
constexpr Feature kFeature{"made up", kHeaderTypes, {}, kErrors, kFlags};

struct Shape {
  size_t words = 4;  // of the message, behind XID and direction
  std::vector<ConstBytes> items;
  std::vector<MutableBytes> results;
  uint64_t reply_base_max = 100;
  bool direct_placement = true;
  std::optional<Instant> deadline;
  std::optional<uint32_t> xid;
  uint32_t flags = 0;
  std::shared_ptr<LastingMemory> lasting;
};

class RequesterV2Test : public ::testing::Test {
 protected:
  RequesterV2Test() { Make(); }

  struct Setup {
    Requester::Config config;
    TransportVersions versions = kVersion2Alone;
    ConnectionTerms::End end = ConnectionTerms::End::kClient;
    uint32_t receive_buffer_size = kSlotSize;
    bool settle = true;
    uint32_t first_xid = kFirstXid;
    std::vector<Feature> more_features;
  };
  void Make() { Make(Setup{}); }
  void Make(Setup setup) {
    auto extensions = std::make_shared<Extensions>();
    ASSERT_EQ(extensions->Add(kFeature), std::nullopt);
    for (const Feature& feature : setup.more_features) ASSERT_EQ(extensions->Add(feature), std::nullopt);
    extensions_ = *extensions;
    terms_.emplace(ConnectionTerms::Config{.end = setup.end,
                                           .versions = setup.versions,
                                           .extensions = extensions,
                                           .own = {.receive_buffer_size = setup.receive_buffer_size},
                                           .send_max = kSlotSize});
    if (setup.settle) terms_->SetVersion(kRpcRdmaVersion2);
    xids_.emplace(setup.first_xid);
    xid_ = setup.first_xid;
    setup.config.credits = kSlots;
    setup.config.terms = &*terms_;
    requester_.emplace(setup.config, send_.view(), receive_.view(), memory_, *xids_, &trace_);
    requester_->Start();
    posted_ = TakeAll(*requester_).receives;
    memory_.live.clear();
  }

  Result<CallId, SubmitRefusal> Submit(const Shape& shape, Instant now = At(0)) {
    Requester::CallSpec spec;
    spec.buffer = requester_->TakeBuffer();
    const auto message = Message(0, kCallWord, shape.words);
    spec.buffer.assign(message.begin(), message.end());
    spec.message_size = message.size();
    uint64_t position = message.size();
    for (const ConstBytes item : shape.items) {
      spec.items.push_back({position, item});
      position += (item.size() + 3) / 4 * 4;
    }
    for (const MutableBytes result : shape.results) spec.results.push_back(result);
    spec.reply_base_max = shape.reply_base_max;
    spec.direct_placement = shape.direct_placement;
    spec.deadline = shape.deadline;
    spec.xid = shape.xid;
    spec.flags = shape.flags;
    spec.lasting = shape.lasting;
    return requester_->Submit(std::move(spec), now);
  }
  CallId MustSubmit(const Shape& shape = {}) {
    const auto id = Submit(shape);
    EXPECT_TRUE(id.has_value());
    return id.value_or(0);
  }
  Requester::ExtensionSpec Ping() const { return {.type = kPing, .body = Pattern(8)}; }

  Taken Take() {
    Taken taken = TakeAll(*requester_);
    posted_.insert(posted_.end(), taken.receives.begin(), taken.receives.end());
    // Its Sends complete at once.
    for (const PostSend& send : taken.sends) {
      const ConstBytes bytes = send_.view().slot(send.slot).first(send.length);
      sent_.emplace_back(bytes.begin(), bytes.end());
    }
    for (const PostSend& send : taken.sends) requester_->OnSendDone(send.slot, At(1));
    return taken;
  }
  // The one message that is sent now.
  Sent Next() {
    sent_.clear();
    const Taken taken = Take();
    EXPECT_EQ(taken.sends.size(), 1u);
    if (sent_.size() != 1) return {};
    ByteReader in{ConstBytes(sent_[0])};
    const auto header = DecodeHeaderV2(in, {}, extensions_);
    EXPECT_TRUE(header.has_value());
    EXPECT_EQ(UnknownFlags(*header, extensions_), 0u) << "[v2:3.2#1]";
    return {header ? *header : Header{}, in.Rest()};
  }
  void NothingIsSent() { EXPECT_TRUE(Take().sends.empty()); }

  void ReceiveRaw(ConstBytes bytes, std::optional<uint32_t> invalidated = std::nullopt) {
    ASSERT_FALSE(posted_.empty());
    const uint32_t slot = posted_.front();
    posted_.erase(posted_.begin());
    requester_->OnReceive(slot, PutRaw(receive_.view(), slot, bytes), invalidated, At(1));
  }
  std::vector<std::byte> Encoded(Header header, ConstBytes message) const {
    header.version = header.flags ? kRpcRdmaVersion2 : kRpcRdmaVersion1;
    std::vector<std::byte> bytes(terms_->EncodedSize(header) + message.size());
    ByteWriter out(bytes);
    terms_->Encode(header, out);
    out.Bytes(message);
    EXPECT_TRUE(out.ok());
    return bytes;
  }
  void Receive(const Header& header, ConstBytes message = {}, std::optional<uint32_t> invalidated = std::nullopt) {
    ReceiveRaw(Encoded(header, message), invalidated);
  }
  void Reply(uint32_t xid, ChunkLists chunks = {}, std::optional<uint32_t> invalidated = std::nullopt,
             uint32_t credits = kSlots) {
    Receive({.xid = xid, .credits = credits, .flags = kResponse, .body = RdmaMsg{std::move(chunks)}},
            Message(xid, kReplyWord), invalidated);
  }
  void Error(uint32_t xid, Header::Body error, uint32_t credits = 1) {
    Receive({.xid = xid, .credits = credits, .flags = kResponse, .body = std::move(error)});
  }
  void Properties(uint32_t flags, const TransportProperties& properties, uint32_t xid = 0, uint32_t credits = kSlots) {
    Receive({.xid = xid, .credits = credits, .flags = flags, .body = ConnProp{MakePropertySet(properties)}});
  }

  // The peer's properties, not marked as an answer, which the responder of the same connection takes.
  void Announce(const TransportProperties& properties) {
    terms_->OnPeerProperties(MakePropertySet(properties));
    requester_->OnPeerProperties(At(1));
  }

  void Invalidated(const Taken& taken) {
    for (const Invalidate& invalidate : taken.invalidates) {
      EXPECT_EQ(memory_.live.erase(invalidate.registration), 1u);
      requester_->OnInvalidated(invalidate.tag, At(1));
    }
  }
  // Takes commands and answers the Invalidates.
  void Fence() { Invalidated(Take()); }
  // A resend: nothing goes out while a steering tag of the attempt before is valid.
  Sent Resent(const Header& before) {
    if (!before.chunks()->empty()) {
      const Taken taken = Take();
      EXPECT_TRUE(taken.sends.empty()) << "before the fence";
      EXPECT_EQ(taken.invalidates.size(), memory_.live.size());
      Invalidated(taken);
      EXPECT_FALSE(Valid(before));
    }
    Sent again = Next();
    EXPECT_EQ(again.header.xid, before.xid);
    EXPECT_FALSE(again.header.is_response());
    return again;
  }
  bool Valid(const Header& header) const {
    const auto valid = [&](const Segment& segment) {
      return memory_.live.contains(memory_.IdOfHandle(segment.handle));
    };
    const ChunkLists& lists = *header.chunks();
    return std::ranges::any_of(lists.reads, [&](const ReadSegment& read) { return valid(read.target); }) ||
           std::ranges::any_of(lists.writes.segments(), valid) ||
           (lists.reply.has_value() && std::ranges::any_of(*lists.reply, valid));
  }

  std::optional<CallOutcome> Outcome() {
    auto outcome = requester_->TakeOutcome(At(1));
    if (outcome) requester_->Release(outcome->call, At(1));
    Take();
    return outcome;
  }
  Kind Failure() {
    const auto outcome = Outcome();
    EXPECT_TRUE(outcome.has_value() && outcome->failure.has_value());
    return outcome && outcome->failure ? outcome->failure->kind : Kind::kCancelled;
  }

  // One call answered, so that the grant is known.
  void Open(uint32_t grant = kSlots) {
    MustSubmit();
    Take();
    Reply(xid_++, {}, {}, grant);
    const auto outcome = Outcome();
    ASSERT_TRUE(outcome.has_value() && !outcome->failure);
  }

  TraceLog trace_;
  FakeMemory memory_;
  Arena send_{8, kSlotSize};
  Arena receive_{kSlots, kSlotSize};
  Extensions extensions_;
  std::optional<ConnectionTerms> terms_;
  std::optional<SequentialXids> xids_;
  uint32_t xid_ = kFirstXid;  // of the next call
  std::optional<Requester> requester_;
  std::vector<uint32_t> posted_;
  std::vector<std::vector<std::byte>> sent_;
};

Kind KindOfError(const Header::Body& error) {
  if (std::holds_alternative<ErrWriteChunks>(error)) return Kind::kErrWriteChunks;
  if (std::holds_alternative<ErrSegments>(error)) return Kind::kErrSegments;
  return std::holds_alternative<ErrWriteResource>(error) ? Kind::kErrWriteResource : Kind::kErrReplyResource;
}
std::vector<std::byte> Filled(size_t size) {
  return std::vector<std::byte>(size);
}
// A Write list or Reply chunk of which so many bytes were written.
ChunkLists Returned(const Header& call, std::vector<uint64_t> placed, std::optional<uint64_t> in_reply = {}) {
  ChunkLists lists;
  lists.writes = call.chunks()->writes;
  lists.reply = call.chunks()->reply;
  for (size_t i = 0; i < placed.size(); ++i) EXPECT_TRUE(FillSegments(lists.writes.mutable_chunk(i), placed[i]));
  if (lists.reply.has_value()) {
    EXPECT_TRUE(FillSegments(*lists.reply, in_reply.value_or(0)));
  }
  return lists;
}

// --- The message itself ---

// [v2:3.2#2] [v2:3.2+4] [v2:10.1+3]
TEST_F(RequesterV2Test, ACallIsARequestUnderItsOwnXid) {
  MustSubmit();
  const Sent sent = Next();
  EXPECT_EQ(sent.header, (Header{.xid = kFirstXid, .version = 2, .credits = kSlots, .flags = 0, .body = RdmaMsg{}}));
  EXPECT_EQ(sent.message.size(), Message(0, kCallWord).size());
  EXPECT_EQ(ByteReader(sent.message).U32(), kFirstXid);
  Reply(kFirstXid);
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome.has_value() && !outcome->failure);
  EXPECT_EQ(outcome->answered_in, 2u);
  EXPECT_EQ(outcome->reply.base.size(), 24u);
}

// [v2:4.2.1+3] [v2:4.2.1+4] [v2:8.3+2] Header and message together.
TEST_F(RequesterV2Test, ACallThatIsLongerThanThePeersReceivesIsALongCall) {
  Open();
  const size_t header = kHeaderLayoutV2.min_size();
  MustSubmit({.words = (4096 - header - 8) / 4});
  const Sent fits = Next();
  EXPECT_EQ(fits.header.type(), MessageType::kMsg);
  EXPECT_EQ(sent_[0].size(), 4096u);
  MustSubmit({.words = (4096 - header - 8) / 4 + 1});
  const Sent does_not = Next();
  EXPECT_EQ(does_not.header.type(), MessageType::kNomsg);
  EXPECT_EQ(does_not.header.chunks()->reads[0].position, 0u);
  EXPECT_TRUE(does_not.message.empty());
}

// [v2:4.2.1+2] [v2:4.2.1+5] [v2:5.3.4+4] Its own size counts for replies only once the peer has shown that it knows it.
TEST_F(RequesterV2Test, SizesAreTheDefaultsUntilThePeerHasSpoken) {
  Open();
  EXPECT_EQ(requester_->limits().send_inline, 4096u);
  EXPECT_EQ(requester_->limits().receive_inline, 4096u);
  const uint64_t longest_reply = 4096 - kHeaderLayoutV2.min_size();
  MustSubmit({.reply_base_max = longest_reply});
  EXPECT_FALSE(Next().header.chunks()->reply.has_value());
  MustSubmit({.reply_base_max = longest_reply + 1});
  EXPECT_TRUE(Next().header.chunks()->reply.has_value());

  Properties(kResponse, {.receive_buffer_size = 8192});
  EXPECT_EQ(requester_->limits().send_inline, 8192u);
  EXPECT_EQ(requester_->limits().receive_inline, 8192u);
  MustSubmit({.words = 1500, .reply_base_max = longest_reply + 1});
  const Sent sent = Next();
  EXPECT_TRUE(sent.header.chunks()->empty());
  EXPECT_GT(sent_[0].size(), 4096u);
}

TEST_F(RequesterV2Test, CallsThatWaitGoByWhatThePeerHasSaidMeanwhile) {
  Open(1);
  MustSubmit();
  Next();
  // Planned for 4096, and waiting.
  MustSubmit({.words = 500});
  NothingIsSent();
  Properties(kResponse, {.receive_buffer_size = 1024});
  Reply(xid_, {}, {}, 1);
  EXPECT_EQ(Next().header.type(), MessageType::kNomsg);
  EXPECT_EQ(Told(trace_, "call.planned").size(), 4u);
}

TEST_F(RequesterV2Test, ACallForWhichNoWayIsLeftEndsUnsent) {
  Open(1);
  MustSubmit();
  Next();
  MustSubmit({.words = 500, .direct_placement = false});
  Requester::ExtensionSpec large{.type = kPing, .body = Pattern(2000)};
  ASSERT_TRUE(requester_->SubmitExtension(std::move(large), At(0)).has_value());
  Properties(kResponse, {.receive_buffer_size = 1024});
  // What goes by chunk is as long a header as it was; what cannot, is over.
  Reply(xid_, {}, {}, 3);
  EXPECT_EQ(Next().header.type(), MessageType::kNomsg);
  EXPECT_FALSE(Outcome()->failure.has_value());
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome.has_value() && outcome->failure.has_value());
  EXPECT_EQ(outcome->failure->kind, Kind::kTooLarge);
  EXPECT_FALSE(outcome->failure->sent);
}

// [v2:3.2+4] [v2:10.1+2]
TEST_F(RequesterV2Test, NoCallHasTheXidOfProperties) {
  Make({.first_xid = 0xffffffff});
  Open();
  MustSubmit();
  EXPECT_EQ(Next().header.xid, 1u);
  // Nor where version 1 was found in the end: a session takes its XIDs along.
  Make({.versions = kVersions1And2, .settle = false, .first_xid = 0});
  terms_->SetVersion(kRpcRdmaVersion1);
  MustSubmit();
  const Taken taken = Take();
  ASSERT_EQ(taken.sends.size(), 1u);
  EXPECT_EQ(ByteReader(send_.view().slot(taken.sends[0].slot)).U32(), 1u);
}

// Sessions and the callers of clients draw the XIDs of their calls themselves.
TEST(SequentialXids, NoneIsThatOfProperties) {
  SequentialXids xids(0xfffffffe);
  EXPECT_EQ(xids.Next(), 0xfffffffeu);
  EXPECT_EQ(xids.Next(), 0xffffffffu);
  EXPECT_EQ(xids.Next(), 1u);
  EXPECT_EQ(xids.Next(), 2u);
}

// [v2:3.2#1] [v2:9.4+3]
TEST_F(RequesterV2Test, FlagsOfACallAreThoseThatAreRegistered) {
  MustSubmit({.flags = 0xffffffff});
  EXPECT_EQ(Next().header.flags, kUrgent);
  Reply(kFirstXid);
  EXPECT_FALSE(Outcome()->failure.has_value());
  MustSubmit();
  EXPECT_EQ(Next().header.flags, 0u);
}

// A flag that a peer shows that it takes by the first word of a property.
constexpr uint32_t kGently = 0x40000000;
constexpr uint32_t kMood = 0x80000007;
constexpr PropertyRow kMoods[] = {
    {.id = kMood, .name = "mood", .valid = [](ConstBytes data) { return data.size() == 4; }}};
constexpr FlagRow kGentleFlags[] = {{.flag = kGently,
                                     .name = "GENTLY",
                                     .use = [](uint32_t) { return FlagUse::kMay; },
                                     .property = kMood,
                                     .shows = [](ConstBytes data) { return ByteReader(data).U32() != 0; }}};
constexpr Feature kGentle{.name = "gentle", .properties = kMoods, .flags = kGentleFlags};

// [v2:3.2#1] [v2:9.4+3]
TEST_F(RequesterV2Test, AFlagGoesToAPeerThatHasShownThatItTakesItAndToNoOther) {
  const Property mood{.id = kMood, .data = {std::byte{0}, std::byte{0}, std::byte{0}, std::byte{1}}};
  const struct {
    const char* said;
    std::optional<PropertySet> set;
    uint32_t sent;
  } kPeers[] = {
      {"nothing yet", std::nullopt, kUrgent},
      {"no property of the kind", PropertySet{}, kUrgent},
      {"its default", PropertySet{{.id = kMood}}, kUrgent},
      {"no", PropertySet{{.id = kMood, .data = std::vector<std::byte>(4)}}, kUrgent},
      {"yes by another", PropertySet{{.id = kMood + 1, .data = mood.data}}, kUrgent},
      {"yes", PropertySet{mood}, kUrgent | kGently},
  };
  for (const auto& peer : kPeers) {
    SCOPED_TRACE(peer.said);
    Make({.more_features = {kGentle}});
    MustSubmit();
    Next();
    // It waits for the credit, and what holds is what has been said when it goes out.
    MustSubmit({.flags = kUrgent | kGently});
    NothingIsSent();
    if (peer.set) {
      ASSERT_TRUE(terms_->OnPeerProperties(*peer.set));
    }
    Reply(kFirstXid);
    EXPECT_EQ(Next().header.flags, peer.sent);
    EXPECT_FALSE(Outcome()->failure.has_value());
    auto ping = Ping();
    ping.flags = kGently;
    ASSERT_TRUE(requester_->SubmitExtension(std::move(ping), At(0)).has_value());
    EXPECT_EQ(Next().header.flags, peer.sent & kGently);
  }
}

// [v2:3.2#1]
TEST_F(RequesterV2Test, FlagsThatNobodyHasDefinedAreCountedAndPassedOver) {
  Open();
  uint64_t counted = 0;
  for (uint32_t flag = 2; flag != kUrgent; flag <<= 1) {
    MustSubmit();
    const uint32_t xid = Next().header.xid;
    auto bytes = Encoded({.xid = xid, .credits = kSlots, .flags = kResponse, .body = RdmaMsg{}}, Message(xid, 1));
    ByteWriter(MutableBytes(bytes).subspan(16, 4)).U32(kResponse | flag);
    ReceiveRaw(bytes);
    const auto outcome = Outcome();
    ASSERT_TRUE(outcome.has_value() && !outcome->failure) << flag;
    EXPECT_EQ(requester_->stats().unknown_flags, ++counted);
  }
  EXPECT_EQ(counted, 30u);
}

// --- The probe ---

// [v2:7+3] [v2:7+4] [v2:7#1]
TEST_F(RequesterV2Test, TheProbeIsShortAndHasNoChunks) {
  Make({.versions = kVersions1And2, .settle = false});
  EXPECT_EQ(requester_->limits().send_inline, kProbeSizeMax);
  const size_t most = (kProbeSizeMax - kHeaderLayoutV2.min_size() - 8) / 4;
  EXPECT_EQ(Submit({.words = most + 1}).error(), SubmitRefusal::kTooLarge);
  EXPECT_EQ(Submit({.reply_base_max = 5000}).error(), SubmitRefusal::kTooLarge);
  EXPECT_EQ(requester_->SubmitExtension(Ping(), At(0)).error(), SubmitRefusal::kNotSpoken);
  MustSubmit({.words = most});
  const Sent sent = Next();
  EXPECT_EQ(sent_[0].size(), kProbeSizeMax);
  EXPECT_EQ(sent.header.version, 2u);
  Reply(kFirstXid);
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome.has_value() && !outcome->failure);
  EXPECT_EQ(outcome->answered_in, 2u);
  EXPECT_EQ(requester_->credits().granted(), kSlots);
  terms_->SetVersion(kRpcRdmaVersion2);
  MustSubmit();
  EXPECT_EQ(Next().header.version, 2u);
}

// [v2:7.2#1] [v2:7#1] In whatever layout; and it grants nothing.
TEST_F(RequesterV2Test, AProbeIsRefusedInTheLayoutOfEitherVersion) {
  struct Case {
    std::vector<uint32_t> words;
    uint32_t answered_in;
    Kind kind;
  };
  const Case cases[] = {
      {{kFirstXid, 1, 9, 4, 1, 1, 1}, 1, Kind::kErrVers},    {{kFirstXid, 2, 9, 4, 1, 1, 1}, 1, Kind::kErrVers},
      {{kFirstXid, 2, 9, 4, 1, 1, 1, 1}, 2, Kind::kErrVers}, {{kFirstXid, 1, 9, 4, 2}, 1, Kind::kErrChunk},
      {{kFirstXid, 2, 9, 4, 1, 2}, 2, Kind::kErrBadXdr},     {{kFirstXid, 2, 9, 4, 1, 9}, 2, Kind::kErrSystem},
  };
  for (const Case& each : cases) {
    Make({.versions = kVersions1And2, .settle = false});
    MustSubmit();
    Next();
    std::vector<std::byte> bytes(each.words.size() * 4);
    ByteWriter out(bytes);
    for (const uint32_t word : each.words) out.U32(word);
    ReceiveRaw(bytes);
    const auto outcome = Outcome();
    ASSERT_TRUE(outcome.has_value() && outcome->failure.has_value());
    EXPECT_EQ(outcome->failure->kind, each.kind);
    EXPECT_EQ(outcome->answered_in, each.answered_in);
    if (each.kind == Kind::kErrVers) {
      EXPECT_EQ(outcome->failure->versions, (ErrVers{1, 1}));
      terms_->SetVersion(kRpcRdmaVersion1);
      MustSubmit();
      MustSubmit();
      const Taken taken = Take();
      ASSERT_EQ(taken.sends.size(), 1u) << "one at a time";
      EXPECT_EQ(ByteReader(ConstBytes(send_.view().slot(taken.sends[0].slot)).subspan(4)).U32(), 1u);
    }
  }
}

TEST_F(RequesterV2Test, AnAnswerToTheProbeThatIsGarbageEndsIt) {
  Make({.versions = kVersions1And2, .settle = false});
  MustSubmit();
  Next();
  std::vector<std::byte> bytes(28);
  ByteWriter out(bytes);
  for (const uint32_t word : {kFirstXid, 7u, 1u, 0u, 0u, 0u, 0u}) out.U32(word);
  ReceiveRaw(bytes);
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome.has_value() && outcome->failure.has_value());
  EXPECT_EQ(outcome->failure->kind, Kind::kBadHeader);
  EXPECT_EQ(outcome->answered_in, 0u);
}

// --- Whose message is it? ---

// [v2:3.2#2] [v2:3.2#4] [v2:3.2#5] [v2:3.2+3]
TEST_F(RequesterV2Test, WhatIsNotMarkedAsAResponseIsNone) {
  Open();
  MustSubmit();
  const uint32_t xid = Next().header.xid;
  const auto unmarked = [&](Header::Body body, ConstBytes message = {}) {
    Receive({.xid = xid, .credits = 1, .flags = 0, .body = std::move(body)}, message);
    Take();
  };
  unmarked(RdmaMsg{}, Message(xid, kReplyWord));
  unmarked(RdmaMsg{}, Message(xid, kCallWord));
  unmarked(RdmaNomsg{});
  unmarked(ErrSystem{});
  unmarked(Extension{.type = kPing, .body = Pattern(8)});
  unmarked(ConnProp{});
  EXPECT_EQ(requester_->stats().ignored, 6u);
  EXPECT_FALSE(terms_->peer_has_spoken());
  // Nor what is malformed behind the flag.
  auto cut = Encoded({.xid = xid, .credits = 1, .flags = 0, .body = RdmaMsg{}}, {});
  cut.resize(24);
  ReceiveRaw(cut);
  EXPECT_EQ(requester_->stats().malformed, 1u);
  EXPECT_EQ(requester_->outstanding(), 1u);
  EXPECT_EQ(requester_->credits().in_flight(), 1u);
  EXPECT_EQ(requester_->credits().granted(), kSlots);
  Take();
  Reply(xid);
  EXPECT_FALSE(Outcome()->failure.has_value());
}

// [v2:3.2#2]
TEST_F(RequesterV2Test, AResponseThatHoldsNoReplyEndsItsCall) {
  for (const uint32_t word : {kCallWord, 2u}) {
    Make();
    Open();
    MustSubmit();
    const uint32_t xid = Next().header.xid;
    // Of another call: dropped.
    Receive({.xid = xid + 1, .credits = 1, .flags = kResponse, .body = RdmaMsg{}}, Message(xid + 1, word));
    EXPECT_EQ(requester_->stats().unknown_xids, 1u);
    EXPECT_EQ(requester_->outstanding(), 1u);
    Receive({.xid = xid, .credits = 1, .flags = kResponse, .body = RdmaMsg{}}, Message(xid, word));
    const auto outcome = Outcome();
    ASSERT_TRUE(outcome.has_value() && outcome->failure.has_value());
    EXPECT_EQ(outcome->failure->kind, Kind::kBadDirection);
    EXPECT_EQ(outcome->failure->direction,
              word == kCallWord ? DirectionFault::kCallMarkedResponse : DirectionFault::kNoDirection);
    EXPECT_EQ(requester_->stats().malformed, 1u);
  }
}

// [v2:3.2#2] It is seen when the chunk is looked at.
TEST_F(RequesterV2Test, AReplyChunkThatHoldsACallEndsItsCall) {
  Open();
  for (const uint32_t word : {kCallWord, kReplyWord}) {
    MustSubmit({.reply_base_max = 8000});
    const Header call = Next().header;
    const auto message = Message(call.xid, word, 40);
    const FakeMemory::Live* chunk = memory_.Find((*call.chunks()->reply)[0], MemoryUse::kWrittenByPeer);
    ASSERT_NE(chunk, nullptr);
    CopyBytes(MutableBytes(const_cast<std::byte*>(chunk->memory.data()), chunk->memory.size()), message);
    Receive({.xid = call.xid,
             .credits = kSlots,
             .flags = kResponse,
             .body = RdmaNomsg{Returned(call, {}, message.size())}});
    Fence();
    const auto outcome = Outcome();
    ASSERT_TRUE(outcome.has_value());
    if (word == kReplyWord) {
      EXPECT_FALSE(outcome->failure.has_value());
      EXPECT_EQ(outcome->reply.base.size(), message.size());
      continue;
    }
    ASSERT_TRUE(outcome->failure.has_value());
    EXPECT_EQ(outcome->failure->kind, Kind::kBadDirection);
    EXPECT_TRUE(outcome->reply.base.empty());
  }
}

// [v2:5.3.1+2] [v2:5.3.2+2] As in version 1.
TEST_F(RequesterV2Test, AReplyWhoseListsAreNotOursEndsItsCall) {
  Open();
  ChunkLists reads;
  reads.reads.push_back({0, {1, 8, 8}});
  const std::pair<Header::Body, ChunkFault> cases[] = {
      {RdmaNomsg{}, ChunkFault::kNoReplyChunk},
      {RdmaMsg{reads}, ChunkFault::kUnexpectedReadList},
      {Extension{.type = kPing, .body = Pattern(8)}, ChunkFault::kNotAMessage},
  };
  for (const auto& [body, fault] : cases) {
    MustSubmit();
    const uint32_t xid = Next().header.xid;
    Receive({.xid = xid, .credits = kSlots, .flags = kResponse, .body = body},
            std::holds_alternative<RdmaMsg>(body) ? Message(xid, kReplyWord) : std::vector<std::byte>());
    const auto outcome = Outcome();
    ASSERT_TRUE(outcome.has_value() && outcome->failure.has_value());
    EXPECT_EQ(outcome->failure->kind, Kind::kBadChunks);
    EXPECT_EQ(outcome->failure->chunk, fault);
  }
}

// [v2:7.3#2] [v2:10.1#1] [v2:10.1+2] What is of another version says nothing of a call.
TEST_F(RequesterV2Test, AMessageOfAnotherVersionIsDropped) {
  Open();
  MustSubmit();
  const uint32_t xid = Next().header.xid;
  for (const uint32_t version : {0u, 1u, 3u, 0xffffffffu}) {
    auto bytes = Encoded({.xid = xid, .credits = 1, .flags = kResponse, .body = RdmaMsg{}}, Message(xid, kReplyWord));
    ByteWriter(MutableBytes(bytes).subspan(4, 4)).U32(version);
    ReceiveRaw(bytes);
    EXPECT_EQ(requester_->outstanding(), 1u) << version;
    Take();
  }
  EXPECT_EQ(requester_->stats().malformed, 4u);
  EXPECT_EQ(requester_->posted_receives(), kSlots);
  // [v2:5.2#3] So is a type that is not known.
  auto unknown = Encoded({.xid = xid, .credits = 1, .flags = kResponse, .body = RdmaMsg{}}, {});
  ByteWriter(MutableBytes(unknown).subspan(12, 4)).U32(3);
  ReceiveRaw(unknown);
  EXPECT_EQ(requester_->outstanding(), 1u);
  Take();
  // Of this one: it is the answer, and cannot be read.
  auto cut = Encoded({.xid = xid, .credits = 1, .flags = kResponse, .body = RdmaMsg{}}, {});
  cut.resize(24);
  ReceiveRaw(cut);
  EXPECT_EQ(Failure(), Kind::kBadHeader);
}

// --- Remote invalidation ---

// [v2:3.3+3] [v2:3.3+4] [v2:8.4+1] [v2:8.4+3]
TEST_F(RequesterV2Test, ACallNamesTheFirstOfItsWindows) {
  Open();
  const auto item = Pattern(5000);
  auto result = Filled(9000);
  MustSubmit({.items = {item}, .results = {result}});
  Sent sent = Next();
  ASSERT_EQ(sent.header.chunks()->reads.size(), 1u);
  EXPECT_EQ(sent.header.inv_handle(), sent.header.chunks()->reads[0].target.handle);
  Reply(sent.header.xid, Returned(sent.header, {9000}), sent.header.inv_handle());
  const Taken taken = Take();
  ASSERT_EQ(taken.invalidates.size(), 2u);
  EXPECT_TRUE(taken.invalidates[0].by_peer);
  EXPECT_FALSE(taken.invalidates[1].by_peer);
  Invalidated(taken);
  EXPECT_FALSE(Outcome()->failure.has_value());
  EXPECT_EQ(requester_->stats().invalidations_remote, 1u);
  EXPECT_EQ(requester_->stats().invalidations_unasked, 0u);

  MustSubmit({.results = {result}});
  sent = Next();
  EXPECT_EQ(sent.header.inv_handle(), sent.header.chunks()->writes[0][0].handle);
  // Regions stay as they are; and nothing is named where nothing is exposed.
  memory_.windows = false;
  MustSubmit({.items = {item}});
  EXPECT_EQ(Next().header.inv_handle(), 0u);
  memory_.windows = true;
  MustSubmit();
  EXPECT_EQ(Next().header.inv_handle(), 0u);
}

// [v2:8.4+5]
TEST_F(RequesterV2Test, InvalidationsThatNobodyHasAskedForAreCounted) {
  Open();
  auto result = Filled(9000);
  auto other = Filled(9000);
  const auto two = [&] {
    MustSubmit({.results = {result}, .reply_base_max = 9000});
    return Next().header;
  };
  uint64_t counted = 0;
  const auto count = [&] { EXPECT_EQ(requester_->stats().invalidations_unasked, ++counted); };

  // Another handle of the call.
  Header call = two();
  Reply(call.xid, Returned(call, {0}), (*call.chunks()->reply)[0].handle);
  count();
  Fence();
  EXPECT_FALSE(Outcome()->failure.has_value()) << "it is a fact all the same";
  // With an error.
  call = two();
  Receive({.xid = call.xid, .credits = 1, .flags = kResponse, .body = ErrSystem{}}, {}, call.inv_handle());
  count();
  Fence();
  EXPECT_EQ(Failure(), Kind::kErrSystem);
  // With the reply to another call.
  call = two();
  const Header second = two();
  Reply(second.xid, Returned(second, {0}), call.inv_handle());
  Fence();
  EXPECT_FALSE(Outcome()->failure.has_value());
  Reply(call.xid, Returned(call, {0}));
  count();
  Fence();
  EXPECT_FALSE(Outcome()->failure.has_value());
  // Of nobody.
  call = two();
  Reply(call.xid, Returned(call, {0}), 0x4711);
  count();
}

// --- Properties ---

// [v2:5.3.4+3] [v2:5.3.4+5] [v2:3.2#4] [v2:8.2+1]
TEST_F(RequesterV2Test, PropertiesGoAheadOfCallsWhichWaitForTheAnswer) {
  MustSubmit();
  Next();
  requester_->SendProperties(At(1000), At(0));
  MustSubmit({.words = 2000});
  NothingIsSent();  // one at a time
  Reply(kFirstXid, {}, {}, 3);
  const Sent sent = Next();
  EXPECT_EQ(sent.header, (Header{.xid = 0,
                                 .version = 2,
                                 .credits = kSlots,
                                 .flags = 0,
                                 .body = ConnProp{MakePropertySet({.receive_buffer_size = kSlotSize})}}));
  EXPECT_LE(sent_[0].size(), kProbeSizeMax);
  EXPECT_EQ(requester_->credits().in_flight(), 1u);
  EXPECT_TRUE(requester_->Waiting());
  EXPECT_EQ(LastTold(trace_, "call.held"), "call.held why=properties queued=1 granted=1 in_flight=1");
  EXPECT_FALSE(requester_->TakeExchangeEnd().has_value());
  Outcome();

  Properties(kResponse, {.receive_buffer_size = 16384, .reverse_requests = ReverseSupport::kGeneral}, 99, 2);
  EXPECT_EQ(requester_->TakeExchangeEnd(), ExchangeEnd::kAnswered);
  EXPECT_FALSE(requester_->TakeExchangeEnd().has_value()) << "told once";
  EXPECT_EQ(terms_->peer().receive_buffer_size, 16384u);
  EXPECT_EQ(requester_->credits().granted(), 2u);
  // The call that waited is planned by them.
  EXPECT_EQ(Next().header.type(), MessageType::kMsg);
  EXPECT_EQ(requester_->credits().in_flight(), 1u);
}

// [v2:7#1] [v2:5.3.3#2] The first grant may come with it.
TEST_F(RequesterV2Test, AnErrorAnswersPropertiesAndGrantsNothing) {
  requester_->SendProperties(At(1000), At(0));
  EXPECT_EQ(Next().header.type(), MessageType::kConnProp);
  Error(0, ErrInvalHtype{}, 1000);
  EXPECT_EQ(requester_->TakeExchangeEnd(), ExchangeEnd::kRefused);
  EXPECT_EQ(requester_->credits().granted(), 1u);
  EXPECT_EQ(requester_->credits().in_flight(), 0u);
  EXPECT_EQ(terms_->peer(), TransportProperties{});
  MustSubmit();
  Next();
  // Later an error of XID 0 is nobody's.
  Error(0, ErrInvalHtype{});
  EXPECT_EQ(requester_->stats().unknown_xids, 1u);
  EXPECT_EQ(requester_->credits().in_flight(), 1u);
}

TEST_F(RequesterV2Test, AnErrorForPropertiesThatCannotBeReadIsARefusal) {
  requester_->SendProperties(At(1000), At(0));
  Next();
  auto cut = Encoded({.xid = 0, .credits = 1, .flags = kResponse, .body = ErrSystem{}}, {});
  cut.resize(20);
  ReceiveRaw(cut);
  EXPECT_EQ(requester_->TakeExchangeEnd(), ExchangeEnd::kRefused);
  EXPECT_EQ(requester_->credits().in_flight(), 0u);
}

// What comes later holds. [v2:5.3.4#1] [v2:5.3.4+7]
TEST_F(RequesterV2Test, PropertiesThatAreNotAnsweredInTimeHoldUpNothing) {
  requester_->SendProperties(At(1000), At(0));
  Next();
  MustSubmit();
  NothingIsSent();
  EXPECT_EQ(requester_->Deadline(), At(1000));
  requester_->OnDeadline(At(999));
  NothingIsSent();
  EXPECT_EQ(requester_->Deadline(), At(1000));
  requester_->OnDeadline(At(1000));
  EXPECT_EQ(requester_->TakeExchangeEnd(), ExchangeEnd::kUnanswered);
  EXPECT_EQ(Next().header.xid, kFirstXid);
  EXPECT_EQ(requester_->credits().in_flight(), 1u);
  EXPECT_EQ(requester_->credits().dones(), 1u) << "the peer may not have read it yet";
  Properties(kResponse, {.receive_buffer_size = 2048}, 0, 1000);
  EXPECT_EQ(requester_->credits().in_flight(), 1u) << "it is not waited for";
  EXPECT_EQ(requester_->credits().granted(), kSlots) << "and grants as much as there are Receives for";
  EXPECT_EQ(requester_->limits().send_inline, 2048u);
  EXPECT_FALSE(requester_->TakeExchangeEnd().has_value());
  // [v2:5.3.4+8]
  Properties(kResponse, {.receive_buffer_size = 8192});
  EXPECT_EQ(requester_->limits().send_inline, 2048u);
  EXPECT_EQ(requester_->stats().properties_again, 1u);
}

TEST_F(RequesterV2Test, PropertiesThatCouldNotBeSentInTimeAreNot) {
  MustSubmit();
  Next();
  requester_->SendProperties(At(1000), At(0));
  requester_->OnDeadline(At(1000));
  EXPECT_EQ(requester_->TakeExchangeEnd(), ExchangeEnd::kUnanswered);
  EXPECT_EQ(requester_->credits().in_flight(), 1u);
  Reply(kFirstXid);
  NothingIsSent();
}

// It is not asked to, and tells its own: nobody has to answer ours. [v2:5.3.4+1] [v2:5.3.4+5]
TEST_F(RequesterV2Test, APeerThatAnnouncesItselfIsNotWaitedFor) {
  requester_->SendProperties(At(1000), At(0));
  Next();
  MustSubmit();
  MustSubmit();
  NothingIsSent();
  Announce({.receive_buffer_size = 16384});
  EXPECT_EQ(requester_->TakeExchangeEnd(), ExchangeEnd::kAnnounced);
  EXPECT_EQ(LastTold(trace_, "properties.over"), "properties.over how=announced");
  // With the one credit of the beginning: whether the peer has read ours is not known.
  EXPECT_EQ(Next().header.xid, kFirstXid);
  EXPECT_EQ(requester_->credits().in_flight(), 1u);
  EXPECT_EQ(requester_->credits().dones(), 1u);
  // The answer to what came behind it shows that it has.
  Reply(kFirstXid, {}, {}, 2);
  EXPECT_EQ(requester_->credits().dones(), 0u);
  Outcome();
  EXPECT_EQ(requester_->credits().in_flight(), 1u);
  // Nothing is waited for any more.
  requester_->OnDeadline(At(1000));
  EXPECT_EQ(requester_->Deadline(), std::nullopt);
  EXPECT_EQ(requester_->TakeExchangeEnd(), std::nullopt);
  EXPECT_EQ(requester_->credits().in_flight(), 1u);
}

// Before ours was out: the probe's answer, which makes room for ours, came behind it.
TEST_F(RequesterV2Test, APeerThatHasAnnouncedItselfIsToldAndNotWaitedFor) {
  for (const bool marked : {false, true}) {
    Make();
    if (marked) {
      Properties(kResponse, {.receive_buffer_size = 16384});
    } else {
      Announce({.receive_buffer_size = 16384});
    }
    EXPECT_FALSE(requester_->TakeExchangeEnd().has_value());
    requester_->SendProperties(At(1000), At(0));
    EXPECT_EQ(Next().header.type(), MessageType::kConnProp);
    EXPECT_EQ(requester_->TakeExchangeEnd(), ExchangeEnd::kAnnounced);
    EXPECT_EQ(requester_->credits().in_flight(), 0u);
    requester_->OnDeadline(At(1000));
    EXPECT_EQ(requester_->Deadline(), std::nullopt);
    EXPECT_EQ(requester_->TakeExchangeEnd(), std::nullopt);
    MustSubmit();
    EXPECT_EQ(Next().header.xid, kFirstXid);
  }
}

// Both are taken: what it tells of itself, and later the answer, which grants.
TEST_F(RequesterV2Test, APeerThatAnnouncesItselfMayAnswerAsWell) {
  requester_->SendProperties(At(1000), At(0));
  Next();
  Announce({.receive_buffer_size = 16384});
  EXPECT_EQ(requester_->credits().granted(), 1u);
  Properties(kResponse, {.receive_buffer_size = 8192}, 0, 3);
  EXPECT_EQ(requester_->credits().granted(), 3u);
  EXPECT_EQ(requester_->limits().send_inline, 16384u) << "the first hold";
  EXPECT_EQ(requester_->TakeExchangeEnd(), ExchangeEnd::kAnnounced);
  // Once: a second answer is to nothing.
  Properties(kResponse, {.receive_buffer_size = 8192}, 0, 4);
  EXPECT_EQ(requester_->credits().granted(), 3u);
  EXPECT_EQ(requester_->stats().properties_again, 2u);
}

// Nor is its refusal a reply to nobody.
TEST_F(RequesterV2Test, APeerThatAnnouncesItselfMayRefuseAsWell) {
  requester_->SendProperties(At(1000), At(0));
  Next();
  Announce({.receive_buffer_size = 16384});
  Error(0, ErrInvalHtype{});
  EXPECT_EQ(LastTold(trace_, "properties.refused").substr(0, 18), "properties.refused");
  EXPECT_EQ(requester_->stats().unknown_xids, 0u);
  EXPECT_EQ(requester_->TakeExchangeEnd(), ExchangeEnd::kAnnounced);
  Error(0, ErrInvalHtype{});
  EXPECT_EQ(requester_->stats().unknown_xids, 1u) << "a second one is";
}

// Whatever they are marked as: a client is the requester of its connection. [v2:4.1#1] [v2:5.3.3#1]
TEST_F(RequesterV2Test, MalformedPropertiesEndTheConnection) {
  const auto whole = Encoded({.xid = 0, .credits = 1, .flags = kResponse, .body = ConnProp{MakePropertySet({})}}, {});
  for (size_t length = 20; length <= whole.size() + 4; ++length) {
    if (length == whole.size()) continue;
    for (const bool asked : {true, false}) {
      for (const uint32_t flags : {kResponse, 0u}) {
        Make();
        if (asked) {
          requester_->SendProperties(At(1000), At(0));
          Next();
        }
        auto bytes = whole;
        bytes.resize(length);
        ByteWriter(MutableBytes(bytes).subspan(16, 4)).U32(flags);
        ReceiveRaw(bytes);
        const Taken taken = Take();
        EXPECT_EQ(taken.disconnects.size(), 1u) << length;
        for (const Disconnect& end : taken.disconnects) EXPECT_EQ(end.why, Disconnect::Why::kBadProperties);
        EXPECT_TRUE(taken.sends.empty());
        EXPECT_FALSE(terms_->peer_has_spoken());
        EXPECT_FALSE(requester_->TakeExchangeEnd().has_value());
      }
    }
  }
}

TEST_F(RequesterV2Test, AnExchangeEndsWithTheConnection) {
  requester_->SendProperties(At(1000), At(0));
  Next();
  requester_->OnDisconnected(At(1));
  EXPECT_FALSE(requester_->Waiting());
  requester_->OnDeadline(At(2000));
  EXPECT_FALSE(requester_->TakeExchangeEnd().has_value());
}

// --- Extensions ---

// [v2:3.2#4] [v2:8.2+1] [v2:9.1+2]
TEST_F(RequesterV2Test, AnExtensionsMessageTakesACreditUntilItIsAnswered) {
  Open(1);
  auto spec = Ping();
  spec.flags = kUrgent | kResponse;
  spec.cookie = 7;
  ASSERT_TRUE(requester_->SubmitExtension(std::move(spec), At(0)).has_value());
  const Sent sent = Next();
  EXPECT_EQ(sent.header, (Header{.xid = xid_,
                                 .version = 2,
                                 .credits = kSlots,
                                 .flags = kUrgent,
                                 .body = Extension{.type = kPing, .body = Pattern(8)}}));
  MustSubmit();
  NothingIsSent();
  Receive({.xid = xid_, .credits = 2, .flags = kResponse, .body = Extension{.type = kPing, .body = Pattern(8, 9)}});
  const auto outcome = requester_->TakeOutcome(At(1));
  ASSERT_TRUE(outcome.has_value() && !outcome->failure);
  EXPECT_EQ(outcome->cookie, 7u);
  EXPECT_EQ(outcome->extension, (Extension{.type = kPing, .body = Pattern(8, 9)}));
  EXPECT_TRUE(outcome->reply.base.empty());
  requester_->Release(outcome->call, At(1));
  EXPECT_EQ(requester_->credits().granted(), 2u);
  EXPECT_EQ(Next().header.xid, xid_ + 1);
  EXPECT_EQ(requester_->stats().calls, 2u) << "it is none";
}

TEST_F(RequesterV2Test, AnExtensionsMessageEndsWithWhateverHasItsXid) {
  Open();
  const std::pair<Header::Body, Kind> cases[] = {
      {ErrInvalHtype{}, Kind::kErrInvalHtype},
      {ErrBadXdr{}, Kind::kErrBadXdr},
      {ErrOther{kTired}, Kind::kErrOther},
      {ErrReadChunks{1}, Kind::kErrReadChunks},
      {ErrWriteChunks{1}, Kind::kErrWriteChunks},
      {ErrSegments{1}, Kind::kErrSegments},
      {ErrWriteResource{1, 99}, Kind::kErrWriteResource},
      {ErrReplyResource{99}, Kind::kErrReplyResource},
      {RdmaMsg{}, Kind::kBadHeader},
      {Extension{.type = kPiece, .body = Pattern(8), .has_message = true}, Kind::kBadHeader},
  };
  for (const auto& [body, kind] : cases) {
    ASSERT_TRUE(requester_->SubmitExtension(Ping(), At(0)).has_value());
    const uint32_t xid = Next().header.xid;
    Receive({.xid = xid, .credits = kSlots, .flags = kResponse, .body = body},
            kind == Kind::kBadHeader ? Message(xid, kReplyWord) : std::vector<std::byte>());
    const auto outcome = Outcome();
    ASSERT_TRUE(outcome.has_value() && outcome->failure.has_value());
    EXPECT_EQ(outcome->failure->kind, kind);
    EXPECT_EQ(requester_->posted_receives(), kSlots);
  }
  EXPECT_EQ(requester_->credits().in_flight(), 0u);
}

TEST_F(RequesterV2Test, AnExtensionsMessageThatIsNotAnsweredLeavesTheConnectionAlone) {
  Open();
  auto spec = Ping();
  spec.deadline = At(500);
  ASSERT_TRUE(requester_->SubmitExtension(std::move(spec), At(0)).has_value());
  const uint32_t xid = Next().header.xid;
  requester_->OnDeadline(At(500));
  EXPECT_TRUE(Take().disconnects.empty());
  EXPECT_EQ(Failure(), Kind::kTimedOut);
  EXPECT_EQ(requester_->abandoned(), 0u);
  requester_->OnDeadline(At(100000));
  EXPECT_TRUE(Take().disconnects.empty());
  // One that comes after all is one to nobody.
  Receive({.xid = xid, .credits = 3, .flags = kResponse, .body = Extension{.type = kPing, .body = Pattern(8)}});
  EXPECT_EQ(requester_->credits().granted(), kSlots);
  EXPECT_EQ(requester_->stats().unknown_xids, 1u);
  EXPECT_EQ(requester_->posted_receives(), kSlots);
}

// A responder may pass over a type that it does not know.
TEST_F(RequesterV2Test, ExtensionsMessagesThatNobodyAnswersLeaveTheCreditsToCalls) {
  Open(2);
  for (const bool times_out : {true, false}) {
    std::vector<CallId> pings;
    for (int i = 0; i < 2; ++i) {
      auto spec = Ping();
      if (times_out) spec.deadline = At(500);
      const auto id = requester_->SubmitExtension(std::move(spec), At(0));
      ASSERT_TRUE(id.has_value());
      pings.push_back(*id);
    }
    EXPECT_EQ(Take().sends.size(), 2u);
    xid_ += 2;
    MustSubmit();
    NothingIsSent();
    if (times_out) {
      requester_->OnDeadline(At(500));
    } else {
      requester_->Cancel(pings[0], At(1));
      EXPECT_TRUE(Take().sends.empty()) << "the other may be answered yet";
      requester_->Cancel(pings[1], At(1));
    }
    // One at a time until something shows that the responder has dealt with them.
    EXPECT_EQ(Next().header.xid, xid_);
    MustSubmit();
    NothingIsSent();
    Reply(xid_, {}, {}, 2);
    EXPECT_EQ(Next().header.xid, xid_ + 1);
    MustSubmit();
    EXPECT_EQ(Next().header.xid, xid_ + 2) << "both credits are back";
    for (int i = 1; i < 3; ++i) Reply(xid_ + i, {}, {}, 2);
    xid_ += 3;
    while (Outcome()) continue;
  }
  EXPECT_EQ(requester_->credits().dones(), 0u);
  EXPECT_EQ(requester_->credits().in_flight(), 0u);
}

// [v2:9.1+2]
TEST_F(RequesterV2Test, AnExtensionsMessageIsOneThatTheProgramKnows) {
  Open();
  const auto refusal = [&](uint32_t type, size_t size) {
    return requester_->SubmitExtension({.type = type, .body = Pattern(size)}, At(0)).error();
  };
  EXPECT_EQ(refusal(kPing + 100, 8), SubmitRefusal::kNotSpoken);
  EXPECT_EQ(refusal(kRdma2Msg, 8), SubmitRefusal::kNotSpoken);
  EXPECT_EQ(refusal(kPiece, 8), SubmitRefusal::kNotSpoken) << "a message would follow";
  EXPECT_EQ(refusal(kPing, 4096 - 19), SubmitRefusal::kTooLarge);
  Make({.versions = kVersions1And2, .settle = false});
  terms_->SetVersion(kRpcRdmaVersion1);
  EXPECT_EQ(refusal(kPing, 8), SubmitRefusal::kNotSpoken);
}

// --- Errors that end a call ---

// [v2:5.3.3#22] [v2:6.4+8] [v2:8.5+1] Of a call that exposes
// nothing: none of them can be helped.
TEST_F(RequesterV2Test, EachErrorEndsItsCallWithWhatItSays) {
  const std::pair<Header::Body, Kind> cases[] = {
      {ErrVers{1, 3}, Kind::kErrVers},
      {ErrBadXdr{}, Kind::kErrBadXdr},
      {ErrInvalHtype{}, Kind::kErrInvalHtype},
      {ErrReadChunks{3}, Kind::kErrReadChunks},
      {ErrWriteChunks{3}, Kind::kErrWriteChunks},
      {ErrSegments{3}, Kind::kErrSegments},
      {ErrWriteResource{1, 4}, Kind::kErrWriteResource},
      {ErrReplyResource{0}, Kind::kErrReplyResource},
      {ErrSystem{}, Kind::kErrSystem},
      {ErrOther{kTired}, Kind::kErrOther},
      {ErrOther{77}, Kind::kErrOther},
  };
  Open(3);
  const PlanLimits before = requester_->limits();
  for (const auto& [body, kind] : cases) {
    MustSubmit();
    // [v2:5.3.3#2] Its credit word counts for nothing.
    Error(Next().header.xid, body, kind == Kind::kErrSystem ? 0 : 1000);
    EXPECT_EQ(requester_->credits().granted(), 3u);
    EXPECT_EQ(requester_->credits().in_flight(), 0u);
    const auto outcome = Outcome();
    ASSERT_TRUE(outcome.has_value() && outcome->failure.has_value());
    EXPECT_EQ(outcome->failure->kind, kind);
    EXPECT_EQ(outcome->failure->error, body);
    EXPECT_TRUE(outcome->failure->sent);
    EXPECT_EQ(outcome->resends, 0u);
    EXPECT_NE(std::string(ToString(kind)), "unknown");
  }
  EXPECT_TRUE(before == requester_->limits()) << "what it cannot have caused is not believed";
  EXPECT_EQ(requester_->stats().errors, std::size(cases));
  // [v2:7#1] Nor before the first grant.
  Make();
  MustSubmit();
  MustSubmit();
  MustSubmit();
  Error(Next().header.xid, ErrSystem{}, 1000);
  EXPECT_EQ(Next().header.xid, kFirstXid + 1);
}

// --- Errors after which a call is sent again ---

// [v2:5.3.3#8] [v2:5.3.3#9]
TEST_F(RequesterV2Test, AfterReadChunksACallIsALongOneWithoutThem) {
  Open();
  const auto item = Pattern(6001);
  MustSubmit({.items = {item}, .deadline = At(700)});
  const Header first = Next().header;
  ASSERT_EQ(first.chunks()->reads.size(), 1u);
  EXPECT_NE(first.chunks()->reads[0].position, 0u);
  Error(first.xid, ErrReadChunks{0});
  EXPECT_EQ(requester_->credits().in_flight(), 0u) << "it has given its credit back";
  const Sent again = Resent(first);
  EXPECT_EQ(again.header.type(), MessageType::kNomsg);
  EXPECT_EQ(again.header.credits, first.credits);
  uint64_t bytes = 0;
  for (const ReadSegment& read : again.header.chunks()->reads) {
    EXPECT_EQ(read.position, 0u);
    bytes += read.target.length;
  }
  EXPECT_EQ(bytes, 24u + 6004u);
  EXPECT_EQ(requester_->credits().in_flight(), 1u);
  EXPECT_EQ(requester_->Deadline(), At(700));
  Reply(first.xid);
  Fence();
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome.has_value() && !outcome->failure);
  EXPECT_EQ(outcome->resends, 1u);
  EXPECT_EQ(requester_->stats().resends, 1u);
  EXPECT_EQ(requester_->stats().calls, 2u) << "one call, however often";
  EXPECT_TRUE(LastTold(trace_, "call.resent").starts_with("call.resent call=")) << LastTold(trace_, "call.resent");

  // From then on calls are planned so; and one refused again has had its chance.
  MustSubmit({.items = {item}});
  const Header later = Next().header;
  EXPECT_EQ(later.type(), MessageType::kNomsg);
  Error(later.xid, ErrReadChunks{0});
  Fence();
  const auto refused = Outcome();
  ASSERT_TRUE(refused.has_value() && refused->failure.has_value());
  EXPECT_EQ(refused->failure->kind, Kind::kErrReadChunks);
  EXPECT_EQ(refused->failure->error, Header::Body(ErrReadChunks{0}));
}

TEST_F(RequesterV2Test, LaterCallsHaveAsManyReadChunksAsAreTaken) {
  Open();
  const auto item = Pattern(3000);
  MustSubmit({.items = {item, item, item}});
  const Header first = Next().header;
  ASSERT_EQ(first.chunks()->reads.size(), 2u);
  Error(first.xid, ErrReadChunks{1});
  EXPECT_EQ(Resent(first).header.type(), MessageType::kNomsg);
  MustSubmit({.items = {item, item}});
  EXPECT_EQ(Next().header.chunks()->reads.size(), 1u);
  MustSubmit({.items = {item, item, item}});
  const Header limited = Next().header;
  EXPECT_EQ(limited.type(), MessageType::kNomsg);
  EXPECT_EQ(std::ranges::count_if(limited.chunks()->reads, [](const ReadSegment& read) { return read.position != 0; }),
            1);
}

// [v2:5.3.3#9] Also where it would fare better without what it has beside that chunk.
TEST_F(RequesterV2Test, ReadChunksEndsACallByPositionZeroWhateverElseItCarries) {
  Open();
  const auto item = Pattern(6001);
  MustSubmit({.words = 2000, .items = {item}});
  const Header first = Next().header;
  ASSERT_EQ(first.chunks()->reads.size(), 2u);
  EXPECT_EQ(first.chunks()->reads[0].position, 0u);
  Error(first.xid, ErrReadChunks{0});
  Fence();
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome.has_value() && outcome->failure.has_value());
  EXPECT_EQ(outcome->failure->kind, Kind::kErrReadChunks);
  EXPECT_EQ(outcome->resends, 0u);
  NothingIsSent();
  // The next one is told by what was said.
  MustSubmit({.words = 2000, .items = {item}});
  const Header second = Next().header;
  EXPECT_TRUE(std::ranges::all_of(second.chunks()->reads, [](const ReadSegment& read) { return read.position == 0; }));
}

// [v2:5.3.3#12]
TEST_F(RequesterV2Test, AfterWriteChunksAReplyChunkHasRoomForAll) {
  for (const Header::Body& error : {Header::Body(ErrWriteChunks{1}), Header::Body(ErrReplyResource{0})}) {
    Make();
    Open();
    auto one = Filled(5000);
    auto two = Filled(7001);
    MustSubmit({.results = {one, two}});
    const Header first = Next().header;
    ASSERT_EQ(first.chunks()->writes.size(), 2u);
    Error(first.xid, error);
    const Sent again = Resent(first);
    EXPECT_TRUE(again.header.chunks()->writes.empty());
    ASSERT_TRUE(again.header.chunks()->reply.has_value());
    EXPECT_EQ(TotalLength(*again.header.chunks()->reply), 100u + 5000u + 7004u);
    // A second time there is nothing to leave out.
    Error(first.xid, error);
    Fence();
    EXPECT_EQ(Failure(), KindOfError(error));
    // Later calls with so many results have none either; with fewer it depends on what was said.
    MustSubmit({.results = {one, two}});
    EXPECT_TRUE(Next().header.chunks()->writes.empty());
    MustSubmit({.results = {one}});
    EXPECT_EQ(Next().header.chunks()->writes.size(), std::holds_alternative<ErrWriteChunks>(error) ? 1u : 0u);
  }
}

// [v2:5.3.3#12] What another call's error has said holds for those that wait, planned or not.
TEST_F(RequesterV2Test, CallsThatWaitHaveNoMoreWriteChunksThanAreTaken) {
  Open(1);
  auto one = Filled(5000);
  auto two = Filled(7001);
  MustSubmit({.results = {one, two}});
  const Header first = Next().header;
  auto three = Filled(5000);
  auto four = Filled(7001);
  MustSubmit({.results = {three, four}});
  NothingIsSent();
  // It goes while the first one is fenced.
  Error(first.xid, ErrWriteChunks{1});
  const Header second = Next().header;
  EXPECT_TRUE(second.chunks()->writes.empty());
  EXPECT_TRUE(second.chunks()->reply.has_value());
}

// [v2:5.3.3#13]
TEST_F(RequesterV2Test, AfterSegmentsAMessageIsGatheredIntoFewer) {
  Open();
  const auto item = Pattern(3001);
  auto result = Filled(9000);
  MustSubmit({.words = 40, .items = {item, item}, .results = {result}, .direct_placement = false});
  const Header first = Next().header;
  ASSERT_EQ(first.type(), MessageType::kNomsg);
  ASSERT_EQ(first.chunks()->reads.size(), 5u);
  Error(first.xid, ErrSegments{1});
  const Sent again = Resent(first);
  ASSERT_EQ(again.header.chunks()->reads.size(), 1u);
  const Segment whole = again.header.chunks()->reads[0].target;
  EXPECT_EQ(whole.length, 168u + 2 * 3004u);
  // The copy is the message.
  const FakeMemory::Live* live = memory_.Find(whole, MemoryUse::kReadByPeer);
  ASSERT_NE(live, nullptr);
  EXPECT_EQ(ByteReader(live->memory).U32(), first.xid);
  EXPECT_TRUE(std::ranges::equal(live->memory.subspan(168, 3001), item));
  EXPECT_EQ(live->memory[168 + 3001], std::byte{0});
  EXPECT_TRUE(std::ranges::equal(live->memory.subspan(168 + 3004, 3001), item));
  // Once; and no call of more is made any more.
  Error(first.xid, ErrSegments{1});
  Fence();
  EXPECT_EQ(Failure(), Kind::kErrSegments);
  MustSubmit({.items = {item, item}, .direct_placement = false});
  EXPECT_EQ(Next().header.chunks()->reads.size(), 1u);
}

TEST_F(RequesterV2Test, SegmentsThatCannotBeFewerEndTheCall) {
  Requester::Config config;
  config.limits.segment_length_max = 2000;
  Make({.config = config});
  Open();
  const auto item = Pattern(9000);
  for (const uint32_t max : {0u, 9u, 2u}) {
    MustSubmit({.items = {item}});
    const Header first = Next().header;
    EXPECT_EQ(first.chunks()->reads.size(), 5u);
    Error(first.xid, ErrSegments{max});
    Fence();
    EXPECT_EQ(Failure(), Kind::kErrSegments);
  }
  EXPECT_EQ(Submit({.items = {item}}).error(), SubmitRefusal::kTooLarge);
  EXPECT_EQ(requester_->stats().resends, 0u);
}

// [v2:5.3.3#17] [v2:5.3.3+9]
TEST_F(RequesterV2Test, AfterWriteResourceAResultHasLongerMemoryOfThisEnd) {
  Open();
  auto one = Filled(5000);
  auto two = Filled(2000);
  const auto lasting_object = std::make_shared<int>();
  const std::shared_ptr<LastingMemory> lasting(lasting_object, reinterpret_cast<LastingMemory*>(lasting_object.get()));
  MustSubmit({.results = {one, two}, .lasting = lasting});
  const Header first = Next().header;
  Error(first.xid, ErrWriteResource{2, 9001});
  const Sent second = Resent(first);
  EXPECT_EQ(TotalLength(second.header.chunks()->writes[0]), 5000u);
  EXPECT_EQ(TotalLength(second.header.chunks()->writes[1]), 9004u);
  const FakeMemory::Live* live = memory_.Find(second.header.chunks()->writes[1][0], MemoryUse::kWrittenByPeer);
  ASSERT_NE(live, nullptr);
  EXPECT_EQ(live->lasting, nullptr) << "it is not the program's";
  EXPECT_EQ(memory_.Find(second.header.chunks()->writes[0][0], MemoryUse::kWrittenByPeer)->lasting, lasting.get());
  // The other was too short as well; then the first again.
  Error(first.xid, ErrWriteResource{1, 6000});
  const Sent third = Resent(second.header);
  EXPECT_EQ(TotalLength(third.header.chunks()->writes[0]), 6000u);
  EXPECT_EQ(TotalLength(third.header.chunks()->writes[1]), 9004u);
  Error(first.xid, ErrWriteResource{2, 9005});
  const Sent fourth = Resent(third.header);
  const auto written = Pattern(9005, 3);
  live = memory_.Find(fourth.header.chunks()->writes[1][0], MemoryUse::kWrittenByPeer);
  ASSERT_NE(live, nullptr);
  CopyBytes(MutableBytes(const_cast<std::byte*>(live->memory.data()), live->memory.size()), written);
  Reply(first.xid, Returned(fourth.header, {10, 9005}));
  Fence();
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome.has_value() && !outcome->failure);
  EXPECT_EQ(outcome->resends, 3u);
  ASSERT_EQ(outcome->grown.size(), 2u);
  EXPECT_EQ(outcome->reply.chunks[0].data.data(), outcome->grown[0].get());
  EXPECT_TRUE(std::ranges::equal(outcome->reply.chunks[1].data, written));
  EXPECT_EQ(outcome->reply.chunks[1].data.data(), outcome->grown[1].get());
  EXPECT_EQ(outcome->placed[1], 9005u);
}

// [v2:5.3.3#17] [v2:5.3.3+10]
TEST_F(RequesterV2Test, WriteResourceThatIsOfNoUseEndsTheCall) {
  const ErrWriteResource useless[] = {{0, 9000}, {3, 9000}, {1, 0}, {1, 5000}, {1, 0xffffffff}, {1, (1u << 20) + 1}};
  for (const ErrWriteResource& error : useless) {
    Make();
    Open();
    auto one = Filled(5000);
    auto two = Filled(6000);
    MustSubmit({.results = {one, two}});
    Error(Next().header.xid, error);
    Fence();
    const auto outcome = Outcome();
    ASSERT_TRUE(outcome.has_value() && outcome->failure.has_value());
    EXPECT_EQ(outcome->failure->error, Header::Body(error));
    EXPECT_TRUE(outcome->grown.empty());
  }
  // As much as is allowed, over all of the call.
  Make();
  Open();
  auto one = Filled(5000);
  auto two = Filled(6000);
  MustSubmit({.results = {one, two}});
  const Header first = Next().header;
  Error(first.xid, ErrWriteResource{1, 1u << 20});
  const Sent again = Resent(first);
  EXPECT_EQ(TotalLength(again.header.chunks()->writes[0]), 1u << 20);
  Error(first.xid, ErrWriteResource{2, 6001});
  Fence();
  EXPECT_EQ(Failure(), Kind::kErrWriteResource);
}

// [v2:5.3.3#20]
TEST_F(RequesterV2Test, AfterReplyResourceTheReplyChunkIsLonger) {
  // None was offered, as the reply was not expected to need one.
  Open();
  MustSubmit();
  const Header first = Next().header;
  EXPECT_FALSE(first.chunks()->reply.has_value());
  Error(first.xid, ErrReplyResource{2001});
  const Sent again = Resent(first);
  EXPECT_EQ(TotalLength(*again.header.chunks()->reply), 2004u);
  Error(first.xid, ErrReplyResource{2005});
  EXPECT_EQ(TotalLength(*Resent(again.header).header.chunks()->reply), 2008u);
  // Not longer than what was offered, or more than is allowed.
  Error(first.xid, ErrReplyResource{2008});
  Fence();
  EXPECT_EQ(Failure(), Kind::kErrReplyResource);
  MustSubmit();
  Error(Next().header.xid, ErrReplyResource{0xffffffff});
  EXPECT_EQ(Failure(), Kind::kErrReplyResource);
  // Write chunks stay.
  auto result = Filled(9000);
  MustSubmit({.results = {result}});
  const Header both = Next().header;
  Error(both.xid, ErrReplyResource{500});
  const Sent with = Resent(both);
  EXPECT_EQ(with.header.chunks()->writes.size(), 1u);
  EXPECT_EQ(TotalLength(*with.header.chunks()->reply), 500u);
}

TEST_F(RequesterV2Test, WhatWasExecutedIsNotSentAgainWhereThatIsRuledOut) {
  Requester::Config config;
  config.resend_executed = false;
  Make({.config = config});
  Open();
  auto result = Filled(9000);
  // REPLY_RESOURCE of zero as well: that a responder sees before it executes anything that it takes no Write chunks is
  // nowhere written.
  for (const Header::Body& error : {Header::Body(ErrWriteResource{1, 9500}), Header::Body(ErrReplyResource{500}),
                                    Header::Body(ErrReplyResource{0})}) {
    MustSubmit({.results = {result}});
    Error(Next().header.xid, error);
    Fence();
    EXPECT_EQ(Failure(), KindOfError(error));
  }
  // What it said of its limits holds for later calls all the same.
  MustSubmit({.results = {result}});
  EXPECT_TRUE(Next().header.chunks()->writes.empty());
  // What was not executed, is.
  Make({.config = config});
  Open();
  MustSubmit({.results = {result}});
  const Header first = Next().header;
  Error(first.xid, ErrWriteChunks{0});
  EXPECT_TRUE(Resent(first).header.chunks()->writes.empty());
}

TEST_F(RequesterV2Test, NoMemoryOfItsOwnWhereThatIsRuledOut) {
  Requester::Config config;
  config.grown_bytes_max = 0;
  Make({.config = config});
  Open();
  auto result = Filled(9000);
  const auto item = Pattern(3001);
  for (const Header::Body& error :
       {Header::Body(ErrWriteResource{1, 9500}), Header::Body(ErrReplyResource{500}), Header::Body(ErrSegments{1})}) {
    MustSubmit({.words = 1000, .items = {item}, .results = {result}, .direct_placement = false});
    MustSubmit({.results = {result}});
    sent_.clear();
    Take();
    Error(std::holds_alternative<ErrSegments>(error) ? xid_ : xid_ + 1, error);
    Fence();
    EXPECT_EQ(Failure(), KindOfError(error));
    Make({.config = config});
    Open();
  }
}

TEST_F(RequesterV2Test, ACallIsSentAgainABoundedNumberOfTimes) {
  for (const uint32_t most : {0u, 1u, 4u}) {
    Requester::Config config;
    config.resends_max = most;
    Make({.config = config});
    Open();
    MustSubmit();
    Header last = Next().header;
    for (uint32_t i = 0; i < most; ++i) {
      Error(last.xid, ErrReplyResource{1000 + 100 * i});
      last = Resent(last).header;
    }
    Error(last.xid, ErrReplyResource{9000});
    Fence();
    const auto outcome = Outcome();
    ASSERT_TRUE(outcome.has_value() && outcome->failure.has_value());
    EXPECT_EQ(outcome->failure->kind, Kind::kErrReplyResource);
    EXPECT_EQ(outcome->resends, most);
  }
}

// --- Between two attempts ---

class BetweenAttempts : public RequesterV2Test {
 protected:
  // A call that has been refused, and whose STags are still valid.
  void Refuse() {
    Open(1);
    MustSubmit({.items = {item_}, .deadline = At(700)});
    first_ = Next().header;
    Error(first_.xid, ErrReadChunks{0});
    taken_ = Take();
    ASSERT_EQ(taken_.invalidates.size(), 1u);
    ASSERT_TRUE(taken_.sends.empty());
  }
  CallId call() const { return (uint64_t{1} << 32) | 1; }
  std::optional<CallOutcome> Failed(Kind kind) {
    auto outcome = Outcome();
    EXPECT_TRUE(outcome.has_value() && outcome->failure.has_value());
    if (!outcome || !outcome->failure) return std::nullopt;
    EXPECT_EQ(outcome->failure->kind, kind);
    EXPECT_TRUE(outcome->failure->sent) << "the responder has seen it";
    EXPECT_TRUE(memory_.live.empty());
    EXPECT_EQ(requester_->outstanding(), 0u);
    NothingIsSent();
    return outcome;
  }

  const std::vector<std::byte> item_ = Pattern(6001);
  Header first_;
  Taken taken_;
};

TEST_F(BetweenAttempts, ItIsTheNextToGo) {
  Refuse();
  MustSubmit();
  EXPECT_EQ(Next().header.xid, first_.xid + 1) << "the credit is free meanwhile";
  MustSubmit();
  Invalidated(taken_);
  NothingIsSent();
  Reply(first_.xid + 1, {}, {}, 1);
  EXPECT_EQ(Next().header.xid, first_.xid);
}

TEST_F(BetweenAttempts, ItsXidIsNobodyElses) {
  class Repeating final : public XidSource {
   public:
    uint32_t Next() override { return next_++ / 3; }

   private:
    uint32_t next_ = 300;
  } xids;
  Requester::Config config;
  config.credits = kSlots;
  config.terms = &*terms_;
  requester_.emplace(config, send_.view(), receive_.view(), memory_, xids, &trace_);
  requester_->Start();
  posted_ = TakeAll(*requester_).receives;
  Refuse();
  MustSubmit();
  EXPECT_NE(Next().header.xid, first_.xid);
}

TEST_F(BetweenAttempts, ASecondErrorForItIsNobodys) {
  Refuse();
  Error(first_.xid, ErrSystem{});
  EXPECT_EQ(requester_->stats().unknown_xids, 1u);
  Invalidated(taken_);
  EXPECT_EQ(Next().header.xid, first_.xid);
}

TEST_F(BetweenAttempts, ItCanBeCancelled) {
  Refuse();
  requester_->Cancel(call(), At(1));
  EXPECT_FALSE(requester_->TakeOutcome(At(1)).has_value()) << "it is not fenced";
  Invalidated(taken_);
  Failed(Kind::kCancelled);
  Make();
  Refuse();
  // Fenced, and without a credit.
  MustSubmit();
  Next();
  Invalidated(taken_);
  NothingIsSent();
  requester_->Cancel(call(), At(1));
  const auto outcome = requester_->TakeOutcome(At(1));
  ASSERT_TRUE(outcome.has_value() && outcome->failure.has_value());
  EXPECT_EQ(outcome->failure->kind, Kind::kCancelled);
  EXPECT_TRUE(outcome->failure->sent);
}

TEST_F(BetweenAttempts, ItsDeadlineHolds) {
  Refuse();
  EXPECT_EQ(requester_->Deadline(), At(700));
  requester_->OnDeadline(At(600));
  EXPECT_EQ(requester_->Deadline(), At(700));
  requester_->OnDeadline(At(700));
  EXPECT_TRUE(Take().disconnects.empty()) << "no answer is due";
  Invalidated(taken_);
  Failed(Kind::kTimedOut);
  // Fenced, and without a credit.
  Make();
  Refuse();
  MustSubmit();
  Next();
  Invalidated(taken_);
  requester_->OnDeadline(At(700));
  EXPECT_TRUE(Take().disconnects.empty());
  const auto outcome = requester_->TakeOutcome(At(1));
  ASSERT_TRUE(outcome.has_value() && outcome->failure.has_value());
  EXPECT_EQ(outcome->failure->kind, Kind::kTimedOut);
  EXPECT_TRUE(outcome->failure->sent);
}

TEST_F(BetweenAttempts, TheConnectionMayEnd) {
  Refuse();
  memory_.live.clear();
  requester_->OnDisconnected(At(1));
  Failed(Kind::kConnectionLost);
  Make();
  Refuse();
  MustSubmit();
  Next();
  Invalidated(taken_);
  requester_->Close(At(1));
  Take();
  memory_.live.clear();
  requester_->OnDisconnected(At(1));
  EXPECT_EQ(Failure(), Kind::kClosed);
}

// What comes of it is not known, so a session may send it on another connection.
TEST_F(BetweenAttempts, AConnectionThatEndsAlreadyTakesItAlong) {
  Open(2);
  MustSubmit({.deadline = At(700)});
  Next();
  MustSubmit({.items = {item_}});
  first_ = Next().header;
  requester_->OnDeadline(At(700));
  ASSERT_EQ(Take().disconnects.size(), 1u);
  Error(first_.xid, ErrReadChunks{0});
  Invalidated(Take());
  EXPECT_FALSE(requester_->TakeOutcome(At(701)).has_value());
  NothingIsSent();
  requester_->OnDisconnected(At(702));
  EXPECT_EQ(Failure(), Kind::kTimedOut);
  Failed(Kind::kConnectionLost);
}

TEST_F(BetweenAttempts, ItsMemoryMayBeRefused) {
  Refuse();
  memory_.refuse_after = 0;
  Invalidated(taken_);
  Failed(Kind::kMemory);
}

// --- The reverse direction ---

// [v2:4.2.2+3] [v2:4.2.2+4] [v2:4.2.2+5]
TEST_F(RequesterV2Test, ReverseCallsAreWhatTheClientHasSaidThatItServes) {
  Requester::Config config;
  config.inline_only = true;
  config.reverse = true;
  const auto item = Pattern(9000);
  for (const ReverseSupport level : {ReverseSupport::kNone, ReverseSupport::kInline, ReverseSupport::kGeneral}) {
    Make({.config = config, .versions = kVersions1And2, .end = ConnectionTerms::End::kServer, .settle = false});
    EXPECT_EQ(Submit({}).error(), SubmitRefusal::kNotConnected) << "before the client has spoken";
    terms_->SetVersion(kRpcRdmaVersion2);
    EXPECT_EQ(Submit({.items = {item}}).error(), SubmitRefusal::kTooLarge) << "the default is INLINE";
    terms_->OnPeerProperties(MakePropertySet({.reverse_requests = level}));
    if (level == ReverseSupport::kNone) {
      EXPECT_EQ(Submit({}).error(), SubmitRefusal::kNotServed);
      continue;
    }
    MustSubmit({.deadline = At(500)});
    Next();
    // Without chunks the connection goes on; with them it does not.
    requester_->OnDeadline(At(500));
    EXPECT_TRUE(Take().disconnects.empty());
    EXPECT_EQ(Failure(), Kind::kTimedOut);
    Reply(xid_++);
    const auto submitted = Submit({.items = {item}, .deadline = At(900)});
    ASSERT_EQ(submitted.has_value(), level == ReverseSupport::kGeneral);
    if (!submitted) continue;
    EXPECT_NE(Next().header.inv_handle(), 0u) << "[v2:8.4.1+3] [v2:8.4.1+4]";
    requester_->OnDeadline(At(900));
    EXPECT_EQ(Take().disconnects.size(), 1u);
  }
}

// [v2:4.2.2+3] What the client says ends those that were submitted before, whatever they wait for.
TEST_F(RequesterV2Test, ReverseCallsThatWaitEndWhenTheClientSaysThatItServesNone) {
  Requester::Config config;
  config.inline_only = true;
  config.reverse = true;
  Make({.config = config, .end = ConnectionTerms::End::kServer});
  MustSubmit();
  MustSubmit();
  MustSubmit();
  Next();
  terms_->OnPeerProperties(MakePropertySet({.reverse_requests = ReverseSupport::kNone}));
  requester_->OnPeerProperties(At(1));
  for (int i = 0; i < 2; ++i) {
    const auto outcome = Outcome();
    ASSERT_TRUE(outcome.has_value() && outcome->failure.has_value());
    EXPECT_EQ(outcome->failure->kind, Kind::kNotServed);
    EXPECT_FALSE(outcome->failure->sent);
    EXPECT_EQ(std::string(ToString(outcome->failure->kind)), "not_served");
  }
  NothingIsSent();
  // What was sent is the client's to answer.
  EXPECT_EQ(requester_->outstanding(), 1u);
  Error(kFirstXid, ErrSystem{});
  EXPECT_EQ(Failure(), Kind::kErrSystem);
  NothingIsSent();
}

// --- Anything ---

// A responder that answers with anything, and a caller that cancels and waits: every call ends once, with no STag of it
// valid; what is sent again has its XID and no STag of before; credits come back.
class AnyResponder {
 public:
  explicit AnyResponder(uint64_t seed) : prng_(seed) {
    auto extensions = std::make_shared<Extensions>();
    EXPECT_EQ(extensions->Add(kFeature), std::nullopt);
    terms_.emplace(ConnectionTerms::Config{.end = ConnectionTerms::End::kClient,
                                           .versions = kVersion2Alone,
                                           .extensions = extensions,
                                           .own = {.receive_buffer_size = kSlotSize},
                                           .send_max = kSlotSize});
    terms_->SetVersion(kRpcRdmaVersion2);
    Requester::Config config;
    config.credits = kSlots;
    config.terms = &*terms_;
    config.limits.segment_length_max = 3000;
    config.grown_bytes_max = 40000;
    config.resend_executed = !prng_.OneIn(4);
    requester_.emplace(config, send_.view(), receive_.view(), memory_, xids_, nullptr);
    requester_->Start();
    for (auto& memory : results_) memory.resize(9000);
  }

  void Run() {
    for (now_ = 1; now_ < 400 && !HasEnded(); ++now_) {
      if (prng_.OneIn(20) && !asked_) {
        asked_ = true;
        requester_->SendProperties(At(now_ + 20), At(now_));
      }
      if (calls_.size() < 12 && prng_.OneIn(2)) Submit();
      if (prng_.OneIn(30) && !calls_.empty()) requester_->Cancel(calls_.begin()->first, At(now_));
      if (prng_.OneIn(3)) Answer();
      if (prng_.OneIn(2) && !invalidates_.empty()) Invalidated();
      if (const auto deadline = requester_->Deadline(); deadline && *deadline <= At(now_)) {
        requester_->OnDeadline(At(now_));
      }
      TakeAllOf();
    }
    // Then it answers everything, with errors that help nobody.
    for (int i = 0; i < 2000 && !HasEnded() && (requester_->outstanding() > 0 || requester_->abandoned() > 0); ++i) {
      if (!in_flight_.empty()) {
        Receive({.xid = in_flight_.front(), .flags = kResponse, .body = ErrSystem{}}, {}, /*whole=*/true);
      }
      while (!invalidates_.empty()) Invalidated();
      TakeAllOf();
      now_ += 30;
      if (requester_->Deadline()) requester_->OnDeadline(At(now_));
      TakeAllOf();
    }
    if (HasEnded()) {
      memory_.live.clear();
      requester_->OnDisconnected(At(now_));
      TakeAllOf();
    } else {
      EXPECT_EQ(requester_->credits().in_flight(), 0u);
      EXPECT_EQ(requester_->posted_receives(), kSlots);
    }
    EXPECT_TRUE(calls_.empty()) << requester_->DebugString();
    EXPECT_TRUE(memory_.live.empty());
    EXPECT_EQ(requester_->outstanding(), 0u);
  }
  uint64_t resends() const { return requester_->stats().resends; }

 private:
  bool HasEnded() const { return ended_; }

  void Submit() {
    if (prng_.OneIn(8)) {
      Requester::ExtensionSpec spec{.type = kPing, .body = Pattern(8)};
      if (prng_.OneIn(2)) spec.deadline = At(now_ + prng_.Between(1, 60));
      const auto id = requester_->SubmitExtension(std::move(spec), At(now_));
      if (id) calls_[*id];
      return;
    }
    Requester::CallSpec spec;
    spec.buffer = Message(0, kCallWord, prng_.Between(0, 1500));
    spec.message_size = spec.buffer.size();
    if (prng_.OneIn(2)) spec.items.push_back({spec.message_size, ConstBytes(item_).first(prng_.Between(1, 9000))});
    for (auto& memory : results_) {
      if (prng_.OneIn(2)) spec.results.push_back(MutableBytes(memory).first(prng_.Below(9000)));
    }
    spec.reply_base_max = prng_.OneIn(2) ? 100 : 6000;
    spec.direct_placement = !prng_.OneIn(4);
    if (prng_.OneIn(4)) spec.deadline = At(now_ + prng_.Between(20, 400));
    const auto id = requester_->Submit(std::move(spec), At(now_));
    if (id) calls_[*id];
  }

  Header::Body AnyBody() {
    const auto number = [&] {
      return static_cast<uint32_t>(prng_.OneIn(8)   ? prng_.Next()
                                   : prng_.OneIn(2) ? prng_.Below(4)
                                                    : prng_.Below(20000));
    };
    switch (prng_.Below(14)) {
      case 0:
        return ErrVers{number(), number()};
      case 1:
        return ErrBadXdr{};
      case 2:
      case 3:
        return ErrReadChunks{number()};
      case 4:
      case 5:
        return ErrWriteChunks{number()};
      case 6:
        return ErrSegments{number()};
      case 7:
      case 8:
        return ErrWriteResource{static_cast<uint32_t>(prng_.Below(4)), number()};
      case 9:
      case 10:
        return ErrReplyResource{number()};
      case 11:
        return ConnProp{MakePropertySet({.receive_buffer_size = static_cast<uint32_t>(prng_.Between(1024, 20000))})};
      case 12:
        return Extension{.type = kPing, .body = Pattern(8)};
      default:
        return ErrOther{number() + 10};
    }
  }
  void Answer() {
    if (in_flight_.empty()) return;
    const uint32_t xid = prng_.OneIn(10) ? static_cast<uint32_t>(prng_.Below(300) * prng_.Below(2))
                                         : in_flight_[prng_.Below(in_flight_.size())];
    const uint32_t flags = prng_.OneIn(10) ? static_cast<uint32_t>(prng_.Next()) : kResponse;
    const auto credits = static_cast<uint32_t>(prng_.Below(6));
    if (prng_.OneIn(3)) return Receive({.xid = xid, .credits = credits, .flags = flags, .body = RdmaMsg{}}, Reply(xid));
    Receive({.xid = xid, .credits = credits, .flags = flags, .body = AnyBody()}, {});
  }
  std::vector<std::byte> Reply(uint32_t xid) { return Message(xid, prng_.OneIn(10) ? kCallWord : kReplyWord); }

  void Receive(Header header, ConstBytes message, bool whole = false) {
    if (posted_.empty()) return;
    header.version = kRpcRdmaVersion2;
    const uint32_t slot = posted_.front();
    posted_.erase(posted_.begin());
    ByteWriter out(receive_.view().slot(slot));
    terms_->Encode(header, out);
    out.Bytes(message);
    auto length = static_cast<uint32_t>(out.position());
    if (!whole && prng_.OneIn(40)) length = static_cast<uint32_t>(prng_.Below(length));
    std::optional<uint32_t> invalidated;
    if (prng_.OneIn(4) && !memory_.live.empty()) invalidated = memory_.live.begin()->second.handle;
    requester_->OnReceive(slot, length, invalidated, At(now_));
    std::erase_if(in_flight_, [&](uint32_t xid) { return !requester_->Knows(xid); });
  }
  void Invalidated() {
    const Invalidate invalidate = invalidates_.front();
    invalidates_.erase(invalidates_.begin());
    EXPECT_EQ(memory_.live.erase(invalidate.registration), 1u);
    requester_->OnInvalidated(invalidate.tag, At(now_));
  }

  void TakeAllOf() {
    while (true) {
      const Taken taken = TakeAll(*requester_);
      posted_.insert(posted_.end(), taken.receives.begin(), taken.receives.end());
      invalidates_.insert(invalidates_.end(), taken.invalidates.begin(), taken.invalidates.end());
      if (!taken.disconnects.empty()) ended_ = true;
      for (const PostSend& send : taken.sends) {
        OnSent(ConstBytes(send_.view().slot(send.slot)).first(send.length));
        requester_->OnSendDone(send.slot, At(now_));
      }
      while (auto outcome = requester_->TakeOutcome(At(now_))) {
        EXPECT_EQ(calls_.erase(outcome->call), 1u) << "ends twice";
        EXPECT_LE(outcome->resends, 4u);
        requester_->Release(outcome->call, At(now_));
      }
      requester_->TakeExchangeEnd();
      if (taken.order.empty()) return;
    }
  }
  void OnSent(ConstBytes bytes) {
    EXPECT_LE(bytes.size(), std::max(terms_->send_inline(), kDefaultReceiveBufferSize));
    ByteReader in(bytes);
    const auto header = DecodeHeaderV2(in, {}, terms_->extensions());
    ASSERT_TRUE(header.has_value()) << ToString(header.error());
    EXPECT_FALSE(header->is_response());
    EXPECT_LE(requester_->credits().in_flight(), kSlots);
    in_flight_.push_back(header->xid);
    if (header->chunks() == nullptr) return;
    // What it names is valid, and what its last attempt named is not.
    std::vector<uint32_t>& before = handles_[header->xid];
    for (const uint32_t handle : before) EXPECT_FALSE(memory_.live.contains(memory_.IdOfHandle(handle)));
    before.clear();
    const auto add = [&](const Segment& segment) {
      EXPECT_TRUE(memory_.live.contains(memory_.IdOfHandle(segment.handle)) || segment.handle == 0);
      if (segment.handle != 0) before.push_back(segment.handle);
    };
    for (const ReadSegment& read : header->chunks()->reads) add(read.target);
    for (const Segment& segment : header->chunks()->writes.segments()) add(segment);
    if (header->chunks()->reply) std::ranges::for_each(*header->chunks()->reply, add);
    EXPECT_TRUE(header->inv_handle() == 0 || std::ranges::count(before, header->inv_handle()) > 0) << "[v2:3.3+3]";
  }

  Prng prng_;
  int64_t now_ = 0;
  FakeMemory memory_;
  Arena send_{8, kSlotSize};
  Arena receive_{kSlots, kSlotSize};
  SequentialXids xids_{kFirstXid};
  std::optional<ConnectionTerms> terms_;
  std::vector<std::byte> item_ = Pattern(9000);
  std::vector<std::byte> results_[2];
  std::optional<Requester> requester_;
  std::vector<uint32_t> posted_;
  std::vector<Invalidate> invalidates_;
  std::vector<uint32_t> in_flight_;
  std::map<uint32_t, std::vector<uint32_t>> handles_;
  std::map<CallId, int> calls_;
  bool asked_ = false;
  bool ended_ = false;
};

TEST(RequesterV2, WhateverAResponderAnswersEachCallEndsOnceAndSafely) {
  uint64_t resends = 0;
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    SCOPED_TRACE(seed);
    AnyResponder world(seed);
    world.Run();
    resends += world.resends();
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(resends, 200u);
}

}  // namespace
}  // namespace stagecoach::rpcrdma
