// What is watched of a call is noticed, whoever makes it.
#include "scenarios/runner/calls_under_way.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace stagecoach::scenario {
namespace {

class CallsUnderWayTest : public ::testing::Test {
 protected:
  static Scenario OneHost() {
    Scenario scenario;
    scenario.add_host()->set_name("host");
    return scenario;
  }
  static Call Small() {
    Call spec;
    spec.set_argument_bytes(100);
    spec.set_result_bytes(100);
    return spec;
  }

  // A call that its caller says was not sent; returns its number.
  uint64_t Unsent(CallsUnderWay& calls) {
    CallUnderWay call = *calls.End(calls.Begin(Small(), /*probe=*/false).number);
    calls.NoteUnsent(call);
    calls.Retire(call);
    return call.number;
  }

  std::vector<std::string> Rules() {
    std::vector<std::string> rules;
    for (const Violation& violation : stage_.violations().list()) rules.push_back(violation.rule);
    return rules;
  }

  const Scenario scenario_ = OneHost();
  Stage stage_{scenario_, nullptr, nullptr};
};

using RulesOf = std::vector<std::string>;

TEST_F(CallsUnderWayTest, ACallThatWasNotSentIsNotExecutedLater) {
  {
    CallsUnderWay calls(stage_, "host", "client 0", 0);
    Unsent(calls);
  }
  EXPECT_EQ(Rules(), RulesOf());
  {
    CallsUnderWay calls(stage_, "host", "client 1", 1);
    stage_.executions()[Unsent(calls)].times = 1;
  }
  EXPECT_EQ(Rules(), RulesOf({"call.executed_unsent"}));
}

TEST_F(CallsUnderWayTest, ACallEndsOnce) {
  CallsUnderWay calls(stage_, "host", "client 0", 0);
  CallUnderWay call = *calls.End(calls.Begin(Small(), /*probe=*/false).number);
  EXPECT_FALSE(calls.End(call.number));
  EXPECT_EQ(Rules(), RulesOf({"call.completed_twice"}));
  calls.Retire(call);
}

TEST_F(CallsUnderWayTest, EachCallOfWhatIsClosedIsToldBeforeTheEnd) {
  CallsUnderWay calls(stage_, "host", "client 0", 0);
  const uint64_t told = calls.Begin(Small(), /*probe=*/false).number;
  calls.Begin(Small(), /*probe=*/false);
  calls.NoteClosed();
  const uint64_t later = calls.Begin(Small(), /*probe=*/false).number;
  CallUnderWay call = *calls.End(told);
  calls.Retire(call);
  calls.CheckAllTold("the client is closed");
  EXPECT_EQ(Rules(), RulesOf({"call.ended_untold"}));
  call = *calls.End(later);
  calls.Retire(call);
}

}  // namespace
}  // namespace stagecoach::scenario
