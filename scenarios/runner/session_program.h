// SessionProgram: an RPC client of the model service whose calls outlive connections (rpcrdma/api/session.h), that
// knows what each answer must be, and which failures it may meet.
//
// It sees no connection. Why one ended, or could not be made, is judged all the same, from what the session traces of
// it: nothing but the scenario excuses either.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "rpcrdma/api/session.h"
#include "scenarios/runner/guarded_memory.h"
#include "scenarios/runner/model_call.h"
#include "scenarios/runner/program.h"
#include "scenarios/runner/stage.h"

namespace stagecoach::scenario {

class SessionProgram final : public Program, private TraceSink {
 public:
  // `spec` and `stage` outlive the program. `index` makes the numbers of its calls.
  SessionProgram(Stage& stage, const Client& spec, uint32_t index);
  ~SessionProgram() override;

  const std::string& host() const override { return spec_.host(); }
  void Start() override;
  void Kill() override;
  bool Idle() const override;
  void Probe(bool warm) override;
  void Stop() override;
  std::optional<size_t> calls_open() const override {
    return pending_.size() + (session_ != nullptr ? session_->outstanding() : 0);
  }
  std::string Describe() const override;

 private:
  using Kind = rpcrdma::CallError::Kind;
  using Outcome = Result<rpcrdma::Reply, rpcrdma::CallError>;

  struct Pending : ModelCall {
    using ModelCall::ModelCall;
    Instant started{};
    Instant since{};  // of the oldest connection that it may go on
    uint64_t losses = 0;
    rpcrdma::CallId id = 0;
    bool cancelled = false;
    bool closed = false;  // its session was closed, or destroyed, while it was under way
    bool probe = false;
    EventLoop::TimerId cancel_timer = 0;
  };
  // One that is being made, or there.
  struct Connection {
    Instant since{};
    std::optional<Instant> established;
    bool keepalive_unanswered = false;
  };

  struct Cancelled {
    Instant when{};
    std::optional<Instant> due;  // when it would have timed out
  };

  // What the session traces, on its way to the run's sink.
  void OnEvent(Instant now, std::string_view component, std::string_view event,
               std::initializer_list<TraceFact> facts) override;
  void OnAttemptFailed(const Connection& connection, std::string_view why);
  void OnLost(uint64_t number, const Connection& connection, std::string_view why);

  void NoteLoss() {
    ++losses_;
    last_loss_ = stage_.Now();
  }

  void Open();
  // Client::close_ns and Client::destroy_ns.
  void ArmEnds();
  void CloseAmidst();
  void DestroyAmidst();
  void Destroy();
  void GiveUp();
  void CheckAllToldOfEnd(const char* how);
  void NextProbe();
  void StartProbes(uint32_t count, const Call& call);
  void EndProbe(bool failed, const std::string& how);
  void Pump();
  void Begin(const Call& spec, bool probe);
  void OnOutcome(uint64_t number, Outcome outcome);
  // Why the error must not be; empty when it may. Counts it.
  std::string Judge(const Pending& pending, const rpcrdma::CallError& error);
  bool MayBeLost(uint64_t number, const Connection& connection) const;
  bool Late(const Pending& pending) const;
  // What it may take to have a connection again, attempts that fail included, and whether a call that started then may
  // have had to wait for that.
  Duration LongestReconnect() const;
  bool ReconnectsSince(Instant started) const;
  // Begun when the oldest connection there is was.
  Instant OldestConnection() const;
  std::string Who() const { return "session " + spec_.name(); }

  Stage& stage_;
  const Client& spec_;
  const Service& service_;
  const Duration patience_;
  std::vector<const Call*> script_;  // spec_.call, repeats unrolled
  size_t next_ = 0;
  uint64_t next_number_;
  bool started_ = false;
  bool probing_ = false;
  uint32_t probe_step_ = 0;  // of this round
  uint32_t probes_together_ = 0;
  uint32_t probes_open_ = 0;  // calls of this step
  bool probe_step_failed_ = false;
  uint32_t failed_probes_ = 0;  // steps, in this round
  bool stopping_ = false;
  bool hopeless_ = false;  // its server is gone for good
  uint32_t incarnation_ = 0;
  std::unique_ptr<ModelService> reverse_;  // what it serves to its server; null: nothing
  std::unique_ptr<rpcrdma::Session> session_;
  std::string name_;  // the session's, in the trace
  uint32_t sessions_ = 0;
  bool closing_ = false;
  bool inside_session_ = false;                 // it is being destroyed
  std::map<uint64_t, Connection> connections_;  // by number
  Stage::Attempts connects_;
  uint64_t losses_ = 0;  // connections that ended, and attempts that failed
  std::optional<Instant> last_loss_;
  std::optional<Instant> last_timeout_;  // of a call that was sent
  std::vector<Cancelled> cancelled_;
  Instant last_start_{};
  EventLoop::TimerId start_timer_ = 0;
  EventLoop::TimerId pause_timer_ = 0;
  EventLoop::TimerId close_timer_ = 0;
  EventLoop::TimerId destroy_timer_ = 0;
  std::map<uint64_t, Pending> pending_;
  std::vector<uint64_t> unsent_;  // numbers
  ColdStorage cold_;
};

}  // namespace stagecoach::scenario
