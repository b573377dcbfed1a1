// ReverseService: the reverse direction at the client. Calls that the server makes come in here, go to the Services of
// ClientOptions::reverse_services, and are answered: inline (draft-ietf-nfsv4-rfc5666bis-01 section 8, RFC 8167), or in
// version 2 with chunks, where this end said so (draft-cel-nfsv4-rpcrdma-version-two-09 section 4.2.2).
//
// A client that may speak version 2 has one whatever it serves: somebody has to answer what a server is free to send,
// as RDMA2_CONNPROP and header types that are not known here [v2:5.2#3].
//
// Part of a ClientConnection, which Requests keep alive by it: what their arguments refer to lies in its buffers.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/event_loop.h"
#include "base/trace.h"
#include "rpcrdma/api/dispatch.h"
#include "rpcrdma/api/request_internal.h"
#include "rpcrdma/binding/binding.h"
#include "rpcrdma/core/connection_terms.h"
#include "rpcrdma/core/duplex.h"
#include "rpcrdma/core/requester.h"
#include "rpcrdma/core/responder.h"
#include "rpcrdma/verbs/block_pool.h"
#include "rpcrdma/verbs/connection.h"

namespace stagecoach::rpcrdma::internal {

class ReverseService final : public RequestHost {
 public:
  struct Options {
    DuplexShares shares;
    // Of the connection; outlives the object. Null: the connection is of version 1.
    ConnectionTerms* terms = nullptr;
    uint32_t send_inline = 1024;  // bytes, as negotiated; version 1
    // What is read for calls, and what services allocate: the connection's pool, of MakeAllowance(call_bytes_max).
    std::shared_ptr<MemoryAllowance> memory;
    std::shared_ptr<BlockPool> pool;
    uint64_t call_bytes_max = 32u << 20;   // by Read chunks
    uint32_t message_bytes_max = 1 << 20;  // of a reply without its eligible results
    uint32_t reads_max = 0;                // RDMA Reads in flight (ORD)
    std::vector<Service*> services;
    std::string peer;
    std::string name;
    TraceSink* trace = nullptr;
  };
  // `owner` holds this object, and `requester` and `connection`, which it is of.
  ReverseService(EventLoop& loop, const Options& options, Requester& requester, Connection& connection,
                 std::weak_ptr<void> owner);

  ~ReverseService() override;

  // Of both directions.
  ConnectionEngine* engine() { return &duplex_; }
  void Start();

  // What a client says of itself that serves this, on a connection that lets it have `reads_max` RDMA Reads in flight.
  static ReverseSupport SupportOf(const std::vector<Service*>& services, uint32_t reads_max);
  // Memory for what calls may ask for: one always fits, into however many chunks it is divided.
  static std::shared_ptr<MemoryAllowance> MakeAllowance(uint64_t call_bytes_max);

  // Bytes of the longest reply from now on; no more than the Send buffers have. Version 1.
  void SetSendInline(uint32_t send_inline);
  // The version of the connection is known now.
  void OnVersionSettled();
  // Hands out calls that came in.
  void OnProgress();
  // The connection has ended; Requests lead nowhere from now on.
  void OnGone();

  // When a call was last handed out or answered: now, while one is in progress. Empty when there was none.
  std::optional<Instant> active_at() const { return executing_ > 0 ? loop_.Now() : active_at_; }
  const ConnectionStats& stats() const { return responder_.stats(); }
  std::string DebugString() const { return responder_.DebugString(); }

  // --- RequestHost ---
  ClientId id() const override { return 0; }
  const std::string& peer() const override { return options_.peer; }
  bool connected() const override { return connection_ != nullptr && connection_->established(); }
  std::optional<uint64_t> result_room(RequestId id, size_t i) const override { return responder_.result_room(id, i); }
  uint32_t rpcrdma_version() const override { return is_v2() ? kRpcRdmaVersion2 : kRpcRdmaVersion1; }
  Block* Allocate(size_t bytes) override { return options_.pool->Allocate(bytes); }
  const std::shared_ptr<BlockPool>& pool() const override { return options_.pool; }
  uint32_t xid(RequestId id) const override { return responder_.xid(id); }
  uint32_t flags(RequestId id) const override { return responder_.flags(id); }
  void Finish(RequestState& state, const ReplyHeader& header, Request::ResultsWriter results,
              std::shared_ptr<const void> memory, bool copy_items) override;

 private:
  bool is_v2() const { return options_.terms != nullptr && options_.terms->is_v2(); }
  void Dispatch(RequestId id);
  void TryMemory();
  void ProgressLater();
  bool Encode(const RequestState& state, const ReplyHeader& header, Request::ResultsWriter results,
              std::shared_ptr<const void> memory, bool copy_items);

  EventLoop& loop_;
  const Options options_;
  std::map<uint32_t, Service*> services_;
  Connection* connection_;  // null when it has ended
  const std::weak_ptr<void> owner_;
  const std::shared_ptr<int> life_ = std::make_shared<int>();  // ends with this object
  BindingRegistry bindings_;
  uint32_t send_inline_;
  Responder responder_;
  Duplex duplex_;
  size_t executing_ = 0;  // calls handed out and not answered
  std::optional<Instant> active_at_;
};

}  // namespace stagecoach::rpcrdma::internal
