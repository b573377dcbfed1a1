// What options may be. They are looked at once, when an object is made of them; it then says by its first operation
// what is wrong with them, with CallError::Kind::kOptions, and does nothing else.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "rpcrdma/api/client.h"
#include "rpcrdma/api/server.h"
#include "rpcrdma/api/session.h"
#include "rpcrdma/core/negotiation.h"

namespace stagecoach::rpcrdma::internal {

// The first option that is out of its range, as a clause: "ClientOptions::credits is 0, and must be from 1 to 1024".
std::optional<std::string> FaultOf(const ClientOptions& options);
std::optional<std::string> FaultOf(const SessionOptions& options);
std::optional<std::string> FaultOf(const ServerOptions& options);

// Gives each direction without an inline threshold of its own that of both, and rounds to what the ends can tell each
// other (InlineThreshold).
template <typename Options>
void CompleteInlineThresholds(Options* options) {
  for (uint32_t* size : {&options->inline_send_max, &options->inline_receive_max}) {
    *size = InlineThreshold(*size != 0 ? *size : options->inline_threshold);
  }
}

}  // namespace stagecoach::rpcrdma::internal
