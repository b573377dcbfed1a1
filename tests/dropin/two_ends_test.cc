// Two processes of a program that was linked with the system's libraries (tests/interop/two_ends.cc), both on our iWARP
// device: what either end sees of connections that end well and badly. The words are those that ./dev interop dropin
// holds the kernel's siw against.

#include <fnmatch.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/dropin/dropin_fixture.h"

namespace stagecoach::tests {
namespace {

constexpr std::chrono::seconds kBound{120};

bool Matches(const std::string& pattern, const std::string& text) {
  return ::fnmatch(pattern.c_str(), text.c_str(), 0) == 0;
}

// The words declared for an end ("caller", "server") of a case between two of our devices: those of the last row that
// says something of it, as dropin.py has it.
std::string Declared(const std::string& what, const std::string& end) {
  std::ifstream in("tests/interop/dropin.tsv");
  std::string words = "nothing";
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream columns(line);
    std::vector<std::string> row;
    for (std::string column; std::getline(columns, column, '\t');) row.push_back(column);
    if (row.size() < 5) continue;
    if (Matches(row[0], what) && Matches(row[1], end) && Matches(row[2], "large segments") &&
        Matches(row[3], "ours-ours"))
      words = row[4];
  }
  return words;
}

std::map<std::string, std::string> WordsIn(const std::string& output) {
  std::map<std::string, std::string> words;
  std::istringstream in(output);
  for (std::string line; std::getline(in, line);) {
    const size_t tab = line.find('\t');
    if (tab != std::string::npos) words[line.substr(0, tab)] = line.substr(tab + 1);
  }
  return words;
}

class TwoEnds : public DropInTest {
 protected:
  static std::string Binary() { return (std::filesystem::current_path() / "tests/interop/two_ends").string(); }

  std::unique_ptr<Process> StartTwoEnds(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {StagecoachBinary(), "run", "--", Binary()});
    return std::make_unique<Process>(base_, arguments);
  }
};

TEST_F(TwoEnds, SeeWhatIsDeclared) {
  Process list(base_, {Binary(), "cases"});
  ASSERT_EQ(list.Wait(), 0) << list.Err();
  std::vector<std::string> cases;
  std::istringstream names(list.Out());
  for (std::string name; std::getline(names, name);) {
    if (name != "leave" && name != "stop") cases.push_back(name);
  }
  ASSERT_GT(cases.size(), 15u);

  const std::string port = std::to_string(FreePort());
  const auto server = StartTwoEnds({"serve", "127.0.0.1", port});
  ASSERT_TRUE(WaitUntil([&] { return SomebodyListens(static_cast<uint16_t>(std::stoi(port))) || !server->Running(); }));
  ASSERT_TRUE(server->Running()) << server->Err();
  std::string called;
  for (const std::vector<std::string>& each : {cases, {"leave"}, {"stop"}}) {
    std::vector<std::string> arguments = {"call", "127.0.0.1", port};
    arguments.insert(arguments.end(), each.begin(), each.end());
    const auto caller = StartTwoEnds(arguments);
    EXPECT_EQ(caller->Wait(kBound), 0) << caller->Out() << caller->Err();
    called += caller->Out();
  }
  EXPECT_EQ(server->Wait(), 0) << server->Out() << server->Err();

  const auto callers = WordsIn(called);
  const auto servers = WordsIn(server->Out());
  // By the last of which the server rejects, and exits at once.
  cases.insert(cases.end(), {"leave", "stop"});
  for (const std::string& name : cases) {
    ASSERT_TRUE(callers.contains(name)) << name;
    // How fast the first answer is depends on the machine, and whether there is one does not.
    if (name == "first message") {
      EXPECT_TRUE(callers.at(name).starts_with("answered")) << callers.at(name);
      continue;
    }
    EXPECT_PRED2(Matches, Declared(name, "caller"), callers.at(name)) << name << ", caller";
    // Some do not come to a connection.
    if (servers.contains(name)) {
      EXPECT_PRED2(Matches, Declared(name, "server"), servers.at(name)) << name << ", server";
    }
  }
  // Neither "rejection" nor "nobody listens" nor "stop" comes to a connection.
  EXPECT_EQ(servers.size() + 3, cases.size()) << server->Out();
}

}  // namespace
}  // namespace stagecoach::tests
