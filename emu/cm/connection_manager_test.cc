// What the contract tests of the shim cannot reach: limits against strangers, time-outs in virtual time, ids that go in
// mid-handshake.

#include "emu/cm/connection_manager.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/insist.h"
#include "emu/cm/cm_test_support.h"
#include "emu/engine/qp_states.h"
#include "emu/nic/test_records.h"
#include "emu/sim/sim_world.h"

namespace {

// The next allocation of this program finds no memory. Its tests have one thread.
bool next_allocation_fails = false;

}  // namespace

void* operator new(size_t size) {
  void* const block = std::exchange(next_allocation_fails, false) ? nullptr : std::malloc(std::max<size_t>(size, 1));
  if (block == nullptr) throw std::bad_alloc();
  return block;
}
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  return std::malloc(std::max<size_t>(size, 1));
}
void operator delete(void* block) noexcept {
  std::free(block);
}
void operator delete(void* block, size_t) noexcept {
  std::free(block);
}

namespace stagecoach::emu {
namespace {

IpEndpoint Address(const char* text, uint16_t port = 0) {
  return *IpEndpoint::Parse(text, port);
}

const IpEndpoint kServerAddress = Address("10.0.0.1", 7);

// "MPA ID Req Frame", flags, revision, length; then an IRD/ORD word with peer-to-peer and all RTRs where asked.
std::string Request(bool enhanced) {
  std::string frame = "MPA ID Req Frame";
  frame += enhanced ? std::string("\x10\x02\x00\x04\x80\x08\xc0\x08", 8) : std::string("\x00\x01\x00\x00", 4);
  return frame;
}

// A host with a NIC and a manager, and what tests make on it.
class Machine {
 public:
  Machine(SimWorld* world, const std::string& name, const IpEndpoint& address, CmOptions options = {},
          DeviceProfile profile = IwarpProfile())
      : fabric_(world->AddHost(name, {address.WithPort(0)})),
        records_(fabric_),
        nic_(records_.fabric(), std::move(profile), NicOptionsOf(world, name)),
        cm_(std::make_unique<ConnectionManager>(nic_, options)),
        context_(nic_.OpenContext().value()),
        pd_(nic_.AllocatePd(*context_).value()),
        cq_(nic_.CreateCq(*context_, 64, nullptr, nullptr).value()),
        channel_(cm_->CreateChannel()) {}

  SimFabric& fabric() { return fabric_; }
  ConnectionManager& cm() { return *cm_; }
  const std::shared_ptr<CmChannel>& channel() { return channel_; }

  QueuePair* NewQp() { return NewQpInInit(nic_, *context_, pd_, cq_); }
  void DestroyQp(QueuePair* qp) {
    cm_->ForgetQp(qp->qp_number());
    EXPECT_EQ(nic_.DestroyQp(qp->handle()), 0);
  }

  std::shared_ptr<CmId> Listening(int backlog = 8) {
    auto id = cm_->CreateId(channel_);
    EXPECT_EQ(cm_->Bind(id, kServerAddress), 0);
    EXPECT_EQ(cm_->Listen(id, backlog), 0);
    return id;
  }

  // An id on its way to `to`. Its address and route events are taken.
  std::shared_ptr<CmId> Connecting(const IpEndpoint& to, CmParameters parameters = {}, QueuePair** qp = nullptr) {
    auto id = cm_->CreateId(channel_);
    EXPECT_EQ(cm_->ResolveAddress(id, {}, to), 0);
    EXPECT_EQ(Next(), CmEventType::kAddressResolved);
    EXPECT_EQ(cm_->ResolveRoute(id), 0);
    EXPECT_EQ(Next(), CmEventType::kRouteResolved);
    QueuePair* const made = NewQp();
    if (qp != nullptr) *qp = made;
    EXPECT_EQ(cm_->SetQp(id, made->qp_number()), 0);
    EXPECT_EQ(cm_->Connect(id, parameters), 0);
    return id;
  }

  // The next event, acknowledged; nothing when the world runs dry without one.
  std::optional<CmEvent> NextEvent() {
    auto event = channel_->GetEvent();
    if (!event) return std::nullopt;
    channel_->Acknowledge(*event);
    return std::move(*event);
  }
  std::optional<CmEventType> Next() {
    auto event = NextEvent();
    if (!event) return std::nullopt;
    last_status_ = event->status;
    return event->type;
  }
  int last_status() const { return last_status_; }

