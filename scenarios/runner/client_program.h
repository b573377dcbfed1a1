// ClientProgram: an RPC client of the model service that knows what each answer must be, and which failures it may
// meet.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "rpcrdma/api/client.h"
#include "scenarios/runner/guarded_memory.h"
#include "scenarios/runner/model_call.h"
#include "scenarios/runner/program.h"
#include "scenarios/runner/stage.h"

namespace stagecoach::scenario {

class ClientProgram final : public Program {
 public:
  // `spec` and `stage` outlive the program. `index` makes the numbers of its calls.
  ClientProgram(Stage& stage, const Client& spec, uint32_t index);
  ~ClientProgram() override;

  const std::string& host() const override { return spec_.host(); }
  void Start() override;
  void Kill() override;
  bool Idle() const override;
  void Probe(bool warm) override;
  void Stop() override;
  std::optional<size_t> calls_open() const override {
    return pending_.size() + (client_ != nullptr ? client_->outstanding() + client_->abandoned() : 0);
  }
  size_t records() const override {
    if (client_ == nullptr) return 0;
    const rpcrdma::ClientHoldings held = client_->holdings();
    return held.call_records + held.registration_records;
  }
  std::string Describe() const override;

 private:
  using Kind = rpcrdma::CallError::Kind;
  using Outcome = Result<rpcrdma::Reply, rpcrdma::CallError>;

  struct Pending : ModelCall {
    using ModelCall::ModelCall;
    Instant started{};
    rpcrdma::CallId id = 0;
    bool cancelled = false;
    bool closed = false;  // its client was closed, or destroyed, while it was under way
    bool probe = false;
    EventLoop::TimerId cancel_timer = 0;
  };

  void Connect();
  void ConnectAfter(Duration delay);
  void OnConnected(Result<void, rpcrdma::CallError> result);
  // Drops the connection at once; outstanding calls end with kClosed.
  void Drop();
  // Client::close_ns and Client::destroy_ns.
  void ArmEnds();
  void CloseAmidst();
  void DestroyAmidst();
  void CheckAllToldOfEnd(const char* how);
  void NextProbe();
  void StartProbes(uint32_t count, const Call& call);
  void EndProbe(bool failed, const std::string& how);
  void ProbeAnotherConnection();
  bool LacksRoom() const;
  void Pump();
  // Where places are few, who has nothing to do gives its own back.
  void MakeRoom();
  void Begin(const Call& spec, bool probe);
  void OnOutcome(uint64_t number, Outcome outcome);
  // Why the error must not be; empty when it may. Counts it.
  std::string Judge(const Pending& pending, const rpcrdma::CallError& error);
  // Whether the connection may have ended.
  bool MayBeLost() const;
  // Its time is up, which ends the connection if it was sent.
  bool Late(const Call& call, Instant started) const;
  bool AnyCallLate() const;
  // A call that failed so was not sent.
  static bool NeverSent(rpcrdma::CallError::Kind kind);
  // Nor has its result been written to.
  static bool LeavesResultAlone(rpcrdma::CallError::Kind kind);
  // Calls that were not sent were not executed either.
  void CheckUnsent();
  // A fault may have ended the connection.
  bool Severed() const;
  std::string Who() const { return "client " + spec_.name(); }

  Stage& stage_;
  const Client& spec_;
  const Duration patience_;
  const Service& service_;
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
  uint32_t unsent_probes_ = 0;  // in a row
  uint32_t others_ = 0;         // connections made beside the one that is kept
  bool stopping_ = false;
  bool hopeless_ = false;  // cannot work for a reason that will not go away
  uint32_t incarnation_ = 0;
  uint32_t attempts_ = 0;  // to connect, since the last success
  Stage::Attempts connects_;
  std::unique_ptr<ModelService> reverse_;  // what it serves to its server; null: nothing
  std::unique_ptr<rpcrdma::Client> client_;
  bool connected_ = false;
  bool connecting_ = false;
  bool closing_ = false;
  bool inside_client_ = false;  // it is being destroyed
  std::string connection_name_;
  std::unique_ptr<rpcrdma::Client> another_;
  bool timed_out_ = false;  // a call sent on this connection did, which ends it
  // Calls of this connection that were cancelled after they were sent: when each would have timed out.
  std::vector<std::pair<Call, Instant>> cancelled_;
  uint32_t calls_on_connection_ = 0;
  Instant connection_since_{};
  std::optional<Instant> established_;
  Instant last_start_{};
  EventLoop::TimerId start_timer_ = 0;  // to connect
  EventLoop::TimerId pause_timer_ = 0;  // to make the next call
  EventLoop::TimerId close_timer_ = 0;
  EventLoop::TimerId destroy_timer_ = 0;
  std::map<uint64_t, Pending> pending_;
  std::vector<uint64_t> unsent_;  // numbers
  ColdStorage cold_;
};

}  // namespace stagecoach::scenario
