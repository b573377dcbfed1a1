// Fault rules on Debian's programs, unmodified: "disconnect at message n" and the like, by `stagecoach run --rule`.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "tests/dropin/dropin_fixture.h"

namespace stagecoach::tests {
namespace {

// Far less than what retries or time-outs of these programs take, far more than a busy machine needs.
constexpr std::chrono::seconds kSoon(10);

class RulesTest : public DropInTest {
 protected:
  static bool Says(const std::string& text, const std::string& what) { return text.find(what) != std::string::npos; }
  static size_t Lines(const std::string& text, const std::string& what) {
    size_t count = 0;
    for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++count;
    return count;
  }
  static std::string Both(const Process& client, const Process& server) {
    return "client:\n" + client.Out() + client.Err() + "\nserver:\n" + server.Out() + server.Err();
  }
};

TEST_F(RulesTest, RpingIsDisconnectedAtAMessageAndBothEndsKnow) {
  const uint16_t port = FreePort();
  const auto server = Serve("rping -s -a 127.0.0.1 -p PORT -v", port);
  ASSERT_FALSE(HasFailure());
  // For ever, but for the rule.
  const auto client =
      Start("rping -c -a 127.0.0.1 -p PORT -v", port, {"--rule", "disconnect message=10 direction=sent"});
  // Which of its threads rping ends by, and so with which exit code, is its own affair.
  EXPECT_TRUE(client->Wait(kSoon).has_value()) << Both(*client, *server);
  EXPECT_TRUE(server->Wait(kSoon).has_value()) << Both(*client, *server);
  EXPECT_EQ(Lines(client->Err(), "stagecoach: "), 1u) << client->Err();
  EXPECT_TRUE(Says(client->Err(),
                   "stagecoach: rule 'disconnect message=10 direction=sent' fired: connection 1, "
                   "message 10 sent ("))
      << client->Err();
  for (const Process* const end : {client.get(), server.get()}) {
    EXPECT_TRUE(Says(end->Out() + end->Err(), "DISCONNECT EVENT") || Says(end->Err(), "cq completion failed"))
        << Both(*client, *server);
  }
  EXPECT_EQ(Lines(server->Err(), "stagecoach: "), 0u) << server->Err();
}

// The rule may as well be the server's, and of one of its clients alone.
TEST_F(RulesTest, AServerLosesOneOfItsClients) {
  const uint16_t port = FreePort();
  const auto server =
      Serve("rping -s -P -a 127.0.0.1 -p PORT", port, {"--rule", "disconnect connection=2 kind=send message=3"});
  ASSERT_FALSE(HasFailure());
  std::vector<bool> disconnected;
  for (int i = 0; i < 3; ++i) {
    const auto client = Start("rping -c -a 127.0.0.1 -p PORT -C 5 -V", port);
    EXPECT_TRUE(client->Wait(kSoon).has_value()) << Both(*client, *server);
    // What it was waiting for when the connection ended.
    disconnected.push_back(Says(client->Out() + client->Err(), "wait for RDMA_"));
  }
  EXPECT_EQ(disconnected, (std::vector<bool>{false, true, false})) << server->Err();
  EXPECT_TRUE(Says(server->Err(), "fired: connection 2, message 3 ")) << server->Err();
}

TEST_F(RulesTest, PingpongIsDisconnectedAtAMessageAndBothEndsKnow) {
  if (!OnRoce()) GTEST_SKIP() << "ibv_rc_pingpong connects its QPs by hand, which InfiniBand alone has";
  const uint16_t port = FreePort();
  const std::string command = "ibv_rc_pingpong -g 0 -n 100000000 -p PORT";
  const auto server = Serve(command, port, {"--rule", "disconnect message=100 direction=sent"});
  ASSERT_FALSE(HasFailure());
  const auto client = Start(command + " 127.0.0.1", port);
  EXPECT_EQ(client->Wait(kSoon), 1) << Both(*client, *server);
  EXPECT_EQ(server->Wait(kSoon), 1) << Both(*client, *server);
  EXPECT_TRUE(Says(server->Err(), "message 100 sent (send)")) << server->Err();
  for (const Process* const end : {client.get(), server.get()}) {
    EXPECT_TRUE(Says(end->Err(), "Failed status ")) << Both(*client, *server);
  }
  EXPECT_TRUE(Says(server->Err(), "(12) for wr_id")) << server->Err();
}

TEST_F(RulesTest, LossIsSurvivedByRetries) {
  if (!OnRoce()) GTEST_SKIP() << "iWARP loses nothing";
  const uint16_t port = FreePort();
  const std::string command = "ibv_rc_pingpong -g 0 -c -n 500 -p PORT";
  const auto server = Serve(command, port, {"--rule", "drop message=50 segment=1 attempt=1 direction=sent"});
  ASSERT_FALSE(HasFailure());
  const auto client = Start(command + " 127.0.0.1", port);
  EXPECT_EQ(client->Wait(), 0) << Both(*client, *server);
  EXPECT_EQ(server->Wait(kSoon), 0) << Both(*client, *server);
  EXPECT_EQ(Lines(server->Err(), "stagecoach: "), 1u) << server->Err();
  EXPECT_TRUE(Says(server->Err(), "fired: connection 1, message 50 sent (send)")) << server->Err();
}

TEST_F(RulesTest, ARuleThatNeverFiresIsNamedAtTheEnd) {
  const uint16_t port = FreePort();
  const auto server = Serve("rping -s -a 127.0.0.1 -p PORT -C 5", port);
  ASSERT_FALSE(HasFailure());
  const auto client = Start("rping -c -a 127.0.0.1 -p PORT -C 5", port, {"--rule", "stall message=1000"});
  EXPECT_TRUE(HasEndedWell(client->Wait(), *client)) << Both(*client, *server);
  EXPECT_EQ(Lines(client->Err(), "stagecoach: "), 1u) << client->Err();
  EXPECT_TRUE(Says(client->Err(), "stagecoach: rule 'stall message=1000' never fired: 1 connection, "))
      << client->Err();
}

// What uses no device says nothing, whether a program of its own or a child of one that does.
TEST_F(RulesTest, WhoUsesNoVerbsSaysNothing) {
  const auto none = Start("ls " + base_, 0, {"--rule", "disconnect message=10"});
  EXPECT_EQ(none->Wait(), 0);
  EXPECT_EQ(none->Err(), "");
  // What stands behind the program is the program's, whatever it looks like.
  const auto echo = Start("echo --rule disconnect message=4", 0, {"--rule", "disconnect"});
  EXPECT_EQ(echo->Wait(), 0) << echo->Err();
  EXPECT_EQ(echo->Out(), "--rule disconnect message=4\n");
  // ibv_devices opens none.
  const auto listed = Start("ibv_devices", 0, {"--rule", "disconnect message=10"});
  EXPECT_EQ(listed->Wait(), 0);
  EXPECT_LE(Lines(listed->Err(), "stagecoach: "), 1u) << listed->Err();
}

TEST_F(RulesTest, RulesAreCheckedBeforeTheProgramStarts) {
  const auto complaint = [&](std::vector<std::string> rules) {
    std::vector<std::string> options;
    for (std::string& rule : rules) {
      options.emplace_back("--rule");
      options.push_back(std::move(rule));
    }
    const auto run = Start("touch " + base_ + "/started", 0, options);
    EXPECT_EQ(run->Wait(), 125);
    EXPECT_FALSE(std::filesystem::exists(base_ + "/started"));
    return run->Err();
  };
  EXPECT_EQ(complaint({"stall message=7", "disconnect mesage=10"}),
            "stagecoach: run: --rule: 'mesage' is no condition; did you mean message?\n"
            "  disconnect mesage=10\n"
            "             ^~~~~~\n");
  EXPECT_EQ(complaint({" "}), "stagecoach: run: --rule: there is no rule in it; one is 'disconnect message=10'\n");
  // Each has no more than there may be, and all of them together do.
  std::string many;
  for (int i = 0; i < 200; ++i) many += "stall message=900;";
  EXPECT_EQ(complaint({many, many}), "stagecoach: run: --rule: more than 256 rules of one device\n");
  if (OnRoce()) return;
  EXPECT_TRUE(Says(complaint({"drop message=3"}), "'drop message=3': iWARP cannot lose a segment"));
}

// Without `stagecoach run` in between nobody checks the variable but the library.
TEST_F(RulesTest, WithRulesThatAreWrongNoDeviceCanBeOpened) {
  const auto run = Start("env STAGECOACH_RULES=disconect ibv_devinfo");
  EXPECT_NE(run->Wait(), 0);
  EXPECT_TRUE(Says(run->Err(), "stagecoach: STAGECOACH_RULES: 'disconect' is no action; did you mean disconnect?"))
      << run->Err();
  EXPECT_TRUE(Says(run->Err(), "Failed to open device")) << run->Err();
}

}  // namespace
}  // namespace stagecoach::tests
