#include "rpcrdma/core/negotiation.h"

#include <algorithm>

namespace stagecoach::rpcrdma {

PrivateData MakePrivateData(const LocalCapabilities& own) {
  const uint32_t size = std::clamp(own.inline_threshold / 1024 * 1024, kDefaultInlineThreshold, kMaxInlineThreshold);
  return {.remote_invalidation = own.remote_invalidation, .send_size = size, .receive_size = size};
}

NegotiatedLimits Negotiate(const LocalCapabilities& own, ConstBytes peer_private_data) {
  return Negotiate(MakePrivateData(own), FindPrivateData(peer_private_data));
}

PlanLimits MakePlanLimits(const LocalCapabilities& own, const NegotiatedLimits& negotiated) {
  PlanLimits limits;
  limits.send_inline = negotiated.send_inline;
  limits.receive_inline = negotiated.receive_inline;
  limits.segment_length_max = std::max(own.segment_length_max, 1u);
  return limits;
}

}  // namespace stagecoach::rpcrdma
