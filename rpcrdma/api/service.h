// Service: an RPC program that a Server offers, or a Client to its server in the reverse direction; Request: one call
// of it, to be finished now or later.
//
// From examples/echo.cc#service:
//
//   class EchoService final : public Service {
//    public:
//     uint32_t program() const override { return kEcho.program; }
//     VersionRange versions() const override { return {kEcho.version, kEcho.version}; }
//
//     void Handle(Request request) override {
//       switch (request.procedure()) {
//         case 0:
//           return request.Reply();  // NULL: every program has it, and it does nothing
//         case kEcho.procedure: {
//           const std::string_view text = request.args().String("text", kTextMax);
//           if (!request.args().Finish()) return request.Fail(AcceptStat::kGarbageArgs);
//           return request.Reply([&](XdrWriter& results) { results.String(text); });
//         }
//         default:
//           return request.Fail(AcceptStat::kProcUnavail);
//       }
//     }
//   };
//
// Arguments and results that are placed directly are in examples/placement.cc.
//
// The Server answers calls of unknown programs and versions itself, and denies credentials that the Service does not
// take; procedures, NULL included, are the Service's.
//
// Threading: everything on the loop's thread. A service that computes elsewhere keeps the Request and posts its end
// back to the loop.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/bytes.h"
#include "rpcrdma/api/function.h"
#include "rpcrdma/api/registered_memory.h"
#include "rpcrdma/binding/binding.h"
#include "rpcrdma/onc/credentials.h"
#include "rpcrdma/onc/rpc_message.h"
#include "rpcrdma/xdr/xdr_reader.h"
#include "rpcrdma/xdr/xdr_writer.h"

namespace stagecoach::rpcrdma {

namespace internal {
class ReverseService;
class ServerConnection;
struct RequestState;
class BlockPool;
struct Block;
}  // namespace internal

// One client connection, for as long as the server runs; never reused. 0 of calls that a server makes to a client.
using ClientId = uint64_t;

// Memory of one connection's pool, already known to its device, for a result that may travel by RDMA Write. Returns to
// the pool when destroyed. Empty after being moved from.
class Buffer {
 public:
  Buffer();
  Buffer(Buffer&&) noexcept;
  Buffer& operator=(Buffer&&) noexcept;
  ~Buffer();

  // As many bytes as were asked for; content undefined at first.
  MutableBytes bytes() const { return bytes_; }

 private:
  friend class Request;
  std::shared_ptr<internal::BlockPool> pool_;
  internal::Block* block_ = nullptr;
  MutableBytes bytes_;
};

// One call. Exactly one of Reply, Fail and Deny ends it; a Request destroyed before that is answered with SYSTEM_ERR.
// When the client is gone, ending it does nothing. What args() returned views of is valid until the end of the call,
// client gone or not.
class Request {
 public:
  // Writes a call's results. Runs before Reply returns, and again with a larger buffer when they did not fit: no side
  // effects.
  using ResultsWriter = FunctionRef<void(XdrWriter&)>;

  Request(Request&&) noexcept;
  Request& operator=(Request&&) noexcept;
  ~Request();

  uint32_t program() const;
  uint32_t version() const;
  uint32_t procedure() const;
  // Program, version, procedure, credential and verifier as sent. Credentials are claims: nothing has verified them.
  const CallHeader& header() const;
  ClientId client() const;
  // "127.0.0.1:53422".
  const std::string& peer() const;
  // Whether the client is still there.
  bool connected() const;
  // The version of RPC-over-RDMA that the call came in, and its connection speaks: 1 or 2. version() is the program's.
  uint32_t rpcrdma_version() const;
  // In version 2, the flags of the transport header: those of extensions that are known here (docs/extensions.md), and
  // others, which mean nothing. 0 in version 1.
  uint32_t transport_flags() const;

  // Stands behind the call header. Eligible arguments are read in place with EligibleOpaque.
  XdrReader& args();

  // Room in bytes that the client offers for its `i`-th eligible result (Write chunk); nullopt when it offers no such
  // chunk, or the Binding lists no such result: then the result travels inside the reply message.
  std::optional<uint64_t> result_room(size_t i) const;

  // Pooled memory for an eligible result. nullopt when this client's share of memory (ServerOptions::client_bytes_max)
  // is used up.
  std::optional<Buffer> Allocate(size_t bytes);

  // Accepted, SUCCESS. Eligible items go into the client's Write chunks, one each, in order; those beyond the chunks
  // offered, and all when none are, become part of the message. A reply that fits neither inline nor in a Reply chunk
  // becomes ERR_CHUNK; in version 2 an error that says how much room it needs.
  void Reply();  // void results
  // Everything is copied before this returns: eligible items are small or come inline.
  void Reply(ResultsWriter results);
  // Eligible items lie in `memory` (and nowhere else), which is kept until the device is done with it.
  void Reply(ResultsWriter results, Buffer memory);
  // The same for memory that is not of the pool; registered for the duration of the reply.
  void Reply(ResultsWriter results, std::shared_ptr<const void> memory);
  // The same for memory that is registered once for many replies, as a cache is. The call fails with SYSTEM_ERR when an
  // eligible item is not in it. None: as without.
  void Reply(ResultsWriter results, const RegisteredMemory& memory);

  // Accepted, not executed: PROC_UNAVAIL, GARBAGE_ARGS or SYSTEM_ERR.
  void Fail(AcceptStat stat);
  // Denied: AUTH_ERROR.
  void Deny(AuthStat stat);

 private:
  friend class internal::ServerConnection;
  friend class internal::ReverseService;
  explicit Request(std::unique_ptr<internal::RequestState> state);
  std::unique_ptr<internal::RequestState> state_;
};

class Service {
 public:
  virtual ~Service() = default;

  virtual uint32_t program() const = 0;
  virtual VersionRange versions() const = 0;
  // What of each version may be placed directly (binding.h). Of a version without a Binding nothing is: eligible items
  // become part of the message, and a call with a chunk for one is answered with GARBAGE_ARGS. Constants: asked for
  // once.
  virtual std::span<const Binding> bindings() const { return {}; }
  // The flavors of credentials that it takes. A call with another one is denied before anybody looks at its arguments,
  // and so is one whose AUTH_SYS cannot be read (credentials.h has what with); procedure 0 is always taken with
  // AUTH_NONE. Of flavors beyond AUTH_NONE and AUTH_SYS, what is in a credential and its verifier is for Handle to
  // judge.
  virtual std::span<const AuthFlavor> flavors() const { return kUsualFlavors; }
  // A call of program(), in versions(), whose header was well formed, with a credential of flavors().
  virtual void Handle(Request request) = 0;

  // Whether executing a call of this procedure twice does no more than executing it once. Calls of all others are
  // recorded: one that a client repeats on another connection, because it lost the first before it saw the reply, is
  // executed once, and answered from the record (replay_cache.h). Recording costs a copy of the reply. A reply longer
  // than ReplayLimits::reply_bytes_max is not kept, and a call that comes again after it fails with SYSTEM_ERR, so
  // procedures with large results should be idempotent and say so, as READ is. Procedure 0 does nothing; of others
  // nothing is known here, and being executed twice is the worse mistake.
  virtual bool idempotent(uint32_t /*version*/, uint32_t procedure) const { return procedure == 0; }

  // A client connected, or is gone; its outstanding Requests still exist and may be ended.
  virtual void OnClientConnected(ClientId /*client*/, const std::string& /*peer*/) {}
  virtual void OnClientGone(ClientId /*client*/) {}
};

}  // namespace stagecoach::rpcrdma
