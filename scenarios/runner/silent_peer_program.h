// SilentPeerProgram: a stranger with streams of its own, no device, that comes to where others are served and says
// nothing, or the beginning of what a peer says first and no more. Nobody waits for it, and it excuses nothing: who
// talks is served beside it.
//
//   silence.held   who has said too little for so long is shut out: a stream of it ends within kShutOutTime
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "emu/fabric/address.h"
#include "scenarios/runner/program.h"
#include "scenarios/runner/stage.h"

namespace stagecoach::scenario {

class SilentPeerProgram final : public Program {
 public:
  // By then a listener has ended a stream that says too little: it waits for five seconds
  // (CmOptions::request_timeout, DeviceProfile::join_timeout), and word of it has to cross a link.
  static constexpr Duration kShutOutTime = std::chrono::seconds(20);

  // `spec` and `stage` outlive the program.
  SilentPeerProgram(Stage& stage, const SilentPeer& spec, uint32_t index);
  ~SilentPeerProgram() override;

  const std::string& host() const override { return spec_.host(); }
  void Start() override;
  void Kill() override;
  bool Idle() const override { return true; }
  void Stop() override { Kill(); }
  std::string Describe() const override;

 private:
  class Visitor;

  Stage& stage_;
  const SilentPeer& spec_;
  const std::string name_;  // in the trace
  emu::IpEndpoint there_;
  std::vector<std::byte> words_;  // all that is said
  std::vector<std::unique_ptr<Visitor>> visitors_;
};

}  // namespace stagecoach::scenario
