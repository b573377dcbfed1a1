// Stage: the world a scenario plays in, as its programs see it.
//
// Knows the hosts, which fault touched whom and when, and where to report what is wrong. A program asks Disturbed() to
// judge whether a failure it met is one it may meet: without a cause, a failure is a violation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/prng.h"
#include "base/trace.h"
#include "emu/world/simulated_world.h"
#include "scenarios/proto/scenario.pb.h"
#include "scenarios/runner/model.h"
#include "scenarios/runner/violations.h"

namespace stagecoach::scenario {

// The emulator's profile with what `device` changes.
emu::DeviceProfile MakeProfile(const Device& device);
emu::LinkOptions MakeLink(const Link& link);

class Stage {
 public:
  // `scenario` and `trace` outlive the stage. Installs a simulated world as the current one.
  Stage(const Scenario& scenario, TraceSink* trace, std::shared_ptr<emu::CaptureSink> capture);
  // Everything that uses verbs is gone by now.
  ~Stage();
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;

  const Scenario& scenario() const { return scenario_; }
  emu::SimulatedWorld& world() { return *world_; }
  emu::SimWorld& sim() { return world_->sim(); }
  Instant Now() const { return world_->sim().Now(); }
  TraceSink* trace() const { return trace_; }
  // Callbacks of a host's programs run on this.
  EventLoop& loop(const std::string& host) { return world_->fabric(host).program_loop(); }
  std::string AddressOf(const std::string& host) const;
  Prng Luck(std::string_view name) const { return prng_.Fork(name); }

  Violations& violations() { return violations_; }
  void Violate(std::string_view rule, std::string text) { violations_.Add(Now(), rule, std::move(text)); }
  Executions& executions() { return executions_; }

  // Something happens, from now until `until`, that what runs between these hosts may notice, then or a little later:
  // time-outs that began meanwhile take their time. An empty `b`: everything of `a`.
  void NoteDisturbance(const std::string& a, const std::string& b, Instant until);
  // A first XID for a connection of this name.
  uint32_t FirstXid(std::string_view connection) const;
  // Whether a failure between these hosts, of something that lives since `since`, has a cause; what was over just
  // before counts too, as a service that restarts refuses for a moment.
  bool Disturbed(const std::string& a, const std::string& b, Instant since) const;
  // One of the hosts lost power or forgot its connections, at some time: what waits for it without a time-out may wait
  // for ever.
  void NoteSilence(const std::string& host) { silent_.push_back(host); }
  bool WentSilent(std::string_view a, std::string_view b) const {
    return std::any_of(silent_.begin(), silent_.end(), [&](const auto& host) { return host == a || host == b; });
  }
  // How long a call may take when nothing is wrong: generously counted, from all that is to be moved, the slowest link,
  // and what devices and services add.
  Duration Patience() const { return patience_; }
  // The run is over: what still waits is woken with an error, and that is no failure.
  void NoteEnd() { over_ = true; }
  bool IsOver() const { return over_; }
  // The host will not be started again.
  void NoteGone(const std::string& host) { gone_.push_back(host); }
  bool IsGone(std::string_view host) const { return std::find(gone_.begin(), gone_.end(), host) != gone_.end(); }
  // Devices have the habits the scenario gives them, or no longer.
  void SetHabits(bool on);
  // The host's device fails registrations now and then, or did so a moment ago.
  bool FailsRegistrations(const std::string& host) const;

 private:
  struct Disturbance {
    std::string a;
    std::string b;
    Instant until{};
  };

  const Scenario& scenario_;
  TraceSink* const trace_;
  const Prng prng_;
  Violations violations_;
  Executions executions_;
  emu::SimulatedWorld* world_ = nullptr;  // installed
  std::vector<Disturbance> disturbances_;
  bool habits_ = true;
  bool over_ = false;
  Instant habits_until_{};
  const Duration patience_;
  std::vector<std::string> gone_;
  std::vector<std::string> silent_;
};

}  // namespace stagecoach::scenario
