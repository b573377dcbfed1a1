// What a connection makes of its carriers: carriers that are late, cannot be written, or are not there, in virtual
// time.
#include "emu/nic/infiniband/ib_connection.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "emu/llp/llp_test_support.h"
#include "emu/nic/roce_test_support.h"
#include "emu/wire/ib.h"

namespace stagecoach::emu {
namespace {

// What a carrier holds, and what becomes of what is written to it. Shared with the record layer, which the NIC keeps
// longer than a test lasts.
struct Wire {
  std::deque<std::vector<std::byte>> arrived;
  bool ended = false;    // behind what has arrived, the layer is reset
  bool writable = true;  // else the next write finds it reset
  bool dropped = false;  // the connection has let it go
  std::vector<wire::IbHeader> sent;
  Delivery delivery;

  void Arrive(const wire::IbHeader& header) {
    std::vector<std::byte> record(header.EncodedSize());
    ByteWriter out(record);
    header.Encode(out);
    arrived.push_back(std::move(record));
  }
};

class WireLlp final : public QuietLlp {
 public:
  explicit WireLlp(std::shared_ptr<Wire> wire) : shared_(std::move(wire)), wire_(*shared_) {}
  ~WireLlp() override { wire_.dropped = true; }

  size_t MaxUlpdu() const override { return 4096 + wire::kMaxIbHeaderSize; }
  bool CanQueue() const override { return queued_.size() < 64; }
  void QueueRecord(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie) override {
    size_t size = header.size();
    for (const TxPart& part : payload) size += part.size();
    wire_.sent.push_back(*wire::DecodeIb(header, size));
    queued_.push_back(cookie);
  }
  RxResult NextRecord(RecordHead* record) override {
    if (wire_.arrived.empty()) return {.status = wire_.ended ? RxStatus::kReset : RxStatus::kWouldBlock};
    *record = {.head = wire_.arrived.front(), .length = wire_.arrived.front().size()};
    return {.status = RxStatus::kReady};
  }
  RxResult Place(size_t, std::span<const MutableBytes>) override {
    wire_.arrived.pop_front();
    ++counters_.rx_records;
    return {.status = RxStatus::kReady};
  }
  TxResult Flush(MemoryPort&) override {
    if (!wire_.writable) return {.status = TxStatus::kReset};
    for (const uint64_t cookie : std::exchange(queued_, {})) sent_.push_back(cookie);
    return {};
  }
  bool TakeSent(uint64_t* cookie) override {
    if (sent_.empty()) return false;
    *cookie = sent_.front();
    sent_.pop_front();
    return true;
  }
  bool TxIdle() const override { return queued_.empty(); }
  Delivery delivery() const override { return wire_.delivery; }

 private:
  const std::shared_ptr<Wire> shared_;
  Wire& wire_;
  std::vector<uint64_t> queued_;
  std::deque<uint64_t> sent_;
};

class IbConnectionTest : public RocePairTest {
 protected:
  // a's QP in RTS, towards a peer that nobody finds, on the carrier wire_.
  void Carry(uint8_t retries = 7) {
    const IpEndpoint nowhere = *IpEndpoint::Parse("10.9.9.9", 0);
    for (const QpState state : {QpState::kInit, QpState::kRtr, QpState::kRts}) {
      QpAttributes attributes = HandAttributes(state, *b_.qp, nowhere);
      attributes.retry_count = retries;
      ASSERT_EQ(Modify(*a_.qp, attributes), 0);
    }
    constexpr uint64_t kFirstLife = 1;
    ASSERT_TRUE(a_.nic->TakeCarrier(a_.qp->qp_number(), kFirstLife, 1000, std::make_unique<WireLlp>(wire_)));
  }
  wire::IbHeader Answer(uint32_t psn, uint8_t syndrome) const {
    return {.op = wire::IbOp::kAck, .destination_qp = a_.qp->qp_number(), .psn = psn, .syndrome = syndrome};
  }
  int PostWrite(uint64_t wr_id, const TestBuffer& buffer) {
    return a_.Send(wr_id, {buffer.All()}, PostOpcode::kWrite, 0x100, 0);
  }

