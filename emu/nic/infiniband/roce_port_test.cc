// Carriers of InfiniBand packets as strangers and accidents find them, in virtual time.
#include "emu/nic/infiniband/roce_port.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/prng.h"
#include "emu/fabric/fabric_over.h"
#include "emu/llp/llp.h"
#include "emu/nic/infiniband/carrier_stream.h"
#include "emu/nic/infiniband/refusals.h"
#include "emu/nic/roce_test_support.h"
#include "emu/wire/carrier_hello.h"
#include "emu/wire/carrier_proof.h"
#include "emu/wire/ib.h"

namespace stagecoach::emu {
namespace {

// The adapter of a host whose addresses change, and which may be behind a firewall that lets no call out.
class ChangingFabric final : public FabricOver {
 public:
  explicit ChangingFabric(Fabric& beneath) : FabricOver(beneath) {
    for (const LocalAddress& each : beneath.LocalAddresses()) addresses.push_back(each.address);
  }

  std::unique_ptr<ConnectAttempt> ConnectWith(const StreamOptions& options, const IpEndpoint& local,
                                              const IpEndpoint& remote, ConnectCallback on_done) override {
    ++calls;
    if (calls_are_lost) return std::make_unique<ConnectAttempt>();
    return FabricOver::ConnectWith(options, local, remote, std::move(on_done));
  }
  std::vector<LocalAddress> LocalAddresses() override {
    std::vector<LocalAddress> all;
    for (const IpEndpoint& address : addresses) all.push_back({address});
    return all;
  }
  // Nobody is told of a change.
  bool WatchAddresses(std::function<void()>) override { return true; }
  std::optional<uint32_t> UserListeningAt(const IpEndpoint&) const override { return std::nullopt; }

