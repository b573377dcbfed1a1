// The receiving end of reduction: a received message as one XDR stream, its chunk data in place and not copied.
//
// draft-ietf-nfsv4-rfc5666bis-01 sections 4.4.4, 4.4.5 and 5.2. Pure functions over views; the result is read with
// XdrReader, which checks that chunks stand where items are eligible and that counts agree with chunk sizes.
#pragma once

#include <span>

#include "base/bytes.h"
#include "rpcrdma/wire/validate.h"
#include "rpcrdma/xdr/reduced_stream.h"

namespace stagecoach::rpcrdma {

// The stream of a received call. `call` comes from ValidateCall; `chunk_data[i]` holds the data pulled for
// call.chunks[i], all of it. When the call is long, chunk_data[0] is the message and `inline_message` is not looked at.
ReducedStream AssembleCall(const CallChunks& call, ConstBytes inline_message, std::span<const ConstBytes> chunk_data);

// The stream of a received reply, validated by ValidateReply. `result_memory[i]` is the memory offered as Write chunk
// i, and `reply_memory` that of the Reply chunk; both as offered, the header says how much of them was filled. They are
// mutable because a peer may leave a gap inside a chunk, which is then closed in place [5666bis:4.4.5#1] [5666:3.4#7].
// `reads` are the reply's Read chunks, and `read_data[i]` is what was read for reads.chunks[i].
ReducedStream AssembleReply(const Header& header, ConstBytes inline_message, const ChunkLists& offered,
                            std::span<const MutableBytes> result_memory, MutableBytes reply_memory,
                            const CallChunks& reads = {}, std::span<const ConstBytes> read_data = {});

// Tells the decoder of a message what its sender may have done by this profile.
void ApplyProfile(const ProtocolProfile& profile, const Padding& padding, ReducedStream* stream);
// The padding of a message with this header; none where the profile looks for none.
Padding PaddingOf(const ProtocolProfile& profile, const Header& header);

// Makes a received message that begins otherwise begin with this XID (ProtocolProfile::header_xid_prevails): whoever
// decodes it, and answers it, sees one XID. It is longer than that, and lies in memory of this end's own.
void PutXid(ConstBytes message, uint32_t xid);

// Moves the filled part of each segment up against the one before it and returns the concatenation. `memory` is what
// `offered` covers, in order; returned[i].length <= offered[i].length.
ConstBytes CompactChunk(MutableBytes memory, std::span<const Segment> offered, std::span<const Segment> returned);

}  // namespace stagecoach::rpcrdma
