// What one connection did, counted by the engines and the driver. Plain values, summed over connections with +=.
#pragma once

#include <cstdint>
#include <iterator>
#include <string_view>

#include "rpcrdma/core/histogram.h"

namespace stagecoach::rpcrdma {

struct ConnectionStats {
  // Calls by how they travelled, counted when the message is sent (requester) or was received (responder). A call with
  // both Read and Write chunks counts in both.
  uint64_t calls = 0;
  uint64_t calls_inline = 0;           // neither chunk nor special chunk in either direction
  uint64_t calls_by_read_chunk = 0;    // eligible arguments moved by RDMA Read
  uint64_t calls_by_write_chunk = 0;   // eligible results by RDMA Write; counted when a Write chunk is offered
  uint64_t calls_long = 0;             // the call itself in a Position-Zero Read chunk
  uint64_t replies_long = 0;           // the reply itself in a Reply chunk
  uint64_t replies_by_read_chunk = 0;  // with Read chunks of the responder's memory
  uint64_t dones = 0;                  // RDMA_DONE sent, or received for such a reply
  uint64_t replies = 0;                // matched and well formed, or sent
  uint64_t errors = 0;                 // RDMA_ERROR received, or sent
  uint64_t resends = 0;                // version 2: calls sent again because of an RDMA2_ERROR

  // Bytes of eligible data that went from memory to memory without passing through a Send: Read and Write chunks.
  uint64_t bytes_placed_by_read = 0;
  uint64_t bytes_placed_by_write = 0;

  uint32_t credits_granted = 0;  // the latest grant seen (requester) or made (responder)

  uint64_t registrations = 0;          // memory made reachable, or usable by the device, for one call
  uint64_t invalidations_local = 0;    // undone by this end
  uint64_t invalidations_remote = 0;   // undone by the peer's Send With Invalidate
  uint64_t invalidations_unasked = 0;  // version 2: by a Send With Invalidate that no call had asked for
  // Memory of the program that is registered once for many calls (RegisteredMemory).
  uint64_t memory_registered = 0;  // once for each connection that used it
  uint64_t memory_reused = 0;      // pieces of calls and replies in it that needed no registration of their own
  uint64_t memory_not_reused = 0;  // ... that were registered for one call all the same
  uint64_t sends = 0;
  uint64_t receives = 0;
  uint64_t reads = 0;   // RDMA Read requests posted
  uint64_t writes = 0;  // RDMA Writes posted

  // A peer's mistakes, all survived.
  uint64_t unknown_xids = 0;      // replies to no call of ours, or to one already answered
  uint64_t malformed = 0;         // messages whose header or chunk lists were refused
  uint64_t ignored = 0;           // RDMA_DONE and other messages that are dropped by rule
  uint64_t grant_overruns = 0;    // more calls than were granted, of Receives that are shared; ended the connection
  uint64_t unknown_flags = 0;     // version 2: headers with reserved flags, which are passed over
  uint64_t properties_again = 0;  // version 2: RDMA2_CONNPROP after the first, which changes nothing
  uint64_t lengths_wrong = 0;     // Write chunks returned up to three bytes too long, and taken (requester)

  // The Connection Configuration Protocol (rpcrdma/ccp), at either end.
  uint64_t configured = 0;      // connections that it was applied to
  uint64_t not_configured = 0;  // calls of it that were refused, or not answered as they should

  // How long calls took, in microseconds. Requester: from Submit to the outcome, of calls that were answered.
  // Responder: from the arrival of a call to its answer's Send, RDMA_ERROR included.
  Histogram call_time;
  // Requester: from Submit to the Send, in microseconds; most of it is waiting for a credit.
  Histogram credit_wait;
  // Bytes of the messages sent inline, transport header included.
  Histogram send_bytes;

