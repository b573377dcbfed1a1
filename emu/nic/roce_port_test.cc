// Carriers of InfiniBand packets as strangers and accidents find them, in virtual time.
#include "emu/nic/roce_port.h"

#include <gtest/gtest.h>

#include <array>
#include <cerrno>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/prng.h"
#include "emu/nic/roce_test_support.h"
#include "emu/wire/carrier_hello.h"
#include "emu/wire/ib.h"

namespace stagecoach::emu {
namespace {

// The adapter of a host whose addresses change, and which may be behind a firewall that lets no call out.
class ChangingFabric final : public Fabric {
 public:
  explicit ChangingFabric(Fabric& beneath) : addresses(beneath.LocalAddresses()), beneath_(beneath) {}

  EventLoop& loop() override { return beneath_.loop(); }
  Instant Now() const override { return beneath_.Now(); }
  bool HasProgressThread() const override { return beneath_.HasProgressThread(); }
  Result<std::unique_ptr<Listener>, FabricError> ListenWith(const StreamOptions& options, const IpEndpoint& local,
                                                            int backlog, AcceptCallback on_accept) override {
    return beneath_.ListenWith(options, local, backlog, std::move(on_accept));
  }
  std::unique_ptr<ConnectAttempt> ConnectWith(const StreamOptions& options, const IpEndpoint& local,
                                              const IpEndpoint& remote, ConnectCallback on_done) override {
    ++calls;
    if (calls_are_lost) return std::make_unique<ConnectAttempt>();
    return beneath_.ConnectWith(options, local, remote, std::move(on_done));
  }
  Result<std::unique_ptr<PortHold>, FabricError> HoldPort(const StreamOptions& options,
                                                          const IpEndpoint& local) override {
    return beneath_.HoldPort(options, local);
  }
  PortSpace& ports() override { return beneath_.ports(); }
  std::optional<IpEndpoint> RouteTo(const IpEndpoint& remote) const override { return beneath_.RouteTo(remote); }
  std::vector<IpEndpoint> LocalAddresses() const override { return addresses; }
  std::unique_ptr<Notifier> CreateNotifier() override { return beneath_.CreateNotifier(); }
  bool Wait(std::unique_lock<std::mutex>& lock, std::condition_variable& changed,
            const std::function<bool()>& done) override {
    return beneath_.Wait(lock, changed, done);
  }

  std::vector<IpEndpoint> addresses;
  bool calls_are_lost = false;
  int calls = 0;

