// ClientProgram: an RPC client of the model service that makes one connection after the other, and knows what each
// answer must be, and which failures it may meet.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "rpcrdma/api/client.h"
#include "scenarios/runner/caller_program.h"

namespace stagecoach::scenario {

class ClientProgram final : public CallerProgram {
 public:
  // `spec` and `stage` outlive the program. `index` makes the numbers of its calls.
  ClientProgram(Stage& stage, const Client& spec, uint32_t index);
  ~ClientProgram() override;

  void Kill() override;
  void Probe(bool warm) override;
  std::optional<size_t> calls_open() const override {
    return calls_.size() + (client_ != nullptr ? client_->outstanding() + client_->abandoned() : 0);
  }
  size_t records() const override {
    if (client_ == nullptr) return 0;
    const rpcrdma::ClientHoldings held = client_->holdings();
    return held.call_records + held.registration_records;
  }
  std::string Describe() const override;

 private:
  // Connects.
  void Open() override;
  bool IsOpen() const override { return client_ != nullptr; }
  bool IsOpening() const override { return connecting_; }
  bool Ready() override;
  rpcrdma::CallId Send(CallUnderWay& call, rpcrdma::Client::CallHandler handler) override;
  void Cancel(const CallUnderWay& call) override;
  void Close(std::function<void()> done) override;
  // Outstanding calls end with kClosed.
  void Destroy() override;
  void Resume() override { Pump(); }
  std::string Judge(const CallUnderWay& call, const rpcrdma::CallError& error) override;
  void OnOver(const CallUnderWay& call, const Outcome& outcome) override;

  void OnConnected(Result<void, rpcrdma::CallError> result);
  // Where places are few, who has nothing to do gives its own back.
  void MakeRoom();
  void NextProbe();
  void GoOnProbing(ProbeRound::Then then);
  void ProbeAnotherConnection();
  bool LacksRoom() const;
  // Whether the connection may have ended.
  bool MayBeLost() const;
  // One has had its time, which ends the connection if it was sent.
  bool AnyCallLate() const;
  static bool NeverSent(const rpcrdma::CallError& error);
  // An injection may have ended the connection.
  bool Severed() const;

  std::unique_ptr<rpcrdma::Client> client_;
  bool connected_ = false;
  bool connecting_ = false;
  uint32_t attempts_ = 0;  // to connect, since the last success
  // Of this connection:
  std::string connection_name_;
  Instant connection_since_{};
  std::optional<Instant> established_;
  bool timed_out_ = false;  // a call that was sent on it did, which ends it
  // Calls that were cancelled after they were sent: when each would have timed out.
  std::vector<std::optional<Instant>> cancelled_;
  uint32_t calls_on_connection_ = 0;
  // Beside the one that is kept:
  std::unique_ptr<rpcrdma::Client> another_;
  uint32_t others_ = 0;         // so many so far
  uint32_t unsent_probes_ = 0;  // in a row
  uint32_t turned_away_ = 0;    // in a row, by a listener without room
};

}  // namespace stagecoach::scenario
