// How failures of the layers below become CallErrors: one line that says what was attempted, where, and why it failed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "rpcrdma/api/error.h"
#include "rpcrdma/core/requester.h"
#include "rpcrdma/verbs/connection.h"

namespace stagecoach::rpcrdma::internal {

// What failed, for messages.
struct CallName {
  uint32_t program = 0;
  uint32_t version = 0;
  uint32_t procedure = 0;
  const std::string* peer = nullptr;
  // No call, but an extension's message, of this type; the numbers above are then of no meaning.
  std::optional<uint32_t> extension = std::nullopt;
};

// A connection that was not made. `what` names the attempt: "connect to 127.0.0.1:20049".
CallError ConnectError(const std::string& what, const CloseCause& cause);
// Nothing was attempted, because of options. `fault` is of options.h.
CallError OptionsError(const std::string& what, std::string_view fault);
// A connection that ended with `outstanding` calls; `cause` may be unknown yet.
CallError LostError(const std::string& peer, const CloseCause& cause, size_t outstanding);
CallError RefusedCall(SubmitRefusal refusal, const CallName& name);
// Its arguments are longer than this end makes messages, in bytes, or than XDR can count.
CallError TooLargeCall(const CallName& name, uint64_t bytes_max);
// `lost` is the error of the connection, for calls that end with it.
CallError FailedCall(const CallFailure& failure, const CallName& name, const CallError& lost,
                     const Extensions& extensions = {});
// The server speaks RPC-over-RDMA in these versions, of which none may be used. `what` as for ConnectError.
CallError VersionError(const std::string& what, const ErrVers& spoken, const TransportVersions& wanted);
// The RPC layer's refusals. `header.success()` is false.
CallError RpcError(const ReplyHeader& header, const CallName& name);
CallError BadReply(const std::string& why, const CallName& name);
// "call of program 100003 version 3 procedure 0 at 10.0.0.1:20049: WHY".
CallError NamedError(CallError::Kind kind, const CallName& name, std::string_view why);

}  // namespace stagecoach::rpcrdma::internal
