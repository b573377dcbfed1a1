// Clients that speak version 2 of RPC-over-RDMA: how they find out which version a server speaks, and what they do with
// one that does not speak it, says so badly, or says nothing. In whichever setting it is linked with.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "rpcrdma/api/client.h"
#include "rpcrdma/api/session.h"
#include "rpcrdma/onc/rpc_message.h"
#include "tests/e2e/outcome.h"
#include "tests/e2e/persona.h"
#include "tests/e2e/setting.h"
#include "tests/e2e/test_service.h"

namespace stagecoach::e2e {
namespace {

using rpcrdma::CallError;
using rpcrdma::CallOptions;
using rpcrdma::Client;
using rpcrdma::ClientOptions;
using rpcrdma::Extension;
using rpcrdma::kFlagResponse;
using rpcrdma::kRdma2ConnProp;
using rpcrdma::kRdma2Error;
using rpcrdma::Property;
using rpcrdma::PropertySet;
using rpcrdma::Session;
using rpcrdma::SessionOptions;
using rpcrdma::TransportVersions;
using rpcrdma::XdrReader;
using rpcrdma::XdrWriter;

using Visitor = Persona::Visitor;
using Connected = Result<void, CallError>;

ClientOptions Speaking(TransportVersions versions) {
  ClientOptions options;
  options.versions = versions;
  options.first_xid = 0x100;
  return options;
}

// A property of the base protocol with a value of one word.
Property Word(uint32_t id, uint32_t value) {
  return {id, Words({value})};
}

class Version2Test : public ::testing::Test {
 protected:
  ~Version2Test() override {
    session_.reset();
    client_.reset();
    persona_.reset();
    setting_->For(1ms);
  }

  void Serve(Persona::Answer answer) {
    setting_->ActAsServer();
    persona_.emplace(setting_->loop(), setting_->server_host(), std::move(answer));
    setting_->ActAsClient();
  }
  // What answers version 1 as a server of that does, and version 2 like this.
  void ServeVersion1(Persona::Answer version_2) {
    Serve([version_2](Visitor& visitor, const Message& message) {
      if (message.version() == 1) return ReplyIn1(visitor, message);
      version_2(visitor, message);
    });
  }

  Connected TryConnect(ClientOptions options) {
    setting_->ActAsClient();
    options.trace = &trace_;
    client_.emplace(setting_->loop(), options);
    client_->Register(kBindings[0]);
    std::optional<Connected> result;
    const Instant start = setting_->loop().Now();
    client_->Connect(setting_->server_host(), persona_->port(), [&](Connected connected) {
      took_ = setting_->loop().Now() - start;
      result.emplace(std::move(connected));
    });
    EXPECT_FALSE(client_->connected());
    EXPECT_EQ(client_->version(), 0u);
    EXPECT_TRUE(setting_->Until([&] { return result.has_value(); })) << "connecting hangs";
    return result.value_or(Connected());
  }
  void Connect(const ClientOptions& options) {
    const Connected connected = TryConnect(options);
    ASSERT_TRUE(connected.has_value()) << connected.error().ToString();
    EXPECT_TRUE(client_->connected());
  }
  std::optional<Outcome> Call(const CallOptions& options = {}, Procedure procedure = kNull) {
    std::optional<Outcome> outcome;
    client_->Call(
        Id(procedure), [](XdrWriter&) {}, options, [&](Outcome result) { outcome.emplace(std::move(result)); });
    EXPECT_TRUE(setting_->Until([&] { return outcome.has_value(); })) << "a call hangs";
    return outcome;
  }
  void ExpectCallsWork() {
    for (int i = 0; i < 3; ++i) {
      const auto outcome = Call();
      ASSERT_TRUE(outcome && outcome->has_value()) << (*outcome).error().ToString();
    }
  }
  // A Session that may speak version 2, whatever else its options say.
  void MakeSession(SessionOptions options = {}) {
    options.client = Speaking(rpcrdma::kVersions1And2);
    session_.emplace(setting_->loop(), setting_->server_host(), persona_->port(), options);
  }
  std::optional<Outcome> CallOfSession() {
    std::optional<Outcome> outcome;
    session_->Call(
        Id(kNull), [](XdrWriter&) {}, {}, [&](Outcome result) { outcome.emplace(std::move(result)); });
    EXPECT_TRUE(setting_->Until([&] { return outcome.has_value(); })) << "a call hangs";
    return outcome;
  }
  // That each of so many calls, with so long between them, is answered.
  void ExpectCallsOfSessionWork(int count, Duration pause) {
    for (int i = 0; i < count; ++i) {
      const auto outcome = CallOfSession();
      ASSERT_TRUE(outcome && outcome->has_value()) << i << ": " << (*outcome).error().ToString();
      setting_->For(pause);
    }
  }
  // The connection is of version 1, and so was each of this many connections that were made, from this one on.
  void ExpectVersion1(size_t connections, size_t first_in_1) {
    EXPECT_EQ(client_->version(), 1u);
    EXPECT_EQ(client_->peer_properties(), nullptr);
    ExpectCallsWork();
    ASSERT_EQ(persona_->visitors.size(), connections);
    for (size_t i = 0; i < connections; ++i) {
      EXPECT_EQ(persona_->visitors[i]->first_version(), i < first_in_1 ? 2u : 1u) << i;
    }
  }
  Visitor& visitor(size_t i = 0) { return *persona_->visitors.at(i); }

