// Calls from a server to its clients, end to end through the public API, in whichever setting it is linked with.
#include <gtest/gtest.h>

#include <algorithm>
#include <asio/awaitable.hpp>
#include <asio/bind_cancellation_slot.hpp>
#include <asio/cancellation_signal.hpp>
#include <asio/co_spawn.hpp>
#include <asio/detached.hpp>
#include <asio/use_awaitable.hpp>
#include <functional>
#include <map>
#include <optional>

#include "rpcrdma/api/client.h"
#include "rpcrdma/api/reverse_client.h"
#include "rpcrdma/api/server.h"
#include "rpcrdma/api/session.h"
#include "rpcrdma/loop/loop_context.h"
#include "tests/e2e/outcome.h"
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
using rpcrdma::Request;
using rpcrdma::ReverseCallOptions;
using rpcrdma::ReverseClient;
using rpcrdma::ReverseClientOptions;
using rpcrdma::Server;
using rpcrdma::ServerOptions;
using rpcrdma::XdrReader;
using rpcrdma::XdrWriter;

constexpr uint32_t kFrontProgram = 0x200000a0;
enum FrontProcedure : uint32_t {
  kBind = 1,       // void -> void: this connection serves reverse calls
  kRoundTrip = 2,  // a number -> what the client makes of it when it is called back
};

// The server's program: answers by asking the client.
class Front final : public rpcrdma::Service {
 public:
  uint32_t program() const override { return kFrontProgram; }
  rpcrdma::VersionRange versions() const override { return {1, 1}; }
  // Who binds again has a new connection: the reply of the last time would not do.
  bool idempotent(uint32_t, uint32_t procedure) const override { return procedure == kBind; }
  void Handle(Request request) override {
    XdrReader& args = request.args();
    switch (request.procedure()) {
      case kBind:
        last_client = request.client();
        if (back) bound = back->Bind(request.client());
        if (at_bind) at_bind();
        return request.Reply();
      case kRoundTrip: {
        const uint32_t number = args.U32("number");
        if (!args.Finish()) return request.Fail(AcceptStat::kGarbageArgs);
        back->Call(
            {kProgram, 3, kHold}, [&](XdrWriter& out) { out.U32(number); }, {},
            [request = std::make_shared<Request>(std::move(request))](Outcome outcome) {
              if (!outcome) return request->Fail(AcceptStat::kSystemErr);
              const uint32_t result = outcome->results().U32("number");
              request->Reply([&](XdrWriter& results) { results.U32(result + 1); });
            });
        return;
      }
      default:
        return request.Fail(AcceptStat::kProcUnavail);
    }
  }

  ReverseClient* back = nullptr;
  std::function<void()> at_bind;
  bool bound = false;
  rpcrdma::ClientId last_client = 0;
};

// Answers with as many words as it is asked for, none of them eligible.
class Wordy final : public rpcrdma::Service {
 public:
  uint32_t program() const override { return kFrontProgram + 1; }
  rpcrdma::VersionRange versions() const override { return {1, 1}; }
  void Handle(Request request) override {
    const uint32_t count = request.args().U32("count");
    request.Reply([&](XdrWriter& results) {
      for (uint32_t i = 0; i < count; ++i) results.U32(i);
    });
  }
};

class ReverseTest : public ::testing::Test {
 protected:
  ~ReverseTest() override {
    callbacks_.held.clear();
    client_.reset();
    back_.reset();
    server_.reset();
    setting_->For(1ms);
  }

  void StartServer(ReverseClientOptions options = {}, uint32_t reverse_credits = 8) {
    setting_->ActAsServer();
    server_.emplace(setting_->loop(),
                    ServerOptions{.reverse_credits = reverse_credits, .first_xid = 1, .trace = &trace_});
    server_->Register(&front_);
    back_.emplace(*server_, options);
    front_.back = &*back_;
    const auto listening = server_->Listen(setting_->server_host(), 0);
    ASSERT_TRUE(listening.has_value()) << listening.error().ToString();
  }
  void ConnectClient(uint32_t reverse_credits = 8, bool serves = true) {
    setting_->ActAsClient();
    ClientOptions options{.first_xid = 1};
    if (serves) options.reverse_services = {&callbacks_, &wordy_};
    options.reverse_credits = reverse_credits;
    client_ = std::make_unique<Client>(setting_->loop(), options);
    std::optional<Result<void, CallError>> result;
    client_->Connect(setting_->server_host(), server_->port(),
                     [&](Result<void, CallError> connected) { result = std::move(connected); });
    ASSERT_TRUE(setting_->Until([&] { return result.has_value(); })) << "connecting hangs";
    ASSERT_TRUE(result->has_value()) << result->error().ToString();
  }
  // The client says that it is there and serves.
  void BindClient() {
    front_.bound = false;
    ASSERT_TRUE(CallFront(kBind).has_value());
    ASSERT_TRUE(front_.bound);
  }
  void Start(ReverseClientOptions options = {}) {
    StartServer(options);
    ConnectClient();
    BindClient();
  }

