// What a server owes its clients together: calls that come again on another connection, limits, and its end.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "rpcrdma/api/client.h"
#include "rpcrdma/api/server.h"
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
using rpcrdma::ProcedureId;
using rpcrdma::Server;
using rpcrdma::ServerOptions;
using rpcrdma::XdrWriter;

// A second program, whose calls tests answer by themselves: an eligible argument, eight eligible results.
constexpr const char* kArguments[] = {"data"};
constexpr const char* kResults[] = {"a", "b", "c", "d", "e", "f", "g", "h"};
constexpr rpcrdma::ProcedureBinding kOtherProcedures[] = {
    {.number = 1, .name = "HOLD", .arguments = kArguments, .results = kResults, .reply_fixed = 4 * std::size(kResults)},
};
constexpr rpcrdma::Binding kOther = {
    .program = kProgram + 1, .version = 1, .name = "another", .procedures = kOtherProcedures};

class OtherService final : public rpcrdma::Service {
 public:
  uint32_t program() const override { return kProgram + 1; }
  rpcrdma::VersionRange versions() const override { return {1, 1}; }
  std::span<const rpcrdma::Binding> bindings() const override { return {&kOther, 1}; }
  void Handle(rpcrdma::Request request) override { held.push_back(std::move(request)); }

  std::vector<rpcrdma::Request> held;
};

class ServerTest : public ::testing::Test {
 protected:
  ~ServerTest() override {
    service_.held.clear();
    clients_.clear();
    server_.reset();
    setting_->For(1ms);
  }

  void StartServer(ServerOptions options = {}) {
    setting_->ActAsServer();
    options.trace = &trace_;
    if (options.shared_receives == 0) options.shared_receives = SharedReceivesByDefault();
    server_.emplace(setting_->loop(), options);
    server_->Register(&service_);
    const auto listening = server_->Listen(setting_->server_host(), 0);
    ASSERT_TRUE(listening.has_value()) << listening.error().ToString();
  }

  // A client whose calls have the XIDs from `first_xid` on. The same number again: as if it had come back and repeated
  // what it had called.
  Client& NewClient(uint32_t first_xid, ClientOptions options = {}) {
    setting_->ActAsClient();
    options.first_xid = first_xid;
    clients_.push_back(std::make_unique<Client>(setting_->loop(), options));
    for (const rpcrdma::Binding& binding : kBindings) clients_.back()->Register(binding);
    clients_.back()->Register(kOther);
    return *clients_.back();
  }
  Result<void, CallError> ConnectOf(Client& client) {
    setting_->ActAsClient();
    std::optional<Result<void, CallError>> result;
    client.Connect(setting_->server_host(), server_->port(),
                   [&](Result<void, CallError> connected) { result = std::move(connected); });
    EXPECT_TRUE(setting_->Until([&] { return result.has_value(); })) << "connecting hangs";
    return result.value_or(Result<void, CallError>());
  }
  Client& Connected(uint32_t first_xid, ClientOptions options = {}) {
    Client& client = NewClient(first_xid, options);
    const auto connected = ConnectOf(client);
    EXPECT_TRUE(connected.has_value()) << connected.error().ToString();
    return client;
  }

  Outcome Call(
      Client& client, Procedure procedure, Client::ArgsWriter args = [](XdrWriter&) {},
      const CallOptions& options = {}) {
    std::optional<Outcome> result;
    client.Call(Id(procedure), args, options, [&](Outcome outcome) { result.emplace(std::move(outcome)); });
    EXPECT_TRUE(setting_->Until([&] { return result.has_value(); })) << "a call hangs";
    if (!result) std::abort();  // the handler refers to this frame
    return std::move(*result);
  }
  Outcome Echo(Client& client, ConstBytes data, std::vector<std::byte>* room) {
    CallOptions options;
    if (room != nullptr) {
      options.result_buffers = {*room};
    } else {
      options.reply_bytes_max = static_cast<uint32_t>(data.size() + 100);
    }
    return Call(
        client, kEcho, [&](XdrWriter& args) { args.EligibleOpaque(data); }, options);
  }

