// Links for datagrams as strangers, accidents and crowds find them, in virtual time.
#include "emu/nic/datagram/datagram_port.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/cursor.h"
#include "base/prng.h"
#include "emu/engine/ib_datagram.h"
#include "emu/inject/rule.h"
#include "emu/llp/llp.h"
#include "emu/nic/asking_sink.h"
#include "emu/nic/datagram/address_handles.h"
#include "emu/nic/infiniband/carrier_stream.h"
#include "emu/nic/nic_test_support.h"
#include "emu/wire/carrier_hello.h"

namespace stagecoach::emu {
namespace {

constexpr uint32_t kQkey = 0x1234;

// A datagram as a handler got it.
struct Heard {
  DatagramPeer from;
  wire::IbHeader header;
  std::string text;
};

// A UD QP in RTS.
QueuePair* ReadyQp(TestHost& host, QpCapabilities capabilities = {64, 64, 4, 4, 128}) {
  QpCreate create;
  create.type = QpType::kUd;
  create.pd = host.pd;
  create.send_cq = create.receive_cq = host.cq;
  create.capabilities = capabilities;
  QueuePair* const qp = *host.nic->CreateQp(*host.context, create);
  DatagramsToRts(*qp, kQkey);
  return qp;
}

int Post(QueuePair& qp, const AddressHandle* ah, uint32_t remote_qp, uint64_t wr_id, std::vector<ScatterGather> sges) {
  SendRequest request;
  request.wr_id = wr_id;
  request.signaled = true;
  request.sges = sges;
  request.destination = ah;
  request.remote_qp = remote_qp;
  request.remote_qkey = kQkey;
  return qp.PostSend(request);
}

class DatagramPortTest : public ::testing::Test {
 protected:
  explicit DatagramPortTest(DeviceProfile profile = RoceProfile())
      : a_(pair_.fabric_a, "a", profile), b_(pair_.fabric_b, "b", profile) {}
  void SetUp() override {
    Listen(a_, &heard_by_a_);
    Listen(b_, &heard_by_b_);
  }
  void TearDown() override {
    listener_ = nullptr;  // before what it gives its links to
    for (TestHost* host : {&a_, &b_}) {
      host->nic->datagrams().SetGsiHandler({});
      host->nic->datagrams().SetLinkHandler({});
    }
  }
  static void Listen(TestHost& host, std::vector<Heard>* heard) {
    host.nic->datagrams().SetGsiHandler(
        [heard](const DatagramPeer& from, const wire::IbHeader& header, ConstBytes payload) {
          heard->push_back({from, header, std::string(AsText(payload))});
        });
  }
  void WatchLinksOfA() {
    a_.nic->datagrams().SetLinkHandler(
        [this](const DatagramPeer&, DatagramPort::LinkEvent event) { events_.push_back(event); });
  }

  DatagramPeer PeerOf(TestHost& from, const IpEndpoint& own, const IpEndpoint& theirs, uint8_t slot = 0) {
    return from.nic->datagrams().PeerAt({own, theirs}, slot);
  }
  DatagramPeer FromAToB(uint8_t slot = 0) { return PeerOf(a_, at_a_, at_b_, slot); }
  static wire::IbHeader Gsi() {
    wire::IbHeader header;
    header.destination_qp = header.source_qp = kGsiQp;
    header.qkey = kGsiQkey;
    return header;
  }
  DatagramPort::Sent Say(TestHost& host, const DatagramPeer& to, std::string_view text) {
    return host.nic->datagrams().Send(to, Gsi(), AsBytes(text));
  }
  bool HeardByB(size_t count) {
    return pair_.world.RunUntil([&] { return heard_by_b_.size() >= count; });
  }

  const AddressHandle* HandleOf(TestHost& host, const IpEndpoint& theirs) {
    AddressVector vector;
    vector.is_global = true;
    vector.gid = GidOf(theirs);
    const auto ah = host.nic->CreateAh(*host.context, host.pd, vector);
    EXPECT_TRUE(ah.has_value());
    return ah ? *ah : nullptr;
  }
  // --- As a peer: b's port at slot 3, which gives the links it is asked for to `take` ---

  void PlayPort(std::function<void(std::unique_ptr<Stream>)> take) {
    auto listening =
        pair_.fabric_b.Listen(at_b_.WithPort(static_cast<uint16_t>(b_.nic->profile().port_base + 3)), 64,
                              [take = std::move(take)](std::unique_ptr<Stream> stream) { take(std::move(stream)); });
    ASSERT_TRUE(listening.has_value());
    listener_ = std::move(*listening);
  }
  static void Answer(Stream& stream, wire::CarrierStatus status = wire::CarrierStatus::kAccepted) {
    std::array<std::byte, wire::kCarrierAnswerSize> answer;
    ByteWriter out(answer);
    wire::CarrierAnswer{.status = status}.Encode(out);
    Write(stream, answer);
  }

  // --- As a stranger: of b's host, at a's port ---

  std::unique_ptr<Stream> Visit() {
    std::unique_ptr<Stream> stream;
    const auto attempt = pair_.fabric_b.Connect(
        at_b_, at_a_.WithPort(a_.nic->profile().port_base),
        [&](Result<std::unique_ptr<Stream>, FabricError> result) { stream = std::move(*result); });
    EXPECT_TRUE(pair_.world.RunUntil([&] { return stream != nullptr; }));
    return stream;
  }
  wire::CarrierHello Hello(uint32_t slot = 5) const {
    wire::CarrierHello hello;
    hello.datagrams = true;
    hello.source_qp = slot << kSlotShift;
    hello.source = GidOf(at_b_);
    hello.destination = GidOf(at_a_);
    return hello;
  }
  static void Write(Stream& stream, ConstBytes bytes) { ASSERT_EQ(stream.Write({&bytes, 1}).bytes, bytes.size()); }
  // What the stream brings, or nothing if it ends before that.
  std::optional<wire::CarrierStatus> StatusFor(Stream& stream, const wire::CarrierHello& hello) {
    std::array<std::byte, wire::kCarrierHelloSize> bytes;
    ByteWriter out(bytes);
    hello.Encode(out);
    Write(stream, bytes);
    std::array<std::byte, wire::kCarrierAnswerSize> answer{};
    size_t read = 0;
    bool ended = false;
    EXPECT_TRUE(pair_.world.RunUntil([&] {
      while (read < answer.size() && !ended) {
        const MutableBytes rest = MutableBytes(answer).subspan(read);
        const IoResult result = stream.Read({&rest, 1});
        if (result.status == IoStatus::kWouldBlock) return false;
        ended = result.status != IoStatus::kOk;
        read += result.bytes;
      }
      return true;
    }));
    if (ended) return std::nullopt;
    const auto decoded = wire::DecodeCarrierAnswer(answer);
    EXPECT_TRUE(decoded.has_value());
    return decoded ? std::optional(decoded->status) : std::nullopt;
  }
  // The stream of a link that a has agreed to.
  std::unique_ptr<Stream> StreamOfLink(const wire::CarrierHello& hello) {
    std::unique_ptr<Stream> stream = Visit();
    EXPECT_EQ(StatusFor(*stream, hello), wire::CarrierStatus::kAccepted);
    return stream;
  }
  std::unique_ptr<Llp> Link(const wire::CarrierHello& hello) { return Records(StreamOfLink(hello)); }
  std::unique_ptr<Llp> Link(uint32_t slot = 5) { return Link(Hello(slot)); }
  // b's end of a link that both have agreed to, in place of its stream.
  std::unique_ptr<Llp> Records(std::unique_ptr<Stream> stream) {
    return records_of_b_.fabric().RecordsOver(std::move(stream), CarrierRecords(/*crc=*/false));
  }
  void Say(Llp& link, ConstBytes record) { SayRecord(pair_.world, link, record); }
  static std::vector<std::byte> Record(const wire::IbHeader& header, size_t payload) {
    std::vector<std::byte> record(header.EncodedSize() + wire::kDatagramIpSize + payload, std::byte{'x'});
    ByteWriter out(record);
    header.Encode(out);
    wire::EncodeDatagramIp(header, out);
    return record;
  }
  // The beginning of a record, as MPA frames it on a stream.
  std::vector<std::byte> HalfARecord() {
    const std::vector<std::byte> record = Record(FromStranger(100), 100);
    std::vector<std::byte> half(60);
    ByteWriter out(half);
    out.U16(static_cast<uint16_t>(record.size()));
    out.Bytes(ConstBytes(record).first(half.size() - 2));
    return half;
  }
  wire::IbHeader FromStranger(size_t payload) {
    wire::IbHeader header = Gsi();
    header.service = wire::IbService::kUd;
    header.source_qp = 0x050007;
    header.pad = wire::IbPad(payload);
    return header;
  }
  static bool Ended(Llp& link) { return link.Drain().end.has_value(); }
  static bool Ended(Stream& stream) {
    std::array<std::byte, 16> bytes;
    const MutableBytes into(bytes);
    const IoStatus status = stream.Read({&into, 1}).status;
    return status == IoStatus::kEof || status == IoStatus::kError;
  }
  DatagramPort::Counters CountersOf(TestHost& host) { return host.nic->datagrams().counters(); }

