// Sessions: calls that outlive their connections, in whichever setting this is linked with.
#include "rpcrdma/api/session.h"

#include <gtest/gtest.h>

#include <asio/awaitable.hpp>
#include <asio/bind_cancellation_slot.hpp>
#include <asio/cancellation_signal.hpp>
#include <asio/co_spawn.hpp>
#include <asio/detached.hpp>
#include <asio/use_awaitable.hpp>
#include <asio/use_future.hpp>
#include <future>
#include <set>
#include <tuple>

#include "rpcrdma/loop/loop_context.h"
#include "tests/e2e/session_setting.h"

namespace stagecoach::e2e {
namespace {

using rpcrdma::CallError;
using rpcrdma::CallId;
using rpcrdma::CallOptions;
using rpcrdma::Client;
using rpcrdma::Server;
using rpcrdma::ServerOptions;
using rpcrdma::Session;
using rpcrdma::SessionOptions;
using rpcrdma::XdrWriter;
using Kind = CallError::Kind;

class SessionTest : public ::testing::Test {
 protected:
  ~SessionTest() override {
    service_.inner.held.clear();
    session_.reset();
    server_.reset();
    setting_->For(1ms);
  }

  void StartServer(ServerOptions options = {}) {
    setting_->ActAsServer();
    server_.emplace(setting_->loop(), options);
    server_->Register(&service_);
    ++service_.servers;
    const auto listening = server_->Listen(setting_->server_host(), port_);
    ASSERT_TRUE(listening.has_value()) << listening.error().ToString();
    port_ = server_->port();
    setting_->ActAsClient();  // whose timers go on meanwhile
  }
  void StopServer() { server_.reset(); }
  static SessionOptions Quick() {
    SessionOptions options;
    options.client.first_xid = 100;
    options.reconnect.delay_first = 5ms;
    options.reconnect.delay_max = 20ms;
    options.seed = 1;
    return options;
  }
  void NewSession(SessionOptions options) {
    setting_->ActAsClient();
    options.client.trace = &events_;
    session_.emplace(setting_->loop(), setting_->server_host(), port_, options);
    for (const rpcrdma::Binding& binding : kBindings) session_->Register(binding);
  }
  void NewSession() { NewSession(Quick()); }

  bool Until(const std::function<bool()>& done) { return setting_->Until(done); }

  CallId Async(Procedure procedure, uint32_t number, Outcomes* outcomes, Client::ArgsWriter args,
               const CallOptions& options = {}) {
    setting_->ActAsClient();
    return session_->Call(Id(procedure), args, options, [number, outcomes](Outcome outcome) {
      EXPECT_EQ(outcomes->count(number), 0u) << "a handler ran twice";
      outcomes->emplace(number, std::move(outcome));
    });
  }
  CallId Hold(uint32_t number, Outcomes* outcomes, const CallOptions& options = {}) {
    return Async(
        kHold, number, outcomes, [&](XdrWriter& args) { args.U32(number); }, options);
  }
  Outcome Null(const CallOptions& options = {}) {
    Outcomes outcomes;
    Async(
        kNull, 0, &outcomes, [](XdrWriter&) {}, options);
    EXPECT_TRUE(outcomes.empty()) << "a handler ran inside the call that started it";
    EXPECT_TRUE(Until([&] { return !outcomes.empty(); })) << "a call hangs\n" << session_->DebugString();
    if (outcomes.empty()) std::abort();  // the handler refers to this frame
    return std::move(outcomes.at(0));
  }
  // As many credits as the server grants.
  void Warm() { ASSERT_TRUE(Null().has_value()); }

