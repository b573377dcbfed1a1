// Negotiation: from what both ends said when the connection was made to the limits the engines work with.
//
// The private data itself is wire/private_data.h. Settings hold for one connection and are worked out anew for the next
// [pvtdata:4#1].
#pragma once

#include <cstdint>
#include <string_view>

#include "base/bytes.h"
#include "base/trace.h"
#include "rpcrdma/core/chunk_planner.h"
#include "rpcrdma/core/connection_terms.h"
#include "rpcrdma/wire/private_data.h"

namespace stagecoach::rpcrdma {

// `bytes` as an inline threshold that private data can state: rounded down to a multiple of 1024, 1024 to 262144.
uint32_t InlineThreshold(uint32_t bytes);

// What one end brings. Bytes.
struct LocalCapabilities {
  // The largest Send it makes, and the largest that its Receives can take: chosen separately, because calls and replies
  // differ, and Receive buffers cost memory for as long as the connection lives [5666bis:4.3.1#1].
  uint32_t send_size = 4096;
  uint32_t receive_size = 4096;
  // Requester: every steering tag it exposes on this connection may be invalidated by the peer. Responder: its device
  // can Send With Invalidate, and it exposes no steering tags.
  bool remote_invalidation = false;
  // Longest piece of memory the device registers or moves at once.
  uint32_t segment_length_max = 1u << 30;
};

PrivateData MakePrivateData(const LocalCapabilities& own);

// `peer_private_data` is what the connection manager delivered, possibly nothing, possibly somebody else's bytes.
NegotiatedLimits Negotiate(const LocalCapabilities& own, ConstBytes peer_private_data);

PlanLimits MakePlanLimits(const LocalCapabilities& own, const NegotiatedLimits& negotiated);

// What an end makes of a new connection, as the event connection.negotiated of `component`.
struct NegotiatedFacts {
  std::string_view peer;      // its address
  bool private_data = false;  // the peer's was found; otherwise the defaults hold [pvtdata:5.1#1]
  NegotiatedLimits limits;
  uint32_t reads = 0;    // RDMA Reads in flight: from this end (responder), towards it (requester)
  uint32_t reverse = 0;  // Receives for the reverse direction; 0: it is not offered
};
void TraceNegotiated(TraceSink* sink, Instant now, std::string_view component, const NegotiatedFacts& facts);

// Which version a connection has: the event connection.version, once.
void TraceVersion(TraceSink* sink, Instant now, std::string_view component, const ConnectionTerms& terms);

}  // namespace stagecoach::rpcrdma
