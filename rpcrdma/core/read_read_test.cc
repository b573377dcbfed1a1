// Replies in memory of the responder's own, which the requester reads ("Read-Read"): each end alone, against a peer
// that keeps to the documents or does not.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "rpcrdma/core/engine_test_support.h"
#include "rpcrdma/core/requester.h"
#include "rpcrdma/core/responder.h"
#include "rpcrdma/xdr/xdr_reader.h"
#include "rpcrdma/xdr/xdr_writer.h"

namespace stagecoach::rpcrdma {
namespace {

using namespace testing;  // NOLINT: what tests of the engines are made of

constexpr uint32_t kSlots = 4;

// --- The requester ---

class ReadingRequesterTest : public ::testing::Test {
 protected:
  ReadingRequesterTest() { Make({}); }

  static Requester::Config Usual() {
    Requester::Config config;
    config.credits = kSlots;
    config.profile = kRfc5666;
    config.reads_max = 2;
    return config;
  }
  void Make(std::optional<Requester::Config> config) {
    requester_.emplace(config ? *config : Usual(), send_.view(), receive_.view(), memory_, xids_, &trace_);
    requester_->Start();
    posted_ = TakeAll(*requester_).receives;
  }
  void MakeBy(const ProtocolProfile& profile) {
    auto config = Usual();
    config.profile = profile;
    Make(config);
  }
  Taken Take() {
    Taken taken = TakeAll(*requester_);
    posted_.insert(posted_.end(), taken.receives.begin(), taken.receives.end());
    return taken;
  }
  // Submits a call and takes its Send; its XID.
  uint32_t Call(std::optional<Instant> deadline = std::nullopt, std::vector<MutableBytes> results = {},
                uint64_t reply_base_max = 100) {
    Requester::CallSpec spec;
    spec.buffer = Message(0, kCallWord);
    spec.message_size = spec.buffer.size();
    for (const MutableBytes result : results) spec.results.push_back(result);
    spec.reply_base_max = reply_base_max;
    spec.deadline = deadline;
    const auto id = requester_->Submit(std::move(spec), At(0));
    EXPECT_TRUE(id.has_value());
    id_ = id.value_or(0);
    const Taken taken = Take();
    EXPECT_EQ(taken.sends.size(), 1u);
    if (taken.sends.size() != 1) return 0;
    const Sent sent = Decode(send_.view(), taken.sends[0]);
    offered_ = *sent.header.chunks();
    requester_->OnSendDone(taken.sends[0].slot, At(0));
    return sent.header.xid;
  }
  void Receive(const Header& header, ConstBytes message = {}) {
    ASSERT_FALSE(posted_.empty());
    const uint32_t slot = posted_.front();
    posted_.erase(posted_.begin());
    requester_->OnReceive(slot, Put(receive_.view(), slot, header, message), std::nullopt, At(1));
  }
  // A long reply in these segments of the responder's.
  void LongReply(uint32_t xid, std::initializer_list<ReadSegment> reads, uint32_t credits = kSlots) {
    ChunkLists lists;
    for (const ReadSegment& read : reads) lists.reads.push_back(read);
    Receive({.xid = xid, .credits = credits, .body = RdmaNomsg{std::move(lists)}});
  }
  // Carries out Reads from `source`, which offsets are of.
  void DoReads(const Taken& taken, ConstBytes source) {
    for (const PostRead& read : taken.reads) {
      CopyBytes(read.sink, source.subspan(read.source.offset, read.source.length));
      requester_->OnReadDone(read.tag, At(2));
    }
  }
  void Invalidated(const Taken& taken) {
    for (const Invalidate& invalidate : taken.invalidates) {
      EXPECT_EQ(memory_.live.erase(invalidate.registration), 1u);
      requester_->OnInvalidated(invalidate.tag, At(2));
    }
  }
  // The RDMA_DONE among what was taken; its XID.
  std::optional<uint32_t> DoneIn(const Taken& taken) {
    std::optional<uint32_t> xid;
    for (const PostSend& send : taken.sends) {
      const Sent sent = Decode(send_.view(), send);
      if (sent.header.type() != MessageType::kDone) continue;
      EXPECT_FALSE(xid.has_value()) << "one is enough";
      EXPECT_EQ(send.length, 16u);
      xid = sent.header.xid;
      requester_->OnSendDone(send.slot, At(2));
    }
    return xid;
  }
  std::optional<CallOutcome> Outcome() {
    auto outcome = requester_->TakeOutcome(At(2));
    if (outcome) requester_->Release(outcome->call, At(2));
    return outcome;
  }
  void Finish(uint32_t xid) {
    Receive({.xid = xid, .credits = kSlots, .body = RdmaMsg{}}, Message(xid, kReplyWord));
    ASSERT_TRUE(Outcome().has_value());
    Take();
  }

