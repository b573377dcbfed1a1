// Seeds in the ordinary tests: each is played twice, breaks no rule and leaves the same trace. Then the scenarios that
// once broke one (scenarios/regressions).
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include "scenarios/runner/run.h"
#include "scenarios/swarm/draw.h"

namespace stagecoach {
namespace {

using scenario::RunReport;
using scenario::Scenario;

void PlayTwice(const Scenario& scenario, const std::string& replay) {
  // A crash would not tell.
  std::fprintf(stderr, "playing: %s\n", replay.c_str());
  const RunReport first = scenario::RunScenario(scenario);
  for (const auto& violation : first.violations) {
    ADD_FAILURE() << scenario.name() << ": " << violation.rule << ": " << violation.text << "\nreplay: " << replay;
  }
  const RunReport second = scenario::RunScenario(scenario);
  EXPECT_EQ(first.trace_hash, second.trace_hash) << scenario.name() << " is not deterministic\nreplay: " << replay;
  EXPECT_EQ(first.trace_events, second.trace_events);
}

// Fifty to a test, so that they can run side by side and a failure is near its name. Under sanitizers, which make each
// ten times as slow, the build asks for fewer.
uint64_t SeedsOfATest() {
  const char* const asked = std::getenv("STAGECOACH_TEST_SEEDS");
  return asked == nullptr ? 50 : std::strtoull(asked, nullptr, 10);
}

class SeedsTest : public ::testing::TestWithParam<uint64_t> {};

TEST_P(SeedsTest, BreakNoRuleAndLeaveTheSameTrace) {
  const uint64_t seeds = SeedsOfATest();
  ASSERT_GT(seeds, 0u);
  for (uint64_t seed = GetParam(); seed < GetParam() + seeds && !HasFailure(); ++seed) {
    PlayTwice(scenario::Draw(seed), "stagecoach sim --seed " + std::to_string(seed) + " --trace");
  }
}

INSTANTIATE_TEST_SUITE_P(TwoHundred, SeedsTest, ::testing::Values(1, 51, 101, 151));

TEST(Regressions, BreakNoRuleAnyMore) {
  int played = 0;
  for (const auto& entry : std::filesystem::directory_iterator("scenarios/regressions")) {
    if (entry.path().extension() != ".textproto") continue;
    std::ifstream file(entry.path());
    std::stringstream text;
    text << file.rdbuf();
    Scenario scenario;
    ASSERT_TRUE(google::protobuf::TextFormat::ParseFromString(text.str(), &scenario)) << entry.path();
    const auto read = scenario::ReadWritten(std::move(scenario));
    ASSERT_TRUE(read.has_value()) << entry.path() << ": " << read.error();
    PlayTwice(*read, "stagecoach sim " + entry.path().string() + " --trace");
    ++played;
  }
  EXPECT_GT(played, 0) << "no regressions found where they should be";
}

}  // namespace
}  // namespace stagecoach