 private:
  static NicOptions NicOptionsOf(SimWorld* world, const std::string& name) {
    NicOptions options;
    options.name = name;
    options.stags = SeededStagSource(world->prng().Fork(name));
    options.trace = world->trace();
    return options;
  }

  SimFabric& fabric_;
  const TestRecords records_;
  Nic nic_;
  std::unique_ptr<ConnectionManager> cm_;
  NicContext* context_;
  uint32_t pd_;
  CompletionQueue* cq_;
  std::shared_ptr<CmChannel> channel_;
  int last_status_ = 0;
};

// A bare stream to the server, for saying what no manager would.
class Stranger {
 public:
  Stranger(SimWorld* world, SimFabric* fabric) : world_(world) {
    attempt_ = fabric->Connect({}, kServerAddress, [this](Result<std::unique_ptr<Stream>, FabricError> result) {
      ASSERT_TRUE(result);
      stream_ = std::move(*result);
    });
    EXPECT_TRUE(world->RunUntil([this] { return stream_ != nullptr; }));
  }
  void Say(std::string_view text) {
    for (ConstBytes rest = AsBytes(text); !rest.empty();) {
      const IoResult written = stream_->Write({&rest, 1});
      ASSERT_EQ(written.status, IoStatus::kOk);
      rest = rest.subspan(written.bytes);
    }
  }
  // What the server has said by now; `ended` when it has closed or reset the stream.
  void Listen() {
    std::byte buffer[256];
    const MutableBytes into(buffer);
    for (;;) {
      const IoResult read = stream_->Read({&into, 1});
      if (read.status == IoStatus::kOk) heard_ += AsText(ConstBytes(buffer, read.bytes));
      if (read.status == IoStatus::kEof || read.status == IoStatus::kError) ended_ = true;
      if (read.status != IoStatus::kOk) return;
    }
  }
  bool ended() {
    Listen();
    return ended_;
  }
  const std::string& heard() {
    Listen();
    return heard_;
  }
  void Leave() { stream_->Abort(); }

 private:
  SimWorld* const world_;
  std::unique_ptr<ConnectAttempt> attempt_;
  std::unique_ptr<Stream> stream_;
  std::string heard_;
  bool ended_ = false;
};

// There is no memory to give a program the first event of that kind, which is told before.
class NoMemoryForTheFirst final : public TraceSink {
 public:
  explicit NoMemoryForTheFirst(CmEventType type) : type_(ToString(type)) {}
  void OnEvent(Instant, std::string_view, std::string_view event, std::initializer_list<TraceFact> facts) override {
    const auto* const type = FindFact<std::string_view>(facts, "type");
    if (event != "event" || type == nullptr || *type != type_) return;
    if (++events_ != 1) return;
    while (SpendReserve()) {
    }
    next_allocation_fails = true;
  }
  int events() const { return events_; }

 private:
  const std::string_view type_;
  int events_ = 0;
};

class ConnectionManagerTest : public ::testing::Test {
 protected:
  void Start(CmOptions server_options = {}, uint64_t seed = 1) {
    SimWorld::Options options;
    options.seed = seed;
    options.trace = trace_;
    options.link.chop = true;
    world_ = std::make_unique<SimWorld>(options);
    server_ = std::make_unique<Machine>(world_.get(), "server", kServerAddress, server_options);
    client_ = std::make_unique<Machine>(world_.get(), "client", Address("10.0.0.2"));
  }
  // Accepts the next request with a new QP.
  std::shared_ptr<CmId> AcceptNext(QueuePair** qp = nullptr) {
    auto request = server_->NextEvent();
    while (request && request->type == CmEventType::kEstablished) request = server_->NextEvent();
    EXPECT_TRUE(request && request->type == CmEventType::kConnectRequest);
    const std::shared_ptr<CmId> id = request.value().id;
    QueuePair* made = server_->NewQp();
    if (qp != nullptr) *qp = made;
    EXPECT_EQ(server_->cm().SetQp(id, made->qp_number()), 0);
    EXPECT_EQ(server_->cm().Accept(id, {.private_data = {}, .responder_resources = 8, .initiator_depth = 8}), 0);
    return id;
  }