  // A call that the service holds until the test says otherwise. Shared: its client may outlive the test's body.
  using Pending = std::shared_ptr<std::optional<Outcome>>;
  Pending Hold(Client& client, uint32_t number) {
    auto outcome = std::make_shared<std::optional<Outcome>>();
    client.Call(
        ProcedureId{kProgram, 3, kHold}, [&](XdrWriter& args) { args.U32(number); }, {},
        [outcome](Outcome result) { outcome->emplace(std::move(result)); });
    return outcome;
  }
  // Its connection goes, its work stays.
  void Lose(Client& client) {
    for (auto& each : clients_) {
      if (each.get() == &client) each.reset();
    }
    ASSERT_TRUE(setting_->Until([this, before = service_.clients] { return service_.clients < before; }));
  }

  rpcrdma::ReplayStats replay() { return server_->stats().replay; }
  bool Traced(std::string_view event) {
    for (const std::string& line : trace_.lines()) {
      if (line.find(" " + std::string(event)) != std::string::npos) return true;
    }
    return false;
  }

  TraceLog trace_;
  std::unique_ptr<Setting> setting_ = MakeSettingOfThisTest();
  TestService service_;
  std::optional<Server> server_;
  std::vector<std::unique_ptr<Client>> clients_;
};

// --- The duplicate request cache ---

TEST_F(ServerTest, ACallRepeatedOnAnotherConnectionIsNotExecutedAgain) {
  StartServer();
  const auto data = Pattern(700);
  for (int round = 0; round < 3; ++round) {
    Client& client = Connected(77);
    Outcome outcome = Echo(client, data, nullptr);
    ExpectData(outcome, data);
    Lose(client);
  }
  EXPECT_EQ(service_.handled, 1u);
  EXPECT_EQ(replay().replayed, 2u);
  EXPECT_EQ(replay().entries, 1u);
  EXPECT_EQ(server_->holdings().requests, 0u);
}

// The reply is kept without its framing: the second connection brings other chunks, or none.
// [traps:interop#19]
TEST_F(ServerTest, ARepeatedCallMayBringOtherChunks) {
  StartServer();
  const auto data = Pattern(3000);
  std::vector<std::byte> room(8000);
  struct Visit {
    uint32_t inline_threshold;
    bool write_chunk;
  };
  for (const Visit& visit : {Visit{4096, false}, Visit{1024, true}, Visit{1024, false}, Visit{4096, true}}) {
    Client& client = Connected(77, {.inline_threshold = visit.inline_threshold});
    Outcome outcome = Echo(client, data, visit.write_chunk ? &room : nullptr);
    ExpectData(outcome, data);
    Lose(client);
  }
  EXPECT_EQ(service_.handled, 1u);
  EXPECT_EQ(replay().replayed, 3u);
}

TEST_F(ServerTest, ARepeatedCallWithTooLittleRoomIsRefusedAndTheReplyStays) {
  StartServer();
  const auto data = Pattern(3000);
  {
    Client& client = Connected(77);
    Outcome outcome = Echo(client, data, nullptr);
    ExpectData(outcome, data);
    Lose(client);
  }
  {
    std::vector<std::byte> room(100);
    CallOptions options;
    options.result_buffers = {room};
    options.reply_bytes_max = 500;
    Client& client = Connected(77, {.inline_threshold = 1024});
    const Outcome outcome = Call(
        client, kEcho, [&](XdrWriter& args) { args.EligibleOpaque(data); }, options);
    ASSERT_FALSE(outcome.has_value());
    EXPECT_EQ(outcome.error().kind, CallError::Kind::kTransport) << outcome.error().ToString();
    Lose(client);
  }
  Client& client = Connected(77);
  Outcome outcome = Echo(client, data, nullptr);
  ExpectData(outcome, data);
  EXPECT_EQ(service_.handled, 1u);
}

TEST_F(ServerTest, TheReplyToACallInProgressGoesToItsNewestConnection) {
  StartServer();
  Client& first = Connected(77);
  Hold(first, 5);
  ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 1; }));
  Lose(first);
  const Pending second = Hold(Connected(77), 5);
  ASSERT_TRUE(setting_->Until([&] { return replay().joined == 1; }));
  const Pending third = Hold(Connected(77), 5);
  ASSERT_TRUE(setting_->Until([&] { return replay().joined == 2; }));
  EXPECT_EQ(service_.held.size(), 1u);
  service_.Answer(5);
  ASSERT_TRUE(setting_->Until([&] { return third->has_value(); }));
  ASSERT_TRUE((*third)->has_value()) << (*third)->error().ToString();
  EXPECT_EQ((**third)->results().U32("number"), 5u);
  EXPECT_FALSE(second->has_value());
  EXPECT_EQ(service_.handled, 1u);
  EXPECT_TRUE(Traced("replay.joined"));
  // Nothing is left of the call that was passed over.
  EXPECT_EQ(server_->DebugString().find("call xid"), std::string::npos) << server_->DebugString();
  EXPECT_EQ(server_->holdings().requests, 0u);
  EXPECT_EQ(replay().in_progress, 0u);
}