  TraceLog trace_;
  FakeMemory memory_;
  Arena send_{6, 1024};
  Arena receive_{kSlots, 1024};
  SequentialXids xids_{100};
  CallId id_ = 0;
  ChunkLists offered_;
  std::optional<Requester> requester_;
  std::vector<uint32_t> posted_;
};

// [5666:3.5#1] [2004:3.6#1]
TEST_F(ReadingRequesterTest, LongReplyIsReadFencedAndSaidToBeDone) {
  const uint32_t xid = Call();
  const auto reply = Message(xid, kReplyWord, 700);
  LongReply(xid, {{0, {11, 2000, 0}}, {0, {12, static_cast<uint32_t>(reply.size() - 2000), 2000}}});
  Taken taken = Take();
  ASSERT_EQ(taken.reads.size(), 2u);
  EXPECT_TRUE(taken.sends.empty()) << "it is not read yet";
  EXPECT_FALSE(Outcome().has_value());
  DoReads(taken, reply);
  taken = Take();
  EXPECT_EQ(taken.order, "IS") << "fenced, then said to be done";
  EXPECT_EQ(DoneIn(taken), xid);
  EXPECT_FALSE(requester_->has_outcome()) << "its memory is reachable";
  Invalidated(taken);
  auto outcome = requester_->TakeOutcome(At(2));
  ASSERT_TRUE(outcome && !outcome->failure);
  EXPECT_EQ(ToHex(outcome->reply.base), ToHex(reply));
  EXPECT_NE(outcome->reply_memory, nullptr);
  requester_->Release(outcome->call, At(2));
  Take();
  EXPECT_EQ(posted_.size(), kSlots);
  EXPECT_EQ(requester_->stats().replies_by_read_chunk, 1u);
  EXPECT_EQ(requester_->stats().replies_long, 1u);
  EXPECT_EQ(requester_->stats().dones, 1u);
  EXPECT_TRUE(memory_.live.empty());
}

TEST_F(ReadingRequesterTest, ResultsByReadChunkStandAtTheirPositionsBesideWriteChunks) {
  std::vector<std::byte> result(3000);
  const uint32_t xid = Call(std::nullopt, {result});
  ASSERT_EQ(offered_.writes.size(), 1u);
  // XID, direction, a counted result that was written, another one that is read, and a word.
  const auto written = Pattern(3000, 3);
  const auto read = Pattern(5001, 5);
  CopyBytes(result, written);
  std::vector<std::byte> message(20);
  ByteWriter out(message);
  out.U32(xid);
  out.U32(kReplyWord);
  out.U32(3000);
  out.U32(5001);
  out.U32(77);
  ChunkLists lists{.writes = offered_.writes};
  lists.writes.mutable_chunk(0)[0].length = 3000;
  lists.reads.push_back({12 + 3000 + 4, {11, 5001, 0}});
  Receive({.xid = xid, .credits = kSlots, .body = RdmaMsg{std::move(lists)}}, message);
  DoReads(Take(), read);
  Invalidated(Take());
  auto outcome = requester_->TakeOutcome(At(2));
  ASSERT_TRUE(outcome && !outcome->failure);
  XdrReader in(outcome->reply);
  in.U64("XID and direction");
  EXPECT_EQ(ToHex(in.EligibleOpaque("written", 5000)), ToHex(written));
  EXPECT_EQ(ToHex(in.EligibleOpaque("read", 6000)), ToHex(read));
  EXPECT_EQ(in.U32("a word"), 77u);
  EXPECT_TRUE(in.Finish().has_value());
  EXPECT_EQ(requester_->stats().bytes_placed_by_read, 5001u);
}

TEST_F(ReadingRequesterTest, ReadsInFlightAreBoundedOverAllCalls) {
  const uint32_t first = Call();
  Finish(first);
  const uint32_t one = Call();
  const uint32_t other = Call();
  const auto reply = Message(one, kReplyWord, 100);
  LongReply(one, {{0, {1, 100, 0}}, {0, {1, 0, 0}}, {0, {1, 100, 100}}, {0, {1, 208, 200}}});
  LongReply(other, {{0, {1, 408, 0}}});
  Taken taken = Take();
  ASSERT_EQ(taken.reads.size(), 2u) << "ORD";
  CopyBytes(taken.reads[0].sink, ConstBytes(reply).first(100));
  requester_->OnReadDone(taken.reads[0].tag, At(2));
  Taken more = Take();
  ASSERT_EQ(more.reads.size(), 1u);
  EXPECT_EQ(more.reads[0].source.length, 208u) << "a reply's all before the next one's";
  CopyBytes(taken.reads[1].sink, ConstBytes(reply).subspan(100, 100));
  requester_->OnReadDone(taken.reads[1].tag, At(2));
  DoReads(more, reply);
  taken = Take();
  ASSERT_EQ(taken.reads.size(), 1u);
  EXPECT_EQ(taken.reads[0].source.length, 408u);
  EXPECT_EQ(DoneIn(taken), one);
  Invalidated(taken);
  const auto outcome = requester_->TakeOutcome(At(2));
  ASSERT_TRUE(outcome && !outcome->failure);
  EXPECT_EQ(ToHex(outcome->reply.base), ToHex(reply));
}

// [5666:3.8#5] [2004:3.8#4]
TEST_F(ReadingRequesterTest, DoneTakesACreditUntilALaterCallIsAnswered) {
  Finish(Call());
  const uint32_t one = Call();
  const uint32_t two = Call();
  LongReply(one, {{0, {1, 24, 0}}}, 3);
  EXPECT_EQ(requester_->credits().dones(), 1u) << "it will have to be sent";
  EXPECT_EQ(requester_->room(), 1u);
  const auto reply = Message(one, kReplyWord, 4);
  DoReads(Take(), reply);
  Invalidated(Take());
  ASSERT_TRUE(Outcome().has_value());
  EXPECT_EQ(requester_->credits().dones(), 1u);
  EXPECT_EQ(requester_->room(), 1u) << "of three: a call in flight, and RDMA_DONE";
  const uint32_t three = Call();
  EXPECT_EQ(requester_->room(), 0u);
  // Sent before RDMA_DONE: says nothing of it.
  Receive({.xid = two, .credits = 3, .body = RdmaMsg{}}, Message(two, kReplyWord));
  EXPECT_EQ(requester_->credits().dones(), 1u);
  Receive({.xid = three, .credits = 3, .body = RdmaMsg{}}, Message(three, kReplyWord));
  EXPECT_EQ(requester_->credits().dones(), 0u);
  EXPECT_EQ(requester_->room(), 3u);
}

// [5666:3.3#6] [5666:3.8#4]
TEST_F(ReadingRequesterTest, GrantOfOneIsNoDeadlock) {
  for (int i = 0; i < 100; ++i) {
    const uint32_t xid = Call();
    ASSERT_NE(xid, 0u);
    LongReply(xid, {{0, {1, 24, 0}}}, 1);
    DoReads(Take(), Message(xid, kReplyWord, 4));
    const Taken taken = Take();
    ASSERT_EQ(DoneIn(taken), xid);
    Invalidated(taken);
    ASSERT_TRUE(Outcome().has_value());
    Take();
    ASSERT_EQ(requester_->room(), 1u);
  }
}

// [2004:3.3#3] [5666:3.3#2]
TEST_F(ReadingRequesterTest, GrantOfZeroHoldsCallsUntilNoneIsInFlight) {
  Finish(Call());
  const uint32_t one = Call();
  const uint32_t two = Call();
  Receive({.xid = one, .credits = 0, .body = RdmaMsg{}}, Message(one, kReplyWord));
  EXPECT_EQ(requester_->room(), 0u);
  Receive({.xid = two, .credits = 0, .body = RdmaMsg{}}, Message(two, kReplyWord));
  EXPECT_EQ(requester_->room(), 1u);
}

TEST_F(ReadingRequesterTest, DoneGoesAheadOfCallsThatWait) {
  Arena one_slot(1, 1024);
  requester_.emplace(Usual(), one_slot.view(), receive_.view(), memory_, xids_, &trace_);
  requester_->Start();
  posted_ = TakeAll(*requester_).receives;
  const auto submit = [&] {
    Requester::CallSpec spec;
    spec.buffer = Message(0, kCallWord);
    spec.message_size = spec.buffer.size();
    return requester_->Submit(std::move(spec), At(0)).has_value();
  };
  ASSERT_TRUE(submit());
  Taken taken = Take();
  const uint32_t xid = Decode(one_slot.view(), taken.sends.at(0)).header.xid;
  ASSERT_TRUE(submit());
  LongReply(xid, {{0, {1, 24, 0}}});
  DoReads(Take(), Message(xid, kReplyWord, 4));
  taken = Take();
  Invalidated(taken);
  EXPECT_TRUE(taken.sends.empty()) << "there is no buffer";
  requester_->OnSendDone(0, At(2));
  taken = Take();
  ASSERT_EQ(taken.sends.size(), 1u);
  EXPECT_EQ(Decode(one_slot.view(), taken.sends[0]).header.type(), MessageType::kDone);
  requester_->OnSendDone(0, At(2));
  ASSERT_EQ(Take().sends.size(), 1u) << "and now the call";
}

TEST_F(ReadingRequesterTest, WhatAReplyMayAskForIsBounded) {
  auto config = Usual();
  config.read_bytes_max = 1000;
  Make(config);
  const uint32_t first = Call();
  LongReply(first, {{0, {1, 1001, 0}}});
  Taken taken = Take();
  EXPECT_TRUE(taken.reads.empty());
  EXPECT_EQ(DoneIn(taken), first) << "the responder may let go of it";
  auto outcome = Outcome();
  ASSERT_TRUE(outcome && outcome->failure);
  EXPECT_EQ(outcome->failure->kind, CallFailure::Kind::kBadChunks);
  EXPECT_EQ(outcome->failure->chunk, ChunkFault::kTooManyReadBytes);
  Take();

  // Two that have no room beside each other.
  const uint32_t grant = Call();
  Finish(grant);
  const uint32_t one = Call();
  const uint32_t two = Call();
  LongReply(one, {{0, {1, 600, 0}}});
  LongReply(two, {{0, {2, 600, 0}}});
  taken = Take();
  ASSERT_EQ(taken.reads.size(), 1u);
  DoReads(taken, Message(one, kReplyWord, 148));
  Invalidated(Take());
  EXPECT_TRUE(Take().reads.empty()) << "its outcome was not taken";
  ASSERT_TRUE(Outcome().has_value());
  taken = Take();
  ASSERT_EQ(taken.reads.size(), 1u);
  EXPECT_EQ(taken.reads[0].source.handle, 2u);
}

TEST_F(ReadingRequesterTest, ReplyThatCannotBeReadEndsItsCallAndIsSaidToBeDone) {
  const auto refused = [&](ChunkLists lists, bool nomsg, ChunkFault fault) {
    const uint32_t xid = Call();
    Header header{.xid = xid, .credits = kSlots};
    if (nomsg) {
      header.body = RdmaNomsg{std::move(lists)};
      Receive(header);
    } else {
      header.body = RdmaMsg{std::move(lists)};
      Receive(header, Message(xid, kReplyWord));
    }
    const Taken taken = Take();
    EXPECT_TRUE(taken.reads.empty());
    EXPECT_EQ(DoneIn(taken), xid);
    const auto outcome = Outcome();
    EXPECT_TRUE(outcome && outcome->failure && outcome->failure->chunk == fault) << ToString(fault);
    Take();
    EXPECT_EQ(posted_.size(), kSlots);
  };
  const auto reads = [](std::initializer_list<ReadSegment> segments) {
    ChunkLists lists;
    for (const ReadSegment& segment : segments) lists.reads.push_back(segment);
    return lists;
  };
  refused(reads({{0, {1, 24, 0}}}), false, ChunkFault::kPositionZeroInMsg);
  refused(reads({{8, {1, 24, 0}}}), true, ChunkFault::kNoReplyChunk);
  refused(reads({{6, {1, 24, 0}}}), false, ChunkFault::kUnalignedPosition);
  refused(reads({{400, {1, 24, 0}}}), false, ChunkFault::kPositionPastEnd);
  refused(reads({{8, {1, 24, UINT64_MAX - 3}}}), false, ChunkFault::kAddressWraps);
  auto config = Usual();
  config.reads_max = 0;
  Make(config);
  refused(reads({{0, {1, 24, 0}}}), true, ChunkFault::kUnexpectedReadList);
}

TEST_F(ReadingRequesterTest, UnderTheDefaultProfileNothingIsReadAndNothingSaidToBeDone) {
  auto config = Usual();
  config.profile = kRfc5666bis;
  Make(config);
  const uint32_t xid = Call();
  LongReply(xid, {{0, {1, 24, 0}}});
  const Taken taken = Take();
  EXPECT_TRUE(taken.reads.empty() && taken.sends.empty());
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome && outcome->failure);
  EXPECT_EQ(outcome->failure->chunk, ChunkFault::kUnexpectedReadList);
}

TEST_F(ReadingRequesterTest, CancelWaitsForTheReadsInFlight) {
  const uint32_t xid = Call();
  LongReply(xid, {{0, {1, 100, 0}}, {0, {1, 100, 100}}, {0, {1, 100, 200}}});
  const Taken reads = Take();
  ASSERT_EQ(reads.reads.size(), 2u);
  requester_->Cancel(id_, At(1));
  requester_->Cancel(id_, At(1));
  Taken taken = Take();
  EXPECT_TRUE(taken.order.empty()) << "Reads write to its memory";
  EXPECT_FALSE(Outcome().has_value());
  requester_->OnReadDone(reads.reads[0].tag, At(2));
  EXPECT_TRUE(Take().order.empty());
  requester_->OnReadDone(reads.reads[1].tag, At(2));
  taken = Take();
  EXPECT_EQ(DoneIn(taken), xid);
  Invalidated(taken);
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome && outcome->failure);
  EXPECT_EQ(outcome->failure->kind, CallFailure::Kind::kCancelled);
  EXPECT_TRUE(outcome->failure->sent);
  Take();
  EXPECT_EQ(posted_.size(), kSlots);
}

