// The Connection Configuration Protocol end to end, in whichever setting it is linked with: what the ends agree on, and
// what they make of others that lie.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "rpcrdma/api/client.h"
#include "rpcrdma/api/reverse_client.h"
#include "rpcrdma/api/server.h"
#include "rpcrdma/api/session.h"
#include "rpcrdma/ccp/ccp.h"
#include "rpcrdma/onc/rpc_message.h"
#include "tests/e2e/outcome.h"
#include "tests/e2e/raw_peer.h"
#include "tests/e2e/setting.h"
#include "tests/e2e/test_service.h"
#include "tests/e2e/transports.h"

namespace stagecoach::e2e {
namespace {

using rpcrdma::AuthFlavor;
using rpcrdma::CallError;
using rpcrdma::CallOptions;
using rpcrdma::Client;
using rpcrdma::ClientOptions;
using rpcrdma::ConnectionConfiguration;
using rpcrdma::kCcpProgram;
using rpcrdma::kConfRdma;
using rpcrdma::Reply;
using rpcrdma::Server;
using rpcrdma::ServerOptions;
using rpcrdma::XdrReader;
using rpcrdma::XdrWriter;

constexpr uint32_t kAcceptedWithoutVerifier[] = {1, 0, 0, 0};  // REPLY, MSG_ACCEPTED, AUTH_NONE of no bytes

ServerOptions Serving(uint32_t inline_threshold, uint32_t most = 0) {
  ServerOptions options;
  options.inline_threshold = inline_threshold;
  options.ccp = {.enabled = true, .inline_send_max = most, .inline_receive_max = most};
  return options;
}

ClientOptions Asking(uint32_t send, uint32_t receive) {
  ClientOptions options{.inline_send_max = send, .inline_receive_max = receive, .ccp = {.enabled = true}};
  options.first_xid = 1;
  return options;
}

std::vector<uint32_t> WordsOf(ConstBytes bytes) {
  std::vector<uint32_t> words(bytes.size() / 4);
  ByteReader in(bytes);
  for (uint32_t& word : words) word = in.U32();
  return words;
}

// RDMA_MSG without chunks around an RPC call with AUTH_NONE.
std::vector<std::byte> CallOf(uint32_t xid, uint32_t program, uint32_t version, uint32_t procedure,
                              std::initializer_list<uint32_t> args) {
  std::vector<std::byte> bytes = Words({xid, 1, 1, 0, 0, 0, 0, xid, 0, 2, program, version, procedure, 0, 0, 0, 0});
  const std::vector<std::byte> tail = Words(args);
  bytes.insert(bytes.end(), tail.begin(), tail.end());
  return bytes;
}
std::vector<std::byte> ConfRdma(uint32_t xid, std::initializer_list<uint32_t> args) {
  return CallOf(xid, kCcpProgram, 1, kConfRdma, args);
}

class CcpTest : public ::testing::Test {
 protected:
  ~CcpTest() override {
    service_.held.clear();
    client_.reset();
    peer_.reset();
    server_.reset();
    setting_->For(1ms);
  }

  void StartServer(ServerOptions options) {
    setting_->ActAsServer();
    options.trace = &trace_;
    server_.emplace(setting_->loop(), options);
    server_->Register(&service_);
    const auto listening = server_->Listen(setting_->server_host(), 0);
    ASSERT_TRUE(listening.has_value()) << listening.error().ToString();
  }
  Result<void, CallError> TryConnect(ClientOptions options, uint16_t port) {
    setting_->ActAsClient();
    options.trace = &trace_;
    client_.emplace(setting_->loop(), options);
    client_->Register(kBindings[0]);
    std::optional<Result<void, CallError>> result;
    client_->Connect(setting_->server_host(), port,
                     [&](Result<void, CallError> connected) { result.emplace(std::move(connected)); });
    EXPECT_FALSE(client_->connected());
    EXPECT_TRUE(setting_->Until([&] { return result.has_value(); })) << "connecting hangs";
    return result.value_or(Result<void, CallError>());
  }
  void Connect(const ClientOptions& options) {
    const auto connected = TryConnect(options, server_->port());
    ASSERT_TRUE(connected.has_value()) << connected.error().ToString();
    EXPECT_TRUE(client_->connected());
  }
  const ConnectionConfiguration& configuration() const { return *client_->configuration(); }

  std::optional<Outcome> Call(Procedure procedure, Client::ArgsWriter args, const CallOptions& options = {}) {
    std::optional<Outcome> outcome;
    client_->Call(Id(procedure), args, options, [&](Outcome result) { outcome.emplace(std::move(result)); });
    EXPECT_TRUE(setting_->Until([&] { return outcome.has_value(); }));
    return outcome;
  }
  // `count` calls at once, of which each has `bytes` of eligible data that the server counts.
  void CallWithData(size_t bytes, int count) {
    const auto data = Pattern(bytes);
    int good = 0, over = 0;
    for (int i = 0; i < count; ++i) {
      client_->Call(
          Id(kSize), [&](XdrWriter& args) { args.EligibleOpaque(data); }, {},
          [&](const Outcome& outcome) {
            ++over;
            if (outcome && outcome->results().U32("size") == bytes) ++good;
          });
    }
    ASSERT_TRUE(setting_->Until([&] { return over == count; }));
    EXPECT_EQ(good, count);
  }
  // A call whose reply has `words` words behind their number.
  void CallForWords(uint32_t words) {
    const auto outcome = Call(kWords, [&](XdrWriter& args) {
      args.U32(words);
      for (uint32_t i = 0; i < words; ++i) args.U32(i);
    });
    ASSERT_TRUE(outcome && outcome->has_value()) << (*outcome).error().ToString();
    XdrReader results = (*outcome)->results();
    EXPECT_EQ(results.Count("words", words, 4), words);
  }

