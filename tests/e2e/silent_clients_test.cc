// What a server does with clients that say nothing, keep what they hold, or are too many; in virtual time.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "emu/world/simulated_world.h"
#include "rpcrdma/api/client.h"
#include "rpcrdma/api/server.h"
#include "tests/e2e/installed_world.h"
#include "tests/e2e/outcome.h"
#include "tests/e2e/test_service.h"

namespace stagecoach::e2e {
namespace {

using emu::Cut;
using rpcrdma::CallError;
using rpcrdma::Client;
using rpcrdma::RefusedClient;
using rpcrdma::Server;
using rpcrdma::ServerOptions;
using rpcrdma::XdrWriter;

constexpr uint16_t kPort = 20049;
// Why a client is gone that has used up its data_time.
constexpr char kOverdue[] = "closed because the client neither sent promised data nor took a reply in time";

// A host with a server, and two with clients.
class SilentClientsTest : public ::testing::Test, public InstalledWorld {
 protected:
  explicit SilentClientsTest(uint64_t bytes_per_second = 0)
      : SilentClientsTest({{"server", "10.0.0.1"}, {"one", "10.0.0.2"}, {"two", "10.0.0.3"}}, bytes_per_second) {}
  // The server's host comes first.
  explicit SilentClientsTest(Hosts hosts, uint64_t bytes_per_second = 0)
      : InstalledWorld({.link = {.bytes_per_second = bytes_per_second, .chop = true}}, hosts),
        address_(hosts.begin()->second) {}
  ~SilentClientsTest() override {
    *over_ = true;
    clients_.clear();
    server_.reset();
    Uninstall();
  }

  // Not a word from it any more, and nobody tells its peers.
  void CutPower(const char* host) { world_->sim().CutHost(world_->fabric(host), Cut::kSilent); }

  void StartServer(ServerOptions options = {}) {
    world_->ActAs("server");
    server_.emplace(loop(), options);
    server_->Register(&service_);
    server_->OnClientGone([this](const std::string&, const std::string& why, const auto&) { gone_.push_back(why); });
    server_->OnClientRefused([this](const RefusedClient& refused) { refused_.push_back(refused); });
    ASSERT_TRUE(server_->Listen(address_, kPort).has_value());
  }
  Result<void, CallError> Connect(const char* host, Client** made = nullptr) {
    world_->ActAs(host);
    clients_.push_back(std::make_unique<Client>(loop(), rpcrdma::ClientOptions{.first_xid = next_xid_ += 1000}));
    Client& client = *clients_.back();
    for (const rpcrdma::Binding& binding : kBindings) client.Register(binding);
    std::optional<Result<void, CallError>> result;
    client.Connect(address_, kPort, [&](Result<void, CallError> connected) { result = std::move(connected); });
    EXPECT_TRUE(Until([&] { return result.has_value(); })) << "connecting hangs";
    if (made != nullptr) *made = &client;
    return result.value_or(Result<void, CallError>());
  }
  Client& Connected(const char* host) {
    Client* client = nullptr;
    const auto connected = Connect(host, &client);
    EXPECT_TRUE(connected.has_value()) << connected.error().ToString();
    return *client;
  }
  // A call whose data the server fetches.
  using Pending = std::shared_ptr<std::optional<Outcome>>;
  Pending Give(Client& client, ConstBytes data) {
    auto outcome = std::make_shared<std::optional<Outcome>>();
    client.Call(
        Id(kSize), [&](XdrWriter& args) { args.EligibleOpaque(data); }, {.timeout = Duration::zero()},
        [outcome, over = over_](Outcome result) {
          // What ends with the world ends after the test's own variables.
          if (!*over) outcome->emplace(std::move(result));
        });
    return outcome;
  }
  // The processes of `host` stand still when the server has begun to fetch the data of a call of its. Its kernel goes
  // on, so that no device gives the connection up.
  void KeepDataFromTheServer(const char* host, ConstBytes data) {
    const uint64_t before = server_->stats().connections.reads;
    Give(Connected(host), data);
    ASSERT_TRUE(Until([&] { return server_->stats().connections.reads > before; }));
    world_->sim().Stop(world_->fabric(host), true);
  }

