// Sessions in virtual time: servers that vanish, drop, partition and come back; what is done when, to the millisecond.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "base/prng.h"
#include "emu/world/simulated_world.h"
#include "tests/e2e/installed_world.h"
#include "tests/e2e/session_setting.h"

namespace stagecoach::e2e {
namespace {

using emu::Cut;
using rpcrdma::CallError;
using rpcrdma::CallOptions;
using rpcrdma::Client;
using rpcrdma::Server;
using rpcrdma::ServerOptions;
using rpcrdma::Session;
using rpcrdma::SessionOptions;
using rpcrdma::XdrWriter;
using Kind = CallError::Kind;

constexpr uint16_t kPort = 20049;

// A host with a server and one with a client.
class SessionWorld : public InstalledWorld {
 public:
  explicit SessionWorld(uint64_t seed, TraceSink* trace = nullptr, const emu::LinkOptions& link = {.chop = true})
      : InstalledWorld({.seed = seed, .trace = trace, .link = link}, {{"server", "10.0.0.1"}, {"client", "10.0.0.2"}}) {
  }
  ~SessionWorld() {
    *over_ = true;
    ForgetHeld();
    session.reset();
    server.reset();
    Uninstall();
  }

  void StartServer(ServerOptions options = {}) {
    world_->ActAs("server");
    server.emplace(loop(), options);
    server->Register(&service);
    ASSERT_TRUE(server->Listen("10.0.0.1", kPort).has_value());
    world_->ActAs("client");
  }
  void StopServer() {
    server.reset();
    ForgetHeld();
  }
  void ForgetHeld() {
    service.inner.held.clear();
    service.held_nulls.clear();
  }
  // Not a word from it any more.
  void CutPower() { world_->sim().CutHost(world_->fabric("server"), Cut::kSilent); }
  void RestorePower() {
    StopServer();
    world_->Restart("server");
  }
  void Partition(bool partitioned) {
    world_->sim().Partition(world_->fabric("server"), world_->fabric("client"), partitioned);
  }

  void NewSession(SessionOptions options = {}) {
    world_->ActAs("client");
    options.client.first_xid = 100;
    options.client.trace = &events;
    if (options.seed == 0) options.seed = 1;
    session.emplace(loop(), "10.0.0.1", kPort, options);
    for (const rpcrdma::Binding& binding : kBindings) session->Register(binding);
  }
  // A server, and a session with a connection to it.
  void Start(const ServerOptions& of_server = {}, const SessionOptions& of_session = {}) {
    StartServer(of_server);
    NewSession(of_session);
    ASSERT_TRUE(NullWorks());
  }
  rpcrdma::CallId Call(Procedure procedure, uint32_t number, Outcomes* outcomes, CallOptions options = {}) {
    world_->ActAs("client");
    return session->Call(
        Id(procedure),
        [&](XdrWriter& args) {
          if (procedure == kHold) args.U32(number);
        },
        options,
        [number, outcomes, over = over_](Outcome outcome) {
          // What ends with the world ends after the test's own variables.
          if (!*over) outcomes->emplace(number, std::move(outcome));
        });
  }
  void Call(Procedure procedure, uint32_t number, Client::CallHandler handler, CallOptions options) {
    session->Call(
        Id(procedure), [&](XdrWriter& args) { args.U32(number); }, options, std::move(handler));
  }
  bool NullWorks() {
    Outcomes outcomes;
    Call(kNull, 1, &outcomes);
    if (!Until([&] { return !outcomes.empty(); })) return false;
    return outcomes.at(1).has_value();
  }

  SessionEvents events;
  RecordingService service;
  std::optional<Server> server;
  std::optional<Session> session;

