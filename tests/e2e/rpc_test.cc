// RPC end to end through the public API and the stock verbs API, in whichever setting it is linked with.
#include <gtest/gtest.h>

#include <asio/awaitable.hpp>
#include <asio/bind_cancellation_slot.hpp>
#include <asio/cancellation_signal.hpp>
#include <asio/co_spawn.hpp>
#include <asio/detached.hpp>
#include <asio/use_awaitable.hpp>
#include <asio/use_future.hpp>
#include <future>
#include <optional>

#include "rpcrdma/api/client.h"
#include "rpcrdma/api/server.h"
#include "rpcrdma/loop/loop_context.h"
#include "tests/e2e/outcome.h"
#include "tests/e2e/raw_peer.h"
#include "tests/e2e/setting.h"
#include "tests/e2e/test_service.h"

namespace stagecoach::e2e {
namespace {

using rpcrdma::AcceptStat;
using rpcrdma::AuthStat;
using rpcrdma::CallError;
using rpcrdma::CallOptions;
using rpcrdma::Client;
using rpcrdma::ClientOptions;
using rpcrdma::ProcedureId;
using rpcrdma::Server;
using rpcrdma::ServerOptions;
using rpcrdma::XdrReader;
using rpcrdma::XdrWriter;

rpcrdma::OpaqueAuth Flavored(uint32_t flavor, ConstBytes body) {
  rpcrdma::OpaqueAuth auth{.flavor = flavor};
  auth.body.append(body);
  return auth;
}

class RpcTest : public ::testing::Test {
 protected:
  ~RpcTest() override {
    // Objects of the API before the world they live in; what they posted is run.
    service_.held.clear();
    client_.reset();
    server_.reset();
    setting_->For(1ms);
  }

  void StartServer(ServerOptions options = {}) {
    setting_->ActAsServer();
    if (options.shared_receives == 0) options.shared_receives = SharedReceivesByDefault();
    server_.emplace(setting_->loop(), options);
    server_->Register(&service_);
    const auto listening = server_->Listen(setting_->server_host(), 0);
    ASSERT_TRUE(listening.has_value()) << listening.error().ToString();
    ASSERT_NE(server_->port(), 0);
  }

  Result<void, CallError> ConnectTo(Client& client, uint16_t port) {
    setting_->ActAsClient();
    std::optional<Result<void, CallError>> result;
    client.Connect(setting_->server_host(), port,
                   [&](Result<void, CallError> connected) { result = std::move(connected); });
    EXPECT_FALSE(result.has_value()) << "a handler ran inside the call that started it";
    EXPECT_TRUE(setting_->Until([&] { return result.has_value(); })) << "connecting hangs";
    return result.value_or(Result<void, CallError>());
  }
  std::unique_ptr<Client> NewClient(ClientOptions options = {}, bool bound = true) {
    setting_->ActAsClient();
    // The server would take what one client sends for what another has sent before.
    options.first_xid = next_xid_;
    next_xid_ += 1u << 16;
    auto client = std::make_unique<Client>(setting_->loop(), options);
    if (!bound) return client;
    for (const rpcrdma::Binding& binding : kBindings) client->Register(binding);
    return client;
  }
  void Start(ServerOptions server = {}, ClientOptions client = {}) {
    StartServer(server);
    client_ = NewClient(client);
    const auto connected = ConnectTo(*client_, server_->port());
    ASSERT_TRUE(connected.has_value()) << connected.error().ToString();
  }

  // Until the first reply there is one credit: has the server's grant in before calls that are not answered at once.
  void StartWarm(ServerOptions server = {}) {
    Start(server);
    ASSERT_TRUE(Call(kNull).has_value());
  }

  // Runs one call to its end.
  Outcome Call(
      Procedure procedure, Client::ArgsWriter args = [](XdrWriter&) {}, const CallOptions& options = {}) {
    return CallAs(Id(procedure), args, options);
  }
  Outcome CallAs(const ProcedureId& procedure, Client::ArgsWriter args, const CallOptions& options) {
    std::optional<Outcome> result;
    client_->Call(procedure, args, options, [&](Outcome outcome) { result.emplace(std::move(outcome)); });
    EXPECT_FALSE(result.has_value()) << "a handler ran inside the call that started it";
    EXPECT_TRUE(setting_->Until([&] { return result.has_value(); })) << "a call hangs";
    if (!result) std::abort();  // the handler refers to this frame
    return std::move(*result);
  }

  // Calls kEcho with `size` bytes and checks that they come back.
  void ExpectEcho(size_t size, size_t room) {
    const auto data = Pattern(size, static_cast<uint8_t>(size));
    std::vector<std::byte> sink(room);
    CallOptions options;
    options.result_buffers = {sink};
    const Outcome outcome = Call(
        kEcho, [&](XdrWriter& args) { args.EligibleOpaque(data); }, options);
    ExpectData(outcome, data, sink.data());
  }

  void AsyncHold(uint32_t number, std::map<uint32_t, Outcome>* outcomes, CallOptions options = {}) {
    ids_[number] = client_->Call(
        Id(kHold), [&](XdrWriter& args) { args.U32(number); }, options,
        [number, outcomes](Outcome outcome) { outcomes->emplace(number, std::move(outcome)); });
  }

