// ReverseCaller: the calls that a service makes to its clients, in the reverse direction of their connections, and what
// may become of them.
//
// Each call that the service executes says on which connection its client is now, and has the service call it back as
// the scenario says (Client::reverse_call).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "rpcrdma/api/reverse_client.h"
#include "scenarios/runner/guarded_memory.h"
#include "scenarios/runner/model_call.h"
#include "scenarios/runner/program.h"
#include "scenarios/runner/stage.h"

namespace stagecoach::scenario {

class ReverseCaller {
 public:
  // Of one incarnation of the service on `host`. All outlive the object, but for the server, which may go first.
  // `next`: how many calls all incarnations have made.
  ReverseCaller(Stage& stage, const std::string& host, rpcrdma::Server& server, uint32_t* next, Tally* tally);
  // Whatever is outstanding is told of its end by nobody.
  ~ReverseCaller();

  // A call of a client is executed that came on this connection.
  void OnCall(uint64_t call, rpcrdma::ClientId connection);
  // A connection is gone.
  void OnClientGone(rpcrdma::ClientId connection);
  // The server stops: no call outlives that.
  void NoteStop() { stopping_ = true; }
  // It has stopped, and every call has been told.
  void CheckAllTold();
  // Calls that are not over.
  size_t outstanding() const { return pending_.size(); }
  std::string Describe() const;

 private:
  using Kind = rpcrdma::CallError::Kind;
  using Outcome = Result<rpcrdma::Reply, rpcrdma::CallError>;

  struct Peer {
    const Client* spec = nullptr;
    uint64_t number = 0;  // what the client's own calls begin with
    std::unique_ptr<rpcrdma::ReverseClient> calls;
    rpcrdma::ClientId connection = 0;
    Instant since{};                   // of its connection, as far as we know
    std::optional<Instant> last_gone;  // when one of its connections went
    uint32_t under_way = 0;
  };
  struct Pending : ModelCall {
    using ModelCall::ModelCall;
    Peer* peer = nullptr;
    Instant started{};
    Instant since{};  // of the connection it began with
    Duration patience{};
    bool bound = false;
    bool crowded = false;  // there were too many calls for one more
    bool cancelled = false;
    rpcrdma::CallId id = 0;
    EventLoop::TimerId cancel_timer = 0;
  };

  Peer* PeerOf(uint64_t call);
  void Begin(Peer& peer, const Call& spec);
  void OnOutcome(uint64_t number, Outcome outcome);
  // Why the error must not be; empty when it may.
  std::string Judge(const Pending& pending, const rpcrdma::CallError& error);
  std::string Who() const { return "service on " + host_; }

  Stage& stage_;
  const std::string host_;
  rpcrdma::Server& server_;
  uint32_t* const next_;
  Tally* const tally_;
  bool stopping_ = false;
  std::map<uint32_t, Peer> peers_;  // by the client's place in the scenario
  std::map<uint64_t, Pending> pending_;
  ColdStorage cold_;
  // What handlers hold that may run when this is gone.
  const std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace stagecoach::scenario