  const std::shared_ptr<Wire> wire_ = std::make_shared<Wire>();
};

constexpr uint8_t kAck = 0x1f;
constexpr uint8_t kRemoteAccessNak = 0x62;

TEST_F(IbConnectionTest, WhatThePeerSaidLastIsReadBeforeAStreamThatCannotBeWrittenIsGivenUp) {
  Wire& wire = *wire_;
  Carry(/*retries=*/0);
  const TestBuffer buffer = a_.Register(64);
  ASSERT_EQ(PostWrite(1, buffer), 0);
  ASSERT_EQ(PostWrite(2, buffer), 0);
  ASSERT_EQ(wire.sent.size(), 2u);
  wire.Arrive(Answer(0, kAck));
  wire.Arrive(Answer(1, kRemoteAccessNak));
  wire.ended = true;
  wire.writable = false;
  ASSERT_EQ(PostWrite(3, buffer), 0);
  ASSERT_TRUE(pair_.world.RunUntil([&] { return a_.Completed(3); }));
  EXPECT_EQ(a_.completions[0].status, CompletionStatus::kSuccess);
  EXPECT_EQ(a_.completions[1].status, CompletionStatus::kRemoteAccessError);
  EXPECT_EQ(a_.completions[2].status, CompletionStatus::kFlushed);
}

TEST_F(IbConnectionTest, AllOfItIsReadHoweverMuchItIs) {
  Wire& wire = *wire_;
  Carry();
  const TestBuffer buffer = a_.Register(64);
  ASSERT_EQ(PostWrite(1, buffer), 0);
  for (size_t i = 0; i < 3 * a_.nic->profile().receive_budget_records; ++i) wire.Arrive(Answer(0x123456, kAck));
  wire.Arrive(Answer(0, kAck));
  wire.writable = false;
  ASSERT_EQ(PostWrite(2, buffer), 0);
  ASSERT_TRUE(pair_.world.RunUntil([&] { return a_.Completed(1); }));
  EXPECT_EQ(a_.completions[0].status, CompletionStatus::kSuccess);
  ASSERT_TRUE(pair_.world.RunUntil([&] { return wire.dropped; })) << "it is given up all the same";
}

TEST_F(IbConnectionTest, AnAnswerThatIsThereIsNoSilence) {
  Wire& wire = *wire_;
  Carry(/*retries=*/0);
  const TestBuffer buffer = a_.Register(64);
  for (uint64_t i = 0; i < 10; ++i) {
    ASSERT_EQ(PostWrite(i, buffer), 0);
    // In time, but the thread that would have read it was not.
    wire.Arrive(Answer(static_cast<uint32_t>(i), kAck));
    ASSERT_TRUE(pair_.world.RunUntil([&] { return a_.Completed(i + 1); }));
    ASSERT_EQ(a_.completions[i].status, CompletionStatus::kSuccess);
  }
  EXPECT_EQ(wire.sent.size(), 10u) << "nothing was sent again";
}

// --- Silence ---

class IbSilenceTest : public IbConnectionTest {
 protected:
  // A Write of a QP that gives its peer 4 ms and no second time.
  void SetUp() override {
    Carry(/*retries=*/0);
    ASSERT_EQ(PostWrite(1, a_.Register(64)), 0);
    pair_.world.RunFor(0ms);
    ASSERT_EQ(wire_->sent.size(), 1u);
  }
  bool HasFailed() { return a_.Completed(1); }