  std::unique_ptr<Setting> setting_ = MakeSettingOfThisTest();
  TestService service_;
  std::optional<Server> server_;
  std::unique_ptr<Client> client_;
  std::map<uint32_t, rpcrdma::CallId> ids_;
  uint32_t next_xid_ = 1;
};

TEST_F(RpcTest, NullIsAnsweredInline) {
  Start();
  for (int i = 0; i < 100; ++i) {
    const Outcome outcome = Call(kNull);
    ASSERT_TRUE(outcome.has_value()) << outcome.error().ToString();
    EXPECT_TRUE(outcome->results().Finish().has_value());
  }
  const auto stats = client_->stats();
  EXPECT_EQ(stats.calls, 100u);
  EXPECT_EQ(stats.calls_inline, 100u);
  EXPECT_EQ(stats.registrations, 0u);
  EXPECT_EQ(stats.credits_granted, 64u);
  EXPECT_EQ(service_.clients, 1);
  EXPECT_EQ(server_->stats().connections.calls_inline, 100u);
}

TEST_F(RpcTest, TheServiceSeesTheCredentialsOfEachCall) {
  Start();
  rpcrdma::AuthSys sys{.stamp = 0xdeadbeef, .machine_name = "client.example", .uid = 1000, .gid = 100};
  for (uint32_t gid = 0; gid < rpcrdma::kAuthSysGidsMax; ++gid) sys.gids.push_back(0xfffffff0 + gid);
  const auto credentials = rpcrdma::MakeAuthSys(sys);
  ASSERT_TRUE(credentials.has_value());
  CallOptions options;
  options.credentials = &*credentials;
  // With an inline call, and with one whose arguments leave the message for a chunk.
  const auto data = Pattern(100000);
  ASSERT_TRUE(Call(
                  kNull, [](XdrWriter&) {}, options)
                  .has_value());
  EXPECT_EQ(service_.last_call.cred, *credentials);
  ASSERT_TRUE(Call(
                  kSize, [&](XdrWriter& args) { args.EligibleOpaque(data); }, options)
                  .has_value());
  EXPECT_EQ(service_.last_call.cred, *credentials);
  EXPECT_EQ(service_.last_call.verf, rpcrdma::AuthNone());
  const auto parsed = rpcrdma::ParseAuthSys(service_.last_call.cred);
  ASSERT_TRUE(parsed.has_value());
  EXPECT_EQ(*parsed, sys);
  EXPECT_EQ(client_->stats().calls_by_read_chunk, 1u);
  // The next call is another's.
  ASSERT_TRUE(Call(kNull).has_value());
  EXPECT_EQ(service_.last_call.cred, rpcrdma::AuthNone());
}

TEST_F(RpcTest, DataOfEverySizeComesBackUnchanged) {
  Start();
  for (const size_t size : {size_t{0}, size_t{1}, size_t{3}, size_t{100}, size_t{1000}, size_t{3800}, size_t{3999},
                            size_t{4096}, size_t{5001}, size_t{65536}, size_t{1000003}}) {
    SCOPED_TRACE(size);
    ExpectEcho(size, size + 8);
  }
  const auto stats = client_->stats();
  EXPECT_GT(stats.calls_by_read_chunk, 0u);
  EXPECT_GT(stats.calls_by_write_chunk, 0u);
  EXPECT_EQ(stats.invalidations_local + stats.invalidations_remote, stats.registrations);
  EXPECT_EQ(server_->stats().connections.bytes_placed_by_read, stats.bytes_placed_by_read);
}

TEST_F(RpcTest, ArgumentsTravelByReadChunk) {
  Start();
  const auto data = Pattern(1 << 20);
  const Outcome outcome = Call(kSize, [&](XdrWriter& args) { args.EligibleOpaque(data); });
  ASSERT_TRUE(outcome.has_value()) << outcome.error().ToString();
  EXPECT_EQ(outcome->results().U32("size"), data.size());
  EXPECT_EQ(client_->stats().calls_by_read_chunk, 1u);
  EXPECT_EQ(server_->stats().connections.bytes_placed_by_read, data.size());
}

TEST_F(RpcTest, ResultsTravelByWriteChunkIntoTheCallersBuffer) {
  Start();
  std::vector<std::byte> sink(1 << 20);
  CallOptions options;
  options.result_buffers = {sink};
  const Outcome outcome = Call(
      kSource, [](XdrWriter& args) { args.U32(900001); }, options);
  ASSERT_TRUE(outcome.has_value()) << outcome.error().ToString();
  XdrReader results = outcome->results();
  EXPECT_EQ(results.EligibleOpaque("data", kDataMax).data(), sink.data());
  EXPECT_GE(outcome->placed_bytes(0), 900001u);
  EXPECT_EQ(ToHex(ConstBytes(sink).first(900001)), ToHex(Pattern(900001)));
  EXPECT_EQ(client_->stats().calls_by_write_chunk, 1u);
}

TEST_F(RpcTest, LongMessagesTravelBothWays) {
  Start();
  std::vector<uint32_t> words(20000);
  for (uint32_t i = 0; i < words.size(); ++i) words[i] = i * 3;
  // How long the reply can be is for the Binding to say.
  const Outcome outcome = Call(kWords, [&](XdrWriter& args) {
    args.U32(static_cast<uint32_t>(words.size()));
    for (const uint32_t word : words) args.U32(word);
  });
  ASSERT_TRUE(outcome.has_value()) << outcome.error().ToString();
  XdrReader results = outcome->results();
  ASSERT_EQ(results.Count("words", 100000, 4), words.size());
  for (const uint32_t word : words) ASSERT_EQ(results.U32("word"), word);
  EXPECT_EQ(client_->stats().calls_long, 1u);
  EXPECT_EQ(client_->stats().replies_long, 1u);
}

// Both directions of one program, with its Binding at both ends, at one end, and at neither: the data comes through
// every time, and is placed only where the Binding of that end lists it.
TEST_F(RpcTest, OnlyWhatTheBindingListsIsPlacedDirectly) {
  StartServer();
  UnboundService unbound;
  setting_->ActAsServer();
  Server unbound_server(setting_->loop(), {.name = "unbound"});
  unbound_server.Register(&unbound);
  ASSERT_TRUE(unbound_server.Listen(setting_->server_host(), 0).has_value());
  for (const bool client_bound : {true, false}) {
    for (Server* server : {&*server_, &unbound_server}) {
      const bool server_bound = server == &*server_;
      SCOPED_TRACE((client_bound ? "client bound, " : "client not bound, ") +
                   std::string(server_bound ? "server bound" : "server not bound"));
      setting_->ActAsClient();
      client_ = NewClient({}, client_bound);
      ASSERT_TRUE(ConnectTo(*client_, server->port()).has_value());
      const auto before = server->stats().connections;

      // An argument: 50,001 bytes.
      const auto data = Pattern(50001);
      const Outcome size = Call(kSize, [&](XdrWriter& args) { args.EligibleOpaque(data); });
      const auto sent = server->stats().connections;
      EXPECT_EQ(sent.calls_by_read_chunk - before.calls_by_read_chunk, client_bound ? 1u : 0u);
      EXPECT_EQ(sent.calls_long - before.calls_long, client_bound ? 0u : 1u);
      if (client_bound && !server_bound) {
        // [5666bis:6.1#2] A chunk for what is no eligible argument to this server.
        ASSERT_FALSE(size.has_value());
        EXPECT_EQ(size.error().kind, CallError::Kind::kRpc);
        EXPECT_EQ(size.error().accept_stat, AcceptStat::kGarbageArgs);
      } else {
        ASSERT_TRUE(size.has_value()) << size.error().ToString();
        EXPECT_EQ(size->results().U32("size"), data.size());
      }

      // A result: 70,003 bytes into a buffer.
      std::vector<std::byte> sink(80000);
      CallOptions options;
      options.result_buffers = {sink};
      if (client_bound && !server_bound)
        options.reply_bytes_max = 100000;  // room for the result beside its Write chunk
      const Outcome source = Call(
          kSource, [](XdrWriter& args) { args.U32(70003); }, options);
      ASSERT_TRUE(source.has_value()) << source.error().ToString();
      const bool placed = client_bound && server_bound;
      EXPECT_EQ(source->placed_bytes(0), placed ? 70003u : 0u);
      ExpectData(source, Pattern(70003), sink.data());
      const auto stats = client_->stats();
      EXPECT_EQ(stats.calls_by_write_chunk, client_bound ? 1u : 0u);
      EXPECT_EQ(stats.replies_long, placed ? 0u : 1u);
    }
  }
  client_.reset();
}

// The codec marks two arguments, and the Binding lists the first.
TEST_F(RpcTest, ItemsBeyondThoseOfTheBindingStayInTheMessage) {
  Start();
  const auto small = Pattern(10);
  const auto large = Pattern(20001);
  const auto join = [&](const std::vector<std::byte>& first, const std::vector<std::byte>& second) {
    return Call(kJoin, [&](XdrWriter& args) {
      args.EligibleOpaque(first);
      args.EligibleOpaque(second);
    });
  };
  const Outcome by_chunk = join(large, small);
  ASSERT_TRUE(by_chunk.has_value()) << by_chunk.error().ToString();
  EXPECT_EQ(by_chunk->results().U64("sizes"), (uint64_t{20001} << 32) + 10);
  EXPECT_EQ(client_->stats().calls_by_read_chunk, 1u);
  EXPECT_EQ(client_->stats().calls_long, 0u);
  const Outcome in_the_message = join(small, large);
  ASSERT_TRUE(in_the_message.has_value()) << in_the_message.error().ToString();
  EXPECT_EQ(in_the_message->results().U64("sizes"), (uint64_t{10} << 32) + 20001);
  // Of a long call the first leaves in any case.
  EXPECT_EQ(client_->stats().bytes_placed_by_read, 20001u + 10u);
  EXPECT_EQ(client_->stats().calls_long, 1u);

  // A client whose Binding lists both: one chunk, as many as the server's Binding allows, but for the second.
  static constexpr rpcrdma::ProcedureBinding kBoth[] = {
      {.number = kJoin, .name = "JOIN", .arguments = kFirstAndSecond, .reply_fixed = 8}};
  static constexpr rpcrdma::Binding kOther{.program = kProgram, .version = 3, .name = "other", .procedures = kBoth};
  client_->Register(kOther);
  const Outcome refused = join(small, large);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().kind, CallError::Kind::kRpc);
  EXPECT_EQ(refused.error().accept_stat, AcceptStat::kGarbageArgs);
  EXPECT_TRUE(join(small, small).has_value());
}

TEST_F(RpcTest, ReplyThatFitsNowhereIsAnErrorAndTheConnectionStays) {
  Start();
  const auto words = [](XdrWriter& args) {
    args.U32(2000);
    for (uint32_t i = 0; i < 2000; ++i) args.U32(i);
  };
  CallOptions short_reply;
  short_reply.reply_bytes_max = 512;
  const Outcome outcome = Call(kWords, words, short_reply);
  ASSERT_FALSE(outcome.has_value());
  EXPECT_EQ(outcome.error().kind, CallError::Kind::kTransport);
  EXPECT_NE(outcome.error().ToString().find("ERR_CHUNK"), std::string::npos);
  std::vector<std::byte> small(5000);
  CallOptions options;
  options.result_buffers = {small};
  EXPECT_EQ(Call(
                kSource, [](XdrWriter& args) { args.U32(5001); }, options)
                .error()
                .kind,
            CallError::Kind::kTransport);
  EXPECT_TRUE(Call(kNull).has_value());
}

TEST_F(RpcTest, ManyCallsWaitTheirTurnUnderFewCredits) {
  Start({.credits = 2}, {.credits = 3});
  size_t answered = 0;
  const auto data = Pattern(20000);
  std::vector<std::vector<std::byte>> sinks(150, std::vector<std::byte>(20000));
  for (auto& sink : sinks) {
    CallOptions options;
    options.result_buffers = {sink};
    client_->Call(
        Id(kEcho), [&](XdrWriter& args) { args.EligibleOpaque(data); }, options,
        [&](Outcome outcome) {
          EXPECT_TRUE(outcome.has_value()) << outcome.error().ToString();
          ++answered;
        });
  }
  EXPECT_EQ(client_->outstanding(), 150u);
  ASSERT_TRUE(setting_->Until([&] { return answered == 150; }));
  for (const auto& sink : sinks) EXPECT_EQ(sink, data);
  EXPECT_EQ(client_->stats().credits_granted, 2u);
}

TEST_F(RpcTest, BigCallsShareTheMemoryAClientMayHave) {
  Start({.client_bytes_max = 3 << 20, .call_bytes_max = 1 << 20});
  size_t answered = 0;
  const auto data = Pattern(1 << 20);
  for (int i = 0; i < 20; ++i) {
    client_->Call(
        Id(kSize), [&](XdrWriter& args) { args.EligibleOpaque(data); }, {},
        [&](Outcome outcome) {
          EXPECT_TRUE(outcome.has_value()) << outcome.error().ToString();
          ++answered;
        });
  }
  ASSERT_TRUE(setting_->Until([&] { return answered == 20; }));
  const auto too_much = Pattern((1 << 20) + 1);
  EXPECT_EQ(Call(kSize, [&](XdrWriter& args) { args.EligibleOpaque(too_much); }).error().kind,
            CallError::Kind::kTransport);
}

TEST_F(RpcTest, AnswersMayComeLaterAndInAnyOrder) {
  StartWarm();
  std::map<uint32_t, Outcome> outcomes;
  for (uint32_t number : {1, 2, 3}) AsyncHold(number, &outcomes);
  ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 3; }));
  service_.Answer(2);
  ASSERT_TRUE(setting_->Until([&] { return outcomes.size() == 1; }));
  EXPECT_EQ(outcomes.count(2), 1u);
  service_.Answer(3);
  service_.Answer(1);
  ASSERT_TRUE(setting_->Until([&] { return outcomes.size() == 3; }));
  for (auto& [number, outcome] : outcomes) {
    ASSERT_TRUE(outcome.has_value());
    EXPECT_EQ(outcome->results().U32("number"), number);
  }
}

