// Client: ONC RPC calls over one RPC-over-RDMA connection.
//
// From examples/echo.cc#client:
//
//   Client client(loop, {});
//   client.AsyncConnect("127.0.0.1", port, [&](Result<void, CallError> connected) {
//     if (!connected) {
//       fmt::print(stderr, "{}\n", connected.error().ToString());
//       return loop.Stop();
//     }
//     const auto args = [](XdrWriter& out) { out.String("Hello"); };
//     client.AsyncCall(kEcho, args, {}, [&](Result<Reply, CallError> reply) {
//       answered = reply.has_value();
//       fmt::print("by callback: {}\n", Describe(reply));
//       client.Close([&] { loop.Stop(); });
//     });
//   });
//   loop.Run();
//
// Calls whose arguments and results are placed directly are in examples/placement.cc, coroutines in
// examples/coroutines.cc; docs/rpc_guide.md leads through them.
//
// Arguments written with XdrWriter::EligibleOpaque travel by Read chunk when they do not fit inline; the planner
// decides, within what the program's Binding allows. Of a program without one, nothing is placed directly: a message
// that does not fit inline goes whole, by Position-Zero Read chunk or Reply chunk. A token of Asio takes the place of
// the last lambda: a callback, asio::use_future, asio::use_awaitable (with the executor of
// rpcrdma/loop/loop_context.h). Handlers run on the loop's thread unless they are bound to another executor; never
// inside the call that started the operation. A token with a cancellation slot (asio::bind_cancellation_slot) cancels
// its operation when that is emitted, on the loop's thread.
//
// One Client has one connection: connecting may take several, one after the other, to find the address and the version
// of its server; calls go by the last one alone. When that is gone, every outstanding call ends with an error that says
// whether it may have been executed, later calls fail with kNotConnected, and a new Client is needed. A call is sent
// once, unless a server of version 2 asks for it again (ClientOptions::grown_bytes_max). Session (session.h) makes new
// connections, and sends calls again.
//
// Memory: argument bytes given to EligibleOpaque and result buffers belong to the call until its handler runs: at that
// moment no STag reaches them any more and no Send or RDMA operation uses them. ~Client ends all access before it
// returns; the handlers of calls still outstanding run afterwards from the loop, with kClosed. Nothing is copied but
// what goes inline, so at most an inline threshold's worth. What is used by many calls can be registered once for all
// of them (registered_memory.h).
//
// Threading: everything on the loop's thread (or before it runs). The loop outlives the Client.
#pragma once

#include <sys/socket.h>

#include <asio/async_result.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/event_loop.h"
#include "base/result.h"
#include "base/small_vector.h"
#include "base/trace.h"
#include "rpcrdma/api/completion.h"
#include "rpcrdma/api/error.h"
#include "rpcrdma/api/function.h"
#include "rpcrdma/api/registered_memory.h"
#include "rpcrdma/api/service.h"
#include "rpcrdma/binding/binding.h"
#include "rpcrdma/core/stats.h"
#include "rpcrdma/onc/rpc_message.h"
#include "rpcrdma/wire/extensions.h"
#include "rpcrdma/wire/header.h"
#include "rpcrdma/wire/profile.h"
#include "rpcrdma/wire/properties.h"
#include "rpcrdma/xdr/xdr_reader.h"
#include "rpcrdma/xdr/xdr_writer.h"

