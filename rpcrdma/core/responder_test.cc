#include "rpcrdma/core/responder.h"

#include <gtest/gtest.h>

#include <deque>

#include "base/prng.h"
#include "rpcrdma/core/engine_test_support.h"

namespace stagecoach::rpcrdma {
namespace {

using namespace testing;  // NOLINT: what tests of the engines are made of

struct Answer {
  size_t words = 2;
  ConstBytes item;
  std::shared_ptr<const void> memory;
  LastingMemory* lasting = nullptr;
};

class ResponderTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kSlots = 4;

  ResponderTest() : memory_(100000) { Make({}); }

  void Make(const Responder::Config& config) {
    responder_.emplace(config, send_.view(), receive_.view(), memory_, &trace_);
    responder_->Start();
    posted_ = TakeAll(*responder_).receives;
    EXPECT_EQ(posted_.size(), kSlots);
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
  void Receive(const Header& header, ConstBytes message) {
    const uint32_t slot = NextReceive();
    responder_->OnReceive(slot, Put(receive_.view(), slot, header, message), std::nullopt, At(1));
  }
  void ReceiveRaw(ConstBytes bytes) {
    const uint32_t slot = NextReceive();
    responder_->OnReceive(slot, PutRaw(receive_.view(), slot, bytes), std::nullopt, At(1));
  }
  void Call(uint32_t xid, ChunkLists chunks = {}) {
    Receive({.xid = xid, .credits = 10, .body = RdmaMsg{std::move(chunks)}}, Message(xid, kCallWord));
  }
  RequestId MustTakeRequest() {
    const auto id = responder_->TakeRequest(At(1));
    EXPECT_TRUE(id.has_value());
    return id.value_or(0);
  }
  void Complete(RequestId id, const Answer& answer = {}) {
    const auto message = Message(responder_->xid(id), kReplyWord, answer.words);
    std::vector<std::byte>& buffer = responder_->reply_buffer(id);
    if (buffer.size() < message.size()) buffer.resize(message.size());
    CopyBytes(buffer, message);
    Responder::ReplySpec reply{.message_size = message.size(), .memory = answer.memory, .lasting = answer.lasting};
    if (!answer.item.empty()) reply.items.push_back({message.size(), answer.item});
    EXPECT_TRUE(responder_->Complete(id, std::move(reply), At(2)).has_value());
  }
  // Carries out Reads as the driver does.
  void DoReads(const Taken& taken, ConstBytes source) {
    for (const PostRead& read : taken.reads) {
      CopyBytes(read.sink, source.subspan(read.source.offset, read.source.length));
      responder_->OnReadDone(read.tag, At(2));
    }
  }
  void DoInvalidates(const Taken& taken) {
    for (const Invalidate& invalidate : taken.invalidates) {
      EXPECT_EQ(memory_.live.erase(invalidate.registration), 1u);
      responder_->OnInvalidated(invalidate.tag, At(2));
    }
  }
  MessageType OnlyErrorSent(const Taken& taken, uint32_t xid) {
    EXPECT_EQ(taken.sends.size(), 1u);
    if (taken.sends.size() != 1) return MessageType::kMsg;
    const Sent sent = Decode(send_.view(), taken.sends[0]);
    EXPECT_EQ(sent.header.xid, xid);
    EXPECT_EQ(sent.header.credits, kSlots);
    EXPECT_FALSE(taken.sends[0].invalidate.has_value());
    return sent.header.type();
  }

  TraceLog trace_;
  FakeMemory memory_;
  Arena send_{6, 1024};
  Arena receive_{kSlots, 1024};
  std::optional<Responder> responder_;
  std::vector<uint32_t> posted_;
};

ChunkLists ReadChunks(std::initializer_list<ReadSegment> reads) {
  ChunkLists lists;
  for (const ReadSegment& read : reads) lists.reads.push_back(read);
  return lists;
}
ChunkLists WriteChunk(std::initializer_list<Segment> segments) {
  ChunkLists lists;
  lists.writes.AppendChunk(std::span<const Segment>(segments.begin(), segments.size()));
  return lists;
}

// [traps:interop#15]
TEST_F(ResponderTest, InlineCallIsHandedOutAndAnswered) {
  Call(7);
  const RequestId id = MustTakeRequest();
  EXPECT_EQ(responder_->xid(id), 7u);
  EXPECT_EQ(ToHex(responder_->stream(id).base), ToHex(Message(7, kCallWord)));
  Complete(id);
  const Taken taken = Take();
  // The Receive is posted before the reply can be seen.
  EXPECT_EQ(taken.order, "RS");
  const Sent sent = Decode(send_.view(), taken.sends[0]);
  EXPECT_EQ(sent.header.xid, 7u);
  EXPECT_EQ(sent.header.credits, kSlots);
  EXPECT_EQ(ToHex(sent.message), ToHex(Message(7, kReplyWord, 2)));
  EXPECT_FALSE(taken.sends[0].prompt);
}

TEST_F(ResponderTest, CallsInProgressAreBoundedByTheReceives) {
  for (uint32_t xid = 1; xid <= kSlots; ++xid) Call(xid);
  EXPECT_EQ(responder_->posted_receives(), 0u);
  EXPECT_EQ(responder_->unanswered(), kSlots);
  // Answered out of order.
  std::vector<RequestId> ids;
  for (uint32_t i = 0; i < kSlots; ++i) ids.push_back(MustTakeRequest());
  Complete(ids[2]);
  EXPECT_EQ(Decode(send_.view(), Take().sends.at(0)).header.xid, 3u);
  EXPECT_EQ(responder_->posted_receives() + responder_->unanswered(), kSlots);
}

TEST_F(ResponderTest, ReadChunkIsPulledThenFencedThenHandedOut) {
  const auto source = Pattern(3001);
  // Two segments of one chunk, at the end of the message.
  Call(7, ReadChunks({{24, {11, 2000, 0}}, {24, {12, 1001, 2000}}}));
  Taken taken = Take();
  ASSERT_EQ(taken.reads.size(), 2u);
  EXPECT_FALSE(responder_->TakeRequest(At(1)).has_value());
  EXPECT_EQ(taken.reads[0].source.handle, 11u);
  EXPECT_EQ(taken.reads[1].sink.data(), taken.reads[0].sink.data() + 2000);
  DoReads(taken, source);
  EXPECT_FALSE(responder_->TakeRequest(At(1)).has_value()) << "the sink is still reachable";
  taken = Take();
  ASSERT_EQ(taken.invalidates.size(), 1u);
  DoInvalidates(taken);
  const RequestId id = MustTakeRequest();
  const ReducedStream& stream = responder_->stream(id);
  ASSERT_EQ(stream.chunks.size(), 1u);
  EXPECT_EQ(stream.chunks[0].position, 24u);
  EXPECT_EQ(ToHex(stream.chunks[0].data), ToHex(source));
  EXPECT_EQ(responder_->stats().bytes_placed_by_read, 3001u);
  Complete(id);
  EXPECT_EQ(memory_.used, 0u);
}

// [traps:responder#4]
TEST_F(ResponderTest, EmptyReadSegmentsArePassedOver) {
  const auto source = Pattern(1500);
  Call(7,
       ReadChunks({{24, {1, 0, 0}}, {24, {2, 1000, 0}}, {24, {3, 0, ~uint64_t{0}}}, {24, {4, 500, 1000}}, {24, {}}}));
  Taken taken = Take();
  ASSERT_EQ(taken.reads.size(), 2u);
  EXPECT_EQ(taken.reads[0].source.handle, 2u);
  EXPECT_EQ(taken.reads[1].source.handle, 4u);
  EXPECT_EQ(taken.reads[1].sink.data(), taken.reads[0].sink.data() + 1000);
  DoReads(taken, source);
  DoInvalidates(Take());
  RequestId id = MustTakeRequest();
  EXPECT_EQ(ToHex(responder_->stream(id).chunks[0].data), ToHex(source));
  Complete(id);

  // And a chunk of nothing else.
  Call(8, ReadChunks({{24, {1, 0, 0}}, {24, {2, 0, 0}}}));
  taken = Take();
  EXPECT_TRUE(taken.reads.empty());
  id = MustTakeRequest();
  ASSERT_EQ(responder_->stream(id).chunks.size(), 1u);
  EXPECT_TRUE(responder_->stream(id).chunks[0].data.empty());
  Complete(id);
}

// [5666bis:4.1+1] Its memory takes part in Reads and Writes of its own alone.
TEST_F(ResponderTest, ExposesNothingToItsPeer) {
  const auto source = Pattern(3000);
  ChunkLists lists = ReadChunks({{24, {11, 3000, 0}}});
  lists.writes.AppendChunk(SegmentArray{{21, 4000, 0}});
  lists.reply = SegmentArray{{31, 4000, 0}};
  Call(7, lists);
  const Taken reads = Take();
  ASSERT_EQ(memory_.live.size(), 1u);
  EXPECT_EQ(memory_.live.begin()->second.use, MemoryUse::kReadSink);
  DoReads(reads, source);
  DoInvalidates(Take());
  EXPECT_TRUE(memory_.live.empty());
  const auto result = Pattern(2000);
  Complete(MustTakeRequest(), {.words = 500, .item = result});
  const Taken taken = Take();
  EXPECT_EQ(taken.writes.size(), 2u);
  EXPECT_EQ(memory_.live.size(), 2u);
  for (const auto& [id, live] : memory_.live) EXPECT_EQ(live.use, MemoryUse::kWriteSource);
  const Sent sent = Decode(send_.view(), taken.sends.at(0));
  EXPECT_TRUE(sent.header.chunks()->reads.empty());
  responder_->OnSendDone(taken.sends[0].slot, At(3));
  DoInvalidates(Take());
}

TEST_F(ResponderTest, SaysWhoseTurnItIs) {
  EXPECT_FALSE(responder_->busy());
  uint64_t signs = responder_->signs_of_life();
  const auto lives = [&] { return std::exchange(signs, responder_->signs_of_life()) != signs; };
  const auto source = Pattern(3000);
  Call(7, ReadChunks({{24, {11, 3000, 0}}}));
  EXPECT_TRUE(lives());
  EXPECT_FALSE(responder_->busy()) << "the requester's data is awaited";
  DoReads(Take(), source);
  EXPECT_TRUE(lives());
  DoInvalidates(Take());
  EXPECT_TRUE(responder_->busy());
  const RequestId id = MustTakeRequest();
  EXPECT_TRUE(responder_->busy());
  EXPECT_FALSE(lives());
  Complete(id);
  EXPECT_FALSE(responder_->busy());
  responder_->OnSendDone(Take().sends.at(0).slot, At(3));
  EXPECT_TRUE(lives());

  // Memory that somebody else has: to wait for it is not the requester's doing. What its own replies keep is.
  memory_.used = 100000;
  Call(8, ReadChunks({{24, {11, 3000, 0}}}));
  EXPECT_EQ(responder_->waiting_for_memory(), 1u);
  EXPECT_TRUE(responder_->busy());
  const auto item = Pattern(900);
  ChunkLists room = WriteChunk({{21, 1000, 0}});
  Call(9, room);
  Complete(MustTakeRequest(), {.item = item, .memory = std::make_shared<int>()});
  EXPECT_FALSE(responder_->busy());
  const Taken taken = Take();
  responder_->OnSendDone(taken.sends.at(0).slot, At(3));
  DoInvalidates(Take());
  EXPECT_TRUE(responder_->busy());
}

// [5666bis:4.6.3#2]
TEST_F(ResponderTest, LongCallIsPulledFromItsPositionZeroChunk) {
  const auto message = Message(7, kCallWord, 700);
  Receive({.xid = 7, .credits = 1, .body = RdmaNomsg{ReadChunks({{0, {11, 2808, 0}}})}}, {});
  DoReads(Take(), message);
  DoInvalidates(Take());
  const RequestId id = MustTakeRequest();
  EXPECT_EQ(ToHex(responder_->stream(id).base), ToHex(message));
  EXPECT_EQ(responder_->stats().calls_long, 1u);
  Complete(id);
}

// Chunks stand at the end of a segment of the message, and at the end of the message itself.
// [traps:responder#3]
TEST_F(ResponderTest, ALongCallMayHaveChunksWhereItsSegmentsEnd) {
  const auto message = Message(7, kCallWord, 700);  // 2808 bytes
  const auto item = Pattern(100);
  ChunkLists lists = ReadChunks({{0, {11, 1000, 0}}, {0, {12, 1808, 1000}}, {1000, {13, 98, 0}}, {2908, {14, 100, 0}}});
  Receive({.xid = 7, .credits = 1, .body = RdmaNomsg{lists}}, {});
  const Taken taken = Take();
  ASSERT_EQ(taken.reads.size(), 4u);
  for (const PostRead& read : taken.reads) {
    const ConstBytes source = read.source.handle < 13 ? ConstBytes(message) : ConstBytes(item);
    CopyBytes(read.sink, source.subspan(read.source.offset, read.source.length));
    responder_->OnReadDone(read.tag, At(2));
  }
  DoInvalidates(Take());
  const RequestId id = MustTakeRequest();
  const ReducedStream& stream = responder_->stream(id);
  EXPECT_EQ(ToHex(stream.base), ToHex(message));
  ASSERT_EQ(stream.chunks.size(), 2u);
  EXPECT_EQ(stream.chunks[0].position, 1000u);
  EXPECT_EQ(ToHex(stream.chunks[0].data), ToHex(ConstBytes(item).first(98)));
  EXPECT_EQ(stream.chunks[1].position, 2908u);
  EXPECT_EQ(ToHex(stream.chunks[1].data), ToHex(item));
  Complete(id);
}

// [5666bis:5.1.1#1]
TEST_F(ResponderTest, LongCallWithAnotherXidInsideIsRefused) {
  Receive({.xid = 7, .credits = 1, .body = RdmaNomsg{ReadChunks({{0, {11, 2808, 0}}})}}, {});
  DoReads(Take(), Message(8, kCallWord, 700));
  DoInvalidates(Take());
  EXPECT_FALSE(responder_->TakeRequest(At(1)).has_value());
  EXPECT_EQ(OnlyErrorSent(Take(), 7), MessageType::kError);
  EXPECT_EQ(LastTold(trace_, "call.refused"),
            std::string("call.refused xid=7 why=") + ToString(ChunkFault::kXidMismatch));
  EXPECT_EQ(memory_.used, 0u);
}

TEST_F(ResponderTest, ReadsStayUnderTheLimitOverAllCalls) {
  Make({.reads_max = 3});
  const auto source = Pattern(4000);
  const auto chunks = ReadChunks({{24, {1, 100, 0}}, {24, {2, 100, 100}}});
  Call(1, chunks);
  Call(2, chunks);
  Call(3, chunks);
  Taken taken = Take();
  EXPECT_EQ(taken.reads.size(), 3u);
  size_t reads = taken.reads.size();
  while (!taken.reads.empty() || !taken.invalidates.empty()) {
    // One at a time: each that ends lets one more begin.
    for (const PostRead& read : taken.reads) {
      CopyBytes(read.sink, ConstBytes(source).subspan(read.source.offset, read.source.length));
      responder_->OnReadDone(read.tag, At(2));
    }
    DoInvalidates(taken);
    taken = Take();
    EXPECT_LE(taken.reads.size(), 3u);
    reads += taken.reads.size();
  }
  EXPECT_EQ(reads, 6u);
  for (int i = 0; i < 3; ++i) Complete(MustTakeRequest());
}

TEST_F(ResponderTest, CallWaitsForMemoryInOrderOfArrival) {
  const auto large = ReadChunks({{24, {1, 60000, 0}}});
  const auto small = ReadChunks({{24, {1, 100, 0}}});
  const auto source = Pattern(60000);
  Call(1, large);
  Call(2, large);  // 100000 bytes are allowed
  Call(3, small);  // would fit, and must not overtake
  EXPECT_EQ(Told(trace_, "call.waits"),
            (std::vector<std::string>{"call.waits request=2 xid=2 waiting=1", "call.waits request=3 xid=3 waiting=2"}));
  Taken taken = Take();
  ASSERT_EQ(taken.reads.size(), 1u);
  DoReads(taken, source);
  DoInvalidates(Take());
  Complete(MustTakeRequest());
  taken = Take();
  ASSERT_EQ(taken.reads.size(), 2u);
  DoReads(taken, source);
  DoInvalidates(Take());
  Complete(MustTakeRequest());
  Complete(MustTakeRequest());
  EXPECT_EQ(memory_.used, 0u);
}

// A call that waits for memory holds none, in part or whole: two of them can never wait for each other.
TEST_F(ResponderTest, CallThatWaitsHoldsNoMemory) {
  Call(1, ReadChunks({{24, {1, 30000, 0}}, {30024, {2, 30000, 0}}}));
  EXPECT_EQ(memory_.used, 60000u);
  Call(2, ReadChunks({{24, {3, 30000, 0}}, {30024, {4, 30000, 0}}}));
  EXPECT_EQ(memory_.used, 60000u);
  EXPECT_EQ(Take().reads.size(), 2u);
  responder_->OnDisconnected(At(3));
  EXPECT_EQ(memory_.used, 0u);
}

// Calls without Read chunks are served meanwhile, but no more of them than there are receive buffers: what services
// take for them is what the call waits for.
TEST_F(ResponderTest, CallThatWaitsForMemoryIsNotOvertakenForEver) {
  const auto source = Pattern(100000);
  Call(1, ReadChunks({{24, {1, 60000, 0}}}));
  const Taken reads = Take();
  Call(2, ReadChunks({{24, {2, 60000, 0}}}));
  // Only two receive buffers are left for the small ones.
  uint32_t xid = 10;
  for (uint32_t i = 0; i < kSlots; ++i) {
    Call(xid++);
    const RequestId small = MustTakeRequest();
    Complete(small);
    const Taken taken = Take();
    responder_->OnSendDone(taken.sends.at(0).slot, At(3));
  }
  Call(xid);
  EXPECT_FALSE(responder_->has_request());
  EXPECT_FALSE(responder_->TakeRequest(At(2)).has_value());
  // The call that arrived before it is handed out all the same: it has the memory.
  DoReads(reads, source);
  DoInvalidates(Take());
  const RequestId first = MustTakeRequest();
  EXPECT_EQ(responder_->xid(first), 1u);
  EXPECT_FALSE(responder_->has_request());
  Complete(first);
  ASSERT_TRUE(responder_->has_request());
  EXPECT_EQ(responder_->xid(MustTakeRequest()), xid);
  DoReads(Take(), source);
  DoInvalidates(Take());
  const RequestId second = MustTakeRequest();
  EXPECT_EQ(responder_->xid(second), 2u);
  Complete(second);
}

TEST_F(ResponderTest, MemoryForOneOfTwoWaitingCallsStartsThatOne) {
  const auto large = ReadChunks({{24, {1, 60000, 0}}});
  Call(1, large);
  Call(2, large);
  Call(3, large);
  DoReads(Take(), Pattern(60000));
  DoInvalidates(Take());
  // The second call's Read begins although the third has to wait on.
  Complete(MustTakeRequest());
  EXPECT_EQ(Take().reads.size(), 1u);
  responder_->OnDisconnected(At(3));
}

// [traps:responder#5]
TEST_F(ResponderTest, CallThatAsksForTooMuchIsRefusedAndTheConnectionStays) {
  Responder::Config config;
  config.data_limits.read_bytes_max = 5000;
  Make(config);
  Call(7, ReadChunks({{24, {1, 5001, 0}}}));
  Taken taken = Take();
  EXPECT_EQ(OnlyErrorSent(taken, 7), MessageType::kError);
  EXPECT_EQ(taken.order, "RS");
  EXPECT_TRUE(taken.disconnects.empty());
  Call(8);
  Complete(MustTakeRequest());
  EXPECT_EQ(Take().sends.size(), 1u);
}

TEST_F(ResponderTest, WithoutReadsOfItsOwnItRefusesReadChunks) {
  Make({.reads_max = 0});
  Call(7, ReadChunks({{24, {1, 100, 0}}}));
  EXPECT_EQ(OnlyErrorSent(Take(), 7), MessageType::kError);
}

// [5666bis:5.2.2#1] [5666bis:4.4.5#1] [5666bis:4.4.5#2]
TEST_F(ResponderTest, ResultGoesIntoTheWriteChunkBeforeTheSend) {
  Call(7, WriteChunk({{21, 1000, 0x10000}, {22, 1000, 0x20000}, {23, 1000, 0x30000}}));
  const RequestId id = MustTakeRequest();
  EXPECT_EQ(responder_->result_room(id, 0), 3000u);
  EXPECT_EQ(responder_->result_room(id, 1), std::nullopt);
  auto result = std::make_shared<std::vector<std::byte>>(Pattern(1500));
  std::weak_ptr<const void> alive = result;
  const ConstBytes item = *result;
  Complete(id, {.item = item, .memory = std::move(result)});
  Taken taken = Take();
  EXPECT_EQ(taken.order.substr(taken.order.size() - 4), "wwRS");
  ASSERT_EQ(taken.writes.size(), 2u);
  EXPECT_EQ(taken.writes[0].target, (Segment{21, 1000, 0x10000}));
  EXPECT_EQ(taken.writes[1].target, (Segment{22, 500, 0x20000}));
  EXPECT_EQ(ToHex(taken.writes[1].source), ToHex(item.subspan(1000)));
  const Sent sent = Decode(send_.view(), taken.sends[0]);
  ASSERT_EQ(sent.header.chunks()->writes.size(), 1u);
  ASSERT_EQ(sent.header.chunks()->writes[0].size(), 3u);
  EXPECT_EQ(sent.header.chunks()->writes[0][1].length, 500u);
  EXPECT_EQ(sent.header.chunks()->writes[0][2].length, 0u);
  EXPECT_TRUE(taken.sends[0].prompt);

  // The memory is the device's until the Send is done and the registration undone.
  EXPECT_FALSE(alive.expired());
  responder_->OnSendDone(taken.sends[0].slot, At(3));
  EXPECT_FALSE(alive.expired());
  DoInvalidates(Take());
  EXPECT_TRUE(alive.expired());
  EXPECT_TRUE(memory_.live.empty());
}

// No registration to undo, but the device is still reading until the Send is done.
TEST_F(ResponderTest, ResultInLastingMemoryIsHeldUntilItsSendIsDone) {
  Call(7, WriteChunk({{21, 1000, 0x10000}, {22, 1000, 0x20000}}));
  auto result = std::make_shared<std::vector<std::byte>>(Pattern(1500));
  std::weak_ptr<const void> alive = result;
  const ConstBytes item = *result;
  auto* const lasting = reinterpret_cast<LastingMemory*>(result.get());
  Complete(MustTakeRequest(), {.item = item, .memory = std::move(result), .lasting = lasting});
  const Taken taken = Take();
  ASSERT_EQ(taken.writes.size(), 2u);
  EXPECT_EQ(taken.writes[0].local_key, FakeMemory::kLastingKey);
  EXPECT_EQ(taken.writes[1].local_key, FakeMemory::kLastingKey);
  EXPECT_TRUE(taken.sends.at(0).prompt);
  EXPECT_TRUE(memory_.live.empty());
  EXPECT_EQ(responder_->stats().registrations, 0u);
  EXPECT_EQ(responder_->stats().memory_reused, 1u) << "one item, though in two segments";
  EXPECT_FALSE(alive.expired());
  responder_->OnSendDone(taken.sends[0].slot, At(3));
  EXPECT_TRUE(Take().invalidates.empty());
  EXPECT_TRUE(alive.expired());
}

// The message is written from the engine's own buffer.
TEST_F(ResponderTest, LastingMemoryIsThatOfItemsAlone) {
  ChunkLists chunks = WriteChunk({{1, 5000, 0}});
  chunks.reply.emplace();
  chunks.reply->push_back({2, 5000, 0});
  Call(1, chunks);
  const auto item = Pattern(3000);
  int object = 0;
  auto* const lasting = reinterpret_cast<LastingMemory*>(&object);
  memory_.reuses_lasting = false;
  Complete(MustTakeRequest(), {.words = 500, .item = item, .lasting = lasting});
  const Taken taken = Take();
  ASSERT_EQ(taken.writes.size(), 2u);
  ASSERT_EQ(memory_.live.size(), 2u);
  for (const auto& [id, live] : memory_.live) {
    EXPECT_EQ(live.lasting, live.memory.data() == item.data() ? lasting : nullptr);
  }
  EXPECT_EQ(responder_->stats().memory_reused, 0u);
  EXPECT_EQ(responder_->stats().memory_not_reused, 1u);
  responder_->OnSendDone(taken.sends.at(0).slot, At(3));
  DoInvalidates(Take());
}

// [5666bis:4.4.5.1#1]
TEST_F(ResponderTest, UnusedWriteChunkIsReturnedWithLengthsOfZero) {
  Call(7, WriteChunk({{21, 1000, 0}, {22, 1000, 0}}));
  Complete(MustTakeRequest());
  const Taken taken = Take();
  EXPECT_TRUE(taken.writes.empty());
  const Sent sent = Decode(send_.view(), taken.sends.at(0));
  ASSERT_EQ(sent.header.chunks()->writes[0].size(), 2u);
  EXPECT_EQ(TotalLength(sent.header.chunks()->writes[0]), 0u);
}

TEST_F(ResponderTest, ResultLongerThanItsWriteChunkBecomesErrChunk) {
  const auto result = Pattern(1001);
  Call(7, WriteChunk({{21, 1000, 0}}));
  Complete(MustTakeRequest(), {.item = result});
  const Taken taken = Take();
  EXPECT_EQ(OnlyErrorSent(taken, 7), MessageType::kError);
  EXPECT_TRUE(taken.writes.empty());
}

// [traps:responder#6]
TEST_F(ResponderTest, AWriteChunkWithoutSegmentsHoldsNothingAndComesBack) {
  Make({.may_invalidate = true});
  ChunkLists lists;
  lists.writes.BeginChunk();
  lists.reply.emplace();
  Call(7, lists);
  RequestId id = MustTakeRequest();
  EXPECT_EQ(responder_->result_room(id, 0), 0u);
  Complete(id);
  Taken taken = Take();
  EXPECT_TRUE(taken.writes.empty());
  EXPECT_FALSE(taken.sends.at(0).invalidate.has_value());
  const Sent sent = Decode(send_.view(), taken.sends[0]);
  EXPECT_EQ(sent.header.type(), MessageType::kMsg);
  ASSERT_EQ(sent.header.chunks()->writes.size(), 1u);
  EXPECT_TRUE(sent.header.chunks()->writes[0].empty());
  ASSERT_TRUE(sent.header.chunks()->reply.has_value());
  EXPECT_TRUE(sent.header.chunks()->reply->empty());

  const auto result = Pattern(4);
  Call(8, lists);
  Complete(MustTakeRequest(), {.item = result});
  taken = Take();
  EXPECT_TRUE(taken.writes.empty());
  EXPECT_EQ(OnlyErrorSent(taken, 8), MessageType::kError);
}

// [5666bis:5.3.4#2] [5666bis:5.5#6]
TEST_F(ResponderTest, LongReplyGoesIntoTheReplyChunkOrBecomesErrChunk) {
  ChunkLists lists;
  lists.reply.emplace();
  lists.reply->push_back({31, 3000, 0});
  Call(7, lists);
  Complete(MustTakeRequest(), {.words = 600});
  Taken taken = Take();
  ASSERT_EQ(taken.writes.size(), 1u);
  EXPECT_EQ(ToHex(taken.writes[0].source), ToHex(Message(7, kReplyWord, 600)));
  Sent sent = Decode(send_.view(), taken.sends.at(0));
  EXPECT_EQ(sent.header.type(), MessageType::kNomsg);
  EXPECT_TRUE(sent.message.empty());
  EXPECT_EQ((*sent.header.chunks()->reply)[0].length, 2408u);
  const std::string told = LastTold(trace_, "reply.sent");
  EXPECT_NE(told.find(" type=RDMA_NOMSG "), std::string::npos) << told;
  EXPECT_NE(told.find(" placed=0 reply_chunk=2408 writes=1 written=2408 "), std::string::npos) << told;
  responder_->OnSendDone(taken.sends[0].slot, At(3));
  DoInvalidates(Take());

  Call(8);  // no Reply chunk
  Complete(MustTakeRequest(), {.words = 600});
  EXPECT_EQ(OnlyErrorSent(Take(), 8), MessageType::kError);
}

TEST_F(ResponderTest, MemoryRegisteredForAReplyThatCannotBeWrittenStaysUntilItIsInvalid) {
  ChunkLists chunks = WriteChunk({{1, 5000, 0}});
  chunks.reply.emplace();
  chunks.reply->push_back({2, 5000, 0});
  Call(1, chunks);
  auto item = std::make_shared<std::vector<std::byte>>(Pattern(3000));
  const ConstBytes bytes = *item;
  const std::weak_ptr<std::vector<std::byte>> watch = item;
  memory_.refuse_after = 1;
  Complete(MustTakeRequest(), {.words = 500, .item = bytes, .memory = std::move(item)});
  Taken taken = Take();
  EXPECT_EQ(OnlyErrorSent(taken, 1), MessageType::kError);
  EXPECT_TRUE(taken.writes.empty());
  EXPECT_EQ(LastTold(trace_, "source.refused"), "source.refused xid=1");
  ASSERT_EQ(memory_.live.size(), 1u);
  EXPECT_TRUE(taken.sends.at(0).prompt);
  EXPECT_FALSE(watch.expired());
  responder_->OnSendDone(taken.sends.at(0).slot, At(3));
  taken = Take();
  EXPECT_FALSE(watch.expired());
  DoInvalidates(taken);
  EXPECT_TRUE(memory_.live.empty());
  EXPECT_TRUE(watch.expired());
}

// [pvtdata:4.1#1] [pvtdata:4.1#2] [pvtdata:4.1#3]
TEST_F(ResponderTest, InvalidatesATagOfTheCallOnlyWhenBothEndsAgreed) {
  Call(7, WriteChunk({{21, 1000, 0}}));
  Complete(MustTakeRequest());
  EXPECT_FALSE(Take().sends.at(0).invalidate.has_value());

  Make({.may_invalidate = true});
  Call(8, WriteChunk({{22, 1000, 0}}));
  Complete(MustTakeRequest());
  EXPECT_EQ(Take().sends.at(0).invalidate, 22u);
  Call(9);
  Complete(MustTakeRequest());
  EXPECT_FALSE(Take().sends.at(0).invalidate.has_value());
}

// A client that offers memory of its own for round-up, behind the result's, keeps its steering tag for other calls. The
// round-up is not written, and that tag not invalidated.
// [traps:interop#2]
TEST_F(ResponderTest, ASegmentForRoundUpUnderAnotherTagIsLeftAlone) {
  Make({.may_invalidate = true});
  const auto result = Pattern(1001);
  Call(7, WriteChunk({{21, 1001, 0x10000}, {99, 3, 0x20000}}));
  Complete(MustTakeRequest(), {.item = result});
  const Taken taken = Take();
  ASSERT_EQ(taken.writes.size(), 1u);
  EXPECT_EQ(taken.writes[0].target, (Segment{21, 1001, 0x10000}));
  EXPECT_EQ(taken.sends.at(0).invalidate, 21u);
  const Sent sent = Decode(send_.view(), taken.sends[0]);
  ASSERT_EQ(sent.header.chunks()->writes[0].size(), 2u);
  EXPECT_EQ(sent.header.chunks()->writes[0][0].length, 1001u);
  EXPECT_EQ(sent.header.chunks()->writes[0][1], (Segment{99, 0, 0x20000}));
  responder_->OnSendDone(taken.sends[0].slot, At(3));
  DoInvalidates(Take());
}

// An empty segment need not name a steering tag at all.
TEST_F(ResponderTest, NeverInvalidatesTheTagOfAnEmptySegment) {
  Make({.may_invalidate = true});
  Call(7, WriteChunk({{0, 0, 0}, {22, 1000, 0}}));
  Complete(MustTakeRequest());
  EXPECT_EQ(Take().sends.at(0).invalidate, 22u);
  ChunkLists lists = WriteChunk({{0, 0, 0}});
  lists.reply.emplace();
  lists.reply->push_back({0, 0, 0});
  Call(8, lists);
  Complete(MustTakeRequest());
  EXPECT_FALSE(Take().sends.at(0).invalidate.has_value());
  lists.reply->push_back({24, 4, 0});
  Call(9, lists);
  Complete(MustTakeRequest(), {.words = 100});
  EXPECT_EQ(Take().sends.at(0).invalidate, 24u);
}

TEST_F(ResponderTest, ReplyChunkIsUsedAsConfigured) {
  ChunkLists lists;
  lists.reply.emplace();
  lists.reply->push_back({31, 4000, 0x1000});
  for (const ReplyChunkUse use : {ReplyChunkUse::kWheneverOffered, ReplyChunkUse::kWhenNeeded}) {
    Make({.reply_chunk_use = use});
    Call(7, lists);
    Complete(MustTakeRequest());
    Taken taken = Take();
    Sent sent = Decode(send_.view(), taken.sends.at(0));
    const bool always = use == ReplyChunkUse::kWheneverOffered;
    EXPECT_EQ(sent.header.type(), always ? MessageType::kNomsg : MessageType::kMsg);
    EXPECT_EQ(taken.writes.size(), always ? 1u : 0u);
    EXPECT_EQ(TotalLength(*sent.header.chunks()->reply), always ? Message(0, 0, 2).size() : 0u);
    responder_->OnSendDone(taken.sends[0].slot, At(3));
    DoInvalidates(Take());

    Call(8, lists);
    Complete(MustTakeRequest(), {.words = 600});
    taken = Take();
    EXPECT_EQ(Decode(send_.view(), taken.sends.at(0)).header.type(), MessageType::kNomsg);
    responder_->OnSendDone(taken.sends[0].slot, At(3));
    DoInvalidates(Take());
  }
}

// [5666bis:4.3#3] [5666bis:4.3#2]
TEST_F(ResponderTest, GrantFollowsItsBudgetAndIsNeverZero) {
  const auto budget = std::make_shared<CreditBudget>(kSlots, 0);
  Make({.budgets = {budget}});
  const auto grant = [&] {
    Call(7);
    Complete(MustTakeRequest());
    const Taken taken = Take();
    responder_->OnSendDone(taken.sends.at(0).slot, At(3));
    return Decode(send_.view(), taken.sends[0]).header.credits;
  };
  EXPECT_EQ(grant(), kSlots);
  std::deque<CreditWindow> others;
  const auto join = [&] { others.emplace_back(kSlots).Join(budget); };
  join();
  EXPECT_EQ(grant(), 2u);
  EXPECT_EQ(responder_->credits_granted(), 2u);
  for (uint32_t i = 0; i < kSlots; ++i) join();
  EXPECT_EQ(grant(), 1u) << "though the share of so many is none";
  // Errors grant, too.
  Receive({.xid = 8, .credits = 1, .body = RdmaMsg{}}, {});
  EXPECT_EQ(Decode(send_.view(), Take().sends.at(0)).header.credits, 1u);
  others.clear();
  EXPECT_EQ(grant(), kSlots);
}

// [5666bis:4.3#5] A requester that has not heard of the lower grant yet, or does not care.
TEST_F(ResponderTest, CallsInExcessOfALowerGrantAreServed) {
  const auto budget = std::make_shared<CreditBudget>(1, 0);
  Make({.budgets = {budget}});
  for (uint32_t xid = 1; xid <= kSlots; ++xid) Call(xid);
  for (uint32_t xid = 1; xid <= kSlots; ++xid) Complete(MustTakeRequest());
  const Taken taken = Take();
  ASSERT_EQ(taken.sends.size(), kSlots);
  for (const PostSend& send : taken.sends) EXPECT_EQ(Decode(send_.view(), send).header.credits, 1u);
  EXPECT_EQ(responder_->posted_receives(), kSlots);
}

// --- What a requester may do wrong ---

// [5666bis:5.7.1#2] Alignment and threshold are hints that may be ignored; the chunk lists behind them are not.
TEST_F(ResponderTest, MsgpIsTreatedAsMsg) {
  Receive({.xid = 7, .credits = 1, .body = RdmaMsgp{.align = 4096, .thresh = 1}}, Message(7, kCallWord));
  RequestId id = MustTakeRequest();
  EXPECT_EQ(ToHex(responder_->stream(id).base), ToHex(Message(7, kCallWord)));
  const std::string told = LastTold(trace_, "call.received");
  EXPECT_NE(told.find(" type=RDMA_MSGP position_zero=0 read_chunks=0 "), std::string::npos) << told;
  Complete(id);
  EXPECT_EQ(Decode(send_.view(), Take().sends.at(0)).header.type(), MessageType::kMsg);

  const auto source = Pattern(500);
  Receive({.xid = 8, .credits = 1, .body = RdmaMsgp{.chunks = ReadChunks({{24, {1, 500, 0}}})}}, Message(8, kCallWord));
  DoReads(Take(), source);
  DoInvalidates(Take());
  id = MustTakeRequest();
  ASSERT_EQ(responder_->stream(id).chunks.size(), 1u);
  EXPECT_EQ(ToHex(responder_->stream(id).chunks[0].data), ToHex(source));
  Complete(id);
  // What would be wrong in RDMA_MSG is wrong here.
  Take();
  Receive({.xid = 9, .credits = 1, .body = RdmaMsgp{}}, {});
  EXPECT_EQ(OnlyErrorSent(Take(), 9), MessageType::kError);
}

// [5666bis:5.5#2] [5666bis:5.5#3]
TEST_F(ResponderTest, OtherVersionIsAnsweredWithErrVersInOurs) {
  std::vector<std::byte> bytes(64);
  ByteWriter out(bytes);
  EncodeHeaderV1({.xid = 7, .version = 2, .credits = 1, .body = RdmaMsg{}}, out);
  ReceiveRaw(out.written());
  const Taken taken = Take();
  const Sent sent = Decode(send_.view(), taken.sends.at(0));
  EXPECT_EQ(sent.header.version, 1u);
  EXPECT_EQ(sent.header.xid, 7u);
  EXPECT_EQ(std::get<ErrVers>(sent.header.body), (ErrVers{1, 1}));
  EXPECT_EQ(taken.order, "RS");
  const std::string told = LastTold(trace_, "call.malformed");
  EXPECT_NE(told.find(" xid=7 dropped=0 why=RPC-over-RDMA version 2 "), std::string::npos) << told;
}

// [5666bis:5.5#4]
// [traps:responder#2]
TEST_F(ResponderTest, MalformedListsAreAnsweredWithErrChunk) {
  std::vector<std::byte> bytes(64);
  ByteWriter out(bytes);
  EncodeHeaderV1({.xid = 7, .credits = 1, .body = RdmaMsg{}}, out);
  bytes[19] = std::byte{9};  // the discriminator of the Read list
  ReceiveRaw(out.written());
  EXPECT_EQ(OnlyErrorSent(Take(), 7), MessageType::kError);
  // No message where one must be, and a position that is not a multiple of four [5666bis:4.4.4.1#4].
  Receive({.xid = 8, .credits = 1, .body = RdmaMsg{}}, {});
  EXPECT_EQ(OnlyErrorSent(Take(), 8), MessageType::kError);
  Call(9, ReadChunks({{30, {1, 100, 0}}}));
  EXPECT_EQ(OnlyErrorSent(Take(), 9), MessageType::kError);
  // Chunks that overlap, and one behind the end of the message, which has 24 bytes.
  Call(10, ReadChunks({{20, {1, 5, 0}}, {24, {1, 4, 0}}}));
  EXPECT_EQ(OnlyErrorSent(Take(), 10), MessageType::kError);
  Call(11, ReadChunks({{28, {1, 4, 0}}}));
  EXPECT_EQ(OnlyErrorSent(Take(), 11), MessageType::kError);
  EXPECT_EQ(responder_->stats().malformed, 5u);
}

// [traps:responder#12]
TEST_F(ResponderTest, RdmaErrorDoneRepliesAndScrapsAreDroppedWithoutAnAnswer) {
  Receive({.xid = 7, .credits = 1, .body = ErrChunk{}}, {});
  Receive({.xid = 7, .credits = 1, .body = ErrVers{}}, {});
  Receive({.xid = 7, .credits = 1, .body = RdmaDone{}}, {});  // [5666bis:5.7.2#1]
  Receive({.xid = 7, .credits = 1, .body = RdmaMsg{}}, Message(7, kReplyWord));
  Taken taken = Take();
  EXPECT_EQ(taken.order, "RRRR");
  EXPECT_EQ(responder_->stats().ignored, 4u);
  EXPECT_EQ(Told(trace_, "call.dropped"),
            (std::vector<std::string>{"call.dropped xid=7 why=RDMA_ERROR", "call.dropped xid=7 why=RDMA_ERROR",
                                      "call.dropped xid=7 why=RDMA_DONE", "call.dropped xid=7 why=not a call"}));
  // [5666bis:8.3.3#2]
  ReceiveRaw(Pattern(15));
  ReceiveRaw({});
  taken = Take();
  EXPECT_EQ(taken.order, "RR");
  EXPECT_EQ(responder_->unanswered(), 0u);
}

// [traps:responder#9]
TEST_F(ResponderTest, ErrorsWaitForASendBufferAndHoldTheirReceive) {
  // Six send buffers that are never reported done; then four more errors than can be sent.
  for (uint32_t xid = 1; xid <= 6; ++xid) {
    Receive({.xid = xid, .credits = 1, .body = RdmaMsg{}}, {});
    Take();
  }
  for (uint32_t xid = 7; xid <= 10; ++xid) Receive({.xid = xid, .credits = 1, .body = RdmaMsg{}}, {});
  EXPECT_TRUE(Take().order.empty());
  EXPECT_EQ(responder_->posted_receives(), 0u);
  EXPECT_EQ(responder_->unanswered(), kSlots);
  responder_->OnSendDone(0, At(3));
  EXPECT_EQ(OnlyErrorSent(Take(), 7), MessageType::kError);
}

TEST_F(ResponderTest, RandomBytesNeverLoseAReceive) {
  Responder::Config config;
  config.data_limits.read_bytes_max = 50000;
  Make(config);
  Prng prng(11);
  std::vector<std::byte> bytes(300);
  for (int round = 0; round < 20000; ++round) {
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(prng.Next());
    Header header{.xid = 7, .credits = 1};
    ChunkLists lists;
    if (prng.OneIn(2)) lists.reads.push_back({static_cast<uint32_t>(prng.Below(20) * 4), {1, 100, 0}});
    if (prng.OneIn(2)) lists.writes.AppendChunk(std::vector<Segment>{{2, 100, 0}});
    header.body = prng.OneIn(2) ? Header::Body(RdmaMsg{lists}) : Header::Body(RdmaNomsg{lists});
    ByteWriter out(bytes);
    EncodeHeaderV1(header, out);
    out.U32(7);
    out.U32(kCallWord);
    for (uint64_t flips = prng.Below(5); flips > 0; --flips)
      bytes[prng.Below(80)] = static_cast<std::byte>(prng.Next());
    ReceiveRaw(ConstBytes(bytes).first(prng.Below(bytes.size())));
    Taken taken = Take();
    while (!taken.reads.empty() || !taken.invalidates.empty() || !taken.sends.empty()) {
      for (const PostRead& read : taken.reads) responder_->OnReadDone(read.tag, At(2));
      DoInvalidates(taken);
      for (const PostSend& send : taken.sends) responder_->OnSendDone(send.slot, At(2));
      taken = Take();
    }
    while (const auto id = responder_->TakeRequest(At(1))) Complete(*id);
    taken = Take();
    for (const PostSend& send : taken.sends) responder_->OnSendDone(send.slot, At(2));
    DoInvalidates(Take());
    ASSERT_EQ(posted_.size(), kSlots) << "round " << round;
    ASSERT_EQ(responder_->unanswered(), 0u);
    ASSERT_EQ(memory_.used, 0u);
    ASSERT_TRUE(memory_.live.empty());
  }
}

// --- Endings ---

TEST_F(ResponderTest, RequestHeldOverTheEndOfTheConnectionStaysReadable) {
  const auto source = Pattern(100);
  Call(7, ReadChunks({{24, {1, 100, 0}}}));
  DoReads(Take(), source);
  DoInvalidates(Take());
  const RequestId id = MustTakeRequest();
  Call(8);
  responder_->OnDisconnected(At(3));
  EXPECT_EQ(ToHex(responder_->stream(id).chunks[0].data), ToHex(source));
  Complete(id);
  EXPECT_FALSE(responder_->TakeCommand().has_value());
  EXPECT_FALSE(responder_->TakeRequest(At(1)).has_value());
  EXPECT_EQ(memory_.used, 0u);
  EXPECT_EQ(responder_->unanswered(), 0u);
}

TEST_F(ResponderTest, EndDuringReadsFreesTheSinks) {
  Call(7, ReadChunks({{24, {1, 50000, 0}}}));
  Call(8, ReadChunks({{24, {1, 60000, 0}}}));
  Take();
  EXPECT_GT(memory_.used, 0u);
  responder_->OnDisconnected(At(3));
  EXPECT_EQ(memory_.used, 0u);
  EXPECT_EQ(responder_->unanswered(), 0u);
}

TEST_F(ResponderTest, CompletingARequestTwiceDoesNothing) {
  Call(7);
  const RequestId id = MustTakeRequest();
  Complete(id);
  EXPECT_EQ(Take().sends.size(), 1u);
  EXPECT_TRUE(responder_->Complete(id, {.message_size = 8}, At(2)).has_value());
  EXPECT_TRUE(Take().order.empty());
}

// [5666bis:8.3.4#3]
TEST_F(ResponderTest, InlineOnlyRefusesCallsWithChunks) {
  Make({.inline_only = true});
  ChunkLists with_write;
  with_write.writes.BeginChunk();
  with_write.writes.AppendSegment({.handle = 1, .length = 100, .offset = 0});
  Call(1, with_write);
  EXPECT_EQ(OnlyErrorSent(Take(), 1), MessageType::kError);
  ChunkLists with_reply;
  with_reply.reply.emplace();
  with_reply.reply->push_back({.handle = 1, .length = 100, .offset = 0});
  Call(2, with_reply);
  EXPECT_EQ(OnlyErrorSent(Take(), 2), MessageType::kError);
  ChunkLists with_read;
  with_read.reads.push_back({.position = 24, .target = {.handle = 1, .length = 100, .offset = 0}});
  Call(3, with_read);
  const Taken taken = Take();
  EXPECT_TRUE(taken.reads.empty());
  EXPECT_EQ(OnlyErrorSent(taken, 3), MessageType::kError);
  EXPECT_FALSE(responder_->TakeRequest(At(1)).has_value());
  EXPECT_EQ(posted_.size(), kSlots);
}

TEST_F(ResponderTest, TheTraceSaysWhyAReplyIsRefused) {
  Call(7);
  responder_->Refuse(MustTakeRequest(), At(2));
  EXPECT_EQ(OnlyErrorSent(Take(), 7), MessageType::kError);
  EXPECT_EQ(LastTold(trace_, "reply.impossible"),
            std::string("reply.impossible xid=7 why=") + ToString(ReplyVerdict::kNoRoomForReply));
}

// --- Peers that owe something ---

class PatienceTest : public ResponderTest {
 protected:
  static constexpr Duration kTime = 100s;

