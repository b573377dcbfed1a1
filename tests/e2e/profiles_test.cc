// Every profile of RPC-over-RDMA version 1 against every other, and the table of docs/profiles.md that says what works;
// what only the older documents have, configured by the protocol that RFC 5666 has for that; and peers that lie.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "rpcrdma/api/client.h"
#include "rpcrdma/api/server.h"
#include "rpcrdma/api/session.h"
#include "rpcrdma/ccp/ccp.h"
#include "rpcrdma/wire/header_v1.h"
#include "rpcrdma/wire/profile.h"
#include "tests/e2e/outcome.h"
#include "tests/e2e/raw_peer.h"
#include "tests/e2e/setting.h"
#include "tests/e2e/test_service.h"

namespace stagecoach::e2e {
namespace {

using rpcrdma::AllProfiles;
using rpcrdma::CallError;
using rpcrdma::CallOptions;
using rpcrdma::Client;
using rpcrdma::ClientOptions;
using rpcrdma::ConnectionConfiguration;
using rpcrdma::kCcpProgram;
using rpcrdma::kConfRdma;
using rpcrdma::MessageType;
using rpcrdma::ProtocolProfile;
using rpcrdma::Server;
using rpcrdma::ServerOptions;
using rpcrdma::XdrReader;
using rpcrdma::XdrWriter;

// What the ends that these tests play say on the wire: RDMA_MSG without chunks around an RPC call with AUTH_NONE.
std::vector<std::byte> CallBytes(uint32_t xid, uint32_t program, uint32_t version, uint32_t procedure,
                                 std::initializer_list<uint32_t> args) {
  std::vector<std::byte> bytes = Words({xid, 1, 1, 0, 0, 0, 0, xid, 0, 2, program, version, procedure, 0, 0, 0, 0});
  const std::vector<std::byte> tail = Words(args);
  bytes.insert(bytes.end(), tail.begin(), tail.end());
  return bytes;
}
std::vector<std::byte> SourceBytes(uint32_t xid, uint32_t size) {
  return CallBytes(xid, kProgram, 3, kSource, {size});
}
std::vector<std::byte> NullBytes(uint32_t xid) {
  return CallBytes(xid, kProgram, 3, kNull, {});
}
std::vector<std::byte> DoneBytes(uint32_t xid) {
  return Words({xid, 1, 1, 3});
}
// An answer to NULL, and to CONF_RDMA.
std::vector<std::byte> NothingBytes(uint32_t xid) {
  return Words({xid, 1, 8, 0, 0, 0, 0, xid, 1, 0, 0, 0, 0});
}
std::vector<std::byte> ConfiguredBytes(uint32_t xid, uint32_t reads) {
  return Words({xid, 1, 8, 0, 0, 0, 0, xid, 1, 0, 0, 0, 0, 1024, 0, reads});
}
// A long reply in these segments: steering tag, length, offset.
std::vector<std::byte> LongReplyBytes(uint32_t xid, const std::vector<rpcrdma::Segment>& segments) {
  std::vector<std::byte> bytes = Words({xid, 1, 8, 1});
  for (const rpcrdma::Segment& segment : segments) {
    const auto entry = Words({1, 0, segment.handle, segment.length, static_cast<uint32_t>(segment.offset >> 32),
                              static_cast<uint32_t>(segment.offset)});
    bytes.insert(bytes.end(), entry.begin(), entry.end());
  }
  const auto ends = Words({0, 0, 0});
  bytes.insert(bytes.end(), ends.begin(), ends.end());
  return bytes;
}

class ProfilesTest : public ::testing::Test {
 protected:
  ~ProfilesTest() override {
    service_.held.clear();
    client_.reset();
    peer_.reset();
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
    StartClient(client, std::move(client_options), server_->port());
  }
  void StartClient(const ProtocolProfile& client, ClientOptions client_options, uint16_t port) {
    setting_->ActAsClient();
    client_options.profile = client;
    // The server would take what one client sends for what another has sent before.
    client_options.first_xid = next_xid_;
    next_xid_ += 1u << 16;
    client_ = std::make_unique<Client>(setting_->loop(), client_options);
    for (const rpcrdma::Binding& binding : kBindings) client_->Register(binding);
    std::optional<Result<void, CallError>> connected;
    client_->Connect(setting_->server_host(), port,
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

  const ConnectionConfiguration& configuration() const { return *client_->configuration(); }

  // --- The table of the page ---

  std::vector<std::string> RowsOf(const ClientOptions& options) {
    std::vector<std::string> rows;
    for (const ProtocolProfile& client : AllProfiles()) {
      for (const ProtocolProfile& server : AllProfiles()) {
        SCOPED_TRACE(std::string(client.name) + " to " + std::string(server.name));
        Start(client, server, {}, options);
        if (HasFatalFailure()) return rows;
        std::string row = "| " + std::string(client.name) + " | " + std::string(server.name) + " |";
        const auto cell = [&](const std::set<std::string>& ways) {
          EXPECT_EQ(ways.size(), 1u) << "not the same for every size";
          row += " " + *ways.begin() + " |";
        };
        EXPECT_TRUE(Call(kNull).has_value());
        std::set<std::string> ways;
        for (const uint32_t size : {0u, 1u, 5u, 900u, 1023u, 5001u, (1u << 20) + 3}) ways.insert(Size(size));
        cell(std::exchange(ways, {}));
        for (const uint32_t size : {0u, 1u, 900u, 1023u, 5001u, (1u << 20) + 3}) {
          ways.insert(Source(size, size));
          if (size < 10000) ways.insert(Source(size, size + 3));  // with room for round-up
        }
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
        EXPECT_EQ(client_->stats().lengths_wrong, 0u);
        rows.push_back(row);
      }
    }
    return rows;
  }
  static std::vector<std::string> RowsOfThePage() {
    std::ifstream page("docs/profiles.md");
    EXPECT_TRUE(page.is_open());
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
    return said;
  }

  // --- A client that the test plays ---

  void ConnectPeer() {
    setting_->ActAsClient();
    peer_.emplace(setting_->loop(), RawPeer::Options{.incoming_reads = 4, .outgoing_reads = 4, .name = "raw"});
    peer_->Connect(setting_->server_host(), server_->port());
    ASSERT_TRUE(setting_->Until([&] { return peer_->established; }));
  }
  // The header of what the server answers next.
  rpcrdma::Header Ask(const std::vector<std::byte>& message) {
    const size_t before = peer_->engine->received.size();
    peer_->Send(message);
    EXPECT_TRUE(setting_->Until([&] { return peer_->engine->received.size() > before || peer_->closed; }));
    if (peer_->engine->received.size() == before) return {};
    return Decoded(peer_->engine->received[before]);
  }
  static rpcrdma::Header Decoded(ConstBytes message) {
    ByteReader in(message);
    const auto header = rpcrdma::DecodeHeaderV1(in, {}, rpcrdma::kRfc5666);
    EXPECT_TRUE(header.has_value());
    return header ? *header : rpcrdma::Header{};
  }
  // What a reply leaves to be read, all of it in one segment.
  static rpcrdma::Segment OnlyReadOf(const rpcrdma::Header& header) {
    EXPECT_TRUE(header.chunks() != nullptr && header.chunks()->reads.size() == 1);
    if (header.chunks() == nullptr || header.chunks()->reads.size() != 1) return {};
    return header.chunks()->reads[0].target;
  }

  // --- A server that the test plays ---

  // Has all messages answered by `answer`, and connects a client.
  void StartLyingServer(const ProtocolProfile& profile, const ClientOptions& options,
                        std::function<void(RawPeer&, uint32_t xid, uint32_t program, uint32_t procedure)> answer) {
    client_.reset();
    setting_->ActAsServer();
    peer_.emplace(setting_->loop(), RawPeer::Options{.incoming_reads = 4, .name = "raw"});
    const uint16_t port = peer_->Listen(setting_->server_host(), [this, answer] {
      peer_->engine->on_message = [this, answer](const std::vector<std::byte>& bytes) {
        if (Decoded(bytes).type() == MessageType::kDone) return;
        ByteReader in(bytes);
        const uint32_t xid = in.U32();
        in.Skip(36);
        const uint32_t program = in.U32();
        in.Skip(4);
        answer(*peer_, xid, program, in.U32());
      };
    });
    StartClient(profile, options, port);
  }
  // How often the client has said RDMA_DONE.
  size_t DonesReceived() const {
    return static_cast<size_t>(
        std::count_if(peer_->engine->received.begin(), peer_->engine->received.end(),
                      [](const auto& bytes) { return Decoded(bytes).type() == MessageType::kDone; }));
  }
  size_t Told(const std::string& event) const {
    return static_cast<size_t>(std::count_if(trace_.lines().begin(), trace_.lines().end(), [&](const auto& line) {
      return line.find(" " + event + " ") != std::string::npos;
    }));
  }

  TraceLog trace_;
  std::unique_ptr<Setting> setting_ = MakeSettingOfThisTest();
  TestService service_;
  std::optional<Server> server_;
  std::optional<RawPeer> peer_;
  std::unique_ptr<Client> client_;
  uint32_t next_xid_ = 1;
};

// What docs/profiles.md says of two ends, and does.
TEST_F(ProfilesTest, WhatWorksBetweenThemIsWhatThePageSays) {
  const std::vector<std::string> said = RowsOfThePage();
  for (const bool exact : {true, false}) {
    SCOPED_TRACE(exact ? "exact lengths" : "any lengths");
    EXPECT_EQ(said, RowsOf({.exact_lengths = exact}));
    if (HasFatalFailure()) return;
  }
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

// [5666:3.7+4] RFC 5666 alone has them counted, and none of the documents has the round-up written.
TEST_F(ProfilesTest, ReturnedLengthsCountRoundUpWhereTheOfferHasRoomAndItIsNotWritten) {
  for (const ProtocolProfile& profile : AllProfiles()) {
    for (const uint32_t room : {2001u, 2003u, 2004u, 2008u}) {
      SCOPED_TRACE(std::string(profile.name) + " " + std::to_string(room));
      const uint32_t returned = profile.name == "rfc5666" && room >= 2004 ? 2004 : 2001;
      Start(profile, profile, {}, {.inline_threshold = 1024});
      if (HasFatalFailure()) return;
      std::vector<std::byte> sink(2008, std::byte{0xee});
      std::vector<std::byte> expected = Pattern(2001);
      expected.resize(2008, std::byte{0xee});

      // On the wire: a call for 2001 bytes with a Write chunk of one segment.
      ConnectPeer();
      const auto exposed =
          peer_->connection().Register(MutableBytes(sink).first(room), rpcrdma::MemoryUse::kWrittenByPeer, nullptr);
      ASSERT_TRUE(exposed.has_value());
      const rpcrdma::Header answer = Ask(e2e::Words({1,
                                                     1,
                                                     1,
                                                     0,
                                                     /*reads=*/0,
                                                     /*writes=*/1,
                                                     /*segments=*/1,
                                                     exposed->handle,
                                                     room,
                                                     static_cast<uint32_t>(exposed->offset >> 32),
                                                     static_cast<uint32_t>(exposed->offset),
                                                     0,
                                                     /*reply=*/0,
                                                     1,
                                                     0,
                                                     2,
                                                     kProgram,
                                                     3,
                                                     kSource,
                                                     0,
                                                     0,
                                                     0,
                                                     0,
                                                     2001}));
      ASSERT_NE(answer.chunks(), nullptr);
      ASSERT_EQ(answer.chunks()->writes.size(), 1u);
      EXPECT_EQ(answer.chunks()->writes[0][0].length, returned);
      EXPECT_EQ(ToHex(sink), ToHex(expected));
      peer_.reset();  // before its sink

      // Between our own ends: what a program gives is offered up to the round-up, and nothing behind it.
      std::fill(sink.begin(), sink.end(), std::byte{0xee});
      CallOptions options;
      options.result_buffers = {MutableBytes(sink).first(room)};
      const Outcome outcome = Call(
          kSource, [](XdrWriter& args) { args.U32(2001); }, options);
      ExpectData(outcome, Pattern(2001), sink.data());
      EXPECT_EQ(outcome->placed_bytes(0), returned);
      EXPECT_EQ(ToHex(sink), ToHex(expected));
    }
  }
}

// --- The message that every end can take ---

// A call of kSize and a reply of kSource that are so many bytes long, header included: 1024 for 952 and for 968 bytes
// of data.
std::vector<std::byte> CallOfLength(uint32_t xid, size_t length) {
  std::vector<std::byte> bytes = CallBytes(xid, kProgram, 3, kSize, {static_cast<uint32_t>(length - 72)});
  const auto data = Pattern(length - 72);
  bytes.insert(bytes.end(), data.begin(), data.end());
  return bytes;
}
std::vector<std::byte> ReplyOfLength(uint32_t xid, size_t length) {
  std::vector<std::byte> bytes = NothingBytes(xid);
  const auto count = Words({static_cast<uint32_t>(length - 56)});
  bytes.insert(bytes.end(), count.begin(), count.end());
  const auto data = Pattern(length - 56);
  bytes.insert(bytes.end(), data.begin(), data.end());
  return bytes;
}

// [5666:6.1+2] [2004:6.1+2] Nothing is agreed on: the client that the test plays has no private data, and has asked for
// no other size, or for one byte.
TEST_F(ProfilesTest, AServerTakes1024BytesWhateverItsOptionsAndMoreAsFarAsItsReceivesGo) {
  for (const ProtocolProfile& profile : AllProfiles()) {
    const struct {
      const char* which;
      ServerOptions options;
      bool configure;
      bool takes_more;
    } kServers[] = {
        {"smallest", {.credits = 1, .inline_threshold = 1024, .exposed_replies_max = 0}, false, false},
        {"smallest receive", {.inline_receive_max = 1024}, false, false},
        {"largest", {.inline_threshold = 256 * 1024}, false, true},
        {"asked for one byte", {.ccp = {.enabled = true}}, true, false},
    };
    for (const auto& row : kServers) {
      SCOPED_TRACE(std::string(profile.name) + " " + row.which);
      Start(profile, profile, row.options);
      if (HasFatalFailure()) return;
      ConnectPeer();
      uint32_t xid = 1;
      if (row.configure) {
        EXPECT_EQ(Ask(CallBytes(xid++, kCcpProgram, 1, kConfRdma, {1, 1, 4})).type(), MessageType::kMsg);
      }
      ASSERT_EQ(CallOfLength(xid, 1024).size(), 1024u);
      EXPECT_EQ(Ask(CallOfLength(xid, 1024)).xid, xid);
      EXPECT_EQ(ToHex(service_.last_data), ToHex(Pattern(952)));
      const size_t handled = service_.handled;
      // One byte more, of which XDR makes four.
      auto longer = CallOfLength(++xid, 1028);
      if (!row.takes_more) longer.resize(1025);
      peer_->Send(longer);
      ASSERT_TRUE(setting_->Until([&] { return service_.handled > handled || peer_->closed.has_value(); }));
      EXPECT_EQ(service_.handled > handled, row.takes_more);
      EXPECT_EQ(peer_->closed.has_value(), !row.takes_more) << "the device ends the connection";
      peer_.reset();
      EXPECT_TRUE(Call(kNull).has_value()) << "that of another client goes on";
    }
  }
}

// [5666:6.1+2] [2004:6.1+2]
TEST_F(ProfilesTest, AClientTakes1024BytesWhateverItsOptionsAndMoreAsFarAsItsReceivesGo) {
  for (const ProtocolProfile& profile : AllProfiles()) {
    const struct {
      const char* which;
      ClientOptions options;
      bool takes_more;
    } kClients[] = {
        {"smallest", {.credits = 1, .inline_threshold = 1024}, false},
        {"smallest receive", {.inline_receive_max = 1024}, false},
        {"largest", {.inline_threshold = 256 * 1024}, true},
        {"told of one byte", {.inline_threshold = 1024, .ccp = {.enabled = true}}, false},
    };
    for (const auto& row : kClients) {
      SCOPED_TRACE(std::string(profile.name) + " " + row.which);
      size_t length = 1024;
      StartLyingServer(profile, row.options, [&](RawPeer& peer, uint32_t xid, uint32_t program, uint32_t) {
        if (program == kCcpProgram) {
          return peer.Send(e2e::Words({xid, 1, 8, 0, 0, 0, 0, xid, 1, 0, 0, 0, 0, /*max_call_size=*/1, 0, 4}));
        }
        auto reply = ReplyOfLength(xid, (length + 3) / 4 * 4);
        reply.resize(length);
        peer.Send(reply);
      });
      if (HasFatalFailure()) return;
      ASSERT_EQ(ReplyOfLength(1, 1024).size(), 1024u);
      ExpectData(Call(kSource, [](XdrWriter& args) { args.U32(968); }), Pattern(968));
      length = row.takes_more ? 1028 : 1025;
      const Outcome longer = Call(kSource, [](XdrWriter& args) { args.U32(972); });
      if (row.takes_more) {
        ExpectData(longer, Pattern(972));
      } else {
        ASSERT_FALSE(longer.has_value());
        EXPECT_EQ(longer.error().kind, CallError::Kind::kConnectionLost) << longer.error().ToString();
      }
    }
  }
}

// --- Configured by the protocol of RFC 5666 ---

ServerOptions Serving(uint32_t receive_align = 1) {
  ServerOptions options;
  options.ccp = {.enabled = true, .inline_send_max = 8192, .inline_receive_max = 8192};
  options.receive_align = receive_align;
  return options;
}
ClientOptions Asking(uint32_t padding_align = 0) {
  ClientOptions options;
  options.inline_threshold = 8192;
  options.padding_align = padding_align;
  options.ccp.enabled = true;
  return options;
}

// These documents have no private data: messages are longer than 1024 bytes by this alone.
TEST_F(ProfilesTest, ConfiguredEndsSendLongerMessagesAndReadWhatIsLongerStill) {
  for (const ProtocolProfile& client : {rpcrdma::kDraft2004, rpcrdma::kRfc5666}) {
    for (const ProtocolProfile& server : {rpcrdma::kDraft2004, rpcrdma::kRfc5666}) {
      SCOPED_TRACE(std::string(client.name) + " to " + std::string(server.name));
      Start(client, server, Serving(), Asking());
      if (HasFatalFailure()) return;
      ASSERT_TRUE(configuration().applied) << configuration().why_not;
      EXPECT_EQ(configuration().inline_send, 8192u);
      EXPECT_EQ(configuration().inline_receive, 8192u);
      EXPECT_EQ(Size(8000), "yes");
      EXPECT_EQ(client_->stats().calls_by_read_chunk, 0u);
      EXPECT_EQ(Source(8000, 0), "yes") << "inline";
      EXPECT_EQ(Words(1900, 7700), "yes");
      EXPECT_EQ(client_->stats().replies_long, 0u);
      EXPECT_EQ(Source(20001, 0), "by reading");
      EXPECT_EQ(Words(20000, 100), "by reading");
      EXPECT_EQ(Size(20001), "yes");
      ExpectNothingExposed();
    }
  }
}

// [5666:6.2#6] [5666:6.2+5] [2004:6.2+6] 28 and 44 bytes stand before the data of a call that is not padded, 8 more
// before that of one which is.
TEST_F(ProfilesTest, TheAlignmentThatTheServerRecommendsPadsTheCallsOfItsClients) {
  for (const ProtocolProfile& server : AllProfiles()) {
    for (const ProtocolProfile& client : AllProfiles()) {
      SCOPED_TRACE(std::string(client.name) + " to " + std::string(server.name));
      const struct {
        uint32_t said;
        uint32_t begins_at;  // modulo 512
      } kRows[] = {{0, server.padding && client.padding ? 0u : 72u}, {1, 72}};
      for (const auto& row : kRows) {
        Start(client, server, Serving(512), Asking(row.said));
        if (HasFatalFailure()) return;
        ASSERT_TRUE(configuration().applied) << configuration().why_not;
        EXPECT_EQ(configuration().align, server.padding ? 512u : 0u) << "or it would take padding for data";
        EXPECT_EQ(Size(2001), "yes");
        EXPECT_EQ(ToHex(service_.last_data), ToHex(Pattern(2001)));
        EXPECT_EQ(service_.last_data_at % 512, row.begins_at);
        EXPECT_EQ(client_->stats().calls_by_read_chunk, 0u);
        // Shorter than the threshold, and without room for padding.
        EXPECT_EQ(Size(255), "yes");
        EXPECT_EQ(service_.last_data_at % 512, 72u);
        EXPECT_EQ(Size(8000), "yes");
        EXPECT_EQ(service_.last_data_at % 512, 72u);
      }
    }
  }
  // What the program has chosen prevails.
  Start(rpcrdma::kRfc5666, rpcrdma::kRfc5666, Serving(512), Asking(64));
  if (HasFatalFailure()) return;
  EXPECT_EQ(configuration().align, 512u);
  EXPECT_EQ(Size(2001), "yes");
  EXPECT_EQ(service_.last_data_at % 512, 128u);
  // A server that has nothing to say, and one that was not asked.
  Start(rpcrdma::kRfc5666, rpcrdma::kRfc5666, Serving(), Asking());
  if (HasFatalFailure()) return;
  EXPECT_EQ(configuration().align, 0u);
  Start(rpcrdma::kRfc5666, rpcrdma::kRfc5666, Serving(512));
  if (HasFatalFailure()) return;
  EXPECT_EQ(Size(900), "yes");
  EXPECT_EQ(service_.last_data_at % 512, 72u);
}

// [5666:6.2#4] [2004:6.1#5]
TEST_F(ProfilesTest, NoMoreReadsAreInFlightThanTheServerAllows) {
  std::vector<std::byte> message;
  ClientOptions options = Asking();
  options.trace = &trace_;
  StartLyingServer(rpcrdma::kRfc5666, options, [&](RawPeer& peer, uint32_t xid, uint32_t program, uint32_t) {
    if (program == kCcpProgram) return peer.Send(ConfiguredBytes(xid, 1));
    message = e2e::Words({xid, 1, 0, 0, 0, 0, 4000});
    const auto data = Pattern(4000);
    message.insert(message.end(), data.begin(), data.end());
    const auto exposed = peer.connection().Register(message, rpcrdma::MemoryUse::kReadByPeer, nullptr);
    ASSERT_TRUE(exposed.has_value());
    std::vector<rpcrdma::Segment> segments;
    for (uint32_t at = 0; at < message.size(); at += 500) {
      const auto length = std::min<uint32_t>(500, static_cast<uint32_t>(message.size()) - at);
      segments.push_back({exposed->handle, length, exposed->offset + at});
    }
    peer.Send(LongReplyBytes(xid, segments));
  });
  if (HasFatalFailure()) return;
  EXPECT_EQ(configuration().server_reads, 1u) << "although the connection was made for four";
  EXPECT_EQ(Source(4000, 0), "by reading");
  EXPECT_EQ(Told("read.issued"), 9u);
  for (const std::string& line : trace_.lines()) {
    if (line.find(" read.issued ") == std::string::npos) continue;
    EXPECT_NE(line.find("in_flight=1 reads_max=1"), std::string::npos) << line;
  }
  peer_.reset();  // before what it exposes
}

// [5666:6.2#5] [2004:6.1#6]
TEST_F(ProfilesTest, WhereEitherEndSaysNoReadsNoReplyIsLeftToBeRead) {
  Start(rpcrdma::kRfc5666, rpcrdma::kRfc5666, Serving());
  if (HasFatalFailure()) return;
  for (const uint32_t reads : {4u, 0u}) {
    SCOPED_TRACE(reads);
    ConnectPeer();
    EXPECT_EQ(Ask(CallBytes(1, kCcpProgram, 1, kConfRdma, {1024, 1024, reads})).type(), MessageType::kMsg);
    const rpcrdma::Header answer = Ask(SourceBytes(2, 5000));
    if (reads > 0) {
      EXPECT_EQ(OnlyReadOf(answer).length, 5000u);
    } else {
      EXPECT_EQ(answer.body, rpcrdma::Header::Body(rpcrdma::ErrChunk{}));
    }
  }
  peer_.reset();
  // A server that reads nothing says so, and by that lets its client read nothing.
  ServerOptions reads_nothing = Serving();
  reads_nothing.outgoing_reads = 0;
  Start(rpcrdma::kRfc5666, rpcrdma::kRfc5666, reads_nothing, Asking());
  if (HasFatalFailure()) return;
  EXPECT_EQ(configuration().server_reads, 0u);
  EXPECT_EQ(Source(20000, 0), "ERR_CHUNK");
  EXPECT_EQ(Source(5000, 0), "yes") << "inline";
}

TEST_F(ProfilesTest, NothingIsReadOfAServerThatHasSaidNoReads) {
  StartLyingServer(rpcrdma::kRfc5666, Asking(), [&](RawPeer& peer, uint32_t xid, uint32_t program, uint32_t procedure) {
    if (program == kCcpProgram) return peer.Send(ConfiguredBytes(xid, 0));
    peer.Send(procedure == kNull ? NothingBytes(xid) : LongReplyBytes(xid, {{77, 5000, 0x1000}}));
  });
  if (HasFatalFailure()) return;
  const Outcome outcome = Call(kSource, [](XdrWriter& args) { args.U32(5000); });
  ASSERT_FALSE(outcome.has_value());
  EXPECT_EQ(outcome.error().kind, CallError::Kind::kBadReply) << outcome.error().ToString();
  ASSERT_TRUE(setting_->Until([&] { return DonesReceived() == 1; })) << "it may let go of its memory all the same";
  EXPECT_EQ(client_->stats().reads, 0u);
  EXPECT_TRUE(Call(kNull).has_value());
}

// --- Clients that do not keep to it ---

// [5666:3.8#1] [5666:11#5] [2004:3.8+9]
TEST_F(ProfilesTest, WhoNeverSaysDoneLosesItsConnectionAlone) {
  Start(rpcrdma::kRfc5666, rpcrdma::kRfc5666, {.exposed_time = 500ms});
  if (HasFatalFailure()) return;
  ConnectPeer();
  EXPECT_EQ(OnlyReadOf(Ask(SourceBytes(1, 5000))).length, 5000u);
  EXPECT_EQ(Source(5000, 0), "by reading");
  ASSERT_TRUE(setting_->Until([&] { return peer_->closed.has_value(); }));
  ASSERT_TRUE(setting_->Until([&] { return service_.clients == 1; }));
  EXPECT_EQ(Source(5000, 0), "by reading");
  ExpectNothingExposed();
}

// [5666:11+2] As after any loss: what it reads is not there any more, and its device ends the connection.
TEST_F(ProfilesTest, ClientThatMissesTheWindowRepeatsItsCall) {
  setting_->ActAsServer();
  peer_.emplace(setting_->loop(), RawPeer::Options{.incoming_reads = 4, .name = "raw"});
  const uint16_t port = peer_->Listen(setting_->server_host(), [this] {
    peer_->engine->on_message = [this](const std::vector<std::byte>& bytes) {
      peer_->Send(LongReplyBytes(ByteReader(bytes).U32(), {{0xdeadbe00, 5000, 0x1000}}));
    };
  });
  setting_->ActAsClient();
  rpcrdma::SessionOptions options;
  options.client.profile = rpcrdma::kRfc5666;
  options.client.first_xid = 1;
  options.seed = 1;
  std::optional<rpcrdma::Session> session;
  session.emplace(setting_->loop(), setting_->server_host(), port, options);
  session->Register(kBindings[0]);
  std::optional<Outcome> outcome;
  session->Call(
      Id(kSource), [&](XdrWriter& args) { args.U32(5000); }, {},
      [&](Outcome result) { outcome.emplace(std::move(result)); });
  ASSERT_TRUE(setting_->Until([&] { return outcome.has_value() || session->stats().lost > 0; }));
  ASSERT_FALSE(outcome.has_value());
  setting_->ActAsServer();
  peer_.reset();
  server_.emplace(setting_->loop(), ServerOptions{.profile = rpcrdma::kRfc5666});
  server_->Register(&service_);
  ASSERT_TRUE(server_->Listen(setting_->server_host(), port).has_value());
  setting_->ActAsClient();
  ASSERT_TRUE(setting_->Until([&] { return outcome.has_value(); }));
  ExpectData(*outcome, Pattern(5000));
  EXPECT_EQ(session->stats().retransmissions, 1u);
  EXPECT_EQ(session->stats().connections.replies_by_read_chunk, 2u);
  session.reset();
}

// [5666:3.8+5] [2004:3.8+5]
TEST_F(ProfilesTest, DoneLateOrTwiceOrForNothingIsDropped) {
  Start(rpcrdma::kRfc5666, rpcrdma::kRfc5666, {.exposed_replies_max = 1});
  if (HasFatalFailure()) return;
  ConnectPeer();
  EXPECT_EQ(OnlyReadOf(Ask(SourceBytes(1, 5000))).length, 5000u);
  peer_->Send(SourceBytes(2, 5000));
  peer_->Send(DoneBytes(2));  // for a reply that is withheld: not sent yet
  peer_->Send(DoneBytes(99));
  EXPECT_EQ(Ask(NullBytes(3)).xid, 3u) << "and not the reply that is withheld";
  EXPECT_EQ(Ask(DoneBytes(1)).xid, 2u);
  for (int i = 0; i < 50; ++i) peer_->Send(DoneBytes(1));
  EXPECT_EQ(Ask(NullBytes(4)).xid, 4u);
  EXPECT_EQ(server_->stats().connections.dones, 1u) << "the other reply is still exposed";
  for (int i = 0; i < 2; ++i) peer_->Send(DoneBytes(2));
  EXPECT_EQ(OnlyReadOf(Ask(SourceBytes(5, 5000))).length, 5000u);
  EXPECT_EQ(server_->stats().connections.dones, 2u);
  EXPECT_EQ(server_->stats().connections.ignored, 53u);
  EXPECT_FALSE(peer_->closed.has_value());
}

// [5666:3.8+7] [5666:3.4+3] [2004:3.4+2] The memory cannot be reached any more.
TEST_F(ProfilesTest, WhatIsExposedIsReadUntilDoneAndNotAfterwards) {
  Start(rpcrdma::kRfc5666, rpcrdma::kDraft2004);
  if (HasFatalFailure()) return;
  ConnectPeer();
  const rpcrdma::Segment source = OnlyReadOf(Ask(SourceBytes(1, 5000)));
  std::vector<std::byte> sink(5000);
  const auto local = peer_->connection().Register(sink, rpcrdma::MemoryUse::kReadSink, nullptr);
  ASSERT_TRUE(local.has_value());
  const rpcrdma::PostRead read{.sink = sink, .local_key = local->local_key, .source = source};
  for (size_t times = 1; times <= 3; ++times) {
    peer_->Give(read);
    ASSERT_TRUE(setting_->Until([&] { return peer_->engine->reads_done == times; }));
    EXPECT_EQ(ToHex(sink), ToHex(Pattern(5000)));
  }
  peer_->Send(DoneBytes(1));
  EXPECT_EQ(Ask(NullBytes(2)).xid, 2u);
  EXPECT_EQ(server_->stats().connections.dones, 1u);
  std::fill(sink.begin(), sink.end(), std::byte{0});
  peer_->Give(read);
  ASSERT_TRUE(setting_->Until([&] { return peer_->closed.has_value(); })) << "the device has refused it";
  EXPECT_EQ(ToHex(sink), ToHex(std::vector<std::byte>(5000)));
  EXPECT_EQ(peer_->engine->reads_done, 3u);
  peer_.reset();  // before its sink
  ASSERT_TRUE(setting_->Until([&] { return service_.clients == 1; }));
  EXPECT_EQ(Source(5000, 0), "by reading") << "others go on";
}

TEST_F(ProfilesTest, WhoLeavesWithoutDoneLeavesNothing) {
  Start(rpcrdma::kRfc5666, rpcrdma::kRfc5666, {.exposed_replies_max = 4});
  if (HasFatalFailure()) return;
  ConnectPeer();
  for (uint32_t xid = 1; xid <= 10; ++xid) peer_->Send(SourceBytes(xid, 5000));
  ASSERT_TRUE(setting_->Until([&] { return peer_->engine->received.size() == 4; })) << "the others are withheld";
  peer_.reset();
  ASSERT_TRUE(setting_->Until([&] { return service_.clients == 1; }));
  EXPECT_TRUE(setting_->Until([&] { return server_->holdings().connections == 1; }));
  EXPECT_EQ(server_->holdings().requests, 0u);
  EXPECT_EQ(Source(5000, 0), "by reading");
}

// --- Servers that do not keep to it ---

TEST_F(ProfilesTest, ServerThatExposesMoreThanIsTakenIsNotRead) {
  const std::vector<rpcrdma::Segment> kReplies[] = {
      {{77, 100001, 0x1000}},
      {{77, 60000, 0x1000}, {78, 60000, 0x1000}},
      {{77, UINT32_MAX, 0x1000}, {78, UINT32_MAX, 0x1000}},
      {{77, 5000, UINT64_MAX - 4}},
  };
  for (const auto& segments : kReplies) {
    SCOPED_TRACE(segments[0].length);
    ClientOptions options;
    options.read_bytes_max = 100000;
    StartLyingServer(rpcrdma::kRfc5666, options, [&](RawPeer& peer, uint32_t xid, uint32_t, uint32_t procedure) {
      peer.Send(procedure == kNull ? NothingBytes(xid) : LongReplyBytes(xid, segments));
    });
    if (HasFatalFailure()) return;
    const Outcome outcome = Call(kSource, [](XdrWriter& args) { args.U32(5000); });
    ASSERT_FALSE(outcome.has_value());
    EXPECT_EQ(outcome.error().kind, CallError::Kind::kBadReply) << outcome.error().ToString();
    ASSERT_TRUE(setting_->Until([&] { return DonesReceived() == 1; }));
    EXPECT_EQ(client_->stats().reads, 0u);
    EXPECT_TRUE(Call(kNull).has_value());
  }
}

// Reads of what is not exposed end the connection, and with it the call.
TEST_F(ProfilesTest, ServerThatExposesNothingOfWhatItSaysIsAConnectionLost) {
  StartLyingServer(rpcrdma::kRfc5666, {}, [&](RawPeer& peer, uint32_t xid, uint32_t, uint32_t) {
    peer.Send(LongReplyBytes(xid, {{0xdeadbe00, 5000, 0x1000}}));
  });
  if (HasFatalFailure()) return;
  const Outcome outcome = Call(kSource, [](XdrWriter& args) { args.U32(5000); });
  ASSERT_FALSE(outcome.has_value());
  EXPECT_EQ(outcome.error().kind, CallError::Kind::kConnectionLost) << outcome.error().ToString();
  EXPECT_TRUE(outcome.error().sent);
  EXPECT_FALSE(client_->connected());
}

// A reply that answers nothing any more is nobody's, whatever it exposes.
TEST_F(ProfilesTest, LateAndRepeatedRepliesAreSaidToBeDoneUnread) {
  StartLyingServer(rpcrdma::kDraft2004, {}, [&](RawPeer& peer, uint32_t xid, uint32_t, uint32_t) {
    peer.Send(NothingBytes(xid));
    for (int i = 0; i < 5; ++i) peer.Send(LongReplyBytes(xid, {{0xdeadbe00, 5000, 0x1000}}));
  });
  if (HasFatalFailure()) return;
  EXPECT_TRUE(Call(kNull).has_value());
  ASSERT_TRUE(setting_->Until([&] { return DonesReceived() == 5; }));
  EXPECT_EQ(client_->stats().reads, 0u);
  EXPECT_EQ(client_->stats().unknown_xids, 5u);
  EXPECT_TRUE(Call(kNull).has_value());
}

// [5666bis:5.7.2#1]
TEST_F(ProfilesTest, ReadChunksInRepliesToAClientWithoutThemEndTheirCallsAlone) {
  StartLyingServer(rpcrdma::kRfc5666bis, {}, [&](RawPeer& peer, uint32_t xid, uint32_t, uint32_t procedure) {
    peer.Send(procedure == kNull ? NothingBytes(xid) : LongReplyBytes(xid, {{77, 5000, 0x1000}}));
  });
  if (HasFatalFailure()) return;
  for (int i = 0; i < 3; ++i) {
    const Outcome outcome = Call(kSource, [](XdrWriter& args) { args.U32(5000); });
    ASSERT_FALSE(outcome.has_value());
    EXPECT_EQ(outcome.error().kind, CallError::Kind::kBadReply) << outcome.error().ToString();
    EXPECT_TRUE(Call(kNull).has_value());
  }
  EXPECT_EQ(client_->stats().reads, 0u);
  EXPECT_EQ(DonesReceived(), 0u) << "there is no such thing here";
}

}  // namespace
}  // namespace stagecoach::e2e
