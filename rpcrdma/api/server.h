// Server: listens for RPC-over-RDMA connections and hands their calls to Services.
//
// From examples/echo.cc#server:
//
//   AsioLoop loop;
//   EchoService echo;  // outlives the server, as the loop does
//   Server server(loop, {});
//   server.Register(&echo);
//   // RPC-over-RDMA has port 20049; 0 takes a free one.
//   if (auto listening = server.Listen("127.0.0.1", 0); !listening) {
//     fmt::print(stderr, "{}\n", listening.error().ToString());
//     return 1;
//   }
//
// From examples/echo.cc#stop:
//
//   // Takes no more clients, lets calls in progress finish for at most five seconds, then disconnects everybody.
//   server.Stop(5s, [&] { loop.Stop(); });
//   loop.Run();
//
// Threading: everything on the loop's thread (or before it runs). Loop and services outlive the Server.
#pragma once

#include <sys/socket.h>

#include <asio/async_result.hpp>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/event_loop.h"
#include "base/result.h"
#include "base/time.h"
#include "base/trace.h"
#include "rpcrdma/api/completion.h"
#include "rpcrdma/api/error.h"
#include "rpcrdma/api/extension.h"
#include "rpcrdma/api/function.h"
#include "rpcrdma/api/service.h"
#include "rpcrdma/core/chunk_planner.h"
#include "rpcrdma/core/replay_cache.h"
#include "rpcrdma/core/stats.h"
#include "rpcrdma/onc/rpc_message.h"
#include "rpcrdma/wire/chunk_list.h"
#include "rpcrdma/wire/header.h"
#include "rpcrdma/wire/profile.h"