 private:
  Fabric& beneath_;
};

class RocePortTest : public RocePairTest {
 protected:
  // A stream of b's host to the port of a's; or of another one.
  std::unique_ptr<Stream> Visit() { return Visit(pair_.fabric_b); }
  std::unique_ptr<Stream> Visit(Fabric& visitor) { return Visit(visitor, at_a_); }
  std::unique_ptr<Stream> Visit(Fabric& visitor, const IpEndpoint& whom) {
    std::unique_ptr<Stream> stream;
    const auto attempt =
        visitor.Connect({}, whom.WithPort(a_.nic->profile().port_base),
                        [&](Result<std::unique_ptr<Stream>, FabricError> result) { stream = std::move(*result); });
    EXPECT_TRUE(pair_.world.RunUntil([&] { return stream != nullptr; }));
    return stream;
  }
  wire::CarrierHello Hello() const {
    wire::CarrierHello hello;
    hello.source_qp = b_.qp->qp_number();
    hello.destination_qp = a_.qp->qp_number();
    hello.source = GidOf(at_b_);
    hello.destination = GidOf(at_a_);
    return hello;
  }
  void Say(Stream& stream, const wire::CarrierHello& hello) {
    std::array<std::byte, wire::kCarrierHelloSize> bytes;
    ByteWriter out(bytes);
    hello.Encode(out);
    Write(stream, bytes);
  }
  static void Write(Stream& stream, ConstBytes bytes) { ASSERT_EQ(stream.Write({&bytes, 1}).bytes, bytes.size()); }
  // The answer, or nothing if the stream ends without one.
  std::optional<wire::CarrierAnswer> Answer(Stream& stream) {
    std::array<std::byte, wire::kCarrierAnswerSize> bytes{};
    size_t read = 0;
    bool ended = false;
    const bool settled = pair_.world.RunUntil([&] {
      while (read < bytes.size()) {
        const MutableBytes rest = MutableBytes(bytes).subspan(read);
        const IoResult result = stream.Read({&rest, 1});
        if (result.status == IoStatus::kWouldBlock) return false;
        if (result.status != IoStatus::kOk) return ended = true;
        read += result.bytes;
      }
      return true;
    });
    EXPECT_TRUE(settled);
    if (ended || !settled) return std::nullopt;
    const auto answer = wire::DecodeCarrierAnswer(bytes);
    EXPECT_TRUE(answer.has_value());
    return answer ? std::optional(*answer) : std::nullopt;
  }
  std::optional<wire::CarrierStatus> StatusFor(const wire::CarrierHello& hello) {
    const std::unique_ptr<Stream> stream = Visit();
    Say(*stream, hello);
    const auto answer = Answer(*stream);
    return answer ? std::optional(answer->status) : std::nullopt;
  }
  // An FPDU without CRC: length, record, pad, four bytes nobody looks at.
  static void SayRecord(Stream& stream, ConstBytes record) {
    std::vector<std::byte> frame;
    frame.push_back(static_cast<std::byte>(record.size() >> 8));
    frame.push_back(static_cast<std::byte>(record.size() & 0xff));
    frame.insert(frame.end(), record.begin(), record.end());
    while (frame.size() % 4 != 0) frame.push_back(std::byte{0});
    frame.insert(frame.end(), 4, std::byte{0});
    Write(stream, frame);
  }
  static void SayPacket(Stream& stream, const wire::IbHeader& header, size_t payload = 0) {
    std::vector<std::byte> record(header.EncodedSize() + payload, std::byte{0x5a});
    ByteWriter out(record);
    header.Encode(out);
    SayRecord(stream, record);
  }
};

// --- Names ---

TEST_F(RocePortTest, AddressesAndGidsNameEachOther) {
  for (const char* text : {"10.1.2.3", "127.0.0.1", "fd00::17", "::1"}) {
    const IpEndpoint address = *IpEndpoint::Parse(text, 0);
    EXPECT_EQ(AddressOf(GidOf(address)), address) << text;
  }
  const wire::Gid mapped = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 1, 2, 3};
  EXPECT_EQ(GidOf(*IpEndpoint::Parse("10.1.2.3", 0)), mapped);
}

TEST_F(RocePortTest, ProcessesOfOneHostTakeOneSlotEach) {
  const TestHost second(pair_.fabric_a, "second", RoceProfile());
  const TestHost third(pair_.fabric_a, "third", RoceProfile());
  EXPECT_EQ(a_.qp->qp_number() >> 16, 0u);
  EXPECT_EQ(second.qp->qp_number() >> 16, 1u);
  EXPECT_EQ(third.qp->qp_number() >> 16, 2u);
}

TEST_F(RocePortTest, WithoutAFreeSlotThereIsNoQp) {
  DeviceProfile profile = RoceProfile();
  profile.port_count = 1;
  Nic late(pair_.fabric_a, profile, {});
  NicContext* const context = *late.OpenContext();
  QpCreate create;
  create.pd = *late.AllocatePd(*context);
  create.send_cq = create.receive_cq = *late.CreateCq(*context, 4, nullptr, nullptr);
  const auto qp = late.CreateQp(*context, create);
  ASSERT_FALSE(qp.has_value());
  EXPECT_EQ(qp.error(), EAGAIN);
}

// --- Strangers ---

TEST_F(RocePortTest, WhatIsNoHelloEndsTheStream) {
  Prng luck(3);
  for (int i = 0; i < 50; ++i) {
    const std::unique_ptr<Stream> stream = Visit();
    std::array<std::byte, wire::kCarrierHelloSize> bytes;
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(luck.Below(256));
    Write(*stream, bytes);
    EXPECT_FALSE(Answer(*stream).has_value());
  }
}

TEST_F(RocePortTest, AStreamThatSaysNothingIsNotWaitedFor) {
  const std::unique_ptr<Stream> silent = Visit();
  const std::unique_ptr<Stream> slow = Visit();
  const std::byte one{'S'};
  Write(*slow, {&one, 1});
  const Instant before = pair_.world.Now();
  EXPECT_FALSE(Answer(*silent).has_value());
  EXPECT_FALSE(Answer(*slow).has_value());
  EXPECT_LE(pair_.world.Now() - before, a_.nic->profile().join_timeout + 1s);
}

TEST_F(RocePortTest, OfTooManySilentStreamsTheOldestMakesRoom) {
  std::vector<std::unique_ptr<Stream>> silent;
  for (uint32_t i = 0; i <= a_.nic->profile().max_joining; ++i) silent.push_back(Visit());
  const Instant before = pair_.world.Now();
  EXPECT_FALSE(Answer(*silent[0]).has_value());
  EXPECT_LT(pair_.world.Now() - before, 1s) << "it was kept";
  // So the others keep nobody out.
  wire::CarrierHello nobody = Hello();
  nobody.destination_qp = 0x1234;
  EXPECT_EQ(StatusFor(nobody), wire::CarrierStatus::kNoQp);
}

TEST_F(RocePortTest, ThoseThatWaitForAQpTakeNoRoomFromOthers) {
  std::vector<std::unique_ptr<Stream>> waiting;
  for (uint32_t i = 0; i < a_.nic->profile().max_joining + 10; ++i) {
    QpCreate create;
    create.pd = a_.pd;
    create.send_cq = create.receive_cq = a_.cq;
    QueuePair* const qp = *a_.nic->CreateQp(*a_.context, create);
    wire::CarrierHello hello = Hello();
    hello.destination_qp = qp->qp_number();
    waiting.push_back(Visit());
    Say(*waiting.back(), hello);
  }
  pair_.world.RunFor(100ms);
  Connect();
  ExpectTraffic(3);
  // The first of them waits still.
  std::byte byte;
  const MutableBytes into(&byte, 1);
  EXPECT_EQ(waiting[0]->Read({&into, 1}).status, IoStatus::kWouldBlock);
}

TEST_F(RocePortTest, OfThoseThatWaitForOneQpTheNewestStays) {
  const std::unique_ptr<Stream> first = Visit();
  Say(*first, Hello());
  const std::unique_ptr<Stream> second = Visit();
  Say(*second, Hello());
  const Instant before = pair_.world.Now();
  const auto answer = Answer(*first);
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->status, wire::CarrierStatus::kNotReady);
  EXPECT_LT(pair_.world.Now() - before, 1s);
  ReadyA();
  const auto accepted = Answer(*second);
  ASSERT_TRUE(accepted.has_value());
  EXPECT_EQ(accepted->status, wire::CarrierStatus::kAccepted);
}

