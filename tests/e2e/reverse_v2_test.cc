// Version 2 at the server, and calls from a server to its clients in it, end to end through the public API, in
// whichever setting it is linked with.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "rpcrdma/api/client.h"
#include "rpcrdma/api/reverse_client.h"
#include "rpcrdma/api/server.h"
#include "rpcrdma/ccp/ccp.h"
#include "rpcrdma/wire/properties.h"
#include "rpcrdma/wire/v2_numbers.h"
#include "tests/e2e/outcome.h"
#include "tests/e2e/raw_peer.h"
#include "tests/e2e/setting.h"
#include "tests/e2e/test_service.h"

namespace stagecoach::e2e {
namespace {

using rpcrdma::AcceptStat;
using rpcrdma::CallError;
using rpcrdma::CallOptions;
using rpcrdma::Client;
using rpcrdma::ClientOptions;
using rpcrdma::ConnectionStats;
using rpcrdma::ErrOther;
using rpcrdma::Extension;
using rpcrdma::ExtensionAnswer;
using rpcrdma::ExtensionRequest;
using rpcrdma::Extensions;
using rpcrdma::kFlagResponse;
using rpcrdma::kRdma2ConnProp;
using rpcrdma::kRdma2ErrInvalHtype;
using rpcrdma::kRdma2ErrSystem;
using rpcrdma::kRdma2Msg;
using rpcrdma::kVersion1Alone;
using rpcrdma::kVersion2Alone;
using rpcrdma::kVersions1And2;
using rpcrdma::Property;
using rpcrdma::Request;
using rpcrdma::ReverseCallOptions;
using rpcrdma::ReverseClient;
using rpcrdma::ReverseClientOptions;
using rpcrdma::Server;
using rpcrdma::ServerOptions;
using rpcrdma::XdrReader;
using rpcrdma::XdrWriter;

constexpr uint32_t kFrontProgram = 0x200000b0;
constexpr uint32_t kBind = 1;

// The server's program: whoever calls kBind is called back.
class Front final : public rpcrdma::Service {
 public:
  uint32_t program() const override { return kFrontProgram; }
  rpcrdma::VersionRange versions() const override { return {1, 1}; }
  bool idempotent(uint32_t, uint32_t) const override { return true; }
  void Handle(Request request) override {
    versions_seen.push_back(request.rpcrdma_version());
    flags_seen.push_back(request.transport_flags());
    if (request.procedure() == kBind && back != nullptr) bound = back->Bind(request.client());
    request.Reply();
  }
  void OnClientConnected(rpcrdma::ClientId client, const std::string&) override {
    if (back != nullptr) bound_at_once = back->Bind(client);
  }

  ReverseClient* back = nullptr;
  bool bound = false;
  bool bound_at_once = false;
  std::vector<uint32_t> versions_seen;
  std::vector<uint32_t> flags_seen;
};

// Answers with data that is eligible, but not at once.
class Slow final : public rpcrdma::Service {
 public:
  static constexpr uint32_t kProgramNumber = kFrontProgram + 1;
  uint32_t program() const override { return kProgramNumber; }
  rpcrdma::VersionRange versions() const override { return {1, 1}; }
  std::span<const rpcrdma::Binding> bindings() const override { return {&kBinding, 1}; }
  void Handle(Request request) override { held.push_back(std::move(request)); }

  static constexpr rpcrdma::ProcedureBinding kOne[] = {
      {.number = 1, .name = "SLOW", .arguments = kData, .results = kData, .reply_fixed = 4}};
  static constexpr rpcrdma::Binding kBinding{
      .program = kProgramNumber, .version = 1, .name = "slow", .procedures = kOne};
  std::vector<Request> held;
};

class ReverseV2Test : public ::testing::Test {
 protected:
  ~ReverseV2Test() override {
    callbacks_.held.clear();
    slow_.held.clear();
    clients_.clear();
    peer_.reset();
    back_.reset();
    server_.reset();
    setting_->For(1ms);
  }

  static ServerOptions Both() { return {.versions = kVersions1And2, .reverse_credits = 8, .first_xid = 1}; }
  void StartServer(ServerOptions options = Both(), ReverseClientOptions reverse = {}) {
    setting_->ActAsServer();
    server_.emplace(setting_->loop(), std::move(options));
    server_->Register(&front_);
    server_->Register(&service_);
    back_.emplace(*server_, reverse);
    for (const rpcrdma::Binding& binding : kBindings) back_->Register(binding);
    back_->Register(Slow::kBinding);
    front_.back = &*back_;
    const auto listening = server_->Listen(setting_->server_host(), 0);
    ASSERT_TRUE(listening.has_value()) << listening.error().ToString();
  }