  // How long it takes until the server fetches the data of a call of `host`.
  Duration UntilFetchedFrom(const char* host, ConstBytes data) {
    Client& client = Connected(host);
    const uint64_t before = server_->stats().connections.reads;
    const Instant begin = Now();
    Give(client, data);
    EXPECT_TRUE(Until([&] { return server_->stats().connections.reads > before; }));
    return Now() - begin;
  }

  const std::string address_;
  const std::shared_ptr<bool> over_ = std::make_shared<bool>(false);
  TestService service_;
  std::optional<Server> server_;
  std::vector<std::unique_ptr<Client>> clients_;
  uint32_t next_xid_ = 0;
  std::vector<std::string> gone_;
  std::vector<RefusedClient> refused_;
};

// --- Places ---

TEST_F(SilentClientsTest, AServerWithoutOptionsKeepsNoPlaceForASilentClient) {
  StartServer();
  Connected("one");
  ASSERT_TRUE(Until([&] { return server_->stats().clients == 1; })) << "the server has heard of it as well";
  CutPower("one");
  Connected("two");
  ASSERT_TRUE(Until([&] { return server_->stats().clients == 2; }));
  const Instant begin = Now();
  For(ServerOptions{}.idle_timeout - 1s);
  EXPECT_EQ(server_->stats().clients, 2u) << "neither has had all of its time";
  EXPECT_EQ(server_->stats().clients_idle, 0u);
  ASSERT_TRUE(Until([&] { return server_->holdings().connections == 0; }));
  EXPECT_LE(Now() - begin, ServerOptions{}.idle_timeout + 5s) << "with what the end of a connection may take";
  EXPECT_EQ(server_->stats().clients_idle, 2u);
}

TEST_F(SilentClientsTest, OneAddressDoesNotGetAllPlaces) {
  StartServer({.clients_max = 3});
  Connected("one");
  Connected("one");
  const auto third = Connect("one");
  ASSERT_FALSE(third.has_value());
  EXPECT_EQ(third.error().ToString(),
            "connect to 10.0.0.1:20049: the server takes at most 2 connections from one address, or one /64 network of "
            "IPv6");
  Connected("two");
}

class SilentIpv6ClientsTest : public SilentClientsTest {
 protected:
  SilentIpv6ClientsTest()
      : SilentClientsTest({{"server", "2001:db8::1"},
                           {"one", "2001:db8:1::1"},
                           {"neighbour", "2001:db8:1::ffff:0:1"},
                           {"two", "2001:db8:1:1::1"}},
                          /*bytes_per_second=*/100'000) {}
};

TEST_F(SilentIpv6ClientsTest, NorDoesOneNetwork) {
  StartServer({.clients_max = 4});
  Connected("one");
  Connected("neighbour");
  EXPECT_FALSE(Connect("one").has_value());
  EXPECT_FALSE(Connect("neighbour").has_value());
  EXPECT_EQ(server_->stats().rejected.address_connections_max, 2u);
  Connected("two");
  Connected("two");
}

// --- Promised data ---

TEST_F(SilentClientsTest, AClientWhoseDataNeverComesIsDisconnected) {
  StartServer({.data_time = 20s});
  const auto data = Pattern(3 << 20);
  KeepDataFromTheServer("one", data);
  const Instant begin = Now();
  For(19s);
  EXPECT_EQ(server_->stats().clients, 1u) << "it has a second left";
  EXPECT_GE(server_->holdings().pool_bytes, data.size());
  ASSERT_TRUE(Until([&] { return server_->holdings().connections == 0; }));
  EXPECT_LE(Now() - begin, 22s);
  EXPECT_EQ(server_->holdings().pool_bytes, 0u);
  EXPECT_EQ(gone_, std::vector<std::string>{kOverdue});
}

TEST_F(SilentClientsTest, WaitingIsBoundedByDefault) {
  StartServer();
  const auto data = Pattern(3 << 20);
  KeepDataFromTheServer("one", data);
  const Instant begin = Now();
  For(ServerOptions{}.data_time - 1s);
  EXPECT_EQ(server_->stats().clients, 1u) << "it has a second left";
  ASSERT_TRUE(Until([&] { return server_->holdings().connections == 0; }));
  EXPECT_LE(Now() - begin, ServerOptions{}.data_time + 2s);
  EXPECT_EQ(gone_, std::vector<std::string>{kOverdue});
}

// All calls together take 42 s, and each 10 s more than the one before.
class SlowLinkTest : public SilentClientsTest {
 protected:
  SlowLinkTest() : SilentClientsTest(100'000) {}

  // Whether all of them were answered.
  bool GiveFour() {
    const auto data = Pattern(1 << 20);
    Client& client = Connected("one");
    std::vector<Pending> given;
    for (int i = 0; i < 4; ++i) given.push_back(Give(client, data));
    EXPECT_TRUE(Until([&] {
      return std::all_of(given.begin(), given.end(), [](const Pending& each) { return each->has_value(); });
    }));
    return std::all_of(given.begin(), given.end(), [](const Pending& each) { return (*each)->has_value(); });
  }
};

TEST_F(SlowLinkTest, ASlowClientMayGoOn) {
  StartServer({.data_time = 20s});
  EXPECT_TRUE(GiveFour());
  EXPECT_EQ(service_.handled, 4u);
}

TEST_F(SlowLinkTest, OneThatIsSlowerThanTheServerAsksForMayNot) {
  StartServer({.data_time = 20s, .data_rate_min = 1 << 20});
  const Instant begin = Now();
  EXPECT_FALSE(GiveFour());
  EXPECT_GE(Now() - begin, 20s) << "what it may take without moving anything";
  ASSERT_TRUE(Until([&] { return server_->holdings().connections == 0; }));
  EXPECT_LT(service_.handled, 4u);
  EXPECT_EQ(gone_, std::vector<std::string>{kOverdue});
}

// --- Memory of all together ---

TEST_F(SilentClientsTest, WhatOneAddressHoldsAnotherGetsWhenItsTimeIsOver) {
  // One call at a time, of whatever address: 5 MiB with what a division into blocks may cost.
  StartServer({.data_time = 20s, .bytes_max = 1, .call_bytes_max = 4 << 20});
  const auto data = Pattern(3 << 20);
  KeepDataFromTheServer("one", data);
  const Instant begin = Now();
  const Pending given = Give(Connected("two"), data);
  For(19s);
  EXPECT_FALSE(given->has_value()) << "there is no memory for it";
  ASSERT_TRUE(Until([&] { return given->has_value(); }));
  EXPECT_TRUE((*given)->has_value());
  EXPECT_LE(Now() - begin, 23s);
  EXPECT_EQ(service_.handled, 1u);
}

// Whatever the option says: there is room for two calls, or three that do not use all that they may.
TEST_F(SlowLinkTest, OneAddressDoesNotGetAllMemory) {
  StartServer({.data_time = 60s, .client_bytes_max = 1u << 30, .bytes_max = 10 << 20, .call_bytes_max = 4 << 20});
  const auto data = Pattern(3 << 20);
  for (int i = 0; i < 3; ++i) Give(Connected("one"), data);
  For(10s);  // what is on its way holds the calls up
  CutPower("one");
  EXPECT_LE(UntilFetchedFrom("two", data), 1s);
}

TEST_F(SilentIpv6ClientsTest, NorDoesOneNetworkGetAllMemory) {
  StartServer({.data_time = 60s, .client_bytes_max = 1u << 30, .bytes_max = 10 << 20, .call_bytes_max = 4 << 20});
  const auto data = Pattern(3 << 20);
  for (const char* host : {"one", "neighbour", "neighbour"}) Give(Connected(host), data);
  For(10s);  // what is on its way holds the calls up
  CutPower("one");
  CutPower("neighbour");
  EXPECT_LE(UntilFetchedFrom("two", data), 1s);
}

TEST_F(SilentClientsTest, AddressesTakeTurnsWhereMemoryIsShort) {
  StartServer({.bytes_max = 1, .call_bytes_max = 4 << 20});
  const auto data = Pattern(3 << 20);
  std::vector<Pending> given;
  for (const char* host : {"one", "two", "one", "two"}) {
    Client& client = Connected(host);
    for (int i = 0; i < 4; ++i) given.push_back(Give(client, data));
  }
  uint64_t most = 0;
  ASSERT_TRUE(Until([&] {
    most = std::max(most, server_->holdings().pool_bytes);
    return std::all_of(given.begin(), given.end(), [](const Pending& each) { return each->has_value(); });
  }));
  for (const Pending& each : given) EXPECT_TRUE((*each)->has_value());
  EXPECT_EQ(service_.handled, given.size());
  // A block of 4 MiB in use, and up to a quarter of the whole kept.
  EXPECT_LE(most, (4u << 20) + (5u << 20) / 4);
}

TEST_F(SilentClientsTest, MemoryGoesBackAfterAPeak) {
  StartServer();
  const auto data = Pattern(1 << 20);
  Client& client = Connected("one");
  std::vector<Pending> given;
  for (int i = 0; i < 16; ++i) given.push_back(Give(client, data));
  ASSERT_TRUE(Until(
      [&] { return std::all_of(given.begin(), given.end(), [](const Pending& each) { return each->has_value(); }); }));
  EXPECT_GE(server_->holdings().pool_bytes, 2u << 20) << "kept for the next calls";
  // Those that the next calls need stay.
  const Instant end = Now() + 60s;
  while (Now() < end) {
    const Pending one = Give(client, data);
    ASSERT_TRUE(Until([&] { return one->has_value(); }));
    For(1s);
  }
  EXPECT_EQ(server_->holdings().pool_bytes, 1u << 20);
  For(25s);
  EXPECT_EQ(server_->holdings().pool_bytes, 0u);
  EXPECT_TRUE(client.connected());
}

// --- Refusals ---

TEST_F(SilentClientsTest, AClientIsToldWhyItIsRefused) {
  StartServer({.clients_max = 3, .address_connections_max = 2});
  Connected("one");
  Connected("one");
  const auto of_address = Connect("one");
  ASSERT_FALSE(of_address.has_value());
  EXPECT_EQ(of_address.error().kind, CallError::Kind::kRejected);
  EXPECT_EQ(
      of_address.error().ToString(),
      "connect to 10.0.0.1:20049: the server takes at most 2 connections from one address, or one /64 network of IPv6");
  Connected("two");
  const auto of_all = Connect("two");
  ASSERT_FALSE(of_all.has_value());
  EXPECT_EQ(of_all.error().ToString(), "connect to 10.0.0.1:20049: the server takes at most 3 clients at a time");
}

TEST_F(SilentClientsTest, RefusalsAreToldOncePerReasonAndInterval) {
  StartServer({.clients_max = 3, .address_connections_max = 2, .refusals_told_every = 60s});
  for (int i = 0; i < 5; ++i) Connect("one");  // two of them are taken
  Connected("two");
  For(1ms);
  ASSERT_EQ(refused_.size(), 1u);
  EXPECT_TRUE(refused_[0].peer.starts_with("10.0.0.2:")) << refused_[0].peer;
  EXPECT_EQ(refused_[0].why, "at most 2 connections from one address, or one /64 network of IPv6");
  EXPECT_EQ(refused_[0].option, "address_connections_max");
  EXPECT_EQ(refused_[0].untold, 0u);
  // Another reason is told at once.
  Connect("two");
  For(1ms);
  ASSERT_EQ(refused_.size(), 2u);
  EXPECT_TRUE(refused_[1].peer.starts_with("10.0.0.3:")) << refused_[1].peer;
  EXPECT_EQ(refused_[1].why, "at most 3 clients at a time");
  EXPECT_EQ(refused_[1].option, "clients_max");
  // The first one again, when its interval is over.
  clients_.pop_back();
  clients_.pop_back();
  ASSERT_TRUE(Until([&] { return server_->stats().clients == 2; }));
  For(61s);
  Connect("one");
  For(1ms);
  ASSERT_EQ(refused_.size(), 3u);
  EXPECT_EQ(refused_[2].option, "address_connections_max");
  EXPECT_EQ(refused_[2].untold, 2u);
  EXPECT_EQ(server_->stats().clients_rejected, 5u);
}

TEST_F(SilentClientsTest, WhoIsToldOfARefusalMayDestroyTheServer) {
  StartServer({.clients_max = 1});
  Connected("one");
  server_->OnClientRefused([this](const RefusedClient&) { server_.reset(); });
  EXPECT_FALSE(Connect("two").has_value());
  ASSERT_TRUE(Until([&] { return !server_.has_value(); }));
}

}  // namespace
}  // namespace stagecoach::e2e
