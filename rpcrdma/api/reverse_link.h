// The reverse direction at the server: ReverseLink is that of one connection, ReverseHub knows all of one server, and
// ReverseCalls is what stands behind a ReverseClient. See reverse_client.h.
//
// A call belongs to its ReverseCalls from beginning to end, message included. While it is with a connection, that
// connection's Requester has a copy; when the connection is lost, the call is where it was before. Memory that the
// client may reach is held by the connection as well, and a call whose results are written to memory of the caller's
// ends when that cannot happen any more, whoever has let go of it before.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/event_loop.h"
#include "base/trace.h"
#include "rpcrdma/api/call_message.h"
#include "rpcrdma/api/errors_internal.h"
#include "rpcrdma/api/reverse_client.h"
#include "rpcrdma/binding/binding.h"
#include "rpcrdma/core/connection_terms.h"
#include "rpcrdma/core/duplex.h"
#include "rpcrdma/core/requester.h"
#include "rpcrdma/core/xid.h"
#include "rpcrdma/verbs/connection.h"

namespace stagecoach::rpcrdma::internal {

class ReverseCalls;
class ReverseLink;

class ReverseHub {
 public:
  ReverseHub(EventLoop& loop, uint32_t first_xid, TraceSink* trace, std::string name)
      : loop_(loop), xids_(first_xid), trace_(trace), name_(std::move(name)) {}

  EventLoop& loop() { return loop_; }
  // One source for all connections of the server, so that a call that changes its connection meets no other with its
  // XID.
  XidSource& xids() { return xids_; }
  // One that no connection knows, be it of a call that was cancelled and is not answered.
  uint32_t NextXid();

  void Add(ClientId client, ReverseLink* link) { links_[client] = link; }
  // The connection has ended, or is about to: nothing is bound to it any more.
  void Remove(ClientId client);
  ReverseLink* Find(ClientId client) const;

  void Add(std::weak_ptr<ReverseCalls> calls);
  // No client will come back: calls that wait for one end with kClosed. Those with a connection go on.
  void Stop();
  // Ends all calls, with kClosed and from the loop.
  void Shutdown();
  bool stopping() const { return stopping_; }

  // Of calls whatever their connection.
  void TraceEvent(std::string_view event, std::initializer_list<TraceFact> facts) const {
    Trace(trace_, loop_.Now(), name_, event, facts);
  }

 private:
  std::vector<std::shared_ptr<ReverseCalls>> Everyone();

  EventLoop& loop_;
  SequentialXids xids_;
  TraceSink* const trace_;
  const std::string name_;
  std::map<ClientId, ReverseLink*> links_;
  std::vector<std::weak_ptr<ReverseCalls>> calls_;
  bool stopping_ = false;
};

class ReverseLink {
 public:
  struct Options {
    DuplexShares shares;
    ConnectionTerms* terms = nullptr;  // outlives the object
    PlanLimits limits;                 // sizes are version 1's
    bool readable = false;             // the client may Read from this end (IRD)
    std::string name;
    TraceSink* trace = nullptr;
  };
  // `changed` is to run after commands that were not given from within OnProgress. `responder` is of the same
  // connection, not started; it, the hub's source of XIDs and `connection` outlive the object.
  ReverseLink(EventLoop& loop, const Options& options, Connection& connection, Responder& responder, XidSource& xids,
              UniqueFunction<void()> changed);

  // Of both directions.
  ConnectionEngine* engine() { return &duplex_; }
  void Start() { duplex_.Start(); }

  // A call as its ReverseCalls keeps it.
  struct Call {
    std::weak_ptr<ReverseCalls> owner;
    CallId id = 0;  // the owner's
    const CallMessage& message;
    std::shared_ptr<const void> memory;  // of its items
    uint32_t xid = 0;
    Instant deadline;
  };
  // What is left to do of a call that is over, once nobody reaches its memory any more.
  struct Ending {
    ReverseClient::CallHandler handler;
    Result<Reply, CallError> result;
  };

  // A number for Cancel.
  Result<uint64_t, SubmitRefusal> Submit(const Call& call);
  // The owner has no part in it any more; `ending`, if there is one, is for when its memory is safe.
  void Cancel(uint64_t number, std::optional<Ending> ending);
  // The connection is gone, and with it whoever could reach memory: endings that waited for that follow from the loop.
  void EndCancelled();
  // Whether a call of this XID was sent and not answered, cancelled or not.
  bool Knows(uint32_t xid) const { return requester_.Knows(xid); }