  ClientOptions Serving(bool chunks) {
    return {.versions = kVersion2Alone,
            .first_xid = 1,
            .reverse_services = {&callbacks_, &slow_},
            .reverse_credits = 8,
            .reverse_chunks = chunks};
  }
  Client& Connect(const ClientOptions& options) {
    setting_->ActAsClient();
    Client& client = *clients_.emplace_back(std::make_unique<Client>(setting_->loop(), options));
    for (const rpcrdma::Binding& binding : kBindings) client.Register(binding);
    std::optional<Result<void, CallError>> result;
    client.Connect(setting_->server_host(), server_->port(),
                   [&](Result<void, CallError> connected) { result = std::move(connected); });
    EXPECT_TRUE(setting_->Until([&] { return result.has_value(); })) << "connecting hangs";
    if (!result) std::abort();  // the handler refers to this frame
    EXPECT_TRUE(result->has_value()) << result->error().ToString();
    return client;
  }
  Outcome CallOn(
      Client& client, const rpcrdma::ProcedureId& procedure, Client::ArgsWriter args = [](XdrWriter&) {},
      const CallOptions& options = {}) {
    std::optional<Outcome> result;
    client.Call(procedure, args, options, [&](Outcome outcome) { result.emplace(std::move(outcome)); });
    EXPECT_TRUE(setting_->Until([&] { return result.has_value(); })) << "a call hangs";
    if (!result) std::abort();
    return std::move(*result);
  }
  void BindOn(Client& client) {
    front_.bound = false;
    ASSERT_TRUE(CallOn(client, {kFrontProgram, 1, kBind}).has_value());
    ASSERT_TRUE(front_.bound);
  }
  // A client that is called back, with chunks or without.
  Client& Start(bool chunks, ServerOptions options = Both()) {
    StartServer(std::move(options));
    Client& client = Connect(Serving(chunks));
    BindOn(client);
    return client;
  }

  Outcome CallBack(
      const rpcrdma::ProcedureId& procedure, Client::ArgsWriter args = [](XdrWriter&) {},
      const ReverseCallOptions& options = {}) {
    std::optional<Outcome> result;
    back_->Call(procedure, args, options, [&](Outcome outcome) { result.emplace(std::move(outcome)); });
    EXPECT_FALSE(result.has_value()) << "a handler ran inside the call that started it";
    EXPECT_TRUE(setting_->Until([&] { return result.has_value(); })) << "a reverse call hangs";
    if (!result) std::abort();
    return std::move(*result);
  }
  // Of a call that is expected to fail.
  static CallError::Kind KindOf(const Outcome& outcome) {
    EXPECT_FALSE(outcome.has_value());
    return outcome ? CallError::Kind::kOptions : outcome.error().kind;
  }
  ConnectionStats Reverse() const { return server_->stats().reverse; }

