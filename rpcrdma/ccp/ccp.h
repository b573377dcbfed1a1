// The Connection Configuration Protocol, RPC program 100417 version 1: the arguments and results of its one procedure.
//
// RFC 5666 section 6.2. The draft before it (draft-ietf-nfsv4-rpcrdma-00 section 6.2) has the same three words each
// way; it calls the first two maxcallsize and maxreplysize, and leaves the number of the program open, so whoever
// speaks it uses the one that was assigned later.
//
// Decoding is strict: three words, and nothing behind them. Every number can be said; what it means for a connection,
// and how far it is believed, is configuration.h's.
//
// Pure functions over values.
#pragma once

#include <cstdint>

#include "base/result.h"
#include "rpcrdma/xdr/xdr_reader.h"
#include "rpcrdma/xdr/xdr_writer.h"

namespace stagecoach::rpcrdma {

// [5666:6.2+1] [5666:6.2+8] [5666:12+6] [2004:6.2+1] [2004:6.2+9]
inline constexpr uint32_t kCcpProgram = 100417;
inline constexpr uint32_t kCcpVersion = 1;
// Of every program, by convention (RFC 5531 section 12.1); the documents do not mention it.
inline constexpr uint32_t kCcpNull = 0;
inline constexpr uint32_t kConfRdma = 1;

// config_rdma_req: what the client is going to do, and what it can take.
struct ConfigRdmaRequest {
  uint32_t max_call_size = 0;   // bytes of the longest Send that it would like to make
  uint32_t max_reply_size = 0;  // bytes of the longest Send that its Receives have room for
  uint32_t max_rdma_read = 0;   // RDMA Reads that may be in flight towards it

  friend bool operator==(const ConfigRdmaRequest&, const ConfigRdmaRequest&) = default;
};

// config_rdma_reply: what the server can take.
struct ConfigRdmaReply {
  uint32_t max_call_size = 0;  // bytes of the longest Send that its Receives have room for
  uint32_t align = 0;          // what it recommends opaque data of calls to be aligned to (RDMA_MSGP); 0: nothing
  uint32_t max_rdma_read = 0;  // RDMA Reads that may be in flight towards it

  friend bool operator==(const ConfigRdmaReply&, const ConfigRdmaReply&) = default;
};

void Encode(const ConfigRdmaRequest& request, XdrWriter& out);
void Encode(const ConfigRdmaReply& reply, XdrWriter& out);

// `in` stands behind the RPC header, and nothing follows what is decoded.
Result<ConfigRdmaRequest, XdrFault> DecodeConfigRdmaRequest(XdrReader& in);
Result<ConfigRdmaReply, XdrFault> DecodeConfigRdmaReply(XdrReader& in);

}  // namespace stagecoach::rpcrdma
