// Every profile of RPC-over-RDMA version 1 against every other, and the table of docs/profiles.md that says what works.
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <optional>
#include <set>
#include <string>

#include "rpcrdma/api/client.h"
#include "rpcrdma/api/server.h"
#include "rpcrdma/wire/profile.h"
#include "tests/e2e/outcome.h"
#include "tests/e2e/setting.h"
#include "tests/e2e/test_service.h"

namespace stagecoach::e2e {
namespace {

using rpcrdma::AllProfiles;
using rpcrdma::CallError;
using rpcrdma::CallOptions;
using rpcrdma::Client;
using rpcrdma::ClientOptions;
using rpcrdma::ProtocolProfile;
using rpcrdma::Server;
using rpcrdma::ServerOptions;
using rpcrdma::XdrReader;
using rpcrdma::XdrWriter;

class ProfilesTest : public ::testing::Test {
 protected:
  ~ProfilesTest() override {
    service_.held.clear();
    client_.reset();
    server_.reset();
    setting_->For(1ms);
  }

  void Start(const ProtocolProfile& client, const ProtocolProfile& server, ServerOptions server_options = {},
             ClientOptions client_options = {}) {
    client_.reset();
    server_.reset();
    setting_->ActAsServer();
    server_options.profile = server;
    server_.emplace(setting_->loop(), server_options);
    server_->Register(&service_);
    ASSERT_TRUE(server_->Listen(setting_->server_host(), 0).has_value());
    setting_->ActAsClient();
    client_options.profile = client;
    // The server would take what one client sends for what another has sent before.
    client_options.first_xid = next_xid_;
    next_xid_ += 1u << 16;
    client_ = std::make_unique<Client>(setting_->loop(), client_options);
    for (const rpcrdma::Binding& binding : kBindings) client_->Register(binding);
    std::optional<Result<void, CallError>> connected;
    client_->Connect(setting_->server_host(), server_->port(),
                     [&](Result<void, CallError> result) { connected = std::move(result); });
    ASSERT_TRUE(setting_->Until([&] { return connected.has_value(); })) << "connecting hangs";
    ASSERT_TRUE(connected->has_value()) << connected->error().ToString();
  }

  Outcome Call(
      Procedure procedure, Client::ArgsWriter args = [](XdrWriter&) {}, const CallOptions& options = {}) {
    std::optional<Outcome> result;
    client_->Call(Id(procedure), args, options, [&](Outcome outcome) { result.emplace(std::move(outcome)); });
    EXPECT_TRUE(setting_->Until([&] { return result.has_value(); })) << "a call hangs";
    if (!result) std::abort();  // the handler refers to this frame
    return std::move(*result);
  }

  // How it went: "yes"; "by reading", from memory of the server; "ERR_CHUNK".
  std::string Way(const Outcome& outcome, uint64_t read_before) {
    const uint64_t read = client_->stats().replies_by_read_chunk - read_before;
    if (outcome) return read == 0 ? "yes" : "by reading";
    EXPECT_EQ(outcome.error().kind, CallError::Kind::kTransport) << outcome.error().ToString();
    EXPECT_EQ(read, 0u);
    return "ERR_CHUNK";
  }
  std::string Source(uint32_t size, size_t room) {
    std::vector<std::byte> sink(room);
    CallOptions options;
    if (room > 0) options.result_buffers = {sink};
    const uint64_t read = client_->stats().replies_by_read_chunk;
    const Outcome outcome = Call(
        kSource, [&](XdrWriter& args) { args.U32(size); }, options);
    if (outcome) ExpectData(outcome, Pattern(size), room >= size ? sink.data() : nullptr);
    return Way(outcome, read);
  }
  std::string Size(size_t size) {
    const auto data = Pattern(size);
    const Outcome outcome = Call(kSize, [&](XdrWriter& args) { args.EligibleOpaque(data); });
    if (outcome) {
      EXPECT_EQ(outcome->results().U32("size"), size);
    }
    return Way(outcome, client_->stats().replies_by_read_chunk);
  }
  std::string Words(uint32_t count, std::optional<uint32_t> reply_bytes_max) {
    CallOptions options;
    options.reply_bytes_max = reply_bytes_max;
    const uint64_t read = client_->stats().replies_by_read_chunk;
    const Outcome outcome = Call(
        kWords,
        [&](XdrWriter& args) {
          args.U32(count);
          for (uint32_t i = 0; i < count; ++i) args.U32(i * 7);
        },
        options);
    if (outcome) {
      XdrReader results = outcome->results();
      EXPECT_EQ(results.Count("words", count, 4), count);
      for (uint32_t i = 0; i < count && results.ok(); ++i) EXPECT_EQ(results.U32("word"), i * 7);
      EXPECT_TRUE(results.Finish().has_value());
    }
    return Way(outcome, read);
  }