TEST_F(RpcTest, RequestLetGoOfIsAnsweredWithSystemErr) {
  Start();
  std::map<uint32_t, Outcome> outcomes;
  AsyncHold(1, &outcomes);
  ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 1; }));
  service_.held.clear();
  ASSERT_TRUE(setting_->Until([&] { return outcomes.size() == 1; }));
  EXPECT_EQ(outcomes.at(1).error().accept_stat, AcceptStat::kSystemErr);
}

TEST_F(RpcTest, RpcRefusalsSayWhatIsThere) {
  Start();
  Outcome outcome = CallAs({kProgram, 9, 0}, [](XdrWriter&) {}, {});
  ASSERT_FALSE(outcome.has_value());
  EXPECT_EQ(outcome.error().ToString(),
            "RPC: program " + std::to_string(kProgram) + " version 9 not available (server has 3 to 4)");
  EXPECT_EQ(outcome.error().versions.high, 4u);
  outcome = CallAs({100003, 3, 0}, [](XdrWriter&) {}, {});
  EXPECT_EQ(outcome.error().ToString(), "RPC: program 100003 not available");
  EXPECT_EQ(outcome.error().accept_stat, AcceptStat::kProgUnavail);
  EXPECT_EQ(CallAs({kProgram, 3, 77}, [](XdrWriter&) {}, {}).error().accept_stat, AcceptStat::kProcUnavail);
  EXPECT_EQ(Call(kSource).error().accept_stat, AcceptStat::kGarbageArgs);
  EXPECT_TRUE(Call(kNull).has_value());
}

