// Transport properties of version 2 between our ends and peers of any habits. draft-cel-nfsv4-rpcrdma-version-two-09
// does not say that RDMA2_CONNPROP is answered, nor how an end marks the ones that it sends on its own
// (docs/decisions/0048). So each end works with a peer that announces itself first, that does so instead of answering,
// that answers answers, that says everything twice, and that says nothing; and with malformed properties it does what
// its kind of end does, whatever they are marked as. In whichever setting it is linked with.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "rpcrdma/api/client.h"
#include "rpcrdma/api/server.h"
#include "rpcrdma/core/responder.h"
#include "tests/e2e/outcome.h"
#include "tests/e2e/persona.h"
#include "tests/e2e/raw_peer.h"
#include "tests/e2e/setting.h"
#include "tests/e2e/test_service.h"

namespace stagecoach::e2e {
namespace {

using rpcrdma::CallError;
using rpcrdma::Client;
using rpcrdma::ClientOptions;
using rpcrdma::kFlagResponse;
using rpcrdma::kPropertiesAnswersMax;
using rpcrdma::kRdma2ConnProp;
using rpcrdma::kRdma2Error;
using rpcrdma::kRdma2Msg;
using rpcrdma::kRdma2PropidRbsiz;
using rpcrdma::PropertySet;
using rpcrdma::Server;
using rpcrdma::XdrWriter;

using Visitor = Persona::Visitor;

// Of the persona: what no default is.
constexpr uint32_t kReceiveSize = 8192;

PropertySet Own() {
  return {{kRdma2PropidRbsiz, Words({kReceiveSize})}};
}
// A set that claims one property and has none.
std::vector<std::byte> MalformedProperties(uint32_t xid, uint32_t flags) {
  return Words({xid, 2, 8, kRdma2ConnProp, flags, 1});
}
void Announce(Visitor& to, uint32_t flags = 0) {
  to.Send(Version2(0x50, flags, rpcrdma::ConnProp{Own()}));
}
bool IsProperties(const Message& message) {
  return message.version() == 2 && message.type() == kRdma2ConnProp;
}

// --- A client, and servers of any habits ---

class ClientPropertiesTest : public ::testing::Test {
 protected:
  ~ClientPropertiesTest() override {
    client_.reset();
    persona_.reset();
    setting_->For(1ms);
  }

  void Serve(Persona::Answer answer) {
    setting_->ActAsServer();
    persona_.emplace(setting_->loop(), setting_->server_host(), std::move(answer));
  }
  // Speaks version 2 alone, and would wait for properties for longer than a test may take.
  Result<void, CallError> TryConnect(Duration exchange_wait = 100s) {
    setting_->ActAsClient();
    client_.emplace(setting_->loop(), ClientOptions{.connect_timeout = 2 * exchange_wait,
                                                    .versions = rpcrdma::kVersion2Alone,
                                                    .exchange_wait = exchange_wait});
    client_->Register(kBindings[0]);
    std::optional<Result<void, CallError>> result;
    client_->Connect(setting_->server_host(), persona_->port(),
                     [&](Result<void, CallError> connected) { result.emplace(std::move(connected)); });
    EXPECT_TRUE(setting_->Until([&] { return result.has_value(); })) << "connecting hangs";
    if (!result) std::abort();  // the handler refers to this frame
    return *result;
  }
  void ExpectCallsWork() {
    for (int i = 0; i < 3; ++i) {
      const auto outcome = Call();
      ASSERT_TRUE(outcome.has_value()) << outcome.error().ToString();
    }
  }
  Outcome Call() {
    std::optional<Outcome> outcome;
    client_->Call(
        Id(kNull), [](XdrWriter&) {}, {}, [&](Outcome result) { outcome.emplace(std::move(result)); });
    EXPECT_TRUE(setting_->Until([&] { return outcome.has_value(); })) << "a call hangs";
    if (!outcome) std::abort();
    return std::move(*outcome);
  }
  // Connected, by the properties that the persona told first, over one connection that works.
  void ExpectConnectsByItsProperties() {
    const auto connected = TryConnect();
    ASSERT_TRUE(connected.has_value()) << connected.error().ToString();
    ASSERT_NE(client_->peer_properties(), nullptr);
    EXPECT_EQ(rpcrdma::ReadProperties(*client_->peer_properties())->receive_buffer_size, kReceiveSize);
    ExpectCallsWork();
    EXPECT_TRUE(client_->connected());
    EXPECT_EQ(persona_->visitors.size(), 1u);
  }
  Visitor& visitor() { return *persona_->visitors.at(0); }
  // How many RDMA2_CONNPROP with these flags the client sent.
  int Told(uint32_t flags) {
    return static_cast<int>(std::count_if(
        visitor().received.begin(), visitor().received.end(),
        [flags](const Message& message) { return IsProperties(message) && message.words.at(4) == flags; }));
  }