// The old connection is open still, as the server sees it, when the call comes again.
TEST_F(ServerTest, TheNewestConnectionIsAnsweredWhileTheOldOneLives) {
  StartServer();
  const Pending before = Hold(Connected(77), 5);
  ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 1; }));
  const Pending after = Hold(Connected(77), 5);
  ASSERT_TRUE(setting_->Until([&] { return replay().joined == 1; }));
  service_.Answer(5);
  ASSERT_TRUE(setting_->Until([&] { return after->has_value(); }));
  EXPECT_TRUE((*after)->has_value());
  EXPECT_FALSE(before->has_value());
  EXPECT_EQ(server_->DebugString().find("call xid"), std::string::npos) << server_->DebugString();
  EXPECT_EQ(server_->holdings().requests, 0u);
}

// A call that waits for one like it is in progress for a server that stops.
TEST_F(ServerTest, StoppingWaitsForTheAnswerToACallThatCameAgain) {
  StartServer();
  Client& first = Connected(77);
  Hold(first, 5);
  ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 1; }));
  Lose(first);
  const Pending again = Hold(Connected(77), 5);
  ASSERT_TRUE(setting_->Until([&] { return replay().joined == 1; }));
  bool stopped = false;
  server_->Stop(20s, [&] { stopped = true; });
  setting_->For(10ms);
  EXPECT_FALSE(stopped);
  service_.Answer(5);
  ASSERT_TRUE(setting_->Until([&] { return stopped && again->has_value(); }));
  EXPECT_TRUE((*again)->has_value()) << (*again)->error().ToString();
}

// A long answer, in the pool's memory of a connection that is gone, to the one that is there.
TEST_F(ServerTest, AReplyFromMemoryOfTheOldConnectionReachesTheNewOne) {
  StartServer();
  OtherService holder;
  server_->Register(&holder);
  const auto data = Pattern(200000);
  std::vector<std::byte> room(300000);
  CallOptions options;
  options.result_buffers = {room};
  const auto call = [&](Client& client) {
    auto outcome = std::make_shared<std::optional<Outcome>>();
    client.Call(
        ProcedureId{kProgram + 1, 1, 1}, [&](XdrWriter& args) { args.EligibleOpaque(data); }, options,
        [outcome](Outcome result) { outcome->emplace(std::move(result)); });
    return outcome;
  };
  Client& before = Connected(77);
  call(before);
  ASSERT_TRUE(setting_->Until([&] { return !holder.held.empty(); }));
  Lose(before);
  const Pending again = call(Connected(77));
  ASSERT_TRUE(setting_->Until([&] { return replay().joined == 1; }));
  // The arguments are those of the first call, whose connection is gone.
  const ConstBytes arguments = holder.held[0].args().EligibleOpaque("data", kDataMax);
  auto copy = holder.held[0].Allocate(arguments.size());
  ASSERT_TRUE(copy.has_value());
  CopyBytes(copy->bytes(), arguments);
  const ConstBytes result = copy->bytes();
  holder.held[0].Reply([&](XdrWriter& results) { results.EligibleOpaque(result); }, std::move(*copy));
  ASSERT_TRUE(setting_->Until([&] { return again->has_value(); }));
  ExpectData(**again, data);
  // It is too long to be kept.
  EXPECT_EQ(replay().not_kept, 1u);
  const Pending late = call(Connected(77));
  ASSERT_TRUE(setting_->Until([&] { return late->has_value(); }));
  ASSERT_FALSE((*late)->has_value());
  EXPECT_EQ((*late)->error().accept_stat, AcceptStat::kSystemErr) << (*late)->error().ToString();
  EXPECT_EQ(replay().unanswerable, 1u);
  // The result buffer is a local.
  clients_.clear();
  server_.reset();
}