namespace stagecoach::rpcrdma {

namespace internal {
class ClientConnection;
class SessionImpl;
struct EncodedCall;
struct ReplyMaker;
struct ReplyStorage;
class VersionMemory;
}  // namespace internal

// Tables of one connection, free entries included. They grow to what was ever in use at a time, and no further.
struct ClientHoldings {
  size_t call_records = 0;
  size_t registration_records = 0;
  uint64_t registered_memories = 0;  // RegisteredMemory that the device knows of this connection at the moment
};

// Host name and port (host byte order) to its addresses, in the order in which they are to be tried, and at least one;
// the error says what is wrong, as a clause. Called once for each connection, on a thread that nobody waits for: it may
// block, and must not refer to anything that could be gone by the time it returns.
using HostResolver =
    std::function<Result<std::vector<sockaddr_storage>, std::string>(const std::string& host, uint16_t port)>;

// The Connection Configuration Protocol (RFC 5666 section 6; docs/ccp.md). Each connection begins with a call that
// tells the server the sizes of ClientOptions and asks for its own, and is connected when that has come to an end: with
// what the server said, or without. A server that does not know the program, refuses the call, or answers it with what
// is no answer leaves the connection as it is; one that does not answer it at all has failed to connect.
struct CcpClientOptions {
  bool enabled = false;
  // Of that call: AUTH_NONE, unless the server asks for more.
  OpaqueAuth credentials;
};

struct ProcedureId {
  uint32_t program = 0;
  uint32_t version = 0;
  uint32_t procedure = 0;
};

// Options out of their ranges are not made to fit: connecting then fails with CallError::Kind::kOptions.
struct ClientOptions {
  // Calls this end is ready to have on the wire at a time; fewer when the server grants fewer or the device's queues
  // are short. 1 to 1024. Each call asks the server for as many as there is use for, up to this.
  uint32_t credits = 64;
  // Largest message sent or received inline, header included: 1024 bytes to 256 KiB, rounded down to whole KiB, which
  // is how the ends tell each other. The connection uses the smaller of this and the peer's.
  uint32_t inline_threshold = 4096;
  // The same for one direction alone, where the two should differ: 0 is inline_threshold. A peer that says nothing of
  // its sizes gets messages of 1024 bytes, whatever stands here.
  uint32_t inline_send_max = 0;
  uint32_t inline_receive_max = 0;
  // Calls that may wait for a credit; at least 1: every call does, if only for a moment.
  uint32_t queued_calls_max = 4096;
  // Bytes of one call message without its eligible items; at least 1024. CallOptions say how long a reply may be.
  uint32_t message_bytes_max = 1 << 20;
  // From Connect() to the established connection, its version, its configuration and the lookup of a host name and all
  // its addresses included: an address that does not answer gets an equal share of what is left, the last one all of
  // it.
  Duration connect_timeout = 10s;
  // For hosts that are not numeric addresses; empty is the system's resolver.
  HostResolver resolver;
  // The RDMA Reads a server may have in flight towards this end (IRD); the device may lower it. At least 1.
  uint8_t incoming_reads = 16;
  // The versions of RPC-over-RDMA that this end speaks (docs/version2.md): version 2 is that of an individual draft, so
  // it is spoken on request. With it among them a connection begins with `probe`, whose answer says which version it
  // has: 2 if the server speaks that, and otherwise 1, if it is among them, if need be on a new connection. Inline
  // sizes are then 4096 bytes at least in both directions.
  TransportVersions versions = kVersion1Alone;
  // The call that a connection begins with: one without arguments that does nothing, whose program the server need not
  // have, since any RPC reply will do. NULL of the Connection Configuration Protocol: every server says something to
  // it.
  ProcedureId probe = {100417, 1, 0};
  // How long its answer is waited for before version 1 is tried on another connection; less where connect_timeout has
  // no room for that. 1 ms to 24 hours.
  Duration probe_wait = 5s;
  // How long calls of version 2 wait for the server's transport properties, within connect_timeout; after that they go
  // by the defaults. 1 ms to 24 hours.
  Duration exchange_wait = 1s;
  // Version 2: what other documents add (rpcrdma/wire/extensions.h), and the properties of theirs that the server is
  // told of this end.
  std::shared_ptr<const Extensions> extensions;
  PropertySet properties;
  // Version 2: memory that one call may be given beyond what was offered for its results and its reply, when the server
  // says that it needs more: the call is then sent again, with its XID. Bytes; 0: such a call fails.
  uint64_t grown_bytes_max = 1 << 20;
  // Version 2: whether calls are sent again that the server may have executed before it found no room for the reply:
  // right where it keeps replies in a duplicate request cache, or procedures are idempotent.
  bool resend_executed = true;
  // Which document of RPC-over-RDMA version 1 this end follows (docs/profiles.md). Nothing on the wire tells the ends
  // which the other one does. With the older ones thresholds are 1024 bytes, whatever stands above, unless `ccp` brings
  // others, and there is no reverse direction: reverse_services must be empty. It says nothing of version 2.
  ProtocolProfile profile = kRfc5666bis;
  // For replies in memory that the server exposes, which only the older documents have, and for reverse_chunks: RDMA
  // Reads of ours in flight (ORD), which the server and the device may lower, and with `ccp` the server once more. For
  // the former, memory for what is read and not delivered yet: a reply that asks for more fails its call.
  uint8_t outgoing_reads = 16;
  uint64_t read_bytes_max = 32u << 20;
  // Of profiles with padding (RDMA_MSGP): data longer than the threshold that goes inline begins at a multiple of so
  // many bytes of its Send, which should be what the server's Receives are aligned to (ServerOptions::receive_align).
  // 0: what the server recommends, where `ccp` has asked it; else no padding. Any other number prevails over what it
  // recommends, and is 1, no padding, or a multiple of 4 up to 65536. A server by the newest document takes padding for
  // data.
  uint32_t padding_align = 0;
  uint32_t padding_threshold = 256;
  // Whether the returned length of a Write chunk has to be that of its result, with or without round-up, as all
  // documents have it. Otherwise one to three bytes more are passed over, as Linux does: there are servers that round
  // the length up wrongly. Each is counted (ConnectionStats::lengths_wrong), and the first of a connection is traced.
  bool exact_lengths = false;
  // Expose memory through type 2 memory windows where the device has them, so that the server may invalidate them with
  // its reply.
  bool memory_windows = true;
  CcpClientOptions ccp;
  // First XID; 0 takes one from the system's generator. Simulations give a number.
  uint32_t first_xid = 0;
  // Programs that this end serves to its server, which may call them on the connection once the upper layer has told it
  // so (RFC 8167; reverse_client.h). They outlive the Client. With none, reverse calls are dropped in version 1; in
  // version 2 the server is told that nothing is served.
  std::vector<Service*> reverse_services;
  // Reverse calls that may be in progress; granted in every reply to one. 1 to 1024; fewer when the device's queues are
  // short. Of no effect without reverse_services.
  uint32_t reverse_credits = 16;
  // Version 2: reverse calls may have chunks, as forward ones do, if the device lets this end have RDMA Reads in flight
  // towards the server (`outgoing_reads` at most). Of no effect without reverse_services.
  bool reverse_chunks = false;
  // What one reverse call may have in Read chunks, and so what those in progress may hold together, beside what
  // services allocate, of memory of this end. Bytes.
  uint64_t reverse_call_bytes_max = 32u << 20;
  TraceSink* trace = nullptr;
  std::string name = "client";  // in traces
};

// What has come of CcpClientOptions on one connection.
struct ConnectionConfiguration {
  bool applied = false;  // what the server answered holds; otherwise what held before
  std::string why_not;   // a clause, unless it is applied
  // Bytes of the longest message that goes inline, transport header included: to the server, and from it.
  uint32_t inline_send = 0;
  uint32_t inline_receive = 0;
  bool read_chunks = true;  // false: the server reads nothing, and a call that does not fit inline cannot be made
  // RDMA Reads that the server lets this end have in flight towards it, and this end has no more; 0: it reads nothing.
  uint32_t server_reads = 0;
  // What the server recommends opaque data of calls to be aligned to; 0: nothing. See ClientOptions::padding_align.
  uint32_t align = 0;
};

inline constexpr uint32_t kReplyBytesMax = 512;

struct CallOptions {
  // Memory for the eligible results of the call, in the order the Binding names them. Offered as Write chunks when the
  // reply might not fit inline. A result longer than its buffer fails the call; in version 2, only one longer than
  // ClientOptions::grown_bytes_max allows. What a buffer has beyond the result is room for the round-up that servers by
  // RFC 5666 count in the length they return, and do not write. Buffers beyond the results that the Binding lists are
  // never offered; Reply::Settle copies into them.
  SmallVector<MutableBytes, 2> result_buffers;
  // Memory that the device gets to know once for many calls. Every eligible argument and every result buffer must lie
  // in it, and it must be writable for the latter; else the call ends with kMemory and is not sent.
  RegisteredMemory registered_memory;
  // Upper bound in bytes of the rest of the reply: RPC header, results, without the results meant for the buffers. A
  // Reply chunk is offered when that might not fit inline. A server that needs more answers ERR_CHUNK; in version 2 it
  // says how much, and gets it within ClientOptions::grown_bytes_max. Absent: what the Binding says of the call's
  // arguments, or kReplyBytesMax where no Binding has the procedure.
  std::optional<uint32_t> reply_bytes_max;
  // False: eligible arguments and results stay within the messages, which go by Position-Zero Read chunk and Reply
  // chunk when they are too long to go inline. For data that must not leave the message it was wrapped in (RPCSEC_GSS
  // integrity and privacy). Result buffers then only say how long the results may be; Reply::Settle copies.
  bool direct_placement = true;
  // AUTH_NONE when null. Read before AsyncCall returns.
  const OpaqueAuth* credentials = nullptr;
  // From AsyncCall until the reply; 0 waits for ever. Expiry closes the connection (see CallError::kTimedOut).
  Duration timeout = 30s;
  // For a Session; a Client sends a call again only when the server asks for that (ClientOptions::grown_bytes_max).
  // Whether a call that was sent may be sent again when its connection ends before the reply: right where it is
  // idempotent, or the server keeps replies in a duplicate request cache. If not, it ends with kConnectionLost.
  bool retransmit = true;
  // Version 2: flags of the call's header that ClientOptions::extensions has. They are sent to servers that have shown
  // that they take them, by the property that the flag's row names (FlagRow::property) [v2:9.4+3]; to others, and in
  // version 1, the call goes without them. A flag whose row names none is sent to every server of version 2: it is for
  // those of which the program knows otherwise that they take it.
  uint32_t transport_flags = 0;
};

using CallId = uint64_t;

// What a successful call brought. Owns the reply message; the eligible results are where CallOptions::result_buffers
// said, or still in the message.
class Reply {
 public:
  Reply();
  Reply(Reply&&) noexcept;
  Reply& operator=(Reply&&) noexcept;
  ~Reply();