  Outcome CallFront(FrontProcedure procedure, uint32_t number = 0) {
    std::optional<Outcome> result;
    AsyncFront(procedure, number, [&](Outcome outcome) { result.emplace(std::move(outcome)); });
    EXPECT_TRUE(setting_->Until([&] { return result.has_value(); })) << "a call hangs";
    if (!result) std::abort();  // the handler refers to this frame
    return std::move(*result);
  }
  void AsyncFront(FrontProcedure procedure, uint32_t number, Client::CallHandler handler) {
    client_->Call(
        {kFrontProgram, 1, procedure},
        [&](XdrWriter& args) {
          if (procedure == kRoundTrip) args.U32(number);
        },
        {}, std::move(handler));
  }

  // Runs one reverse call to its end.
  Outcome CallBack(
      Procedure procedure, Client::ArgsWriter args = [](XdrWriter&) {}, const ReverseCallOptions& options = {}) {
    std::optional<Outcome> result;
    back_->Call({kProgram, 3, procedure}, args, options, [&](Outcome outcome) { result.emplace(std::move(outcome)); });
    EXPECT_FALSE(result.has_value()) << "a handler ran inside the call that started it";
    EXPECT_TRUE(setting_->Until([&] { return result.has_value(); })) << "a reverse call hangs";
    if (!result) std::abort();
    return std::move(*result);
  }
  rpcrdma::CallId AsyncHold(uint32_t number, const ReverseCallOptions& options = {}) {
    return back_->Call(
        {kProgram, 3, kHold}, [&](XdrWriter& args) { args.U32(number); }, options,
        [this, number](Outcome outcome) { outcomes_.emplace(number, std::move(outcome)); });
  }
  bool UntilHeld(size_t count) {
    return setting_->Until([&] { return callbacks_.held.size() == count; });
  }
  bool UntilOutcomes(size_t count) {
    return setting_->Until([&] { return outcomes_.size() == count; });
  }
  CallError::Kind KindOf(uint32_t number) {
    const auto found = outcomes_.find(number);
    if (found == outcomes_.end() || found->second.has_value()) {
      ADD_FAILURE() << "call " << number << " did not fail";
      return {};
    }
    return found->second.error().kind;
  }

  // How often the server said so.
  size_t Told(const std::string& event) const {
    return static_cast<size_t>(std::ranges::count_if(trace_.lines(), [&](const std::string& line) {
      return line.find(" server " + event + " ") != std::string::npos;
    }));
  }

  TraceLog trace_;
  std::unique_ptr<Setting> setting_ = MakeSettingOfThisTest();
  Front front_;
  TestService callbacks_;  // the client's
  Wordy wordy_;
  std::optional<Server> server_;
  std::optional<ReverseClient> back_;
  std::unique_ptr<Client> client_;
  std::map<uint32_t, Outcome> outcomes_;
};

TEST_F(ReverseTest, AServiceAsksItsClientWhileItServesACallOfIt) {
  Start();
  EXPECT_FALSE(client_->reverse_active_at().has_value());
  std::optional<Outcome> outcome;
  AsyncFront(kRoundTrip, 41, [&](Outcome result) { outcome.emplace(std::move(result)); });
  ASSERT_TRUE(UntilHeld(1));
  EXPECT_FALSE(outcome.has_value());
  setting_->For(1ms);
  const Instant in_progress = setting_->loop().Now();
  EXPECT_GE(client_->reverse_active_at(), in_progress);
  callbacks_.Answer(41);
  const Instant answered = *client_->reverse_active_at();
  ASSERT_TRUE(setting_->Until([&] { return outcome.has_value(); }));
  ASSERT_TRUE(outcome->has_value()) << outcome->error().ToString();
  EXPECT_EQ((*outcome)->results().U32("number"), 42u);
  EXPECT_EQ(client_->reverse_active_at(), answered);
}

