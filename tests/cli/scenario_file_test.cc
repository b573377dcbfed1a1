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
