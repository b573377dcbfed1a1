// ServiceProgram: an RPC server with the model service, and with the file service over a directory of its own when the
// scenario says so.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>

#include "rpcrdma/api/server.h"
#include "rpcrdma/ulb/file/executor.h"
#include "rpcrdma/ulb/file/file_service.h"
#include "rpcrdma/ulb/file/file_store.h"
#include "scenarios/runner/program.h"
#include "scenarios/runner/reverse_caller.h"
#include "scenarios/runner/stage.h"

namespace stagecoach::scenario {

class ServiceProgram final : public Program {
 public:
  // `spec` and `stage` outlive the program.
  ServiceProgram(Stage& stage, const Service& spec);
  ~ServiceProgram() override;

  const std::string& host() const override { return spec_.host(); }
  void Start() override;
  void Kill() override;
  // A service has no work of its own but the calls it makes to clients.
  bool Idle() const override {
    return server_ == nullptr || (!stopping_ && (reverse_ == nullptr || reverse_->outstanding() == 0));
  }
  void Stop() override {
    StopAndThen(std::chrono::seconds(1), [] {});
  }
  std::string Describe() const override;

  // Stops with so much grace, starts again, and says so.
  void Restart(Duration grace, std::function<void()> started);
  std::optional<size_t> calls_open() const override {
    return reverse_ != nullptr ? std::optional(reverse_->outstanding()) : std::nullopt;
  }
  // Everybody is done: nothing of any call is held any more.
  void CheckNothingHeld();
  // What must not grow.
  rpcrdma::ServerHoldings holdings() const {
    return server_ != nullptr ? server_->holdings() : rpcrdma::ServerHoldings();
  }

 private:
  void StopAndThen(Duration grace, std::function<void()> then);
  // Whether the duplicate request cache has promised to remember this call.
  bool Remembers(const Execution& execution) const;
  void OnCall(uint64_t call, const rpcrdma::Request& request);
  std::string name() const;

  // Removed with everything in it.
  class Directory {
   public:
    Directory();
    ~Directory();
    const std::string& path() const { return path_; }

   private:
    std::string path_;
  };

  Stage& stage_;
  const Service& spec_;
  std::optional<Directory> directory_;
  std::unique_ptr<rpcrdma::file::FileStore> store_;
  std::unique_ptr<rpcrdma::file::InlineExecutor> executor_;
  std::unique_ptr<rpcrdma::file::FileService> files_;
  std::unique_ptr<ModelService> model_;
  std::unique_ptr<rpcrdma::Server> server_;
  std::unique_ptr<ReverseCaller> reverse_;  // null: the service calls nobody
  uint32_t reverse_calls_ = 0;              // so far
  uint32_t life_ = 0;
  bool stopping_ = false;
  uint32_t incarnation_ = 0;
  uint32_t starts_ = 0;
  std::set<uint32_t> called_in_;  // versions of RPC-over-RDMA, since the start
};

}  // namespace stagecoach::scenario