  std::unique_ptr<Setting> setting_ = MakeSettingOfThisTest();
  std::optional<Persona> persona_;
  std::optional<Client> client_;
};

// [v2:5.3.4+1] [v2:5.3.4+5]
TEST_F(ClientPropertiesTest, AServerThatAnnouncesItselfFirst) {
  for (const uint32_t flags : {0u, kFlagResponse}) {
    bool announced = false;
    Serve([&](Visitor& to, const Message& message) {
      if (!std::exchange(announced, true)) Announce(to, flags);
      if (!IsProperties(message)) ReplyIn2(to, message);
    });
    ExpectConnectsByItsProperties();
    EXPECT_EQ(Told(0), 1) << "it is told ours, too";
    EXPECT_EQ(Told(kFlagResponse), flags == 0 ? 1 : 0);
    client_.reset();
  }
}

TEST_F(ClientPropertiesTest, AServerThatAnnouncesItselfInsteadOfAnswering) {
  for (const uint32_t xid : {0u, 0x50u}) {
    Serve([xid](Visitor& to, const Message& message) {
      if (!IsProperties(message)) return ReplyIn2(to, message);
      if (message.words.at(4) == 0) to.Send(Version2(xid, 0, rpcrdma::ConnProp{Own()}));
    });
    ExpectConnectsByItsProperties();
    EXPECT_EQ(Told(kFlagResponse), 1);
    client_.reset();
  }
}

// A grant of one, which the server's first reply brings, is enough for the first call.
TEST_F(ClientPropertiesTest, AServerThatGrantsOneCreditAndAnnouncesItself) {
  Serve([](Visitor& to, const Message& message) {
    if (IsProperties(message)) {
      if (message.words.at(4) == 0) Announce(to);
      return;
    }
    std::vector<std::byte> reply = Version2(message.xid(), kFlagResponse, rpcrdma::RdmaMsg{}, RpcReply(message.xid()));
    ByteWriter(MutableBytes(reply).subspan(8, 4)).U32(1);
    to.Send(reply);
  });
  ExpectConnectsByItsProperties();
}

// Without end, but for the client's patience.
TEST_F(ClientPropertiesTest, AServerThatAnswersAnswers) {
  Serve([](Visitor& to, const Message& message) {
    if (!IsProperties(message)) return ReplyIn2(to, message);
    Announce(to);
  });
  ExpectConnectsByItsProperties();
  const int answers = static_cast<int>(kPropertiesAnswersMax);
  ASSERT_TRUE(setting_->Until([&] { return Told(kFlagResponse) == answers; }));
  // Whatever was on its way comes before the answer to this.
  ExpectCallsWork();
  EXPECT_EQ(Told(kFlagResponse), answers);
  EXPECT_EQ(Told(0), 1);
}

TEST_F(ClientPropertiesTest, AServerThatSaysEverythingTwice) {
  for (const uint32_t second : {0u, kFlagResponse}) {
    Serve([second](Visitor& to, const Message& message) {
      if (!IsProperties(message)) return ReplyIn2(to, message);
      if (message.words.at(4) != 0) return;
      to.Send(Version2(message.xid(), kFlagResponse, rpcrdma::ConnProp{Own()}));
      // Another set, which changes nothing. [v2:5.3.4+8]
      to.Send(Version2(message.xid(), second, rpcrdma::ConnProp{}));
    });
    ExpectConnectsByItsProperties();
    EXPECT_EQ(rpcrdma::ReadProperties(*client_->peer_properties())->receive_buffer_size, kReceiveSize)
        << "after replies that came behind the second";
    EXPECT_EQ(Told(kFlagResponse), second == 0 ? 1 : 0) << "which had come";
    client_.reset();
  }
}

TEST_F(ClientPropertiesTest, AServerThatSaysNothing) {
  Serve([](Visitor& to, const Message& message) {
    if (!IsProperties(message)) ReplyIn2(to, message);
  });
  const auto connected = TryConnect(50ms);
  ASSERT_TRUE(connected.has_value()) << connected.error().ToString();
  EXPECT_EQ(client_->peer_properties(), nullptr);
  ExpectCallsWork();
}

// Marked either way, before the first answer and instead of the server's own: the client tells no error, and connects
// to nobody. [v2:4.1#1] [v2:5.3.3#1]
TEST_F(ClientPropertiesTest, MalformedPropertiesWhileConnectingEndIt) {
  for (const uint32_t flags : {0u, kFlagResponse}) {
    for (const bool at_once : {true, false}) {
      SCOPED_TRACE(std::to_string(flags) + (at_once ? " at once" : " later"));
      Serve([flags, at_once](Visitor& to, const Message& message) {
        if (IsProperties(message) || at_once) return to.Send(MalformedProperties(0, flags));
        ReplyIn2(to, message);
      });
      const auto connected = TryConnect();
      ASSERT_FALSE(connected.has_value());
      EXPECT_NE(connected.error().message.find("properties"), std::string::npos) << connected.error().message;
      EXPECT_TRUE(setting_->Until([&] { return visitor().gone(); }));
      for (const Message& message : visitor().received) EXPECT_NE(message.type(), kRdma2Error);
      client_.reset();
    }
  }
}

// Unasked, on a connection that works.
TEST_F(ClientPropertiesTest, MalformedPropertiesEndAConnectionThatWorks) {
  for (const uint32_t flags : {0u, kFlagResponse}) {
    SCOPED_TRACE(flags);
    Serve([](Visitor& to, const Message& message) { AnswerAsVersion2(to, message, Own()); });
    ExpectConnectsByItsProperties();
    visitor().Send(MalformedProperties(0x51, flags));
    EXPECT_TRUE(setting_->Until([&] { return visitor().gone() && !client_->connected(); }));
    for (const Message& message : visitor().received) EXPECT_NE(message.type(), kRdma2Error);
    const auto outcome = Call();
    ASSERT_FALSE(outcome.has_value());
    client_.reset();
  }
}

// --- A server, and clients of any habits ---

// Of a server that calls its clients back, whose engines share a connection, and of one that does not.
class ServerPropertiesTest : public ::testing::TestWithParam<bool> {
 protected:
  ServerPropertiesTest() {
    setting_->ActAsServer();
    server_.emplace(setting_->loop(), rpcrdma::ServerOptions{.versions = rpcrdma::kVersions1And2,
                                                             .reverse_credits = GetParam() ? 8u : 0u});
    server_->Register(&service_);
    const auto listening = server_->Listen(setting_->server_host(), 0);
    EXPECT_TRUE(listening.has_value()) << listening.error().ToString();
    setting_->ActAsClient();
  }
  ~ServerPropertiesTest() override {
    peer_.reset();
    server_.reset();
    setting_->For(1ms);
  }