// Nothing comes in from the device at that time.
TEST_F(ServerTest, ACallThatWaitsForMemoryGetsWhatAServiceLetsGoOfAtAnyTime) {
  // Room for the buffer or for the arguments, not for both.
  ServerOptions options;
  options.call_bytes_max = 256 << 10;
  options.client_bytes_max = 0;
  options.chunk_limits.read_segments_max = 4;
  StartServer(options);
  Client& client = Connected(77);
  const Pending held = Hold(client, 1);
  ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 1; }));
  auto buffer = service_.held.begin()->second.Allocate(200000);
  ASSERT_TRUE(buffer.has_value());
  service_.Answer(1);
  ASSERT_TRUE(setting_->Until([&] { return held->has_value(); }));

  const auto data = Pattern(100000);
  auto outcome = std::make_shared<std::optional<Outcome>>();
  client.Call(
      ProcedureId{kProgram, 3, kSize}, [&](XdrWriter& args) { args.EligibleOpaque(data); }, {},
      [outcome](Outcome result) { outcome->emplace(std::move(result)); });
  ASSERT_TRUE(setting_->Until([&] { return server_->DebugString().find("waiting for memory") != std::string::npos; }));
  setting_->For(10ms);
  EXPECT_FALSE(outcome->has_value());
  buffer.reset();
  ASSERT_TRUE(setting_->Until([&] { return outcome->has_value(); })) << server_->DebugString();
  EXPECT_TRUE((*outcome)->has_value()) << (*outcome)->error().ToString();
}

TEST_F(ServerTest, IdempotentProceduresAreExecutedEachTime) {
  StartServer();
  service_.repeatable = {kSize};
  const auto data = Pattern(100);
  for (int round = 0; round < 2; ++round) {
    Client& client = Connected(77);
    const Outcome outcome = Call(client, kSize, [&](XdrWriter& args) { args.EligibleOpaque(data); });
    EXPECT_TRUE(outcome.has_value());
    Lose(client);
  }
  EXPECT_EQ(service_.handled, 2u);
  EXPECT_EQ(replay().recorded, 0u);
}

TEST_F(ServerTest, OtherArgumentsUnderTheSameXidAreAnotherCall) {
  StartServer();
  for (const uint8_t seed : {1, 2}) {
    const auto data = Pattern(100000, seed);
    Client& client = Connected(77);
    std::vector<std::byte> room(100000);
    Outcome outcome = Echo(client, data, &room);
    ExpectData(outcome, data);
    Lose(client);
  }
  EXPECT_EQ(service_.handled, 2u);
  EXPECT_EQ(replay().replayed, 0u);
}

TEST_F(ServerTest, TheIdentityHookTellsClientsOfOneAddressApart) {
  StartServer({.replay_identity = [](const std::string& host, const rpcrdma::CallHeader& header) {
    return host + "/" + std::to_string(header.cred.flavor);
  }});
  rpcrdma::AuthSys sys{.machine_name = "one"};
  const auto credentials = rpcrdma::MakeAuthSys(sys);
  const auto data = Pattern(10);
  for (const bool named : {false, true, false, true}) {
    Client& client = Connected(77);
    CallOptions options;
    if (named) options.credentials = &*credentials;
    EXPECT_TRUE(Call(
                    client, kSize, [&](XdrWriter& args) { args.EligibleOpaque(data); }, options)
                    .has_value());
    Lose(client);
  }
  EXPECT_EQ(service_.handled, 2u);
  EXPECT_EQ(replay().replayed, 2u);
}

TEST_F(ServerTest, WithoutACacheEverythingIsExecuted) {
  StartServer({.replay = {.entries_max = 0}});
  const auto data = Pattern(10);
  for (int round = 0; round < 2; ++round) {
    Client& client = Connected(77);
    EXPECT_TRUE(Call(client, kSize, [&](XdrWriter& args) { args.EligibleOpaque(data); }).has_value());
    Lose(client);
  }
  EXPECT_EQ(service_.handled, 2u);
}

// --- Limits ---

TEST_F(ServerTest, ConnectionsOfOneAddressAreLimited) {
  StartServer({.address_connections_max = 2});
  Client& first = Connected(1000);
  Connected(2000);
  EXPECT_FALSE(ConnectOf(NewClient(3000)).has_value());
  EXPECT_EQ(server_->stats().clients_rejected, 1u);
  EXPECT_EQ(server_->stats().rejected.address_connections_max, 1u);
  EXPECT_TRUE(Traced("client.rejected")) << "and says why";
  Lose(first);
  // The server's end of it goes with the next turn of its loop.
  ASSERT_TRUE(setting_->Until([&] { return server_->holdings().connections < 2; }));
  Connected(4000);
}