  void ConnectPeer(const RawPeer::Options& options = {.incoming_reads = 4, .name = "raw"}) {
    setting_->ActAsClient();
    peer_.emplace(setting_->loop(), options);
    peer_->Connect(setting_->server_host(), server_->port());
    ASSERT_TRUE(setting_->Until([&] { return peer_->established; }));
  }
  // The words of the answer to one message; empty when there is none.
  std::vector<uint32_t> Ask(ConstBytes message) {
    const size_t before = peer_->engine->received.size();
    peer_->Send(message);
    if (!setting_->Until([&] { return peer_->engine->received.size() > before || peer_->closed; })) return {};
    return peer_->engine->received.size() > before ? WordsOf(peer_->engine->received[before]) : std::vector<uint32_t>();
  }
  // Behind accept_stat, of a reply that goes inline, is accepted and has this status.
  std::vector<uint32_t> ResultsOf(const std::vector<uint32_t>& answer, uint32_t xid, uint32_t status) {
    constexpr size_t kHeader = 7, kReply = 6;
    EXPECT_GE(answer.size(), kHeader + kReply);
    if (answer.size() < kHeader + kReply) return {};
    EXPECT_EQ(answer[0], xid);
    EXPECT_EQ(answer[3], 0u) << "RDMA_MSG";
    EXPECT_EQ(answer[7], xid);
    EXPECT_TRUE(std::equal(answer.begin() + 8, answer.begin() + 12, std::begin(kAcceptedWithoutVerifier)));
    EXPECT_EQ(answer[12], status);
    return {answer.begin() + 13, answer.end()};
  }
  void ExpectServerStillServes() {
    setting_->ActAsClient();
    std::optional<Client> client;
    client.emplace(setting_->loop(), Asking(4096, 4096));
    std::optional<bool> answered;
    client->Connect(setting_->server_host(), server_->port(), [&](Result<void, CallError> connected) {
      ASSERT_TRUE(connected.has_value()) << connected.error().ToString();
      client->Call(
          Id(kNull), [](XdrWriter&) {}, {}, [&](const Outcome& outcome) { answered = outcome.has_value(); });
    });
    EXPECT_TRUE(setting_->Until([&] { return answered.has_value(); }));
    EXPECT_TRUE(answered.value_or(false));
  }

  // A server that answers each call with what `answer` makes of its XID, program and procedure.
  uint16_t StartLyingServer(std::function<void(RawPeer&, uint32_t xid, uint32_t program)> answer,
                            const RawPeer::Options& options = {.incoming_reads = 4, .name = "raw"}) {
    setting_->ActAsServer();
    peer_.emplace(setting_->loop(), options);
    return peer_->Listen(setting_->server_host(), [this, answer] {
      peer_->engine->on_message = [this, answer](const std::vector<std::byte>& bytes) {
        const std::vector<uint32_t> words = WordsOf(bytes);
        ASSERT_GE(words.size(), 11u);
        answer(*peer_, words[0], words[10]);
      };
    });
  }
  // One that answers CONF_RDMA with `words` behind the transport header's XID, and all other calls honestly, as NULL.
  uint16_t StartServerThatSays(std::function<std::vector<std::byte>(uint32_t xid)> conf_rdma) {
    return StartLyingServer([conf_rdma](RawPeer& peer, uint32_t xid, uint32_t program) {
      peer.Send(program == kCcpProgram ? conf_rdma(xid) : Words({xid, 1, 8, 0, 0, 0, 0, xid, 1, 0, 0, 0, 0}));
    });
  }
  static std::vector<std::byte> Granting(uint32_t xid, uint32_t calls, uint32_t align, uint32_t reads) {
    return Words({xid, 1, 8, 0, 0, 0, 0, xid, 1, 0, 0, 0, 0, calls, align, reads});
  }
  void ExpectNullCallsWork() {
    for (int i = 0; i < 20; ++i) {
      const auto outcome = Call(kNull, [](XdrWriter&) {});
      ASSERT_TRUE(outcome && outcome->has_value()) << (*outcome).error().ToString();
    }
  }

