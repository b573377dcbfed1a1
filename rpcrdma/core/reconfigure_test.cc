// Limits and buffers that change while a connection lives: what rpcrdma/ccp rests on.
#include <gtest/gtest.h>

#include "rpcrdma/core/engine_test_support.h"
#include "rpcrdma/core/requester.h"
#include "rpcrdma/core/responder.h"

namespace stagecoach::rpcrdma {
namespace {

using namespace testing;  // NOLINT: what tests of the engines are made of

constexpr uint32_t kSlots = 4;

class ResponderReconfigureTest : public ::testing::Test {
 protected:
  void Make(Responder::Config config) {
    responder_.emplace(config, send_.view(), receive_.view(), memory_, nullptr);
    responder_->Start();
  }
  void MakeWithOneReceive() {
    Responder::Config config;
    config.one_receive_first = true;
    Make(config);
    const Taken taken = TakeAll(*responder_);
    ASSERT_EQ(taken.order, "R");
    first_ = taken.receives[0];
  }
  RequestId Call(uint32_t slot, uint32_t xid, const BufferArena& arena) {
    responder_->OnReceive(slot,
                          Put(arena, slot, {.xid = xid, .credits = 10, .body = RdmaMsg{}}, Message(xid, kCallWord)),
                          std::nullopt, At(1));
    const auto id = responder_->TakeRequest(At(1));
    EXPECT_TRUE(id.has_value());
    return id.value_or(0);
  }
  Result<void, ReplyVerdict> Complete(RequestId id, size_t words) {
    const auto message = Message(responder_->xid(id), kReplyWord, words);
    responder_->reply_buffer(id) = message;
    return responder_->Complete(id, {.message_size = message.size()}, At(2));
  }

