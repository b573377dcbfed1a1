// What a server does with the header types that an extension of version 2 adds: draft-cel-nfsv4-rpcrdma-version-two-09
// section 9.1, rpcrdma/wire/extensions.h. An extension is its author's alone: neither the core nor the XDR of the base
// protocol is changed or built again for it [v2:9+2], and who does not know it works with whoever does [v2:1#1].
// examples/extension.cc is a whole one, and docs/extensions.md goes through it.
//
// Whether a peer takes a header type is what the peer's properties say (Client::peer_properties, and here
// ExtensionRequest::properties), or what came of trying: RDMA2_ERR_INVAL_HTYPE [v2:9.1+2].
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/result.h"
#include "rpcrdma/api/service.h"
#include "rpcrdma/wire/header.h"

namespace stagecoach::rpcrdma {

// A message that a client has sent. Valid while the handler runs.
struct ExtensionRequest {
  const Extension& message;
  ClientId client = 0;
  // What the client has said of itself (RDMA2_CONNPROP); null: nothing yet.
  const PropertySet* properties = nullptr;
};

// [v2:9.3+4] The header that goes back, of a type that the extensions have and no RPC message follows, no longer than
// the client can receive; or an error code of theirs, for RDMA2_ERROR. What is neither is the handler's mistake, and
// answered with RDMA2_ERR_SYSTEM.
using ExtensionAnswer = Result<Extension, ErrOther>;

// Answers before it returns: there is no later. On the loop's thread, while the connection takes in what has come. It
// may end Requests, call clients back and stop the Server, all of which then happens when it has returned; it must not
// destroy the Server, which ends the program.
using ExtensionHandler = std::function<ExtensionAnswer(const ExtensionRequest&)>;

}  // namespace stagecoach::rpcrdma