  // The version of RPC-over-RDMA that it came in, 1 or 2: that of its connection.
  uint32_t rpcrdma_version() const { return rpcrdma_version_; }
  // Stands at the first byte of the procedure's results. Valid while this Reply lives and is not moved.
  XdrReader results() const { return XdrReader(stream_); }
  // How many bytes the server says that it wrote into result buffer `i` by RDMA Write: round-up included, if it counts
  // that (ProtocolProfile::written_lengths_count_round_up).
  size_t placed_bytes(size_t i) const;
  // Makes sure that an eligible result is in result buffer `i`: copies `data` there unless it lies there already (a
  // server that was offered no Write chunk sends it inline). Returns where it is now: in the buffer, or `data` itself
  // when the buffer is too small: in memory of this Reply.
  ConstBytes Settle(ConstBytes data, size_t i) const;

 private:
  friend struct internal::ReplyMaker;
  ReducedStream stream_;
  SmallVector<MutableBytes, 2> buffers_;
  uint32_t rpcrdma_version_ = 0;
  std::unique_ptr<internal::ReplyStorage> storage_;
};

class Client {
 public:
  using ConnectHandler = UniqueFunction<void(Result<void, CallError>)>;
  using CallHandler = UniqueFunction<void(Result<Reply, CallError>)>;
  using ExtensionHandler = UniqueFunction<void(Result<Extension, CallError>)>;
  // Writes a call's arguments. Runs before AsyncCall returns, and again with a larger buffer when they did not fit: no
  // side effects.
  using ArgsWriter = FunctionRef<void(XdrWriter&)>;