TEST_F(ReadingRequesterTest, CancelledBeforeItsReplyCameItIsSaidToBeDoneUnread) {
  const uint32_t xid = Call();
  requester_->Cancel(id_, At(1));
  ASSERT_TRUE(Outcome().has_value());
  LongReply(xid, {{0, {1, 100, 0}}});
  const Taken taken = Take();
  EXPECT_TRUE(taken.reads.empty());
  EXPECT_EQ(DoneIn(taken), xid);
  EXPECT_EQ(posted_.size(), kSlots);
}

TEST_F(ReadingRequesterTest, ReplyToNobodyIsSaidToBeDoneAndHoldsItsReceiveUntilThen) {
  const auto mine = Call();
  for (uint32_t xid = 5000; xid < 5006; ++xid) {
    ASSERT_FALSE(posted_.empty());
    LongReply(xid, {{0, {1, 100, 0}}});
    const Taken taken = Take();
    for (const PostSend& send : taken.sends) {
      EXPECT_EQ(Decode(send_.view(), send).header.xid, xid);
    }
  }
  // Six send buffers, none of which came back: the next one waits, and its Receive with it.
  LongReply(6000, {{0, {1, 100, 0}}});
  EXPECT_TRUE(Take().order.empty());
  EXPECT_EQ(posted_.size(), kSlots - 1);
  requester_->OnSendDone(3, At(2));
  EXPECT_EQ(Take().order, "SR");
  EXPECT_EQ(posted_.size(), kSlots);
  EXPECT_TRUE(requester_->Knows(mine));
}

