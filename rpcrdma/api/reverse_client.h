// ReverseClient: calls that a server makes to one of its clients, over connections that the client made.
//
// From examples/callback.cc#server:
//
//   class NewsService final : public Service {
//    public:
//     uint32_t program() const override { return kSubscribe.program; }
//     VersionRange versions() const override { return {kSubscribe.version, kSubscribe.version}; }
//     // A client that comes back on another connection subscribes again, and means that one.
//     bool idempotent(uint32_t, uint32_t) const override { return true; }
//
//     void Handle(Request request) override {
//       if (request.procedure() == 0) return request.Reply();
//       if (request.procedure() != kSubscribe.procedure) return request.Fail(AcceptStat::kProcUnavail);
//       // Who calls this procedure says by it that it serves the program of headlines.
//       // From here on, and not before, the server may call it.
//       ReverseClient& subscriber = subscribers_.try_emplace(request.client(), *server).first->second;
//       if (!subscriber.Bind(request.client())) return request.Fail(AcceptStat::kSystemErr);
//       request.Reply();
//       Publish(subscriber);
//     }
//     void OnClientGone(ClientId client) override { subscribers_.erase(client); }
//
//     Server* server = nullptr;
//     size_t delivered = 0;
//     std::function<void()> on_delivered;
//
//    private:
//     void Publish(ReverseClient& subscriber) {
//       for (const std::string_view headline : kHeadlines) {
//         const auto args = [&](XdrWriter& out) { out.String(headline); };
//         subscriber.AsyncCall(kHeadline, args, {}, [this](Result<Reply, CallError> reply) {
//           if (!reply) return fmt::print(stderr, "{}\n", reply.error().ToString());
//           if (++delivered == std::size(kHeadlines)) on_delivered();
//         });
//       }
//     }
//
//     std::map<ClientId, ReverseClient> subscribers_;
//   };
//
// draft-ietf-nfsv4-rfc5666bis-01 section 8 (RFC 8167). Calls and replies of version 1 travel inline: what does not fit
// the inline thresholds of the connection is refused with kTooLarge before anything is sent, and a reply that does not
// fit comes back as kTransport.
//
// In version 2 the client says how far it follows (draft-cel-nfsv4-rpcrdma-version-two-09 section 4.2.2), and calls go
// by that: none at all (kNotServed, nothing is sent), inline ones as in version 1, or ones with chunks, which carry
// what forward calls do. A client that has said nothing takes inline ones. What may be placed directly of a program is
// in its Binding, as for a Client (docs/decisions/0051).
//
// A ReverseClient stands for one client, whatever connection it uses: the upper layer knows who is at the other end of
// a connection, and that it is prepared; the transport does not. The call that says so must be idempotent
// (Service::idempotent), since one that is sent again on a new connection means that one. So nothing is sent before
// Bind() [5666bis:8.3.1#1], and a client that comes back on a new connection is bound again by whatever told of it the
// first time. With wait_for_return, calls that were outstanding when the connection was lost and calls made since are
// sent then, those sent before with the XID they had. They may be executed twice: a program whose procedures must not
// be needs a way of its own to recognise them. No call waits for longer than its timeout, nor beyond Server::Stop().
//
// A call without chunks that times out leaves the connection alone, unlike a forward call: it has exposed no memory.
// Its credit stays spent until the client answers. With chunks it ends the connection, as a forward call does.
//
// Memory: a call is copied, arguments that are placed directly among it, since it may be sent again. Result buffers
// belong to the call until its handler runs: at that moment nobody reaches them any more.
//
// Threading: everything on the loop's thread. May outlive the Server, and then fails every call.
#pragma once

#include <asio/async_result.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

#include "base/bytes.h"
#include "base/small_vector.h"
#include "base/time.h"
#include "rpcrdma/api/client.h"
#include "rpcrdma/api/completion.h"
#include "rpcrdma/api/server.h"
#include "rpcrdma/binding/binding.h"

