// FitToDevice: how long the queues of a connection are, between what its owner would like and what the device has.
//
// A device with short queues makes a connection slower, not impossible: fewer Receives are fewer credits, and commands
// that find the send queue full wait for room. Only a device without room for one message each way is of no use.
#pragma once

#include <cstdint>
#include <optional>

namespace stagecoach::rpcrdma::internal {

// Counts of work requests, except for `signal_interval`.
struct QueueSizes {
  uint32_t receives = 0;         // Receive buffers
  uint32_t sends = 0;            // Send buffers
  uint32_t send_queue = 0;       // room for work requests of any kind, kMarkers among them
  uint32_t signal_interval = 1;  // one work request in so many asks for a completion

  uint32_t completions() const { return receives + send_queue; }
};

// Places on the send queue kept for requests of our own: one that tells when it is idle, one that tells when it has
// drained.
inline constexpr uint32_t kMarkers = 2;

// What a connection of this many credits would like: a Receive for each, and Send buffers for as many and for those
// that are on their way home while completions are asked for seldom. `other_requests` is room on the send queue beside
// one request for each Send buffer.
QueueSizes SizesForCredits(uint32_t credits, uint32_t other_requests);

// Adds what `calls` at a time in the reverse direction need: a Receive for each, and Send buffers.
void AddReverse(uint32_t calls, QueueSizes* sizes);

// `wanted` cut down to queues of `max_qp_wr` and a completion queue of `max_cqe`, so that a full send queue always has
// a completion to come. Empty when the device has no room for one message each way.
std::optional<QueueSizes> FitToDevice(const QueueSizes& wanted, int max_qp_wr, int max_cqe);

}  // namespace stagecoach::rpcrdma::internal