// A call that is denied is over: nothing of it was executed or recorded, and nothing of it is held.
TEST_F(RpcTest, CredentialsThatAreNotTakenAreDenied) {
  const rpcrdma::OpaqueAuth sys = *rpcrdma::MakeAuthSys({.machine_name = "client", .uid = 7, .gid = 8});
  rpcrdma::OpaqueAuth longer = sys;
  longer.body.append(std::vector<std::byte>(4));
  struct Case {
    rpcrdma::OpaqueAuth credentials;
    AuthStat stat;
    const char* name;
  };
  const std::vector<Case> cases = {
      // RPCSEC_GSS_INIT of RFC 2203: version 1, its procedure, sequence number 0, service 1, no handle.
      {Flavored(6, Words({1, 1, 0, 1, 0})), AuthStat::kRejectedCred, "AUTH_REJECTEDCRED"},
      {Flavored(2, Words({1, 2})), AuthStat::kRejectedCred, "AUTH_REJECTEDCRED"},
      {Flavored(390003, {}), AuthStat::kRejectedCred, "AUTH_REJECTEDCRED"},
      {Flavored(1, {}), AuthStat::kBadCred, "AUTH_BADCRED"},
      {longer, AuthStat::kBadCred, "AUTH_BADCRED"},
      {Flavored(0, std::vector<std::byte>(404)), AuthStat::kBadCred, "AUTH_BADCRED"},
      {Flavored(1, std::vector<std::byte>(404)), AuthStat::kBadCred, "AUTH_BADCRED"},
      {Flavored(6, std::vector<std::byte>(404)), AuthStat::kBadCred, "AUTH_BADCRED"},
  };
  for (const rpcrdma::TransportVersions versions : {rpcrdma::kVersion1Alone, rpcrdma::kVersion2Alone}) {
    Start({.credits = 4, .versions = versions}, {.versions = versions});
    const auto data = Pattern(100000);
    const auto take = [&] {
      CallOptions options;
      options.credentials = &sys;
      const Outcome outcome = Call(
          kSize, [&](XdrWriter& args) { args.EligibleOpaque(data); }, options);
      EXPECT_TRUE(outcome.has_value()) << outcome.error().ToString();
    };
    take();
    const uint64_t answered = server_->stats().connections.replies;
    const uint64_t pool = server_->holdings().pool_bytes;  // what the connection keeps for the next call
    for (int round = 0; round < 8; ++round) {
      for (const Case& each : cases) {
        CallOptions options;
        options.credentials = &each.credentials;
        const Outcome outcome = Call(
            kSize, [&](XdrWriter& args) { args.EligibleOpaque(data); }, options);
        ASSERT_FALSE(outcome.has_value()) << each.credentials.flavor;
        EXPECT_EQ(outcome.error().kind, CallError::Kind::kDenied) << outcome.error().ToString();
        EXPECT_EQ(outcome.error().auth_stat, each.stat) << each.credentials.flavor;
        EXPECT_EQ(outcome.error().ToString(),
                  "RPC: " + setting_->HostPort(server_->port()) + " denied the call: " + each.name);
      }
    }
    EXPECT_EQ(service_.handled, 1u);
    EXPECT_EQ(server_->stats().replay.recorded, 1u);
    EXPECT_EQ(server_->holdings().requests, 0u);
    EXPECT_EQ(server_->stats().connections.replies, answered + 8 * cases.size()) << "each was answered";
    take();
    EXPECT_EQ(service_.handled, 2u);
    EXPECT_EQ(server_->holdings().pool_bytes, pool) << "their arguments are not kept";
    service_.handled = 0;
    client_.reset();
    server_.reset();
    setting_->For(1ms);
  }
}

TEST_F(RpcTest, AServiceSaysWhichCredentialsItTakes) {
  service_.taken = {rpcrdma::AuthFlavor::kSys, rpcrdma::AuthFlavor::kRpcsecGss};
  Start();
  EXPECT_TRUE(Call(kNull).has_value()) << "NULL is taken with AUTH_NONE";
  const Outcome weak = Call(kWords, [](XdrWriter& args) { args.U32(0); });
  ASSERT_FALSE(weak.has_value());
  EXPECT_EQ(weak.error().auth_stat, AuthStat::kTooWeak);
  // The flavor that the stack cannot read reaches the service as it was sent, and so may be answered with Deny.
  const rpcrdma::OpaqueAuth gss = Flavored(6, Words({1, 0, 1, 1, 0}));
  const rpcrdma::OpaqueAuth sys = *rpcrdma::MakeAuthSys({});
  for (const rpcrdma::OpaqueAuth* taken : {&gss, &sys}) {
    CallOptions options;
    options.credentials = taken;
    const Outcome outcome = Call(
        kWords, [](XdrWriter& args) { args.U32(0); }, options);
    ASSERT_TRUE(outcome.has_value()) << outcome.error().ToString();
    EXPECT_EQ(service_.last_call.cred, *taken);
  }
  EXPECT_EQ(service_.handled, 3u);
  // A program that is not there says nothing of credentials; a version that is not there is behind them.
  CallOptions options;
  const rpcrdma::OpaqueAuth unknown = Flavored(77, {});
  options.credentials = &unknown;
  EXPECT_EQ(CallAs(
                {100003, 3, 0}, [](XdrWriter&) {}, options)
                .error()
                .accept_stat,
            AcceptStat::kProgUnavail);
  EXPECT_EQ(CallAs(
                {kProgram, 9, 0}, [](XdrWriter&) {}, options)
                .error()
                .auth_stat,
            AuthStat::kRejectedCred);
}

TEST_F(RpcTest, NobodyListening) {
  uint16_t port = 0;
  {
    StartServer();
    port = server_->port();
    server_.reset();
    setting_->For(1ms);
  }
  client_ = NewClient();
  const auto connected = ConnectTo(*client_, port);
  ASSERT_FALSE(connected.has_value());
  EXPECT_EQ(connected.error().kind, CallError::Kind::kRefused);
  EXPECT_EQ(connected.error().ToString(), "connect to " + setting_->HostPort(port) + ": connection refused");
  EXPECT_EQ(Call(kNull).error().kind, CallError::Kind::kNotConnected);
}

TEST_F(RpcTest, ServerThatIsFullRejects) {
  Start({.clients_max = 1});
  auto second = NewClient();
  const auto connected = ConnectTo(*second, server_->port());
  ASSERT_FALSE(connected.has_value());
  EXPECT_TRUE(Call(kNull).has_value());
  EXPECT_EQ(server_->stats().clients_rejected, 1u);
}