TEST_F(ReadingRequesterTest, DeadlineWhileReadingEndsTheConnection) {
  const uint32_t xid = Call(At(50));
  LongReply(xid, {{0, {1, 100, 0}}});
  ASSERT_EQ(Take().reads.size(), 1u);
  EXPECT_EQ(requester_->Deadline(), At(50));
  requester_->OnDeadline(At(50));
  EXPECT_EQ(Take().disconnects.size(), 1u);
  EXPECT_FALSE(Outcome().has_value());
  memory_.live.clear();
  requester_->OnDisconnected(At(51));
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome && outcome->failure);
  EXPECT_EQ(outcome->failure->kind, CallFailure::Kind::kTimedOut);
}

TEST_F(ReadingRequesterTest, CancelledWhileReadingItStillHasADeadline) {
  const uint32_t xid = Call(At(50));
  LongReply(xid, {{0, {1, 100, 0}}});
  ASSERT_EQ(Take().reads.size(), 1u);
  requester_->Cancel(id_, At(1));
  requester_->OnDeadline(At(50));
  EXPECT_TRUE(Take().disconnects.empty()) << "a second more, as for a fence";
  ASSERT_TRUE(requester_->Deadline().has_value());
  requester_->OnDeadline(*requester_->Deadline());
  EXPECT_EQ(Take().disconnects.size(), 1u);
}

TEST_F(ReadingRequesterTest, LostConnectionEndsWhatIsBeingRead) {
  const uint32_t one = Call();
  LongReply(one, {{0, {1, 100, 0}}});
  ASSERT_EQ(Take().reads.size(), 1u);
  memory_.live.clear();
  requester_->OnDisconnected(At(3));
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome && outcome->failure);
  EXPECT_EQ(outcome->failure->kind, CallFailure::Kind::kConnectionLost);
  EXPECT_TRUE(outcome->failure->sent);
  EXPECT_EQ(requester_->outstanding(), 0u);
}

TEST_F(ReadingRequesterTest, SinkThatTheDeviceRefusesEndsTheCall) {
  const uint32_t xid = Call();
  memory_.refuse_after = 0;
  LongReply(xid, {{0, {1, 100, 0}}});
  const Taken taken = Take();
  EXPECT_EQ(DoneIn(taken), xid);
  const auto outcome = Outcome();
  ASSERT_TRUE(outcome && outcome->failure);
  EXPECT_EQ(outcome->failure->kind, CallFailure::Kind::kMemory);
  EXPECT_TRUE(outcome->failure->sent);
}

// [2004:4.1#5]
TEST_F(ReadingRequesterTest, UnderTheDraftOf2004TheXidOfTheHeaderPrevails) {
  for (const ProtocolProfile& profile : AllProfiles()) {
    SCOPED_TRACE(profile.name);
    MakeBy(profile);
    const uint32_t xid = Call();
    Receive({.xid = xid, .credits = kSlots, .body = RdmaMsg{}}, Message(xid + 1, kReplyWord));
    const auto outcome = requester_->TakeOutcome(At(2));
    ASSERT_TRUE(outcome.has_value());
    EXPECT_EQ(outcome->failure.has_value(), !profile.header_xid_prevails);
    if (!outcome->failure) {
      EXPECT_EQ(ByteReader(outcome->reply.base).U32(), xid) << "and so says the message";
    }
    requester_->Release(outcome->call, At(2));
    Take();
  }
}

// [2004:4.1+3] Wherever it is.
TEST_F(ReadingRequesterTest, UnderTheDraftOf2004TheXidOfTheHeaderPrevailsOverThatOfALongReply) {
  for (const ProtocolProfile& profile : AllProfiles()) {
    for (const bool by_reply_chunk : {true, false}) {
      if (!by_reply_chunk && !profile.replies_by_read_chunk) continue;
      SCOPED_TRACE(profile.name);
      MakeBy(profile);
      const uint32_t xid = Call(std::nullopt, {}, 3000);
      const auto reply = Message(xid + 1, kReplyWord, 500);
      if (by_reply_chunk) {
        ChunkLists lists{.reply = offered_.reply};
        ASSERT_TRUE(lists.reply.has_value());
        Segment& segment = (*lists.reply)[0];
        ASSERT_NE(memory_.Find(segment, MemoryUse::kWrittenByPeer), nullptr);
        std::memcpy(reinterpret_cast<void*>(segment.offset), reply.data(), reply.size());
        segment.length = static_cast<uint32_t>(reply.size());
        Receive({.xid = xid, .credits = kSlots, .body = RdmaNomsg{std::move(lists)}});
      } else {
        LongReply(xid, {{0, {1, static_cast<uint32_t>(reply.size()), 0}}});
        DoReads(Take(), reply);
      }
      Invalidated(Take());
      const auto outcome = requester_->TakeOutcome(At(2));
      ASSERT_TRUE(outcome.has_value());
      EXPECT_EQ(outcome->failure.has_value(), !profile.header_xid_prevails);
      if (!outcome->failure) {
        EXPECT_EQ(ByteReader(outcome->reply.base).U32(), xid);
      }
      requester_->Release(outcome->call, At(2));
      Take();
    }
  }
}

// [5666:3.9+1] [2004:3.5+1] Ours pad no replies, but understand them.
TEST_F(ReadingRequesterTest, PaddedReplyIsReadWithoutItsPadding) {
  for (const ProtocolProfile& profile : AllProfiles()) {
    SCOPED_TRACE(profile.name);
    MakeBy(profile);
    const uint32_t xid = Call();
    // 36 bytes of transport header, 12 to the count, 16 more to a multiple of 64.
    const auto data = Pattern(100);
    std::vector<std::byte> message(12 + 16 + 100 + 4);
    ByteWriter out(message);
    out.U32(xid);
    out.U32(kReplyWord);
    out.U32(100);
    out.Bytes(std::vector<std::byte>(16, std::byte{0xaa}));  // whatever it consists of
    out.Bytes(data);
    out.U32(77);
    Receive({.xid = xid, .credits = kSlots, .body = RdmaMsgp{.align = 64, .thresh = 50}}, message);
    const auto outcome = requester_->TakeOutcome(At(2));
    ASSERT_TRUE(outcome && !outcome->failure);
    XdrReader in(outcome->reply);
    in.U64("XID and direction");
    const ConstBytes read = in.EligibleOpaque("data", 1000);
    EXPECT_EQ(std::ranges::equal(read, data), profile.padding) << "the newest document takes padding for data";
    if (profile.padding) {
      EXPECT_EQ(in.U32("a word"), 77u);
    }
    requester_->Release(outcome->call, At(2));
    Take();
  }
}

