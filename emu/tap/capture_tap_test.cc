#include "emu/tap/capture_tap.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <new>
#include <set>
#include <string>
#include <vector>

#include "base/cursor.h"
#include "emu/fabric/fabric_over.h"
#include "emu/sim/sim_world.h"
#include "emu/tap/capture_fabric.h"
#include "emu/tap/injection_tap.h"
#include "emu/wire/mpa.h"
#include "tests/support/fake_memory.h"

namespace stagecoach::emu {
namespace {

using testing::ElementsAre;
using StreamResult = Result<std::unique_ptr<Stream>, FabricError>;

// Writes down what it is told.
class ListingSink final : public CaptureSink {
 public:
  class Flow final : public CaptureFlow {
   public:
    Flow(std::vector<std::string>* list, std::string name) : list_(list), name_(std::move(name)) {}
    void Handshake(CaptureDirection direction, ConstBytes bytes) override {
      Add(direction, "frame " + std::string(AsText(bytes.first(std::min<size_t>(bytes.size(), 16)))) + " +" +
                         std::to_string(bytes.size() - std::min<size_t>(bytes.size(), 16)));
    }
    void Record(CaptureDirection direction, std::span<const ConstBytes> ulpdu) override {
      std::string text;
      for (const ConstBytes part : ulpdu) text += AsText(part);
      if (text.size() > 40) text = std::to_string(text.size()) + " bytes, last " + text.back();
      Add(direction, "record " + text);
    }
    void Close(CaptureDirection direction, CaptureEnd how) override {
      Add(direction, how == CaptureEnd::kFin ? "fin" : "reset");
    }

   private:
    void Add(CaptureDirection direction, const std::string& what) {
      list_->push_back(name_ + (direction == CaptureDirection::kSent ? " > " : " < ") + what);
    }
    std::vector<std::string>* const list_;
    const std::string name_;
  };

  std::shared_ptr<CaptureFlow> OpenFlow(CaptureStyle style, const IpEndpoint& local, const IpEndpoint& remote,
                                        bool initiator) override {
    const std::string name =
        std::string(style == CaptureStyle::kRoce ? "roce " : "") + (initiator ? "client" : "server");
    events.push_back(name + " open");
    return std::make_shared<Flow>(&events, name);
  }

  std::vector<std::string> events;
};

std::string Frame(wire::MpaFrameKind kind, std::string_view private_data) {
  wire::MpaFrame frame;
  frame.kind = kind;
  frame.revision = wire::kMpaRevision1;
  frame.private_data = AsBytes(private_data);
  std::string text(frame.EncodedSize(), '\0');
  ByteWriter out(AsMutableBytes(text.data(), text.size()));
  frame.Encode(out);
  return text;
}

// Two hosts, a sink at each, and a connection between them.
class CaptureTest : public testing::Test {
 protected:
  explicit CaptureTest(CaptureStyle style = CaptureStyle::kIwarp) : world_(Options()) {
    client_host_ = &world_.AddHost("client", {*IpEndpoint::Parse("10.0.0.1", 0)});
    server_host_ = &world_.AddHost("server", {*IpEndpoint::Parse("10.0.0.2", 0)});
    client_fabric_ = std::make_unique<CaptureFabric>(client_host_, client_sink_, style);
    server_fabric_ = std::make_unique<CaptureFabric>(server_host_, server_sink_, style);
    const IpEndpoint address = *IpEndpoint::Parse("10.0.0.2", 20049);
    listener_ =
        std::move(*server_fabric_->Listen(address, 8, [this](std::unique_ptr<Stream> s) { server_ = std::move(s); }));
    attempt_ = client_fabric_->Connect({}, address, [this](StreamResult result) { client_ = std::move(*result); });
    EXPECT_TRUE(world_.RunUntil([this] { return client_ != nullptr && server_ != nullptr; }));
  }

  static SimWorld::Options Options() {
    SimWorld::Options options;
    options.link.chop = true;
    return options;
  }

