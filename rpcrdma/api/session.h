// Session: ONC RPC calls to one server, over as many RPC-over-RDMA connections as that takes, at a time and one after
// the other.
//
// From examples/session.cc#session:
//
//   Printer printer;
//   SessionOptions options;
//   options.client.name = "weather";
//   options.client.trace = &printer;
//   options.reconnect.delay_first = 20ms;
//   options.keepalive = {.interval = 10s, .program = kTemperature.program, .version = kTemperature.version};
//   Session session(loop, "127.0.0.1", port, options);
//
//   std::optional<int32_t> temperature;
//   const auto args = [](XdrWriter&) {};
//   session.AsyncCall(kTemperature, args, {}, [&](Result<Reply, CallError> reply) {
//     if (reply) {
//       XdrReader results = reply->results();
//       const int32_t value = results.I32("temperature");
//       if (results.Finish()) temperature = value;
//     } else {
//       fmt::print(stderr, "{}\n", reply.error().ToString());
//     }
//     loop.Stop();
//   });
//   loop.Run();
//
// The first call connects; there is nothing to wait for before it. Every connection is made by a Client of its own, so
// it has its own protection domain, STags, buffers and credits, and asks for its private data, inline thresholds and
// RDMA Read limits anew: what a server said on one connection means nothing on the next [pvtdata:4#1]. A call is
// planned again for each connection it is sent on.
//
// Connections that end. Calls that were not sent yet wait for another connection. Those that were sent are sent again
// with their XIDs, unless CallOptions::retransmit is false: then they end with kConnectionLost. So the server may see a
// call more than once, on one connection never; a duplicate request cache there, or an idempotent procedure, makes it
// harmless. Memory of a call is reachable through one connection at a time, as a Client tells of a lost call when no
// STag of it is valid any more.
//
// Back-off. Nothing is done at full speed: after a connection that ended, or an attempt that failed, the next attempt
// waits. How long is doubled with each, up to a bound, with jitter, and starts over when a call has had a reply on a
// connection: neither being accepted nor an answered keepalive is proof that a server works. With no call waiting
// nothing is attempted, so a client that an idle server lets go comes back with its next call.
//
// Several connections (SessionOptions::connections) are made as they are needed: another one when each there is has
// calls already. A call goes to the connection with the fewest; calls wait for credits here, so none waits at one
// connection while another has room. XIDs are unique over all of them.
//
// Deadlines. CallOptions::timeout runs from the call until its reply, over all connections. Expiry of a call that is at
// the server ends its connection (see CallError::kTimedOut); the other calls there go on with the next.
//
// How a call ends that never was sent: with the error of the latest attempt to connect (kResolve, kRefused, kRejected,
// kVersion, kUnreachable, kDevice) when ReconnectOptions::attempts_max is reached, or when it is kVersion, since asking
// again would not help; with kNotConnected when its time is over and
// there is no connection, with kNoCredit when there is. One that was sent, on whichever connection: kConnectionLost and
// kTimedOut; and CallError::sent says so in every case.
//
// Memory registered once for many calls (registered_memory.h) is registered by each connection that uses it, at its
// first call there, and deregistered when that connection ends. A call's STags are its own all the same, are invalid
// before its handler runs, and are never valid on two connections.
//
// Each of these decisions is a trace event by SessionOptions::client.name: docs/trace.md lists them. Its connections
// are numbered, and their own events are by names such as "client/3".
//
// Versions. With both of RPC-over-RDMA among ClientOptions::versions each connection finds its own, and they need not
// agree. What a call went by is in its end: Reply::rpcrdma_version, CallError::rpcrdma_version. What depends on the
// server of one connection, as its properties and messages of extensions do, is a Client's.
//
// Threading: everything on the loop's thread (or before it runs). The loop outlives the Session.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "rpcrdma/api/client.h"

