#include "rpcrdma/api/error.h"

namespace stagecoach::rpcrdma {

std::string_view ToString(CallError::Kind kind) {
  using Kind = CallError::Kind;
  switch (kind) {
    case Kind::kOptions:
      return "options";
    case Kind::kResolve:
      return "resolve";
    case Kind::kRefused:
      return "refused";
    case Kind::kRejected:
      return "rejected";
    case Kind::kUnreachable:
      return "unreachable";
    case Kind::kVersion:
      return "version";
    case Kind::kDevice:
      return "device";
    case Kind::kNotConnected:
      return "not connected";
    case Kind::kQueueFull:
      return "queue full";
    case Kind::kTooLarge:
      return "too large";
    case Kind::kMemory:
      return "memory";
    case Kind::kNoCredit:
      return "no credit";
    case Kind::kNotServed:
      return "not served";
    case Kind::kNotSpoken:
      return "not spoken";
    case Kind::kTimedOut:
      return "timed out";
    case Kind::kConnectionLost:
      return "connection lost";
    case Kind::kCancelled:
      return "cancelled";
    case Kind::kClosed:
      return "closed";
    case Kind::kTransport:
      return "transport";
    case Kind::kBadReply:
      return "bad reply";
    case Kind::kRpc:
      return "rpc";
    case Kind::kDenied:
      return "denied";
  }
  return "unknown";
}

}  // namespace stagecoach::rpcrdma