  SimPair pair_;
  const IpEndpoint at_a_ = *IpEndpoint::Parse("10.0.0.1", 0);
  const IpEndpoint at_b_ = *IpEndpoint::Parse("10.0.0.2", 0);
  TestHost a_;
  TestHost b_;
  const TestRecords records_of_b_{pair_.fabric_b};
  std::vector<Heard> heard_by_a_;
  std::vector<Heard> heard_by_b_;
  std::vector<DatagramPort::LinkEvent> events_;
  std::unique_ptr<Listener> listener_;
};

// --- Where datagrams go ---

TEST_F(DatagramPortTest, TheGeneralServicesOfAnotherHostHearAndAnswer) {
  ASSERT_EQ(Say(a_, FromAToB(), "question"), DatagramPort::Sent::kQueued);
  ASSERT_TRUE(HeardByB(1));
  EXPECT_EQ(heard_by_b_[0].text, "question");
  EXPECT_EQ(heard_by_b_[0].header.source_qp, kGsiQp);
  EXPECT_EQ(heard_by_b_[0].from.path.remote, at_a_);
  EXPECT_EQ(heard_by_b_[0].from.path.local, at_b_);
  EXPECT_EQ(heard_by_b_[0].from.slot, 0);
  ASSERT_EQ(Say(b_, heard_by_b_[0].from, "answer"), DatagramPort::Sent::kQueued);
  ASSERT_TRUE(pair_.world.RunUntil([&] { return !heard_by_a_.empty(); }));
  EXPECT_EQ(heard_by_a_[0].text, "answer");
}

TEST_F(DatagramPortTest, EachProcessOfAHostIsReachedByItsSlot) {
  TestHost second(pair_.fabric_b, "second", RoceProfile());
  std::vector<Heard> heard_by_second;
  Listen(second, &heard_by_second);
  Say(a_, FromAToB(1), "second");
  ASSERT_TRUE(pair_.world.RunUntil([&] { return !heard_by_second.empty(); }));
  EXPECT_EQ(heard_by_second[0].text, "second");
  // And from one process of a host to another, which is no delivery within one.
  Say(second, PeerOf(second, at_b_, at_b_, 0), "neighbour");
  ASSERT_TRUE(HeardByB(1));
  EXPECT_EQ(heard_by_b_[0].text, "neighbour");
  EXPECT_EQ(heard_by_b_[0].from.slot, 1);
  second.nic->datagrams().SetGsiHandler({});
}

TEST_F(DatagramPortTest, WhatIsForThisProcessDoesNotLeaveIt) {
  const DatagramPeer self = PeerOf(a_, at_a_, at_a_, 0);
  ASSERT_EQ(Say(a_, self, "to myself"), DatagramPort::Sent::kQueued);
  EXPECT_TRUE(heard_by_a_.empty()) << "delivered within the call";
  ASSERT_TRUE(pair_.world.RunUntil([&] { return !heard_by_a_.empty(); }));
  EXPECT_EQ(heard_by_a_[0].text, "to myself");
  EXPECT_EQ(CountersOf(a_).outgoing_links, 0u);
}

TEST_F(DatagramPortTest, WithoutAHandlerOrTheRightKeyTheGeneralServicesAreDeaf) {
  wire::IbHeader wrong = Gsi();
  wrong.qkey = kQkey;
  ASSERT_EQ(a_.nic->datagrams().Send(FromAToB(), wrong, AsBytes("wrong key")), DatagramPort::Sent::kQueued);
  Say(a_, FromAToB(), "right key");
  ASSERT_TRUE(HeardByB(1));
  EXPECT_EQ(heard_by_b_[0].text, "right key");
  EXPECT_EQ(CountersOf(b_).bad_qkey, 1u);
  b_.nic->datagrams().SetGsiHandler({});
  Say(a_, FromAToB(), "nobody");
  ASSERT_TRUE(pair_.world.RunUntil([&] { return CountersOf(b_).no_qp == 1; }));
  EXPECT_EQ(heard_by_b_.size(), 1u);
}

TEST_F(DatagramPortTest, AThousandArriveInOrder) {
  for (int i = 0; i < 1000; ++i) {
    while (Say(a_, FromAToB(), std::to_string(i)) == DatagramPort::Sent::kFull) pair_.world.RunFor(1ms);
  }
  ASSERT_TRUE(HeardByB(1000));
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(heard_by_b_[static_cast<size_t>(i)].text, std::to_string(i));
  EXPECT_EQ(CountersOf(a_).outgoing_links, 1u);
  EXPECT_EQ(CountersOf(b_).incoming_links, 1u);
}

// --- Links come and go ---

TEST_F(DatagramPortTest, AQuietLinkIsClosedByItsSenderAndNothingIsLost) {
  WatchLinksOfA();
  Say(a_, FromAToB(), "one");
  ASSERT_TRUE(HeardByB(1));
  // Everything there is to do ends.
  EXPECT_TRUE(pair_.world.RunUntilIdle());
  EXPECT_EQ(CountersOf(a_).outgoing_links, 0u);
  EXPECT_EQ(CountersOf(b_).incoming_links, 0u);
  Say(a_, FromAToB(), "two");
  ASSERT_TRUE(HeardByB(2));
  EXPECT_EQ(events_, (std::vector{DatagramPort::LinkEvent::kUp, DatagramPort::LinkEvent::kUp}));
  EXPECT_EQ(CountersOf(a_).lost, 0u);
}

TEST_F(DatagramPortTest, ALinkInUseIsKept) {
  Say(a_, FromAToB(), "first");
  ASSERT_TRUE(HeardByB(1));
  for (size_t i = 2; i < 12; ++i) {
    pair_.world.RunFor(a_.nic->profile().link_idle - 1s);
    Say(a_, FromAToB(), "more");
    ASSERT_TRUE(HeardByB(i));
    EXPECT_EQ(CountersOf(b_).incoming_links, 1u);
  }
}

TEST_F(DatagramPortTest, APortNobodyListensAtIsLeftAloneForAWhile) {
  WatchLinksOfA();
  EXPECT_EQ(Say(a_, FromAToB(9), "hello?"), DatagramPort::Sent::kQueued);
  ASSERT_TRUE(pair_.world.RunUntil([&] { return !events_.empty(); }));
  EXPECT_EQ(events_[0], DatagramPort::LinkEvent::kRefused);
  EXPECT_EQ(CountersOf(a_).lost, 1u);
  EXPECT_EQ(Say(a_, FromAToB(9), "hello?"), DatagramPort::Sent::kDropped);
  pair_.world.RunFor(10ms);
  EXPECT_EQ(Say(a_, FromAToB(9), "hello?"), DatagramPort::Sent::kQueued) << "tried again";
  // A process comes to be there.
  std::vector<std::unique_ptr<TestHost>> others;
  for (int i = 0; i < 9; ++i) {
    others.push_back(std::make_unique<TestHost>(pair_.fabric_b, "other" + std::to_string(i), RoceProfile()));
  }
  std::vector<Heard> heard;
  Listen(*others.back(), &heard);
  pair_.world.RunFor(2s);
  EXPECT_EQ(Say(a_, FromAToB(9), "hello!"), DatagramPort::Sent::kQueued);
  EXPECT_TRUE(pair_.world.RunUntil([&] { return !heard.empty(); }));
  others.back()->nic->datagrams().SetGsiHandler({});
}

TEST_F(DatagramPortTest, ASlotOutsideTheBlockIsNobodys) {
  DeviceProfile profile = RoceProfile();
  profile.port_count = 2;
  TestHost narrow(pair_.fabric_a, "narrow", profile);
  EXPECT_EQ(Say(narrow, PeerOf(narrow, at_a_, at_b_, 7), "?"), DatagramPort::Sent::kQueued);
  ASSERT_TRUE(pair_.world.RunUntil([&] { return CountersOf(narrow).lost == 1; }));
}

TEST_F(DatagramPortTest, ASilentHostIsGivenUpInTime) {
  WatchLinksOfA();
  pair_.world.Partition(pair_.fabric_a, pair_.fabric_b, true);
  const Instant before = pair_.world.Now();
  Say(a_, FromAToB(), "anybody?");
  ASSERT_TRUE(pair_.world.RunUntil([&] { return !events_.empty(); }));
  EXPECT_EQ(events_[0], DatagramPort::LinkEvent::kNoAnswer);
  EXPECT_EQ(pair_.world.Now() - before, a_.nic->profile().carrier_patience);
  pair_.world.Partition(pair_.fabric_a, pair_.fabric_b, false);
  pair_.world.RunFor(1s);
  Say(a_, FromAToB(), "now?");
  EXPECT_TRUE(HeardByB(1));
}

TEST_F(DatagramPortTest, AReaderThatStallsCostsItsOwnDatagramsAlone) {
  WatchLinksOfA();
  Say(a_, FromAToB(), "up");
  ASSERT_TRUE(HeardByB(1));
  TestHost c(pair_.world.AddHost("c", {*IpEndpoint::Parse("10.0.0.3", 0)}), "c", RoceProfile());
  std::vector<Heard> heard_by_c;
  Listen(c, &heard_by_c);
  pair_.world.Partition(pair_.fabric_a, pair_.fabric_b, true);
  const std::string large(4096, 'z');
  // The stream takes some, the link holds some, and then there is no room.
  size_t sent = 0;
  while (Say(a_, FromAToB(), large) == DatagramPort::Sent::kQueued) ASSERT_LT(++sent, 1000u);
  EXPECT_GE(sent, size_t{a_.nic->profile().link_queue});
  Say(a_, PeerOf(a_, at_a_, *IpEndpoint::Parse("10.0.0.3", 0)), "elsewhere");
  ASSERT_TRUE(pair_.world.RunUntil([&] { return !heard_by_c.empty(); }));
  ASSERT_TRUE(
      pair_.world.RunUntil([&] { return !events_.empty() && events_.back() == DatagramPort::LinkEvent::kLost; }));
  EXPECT_GE(CountersOf(a_).lost, uint64_t{a_.nic->profile().link_queue});
  pair_.world.Partition(pair_.fabric_a, pair_.fabric_b, false);
  c.nic->datagrams().SetGsiHandler({});
}

TEST_F(DatagramPortTest, AfterAResetTheNextDatagramOpensAnotherLink) {
  Say(a_, FromAToB(), "before");
  ASSERT_TRUE(HeardByB(1));
  for (size_t i = 0; i < 5; ++i) {
    pair_.ResetConnections();
    pair_.world.RunFor(200ms);
    Say(a_, FromAToB(), "after");
    ASSERT_TRUE(HeardByB(i + 2));
  }
  EXPECT_EQ(CountersOf(b_).incoming_links, 1u);
}

TEST_F(DatagramPortTest, ALinkOnlyOneEndHasForgottenIsReplaced) {
  Say(a_, FromAToB(), "before");
  ASSERT_TRUE(HeardByB(1));
  pair_.world.ForgetConnections(pair_.fabric_b);
  // What is written meanwhile is lost; the answer to it says that the stream is gone.
  Say(a_, FromAToB(), "lost");
  pair_.world.RunFor(200ms);
  Say(a_, FromAToB(), "after");
  ASSERT_TRUE(HeardByB(2));
  EXPECT_EQ(heard_by_b_[1].text, "after");
}

TEST_F(DatagramPortTest, WhoHearsOfALostLinkMaySendAtOnce) {
  std::vector<DatagramPort::Sent> again;
  a_.nic->datagrams().SetLinkHandler([&](const DatagramPeer& to, DatagramPort::LinkEvent event) {
    if (event != DatagramPort::LinkEvent::kUp && again.size() < 5) again.push_back(Say(a_, to, "again"));
  });
  Say(a_, FromAToB(), "first");
  ASSERT_TRUE(HeardByB(1));
  pair_.ResetConnections();
  ASSERT_TRUE(pair_.world.RunUntil([&] { return !again.empty(); }));
  EXPECT_EQ(again[0], DatagramPort::Sent::kQueued);
  EXPECT_TRUE(HeardByB(2));
  EXPECT_EQ(heard_by_b_[1].text, "again");
}

// --- QPs that wait for room ---

TEST_F(DatagramPortTest, ASendWaitsForTheLinkAndNothingOfItIsDropped) {
  QueuePair* const from = ReadyQp(a_);
  QueuePair* const to = ReadyQp(b_);
  const AddressHandle* const ah = HandleOf(a_, at_b_);
  const TestBuffer words = a_.Register(64);
  const TestBuffer box = b_.Register(4096);
  for (uint64_t i = 0; i < 64; ++i) {
    ASSERT_EQ(to->PostReceive({i, std::vector{box.All()}}), 0);
    ASSERT_EQ(Post(*from, ah, to->qp_number(), i, {words.All()}), 0);
  }
  EXPECT_FALSE(a_.Completed(1)) << "done before there is a link";
  ASSERT_TRUE(pair_.world.RunUntil([&] { return a_.Completed(64) && b_.Completed(64); }));
  for (uint64_t i = 0; i < 64; ++i) {
    EXPECT_EQ(a_.completions[i].wr_id, i);
    EXPECT_EQ(b_.completions[i].wr_id, i);
    EXPECT_EQ(b_.completions[i].status, CompletionStatus::kSuccess);
  }
}

TEST_F(DatagramPortTest, SendsToASilentHostSucceedInTheEnd) {
  QueuePair* const from = ReadyQp(a_);
  const AddressHandle* const ah = HandleOf(a_, at_b_);
  const TestBuffer words = a_.Register(64);
  pair_.world.Partition(pair_.fabric_a, pair_.fabric_b, true);
  for (uint64_t i = 0; i < 10; ++i) ASSERT_EQ(Post(*from, ah, 2, i, {words.All()}), 0);
  ASSERT_TRUE(pair_.world.RunUntil([&] { return a_.Completed(10); }));
  for (const WorkCompletion& done : a_.completions) EXPECT_EQ(done.status, CompletionStatus::kSuccess);
  EXPECT_EQ(from->state(), QpState::kRts);
  pair_.world.Partition(pair_.fabric_a, pair_.fabric_b, false);
}

TEST_F(DatagramPortTest, AQpThatWaitsForRoomMayBeResetAndDestroyed) {
  const AddressHandle* const ah = HandleOf(a_, at_b_);
  const TestBuffer words = a_.Register(64);
  pair_.world.Partition(pair_.fabric_a, pair_.fabric_b, true);
  QueuePair* const reset = ReadyQp(a_);
  QueuePair* const destroyed = ReadyQp(a_);
  QueuePair* const failed = ReadyQp(a_);
  for (QueuePair* qp : {reset, destroyed, failed}) ASSERT_EQ(Post(*qp, ah, 2, 1, {words.All()}), 0);
  QpAttributes attributes;
  attributes.state = QpState::kReset;
  ASSERT_EQ(reset->Modify(attributes, qp_attr::kState), 0);
  ASSERT_EQ(a_.nic->DestroyQp(destroyed->handle()), 0);
  attributes.state = QpState::kErr;
  ASSERT_EQ(failed->Modify(attributes, qp_attr::kState), 0);
  ASSERT_TRUE(a_.Completed(1));
  EXPECT_EQ(a_.completions[0].status, CompletionStatus::kFlushed);
  pair_.world.RunFor(5s);
  EXPECT_FALSE(a_.Completed(2));
  EXPECT_EQ(reset->state(), QpState::kReset);
  pair_.world.Partition(pair_.fabric_a, pair_.fabric_b, false);
}

class CrowdedPortTest : public DatagramPortTest {
 protected:
  CrowdedPortTest() : DatagramPortTest(Narrow()) {}
  static DeviceProfile Narrow() {
    DeviceProfile profile = RoceProfile();
    profile.max_links = 2;
    profile.link_queue = 4;
    profile.receive_budget_records = 4;
    return profile;
  }
};

TEST_F(CrowdedPortTest, QpsTakeTurnsWithFewLinks) {
  constexpr uint64_t kHosts = 5;
  std::vector<std::unique_ptr<TestHost>> others;
  std::vector<const AddressHandle*> ahs;
  std::vector<uint32_t> numbers;
  for (uint64_t i = 0; i < kHosts; ++i) {
    const IpEndpoint at = *IpEndpoint::Parse("10.0.1." + std::to_string(i + 1), 0);
    others.push_back(std::make_unique<TestHost>(pair_.world.AddHost("h" + std::to_string(i), {at}),
                                                "h" + std::to_string(i), RoceProfile()));
    QueuePair* const qp = ReadyQp(*others.back());
    const TestBuffer box = others.back()->Register(4096);
    for (uint64_t k = 0; k < 10; ++k) ASSERT_EQ(qp->PostReceive({k, std::vector{box.All()}}), 0);
    ahs.push_back(HandleOf(a_, at));
    numbers.push_back(qp->qp_number());
  }
  QueuePair* const from = ReadyQp(a_);
  const TestBuffer words = a_.Register(64);
  for (uint64_t i = 0; i < kHosts * 10; ++i) {
    ASSERT_EQ(Post(*from, ahs[i % kHosts], numbers[i % kHosts], i, {words.All()}), 0);
  }
  ASSERT_TRUE(pair_.world.RunUntil([&] { return a_.Completed(kHosts * 10); })) << a_.nic->Describe();
  for (const auto& other : others) {
    EXPECT_TRUE(pair_.world.RunUntil([&] { return other->Completed(10); }));
    EXPECT_LE(CountersOf(a_).outgoing_links, 2u);
  }
  EXPECT_EQ(CountersOf(a_).lost, 0u);
}

TEST_F(CrowdedPortTest, WhatHasComeInOneHeapIsDeliveredInTurnsAndToTheLast) {
  const std::unique_ptr<Llp> link = Link();
  for (int i = 0; i < 20; ++i) Say(*link, Record(FromStranger(8), 8));
  EXPECT_TRUE(pair_.world.RunUntil([&] { return heard_by_a_.size() == 20; }));
}

TEST_F(CrowdedPortTest, WithinAProcessAQpWaitsForRoomToo) {
  QueuePair* const qp = ReadyQp(a_);
  const AddressHandle* const ah = HandleOf(a_, at_a_);
  const TestBuffer words = a_.Register(64);
  const TestBuffer box = a_.Register(4096);
  for (uint64_t i = 0; i < 20; ++i) ASSERT_EQ(qp->PostReceive({100 + i, std::vector{box.All()}}), 0);
  for (uint64_t i = 0; i < 20; ++i) ASSERT_EQ(Post(*qp, ah, qp->qp_number(), i, {words.All()}), 0);
  ASSERT_TRUE(pair_.world.RunUntil([&] { return a_.Completed(40); }));
  EXPECT_EQ(CountersOf(a_).lost + CountersOf(a_).no_receive, 0u);
}

TEST_F(CrowdedPortTest, TheAddressWithMostLinksLosesTheQuietest) {
  const std::unique_ptr<Llp> fifth = Link(5);
  pair_.world.RunFor(1ms);
  const std::unique_ptr<Llp> sixth = Link(6);
  pair_.world.RunFor(1ms);
  Say(*fifth, Record(FromStranger(8), 8));
  ASSERT_TRUE(pair_.world.RunUntil([&] { return heard_by_a_.size() == 1; }));
  // The same host with a third one.
  const std::unique_ptr<Llp> seventh = Link(7);
  ASSERT_TRUE(pair_.world.RunUntil([&] { return Ended(*sixth); }));
  EXPECT_FALSE(Ended(*fifth));
  EXPECT_EQ(CountersOf(a_).links_evicted, 1u);
  // Another host, and again: with its second link it cannot drive out who has one, be it the quietest.
  TestHost c(pair_.world.AddHost("c", {*IpEndpoint::Parse("10.0.0.3", 0)}), "c", RoceProfile());
  TestHost second(c.nic->fabric(), "second", RoceProfile());
  for (TestHost* host : {&c, &second}) {
    pair_.world.RunFor(1ms);
    const size_t before = heard_by_a_.size();
    Say(*host, PeerOf(*host, *IpEndpoint::Parse("10.0.0.3", 0), at_a_), "hello");
    ASSERT_TRUE(pair_.world.RunUntil([&] { return heard_by_a_.size() == before + 1; }));
  }
  EXPECT_TRUE(Ended(*fifth));
  EXPECT_FALSE(Ended(*seventh));
  EXPECT_EQ(CountersOf(a_).links_evicted, 3u);
  EXPECT_EQ(CountersOf(a_).incoming_links, 2u);
}

// A stream of which the system knows whose its other end is.
class StreamOfUser final : public Stream {
 public:
  StreamOfUser(std::unique_ptr<Stream> inner, uint32_t user) : inner_(std::move(inner)), user_(user) {}

