#include "scenarios/runner/service_program.h"

#include <fmt/format.h>
#include <stdlib.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

namespace stagecoach::scenario {

ServiceProgram::Directory::Directory() {
  path_ = (std::filesystem::temp_directory_path() / "stagecoach-scenario-XXXXXX").string();
  if (::mkdtemp(path_.data()) == nullptr) path_.clear();
}

ServiceProgram::Directory::~Directory() {
  std::error_code ignored;
  if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
}

ServiceProgram::ServiceProgram(Stage& stage, const Service& spec) : stage_(stage), spec_(spec) {
  if (!spec.files()) return;
  directory_.emplace();
  if (directory_->path().empty()) {
    stage.Violate("service.directory", "cannot make a temporary directory to serve files from");
    return;
  }
  auto store = rpcrdma::file::FileStore::Open(directory_->path(), {});
  if (!store) {
    stage.Violate("service.directory", "cannot serve files: " + store.error().text);
    return;
  }
  store_ = std::move(*store);
}

ServiceProgram::~ServiceProgram() {
  Kill();
}

void ServiceProgram::Start() {
  stopping_ = false;
  rpcrdma::ServerOptions options;
  options.credits = spec_.credits();
  options.inline_threshold = spec_.inline_threshold();
  options.clients_max = spec_.clients_max();
  options.outgoing_reads = static_cast<uint8_t>(spec_.outgoing_reads());
  options.client_bytes_max = spec_.client_bytes_max();
  options.call_bytes_max = spec_.call_bytes_max();
  options.message_bytes_max = spec_.message_bytes_max();
  options.trace = stage_.trace();
  options.name = fmt::format("{}/server-{}", host(), ++starts_);
  EventLoop& loop = stage_.loop(host());
  model_ = std::make_unique<ModelService>(loop, &stage_.executions(), &stage_.violations());
  server_ = std::make_unique<rpcrdma::Server>(loop, options);
  server_->Register(model_.get());
  if (store_ != nullptr) {
    executor_ = std::make_unique<rpcrdma::file::InlineExecutor>(loop);
    files_ =
        std::make_unique<rpcrdma::file::FileService>(loop, *store_, *executor_, rpcrdma::file::FileService::Options());
    server_->Register(files_.get());
  }
  const auto listening = server_->Listen(stage_.AddressOf(host()), kServicePort);
  if (!listening) {
    stage_.Violate("service.listen", fmt::format("service on {}: {}", host(), listening.error().ToString()));
  }
}

void ServiceProgram::Kill() {
  ++incarnation_;
  server_.reset();
  files_.reset();
  executor_.reset();
  model_.reset();
}

void ServiceProgram::StopAndThen(Duration grace, std::function<void()> then) {
  if (server_ == nullptr) return;
  stopping_ = true;
  server_->Stop(grace, [this, incarnation = incarnation_, then = std::move(then)] {
    // Not here: the server would be destroyed by its own handler.
    stage_.loop(host()).Post([this, incarnation, then] {
      if (incarnation != incarnation_) return;
      Kill();
      then();
    });
  });
}

void ServiceProgram::Restart(Duration grace, std::function<void()> started) {
  if (stopping_) return;
  StopAndThen(grace, [this, started = std::move(started)] {
    Start();
    started();
  });
}

std::string ServiceProgram::Describe() const {
  std::string text = fmt::format("service on {}: {}\n", host(), server_ == nullptr ? "down" : "up");
  if (server_ != nullptr) {
    text += fmt::format("  {} calls held by the service\n", model_->held());
    text += server_->DebugString();
  }
  return text;
}

}  // namespace stagecoach::scenario
