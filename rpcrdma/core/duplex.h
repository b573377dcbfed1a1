// Duplex: calls in both directions on one RPC-over-RDMA connection, of version 1 or 2.
//
// draft-ietf-nfsv4-rfc5666bis-01 section 8 (RFC 8167), draft-cel-nfsv4-rpcrdma-version-two-09 sections 3.2 and 8.4. A
// client calls its server as ever (the forward direction) and
// answers calls that the server makes (the reverse, or backward, direction). Each end has a Requester and a Responder,
// which know nothing of each other: XIDs [5666bis:8.1.4#1] and credits [5666bis:8.2.1#1] of the directions are
// separate. What they share is the queue pair, and this class divides it:
//
//   Receives  one queue, any of which may take a message of either direction. All are posted here; each engine counts
//             its share alone. The shares add up to the number of Receives, and each engine uses no more than its own,
//             so for the server
//               Receives posted + calls unanswered >= credits granted + replies expected to reverse calls
//             and for the client
//               Receives posted + reverse calls unanswered >= outstanding calls + reverse credits granted
//             (ARCHITECTURE section 7). Calls beyond the credits granted take Receives of the other direction: those
//             of a client that does so are missing for its own replies, those of a server are dropped at once.
//   Sends     buffers are divided; the engines take turns at the send queue, command by command, so that neither waits
//             for more than one request of the other. Receives go first: a Send may allow the peer to use them.
//
// Routing. The header is decoded once. In version 2 it says itself where it goes: RPCRDMA2_F_RESPONSE makes it the
// requester's, of whatever type it is, and otherwise it is the responder's [v2:3.2+1]. That holds for what is malformed
// behind the flag, too. In version 1, in this order:
//   no header can be made of it  the forward direction's, which answers or drops it as without this class: what cannot
//                                be parsed says nothing of its direction that could be believed
//   RDMA_ERROR                   the requester's. Errors go from responders to requesters, and each end has one
//                                requester, so the same XID in both directions is no ambiguity
//   RDMA_DONE                    the forward direction's
//   RDMA_NOMSG                   the forward direction's, but with a Read list it is a call whoever sent it: at a
//                                client, one to be refused
//   a message                    by its direction word, CALL or REPLY; one that is too short to have it, or has
//                                another, is the forward direction's
//
// A client of version 1 whose upper layer serves no reverse calls has a Requester alone, which drops them; and a server
// makes none before its upper layer says so: [5666bis:8.3.1#1] is decided above. A client that may speak version 2
// always has both, as it has to answer for its properties; before its probe is answered it reads both versions.
//
// The engine of the reverse direction moves no data in version 1. In version 2 it may (ReverseSupport::kGeneral), and
// either engine of an end may register memory, and the responder Read: what they ask for is told apart by its tag.
//
// Sans-IO, like the engines. Commands to them go to them directly; everything from below goes through here.
#pragma once

#include <cstdint>
#include <optional>

#include "rpcrdma/core/connection_terms.h"
#include "rpcrdma/core/engine.h"
#include "rpcrdma/core/requester.h"
#include "rpcrdma/core/responder.h"
#include "rpcrdma/core/ring.h"
#include "rpcrdma/core/stats.h"

namespace stagecoach::rpcrdma {

// The buffers of one connection, divided between the directions.
struct DuplexShares {
  BufferArena forward_send;
  BufferArena reverse_send;
  uint32_t forward_receives = 0;
  uint32_t reverse_receives = 0;
};
// Send buffers that `reverse` calls at a time would like, beside a Receive for each.
uint32_t ReverseSendBuffers(uint32_t reverse);
// For `forward` and `reverse` calls at a time; where the device has less, in proportion, but at least one each: credits
// are never zero [5666bis:8.2.1#2]. Empty when there is no room for that.
std::optional<DuplexShares> DivideForDuplex(const BufferArena& send, const BufferArena& receive, uint32_t forward,
                                            uint32_t reverse);

class Duplex final : public ConnectionEngine {
 public:
  enum class End : uint8_t { kClient, kServer };  // the client made the connection
  struct Config {
    End end = End::kClient;
    // What the ends have settled, the same that the engines have; outlives the object. Null: version 1, with
    // list_limits, which do not count otherwise.
    ConnectionTerms* terms = nullptr;
    ChunkListLimits list_limits;
  };

  // Both engines were made with `shares` and with all of `receive`, the one of the reverse direction with inline_only
  // and, where it is a responder and version 2 is spoken, with `reverse`. Neither is started yet. They outlive the
  // object.
  Duplex(const Config& config, Requester& requester, Responder& responder, const DuplexShares& shares,
         const BufferArena& receive);

  // --- Commands ---

  // Starts the engines and posts the Receives.
  void Start();

  // --- What is going on ---

  // Receives that are posted, or will be once their commands are taken.
  uint32_t posted_receives() const { return posted_receives_ + static_cast<uint32_t>(receives_.size()); }

  // --- ConnectionEngine ---

  void OnReceive(uint32_t slot, uint32_t length, std::optional<uint32_t> invalidated, Instant now) override;
  void OnSendDone(uint32_t slot, Instant now) override;
  void OnReadDone(uint32_t tag, Instant now) override;
  void OnInvalidated(uint32_t tag, Instant now) override;
  void OnDisconnected(Instant now) override;
  std::optional<Command> TakeCommand() override;
  bool Waiting() const override { return requester_.Waiting() || responder_.Waiting(); }
  std::optional<Instant> Deadline() const override;
  void OnDeadline(Instant now) override;

 private:
  enum class Side : uint8_t { kRequester, kResponder };

  Side forward() const { return config_.end == End::kClient ? Side::kRequester : Side::kResponder; }
  // In tags of commands: the requester's.
  static constexpr uint32_t kRequesterTag = 0x20000000u;

  Side Route(const Header& header, ConstBytes message) const;
  Side RouteOf(const HeaderFault& fault) const;
  void Collect(ConnectionEngine& engine, Ring<Command>* commands);

  const Config config_;
  std::optional<ConnectionTerms> own_terms_;
  ConnectionTerms& terms_;
  Requester& requester_;
  Responder& responder_;
  const uint32_t first_reverse_send_;  // slots from here on are the reverse direction's
  const BufferArena receive_;

  uint32_t posted_receives_ = 0;
  Ring<uint32_t> receives_;  // to be posted
  Ring<Command> calls_;      // of the requester
  Ring<Command> replies_;    // of the responder
  bool replies_next_ = false;
};

}  // namespace stagecoach::rpcrdma