namespace stagecoach::rpcrdma {

namespace internal {
class ReverseCalls;
}

struct ReverseClientOptions {
  // Calls that wait or are outstanding; more are refused with kQueueFull.
  uint32_t calls_max = 256;
  // Calls that have no connection wait for Bind(). Otherwise they end with kConnectionLost when it is lost, and with
  // kNotConnected when there is none.
  bool wait_for_return = false;
  // Bytes of one call, RPC header and all arguments; longer ones are refused with kTooLarge. A call is kept until it is
  // over, so this many times calls_max is what calls may hold.
  uint32_t call_bytes_max = 1 << 20;
};

struct ReverseCallOptions {
  // Memory for the eligible results of the call: see CallOptions::result_buffers. Offered as Write chunks, where calls
  // may have chunks, when the reply might not fit inline.
  SmallVector<MutableBytes, 2> result_buffers;
  // Upper bound in bytes of the rest of the reply, RPC header included. A call whose reply might not fit inline has a
  // Reply chunk, or is refused where calls may have none.
  uint32_t reply_bytes_max = 512;
  // AUTH_NONE when null. Read before Call returns.
  const OpaqueAuth* credentials = nullptr;
  // From Call until the reply, over all connections; 0 waits for ever. Ends with kTimedOut when the call was sent, else
  // with kNoCredit, or with kNotConnected when the client was not there.
  Duration timeout = 30s;
};

class ReverseClient {
 public:
  using CallHandler = Client::CallHandler;
  using ArgsWriter = Client::ArgsWriter;

  explicit ReverseClient(Server& server, ReverseClientOptions options = {});
  // Calls still outstanding end with kClosed; their handlers run afterwards from the loop.
  ~ReverseClient();
  ReverseClient(const ReverseClient&) = delete;
  ReverseClient& operator=(const ReverseClient&) = delete;

  // Says what of a program may be placed directly, in calls made from now on: see Client::Register.
  void Register(const Binding& binding);

  // The upper layer knows that this connection leads to the client and that it is prepared for reverse calls. Sends
  // what waits. Calls outstanding on another connection stay there as long as that lasts. Several ReverseClients may
  // use one connection. False when the connection is gone or has no reverse direction, and as long as it is open which
  // version it has: at a server of several that is until the client's first message.
  bool Bind(ClientId connection);
  // New calls have no connection from now on; outstanding ones keep theirs.
  void Unbind();
  bool bound() const;

  // Returns an id for Cancel, or 0 when the call failed at once (the handler then runs from the loop with the error).
  CallId Call(const ProcedureId& procedure, ArgsWriter args, const ReverseCallOptions& options, CallHandler handler);
  // Ends the call with kCancelled. Does nothing for an id that is complete.
  void Cancel(CallId call);

  // Signature void(Result<Reply, CallError>); see Client::AsyncCall. A cancellation slot of the token cancels the call
  // wherever it is: waiting for the client, or with it.
  template <typename Args, typename Token>
  auto AsyncCall(const ProcedureId& procedure, Args&& args, const ReverseCallOptions& options, Token&& token) {
    return asio::async_initiate<Token, void(Result<Reply, CallError>)>(
        [this](auto handler, ProcedureId procedure, std::decay_t<Args> args, ReverseCallOptions options) {
          internal::Begin<Result<Reply, CallError>>(std::move(handler), [&](auto completion) {
            return Canceller(Call(procedure, args, options, std::move(completion)));
          });
        },
        token, procedure, std::forward<Args>(args), options);
  }

  // Calls that are not over; of them, those without a connection.
  size_t outstanding() const;
  size_t waiting() const;

 private:
  // May outlive the ReverseClient, and does nothing then.
  UniqueFunction<void()> Canceller(CallId call);

  std::shared_ptr<internal::ReverseCalls> calls_;
};

}  // namespace stagecoach::rpcrdma
