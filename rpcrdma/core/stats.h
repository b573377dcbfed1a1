// What one connection did, counted by the engines and the driver. Plain values, summed over connections with +=.
#pragma once

#include <cstdint>

namespace stagecoach::rpcrdma {

struct ConnectionStats {
  // Calls by how they travelled, counted when the message is sent (requester) or was received (responder). A call with
  // both Read and Write chunks counts in both.
  uint64_t calls = 0;
  uint64_t calls_inline = 0;          // neither chunk nor special chunk in either direction
  uint64_t calls_by_read_chunk = 0;   // eligible arguments moved by RDMA Read
  uint64_t calls_by_write_chunk = 0;  // eligible results by RDMA Write; counted when a Write chunk is offered
  uint64_t calls_long = 0;            // the call itself in a Position-Zero Read chunk
  uint64_t replies_long = 0;          // the reply itself in a Reply chunk
  uint64_t replies = 0;               // matched and well formed, or sent
  uint64_t errors = 0;                // RDMA_ERROR received, or sent

  // Bytes of eligible data that went from memory to memory without passing through a Send: Read and Write chunks.
  uint64_t bytes_placed_by_read = 0;
  uint64_t bytes_placed_by_write = 0;

  uint32_t credits_granted = 0;  // the latest grant seen (requester) or made (responder)

  uint64_t registrations = 0;         // memory made reachable, or usable by the device, for one call
  uint64_t invalidations_local = 0;   // undone by this end
  uint64_t invalidations_remote = 0;  // undone by the peer's Send With Invalidate
  uint64_t sends = 0;
  uint64_t receives = 0;
  uint64_t reads = 0;   // RDMA Read requests posted
  uint64_t writes = 0;  // RDMA Writes posted

  // A peer's mistakes, all survived.
  uint64_t unknown_xids = 0;  // replies to no call of ours, or to one already answered
  uint64_t malformed = 0;     // messages whose header or chunk lists were refused
  uint64_t ignored = 0;       // RDMA_DONE and other messages that are dropped by rule

  ConnectionStats& operator+=(const ConnectionStats& other) {
    calls += other.calls;
    calls_inline += other.calls_inline;
    calls_by_read_chunk += other.calls_by_read_chunk;
    calls_by_write_chunk += other.calls_by_write_chunk;
    calls_long += other.calls_long;
    replies_long += other.replies_long;
    replies += other.replies;
    errors += other.errors;
    bytes_placed_by_read += other.bytes_placed_by_read;
    bytes_placed_by_write += other.bytes_placed_by_write;
    credits_granted += other.credits_granted;
    registrations += other.registrations;
    invalidations_local += other.invalidations_local;
    invalidations_remote += other.invalidations_remote;
    sends += other.sends;
    receives += other.receives;
    reads += other.reads;
    writes += other.writes;
    unknown_xids += other.unknown_xids;
    malformed += other.malformed;
    ignored += other.ignored;
    return *this;
  }
};

}  // namespace stagecoach::rpcrdma