  Client(EventLoop& loop, ClientOptions options);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Says what of a program may be placed directly, in calls made from now on. `binding` outlives the Client; it takes
  // the place of an earlier one of its program and version.
  void Register(const Binding& binding);

  // --- With plain callbacks ---

  // Once per Client. `host` is a numeric address, or a name, which is resolved on a thread of its own; its addresses
  // are tried one after the other, and the error names each. The end of connecting, whichever it is, does not wait for
  // that thread.
  void Connect(std::string_view host, uint16_t port, ConnectHandler handler);
  void Connect(const sockaddr* address, ConnectHandler handler);
  // Ends an attempt to connect with kCancelled; does nothing when there is none.
  void CancelConnect();
  // Returns an id for Cancel, or 0 when the call failed at once (the handler then runs from the loop with the error).
  CallId Call(const ProcedureId& procedure, ArgsWriter args, const CallOptions& options, CallHandler handler);
  // Ends the call with kCancelled as soon as its memory is safe. Its credit returns with the server's reply. Does
  // nothing for an id that is complete. A server that is still at work for a call with chunks may use memory that is
  // invalid by then, and as with every RDMA device that ends the connection.
  void Cancel(CallId call);
  // Sends a header of an extension's type, without an RPC message: `body` is what it has behind the fields that all
  // headers of version 2 have. Ends as a call does, with a header of an extension's in answer, or an error; what the
  // type means is its author's. On a connection of version 1, and of a type that ClientOptions::extensions does not
  // have, it ends with kNotSpoken. A `timeout` that expires ends this alone. Cancel() takes its id as well.
  CallId SendExtension(uint32_t type, std::vector<std::byte> body, ExtensionHandler handler, Duration timeout = 30s);
  // Orderly end: refuses new calls, disconnects, completes what is outstanding with kClosed, then runs `handler`.
  // Again: runs both.
  void Close(UniqueFunction<void()> handler);

