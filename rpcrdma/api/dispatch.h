// What the two ends that serve calls, a server and the reverse direction of a client, do alike with a call that came
// in.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>

#include "rpcrdma/api/request_internal.h"
#include "rpcrdma/binding/binding.h"

namespace stagecoach::rpcrdma::internal {

// Who is to serve a call, or else its answer; neither: it is no call, and nobody answers it.
struct Verdict {
  Service* service = nullptr;
  std::optional<ReplyHeader> reply;
  AuthStat denied = AuthStat::kOk;  // what the answer says of its credential or verifier
};

// Reads the RPC header of a call from state.args into state.header. `services` are by program.
Verdict Judge(const std::map<uint32_t, Service*>& services, uint32_t xid, RequestState& state);

// Of such a call, once it is known who serves it: arguments may come by chunk, and results go by chunk, as far as the
// Binding of its program lists them [5666bis:6#1]; `state` knows it from then on. A call with more chunks than that is
// not executed: its answer, as the Binding says [5666bis:6#2]. A chunk for the wrong one of its arguments is for the
// reader to find.
std::optional<AcceptStat> Bind(const BindingRegistry& bindings, const ReducedStream& stream, RequestState& state);

// Copies the items' bytes and has them refer to the copy.
std::shared_ptr<const void> CopyItems(EligibleItems* items);

}  // namespace stagecoach::rpcrdma::internal
