// Reads what comes back for the probe with which a client of version 2 begins: the message of version 2 whose answer
// says which versions the server speaks.
//
// draft-cel-nfsv4-rpcrdma-version-two-09 section 7, draft-ietf-nfsv4-rfc5666bis-01 section 5.5. A server of version 1
// refuses version 2 with ERR_VERS in version 1's layout, and some echo the version word that they refuse: the message
// then says 2 and is laid out as 1. Version 2's own error has a flags word in front, which is 1, as the code of
// ERR_VERS is. Only the length tells them apart. In words, from the first:
//
//   5 and more  [xid  *  credit  4 | 2 ...]            version 1: ERR_CHUNK
//   7           [xid  *  credit  4 | 1 low high]       version 1: ERR_VERS
//   8 and more  [xid  *  credit  4 | 1 1 low high]     version 2: ERR_VERS
//   6, 8 ...    [xid  *  credit  4 | 1 code ...]       version 2: any other error
//
// The lengths hold for an answer to the probe and for nothing else: later, an error of version 2 may have seven words
// (READ_CHUNKS, WRITE_CHUNKS, SEGMENTS, REPLY_RESOURCE), all of which speak of chunks, and the probe has none.
#pragma once

#include <cstdint>

#include "base/bytes.h"
#include "base/result.h"
#include "rpcrdma/wire/header.h"

namespace stagecoach::rpcrdma {

struct ProbeAnswer {
  // In version 2's layout if header.flags is there, in version 1's otherwise; header.version is the word that was sent.
  Header header;
  size_t header_size = 0;  // bytes of the message that are the header

  friend bool operator==(const ProbeAnswer&, const ProbeAnswer&) = default;
};

// `message` is all that came in one Receive. Whether its XID is the probe's is for the caller to see. Of a fault only
// `kind` and the XID count: it says nothing of versions, and nothing is ever sent back for an answer.
Result<ProbeAnswer, HeaderFault> DecodeProbeAnswer(ConstBytes message, const ChunkListLimits& limits = {},
                                                   const Extensions& extensions = {});

}  // namespace stagecoach::rpcrdma