// RFC 5666 section 3.7.
TEST_F(ReadingRequesterTest, LengthsThatCountRoundUpMayGoBeyondTheMemory) {
  for (const ProtocolProfile& profile : AllProfiles()) {
    SCOPED_TRACE(profile.name);
    MakeBy(profile);
    std::vector<std::byte> result(2002);
    const uint32_t xid = Call(std::nullopt, {result});
    ASSERT_EQ(offered_.writes.size(), 1u);
    ASSERT_EQ(offered_.writes[0][0].length, 2002u) << "no room for round-up";
    CopyBytes(result, Pattern(2001));
    std::vector<std::byte> message(12);
    ByteWriter out(message);
    out.U32(xid);
    out.U32(kReplyWord);
    out.U32(2001);
    ChunkLists lists{.writes = offered_.writes};
    lists.writes.mutable_chunk(0)[0].length = 2004;
    Receive({.xid = xid, .credits = kSlots, .body = RdmaMsg{std::move(lists)}}, message);
    Invalidated(Take());
    const auto outcome = requester_->TakeOutcome(At(2));
    ASSERT_TRUE(outcome.has_value());
    EXPECT_EQ(outcome->failure.has_value(), !profile.written_lengths_count_round_up);
    if (!outcome->failure) {
      XdrReader in(outcome->reply);
      in.U64("XID and direction");
      EXPECT_EQ(ToHex(in.EligibleOpaque("result", 3000)), ToHex(Pattern(2001)));
      EXPECT_TRUE(in.Finish().has_value());
    }
    requester_->Release(outcome->call, At(2));
    Take();
  }
}

// --- The responder ---

class ExposingResponderTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kReceives = 6;

  ExposingResponderTest() { Make(Usual()); }

  static Responder::Config Usual() {
    Responder::Config config;
    config.profile = kRfc5666;
    config.exposed_max = 2;
    config.exposed_bytes_max = 10000;
    config.exposed_time = 1s;
    return config;
  }
  void Make(const Responder::Config& config) {
    responder_.emplace(config, send_.view(), receive_.view(), memory_, &trace_);
    responder_->Start();
    posted_ = TakeAll(*responder_).receives;
    EXPECT_EQ(posted_.size(), kReceives);
  }
  void MakeBy(const ProtocolProfile& profile) {
    auto config = Usual();
    config.profile = profile;
    Make(config);
  }
  Taken Take() {
    Taken taken = TakeAll(*responder_);
    posted_.insert(posted_.end(), taken.receives.begin(), taken.receives.end());
    return taken;
  }
  void Receive(const Header& header, ConstBytes message = {}) {
    ASSERT_FALSE(posted_.empty());
    const uint32_t slot = posted_.front();
    posted_.erase(posted_.begin());
    responder_->OnReceive(slot, Put(receive_.view(), slot, header, message), std::nullopt, now_);
  }
  void Done(uint32_t xid) { Receive({.xid = xid, .credits = 1, .body = RdmaDone{}}); }
  // A call and the reply to it: so many words, then items, each counted in the stream.
  void Answer(uint32_t xid, size_t words, std::vector<ConstBytes> items = {}, ChunkLists offered = {},
              std::shared_ptr<const void> memory = nullptr) {
    Receive({.xid = xid, .credits = 10, .body = RdmaMsg{std::move(offered)}}, Message(xid, kCallWord));
    const auto id = responder_->TakeRequest(now_);
    ASSERT_TRUE(id.has_value());
    std::vector<std::byte>& buffer = responder_->reply_buffer(*id);
    buffer.resize(16384);
    XdrWriter out(buffer);
    out.U32(xid);
    out.U32(kReplyWord);
    for (uint32_t i = 0; i < words; ++i) out.U32(i);
    for (const ConstBytes item : items) out.EligibleOpaque(item);
    base_.assign(out.written().begin(), out.written().end());
    ASSERT_TRUE(
        responder_
            ->Complete(*id, {.message_size = out.written().size(), .items = out.eligible(), .memory = memory}, now_)
            .has_value());
  }
  // What is granted with the answer to a call that was handed out, of so many words.
  uint32_t GrantWith(RequestId id, size_t words) {
    const auto message = Message(responder_->xid(id), kReplyWord, words);
    responder_->reply_buffer(id) = message;
    EXPECT_TRUE(responder_->Complete(id, {.message_size = message.size()}, now_).has_value());
    return OnlySent(Take()).header.credits;
  }
  Sent OnlySent(const Taken& taken) {
    EXPECT_EQ(taken.sends.size(), 1u);
    if (taken.sends.size() != 1) return {};
    responder_->OnSendDone(taken.sends[0].slot, now_);
    return Decode(send_.view(), taken.sends[0]);
  }
  void DoInvalidates(const Taken& taken) {
    for (const Invalidate& invalidate : taken.invalidates) {
      EXPECT_EQ(memory_.live.erase(invalidate.registration), 1u);
      responder_->OnInvalidated(invalidate.tag, now_);
    }
  }
  // What a requester reads at one position.
  std::vector<std::byte> Read(const ChunkLists& lists, uint32_t position) {
    std::vector<std::byte> bytes;
    for (const ReadSegment& read : lists.reads) {
      if (read.position != position) continue;
      const auto* live = memory_.Find(read.target, MemoryUse::kReadByPeer);
      EXPECT_NE(live, nullptr) << "not exposed";
      if (live == nullptr) return {};
      const ConstBytes part = AsBytes(reinterpret_cast<const void*>(read.target.offset), read.target.length);
      bytes.insert(bytes.end(), part.begin(), part.end());
    }
    return bytes;
  }

  TraceLog trace_;
  FakeMemory memory_;
  Arena send_{8, 1024};
  Arena receive_{kReceives, 1024};
  Instant now_ = At(1);
  std::vector<std::byte> base_;
  std::optional<Responder> responder_;
  std::vector<uint32_t> posted_;
};

// [5666:5.2#2] [2004:5.2#2]
TEST_F(ExposingResponderTest, LongReplyWithoutAReplyChunkIsExposedUntilDone) {
  auto memory = std::make_shared<int>();
  const std::weak_ptr<int> held = memory;
  Answer(7, 1000, {}, {}, std::move(memory));
  const Sent sent = OnlySent(Take());
  EXPECT_EQ(sent.header.type(), MessageType::kNomsg);
  EXPECT_EQ(sent.header.credits, kReceives - 2) << "two Receives are for RDMA_DONE";
  EXPECT_EQ(ToHex(Read(*sent.header.chunks(), 0)), ToHex(base_));
  EXPECT_EQ(responder_->exposed(), 1u);
  EXPECT_FALSE(held.expired());
  Done(7);
  Taken taken = Take();
  EXPECT_EQ(taken.order, "RI") << "its Receive, and the fence";
  EXPECT_FALSE(held.expired()) << "it is reachable";
  DoInvalidates(taken);
  EXPECT_TRUE(held.expired());
  EXPECT_EQ(responder_->exposed(), 0u);
  EXPECT_TRUE(memory_.live.empty());
  EXPECT_EQ(responder_->stats().replies_by_read_chunk, 1u);
  EXPECT_EQ(responder_->stats().dones, 1u);
  EXPECT_EQ(posted_.size(), kReceives);
}