  void Connect() {
    peer_.emplace(setting_->loop(), RawPeer::Options{.incoming_reads = 4, .name = "raw"});
    peer_->Connect(setting_->server_host(), server_->port());
    ASSERT_TRUE(setting_->Until([&] { return peer_->established; }));
  }
  void Tell(uint32_t xid, uint32_t flags) {
    peer_->Send(Words({xid, 2, 8, kRdma2ConnProp, flags, 1, kRdma2PropidRbsiz, 4, kReceiveSize}));
  }
  // The words of the next message; empty when the connection ends before.
  std::vector<uint32_t> Next() {
    EXPECT_TRUE(setting_->Until([&] { return peer_->engine->received.size() > seen_ || peer_->closed.has_value(); }));
    if (peer_->engine->received.size() == seen_) return {};
    return WordsOf(peer_->engine->received[seen_++]);
  }
  // A call is served, and nothing else was on the way.
  void ExpectServes(uint32_t xid) {
    peer_->Send(Words({xid, 2, 8, kRdma2Msg, 0, 0, 0, 0, 0, xid, 0, 2, kProgram, 1, kNull, 0, 0, 0, 0}));
    const std::vector<uint32_t> reply = Next();
    ASSERT_GT(reply.size(), 4u);
    EXPECT_EQ(reply[0], xid);
    EXPECT_EQ(reply[3], kRdma2Msg);
    EXPECT_EQ(reply[4], kFlagResponse);
  }
  void ExpectProperties(uint32_t xid) {
    const std::vector<uint32_t> answer = Next();
    ASSERT_GT(answer.size(), 5u);
    EXPECT_EQ(answer[0], xid);
    EXPECT_EQ(answer[3], kRdma2ConnProp);
    EXPECT_EQ(answer[4], kFlagResponse);
  }