  IoResult Read(std::span<const MutableBytes> into) override { return inner_->Read(into); }
  IoResult Write(std::span<const ConstBytes> from) override { return inner_->Write(from); }
  void Arm(bool readable, bool writable) override { inner_->Arm(readable, writable); }
  void SetWatcher(ReadyWatcher* watcher) override { inner_->SetWatcher(watcher); }
  void Shutdown() override { inner_->Shutdown(); }
  void Abort() override { inner_->Abort(); }
  int PollDescriptor() const override { return inner_->PollDescriptor(); }
  IpEndpoint local() const override { return inner_->local(); }
  IpEndpoint remote() const override { return inner_->remote(); }
  std::optional<uint32_t> PeerUser() const override { return user_; }
  Delivery delivery() const override { return inner_->delivery(); }
  size_t MaxSegmentSize() const override { return inner_->MaxSegmentSize(); }

 private:
  const std::unique_ptr<Stream> inner_;
  const uint32_t user_;
};

TEST_F(CrowdedPortTest, OnThisHostTheUserWithMostLinksLosesTheQuietest) {
  std::unique_ptr<Stream> taken;
  const IpEndpoint door = at_a_.WithPort(4000);
  const auto listening =
      pair_.fabric_a.Listen(door, 64, [&](std::unique_ptr<Stream> stream) { taken = std::move(stream); });
  ASSERT_TRUE(listening.has_value());
  const auto link = [&](uint32_t slot, uint32_t user) {
    std::unique_ptr<Stream> stream;
    const auto attempt = pair_.fabric_b.Connect(
        at_b_, door, [&](Result<std::unique_ptr<Stream>, FabricError> connected) { stream = std::move(*connected); });
    EXPECT_TRUE(pair_.world.RunUntil([&] { return stream != nullptr && taken != nullptr; }));
    a_.nic->datagrams().TakeLink(Hello(slot), std::make_unique<StreamOfUser>(std::exchange(taken, nullptr), user),
                                 /*crc=*/false);
    pair_.world.RunFor(1ms);
    return stream;
  };
  const auto fifth = link(5, 1000);
  const auto sixth = link(6, 1000);
  const auto seventh = link(7, 1001);
  EXPECT_TRUE(Ended(*fifth));
  EXPECT_FALSE(Ended(*sixth));
  // With its second link a user does not drive out who has one, be it the quietest.
  const auto eighth = link(8, 1001);
  EXPECT_TRUE(Ended(*seventh));
  EXPECT_FALSE(Ended(*sixth));
  EXPECT_FALSE(Ended(*eighth));
  EXPECT_EQ(CountersOf(a_).links_evicted, 2u);
}

TEST_F(CrowdedPortTest, LinksRunOutUnderAHandlerThatSendsWhateverItHears) {
  size_t told = 0;
  a_.nic->datagrams().SetLinkHandler([&](const DatagramPeer& to, DatagramPort::LinkEvent event) {
    if (event != DatagramPort::LinkEvent::kUp && ++told < 200) Say(a_, to, "again");
  });
  for (int i = 0; i < 50; ++i) {
    for (uint8_t slot = 0; slot < 4; ++slot) Say(a_, FromAToB(slot), "hello");
    if (i % 3 == 0) pair_.ResetConnections();
    pair_.world.RunFor(i % 2 == 0 ? 100us : 50ms);
  }
  EXPECT_GT(told, 10u);
  a_.nic->datagrams().SetLinkHandler({});
  EXPECT_TRUE(pair_.world.RunUntilIdle());
  EXPECT_EQ(CountersOf(a_).outgoing_links, 0u);
}

// --- One link for each process ---

TEST_F(DatagramPortTest, TheNewerLinkOfAProcessTakesThePlaceOfItsElderAndNothingIsLost) {
  const Instant before = pair_.world.Now();
  const std::unique_ptr<Llp> elder = Link();
  for (int i = 0; i < 3; ++i) Say(*elder, Record(FromStranger(8), 8));
  const std::unique_ptr<Llp> newer = Link();
  Say(*newer, Record(FromStranger(12), 12));
  ASSERT_TRUE(pair_.world.RunUntil([&] { return heard_by_a_.size() == 4 && Ended(*elder); }));
  EXPECT_LT(pair_.world.Now() - before, a_.nic->profile().link_idle) << "it was only quiet";
  EXPECT_EQ(heard_by_a_[3].text.size(), 12u);
  EXPECT_FALSE(Ended(*newer));
  EXPECT_EQ(CountersOf(a_).incoming_links, 1u);
}

TEST_F(DatagramPortTest, EachProcessThatAHostCanHaveGetsALink) {
  std::vector<std::unique_ptr<Llp>> links;
  for (uint32_t slot = 0; slot < a_.nic->profile().port_count; ++slot) links.push_back(Link(slot));
  EXPECT_EQ(CountersOf(a_).incoming_links, uint64_t{a_.nic->profile().port_count});
  EXPECT_EQ(CountersOf(a_).links_evicted, 0u);
  for (const auto& link : links) link->Abort();
  EXPECT_TRUE(pair_.world.RunUntil([&] { return CountersOf(a_).incoming_links == 0; }));
}

TEST_F(DatagramPortTest, WhatIsRefusedDoesNotKeepALink) {
  const std::unique_ptr<Llp> link = Link();
  const Instant before = pair_.world.Now();
  const Duration idle = a_.nic->profile().link_idle;
  for (int i = 0; i < 7 && !Ended(*link); ++i) {
    Say(*link, std::vector<std::byte>(3));
    pair_.world.RunFor(idle / 3);
  }
  EXPECT_TRUE(Ended(*link));
  EXPECT_LE(pair_.world.Now() - before, idle * 2 + idle / 3);
}

// --- One QP, a good port and a bad one ---

class MixedPortsTest : public DatagramPortTest {
 protected:
  void SetUp() override {
    DatagramPortTest::SetUp();
    from_ = ReadyQp(a_);
    to_ = ReadyQp(good_);
    large_.emplace(a_.Register(size_t{128} << a_.nic->active_mtu()));
    box_.emplace(good_.Register(8192));
  }
  // For ten seconds, every 100 ms: `bad` datagrams to the bad port and behind them one to the good one. What the good
  // one's waited in all; each arrives.
  Duration WaitOfTheGood(uint64_t bad) {
    const AddressHandle* const to_bad = HandleOf(a_, at_b_);
    const AddressHandle* const to_good = HandleOf(a_, at_good_);
    Duration total{};
    uint64_t posted = 0;
    for (size_t round = 1; round <= 100; ++round) {
      EXPECT_EQ(to_->PostReceive({round, std::vector{box_->All()}}), 0);
      for (uint64_t i = 0; i < bad; ++i) EXPECT_EQ(Post(*from_, to_bad, 0x030002, ++posted, {large_->All()}), 0);
      EXPECT_EQ(Post(*from_, to_good, to_->qp_number(), ++posted, {large_->Sge(0, 8)}), 0);
      const Instant before = pair_.world.Now();
      EXPECT_TRUE(pair_.world.RunUntil([&] { return good_.Completed(round) && a_.Completed(posted); }));
      total += pair_.world.Now() - before;
      pair_.world.RunFor(100ms);
    }
    EXPECT_EQ(from_->state(), QpState::kRts);
    return total;
  }
  // b's port takes each link that it is asked for.
  void TakeLinks() {
    PlayPort([this](std::unique_ptr<Stream> taken) {
      const auto stream = std::make_shared<std::unique_ptr<Stream>>(std::move(taken));
      pair_.fabric_b.loop().At(pair_.world.Now() + 100us, [this, stream] {
        std::array<std::byte, wire::kCarrierHelloSize> hello;
        const MutableBytes into(hello);
        EXPECT_EQ((*stream)->Read({&into, 1}).bytes, hello.size()) << "is it slow?";
        Answer(**stream);
        taken_.push_back({Records(std::move(*stream)), std::nullopt});
      });
    });
  }
  // A link that was taken, and the record that is coming there.
  struct Taken {
    std::unique_ptr<Llp> llp;
    std::optional<RecordHead> record;