  TraceLog trace_;
  std::unique_ptr<Setting> setting_ = MakeSettingOfThisTest();
  TestService service_;
  std::optional<Server> server_;
  std::optional<RawPeer> peer_;
  std::optional<Client> client_;
};

size_t Told(const TraceLog& trace, const std::string& event) {
  return static_cast<size_t>(std::count_if(trace.lines().begin(), trace.lines().end(), [&](const std::string& line) {
    return line.find(" " + event + " ") != std::string::npos;
  }));
}

// The server serves the program itself.
TEST_F(CcpTest, NoServiceMayHaveItsProgram) {
  class Other final : public rpcrdma::Service {
   public:
    uint32_t program() const override { return kCcpProgram; }
    rpcrdma::VersionRange versions() const override { return {1, 1}; }
    void Handle(rpcrdma::Request request) override { request.Reply(); }
  } other;
  for (const bool enabled : {true, false}) {
    setting_->ActAsServer();
    ServerOptions options = Serving(1024);
    options.ccp.enabled = enabled;
    server_.emplace(setting_->loop(), options);
    server_->Register(&other);
    const auto listening = server_->Listen(setting_->server_host(), 0);
    ASSERT_EQ(listening.has_value(), !enabled);
    if (enabled) {
      EXPECT_EQ(listening.error().kind, CallError::Kind::kOptions);
      EXPECT_EQ(listening.error().message,
                "listen on " + setting_->HostPort(0) +
                    ": ServerOptions::ccp.enabled is true, and must be false where a Service has its program, 100417");
    }
    server_.reset();
  }
}

// --- Two honest ends ---

// [5666:6#2] [5666:6#3] [5666:6.1#1] [5666:6.2#2] [2004:6#1] [2004:6.1#2]
TEST_F(CcpTest, SizesGrowAndTheFirstCallsFillThem) {
  ServerOptions options = Serving(1024, 8192);
  options.reply_chunk_use = rpcrdma::ReplyChunkUse::kWhenNeeded;
  StartServer(options);
  Connect(Asking(8192, 8192));
  ASSERT_TRUE(configuration().applied) << configuration().why_not;
  EXPECT_EQ(configuration().inline_send, 8192u);
  EXPECT_EQ(configuration().inline_receive, 1024u) << "the server's private data said so, and it may be all there is";
  EXPECT_EQ(Told(trace_, "connection.configured"), 2u);
  // Every Receive has the new size: as many at once as there are credits.
  CallWithData(8000, 200);
  EXPECT_EQ(client_->stats().calls_by_read_chunk, 0u);
  EXPECT_EQ(server_->stats().connections.calls_by_read_chunk, 0u);
  // A reply that only the server's new Sends have room for: the chunk that was offered for it stays empty.
  CallForWords(1900);
  EXPECT_EQ(client_->stats().replies_long, 0u);
  EXPECT_EQ(client_->stats().configured, 1u);
  EXPECT_EQ(server_->stats().connections.configured, 1u);
  EXPECT_EQ(server_->stats().connections.not_configured, 0u);
}

TEST_F(CcpTest, SizesShrinkAndSoDoesTheMemory) {
  StartServer(Serving(8192));
  Connect(Asking(8192, 8192));
  ASSERT_TRUE(configuration().applied);
  const uint64_t large = server_->holdings().buffer_bytes;
  client_.reset();
  ASSERT_TRUE(setting_->Until([&] { return service_.clients == 0; }));

  Connect(Asking(2048, 1024));
  ASSERT_TRUE(configuration().applied);
  EXPECT_EQ(configuration().inline_send, 2048u);
  EXPECT_EQ(configuration().inline_receive, 1024u);
  EXPECT_LT(server_->holdings().buffer_bytes, large / 3);
  CallWithData(1900, 200);
  EXPECT_EQ(client_->stats().calls_by_read_chunk, 0u);
  // What the client does not take inline goes by chunk.
  CallForWords(400);
  EXPECT_EQ(client_->stats().replies_long, 1u);
}

// [5666:6.2#2] [5666:6.2#3] [2004:6.1#2] [2004:6.1#3]
TEST_F(CcpTest, TheServerGrantsNoMoreThanItMay) {
  StartServer(Serving(1024, 4096));
  Connect(Asking(65536, 65536));
  EXPECT_EQ(configuration().inline_send, 4096u);
  CallWithData(4000, 64);
  EXPECT_EQ(client_->stats().calls_by_read_chunk, 0u);
  CallWithData(8000, 64);
  EXPECT_EQ(client_->stats().calls_by_read_chunk, 64u);
  // Nothing of this one may leave the message, which goes as a whole.
  CallForWords(2000);
  EXPECT_EQ(client_->stats().calls_long, 1u);
}

// [5666:6.2#2]
TEST_F(CcpTest, AServerMayTakeMoreThanTheClientSends) {
  ServerOptions options = Serving(4096);
  options.reverse_credits = 4;  // so its buffers stay
  StartServer(options);
  Connect(Asking(1024, 1024));
  ASSERT_TRUE(configuration().applied);
  EXPECT_EQ(configuration().inline_send, 1024u);
  CallWithData(2000, 8);
  EXPECT_EQ(client_->stats().calls_by_read_chunk, 8u);
}

// Nothing is different for a client that does not ask.
TEST_F(CcpTest, AClientThatDoesNotAskIsServedAsEver) {
  StartServer(Serving(4096, 8192));
  ClientOptions options;
  options.first_xid = 1;
  Connect(options);
  EXPECT_FALSE(client_->configuration().has_value());
  CallWithData(4000, 200);
  EXPECT_EQ(client_->stats().calls_by_read_chunk, 0u);
  EXPECT_EQ(client_->stats().credits_granted, 64u);
  EXPECT_EQ(Told(trace_, "connection.configured"), 0u);
}

// [5666:6#3]
TEST_F(CcpTest, WithoutTheProgramTheDefaultsHold) {
  StartServer({});
  Connect(Asking(8192, 8192));
  ASSERT_TRUE(client_->configuration().has_value());
  EXPECT_FALSE(configuration().applied);
  EXPECT_EQ(configuration().why_not, "RPC: program 100417 not available");
  EXPECT_EQ(configuration().inline_send, 4096u) << "as private data had it";
  CallWithData(4000, 64);
  CallWithData(5000, 64);
  EXPECT_EQ(client_->stats().calls_by_read_chunk, 64u);
  EXPECT_EQ(client_->stats().not_configured, 1u);
  EXPECT_EQ(client_->stats().configured, 0u);
  EXPECT_EQ(Told(trace_, "connection.not_configured"), 1u);
}

// [5666:11#9]
TEST_F(CcpTest, AFlavorThatIsNotAcceptableIsDenied) {
  ServerOptions options = Serving(1024, 8192);
  options.ccp.flavors = {AuthFlavor::kSys};
  StartServer(options);
  Connect(Asking(8192, 8192));
  EXPECT_FALSE(configuration().applied);
  EXPECT_NE(configuration().why_not.find("AUTH_TOOWEAK"), std::string::npos) << configuration().why_not;
  CallWithData(900, 8);

  ClientOptions proven = Asking(8192, 8192);
  proven.ccp.credentials = *rpcrdma::MakeAuthSys({.machine_name = "client", .uid = 7, .gid = 8});
  Connect(proven);
  EXPECT_TRUE(configuration().applied) << configuration().why_not;
  CallWithData(8000, 8);

  proven.ccp.credentials.body.clear();
  Connect(proven);
  EXPECT_FALSE(configuration().applied);
  EXPECT_NE(configuration().why_not.find("AUTH_BADCRED"), std::string::npos) << configuration().why_not;
  EXPECT_EQ(server_->stats().connections.not_configured, 2u);
  EXPECT_EQ(server_->stats().connections.configured, 1u);
}

// [5666:6.2#5] [2004:6.1#6]
TEST_F(CcpTest, AServerThatReadsNothingGetsNoReadChunks) {
  ServerOptions options = Serving(4096);
  options.outgoing_reads = 0;
  StartServer(options);
  Connect(Asking(4096, 4096));
  ASSERT_TRUE(configuration().applied);
  EXPECT_FALSE(configuration().read_chunks);
  const auto data = Pattern(8000);
  const auto outcome = Call(kSize, [&](XdrWriter& args) { args.EligibleOpaque(data); });
  ASSERT_TRUE(outcome.has_value());
  ASSERT_FALSE(outcome->has_value());
  EXPECT_EQ(outcome->error().kind, CallError::Kind::kTooLarge) << "and nothing was sent";
  EXPECT_NE(outcome->error().message.find("whether the other end reads any"), std::string::npos);
  EXPECT_FALSE(outcome->error().sent);
  CallWithData(4000, 8);
}

// Receives that others draw on stay as they are, and the client is told what is true.
TEST_F(CcpTest, SharedReceivesKeepTheirSize) {
  if (Transport().type != IBV_TRANSPORT_IB) GTEST_SKIP() << "skipped: each connection has Receives of its own";
  ServerOptions options = Serving(2048, 8192);
  options.shared_receives = 64;
  StartServer(options);
  Connect(Asking(8192, 8192));
  ASSERT_TRUE(configuration().applied);
  EXPECT_EQ(configuration().inline_send, 2048u);
  CallWithData(1900, 64);
  CallWithData(4000, 16);
  EXPECT_EQ(client_->stats().calls_by_read_chunk, 16u);
}

// What the client takes inline is any message.
TEST_F(CcpTest, LimitsHoldInTheReverseDirectionToo) {
  ServerOptions options = Serving(4096, 8192);
  options.reverse_credits = 4;
  options.first_xid = 0x100;
  StartServer(options);
  rpcrdma::ReverseClient back(*server_, {});
  ConnectPeer();
  ASSERT_TRUE(setting_->Until([&] { return service_.clients == 1; }));
  ASSERT_TRUE(back.Bind(1));
  std::optional<Outcome> outcome;
  const auto call = [&](size_t bytes) {
    const auto data = Pattern(bytes);
    outcome.reset();
    setting_->ActAsServer();
    back.Call(
        Id(kSize), [&](XdrWriter& args) { args.EligibleOpaque(data); }, {},
        [&](Outcome result) { outcome.emplace(std::move(result)); });
    setting_->ActAsClient();
  };
  const auto expect_arrival = [&](size_t bytes) {
    const size_t before = peer_->engine->received.size();
    call(bytes);
    ASSERT_TRUE(setting_->Until([&] { return peer_->engine->received.size() > before; }));
    EXPECT_EQ(peer_->engine->received[before].size(), 28 + 44 + bytes);
    const uint32_t xid = WordsOf(peer_->engine->received[before])[0];
    // Nothing is configured while it is in progress.
    EXPECT_TRUE(ResultsOf(Ask(ConfRdma(9, {8192, 8192, 1})), 9, 5).empty()) << "SYSTEM_ERR";
    peer_->Send(Words({xid, 1, 4, 0, 0, 0, 0, xid, 1, 0, 0, 0, 0, static_cast<uint32_t>(bytes)}));
    ASSERT_TRUE(setting_->Until([&] { return outcome.has_value(); }));
    EXPECT_TRUE(outcome->has_value());
  };
  expect_arrival(900);
  call(3000);
  ASSERT_TRUE(setting_->Until([&] { return outcome.has_value(); }));
  ASSERT_FALSE(outcome->has_value());
  EXPECT_EQ(outcome->error().kind, CallError::Kind::kTooLarge) << "1 KiB is what is known of this client";
  // Buffers stay as they are, as replies may come at any time.
  EXPECT_EQ(ResultsOf(Ask(ConfRdma(1, {8192, 8192, 1})), 1, 0), (std::vector<uint32_t>{4096, 0, 1}));
  expect_arrival(3000);
}

// [5666:6.1#1]
TEST_F(CcpTest, EachConnectionOfASessionIsConfiguredAnew) {
  setting_->ActAsServer();
  StartServer(Serving(1024, 8192));
  const uint16_t port = server_->port();
  setting_->ActAsClient();
  rpcrdma::SessionOptions options;
  options.client = Asking(8192, 8192);
  options.client.trace = &trace_;
  options.reconnect.delay_first = 1ms;
  options.seed = 1;
  std::optional<rpcrdma::Session> session;
  session.emplace(setting_->loop(), setting_->server_host(), port, options);
  session->Register(kBindings[0]);
  const auto data = Pattern(8000);
  const auto call = [&] {
    std::optional<Outcome> outcome;
    session->Call(
        Id(kSize), [&](XdrWriter& args) { args.EligibleOpaque(data); }, {},
        [&](Outcome result) { outcome.emplace(std::move(result)); });
    EXPECT_TRUE(setting_->Until([&] { return outcome.has_value(); }));
    EXPECT_TRUE(outcome && outcome->has_value());
  };
  call();
  EXPECT_EQ(session->stats().connections.calls_by_read_chunk, 0u);
  const auto restart = [&](ServerOptions anew) {
    setting_->ActAsServer();
    server_.reset();
    anew.trace = &trace_;
    server_.emplace(setting_->loop(), anew);
    server_->Register(&service_);
    ASSERT_TRUE(server_->Listen(setting_->server_host(), port).has_value());
    setting_->ActAsClient();
    ASSERT_TRUE(setting_->Until([&] { return session->connections() == 0; }));
  };
  // One that does not know the program: what the other granted means nothing any more.
  restart({.inline_threshold = 1024});
  call();
  EXPECT_EQ(session->stats().connections.calls_by_read_chunk, 1u);
  restart(Serving(1024, 8192));
  call();
  EXPECT_EQ(session->stats().connections.calls_by_read_chunk, 1u);
  EXPECT_EQ(session->stats().connections.configured, 2u);
  EXPECT_EQ(session->stats().connections.not_configured, 1u);
  session.reset();
}

// --- A server and clients of all kinds ---

// [5666:6.1#2]
TEST_F(CcpTest, TheServersAnswerIsTheseWords) {
  ServerOptions options = Serving(1024, 8192);
  options.credits = 5;
  options.receive_align = 64;
  StartServer(options);
  ConnectPeer();
  EXPECT_EQ(Ask(ConfRdma(9, {4096, 2048, 3})),
            (std::vector<uint32_t>{9, 1, 5, 0, 0, 0, 0, 9, 1, 0, 0, 0, 0, 4096, 0, 1}));
  // Who takes RDMA_MSGP for what it is says what its Receives are aligned to.
  options.profile = rpcrdma::kRfc5666;
  StartServer(options);
  ConnectPeer();
  EXPECT_EQ(Ask(ConfRdma(9, {4096, 2048, 3})),
            (std::vector<uint32_t>{9, 1, 5, 0, 0, 0, 0, 9, 1, 0, 0, 0, 0, 4096, 64, 1}));
}

// The calls that follow the answer at once may be as long as it says, all of them.
TEST_F(CcpTest, ReceivesOfTheNewSizeArePostedBeforeTheAnswer) {
  ServerOptions options = Serving(1024, 8192);
  options.credits = 16;
  StartServer(options);
  ConnectPeer({.send_size = 8192, .receive_size = 4096, .name = "raw"});
  peer_->engine->on_message = [&](const std::vector<std::byte>& bytes) {
    if (WordsOf(bytes)[0] != 1) return;
    for (uint32_t xid = 2; xid <= 17; ++xid) {
      auto call = CallOf(xid, kProgram, 3, kSize, {8000});
      call.resize(call.size() + 8000);
      peer_->Send(call);
    }
  };
  EXPECT_EQ(ResultsOf(Ask(ConfRdma(1, {8192, 4096, 1})), 1, 0).at(0), 8192u);
  ASSERT_TRUE(setting_->Until([&] { return peer_->engine->received.size() == 17 || peer_->closed; }));
  EXPECT_FALSE(peer_->closed.has_value());
  EXPECT_EQ(service_.handled, 16u);
}

TEST_F(CcpTest, SizesThatCannotBeAreReadAsTheNearestThatCan) {
  StartServer(Serving(2048, 4096));
  for (const auto& [calls, granted] : {std::pair(0u, 1024u), std::pair(1u, 1024u), std::pair(UINT32_MAX, 4096u)}) {
    ConnectPeer();
    EXPECT_EQ(ResultsOf(Ask(ConfRdma(1, {calls, calls, UINT32_MAX})), 1, 0), (std::vector<uint32_t>{granted, 0, 1}));
    // A reply of 1000 bytes goes inline whatever was said.
    auto call = CallOf(2, kProgram, 3, kWords, {200});
    const auto words = std::vector<std::byte>(800);
    call.insert(call.end(), words.begin(), words.end());
    EXPECT_EQ(ResultsOf(Ask(call), 2, 0).size(), 201u);
  }
}

// [5666:6.2#5] [2004:6.1#6]
TEST_F(CcpTest, AClientThatIsNotToBeReadFromIsNot) {
  StartServer(Serving(4096));
  ConnectPeer();
  EXPECT_EQ(ResultsOf(Ask(ConfRdma(1, {4096, 4096, 0})), 1, 0), (std::vector<uint32_t>{4096, 0, 0}));
  // A Read chunk all the same, which need not point anywhere.
  auto call = Words({2, 1, 1, 0, 1, 44, 0xdeadbe00, 1000, 0, 0x1000, 0, 0, 0});
  const auto message = Words({2, 0, 2, kProgram, 3, kSize, 0, 0, 0, 0, 1000});
  call.insert(call.end(), message.begin(), message.end());
  const std::vector<uint32_t> answer = Ask(call);
  ASSERT_GE(answer.size(), 5u);
  EXPECT_EQ(answer[3], 4u) << "RDMA_ERROR";
  EXPECT_EQ(answer[4], 2u) << "ERR_CHUNK";
  EXPECT_FALSE(peer_->closed.has_value()) << "an RDMA Read would have ended the connection";
  EXPECT_EQ(service_.handled, 0u);
  EXPECT_TRUE(ResultsOf(Ask(CallOf(3, kProgram, 3, kNull, {})), 3, 0).empty());
}

// [5666:6.2#4] [2004:6.1#4] [2004:6.1#5]
TEST_F(CcpTest, NoMoreReadsAreInFlightThanTheClientAllows) {
  StartServer(Serving(4096));
  ConnectPeer();
  EXPECT_EQ(ResultsOf(Ask(ConfRdma(1, {4096, 4096, 1})), 1, 0).size(), 3u);
  auto data = Pattern(40000);
  const auto exposed = peer_->connection().Register(data, rpcrdma::MemoryUse::kReadByPeer, nullptr);
  ASSERT_TRUE(exposed.has_value());
  std::vector<std::byte> call = Words({2, 1, 1, 0});
  for (uint32_t i = 0; i < 10; ++i) {
    const uint64_t offset = exposed->offset + i * 4000;
    const auto entry =
        Words({1, 44, exposed->handle, 4000, static_cast<uint32_t>(offset >> 32), static_cast<uint32_t>(offset)});
    call.insert(call.end(), entry.begin(), entry.end());
  }
  const auto rest = Words({0, 0, 0, 2, 0, 2, kProgram, 3, kSize, 0, 0, 0, 0, 40000});
  call.insert(call.end(), rest.begin(), rest.end());
  EXPECT_EQ(ResultsOf(Ask(call), 2, 0), (std::vector<uint32_t>{40000}));
  EXPECT_EQ(server_->stats().connections.reads, 10u);
  EXPECT_EQ(Told(trace_, "read.issued"), 10u);
  for (const std::string& line : trace_.lines()) {
    if (line.find(" read.issued ") == std::string::npos) continue;
    EXPECT_NE(line.find("in_flight=1 reads_max=1"), std::string::npos) << line;
  }
}

TEST_F(CcpTest, OtherProceduresVersionsAndArgumentsAreAnsweredAsRpcSays) {
  StartServer(Serving(4096));
  ConnectPeer();
  EXPECT_TRUE(ResultsOf(Ask(CallOf(1, kCcpProgram, 1, 0, {})), 1, 0).empty());
  EXPECT_TRUE(ResultsOf(Ask(CallOf(2, kCcpProgram, 1, 2, {})), 2, 3).empty());  // PROC_UNAVAIL
  EXPECT_EQ(ResultsOf(Ask(CallOf(3, kCcpProgram, 2, 1, {1, 2, 3})), 3, 2), (std::vector<uint32_t>{1, 1}));  // MISMATCH
  EXPECT_TRUE(ResultsOf(Ask(ConfRdma(4, {4096, 4096})), 4, 4).empty());                                     // GARBAGE
  EXPECT_TRUE(ResultsOf(Ask(ConfRdma(5, {4096, 4096, 16, 0})), 5, 4).empty());
  // None of these was one.
  EXPECT_EQ(ResultsOf(Ask(ConfRdma(6, {4096, 4096, 16})), 6, 0).size(), 3u);
}

// What is denied counts when it would have configured something.
TEST_F(CcpTest, OnlyCallsOfConfRdmaAreCountedAsRefused) {
  ServerOptions options = Serving(4096);
  options.ccp.flavors = {AuthFlavor::kSys};
  options.versions = rpcrdma::kVersions1And2;
  StartServer(options);
  ConnectPeer();
  const auto denied = [](const std::vector<uint32_t>& answer) {
    return answer.size() > 9 && answer[8] == 1 && answer[9] == 1;  // REPLY, MSG_DENIED
  };
  // NULL, by a flavor that nobody takes.
  EXPECT_TRUE(denied(Ask(Words({1, 1, 1, 0, 0, 0, 0, 1, 0, 2, kCcpProgram, 1, 0, 99, 0, 0, 0}))));
  EXPECT_TRUE(denied(Ask(CallOf(2, kCcpProgram, 1, 2, {}))));
  EXPECT_TRUE(denied(Ask(CallOf(3, kCcpProgram, 2, kConfRdma, {1, 2, 3}))));
  EXPECT_EQ(server_->stats().connections.not_configured, 0u);
  EXPECT_TRUE(denied(Ask(ConfRdma(4, {4096, 4096, 16}))));
  EXPECT_EQ(server_->stats().connections.not_configured, 1u);
  // Version 2 has properties for that.
  Connect({.versions = rpcrdma::kVersion2Alone});
  std::optional<Outcome> outcome;
  client_->Call(
      {kCcpProgram, 1, kConfRdma},
      [](XdrWriter& args) {
        for (const uint32_t word : {4096u, 4096u, 16u}) args.U32(word);
      },
      {}, [&](Outcome result) { outcome.emplace(std::move(result)); });
  ASSERT_TRUE(setting_->Until([&] { return outcome.has_value(); }));
  EXPECT_FALSE(outcome->has_value());
  EXPECT_EQ(server_->stats().connections.not_configured, 1u);
  EXPECT_EQ(Told(trace_, "connection.not_configured"), 1u);
}

TEST_F(CcpTest, AConnectionIsConfiguredOnce) {
  StartServer(Serving(1024, 8192));
  ConnectPeer();
  EXPECT_EQ(ResultsOf(Ask(ConfRdma(1, {2048, 2048, 1})), 1, 0), (std::vector<uint32_t>{2048, 0, 1}));
  const uint64_t bytes = server_->holdings().buffer_bytes;
  for (uint32_t xid = 2; xid < 100; ++xid) {
    EXPECT_TRUE(ResultsOf(Ask(ConfRdma(xid, {8192, 8192, 16})), xid, 5).empty()) << "SYSTEM_ERR";
  }
  EXPECT_EQ(server_->holdings().buffer_bytes, bytes);
  EXPECT_EQ(server_->stats().connections.configured, 1u);
  EXPECT_EQ(server_->stats().connections.not_configured, 98u);
}

// A client may have called something before: then its Receives are with the device, and stay.
TEST_F(CcpTest, BehindOtherCallsBuffersStayAsTheyAre) {
  StartServer(Serving(2048, 8192));
  ConnectPeer();
  EXPECT_TRUE(ResultsOf(Ask(CallOf(1, kProgram, 3, kNull, {})), 1, 0).empty());
  EXPECT_EQ(ResultsOf(Ask(ConfRdma(2, {8192, 1024, 16})), 2, 0), (std::vector<uint32_t>{2048, 0, 1}));
  // The smaller size for replies holds all the same: this one does not fit it, and has no chunk.
  const auto answer = Ask(CallOf(3, kProgram, 3, kSource, {1200}));
  ASSERT_GE(answer.size(), 5u);
  EXPECT_EQ(answer[3], 4u) << "RDMA_ERROR";
}

TEST_F(CcpTest, WhileOtherCallsAreInProgressNothingIsConfigured) {
  StartServer(Serving(2048, 8192));
  ConnectPeer();
  // The first brings the grant.
  EXPECT_TRUE(ResultsOf(Ask(CallOf(1, kProgram, 3, kNull, {})), 1, 0).empty());
  peer_->Send(CallOf(2, kProgram, 3, kHold, {2}));
  ASSERT_TRUE(setting_->Until([&] { return service_.held.size() == 1; }));
  EXPECT_TRUE(ResultsOf(Ask(ConfRdma(3, {8192, 8192, 0})), 3, 5).empty()) << "SYSTEM_ERR";
  service_.Answer(2);
  ASSERT_TRUE(setting_->Until([&] { return peer_->engine->received.size() == 3; }));
  EXPECT_EQ(ResultsOf(Ask(ConfRdma(4, {2048, 2048, 16})), 4, 0).size(), 3u);
}

// More than the one that any document allows before the first reply.
TEST_F(CcpTest, CallsThatDoNotWaitForTheAnswerHarmTheirConnectionOnly) {
  StartServer(Serving(1024, 8192));
  ConnectPeer();
  for (uint32_t xid = 1; xid <= 20; ++xid) peer_->Send(ConfRdma(xid, {8192, 8192, 16}));
  // Where they wait at the peer until there are Receives, they are calls like others.
  ASSERT_TRUE(setting_->Until([&] { return peer_->closed || peer_->engine->received.size() == 20; }));
  EXPECT_TRUE(!peer_->closed || Transport().send_without_receive_ends_the_connection) << Transport().why;
  EXPECT_LE(server_->stats().connections.configured, 1u);
  peer_.reset();
  ASSERT_TRUE(setting_->Until([&] { return service_.clients == 0; }));
  ExpectServerStillServes();
}

TEST_F(CcpTest, AClientThatTakesLessThanItSaidHarmsItsConnectionOnly) {
  StartServer(Serving(1024, 65536));
  ConnectPeer({.send_size = 4096, .receive_size = 1024, .name = "raw"});
  EXPECT_EQ(ResultsOf(Ask(ConfRdma(1, {1024, 65536, 16})), 1, 0).size(), 3u);
  peer_->Send(CallOf(2, kProgram, 3, kSource, {60000}));
  ASSERT_TRUE(setting_->Until([&] { return peer_->closed.has_value(); }));
  ASSERT_TRUE(setting_->Until([&] { return service_.clients == 0; }));
  ExpectServerStillServes();
}

TEST_F(CcpTest, AClientThatSendsMoreThanItWasGrantedHarmsItsConnectionOnly) {
  StartServer(Serving(8192));
  ConnectPeer({.send_size = 8192, .receive_size = 4096, .name = "raw"});
  EXPECT_EQ(ResultsOf(Ask(ConfRdma(1, {1024, 4096, 16})), 1, 0).at(0), 1024u);
  auto call = CallOf(2, kProgram, 3, kSize, {8000});
  call.resize(call.size() + 8000);
  peer_->Send(call);
  ASSERT_TRUE(setting_->Until([&] { return peer_->closed.has_value(); }));
  ASSERT_TRUE(setting_->Until([&] { return service_.clients == 0; }));
  EXPECT_EQ(service_.handled, 0u);
  ExpectServerStillServes();
}

TEST_F(CcpTest, AClientThatLeavesAtAnyPointLeavesNothing) {
  StartServer(Serving(1024, 65536));
  for (const Duration wait : {0us, 5us, 10us, 20us, 30us, 50us, 100us, 1000us}) {
    ConnectPeer();
    peer_->Send(ConfRdma(1, {65536, 65536, 16}));
    setting_->For(wait);
    peer_.reset();
    ASSERT_TRUE(setting_->Until([&] { return server_->holdings().buffer_bytes == 0; })) << wait.count();
  }
  ExpectServerStillServes();
}

// --- A client and servers of all kinds ---

// [5666:6.1#1] Whatever it says, calls go on.
TEST_F(CcpTest, AnswersThatAreNoneLeaveTheDefaults) {
  const struct {
    const char* what;
    std::function<std::vector<std::byte>(uint32_t)> answer;
  } kAnswers[] = {
      {"PROG_UNAVAIL",
       [](uint32_t xid) {
         return Words({xid, 1, 8, 0, 0, 0, 0, xid, 1, 0, 0, 0, 1});
       }},
      {"PROG_MISMATCH",
       [](uint32_t xid) {
         return Words({xid, 1, 8, 0, 0, 0, 0, xid, 1, 0, 0, 0, 2, 2, 3});
       }},
      {"PROC_UNAVAIL",
       [](uint32_t xid) {
         return Words({xid, 1, 8, 0, 0, 0, 0, xid, 1, 0, 0, 0, 3});
       }},
      {"GARBAGE_ARGS",
       [](uint32_t xid) {
         return Words({xid, 1, 8, 0, 0, 0, 0, xid, 1, 0, 0, 0, 4});
       }},
      {"SYSTEM_ERR",
       [](uint32_t xid) {
         return Words({xid, 1, 8, 0, 0, 0, 0, xid, 1, 0, 0, 0, 5});
       }},
      {"AUTH_TOOWEAK",
       [](uint32_t xid) {
         return Words({xid, 1, 8, 0, 0, 0, 0, xid, 1, 1, 1, 5});
       }},
      {"RPC_MISMATCH",
       [](uint32_t xid) {
         return Words({xid, 1, 8, 0, 0, 0, 0, xid, 1, 1, 0, 3, 3});
       }},
      {"two words",
       [](uint32_t xid) {
         return Words({xid, 1, 8, 0, 0, 0, 0, xid, 1, 0, 0, 0, 0, 8192, 0});
       }},
      {"four words",
       [](uint32_t xid) {
         return Words({xid, 1, 8, 0, 0, 0, 0, xid, 1, 0, 0, 0, 0, 8192, 0, 16, 0});
       }},
      {"no RPC reply",
       [](uint32_t xid) {
         return Words({xid, 1, 8, 0, 0, 0, 0, xid, 1, 7});
       }},
      {"no RPC message",
       [](uint32_t xid) {
         return Words({xid, 1, 8, 0, 0, 0, 0});
       }},
      {"another XID",
       [](uint32_t xid) {
         return Words({xid, 1, 8, 0, 0, 0, 0, xid + 1, 1, 0, 0, 0, 0, 8192, 0, 16});
       }},
      {"a Reply chunk",
       [](uint32_t xid) {
         return Words({xid, 1, 8, 1, 0, 0, 1, 1, 7, 100, 0, 0});
       }},
      {"ERR_CHUNK",
       [](uint32_t xid) {
         return Words({xid, 1, 8, 4, 2});
       }},
      {"ERR_VERS",
       [](uint32_t xid) {
         return Words({xid, 1, 8, 4, 1, 1, 1});
       }},
      {"no header",
       [](uint32_t xid) {
         return Words({xid, 1, 8, 9});
       }},
  };
  for (const auto& [what, answer] : kAnswers) {
    SCOPED_TRACE(what);
    const uint16_t port = StartServerThatSays(answer);
    const auto connected = TryConnect(Asking(8192, 8192), port);
    ASSERT_TRUE(connected.has_value()) << connected.error().ToString();
    EXPECT_FALSE(configuration().applied);
    EXPECT_FALSE(configuration().why_not.empty());
    EXPECT_EQ(configuration().inline_send, 1024u);
    EXPECT_EQ(configuration().inline_receive, 1024u);
    EXPECT_EQ(client_->stats().not_configured, 1u);
    ExpectNullCallsWork();
    client_.reset();
    peer_.reset();
  }
}

TEST_F(CcpTest, NumbersThatCannotBeAreReadAsTheNearestThatCan) {
  const struct {
    uint32_t calls, align, reads;
    uint32_t inline_send, usable_align;
    bool read_chunks;
  } kRows[] = {
      {2048, 0, 16, 2048, 0, true},       {0, 0, 1, 1024, 0, true},
      {1, 4, UINT32_MAX, 1024, 4, true},  {UINT32_MAX, UINT32_MAX, 0, 8192, 0, false},
      {4096, 4096, 0, 4096, 4096, false},
  };
  for (const auto& row : kRows) {
    SCOPED_TRACE(row.calls);
    const uint16_t port =
        StartServerThatSays([&](uint32_t xid) { return Granting(xid, row.calls, row.align, row.reads); });
    ASSERT_TRUE(TryConnect(Asking(8192, 2048), port).has_value());
    EXPECT_TRUE(configuration().applied);
    EXPECT_EQ(configuration().inline_send, row.inline_send);
    EXPECT_EQ(configuration().inline_receive, 2048u) << "what it was told, and no private data says otherwise";
    EXPECT_EQ(configuration().align, row.usable_align);
    EXPECT_EQ(configuration().read_chunks, row.read_chunks);
    ExpectNullCallsWork();
    client_.reset();
    peer_.reset();
  }
}

// [5666:6.1#2] [2004:6.1#1] Nothing else before the reply is in, and nothing of more than 1 KiB.
TEST_F(CcpTest, TheFirstMessageIsSmallAndAlone) {
  bool asked = false;
  const uint16_t port = StartLyingServer(
      [&](RawPeer& peer, uint32_t xid, uint32_t program) {
        if (!std::exchange(asked, true)) {
          EXPECT_EQ(program, kCcpProgram);
          EXPECT_LE(peer.engine->received.back().size(), 1024u);
          return;
        }
        peer.Send(Words({xid, 1, 8, 0, 0, 0, 0, xid, 1, 0, 0, 0, 0}));
      },
      {.receive_size = 1024, .name = "raw"});
  setting_->ActAsClient();
  ClientOptions options = Asking(65536, 65536);
  options.ccp.credentials.flavor = 77;
  options.ccp.credentials.body.append(std::vector<std::byte>(rpcrdma::kAuthBodyMax));
  client_.emplace(setting_->loop(), options);
  bool connected = false;
  client_->Connect(setting_->server_host(), port, [&](auto result) { connected = result.has_value(); });
  ASSERT_TRUE(setting_->Until([&] { return asked; }));
  // Whoever does not wait to be told is told.
  std::optional<Outcome> early;
  client_->Call(
      Id(kNull), [](XdrWriter&) {}, {}, [&](Outcome outcome) { early.emplace(std::move(outcome)); });
  ASSERT_TRUE(setting_->Until([&] { return early.has_value(); }));
  ASSERT_FALSE(early->has_value());
  EXPECT_EQ(early->error().kind, CallError::Kind::kNotConnected);
  setting_->For(1ms);
  EXPECT_FALSE(connected);
  EXPECT_EQ(peer_->engine->received.size(), 1u);
  const uint32_t xid = WordsOf(peer_->engine->received[0])[0];
  setting_->ActAsServer();
  peer_->Send(Granting(xid, 65536, 0, 16));
  ASSERT_TRUE(setting_->Until([&] { return connected; }));
  setting_->ActAsClient();
  ExpectNullCallsWork();
}

TEST_F(CcpTest, AServerThatDoesNotAnswerHasNotBeenConnectedTo) {
  const uint16_t port = StartLyingServer([](RawPeer&, uint32_t, uint32_t) {});
  ClientOptions options = Asking(4096, 4096);
  options.connect_timeout = 300ms;
  const Instant start = setting_->loop().Now();
  const auto connected = TryConnect(options, port);
  ASSERT_FALSE(connected.has_value());
  EXPECT_EQ(connected.error().kind, CallError::Kind::kUnreachable);
  EXPECT_NE(connected.error().message.find("before the server had answered CONF_RDMA"), std::string::npos)
      << connected.error().message;
  EXPECT_GE(setting_->loop().Now() - start, 300ms);
  EXPECT_FALSE(client_->connected());
  EXPECT_FALSE(client_->configuration().has_value());
}

TEST_F(CcpTest, AServerThatHangsUpInsteadIsToldOfOnce) {
  const uint16_t port =
      StartLyingServer([](RawPeer& peer, uint32_t, uint32_t) { peer.engine->Give(rpcrdma::Disconnect{}); });
  setting_->ActAsClient();
  client_.emplace(setting_->loop(), Asking(4096, 4096));
  int failures = 0, losses = 0;
  client_->OnConnectionLost([&](const CallError&) { ++losses; });
  client_->Connect(setting_->server_host(), port, [&](const auto& result) { failures += result ? 0 : 1; });
  ASSERT_TRUE(setting_->Until([&] { return failures > 0; }));
  setting_->For(10ms);
  EXPECT_EQ(failures, 1);
  EXPECT_EQ(losses, 0) << "there was no connection yet";
}

TEST_F(CcpTest, AClientMayGiveUpWhileItWaitsForTheAnswer) {
  for (int how = 0; how < 3; ++how) {
    SCOPED_TRACE(how);
    bool asked = false;
    const uint16_t port = StartLyingServer([&](RawPeer&, uint32_t, uint32_t) { asked = true; });
    setting_->ActAsClient();
    client_.emplace(setting_->loop(), Asking(4096, 4096));
    std::optional<CallError> error;
    client_->Connect(setting_->server_host(), port, [&](const Result<void, CallError>& result) {
      ASSERT_FALSE(result.has_value());
      error = result.error();
    });
    ASSERT_TRUE(setting_->Until([&] { return asked; }));
    bool closed = false;
    switch (how) {
      case 0:
        client_->CancelConnect();
        break;
      case 1:
        client_->Close([&] { closed = true; });
        break;
      default:
        client_.reset();
        break;
    }
    ASSERT_TRUE(setting_->Until([&] { return error.has_value() && (how != 1 || closed); }));
    EXPECT_EQ(error->kind, how == 0 ? CallError::Kind::kCancelled : CallError::Kind::kClosed);
    client_.reset();
    peer_.reset();
    setting_->For(1ms);
  }
}

// The program is one of servers.
TEST_F(CcpTest, AClientIsNotConfiguredByItsServer) {
  TestService callbacks;
  for (const bool serves : {false, true}) {
    SCOPED_TRACE(serves);
    std::vector<uint32_t> answer;
    const uint16_t port = StartLyingServer([&](RawPeer& peer, uint32_t xid, uint32_t program) {
      const auto words = WordsOf(peer.engine->received.back());
      if (words.size() > 8 && words[8] == 1) {
        answer = words;
        return;
      }
      peer.Send(program == kCcpProgram ? Granting(xid, 8192, 0, 16)
                                       : Words({xid, 1, 8, 0, 0, 0, 0, xid, 1, 0, 0, 0, 0}));
    });
    ClientOptions options = Asking(4096, 4096);
    if (serves) options.reverse_services = {&callbacks};
    ASSERT_TRUE(TryConnect(options, port).has_value());
    setting_->ActAsServer();
    peer_->Send(ConfRdma(77, {1024, 1024, 0}));
    setting_->ActAsClient();
    if (serves) {
      ASSERT_TRUE(setting_->Until([&] { return !answer.empty(); }));
      EXPECT_TRUE(ResultsOf(answer, 77, 1).empty()) << "PROG_UNAVAIL";
    } else {
      ASSERT_TRUE(setting_->Until([&] { return client_->stats().ignored == 1; }));
      EXPECT_TRUE(answer.empty()) << "it serves nothing, and says nothing";
    }
    EXPECT_EQ(configuration().inline_send, 4096u);
    ExpectNullCallsWork();
    client_.reset();
    peer_.reset();
  }
}

}  // namespace
}  // namespace stagecoach::e2e
