// Session: one connection to a server, used from straight-line code.
//
// The CLI does one thing after another; the RPC stack is asynchronous. Await() starts an operation and runs the loop
// until its outcome is there. SIGINT, SIGTERM and SIGHUP end every wait: the caller unwinds, which removes what is half
// done, and the process exits with an error. A second one kills.
//
// Buffers that calls in flight may refer to belong to the session, because it alone knows when the connection is
// through with them. Single-threaded.
#pragma once

#include <asio/signal_set.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/asio_loop/asio_loop.h"
#include "rpcrdma/api/client.h"
#include "rpcrdma/api/rpcbind.h"
#include "rpcrdma/ulb/file/file_client.h"
#include "rpcrdma/ulb/file/names.h"
#include "tools/stagecoach/url.h"

namespace stagecoach::cli {

// What went wrong, as one line without the "stagecoach: " and the command. `fatal`: the rest of a tree need not be
// tried. `status`: what the server answered, if it did.
struct Error {
  std::string text;
  bool fatal = false;
  std::optional<rpcrdma::file::Status> status;
};

class Session {
 public:
  struct Options {
    Duration timeout = 60s;  // of one call; of connecting, and of a lookup, if less than the default
    uint32_t inline_threshold = 4096;
    rpcrdma::ProtocolProfile profile = rpcrdma::kRfc5666bis;
    rpcrdma::TransportVersions versions = rpcrdma::kVersion1Alone;
    // A clause that goes with the error where the server speaks version 2, and refuses version 1.
    std::optional<std::string> why_not_version_2;
    // What the connection begins with, where the version has to be found (ClientOptions::probe): NULL of this program.
    rpcrdma::ProcedureId probe{rpcrdma::file::kProgram, rpcrdma::file::kVersion, 0};
    rpcrdma::CcpClientOptions ccp;
  };

  Session(HostPort server, Options options);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Asks the rpcbind of the server's host which port the program has; the server is that one from then on, by address.
  // kCancelled when the user has interrupted.
  Result<rpcrdma::RpcbindFound, rpcrdma::RpcbindError> LookUp(const rpcrdma::RpcbindQuery& query);
  void set_port(uint16_t port) { server_.port = port; }

  Result<void, Error> Connect();
  // Says goodbye; does nothing after an interruption.
  void Disconnect();

  const HostPort& server() const { return server_; }
  rpcrdma::Client& client() { return client_; }
  rpcrdma::file::FileClient& files() { return files_; }
  // The text form of a path on this server.
  std::string UrlOf(const rpcrdma::file::Path& path) const { return ToString(server_, path); }
  Instant Now() const { return loop_.Now(); }

  // Memory of `count` buffers of `size` bytes each, for transfers; kept and reused.
  const std::vector<MutableBytes>& Buffers(size_t count, size_t size);

  // Runs the loop once; false when the user has interrupted. Not from inside a handler.
  bool RunOnce();
  bool interrupted() const { return interrupted_; }
  static Error InterruptedError() { return {"interrupted", true}; }

  // Waits for an operation of files(): `start(handler)` must pass the handler on.
  template <typename T, typename Start>
  Result<T, Error> Await(Start start) {
    using Outcome = Result<T, rpcrdma::file::Failure>;
    const auto slot = std::make_shared<std::optional<Outcome>>();
    start([slot](Outcome outcome) { slot->emplace(std::move(outcome)); });
    while (!slot->has_value()) {
      if (!RunOnce()) return Err(InterruptedError());
    }
    if (!**slot) return Err(FromFailure((**slot).error()));
    if constexpr (std::is_void_v<T>) {
      return {};
    } else {
      return std::move(***slot);
    }
  }
  // Of calls on client() and files().
  Error FromCall(const rpcrdma::CallError& error) const;
  Error FromFailure(const rpcrdma::file::Failure& failure) const;

 private:
  // What goes behind the error of a call that ended with `kind`, where the server says that it speaks `versions`.
  std::string Advice(rpcrdma::CallError::Kind kind, const rpcrdma::VersionRange& versions) const;

  HostPort server_;
  const Duration timeout_;
  const std::optional<std::string> why_not_version_2_;
  AsioLoop loop_;
  asio::signal_set signals_;
  bool interrupted_ = false;
  // Before the client: its destructor ends all access to them.
  std::unique_ptr<std::byte[]> memory_;
  size_t memory_size_ = 0;
  std::vector<MutableBytes> buffers_;
  rpcrdma::Client client_;
  rpcrdma::file::FileClient files_;
};

}  // namespace stagecoach::cli