TEST_F(ReverseTest, BothDirectionsAreBusyAtOnce) {
  Start();
  constexpr uint32_t kCalls = 300;
  std::map<uint32_t, uint32_t> results;
  for (uint32_t number = 0; number < kCalls; ++number) {
    AsyncFront(kRoundTrip, number, [&results, number](Outcome outcome) {
      ASSERT_TRUE(outcome.has_value()) << outcome.error().ToString();
      results[number] = outcome->results().U32("number");
    });
  }
  ASSERT_TRUE(setting_->Until([&] {
    while (!callbacks_.held.empty()) callbacks_.Answer(callbacks_.held.begin()->first);
    return results.size() == kCalls;
  }));
  for (const auto& [number, result] : results) EXPECT_EQ(result, number + 1);
  EXPECT_EQ(server_->stats().reverse.replies, kCalls);
  EXPECT_EQ(client_->reverse_stats().calls, kCalls);
}

TEST_F(ReverseTest, EligibleArgumentsAndResultsTravelInline) {
  Start();
  const auto data = Pattern(1001);
  const Outcome outcome =
      CallBack(kEcho, [&](XdrWriter& args) { args.EligibleOpaque(data); }, {.reply_bytes_max = 1100});
  ASSERT_TRUE(outcome.has_value()) << outcome.error().ToString();
  XdrReader results = outcome->results();
  const ConstBytes result = results.EligibleOpaque("data", kDataMax);
  ASSERT_TRUE(results.Finish().has_value());
  EXPECT_TRUE(std::equal(result.begin(), result.end(), data.begin(), data.end()));
  EXPECT_EQ(server_->stats().connections.registrations, 0u);
}

TEST_F(ReverseTest, WhatDoesNotFitInlineIsRefusedBeforeItIsSent) {
  Start();
  const auto data = Pattern(5000);
  Outcome outcome = CallBack(kSize, [&](XdrWriter& args) { args.EligibleOpaque(data); });
  ASSERT_FALSE(outcome.has_value());
  EXPECT_EQ(outcome.error().kind, CallError::Kind::kTooLarge);
  const auto huge = Pattern(1 << 20);
  outcome = CallBack(kSize, [&](XdrWriter& args) { args.Opaque(huge); });
  ASSERT_FALSE(outcome.has_value());
  EXPECT_EQ(outcome.error().kind, CallError::Kind::kTooLarge);
  outcome = CallBack(kSource, [&](XdrWriter& args) { args.U32(10); }, {.reply_bytes_max = 5000});
  ASSERT_FALSE(outcome.has_value());
  EXPECT_EQ(outcome.error().kind, CallError::Kind::kTooLarge);
  EXPECT_EQ(server_->stats().reverse.sends, 0u);
  EXPECT_TRUE(CallBack(kNull).has_value());
}

// [5666bis:5.5#6]
TEST_F(ReverseTest, AReplyThatDoesNotFitInlineIsErrChunk) {
  Start();
  for (const uint32_t size : {5000u, 2000000u}) {
    const Outcome outcome = CallBack(kSource, [&](XdrWriter& args) { args.U32(size); });
    ASSERT_FALSE(outcome.has_value());
    EXPECT_EQ(outcome.error().kind, CallError::Kind::kTransport) << outcome.error().ToString();
  }
  // 24 bytes of RPC header and 28 of transport header leave room for 1011 words.
  for (const uint32_t words : {1011u, 1012u, 100000u}) {
    std::optional<Outcome> result;
    back_->Call(
        {kFrontProgram + 1, 1, 1}, [&](XdrWriter& args) { args.U32(words); }, {},
        [&](Outcome outcome) { result.emplace(std::move(outcome)); });
    ASSERT_TRUE(setting_->Until([&] { return result.has_value(); }));
    EXPECT_EQ(result->has_value(), words == 1011);
    if (!result->has_value()) {
      EXPECT_EQ(result->error().kind, CallError::Kind::kTransport);
    }
  }
  EXPECT_TRUE(CallBack(kNull).has_value());
  EXPECT_TRUE(client_->connected());
}

TEST_F(ReverseTest, ErrorsOfTheRpcLayerArrive) {
  Start();
  const auto kind = [&](const ProcedureId& procedure) {
    std::optional<Outcome> result;
    back_->Call(
        procedure, [](XdrWriter&) {}, {}, [&](Outcome outcome) { result.emplace(std::move(outcome)); });
    EXPECT_TRUE(setting_->Until([&] { return result.has_value(); }));
    return result && !result->has_value() ? std::optional(result->error().accept_stat) : std::nullopt;
  };
  EXPECT_EQ(kind({0x20001111, 1, 0}), AcceptStat::kProgUnavail);
  EXPECT_EQ(kind({kProgram, 9, 0}), AcceptStat::kProgMismatch);
  EXPECT_EQ(kind({kProgram, 3, 99}), AcceptStat::kProcUnavail);
  EXPECT_EQ(kind({kProgram, 3, kSize}), AcceptStat::kGarbageArgs);
}

