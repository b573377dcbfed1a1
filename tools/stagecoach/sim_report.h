// The texts of `stagecoach sim`: what happened, what failed, and how to see it again.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "scenarios/proto/scenario.pb.h"
#include "scenarios/swarm/isolated_run.h"
#include "scenarios/swarm/out_of_reach.h"
#include "tools/stagecoach/sim_options.h"

namespace stagecoach::cli {

std::string ScenarioText(const scenario::Scenario& scenario);

// What a run did, in lines; the last is the only one that differs from run to run, since wall time does.
std::string Summary(const scenario::Scenario& scenario, const scenario::Outcome& outcome);

// "FAILED: NAME at commit COMMIT: ", to be followed by the failure's name.
std::string FailureHead(const SimOptions& options, const scenario::Scenario& scenario);
// The world, `state` unless empty, and the command that plays it again with the option `how`.
std::string FailureTail(const SimOptions& options, const scenario::Scenario& scenario, std::string_view state,
                        std::string_view how);
// All of it, of an outcome that is a failure.
std::string FailureReport(const SimOptions& options, const scenario::Scenario& scenario,
                          const scenario::Outcome& outcome);

// As one word of a shell command.
std::string ShellWord(const std::string& text);

// "seed 17", or the file.
std::string Origin(const SimOptions& options, const scenario::Scenario& scenario);
// " --mutant NAME", if one is switched on.
std::string MutantOption(const SimOptions& options);
// " --profile NAME", if one was asked for.
std::string ProfileOption(const SimOptions& options);
std::string RuleOptions(const SimOptions& options);

// How often each mark was passed, in all runs of all processes. One that is listed as out of the swarm's reach is told
// apart from one that chance has not led to yet.
class MarkTotals {
 public:
  // The marks of this program, and scenarios/swarm/out_of_reach.cc.
  MarkTotals();
  MarkTotals(const std::vector<std::string>& names, std::span<const scenario::OutOfReach> out_of_reach);

  void Add(const scenario::Outcome& outcome);
  // A head with the sums, then a line for each mark, by name: how often it was passed, or "never"; its name; and where
  // it is listed, why. tools/dev/swarm adds up the lines of several processes.
  std::string Text() const;

 private:
  struct Total {
    uint64_t passed = 0;
    std::string_view reason;  // why it is out of reach; empty: it is not
    bool exists = false;
  };
  std::map<std::string, Total> totals_;
};

}  // namespace stagecoach::cli