TEST_F(RpcTest, ClientsWhoseWorkIsLeftCountUntilItIsLetGo) {
  StartServer({.clients_max = 2, .address_connections_max = 2});
  std::map<uint32_t, Outcome> outcomes;
  for (uint32_t number : {1, 2}) {
    client_ = NewClient();
    ASSERT_TRUE(ConnectTo(*client_, server_->port()).has_value());
    AsyncHold(number, &outcomes);
    ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == number; }));
    client_.reset();
    ASSERT_TRUE(setting_->Until([&] { return service_.clients == 0; }));
  }
  client_ = NewClient();
  EXPECT_FALSE(ConnectTo(*client_, server_->port()).has_value());
  EXPECT_EQ(server_->stats().clients_rejected, 1u);
  service_.held.erase(1);
  client_ = NewClient();
  EXPECT_TRUE(ConnectTo(*client_, server_->port()).has_value());
  EXPECT_TRUE(Call(kNull).has_value());
}

TEST_F(RpcTest, ServerThatGoesAwayEndsEveryCallWithAReason) {
  StartWarm();
  std::map<uint32_t, Outcome> outcomes;
  std::optional<CallError> lost;
  client_->OnConnectionLost([&](const CallError& error) { lost = error; });
  for (uint32_t number : {1, 2, 3}) AsyncHold(number, &outcomes);
  ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 3; }));
  server_.reset();
  ASSERT_TRUE(setting_->Until([&] { return outcomes.size() == 3 && lost.has_value(); }));
  for (auto& [number, outcome] : outcomes) {
    ASSERT_FALSE(outcome.has_value());
    EXPECT_EQ(outcome.error().kind, CallError::Kind::kConnectionLost);
    EXPECT_NE(outcome.error().ToString().find("peer closed the connection while 3 calls were outstanding"),
              std::string::npos)
        << outcome.error().ToString();
  }
  EXPECT_FALSE(client_->connected());
  EXPECT_EQ(Call(kNull).error().kind, CallError::Kind::kNotConnected);
  // The requests of a client that is gone can still be answered, to no effect.
  service_.Answer(1);
}

// A caller who means for ever may say so by the longest Duration there is.
TEST_F(RpcTest, TheLongestTimeoutsNeverEnd) {
  ServerOptions server;
  server.idle_timeout = Duration::max();
  ClientOptions client;
  client.connect_timeout = Duration::max();
  Start(server, client);
  ASSERT_TRUE(Call(kNull).has_value());
  std::map<uint32_t, Outcome> outcomes;
  AsyncHold(1, &outcomes, {.timeout = Duration::max()});
  ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 1; }));
  bool stopped = false;
  server_->Stop(Duration::max(), [&] { stopped = true; });
  setting_->For(20ms);
  EXPECT_TRUE(outcomes.empty());
  service_.Answer(1);
  ASSERT_TRUE(setting_->Until([&] { return stopped && outcomes.size() == 1; }));
  EXPECT_TRUE(outcomes.at(1).has_value()) << outcomes.at(1).error().ToString();
}

TEST_F(RpcTest, ServerSeesItsClientGo) {
  Start();
  std::map<uint32_t, Outcome> outcomes;
  AsyncHold(1, &outcomes);
  ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 1; }));
  std::string why;
  server_->OnClientGone(
      [&](const std::string&, const std::string& reason, const rpcrdma::ConnectionStats&) { why = reason; });
  client_.reset();
  ASSERT_TRUE(setting_->Until([&] { return service_.clients == 0; }));
  EXPECT_EQ(why, "peer closed the connection");
  EXPECT_FALSE(service_.held.begin()->second.connected());
  service_.Answer(1);
  EXPECT_EQ(server_->stats().clients, 0u);
}

TEST_F(RpcTest, ClientDestroyedWithCallsOutstanding) {
  StartWarm();
  std::map<uint32_t, Outcome> outcomes;
  auto sink = std::make_unique<std::vector<std::byte>>(1 << 20);
  auto data = std::make_unique<std::vector<std::byte>>(Pattern(1 << 20));
  CallOptions options;
  options.result_buffers = {MutableBytes(*sink)};
  for (uint32_t number : {1, 2, 3}) AsyncHold(number, &outcomes);
  for (uint32_t number : {4, 5}) {
    client_->Call(
        Id(kEcho), [&](XdrWriter& args) { args.EligibleOpaque(*data); }, options,
        [number, &outcomes](Outcome outcome) { outcomes.emplace(number, std::move(outcome)); });
  }
  ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 3; }));
  client_.reset();
  // Nothing touches this memory any more.
  sink.reset();
  data.reset();
  EXPECT_TRUE(outcomes.count(1) == 0);
  ASSERT_TRUE(setting_->Until([&] { return outcomes.size() == 5; }));
  EXPECT_EQ(outcomes.at(1).error().kind, CallError::Kind::kClosed);
}

TEST_F(RpcTest, ClientDestroyedInAHandlerOfItsOwn) {
  Start();
  int handlers = 0;
  for (int i = 0; i < 5; ++i) {
    client_->Call(
        Id(kNull), [](XdrWriter&) {}, {},
        [&](Outcome) {
          ++handlers;
          client_.reset();
        });
  }
  ASSERT_TRUE(setting_->Until([&] { return handlers == 5; }));
  ASSERT_TRUE(setting_->Until([&] { return service_.clients == 0; }));
}

TEST_F(RpcTest, CallsMadeInHandlersAreSent) {
  Start();
  int left = 50;
  std::function<void()> next = [&] {
    client_->Call(
        Id(kNull), [](XdrWriter&) {}, {},
        [&](Outcome outcome) {
          ASSERT_TRUE(outcome.has_value());
          if (--left > 0) next();
        });
  };
  next();
  ASSERT_TRUE(setting_->Until([&] { return left == 0; }));
}

TEST_F(RpcTest, CallThatTimesOutClosesTheConnection) {
  StartWarm();
  std::map<uint32_t, Outcome> outcomes;
  CallOptions brief;
  brief.timeout = 100ms;
  AsyncHold(1, &outcomes, brief);
  AsyncHold(2, &outcomes);
  ASSERT_TRUE(setting_->Until([&] { return outcomes.size() == 2; }));
  EXPECT_EQ(outcomes.at(1).error().kind, CallError::Kind::kTimedOut);
  EXPECT_EQ(outcomes.at(2).error().kind, CallError::Kind::kConnectionLost);
  EXPECT_NE(outcomes.at(2).error().ToString().find("a call timed out"), std::string::npos);
  ASSERT_TRUE(setting_->Until([&] { return service_.clients == 0; }));
}

