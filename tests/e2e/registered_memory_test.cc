// Memory that is registered once for many calls: what the device counts of it, who holds it until when, and what
// becomes of it where it cannot be had. In simulation, where the device can be asked.
#include <gtest/gtest.h>

#include <map>
#include <optional>

#include "emu/world/world.h"
#include "rpcrdma/api/client.h"
#include "rpcrdma/api/server.h"
#include "rpcrdma/api/session.h"
#include "rpcrdma/wire/profile.h"
#include "tests/e2e/outcome.h"
#include "tests/e2e/setting.h"
#include "tests/e2e/test_service.h"
#include "tests/e2e/transports.h"

namespace stagecoach::e2e {
namespace {

using rpcrdma::AcceptStat;
using rpcrdma::CallError;
using rpcrdma::CallOptions;
using rpcrdma::Client;
using rpcrdma::ClientOptions;
using rpcrdma::RegisteredMemory;
using rpcrdma::Server;
using rpcrdma::ServerOptions;
using rpcrdma::Session;
using rpcrdma::SessionOptions;
using rpcrdma::XdrWriter;
using Kind = CallError::Kind;
using Counters = emu::MemoryRegistry::Counters;

constexpr uint32_t kBytes = 60001;

// The test service, whose kSource answers from memory of its own, and whose kEcho can wait.
class CachingService final : public TestService {
 public:
  void Handle(rpcrdma::Request request) override {
    if (request.procedure() == kEcho && hold_echoes) {
      echoes.push_back(std::move(request));
      return;
    }
    if (request.procedure() != kSource || !cache) return TestService::Handle(std::move(request));
    ++handled;
    const uint32_t size = request.args().U32("size");
    const ConstBytes page = outside.empty() ? cache.bytes().subspan(100, size) : outside;
    // A copy of the handle: the cache may be dropped while the reply is under way.
    const RegisteredMemory memory = drop_cache ? std::exchange(cache, {}) : cache;
    request.Reply([&](XdrWriter& results) { results.EligibleOpaque(page); }, memory);
  }
  void AnswerEchoes() {
    hold_echoes = false;
    for (rpcrdma::Request& request : std::exchange(echoes, {})) TestService::Handle(std::move(request));
  }

  RegisteredMemory cache;
  bool drop_cache = false;
  ConstBytes outside;
  bool hold_echoes = false;
  std::vector<rpcrdma::Request> echoes;
};

class MemoryEvents final : public TraceSink {
 public:
  void OnEvent(Instant, std::string_view, std::string_view event, std::initializer_list<TraceFact>) override {
    if (event.starts_with("memory.")) ++counts[std::string(event)];
  }
  std::map<std::string, int> counts;
};

class RegisteredMemoryTest : public ::testing::Test {
 protected:
  RegisteredMemoryTest() { service_.repeatable = {kEcho, kSource}; }
  ~RegisteredMemoryTest() override {
    service_.echoes.clear();
    session_.reset();
    client_.reset();
    server_.reset();
    setting_->For(1ms);
  }

  // What the device of one of the hosts counts.
  Counters At(bool server) {
    if (server) setting_->ActAsServer();
    const Counters counters = emu::World::Current().current_host().nic().registry().counters();
    setting_->ActAsClient();
    return counters;
  }
  Counters AtClient() { return At(false); }
  Counters AtServer() { return At(true); }

