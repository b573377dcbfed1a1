#include "rpcrdma/wire/wire_version.h"

#include "rpcrdma/wire/header_v1.h"
#include "rpcrdma/wire/header_v2.h"

namespace stagecoach::rpcrdma {
namespace {

Result<Header, HeaderFault> DecodeV1(ByteReader& in, const ChunkListLimits& limits, const Extensions&) {
  return DecodeHeaderV1(in, limits);
}
void EncodeV1(const Header& header, ByteWriter& out, const Extensions&) {
  EncodeHeaderV1(header, out);
}

constexpr WireVersion kVersions[] = {
    {kHeaderLayoutV1, DecodeV1, EncodeV1, EncodedSizeV1},
    {kHeaderLayoutV2, DecodeHeaderV2, EncodeHeaderV2, EncodedSizeV2},
};

}  // namespace

const WireVersion* FindWireVersion(uint32_t version) {
  for (const WireVersion& candidate : kVersions) {
    if (candidate.layout.version == version) return &candidate;
  }
  return nullptr;
}

}  // namespace stagecoach::rpcrdma
