#include "emu/tap/injection_tap.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "base/cursor.h"
#include "emu/engine/no_memory.h"
#include "emu/llp/llp_test_support.h"
#include "emu/sim/sim_world.h"
#include "emu/wire/ib.h"
#include "emu/wire/rdmap.h"

namespace stagecoach::emu {
namespace {

using wire::IbOp;
using wire::RdmapOpcode;
using wire::SegmentHeader;
using Bytes = std::vector<std::byte>;
using Numbers = std::vector<uint64_t>;

constexpr uint32_t kQp = 0x1234;
constexpr uint32_t kPsn = 0x789abc;
constexpr uint32_t kMtu = 256;

// What leaves by it and what arrives are lists of records.
class ListLlp final : public QuietLlp {
 public:
  bool CanQueue() const override { return queued_.size() < room; }
  void QueueRecord(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie) override {
    EXPECT_TRUE(CanQueue());
    Bytes record(header.begin(), header.end());
    for (const TxPart& part : payload) record.insert(record.end(), part.bytes.begin(), part.bytes.end());
    queued_.emplace_back(std::move(record), cookie);
  }
  TxResult Flush(MemoryPort&) override {
    if (blocked) return {.status = TxStatus::kWouldBlock};
    for (auto& [record, cookie] : queued_) {
      left.push_back(std::move(record));
      sent_.push_back(cookie);
    }
    queued_.clear();
    return {};
  }
  bool TakeSent(uint64_t* cookie) override {
    if (sent_.empty()) return false;
    *cookie = sent_.front();
    sent_.pop_front();
    return true;
  }
  bool TxIdle() const override { return queued_.empty(); }
  RxResult NextRecord(RecordHead* record) override {
    if (arrived.empty()) return {};
    *record = {ConstBytes(arrived.front()).first(std::min(arrived.front().size(), kMaxRecordHead)),
               arrived.front().size()};
    return {.status = RxStatus::kReady};
  }
  RxResult Place(size_t, std::span<const MutableBytes>) override {
    // In two steps, as a stream may have it.
    if (in_pieces && !std::exchange(half_placed_, !half_placed_)) return {};
    arrived.pop_front();
    return {.status = RxStatus::kReady};
  }
  void Abort() override { aborted = true; }

  size_t room = 100;
  bool blocked = false;
  bool in_pieces = true;
  std::vector<Bytes> left;
  std::deque<Bytes> arrived;
  bool aborted = false;

 private:
  std::vector<std::pair<Bytes, uint64_t>> queued_;
  std::deque<uint64_t> sent_;
  bool half_placed_ = false;
};

template <typename Header>
Bytes Encoded(const Header& header, size_t payload = 0) {
  Bytes bytes(header.EncodedSize() + payload);
  ByteWriter out(bytes);
  header.Encode(out);
  return bytes;
}

Bytes Send(uint32_t msn, size_t payload = 8) {
  return Encoded(SegmentHeader::Send(RdmapOpcode::kSend, 0, msn, 0, /*last=*/true), payload);
}

Bytes Packet(IbOp op, uint32_t psn, size_t payload = 0, uint32_t dma_length = 0) {
  wire::IbHeader header;
  header.op = op;
  header.destination_qp = kQp;
  header.psn = psn;
  header.dma_length = dma_length;
  header.pad = wire::IbPad(payload);
  return Encoded(header, payload);
}

// A tap over lists, in virtual time.
class InjectionTapTest : public ::testing::Test {
 protected:
  void Use(const std::string& rules, InjectionTransport transport) {
    plan_ = InjectionPlan::Make(ParseInjectionRules(rules).value());
    injections_ = plan_->NewConnection();
    UseStream(transport);
  }
  void UseStream(InjectionTransport transport) {
    auto below = std::make_unique<ListLlp>();
    below_ = below.get();
    tap_ = WithInjections(
        std::move(below), injections_,
        {.fabric = fabric_, .trace = &trace_, .name = "qp", .transport = transport, .mtu = kMtu, .farewell = Farewell});
  }
  static Bytes Farewell() {
    const auto word = wire::EncodeIbUnreachable(kQp, kPsn);
    return {word.begin(), word.end()};
  }

