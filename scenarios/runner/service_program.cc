#include "scenarios/runner/service_program.h"

#include <fmt/format.h>
#include <stdlib.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "base/mark.h"
#include "rpcrdma/wire/header.h"

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
  options.backlog = static_cast<int>(spec_.backlog());
  options.clients_max = spec_.clients_max();
  // A world may have all of its clients on one host, each with several connections.
  options.address_connections_max = options.clients_max;
  options.outgoing_reads = static_cast<uint8_t>(spec_.outgoing_reads());
  options.client_bytes_max = spec_.client_bytes_max();
  options.call_bytes_max = spec_.call_bytes_max();
  options.message_bytes_max = spec_.message_bytes_max();
  options.trace = stage_.trace();
  options.replay.entries_max = spec_.replay_entries_max();
  options.replay.reply_bytes_max = spec_.replay_reply_bytes_max();
  options.reverse_credits = spec_.reverse_credits();
  options.shared_receives = spec_.shared_receives();
  options.profile = DocumentOf(spec_.rpcrdma_profile());
  options.exposed_replies_max = spec_.exposed_replies_max();
  options.exposed_bytes_max = spec_.exposed_bytes_max();
  options.exposed_time = Duration(spec_.exposed_ns());
  // Links may be as slow, and clients as quiet, as a scenario says.
  options.data_time = options.idle_timeout = Duration::zero();
  options.incoming_reads = static_cast<uint8_t>(spec_.incoming_reads());
  options.receive_align = spec_.receive_align();
  options.ccp.enabled = spec_.ccp();
  options.ccp.inline_send_max = options.ccp.inline_receive_max = spec_.ccp_inline_max();
  options.versions = {spec_.version_low(), spec_.version_high()};
  options.chunk_limits.read_segments_max = spec_.read_segments_max();
  options.chunk_limits.write_chunks_max = spec_.write_chunks_max();
  options.chunk_limits.segments_per_chunk_max = spec_.segments_per_chunk_max();
  options.chunk_limits.write_segments_max = spec_.write_segments_max();
  ++starts_;
  options.name = name();
  options.first_xid = stage_.FirstModelXid(options.name);
  EventLoop& loop = stage_.loop(host());
  life_ = stage_.NewLife();
  ModelService::Options model;
  model.life = life_;
  model.remembers = [this](const Execution& execution) { return Remembers(execution); };
  called_in_.clear();
  model.on_call = [this](uint64_t call, const rpcrdma::Request& request) { OnCall(call, request); };
  if (spec_.reverse_credits() > 0) {
    model.on_gone = [this](rpcrdma::ClientId client) { reverse_->OnClientGone(client); };
  }
  model_ = std::make_unique<ModelService>(loop, &stage_.executions(), &stage_.violations(), std::move(model));
  server_ = std::make_unique<rpcrdma::Server>(loop, options);
  if (spec_.reverse_credits() > 0) {
    reverse_ = std::make_unique<ReverseCaller>(stage_, host(), *server_, &reverse_calls_, &tally_);
  }
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
  reverse_.reset();
  files_.reset();
  executor_.reset();
  model_.reset();
}

void ServiceProgram::StopAndThen(Duration grace, std::function<void()> then) {
  if (server_ == nullptr) return;
  stopping_ = true;
  if (reverse_ != nullptr) reverse_->NoteStop();
  server_->Stop(grace, [this, incarnation = incarnation_, then = std::move(then)] {
    // Not here: the server would be destroyed by its own handler.
    stage_.loop(host()).Post([this, incarnation, then] {
      if (incarnation != incarnation_) return;
      if (reverse_ != nullptr) reverse_->CheckAllTold();
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

// Clients of several kinds meet here.
void ServiceProgram::OnCall(uint64_t call, const rpcrdma::Request& request) {
  const uint32_t version = request.rpcrdma_version();
  if (called_in_.insert(version).second && called_in_.size() > 1) STAGECOACH_MARK("service.called_in_both_versions");
  if (version == rpcrdma::kRpcRdmaVersion2 && IsOlderDocument(spec_.rpcrdma_profile())) {
    STAGECOACH_MARK("service.version_2_beside_an_older_document");
  }
  if (reverse_ != nullptr) reverse_->OnCall(call, request.client());
}

std::string ServiceProgram::name() const {
  return fmt::format("{}/server-{}", host(), starts_);
}

// [replay_cache.h] Not by another life of the server, nor what went for room or for age.
bool ServiceProgram::Remembers(const Execution& execution) const {
  if (execution.times == 0 || execution.life != life_ || spec_.replay_entries_max() == 0) return false;
  if (stage_.Now() - execution.at >= rpcrdma::ReplayLimits().age_max) return false;
  const auto evicted = stage_.evidence().LastEvicted(name() + "/replay", execution.xid);
  return !evicted || *evicted < execution.at;
}

void ServiceProgram::CheckNothingHeld() {
  if (server_ == nullptr) return;
  const rpcrdma::ReplayStats replay = server_->stats().replay;
  if (replay.in_progress != 0) {
    stage_.Violate("replay.held", fmt::format("service on {}: {} calls are in progress for the duplicate request cache",
                                              host(), replay.in_progress));
  }
  const rpcrdma::ServerHoldings held = server_->holdings();
  if (held.shared_receives_posted != held.shared_receives) {
    stage_.Violate("receives.held", fmt::format("service on {}: {} of {} shared Receives are posted", host(),
                                                held.shared_receives_posted, held.shared_receives));
  }
}

std::string ServiceProgram::Describe() const {
  std::string text = fmt::format("service on {}: {}\n", host(), server_ == nullptr ? "down" : "up");
  if (server_ != nullptr) {
    text += fmt::format("  {} calls held by the service\n", model_->held());
    if (reverse_ != nullptr) text += reverse_->Describe();
    text += server_->DebugString();
  }
  return text;
}

}  // namespace stagecoach::scenario
