// Options and their ranges, and where a program hears of one that is out of its.
#include "rpcrdma/api/options.h"

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/asio_loop/asio_loop.h"
#include "rpcrdma/wire/v2_numbers.h"

namespace stagecoach::rpcrdma {
namespace {

using internal::FaultOf;

constexpr uint64_t kTebibyte = uint64_t{1} << 40;

class NoService final : public Service {
 public:
  uint32_t program() const override { return 0x20000099; }
  VersionRange versions() const override { return {1, 1}; }
  void Handle(Request) override {}
};

// `low` and `high` are allowed, what is beyond them is not, and the fault says so in `range`'s words.
template <typename Options, typename T>
void ExpectRange(T& option, const Options& options, const std::string& name, uint64_t low, uint64_t high,
                 const std::string& range) {
  SCOPED_TRACE(name);
  const T usual = option;
  EXPECT_EQ(FaultOf(options), std::nullopt);
  for (const uint64_t allowed : {low, high}) {
    option = static_cast<T>(allowed);
    EXPECT_EQ(FaultOf(options), std::nullopt);
  }
  if (low > 0) {
    option = static_cast<T>(low - 1);
    EXPECT_EQ(FaultOf(options), name + " is " + std::to_string(low - 1) + ", and must be " + range);
  }
  if (high < std::numeric_limits<T>::max()) {
    option = static_cast<T>(high + 1);
    EXPECT_EQ(FaultOf(options), name + " is " + std::to_string(high + 1) + ", and must be " + range);
  }
  option = usual;
}

TEST(Options, ThoseOfAClientHaveRanges) {
  ClientOptions o;
  ExpectRange(o.credits, o, "ClientOptions::credits", 1, 1024, "from 1 to 1024");
  ExpectRange(o.inline_threshold, o, "ClientOptions::inline_threshold", 1024, 262144, "from 1024 to 262144");
  ExpectRange(o.queued_calls_max, o, "ClientOptions::queued_calls_max", 1, UINT32_MAX, "at least 1");
  ExpectRange(o.message_bytes_max, o, "ClientOptions::message_bytes_max", 1024, UINT32_MAX, "at least 1024");
  // [traps:interop#18]
  ExpectRange(o.incoming_reads, o, "ClientOptions::incoming_reads", 1, UINT8_MAX, "at least 1");
  for (uint32_t* size : {&o.inline_send_max, &o.inline_receive_max}) {
    *size = 1024;
    ExpectRange(*size, o,
                size == &o.inline_send_max ? "ClientOptions::inline_send_max" : "ClientOptions::inline_receive_max",
                1024, 262144, "from 1024 to 262144");
    *size = 0;
    EXPECT_EQ(FaultOf(o), std::nullopt) << "that of both directions is meant";
  }
  ExpectRange(o.padding_align, o, "ClientOptions::padding_align", 0, 65536, "from 0 to 65536");
  for (const uint32_t align : {2u, 3u, 6u, 4098u}) {
    o.padding_align = align;
    EXPECT_EQ(FaultOf(o), "ClientOptions::padding_align is " + std::to_string(align) +
                              ", and must be 0, 1 or a multiple of 4: XDR begins no item elsewhere");
  }
  for (const uint32_t align : {1u, 4u, 12u, 0u}) {
    o.padding_align = align;
    EXPECT_EQ(FaultOf(o), std::nullopt);
  }
  ExpectRange(o.read_bytes_max, o, "ClientOptions::read_bytes_max", 0, kTebibyte, "from 0 to 1099511627776");
  o.ccp.credentials.body.append(std::vector<std::byte>(kAuthBodyMax));
  EXPECT_EQ(FaultOf(o), std::nullopt);
  o.ccp.credentials.body.push_back({});
  EXPECT_EQ(FaultOf(o), "ClientOptions::ccp.credentials.body.size() is 401, and must be from 0 to 400");
  o.ccp.credentials.body.clear();
  // Reverse credits matter to those who serve.
  o.reverse_credits = 0;
  EXPECT_EQ(FaultOf(o), std::nullopt);
  NoService service;
  o.reverse_services = {&service};
  o.reverse_credits = 1;
  ExpectRange(o.reverse_credits, o, "ClientOptions::reverse_credits", 1, 1024, "from 1 to 1024");
  o.profile = kRfc5666;
  EXPECT_EQ(
      FaultOf(o),
      "ClientOptions::reverse_services.size() is 1, and must be 0 with the profile rfc5666: no server by it calls its "
      "clients");
}

// [v2:7.1+2] [v2:9.2+1] [v2:5.3.4+6]
TEST(Options, Version2AsksForRoom) {
  ClientOptions o;
  ExpectRange(o.versions.high, o, "ClientOptions::versions.high", 1, 2, "from 1 to 2");
  o.versions.low = 0;
  EXPECT_EQ(FaultOf(o), "ClientOptions::versions.low is 0, and must be from 1 to 2");
  o.versions = {2, 1};
  EXPECT_EQ(FaultOf(o), "ClientOptions::versions.high is 1, and must be from 2 to 2");
  o.versions = kVersions1And2;
  EXPECT_EQ(FaultOf(o), std::nullopt);

  const std::string least = ", and must be at least 4096 with version 2 of RPC-over-RDMA";
  o.inline_threshold = 3072;
  EXPECT_EQ(FaultOf(o), "ClientOptions::inline_threshold is 3072" + least);
  o.inline_send_max = 4096;
  EXPECT_EQ(FaultOf(o), "ClientOptions::inline_threshold is 3072" + least) << "still that of one direction";
  o.inline_receive_max = 2048;
  EXPECT_EQ(FaultOf(o), "ClientOptions::inline_receive_max is 2048" + least);
  o.inline_receive_max = 8192;
  EXPECT_EQ(FaultOf(o), std::nullopt) << "both directions have their own";
  o.inline_send_max = 1024;
  EXPECT_EQ(FaultOf(o), "ClientOptions::inline_send_max is 1024" + least);
  o.versions = kVersion1Alone;
  EXPECT_EQ(FaultOf(o), std::nullopt);

  o = {};
  o.versions = kVersions1And2;
  o.profile = kDraft2004;
  EXPECT_EQ(FaultOf(o), std::nullopt) << "version 1 by any document";
  o.profile = kRfc5666bis;
  o.versions = kVersion2Alone;
  for (Duration* wait : {&o.probe_wait, &o.exchange_wait}) {
    const std::string name = wait == &o.probe_wait ? "probe_wait" : "exchange_wait";
    const Duration usual = *wait;
    *wait = 0ms;
    EXPECT_EQ(FaultOf(o), "ClientOptions::" + name + " is 0 ms, and must be from 1 ms to 86400000 ms");
    *wait = usual;
  }
  ExpectRange(o.grown_bytes_max, o, "ClientOptions::grown_bytes_max", 0, kTebibyte, "from 0 to 1099511627776");

  // Properties are those of extensions, and go into one short message.
  static constexpr PropertyRow kProperties[] = {
      {.id = kExperimentalNumbers, .name = "clock", .valid = [](ConstBytes data) { return data.size() % 8 == 0; }}};
  static constexpr Feature kFeature{.name = "clocks", .properties = kProperties};
  const auto extensions = std::make_shared<Extensions>();
  ASSERT_EQ(extensions->Add(kFeature), std::nullopt);
  const auto expect_refused = [&](const std::string& why) {
    EXPECT_EQ(FaultOf(o).value_or(""),
              "ClientOptions::properties is refused (" + why +
                  "), and must be well-formed, of ClientOptions::extensions, each there once, and short");
  };
  o.properties = {{kExperimentalNumbers, std::vector<std::byte>(8)}};
  expect_refused("property 2147483648 is none of an extension's");
  o.extensions = extensions;
  EXPECT_EQ(FaultOf(o), std::nullopt);
  o.properties[0].data.resize(7);
  EXPECT_NE(FaultOf(o), std::nullopt);
  o.properties[0].data.resize(968);
  EXPECT_EQ(FaultOf(o), std::nullopt);
  o.properties[0].data.resize(976);
  expect_refused("RDMA2_CONNPROP would take 1032 bytes of 1024");
  o.properties[0].data.resize(8);
  o.properties.push_back(o.properties[0]);
  EXPECT_NE(FaultOf(o), std::nullopt) << "twice";
  o.properties = {{kRdma2PropidRbsiz, {}}};
  expect_refused("property 1 is none of an extension's");
}

TEST(Options, ThoseOfAServerHaveRanges) {
  ServerOptions o;
  ExpectRange(o.credits, o, "ServerOptions::credits", 1, 1024, "from 1 to 1024");
  ExpectRange(o.shared_receives, o, "ServerOptions::shared_receives", 0, 65536, "from 0 to 65536");
  ExpectRange(o.inline_threshold, o, "ServerOptions::inline_threshold", 1024, 262144, "from 1024 to 262144");
  ExpectRange(o.address_requests_max, o, "ServerOptions::address_requests_max", 1, UINT32_MAX, "at least 1");
  ExpectRange(o.client_bytes_max, o, "ServerOptions::client_bytes_max", 0, kTebibyte, "from 0 to 1099511627776");
  ExpectRange(o.bytes_max, o, "ServerOptions::bytes_max", 0, kTebibyte, "from 0 to 1099511627776");
  ExpectRange(o.call_bytes_max, o, "ServerOptions::call_bytes_max", 0, kTebibyte, "from 0 to 1099511627776");
  ExpectRange(o.chunk_limits.read_segments_max, o, "ServerOptions::chunk_limits.read_segments_max", 0, 16384,
              "from 0 to 16384");
  ExpectRange(o.chunk_limits.write_chunks_max, o, "ServerOptions::chunk_limits.write_chunks_max", 0, 16384,
              "from 0 to 16384");
  ExpectRange(o.chunk_limits.segments_per_chunk_max, o, "ServerOptions::chunk_limits.segments_per_chunk_max", 0, 16384,
              "from 0 to 16384");
  ExpectRange(o.chunk_limits.write_segments_max, o, "ServerOptions::chunk_limits.write_segments_max", 0, 16384,
              "from 0 to 16384");
  ExpectRange(o.message_bytes_max, o, "ServerOptions::message_bytes_max", 1024, UINT32_MAX, "at least 1024");
  for (uint32_t* size : {&o.ccp.inline_send_max, &o.ccp.inline_receive_max}) {
    *size = 1024;
    ExpectRange(
        *size, o,
        size == &o.ccp.inline_send_max ? "ServerOptions::ccp.inline_send_max" : "ServerOptions::ccp.inline_receive_max",
        1024, 262144, "from 1024 to 262144");
    *size = 0;
    EXPECT_EQ(FaultOf(o), std::nullopt) << "no more than without";
  }
  o.ccp.flavors = {};
  EXPECT_EQ(FaultOf(o), std::nullopt) << "nobody's will do";
  o.ccp.flavors = {AuthFlavor::kSys, AuthFlavor::kRpcsecGss};
  EXPECT_EQ(FaultOf(o),
            "ServerOptions::ccp.flavors is with flavor 6, and must be of AUTH_NONE (0) and AUTH_SYS (1) alone");
  o.ccp.flavors = {AuthFlavor::kSys};
  ExpectRange(o.reverse_credits, o, "ServerOptions::reverse_credits", 0, 1024, "from 0 to 1024");
  ExpectRange(o.exposed_replies_max, o, "ServerOptions::exposed_replies_max", 0, 1024, "from 0 to 1024");
  ExpectRange(o.exposed_bytes_max, o, "ServerOptions::exposed_bytes_max", 0, kTebibyte, "from 0 to 1099511627776");
  o.receive_align = 96;
  EXPECT_EQ(FaultOf(o), "ServerOptions::receive_align is 96, and must be a power of two up to 65536");
  o.receive_align = 65536;
  EXPECT_EQ(FaultOf(o), std::nullopt);
  o.exposed_time = Duration::zero();
  EXPECT_EQ(FaultOf(o), "ServerOptions::exposed_time is 0 ms, and must be from 1 ms to 86400000 ms");
  o.exposed_time = 1ms;
  for (const Duration wrong :
       {Duration(-1), Duration(1), Duration(1ms) - Duration(1), Duration(std::chrono::hours(24)) + Duration(1)}) {
    o.data_time = wrong;
    EXPECT_NE(FaultOf(o).value_or("").find("ServerOptions::data_time is "), std::string::npos) << wrong.count();
  }
  for (const Duration right : {Duration::zero(), Duration(1ms), Duration(std::chrono::hours(24))}) {
    o.data_time = right;
    EXPECT_EQ(FaultOf(o), std::nullopt) << right.count();
  }
  ExpectRange(o.data_rate_min, o, "ServerOptions::data_rate_min", 0, kTebibyte, "from 0 to 1099511627776");
  o.profile = kDraft2004;
  EXPECT_EQ(FaultOf(o), std::nullopt);
  o.shared_receives = 64;
  EXPECT_EQ(
      FaultOf(o),
      "ServerOptions::shared_receives is 64, and must be 0 with the profile draft-2004: replies may stay in memory of "
      "the server, which whoever shares Receives could reach");
  o.shared_receives = 0;
  o.reverse_credits = 1;
  EXPECT_EQ(FaultOf(o),
            "ServerOptions::reverse_credits is 1, and must be 0 with the profile draft-2004: no server by it calls its "
            "clients");
}

TEST(Options, ThoseOfASessionHaveRanges) {
  SessionOptions o;
  ExpectRange(o.client.credits, o, "ClientOptions::credits", 1, 1024, "from 1 to 1024");
  ExpectRange(o.connections, o, "SessionOptions::connections", 1, 64, "from 1 to 64");
  ExpectRange(o.reconnect.transmissions_max, o, "SessionOptions::reconnect.transmissions_max", 1, UINT32_MAX,
              "at least 1");
  o.version_memory = -1ms;
  EXPECT_EQ(FaultOf(o), "SessionOptions::version_memory is -1 ms, and must be from 0 ms to 86400000 ms");
  o.version_memory = 0ms;
  EXPECT_EQ(FaultOf(o), std::nullopt);
  o.reconnect.delay_first = 500us;
  EXPECT_EQ(FaultOf(o), "SessionOptions::reconnect.delay_first is 0.5 ms, and must be from 1 ms to 86400000 ms");
  o.reconnect = {.delay_first = 50ms, .delay_max = 49ms};
  EXPECT_EQ(FaultOf(o), "SessionOptions::reconnect.delay_max is 49 ms, and must be from 50 ms to 86400000 ms");
  o.reconnect.delay_max = 50ms;
  EXPECT_EQ(FaultOf(o), std::nullopt);
  o.keepalive.timeout = Duration::zero();
  EXPECT_EQ(FaultOf(o), std::nullopt) << "there are no keepalives";
  o.keepalive.interval = 1s;
  EXPECT_EQ(FaultOf(o), "SessionOptions::keepalive.timeout is 0 ms, and must be from 1 ms to 86400000 ms");
}

class OptionsFaultTest : public ::testing::Test {
 protected:
  template <typename Outcome>
  CallError Await(std::optional<Outcome>& outcome) {
    EXPECT_FALSE(outcome.has_value()) << "the handler ran inside the call that started it";
    const Instant bound = loop_.Now() + 60s;
    while (!outcome && loop_.Now() < bound) loop_.RunOnce(100ms);
    if (!outcome || outcome->has_value()) {
      ADD_FAILURE() << "no error";
      return {};
    }
    EXPECT_EQ(outcome->error().kind, CallError::Kind::kOptions);
    return std::move(outcome->error());
  }