  void WriteAll(Stream& stream, std::string_view text) {
    while (!text.empty()) {
      const ConstBytes part = AsBytes(text);
      const IoResult result = stream.Write({&part, 1});
      ASSERT_EQ(result.status, IoStatus::kOk);
      text.remove_prefix(result.bytes);
    }
    world_.RunUntilIdle();
  }
  std::string ReadExactly(Stream& stream, size_t size) {
    std::string text;
    while (text.size() < size) {
      std::string buffer(size - text.size(), '\0');
      const MutableBytes part = AsMutableBytes(buffer.data(), buffer.size());
      const IoResult result = stream.Read({&part, 1});
      if (result.status != IoStatus::kOk) break;
      text.append(buffer, 0, result.bytes);
    }
    return text;
  }
  void ShakeHands() {
    const std::string request = Frame(wire::MpaFrameKind::kRequest, "hi");
    const std::string reply = Frame(wire::MpaFrameKind::kReply, "hello");
    WriteAll(*client_, request);
    EXPECT_EQ(ReadExactly(*server_, request.size()), request);
    WriteAll(*server_, reply);
    EXPECT_EQ(ReadExactly(*client_, reply.size()), reply);
    client_sink_->events.clear();
    server_sink_->events.clear();
  }
  // A chopped read looks like a drained stream; asking again is what an owner does when it is told of more.
  static RxResult Next(Llp& llp, RecordHead* record) {
    RxResult result;
    for (int i = 0; i < 1000 && (result = llp.NextRecord(record)).status == RxStatus::kWouldBlock; ++i) {
    }
    return result;
  }
  std::unique_ptr<Llp> Tapped(CaptureFabric& fabric, std::unique_ptr<Stream> stream) {
    return fabric.RecordsOver(std::move(stream), {});
  }

