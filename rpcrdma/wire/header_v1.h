// The version 1 transport header on the wire.
//
// draft-ietf-nfsv4-rfc5666bis-01 (RFC 8166) sections 5.1 to 5.7; XDR in 5.6. All five message types. The two deprecated
// ones are decoded so that a receiver can treat them as told: RDMA_MSGP as RDMA_MSG [5666bis:5.7.1#2], RDMA_DONE by
// dropping it [5666bis:5.7.2#1]; we send neither [5666bis:5.7.1#1], but where an end follows an older document of
// version 1 (profile.h).
//
// The codec is strict about structure and bounded; it never fails on values that are merely unwise. Whether chunk lists
// make sense for a call or a reply is judged by wire/validate.h over the decoded value.
//
// Pure functions over values; thread-compatible.
#pragma once

#include "base/cursor.h"
#include "base/result.h"
#include "rpcrdma/wire/header.h"
#include "rpcrdma/wire/profile.h"

namespace stagecoach::rpcrdma {

inline constexpr HeaderLayout kHeaderLayoutV1{.version = kRpcRdmaVersion1, .prefix_size = 16};
// Sizes in bytes: of the fixed fields, and of RDMA_MSG and RDMA_NOMSG without chunks.
inline constexpr size_t kFixedFieldsSize = kHeaderLayoutV1.prefix_size;
inline constexpr size_t kMinHeaderSize = kHeaderLayoutV1.min_size();
// What RDMA_MSGP has beside them.
inline constexpr size_t kPaddingFieldsSize = 8;

// Decodes a header; `in` then stands at the RPC message, if one follows. Its version is 1, but for an ERR_VERS: Linux
// echoes the version it refuses, and what an error says about versions must stay readable to all versions
// [5666bis:9.1#1] [5666:4.1#6] [2004:4.1#4]. A fault's action is what the document has a responder do: drop
// [5666bis:8.3.3#2], ERR_VERS [5666bis:5.5#2], ERR_CHUNK [5666bis:5.5#4].
Result<Header, HeaderFault> DecodeHeaderV1(ByteReader& in, const ChunkListLimits& limits = {},
                                           const ProtocolProfile& profile = kRfc5666bis);

// The body must be one of version 1's. `out` fails when it is too small for EncodedSizeV1().
void EncodeHeaderV1(const Header& header, ByteWriter& out);
size_t EncodedSizeV1(const Header& header);

}  // namespace stagecoach::rpcrdma
