// Calls in the other direction: a client subscribes, and the server calls it back on the connection that the client
// made (RFC 8167).
//
//   bazel run //examples:callback
//
// Exit status 0 only if each headline was delivered and acknowledged.

#include <fmt/format.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "base/asio_loop/asio_loop.h"
#include "rpcrdma/api/client.h"
#include "rpcrdma/api/reverse_client.h"
#include "rpcrdma/api/server.h"

using namespace stagecoach;           // NOLINT: as a program of one file may
using namespace stagecoach::rpcrdma;  // NOLINT

namespace {

constexpr ProcedureId kSubscribe{.program = 0x20000005, .version = 1, .procedure = 1};  // served by the server
constexpr ProcedureId kHeadline{.program = 0x20000006, .version = 1, .procedure = 1};   // and by its clients
constexpr uint32_t kHeadlineMax = 200;
constexpr std::string_view kHeadlines[] = {"Rain expected", "Rain falls", "Rain has stopped"};

// [snippet: server]
class NewsService final : public Service {
 public:
  uint32_t program() const override { return kSubscribe.program; }
  VersionRange versions() const override { return {kSubscribe.version, kSubscribe.version}; }
  // A client that comes back on another connection subscribes again, and means that one.
  bool idempotent(uint32_t, uint32_t) const override { return true; }

  void Handle(Request request) override {
    if (request.procedure() == 0) return request.Reply();
    if (request.procedure() != kSubscribe.procedure) return request.Fail(AcceptStat::kProcUnavail);
    // Who calls this procedure says by it that it serves the program of headlines.
    // From here on, and not before, the server may call it.
    ReverseClient& subscriber = subscribers_.try_emplace(request.client(), *server).first->second;
    if (!subscriber.Bind(request.client())) return request.Fail(AcceptStat::kSystemErr);
    request.Reply();
    Publish(subscriber);
  }
  void OnClientGone(ClientId client) override { subscribers_.erase(client); }

  Server* server = nullptr;
  size_t delivered = 0;
  std::function<void()> on_delivered;

 private:
  void Publish(ReverseClient& subscriber) {
    for (const std::string_view headline : kHeadlines) {
      const auto args = [&](XdrWriter& out) { out.String(headline); };
      subscriber.AsyncCall(kHeadline, args, {}, [this](Result<Reply, CallError> reply) {
        if (!reply) return fmt::print(stderr, "{}\n", reply.error().ToString());
        if (++delivered == std::size(kHeadlines)) on_delivered();
      });
    }
  }

  std::map<ClientId, ReverseClient> subscribers_;
};
// [end]

// [snippet: client]
class Reader final : public Service {
 public:
  uint32_t program() const override { return kHeadline.program; }
  VersionRange versions() const override { return {kHeadline.version, kHeadline.version}; }
  void Handle(Request request) override {
    if (request.procedure() == 0) return request.Reply();
    if (request.procedure() != kHeadline.procedure) return request.Fail(AcceptStat::kProcUnavail);
    const std::string headline(request.args().String("headline", kHeadlineMax));
    if (!request.args().Finish()) return request.Fail(AcceptStat::kGarbageArgs);
    fmt::print("{}\n", headline);
    request.Reply();
  }
};
// [end]

}  // namespace

int main() {
  AsioLoop loop;
  NewsService news;
  // [snippet: server-options]
  ServerOptions server_options;
  server_options.reverse_credits = 8;  // calls that one client may have to answer at a time
  Server server(loop, server_options);
  news.server = &server;
  server.Register(&news);
  // [end]
  if (auto listening = server.Listen("127.0.0.1", 0); !listening) {
    fmt::print(stderr, "{}\n", listening.error().ToString());
    return 1;
  }
  news.on_delivered = [&] { loop.Stop(); };

  // [snippet: subscribe]
  Reader reader;  // outlives the client
  ClientOptions client_options;
  client_options.reverse_services = {&reader};
  Client client(loop, client_options);
  client.AsyncConnect("127.0.0.1", server.port(), [&](Result<void, CallError> connected) {
    if (!connected) {
      fmt::print(stderr, "{}\n", connected.error().ToString());
      return loop.Stop();
    }
    const auto args = [](XdrWriter&) {};
    client.AsyncCall(kSubscribe, args, {}, [&](Result<Reply, CallError> reply) {
      if (reply) return;
      fmt::print(stderr, "{}\n", reply.error().ToString());
      loop.Stop();
    });
  });
  loop.Run();
  // [end]

  const uint64_t served = client.reverse_stats().replies;
  client.Close([&] { loop.Stop(); });
  loop.Run();
  server.Stop(5s, [&] { loop.Stop(); });
  loop.Run();
  return news.delivered == std::size(kHeadlines) && served == std::size(kHeadlines) ? 0 : 1;
}