TEST_F(RocePortTest, AQpThatIsNotReadyIsWaitedForAndNotForEver) {
  const std::unique_ptr<Stream> stream = Visit();
  Say(*stream, Hello());
  const Instant before = pair_.world.Now();
  const auto answer = Answer(*stream);
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->status, wire::CarrierStatus::kNotReady);
  EXPECT_GE(pair_.world.Now() - before, a_.nic->profile().join_timeout - 1s);
}

TEST_F(RocePortTest, AQpInErrorIsNotWaitedFor) {
  ReadyA();
  ASSERT_EQ(a_.ToState(QpState::kErr), 0);
  pair_.world.RunFor(1s);
  const Instant before = pair_.world.Now();
  EXPECT_EQ(StatusFor(Hello()), wire::CarrierStatus::kNotReady);
  EXPECT_LT(pair_.world.Now() - before, 1s);
}

TEST_F(RocePortTest, WhoIsOnTheWayHimselfSaysSo) {
  ASSERT_EQ(Modify(*b_.qp, HandAttributes(QpState::kInit, *a_.qp, at_a_)), 0);
  ReadyA();
  pair_.world.RunFor(100ms);  // a's hello waits for b's QP
  EXPECT_EQ(StatusFor(Hello()), wire::CarrierStatus::kBusy);
}

TEST_F(RocePortTest, WhoIsNotThePeerIsRefused) {
  Connect();
  ExpectTraffic(1);
  const auto refused = [&](auto change) {
    wire::CarrierHello hello = Hello();
    change(hello);
    return StatusFor(hello);
  };
  EXPECT_EQ(refused([](wire::CarrierHello& hello) { hello.source_qp += 1; }), wire::CarrierStatus::kMismatch);
  EXPECT_EQ(refused([](wire::CarrierHello& hello) { hello.source[15] += 1; }), wire::CarrierStatus::kMismatch);
  EXPECT_EQ(refused([](wire::CarrierHello& hello) { hello.destination[15] += 1; }), wire::CarrierStatus::kMismatch);
  EXPECT_EQ(refused([](wire::CarrierHello& hello) { hello.destination_qp += 7; }), wire::CarrierStatus::kNoQp);
  ExpectTraffic(3);
}