TEST_F(ReverseTest, AClientDeniesCredentialsAsAServerDoes) {
  Start();
  const auto stat = [&](const rpcrdma::OpaqueAuth& credentials) {
    ReverseCallOptions options;
    options.credentials = &credentials;
    const Outcome outcome = CallBack(
        kWords, [](XdrWriter& args) { args.U32(0); }, options);
    if (outcome.has_value()) return AuthStat::kOk;
    EXPECT_EQ(outcome.error().kind, CallError::Kind::kDenied) << outcome.error().ToString();
    return outcome.error().auth_stat;
  };
  const rpcrdma::OpaqueAuth sys = *rpcrdma::MakeAuthSys({});
  const rpcrdma::OpaqueAuth bad{.flavor = 1};
  const rpcrdma::OpaqueAuth gss{.flavor = 6};
  rpcrdma::OpaqueAuth longer;
  longer.body.append(std::vector<std::byte>(404));
  for (int times = 0; times < 20; ++times) {  // more than there are credits
    EXPECT_EQ(stat(sys), AuthStat::kOk);
    EXPECT_EQ(stat(bad), AuthStat::kBadCred);
    EXPECT_EQ(stat(gss), AuthStat::kRejectedCred);
    EXPECT_EQ(stat(longer), AuthStat::kBadCred);
  }
  callbacks_.taken = {rpcrdma::AuthFlavor::kSys};
  EXPECT_EQ(stat(rpcrdma::AuthNone()), AuthStat::kTooWeak);
  EXPECT_EQ(stat(sys), AuthStat::kOk);
  EXPECT_EQ(callbacks_.handled, 21u);
}

// [5666bis:8.3.1#1]
TEST_F(ReverseTest, NothingIsSentBeforeTheUpperLayerSaysThatTheClientIsPrepared) {
  StartServer();
  ConnectClient();
  Outcome outcome = CallBack(kNull);
  ASSERT_FALSE(outcome.has_value());
  EXPECT_EQ(outcome.error().kind, CallError::Kind::kNotConnected);
  EXPECT_FALSE(back_->Bind(77)) << "there is no such connection";
  EXPECT_EQ(server_->stats().reverse.sends, 0u);
  EXPECT_EQ(callbacks_.handled, 0u);
  BindClient();
  EXPECT_TRUE(CallBack(kNull).has_value());
  back_->Unbind();
  outcome = CallBack(kNull);
  ASSERT_FALSE(outcome.has_value());
  EXPECT_EQ(outcome.error().kind, CallError::Kind::kNotConnected);
}

// Neither end has a reverse direction unless it is asked for one.
TEST_F(ReverseTest, AServerWithoutReverseCreditsBindsNobody) {
  StartServer({}, /*reverse_credits=*/0);
  ConnectClient();
  ASSERT_TRUE(CallFront(kBind).has_value());
  EXPECT_FALSE(front_.bound);
  EXPECT_EQ(Told("reverse.not_bound"), 1u);
}

// [5666bis:8.3.1#1] A client that serves nothing drops what it is sent, and stays connected.
TEST_F(ReverseTest, AClientThatServesNothingDropsReverseCalls) {
  StartServer();
  ConnectClient(8, /*serves=*/false);
  BindClient();
  const Outcome outcome = CallBack(kNull, [](XdrWriter&) {}, {.timeout = 20ms});
  ASSERT_FALSE(outcome.has_value());
  EXPECT_EQ(outcome.error().kind, CallError::Kind::kTimedOut);
  EXPECT_TRUE(CallFront(kBind).has_value());
  EXPECT_TRUE(client_->connected());
  EXPECT_EQ(client_->stats().ignored, 1u);
}

// [5666bis:8.2.1#1] The client's two credits bound what it has in progress, whatever the server would like.
TEST_F(ReverseTest, TheClientsCreditsBoundItsCallsInProgress) {
  StartServer({}, 16);
  ConnectClient(2);
  BindClient();
  ASSERT_TRUE(CallBack(kNull).has_value());
  for (uint32_t number = 0; number < 20; ++number) AsyncHold(number);
  size_t most = 0;
  ASSERT_TRUE(setting_->Until([&] {
    most = std::max(most, callbacks_.held.size());
    if (callbacks_.held.size() == 2) {
      while (!callbacks_.held.empty()) callbacks_.Answer(callbacks_.held.begin()->first);
    }
    return outcomes_.size() == 20;
  }));
  EXPECT_EQ(most, 2u);
  for (const auto& [number, outcome] : outcomes_) EXPECT_TRUE(outcome.has_value());
}