  FakeMemory memory_;
  Arena send_{6, 1024};
  Arena receive_{kSlots, 1024};
  Arena larger_send_{6, 4096};
  Arena larger_receive_{kSlots, 4096};
  std::optional<Responder> responder_;
  uint32_t first_ = 0;
};

TEST_F(ResponderReconfigureTest, UntilTheFirstAnswerOneReceiveIsPostedAndThenAllAreAheadOfIt) {
  MakeWithOneReceive();
  const RequestId id = Call(first_, 7, receive_.view());
  EXPECT_EQ(TakeAll(*responder_).order, "");
  ASSERT_TRUE(Complete(id, 4));
  const Taken taken = TakeAll(*responder_);
  EXPECT_EQ(taken.order, "RRRRS");
  EXPECT_EQ(std::set<uint32_t>(taken.receives.begin(), taken.receives.end()).size(), kSlots);
  EXPECT_EQ(Decode(send_.view(), taken.sends[0]).header.credits, kSlots);
  // From then on one for one.
  ASSERT_TRUE(Complete(Call(taken.receives[0], 8, receive_.view()), 4));
  EXPECT_EQ(TakeAll(*responder_).order, "RS");
}

TEST_F(ResponderReconfigureTest, AMessageThatIsDroppedGivesItsReceiveBackAndAnErrorPostsThemAll) {
  MakeWithOneReceive();
  responder_->OnReceive(first_, Put(receive_.view(), first_, {.xid = 1, .credits = 1, .body = RdmaDone{}}, {}),
                        std::nullopt, At(1));
  Taken taken = TakeAll(*responder_);
  ASSERT_EQ(taken.order, "R");
  // A header of no version that is known here.
  std::vector<std::byte> words(16);
  ByteWriter out(words);
  for (const uint32_t word : {2u, 9u, 1u, 0u}) out.U32(word);
  const uint32_t slot = taken.receives[0];
  responder_->OnReceive(slot, PutRaw(receive_.view(), slot, words), std::nullopt, At(1));
  taken = TakeAll(*responder_);
  EXPECT_EQ(taken.order, "RRRRS");
}

TEST_F(ResponderReconfigureTest, TheFirstCallMayHaveTheBuffersReplaced) {
  MakeWithOneReceive();
  const RequestId id = Call(first_, 7, receive_.view());
  ASSERT_TRUE(responder_->may_adopt_buffers(id));
  responder_->AdoptBuffers(larger_send_.view(), larger_receive_.view());
  responder_->SetLimits(4096, 16, true);
  // It is still read where it came in.
  EXPECT_EQ(ToHex(responder_->stream(id).base), ToHex(Message(7, kCallWord)));
  ASSERT_TRUE(Complete(id, 4));
  Taken taken = TakeAll(*responder_);
  EXPECT_EQ(taken.order, "RRRRS");
  EXPECT_EQ(Decode(larger_send_.view(), taken.sends[0]).header.xid, 7u);
  responder_->OnSendDone(taken.sends[0].slot, At(3));

  // A call and a reply that only the new ones have room for.
  const uint32_t slot = taken.receives[0];
  const auto long_call = Message(8, kCallWord, 900);
  responder_->OnReceive(slot,
                        Put(larger_receive_.view(), slot, {.xid = 8, .credits = 10, .body = RdmaMsg{}}, long_call),
                        std::nullopt, At(4));
  const auto second = responder_->TakeRequest(At(4));
  ASSERT_TRUE(second.has_value());
  EXPECT_EQ(responder_->stream(*second).base.size(), long_call.size());
  EXPECT_FALSE(responder_->may_adopt_buffers(*second)) << "the others are with the device";
  ASSERT_TRUE(Complete(*second, 900));
  taken = TakeAll(*responder_);
  ASSERT_EQ(taken.order, "RS");
  EXPECT_GT(taken.sends[0].length, 3600u);
}

TEST_F(ResponderReconfigureTest, NoOtherCallMayHaveTheBuffersReplaced) {
  MakeWithOneReceive();
  ASSERT_TRUE(Complete(Call(first_, 7, receive_.view()), 4));
  const Taken taken = TakeAll(*responder_);
  EXPECT_FALSE(responder_->may_adopt_buffers(Call(taken.receives[0], 8, receive_.view())));

  Make({});
  const Taken all = TakeAll(*responder_);
  EXPECT_EQ(all.receives.size(), kSlots);
  EXPECT_FALSE(responder_->may_adopt_buffers(Call(all.receives[0], 7, receive_.view())));
}

TEST_F(ResponderReconfigureTest, LimitsHoldForRepliesCompletedFromThenOn) {
  Responder::Config config;
  config.send_inline = 1024;
  Make(config);
  const Taken all = TakeAll(*responder_);
  const RequestId id = Call(all.receives[0], 7, receive_.view());
  responder_->SetLimits(512, 16, true);
  ASSERT_TRUE(Complete(id, 200));  // 808 bytes, and no chunk for them
  const Taken taken = TakeAll(*responder_);
  ASSERT_EQ(taken.sends.size(), 1u);
  EXPECT_TRUE(std::holds_alternative<ErrChunk>(Decode(send_.view(), taken.sends[0]).header.body));
}

// [5666:6.2#5] [2004:6.1#6]
TEST_F(ResponderReconfigureTest, WithoutRdmaReadsCallsWithReadChunksAreRefused) {
  Make({});
  const Taken all = TakeAll(*responder_);
  const RequestId id = Call(all.receives[0], 7, receive_.view());
  responder_->SetLimits(1024, 0, false);
  ASSERT_TRUE(Complete(id, 4));
  TakeAll(*responder_);
  ChunkLists lists;
  lists.reads.push_back({24, {0x1234, 100, 0}});
  const uint32_t slot = all.receives[1];
  responder_->OnReceive(
      slot, Put(receive_.view(), slot, {.xid = 8, .credits = 10, .body = RdmaMsg{lists}}, Message(8, kCallWord)),
      std::nullopt, At(3));
  const Taken taken = TakeAll(*responder_);
  EXPECT_TRUE(taken.reads.empty());
  ASSERT_EQ(taken.sends.size(), 1u);
  EXPECT_TRUE(std::holds_alternative<ErrChunk>(Decode(send_.view(), taken.sends[0]).header.body));
  // Others are served as before.
  ASSERT_TRUE(Complete(Call(all.receives[2], 9, receive_.view()), 4));
  EXPECT_EQ(TakeAll(*responder_).order, "RS");
}

// [5666:6.2#4] [2004:6.1#5]
TEST_F(ResponderReconfigureTest, NoMoreReadsAreInFlightThanTheLimitThatHolds) {
  Make({});
  const Taken all = TakeAll(*responder_);
  const RequestId id = Call(all.receives[0], 7, receive_.view());
  responder_->SetLimits(1024, 2, true);
  ASSERT_TRUE(Complete(id, 4));
  TakeAll(*responder_);
  ChunkLists lists;
  for (uint32_t i = 0; i < 5; ++i) lists.reads.push_back({24, {0x1234, 100, i * 100}});
  const uint32_t slot = all.receives[1];
  responder_->OnReceive(
      slot, Put(receive_.view(), slot, {.xid = 8, .credits = 10, .body = RdmaMsg{lists}}, Message(8, kCallWord)),
      std::nullopt, At(3));
  size_t done = 0;
  for (Taken taken = TakeAll(*responder_); !taken.reads.empty(); taken = TakeAll(*responder_)) {
    ASSERT_LE(taken.reads.size(), 2u);
    done += taken.reads.size();
    for (const PostRead& read : taken.reads) responder_->OnReadDone(read.tag, At(4));
  }
  EXPECT_EQ(done, 5u);
  responder_->OnDisconnected(At(5));
}

class RequesterReconfigureTest : public ::testing::Test {
 protected:
  RequesterReconfigureTest() {
    requester_.emplace(Requester::Config{}, send_.view(), receive_.view(), memory_, xids_, nullptr);
    requester_->Start();
    TakeAll(*requester_);
  }
  Result<CallId, SubmitRefusal> Submit(size_t words) {
    const auto message = Message(0, kCallWord, words);
    return requester_->Submit({.buffer = message, .message_size = message.size(), .reply_base_max = 100}, At(1));
  }

  FakeMemory memory_;
  SequentialXids xids_{1};
  Arena send_{4, 4096};
  Arena receive_{4, 4096};
  std::optional<Requester> requester_;
};

// [5666:6.2#3] [2004:6.1#3]
TEST_F(RequesterReconfigureTest, TheNextCallIsPlannedWithinTheNewLimits) {
  PlanLimits limits;
  limits.send_inline = 4096;
  limits.receive_inline = 4096;
  requester_->SetLimits(limits, 0);
  ASSERT_TRUE(Submit(900));
  Taken taken = TakeAll(*requester_);
  ASSERT_EQ(taken.sends.size(), 1u);
  EXPECT_EQ(Decode(send_.view(), taken.sends[0]).header.type(), MessageType::kMsg);
  EXPECT_GT(taken.sends[0].length, 3600u);
  requester_->OnDisconnected(At(2));
}

TEST_F(RequesterReconfigureTest, WithoutReadsACallGoesInlineOrNotAtAll) {
  PlanLimits limits;
  limits.read_segments_max = 0;
  requester_->SetLimits(limits, 0);
  const auto refused = Submit(900);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error(), SubmitRefusal::kTooLarge);
  ASSERT_TRUE(Submit(100));
  EXPECT_EQ(TakeAll(*requester_).order, "S");
  requester_->OnDisconnected(At(2));
}

}  // namespace
}  // namespace stagecoach::rpcrdma
