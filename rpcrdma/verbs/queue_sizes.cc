#include "rpcrdma/verbs/queue_sizes.h"

#include <algorithm>

#include "rpcrdma/core/duplex.h"

namespace stagecoach::rpcrdma::internal {
namespace {

// One message to send beside the markers, and one to receive.
constexpr uint32_t kSendQueueMin = kMarkers + 1;
constexpr uint32_t kCompletionsMin = kSendQueueMin + 1;

// More requests without a completion than this save nothing worth the Send buffers that they hold.
constexpr uint32_t kSignalIntervalMax = 16;

}  // namespace

QueueSizes SizesForCredits(uint32_t credits, uint32_t other_requests) {
  QueueSizes sizes;
  sizes.signal_interval = std::clamp(credits / 4, 1u, kSignalIntervalMax);
  sizes.receives = credits;
  sizes.sends = credits + 2 * sizes.signal_interval;
  sizes.send_queue = sizes.sends + other_requests + kMarkers;
  return sizes;
}

void AddReverse(uint32_t calls, QueueSizes* sizes) {
  const uint32_t sends = ReverseSendBuffers(calls);
  sizes->receives += calls;
  sizes->sends += sends;
  sizes->send_queue += sends;
}

std::optional<QueueSizes> FitToDevice(const QueueSizes& wanted, int max_qp_wr, int max_cqe) {
  const auto requests = static_cast<uint32_t>(std::max(max_qp_wr, 0));
  const auto completions = static_cast<uint32_t>(std::max(max_cqe, 0));
  if (requests < kSendQueueMin || completions < kCompletionsMin) return std::nullopt;
  QueueSizes sizes = wanted;
  sizes.send_queue = std::min(sizes.send_queue, requests);
  sizes.receives = std::min(sizes.receives, requests);
  if (sizes.completions() > completions) {
    // Receives are credits, and the other requests of a call take several places for one of its Receives.
    sizes.receives = std::min(sizes.receives, std::max(completions / 4, 1u));
    sizes.send_queue = std::min(sizes.send_queue, completions - sizes.receives);
  }
  sizes.sends = std::min(sizes.sends, sizes.send_queue - kMarkers);
  // Among the requests that fill the queue, or hold all Send buffers, is one that asks for a completion.
  sizes.signal_interval = std::clamp(sizes.signal_interval, 1u, std::max(sizes.sends / 2, 1u));
  return sizes;
}

}  // namespace stagecoach::rpcrdma::internal