  // Headers are given as such, and what is behind as payload, as the engines do.
  void Queue(const Bytes& given, uint64_t cookie, size_t header_size = 0) {
    // What may wait is referred to until it is sent.
    const Bytes& record = queued_.emplace_back(given);
    if (header_size == 0) header_size = std::min(record.size(), kMaxTxHeader);
    const TxPart payload{.bytes = ConstBytes(record).subspan(header_size)};
    ASSERT_TRUE(tap_->CanQueue());
    tap_->QueueRecord(ConstBytes(record).first(header_size), {&payload, 1}, cookie);
  }
  TxResult Flush() { return tap_->Flush(memory_); }
  Numbers TakeSent() {
    Numbers cookies;
    for (uint64_t cookie = 0; tap_->TakeSent(&cookie);) cookies.push_back(cookie);
    return cookies;
  }
  // Takes all that has arrived; what ended it.
  RxResult ReceiveAll(std::vector<Bytes>* taken) {
    for (;;) {
      RecordHead record;
      const RxResult next = tap_->NextRecord(&record);
      if (next.status != RxStatus::kReady) return next;
      taken->emplace_back(record.head.begin(), record.head.end());
      while (tap_->Place(record.head.size(), {}).status != RxStatus::kReady) {
      }
    }
  }
  // What each of the only rule's firings was, as "direction kind message.segment".
  std::vector<std::string> Fired() const {
    std::vector<std::string> fired;
    for (const std::string& line : trace_.lines()) fired.push_back(line.substr(line.find("direction=")));
    return fired;
  }