TEST_F(RocePortTest, ANewerStreamOfThePeerReplacesTheOneThereIs) {
  Connect();
  ExpectTraffic(1);
  const uint64_t before = a_.nic->counters().connections;
  EXPECT_EQ(StatusFor(Hello()), wire::CarrierStatus::kAccepted);
  pair_.world.RunFor(1ms);
  EXPECT_EQ(a_.nic->counters().connections, before + 1);
  // It has ended, and a true one follows.
  ExpectTraffic(3);
}

TEST_F(RocePortTest, AnotherAddressThanTheClaimedOneIsRefused) {
  // From a's own host, with b's name.
  ReadyA();
  const std::unique_ptr<Stream> stream = Visit(pair_.fabric_a);
  Say(*stream, Hello());
  const auto answer = Answer(*stream);
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->status, wire::CarrierStatus::kMismatch);
}

// Another process of its host may have its address, and say its number.
TEST_F(RocePortTest, AQpThatIsItsOwnPeerTakesNobodyElse) {
  ReadyFor(*a_.qp, *a_.qp, at_a_);
  pair_.world.RunFor(1ms);
  const uint64_t carriers = a_.nic->counters().connections;
  EXPECT_EQ(carriers, 1u);
  wire::CarrierHello hello = Hello();
  hello.source_qp = a_.qp->qp_number();
  hello.source = GidOf(at_a_);
  const std::unique_ptr<Stream> stream = Visit(pair_.fabric_a);
  Say(*stream, hello);
  const auto answer = Answer(*stream);
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->status, wire::CarrierStatus::kMismatch);
  EXPECT_EQ(a_.nic->counters().connections, carriers);
  const TestBuffer source = a_.Register(4000, kFullAccess, 7);
  const TestBuffer sink = a_.Register(4000);
  ASSERT_EQ(a_.Receive(1, {sink.All()}), 0);
  ASSERT_EQ(a_.Send(2, {source.All()}), 0);
  ASSERT_TRUE(pair_.world.RunUntil([&] { return a_.Completed(2); })) << a_.nic->Describe();
  EXPECT_EQ(sink.bytes, source.bytes);
}

TEST_F(RocePortTest, RecordsOfAStrangerThatGotInAreNoRequests) {
  ASSERT_EQ(b_.ToState(QpState::kReset), 0);
  const std::unique_ptr<Stream> stream = Visit();
  Say(*stream, Hello());
  ReadyA();
  const auto answer = Answer(*stream);
  ASSERT_TRUE(answer.has_value());
  ASSERT_EQ(answer->status, wire::CarrierStatus::kAccepted);
  const uint64_t records_before = a_.nic->counters().work.llp.rx_records;
  uint64_t said = 0;
  Prng luck(5);
  for (; said < 200; ++said) {
    std::vector<std::byte> record(1 + luck.Below(100));
    for (std::byte& byte : record) byte = static_cast<std::byte>(luck.Below(256));
    SayRecord(*stream, record);
  }
  const TestBuffer target = a_.Register(64);
  const auto say = [&](wire::IbHeader header, size_t payload = 0) {
    ++said;
    SayPacket(*stream, header, payload);
  };
  wire::IbHeader write{.op = wire::IbOp::kWriteOnly,
                       .destination_qp = a_.qp->qp_number(),
                       .address = target.address(),
                       .rkey = target.region.stag,
                       .dma_length = 8};
  wire::IbHeader elsewhere = write;
  elsewhere.destination_qp += 1;
  say(elsewhere, 8);
  for (const uint32_t psn : {1u, 2u, 1000u, 0x7fffffu}) {  // ahead: packets are missing before it
    write.psn = psn;
    say(write, 8);
  }
  for (const uint32_t psn : {0xffffffu, 0x900000u}) {  // behind: carried out long ago
    write.psn = psn;
    say(write, 8);
  }
  // Answers to what was never asked.
  const uint32_t to = a_.qp->qp_number();
  for (const uint32_t psn : {0u, 1u, 0xffffffu}) {
    for (const int syndrome : {0x1f, 0x20, 0x60, 0x61, 0x62, 0x63, 0x7f}) {
      say({.op = wire::IbOp::kAck, .destination_qp = to, .psn = psn, .syndrome = static_cast<uint8_t>(syndrome)});
    }
    say({.op = wire::IbOp::kReadOnly, .destination_qp = to, .psn = psn, .syndrome = 0x1f}, 16);
    say({.op = wire::IbOp::kAtomicAck, .destination_qp = to, .psn = psn, .syndrome = 0x1f});
  }
  pair_.world.RunFor(10ms);
  EXPECT_EQ(a_.nic->counters().work.llp.rx_records - records_before, said) << "not all of it was looked at";
  EXPECT_EQ(a_.qp->state(), QpState::kRts);
  EXPECT_FALSE(a_.Completed(1));
  for (const std::byte byte : target.bytes) ASSERT_EQ(byte, std::byte{0});
  // Nor is anything the worse for them.
  ReadyB();
  stream->Abort();
  ExpectTraffic(3);
}