// Each connection has one credit, so four calls come where two may be executed.
TEST_F(ServerTest, RequestsBeyondTheLimitOfAnAddressWaitTheirTurn) {
  StartServer({.address_requests_max = 2});
  std::vector<Pending> pending;
  for (uint32_t number = 0; number < 4; ++number) {
    pending.push_back(Hold(Connected(1000 * (number + 1)), number));
    ASSERT_TRUE(setting_->Until([&] { return server_->stats().connections.calls == number + 1; }));
  }
  EXPECT_EQ(service_.held.size(), 2u);
  EXPECT_EQ(server_->holdings().requests, 2u);
  EXPECT_EQ(server_->stats().requests_waited, 2u);
  EXPECT_TRUE(Traced("client.waits"));
  // In the order in which they came.
  service_.Answer(0);
  ASSERT_TRUE(setting_->Until([&] { return service_.held.contains(2); }));
  EXPECT_EQ(service_.held.size(), 2u);
  service_.Answer(2);
  ASSERT_TRUE(setting_->Until([&] { return service_.held.contains(3); }));
  service_.Answer(1);
  service_.Answer(3);
  for (const Pending& each : pending) {
    ASSERT_TRUE(setting_->Until([&] { return each->has_value(); }));
    EXPECT_TRUE((*each)->has_value());
  }
  EXPECT_EQ(server_->holdings().requests, 0u);
}

// One whose turn will not come does not keep the others from theirs.
TEST_F(ServerTest, AClientThatGoesLosesItsPlaceInTheQueue) {
  StartServer({.address_requests_max = 1});
  const Pending first = Hold(Connected(1000), 0);
  ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 1; }));
  Client& second = Connected(2000);
  Hold(second, 1);
  ASSERT_TRUE(setting_->Until([&] { return server_->stats().requests_waited == 1; }));
  const Pending third = Hold(Connected(3000), 2);
  ASSERT_TRUE(setting_->Until([&] { return server_->stats().requests_waited == 2; }));
  Lose(second);
  service_.Answer(0);
  ASSERT_TRUE(setting_->Until([&] { return service_.held.contains(2); }));
  EXPECT_EQ(service_.handled, 2u);
  service_.Answer(2);
  ASSERT_TRUE(setting_->Until([&] { return third->has_value(); }));
}

TEST_F(ServerTest, GrantsShrinkToTheShareOfAConnection) {
  StartServer({.credits = 16, .address_requests_max = 16});
  Client& first = Connected(1000);
  EXPECT_TRUE(Call(first, kNull).has_value());
  EXPECT_EQ(first.stats().credits_granted, 16u);
  Client& second = Connected(100000);
  EXPECT_TRUE(Call(first, kNull).has_value());
  EXPECT_EQ(first.stats().credits_granted, 8u);
  // What the first was promised comes back as its calls are answered.
  EXPECT_TRUE(Call(second, kNull).has_value());
  EXPECT_EQ(second.stats().credits_granted, 1u) << "never less";
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(Call(first, kNull).has_value());
  EXPECT_TRUE(Call(second, kNull).has_value());
  EXPECT_EQ(second.stats().credits_granted, 8u);
  Lose(second);
  EXPECT_TRUE(Call(first, kNull).has_value());
  EXPECT_EQ(first.stats().credits_granted, 16u);
}

// Four connections, and memory for one call at a time: all get theirs.
TEST_F(ServerTest, ConnectionsOfOneAddressShareItsMemory) {
  StartServer({.client_bytes_max = 1, .call_bytes_max = 4 << 20});
  const auto data = Pattern(3 << 20);
  std::vector<std::shared_ptr<std::optional<Outcome>>> outcomes;
  for (uint32_t i = 0; i < 4; ++i) {
    auto outcome = std::make_shared<std::optional<Outcome>>();
    Connected(1000 * (i + 1))
        .Call(
            ProcedureId{kProgram, 3, kSize}, [&](XdrWriter& args) { args.EligibleOpaque(data); }, {},
            [outcome](Outcome result) { outcome->emplace(std::move(result)); });
    outcomes.push_back(outcome);
  }
  for (const auto& outcome : outcomes) {
    ASSERT_TRUE(setting_->Until([&] { return outcome->has_value(); }));
    EXPECT_TRUE((*outcome)->has_value());
  }
  EXPECT_EQ(service_.handled, 4u);
}

