// FileCopyProgram: puts a file on a server, gets it back, and compares; from the start again when an injection took the
// connection away.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "rpcrdma/api/client.h"
#include "rpcrdma/ulb/file/file_client.h"
#include "scenarios/runner/program.h"
#include "scenarios/runner/stage.h"

namespace stagecoach::scenario {

class FileCopyProgram final : public Program {
 public:
  // `spec` and `stage` outlive the program. `index` makes the file's name and content.
  FileCopyProgram(Stage& stage, const FileCopy& spec, uint32_t index);
  ~FileCopyProgram() override;

  const std::string& host() const override { return spec_.host(); }
  void Start() override;
  void Kill() override;
  bool Idle() const override { return done_ || hopeless_; }
  void Stop() override { Kill(); }
  std::string Describe() const override;

 private:
  // The steps of one attempt, each started by the end of the one before.
  void Attempt();
  void Create();
  void WriteAll();
  void Commit();
  void Open();
  void ReadAll();
  void Compare();

  // Moves the file chunk by chunk, at most `concurrency` at a time: `move(offset, bytes)` starts one, whose end calls
  // OnMoved; then `next`.
  void MoveAll(std::function<void(uint64_t, size_t)> move, void (FileCopyProgram::*next)());
  void PumpMoves();
  void OnMoved();
  // A failure that may be: tries again from the start. One that may not: a violation.
  void Fail(const std::string& what, const rpcrdma::file::Failure& failure);
  bool MayFail(const rpcrdma::file::Failure& failure);
  void Retry();
  // `handler` runs only within this attempt.
  template <typename Handler>
  auto Now(Handler handler) {
    return [this, attempt = attempt_, handler = std::move(handler)](auto result) mutable {
      if (attempt == attempt_) handler(std::move(result));
    };
  }

  Stage& stage_;
  const FileCopy& spec_;
  const uint32_t index_;
  std::vector<std::byte> content_;
  std::vector<std::byte> copy_;
  uint32_t attempt_ = 0;
  Stage::Attempts connects_;
  uint32_t failures_ = 0;
  const char* step_ = "not started";
  bool started_ = false;
  bool done_ = false;
  bool hopeless_ = false;
  Instant since_{};
  std::optional<Instant> established_;
  std::string connection_;  // its name
  EventLoop::TimerId timer_ = 0;
  std::unique_ptr<rpcrdma::Client> client_;
  std::unique_ptr<rpcrdma::file::FileClient> files_;
  rpcrdma::file::Handle handle_ = 0;
  std::function<void(uint64_t, size_t)> move_;
  void (FileCopyProgram::*after_moves_)() = nullptr;
  uint64_t next_offset_ = 0;
  uint32_t moving_ = 0;
};

}  // namespace stagecoach::scenario
