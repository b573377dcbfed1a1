// What CONF_RDMA (ccp.h) makes of a connection: from what each end has, to what it says, and from what the other end
// said to the limits that hold from then on. docs/decisions/0046 has what the documents leave open.
//
// Sizes are bytes of a whole Send, transport header included (RFC 5666 section 5). The server gives its Receives the
// size that it answers with before the answer can be seen, and the client's have had theirs since before it asked; so
// the call and its reply are the last two messages under the sizes that held before.
//
// What is not believed. Every connection carries messages of 1024 bytes before anything was agreed on, so a size below
// that is read as 1024 [5666:6.1#2]. An alignment that no message could be padded to is read as none.
//
// No RDMA Reads. The documents call maxrdmaread the Reads that may be in flight towards whoever says it, and let a 0
// forbid "requests that require RDMA Read to satisfy", which could be those that its sender would have to read as well
// as those that are read from it. So here a 0 says both: its sender is not read from, and reads nothing.
//
// Pure functions over values.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "base/time.h"
#include "base/trace.h"
#include "rpcrdma/ccp/ccp.h"

namespace stagecoach::rpcrdma {

// What every connection can carry before it is configured; bytes.
inline constexpr uint32_t kBasicMessageSize = 1024;

// Of one end of one connection: bytes of each buffer.
struct BufferSizes {
  uint32_t send = kBasicMessageSize;
  uint32_t receive = kBasicMessageSize;

  friend bool operator==(const BufferSizes&, const BufferSizes&) = default;
};

// --- The server ---

// The buffers to have for a client that asks for `request`: as large as that takes, in whole KiB, and no larger than
// `most`, which is in whole KiB as well.
BufferSizes BuffersFor(const ConfigRdmaRequest& request, const BufferSizes& most);

struct ServerTerms {
  ConfigRdmaReply reply;
  uint32_t send_inline = kBasicMessageSize;  // bytes of the longest Send to the client
  uint32_t reads = 0;                        // RDMA Reads in flight towards it; with 0 it is not read from at all
  bool exposes = false;                      // whether replies may be left for it to read

  friend bool operator==(const ServerTerms&, const ServerTerms&) = default;
};
// With the buffers that there are, whatever was wanted. `reads`: what this end may have in flight towards the client as
// far as devices and connection managers are concerned; `exposed_reads`: what the client may have towards this end;
// `align`: what Receives begin at multiples of, where data that is padded to that is understood, or 0.
ServerTerms TermsFor(const ConfigRdmaRequest& request, const BufferSizes& buffers, uint32_t reads,
                     uint32_t exposed_reads, uint32_t align);

// --- The client ---

// `reads`: RDMA Reads that the server may have in flight towards this end.
ConfigRdmaRequest RequestFor(const BufferSizes& buffers, uint32_t reads);

struct ClientTerms {
  uint32_t send_inline = kBasicMessageSize;     // bytes of the longest Send to the server
  uint32_t receive_inline = kBasicMessageSize;  // of the longest that it may make to this end
  bool read_chunks = true;                      // whether calls may have Read chunks
  uint32_t reads = 0;                           // RDMA Reads this end may have in flight towards the server
  uint32_t align = 0;                           // for the opaque data of calls; 0: none

  friend bool operator==(const ClientTerms&, const ClientTerms&) = default;
};
// `request` is what was asked with `buffers`. `server_send` is the longest Send that the server said it makes when the
// connection was made (private data), if it did: the protocol has no word for that.
ClientTerms TermsOf(const ConfigRdmaReply& reply, const ConfigRdmaRequest& request, const BufferSizes& buffers,
                    const std::optional<uint32_t>& server_send);

// --- Both ---

// What has come of it, as the events connection.configured and connection.not_configured of `component`.
struct ConfiguredFacts {
  uint32_t send_inline = 0;     // of this end
  uint32_t receive_inline = 0;  // likewise
  uint32_t reads = 0;           // from this end (server), towards it (client)
  uint32_t align = 0;
  bool new_buffers = false;  // the connection was given others
};
void TraceConfigured(TraceSink* sink, Instant now, std::string_view component, const ConfiguredFacts& facts);
// Server: a CONF_RDMA was not done. Client: it was not, and what held before goes on to hold.
void TraceNotConfigured(TraceSink* sink, Instant now, std::string_view component, std::string_view why);

}  // namespace stagecoach::rpcrdma