namespace stagecoach::rpcrdma {

namespace internal {
class ReverseHub;
class ServerImpl;
}  // namespace internal

// The Connection Configuration Protocol (RFC 5666 section 6; docs/ccp.md): clients may ask for the sizes of a
// connection by a call, once for each, and not while others are in progress. As the first call of its connection it may
// have all buffers replaced, by larger or smaller ones; so until the first reply a connection has one Receive, and a
// client that sends more before it, as no document allows, does without. With shared Receives or a reverse direction
// buffers stay as they are, and that is what the client is told.
struct CcpServerOptions {
  // Serve the program, which no Service may have then.
  bool enabled = false;
  // Bytes of the longest messages that a client can ask for; as for the options they go beyond. 0, or less than those:
  // no more than without. Calls that would have replies above the first, of clients that offer no chunk for them
  // because they can take more, are answered with ERR_CHUNK.
  uint32_t inline_send_max = 0;
  uint32_t inline_receive_max = 0;
  // Of credentials, as Service::flavors has them. Those that can stand here prove nothing: RPCSEC_GSS, which could, is
  // not implemented.
  std::vector<AuthFlavor> flavors = {AuthFlavor::kNone, AuthFlavor::kSys};
};

// Options out of their ranges are not made to fit: Listen then fails with CallError::Kind::kOptions.
struct ServerOptions {
  // Calls one client may have in progress; granted in every reply. 1 to 1024; fewer when the device's queues are
  // short.
  uint32_t credits = 64;
  // Receives that all connections draw on, through a shared receive queue: memory for an inline message each,
  // however many clients there are. Grants follow from what is left, so that nobody can be without a Receive that was
  // granted, and a client that sends more than it was granted is disconnected. A connection for which not one can be
  // promised is rejected; a quarter is kept for those to come. 0: each connection has `credits` of its own, as on
  // devices without shared receive queues, and on iWARP (docs/decisions/0030). 0 to 65536, and no more than the device
  // has.
  uint32_t shared_receives = 0;
  // As in ClientOptions.
  uint32_t inline_threshold = 4096;
  uint32_t inline_send_max = 0;
  uint32_t inline_receive_max = 0;
  // Connections beyond this are rejected, and their clients are told why, as for every other limit
  // (rpcrdma/wire/refusal.h). One whose client is gone counts for as long as a Request of it is held.
  uint32_t clients_max = 128;
  // The same for the connections from one address, whatever their ports. Here and in what follows a network of 64 bits
  // of IPv6 counts as one address, and so does this host with all of loopback. 0: half of clients_max, rounded up.
  uint32_t address_connections_max = 0;
  // Requests that services hold for one address at a time, over all its connections; others wait, and connections take
  // turns. Grants shrink with it, so clients that keep to them do not get that far, but each connection has one credit.
  // At least 1.
  uint32_t address_requests_max = 1024;
  // A client that is silent for so long is disconnected, unless a service is at work for one of its calls. 0: never.
  // The default is a bit longer than Sessions, and NFS clients of Linux, keep a connection that nothing uses. A client
  // that only waits to be called (reverse_credits) is silent, too, but for its answers.
  Duration idle_timeout = std::chrono::minutes(6);
  // How long a client may keep the data that it has promised, or leave a reply that holds memory, whatever else it says
  // meanwhile. Then it is disconnected, and what it held is free for others. From 1 ms to 24 hours; 0: for ever.
  Duration data_time = 30s;
  // The time begins anew when all has come that was awaited when it began. Until then each second's worth of bytes at
  // this rate gives the client a second more, up to the whole of data_time: a slow client may go on, and one that sends
  // a byte now and then may not. Bytes count when the RDMA Read or the reply that moves them has completed, so each
  // of those must complete within data_time. In bytes per second, at most 1 TiB; 0: any number of bytes begins the time
  // anew.
  uint64_t data_rate_min = 16384;
  // How often Server::OnClientRefused is told of refusals for one and the same reason; 0: of each.
  Duration refusals_told_every = 60s;
  int backlog = 64;
  // RDMA Reads in flight towards one client (ORD); the client and the device may lower it.
  uint8_t outgoing_reads = 16;
  // Memory held for the connections of one address: arguments that came by Read chunk and Buffers. A call that has to
  // wait for it waits, in the order in which the connections began to. Counted in units of 4 KiB. At most 1 TiB; raised
  // to call_bytes_max and 4 KiB for each of chunk_limits.read_segments_max, so that one call always fits. Where two
  // calls fit into bytes_max, no address has more than half of that.
  uint64_t client_bytes_max = 256u << 20;
  // The same for all connections together. At most 1 TiB; raised so that one call always fits. Addresses that have to
  // wait for it take turns. Memory that is free again is kept for the next calls: up to a quarter of this limit, in
  // addition to it, and up to 64 MiB for one address. What nobody has needed for 10 s goes back to the system.
  uint64_t bytes_max = 1u << 30;
  // Memory one call may ask for by its Read chunks, at most 1 TiB; more is answered with ERR_CHUNK.
  uint64_t call_bytes_max = 32u << 20;
  // Memory one call may offer for its reply, by Write chunks and Reply chunk together; more is answered with ERR_CHUNK.
  uint64_t call_offer_bytes_max = 1u << 30;
  // How many chunks and segments the header of one call may name; more is answered with ERR_CHUNK. Each at most 16384:
  // no header has room for more.
  ChunkListLimits chunk_limits;
  // Whether replies that would fit inline go into the Reply chunk, too, when the client offered one.
  ReplyChunkUse reply_chunk_use = ReplyChunkUse::kWheneverOffered;
  // As in ClientOptions; with the older documents reverse_credits must be 0. Those have replies that the client reads
  // from memory of the server, where it has offered no chunk, or too small a one, for what does not fit inline; so with
  // them shared_receives must be 0, as whoever shares Receives could reach what is exposed to one.
  ProtocolProfile profile = kRfc5666bis;
  // The versions of RPC-over-RDMA that are taken, of 1 and 2. The first message of a connection settles its own, which
  // it keeps; clients of every version come to the same port. Version 2 is draft-cel-nfsv4-rpcrdma-version-two-09, an
  // individual draft that nobody else is known to speak. With it messages of 4096 bytes have to fit inline, each way.
  // `profile` and `ccp` are about version 1.
  TransportVersions versions;
  // Of version 2: the extensions that are known here, what clients are told of them beside the properties of the base
  // protocol, and who answers messages of their header types; a type without an entry is answered as if it were not
  // known (docs/extensions.md).
  std::shared_ptr<const Extensions> extensions;
  PropertySet properties;
  std::map<uint32_t, ExtensionHandler> answer_extension;
  // Of such replies. How many one client may have to read at a time: further ones wait; 0 to 1024, and 0 makes none.
  // Each takes a Receive for the message that says that it was read. Their bytes together: one that is longer is
  // answered with ERR_CHUNK, and at most 1 TiB. How long a client may take to read one, from 1 ms to 24 hours: then it
  // is disconnected. And the RDMA Reads that it may have in flight (IRD), of reverse calls with chunks as well.
  uint32_t exposed_replies_max = 16;
  uint64_t exposed_bytes_max = 64u << 20;
  Duration exposed_time = 30s;
  uint8_t incoming_reads = 16;
  // Receives begin at multiples of so many bytes, a power of two up to 65536: so does data that a client has padded to
  // that, of profiles with padding (RDMA_MSGP). By these a server says so to clients that configure their connections
  // (`ccp`), which pad to it from then on; 1 is nothing to say.
  uint32_t receive_align = 1;
  // Bytes of a reply message without its eligible results; at least 1024.
  uint32_t message_bytes_max = 1 << 20;
  // The duplicate request cache: what a client repeats after it lost its connection is not executed again (see
  // Service::idempotent). Survives connections, and ends with the Server.
  ReplayLimits replay;
  // Who a client is to that cache; default: the address it connects from, without the port. Called on the loop's thread
  // for each call that is recorded. Whatever it goes by must be verified: a client that can choose another's identity
  // can see the replies to it, and one that has many gets the share of many.
  std::function<std::string(const std::string& host, const CallHeader& header)> replay_identity;
  CcpServerOptions ccp;
  // Calls of our own that one client may have to answer at a time (see reverse_client.h); fewer when the client grants
  // fewer or the device's queues are short. 0 to 1024; with 0, or with shared Receives, connections have no reverse
  // direction.
  uint32_t reverse_credits = 0;
  // Expose memory of reverse calls, which only version 2 has, through type 2 memory windows where the device has them.
  bool memory_windows = true;
  // First XID of reverse calls; 0 takes one from the system's generator. Simulations give a number.
  uint32_t first_xid = 0;
  TraceSink* trace = nullptr;
  std::string name = "server";  // in traces
};

// A connection request that was rejected.
struct RefusedClient {
  std::string peer;         // "10.0.0.7:53422"
  std::string why;          // a clause: "at most 64 clients at a time"
  std::string_view option;  // of ServerOptions, which sets the limit; empty: none does
  uint64_t untold = 0;      // others that were refused for the same reason since the last one that was told
};

struct ServerStats {
  ConnectionStats connections;    // summed over all connections, past and present; credits_granted over those present
  ConnectionStats reverse;        // the same for reverse calls
  uint64_t clients = 0;           // connected now
  uint64_t clients_total = 0;     // since the start
  uint64_t clients_rejected = 0;  // for any reason:
  struct Rejected {
    uint64_t stopping = 0;
    uint64_t clients_max = 0;
    uint64_t address_connections_max = 0;
    uint64_t receives = 0;  // none of the shared ones could be promised
    uint64_t device = 0;    // it refused what the connection needs
  } rejected;
  uint64_t clients_idle = 0;     // disconnected for it
  uint64_t requests_waited = 0;  // times that a connection had to wait for address_requests_max
  ReplayStats replay;            // the duplicate request cache
};

// What a server holds at this moment. The same work done again and again leaves it as it is.
struct ServerHoldings {
  uint64_t connections = 0;  // being made, open, or gone with a Request of theirs still held
  uint64_t requests = 0;     // with services
  // Working memory of the open connections: blocks in use and kept for the next user.
  uint64_t pool_blocks = 0;
  uint64_t pool_bytes = 0;
  uint64_t registered_bytes = 0;  // of them, for writing results from
  uint64_t registered_blocks = 0;
  // Sends and Receives of the open connections, but for shared ones.
  uint64_t buffer_bytes = 0;
  // Entries of the open connections' tables of registrations, free ones included.
  uint64_t registration_records = 0;
  // RegisteredMemory that devices know at the moment, for each connection that has used it; with shared Receives, for
  // all connections together.
  uint64_t registered_memories = 0;
  // Shared Receives: all of them, those that are posted (the others hold calls), and how many are promised to clients.
  uint64_t shared_receives = 0;
  uint64_t shared_receives_posted = 0;
  uint64_t shared_receives_reserved = 0;
};

class Server {
 public:
  Server(EventLoop& loop, ServerOptions options);
  // Ends everything at once; after it returns no connection touches memory. Requests still held by services stay valid
  // and lead nowhere.
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Before Listen. Two services must not have the same program.
  void Register(Service* service);

