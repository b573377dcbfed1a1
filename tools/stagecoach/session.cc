#include "tools/stagecoach/session.h"

#include <algorithm>

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
  if (!**slot) return Err(Error{(**slot).error().ToString(), true});
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

bool Session::RunOnce() {
  if (!interrupted_) loop_.RunOnce();
  return !interrupted_;
}

}  // namespace stagecoach::cli