  ConnectionStats& operator+=(const ConnectionStats& other);
};

// A number of some statistics by name, for those who publish them.
template <typename Stats>
struct StatsCounter {
  std::string_view name;  // as in the metrics: lower case, underscores
  std::string_view help;
  uint64_t Stats::*value;
  bool gauge = false;  // goes up and down; otherwise it only grows
};

// What is added up and what is published.
inline constexpr StatsCounter<ConnectionStats> kStatsCounters[] = {
    {"calls", "Calls sent (requester) or received (responder)", &ConnectionStats::calls},
    {"calls_inline", "Calls without any chunk", &ConnectionStats::calls_inline},
    {"calls_by_read_chunk", "Calls whose eligible arguments moved by RDMA Read", &ConnectionStats::calls_by_read_chunk},
    {"calls_by_write_chunk", "Calls that offered Write chunks", &ConnectionStats::calls_by_write_chunk},
    {"calls_long", "Calls in a Position-Zero Read chunk", &ConnectionStats::calls_long},
    {"replies_long", "Replies in a Reply chunk", &ConnectionStats::replies_long},
    {"replies_by_read_chunk", "Replies with Read chunks of the responder's memory",
     &ConnectionStats::replies_by_read_chunk},
    {"dones", "RDMA_DONE sent (requester) or received for a reply with Read chunks (responder)",
     &ConnectionStats::dones},
    {"replies", "Replies received (requester) or sent (responder)", &ConnectionStats::replies},
    {"errors", "RDMA_ERROR received (requester) or sent (responder)", &ConnectionStats::errors},
    {"resends", "Calls of version 2 sent again because of an RDMA2_ERROR (requester)", &ConnectionStats::resends},
    {"placed_by_read_bytes", "Eligible bytes that moved by RDMA Read", &ConnectionStats::bytes_placed_by_read},
    {"placed_by_write_bytes", "Eligible bytes that moved by RDMA Write", &ConnectionStats::bytes_placed_by_write},
    {"registrations", "Memory made reachable, or known to the device, for one call", &ConnectionStats::registrations},
    {"invalidations_local", "Registrations undone by this end", &ConnectionStats::invalidations_local},
    {"invalidations_remote", "Registrations undone by the peer's Send With Invalidate",
     &ConnectionStats::invalidations_remote},
    {"invalidations_unasked", "Invalidations by a Send With Invalidate of version 2 that no call had asked for",
     &ConnectionStats::invalidations_unasked},
    {"memory_registered", "RegisteredMemory registered, once for each connection that used it",
     &ConnectionStats::memory_registered},
    {"memory_reused", "Pieces of calls and replies in RegisteredMemory that needed no registration of their own",
     &ConnectionStats::memory_reused},
    {"memory_not_reused",
     "Pieces of calls and replies in RegisteredMemory that were registered for one call all the same",
     &ConnectionStats::memory_not_reused},
    {"sends", "Sends posted", &ConnectionStats::sends},
    {"receives", "Receives completed", &ConnectionStats::receives},
    {"reads", "RDMA Reads posted", &ConnectionStats::reads},
    {"writes", "RDMA Writes posted", &ConnectionStats::writes},
    {"unknown_xids", "Replies to no outstanding call", &ConnectionStats::unknown_xids},
    {"malformed", "Messages whose header or chunk lists were refused", &ConnectionStats::malformed},
    {"ignored", "Messages dropped by rule", &ConnectionStats::ignored},
    {"grant_overruns", "Connections ended because the client sent more calls than were granted to it",
     &ConnectionStats::grant_overruns},
    {"unknown_flags", "Headers of version 2 with reserved flags", &ConnectionStats::unknown_flags},
    {"properties_again", "RDMA2_CONNPROP after the first, which changes nothing", &ConnectionStats::properties_again},
    {"lengths_wrong", "Write chunks returned up to three bytes too long, and taken", &ConnectionStats::lengths_wrong},
    {"configured", "Connections configured by CONF_RDMA", &ConnectionStats::configured},
    {"not_configured", "Calls of CONF_RDMA that came to nothing", &ConnectionStats::not_configured},
};

struct StatsHistogram {
  std::string_view name;
  std::string_view help;
  Histogram ConnectionStats::*value;
  bool microseconds;  // otherwise bytes
};
inline constexpr StatsHistogram kStatsHistograms[] = {
    {"call_time", "From a call's submission to its outcome (requester), from its arrival to its answer (responder)",
     &ConnectionStats::call_time, true},
    {"credit_wait", "From a call's submission to its Send (requester)", &ConnectionStats::credit_wait, true},
    {"send", "Messages sent inline, with their transport header", &ConnectionStats::send_bytes, false},
};

// A member that is in neither table, but for credits_granted, would be lost in sums.
static_assert(sizeof(ConnectionStats) == std::size(kStatsCounters) * sizeof(uint64_t) +
                                             std::size(kStatsHistograms) * sizeof(Histogram) + sizeof(uint64_t));

inline ConnectionStats& ConnectionStats::operator+=(const ConnectionStats& other) {
  for (const auto& each : kStatsCounters) this->*each.value += other.*each.value;
  for (const StatsHistogram& each : kStatsHistograms) this->*each.value += other.*each.value;
  credits_granted += other.credits_granted;
  return *this;
}

}  // namespace stagecoach::rpcrdma