  // All calls are over, and so is what the server exposed for them.
  void ExpectNothingExposed() {
    const auto all_done = [&] { return server_->stats().connections.dones == client_->stats().replies_by_read_chunk; };
    EXPECT_TRUE(setting_->Until(all_done)) << "not every reply that was read is said to be done";
    const auto client = client_->stats();
    EXPECT_EQ(client.registrations, client.invalidations_local + client.invalidations_remote);
  }

  std::unique_ptr<Setting> setting_ = MakeSettingOfThisTest();
  TestService service_;
  std::optional<Server> server_;
  std::unique_ptr<Client> client_;
  uint32_t next_xid_ = 1;
};

// What docs/profiles.md says of two ends, and does.
TEST_F(ProfilesTest, WhatWorksBetweenThemIsWhatThePageSays) {
  std::vector<std::string> rows;
  for (const ProtocolProfile& client : AllProfiles()) {
    for (const ProtocolProfile& server : AllProfiles()) {
      SCOPED_TRACE(std::string(client.name) + " to " + std::string(server.name));
      Start(client, server);
      if (HasFatalFailure()) return;
      std::string row = "| " + std::string(client.name) + " | " + std::string(server.name) + " |";
      const auto cell = [&](const std::set<std::string>& ways) {
        EXPECT_EQ(ways.size(), 1u) << "not the same for every size";
        row += " " + *ways.begin() + " |";
      };
      ASSERT_TRUE(Call(kNull).has_value());
      std::set<std::string> ways;
      for (const uint32_t size : {0u, 1u, 5u, 900u, 1023u, 5001u, (1u << 20) + 3}) ways.insert(Size(size));
      cell(std::exchange(ways, {}));
      for (const uint32_t size : {0u, 1u, 900u, 1023u, 5001u, (1u << 20) + 3}) ways.insert(Source(size, size));
      cell(std::exchange(ways, {}));
      for (const uint32_t count : {0u, 100u, 250u, 20000u}) ways.insert(Words(count, std::nullopt));
      cell(std::exchange(ways, {}));
      for (const uint32_t count : {2000u, 20000u}) ways.insert(Words(count, 100));
      cell(std::exchange(ways, {}));
      for (const uint32_t size : {5001u, (1u << 20) + 3}) ways.insert(Source(size, 0));
      cell(std::exchange(ways, {}));
      for (const uint32_t size : {5001u, (1u << 20) + 3}) ways.insert(Source(size, size - 1));
      cell(std::exchange(ways, {}));
      ExpectNothingExposed();
      rows.push_back(row);
    }
  }

  std::ifstream page("docs/profiles.md");
  ASSERT_TRUE(page.is_open());
  std::vector<std::string> said;
  bool in_table = false;
  for (std::string line; std::getline(page, line);) {
    if (line.starts_with("| client | server |")) {
      in_table = true;
      std::getline(page, line);  // the rule under the heading
    } else if (in_table && line.starts_with("|")) {
      said.push_back(line);
    } else {
      in_table = false;
    }
  }
  EXPECT_EQ(said, rows);
}

// [5666:3.8#4] One credit: every reply is read, and the next call finds room for itself behind RDMA_DONE.
TEST_F(ProfilesTest, RepliesThatAreReadDoNotUseUpCredits) {
  for (const uint32_t credits : {1u, 2u, 64u}) {
    SCOPED_TRACE(credits);
    Start(rpcrdma::kRfc5666, rpcrdma::kDraft2004, {.credits = credits}, {.credits = credits});
    if (HasFatalFailure()) return;
    size_t over = 0;
    for (int i = 0; i < 100; ++i) {
      client_->Call(
          Id(kSource), [&](XdrWriter& args) { args.U32(3001); }, {},
          [&](Outcome outcome) {
            ExpectData(outcome, Pattern(3001));
            ++over;
          });
    }
    ASSERT_TRUE(setting_->Until([&] { return over == 100; }));
    EXPECT_EQ(client_->stats().replies_by_read_chunk, 100u);
    ExpectNothingExposed();
  }
}

// [5666:11#7] One at a time is exposed, the others wait for it.
TEST_F(ProfilesTest, RepliesBeyondTheLimitWaitForThoseThatAreRead) {
  Start(rpcrdma::kDraft2004, rpcrdma::kRfc5666, {.exposed_replies_max = 1});
  if (HasFatalFailure()) return;
  size_t over = 0;
  for (int i = 0; i < 40; ++i) {
    client_->Call(
        Id(kSource), [&](XdrWriter& args) { args.U32(200000); }, {},
        [&](Outcome outcome) {
          ExpectData(outcome, Pattern(200000));
          ++over;
        });
  }
  ASSERT_TRUE(setting_->Until([&] { return over == 40; }));
  ExpectNothingExposed();
}

TEST_F(ProfilesTest, ReplyLongerThanTheClientReadsFailsItsCallAlone) {
  Start(rpcrdma::kRfc5666, rpcrdma::kRfc5666, {}, {.read_bytes_max = 100000});
  if (HasFatalFailure()) return;
  const Outcome outcome = Call(kSource, [](XdrWriter& args) { args.U32(100001); });
  ASSERT_FALSE(outcome.has_value());
  EXPECT_EQ(outcome.error().kind, CallError::Kind::kBadReply) << outcome.error().ToString();
  EXPECT_EQ(Source(50000, 0), "by reading");
  EXPECT_TRUE(setting_->Until([&] { return server_->stats().connections.dones == 2; }));
}

TEST_F(ProfilesTest, ReplyLongerThanTheServerExposesIsErrChunk) {
  Start(rpcrdma::kRfc5666, rpcrdma::kRfc5666, {.exposed_bytes_max = 100000});
  if (HasFatalFailure()) return;
  EXPECT_EQ(Source(100001, 0), "ERR_CHUNK");
  EXPECT_EQ(Source(50000, 0), "by reading");
}

// [5666:3.9#1] [5666:6.2#6] Whatever stands before it in the call.
TEST_F(ProfilesTest, PaddedDataLandsAligned) {
  for (const ProtocolProfile& server : AllProfiles()) {
    for (const uint32_t align : {8u, 64u, 256u, 512u}) {
      SCOPED_TRACE(std::string(server.name) + " " + std::to_string(align));
      ProtocolProfile client = rpcrdma::kRfc5666;
      Start(client, server, {.receive_align = align}, {.padding_align = align, .padding_threshold = 100});
      if (HasFatalFailure()) return;
      uint32_t misread = 0;
      for (uint32_t gids = 0; gids < 16; ++gids) {
        rpcrdma::AuthSys sys{.machine_name = "client.example"};
        for (uint32_t n = 0; n < gids; ++n) sys.gids.push_back(7);
        const auto credentials = rpcrdma::MakeAuthSys(sys);
        ASSERT_TRUE(credentials.has_value());
        CallOptions options;
        options.credentials = &*credentials;
        const auto data = Pattern(150 + gids);
        const Outcome outcome = Call(
            kSize, [&](XdrWriter& args) { args.EligibleOpaque(data); }, options);
        // Where there happens to be none, there is nothing to misread.
        if (!server.padding && !outcome) {
          EXPECT_EQ(outcome.error().kind, CallError::Kind::kRpc);
          ++misread;
          continue;
        }
        ASSERT_TRUE(outcome.has_value()) << outcome.error().ToString();
        EXPECT_EQ(ToHex(service_.last_data), ToHex(data));
        EXPECT_EQ(service_.last_data_at % align, 0u);
        EXPECT_EQ(service_.last_call.cred, *credentials);
      }
      EXPECT_EQ(misread > 0, !server.padding) << "padding is taken for data";
      // Too short for padding, and by chunk.
      for (const size_t size : {0u, 99u, 100u, 5000u}) EXPECT_EQ(Size(size), "yes");
    }
  }
}

}  // namespace
}  // namespace stagecoach::e2e