  SimWorld world_{1};
  SimFabric& fabric_ = world_.AddHost("a", {*IpEndpoint::Parse("10.0.0.1", 0)});
  TraceLog trace_;
  NoMemory memory_;
  std::shared_ptr<InjectionPlan> plan_;
  std::shared_ptr<ConnectionInjections> injections_;
  ListLlp* below_ = nullptr;
  std::deque<Bytes> queued_;
  std::unique_ptr<Llp> tap_;
};

// --- What is what ---

TEST_F(InjectionTapTest, KnowsMessagesOfIwarp) {
  const struct {
    const char* kind;
    Bytes record;
    size_t header_size;
  } kRecords[] = {
      {"send", Encoded(SegmentHeader::Send(RdmapOpcode::kSendSolicitedInvalidate, 7, 1, 0, true), 100), 18},
      {"write", Encoded(SegmentHeader::Write(7, 0, true), 100), 14},
      {"read", Encoded(SegmentHeader::Read(1, {.length = 5})), 46},
      {"read-response", Encoded(SegmentHeader::ReadResponse(7, 0, true), 5), 14},
      {"atomic", Encoded(SegmentHeader::AtomicRequest(2), wire::kAtomicRequestSize), 70},
      {"atomic-response", Encoded(SegmentHeader::AtomicResponse(1), wire::kAtomicResponseSize), 18},
      {"immediate", Encoded(SegmentHeader::Immediate(false, 2), wire::kImmediateDataSize), 18},
      {"terminate", Encoded(SegmentHeader::Terminate(), 8), 18},
  };
  for (const auto& expected : kRecords) {
    Use(std::string("delay=1us kind=") + expected.kind, InjectionTransport::kIwarp);
    for (const auto& each : kRecords) Queue(each.record, 1, each.header_size);
    EXPECT_EQ(plan_->counters(0).fired, 1u) << expected.kind;
    EXPECT_EQ(Fired().back(), std::string("direction=sent kind=") + expected.kind + " message=1 segment=1 attempt=1");
  }
  // What nobody asked for passes, and what cannot be decoded.
  Use("disconnect", InjectionTransport::kIwarp);
  for (const Bytes& record : {Encoded(SegmentHeader::Write(0, 0, true)), Encoded(SegmentHeader::Read(1, {})),
                              Encoded(SegmentHeader::ReadResponse(0, 0, true)), Bytes(3, std::byte{0xff})}) {
    Queue(record, 1);
  }
  EXPECT_EQ(Flush().status, TxStatus::kIdle);
  EXPECT_EQ(below_->left.size(), 4u);
}

TEST_F(InjectionTapTest, KnowsMessagesOfInfiniband) {
  const struct {
    const char* kind;
    Bytes record;
  } kRecords[] = {
      {"send", Packet(IbOp::kSendOnlyInv, 1)},
      {"write", Packet(IbOp::kWriteOnly, 2, 10, 10)},
      {"read", Packet(IbOp::kReadRequest, 3, 0, 5 * kMtu)},
      {"read-response", Packet(IbOp::kReadOnly, 3, 10)},
      {"atomic", Packet(IbOp::kFetchAdd, 8)},
      {"atomic-response", Packet(IbOp::kAtomicAck, 8)},
      {"ack", Packet(IbOp::kAck, 8)},
  };
  for (const auto& expected : kRecords) {
    Use(std::string("delay=1us kind=") + expected.kind, InjectionTransport::kInfiniband);
    for (const auto& each : kRecords)
      Queue(each.record, 1, wire::DecodeIb(each.record, each.record.size())->EncodedSize());
    EXPECT_EQ(plan_->counters(0).fired, 1u) << expected.kind;
  }
  // All but the acknowledgement are messages of a program.
  EXPECT_EQ(plan_->seen().sent, 6u);
  Use("disconnect", InjectionTransport::kInfiniband);
  for (const Bytes& record : {Packet(IbOp::kWriteOnly, 1), Packet(IbOp::kReadRequest, 2), Packet(IbOp::kReadOnly, 2),
                              Packet(IbOp::kAck, 2)}) {
    Queue(record, 1);
  }
  EXPECT_EQ(Flush().status, TxStatus::kIdle);
  EXPECT_EQ(below_->left.size(), 4u);
  // Immediate data makes a message of what is otherwise none.
  Queue(Packet(IbOp::kWriteOnlyImm, 3), 2);
  EXPECT_EQ(plan_->counters(0).fired, 1u);
}

// --- What is done ---

TEST_F(InjectionTapTest, WhatIsDroppedCountsAsSentInItsPlace) {
  Use("drop message=2..3", InjectionTransport::kInfiniband);
  for (uint32_t psn = 1; psn <= 4; ++psn) Queue(Packet(IbOp::kSendOnly, psn, psn), psn);
  EXPECT_FALSE(tap_->TxIdle());
  below_->blocked = true;
  EXPECT_EQ(Flush().status, TxStatus::kWouldBlock);
  EXPECT_EQ(TakeSent(), Numbers());
  below_->blocked = false;
  EXPECT_EQ(Flush().status, TxStatus::kIdle);
  EXPECT_EQ(TakeSent(), (Numbers{1, 2, 3, 4}));
  EXPECT_EQ(below_->left, (std::vector<Bytes>{Packet(IbOp::kSendOnly, 1, 1), Packet(IbOp::kSendOnly, 4, 4)}));
  EXPECT_TRUE(tap_->TxIdle());
}

TEST_F(InjectionTapTest, WhatArrivesIsDroppedUnseen) {
  Use("drop direction=received message=1..2", InjectionTransport::kInfiniband);
  below_->arrived = {Packet(IbOp::kSendOnly, 1, 100), Packet(IbOp::kAck, 1), Packet(IbOp::kSendOnly, 2),
                     Packet(IbOp::kSendOnly, 3)};
  std::vector<Bytes> taken;
  // A record that comes in pieces is no reason to wait for ever.
  while (!below_->arrived.empty()) EXPECT_EQ(ReceiveAll(&taken).status, RxStatus::kWouldBlock);
  EXPECT_EQ(taken, (std::vector<Bytes>{Packet(IbOp::kAck, 1), Packet(IbOp::kSendOnly, 3)}));
}

// A flood that is thrown away leaves others their turn.
TEST_F(InjectionTapTest, WhatIsDroppedAtATimeIsBounded) {
  Use("drop direction=received", InjectionTransport::kInfiniband);
  for (uint32_t psn = 0; psn < 200; ++psn) below_->arrived.push_back(Packet(IbOp::kSendOnly, psn));
  below_->in_pieces = false;
  std::vector<Bytes> taken;
  EXPECT_EQ(ReceiveAll(&taken).status, RxStatus::kWouldBlock);
  EXPECT_TRUE(tap_->hold().more);
  EXPECT_GT(below_->arrived.size(), 100u);
  for (int turns = 0; turns < 4; ++turns) ReceiveAll(&taken);
  EXPECT_TRUE(below_->arrived.empty());
  EXPECT_FALSE(tap_->hold().more);
  EXPECT_TRUE(taken.empty());
}

TEST_F(InjectionTapTest, WhatIsDelayedLeavesWhenItIsTimeAndNothingOvertakesIt) {
  Use("delay=5ms message=2; delay=1ms message=3", InjectionTransport::kIwarp);
  const Instant begin = fabric_.Now();
  for (uint32_t msn = 1; msn <= 4; ++msn) Queue(Send(msn), msn, 18);
  EXPECT_EQ(Flush().status, TxStatus::kIdle);
  EXPECT_EQ(TakeSent(), (Numbers{1}));
  EXPECT_FALSE(tap_->TxIdle());
  ASSERT_EQ(tap_->hold().until, begin + 5ms);
  world_.RunFor(4ms);
  EXPECT_EQ(Flush().status, TxStatus::kIdle);
  EXPECT_EQ(below_->left.size(), 1u);
  world_.RunFor(1ms);
  below_->room = 2;
  EXPECT_EQ(Flush().status, TxStatus::kIdle);
  EXPECT_EQ(TakeSent(), (Numbers{2, 3, 4}));
  EXPECT_EQ(below_->left, (std::vector<Bytes>{Send(1), Send(2), Send(3), Send(4)}));
  EXPECT_EQ(tap_->hold().until, std::nullopt);
  EXPECT_TRUE(tap_->TxIdle());
}

TEST_F(InjectionTapTest, WhatIsDroppedBehindWhatIsDelayedKeepsItsPlace) {
  Use("delay=5ms message=1; drop message=2", InjectionTransport::kInfiniband);
  for (uint32_t psn = 1; psn <= 3; ++psn) Queue(Packet(IbOp::kSendOnly, psn), psn);
  EXPECT_EQ(Flush().status, TxStatus::kIdle);
  EXPECT_EQ(TakeSent(), Numbers());
  world_.RunFor(5ms);
  EXPECT_EQ(Flush().status, TxStatus::kIdle);
  EXPECT_EQ(TakeSent(), (Numbers{1, 2, 3}));
  EXPECT_EQ(below_->left, (std::vector<Bytes>{Packet(IbOp::kSendOnly, 1), Packet(IbOp::kSendOnly, 3)}));
}

// The stream's becoming writable moves what is due, and until then nobody need come back for it.
TEST_F(InjectionTapTest, WhatIsDueWaitsForAFullStream) {
  Use("delay=1ms", InjectionTransport::kIwarp);
  below_->room = 1;
  for (uint32_t msn = 1; msn <= 3; ++msn) Queue(Send(msn), msn, 18);
  world_.RunFor(1ms);
  below_->blocked = true;
  EXPECT_EQ(Flush().status, TxStatus::kWouldBlock);
  EXPECT_EQ(tap_->hold().until, std::nullopt);
  below_->blocked = false;
  EXPECT_EQ(Flush().status, TxStatus::kIdle);
  EXPECT_EQ(TakeSent(), (Numbers{1, 2, 3}));
}

TEST_F(InjectionTapTest, TheDelayedAreBounded) {
  Use("delay=1ms", InjectionTransport::kIwarp);
  uint32_t count = 0;
  for (; tap_->CanQueue() && count < 10'000; ++count) Queue(Send(count + 1), count, 18);
  EXPECT_EQ(count, 1024u);
}

TEST_F(InjectionTapTest, DisconnectResetsAStreamOfIwarpBehindWhatCameBefore) {
  Use("disconnect message=2", InjectionTransport::kIwarp);
  for (uint32_t msn = 1; msn <= 3; ++msn) Queue(Send(msn), msn, 18);
  EXPECT_EQ(injections_->end(), InjectionAction::kDisconnect);
  EXPECT_FALSE(below_->aborted);
  const TxResult result = Flush();
  EXPECT_EQ(result.status, TxStatus::kReset);
  EXPECT_EQ(result.error, ECONNRESET);
  EXPECT_TRUE(below_->aborted);
  EXPECT_EQ(below_->left, (std::vector<Bytes>{Send(1)}));
  EXPECT_EQ(TakeSent(), (Numbers{1}));
  below_->arrived = {Send(1)};
  RecordHead record;
  const RxResult received = tap_->NextRecord(&record);
  EXPECT_EQ(received.status, RxStatus::kReset);
  EXPECT_EQ(received.error, ECONNRESET);
  EXPECT_EQ(Fired(), (std::vector<std::string>{"direction=sent kind=send message=2 segment=1 attempt=1"}));
}

TEST_F(InjectionTapTest, DisconnectTakesNothingOfWhatArrives) {
  Use("disconnect message=2 direction=received", InjectionTransport::kIwarp);
  below_->arrived = {Send(1), Send(2), Send(3)};
  std::vector<Bytes> taken;
  EXPECT_EQ(ReceiveAll(&taken).status, RxStatus::kReset);
  EXPECT_EQ(taken.size(), 1u);
  EXPECT_TRUE(below_->aborted);
  EXPECT_EQ(Flush().status, TxStatus::kReset);
}

TEST_F(InjectionTapTest, DisconnectTellsAnInfinibandPeer) {
  Use("delay=1s message=2; disconnect message=3", InjectionTransport::kInfiniband);
  for (uint32_t psn = 1; psn <= 4; ++psn) Queue(Packet(IbOp::kSendOnly, psn), psn);
  EXPECT_EQ(Flush().status, TxStatus::kIdle);
  EXPECT_EQ(injections_->end(), InjectionAction::kDisconnect);
  EXPECT_EQ(TakeSent(), (Numbers{1, 2, 3, 4}));
  EXPECT_TRUE(tap_->TxIdle());
  EXPECT_EQ(below_->left, (std::vector<Bytes>{Packet(IbOp::kSendOnly, 1), Farewell()}));
  EXPECT_FALSE(below_->aborted);
  below_->arrived = {Packet(IbOp::kAck, 1)};
  std::vector<Bytes> taken;
  EXPECT_EQ(ReceiveAll(&taken).status, RxStatus::kWouldBlock);
  EXPECT_TRUE(taken.empty());
  // Another stream carries nothing but the same word.
  UseStream(InjectionTransport::kInfiniband);
  Queue(Packet(IbOp::kSendOnly, 5), 5);
  Flush();
  EXPECT_EQ(below_->left.size(), 1u);
}

// Behind what was queued before, which the owner must not end the stream with.
TEST_F(InjectionTapTest, TheInfinibandPeerIsToldWhenThereIsRoom) {
  Use("disconnect direction=received", InjectionTransport::kInfiniband);
  below_->room = 2;
  below_->blocked = true;
  for (uint32_t psn = 1; psn <= 2; ++psn) Queue(Packet(IbOp::kSendOnly, psn), psn);
  below_->arrived = {Packet(IbOp::kSendOnly, 1), Packet(IbOp::kSendOnly, 2)};
  std::vector<Bytes> taken;
  while (!below_->arrived.empty()) EXPECT_EQ(ReceiveAll(&taken).status, RxStatus::kWouldBlock);
  EXPECT_TRUE(taken.empty());
  EXPECT_EQ(injections_->end(), InjectionAction::kDisconnect);
  Queue(Packet(IbOp::kSendOnly, 3), 3);
  EXPECT_EQ(Flush().status, TxStatus::kWouldBlock);
  EXPECT_EQ(TakeSent(), Numbers());
  EXPECT_FALSE(tap_->TxIdle());
  below_->blocked = false;
  EXPECT_EQ(Flush().status, TxStatus::kIdle);
  EXPECT_EQ(TakeSent(), (Numbers{1, 2, 3}));
  EXPECT_TRUE(tap_->TxIdle());
  EXPECT_EQ(below_->left, (std::vector<Bytes>{Packet(IbOp::kSendOnly, 1), Packet(IbOp::kSendOnly, 2), Farewell()}));
  Flush();
  EXPECT_EQ(below_->left.size(), 3u);
}

TEST_F(InjectionTapTest, StallKeepsAStreamOfIwarpAsItIs) {
  Use("stall message=2", InjectionTransport::kIwarp);
  for (uint32_t msn = 1; msn <= 3; ++msn) Queue(Send(msn), msn, 18);
  EXPECT_EQ(Flush().status, TxStatus::kIdle);
  EXPECT_EQ(TakeSent(), (Numbers{1}));
  EXPECT_FALSE(tap_->TxIdle());
  EXPECT_TRUE(tap_->hold().receiving);
  EXPECT_EQ(tap_->hold().until, std::nullopt);
  below_->arrived = {Send(1)};
  std::vector<Bytes> taken;
  EXPECT_EQ(ReceiveAll(&taken).status, RxStatus::kWouldBlock);
  EXPECT_TRUE(taken.empty());
  EXPECT_FALSE(below_->aborted);
}

TEST_F(InjectionTapTest, StallLosesWhatWasDelayed) {
  Use("delay=5ms direction=sent; stall direction=received", InjectionTransport::kInfiniband);
  Queue(Packet(IbOp::kSendOnly, 1), 1);
  below_->arrived = {Packet(IbOp::kSendOnly, 1)};
  std::vector<Bytes> taken;
  while (!below_->arrived.empty()) ReceiveAll(&taken);
  EXPECT_EQ(Flush().status, TxStatus::kIdle);
  EXPECT_EQ(TakeSent(), (Numbers{1}));
  EXPECT_TRUE(tap_->TxIdle());
  EXPECT_TRUE(below_->left.empty());
}

TEST_F(InjectionTapTest, StallLosesAllPacketsOfInfiniband) {
  Use("stall message=1 direction=received", InjectionTransport::kInfiniband);
  below_->arrived = {Packet(IbOp::kAck, 1), Packet(IbOp::kSendOnly, 1), Packet(IbOp::kAck, 2)};
  std::vector<Bytes> taken;
  while (!below_->arrived.empty()) EXPECT_EQ(ReceiveAll(&taken).status, RxStatus::kWouldBlock);
  EXPECT_EQ(taken, (std::vector<Bytes>{Packet(IbOp::kAck, 1)}));
  Queue(Packet(IbOp::kAck, 1), 9);
  EXPECT_EQ(Flush().status, TxStatus::kIdle);
  EXPECT_EQ(TakeSent(), (Numbers{9}));
  EXPECT_TRUE(below_->left.empty());
  EXPECT_FALSE(tap_->hold().receiving);
}

}  // namespace
}  // namespace stagecoach::emu