  std::vector<IpEndpoint> addresses;
  bool calls_are_lost = false;
  int calls = 0;
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
  // The answer, or nothing if the stream ends without one; that it is to be waited for is none.
  std::optional<wire::CarrierAnswer> Answer(Stream& stream) {
    const auto answer = Word(stream);
    return answer && answer->status == wire::CarrierStatus::kWait ? Word(stream) : answer;
  }
  std::optional<wire::CarrierAnswer> Word(Stream& stream) {
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
  // It does not call from there.
  void AToRtr() {
    for (const QpState state : {QpState::kInit, QpState::kRtr}) {
      ASSERT_EQ(Modify(*a_.qp, HandAttributes(state, *b_.qp, at_b_)), 0);
    }
  }
  // What a visitor knows of a's QP and b's.
  struct Knowledge {
    wire::CarrierNumbers numbers{0, 0};  // of b's QP, and of a's
    wire::CarrierSecret secret{};
  };
  static wire::CarrierProof ProofFor(const wire::CarrierHello& hello, const wire::CarrierAnswer& challenge,
                                     const Knowledge& knowledge) {
    wire::CarrierNumbers numbers = knowledge.numbers;
    if (!challenge.sends) numbers.listener.reset();
    const SipTag tag =
        wire::ProveCarrier(wire::CarrierRole::kInitiator, knowledge.secret, hello, challenge.token, numbers);
    return {tag, tag};
  }
  // The last answer to a hello that was said: proofs are given as often as they are asked for.
  std::optional<wire::CarrierAnswer> LastAnswer(Stream& stream, const wire::CarrierHello& hello,
                                                const Knowledge& knowledge) {
    for (;;) {
      const auto answer = Answer(stream);
      if (!answer || answer->status != wire::CarrierStatus::kProve) return answer;
      Write(stream, ProofFor(hello, *answer, knowledge).Encoded());
    }
  }
  std::optional<wire::CarrierAnswer> LastAnswer(Stream& stream) { return LastAnswer(stream, Hello(), {}); }
  std::optional<wire::CarrierStatus> StatusFor(const wire::CarrierHello& hello) { return StatusFor(hello, {}); }
  std::optional<wire::CarrierStatus> StatusFor(const wire::CarrierHello& hello, const Knowledge& knowledge) {
    const std::unique_ptr<Stream> stream = Visit();
    Say(*stream, hello);
    const auto answer = LastAnswer(*stream, hello, knowledge);
    return answer ? std::optional(answer->status) : std::nullopt;
  }
  void SayPacket(Llp& llp, const wire::IbHeader& header, size_t payload = 0) {
    std::vector<std::byte> record(header.EncodedSize() + payload, std::byte{0x5a});
    ByteWriter out(record);
    header.Encode(out);
    SayRecord(pair_.world, llp, record);
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
  EXPECT_EQ(Word(*waiting[0])->status, wire::CarrierStatus::kWait);
  std::byte byte;
  const MutableBytes into(&byte, 1);
  EXPECT_EQ(waiting[0]->Read({&into, 1}).status, IoStatus::kWouldBlock);
}

TEST_F(RocePortTest, OfTooManyThatWaitForQpsTheOldestOfTheAddressWithTheMostGivesWay) {
  DeviceProfile narrow = RoceProfile();
  narrow.max_waiting = 3;
  const IpEndpoint at_c = *IpEndpoint::Parse("10.0.0.3", 0);
  const IpEndpoint at_d = *IpEndpoint::Parse("10.0.0.4", 0);
  TraceLog trace;
  TestHost c(pair_.world.AddHost("c", {at_c}), "c", narrow, &trace);
  Fabric& fabric_d = pair_.world.AddHost("d", {at_d});
  const auto wait_for_a_qp = [&](Fabric& visitor, const IpEndpoint& at) {
    QpCreate create;
    create.pd = c.pd;
    create.send_cq = create.receive_cq = c.cq;
    wire::CarrierHello hello = Hello();
    hello.source = GidOf(at);
    hello.destination = GidOf(at_c);
    hello.destination_qp = (*c.nic->CreateQp(*c.context, create))->qp_number();
    std::unique_ptr<Stream> stream = Visit(visitor, at_c);
    Say(*stream, hello);
    EXPECT_EQ(Word(*stream)->status, wire::CarrierStatus::kWait);
    return stream;
  };
  const auto waits = [](Stream& stream) {
    std::byte byte;
    const MutableBytes into(&byte, 1);
    return stream.Read({&into, 1}).status == IoStatus::kWouldBlock;
  };
  const auto oldest = wait_for_a_qp(fabric_d, at_d);
  const auto first = wait_for_a_qp(pair_.fabric_b, at_b_);
  const auto second = wait_for_a_qp(pair_.fabric_b, at_b_);
  EXPECT_TRUE(waits(*first));
  const Instant before = pair_.world.Now();
  const auto third = wait_for_a_qp(pair_.fabric_b, at_b_);
  EXPECT_EQ(Word(*first)->status, wire::CarrierStatus::kNotReady);
  EXPECT_LT(pair_.world.Now() - before, 1s);
  for (Stream* const stream : {oldest.get(), second.get(), third.get()}) EXPECT_TRUE(waits(*stream));
  EXPECT_TRUE(std::any_of(trace.lines().begin(), trace.lines().end(), [](const std::string& line) {
    return line.find("carrier.refused why=too many wait") != std::string::npos;
  }));
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
  AToRtr();
  const auto accepted = LastAnswer(*second);
  ASSERT_TRUE(accepted.has_value());
  EXPECT_EQ(accepted->status, wire::CarrierStatus::kAccepted);
}

TEST_F(RocePortTest, AQpThatIsNotReadyIsWaitedForAndNotForEver) {
  const std::unique_ptr<Stream> stream = Visit();
  Say(*stream, Hello());
  const Instant before = pair_.world.Now();
  EXPECT_EQ(Word(*stream)->status, wire::CarrierStatus::kWait);
  EXPECT_LE(pair_.world.Now() - before, 1s);
  const auto answer = Word(*stream);
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

// The numbers and the secret of b's QP and a's.
class ProvenCarrierTest : public RocePortTest {
 protected:
  static constexpr uint32_t kNumberOfA = 0x00a5a5;
  static constexpr uint32_t kNumberOfB = 0x5b5b00;

  static void ReadyWith(TestHost& host, const TestHost& peer, const IpEndpoint& address, uint32_t send,
                        uint32_t receive, QpState last = QpState::kRts) {
    for (const QpState state : {QpState::kInit, QpState::kRtr, QpState::kRts}) {
      QpAttributes attributes = HandAttributes(state, *peer.qp, address);
      attributes.send_psn = send;
      attributes.receive_psn = receive;
      ASSERT_EQ(Modify(*host.qp, attributes), 0);
      if (state == last) return;
    }
  }
  void ReadyA(QpState last = QpState::kRts) { ReadyWith(a_, b_, at_b_, kNumberOfA, kNumberOfB, last); }
  void ReadyB(QpState last = QpState::kRts) { ReadyWith(b_, a_, at_a_, kNumberOfB, kNumberOfA, last); }
  void Connect() {
    ReadyA();
    ReadyB();
    ExpectTraffic(1);
  }
  static wire::CarrierSecret Secret(uint8_t last = 0) {
    wire::CarrierSecret secret{};
    secret[3] = std::byte{77};
    secret[15] = std::byte{last};
    return secret;
  }
  void Share(const wire::CarrierSecret& secret) {
    a_.nic->ShareSecret(a_.qp->qp_number(), b_.qp->qp_number(), GidOf(at_b_), secret);
    b_.nic->ShareSecret(b_.qp->qp_number(), a_.qp->qp_number(), GidOf(at_a_), secret);
  }
  uint64_t CarriersOfA() const { return a_.nic->counters().connections; }
  static Knowledge All(const wire::CarrierSecret& secret = {}) { return {{kNumberOfB, kNumberOfA}, secret}; }
};

TEST_F(ProvenCarrierTest, WhoKnowsBothNumbersIsThePeer) {
  Connect();
  EXPECT_EQ(StatusFor(Hello(), All()), wire::CarrierStatus::kAccepted);
}

TEST_F(ProvenCarrierTest, WhoDoesNotReplacesNothing) {
  Connect();
  const uint64_t carriers = CarriersOfA();
  const Knowledge guesses[] = {{{0, 0}},
                               {{kNumberOfB, 0}},
                               {{0, kNumberOfA}},
                               {{kNumberOfA, kNumberOfB}},
                               {{kNumberOfB + 1, kNumberOfA}},
                               {{kNumberOfB, kNumberOfA - 1}},
                               {{kNumberOfB, std::nullopt}},
                               {{kNumberOfB, kNumberOfA}, Secret()}};
  for (const Knowledge& guess : guesses) {
    EXPECT_EQ(StatusFor(Hello(), guess), wire::CarrierStatus::kNotProven);
  }
  pair_.world.RunFor(1s);
  EXPECT_EQ(CarriersOfA(), carriers);
  EXPECT_EQ(a_.nic->roce().counters().not_proven, std::size(guesses));
  ExpectTraffic(3);
  EXPECT_EQ(CarriersOfA(), carriers) << "it is still the first one that carries";
}

TEST_F(ProvenCarrierTest, WithASecretTheNumbersAreNotEnough) {
  Share(Secret());
  Connect();
  const uint64_t carriers = CarriersOfA();
  EXPECT_EQ(StatusFor(Hello(), All()), wire::CarrierStatus::kNotProven);
  EXPECT_EQ(StatusFor(Hello(), All(Secret(1))), wire::CarrierStatus::kNotProven);
  EXPECT_EQ(CarriersOfA(), carriers);
  EXPECT_EQ(StatusFor(Hello(), All(Secret())), wire::CarrierStatus::kAccepted);
}

TEST_F(ProvenCarrierTest, ASecretThatIsSharedLateHoldsForCarriersToCome) {
  Connect();
  Share(Secret());
  pair_.world.RunFor(1ms);
  EXPECT_EQ(StatusFor(Hello(), All()), wire::CarrierStatus::kNotProven);
  pair_.ResetConnections();
  ExpectTraffic(3);
}

TEST_F(ProvenCarrierTest, ASecretWithAnotherQpIsNone) {
  a_.nic->ShareSecret(a_.qp->qp_number(), b_.qp->qp_number() + 1, GidOf(at_b_), Secret());
  Connect();
}

// First QPs of first processes have one number on all hosts.
TEST_F(ProvenCarrierTest, ASecretWithTheQpOfThatNumberOnAnotherHostIsNone) {
  a_.nic->ShareSecret(a_.qp->qp_number(), b_.qp->qp_number(), GidOf(at_a_), Secret());
  Connect();
}

TEST_F(ProvenCarrierTest, AProofThatWasSaidIsWorthNothingOnAnotherStream) {
  Connect();
  const std::unique_ptr<Stream> first = Visit();
  Say(*first, Hello());
  const auto challenge = Answer(*first);
  ASSERT_TRUE(challenge.has_value());
  const auto overheard = ProofFor(Hello(), *challenge, All()).Encoded();
  Write(*first, overheard);
  EXPECT_EQ(Answer(*first)->status, wire::CarrierStatus::kAccepted);
  const std::unique_ptr<Stream> second = Visit();
  Say(*second, Hello());
  const auto another = Answer(*second);
  ASSERT_TRUE(another.has_value());
  EXPECT_NE(another->token, challenge->token);
  Write(*second, overheard);
  EXPECT_EQ(Answer(*second)->status, wire::CarrierStatus::kNotProven);
}

// Nothing of what a listener says is of use to who knows nothing: its own proof comes last, and is no initiator's.
TEST_F(ProvenCarrierTest, AListenerProvesNothingToWhoHasNot) {
  Connect();
  const std::unique_ptr<Stream> stream = Visit();
  Say(*stream, Hello());
  const auto challenge = Answer(*stream);
  ASSERT_TRUE(challenge.has_value());
  Write(*stream, wire::CarrierProof{challenge->token, challenge->token}.Encoded());
  const auto refusal = Answer(*stream);
  ASSERT_TRUE(refusal.has_value());
  EXPECT_EQ(refusal->status, wire::CarrierStatus::kNotProven);
  EXPECT_EQ(refusal->token, SipTag{});
  EXPECT_FALSE(Answer(*stream).has_value()) << "there is no second try";
}

TEST_F(ProvenCarrierTest, AQpThatDoesNotSendHasThePeersNumberProven) {
  ReadyA(QpState::kRtr);
  EXPECT_EQ(StatusFor(Hello(), {{0, 0}}), wire::CarrierStatus::kNotProven);
  EXPECT_EQ(StatusFor(Hello(), {{kNumberOfA, 0}}), wire::CarrierStatus::kNotProven);
  ReadyB();
  ExpectTraffic(b_, a_, 3);
}

// b's QP receives alone, as that of a program whose peer does all the sending.
TEST_F(ProvenCarrierTest, OneEndThatSendsIsEnough) {
  ReadyB(QpState::kRtr);
  ReadyA();
  ExpectTraffic(a_, b_, 3);
  pair_.ResetConnections();
  ExpectTraffic(a_, b_, 3);
}

TEST_F(ProvenCarrierTest, WhoWaitedForAQpProvesAllThatItComesToKnow) {
  const std::unique_ptr<Stream> stream = Visit();
  Say(*stream, Hello());
  pair_.world.RunFor(10ms);
  ReadyA();
  auto answer = Answer(*stream);
  ASSERT_TRUE(answer.has_value());
  ASSERT_EQ(answer->status, wire::CarrierStatus::kProve);
  // It was asked when a's QP was in RTR, and would have a carrier by half of what there is to know.
  Write(*stream, ProofFor(Hello(), *answer, {{kNumberOfB, 0}}).Encoded());
  answer = Answer(*stream);
  ASSERT_TRUE(answer.has_value());
  ASSERT_EQ(answer->status, wire::CarrierStatus::kProve);
  EXPECT_TRUE(answer->sends);
  Write(*stream, ProofFor(Hello(), *answer, {{kNumberOfB, 0}}).Encoded());
  EXPECT_EQ(Answer(*stream)->status, wire::CarrierStatus::kNotProven);
}

// As where one end alone sends, and nobody looks at what else was told.
TEST_F(ProvenCarrierTest, NumbersThatFitOneWayCarryThatWay) {
  ReadyWith(a_, b_, at_b_, kNumberOfA, kNumberOfB + (1u << 22));
  ReadyB();
  ExpectTraffic(a_, b_, 3);
  const TestBuffer source = b_.Register(64);
  b_.completions.clear();
  ASSERT_EQ(b_.Send(1, {source.All()}), 0);
  ASSERT_TRUE(pair_.world.RunUntil([&] { return b_.Completed(1); }));
  EXPECT_EQ(b_.completions[0].status, CompletionStatus::kRetryExceeded);
}

TEST_F(ProvenCarrierTest, WhereBothNumbersWereProvenOneOfThemIsNotEnough) {
  Connect();
  const uint64_t carriers = CarriersOfA();
  const Knowledge halves[] = {{{kNumberOfB, std::nullopt}}, {{std::nullopt, kNumberOfA}}};
  for (const Knowledge& half : halves) EXPECT_EQ(StatusFor(Hello(), half), wire::CarrierStatus::kNotProven);
  EXPECT_EQ(CarriersOfA(), carriers);
  ExpectTraffic(3);
}

TEST_F(ProvenCarrierTest, HalfAProofIsNotWaitedForAndKeepsNobodyOut) {
  Connect();
  const std::unique_ptr<Stream> half = Visit();
  Say(*half, Hello());
  const auto challenge = Answer(*half);
  ASSERT_TRUE(challenge.has_value());
  const auto proof = ProofFor(Hello(), *challenge, All()).Encoded();
  Write(*half, ConstBytes(proof).first(proof.size() - 1));
  std::vector<std::unique_ptr<Stream>> silent;
  for (uint32_t i = 0; i < 2 * a_.nic->profile().max_joining; ++i) {
    silent.push_back(Visit());
    Say(*silent.back(), Hello());
  }
  EXPECT_EQ(StatusFor(Hello(), All()), wire::CarrierStatus::kAccepted);
  const Instant before = pair_.world.Now();
  EXPECT_FALSE(Answer(*half).has_value());
  for (const auto& stream : silent) {
    while (Answer(*stream).has_value()) continue;
  }
  EXPECT_LE(pair_.world.Now() - before, a_.nic->profile().join_timeout + 1s);
  ExpectTraffic(3);
}

TEST_F(ProvenCarrierTest, WhoGuessesTooOftenIsNotListenedToForAWhile) {
  Connect();
  for (int i = 0; i < Refusals::kAtOnce; ++i) {
    ASSERT_EQ(StatusFor(Hello(), {{0, 0}}), wire::CarrierStatus::kNotProven) << i;
  }
  EXPECT_EQ(StatusFor(Hello(), All()), wire::CarrierStatus::kTooOften) << "whatever it might know";
  // Of another address nobody has guessed.
  const IpEndpoint at_c = *IpEndpoint::Parse("10.0.0.3", 0);
  SimFabric& fabric_c = pair_.world.AddHost("c", {at_c});
  QpCreate create;
  create.pd = a_.pd;
  create.send_cq = create.receive_cq = a_.cq;
  QueuePair* const second = *a_.nic->CreateQp(*a_.context, create);
  ReadyFor(*second, *b_.qp, at_c);
  wire::CarrierHello hello = Hello();
  hello.destination_qp = second->qp_number();
  hello.source = GidOf(at_c);
  const std::unique_ptr<Stream> stream = Visit(fabric_c);
  Say(*stream, hello);
  EXPECT_EQ(LastAnswer(*stream, hello, {})->status, wire::CarrierStatus::kAccepted);
  ExpectTraffic(3);
  pair_.world.RunFor(Refusals::kForEach);
  EXPECT_EQ(StatusFor(Hello(), All()), wire::CarrierStatus::kAccepted);
}

// All that a stranger hears who asks for a QP with these numbers and this secret in every way, and behind each question
// sends packets out of sequence, which a peer would be told of with the number that is expected.
class QuestionsOfAStranger : public ProvenCarrierTest {
 public:
  QuestionsOfAStranger(uint32_t number_of_a, uint32_t number_of_b, const wire::CarrierSecret& secret)
      : number_of_a_(number_of_a), number_of_b_(number_of_b) {
    Share(secret);
  }
  void TestBody() override {}

  std::vector<std::byte> Heard() {
    wire::CarrierHello of_another_peer = Hello();
    of_another_peer.source_qp += 1;
    wire::CarrierHello of_no_qp = Hello();
    of_no_qp.destination_qp += 100;
    const auto ask = [&](bool is_too_often = false) {
      for (const wire::CarrierHello& hello : {Hello(), of_another_peer, of_no_qp}) {
        for (const std::byte guess : {std::byte{0}, std::byte{0x5a}}) Ask(hello, guess, is_too_often);
      }
    };
    const std::unique_ptr<Stream> early = Visit();
    Say(*early, Hello());
    SayPackets(*early);
    HearAll(*early);
    ReadyWith(a_, b_, at_b_, number_of_a_, number_of_b_, QpState::kRtr);
    ask();
    ReadyWith(b_, a_, at_a_, number_of_b_, number_of_a_);
    QpAttributes attributes = HandAttributes(QpState::kRts, *b_.qp, at_b_);
    attributes.send_psn = number_of_a_;
    EXPECT_EQ(Modify(*a_.qp, attributes), 0);
    ExpectTraffic(3);
    ask();
    for (int i = 0; i < Refusals::kAtOnce; ++i) StatusFor(Hello(), {{1, 1}});
    ask(/*is_too_often=*/true);
    ExpectTraffic(3);
    return heard_;
  }
  const std::set<wire::CarrierStatus>& said() const { return said_; }

 private:
  void Ask(const wire::CarrierHello& hello, std::byte guess, bool is_too_often) {
    const std::unique_ptr<Stream> stream = Visit();
    Say(*stream, hello);
    if (hello == Hello() && !is_too_often) {
      std::array<std::byte, wire::kCarrierProofSize> proof;
      proof.fill(guess);
      Write(*stream, proof);
    }
    SayPackets(*stream);
    HearAll(*stream);
  }
  void SayPackets(Stream& stream) {
    for (const uint32_t psn : {0u, 1u, 0x7fffffu, 0xffffffu}) {
      const wire::IbHeader header{
          .op = wire::IbOp::kSendOnly, .destination_qp = a_.qp->qp_number(), .ack_request = true, .psn = psn};
      std::array<std::byte, 2> length;
      std::vector<std::byte> record(header.EncodedSize());
      ByteWriter(length).U16(static_cast<uint16_t>(record.size()));
      ByteWriter out(record);
      header.Encode(out);
      // As a record layer without CRCs says it: padded to four bytes, and four more.
      record.insert(record.begin(), length.begin(), length.end());
      record.resize((record.size() + 3) / 4 * 4 + 4);
      Write(stream, record);
    }
  }
  void HearAll(Stream& stream) {
    const size_t before = heard_.size();
    EXPECT_TRUE(pair_.world.RunUntil([&] {
      for (;;) {
        std::array<std::byte, 256> bytes;
        const MutableBytes into(bytes);
        const IoResult result = stream.Read({&into, 1});
        if (result.status == IoStatus::kWouldBlock) return false;
        if (result.status != IoStatus::kOk) return true;
        heard_.insert(heard_.end(), bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(result.bytes));
      }
    })) << "the stream stays";
    const ConstBytes words = ConstBytes(heard_).subspan(before);
    ASSERT_EQ(words.size() % wire::kCarrierAnswerSize, 0u) << "something else than answers";
    for (size_t at = 0; at < words.size(); at += wire::kCarrierAnswerSize) {
      const auto answer = wire::DecodeCarrierAnswer(words.subspan(at, wire::kCarrierAnswerSize));
      ASSERT_TRUE(answer.has_value()) << "a refusal that says more than why";
      said_.insert(answer->status);
    }
  }

  const uint32_t number_of_a_;
  const uint32_t number_of_b_;
  std::vector<std::byte> heard_;
  std::set<wire::CarrierStatus> said_;
};

TEST(RefusedCarrierTest, NoPacketNumberAndNoSecretIsToldAndNoNakFollowsARefusal) {
  QuestionsOfAStranger first(0x00a5a5, 0x5b5b00, {std::byte{1}});
  QuestionsOfAStranger second(0x123456, 0xfedcba, {std::byte{2}});
  const std::vector<std::byte> heard = first.Heard();
  using enum wire::CarrierStatus;
  EXPECT_EQ(first.said(), (std::set{kNoQp, kMismatch, kProve, kNotProven, kTooOften, kWait}));
  EXPECT_EQ(heard, second.Heard()) << "what a stranger is told depends on what it is not to know";
}

// Somebody else has got the port of a peer that is gone, and learns what it can.
class StrangerListens : public ProvenCarrierTest, public ReadyWatcher {
 protected:
  void OnReady() override {
    for (;;) {
      std::array<std::byte, 256> bytes;
      const MutableBytes into(bytes);
      const IoResult result = stream_->Read({&into, 1});
      if (result.status == IoStatus::kOk) {
        heard_.insert(heard_.end(), bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(result.bytes));
        continue;
      }
      if (result.status == IoStatus::kWouldBlock) break;
      return;
    }
    React();
    stream_->Arm(true, false);
  }
  // It is the peer, after all, and ends each stream that it has taken.
  wire::CarrierAnswer AsThePeer(size_t step) {
    wire::CarrierNonce challenge{};
    challenge[0] = static_cast<std::byte>(streams_);
    if (step == 1) {
      return wire::CarrierAnswer{.status = wire::CarrierStatus::kProve, .sends = true, .token = challenge};
    }
    const auto hello = wire::DecodeCarrierHello(ConstBytes(heard_).first(wire::kCarrierHelloSize));
    const SipTag proof =
        wire::ProveCarrier(wire::CarrierRole::kListener, {}, *hello, challenge, {kNumberOfA, kNumberOfB});
    pair_.world.loop().Post([this] { stream_->Shutdown(); });
    return wire::CarrierAnswer{.token = proof};
  }
  static wire::CarrierAnswer AsOneThatDoesNotSend() { return {.status = wire::CarrierStatus::kProve}; }
  // Says whatever `says` has for what was heard on this stream.
  void React() {
    if (streams_ > 1) most_heard_ = std::max(most_heard_, heard_.size());
    const size_t step = heard_.size() == wire::kCarrierHelloSize                             ? 1
                        : heard_.size() == wire::kCarrierHelloSize + wire::kCarrierProofSize ? 2
                                                                                             : 0;
    if (step <= said_) return;
    said_ = step;
    wire::CarrierAnswer answer = says_(step);
    std::array<std::byte, wire::kCarrierAnswerSize> bytes;
    ByteWriter out(bytes);
    answer.Encode(out);
    for (int i = 0; i < times_said_; ++i) Write(*stream_, bytes);
  }
  std::unique_ptr<Listener> Listen() {
    const IpEndpoint at_c = *IpEndpoint::Parse("10.0.0.3", 0);
    SimFabric& fabric_c = pair_.world.AddHost("c", {at_c});
    auto listener =
        *fabric_c.Listen(at_c.WithPort(a_.nic->profile().port_base), 8, [&](std::unique_ptr<Stream> stream) {
          if (stream_ != nullptr) stream_->SetWatcher(nullptr);
          stream_ = std::move(stream);
          heard_.clear();
          said_ = 0;
          ++streams_;
          stream_->SetWatcher(this);
          OnReady();
        });
    ReadyWith(a_, b_, at_c, kNumberOfA, kNumberOfB);  // a QP of b's number, at c
    return listener;
  }

  void TearDown() override {
    if (stream_ != nullptr) stream_->SetWatcher(nullptr);
  }

  std::function<wire::CarrierAnswer(size_t step)> says_;
  std::unique_ptr<Stream> stream_;
  std::vector<std::byte> heard_;
  size_t said_ = 0;
  int times_said_ = 1;
  size_t most_heard_ = 0;  // on any but the first
  uint32_t streams_ = 0;
};

TEST_F(StrangerListens, AYesWithoutAProofIsNone) {
  says_ = [](size_t) { return wire::CarrierAnswer{}; };
  const auto listener = Listen();
  EXPECT_TRUE(pair_.world.RunUntilIdle()) << "it goes on and on";
  EXPECT_EQ(CarriersOfA(), 0u);
  EXPECT_GT(streams_, 3u);
  EXPECT_EQ(a_.nic->roce().counters().calls_not_proven, streams_);
}

TEST_F(StrangerListens, WhatItHearsIsNoAnswerOfItsOwn) {
  says_ = [this](size_t step) {
    if (step == 1) return wire::CarrierAnswer{.status = wire::CarrierStatus::kProve, .sends = true};
    const auto proof = wire::CarrierProof::Decode(ConstBytes(heard_).subspan(wire::kCarrierHelloSize));
    return wire::CarrierAnswer{.token = proof.first};
  };
  const auto listener = Listen();
  EXPECT_TRUE(pair_.world.RunUntilIdle());
  EXPECT_EQ(CarriersOfA(), 0u);
  EXPECT_EQ(a_.nic->roce().counters().calls_not_proven, streams_);
}

TEST_F(StrangerListens, AskingForAProofAgainAndAgainEndsTheStream) {
  says_ = [](size_t) { return wire::CarrierAnswer{.status = wire::CarrierStatus::kProve, .sends = true}; };
  const auto listener = Listen();
  EXPECT_TRUE(pair_.world.RunUntilIdle());
  EXPECT_EQ(CarriersOfA(), 0u);
}

// Or half of the numbers could be tried by itself.
TEST_F(StrangerListens, SayingWaitAgainEndsTheStream) {
  says_ = [](size_t) { return wire::CarrierAnswer{.status = wire::CarrierStatus::kWait}; };
  times_said_ = 2;
  const auto listener = Listen();
  const Instant before = pair_.world.Now();
  EXPECT_TRUE(pair_.world.RunUntilIdle());
  EXPECT_GT(streams_, 3u);
  EXPECT_LE(pair_.world.Now() - before, 5s) << "none of them is waited for";
}

TEST_F(StrangerListens, APeerThatSentIsNotBelievedThatItDoesNot) {
  says_ = [this](size_t step) { return streams_ == 1 ? AsThePeer(step) : AsOneThatDoesNotSend(); };
  const auto listener = Listen();
  EXPECT_TRUE(pair_.world.RunUntilIdle());
  EXPECT_EQ(CarriersOfA(), 1u);
  EXPECT_GT(streams_, 3u);
  EXPECT_EQ(most_heard_, wire::kCarrierHelloSize) << "it was told a proof";
}

TEST_F(StrangerListens, AnotherVersionIsSaidToPeople) {
  says_ = [](size_t) { return wire::CarrierAnswer{.status = wire::CarrierStatus::kOtherVersion}; };
  const auto listener = Listen();
  EXPECT_TRUE(pair_.world.RunUntilIdle());
  EXPECT_EQ(a_.complaints.size(), 1u);
}

TEST_F(RocePortTest, AHelloOfAnotherVersionIsAnsweredBeforeItIsAllThere) {
  const std::unique_ptr<Stream> stream = Visit();
  std::array<std::byte, wire::kCarrierHelloSize> bytes;
  ByteWriter out(bytes);
  Hello().Encode(out);
  bytes[wire::kCarrierKeySize - 1] = std::byte{1};
  Write(*stream, ConstBytes(bytes).first(64));  // as long as that of version 1
  const Instant before = pair_.world.Now();
  const auto answer = Answer(*stream);
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->status, wire::CarrierStatus::kOtherVersion);
  EXPECT_LT(pair_.world.Now() - before, 1s);
  EXPECT_EQ(a_.complaints.size(), 1u);
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
  std::unique_ptr<Stream> stream = Visit();
  Say(*stream, Hello());
  AToRtr();
  const auto answer = LastAnswer(*stream);
  ASSERT_TRUE(answer.has_value());
  ASSERT_EQ(answer->status, wire::CarrierStatus::kAccepted);
  const TestRecords records(pair_.fabric_b);
  const auto llp = records.fabric().RecordsOver(std::move(stream), CarrierRecords(/*crc=*/false));
  ASSERT_EQ(Modify(*a_.qp, HandAttributes(QpState::kRts, *b_.qp, at_b_)), 0);
  const uint64_t records_before = a_.nic->counters().work.llp.rx_records;
  uint64_t said = 0;
  Prng luck(5);
  for (; said < 200; ++said) {
    std::vector<std::byte> record(1 + luck.Below(100));
    for (std::byte& byte : record) byte = static_cast<std::byte>(luck.Below(256));
    SayRecord(pair_.world, *llp, record);
  }
  const TestBuffer target = a_.Register(64);
  const auto say = [&](wire::IbHeader header, size_t payload = 0) {
    ++said;
    SayPacket(*llp, header, payload);
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
  llp->Abort();
  ExpectTraffic(3);
}

// --- Accidents ---

TEST_F(RocePortTest, ResetStreamsAreReplacedAndNothingIsLost) {
  Connect();
  ExpectTraffic(1);
  for (int i = 0; i < 5; ++i) {
    pair_.ResetConnections();
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
    const auto challenge = Answer(*visit_);
    ASSERT_TRUE(challenge.has_value());
    ASSERT_EQ(challenge->status, wire::CarrierStatus::kProve);
    Write(*visit_, ProofFor(hello, *challenge, {}).Encoded());
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

TEST_F(RocePortTest, AQpThatGoesTakesTheTimerOfItsNextAttemptAlong) {
  ReadyB();
  ASSERT_EQ(b_.ToState(QpState::kErr), 0);
  ReadyA();
  pair_.world.RunFor(140ms);  // 87 ms before the next attempt
  const auto timers = [this] { return pair_.world.loop().CountOf(SimLoop::kNobody).timers; };
  EXPECT_GT(timers(), 0u);
  ASSERT_EQ(a_.ToState(QpState::kReset), 0);
  pair_.world.RunFor(1ms);
  EXPECT_EQ(timers(), 0u);
}

TEST_F(StrangerListens, APeerThatTakesStreamsAndEndsThemIsTriedSoOften) {
  says_ = [this](size_t step) { return AsThePeer(step); };
  const auto listener = Listen();
  EXPECT_TRUE(pair_.world.RunUntilIdle()) << "it goes on and on";
  EXPECT_EQ(CarriersOfA(), streams_);
  EXPECT_GT(streams_, 3u);
  EXPECT_LT(streams_, 30u);
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

// --- The MTU ---

TEST_F(RocePortTest, TheActiveMtuIsTheLargestThatFitsTheLink) {
  struct Row {
    uint32_t link;
    uint8_t code;
  };
  // With 96 bytes of headers.
  for (const Row& row :
       {Row{0, 1}, Row{68, 1}, Row{607, 1}, Row{608, 2}, Row{1119, 2}, Row{1120, 3}, Row{1500, 3}, Row{2143, 3},
        Row{2144, 4}, Row{4191, 4}, Row{4192, 5}, Row{9000, 5}, Row{65536, 5}, Row{0xffffffff, 5}}) {
    pair_.fabric_a.SetLinkMtu(row.link);
    EXPECT_EQ(a_.nic->roce().MtuOf(at_a_), row.code) << row.link;
    EXPECT_EQ(a_.nic->active_mtu(), row.code) << row.link;
  }
  DeviceProfile small = RoceProfile();
  small.max_mtu = 2;
  TestHost host(pair_.fabric_a, "small", small);
  EXPECT_EQ(host.nic->active_mtu(), 2) << "the device can do no more";
  TestHost iwarp(pair_.fabric_a, "iwarp", IwarpProfile());
  EXPECT_EQ(iwarp.nic->active_mtu(), 5);
}

TEST_F(RocePortTest, TheActiveMtuIsThatOfTheFirstGidThatIsThere) {
  ChangingFabric fabric(pair_.fabric_a);
  pair_.fabric_a.SetLinkMtu(2144);
  fabric.addresses = {*IpEndpoint::Parse("127.0.0.1", 0)};
  TestHost host(fabric, "host", RoceProfile());
  EXPECT_EQ(host.nic->active_mtu(), 5);
  fabric.addresses = {at_a_};
  EXPECT_EQ(host.nic->active_mtu(), 4) << "the first has gone";
  fabric.addresses.clear();
  EXPECT_EQ(host.nic->active_mtu(), 5) << "there is no link that it could be of";
}

TEST_F(RocePortTest, QpsTakeAnyPathMtuOfTheDevice) {
  for (uint8_t mtu = 1; mtu <= 5; ++mtu) {
    QpAttributes rtr = HandAttributes(QpState::kRtr, *b_.qp, at_b_);
    QpAttributes rtr_of_b = HandAttributes(QpState::kRtr, *a_.qp, at_a_);
    rtr.path_mtu = rtr_of_b.path_mtu = mtu;
    ASSERT_EQ(Modify(*a_.qp, HandAttributes(QpState::kInit, *b_.qp, at_b_)), 0);
    ASSERT_EQ(Modify(*b_.qp, HandAttributes(QpState::kInit, *a_.qp, at_a_)), 0);
    for (const uint8_t bad : {0, 6, 255}) {
      QpAttributes refused = rtr;
      refused.path_mtu = bad;
      EXPECT_EQ(Modify(*a_.qp, refused), EINVAL);
    }
    ASSERT_EQ(Modify(*a_.qp, rtr), 0);
    ASSERT_EQ(Modify(*b_.qp, rtr_of_b), 0);
    ASSERT_EQ(Modify(*a_.qp, HandAttributes(QpState::kRts, *b_.qp, at_b_)), 0);
    ASSERT_EQ(Modify(*b_.qp, HandAttributes(QpState::kRts, *a_.qp, at_a_)), 0);
    ExpectTraffic(a_, b_, 2);
    ExpectTraffic(b_, a_, 2);
    Reset(a_);
    Reset(b_);
  }
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
  EXPECT_EQ(hole.error(), ENODATA);
  vector.sgid_index = 3;
  const auto beyond = port.PathTo(vector);
  ASSERT_FALSE(beyond.has_value());
  EXPECT_EQ(beyond.error(), EINVAL);

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
  hostile.habits.push_back({.action = InjectionAction::kNotReady, .kinds = kEveryRecord, .one_in = 5});
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
    if (i % 4 == 1) pair.ResetConnections();
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