  AsioLoop loop_;
};

TEST_F(OptionsFaultTest, AClientDoesNotConnect) {
  std::optional<Result<void, CallError>> connected;
  {
    Client client(loop_, {.credits = 0});
    client.Connect("198.51.100.7", 20049, [&](Result<void, CallError> outcome) { connected = std::move(outcome); });
    EXPECT_FALSE(client.connected());
  }
  EXPECT_EQ(Await(connected).message,
            "connect to 198.51.100.7:20049: ClientOptions::credits is 0, and must be from 1 to 1024");
}

TEST_F(OptionsFaultTest, ASessionRefusesEveryCallAndNeverTriesToConnect) {
  Session session(loop_, "198.51.100.7", 20049, {.connections = 100});
  for (int i = 0; i < 2; ++i) {
    std::optional<Result<Reply, CallError>> called;
    session.Call(
        {1, 2, 3}, [](XdrWriter&) {}, {},
        [&](Result<Reply, CallError> outcome) { called.emplace(std::move(outcome)); });
    EXPECT_EQ(Await(called).message,
              "call of program 1 version 2 procedure 3 at 198.51.100.7:20049: SessionOptions::connections is 100, and "
              "must be from 1 to 64");
  }
  EXPECT_EQ(session.stats().attempts, 0u);
}

TEST_F(OptionsFaultTest, AServerDoesNotListen) {
  ServerOptions options;
  options.chunk_limits.read_segments_max = UINT32_MAX;
  Server server(loop_, options);
  const auto listening = server.Listen("127.0.0.1", 0);
  ASSERT_FALSE(listening.has_value());
  EXPECT_EQ(listening.error().kind, CallError::Kind::kOptions);
  EXPECT_EQ(listening.error().message,
            "listen on 127.0.0.1:0: ServerOptions::chunk_limits.read_segments_max is 4294967295, and must be from 0 to "
            "16384");
  EXPECT_EQ(server.port(), 0);
}

}  // namespace
}  // namespace stagecoach::rpcrdma