TEST_F(ServerTest, AClientThatIsSilentForTooLongIsDisconnected) {
  // Longer than any machine takes from a connection to its first call.
  StartServer({.idle_timeout = 400ms});
  Client& busy = Connected(1000);
  const Pending held = Hold(busy, 1);
  Client& silent = Connected(2000);
  EXPECT_TRUE(Call(silent, kNull).has_value());
  ASSERT_TRUE(setting_->Until([&] { return !silent.connected(); }));
  EXPECT_TRUE(busy.connected()) << "who waits for an answer is not idle";
  EXPECT_EQ(server_->stats().clients_idle, 1u);
  EXPECT_TRUE(Traced("client.idle"));
  service_.Answer(1);
  ASSERT_TRUE(setting_->Until([&] { return held->has_value(); }));
  EXPECT_TRUE((*held)->has_value());
  ASSERT_TRUE(setting_->Until([&] { return !busy.connected(); }));
  EXPECT_EQ(server_->stats().clients_idle, 2u);
}

TEST_F(ServerTest, SpeakingKeepsAConnection) {
  StartServer({.idle_timeout = 200ms});
  Client& client = Connected(1000);
  for (int i = 0; i < 30; ++i) {
    ASSERT_TRUE(Call(client, kNull).has_value());
    setting_->For(10ms);
  }
  EXPECT_EQ(server_->stats().clients_idle, 0u);
}

// --- Shared Receives ---

// On iWARP each connection keeps Receives of its own.
class SharedReceivesTest : public ServerTest {
 protected:
  static bool Shared() { return Transport().type == IBV_TRANSPORT_IB; }
  // All are posted, and every client has what it was promised.
  void ExpectAllPosted() {
    const auto holdings = server_->holdings();
    EXPECT_EQ(holdings.shared_receives_posted, holdings.shared_receives);
    EXPECT_LE(holdings.shared_receives_reserved, holdings.shared_receives);
  }
};

TEST_F(SharedReceivesTest, ServeManyConnections) {
  StartServer({.credits = 16, .shared_receives = 32});
  std::vector<Pending> pending;
  std::vector<Client*> clients;
  for (uint32_t i = 0; i < 12; ++i) clients.push_back(&Connected(100000 * (i + 1)));
  uint32_t number = 0;
  for (int round = 0; round < 20; ++round) {
    for (Client* client : clients) pending.push_back(Hold(*client, number++));
  }
  const auto all_answered = [&] {
    while (!service_.held.empty()) service_.Answer(service_.held.begin()->first);
    return std::all_of(pending.begin(), pending.end(), [](const Pending& each) { return each->has_value(); });
  };
  size_t most = 0;
  ASSERT_TRUE(setting_->Until([&] {
    most = std::max(most, service_.held.size());
    const auto holdings = server_->holdings();
    EXPECT_LE(holdings.shared_receives_reserved, holdings.shared_receives);
    return all_answered();
  }));
  for (const Pending& each : pending) EXPECT_TRUE((*each)->has_value()) << (*each)->error().ToString();
  EXPECT_EQ(server_->holdings().shared_receives, Shared() ? 32u : 0u);
  EXPECT_TRUE(Traced(Shared() ? "receives.shared" : "receives.not_shared"));
  ExpectAllPosted();
  EXPECT_LE(most, Shared() ? 32u : 12u * 16u);
  for (Client* client : clients) {
    EXPECT_GE(client->stats().credits_granted, 1u);
    EXPECT_LE(client->stats().credits_granted, Shared() ? 32u / 12u : 16u);
  }
  clients_.clear();
  ASSERT_TRUE(setting_->Until([&] { return server_->stats().clients == 0; }));
  EXPECT_EQ(server_->holdings().shared_receives_reserved, 0u);
  ExpectAllPosted();
}

TEST_F(SharedReceivesTest, WhoCannotBePromisedOneIsRejected) {
  if (!Shared()) GTEST_SKIP() << "skipped: each connection has its own";
  StartServer({.shared_receives = 4});
  Client& first = Connected(1000);
  EXPECT_TRUE(Call(first, kNull).has_value());
  EXPECT_EQ(first.stats().credits_granted, 3u) << "one is for whoever comes";
  Connected(2000);
  auto refused = ConnectOf(NewClient(3000));
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().kind, CallError::Kind::kRejected);
  EXPECT_EQ(server_->stats().rejected.receives, 1u);
  // The first one's promise shrinks to its share as it is answered.
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(Call(first, kNull).has_value());
  EXPECT_EQ(first.stats().credits_granted, 2u);
  EXPECT_TRUE(Call(Connected(4000), kNull).has_value());
  Lose(first);
  Connected(5000);
  Connected(6000);
  EXPECT_EQ(server_->stats().clients_rejected, 1u);
}

