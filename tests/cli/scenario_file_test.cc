// stagecoach sim FILE: whatever file is handed in, what is wrong with it is said in text that a terminal can show.
#include "tests/cli/cli_fixture.h"

namespace stagecoach::tests {
namespace {

class ScenarioFileTest : public CliTest {
 protected:
  // What is said of a file with this text.
  std::string Said(const std::string& text) {
    WriteFile(local_ / "scenario", text);
    return SaidOf((local_ / "scenario").string());
  }
  std::string SaidOf(const std::string& file) {
    const Outcome outcome = Run({"sim", file});
    EXPECT_EQ(outcome.code, 2) << outcome.out;
    const std::string begin = "stagecoach: sim: " + file;
    return outcome.err.starts_with(begin) ? outcome.err.substr(begin.size()) : outcome.err;
  }
};

TEST_F(ScenarioFileTest, WhatIsWrongIsSaidWithItsPlace) {
  EXPECT_EQ(Said(""), ": is empty\n");
  EXPECT_EQ(SaidOf((local_ / "none").string()), ": No such file or directory\n");
  EXPECT_EQ(SaidOf(local_.string()), ": Is a directory\n");
  const std::string unknown = Said("name: \"x\"\nnothing: 1\n");
  EXPECT_TRUE(unknown.starts_with(":2:8: ")) << unknown;
  EXPECT_NE(unknown.find("nothing"), std::string::npos) << unknown;
}

TEST_F(ScenarioFileTest, AWrongRuleIsSaidWithItsHostItsFieldAndItsPlace) {
  EXPECT_EQ(Said("host { name: \"a\" } host { name: \"b\" device { rule: \"disconect\" } }\n"),
            ": host.device.rule[0]: 'disconect' is no action; did you mean disconnect?\n  disconect\n  ^~~~~~~~~\n"
            "(of host \"b\")\n");
}

TEST_F(ScenarioFileTest, RulesOfACommandComeOnTopOfTheFiles) {
  WriteFile(local_ / "scenario",
            "host { name: \"a\" } host { name: \"b\" device { rule: \"delay=1us\" } } service { host: \"a\" }\n"
            "client { name: \"c\" host: \"b\" server: \"a\" call { repeat: 9 } }\n");
  const std::string file = (local_ / "scenario").string();
  const auto printed = [&](const std::vector<std::string>& rules) {
    std::vector<std::string> arguments = {"sim", file, "--print"};
    for (const std::string& rule : rules) arguments.insert(arguments.end(), {"--rule", rule});
    const Outcome outcome = Run(arguments);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.out;
  };
  const std::string both = printed({"stall message=900"});
  EXPECT_NE(both.find("rule: \"stall message=900\"", both.find("rule: \"stall message=900\"") + 1), std::string::npos);
  const std::string one = printed({"b: disconnect connection=1 message=4"});
  const std::string both_of_b = "rule: \"delay=1us\"\n    rule: \"disconnect connection=1 message=4\"";
  EXPECT_NE(one.find(both_of_b), std::string::npos) << one;
  EXPECT_EQ(printed({" b :disconnect connection=1 message=4 "}), one);
  const Outcome cut =
      Run({"sim", file, "--rule", "b: disconnect connection=1 kind=send message=4", "--until", "action=disconnect"});
  EXPECT_EQ(cut.code, 0) << cut.err;
  EXPECT_NE(cut.out.find("injection.fired rule=2 action=disconnect"), std::string::npos) << cut.out;
  EXPECT_EQ(Run({"sim", "--count", "2", "--rule", "stall message=9"}).code, 2);
}

TEST_F(ScenarioFileTest, WhatBecameOfRulesIsSaid) {
  // As docs/injections.md has it.
  WriteFile(local_ / "cut.textproto",
            "host { name: \"a\" }\n"
            "host { name: \"b\" device { rule: \"disconnect connection=1 kind=send message=5\" } }\n"
            "service { host: \"a\" }\n"
            "client { name: \"c\" host: \"b\" server: \"a\" call { repeat: 9 } }\n");
  const Outcome outcome = Run({"sim", (local_ / "cut.textproto").string(), "--rule", "a: stall message=1000"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_NE(
      outcome.out.find("\na: rule 'stall message=1000' never fired: 2 connections, 7 messages sent and 7 received\n"
                       "b: rule 'disconnect connection=1 message=5 kind=send' fired 1 time\n"),
      std::string::npos)
      << outcome.out;
  // As docs/simulation.md has it: what is shown there is to be seen.
  const Outcome seed = Run({"sim", "--seed", "17", "--rule", "a: disconnect message=2"});
  EXPECT_EQ(seed.code, 0) << seed.err;
  EXPECT_NE(seed.out.find("\na: rule 'disconnect message=2' fired "), std::string::npos) << seed.out;
}

TEST_F(ScenarioFileTest, WhatIsWrongWithARuleOfACommandIsSaidOnce) {
  WriteFile(local_ / "scenario",
            "host { name: \"a\" } host { name: \"b\" device { rule: \"delay=1us\" } } service { host: \"a\" }\n"
            "client { name: \"c\" host: \"b\" server: \"a\" call { repeat: 9 } }\n");
  const auto said = [&](const std::string& rule) {
    const Outcome outcome = Run({"sim", (local_ / "scenario").string(), "--rule", rule});
    EXPECT_EQ(outcome.code, 2) << outcome.out;
    return outcome.err;
  };
  EXPECT_EQ(said("x: stall"),
            "stagecoach: sim: --rule: before the colon of 'x: stall' stands 'x', and no host of this world has that "
            "name; there are a, b\n");
  // Whoever takes a colon for something else hears what it is.
  EXPECT_EQ(said("disconnect message:10"),
            "stagecoach: sim: --rule: before the colon of 'disconnect message:10' stands 'disconnect message', and no "
            "host of this world has that name; there are a, b\n");
  EXPECT_EQ(said("drop"),
            "stagecoach: sim: --rule: 'drop': iWARP cannot lose a segment: TCP carries it or the connection ends, and "
            "one that was missing would be a fault of the peer; the profile roce has loss, and disconnect ends a "
            "connection\n(of host \"a\")\n");
  // Whatever the file has, it is the word of the command that is at fault.
  EXPECT_EQ(said("b: stall mesage=3"),
            "stagecoach: sim: --rule: 'mesage' is no condition; did you mean message?\n"
            "  stall mesage=3\n"
            "        ^~~~~~\n(of host \"b\")\n");
  EXPECT_EQ(said("b:"),
            "stagecoach: sim: --rule: there is no rule in it; one is 'disconnect message=10'\n(of host \"b\")\n");
  std::string most;
  for (int i = 0; i < 256; ++i) most += "stall message=900;";
  EXPECT_EQ(said("b: " + most), "stagecoach: sim: --rule: more than 256 rules of one device\n(of host \"b\")\n");
}

TEST_F(ScenarioFileTest, OldWordsAreReadAndKeptInWhatIsSaid) {
  EXPECT_EQ(Said("host { name: \"a\" } host { name: \"b\" device { fault { kind: LOSE_PACKET } } }\n")
                .find(": host.device.fault[0].kind: LOSE_PACKET: iWARP cannot lose a segment"),
            0u);
  WriteFile(local_ / "old",
            "host { name: \"a\" } host { name: \"b\" device { fault { kind: DELAY_COMPLETION delay_ns: 0 } } }\n"
            "service { host: \"a\" } client { name: \"c\" host: \"b\" server: \"a\" call { repeat: 9 } }\n"
            "fault { kind: FORGET a: \"a\" at_ns: 1000000000 }\n");
  const Outcome played = Run({"sim", (local_ / "old").string()});
  EXPECT_EQ(played.code, 0) << played.err;
  EXPECT_NE(played.out.find("2 hosts, 1 services, 1 clients, 1 injections;"), std::string::npos) << played.out;
}

TEST_F(ScenarioFileTest, AFileWithoutAnEndIsNotReadToIt) {
  EXPECT_EQ(SaidOf("/dev/zero"), ": longer than the 4194304 bytes that a scenario may have\n");
}

TEST_F(ScenarioFileTest, NothingOfTheFileOrOfItsNameReachesATerminalAsItIs) {
  WriteFile(local_ / "\x1b[31mred", "name: \x1b[31m\n");
  const Outcome outcome = Run({"sim", (local_ / "\x1b[31mred").string()});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_NE(outcome.err, "");
  EXPECT_EQ(outcome.err.find('\x1b'), std::string::npos) << outcome.err;
}

}  // namespace
}  // namespace stagecoach::tests