  std::unique_ptr<Setting> setting_ = MakeSettingOfThisTest();
  TestService service_;
  std::optional<Server> server_;
  std::optional<RawPeer> peer_;
  size_t seen_ = 0;
};
INSTANTIATE_TEST_SUITE_P(, ServerPropertiesTest, ::testing::Bool(),
                         [](const auto& info) { return std::string(info.param ? "CallingBack" : "Serving"); });

// [v2:5.3.4+1] [v2:5.3.4+5] Before and between calls, and never.
TEST_P(ServerPropertiesTest, PropertiesComeWheneverTheyDo) {
  Connect();
  Tell(5, 0);
  ExpectProperties(5);
  ExpectServes(6);
  Tell(7, 0);
  ExpectProperties(7);
  ExpectServes(8);
  seen_ = 0;
  Connect();
  ExpectServes(9);
}

TEST_P(ServerPropertiesTest, WhatIsMarkedAsAnAnswerIsNotAnswered) {
  Connect();
  Tell(5, kFlagResponse);
  ExpectServes(6);
  Tell(7, kFlagResponse);
  ExpectServes(8);
}

TEST_P(ServerPropertiesTest, AClientThatAnswersAnswersComesToAnEnd) {
  Connect();
  Tell(1, 0);
  for (uint32_t xid = 1; xid <= kPropertiesAnswersMax; ++xid) {
    ExpectProperties(xid);
    Tell(xid + 1, 0);
  }
  ExpectServes(100);
}

// [v2:4.1#1] [v2:5.3.3#4] As the document has it, and the connection goes on by the defaults.
TEST_P(ServerPropertiesTest, MalformedPropertiesAreBadXdr) {
  Connect();
  for (uint32_t xid = 5; xid <= 6; ++xid) {
    peer_->Send(MalformedProperties(xid, 0));
    const std::vector<uint32_t> error = Next();
    ASSERT_EQ(error.size(), 6u);
    EXPECT_EQ(error[0], xid);
    EXPECT_EQ(error[3], kRdma2Error);
    EXPECT_EQ(error[5], rpcrdma::kRdma2ErrBadXdr);
  }
  ExpectServes(7);
  EXPECT_FALSE(peer_->closed.has_value());
}

// [v2:4.1#1] [v2:5.3.3+1] It may not be answered: an error is never sent for what claims to be an answer.
TEST_P(ServerPropertiesTest, MalformedPropertiesThatAreAnAnswerEndTheConnection) {
  for (const bool at_once : {true, false}) {
    seen_ = 0;
    Connect();
    if (!at_once) ExpectServes(6);
    peer_->Send(MalformedProperties(7, kFlagResponse));
    EXPECT_TRUE(Next().empty());
    EXPECT_TRUE(peer_->closed.has_value());
  }
}

}  // namespace
}  // namespace stagecoach::e2e