  PatienceTest() { Make({.data_time = kTime}); }
  ~PatienceTest() override { responder_->OnDisconnected(At(1000000)); }

  // Not a nanosecond earlier.
  void ExpectEndsAt(Instant due) {
    EXPECT_EQ(responder_->Deadline(), due);
    responder_->OnDeadline(due - Duration(1));
    EXPECT_TRUE(Take().disconnects.empty());
    responder_->OnDeadline(due);
    EXPECT_EQ(responder_->Deadline(), std::nullopt) << "once";
    const Taken taken = Take();
    ASSERT_EQ(taken.disconnects.size(), 1u);
    EXPECT_EQ(taken.disconnects[0].why, Disconnect::Why::kPeerOverdue);
  }
};

TEST_F(PatienceTest, NobodyWaitsForAClientThatOwesNothing) {
  EXPECT_EQ(responder_->Deadline(), std::nullopt);
  Call(7);
  Complete(MustTakeRequest());
  EXPECT_EQ(Take().sends.size(), 1u);
  EXPECT_EQ(responder_->Deadline(), std::nullopt) << "its Send may be reported late, and holds nothing";
}

TEST_F(PatienceTest, DataThatNeverComesEndsTheConnection) {
  Call(7, ReadChunks({{24, {11, 2000, 0}}, {24, {12, 1001, 2000}}}));
  const Taken taken = Take();
  ASSERT_EQ(taken.reads.size(), 2u);
  // One of the two comes.
  responder_->OnReadDone(taken.reads[0].tag, At(50));
  ExpectEndsAt(At(50) + kTime);
}

TEST_F(PatienceTest, DataThatComesIsWaitedForNoLonger) {
  const auto source = Pattern(2000);
  Call(7, ReadChunks({{24, {11, 2000, 0}}}));
  EXPECT_EQ(responder_->Deadline(), At(1) + kTime);
  DoReads(Take(), source);
  DoInvalidates(Take());
  EXPECT_EQ(responder_->Deadline(), std::nullopt);
  responder_->OnDeadline(At(1) + kTime);  // an old timer
  EXPECT_TRUE(Take().disconnects.empty());
  Complete(MustTakeRequest());
}

TEST_F(PatienceTest, AReplyThatIsNeverTakenEndsTheConnection) {
  const auto data = Pattern(500);
  Call(7, WriteChunk({{33, 500, 0}}));
  Complete(MustTakeRequest(), {.item = data});
  const Taken taken = Take();
  ASSERT_EQ(taken.sends.size(), 1u);
  ASSERT_TRUE(taken.sends[0].prompt);
  ExpectEndsAt(At(2) + kTime);
}

TEST_F(PatienceTest, AReplyThatIsTakenIsWaitedForNoLonger) {
  const auto data = Pattern(500);
  Call(7, WriteChunk({{33, 500, 0}}));
  Complete(MustTakeRequest(), {.item = data});
  responder_->OnSendDone(Take().sends.at(0).slot, At(5));
  DoInvalidates(Take());
  EXPECT_EQ(responder_->Deadline(), std::nullopt);
}

// Of two that are awaited at once, the end of one leaves the other its time.
TEST_F(PatienceTest, AReplyThatIsTakenLeavesTheDataAwaited) {
  const auto data = Pattern(500);
  Call(7, WriteChunk({{33, 500, 0}}));
  Complete(MustTakeRequest(), {.item = data});
  const Taken reply = Take();
  Call(8, ReadChunks({{24, {11, 2000, 0}}}));
  EXPECT_EQ(Take().reads.size(), 1u);
  responder_->OnSendDone(reply.sends.at(0).slot, At(60));
  DoInvalidates(Take());
  ExpectEndsAt(At(60) + kTime);
}

TEST_F(PatienceTest, RepliesThatWaitForASendBufferAreAwaited) {
  // As many small replies as there are send buffers, of which none is reported as taken, and one more.
  for (uint32_t xid = 1; xid <= 7; ++xid) {
    EXPECT_EQ(responder_->Deadline(), std::nullopt) << xid;
    Call(xid);
    Complete(MustTakeRequest());
    Take();
  }
  EXPECT_EQ(responder_->replies_waiting(), 1u);
  ExpectEndsAt(At(2) + kTime);
}

TEST_F(PatienceTest, AReplyThatHasGotItsSendBufferIsNot) {
  std::vector<uint32_t> slots;
  for (uint32_t xid = 1; xid <= 7; ++xid) {
    Call(xid);
    Complete(MustTakeRequest());
    for (const PostSend& send : Take().sends) slots.push_back(send.slot);
  }
  responder_->OnSendDone(slots.at(0), At(9));
  EXPECT_EQ(Take().sends.size(), 1u);
  EXPECT_EQ(responder_->Deadline(), std::nullopt);
}

// A byte now and then is as good as none: the memory of all of the call is held.
TEST_F(PatienceTest, DataThatDripsEndsTheConnection) {
  Make({.data_time = kTime, .data_rate_min = 1000});
  ChunkLists drips = ReadChunks({{24, {11, 1000, 0}}});
  for (uint32_t i = 0; i < 10; ++i) drips.reads.push_back({.position = 24, .target = {12 + i, 1, 0}});
  drips.reads.push_back({.position = 24, .target = {30, 1000, 0}});
  Call(7, drips);
  const Taken taken = Take();
  ASSERT_EQ(taken.reads.size(), 12u);
  // A second's worth of data, and ten bytes.
  for (int i = 0; i < 11; ++i) responder_->OnReadDone(taken.reads[i].tag, At(9000 * (i + 1)));
  ExpectEndsAt(At(1) + kTime + 1s + 10ms);
}

TEST_F(PatienceTest, DataThatComesSlowlyIsWaitedFor) {
  Make({.data_time = kTime, .data_rate_min = 1});
  ChunkLists slow;
  for (uint32_t i = 0; i < 10; ++i) slow.reads.push_back({.position = 24, .target = {12 + i, 90, 0}});
  Call(7, slow);
  const Taken taken = Take();
  ASSERT_EQ(taken.reads.size(), 10u);
  for (int i = 0; i < 10; ++i) {
    const Instant now = At(90000 * (i + 1));
    responder_->OnDeadline(now);
    responder_->OnReadDone(taken.reads[i].tag, now);
  }
  EXPECT_TRUE(Take().disconnects.empty());
  EXPECT_EQ(responder_->Deadline(), std::nullopt);
}

// Of one that drips.
TEST_F(PatienceTest, CallsThatComeMeanwhileAreNoTimeForTheFirst) {
  Make({.data_time = kTime, .data_rate_min = 1000});
  Call(1, ReadChunks({{24, {11, 1, 0}}, {24, {12, 2000, 0}}}));
  const Taken first = Take();
  responder_->OnReadDone(first.reads.at(0).tag, At(50000));
  Call(2, ReadChunks({{24, {11, 2000, 0}}}));
  Take();
  ExpectEndsAt(At(1) + kTime + 1ms);
}

TEST_F(PatienceTest, RepliesThatAreTakenInDripsEndTheConnection) {
  Make({.data_time = kTime, .data_rate_min = 1000});
  const auto data = Pattern(500);
  std::vector<PostSend> sends;
  for (uint32_t xid = 1; xid <= 3; ++xid) {
    Call(xid, WriteChunk({{33, 500, 0}}));
    Complete(MustTakeRequest(), {.item = data});
    const Taken taken = Take();
    ASSERT_EQ(taken.sends.size(), 1u);
    sends.push_back(taken.sends[0]);
  }
  // The first was owed alone at its time, the other two are owed together from then on.
  responder_->OnSendDone(sends[0].slot, At(50000));
  DoInvalidates(Take());
  EXPECT_EQ(responder_->Deadline(), At(50000) + kTime);
  responder_->OnSendDone(sends[1].slot, At(140000));
  DoInvalidates(Take());
  ExpectEndsAt(At(50000) + kTime + (500 + sends[1].length) * 1ms);
}

// As many as there are send buffers, of small replies, and then two more, of which one gets its buffer late.
TEST_F(PatienceTest, SendBuffersThatComeBackInDripsEndTheConnection) {
  Make({.data_time = kTime, .data_rate_min = 1000});
  std::vector<PostSend> sends;
  for (uint32_t xid = 1; xid <= 6; ++xid) {
    Call(xid);
    Complete(MustTakeRequest());
    for (const PostSend& send : Take().sends) sends.push_back(send);
  }
  ASSERT_EQ(sends.size(), 6u);
  for (uint32_t xid = 7; xid <= 9; ++xid) {
    Call(xid);
    Complete(MustTakeRequest());
    Take();
  }
  EXPECT_EQ(responder_->replies_waiting(), 3u);
  responder_->OnSendDone(sends[0].slot, At(50000));
  Take();
  responder_->OnSendDone(sends[1].slot, At(140000));
  Take();
  EXPECT_EQ(responder_->replies_waiting(), 1u);
  ExpectEndsAt(At(50000) + kTime + sends[1].length * 1ms);
}

TEST_F(PatienceTest, WithoutALimitItIsWaitedForAsLongAsItTakes) {
  Make({});
  Call(7, ReadChunks({{24, {11, 2000, 0}}}));
  EXPECT_EQ(Take().reads.size(), 1u);
  EXPECT_EQ(responder_->Deadline(), std::nullopt);
}

TEST_F(PatienceTest, AConnectionThatIsGoneIsWaitedForNoLonger) {
  Call(7, ReadChunks({{24, {11, 2000, 0}}}));
  Take();
  responder_->OnDisconnected(At(3));
  EXPECT_EQ(responder_->Deadline(), std::nullopt);
}

}  // namespace
}  // namespace stagecoach::rpcrdma