  SimWorld world_;
  SimFabric* client_host_;
  SimFabric* server_host_;
  const std::shared_ptr<ListingSink> client_sink_ = std::make_shared<ListingSink>();
  const std::shared_ptr<ListingSink> server_sink_ = std::make_shared<ListingSink>();
  std::unique_ptr<CaptureFabric> client_fabric_;
  std::unique_ptr<CaptureFabric> server_fabric_;
  std::unique_ptr<Listener> listener_;
  std::unique_ptr<ConnectAttempt> attempt_;
  std::unique_ptr<Stream> client_;
  std::unique_ptr<Stream> server_;
};

TEST_F(CaptureTest, HandshakeFramesAreShownWholeHoweverTheyWerePieced) {
  const std::string request = Frame(wire::MpaFrameKind::kRequest, "private data of the client");
  const std::string reply = Frame(wire::MpaFrameKind::kReply, "");
  WriteAll(*client_, request);
  EXPECT_EQ(ReadExactly(*server_, request.size()), request);
  WriteAll(*server_, reply + "and the first bytes of an FPDU");
  EXPECT_EQ(ReadExactly(*client_, reply.size() + 5), reply + "and t");
  EXPECT_THAT(client_sink_->events,
              ElementsAre("client open", "client > frame MPA ID Req Frame +30", "client < frame MPA ID Rep Frame +4"));
  EXPECT_THAT(server_sink_->events,
              ElementsAre("server open", "server < frame MPA ID Req Frame +30", "server > frame MPA ID Rep Frame +4"));
}

TEST_F(CaptureTest, WhatAStrangerSaysInsteadIsShownAsFarAsItWent) {
  WriteAll(*client_, "GET / HTTP/1.1");
  EXPECT_EQ(ReadExactly(*server_, 14), "GET / HTTP/1.1");
  server_->Abort();
  ASSERT_GE(server_sink_->events.size(), 3u);
  EXPECT_THAT(server_sink_->events[1], testing::StartsWith("server < frame G"));
  EXPECT_EQ(server_sink_->events.back(), "server > reset");
}

TEST_F(CaptureTest, AHandshakeCutShortIsShownAsFarAsItWent) {
  WriteAll(*client_, std::string(wire::MpaKey(wire::MpaFrameKind::kRequest)));
  client_->Shutdown();
  world_.RunUntilIdle();
  EXPECT_EQ(ReadExactly(*server_, 100).size(), 16u);
  EXPECT_THAT(server_sink_->events, ElementsAre("server open", "server < frame MPA ID Req Frame +0", "server < fin"));
  EXPECT_THAT(client_sink_->events, ElementsAre("client open", "client > frame MPA ID Req Frame +0", "client > fin"));
}

TEST_F(CaptureTest, RecordsAreShownOnBothEndsAsTheyWereSentAndPlaced) {
  ShakeHands();
  FakeMemory memory;
  const auto sender = Tapped(*client_fabric_, std::move(client_));
  const auto receiver = Tapped(*server_fabric_, std::move(server_));
  const uint32_t source = memory.Add(1000, FakeMemory::kAll, 's');
  const std::string head = "the head of the record";
  const std::string inline_bytes = "inline, ";
  const TxPart parts[] = {
      {.bytes = AsBytes(inline_bytes)},
      {.by_key = true, .key = source, .address = FakeMemory::Address(source), .length = 500},
  };
  sender->QueueRecord(AsBytes(head), parts, 1);
  sender->QueueRecord(AsBytes(head), {}, 2);
  EXPECT_TRUE(client_sink_->events.empty()) << "nothing has left";
  while (sender->Flush(memory).status == TxStatus::kWouldBlock) world_.RunUntilIdle();
  world_.RunUntilIdle();
  EXPECT_THAT(client_sink_->events,
              ElementsAre("client > record 530 bytes, last s", "client > record the head of the record"));
  EXPECT_EQ(memory.pins(), 0);

  RecordHead record;
  ASSERT_EQ(Next(*receiver, &record).status, RxStatus::kReady);
  EXPECT_EQ(record.length, 530u);
  std::string destination(508, '\0');
  const MutableBytes halves[] = {AsMutableBytes(destination.data(), 100),
                                 AsMutableBytes(destination.data() + 100, 408)};
  RxResult placed;
  while ((placed = receiver->Place(head.size(), halves)).status == RxStatus::kWouldBlock) world_.RunUntilIdle();
  ASSERT_EQ(placed.status, RxStatus::kReady);
  EXPECT_EQ(destination, inline_bytes + std::string(500, 's'));
  ASSERT_EQ(Next(*receiver, &record).status, RxStatus::kReady);
  ASSERT_EQ(receiver->Place(head.size(), {}).status, RxStatus::kReady);
  EXPECT_THAT(server_sink_->events,
              ElementsAre("server < record 530 bytes, last s", "server < record the head of the record"));
  uint64_t cookie = 0;
  EXPECT_TRUE(sender->TakeSent(&cookie));
  EXPECT_EQ(cookie, 1u);
}

TEST_F(CaptureTest, ARecordTheOwnerDiscardsIsShownWithItsPayload) {
  ShakeHands();
  FakeMemory memory;
  const auto sender = Tapped(*client_fabric_, std::move(client_));
  const auto receiver = Tapped(*server_fabric_, std::move(server_));
  const std::string payload(300, 'p');
  const TxPart part{.bytes = AsBytes(payload)};
  sender->QueueRecord(AsBytes("head"), {&part, 1}, 1);
  while (sender->Flush(memory).status == TxStatus::kWouldBlock) world_.RunUntilIdle();
  world_.RunUntilIdle();
  RecordHead record;
  ASSERT_EQ(Next(*receiver, &record).status, RxStatus::kReady);
  while (receiver->Place(4, {}).status == RxStatus::kWouldBlock) world_.RunUntilIdle();
  EXPECT_THAT(server_sink_->events, ElementsAre("server < record 304 bytes, last p"));
}

TEST_F(CaptureTest, ARecordWhoseMemoryIsGoneIsNotShown) {
  ShakeHands();
  FakeMemory memory;
  const auto sender = Tapped(*client_fabric_, std::move(client_));
  const uint32_t source = memory.Add(100);
  const TxPart part{.by_key = true, .key = source, .address = FakeMemory::Address(source), .length = 100};
  sender->QueueRecord(AsBytes("head"), {&part, 1}, 1);
  memory.Invalidate(source);
  EXPECT_EQ(sender->Flush(memory).status, TxStatus::kMemoryFault);
  EXPECT_TRUE(client_sink_->events.empty());
}

TEST_F(CaptureTest, TheEndOfAConnectionIsShownFromBothSides) {
  ShakeHands();
  {
    FakeMemory memory;
    const auto receiver = Tapped(*server_fabric_, std::move(server_));
    client_->Shutdown();
    client_.reset();
    world_.RunUntilIdle();
    RecordHead record;
    EXPECT_EQ(receiver->NextRecord(&record).status, RxStatus::kEof);
  }
  EXPECT_EQ(client_sink_->events.front(), "client > fin");
  EXPECT_EQ(server_sink_->events.front(), "server < fin");
  EXPECT_EQ(server_sink_->events.back(), "server > fin");
}

class RoceCaptureTest : public CaptureTest {
 protected:
  RoceCaptureTest() : CaptureTest(CaptureStyle::kRoce) {}
};

TEST_F(RoceCaptureTest, OfTheStreamNothingIsShownWhateverItsBytesLookLike) {
  const std::string request = Frame(wire::MpaFrameKind::kRequest, "hi");
  WriteAll(*client_, request);
  EXPECT_EQ(ReadExactly(*server_, request.size()), request);
  FakeMemory memory;
  {
    const auto sender = Tapped(*client_fabric_, std::move(client_));
    sender->QueueRecord(AsBytes("packet"), {}, 1);
    while (sender->Flush(memory).status == TxStatus::kWouldBlock) world_.RunUntilIdle();
    sender->Shutdown();
  }
  const auto receiver = Tapped(*server_fabric_, std::move(server_));
  world_.RunUntilIdle();
  RecordHead record;
  ASSERT_EQ(Next(*receiver, &record).status, RxStatus::kReady);
  ASSERT_EQ(receiver->Place(6, {}).status, RxStatus::kReady);
  EXPECT_EQ(Next(*receiver, &record).status, RxStatus::kEof);
  receiver->Abort();
  EXPECT_THAT(client_sink_->events, ElementsAre("roce client open", "roce client > record packet"));
  EXPECT_THAT(server_sink_->events, ElementsAre("roce server open", "roce server < record packet"));
}

// What the other end would have got, had it been captured there.
TEST_F(RoceCaptureTest, WhatIsDroppedIsNotShownAndWhatIsDuplicatedIsShownTwice) {
  FakeMemory memory;
  constexpr int kRecords = 100;
  client_sink_->events.clear();
  server_sink_->events.clear();
  const auto plan =
      InjectionPlan::Make(*ParseInjectionRules("drop kind=any one-in=4 seed=7; duplicate kind=any one-in=4 seed=8"));
  const auto sender =
      WithInjections(Tapped(*client_fabric_, std::move(client_)), plan->NewConnection(),
                     {.fabric = *client_host_, .transport = InjectionTransport::kInfiniband, .mtu = 1024});
  const auto receiver = Tapped(*server_fabric_, std::move(server_));
  for (int i = 0; i < kRecords; ++i) {
    const std::string text = std::to_string(100 + i);
    sender->QueueRecord(AsBytes(text), {}, static_cast<uint64_t>(i));
    while (sender->Flush(memory).status == TxStatus::kWouldBlock) world_.RunUntilIdle();
    world_.RunUntilIdle();
    RecordHead record;
    while (Next(*receiver, &record).status == RxStatus::kReady) receiver->Place(3, {});
  }
  std::vector<std::string> sent, received;
  for (const std::string& event : client_sink_->events) sent.push_back(event.substr(event.size() - 3));
  for (const std::string& event : server_sink_->events) received.push_back(event.substr(event.size() - 3));
  EXPECT_EQ(sent, received);
  const std::set<std::string> different(sent.begin(), sent.end());
  EXPECT_LT(different.size(), size_t{kRecords}) << "some were lost";
  EXPECT_GT(sent.size(), different.size()) << "some came twice";
}

// There is no memory for a record layer. The stream that was to give way to it goes.
class FabricWithoutRecords final : public FabricOver {
 public:
  explicit FabricWithoutRecords(Fabric& beneath) : FabricOver(beneath) {}
  std::unique_ptr<Llp> RecordsOver(std::unique_ptr<Stream>, const RecordOptions&) override { throw std::bad_alloc(); }
};

// One that failed before it began.
class LlpWithoutMemoryTest : public CaptureTest {
 protected:
  static std::vector<std::string> EventsOf(SimWorld& world, Fabric& client_host, Fabric& server_host,
                                           CaptureStyle style) {
    FabricWithoutRecords beneath(client_host);
    const auto sink = std::make_shared<ListingSink>();
    CaptureFabric fabric(&beneath, sink, style);
    const IpEndpoint address = *IpEndpoint::Parse("10.0.0.2", 20050);
    std::unique_ptr<Stream> server;
    std::unique_ptr<Stream> client;
    const auto listener = *server_host.Listen(address, 8, [&](std::unique_ptr<Stream> s) { server = std::move(s); });
    const auto attempt = fabric.Connect({}, address, [&](StreamResult result) { client = std::move(*result); });
    EXPECT_TRUE(world.RunUntil([&] { return client != nullptr && server != nullptr; }));
    EXPECT_THROW(fabric.RecordsOver(std::move(client), {}), std::bad_alloc);
    return sink->events;
  }
};

TEST_F(LlpWithoutMemoryTest, TheEndOfItsStreamIsShownOnce) {
  EXPECT_THAT(EventsOf(world_, *client_host_, *server_host_, CaptureStyle::kIwarp),
              ElementsAre("client open", "client > fin"));
}

TEST_F(LlpWithoutMemoryTest, OfInfinibandNothingIsShownAsEver) {
  EXPECT_THAT(EventsOf(world_, *client_host_, *server_host_, CaptureStyle::kRoce), ElementsAre("roce client open"));
}

TEST_F(CaptureTest, AStreamOfAnotherFabricIsLeftAsItIs) {
  std::unique_ptr<Stream> stream;
  const auto attempt =
      client_host_->Connect({}, server_->local(), [&](StreamResult result) { stream = std::move(*result); });
  ASSERT_TRUE(world_.RunUntil([&] { return stream != nullptr; }));
  const auto llp = client_fabric_->RecordsOver(std::move(stream), {});
  EXPECT_EQ(dynamic_cast<CaptureTap*>(llp.get()), nullptr);
}

}  // namespace
}  // namespace stagecoach::emu