    // kReady: one more has come, of so many bytes, and is thrown away.
    RxResult TakeOne(size_t* length = nullptr) {
      if (!record) {
        RecordHead next;
        if (const RxResult result = llp->NextRecord(&next); result.status != RxStatus::kReady) return result;
        record = next;
      }
      const RxResult result = llp->Place(record->head.size(), {});
      if (result.status != RxStatus::kReady) return result;
      if (length != nullptr) *length = record->length;
      record.reset();
      return result;
    }
  };
  // Takes a record of each link, now and then.
  void Drip(Duration pause) {
    if (!drips_) return;
    for (Taken& link : taken_) link.TakeOne();
    pair_.fabric_b.loop().At(pair_.world.Now() + pause, [this, pause] { Drip(pause); });
  }
  Duration patience() const { return a_.nic->profile().carrier_patience; }

  const IpEndpoint at_good_ = *IpEndpoint::Parse("10.0.0.3", 0);
  TestHost good_{pair_.world.AddHost("good", {at_good_}), "good", RoceProfile()};
  QueuePair* from_ = nullptr;
  QueuePair* to_ = nullptr;
  std::optional<TestBuffer> large_;
  std::optional<TestBuffer> box_;
  std::vector<Taken> taken_;
  bool drips_ = true;
};

TEST_F(MixedPortsTest, ASilentHostIsWaitedForOnce) {
  pair_.world.Partition(pair_.fabric_a, pair_.fabric_b, true);
  const Duration waited = WaitOfTheGood(1);
  EXPECT_GE(waited, patience());
  EXPECT_LE(waited, patience() + 100ms);
  pair_.world.Partition(pair_.fabric_a, pair_.fabric_b, false);
}

TEST_F(MixedPortsTest, AReaderThatTakesLinksAndNothingElseIsWaitedForOnce) {
  TakeLinks();
  const Duration waited = WaitOfTheGood(40);
  EXPECT_GE(waited, patience());
  EXPECT_LE(waited, patience() * 2);
  EXPECT_GT(taken_.size(), 2u) << "called again";
  EXPECT_LE(taken_.size(), 15u) << "each link takes a second to stall";
}

TEST_F(MixedPortsTest, AReaderThatTakesOneNowAndThenIsNotWaitedForLong) {
  TakeLinks();
  Drip(patience() * 9 / 10);
  const Duration waited = WaitOfTheGood(40);
  drips_ = false;
  EXPECT_GE(waited, patience() * 9 / 10);
  EXPECT_LE(waited, patience() * 2);
}

TEST_F(MixedPortsTest, APortThatRefusesSlowlyUsesUpItsCredit) {
  std::vector<std::unique_ptr<Stream>> refused;
  PlayPort([&](std::unique_ptr<Stream> stream) {
    refused.push_back(std::move(stream));
    pair_.fabric_b.loop().At(pair_.world.Now() + patience() * 4 / 10,
                             [&refused, index = refused.size() - 1] { refused[index]->Abort(); });
  });
  const Duration waited = WaitOfTheGood(1);
  EXPECT_GE(waited, patience() * 8 / 10);
  EXPECT_LE(waited, patience() + 100ms);
}

TEST_F(MixedPortsTest, AfterAWhileAPortIsWaitedForAgain) {
  pair_.world.Partition(pair_.fabric_a, pair_.fabric_b, true);
  EXPECT_GE(WaitOfTheGood(1), patience());
  pair_.world.Partition(pair_.fabric_a, pair_.fabric_b, false);
  pair_.world.RunFor(a_.nic->profile().link_idle);
  QueuePair* const at_b = ReadyQp(b_);
  const TestBuffer box = b_.Register(8192);
  ASSERT_EQ(at_b->PostReceive({1, std::vector{box.All()}}), 0);
  ASSERT_EQ(Post(*from_, HandleOf(a_, at_b_), at_b->qp_number(), 9999, {large_->All()}), 0);
  EXPECT_TRUE(pair_.world.RunUntil([&] { return b_.Completed(1); })) << "the first one already";
}

TEST_F(MixedPortsTest, ASendIsDoneWhenTheLinkHasItsDatagram) {
  TakeLinks();
  const AddressHandle* const ah = HandleOf(a_, at_b_);
  uint64_t posted = 0;
  do {
    while (posted - a_.completions.size() < 60) ASSERT_EQ(Post(*from_, ah, 0x030002, ++posted, {large_->All()}), 0);
    pair_.world.RunFor(1ms);
  } while (a_.Completed(posted - 59));
  // The one in between has been begun.
  EXPECT_GT(CountersOf(a_).sent, 10u);
  EXPECT_LE(a_.completions.size(), CountersOf(a_).sent + 1);
  EXPECT_EQ(CountersOf(a_).lost, 0u);
}

TEST_F(MixedPortsTest, WhatTheLinkHasArrivesThoughThePortThatSentItIsGone) {
  TakeLinks();
  auto brief = std::make_unique<TestHost>(pair_.fabric_a, "brief", RoceProfile());
  const std::string large(1000, 'z');
  while (Say(*brief, PeerOf(*brief, at_a_, at_b_, 3), large) == DatagramPort::Sent::kQueued) pair_.world.RunFor(100us);
  const uint64_t sent = CountersOf(*brief).sent;
  ASSERT_GT(sent, 10u);
  pair_.world.RunFor(1ms);
  brief.reset();
  size_t bytes = 0;
  size_t length = 0;
  RxResult end;
  ASSERT_EQ(taken_.size(), 1u);
  ASSERT_TRUE(pair_.world.RunUntil([&] {
    while ((end = taken_[0].TakeOne(&length)).status == RxStatus::kReady) bytes += length;
    return end.status != RxStatus::kWouldBlock;
  }));
  EXPECT_EQ(end.error, 0) << "what was under way is lost";
  EXPECT_GE(bytes, sent * large.size());
}

TEST_F(DatagramPortTest, TheNextSendToAProcessThatWasRestartedWaitsForIt) {
  QueuePair* const from = ReadyQp(a_);
  const AddressHandle* const ah = HandleOf(a_, at_b_);
  const TestBuffer words = a_.Register(64);
  for (uint64_t life = 0; life < 4; ++life) {
    pair_.world.RunFor(2ms);
    TestHost second(pair_.fabric_b, "second", RoceProfile());
    QueuePair* const to = ReadyQp(second);
    const TestBuffer box = second.Register(4096);
    ASSERT_EQ(to->PostReceive({life, std::vector{box.All()}}), 0);
    ASSERT_EQ(Post(*from, ah, to->qp_number(), life, {words.All()}), 0);
    ASSERT_TRUE(pair_.world.RunUntil([&] { return second.Completed(1); })) << life;
  }
  EXPECT_EQ(CountersOf(a_).lost, 0u);
}

// --- What is posted ---

TEST_F(DatagramPortTest, AHandleOfAnotherDeviceLeadsNowhere) {
  QueuePair* const from = ReadyQp(a_);
  const TestBuffer words = a_.Register(64);
  ASSERT_EQ(a_.pd, b_.pd) << "their numbers do not tell them apart";
  ASSERT_EQ(Post(*from, HandleOf(b_, at_a_), 2, 1, {words.All()}), 0);
  ASSERT_TRUE(a_.Completed(1));
  EXPECT_EQ(a_.completions[0].status, CompletionStatus::kLocalQpOperationError);
  EXPECT_EQ(from->state(), QpState::kSqe);
  EXPECT_EQ(CountersOf(a_).sent, 0u);
}

// A page that the program has taken away while it is registered.
class TakenPage {
 public:
  explicit TakenPage(TestHost& host) : size_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    page_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(page_, MAP_FAILED);
    RegionRequest request;
    request.pd = host.pd;
    request.address = static_cast<std::byte*>(page_);
    request.length = size_;
    request.iova = reinterpret_cast<uintptr_t>(page_);
    request.access = kAccessLocalWrite;
    const auto region = host.nic->RegisterRegion(*host.context, request);
    EXPECT_TRUE(region.has_value());
    sge_ = {request.iova, static_cast<uint32_t>(size_), region->stag};
    EXPECT_EQ(mprotect(page_, size_, PROT_NONE), 0);
  }
  ~TakenPage() { munmap(page_, size_); }
  TakenPage(const TakenPage&) = delete;
  TakenPage& operator=(const TakenPage&) = delete;
  ScatterGather Sge(uint32_t length) const { return {sge_.address, length, sge_.lkey}; }