namespace stagecoach::rpcrdma {

struct ReconnectOptions {
  // Before the first attempt after a connection that ended. Each failure doubles it, up to the second. An attempt waits
  // for a time between half of that and all of it, evenly distributed. From 1 ms to 24 hours, the second not below the
  // first.
  Duration delay_first = 50ms;
  Duration delay_max = 10s;
  // After so many failures in a row, with no connection left, calls that wait end with the error of the latest; later
  // calls have one attempt each. 0: calls wait as long as their time-outs say. A connection that ended before it had
  // answered any call counts as a failure.
  uint32_t attempts_max = 0;
  // A call is sent so often and no more: one that a server dies of would otherwise be its end for ever. At least 1.
  uint32_t transmissions_max = 8;
};

struct KeepaliveOptions {
  // A connection on which nothing came for so long is asked to answer a call of procedure 0; any RPC reply will do, a
  // refusal included. 0: never. Such a call takes a Receive of the server's, so it needs a credit like any other
  // [5666bis:4.3#4]: while the grant is more than one and there are calls, one credit is kept for this, and so many
  // fewer calls are under way at a time. With a grant of one, which a call has, nothing can be asked, and the call's
  // own time-out is what counts.
  Duration interval{};
  // No answer, and nothing else either, within this time ends the connection. From 1 ms to 24 hours.
  Duration timeout = 10s;
  uint32_t program = 0;
  uint32_t version = 0;
};

// With options out of their ranges every call fails with CallError::Kind::kOptions.
struct SessionOptions {
  // Of every connection. `queued_calls_max` bounds the calls that wait in the Session, whose connections have no
  // queues; `first_xid` is the Session's.
  ClientOptions client;
  // At a time: 1 to 64.
  uint32_t connections = 1;
  ReconnectOptions reconnect;
  KeepaliveOptions keepalive;
  // A connection that had no call, in either direction, for so long is closed, in order; 0: never.
  Duration idle_timeout = 300s;
  // With version 2 among ClientOptions::versions: a server that was found not to speak it, by its own word or by what
  // became of the connection, is not asked again for so long; connections then begin with version 1. 0 to 24 hours;
  // with 0 each connection asks.
  Duration version_memory = 600s;
  // Of the jitter; 0 takes one from the system's generator. Simulations give a number.
  uint64_t seed = 0;
};

struct SessionStats {
  ConnectionStats connections;  // summed over all, past and present; credits_granted over those present
  uint64_t attempts = 0;        // to connect
  uint64_t attempts_failed = 0;
  uint64_t connected = 0;  // connections made
  uint64_t lost = 0;       // that ended without this end's wish; those that a keepalive ended, and time-outs, included
  uint64_t useless = 0;    // of them: had answered no call
  uint64_t retransmissions = 0;
  uint64_t keepalives = 0;
  uint64_t keepalives_unanswered = 0;
  uint64_t idle_closes = 0;
  uint64_t calls = 0;         // accepted by Call
  uint64_t calls_failed = 0;  // without a reply: the server's refusals are replies
};

class Session {
 public:
  using CallHandler = Client::CallHandler;
  using ArgsWriter = Client::ArgsWriter;

  // `host` is a numeric address or a name, which is looked up for every attempt: all its addresses are tried.
  Session(EventLoop& loop, std::string_view host, uint16_t port, SessionOptions options);
  Session(EventLoop& loop, const sockaddr* address, SessionOptions options);
  // As ~Client: ends all access to memory before it returns; the handlers of calls run afterwards, with kClosed.
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // As Client's.
  void Register(const Binding& binding);

  // As Client's. Arguments are encoded before this returns; eligible ones are read where they lie, at each
  // transmission.
  CallId Call(const ProcedureId& procedure, ArgsWriter args, const CallOptions& options, CallHandler handler);
  // Ends the call with kCancelled, wherever it is, as soon as its memory is safe.
  void Cancel(CallId call);
  // Refuses new calls, ends what is outstanding with kClosed, disconnects in order, then runs `handler`.
  void Close(UniqueFunction<void()> handler);

  // Signature void(Result<Reply, CallError>); as Client's.
  template <typename Args, typename Token>
  auto AsyncCall(const ProcedureId& procedure, Args&& args, const CallOptions& options, Token&& token) {
    return asio::async_initiate<Token, void(Result<Reply, CallError>)>(
        [this](auto handler, ProcedureId procedure, std::decay_t<Args> args, CallOptions options) {
          internal::Begin<Result<Reply, CallError>>(std::move(handler), [&](auto completion) {
            return Canceller(Call(procedure, args, options, std::move(completion)));
          });
        },
        token, procedure, std::forward<Args>(args), options);
  }
  // Signature void().
  template <typename Token>
  auto AsyncClose(Token&& token) {
    return asio::async_initiate<Token, void()>(
        [this](auto handler) { Close(internal::EndOnItsExecutor(std::move(handler))); }, token);
  }

  // Connections that calls can be sent on now.
  size_t connections() const;
  // Calls that are not over.
  size_t outstanding() const;
  // Of them, those that wait for a connection or a credit.
  size_t waiting() const;
  // "server.example:20049", as asked for.
  const std::string& peer() const;
  SessionStats stats() const;
  // See Client::DebugString.
  std::string DebugString() const;
  EventLoop& loop() const;

 private:
  // May outlive the Session, and does nothing then.
  UniqueFunction<void()> Canceller(CallId call);

  std::shared_ptr<internal::SessionImpl> impl_;
};

}  // namespace stagecoach::rpcrdma