TEST_F(RpcTest, CancelledCallEndsAloneAndItsLateReplyIsDropped) {
  StartWarm();
  std::map<uint32_t, Outcome> outcomes;
  AsyncHold(1, &outcomes);
  AsyncHold(2, &outcomes);
  ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 2; }));
  client_->Cancel(ids_.at(1));
  ASSERT_TRUE(setting_->Until([&] { return outcomes.size() == 1; }));
  EXPECT_EQ(outcomes.at(1).error().kind, CallError::Kind::kCancelled);
  service_.Answer(1);
  service_.Answer(2);
  ASSERT_TRUE(setting_->Until([&] { return outcomes.size() == 2; }));
  EXPECT_TRUE(outcomes.at(2).has_value());
  EXPECT_EQ(client_->stats().ignored, 1u);
}

// [pvtdata:3.2+4] A server would end the connection by invalidating what is no window.
TEST_F(RpcTest, MemoryRegionsAreNotInvalidatedByTheServer) {
  Start({}, {.memory_windows = false});
  ExpectEcho(20000, 20008);
  EXPECT_EQ(client_->stats().registrations, 2u);
  EXPECT_EQ(client_->stats().invalidations_local, 2u);
  EXPECT_EQ(client_->stats().invalidations_remote, 0u);
  EXPECT_EQ(server_->stats().connections.invalidations_remote, 0u);
}

TEST_F(RpcTest, CallWithMemoryCancelledInAHandlerEndsAtOnce) {
  Start({}, {.memory_windows = false});
  // No deadline that would look after the call later.
  CallOptions patient;
  patient.timeout = Duration(0);
  ASSERT_TRUE(Call(
                  kNull, [](XdrWriter&) {}, patient)
                  .has_value());
  std::map<uint32_t, Outcome> outcomes;
  std::vector<std::byte> sink(100000);
  CallOptions with_memory = patient;
  with_memory.result_buffers = {MutableBytes(sink)};
  AsyncHold(1, &outcomes, with_memory);
  ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 1; }));
  EXPECT_EQ(client_->stats().registrations, 1u);
  client_->Call(
      Id(kNull), [](XdrWriter&) {}, patient,
      [&](Outcome outcome) {
        EXPECT_TRUE(outcome.has_value()) << outcome.error().ToString();
        client_->Cancel(ids_.at(1));
      });
  ASSERT_TRUE(setting_->Until([&] { return outcomes.size() == 1; }));
  ASSERT_FALSE(outcomes.at(1).has_value());
  EXPECT_EQ(outcomes.at(1).error().kind, CallError::Kind::kCancelled);
}

// On any device; those with memory windows register it once (registered_memory_test.cc).
TEST_F(RpcTest, RegisteredMemoryServesManyCalls) {
  Start();
  std::vector<std::byte> arena(400000);
  const rpcrdma::RegisteredMemory memory{arena};
  for (uint8_t i = 0; i < 10; ++i) {
    const MutableBytes data = MutableBytes(arena).subspan(i, 150001);
    CopyBytes(data, Pattern(data.size(), i));
    CallOptions options;
    options.registered_memory = memory;
    options.result_buffers = {MutableBytes(arena).subspan(200000, data.size())};
    const Outcome outcome = Call(
        kEcho, [&](XdrWriter& args) { args.EligibleOpaque(data); }, options);
    ExpectData(outcome, data, arena.data() + 200000);
  }
  const auto stats = client_->stats();
  EXPECT_EQ(stats.memory_reused + stats.memory_not_reused, 20u);
  EXPECT_EQ(stats.memory_registered, stats.memory_reused > 0 ? 1u : 0u);
  EXPECT_EQ(stats.invalidations_local + stats.invalidations_remote, stats.registrations);
}

TEST_F(RpcTest, CloseDisconnectsInOrder) {
  Start();
  EXPECT_TRUE(Call(kNull).has_value());
  std::map<uint32_t, Outcome> outcomes;
  AsyncHold(1, &outcomes);
  ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 1; }));
  bool closed = false;
  client_->Close([&] { closed = true; });
  ASSERT_TRUE(setting_->Until([&] { return closed; }));
  EXPECT_EQ(outcomes.at(1).error().kind, CallError::Kind::kClosed);
  ASSERT_TRUE(setting_->Until([&] { return service_.clients == 0; }));
  EXPECT_EQ(Call(kNull).error().kind, CallError::Kind::kNotConnected);
}

// A second time neither takes the first one's word away nor cuts short what it waits for.
TEST_F(RpcTest, ClosedTwiceItTellsBothAndSendsWhatWasCalled) {
  Start();
  EXPECT_TRUE(Call(kNull).has_value());
  std::map<uint32_t, Outcome> outcomes;
  AsyncHold(1, &outcomes);
  int closed = 0;
  client_->Close([&] { ++closed; });
  client_->Close([&] { ++closed; });
  EXPECT_EQ(closed, 0);
  ASSERT_TRUE(setting_->Until([&] { return closed == 2; }));
  EXPECT_EQ(outcomes.at(1).error().kind, CallError::Kind::kClosed);
  ASSERT_TRUE(setting_->Until([&] { return service_.clients == 0; }));
  EXPECT_EQ(service_.held.size(), 1u);
}

TEST_F(RpcTest, ServerStopsWhenItsCallsAreDone) {
  Start();
  std::map<uint32_t, Outcome> outcomes;
  AsyncHold(1, &outcomes);
  ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 1; }));
  bool stopped = false;
  server_->Stop(20s, [&] { stopped = true; });
  setting_->For(10ms);
  EXPECT_FALSE(stopped);
  service_.Answer(1);
  ASSERT_TRUE(setting_->Until([&] { return stopped && outcomes.size() == 1; }));
  EXPECT_TRUE(outcomes.at(1).has_value()) << outcomes.at(1).error().ToString();
  ASSERT_TRUE(setting_->Until([&] { return !client_->connected(); }));
}

// Stops the server it belongs to, then answers.
class StoppingService final : public rpcrdma::Service {
 public:
  uint32_t program() const override { return kProgram + 1; }
  rpcrdma::VersionRange versions() const override { return {1, 1}; }
  void Handle(rpcrdma::Request request) override {
    server->Stop(20s, [this] { stopped = true; });
    request.Reply();
  }

  Server* server = nullptr;
  bool stopped = false;
};

// The first call, so that the end has nothing else to wait for.
TEST_F(RpcTest, ReplyGivenRightAfterStopArrives) {
  Start();
  StoppingService service;
  service.server = &*server_;
  server_->Register(&service);
  const Outcome outcome = CallAs({kProgram + 1, 1, 0}, [](XdrWriter&) {}, {});
  EXPECT_TRUE(outcome.has_value()) << outcome.error().ToString();
  EXPECT_TRUE(setting_->Until([&] { return service.stopped; }));
  server_.reset();
}