  TraceLog trace_;
  std::unique_ptr<Setting> setting_ = MakeSettingOfThisTest();
  std::optional<Persona> persona_;
  std::optional<Client> client_;
  std::optional<Session> session_;
  Duration took_{};
};

// About how long things take: in virtual time alone.
class Version2TimeTest : public Version2Test {};

// --- A server that speaks it ---

// [v2:7+1] [v2:7+2] [v2:7+3] [v2:7+4] [v2:7#1] [v2:5.3.4+5] [v2:5.3.4+3] [v2:3.2#4] [v2:8.1+1] [v2:4.2.1+1]
// [v2:10.1#1] [v2:10.1+2]
TEST_F(Version2Test, TheFirstMessagesWordByWord) {
  // Each message is answered only when nothing else has come for a while.
  std::vector<Message> held;
  Serve([&](Visitor&, const Message& message) { held.push_back(message); });
  ClientOptions options = Speaking(rpcrdma::kVersions1And2);
  options.credits = 32;
  options.probe = {kProgram, 3, 0};
  options.connect_timeout = 60s;
  options.exchange_wait = 30s;
  options.trace = &trace_;
  setting_->ActAsClient();
  client_.emplace(setting_->loop(), options);
  std::optional<Connected> connected;
  client_->Connect(setting_->server_host(), persona_->port(), [&](Connected result) { connected.emplace(result); });

  setting_->For(300ms);
  ASSERT_EQ(held.size(), 1u) << "the probe alone";
  EXPECT_FALSE(connected.has_value());
  const uint32_t xid = held[0].xid();
  const std::vector<uint32_t> probe = {xid,      2, held[0].words[2],
                                       0,        0, 0,
                                       0,        0, 0,  // no chunks, no handle
                                       xid,      0, 2,
                                       kProgram, 3, 0,
                                       0,        0, 0,
                                       0};
  EXPECT_EQ(held[0].words, probe);
  EXPECT_EQ(held[0].bytes.size(), 76u);
  EXPECT_NE(held[0].words[2], 0u) << "credits are asked for";
  ReplyIn2(visitor(), held[0]);

  setting_->For(300ms);
  ASSERT_EQ(held.size(), 2u) << "then the properties, alone";
  EXPECT_FALSE(connected.has_value());
  EXPECT_EQ(held[1].words,
            (std::vector<uint32_t>{0, 2, held[1].words[2], kRdma2ConnProp, 0,  // XID 0, a request
                                   2, rpcrdma::kRdma2PropidRbsiz, 4, 4096, rpcrdma::kRdma2PropidBrs, 4, 0}));
  visitor().Send(Version2(0, kFlagResponse, rpcrdma::ConnProp{{Word(rpcrdma::kRdma2PropidRbsiz, 8192)}}));

  ASSERT_TRUE(setting_->Until([&] { return connected.has_value(); }));
  ASSERT_TRUE(connected->has_value());
  EXPECT_EQ(client_->version(), 2u);
  ASSERT_NE(client_->peer_properties(), nullptr);
  EXPECT_EQ(rpcrdma::ReadProperties(*client_->peer_properties())->receive_buffer_size, 8192u);
  persona_->Become([](Visitor& to, const Message& call) { ReplyIn2(to, call); });
  ExpectCallsWork();
  for (const Message& each : visitor().received) EXPECT_EQ(each.version(), 2u);
  EXPECT_EQ(persona_->visitors.size(), 1u);
}

// Whatever the program, as long as it is an RPC reply.
TEST_F(Version2Test, AnyRpcReplyShowsTheVersion) {
  for (const std::vector<uint32_t>& tail : {std::vector<uint32_t>{1, 0, 0, 0, 1},  // PROG_UNAVAIL
                                            std::vector<uint32_t>{1, 1, 1, 1}}) {  // AUTH_ERROR
    Serve([tail](Visitor& to, const Message& message) {
      if (message.type() == kRdma2ConnProp) return AnswerAsVersion2(to, message);
      std::vector<std::byte> reply = Words({message.xid()});
      for (const uint32_t word : tail) {
        const auto bytes = Words({word});
        reply.insert(reply.end(), bytes.begin(), bytes.end());
      }
      to.Send(Version2(message.xid(), kFlagResponse, rpcrdma::RdmaMsg{}, reply));
    });
    Connect(Speaking(rpcrdma::kVersions1And2));
    EXPECT_EQ(client_->version(), 2u);
    EXPECT_EQ(persona_->visitors.size(), 1u);
    client_.reset();
  }
}

// [v2:5.3.4+4] [v2:5.3.4#1] [v2:4.2+3]
TEST_F(Version2TimeTest, WithoutAnAnswerToItsPropertiesItGoesByTheDefaults) {
  std::optional<Message> asked;
  Serve([&](Visitor& to, const Message& message) {
    if (message.type() == kRdma2ConnProp) {
      asked = message;
    } else {
      ReplyIn2(to, message);
    }
  });
  Connect(Speaking(rpcrdma::kVersion2Alone));
  EXPECT_GE(took_, 1s);
  EXPECT_LT(took_, 1100ms);
  EXPECT_EQ(client_->version(), 2u);
  EXPECT_EQ(client_->peer_properties(), nullptr);
  ExpectCallsWork();
  // Late, and taken all the same.
  ASSERT_TRUE(asked.has_value());
  visitor().Send(Version2(asked->xid(), kFlagResponse, rpcrdma::ConnProp{{Word(rpcrdma::kRdma2PropidRbsiz, 1024)}}));
  EXPECT_TRUE(setting_->Until([&] { return client_->peer_properties() != nullptr; }));
  ExpectCallsWork();
}

TEST_F(Version2TimeTest, AServerThatRefusesItsPropertiesIsCalledAtOnce) {
  Serve([&](Visitor& to, const Message& message) {
    if (message.type() == kRdma2ConnProp) {
      to.Send(Version2(message.xid(), kFlagResponse, rpcrdma::ErrInvalHtype{}));
    } else {
      ReplyIn2(to, message);
    }
  });
  Connect(Speaking(rpcrdma::kVersion2Alone));
  EXPECT_LT(took_, 500ms);
  EXPECT_EQ(client_->version(), 2u);
  EXPECT_EQ(client_->peer_properties(), nullptr);
  ExpectCallsWork();
}

// [v2:4.2.2+1] It serves nothing, and says so: a call of the server's is an error, and its properties are answered.
// [v2:4.2.2+3] [v2:5.3.3#21] [v2:5.3.4+1]
TEST_F(Version2Test, AClientThatServesNothingAnswersAllTheSame) {
  Serve([](Visitor& to, const Message& message) { AnswerAsVersion2(to, message); });
  Connect(Speaking(rpcrdma::kVersion2Alone));
  const size_t before = visitor().received.size();
  persona_->Become([](Visitor&, const Message&) {});
  visitor().Send(Version2(0x77, 0, rpcrdma::RdmaMsg{}, Words({0x77, 0, 2, kProgram, 3, 0, 0, 0, 0, 0})));
  ASSERT_TRUE(setting_->Until([&] { return visitor().received.size() == before + 1; }));
  visitor().Send(Version2(0x78, 0, rpcrdma::ConnProp{}));
  ASSERT_TRUE(setting_->Until([&] { return visitor().received.size() == before + 2; }));
  const std::vector<uint32_t> error = visitor().received[before].words;
  ASSERT_EQ(error.size(), 6u);
  EXPECT_EQ(error[0], 0x77u);
  EXPECT_EQ(error[3], kRdma2Error);
  EXPECT_EQ(error[4], kFlagResponse);
  EXPECT_EQ(error[5], rpcrdma::kRdma2ErrSystem);
  EXPECT_EQ(visitor().received[before + 1].words[3], kRdma2ConnProp);
  EXPECT_EQ(visitor().received[before + 1].words[4], kFlagResponse);
  EXPECT_EQ(visitor().received[before + 1].words[0], 0x78u);
}

// --- Servers of version 1 ---

enum class Layout { kEchoes, kAnswersIn1, kOfVersion2 };

std::vector<std::byte> ErrVersIn(Layout layout, uint32_t xid, uint32_t low, uint32_t high) {
  switch (layout) {
    case Layout::kEchoes:
      return Words({xid, 2, 8, 4, 1, low, high});
    case Layout::kAnswersIn1:
      return Words({xid, 1, 8, 4, 1, low, high});
    case Layout::kOfVersion2:
      break;
  }
  return Words({xid, 2, 8, 4, kFlagResponse, 1, low, high});
}

// [v2:7.2#1] [v2:7.2+1] [v2:7.2+2] [v2:7.2+5] [5666bis:9.1#1]
TEST_F(Version2Test, ARefusalInAnyLayoutLeadsToVersion1OrNowhere) {
  struct Range {
    uint32_t low, high;
    bool has_1;
  };
  for (const Layout layout : {Layout::kEchoes, Layout::kAnswersIn1, Layout::kOfVersion2}) {
    for (const Range& range : {Range{1, 1, true}, Range{1, 2, true}, Range{2, 2, true}, Range{0, 0, false},
                               Range{3, 9, false}, Range{4, 9, false}, Range{9, 3, true}, Range{1, 0, true}}) {
      SCOPED_TRACE(::testing::Message() << static_cast<int>(layout) << ": " << range.low << " to " << range.high);
      ServeVersion1([&](Visitor& to, const Message& message) {
        to.Send(ErrVersIn(layout, message.xid(), range.low, range.high));
      });
      const Connected connected = TryConnect(Speaking(rpcrdma::kVersions1And2));
      EXPECT_EQ(persona_->visitors.size(), 1u) << "on the same connection";
      EXPECT_EQ(connected.has_value(), range.has_1);
      if (connected) {
        ExpectVersion1(1, 1);
        for (size_t i = 1; i < visitor().received.size(); ++i) EXPECT_EQ(visitor().received[i].version(), 1u);
      } else {
        EXPECT_EQ(connected.error().kind, CallError::Kind::kVersion);
        EXPECT_EQ(connected.error().versions, (rpcrdma::VersionRange{range.low, range.high}));
        EXPECT_EQ(visitor().received.size(), 1u);
        EXPECT_TRUE(setting_->Until([&] { return visitor().gone(); }));
      }
      client_.reset();
    }
  }
}

// [v2:7.2+5] [v2:7.1+2] Without private data, and without a word of the server's own size.
TEST_F(Version2Test, EachVersionHasItsDefaultLimits) {
  for (const bool speaks_2 : {false, true}) {
    Serve([speaks_2](Visitor& to, const Message& message) {
      if (message.version() == 1) return ReplyIn1(to, message);
      if (speaks_2) return AnswerAsVersion2(to, message);
      to.Send(ErrVersIn(Layout::kEchoes, message.xid(), 1, 1));
    });
    Connect(Speaking(rpcrdma::kVersions1And2));
    EXPECT_EQ(client_->version(), speaks_2 ? 2u : 1u);
    for (const auto& [bytes, by_chunk_in_1, by_chunk_in_2] :
         {std::tuple(900, 0u, 0u), std::tuple(1100, 1u, 0u), std::tuple(3900, 2u, 0u), std::tuple(4100, 3u, 1u)}) {
      const auto data = Pattern(bytes);
      std::optional<Outcome> outcome;
      client_->Call(
          Id(kSize), [&](XdrWriter& args) { args.EligibleOpaque(data); }, {},
          [&](Outcome result) { outcome.emplace(std::move(result)); });
      ASSERT_TRUE(setting_->Until([&] { return outcome.has_value(); }));
      EXPECT_TRUE(outcome->has_value());
      EXPECT_EQ(client_->stats().calls_by_read_chunk, speaks_2 ? by_chunk_in_2 : by_chunk_in_1) << bytes;
    }
    client_.reset();
  }
}

TEST_F(Version2Test, ErrChunkIsVersion1) {
  for (const uint32_t version : {1u, 2u}) {
    ServeVersion1([version](Visitor& to, const Message& message) {
      to.Send(Words({message.xid(), version, 8, 4, 2}));
    });
    Connect(Speaking(rpcrdma::kVersions1And2));
    ExpectVersion1(1, 1);
    client_.reset();
  }
}

TEST_F(Version2TimeTest, WithoutVersion1ThereIsNothingToFallBackTo) {
  ServeVersion1(
      [](Visitor& to, const Message& message) { to.Send(ErrVersIn(Layout::kAnswersIn1, message.xid(), 1, 1)); });
  const Connected refused = TryConnect(Speaking(rpcrdma::kVersion2Alone));
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().kind, CallError::Kind::kVersion);
  EXPECT_EQ(refused.error().message, "connect to " + setting_->HostPort(persona_->port()) +
                                         ": it speaks versions 1 to 1 of RPC-over-RDMA, of which this end may use none "
                                         "(2 to 2)");
  EXPECT_TRUE(refused.error().connection_gone());