  std::unique_ptr<Setting> setting_ = MakeSettingOfThisTest();
  Front front_;
  TestService service_;    // the server's
  TestService callbacks_;  // the clients'
  Slow slow_;
  std::optional<Server> server_;
  std::optional<ReverseClient> back_;
  std::vector<std::unique_ptr<Client>> clients_;
  std::optional<RawPeer> peer_;
};

// --- One port, all versions ---

TEST_F(ReverseV2Test, OnePortServesClientsOfEachVersionAtOnce) {
  StartServer();
  Client& second = Connect(Serving(false));
  Client& first = Connect({.first_xid = 1});
  ClientOptions either = Serving(false);
  either.versions = kVersions1And2;
  Client& both = Connect(either);
  for (Client* client : {&second, &first, &both, &first, &second}) {
    ASSERT_TRUE(CallOn(*client, {kFrontProgram, 1, 0}).has_value());
    const auto data = Pattern(100001);
    const Outcome outcome = CallOn(*client, Id(kSize), [&](XdrWriter& args) { args.EligibleOpaque(data); });
    ASSERT_TRUE(outcome.has_value()) << outcome.error().ToString();
    EXPECT_EQ(outcome->results().U32("size"), data.size());
  }
  EXPECT_EQ(front_.versions_seen, (std::vector<uint32_t>{2, 1, 2, 1, 2}));
  EXPECT_EQ(first.version(), 1u);
  EXPECT_EQ(both.version(), 2u);
}

TEST_F(ReverseV2Test, AServerOfOneVersionServesThatAlone) {
  ServerOptions options = Both();
  options.versions = kVersion1Alone;
  StartServer(options);
  ClientOptions either = Serving(false);
  either.versions = kVersions1And2;
  EXPECT_EQ(Connect(either).version(), 1u);
}

// What of these options is version 1's is not there in version 2, and in nobody's way.
TEST_F(ReverseV2Test, TheConfigurationProtocolIsVersion1s) {
  ServerOptions options = Both();
  options.reverse_credits = 0;
  options.ccp = {.enabled = true, .inline_send_max = 16384, .inline_receive_max = 16384};
  StartServer(options);
  ClientOptions second = Serving(false);
  second.reverse_services.clear();
  Client& client = Connect(second);
  const Outcome refused = CallOn(client, {rpcrdma::kCcpProgram, 1, rpcrdma::kConfRdma});
  ASSERT_EQ(KindOf(refused), CallError::Kind::kRpc);
  EXPECT_EQ(refused.error().accept_stat, AcceptStat::kProgUnavail);
  // All Receives are there, whatever the first message was, and of a length that version 2 begins with.
  size_t answered = 0;
  std::vector<uint32_t> words(900);
  for (int i = 0; i < 100; ++i) {
    client.Call(
        Id(kWords),
        [&](XdrWriter& args) {
          args.U32(static_cast<uint32_t>(words.size()));
          for (const uint32_t word : words) args.U32(word);
        },
        {}, [&](const Outcome& outcome) { answered += outcome.has_value() ? 1 : 0; });
  }
  ASSERT_TRUE(setting_->Until([&] { return answered == 100; }));
  EXPECT_EQ(server_->stats().connections.calls_long, 0u);
}

TEST_F(ReverseV2Test, SharedReceivesServeVersion2) {
  ServerOptions options = Both();
  options.shared_receives = 64;
  StartServer(options);
  Client& client = Connect(Serving(false));
  size_t answered = 0;
  for (int i = 0; i < 200; ++i) {
    client.Call(
        Id(kNull), [](XdrWriter&) {}, {}, [&](const Outcome& outcome) { answered += outcome.has_value() ? 1 : 0; });
  }
  ASSERT_TRUE(setting_->Until([&] { return answered == 200; }));
  EXPECT_EQ(server_->stats().connections.grant_overruns, 0u);
  EXPECT_FALSE(back_->bound());
}

// [v2:5.3.3#18] Replies that fit no chunk are told of, not exposed.
TEST_F(ReverseV2Test, RepliesAreNotLeftToBeReadInVersion2) {
  ServerOptions options = Both();
  options.reverse_credits = 0;
  options.profile = rpcrdma::kDraft2004;
  StartServer(options);
  ClientOptions second = Serving(false);
  second.reverse_services.clear();
  second.grown_bytes_max = 0;
  Client& client = Connect(second);
  const Outcome outcome = CallOn(client, {kProgram, 3, kSource}, [](XdrWriter& args) { args.U32(50000); });
  EXPECT_EQ(KindOf(outcome), CallError::Kind::kTransport);
  EXPECT_TRUE(CallOn(client, Id(kNull)).has_value());
  EXPECT_EQ(server_->stats().connections.dones, 0u);
}

// Version 1 by any document, with all that it has; and version 2, of which that document says nothing.
TEST_F(ReverseV2Test, AClientByAnOlderDocumentSpeaksBoth) {
  ServerOptions older = Both();
  older.versions = kVersion1Alone;
  older.profile = rpcrdma::kRfc5666;
  older.reverse_credits = 0;
  StartServer(older);
  Client& client = Connect({.versions = kVersions1And2, .profile = rpcrdma::kRfc5666, .first_xid = 1});
  EXPECT_EQ(client.version(), 1u);
  const auto source = [](XdrWriter& args) { args.U32(50000); };
  ExpectData(CallOn(client, Id(kSource), source), Pattern(50000));
  EXPECT_EQ(client.stats().replies_by_read_chunk, 1u);
  const uint32_t count = 20000;
  const Outcome outcome = CallOn(client, Id(kWords),
                                 [&](XdrWriter& args) {
                                   args.U32(count);
                                   for (uint32_t i = 0; i < count; ++i) args.U32(i);
                                 },
                                 {.reply_bytes_max = 512});
  ASSERT_TRUE(outcome.has_value()) << outcome.error().ToString();
  EXPECT_EQ(client.stats().replies_by_read_chunk, 2u) << "the whole message";
  back_.reset();
  clients_.clear();
  server_.reset();

  StartServer();
  EXPECT_EQ(Connect({.versions = kVersions1And2, .profile = rpcrdma::kRfc5666, .first_xid = 1}).version(), 2u);
}

// [v2:5.3.3+11]
TEST_F(ReverseV2Test, ACallThatIsSentAgainForItsReplyIsExecutedOnce) {
  StartServer();
  Client& client = Connect(Serving(false));
  std::vector<std::byte> place(5000);
  const Outcome outcome =
      CallOn(client, Id(kSource), [](XdrWriter& args) { args.U32(9000); }, {.result_buffers = {place}});
  ExpectData(outcome, Pattern(9000));
  EXPECT_EQ(client.stats().resends, 1u);
  EXPECT_EQ(service_.handled, 1u);
  EXPECT_EQ(server_->stats().replay.replayed, 1u);
}

// --- How far a client follows ---

// [v2:4.2.2+3]
TEST_F(ReverseV2Test, AClientThatServesNothingIsNotCalled) {
  StartServer();
  ClientOptions options = Serving(false);
  options.reverse_services.clear();
  Client& client = Connect(options);
  BindOn(client);
  EXPECT_EQ(KindOf(CallBack(Id(kNull))), CallError::Kind::kNotServed);
  EXPECT_EQ(Reverse().sends, 0u);
  EXPECT_TRUE(CallOn(client, Id(kNull)).has_value());
}

// [v2:4.2.2+4] [v2:8.3+3]
TEST_F(ReverseV2Test, AClientWithoutChunksIsCalledInline) {
  Client& client = Start(/*chunks=*/false);
  ASSERT_TRUE(CallBack(Id(kNull)).has_value());
  const auto fits = Pattern(3900);
  ExpectData(CallBack(Id(kEcho), [&](XdrWriter& args) { args.EligibleOpaque(fits); }, {.reply_bytes_max = 4000}), fits);
  const auto data = Pattern(4096);
  EXPECT_EQ(KindOf(CallBack(Id(kSize), [&](XdrWriter& args) { args.EligibleOpaque(data); })),
            CallError::Kind::kTooLarge);
  EXPECT_EQ(KindOf(CallBack(Id(kSource), [](XdrWriter& args) { args.U32(1); }, {.reply_bytes_max = 4096})),
            CallError::Kind::kTooLarge);
  // A reply that is longer than was said.
  const Outcome outcome = CallBack(Id(kSource), [](XdrWriter& args) { args.U32(5000); });
  ASSERT_EQ(KindOf(outcome), CallError::Kind::kTransport);
  EXPECT_EQ(outcome.error().transport_error, rpcrdma::kRdma2ErrReplyResource);
  EXPECT_EQ(outcome.error().rpcrdma_version, 2u);
  EXPECT_TRUE(CallBack(Id(kNull)).has_value());
  EXPECT_EQ(client.reverse_stats().reads, 0u);
  EXPECT_EQ(Reverse().registrations, 0u);
}

// [v2:4.2.1+1] One threshold for each direction of the wire, whoever calls.
TEST_F(ReverseV2Test, WhatGoesInlineIsWhatTheReceiverHasRoomFor) {
  StartServer();
  ClientOptions options = Serving(false);
  options.inline_receive_max = 16384;
  BindOn(Connect(options));
  const auto data = Pattern(8000);
  const Outcome outcome = CallBack(Id(kSize), [&](XdrWriter& args) { args.EligibleOpaque(data); });
  EXPECT_EQ(KindOf(outcome), CallError::Kind::kTooLarge) << "the server sends no more than its own buffers hold";
  back_.reset();
  clients_.clear();
  server_.reset();

  ServerOptions longer = Both();
  longer.inline_send_max = 16384;
  StartServer(longer);
  BindOn(Connect(options));
  EXPECT_TRUE(CallBack(Id(kSize), [&](XdrWriter& args) { args.EligibleOpaque(data); }).has_value());
}

// [v2:4.2.2+5] [v2:8.4.1+1] [v2:8.4.1+2]
TEST_F(ReverseV2Test, WithChunksAllThatForwardCallsDoIsThere) {
  Client& client = Start(/*chunks=*/true);
  const auto data = Pattern(300001);

  // A Read chunk.
  Outcome outcome = CallBack(Id(kSize), [&](XdrWriter& args) { args.EligibleOpaque(data); });
  ASSERT_TRUE(outcome.has_value()) << outcome.error().ToString();
  EXPECT_TRUE(std::ranges::equal(callbacks_.last_data, data));
  EXPECT_EQ(client.reverse_stats().calls_by_read_chunk, 1u);
  EXPECT_EQ(client.reverse_stats().calls_long, 0u);

  // A Write chunk.
  std::vector<std::byte> place(data.size());
  outcome = CallBack(Id(kSource), [&](XdrWriter& args) { args.U32(static_cast<uint32_t>(data.size())); },
                     {.result_buffers = {place}});
  ExpectData(outcome, data, place.data());
  EXPECT_EQ(client.reverse_stats().calls_by_write_chunk, 1u);
  EXPECT_EQ(outcome->placed_bytes(0), data.size());

  // The Position-Zero Read chunk and the Reply chunk.
  const uint32_t count = 20000;
  outcome = CallBack(Id(kWords),
                     [&](XdrWriter& args) {
                       args.U32(count);
                       for (uint32_t i = 0; i < count; ++i) args.U32(i);
                     },
                     {.reply_bytes_max = 4 * count + 100});
  ASSERT_TRUE(outcome.has_value()) << outcome.error().ToString();
  XdrReader results = outcome->results();
  ASSERT_EQ(results.U32("count"), count);
  for (uint32_t i = 0; i < count; ++i) ASSERT_EQ(results.U32("word"), i);
  EXPECT_EQ(client.reverse_stats().calls_long, 1u);
  EXPECT_EQ(client.reverse_stats().replies_long, 1u);

  // A chunkless call has a chunkless reply.
  ASSERT_TRUE(CallBack(Id(kNull)).has_value());
  const ConnectionStats stats = Reverse();
  EXPECT_EQ(stats.invalidations_local + stats.invalidations_remote, stats.registrations);
  EXPECT_GT(client.reverse_stats().reads, 0u);
  EXPECT_TRUE(CallOn(client, Id(kNull)).has_value());
}

// [v2:8.4.1+2] [v2:8.4.1+3] [v2:8.4.1+4] By a window of the call, which the reply invalidates; a region is not named.
TEST_F(ReverseV2Test, TheClientsReplyInvalidatesAWindowOfTheServers) {
  for (const bool windows : {true, false}) {
    ServerOptions options = Both();
    options.memory_windows = windows;
    Start(/*chunks=*/true, options);
    const auto data = Pattern(9000);
    ASSERT_TRUE(CallBack(Id(kSize), [&](XdrWriter& args) { args.EligibleOpaque(data); }).has_value());
    EXPECT_EQ(Reverse().registrations, 1u);
    EXPECT_EQ(Reverse().invalidations_remote, windows ? 1u : 0u);
    EXPECT_EQ(Reverse().invalidations_unasked, 0u);
    back_.reset();
    clients_.clear();
    server_.reset();
  }
}

// Both directions at once, with equal XIDs, tags and chunks.
TEST_F(ReverseV2Test, BothDirectionsMoveDataAtOnce) {
  Client& client = Start(/*chunks=*/true);
  constexpr int kCalls = 50;
  const auto data = Pattern(20000);
  const auto args = [&](XdrWriter& out) { out.EligibleOpaque(data); };
  std::vector<std::vector<std::byte>> places(2 * kCalls, std::vector<std::byte>(data.size()));
  int forward = 0, reverse = 0;
  for (int i = 0; i < kCalls; ++i) {
    client.Call(Id(kEcho), args, {.result_buffers = {places[2 * i]}}, [&, i](Outcome outcome) {
      ++forward;
      ExpectData(outcome, data, places[2 * i].data());
    });
    back_->Call(Id(kEcho), args, {.result_buffers = {places[2 * i + 1]}}, [&, i](Outcome outcome) {
      ++reverse;
      ExpectData(outcome, data, places[2 * i + 1].data());
    });
  }
  ASSERT_TRUE(setting_->Until([&] { return forward == kCalls && reverse == kCalls; })) << forward << " " << reverse;
  EXPECT_EQ(Reverse().replies, uint64_t{kCalls});
}

// [v2:5.3.3#15] The client says what a result needs, and gets it.
TEST_F(ReverseV2Test, AResultThatIsLongerThanItsBufferIsGivenMore) {
  Start(/*chunks=*/true);
  std::vector<std::byte> place(5000);
  const Outcome outcome = CallBack(Id(kSource), [](XdrWriter& args) { args.U32(9000); }, {.result_buffers = {place}});
  ExpectData(outcome, Pattern(9000));
  EXPECT_EQ(Reverse().resends, 1u);
}

// [v2:5.3.3#21] Its memory is bounded: what can never fit is refused, and what does not fit at the moment waits.
TEST_F(ReverseV2Test, TheClientsMemoryForReverseCallsIsBounded) {
  StartServer();
  ClientOptions options = Serving(true);
  options.reverse_call_bytes_max = 100000;
  Client& client = Connect(options);
  BindOn(client);
  const auto too_long = Pattern(100001);
  const Outcome refused = CallBack(Id(kSize), [&](XdrWriter& args) { args.EligibleOpaque(too_long); });
  ASSERT_EQ(KindOf(refused), CallError::Kind::kTransport);
  EXPECT_EQ(refused.error().transport_error, kRdma2ErrSystem);
  const auto data = Pattern(90000);
  int answered = 0;
  for (int i = 0; i < 20; ++i) {
    back_->Call(
        {Slow::kProgramNumber, 1, 1}, [&](XdrWriter& args) { args.EligibleOpaque(data); }, {},
        [&](const Outcome& outcome) { answered += outcome.has_value() ? 1 : 0; });
  }
  size_t most = 0;
  ASSERT_TRUE(setting_->Until([&] {
    most = std::max(most, slow_.held.size());
    if (!slow_.held.empty()) {
      Request request = std::move(slow_.held.front());
      slow_.held.erase(slow_.held.begin());
      request.Reply([](XdrWriter& results) { results.EligibleOpaque({}); });
    }
    return answered == 20;
  })) << answered;
  // One call always fits, into however many chunks it comes, so a few of them may.
  EXPECT_LT(most, 20u);
  EXPECT_TRUE(client.connected());
}

// --- Ends ---

TEST_F(ReverseV2Test, ACallWithoutChunksThatTimesOutLeavesTheConnectionAlone) {
  Client& client = Start(/*chunks=*/true);
  ASSERT_TRUE(CallBack(Id(kNull)).has_value());  // which brings more credits than the one that is there at first
  const Outcome outcome = CallBack({kProgram, 3, kHold}, [](XdrWriter& args) { args.U32(1); }, {.timeout = 20ms});
  EXPECT_EQ(KindOf(outcome), CallError::Kind::kTimedOut);
  EXPECT_TRUE(CallBack(Id(kNull)).has_value());
  EXPECT_TRUE(client.connected());
}

TEST_F(ReverseV2Test, ACallWithChunksThatTimesOutEndsTheConnection) {
  Client& client = Start(/*chunks=*/true);
  const auto data = Pattern(9000);
  const Outcome outcome =
      CallBack({Slow::kProgramNumber, 1, 1}, [&](XdrWriter& args) { args.EligibleOpaque(data); }, {.timeout = 50ms});
  EXPECT_EQ(KindOf(outcome), CallError::Kind::kTimedOut);
  ASSERT_TRUE(setting_->Until([&] { return !client.connected(); }));
  EXPECT_FALSE(back_->bound());
}

// The caller's memory is the call's until its handler runs: no steering tag reaches it any more by then.
TEST_F(ReverseV2Test, ACancelledCallEndsWhenItsMemoryIsSafe) {
  for (const bool by_destruction : {false, true}) {
    Start(/*chunks=*/true);
    std::vector<std::byte> place(9000);
    std::optional<Outcome> result;
    bool safe = false;
    const rpcrdma::CallId call = back_->Call(
        {Slow::kProgramNumber, 1, 1}, [](XdrWriter& args) { args.EligibleOpaque({}); }, {.result_buffers = {place}},
        [&](Outcome outcome) {
          const ConnectionStats stats = Reverse();
          safe =
              stats.registrations > 0 && stats.invalidations_local + stats.invalidations_remote == stats.registrations;
          result.emplace(std::move(outcome));
        });
    ASSERT_TRUE(setting_->Until([&] { return !slow_.held.empty(); }));
    if (by_destruction) {
      front_.back = nullptr;
      back_.reset();
    } else {
      back_->Cancel(call);
    }
    EXPECT_FALSE(result.has_value()) << "a handler ran inside what ended its call";
    ASSERT_TRUE(setting_->Until([&] { return result.has_value(); }));
    EXPECT_EQ(KindOf(*result), by_destruction ? CallError::Kind::kClosed : CallError::Kind::kCancelled);
    EXPECT_TRUE(safe);
    slow_.held.clear();
    back_.reset();
    clients_.clear();
    server_.reset();
  }
}

TEST_F(ReverseV2Test, AServerThatGoesEndsCancelledCallsAsWell) {
  Start(/*chunks=*/true);
  std::vector<std::byte> place(9000);
  std::optional<Outcome> result;
  const rpcrdma::CallId call = back_->Call(
      {Slow::kProgramNumber, 1, 1}, [](XdrWriter& args) { args.EligibleOpaque({}); }, {.result_buffers = {place}},
      [&](Outcome outcome) { result.emplace(std::move(outcome)); });
  ASSERT_TRUE(setting_->Until([&] { return !slow_.held.empty(); }));
  back_->Cancel(call);
  front_.back = nullptr;
  server_.reset();
  ASSERT_TRUE(setting_->Until([&] { return result.has_value(); }));
  EXPECT_EQ(KindOf(*result), CallError::Kind::kCancelled);
}

// A call goes to the connection that its client came back with, memory and all.
TEST_F(ReverseV2Test, ACallWithChunksWaitsForItsClient) {
  StartServer(Both(), {.wait_for_return = true});
  const auto data = Pattern(9000);
  std::vector<std::byte> place(9000);
  std::optional<Outcome> result;
  back_->Call(
      Id(kEcho), [&](XdrWriter& args) { args.EligibleOpaque(data); }, {.result_buffers = {place}},
      [&](Outcome outcome) { result.emplace(std::move(outcome)); });
  EXPECT_EQ(back_->waiting(), 1u);
  BindOn(Connect(Serving(true)));
  ASSERT_TRUE(setting_->Until([&] { return result.has_value(); }));
  ExpectData(*result, data, place.data());
}

// [v2:7.1+1] Nothing is sent before it is known in which version.
TEST_F(ReverseV2Test, NoClientIsBoundBeforeItsVersionIsKnown) {
  StartServer();
  BindOn(Connect(Serving(false)));
  EXPECT_FALSE(front_.bound_at_once);
  back_.reset();
  clients_.clear();
  server_.reset();
  ServerOptions options = Both();
  options.versions = kVersion1Alone;
  StartServer(options);
  Connect({.first_xid = 1, .reverse_services = {&callbacks_}});
  EXPECT_TRUE(setting_->Until([&] { return front_.bound_at_once; }));
}

// --- A client that says nothing of itself, and later does ---

// A call of version 2 without arguments.
std::vector<std::byte> NullCall(uint32_t xid, uint32_t program, uint32_t procedure) {
  return Words({xid, 2, 8, kRdma2Msg, 0, /*inv_handle=*/0, 0, 0, 0, xid, 0, 2, program, 1, procedure, 0, 0, 0, 0});
}

// [v2:4.2.2+1] [v2:4.2+3]
TEST_F(ReverseV2Test, TheDefaultsHoldUntilTheClientsPropertiesAreIn) {
  ServerOptions options = Both();
  options.inline_send_max = 16384;
  StartServer(options);
  setting_->ActAsClient();
  peer_.emplace(setting_->loop(), RawPeer::Options{.receive_size = 16384, .incoming_reads = 4, .name = "raw"});
  peer_->Connect(setting_->server_host(), server_->port());
  ASSERT_TRUE(setting_->Until([&] { return peer_->established; }));
  peer_->Send(NullCall(7, kFrontProgram, kBind));
  ASSERT_TRUE(setting_->Until([&] { return peer_->engine->received.size() == 1; }));
  ASSERT_TRUE(front_.bound);

  const auto call = [&](size_t size) {
    const auto data = Pattern(size);
    std::optional<Outcome> result;
    const size_t before = peer_->engine->received.size();
    const rpcrdma::CallId id = back_->Call(
        Id(kSize), [&](XdrWriter& args) { args.EligibleOpaque(data); }, {},
        [&](Outcome outcome) { result.emplace(std::move(outcome)); });
    EXPECT_TRUE(setting_->Until([&] { return result.has_value() || peer_->engine->received.size() > before; }));
    const bool sent = peer_->engine->received.size() > before;
    back_->Cancel(id);
    EXPECT_TRUE(setting_->Until([&] { return result.has_value(); }));
    return sent;
  };
  EXPECT_FALSE(call(5000));
  // Receives of 16384 bytes, and inline calls as before; the answer has what the server says of itself.
  const size_t before = peer_->engine->received.size();
  peer_->Send(Words({0, 2, 8, kRdma2ConnProp, 0, 1, rpcrdma::kRdma2PropidRbsiz, 4, 16384}));
  ASSERT_TRUE(setting_->Until([&] { return peer_->engine->received.size() > before; }));
  ByteReader in(peer_->engine->received.back());
  in.Skip(12);
  EXPECT_EQ(in.U32(), kRdma2ConnProp);
  EXPECT_EQ(in.U32(), kFlagResponse);
  EXPECT_TRUE(call(5000));
}

// --- Extensions ---

constexpr uint32_t kPing = rpcrdma::kExperimentalNumbers + 1;
constexpr uint32_t kPong = rpcrdma::kExperimentalNumbers + 2;
constexpr uint32_t kPingProperty = rpcrdma::kExperimentalNumbers + 3;
constexpr uint32_t kErrNotNow = rpcrdma::kExperimentalNumbers + 4;
constexpr uint32_t kFlagGently = 0x40000000;

std::optional<size_t> AllOf(ConstBytes rest) {
  return rest.size();
}
bool AnyWord(ConstBytes data) {
  return data.size() == 4;
}
rpcrdma::FlagUse UseInCalls(uint32_t type) {
  return type == kRdma2Msg ? rpcrdma::FlagUse::kMay : rpcrdma::FlagUse::kMustNot;
}
constexpr rpcrdma::HeaderTypeRow kTypes[] = {{.type = kPing, .name = "PING", .size = AllOf},
                                             {.type = kPong, .name = "PONG", .size = AllOf}};
constexpr rpcrdma::PropertyRow kProperties[] = {{.id = kPingProperty, .name = "ping", .valid = AnyWord}};
constexpr rpcrdma::ErrorRow kErrors[] = {{.code = kErrNotNow, .name = "NOT_NOW"}};
// The property is a number of pings, and who takes none takes no such flag.
constexpr rpcrdma::FlagRow kFlags[] = {
    {.flag = kFlagGently, .name = "GENTLY", .use = UseInCalls, .property = kPingProperty, .shows = [](ConstBytes data) {
       return ByteReader(data).U32() != 0;
     }}};
constexpr rpcrdma::Feature kFeature{
    .name = "ping", .header_types = kTypes, .properties = kProperties, .errors = kErrors, .flags = kFlags};

std::shared_ptr<const Extensions> Known() {
  Extensions extensions;
  EXPECT_FALSE(extensions.Add(kFeature).has_value());
  return std::make_shared<const Extensions>(std::move(extensions));
}

class ExtensionTest : public ReverseV2Test {
 protected:
  ServerOptions Answering(std::function<ExtensionAnswer(const ExtensionRequest&)> answer) {
    ServerOptions options = Both();
    options.extensions = Known();
    options.properties = {Property{.id = kPingProperty, .data = Words({99})}};
    if (answer) options.answer_extension[kPing] = std::move(answer);
    return options;
  }
  ClientOptions Knowing() {
    ClientOptions options = Serving(false);
    options.extensions = Known();
    options.properties = {Property{.id = kPingProperty, .data = Words({7})}};
    return options;
  }
  Result<Extension, CallError> Send(Client& client, uint32_t type) {
    std::optional<Result<Extension, CallError>> result;
    client.SendExtension(type, Words({1, 2, 3}),
                         [&](Result<Extension, CallError> answer) { result.emplace(std::move(answer)); });
    EXPECT_TRUE(setting_->Until([&] { return result.has_value(); }));
    if (!result) std::abort();
    return std::move(*result);
  }
};

// [v2:9.1+2] [v2:9.2+1]
TEST_F(ExtensionTest, TheHandlerOfATypeAnswersIt) {
  std::optional<std::vector<std::byte>> said;
  StartServer(Answering([&](const ExtensionRequest& request) -> ExtensionAnswer {
    const Property* ping = request.properties != nullptr ? FindProperty(*request.properties, kPingProperty) : nullptr;
    if (ping != nullptr) said = ping->data;
    return Extension{.type = kPong, .body = request.message.body};
  }));
  Client& client = Connect(Knowing());
  // Both ends have said so of themselves by the time that calls go out.
  ASSERT_NE(client.peer_properties(), nullptr);
  const Property* theirs = FindProperty(*client.peer_properties(), kPingProperty);
  ASSERT_NE(theirs, nullptr);
  EXPECT_EQ(theirs->data, Words({99}));
  const auto answer = Send(client, kPing);
  ASSERT_TRUE(answer.has_value()) << answer.error().ToString();
  EXPECT_EQ(answer->type, kPong);
  EXPECT_EQ(answer->body, Words({1, 2, 3}));
  EXPECT_EQ(said, Words({7}));
}

// [v2:9.3+2] [v2:9.3+4]
TEST_F(ExtensionTest, ItsErrorsAreItsOwn) {
  StartServer(Answering([](const ExtensionRequest&) -> ExtensionAnswer { return Err(ErrOther{kErrNotNow}); }));
  Client& client = Connect(Knowing());
  auto answer = Send(client, kPing);
  ASSERT_FALSE(answer.has_value());
  EXPECT_EQ(answer.error().kind, CallError::Kind::kTransport);
  EXPECT_EQ(answer.error().transport_error, kErrNotNow);
  // Nobody answers this one.
  answer = Send(client, kPong);
  ASSERT_FALSE(answer.has_value());
  EXPECT_EQ(answer.error().transport_error, kRdma2ErrInvalHtype);
  EXPECT_TRUE(CallOn(client, Id(kNull)).has_value());
}

TEST_F(ExtensionTest, AnAnswerThatIsNoneIsASystemError) {
  std::vector<ExtensionAnswer> answers = {Err(ErrOther{kErrNotNow + 1}), Extension{.type = kPong + 77},
                                          Extension{.type = kPong, .body = std::vector<std::byte>(5000)}};
  StartServer(Answering([&](const ExtensionRequest&) { return answers.back(); }));
  Client& client = Connect(Knowing());
  for (; !answers.empty(); answers.pop_back()) {
    const auto answer = Send(client, kPing);
    ASSERT_FALSE(answer.has_value());
    EXPECT_EQ(answer.error().transport_error, kRdma2ErrSystem);
  }
}

// What a handler may do: it happens when the handler has returned, and the connection goes on.
TEST_F(ExtensionTest, AHandlerMayEndRequestsCallBackAndStop) {
  std::optional<Outcome> called_back;
  bool stopped = false;
  std::function<void()> act;
  StartServer(Answering([&](const ExtensionRequest& request) -> ExtensionAnswer {
    act();
    return Extension{.type = kPong, .body = request.message.body};
  }));
  Client& client = Connect(Knowing());
  BindOn(client);
  std::optional<Outcome> held;
  client.Call(
      {kProgram, 3, kHold}, [](XdrWriter& args) { args.U32(1); }, {},
      [&](Outcome outcome) { held.emplace(std::move(outcome)); });
  ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 1; }));
  act = [&] {
    service_.Answer(1);
    back_->Call(
        Id(kNull), [](XdrWriter&) {}, {}, [&](Outcome outcome) { called_back.emplace(std::move(outcome)); });
  };
  ASSERT_TRUE(Send(client, kPing).has_value());
  ASSERT_TRUE(setting_->Until([&] { return held.has_value() && called_back.has_value(); }));
  EXPECT_TRUE(held->has_value());
  EXPECT_TRUE(called_back->has_value());

  // With no Send of the server's on its way, nothing but the handler's return is left to wait for.
  ASSERT_TRUE(CallBack(Id(kNull)).has_value());
  setting_->For(1ms);
  act = [&] { server_->Stop(5s, [&] { stopped = true; }); };
  ASSERT_TRUE(Send(client, kPing).has_value()) << "its answer comes first";
  EXPECT_TRUE(setting_->Until([&] { return stopped && !client.connected(); }));
}