// What a client that is gone has left with services holds its buffers, and no others.
TEST_F(SharedReceivesTest, AConnectionThatGoesReturnsItsReceives) {
  if (!Shared()) GTEST_SKIP() << "skipped: each connection has its own";
  StartServer({.credits = 8, .shared_receives = 16});
  for (uint32_t round = 0; round < 10; ++round) {
    Client& client = Connected(100000 * (round + 1));
    ASSERT_TRUE(Call(client, kNull).has_value());
    for (uint32_t i = 0; i < 8; ++i) Hold(client, i);
    ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 8; }));
    EXPECT_EQ(server_->holdings().shared_receives_posted, 8u);
    Lose(client);
    EXPECT_EQ(server_->holdings().shared_receives_reserved, 0u);
    EXPECT_EQ(server_->holdings().shared_receives_posted, 8u);
    for (uint32_t i = 0; i < 8; ++i) service_.Answer(i);
    ExpectAllPosted();
  }
}

TEST_F(SharedReceivesTest, TheServerMayGoBeforeItsRequests) {
  StartServer({.shared_receives = 16});
  const Pending outcome = Hold(Connected(1000), 7);
  ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 1; }));
  server_.reset();
  EXPECT_EQ(service_.held.begin()->second.procedure(), static_cast<uint32_t>(kHold));
  service_.Answer(7);
  ASSERT_TRUE(setting_->Until([&] { return outcome->has_value(); }));
}

// --- The end ---

// More RDMA Writes than the send queue holds, more replies than there are Send buffers: all are delivered first.
TEST_F(ServerTest, EveryReplyIsDeliveredBeforeTheServerIsGone) {
  OtherService collector;
  constexpr size_t kCalls = 64, kItems = std::size(kResults);
  StartServer({.credits = kCalls});
  server_->Register(&collector);
  Client& client = Connected(1000);
  ASSERT_TRUE(Call(client, kNull).has_value());
  const auto data = Pattern(2000);
  std::vector<std::vector<std::byte>> rooms(kCalls * kItems, std::vector<std::byte>(4096));
  size_t answered = 0, ended = 0;
  for (size_t i = 0; i < kCalls; ++i) {
    CallOptions options;
    for (size_t j = 0; j < kItems; ++j) options.result_buffers.push_back(rooms[i * kItems + j]);
    client.Call(
        ProcedureId{kProgram + 1, 1, 1}, [&](XdrWriter& args) { args.U32(static_cast<uint32_t>(i)); }, options,
        [&](Outcome outcome) {
          ++ended;
          answered += outcome.has_value() ? 1 : 0;
        });
  }
  ASSERT_TRUE(setting_->Until([&] { return collector.held.size() == kCalls; }));
  bool stopped = false;
  server_->Stop(20s, [&] { stopped = true; });
  for (rpcrdma::Request& request : collector.held) {
    request.Reply([&](XdrWriter& results) {
      for (size_t j = 0; j < kItems; ++j) results.EligibleOpaque(data);
    });
  }
  collector.held.clear();
  ASSERT_TRUE(setting_->Until([&] { return stopped && ended == kCalls; }));
  EXPECT_EQ(answered, kCalls);
  clients_.clear();
  server_.reset();
}

TEST_F(ServerTest, StoppedAgainItTellsBothAndTakesTheLaterGrace) {
  StartServer();
  const Pending held = Hold(Connected(1000), 1);
  ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 1; }));
  int first = 0, second = 0;
  server_->Stop(20s, [&] { ++first; });
  setting_->For(1ms);
  const Instant again = setting_->loop().Now();
  server_->Stop(10ms, [&] { ++second; });
  ASSERT_TRUE(setting_->Until([&] { return first + second == 2 && held->has_value(); }));
  EXPECT_EQ(first, 1);
  EXPECT_LT(setting_->loop().Now() - again, 15s);
  EXPECT_FALSE((*held)->has_value());
}

// What waits for the end, a coroutine for instance, is told of it.
TEST_F(ServerTest, DestroyedWhileStoppingItTellsAfterwards) {
  StartServer();
  const Pending held = Hold(Connected(1000), 1);
  ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 1; }));
  bool stopped = false;
  server_->Stop(20s, [&] { stopped = true; });
  setting_->For(1ms);
  EXPECT_FALSE(stopped);
  service_.held.clear();
  server_.reset();
  EXPECT_FALSE(stopped) << "a handler ran inside of the destructor";
  EXPECT_TRUE(setting_->Until([&] { return stopped && held->has_value(); }));
}