  static constexpr Duration kLong = 300s;
};

TEST_F(IbSilenceTest, BytesThatThePeersHostHasNoRoomForAreNotSaidAgain) {
  wire_->delivery = {.taken = 100, .is_complete = false, .host_answers = true};
  pair_.world.RunFor(kLong);
  EXPECT_FALSE(HasFailed());
  EXPECT_EQ(wire_->sent.size(), 1u);
}

TEST_F(IbSilenceTest, BytesThatMoveNowAndThenAreUnderWay) {
  wire_->delivery = {.taken = 0, .is_complete = false, .host_answers = false};
  for (int i = 0; i < 20; ++i) {
    pair_.world.RunFor(5s);
    ++wire_->delivery.taken;
  }
  EXPECT_FALSE(HasFailed());
  EXPECT_EQ(wire_->sent.size(), 1u);
}

TEST_F(IbSilenceTest, APeerThatSpeaksHasAHostThatLives) {
  wire_->delivery = {.taken = 0, .is_complete = false, .host_answers = false};
  for (int i = 0; i < 20; ++i) {
    pair_.world.RunFor(5s);
    wire_->Arrive({.op = wire::IbOp::kWriteOnly, .destination_qp = a_.qp->qp_number()});
  }
  EXPECT_FALSE(HasFailed());
}

TEST_F(IbSilenceTest, AHostThatGivesNoSignOfLifeIsGivenUp) {
  wire_->delivery = {.taken = 64, .is_complete = false, .host_answers = false};
  pair_.world.RunFor(6900ms);
  EXPECT_FALSE(wire_->dropped);
  EXPECT_FALSE(HasFailed());
  pair_.world.RunFor(3s);
  EXPECT_TRUE(wire_->dropped);
  ASSERT_TRUE(HasFailed());
  EXPECT_EQ(a_.completions[0].status, CompletionStatus::kRetryExceeded);
  EXPECT_EQ(wire_->sent.size(), 1u);
}

TEST_F(IbSilenceTest, SignsOfLifeBeginTheTimeAnew) {
  wire_->delivery = {.taken = 64, .is_complete = false, .host_answers = false};
  for (int i = 0; i < 5; ++i) {
    pair_.world.RunFor(5s);
    wire_->delivery.host_answers = true;
    pair_.world.RunFor(2s);
    wire_->delivery.host_answers = false;
  }
  EXPECT_FALSE(HasFailed());
}

// What is sent again finds out whether the host is there; for that once a second is enough.
TEST_F(IbSilenceTest, TheHostOfAPeerThatStandsStillIsAskedOnceASecond) {
  pair_.world.RunFor(900ms);
  EXPECT_EQ(wire_->sent.size(), 1u);
  pair_.world.RunFor(kLong);
  EXPECT_FALSE(HasFailed());
  EXPECT_LE(wire_->sent.size(), 302u);
  EXPECT_GE(wire_->sent.size(), 140u);
  wire_->Arrive(Answer(0, kAck));
  ASSERT_TRUE(pair_.world.RunUntil([&] { return HasFailed(); }));
  EXPECT_EQ(a_.completions[0].status, CompletionStatus::kSuccess);
}

TEST_F(IbSilenceTest, AnAnswerMayComeBehindOtherThingsThatThePeerSays) {
  for (int i = 0; i < 100; ++i) {
    wire_->Arrive({.op = wire::IbOp::kWriteOnly, .destination_qp = a_.qp->qp_number()});
    pair_.world.RunFor(500ms);
  }
  EXPECT_FALSE(HasFailed());
  EXPECT_EQ(std::count_if(wire_->sent.begin(), wire_->sent.end(),
                          [](const wire::IbHeader& header) { return header.op == wire::IbOp::kWriteOnly; }),
            1);
}

// --- SQD ---

TEST_F(IbConnectionTest, AnInvalidationThatFailsWhileDrainingIsNoDrain) {
  Carry();
  const TestBuffer buffer = a_.Register(64);
  fcntl(a_.context->async_events().fd(), F_SETFL, O_NONBLOCK);
  ASSERT_EQ(PostWrite(1, buffer), 0);
  ASSERT_EQ(a_.Send(2, {}, PostOpcode::kLocalInvalidate, 0x5a5a5a00), 0);
  QpAttributes attributes;
  attributes.state = QpState::kSqd;
  attributes.notify_drained = true;
  ASSERT_EQ(a_.qp->Modify(attributes, qp_attr::kState | qp_attr::kEnSqdAsyncNotify), 0);
  wire_->Arrive(Answer(0, kAck));
  ASSERT_TRUE(pair_.world.RunUntil([&] { return a_.Completed(2); }));
  EXPECT_EQ(a_.completions[0].status, CompletionStatus::kSuccess);
  EXPECT_EQ(a_.completions[1].status, CompletionStatus::kWindowBindError);
  EXPECT_EQ(a_.qp->state(), QpState::kErr);
  while (const auto event = a_.context->async_events().GetEvent()) {
    EXPECT_NE(event->type, AsyncEventType::kSendQueueDrained);
    a_.context->async_events().Ack(*event);
  }
}

// --- RESET ---

TEST_F(IbConnectionTest, WhatResetForgetsCompletesNothingAndWakesNobody) {
  constexpr uint32_t kRoom = 4;
  TestHost small(pair_.fabric_a, "small", RoceProfile(), nullptr, kRoom);
  ReadyFor(*small.qp, *b_.qp, at_b_);
  const TestBuffer buffer = small.Register(64);
  const std::array<ScatterGather, 1> sges = {buffer.All()};
  for (int round = 0; round < 2; ++round) {
    for (uint64_t i = 0; i < 4 * kRoom; ++i) {
      SendRequest request;
      request.wr_id = i;
      request.sges = sges;
      ASSERT_EQ(small.qp->PostSend(request), 0);
      ASSERT_EQ(small.Receive(i, {buffer.All()}), 0);
    }
    pair_.world.RunFor(1ms);
    small.cq->RequestNotify(false);
    Reset(small);
    EXPECT_FALSE(small.cq->overrun());
    EXPECT_FALSE(small.Completed(1));
    pollfd event{.fd = small.channel->fd(), .events = POLLIN, .revents = 0};
    EXPECT_EQ(poll(&event, 1, 0), 0);
    ReadyFor(*small.qp, *b_.qp, at_b_);
  }
  ReadyFor(*b_.qp, *small.qp, at_a_);
  ExpectTraffic(small, b_, kRoom);
}

// --- UC ---

TEST_F(IbConnectionTest, SendsThatNobodyCarriesAreLostAFewAtATime) {
  QpCreate create;
  create.type = QpType::kUc;
  create.pd = a_.pd;
  create.send_cq = create.receive_cq = a_.cq;
  create.capabilities = {64, 64, 4, 4, 128};
  QueuePair* const qp = *a_.nic->CreateQp(*a_.context, create);
  ReadyFor(*qp, *b_.qp, *IpEndpoint::Parse("10.9.9.9", 0));
  const TestBuffer buffer = a_.Register(1 << 20);
  const std::array<ScatterGather, 1> sges = {buffer.All()};
  constexpr uint64_t kSends = 3;
  for (uint64_t i = 0; i < kSends; ++i) {
    SendRequest request;
    request.wr_id = i;
    request.signaled = true;
    request.sges = sges;
    ASSERT_EQ(qp->PostSend(request), 0);
  }
  const Instant before = pair_.world.Now();
  Instant at = before;
  uint64_t turns = 0;  // of the world, at one instant
  ASSERT_TRUE(pair_.world.RunUntil([&] {
    turns = std::exchange(at, pair_.world.Now()) == at ? turns + 1 : 0;
    return a_.Completed(kSends);
  }));
  for (const WorkCompletion& completion : a_.completions) EXPECT_EQ(completion.status, CompletionStatus::kSuccess);
  EXPECT_GE(pair_.world.Now() - before, a_.nic->profile().carrier_patience);
  EXPECT_LE(pair_.world.Now() - before, a_.nic->profile().carrier_patience + 100ms);
  constexpr uint64_t kPackets = kSends * (1 << 20) / 1024;
  EXPECT_GE(turns, kPackets / a_.nic->profile().transmit_budget_records / 2) << "others had no turn in between";
}

}  // namespace
}  // namespace stagecoach::emu
