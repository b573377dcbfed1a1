// What becomes of a connection whose device refuses to take a steering tag back. No program can bring that about, hence
// in simulation alone.
#include <gtest/gtest.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#endif

#include <optional>

#include "emu/world/world.h"
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

// Takes the latest registration of the host at hand out of its device, behind the back of the program that made it.
bool ForgetLatestRegistration() {
  emu::Nic& nic = emu::World::Current().current_host().nic();
  for (uint32_t handle = 100; handle > 0; --handle) {
    if (nic.DeregisterRegion(handle) == 0) return true;
  }
  return false;
}

TEST(Revocation, RefusedDeregistrationEndsTheConnection) {
  auto setting = MakeSetting(1, nullptr);
  TestService service;
  setting->ActAsServer();
  std::optional<Server> server;
  server.emplace(setting->loop(), rpcrdma::ServerOptions{});
  server->Register(&service);
  ASSERT_TRUE(server->Listen(setting->server_host(), 0).has_value());
  setting->ActAsClient();
  std::optional<Client> client;
  client.emplace(setting->loop(), rpcrdma::ClientOptions{.memory_windows = false, .first_xid = 1});
  client->Register(kBindings[0]);
  bool connected = false;
  client->Connect(setting->server_host(), server->port(),
                  [&](const Result<void, CallError>& result) { connected = result.has_value(); });
  ASSERT_TRUE(setting->Until([&] { return connected; }));
  std::optional<CallError> lost;
  client->OnConnectionLost([&](const CallError& error) { lost = error; });

  // A Write chunk that the server returns unused, as it cannot have so much.
  std::vector<std::byte> result(9000);
  CallOptions options;
  options.result_buffers = {result};
  std::optional<Result<Reply, CallError>> outcome;
#ifdef __SANITIZE_ADDRESS__
  // The library keeps its record of a region that the device does not give back.
  __lsan_disable();
#endif
  client->Call(
      {kProgram, 3, kSource}, [](XdrWriter& args) { args.U32(0xffffffff); }, options,
      [&](Result<Reply, CallError> answer) { outcome.emplace(std::move(answer)); });
#ifdef __SANITIZE_ADDRESS__
  __lsan_enable();
#endif
  setting->ActAsClient();
  ASSERT_TRUE(ForgetLatestRegistration());
  ASSERT_TRUE(setting->Until([&] { return outcome.has_value() && lost.has_value(); }));
  // The reply is as good as any, and was told of only when the end of the queue pair had fenced its memory.
  ASSERT_FALSE(outcome->has_value());
  EXPECT_EQ(outcome->error().kind, CallError::Kind::kRpc);
  EXPECT_EQ(lost->kind, CallError::Kind::kConnectionLost);
  EXPECT_NE(lost->message.find("ibv_dereg_mr"), std::string::npos) << lost->message;
  EXPECT_FALSE(client->connected());

  client.reset();
  server.reset();
  setting->For(1ms);
}

}  // namespace
}  // namespace stagecoach::e2e
