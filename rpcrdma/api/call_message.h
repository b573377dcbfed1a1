// The message of a call, encoded once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "rpcrdma/api/client.h"
#include "rpcrdma/api/errors_internal.h"
#include "rpcrdma/xdr/reduced_stream.h"

namespace stagecoach::rpcrdma::internal {

struct CallMessage {
  std::vector<std::byte> buffer;
  size_t size = 0;      // bytes of `buffer` that are the message without its eligible items
  EligibleItems items;  // memory of the caller
  uint64_t longest_inside = 0;
  // What is provided for the reply, within what the Binding allows: see Requester::CallSpec.
  SmallVector<MutableBytes, 2> results;
  uint64_t reply_base_max = 0;
  bool direct_placement = true;
  std::shared_ptr<LastingMemory> lasting;

  ConstBytes bytes() const { return ConstBytes(buffer).first(size); }
};

// Encodes header (with an XID of zero) and arguments into message->buffer, whatever its size and content, enlarging it
// until they fit. What the call is refused with, if it is: kTooLarge when they are longer than `bytes_max`, kMemory
// when some of the call's memory is not in its registered memory, or is to be written and must not be.
std::optional<CallError> MakeCallMessage(const CallName& name, Client::ArgsWriter args, const CallOptions& options,
                                         const BindingRegistry& bindings, size_t bytes_max, CallMessage* message);

// A call that a Session makes through a Client: what it refers to stays the Session's.
struct EncodedCall {
  ProcedureId procedure;
  const CallMessage& message;  // copied
  const CallOptions& options;  // but its credentials, which are in the message, and its timeout
  std::optional<Instant> deadline;
  uint32_t xid = 0;
};

}  // namespace stagecoach::rpcrdma::internal