// [v2:1#1] Who does not know an extension works with whoever does.
TEST_F(ExtensionTest, AServerThatDoesNotKnowItServesItsClient) {
  StartServer();
  Client& client = Connect(Knowing());
  const auto answer = Send(client, kPing);
  ASSERT_FALSE(answer.has_value());
  EXPECT_EQ(answer.error().transport_error, kRdma2ErrInvalHtype);
  EXPECT_TRUE(CallOn(client, Id(kNull)).has_value());
}

// [v2:3.2#1] [v2:9.4+3] A server that has not shown it may take the flag for one of another extension, or count it as
// one that nobody has defined.
TEST_F(ExtensionTest, AFlagGoesToAServerThatHasShownThatItTakesItAndToNoOther) {
  const auto knows = [&](rpcrdma::PropertySet properties) {
    ServerOptions options = Answering(nullptr);
    options.properties = std::move(properties);
    return options;
  };
  const struct {
    const char* server;
    ServerOptions options;
    uint32_t seen;
  } kServers[] = {
      {"takes it", knows({{.id = kPingProperty, .data = Words({99})}}), kFlagGently},
      {"takes none", knows({{.id = kPingProperty, .data = Words({0})}}), 0},
      {"says the default", knows({{.id = kPingProperty}}), 0},
      {"says nothing of it", knows({}), 0},
      {"does not know it", Both(), 0},
  };
  for (const auto& row : kServers) {
    SCOPED_TRACE(row.server);
    clients_.clear();
    back_.reset();
    server_.reset();
    front_.flags_seen.clear();
    StartServer(row.options);
    TraceLog trace;
    ClientOptions options = Knowing();
    options.trace = &trace;
    Client& client = Connect(options);
    EXPECT_TRUE(CallOn(client, {kFrontProgram, 1, 0}, [](XdrWriter&) {}, {.transport_flags = kFlagGently}).has_value());
    EXPECT_EQ(front_.flags_seen, std::vector<uint32_t>{row.seen});
    EXPECT_EQ(server_->stats().connections.unknown_flags, 0u) << "it is not on the wire";
    const auto withheld = std::ranges::count_if(
        trace.lines(), [](const std::string& line) { return line.find(" flags.withheld ") != std::string::npos; });
    EXPECT_EQ(withheld, row.seen == 0 ? 1 : 0);
    clients_.clear();  // before its trace
  }
}

