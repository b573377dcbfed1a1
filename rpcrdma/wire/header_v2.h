// The version 2 transport header on the wire.
//
// draft-cel-nfsv4-rpcrdma-version-two-09 sections 3 to 6; its XDR, in a form that can be compiled, is rpcrdma_v2.x
// beside this file. The four header types of the base protocol [v2:5.2#1], and those of Extensions [v2:5.2#2].
//
// The codec is strict about structure and bounded, as version 1's is. Beyond structure it judges the values of
// properties that are known, which the document counts as parsing, and flags of extensions. Whether chunk lists make
// sense is for wire/validate.h; whether a message goes the way that its flag says, for CheckDirection.
//
// Left out: what the later text of the working group adds (continued messages, grants, other numbers).
// rpcrdma2_propsubset of section 4.1 is in the XDR and in no message.
//
// Pure functions over values; thread-compatible.
#pragma once

#include <cstdint>
#include <optional>

#include "base/bytes.h"
#include "base/cursor.h"
#include "base/result.h"
#include "rpcrdma/wire/extensions.h"
#include "rpcrdma/wire/header.h"
#include "rpcrdma/wire/v2_numbers.h"

namespace stagecoach::rpcrdma {

inline constexpr HeaderLayout kHeaderLayoutV2{
    .version = kRpcRdmaVersion2, .prefix_size = 20, .lists_prefix_size = 4, .has_flags = true};

// Decodes a header; `in` then stands at the RPC message, if one follows. Its version is 2. The flags are as received,
// reserved ones among them: those are for the caller to count, and to ignore (UnknownFlags).
//
// A fault's action is what the document has a receiver do: drop what has not even the prefix; ERR_VERS to another
// version; ERR_INVAL_HTYPE to a header type that is not known [v2:5.2#3]; ERR_BAD_XDR to what cannot be parsed
// [v2:5.3.3#4]. A requester sends no errors [v2:5.3.3#1], so there is no answer to what is marked as a response, nor
// ever to an error. What becomes of a connection whose peer's properties are malformed is ConnectionTerms' to say.
Result<Header, HeaderFault> DecodeHeaderV2(ByteReader& in, const ChunkListLimits& limits = {},
                                           const Extensions& extensions = {});

// The body must be one of version 2's. Flags that neither the base protocol nor `extensions` define are sent as zero.
// `out` fails when it is too small for EncodedSizeV2().
void EncodeHeaderV2(const Header& header, ByteWriter& out, const Extensions& extensions = {});
size_t EncodedSizeV2(const Header& header);

// The reserved flags in the header: nobody's that we know.
uint32_t UnknownFlags(const Header& header, const Extensions& extensions = {});

// How RPCRDMA2_F_RESPONSE disagrees with what the message is.
enum class DirectionFault : uint8_t {
  kReplyNotMarked,      // msg_type REPLY without the flag
  kCallMarkedResponse,  // msg_type CALL with it
  kNoDirection,         // msg_type neither of the two
  kErrorNotMarked       // RDMA2_ERROR without it: it claims to come from a requester, which sends none
};
const char* ToString(DirectionFault fault);

// Compares the flag of a version 2 header with the RPC message [v2:3.2#2] [v2:3.2#3], and with the header type
// [v2:3.2#5]. `message` is the RPC message, or its first eight bytes at least: what followed the header, or what a
// chunk turned out to hold. Of a shorter one, and where there is none yet, nothing is said.
//
// What a fault means is not the document's: the XID may be of either end, so a responder drops the message, and at a
// requester it is the bad reply of the call whose XID it has, if there is one (docs/decisions/0042).
std::optional<DirectionFault> CheckDirection(const Header& header, ConstBytes message);

}  // namespace stagecoach::rpcrdma
