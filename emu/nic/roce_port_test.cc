// Carriers of InfiniBand packets as strangers and accidents find them, in virtual time.
#include "emu/nic/roce_port.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "base/prng.h"
#include "emu/nic/nic_test_support.h"
#include "emu/wire/carrier_hello.h"

namespace stagecoach::emu {
namespace {

constexpr uint32_t kAllRemote = kAccessRemoteWrite | kAccessRemoteRead | kAccessRemoteAtomic;

// A QP of each of two hosts, in RESET.
class RocePortTest : public ::testing::Test {
 protected:
  static QpAttributes Attributes(QpState state, const TestHost& peer, const IpEndpoint& address) {
    QpAttributes attributes;
    attributes.state = state;
    attributes.access = kAllRemote;
    attributes.path_mtu = 3;
    attributes.path.is_global = true;
    attributes.path.gid = GidOf(address);
    attributes.destination_qp_number = peer.qp->qp_number();
    attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 4;
    attributes.timeout = 10;  // 4 ms
    attributes.retry_count = 7;
    attributes.rnr_retry = 7;
    return attributes;
  }
  void Modify(TestHost& host, const TestHost& peer, const IpEndpoint& address, QpState state) {
    using namespace qp_attr;  // NOLINT: the bits and nothing else
    uint32_t mask = kState;
    if (state == QpState::kInit) mask |= kPkeyIndex | kPort | kAccessFlags;
    if (state == QpState::kRtr) mask |= kAv | kPathMtu | kDestQpn | kRqPsn | kMaxDestRdAtomic | kMinRnrTimer;
    if (state == QpState::kRts) mask |= kTimeout | kRetryCnt | kRnrRetry | kSqPsn | kMaxQpRdAtomic;
    ASSERT_EQ(host.qp->Modify(Attributes(state, peer, address), mask), 0);
  }
  void ReadyA() {
    for (const QpState state : {QpState::kInit, QpState::kRtr, QpState::kRts}) Modify(a_, b_, at_b_, state);
  }
  void ReadyB() {
    for (const QpState state : {QpState::kInit, QpState::kRtr, QpState::kRts}) Modify(b_, a_, at_a_, state);
  }
  void Connect() {
    ReadyA();
    ReadyB();
  }

