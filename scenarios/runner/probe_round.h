// ProbeRound: how a program shows, when all injections are over, that it works: by calls one after the other, by
// several at a time, and by one that is cancelled. A step that fails is done again, a few times.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "scenarios/runner/calls_under_way.h"
#include "scenarios/runner/stage.h"

namespace stagecoach::scenario {

// A probe may meet the remains of an injection: the connection it broke, whose end is heard of only now.
inline constexpr uint32_t kFailedProbesMax = 4;

// As many as there are at a time may be in its way, on a link that is slow.
Duration ProbeTimeout(const Stage& stage, const Client& client, const Call& call);

class ProbeRound {
 public:
  // Of the program `who`, in what is reported. `stage` and `spec` outlive the object.
  ProbeRound(Stage& stage, const Client& spec, const std::string& who) : stage_(stage), spec_(spec), who_(who) {}

  // Another round. `warm`: with more calls at a time than later. `at_a_time_max`: and never more than this.
  void Begin(bool warm, uint32_t at_a_time_max);
  void End() { under_way_ = false; }
  bool under_way() const { return under_way_; }

  // `count` times the same call, at a time.
  struct Step {
    Call call;
    uint32_t count = 0;
  };
  // Begins the step that it is time for. nullopt when what is left is the program's own.
  std::optional<Step> BeginStep();
  // So many of a program's own steps are behind it.
  uint32_t own_steps() const;

  enum class Then : uint8_t {
    kWait,      // for the other calls of this step, or, if the round was given up, for nothing
    kNextStep,  // BeginStep
    kSameStep,  // BeginStep: it has failed
  };
  // A call of this step is over.
  Then EndCall(const CallUnderWay& call, const Result<rpcrdma::Reply, rpcrdma::CallError>& outcome);
  // The same of what is no such call. `how` it failed.
  Then EndCall(bool failed, const std::string& how);

 private:
  Stage& stage_;
  const Client& spec_;
  const std::string who_;
  bool under_way_ = false;
  uint32_t at_a_time_ = 0;
  uint32_t step_ = 0;
  uint32_t open_ = 0;         // calls of this step
  bool step_failed_ = false;  // one of them has
  uint32_t failed_ = 0;       // steps, in this round
};

}  // namespace stagecoach::scenario
