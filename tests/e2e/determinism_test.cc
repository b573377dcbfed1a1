// One seed, one history: an RPC workload in virtual time leaves the same trace each time it runs.
#include <gtest/gtest.h>

#include <optional>

#include "base/prng.h"
#include "base/trace.h"
#include "rpcrdma/api/client.h"
#include "rpcrdma/api/server.h"
#include "tests/e2e/setting.h"
#include "tests/e2e/test_service.h"

namespace stagecoach::e2e {
namespace {

using rpcrdma::CallError;
using rpcrdma::CallOptions;
using rpcrdma::Client;
using rpcrdma::Reply;
using rpcrdma::Server;
using rpcrdma::XdrWriter;

struct History {
  uint64_t hash = 0;
  uint64_t events = 0;
  size_t answered = 0;
};

// Calls of all kinds from one client, a second one that goes away in the middle, and a server that stops.
History RunWorkload(uint64_t seed) {
  TraceHash trace;
  History history;
  {
    auto setting = MakeSetting(seed, &trace);
    Prng prng = Prng(seed).Fork("workload");
    TestService service;
    setting->ActAsServer();
    Server server(setting->loop(), {.credits = 8, .trace = &trace});
    server.Register(&service);
    EXPECT_TRUE(server.Listen(setting->server_host(), 0).has_value());
    setting->ActAsClient();
    Client client(setting->loop(), {.credits = 6, .first_xid = 77, .trace = &trace});
    std::optional<Client> fleeting(std::in_place, setting->loop(),
                                   rpcrdma::ClientOptions{.first_xid = 9, .trace = &trace, .name = "fleeting"});
    for (Client* each : {&client, &*fleeting}) each->Register(kBindings[0]);
    int connected = 0;
    const auto count = [&](Result<void, CallError> result) { connected += result.has_value() ? 1 : 0; };
    client.Connect(setting->server_host(), server.port(), count);
    fleeting->Connect(setting->server_host(), server.port(), count);
    EXPECT_TRUE(setting->Until([&] { return connected == 2; }));

    std::vector<std::vector<std::byte>> sinks(60);
    const auto data = Pattern(200000);
    size_t over = 0;
    for (auto& sink : sinks) {
      const size_t size = prng.OneIn(2) ? prng.Below(2000) : prng.Below(data.size());
      sink.resize(size + 4);
      CallOptions options;
      options.result_buffers = {sink};
      Client& caller = prng.OneIn(4) ? *fleeting : client;
      caller.Call(
          {kProgram, 3, kEcho}, [&](XdrWriter& args) { args.EligibleOpaque(ConstBytes(data).first(size)); }, options,
          [&](Result<Reply, CallError> result) {
            ++over;
            history.answered += result.has_value() ? 1 : 0;
          });
    }
    EXPECT_TRUE(setting->Until([&] { return over >= 20; }));
    fleeting.reset();
    EXPECT_TRUE(setting->Until([&] { return over == sinks.size(); }));
    bool stopped = false;
    server.Stop(1s, [&] { stopped = true; });
    EXPECT_TRUE(setting->Until([&] { return stopped && !client.connected(); }));
  }
  history.hash = trace.value();
  history.events = trace.events();
  return history;
}

TEST(Determinism, SameSeedSameTrace) {
  for (const uint64_t seed : {1, 2, 3}) {
    const History first = RunWorkload(seed);
    const History second = RunWorkload(seed);
    EXPECT_GT(first.events, 500u);
    EXPECT_GT(first.answered, 30u);
    EXPECT_EQ(first.hash, second.hash) << "seed " << seed;
    EXPECT_EQ(first.events, second.events);
    EXPECT_EQ(first.answered, second.answered);
  }
}

TEST(Determinism, OtherSeedOtherTrace) {
  EXPECT_NE(RunWorkload(1).hash, RunWorkload(2).hash);
}

}  // namespace
}  // namespace stagecoach::e2e