TEST_F(ServerTest, ListensOnce) {
  StartServer();
  const uint16_t port = server_->port();
  const auto again = server_->Listen(setting_->server_host(), 0);
  ASSERT_FALSE(again.has_value());
  EXPECT_NE(again.error().message.find("used already"), std::string::npos) << again.error().ToString();
  EXPECT_EQ(server_->port(), port);
  EXPECT_TRUE(Call(Connected(1000), kNull).has_value());
}

// Destroys its server when a client comes, or goes.
class FatalService final : public rpcrdma::Service {
 public:
  uint32_t program() const override { return kProgram + 2; }
  rpcrdma::VersionRange versions() const override { return {1, 1}; }
  void Handle(rpcrdma::Request) override {}
  void OnClientConnected(rpcrdma::ClientId, const std::string&) override {
    if (at_connect) server->reset();
  }
  void OnClientGone(rpcrdma::ClientId) override {
    if (!at_connect) server->reset();
  }

  std::optional<Server>* server = nullptr;
  bool at_connect = false;
};

TEST_F(ServerTest, WhoIsToldOfAClientMayDestroyTheServer) {
  for (const bool at_connect : {true, false}) {
    FatalService fatal;
    fatal.server = &server_;
    fatal.at_connect = at_connect;
    StartServer();
    server_->Register(&fatal);
    Client& client = NewClient(1000);
    ConnectOf(client);
    if (!at_connect) client.Close(nullptr);
    ASSERT_TRUE(setting_->Until([&] { return !server_.has_value() && !client.connected(); }));
    clients_.clear();
  }
}

TEST_F(ServerTest, CallsThatComeWhileItStopsAreNotExecutedAndTheirClientCanTell) {
  StartServer();
  Client& client = Connected(1000);
  ASSERT_TRUE(Call(client, kNull).has_value());
  const Pending before = Hold(client, 1);
  ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 1; }));
  bool stopped = false;
  server_->Stop(20s, [&] { stopped = true; });
  const Pending during = Hold(client, 2);
  ASSERT_TRUE(setting_->Until([&] { return server_->stats().connections.calls == 3; }));
  // Who comes only now finds nobody.
  const auto refused = ConnectOf(NewClient(2000));
  EXPECT_FALSE(refused.has_value());
  EXPECT_FALSE(stopped);
  service_.Answer(1);
  ASSERT_TRUE(setting_->Until([&] { return stopped && before->has_value() && during->has_value(); }));
  EXPECT_TRUE((*before)->has_value());
  ASSERT_FALSE((*during)->has_value());
  EXPECT_EQ((*during)->error().kind, CallError::Kind::kConnectionLost);
  EXPECT_EQ(service_.handled, 2u);
}

// Who held a request and lets go of it after the server is gone must not touch the server's records.
TEST_F(ServerTest, RecordsEndWithTheServer) {
  StartServer();
  const Pending outcome = Hold(Connected(77), 5);
  ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 1; }));
  server_.reset();
  service_.Answer(5);
  ASSERT_TRUE(setting_->Until([&] { return outcome->has_value(); }));
  EXPECT_EQ((*outcome)->error().kind, CallError::Kind::kConnectionLost);
}

TEST_F(ServerTest, TheTraceSaysWhatNoServiceHearsOfAndWhatCouldNotBeReached) {
  StartServer();
  std::optional<Outcome> outcome;
  Connected(77).Call(
      ProcedureId{kProgram + 7, 1, 0}, [](XdrWriter&) {}, {},
      [&](Outcome result) { outcome.emplace(std::move(result)); });
  ASSERT_TRUE(setting_->Until([&] { return outcome.has_value(); }));
  EXPECT_TRUE(Traced("call.not_served"));

  const uint16_t port = server_->port();
  server_.reset();
  setting_->ActAsClient();
  Client late(setting_->loop(), {.first_xid = 1, .trace = &trace_});
  std::optional<bool> connected;
  late.Connect(setting_->server_host(), port, [&](Result<void, CallError> result) { connected = result.has_value(); });
  ASSERT_TRUE(setting_->Until([&] { return connected.has_value(); }));
  EXPECT_FALSE(*connected);
  EXPECT_TRUE(Traced("connect.failed"));
}

}  // namespace
}  // namespace stagecoach::e2e
