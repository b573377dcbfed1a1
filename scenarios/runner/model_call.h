// ModelCall: one call of the model service: what it sends, the memory that it lends, and what its reply must be. Then
// what every maker of such calls asks of a scenario: which of its calls cannot but fail, or may.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "rpcrdma/api/client.h"
#include "scenarios/runner/guarded_memory.h"
#include "scenarios/runner/stage.h"

namespace stagecoach::scenario {

struct ModelCall {
  ModelCall() = default;
  // `lends`: whether the eligible result gets memory of its own; a reverse call's does not.
  ModelCall(uint64_t its_number, const Call& its_spec, bool lends = true);

  rpcrdma::ProcedureId procedure() const;
  // The arguments.
  void Write(rpcrdma::XdrWriter& args);
  // With the memory, which stays where it is for as long as this object is not moved.
  rpcrdma::CallOptions Options();
  // Of a call without memory for its result: upper bound of the whole reply, in bytes.
  uint32_t WholeReply() const;
  // Nothing has been written to the memory of the result.
  bool ResultUntouched() const { return result.Untouched(); }
  // `who` makes the call, in what is reported.
  void CheckReply(Stage& stage, const std::string& who, const rpcrdma::Reply& reply);
  // The call is over: looks at its memory, and has `cold` look again later.
  void Retire(Stage& stage, const std::string& who, ColdStorage* cold);
  // "client c, call 0x100000000, argument".
  std::string Label(const std::string& who, const char* what) const;

  uint64_t number = 0;
  Call spec;
  GuardedBuffer argument;
  GuardedBuffer plain_argument;
  GuardedBuffer result;
};

// The service that the client calls.
const Service& ServiceOf(const Scenario& scenario, const Client& client);

// Has a connection of the client serve the model service to its server, if the scenario says so. `service` is made when
// it is first needed, and outlives the connection.
void ServeReverse(Stage& stage, const Client& client, std::unique_ptr<ModelService>* service,
                  rpcrdma::ClientOptions* options);

// What the client says and follows on each of its connections, as the scenario has it.
void SetTerms(const Client& client, rpcrdma::ClientOptions* options);

// Whether the queues of the device leave room for a reverse direction beside a call. A client without that drops what
// its server calls, and nobody is told.
bool HasRoomForReverse(const Device& device);

// --- Calls that cannot but fail, or may ---

// The call needs more segments than a header has room for, or a longer message than the client sends.
bool TooLarge(const Scenario& scenario, const Client& client, const Call& call);
// The same for a call in the reverse direction, which may have no chunks: the call or its reply is too long to go
// inline.
bool TooLargeForReverse(const Client& client, const Service& service, const Call& call);
// A result is longer than the room that the caller offers, and it is neither read instead nor given more room; or it
// cannot be, for what it is and what the ends are. Or the service takes fewer chunks than that needs.
bool ReplyCannotTravel(const Scenario& scenario, const Client& client, const Call& call);
// The call has two Read chunks, one of which is its message, and the service takes one: in version 2 such a call ends.
bool EndsForReadChunks(const Client& client, const Service& service, const Call& call);
// A reply that is read may be longer than what the client has memory for, or than its device registers at once.
bool ReplyExceedsClient(const Client& client, const Service& service, const Call& call);
bool ReplyExceedsDevice(const Scenario& scenario, const Client& client, const Call& call);
// The service asks for more memory than the server may have.
bool ArgumentsExceedServer(const Service& service, const Call& call);
// Each call that the server may be at work for takes memory for its arguments and its result, in whole pages, and that
// of a reply is free when its Send has completed.
bool ServerMayLackMemory(const Scenario& scenario, const Client& client, const Call& call);
// The reply without its eligible result is longer than the server makes them.
bool ReplyExceedsServer(const Service& service, const Call& call);
// The reply is longer than the server's duplicate request cache keeps: a call that is sent again is told so.
bool ReplyIsNotKept(const Service& service, const Call& call);

}  // namespace stagecoach::scenario