// --- Accidents ---

TEST_F(RocePortTest, ResetStreamsAreReplacedAndNothingIsLost) {
  Connect();
  ExpectTraffic(1);
  for (int i = 0; i < 5; ++i) {
    pair_.world.ResetConnections(pair_.fabric_a, pair_.fabric_b);
    ExpectTraffic(10);
  }
  EXPECT_EQ(a_.qp->state(), QpState::kRts);
}

// Both have something to send at once, and what one says on a stream may overtake what the other said on another.
TEST_F(RocePortTest, OfCallsThatCrossBothEndsKeepTheSameOne) {
  LinkOptions link;
  link.jitter = 1ms;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    SimPair pair(link, seed);
    TestHost a(pair.fabric_a, "a", RoceProfile());
    TestHost b(pair.fabric_b, "b", RoceProfile());
    ReadyFor(*a.qp, *b.qp, at_b_);
    ReadyFor(*b.qp, *a.qp, at_a_);
    for (TestHost* host : {&a, &b}) {
      const TestBuffer sink = host->Register(64);
      ASSERT_EQ(host->Receive(1, {sink.All()}), 0);
      ASSERT_EQ(host->Send(2, {sink.All()}), 0);
    }
    ASSERT_TRUE(pair.world.RunUntil([&] {
      const bool done = a.Completed(2);
      return b.Completed(2) && done;
    })) << "seed "
        << seed;
    pair.world.RunFor(1s);  // whatever else is on its way
    EXPECT_EQ(a.nic->counters().connections, 1u) << "seed " << seed;
    EXPECT_EQ(b.nic->counters().connections, 1u) << "seed " << seed;
  }
}

// b's call has reached a's host, where nobody answers it yet. Then a calls.
class CrossedCallTest : public RocePortTest {
 protected:
  void SetUp() override {
    for (const QpState state : {QpState::kInit, QpState::kRtr, QpState::kRts}) {
      QpAttributes attributes = HandAttributes(state, *a_.qp, at_a_);
      attributes.timeout = 0;  // it waits for ever
      ASSERT_EQ(Modify(*b_.qp, attributes), 0);
    }
    const TestBuffer source = b_.Register(64);
    ASSERT_EQ(b_.Send(1, {source.All()}), 0);
    pair_.world.RunFor(100ms);
    visit_ = Visit(pair_.fabric_a, at_b_);
    wire::CarrierHello hello = Hello();
    std::swap(hello.source_qp, hello.destination_qp);
    std::swap(hello.source, hello.destination);
    Say(*visit_, hello);
    pair_.world.RunFor(100ms);
  }
  std::unique_ptr<Stream> visit_;
};

TEST_F(CrossedCallTest, IsAnsweredWhenTheOtherOneHasFailed) {
  const auto answer = Answer(*visit_);
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->status, wire::CarrierStatus::kAccepted);
}

TEST_F(CrossedCallTest, IsAnsweredWhenTheQpEnds) {
  QpAttributes attributes;
  attributes.state = QpState::kErr;
  const Instant end = pair_.world.Now();
  ASSERT_EQ(b_.qp->Modify(attributes, qp_attr::kState), 0);
  const auto answer = Answer(*visit_);
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->status, wire::CarrierStatus::kNotReady);
  EXPECT_LT(pair_.world.Now() - end, 1s);
}

