// ConnectionChecker: judges every RPC-over-RDMA connection of a run by its trace alone, as an observer who cannot look
// inside.
//
// The events and their facts are those of rpcrdma/core (what the engine decided) and rpcrdma/verbs (what the device was
// given and gave back, counted where it happens). A component that traces such events is one end of one connection;
// with
// "/reverse" behind its name, the reverse direction of it, which has calls and credits of its own, and shares all else.
//
//   credit.responder   a reply is posted while Receives posted + calls not yet answered >= credits granted + replies
//                      exposed
//   credit.requester   a call is posted while Receives posted >= calls in flight, and calls in flight + RDMA_DONEs that
//                      hold a credit <= credits granted, or it is the only one in flight (ARCHITECTURE section 7,
//                      docs/decisions/0043); there is an RDMA_DONE for each reply that exposes memory, and for no other
//   exposure.held      when nobody is at work, no reply is exposed
//   fence              when a call is over, none of its STags is valid
//   call.once          each call submitted is over once; it is sent again only when it was answered with an error of
//                      version 2, and with its XID
//   version.fixed      a connection has one version
//   call.late          no call is sent after its time-out
//   read.limit         no more RDMA Reads are under way than the connection allows
//   reply.lengths      what comes back is within what was offered, and the caller gets what the responder wrote
//   buffer.reuse       a Send buffer is not filled while a Send from it is outstanding
//   conservation       what a queue pair took is what it gave back and what it was destroyed with
//   connection.outlived  nothing is left of an end when the run is over
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "base/trace.h"
#include "scenarios/runner/violations.h"

namespace stagecoach::scenario {

class ConnectionChecker final : public TraceSink {
 public:
  // `violations` outlives the checker.
  explicit ConnectionChecker(Violations* violations) : violations_(violations) {}

  void OnEvent(Instant now, std::string_view component, std::string_view event,
               std::initializer_list<TraceFact> facts) override;
  // Everybody is there and has nothing to do.
  void CheckNothingExposed(Instant now);
  // Everything has been torn down: what is left is too much.
  void Finish(Instant now);

  // How often something was judged, for tests that want to know that it was.
  uint64_t judged() const { return judged_; }

 private:
  // By number, which is used again: the how-manieth registration of the end it is.
  using Registrations = std::map<uint64_t, uint64_t>;
  struct Call {
    uint64_t deadline = 0;  // ns; 0: none
    Registrations registrations;
    uint64_t returned = 0;
    bool in_flight = false;
    // Of one that is sent again: its XID, and what its last attempt had registered.
    std::optional<uint64_t> xid;
    Registrations before;
  };
  // A Send that the engine asked for.
  struct Planned {
    enum class What : uint8_t { kCall, kReply, kDone };
    What what = What::kCall;
    uint64_t granted = 0;     // and what replies that are exposed take
    uint64_t unanswered = 0;  // by the responder; or calls in flight
    uint64_t received = 0;    // in this direction
    bool reverse = false;
  };
  // What each direction has of its own.
  struct Direction {
    std::map<uint64_t, Call> calls;
    uint64_t in_flight = 0;
    bool tells_properties = false;  // an RDMA2_CONNPROP among them
    uint64_t granted = 1;
    uint64_t received = 0;  // messages, as far as known
    // Of a requester, RDMA_DONEs: those that it owes; sent so far; and of these so many are known to have been dealt
    // with, as a reply has come to a call that was sent later.
    uint64_t dones_owed = 0;
    uint64_t dones_sent = 0;
    uint64_t dones_dealt_with = 0;
    std::map<uint64_t, uint64_t> dones_before;  // each call in flight, by XID
    // Of a responder: replies that the requester has not said to be read.
    uint64_t exposed = 0;

    uint64_t dones() const { return dones_owed + dones_sent - dones_dealt_with; }
  };
  // One end of one connection.
  struct End {
    Direction forward;
    Direction reverse;
    std::map<uint64_t, Planned> planned;  // by send buffer, until posted
    std::set<uint64_t> slots;             // send buffers in use
    Registrations valid;
    uint64_t registered = 0;  // registrations so far
    uint64_t version = 0;     // as far as it is told
    bool established = false;
    bool destroyed = false;  // by its owner, in the middle
  };

  template <typename T>
  T Fact(std::string_view key) const;
  uint64_t Number(std::string_view key) const;
  std::string_view Word(std::string_view key) const;
  void Expect(bool holds, std::string_view rule, std::string_view what);
  // False: no event of a connection.
  bool Judge(End& end);
  void Plan(End& end, Direction& direction, const Planned& planned);
  static bool AnyValid(const End& end, const Registrations& registrations);
  void JudgeAnswer(Direction& direction);
  void JudgeSent(End& end, Direction& direction);
  void JudgePosted(End& end);
  void JudgeOver(End& end, Direction& direction);

  Violations* const violations_;
  uint64_t judged_ = 0;
  std::map<std::string, End, std::less<>> ends_;
  // The event being judged.
  Instant now_{};
  std::string_view event_;
  std::string_view component_;
  bool reverse_ = false;  // it is of the reverse direction
  std::initializer_list<TraceFact> facts_;
};

}  // namespace stagecoach::scenario
