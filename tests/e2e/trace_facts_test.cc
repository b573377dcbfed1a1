// A trace tells enough to judge a history by, and the histories here are judged good.
#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "base/prng.h"
#include "rpcrdma/api/client.h"
#include "rpcrdma/api/server.h"
#include "scenarios/runner/connection_checker.h"
#include "scenarios/runner/trace_fanout.h"
#include "scenarios/runner/violations.h"
#include "tests/e2e/setting.h"
#include "tests/e2e/test_service.h"

namespace stagecoach::e2e {
namespace {

using rpcrdma::CallError;
using rpcrdma::CallId;
using rpcrdma::CallOptions;
using rpcrdma::Client;
using rpcrdma::ClientOptions;
using rpcrdma::Reply;
using rpcrdma::Server;
using rpcrdma::XdrWriter;

class EventCounts final : public TraceSink {
 public:
  void OnEvent(Instant, std::string_view, std::string_view event, std::initializer_list<TraceFact>) override {
    ++counts_[std::string(event)];
  }
  size_t of(const std::string& event) { return counts_[event]; }

 private:
  std::map<std::string, size_t> counts_;
};

// One client with memory windows, one without, one that goes away in the middle; calls of all kinds, some cancelled,
// some that cannot be answered within what they offered; then the server stops.
class Workload {
 public:
  Workload(uint64_t seed, TraceSink& trace)
      : trace_(trace), setting_(MakeSetting(seed, nullptr)), prng_(Prng(seed).Fork("workload")) {}

  void Run() {
    setting_->ActAsServer();
    Server server(setting_->loop(), {.credits = 5, .outgoing_reads = 2, .trace = &trace_});
    server.Register(&service_);
    ASSERT_TRUE(server.Listen(setting_->server_host(), 0).has_value());
    setting_->ActAsClient();
    std::optional<Client> clients[3];
    int connected = 0;
    for (int i = 0; i < 3; ++i) {
      ClientOptions options{.credits = 7u - static_cast<uint32_t>(i), .memory_windows = i != 1, .first_xid = 77};
      options.trace = &trace_;
      options.name = "client-" + std::to_string(i);
      clients[i].emplace(setting_->loop(), options);
      clients[i]->Register(kBindings[0]);
      clients[i]->Connect(setting_->server_host(), server.port(), [&](auto result) { connected += result ? 1 : 0; });
    }
    ASSERT_TRUE(setting_->Until([&] { return connected == 3; }));
    CancelLate(*clients[0]);
    for (int i = 0; i < 89; ++i) Call(*clients[i % 3]);
    ASSERT_TRUE(setting_->Until([&] { return over_ >= 25; }));
    for (const auto& [client, call] : calls_) {
      if (prng_.OneIn(8)) client->Cancel(call);
    }
    clients[2].reset();
    ASSERT_TRUE(setting_->Until([&] { return over_ == submitted_; }));
    bool stopped = false;
    server.Stop(1s, [&] { stopped = true; });
    ASSERT_TRUE(setting_->Until([&] { return stopped && !clients[0]->connected() && !clients[1]->connected(); }));
  }

  size_t answered() const { return answered_; }

 private:
  // Its reply comes when it is over.
  void CancelLate(Client& client) {
    ++submitted_;
    const CallId id = client.Call(
        {kProgram, 3, kHold}, [](XdrWriter& args) { args.U32(1); }, {}, [this](auto) { ++over_; });
    ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 1; }));
    client.Cancel(id);
    ASSERT_TRUE(setting_->Until([&] { return over_ == 1; }));
    service_.Answer(1);
  }

  void Call(Client& client) {
    const size_t size = prng_.OneIn(2) ? prng_.Below(2000) : prng_.Below(data_.size());
    sinks_.emplace_back(size + 4);
    CallOptions options;
    options.result_buffers = {sinks_.back()};
    if (prng_.OneIn(4)) options.result_buffers = {};  // then a long result fits nothing: ERR_CHUNK
    ++submitted_;
    const CallId id = client.Call(
        {kProgram, 3, kEcho}, [&](XdrWriter& args) { args.EligibleOpaque(ConstBytes(data_).first(size)); }, options,
        [this, size](Result<Reply, CallError> result) {
          ++over_;
          if (!result) return;
          ++answered_;
          const ConstBytes data = result->results().EligibleOpaque("data", kDataMax);
          EXPECT_TRUE(std::ranges::equal(data, ConstBytes(data_).first(size)));
        });
    calls_.emplace_back(&client, id);
  }

  TraceSink& trace_;
  std::unique_ptr<Setting> setting_;
  Prng prng_;
  TestService service_;
  const std::vector<std::byte> data_ = Pattern(100000);
  std::list<std::vector<std::byte>> sinks_;
  std::vector<std::pair<Client*, CallId>> calls_;
  size_t submitted_ = 0;
  size_t over_ = 0;
  size_t answered_ = 0;
};

TEST(TraceFacts, AHistoryIsJudgedByItsEventsAlone) {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    SCOPED_TRACE(seed);
    scenario::Violations violations;
    scenario::ConnectionChecker checker(&violations);
    EventCounts counts;
    scenario::TraceFanout trace;
    trace.Add(&checker);
    trace.Add(&counts);
    {
      Workload workload(seed, trace);
      workload.Run();
      if (::testing::Test::HasFatalFailure()) return;
      EXPECT_GT(workload.answered(), 20u);
    }
    checker.Finish(Instant{});
    for (const scenario::Violation& violation : violations.list()) {
      ADD_FAILURE() << violation.rule << ": " << violation.text;
    }
    EXPECT_GT(checker.judged(), 500u);
    EXPECT_EQ(counts.of("call.submitted"), 90u);
    EXPECT_EQ(counts.of("call.over"), 90u);
    // Each rule had something to judge.
    for (const char* event :
         {"call.sent", "reply.sent", "error.sent", "send.posted", "send.done", "stag.exposed", "stag.invalidated",
          "read.issued", "reply.received", "reply.ignored", "connection.closed", "connect.trying",
          "connection.negotiated", "call.planned", "call.held", "server.stopping", "server.stopped"}) {
      EXPECT_GT(counts.of(event), 0u) << event;
    }
  }
}

}  // namespace
}  // namespace stagecoach::e2e