TEST_F(RpcTest, ServerStopsAfterItsGraceAtTheLatest) {
  Start();
  std::map<uint32_t, Outcome> outcomes;
  AsyncHold(1, &outcomes);
  ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 1; }));
  bool stopped = false;
  server_->Stop(50ms, [&] { stopped = true; });
  ASSERT_TRUE(setting_->Until([&] { return stopped && outcomes.size() == 1; }));
  EXPECT_EQ(outcomes.at(1).error().kind, CallError::Kind::kConnectionLost);
}

TEST_F(RpcTest, SeveralClientsAreServedAtOnce) {
  Start();
  std::vector<std::unique_ptr<Client>> clients;
  int answered = 0;
  const auto data = Pattern(30000);
  for (int i = 0; i < 8; ++i) {
    clients.push_back(NewClient({.credits = 4}));
    ASSERT_TRUE(ConnectTo(*clients.back(), server_->port()).has_value());
  }
  for (int round = 0; round < 10; ++round) {
    for (auto& client : clients) {
      client->Call(
          Id(kSize), [&](XdrWriter& args) { args.EligibleOpaque(data); }, {},
          [&](Outcome outcome) {
            EXPECT_TRUE(outcome.has_value()) << outcome.error().ToString();
            ++answered;
          });
    }
  }
  ASSERT_TRUE(setting_->Until([&] { return answered == 80; }));
  EXPECT_EQ(server_->stats().clients, 9u);
}

TEST_F(RpcTest, SmallAndLargeInlineThresholdsMeet) {
  Start({.inline_threshold = 16384}, {.inline_threshold = 1024});
  ExpectEcho(900, 2000);
  ExpectEcho(2000, 4000);
  ExpectEcho(20000, 40000);
  EXPECT_GT(client_->stats().calls_by_read_chunk, 0u);
}

// [pvtdata:4#1] Neither end may carry the settings of one connection over to the next.
// [traps:responder#11]
TEST_F(RpcTest, EachConnectionHasTheSettingsOfItsOwnPrivateData) {
  Start({.inline_threshold = 16384}, {.inline_threshold = 16384});
  ExpectEcho(9000, 12000);
  EXPECT_EQ(client_->stats().calls_by_read_chunk, 0u);

  // The client comes back with less: the server, which has seen it with more, keeps to the smaller threshold.
  client_ = NewClient({.inline_threshold = 1024});
  ASSERT_TRUE(ConnectTo(*client_, server_->port()).has_value());
  ExpectEcho(9000, 12000);
  EXPECT_EQ(client_->stats().calls_by_read_chunk, 1u);

  // The server comes back with less: so does the client.
  client_.reset();
  server_.reset();
  Start({.inline_threshold = 1024}, {.inline_threshold = 16384});
  ExpectEcho(9000, 12000);
  EXPECT_EQ(client_->stats().calls_by_read_chunk, 1u);
}

// [5666bis:4.3.1#1] Calls and replies have thresholds of their own, and each end may have others.
TEST_F(RpcTest, InlineThresholdsDifferByDirection) {
  const auto data = Pattern(9000);
  const auto size_of = [&] { return Call(kSize, [&](XdrWriter& args) { args.EligibleOpaque(data); }); };
  // Long calls inline, long replies not: the server sends less than the client could receive.
  Start({.inline_send_max = 2048, .inline_receive_max = 16384}, {.inline_threshold = 16384});
  ASSERT_TRUE(size_of().has_value());
  ExpectEcho(9000, 12000);
  EXPECT_EQ(client_->stats().calls_by_read_chunk, 0u);
  EXPECT_EQ(client_->stats().calls_by_write_chunk, 1u);

  // And the other way round: here it is the client that receives more than it sends.
  client_ = NewClient({.inline_send_max = 1024, .inline_receive_max = 32768});
  server_.reset();
  StartServer({.inline_threshold = 16384});
  ASSERT_TRUE(ConnectTo(*client_, server_->port()).has_value());
  ASSERT_TRUE(size_of().has_value());
  ExpectEcho(9000, 12000);
  EXPECT_EQ(client_->stats().calls_by_read_chunk, 2u);
  EXPECT_EQ(client_->stats().calls_by_write_chunk, 0u);
}

// [traps:interop#14]
TEST_F(RpcTest, WithoutDirectPlacementNothingLeavesItsMessage) {
  Start();
  for (const size_t size : {size_t{100}, size_t{100001}}) {
    const auto data = Pattern(size, 7);
    std::vector<std::byte> sink(size + 3);
    CallOptions options;
    options.result_buffers = {sink};
    options.direct_placement = false;
    const Outcome outcome = Call(
        kEcho, [&](XdrWriter& args) { args.EligibleOpaque(data); }, options);
    ASSERT_NO_FATAL_FAILURE(ExpectData(outcome, data, sink.data()));
    EXPECT_EQ(outcome->placed_bytes(0), 0u);
  }
  const auto stats = client_->stats();
  EXPECT_EQ(stats.calls_inline, 1u);
  EXPECT_EQ(stats.calls_long, 1u);
  EXPECT_EQ(stats.replies_long, 1u);
  EXPECT_EQ(stats.calls_by_read_chunk, 0u);
  EXPECT_EQ(stats.calls_by_write_chunk, 0u);
}

// [traps:interop#1]
TEST_F(RpcTest, ReplyChunkIsUsedAsTheServerPrefers) {
  for (const auto use : {rpcrdma::ReplyChunkUse::kWheneverOffered, rpcrdma::ReplyChunkUse::kWhenNeeded}) {
    client_.reset();
    server_.reset();
    Start({.reply_chunk_use = use});
    CallOptions options;
    options.reply_bytes_max = 100000;
    const auto words = [&](uint32_t count) {
      return Call(
          kWords,
          [&](XdrWriter& args) {
            args.U32(count);
            for (uint32_t i = 0; i < count; ++i) args.U32(i);
          },
          options);
    };
    const Outcome little = words(3);
    ASSERT_TRUE(little.has_value()) << little.error().ToString();
    EXPECT_EQ(client_->stats().replies_long, use == rpcrdma::ReplyChunkUse::kWheneverOffered ? 1u : 0u);
    const uint64_t before = client_->stats().replies_long;
    const Outcome much = words(20000);
    ASSERT_TRUE(much.has_value()) << much.error().ToString();
    EXPECT_EQ(client_->stats().replies_long, before + 1);
  }
}

TEST_F(RpcTest, CallThatNamesMoreThanTheServerAllowsIsRefusedAlone) {
  std::vector<std::byte> sink(60000);
  std::vector<std::byte> large(100004);
  const auto source = [&](std::vector<std::byte>& result) {
    CallOptions call;
    call.result_buffers = {result};
    return Call(
        kSource, [](XdrWriter& args) { args.U32(100); }, call);
  };
  ServerOptions no_writes;
  no_writes.chunk_limits.write_chunks_max = 0;
  Start(no_writes);
  const Outcome any_chunk = source(sink);
  ASSERT_FALSE(any_chunk.has_value());
  EXPECT_EQ(any_chunk.error().kind, CallError::Kind::kTransport);
  EXPECT_TRUE(Call(kNull).has_value());

  client_.reset();
  server_.reset();
  Start({.call_offer_bytes_max = 100000});
  const Outcome too_much = source(large);
  ASSERT_FALSE(too_much.has_value());
  EXPECT_EQ(too_much.error().kind, CallError::Kind::kTransport);
  EXPECT_TRUE(source(sink).has_value());
}