TEST_F(RocePortTest, AStreamOnlyOneEndHasForgottenIsReplaced) {
  Connect();
  ExpectTraffic(1);
  pair_.world.ForgetConnections(pair_.fabric_a);
  ExpectTraffic(10);
  pair_.world.ForgetConnections(pair_.fabric_b);
  ExpectTraffic(10);
}

TEST_F(RocePortTest, AQuietPairStaysQuietWithoutAStream) {
  Connect();
  ExpectTraffic(1);
  ASSERT_EQ(b_.nic->DestroyQp(b_.qp->handle()), 0);
  // a's attempts at a QP that is gone end, and nothing is scheduled any more.
  EXPECT_TRUE(pair_.world.RunUntilIdle());
  EXPECT_EQ(a_.qp->state(), QpState::kRts);
}

TEST_F(RocePortTest, APeerThatIsCutOffIsFoundOutInTime) {
  Connect();
  ExpectTraffic(1);
  pair_.world.Partition(pair_.fabric_a, pair_.fabric_b, true);
  const TestBuffer buffer = a_.Register(64);
  a_.completions.clear();
  const Instant before = pair_.world.Now();
  ASSERT_EQ(a_.Send(1, {buffer.All()}), 0);
  ASSERT_TRUE(pair_.world.RunUntil([&] { return a_.Completed(1); }));
  EXPECT_EQ(a_.completions[0].status, CompletionStatus::kRetryExceeded);
  // Eight times 4.2 ms.
  EXPECT_GE(pair_.world.Now() - before, 33ms);
  EXPECT_LE(pair_.world.Now() - before, 40ms);
  pair_.world.Partition(pair_.fabric_a, pair_.fabric_b, false);
}

TEST_F(RocePortTest, APartitionThatEndsInTimeCostsNothing) {
  Connect();
  ExpectTraffic(1);
  const TestBuffer from = a_.Register(64);
  const TestBuffer to = b_.Register(64);
  a_.completions.clear();
  ASSERT_EQ(b_.Receive(1, {to.All()}), 0);
  pair_.world.Partition(pair_.fabric_a, pair_.fabric_b, true);
  ASSERT_EQ(a_.Send(1, {from.All()}), 0);
  pair_.world.RunFor(20ms);
  pair_.world.Partition(pair_.fabric_a, pair_.fabric_b, false);
  ASSERT_TRUE(pair_.world.RunUntil([&] { return a_.Completed(1); }));
  EXPECT_EQ(a_.completions[0].status, CompletionStatus::kSuccess);
}

// --- Lives ---

TEST_F(RocePortTest, BothEndsAreResetOneAfterTheOtherTheFirstToComeLast) {
  Connect();
  ExpectTraffic(1);
  Reset(b_);
  ReadyB();
  pair_.world.RunFor(1s);  // a, as it is, has come to the new b
  Reset(a_);
  ReadyA();
  ExpectTraffic(a_, b_, 3);
  ExpectTraffic(b_, a_, 3);
}

TEST_F(RocePortTest, BothEndsAreResetOneAfterTheOtherTheFirstToComeFirst) {
  Connect();
  ExpectTraffic(1);
  Reset(a_);
  ReadyA();
  pair_.world.RunFor(1s);
  Reset(b_);
  ReadyB();
  ExpectTraffic(b_, a_, 3);
  ExpectTraffic(a_, b_, 3);
}

TEST_F(RocePortTest, ACallOfAnEarlierLifeIsInNobodysWay) {
  // a's call waits at b, whose QP is not ready; a begins a new life, and b is brought to RTS before a's next call.
  ASSERT_EQ(Modify(*b_.qp, HandAttributes(QpState::kInit, *a_.qp, at_a_)), 0);
  ReadyA();
  pair_.world.RunFor(100ms);
  Reset(a_);
  ReadyA();
  ASSERT_EQ(Modify(*b_.qp, HandAttributes(QpState::kRtr, *a_.qp, at_a_)), 0);
  ASSERT_EQ(Modify(*b_.qp, HandAttributes(QpState::kRts, *a_.qp, at_a_)), 0);
  ExpectTraffic(3);
}