// [5666:3.4#4] [2004:3.3#9]
TEST_F(ExposingResponderTest, ResultWithoutAWriteChunkLeavesTheMessage) {
  const auto small = Pattern(100, 1);
  const auto large = Pattern(3001, 2);
  Answer(7, 1, {small, large});
  const Sent sent = OnlySent(Take());
  EXPECT_EQ(sent.header.type(), MessageType::kMsg);
  ASSERT_EQ(sent.header.chunks()->reads.size(), 1u) << "the smaller one fits";
  EXPECT_EQ(sent.header.chunks()->reads[0].position, 8 + 4 + 4 + 100 + 4u);
  EXPECT_EQ(ToHex(Read(*sent.header.chunks(), 120)), ToHex(large));
}

TEST_F(ExposingResponderTest, ResultLongerThanItsWriteChunkLeavesItUnused) {
  const auto first = Pattern(3001, 1);
  const auto second = Pattern(50, 2);
  ChunkLists offered;
  const Segment short_one{0x77, 3000, 0x1000};
  const Segment long_one{0x78, 3000, 0x9000};
  offered.writes.AppendChunk({&short_one, 1});
  offered.writes.AppendChunk({&long_one, 1});
  Answer(7, 1, {first, second}, std::move(offered));
  const Taken taken = Take();
  ASSERT_EQ(taken.writes.size(), 1u);
  EXPECT_EQ(taken.writes[0].target.handle, 0x78u) << "the next result has the next one";
  const Sent sent = OnlySent(taken);
  EXPECT_EQ(sent.header.chunks()->writes[0][0].length, 0u);
  EXPECT_EQ(sent.header.chunks()->writes[1][0].length, 52u) << "with its round-up (RFC 5666 section 3.7)";
  EXPECT_EQ(taken.writes[0].target.length, 50u) << "which is not written";
  ASSERT_EQ(sent.header.chunks()->reads.size(), 1u);
  EXPECT_EQ(ToHex(Read(*sent.header.chunks(), 16)), ToHex(first));
}

TEST_F(ExposingResponderTest, ReplyChunkThatIsLongEnoughIsUsedInstead) {
  const auto item = Pattern(2000);
  ChunkLists offered;
  offered.reply.emplace().push_back({0x77, 8192, 0x1000});
  Answer(7, 4, {item}, std::move(offered));
  const Taken taken = Take();
  const Sent sent = OnlySent(taken);
  EXPECT_EQ(sent.header.type(), MessageType::kNomsg);
  EXPECT_TRUE(sent.header.chunks()->reads.empty());
  EXPECT_EQ(responder_->exposed(), 0u);
  DoInvalidates(taken);
}

TEST_F(ExposingResponderTest, ReplyChunkThatIsTooShortComesBackUnused) {
  ChunkLists offered;
  offered.reply.emplace().push_back({0x77, 2000, 0x1000});
  Answer(7, 1000, {}, std::move(offered));
  const Taken taken = Take();
  EXPECT_TRUE(taken.writes.empty());
  const Sent sent = OnlySent(taken);
  EXPECT_EQ(sent.header.type(), MessageType::kNomsg);
  EXPECT_EQ((*sent.header.chunks()->reply)[0].length, 0u);
  EXPECT_EQ(ToHex(Read(*sent.header.chunks(), 0)), ToHex(base_));
}

// [5666bis:5.5#6] [5666bis:5.7.2#1]
TEST_F(ExposingResponderTest, WithoutThemALongReplyIsErrChunkAndDoneIsDropped) {
  auto config = Usual();
  config.profile = kRfc5666bis;
  config.exposed_max = 0;
  Make(config);
  Answer(7, 1000);
  Sent sent = OnlySent(Take());
  EXPECT_EQ(sent.header.body, Header::Body(ErrChunk{}));
  EXPECT_EQ(sent.header.credits, kReceives);
  Done(7);
  EXPECT_EQ(Take().order, "R");
  EXPECT_EQ(responder_->stats().ignored, 1u);
}

TEST_F(ExposingResponderTest, DoneForNothingAndDoneTwiceAreDropped) {
  Done(7);
  EXPECT_EQ(Take().order, "R");
  Answer(7, 1000);
  OnlySent(Take());
  Done(8);
  EXPECT_EQ(Take().order, "R");
  EXPECT_EQ(responder_->exposed(), 1u);
  Done(7);
  Done(7);
  const Taken taken = Take();
  EXPECT_EQ(taken.order, "RIR");
  DoInvalidates(taken);
  Done(7);
  EXPECT_EQ(Take().order, "R");
  EXPECT_EQ(responder_->stats().ignored, 4u);
  EXPECT_EQ(responder_->stats().dones, 1u);
  EXPECT_EQ(posted_.size(), kReceives);
}

TEST_F(ExposingResponderTest, OfTwoRepliesUnderOneXidTheFirstIsDoneFirst) {
  Answer(7, 1000);
  OnlySent(Take());
  const auto first = memory_.live;
  Answer(7, 1100);
  OnlySent(Take());
  Done(7);
  const Taken taken = Take();
  ASSERT_EQ(taken.invalidates.size(), 1u);
  EXPECT_TRUE(first.contains(taken.invalidates[0].registration));
  DoInvalidates(taken);
  EXPECT_EQ(responder_->exposed(), 1u);
}

// [5666:11#7]
TEST_F(ExposingResponderTest, OneExposedTooManyIsWithheldAndOthersAreNot) {
  for (uint32_t xid = 1; xid <= 3; ++xid) Answer(xid, 600);
  EXPECT_EQ(Take().sends.size(), 2u);
  EXPECT_EQ(responder_->replies_withheld(), 1u);
  EXPECT_EQ(responder_->unanswered(), 1u);
  Answer(4, 2);
  const Sent sent = OnlySent(Take());
  EXPECT_EQ(sent.header.xid, 4u);
  EXPECT_EQ(sent.header.credits, kReceives - 2) << "grants stay what they are";
  Done(2);
  Taken taken = Take();
  EXPECT_TRUE(taken.sends.empty()) << "what it had is reachable";
  DoInvalidates(taken);
  EXPECT_EQ(OnlySent(Take()).header.xid, 3u);
  EXPECT_EQ(responder_->exposed(), 2u);
  EXPECT_EQ(responder_->replies_withheld(), 0u);
}