  // Bytes of the longest call from now on; no more than the Send buffers have. None is outstanding.
  void SetSendInline(uint32_t send_inline);
  // Hands out what has ended.
  void OnProgress();
  // Why calls will be lost; before they are.
  void OnClosing(const CloseCause& cause);

  const std::string& peer() const { return peer_; }
  // A client that has said nothing yet has not said which version it speaks either.
  bool usable() const { return connection_.established() && terms_.settled(); }
  bool has_outcome() const { return requester_.has_outcome(); }
  // Calls that are not over.
  size_t outstanding() const { return requester_.outstanding(); }
  const ConnectionStats& stats() const { return requester_.stats(); }
  std::string DebugString() const { return requester_.DebugString(); }

 private:
  struct Entry {
    std::weak_ptr<ReverseCalls> owner;
    CallId id = 0;
    CallId in_requester = 0;
    std::shared_ptr<const void> memory;
    std::optional<Ending> ending;
  };

  EventLoop& loop_;
  const ConnectionTerms& terms_;
  Connection& connection_;
  std::string peer_;
  UniqueFunction<void()> changed_;
  Requester requester_;
  Duplex duplex_;
  std::map<uint64_t, Entry> entries_;  // by cookie
  uint64_t next_cookie_ = 1;
  std::optional<CallError> lost_;
};

class ReverseCalls final : public std::enable_shared_from_this<ReverseCalls> {
 public:
  using Ending = ReverseLink::Ending;

  ReverseCalls(std::shared_ptr<ReverseHub> hub, ReverseClientOptions options)
      : hub_(std::move(hub)), loop_(hub_->loop()), options_(options) {}
  ~ReverseCalls();

  // --- For ReverseClient ---
  void Register(const Binding& binding) { bindings_.Add(binding); }
  bool Bind(ClientId connection);
  void Unbind() { link_ = nullptr; }
  bool bound() const { return link_ != nullptr; }
  CallId Call(const ProcedureId& procedure, ReverseClient::ArgsWriter args, const ReverseCallOptions& options,
              ReverseClient::CallHandler handler);
  void Cancel(CallId call);
  size_t outstanding() const { return calls_.size(); }
  size_t waiting() const;

  // --- For ReverseLink and ReverseHub ---
  // `lost` says why the connection ended, if it did. Empty: the call is not over, or has been for long.
  std::optional<Ending> OnOutcome(CallId call, CallOutcome& outcome, const CallError& lost);
  void OnLinkGone(ReverseLink* link);
  // End the calls that wait, or all, with kClosed and from the loop.
  void EndWaiting();
  void EndAll(bool connections_live);

 private:
  struct Pending {
    ProcedureId procedure;
    CallMessage message;
    std::shared_ptr<const void> memory;           // of the message's items
    SmallVector<MutableBytes, 2> result_buffers;  // the caller's
    uint32_t xid = 0;
    Instant deadline;
    bool sent = false;  // on an earlier connection
    ReverseLink* link = nullptr;
    uint64_t in_link = 0;
    ReverseClient::CallHandler handler;
  };
  using Calls = std::map<CallId, Pending>;

  // What it is refused with, if it is.
  std::optional<CallError> Encode(ReverseClient::ArgsWriter args, const ReverseCallOptions& options, Pending* pending);
  CallName NameOf(const Pending& pending) const {
    return {pending.procedure.program, pending.procedure.version, pending.procedure.procedure, &peer_};
  }
  CallError Error(CallError::Kind kind, const Pending& pending, std::string_view why) const;
  bool SubmitOrEnd(Calls::iterator call);
  void TraceWaits(const Pending& call) const;
  Result<Reply, CallError> ResultOf(const Pending& pending, CallOutcome& outcome, const CallError& lost) const;
  void EndLater(Calls::iterator call, CallError error);
  void LetGo(Pending&& call, CallError error);
  void RunLater(ReverseClient::CallHandler handler, CallError error);
  void ArmTimer();
  void OnTimer();

  const std::shared_ptr<ReverseHub> hub_;
  EventLoop& loop_;
  const ReverseClientOptions options_;
  BindingRegistry bindings_;
  std::string peer_ = "a client that has not come yet";
  ReverseLink* link_ = nullptr;
  Calls calls_;  // in the order in which they were made
  CallId next_id_ = 1;
  EventLoop::TimerId timer_ = 0;
  std::optional<Instant> timer_at_;
};

}  // namespace stagecoach::rpcrdma::internal
