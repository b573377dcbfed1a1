// What a simulated world costs: events of the schedule, blocking programs, and whole NULL and 4 KiB calls through the
// RPC stack, the verbs and the emulated NIC. The number of histories that can be explored follows from it. Per second
// of processor time, of which a world of one thread can use one per second.
//
// Usage: sim_bench SECONDS
#include <cstdlib>
#include <ctime>
#include <functional>
#include <memory>
#include <vector>

#include "base/trace.h"
#include "emu/sim/sim_world.h"
#include "emu/world/simulated_world.h"
#include "rpcrdma/api/client.h"
#include "rpcrdma/api/server.h"
#include "scenarios/runner/run.h"
#include "tests/perf/measure.h"

namespace {

using namespace stagecoach;           // NOLINT(google-build-using-namespace): a program, not a header
using namespace stagecoach::rpcrdma;  // NOLINT(google-build-using-namespace)
using perf::Row;

constexpr uint32_t kProgram = 0x20000097;
constexpr int kOutstanding = 16;
constexpr size_t kBlock = 4096;
enum Procedure : uint32_t { kNull = 0, kPut = 1 };

constexpr const char* kData[] = {"data"};
constexpr ProcedureBinding kProcedures[] = {
    {.number = kNull, .name = "NULL"},
    {.number = kPut, .name = "PUT", .arguments = kData},
};
constexpr Binding kBinding{.program = kProgram, .version = 1, .name = "sink", .procedures = kProcedures};

emu::IpEndpoint Address(const char* text) {
  return *emu::IpEndpoint::Parse(text, 0);
}

double Seconds() {
  return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
}

// How much `step` does per second; it says how much that was.
double Rate(double seconds, const std::function<uint64_t()>& step) {
  const double start = Seconds();
  uint64_t done = 0;
  double now = start;
  while (now - start < seconds) {
    done += step();
    now = Seconds();
  }
  return static_cast<double>(done) / (now - start);
}

// Many timers, each setting its successor.
double EventRate(double seconds) {
  emu::SimLoop loop;
  std::function<void()> tick[64];
  for (size_t i = 0; i < 64; ++i) {
    tick[i] = [&loop, &self = tick[i], i] {
      loop.At(loop.Now() + Duration(static_cast<int64_t>(1 + i * 7)), [&self] { self(); });
    };
    tick[i]();
  }
  return Rate(seconds, [&] {
    const uint64_t before = loop.events_run();
    loop.RunThrough(loop.Now() + 1us);
    return loop.events_run() - before;
  });
}

// A program that sleeps and sleeps again: two switches of stacks each.
double SleepRate(double seconds) {
  emu::SimWorld world(1);
  auto& host = world.AddHost("a", {Address("10.0.0.1")});
  uint64_t slept = 0;
  world.Spawn(host, "sleeper", [&] {
    while (world.Sleep(1us)) ++slept;
  });
  const double rate = Rate(seconds, [&] {
    const uint64_t before = slept;
    world.RunFor(1ms);
    return slept - before;
  });
  world.EndPrograms();
  return rate;
}

class SinkService final : public Service {
 public:
  uint32_t program() const override { return kProgram; }
  VersionRange versions() const override { return {1, 1}; }
  bool idempotent(uint32_t, uint32_t) const override { return true; }
  std::span<const Binding> bindings() const override { return {&kBinding, 1}; }
  void Handle(Request request) override {
    if (request.procedure() == kPut) request.args().EligibleOpaque("data", kBlock);
    request.Reply();
  }
};

// Two hosts, one client with kOutstanding calls under way.
double CallRate(double seconds, Procedure procedure, TraceSink* trace) {
  emu::SimWorld::Options options;
  options.trace = trace;
  auto owned = std::make_unique<emu::SimulatedWorld>(options);
  emu::SimulatedWorld& world = *owned;
  world.AddHost("server", {Address("10.0.0.1")});
  world.AddHost("client", {Address("10.0.0.2")});
  emu::World::Install(std::move(owned));
  double rate = 0;
  {
    EventLoop& server_loop = world.fabric("server").program_loop();
    EventLoop& client_loop = world.fabric("client").program_loop();
    SinkService service;
    Server server(server_loop, {.trace = trace});
    server.Register(&service);
    world.ActAs("server");
    if (!server.Listen("10.0.0.1", 0)) std::abort();
    world.ActAs("client");
    Client client(client_loop, {.trace = trace});
    client.Register(kBinding);
    bool connected = false;
    client.Connect("10.0.0.1", server.port(), [&](Result<void, CallError> result) { connected = result.has_value(); });
    if (!world.sim().RunUntil([&] { return connected; })) std::abort();
    const std::vector<std::byte> block(kBlock, std::byte{1});
    uint64_t answered = 0;
    bool stop = false;
    std::function<void()> start = [&] {
      client.Call(
          {kProgram, 1, procedure},
          [&](XdrWriter& args) {
            if (procedure == kPut) args.EligibleOpaque(block);
          },
          {},
          [&](Result<Reply, CallError> result) {
            if (!result) std::abort();
            ++answered;
            if (!stop) start();
          });
    };
    for (int i = 0; i < kOutstanding; ++i) start();
    rate = Rate(seconds, [&] {
      const uint64_t before = answered;
      world.sim().RunFor(1ms);
      return answered - before;
    });
    stop = true;
    world.sim().RunUntil([&] { return client.outstanding() == 0; });
  }
  emu::World::Install(nullptr);
  return rate;
}

// Small calls of a whole scenario: traced, hashed, judged by every checker, its beginning and end included.
double JudgedRate(double seconds) {
  scenario::Scenario scenario;
  scenario.add_host()->set_name("a");
  scenario.add_host()->set_name("b");
  scenario.add_service()->set_host("a");
  scenario::Client& client = *scenario.add_client();
  client.set_name("client");
  client.set_host("b");
  client.set_server("a");
  client.set_concurrency(kOutstanding);
  client.add_call()->set_repeat(20'000);
  return Rate(seconds, [&] {
    const scenario::RunReport report = scenario::RunScenario(scenario);
    if (!report.violations.empty()) std::abort();
    return report.tally.answered;
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: sim_bench SECONDS\n");
    return 2;
  }
  const double seconds = std::atof(argv[1]);
  TraceHash hash;
  Row("sim_timers", EventRate(seconds), "/s");
  Row("sim_program_sleeps", SleepRate(seconds), "/s");
  Row("sim_null_calls", CallRate(seconds, kNull, nullptr), "calls/s");
  Row("sim_null_calls_traced", CallRate(seconds, kNull, &hash), "calls/s");
  Row("sim_null_calls_judged", JudgedRate(seconds), "calls/s");
  Row("sim_4k_puts", CallRate(seconds, kPut, nullptr), "calls/s");
  return 0;
}