// [2004:3.3#3] [5666:3.3#2] [5666:11+3]
TEST_F(ExposingResponderTest, NothingIsGrantedWhileAnotherCallIsInProgressAndOneCreditWithTheLast) {
  for (const ProtocolProfile& profile : AllProfiles()) {
    SCOPED_TRACE(profile.name);
    const auto budget = std::make_shared<CreditBudget>(3, 0);
    auto config = Usual();
    config.profile = profile;
    config.exposed_max = profile.replies_by_read_chunk ? 2 : 0;
    config.budgets = {budget};
    Make(config);
    Answer(1, 2);
    EXPECT_EQ(OnlySent(Take()).header.credits, 3u);
    // Others come, for whom there is no more than this.
    CreditWindow second(8), third(8);
    second.Join(budget);
    third.Join(budget);
    std::vector<RequestId> ids;
    for (uint32_t xid = 2; xid <= 4; ++xid) {
      Receive({.xid = xid, .credits = 10, .body = RdmaMsg{}}, Message(xid, kCallWord));
      ids.push_back(*responder_->TakeRequest(now_));
    }
    const uint32_t least = profile.zero_grants ? 0 : 1;
    EXPECT_EQ(GrantWith(ids[0], 2), least);
    responder_->Refuse(ids[1], now_);
    Sent sent = OnlySent(Take());
    EXPECT_EQ(sent.header.body, Header::Body(ErrChunk{}));
    EXPECT_EQ(sent.header.credits, least) << "with RDMA_ERROR as well";
    EXPECT_EQ(responder_->stats().credits_granted, least);
    EXPECT_EQ(GrantWith(ids[2], 2), 1u) << "nothing else would bring the next credit";
    EXPECT_EQ(responder_->stats().credits_granted, 1u);
    if (!profile.replies_by_read_chunk) continue;

    // RDMA_DONE takes a credit.
    for (uint32_t xid = 5; xid <= 6; ++xid) {
      Receive({.xid = xid, .credits = 10, .body = RdmaMsg{}}, Message(xid, kCallWord));
      ids.push_back(*responder_->TakeRequest(now_));
    }
    EXPECT_EQ(GrantWith(ids[3], 1000), 1u);
    EXPECT_EQ(responder_->exposed(), 1u);
    EXPECT_EQ(GrantWith(ids[4], 2), 1u);
    Done(5);
    DoInvalidates(Take());
  }
}

TEST_F(ExposingResponderTest, BytesAreBoundedAsWell) {
  Answer(1, 1500);
  EXPECT_EQ(Take().sends.size(), 1u);
  Answer(2, 1500);
  EXPECT_EQ(Take().sends.size(), 0u) << "12 KB would be exposed";
  Answer(3, 2600);
  EXPECT_EQ(OnlySent(Take()).header.body, Header::Body(ErrChunk{})) << "more than there may ever be";
  Done(1);
  DoInvalidates(Take());
  EXPECT_EQ(OnlySent(Take()).header.xid, 2u);
}

// [5666:3.8#4] A client may send RDMA_DONE at any time, whatever else it has sent.
TEST_F(ExposingResponderTest, ThereIsAReceiveForEveryCallGrantedAndEveryDone) {
  Answer(1, 1000);
  Answer(2, 1000);
  Take();
  for (uint32_t xid = 10; xid < 10 + kReceives - 2; ++xid) {
    Receive({.xid = xid, .credits = 10, .body = RdmaMsg{}}, Message(xid, kCallWord));
  }
  EXPECT_EQ(responder_->posted_receives(), 2u);
  Done(1);
  Done(2);
  EXPECT_EQ(responder_->stats().dones, 2u);
}

// [5666:3.8#1] [5666:11#5] [5666:11#8]
TEST_F(ExposingResponderTest, WhoNeverSaysDoneLosesTheConnection) {
  Answer(1, 600);
  OnlySent(Take());
  now_ = At(501);
  Answer(2, 600);
  OnlySent(Take());
  Answer(3, 600);
  EXPECT_EQ(responder_->replies_withheld(), 1u);
  EXPECT_EQ(responder_->Deadline(), At(1001));
  Done(1);
  DoInvalidates(Take());
  EXPECT_EQ(responder_->Deadline(), At(1501));
  responder_->OnDeadline(At(1500));
  Taken taken = Take();
  EXPECT_TRUE(taken.disconnects.empty());
  responder_->OnDeadline(At(1501));
  taken = Take();
  ASSERT_EQ(taken.disconnects.size(), 1u);
  EXPECT_EQ(taken.disconnects[0].why, Disconnect::Why::kReplyNotRead);
  EXPECT_EQ(LastTold(trace_, "exposure.expired"), "exposure.expired exposed=2 withheld=0");
  memory_.live.clear();
  responder_->OnDisconnected(At(1502));
  EXPECT_EQ(responder_->exposed(), 0u);
  EXPECT_EQ(responder_->unanswered(), 0u);
  EXPECT_EQ(responder_->Deadline(), std::nullopt);
}

TEST_F(ExposingResponderTest, MemoryLivesUntilTheConnectionIsGone) {
  auto memory = std::make_shared<int>();
  const std::weak_ptr<int> held = memory;
  Answer(1, 600, {}, {}, memory);
  Answer(2, 600);
  Answer(3, 600, {}, {}, std::move(memory));
  Take();
  EXPECT_EQ(responder_->replies_withheld(), 1u);
  responder_->Close();
  EXPECT_FALSE(held.expired());
  memory_.live.clear();
  responder_->OnDisconnected(At(5));
  EXPECT_TRUE(held.expired());
  EXPECT_EQ(responder_->unanswered(), 0u);
}

TEST_F(ExposingResponderTest, WhatTheDeviceDoesNotExposeIsErrChunk) {
  const auto item = Pattern(3000);
  memory_.refuse_after = 1;
  Answer(1, 1000, {item});
  const Taken taken = Take();
  const Sent sent = OnlySent(taken);
  EXPECT_EQ(sent.header.body, Header::Body(ErrChunk{}));
  EXPECT_EQ(taken.invalidates.size(), 1u) << "what was exposed before";
  EXPECT_EQ(responder_->exposed(), 1u);
  DoInvalidates(taken);
  EXPECT_EQ(responder_->exposed(), 0u);
}

