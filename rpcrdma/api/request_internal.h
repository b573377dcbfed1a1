// What stands behind a Request: the connection it came by, and what is kept of the call until its end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "rpcrdma/api/service.h"
#include "rpcrdma/core/replay_cache.h"
#include "rpcrdma/core/responder.h"
#include "rpcrdma/verbs/block_pool.h"

namespace stagecoach::rpcrdma::internal {

class ServerImpl;
struct RequestState;

// Where calls come in. When the peer is gone, its methods do nothing or say so: a Request may outlive its connection.
class RequestHost {
 public:
  virtual ~RequestHost() = default;

  virtual ClientId id() const = 0;
  virtual const std::string& peer() const = 0;
  virtual bool connected() const = 0;
  virtual uint32_t rpcrdma_version() const = 0;
  virtual std::optional<uint64_t> result_room(RequestId id, size_t i) const = 0;
  virtual Block* Allocate(size_t bytes) = 0;
  virtual const std::shared_ptr<BlockPool>& pool() const = 0;
  virtual uint32_t xid(RequestId id) const = 0;
  virtual uint32_t flags(RequestId id) const = 0;
  // Ends the call. `memory` keeps the eligible items' memory; with `copy_items` there is none, and they are copied.
  virtual void Finish(RequestState& state, const ReplyHeader& header, Request::ResultsWriter results,
                      std::shared_ptr<const void> memory, bool copy_items) = 0;
};

struct RequestState {
  std::shared_ptr<RequestHost> connection;
  RequestId id = 0;
  // Of a call that a server has a record of: who has it, when the connection is gone too.
  std::weak_ptr<ServerImpl> server;
  ReplayCache::Record* record = nullptr;
  CallHeader header;
  XdrReader args{ConstBytes()};
  size_t eligible_results = 0;             // that the Binding lists
  std::shared_ptr<LastingMemory> lasting;  // of the reply
};

}  // namespace stagecoach::rpcrdma::internal