  // Once. `host` is a numeric address or a name (then resolved before this returns); port 0 takes a free one.
  Result<void, CallError> Listen(std::string_view host, uint16_t port);
  Result<void, CallError> Listen(const sockaddr* address);
  // Bound port, host byte order; 0 before Listen.
  uint16_t port() const;
  // Bound address, port included; nullopt before Listen.
  std::optional<sockaddr_storage> address() const;

  // Accepts no more clients, lets calls in progress finish for at most `grace`, disconnects everybody, then runs
  // `done`. Each client is disconnected when the Sends of its replies have completed. Calls that arrive meanwhile, or
  // still wait to be executed, are not executed; their clients see the connection end (CallError::kConnectionLost).
  // Again: gives another grace, and runs both. When the Server is destroyed first, the loop runs them afterwards.
  void Stop(Duration grace, UniqueFunction<void()> done);
  // Signature void().
  template <typename Token>
  auto AsyncStop(Duration grace, Token&& token) {
    return asio::async_initiate<Token, void()>(
        [this, grace](auto handler) { Stop(grace, internal::EndOnItsExecutor(std::move(handler))); }, token);
  }

  ServerStats stats() const;
  ServerHoldings holdings() const;
  // Each client's connection, memory, and calls that are not answered: see Client::DebugString.
  std::string DebugString() const;

  // Observers for logs: "10.0.0.7:53422", and why it went.
  void OnClientConnected(UniqueFunction<void(const std::string& peer)> observer);
  void OnClientGone(
      UniqueFunction<void(const std::string& peer, const std::string& why, const ConnectionStats&)> observer);
  // Of each reason the first one, and then one in ServerOptions::refusals_told_every: a flood of requests is no flood
  // of words.
  void OnClientRefused(UniqueFunction<void(const RefusedClient&)> observer);

 private:
  friend class ReverseClient;
  const std::shared_ptr<internal::ReverseHub>& reverse_hub() const;

  std::shared_ptr<internal::ServerImpl> impl_;
};

}  // namespace stagecoach::rpcrdma
