// The versions that we speak, as values: a codec with its sizes. For whoever learns the version of a connection only
// when it runs; what knows it beforehand calls the codec itself.
#pragma once

#include <cstdint>

#include "base/cursor.h"
#include "base/result.h"
#include "rpcrdma/wire/header.h"

namespace stagecoach::rpcrdma {

struct WireVersion {
  HeaderLayout layout;
  // As DecodeHeaderV1 and DecodeHeaderV2, and so on. Version 1 has no extensions, and looks at none.
  Result<Header, HeaderFault> (*decode)(ByteReader& in, const ChunkListLimits& limits, const Extensions& extensions);
  void (*encode)(const Header& header, ByteWriter& out, const Extensions& extensions);
  size_t (*encoded_size)(const Header& header);
};

// Null: not one that we speak. The value lasts for ever.
const WireVersion* FindWireVersion(uint32_t version);

}  // namespace stagecoach::rpcrdma
