// The state dumps of both ends, for the report of a world that has stopped moving.
#include <gtest/gtest.h>

#include <optional>

#include "rpcrdma/api/client.h"
#include "rpcrdma/api/server.h"
#include "tests/e2e/setting.h"
#include "tests/e2e/test_service.h"

namespace stagecoach::e2e {
namespace {

using rpcrdma::CallOptions;
using rpcrdma::Client;
using rpcrdma::Server;
using rpcrdma::XdrWriter;

bool Has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

struct Dumps {
  std::string client;
  std::string server;
};

// Two credits: two calls that the service holds, one of which is cancelled, and one that waits.
Dumps TakeDumps() {
  Dumps dumps;
  auto setting = MakeSetting(5, nullptr);
  TestService service;
  setting->ActAsServer();
  Server server(setting->loop(), {.credits = 2});
  server.Register(&service);
  EXPECT_TRUE(Has(server.DebugString(), "server: not listening; clients 0\n"));
  EXPECT_TRUE(server.Listen(setting->server_host(), 0).has_value());
  setting->ActAsClient();
  std::optional<Client> client(std::in_place, setting->loop(), rpcrdma::ClientOptions{.credits = 4, .first_xid = 77});
  EXPECT_TRUE(Has(client->DebugString(), "client to nobody: idle"));
  bool connected = false;
  client->Connect(setting->server_host(), server.port(), [&](auto result) { connected = result.has_value(); });
  EXPECT_TRUE(setting->Until([&] { return connected; }));
  bool answered = false;
  client->Call(
      {kProgram, 3, kNull}, [](XdrWriter&) {}, {}, [&](auto) { answered = true; });
  EXPECT_TRUE(setting->Until([&] { return answered; }));

  rpcrdma::CallId calls[3];
  for (uint32_t i = 0; i < 3; ++i) {
    calls[i] = client->Call(
        {kProgram, 3, kHold}, [&](XdrWriter& args) { args.U32(i); }, {}, [](auto) {});
  }
  EXPECT_TRUE(setting->Until([&] { return service.held.size() == 2; }));
  client->Cancel(calls[1]);
  setting->For(1ms);
  dumps = {client->DebugString(), server.DebugString()};
  service.held.clear();
  client.reset();
  setting->For(1ms);
  return dumps;
}

TEST(StateDump, SaysWhereEachCallIsAndWhatItWaitsFor) {
  const auto [client, server] = TakeDumps();
  EXPECT_TRUE(Has(client, "client to 10.0.0.1:")) << client;
  EXPECT_TRUE(Has(client, ": established; receives posted 4; send queue")) << client;
  EXPECT_TRUE(Has(client, "credits granted 2, in flight 2; asked for ")) << client;
  EXPECT_TRUE(Has(client, "calls outstanding 2, of them queued 1\n")) << client;
  EXPECT_TRUE(Has(client, "xid 78 sent, submitted ")) << client;
  EXPECT_TRUE(Has(client, "xid 0 queued, submitted ")) << client;
  EXPECT_TRUE(Has(client, "cancelled call xid 79 holds its credit until its reply, deadline ")) << client;
  EXPECT_TRUE(Has(server, "server: listening; clients 1\n  client 1: established; receives posted 0;")) << server;
  EXPECT_TRUE(Has(server, "; requests executing 2; memory 0 of ")) << server;
  EXPECT_TRUE(Has(server, "credits granted 2; receives wanted 0; calls unanswered 2;")) << server;
  EXPECT_TRUE(Has(server, "call xid 78 executing\n")) << server;
  EXPECT_TRUE(Has(server, "call xid 79 executing\n")) << server;
}

TEST(StateDump, SameHistorySameText) {
  const Dumps first = TakeDumps();
  const Dumps second = TakeDumps();
  EXPECT_EQ(first.client, second.client);
  EXPECT_EQ(first.server, second.server);
}

}  // namespace
}  // namespace stagecoach::e2e