  // A stream of b's host to the port of a's.
  std::unique_ptr<Stream> Visit() {
    std::unique_ptr<Stream> stream;
    const auto attempt = pair_.fabric_b.Connect(
        {}, at_a_.WithPort(a_.nic->profile().port_base),
        [&](Result<std::unique_ptr<Stream>, FabricError> result) { stream = std::move(*result); });
    EXPECT_TRUE(pair_.world.RunUntil([&] { return stream != nullptr; }));
    return stream;
  }
  wire::CarrierHello Hello() const {
    wire::CarrierHello hello;
    hello.source_qp = b_.qp->qp_number();
    hello.destination_qp = a_.qp->qp_number();
    hello.generation = 99;
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
  // Sends of a to b, all of which arrive.
  void ExpectTraffic(uint64_t count) {
    const TestBuffer from = a_.Register(4000, kFullAccess, 7);
    const TestBuffer to = b_.Register(4000);
    a_.completions.clear();
    b_.completions.clear();
    for (uint64_t i = 0; i < count; ++i) {
      ASSERT_EQ(b_.Receive(i, {to.All()}), 0);
      ASSERT_EQ(a_.Send(i, {from.All()}), 0);
    }
    ASSERT_TRUE(pair_.world.RunUntil([&] {
      const bool a_done = a_.Completed(count);
      return b_.Completed(count) && a_done;
    })) << a_.nic->Describe()
        << b_.nic->Describe();
    for (const WorkCompletion& completion : a_.completions) EXPECT_EQ(completion.status, CompletionStatus::kSuccess);
    for (const WorkCompletion& completion : b_.completions) EXPECT_EQ(completion.status, CompletionStatus::kSuccess);
    EXPECT_EQ(to.bytes, from.bytes);
  }

  SimPair pair_;
  const IpEndpoint at_a_ = *IpEndpoint::Parse("10.0.0.1", 0);
  const IpEndpoint at_b_ = *IpEndpoint::Parse("10.0.0.2", 0);
  TestHost a_{pair_.fabric_a, "a", RoceProfile()};
  TestHost b_{pair_.fabric_b, "b", RoceProfile()};
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

TEST_F(RocePortTest, OnlySoManyMayWait) {
  std::vector<std::unique_ptr<Stream>> waiting;
  for (uint32_t i = 0; i < a_.nic->profile().max_joining; ++i) waiting.push_back(Visit());
  const std::unique_ptr<Stream> late = Visit();
  const Instant before = pair_.world.Now();
  EXPECT_FALSE(Answer(*late).has_value());
  EXPECT_LT(pair_.world.Now() - before, 1s) << "it was kept";
  // Those that go make room.
  waiting.clear();
  wire::CarrierHello nobody = Hello();
  nobody.destination_qp = 0x1234;
  EXPECT_EQ(StatusFor(nobody), wire::CarrierStatus::kNoQp);
}

TEST_F(RocePortTest, AQpThatIsNotReadyIsWaitedForAndNotForEver) {
  const std::unique_ptr<Stream> stream = Visit();
  Say(*stream, Hello());
  const Instant before = pair_.world.Now();
  const auto answer = Answer(*stream);
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->status, wire::CarrierStatus::kNotReady);
  EXPECT_GE(pair_.world.Now() - before, a_.nic->profile().join_timeout - 1s);

  const std::unique_ptr<Stream> second = Visit();
  Say(*second, Hello());
  pair_.world.RunFor(1s);
  ReadyA();
  const auto accepted = Answer(*second);
  ASSERT_TRUE(accepted.has_value());
  // The end with the smaller name comes itself; that is a's, by its address.
  EXPECT_EQ(accepted->status, wire::CarrierStatus::kBusy);
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
  // All of it right, but for the life of the QP: that of b's is known.
  EXPECT_EQ(refused([](wire::CarrierHello&) {}), wire::CarrierStatus::kMismatch);
  ExpectTraffic(3);
}

TEST_F(RocePortTest, AnotherAddressThanTheClaimedOneIsRefused) {
  // From a's own host, with b's name.
  ReadyA();
  pair_.world.RunFor(5s);  // a's attempts at b are over
  std::unique_ptr<Stream> stream;
  const auto attempt =
      pair_.fabric_a.Connect({}, at_a_.WithPort(a_.nic->profile().port_base),
                             [&](Result<std::unique_ptr<Stream>, FabricError> result) { stream = std::move(*result); });
  ASSERT_TRUE(pair_.world.RunUntil([&] { return stream != nullptr; }));
  Say(*stream, Hello());
  const auto answer = Answer(*stream);
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->status, wire::CarrierStatus::kMismatch);
}

TEST_F(RocePortTest, RecordsOfAStrangerThatGotInAreNoRequests) {
  ReadyA();
  // a's attempts wait for b's QP, which is not ready; when they have ended b's stream is taken.
  pair_.world.RunFor(60s);
  const std::unique_ptr<Stream> stream = Visit();
  Say(*stream, Hello());
  const auto answer = Answer(*stream);
  ASSERT_TRUE(answer.has_value());
  ASSERT_EQ(answer->status, wire::CarrierStatus::kAccepted);
  Prng luck(5);
  std::array<std::byte, 600> bytes;
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(luck.Below(256));
  Write(*stream, bytes);
  pair_.world.RunFor(1s);
  EXPECT_EQ(a_.qp->state(), QpState::kRts);
  EXPECT_FALSE(a_.Completed(1));
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

TEST_F(RocePortTest, SameSeedSameTrace) {
  const auto run = [] {
    TraceHash hash;
    SimPair pair({.jitter = 5us, .chop = true}, 9, &hash);
    DeviceProfile hostile = HostileProfile();
    TestHost a(pair.fabric_a, "a", hostile, &hash);
    TestHost b(pair.fabric_b, "b", hostile, &hash);
    for (const QpState state : {QpState::kInit, QpState::kRtr, QpState::kRts}) {
      using namespace qp_attr;  // NOLINT
      uint32_t mask = kState;
      if (state == QpState::kInit) mask |= kPkeyIndex | kPort | kAccessFlags;
      if (state == QpState::kRtr) mask |= kAv | kPathMtu | kDestQpn | kRqPsn | kMaxDestRdAtomic | kMinRnrTimer;
      if (state == QpState::kRts) mask |= kTimeout | kRetryCnt | kRnrRetry | kSqPsn | kMaxQpRdAtomic;
      EXPECT_EQ(a.qp->Modify(Attributes(state, b, *IpEndpoint::Parse("10.0.0.2", 0)), mask), 0);
      EXPECT_EQ(b.qp->Modify(Attributes(state, a, *IpEndpoint::Parse("10.0.0.1", 0)), mask), 0);
    }
    const TestBuffer from = a.Register(20000);
    const TestBuffer to = b.Register(20000);
    for (uint64_t i = 0; i < 20; ++i) {
      EXPECT_EQ(a.Send(i, {from.All()}, PostOpcode::kWrite, to.region.stag, to.address()), 0);
    }
    EXPECT_TRUE(pair.world.RunUntil([&] { return a.Completed(20); }));
    pair.world.RunFor(1s);
    return hash.value();
  };
  EXPECT_EQ(run(), run());
}

}  // namespace
}  // namespace stagecoach::emu