// [v2:9.4+3]
TEST_F(ExtensionTest, TheServiceSeesTheFlagsOfACall) {
  StartServer(Answering(nullptr));
  Client& client = Connect(Knowing());
  ASSERT_TRUE(CallOn(client, {kFrontProgram, 1, 0}).has_value());
  ASSERT_TRUE(CallOn(client, {kFrontProgram, 1, 0}, [](XdrWriter&) {}, {.transport_flags = kFlagGently}).has_value());
  // Not defined by anybody: not sent.
  ASSERT_TRUE(CallOn(client, {kFrontProgram, 1, 0}, [](XdrWriter&) {}, {.transport_flags = 0x100}).has_value());
  EXPECT_EQ(front_.flags_seen, (std::vector<uint32_t>{0, kFlagGently, 0}));
}

// --- Options ---

TEST_F(ExtensionTest, OptionsThatContradictThemselvesAreRefused) {
  const auto fault_of = [&](const std::function<void(ServerOptions&)>& change) {
    ServerOptions options = Answering([](const ExtensionRequest&) -> ExtensionAnswer { return Err(ErrOther{}); });
    change(options);
    Server server(setting_->loop(), options);
    const auto listening = server.Listen(setting_->server_host(), 0);
    return listening ? std::string() : listening.error().ToString();
  };
  const auto says = [](const std::string& fault, const std::string& what) {
    return fault.find(what) != std::string::npos;
  };
  EXPECT_EQ(fault_of([](ServerOptions&) {}), "");
  EXPECT_TRUE(says(fault_of([](ServerOptions& options) { options.versions = {0, 1}; }), "versions.low"));
  EXPECT_TRUE(says(fault_of([](ServerOptions& options) { options.versions = {1, 3}; }), "versions.high"));
  EXPECT_TRUE(says(fault_of([](ServerOptions& options) { options.inline_threshold = 3072; }), "inline_threshold"));
  EXPECT_TRUE(says(fault_of([](ServerOptions& options) { options.inline_send_max = 3072; }), "inline_send_max"));
  EXPECT_TRUE(says(fault_of([](ServerOptions& options) { options.extensions = nullptr; }), "properties"));
  EXPECT_TRUE(says(fault_of([](ServerOptions& options) { options.answer_extension[kPong + 9] = nullptr; }),
                   "answer_extension"));
}

}  // namespace
}  // namespace stagecoach::e2e
