// What a server grants a client that asks for larger messages when its device has no more room, and what becomes of a
// client whose device has none for the answer: in simulation, where devices are what a test wants.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "emu/world/simulated_world.h"
#include "rpcrdma/api/client.h"
#include "rpcrdma/api/server.h"
#include "rpcrdma/wire/profile.h"
#include "tests/e2e/outcome.h"
#include "tests/e2e/raw_peer.h"
#include "tests/e2e/test_service.h"

namespace stagecoach::e2e {
namespace {

using emu::IpEndpoint;
using emu::SimulatedWorld;
using rpcrdma::CallError;
using rpcrdma::Client;
using rpcrdma::ClientOptions;
using rpcrdma::Server;
using rpcrdma::ServerOptions;
using rpcrdma::XdrWriter;

// Two hosts whose devices know no more than `registrations` pieces of memory.
class CcpDeviceTest : public ::testing::TestWithParam<uint32_t> {
 protected:
  CcpDeviceTest() {
    emu::WorldOptions options = emu::OptionsFromEnvironment();
    options.profile.max_mr = GetParam();
    auto world = std::make_unique<SimulatedWorld>(emu::SimWorld::Options{}, options);
    world->AddHost("server", {*IpEndpoint::Parse("10.0.0.1", 0)});
    world->AddHost("client", {*IpEndpoint::Parse("10.0.0.2", 0)});
    world_ = world.get();
    emu::World::Install(std::move(world));
  }
  ~CcpDeviceTest() override {
    client_.reset();
    peer_.reset();
    server_.reset();
    world_->sim().RunFor(1ms);
    emu::World::Install(nullptr);
  }
  bool Until(const std::function<bool()>& done) {
    bool late = false;
    world_->sim().loop().At(world_->sim().loop().Now() + 100s, [&late] { late = true; });
    return world_->sim().RunUntil([&] { return late || done(); }) && !late;
  }

  SimulatedWorld* world_ = nullptr;
  TraceLog trace_;
  TestService service_;
  std::optional<Server> server_;
  std::optional<RawPeer> peer_;
  std::optional<Client> client_;
};

// With two, which the connection has, nothing more can be had; with three Sends alone, which is not enough.
TEST_P(CcpDeviceTest, WhatIsGrantedIsWhatIsThere) {
  const bool room = GetParam() > 3;
  world_->ActAs("server");
  ServerOptions serving{.inline_threshold = 1024};
  serving.ccp = {.enabled = true, .inline_send_max = 8192, .inline_receive_max = 8192};
  serving.trace = &trace_;
  server_.emplace(world_->sim().loop(), serving);
  server_->Register(&service_);
  ASSERT_TRUE(server_->Listen("10.0.0.1", 0).has_value());
  world_->ActAs("client");
  ClientOptions asking{.inline_threshold = 8192, .memory_windows = false, .ccp = {.enabled = true}, .first_xid = 1};
  client_.emplace(world_->sim().loop(), asking);
  client_->Register(kBindings[0]);
  std::optional<Result<void, CallError>> connected;
  client_->Connect("10.0.0.1", server_->port(), [&](Result<void, CallError> result) { connected = std::move(result); });
  ASSERT_TRUE(Until([&] { return connected.has_value(); }));
  ASSERT_TRUE(connected->has_value()) << connected->error().ToString();
  ASSERT_TRUE(client_->configuration() && client_->configuration()->applied);
  EXPECT_EQ(client_->configuration()->inline_send, room ? 8192u : 1024u);
  const size_t refused =
      static_cast<size_t>(std::count_if(trace_.lines().begin(), trace_.lines().end(), [](const std::string& line) {
        return line.find(" buffers.refused ") != std::string::npos;
      }));
  EXPECT_EQ(refused, room ? 0u : 1u);
  // The one that fits the buffers there are goes inline, all at once.
  const auto data = Pattern(room ? 8000 : 900);
  int good = 0, over = 0;
  for (int i = 0; i < 100; ++i) {
    client_->Call(
        Id(kSize), [&](XdrWriter& args) { args.EligibleOpaque(data); }, {},
        [&](const Outcome& outcome) {
          ++over;
          if (outcome && outcome->results().U32("size") == data.size()) ++good;
        });
  }
  ASSERT_TRUE(Until([&] { return over == 100; }));
  EXPECT_EQ(good, 100);
  EXPECT_EQ(client_->stats().calls_by_read_chunk, 0u);
}

// By the older documents the answer may have to be read from memory of the server: a device that has no room for it, or
// a server that has no such memory, is an end of connecting, and not of the patience of who waits for it.
TEST_P(CcpDeviceTest, AnAnswerThatCannotBeReadEndsTheAttempt) {
  const bool room = GetParam() > 2;
  world_->ActAs("server");
  peer_.emplace(world_->sim().loop());
  const uint16_t port = peer_->Listen("10.0.0.1", [&] {
    peer_->engine->on_message = [&](const std::vector<std::byte>& call) {
      // RDMA_NOMSG with a Position-Zero Read chunk of 100 bytes, of a steering tag that was never valid.
      peer_->Send(Words({ByteReader(call).U32(), 1, 8, 1, 1, 0, 0x5eed0000, 100, 0, 0x1000, 0, 0, 0}));
    };
  });
  world_->ActAs("client");
  ClientOptions asking{
      .profile = rpcrdma::kDraft2004, .memory_windows = false, .ccp = {.enabled = true}, .first_xid = 1};
  client_.emplace(world_->sim().loop(), asking);
  std::optional<Result<void, CallError>> connected;
  client_->Connect("10.0.0.1", port, [&](Result<void, CallError> result) { connected = std::move(result); });
  const Instant start = world_->sim().loop().Now();
  ASSERT_TRUE(Until([&] { return connected.has_value(); })) << "connecting hangs";
  EXPECT_LT(world_->sim().loop().Now() - start, 5s);
  ASSERT_FALSE(connected->has_value());
  EXPECT_EQ(connected->error().kind, room ? CallError::Kind::kUnreachable : CallError::Kind::kDevice);
  EXPECT_NE(connected->error().message.find("before the server had answered CONF_RDMA"), std::string::npos)
      << connected->error().message;
  EXPECT_FALSE(client_->connected());
}

INSTANTIATE_TEST_SUITE_P(Registrations, CcpDeviceTest, ::testing::Values(2u, 3u, 4u));

}  // namespace
}  // namespace stagecoach::e2e