  void StartServer(ServerOptions options = {}, uint16_t port = 0) {
    setting_->ActAsServer();
    server_.emplace(setting_->loop(), options);
    server_->Register(&service_);
    ASSERT_TRUE(server_->Listen(setting_->server_host(), port).has_value());
    setting_->ActAsClient();
  }
  std::unique_ptr<Client> NewClient(ClientOptions options = {}) {
    setting_->ActAsClient();
    options.first_xid = next_xid_ += 1000;
    auto client = std::make_unique<Client>(setting_->loop(), options);
    client->Register(kBindings[0]);
    bool connected = false;
    client->Connect(setting_->server_host(), server_->port(),
                    [&](const Result<void, CallError>& result) { connected = result.has_value(); });
    EXPECT_TRUE(setting_->Until([&] { return connected; }));
    return client;
  }
  void Start(ClientOptions options = {}) {
    StartServer();
    client_ = NewClient(options);
  }
  void StartSession(SessionOptions options = {}) {
    setting_->ActAsClient();
    options.client.first_xid = 1;
    options.seed = 1;
    session_.emplace(setting_->loop(), setting_->server_host(), server_->port(), options);
    session_->Register(kBindings[0]);
  }

  template <typename Caller>
  std::optional<Outcome> CallOf(Caller& caller, Procedure procedure, Client::ArgsWriter args,
                                const CallOptions& options) {
    std::optional<Outcome> result;
    caller.Call(Id(procedure), args, options, [&](Outcome outcome) { result.emplace(std::move(outcome)); });
    EXPECT_TRUE(setting_->Until([&] { return result.has_value(); })) << caller.DebugString();
    if (!result) std::abort();  // the handler refers to this frame
    return result;
  }

  // An echo from one part of `arena` to another, and whether it came out right.
  CallOptions EchoOptions(const RegisteredMemory& memory) {
    CallOptions options;
    options.registered_memory = memory;
    options.result_buffers = {sink()};
    return options;
  }
  void Refill(uint8_t seed) {
    CopyBytes(source(), Pattern(kBytes, seed));
    std::fill(sink().begin(), sink().end(), std::byte{0});
  }
  template <typename Caller>
  rpcrdma::CallId Echo(Caller& caller, const RegisteredMemory& memory, Client::CallHandler handler) {
    return caller.Call(
        Id(kEcho), [&](XdrWriter& args) { args.EligibleOpaque(source()); }, EchoOptions(memory), std::move(handler));
  }
  void ExpectEchoed(const Outcome& outcome) { ExpectData(outcome, source(), sink().data()); }
  template <typename Caller>
  void ExpectEcho(Caller& caller, const RegisteredMemory& memory, uint8_t seed = 1) {
    Refill(seed);
    ExpectEchoed(*CallOf(
        caller, kEcho, [&](XdrWriter& args) { args.EligibleOpaque(source()); }, EchoOptions(memory)));
  }

  MutableBytes source() { return MutableBytes(arena_).subspan(1000, kBytes); }
  MutableBytes sink() { return MutableBytes(arena_).subspan(100000, kBytes); }