TEST_F(ReverseTest, ACallThatTimesOutLeavesTheConnectionAndTheOtherDirectionAlone) {
  Start();
  ASSERT_TRUE(CallBack(kNull).has_value());
  AsyncHold(1, {.timeout = 20ms});
  ASSERT_TRUE(UntilHeld(1));
  ASSERT_TRUE(UntilOutcomes(1));
  EXPECT_EQ(KindOf(1), CallError::Kind::kTimedOut);
  EXPECT_TRUE(CallBack(kNull).has_value());
  // The late answer finds nobody.
  callbacks_.Answer(1);
  EXPECT_TRUE(CallFront(kBind).has_value());
  EXPECT_TRUE(CallBack(kNull).has_value());
  EXPECT_EQ(outcomes_.size(), 1u);
}

TEST_F(ReverseTest, ACallWithoutATimeoutWaits) {
  Start();
  ASSERT_TRUE(CallBack(kNull).has_value());
  AsyncHold(1, {.timeout = Duration::zero()});
  AsyncHold(2, {.timeout = Duration::max()});
  ASSERT_TRUE(UntilHeld(2));
  setting_->For(20ms);
  EXPECT_TRUE(outcomes_.empty());
  callbacks_.Answer(1);
  callbacks_.Answer(2);
  ASSERT_TRUE(UntilOutcomes(2));
  EXPECT_TRUE(outcomes_.at(1).has_value());
  EXPECT_TRUE(outcomes_.at(2).has_value());
}

TEST_F(ReverseTest, CancelledCallsEndAtOnceWhereverTheyAre) {
  Start({.wait_for_return = true});
  ASSERT_TRUE(CallBack(kNull).has_value());
  const rpcrdma::CallId sent = AsyncHold(1);
  ASSERT_TRUE(UntilHeld(1));
  back_->Unbind();
  const rpcrdma::CallId waiting = AsyncHold(2);
  EXPECT_EQ(back_->waiting(), 1u);
  back_->Cancel(sent);
  back_->Cancel(waiting);
  back_->Cancel(waiting);
  EXPECT_TRUE(outcomes_.empty()) << "a handler ran inside Cancel";
  ASSERT_TRUE(UntilOutcomes(2));
  EXPECT_EQ(KindOf(1), CallError::Kind::kCancelled);
  EXPECT_EQ(KindOf(2), CallError::Kind::kCancelled);
  EXPECT_EQ(back_->outstanding(), 0u);
}

TEST_F(ReverseTest, EmittingACancellationSlotCancelsTheCall) {
  Start({.wait_for_return = true});
  ASSERT_TRUE(CallBack(kNull).has_value());
  asio::cancellation_signal sent;
  asio::cancellation_signal waiting;
  asio::cancellation_signal refused;
  const auto hold = [&](uint32_t number, asio::cancellation_signal& signal) {
    back_->AsyncCall(
        {kProgram, 3, kHold}, [number](XdrWriter& args) { args.U32(number); }, ReverseCallOptions{},
        asio::bind_cancellation_slot(
            signal.slot(), [this, number](Outcome outcome) { outcomes_.emplace(number, std::move(outcome)); }));
  };
  hold(1, sent);
  ASSERT_TRUE(UntilHeld(1));
  back_->Unbind();
  hold(2, waiting);
  const auto huge = Pattern(1 << 20);
  back_->AsyncCall(
      {kProgram, 3, kSize}, [&](XdrWriter& args) { args.Opaque(huge); }, ReverseCallOptions{},
      asio::bind_cancellation_slot(refused.slot(),
                                   [this](Outcome outcome) { outcomes_.emplace(3, std::move(outcome)); }));
  EXPECT_EQ(back_->waiting(), 1u);
  for (asio::cancellation_signal* signal : {&sent, &waiting, &refused}) signal->emit(asio::cancellation_type::terminal);
  EXPECT_TRUE(outcomes_.empty()) << "a handler ran inside emit";
  ASSERT_TRUE(UntilOutcomes(3));
  EXPECT_EQ(KindOf(1), CallError::Kind::kCancelled);
  EXPECT_EQ(KindOf(2), CallError::Kind::kCancelled);
  EXPECT_EQ(KindOf(3), CallError::Kind::kTooLarge) << "it was over before";
  EXPECT_EQ(back_->outstanding(), 0u);

  // Over: nothing is left to be cancelled, of the calls or of their client.
  ASSERT_TRUE(CallFront(kBind).has_value());
  AsyncHold(4);
  ASSERT_TRUE(UntilHeld(2));
  sent.emit(asio::cancellation_type::terminal);
  callbacks_.Answer(4);
  ASSERT_TRUE(UntilOutcomes(4));
  EXPECT_TRUE(outcomes_.at(4).has_value()) << outcomes_.at(4).error().ToString();
  front_.back = nullptr;
  back_.reset();
  waiting.emit(asio::cancellation_type::terminal);
}

