// CallError: why a connection could not be made or a call has no result. Typed for programs, one line for people.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "rpcrdma/onc/rpc_message.h"

namespace stagecoach::rpcrdma {

struct CallError {
  enum class Kind : uint8_t {
    kOptions,  // an option is out of its range; nothing was attempted
    // Making the connection.
    kResolve,      // the host name or address means nothing
    kRefused,      // nobody listens there
    kRejected,     // somebody listens, and declined: not RPC-over-RDMA, or full (a Server of ours says what it lacks)
    kVersion,      // it speaks RPC-over-RDMA, of no version that this end may: `versions` are its own
    kUnreachable,  // no route, no device, or no answer in time
    kDevice,       // this end's RDMA device refused to create what the connection needs
    // Before the call was sent: it was not executed.
    kNotConnected,
    kQueueFull,  // more calls wait for credits than ClientOptions::queued_calls_max
    kTooLarge,   // arguments longer than ClientOptions::message_bytes_max, or than XDR can count; or more than the
                 // connection has a way for: with a server that reads nothing (ConnectionConfiguration::read_chunks),
                 // more than goes inline
    kMemory,     // the device would not register the call's memory, or some of that is outside its registered_memory;
                 // with `sent`, memory that its reply was to be read into
    kNoCredit,   // waited for a credit for as long as its timeout
    kNotServed,  // a reverse call to a client that has said that it serves none
    kNotSpoken,  // an extension's message of a type that this end does not know, or on a connection of version 1
    // After it was sent, or while it waited for a credit: `sent` tells.
    kTimedOut,  // and the connection was closed, as no late reply may meet memory that is not the call's any more; but
                // not for a reverse call, which has no memory that the peer could reach
    kConnectionLost,
    kCancelled,  // by the caller
    kClosed,     // this end closed the client with the call outstanding
    // The peer answered, and repeating the call would not help.
    kTransport,  // RDMA_ERROR: `transport_error` says which, `message` what it means
    kBadReply,   // the reply breaks the rules: header, chunk lists, or RPC message
    kRpc,        // accepted and not executed: `accept_stat` says why
    kDenied,     // rejected: RPC version or authentication
  };

  Kind kind = Kind::kConnectionLost;
  AcceptStat accept_stat = AcceptStat::kSuccess;  // with kRpc
  AuthStat auth_stat = AuthStat::kOk;             // with kDenied; kOk when the RPC version was denied
  // What the server offers: kRpc with kProgMismatch, kDenied for the RPC version, kVersion and ERR_VERS.
  VersionRange versions;
  // With kTransport: the code. In version 1: 1 (ERR_VERS), 2 (ERR_CHUNK). In version 2: rdma_err of
  // draft-cel-nfsv4-rpcrdma-version-two-09 section 6.4, or an extension's.
  uint32_t transport_error = 0;
  // The version of RPC-over-RDMA that the answer came in, 1 or 2, with every error that is one: so which code
  // `transport_error` is. 0: no answer came, or none that could be read.
  uint32_t rpcrdma_version = 0;
  int system_error = 0;  // errno, where one is behind it, else 0
  // Of a call: it went out, so the server may have executed it. Of a Session's call: on any of its connections,
  // whatever `kind` it ends with. Of a reverse call that this end cancelled or closed, and of a call that ~Session
  // ended: it may have gone out.
  bool sent = false;
  // The whole line: what was attempted, and why it failed. "connect to 127.0.0.1:20049: connection refused".
  std::string message;

  const std::string& ToString() const { return message; }
  // Whether the connection is gone: a new one is needed before the next call.
  bool connection_gone() const {
    return kind <= Kind::kNotConnected || kind == Kind::kTimedOut || kind == Kind::kConnectionLost ||
           kind == Kind::kClosed;
  }
};

std::string_view ToString(CallError::Kind kind);

}  // namespace stagecoach::rpcrdma
