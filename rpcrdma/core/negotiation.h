// Negotiation: from what both ends said when the connection was made to the limits the engines work with.
//
// The private data itself is wire/private_data.h. Settings hold for one connection and are worked out anew for the next
// [pvtdata:4#1].
#pragma once

#include <cstdint>

#include "base/bytes.h"
#include "rpcrdma/core/chunk_planner.h"
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

}  // namespace stagecoach::rpcrdma
