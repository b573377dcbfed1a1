#include "tools/stagecoach/session.h"

#include <algorithm>

#include "rpcrdma/wire/header.h"
#include "tools/stagecoach/signals.h"

namespace stagecoach::cli {
namespace {

rpcrdma::ClientOptions MakeClientOptions(const Session::Options& options) {
  rpcrdma::ClientOptions client;
  client.inline_threshold = options.inline_threshold;
  client.profile = options.profile;
  client.versions = options.versions;
  client.probe = options.probe;
  client.ccp = options.ccp;
  client.connect_timeout = std::min(client.connect_timeout, options.timeout);
  return client;
}

}  // namespace

Session::Session(HostPort server, Options options)
    : server_(std::move(server)),
      timeout_(options.timeout),
      why_not_version_2_(options.why_not_version_2),
      signals_(loop_.context()),
      client_(loop_, MakeClientOptions(options)),
      files_(client_) {
  files_.set_timeout(options.timeout);
  AddEndingSignals(signals_);
  signals_.async_wait([this](asio::error_code error, int /*signal*/) {
    if (error) return;
    interrupted_ = true;
    // The next one ends the process at once, should unwinding take too long for the user.
    signals_.clear(error);
  });
}

Session::~Session() = default;

Result<rpcrdma::RpcbindFound, rpcrdma::RpcbindError> Session::LookUp(const rpcrdma::RpcbindQuery& query) {
  using Outcome = Result<rpcrdma::RpcbindFound, rpcrdma::RpcbindError>;
  rpcrdma::RpcbindOptions options;
  options.timeout = std::min(options.timeout, timeout_);
  rpcrdma::Rpcbind rpcbind(loop_, options);
  const auto slot = std::make_shared<std::optional<Outcome>>();
  rpcbind.LookUp(server_.host, query, [slot](Outcome outcome) { slot->emplace(std::move(outcome)); });
  while (!slot->has_value()) {
    if (!RunOnce()) {
      rpcrdma::RpcbindError error;
      error.kind = rpcrdma::RpcbindError::Kind::kCancelled;
      error.message = InterruptedError().text;
      return Err(std::move(error));
    }
  }
  if (*slot && **slot) server_ = ToHostPort((**slot)->address);
  return std::move(**slot);
}

Result<void, Error> Session::Connect() {
  using Outcome = Result<void, rpcrdma::CallError>;
  const auto slot = std::make_shared<std::optional<Outcome>>();
  client_.Connect(server_.host, server_.port, [slot](Outcome outcome) { slot->emplace(std::move(outcome)); });
  while (!slot->has_value()) {
    if (!RunOnce()) return Err(InterruptedError());
  }
  if (!**slot) return Err(FromCall((**slot).error()));
  return {};
}

void Session::Disconnect() {
  if (interrupted_ || !client_.connected()) return;
  const auto closed = std::make_shared<bool>(false);
  client_.Close([closed] { *closed = true; });
  while (!*closed && RunOnce()) {
  }
}

const std::vector<MutableBytes>& Session::Buffers(size_t count, size_t size) {
  if (memory_size_ < count * size) {
    memory_ = std::make_unique<std::byte[]>(count * size);
    memory_size_ = count * size;
  }
  buffers_.clear();
  for (size_t i = 0; i < count; ++i) buffers_.emplace_back(memory_.get() + i * size, size);
  return buffers_;
}

Error Session::FromCall(const rpcrdma::CallError& error) const {
  return {error.ToString() + Advice(error.kind, error.versions), true};
}

Error Session::FromFailure(const rpcrdma::file::Failure& failure) const {
  using Failure = rpcrdma::file::Failure;
  Error error{failure.message, failure.connection_gone};
  if (failure.kind == Failure::Kind::kStatus) error.status = failure.status;
  if (failure.kind == Failure::Kind::kCall) error.text += Advice(failure.call, failure.versions);
  return error;
}

std::string Session::Advice(rpcrdma::CallError::Kind kind, const rpcrdma::VersionRange& versions) const {
  // Of errors that are the transport's, ERR_VERS alone has versions.
  const bool speaks_2 = kind == rpcrdma::CallError::Kind::kTransport && versions.low <= rpcrdma::kRpcRdmaVersion2 &&
                        rpcrdma::kRpcRdmaVersion2 <= versions.high;
  return speaks_2 && why_not_version_2_ ? "; " + *why_not_version_2_ : "";
}

bool Session::RunOnce() {
  if (!interrupted_) loop_.RunOnce();
  return !interrupted_;
}

}  // namespace stagecoach::cli