TEST_F(RocePortTest, AnEndThatIsResetAloneGoesOnWhereThePacketNumbersFit) {
  Connect();
  ExpectTraffic(2);  // 4000 bytes in packets of 1024
  Reset(b_);
  QpAttributes init = HandAttributes(QpState::kInit, *a_.qp, at_a_);
  QpAttributes rtr = HandAttributes(QpState::kRtr, *a_.qp, at_a_);
  rtr.receive_psn = 8;
  QpAttributes rts = HandAttributes(QpState::kRts, *a_.qp, at_a_);
  for (const QpAttributes& attributes : {init, rtr, rts}) ASSERT_EQ(Modify(*b_.qp, attributes), 0);
  ExpectTraffic(a_, b_, 3);
  ExpectTraffic(b_, a_, 3);
}

// --- Attempts ---

TEST_F(RocePortTest, AWishIsHeardAtOnceWhateverFailedBefore) {
  ReadyB();
  ASSERT_EQ(b_.ToState(QpState::kErr), 0);  // whoever comes is sent away
  ReadyA();
  // 87 ms before the next attempt; all attempts used up.
  for (const Duration lived : {140ms, 5000ms}) {
    pair_.world.RunFor(lived);
    Reset(b_);
    ReadyB();
    ExpectTraffic(1);  // which has 33 ms
    ASSERT_EQ(b_.ToState(QpState::kErr), 0);
    Reset(a_);
    ReadyA();
  }
}

TEST_F(RocePortTest, AttemptsEndWhenNobodyWantsThem) {
  ReadyB();
  ASSERT_EQ(b_.ToState(QpState::kErr), 0);
  ReadyA();
  const Instant before = pair_.world.Now();
  EXPECT_TRUE(pair_.world.RunUntilIdle());
  EXPECT_GE(pair_.world.Now() - before, 1s);
  EXPECT_LE(pair_.world.Now() - before, 5s);
}

TEST_F(RocePortTest, APeerThatTakesStreamsAndEndsThemIsTriedSoOften) {
  const IpEndpoint at_c = *IpEndpoint::Parse("10.0.0.3", 0);
  SimFabric& fabric_c = pair_.world.AddHost("c", {at_c});
  std::vector<std::unique_ptr<Stream>> streams;
  const auto listener =
      *fabric_c.Listen(at_c.WithPort(a_.nic->profile().port_base), 8, [&](std::unique_ptr<Stream> stream) {
        std::array<std::byte, wire::kCarrierAnswerSize> bytes;
        ByteWriter out(bytes);
        wire::CarrierAnswer{}.Encode(out);
        Write(*stream, bytes);
        stream->Shutdown();
        streams.push_back(std::move(stream));
      });
  ReadyFor(*a_.qp, *b_.qp, at_c);  // a QP of b's number, at c
  EXPECT_TRUE(pair_.world.RunUntilIdle()) << "it goes on and on";
  EXPECT_GT(streams.size(), 3u);
  EXPECT_LT(streams.size(), 30u);
}

TEST_F(RocePortTest, AFirewallThatIsOpenInOneDirectionOnlyIsEnough) {
  ChangingFabric fabric(pair_.fabric_a);
  fabric.calls_are_lost = true;
  TestHost walled(fabric, "walled", RoceProfile());
  TestHost open(pair_.fabric_b, "open", RoceProfile());
  ReadyFor(*walled.qp, *open.qp, at_b_);
  ReadyFor(*open.qp, *walled.qp, at_a_);
  pair_.world.RunFor(10ms);
  ASSERT_GT(fabric.calls, 0) << "it comes first, or would";
  ExpectTraffic(open, walled, 3);
  ExpectTraffic(walled, open, 3);
}

// --- GIDs ---

