// PingPongProgram: two ordinary blocking programs on the stock verbs and rdma_cm API, one on each host, each on a fiber
// of its own: connect, Sends back and forth, disconnect. They block in rdma_get_cm_event and ibv_get_cq_event, as
// programs do.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "scenarios/runner/program.h"
#include "scenarios/runner/stage.h"

namespace stagecoach::scenario {

// One of the two ends.
class PingPongProgram final : public Program {
 public:
  enum class Role : uint8_t { kServer, kClient };

  // `spec` and `stage` outlive the program. A server knows its client's program: once that is over, waiting for a
  // connection is no work.
  PingPongProgram(Stage& stage, const PingPong& spec, uint32_t index, Role role, const PingPongProgram* client);

  const std::string& host() const override { return role_ == Role::kServer ? spec_.server() : spec_.client(); }
  void Start() override;
  // The world wakes a blocked program with an error.
  void Kill() override {}
  bool Idle() const override { return finished() || (listening_ && client_->finished()) || WaitsInVain(); }
  // Ends by itself, or with its host.
  void Stop() override {}
  std::string Describe() const override;

 private:
  bool finished() const { return program_ != nullptr && program_->IsFinished(); }
  // It has no time-outs: for a peer that went without a word it may wait for ever. On InfiniBand for any peer that
  // went: that is told to the event channel alone, which nobody reads while work is awaited. But what it sends there is
  // acknowledged, or fails.
  bool WaitsInVain() const;
  void Run();
  bool MayFail() const;
  // Empty: all went well.
  std::string Serve();
  std::string Call();

  Stage& stage_;
  const PingPong& spec_;
  const uint32_t index_;
  const Role role_;
  const PingPongProgram* const client_;
  std::shared_ptr<const emu::SimProgram> program_;
  bool listening_ = false;  // and nothing more
  Instant begun_{};         // the program
  Instant since_{};         // the attempt to connect, or the connection it led to, began
  std::optional<Instant> established_;
  bool work_failed_ = false;  // other than by being flushed or not answered
  bool sends_ = false;        // a Send is under way
  uint32_t round_ = 0;
  const char* step_ = "not started";
};

}  // namespace stagecoach::scenario
