#include "rpcrdma/wire/probe_answer.h"

#include <utility>

#include "rpcrdma/wire/common_prefix.h"
#include "rpcrdma/wire/header_v1.h"
#include "rpcrdma/wire/header_v2.h"

namespace stagecoach::rpcrdma {
namespace {

// Of ERR_VERS in version 1's layout.
constexpr size_t kErrVersWords = 7;
// The code of version 1's ERR_CHUNK, where version 2 has its flags: 2 would be an error that is not marked as a
// response.
constexpr uint32_t kErrChunkCode = 2;

Result<Header, HeaderFault> DecodeError(ByteReader& in, const CommonPrefix& prefix, const ChunkListLimits& limits,
                                        const Extensions& extensions) {
  const size_t words = in.remaining() / 4;
  ByteReader behind_prefix = in;
  behind_prefix.Skip(kCommonPrefixSize);
  const uint32_t first = behind_prefix.U32();
  if (first == kErrChunkCode) {
    in = behind_prefix;
    return Header{.xid = prefix.xid, .version = prefix.version, .credits = prefix.credits, .body = ErrChunk{}};
  }
  // [v2:7.2#1] [5666bis:9.1#1] Whatever version it gives as its own.
  if (first == kRdma2ErrVers && words == kErrVersWords) return DecodeHeaderV1(in, limits);
  return DecodeHeaderV2(in, limits, extensions);
}

Result<Header, HeaderFault> Decode(ByteReader& in, const ChunkListLimits& limits, const Extensions& extensions) {
  ByteReader copy = in;
  const Result<CommonPrefix, HeaderFault> prefix = DecodeCommonPrefix(copy);
  if (!prefix) return Err(prefix.error());
  if (prefix->version == kRpcRdmaVersion1) return DecodeHeaderV1(in, limits);
  if (prefix->type == kRdma2Error) return DecodeError(in, *prefix, limits, extensions);
  return DecodeHeaderV2(in, limits, extensions);
}

}  // namespace

Result<ProbeAnswer, HeaderFault> DecodeProbeAnswer(ConstBytes message, const ChunkListLimits& limits,
                                                   const Extensions& extensions) {
  ByteReader in(message);
  auto header = Decode(in, limits, extensions);
  if (!header) return Err(header.error());
  return ProbeAnswer{.header = std::move(*header), .header_size = in.position()};
}

}  // namespace stagecoach::rpcrdma
