#include "rpcrdma/api/errors_internal.h"

#include <fmt/format.h>

#include "rpcrdma/wire/header.h"
#include "rpcrdma/wire/header_v2.h"
#include "rpcrdma/wire/v2_numbers.h"

namespace stagecoach::rpcrdma::internal {
namespace {

using Kind = CallError::Kind;

CallError Make(Kind kind, std::string message) {
  CallError error;
  error.kind = kind;
  error.message = std::move(message);
  return error;
}

std::string Describe(const CallName& name) {
  if (name.extension) return fmt::format("extension's message of type {:#x} to {}", *name.extension, *name.peer);
  return fmt::format("call of program {} version {} procedure {} at {}", name.program, name.version, name.procedure,
                     *name.peer);
}

// [v2:8.5+1] RDMA2_ERROR of version 2: what it says, its number, and what it means.
CallError RemoteError(const CallFailure& failure, uint32_t code, std::string_view meaning, const CallName& name,
                      const Extensions& extensions) {
  CallError error = Make(Kind::kTransport, fmt::format("RPC-over-RDMA: {} reported {} for the {}: {}", *name.peer,
                                                       ErrorText(failure.error, extensions), Describe(name), meaning));
  error.transport_error = code;
  return error;
}

CallError NotServed(const CallName& name) {
  return Make(Kind::kNotServed, fmt::format("{}: the client serves no calls", Describe(name)));
}

std::string Calls(size_t count) {
  return count == 1 ? "while 1 call was outstanding" : fmt::format("while {} calls were outstanding", count);
}

}  // namespace

CallError ConnectError(const std::string& what, const CloseCause& cause) {
  Kind kind = Kind::kUnreachable;
  switch (cause.kind) {
    case CloseCause::Kind::kRefused:
      kind = Kind::kRefused;
      break;
    case CloseCause::Kind::kRejected:
      kind = Kind::kRejected;
      break;
    case CloseCause::Kind::kDevice:
      kind = Kind::kDevice;
      break;
    case CloseCause::Kind::kLocal:
      kind = Kind::kClosed;
      break;
    default:
      break;
  }
  CallError error = Make(kind, fmt::format("{}: {}", what, cause.text));
  error.system_error = cause.error;
  return error;
}

CallError VersionError(const std::string& what, const ErrVers& spoken, const TransportVersions& wanted) {
  CallError error =
      Make(Kind::kVersion, fmt::format("{}: it speaks versions {} to {} of RPC-over-RDMA, of which this end "
                                       "may use none ({} to {})",
                                       what, spoken.low, spoken.high, wanted.low, wanted.high));
  error.versions = {spoken.low, spoken.high};
  return error;
}

CallError OptionsError(const std::string& what, std::string_view fault) {
  return Make(Kind::kOptions, fmt::format("{}: {}", what, fault));
}

CallError LostError(const std::string& peer, const CloseCause& cause, size_t outstanding) {
  const bool closed = cause.kind == CloseCause::Kind::kLocal;
  CallError error = Make(closed ? Kind::kClosed : Kind::kConnectionLost, "");
  error.system_error = cause.error;
  error.message = outstanding > 0 ? fmt::format("{}: {} {}", peer, cause.text, Calls(outstanding))
                                  : fmt::format("{}: {}", peer, cause.text);
  return error;
}

CallError RefusedCall(SubmitRefusal refusal, const CallName& name) {
  switch (refusal) {
    case SubmitRefusal::kNotConnected:
      return Make(Kind::kNotConnected, fmt::format("{}: not connected", *name.peer));
    case SubmitRefusal::kQueueFull:
      return Make(Kind::kQueueFull, fmt::format("{}: too many calls wait for a credit", Describe(name)));
    case SubmitRefusal::kNotServed:
      return NotServed(name);
    case SubmitRefusal::kNotSpoken:
      return Make(Kind::kNotSpoken,
                  fmt::format("{}: the connection is of version 1, or the type is not of this end's extensions",
                              Describe(name)));
    case SubmitRefusal::kTooLarge:
      break;
  }
  return Make(Kind::kTooLarge,
              fmt::format("{}: the connection has no way for so much: what may go inline, in how many segments, and "
                          "whether the other end reads any, leave none",
                          Describe(name)));
}

CallError TooLargeCall(const CallName& name, uint64_t bytes_max) {
  return Make(Kind::kTooLarge,
              fmt::format("{}: arguments too large: a message has {} bytes at most beside its eligible "
                          "items, and those no more than XDR can count",
                          Describe(name), bytes_max));
}

CallError FailedCall(const CallFailure& failure, const CallName& name, const CallError& lost,
                     const Extensions& extensions) {
  switch (failure.kind) {
    case CallFailure::Kind::kNoCredit:
      return Make(Kind::kNoCredit,
                  fmt::format("{}: timed out before the server granted a credit; it was not sent", Describe(name)));
    case CallFailure::Kind::kTimedOut:
      return Make(Kind::kTimedOut, fmt::format("{}: timed out; the connection was closed", Describe(name)));
    case CallFailure::Kind::kConnectionLost:
    case CallFailure::Kind::kClosed:
      return lost;
    case CallFailure::Kind::kCancelled:
      return Make(Kind::kCancelled, fmt::format("{}: cancelled", Describe(name)));
    case CallFailure::Kind::kMemory:
      return Make(Kind::kMemory, fmt::format("{}: the device refused to register its memory", Describe(name)));
    case CallFailure::Kind::kNotServed:
      return NotServed(name);
    case CallFailure::Kind::kTooLarge:
      return Make(Kind::kTooLarge,
                  fmt::format("{}: what the server says of itself leaves no way to send it", Describe(name)));
    case CallFailure::Kind::kErrVers: {
      CallError error =
          Make(Kind::kTransport, fmt::format("RPC-over-RDMA: {} reported ERR_VERS (it speaks versions {} to {})",
                                             *name.peer, failure.versions.low, failure.versions.high));
      error.versions = {failure.versions.low, failure.versions.high};
      error.transport_error = kRdma2ErrVers;
      return error;
    }
    case CallFailure::Kind::kErrChunk: {
      CallError error = Make(
          Kind::kTransport, fmt::format("RPC-over-RDMA: {} reported ERR_CHUNK for the {}", *name.peer, Describe(name)));
      error.transport_error = 2;
      return error;
    }
    case CallFailure::Kind::kErrBadXdr:
      return RemoteError(failure, kRdma2ErrBadXdr, "it could not parse the transport header", name, extensions);
    case CallFailure::Kind::kErrInvalHtype:
      return RemoteError(failure, kRdma2ErrInvalHtype, "it does not know the header type", name, extensions);
    case CallFailure::Kind::kErrReadChunks:
      return RemoteError(failure, kRdma2ErrReadChunks, "it takes no more Read chunks, nor the whole call as one", name,
                         extensions);
    case CallFailure::Kind::kErrWriteChunks:
      return RemoteError(failure, kRdma2ErrWriteChunks,
                         "it takes no more Write chunks, and the reply cannot do without", name, extensions);
    case CallFailure::Kind::kErrSegments:
      return RemoteError(failure, kRdma2ErrSegments, "it takes no chunk of more segments", name, extensions);
    case CallFailure::Kind::kErrWriteResource:
      return RemoteError(failure, kRdma2ErrWriteResource, "a result is longer than the memory offered for it", name,
                         extensions);
    case CallFailure::Kind::kErrReplyResource:
      return RemoteError(failure, kRdma2ErrReplyResource, "the reply is longer than the memory offered for it", name,
                         extensions);
    case CallFailure::Kind::kErrSystem:
      return RemoteError(failure, kRdma2ErrSystem, "a lasting failure of its own, which it does not name", name,
                         extensions);
    case CallFailure::Kind::kErrOther: {
      const auto* other = std::get_if<ErrOther>(&failure.error);
      return RemoteError(failure, other != nullptr ? other->code : 0, "no error of the base protocol", name,
                         extensions);
    }
    case CallFailure::Kind::kBadDirection:
      return BadReply(fmt::format("RPC-over-RDMA direction: {}", rpcrdma::ToString(failure.direction)), name);
    case CallFailure::Kind::kBadHeader:
      return BadReply("RPC-over-RDMA header: " + rpcrdma::ToString(failure.header), name);
    case CallFailure::Kind::kBadChunks:
      return BadReply(fmt::format("RPC-over-RDMA chunks: {}", rpcrdma::ToString(failure.chunk)), name);
  }
  return lost;
}

CallError RpcError(const ReplyHeader& header, const CallName& name) {
  if (const auto* denied = std::get_if<DeniedReply>(&header.body)) {
    CallError error = Make(Kind::kDenied, "");
    if (denied->stat == RejectStat::kRpcMismatch) {
      error.versions = denied->mismatch;
      error.message = fmt::format("RPC: {} speaks RPC versions {} to {} only", *name.peer, denied->mismatch.low,
                                  denied->mismatch.high);
    } else {
      error.auth_stat = denied->auth_stat;
      error.message = fmt::format("RPC: {} denied the call: {}", *name.peer, rpcrdma::ToString(denied->auth_stat));
    }
    return error;
  }
  const auto& accepted = std::get<AcceptedReply>(header.body);
  CallError error = Make(Kind::kRpc, "");
  error.accept_stat = accepted.stat;
  switch (accepted.stat) {
    case AcceptStat::kProgUnavail:
      error.message = fmt::format("RPC: program {} not available", name.program);
      break;
    case AcceptStat::kProgMismatch:
      error.versions = accepted.mismatch;
      error.message = fmt::format("RPC: program {} version {} not available (server has {} to {})", name.program,
                                  name.version, accepted.mismatch.low, accepted.mismatch.high);
      break;
    case AcceptStat::kProcUnavail:
      error.message =
          fmt::format("RPC: program {} version {} has no procedure {}", name.program, name.version, name.procedure);
      break;
    case AcceptStat::kGarbageArgs:
      error.message = fmt::format("RPC: {} could not decode the arguments of the {}", *name.peer, Describe(name));
      break;
    default:
      error.message =
          fmt::format("RPC: {} failed the {} with {}", *name.peer, Describe(name), rpcrdma::ToString(accepted.stat));
      break;
  }
  return error;
}

CallError BadReply(const std::string& why, const CallName& name) {
  return Make(Kind::kBadReply, fmt::format("bad reply from {}: {}", *name.peer, why));
}

CallError NamedError(CallError::Kind kind, const CallName& name, std::string_view why) {
  return Make(kind, fmt::format("{}: {}", Describe(name), why));
}

}  // namespace stagecoach::rpcrdma::internal