TEST_F(ReverseTest, WithoutAnIdentityCallsEndWithTheirConnection) {
  Start();
  ASSERT_TRUE(CallBack(kNull).has_value());
  AsyncHold(1);
  ASSERT_TRUE(UntilHeld(1));
  client_.reset();
  ASSERT_TRUE(UntilOutcomes(1));
  EXPECT_EQ(KindOf(1), CallError::Kind::kConnectionLost);
  EXPECT_FALSE(back_->bound());
  AsyncHold(2);
  ASSERT_TRUE(UntilOutcomes(2));
  EXPECT_EQ(KindOf(2), CallError::Kind::kNotConnected);
}

// Section 8.3.2: the server cannot connect to its client. It waits, and sends again with the same XID.
TEST_F(ReverseTest, CallsWaitForTheClientToReturnAndKeepTheirXids) {
  Start({.wait_for_return = true});
  ASSERT_TRUE(CallBack(kNull).has_value());
  AsyncHold(1);
  AsyncHold(2);
  ASSERT_TRUE(UntilHeld(2));
  const uint32_t first_xid = callbacks_.held.find(1)->second.header().xid;
  const uint32_t second_xid = callbacks_.held.find(2)->second.header().xid;
  client_.reset();
  ASSERT_TRUE(setting_->Until([&] { return back_->waiting() == 2; }));
  AsyncHold(3);  // made while there is nobody
  EXPECT_EQ(back_->waiting(), 3u);
  callbacks_.held.clear();  // what the first connection brought leads nowhere
  EXPECT_TRUE(outcomes_.empty());

  ConnectClient();
  EXPECT_TRUE(callbacks_.held.empty()) << "not before the client says who it is";
  BindClient();
  std::map<uint32_t, uint32_t> xids;
  ASSERT_TRUE(setting_->Until([&] {
    while (!callbacks_.held.empty()) {
      const auto& [number, request] = *callbacks_.held.begin();
      xids[number] = request.header().xid;
      callbacks_.Answer(number);
    }
    return outcomes_.size() == 3;
  }));
  EXPECT_EQ(xids[1], first_xid);
  EXPECT_EQ(xids[2], second_xid);
  EXPECT_EQ(Told("reverse.bound"), 2u);
  EXPECT_EQ(Told("reverse.waits"), 3u);
  EXPECT_EQ(Told("reverse.retransmitted"), 2u) << "the third was not sent before";
  EXPECT_TRUE(xids[3] != first_xid && xids[3] != second_xid);
  for (const auto& [number, outcome] : outcomes_) {
    ASSERT_TRUE(outcome.has_value()) << outcome.error().ToString();
    EXPECT_EQ(outcome->results().U32("number"), number);
  }
}

// A client that moves to another connection before the first has ended: what was sent there ends there, or is sent
// again here.
TEST_F(ReverseTest, CallsFollowTheClientToItsNewConnectionWhenTheOldOneIsLost) {
  Start({.wait_for_return = true});
  ASSERT_TRUE(CallBack(kNull).has_value());
  AsyncHold(1);
  ASSERT_TRUE(UntilHeld(1));
  std::unique_ptr<Client> old = std::move(client_);
  ConnectClient();
  BindClient();
  EXPECT_EQ(back_->waiting(), 0u);
  EXPECT_EQ(callbacks_.held.size(), 1u);
  old.reset();
  ASSERT_TRUE(UntilHeld(2));
  EXPECT_EQ(callbacks_.held.begin()->second.header().xid, std::next(callbacks_.held.begin())->second.header().xid);
  callbacks_.Answer(1);
  callbacks_.Answer(1);
  ASSERT_TRUE(UntilOutcomes(1));
  EXPECT_TRUE(outcomes_.begin()->second.has_value());
}

