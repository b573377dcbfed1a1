// A program of one procedure, its server and its client: the API with callbacks, and with futures for other threads.
//
//   bazel run //examples:echo
//
// Both ends are in this process and on one event loop, so that one command shows them; they share nothing but a port
// number, and either would be the same in a process of its own. Exit status 0 only if every call was answered.

#include <fmt/format.h>

#include <asio/post.hpp>
#include <asio/use_future.hpp>
#include <cstdint>
#include <string>
#include <string_view>
#include <thread>

#include "base/asio_loop/asio_loop.h"
#include "rpcrdma/api/client.h"
#include "rpcrdma/api/server.h"
#include "rpcrdma/loop/loop_context.h"

using namespace stagecoach;           // NOLINT: as a program of one file may
using namespace stagecoach::rpcrdma;  // NOLINT

namespace {

// [snippet: program]
// program ECHO { version V1 { void NULL(void) = 0; string ECHO(string) = 1; } = 1; } = 0x20000001;
// Numbers from 0x20000000 to 0x3fffffff are free for anybody's use (RFC 5531 section 13).
constexpr ProcedureId kEcho{.program = 0x20000001, .version = 1, .procedure = 1};
constexpr uint32_t kTextMax = 64 * 1024;
// [end]

// [snippet: service]
class EchoService final : public Service {
 public:
  uint32_t program() const override { return kEcho.program; }
  VersionRange versions() const override { return {kEcho.version, kEcho.version}; }

  void Handle(Request request) override {
    switch (request.procedure()) {
      case 0:
        return request.Reply();  // NULL: every program has it, and it does nothing
      case kEcho.procedure: {
        const std::string_view text = request.args().String("text", kTextMax);
        if (!request.args().Finish()) return request.Fail(AcceptStat::kGarbageArgs);
        return request.Reply([&](XdrWriter& results) { results.String(text); });
      }
      default:
        return request.Fail(AcceptStat::kProcUnavail);
    }
  }
};
// [end]

// What a call of ECHO brought, in one line.
std::string Describe(const Result<Reply, CallError>& reply) {
  if (!reply) return reply.error().ToString();
  // [snippet: results]
  XdrReader results = reply->results();
  const std::string_view text = results.String("text", kTextMax);
  if (auto end = results.Finish(); !end) return ToString(end.error());
  // [end]
  return text.size() <= 40 ? std::string(text) : fmt::format("{} characters", text.size());
}

// Callbacks: everything on this thread, which runs the loop until the last of them stops it.
bool EchoWithCallbacks(AsioLoop& loop, uint16_t port) {
  bool answered = false;
  // [snippet: client]
  Client client(loop, {});
  client.AsyncConnect("127.0.0.1", port, [&](Result<void, CallError> connected) {
    if (!connected) {
      fmt::print(stderr, "{}\n", connected.error().ToString());
      return loop.Stop();
    }
    const auto args = [](XdrWriter& out) { out.String("Hello"); };
    client.AsyncCall(kEcho, args, {}, [&](Result<Reply, CallError> reply) {
      answered = reply.has_value();
      fmt::print("by callback: {}\n", Describe(reply));
      client.Close([&] { loop.Stop(); });
    });
  });
  loop.Run();
  // [end]
  return answered;
}

// Futures: a thread of its own runs the loop, and this one waits. Clients belong to the loop's thread, so what starts
// an operation is posted there.
bool EchoWithFutures(AsioLoop& loop, uint16_t port) {
  // [snippet: futures]
  Client client(loop, {});  // before the loop runs
  std::thread network([&] { loop.Run(); });
  LoopContext context(loop);
  const auto wait_for = [&](auto start) {
    return asio::post(context.get_executor(), asio::use_future(start)).get().get();
  };

  const Result<void, CallError> connected =
      wait_for([&] { return client.AsyncConnect("127.0.0.1", port, asio::use_future); });

  // Too long to go inline. Nothing of this program may be placed directly, so the call goes as a whole by a
  // Position-Zero Read chunk, and the reply by a Reply chunk, for which there must be room.
  const std::string text(10000, 'x');
  CallOptions options;
  options.reply_bytes_max = static_cast<uint32_t>(text.size()) + 100;
  const Result<Reply, CallError> reply = wait_for([&] {
    return client.AsyncCall(
        kEcho, [&](XdrWriter& args) { args.String(text); }, options, asio::use_future);
  });
  // [end]
  fmt::print("by future: {}\n", connected ? Describe(reply) : connected.error().ToString());
  // [snippet: close]
  wait_for([&] { return client.AsyncClose(asio::use_future); });
  loop.Stop();
  network.join();
  // [end]
  return reply.has_value();
}

}  // namespace

int main() {
  // [snippet: server]
  AsioLoop loop;
  EchoService echo;  // outlives the server, as the loop does
  Server server(loop, {});
  server.Register(&echo);
  // RPC-over-RDMA has port 20049; 0 takes a free one.
  if (auto listening = server.Listen("127.0.0.1", 0); !listening) {
    fmt::print(stderr, "{}\n", listening.error().ToString());
    return 1;
  }
  // [end]

  const bool callbacks = EchoWithCallbacks(loop, server.port());
  const bool futures = EchoWithFutures(loop, server.port());

  // [snippet: stop]
  // Takes no more clients, lets calls in progress finish for at most five seconds, then disconnects everybody.
  server.Stop(5s, [&] { loop.Stop(); });
  loop.Run();
  // [end]
  return callbacks && futures ? 0 : 1;
}