TEST_F(RpcTest, ArgumentsBeyondTheLimitAreRefusedBeforeSending) {
  Start({}, {.message_bytes_max = 10000});
  const std::string text(20000, 'x');
  EXPECT_EQ(Call(kEcho, [&](XdrWriter& args) { args.String(text); }).error().kind, CallError::Kind::kTooLarge);
}

TEST_F(RpcTest, CoroutinesAwaitCalls) {
  StartServer();
  setting_->ActAsClient();
  client_ = NewClient();
  rpcrdma::LoopContext context(setting_->loop());
  bool done = false;
  asio::co_spawn(
      asio::any_io_executor(context.get_executor()),
      [&]() -> asio::awaitable<void> {
        auto connected = co_await client_->AsyncConnect(setting_->server_host(), server_->port(), asio::use_awaitable);
        EXPECT_TRUE(connected.has_value());
        for (uint32_t size : {10u, 100000u}) {
          const auto data = Pattern(size);
          const auto args = [&](XdrWriter& out) { out.EligibleOpaque(data); };
          Outcome outcome = co_await client_->AsyncCall(Id(kSize), args, {}, asio::use_awaitable);
          EXPECT_TRUE(outcome.has_value()) << outcome.error().ToString();
          if (!outcome) co_return;
          EXPECT_EQ(outcome->results().U32("size"), size);
        }
        done = true;
      },
      asio::detached);
  ASSERT_TRUE(setting_->Until([&] { return done; }));
}

TEST_F(RpcTest, FuturesHoldReplies) {
  Start();
  std::future<Outcome> future = client_->AsyncCall(
      Id(kNull), [](XdrWriter&) {}, {}, asio::use_future);
  ASSERT_TRUE(setting_->Until([&] { return future.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }));
  EXPECT_TRUE(future.get().has_value());
}

TEST_F(RpcTest, ClientsAndServersEndByToken) {
  Start();
  const auto ready = [](const std::future<void>& future) {
    return future.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  };
  const std::future<void> closed = client_->AsyncClose(asio::use_future);
  EXPECT_FALSE(ready(closed)) << "a handler ran inside the call that started it";
  ASSERT_TRUE(setting_->Until([&] { return ready(closed); }));
  EXPECT_FALSE(client_->connected());
  const std::future<void> stopped = server_->AsyncStop(1s, asio::use_future);
  ASSERT_TRUE(setting_->Until([&] { return ready(stopped); }));
  EXPECT_EQ(server_->stats().clients, 0u);
}

TEST_F(RpcTest, CancellationSlotsOfEveryTokenCancelTheCall) {
  StartWarm();
  const auto hold = [](XdrWriter& args) { args.U32(1); };
  asio::cancellation_signal by_callback;
  asio::cancellation_signal by_future;
  asio::cancellation_signal by_coroutine;
  std::vector<Outcome> outcomes;
  client_->AsyncCall(Id(kHold), hold, {}, asio::bind_cancellation_slot(by_callback.slot(), [&](Outcome outcome) {
                       outcomes.push_back(std::move(outcome));
                     }));
  std::future<Outcome> future =
      client_->AsyncCall(Id(kHold), hold, {}, asio::bind_cancellation_slot(by_future.slot(), asio::use_future));
  rpcrdma::LoopContext context(setting_->loop());
  asio::co_spawn(
      asio::any_io_executor(context.get_executor()),
      [&]() -> asio::awaitable<void> {
        outcomes.push_back(co_await client_->AsyncCall(
            Id(kHold), hold, {}, asio::bind_cancellation_slot(by_coroutine.slot(), asio::use_awaitable)));
      },
      asio::detached);
  ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 3; }));
  by_future.emit(asio::cancellation_type::total);
  by_coroutine.emit(asio::cancellation_type::partial);
  EXPECT_TRUE(outcomes.empty()) << "a handler ran inside emit";
  ASSERT_TRUE(setting_->Until(
      [&] { return outcomes.size() == 1 && future.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }));
  EXPECT_EQ(outcomes[0].error().kind, CallError::Kind::kCancelled);
  EXPECT_EQ(future.get().error().kind, CallError::Kind::kCancelled);
  by_callback.emit(asio::cancellation_type::terminal);
  ASSERT_TRUE(setting_->Until([&] { return outcomes.size() == 2; }));
  EXPECT_EQ(outcomes[1].error().kind, CallError::Kind::kCancelled);
  EXPECT_TRUE(outcomes[1].error().sent);
  // It may be emitted later, too, and after the Client.
  by_callback.emit(asio::cancellation_type::terminal);
  client_.reset();
  by_callback.emit(asio::cancellation_type::terminal);
}

TEST_F(RpcTest, ACancelledAttemptToConnectEndsAtOnce) {
  StartServer();
  client_ = NewClient();
  setting_->ActAsClient();
  asio::cancellation_signal signal;
  std::vector<CallError> errors;
  client_->AsyncConnect(setting_->server_host(), server_->port(),
                        asio::bind_cancellation_slot(signal.slot(), [&](Result<void, CallError> connected) {
                          ASSERT_FALSE(connected.has_value());
                          errors.push_back(connected.error());
                        }));
  signal.emit(asio::cancellation_type::terminal);
  EXPECT_TRUE(errors.empty());
  ASSERT_TRUE(setting_->Until([&] { return !errors.empty(); }));
  EXPECT_EQ(errors[0].kind, CallError::Kind::kCancelled);
  EXPECT_EQ(errors[0].ToString(), "connect to " + setting_->HostPort(server_->port()) + ": cancelled");
  signal.emit(asio::cancellation_type::terminal);
  setting_->For(1ms);
  EXPECT_EQ(errors.size(), 1u);
  EXPECT_FALSE(client_->connected());
}

TEST_F(RpcTest, ErrorsSayWhetherTheCallWasSent) {
  Start({.credits = 1});
  ASSERT_TRUE(Call(kNull).has_value());
  std::map<uint32_t, Outcome> outcomes;
  AsyncHold(1, &outcomes);
  AsyncHold(2, &outcomes);
  ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 1; }));
  server_.reset();
  ASSERT_TRUE(setting_->Until([&] { return outcomes.size() == 2; }));
  EXPECT_TRUE(outcomes.at(1).error().sent);
  EXPECT_FALSE(outcomes.at(2).error().sent) << "it waited for the credit";
  EXPECT_FALSE(Call(kNull).error().sent);
}

}  // namespace
}  // namespace stagecoach::e2e