TEST_F(ReverseTest, NoCallWaitsForTheClientForLongerThanItsTimeout) {
  Start({.wait_for_return = true});
  ASSERT_TRUE(CallBack(kNull).has_value());
  AsyncHold(1, {.timeout = 30ms});
  ASSERT_TRUE(UntilHeld(1));
  client_.reset();
  ASSERT_TRUE(setting_->Until([&] { return !back_->bound(); }));
  AsyncHold(2, {.timeout = 20ms});
  AsyncHold(3, {.timeout = 40ms});
  ASSERT_TRUE(UntilOutcomes(3));
  EXPECT_EQ(KindOf(1), CallError::Kind::kTimedOut) << "it was sent";
  EXPECT_EQ(KindOf(2), CallError::Kind::kNotConnected);
  EXPECT_EQ(KindOf(3), CallError::Kind::kNotConnected);
}

TEST_F(ReverseTest, AsManyCallsWaitAsAreAllowed) {
  StartServer({.calls_max = 3, .wait_for_return = true});
  for (uint32_t number = 1; number <= 4; ++number) AsyncHold(number);
  ASSERT_TRUE(UntilOutcomes(1));
  EXPECT_EQ(KindOf(4), CallError::Kind::kQueueFull);
  EXPECT_EQ(back_->waiting(), 3u);
  ConnectClient();
  BindClient();
  ASSERT_TRUE(setting_->Until([&] {
    while (!callbacks_.held.empty()) callbacks_.Answer(callbacks_.held.begin()->first);
    return outcomes_.size() == 4;
  }));
  for (uint32_t number = 1; number <= 3; ++number) EXPECT_TRUE(outcomes_.at(number).has_value());
}

TEST_F(ReverseTest, AStoppingServerFinishesWhatNeedsTheClientAndWaitsForNobody) {
  Start({.wait_for_return = true});
  ASSERT_TRUE(CallBack(kNull).has_value());
  std::optional<Outcome> forward;
  AsyncFront(kRoundTrip, 10, [&](Outcome outcome) { forward.emplace(std::move(outcome)); });
  ASSERT_TRUE(UntilHeld(1));
  ReverseClient absent(*server_, {.wait_for_return = true});
  std::optional<Outcome> waiting;
  absent.Call(
      {kProgram, 3, kNull}, [](XdrWriter&) {}, {}, [&](Outcome outcome) { waiting.emplace(std::move(outcome)); });
  bool stopped = false;
  server_->Stop(60s, [&] { stopped = true; });
  ASSERT_TRUE(setting_->Until([&] { return waiting.has_value(); }));
  ASSERT_FALSE(waiting->has_value());
  EXPECT_EQ(waiting->error().kind, CallError::Kind::kClosed);
  EXPECT_FALSE(stopped);
  callbacks_.Answer(10);
  ASSERT_TRUE(setting_->Until([&] { return stopped && forward.has_value(); }));
  ASSERT_TRUE(forward->has_value()) << forward->error().ToString();
  EXPECT_EQ((*forward)->results().U32("number"), 11u);
}

TEST_F(ReverseTest, ACallInProgressEndsWhenTheServersGraceIsOver) {
  Start({.wait_for_return = true});
  ASSERT_TRUE(CallBack(kNull).has_value());
  AsyncHold(1);
  ASSERT_TRUE(UntilHeld(1));
  bool stopped = false;
  server_->Stop(10ms, [&] { stopped = true; });
  ASSERT_TRUE(setting_->Until([&] { return stopped && outcomes_.size() == 1; }));
  EXPECT_EQ(KindOf(1), CallError::Kind::kClosed);
  EXPECT_EQ(Told("server.grace_over"), 1u);
}

TEST_F(ReverseTest, TheEndOfTheServerEndsEveryCallAndLeavesTheReverseClientUsable) {
  Start({.wait_for_return = true});
  ASSERT_TRUE(CallBack(kNull).has_value());
  AsyncHold(1);
  ASSERT_TRUE(UntilHeld(1));
  back_->Unbind();
  AsyncHold(2);
  server_.reset();
  EXPECT_TRUE(outcomes_.empty()) << "a handler ran inside ~Server";
  ASSERT_TRUE(UntilOutcomes(2));
  EXPECT_EQ(KindOf(1), CallError::Kind::kClosed);
  EXPECT_EQ(KindOf(2), CallError::Kind::kClosed);
  EXPECT_FALSE(back_->Bind(1));
  AsyncHold(3);
  ASSERT_TRUE(UntilOutcomes(3));
  EXPECT_EQ(KindOf(3), CallError::Kind::kNotConnected);
}

