// SessionProgram: an RPC client of the model service whose calls outlive connections (rpcrdma/api/session.h), that
// knows what each answer must be, and which failures it may meet.
//
// It sees no connection. Why one ended, or could not be made, is judged all the same, from what the session traces of
// it: nothing but the scenario excuses either.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/trace.h"
#include "rpcrdma/api/session.h"
#include "scenarios/runner/caller_program.h"

namespace stagecoach::scenario {

class SessionProgram final : public CallerProgram, private TraceSink {
 public:
  // `spec` and `stage` outlive the program. `index` makes the numbers of its calls.
  SessionProgram(Stage& stage, const Client& spec, uint32_t index);
  ~SessionProgram() override;

  void Probe(bool warm) override;
  std::optional<size_t> calls_open() const override {
    return calls_.size() + (session_ != nullptr ? session_->outstanding() : 0);
  }
  std::string Describe() const override;

 private:
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

  void Open() override;
  bool IsOpen() const override { return session_ != nullptr; }
  // It takes calls as soon as it is there.
  bool IsOpening() const override { return session_ == nullptr; }
  bool Ready() override { return session_ != nullptr && !closing(); }
  rpcrdma::CallId Send(CallUnderWay& call, rpcrdma::Client::CallHandler handler) override;
  void Cancel(const CallUnderWay& call) override;
  void Close(std::function<void()> done) override;
  void Destroy() override;
  void Resume() override { Open(); }
  std::string Judge(const CallUnderWay& call, const rpcrdma::CallError& error) override;
  void OnOver(const CallUnderWay& call, const Outcome& outcome) override;

  void GiveUp();
  void NextProbe();
  bool MayBeLost(uint64_t number, const Connection& connection) const;
  // What it may take to have a connection again, attempts that fail included, and whether a call that started then may
  // have had to wait for that.
  Duration LongestReconnect() const;
  bool ReconnectsSince(Instant started) const;
  bool IsKeptFromConnecting() const;
  // Begun when the oldest connection there is was.
  Instant OldestConnection() const;

  std::unique_ptr<rpcrdma::Session> session_;
  std::string name_;  // the session's, in the trace
  uint32_t sessions_ = 0;
  std::map<uint64_t, Connection> connections_;  // by number
  uint64_t losses_ = 0;                         // connections that ended, and attempts that failed
  std::optional<Instant> last_loss_;
  std::optional<Instant> last_timeout_;  // of a call that was sent
  std::vector<Cancelled> cancelled_;
};

}  // namespace stagecoach::scenario