  TraceHash hash_;
  std::optional<NoMemoryForTheFirst> no_memory_;
  TraceSink* trace_ = &hash_;
  std::unique_ptr<SimWorld> world_;
  std::unique_ptr<Machine> server_;
  std::unique_ptr<Machine> client_;
};

// --- Listeners that come late ---

TEST_F(ConnectionManagerTest, AListenerThatComesLateIsFoundByWhoIsPatient) {
  Start();
  Machine patient(world_.get(), "patient", Address("10.0.0.3"), {.listener_patience = 1s});
  const auto initiator = patient.Connecting(kServerAddress);
  world_->RunFor(500ms);
  const auto listener = server_->Listening();
  const auto responder = AcceptNext();
  EXPECT_EQ(patient.Next(), CmEventType::kEstablished);
  patient.cm().Destroy(initiator);
  for (const auto& id : {responder, listener}) server_->cm().Destroy(id);
}

// As perftest does it: one connection at a port to agree by, then others at the same port, all asked for at once.
TEST_F(ConnectionManagerTest, AListenerThatIsMadeAgainIsFoundByAllWhoWait) {
  constexpr int kAtOnce = 4;
  Start();
  Machine patient(world_.get(), "patient", Address("10.0.0.3"), {.listener_patience = 1s});
  std::vector<std::shared_ptr<CmId>> ids;  // of the server
  std::vector<std::shared_ptr<CmId>> initiators = {patient.Connecting(kServerAddress)};
  const auto first = server_->Listening(1);
  ids.push_back(AcceptNext());
  EXPECT_EQ(patient.Next(), CmEventType::kEstablished);
  server_->cm().Destroy(first);
  for (int i = 0; i < kAtOnce; ++i) initiators.push_back(patient.Connecting(kServerAddress));
  world_->RunFor(100ms);
  const auto second = server_->Listening(kAtOnce);
  for (int i = 0; i < kAtOnce; ++i) ids.push_back(AcceptNext());
  // Nobody is turned away by that.
  server_->cm().Destroy(second);
  for (int i = 0; i < kAtOnce; ++i) EXPECT_EQ(patient.Next(), CmEventType::kEstablished);
  for (const auto& id : initiators) patient.cm().Destroy(id);
  for (const auto& id : ids) server_->cm().Destroy(id);
}

TEST_F(ConnectionManagerTest, PatienceWithAListenerThatNeverComesEnds) {
  Start();
  Machine patient(world_.get(), "patient", Address("10.0.0.3"), {.listener_patience = 1s});
  const Instant begin = world_->Now();
  const auto initiator = patient.Connecting(kServerAddress);
  EXPECT_EQ(patient.Next(), CmEventType::kRejected);
  EXPECT_EQ(patient.last_status(), -ECONNREFUSED);
  EXPECT_GE(world_->Now() - begin, 900ms);
  EXPECT_LE(world_->Now() - begin, 1100ms);
  patient.cm().Destroy(initiator);
}

TEST_F(ConnectionManagerTest, AnIdDestroyedWhileItWaitsForAListenerLeavesNothing) {
  Start();
  Machine patient(world_.get(), "patient", Address("10.0.0.3"), {.listener_patience = 1s});
  const auto initiator = patient.Connecting(kServerAddress);
  world_->RunFor(100ms);
  patient.cm().Destroy(initiator);
  const auto listener = server_->Listening();
  world_->RunFor(5s);
  EXPECT_EQ(server_->cm().counters().accepted_streams, 0u);
  EXPECT_EQ(patient.cm().counters().ids, 0u);
  server_->cm().Destroy(listener);
}

// --- Strangers ---

TEST_F(ConnectionManagerTest, ARequestMustBeCompleteInTime) {
  Start();
  auto listener = server_->Listening();
  Stranger silent(world_.get(), &client_->fabric());
  Stranger slow(world_.get(), &client_->fabric());
  slow.Say("MPA ID Req");
  world_->RunFor(4900ms);
  EXPECT_FALSE(silent.ended());
  EXPECT_EQ(server_->cm().counters().half_open, 2u);
  world_->RunFor(200ms);
  EXPECT_TRUE(silent.ended());
  EXPECT_TRUE(slow.ended());
  EXPECT_EQ(server_->cm().counters().half_open, 0u);
  EXPECT_EQ(server_->cm().counters().failed_handshakes, 2u);
  server_->cm().Destroy(listener);
}

TEST_F(ConnectionManagerTest, AWrongKeyIsKnownAtItsFirstByte) {
  Start();
  auto listener = server_->Listening();
  Stranger stranger(world_.get(), &client_->fabric());
  stranger.Say("G");
  world_->RunFor(1ms);
  EXPECT_TRUE(stranger.ended());
  EXPECT_EQ(server_->cm().counters().failed_handshakes, 1u);
  server_->cm().Destroy(listener);
}

TEST_F(ConnectionManagerTest, TheOldestOfTooManyStrangersGivesWay) {
  CmOptions options;
  options.half_open_limit = 3;
  Start(options);
  auto listener = server_->Listening(2);
  std::vector<std::unique_ptr<Stranger>> strangers;
  for (int i = 0; i < 5; ++i) strangers.push_back(std::make_unique<Stranger>(world_.get(), &client_->fabric()));
  world_->RunFor(1ms);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(strangers[i]->ended(), i < 2) << i;
  EXPECT_EQ(server_->cm().counters().refused_streams, 2u);
  EXPECT_EQ(server_->cm().counters().half_open, 3u);
  // When one of them has spoken nobody has to give way.
  strangers[2]->Say(Request(false));
  world_->RunFor(1ms);
  Stranger next(world_.get(), &client_->fabric());
  world_->RunFor(1ms);
  for (int i = 2; i < 5; ++i) EXPECT_FALSE(strangers[i]->ended()) << i;
  EXPECT_FALSE(next.ended());
  server_->cm().Destroy(listener);
}

// 140 silent streams used to lock out everybody for as long as their peers liked.
TEST_F(ConnectionManagerTest, SilentStrangersKeepNobodyOut) {
  constexpr int kSilent = 140;
  Start();
  auto listener = server_->Listening();
  std::vector<std::unique_ptr<Stranger>> strangers;
  for (int i = 0; i < kSilent; ++i) strangers.push_back(std::make_unique<Stranger>(world_.get(), &client_->fabric()));
  // Of the same address, and of another one.
  Machine other(world_.get(), "other", Address("10.0.0.3"));
  for (Machine* const machine : {client_.get(), &other}) {
    const auto initiator = machine->Connecting(kServerAddress);
    const auto responder = AcceptNext();
    EXPECT_EQ(machine->Next(), CmEventType::kEstablished);
    EXPECT_EQ(server_->Next(), CmEventType::kEstablished);
    machine->cm().Destroy(initiator);
    server_->cm().Destroy(responder);
  }
  EXPECT_EQ(server_->cm().counters().half_open, CmOptions{}.half_open_limit - 1) << "the others are still there";
  server_->cm().Destroy(listener);
}

TEST_F(ConnectionManagerTest, AnAddressWithFewStrangersGivesWayToNoneWithMany) {
  CmOptions options;
  options.half_open_limit = 3;
  Start(options);
  auto listener = server_->Listening(2);
  Machine other(world_.get(), "other", Address("10.0.0.3"));
  Stranger slow(world_.get(), &other.fabric());
  slow.Say("MPA ID Req");
  std::vector<std::unique_ptr<Stranger>> crowd;
  for (int i = 0; i < 20; ++i) crowd.push_back(std::make_unique<Stranger>(world_.get(), &client_->fabric()));
  world_->RunFor(1ms);
  EXPECT_FALSE(slow.ended());
  slow.Say(Request(false).substr(10));
  const auto request = server_->NextEvent();
  ASSERT_TRUE(request);
  EXPECT_EQ(request->type, CmEventType::kConnectRequest);
  server_->cm().Destroy(request->id);
  server_->cm().Destroy(listener);
}

// Whoever says that it takes many requests at a time has room for as many that are on their way.
TEST_F(ConnectionManagerTest, AListenerHasRoomForWhatItsBacklogSays) {
  constexpr int kBacklog = 20;
  CmOptions options;
  options.half_open_limit = 3;
  Start(options);
  auto listener = server_->Listening(kBacklog);
  std::vector<std::unique_ptr<Stranger>> strangers;
  for (int i = 0; i <= kBacklog; ++i) {
    strangers.push_back(std::make_unique<Stranger>(world_.get(), &client_->fabric()));
  }
  world_->RunFor(1ms);
  for (int i = 0; i <= kBacklog; ++i) EXPECT_EQ(strangers[i]->ended(), i < 1) << i;
  EXPECT_EQ(server_->cm().counters().half_open, uint64_t{kBacklog});
  server_->cm().Destroy(listener);
}

// Each holds a descriptor, of which a process has few.
TEST_F(ConnectionManagerTest, ALongBacklogMakesRoomForSoManyStrangersAndNoMore) {
  CmOptions options;
  options.half_open_limit = 3;
  options.half_open_max = 5;
  Start(options);
  auto listener = server_->Listening(/*backlog=*/0);
  std::vector<std::unique_ptr<Stranger>> strangers;
  for (int i = 0; i < 7; ++i) strangers.push_back(std::make_unique<Stranger>(world_.get(), &client_->fabric()));
  world_->RunFor(1ms);
  for (int i = 0; i < 7; ++i) EXPECT_EQ(strangers[i]->ended(), i < 2) << i;
  server_->cm().Destroy(listener);
}

TEST_F(ConnectionManagerTest, RequestsBeyondTheBacklogAreRejected) {
  Start();
  auto listener = server_->Listening(2);
  std::vector<std::shared_ptr<CmId>> ids;
  for (int i = 0; i < 3; ++i) ids.push_back(client_->Connecting(kServerAddress));
  EXPECT_EQ(client_->Next(), CmEventType::kRejected);
  EXPECT_EQ(client_->last_status(), -ECONNREFUSED);
  // An answer makes room.
  auto accepted = AcceptNext();
  EXPECT_EQ(client_->Next(), CmEventType::kEstablished);
  ids.push_back(client_->Connecting(kServerAddress));
  auto second = AcceptNext();
  auto third = AcceptNext();
  EXPECT_EQ(client_->Next(), CmEventType::kEstablished);
  EXPECT_EQ(client_->Next(), CmEventType::kEstablished);
  for (const auto& id : ids) client_->cm().Destroy(id);
  for (const auto& id : {accepted, second, third, listener}) server_->cm().Destroy(id);
}

TEST_F(ConnectionManagerTest, AReadyToReceiveMessageThatNeverComesEndsTheAttempt) {
  Start();
  auto listener = server_->Listening();
  Stranger stranger(world_.get(), &client_->fabric());
  stranger.Say(Request(true));
  QueuePair* qp = nullptr;
  auto id = AcceptNext(&qp);
  world_->RunFor(4900ms);
  EXPECT_EQ(stranger.heard().substr(0, 16), "MPA ID Rep Frame");
  EXPECT_FALSE(stranger.ended());
  EXPECT_EQ(server_->Next(), CmEventType::kConnectError);
  EXPECT_NE(server_->last_status(), 0);
  EXPECT_EQ(qp->state(), QpState::kErr);
  server_->cm().Destroy(id);
  server_->cm().Destroy(listener);
}

// The wait for an RTR has a timer of its own, which ends with it: by the RTR, by the end of the stream, with the id.
TEST_F(ConnectionManagerTest, TheTimerOfTheReadyToReceiveMessageEndsWithTheWait) {
  Start();
  // Streams that end linger for two seconds.
  const auto timers = [this] {
    world_->RunFor(2500ms);
    return world_->loop().CountOf(SimLoop::kNobody).timers;
  };
  auto listener = server_->Listening();
  auto id = client_->Connecting(kServerAddress);
  auto accepted = AcceptNext();
  EXPECT_EQ(client_->Next(), CmEventType::kEstablished);
  EXPECT_EQ(server_->Next(), CmEventType::kEstablished);
  EXPECT_EQ(timers(), 0u);

  Stranger leaves(world_.get(), &client_->fabric());
  leaves.Say(Request(true));
  auto left = AcceptNext();
  EXPECT_EQ(timers(), 1u);
  leaves.Leave();
  EXPECT_EQ(server_->Next(), CmEventType::kConnectError);
  EXPECT_EQ(timers(), 0u);

  Stranger stays(world_.get(), &client_->fabric());
  stays.Say(Request(true));
  auto destroyed = AcceptNext();
  EXPECT_EQ(timers(), 1u);
  server_->cm().Destroy(destroyed);
  EXPECT_EQ(timers(), 0u);

  client_->cm().Destroy(id);
  for (const auto& each : {accepted, left, listener}) server_->cm().Destroy(each);
}

TEST_F(ConnectionManagerTest, WithoutPeerToPeerAnAcceptedConnectionIsEstablishedAtOnce) {
  Start();
  auto listener = server_->Listening();
  Stranger stranger(world_.get(), &client_->fabric());
  stranger.Say(Request(false));
  auto id = AcceptNext();
  EXPECT_EQ(server_->Next(), CmEventType::kEstablished);
  server_->cm().Destroy(id);
  server_->cm().Destroy(listener);
}

TEST_F(ConnectionManagerTest, AtomicsTakeTwoEndsThatSpeakRfc7306) {
  for (const bool server_does : {false, true}) {
    for (const bool client_does : {false, true}) {
      SCOPED_TRACE(server_does ? "the server does" : "the server does not");
      SCOPED_TRACE(client_does ? "the client does" : "the client does not");
      Start();
      DeviceProfile profile = IwarpProfile();
      profile.extensions = server_does;
      server_ = std::make_unique<Machine>(world_.get(), "a-server", Address("10.0.1.1"), CmOptions{}, profile);
      profile.extensions = client_does;
      client_ = std::make_unique<Machine>(world_.get(), "a-client", Address("10.0.1.2"), CmOptions{}, profile);
      auto listener = server_->cm().CreateId(server_->channel());
      ASSERT_EQ(server_->cm().Bind(listener, Address("10.0.1.1", 7)), 0);
      ASSERT_EQ(server_->cm().Listen(listener, 8), 0);
      QueuePair* client_qp = nullptr;
      auto id = client_->Connecting(Address("10.0.1.1", 7), {.private_data = {}}, &client_qp);
      QueuePair* server_qp = nullptr;
      auto accepted = AcceptNext(&server_qp);
      ASSERT_EQ(client_->Next(), CmEventType::kEstablished);
      for (QueuePair* qp : {client_qp, server_qp}) {
        ASSERT_EQ(qp->state(), QpState::kRts);
        const ScatterGather result{.address = 4096, .length = 8, .lkey = 1};
        SendRequest request;
        request.opcode = PostOpcode::kFetchAdd;
        request.sges = {&result, 1};
        EXPECT_EQ(qp->EnqueueSend(request), server_does && client_does ? 0 : EOPNOTSUPP);
      }
      client_->cm().Destroy(id);
      server_->cm().Destroy(accepted);
      server_->cm().Destroy(listener);
      client_.reset();
      server_.reset();
    }
  }
}

TEST_F(ConnectionManagerTest, AStrangerThatLeavesAtEachPointCostsNothing) {
  for (size_t length = 0; length <= Request(true).size(); ++length) {
    Start();
    auto listener = server_->Listening();
    Stranger stranger(world_.get(), &client_->fabric());
    if (length > 0) stranger.Say(Request(true).substr(0, length));
    world_->RunFor(1ms);
    stranger.Leave();
    world_->RunFor(1ms);
    EXPECT_EQ(server_->cm().counters().half_open, 0u) << length;
    server_->cm().Destroy(listener);
    client_.reset();
    server_.reset();
  }
}

// --- Silence at the other end ---

TEST_F(ConnectionManagerTest, AnAnswerThatNeverComesIsUnreachable) {
  Start();
  std::vector<std::unique_ptr<Stream>> accepted;
  auto deaf = server_->fabric().Listen(kServerAddress, 8,
                                       [&](std::unique_ptr<Stream> stream) { accepted.push_back(std::move(stream)); });
  ASSERT_TRUE(deaf);
  auto id = client_->Connecting(kServerAddress);
  const Instant start = world_->Now();
  EXPECT_EQ(client_->Next(), CmEventType::kUnreachable);
  EXPECT_EQ(client_->last_status(), -ETIMEDOUT);
  EXPECT_GE(world_->Now() - start, 10s);
  EXPECT_LT(world_->Now() - start, 11s);
  client_->cm().Destroy(id);
}

TEST_F(ConnectionManagerTest, AHostThatIsGoneIsUnreachable) {
  Start();
  auto listener = server_->Listening();
  world_->CutHost(server_->fabric(), Cut::kSilent);
  auto id = client_->Connecting(kServerAddress);
  EXPECT_EQ(client_->Next(), CmEventType::kUnreachable);
  EXPECT_EQ(client_->last_status(), -ETIMEDOUT);
  client_->cm().Destroy(id);
  server_->cm().Destroy(listener);
}

TEST_F(ConnectionManagerTest, AnUnknownAddressIsAnAddressError) {
  Start();
  auto id = client_->cm().CreateId(client_->channel());
  ASSERT_EQ(client_->cm().ResolveAddress(id, {}, Address("0.0.0.0", 5)), 0);
  EXPECT_EQ(client_->Next(), CmEventType::kAddressError);
  EXPECT_EQ(client_->last_status(), -ENETUNREACH);
  client_->cm().Destroy(id);
}

// --- Ids that go in the middle ---

TEST_F(ConnectionManagerTest, AnIdDestroyedWhileConnectingLeavesNothing) {
  for (Duration wait : {0us, 5us, 15us, 25us, 35us, 45us, 55us}) {
    Start();
    auto listener = server_->Listening();
    auto id = client_->Connecting(kServerAddress);
    world_->RunFor(wait);
    client_->cm().Destroy(id);
    world_->RunFor(10s);
    EXPECT_EQ(client_->cm().counters().half_open, 0u);
    EXPECT_EQ(server_->cm().counters().half_open, 0u);
    server_->cm().Destroy(listener);
    client_.reset();
    server_.reset();
  }
}

TEST_F(ConnectionManagerTest, AQpDestroyedWhileConnectingIsAConnectError) {
  Start();
  auto listener = server_->Listening();
  auto id = client_->cm().CreateId(client_->channel());
  ASSERT_EQ(client_->cm().ResolveAddress(id, {}, kServerAddress), 0);
  EXPECT_EQ(client_->Next(), CmEventType::kAddressResolved);
  ASSERT_EQ(client_->cm().ResolveRoute(id), 0);
  EXPECT_EQ(client_->Next(), CmEventType::kRouteResolved);
  QueuePair* qp = client_->NewQp();
  ASSERT_EQ(client_->cm().SetQp(id, qp->qp_number()), 0);
  ASSERT_EQ(client_->cm().Connect(id, {}), 0);
  world_->RunFor(5us);
  client_->DestroyQp(qp);
  EXPECT_EQ(client_->Next(), CmEventType::kConnectError);
  client_->cm().Destroy(id);
  server_->cm().Destroy(listener);
}

TEST_F(ConnectionManagerTest, AManagerMayGoWithEverythingInProgress) {
  Start();
  auto listener = server_->Listening();
  Stranger stranger(world_.get(), &client_->fabric());
  auto first = client_->Connecting(kServerAddress);
  auto second = AcceptNext();
  auto third = client_->Connecting(kServerAddress);
  world_->RunFor(20us);
  server_.reset();
  client_.reset();
}

// The length in the frame counts the IRD/ORD word as well, so that it is one of two bytes at the largest.
TEST_F(ConnectionManagerTest, PrivateDataOfEveryLengthArrives) {
  const auto data = [](size_t size) {
    std::vector<std::byte> bytes(size);
    for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i + size);
    return bytes;
  };
  Start();
  auto listener = server_->Listening();
  for (size_t size = 0; size <= kCmPrivateDataMax; ++size) {
    SCOPED_TRACE(size);
    for (const bool accepts : {true, false}) {
      CmParameters parameters;
      parameters.private_data = data(size);
      QueuePair* caller = nullptr;
      auto id = client_->Connecting(kServerAddress, parameters, &caller);
      auto request = server_->NextEvent();
      ASSERT_TRUE(request && request->type == CmEventType::kConnectRequest);
      EXPECT_EQ(request->parameters.private_data, data(size));
      parameters.private_data = data(kCmPrivateDataMax - size);
      QueuePair* const answerer = server_->NewQp();
      if (accepts) {
        ASSERT_EQ(server_->cm().SetQp(request->id, answerer->qp_number()), 0);
        ASSERT_EQ(server_->cm().Accept(request->id, parameters), 0);
      } else {
        ASSERT_EQ(server_->cm().Reject(request->id, parameters.private_data), 0);
      }
      const auto answer = client_->NextEvent();
      ASSERT_TRUE(answer.has_value());
      EXPECT_EQ(answer->type, accepts ? CmEventType::kEstablished : CmEventType::kRejected);
      EXPECT_EQ(answer->parameters.private_data, data(kCmPrivateDataMax - size));
      if (accepts) {
        EXPECT_EQ(server_->Next(), CmEventType::kEstablished);
      }
      client_->cm().Destroy(id);
      if (accepts) {
        EXPECT_EQ(server_->Next(), CmEventType::kDisconnected);
      }
      server_->cm().Destroy(request->id);
      client_->DestroyQp(caller);
      server_->DestroyQp(answerer);
    }
  }
  server_->cm().Destroy(listener);
}

TEST_F(ConnectionManagerTest, PrivateDataBeyondTheLimitIsInvalid) {
  Start();
  auto id = client_->cm().CreateId(client_->channel());
  CmParameters parameters;
  parameters.private_data.resize(kCmPrivateDataMax + 1);
  EXPECT_EQ(client_->cm().Connect(id, parameters), EINVAL);
  EXPECT_EQ(client_->cm().Accept(id, parameters), EINVAL);
  EXPECT_EQ(client_->cm().Reject(id, parameters.private_data), EINVAL);
  client_->cm().Destroy(id);
}

// --- Determinism ---

TEST_F(ConnectionManagerTest, TheSameSeedIsTheSameStory) {
  uint64_t hashes[3] = {};
  const uint64_t seeds[3] = {7, 7, 8};
  for (int run = 0; run < 3; ++run) {
    hash_ = TraceHash();
    Start({}, seeds[run]);
    auto listener = server_->Listening();
    auto id = client_->Connecting(kServerAddress);
    auto accepted = AcceptNext();
    EXPECT_EQ(client_->Next(), CmEventType::kEstablished);
    EXPECT_EQ(server_->Next(), CmEventType::kEstablished);
    EXPECT_EQ(client_->cm().Disconnect(id), 0);
    EXPECT_EQ(client_->Next(), CmEventType::kDisconnected);
    EXPECT_EQ(server_->Next(), CmEventType::kDisconnected);
    client_->cm().Destroy(id);
    server_->cm().Destroy(accepted);
    server_->cm().Destroy(listener);
    world_->RunFor(10s);
    hashes[run] = hash_.value();
    client_.reset();
    server_.reset();
  }
  EXPECT_EQ(hashes[0], hashes[1]);
  EXPECT_GT(hash_.events(), 10u);
}

// The connection has ended, and the QP says so once more.
TEST_F(ConnectionManagerTest, TheEndIsToldWhenThereIsMemoryForIt) {
  trace_ = &no_memory_.emplace(CmEventType::kDisconnected);
  Start();
  auto listener = server_->Listening();
  QueuePair* qp = nullptr;
  auto id = client_->Connecting(kServerAddress, {}, &qp);
  auto accepted = AcceptNext();
  EXPECT_EQ(client_->Next(), CmEventType::kEstablished);
  EXPECT_EQ(server_->Next(), CmEventType::kEstablished);
  qp->Disconnect();
  EXPECT_EQ(client_->Next(), CmEventType::kDisconnected);
  EXPECT_EQ(server_->Next(), CmEventType::kDisconnected);
  EXPECT_EQ(no_memory_->events(), 3);
  client_->cm().Destroy(id);
  server_->cm().Destroy(accepted);
  server_->cm().Destroy(listener);
}

// The peer goes before its RTR has come: what it is told is the other of the two.
TEST_F(ConnectionManagerTest, TheEndBeforeTheRtrIsToldWhenThereIsMemoryForIt) {
  trace_ = &no_memory_.emplace(CmEventType::kConnectError);
  Start();
  auto listener = server_->Listening();
  Stranger stranger(world_.get(), &client_->fabric());
  stranger.Say(Request(/*enhanced=*/true));
  auto accepted = AcceptNext();
  world_->RunFor(10ms);
  stranger.Leave();
  EXPECT_EQ(server_->Next(), CmEventType::kConnectError);
  EXPECT_EQ(no_memory_->events(), 2);
  server_->cm().Destroy(accepted);
  server_->cm().Destroy(listener);
}

}  // namespace
}  // namespace stagecoach::emu
