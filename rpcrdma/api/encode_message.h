// EncodeMessage: a message whose length is known when it has been written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "rpcrdma/api/function.h"
#include "rpcrdma/xdr/reduced_stream.h"
#include "rpcrdma/xdr/xdr_writer.h"

namespace stagecoach::rpcrdma::internal {

struct EncodedMessage {
  size_t size = 0;              // bytes of the buffer that are the message without its eligible items
  EligibleItems items;          // in memory of whoever wrote them
  uint64_t longest_inside = 0;  // XdrWriter::longest_inside
};

// Every item that is marked eligible may leave the message.
inline constexpr size_t kAnyEligible = SIZE_MAX;

// Has `write` write a message into `*buffer`, whatever that has of size and content, and enlarges it until the message
// fits; `write` runs again then, so it has no side effects. The first `eligible_max` items that are marked eligible
// stay out of the buffer. Empty when the rest is longer than `bytes_max`, which is as far as the buffer grows, or when
// XDR cannot count an item.
std::optional<EncodedMessage> EncodeMessage(std::vector<std::byte>* buffer, size_t bytes_max, size_t eligible_max,
                                            FunctionRef<void(XdrWriter&)> write);

}  // namespace stagecoach::rpcrdma::internal