// [2004:4.1#5]
TEST_F(ExposingResponderTest, UnderTheDraftOf2004TheXidOfTheHeaderPrevails) {
  for (const ProtocolProfile& profile : AllProfiles()) {
    SCOPED_TRACE(profile.name);
    MakeBy(profile);
    Receive({.xid = 7, .credits = 1, .body = RdmaMsg{}}, Message(8, kCallWord));
    const auto id = responder_->TakeRequest(now_);
    ASSERT_EQ(id.has_value(), profile.header_xid_prevails);
    if (!id) {
      EXPECT_EQ(OnlySent(Take()).header.body, Header::Body(ErrChunk{}));
      continue;
    }
    EXPECT_EQ(ByteReader(responder_->stream(*id).base).U32(), 7u) << "and so says the message";
    responder_->Drop(*id, "test", now_);
    Take();
  }
}

// [2004:4.1+3]
TEST_F(ExposingResponderTest, UnderTheDraftOf2004TheXidOfTheHeaderPrevailsOverThatOfALongCall) {
  for (const ProtocolProfile& profile : AllProfiles()) {
    SCOPED_TRACE(profile.name);
    MakeBy(profile);
    const auto message = Message(8, kCallWord, 20);
    ChunkLists lists;
    lists.reads.push_back({0, {1, static_cast<uint32_t>(message.size()), 0}});
    Receive({.xid = 7, .credits = 1, .body = RdmaNomsg{std::move(lists)}});
    const Taken taken = Take();
    ASSERT_EQ(taken.reads.size(), 1u);
    CopyBytes(taken.reads[0].sink, message);
    responder_->OnReadDone(taken.reads[0].tag, now_);
    DoInvalidates(Take());
    const auto id = responder_->TakeRequest(now_);
    ASSERT_EQ(id.has_value(), profile.header_xid_prevails);
    if (!id) {
      EXPECT_EQ(OnlySent(Take()).header.body, Header::Body(ErrChunk{}));
      continue;
    }
    EXPECT_EQ(ByteReader(responder_->stream(*id).base).U32(), 7u);
    responder_->Drop(*id, "test", now_);
    Take();
  }
}

// [5666:5.2+3] [2004:5.2+4]
TEST_F(ExposingResponderTest, ReplyThatFitsInlineLeavesTheReplyChunkAloneByTheOlderDocuments) {
  for (const ProtocolProfile& profile : AllProfiles()) {
    SCOPED_TRACE(profile.name);
    MakeBy(profile);
    ChunkLists offered;
    offered.reply.emplace().push_back({0x77, 8192, 0x1000});
    Answer(7, 10, {}, std::move(offered));
    const Taken taken = Take();
    EXPECT_EQ(taken.writes.empty(), profile.reply_chunk_when_needed);
    const Sent sent = OnlySent(taken);
    EXPECT_EQ(sent.header.type(), profile.reply_chunk_when_needed ? MessageType::kMsg : MessageType::kNomsg);
    EXPECT_EQ((*sent.header.chunks()->reply)[0].length, profile.reply_chunk_when_needed ? 0u : 48u);
    DoInvalidates(taken);
  }
}

// [5666:3.7+6] Ours leave it out.
TEST_F(ExposingResponderTest, RoundUpOfAChunkMayHaveStayedInTheMessage) {
  const auto data = Pattern(101, 3);
  for (const ProtocolProfile& profile : AllProfiles()) {
    for (const size_t round_up : {0u, 3u}) {
      SCOPED_TRACE(std::string(profile.name) + " " + std::to_string(round_up));
      MakeBy(profile);
      ChunkLists lists;
      lists.reads.push_back({12, {1, 101, 0}});
      std::vector<std::byte> message(12 + round_up + 4);
      ByteWriter out(message);
      out.U32(7);
      out.U32(kCallWord);
      out.U32(101);
      out.Bytes(std::vector<std::byte>(round_up, std::byte{0xaa}));
      out.U32(77);
      Receive({.xid = 7, .credits = 1, .body = RdmaMsg{std::move(lists)}}, message);
      const Taken taken = Take();
      ASSERT_EQ(taken.reads.size(), 1u);
      CopyBytes(taken.reads[0].sink, data);
      responder_->OnReadDone(taken.reads[0].tag, now_);
      DoInvalidates(Take());
      const auto id = responder_->TakeRequest(now_);
      ASSERT_TRUE(id.has_value());
      XdrReader in(responder_->stream(*id));
      in.U64("XID and direction");
      EXPECT_EQ(ToHex(in.EligibleOpaque("data", 200)), ToHex(data));
      const bool right = in.U32("word") == 77u && in.Finish().has_value();
      EXPECT_EQ(right, round_up == 0 || profile.round_up_may_stay);
      responder_->Drop(*id, "test", now_);
      Take();
    }
  }
}

// [5666:3.4#1] [5666:3.7#2] [5666:3.7#1]
TEST_F(ExposingResponderTest, ReadEntriesJoinAndAnyItemMayComeByThem) {
  const auto data = Pattern(101, 3);
  for (const ProtocolProfile& profile : AllProfiles()) {
    SCOPED_TRACE(profile.name);
    MakeBy(profile);
    // A counted item in two entries with a third for its round-up, then a word and a string by one chunk.
    ChunkLists lists;
    lists.reads.push_back({12, {1, 60, 0}});
    lists.reads.push_back({72, {1, 41, 60}});
    lists.reads.push_back({113, {2, 3, 0}});
    lists.reads.push_back({116, {3, 11, 0}});
    std::vector<std::byte> message(12);
    ByteWriter out(message);
    out.U32(7);
    out.U32(kCallWord);
    out.U32(101);
    Receive({.xid = 7, .credits = 1, .body = RdmaMsg{std::move(lists)}}, message);
    const Taken taken = Take();
    if (!profile.read_entries_join) {
      EXPECT_EQ(OnlySent(taken).header.body, Header::Body(ErrChunk{}));
      continue;
    }
    ASSERT_EQ(taken.reads.size(), 4u);
    for (const PostRead& read : taken.reads) {
      if (read.source.handle == 1) {
        CopyBytes(read.sink, ConstBytes(data).subspan(read.source.offset, read.source.length));
      }
      if (read.source.handle == 3) {
        ByteWriter words(read.sink);
        words.U32(77);
        words.U32(3);
        words.Bytes(AsBytes("abc"));
      }
      responder_->OnReadDone(read.tag, now_);
    }
    DoInvalidates(Take());
    const auto id = responder_->TakeRequest(now_);
    ASSERT_TRUE(id.has_value());
    XdrReader in(responder_->stream(*id));
    in.U64("XID and direction");
    EXPECT_EQ(ToHex(in.EligibleOpaque("data", 200)), ToHex(data));
    EXPECT_EQ(in.U32("word"), 77u);
    EXPECT_EQ(in.String("text", 10), "abc");
    EXPECT_TRUE(in.Finish().has_value());
    responder_->Drop(*id, "test", now_);
    Take();
  }
}

}  // namespace
}  // namespace stagecoach::rpcrdma