 private:
  const size_t size_;
  void* page_ = nullptr;
  ScatterGather sge_;
};

TEST_F(DatagramPortTest, MemoryThatIsNotThereAnyMoreFailsTheWorkAndNotTheProgram) {
  QueuePair* const from = ReadyQp(a_);
  QueuePair* const to = ReadyQp(b_);
  const AddressHandle* const ah = HandleOf(a_, at_b_);
  const TestBuffer words = a_.Register(64);
  const TakenPage source(a_);
  const TakenPage sink(b_);
  ASSERT_EQ(to->PostReceive({1, std::vector{sink.Sge(1024)}}), 0);
  ASSERT_EQ(Post(*from, ah, to->qp_number(), 2, {words.All()}), 0);
  ASSERT_EQ(Post(*from, ah, to->qp_number(), 3, {words.Sge(0, 8), source.Sge(8)}), 0);
  ASSERT_TRUE(pair_.world.RunUntil([&] { return a_.Completed(2) && b_.Completed(1); }));
  EXPECT_EQ(a_.completions[0].status, CompletionStatus::kSuccess);
  EXPECT_EQ(a_.completions[1].status, CompletionStatus::kLocalProtectionError);
  EXPECT_EQ(from->state(), QpState::kSqe);
  EXPECT_EQ(b_.completions[0].status, CompletionStatus::kLocalProtectionError);
  EXPECT_EQ(to->state(), QpState::kErr);
}

TEST_F(DatagramPortTest, PartsOfNoLengthNameNothing) {
  QueuePair* const from = ReadyQp(a_);
  QueuePair* const to = ReadyQp(b_);
  const AddressHandle* const ah = HandleOf(a_, at_b_);
  const TestBuffer words = a_.Register(64, kAccessLocalWrite, 9);
  const TestBuffer box = b_.Register(4096, kAccessLocalWrite);
  constexpr ScatterGather kNothing{0x1234, 0, 0xdead};
  ASSERT_EQ(to->PostReceive({1, std::vector{kNothing, box.Sge(0, 40), kNothing, box.Sge(40, 100)}}), 0);
  ASSERT_EQ(Post(*from, ah, to->qp_number(), 2, {kNothing, words.Sge(0, 8), kNothing}), 0);
  ASSERT_TRUE(pair_.world.RunUntil([&] { return a_.Completed(1) && b_.Completed(1); }));
  EXPECT_EQ(a_.completions[0].status, CompletionStatus::kSuccess);
  EXPECT_EQ(b_.completions[0].status, CompletionStatus::kSuccess);
  EXPECT_EQ(box.bytes[kGrhSize + 7], std::byte{9});
}

// --- Strangers ---

TEST_F(DatagramPortTest, OnlyWhoIsWhereItSaysGetsALink) {
  const auto status_with = [&](auto change) {
    wire::CarrierHello hello = Hello();
    change(hello);
    const std::unique_ptr<Stream> stream = Visit();
    return StatusFor(*stream, hello);
  };
  EXPECT_EQ(status_with([](wire::CarrierHello& hello) { hello.source[15] += 1; }), wire::CarrierStatus::kMismatch);
  EXPECT_EQ(status_with([](wire::CarrierHello& hello) { hello.destination[15] += 1; }), wire::CarrierStatus::kMismatch);
  EXPECT_EQ(status_with([](wire::CarrierHello& hello) { hello.destination_qp = 0x010000; }),
            wire::CarrierStatus::kMismatch);
  EXPECT_EQ(status_with([](wire::CarrierHello&) {}), wire::CarrierStatus::kAccepted);
}

// A process names its links by a word that no other process knows.
TEST_F(DatagramPortTest, AStrangerWithThePlaceOfAProcessEndsNoneOfItsLinks) {
  const auto link_named = [&](uint8_t name) {
    wire::CarrierHello hello = Hello();
    hello.nonce[15] = std::byte{name};
    return Link(hello);
  };
  const std::unique_ptr<Llp> first = link_named(1);
  const std::unique_ptr<Llp> strangers = link_named(2);
  pair_.world.RunFor(1s);
  EXPECT_FALSE(Ended(*first));
  Say(*first, Record(FromStranger(8), 8));
  Say(*strangers, Record(FromStranger(8), 8));
  ASSERT_TRUE(pair_.world.RunUntil([&] { return heard_by_a_.size() == 2; }));
  // The same process again: the newer in place of the elder.
  const std::unique_ptr<Llp> second = link_named(1);
  EXPECT_TRUE(pair_.world.RunUntil([&] { return Ended(*first); }));
  EXPECT_FALSE(Ended(*strangers));
}

TEST_F(DatagramPortTest, AStrangerThatSaysNothingMoreIsLeftInTheEnd) {
  const std::unique_ptr<Llp> silent = Link(6);
  const std::unique_ptr<Stream> half = StreamOfLink(Hello());
  Write(*half, HalfARecord());
  const Instant before = pair_.world.Now();
  EXPECT_TRUE(pair_.world.RunUntil([&] { return Ended(*silent) && Ended(*half); }));
  EXPECT_LE(pair_.world.Now() - before, a_.nic->profile().link_idle * 2 + 1s);
  EXPECT_EQ(CountersOf(a_).incoming_links, 0u);
  EXPECT_TRUE(heard_by_a_.empty());
}

TEST_F(DatagramPortTest, AStreamThatEndsWithinARecordBringsNothing) {
  const std::unique_ptr<Stream> half = StreamOfLink(Hello());
  Write(*half, HalfARecord());
  half->Shutdown();
  ASSERT_TRUE(pair_.world.RunUntil([&] { return CountersOf(a_).incoming_links == 0; }));
  EXPECT_TRUE(heard_by_a_.empty());
}

TEST_F(DatagramPortTest, WhatIsNoDatagramIsDroppedAndTheNextOneIsHeard) {
  const std::unique_ptr<Llp> link = Link();
  Say(*link, std::vector<std::byte>(3));
  Say(*link, std::vector<std::byte>(60000, std::byte{0xff}));
  wire::IbHeader forged = FromStranger(8);
  forged.source_qp = 0x060001;  // another process's
  Say(*link, Record(forged, 8));
  Say(*link, Record(FromStranger(5000), 5000));  // longer than the MTU
  wire::IbHeader reliable = FromStranger(8);
  reliable.service = wire::IbService::kRc;
  Say(*link, Record(reliable, 8));
  wire::IbHeader nobody = FromStranger(8);
  nobody.destination_qp = 0x777;
  Say(*link, Record(nobody, 8));
  Say(*link, Record(FromStranger(8), 8));
  ASSERT_TRUE(pair_.world.RunUntil([&] { return !heard_by_a_.empty(); }));
  EXPECT_EQ(heard_by_a_.size(), 1u);
  EXPECT_EQ(heard_by_a_[0].text, "xxxxxxxx");
  EXPECT_EQ(heard_by_a_[0].from.slot, 5);
  EXPECT_EQ(CountersOf(a_).malformed, 5u);
  EXPECT_EQ(CountersOf(a_).no_qp, 1u);
}

TEST_F(DatagramPortTest, RandomBytesBehindTheHelloHarmNobody) {
  QueuePair* const qp = ReadyQp(a_);
  const TestBuffer box = a_.Register(256);
  ASSERT_EQ(qp->PostReceive({1, std::vector{box.All()}}), 0);
  Prng luck(23);
  for (int i = 0; i < 30; ++i) {
    const std::unique_ptr<Stream> link = StreamOfLink(Hello());
    std::vector<std::byte> bytes(1 + luck.Below(3000));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(luck.Below(256));
    Write(*link, bytes);
    pair_.world.RunFor(1ms);
    link->Abort();
    ASSERT_TRUE(pair_.world.RunUntil([&] { return CountersOf(a_).incoming_links == 0; }));
  }
  EXPECT_EQ(qp->state(), QpState::kRts);
  EXPECT_FALSE(a_.Completed(1));
}

TEST_F(DatagramPortTest, APeerThatTalksOnALinkOfOursLosesIt) {
  // b's port is played by the test: it agrees to a link and then says something, which no receiver does.
  WatchLinksOfA();
  std::unique_ptr<Stream> taken;
  PlayPort([&](std::unique_ptr<Stream> stream) { taken = std::move(stream); });
  Say(a_, FromAToB(3), "hello");
  ASSERT_TRUE(pair_.world.RunUntil([&] { return taken != nullptr; }));
  Answer(*taken);
  ASSERT_TRUE(pair_.world.RunUntil([&] { return !events_.empty(); }));
  EXPECT_EQ(events_[0], DatagramPort::LinkEvent::kUp);
  const std::byte word{'!'};
  const std::unique_ptr<Llp> link = Records(std::move(taken));
  Say(*link, {&word, 1});
  ASSERT_TRUE(pair_.world.RunUntil([&] { return events_.size() == 2; }));
  EXPECT_EQ(events_[1], DatagramPort::LinkEvent::kLost);
}

TEST_F(DatagramPortTest, APortThatTakesLinksAndDropsThemIsCalledOnceForADatagramAtMost) {
  WatchLinksOfA();
  std::vector<std::unique_ptr<Stream>> taken;
  PlayPort([&](std::unique_ptr<Stream> stream) {
    Answer(*stream);
    stream->Shutdown();
    taken.push_back(std::move(stream));
  });
  QueuePair* const from = ReadyQp(a_);
  const AddressHandle* const ah = HandleOf(a_, at_b_);
  const TestBuffer words = a_.Register(64);
  for (uint64_t i = 0; i < 20; ++i) ASSERT_EQ(Post(*from, ah, 0x030002, i, {words.All()}), 0);
  ASSERT_TRUE(pair_.world.RunUntil([&] { return a_.Completed(20); }));
  EXPECT_LE(taken.size(), 20u);
}

TEST_F(DatagramPortTest, AnAnswerThatIsNoneIsARefusal) {
  WatchLinksOfA();
  std::unique_ptr<Stream> taken;
  PlayPort([&](std::unique_ptr<Stream> stream) { taken = std::move(stream); });
  Say(a_, FromAToB(3), "hello");
  ASSERT_TRUE(pair_.world.RunUntil([&] { return taken != nullptr; }));
  std::array<std::byte, wire::kCarrierAnswerSize> nonsense{};
  Write(*taken, nonsense);
  ASSERT_TRUE(pair_.world.RunUntil([&] { return !events_.empty(); }));
  EXPECT_EQ(events_[0], DatagramPort::LinkEvent::kRefused);
  // As is no answer at all.
  pair_.world.RunFor(1s);
  taken = nullptr;
  Say(a_, FromAToB(3), "hello");
  ASSERT_TRUE(pair_.world.RunUntil([&] { return events_.size() == 2; }));
  EXPECT_EQ(events_[1], DatagramPort::LinkEvent::kNoAnswer);
}

TEST_F(DatagramPortTest, WhatEndsBeforeItsAnswerIsNoRefusal) {
  WatchLinksOfA();
  std::unique_ptr<Stream> taken;
  PlayPort([&](std::unique_ptr<Stream> stream) { taken = std::move(stream); });
  const auto next = [&] {
    events_.clear();
    Say(a_, FromAToB(3), "hello");
    EXPECT_TRUE(pair_.world.RunUntil([&] { return taken != nullptr; }));
  };
  const auto event = [&] {
    EXPECT_TRUE(pair_.world.RunUntil([&] { return !events_.empty(); }));
    pair_.world.RunFor(1s);
    taken = nullptr;
    return events_.empty() ? DatagramPort::LinkEvent::kUp : events_[0];
  };
  next();
  taken->Abort();
  EXPECT_EQ(event(), DatagramPort::LinkEvent::kNoAnswer);
  next();
  taken->Shutdown();
  EXPECT_EQ(event(), DatagramPort::LinkEvent::kNoAnswer);
  // Nor is one that has no room now.
  for (const auto& [status, expected] :
       {std::pair(wire::CarrierStatus::kBusy, DatagramPort::LinkEvent::kNoAnswer),
        std::pair(wire::CarrierStatus::kMismatch, DatagramPort::LinkEvent::kRefused)}) {
    next();
    Answer(*taken, status);
    EXPECT_EQ(event(), expected);
  }
}

// --- Profiles ---

TEST(MinimalDatagrams, FitIntoWhatASmallDeviceHas) {
  SimPair pair;
  constexpr QpCapabilities kSmall = {4, 4, 1, 1, 0};
  TestHost a(pair.fabric_a, "a", MinimalProfile(), nullptr, 8, kSmall);
  TestHost b(pair.fabric_b, "b", MinimalProfile(), nullptr, 8, kSmall);
  QueuePair* const from = ReadyQp(a, kSmall);
  QueuePair* const to = ReadyQp(b, kSmall);
  AddressVector vector;
  vector.is_global = true;
  vector.gid = GidOf(*IpEndpoint::Parse("10.0.0.2", 0));
  for (uint32_t i = 1; i < a.nic->profile().max_ah; ++i) {
    ASSERT_TRUE(a.nic->CreateAh(*a.context, a.pd, vector).has_value());
  }
  const auto ah = a.nic->CreateAh(*a.context, a.pd, vector);
  ASSERT_TRUE(ah.has_value());
  EXPECT_EQ(a.nic->CreateAh(*a.context, a.pd, vector).error(), ENOMEM);
  const TestBuffer words = a.Register(257, kAccessLocalWrite, 5);
  const TestBuffer box = b.Register(kGrhSize + 256, kAccessLocalWrite);
  for (uint64_t i = 0; i < 4; ++i) {
    ASSERT_EQ(to->PostReceive({i, std::vector{box.All()}}), 0);
    ASSERT_EQ(Post(*from, *ah, to->qp_number(), i, {words.Sge(0, 256)}), 0);
  }
  ASSERT_TRUE(pair.world.RunUntil([&] { return a.Completed(4) && b.Completed(4); }));
  EXPECT_EQ(box.bytes[kGrhSize + 255], std::byte{5});
  ASSERT_EQ(Post(*from, *ah, to->qp_number(), 9, {words.All()}), 0);
  ASSERT_TRUE(a.Completed(5));
  EXPECT_EQ(a.completions[4].status, CompletionStatus::kLocalLengthError);
  EXPECT_EQ(from->state(), QpState::kSqe);
}

// Of the port's locks none is held that counters take, whether a datagram leaves the process or not.
TEST(DatagramRules, WhoHearsOfOneMayLookAtThePort) {
  AskingSink sink;
  SimPair pair;
  TestHost a(pair.fabric_a, "a", RoceProfile(), &sink, 1024, {64, 64, 4, 4, 128},
             InjectionPlan::Make(*ParseInjectionRules("drop kind=datagram times=2; duplicate kind=datagram times=2")));
  TestHost b(pair.fabric_b, "b", RoceProfile());
  b.nic->datagrams().SetGsiHandler([](const DatagramPeer&, const wire::IbHeader&, ConstBytes) {});
  DatagramPort& port = a.nic->datagrams();
  sink.Ask([&] {
    port.counters();
    port.HasUnsent();
  });
  wire::IbHeader header;
  header.destination_qp = header.source_qp = kGsiQp;
  header.qkey = kGsiQkey;
  const IpEndpoint own = *IpEndpoint::Parse("10.0.0.1", 0);
  const DatagramPeer itself = port.PeerAt({own, own}, static_cast<uint8_t>(*a.nic->roce().Slot()));
  const DatagramPeer other = port.PeerAt({own, *IpEndpoint::Parse("10.0.0.2", 0)});
  for (const DatagramPeer& to : {itself, other, itself, other}) {
    port.Send(to, header, AsBytes(std::string_view("word")));
    pair.world.RunFor(1ms);
  }
  sink.Ask({});
  b.nic->datagrams().SetGsiHandler({});
  EXPECT_EQ(sink.told(), 4);
  EXPECT_EQ(sink.kept_waiting(), 0);
}

TEST_F(DatagramPortTest, AHostileDeviceLosesAndRepeatsDatagramsAndSameSeedMeansSameTrace) {
  const auto run = [] {
    TraceHash hash;
    SimPair pair({.jitter = 5us, .chop = true}, 9, &hash);
    TestHost a(pair.fabric_a, "a", HostileProfile(), &hash);
    TestHost b(pair.fabric_b, "b", HostileProfile(), &hash);
    size_t heard = 0;
    b.nic->datagrams().SetGsiHandler([&](const DatagramPeer&, const wire::IbHeader&, ConstBytes) { ++heard; });
    const DatagramPeer peer =
        a.nic->datagrams().PeerAt({*IpEndpoint::Parse("10.0.0.1", 0), *IpEndpoint::Parse("10.0.0.2", 0)});
    for (int i = 0; i < 2000; ++i) {
      while (a.nic->datagrams().Send(peer, Gsi(), AsBytes("x")) == DatagramPort::Sent::kFull) pair.world.RunFor(100us);
    }
    pair.world.RunFor(1s);
    const uint64_t lost = a.nic->datagrams().counters().lost;
    EXPECT_GT(lost, 10u);
    EXPECT_LT(lost, 100u);
    EXPECT_GT(heard, 2000 - lost) << "none was repeated";
    b.nic->datagrams().SetGsiHandler({});
    return hash.value();
  };
  EXPECT_EQ(run(), run());
}

}  // namespace
}  // namespace stagecoach::emu