  std::unique_ptr<Setting> setting_ = MakeSettingOfThisTest();
  SessionEvents events_;
  RecordingService service_;
  std::optional<Server> server_;
  std::optional<Session> session_;
  uint16_t port_ = 0;
};

TEST_F(SessionTest, TheFirstCallConnects) {
  StartServer();
  NewSession();
  setting_->For(20ms);
  EXPECT_EQ(service_.connections, 0) << "before there is a call";
  const Outcome outcome = Null();
  ASSERT_TRUE(outcome.has_value()) << outcome.error().ToString();
  EXPECT_EQ(service_.connections, 1);
  EXPECT_EQ(session_->connections(), 1u);
  ASSERT_TRUE(Null().has_value());
  EXPECT_EQ(service_.connections, 1);
  EXPECT_EQ(session_->stats().calls, 2u);
  EXPECT_EQ(session_->stats().connections.calls, 2u);
}

TEST_F(SessionTest, CallsAreSentAgainWithTheirXidsWhenTheServerIsBack) {
  StartServer();
  NewSession();
  Warm();
  Outcomes outcomes;
  for (uint32_t number : {1, 2, 3}) Hold(number, &outcomes);
  ASSERT_TRUE(Until([&] { return service_.inner.held.size() == 3; }));
  StopServer();
  service_.inner.held.clear();
  StartServer();
  // One credit at first, until a reply brings the grant.
  ASSERT_TRUE(Until([&] { return service_.inner.held.size() == 1; })) << session_->DebugString();
  service_.inner.Answer(1);
  ASSERT_TRUE(Until([&] { return service_.inner.held.size() == 2; })) << session_->DebugString();
  for (uint32_t number : {3, 2}) service_.inner.Answer(number);
  ASSERT_TRUE(Until([&] { return outcomes.size() == 3; }));
  for (auto& [number, outcome] : outcomes) {
    ASSERT_TRUE(outcome.has_value()) << outcome.error().ToString();
    EXPECT_EQ(outcome->results().U32("number"), number);
  }
  // In the order of the calls both times.
  EXPECT_EQ(service_.XidsOf(kHold), (std::vector<uint32_t>{101, 102, 103, 101, 102, 103}));
  EXPECT_EQ(session_->stats().retransmissions, 3u);
  const auto again = events_.Of("retransmitted");
  ASSERT_EQ(again.size(), 3u);
  EXPECT_EQ(again[0].number("xid"), 101u);
  EXPECT_EQ(again[0].number("transmission"), 2u);
  EXPECT_EQ(events_.Count("lost"), 1u);
}

TEST_F(SessionTest, OnOneConnectionACallIsSentOnce) {
  StartServer();
  NewSession();
  Warm();
  Outcomes outcomes;
  for (uint32_t number = 1; number <= 8; ++number) Hold(number, &outcomes);
  for (int restart = 0; restart < 3; ++restart) {
    ASSERT_TRUE(Until([&] { return service_.inner.held.size() >= (restart == 0 ? 8u : 1u); }));
    StopServer();
    service_.inner.held.clear();
    StartServer();
  }
  while (outcomes.size() < 8) {
    ASSERT_TRUE(Until([&] { return !service_.inner.held.empty() || outcomes.size() == 8; })) << session_->DebugString();
    if (!service_.inner.held.empty()) service_.inner.Answer(service_.inner.held.begin()->first);
  }
  std::set<std::tuple<int, rpcrdma::ClientId, uint32_t>> once;
  for (const auto& seen : service_.seen) {
    EXPECT_TRUE(once.emplace(seen.server, seen.client, seen.xid).second) << seen.xid << " twice on one connection";
  }
  std::set<uint32_t> xids;
  for (const uint32_t xid : service_.XidsOf(kHold)) xids.insert(xid);
  EXPECT_EQ(xids.size(), 8u);
  EXPECT_GT(service_.XidsOf(kHold).size(), 8u);
  for (auto& [number, outcome] : outcomes) EXPECT_TRUE(outcome.has_value()) << outcome.error().ToString();
}

TEST_F(SessionTest, CallThatOptsOutEndsWithItsConnectionAndTheOthersGoOn) {
  StartServer();
  NewSession();
  Warm();
  Outcomes outcomes;
  CallOptions once;
  once.retransmit = false;
  Hold(1, &outcomes, once);
  Hold(2, &outcomes);
  ASSERT_TRUE(Until([&] { return service_.inner.held.size() == 2; }));
  StopServer();
  service_.inner.held.clear();
  ASSERT_TRUE(Until([&] { return outcomes.size() == 1; }));
  ASSERT_FALSE(outcomes.at(1).has_value());
  EXPECT_EQ(outcomes.at(1).error().kind, Kind::kConnectionLost);
  EXPECT_TRUE(outcomes.at(1).error().sent);
  StartServer();
  ASSERT_TRUE(Until([&] { return service_.inner.held.size() == 1; }));
  service_.inner.Answer(2);
  ASSERT_TRUE(Until([&] { return outcomes.size() == 2; }));
  EXPECT_TRUE(outcomes.at(2).has_value());
}

// Not sent is not sent: it may wait for the next connection, whatever it opted for.
TEST_F(SessionTest, CallThatOptsOutAndWasNotSentIsSentOnTheNextConnection) {
  StartServer({.credits = 1});
  NewSession();
  Warm();
  Outcomes outcomes;
  CallOptions once;
  once.retransmit = false;
  Hold(1, &outcomes, once);
  Hold(2, &outcomes, once);
  ASSERT_TRUE(Until([&] { return service_.inner.held.size() == 1; }));
  EXPECT_EQ(session_->waiting(), 1u) << "for the credit";
  StopServer();
  service_.inner.held.clear();
  StartServer();
  ASSERT_TRUE(Until([&] { return service_.inner.held.size() == 1; }));
  service_.inner.Answer(2);
  ASSERT_TRUE(Until([&] { return outcomes.size() == 2; }));
  EXPECT_EQ(outcomes.at(1).error().kind, Kind::kConnectionLost);
  EXPECT_TRUE(outcomes.at(2).has_value());
}

// [pvtdata:4#1] Thresholds, credits and RDMA Read limits are those of the server that is there now; what was planned
// for the old ones is planned again.
// Receives are made anew for each connection, so replies may be as long as the new one allows.
// [traps:requester#4]
TEST_F(SessionTest, ServerThatComesBackLargerAnswersInline) {
  StartServer({.inline_threshold = 1024});
  SessionOptions options = Quick();
  options.client.inline_threshold = 16384;
  NewSession(options);
  Outcomes outcomes;
  const auto data = Pattern(9000);
  const auto echo = [&](uint32_t number) {
    std::vector<std::byte> sink(12000);
    CallOptions with_sink;
    with_sink.result_buffers = {MutableBytes(sink)};
    Async(
        kEcho, number, &outcomes, [&](XdrWriter& args) { args.EligibleOpaque(data); }, with_sink);
    ASSERT_TRUE(Until([&] { return outcomes.count(number) == 1; }));
    ExpectData(outcomes.at(number), data);
  };
  echo(1);
  EXPECT_EQ(session_->stats().connections.calls_by_write_chunk, 1u);
  StopServer();
  ASSERT_TRUE(Until([&] { return session_->connections() == 0; }));
  StartServer({.inline_threshold = 16384});
  for (uint32_t number = 2; number < 6; ++number) echo(number);
  EXPECT_EQ(session_->stats().connections.calls_by_write_chunk, 1u);
  EXPECT_EQ(session_->stats().connections.calls_by_read_chunk, 1u);
  EXPECT_EQ(service_.connections, 2);
}

TEST_F(SessionTest, ServerThatComesBackSmallerIsAskedInItsOwnWay) {
  StartServer({.inline_threshold = 16384});
  SessionOptions options = Quick();
  options.client.inline_threshold = 16384;
  NewSession(options);
  Warm();
  Outcomes outcomes;
  const auto data = Pattern(9000);
  std::vector<std::byte> sink(12000);
  CallOptions with_sink;
  with_sink.result_buffers = {MutableBytes(sink)};
  const auto echo = [&](uint32_t number) {
    Async(
        kEcho, number, &outcomes, [&](XdrWriter& args) { args.EligibleOpaque(data); }, with_sink);
    EXPECT_TRUE(Until([&] { return outcomes.count(number) == 1; }));
    ExpectData(outcomes.at(number), data);
  };
  echo(1);
  EXPECT_EQ(session_->stats().connections.calls_by_read_chunk, 0u);

  // Planned for the large threshold, and at the server when it goes.
  std::vector<uint32_t> words(2000, 7);
  Hold(2, &outcomes);
  Async(kWords, 3, &outcomes, [&](XdrWriter& args) {
    args.U32(static_cast<uint32_t>(words.size()));
    for (const uint32_t word : words) args.U32(word);
  });
  StopServer();
  service_.inner.held.clear();
  StartServer({.credits = 2, .inline_threshold = 1024, .outgoing_reads = 1});
  ASSERT_TRUE(Until([&] { return service_.inner.held.size() == 1; }));
  service_.inner.Answer(2);
  ASSERT_TRUE(Until([&] { return outcomes.size() == 3; }));
  // Of 8000 bytes each way, which fitted inline before.
  ASSERT_TRUE(outcomes.at(3).has_value()) << outcomes.at(3).error().ToString();
  EXPECT_EQ(outcomes.at(3)->results().U32("count"), words.size());
  EXPECT_EQ(session_->stats().connections.replies_long, 1u);
  EXPECT_EQ(session_->stats().connections.calls_long, 1u);
  echo(4);
  EXPECT_EQ(session_->stats().connections.calls_by_read_chunk, 1u);

  // And larger again: Receives are of the size that the new connection agrees on.
  StopServer();
  ASSERT_TRUE(Until([&] { return session_->connections() == 0; }));
  StartServer({.inline_threshold = 16384});
  echo(5);
  EXPECT_EQ(session_->stats().connections.calls_by_read_chunk, 1u);
}

TEST_F(SessionTest, CallThatFitsNoLongerFailsAsTyped) {
  StartServer({.inline_threshold = 4096});
  NewSession();
  Warm();
  Outcomes outcomes;
  // Many eligible items: their chunk lists fit a header of 4096 bytes and none of 1024.
  const std::vector<const char*> arguments(40, "data");
  const std::vector<const char*> results(16, "data");
  const rpcrdma::ProcedureBinding procedure{
      .number = kHold, .name = "HOLD", .arguments = arguments, .results = results, .reply_fixed = 4};
  const rpcrdma::Binding generous{
      .program = kProgram, .version = 3, .name = "generous", .procedures = std::span(&procedure, 1)};
  session_->Register(generous);
  const auto data = Pattern(4000);
  CallOptions options;
  std::vector<std::vector<std::byte>> sinks(16, std::vector<std::byte>(100000));
  for (auto& sink : sinks) options.result_buffers.push_back(MutableBytes(sink));
  const auto many = [&](XdrWriter& args) {
    args.U32(1);
    for (int i = 0; i < 40; ++i) args.EligibleOpaque(data);
  };
  Async(kHold, 1, &outcomes, many, options);
  ASSERT_TRUE(Until([&] { return outcomes.size() == 1; }));
  ASSERT_FALSE(outcomes.at(1).has_value());
  EXPECT_EQ(outcomes.at(1).error().kind, Kind::kRpc)
      << "the service knows no such arguments: " << outcomes.at(1).error().ToString();
  StopServer();
  StartServer({.inline_threshold = 1024});
  Warm();
  Async(kHold, 2, &outcomes, many, options);
  ASSERT_TRUE(Until([&] { return outcomes.size() == 2; }));
  EXPECT_EQ(outcomes.at(2).error().kind, Kind::kTooLarge);
  EXPECT_FALSE(outcomes.at(2).error().sent);
  session_.reset();  // before its Binding
}

TEST_F(SessionTest, NobodyThereFailsCallsAfterTheLimitOfAttempts) {
  StartServer();
  StopServer();
  SessionOptions options = Quick();
  options.reconnect.attempts_max = 3;
  NewSession(options);
  const Outcome outcome = Null();
  ASSERT_FALSE(outcome.has_value());
  EXPECT_EQ(outcome.error().kind, Kind::kRefused);
  EXPECT_FALSE(outcome.error().sent);
  const std::string where = setting_->HostPort(port_);
  EXPECT_EQ(outcome.error().ToString(), "call of program " + std::to_string(kProgram) + " version 3 procedure 0 at " +
                                            where + ": not sent after 3 failed attempts in a row: connect to " + where +
                                            ": connection refused");
  EXPECT_EQ(session_->stats().attempts, 3u);
  EXPECT_EQ(session_->stats().attempts_failed, 3u);
  // One more each, from now on.
  EXPECT_FALSE(Null().has_value());
  EXPECT_EQ(session_->stats().attempts, 4u);
  StartServer();
  EXPECT_TRUE(Null().has_value());
}

TEST_F(SessionTest, ServerThatIsFullIsAskedAgain) {
  StartServer({.clients_max = 1});
  setting_->ActAsClient();
  Client other(setting_->loop(), {.first_xid = 1});
  bool connected = false;
  other.Connect(setting_->server_host(), port_, [&](auto result) { connected = result.has_value(); });
  ASSERT_TRUE(Until([&] { return connected; }));
  NewSession();
  Outcomes outcomes;
  Async(kNull, 1, &outcomes, [](XdrWriter&) {});
  ASSERT_TRUE(Until([&] { return session_->stats().attempts_failed >= 2; }));
  // iWARP's rejections cannot be told from nobody listening.
  const std::string why = events_.Of("attempt_failed")[0].facts.at("why");
  EXPECT_TRUE(why == "rejected" || why == "refused") << why;
  EXPECT_TRUE(outcomes.empty());
  bool closed = false;
  other.Close([&] { closed = true; });
  ASSERT_TRUE(Until([&] { return closed && !outcomes.empty(); }));
  EXPECT_TRUE(outcomes.at(1).has_value());
}

TEST_F(SessionTest, DeadlinePassesWithoutAConnection) {
  StartServer();
  StopServer();
  NewSession();
  // Attempts go on for as long as a call waits; how long one takes is the device's affair.
  Outcomes outcomes;
  const CallId patient = Hold(1, &outcomes);
  ASSERT_TRUE(Until([&] { return session_->stats().attempts_failed >= 1; }));
  CallOptions brief;
  brief.timeout = 60ms;
  const Outcome outcome = Null(brief);
  ASSERT_FALSE(outcome.has_value());
  EXPECT_EQ(outcome.error().kind, Kind::kNotConnected);
  EXPECT_FALSE(outcome.error().sent);
  EXPECT_NE(outcome.error().ToString().find("connection refused"), std::string::npos) << outcome.error().ToString();
  // No call, no attempt.
  session_->Cancel(patient);
  ASSERT_TRUE(Until([&] { return outcomes.size() == 1; }));
  const auto attempts = session_->stats().attempts;
  setting_->For(100ms);
  EXPECT_LE(session_->stats().attempts, attempts + 1) << "one may have been under way";
}

TEST_F(SessionTest, DeadlinePassesBetweenTwoTransmissions) {
  StartServer();
  NewSession();
  Warm();
  Outcomes outcomes;
  CallOptions brief;
  brief.timeout = 200ms;
  Hold(1, &outcomes, brief);
  ASSERT_TRUE(Until([&] { return service_.inner.held.size() == 1; }));
  StopServer();
  ASSERT_TRUE(Until([&] { return outcomes.size() == 1; }));
  EXPECT_EQ(outcomes.at(1).error().kind, Kind::kTimedOut);
  EXPECT_TRUE(outcomes.at(1).error().sent);
}

TEST_F(SessionTest, CallThatTimesOutEndsItsConnectionAndTheOthersAreSentAgain) {
  StartServer();
  NewSession();
  Warm();
  Outcomes outcomes;
  CallOptions brief;
  brief.timeout = 100ms;
  Hold(1, &outcomes, brief);
  Hold(2, &outcomes);
  ASSERT_TRUE(Until([&] { return outcomes.size() == 1; }));
  EXPECT_EQ(outcomes.at(1).error().kind, Kind::kTimedOut);
  ASSERT_TRUE(Until([&] { return session_->stats().retransmissions == 1; }));
  // The server knows it by its XID: it is executed once, and answered on the connection that is there.
  service_.inner.Answer(2);
  ASSERT_TRUE(Until([&] { return outcomes.size() == 2; }));
  EXPECT_TRUE(outcomes.at(2).has_value());
  EXPECT_EQ(service_.XidsOf(kHold), (std::vector<uint32_t>{101, 102}));
  EXPECT_EQ(service_.connections, 2);
}

TEST_F(SessionTest, CallThatKillsTheServerEachTimeIsNotSentForEver) {
  StartServer();
  SessionOptions options = Quick();
  options.reconnect.transmissions_max = 3;
  NewSession(options);
  Outcomes outcomes;
  CallOptions patient;
  patient.timeout = Duration(0);
  Hold(1, &outcomes, patient);
  while (outcomes.empty()) {
    ASSERT_TRUE(Until([&] { return !service_.inner.held.empty() || !outcomes.empty(); }));
    if (!outcomes.empty()) break;
    StopServer();
    service_.inner.held.clear();
    StartServer();
  }
  EXPECT_EQ(outcomes.at(1).error().kind, Kind::kConnectionLost);
  EXPECT_TRUE(outcomes.at(1).error().sent);
  EXPECT_EQ(service_.XidsOf(kHold), (std::vector<uint32_t>{100, 100, 100}));
}

// --- Cancellation, closing and destruction, in each state ---

TEST_F(SessionTest, CallIsCancelledWhileItWaitsForAConnection) {
  StartServer();
  StopServer();
  NewSession();
  Outcomes outcomes;
  const CallId id = Hold(1, &outcomes);
  ASSERT_TRUE(Until([&] { return session_->stats().attempts_failed >= 1; }));
  session_->Cancel(id);
  EXPECT_TRUE(outcomes.empty()) << "a handler ran inside Cancel";
  session_->Cancel(id);
  ASSERT_TRUE(Until([&] { return !outcomes.empty(); }));
  EXPECT_EQ(outcomes.at(1).error().kind, Kind::kCancelled);
  EXPECT_FALSE(outcomes.at(1).error().sent);
  EXPECT_EQ(session_->outstanding(), 0u);
}

TEST_F(SessionTest, CallIsCancelledAtTheServer) {
  StartServer();
  NewSession();
  Warm();
  Outcomes outcomes;
  const CallId id = Hold(1, &outcomes);
  ASSERT_TRUE(Until([&] { return service_.inner.held.size() == 1; }));
  session_->Cancel(id);
  ASSERT_TRUE(Until([&] { return !outcomes.empty(); }));
  EXPECT_EQ(outcomes.at(1).error().kind, Kind::kCancelled);
  EXPECT_TRUE(outcomes.at(1).error().sent);
  service_.inner.Answer(1);
  EXPECT_TRUE(Null().has_value());
  EXPECT_EQ(service_.connections, 1);
}

TEST_F(SessionTest, CreditOfACancelledCallGoesToTheCallThatWaitsForOne) {
  StartServer({.credits = 1});
  NewSession();
  Outcomes outcomes;
  const CallId id = Hold(1, &outcomes);
  Hold(2, &outcomes);
  ASSERT_TRUE(Until([&] { return service_.inner.held.size() == 1; }));
  session_->Cancel(id);
  ASSERT_TRUE(Until([&] { return outcomes.size() == 1; }));
  EXPECT_EQ(session_->waiting(), 1u);
  service_.inner.Answer(1);
  ASSERT_TRUE(Until([&] { return service_.inner.held.size() == 1; })) << session_->DebugString();
  service_.inner.Answer(2);
  ASSERT_TRUE(Until([&] { return outcomes.size() == 2; }));
  EXPECT_TRUE(outcomes.at(2).has_value());
}

TEST_F(SessionTest, CallIsCancelledBetweenTwoTransmissions) {
  StartServer();
  NewSession();
  Warm();
  Outcomes outcomes;
  const CallId id = Hold(1, &outcomes);
  ASSERT_TRUE(Until([&] { return service_.inner.held.size() == 1; }));
  StopServer();
  ASSERT_TRUE(Until([&] { return session_->waiting() == 1; }));
  session_->Cancel(id);
  ASSERT_TRUE(Until([&] { return !outcomes.empty(); }));
  EXPECT_EQ(outcomes.at(1).error().kind, Kind::kCancelled);
  EXPECT_TRUE(outcomes.at(1).error().sent);
}

TEST_F(SessionTest, DestroyedInEachStateItTellsEveryCallOnceAndFromTheLoop) {
  StartServer({.credits = 1});
  // Connecting; connected, with a call at the server and one waiting; backing off.
  for (int state = 0; state < 3; ++state) {
    SCOPED_TRACE(state);
    SessionOptions session = Quick();
    session.client.first_xid = 1000u * static_cast<uint32_t>(state + 1);  // the server remembers calls by their XIDs
    NewSession(session);
    Outcomes outcomes;
    auto sink = std::make_unique<std::vector<std::byte>>(100000);
    CallOptions options;
    options.result_buffers = {MutableBytes(*sink)};
    Hold(1, &outcomes, options);
    Hold(2, &outcomes);
    if (state >= 1) {
      ASSERT_TRUE(Until([&] { return service_.inner.held.size() == 1; }));
    }
    if (state == 2) {
      StopServer();
      service_.inner.held.clear();
      ASSERT_TRUE(Until([&] { return session_->waiting() == 2; }));
    }
    session_.reset();
    sink.reset();  // nothing touches it any more
    EXPECT_TRUE(outcomes.empty());
    ASSERT_TRUE(Until([&] { return outcomes.size() == 2; }));
    for (auto& [number, outcome] : outcomes) EXPECT_EQ(outcome.error().kind, Kind::kClosed);
    EXPECT_EQ(outcomes.at(1).error().sent, state >= 1);
    EXPECT_FALSE(outcomes.at(2).error().sent);
    service_.inner.held.clear();
  }
}

TEST_F(SessionTest, DestroyedInAHandlerOfItsOwn) {
  StartServer();
  NewSession();
  int handlers = 0;
  for (int i = 0; i < 5; ++i) {
    session_->Call(
        Id(kNull), [](XdrWriter&) {}, {},
        [&](Outcome) {
          ++handlers;
          session_.reset();
        });
  }
  ASSERT_TRUE(Until([&] { return handlers == 5; }));
  ASSERT_TRUE(Until([&] { return service_.inner.clients == 0; }));
}

TEST_F(SessionTest, ClosedInEachStateItTellsEveryCallAndThenThatItIsClosed) {
  StartServer({.credits = 1});
  for (int state = 0; state < 4; ++state) {
    SCOPED_TRACE(state);
    SessionOptions session = Quick();
    session.client.first_xid = 1000u * static_cast<uint32_t>(state + 1);  // the server remembers calls by their XIDs
    NewSession(session);
    Outcomes outcomes;
    if (state > 0) {
      Hold(1, &outcomes);
      Hold(2, &outcomes);
    }
    if (state >= 2) {
      ASSERT_TRUE(Until([&] { return service_.inner.held.size() == 1; }));
    }
    if (state == 3) {
      StopServer();
      service_.inner.held.clear();
      ASSERT_TRUE(Until([&] { return session_->waiting() == 2; }));
    }
    bool closed = false;
    session_->Close([&] {
      EXPECT_EQ(outcomes.size(), state > 0 ? 2u : 0u) << "calls first";
      closed = true;
    });
    EXPECT_FALSE(closed);
    ASSERT_TRUE(Until([&] { return closed; }));
    for (auto& [number, outcome] : outcomes) EXPECT_EQ(outcome.error().kind, Kind::kClosed);
    EXPECT_EQ(Null().error().kind, Kind::kNotConnected);
    bool again = false;
    session_->Close([&] { again = true; });
    ASSERT_TRUE(Until([&] { return again; }));
    service_.inner.held.clear();
  }
}

// --- Several connections ---

TEST_F(SessionTest, CallsAreSpreadOverConnectionsAndTheirXidsAreUnique) {
  StartServer({.credits = 2});
  SessionOptions options = Quick();
  options.connections = 3;
  NewSession(options);
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(Null().has_value());
  EXPECT_EQ(session_->connections(), 1u) << "one call at a time needs no more";
  Outcomes outcomes;
  // As each call is let go another one has room: credits are those of the connections together.
  for (uint32_t number = 1; number <= 3; ++number) Hold(number, &outcomes);
  ASSERT_TRUE(Until([&] { return service_.inner.held.size() == 3 && session_->connections() == 3; }))
      << session_->DebugString();
  std::set<rpcrdma::ClientId> clients;
  for (const auto& [number, request] : service_.inner.held) clients.insert(request.client());
  EXPECT_GE(clients.size(), 2u);
  for (uint32_t number = 1; number <= 3; ++number) service_.inner.Answer(number);
  ASSERT_TRUE(Until([&] { return outcomes.size() == 3; }));

  for (uint32_t number = 10; number < 16; ++number) Hold(number, &outcomes);
  // Two credits where there was a reply, one where not.
  ASSERT_TRUE(Until([&] { return service_.inner.held.size() >= 5; })) << session_->DebugString();
  std::map<rpcrdma::ClientId, int> of_each;
  for (const auto& [number, request] : service_.inner.held) ++of_each[request.client()];
  EXPECT_EQ(of_each.size(), 3u);
  while (outcomes.size() < 9) {
    ASSERT_TRUE(Until([&] { return !service_.inner.held.empty() || outcomes.size() == 9; }));
    if (!service_.inner.held.empty()) service_.inner.Answer(service_.inner.held.begin()->first);
  }
  std::set<uint32_t> xids;
  for (const auto& seen : service_.seen) EXPECT_TRUE(xids.insert(seen.xid).second) << seen.xid;
}

TEST_F(SessionTest, OneConnectionThatEndsLeavesItsCallsToTheOthers) {
  StartServer();
  SessionOptions options = Quick();
  options.connections = 2;
  NewSession(options);
  Warm();
  Outcomes outcomes;
  Hold(2, &outcomes);
  Hold(3, &outcomes);
  ASSERT_TRUE(Until([&] { return service_.inner.held.size() == 2 && session_->connections() == 2; }));
  // Takes the one credit of the new connection: the others go by the first.
  Hold(4, &outcomes);
  CallOptions brief;
  brief.timeout = 150ms;
  Hold(1, &outcomes, brief);
  Hold(5, &outcomes);
  ASSERT_TRUE(Until([&] { return outcomes.count(1) == 1; }));
  EXPECT_EQ(outcomes.at(1).error().kind, Kind::kTimedOut);
  ASSERT_TRUE(Until([&] { return session_->stats().retransmissions > 0; }));
  for (auto& [number, request] : std::exchange(service_.inner.held, {})) {
    const uint32_t value = number;
    rpcrdma::Request one = std::move(request);
    one.Reply([&](XdrWriter& results) { results.U32(value); });
  }
  while (outcomes.size() < 5) {
    ASSERT_TRUE(Until([&] { return !service_.inner.held.empty() || outcomes.size() == 5; }));
    if (!service_.inner.held.empty()) service_.inner.Answer(service_.inner.held.begin()->first);
  }
  for (uint32_t number : {2, 3, 4, 5}) EXPECT_TRUE(outcomes.at(number).has_value());
  EXPECT_EQ(session_->stats().lost, 1u);
}

// --- Completion tokens ---

TEST_F(SessionTest, FuturesAndCoroutinesHaveReplies) {
  StartServer();
  NewSession();
  std::future<Outcome> future = session_->AsyncCall(
      Id(kNull), [](XdrWriter&) {}, {}, asio::use_future);
  ASSERT_TRUE(Until([&] { return future.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }));
  EXPECT_TRUE(future.get().has_value());

  rpcrdma::LoopContext context(setting_->loop());
  bool done = false;
  asio::co_spawn(
      asio::any_io_executor(context.get_executor()),
      [&]() -> asio::awaitable<void> {
        const auto data = Pattern(100000);
        const auto args = [&](XdrWriter& out) { out.EligibleOpaque(data); };
        Outcome outcome = co_await session_->AsyncCall(Id(kSize), args, {}, asio::use_awaitable);
        EXPECT_TRUE(outcome.has_value());
        if (!outcome) co_return;
        EXPECT_EQ(outcome->results().U32("size"), data.size());
        co_await session_->AsyncClose(asio::use_awaitable);
        done = true;
      },
      asio::detached);
  ASSERT_TRUE(Until([&] { return done; }));
}

TEST_F(SessionTest, EmittingACancellationSlotCancelsTheCall) {
  StartServer();
  NewSession();
  Warm();
  const auto hold = [](XdrWriter& args) { args.U32(1); };
  Outcomes outcomes;
  asio::cancellation_signal signal;
  session_->AsyncCall(Id(kHold), hold, {}, asio::bind_cancellation_slot(signal.slot(), [&](Outcome outcome) {
                        outcomes.emplace(1, std::move(outcome));
                      }));
  ASSERT_TRUE(Until([&] { return service_.inner.held.size() == 1; }));
  signal.emit(asio::cancellation_type::terminal);
  EXPECT_TRUE(outcomes.empty());
  ASSERT_TRUE(Until([&] { return !outcomes.empty(); }));
  EXPECT_EQ(outcomes.at(1).error().kind, Kind::kCancelled);
  // Over: nothing is left to be cancelled.
  signal.emit(asio::cancellation_type::terminal);
  session_.reset();
  signal.emit(asio::cancellation_type::terminal);
}

}  // namespace
}  // namespace stagecoach::e2e