TEST_F(ReverseTest, TheEndOfTheReverseClientEndsItsCalls) {
  Start({.wait_for_return = true});
  ASSERT_TRUE(CallBack(kNull).has_value());
  AsyncHold(1);
  ASSERT_TRUE(UntilHeld(1));
  front_.back = nullptr;
  back_.reset();
  EXPECT_TRUE(outcomes_.empty());
  ASSERT_TRUE(UntilOutcomes(1));
  EXPECT_EQ(KindOf(1), CallError::Kind::kClosed);
  callbacks_.Answer(1);
  EXPECT_TRUE(CallFront(kBind).has_value());
}

// What the client's service holds outlives the client, and leads nowhere then.
TEST_F(ReverseTest, ARequestOutlivesItsClient) {
  Start();
  ASSERT_TRUE(CallBack(kNull).has_value());
  const auto data = Pattern(500);
  AsyncHold(7);
  ASSERT_TRUE(UntilHeld(1));
  EXPECT_TRUE(callbacks_.held.begin()->second.connected());
  client_.reset();
  EXPECT_FALSE(callbacks_.held.begin()->second.connected());
  EXPECT_EQ(callbacks_.held.begin()->second.header().proc, kHold);
  callbacks_.Answer(7);
  ASSERT_TRUE(UntilOutcomes(1));
  EXPECT_EQ(KindOf(7), CallError::Kind::kConnectionLost);
}

TEST_F(ReverseTest, AClientClosesInAnOrderlyWayWithReverseCallsInProgress) {
  Start();
  ASSERT_TRUE(CallBack(kNull).has_value());
  AsyncHold(1);
  ASSERT_TRUE(UntilHeld(1));
  bool closed = false;
  client_->Close([&] { closed = true; });
  ASSERT_TRUE(setting_->Until([&] { return closed && outcomes_.size() == 1; }));
  EXPECT_EQ(KindOf(1), CallError::Kind::kConnectionLost);
  callbacks_.Answer(1);
}

// A connection that only the server uses is not idle.
TEST_F(ReverseTest, ASessionIsInUseWhileItsServerCalls) {
  StartServer();
  front_.at_bind = [&] { AsyncHold(5); };
  setting_->ActAsClient();
  rpcrdma::SessionOptions options;
  options.client.first_xid = 1;
  options.client.reverse_services = {&callbacks_};
  options.idle_timeout = 100ms;
  options.seed = 1;
  rpcrdma::Session session(setting_->loop(), setting_->server_host(), server_->port(), options);
  std::optional<Outcome> bound;
  session.Call(
      {kFrontProgram, 1, kBind}, [](XdrWriter&) {}, {}, [&](Outcome outcome) { bound.emplace(std::move(outcome)); });
  ASSERT_TRUE(setting_->Until([&] { return bound.has_value() && callbacks_.held.size() == 1; }));
  setting_->For(300ms);
  EXPECT_EQ(session.connections(), 1u);
  callbacks_.Answer(5);
  ASSERT_TRUE(UntilOutcomes(1));
  EXPECT_TRUE(outcomes_.at(5).has_value()) << outcomes_.at(5).error().ToString();
  ASSERT_TRUE(setting_->Until([&] { return session.connections() == 0; }));
  EXPECT_EQ(session.stats().idle_closes, 1u);
}

asio::awaitable<uint32_t> AskTwice(ReverseClient& back) {
  uint32_t sum = 0;
  for (uint32_t i = 0; i < 2; ++i) {
    const Outcome outcome = co_await back.AsyncCall(
        ProcedureId{kProgram, 3, kWords}, [i](XdrWriter& args) { args.U32(1), args.U32(i + 20); }, ReverseCallOptions{},
        asio::use_awaitable);
    XdrReader results = outcome->results();
    results.U32("count");
    sum += results.U32("word");
  }
  co_return sum;
}

TEST_F(ReverseTest, CoroutinesAwaitReverseCalls) {
  Start();
  std::optional<uint32_t> sum;
  rpcrdma::LoopContext context(setting_->loop());
  asio::co_spawn(asio::any_io_executor(context.get_executor()), AskTwice(*back_),
                 [&](const std::exception_ptr&, uint32_t result) { sum = result; });
  ASSERT_TRUE(setting_->Until([&] { return sum.has_value(); }));
  EXPECT_EQ(*sum, 41u);
}

}  // namespace
}  // namespace stagecoach::e2e