 private:
  const std::shared_ptr<bool> over_ = std::make_shared<bool>(false);
};

CallOptions Patient() {
  CallOptions options;
  options.timeout = Duration(0);
  return options;
}

SessionOptions KeptAlive(Duration interval, Duration timeout, uint32_t program = kProgram) {
  SessionOptions options;
  options.keepalive = {.interval = interval, .timeout = timeout, .program = program, .version = 3};
  return options;
}

std::vector<uint64_t> Delays(uint64_t seed) {
  SessionWorld world(3);
  SessionOptions options;
  options.reconnect.delay_first = 100ms;
  options.reconnect.delay_max = 1600ms;
  options.seed = seed;
  world.NewSession(options);
  Outcomes outcomes;
  world.Call(kNull, 1, &outcomes, Patient());
  world.For(30s);
  EXPECT_TRUE(outcomes.empty());
  std::vector<uint64_t> delays;
  for (const auto& event : world.events.Of("backing_off")) delays.push_back(event.number("ms"));
  // What it says is what it does.
  const auto attempts = world.events.Of("connecting");
  const auto failures = world.events.Of("attempt_failed");
  // The time may be over while it waits for one, or while one is under way.
  EXPECT_GE(attempts.size(), delays.size());
  EXPECT_LE(attempts.size(), delays.size() + 1);
  for (size_t i = 0; i + 1 < attempts.size(); ++i) {
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(attempts[i + 1].at - failures[i].at);
    EXPECT_EQ(static_cast<uint64_t>(waited.count()), delays[i]);
  }
  return delays;
}

TEST(SessionFaults, BackOffDoublesUpToItsBoundWithJitterOfItsSeed) {
  const std::vector<uint64_t> delays = Delays(1);
  ASSERT_GT(delays.size(), 20u);
  ASSERT_LT(delays.size(), 45u);
  uint64_t full = 100;
  for (const uint64_t delay : delays) {
    EXPECT_GE(delay, full / 2);
    EXPECT_LE(delay, full);
    full = std::min<uint64_t>(full * 2, 1600);
  }
  EXPECT_GT(std::set<uint64_t>(delays.end() - 10, delays.end()).size(), 5u) << "jitter";
  EXPECT_EQ(Delays(1), delays);
  EXPECT_NE(Delays(2), delays);
}

// [K1] of the reports that other systems had: connecting works, and every connection is dropped at once.
TEST(SessionFaults, ServerThatAcceptsAndDropsIsNotStormed) {
  SessionWorld world(5);
  bool drops = true;
  std::function<void()> start = [&] {
    world.StartServer();
    world.server->OnClientConnected([&](const std::string&) {
      if (!drops) return;
      world.loop().Post([&] {
        world.StopServer();
        start();
      });
    });
  };
  start();
  SessionOptions options;
  options.reconnect.delay_first = 50ms;
  options.reconnect.delay_max = 10s;
  options.reconnect.transmissions_max = 1000;
  world.NewSession(options);
  Outcomes outcomes;
  world.Call(kHold, 1, &outcomes, Patient());
  world.For(60s);
  EXPECT_TRUE(outcomes.empty());
  // 50 ms, doubled eight times, is the bound; then one in five to ten seconds.
  EXPECT_GE(world.session->stats().attempts, 10u);
  EXPECT_LE(world.session->stats().attempts, 8u + 12u);
  EXPECT_EQ(world.session->stats().connected, world.session->stats().lost);
  EXPECT_EQ(world.session->stats().useless, world.session->stats().lost) << "established is not useful";

  drops = false;
  ASSERT_TRUE(world.Until([&] { return world.service.inner.held.size() == 1; }));
  world.service.inner.Answer(1);
  ASSERT_TRUE(world.Until([&] { return !outcomes.empty(); }));
  EXPECT_TRUE(outcomes.at(1).has_value());
  // It has proved useful: back-off starts over.
  world.Call(kHold, 2, &outcomes, Patient());
  ASSERT_TRUE(world.Until([&] { return world.service.inner.held.size() == 1; }));
  world.StopServer();
  world.StartServer();
  ASSERT_TRUE(world.Until([&] { return world.service.inner.held.size() == 1; }));
  EXPECT_LE(world.events.Of("backing_off").back().number("ms"), 50u);
  world.service.inner.Answer(2);
  ASSERT_TRUE(world.Until([&] { return outcomes.size() == 2; }));
}

TEST(SessionFaults, SilentServerIsFoundOutByKeepaliveAndItsCallsGoOn) {
  SessionWorld world(7);
  world.Start({}, KeptAlive(20s, 5s));
  Outcomes outcomes;
  world.Call(kHold, 1, &outcomes, Patient());
  ASSERT_TRUE(world.Until([&] { return world.service.inner.held.size() == 1; }));
  const Instant cut = world.Now();
  world.CutPower();
  ASSERT_TRUE(world.Until([&] { return world.session->connections() == 0; }));
  EXPECT_LE(world.Now() - cut, 25s) << "InfiniBand's retries may be quicker";
  ASSERT_TRUE(world.Until([&] { return world.session->waiting() == 1; }));
  world.RestorePower();
  world.StartServer();
  ASSERT_TRUE(world.Until([&] { return world.service.inner.held.size() == 1; })) << world.session->DebugString();
  world.service.inner.Answer(1);
  ASSERT_TRUE(world.Until([&] { return !outcomes.empty(); }));
  ASSERT_TRUE(outcomes.at(1).has_value()) << outcomes.at(1).error().ToString();
  EXPECT_EQ(world.service.XidsOf(kHold), (std::vector<uint32_t>{101, 101}));
}

TEST(SessionFaults, QuietConnectionIsKeptAliveByAnswersOfAnyKind) {
  for (const uint32_t program : {kProgram, kProgram + 77}) {
    SessionWorld world(8);
    SessionOptions options = KeptAlive(5s, 1s, program);
    options.idle_timeout = Duration(0);
    world.Start({}, options);
    world.For(60s);
    EXPECT_GE(world.session->stats().keepalives, 11u);
    EXPECT_LE(world.session->stats().keepalives, 12u);
    EXPECT_EQ(world.session->stats().keepalives_unanswered, 0u);
    EXPECT_EQ(world.session->stats().attempts, 1u);
    EXPECT_EQ(world.events.Count("keepalive"), world.session->stats().keepalives);
  }
}

// With all credits but one in use by calls that take long, there is one to ask with.
TEST(SessionFaults, SlowCallsDoNotMakeAServerLookDead) {
  SessionWorld world(9);
  world.Start({.credits = 3}, KeptAlive(2s, 1s));
  Outcomes outcomes;
  for (uint32_t number = 1; number <= 4; ++number) world.Call(kHold, number, &outcomes, Patient());
  ASSERT_TRUE(world.Until([&] { return world.service.inner.held.size() == 2; }));
  world.For(60s);
  EXPECT_EQ(world.session->stats().lost, 0u);
  EXPECT_EQ(world.session->waiting(), 2u);
  EXPECT_GE(world.session->stats().keepalives, 20u);
  for (uint32_t number = 1; number <= 4; ++number) {
    ASSERT_TRUE(world.Until([&] { return world.service.inner.held.count(number) == 1; }));
    world.service.inner.Answer(number);
  }
  ASSERT_TRUE(world.Until([&] { return outcomes.size() == 4; }));
}

// Its answer is slow and others are not: it is waited for as long as the others come, asked once, and counts when it
// comes. The next one is as any other.
TEST(SessionFaults, KeepaliveWhoseAnswerIsSlowIsWaitedForBesideOtherReplies) {
  SessionWorld world(9);
  world.Start({.credits = 4}, KeptAlive(2s, 1s));
  world.service.holds_null = true;
  auto& held_nulls = world.service.held_nulls;
  const uint64_t before = world.session->stats().keepalives;
  ASSERT_TRUE(world.Until([&] { return held_nulls.size() == 1; }));
  // Ten times as long as a server may be silent.
  Outcomes outcomes;
  for (uint32_t number = 1; number <= 20; ++number) {
    world.Call(kHold, number, &outcomes, Patient());
    world.For(500ms);
    world.service.inner.Answer(number);
    ASSERT_TRUE(world.Until([&] { return outcomes.size() == number; }));
  }
  EXPECT_EQ(world.session->stats().keepalives, before + 1);
  EXPECT_EQ(world.session->stats().lost, 0u);

  // Now nothing else comes, and just before its time is over the answer does.
  world.For(900ms);
  held_nulls.front().Reply();
  held_nulls.pop_front();
  const Instant answered = world.Now();
  ASSERT_TRUE(world.Until([&] { return held_nulls.size() == 1; }));
  EXPECT_GE(world.Now() - answered, 2s);
  EXPECT_LT(world.Now() - answered, 2100ms);
  EXPECT_EQ(world.session->stats().keepalives, before + 2);
  EXPECT_EQ(world.session->stats().lost, 0u);

  // Nobody answers this one.
  const Instant asked = world.Now();
  ASSERT_TRUE(world.Until([&] { return world.session->connections() == 0; }));
  EXPECT_GE(world.Now() - asked, 900ms);
  EXPECT_LT(world.Now() - asked, 1100ms);
  EXPECT_EQ(world.session->stats().keepalives_unanswered, 1u);
}

// The deadlines of calls that wait, for a connection or for a credit, against a list. They are made with any deadline,
// in any order, and cancelled in any order; each ends when it is its turn, and none before.
TEST(SessionFaults, DeadlinesOfCallsThatWaitAreThoseOfAList) {
  for (const bool is_connected : {false, true}) {
    SCOPED_TRACE(is_connected);
    SessionWorld world(12);
    Outcomes kept;
    if (is_connected) {
      // Its only credit is in use for ever.
      world.Start({.credits = 1}, KeptAlive(0s, 1s));
      world.Call(kHold, 0, &kept, Patient());
      ASSERT_TRUE(world.Until([&] { return world.service.inner.held.size() == 1; }));
    } else {
      world.NewSession(KeptAlive(0s, 1s));
    }
    struct Waiting {
      rpcrdma::CallId id = 0;
      std::optional<Instant> deadline;
    };
    std::map<uint32_t, Waiting> list;
    std::map<uint32_t, Kind> expected;
    Outcomes outcomes;
    const Kind over = is_connected ? Kind::kNoCredit : Kind::kNotConnected;
    Prng prng(27);
    size_t passed = 0;
    size_t cancelled_first = 0;
    for (uint32_t number = 1; number <= 3000; ++number) {
      SCOPED_TRACE(number);
      const Instant now = world.Now();
      if (list.size() < 8 && !prng.OneIn(3)) {
        // Now and then two have the same, and some have none.
        const Duration timeout = prng.OneIn(6) ? Duration(0) : Duration(10ms) * static_cast<int>(prng.Between(1, 40));
        CallOptions options;
        options.timeout = timeout;
        Waiting call{.id = world.Call(kHold, number, &outcomes, options), .deadline = std::nullopt};
        if (timeout > Duration(0)) call.deadline = now + timeout;
        list.emplace(number, call);
      } else if (!list.empty() && prng.OneIn(2)) {
        const auto first = std::min_element(list.begin(), list.end(), [](const auto& a, const auto& b) {
          return a.second.deadline.value_or(Instant::max()) < b.second.deadline.value_or(Instant::max());
        });
        const auto call = prng.OneIn(2) ? first : std::next(list.begin(), static_cast<long>(prng.Below(list.size())));
        if (call == first) ++cancelled_first;
        world.session->Cancel(call->second.id);
        expected.emplace(call->first, Kind::kCancelled);
        list.erase(call);
      }
      // Up to just before a deadline, or just behind it.
      world.For(Duration(5ms) * static_cast<int>(prng.Below(8)) + Duration(prng.OneIn(2) ? 4'999'999 : 1));
      for (auto call = list.begin(); call != list.end();) {
        const auto each = call++;
        if (!each->second.deadline || world.Now() < *each->second.deadline) continue;
        ++passed;
        expected.emplace(each->first, over);
        list.erase(each);
      }
      std::map<uint32_t, Kind> ended;
      for (const auto& [which, outcome] : outcomes) {
        ASSERT_FALSE(outcome.has_value());
        ended.emplace(which, outcome.error().kind);
      }
      ASSERT_EQ(ended, expected);
      ASSERT_EQ(world.session->waiting(), list.size());
      outcomes.clear();
      expected.clear();
    }
    EXPECT_GT(passed, 300u);
    EXPECT_GT(cancelled_first, 100u);
    EXPECT_TRUE(kept.empty());
  }
}

// [5666bis:4.3#4] The only credit is the call's.
TEST(SessionFaults, WithoutACreditNothingIsAsked) {
  SessionWorld world(9);
  world.Start({.credits = 1}, KeptAlive(2s, 1s));
  Outcomes outcomes;
  world.Call(kHold, 1, &outcomes, Patient());
  ASSERT_TRUE(world.Until([&] { return world.service.inner.held.size() == 1; }));
  const uint64_t before = world.session->stats().keepalives;
  world.For(60s);
  EXPECT_EQ(world.session->stats().keepalives, before);
  EXPECT_EQ(world.session->stats().lost, 0u);
  EXPECT_EQ(world.server->stats().connections.calls, 2u);
  world.service.inner.Answer(1);
  ASSERT_TRUE(world.Until([&] { return outcomes.size() == 1; }));
  EXPECT_TRUE(outcomes.at(1).has_value());
  ASSERT_TRUE(world.Until([&] { return world.session->stats().keepalives > before; }));
}

TEST(SessionFaults, IdleConnectionIsClosedAndTheNextCallMakesOne) {
  SessionWorld world(10);
  SessionOptions options;
  options.idle_timeout = 10s;
  world.Start({}, options);
  // A call that takes long is no idleness.
  Outcomes outcomes;
  world.Call(kHold, 1, &outcomes, Patient());
  world.For(40s);
  EXPECT_EQ(world.session->connections(), 1u);
  world.service.inner.Answer(1);
  world.For(9s);
  EXPECT_EQ(world.session->connections(), 1u);
  world.For(2s);
  EXPECT_EQ(world.session->connections(), 0u);
  EXPECT_EQ(world.service.inner.clients, 0);
  world.For(60s);
  EXPECT_EQ(world.session->stats().attempts, 1u);
  const Instant then = world.Now();
  ASSERT_TRUE(world.NullWorks());
  EXPECT_LT(world.Now() - then, 5ms) << "no back-off: nothing had failed";
  EXPECT_EQ(world.session->stats().idle_closes, 1u);
  EXPECT_EQ(world.session->stats().lost, 0u);
  EXPECT_EQ(world.events.Count("backing_off"), 0u);
}

TEST(SessionFaults, ClientThatAnIdleServerLetsGoComesBackWithItsNextCall) {
  SessionWorld world(11);
  world.Start();
  bool stopped = false;
  world.server->Stop(1s, [&] { stopped = true; });
  ASSERT_TRUE(world.Until([&] { return stopped && world.session->connections() == 0; }));
  world.StopServer();
  world.StartServer();
  world.For(600s);
  EXPECT_EQ(world.session->stats().attempts, 1u);
  EXPECT_TRUE(world.NullWorks());
  EXPECT_EQ(world.session->stats().attempts, 2u);
}

// A server does not keep a connection for ever, and the memory of its call, whose client stopped in the middle of it.
TEST(SessionFaults, ClientThatOwesItsArgumentsForTooLongIsDisconnected) {
  SessionWorld world(11);
  world.Start({.idle_timeout = 5s});
  const auto data = Pattern(1 << 20);
  Outcomes outcomes;
  world.session->Call(
      Id(kSize), [&](XdrWriter& args) { args.EligibleOpaque(data); }, Patient(),
      [&](Outcome outcome) { outcomes.emplace(1, std::move(outcome)); });
  ASSERT_TRUE(world.Until([&] { return world.server->stats().connections.reads > 0; }));
  const Instant cut = world.Now();
  world.Partition(true);
  ASSERT_TRUE(world.Until([&] { return world.server->stats().clients == 0; })) << world.server->DebugString();
  EXPECT_LE(world.Now() - cut, 10s) << "InfiniBand's retries may be quicker";
  ASSERT_TRUE(world.Until([&] { return world.server->holdings().connections == 0; }));
  world.session.reset();
  world.For(1ms);
  EXPECT_EQ(outcomes.at(1).error().kind, Kind::kClosed);
}

// [K2]: what comes of an attempt that was given up comes to nobody.
TEST(SessionFaults, LateHandshakeOfAnAttemptGivenUpTouchesNothing) {
  for (const Duration outage : {Duration(1100ms), Duration(1500ms), Duration(2500ms), Duration(4s)}) {
    SessionWorld world(12);
    world.StartServer();
    SessionOptions options;
    options.client.connect_timeout = 1s;
    options.reconnect.delay_first = 10ms;
    options.reconnect.delay_max = 20ms;
    world.NewSession(options);
    Outcomes outcomes;
    world.Call(kHold, 1, &outcomes, Patient());
    world.For(15us);  // the request is on its way
    world.Partition(true);
    world.For(outage);
    EXPECT_GE(world.session->stats().attempts_failed, 1u);
    EXPECT_EQ(world.events.Of("attempt_failed")[0].facts.at("why"), "unreachable");
    world.Partition(false);  // now the answers to all attempts come
    ASSERT_TRUE(world.Until([&] { return world.service.inner.held.size() == 1; })) << world.session->DebugString();
    world.For(20s);
    EXPECT_EQ(world.session->connections(), 1u);
    EXPECT_EQ(world.session->stats().connected, 1u);
    EXPECT_EQ(world.session->stats().lost, 0u);
    EXPECT_EQ(world.service.inner.clients, 1) << "the server was told of those that were given up";
    world.service.inner.Answer(1);
    ASSERT_TRUE(world.Until([&] { return outcomes.size() == 1; }));
    EXPECT_TRUE(outcomes.at(1).has_value());
    EXPECT_EQ(world.service.XidsOf(kHold).size(), 1u);
  }
}

// The server goes at any moment of a call with chunks of all kinds, and comes back with other limits; the result is
// right, and the call's memory is nobody's when its handler has run.
TEST(SessionFaults, ServerThatGoesAtEveryStepOfACallDoesNoHarm) {
  const auto data = Pattern(60001);
  int sent_again = 0;
  for (int step = 0; step < 60; ++step) {
    SCOPED_TRACE(step);
    SessionWorld world(100 + static_cast<uint64_t>(step), nullptr, {.latency = 10us, .bytes_per_second = 200'000'000});
    SessionOptions options;
    options.client.memory_windows = step % 2 == 0;
    options.connections = 1 + static_cast<uint32_t>(step) % 3;
    world.Start({.inline_threshold = 4096}, options);
    // The argument, and room for the result behind it.
    auto memory = std::make_unique<std::vector<std::byte>>(data);
    memory->resize(2 * data.size() + 3);
    const ConstBytes argument = ConstBytes(*memory).first(data.size());
    CallOptions with_sink = Patient();
    with_sink.result_buffers = {MutableBytes(*memory).subspan(data.size())};
    if (step % 4 < 2) with_sink.registered_memory = rpcrdma::RegisteredMemory{*memory};
    std::optional<Outcome> outcome;
    world.session->Call(
        Id(kEcho), [&](XdrWriter& args) { args.EligibleOpaque(argument); }, with_sink,
        [&](Outcome result) { outcome.emplace(std::move(result)); });
    world.For(step * 17us);
    world.StopServer();
    world.For(step % 3 == 0 ? Duration(200ms) : Duration(0));
    world.StartServer({.credits = 1u + static_cast<uint32_t>(step) % 4,
                       .inline_threshold = step % 2 == 0 ? 1024u : 16384u,
                       .outgoing_reads = static_cast<uint8_t>(1 + step % 3)});
    ASSERT_TRUE(world.Until([&] { return outcome.has_value(); })) << world.session->DebugString();
    ExpectData(*outcome, data);
    sent_again += world.session->stats().retransmissions > 0 ? 1 : 0;
    with_sink = {};
    memory.reset();
    world.For(10ms);
    EXPECT_TRUE(world.NullWorks());
  }
  EXPECT_GT(sent_again, 10);
  EXPECT_LT(sent_again, 60) << "late steps find the call over";
}

uint64_t Story(uint64_t seed) {
  TraceHash hash;
  SessionWorld world(seed, &hash);
  Prng prng(seed);
  world.StartServer();
  SessionOptions options = KeptAlive(100ms, 50ms);
  options.connections = 3;
  options.client.trace = &hash;
  options.client.first_xid = 5;
  options.seed = seed;
  options.reconnect.transmissions_max = 100;
  world.session.emplace(world.loop(), "10.0.0.1", kPort, options);
  for (const rpcrdma::Binding& binding : kBindings) world.session->Register(binding);
  constexpr int kRounds = 30;
  constexpr int kCalls = kRounds * 11;
  int over = 0;
  const auto count = [&over](Outcome) { ++over; };
  auto& held = world.service.inner.held;
  std::vector<rpcrdma::CallId> calls;
  for (int round = 0; round < kRounds; ++round) {
    world.Call(kHold, static_cast<uint32_t>(round), count, Patient());
    for (int i = 0; i < 10; ++i) {
      calls.push_back(world.session->Call(
          Id(kSource), [&](XdrWriter& args) { args.U32(static_cast<uint32_t>(prng.Below(3000))); },
          {.reply_bytes_max = 4000}, count));
    }
    world.For(Duration(prng.Below(20'000'000)));
    if (prng.OneIn(3)) world.session->Cancel(calls[prng.Below(calls.size())]);
    if (prng.OneIn(2)) {
      EXPECT_TRUE(world.Until([&] { return !held.empty(); })) << world.session->DebugString();
      world.StopServer();
      world.For(Duration(prng.Below(300'000'000)));
      world.StartServer({.credits = static_cast<uint32_t>(prng.Between(1, 40))});
    }
    if (prng.OneIn(4)) {
      world.Partition(true);
      world.For(Duration(prng.Below(400'000'000)));
      world.Partition(false);
    }
  }
  while (over < kCalls && world.Until([&] { return over == kCalls || !held.empty(); })) {
    while (!held.empty()) world.service.inner.Answer(held.begin()->first);
  }
  EXPECT_EQ(over, kCalls) << world.session->DebugString();
  EXPECT_EQ(world.session->outstanding(), 0u);
  EXPECT_GT(world.session->stats().retransmissions, 0u);
  return hash.value();
}

TEST(SessionFaults, OneSeedIsOneStory) {
  for (const uint64_t seed : {1, 2, 3, 4, 5}) EXPECT_EQ(Story(seed), Story(seed)) << seed;
}

}  // namespace
}  // namespace stagecoach::e2e
