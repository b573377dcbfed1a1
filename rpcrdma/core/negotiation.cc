#include "rpcrdma/core/negotiation.h"

#include <algorithm>

namespace stagecoach::rpcrdma {

// [5666bis:4.3.1+3] [5666:6.1+2] [2004:6.1+2]
uint32_t InlineThreshold(uint32_t bytes) {
  return std::clamp(bytes / 1024 * 1024, kDefaultInlineThreshold, kMaxInlineThreshold);
}

PrivateData MakePrivateData(const LocalCapabilities& own) {
  return {.remote_invalidation = own.remote_invalidation,
          .send_size = InlineThreshold(own.send_size),
          .receive_size = InlineThreshold(own.receive_size)};
}

// [5666bis:4.3.1+2] [5666bis:6.4+2] [pvtdata:1+1] [pvtdata:4+2] Once for each connection, whatever the peer said or did
// not say.
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

void TraceNegotiated(TraceSink* sink, Instant now, std::string_view component, const NegotiatedFacts& facts) {
  Trace(sink, now, component, "connection.negotiated",
        {{"peer", facts.peer},
         {"private_data", facts.private_data ? "found" : "none"},
         {"send_inline", uint64_t{facts.limits.send_inline}},
         {"receive_inline", uint64_t{facts.limits.receive_inline}},
         {"invalidation", uint64_t{facts.limits.remote_invalidation ? 1u : 0u}},
         {"reads", uint64_t{facts.reads}},
         {"reverse", uint64_t{facts.reverse}}});
}

void TraceVersion(TraceSink* sink, Instant now, std::string_view component, const ConnectionTerms& terms) {
  Trace(sink, now, component, "connection.version", {{"version", uint64_t{terms.version()}}});
}

}  // namespace stagecoach::rpcrdma