  std::unique_ptr<Setting> setting_ = MakeSettingOfThisTest();
  CachingService service_;
  std::vector<std::byte> arena_ = std::vector<std::byte>(200000);
  std::optional<Server> server_;
  std::unique_ptr<Client> client_;
  std::optional<Session> session_;
  uint32_t next_xid_ = 1;
};

TEST_F(RegisteredMemoryTest, ManyCallsAreServedByOneRegistrationAndEachHasItsOwnTags) {
  StartServer();
  const Counters idle = AtClient();
  client_ = NewClient();
  const Counters before = AtClient();
  RegisteredMemory memory{arena_};
  EXPECT_EQ(AtClient().registrations, before.registrations) << "before any connection uses it";
  for (uint32_t i = 1; i <= 50; ++i) {
    Refill(static_cast<uint8_t>(i));
    std::optional<Outcome> result;
    Echo(*client_, memory, [&](Outcome outcome) {
      // Of each call's two windows none is valid by now.
      const Counters now = AtClient();
      EXPECT_EQ(now.window_binds - before.window_binds, 2 * i);
      EXPECT_EQ(
          now.local_invalidations + now.remote_invalidations - before.local_invalidations - before.remote_invalidations,
          2 * i);
      EXPECT_EQ(now.registrations - before.registrations, 1u);
      result.emplace(std::move(outcome));
    });
    ASSERT_TRUE(setting_->Until([&] { return result.has_value(); }));
    ExpectEchoed(*result);
  }
  const auto stats = client_->stats();
  EXPECT_EQ(stats.memory_registered, 1u);
  EXPECT_EQ(stats.memory_reused, 100u);
  EXPECT_EQ(stats.memory_not_reused, 0u);
  EXPECT_EQ(stats.registrations, 100u);
  EXPECT_EQ(stats.invalidations_local + stats.invalidations_remote, 100u);
  EXPECT_EQ(client_->holdings().registered_memories, 1u);
  EXPECT_EQ(AtClient().deregistrations, before.deregistrations);

  // The same calls without it.
  ExpectEcho(*client_, {});
  EXPECT_EQ(AtClient().registrations - before.registrations, 3u);
  EXPECT_EQ(AtClient().deregistrations - before.deregistrations, 2u);

  memory = {};
  EXPECT_EQ(AtClient().regions, before.regions);
  EXPECT_EQ(client_->holdings().registered_memories, 0u);
  client_.reset();
  EXPECT_EQ(AtClient().regions, idle.regions);
  EXPECT_EQ(AtClient().windows, idle.windows);
}

// [5666:7+2] [2004:7+1] [5666:7+1]
TEST_F(RegisteredMemoryTest, HeadersAndListsAreInMemoryThatIsRegisteredOnceForTheConnection) {
  for (const rpcrdma::ProtocolProfile& profile : rpcrdma::AllProfiles()) {
    SCOPED_TRACE(profile.name);
    StartServer({.profile = profile});
    const Counters idle_client = AtClient();
    const Counters idle_server = AtServer();
    client_ = NewClient({.profile = profile, .memory_windows = false});
    const Counters client = AtClient();
    // Sends and Receives of one end.
    EXPECT_EQ(client.registrations - idle_client.registrations, 2u);
    const auto data = Pattern(100);
    const auto ask = [&] {
      ASSERT_TRUE(CallOf(*client_, kNull, [](XdrWriter&) {}, {})->has_value());
      const auto outcome = CallOf(*client_, kEcho, [&](XdrWriter& args) { args.EligibleOpaque(data); }, {});
      ExpectData(*outcome, data);
    };
    ask();
    EXPECT_EQ(AtServer().registrations - idle_server.registrations, 2u);
    for (int i = 0; i < 200; ++i) ask();
    EXPECT_EQ(AtClient().registrations, client.registrations);
    EXPECT_EQ(AtServer().registrations - idle_server.registrations, 2u);

    // With chunks: at the client one registration for the argument and one for the result, and none for the lists that
    // name them. At the server memory is taken from the pool, registered when it is used first; but on iWARP the sink
    // of RDMA Reads is open to the peer, so that it is registered for its call alone.
    for (uint8_t i = 0; i < 5; ++i) ExpectEcho(*client_, {}, i);
    const Counters warm_client = AtClient();
    const Counters warm_server = AtServer();
    for (uint8_t i = 0; i < 50; ++i) ExpectEcho(*client_, {}, i);
    EXPECT_EQ(AtClient().registrations - warm_client.registrations, 100u);
    EXPECT_EQ(AtClient().deregistrations - warm_client.deregistrations, 100u);
    const uint64_t sinks = Transport().type == IBV_TRANSPORT_IWARP ? 50 : 0;
    EXPECT_EQ(AtServer().registrations - warm_server.registrations, sinks);
    EXPECT_EQ(AtServer().deregistrations - warm_server.deregistrations, sinks);
    client_.reset();
    server_.reset();
    setting_->For(1ms);
  }
}

TEST_F(RegisteredMemoryTest, ManyCallsAtATimeShareTheRegistration) {
  Start();
  const RegisteredMemory memory{arena_};
  const Counters before = AtClient();
  CopyBytes(arena_, Pattern(arena_.size()));
  std::vector<std::byte> sinks(64 * 5000);
  const RegisteredMemory all_sinks{sinks};
  size_t over = 0;
  for (size_t i = 0; i < 64; ++i) {
    CallOptions options;
    // Calls without arguments in it have results in another.
    const bool asks = i % 2 == 0;
    options.registered_memory = asks ? memory : all_sinks;
    const MutableBytes sink = MutableBytes(sinks).subspan(i * 5000, 5000);
    if (!asks) options.result_buffers = {sink};
    client_->Call(
        {kProgram, 3, asks ? kSize : kSource},
        [&](XdrWriter& args) {
          if (asks) {
            args.EligibleOpaque(ConstBytes(arena_).subspan(i * 100, 5000 + i));
          } else {
            args.U32(static_cast<uint32_t>(5000 - i));
          }
        },
        options,
        [&over, asks, i, sink](const Outcome& outcome) {
          ++over;
          if (!asks) return ExpectData(outcome, Pattern(5000 - i), sink.data());
          ASSERT_TRUE(outcome.has_value()) << outcome.error().ToString();
          EXPECT_EQ(outcome->results().U32("size"), 5000 + i);
        });
  }
  ASSERT_TRUE(setting_->Until([&] { return over == 64; }));
  EXPECT_EQ(AtClient().registrations - before.registrations, 2u);
  EXPECT_EQ(client_->holdings().registered_memories, 2u);
}

// The last copy goes in mid-call.
TEST_F(RegisteredMemoryTest, MemoryThatIsGivenUpStaysWithItsCallsUntilTheirHandlersRun) {
  Start();
  bool owner_gone = false;
  const Counters before = AtClient();
  service_.hold_echoes = true;
  Refill(3);
  std::optional<Outcome> result;
  {
    const RegisteredMemory memory{arena_,
                                  std::shared_ptr<const void>(&arena_, [&](const void*) { owner_gone = true; })};
    Echo(*client_, memory, [&](Outcome outcome) {
      EXPECT_TRUE(owner_gone);
      EXPECT_EQ(AtClient().regions, before.regions);
      result.emplace(std::move(outcome));
    });
  }
  ASSERT_TRUE(setting_->Until([&] { return !service_.echoes.empty(); }));
  EXPECT_FALSE(owner_gone);
  EXPECT_EQ(AtClient().regions, before.regions + 1);
  service_.AnswerEchoes();
  ASSERT_TRUE(setting_->Until([&] { return result.has_value(); }));
  ExpectEchoed(*result);
}

TEST_F(RegisteredMemoryTest, CancelledCallLetsGoOfItsMemory) {
  Start();
  const Counters before = AtClient();
  service_.hold_echoes = true;
  std::optional<Outcome> result;
  const rpcrdma::CallId call = Echo(*client_, RegisteredMemory{arena_}, [&](Outcome outcome) {
    const Counters now = AtClient();
    EXPECT_EQ(now.regions, before.regions);
    EXPECT_EQ(now.window_binds - before.window_binds, 2u);
    EXPECT_EQ(now.local_invalidations - before.local_invalidations, 2u);
    result.emplace(std::move(outcome));
  });
  ASSERT_TRUE(setting_->Until([&] { return !service_.echoes.empty(); }));
  client_->Cancel(call);
  ASSERT_TRUE(setting_->Until([&] { return result.has_value(); }));
  EXPECT_EQ(result->error().kind, Kind::kCancelled);
}

TEST_F(RegisteredMemoryTest, ClientThatGoesLeavesTheMemoryToTheNext) {
  StartServer();
  const Counters idle = AtClient();
  client_ = NewClient();
  const RegisteredMemory memory{arena_};
  ExpectEcho(*client_, memory);
  service_.hold_echoes = true;
  std::optional<Outcome> result;
  Echo(*client_, memory, [&](Outcome outcome) { result.emplace(std::move(outcome)); });
  ASSERT_TRUE(setting_->Until([&] { return !service_.echoes.empty(); }));
  client_.reset();
  EXPECT_EQ(AtClient().regions, idle.regions);
  EXPECT_EQ(AtClient().windows, idle.windows);
  ASSERT_TRUE(setting_->Until([&] { return result.has_value(); }));
  EXPECT_EQ(result->error().kind, Kind::kClosed);
  service_.AnswerEchoes();

  client_ = NewClient();
  ExpectEcho(*client_, memory, 7);
  EXPECT_EQ(client_->stats().memory_registered, 1u);
}

TEST_F(RegisteredMemoryTest, EachConnectionOfASessionRegistersItAndTakesItAlong) {
  StartServer();
  const uint16_t port = server_->port();
  const Counters idle = AtClient();
  StartSession();
  RegisteredMemory memory{arena_};
  ExpectEcho(*session_, memory, 1);
  ExpectEcho(*session_, memory, 2);
  EXPECT_EQ(session_->stats().connections.memory_registered, 1u);
  const Counters connected = AtClient();

  // The server goes with a call in progress, which is sent again on the next connection.
  service_.hold_echoes = true;
  Refill(9);
  std::optional<Outcome> result;
  Echo(*session_, memory, [&](Outcome outcome) { result.emplace(std::move(outcome)); });
  ASSERT_TRUE(setting_->Until([&] { return !service_.echoes.empty(); }));
  server_.reset();
  service_.echoes.clear();
  ASSERT_TRUE(setting_->Until([&] { return session_->stats().lost == 1; }));
  EXPECT_EQ(AtClient().regions, idle.regions) << "registered in a domain that is gone";
  service_.hold_echoes = false;
  StartServer({}, port);
  ASSERT_TRUE(setting_->Until([&] { return result.has_value(); }));
  ExpectEchoed(*result);
  EXPECT_EQ(session_->stats().retransmissions, 1u);
  EXPECT_EQ(session_->stats().connections.memory_registered, 2u);
  EXPECT_EQ(session_->stats().connections.memory_reused, 8u);
  EXPECT_EQ(AtClient().regions, connected.regions);
  memory = {};
  EXPECT_EQ(AtClient().regions, connected.regions - 1);
  session_.reset();
  EXPECT_EQ(AtClient().regions, idle.regions);
}

TEST_F(RegisteredMemoryTest, SessionThatCannotConnectHoldsTheMemoryOfItsCalls) {
  StartServer();
  StartSession();
  server_.reset();
  bool owner_gone = false;
  std::optional<Outcome> result;
  CallOptions options;
  options.timeout = 100ms;
  options.registered_memory =
      RegisteredMemory{arena_, std::shared_ptr<const void>(&arena_, [&](const void*) { owner_gone = true; })};
  session_->Call(
      {kProgram, 3, kSize}, [&](XdrWriter& args) { args.EligibleOpaque(source()); }, options,
      [&](Outcome outcome) {
        EXPECT_TRUE(owner_gone);
        result.emplace(std::move(outcome));
      });
  options = {};
  setting_->For(10ms);
  EXPECT_FALSE(owner_gone);
  ASSERT_TRUE(setting_->Until([&] { return result.has_value(); }));
  EXPECT_EQ(result->error().kind, Kind::kNotConnected);
  EXPECT_FALSE(result->error().sent);
}

TEST_F(RegisteredMemoryTest, CallWhoseMemoryLiesElsewhereIsNotSent) {
  Start();
  StartSession();
  const MutableBytes all(arena_);
  const ConstBytes part = ConstBytes(all).first(5000);
  const RegisteredMemory most{all.first(190000)};
  const RegisteredMemory read_only = RegisteredMemory::ReadOnly(all);
  std::vector<std::byte> elsewhere(5000);
  struct Case {
    const char* what;
    RegisteredMemory memory;
    ConstBytes argument;
    MutableBytes buffer;
  };
  const Case cases[] = {
      {"argument elsewhere", most, elsewhere, all.first(6000)},
      {"argument ends behind it", most, ConstBytes(all).subspan(185001, 5000), all.first(6000)},
      {"short argument elsewhere, which would go inline", most, ConstBytes(elsewhere).first(8), all.first(6000)},
      {"buffer elsewhere", most, part, elsewhere},
      {"buffer ends behind it", most, part, all.subspan(180000, 10001)},
      {"buffer that must not be written", read_only, part, all.first(6000)},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(each.what);
    CallOptions options;
    options.registered_memory = each.memory;
    options.result_buffers = {each.buffer};
    const auto args = [&](XdrWriter& out) { out.EligibleOpaque(each.argument); };
    const std::optional<Outcome> by_client = CallOf(*client_, kEcho, args, options);
    const std::optional<Outcome> by_session = CallOf(*session_, kEcho, args, options);
    for (const auto* outcome : {&*by_client, &*by_session}) {
      ASSERT_FALSE(outcome->has_value());
      EXPECT_EQ(outcome->error().kind, Kind::kMemory);
      EXPECT_FALSE(outcome->error().sent);
      EXPECT_FALSE(outcome->error().connection_gone());
      EXPECT_NE(outcome->error().ToString().find("registered memory"), std::string::npos);
    }
  }
  EXPECT_EQ(service_.handled, 0u);
  EXPECT_EQ(client_->stats().calls, 0u);
  EXPECT_EQ(client_->outstanding(), 0u);
  EXPECT_EQ(session_->outstanding(), 0u);

  // What is only read may be read-only, and nothing lies nowhere.
  CallOptions options;
  options.registered_memory = read_only;
  const std::optional<Outcome> size = CallOf(
      *client_, kSize, [&](XdrWriter& out) { out.EligibleOpaque(part); }, options);
  EXPECT_TRUE(size->has_value());
  EXPECT_EQ(client_->stats().memory_reused, 1u);
  options.result_buffers = {MutableBytes()};
  EXPECT_TRUE(CallOf(
                  *client_, kEcho, [&](XdrWriter& out) { out.EligibleOpaque(ConstBytes()); }, options)
                  ->has_value());
}

TEST_F(RegisteredMemoryTest, WithoutWindowsEachCallRegistersItsPart) {
  Start({.memory_windows = false});
  const Counters before = AtClient();
  const RegisteredMemory memory{arena_};
  for (uint8_t i = 1; i <= 10; ++i) ExpectEcho(*client_, memory, i);
  const auto stats = client_->stats();
  EXPECT_EQ(stats.memory_registered, 0u);
  EXPECT_EQ(stats.memory_reused, 0u);
  EXPECT_EQ(stats.memory_not_reused, 20u);
  EXPECT_EQ(AtClient().registrations - before.registrations, 20u);
  EXPECT_EQ(AtClient().window_binds, before.window_binds);
  EXPECT_EQ(AtClient().regions, before.regions);
}

TEST_F(RegisteredMemoryTest, DeviceThatRefusesTheWholeIsAskedForPartsUntilTheNextConnection) {
  MemoryEvents events;
  Start({.trace = &events});
  emu::InjectionPlan& injections = *emu::World::Current().current_host().nic().injections();
  const RegisteredMemory memory{arena_};
  injections.Add(*emu::ParseInjectionRules("fail-registration"));
  const std::optional<Outcome> refused = CallOf(
      *client_, kEcho, [&](XdrWriter& args) { args.EligibleOpaque(source()); }, EchoOptions(memory));
  ASSERT_FALSE(refused->has_value());
  EXPECT_EQ(refused->error().kind, Kind::kMemory);
  EXPECT_FALSE(refused->error().sent);
  injections.End(emu::InjectionDepth::kDevice);
  ExpectEcho(*client_, memory, 2);
  EXPECT_EQ(client_->stats().memory_registered, 0u);
  EXPECT_EQ(client_->stats().memory_not_reused, 2u);
  EXPECT_EQ(client_->holdings().registered_memories, 0u);
  EXPECT_EQ(events.counts["memory.refused"], 1);
  client_.reset();
  client_ = NewClient({.trace = &events});
  ExpectEcho(*client_, memory, 3);
  EXPECT_EQ(client_->stats().memory_reused, 2u);
  EXPECT_EQ(events.counts["memory.registered"], 1);
  client_.reset();  // before the events
}

// A message that goes by chunk as a whole is the library's own memory; its eligible items are the program's.
TEST_F(RegisteredMemoryTest, CallsWithoutDirectPlacementUseItForTheirItems) {
  Start();
  const RegisteredMemory memory{arena_};
  Refill(5);
  CallOptions options = EchoOptions(memory);
  options.direct_placement = false;
  ExpectEchoed(*CallOf(
      *client_, kEcho, [&](XdrWriter& args) { args.EligibleOpaque(source()); }, options));
  EXPECT_EQ(client_->stats().calls_long, 1u);
  EXPECT_EQ(client_->stats().memory_reused, 1u);
}

TEST_F(RegisteredMemoryTest, ServerWritesManyResultsFromOneRegistration) {
  Start();
  std::vector<std::byte> pages = Pattern(kBytes + 1000, 17);
  service_.cache = RegisteredMemory::ReadOnly(pages);
  const auto expect_page = [&](uint32_t size) {
    CallOptions options;
    options.result_buffers = {sink()};
    std::fill(sink().begin(), sink().end(), std::byte{0});
    const std::optional<Outcome> outcome = CallOf(
        *client_, kSource, [&](XdrWriter& args) { args.U32(size); }, options);
    ExpectData(*outcome, ConstBytes(pages).subspan(100, size));
  };
  const Counters before = AtServer();
  for (uint32_t i = 0; i < 20; ++i) expect_page(kBytes - i);
  EXPECT_EQ(AtServer().registrations - before.registrations, 1u);
  auto stats = server_->stats().connections;
  EXPECT_EQ(stats.memory_registered, 1u);
  EXPECT_EQ(stats.memory_reused, 20u);
  EXPECT_EQ(stats.memory_not_reused, 0u);
  EXPECT_EQ(stats.registrations, 0u);
  EXPECT_EQ(server_->holdings().registered_memories, 1u);

  // From memory that is registered for each reply.
  const RegisteredMemory cache = std::exchange(service_.cache, {});
  CallOptions options;
  options.result_buffers = {sink()};
  ASSERT_TRUE(CallOf(
                  *client_, kSource, [&](XdrWriter& args) { args.U32(kBytes); }, options)
                  ->has_value());
  EXPECT_EQ(AtServer().registrations - before.registrations, 2u);

  // A second connection registers it as well, unless they share Receives and with them a domain.
  service_.cache = cache;
  client_ = NewClient();
  expect_page(kBytes);
  EXPECT_EQ(server_->stats().connections.memory_registered, 2u);
}

TEST_F(RegisteredMemoryTest, ConnectionsThatShareADomainShareTheRegistration) {
  StartServer({.shared_receives = 64});
  std::vector<std::byte> pages = Pattern(kBytes + 1000, 17);
  service_.cache = RegisteredMemory::ReadOnly(pages);
  const Counters before = AtServer();
  CallOptions options;
  options.result_buffers = {sink()};
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 3; ++i) {
    clients.push_back(NewClient());
    ASSERT_TRUE(CallOf(
                    *clients.back(), kSource, [&](XdrWriter& args) { args.U32(kBytes); }, options)
                    ->has_value());
  }
  // Not on iWARP: shared_receives.h.
  const uint64_t expected = Transport().type == IBV_TRANSPORT_IB ? 1 : 3;
  EXPECT_EQ(server_->stats().connections.memory_registered, expected);
  EXPECT_EQ(server_->holdings().registered_memories, expected);
  EXPECT_EQ(server_->stats().connections.memory_reused, 3u);
  clients.clear();
  ASSERT_TRUE(setting_->Until([&] { return server_->stats().clients == 0; }));
  EXPECT_EQ(server_->holdings().registered_memories, expected == 1 ? 1u : 0u) << "it lasts as long as its domain";
  service_.cache = {};
  EXPECT_EQ(server_->holdings().registered_memories, 0u);
  server_.reset();
  EXPECT_EQ(AtServer().regions, before.regions);
}

// The service gives its memory up with the reply; the last of it goes when the device has sent that.
TEST_F(RegisteredMemoryTest, ReplyHoldsTheMemoryItIsWrittenFrom) {
  Start();
  ASSERT_TRUE(CallOf(*client_, kNull, [](XdrWriter&) {}, {})->has_value());
  const Counters before = AtServer();
  auto pages = std::make_shared<std::vector<std::byte>>(Pattern(kBytes + 1000, 17));
  const std::vector<std::byte> expected = *pages;
  const std::weak_ptr<const void> alive = pages;
  const ConstBytes bytes = *pages;
  service_.cache = RegisteredMemory::ReadOnly(bytes, std::move(pages));
  service_.drop_cache = true;
  CallOptions options;
  options.result_buffers = {sink()};
  bool answered = false;
  client_->Call(
      {kProgram, 3, kSource}, [&](XdrWriter& args) { args.U32(kBytes); }, options,
      [&](const Outcome& outcome) {
        answered = true;
        ExpectData(outcome, ConstBytes(expected).subspan(100, kBytes));
      });
  ASSERT_TRUE(setting_->Until([&] { return service_.handled == 2; }));
  EXPECT_FALSE(service_.cache);
  EXPECT_FALSE(alive.expired());
  ASSERT_TRUE(setting_->Until([&] { return answered && alive.expired(); }));
  EXPECT_EQ(AtServer().regions, before.regions);
  EXPECT_EQ(server_->stats().connections.memory_reused, 1u);
}

TEST_F(RegisteredMemoryTest, ServerWhoseClientGoesInMidReplyLetsGo) {
  Start();
  const Counters before = AtServer();
  auto pages = std::make_shared<std::vector<std::byte>>(Pattern(1 << 20));
  const std::weak_ptr<const void> alive = pages;
  const ConstBytes bytes = *pages;
  service_.cache = RegisteredMemory::ReadOnly(bytes, std::move(pages));
  service_.drop_cache = true;
  std::vector<std::byte> room(1 << 20);
  CallOptions options;
  options.result_buffers = {MutableBytes(room)};
  client_->Call(
      {kProgram, 3, kSource}, [&](XdrWriter& args) { args.U32((1 << 20) - 100); }, options, [](Outcome) {});
  ASSERT_TRUE(setting_->Until([&] { return service_.handled == 1; }));
  client_.reset();
  ASSERT_TRUE(setting_->Until([&] { return server_->stats().clients == 0; }));
  EXPECT_TRUE(alive.expired());
  EXPECT_LT(AtServer().regions, before.regions);
}

TEST_F(RegisteredMemoryTest, ReplyWhoseResultLiesElsewhereFailsItsCall) {
  Start();
  const std::vector<std::byte> pages = Pattern(kBytes);
  const std::vector<std::byte> elsewhere = Pattern(100);
  service_.cache = RegisteredMemory::ReadOnly(pages);
  service_.outside = elsewhere;
  const std::optional<Outcome> outcome = CallOf(*client_, kSource, [](XdrWriter& args) { args.U32(100); }, {});
  ASSERT_FALSE(outcome->has_value());
  EXPECT_EQ(outcome->error().kind, Kind::kRpc);
  EXPECT_EQ(outcome->error().accept_stat, AcceptStat::kSystemErr);
  // None: copied, as without.
  service_.outside = {};
  service_.cache = {};
  EXPECT_TRUE(CallOf(*client_, kSource, [](XdrWriter& args) { args.U32(100); }, {})->has_value());
}

}  // namespace
}  // namespace stagecoach::e2e
