// ClientProgram: an RPC client of the model service that knows what each answer must be, and which failures it may
// meet.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "rpcrdma/api/client.h"
#include "scenarios/runner/guarded_memory.h"
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
  void Probe() override;
  void Stop() override;
  std::string Describe() const override;

 private:
  using Kind = rpcrdma::CallError::Kind;
  using Outcome = Result<rpcrdma::Reply, rpcrdma::CallError>;

  struct Pending {
    uint64_t number = 0;
    Call spec;
    Instant started{};
    rpcrdma::CallId id = 0;
    bool cancelled = false;
    bool probe = false;
    GuardedBuffer argument;
    GuardedBuffer plain_argument;
    GuardedBuffer result;
    EventLoop::TimerId cancel_timer = 0;
  };

  void Connect();
  void ConnectAfter(Duration delay);
  Call ProbeCall() const;
  void OnConnected(Result<void, rpcrdma::CallError> result);
  // Drops the connection at once; outstanding calls end with kClosed.
  void Drop();
  void Pump();
  // Where places are few, who has nothing to do gives its own back.
  void MakeRoom();
  void Begin(const Call& spec, bool probe);
  void OnOutcome(uint64_t number, Outcome outcome);
  void CheckReply(Pending& pending, const rpcrdma::Reply& reply);
  // Why the error must not be; empty when it may. Counts it.
  std::string Judge(const Pending& pending, const rpcrdma::CallError& error);
  std::string JudgeConnecting(const rpcrdma::CallError& error) const;
  // Its time is up, which ends the connection.
  bool Late(const Pending& pending) const;
  bool AnyCallLate() const;
  bool ReplyMightNotFit(const Call& call) const;
  // So many that one header, or a device, may not hold them.
  bool NeedsManySegments(const Call& call) const;
  bool HasTightDevice() const;
  bool Disturbed() const;
  void Retire(Pending& pending);
  std::string Label(const Pending& pending, const char* what) const;

  Stage& stage_;
  const Client& spec_;
  const Service* service_ = nullptr;
  std::vector<const Call*> script_;  // spec_.call, repeats unrolled
  size_t next_ = 0;
  uint64_t next_number_;
  bool started_ = false;
  bool probing_ = false;
  uint32_t probes_left_ = 0;    // of this round
  uint32_t failed_probes_ = 0;  // in this round
  bool stopping_ = false;
  bool hopeless_ = false;  // cannot work for a reason that will not go away
  uint32_t incarnation_ = 0;
  uint32_t attempts_ = 0;  // to connect, since the last success
  std::unique_ptr<rpcrdma::Client> client_;
  bool connected_ = false;
  bool connecting_ = false;
  bool timed_out_ = false;  // a call of this connection did, which ends it
  // A call of this connection was cancelled: a server still at work for it may meet memory that is not valid any more,
  // which ends the connection.
  bool cancelled_ = false;
  uint32_t calls_on_connection_ = 0;
  Instant connection_since_{};
  Instant last_start_{};
  EventLoop::TimerId start_timer_ = 0;  // to connect
  EventLoop::TimerId pause_timer_ = 0;  // to make the next call
  std::map<uint64_t, Pending> pending_;
  ColdStorage cold_;
};

}  // namespace stagecoach::scenario