  // --- With completion tokens ---

  // Signature void(Result<void, CallError>).
  template <typename Token>
  auto AsyncConnect(std::string_view host, uint16_t port, Token&& token) {
    return asio::async_initiate<Token, void(Result<void, CallError>)>(
        [this](auto handler, std::string host, uint16_t port) {
          internal::Begin<Result<void, CallError>>(std::move(handler), [&](auto completion) {
            Connect(host, port, std::move(completion));
            return ConnectCanceller();
          });
        },
        token, std::string(host), port);
  }

  // Signature void(Result<Reply, CallError>). With a token that starts lazily (use_awaitable) everything `args` and
  // `options` refer to must stay alive until the operation is awaited: await it in the same expression.
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

  // Signature void(Result<Extension, CallError>). See SendExtension.
  template <typename Token>
  auto AsyncExtension(uint32_t type, std::vector<std::byte> body, Duration timeout, Token&& token) {
    return asio::async_initiate<Token, void(Result<Extension, CallError>)>(
        [this](auto handler, uint32_t type, std::vector<std::byte> body, Duration timeout) {
          internal::Begin<Result<Extension, CallError>>(std::move(handler), [&](auto completion) {
            return Canceller(SendExtension(type, std::move(body), std::move(completion), timeout));
          });
        },
        token, type, std::move(body), timeout);
  }

  // Signature void().
  template <typename Token>
  auto AsyncClose(Token&& token) {
    return asio::async_initiate<Token, void()>(
        [this](auto handler) { Close(internal::EndOnItsExecutor(std::move(handler))); }, token);
  }

  // --- What is going on ---

  bool connected() const;
  // Calls sent or waiting.
  size_t outstanding() const;
  // Cancelled calls that the server may still be at work for: each keeps its credit until its reply is in.
  size_t abandoned() const;
  ClientHoldings holdings() const;
  // "127.0.0.1:20049", as asked for.
  const std::string& peer() const;
  // Empty until the server was asked and the connection is made.
  const std::optional<ConnectionConfiguration>& configuration() const;
  // The version of RPC-over-RDMA that the connection has, 1 or 2; 0 until it is made. It never changes.
  uint32_t version() const;
  // What the server has said of itself, extensions' properties among it; null until it has, and in version 1. Lives as
  // long as the Client.
  const PropertySet* peer_properties() const;
  // The call that a connection begins with, and the one that configures it, count like any other; so does a connection
  // that was given up for one of version 1.
  ConnectionStats stats() const;
  // Of reverse calls.
  ConnectionStats reverse_stats() const;
  // When a reverse call was last in progress; empty when none ever was. A connection that is in use for them is neither
  // idle nor silent.
  std::optional<Instant> reverse_active_at() const;
  // The connection, its credits and each call that is not over, in lines: for the report of a world that has stopped
  // moving, and for a debugger. The same history gives the same text.
  std::string DebugString() const;
  EventLoop& loop() const;
  // Called once if the connection ends for a reason that is not Close() or ~Client.
  void OnConnectionLost(UniqueFunction<void(const CallError&)> handler);

 private:
  friend class internal::SessionImpl;

  // They may outlive the Client, and do nothing then.
  UniqueFunction<void()> ConnectCanceller();
  UniqueFunction<void()> Canceller(CallId call);

  // --- For Session ---
  CallId Submit(const internal::EncodedCall& call, CallHandler handler);
  // See Requester.
  uint32_t room() const;
  bool KnowsXid(uint32_t xid) const;
  // Runs when something came in, after the handlers of calls that ended with it: credits come back with replies to
  // cancelled calls as well, of which nobody else is told.
  void OnProgress(UniqueFunction<void()> handler);
  // Ends the connection, which counts as lost: `why` is a clause.
  void Drop(const std::string& why);
  // What is known of servers that do not speak version 2, from before, and for later. Before connecting.
  void UseVersionMemory(std::shared_ptr<internal::VersionMemory> memory);

  std::shared_ptr<internal::ClientConnection> connection_;
};

}  // namespace stagecoach::rpcrdma