TEST_F(RocePortTest, AGidKeepsItsIndexWhileAddressesComeAndGo) {
  ChangingFabric fabric(pair_.fabric_a);
  const IpEndpoint one = *IpEndpoint::Parse("10.1.0.1", 0);
  const IpEndpoint two = *IpEndpoint::Parse("10.2.0.1", 0);
  const IpEndpoint three = *IpEndpoint::Parse("10.3.0.1", 0);
  const wire::Gid none{};
  fabric.addresses = {*IpEndpoint::Parse("fd00::1", 0), one, two};
  DeviceProfile profile = RoceProfile();
  profile.max_gids = 3;
  TestHost host(fabric, "host", profile);
  RocePort& port = host.nic->roce();
  const wire::Gid v6 = GidOf(fabric.addresses[0]);
  const auto gids = [](std::vector<wire::Gid> list) { return list; };
  EXPECT_EQ(port.Gids(), gids({GidOf(one), v6, GidOf(two)}));

  AddressVector vector{.is_global = true, .gid = GidOf(at_b_), .sgid_index = 2};
  EXPECT_TRUE(port.PathTo(vector).has_value());
  fabric.addresses = {one, two};
  EXPECT_EQ(port.Gids(), gids({GidOf(one), none, GidOf(two)}));
  EXPECT_EQ(port.PathTo(vector)->local, two);
  vector.sgid_index = 1;
  const auto hole = port.PathTo(vector);
  ASSERT_FALSE(hole.has_value());
  EXPECT_EQ(hole.error(), EINVAL);

  fabric.addresses = {two, one, *IpEndpoint::Parse("fd00::1", 0)};
  EXPECT_EQ(port.Gids(), gids({GidOf(one), v6, GidOf(two)})) << "as it was";
  fabric.addresses = {three, two, one, *IpEndpoint::Parse("fd00::1", 0)};
  EXPECT_EQ(port.Gids(), gids({GidOf(one), v6, GidOf(two)})) << "there is no room for another";
  fabric.addresses = {three, two, one};
  EXPECT_EQ(port.Gids(), gids({GidOf(one), GidOf(three), GidOf(two)})) << "in the place of one that has gone";
}

// --- Determinism ---

uint64_t TraceOf(uint64_t seed) {
  TraceHash hash;
  SimPair pair({.jitter = 5us, .chop = true}, seed, &hash);
  DeviceProfile hostile = HostileProfile();
  hostile.not_ready_one_in = 5;
  TestHost a(pair.fabric_a, "a", hostile, &hash);
  TestHost b(pair.fabric_b, "b", hostile, &hash);
  const IpEndpoint at_a = *IpEndpoint::Parse("10.0.0.1", 0);
  const IpEndpoint at_b = *IpEndpoint::Parse("10.0.0.2", 0);
  ReadyFor(*a.qp, *b.qp, at_b);
  ReadyFor(*b.qp, *a.qp, at_a);
  const auto unreliable = [](TestHost& host) {
    QpCreate create;
    create.type = QpType::kUc;
    create.pd = host.pd;
    create.send_cq = create.receive_cq = host.cq;
    create.capabilities = {64, 64, 4, 4, 128};
    return *host.nic->CreateQp(*host.context, create);
  };
  QueuePair* const from_uc = unreliable(a);
  QueuePair* const to_uc = unreliable(b);
  ReadyFor(*from_uc, *to_uc, at_b);
  ReadyFor(*to_uc, *from_uc, at_a);
  const TestBuffer from = a.Register(20000);
  const TestBuffer to = b.Register(20000);
  const std::array<ScatterGather, 1> source = {from.All()};
  const std::array<ScatterGather, 1> sink = {to.All()};
  constexpr uint64_t kRounds = 20;
  for (uint64_t i = 0; i < kRounds; ++i) {
    EXPECT_EQ(b.Receive(i, {to.All()}), 0);
    EXPECT_EQ(to_uc->PostReceive({i, sink}), 0);
    EXPECT_EQ(a.Send(i, {from.All()}), 0);
    EXPECT_EQ(a.Send(i, {from.All()}, PostOpcode::kWrite, to.region.stag, to.address()), 0);
    SendRequest request;
    request.wr_id = i;
    request.opcode = PostOpcode::kSend;
    request.signaled = true;
    request.sges = source;
    EXPECT_EQ(from_uc->PostSend(request), 0);
    if (i % 4 == 1) pair.world.ResetConnections(pair.fabric_a, pair.fabric_b);
    if (i % 8 == 3) pair.world.ForgetConnections(pair.fabric_b);
    pair.world.RunFor(300us);
  }
  EXPECT_TRUE(pair.world.RunUntil([&] { return a.Completed(3 * kRounds); })) << a.nic->Describe() << b.nic->Describe();
  pair.world.RunFor(1s);
  return hash.value();
}

TEST_F(RocePortTest, SameSeedSameTrace) {
  const uint64_t once = TraceOf(9);
  EXPECT_EQ(TraceOf(9), once);
  EXPECT_NE(TraceOf(10), once);
}

}  // namespace
}  // namespace stagecoach::emu