  ServeVersion1([](Visitor&, const Message&) {});
  const Connected silent = TryConnect(Speaking(rpcrdma::kVersion2Alone));
  ASSERT_FALSE(silent.has_value());
  EXPECT_EQ(silent.error().kind, CallError::Kind::kUnreachable);
  EXPECT_NE(silent.error().message.find("before the server had answered in version 2"), std::string::npos)
      << silent.error().message;
  EXPECT_EQ(persona_->visitors.size(), 1u);
  EXPECT_GE(took_, 10s) << "nothing is left to try, so it has all the time";
}

// [v2:7.2+4] [v2:7.3#2]
TEST_F(Version2TimeTest, SilenceLeadsToANewConnectionWithVersion1) {
  std::optional<Message> probe;
  ServeVersion1([&](Visitor&, const Message& message) { probe = message; });
  ClientOptions options = Speaking(rpcrdma::kVersions1And2);
  options.connect_timeout = 30s;
  Connect(options);
  EXPECT_GE(took_, 5s);
  EXPECT_LT(took_, 5200ms);
  ExpectVersion1(2, 1);
  // What comes late finds nobody: the connection on which version 2 might have been settled is over.
  EXPECT_TRUE(visitor(0).gone());
  EXPECT_EQ(visitor(0).received.size(), 1u);
  ReplyIn2(visitor(0), *probe);
  setting_->For(100ms);
  EXPECT_EQ(client_->version(), 1u);
  ExpectCallsWork();
  EXPECT_EQ(client_->stats().calls, 1u + 1 + 6) << "both first calls count";
}

TEST_F(Version2TimeTest, SilenceLeavesTimeForVersion1) {
  ServeVersion1([](Visitor&, const Message&) {});
  ClientOptions options = Speaking(rpcrdma::kVersions1And2);
  options.connect_timeout = 2s;
  Connect(options);
  EXPECT_LT(took_, 1200ms);
  ExpectVersion1(2, 1);
}

TEST_F(Version2TimeTest, ADisconnectionLeadsToANewConnectionWithVersion1) {
  ServeVersion1([](Visitor& to, const Message&) { to.HangUp(); });
  Connect(Speaking(rpcrdma::kVersions1And2));
  EXPECT_LT(took_, 1s);
  ExpectVersion1(2, 1);
}

// [v2:7.2+3]
TEST_F(Version2Test, ADisconnectionBehindTheRefusalDoesToo) {
  ServeVersion1([](Visitor& to, const Message& message) {
    to.Send(ErrVersIn(Layout::kEchoes, message.xid(), 1, 1));
    to.HangUp();
  });
  Connect(Speaking(rpcrdma::kVersions1And2));
  ExpectVersion1(2, 1);
}

// An answer under the XID of the probe that is none, of every length that its header could have.
TEST_F(Version2Test, GarbageLeadsToANewConnectionWithVersion1) {
  std::vector<std::vector<uint32_t>> answers;
  for (size_t words = 1; words < 10; ++words) {
    std::vector<uint32_t> answer = {0, 2, 8, 4, kFlagResponse, 7, 8, 9, 10};
    answer.resize(words);
    if (words != 7) answers.push_back(answer);  // of ERR_VERS by version 1
    answers.push_back({0, 2, 8, 0, kFlagResponse, 0, 1, 2, 3});
    answers.back().resize(words);
  }
  answers.push_back({0, 2, 8, 4, kFlagResponse, rpcrdma::kRdma2ErrBadXdr});
  answers.push_back({0, 2, 8, 4, kFlagResponse, rpcrdma::kRdma2ErrSystem});
  answers.push_back({0, 3, 8, 0, kFlagResponse, 0, 0, 0, 0});
  answers.push_back({0, 2, 8, 77, kFlagResponse});
  answers.push_back({0, 1, 8, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0});  // as if the call had been one of version 1
  for (const std::vector<uint32_t>& answer : answers) {
    std::string text;
    for (const uint32_t word : answer) text += std::to_string(word) + " ";
    SCOPED_TRACE(text);
    ServeVersion1([&](Visitor& to, const Message& message) {
      std::vector<std::byte> bytes(4 * answer.size());
      ByteWriter out(bytes);
      for (size_t i = 0; i < answer.size(); ++i) out.U32(i == 0 || i == 7 ? message.xid() : answer[i]);
      to.Send(bytes);
    });
    ClientOptions options = Speaking(rpcrdma::kVersions1And2);
    options.probe_wait = 100ms;  // for what says nothing
    Connect(options);
    ExpectVersion1(2, 1);
    client_.reset();
  }
}

// [v2:4.1#1] Where an end cannot say how long messages may be, there is no version 2 with it.
TEST_F(Version2Test, MalformedPropertiesLeadToANewConnectionWithVersion1) {
  ServeVersion1([](Visitor& to, const Message& message) {
    AnswerAsVersion2(to, message, {Word(rpcrdma::kRdma2PropidRbsiz, 1023)});
  });
  Connect(Speaking(rpcrdma::kVersions1And2));
  ExpectVersion1(2, 1);
  EXPECT_EQ(visitor(0).received.size(), 2u) << "no error goes back";
}

// Who has answered in version 2 speaks it, whatever becomes of the connection: that is no evidence for version 1.
TEST_F(Version2Test, AConnectionThatIsLostBehindTheAnswerIsLost) {
  ServeVersion1([](Visitor& to, const Message& message) {
    if (message.type() == kRdma2ConnProp) return to.HangUp();
    ReplyIn2(to, message);
  });
  const Connected lost = TryConnect(Speaking(rpcrdma::kVersions1And2));
  ASSERT_FALSE(lost.has_value());
  EXPECT_EQ(lost.error().kind, CallError::Kind::kUnreachable);
  EXPECT_NE(lost.error().message.find("before the server had answered RDMA2_CONNPROP"), std::string::npos)
      << lost.error().message;
  EXPECT_EQ(persona_->visitors.size(), 1u);
}

// An older document has no reverse direction, so not the engines for it that the refused connection has.
TEST_F(Version2Test, AnOlderDocumentHasAConnectionOfItsOwn) {
  ServeVersion1(
      [](Visitor& to, const Message& message) { to.Send(ErrVersIn(Layout::kAnswersIn1, message.xid(), 1, 1)); });
  ClientOptions options = Speaking(rpcrdma::kVersions1And2);
  options.profile = rpcrdma::kRfc5666;
  Connect(options);
  ExpectVersion1(2, 1);
}

// However a client has come to version 1: what it serves is served there, and with nothing to serve calls are dropped.
TEST_F(Version2Test, ReverseCallsFareAlikeAfterEitherWayToVersion1) {
  TestService service;
  for (const bool serves : {true, false}) {
    for (const bool hangs_up : {false, true}) {
      ServeVersion1([hangs_up](Visitor& to, const Message& message) {
        hangs_up ? to.HangUp() : to.Send(ErrVersIn(Layout::kAnswersIn1, message.xid(), 1, 1));
      });
      ClientOptions options = Speaking(rpcrdma::kVersions1And2);
      if (serves) options.reverse_services = {&service};
      Connect(options);
      ExpectVersion1(hangs_up ? 2 : 1, 1);
      Visitor& server = *persona_->visitors.back();
      const size_t before = server.received.size();
      server.Send(Words({0x77, 1, 8, 0, 0, 0, 0, 0x77, 0, 2, kProgram, 3, 0, 0, 0, 0, 0}));
      // It comes ahead of the answer to a call that is made behind it.
      ExpectCallsWork();
      const auto reply = std::find_if(server.received.begin(), server.received.end(),
                                      [](const Message& message) { return message.xid() == 0x77; });
      ASSERT_EQ(reply != server.received.end(), serves);
      EXPECT_EQ(server.received.size(), before + 3 + (serves ? 1 : 0));
      if (serves) {
        EXPECT_EQ(reply->words[8], 1u) << "REPLY";
        EXPECT_EQ(reply->words.back(), 0u) << "SUCCESS";
      }
      client_.reset();
    }
  }
}

// The Connection Configuration Protocol is of version 1, and its first call there.
TEST_F(Version2Test, OnlyVersion1IsConfigured) {
  ClientOptions options = Speaking(rpcrdma::kVersions1And2);
  options.ccp.enabled = true;
  Serve([](Visitor& to, const Message& message) { AnswerAsVersion2(to, message); });
  Connect(options);
  EXPECT_EQ(client_->version(), 2u);
  EXPECT_FALSE(client_->configuration().has_value());
  for (const Message& each : visitor().received) EXPECT_FALSE(each.is_call() && each.procedure() == 1);

  for (const bool hangs_up : {false, true}) {
    ServeVersion1([hangs_up](Visitor& to, const Message& message) {
      to.Send(ErrVersIn(Layout::kAnswersIn1, message.xid(), 1, 1));
      if (hangs_up) to.HangUp();
    });
    Connect(options);
    EXPECT_EQ(client_->version(), 1u);
    ASSERT_TRUE(client_->configuration().has_value());
    ASSERT_EQ(persona_->visitors.size(), hangs_up ? 2u : 1u);
    const Message& asked = hangs_up ? visitor(1).received.at(0) : visitor(0).received.at(1);
    EXPECT_EQ(asked.version(), 1u);
    EXPECT_EQ(asked.program(), 100417u);
    EXPECT_EQ(asked.procedure(), 1u);
  }
}

// Reverse calls that come while nothing is certain do not reach a service of a connection that may be given up.
TEST_F(Version2Test, ReverseCallsWaitUntilTheConnectionIsMade) {
  TestService service;
  std::optional<Message> asked;
  Serve([&](Visitor& to, const Message& message) {
    if (message.version() == 1) return ReplyIn1(to, message);
    if (message.type() == kRdma2ConnProp) {
      asked = message;
    } else if (message.is_call() && message.words[4] == 0) {
      ReplyIn2(to, message);
      to.Send(Version2(0x77, 0, rpcrdma::RdmaMsg{}, Words({0x77, 0, 2, kProgram, 3, 0, 0, 0, 0, 0})));
    }
  });
  ClientOptions options = Speaking(rpcrdma::kVersions1And2);
  options.reverse_services = {&service};
  options.exchange_wait = 10s;
  options.connect_timeout = 30s;
  setting_->ActAsClient();
  client_.emplace(setting_->loop(), options);
  std::optional<Connected> connected;
  client_->Connect(setting_->server_host(), persona_->port(), [&](Connected result) { connected.emplace(result); });
  ASSERT_TRUE(setting_->Until([&] { return asked.has_value(); }));
  setting_->For(100ms);
  EXPECT_EQ(service.handled, 0u);
  visitor().Send(Version2(0, kFlagResponse, rpcrdma::ConnProp{}));
  EXPECT_TRUE(setting_->Until([&] { return connected.has_value() && service.handled == 1; }));
  client_.reset();

  // And what was not handed out is gone with the connection.
  asked.reset();
  connected.reset();
  client_.emplace(setting_->loop(), options);
  client_->Connect(setting_->server_host(), persona_->port(), [&](Connected result) { connected.emplace(result); });
  ASSERT_TRUE(setting_->Until([&] { return asked.has_value(); }));
  visitor(1).HangUp();
  ASSERT_TRUE(setting_->Until([&] { return connected.has_value(); }));
  EXPECT_FALSE(connected->has_value());
  EXPECT_EQ(service.handled, 1u);
}

TEST_F(Version2TimeTest, ConnectingMayBeCancelledOrDestroyedAtEveryStep) {
  for (const bool answers_probe : {false, true}) {
    for (const int how : {0, 1, 2}) {
      Serve([answers_probe](Visitor& to, const Message& message) {
        if (answers_probe && message.type() == 0) ReplyIn2(to, message);
      });
      client_.emplace(setting_->loop(), Speaking(rpcrdma::kVersions1And2));
      std::optional<Connected> connected;
      bool closed = false;
      client_->Connect(setting_->server_host(), persona_->port(), [&](Connected result) { connected.emplace(result); });
      ASSERT_TRUE(setting_->Until(
          [&] { return !persona_->visitors.empty() && visitor().received.size() == (answers_probe ? 2u : 1u); }));
      if (how == 0) client_->CancelConnect();
      if (how == 1) client_->Close([&] { closed = true; });
      if (how == 2) client_.reset();
      ASSERT_TRUE(setting_->Until([&] { return connected.has_value() && closed == (how == 1); }));
      ASSERT_FALSE(connected->has_value());
      EXPECT_EQ(connected->error().kind, how == 0 ? CallError::Kind::kCancelled : CallError::Kind::kClosed);
      setting_->For(2s);
      EXPECT_EQ(persona_->visitors.size(), 1u);
      client_.reset();
    }
  }
}

// --- Sessions ---

// [v2:7.2+3] [v2:7.2+4] One that cannot stand version 2 meets it once in version_memory, and not in a loop.
TEST_F(Version2TimeTest, ASessionRemembersForATimeWhoDoesNotSpeakIt) {
  for (const bool refuses : {false, true}) {
    SCOPED_TRACE(refuses);
    ServeVersion1([refuses](Visitor& to, const Message& message) {
      if (refuses) to.Send(ErrVersIn(Layout::kAnswersIn1, message.xid(), 1, 1));
      to.HangUp();
    });
    SessionOptions options;
    options.idle_timeout = 30s;
    options.seed = 7;
    MakeSession(options);
    // For an hour and more, a little more than every minute, a call that needs a new connection.
    ExpectCallsOfSessionWork(65, 61s);
    EXPECT_EQ(persona_->Began(2), 7);
    EXPECT_EQ(persona_->Began(1), 65);
    // The server learns it.
    persona_->Become([](Visitor& to, const Message& message) {
      if (message.version() == 1) return ReplyIn1(to, message);
      AnswerAsVersion2(to, message);
    });
    ExpectCallsOfSessionWork(11, 61s);
    EXPECT_EQ(persona_->visitors.back()->first_version(), 2u);
    EXPECT_GT(persona_->visitors.back()->received.size(), 2u);
    session_.reset();
  }
}

// Version 1 alone is offered because of what was remembered, and that does not hold any more.
TEST_F(Version2TimeTest, ASessionThatRemembersWrongFindsOutAtOnce) {
  ServeVersion1([](Visitor& to, const Message&) { to.HangUp(); });
  SessionOptions options;
  options.idle_timeout = 1s;
  MakeSession(options);
  ExpectCallsOfSessionWork(1, 2s);
  ASSERT_EQ(persona_->visitors.size(), 2u);
  persona_->Become([](Visitor& to, const Message& message) {
    if (message.version() == 1) return to.Send(ErrVersIn(Layout::kAnswersIn1, message.xid(), 2, 2));
    AnswerAsVersion2(to, message);
  });
  ExpectCallsOfSessionWork(1, 2s);
  ASSERT_EQ(persona_->visitors.size(), 4u);
  EXPECT_EQ(visitor(2).first_version(), 1u);
  EXPECT_EQ(visitor(3).first_version(), 2u);
  ExpectCallsOfSessionWork(1, 2s);
  EXPECT_EQ(visitor(4).first_version(), 2u);
}

// Of version 2 alone, and restarted as it is asked in that: version 1 shows it, and it is asked once more.
TEST_F(Version2TimeTest, AServerOfVersion2AloneThatWasLostIsAskedOnceMore) {
  int restarts = 1;
  const auto serve = [&] {
    Serve([&](Visitor& to, const Message& message) {
      if (message.version() == 1) return to.Send(ErrVersIn(Layout::kAnswersIn1, message.xid(), 2, 2));
      if (restarts-- > 0) return to.HangUp();
      AnswerAsVersion2(to, message);
    });
  };
  serve();
  Connect(Speaking(rpcrdma::kVersions1And2));
  EXPECT_EQ(client_->version(), 2u);
  EXPECT_EQ(persona_->Began(2), 2);
  EXPECT_EQ(persona_->Began(1), 1);
  client_.reset();

  // Once: who disconnects each time is no better than any other server that does.
  restarts = 1000;
  serve();
  const Connected lost = TryConnect(Speaking(rpcrdma::kVersions1And2));
  ASSERT_FALSE(lost.has_value());
  EXPECT_EQ(lost.error().kind, CallError::Kind::kUnreachable) << lost.error().ToString();
  EXPECT_EQ(persona_->Began(2), 2);
  EXPECT_EQ(persona_->Began(1), 1);
  client_.reset();

  // A session, which has asked before: each attempt to connect is one in each version, and no more.
  restarts = 4;
  serve();
  MakeSession();
  ExpectCallsOfSessionWork(1, 0s);
  EXPECT_EQ(persona_->Began(2), 5);
  EXPECT_EQ(persona_->Began(1), 2);
}

// A server that is restarted at a bad moment has not unlearned version 2.
TEST_F(Version2Test, ASessionAsksAgainInVersion2WhoHadAnsweredInIt) {
  int restarts = 2;
  ServeVersion1([&](Visitor& to, const Message& message) {
    if (message.type() == kRdma2ConnProp && restarts-- > 0) return to.HangUp();
    AnswerAsVersion2(to, message);
  });
  MakeSession();
  ExpectCallsOfSessionWork(1, 0s);
  EXPECT_EQ(persona_->Began(2), 3);
  EXPECT_EQ(persona_->Began(1), 0);
}

// Properties that cannot be read are like a refusal: it is not asked again for a time.
TEST_F(Version2TimeTest, ASessionRemembersWhosePropertiesAreMalformed) {
  ServeVersion1([](Visitor& to, const Message& message) {
    AnswerAsVersion2(to, message, {Word(rpcrdma::kRdma2PropidRbsiz, 1023)});
  });
  SessionOptions options;
  options.idle_timeout = 1s;
  MakeSession(options);
  ExpectCallsOfSessionWork(3, 3s);
  EXPECT_EQ(persona_->Began(2), 1);
  EXPECT_EQ(persona_->Began(1), 3);
}

// The connections of a Session may be of either version, and 2 means another thing in each.
TEST_F(Version2Test, EveryAnswerSaysWhichVersionItCameIn) {
  for (const uint32_t version : {1u, 2u}) {
    int calls = 0;
    Serve([&, version](Visitor& to, const Message& message) {
      if (message.version() != version) return to.Send(ErrVersIn(Layout::kAnswersIn1, message.xid(), 1, 1));
      if (version == 1) {
        // The first is the one that its connection begins with.
        return ++calls == 2 ? to.Send(Words({message.xid(), 1, 8, 4, 2})) : ReplyIn1(to, message);
      }
      if (message.is_call() && ++calls == 2) {
        return to.Send(Version2(message.xid(), kFlagResponse, rpcrdma::ErrBadXdr{}));
      }
      AnswerAsVersion2(to, message);
    });
    MakeSession();
    for (const bool refused : {true, false}) {
      const std::optional<Outcome> outcome = CallOfSession();
      ASSERT_TRUE(outcome.has_value());
      ASSERT_EQ(outcome->has_value(), !refused);
      if (refused) {
        EXPECT_EQ(outcome->error().transport_error, 2u);
        EXPECT_EQ(outcome->error().rpcrdma_version, version);
      } else {
        EXPECT_EQ((*outcome)->rpcrdma_version(), version);
      }
    }
    session_.reset();
  }
}

// [v2:7.2+2]
TEST_F(Version2TimeTest, ASessionDoesNotAskAgainWhereThereIsNoVersionInCommon) {
  Serve([](Visitor& to, const Message& message) { to.Send(ErrVersIn(Layout::kEchoes, message.xid(), 3, 9)); });
  MakeSession();
  const std::optional<Outcome> outcome = CallOfSession();
  ASSERT_TRUE(outcome.has_value());
  ASSERT_FALSE(outcome->has_value());
  EXPECT_EQ(outcome->error().kind, CallError::Kind::kVersion);
  EXPECT_FALSE(outcome->error().sent);
  setting_->For(60s);
  EXPECT_EQ(persona_->visitors.size(), 1u);
}

// --- Errors and extensions ---

// [v2:8.5+1] [v2:5.3.3#22]
TEST_F(Version2Test, EachErrorOfACallSaysWhatItMeans) {
  const std::vector<std::pair<rpcrdma::Header::Body, std::string>> errors = {
      {rpcrdma::ErrVers{2, 2}, "ERR_VERS"},
      {rpcrdma::ErrBadXdr{}, "ERR_BAD_XDR"},
      {rpcrdma::ErrInvalHtype{}, "ERR_INVAL_HTYPE"},
      {rpcrdma::ErrReadChunks{3}, "ERR_READ_CHUNKS (at most 3)"},
      {rpcrdma::ErrWriteChunks{2}, "ERR_WRITE_CHUNKS (at most 2)"},
      {rpcrdma::ErrSegments{1}, "ERR_SEGMENTS (at most 1 in a chunk)"},
      {rpcrdma::ErrWriteResource{0, 0}, "ERR_WRITE_RESOURCE (a chunk needs 0 bytes)"},
      {rpcrdma::ErrReplyResource{0}, "ERR_REPLY_RESOURCE (0 bytes needed)"},
      {rpcrdma::ErrSystem{}, "ERR_SYSTEM"},
      {rpcrdma::ErrOther{4711}, "error code 4711"},
  };
  size_t next = 0;
  bool connected = false;
  Serve([&](Visitor& to, const Message& message) {
    if (!connected) return AnswerAsVersion2(to, message);
    to.Send(Version2(message.xid(), kFlagResponse, errors[next].first));
  });
  Connect(Speaking(rpcrdma::kVersion2Alone));
  connected = true;
  for (next = 0; next < errors.size(); ++next) {
    SCOPED_TRACE(errors[next].second);
    const auto outcome = Call();
    ASSERT_TRUE(outcome && !outcome->has_value());
    const CallError& error = outcome->error();
    EXPECT_EQ(error.kind, CallError::Kind::kTransport);
    EXPECT_EQ(error.transport_error, next + 1 < errors.size() ? next + 1 : 4711);
    EXPECT_EQ(error.rpcrdma_version, 2u);
    EXPECT_TRUE(error.sent);
    EXPECT_NE(error.message.find(errors[next].second), std::string::npos) << error.message;
    EXPECT_FALSE(error.connection_gone());
  }
  connected = false;
  ExpectCallsWork();
  EXPECT_EQ(persona_->visitors.size(), 1u);
}

constexpr uint32_t kTime = rpcrdma::kExperimentalNumbers + 1;

std::optional<size_t> OneWord(ConstBytes rest) {
  if (rest.size() < 4) return std::nullopt;
  return 4;
}
constexpr rpcrdma::HeaderTypeRow kHeaderTypes[] = {{.type = kTime, .name = "TIME", .size = OneWord}};
constexpr rpcrdma::PropertyRow kProperties[] = {
    {.id = kTime, .name = "time", .valid = [](ConstBytes data) { return data.size() == 4; }}};
constexpr rpcrdma::FlagRow kFlags[] = {
    {.flag = 0x80000000, .name = "URGENT", .use = [](uint32_t) { return rpcrdma::FlagUse::kMay; }}};
constexpr rpcrdma::ErrorRow kErrors[] = {{.code = kTime, .name = "ERR_NO_CLOCK"}};
constexpr rpcrdma::Feature kTimeFeature{
    .name = "time", .header_types = kHeaderTypes, .properties = kProperties, .errors = kErrors, .flags = kFlags};

// [v2:9+2] [v2:9.2+1] [v2:9.3+2] [v2:9.4+3] [v2:1#1]
TEST_F(Version2Test, ExtensionsHaveMessagesPropertiesErrorsAndFlags) {
  const auto extensions = std::make_shared<rpcrdma::Extensions>();
  ASSERT_EQ(extensions->Add(kTimeFeature), std::nullopt);
  bool knows = true;
  std::vector<uint32_t> flags;
  Serve([&](Visitor& to, const Message& message) {
    if (message.type() != kTime) {
      if (message.is_call()) flags.push_back(message.words[4]);
      return AnswerAsVersion2(to, message);
    }
    if (message.words[5] == 3) return;  // it keeps that one to itself
    if (message.words[5] == 2) {
      return to.Send(Version2(message.xid(), kFlagResponse, rpcrdma::ErrOther{kTime}));
    }
    if (knows) {
      to.Send(Version2(message.xid(), kFlagResponse, Extension{.type = kTime, .body = Words({4711})}));
    } else {
      to.Send(Version2(message.xid(), kFlagResponse, rpcrdma::ErrInvalHtype{}));
    }
  });
  ClientOptions options = Speaking(rpcrdma::kVersion2Alone);
  options.extensions = extensions;
  options.properties = {Word(kTime, 5)};
  Connect(options);
  const auto told = std::find_if(visitor().received.begin(), visitor().received.end(),
                                 [](const Message& message) { return message.type() == kRdma2ConnProp; });
  ASSERT_NE(told, visitor().received.end());
  EXPECT_EQ(told->words[5], 3u) << "two properties of the base protocol, and one of the extension";

  const auto ask = [&](uint32_t type, uint32_t word, Duration timeout = 30s) {
    std::optional<Result<Extension, CallError>> answer;
    client_->AsyncExtension(type, Words({word}), timeout,
                            [&](Result<Extension, CallError> result) { answer.emplace(std::move(result)); });
    EXPECT_FALSE(answer.has_value()) << "not from inside";
    EXPECT_TRUE(setting_->Until([&] { return answer.has_value(); }));
    return *answer;
  };
  const auto time = ask(kTime, 1);
  ASSERT_TRUE(time.has_value()) << time.error().ToString();
  EXPECT_EQ(time->type, kTime);
  EXPECT_EQ(time->body, Words({4711}));

  const auto no_clock = ask(kTime, 2);
  ASSERT_FALSE(no_clock.has_value());
  EXPECT_EQ(no_clock.error().kind, CallError::Kind::kTransport);
  EXPECT_EQ(no_clock.error().transport_error, kTime);
  EXPECT_EQ(no_clock.error().rpcrdma_version, 2u);
  EXPECT_NE(no_clock.error().message.find("ERR_NO_CLOCK"), std::string::npos) << no_clock.error().message;

  knows = false;
  const auto unknown_there = ask(kTime, 1);
  ASSERT_FALSE(unknown_there.has_value());
  EXPECT_EQ(unknown_there.error().transport_error, rpcrdma::kRdma2ErrInvalHtype);

  const auto unknown_here = ask(kTime + 1, 1);
  ASSERT_FALSE(unknown_here.has_value());
  EXPECT_EQ(unknown_here.error().kind, CallError::Kind::kNotSpoken);
  EXPECT_FALSE(unknown_here.error().sent);

  const auto silence = ask(kTime, 3, 1s);
  ASSERT_FALSE(silence.has_value());
  EXPECT_EQ(silence.error().kind, CallError::Kind::kTimedOut);
  EXPECT_TRUE(silence.error().sent);
  EXPECT_EQ(silence.error().rpcrdma_version, 0u) << "nobody answered";
  flags.clear();
  CallOptions urgent;
  urgent.transport_flags = 0x80000000;
  ASSERT_TRUE(Call(urgent)->has_value()) << "and the connection goes on";
  ASSERT_TRUE(Call()->has_value());
  EXPECT_EQ(flags, (std::vector<uint32_t>{0x80000000, 0}));
  EXPECT_EQ(client_->outstanding(), 0u);
}

TEST_F(Version2Test, Version1HasNoExtensions) {
  const auto extensions = std::make_shared<rpcrdma::Extensions>();
  ASSERT_EQ(extensions->Add(kTimeFeature), std::nullopt);
  ServeVersion1(
      [](Visitor& to, const Message& message) { to.Send(ErrVersIn(Layout::kAnswersIn1, message.xid(), 1, 1)); });
  ClientOptions options = Speaking(rpcrdma::kVersions1And2);
  options.extensions = extensions;
  options.properties = {Word(kTime, 5)};
  Connect(options);
  std::optional<Result<Extension, CallError>> answer;
  client_->SendExtension(kTime, Words({1}), [&](Result<Extension, CallError> result) { answer.emplace(result); });
  ASSERT_TRUE(setting_->Until([&] { return answer.has_value(); }));
  ASSERT_FALSE(answer->has_value());
  EXPECT_EQ(answer->error().kind, CallError::Kind::kNotSpoken);
  CallOptions urgent;
  urgent.transport_flags = 0x80000000;
  const auto outcome = Call(urgent);
  ASSERT_TRUE(outcome->has_value()) << "it has no flags either, and they are no harm";
  EXPECT_EQ((*outcome)->rpcrdma_version(), 1u);
  for (size_t i = 1; i < visitor().received.size(); ++i) {
    EXPECT_EQ(visitor().received[i].version(), 1u);
    EXPECT_EQ(visitor().received[i].bytes.size(), 68u) << "no word more than without";
  }
}

}  // namespace
}  // namespace stagecoach::e2e
