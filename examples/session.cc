// A call that outlives its connection: a server takes it and dies, the next one answers. And how to watch that: trace
// events as they happen, and metrics for Prometheus.
//
//   bazel run //examples:session
//
// Exit status 0 only if the call was answered, by the second server.

#include <fmt/format.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/asio_loop/asio_loop.h"
#include "base/trace.h"
#include "rpcrdma/api/metrics.h"
#include "rpcrdma/api/server.h"
#include "rpcrdma/api/session.h"

using namespace stagecoach;           // NOLINT: as a program of one file may
using namespace stagecoach::rpcrdma;  // NOLINT

namespace {

constexpr ProcedureId kTemperature{.program = 0x20000003, .version = 1, .procedure = 1};

class WeatherService final : public Service {
 public:
  uint32_t program() const override { return kTemperature.program; }
  VersionRange versions() const override { return {kTemperature.version, kTemperature.version}; }
  // [snippet: idempotent]
  // To ask twice does no more than to ask once. Calls of other procedures a server executes once: one that comes again
  // is answered from a record, for as long as that server lives.
  bool idempotent(uint32_t, uint32_t) const override { return true; }
  // [end]

  void Handle(Request request) override {
    if (request.procedure() == 0) return request.Reply();
    if (request.procedure() != kTemperature.procedure) return request.Fail(AcceptStat::kProcUnavail);
    if (on_first_call) {
      held.emplace(std::move(request));  // not answered
      return std::exchange(on_first_call, nullptr)();
    }
    request.Reply([](XdrWriter& results) { results.I32(-4); });
  }

  std::function<void()> on_first_call;
  std::optional<Request> held;
};

// [snippet: trace]
// Prints what a session decides. docs/trace.md lists the events of all parts.
class Printer final : public TraceSink {
 public:
  void OnEvent(Instant now, std::string_view component, std::string_view event,
               std::initializer_list<TraceFact> facts) override {
    if (event.starts_with("session.")) fmt::print("{}\n", FormatTraceEvent(now, component, event, facts));
  }
};
// [end]

}  // namespace

int main() {
  AsioLoop loop;
  WeatherService weather;
  std::optional<Server> server;
  uint16_t port = 0;
  const auto start_server = [&] {
    server.emplace(loop, ServerOptions());
    server->Register(&weather);
    const Result<void, CallError> listening = server->Listen("127.0.0.1", port);
    if (!listening) fmt::print(stderr, "{}\n", listening.error().ToString());
    port = server->port();
    return listening.has_value();
  };
  if (!start_server()) return 1;

  // The first server dies with the call in hand, and another one takes its place.
  bool restarted = false;
  weather.on_first_call = [&] {
    loop.Post([&] {
      server.reset();
      weather.held.reset();
      restarted = start_server();
      if (!restarted) loop.Stop();
    });
  };

  // [snippet: session]
  Printer printer;
  SessionOptions options;
  options.client.name = "weather";
  options.client.trace = &printer;
  options.reconnect.delay_first = 20ms;
  options.keepalive = {.interval = 10s, .program = kTemperature.program, .version = kTemperature.version};
  Session session(loop, "127.0.0.1", port, options);

  std::optional<int32_t> temperature;
  const auto args = [](XdrWriter&) {};
  session.AsyncCall(kTemperature, args, {}, [&](Result<Reply, CallError> reply) {
    if (reply) {
      XdrReader results = reply->results();
      const int32_t value = results.I32("temperature");
      if (results.Finish()) temperature = value;
    } else {
      fmt::print(stderr, "{}\n", reply.error().ToString());
    }
    loop.Stop();
  });
  loop.Run();
  // [end]
  if (temperature) fmt::print("It is {} degrees.\n", *temperature);

  // [snippet: metrics]
  MetricsPage page;
  page.Add({{"session", "weather"}}, session);
  if (server) page.Add({{"server", "weather"}}, *server);
  const std::string text = page.Text();  // for a file, or whatever answers GET /metrics
  // [end]
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("stagecoach_rpc_session_")) fmt::print("{}\n", line);
  }

  const bool sent_again = session.stats().retransmissions == 1;
  session.Close([&] { loop.Stop(); });
  loop.Run();
  return restarted && sent_again && temperature == -4 ? 0 : 1;
}
